"""The compiled part of `coterie.solvers.sdca`: no checks.

Every loss here has one form. With r = p - y, the prediction less the target, a row's loss is

    hi max(-r - tube, 0) - lo max(r - tube, 0) = max over b in [lo, hi] of -b r - tube |b|

where the hinge has y = +-1, tube = 0 and [lo, hi] = [0, C] or [-C, 0], and the epsilon-insensitive
loss has [lo, hi] = [-C, C]. So one step, one test of optimality and one gap serve both.

One output of one client is computed by one thread from start to end, from a stream of its own, so
that its result is the same to the last bit whatever else is in the stack. One file, since numba's
cache does not see changes in other files.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from typing import Any

import numpy as np

from coterie.solvers.svm import Array, Rows, Stack, compiled

_HALF = np.uint64(0xFFFFFFFF)
_LINE = 16  # float32 numbers in a cache line
ROUNDING = 8  # times the precision: of what is added up, so much may be rounding
_SELDOM = 50  # epochs after which the gap is looked at in any case


@compiled
def _mixed(word: np.uint64) -> np.uint64:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled
def _stream(key: np.uint64, number: int) -> np.uint64:
    return _mixed(key + np.uint64(number) * np.uint64(0xD1342543DE82EF95))


@compiled
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


@compiled
def _shuffle(order: Array, count: int, state: np.uint64) -> np.uint64:
    for place in range(count - 1):
        state, jump = _below(state, np.uint64(count - place))
        order[place], order[place + jump] = order[place + jump], order[place]
    return state


@compiled
def _draw(order: Array, count: int, state: np.uint64) -> np.uint64:
    for place in range(count):
        state, order[place] = _below(state, np.uint64(count))
    return state


@compiled
def _number(order: Array) -> None:
    for place in range(len(order)):
        order[place] = place


@compiled
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


@compiled
def _add(q: Array, length: float, row: int, bias: bool, x: Rows) -> None:
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


@compiled
def _warm(first: int, order: Array, count: int, sink: Array, x: Rows) -> None:
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


@compiled
def _box(y: float, cost: Any, two_sided: bool) -> tuple[float, float]:
    price = np.float64(cost)
    return -price if two_sided or y < 0 else 0.0, price if two_sided or y > 0 else 0.0


@compiled
def _excess(r: float, b: float, lo: float, hi: float, tube: float) -> tuple[float, float]:
    # The loss, and by how much it is above its lower bound -b r - tube |b|: never below 0.
    loss = hi * max(-r - tube, 0.0) - lo * max(r - tube, 0.0)
    return loss, max(loss + b * r + tube * abs(b), 0.0)


@compiled
def _slope(r: float, b: float, lo: float, hi: float, tube: float) -> float:
    # The lesser slope of the dual as b moves up or down inside its box, infinite if it cannot:
    # below 0 it is how much is to be gained, above 0 it holds b where it is.
    up = (r + tube if b >= 0 else r - tube) if b < hi else np.inf
    down = (-r - tube if b > 0 else tube - r) if b > lo else np.inf
    return min(up, down)


@compiled
def _best(r: float, b: float, inverse: float, tube: float) -> float:
    # Where one coordinate is best, before it is cut to its box: 1 / inverse is the curvature.
    if (r + tube) * inverse < b:
        return b - (r + tube) * inverse
    if (r - tube) * inverse > b:
        return b - (r - tube) * inverse
    return 0.0


@compiled
def _sweep(
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
        lo, hi = _box(y[i], b.dtype.type(cost[i]), two_sided)
        old, r = np.float64(b[i]), _score(first + i, q, bias, x) - y[i]
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
            _add(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return active, worst, gap


@compiled
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
        lo, hi = _box(stack.y[output, base + i], price, stack.two_sided)
        b[i] = min(max(old, lo), hi)
        if b[i] != old:
            _add(q, scale * (np.float64(b[i]) - old), first + i, bias, x)
    return sound


@compiled
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


@compiled
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
        q[:] = start[client, output]
        if stack.fault[client, output] or not _cut(x, stack, client, output, scale, q, b):
            b[:] = np.nan
            moved[client, output] = np.nan
            continue
        _number(order[:n])
        _run(
            x, stack, client, output, scale, q, b, order, nothing if paper else own,
            _stream(keys[client], output), epochs, tol, replace,
        )  # fmt: skip
        total[:] = 0
        kept = own if paper else nothing
        _sum_moves(x, stack, client, b, before[client, :n, output], kept, total)
        moved[client, output] = total


@compiled
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
            _add(total, move, first + i, bias, x)


@compiled
def _weigh_up(
    x: Rows, stack: Stack, client: int, output: int, q: Array, b: Array
) -> tuple[float, float, float]:
    # The loss, the gap and how much was added up on the way; NaN if a number is not finite.
    first, base, bias = stack.starts[client], stack.bases[client], stack.bias
    y, cost, tube, two_sided = stack.y, stack.cost, stack.tube, stack.two_sided
    loss, gap, size = 0.0, 0.0, 0.0
    for i in range(len(b)):
        r = _score(first + i, q, bias, x) - y[output, base + i]
        lo, hi = _box(y[output, base + i], cost[output, base + i], two_sided)
        held = min(max(np.float64(b[i]), lo), hi)
        found, extra = _excess(r, held, lo, hi, tube)
        loss += found
        gap += extra
        size += found + abs(held) * (abs(r) + 2 * abs(y[output, base + i]) + tube)
        if not np.isfinite(r + np.float64(b[i])):
            return np.nan, np.nan, np.nan
    return loss, gap, size


@compiled
def gaps(
    x: Rows, stack: Stack, point: Array, dual: Array, begin: int, end: int, out: Array
) -> None:
    """Give loss, gap and size of the problems `begin` .. `end` - 1, into (c, o, 3)."""
    q = np.empty(point.shape[2])
    for problem in range(begin, end):
        client, output = problem // point.shape[1], problem % point.shape[1]
        q[:] = point[client, output]
        b = dual[client, : stack.counts[client], output]
        if stack.fault[client, output]:
            out[client, output] = np.nan
        else:
            loss, gap, size = _weigh_up(x, stack, client, output, q, b)
            out[client, output, 0], out[client, output, 1], out[client, output, 2] = loss, gap, size


@compiled
def _rebuild(x: Rows, stack: Stack, client: int, b: Array, q: Array) -> None:
    q[:] = 0
    for i in range(len(b)):
        if b[i] != 0:
            _add(q, np.float64(b[i]), stack.starts[client] + i, stack.bias, x)


@compiled
def _solve(
    x: Rows, stack: Stack, client: int, output: int, q: Array, b: Array, order: Array,
    state: np.uint64, tol: float, most: int, found: Array,
) -> None:  # fmt: skip
    # The terms of the gap, as rows are passed, say when it is worth while to look at all of it.
    active, limit, epoch, due, primal = len(b), np.inf, 0, _SELDOM, np.inf
    precision, nothing = np.finfo(b.dtype).eps, np.empty(0)
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
            found[3] = ROUNDING * precision * (size + primal)
            if not gap > tol * primal + found[3] or epoch >= most:
                return
            active, limit, due = len(b), np.inf, epoch + _SELDOM


@compiled
def alone(
    x: Rows, stack: Stack, keys: Array, tol: float, most: int, weight: Array, dual: Array,
    begin: int, end: int, out: Array,
) -> None:  # fmt: skip
    """Solve the problems `begin` .. `end` - 1; primal, gap, epochs and rounding go to (c, o, 4)."""
    order = np.empty(stack.counts.max(), np.int64)
    for problem in range(begin, end):
        client, output = problem // weight.shape[1], problem % weight.shape[1]
        n = stack.counts[client]
        q, b, found = weight[client, output], dual[client, :n, output], out[client, output]
        if stack.fault[client, output]:
            q[:], b[:], found[:] = np.nan, np.nan, np.nan
        elif n:
            _number(order[:n])
            _solve(
                x, stack, client, output, q, b, order[:n], _stream(keys[client], output), tol,
                most, found,
            )  # fmt: skip


@compiled
def visit(
    x: Rows, stack: Stack, keys: Array, epoch: int, members: Array, sigma: float, coupling: float,
    limit: float, w: Array, own: Array, dual: Array, order: Array, active: Array, moved: Array,
) -> tuple[float, float]:  # fmt: skip
    """Sweep once through the active rows of the members, each against a w that is up to date.

    `w` (D,) moves by sigma times what is added to `moved`, `own` (c, D) by `coupling` = 1/C2 times.
    """
    q, sink, nothing = np.empty(len(w), w.dtype), np.empty(1), np.empty(0)
    steepest, gap, scale = 0.0, 0.0, sigma + coupling
    _shuffle(members, len(members), _stream(keys[members.min()], epoch))
    for place in range(len(members)):
        client = members[place]
        n, base = stack.counts[client], stack.bases[client]
        mine, b = order[base : base + n], dual[client, :n, 0]
        if active[client] == 0:
            continue
        for column in range(len(q)):
            q[column] = w[column] + own[client, column]
        _warm(stack.starts[client], mine, active[client], sink, x)
        _shuffle(mine, active[client], _stream(keys[client], epoch))
        active[client], worst, extra = _sweep(
            x, stack, client, 0, scale, q, b, mine, active[client], limit, nothing
        )  # fmt: skip
        steepest, gap = max(steepest, worst), gap + extra
        for column in range(len(q)):
            step = (q[column] - w[column] - own[client, column]) / scale
            moved[column] += step
            own[client, column] += coupling * step
            w[column] += sigma * step
    return steepest, gap


@compiled
def rebuild(x: Rows, stack: Stack, dual: Array, out: Array, begin: int, end: int) -> None:
    """Give the sums of b_i x_i of the clients `begin` .. `end` - 1, (c, D), of one output."""
    for client in range(begin, end):
        _rebuild(x, stack, client, dual[client, : stack.counts[client], 0], out[client])
