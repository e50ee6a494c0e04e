"""Learning alone: own choice of lam, one lam for all, one model for all, against plain refits."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV

from coterie.data.datasets import digits
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import LAMS, Local, LocalStar, PooledLinear, own_shares, ridge_prior
from coterie.models import MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full

FREE = Privacy(epsilon=math.inf)


def fit(method, data):
    return simulate(Plan(method=method, privacy=FREE, rounds=1, simulation_seed=0), data)


def made(task="regression", rows=(3, 9), **settings):
    settings = {"clients": 6, "features": 3, "spread": 0.5, "seed": 1, **settings}
    return synthetic("mean", rows=rows, task=task, **settings).data


def rows_of(data, client):
    """Return a client's rows with a column of ones, and its targets."""
    at = slice(data.offsets[client], data.offsets[client + 1])
    x = data.features[at].flatten(1).double().numpy()
    return np.c_[x, np.ones(len(x))], data.targets[at].double().numpy()


def flat(outcome, client):
    model = outcome.model(client)
    return np.concatenate([leaf.double().numpy().ravel() for leaf in model.values()])


def ridge(x, y, penalty):
    """Fit by scikit-learn: |y - X w|^2 + penalty |w|^2."""
    if not len(y):
        return np.zeros(x.shape[1])
    return Ridge(alpha=penalty, fit_intercept=False, solver="svd").fit(x, y).coef_


def left_out(x, y, penalty):
    """Return squared errors of rows left out, by refits: the slow way."""
    errors = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        errors.append((y[i] - x[i] @ ridge(x[rest], y[rest], penalty)) ** 2)
    return np.array(errors)


# Penalties of the weights and of the bias, and minus the log of their weight.
GRID = [(lam, lam, 0.5 * (math.log(lam / 0.1) / 0.75) ** 2) for lam in LAMS] + [
    (lam, 0.01, 1.5 + 0.5 * (math.log(lam) / 1.25) ** 2) for lam in (0.03, 0.1, 0.3, 1, 3, 10, 30)
]


def freer(x, lam, bias):
    """Scale the column of the bias, so that a penalty lam on its weight counts as `bias`."""
    return x / np.append(np.ones(x.shape[1] - 1), math.sqrt(bias / lam))


def grid_fits(x, y, rows):
    """Fit by every penalty of the grid."""
    found = []
    for lam, bias, _ in GRID:
        units = np.append(np.ones(x.shape[1] - 1), 1 / math.sqrt(bias / lam))
        found.append(ridge(freer(x, lam, bias), y, lam * rows) * units)
    return found


def averaged(found, scores):
    scores = np.asarray(scores) - np.array([guess for _, _, guess in GRID])
    shares = np.exp(scores - scores.max())
    return (shares[:, None] * np.array(found)).sum(axis=0) / shares.sum()


def test_own_choice_is_an_average_of_ridge_fits_by_leave_one_out():
    data = made()
    outcome = fit(Local(), data)
    for client in range(len(data)):
        x, y = rows_of(data, client)
        n = len(y)
        # Of a lam beside the mean, the row that is left out does not change the penalty.
        fits = grid_fits(x, y, n)
        errors = [left_out(freer(x, lam, bias), y, lam * n) for lam, bias, _ in GRID]
        scores = [-0.5 * n * np.log(found.mean()) for found in errors]
        np.testing.assert_allclose(flat(outcome, client), averaged(fits, scores), atol=1e-5)


def test_of_many_rows_the_rows_decide_and_of_one_the_public_guess():
    data = made(rows=(1, 1), clients=4)
    outcome = fit(Local(), data)
    for client in range(4):
        x, y = rows_of(data, client)
        fits = grid_fits(x, y, 1)
        # The one row's squared error left out is y^2, whatever the penalty.
        expected = averaged(fits, np.zeros(len(GRID)))
        np.testing.assert_allclose(flat(outcome, client), expected, atol=1e-5)
    data = made(rows=(400, 400), clients=3, noise=0.1)
    outcome = fit(Local(), data)
    for client in range(3):
        x, y = rows_of(data, client)
        best, usual = ridge(x, y, 1e-9), ridge(x, y, 400 * 0.1)
        far = np.linalg.norm(usual - best)
        assert np.linalg.norm(flat(outcome, client) - best) < 0.2 * far


