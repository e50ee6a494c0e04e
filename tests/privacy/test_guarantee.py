"""A guarantee read back: damage is refused, and never makes epsilon smaller."""

import json
import math
import random

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from tests.privacy.oracles import gaussian_delta

from coterie.privacy.events import (
    Gaussian,
    Laplace,
    NonPrivate,
    Participation,
    SharedGaussian,
    Wishart,
)
from coterie.privacy.guarantee import (
    Guarantee,
    add_up,
    compose,
    describe_noise,
    show_delta,
    spent_together,
)

POISSON = Participation("poisson", 0.01, visible=True)


def stated(**changes):
    return Guarantee(
        events=(Gaussian(5.0),) * 10, participation=POISSON, relation="zero_out", delta=1e-5,
        clients=100,
    ).to_json() | changes  # fmt: skip


@pytest.mark.parametrize("rounds", [0, -3, 2.9, "10", None])
def test_strange_counts_are_refused(rounds):
    data = json.loads(json.dumps(stated()))
    data["events"][0]["rounds"] = rounds
    with pytest.raises((ValueError, TypeError)):
        Guarantee.from_json(data)


@pytest.mark.parametrize("changes", [{"cohort": "Visible"}, {"cohort": ""}, {"rounds": 9}])
def test_what_does_not_fit_is_refused(changes):
    with pytest.raises(ValueError, match=r"cohort|rounds"):
        Guarantee.from_json(stated(**changes))


def test_a_tiny_delta_is_refused_rather_than_searched_for_ever():
    for delta in (1e-90, 1e-31, 5e-324):
        with pytest.raises(ValueError, match="1e-30"):
            Guarantee(
                events=(Gaussian(5.0),), participation=POISSON, relation="zero_out", delta=delta,
                clients=100,
            )  # fmt: skip


def test_noise_is_described_beside_releases_without_any():
    assert describe_noise([NonPrivate()]) == describe_noise([]) == "no noise"
    assert describe_noise([NonPrivate(), Laplace(0.5), Laplace(0.25)]).endswith("e = 0.25 to 0.5")


def test_a_run_without_releases_describes_none():
    lines = Guarantee(
        events=(), participation=Participation("everyone"), relation="zero_out", delta=1e-5,
        clients=20,
    ).statement()  # fmt: skip
    assert lines.startswith("epsilon = 0: nothing is released")
    for untrue in ("take part", "observe every release", "before noise", "1 times"):
        assert untrue not in lines
    assert "one client" in lines and "Not covered: metrics" in lines


def number(text):
    return float(text.split("epsilon = ")[1].split()[0])


def one(event=Gaussian(5.0), rounds=10, delta=1e-5, relation="zero_out", who=None):  # noqa: B008
    return Guarantee(
        events=(event,) * rounds, participation=who or Participation("everyone"),
        relation=relation, delta=delta, clients=200,
    )  # fmt: skip


def test_runs_together_cost_no_less_than_any_of_them():
    fixed = Participation("fixed", 0.05)
    hidden = Participation("poisson", 0.01)
    for runs in (
        [one(who=hidden), one()],
        [one(), one(relation="replace")],
        [one(relation="replace", who=fixed)] * 2,
        [one(Laplace(0.2), 3, 0.0), one()],
        [one(Wishart(300, 0.5), 2), one()],
    ):
        together = number(spent_together(runs))
        assert together >= max(run.views["other_clients"] for run in runs)
        assert math.isfinite(together)


def test_a_printed_delta_is_never_below_the_true_one():
    """An epsilon at delta does not hold at a smaller one."""
    draw = random.Random(0)
    for delta in (draw.uniform(1, 10) * 10.0 ** draw.randint(-30, -1) for _ in range(2000)):
        shown = float(show_delta(delta))
        assert delta * (1 - 1e-11) <= shown <= delta * 1.01
    for text in ("1e-05", "0.00488", "8.11e-06", "1e-30", "0.5", "0"):
        assert show_delta(float(text)) == text
    some = one(delta=8.1004e-6)
    assert "at delta = 8.11e-06" in some.statement() and "plus 8.11e-06" in some.statement()
    assert "at delta 8.11e-06" in repr(some) and "8.11e-06" in spent_together([some])


# --- several runs on the same clients, against other people's accounts ---------------------------

SAMPLED = Participation("poisson", 0.1)


def closed(mu, delta):
    """Epsilon of mu-Gaussian DP."""
    return brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0, 100, xtol=1e-12)


