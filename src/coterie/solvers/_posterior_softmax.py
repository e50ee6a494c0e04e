"""The compiled part of `coterie.solvers.posterior` for multiclass tasks: no checks.

Minimises sum_i (log sum_k exp eta_ik - eta_i,y_i) + |v|^2 / 2 over v (k, o), eta = off + X (s v),
with s the prior's standard deviations, by Newton's method: directions by conjugate gradients, steps
halved until the sum falls. A strong pull makes them quick as they are; where a direction took as
long as factoring would, the blocks of the classes, Z_k' diag(q_k (1 - q_k)) Z_k + I, precondition
the next, and stay until one takes as long again. As the sum is 1-strongly convex, the mode is no
further away than the Newton decrement, about, which ends the steps. Arrays over columns and classes
have classes side by side.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from typing import NamedTuple

import numpy as np

from coterie.solvers._posterior_roots import (
    apply_root,
    cholesky,
    diagonal,
    form,
    gram,
    invert,
    outer_gram,
    root,
    widths,
)
from coterie.solvers._posterior_rows import (
    Array,
    Found,
    Law,
    Rows,
    anywhere,
    inner,
    load,
    outer,
    scores,
    spoil,
    write,
)

_STEPS = 200  # after which Newton's method has lost its way: that client gets NaN
_INNER = 1000  # products of one Newton step
_PAYS = 3  # blocks of this many columns are factored in the time of one product, about
_TINY = 1e-9  # the decrement of a mode, by the larger of 1 and |v|


class Room(NamedTuple):
    """One thread's memory: rows, roots of the classes, and arrays (n, o) and (k, o) by number."""

    X: Array
    B: Array
    S: Array
    T: Array
    roots: Array
    wide: Array
    tall: Array
    vectors: Array
    classes: Array


# Numbers of arrays over rows and classes, and over columns and classes.
_ETA, _P, _MOVE, _ASIDE, _WEIGHT = 0, 1, 2, 3, 4
_V, _G, _D, _SCALE, _REST, _WAY, _BACK, _DONE = 0, 1, 2, 3, 4, 5, 6, 7


@outer
def softmax_part(rows: Rows, fresh: Rows, law: Law, found: Found, part: int, parts: int) -> None:
    """Put what is asked for of clients part, part + parts, ... into `found`."""
    o, p = law.center.shape
    longest = rows.counts.max()
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(law.spread)
    X, B, S = np.empty((longest, p)), np.empty((longest, p)), np.empty((small, p))
    squares, wide = np.empty((o + 1) * small * small), np.empty((5, longest, o))
    tall, vectors = np.empty((8, p, o)), np.empty((2, max(longest, p)))
    classes = np.empty(longest, np.int64)
    for client in range(part, len(rows.starts), parts):
        k = load(rows, client, free, law.bias, slots, columns, X)
        m = min(rows.counts[client], max(k, 0))
        roots = squares[: (o + 1) * m * m].reshape(o + 1, m, m)
        room = Room(X, B, S, roots[o], roots, wide, tall, vectors, classes)
        if k < 0 or not _client(rows, fresh, law, found, client, k, slots, columns, room):
            spoil(client, rows, fresh, found)


@inner
def _client(
    rows: Rows, fresh: Rows, law: Law, found: Found, client: int, k: int, slots: Array,
    columns: Array, room: Room,
) -> bool:  # fmt: skip
    n, o = rows.counts[client], law.center.shape[0]
    share = 1.0 / n if law.per_row and n > 0 else 1.0
    if not _prepare(rows, client, law, share, columns, k, room):
        found.fault[client] = 1
        return False
    if not _newton(n, k, o, room):
        return False
    for label in range(o):
        _label(fresh, law, found, client, label, n, k, share, slots, columns, room)
    if len(found.out):
        for i in range(n):
            found.out[client, i] = _row_loss(room.wide[_ASIDE], i, room.classes[i])
    return True


@inner
def _label(
    fresh: Rows, law: Law, found: Found, client: int, label: int, n: int, k: int, share: float,
    slots: Array, columns: Array, room: Room,
) -> None:  # fmt: skip
    # What the block of a class says at the mode.
    g, t = room.vectors[0], room.vectors[1]
    _weighted(n, k, label, room)
    root(room.B, n, k, room.T, room.S, g, True)
    if len(found.D):
        diagonal(room.T, room.S, n, k, t)
        for j in range(k):
            g[j] = room.tall[_V, j, label]
        write(client, label, k, columns, g, t, law, share, found)
    if len(found.out):
        _shift(n, k, label, room)
    if len(found.wide):
        widths(room.T, room.S, n, k, slots, fresh, client, label, law, share, g, t, found.wide)


