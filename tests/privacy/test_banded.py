"""Banded noise and public schedules: the account, the strategy, restarts, and what is refused."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import gaussian_delta

import coterie as ct
from coterie.cli.main import main
from coterie.privacy.accounting import profile
from coterie.privacy.banded import BandedSum, banded_sums, column_norms, noise_ratio, strategy
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import (
    BandedGaussian,
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    SharedGaussian,
    list_runs,
    read_runs,
)
from coterie.privacy.guarantee import Guarantee, add_up
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.noise import BandedNoise, SharedNoise
from coterie.privacy.reviewer import profile_of_person
from coterie.privacy.sampling import Cyclic
from coterie.privacy.selection import renyi
from coterie.verification.account import Account, by_view

PROFILE = settings(derandomize=True, deadline=None, max_examples=40)


def cyclic(period):
    return Participation("cyclic", 1 / period, visible=True)


def dense(rounds, bands):
    """The strategy C, as a matrix."""
    found = np.zeros((rounds, rounds))
    first = strategy(rounds, bands)
    for column in range(rounds):
        length = min(len(first), rounds - column)
        found[column : column + length, column] = first[:length]
    return found / np.linalg.norm(found, axis=0)


# The strategy.

# jax_privacy 2.0.0 with jax 0.10.2 in float64: toeplitz.optimize_banded_toeplitz(n, bands,
# max_optimizer_steps=1000), its per_query_error and loss.
PUBLISHED = {
    (50, 2): (0.742535, 14.05963191, [0.815794, 0.578342]),
    (200, 20): (0.314858, 9.96309247, [0.595627, 0.334588, 0.270217, 0.237809]),
    (1000, 20): (0.258037, 33.32474970, [0.475261, 0.302284, 0.261273, 0.240989]),
    (16, 4): (0.664567, 3.75402357, [0.794875, 0.438433, 0.329274, 0.259862]),
    (128, 8): (0.427437, 11.78428617, [0.626449, 0.396589, 0.335968, 0.302081]),
}


@pytest.mark.parametrize("rounds, bands", PUBLISHED)
def test_the_strategy_is_that_of_a_published_implementation(rounds, bands):
    ratio, loss, first = PUBLISHED[rounds, bands]
    found = strategy(rounds, bands)
    assert found[:4] == pytest.approx(first, abs=2e-6)
    toeplitz = sum(c * np.eye(rounds, k=-lag) for lag, c in enumerate(found))
    sums = np.tri(rounds) @ np.linalg.inv(toeplitz)
    error = (sums**2).sum() / rounds
    assert error * (found @ found) == pytest.approx(loss, rel=1e-7)
    assert math.sqrt(error / ((rounds + 1) / 2)) == pytest.approx(ratio, abs=1e-6)
    assert noise_ratio(rounds, bands) == pytest.approx(ratio, abs=1e-6)
    mechanism = banded_sums([GaussianSum(0.5, 3.0)] * rounds, bands)[0]
    assert mechanism.noise_over_bound == pytest.approx(3.0 * ratio, rel=1e-5)
    # Dividing columns by their norms leaves a little less.
    divided = np.tri(rounds) @ np.linalg.inv(dense(rounds, bands))
    assert 0.97 * error <= (divided**2).sum() / rounds <= error


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rounds", [2, 3, 17, 50, 300])
def test_more_bands_leave_less_noise(rounds):
    """Never more than the root of the prefix sum, which needs no search."""
    ratios = [noise_ratio(rounds, bands) for bands in (1, 2, 3, 7, 20, 50, 100)]
    assert ratios[0] == pytest.approx(1)
    assert all(after <= before + 1e-6 for before, after in itertools.pairwise(ratios))
    root = np.cumprod([1, *((2 * k - 1) / (2 * k) for k in range(1, min(7, rounds)))])
    whole = sum(c * np.eye(rounds, k=-lag) for lag, c in enumerate(root / np.linalg.norm(root)))
    error = (np.cumsum(np.linalg.inv(whole), axis=0) ** 2).sum()
    assert noise_ratio(rounds, 7) <= math.sqrt(error / (rounds * (rounds + 1) / 2))


def test_large_strategies_need_no_search():
    first = strategy(200_000, 60)
    assert np.linalg.norm(first) == pytest.approx(1)
    assert (first / first[0])[:4] == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16])


@pytest.mark.parametrize("rounds, bands", [(1, 1), (7, 1), (7, 3), (12, 5), (9, 9), (60, 20)])
def test_columns_of_one_client_are_orthonormal(rounds, bands):
    strategy_matrix = dense(rounds, bands)
    assert np.allclose(np.triu(strategy_matrix, 1), 0)
    assert np.allclose(np.tril(strategy_matrix, -bands), 0)
    for first in range(bands):
        own = strategy_matrix[:, first::bands]
        assert np.allclose(own.T @ own, np.eye(own.shape[1]), atol=1e-12)
    norms = np.linalg.norm(
        sum(c * np.eye(rounds, k=-lag) for lag, c in enumerate(strategy(rounds, bands))), axis=0
    )
    assert column_norms(rounds, bands) == pytest.approx(norms, rel=1e-12)


class Counted:
    """An entropy whose normals are those of a list, one vector per round."""

    def __init__(self, *rounds):
        self.left = list(rounds)


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(
        "coterie.privacy.banded.normals", lambda entropy, count: entropy.left.pop(0)
    )


def noise_of(mechanisms, drawn, restarts=()):
    """The noise of each round in deviations, after restarts before some of the rounds."""
    entropy, past, found = Counted(*drawn), (), []
    for number, one in enumerate(mechanisms):
        past = () if number in restarts else past
        zeros = {"w": torch.zeros(drawn.shape[1], dtype=torch.float64)}
        value, past = one.perturb_after(zeros, entropy, past)
        assert len(past) <= one.bands - 1
        found.append(value["w"].numpy() / one.inner.deviation)
    return np.array(found)


@pytest.mark.parametrize("rounds, period", [(12, 4), (7, 20), (10, 2), (5, 5)])
def test_the_noise_solves_the_strategy(scripted, rounds, period):
    mechanisms = banded_sums([GaussianSum(0.5, 3.0)] * rounds, period)
    drawn = np.random.default_rng(0).standard_normal((rounds, 6))
    found = noise_of(mechanisms, drawn)
    expected = np.linalg.solve(dense(rounds, min(period, rounds)), drawn)
    assert found == pytest.approx(expected, abs=1e-5)  # on the grid of releases
    totals = {"w": (6,)}
    spread = np.sqrt((np.linalg.inv(dense(rounds, min(period, rounds))) ** 2).sum(axis=1))
    for one, wide in zip(mechanisms, spread, strict=True):
        assert one.standard_deviations(totals)["w"] == pytest.approx(1.5 * wide, rel=1e-9)


@pytest.mark.parametrize("restarts", [(3,), (1, 2, 3), (5, 9), tuple(range(12))])
def test_a_restart_costs_accuracy_and_no_privacy(scripted, restarts):
    """The strategy after restarts, from the noise of unit vectors: banded, no column above 1."""
    rounds, bands = 12, 4
    mechanisms = banded_sums([GaussianSum(0.5, 3.0)] * rounds, bands)
    inverse = noise_of(mechanisms, np.eye(rounds), restarts)
    found = np.linalg.inv(inverse)
    assert np.allclose(np.tril(found, -bands), 0, atol=1e-4)
    assert np.allclose(np.triu(found, 1), 0, atol=1e-4)
    assert np.linalg.norm(found, axis=0).max() <= 1 + 1e-4
    for first in range(bands):  # a client's moves, all rounds together
        own = found[:, first::bands]
        assert np.linalg.norm(own, 2) <= 1 + 1e-4


# The account.


def mu_of(noises, period):
    """The largest mu over clients of a schedule, by listing them."""
    groups = [noises[first::period] for first in range(period)]
    return max(math.sqrt(sum(1 / z**2 for z in group)) for group in groups)


@PROFILE
@given(
    noises=st.lists(st.floats(0.5, 50), min_size=1, max_size=40),
    period=st.integers(1, 12),
    relation=st.sampled_from(["zero_out", "replace"]),
)
def test_no_client_of_a_schedule_costs_more_than_the_account(noises, period, relation):
    scale = 2 if relation == "replace" else 1
    found = profile([Gaussian(z) for z in noises], cyclic(period), relation)
    exact = scale * mu_of(noises, period)
    assert found.mu >= exact * (1 - 1e-12)
    even = profile([Gaussian(5.0)] * len(noises), cyclic(period), relation)
    assert even.mu == pytest.approx(scale * mu_of([5.0] * len(noises), period), rel=1e-12)


@pytest.mark.parametrize("rounds, period, times", [(200, 20, 10), (201, 20, 11), (19, 20, 1)])
def test_epsilon_is_that_of_the_rounds_of_one_client(rounds, period, times):
    bands = min(period, rounds)
    for event in (Gaussian(4.0), BandedGaussian(4.0, 2.0, bands)):
        epsilon = profile([event] * rounds, cyclic(period), "zero_out").epsilon(1e-5)
        assert gaussian_delta(epsilon, math.sqrt(times) / 4) == pytest.approx(1e-5, rel=1e-5)


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("weights", [(1.0,) * 37, tuple(float(t) for t in range(1, 38))])
def test_a_budget_is_met_and_used(relation, weights):
    usual = {"participation": cyclic(5), "relation": relation}
    z = calibrate(2.0, 1e-6, weights=weights, **usual)
    events = [Gaussian(z / weight) for weight in weights]
    spent = profile(events, cyclic(5), relation).epsilon(1e-6)
    assert 0.9995 * 2 <= spent <= 2
    everyone = {"participation": Participation("everyone"), "relation": relation}
    assert z < 0.75 * calibrate(2.0, 1e-6, weights=weights, **everyone)


def guarantee(rounds, period=4, event=None, **more):
    usual = {"relation": "zero_out", "delta": 1e-5, "clients": 40}
    event = BandedGaussian(4.0, 2.0, min(period, rounds)) if event is None else event
    return Guarantee(events=(event,) * rounds, participation=cyclic(period), **{**usual, **more})


def test_two_runs_count_a_client_of_both():
    """Five rounds in groups of four, twice: one client took part in four of the ten."""
    epsilon, _ = add_up([guarantee(5), guarantee(5)])
    assert gaussian_delta(epsilon, math.sqrt(4) / 4) == pytest.approx(1e-5, rel=1e-5)
    assert epsilon > guarantee(10).epsilon
    mixed, _ = add_up(
        [
            guarantee(5),
            Guarantee(
                events=(Gaussian(4.0),),
                participation=Participation("everyone", visible=True),
                relation="zero_out",
                delta=1e-5,
                clients=40,
            ),
        ]
    )
    assert gaussian_delta(mixed, math.sqrt(3) / 4) == pytest.approx(1e-5, rel=1e-5)


@pytest.mark.parametrize("clients", [1, 2, 3])
@pytest.mark.parametrize("event", [BandedGaussian(4.0, 2.0, 4), LocalGaussian(4.0), Gaussian(4.0)])
def test_a_person_at_several_clients_is_bounded_by_the_group(clients, event):
    """Two clients of different groups move rounds whose noise is correlated: k mu, no less."""
    found = profile_of_person(guarantee(10, event=event), clients).epsilon(1e-5)
    mu = 2 * math.sqrt(3) / 4
    assert gaussian_delta(found, clients * mu) <= 1e-5 * (1 + 1e-6)


def test_a_coordinator_cannot_ask_outside_the_schedule():
    """Noise in shares: sites refuse other rounds, so the schedule holds against it too."""
    event = SharedGaussian(4.0, 2.0, 30, 5)
    views = guarantee(10, event=event).views
    assert views["coordinator_and_corrupt"] == views["other_clients"]
    mu = math.sqrt(3) / 4
    assert gaussian_delta(views["other_clients"], mu) == pytest.approx(1e-5, rel=1e-5)
    alone = gaussian_delta(views["coordinator"], mu * math.sqrt(25 / 30))
    assert alone == pytest.approx(1e-5, rel=1e-5)


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize(
    "event", [Gaussian(4.0), BandedGaussian(4.0, 1.4, 3), SharedGaussian(4.0, 2.0, 30, 5)]
)
@pytest.mark.parametrize("rounds", [1, 3, 4, 10])
def test_verify_recomputes_every_view(event, rounds, relation):
    if rounds < getattr(event, "bands", 1):
        event = replace(event, bands=rounds)
    found = guarantee(rounds, event=event, relation=relation)
    stated = json.loads(json.dumps(found.to_json()))
    spans = by_view(Account.of(stated))
    assert spans["epsilon"].holds(found.epsilon)
    for view, epsilon in found.views.items():
        assert spans[view].holds(epsilon), view
    assert not spans["epsilon"].holds(found.epsilon * 0.99)
    assert read_runs(list_runs(found.events)) == found.events


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling": "poisson"},
        {"sampling": "everyone", "rate": 1.0},
        {"rate": 0.3},
        {"rate": 0.5},  # bands of four rounds, and a client in every second
        {"cohort": "hidden"},
    ],
)
def test_verify_refuses_accounts_that_are_not_proved(changed):
    stated = json.loads(json.dumps(guarantee(8).to_json())) | changed
    with pytest.raises(ValueError):
        by_view(Account.of(stated))


# What is refused.


def events_of(*events):
    return {"events": events, "delta": 1e-5, "clients": 40, "relation": "zero_out"}


@pytest.mark.parametrize(
    "participation, events, word",
    [
        (Participation("everyone"), (BandedGaussian(4.0),), "best noise is independent"),
        (Participation("cyclic", 1.0, True), (BandedGaussian(4.0),), "best noise is independent"),
        (Participation("poisson", 0.25), (BandedGaussian(4.0, 2.0, 2),), "cyclic schedule"),
        (Participation("fixed", 0.25, True), (BandedGaussian(4.0, 2.0, 2),), "cyclic schedule"),
        (cyclic(4), (BandedGaussian(4.0, 2.0, 5),), "at least as many rounds"),
        (cyclic(4), (Laplace(0.1),), "expected Gaussian noise"),
        (cyclic(4), (Gaussian(4.0), Laplace(0.1)), "expected Gaussian noise"),
    ],
)
def test_what_has_no_account_is_refused(participation, events, word):
    with pytest.raises(ValueError, match=word):
        Guarantee(participation=participation, **events_of(*events))


@pytest.mark.parametrize("rate, visible", [(0.3, True), (0.25, False), (1 / 3 + 1e-9, True)])
def test_a_schedule_is_of_whole_rounds_and_public(rate, visible):
    with pytest.raises(ValueError, match="whole number of rounds"):
        Participation("cyclic", rate, visible)


def test_without_noise_nothing_is_guaranteed():
    assert guarantee(8, event=NonPrivate()).epsilon == math.inf


def test_selection_offers_no_bound_for_a_schedule():
    with pytest.raises(ValueError, match="cyclic schedule"):
        renyi([Gaussian(4.0)], cyclic(4), "zero_out")


@pytest.mark.parametrize("bands", [0, -1, 2.0, True])
def test_bands_are_a_whole_number(bands):
    with pytest.raises(ValueError, match="bands"):
        BandedGaussian(4.0, 2.0, bands)
    with pytest.raises(ValueError, match="bands"):
        BandedSum(GaussianSum(1.0, 1.0), bands, 5, 0)


def a_plan(**settings):
    sampler = settings.pop("sampler", Cyclic(10))
    privacy = {"epsilon": 2.0, "noise": BandedNoise(), **settings.pop("privacy", {})}
    usual = {"method": ct.PMTL(), "rounds": 12, **settings}
    return ct.Plan(privacy=ct.Privacy(**privacy), sampler=sampler, **usual)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"sampler": Cyclic(40)}, "best noise is independent"),
        ({"sampler": ct.Everyone()}, "best noise is independent"),
        ({"sampler": ct.Poisson(10)}, "cyclic schedule"),
        ({"privacy": {"budget": tuple(range(1, 13))}}, "spend evenly"),
        ({"method": ct.MPMTL()}, "supports releases of shape"),
    ],
)
def test_plans_without_an_account_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        a_plan(**settings).guarantee(40)


def test_a_plan_meets_its_budget_and_survives_its_table():
    plan = a_plan()
    assert 0.999 * 2 <= plan.guarantee(40).epsilon <= 2
    again = ct.Plan.from_table(plan.to_table())
    assert again.guarantee(40).epsilon == plan.guarantee(40).epsilon
    assert again.sampler == Cyclic(10)
    shares = a_plan(privacy={"noise": SharedNoise(minimum_clients=30, corrupt=5)})
    assert shares.guarantee(40).views["coordinator_and_corrupt"] <= 2


def test_the_command_states_a_schedule(capsys):
    flags = "--clients 500 --rounds 200 --noise-multiplier 8 --sampling cyclic --cohort 25 --json"
    for noise in ("banded", "gaussian"):
        assert main(["account", *flags.split(), "--noise", noise]) == 0
        found = json.loads(capsys.readouterr().out)
        assert gaussian_delta(found["epsilon"], math.sqrt(10) / 8) == pytest.approx(1e-5, rel=1e-5)
        assert "once in 20 rounds, by a public schedule" in found["statement"]
    everyone = "account --clients 50 --rounds 9 --noise-multiplier 8 --noise banded --sampling"
    for sampling in ("everyone", "cyclic --cohort 50"):
        assert main([*everyone.split(), *sampling.split()]) != 0
        assert "best noise is independent" in capsys.readouterr().err
