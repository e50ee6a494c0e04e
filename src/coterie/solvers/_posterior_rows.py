"""The compiled part of `coterie.solvers.posterior` that reads rows and writes results: no checks.

A client's rows are put dense into memory of the thread that works on it, which is larger than what
is in use. No sum may be reordered: compilers keep a fast and a slow version of a loop and choose by
where arrays lie, which depends on other clients, so both must give the same to the last bit. Inner
loops run along rows of memory instead, which vectorises them all the same.

numba's cache does not see changes in other files: after a change here, touch the files that import
from it.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


class Rows(NamedTuple):
    """Dense rows `X` or CSR arrays, the ones not used empty; targets, and where clients begin."""

    X: Array
    indptr: Array
    indices: Array
    data: Array
    y: Array
    starts: Array
    counts: Array


class Law(NamedTuple):
    """The prior (o, p): means and standard deviations, that of a row's noise, and two switches."""

    center: Array
    spread: Array
    noise: float
    per_row: bool
    bias: bool


class Found(NamedTuple):
    """Results, those not asked for empty.

    Deviations and variances (c, o, p), residuals (c,), curvatures (c, p, p), losses of rows left
    out (c, longest), deviations of predictions (c, longest, o); faults (c,) of targets.
    """

    D: Array
    V: Array
    R: Array
    K: Array
    out: Array
    wide: Array
    fault: Array


def inner(function: F) -> F:
    """Compile what one thread does."""
    return cast(F, njit(cache=True, error_model="numpy")(function))


def outer(function: F) -> F:
    """Compile what a thread runs for its share of clients: it lets go of the interpreter."""
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))


@inner
def anywhere(spread: Array) -> Array:
    """Say which columns any output may move."""
    free = np.zeros(spread.shape[1], np.bool_)
    for label in range(spread.shape[0]):
        for column in range(spread.shape[1]):
            free[column] |= spread[label, column] > 0
    return free


@inner
def load(
    rows: Rows, client: int, free: Array, bias: bool, slots: Array, columns: Array, R: Array
) -> int:
    """Put a client's rows into `R`, the columns that are free (of CSR rows: and occur) alone.

    `columns` gets their numbers and `slots`, -1 elsewhere, their places; the bias comes last.

    Returns:
        How many columns there are, -1 for rows with a NaN, an infinity or a broken CSR row.
    """
    start, n = rows.starts[client], rows.counts[client]
    width = len(free) - bias
    is_sparse = len(rows.indptr) > 0
    if is_sparse and not _mark(rows.indptr, rows.indices, start, n, slots, width):
        return -1
    k = 0
    for column in range(len(free)):
        here = free[column] and n > 0
        here &= not is_sparse or column == width or slots[column] == 0
        slots[column] = k if here else -1
        if here:
            columns[k] = column
            k += 1
    if is_sparse:
        good = _csr_rows(rows.indptr, rows.indices, rows.data, start, n, slots, k, R)
    else:
        good = _dense_rows(rows.X, start, n, width, columns, k, R)
    if bias and slots[width] >= 0:
        for i in range(n):
            R[i, slots[width]] = 1.0
    return k if good else -1


@inner
def _mark(indptr: Array, indices: Array, start: int, n: int, slots: Array, width: int) -> bool:
    for column in range(width):
        slots[column] = -1
    for row in range(start, start + n):
        if not 0 <= indptr[row] <= indptr[row + 1] <= len(indices):
            return False
        for entry in range(indptr[row], indptr[row + 1]):
            if not 0 <= indices[entry] < width:
                return False
            slots[indices[entry]] = 0
    return True


@inner
def _dense_rows(X: Array, start: int, n: int, width: int, columns: Array, k: int, R: Array) -> bool:
    total = 0.0  # fixed columns count too: a NaN there is in the scores
    used = k - 1 if k > 0 and columns[k - 1] == width else k
    for i in range(n):
        for column in range(width):
            total += 0.0 * X[start + i, column]
        for j in range(used):
            R[i, j] = X[start + i, columns[j]]
    return total == 0.0


@inner
def _csr_rows(
    indptr: Array, indices: Array, data: Array, start: int, n: int, slots: Array, k: int, R: Array
) -> bool:
    total = 0.0
    for i in range(n):
        for j in range(k):
            R[i, j] = 0.0
        for entry in range(indptr[start + i], indptr[start + i + 1]):
            total += 0.0 * data[entry]
            if slots[indices[entry]] >= 0:
                R[i, slots[indices[entry]]] += data[entry]
    return total == 0.0


@inner
def scores(rows: Rows, client: int, W: Array, label: int, bias: bool, out: Array) -> None:
    """Put x . W[label] of a client's rows into `out`, all columns included."""
    X, indptr, indices, data = rows.X, rows.indptr, rows.indices, rows.data
    for i in range(rows.counts[client]):
        row = rows.starts[client] + i
        total = W[label, W.shape[1] - 1] if bias else 0.0
        if len(indptr) > 0:
            for entry in range(indptr[row], indptr[row + 1]):
                total += data[entry] * W[label, indices[entry]]
        else:
            for column in range(W.shape[1] - bias):
                total += X[row, column] * W[label, column]
        out[i] = total


@inner
def blank(client: int, value: float, found: Found) -> None:
    """Return a client that has no rows (0) or unreadable ones (NaN) its results."""
    if len(found.D):
        found.D[client] = value
        found.V[client] = 1.0 + value
        found.R[client] = 1.0 + value
    if len(found.K):
        found.K[client] = value


@inner
def spoil(client: int, rows: Rows, fresh: Rows, found: Found) -> None:
    """Return NaN to a client with unreadable rows, where it has rows."""
    blank(client, np.nan, found)
    if len(found.out):
        found.out[client, : rows.counts[client]] = np.nan
    if len(found.wide):
        found.wide[client, : fresh.counts[client]] = np.nan


@inner
def write(
    client: int, label: int, k: int, columns: Array, v: Array, t: Array, law: Law, share: float,
    found: Found,
) -> None:  # fmt: skip
    """Write deviation and variances; the client's own prior variances are `share` of those given.

    A column that does not occur keeps its prior.
    """
    for column in range(found.D.shape[2]):
        found.D[client, label, column] = 0.0
        found.V[client, label, column] = share if law.spread[label, column] > 0 else 1.0
    for j in range(k):
        if law.spread[label, columns[j]] > 0:
            found.D[client, label, columns[j]] = v[j] * np.sqrt(share)
            found.V[client, label, columns[j]] = t[j] * share
