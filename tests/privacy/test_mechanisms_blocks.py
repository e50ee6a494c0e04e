"""Sums made of blocks: what is refused, what is accounted for, and whole runs."""

import json
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from tests.privacy.oracles import gaussian_delta, memory_board

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import noise_to_signal
from coterie.methods.base import Block, Clipping, Method, Rounds
from coterie.methods.mpmtl import MPMTL
from coterie.methods.mtlsvm import MTLSVM
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.accounting import profile
from coterie.privacy.billboard import bound
from coterie.privacy.entropy import SeededEntropy, open_entropy
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import (
    BlockSum,
    Exact,
    GaussianSum,
    Shape,
    check_blocks,
    replaced_by,
)
from coterie.privacy.noise import GaussianNoise, Noise, Request
from coterie.privacy.sampling import FixedSize, Poisson

BLOCKS = (
    Block("mean", 1.0, 0.7),
    Block("variances", 1.5, 0.2, "positive", per_root=True),
    Block("residual", 3.0, 0.1, "single"),
)
REPLACED = math.sqrt(0.7 * 4 + 0.2 * 2 + 0.1)
CLIENTS, FEATURES = 30, 5
DELTA = 1e-5


@dataclass(frozen=True)
class Toy(Method):
    """Posts means, squares and one number; the shared tree is what was posted, over clients."""

    kind: ClassVar[str] = "toy"
    model: Linear = field(default_factory=lambda: Linear(bias=False))

    def init(self, spec, rng):
        first = {"mean": (FEATURES,), "variances": (FEATURES,), "residual": (1,)}
        return {name: torch.zeros(shape) for name, shape in first.items()}

    def contribution(self, spec):
        return self.init(spec, None)

    def clipping(self, clients, rounds, clip=0.5):
        return Clipping(clip=clip, blocks=(replace(BLOCKS[0], bound=clip), *BLOCKS[1:]))

    def rounds(self, spec):
        return Rounds(dimension=FEATURES)

    def init_client_state(self, shared, spec, clients):
        return {"weight": torch.zeros(clients, 1, FEATURES)}

    def local_update(self, shared, personal, clients, rng, round):
        rows = torch.where(clients.mask[..., None], clients.x, torch.zeros(()))
        mean = rows.sum(dim=1) / clients.mask.sum(dim=1, keepdim=True)
        parts = {"mean": mean, "variances": mean.square(), "residual": mean.abs().sum(1)[:, None]}
        return personal, parts

    def server_update(self, shared, post):
        return post.mean


def plan_of(**changes):
    given = {
        "method": Toy(),
        "privacy": Privacy(epsilon=1.0, delta=DELTA, clip=0.8),
        "rounds": 3,
        "simulation_seed": 4,
    }
    return Plan(**{**given, **changes})


@pytest.fixture
def data():
    return synthetic(clients=CLIENTS, rows=6, features=FEATURES, seed=2).data


