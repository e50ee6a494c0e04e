"""scikit-learn's own checks of estimators: without clients, and with rows dealt to clients.

The lists of expected failures are those of docs/sklearn.md; an entry that no longer fails is a
failure here.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import coterie as ct

pytestmark = pytest.mark.full

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sklearn.md"
EXPECTED: dict[str, str] = {}
"""Without clients there is nothing to excuse."""
DEALT = {
    "check_regressors_train": "its y has mean 0 and deviation 1 over all rows: pooled scaling",
    "check_regressor_data_not_an_array": "its y reaches 300: beyond the unit size of the contract",
}
"""With clients: what the checks do to their data is what the estimators refuse."""


@parametrize_with_checks(
    [
        ct.CoterieRegressor(),
        ct.CoterieClassifier(),
        ct.CoterieRegressor("mtlsvm", standardise="client"),
        ct.PerClientScaler(),
        ct.ConstantScaler(center=0.5, scale=2.0),
    ],
    expected_failed_checks=lambda estimator: EXPECTED,
    xfail_strict=True,
)
def test_without_clients(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def owners(X):
    """Deal rows to three clients by what is in them, so that a row's client is always the same."""
    try:
        first = np.asarray(X.toarray() if sparse.issparse(X) else X, dtype=float)[:, 0]
        return np.floor(np.abs(first) * 1000).astype(int) % 3
    except (TypeError, ValueError, IndexError):
        return None  # no rows at all: the estimator says what is wrong with them


class Dealt:
    def fit(self, X, y, clients=None):
        return super().fit(X, y, clients=owners(X))

    def _outputs(self, X, clients):
        return super()._outputs(X, owners(X))


class DealtRegressor(Dealt, ct.CoterieRegressor):
    pass


class DealtClassifier(Dealt, ct.CoterieClassifier):
    pass


@pytest.mark.parametrize("kind", [DealtRegressor, DealtClassifier])
def test_with_clients(kind):
    estimator = kind(random_state=0, standardise="client")
    listed = DEALT if kind is DealtRegressor else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(
            estimator, expected_failed_checks=listed, on_fail=None, on_skip=None
        )
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert not failed
    stale = set(listed) - {one["check_name"] for one in found if one["status"] == "xfail"}
    assert not stale
    assert sum(one["status"] == "passed" for one in found) > 40


def test_the_page_lists_the_same_failures():
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition("## scikit-learn's checks")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(check_\w+)` \|", part, re.MULTILINE)) == {*EXPECTED, *DEALT}
