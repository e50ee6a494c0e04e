"""Flat numba kernels for linear models, parallel over clients.

Client i owns the rows `starts[i] : starts[i] + counts[i]` of flat arrays, draws its batches from
its own SplitMix64 stream `keys[i]` and is computed by one thread from start to end, so its result
is the same to the last bit whatever else is in the stack.

A step on a batch moves w by heavy-ball momentum: v <- momentum * v + g, w <- w - lr * v, where g is
the gradient of the mean loss over the batch plus lam * (w - anchor), and v = 0 at the start of a
call. The losses are 1/2 (p - y)^2 (regression), logistic on 0/1 (binary), softmax cross-entropy
(multiclass) and the sum over labels of logistic (multilabel).
"""

from typing import Any

import numpy as np
from numba import get_num_threads, set_num_threads
from numpy.typing import NDArray

from coterie.solvers._linear import (
    BAD_CLASS,
    BAD_ROW,
    LOGISTIC,
    SOFTMAX,
    SQUARED,
    csr_all,
    dense_all,
    draw_all,
)

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]

_SMALL = 1 << 18  # row numbers that one thread draws in about a millisecond
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
    """Draw every client's batches: row numbers within the client, -1 where there is no row.

    A client walks through its rows in one random permutation an epoch, cut into
    ceil(count / batch) batches, of which the last may be smaller.

    Returns:
        Row numbers, shape (clients, largest of steps, batch).
    """
    _check_plan(counts, keys, steps, batch)
    out = np.full((len(keys), int(steps.max(initial=0)), batch), -1, dtype=np.int32)
    threads = get_num_threads()
    if out.size < _SMALL:
        set_num_threads(1)  # waking threads can take longer than the draws
    try:
        draw_all(keys, counts, steps, batch, out, _parts(len(keys)), int(counts.max(initial=0)))
    finally:
        set_num_threads(threads)
    return out


def linear_sgd(  # noqa: PLR0913 - flat arrays, named one by one
    weight: Floats,
    bias: Floats | None,
    *,
    features: Floats,
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
    """Run local SGD with a proximal term on dense rows, on the batches of `draw_batches`.

    Args:
        weight: Where each client starts, (c, o, d), float32 or float64; sets the precision.
        bias: (c, o); None or an empty array for a model without.
        features: (N, d), of the precision of `weight`.
        targets: (N,) of the same precision (regression, binary), (N,) int64 (multiclass) or
            (N, o) of the same precision (multilabel).
        starts: First flat row of each client, (c,).
        counts: Rows of each client, (c,).
        keys: Streams of the batches, (c,).
        steps: Steps of each client, (c,); a client without rows stays where it starts.
        batch: Rows a step.
        lr: Step size.
        momentum: Heavy-ball factor.
        lam: Strength of the pull to the anchor.
        anchor_weight: (o, d), or one a client (c, o, d); None for zeros.
        anchor_bias: (o,) or (c, o); None for zeros.
        task: "regression", "binary", "multiclass" or "multilabel".

    Returns:
        New weights (c, o, d) and biases (c, o), or (c, 0) for a model without.

    Raises:
        ValueError: On shapes, types or numbers that do not fit, or a class out of range.
    """
    rows = _checked_rows(weight, features.shape[0], targets, starts, counts, task)
    _check_array("features", features, weight.dtype, (features.shape[0], weight.shape[2]))
    _check_plan(counts, keys, steps, batch)
    model = _checked_model(weight, bias, anchor_weight, anchor_bias)
    pace = _checked_pace(weight.dtype, lr, momentum, lam)
    out = np.array(model[0]), np.array(model[1])
    fault = np.zeros(len(keys), dtype=np.int8)
    plan = (keys, steps, batch, *pace, _parts(len(keys)), int(counts.max(initial=0)), fault)
    given: tuple[Any, ...] = (*out, *model[2:], features, *rows, *plan)
    dense_all(*given)
    _raise_faults(fault)
    return out


def linear_sgd_csr(  # noqa: PLR0913 - flat arrays, named one by one
    weight: Floats,
    bias: Floats | None,
    *,
    indptr: NDArray[np.integer[Any]],
    indices: NDArray[np.integer[Any]],
    data: Floats,
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
    """Run local SGD with a proximal term on CSR rows: `linear_sgd` for sparse features.

    The rows are `indptr` (N + 1,) and `indices`, int32 or int64, and `data` of the precision of
    `weight`; the rest is as in `linear_sgd`. A step costs the nonzeros of its batch times the
    outputs: between two steps that touch a column, pull and momentum follow a linear recurrence,
    whose steps are caught up with in one go.

    Raises:
        ValueError: As `linear_sgd`, and on a column out of range.
    """
    for name, integers in (("indptr", indptr), ("indices", indices)):
        wide = np.int64 if integers.dtype == np.int64 else np.int32
        _check_array(name, integers, wide, (max(len(integers), name == "indptr"),))
    _check_array("data", data, weight.dtype, (len(indices),))
    rows = _checked_rows(weight, len(indptr) - 1, targets, starts, counts, task)
    _check_plan(counts, keys, steps, batch)
    model = _checked_model(weight, bias, anchor_weight, anchor_bias)
    pace = _checked_pace(weight.dtype, lr, momentum, lam)
    out = np.empty_like(model[0]), np.array(model[1])
    fault = np.zeros(len(keys), dtype=np.int8)
    nonzeros = int((indptr[starts + counts] - indptr[starts]).max(initial=0))
    moves = _coasting(int(steps.max(initial=0)), *map(float, pace)).astype(weight.dtype)
    csr = (indptr, indices, data, min(nonzeros, weight.shape[2]), moves)
    plan = (keys, steps, batch, *pace, _parts(len(keys)), int(counts.max(initial=0)), fault)
    given: tuple[Any, ...] = (*out, *model[2:], weight, *csr, *rows, *plan)
    csr_all(*given)
    _raise_faults(fault)
    return out


def _parts(clients: int) -> int:
    # Part p takes clients p, p + parts, ...: neighbours have like numbers of rows.
    return min(clients, int(get_num_threads()))


def _coasting(steps: int, lr: float, momentum: float, lam: float) -> NDArray[np.float64]:
    # Row k: what k steps without data gradient do to a weight u away from its anchor and its
    # velocity v. The weight moves by [k, 0] u + [k, 1] v, the velocity becomes [k, 2] u + [k, 3] v.
    # Row 0 alone if a weight without data gradient does not move.
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


def _check_plan(counts: Array, keys: Array, steps: Array, batch: int) -> None:
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
    # Targets as numbers (N, o) and as classes (N,), the one not used empty: one compilation
    # serves all tasks.
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
            f"starts, counts: rows {starts.min()} .. {(starts + counts).max()} asked for, of "
            f"{length} rows; give the offsets that belong to these features"
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
            raise ValueError("anchor_weight, anchor_bias: one is given; give both or none")
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


def _checked_pace(dtype: Any, lr: float, momentum: float, lam: float) -> tuple[Any, ...]:
    for name, given in (("lr", lr), ("momentum", momentum), ("lam", lam)):
        if not 0 <= given < np.inf:
            raise ValueError(f"{name}: given {given}; expected a finite number >= 0")
    number = np.dtype(dtype).type
    return number(lr), number(momentum), number(lam)


def _raise_faults(fault: Array) -> None:
    if fault.any():
        client = int(np.flatnonzero(fault)[0])
        raise ValueError(f"client at place {client} has {_FAULTS[int(fault[client])]}")
