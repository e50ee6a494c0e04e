"""PMTL against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.core.rng import Rng
from coterie.core.tree import stack, take
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import plan_for
from coterie.privacy.events import Gaussian
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full

BARE = Privacy(epsilon=math.inf)


def means(values):
    """Mean estimation: one row x = 1 per client, y = the client's value, no bias."""
    m = len(values)
    return FederatedDataset(
        Spec((1,), 1, "regression", m),
        [f"c{i}" for i in range(m)],
        np.arange(m + 1),
        torch.ones(m, 1),
        torch.tensor(values, dtype=torch.float32),
    )


def fit(method, data, rounds=200, privacy=BARE, **kwargs):
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=0, **kwargs)
    return simulate(plan, data)


@pytest.mark.parametrize(
    ("lam", "change_from", "solver"),
    [
        (0.1, "shared", "exact"),
        (4.0, "own", "exact"),
        (4.0, "shared", "sgd"),
        (0.1, "own", "sgd"),
    ],
)
def test_mean_estimation_oracle(lam, change_from, solver):
    """Hu et al.: w_k = (x_k + lam * xbar) / (1 + lam), shared = xbar."""
    x = np.array([-2.0, 0.5, 1.0, 4.5])
    method = PMTL(
        model=Linear(bias=False),
        lam=lam,
        solver=solver,
        change_from=change_from,
        sgd=SGD(lr=0.15, steps=40),
        last_epochs=60,
    )
    outcome = fit(method, means(x), rounds=120)
    w = outcome.models.leaves["weight"].flatten().numpy()
    np.testing.assert_allclose(outcome.shared["weight"].item(), x.mean(), atol=2e-3)
    np.testing.assert_allclose(w, (x + lam * x.mean()) / (1 + lam), atol=2e-3)


@pytest.mark.parametrize("change_from", ["shared", "own"])
def test_mean_estimation_in_clusters(change_from):
    """The same oracle inside each cluster, of which one has a single client."""
    x, clusters = np.array([-2.0, 0.5, 1.0, 4.5, 9.0]), (0, 1, 0, 1, 2)
    method = PMTL(
        model=Linear(bias=False),
        lam=2.0,
        solver="exact",
        change_from=change_from,
        clusters=clusters,
    )
    outcome = fit(method, means(x), rounds=60)
    centres = np.array([-0.5, 2.5, 9.0])
    np.testing.assert_allclose(outcome.shared["weight"].flatten(), centres, atol=1e-4)
    w = outcome.models.leaves["weight"].flatten().numpy()
    np.testing.assert_allclose(w, (x + 2 * centres[list(clusters)]) / 3, atol=1e-4)


@pytest.mark.full
def test_own_change_from_integrates_noise_and_shared_forgets_it():
    """The same noise: as printed the shared model is a random walk, from the shared one it is not.

    With one common value and exact solves, shared_{t+1} = N(shared_t) + noise has slope
    a = lam/(1+lam); its stationary variance is s^2/(1-a^2). As printed the walk's variance grows
    like T s^2 (1 + slope effects) at least. Ratio of mean squared errors at T = 100, a = 1/2: > 20.
    False-alarm rate: the walk's squared error over 200 independent coordinates is about
    chi2_200-distributed; falling below a fifth of its mean has probability < 1e-20.
    """
    # 200 separate one-feature problems: a ridge with orthogonal rows, so that w' is shared / 2.
    eye = FederatedDataset(
        Spec((200,), 1, "regression", 4),
        [f"c{i}" for i in range(4)],
        np.arange(0, 4 * 200 + 1, 200),
        torch.eye(200).repeat(4, 1) * math.sqrt(200),
        torch.zeros(4 * 200),
    )
    errors = {}
    for change in ("shared", "own"):
        method = PMTL(model=Linear(bias=False), lam=1.0, solver="exact", change_from=change)
        privacy = Privacy(noise_multiplier=0.1, clip=1.0)
        outcome = fit(method, eye, rounds=100, privacy=privacy)
        errors[change] = float(outcome.shared["weight"].double().square().mean())
    noise = (0.1 * 1.0 / 4) ** 2
    assert errors["shared"] == pytest.approx(noise / (1 - 0.25), rel=0.6)
    assert errors["own"] > 20 * errors["shared"]


@pytest.mark.full
def test_clip_below_the_deviation_moves_the_centre():
    """The documented caveat: with a small clip the fixed point is median-like, not the mean."""
    x = np.array([0.0, 0.0, 0.0, 0.0, 10.0])
    method = PMTL(model=Linear(bias=False), lam=0.1, solver="exact")
    tight = Privacy(noise_multiplier=1e-4, clip=0.01)
    outcome = fit(method, means(x), rounds=250, privacy=tight)
    assert abs(outcome.shared["weight"].item()) < 0.2
    wide = fit(method, means(x), rounds=80)
    assert outcome.shared["weight"].item() < 0.2 < wide.shared["weight"].item()
    assert wide.shared["weight"].item() == pytest.approx(2.0, abs=0.01)


def test_never_drawn_clients_still_get_a_solved_model():
    data = synthetic("mean", clients=50, rows=8, features=3, seed=0).data
    from coterie.privacy.sampling import Poisson

    plan = Plan(
        method=PMTL(lam=0.5),
        privacy=BARE,
        sampler=Poisson(1.0),
        rounds=2,
        simulation_seed=1,
    )
    outcome = simulate(plan, data)
    from coterie.solvers.ridge import solve_ridge

    everyone = data.clients(np.arange(50))
    expected = solve_ridge(everyone, anchor=outcome.shared, lam=0.5, bias=True)
    for name, leaf in expected.items():
        torch.testing.assert_close(outcome.models.leaves[name], leaf, rtol=1e-4, atol=1e-5)


