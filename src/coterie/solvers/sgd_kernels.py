"""Compiled SGD of linear models, parallel over clients.

Client i owns the rows `starts[i] : starts[i] + counts[i]` of flat arrays and draws its batches from
its own SplitMix64 stream `keys[i]`. One thread computes a client from start to end, so a client's
result is the same to the last bit in any company.

A step on a batch is v <- momentum * v + g, w <- w - lr * v, where g is the gradient of the mean
loss over the batch plus lam * (w - anchor), and v = 0 at the start of a call. The losses are
1/2 (p - y)^2 (regression), logistic on 0/1 (binary), softmax cross-entropy (multiclass) and the sum
over labels of logistic (multilabel).

One file holds all of them because numba's cache does not see changes in other files.
"""
# ruff: noqa: PLR0913, PLR0917 - kernels take flat arrays, one argument each

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numba import get_num_threads, prange, set_num_threads
from numpy.typing import NDArray

from coterie.core.kernels import compiled

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]
F = TypeVar("F", bound=Callable[..., Any])

SQUARED, LOGISTIC, SOFTMAX = 0, 1, 2
BAD_CLASS, BAD_ROW = 1, 2
_SMALL = 1 << 18  # row numbers that one thread draws in about a millisecond
_HALF = np.uint64(0xFFFFFFFF)
_TILE = 16
# Sums may be reordered and products fused, which vectorises them; NaN and infinity keep their
# meaning, so a non-finite row shows in the result of its client.
_FAST = {"reassoc", "contract", "nsz"}
_LOSSES = {
    "regression": SQUARED,
    "binary": LOGISTIC,
    "multiclass": SOFTMAX,
    "multilabel": LOGISTIC,
}
_FAULTS = {
    BAD_CLASS: "a class outside 0 .. outputs - 1: number the classes from 0",
    BAD_ROW: "a CSR row with a broken indptr or a column outside 0 .. d - 1: rebuild the matrix",
}


def draw_batches(
    keys: NDArray[np.uint64], counts: NDArray[np.int64], steps: NDArray[np.int64], batch: int
) -> NDArray[np.int32]:
    """Return every client's batches: row numbers within the client, -1 where there is no row.

    A client visits its rows in one random permutation per epoch, cut into ceil(count / batch)
    batches; the last may be smaller. The shape is (clients, largest of steps, batch).
    """
    _check_schedule(counts, keys, steps, batch)
    out = np.full((len(keys), int(steps.max(initial=0)), batch), -1, dtype=np.int32)
    with few_threads(out.size < _SMALL):
        _draw_all(keys, counts, steps, batch, out, _parts(len(keys)), int(counts.max(initial=0)))
    return out


@contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """Use one thread if the work is small: it then takes less time than waking others."""
    threads = get_num_threads()
    if small:
        set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(threads)


