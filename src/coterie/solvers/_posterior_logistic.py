"""The compiled part of `coterie.solvers.posterior` for binary and multilabel tasks: no checks.

Each output is a problem of its own: minimise sum_i log(1 + exp(-s_i eta_i)) + |v|^2 / 2, s_i = +-1,
eta = off + Z v, by Newton's method with halved steps. The sum is 1-strongly convex, so the mode is
no further from v than the Newton decrement (g' G^-1 g)^(1/2), about: steps end when that is tiny,
or as small as the rounding of the gradient.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

from typing import NamedTuple

import numpy as np

from coterie.solvers._posterior_roots import apply, curvature, diagonal, form, root, widths
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
_TINY = 1e-10  # the decrement of a mode, by the larger of 1 and |v|


class Room(NamedTuple):
    """One thread's memory: rows (n, k), roots, vectors over rows and over columns."""

    X: Array
    Z: Array
    B: Array
    S: Array
    T: Array
    over_rows: Array
    over_columns: Array


@outer
def logistic_part(rows: Rows, fresh: Rows, law: Law, found: Found, part: int, parts: int) -> None:
    """Put what is asked for of clients part, part + parts, ... into `found`."""
    p = law.center.shape[1]
    longest = rows.counts.max()
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(law.spread)
    X, Z, B = np.empty((longest, p)), np.empty((longest, p)), np.empty((longest, p))
    S, square = np.empty((small, p)), np.empty(small * small)
    over_rows, over_columns = np.empty((6, longest)), np.empty((4, p))
    for client in range(part, len(rows.starts), parts):
        k = load(rows, client, free, law.bias, slots, columns, X)
        m = min(rows.counts[client], max(k, 0))
        T = square[: m * m].reshape(m, m)
        room = Room(X, Z, B, S, T, over_rows, over_columns)
        good = k >= 0
        for label in range(law.center.shape[0]):
            if good:
                good = _label(rows, fresh, law, found, client, label, k, slots, columns, room)
        if not good:
            spoil(client, rows, fresh, found)


@inner
def _label(
    rows: Rows, fresh: Rows, law: Law, found: Found, client: int, label: int, k: int,
    slots: Array, columns: Array, room: Room,
) -> bool:  # fmt: skip
    n = rows.counts[client]
    share = 1.0 / n if law.per_row and n > 0 else 1.0
    v, t = room.over_columns[0], room.over_columns[1]
    if not _prepare(rows, client, label, law, share, columns, k, room):
        found.fault[client] = 1
        return False
    if not _newton(n, k, room):
        return False
    root(room.B, n, k, room.T, room.S, room.over_rows[5], True)
    if len(found.D):
        diagonal(room.T, room.S, n, k, t)
        write(client, label, k, columns, v, t, law, share, found)
        found.R[client] = 1.0
    if len(found.K):
        curvature(room.T, room.S, n, k, columns, found.K, client)
    if len(found.out):
        _leave_out(client, n, k, law.center.shape[0], room, found.out)
    if len(found.wide):
        widths(
            room.T, room.S, n, k, slots, fresh, client, label, law, share,
            room.over_columns[2], t, found.wide,
        )  # fmt: skip
    return True


@inner
def _prepare(
    rows: Rows, client: int, label: int, law: Law, share: float, columns: Array, k: int, room: Room
) -> bool:
    # Rows in units of the prior and scores of its centre; False if a target is no class.
    eta, y = room.over_rows[0], room.over_rows[1]
    scores(rows, client, law.center, label, law.bias, eta)
    good = True
    for i in range(rows.counts[client]):
        y[i] = rows.y[rows.starts[client] + i, label]
        good &= y[i] == 0.0 or y[i] == 1.0 or not np.isfinite(y[i])
        for j in range(k):
            room.Z[i, j] = room.X[i, j] * law.spread[label, columns[j]] * np.sqrt(share)
    return good