def test_fedprox_and_fedavg_differ_and_share_one_model():
    data = synthetic("mean", clients=20, rows=10, features=3, seed=0).data
    plain = fit(FedAvg(sgd=SGD(lr=0.05, batch=2)), data, rounds=5)
    prox = fit(FedAvg(prox=5.0, solver="sgd", sgd=SGD(lr=0.05, batch=2)), data, rounds=5)
    assert torch.equal(plain.models.leaves["weight"][0], plain.models.leaves["weight"][7])
    assert not torch.allclose(plain.shared["weight"], prox.shared["weight"])


def test_local_is_ridge():
    from sklearn.linear_model import Ridge

    data = synthetic("mean", clients=5, rows=12, features=3, seed=0).data
    outcome = fit(Local(lam=0.2), data, rounds=1)
    for client in range(5):
        rows = slice(data.offsets[client], data.offsets[client + 1])
        x = np.hstack([data.features[rows].numpy(), np.ones((12, 1))])
        oracle = Ridge(alpha=0.2 * 12, fit_intercept=False).fit(x, data.targets[rows].numpy())
        model = outcome.model(client)
        got = np.append(model["weight"].numpy().ravel(), model["bias"].item())
        np.testing.assert_allclose(got, oracle.coef_, atol=1e-5)


def test_budget_by_round_reaches_the_mechanisms():
    method = PMTL()
    weights = (1.0, 2.0, 4.0)
    plan = Plan(method=method, privacy=Privacy(epsilon=1.0, delta=1e-5, budget=weights), rounds=3)
    events = plan.guarantee(100).events
    assert [e.noise_multiplier * w for e, w in zip(events, weights, strict=True)] == pytest.approx(
        [events[0].noise_multiplier] * 3
    )
    mu = math.sqrt(sum(1 / e.noise_multiplier**2 for e in events))
    assert mu == pytest.approx(0.26805, rel=3e-3)
    assert all(isinstance(event, Gaussian) for event in events)
    with pytest.raises(ValueError, match="one weight per round"):
        replace(plan, rounds=4)


# --- as published


@pytest.mark.parametrize("solver", ["exact", "sgd"])
def test_the_published_loss_is_a_sum_over_rows(solver):
    """One step towards s: w_k = (sum_i y_ki + lam s) / (n_k + lam), for x = 1."""
    made = synthetic(clients=3, rows=(2, 6), features=1, seed=1).data
    data = replace(made, features=torch.ones_like(made.features))
    method = PMTL(
        model=Linear(bias=False), lam=2.0, loss="sum", solver=solver, change_from="own",
        sgd=SGD(lr=0.5, steps=200, batch=100), last_epochs=100,
    )  # fmt: skip
    outcome = fit(method, data, rounds=1)
    s = float(outcome.shared["weight"])
    for client in range(3):
        y = data.clients(np.array([client])).y[0].numpy()
        expected = (y.sum() + 2.0 * s) / (len(y) + 2.0)
        assert float(outcome.model(client)["weight"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_published_plan_adds_sigma_to_the_mean_of_the_cohort():
    plan = PMTL.published(
        clients=205, cohort=100, rounds=1000, gamma=0.2, sigma=0.01, model=Linear()
    )
    method = plan.method
    assert (method.change_from, method.loss, method.last_solve) == ("own", "sum", False)
    (mechanism, *_) = plan.mechanisms(205)
    assert mechanism.deviation / 100 == pytest.approx(0.01)  # on the mean
    assert plan.guarantee(205).delta == 1 / 205
    assert plan.guarantee(205).relation == "replace"
    every = PMTL.published(clients=50, cohort=50, rounds=9, gamma=1.0, epsilon=2.0)
    noise = 4 * math.sqrt(9 * math.log(50)) / (2.0 * 50)
    assert every.mechanisms(50)[0].deviation / 50 == pytest.approx(noise)
    with pytest.raises(ValueError, match="Theorem 1 has constants"):
        PMTL.published(clients=50, cohort=10, rounds=9, gamma=1.0, epsilon=2.0)
    with pytest.raises(ValueError, match="give one of them"):
        PMTL.published(clients=50, cohort=10, rounds=9, gamma=1.0)


def test_a_published_run_trains():
    data = synthetic(clients=20, rows=(5, 9), features=3, seed=2).data
    plan = PMTL.published(
        clients=20, cohort=20, rounds=3, gamma=1.0, sigma=1e-4, lam=0.1, sgd=SGD(epochs=5)
    )
    outcome = simulate(replace(plan, simulation_seed=0), data)
    assert len(outcome.posts) == 3
    assert outcome.guarantee.epsilon > 100


def test_classifiers_with_many_rows_leave_the_shared_model():
    """One penalty for all holds them there; the average over penalties follows own rows."""
    given = {"clients": 60, "features": 5, "task": "binary", "noise": 0.3, "seed": 0}
    data = synthetic("mean", rows=90, spread=1.5, **given).data
    train, test = data.split(30, 0)
    plan = plan_for(train.spec, Privacy(epsilon=2.0), method=PMTL(), simulation_seed=0)
    outcome = simulate(plan, train)
    score = evaluate(plan.method.model, outcome.rows, test)
    held = everyone_solved(plan.method, outcome, train)
    single = evaluate(plan.method.model, lambda ids: take(held, torch.as_tensor(ids)), test)
    assert score.value > single.value + 0.02 and score.loss < 0.8 * single.loss


def everyone_solved(method, outcome, train):
    """Solve every client at lam itself."""
    clients = train.clients(np.arange(len(train)))
    start = stack(outcome.shared, len(train))
    problem = method.last_problem()
    return problem.solve(start, clients, Rng.seeded(0), round=0, anchor=outcome.shared)
