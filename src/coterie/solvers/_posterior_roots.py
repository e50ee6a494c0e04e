"""The compiled part of `coterie.solvers.posterior` that inverts: no checks.

One client's problem is an array `B` (n, k) of rows in units of the prior, each divided by the
standard deviation of its noise, so that the posterior precision is G = B'B + I. `root` gives G^-1
in a form that all results are read from: for n >= k a matrix T (k, k) with G^-1 = T T', for fewer
rows S (n, k) with G^-1 = I - S'S. Which of the two depends on the client's own rows alone.

numba's cache does not see changes in other files: after a change here, touch the files that import
from it.
"""
# ruff: noqa: PLR0913, PLR0917 - flat arrays, named one by one

import numpy as np

from coterie.solvers._posterior_rows import Array, Law, Rows, inner

_STEEP = 1e8  # times the rounding of a product, what results may lose before rotations are taken
_LEAST = 1e-300  # a variance is never zero
_SWEEPS = 60  # of rotations; ten are many


@inner
def root(B: Array, n: int, k: int, T: Array, S: Array, r: Array, careful: bool) -> None:
    """Return a root of G^-1 = (B'B + I)^-1 and put r, (n,), in its coordinates.

    For n >= k: T (k, k) with G^-1 = T T' (zeros below the diagonal, or full), r untouched. For
    n < k: S (n, k) with G^-1 = I - S'S, and r becomes L^-1 r, so that G^-1 B'r = S'r.
    A triangle loses digits where columns are nearly the same and their prior is wide; `careful`
    then takes rotations, which do not (Demmel and Veselic 1992).
    """
    if n >= k:
        gram(B, n, k, T)
        if cholesky(T, k) > _STEEP and careful:
            _rotated_columns(B, n, k, T)
        else:
            invert(T, k)
        return
    most = 0.0
    for i in range(n):
        size = 0.0
        for j in range(k):
            size += B[i, j] * B[i, j]
        most = max(most, size)
    if most > _STEEP and careful:
        _rotated_rows(B, n, k, S, r)
        return
    outer_gram(B, n, k, T)
    cholesky(T, n)
    _forward(T, n, k, B, S, r)


@inner
def gram(B: Array, n: int, k: int, G: Array) -> None:
    """Put the upper triangle of B'B + I into G, four rows at a time: fewer reads and writes."""
    for a in range(k):
        for b in range(a, k):
            G[a, b] = 0.0
        G[a, a] = 1.0
    whole = n - n % 4
    for i in range(0, whole, 4):
        for a in range(k):
            c0, c1, c2, c3 = B[i, a], B[i + 1, a], B[i + 2, a], B[i + 3, a]
            for b in range(a, k):
                G[a, b] += (c0 * B[i, b] + c1 * B[i + 1, b]) + (c2 * B[i + 2, b] + c3 * B[i + 3, b])
    for i in range(whole, n):
        _add_row(B, i, k, G)


@inner
def _add_row(B: Array, i: int, k: int, G: Array) -> None:
    for a in range(k):
        share = B[i, a]
        for b in range(a, k):
            G[a, b] += share * B[i, b]


@inner
def outer_gram(B: Array, n: int, k: int, G: Array) -> None:
    """Put the upper triangle of B B' + I into G."""
    flipped = np.empty((k, n))
    for i in range(n):
        for j in range(k):
            flipped[j, i] = B[i, j]
    gram(flipped, k, n, G)


@inner
def cholesky(G: Array, k: int) -> float:
    """Factor the upper triangle into U'U, in place, and give the largest loss of digits.

    No pivot of I + B'B is below 1: one that is has been lost in rounding.
    """
    steepest = 1.0
    for a in range(1, k):
        G[a, 0] = G[a, a]
    for a in range(k):
        pivot = G[a, a]
        pivot = max(pivot, 1.0)
        if a > 0:
            steepest = max(steepest, G[a, 0] / pivot)
        factor = 1.0 / np.sqrt(pivot)
        G[a, a] = pivot * factor
        for b in range(a + 1, k):
            G[a, b] *= factor
        for c in range(a + 1, k):
            share = G[a, c]
            for b in range(c, k):
                G[c, b] -= share * G[a, b]
    return steepest


