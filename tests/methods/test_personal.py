"""Ditto, pFedMe, PP-SGD and naive privacy against closed forms and explicit loops."""

import math

import numpy as np
import pytest
import torch

from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.ditto import Ditto
from coterie.methods.naive_dp import NaiveDP
from coterie.methods.pfedme import PFedMe
from coterie.methods.pmtl import PMTL
from coterie.methods.ppsgd import PPSGD
from coterie.models import MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Poisson
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full

BARE = Privacy(epsilon=math.inf)
PLAIN = Linear(bias=False)
EVERYONE = np.arange(5)
WHOLE = 1000  # rows a batch: more than any client has


def fit(method, data, rounds, privacy=BARE, **kwargs):
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=0, **kwargs)
    return simulate(plan, data)


def few(task="regression", clients=5, seed=3):
    return synthetic(
        "mean", clients=clients, rows=(4, 9), features=3, task=task, spread=0.5, seed=seed
    ).data


def moments(data):
    """X'X / n and X'y / n of each client."""
    for k in range(len(data)):
        rows = slice(data.offsets[k], data.offsets[k + 1])
        x, y = data.features[rows].double().numpy(), data.targets[rows].double().numpy()
        yield x.T @ x / len(y), x.T @ y / len(y)


def weights(tree):
    return tree["weight"].double().numpy().squeeze(-2)


# ---- Ditto ---------------------------------------------------------------------------------------


def test_ditto_is_one_model_for_all_and_ridges_towards_it():
    """One full-batch step a round: shared minimises the clients' mean loss; v_k is a ridge."""
    data = few()
    method = Ditto(model=PLAIN, lam=0.4, sgd=SGD(lr=0.08, steps=1, batch=WHOLE))
    outcome = fit(method, data, rounds=300)
    squares, products = map(np.array, zip(*moments(data), strict=True))
    together = np.linalg.solve(squares.mean(axis=0), products.mean(axis=0))
    np.testing.assert_allclose(weights(outcome.shared), together, atol=1e-3)
    pulled = [np.linalg.solve(a + 0.4 * np.eye(3), b + 0.4 * together) for a, b in moments(data)]
    np.testing.assert_allclose(weights(outcome.models.leaves), pulled, atol=1e-3)


def test_dittos_personal_models_never_move_the_shared_one():
    data = few("binary")
    posts = [
        fit(Ditto(lam=lam, own_sgd=SGD(lr=lr)), data, rounds=3).posts
        for lam, lr in ((0.1, 0.1), (5.0, 0.01))
    ]
    for one, other in zip(*posts, strict=True):
        assert all(torch.equal(one.value[name], other.value[name]) for name in one.value)


def test_dittos_own_steps_are_kept_from_round_to_round():
    data = few("binary")
    short, long = (
        fit(Ditto(solver="sgd", own_sgd=SGD(epochs=epochs)), data, rounds=6).models.leaves
        for epochs in (1, 9)
    )
    assert not torch.allclose(short["weight"], long["weight"])


# ---- pFedMe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_rounds,beta", [(1, 1.0), (5, 1.0), (5, 0.5)])
def test_pfedme_fixed_point(local_rounds, beta):
    """theta_k(w) = P w + q; w_k after R steps is affine in w; shared is where the mean stays."""
    data, lam, lr = few(), 0.5, 0.8
    method = PFedMe(model=PLAIN, lam=lam, lr=lr, local_rounds=local_rounds, beta=beta)
    outcome = fit(method, data, rounds=60)
    eye, step = np.eye(3), lr * lam
    slopes, offsets = np.zeros((3, 3)), np.zeros(3)
    for a, b in moments(data):
        inverse = np.linalg.inv(a + lam * eye)
        move = (1 - step) * eye + step * lam * inverse
        slope, offset = eye, np.zeros(3)
        for _ in range(local_rounds):
            slope, offset = move @ slope, move @ offset + step * inverse @ b
        slopes, offsets = slopes + slope - eye, offsets + offset
    shared = np.linalg.solve(slopes, -offsets)
    np.testing.assert_allclose(weights(outcome.shared), shared, atol=1e-3)
    theta = [np.linalg.solve(a + lam * eye, b + lam * shared) for a, b in moments(data)]
    np.testing.assert_allclose(weights(outcome.models.leaves), theta, atol=1e-3)


