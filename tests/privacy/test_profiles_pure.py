"""Pure releases, releases of several kinds together, and sums that cannot be turned round."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from coterie.privacy.accounting import coalition_profile, epsilon_by_round, profile
from coterie.privacy.calibrate import calibrate, calibrate_event
from coterie.privacy.events import (
    Gaussian,
    Laplace,
    NonPrivate,
    Participation,
    Wishart,
    amplify,
    list_runs,
    read_runs,
)
from coterie.privacy.guarantee import Guarantee, spent_together
from coterie.privacy.profiles import GaussianProfile, PureProfile

EVERYONE = Participation("everyone")
POISSON = Participation("poisson", 0.2)
VISIBLE = Participation("poisson", 0.2, visible=True)
FIXED = Participation("fixed", 0.2)
VIEWS = [
    (EVERYONE, "zero_out"),
    (EVERYONE, "replace"),
    (POISSON, "zero_out"),
    (POISSON, "replace"),
    (VISIBLE, "zero_out"),
    (VISIBLE, "replace"),
    (FIXED, "replace"),
]
each_view = pytest.mark.parametrize(
    ("who", "relation"), VIEWS, ids=lambda v: v if isinstance(v, str) else f"{v.kind}-{v.visible}"
)


# Composition


def kairouz(epsilon, rounds, place):
    """Kairouz, Oh and Viswanath 2015, theorem 3.3: the delta at (rounds - 2 place) epsilon."""
    total = sum(
        math.comb(rounds, low)
        * (math.exp((rounds - low) * epsilon) - math.exp((rounds - 2 * place + low) * epsilon))
        for low in range(place)
    )
    return total / (1 + math.exp(epsilon)) ** rounds


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.01, 30), (0.1, 25), (0.7, 12), (2.0, 7)])
def test_equal_steps_compose_by_the_theorem(epsilon, rounds):
    found = PureProfile(epsilon, rounds)
    for place in range(rounds // 2 + 1):
        exact = kairouz(epsilon, rounds, place)
        ours = found.delta((rounds - 2 * place) * epsilon)
        assert ours == pytest.approx(exact, rel=1e-7, abs=1e-14)


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.02, 400), (0.3, 40), (1.5, 10)])
def test_equal_steps_agree_with_dp_accounting(epsilon, rounds):
    from dp_accounting.pld import privacy_loss_distribution

    # Theirs rounds each loss up to the grid: by at most one step a round.
    step = epsilon / 2000
    theirs = privacy_loss_distribution.from_randomized_response(
        2 / (1 + math.exp(epsilon)), 2, value_discretization_interval=step
    ).self_compose(rounds)
    for delta in (1e-2, 1e-5, 1e-8):
        ours = profile([Laplace(epsilon)] * rounds, EVERYONE, "zero_out").epsilon(delta)
        bound = theirs.get_epsilon_for_delta(delta)
        assert ours * (1 - 1e-6) <= bound <= ours + rounds * step * 1.01
        assert ours <= rounds * epsilon


def by_signs(epsilons, epsilon, mu=0.0):
    """Sum over all answers of randomised responses, beside mu-Gaussian DP."""
    total = 0.0
    for signs in itertools.product((1, -1), repeat=len(epsilons)):
        mass = math.prod(1 / (1 + math.exp(-s * e)) for s, e in zip(signs, epsilons, strict=True))
        rest = epsilon - sum(s * e for s, e in zip(signs, epsilons, strict=True))
        if mu == 0:
            total += mass * max(0.0, -math.expm1(rest))
            continue
        upper = stats.norm.cdf(mu / 2 - rest / mu)
        total += mass * (upper - math.exp(rest) * stats.norm.cdf(-mu / 2 - rest / mu))
    return total


UNEQUAL = [0.03, 0.05, 0.08, 0.13, 0.2, 0.2, 0.31, 0.47]


def test_unequal_steps_are_bounded_tightly():
    found = profile([Laplace(e) for e in UNEQUAL], EVERYONE, "zero_out")
    for epsilon in (0.0, 0.1, 0.4, 0.9, 1.3):
        exact = by_signs(UNEQUAL, epsilon)
        assert exact * (1 - 1e-9) <= found.delta(epsilon) <= exact * 1.005 + 1e-13
    assert found.delta(sum(UNEQUAL)) == 0.0
    assert found.epsilon(0.0) == pytest.approx(sum(UNEQUAL), rel=1e-12)
    assert found.epsilon(1e-14) <= sum(UNEQUAL) * (1 + 1e-12)


def test_laplace_and_gaussian_together():
    plan = [Laplace(e) for e in UNEQUAL[:6]] + [Gaussian(4.0), Gaussian(6.0)]
    mu = math.sqrt(1 / 16 + 1 / 36)
    for relation, scale in (("zero_out", 1), ("replace", 2)):
        found = profile(plan, EVERYONE, relation)
        for epsilon in (0.0, 0.2, 0.7, 1.6):
            exact = by_signs([scale * e for e in UNEQUAL[:6]], epsilon, scale * mu)
            assert exact * (1 - 1e-9) <= found.delta(epsilon) <= exact * 1.005 + 1e-12
        tiny = found.epsilon(1e-25)  # below the grid: epsilons of pure releases are added
        added = scale * sum(UNEQUAL[:6]) + GaussianProfile(scale * mu).epsilon(1e-25)
        assert tiny == pytest.approx(added, rel=1e-9)


def test_visible_coins_beside_pure_releases():
    """Average over the attendance of two Gaussian rounds; the pure one is always charged."""
    plan, rate = [Gaussian(2.0), Gaussian(2.0), Laplace(0.3)], 0.2
    found = profile(plan, VISIBLE, "zero_out")
    for epsilon in (0.0, 0.2, 0.8):
        exact = sum(
            stats.binom.pmf(n, 2, rate) * by_signs([0.3], epsilon, math.sqrt(n) / 2)
            for n in range(3)
        )
        assert exact * (1 - 1e-9) <= found.delta(epsilon) <= exact * 1.005 + 1e-12


@each_view
def test_a_harmless_release_of_another_kind_costs_nearly_nothing(who, relation):
    for plan, other in (([Gaussian(3.0)] * 30, Laplace(1e-9)), ([Laplace(0.1)] * 9, Gaussian(1e9))):
        alone, beside = profile(plan, who, relation), profile([*plan, other], who, relation)
        for delta in (1e-2, 1e-5, 1e-8):
            assert beside.epsilon(delta) == pytest.approx(alone.epsilon(delta), rel=2e-3)
            assert beside.epsilon(delta) >= alone.epsilon(delta) * (1 - 1e-6)


@each_view
def test_laws_of_a_mixed_plan(who, relation):
    plan = [Gaussian(3.0, math.sqrt(2)), Laplace(0.2), Laplace(0.1), Gaussian(5.0)] * 3
    found = profile(plan, who, relation)
    assert found is profile(plan[::-1], who, relation)
    for kind in (Gaussian, Laplace):
        some = profile([e for e in plan if isinstance(e, kind)], who, relation)
        assert some.epsilon(1e-5) < found.epsilon(1e-5)
    assert found.epsilon(1e-5) <= profile(plan * 2, who, relation).epsilon(1e-5)
    deltas = [found.delta(epsilon) for epsilon in (0, 0.1, 0.5, 2, 5)]
    assert deltas == sorted(deltas, reverse=True)
    assert coalition_profile(plan, who, relation).epsilon(1e-5) >= found.epsilon(1e-5) * (1 - 1e-9)
    assert profile([*plan, NonPrivate()], who, relation).epsilon(1e-5) == math.inf


def test_three_kinds_at_once():
    plan = [Gaussian(5.0), Laplace(0.1), Wishart(60, 0.8)]
    found = profile(plan, EVERYONE, "zero_out")
    for pair in itertools.combinations(plan, 2):
        assert profile(pair, EVERYONE, "zero_out").epsilon(1e-5) < found.epsilon(1e-5)


# Sampling


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.95])
def test_amplification_is_what_a_laplace_release_attains(epsilon, rate):
    """Largest log-ratio of the sampled densities over a grid that holds their extremes."""
    x = np.linspace(-3, 3, 601)
    away, one, other = (np.exp(-epsilon * np.abs(x - centre)) for centre in (0, 1, -1))
    joined, swapped = (1 - rate) * away + rate * one, (1 - rate) * away + rate * other

    def worst(p, q):
        return float(np.abs(np.log(p / q)).max())

    poisson, fixed = Participation("poisson", rate), Participation("fixed", rate)
    assert amplify(epsilon, poisson, "zero_out") == pytest.approx(worst(joined, away))
    assert amplify(epsilon, poisson, "replace") == pytest.approx(worst(joined, swapped))
    # Staying away, somebody else is drawn: who may be at the other end.
    elsewhere = (1 - rate) * other + rate * one
    assert amplify(epsilon, fixed, "replace") == pytest.approx(worst(elsewhere, other))


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 3.0, 50.0, 2000.0])
def test_sampling_never_hurts_and_who_sees_more_learns_more(epsilon):
    for relation, scale in (("zero_out", 1), ("replace", 2)):
        for rate in (1e-6, 0.1, 0.9, 1.0):
            hidden = amplify(epsilon, Participation("poisson", rate), relation)
            fixed = amplify(epsilon, Participation("fixed", rate), relation)
            seen = amplify(epsilon, Participation("poisson", rate, True), relation)
            assert 0 < hidden <= fixed * (1 + 1e-12)
            assert fixed <= seen * (1 + 1e-12)
            assert seen == scale * epsilon


def test_a_hidden_cohort_of_fixed_size_amplifies_nothing_under_zero_out():
    assert amplify(0.5, FIXED, "zero_out") == 0.5
    assert profile([Laplace(0.5)] * 2, FIXED, "zero_out").epsilon(0.0) == 1.0
    with pytest.raises(ValueError, match="fixed size"):
        profile([Laplace(0.5), Gaussian(1.0)], FIXED, "zero_out")


# Calibration


@each_view
@pytest.mark.parametrize(
    ("epsilon", "delta", "weights"),
    [
        (1.0, 0.0, [1.0] * 30),
        (0.05, 1e-5, [1.0] * 30),
        (8.0, 0.0, [(t + 1.0) ** 0.7 for t in range(6)]),
        (1.0, 1e-5, [(t + 1.0) ** 0.7 for t in range(6)]),
    ],
)
def test_calibration_meets_its_target_from_below(who, relation, epsilon, delta, weights):
    e = calibrate_event(
        Laplace, epsilon, delta, weights=weights, participation=who, relation=relation
    )
    found = profile([Laplace(e * weight) for weight in weights], who, relation)
    assert 0.998 * epsilon <= found.epsilon(delta) <= epsilon


def test_calibration_to_a_pure_epsilon_is_a_share_of_it():
    plan = {"participation": EVERYONE, "relation": "zero_out"}
    assert calibrate_event(Laplace, 1.0, 0.0, weights=[1.0] * 10, **plan) == pytest.approx(
        0.1, rel=1e-11
    )
    assert calibrate_event(Laplace, 1.0, 1e-5, weights=[1.0] * 200, **plan) > 1.5 / 200
    with pytest.raises(ValueError, match="delta = -1"):
        calibrate_event(Laplace, 1.0, -1.0, weights=[1.0], **plan)


# Sums that cannot be turned round


ROOT = math.sqrt(2)


def test_replaced_scales_gaussian_dp_under_replace_alone():
    plan, plain = [Gaussian(3.0, ROOT)] * 7, [Gaussian(3.0)] * 7
    mu = ROOT * math.sqrt(7) / 3
    exact = GaussianProfile(mu).epsilon(1e-5)
    assert profile(plan, EVERYONE, "replace").epsilon(1e-5) == pytest.approx(exact, rel=1e-12)
    for who in (EVERYONE, POISSON, VISIBLE):
        zeroed = [profile(p, who, "zero_out").epsilon(1e-5) for p in (plan, plain)]
        assert zeroed[0] == zeroed[1]
    for who in (VISIBLE, FIXED):
        stretched = profile([Gaussian(3.0 * 2 / ROOT)] * 7, who, "replace").epsilon(1e-5)
        assert profile(plan, who, "replace").epsilon(1e-5) == pytest.approx(stretched, rel=1e-9)


@pytest.mark.parametrize(("z", "rate"), [(0.7, 0.1), (1.0, 0.5), (3.0, 0.2), (2.0, 0.97)])
def test_replaced_bounds_hidden_coins(z, rate):
    """Orthogonal messages, whose densities are integrated on a plane."""
    x = np.linspace(-9 * z, 9 * z + 1, 1500)
    at_0, at_1 = stats.norm.pdf(x, 0, z), stats.norm.pdf(x, 1, z)
    away, one, other = np.outer(at_0, at_0), np.outer(at_1, at_0), np.outer(at_0, at_1)
    joined, swapped = (1 - rate) * away + rate * one, (1 - rate) * away + rate * other
    found = profile([Gaussian(z, ROOT)], Participation("poisson", rate), "replace")
    plain = profile([Gaussian(z)], Participation("poisson", rate), "replace")
    for epsilon in (0.0, 0.2, 1.0):
        exact = np.maximum(joined - math.exp(epsilon) * swapped, 0).sum() * (x[1] - x[0]) ** 2
        assert exact * (1 - 1e-3) <= found.delta(epsilon) <= plain.delta(epsilon) * (1 + 1e-9)


def test_hidden_coins_cost_no_more_than_visible_ones_and_less_than_opposite_messages():
    for rate in (0.05, 0.5, 0.99):
        hidden, seen = Participation("poisson", rate), Participation("poisson", rate, True)
        plan = [Gaussian(5.0, ROOT)] * 40
        found = profile(plan, hidden, "replace").epsilon(1e-5)
        assert found <= profile(plan, seen, "replace").epsilon(1e-5)
        assert found < 0.8 * profile([Gaussian(5.0)] * 40, hidden, "replace").epsilon(1e-5)
        assert found > profile(plan, hidden, "zero_out").epsilon(1e-5)


@each_view
@pytest.mark.parametrize("replaced", [1.0, ROOT])
def test_calibration_with_replaced(who, relation, replaced):
    plan = {"weights": [1.0] * 20, "participation": who, "relation": relation}
    z = calibrate(1.5, 1e-5, **plan, replaced=replaced)
    found = profile([Gaussian(z, replaced)] * 20, who, relation).epsilon(1e-5)
    assert 0.998 * 1.5 <= found <= 1.5
    assert z <= calibrate(1.5, 1e-5, **plan) * (1 + 1e-3)


# The guarantee


def guarantee(events, **changes):
    values = {"participation": EVERYONE, "relation": "zero_out", "delta": 0.0, "clients": 40}
    return Guarantee(events=events, **(values | changes))


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_a_pure_guarantee_says_so(relation):
    found = guarantee([Laplace(0.1)] * 10, relation=relation)
    assert found.epsilon == pytest.approx(1.0 if relation == "zero_out" else 2.0)
    assert found.delta_at(found.epsilon) == 0.0
    text = found.statement()
    assert text.startswith("pure epsilon = ")
    assert "at delta = 0, over 10 rounds" in text
    assert "except" not in text.splitlines()[0]
    assert Guarantee.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    betas = found.trade_off([0.0, 0.5, 1.0])
    assert betas[0] == pytest.approx(1.0, abs=1e-6)
    assert epsilon_by_round(found.events, EVERYONE, relation, 0.0, [0, 10]) == [0.0, found.epsilon]


def test_a_pure_plan_at_some_delta_is_no_pure_guarantee():
    text = guarantee([Laplace(0.1)] * 100, delta=1e-5).statement()
    assert text.startswith("epsilon = 4.307 at delta = 1e-05")


def test_delta_zero_of_nothing_and_of_everything():
    assert guarantee([]).epsilon == 0.0
    assert guarantee([NonPrivate(), Laplace(1.0)]).epsilon == math.inf


MIXED = [
    Gaussian(1 / 3),
    Gaussian(0.1, ROOT),
    Gaussian(0.1, ROOT),
    Laplace(0.7),
    NonPrivate(),
    Wishart(7, 0.3),
    Wishart(7, 0.3, claimed=0.1),
]


def test_events_come_back_exactly():
    assert read_runs(json.loads(json.dumps(list_runs(MIXED)))) == tuple(MIXED)
    found = guarantee(MIXED, delta=1e-5)
    assert Guarantee.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    with pytest.raises(ValueError, match="event = 'other'"):
        read_runs([{"event": "other", "rounds": 1}])


def test_runs_of_several_kinds_are_added_up_in_words():
    runs = [guarantee([Laplace(0.5)]), guarantee([Gaussian(5.0)] * 4, delta=1e-5)]
    assert "at delta = 1e-05" in spent_together(runs)
    assert "2 runs" in spent_together(runs)
    assert "epsilon = 1 at delta = 0" in spent_together(runs[:1] * 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Laplace(0.0), "epsilon = 0.0.*l1 bound.*NonPrivate"),
        (lambda: Laplace(math.inf), "epsilon = inf"),
        (lambda: Gaussian(1.0, 0.5), "replaced = 0.5.*from 1 to 2"),
        (lambda: Gaussian(1.0, math.nan), "replaced = nan"),
        (lambda: guarantee([Laplace(1.0), Gaussian(1.0)]), "delta = 0.0.*Gaussian.*no bound.*Lap"),
        (lambda: guarantee([Laplace(1.0)], delta=-0.1), "delta = -0.1"),
        (lambda: guarantee([Laplace(1.0)], delta=1.0), "delta = 1.0"),
        (
            lambda: epsilon_by_round([Gaussian(1.0)], EVERYONE, "zero_out", 0.0, [1]),
            "no bound.*default_delta",
        ),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