def ask_of(**changes):
    given = {
        "shape": Shape.SUM,
        "clip": 0.7,
        "epsilon": 1.0,
        "noise_multiplier": None,
        "delta": DELTA,
        "weights": (1.0,) * 4,
        "clients": CLIENTS,
        "participation": Participation("everyone"),
        "relation": "zero_out",
        "blocks": BLOCKS,
    }
    return Request(**{**given, **changes})


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bound": 0.0}, "bound = 0.0 of block 'x'"),
        ({"bound": math.inf}, "bound = inf"),
        ({"bound": math.nan}, "bound = nan"),
        ({"share": 0.0}, "share = 0.0 of block 'x'"),
        ({"share": 1.1}, "share = 1.1 of block 'x'.* between 1e-12 and 1"),
        ({"share": math.nan}, "share = nan"),
        ({"kind": "odd"}, "expected one of signed, positive, single"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Block(**{"name": "x", "bound": 1.0, "share": 1.0, **changes})


def test_shares_must_add_up_to_one_and_are_never_changed():
    with pytest.raises(ValueError, match=r"add up to 0\.9"):
        BlockSum((Block("a", 1.0, 0.5), Block("b", 1.0, 0.4)), 1.0)
    with pytest.raises(ValueError, match="divide each by their sum"):
        BlockSum((Block("a", 1.0, 0.5), Block("b", 1.0, 0.5 + 1e-9)), 1.0)
    thirds = tuple(Block(name, 1.0, 1 / 3) for name in "abc")
    assert BlockSum(thirds, 1.0).blocks == thirds
    check_blocks([Block("a", 1.0, 0.7), Block("b", 1.0, 0.2), Block("c", 1.0, 0.1)])


def test_blocks_have_names_of_their_own():
    with pytest.raises(ValueError, match="each leaf once"):
        BlockSum((Block("a", 1.0, 0.5), Block("a", 1.0, 0.5)), 1.0)
    with pytest.raises(ValueError, match="at least one"):
        BlockSum((), 1.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        BlockSum(BLOCKS, 0.0)


@pytest.mark.parametrize("names", [("mean",), ("mean", "variances", "residual", "more")])
def test_leaves_that_are_not_the_blocks_are_refused(names):
    mechanism = BlockSum(BLOCKS, 1.0)
    rows = {name: torch.zeros(2, 1) for name in names}
    with pytest.raises(ValueError, match="give one block for each leaf"):
        mechanism.clip(rows)
    with pytest.raises(ValueError, match="give one block for each leaf"):
        mechanism.totals(dict.fromkeys(names, (1,)))


def test_a_single_block_of_more_numbers_is_refused_before_anything_is_spent():
    shapes = {"mean": (3,), "variances": (3,), "residual": (2,)}
    with pytest.raises(ValueError, match="single number, and the leaf has 2"):
        BlockSum(BLOCKS, 1.0).totals(shapes)
    with pytest.raises(ValueError, match="single number"):
        memory_board(BlockSum(BLOCKS, 1.0), shapes)


@pytest.mark.parametrize("kind", sorted(set(Noise.choices()) - {"gaussian", "shares", "banded"}))
def test_other_noise_refuses_blocks(kind):
    noise = Noise.named(kind)
    shape = noise.shapes[0]
    with pytest.raises(ValueError, match=r"mean, variances, residual separately: use gaussi"):
        noise.mechanisms(ask_of(shape=shape))
    assert noise.mechanisms(ask_of(shape=shape, blocks=(), delta=1e-5))


@pytest.mark.parametrize("changes", [{"shape": Shape.GRAM}, {"shape": Shape.ROWS}, {"rows": 4}])
def test_blocks_are_for_sums_of_whole_clients(changes):
    with pytest.raises(ValueError, match="leave blocks empty"):
        GaussianNoise().mechanisms(ask_of(**changes))


def test_a_run_says_which_noise_to_use():
    with pytest.raises(ValueError, match="use gaussian noise"):
        plan_of(privacy=Privacy(epsilon=1.0, noise="laplace")).guarantee(CLIENTS)


# What is accounted for.


@pytest.mark.parametrize(("relation", "scale"), [("zero_out", 1.0), ("replace", REPLACED)])
def test_epsilon_is_that_of_one_gaussian_release_a_round(relation, scale):
    plan = plan_of(privacy=Privacy(noise_multiplier=5.0, delta=DELTA, relation=relation))
    guarantee = plan.guarantee(CLIENTS)
    mu = scale * math.sqrt(3) / 5.0
    assert gaussian_delta(guarantee.epsilon, mu) == pytest.approx(DELTA, rel=1e-6)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        1 / mu, value_discretization_interval=1e-3
    )
    assert guarantee.epsilon == pytest.approx(theirs.get_epsilon_for_delta(DELTA), rel=1e-3)


@pytest.mark.parametrize(("relation", "scale"), [("zero_out", 1.0), ("replace", REPLACED)])
def test_a_budget_is_met_from_below_and_nothing_is_wasted(relation, scale):
    made = GaussianNoise().mechanisms(ask_of(relation=relation))
    z = made[0].noise_multiplier
    assert made == (BlockSum(BLOCKS, z),) * 4
    spent = profile([m.event() for m in made], Participation("everyone"), relation).epsilon(DELTA)
    assert 1 - 1e-6 < spent <= 1.0
    assert gaussian_delta(1.0, scale * 2 / z) == pytest.approx(DELTA, rel=1e-5)


def test_replace_costs_less_than_twice_zero_out():
    """Positive and single blocks cannot be turned round; calibration must know."""
    z = {
        relation: GaussianNoise().mechanisms(ask_of(relation=relation))[0].noise_multiplier
        for relation in ("zero_out", "replace")
    }
    assert z["replace"] / z["zero_out"] == pytest.approx(REPLACED, rel=1e-6)
    assert REPLACED < 1.82


def test_a_hidden_cohort_is_amplified_as_for_any_sum():
    private = Privacy(noise_multiplier=1.5, delta=DELTA)
    plan = plan_of(privacy=private, sampler=Poisson(6.0))
    ours = plan.guarantee(CLIENTS).epsilon
    coarse = {"sampling_prob": 0.2, "value_discretization_interval": 1e-3}
    theirs = privacy_loss_distribution.from_gaussian_mechanism(1.5, **coarse)
    assert ours == pytest.approx(theirs.self_compose(3).get_epsilon_for_delta(DELTA), rel=2e-3)
    replaced = replace(plan, privacy=replace(private, relation="replace")).guarantee(CLIENTS)
    most = privacy_loss_distribution.from_gaussian_mechanism(
        1.5, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE, **coarse
    )
    assert ours < replaced.epsilon <= most.self_compose(3).get_epsilon_for_delta(DELTA) * 1.002


def test_the_parts_of_the_replace_factor():
    assert replaced_by(BLOCKS) == pytest.approx(REPLACED, rel=1e-15)
    assert replaced_by([Block("a", 1.0, 0.3), Block("b", 9.0, 0.7)]) == 2.0
    assert replaced_by([Block("a", 1.0, 1.0, "single")]) == 1.0
    assert replaced_by([Block("a", 1.0, 1.0, "positive")]) == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="relation"):
        BlockSum(BLOCKS, 1.0).sensitivity("remove")


