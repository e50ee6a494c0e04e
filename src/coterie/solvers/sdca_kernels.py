"""The compiled part of `coterie.solvers.sdca`: no checks.

All losses have one form. With r = p - y, the prediction minus the target, a row's loss is

    hi max(-r - tube, 0) - lo max(r - tube, 0) = max over b in [lo, hi] of -b r - tube |b|

where the hinge has y = +-1, tube = 0 and [lo, hi] = [0, C] or [-C, 0], and the epsilon-insensitive
loss has [lo, hi] = [-C, C]. So one step, one optimality test and one gap serve both.

One file holds all kernels because numba's cache does not see changes in other files.
"""
# ruff: noqa: PLR0913, PLR0917 - kernels take flat arrays, one argument each

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.kernels import compiled

Array = NDArray[Any]
# Flat rows: one dense (N, d) array of float32, or data, indices and indptr of CSR. The compiler
# knows the number of arrays and compiles each layout separately: with both in one loop, all threads
# would compete for the reference counts of the arrays at every row.
Rows = tuple[Any, ...]
F = TypeVar("F", bound=Callable[..., Any])
REGRESSION, SIGNS, CLASSES = 0, 1, 2
UNREADABLE, BAD_TARGET, _BROKEN = 1, 2, 3
UNKNOWN = -1.0  # placeholder of a squared norm
_HALF = np.uint64(0xFFFFFFFF)
_LINE = 16  # float32 values in a cache line
ROUNDING = 8  # times the precision: the share of a sum that may be rounding
SELDOM = 50  # epochs, doubled each time, after which the gap is computed in any case
_BURST = 5  # epochs between two moves of all free duals
_TURNS = 10  # conjugate gradients of one move
_NEAR = 0.01  # relative squared gradient at which they stop
_HALVINGS = 10


class Stack(NamedTuple):
    """The rows, targets and costs of clients.

    Client k has the rows from `starts[k]` of the flat arrays and the entries from `bases[k]` of
    `y` and `cost`, (o, P). `fault` (c, o) is not 0 where data are invalid.
    """

    starts: Array
    counts: Array
    bases: Array
    squares: Array
    y: Array
    cost: Array
    fault: Array
    two_sided: bool
    tube: float
    bias: bool


def _compiled(function: F) -> F:
    # Without the interpreter lock, so that threads share work. Sums may be reordered and products
    # fused, which vectorises them; NaN and infinity keep their meaning.
    fast = {"reassoc", "contract", "nsz"}
    return compiled(nogil=True, fastmath=fast, error_model="numpy")(function)


@_compiled
def fill_stack(
    rows: Rows, stack: Stack, features: int, values: Array, classes: Array, kind: int,
    c1: float, balanced: bool, weights: Array, begin: int, end: int,
) -> None:  # fmt: skip
    """Write targets, costs, squared norms and faults of the clients `begin` .. `end` - 1."""
    for client in range(begin, end):
        first, n, base = stack.starts[client], stack.counts[client], stack.bases[client]
        state = _measure(stack.squares, first, n, features, rows)
        for output in range(len(stack.y)):
            y, cost = stack.y[output, base : base + n], stack.cost[output, base : base + n]
            wrong = _fill_targets(values, classes, first, output, kind, y)
            stack.fault[client, output] = max(wrong, state)
            above, below = _find_sides(y, balanced, weights if kind != CLASSES else weights[:0])
            for i in range(n):
                cost[i] = c1 * above if y[i] > 0 else c1 * below
                if len(weights) and kind == CLASSES:
                    cost[i] *= weights[classes[first + i]]
                if not stack.bias and stack.squares[first + i] == 0:
                    cost[i] = 0  # no step changes the loss of a row of zeros


@_compiled
def _find_sides(y: Array, balanced: bool, weights: Array) -> tuple[float, float]:
    if balanced:
        positive = 0
        for i in range(len(y)):
            positive += 1 if y[i] > 0 else 0
        return len(y) / (2.0 * max(positive, 1)), len(y) / (2.0 * max(len(y) - positive, 1))
    return (weights[1], weights[0]) if len(weights) else (1.0, 1.0)


@_compiled
def _measure(squares: Array, first: int, n: int, features: int, x: Rows) -> int:
    state = 0
    for row in range(first, first + n):
        if squares[row] == UNKNOWN:
            squares[row] = _square(row, features, x)
        if squares[row] == UNKNOWN:
            return _BROKEN
        if not np.isfinite(squares[row]):
            state = UNREADABLE
    return state


