"""The compiled steps of `coterie.solvers.sdca`: no checks.

Every loss here has one form. With r = p - y, the prediction less the target, a row's loss is

    hi max(-r - tube, 0) - lo max(r - tube, 0) = max over b in [lo, hi] of -b r - tube |b|

where the hinge has y = +-1, tube = 0 and [lo, hi] = [0, C] or [-C, 0], and the epsilon-insensitive
loss has [lo, hi] = [-C, C]. So one step, one test of optimality and one gap serve both.

One output of one client is computed by one thread from start to end, from a stream of its own, so
that its result is the same to the last bit whatever else is in the stack.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from typing import Any

import numpy as np

from coterie.solvers import svm
from coterie.solvers.svm import Array, Rows, Stack

_compiled = svm.compiler(svm.__file__)
_HALF = np.uint64(0xFFFFFFFF)
_LINE = 16  # float32 numbers in a cache line


@_compiled
def _mixed(word: np.uint64) -> np.uint64:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@_compiled
def stream(key: np.uint64, number: int) -> np.uint64:
    return _mixed(key + np.uint64(number) * np.uint64(0xD1342543DE82EF95))


@_compiled
def _below(state: np.uint64, bound: np.uint64) -> tuple[np.uint64, np.int64]:
    # SplitMix64, reduced without bias from 32 bits (Lemire 2019).
    floor = bound
    while True:
        state = state + np.uint64(0x9E3779B97F4A7C15)
        product = (_mixed(state) >> np.uint64(32)) * bound
        low = product & _HALF
        if low < floor:
            floor = (_HALF - bound + np.uint64(1)) % bound
        if low >= floor:
            return state, np.int64(product >> np.uint64(32))


@_compiled
def shuffle(order: Array, count: int, state: np.uint64) -> np.uint64:
    for place in range(count - 1):
        state, jump = _below(state, np.uint64(count - place))
        order[place], order[place + jump] = order[place + jump], order[place]
    return state


@_compiled
def _draw(order: Array, count: int, state: np.uint64) -> np.uint64:
    for place in range(count):
        state, order[place] = _below(state, np.uint64(count))
    return state


@_compiled
def number(order: Array) -> None:
    for place in range(len(order)):
        order[place] = place


@_compiled
def fill(row: Array, value: float) -> None:
    for place in range(len(row)):
        row[place] = value


@_compiled
def copy(row: Array, source: Array) -> None:
    for place in range(len(row)):
        row[place] = source[place]


@_compiled
def score(row: int, q: Array, bias: bool, x: Rows) -> float:
    total = q.dtype.type(0)
    if len(x) == 1:
        dense = x[0]
        for column in range(dense.shape[1]):
            total += dense[row, column] * q[column]
    else:
        data, indices, indptr = x
        for entry in range(indptr[row], indptr[row + 1]):
            total += data[entry] * q[indices[entry]]
    if bias:
        total += q[len(q) - 1]
    return np.float64(total)


@_compiled
def add_row(q: Array, length: float, row: int, bias: bool, x: Rows) -> None:
    factor = q.dtype.type(length)
    if len(x) == 1:
        dense = x[0]
        for column in range(dense.shape[1]):
            q[column] += factor * dense[row, column]
    else:
        data, indices, indptr = x
        for entry in range(indptr[row], indptr[row + 1]):
            q[indices[entry]] += factor * data[entry]
    if bias:
        q[len(q) - 1] += factor


@_compiled
def warm(first: int, order: Array, count: int, sink: Array, x: Rows) -> None:
    # Reads a number in every cache line of rows that are about to be visited one by one: these
    # reads wait for memory all at once, where steps, each in need of the last, wait in turn.
    total = 0.0
    for place in range(count):
        row = first + order[place]
        if len(x) == 1:
            dense = x[0]
            for column in range(0, dense.shape[1], _LINE):
                total += dense[row, column]
        else:
            data, indices, indptr = x
            for entry in range(indptr[row], indptr[row + 1], _LINE):
                total += data[entry] + indices[entry]
    sink[0] = total


@_compiled
def find_box(y: float, cost: Any, two_sided: bool) -> tuple[float, float]:
    price = np.float64(cost)
    return -price if two_sided or y < 0 else 0.0, price if two_sided or y > 0 else 0.0


@_compiled
def _excess(r: float, b: float, lo: float, hi: float, tube: float) -> tuple[float, float]:
    # The loss, and by how much it is above its lower bound -b r - tube |b|: never below 0.
    loss = hi * max(-r - tube, 0.0) - lo * max(r - tube, 0.0)
    return loss, max(loss + b * r + tube * abs(b), 0.0)


@_compiled
def _slope(r: float, b: float, lo: float, hi: float, tube: float) -> float:
    # The lesser slope of the dual as b moves up or down inside its box, infinite if it cannot:
    # below 0 it is how much is to be gained, above 0 it holds b where it is.
    up = (r + tube if b >= 0 else r - tube) if b < hi else np.inf
    down = (-r - tube if b > 0 else tube - r) if b > lo else np.inf
    return min(up, down)


@_compiled
def _best(r: float, b: float, inverse: float, tube: float) -> float:
    # Where one coordinate is best, before it is cut to its box: 1 / inverse is the curvature.
    if (r + tube) * inverse < b:
        return b - (r + tube) * inverse
    if (r - tube) * inverse > b:
        return b - (r - tube) * inverse
    return 0.0


@_compiled
def sweep(
    x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array,
    order: Array, active: int, limit: float, mask: Array,
) -> tuple[int, float, float]:  # fmt: skip
    """Go once through the active rows, which come first in `order`.

    A row that is held at its bound by a slope above `limit` goes to the back.

    Returns:
        How many rows are still active, the steepest slope and the sum of the gap's terms, all as
        each row was found.
    """
    squares, two_sided, tube, bias = stack.squares, stack.two_sided, stack.tube, stack.bias
    first, base = stack.starts[client], stack.bases[client]
    y, cost = stack.y[output, base:], stack.cost[output, base:]
    place, worst, gap = 0, 0.0, 0.0
    while place < active:
        i = order[place]
        lo, hi = find_box(y[i], b.dtype.type(cost[i]), two_sided)
        old, r = np.float64(b[i]), score(first + i, q, bias, x) - y[i]
        slope = _slope(r, old, lo, hi, tube)
        if slope > limit:
            active -= 1
            order[place], order[active] = order[active], i
            continue
        place += 1
        gap += _excess(r, old, lo, hi, tube)[1]
        if slope < 0:
            worst = max(worst, -slope)
            new = _best(r, old, 1 / (scale * (squares[first + i] + bias)), tube)
            if len(mask):
                new = old + mask[i] * (min(max(new, lo), hi) - old)
            b[i] = min(max(new, lo), hi)
            add_row(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return active, worst, gap


@_compiled
def _cut(x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array) -> bool:
    # Cuts the duals into their boxes, which moves q as any step does. False if one is not finite.
    first, base, bias = stack.starts[client], stack.bases[client], stack.bias
    sound = True
    for column in range(len(q)):
        sound &= np.isfinite(q[column])
    for i in range(len(b)):
        old = np.float64(b[i])
        sound &= np.isfinite(old)
        price = b.dtype.type(stack.cost[output, base + i])
        lo, hi = find_box(stack.y[output, base + i], price, stack.two_sided)
        b[i] = min(max(old, lo), hi)
        if b[i] != old:
            add_row(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return sound


@_compiled
def _run(
    x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array,
    order: Array, mask: Array, state: np.uint64, epochs: int, tol: float, replace: bool,
) -> None:  # fmt: skip
    count, limit = len(b), np.inf
    active = count
    warm(stack.starts[client], order, count, np.empty(1), x)
    shrinks = epochs > 1 and len(mask) == 0 and not replace
    for epoch in range(epochs):
        if epoch == epochs - 1 or not shrinks:
            active, limit = count, np.inf
        state = _draw(order, count, state) if replace else shuffle(order, active, state)
        whole = active == count and not replace
        active, worst, _ = sweep(
            x, stack, client, output, scale, q, b, order, active, limit, mask
        )  # fmt: skip
        limit = worst
        if worst <= tol:
            if whole:
                return
            active, limit = count, np.inf


@_compiled
def steps(
    x: Rows, stack: Stack, keys: Array, scales: Array, start: Array, before: Array, after: Array,
    moved: Array, mask: Array, paper: bool, epochs: int, tol: float, replace: bool, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Take the steps of the problems `begin` .. `end` - 1, numbered client by client."""
    order, nothing = np.empty(stack.counts.max(), np.int64), np.empty(0)
    q, total = np.empty(start.shape[2], start.dtype), np.empty(start.shape[2])
    for problem in range(begin, end):
        client, output = problem // start.shape[1], problem % start.shape[1]
        n, scale = stack.counts[client], scales[client]
        b, own = after[client, :n, output], mask[client, :n] if len(mask) else nothing
        copy(q, start[client, output])
        if stack.fault[client, output] or not _cut(x, stack, client, output, scale, q, b):
            fill(b, np.nan)
            fill(moved[client, output], np.nan)
            continue
        number(order[:n])
        _run(
            x, stack, client, output, scale, q, b, order, nothing if paper else own,
            stream(keys[client], output), epochs, tol, replace,
        )  # fmt: skip
        fill(total, 0)
        kept = own if paper else nothing
        _sum_moves(x, stack, client, b, before[client, :n, output], kept, total)
        copy(moved[client, output], total)


