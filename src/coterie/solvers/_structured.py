"""Numba kernels over ragged clients for linear models in each client's own units.

Every client is computed by one thread, row by row in order, so its numbers are the same to the
last bit whoever else is in the stack. Rows are dense float32, or CSR (then `indptr` has entries).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = tuple[NDArray[np.float32], NDArray[np.float32], Ints, Ints]
_SMALL = 1 << 16
F = TypeVar("F", bound=Callable[..., object])


@contextmanager
def few_threads(numbers: int) -> Iterator[None]:
    """Work on one thread where waking others, on a busy machine, takes longer than the work."""
    threads = numba.get_num_threads()
    if numbers < _SMALL:
        numba.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(threads)


def _compiled(function: F) -> F:
    return cast(F, numba.njit(parallel=True, cache=True)(function))


def _inline(function: F) -> F:
    return cast(F, numba.njit(cache=True)(function))


@_inline
def _read(rows: Rows, row: int, centre: Floats, scale: float, out: Floats) -> None:
    """Put one row, centred and scaled, into `out`."""
    dense, values, columns, indptr = rows
    if len(indptr):
        for j in range(len(out)):
            out[j] = -centre[j] * scale
        for place in range(indptr[row], indptr[row + 1]):
            out[columns[place]] += values[place] * scale
    else:
        for j in range(len(out)):
            out[j] = (dense[row, j] - centre[j]) * scale


@_compiled
def units(rows: Rows, targets: Floats, starts: Ints, counts: Ints, bias: bool, out: Floats) -> None:
    """Find each client's means and the scale that makes its rows of mean square norm 1.

    `out` is (c, d + 2): means of the features, mean of the targets, scale. Squares are summed of
    centred rows, in a second pass: of large numbers that hardly differ nothing else is left.
    """
    features = out.shape[1] - 2
    for k in numba.prange(len(starts)):
        n = counts[k]
        row, zero = np.empty(features), np.zeros(features)
        squares, size = 0.0, 0.0
        for i in range(starts[k], starts[k] + n):
            _read(rows, i, zero, 1.0, row)
            for j in range(features):
                out[k, j] += row[j] / n
                squares += row[j] * row[j] / n
            out[k, features] += targets[i] / n
        if not bias:
            out[k, : features + 1] = 0.0
        for i in range(starts[k], starts[k] + n):
            _read(rows, i, out[k], 1.0, row)
            for j in range(features):
                size += row[j] * row[j] / n
        # What is left of equal rows after centring is rounding: such a client learns a level only.
        out[k, features + 1] = 1.0 / math.sqrt(size) if size > 1e-24 * squares else 0.0


@_compiled
def transform(
    rows: Rows, starts: Ints, counts: Ints, own: Floats, diagonal: Floats, out: Floats
) -> None:
    """Write each client's rows in its own units, times a diagonal, one client after another."""
    features = own.shape[1] - 2
    ends = np.cumsum(counts)
    for k in numba.prange(len(starts)):
        first = ends[k] - counts[k]
        for i in range(counts[k]):
            _read(rows, starts[k] + i, own[k], own[k, features + 1], out[first + i])
            for j in range(features):
                out[first + i, j] *= diagonal[j]


@_compiled
def slopes(
    rows: Rows, targets: Floats, starts: Ints, counts: Ints, own: Floats, points: Floats,
    binary: bool, out: Floats,
) -> None:  # fmt: skip
    """Compute each client's gradient of its mean loss at `points` (c, d + 1), the last the level.

    Squares: residual of the centred target (the best level is profiled out, its slope is 0).
    Logistic: targets are 0 and 1, the level is a coordinate of its own.
    """
    features = own.shape[1] - 2
    for k in numba.prange(len(starts)):
        row = np.empty(features)
        for i in range(starts[k], starts[k] + counts[k]):
            _read(rows, i, own[k], own[k, features + 1], row)
            score = points[k, features] if binary else 0.0
            for j in range(features):
                score += row[j] * points[k, j]
            if binary:
                rest = 1.0 / (1.0 + math.exp(-min(max(score, -700.0), 700.0))) - targets[i]
            else:
                rest = score - (targets[i] - own[k, features])
            rest /= counts[k]
            for j in range(features):
                out[k, j] += rest * row[j]
            out[k, features] += rest if binary else 0.0


