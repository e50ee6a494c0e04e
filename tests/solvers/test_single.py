"""Single-task fits against scikit-learn, cvxpy and their optimality conditions."""

import cvxpy
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Lasso, LogisticRegression, Ridge

from coterie.data.federated import FederatedDataset, Spec
from coterie.solvers.single import fit_single

pytestmark = pytest.mark.full

COUNTS = (7, 1, 0, 25, 12, 40)
KINDS = [("regression", "l1"), ("regression", "l2"), ("binary", "l1"), ("binary", "l2")]


def dataset(task, counts=COUNTS, features=5, is_sparse=False, seed=0, offset=0.3):
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    x = (generator.normal(size=(offsets[-1], features)) + offset).astype(np.float32)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < 0.4))
    score = np.asarray(x @ generator.normal(size=features)) + generator.normal(size=offsets[-1])
    y = (score > 0.5) if task == "binary" else 3 * score + 1
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


def objective(task, penalty, lam, x, y, weight, bias):
    score = x @ weight + bias
    if task == "binary":
        loss = np.logaddexp(0, -(2 * y - 1) * score).mean()
    else:
        loss = (score - y) @ (score - y) / (2 * len(y))
    return loss + lam * (np.abs(weight).sum() if penalty == "l1" else weight @ weight / 2)


def peer(task, penalty, lam, x, y, bias):
    n = len(y)
    if task == "regression":
        kind = Ridge(lam * n, fit_intercept=bias, tol=1e-12)
        if penalty == "l1":
            kind = Lasso(lam, fit_intercept=bias, tol=1e-12, max_iter=10**6)
        fit = kind.fit(x, y)
        return fit.coef_, float(fit.intercept_)
    # saga's l1 leaves the bias free, as lbfgs's l2 does.
    how = {"solver": "saga", "l1_ratio": 1} if penalty == "l1" else {"solver": "lbfgs"}
    fit = LogisticRegression(
        C=1 / (lam * n), fit_intercept=bias, tol=1e-10, max_iter=10**5, **how
    ).fit(x, y)
    return fit.coef_[0], float(np.atleast_1d(fit.intercept_)[0])


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("features", [5, 40])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_matches_scikit_learn(task, penalty, bias, features, is_sparse):
    lam = 0.05
    data = dataset(task, features=features, is_sparse=is_sparse)
    tree = fit_single(everyone(data), penalty=penalty, lam=lam, bias=bias)
    assert tree["weight"].shape == (len(data), 1, features)
    assert set(tree) == ({"weight", "bias"} if bias else {"weight"})
    assert all(leaf.dtype == torch.float32 for leaf in tree.values())
    for client in range(len(data)):
        x, y = own_rows(data, client)
        weight = tree["weight"][client, 0].double().numpy()
        level = float(tree["bias"][client]) if bias else 0.0
        if len(y) == 0:
            assert not weight.any()
            assert level == 0
            continue
        if task == "binary" and len(set(y)) < 2:
            continue
        ours = objective(task, penalty, lam, x, y, weight, level)
        theirs = objective(task, penalty, lam, x, y, *peer(task, penalty, lam, x, y, bias))
        assert ours <= theirs * (1 + 1e-6) + 1e-12
        assert ours >= theirs * (1 - 1e-4)


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
    tree = fit_single(everyone(data), penalty=penalty, lam=lam, bias=bias)
    free = float(tree["bias"][0]) if bias else 0.0
    ours = objective(task, penalty, lam, x, y, tree["weight"][0, 0].double().numpy(), free)
    np.testing.assert_allclose(ours, best, rtol=1e-6)


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("lam", [1e-6, 1e-2])
@pytest.mark.parametrize("features", [4, 60])
def test_separable_rows_have_a_logistic_fit(penalty, lam, features):
    data = dataset("binary", counts=(30, 30), features=features, seed=3)
    scores = data.features @ torch.linspace(-1, 2, features)
    data.targets[:] = (scores > 0).float()
    tree = fit_single(everyone(data), penalty=penalty, lam=lam, bias=True, tol=1e-6)
    for client in range(2):
        x, y = own_rows(data, client)
        weight = tree["weight"][client, 0].double().numpy()
        score = x @ weight + float(tree["bias"][client])
        pull = x.T @ (y - 1 / (1 + np.exp(-score))) / len(y)
        if penalty == "l2":
            np.testing.assert_allclose(pull, lam * weight, rtol=1e-2, atol=1e-2 * lam)
        else:
            assert np.abs(pull).max() <= lam * 1.01


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_answer_is_the_same_whoever_else_is_there(task, penalty, is_sparse):
    data = dataset(task, counts=(9, 30, 0, 9, 4), features=12, is_sparse=is_sparse)
    together = fit_single(everyone(data), penalty=penalty, lam=0.03, bias=True)
    for ids in ([3], [4, 0], [1, 3, 2]):
        some = fit_single(data.clients(np.array(ids)), penalty=penalty, lam=0.03, bias=True)
        for name, leaf in some.items():
            assert torch.equal(leaf, together[name][ids])