@_compiled
def _sum_moves(
    x: Rows, stack: Stack, client: int, b: Array, before: Array, weight: Array, total: Array
) -> None:
    # The sum is taken of the duals' own moves, not of q's, which rounds at every step.
    first, bias = stack.starts[client], stack.bias
    for i in range(len(b)):
        move = np.float64(b[i]) - np.float64(before[i])
        if len(weight):
            move *= weight[i]
        if move != 0:
            add_row(total, move, first + i, bias, x)


@_compiled
def weigh_up(
    x: Rows, stack: Stack, client: int, output: int, q: Array, b: Array
) -> tuple[float, float, float]:
    # The loss, the gap and how much was added up on the way; NaN if a number is not finite.
    first, base, bias = stack.starts[client], stack.bases[client], stack.bias
    y, cost, tube, two_sided = stack.y, stack.cost, stack.tube, stack.two_sided
    loss, gap, size = 0.0, 0.0, 0.0
    for i in range(len(b)):
        r = score(first + i, q, bias, x) - y[output, base + i]
        lo, hi = find_box(y[output, base + i], cost[output, base + i], two_sided)
        held = min(max(np.float64(b[i]), lo), hi)
        found, extra = _excess(r, held, lo, hi, tube)
        loss += found
        gap += extra
        size += found + abs(held) * (abs(r) + 2 * abs(y[output, base + i]) + tube)
        if not np.isfinite(r + np.float64(b[i])):
            return np.nan, np.nan, np.nan
    return loss, gap, size


@_compiled
def gaps(
    x: Rows, stack: Stack, point: Array, dual: Array, begin: int, end: int, out: Array
) -> None:
    """Return loss, gap and size of the problems `begin` .. `end` - 1, into (c, o, 3)."""
    q = np.empty(point.shape[2])
    for problem in range(begin, end):
        client, output = problem // point.shape[1], problem % point.shape[1]
        copy(q, point[client, output])
        b = dual[client, : stack.counts[client], output]
        if stack.fault[client, output]:
            fill(out[client, output], np.nan)
        else:
            loss, gap, size = weigh_up(x, stack, client, output, q, b)
            out[client, output, 0], out[client, output, 1], out[client, output, 2] = loss, gap, size