@_compiled
def map_rows(models: Floats, linear: Floats, out: Floats) -> None:
    """Multiply each row by a matrix, one row at a time."""
    for k in numba.prange(len(models)):
        for j in range(linear.shape[1]):
            out[k, j] = 0.0
        for i in range(linear.shape[0]):
            value = models[k, i]
            for j in range(linear.shape[1]):
                out[k, j] += value * linear[i, j]


@_inline
def _factor(matrix: Floats) -> None:
    """Turn a positive definite matrix into its Cholesky factor, below the diagonal and on it."""
    for j in range(len(matrix)):
        for i in range(j):
            matrix[j, j] -= matrix[j, i] * matrix[j, i]
        matrix[j, j] = math.sqrt(matrix[j, j])
        for row in range(j + 1, len(matrix)):
            for i in range(j):
                matrix[row, j] -= matrix[row, i] * matrix[j, i]
            matrix[row, j] /= matrix[j, j]


@_inline
def _substitute(factor: Floats, right: Floats) -> None:
    """Solve with a Cholesky factor, in place."""
    for j in range(len(right)):
        for i in range(j):
            right[j] -= factor[j, i] * right[i]
        right[j] /= factor[j, j]
    for j in range(len(right) - 1, -1, -1):
        for row in range(j + 1, len(right)):
            right[j] -= factor[row, j] * right[row]
        right[j] /= factor[j, j]


@_compiled
def solve_moments(store: Floats, slots: Ints, root: Floats, out: Floats) -> None:
    """Solve (root^T G root + I) u = root^T c for each client with second moments G, c kept.

    Plain loops: they compile in a second, where linear algebra inside a kernel takes many.
    """
    features = store.shape[2]
    for k in numba.prange(len(slots)):
        own = store[slots[k]]
        half, inner = np.zeros((features, features)), np.zeros((features, features))
        for a in range(features):
            inner[a, a] = 1.0
            out[k, a] = 0.0
            for b in range(features):
                value = own[a, b]
                for c in range(features):
                    half[a, c] += value * root[b, c]
        for a in range(features):
            for b in range(features):
                out[k, b] += own[features, a] * root[a, b]
                value = root[a, b]
                for c in range(b + 1):
                    inner[b, c] += value * half[a, c]
        _factor(inner)
        _substitute(inner, out[k])


@_compiled
def moments(
    rows: Rows, targets: Floats, starts: Ints, counts: Ints, own: Floats, out: Floats
) -> None:
    """Compute each client's X'X/n and X'y/n in its own units: `out` is (c, d + 1, d)."""
    features = own.shape[1] - 2
    for k in numba.prange(len(starts)):
        row = np.empty(features)
        for i in range(starts[k], starts[k] + counts[k]):
            _read(rows, i, own[k], own[k, features + 1], row)
            target = targets[i] - own[k, features]
            for a in range(features):
                for b in range(a + 1):
                    out[k, a, b] += row[a] * row[b]
                out[k, features, a] += row[a] * target
        for a in range(features):
            out[k, features, a] /= counts[k]
            for b in range(a + 1):
                out[k, a, b] /= counts[k]
                out[k, b, a] = out[k, a, b]


@_compiled
def moment_slopes(store: Floats, slots: Ints, points: Floats, out: Floats) -> None:
    """Compute the squared loss's gradient from stored moments, for clients that have them."""
    features = store.shape[2]
    for k in numba.prange(len(slots)):
        if slots[k] >= 0:
            own = store[slots[k]]
            for a in range(features):
                slope = -own[features, a]
                for b in range(features):
                    slope += own[a, b] * points[k, b]
                out[k, a] = slope