@_compiled
def _square(row: int, features: int, x: Rows) -> float:
    total = 0.0
    if len(x) == 1:
        dense = x[0]
        for column in range(dense.shape[1]):
            total += np.float64(dense[row, column]) * np.float64(dense[row, column])
    else:
        data, indices, indptr = x
        if not 0 <= indptr[row] <= indptr[row + 1] <= len(indices):
            return UNKNOWN
        for entry in range(indptr[row], indptr[row + 1]):
            if not 0 <= indices[entry] < features:
                return UNKNOWN
            total += np.float64(data[entry]) * np.float64(data[entry])
    return total


@_compiled
def _fill_targets(
    values: Array, classes: Array, first: int, output: int, kind: int, y: Array
) -> int:
    wrong = 0
    for i in range(len(y)):
        if kind == CLASSES:
            y[i] = 1 if classes[first + i] == output else -1
            continue
        value = values[first + i, output]
        y[i] = 2 * value - 1 if kind == SIGNS else value
        if not np.isfinite(value):
            wrong = max(wrong, UNREADABLE)
        elif kind == SIGNS and value * (value - 1) != 0:
            wrong = BAD_TARGET
    return wrong


@_compiled
def _mixed(word: np.uint64) -> np.uint64:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@_compiled
def _stream(key: np.uint64, number: int) -> np.uint64:
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
def _shuffle(order: Array, count: int, state: np.uint64) -> np.uint64:
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
def _number(order: Array) -> None:
    for place in range(len(order)):
        order[place] = place


@_compiled
def _fill(row: Array, value: float) -> None:
    for place in range(len(row)):
        row[place] = value


@_compiled
def _copy(row: Array, source: Array) -> None:
    for place in range(len(row)):
        row[place] = source[place]


@_compiled
def _score(row: int, q: Array, bias: bool, x: Rows) -> float:
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
def _add_row(q: Array, length: float, row: int, bias: bool, x: Rows) -> None:
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
def _warm(first: int, order: Array, count: int, sink: Array, x: Rows) -> None:
    # Prefetch: read one number per cache line of the rows to be visited. These reads wait for
    # memory together; steps, each of which needs the last, would wait in turn.
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
def _find_box(y: float, cost: Any, two_sided: bool) -> tuple[float, float]:
    price = np.float64(cost)
    return -price if two_sided or y < 0 else 0.0, price if two_sided or y > 0 else 0.0


@_compiled
def _excess(r: float, b: float, lo: float, hi: float, tube: float) -> tuple[float, float]:
    # The loss, and by how much it is above its lower bound -b r - tube |b|: never below 0.
    loss = hi * max(-r - tube, 0.0) - lo * max(r - tube, 0.0)
    return loss, max(loss + b * r + tube * abs(b), 0.0)


@_compiled
def _derivative(r: float, b: float, lo: float, hi: float, tube: float) -> float:
    # The lesser derivative of the dual as b moves up or down in its box, infinite if it cannot:
    # below 0 a step improves the dual, above 0 b is optimal at its bound.
    up = (r + tube if b >= 0 else r - tube) if b < hi else np.inf
    down = (-r - tube if b > 0 else tube - r) if b > lo else np.inf
    return min(up, down)


@_compiled
def _best(r: float, b: float, inverse: float, tube: float) -> float:
    # The optimum of one coordinate before clipping; 1 / inverse is the second derivative.
    if (r + tube) * inverse < b:
        return b - (r + tube) * inverse
    if (r - tube) * inverse > b:
        return b - (r - tube) * inverse
    return 0.0


