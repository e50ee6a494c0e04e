"""Local noise in plans: kinds by name, budgets, refusals, posts, the printed scheme, whole runs."""

import math
import tomllib

import numpy as np
import pytest
import torch
from tests.privacy.oracles import memory_board

from coterie.core.config import ConfigError, to_toml
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.fedavg import FedAvg
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.accounting import profile
from coterie.privacy.billboard import bound
from coterie.privacy.calibrate import Power
from coterie.privacy.entropy import client_entropy, open_entropy
from coterie.privacy.events import LocalGaussian, Participation
from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import LocalGaussianSum, Shape
from coterie.privacy.noise import (
    GaussianNoise,
    LaplaceNoise,
    LocalNoise,
    Noise,
    PublishedLocal,
    PublishedWishart,
    Request,
    WishartNoise,
)
from coterie.privacy.published import claims
from coterie.privacy.sampling import Everyone, FixedSize, Poisson

CLIENTS = 40


def plan_of(noise="local", sampler=None, rounds=5, method=None, **privacy):
    if not privacy:
        privacy = {"epsilon": 2.0}
    return Plan(
        method=method or PMTL(),
        privacy=Privacy(noise=noise, **privacy),
        sampler=sampler or Poisson(10.0),
        rounds=rounds,
    )


# Kinds by name.


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("gaussian", GaussianNoise()),
        ("laplace", LaplaceNoise()),
        ("wishart", WishartNoise()),
        ("wishart_paper", PublishedWishart()),
        ("local", LocalNoise()),
        ("local_paper", PublishedLocal()),
    ],
)
def test_a_kind_may_be_named(name, noise):
    assert Privacy(epsilon=1.0, noise=name) == Privacy(epsilon=1.0, noise=noise)
    assert Noise.named(name) == noise
    table = plan_of(name).to_table()
    assert Plan.from_table(table) == plan_of(noise)
    table["privacy"]["noise"] = name
    assert Plan.from_table(tomllib.loads(to_toml(table))) == plan_of(noise)


def test_names_that_are_none_are_refused():
    with pytest.raises(ValueError, match="gaussian, laplace, local"):
        Privacy(epsilon=1.0, noise="loud")
    table = plan_of().to_table()
    table["privacy"]["noise"] = "loud"
    with pytest.raises(ConfigError, match="local_paper"):
        Plan.from_table(table)


def test_settings_of_local_noise_are_in_the_plan():
    plan = plan_of(LocalNoise(honest=4), FixedSize(10))
    assert plan.to_table()["privacy"]["noise"] == {"kind": "local", "honest": 4}
    assert Plan.from_table(plan.to_table()) == plan


# Budgets and refusals.


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("sampler", [Poisson(10.0), Poisson(10.0, True), FixedSize(10), Everyone()])
def test_budgets_are_met_in_the_view_of_the_server(sampler, relation):
    plan = plan_of(sampler=sampler, epsilon=1.0, relation=relation, spend=Power())
    found = plan.guarantee(CLIENTS)
    assert 0.999 < found.epsilon <= 1.0
    assert found.views["server"] == found.views["other_clients"] == found.epsilon
    # Every client's own noise, and never less than the server would add for other clients.
    central = plan_of("gaussian", Poisson(10.0), epsilon=1.0, relation=relation, spend=Power())
    for own, server in zip(
        plan.noise_multipliers(CLIENTS), central.noise_multipliers(CLIENTS), strict=True
    ):
        assert own >= server * 0.99