def test_pfedme_with_one_whole_step_is_pmtl():
    data = few()
    privacy = Privacy(noise_multiplier=2.0, clip=0.3)
    settings = {"rounds": 6, "privacy": privacy, "sampler": Poisson(3.0)}
    left = fit(PFedMe(lam=0.5, lr=2.0, local_rounds=1), data, **settings)
    right = fit(PMTL(lam=0.5), data, **settings)
    for one, other in zip(left.posts, right.posts, strict=True):
        torch.testing.assert_close(one.value["weight"], other.value["weight"], rtol=0, atol=1e-5)
    torch.testing.assert_close(left.models.leaves["weight"], right.models.leaves["weight"])


# ---- PP-SGD --------------------------------------------------------------------------------------


def gradient(task, u, x, y):
    """Of the mean loss at u, (outputs, features)."""
    if task == "multiclass":
        logits = x @ u.T
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        return (chances - np.eye(len(u))[y.astype(int)]).T @ x / len(y)
    scores = x @ u[0]
    wrong = scores - y if task == "regression" else 1 / (1 + np.exp(-scores)) - y
    return (wrong @ x / len(y))[None]


def joint_steps(task, data, *, eta_w, eta_theta, steps, rounds, ridge, last):
    """SGD on (w, theta_k) as two blocks of parameters, one client at a time."""
    rows = [slice(data.offsets[k], data.offsets[k + 1]) for k in range(len(data))]
    x = [data.features[part].double().numpy() for part in rows]
    y = [data.targets[part].double().numpy() for part in rows]
    w = np.zeros((data.spec.outputs, data.spec.features))
    theta = [np.zeros_like(w) for _ in rows]
    for _ in range(rounds):
        moves = []
        for k in range(len(rows)):
            own, mine = w.copy(), theta[k]
            for _ in range(steps):
                g = gradient(task, own + mine, x[k], y[k])
                own, mine = own - eta_w * g, mine - eta_theta * g
            theta[k] = mine / (1 + ridge * eta_theta * steps)
            moves.append(own - w)
        w = w + np.mean(moves, axis=0)
    for k in range(len(rows)):
        for _ in range(last):
            g = gradient(task, w + theta[k], x[k], y[k])
            theta[k] = theta[k] - eta_theta * (g + ridge * theta[k])
    return w, np.array([w + own for own in theta])


@pytest.mark.parametrize(
    "task,ridge",
    [("regression", 0), ("binary", 0), ("multiclass", 0), ("binary", 0.5), ("multiclass", 0.5)],
)
@pytest.mark.parametrize("eta_w,eta_theta", [(0.02, 0.06), (0.05, 0.01)])
def test_ppsgd_is_joint_sgd_on_both_parts(task, eta_w, eta_theta, ridge):
    data = few(task)
    method = PPSGD(
        model=PLAIN,
        share=eta_w / (eta_w + eta_theta),
        sgd=SGD(lr=eta_w + eta_theta, steps=4, batch=WHOLE),
        ridge=ridge,
        last_epochs=3,
    )
    outcome = fit(method, data, rounds=5)
    last = 4000 if ridge else 3  # with a ridge, theta ends at the minimum
    w, models = joint_steps(
        task, data, eta_w=eta_w, eta_theta=eta_theta, steps=4, rounds=5, ridge=ridge, last=last
    )
    np.testing.assert_allclose(outcome.shared["weight"], w, atol=2e-6)
    np.testing.assert_allclose(outcome.models.leaves["weight"], models, atol=5e-6)


def test_ppsgd_with_a_ridge_ends_in_ridge_regressions():
    data = few()
    outcome = fit(PPSGD(model=PLAIN, ridge=0.5), data, rounds=3)
    w = weights(outcome.shared)
    assert np.abs(w).max() > 0.1
    ends = [np.linalg.solve(a + 0.5 * np.eye(3), b + 0.5 * w) for a, b in moments(data)]
    np.testing.assert_allclose(weights(outcome.models.leaves), ends, atol=1e-5)


