"""The lasso and logistic fits of single clients, against scikit-learn and cvxpy."""

from dataclasses import replace

import cvxpy
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Lasso, LogisticRegression
from tests.solvers.rows import everyone, federate, own_rows, spoil

from coterie.solvers.ridge import fit_lasso
from coterie.solvers.structured import _fit_logistic

pytestmark = pytest.mark.full

COUNTS = (7, 1, 0, 25, 12, 40)
KINDS = [("regression", "l1"), ("binary", "l1"), ("binary", "l2")]


def dataset(task, counts=COUNTS, features=5, is_sparse=False, seed=0, offset=0.3):
    generator = np.random.default_rng(seed)
    rows = sum(counts)
    x = (generator.normal(size=(rows, features)) + offset).astype(np.float32)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < 0.4))
    score = np.asarray(x @ generator.normal(size=features)) + generator.normal(size=rows)
    y = (score > 0.5) if task == "binary" else 3 * score + 1
    return federate(task, counts, x, y.astype(np.float32))


def objective(task, penalty, lam, x, y, weight, bias):
    score = x @ weight + bias
    if task == "binary":
        loss = np.logaddexp(0, -(2 * y - 1) * score).mean()
    else:
        loss = (score - y) @ (score - y) / (2 * len(y))
    return loss + lam * (np.abs(weight).sum() if penalty == "l1" else weight @ weight / 2)


def fit(clients, penalty, lam, bias, **how):
    """Weights (c, d) and biases (c,); the logistic fit has a penalty of 1, so rows are scaled."""
    if penalty == "l1":
        return fit_lasso(clients, lam=lam, bias=bias, **how)
    rows = clients.features / lam**0.5
    weight, intercept = _fit_logistic(replace(clients, features=rows, memory={}), bias)
    return weight / lam**0.5, intercept


def peer(task, penalty, lam, x, y, bias):
    if task == "regression":
        found = Lasso(lam, fit_intercept=bias, tol=1e-12, max_iter=10**6).fit(x, y)
        return found.coef_, float(found.intercept_)
    # saga's l1 leaves the bias free, as lbfgs's l2 does.
    how = {"solver": "saga", "l1_ratio": 1} if penalty == "l1" else {"solver": "lbfgs"}
    found = LogisticRegression(
        C=1 / (lam * len(y)), fit_intercept=bias, tol=1e-10, max_iter=10**5, **how
    ).fit(x, y)
    return found.coef_[0], float(np.atleast_1d(found.intercept_)[0])


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "is_sparse"), [(5, True), (40, False)])
def test_matches_scikit_learn(task, penalty, bias, features, is_sparse):
    lam = 0.05
    data = dataset(task, features=features, is_sparse=is_sparse)
    weight, intercept = fit(everyone(data), penalty, lam, bias)
    assert weight.shape == (len(data), features) and weight.dtype == torch.float64
    assert bias or not intercept.any()
    for client in range(len(data)):
        x, y = own_rows(data, client)
        own = weight[client].numpy(), float(intercept[client])
        if len(y) == 0:
            assert not weight[client].any() and own[1] == 0
        elif task == "regression" or len(set(y)) == 2:
            ours = objective(task, penalty, lam, x, y, *own)
            theirs = objective(task, penalty, lam, x, y, *peer(task, penalty, lam, x, y, bias))
            assert theirs * (1 - 1e-4) <= ours <= theirs * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_matches_cvxpy(task, penalty, bias):
    lam = 0.02
    data = dataset(task, counts=(15,), features=8)
    x, y = own_rows(data, 0)
    weight, level = cvxpy.Variable(8), cvxpy.Variable() if bias else 0.0
    score = x @ weight + level
    if task == "binary":
        loss = cvxpy.sum(cvxpy.logistic(cvxpy.multiply(1 - 2 * y, score))) / 15
    else:
        loss = cvxpy.sum_squares(score - y) / 30
    size = cvxpy.norm1(weight) if penalty == "l1" else cvxpy.sum_squares(weight) / 2
    best = cvxpy.Problem(cvxpy.Minimize(loss + lam * size)).solve(solver=cvxpy.CLARABEL)
    found, free = fit(everyone(data), penalty, lam, bias)
    ours = objective(task, penalty, lam, x, y, found[0].numpy(), float(free[0]))
    np.testing.assert_allclose(ours, best, rtol=1e-6)


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("lam", [1e-6, 1e-2])
@pytest.mark.parametrize("features", [4, 60])
def test_separable_rows_have_a_logistic_fit(penalty, lam, features):
    data = dataset("binary", counts=(30, 30), features=features, seed=3)
    scores = data.features @ torch.linspace(-1, 2, features)
    data.targets[:] = (scores > 0).float()
    weight, intercept = fit(everyone(data), penalty, lam, True)
    for client in range(2):
        x, y = own_rows(data, client)
        score = x @ weight[client].numpy() + float(intercept[client])
        gradient = x.T @ (y - 1 / (1 + np.exp(-score))) / len(y)
        if penalty == "l2":
            wanted = lam * weight[client].numpy()
            np.testing.assert_allclose(gradient, wanted, rtol=1e-2, atol=1e-2 * lam)
        else:
            assert np.abs(gradient).max() <= lam * 1.01


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize(("is_sparse", "poison"), [(False, np.inf), (True, np.nan)])
def test_a_client_does_not_depend_on_others(task, penalty, is_sparse, poison):
    """To the last bit, also if another client has invalid rows."""
    data = dataset(task, features=12, is_sparse=is_sparse)
    together = fit(everyone(data), penalty, 0.03, True)
    for ids in ([3], [4, 0], [1, 3, 2]):
        some = fit(data.clients(np.array(ids)), penalty, 0.03, True)
        assert all(torch.equal(a, b[ids]) for a, b in zip(some, together, strict=True))
    spoil(data, 3, poison)
    others = torch.arange(len(data)) != 3
    for leaf, before in zip(fit(everyone(data), penalty, 0.03, True), together, strict=True):
        assert leaf[3].isnan().all()
        assert torch.equal(leaf[others], before[others])


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_one_class(penalty):
    data = dataset("binary", counts=(5, 5))
    data.features[:5] -= data.features[:5].mean(dim=0)
    data.features[5:] -= data.features[5:].mean(dim=0)
    data.targets[:5], data.targets[5:] = 1, 0
    weight, intercept = fit(everyone(data), penalty, 0.1, True)
    assert weight.abs().max() < 1e-6
    assert bool((torch.log1p(torch.exp(-intercept.abs())) < 1e-7).all())
    assert intercept[0] > 10 and intercept[1] < -10


