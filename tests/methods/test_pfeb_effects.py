"""PFEB with fixed effects: against generalised least squares, and what is released and personal."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.methods.test_pfeb import FREE, law, mixed, parts, run

from coterie.core.rng import Rng
from coterie.methods.pfeb import PFEB
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for

pytestmark = pytest.mark.full


def effects(data, *personal):
    return replace(data, spec=replace(data.spec, personal=personal))


@pytest.fixture(scope="module")
def panel():
    """300 clients with an intercept and a slope of their own, and two fixed slopes."""
    data = mixed(clients=300, rows=(4, 20))
    draw = np.random.default_rng(1)
    w = np.array([-1.0, 0.5, 0.3, 1.0]) + draw.standard_normal((300, 4)) * [0.0, 0.4, 0.0, 0.7]
    x = np.c_[data.features.numpy(), np.ones(len(data.targets))]
    y = (x * w[data.owners]).sum(axis=1) + 0.6 * draw.standard_normal(len(x))
    return effects(replace(data, targets=torch.from_numpy(y.astype(np.float32))), 1, 3)


def gls(data, variances, residual):
    """Solve sum_k X_k' S_k^-1 (y_k - X_k w) = 0; also return the covariance of its solution."""
    A, b = 0.0, 0.0
    for x, y in parts(data):
        S = residual * np.eye(len(y)) + (x * variances) @ x.T
        A, b = A + x.T @ np.linalg.solve(S, x), b + x.T @ np.linalg.solve(S, y)
    return np.linalg.solve(A, b), np.linalg.inv(A)


def test_without_privacy_it_is_the_fit_of_the_mixed_model(panel):
    """Within half a standard error of generalised least squares; variances as drawn, +- 20 %."""
    outcome = run(PFEB(), panel)
    mean, variances, residual = law(outcome)
    random = outcome.shared["random"].numpy().ravel()
    assert random.tolist() == [0, 1, 0, 1]
    best, covariance = gls(panel, variances * random, residual)
    assert (np.abs(mean - best) < 0.5 * np.sqrt(np.diag(covariance))).all()
    np.testing.assert_allclose(variances[[1, 3]], [0.16, 0.49], rtol=0.2)
    assert residual == pytest.approx(0.36, rel=0.1)


def test_only_random_effects_are_personal(panel):
    outcome = run(PFEB(), panel, Privacy(epsilon=2.0))
    weight = outcome.models.leaves["weight"][:, 0].numpy()
    assert np.unique(weight[:, 0]).size == np.unique(weight[:, 2]).size == 1
    assert np.unique(weight[:, 1]).size > 200
    assert np.unique(outcome.models.leaves["bias"].numpy()).size > 200


def test_fixed_effects_release_a_mean_and_no_spread(panel):
    plan = plan_for(panel.spec, Privacy(epsilon=1.0), method=PFEB())
    posted = {name: leaf.numel() for name, leaf in plan.method.contribution(panel.spec).items()}
    assert posted == {"mean": 4, "spread": 2, "residual": 1}
    shares = {block.name: block.share for block in plan.method.clipping(1, 1).blocks}
    assert shares["spread"] / shares["mean"] == pytest.approx(0.5 / math.sqrt(2), abs=1e-4)
    assert math.fsum(shares.values()) == pytest.approx(1)
    whole = replace(panel.spec, personal=())
    plan = plan_for(whole, Privacy(epsilon=1.0), method=PFEB())
    assert list(plan.method.contribution(whole)) == ["mean", "residual"]


def test_the_unit_of_fixed_effects_falls_with_the_rounds(panel):
    outcome = run(PFEB(), panel, Privacy(epsilon=2.0), rounds=7)
    units = outcome.shared["variances"].numpy().ravel()[[0, 2]]
    np.testing.assert_allclose(units, 0.2 / (1 + 7 / 2), rtol=1e-12)
    assert PFEB().prior(outcome.shared, panel.spec).variances[0, [0, 2]].tolist() == [0, 0]


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_classes_have_fixed_effects_too(task, panel):
    """On classes of the same panel fixed slopes lose no accuracy to slopes that all differ."""
    label = (panel.targets[:, None] > torch.tensor([0.0, 1.0])).sum(dim=1)
    kind = {"binary": (1, (label > 0).float()), "multiclass": (3, label)}[task]
    spec = replace(panel.spec, task=task, outputs=kind[0])
    data = replace(panel, spec=spec, targets=kind[1])
    train, test = data.split(0.3, 0)

    def wrong(personal):
        from coterie.evaluation.score import evaluate

        one, two = (replace(d, spec=replace(d.spec, personal=personal)) for d in (train, test))
        outcome = run(PFEB(), one, Privacy(epsilon=4.0))
        return evaluate(outcome.plan.method.model, outcome.rows, two).value

    assert wrong((1, 3)) < wrong(None) + 0.01


def test_settings_that_do_not_go_together(panel):
    with pytest.raises(ValueError, match="no fixed effects"):
        PFEB(gls=True).check(panel.spec)
    with pytest.raises(ValueError, match="leave formula= and basis= out"):
        PFEB(shared="slice", directions=2).check(panel.spec)
    assert "random" not in PFEB().init(replace(panel.spec, personal=None), Rng.seeded(0))
    assert run(PFEB(), panel, FREE, rounds=2).plan.method.gls is None
