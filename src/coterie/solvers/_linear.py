"""The compiled part of `coterie.solvers.kernels`: no checks, no allocation of results.

One file, since numba's cache does not see changes in other files. Nothing here takes a view of a
shared array inside the steps: its reference count would be fought over by all threads.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

SQUARED, LOGISTIC, SOFTMAX = 0, 1, 2
BAD_CLASS, BAD_ROW = 1, 2
_HALF = np.uint64(0xFFFFFFFF)
_TILE = 16

# Sums may be reordered and products fused, which vectorises them; NaN and infinity keep their
# meaning, so a non-finite row shows in the result of its client.
_FAST = {"reassoc", "contract", "nsz"}


def _inner(function: F) -> F:
    return cast(F, njit(cache=True, fastmath=_FAST, error_model="numpy")(function))


def _outer(function: F) -> F:
    compiled = njit(cache=True, fastmath=_FAST, error_model="numpy", parallel=True)(function)
    return cast(F, compiled)


@_inner
def _below(state: np.uint64, bound: np.uint64) -> tuple[np.uint64, np.int64]:
    # SplitMix64 (Steele, Lea, Flood 2014), reduced without bias from 32 bits (Lemire 2019).
    floor = bound
    while True:
        state = state + np.uint64(0x9E3779B97F4A7C15)
        word = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        product = ((word ^ (word >> np.uint64(31))) >> np.uint64(32)) * bound
        low = product & _HALF
        if low < floor:
            floor = (_HALF - bound + np.uint64(1)) % bound
        if low >= floor:
            return state, np.int64(product >> np.uint64(32))


@_inner
def _shuffle(order: Array, batches: int, batch: int, state: np.uint64) -> np.uint64:
    # Fisher-Yates from the front, only as far as the batches still to come reach.
    count = len(order)
    for place in range(min(count, batches * batch)):
        state, jump = _below(state, np.uint64(count - place))
        order[place], order[place + jump] = order[place + jump], order[place]
    return state


@_outer
def draw_all(
    keys: Array, counts: Array, steps: Array, batch: int, out: Array, parts: int, longest: int
) -> None:
    for part in prange(parts):
        buffer = np.empty(longest, dtype=np.int64)
        for client in range(part, len(keys), parts):
            order = buffer[: counts[client]]
            _number(order, 0)
            total, begin = steps[client] if len(order) else 0, 0
            state = _shuffle(order, total, batch, keys[client])
            for step in range(total):
                if begin == len(order):
                    begin, state = 0, _shuffle(order, total - step, batch, state)
                end = min(begin + batch, len(order))
                for place in range(begin, end):
                    out[client, step, place - begin] = order[place]
                begin = end


@_outer
def dense_all(
    W: Array, b: Array, A: Array, a: Array, X: Array,
    Y: Array, classes: Array, starts: Array, counts: Array, loss: int,
    keys: Array, steps: Array, batch: int, lr: Any, momentum: Any, lam: Any, parts: int,
    longest: int, fault: Array,
) -> None:  # fmt: skip
    for part in prange(parts):
        buffer = np.empty(longest, dtype=np.int64)
        R = np.empty((min(batch, longest), W.shape[1]), W.dtype)
        g = np.empty(W.shape[2], W.dtype)
        V = np.empty((W.shape[1] if momentum != 0 else 0, W.shape[2]), W.dtype)
        v = np.empty(b.shape[1], W.dtype)
        for client in range(part, len(keys), parts):
            order = buffer[: counts[client]]
            _number(order, starts[client])
            fault[client] = _dense_one(
                W[client], b[client], A[min(client, len(A) - 1)], a[min(client, len(a) - 1)],
                X, Y, classes, loss, order, keys[client], steps[client], batch,
                lr, momentum, lam, R, g, V, v,
            )  # fmt: skip


@_inner
def _dense_one(
    W: Array, b: Array, A: Array, a: Array, X: Array, Y: Array, classes: Array, loss: int,
    order: Array, key: np.uint64, steps: int, batch: int, lr: Any, momentum: Any, lam: Any,
    R: Array, g: Array, V: Array, v: Array,
) -> int:  # fmt: skip
    for label in range(len(V)):
        _fill(V[label], 0)
    _fill(v, 0)
    total, begin = steps if len(order) else 0, 0
    state = _shuffle(order, total, batch, key)
    for step in range(total):
        if begin == len(order):
            begin, state = 0, _shuffle(order, total - step, batch, state)
        rows = order[begin : min(begin + batch, len(order))]
        begin += len(rows)
        _scores(W, b, X, rows, R)
        fault = _residuals(R, Y, classes, rows, loss)
        if fault:
            return fault
        _descend(W, A, V, X, rows, R, g, lr, momentum, lam)
        _descend_bias(b, a, v, R[: len(rows)], lr, momentum, lam)
    return 0


@_inner
def _fill(row: Array, value: int) -> None:
    for place in range(len(row)):
        row[place] = value


@_inner
def _number(order: Array, start: int) -> None:
    for place in range(len(order)):
        order[place] = start + place


@_inner
def _scores(W: Array, b: Array, X: Array, rows: Array, R: Array) -> None:
    for label in range(W.shape[0]):
        for place in range(len(rows)):
            row = rows[place]
            total = W.dtype.type(0)
            for column in range(W.shape[1]):
                total += W[label, column] * X[row, column]
            R[place, label] = total + (b[label] if len(b) else W.dtype.type(0))


@_inner
def _residuals(R: Array, Y: Array, classes: Array, rows: Array, loss: int) -> int:
    # Scores become derivatives of the mean loss with respect to the scores.
    share = R.dtype.type(1) / R.dtype.type(len(rows))
    for place in range(len(rows)):
        if loss == SOFTMAX:
            wanted = classes[rows[place]]
            if not 0 <= wanted < R.shape[1]:
                return BAD_CLASS
            _soften(R[place])
            R[place, wanted] -= R.dtype.type(1)
        elif loss == LOGISTIC:
            for label in range(R.shape[1]):
                small = np.exp(-abs(R[place, label]))
                top = R.dtype.type(1) if R[place, label] >= 0 else small
                R[place, label] = top / (R.dtype.type(1) + small) - Y[rows[place], label]
        else:
            for label in range(R.shape[1]):
                R[place, label] -= Y[rows[place], label]
        for label in range(R.shape[1]):
            R[place, label] *= share
    return 0


@_inner
def _soften(row: Array) -> None:
    highest = row[0]
    for label in range(1, len(row)):
        highest = max(highest, row[label])
    total = row.dtype.type(0)
    for label in range(len(row)):
        row[label] = np.exp(row[label] - highest)
        total += row[label]
    for label in range(len(row)):
        row[label] /= total


@_inner
def _descend(
    W: Array, A: Array, V: Array, X: Array, rows: Array, R: Array, g: Array,
    lr: Any, momentum: Any, lam: Any,
) -> None:  # fmt: skip
    for label in range(W.shape[0]):
        _fill(g, 0)
        for place in range(len(rows)):
            row, residual = rows[place], R[place, label]
            for column in range(len(g)):
                g[column] += residual * X[row, column]
        if lam != 0:
            for column in range(len(g)):
                g[column] += lam * (W[label, column] - A[label, column])
        if momentum != 0:
            _remember(g, V, label, momentum)
        for column in range(len(g)):
            W[label, column] -= lr * g[column]


@_inner
def _remember(g: Array, V: Array, label: int, momentum: Any) -> None:
    for column in range(len(g)):
        g[column] += momentum * V[label, column]
        V[label, column] = g[column]


@_inner
def _descend_bias(b: Array, a: Array, v: Array, R: Array, lr: Any, momentum: Any, lam: Any) -> None:
    for label in range(len(b)):
        slope = momentum * v[label]
        for place in range(len(R)):
            slope += R[place, label]
        if lam != 0:
            slope += lam * (b[label] - a[label])
        v[label] = slope
        b[label] -= lr * slope


@_outer
def csr_all(
    W: Array, b: Array, A: Array, a: Array, begun: Array,
    indptr: Array, indices: Array, data: Array, capacity: int, moves: Array,
    Y: Array, classes: Array, starts: Array, counts: Array, loss: int,
    keys: Array, steps: Array, batch: int, lr: Any, momentum: Any, lam: Any, parts: int,
    longest: int, fault: Array,
) -> None:  # fmt: skip
    for part in prange(parts):
        buffer = np.empty(longest, dtype=np.int64)
        R = np.empty((min(batch, longest), W.shape[1]), W.dtype)
        v = np.empty(b.shape[1], W.dtype)
        slots = np.empty(W.shape[2], dtype=np.int64)
        _fill(slots, -1)
        columns = np.empty(capacity, dtype=np.int64)
        done = np.empty(capacity, dtype=np.int64)
        # Weights, anchor and velocity of the columns in use, outputs side by side.
        pack = np.empty((3, capacity, W.shape[1]), W.dtype)
        for client in range(part, len(keys), parts):
            order = buffer[: counts[client]]
            _number(order, starts[client])
            fault[client] = _csr_one(
                W[client], b[client], A[min(client, len(A) - 1)], a[min(client, len(a) - 1)],
                begun[client], indptr, indices, data, moves, Y, classes, loss,
                order, keys[client], steps[client], batch, lr, momentum, lam,
                R, v, slots, columns, done, pack,
            )  # fmt: skip


@_inner
def _csr_one(
    W: Array, b: Array, A: Array, a: Array, begun: Array, indptr: Array, indices: Array,
    data: Array, moves: Array, Y: Array, classes: Array, loss: int,
    order: Array, key: np.uint64, steps: int, batch: int, lr: Any, momentum: Any, lam: Any,
    R: Array, v: Array, slots: Array, columns: Array, done: Array, pack: Array,
) -> int:  # fmt: skip
    _fill(v, 0)
    total, begin = steps if len(order) else 0, 0
    state = _shuffle(order, total, batch, key)
    used = _claim(indptr, indices, order[: min(len(order), total * batch)], slots, columns)
    if used < 0:
        return BAD_ROW
    _fill(done, 0)
    _gather(begun, A, columns[:used], pack, moves)
    for step in range(total):
        if begin == len(order):
            begin, state = 0, _shuffle(order, total - step, batch, state)
        rows = order[begin : min(begin + batch, len(order))]
        begin += len(rows)
        _csr_scores(pack, b, indptr, indices, data, rows, R, slots, done, moves, step)
        fault = _residuals(R, Y, classes, rows, loss)
        if fault:
            return fault
        _csr_descend(pack, indptr, indices, data, rows, R, slots, done, moves, step, lr)
        _descend_bias(b, a, v, R[: len(rows)], lr, momentum, lam)
    _coast_all(W, begun, A, moves, total)
    _scatter(W, columns[:used], pack, slots, done, moves, total)
    return 0


@_inner
def _claim(indptr: Array, indices: Array, rows: Array, slots: Array, columns: Array) -> int:
    # Numbers the columns of the rows from left to right; -1 if a row cannot be read.
    for row in rows:
        if not 0 <= indptr[row] <= indptr[row + 1] <= len(indices):
            return -1
        for entry in range(indptr[row], indptr[row + 1]):
            if not 0 <= indices[entry] < len(slots):
                return -1
            slots[indices[entry]] = 0
    used = 0
    for column in range(len(slots)):
        if slots[column] == 0:
            if used == len(columns):
                return -1
            slots[column] = used
            columns[used] = column
            used += 1
    return used


@_inner
def _gather(W: Array, A: Array, columns: Array, pack: Array, moves: Array) -> None:
    # In tiles of outputs: one after the other, or column by column, most reads miss the cache.
    for first in range(0, len(W), _TILE):
        for slot in range(len(columns)):
            for label in range(first, min(first + _TILE, len(W))):
                pack[0, slot, label] = W[label, columns[slot]]
    if len(moves) > 1:
        for first in range(0, len(W), _TILE):
            for slot in range(len(columns)):
                for label in range(first, min(first + _TILE, len(W))):
                    pack[1, slot, label] = A[label, columns[slot]]
                    pack[2, slot, label] = 0


@_inner
def _coast(pack: Array, slot: int, step: int, done: Array, moves: Array) -> None:
    # Brings a column to a step as if its batches had not touched it since.
    ahead = step - done[slot]
    if ahead > 0 and len(moves) > 1:
        for label in range(pack.shape[2]):
            gap, speed = pack[0, slot, label] - pack[1, slot, label], pack[2, slot, label]
            pack[0, slot, label] += moves[ahead, 0] * gap + moves[ahead, 1] * speed
            pack[2, slot, label] = moves[ahead, 2] * gap + moves[ahead, 3] * speed
    done[slot] = step


@_inner
def _csr_scores(
    pack: Array, b: Array, indptr: Array, indices: Array, data: Array, rows: Array, R: Array,
    slots: Array, done: Array, moves: Array, step: int,
) -> None:  # fmt: skip
    for place in range(len(rows)):
        for label in range(R.shape[1]):
            R[place, label] = b[label] if len(b) else R.dtype.type(0)
        for entry in range(indptr[rows[place]], indptr[rows[place] + 1]):
            slot, value = slots[indices[entry]], data[entry]
            if done[slot] < step:
                _coast(pack, slot, step, done, moves)
            # The first output apart, for models with one: a loop costs more than its only round.
            R[place, 0] += value * pack[0, slot, 0]
            for label in range(1, R.shape[1]):
                R[place, label] += value * pack[0, slot, label]


@_inner
def _csr_descend(
    pack: Array, indptr: Array, indices: Array, data: Array, rows: Array, R: Array,
    slots: Array, done: Array, moves: Array, step: int, lr: Any,
) -> None:  # fmt: skip
    # v <- (momentum v + lam u) + g: the bracket is one step of coasting, g is added after it.
    for place in range(len(rows)):
        for entry in range(indptr[rows[place]], indptr[rows[place] + 1]):
            slot, value = slots[indices[entry]], data[entry]
            if done[slot] <= step:
                _coast(pack, slot, step + 1, done, moves)
            pack[0, slot, 0] -= lr * value * R[place, 0]
            for label in range(1, R.shape[1]):
                pack[0, slot, label] -= lr * value * R[place, label]
            if len(moves) > 1:
                for label in range(R.shape[1]):
                    pack[2, slot, label] += value * R[place, label]


@_inner
def _scatter(
    W: Array, columns: Array, pack: Array, slots: Array, done: Array, moves: Array, total: int
) -> None:
    for slot in range(len(columns)):
        _coast(pack, slot, total, done, moves)
        slots[columns[slot]] = -1
    for first in range(0, len(W), _TILE):
        for slot in range(len(columns)):
            for label in range(first, min(first + _TILE, len(W))):
                W[label, columns[slot]] = pack[0, slot, label]


@_inner
def _coast_all(W: Array, begun: Array, A: Array, moves: Array, total: int) -> None:
    for label in range(len(W)):
        for column in range(W.shape[1]):
            W[label, column] = begun[label, column]
        if len(moves) > 1 and moves[total, 0] != 0:
            for column in range(W.shape[1]):
                W[label, column] += moves[total, 0] * (begun[label, column] - A[label, column])
