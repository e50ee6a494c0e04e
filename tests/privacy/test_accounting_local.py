"""Local noise: accounts by view against closed forms, words that are true, JSON that comes back."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from tests.privacy.oracles import gaussian_delta

from coterie.privacy.accounting import coalition_profile, epsilon_by_round, profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import (
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    Wishart,
)
from coterie.privacy.guarantee import Guarantee, add_up, describe_noise, smallest_cohort
from coterie.privacy.profiles import GaussianProfile

EVERYONE = Participation("everyone")
POISSON = Participation("poisson", 0.1)
FIXED = Participation("fixed", 0.1)
CLIENTS = 100


ROUNDS = (LocalGaussian(4.0),) * 20


def guarantee(events=ROUNDS, who=POISSON, relation="zero_out", delta=1e-5, **more):
    return Guarantee(tuple(events), who, relation, delta, CLIENTS, **more)


def binomial_delta(epsilon, z, rounds, rate, scale):
    """The mean over attendances of the Gaussian profile, by scipy alone."""
    n = np.arange(1, rounds + 1)
    delta = gaussian_delta(epsilon, scale * np.sqrt(n) / z)
    return float(stats.binom.pmf(n, rounds, rate) @ delta)


# Numbers.


@pytest.mark.parametrize("who", [POISSON, POISSON.shown, FIXED, FIXED.shown], ids=repr)
@pytest.mark.parametrize(("relation", "scale"), [("zero_out", 1), ("replace", 2)])
def test_server_and_coalition_see_every_message(who, relation, scale):
    found = guarantee(who=who, relation=relation)
    for epsilon in (0.2, 1.0, 2.0):
        wanted = binomial_delta(epsilon, 4.0, 20, 0.1, scale)
        assert found.delta_at(epsilon) == pytest.approx(wanted, rel=1e-6)
    views = found.views
    assert views["server"] == views["other_clients"] == found.epsilon
    assert found.delta_at(found.epsilon) == pytest.approx(1e-5, rel=1e-6)
    others = coalition_profile(found.events, who, relation)
    assert others.epsilon(1e-5) == found.epsilon
    # Never less than central noise of the same size, which hides who takes part.
    assert found.epsilon >= guarantee([Gaussian(4.0)] * 20, POISSON, relation).epsilon


def test_a_single_message_by_itself():
    for relation, scale in (("zero_out", 1), ("replace", 2)):
        found = guarantee([LocalGaussian(4.0), LocalGaussian(2.0)], relation=relation)
        assert found.per_participation == GaussianProfile(scale / 2).epsilon(1e-5)
    assert guarantee([Gaussian(2.0)]).per_participation is None
    # Sampling can only help: a client that may stay away is told no better than one that is in.
    assert guarantee([LocalGaussian(2.0)]).epsilon <= GaussianProfile(0.5).epsilon(1e-5)


@pytest.mark.parametrize(
    ("who", "honest"), [(EVERYONE, 1), (EVERYONE, 100), (FIXED, 10), (Participation("poisson"), 7)]
)
def test_sums_alone_carry_the_noise_of_all_honest_clients(who, honest):
    found = guarantee([LocalGaussian(4.0, honest)] * 20, who)
    alike = guarantee([Gaussian(4.0 * math.sqrt(honest))] * 20, who.shown)
    assert found.views["server_secure_aggregation"] == pytest.approx(alike.epsilon, rel=1e-9)
    assert found.views["outsider"] == found.views["server_secure_aggregation"]
    assert found.views["server"] == guarantee([LocalGaussian(4.0)] * 20, who).epsilon
    assert (found.views["outsider"] < found.views["server"]) == (honest > 1)


@pytest.mark.parametrize(
    ("who", "most"), [(POISSON, 1), (FIXED, 10), (EVERYONE, 100), (Participation("poisson"), 100)]
)
def test_no_more_honest_clients_than_a_round_is_sure_to_have(who, most):
    assert smallest_cohort(who, CLIENTS) == most
    guarantee([LocalGaussian(4.0, most)], who)
    with pytest.raises(ValueError, match=f"at most {most}"):
        guarantee([LocalGaussian(4.0, most + 1)], who)
    for honest in (0, -1, 1.5):
        with pytest.raises(ValueError, match="honest"):
            LocalGaussian(4.0, honest)


def test_an_honest_sum_is_what_the_server_cannot_subtract():
    """The posted sum of a fixed cohort, all but h of whom collude: an attack by Monte-Carlo.

    The server knows every contribution but the client's, and the noise of all but h clients. Its
    best test is a level of what is left. False alarms at most 1e-6: rates from 2 * 10^5 runs move
    by five deviations.
    """
    z, honest, runs = 1.0, 4, 200_000
    rng = np.random.default_rng(3)
    rest = z * rng.standard_normal((runs, honest)).sum(axis=1)
    bound = GaussianProfile(1 / (z * math.sqrt(honest)))
    views = guarantee([LocalGaussian(z, honest)], EVERYONE).views
    assert views["server_secure_aggregation"] == pytest.approx(bound.epsilon(1e-5))
    for epsilon in (0.0, 0.2, 0.5):
        level = epsilon * z**2 * honest + 0.5  # where the likelihoods' ratio is e^epsilon
        hit, alarm = np.mean(rest + 1 > level), np.mean(rest > level)
        gain = hit - math.exp(epsilon) * alarm
        slack = 5 * (1 + math.exp(epsilon)) * math.sqrt(0.25 / runs)
        assert gain == pytest.approx(bound.delta(epsilon), abs=slack)


def test_unequal_rounds_and_mixtures_are_bounded_from_above():
    events = [LocalGaussian(4.0)] * 5 + [LocalGaussian(8.0)] * 15
    assert profile(events, POISSON, "zero_out").epsilon(1e-5) == pytest.approx(
        profile([Gaussian(e.noise_multiplier) for e in events], POISSON.shown, "zero_out").epsilon(
            1e-5
        )
    )
    # Beside local rounds, central ones are charged as if the cohort were seen: never too little.
    for other in (Gaussian(3.0), Laplace(0.2), Wishart(100, 0.5)):
        both = guarantee([LocalGaussian(4.0)] * 5 + [other] * 2)
        for part in ([LocalGaussian(4.0)] * 5, [other] * 2):
            assert both.epsilon >= guarantee(part).epsilon * (1 - 1e-9)
        assert both.views["server"] == both.views["server_secure_aggregation"] == math.inf
        assert both.views["other_clients"] == both.epsilon < math.inf
        assert "before noise" in both.statement()
    assert guarantee([LocalGaussian(4.0), NonPrivate()]).epsilon == math.inf


def test_a_hidden_fixed_cohort_has_an_account_under_zero_out():
    """Nothing is hidden from anybody who sees messages, so nothing has to be proved of hiding."""
    assert guarantee(who=FIXED).epsilon == guarantee(who=FIXED.shown).epsilon
    with pytest.raises(ValueError, match="hidden cohort of fixed size"):
        guarantee([Gaussian(4.0)], FIXED)


def test_progress_and_budgets():
    events = [LocalGaussian(4.0)] * 20
    spent = epsilon_by_round(events, POISSON, "zero_out", 1e-5, [0, 5, 20])
    assert spent[0] == 0 < spent[1] < spent[2] == guarantee().epsilon
    z = calibrate(1.0, 1e-5, weights=[1.0] * 20, participation=POISSON.shown, relation="replace")
    assert 0.999 < guarantee([LocalGaussian(z)] * 20, relation="replace").epsilon <= 1.0


def test_no_epsilon_at_delta_0():
    with pytest.raises(ValueError, match="no bound"):
        guarantee(delta=0.0)


@pytest.mark.parametrize("z", [0.0, -1.0, math.inf, math.nan])
def test_noise_that_is_none_is_refused(z):
    with pytest.raises(ValueError, match="noise_multiplier"):
        LocalGaussian(z)
    with pytest.raises(ValueError, match="claimed"):
        LocalGaussian(1.0, claimed=z)


def test_runs_add_up():
    one = guarantee()
    epsilon, delta = add_up([one, one])
    assert delta == 1e-5
    assert epsilon == guarantee(one.events * 2).epsilon
    central = guarantee([Gaussian(4.0)] * 20)
    together, _ = add_up([one, central])
    assert together >= max(one.epsilon, central.epsilon)
    unlike, delta = add_up([one, guarantee([Gaussian(4.0)], EVERYONE)])
    assert delta == 2e-5
    assert unlike == pytest.approx(one.epsilon + guarantee([Gaussian(4.0)], EVERYONE).epsilon)


# Words and files.


@pytest.mark.parametrize(
    "found",
    [
        guarantee(),
        guarantee([LocalGaussian(4.0, 10)] * 3, FIXED, "replace"),
        guarantee([LocalGaussian(4.0, 1, 0.25)] * 2 + [LocalGaussian(5.0)], simulation=True),
        guarantee([LocalGaussian(4.0), Gaussian(2.0), NonPrivate()], EVERYONE),
    ],
)
def test_json_comes_back(found):
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert Guarantee.from_json(data) == found
    assert data["epsilon_per_participation"] == found.per_participation
    assert data["views"].keys() >= {"server", "other_clients", "server_secure_aggregation"}
    assert set(data["reasons"]) <= set(data["views"])
    assert "noise_multipliers" not in data or not any(
        event["event"] == "local_gaussian" for event in data["events"]
    )


def test_words_say_who_adds_the_noise_and_both_numbers():
    found = guarantee([LocalGaussian(4.0, 10)] * 20, FIXED, "replace")
    words = found.statement()
    assert "each client adds it to its own contribution" in words
    assert f"epsilon = {found.per_participation:.4g}"[:12] in words
    assert "in total" in words
    assert "10 honest clients" in words
    assert "Not covered: the server" not in words
    assert "before it adds noise" in words
    assert found.to_json()["view"] == "the server and the other clients"
    assert "subtract" in found.to_json()["reasons"]["other_clients"]
    assert "if no other client adds noise: epsilon" in guarantee().statement()
    assert "NOT PRIVATE" not in words
    told = describe_noise(found.events)
    assert "added by each client" in told and "z = 4" in told
    # Central noise is told as ever.
    assert "Not covered: the server, which" in guarantee([Gaussian(4.0)]).statement()


def test_a_printed_epsilon_stands_beside_the_true_ones():
    found = guarantee([LocalGaussian(0.5, 1, 0.05)] * 10)
    assert found.claimed_epsilon == pytest.approx(0.5)
    words = found.statement()
    assert words.startswith("NOT A GUARANTEE")
    assert "epsilon = 0.5 at delta" in words
    assert "for a single message" in words
    data = found.to_json()
    assert data["claimed_epsilon"] == pytest.approx(0.5)
    assert data["true_delta_at_claimed"] == found.delta_at(0.5) > 0.1