@inner
def _prepare(
    rows: Rows, client: int, law: Law, share: float, columns: Array, k: int, room: Room
) -> bool:
    # Standard deviations and scores of the prior's centre; False if a target is no class.
    n, o = rows.counts[client], law.center.shape[0]
    good = True
    for i in range(n):
        room.classes[i] = rows.y[rows.starts[client] + i]
        good &= 0 <= room.classes[i] < o
    for label in range(o):
        scores(rows, client, law.center, label, law.bias, room.vectors[0])
        for i in range(n):
            room.wide[_ETA, i, label] = room.vectors[0, i]
        for j in range(k):
            room.tall[_SCALE, j, label] = law.spread[label, columns[j]] * np.sqrt(share)
    return good


@inner
def _shift(n: int, k: int, label: int, room: Room) -> None:
    # The scores of a class for rows left out.
    z, t = room.vectors[0], room.vectors[1]
    for i in range(n):
        for j in range(k):
            z[j] = room.X[i, j] * room.tall[_SCALE, j, label]
        a, q = form(room.T, room.S, n, k, z, t), room.wide[_P, i, label]
        slope = q - (1.0 if room.classes[i] == label else 0.0)
        rest = max(1.0 - a * q * (1.0 - q), 1e-15)
        room.wide[_ASIDE, i, label] = room.wide[_ETA, i, label] + a * slope / rest


@inner
def _row_loss(eta: Array, i: int, wanted: int) -> float:
    most = eta[i, 0]
    for label in range(1, eta.shape[1]):
        most = max(most, eta[i, label])
    total = 0.0
    for label in range(eta.shape[1]):
        total += np.exp(eta[i, label] - most)
    return float(np.log(total) + (most - eta[i, wanted]))


@inner
def _loss(eta: Array, n: int, classes: Array) -> float:
    total = 0.0
    for i in range(n):
        total += _row_loss(eta, i, classes[i])
    return total


@inner
def _newton(n: int, k: int, o: int, room: Room) -> bool:
    # The mode into V, its scores and probabilities into ETA and P. False if not found.
    tall = room.tall
    tall[_V, :k] = 0.0
    now, products, blocks = _loss(room.wide[_ETA], n, room.classes), 0, False
    for _ in range(_STEPS):
        blur = _gradient(n, k, o, room)
        if _PAYS * products > min(n, k):
            _factor(n, k, o, room)
            blocks = True
        fall, products = _direction(n, k, o, room, blocks)
        size = _dot(tall[_V], tall[_V], k)
        if not np.isfinite(fall):
            return False
        if fall <= max(_TINY * _TINY * max(1.0, size), blur):
            return True
        now = _descend(n, k, o, fall, now, room)
    return False


@inner
def _gradient(n: int, k: int, o: int, room: Room) -> float:
    # Probabilities into P and the gradient into G; the square of what rounding may leave of it.
    P, g = room.wide[_P], room.tall[_G]
    size, most = 0.0, 0.0
    for i in range(n):
        _soften(room.wide[_ETA], i, P)
        P[i, room.classes[i]] -= 1.0
        for j in range(k):
            size += room.X[i, j] * room.X[i, j]
    _back(n, k, o, room, P, g)
    for i in range(n):
        P[i, room.classes[i]] += 1.0
    for j in range(k):
        for label in range(o):
            g[j, label] += room.tall[_V, j, label]
            most = max(most, room.tall[_SCALE, j, label])
    return size * most * most * 1e-30


@inner
def _soften(eta: Array, i: int, P: Array) -> None:
    top = eta[i, 0]
    for label in range(1, eta.shape[1]):
        top = max(top, eta[i, label])
    total = 0.0
    for label in range(eta.shape[1]):
        P[i, label] = np.exp(eta[i, label] - top)
        total += P[i, label]
    for label in range(eta.shape[1]):
        P[i, label] /= total


@inner
def _ahead(n: int, k: int, o: int, room: Room, d: Array, out: Array) -> None:
    # out = X (s d), (n, o).
    for i in range(n):
        for label in range(o):
            out[i, label] = 0.0
        for j in range(k):
            x = room.X[i, j]
            for label in range(o):
                out[i, label] += x * (room.tall[_SCALE, j, label] * d[j, label])


@inner
def _back(n: int, k: int, o: int, room: Room, u: Array, out: Array) -> None:
    # out = s X'u, (k, o).
    for j in range(k):
        for label in range(o):
            out[j, label] = 0.0
    for i in range(n):
        for j in range(k):
            x = room.X[i, j]
            for label in range(o):
                out[j, label] += x * u[i, label]
    for j in range(k):
        for label in range(o):
            out[j, label] *= room.tall[_SCALE, j, label]


@inner
def _dot(left: Array, right: Array, k: int) -> float:
    total = 0.0
    for j in range(k):
        for label in range(left.shape[1]):
            total += left[j, label] * right[j, label]
    return total


