"""MTRL against a dense solve of its linear system and cvxpy's joint optimum."""

import cvxpy
import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import minimize

from coterie.data.federated import FederatedDataset, Spec
from coterie.solvers.mtrl import fit_mtrl, fit_related, relation_of

pytestmark = pytest.mark.full

COUNTS = (9, 3, 0, 25, 12)


def dataset(task, counts=COUNTS, features=4, is_sparse=False, seed=0):
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    x = (generator.normal(size=(offsets[-1], features)) + 0.3).astype(np.float32)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < 0.4))
    owner = np.repeat(np.arange(len(counts)), counts)
    score = np.asarray(x @ generator.normal(size=features)) * np.where(owner % 2, 1, -1)
    score += 0.5 * generator.normal(size=offsets[-1])
    y = (score > 0.3) if task == "binary" else score + 1
    spec = Spec(shape=(features,), outputs=1, task=task, clients=len(counts))
    names = [str(place) for place in range(len(counts))]
    rows = x if is_sparse else torch.from_numpy(x)
    return FederatedDataset(spec, names, offsets, rows, torch.from_numpy(y.astype(np.float32)))


def everyone(data):
    return data.clients(np.arange(len(data)))


def own_rows(data, client):
    begin, end = data.offsets[client : client + 2]
    x = data.features[begin:end]
    x = x.toarray() if data.is_sparse else x.numpy()
    return x.astype(np.float64), data.targets[begin:end].numpy().astype(np.float64)


def relation(count, seed=0):
    root = np.random.default_rng(seed).normal(size=(count, count))
    found = root @ root.T + 0.05 * np.eye(count)
    return torch.from_numpy(found / np.trace(found))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("features", [4, 30])
def test_weights_solve_the_dense_system(bias, is_sparse, features):
    data = dataset("regression", features=features, is_sparse=is_sparse)
    count, lam1, lam2 = len(data), 0.01, 0.02
    related = relation(count)
    weight, level = fit_related(everyone(data), related, lam1=lam1, lam2=lam2, bias=bias)
    pulls = lam1 * np.eye(count) + lam2 * np.linalg.inv(related.numpy())
    system, right = np.kron(pulls, np.eye(features)), np.zeros((count, features))
    for client in range(count):
        x, y = own_rows(data, client)
        if len(y):
            if bias:
                x, y = x - x.mean(axis=0), y - y.mean()
            here = slice(client * features, (client + 1) * features)
            system[here, here] += x.T @ x / len(y)
            right[client] = x.T @ y / len(y)
    expected = np.linalg.solve(system, right.reshape(-1)).reshape(count, features)
    np.testing.assert_allclose(weight, expected, atol=1e-8)
    for client in range(count):
        x, y = own_rows(data, client)
        best = (y - x @ expected[client]).mean() if bias and len(y) else 0.0
        np.testing.assert_allclose(level[client], best, atol=1e-7)
    assert features == 30 or weight[2].abs().max() > 1e-3  # related clients speak for it


@pytest.mark.parametrize("bias", [False, True])
def test_logistic_weights_are_a_minimum(bias):
    data = dataset("binary", counts=(15, 20, 25))
    lam1, lam2 = 0.01, 0.02
    related = relation(3)
    weight, level = fit_related(everyone(data), related, lam1=lam1, lam2=lam2, bias=bias)
    pulls = lam1 * np.eye(3) + lam2 * np.linalg.inv(related.numpy())

    def value(flat):
        w, b = flat[:12].reshape(3, 4), flat[12:] * bias
        total = np.sum(w * (pulls @ w)) / 2
        for client in range(3):
            x, y = own_rows(data, client)
            total += np.logaddexp(0, -(2 * y - 1) * (x @ w[client] + b[client])).mean()
        return total

    best = minimize(value, np.zeros(15), method="BFGS", options={"gtol": 1e-7})
    ours = value(np.concatenate([weight.numpy().ravel(), level.numpy()]))
    assert ours <= best.fun + 1e-10
    np.testing.assert_allclose(weight.numpy().ravel(), best.x[:12], atol=1e-3)


