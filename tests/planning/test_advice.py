"""Looking ahead: every number against closed forms, dp-accounting or a search of its own."""

import math
from statistics import NormalDist

import pytest
from dp_accounting import dp_event, pld
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.planning.advice import (
    Facts,
    advise,
    clients_within,
    describe_error,
    epsilon_by_rounds,
    error_by_clients,
    forecast,
    most_rounds,
    noises_near,
    search_limit,
)
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import default_delta
from coterie.privacy.sampling import Everyone, FixedSize, Poisson

pytestmark = pytest.mark.full
DELTA = 1e-5


def gdp_delta(epsilon, mu):
    """Gaussian DP as it is printed, by the standard library's normal distribution."""
    cdf = NormalDist().cdf
    return cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * cdf(-epsilon / mu - mu / 2)


def gdp_mu(epsilon, delta):
    low, high = 1e-3, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gdp_delta(epsilon, middle) < delta else (low, middle)
    return low


def google_epsilon(z, rate, rounds, delta):
    """Epsilon by dp-accounting's own events and accountant: none of our discretisation."""
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(z))
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    return accountant.compose(event, rounds).get_epsilon(delta)


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_everyone_in_every_round_is_closed_form(epsilon, relation):
    clients, numbers, rounds = 300, 12, 20
    facts = Facts(
        clients=clients, parameters=numbers, rounds=rounds, epsilon=epsilon, delta=DELTA,
        relation=relation, clip=0.5,
    )  # fmt: skip
    found = forecast(facts)
    moved = 1 if relation == "zero_out" else 2
    z = moved * math.sqrt(rounds) / gdp_mu(epsilon, DELTA)
    assert found.noise_multiplier == pytest.approx(z, rel=1e-6)
    assert found.over_clip == pytest.approx(z / clients, rel=1e-6)
    assert found.over_clip * facts.clip == pytest.approx(0.5 * z / clients, rel=1e-6)
    error = math.sqrt(numbers) * z / clients
    assert found.error == pytest.approx(error, rel=1e-6)
    within = found.within
    assert within["rounds"] == math.floor(rounds * (0.3 / error) ** 2)
    assert within["clients"] == math.ceil(clients * error / 0.3)
    assert within["parameters"] == math.floor(numbers * (0.3 / error) ** 2)
    quiet = moved * math.sqrt(rounds) / (z * 0.3 / error)
    assert gdp_delta(within["epsilon"], quiet) == pytest.approx(DELTA, rel=1e-6)


def test_the_number_of_the_notes_says_whether_a_plan_can_learn():
    # sqrt(d T) / (m mu): 0.14 for 537 districts, 33 for a network of 205 clients.
    for clients, numbers, rounds, mu, told in (
        (537, 13, 30, 0.26805, 0.14),
        (205, 115_646, 100, 0.5, 33),
    ):
        z = math.sqrt(rounds) / mu
        found = forecast(
            Facts(clients=clients, parameters=numbers, rounds=rounds, noise_multiplier=z)
        )
        assert found.error == pytest.approx(math.sqrt(numbers * rounds) / (clients * mu), rel=1e-9)
        assert found.error == pytest.approx(told, rel=0.03)
    assert describe_error(0.14) == "negligible" and "larger than" in describe_error(33)


def test_a_verdict_does_not_state_fewer_rounds_than_the_plan_has():
    small = advise(clients=60, epsilon=2.0, parameters=60)
    assert small.verdict == "small gain" and small.rounds == 3
    assert "enough budget for one round; the 3 rounds of this plan are noisier" in small.reason
    joined = advise(clients=550, epsilon=1.0, parameters=10)
    assert joined.reason.endswith(f"enough budget for {joined.rounds} rounds.")


@pytest.mark.parametrize("z", [2.0, 10.0])
def test_hidden_coins_cost_what_dp_accounting_says(z):
    facts = Facts(
        clients=205,
        parameters=10,
        rounds=1000,
        noise_multiplier=z,
        delta=DELTA,
        sampler=Poisson(100),
    )
    found = forecast(facts)
    theirs = google_epsilon(z, 100 / 205, 1000, DELTA)
    assert found.epsilon == pytest.approx(theirs, rel=2e-3)
    assert found.views["other_clients"] == found.epsilon == found.views["released_shared_model"]
    assert found.views["server"] == found.views["server_secure_aggregation"] == math.inf