def linear_sgd(
    weight: Floats,
    bias: Floats | None,
    *,
    features: Any,
    targets: Array,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    keys: NDArray[np.uint64],
    steps: NDArray[np.int64],
    batch: int,
    lr: float,
    momentum: float = 0.0,
    lam: float = 0.0,
    anchor_weight: Floats | None = None,
    anchor_bias: Floats | None = None,
    task: str,
) -> tuple[Floats, Floats]:
    """Run local SGD with a proximal term, on the batches of `draw_batches`.

    With CSR rows a step costs the nonzeros of its batch times the outputs: between two steps that
    touch a column, proximal term and momentum follow a linear recurrence, applied in one go.

    Args:
        weight: Initial weights per client, (c, o, d), float32 or float64; sets the precision.
        bias: (c, o); None or an empty array for a model without.
        features: (N, d) dense, or CSR with `indptr`, `indices`, `data`; precision of `weight`.
        targets: (N,) of the same precision (regression, binary), (N,) int64 (multiclass) or
            (N, o) of the same precision (multilabel).
        starts: First flat row of each client, (c,).
        counts: Rows of each client, (c,).
        keys: Random streams of the batches, (c,).
        steps: Steps of each client, (c,); a client without rows keeps its initial weights.
        batch: Rows per step.
        lr: Learning rate; like `momentum` and `lam` as `SGD` has checked it.
        momentum: Heavy-ball factor.
        lam: Weight of the proximal term.
        anchor_weight: (o, d), or (c, o, d) for one per client; None for zeros.
        anchor_bias: (o,) or (c, o); None for zeros.
        task: "regression", "binary", "multiclass" or "multilabel".

    Returns:
        New weights (c, o, d) and biases (c, o), or (c, 0) for a model without.

    Raises:
        ValueError: On invalid shapes, types or values, a class or a column out of range.
    """
    dense = isinstance(features, np.ndarray)
    if not dense:
        _check_csr(weight, features)
    length = features.shape[0] if dense else len(features.indptr) - 1
    rows = _checked_rows(weight, length, targets, starts, counts, task)
    if dense:
        _check_array("features", features, weight.dtype, (length, weight.shape[2]))
    _check_schedule(counts, keys, steps, batch)
    model = _checked_model(weight, bias, anchor_weight, anchor_bias)
    rates = tuple(weight.dtype.type(rate) for rate in (lr, momentum, lam))
    fault = np.zeros(len(keys), dtype=np.int8)
    schedule = (keys, steps, batch, *rates, _parts(len(keys)), int(counts.max(initial=0)), fault)
    out = np.array(model[0]) if dense else np.empty_like(model[0]), np.array(model[1])
    if dense:
        _dense_all(*out, *model[2:], features, *rows, *schedule)  # type: ignore[call-arg]
    else:
        nonzeros = int((features.indptr[starts + counts] - features.indptr[starts]).max(initial=0))
        coasting = _coasting(int(steps.max(initial=0)), *map(float, rates)).astype(weight.dtype)
        arrays = (features.indptr, features.indices, features.data)
        csr = (*arrays, min(nonzeros, weight.shape[2]), coasting)
        _csr_all(*out, *model[2:], weight, *csr, *rows, *schedule)  # type: ignore[call-arg]
    if fault.any():
        client = int(np.flatnonzero(fault)[0])
        raise ValueError(f"client at place {client} has {_FAULTS[int(fault[client])]}")
    return out


def _parts(clients: int) -> int:
    # Part p takes clients p, p + parts, ...: neighbours have similar numbers of rows.
    return min(clients, int(get_num_threads()))


def _coasting(steps: int, lr: float, momentum: float, lam: float) -> NDArray[np.float64]:
    # Row k: the effect of k steps without data gradient on a weight u away from its anchor with
    # velocity v. The weight moves by [k, 0] u + [k, 1] v, the velocity becomes [k, 2] u + [k, 3] v.
    # Row 0 only if a weight without data gradient does not move.
    moves = np.zeros((steps + 1 if lam or momentum else 1, 4))
    power = np.eye(2)
    once = np.array([[1 - lr * lam, -lr * momentum], [lam, momentum]])
    for step in range(len(moves)):
        moves[step] = (power - [[1, 0], [0, 0]]).ravel()
        power = once @ power
    return moves