def test_what_the_clip_takes_from_the_shared_part_stays_with_the_client():
    """theta moves by its own share whatever is posted."""
    data = few("binary")
    states = []
    for privacy in (BARE, Privacy(noise_multiplier=1.0, clip=1e-3)):
        seen = []
        plan = Plan(method=PPSGD(), privacy=privacy, rounds=1, simulation_seed=0)
        simulate(plan, data, observe=lambda p, seen=seen: seen.append(p.store.take(EVERYONE, None)))
        states.append(seen[0])
    assert torch.equal(states[0]["weight"], states[1]["weight"])


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_ppsgd_needs_two_parts(share):
    with pytest.raises(ValueError, match=r"share = .*use local"):
        PPSGD(share=share)


def test_ppsgd_refuses_networks():
    with pytest.raises(ValueError, match="use linear, or pmtl"):
        PPSGD(model=MLP()).check(few().spec)


# ---- naive privacy -------------------------------------------------------------------------------


def test_naive_dp_without_noise_is_mean_regularised_learning():
    """Mean estimation, as Hu et al.: w_k = (x_k + lam xbar) / (1 + lam)."""
    x = np.array([-2.0, 0.5, 1.0, 4.5])
    data = FederatedDataset(
        Spec((1,), 1, "regression", 4), list("abcd"), np.arange(5), torch.ones(4, 1),
        torch.tensor(x, dtype=torch.float32),
    )  # fmt: skip
    outcome = fit(NaiveDP(model=PLAIN, lam=2.0), data, rounds=60)
    w = outcome.models.leaves["weight"].flatten().numpy()
    np.testing.assert_allclose(w, (x + 2 * x.mean()) / 3, atol=1e-4)


def test_every_model_of_naive_dp_is_what_everybody_sees():
    data = few()
    outcome = fit(NaiveDP(), data, rounds=3, privacy=Privacy(epsilon=1.0), sampler=Poisson(3.0))
    for name, leaf in outcome.models.leaves.items():
        seen = sum(post.value[name] for post in outcome.posts)
        assert seen.shape == leaf.shape
        torch.testing.assert_close(leaf.double(), seen, rtol=1e-5, atol=1e-5)


def test_naive_dp_is_as_useless_as_it_says():
    data = synthetic("mean", clients=60, rows=30, features=4, spread=0.1, noise=0.1, seed=1).data
    train, test = data.split(0.3, 0)
    errors = {}
    for method in (NaiveDP(), PMTL()):
        outcome = fit(method, train, rounds=3, privacy=Privacy(epsilon=1.0))
        errors[method.kind] = evaluate(method.model, outcome.rows, test).value
    assert errors["naive_dp"] > 1 and errors["pmtl"] < 0.5
    method = NaiveDP()
    assert any("useless" in said for said in method.notes(private=True).caveats)
    assert method.notes(private=False).caveats
    assert "no choice helps" in method.notes(rounds=3, clip=0.5).settings[0]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,settings",
    [
        (Ditto, {"lam": -1.0}),
        (Ditto, {"last_epochs": 0}),
        (PFedMe, {"lam": 0.0}),
        (PFedMe, {"local_rounds": 0}),
        (PFedMe, {"beta": math.inf}),
        (PPSGD, {"ridge": -0.1}),
        (PPSGD, {"last_epochs": 0}),
        (NaiveDP, {"lam": math.inf}),
    ],
)
def test_bad_settings(kind, settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} = "):
        kind(**settings)


def test_pfedme_refuses_steps_beyond_the_personal_model():
    with pytest.raises(ValueError, match=r"use lr = 0.5 or less"):
        PFedMe(lam=2.0, lr=1.0)


@pytest.mark.parametrize("kind", [Ditto, PFedMe, PPSGD])
def test_clients_that_were_never_drawn_get_a_model_of_their_own(kind):
    data = few(clients=20)
    outcome = fit(kind(), data, rounds=2, sampler=Poisson(1.0))
    found = outcome.models.leaves["weight"].flatten(1)
    assert len(torch.unique(found, dim=0)) == 20
