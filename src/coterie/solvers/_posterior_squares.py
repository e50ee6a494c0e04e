"""The compiled part of `coterie.solvers.posterior` for regression: no checks.

The rows of a client are divided by the standard deviation of their noise and multiplied by that of
the prior, so G = B'B + I, and the trace in the residual is that of B G^-1 B', which is
tr(I - G^-1). A row left out has the residual e_i / (1 - h_i), h_i = b_i' G^-1 b_i, which is
(M^-1 r)_i / (M^-1)_ii with M = B B' + I: the second form loses nothing where h_i is near 1.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

import numpy as np

from coterie.solvers._posterior_roots import (
    apply,
    apply_root,
    cholesky,
    curvature,
    diagonal,
    form,
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
    blank,
    inner,
    load,
    outer,
    scores,
    spoil,
    write,
)


@outer
def squares_part(rows: Rows, fresh: Rows, law: Law, found: Found, part: int, parts: int) -> None:
    """Put what is asked for of clients part, part + parts, ... into `found`."""
    p = law.center.shape[1]
    longest = rows.counts.max()
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(law.spread)
    B, S, square = np.empty((longest, p)), np.empty((small, p)), np.empty(small * small)
    rest, r, v, t = np.empty(longest), np.empty(longest), np.empty(p), np.empty(p)
    for client in range(part, len(rows.starts), parts):
        n = rows.counts[client]
        share = 1.0 / n if law.per_row and n > 0 else 1.0
        k = load(rows, client, free, law.bias, slots, columns, B)
        if k < 0:
            spoil(client, rows, fresh, found)
            continue
        T = square[: min(n, k) ** 2].reshape(min(n, k), min(n, k))
        _prepare(rows, client, law, share, columns, k, B, rest)
        if len(found.out):
            _leave_out(client, B, rest, n, k, r, v, t, found.out)
        if len(found.D) or len(found.wide):
            _one(B, rest, n, k, T, S, r, v, t)
        if len(found.D):
            _write(client, B, rest, n, k, columns, T, S, v, t, law, share, found)
        if len(found.wide):
            widths(T, S, n, k, slots, fresh, client, 0, law, share, v, t, found.wide)


@inner
def _prepare(
    rows: Rows, client: int, law: Law, share: float, columns: Array, k: int, B: Array, rest: Array
) -> None:
    n, start = rows.counts[client], rows.starts[client]
    scores(rows, client, law.center, 0, law.bias, rest)
    factor = np.sqrt(share) / law.noise
    for i in range(n):
        rest[i] = (rows.y[start + i] - rest[i]) / law.noise
        for j in range(k):
            B[i, j] *= law.spread[0, columns[j]] * factor


@inner
def _one(
    B: Array, rest: Array, n: int, k: int, T: Array, S: Array, r: Array, v: Array, t: Array
) -> None:
    # The deviation into v and the variances into t, in units of the client's prior.
    for i in range(n):
        r[i] = rest[i]
    root(B, n, k, T, S, r, True)
    for j in range(k):
        v[j] = 0.0
    for i in range(n):
        if n >= k:
            for j in range(k):
                v[j] += B[i, j] * r[i]
        else:
            for j in range(k):
                v[j] += S[i, j] * r[i]
    if n >= k:
        apply(T, S, n, k, v, t)
    diagonal(T, S, n, k, t)


@inner
def _write(
    client: int, B: Array, rest: Array, n: int, k: int, columns: Array, T: Array, S: Array,
    v: Array, t: Array, law: Law, share: float, found: Found,
) -> None:  # fmt: skip
    if n == 0:
        blank(client, 0.0, found)
        return
    squares, trace = 0.0, 0.0
    for i in range(n):
        total = rest[i]
        for j in range(k):
            total -= B[i, j] * v[j]
        squares += total * total
    for j in range(k):
        trace += 1.0 - t[j]
    found.R[client] = (squares + trace) / n
    if not np.isfinite(found.R[client]):  # a target, or what is too large for float64
        blank(client, np.nan, found)
        return
    write(client, 0, k, columns, v, t, law, share, found)
    if len(found.K):
        curvature(T, S, n, k, columns, found.K, client)


@inner
def _leave_out(
    client: int, B: Array, rest: Array, n: int, k: int, r: Array, v: Array, t: Array, out: Array
) -> None:
    # Squared residuals of rows left out, in units of the noise.
    if n > 2 * k:
        T, S = np.empty((k, k)), np.empty((0, k))
        _one(B, rest, n, k, T, S, r, v, t)
        for i in range(n):
            total = rest[i]
            for j in range(k):
                total -= B[i, j] * v[j]
            left = total / max(1.0 - form(T, S, n, k, B[i], t), 1e-15)
            out[client, i] = left * left
        return
    M, u = np.empty((n, n)), np.empty(n)
    outer_gram(B, n, k, M)
    cholesky(M, n)
    invert(M, n)
    for i in range(n):
        r[i] = rest[i]
    apply_root(M, n, r, u)
    diagonal(M, M, n, n, u)
    for i in range(n):
        left = r[i] / u[i]
        out[client, i] = left * left