def _check_array(name: str, given: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if given.dtype != dtype or given.shape != shape or not given.flags.c_contiguous:
        layout = "contiguous" if given.flags.c_contiguous else "not contiguous"
        raise ValueError(
            f"{name}: given {given.dtype} of shape {given.shape}, {layout}; expected "
            f"{np.dtype(dtype)} of shape {shape}, contiguous: convert with "
            "numpy.ascontiguousarray(..., dtype=...) or correct the shape"
        )


def _check_csr(weight: Floats, rows: Any) -> None:
    for name, integers in (("indptr", rows.indptr), ("indices", rows.indices)):
        wide = np.int64 if integers.dtype == np.int64 else np.int32
        _check_array(name, integers, wide, (max(len(integers), name == "indptr"),))
    _check_array("data", rows.data, weight.dtype, (len(rows.indices),))


def _check_schedule(counts: Array, keys: Array, steps: Array, batch: int) -> None:
    _check_array("keys", keys, np.uint64, (len(keys),))
    for name, given in (("counts", counts), ("steps", steps)):
        _check_array(name, given, np.int64, (len(keys),))
        if not 0 <= given.min(initial=0) <= given.max(initial=0) < 2**31:
            raise ValueError(
                f"{name}: given {given.min()} .. {given.max()}; expected 0 .. 2^31 - 1"
            )
    if not 1 <= batch < 2**31:
        raise ValueError(f"batch: given {batch}; expected 1 .. 2^31 - 1 rows")


def _checked_rows(
    weight: Floats, length: int, targets: Array, starts: Array, counts: Array, task: str
) -> tuple[Any, ...]:
    # Targets as numbers (N, o) and as classes (N,), the unused one empty: one compilation serves
    # all tasks.
    if task not in _LOSSES:
        raise ValueError(f"task: given {task!r}; expected one of {', '.join(_LOSSES)}")
    if weight.ndim != 3 or 0 in weight.shape[1:] or weight.dtype not in (np.float32, np.float64):
        raise ValueError(
            f"weight: given {weight.dtype} of shape {weight.shape}; expected float32 or float64 "
            "of shape (clients, outputs, features)"
        )
    outputs = weight.shape[1]
    _check_array("counts", counts, np.int64, (len(weight),))
    _check_array("starts", starts, np.int64, (len(weight),))
    if starts.min(initial=0) < 0 or (starts + counts).max(initial=0) > length:
        raise ValueError(
            f"starts, counts: given rows {starts.min()} .. {(starts + counts).max()} of "
            f"{length} rows; pass the offsets that belong to these features"
        )
    if task == "multiclass":
        _check_array("targets", targets, np.int64, (length,))
        return np.empty((0, outputs), weight.dtype), targets, starts, counts, SOFTMAX
    if task != "multilabel" and outputs != 1:
        raise ValueError(f"weight: given {outputs} outputs; expected 1 for {task}")
    shape = (length, outputs) if task == "multilabel" else (length,)
    _check_array("targets", targets, weight.dtype, shape)
    values = targets.reshape(length, outputs)
    return values, np.empty(0, np.int64), starts, counts, _LOSSES[task]


def _checked_model(
    weight: Floats, bias: Floats | None, anchor_weight: Floats | None, anchor_bias: Floats | None
) -> tuple[Any, ...]:
    clients, outputs, features = weight.shape
    _check_array("weight", weight, weight.dtype, weight.shape)
    if bias is None or bias.shape[-1] == 0:
        bias, anchor_bias = np.empty((clients, 0), weight.dtype), None
    else:
        _check_array("bias", bias, weight.dtype, (clients, outputs))
        if (anchor_weight is None) != (anchor_bias is None):
            raise ValueError("anchor_weight, anchor_bias: given one; expected both or none")
    A = _anchor("anchor_weight", anchor_weight, weight.dtype, clients, (outputs, features))
    a = _anchor("anchor_bias", anchor_bias, weight.dtype, clients, bias.shape[1:])
    return weight, bias, A, a


def _anchor(
    name: str, given: Floats | None, dtype: Any, clients: int, shape: tuple[int, ...]
) -> Array:
    if given is None:
        return np.zeros((1, *shape), dtype)
    if given.ndim == len(shape):
        given = given[None]
    _check_array(name, given, dtype, (clients if len(given) != 1 else 1, *shape))
    return given


# Compiled code: no checks, no allocation of results. Nothing takes a view of a shared array inside
# the steps: all threads would compete for its reference count.


def _inner(function: F) -> F:
    return compiled(fastmath=_FAST, error_model="numpy")(function)


def _outer(function: F) -> F:
    return compiled(fastmath=_FAST, error_model="numpy", parallel=True)(function)


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
def _draw_all(
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
def _dense_all(
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
        gradient = momentum * v[label]
        for place in range(len(R)):
            gradient += R[place, label]
        if lam != 0:
            gradient += lam * (b[label] - a[label])
        v[label] = gradient
        b[label] -= lr * gradient


@_outer
def _csr_all(
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
    # Number the columns of the rows from left to right; return -1 if a row is invalid.
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
    # Advance a column to a step as if no batch had touched it since.
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