@inner
def invert(U: Array, k: int) -> None:
    """Put U^-1 in place of U, zeros below the diagonal.

    From the last row up: row a of it is (e_a - sum over c > a of U[a, c] times row c) / U[a, a].
    """
    for a in range(k - 1, -1, -1):
        factor = 1.0 / U[a, a]
        for c in range(a + 1, k):
            U[c, a] = -factor * U[a, c]  # kept where zeros belong
            U[a, c] = 0.0
        for c in range(a + 1, k):
            share = U[c, a]
            U[c, a] = 0.0
            for b in range(c, k):
                U[a, b] += share * U[c, b]
        U[a, a] = factor


@inner
def _forward(U: Array, n: int, k: int, B: Array, S: Array, r: Array) -> None:
    # S = U'^-1 B and r <- U'^-1 r.
    for i in range(n):
        for j in range(k):
            S[i, j] = B[i, j]
        for c in range(i):
            share = U[c, i]
            for j in range(k):
                S[i, j] -= share * S[c, j]
            r[i] -= share * r[c]
        factor = 1.0 / U[i, i]
        for j in range(k):
            S[i, j] *= factor
        r[i] *= factor


@inner
def _rotated_columns(B: Array, n: int, k: int, T: Array) -> None:
    # B V with orthogonal columns: G^-1 = V (1 + |column|^2)^-1 V'.
    W = np.zeros((k, n + k))
    for j in range(k):
        for i in range(n):
            W[j, i] = B[i, j]
        W[j, n + j] = 1.0
    _rotate(W, n)
    for c in range(k):
        size = 1.0
        for i in range(n):
            size += W[c, i] * W[c, i]
        factor = 1.0 / np.sqrt(size)
        for j in range(k):
            T[j, c] = W[c, n + j] * factor


@inner
def _rotated_rows(B: Array, n: int, k: int, S: Array, r: Array) -> None:
    # Q'B with orthogonal rows: G^-1 = I - B'Q (1 + |row|^2)^-1 Q'B.
    W = np.empty((n, k + 1))
    for i in range(n):
        for j in range(k):
            W[i, j] = B[i, j]
        W[i, k] = r[i]
    _rotate(W, k)
    for i in range(n):
        size = 1.0
        for j in range(k):
            size += W[i, j] * W[i, j]
        factor = 1.0 / np.sqrt(size)
        for j in range(k):
            S[i, j] = W[i, j] * factor
        r[i] = W[i, k] * factor


@inner
def _rotate(W: Array, length: int) -> None:
    # One-sided Jacobi: rotates rows of W until their first `length` numbers are orthogonal.
    for _ in range(_SWEEPS):
        worst = 0.0
        for a in range(len(W)):
            for b in range(a + 1, len(W)):
                worst = max(worst, _turn(W, a, b, length))
        if not worst > 1e-15:
            return


@inner
def _turn(W: Array, a: int, b: int, length: int) -> float:
    left, right, both = 0.0, 0.0, 0.0
    for i in range(length):
        left += W[a, i] * W[a, i]
        right += W[b, i] * W[b, i]
        both += W[a, i] * W[b, i]
    bound = np.sqrt(left) * np.sqrt(right)
    if not abs(both) > 1e-15 * bound:
        return 0.0
    ratio = (right - left) / (2.0 * both)
    tangent = (1.0 if ratio >= 0 else -1.0) / (abs(ratio) + np.sqrt(1.0 + ratio * ratio))
    cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
    sine = cosine * tangent
    for i in range(W.shape[1]):
        x, y = W[a, i], W[b, i]
        W[a, i] = cosine * x - sine * y
        W[b, i] = sine * x + cosine * y
    # Two columns of rounding alone are no reason to go on.
    return abs(both) / bound if left > 1e-20 and right > 1e-20 else 0.0


