"""Modified outcomes against a direct minimisation of Huber's loss, and what they are for."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

from coterie.data.synthetic import mixed, synthetic
from coterie.engine.simulate import simulate
from coterie.methods.baselines import modes
from coterie.methods.pfeb import PFEB
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for
from coterie.solvers import robust
from coterie.solvers.posterior import Prior
from coterie.solvers.robust import bounded_share, pulled_in

SIZE = 3


def far_off(seed=0):
    """Return three clients, every sixth of whose outcomes is far off, and a prior."""
    data = synthetic("mean", clients=3, rows=24, features=SIZE - 1, noise=0.4, seed=seed).data
    data.targets[::6] += 5.0
    center = torch.full((1, SIZE), 0.2, dtype=torch.float64)
    prior = Prior(center, torch.tensor([[0.3, 0.1, 0.5]], dtype=torch.float64), 0.16)
    return data, data.clients(np.arange(3)), prior


@pytest.mark.parametrize("bias", [True, False])
def test_the_limit_minimises_the_loss_of_huber(monkeypatch, bias):
    monkeypatch.setattr(robust, "_STEPS", 400)
    data, clients, prior = far_off()
    if not bias:
        prior = Prior(prior.center[:, :2].clone(), prior.variances[:, :2].clone(), 0.16)
    bound = 1.345
    found = modes(pulled_in(clients, prior, bound, bias=bias)[0], prior, bias=bias)[:, 0].numpy()
    for client in range(3):
        rows = slice(24 * client, 24 * client + 24)
        x, y = data.features[rows].double().numpy(), data.targets[rows].double().numpy()
        x = np.c_[x, np.ones(24)] if bias else x
        w0, t2 = prior.center[0].numpy(), prior.variances[0].numpy()

        def cost(w, x=x, y=y, w0=w0, t2=t2):
            z = np.abs(y - x @ w) / 0.4
            loss = np.where(z <= bound, z**2 / 2, bound * z - bound**2 / 2)
            return loss.sum() + ((w - w0) ** 2 / t2).sum() / 2

        best = minimize(cost, w0, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
        np.testing.assert_allclose(found[client], best.x, atol=1e-4)


def test_outcomes_inside_the_bound_stay():
    data, clients, prior = far_off()
    before = clients.targets.clone()
    same, short = pulled_in(clients, prior, 100.0, bias=True)
    np.testing.assert_allclose(same.targets, before, atol=1e-6)
    assert torch.equal(clients.targets, before) and float(short.abs().max()) < 1e-9
    moved = pulled_in(clients, prior, 1.0, bias=True)[0].targets
    assert (before - moved)[::6].min() > 2, "every outlier moves"
    assert torch.equal(data.targets, before), "the data itself does not"


@pytest.mark.parametrize("bound", [0.5, 1.345, 3.0])
def test_mean_squares_are_scaled_to_those_of_normal_errors(bound):
    direct = quad(lambda z: min(z * z, bound**2) * norm.pdf(z), -12, 12, points=[-bound, bound])[0]
    assert bounded_share(bound) == pytest.approx(direct, rel=1e-7)


def test_outliers_hurt_less_and_normal_errors_cost_little():
    """By the distance to the true models, means of two federations."""
    for kind, most in (("outliers", 0.95), ("unrelated", 1.04)):
        ratio = 0.0
        for seed in range(2):
            made, wrong = mixed(kind, clients=120, seed=seed), []
            train, _ = made.data.split_by_source()
            for huber in (None, 2.0):
                method = PFEB(huber=huber)
                plan = plan_for(
                    train.spec, Privacy(epsilon=1.0), method=method, simulation_seed=seed
                )
                found = simulate(plan, train).models.leaves
                gaps = [(found[one] - made.truth[one]).flatten(1) for one in ("weight", "bias")]
                wrong.append(float(torch.cat(gaps, dim=1).square().sum(dim=1).mean()))
            ratio += wrong[1] / wrong[0] / 2
        assert ratio < most, (kind, ratio)


def test_it_is_for_regression_with_a_sensible_bound():
    spec = synthetic("mean", clients=3, rows=4, task="binary", seed=0).data.spec
    with pytest.raises(ValueError, match="is for regression"):
        PFEB(huber=1.345).check(spec)
    with pytest.raises(ValueError, match="such as 2"):
        PFEB(huber=0.0)
