"""Paths of one client against scikit-learn, refits without a row, and each other."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, Ridge

from coterie.solvers.paths import fit_path

pytestmark = pytest.mark.full

PENALTIES = torch.tensor([30.0, 3.0, 0.3], dtype=torch.float64)


def rows_of(n, p, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, p)) + 0.5
    return x, x @ draw.normal(size=(p, 4)) / np.sqrt(p) + draw.normal(size=(n, 4))


def targets(scores, task):
    return {
        "regression": scores[:, 0],
        "binary": (scores[:, 0] > 0).astype(float),
        "multilabel": (scores[:, :3] > 0).astype(float),
        "multiclass": scores.argmax(axis=1),
    }[task]


def path(x, y, task, center):
    return fit_path(torch.from_numpy(x), torch.from_numpy(y), task, center, PENALTIES)


def zeros(outputs, p):
    return torch.zeros(outputs, p, dtype=torch.float64)


@pytest.mark.parametrize(("n", "p"), [(25, 60), (60, 25), (1, 5), (20, 20)])
def test_ridge_and_its_errors_left_out_are_exact(n, p):
    x, scores = rows_of(n, p)
    y, center = scores[:, 0], 0.3 * torch.randn(1, p, dtype=torch.float64)
    found = path(x, y, "regression", center)
    c = center[0].numpy()
    for place, penalty in enumerate(PENALTIES.tolist()):

        def fit(rows, penalty=penalty):
            if not len(rows):
                return c
            model = Ridge(alpha=penalty, fit_intercept=False, solver="svd")
            return c + model.fit(x[rows], y[rows] - x[rows] @ c).coef_

        np.testing.assert_allclose(found.fits[place, 0], fit(np.arange(n)), atol=1e-8)
        for i in range(0, n, 7):
            left = (y[i] - x[i] @ fit(np.delete(np.arange(n), i))) ** 2
            np.testing.assert_allclose(found.losses[place, i], left, rtol=1e-6)


@pytest.mark.parametrize(("n", "p"), [(25, 60), (90, 12)])
@pytest.mark.parametrize("task", ["binary", "multilabel", "multiclass"])
def test_classes_are_those_of_scikit_learn(n, p, task):
    x, scores = rows_of(n, p)
    scores[:4] = 9 * np.eye(4)  # no class is missing
    y = targets(scores, task)
    outputs = {"binary": 1, "multilabel": 3, "multiclass": 4}[task]
    found = path(x, y, task, zeros(outputs, p))
    labels = y[:, None] if task == "binary" else y
    for place, penalty in enumerate(PENALTIES.tolist()):
        plain = LogisticRegression(C=1 / penalty, fit_intercept=False, tol=1e-10, max_iter=5000)
        if task == "multiclass":
            expected = plain.fit(x, y).coef_
        else:
            expected = np.concatenate([plain.fit(x, label).coef_ for label in labels.T])
        np.testing.assert_allclose(found.fits[place], expected, atol=2e-4)


@pytest.mark.parametrize("center", [0.0, 0.4])
def test_classes_without_rows_share_a_column_and_change_nothing(center):
    x, scores = rows_of(30, 40)
    y = scores.argmax(axis=1) * 2  # of nine classes 0, 2, 4, 6
    fits = path(x, y, "multiclass", zeros(9, 40) + center).fits[1].numpy()
    # A centre that is not zero, if hardly so, keeps every column.
    apart = path(x, y, "multiclass", zeros(9, 40) + center + 1e-300).fits[1].numpy()
    np.testing.assert_allclose(fits, apart, atol=1e-4)

    def loss(w):
        w = w.reshape(9, 40)
        eta = x @ w.T
        top = eta.max(axis=1, keepdims=True)
        p = np.exp(eta - top)
        total = (np.log(p.sum(axis=1)) + top[:, 0] - eta[np.arange(30), y]).sum()
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(30), y] -= 1
        return total + 1.5 * np.square(w - center).sum(), (p.T @ x + 3 * (w - center)).ravel()

    other = minimize(loss, np.full(360, center), jac=True, options={"gtol": 1e-7})
    np.testing.assert_allclose(fits.ravel(), other.x, atol=1e-4)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_losses_left_out_are_near_those_of_refits(task):
    x, scores = rows_of(40, 6)
    y, outputs = targets(scores, task), 1 if task == "binary" else 4
    near = path(x, y, task, zeros(outputs, 6)).losses.mean(dim=1)
    far = torch.zeros(3, dtype=torch.float64)
    for i in range(40):
        rest = np.arange(40) != i
        for place, fit in enumerate(path(x[rest], y[rest], task, zeros(outputs, 6)).fits):
            eta = torch.from_numpy(x[i]) @ fit.T
            if task == "binary":
                far[place] += torch.nn.functional.softplus(eta[0] * (1 - 2 * y[i])) / 40
            else:
                far[place] += (torch.logsumexp(eta, 0) - eta[y[i]]) / 40
    assert ((near - far).abs() < 0.1 * far).all(), (near, far)
    assert near.argmin() == far.argmin()


def test_rows_that_are_not_finite_and_equal_columns():
    x, scores = rows_of(10, 20)
    x[:, 1] = x[:, 0]
    x[3, 2] = np.inf
    assert path(x, scores[:, 0], "regression", zeros(1, 20)).fits.isnan().all()
    x[:, 2] = 0.0
    fits = path(x, scores[:, 0], "regression", zeros(1, 20)).fits
    np.testing.assert_allclose(fits[..., 0], fits[..., 1], atol=1e-8)
    assert not fits[..., 2].any()