def test_mechanisms_say_what_they_do():
    (first, *_) = plan_of(LocalNoise(2), FixedSize(10), noise_multiplier=3.0).mechanisms(CLIENTS)
    assert first == LocalGaussianSum(0.5, 3.0, 10.0, 2)
    assert first.event() == LocalGaussian(3.0, 2)
    assert first.sensitivity("zero_out") == 0.5
    assert first.sensitivity("replace") == 1.0
    assert first.draws({"w": (7,)}) == 0
    total = {"w": torch.ones(7)}
    assert torch.equal(first.perturb(total, open_entropy(0, "noise", 0))["w"], total["w"])
    assert first.radius({"w": (7,)}) == pytest.approx(
        3.0 * 0.5 * math.sqrt(10) * math.sqrt(2 * math.log(7))
    )
    with pytest.raises(ValueError, match="cohort"):
        LocalGaussianSum(1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        LocalGaussianSum(1.0, 0.0, 1.0)


def test_what_local_noise_is_not_for_is_refused():
    with pytest.raises(ValueError, match="local noise supports releases of shape sum"):
        plan_of(method=MPMTL()).mechanisms(CLIENTS)
    with pytest.raises(ValueError, match="at most 1, or draw cohorts of a fixed size"):
        plan_of(LocalNoise(honest=2)).mechanisms(CLIENTS)
    with pytest.raises(ValueError, match="at most 10"):
        plan_of(LocalNoise(honest=11), FixedSize(10)).mechanisms(CLIENTS)
    with pytest.raises(ValueError, match="delta = 0"):
        plan_of(epsilon=1.0, delta=0.0).mechanisms(CLIENTS)
    for noise in (LocalNoise(), PublishedLocal()):
        with pytest.raises(ValueError, match="not single rows"):
            noise.mechanisms(ask_of(rows=3))
    with pytest.raises(ValueError, match="the same in every round"):
        PublishedLocal().mechanisms(ask_of(weights=(1.0, 2.0)))


def ask_of(**changes):
    given = {
        "shape": Shape.SUM,
        "clip": 0.7,
        "epsilon": 1.0,
        "noise_multiplier": None,
        "delta": 1e-5,
        "weights": (1.0, 1.0),
        "clients": CLIENTS,
        "participation": Participation("poisson", 0.1),
        "relation": "zero_out",
    }
    return Request(**{**given, **changes})


def test_who_sees_the_cohort():
    assert plan_of().shows_cohort(CLIENTS)
    assert plan_of("gaussian", Poisson(10.0, visible=True)).shows_cohort(CLIENTS)
    assert not plan_of("gaussian").shows_cohort(CLIENTS)


def test_a_run_without_privacy_adds_no_noise():
    plan = plan_of(epsilon=math.inf)
    assert plan.guarantee(CLIENTS).epsilon == math.inf
    assert plan.noise_multipliers(CLIENTS) == ()


# The printed scheme.


@pytest.mark.parametrize(("clients", "cohort", "sigma"), [(174, 3, 9.69), (9343, 20, 2.42)])
def test_the_printed_scheme_is_called_what_it_is(clients, cohort, sigma):
    plan = plan_of(
        "local_paper", Poisson(cohort), 20, noise_multiplier=sigma, relation="replace", delta=1e-5
    )
    found, known = plan.guarantee(clients), claims(clients, cohort, 20, sigma, 1e-5)
    # N(0, (sigma S)^2) with S = 2 C K / M, on every message.
    (mechanism,) = set(plan.mechanisms(clients))
    deviation = mechanism.noise_multiplier * mechanism.bound
    assert deviation == pytest.approx(sigma * 2 * mechanism.bound * cohort / clients)
    assert found.claimed_epsilon == pytest.approx(known.label)
    assert found.per_participation == pytest.approx(known.server_epsilon)
    assert found.epsilon == pytest.approx(known.server_total)
    assert found.views["server"] == found.epsilon
    words = found.statement()
    assert words.startswith("NOT A GUARANTEE: this reproduces a published mechanism")
    assert "for a single message" in words
    assert Plan.from_table(plan.to_table()) == plan


def test_the_printed_label_makes_the_printed_noise():
    asked = plan_of("local_paper", Poisson(3), 10, epsilon=0.5, delta=1e-5)
    given = plan_of("local_paper", Poisson(3), 10, noise_multiplier=9.6896, delta=1e-5)
    assert asked.guarantee(174).claimed_epsilon == pytest.approx(0.5)
    assert asked.noise_multipliers(174) == pytest.approx(given.noise_multipliers(174), rel=1e-4)


# Posts.


def test_posts_hold_the_sum_of_messages_and_are_charged():
    mechanism = LocalGaussianSum(1.0, 0.5, 4.0)
    board = memory_board(mechanism, {"w": (3000,)}, posts=2, cohort=4.0)
    rows = {"w": torch.zeros(4, 3000)}
    parts = [
        bound(mechanism, {"w": rows["w"][:2]}, torch.tensor([0, 1]), client_entropy(1, 0))[0],
        bound(mechanism, {"w": rows["w"][2:]}, torch.tensor([2, 3]), client_entropy(1, 0))[0],
    ]
    post = board.post(parts)
    assert board.ledger.charged == {0}
    assert torch.equal(post.value["w"], parts[0].total["w"] + parts[1].total["w"])
    assert post.deviation == pytest.approx(0.5 * 2.0)
    assert float(post.value["w"].std()) == pytest.approx(1.0, rel=0.1)
    # Nobody came: nothing is in the post, and who took part was never hidden.
    assert torch.equal(board.post([]).value["w"], torch.zeros(3000, dtype=torch.float64))


def test_the_ledger_knows_local_noise(tmp_path):
    events = [LocalGaussian(2.0, 3)] * 2
    with Ledger(events, tmp_path / "ledger.jsonl", "plan") as ledger:
        ledger.charge(0)
    with Ledger(events, tmp_path / "ledger.jsonl", "plan") as ledger:
        assert ledger.charged == {0}
    from coterie.privacy.ledger import LedgerError

    with pytest.raises(LedgerError, match="another plan"):
        Ledger([LocalGaussian(2.0, 2)] * 2, tmp_path / "ledger.jsonl", "plan")


# Whole runs.


@pytest.fixture(scope="module")
def data():
    return synthetic(clients=CLIENTS, rows=8, features=4, seed=3).data


def test_blocks_change_nothing_in_a_run(data):
    plan = Plan(
        method=FedAvg(),
        privacy=Privacy(noise_multiplier=0.3, noise="local"),
        sampler=Poisson(20.0),
        rounds=3,
        simulation_seed=5,
    )
    runs = [simulate(plan, data, speed=Speed(block=block)) for block in (0, 7)]
    for left, right in zip(runs[0].posts, runs[1].posts, strict=True):
        for name in left.value:
            assert left.value[name].numpy() == pytest.approx(right.value[name].numpy(), abs=1e-5)
    found = runs[0].guarantee
    assert found.simulation
    events = (LocalGaussian(0.3),) * 3
    assert found.events == events
    assert found.epsilon == profile(events, Participation("poisson", 0.5), "zero_out").epsilon(1e-5)


def test_a_run_carries_the_noise_of_its_cohorts(data):
    """Posts with a lot of noise are the clients' noise, drawn again from the seed."""
    plan = Plan(
        method=FedAvg(),
        privacy=Privacy(noise_multiplier=1e4, clip=0.5, noise="local"),
        sampler=Poisson(20.0),
        rounds=2,
        simulation_seed=5,
    )
    outcome = simulate(plan, data)
    for post in outcome.posts:
        cohort = plan.sampler.draw(CLIENTS, open_entropy(5, "cohort", post.index))
        mechanism = outcome.billboard.mechanism(post.index)
        zeros = {name: torch.zeros(len(cohort), *leaf.shape) for name, leaf in post.value.items()}
        noise, _ = bound(mechanism, zeros, torch.from_numpy(cohort), client_entropy(5, post.index))
        for name, leaf in post.value.items():
            rest = np.abs(leaf.numpy() - noise.total[name].numpy())
            assert rest.max() <= 0.5 * len(cohort)
            assert np.abs(leaf.numpy()).max() > 1e3


def test_a_real_run_with_local_noise_learns_where_there_is_little(data):
    plan = Plan(
        method=FedAvg(),
        privacy=Privacy(noise_multiplier=1e-3, clip=10.0, noise="local"),
        sampler=Everyone(),
        rounds=3,
    )
    outcome = simulate(plan, data)
    assert not outcome.guarantee.simulation
    assert all(torch.isfinite(leaf).all() for leaf in outcome.shared.values())
    assert any(leaf.abs().max() > 0 for leaf in outcome.shared.values())