@inner
def apply(T: Array, S: Array, n: int, k: int, g: Array, t: Array) -> None:
    """Replace g by G^-1 g; t is scratch of at least min(n, k)."""
    if n >= k:
        apply_root(T, k, g, t)
        return
    for i in range(n):
        total = 0.0
        for j in range(k):
            total += S[i, j] * g[j]
        t[i] = total
    for i in range(n):
        share = t[i]
        for j in range(k):
            g[j] -= share * S[i, j]


@inner
def apply_root(T: Array, k: int, g: Array, t: Array) -> None:
    """Replace g by T T' g; t is scratch of at least k."""
    _back(T, k, g, t)
    for j in range(k):
        total = 0.0
        for c in range(k):
            total += T[j, c] * t[c]
        g[j] = total


@inner
def _back(T: Array, k: int, g: Array, t: Array) -> None:
    # t = T'g.
    for c in range(k):
        t[c] = 0.0
    for j in range(k):
        share = g[j]
        for c in range(k):
            t[c] += T[j, c] * share


@inner
def diagonal(T: Array, S: Array, n: int, k: int, out: Array) -> None:
    """Return the diagonal of G^-1."""
    if n >= k:
        for j in range(k):
            total = 0.0
            for c in range(k):
                total += T[j, c] * T[j, c]
            out[j] = min(total, 1.0)
        return
    for j in range(k):
        out[j] = 1.0
    for i in range(n):
        for j in range(k):
            out[j] -= S[i, j] * S[i, j]
    for j in range(k):
        out[j] = max(out[j], _LEAST)


@inner
def curvature(T: Array, S: Array, n: int, k: int, columns: Array, K: Array, client: int) -> None:
    """Put I - G^-1 of the columns in use into K[client], which holds zeros."""
    for a in range(k):
        for b in range(a + 1):
            total = 0.0
            if n >= k:
                for c in range(k):
                    total -= T[a, c] * T[b, c]
                total += 1.0 if a == b else 0.0
            else:
                for i in range(n):
                    total += S[i, a] * S[i, b]
            K[client, columns[a], columns[b]] = total
            K[client, columns[b], columns[a]] = total


@inner
def form(T: Array, S: Array, n: int, k: int, z: Array, t: Array) -> float:
    """Return z' G^-1 z; t is scratch of at least k."""
    total = 0.0
    if n >= k:
        _back(T, k, z, t)
        for c in range(k):
            total += t[c] * t[c]
        return total
    for j in range(k):
        total += z[j] * z[j]
    for i in range(n):
        part = 0.0
        for j in range(k):
            part += S[i, j] * z[j]
        total -= part * part
    return max(total, 0.0)


@inner
def widths(
    T: Array, S: Array, n: int, k: int, slots: Array, fresh: Rows, client: int, label: int,
    law: Law, share: float, z: Array, t: Array, wide: Array,
) -> None:  # fmt: skip
    """Put the standard deviations of a client's fresh rows' scores into `wide`."""
    X, indptr, indices, data = fresh.X, fresh.indptr, fresh.indices, fresh.data
    size, root_share = law.spread.shape[1], np.sqrt(share)
    for i in range(fresh.counts[client]):
        row, beyond = fresh.starts[client] + i, 0.0
        for j in range(k):
            z[j] = 0.0
        first, last = 0, size - law.bias
        if len(indptr) > 0:
            first, last = indptr[row], indptr[row + 1]
        for entry in range(first, last + law.bias):
            if entry == last:
                column, x = size - 1, 1.0
            elif len(indptr) > 0:
                column, x = np.int64(indices[entry]), np.float64(data[entry])
            else:
                column, x = np.int64(entry), np.float64(X[row, entry])
            x *= law.spread[label, column] * root_share
            if slots[column] >= 0:
                z[slots[column]] += x
            else:
                beyond += x * x  # the client's own rows say nothing of it
        wide[client, i, label] = np.sqrt(beyond + form(T, S, n, k, z, t))
