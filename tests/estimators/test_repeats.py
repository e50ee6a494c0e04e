"""What private fits of the same rows have spent is added up, however many there were."""

import numpy as np
import pytest

from coterie.estimators import repeats
from coterie.estimators.repeats import Rows, remember


def rows(seed, count=40):
    draw = np.random.default_rng(seed)
    X, y = draw.normal(size=(count, 3)), draw.normal(size=count)
    return Rows(X, y, np.arange(count) % 4, [f"client {number}" for number in range(4)])


def test_no_fit_is_forgotten():
    for _ in range(300):
        spent = remember(rows(0), 0.5, 1e-6)
    assert (spent.fits, spent.epsilon) == (300, 150.0) and spent.delta == pytest.approx(3e-4)


def test_fits_of_many_other_rows_push_none_out():
    for _ in range(5):
        remember(rows(0), 1.0, 1e-6)
    for seed in range(1, 400):
        remember(rows(seed), 1.0, 1e-6)
    assert len(repeats._PAST) <= 256
    # Those taken together may count for too much, never for too little.
    spent = remember(rows(0), 1.0, 1e-6)
    assert spent.fits >= 6 and spent.epsilon >= 6.0
    assert remember(rows(1000), 1.0, 1e-6).fits == 1, "rows of nobody else"
    assert sum(one.fits for one in repeats._PAST.values()) == 5 + 399 + 1 + 1


def test_the_limits_that_are_stated():
    known = rows(0)
    remember(known, 1.0, 1e-6)
    turned = Rows(known.X[:, ::-1], known.y, known.codes, known.names)
    assert remember(turned, 1.0, 1e-6).fits == 2, "targets of clients tell rows apart"
    classes = Rows(known.X, (known.y > 0).astype(float), known.codes, known.names)
    remember(classes, 1.0, 1e-6)
    turned = Rows(known.X[:, ::-1], classes.y, known.codes, known.names)
    assert remember(turned, 1.0, 1e-6).fits == 1, "classes do not"