def test_own_choice_is_about_as_good_as_the_usual_lam_and_better_where_that_is_wrong():
    """Plain leave-one-out loses far more to one public lam where rows are few.

    With 3 rows an eighth is the price of a bias that may be free, which pays where levels differ.
    """
    for rows, features, noise, most in (
        (5, 12, 0.5, 1.15),
        (20, 12, 1.0, 1.02),
        (50, 5, 0.1, 0.99),
    ):
        data = made(rows=rows, features=features, noise=noise, clients=150, spread=0.5)
        train, test = data.split(2 if rows == 5 else 0.25, 0)
        value = {
            lam: evaluate(Linear(), fit(Local(lam=lam), train).rows, test).value
            for lam in (None, 0.1)
        }
        assert value[None] < most * value[0.1], (rows, value)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_classes_are_fitted_exactly_and_score_like_a_tuned_fit(task):
    data = made(task, rows=(30, 60), clients=40, features=4)
    train, test = data.split(0.3, 0)

    def by_steps(lam):
        return Local(lam=lam, solver="sgd", sgd=SGD(epochs=30))

    own = evaluate(Linear(), fit(Local(), train).rows, test)
    fixed = [evaluate(Linear(), fit(by_steps(lam), train).rows, test).loss for lam in (0.01, 0.1)]
    assert own.loss < 1.02 * min(fixed)


def test_binary_own_choice_lies_between_exact_fits():
    data = made("binary", rows=(40, 40), clients=3)
    outcome = fit(Local(), data)
    for client in range(3):
        x, y = rows_of(data, client)
        fits = []
        for lam in LAMS:
            logistic = LogisticRegression(C=1 / (lam * 40), fit_intercept=False, tol=1e-10)
            fits.append(logistic.fit(x, y).coef_[0] if len(set(y)) > 1 else np.zeros(4))
        if len(set(y)) < 2:
            continue
        # The fits get smaller with lam: the average is between them, and is none but theirs.
        sizes = [np.linalg.norm(found) for found in fits]
        own = flat(outcome, client)
        assert min(sizes) < np.linalg.norm(own) < max(sizes)
        shares, *_ = np.linalg.lstsq(np.array(fits).T, own, rcond=None)
        assert np.linalg.norm(np.array(fits).T @ shares - own) < 1e-4


def test_networks_and_sgd_have_the_usual_lam():
    data = made("binary")
    for lam, settings in ((0.1, {"model": MLP(hidden=(3,))}), (0.01, {"solver": "sgd"})):
        one = fit(Local(sgd=SGD(epochs=2), **settings), data)
        two = fit(Local(sgd=SGD(epochs=2), lam=lam, **settings), data)
        for client in range(len(data)):
            np.testing.assert_array_equal(flat(one, client), flat(two, client))
    assert not Local(lam=0.1).chooses() and not Local(model=MLP()).chooses() and Local().chooses()
    with pytest.raises(ValueError, match="lam = -1"):
        Local(lam=-1.0)


WIDE = {"features": 90, "rows": (5, 40), "clients": 7}


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_wide_clients_are_fitted_as_alone_to_the_last_bit(task):
    """Others' rows, and their numbers of rows, do not change a bit, nor does a sparse copy."""
    data = made(task, **WIDE)
    found = fit(Local(), data)
    keep = data.owners % 2 == 0  # every second client loses its rows
    features = data.features.clone()
    features[data.owners == 0] = math.nan
    others = FederatedDataset(
        data.spec, data.names, data.offsets, features, data.targets, title="others"
    ).where(keep)
    again = fit(Local(), others)
    for client in (2, 4, 6):
        assert np.array_equal(flat(found, client), flat(again, client)), client
        assert flat(found, client).any()
    assert not flat(again, 0).any() and not flat(again, 1).any()
    rows = sparse.csr_matrix(data.features.numpy())
    sparsely = FederatedDataset(
        data.spec, data.names, data.offsets, rows, data.targets, title="sparse"
    )
    np.testing.assert_array_equal(flat(fit(Local(), sparsely), 3), flat(found, 3))


