"""Joint fits and MTRL against cvxpy, scikit-learn and their optimality conditions."""

from dataclasses import replace

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.linear_model import MultiTaskLasso
from tests.solvers.rows import everyone, federate, own_rows

from coterie.data.federated import Spec
from coterie.solvers import multitask
from coterie.solvers.multitask import fit_mtrl, fit_multitask, lam_max, relation_of
from coterie.solvers.ridge import fit_lasso, solve_ridge

pytestmark = pytest.mark.full

COUNTS = (9, 1, 0, 25, 12, 40)
TASKS = ["regression", "binary"]
PENALTIES = ["trace", "l21"]


def dataset(task, counts=COUNTS, features=6, is_sparse=False, seed=0, offset=0.3, density=0.4):
    generator = np.random.default_rng(seed)
    rows = sum(counts)
    x = (generator.normal(size=(rows, features)) + offset).astype(np.float32)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < density))
    shared = generator.normal(size=features) * (np.arange(features) % 3 == 0)
    score = np.asarray(x @ shared) + generator.normal(size=rows)
    y = (score > 0.3) if task == "binary" else 3 * score + 1
    return federate(task, counts, x, y.astype(np.float32))


def norms(matrix, penalty):
    if penalty == "trace":
        return np.linalg.svd(matrix, compute_uv=False)
    return np.linalg.norm(matrix, axis=0)


def objective(data, fit, penalty, lam, mu):
    total = lam * norms(fit.weight.numpy(), penalty).sum() + mu / 2 * float((fit.weight**2).sum())
    for client in range(len(data)):
        x, y = own_rows(data, client)
        if len(y):
            score = x @ fit.weight[client].numpy() + float(fit.bias[client])
            total += losses(data, score, y).mean()
    return total


def losses(data, score, y):
    if data.spec.task == "binary":
        return np.logaddexp(0, -(2 * y - 1) * score)
    return (score - y) ** 2 / 2


def gradient(data, fit):
    """The smooth part's gradients by weights (m, d) and biases (m,), from the formula."""
    found = np.zeros(fit.weight.shape), np.zeros(len(data))
    for client in range(len(data)):
        x, y = own_rows(data, client)
        if len(y):
            score = x @ fit.weight[client].numpy() + float(fit.bias[client])
            slope = (score if data.spec.task == "regression" else 1 / (1 + np.exp(-score))) - y
            found[0][client], found[1][client] = x.T @ slope / len(y), slope.mean()
    return found


def check_conditions(data, fit, penalty, lam, mu, bias, slack):
    """-gradient = lam S with S a subgradient: dual norm <= 1 and S.W = norm of W."""
    slope, level = gradient(data, fit)
    slope = slope + mu * fit.weight.numpy()
    assert norms(slope, penalty).max() <= lam * (1 + slack)
    size = norms(fit.weight.numpy(), penalty).sum()
    inner = -float((slope * fit.weight.numpy()).sum())
    assert abs(inner - lam * size) <= slack * max(
        lam * size, objective(data, fit, penalty, lam, mu)
    )
    if bias:
        assert np.abs(level).max() <= 1e-5


def by_cvxpy(data, penalty, lam, mu, bias):
    weight, level = cvxpy.Variable((len(data), data.spec.features)), cvxpy.Variable(len(data))
    norm = cvxpy.normNuc(weight) if penalty == "trace" else cvxpy.sum(cvxpy.norm(weight, axis=0))
    total = lam * norm + mu / 2 * cvxpy.sum_squares(weight)
    for client in range(len(data)):
        x, y = own_rows(data, client)
        if len(y):
            score = x @ weight[client] + (level[client] if bias else 0.0)
            if data.spec.task == "binary":
                loss = cvxpy.sum(cvxpy.logistic(cvxpy.multiply(1 - 2 * y, score)))
            else:
                loss = cvxpy.sum_squares(score - y) / 2
            total += loss / len(y)
    return float(cvxpy.Problem(cvxpy.Minimize(total)).solve(solver=cvxpy.CLARABEL))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("bias", "mu"), [(False, 0.05), (True, 0.0), (True, 0.05)])