@inner
def _newton(n: int, k: int, room: Room) -> bool:
    # The mode into v, its scores into eta; B keeps the weighted rows there. False if not found.
    eta, y, move, aside = room.over_rows[0], room.over_rows[1], room.over_rows[2], room.over_rows[3]
    v, g, d = room.over_columns[0], room.over_columns[2], room.over_columns[3]
    v[:k] = 0.0
    now = _loss(eta, y, n)
    for _ in range(_STEPS):
        blur = _gradient(n, k, room)
        for j in range(k):
            d[j] = g[j]
        root(room.B, n, k, room.T, room.S, room.over_rows[5], False)
        apply(room.T, room.S, n, k, d, room.over_columns[1])
        fall, size = 0.0, 0.0
        for j in range(k):
            fall += g[j] * d[j]
            size += v[j] * v[j]
        if not np.isfinite(fall):
            return False
        if fall <= max(_TINY * _TINY * max(1.0, size), blur):
            return True
        for i in range(n):
            total = 0.0
            for j in range(k):
                total += room.Z[i, j] * d[j]
            move[i] = total
        now = _descend(n, k, fall, now, eta, y, move, aside, v, d)
    return False


@inner
def _gradient(n: int, k: int, room: Room) -> float:
    # The gradient into g and the weighted rows into B; the square of what rounding may leave of it.
    eta, y = room.over_rows[0], room.over_rows[1]
    v, g, sizes = room.over_columns[0], room.over_columns[2], room.over_columns[3]
    for j in range(k):
        g[j], sizes[j] = v[j], abs(v[j])
    for i in range(n):
        small = np.exp(-abs(eta[i]))
        over = (1.0 if eta[i] >= 0 else small) / (1.0 + small)
        under = (small if eta[i] >= 0 else 1.0) / (1.0 + small)
        slope = -under if y[i] == 1.0 else over * (1.0 + 0.0 * y[i])
        weight = np.sqrt(over * under)
        for j in range(k):
            g[j] += slope * room.Z[i, j]
            sizes[j] += abs(slope * room.Z[i, j])
            room.B[i, j] = weight * room.Z[i, j]
    blur = 0.0
    for j in range(k):
        blur += sizes[j] * sizes[j]
    return blur * 1e-30


@inner
def _descend(
    n: int, k: int, fall: float, now: float, eta: Array, y: Array, move: Array, aside: Array,
    v: Array, d: Array,
) -> float:  # fmt: skip
    # Halves the step until the sum falls by a share of what its slope says, rounding aside.
    before = 0.0
    for j in range(k):
        before += v[j] * v[j]
    base, length = now + 0.5 * before, 1.0
    slack = 1e-13 * (1.0 + abs(base))
    for _ in range(60):
        after = 0.0
        for i in range(n):
            aside[i] = eta[i] - length * move[i]
        for j in range(k):
            after += (v[j] - length * d[j]) ** 2
        new = _loss(aside, y, n)
        if new + 0.5 * after <= base - 1e-4 * length * fall + slack:
            break
        length *= 0.5
    for i in range(n):
        eta[i] = aside[i]
    for j in range(k):
        v[j] -= length * d[j]
    return new


@inner
def _loss(eta: Array, y: Array, n: int) -> float:
    total = 0.0
    for i in range(n):
        margin = eta[i] if y[i] == 1.0 else -eta[i]
        total += np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0)
    return total


@inner
def _leave_out(client: int, n: int, k: int, labels: int, room: Room, out: Array) -> None:
    eta, y, t = room.over_rows[0], room.over_rows[1], room.over_columns[1]
    for i in range(n):
        small = np.exp(-abs(eta[i]))
        over = (1.0 if eta[i] >= 0 else small) / (1.0 + small)
        a = form(room.T, room.S, n, k, room.Z[i], t)
        rest = max(1.0 - a * small / (1.0 + small) ** 2, 1e-15)
        moved = eta[i] + a * (over - y[i]) / rest
        margin = moved if y[i] == 1.0 else -moved
        loss = np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0)
        out[client, i] += loss / labels