@inner
def _weighted(n: int, k: int, label: int, room: Room) -> None:
    for i in range(n):
        q = room.wide[_P, i, label]
        weight = np.sqrt(max(q * (1.0 - q), 0.0))
        room.wide[_WEIGHT, i, label] = weight
        for j in range(k):
            room.B[i, j] = weight * room.X[i, j] * room.tall[_SCALE, j, label]


@inner
def _factor(n: int, k: int, o: int, room: Room) -> None:
    # Roots of the inverse of B'B + I for n >= k, of B B' + I otherwise, of every class.
    small = min(n, k)
    for label in range(o):
        _weighted(n, k, label, room)
        root_here = room.roots[label]
        if n >= k:
            gram(room.B, n, k, root_here)
        else:
            outer_gram(room.B, n, k, root_here)
        cholesky(root_here, small)
        invert(root_here, small)


@inner
def _precondition(n: int, k: int, o: int, room: Room, blocks: bool, r: Array, out: Array) -> None:
    # The blocks' inverses times r; by rows r - s X'(w M^-1 w X (s r)), w = sqrt(q (1 - q)).
    if not blocks:
        out[:k] = r[:k]
        return
    if n >= k:
        for label in range(o):
            _precondition_one(k, label, room, r, out)
        return
    aside = room.wide[_ASIDE]
    _ahead(n, k, o, room, r, aside)
    for label in range(o):
        _weigh(n, label, room, aside)
        _precondition_one(n, label, room, aside, aside)
        _weigh(n, label, room, aside)
    _back(n, k, o, room, aside, out)
    _add(k, 1.0, r, out, -1.0)


@inner
def _precondition_one(size: int, label: int, room: Room, r: Array, out: Array) -> None:
    g = room.vectors[0]
    for j in range(size):
        g[j] = r[j, label]
    apply_root(room.roots[label], size, g, room.vectors[1])
    for j in range(size):
        out[j, label] = g[j]


@inner
def _weigh(n: int, label: int, room: Room, u: Array) -> None:
    for i in range(n):
        u[i, label] *= room.wide[_WEIGHT, i, label]


@inner
def _curve(n: int, k: int, o: int, room: Room, d: Array, out: Array) -> None:
    # The Hessian times d.
    move, P = room.wide[_MOVE], room.wide[_P]
    _ahead(n, k, o, room, d, move)
    for i in range(n):
        mean = 0.0
        for label in range(o):
            mean += P[i, label] * move[i, label]
        for label in range(o):
            move[i, label] = P[i, label] * (move[i, label] - mean)
    _back(n, k, o, room, move, out)
    _add(k, 1.0, d, out, 1.0)


@inner
def _add(k: int, factor: float, left: Array, right: Array, keep: float) -> None:
    # right <- keep right + factor left.
    for j in range(k):
        for label in range(left.shape[1]):
            right[j, label] = keep * right[j, label] + factor * left[j, label]


@inner
def _direction(n: int, k: int, o: int, room: Room, blocks: bool) -> tuple[float, int]:
    # D = H^-1 G by conjugate gradients, the closer the smaller the gradient; gives G . D and the
    # products that it took.
    tall = room.tall
    d, rest, way, back, done = tall[_D], tall[_REST], tall[_WAY], tall[_BACK], tall[_DONE]
    d[:k], rest[:k] = 0.0, tall[_G, :k]
    _precondition(n, k, o, room, blocks, rest, back)
    way[:k] = back[:k]
    level = _dot(rest, back, k)
    goal, products = level * max(min(0.01, level), 1e-30), 0
    for _ in range(_INNER):
        if not level > goal:
            break
        products += 1
        _curve(n, k, o, room, way, done)
        length = level / _dot(way, done, k)
        _add(k, length, way, d, 1.0)
        _add(k, -length, done, rest, 1.0)
        _precondition(n, k, o, room, blocks, rest, back)
        last, level = level, _dot(rest, back, k)
        _add(k, 1.0, back, way, level / last)
    return _dot(tall[_G], d, k), products


@inner
def _descend(n: int, k: int, o: int, fall: float, now: float, room: Room) -> float:
    # Halves the step until the sum falls by a share of what its slope says, rounding aside.
    eta, move, aside = room.wide[_ETA], room.wide[_MOVE], room.wide[_ASIDE]
    v, d = room.tall[_V], room.tall[_D]
    _ahead(n, k, o, room, d, move)
    vv, vd, dd = _dot(v, v, k), _dot(v, d, k), _dot(d, d, k)
    slack, length, new = 1e-13 * (1.0 + abs(now) + 0.5 * vv), 1.0, now
    for _ in range(60):
        for i in range(n):
            for label in range(o):
                aside[i, label] = eta[i, label] - length * move[i, label]
        new = _loss(aside, n, room.classes)
        change = new - now + length * (0.5 * length * dd - vd)
        if change <= slack - 1e-4 * length * fall:
            break
        length *= 0.5
    for i in range(n):
        for label in range(o):
            eta[i, label] = aside[i, label]
    _add(k, -length, d, v, 1.0)
    return new
