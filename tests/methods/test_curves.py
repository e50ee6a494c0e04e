"""Common curves of PFEB: earned where they are, dropped where they are not, and paid for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.methods.test_pfeb import FREE, run

from coterie.core.rng import Rng
from coterie.data.effects import curves
from coterie.data.federated import Spec
from coterie.data.synthetic import mixed, synthetic
from coterie.evaluation.predict import predict
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.curves import EARNED, SHARE, Bends, below, bends, straight, unit
from coterie.methods.pfeb import PFEB
from coterie.models import Additive, Linear
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for
from coterie.privacy.mechanisms import Block
from coterie.solvers.posterior import Prior

pytestmark = pytest.mark.full

ONE = Privacy(epsilon=1.0)


def error(outcome, test):
    return evaluate(outcome.plan.method.model, outcome.rows, test).value


def nonlinear(seed=0, clients=500):
    return mixed("nonlinear", clients=clients, seed=seed).data.split_by_source()


def one(value):
    return torch.full((1,), value, dtype=torch.float64)


# What a federation gains and loses.


def test_curves_are_earned_where_they_are():
    """The default at epsilon 1: nMSE below .26 where linear models have .97 (seen: .07)."""
    train, test = nonlinear()
    outcome = run(PFEB(), train, ONE)
    assert float(outcome.shared["bending"]) == EARNED
    assert error(run(PFEB(curves=0), train, ONE), test) > 0.9
    assert error(outcome, test) < 0.2
    leaf = outcome.models.leaves["curves"]
    assert leaf.shape == (500, 1, 39)
    assert torch.equal(leaf, leaf[:1].expand_as(leaf)), "one curve for all clients"


def test_what_is_not_there_is_dropped():
    """Linear truth: curves are exactly 0, and the search costs less than .003."""
    lost = []
    for seed in range(4):
        data = synthetic("mean", clients=600, rows=16, features=5, spread=0.5, seed=seed).data
        train, test = data.split(0.5, seed)
        outcome = run(PFEB(structure=0), train, ONE, seed)
        assert float(outcome.shared["bending"]) == 0
        assert not outcome.models.leaves["curves"].any()
        lost.append(
            error(outcome, test) - error(run(PFEB(structure=0, curves=0), train, ONE, seed), test)
        )
    assert np.mean(lost) < 0.003


def test_without_curves_nothing_changes_without_privacy():
    """The copies that the block carries are the releases themselves: the same fit."""
    data = synthetic("mean", clients=80, rows=12, features=3, seed=1).data
    ours, plain = (run(PFEB(curves=c), data, FREE, rounds=20) for c in (None, 0))
    assert ours.plan.method.curves > 0 and float(ours.shared["bending"]) == 0
    for name in ("mean", "variances", "residual"):
        torch.testing.assert_close(ours.shared[name], plain.shared[name], rtol=1e-9, atol=1e-12)


def test_noise_alone_earns_nothing():
    """Noise and the drawing of clients, 16 looks each: no false alarm in 2,000 searches.

    A look is 4 deviations beyond, of a sum of 39 squares and more: below 1e-3 a search in all.
    """
    rng, found = np.random.default_rng(0), 0
    for _ in range(2000):
        state = straight(39)
        drawn = torch.from_numpy(rng.standard_normal(39) / math.sqrt(39 * 500))
        for _ in range(16):
            noise = torch.from_numpy(0.05 * rng.standard_normal(39))
            state |= Bends(drawn + noise, 0.05).learn(state, 500.0, 16)
            if float(state["bending"]) != 1:
                break
        found += float(state["bending"]) == EARNED
    assert found <= 2
    assert not state["curves"].any() and float(state["bending"]) == 0


# What is contributed.


def oracle(x, y, w, t2, s2, c):
    """sqrt(c) S' (s2 + X (t2 + 1) X' + c S S')^-1 (y - X w), with dense matrices."""
    made = curves(x.shape[1])(torch.from_numpy(x)).numpy()
    whole = np.c_[x, np.ones(len(x))]
    M = s2 * np.eye(len(x)) + (whole * (t2 + 1)) @ whole.T + c * made @ made.T
    return math.sqrt(c) * made.T @ np.linalg.solve(M, y - whole @ w)


@pytest.mark.parametrize("seen", [None, 0.0, 7.0])
def test_bends_are_the_estimating_equation(seen):
    data = synthetic("mean", clients=20, rows=(1, 30), features=3, seed=0).data
    clients = data.clients(np.arange(20))
    rng = np.random.default_rng(1)
    w, t2, s2 = rng.standard_normal(4), rng.uniform(0.1, 1, 4), 0.3
    prior = Prior(torch.from_numpy(w[None]), torch.from_numpy(t2[None]), s2)
    state = straight(15)
    if seen is not None:
        state |= {"bending": one(EARNED), "seen_bends": one(seen)}
    c = 0.02 if seen is None else 0.1 / (1 + seen / 2)
    assert unit(state) == pytest.approx(c)
    found = bends(clients, prior, state, bias=True).numpy()
    for client, (start, stop) in enumerate(zip(data.offsets, data.offsets[1:], strict=False)):
        x, y = (part[start:stop].double().numpy() for part in (data.features, data.targets))
        np.testing.assert_allclose(found[client], oracle(x, y, w, t2, s2, c), rtol=1e-5, atol=1e-7)
    alone = bends(clients.at(torch.tensor([7])), prior, state, bias=True)
    assert torch.equal(alone[0], torch.from_numpy(found[7])), "the same bits in any company"