def test_wide_regression_is_an_average_of_ridge_fits_in_units_of_the_rows():
    data = made(**WIDE)
    outcome = fit(Local(), data)
    for client in range(len(data)):
        x, y = rows_of(data, client)
        n, size = len(y), np.square(x).sum() / len(y)
        x[:, -1] = math.sqrt(30)
        grid = 10.0 ** (np.arange(-1, 9) / 2)
        fits = [ridge(x, y, n * size / ratio) for ratio in grid]
        errors = np.array([left_out(x, y, n * size / ratio).mean() for ratio in grid])
        scores = -0.5 * n * np.log(errors) - 0.5 * (np.log(grid / 100) / 2) ** 2
        shares = np.exp(scores - scores.max())
        expected = (shares[:, None] * fits).sum(axis=0) / shares.sum()
        expected[-1] *= math.sqrt(30)
        np.testing.assert_allclose(flat(outcome, client), expected, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_images_are_as_good_as_a_tuned_logistic_regression_whatever_their_scale(size):
    """Rows far from zero and few per client: where plain steps diverge, or never arrive."""
    data = digits(clients=12)
    images = (1 - data.features) * size
    data = replace(data, features=images)
    train, test = data.split(0.3, 0)
    outcome = fit(Local(), train)
    wrong = 1 - evaluate(Linear(), outcome.rows, test).value
    best = []
    for c in (0.01, 0.1, 1.0, 10.0):
        misses = 0
        for client in range(12):
            (x, y), (fresh, truth) = rows_of(train, client), rows_of(test, client)
            model = LogisticRegression(C=c / size**2, max_iter=200)
            with warnings.catch_warnings():  # few steps are enough
                warnings.simplefilter("ignore")
                model.fit(x[:, :-1], y)
            misses += (model.predict(fresh[:, :-1]) != truth).sum()
        best.append(misses / len(test.targets))
    assert wrong < min(best) + 0.02, (wrong, best)


def test_clients_without_rows_and_with_broken_rows_keep_the_start():
    data = made(rows=(4, 4), clients=3)
    empty = data.where(np.repeat([True, False, True], data.counts))
    features = empty.features.clone()
    features[0] = math.nan
    broken = FederatedDataset(
        empty.spec, empty.names, empty.offsets, features, empty.targets, title="broken"
    )
    outcome = fit(Local(), broken)
    assert not flat(outcome, 0).any() and not flat(outcome, 1).any()
    np.testing.assert_array_equal(flat(outcome, 2), flat(fit(Local(), data), 2))


def penalties(outcome, data):
    """Find the penalty beside the sum that each client's fit solves for: X'(y - X w) = lam w."""
    found = []
    for client in range(len(data)):
        x, y = rows_of(data, client)
        w = flat(outcome, client)
        found.append(float((x.T @ (y - x @ w)) @ w / (w @ w)))
    return np.array(found)


def test_local_star_has_the_one_penalty_that_is_best_left_out():
    data = made(clients=12, rows=(4, 12), noise=1.0)
    outcome = fit(LocalStar(), data)
    rows = [rows_of(data, client) for client in range(len(data))]
    grid = {}
    for step in (1.0, 3.0):
        for power in range(-4, 4):
            lam = step * 10.0**power
            if power < 2:
                grid["mean", lam] = sum(left_out(x, y, lam * len(y)).sum() for x, y in rows)
            if power > -3:
                grid["sum", lam] = sum(left_out(x, y, lam).sum() for x, y in rows)
    beside, lam = min(grid, key=grid.get)
    expected = lam * (data.counts if beside == "mean" else np.ones(len(data)))
    np.testing.assert_allclose(penalties(outcome, data), expected, rtol=1e-3)
    assert str(LocalStar()) == "local*"


def test_local_star_is_stronger_than_local():
    data = made(clients=200, rows=(4, 9), features=6, noise=1.0)
    train, test = data.split(2, 0)
    strong, own = (
        evaluate(Linear(), fit(method, train).rows, test).value for method in (LocalStar(), Local())
    )
    assert strong < own


def test_pooled_ridge_is_the_one_of_scikit_learn():
    data = made(clients=8, rows=(1, 9), noise=1.0)
    outcome = fit(PooledLinear(), data)
    x, y = (
        np.concatenate(parts) for parts in zip(*(rows_of(data, k) for k in range(8)), strict=True)
    )
    alphas = [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    # Without folds this is leave-one-out.
    oracle = RidgeCV(alphas=alphas, fit_intercept=False).fit(x, y)
    for client in range(8):
        np.testing.assert_allclose(flat(outcome, client), oracle.coef_, atol=1e-5)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_pooled_classes_are_a_stationary_point(task):
    data = made(task, clients=8, rows=(5, 20), features=4)
    model = fit(PooledLinear(), data).model(3)
    x = data.features.double()
    outputs = x @ model["weight"].double().T + model["bias"].double()
    if task == "binary":
        rest = torch.sigmoid(outputs[:, 0]) - data.targets.double()
        slope = rest[None] @ x
    else:
        classes = torch.nn.functional.one_hot(data.targets, data.spec.outputs)
        slope = (torch.softmax(outputs, dim=1) - classes).T @ x
    # The gradient of the summed loss is -lam w for a lam of the grid.
    weight = model["weight"].double()
    lam = float(-(slope * weight).sum() / weight.square().sum())
    nearest = min((0.01, 0.1, 1.0, 10.0, 100.0, 1000.0), key=lambda one: abs(math.log(one / lam)))
    assert lam == pytest.approx(nearest, rel=1e-3)
    torch.testing.assert_close(slope, -lam * weight, rtol=1e-3, atol=1e-3)


def test_references_refuse_networks():
    for method in (LocalStar(model=MLP()), PooledLinear(model=MLP())):
        with pytest.raises(ValueError, match="for linear models, not MLP; use "):
            method.check(made().spec)


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_a_neighbours_number_of_rows_changes_no_bit(task):
    """Sums over padded rows would be rounded by how many zeros follow."""
    rng = np.random.default_rng(0)
    counts = rng.integers(20, 400, 200)
    rows = rng.standard_normal((counts.sum() + 997, 3)).astype(np.float32)
    noisy = rows.sum(axis=1) + rng.standard_normal(len(rows))
    targets = torch.from_numpy((noisy if task == "regression" else noisy > 0).astype(np.float32))
    found = []
    for last in (5, 997):
        end, ends = counts.sum() + last, np.cumsum([0, *counts, last])
        data = FederatedDataset(
            spec=Spec(shape=(3,), outputs=1, task=task, clients=len(ends) - 1),
            names=[str(client) for client in range(len(ends) - 1)],
            offsets=ends,
            features=torch.from_numpy(rows[:end]),
            targets=targets[:end],
        )
        beside = data.clients(np.arange(len(data)))
        priors = [ridge_prior(Linear(), data.spec, lam) for lam in LAMS]
        shares = own_shares(beside, priors, torch.zeros(len(LAMS)), bias=True)
        assert torch.allclose(shares.sum(dim=0), torch.ones(len(data), dtype=torch.float64))
        found.append(shares[:, :-1])
    assert torch.equal(*found)
    # A client's place in the stack changes nothing either: others' numbers of rows decide it.
    order = np.roll(np.arange(len(data)), 3)
    again = own_shares(data.clients(order), priors, torch.zeros(len(LAMS)), bias=True)
    assert torch.equal(again, shares[:, order])
