"""Rows that were scaled by statistics of all clients together, recognised by what is left in them.

A scaler that is fitted on everybody's rows releases their mean, deviation or extremes without
noise: every client's scaled rows depend on every other's. An estimator does not see the pipeline
that it stands in, but such scaling leaves a mark that no other rows have: over all rows together,
to the last digits, a mean of 0 and a deviation of 1 (StandardScaler, or the same by hand), a median
of 0 and quartiles 1 apart (RobustScaler), extremes of exactly 0 and 1 (MinMaxScaler), a largest
size of exactly 1 (MaxAbsScaler).

By chance it does not happen: the mean and the deviation of n rows are both within t of 0 and 1 with
probability of about n t^2, 1e-12 for t = 1e-8 and ten thousand rows. What can have such numbers by
design is left out: columns of whole numbers, of two values, and, for extremes, columns that touch
them more than once (shares, pixels) or that are not all like that.

Scaling that was fitted on other rows too (before a split, say) leaves no mark and is not seen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
_TOLERANCE = {4: 2e-6, 8: 1e-8}  # by bytes of a number
_FEWEST_ROWS = 5  # fewer may have any mean and deviation by design
_OWN_MEAN = 1e-5  # a client's own mean that is 0 but for rounding, in float32 too
_NAMED = 3  # columns named in a message

REMEDY = (
    "scale each client by its own rows (standardise='client' here, or coterie.PerClientScaler in "
    "the pipeline) or by constants that were public before anybody looked at the rows "
    "(coterie.ConstantScaler(center=..., scale=...)); if the constants were public after all, or "
    "the rows are, say on_pooled='ignore'"
)


class PooledScalingError(ValueError):
    """Raised for rows that were scaled by statistics of all clients together."""


def find_pooled(X: Any, y: Floats | None = None, codes: Whole | None = None) -> str | None:
    """Say which scaler of all rows together X (and the target) went through; None for none.

    Args:
        X: Rows of all clients, dense or CSR.
        y: Targets of a regression, or None.
        codes: The number of each row's client, from 0: columns whose mean is 0 inside every client
            were centred there, and have nothing of anybody else. None for no look inside.
    """
    if X.shape[0] < _FEWEST_ROWS:
        return None
    wide = 4 if X.dtype.itemsize <= 4 else 8
    if sparse.issparse(X):
        found = _sparse(X, _TOLERANCE[wide])
    else:
        values = np.asarray(X.reshape(len(X), -1), dtype=np.float64)
        found = _dense(values, _TOLERANCE[wide], _looked_at(values, codes))
    if found is None and y is not None:
        targets = y.astype(np.float64)[:, None]
        marks = _moments(targets, _TOLERANCE[8])
        pooled = marks.any() and len(_looked_at(targets, codes))
        found = "the target with mean 0 and deviation 1" if pooled else None
    return found


def explain(found: str) -> str:
    """Say what is wrong with pooled rows, and what to do instead."""
    return (
        f"{found} over the rows of all clients together: it was scaled by statistics of all of "
        f"them, which epsilon does not cover; {REMEDY}"
    )


def _looked_at(values: Floats, codes: Whole | None) -> Whole:
    """Leave out columns that every client has centred by itself."""
    if codes is None:
        return np.arange(values.shape[1])
    owner = sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))))
    counts = np.maximum(np.bincount(codes), 1)[:, None]
    return np.flatnonzero((np.abs(owner @ values) / counts > _OWN_MEAN).any(axis=0))


def _dense(whole: Floats, tolerance: float, columns: Whole) -> str | None:
    if not len(columns):
        return None
    values = whole[:, columns]
    for looks, words in (
        (_moments, "mean 0 and deviation 1 (StandardScaler)"),
        (_quartiles, "median 0 and quartiles 1 apart (RobustScaler)"),
    ):
        marked = columns[looks(values, tolerance)]
        if len(marked):
            return f"{_columns(marked)} of X with {words}"
    for every, words in (
        (_spans, "least 0 and largest 1 (MinMaxScaler)"),
        (_sizes, "largest size 1 (MaxAbsScaler)"),
        (_deviations, "deviation 1 (StandardScaler without the mean)"),
    ):
        if _all_of(values, tolerance, every):
            return f"every column of X with {words}"
    return None


def _sparse(X: Any, tolerance: float) -> str | None:
    """Look at what sparse rows can be scaled by: sizes and deviations, never means."""
    if X.shape[1] < 2:
        return None
    held = sparse.csc_matrix(X, dtype=np.float64)
    counts = np.diff(held.indptr)
    used = np.flatnonzero(counts > 2)  # of fewer stored numbers one may well be 1
    if len(used) < 2:
        return None
    rows = X.shape[0]
    mean = np.asarray(held.sum(axis=0)).reshape(-1)[used] / rows
    square = np.asarray(held.multiply(held).sum(axis=0)).reshape(-1)[used] / rows
    if bool((np.abs(np.sqrt(square - mean**2) - 1) <= tolerance).all()):
        return "every column of X with deviation 1 (StandardScaler without the mean)"
    sizes = np.abs(held.data)
    top = np.maximum.reduceat(sizes, held.indptr[:-1][used])
    owner = np.repeat(np.arange(X.shape[1]), counts)
    touching = np.bincount(owner[sizes >= 1 - tolerance], minlength=X.shape[1])[used]
    if bool((np.abs(top - 1) <= tolerance).all()) and 2 * int((touching == 1).sum()) >= len(used):
        return "every column of X with largest size 1 (MaxAbsScaler)"
    return None


def _moments(values: Floats, tolerance: float) -> NDArray[np.bool_]:
    """Mark columns with mean 0 and deviation 1, by n or by n - 1."""
    mean, rows = values.mean(axis=0), len(values)
    deviation = values.std(axis=0)
    unit = np.abs(deviation - 1) <= tolerance
    unit |= np.abs(deviation * np.sqrt(rows / (rows - 1)) - 1) <= tolerance
    marked: NDArray[np.bool_] = (np.abs(mean) <= tolerance) & unit
    for column in np.flatnonzero(marked):
        marked[column] = _varies(values[:, column])
    return marked


def _quartiles(values: Floats, tolerance: float) -> NDArray[np.bool_]:
    """Mark columns with median 0 and quartiles 1 apart, where no value comes often."""
    low, middle, high = np.percentile(values, (25, 50, 75), axis=0)
    marked: NDArray[np.bool_] = np.abs(middle) <= tolerance
    marked &= np.abs(high - low - 1) <= tolerance
    for column in np.flatnonzero(marked):
        marked[column] = 2 * len(np.unique(values[:, column])) > len(values)
    return marked


def _all_of(
    values: Floats, tolerance: float, fits: Callable[[Floats, float], tuple[bool, bool]]
) -> bool:
    """Return whether all columns that vary fit, and at least half of them clearly."""
    seen, clearly = 0, 0
    for column in values.T:
        if column.min() == column.max() or not _varies(column):
            continue
        fit, clear = fits(column, tolerance)
        if not fit:
            return False
        seen, clearly = seen + 1, clearly + clear
    return seen >= 2 and 2 * clearly >= seen


def _spans(column: Floats, tolerance: float) -> tuple[bool, bool]:
    fits = abs(column.min()) <= tolerance and abs(column.max() - 1) <= tolerance
    low, high = (column <= tolerance).sum(), (column >= 1 - tolerance).sum()
    return bool(fits), bool(low == 1 and high == 1)


def _sizes(column: Floats, tolerance: float) -> tuple[bool, bool]:
    sizes = np.abs(column)
    touching = int((sizes >= 1 - tolerance).sum())
    return bool(abs(sizes.max() - 1) <= tolerance), touching == 1


def _deviations(column: Floats, tolerance: float) -> tuple[bool, bool]:
    fits = bool(abs(column.std() - 1) <= tolerance)
    return fits, fits


def _varies(column: Floats) -> bool:
    """Return whether a column is no indicator and no count: those have such numbers by design."""
    return not bool((column == np.rint(column)).all()) and len(np.unique(column)) > 2


def _columns(marked: Whole) -> str:
    named = ", ".join(str(column) for column in marked[:_NAMED])
    more = f" and {len(marked) - _NAMED} more" if len(marked) > _NAMED else ""
    return f"column{'s' if len(marked) > 1 else ''} {named}{more} (from 0)"
