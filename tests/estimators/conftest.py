"""Fixtures of the estimators' tests."""

import pytest

from coterie.estimators import base


@pytest.fixture(autouse=True)
def nothing_fitted_yet():
    """Forget the fits of other tests: the same rows fitted twice are warned of."""
    base._PAST_FITS.clear()