@pytest.mark.parametrize(("task", "penalty"), KINDS)
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_client_spoils_itself_only(task, penalty, is_sparse, poison):
    data = dataset(task, is_sparse=is_sparse)
    before = fit_single(everyone(data), penalty=penalty, lam=0.1, bias=True)
    values = data.features.data if is_sparse else data.features.numpy()
    if is_sparse:
        values[data.features.indptr[data.offsets[3] + 2]] = poison
    else:
        values[data.offsets[3], 2] = poison
    after = fit_single(everyone(data), penalty=penalty, lam=0.1, bias=True)
    for name, leaf in after.items():
        assert leaf[3].isnan().all()
        others = torch.arange(len(data)) != 3
        assert torch.equal(leaf[others], before[name][others])


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_one_class_alone(penalty):
    data = dataset("binary", counts=(5, 5))
    data.targets[:5], data.targets[5:] = 1, 0
    tree = fit_single(everyone(data), penalty=penalty, lam=0.1, bias=True, tol=1e-6)
    assert not tree["weight"].any()
    loss = torch.log1p(torch.exp(-tree["bias"].double().abs()))
    np.testing.assert_allclose(loss, 1e-6, rtol=1e-4)
    assert tree["bias"][0] > 0 > tree["bias"][1]
    free = fit_single(everyone(data), penalty="l2", lam=0.1, bias=False)
    assert free["weight"].abs().max() > 0.1


def test_strong_penalties_give_zeros():
    for task in ("regression", "binary"):
        data = dataset(task, counts=(20,))
        x, y = own_rows(data, 0)
        top = np.abs((x - x.mean(axis=0)).T @ y).max() / 20
        zero = fit_single(everyone(data), penalty="l1", lam=top * 1.0001, bias=True)
        assert not zero["weight"].any()
        some = fit_single(everyone(data), penalty="l1", lam=top * 0.99, bias=True)
        assert some["weight"].any()


def test_equal_columns_and_constant_targets():
    data = dataset("regression", counts=(30,), features=2)
    data.features[:, 1] = data.features[:, 0]
    for penalty, lam in (("l1", 1e-3), ("l2", 1e-18)):
        tree = fit_single(everyone(data), penalty=penalty, lam=lam, bias=False)
        x, y = own_rows(data, 0)
        slope = x[:, 0] @ y / (x[:, 0] @ x[:, 0])
        np.testing.assert_allclose(tree["weight"][0, 0].sum(), slope, rtol=1e-3)
    data.targets[:] = 2.0
    for penalty in ("l1", "l2"):
        tree = fit_single(everyone(data), penalty=penalty, lam=0.1, bias=True)
        assert tree["weight"].abs().max() < 1e-12
        assert float(tree["bias"][0]) == 2.0


def test_too_few_sweeps_are_an_error_and_inputs_stay():
    data = dataset("regression", features=30)
    copy = data.features.clone()
    with pytest.raises(RuntimeError, match=r"client 3: relative gap .* after 1 sweeps"):
        fit_single(data.clients(np.array([3])), penalty="l1", lam=1e-3, bias=True, most=1)
    logistic = dataset("binary", features=30)
    for penalty in ("l1", "l2"):
        with pytest.raises(RuntimeError, match="raise most"):
            fit_single(
                logistic.clients(np.array([3])), penalty=penalty, lam=1e-3, bias=True, most=1
            )
    assert torch.equal(copy, data.features)


@pytest.mark.parametrize("lam", [0.0, -1.0, float("nan"), float("inf")])
def test_lam_must_be_positive(lam):
    with pytest.raises(ValueError, match="lam: given"):
        fit_single(everyone(dataset("binary")), penalty="l1", lam=lam, bias=True)


def test_refusals():
    data = dataset("binary")
    with pytest.raises(ValueError, match="penalty: given"):
        fit_single(everyone(data), penalty="l3", lam=1.0, bias=True)
    with pytest.raises(ValueError, match="tol: given"):
        fit_single(everyone(data), penalty="l1", lam=1.0, bias=True, tol=0.0)
    data.targets[3] = 2
    with pytest.raises(ValueError, match="expected 0 or 1"):
        fit_single(everyone(data), penalty="l1", lam=1.0, bias=True)
    spec = Spec(shape=(5,), outputs=3, task="multiclass", clients=len(data))
    other = FederatedDataset(spec, data.names, data.offsets, data.features, data.targets.long())
    with pytest.raises(ValueError, match="'multiclass'"):
        fit_single(everyone(other), penalty="l1", lam=1.0, bias=True)
