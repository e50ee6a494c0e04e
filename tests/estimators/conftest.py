"""Fixtures of the estimators' tests."""

import pytest

from coterie.estimators import repeats


@pytest.fixture(autouse=True)
def nothing_fitted_yet():
    """Forget the fits of other tests: the same rows fitted twice are warned of."""
    repeats._PAST.clear()