def test_matches_cvxpy(task, penalty, bias, mu):
    counts = (9, 0, 14, 5) if task == "regression" else (14, 0, 20, 17)
    data = dataset(task, counts=counts)
    lam = 0.2 * lam_max(everyone(data), penalty, bias)
    fit = fit_multitask(everyone(data), penalty=penalty, lam=lam, mu=mu, bias=bias, tol=1e-8)
    assert fit.weight.shape == (4, 6)
    assert fit.weight.dtype == fit.bias.dtype == torch.float64
    assert not fit.weight[1].any()
    assert bias or not fit.bias.any()
    best = by_cvxpy(data, penalty, lam, mu, bias)
    np.testing.assert_allclose(fit.objective, best, rtol=2e-6)
    np.testing.assert_allclose(
        fit.objective,
        objective(data, fit, penalty, lam, mu),
        rtol=1e-9 if task != "binary" else 1e-7,
    )
    assert 0 <= fit.gap <= 1.01e-8 * fit.objective


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(30, 12), (12, 60)])
def test_matches_scikit_learn_on_the_same_rows(bias, rows, features):
    data = dataset("regression", counts=(rows,) * 7, features=features)
    data.features[:] = data.features[:rows].repeat(7, 1)
    clients = everyone(data)
    lam = 0.1 * lam_max(clients, "l21", bias)
    fit = fit_multitask(clients, penalty="l21", lam=lam, bias=bias, tol=1e-10)
    x, y = data.features[:rows].double().numpy(), data.targets.reshape(7, rows).T.double().numpy()
    theirs = MultiTaskLasso(lam, fit_intercept=bias, tol=1e-12, max_iter=10**6).fit(x, y)
    np.testing.assert_allclose(fit.weight, theirs.coef_, atol=2e-4)
    np.testing.assert_allclose(fit.bias, theirs.intercept_ * np.ones(7), atol=2e-4)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("bias", "features"), [(False, 90), (True, 6)])
def test_shared_compressed_and_sparse_rows_give_one_answer(
    task, penalty, bias, features, monkeypatch
):
    """Kept once, in each client's own copy, compressed or not, dense or CSR: the same minimum."""
    data = dataset(task, counts=(20,) * 3, features=features, is_sparse=True)
    rows = data.features[:20]
    data = replace(data, features=sparse.vstack([rows] * 3, format="csr"))
    dense = replace(data, features=torch.from_numpy(data.features.toarray()))
    lam = 0.1 * lam_max(everyone(dense), penalty, bias)

    def solve(which):
        return fit_multitask(everyone(which), penalty=penalty, lam=lam, bias=bias, tol=1e-9)

    once = solve(dense)
    found = [solve(data)]
    monkeypatch.setattr(multitask, "_shared", lambda *_: None)
    found.append(solve(dense))
    monkeypatch.setattr(multitask, "_WIDE", 0)
    found.append(solve(dense))
    for fit in found:
        np.testing.assert_allclose(fit.objective, once.objective, rtol=1e-8)
        np.testing.assert_allclose(fit.weight, once.weight, atol=1e-3)
        np.testing.assert_allclose(fit.bias, once.bias, atol=1e-3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("is_sparse", "share"), [(False, 0.5), (True, 0.05)])
def test_conditions_hold_on_larger_problems(task, penalty, is_sparse, share):
    counts = np.random.default_rng(5).integers(5, 60, size=40)
    data = dataset(task, counts=counts, features=70, is_sparse=is_sparse, density=0.1, seed=2)
    lam = share * lam_max(everyone(data), penalty, True)
    fit = fit_multitask(everyone(data), penalty=penalty, lam=lam, bias=True, tol=1e-7)
    check_conditions(data, fit, penalty, lam, 0.0, True, 2e-3)