@_compiled
def _sweep(
    x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array,
    order: Array, active: int, limit: float, mask: Array,
) -> tuple[int, float, float]:  # fmt: skip
    """Visit the active rows once; they come first in `order`.

    A row held at its bound by a gradient above `limit` becomes inactive.

    Returns:
        The number of active rows, the largest gradient and the sum of the gap's terms, as each row
        was visited.
    """
    squares, two_sided, tube, bias = stack.squares, stack.two_sided, stack.tube, stack.bias
    first, base = stack.starts[client], stack.bases[client]
    y, cost = stack.y[output, base:], stack.cost[output, base:]
    place, worst, gap = 0, 0.0, 0.0
    while place < active:
        i = order[place]
        lo, hi = _find_box(y[i], b.dtype.type(cost[i]), two_sided)
        old, r = np.float64(b[i]), _score(first + i, q, bias, x) - y[i]
        derivative = _derivative(r, old, lo, hi, tube)
        if derivative > limit:
            active -= 1
            order[place], order[active] = order[active], i
            continue
        place += 1
        gap += _excess(r, old, lo, hi, tube)[1]
        if derivative < 0:
            worst = max(worst, -derivative)
            new = _best(r, old, 1 / (scale * (squares[first + i] + bias)), tube)
            if len(mask):
                new = old + mask[i] * (min(max(new, lo), hi) - old)
            b[i] = min(max(new, lo), hi)
            _add_row(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return active, worst, gap


@_compiled
def _cut(x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array) -> bool:
    # Clip the duals to their boxes, which moves q like any step. False if one is not finite.
    first, base, bias = stack.starts[client], stack.bases[client], stack.bias
    sound = True
    for column in range(len(q)):
        sound &= np.isfinite(q[column])
    for i in range(len(b)):
        old = np.float64(b[i])
        sound &= np.isfinite(old)
        price = b.dtype.type(stack.cost[output, base + i])
        lo, hi = _find_box(stack.y[output, base + i], price, stack.two_sided)
        b[i] = min(max(old, lo), hi)
        if b[i] != old:
            _add_row(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return sound


@_compiled
def _run(
    x: Rows, stack: Stack, client: int, output: int, scale: float, q: Array, b: Array,
    order: Array, mask: Array, state: np.uint64, epochs: int, tol: float, replace: bool,
) -> None:  # fmt: skip
    count, limit = len(b), np.inf
    active = count
    _warm(stack.starts[client], order, count, np.empty(1), x)
    shrinks = epochs > 1 and len(mask) == 0 and not replace
    for epoch in range(epochs):
        if epoch == epochs - 1 or not shrinks:
            active, limit = count, np.inf
        state = _draw(order, count, state) if replace else _shuffle(order, active, state)
        whole = active == count and not replace
        active, worst, _ = _sweep(
            x, stack, client, output, scale, q, b, order, active, limit, mask
        )  # fmt: skip
        limit = worst
        if worst <= tol:
            if whole:
                return
            active, limit = count, np.inf


@_compiled
def take_steps_of(
    x: Rows, stack: Stack, keys: Array, scales: Array, start: Array, before: Array, after: Array,
    moved: Array, mask: Array, paper: bool, epochs: int, tol: float, replace: bool, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Take the steps of the problems `begin` .. `end` - 1."""
    order, nothing = np.empty(stack.counts.max(), np.int64), np.empty(0)
    q, total = np.empty(start.shape[2], start.dtype), np.empty(start.shape[2])
    for problem in range(begin, end):
        client, output = problem // start.shape[1], problem % start.shape[1]
        n, scale = stack.counts[client], scales[client]
        b, own = after[client, :n, output], mask[client, :n] if len(mask) else nothing
        _copy(q, start[client, output])
        if stack.fault[client, output] or not _cut(x, stack, client, output, scale, q, b):
            _fill(b, np.nan)
            _fill(moved[client, output], np.nan)
            continue
        _number(order[:n])
        _run(
            x, stack, client, output, scale, q, b, order, nothing if paper else own,
            _stream(keys[client], output), epochs, tol, replace,
        )  # fmt: skip
        _fill(total, 0)
        kept = own if paper else nothing
        _sum_moves(x, stack, client, b, before[client, :n, output], kept, total)
        _copy(moved[client, output], total)


@_compiled
def _sum_moves(
    x: Rows, stack: Stack, client: int, b: Array, before: Array, weight: Array, total: Array
) -> None:
    # Summed from the moves of the duals, not of q, which rounds at every step.
    first, bias = stack.starts[client], stack.bias
    for i in range(len(b)):
        move = np.float64(b[i]) - np.float64(before[i])
        if len(weight):
            move *= weight[i]
        if move != 0:
            _add_row(total, move, first + i, bias, x)


@_compiled
def _weigh_up(
    x: Rows, stack: Stack, client: int, output: int, q: Array, b: Array
) -> tuple[float, float, float]:
    # The loss, the gap and the total size of the summed terms; NaN if one is not finite.
    first, base, bias = stack.starts[client], stack.bases[client], stack.bias
    y, cost, tube, two_sided = stack.y, stack.cost, stack.tube, stack.two_sided
    loss, gap, size = 0.0, 0.0, 0.0
    for i in range(len(b)):
        r = _score(first + i, q, bias, x) - y[output, base + i]
        lo, hi = _find_box(y[output, base + i], cost[output, base + i], two_sided)
        held = min(max(np.float64(b[i]), lo), hi)
        found, extra = _excess(r, held, lo, hi, tube)
        loss += found
        gap += extra
        size += found + abs(held) * (abs(r) + 2 * abs(y[output, base + i]) + tube)
        if not np.isfinite(r + np.float64(b[i])):
            return np.nan, np.nan, np.nan
    return loss, gap, size


@_compiled
def find_gaps(
    x: Rows, stack: Stack, point: Array, dual: Array, out: Array, begin: int, end: int
) -> None:
    """Write loss, gap and size of the problems `begin` .. `end` - 1 into (c, o, 3)."""
    q = np.empty(point.shape[2])
    for problem in range(begin, end):
        client, output = problem // point.shape[1], problem % point.shape[1]
        _copy(q, point[client, output])
        b = dual[client, : stack.counts[client], output]
        if stack.fault[client, output]:
            _fill(out[client, output], np.nan)
        else:
            loss, gap, size = _weigh_up(x, stack, client, output, q, b)
            out[client, output, 0], out[client, output, 1], out[client, output, 2] = loss, gap, size


@_compiled
def _find_free(stack: Stack, output: int, members: Array, dual: Array) -> tuple[Array, Array]:
    # The rows with free duals: their clients, and their numbers in the client.
    total = 0
    for client in members:
        total += stack.counts[client]
    who, which, last = np.empty(total, np.int64), np.empty(total, np.int64), 0
    for client in members:
        base = stack.bases[client]
        for i in range(stack.counts[client]):
            price = dual.dtype.type(stack.cost[output, base + i])
            lo, hi = _find_box(stack.y[output, base + i], price, stack.two_sided)
            if lo < dual[client, i, output] < hi and dual[client, i, output] != 0:
                who[last], which[last] = client, i
                last += 1
    return who[:last], which[:last]


@_compiled
def _gather(
    x: Rows, stack: Stack, who: Array, which: Array, amounts: Array, coupling: float, total: Array,
    sums: Array,
) -> float:  # fmt: skip
    # Amounts times rows, summed over all and per client (sums); returns the quadratic form.
    form = 0.0
    _fill(total, 0)
    for client in range(len(sums)):
        _fill(sums[client], 0)
    for place in range(len(who)):
        into = sums[who[place]] if coupling > 0 else total
        row = stack.starts[who[place]] + which[place]
        _add_row(into, amounts[place], row, stack.bias, x)
    for client in range(len(sums)):
        for column in range(len(total)):
            form += coupling * sums[client, column] * sums[client, column]
            total[column] += sums[client, column]
    for column in range(len(total)):
        form += total[column] * total[column]
    return form


@_compiled
def _spread(
    x: Rows, stack: Stack, who: Array, which: Array, coupling: float, total: Array, sums: Array,
    out: Array,
) -> None:  # fmt: skip
    # Every row's product with total + coupling * sums of its client.
    last, q = -1, np.empty(len(total), total.dtype)
    _copy(q, total)
    for place in range(len(who)):
        if coupling > 0 and who[place] != last:
            last = who[place]
            for column in range(len(q)):
                q[column] = total[column] + coupling * sums[last, column]
        out[place] = _score(stack.starts[who[place]] + which[place], q, stack.bias, x)


@_compiled
def _find_gradients(
    x: Rows, stack: Stack, output: int, who: Array, which: Array, w: Array, own: Array,
    dual: Array,
) -> Array:  # fmt: skip
    gradients = np.empty(len(who))
    _spread(x, stack, who, which, 1.0 if len(own) else 0.0, w, own, gradients)
    for place in range(len(who)):
        client, i = who[place], which[place]
        gradients[place] -= stack.y[output, stack.bases[client] + i]
        gradients[place] += stack.tube if dual[client, i, output] > 0 else -stack.tube
    return gradients


@_compiled
def _conjugate(
    x: Rows, stack: Stack, who: Array, which: Array, gradients: Array, coupling: float,
    total: Array, sums: Array, turns: int,
) -> Array:  # fmt: skip
    # The approximate minimiser of the quadratic with these gradients, without boxes.
    step, rest = np.zeros(len(who)), np.empty(len(who))
    way, form, size = np.empty(len(who)), np.empty(len(who)), 0.0
    for place in range(len(who)):
        rest[place], way[place] = -gradients[place], -gradients[place]
        size += gradients[place] * gradients[place]
    goal = _NEAR * size
    for _ in range(turns):
        quadratic = _gather(x, stack, who, which, way, coupling, total, sums)
        if not quadratic > 0:
            break
        _spread(x, stack, who, which, coupling, total, sums, form)
        length, before, size = size / quadratic, size, 0.0
        for place in range(len(who)):
            step[place] += length * way[place]
            rest[place] -= length * form[place]
            size += rest[place] * rest[place]
        if size <= goal:
            break
        for place in range(len(who)):
            way[place] = rest[place] + size / before * way[place]
    return step


@_compiled
def _first_length(stack: Stack, output: int, who: Array, which: Array, step: Array) -> float:
    # With more rows than features, steps may leave all boxes by far: start shorter then.
    size, total = 0.0, 0.0
    for place in range(len(who)):
        size += abs(step[place])
        total += stack.cost[output, stack.bases[who[place]] + which[place]]
    return min(1.0, total / size) if size > 0 else 1.0


@_compiled
def _cut_moves(
    stack: Stack, output: int, who: Array, which: Array, dual: Array, step: Array, length: float,
    gradients: Array, moves: Array,
) -> float:  # fmt: skip
    # Moves clipped to the boxes, without sign changes; returns the predicted decrease.
    decrease = 0.0
    for place in range(len(who)):
        client, i = who[place], which[place]
        old = np.float64(dual[client, i, output])
        price = np.float64(dual.dtype.type(stack.cost[output, stack.bases[client] + i]))
        new = old + length * step[place]
        new = min(max(new, 0.0), price) if old > 0 else max(min(new, 0.0), -price)
        moves[place] = np.float64(dual.dtype.type(new)) - old
        decrease += gradients[place] * moves[place]
    return decrease


@_compiled
def accelerate(
    x: Rows, stack: Stack, output: int, members: Array, coupling: float, w: Array, own: Array,
    dual: Array, turns: int,
) -> None:  # fmt: skip
    """Move all free duals of the members at once, with w and v_k = own[k]."""
    who, which = _find_free(stack, output, members, dual)
    if len(who) == 0:
        return
    total, sums = np.empty(len(w), w.dtype), np.empty((len(own), len(w)), w.dtype)
    gradients = _find_gradients(x, stack, output, who, which, w, own, dual)
    step = _conjugate(x, stack, who, which, gradients, coupling, total, sums, turns)
    moves, length = np.empty(len(who)), _first_length(stack, output, who, which, step)
    for _ in range(_HALVINGS):
        decrease = _cut_moves(stack, output, who, which, dual, step, length, gradients, moves)
        quadratic = _gather(x, stack, who, which, moves, coupling, total, sums)
        if decrease < 0 and decrease + 0.5 * quadratic <= 0.1 * decrease:
            for place in range(len(who)):
                dual[who[place], which[place], output] += dual.dtype.type(moves[place])
            for column in range(len(w)):
                w[column] += total[column]
            for client in range(len(sums)):
                for column in range(len(w)):
                    own[client, column] += coupling * sums[client, column]
            return
        length *= 0.5


@_compiled
def _rebuild(x: Rows, stack: Stack, client: int, b: Array, q: Array) -> None:
    _fill(q, 0)
    for i in range(len(b)):
        if b[i] != 0:
            _add_row(q, np.float64(b[i]), stack.starts[client] + i, stack.bias, x)


@_compiled
def rebuild_all(x: Rows, stack: Stack, dual: Array, out: Array, begin: int, end: int) -> None:
    """Write sums of b_i x_i of the clients `begin` .. `end` - 1, (c, D), of one output."""
    for client in range(begin, end):
        _rebuild(x, stack, client, dual[client, : stack.counts[client], 0], out[client])


@_compiled
def _solve(
    x: Rows, stack: Stack, client: int, output: int, q: Array, dual: Array, order: Array,
    state: np.uint64, tol: float, most: int, found: Array,
) -> None:  # fmt: skip
    # The terms of the gap, summed during sweeps, estimate when to compute the gap.
    b, nothing = dual[client, : len(order), output], np.empty(0)
    members, nobody = np.empty(1, np.int64), np.empty((0, len(q)), q.dtype)
    members[0] = client
    active, limit, epoch, due, primal = len(b), np.inf, 0, SELDOM, np.inf
    _warm(stack.starts[client], order, len(b), found, x)
    while True:
        state = _shuffle(order, active, state)
        active, limit, guess = _sweep(
            x, stack, client, output, 1.0, q, b, order, active, limit, nothing
        )  # fmt: skip
        epoch += 1
        if guess <= tol * primal or active == 0 or epoch >= min(due, most):
            _rebuild(x, stack, client, b, q)
            loss, gap, size = _weigh_up(x, stack, client, output, q, b)
            primal = loss
            for column in range(len(q)):
                primal += 0.5 * q[column] * q[column]
            found[0], found[1], found[2] = primal, gap, epoch
            found[3] = ROUNDING * np.finfo(b.dtype).eps * (size + primal)
            if not gap > tol * primal + found[3] or epoch >= most:
                return
            active, limit, due = len(b), np.inf, max(SELDOM, 2 * epoch)
        if epoch % _BURST == 0:
            accelerate(x, stack, output, members, 0.0, q, nobody, dual, _TURNS)


@_compiled
def solve_all(
    x: Rows, stack: Stack, keys: Array, tol: float, most: int, weight: Array, dual: Array,
    out: Array, begin: int, end: int,
) -> None:  # fmt: skip
    """Solve the problems `begin` .. `end` - 1; write primal, gap, epochs, rounding to (c, o, 4)."""
    order = np.empty(stack.counts.max(), np.int64)
    for problem in range(begin, end):
        client, output = problem // weight.shape[1], problem % weight.shape[1]
        n, q, found = stack.counts[client], weight[client, output], out[client, output]
        if stack.fault[client, output]:
            _fill(q, np.nan)
            _fill(found, np.nan)
            _fill(dual[client, :n, output], np.nan)
        elif n:
            _number(order[:n])
            state = _stream(keys[client], output)
            _solve(x, stack, client, output, q, dual, order[:n], state, tol, most, found)


@_compiled
def visit(
    x: Rows, stack: Stack, key: np.uint64, members: Array, chunk: int, order: Array,
    active: Array, limit: float, sigma: float, coupling: float, w: Array, own: Array, dual: Array,
) -> tuple[float, float]:  # fmt: skip
    """Visit the active rows of the members once, a chunk of one client's at a time.

    A dual step moves w (D,) by sigma and v_k = own[k] by `coupling` = 1/C2 times the row. Returns
    the largest gradient and the sum of the gap's terms, as rows were visited.
    """
    owners, begins = _chunks(members, active, chunk)
    turns, kept = np.empty(len(owners), np.int64), np.empty(len(owners), np.int64)
    _number(turns)
    state = _shuffle(turns, len(turns), key)
    q, sink, nothing = np.empty(len(w), w.dtype), np.empty(1), np.empty(0)
    largest, gap, scale = 0.0, 0.0, sigma + coupling
    for client in members:
        base = stack.bases[client]
        state = _shuffle(order[base : base + active[client]], active[client], state)
    for turn in turns:
        client, n = owners[turn], stack.counts[owners[turn]]
        begin = stack.bases[client] + begins[turn]
        mine = order[begin : begin + min(chunk, active[client] - begins[turn])]
        _warm(stack.starts[client], mine, len(mine), sink, x)
        point = q if coupling > 0 else w
        if coupling > 0:
            for column in range(len(w)):
                q[column] = w[column] + own[client, column]
        kept[turn], worst, extra = _sweep(
            x, stack, client, 0, scale, point, dual[client, :n, 0], mine, len(mine), limit, nothing
        )  # fmt: skip
        largest, gap = max(largest, worst), gap + extra
        if worst > 0 and coupling > 0:
            for column in range(len(w)):
                step = (q[column] - w[column] - own[client, column]) / scale
                own[client, column] += coupling * step
                w[column] += sigma * step
    _compact(stack, order, active, owners, begins, kept)
    return largest, gap


@_compiled
def _chunks(members: Array, active: Array, chunk: int) -> tuple[Array, Array]:
    total = 0
    for client in members:
        total += (active[client] + chunk - 1) // chunk
    owners, begins, last = np.empty(total, np.int64), np.empty(total, np.int64), 0
    for client in members:
        for begin in range(0, active[client], chunk):
            owners[last], begins[last] = client, begin
            last += 1
    return owners, begins


@_compiled
def _compact(
    stack: Stack, order: Array, active: Array, owners: Array, begins: Array, kept: Array
) -> None:
    # Move the rows that chunks kept to the front of each client.
    for turn in range(len(owners)):
        client = owners[turn]
        base = stack.bases[client]
        last = 0 if begins[turn] == 0 else active[client]
        for place in range(begins[turn], begins[turn] + kept[turn]):
            left, right = base + last, base + place
            order[left], order[right] = order[right], order[left]
            last += 1
        active[client] = last