@pytest.mark.parametrize("task", ["regression", "binary"])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_joint_optimum_of_cvxpy(task, bias):
    data = dataset(task, counts=(14, 12, 16), features=3)
    lam1, lam2 = 0.02, 0.05
    weight, level = cvxpy.Variable((3, 3)), cvxpy.Variable(3)
    related = cvxpy.Variable((3, 3), PSD=True)
    total = lam1 / 2 * cvxpy.sum_squares(weight) + lam2 / 2 * cvxpy.matrix_frac(weight, related)
    for client in range(3):
        x, y = own_rows(data, client)
        score = x @ weight[client] + (level[client] if bias else 0.0)
        if task == "binary":
            loss = cvxpy.sum(cvxpy.logistic(cvxpy.multiply(1 - 2 * y, score)))
        else:
            loss = cvxpy.sum_squares(score - y) / 2
        total += loss / len(y)
    best = cvxpy.Problem(cvxpy.Minimize(total), [cvxpy.trace(related) == 1]).solve(
        solver=cvxpy.CLARABEL
    )
    fit = fit_mtrl(everyone(data), lam1=lam1, lam2=lam2, bias=bias, tol=1e-10)
    np.testing.assert_allclose(fit.objective, best, rtol=2e-6)
    np.testing.assert_allclose(fit.weight, weight.value, atol=5e-3)
    np.testing.assert_allclose(fit.relation, related.value, atol=5e-3)


def objective(data, weight, level, related, lam1, lam2, ridge=0.0):
    moment = weight.numpy() @ weight.numpy().T + ridge**2 * np.eye(len(data))
    total = lam1 / 2 * float((weight**2).sum())
    total += lam2 / 2 * np.trace(np.linalg.solve(related.numpy(), moment))
    for client in range(len(data)):
        x, y = own_rows(data, client)
        if len(y):
            score = x @ weight[client].numpy() + float(level[client])
            binary = data.spec.task == "binary"
            loss = np.logaddexp(0, -(2 * y - 1) * score) if binary else (score - y) ** 2 / 2
            total += loss.mean()
    return total