def losses(noise, rounds, rate=1.0):
    """The losses of Gaussian rounds, by dp-accounting."""
    one = pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-4, use_connect_dots=True
    )
    return one.self_compose(rounds)


def test_runs_of_one_sampling_are_composed_once_each():
    runs = [one(Gaussian(8.0), 4), one(Gaussian(3.0), 6, who=SAMPLED), one(Gaussian(5.0), 9)]
    together, sampled = compose(runs)
    assert (len(together.events), len(sampled.events)) == (13, 6)
    mu = math.sqrt(4 / 64 + 9 / 25)
    epsilon, delta = add_up(runs)
    theirs = losses(3.0, 6, 0.1).get_epsilon_for_delta(1e-5)
    assert delta == 2e-5 and epsilon == pytest.approx(closed(mu, 1e-5) + theirs, rel=1e-3)
    # At a given delta, each sampling gets half of it.
    halves = losses(3.0, 6, 0.1).get_epsilon_for_delta(5e-6)
    epsilon, delta = add_up(runs, 1e-5)
    assert delta == 1e-5 and epsilon == pytest.approx(closed(mu, 5e-6) + halves, rel=1e-3)


def test_noise_in_shares_beside_central_noise_counts_as_the_noise_of_its_honest_shares():
    shares = one(SharedGaussian(4.0, 2.0, 8, 3), 9)
    runs = [one(Gaussian(8.0), 4), shares]
    epsilon, delta = add_up(runs)
    mu = math.sqrt(4 / 64 + 9 / 16)
    assert (epsilon, delta) == (pytest.approx(closed(mu, 1e-5), rel=1e-6), 1e-5)
    assert add_up(runs, 1e-6)[0] > epsilon
    # Of two runs in shares, no more clients may collude than the stricter one declares.
    fewer = one(SharedGaussian(4.0, 2.0, 9, 1), 9)
    (both,) = compose([shares, fewer])
    assert "at most 1 of them together" in both.statement()
    assert "at least 8 clients" in both.statement()


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_the_sum_over_samplings_bounds_their_composition(rate):
    """dp-accounting composes the losses of both samplings, in its worse direction."""
    runs = [one(Gaussian(4.0), 8), one(Gaussian(1.5), 20, who=Participation("poisson", rate))]
    exact = losses(4.0, 8).compose(losses(1.5, 20, rate))
    for given in (None, 1e-6):
        epsilon, delta = add_up(runs, given)
        assert exact.get_epsilon_for_delta(delta) <= epsilon * (1 + 1e-9)


def test_the_sum_over_relations_bounds_zero_out():
    """Zeroing a client moves the sum of a run under `replace` half as far as it accounts for."""
    runs = [one(Gaussian(4.0), 8), one(Gaussian(3.0), 8, relation="replace")]
    true = math.sqrt(8 / 16 + 8 / 9)
    for given in (None, 1e-6):
        epsilon, delta = add_up(runs, given)
        assert closed(true, delta) < epsilon
    assert add_up(runs[1:])[0] == pytest.approx(closed(2 * math.sqrt(8) / 3, 1e-5), rel=1e-6)


def test_deltas_of_runs_do_not_stretch_a_given_one():
    """A run at a large delta must not make the others look cheap at a smaller one."""
    small, large = one(Gaussian(3.0), 9), one(Gaussian(3.0), 9, delta=0.1)
    mu = math.sqrt(18) / 3
    assert add_up([small, large], 1e-5)[0] == pytest.approx(closed(mu, 1e-5), rel=1e-6)
    assert add_up([small, large])[0] < one(Gaussian(3.0), 9).epsilon


def test_impossible_outputs_add_up_beyond_delta():
    """Each run has an epsilon at delta 1e-5; both together have none, but at 2e-5."""
    part = one(Wishart(12, 0.87), 1)
    assert part.epsilon < math.inf and compose([part] * 2)[0].epsilon == math.inf
    assert add_up([part] * 2) == (2 * part.epsilon, 2e-5)
    assert add_up([part] * 2, 1e-5) == (math.inf, 1e-5)


def test_pure_runs_stay_pure():
    assert add_up([one(Laplace(0.25), 2, 0.0)] * 3, 0.0) == (pytest.approx(1.5), 0.0)
    assert add_up([], 1e-5) == (0.0, 1e-5) and add_up([]) == (0.0, 0.0)