@settings(max_examples=25, deadline=None)
@given(
    task=st.sampled_from(TASKS),
    penalty=st.sampled_from(PENALTIES),
    bias=st.booleans(),
    mu=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 15), min_size=1, max_size=6),
    share=st.floats(0.05, 1.2),
)
def test_conditions_hold(task, penalty, bias, mu, seed, counts, share):
    data = dataset(task, counts=counts, features=4, seed=seed)
    lam = share * max(lam_max(everyone(data), penalty, bias), 1e-3)
    fit = fit_multitask(everyone(data), penalty=penalty, lam=lam, mu=mu, bias=bias, tol=1e-9)
    whole = objective(data, fit, penalty, lam, mu)
    # Clients of one class have a loss of tol each, that is not part of the objective.
    np.testing.assert_allclose(fit.objective, whole, rtol=1e-6, atol=1e-8)
    check_conditions(data, fit, penalty, lam, mu, bias, 1e-3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("bias", [False, True])
def test_lam_max_is_where_weights_vanish(task, penalty, bias):
    clients = everyone(dataset(task))
    most = lam_max(clients, penalty, bias)
    zero = fit_multitask(clients, penalty=penalty, lam=most * 1.0001, bias=bias)
    assert not zero.weight.any()
    some = fit_multitask(clients, penalty=penalty, lam=most * 0.98, bias=bias, tol=1e-9)
    assert some.weight.any()


@pytest.mark.parametrize("task", TASKS)
def test_one_client_is_a_single_task_problem(task):
    """Of one client both norms are known: |w| (trace), |w|_1 (l2,1)."""
    clients = everyone(dataset(task, counts=(30,), features=8))
    joint = fit_multitask(clients, penalty="l21", lam=0.1, bias=True, tol=1e-10)
    weight, bias = fit_lasso(clients, lam=0.1, bias=True)
    np.testing.assert_allclose(joint.weight, weight, atol=1e-4)
    np.testing.assert_allclose(joint.bias, bias, atol=1e-4)


def test_low_rank_models_are_found():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=(60, 2)) @ generator.normal(size=(2, 15))
    x = generator.normal(size=(60, 10, 15))
    y = np.einsum("knd,kd->kn", x, truth).astype(np.float32)
    rows = x.reshape(600, 15).astype(np.float32)
    clients = everyone(federate("regression", (10,) * 60, rows, y.reshape(-1)))
    lam = 0.01 * lam_max(clients, "trace", False)
    fit = fit_multitask(clients, penalty="trace", lam=lam, bias=False)
    assert np.linalg.matrix_rank(fit.weight.numpy(), tol=1e-2) <= 3
    alone = solve_ridge(clients, anchor=None, lam=1e-3, bias=False)["weight"][:, 0]
    error = np.linalg.norm(fit.weight.numpy() - truth)
    assert error < 0.2 * np.linalg.norm(alone.numpy() - truth)


def test_one_class_alone_and_nobody():
    data = dataset("binary", counts=(10, 10, 10))
    data.targets[:10] = 1
    fit = fit_multitask(everyone(data), penalty="trace", lam=0.05, bias=True)
    assert not fit.weight[0].any()
    np.testing.assert_allclose(np.log1p(np.exp(-float(fit.bias[0]))), 1e-6, rtol=1e-4)
    others = fit_multitask(data.clients(np.array([1, 2])), penalty="trace", lam=0.05, bias=True)
    np.testing.assert_allclose(fit.weight[1:], others.weight, atol=1e-12)
    nobody = fit_multitask(data.clients(np.arange(0)), penalty="l21", lam=0.05, bias=True)
    assert nobody.weight.shape == (0, 6)
    empty = everyone(dataset("regression", counts=(0, 0)))
    assert not fit_multitask(empty, penalty="l21", lam=0.05, bias=True).weight.any()
    assert lam_max(empty, "trace", True) == 0


def test_inputs_stay_and_rows_of_any_shape():
    data = dataset("regression")
    copies = data.features.clone(), data.targets.clone()
    flat = fit_multitask(everyone(data), penalty="l21", lam=0.1, bias=True)
    assert torch.equal(data.features, copies[0])
    assert torch.equal(data.targets, copies[1])
    shaped = federate("regression", COUNTS, data.features.reshape(-1, 2, 3), data.targets)
    again = fit_multitask(everyone(shaped), penalty="l21", lam=0.1, bias=True)
    assert torch.equal(flat.weight, again.weight)


