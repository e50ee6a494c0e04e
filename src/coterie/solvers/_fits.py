"""The compiled fits of `coterie.solvers.sdca`: steps until the duality gap is small; no checks.

Steps on one dual at a time find soon which duals are at their bounds, and then take long to settle
the others. Those, the free ones, minimise a quadratic: a few conjugate gradients move all of them
at once. What leaves its box on the way is cut back to it, and the move is halved until the dual
has got better by a tenth of what its slope promises (Bertsekas 1982, for projected Newton steps).
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

import numpy as np

from coterie.solvers import _sdca, svm
from coterie.solvers._sdca import (
    add_row,
    copy,
    fill,
    find_box,
    number,
    score,
    shuffle,
    stream,
    sweep,
    warm,
    weigh_up,
)
from coterie.solvers.svm import Array, Rows, Stack

ROUNDING = 8  # times the precision: of what is added up, so much may be rounding
SELDOM = 50  # epochs, doubled each time, after which the gap is looked at in any case
_BURST = 5  # epochs between two moves of all free duals
_TURNS = 10  # conjugate gradients of one move
_NEAR = 0.01  # the share of the squared slopes at which they are stopped
_HALVINGS = 10
_compiled = svm.compiler(svm.__file__, _sdca.__file__)


@_compiled
def _find_free(stack: Stack, output: int, members: Array, dual: Array) -> tuple[Array, Array]:
    # The rows whose duals can move both ways: their clients, and their numbers there.
    total = 0
    for client in members:
        total += stack.counts[client]
    who, which, last = np.empty(total, np.int64), np.empty(total, np.int64), 0
    for client in members:
        base = stack.bases[client]
        for i in range(stack.counts[client]):
            price = dual.dtype.type(stack.cost[output, base + i])
            lo, hi = find_box(stack.y[output, base + i], price, stack.two_sided)
            if lo < dual[client, i, output] < hi and dual[client, i, output] != 0:
                who[last], which[last] = client, i
                last += 1
    return who[:last], which[:last]


@_compiled
def _gather(
    x: Rows, stack: Stack, who: Array, which: Array, amounts: Array, coupling: float, total: Array,
    sums: Array,
) -> float:  # fmt: skip
    # Amounts times rows, added up over all and (sums) over each client; gives the quadratic form.
    form = 0.0
    fill(total, 0)
    for client in range(len(sums)):
        fill(sums[client], 0)
    for place in range(len(who)):
        into = sums[who[place]] if coupling > 0 else total
        row = stack.starts[who[place]] + which[place]
        add_row(into, amounts[place], row, stack.bias, x)
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
    copy(q, total)
    for place in range(len(who)):
        if coupling > 0 and who[place] != last:
            last = who[place]
            for column in range(len(q)):
                q[column] = total[column] + coupling * sums[last, column]
        out[place] = score(stack.starts[who[place]] + which[place], q, stack.bias, x)


@_compiled
def _find_slopes(
    x: Rows, stack: Stack, output: int, who: Array, which: Array, w: Array, own: Array,
    dual: Array,
) -> Array:  # fmt: skip
    slopes = np.empty(len(who))
    _spread(x, stack, who, which, 1.0 if len(own) else 0.0, w, own, slopes)
    for place in range(len(who)):
        client, i = who[place], which[place]
        slopes[place] -= stack.y[output, stack.bases[client] + i]
        slopes[place] += stack.tube if dual[client, i, output] > 0 else -stack.tube
    return slopes


@_compiled
def _conjugate(
    x: Rows, stack: Stack, who: Array, which: Array, slopes: Array, coupling: float, total: Array,
    sums: Array, turns: int,
) -> Array:  # fmt: skip
    # Where the quadratic with these slopes is least, about, as if there were no boxes.
    step, rest = np.zeros(len(who)), np.empty(len(who))
    way, form, size = np.empty(len(who)), np.empty(len(who)), 0.0
    for place in range(len(who)):
        rest[place], way[place] = -slopes[place], -slopes[place]
        size += slopes[place] * slopes[place]
    goal = _NEAR * size
    for _ in range(turns):
        curve = _gather(x, stack, who, which, way, coupling, total, sums)
        if not curve > 0:
            break
        _spread(x, stack, who, which, coupling, total, sums, form)
        length, before, size = size / curve, size, 0.0
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
def _reach(stack: Stack, output: int, who: Array, which: Array, step: Array) -> float:
    # Where rows outnumber features, steps may lead far beyond all boxes: begin with less then.
    size, room = 0.0, 0.0
    for place in range(len(who)):
        size += abs(step[place])
        room += stack.cost[output, stack.bases[who[place]] + which[place]]
    return min(1.0, room / size) if size > 0 else 1.0


@_compiled
def _cut(
    stack: Stack, output: int, who: Array, which: Array, dual: Array, step: Array, length: float,
    slopes: Array, moves: Array,
) -> float:  # fmt: skip
    # The moves that stay in the boxes and do not change signs; gives what the slopes promise.
    promise = 0.0
    for place in range(len(who)):
        client, i = who[place], which[place]
        old = np.float64(dual[client, i, output])
        price = np.float64(dual.dtype.type(stack.cost[output, stack.bases[client] + i]))
        new = old + length * step[place]
        new = min(max(new, 0.0), price) if old > 0 else max(min(new, 0.0), -price)
        moves[place] = np.float64(dual.dtype.type(new)) - old
        promise += slopes[place] * moves[place]
    return promise


@_compiled
def accelerate(
    x: Rows, stack: Stack, output: int, members: Array, coupling: float, w: Array, own: Array,
    dual: Array, turns: int,
) -> None:  # fmt: skip
    """Move all free duals of the members at once, and w and v_k = own[k] with them."""
    who, which = _find_free(stack, output, members, dual)
    if len(who) == 0:
        return
    total, sums = np.empty(len(w), w.dtype), np.empty((len(own), len(w)), w.dtype)
    slopes = _find_slopes(x, stack, output, who, which, w, own, dual)
    step = _conjugate(x, stack, who, which, slopes, coupling, total, sums, turns)
    moves, length = np.empty(len(who)), _reach(stack, output, who, which, step)
    for _ in range(_HALVINGS):
        promise = _cut(stack, output, who, which, dual, step, length, slopes, moves)
        curve = _gather(x, stack, who, which, moves, coupling, total, sums)
        if promise < 0 and promise + 0.5 * curve <= 0.1 * promise:
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
    fill(q, 0)
    for i in range(len(b)):
        if b[i] != 0:
            add_row(q, np.float64(b[i]), stack.starts[client] + i, stack.bias, x)


@_compiled
def rebuild(x: Rows, stack: Stack, dual: Array, out: Array, begin: int, end: int) -> None:
    """Return the sums of b_i x_i of the clients `begin` .. `end` - 1, (c, D), of one output."""
    for client in range(begin, end):
        _rebuild(x, stack, client, dual[client, : stack.counts[client], 0], out[client])


@_compiled
def _solve(
    x: Rows, stack: Stack, client: int, output: int, q: Array, dual: Array, order: Array,
    state: np.uint64, tol: float, most: int, found: Array,
) -> None:  # fmt: skip
    # The terms of the gap, as rows are passed, say when it is worth while to look at all of it.
    b, nothing = dual[client, : len(order), output], np.empty(0)
    members, nobody = np.empty(1, np.int64), np.empty((0, len(q)), q.dtype)
    members[0] = client
    active, limit, epoch, due, primal = len(b), np.inf, 0, SELDOM, np.inf
    warm(stack.starts[client], order, len(b), found, x)
    while True:
        state = shuffle(order, active, state)
        active, limit, guess = sweep(
            x, stack, client, output, 1.0, q, b, order, active, limit, nothing
        )  # fmt: skip
        epoch += 1
        if guess <= tol * primal or active == 0 or epoch >= min(due, most):
            _rebuild(x, stack, client, b, q)
            loss, gap, size = weigh_up(x, stack, client, output, q, b)
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
def alone(
    x: Rows, stack: Stack, keys: Array, tol: float, most: int, weight: Array, dual: Array,
    begin: int, end: int, out: Array,
) -> None:  # fmt: skip
    """Solve the problems `begin` .. `end` - 1; primal, gap, epochs and rounding go to (c, o, 4)."""
    order = np.empty(stack.counts.max(), np.int64)
    for problem in range(begin, end):
        client, output = problem // weight.shape[1], problem % weight.shape[1]
        n, q, found = stack.counts[client], weight[client, output], out[client, output]
        if stack.fault[client, output]:
            fill(q, np.nan)
            fill(found, np.nan)
            fill(dual[client, :n, output], np.nan)
        elif n:
            number(order[:n])
            state = stream(keys[client], output)
            _solve(x, stack, client, output, q, dual, order[:n], state, tol, most, found)


@_compiled
def visit(
    x: Rows, stack: Stack, key: np.uint64, members: Array, chunk: int, order: Array,
    active: Array, limit: float, sigma: float, coupling: float, w: Array, own: Array, dual: Array,
) -> tuple[float, float]:  # fmt: skip
    """Sweep once through the active rows of the members, a chunk of one client's at a time.

    With a row's dual, w (D,) moves sigma times and v_k = own[k] `coupling` = 1/C2 times. Gives the
    steepest slope and the sum of the gap's terms, as rows were found.
    """
    owners, begins = _chunks(members, active, chunk)
    turns, kept = np.empty(len(owners), np.int64), np.empty(len(owners), np.int64)
    number(turns)
    state = shuffle(turns, len(turns), key)
    q, sink, nothing = np.empty(len(w), w.dtype), np.empty(1), np.empty(0)
    steepest, gap, scale = 0.0, 0.0, sigma + coupling
    for client in members:
        base = stack.bases[client]
        state = shuffle(order[base : base + active[client]], active[client], state)
    for turn in turns:
        client, n = owners[turn], stack.counts[owners[turn]]
        begin = stack.bases[client] + begins[turn]
        mine = order[begin : begin + min(chunk, active[client] - begins[turn])]
        warm(stack.starts[client], mine, len(mine), sink, x)
        point = q if coupling > 0 else w
        if coupling > 0:
            for column in range(len(w)):
                q[column] = w[column] + own[client, column]
        kept[turn], worst, extra = sweep(
            x, stack, client, 0, scale, point, dual[client, :n, 0], mine, len(mine), limit, nothing
        )  # fmt: skip
        steepest, gap = max(steepest, worst), gap + extra
        if worst > 0 and coupling > 0:
            for column in range(len(w)):
                step = (q[column] - w[column] - own[client, column]) / scale
                own[client, column] += coupling * step
                w[column] += sigma * step
    _compact(stack, order, active, owners, begins, kept)
    return steepest, gap


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
    # The rows that chunks have kept come first again, one client's after the other.
    for turn in range(len(owners)):
        client = owners[turn]
        base = stack.bases[client]
        last = 0 if begins[turn] == 0 else active[client]
        for place in range(begins[turn], begins[turn] + kept[turn]):
            left, right = base + last, base + place
            order[left], order[right] = order[right], order[left]
            last += 1
        active[client] = last
