"""Posteriors against plain inverses, scikit-learn, scipy's optimisers and refits without a row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, logsumexp, softmax
from sklearn.linear_model import BayesianRidge, LogisticRegression, Ridge
from tests.solvers.rows import everyone, federate, own_rows

from coterie.solvers.posterior import Prior, leave_one_out, posterior, predictive_std

pytestmark = pytest.mark.full

COUNTS = (12, 1, 0, 25, 6, 3)
OUTPUTS = {"regression": 1, "binary": 1, "multilabel": 3, "multiclass": 4}
TASKS = list(OUTPUTS)


def dataset(task, counts=COUNTS, features=5, is_sparse=False, seed=0, dtype=np.float32):
    generator = np.random.default_rng(seed)
    outputs = OUTPUTS[task]
    x = generator.normal(size=(sum(counts), features)).astype(dtype)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < 0.4))
    score = np.asarray(x @ generator.normal(size=(features, outputs)))
    score += generator.normal(size=score.shape)
    if task == "multiclass":
        y = score.argmax(axis=1)
    elif task == "regression":
        y = score[:, 0].astype(np.float32) * 2 + 1
    else:
        y = (score > 0.3).astype(np.float32)
        y = y[:, 0] if task == "binary" else y
    return federate(task, counts, x, y, outputs)


def a_prior(task, size, seed=1, **given):
    generator = np.random.default_rng(seed)
    shape = (OUTPUTS[task], size)
    center = torch.from_numpy(generator.normal(size=shape) * 0.5)
    variances = torch.from_numpy(generator.uniform(0.1, 3, size=shape))
    residual = 0.7 if task == "regression" else 1.0
    return Prior(center, variances, **({"residual": residual} | given))


def own(data, client, bias):
    x, _ = own_rows(data, client)
    x = np.hstack([x, np.ones((len(x), 1))]) if bias else x
    return x, data.targets[data.offsets[client] : data.offsets[client + 1]].numpy()


def exact(x, y, center, variances, residual):
    """Mode, covariance and residual by a plain inverse, in original units."""
    V = np.linalg.inv(x.T @ x / residual + np.diag(1 / variances))
    w = center + V @ x.T @ (y - x @ center) / residual
    trace = np.trace(x.T @ x @ V)
    return w, V, (((y - x @ w) ** 2).sum() + trace) / max(len(y), 1) / residual


def summed_loss(task, x, y, weights):
    eta = x @ weights.T
    if task == "multiclass":
        return (logsumexp(eta, axis=1) - eta[np.arange(len(y)), y]).sum()
    signs = 2 * y.reshape(eta.shape) - 1
    return np.logaddexp(0, -signs * eta).sum()


def slope(task, x, y, weights):
    eta = x @ weights.T
    if task == "multiclass":
        return (softmax(eta, axis=1) - np.eye(eta.shape[1])[y]).T @ x
    return (expit(eta) - y.reshape(eta.shape)).T @ x


def mode(task, x, y, center, variances, method="BFGS"):
    """The mode by scipy, in whitened units."""
    spread = np.sqrt(variances)

    def both(flat):
        v = flat.reshape(center.shape)
        weights = center + spread * v
        value = summed_loss(task, x, y, weights) + flat @ flat / 2
        return value, (slope(task, x, y, weights) * spread + v).ravel()

    options = {"gtol": 1e-10, "maxiter": 5000} | ({"ftol": 1e-15} if method != "BFGS" else {})
    return minimize(both, np.zeros(center.size), jac=True, method=method, options=options).x


# ------------------------------------------------------------------------------------- regression


@pytest.mark.parametrize("features", [1, 5, 12, 40])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_regression_is_the_closed_form(features, is_sparse, bias):
    data = dataset("regression", features=features, is_sparse=is_sparse)
    prior = a_prior("regression", features + bias)
    found = posterior(everyone(data), prior, bias=bias, curvature=True)
    center, variances = prior.center[0].numpy(), prior.variances[0].numpy()
    for client, count in enumerate(COUNTS):
        x, y = own(data, client, bias)
        w, V, residual = exact(x, y, center, variances, 0.7)
        spread = np.sqrt(variances)
        near = {"rtol": 1e-9, "atol": 1e-11}
        np.testing.assert_allclose(found.deviation[client, 0], (w - center) / spread, **near)
        np.testing.assert_allclose(found.variances[client, 0], np.diag(V) / variances, **near)
        K = np.eye(len(w)) - V / np.outer(spread, spread)
        np.testing.assert_allclose(found.curvature[client], K, **near)
        expected = residual if count else 1.0
        np.testing.assert_allclose(found.residual[client], expected, **near)


def test_regression_agrees_with_scikit_learn():
    data = dataset("regression", counts=(40,), features=6)
    x, y = own(data, 0, False)
    peer = BayesianRidge(fit_intercept=False, max_iter=300, tol=1e-10).fit(x, y)
    prior = Prior(
        torch.zeros(1, 6, dtype=torch.float64),
        torch.full((1, 6), 1 / peer.lambda_, dtype=torch.float64),
        residual=1 / peer.alpha_,
    )
    found = posterior(everyone(data), prior, bias=False)
    w = found.deviation[0, 0].numpy() / np.sqrt(peer.lambda_)
    np.testing.assert_allclose(w, peer.coef_, rtol=1e-6)
    wide = predictive_std(everyone(data), prior, everyone(data), bias=False).numpy()
    _, spread = peer.predict(x, return_std=True)
    np.testing.assert_allclose(np.sqrt(wide[0] ** 2 + 1 / peer.alpha_), spread, rtol=1e-6)
    ridge = Ridge(alpha=peer.lambda_ / peer.alpha_, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(w, ridge.coef_, rtol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_per_row_is_a_mean_loss(task):
    data = dataset(task)
    prior = a_prior(task, 6, per_row=True)
    found = posterior(everyone(data), prior, bias=True)
    for client, count in enumerate(COUNTS):
        if not count:
            np.testing.assert_array_equal(found.variances[client], 1)
            continue
        divided = replace(prior, variances=prior.variances / count, per_row=False)
        alone = posterior(data.clients(np.array([client])), divided, bias=True)
        root = np.sqrt(count)
        np.testing.assert_allclose(found.deviation[client], alone.deviation[0] / root, atol=1e-9)
        np.testing.assert_allclose(found.variances[client], alone.variances[0] / count, atol=1e-9)
        np.testing.assert_allclose(found.residual[client], alone.residual[0], atol=1e-9)


@pytest.mark.parametrize("rows", [4, 6, 60])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4, 1e8])
@pytest.mark.parametrize("twins", [False, True])
def test_regression_at_extremes(rows, size, twins):
    # Against 60-digit arithmetic: a plain inverse is the one that fails here.
    mpmath = pytest.importorskip("mpmath")
    data = dataset("regression", counts=(rows,), features=6)
    features = data.features.clone()
    if twins:
        features[:, 3] = features[:, 1]
    data = replace(data, features=features)
    variances = np.full(6, size) * np.array([1, 1, 1e-3, 1, 1e3, 1])
    center = torch.ones(1, 6, dtype=torch.float64)
    prior = Prior(center, torch.from_numpy(variances[None]), residual=0.5)
    found = posterior(everyone(data), prior, bias=False)
    x, y = own(data, 0, False)
    with mpmath.workdps(60):
        Z = mpmath.matrix((x).tolist()) * mpmath.diag([mpmath.sqrt(v) for v in variances])
        inverse = (Z.T * Z / mpmath.mpf(0.5) + mpmath.eye(6)) ** -1
        rest = mpmath.matrix((y - x.sum(axis=1)).tolist())
        v = inverse * (Z.T * rest) / mpmath.mpf(0.5)
        wanted = np.array([float(inverse[j, j]) for j in range(6)])
        shift = np.array([float(v[j]) for j in range(6)])
    np.testing.assert_allclose(found.variances[0, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(found.deviation[0, 0], shift, rtol=1e-5, atol=1e-7)
    assert bool((found.variances > 0).all() and (found.variances <= 1).all())


# ---------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize("task", ["binary", "multilabel", "multiclass"])
@pytest.mark.parametrize("features", [5, 30])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_classes_are_at_the_mode(task, features, is_sparse):
    data = dataset(task, features=features, is_sparse=is_sparse)
    prior = a_prior(task, features + 1)
    found = posterior(everyone(data), prior, bias=True)
    assert torch.equal(found.residual, torch.ones(len(COUNTS), dtype=torch.float64))
    center, variances = prior.center.numpy(), prior.variances.numpy()
    for client, count in enumerate(COUNTS):
        x, y = own(data, client, True)
        v = found.deviation[client].numpy()
        if not count:
            assert not v.any()
            continue
        weights = center + np.sqrt(variances) * v
        gradient = slope(task, x, y, weights) * np.sqrt(variances) + v
        assert np.abs(gradient).max() < 1e-8
        np.testing.assert_allclose(v.ravel(), mode(task, x, y, center, variances), atol=1e-6)


@pytest.mark.parametrize("task", ["binary", "multilabel", "multiclass"])
@pytest.mark.parametrize("features", [4, 20])
def test_variances_are_inverse_blocks_of_the_hessian(task, features):
    data = dataset(task, counts=(15,), features=features)
    prior = a_prior(task, features)
    found = posterior(everyone(data), prior, bias=False)
    x, y = own(data, 0, False)
    center, spread = prior.center.numpy(), prior.variances.sqrt().numpy()
    weights = center + spread * found.deviation[0].numpy()
    for label in range(len(center)):
        block, step = np.empty((features, features)), 1e-5
        for column in range(features):  # central differences of the exact gradient
            shift = np.zeros_like(weights)
            shift[label, column] = step
            ends = [slope(task, x, y, weights + sign * shift)[label] for sign in (1, -1)]
            block[column] = (ends[0] - ends[1]) / (2 * step)
        G = block * np.outer(spread[label], spread[label]) + np.eye(features)
        wanted = np.diag(np.linalg.inv(G))
        np.testing.assert_allclose(found.variances[0, label], wanted, rtol=1e-6)
    if task == "binary":
        K = posterior(everyone(data), prior, bias=False, curvature=True).curvature
        np.testing.assert_allclose(K[0], np.eye(features) - np.linalg.inv(G), atol=1e-8)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_classes_agree_with_scikit_learn(task):
    data = dataset(task, counts=(60,), features=4)
    x, y = own(data, 0, False)
    size = (OUTPUTS[task], 4)
    variance = 0.8
    zero, wide = torch.zeros(size).double(), torch.full(size, variance, dtype=torch.float64)
    found = posterior(everyone(data), Prior(zero, wide), bias=False)
    peer = LogisticRegression(C=variance, fit_intercept=False, tol=1e-10, max_iter=10**4)
    peer.fit(x, y)
    assert len(peer.classes_) == max(2, OUTPUTS[task])
    np.testing.assert_allclose(found.deviation[0] * variance**0.5, peer.coef_, atol=1e-5)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
@pytest.mark.parametrize("rows", [1, 6, 30])
@pytest.mark.parametrize("size", [1e-8, 1e4, 1e8])
def test_classes_at_extremes(task, rows, size):
    # Separable rows and a weak prior: only the prior keeps the mode finite.
    generator = np.random.default_rng(3)
    x = generator.normal(size=(rows, 6)).astype(np.float32)
    x[:, 5] = x[:, 4]
    data = dataset(task, counts=(rows,), features=6)
    y = torch.from_numpy(x[:, 0] > 0).to(data.targets.dtype)
    data = replace(data, features=torch.from_numpy(x), targets=y)
    shape = (OUTPUTS[task], 6)
    center = torch.from_numpy(generator.normal(size=shape))
    prior = Prior(center, torch.full(shape, size, dtype=torch.float64))
    found = posterior(everyone(data), prior, bias=False)
    v = found.deviation[0].numpy()
    weights = center.numpy() + np.sqrt(size) * v
    gradient = slope(task, x.astype(np.float64), y.numpy(), weights) * np.sqrt(size) + v
    assert np.abs(gradient).max() < 1e-7 * max(1, np.abs(v).max())
    assert bool((found.variances > 0).all() and (found.variances <= 1).all())
    np.testing.assert_allclose(v[:, 4], v[:, 5], atol=1e-7 * max(1, np.abs(v).max()))


@pytest.mark.parametrize("task", TASKS)
def test_a_far_centre_is_left(task):
    # Newton's full step from a saturated centre overshoots: halving must save it.
    data = dataset(task, counts=(30,), features=4)
    shape = (OUTPUTS[task], 4)
    center = torch.full(shape, 300.0, dtype=torch.float64)
    center[:, ::2] *= -1
    prior = Prior(center, torch.full(shape, 1e4, dtype=torch.float64))
    found = posterior(everyone(data), prior, bias=False)
    x, y = own(data, 0, False)
    v = found.deviation[0].numpy()
    weights = center.numpy() + 100 * v
    if task == "regression":
        gradient = (weights @ x.T - y) @ x * 100 + v
    else:
        gradient = slope(task, x, y, weights) * 100 + v
    assert np.abs(gradient).max() < 1e-7


# ------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("features", [4, 40])
def test_zero_variances_fix_weights(task, features):
    # Equal to solving the rest with the fixed part as an offset: here by moving it into the centre
    # of a column that is all ones.
    data = dataset(task, features=features)
    prior = a_prior(task, features)
    fixed = torch.zeros(features, dtype=torch.bool)
    fixed[[1, 3]] = True
    prior = replace(prior, variances=torch.where(fixed, 0.0, prior.variances))
    found = posterior(everyone(data), prior, bias=False)
    np.testing.assert_array_equal(found.deviation[..., fixed], 0)
    np.testing.assert_array_equal(found.variances[..., fixed], 1)
    narrow = replace(prior, variances=torch.where(fixed, 1e-18, prior.variances))
    near = posterior(everyone(data), narrow, bias=False)
    np.testing.assert_allclose(found.deviation, near.deviation, atol=1e-6)
    np.testing.assert_allclose(found.variances, near.variances, atol=1e-6)
    np.testing.assert_allclose(found.residual, near.residual, atol=1e-6)


def test_zero_variances_are_an_offset():
    data = dataset("regression")
    prior = a_prior("regression", 5)
    prior.variances[0, [1, 3]] = 0
    found = posterior(everyone(data), prior, bias=False)
    free = [0, 2, 4]
    center, variances = prior.center[0].numpy(), prior.variances[0].numpy()
    for client in (0, 1, 3, 4):
        x, y = own(data, client, False)
        offset = x[:, [1, 3]] @ center[[1, 3]]
        w, V, residual = exact(x[:, free], y - offset, center[free], variances[free], 0.7)
        wanted = (w - center[free]) / np.sqrt(variances[free])
        np.testing.assert_allclose(found.deviation[client, 0, free], wanted, rtol=1e-9)
        np.testing.assert_allclose(
            found.variances[client, 0, free], np.diag(V) / variances[free], rtol=1e-9
        )
        np.testing.assert_allclose(found.residual[client], residual, rtol=1e-9)


def results(clients, prior, fresh=None):
    found = posterior(clients, prior, bias=True)
    parts = [found.deviation, found.variances, found.residual]
    parts.append(leave_one_out(clients, prior, bias=True))
    parts.append(predictive_std(clients, prior, fresh or clients, bias=True))
    return [part.numpy() for part in parts]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("is_sparse", "features"), [(True, 2), (False, 9), (True, 20), (False, 33)]
)
def test_a_client_is_the_same_in_any_company(task, is_sparse, features):
    data = dataset(task, is_sparse=is_sparse, features=features)
    prior = a_prior(task, features + 1)
    together = results(everyone(data), prior)
    for client, count in enumerate(COUNTS):
        alone = results(data.clients(np.array([client])), prior)
        for one, all_of_them in zip(alone, together, strict=True):
            cut = all_of_them[client]
            if one.ndim > 1 and one.shape[1] == count:
                cut = cut[:count]
            np.testing.assert_array_equal(one[0], cut)
    order = np.array([4, 0, 3, 5, 1, 2])
    for one, all_of_them in zip(results(data.clients(order), prior), together, strict=True):
        np.testing.assert_array_equal(one, all_of_them[order])


# ------------------------------------------------------------------------------ correlated weights


def a_mixing(size, seed=3):
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal((size, size)))
    return drawn / drawn.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_correlated_weights_are_the_closed_form(is_sparse):
    data, C = dataset("regression", is_sparse=is_sparse), a_mixing(6)
    prior = a_prior("regression", 6, mixing=C)
    found = posterior(everyone(data), prior, bias=True, curvature=True)
    weights = prior.weights(found.deviation)[:, 0].numpy()
    center, sd = prior.center[0].numpy(), prior.variances[0].sqrt().numpy()
    whole = (sd[:, None] * C.numpy()) @ (sd[:, None] * C.numpy()).T
    for client, count in enumerate(COUNTS):
        x, y = own(data, client, True)
        S = prior.residual * np.eye(count) + x @ whole @ x.T
        wanted = center + whole @ x.T @ np.linalg.solve(S, y - x @ center)
        np.testing.assert_allclose(weights[client], wanted, rtol=1e-8, atol=1e-10)
        z = x @ (sd[:, None] * C.numpy())
        K = z.T @ np.linalg.solve(S, z)
        np.testing.assert_allclose(found.curvature[client], K, rtol=1e-8, atol=1e-10)


def test_an_identity_mixes_nothing():
    data = dataset("binary")
    plain = a_prior("binary", 6)
    mixed = replace(plain, mixing=torch.eye(6, dtype=torch.float64))
    for left, right in zip(
        results(everyone(data), plain), results(everyone(data), mixed), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_correlated_weights_are_the_same_in_any_company(task):
    data, prior = dataset(task, features=9), a_prior(task, 10, mixing=a_mixing(10))
    together = results(everyone(data), prior)
    for client, count in enumerate(COUNTS):
        for one, whole in zip(
            results(data.clients(np.array([client])), prior), together, strict=True
        ):
            cut = whole[client]
            cut = cut[:count] if one.ndim > 1 and one.shape[1] == count else cut
            np.testing.assert_array_equal(one[0], cut)


def test_mixings_that_do_not_fit():
    with pytest.raises(ValueError, match="expected \\(6, 6\\) for one output"):
        a_prior("regression", 6, mixing=a_mixing(5))
    with pytest.raises(ValueError, match="mixing: given a NaN"):
        a_prior("regression", 6, mixing=a_mixing(6) * np.nan)


@pytest.mark.parametrize("task", TASKS)
def test_neighbours_rows_do_not_matter(task):
    # Enough work for several threads, and neighbours with other numbers of rows.
    data, prior = dataset(task, counts=(40,) * 60, features=15), a_prior(task, 16)
    keep = np.random.default_rng(0).random(40 * 60) < 0.5
    keep[:40] = keep[40 * 59 :] = True
    thinned = data.where(keep)
    before, after = (results(everyone(part), prior) for part in (data, thinned))
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left[[0, 59]], right[[0, 59]])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("is_sparse", "value"), [(False, np.nan), (True, np.inf)])
def test_a_bad_row_spoils_its_client_only(task, is_sparse, value):
    data, prior = dataset(task, is_sparse=is_sparse, features=9), a_prior(task, 10)
    fresh = everyone(dataset(task, is_sparse=is_sparse, features=9, seed=5))
    good = results(everyone(data), prior, fresh)
    broken = data.features.copy() if is_sparse else data.features.clone()
    if is_sparse:
        broken.data[broken.indptr[14]] = value  # of client 3
    else:
        broken[14, 2] = value
    bad = results(everyone(replace(data, features=broken)), prior, fresh)
    others = [0, 1, 2, 4, 5]
    for left, right in zip(good, bad, strict=True):
        np.testing.assert_array_equal(left[others], right[others])
        assert np.isnan(right[3]).all()


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_a_bad_target_spoils_its_client_only(task):
    data, prior = dataset(task), a_prior(task, 6)
    targets = data.targets.clone()
    targets[14] = np.nan
    found = posterior(everyone(replace(data, targets=targets)), prior, bias=True)
    assert torch.isnan(found.deviation).all(dim=2)[:, 0].tolist() == [0, 0, 0, 1, 0, 0]


def test_no_clients_and_no_rows():
    data, prior = dataset("regression"), a_prior("regression", 6)
    none = posterior(data.clients(np.empty(0, np.int64)), prior, bias=True)
    assert none.deviation.shape == (0, 1, 6)
    empty = data.clients(np.array([2]))
    found = posterior(empty, prior, bias=True, curvature=True)
    assert not found.deviation.any() and not found.curvature.any()
    assert bool((found.variances == 1).all()) and float(found.residual) == 1
    assert leave_one_out(empty, prior, bias=True).shape == (1, 0)
    other = data.clients(np.array([2]))
    rows = replace(other, starts=torch.tensor([0]), counts=torch.tensor([3]))
    wide = predictive_std(empty, prior, rows, bias=True)
    x, _ = own(data, 0, True)
    wanted = np.sqrt((x[:3] ** 2) @ prior.variances[0].numpy())
    np.testing.assert_allclose(wide[0], wanted, rtol=1e-12)


# --------------------------------------------------------------------------------- leaving one out


@pytest.mark.parametrize("features", [3, 8, 40])
@pytest.mark.parametrize("per_row", [False, True])
def test_leaving_a_row_out_of_a_regression_is_a_refit(features, per_row):
    data = dataset("regression", features=features)
    prior = a_prior("regression", features + 1, per_row=per_row)
    left = leave_one_out(everyone(data), prior, bias=True)
    center, variances = prior.center[0].numpy(), prior.variances[0].numpy()
    for client, count in enumerate(COUNTS):
        x, y = own(data, client, True)
        for row in range(count):
            keep = np.arange(count) != row
            own_variances = variances / count if per_row else variances
            w, _, _ = exact(x[keep], y[keep], center, own_variances, 0.7)
            wanted = (y[row] - x[row] @ w) ** 2
            np.testing.assert_allclose(left[client, row], wanted, rtol=1e-7, atol=1e-12)
        assert not left[client, count:].any()


def test_leaving_a_row_out_with_hardly_a_prior():
    data = dataset("regression", counts=(6,), features=6)
    prior = Prior(torch.zeros(1, 6).double(), torch.full((1, 6), 1e8).double())
    left = leave_one_out(everyone(data), prior, bias=False)
    x, y = own(data, 0, False)
    for row in range(6):
        keep = np.arange(6) != row
        # By rows, as the plain inverse is lost to rounding.
        dual = np.linalg.solve(x[keep] @ x[keep].T * 1e8 + np.eye(5), y[keep])
        wanted = (y[row] - x[row] @ x[keep].T @ dual * 1e8) ** 2
        np.testing.assert_allclose(left[0, row], wanted, rtol=1e-4)


@pytest.mark.parametrize("task", ["binary", "multilabel", "multiclass"])
@pytest.mark.parametrize("features", [4, 60])
def test_leaving_a_row_out_of_classes_is_nearly_a_refit(task, features):
    data = dataset(task, counts=(40,), features=features)
    shape = (OUTPUTS[task], features)
    prior = Prior(torch.zeros(shape).double(), torch.full(shape, 3.0 / features).double())
    left = leave_one_out(everyone(data), prior, bias=False)[0].numpy()
    x, y = own(data, 0, False)
    wanted = []
    for row in range(40):
        keep = np.arange(40) != row
        law = prior.center.numpy(), prior.variances.numpy()
        v = mode(task, x[keep], y[keep], *law, method="L-BFGS-B")
        weights = v.reshape(shape) * prior.variances.sqrt().numpy()
        labels = shape[0] if task == "multilabel" else 1
        wanted.append(summed_loss(task, x[row : row + 1], y[row : row + 1], weights) / labels)
    # The blocks of softmax leave out how classes move together.
    near = 0.03 if task != "multiclass" else 0.08
    np.testing.assert_allclose(left.mean(), np.mean(wanted), rtol=near)
    np.testing.assert_allclose(left, wanted, rtol=4 * near, atol=2 * near)


# ------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("is_sparse", "features", "per_row"), [(False, 4, True), (False, 30, False), (True, 30, True)]
)
def test_predictive_std(task, is_sparse, features, per_row):
    data = dataset(task, is_sparse=is_sparse, features=features)
    fresh = dataset(task, (2, 3, 4, 0, 1, 5), features=features, is_sparse=is_sparse, seed=9)
    prior = a_prior(task, features + 1, per_row=per_row)
    wide = predictive_std(everyone(data), prior, everyone(fresh), bias=True).numpy()
    assert wide.shape == (6, 5) if OUTPUTS[task] == 1 else (6, 5, OUTPUTS[task])
    wide = wide.reshape(6, 5, -1)
    found = posterior(everyone(data), prior, bias=True)
    spread = prior.variances.sqrt().numpy()
    for client, count in enumerate(COUNTS):
        x, _ = own(data, client, True)
        rows, _ = own(fresh, client, True)
        share = count if per_row and count else 1
        weights = prior.center.numpy() + spread * found.deviation[client].numpy()
        for label in range(OUTPUTS[task]):
            q = softmax(x @ weights.T, axis=1) if task == "multiclass" else expit(x @ weights.T)
            q = q[:, label] * (1 - q[:, label])
            q = np.full(count, 1 / 0.7) if task == "regression" else q
            V = np.linalg.inv((x.T * q) @ x + np.diag(share / spread[label] ** 2))
            wanted = np.sqrt(np.einsum("ij,jk,ik->i", rows, V, rows))
            np.testing.assert_allclose(wide[client, : len(rows), label], wanted, rtol=1e-7)
            assert not wide[client, len(rows) :, label].any()


def test_intervals_cover():
    # Weights drawn from the prior: nine of ten true scores lie within 1.645 deviations.
    generator = np.random.default_rng(0)
    clients, rows, features = 400, 8, 5
    data = dataset("regression", (rows,) * clients, features=features)
    weights = generator.normal(size=(clients, features)) * 0.6 + 0.2
    x = data.features.numpy().reshape(clients, rows, features)
    clean = np.einsum("crf,cf->cr", x, weights)
    noisy = clean + generator.normal(size=clean.shape) * 0.8
    data = replace(data, targets=torch.from_numpy(noisy.ravel().astype(np.float32)))
    center = torch.full((1, features), 0.2, dtype=torch.float64)
    prior = Prior(center, torch.full_like(center, 0.36), residual=0.64)
    found = posterior(everyone(data), prior, bias=False)
    fitted = np.einsum("crf,cf->cr", x, 0.2 + 0.6 * found.deviation[:, 0].numpy())
    wide = predictive_std(everyone(data), prior, everyone(data), bias=False).numpy()
    covered = (np.abs(fitted - clean) < 1.645 * wide).mean()
    assert abs(covered - 0.9) < 0.025
    assert abs(float(found.residual.mean()) - 1) < 0.05


# ----------------------------------------------------------------------------------------- errors


def test_what_does_not_fit_is_refused():
    data, prior = dataset("regression"), a_prior("regression", 6)
    with pytest.raises(ValueError, match=r"expected \(1, 5\)"):
        posterior(everyone(data), prior, bias=False)
    with pytest.raises(ValueError, match="same for center and variances"):
        replace(prior, variances=prior.variances[:, :4])
    with pytest.raises(ValueError, match="float64"):
        replace(prior, center=prior.center.float())
    with pytest.raises(ValueError, match=r"variances: given -1\.0"):
        replace(prior, variances=-torch.ones(1, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="center"):
        replace(prior, center=prior.center * np.nan)
    with pytest.raises(ValueError, match="residual: given 0"):
        replace(prior, residual=0.0)
    several = a_prior("multiclass", 5)
    with pytest.raises(ValueError, match="curvature"):
        posterior(everyone(dataset("multiclass")), several, bias=False, curvature=True)
    with pytest.raises(ValueError, match="only regression"):
        posterior(everyone(dataset("binary")), prior, bias=True)
    with pytest.raises(ValueError, match="same order"):
        some = data.clients(np.array([1, 0]))
        predictive_std(data.clients(np.array([0, 1])), prior, some, bias=True)


def test_targets_that_are_no_class_are_refused():
    data = dataset("binary")
    bad = replace(data, targets=data.targets * 2)
    with pytest.raises(ValueError, match="expected 0 or 1"):
        posterior(everyone(bad), a_prior("binary", 5), bias=False)
    data = dataset("multiclass")
    bad = replace(everyone(data), targets=data.targets + 1)
    with pytest.raises(ValueError, match=r"expected 0 \.\. 3"):
        posterior(bad, a_prior("multiclass", 5), bias=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("task", TASKS)
def test_rows_on_cuda(task):
    data, prior = dataset(task), a_prior(task, 6)
    moved = everyone(data.to("cuda"))
    found = posterior(moved, prior, bias=True)
    assert found.deviation.device.type == "cuda"
    plain = posterior(everyone(data), prior, bias=True)
    np.testing.assert_array_equal(found.deviation.cpu(), plain.deviation)