def test_noise_for_a_budget_under_coins_meets_it_by_dp_accounting():
    facts = Facts(
        clients=500, parameters=5, rounds=200, epsilon=1.5, delta=DELTA, sampler=Poisson(50)
    )
    found = forecast(facts)
    theirs = google_epsilon(found.noise_multiplier, 0.1, 200, DELTA)
    assert 1.49 < theirs < 1.502
    most = found.within["rounds"]
    quiet = 0.3 * 50 / math.sqrt(5)
    assert google_epsilon(quiet, 0.1, most, DELTA) <= 1.502
    if most < 1000:
        assert google_epsilon(quiet, 0.1, most + max(2, most // 50), DELTA) > 1.498


def test_rounds_within_an_epsilon_are_the_last_that_fit():
    facts = Facts(
        clients=205,
        parameters=10,
        rounds=50,
        noise_multiplier=10,
        delta=DELTA,
        sampler=Poisson(100),
    )
    found = forecast(facts, epsilon_limit=2.0)
    most = found.rounds_at_noise
    assert google_epsilon(10, 100 / 205, most, DELTA) <= 2.002
    assert google_epsilon(10, 100 / 205, most + 2, DELTA) > 1.998


@settings(max_examples=40, deadline=None)
@given(z=st.floats(1, 300), epsilon=st.floats(0.1, 10), start=st.integers(1, 10_000))
def test_rounds_do_not_depend_on_where_the_search_begins(z, epsilon, start):
    facts = Facts(clients=100, parameters=1, rounds=10, noise_multiplier=z, delta=DELTA)
    exact = math.floor((z * gdp_mu(epsilon, DELTA)) ** 2 * (1 + 1e-9))
    found = most_rounds(facts, z, epsilon, start)
    assert found <= exact
    assert found >= min(exact if exact <= 1000 else 0.98 * exact, search_limit(10)) - 1e-9


@settings(max_examples=40, deadline=None)
@given(numbers=st.integers(1, 10_000), rounds=st.integers(1, 200), epsilon=st.floats(0.1, 8))
def test_clients_within_are_the_fewest(numbers, rounds, epsilon):
    facts = Facts(clients=50, parameters=numbers, rounds=rounds, epsilon=epsilon)
    fewest = clients_within(facts, 0.3)

    def error(clients):
        mu = gdp_mu(epsilon, default_delta(clients))
        return math.sqrt(numbers * rounds) / (clients * mu)

    assert error(fewest) <= 0.3 * (1 + 1e-6)
    assert fewest == 1 or error(fewest - 1) > 0.3 * (1 - 1e-4)


def test_the_rule_of_joining_is_built_on_the_same_number():
    for clients, epsilon, numbers in ((550, 1.0, 10), (30, 1.0, 10), (2000, 0.5, 400)):
        advice = advise(clients, epsilon, numbers)
        facts = Facts(clients=clients, parameters=numbers, rounds=advice.rounds, epsilon=epsilon)
        error = forecast(facts).error
        assert advice.affordable_rounds == pytest.approx(
            advice.rounds * (0.3 / error) ** 2, rel=1e-6
        )


def test_noise_of_clients_own_is_heard_louder_and_protects_from_the_server():
    flat = {"clients": 400, "parameters": 6, "rounds": 10, "epsilon": 2.0, "delta": DELTA}
    local, central = forecast(Facts(**flat, local=True)), forecast(Facts(**flat))
    assert local.noise_multiplier == pytest.approx(central.noise_multiplier, rel=1e-6)
    assert local.error == pytest.approx(central.error * math.sqrt(400), rel=1e-6)
    assert local.views["server"] == pytest.approx(2.0, rel=1e-3)
    z = local.noise_multiplier
    needed = math.ceil(6 * (z / 0.3) ** 2)
    assert local.within["clients"] == pytest.approx(needed, rel=1e-6)


def test_the_budget_of_a_fixed_cohort_is_the_other_clients_number():
    facts = Facts(
        clients=205, parameters=10, rounds=50, epsilon=1.0, delta=DELTA, relation="replace",
        sampler=FixedSize(100),
    )  # fmt: skip
    found = forecast(facts)
    assert found.views["outsider"] == found.views["released_shared_model"] < 0.9
    assert 0.99 < found.views["other_clients"] == found.epsilon <= 1
    spent = facts.spent(found.noise_multiplier, 50)
    assert spent == pytest.approx(found.epsilon, rel=1e-6)


def test_guesses_at_other_noise_are_good_to_two_hundredths():
    epsilons = (0.5, 8.0)
    for clients, cohort, rounds in ((205, 100, 200), (1000, 10, 100)):
        plan = {"clients": clients, "parameters": 10, "rounds": rounds, "sampler": Poisson(cohort)}
        facts = Facts(**plan, epsilon=1.0, delta=DELTA)
        guesses = noises_near(facts, facts.noise(DELTA), epsilons)
        for epsilon in epsilons:
            exact = calibrate(
                epsilon, DELTA, weights=(1.0,) * rounds, participation=facts.participation,
                relation="zero_out",
            )  # fmt: skip
            assert guesses[epsilon] == pytest.approx(exact, rel=0.02)


def test_curves_pass_through_the_plan_itself():
    facts = Facts(
        clients=300, parameters=12, rounds=20, epsilon=1.0, delta=DELTA, sampler=Everyone()
    )
    found = forecast(facts)
    by_rounds = dict(epsilon_by_rounds(found))
    assert by_rounds[20.0] == found.epsilon and max(by_rounds) == 60
    for rounds, epsilon in by_rounds.items():
        mu = math.sqrt(rounds) / found.noise_multiplier
        assert gdp_delta(epsilon, mu) == pytest.approx(DELTA, rel=1e-6)
    for clients, error in error_by_clients(found):
        assert error == pytest.approx(found.error * 300 / clients)


@pytest.mark.parametrize("sampler", [Poisson(50), FixedSize(50)])
def test_noise_in_shares_is_planned_as_if_each_client_were_drawn_in_every_round(sampler):
    """The coordinator draws: what sampling hides, it hides from other clients only."""
    usual = {"clients": 537, "parameters": 10, "rounds": 20, "epsilon": 1.0}
    usual |= {"shares": (358, 35), "relation": "replace"}
    found, always = (forecast(Facts(**usual, sampler=who)) for who in (sampler, Everyone()))
    assert found.noise_multiplier == pytest.approx(always.noise_multiplier, rel=1e-9)
    assert found.views["coordinator_and_corrupt"] == pytest.approx(1.0)
    assert found.views["other_clients"] < 0.9
    assert dict(epsilon_by_rounds(found))[20.0] == pytest.approx(1.0)
    assert found.within["rounds"] < always.within["rounds"]


def test_answers_that_take_long_are_left_out_unless_asked_for():
    facts = Facts(
        clients=10_000, parameters=10, rounds=1000, noise_multiplier=0.7249, delta=DELTA,
        sampler=Poisson(20),
    )  # fmt: skip
    assert forecast(facts, full=False).grid > 100_000
    light = Facts(clients=100, parameters=10, rounds=10, epsilon=1.0)
    assert forecast(light, full=False) == forecast(light) and forecast(light).grid == 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "exactly one"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one"),
        ({"epsilon": 1.0, "clients": 0}, "clients = 0"),
        ({"epsilon": 1.0, "rounds": 10**7}, "rounds = 10000000"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0"),
        ({"epsilon": 1.0, "delta": 2.0}, "delta = 2"),
    ],
)
def test_nonsense_is_refused(changed, told):
    with pytest.raises(ValueError, match=told):
        Facts(**{"clients": 10, "parameters": 3, "rounds": 2, **changed})
