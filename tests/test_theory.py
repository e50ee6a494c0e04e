"""The published bounds, against minimisers, Monte-Carlo simulations and the engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from coterie.data.load import from_arrays
from coterie.engine.simulate import simulate
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.solvers.sgd import SGD
from coterie.theory import (
    Convergence,
    mean_estimation_error,
    mpmtl_utility,
    pmtl_best_rounds,
    pmtl_bound,
    pmtl_rounds,
    pmtl_strongly_convex_bound,
)

SETTING = {"delta": 1e-3, "dimension": 10, "gamma": 0.5}


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("clients", "epsilon"), [(50, 0.5), (400, 2.0), (400, 8.0)])
def test_the_best_rounds_minimise_the_bound(clients, epsilon, steps):
    given = SETTING | {"clients": clients, "epsilon": epsilon, "steps": steps}
    found = minimize_scalar(
        lambda log: pmtl_bound(math.exp(log), lam=0.7, loss=3.0, **given), bounds=(-5, 12),
        options={"xatol": 1e-9},
    )  # fmt: skip
    assert math.exp(found.x) == pytest.approx(pmtl_best_rounds(**given), rel=1e-4)


def test_the_bound_falls_with_clients_and_epsilon_as_published():
    """At fixed T the noise falls as 1/(m eps)^2; at the published T the bound as 1/m."""

    def noise(clients, epsilon):
        free = pmtl_bound(20.0, lam=1.0, clients=clients, epsilon=1e9, **SETTING)
        return pmtl_bound(20.0, lam=1.0, clients=clients, epsilon=epsilon, **SETTING) - free

    assert noise(100, 1.0) / noise(300, 1.0) == pytest.approx(9)
    assert noise(100, 1.0) / noise(100, 3.0) == pytest.approx(9)
    at = [
        pmtl_bound(
            pmtl_rounds(clients=m, dimension=10, gamma=0.5, lam=2.0), clients=m, lam=2.0,
            epsilon=1.0, **SETTING,
        )
        for m in (100, 700)
    ]  # fmt: skip
    assert at[0] / at[1] == pytest.approx(7)
    with pytest.raises(ValueError, match="rounds = 0"):
        pmtl_bound(0, clients=2, lam=1.0, epsilon=1.0, **SETTING)


def test_the_strongly_convex_bound_is_never_below_the_largest_loss():
    for rounds in (1, 10, 1000):
        for start in (0.0, 0.5, 1.0):  # no excess is above the largest loss
            assert pmtl_strongly_convex_bound(rounds, start=start, loss=1.0) >= 1.0


def drawn(targets, *, rounds, sigma, lam, lr, change_from, draws):
    """Return excesses of Algorithm 1 without clipping, in plain numpy."""
    generator = np.random.default_rng(7)
    mean, found = targets.mean(axis=0), []
    best = (targets + lam * mean) / (1 + lam)

    def objective(models):
        apart = ((models - models.mean(axis=0)) ** 2).sum(axis=1)
        return (lam * apart + ((models - targets) ** 2).sum(axis=1)).mean() / 2

    for _ in range(draws):
        models, shared = np.zeros_like(targets), np.zeros(targets.shape[1])
        for _ in range(rounds):
            after = models - lr * (models - targets + lam * (models - shared))
            change = after - (models if change_from == "own" else shared)
            shared = shared + change.mean(axis=0) + sigma * generator.normal(size=len(shared))
            models = after
        found.append(objective(models) - objective(best))
    return np.array(found)


@pytest.mark.parametrize("change_from", ["own", "shared"])
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_mean_estimation_is_exact(change_from, rounds):
    """Mean of 4,000 draws; z below 5 has a false-alarm rate of 6e-7 for each of 6 cases."""
    targets = np.random.default_rng(1).normal(size=(6, 3))
    mean = targets.mean(axis=0)
    given = {"sigma": 0.4, "lam": 1.5, "lr": 0.25, "change_from": change_from}
    values = drawn(targets, rounds=rounds, draws=4000, **given)
    expected = mean_estimation_error(
        rounds, start=float(mean @ mean), dimension=3,
        spread=float(((targets - mean) ** 2).sum(axis=1).mean()), **given,
    )  # fmt: skip
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - expected) <= 5 * error + 1e-12
    with pytest.raises(ValueError, match="expected own or shared"):
        mean_estimation_error(1, start=0.0, spread=0.0, dimension=1, **given | {"change_from": "x"})


@pytest.mark.parametrize("change_from", ["own", "shared"])
def test_the_engine_does_what_the_recursion_says(change_from):
    """Without noise to rounding; with it, z of 60 seeds below 5 (false alarms: below 1e-5)."""
    targets = 0.3 * np.random.default_rng(2).normal(size=(40, 4))
    mean, rounds = targets.mean(axis=0), 6
    rows, names = np.tile(np.eye(4), (40, 1)), np.repeat(np.arange(40), 4)
    data = from_arrays(rows, targets.ravel(), names, task="regression")
    best = (targets + mean) / 2

    def objective(models):
        apart = ((models - models.mean(axis=0)) ** 2).sum(axis=1)
        return float((apart + ((models - targets) ** 2).sum(axis=1)).mean()) / 2

    values, sigma = [], 0.1
    for seed in range(60):
        plan = PMTL.published(
            clients=40, cohort=40, rounds=rounds, gamma=4.0, sigma=sigma, lam=1.0,
            change_from=change_from, model=Linear(bias=False), sgd=SGD(lr=0.8, steps=1, batch=4),
        )  # fmt: skip
        models = simulate(replace(plan, simulation_seed=seed), data).models
        weights = models.leaves["weight"][:, 0].double().numpy()
        values.append(objective(weights) - objective(best))
    expected = mean_estimation_error(
        rounds, sigma=sigma, lam=1.0, lr=0.2, start=float(mean @ mean), dimension=4,
        spread=float(((targets - mean) ** 2).sum(axis=1).mean()), change_from=change_from,
    )  # fmt: skip
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert abs(float(np.mean(values)) - expected) < 5 * error


def test_utility_of_mpmtl_by_hand():
    found = mpmtl_utility(epsilon=2.0, delta=0.01, clients=400, dimension=16, kept=4)
    growth = math.sqrt(math.log(math.e + 2 / (math.sqrt(2) * 0.01)) + 4)
    assert found.base == pytest.approx(4 * 16 * math.log(16) * growth / (20 * 2))
    assert (found.exponent, found.bound) == (0.4, pytest.approx(found.base**0.4))
    sparse = mpmtl_utility(
        epsilon=2.0, delta=0.01, clients=400, dimension=16, kept=4, structure="group_sparse",
        clip=2.0,
    )  # fmt: skip
    assert sparse.base == pytest.approx(4 * math.log(16) * growth / (2 * 400 * 2))
    given = {"epsilon": 2.0, "delta": 0.01, "dimension": 16, "kept": 4}
    for accelerated, convex, exponent in ((1, 0, 4 / 9), (0, 1, 0.5), (1, 1, 1.0)):
        small, large = (
            mpmtl_utility(
                clients=m, accelerated=bool(accelerated), strongly_convex=bool(convex), **given
            )
            for m in (10**8, 10**10)
        )
        assert small.bound / large.bound == pytest.approx(10**exponent)
        assert large.steps > small.steps > 1  # more clients: less noise, more steps
    with pytest.raises(ValueError, match="low_rank or group_sparse"):
        mpmtl_utility(clients=5, structure="dense", **given)


def test_convergence_bounds_hold_on_quadratics():
    """Algorithm 1 with one client per step on |s - a|^2/2 + (b_k - c_k)^2/2, for 200 draws."""
    generator = np.random.default_rng(3)
    clients, width, steps, sigma, diversity = 8, 3, 40, 0.2, 2.0
    goal, own = generator.normal(size=width), generator.normal(size=clients)
    gaps, squares, largest = [], [], 0.0
    for _ in range(200):
        s, b, path = np.zeros(width), np.zeros(clients), []
        for _ in range(steps):
            path.append(((s - goal) @ (s - goal), ((b - own) ** 2).sum()))
            k = generator.integers(clients)
            s = s - (s - goal + sigma * generator.normal(size=width)) / diversity
            b[k] -= (b[k] - own[k]) / diversity
        shared, personal = np.array(path).T
        largest = max(largest, math.sqrt(shared.max()))
        gaps.append(((s - goal) @ (s - goal) + ((b - own) ** 2).mean()) / 2)
        squares.append((shared + personal / clients**2).mean())
    start = (goal @ goal + (own**2).mean()) / 2
    bounds = Convergence(
        clients=clients, smoothness=1.0, gradient=largest, dimension=width, noise=sigma,
        diversity=diversity,
    )  # fmt: skip
    assert bounds.variance == pytest.approx((2 + 1 / 16) * 3 * 0.04)
    assert np.mean(squares) < bounds.nonconvex(steps, start)
    assert np.mean(gaps) < bounds.convex(steps, math.sqrt(goal @ goal + own @ own))
    assert np.mean(gaps) < bounds.strongly_convex(steps, start, 1 / clients)
    # Without noise and drift the last is plain gradient descent at rate c / (lam M L).
    still = replace(bounds, gradient=0.0, noise=0.0)
    rate = 1 - (1 / clients) / (diversity * clients)
    assert still.strongly_convex(10, start, 1 / clients) == pytest.approx(rate**10 * start)
    # The floors do not fall with steps, and grow with the interval.
    assert bounds.nonconvex(10**9, start) > clients * largest**2 / diversity
    assert replace(bounds, interval=3).convex(10, 1.0) > bounds.convex(10, 1.0)