def test_outcomes_below_the_curves():
    data = synthetic("mean", clients=9, rows=(2, 8), features=3, seed=0).data
    clients = data.clients(np.array([2, 5]))
    b = torch.from_numpy(np.random.default_rng(0).standard_normal(15))
    state = straight(15) | {"curves": b}
    assert below(clients, state) is clients
    left = below(clients, state | {"bending": one(EARNED)})
    explained = curves(3)(data.features) @ b
    for at, client in enumerate((2, 5)):
        rows = slice(data.offsets[client], data.offsets[client + 1])
        wanted = data.targets[rows].double() - explained[rows]
        torch.testing.assert_close(left.y[at, : len(wanted)].double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_fifth_of_the_budget_and_the_others_copies():
    spec = Spec((5,), 1, "regression", 600)
    method = plan_for(spec, ONE, method=PFEB()).method
    blocks = {block.name: block for block in method.clipping(1, 1).blocks}
    found = blocks["curves"]
    assert found == Block("curves", 1.0, found.share) and found.share == pytest.approx(SHARE)
    assert math.fsum(block.share for block in blocks.values()) == pytest.approx(1)
    sizes = {name: leaf.numel() for name, leaf in method.contribution(spec).items()}
    assert sizes["curves"] == max(30, 6 + 6 + 1)
    plain = plan_for(spec, ONE, method=PFEB(curves=0)).method
    whole = {b.name: b.share for b in plain.clipping(1, 1).blocks}
    for name, share in whole.items():
        assert blocks[name].share == pytest.approx((1 - SHARE) * share)


@pytest.mark.parametrize(
    ("spec", "privacy"),
    [
        (Spec((11,), 1, "regression", 5000), ONE),
        (Spec((5,), 1, "binary", 5000), ONE),
        (Spec((5,), 1, "regression", 40), ONE),
        (Spec((5,), 1, "regression", 5000, personal=(0, 5)), ONE),
        (Spec((2, 2), 1, "regression", 5000), ONE),
    ],
)
def test_by_rule_there_is_no_search_where_it_could_not_show_enough(spec, privacy):
    plan = plan_for(spec, privacy, method=PFEB())
    assert plan.method.curves == 0 and plan.method.model == Linear()
    assert "curves" not in plan.method.contribution(spec)


@pytest.mark.parametrize("settings", [{"learn": False}, {"shared": "slice", "directions": 1}])
def test_settings_that_do_not_go_together(settings):
    spec = Spec((4,), 1, "regression", 6)
    with pytest.raises(ValueError, match="curves = 2"):
        PFEB(curves=2, **settings).check(spec)
    with pytest.raises(ValueError, match="curves = 2"):
        PFEB(curves=2).check(replace(spec, task="binary"))
    with pytest.raises(ValueError, match="from 0 to 10,000"):
        PFEB(curves=-1)


# The model.


def test_the_model_is_linear_plus_curves():
    model, spec = Additive(), Spec((3,), 1, "regression", 2)
    leaves = model.init(spec, Rng.seeded(0))
    assert {name: tuple(leaf.shape) for name, leaf in leaves.items()} == {
        "weight": (1, 3),
        "bias": (1,),
        "curves": (1, 15),
    }
    rng = np.random.default_rng(0)
    x, w, b, c = (
        torch.from_numpy(rng.standard_normal(s).astype(np.float32))
        for s in ((7, 3), (1, 3), 1, (1, 15))
    )
    found = model.apply({"weight": w, "bias": b, "curves": c}, x)
    wanted = x @ w[0] + b + curves(3)(x).float() @ c[0]
    torch.testing.assert_close(found, wanted)
    stacked = model.apply_stacked({"weight": w[None], "bias": b[None], "curves": c[None]}, x[None])
    torch.testing.assert_close(stacked[0], found)


def test_local_training_stays_linear():
    """The baseline, and what a verdict to learn alone trains, is the linear model."""
    assert PFEB(curves=3).baselines().local == Local(model=Linear())
    assert PFEB(curves=3).model == Additive() and PFEB(curves=0, model=Additive()).model == Linear()


def test_intervals_cover_on_curves():
    train, test = nonlinear(seed=1, clients=400)
    outcome = run(PFEB(), train, Privacy(epsilon=2.0), 1)
    means, deviations = predict(outcome, test, return_std=True, train=train)
    away = np.abs(np.concatenate(means) - test.targets.double().numpy())
    assert 0.85 < (away < 1.645 * np.concatenate(deviations)).mean() < 0.96