def test_strong_penalties_give_zeros():
    for task in ("regression", "binary"):
        data = dataset(task, counts=(20,))
        x, y = own_rows(data, 0)
        top = np.abs((x - x.mean(axis=0)).T @ y).max() / 20
        assert not fit_lasso(everyone(data), lam=top * 1.0001, bias=True)[0].any()
        assert fit_lasso(everyone(data), lam=top * 0.99, bias=True)[0].any()


def test_equal_columns_and_constant_targets():
    data = dataset("regression", counts=(30,), features=2)
    data.features[:, 1] = data.features[:, 0]
    weight, _ = fit_lasso(everyone(data), lam=1e-3, bias=False)
    x, y = own_rows(data, 0)
    np.testing.assert_allclose(weight.sum(), x[:, 0] @ y / (x[:, 0] @ x[:, 0]), rtol=1e-3)
    data.targets[:] = 2.0
    weight, intercept = fit_lasso(everyone(data), lam=0.1, bias=True)
    assert weight.abs().max() < 1e-12 and float(intercept[0]) == pytest.approx(2.0, rel=1e-12)


def test_refusals():
    data = dataset("binary", features=30)
    for task in ("regression", "binary"):
        one = dataset(task, features=30).clients(np.array([3]))
        with pytest.raises(RuntimeError, match=r"client 3: relative gap .* after 1 sweeps"):
            fit_lasso(one, lam=1e-3, bias=True, most=1)
    for lam in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lam: given"):
            fit_lasso(everyone(data), lam=lam, bias=True)
    with pytest.raises(ValueError, match="tol: given"):
        fit_lasso(everyone(data), lam=1.0, bias=True, tol=0.0)
    data.targets[3] = 2
    with pytest.raises(ValueError, match="expected 0 or 1"):
        fit_lasso(everyone(data), lam=1.0, bias=True)
    other = federate("multiclass", COUNTS, data.features, data.targets.long(), outputs=3)
    with pytest.raises(ValueError, match="'multiclass'"):
        fit_lasso(everyone(other), lam=1.0, bias=True)