def test_one_signed_block_is_a_plain_sum():
    """The same clip, event and noise as `GaussianSum`, but for 1e-12 of the noise."""
    alone, plain = BlockSum((Block("w", 0.7, 1.0),), 1.3), GaussianSum(0.7, 1.3)
    assert alone.event() == plain.event()
    rows = {"w": torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(0))}
    (mine, kept), (his, same) = alone.clip(rows), plain.clip(rows)
    assert torch.equal(mine["w"], his["w"])
    assert torch.equal(kept, same)
    shapes = {"w": (4, 3)}
    assert alone.radius(shapes) == pytest.approx(plain.radius(shapes), rel=1e-11)
    noisy = [
        m.perturb(m.reduce(mine), open_entropy(1, "noise", 0))["w"].numpy() for m in (alone, plain)
    ]
    assert np.allclose(*noisy, rtol=0, atol=2 * plain.step(12))


def test_the_reach_of_noise_is_that_of_the_noisiest_block():
    mechanism, shapes = BlockSum(BLOCKS, 2.0), {"mean": (9,), "variances": (9,), "residual": (1,)}
    deviations = mechanism.standard_deviations(shapes)
    assert deviations == pytest.approx(
        {
            "mean": 2 / math.sqrt(0.7),
            "variances": 2 * 4.5 / math.sqrt(0.2),
            "residual": 6 / math.sqrt(0.1),
        },
        rel=1e-11,
    )
    reach = deviations["variances"] * math.sqrt(2 * math.log(9))
    assert mechanism.radius(shapes) == pytest.approx(max(reach, deviations["residual"]))


# Whole runs.