def test_refusals():
    data = dataset("regression")
    clients = everyone(data)
    for lam in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lam: given"):
            fit_multitask(clients, penalty="trace", lam=lam, bias=True)
    with pytest.raises(ValueError, match="penalty: given"):
        fit_multitask(clients, penalty="l1", lam=1.0, bias=True)
    with pytest.raises(ValueError, match="mu: given"):
        fit_multitask(clients, penalty="trace", lam=1.0, mu=-1.0, bias=True)
    with pytest.raises(ValueError, match="tol: given"):
        fit_multitask(clients, penalty="trace", lam=1.0, bias=True, tol=0.0)
    for penalty in PENALTIES:
        with pytest.raises(RuntimeError, match=r"relative gap .* after 1 iterations"):
            fit_multitask(clients, penalty=penalty, lam=1e-3, bias=True, tol=1e-9, most=1)
    data.features[3, 1] = torch.nan
    with pytest.raises(ValueError, match="client 0: given rows with NaN"):
        fit_multitask(clients, penalty="trace", lam=1.0, bias=True)
    binary = dataset("binary")
    binary.targets[0] = 3
    with pytest.raises(ValueError, match="expected 0 or 1"):
        fit_multitask(everyone(binary), penalty="trace", lam=1.0, bias=True)
    other = replace(
        dataset("binary"), spec=Spec((6,), 3, "multiclass", 6), targets=binary.targets.long() % 3
    )
    with pytest.raises(ValueError, match="'multiclass'"):
        fit_multitask(everyone(other), penalty="trace", lam=1.0, bias=True)


# MTRL


def opposed(task, counts=(9, 3, 0, 25, 12), features=4, seed=0):
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=(sum(counts), features)) + 0.3).astype(np.float32)
    owner = np.repeat(np.arange(len(counts)), counts)
    score = np.asarray(x @ generator.normal(size=features)) * np.where(owner % 2, 1, -1)
    score += 0.5 * generator.normal(size=len(x))
    y = (score > 0.3) if task == "binary" else score + 1
    return federate(task, counts, x, y.astype(np.float32))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bias", [False, True])
def test_mtrl_matches_the_joint_optimum_of_cvxpy(task, bias):
    data = opposed(task, counts=(14, 12, 16), features=3)
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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("bias", "lam1"), [(False, 0.01), (True, 0.0)])
def test_mtrl_is_stationary(task, bias, lam1):
    """More models than features: -gradient = lam2 |W|_* S + lam1 W, S a trace norm subgradient."""
    counts = np.random.default_rng(1).integers(0, 40, size=30)
    data = opposed(task, counts=counts, features=8)
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


def test_opposed_clients_are_seen_as_such():
    data = opposed("regression", counts=(30,) * 4, features=3)
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


def test_mtrl_of_empty_and_constant_clients():
    empty = fit_mtrl(everyone(opposed("regression", counts=(0, 0))), lam1=0.1, lam2=0.1, bias=True)
    assert not empty.weight.any()
    data = opposed("regression", counts=(5, 5))
    data.targets[:] = 2.0
    fit = fit_mtrl(everyone(data), lam1=0.1, lam2=0.1, bias=True)
    assert fit.weight.abs().max() < 1e-9
    np.testing.assert_allclose(fit.bias, 2.0)
    nobody = fit_mtrl(data.clients(np.arange(0)), lam1=0.1, lam2=0.1, bias=True)
    assert nobody.weight.shape == (0, 4)


def test_mtrl_refusals():
    clients = everyone(opposed("regression"))
    with pytest.raises(ValueError, match="lam1: given"):
        fit_mtrl(clients, lam1=-1.0, lam2=1.0, bias=True)
    with pytest.raises(ValueError, match="lam2: given"):
        fit_mtrl(clients, lam1=1.0, lam2=0.0, bias=True)
    with pytest.raises(RuntimeError, match="after 1 iterations"):
        fit_mtrl(clients, lam1=0.0, lam2=1e-3, bias=True, most=1)