@pytest.mark.parametrize("task", ["regression", "binary"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_alternating_steps_never_raise_the_objective(task, is_sparse):
    """They fall towards the joint minimum (slowly in the end), and not below it."""
    counts = np.random.default_rng(0).integers(4, 40, size=20)
    data = dataset(task, counts=counts, features=6, is_sparse=is_sparse)
    clients, lam1, lam2, ridge = everyone(data), 1e-3, 0.02, 1e-3
    related, values = torch.eye(20).double() / 20, []
    for _ in range(12):
        weight, level = fit_related(clients, related, lam1=lam1, lam2=lam2, bias=True)
        values.append(objective(data, weight, level, related, lam1, lam2, ridge))
        related = relation_of(weight, ridge)
        values.append(objective(data, weight, level, related, lam1, lam2, ridge))
    assert np.diff(values).max() <= 1e-9
    joint = fit_mtrl(clients, lam1=lam1, lam2=lam2, bias=True)
    assert joint.objective - 1e-6 <= values[-1] <= 1.25 * joint.objective


@pytest.mark.parametrize("task", ["regression", "binary"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lam1", [0.0, 0.01])
def test_the_joint_fit_is_stationary(task, bias, lam1):
    """More models than features: -gradient = lam2 |W|_* S + lam1 W, S a trace norm subgradient."""
    counts = np.random.default_rng(1).integers(0, 40, size=30)
    data = dataset(task, counts=counts, features=8)
    fit = fit_mtrl(everyone(data), lam1=lam1, lam2=0.01, bias=bias, tol=1e-9)
    assert 0 <= fit.gap <= 1.01e-9 * fit.objective
    np.testing.assert_allclose(np.trace(fit.relation), 1, rtol=1e-12)
    slope = lam1 * fit.weight.numpy()
    for client in range(30):
        x, y = own_rows(data, client)
        if len(y):
            score = x @ fit.weight[client].numpy() + float(fit.bias[client])
            rest = (score if task == "regression" else 1 / (1 + np.exp(-score))) - y
            slope[client] += x.T @ rest / len(y)
    size = np.linalg.svd(fit.weight.numpy(), compute_uv=False).sum()
    assert np.linalg.norm(slope, 2) <= 0.01 * size * 1.001
    np.testing.assert_allclose(-(slope * fit.weight.numpy()).sum(), 0.01 * size**2, rtol=1e-3)


def test_the_same_rows_take_one_step_of_conjugate_gradients(monkeypatch):
    """With the same rows for all clients the preconditioner is the system."""
    data = dataset("regression", counts=(8,) * 4, features=12)
    data.features[:] = data.features[:8].repeat(4, 1)
    related = relation(4)
    fit = fit_related(everyone(data), related, lam1=0.1, lam2=0.1, bias=True)
    monkeypatch.setattr("coterie.solvers._problem._shared", lambda *_: None)
    again = fit_related(everyone(data), related, lam1=0.1, lam2=0.1, bias=True)
    monkeypatch.setattr("coterie.solvers.mtrl._WIDE", 0)
    wide = fit_related(everyone(data), related, lam1=0.1, lam2=0.1, bias=True)
    for ours, other, third in zip(fit, again, wide, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-9)
        np.testing.assert_allclose(ours, third, atol=1e-9)


def test_opposed_clients_are_seen_as_such():
    data = dataset("regression", counts=(30,) * 4, features=3)
    fit = fit_mtrl(everyone(data), lam1=1e-3, lam2=1e-3, bias=True)
    related = fit.relation.numpy()
    alike = related / np.sqrt(np.outer(np.diag(related), np.diag(related)))
    assert alike[0, 2] > 0.8 > -0.8 > alike[0, 1]


def test_relation_of_models():
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    found = relation_of(weight, 0.1).numpy()
    moment = weight.double().numpy() @ weight.double().numpy().T + 0.01 * np.eye(6)
    root = found * np.sqrt(np.linalg.eigvalsh(moment)).sum()
    np.testing.assert_allclose(root @ root, moment, atol=1e-10)


def test_empty_and_constant_clients():
    empty = fit_mtrl(everyone(dataset("regression", counts=(0, 0))), lam1=0.1, lam2=0.1, bias=True)
    assert not empty.weight.any()
    data = dataset("regression", counts=(5, 5))
    data.targets[:] = 2.0
    fit = fit_mtrl(everyone(data), lam1=0.1, lam2=0.1, bias=True)
    assert fit.weight.abs().max() < 1e-9
    np.testing.assert_allclose(fit.bias, 2.0)
    nobody = fit_mtrl(data.clients(np.arange(0)), lam1=0.1, lam2=0.1, bias=True)
    assert nobody.weight.shape == (0, 4)


def test_refusals():
    clients = everyone(dataset("regression"))
    with pytest.raises(ValueError, match="lam1: given"):
        fit_mtrl(clients, lam1=-1.0, lam2=1.0, bias=True)
    with pytest.raises(ValueError, match="lam2: given"):
        fit_mtrl(clients, lam1=1.0, lam2=0.0, bias=True)
    with pytest.raises(RuntimeError, match="after 1 iterations"):
        fit_mtrl(clients, lam1=0.0, lam2=1e-3, bias=True, most=1)
    with pytest.raises(ValueError, match="relation: given shape"):
        fit_related(clients, torch.eye(2), lam1=1.0, lam2=1.0, bias=True)
    with pytest.raises(ValueError, match="relation: given an eigenvalue"):
        fit_related(clients, torch.zeros(5, 5), lam1=1.0, lam2=1.0, bias=True)