def test_a_plan_takes_the_blocks_of_its_method():
    plan = plan_of()
    made = plan.mechanisms(CLIENTS)
    assert [type(mechanism) for mechanism in made] == [BlockSum] * 3
    assert made[0].blocks == (replace(BLOCKS[0], bound=0.8), *BLOCKS[1:])
    z = made[0].noise_multiplier
    assert plan.noise_multipliers(CLIENTS) == (z,) * 3
    assert PMTL().clipping(CLIENTS, 3, 0.5).blocks == ()
    assert plan_of(privacy=Privacy(epsilon=math.inf)).mechanisms(CLIENTS) == (Exact(),) * 3


def test_the_relative_error_is_that_of_the_first_block(data):
    plan = plan_of()
    z = plan.noise_multipliers(CLIENTS)[0]
    expected = math.sqrt(FEATURES) * z / math.sqrt(0.7) / CLIENTS
    assert plan.relative_error(data.spec) == pytest.approx(expected, rel=1e-12)
    sampled = plan_of(privacy=Privacy(noise_multiplier=2.0), sampler=Poisson(10.0))
    expected = math.sqrt(FEATURES) * 2 / math.sqrt(0.7) / 10
    assert sampled.relative_error(data.spec) == pytest.approx(expected, rel=1e-12)
    assert plan_of(privacy=Privacy(epsilon=math.inf)).relative_error(data.spec) is None


def test_the_guarantee_and_its_ledger_come_back_from_files(data, tmp_path):
    plan = plan_of(privacy=Privacy(epsilon=1.0, delta=DELTA, relation="replace"))
    outcome = simulate(plan, data, folder=tmp_path)
    guarantee = outcome.guarantee
    assert guarantee.events == (Gaussian(plan.noise_multipliers(CLIENTS)[0], REPLACED),) * 3
    again = Guarantee.from_json(json.loads(json.dumps(guarantee.to_json())))
    assert again.events == guarantee.events
    assert again.epsilon == guarantee.epsilon == pytest.approx(1.0, rel=1e-6)
    assert "simulation" in again.statement().lower()
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert len(lines) >= 6


def test_a_stopped_run_goes_on_bit_for_bit(data, tmp_path):
    plan = plan_of(sampler=Poisson(12.0))
    whole = simulate(plan, data)

    class StopError(Exception):
        pass

    def halt(progress):
        if progress.round == 2:
            raise StopError

    with pytest.raises(StopError):
        simulate(plan, data, folder=tmp_path, observe=halt)
    resumed = simulate(plan, data, folder=tmp_path)
    for mine, his in zip(whole.posts, resumed.posts, strict=True):
        assert all(torch.equal(mine.value[k], his.value[k]) for k in mine.value)
        assert mine.deviations == his.deviations


def test_a_post_is_the_clipped_sum_and_the_noise_of_each_block(data):
    plan = plan_of(rounds=1)
    post = simulate(plan, data).posts[0]
    everyone = data.clients(np.arange(CLIENTS))
    _, rows = Toy().local_update({}, {}, everyone, None, 0)
    mechanism = plan.mechanisms(CLIENTS)[0]
    total = bound(mechanism, rows)[0].total
    by_hand = {
        "mean": rows["mean"] * (0.8 / rows["mean"].norm(dim=1, keepdim=True)).clamp_max(1.0),
        "variances": rows["variances"],
        "residual": rows["residual"].clamp_max(3.0),
    }
    noise = mechanism.perturb(
        {name: torch.zeros_like(leaf) for name, leaf in total.items()}, open_entropy(4, "noise", 0)
    )
    for name, leaf in post.value.items():
        assert torch.allclose(total[name], by_hand[name].double().sum(0), rtol=3e-3, atol=3e-3)
        assert torch.equal(leaf, total[name] + noise[name])
    shapes = {"mean": (FEATURES,), "variances": (FEATURES,), "residual": (1,)}
    assert post.deviations == mechanism.standard_deviations(shapes)
    assert math.isnan(post.deviation), "there is no one deviation of unlike blocks"


def test_noise_to_signal_is_of_the_first_block(data):
    outcome = simulate(plan_of(rounds=1), data)
    post, mechanism = outcome.posts[0], outcome.billboard.mechanism(0)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in post.value.items()}
    noise = mechanism.perturb(zeros, open_entropy(4, "noise", 0))["mean"]
    expected = float(noise.norm() / (post.value["mean"] - noise).norm())
    assert noise_to_signal(outcome) == [pytest.approx(expected, rel=1e-12)]
    loud = simulate(plan_of(rounds=1, privacy=Privacy(noise_multiplier=0.01, clip=0.8)), data)
    blind = replace(loud, plan=replace(loud.plan, simulation_seed=None))
    square = FEATURES * loud.posts[0].deviations["mean"] ** 2
    left = float(loud.posts[0].value["mean"].square().sum()) - square
    assert noise_to_signal(blind) == [pytest.approx(math.sqrt(square / left), rel=0.02)]


def test_a_run_without_noise_and_one_of_fixed_cohorts(data):
    free = simulate(plan_of(privacy=Privacy(epsilon=math.inf)), data)
    assert noise_to_signal(free) == [0.0] * 3
    assert free.posts[0].deviations == dict.fromkeys(("mean", "variances", "residual"), 0.0)
    assert free.posts[0].deviation == 0.0
    private = Privacy(epsilon=2.0, delta=DELTA, relation="replace")
    fixed = simulate(plan_of(privacy=private, sampler=FixedSize(10)), data)
    assert 1.98 < fixed.guarantee.epsilon <= 2.0
    assert fixed.guarantee.views["other_clients"] == fixed.guarantee.epsilon
    assert fixed.guarantee.views["outsider"] == fixed.guarantee.epsilon  # clients keep state


# Deviations by leaf of the mechanisms that were there before.


@pytest.mark.parametrize(
    ("privacy", "deviation"),
    [
        (Privacy(noise_multiplier=2.0, clip=0.5), 1.0),
        (Privacy(noise_multiplier=2.0, clip=0.5, noise="laplace", delta=0.0), math.sqrt(2)),
        (Privacy(noise_multiplier=2.0, clip=0.5, noise="local"), math.sqrt(CLIENTS)),
        (Privacy(epsilon=math.inf), 0.0),
    ],
    ids=["gaussian", "laplace", "local", "exact"],
)
def test_plain_sums_have_one_deviation_for_all_leaves(privacy, deviation, data):
    post = simulate(plan_of(method=PMTL(), privacy=privacy, rounds=1), data).posts[0]
    assert post.deviations.keys() == post.value.keys()
    assert [*post.deviations.values()] == pytest.approx([deviation] * len(post.value))
    assert post.deviation == pytest.approx(deviation)


@pytest.mark.parametrize("noise", ["gaussian", "wishart", "wishart_paper"])
def test_second_moments_state_the_deviation_of_the_diagonal(noise, data):
    plan = plan_of(method=MPMTL(), rounds=1, privacy=Privacy(epsilon=1.0, noise=noise))
    mechanism = plan.mechanisms(CLIENTS)[0]
    post = simulate(plan, data).posts[0]
    zeros = {"w": torch.zeros(60, 60, dtype=torch.float64)}
    drawn = mechanism.typical_noise(zeros, SeededEntropy(3, "noise", 0))["w"].diagonal()
    (stated,) = mechanism.standard_deviations({"w": (60, 60)}).values()
    assert float(drawn.std()) == pytest.approx(stated, rel=0.35)
    assert post.deviation > 0


def test_methods_that_ask_for_the_deviation_still_get_it():
    binary = synthetic(clients=CLIENTS, rows=6, features=FEATURES, seed=2, task="binary").data
    plan = plan_of(method=MTLSVM(), privacy=Privacy(noise_multiplier=3.0, clip=0.5), rounds=1)
    assert simulate(plan, binary).posts[0].deviation == pytest.approx(1.5)
