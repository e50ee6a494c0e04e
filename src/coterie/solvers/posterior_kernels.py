"""The compiled part of `coterie.solvers.posterior`: no checks.

One client's problem is an array `B` (n, k) of rows in units of the prior, each divided by the
standard deviation of its noise, so that the posterior precision is G = B'B + I. `root` returns G^-1
in a form from which all results are read: for n >= k a matrix T (k, k) with G^-1 = T T', for fewer
rows S (n, k) with G^-1 = I - S'S. The client's own rows decide which.

A client's rows are copied into a dense workspace of its thread, which is larger than needed. No sum
may be reordered: compilers keep a fast and a slow version of a loop and choose by memory alignment,
which depends on other clients, so both must agree to the last bit. Inner loops therefore run along
rows of memory, which still vectorises them. For the same reason LAPACK is not used: torch's batched
products, Cholesky factors and inverses change in the last bit with a client's position in a batch
and with padding (seen for 5, 13, 21 and 33 columns).

Regression: G as above; the trace in the residual tr(B G^-1 B') = tr(I - G^-1). A row left out has
the residual e_i / (1 - h_i), h_i = b_i' G^-1 b_i, which is (M^-1 r)_i / (M^-1)_ii with
M = B B' + I: the second form is accurate where h_i is near 1.

Binary and multilabel: each output minimises sum_i log(1 + exp(-s_i eta_i)) + |v|^2 / 2, s_i = +-1,
eta = off + Z v, by Newton's method with step halving. The objective is 1-strongly convex, so the
mode is about as far from v as the Newton decrement (g' G^-1 g)^(1/2). Iterations stop when that is
tiny, or as small as the rounding of the gradient.

Multiclass: minimises sum_i (log sum_k exp eta_ik - eta_i,y_i) + |v|^2 / 2 over v (k, o),
eta = off + X (s v), with s the prior's standard deviations, by Newton's method: directions by
conjugate gradients, step halving. If a direction took as long as a factorisation would, the blocks
of the classes, Z_k' diag(q_k (1 - q_k)) Z_k + I, precondition the next. Arrays over columns and
classes have classes side by side.

One file holds all kernels because numba's cache does not see changes in other files.
"""
# ruff: noqa: PLR0913, PLR0917 - kernels take flat arrays, one argument each

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.kernels import compiled, linked

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
_STEEP = 1e8  # times the rounding of a product: accuracy loss from which rotations are used
_LEAST = 1e-300  # a variance is never zero
_SWEEPS = 60  # of rotations; ten are many
_STEPS = 200  # Newton steps after which a client gets NaN
_TINY = 1e-10  # the decrement at a logistic mode, relative to the larger of 1 and |v|
_TINY_SOFTMAX = 1e-9
_INNER = 1000  # products of one Newton step of softmax
_PAYS = 3  # blocks of this many columns are factored in about the time of one product
# Softmax arrays over rows and classes, and over columns and classes.
_ETA, _P, _MOVE, _ASIDE, _WEIGHT = 0, 1, 2, 3, 4
_V, _G, _D, _SCALE, _REST, _WAY, _BACK, _DONE = 0, 1, 2, 3, 4, 5, 6, 7


class Rows(NamedTuple):
    """Dense rows `X` or CSR arrays, the unused ones empty; targets, and first rows of clients."""

    X: Array
    indptr: Array
    indices: Array
    data: Array
    y: Array
    starts: Array
    counts: Array


class Normal(NamedTuple):
    """The prior (o, p): means and standard deviations, noise of a row, and two flags."""

    center: Array
    std: Array
    noise: float
    per_row: bool
    bias: bool


class Found(NamedTuple):
    """Results; those not requested are empty.

    Deviations and variances (c, o, p), residuals (c,), curvatures (c, p, p), losses of rows left
    out (c, longest), standard deviations of scores (c, longest, o); faults (c,) of targets.
    """

    D: Array
    V: Array
    R: Array
    K: Array
    out: Array
    wide: Array
    fault: Array


def inner(function: F) -> F:
    """Compile a function of one thread, for other kernels only: Python cannot call it."""
    return linked(error_model="numpy")(function)


def outer(function: F) -> F:
    """Compile the loop of a thread over its clients, without the interpreter lock."""
    return compiled(nogil=True, error_model="numpy")(function)


@inner
def dot(left: Array, right: Array, k: int) -> float:
    """Return the product of the first k entries, summed in order."""
    total = 0.0
    for j in range(k):
        total += left[j] * right[j]
    return total


# Rows are passed as a matrix and a number: a view of each would cost as much as a short product.


@inner
def dot_row(A: Array, i: int, right: Array, k: int) -> float:
    """Return the product of row i and a vector."""
    total = 0.0
    for j in range(k):
        total += A[i, j] * right[j]
    return total


@inner
def square_row(A: Array, i: int, k: int) -> float:
    """Return the squared norm of row i."""
    total = 0.0
    for j in range(k):
        total += A[i, j] * A[i, j]
    return total


@inner
def anywhere(std: Array) -> Array:
    """Return which columns have a positive variance in any output."""
    free = np.zeros(std.shape[1], np.bool_)
    for label in range(std.shape[0]):
        for column in range(std.shape[1]):
            free[column] |= std[label, column] > 0
    return free


@inner
def largest(counts: Array) -> int:
    """Return the largest count; numba's `max` takes a third of a second to compile."""
    most = 0
    for count in counts:
        most = max(most, count)
    return most


@inner
def copy(source: Array, target: Array, k: int) -> None:
    """Copy the first k entries; an assignment to a slice takes half a second to compile."""
    for j in range(k):
        target[j] = source[j]


@inner
def load(
    rows: Rows, client: int, free: Array, bias: bool, slots: Array, columns: Array, R: Array
) -> int:
    """Copy the free columns of a client's rows into `R` (for CSR rows, those that occur).

    `columns` receives their numbers and `slots` their places, -1 elsewhere; the bias is last.

    Returns:
        The number of columns, -1 for rows with a NaN, an infinity or a broken CSR row.
    """
    start, n = rows.starts[client], rows.counts[client]
    width = len(free) - bias
    is_sparse = len(rows.indptr) > 0
    if is_sparse and not _mark(rows.indptr, rows.indices, start, n, slots, width):
        return -1
    k = int(np.int64(0))  # with 0, numba compiles what is called with k once more, for 0
    for column in range(len(free)):
        here = free[column] and n > 0
        here &= not is_sparse or column == width or slots[column] == 0
        slots[column] = k if here else -1
        if here:
            columns[k] = column
            k += 1
    if is_sparse:
        good = _csr_rows(rows.indptr, rows.indices, rows.data, start, n, slots, k, R)
    else:
        good = _dense_rows(rows.X, start, n, width, columns, k, R)
    if bias and slots[width] >= 0:
        R[:n, slots[width]] = 1.0
    return k if good else -1


@inner
def _mark(indptr: Array, indices: Array, start: int, n: int, slots: Array, width: int) -> bool:
    slots[:width] = -1
    for row in range(start, start + n):
        if not 0 <= indptr[row] <= indptr[row + 1] <= len(indices):
            return False
        for entry in range(indptr[row], indptr[row + 1]):
            if not 0 <= indices[entry] < width:
                return False
            slots[indices[entry]] = 0
    return True


@inner
def _dense_rows(X: Array, start: int, n: int, width: int, columns: Array, k: int, R: Array) -> bool:
    total = 0.0  # includes fixed columns: a NaN there enters the scores
    used = k - 1 if k > 0 and columns[k - 1] == width else k
    for i in range(n):
        for column in range(width):
            total += 0.0 * X[start + i, column]
        for j in range(used):
            R[i, j] = X[start + i, columns[j]]
    return total == 0.0


@inner
def _csr_rows(
    indptr: Array, indices: Array, data: Array, start: int, n: int, slots: Array, k: int, R: Array
) -> bool:
    total = 0.0
    for i in range(n):
        R[i, :k] = 0.0
        for entry in range(indptr[start + i], indptr[start + i + 1]):
            total += 0.0 * data[entry]
            if slots[indices[entry]] >= 0:
                R[i, slots[indices[entry]]] += data[entry]
    return total == 0.0


@inner
def scores(rows: Rows, client: int, W: Array, label: int, bias: bool, out: Array) -> None:
    """Write x . W[label] of a client's rows into `out`, over all columns."""
    X, indptr, indices, data = rows.X, rows.indptr, rows.indices, rows.data
    for i in range(rows.counts[client]):
        row = rows.starts[client] + i
        total = W[label, W.shape[1] - 1] if bias else 0.0
        if len(indptr) > 0:
            for entry in range(indptr[row], indptr[row + 1]):
                total += data[entry] * W[label, indices[entry]]
        else:
            for column in range(W.shape[1] - bias):
                total += X[row, column] * W[label, column]
        out[i] = total


@inner
def blank(client: int, value: float, found: Found) -> None:
    """Write the results of a client with no rows (0) or invalid rows (NaN)."""
    if len(found.D):
        found.D[client] = value
        found.V[client] = 1.0 + value
        found.R[client] = 1.0 + value
    if len(found.K):
        found.K[client] = value


@inner
def spoil(client: int, rows: Rows, fresh: Rows, found: Found) -> None:
    """Write NaN for all results of a client with invalid rows."""
    blank(client, np.nan, found)
    if len(found.out):
        found.out[client, : rows.counts[client]] = np.nan
    if len(found.wide):
        found.wide[client, : fresh.counts[client]] = np.nan


@inner
def write(
    client: int, label: int, k: int, columns: Array, v: Array, t: Array, prior: Normal,
    share: float, found: Found,
) -> None:  # fmt: skip
    """Write deviation and variances; the client's prior variances are `share` of those given.

    A column that does not occur keeps its prior.
    """
    found.D[client, label] = 0.0
    for column in range(prior.std.shape[1]):
        found.V[client, label, column] = share if prior.std[label, column] > 0 else 1.0
    for j in range(k):
        if prior.std[label, columns[j]] > 0:
            found.D[client, label, columns[j]] = v[j] * np.sqrt(share)
            found.V[client, label, columns[j]] = t[j] * share


@inner
def root(B: Array, n: int, k: int, T: Array, S: Array, r: Array, careful: bool) -> None:
    """Compute a root of G^-1 = (B'B + I)^-1 and transform r, (n,), to its coordinates.

    For n >= k: T (k, k) with G^-1 = T T' (zeros below the diagonal, or full); r is unchanged. For
    n < k: S (n, k) with G^-1 = I - S'S, and r becomes L^-1 r, so that G^-1 B'r = S'r. Cholesky
    loses digits if columns are nearly equal and their prior is wide; `careful` then uses Jacobi
    rotations, which do not (Demmel and Veselic 1992).
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
        most = max(most, square_row(B, i, k))
    if most > _STEEP and careful:
        _rotated_rows(B, n, k, S, r)
        return
    outer_gram(B, n, k, T)
    cholesky(T, n)
    _forward(T, n, k, B, S, r)


@inner
def gram(B: Array, n: int, k: int, G: Array) -> None:
    """Write the upper triangle of B'B + I into G, four rows at a time: fewer memory accesses."""
    for a in range(k):
        G[a, a:k] = 0.0
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
    """Write the upper triangle of B B' + I into G."""
    turned = np.empty((k, n))
    for i in range(n):
        for j in range(k):
            turned[j, i] = B[i, j]
    gram(turned, k, n, G)


@inner
def cholesky(G: Array, k: int) -> float:
    """Factor the upper triangle into U'U in place; return the largest loss of accuracy.

    Pivots of I + B'B are at least 1; a smaller one is rounding.
    """
    steepest = 1.0
    for a in range(1, k):
        G[a, 0] = G[a, a]
    for a in range(k):
        pivot = max(G[a, a], 1.0)
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
    """Replace U by U^-1, zeros below the diagonal.

    From the last row up: row a is (e_a - sum over c > a of U[a, c] times row c) / U[a, a].
    """
    for a in range(k - 1, -1, -1):
        factor = 1.0 / U[a, a]
        for c in range(a + 1, k):
            U[c, a] = -factor * U[a, c]  # stored below the diagonal for now
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
    # One-sided Jacobi: rotate rows of W until their first `length` entries are orthogonal.
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
    # Two columns of pure rounding do not count.
    return abs(both) / bound if left > 1e-20 and right > 1e-20 else 0.0


@inner
def apply(T: Array, S: Array, n: int, k: int, g: Array, t: Array) -> None:
    """Replace g by G^-1 g; t is scratch of at least min(n, k)."""
    if n >= k:
        apply_root(T, k, g, t)
        return
    for i in range(n):
        t[i] = dot_row(S, i, g, k)
    for i in range(n):
        share = t[i]
        for j in range(k):
            g[j] -= share * S[i, j]


@inner
def apply_root(T: Array, k: int, g: Array, t: Array) -> None:
    """Replace g by T T' g; t is scratch of at least k."""
    _back(T, k, g, t)
    for j in range(k):
        g[j] = dot_row(T, j, t, k)


@inner
def _back(T: Array, k: int, g: Array, t: Array) -> None:
    # t = T'g.
    t[:k] = 0.0
    for j in range(k):
        share = g[j]
        for c in range(k):
            t[c] += T[j, c] * share


@inner
def diagonal(T: Array, S: Array, n: int, k: int, out: Array) -> None:
    """Return the diagonal of G^-1."""
    if n >= k:
        for j in range(k):
            out[j] = min(square_row(T, j, k), 1.0)
        return
    out[:k] = 1.0
    for i in range(n):
        for j in range(k):
            out[j] -= S[i, j] * S[i, j]
    for j in range(k):
        out[j] = max(out[j], _LEAST)


@inner
def curvature(T: Array, S: Array, n: int, k: int, columns: Array, K: Array, client: int) -> None:
    """Write I - G^-1 of the columns in use into K[client], which holds zeros."""
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
    if n >= k:
        _back(T, k, z, t)
        return dot(t, t, k)
    total = dot(z, z, k)
    for i in range(n):
        part = dot_row(S, i, z, k)
        total -= part * part
    return max(total, 0.0)


@inner
def widths(
    T: Array, S: Array, n: int, k: int, slots: Array, fresh: Rows, client: int, label: int,
    prior: Normal, share: float, z: Array, t: Array, wide: Array,
) -> None:  # fmt: skip
    """Write the standard deviations of the scores of a client's fresh rows into `wide`."""
    X, indptr, indices, data = fresh.X, fresh.indptr, fresh.indices, fresh.data
    size, root_share = prior.std.shape[1], np.sqrt(share)
    for i in range(fresh.counts[client]):
        row, beyond = fresh.starts[client] + i, 0.0
        z[:k] = 0.0
        first, last = 0, size - prior.bias
        if len(indptr) > 0:
            first, last = indptr[row], indptr[row + 1]
        for entry in range(first, last + prior.bias):
            if entry == last:
                column, x = size - 1, 1.0
            elif len(indptr) > 0:
                column, x = np.int64(indices[entry]), np.float64(data[entry])
            else:
                column, x = np.int64(entry), np.float64(X[row, entry])
            x *= prior.std[label, column] * root_share
            if slots[column] >= 0:
                z[slots[column]] += x
            else:
                beyond += x * x  # prior variance: the column is not in the client's own rows
        wide[client, i, label] = np.sqrt(beyond + form(T, S, n, k, z, t))


@outer
def squares_part(
    rows: Rows, fresh: Rows, prior: Normal, found: Found, part: int, parts: int
) -> None:
    """Write the requested results of clients part, part + parts, ... into `found`."""
    p = prior.center.shape[1]
    longest = largest(rows.counts)
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(prior.std)
    B, S, square = np.empty((longest, p)), np.empty((small, p)), np.empty(small * small)
    rest, r, v, t = np.empty(longest), np.empty(longest), np.empty(p), np.empty(p)
    for client in range(part, len(rows.starts), parts):
        n = rows.counts[client]
        share = 1.0 / n if prior.per_row and n > 0 else 1.0
        k = load(rows, client, free, prior.bias, slots, columns, B)
        if k < 0:
            spoil(client, rows, fresh, found)
            continue
        T = square[: min(n, k) ** 2].reshape(min(n, k), min(n, k))
        _prepare_squares(rows, client, prior, share, columns, k, B, rest)
        if len(found.out):
            _leave_out_squares(client, B, rest, n, k, r, v, t, found.out)
        if len(found.D) or len(found.wide):
            _one_squares(B, rest, n, k, T, S, r, v, t)
        if len(found.D):
            _write_squares(client, B, rest, n, k, columns, T, S, v, t, prior, share, found)
        if len(found.wide):
            widths(T, S, n, k, slots, fresh, client, 0, prior, share, v, t, found.wide)


@inner
def _prepare_squares(
    rows: Rows, client: int, prior: Normal, share: float, columns: Array, k: int, B: Array,
    rest: Array,
) -> None:  # fmt: skip
    n, start = rows.counts[client], rows.starts[client]
    scores(rows, client, prior.center, 0, prior.bias, rest)
    factor = np.sqrt(share) / prior.noise
    for i in range(n):
        rest[i] = (rows.y[start + i] - rest[i]) / prior.noise
        for j in range(k):
            B[i, j] *= prior.std[0, columns[j]] * factor


@inner
def _one_squares(
    B: Array, rest: Array, n: int, k: int, T: Array, S: Array, r: Array, v: Array, t: Array
) -> None:
    # The deviation into v and the variances into t, in units of the client's prior.
    copy(rest, r, n)
    v[:k] = 0.0
    root(B, n, k, T, S, r, True)
    rows = B if n >= k else S
    for i in range(n):
        for j in range(k):
            v[j] += rows[i, j] * r[i]
    if n >= k:
        apply(T, S, n, k, v, t)
    diagonal(T, S, n, k, t)


@inner
def _residual(rest: Array, B: Array, i: int, v: Array, k: int) -> float:
    total = rest[i]
    for j in range(k):
        total -= B[i, j] * v[j]
    return float(total)


@inner
def _write_squares(
    client: int, B: Array, rest: Array, n: int, k: int, columns: Array, T: Array, S: Array,
    v: Array, t: Array, prior: Normal, share: float, found: Found,
) -> None:  # fmt: skip
    if n == 0:
        blank(client, 0.0, found)
        return
    squares, trace = 0.0, 0.0
    for i in range(n):
        total = _residual(rest, B, i, v, k)
        squares += total * total
    for j in range(k):
        trace += 1.0 - t[j]
    found.R[client] = (squares + trace) / n
    if not np.isfinite(found.R[client]):  # a target that is not finite, or overflow
        blank(client, np.nan, found)
        return
    write(client, 0, k, columns, v, t, prior, share, found)
    if len(found.K):
        curvature(T, S, n, k, columns, found.K, client)


@inner
def _leave_out_squares(
    client: int, B: Array, rest: Array, n: int, k: int, r: Array, v: Array, t: Array, out: Array
) -> None:
    # Squared residuals of rows left out, in units of the noise.
    if n > 2 * k:
        T, S = np.empty((k, k)), np.empty((0, k))
        _one_squares(B, rest, n, k, T, S, r, v, t)
        for i in range(n):
            left = _residual(rest, B, i, v, k) / max(1.0 - form(T, S, n, k, B[i], t), 1e-15)
            out[client, i] = left * left
        return
    M, u = np.empty((n, n)), np.empty(n)
    outer_gram(B, n, k, M)
    cholesky(M, n)
    invert(M, n)
    copy(rest, r, n)
    apply_root(M, n, r, u)
    diagonal(M, M, n, n, u)
    for i in range(n):
        left = r[i] / u[i]
        out[client, i] = left * left


class Workspace(NamedTuple):
    """Buffers of a thread: rows (n, k), roots, vectors over rows and over columns."""

    X: Array
    Z: Array
    B: Array
    S: Array
    T: Array
    over_rows: Array
    over_columns: Array


@outer
def logistic_part(
    rows: Rows, fresh: Rows, prior: Normal, found: Found, part: int, parts: int
) -> None:
    """Write the requested results of clients part, part + parts, ... into `found`."""
    p = prior.center.shape[1]
    longest = largest(rows.counts)
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(prior.std)
    X, Z, B = np.empty((longest, p)), np.empty((longest, p)), np.empty((longest, p))
    S, square = np.empty((small, p)), np.empty(small * small)
    over_rows, over_columns = np.empty((6, longest)), np.empty((4, p))
    for client in range(part, len(rows.starts), parts):
        k = load(rows, client, free, prior.bias, slots, columns, X)
        m = min(rows.counts[client], max(k, 0))
        T = square[: m * m].reshape(m, m)
        work = Workspace(X, Z, B, S, T, over_rows, over_columns)
        good = k >= 0
        for label in range(prior.center.shape[0]):
            if good:
                good = _label_logistic(
                    rows, fresh, prior, found, client, label, k, slots, columns, work
                )
        if not good:
            spoil(client, rows, fresh, found)


@inner
def _label_logistic(
    rows: Rows, fresh: Rows, prior: Normal, found: Found, client: int, label: int, k: int,
    slots: Array, columns: Array, work: Workspace,
) -> bool:  # fmt: skip
    n = rows.counts[client]
    share = 1.0 / n if prior.per_row and n > 0 else 1.0
    v, t = work.over_columns[0], work.over_columns[1]
    if not _prepare_logistic(rows, client, label, prior, share, columns, k, work):
        found.fault[client] = 1
        return False
    if not _newton_logistic(n, k, work):
        return False
    root(work.B, n, k, work.T, work.S, work.over_rows[5], True)
    if len(found.D):
        diagonal(work.T, work.S, n, k, t)
        write(client, label, k, columns, v, t, prior, share, found)
        found.R[client] = 1.0
    if len(found.K):
        curvature(work.T, work.S, n, k, columns, found.K, client)
    if len(found.out):
        _leave_out_logistic(client, n, k, prior.center.shape[0], work, found.out)
    if len(found.wide):
        widths(
            work.T, work.S, n, k, slots, fresh, client, label, prior, share,
            work.over_columns[2], t, found.wide,
        )  # fmt: skip
    return True


@inner
def _prepare_logistic(
    rows: Rows, client: int, label: int, prior: Normal, share: float, columns: Array, k: int,
    work: Workspace,
) -> bool:  # fmt: skip
    # Rows in units of the prior and scores of its centre; False if a target is not a class.
    eta, y = work.over_rows[0], work.over_rows[1]
    scores(rows, client, prior.center, label, prior.bias, eta)
    good = True
    for i in range(rows.counts[client]):
        y[i] = rows.y[rows.starts[client] + i, label]
        good &= y[i] == 0.0 or y[i] == 1.0 or not np.isfinite(y[i])
        for j in range(k):
            work.Z[i, j] = work.X[i, j] * prior.std[label, columns[j]] * np.sqrt(share)
    return good


@inner
def _newton_logistic(n: int, k: int, work: Workspace) -> bool:
    # The mode into v, its scores into eta; B holds the weighted rows. False if not found.
    eta, y, move, aside = work.over_rows[0], work.over_rows[1], work.over_rows[2], work.over_rows[3]
    v, g, d = work.over_columns[0], work.over_columns[2], work.over_columns[3]
    v[:k] = 0.0
    now = _loss_logistic(eta, y, n)
    for _ in range(_STEPS):
        rounding = _gradient_logistic(n, k, work)
        copy(g, d, k)
        root(work.B, n, k, work.T, work.S, work.over_rows[5], False)
        apply(work.T, work.S, n, k, d, work.over_columns[1])
        fall, size = dot(g, d, k), dot(v, v, k)
        if not np.isfinite(fall):
            return False
        if fall <= max(_TINY * _TINY * max(1.0, size), rounding):
            return True
        for i in range(n):
            move[i] = dot_row(work.Z, i, d, k)
        now = _descend_logistic(n, k, fall, now, eta, y, move, aside, v, d)
    return False


@inner
def _gradient_logistic(n: int, k: int, work: Workspace) -> float:
    # Write the gradient into g and the weighted rows into B; return its squared rounding error.
    eta, y = work.over_rows[0], work.over_rows[1]
    v, g, sizes = work.over_columns[0], work.over_columns[2], work.over_columns[3]
    g[:k], sizes[:k] = v[:k], np.abs(v[:k])
    for i in range(n):
        small = np.exp(-abs(eta[i]))
        over = (1.0 if eta[i] >= 0 else small) / (1.0 + small)
        under = (small if eta[i] >= 0 else 1.0) / (1.0 + small)
        residual = -under if y[i] == 1.0 else over * (1.0 + 0.0 * y[i])
        weight = np.sqrt(over * under)
        for j in range(k):
            g[j] += residual * work.Z[i, j]
            sizes[j] += abs(residual * work.Z[i, j])
            work.B[i, j] = weight * work.Z[i, j]
    return dot(sizes, sizes, k) * 1e-30


@inner
def _descend_logistic(
    n: int, k: int, fall: float, now: float, eta: Array, y: Array, move: Array, aside: Array,
    v: Array, d: Array,
) -> float:  # fmt: skip
    # Halve the step until the objective decreases sufficiently (Armijo), up to rounding.
    base, length = now + 0.5 * dot(v, v, k), 1.0
    slack = 1e-13 * (1.0 + abs(base))
    for _ in range(60):
        after = 0.0
        for i in range(n):
            aside[i] = eta[i] - length * move[i]
        for j in range(k):
            after += (v[j] - length * d[j]) ** 2
        new = _loss_logistic(aside, y, n)
        if new + 0.5 * after <= base - 1e-4 * length * fall + slack:
            break
        length *= 0.5
    copy(aside, eta, n)
    for j in range(k):
        v[j] -= length * d[j]
    return new


@inner
def _loss_logistic(eta: Array, y: Array, n: int) -> float:
    total = 0.0
    for i in range(n):
        total += _row_logistic(eta[i], y[i])
    return total


@inner
def _row_logistic(eta: float, y: float) -> float:
    margin = eta if y == 1.0 else -eta
    return float(np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0))


@inner
def _leave_out_logistic(
    client: int, n: int, k: int, labels: int, work: Workspace, out: Array
) -> None:
    eta, y, t = work.over_rows[0], work.over_rows[1], work.over_columns[1]
    for i in range(n):
        small = np.exp(-abs(eta[i]))
        over = (1.0 if eta[i] >= 0 else small) / (1.0 + small)
        a = form(work.T, work.S, n, k, work.Z[i], t)
        rest = max(1.0 - a * small / (1.0 + small) ** 2, 1e-15)
        out[client, i] += _row_logistic(eta[i] + a * (over - y[i]) / rest, y[i]) / labels


class ClassWorkspace(NamedTuple):
    """Buffers of a thread: rows, roots per class, and arrays (n, o) and (k, o) by index."""

    X: Array
    B: Array
    S: Array
    T: Array
    roots: Array
    wide: Array
    tall: Array
    vectors: Array
    classes: Array


@outer
def softmax_part(
    rows: Rows, fresh: Rows, prior: Normal, found: Found, part: int, parts: int
) -> None:
    """Write the requested results of clients part, part + parts, ... into `found`."""
    o, p = prior.center.shape
    longest = largest(rows.counts)
    small = min(longest, p)
    slots, columns, free = np.empty(p, np.int64), np.empty(p, np.int64), anywhere(prior.std)
    X, B, S = np.empty((longest, p)), np.empty((longest, p)), np.empty((small, p))
    squares, wide = np.empty((o + 1) * small * small), np.empty((5, longest, o))
    tall, vectors = np.empty((8, p, o)), np.empty((2, max(longest, p)))
    classes = np.empty(longest, np.int64)
    for client in range(part, len(rows.starts), parts):
        k = load(rows, client, free, prior.bias, slots, columns, X)
        m = min(rows.counts[client], max(k, 0))
        roots = squares[: (o + 1) * m * m].reshape(o + 1, m, m)
        work = ClassWorkspace(X, B, S, roots[o], roots, wide, tall, vectors, classes)
        if k < 0 or not _client_softmax(rows, fresh, prior, found, client, k, slots, columns, work):
            spoil(client, rows, fresh, found)


@inner
def _client_softmax(
    rows: Rows, fresh: Rows, prior: Normal, found: Found, client: int, k: int, slots: Array,
    columns: Array, work: ClassWorkspace,
) -> bool:  # fmt: skip
    n, o = rows.counts[client], prior.center.shape[0]
    share = 1.0 / n if prior.per_row and n > 0 else 1.0
    if not _prepare_softmax(rows, client, prior, share, columns, k, work):
        found.fault[client] = 1
        return False
    if not _newton_softmax(n, k, o, work):
        return False
    for label in range(o):
        _label_softmax(fresh, prior, found, client, label, n, k, share, slots, columns, work)
    if len(found.out):
        for i in range(n):
            found.out[client, i] = _row_loss(work.wide[_ASIDE], i, work.classes[i])
    return True


@inner
def _label_softmax(
    fresh: Rows, prior: Normal, found: Found, client: int, label: int, n: int, k: int, share: float,
    slots: Array, columns: Array, work: ClassWorkspace,
) -> None:  # fmt: skip
    # Results of the block of a class at the mode.
    g, t = work.vectors[0], work.vectors[1]
    _weighted(n, k, label, work)
    root(work.B, n, k, work.T, work.S, g, True)
    if len(found.D):
        diagonal(work.T, work.S, n, k, t)
        g[:k] = work.tall[_V, :k, label]
        write(client, label, k, columns, g, t, prior, share, found)
    if len(found.out):
        _shift(n, k, label, work)
    if len(found.wide):
        widths(work.T, work.S, n, k, slots, fresh, client, label, prior, share, g, t, found.wide)


@inner
def _prepare_softmax(
    rows: Rows, client: int, prior: Normal, share: float, columns: Array, k: int,
    work: ClassWorkspace,
) -> bool:  # fmt: skip
    # Standard deviations and scores of the prior's centre; False if a target is not a class.
    n, o = rows.counts[client], prior.center.shape[0]
    good = True
    for i in range(n):
        work.classes[i] = rows.y[rows.starts[client] + i]
        good &= 0 <= work.classes[i] < o
    for label in range(o):
        scores(rows, client, prior.center, label, prior.bias, work.vectors[0])
        work.wide[_ETA, :n, label] = work.vectors[0, :n]
        for j in range(k):
            work.tall[_SCALE, j, label] = prior.std[label, columns[j]] * np.sqrt(share)
    return good


@inner
def _shift(n: int, k: int, label: int, work: ClassWorkspace) -> None:
    # The scores of a class for rows left out.
    z, t = work.vectors[0], work.vectors[1]
    for i in range(n):
        for j in range(k):
            z[j] = work.X[i, j] * work.tall[_SCALE, j, label]
        a, q = form(work.T, work.S, n, k, z, t), work.wide[_P, i, label]
        residual = q - (1.0 if work.classes[i] == label else 0.0)
        rest = max(1.0 - a * q * (1.0 - q), 1e-15)
        work.wide[_ASIDE, i, label] = work.wide[_ETA, i, label] + a * residual / rest


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
def _loss_softmax(eta: Array, n: int, classes: Array) -> float:
    total = 0.0
    for i in range(n):
        total += _row_loss(eta, i, classes[i])
    return total


@inner
def _newton_softmax(n: int, k: int, o: int, work: ClassWorkspace) -> bool:
    # The mode into V, its scores and probabilities into ETA and P. False if not found.
    tall = work.tall
    tall[_V, :k] = 0.0
    now, products, blocks = _loss_softmax(work.wide[_ETA], n, work.classes), 0, False
    for _ in range(_STEPS):
        rounding = _gradient_softmax(n, k, o, work)
        if _PAYS * products > min(n, k):
            _factor_softmax(n, k, o, work)
            blocks = True
        fall, products = _direction(n, k, o, work, blocks)
        size = _dot(tall[_V], tall[_V], k)
        if not np.isfinite(fall):
            return False
        if fall <= max(_TINY_SOFTMAX * _TINY_SOFTMAX * max(1.0, size), rounding):
            return True
        now = _descend_softmax(n, k, o, fall, now, work)
    return False


@inner
def _gradient_softmax(n: int, k: int, o: int, work: ClassWorkspace) -> float:
    # Write probabilities into P and the gradient into G; return its squared rounding error.
    P, g = work.wide[_P], work.tall[_G]
    size, most = 0.0, 0.0
    for i in range(n):
        _soften(work.wide[_ETA], i, P)
        P[i, work.classes[i]] -= 1.0
        for j in range(k):
            size += work.X[i, j] * work.X[i, j]
    _back_softmax(n, k, o, work, P, g)
    for i in range(n):
        P[i, work.classes[i]] += 1.0
    for j in range(k):
        for label in range(o):
            g[j, label] += work.tall[_V, j, label]
            most = max(most, work.tall[_SCALE, j, label])
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
def _ahead(n: int, k: int, o: int, work: ClassWorkspace, d: Array, out: Array) -> None:
    # out = X (s d), (n, o).
    for i in range(n):
        out[i, :o] = 0.0
        for j in range(k):
            x = work.X[i, j]
            for label in range(o):
                out[i, label] += x * (work.tall[_SCALE, j, label] * d[j, label])


@inner
def _back_softmax(n: int, k: int, o: int, work: ClassWorkspace, u: Array, out: Array) -> None:
    # out = s X'u, (k, o).
    out[:k] = 0.0
    for i in range(n):
        for j in range(k):
            x = work.X[i, j]
            for label in range(o):
                out[j, label] += x * u[i, label]
    for j in range(k):
        for label in range(o):
            out[j, label] *= work.tall[_SCALE, j, label]


@inner
def _dot(left: Array, right: Array, k: int) -> float:
    total = 0.0
    for j in range(k):
        for label in range(left.shape[1]):
            total += left[j, label] * right[j, label]
    return total


@inner
def _weighted(n: int, k: int, label: int, work: ClassWorkspace) -> None:
    for i in range(n):
        q = work.wide[_P, i, label]
        weight = np.sqrt(max(q * (1.0 - q), 0.0))
        work.wide[_WEIGHT, i, label] = weight
        for j in range(k):
            work.B[i, j] = weight * work.X[i, j] * work.tall[_SCALE, j, label]


@inner
def _factor_softmax(n: int, k: int, o: int, work: ClassWorkspace) -> None:
    # Roots of the inverse of B'B + I for n >= k, of B B' + I otherwise, of every class.
    small = min(n, k)
    for label in range(o):
        _weighted(n, k, label, work)
        root_here = work.roots[label]
        if n >= k:
            gram(work.B, n, k, root_here)
        else:
            outer_gram(work.B, n, k, root_here)
        cholesky(root_here, small)
        invert(root_here, small)


@inner
def _precondition(
    n: int, k: int, o: int, work: ClassWorkspace, blocks: bool, r: Array, out: Array
) -> None:
    # The blocks' inverses times r; by rows r - s X'(w M^-1 w X (s r)), w = sqrt(q (1 - q)).
    if not blocks:
        out[:k] = r[:k]
        return
    if n >= k:
        for label in range(o):
            _precondition_one(k, label, work, r, out)
        return
    aside = work.wide[_ASIDE]
    _ahead(n, k, o, work, r, aside)
    for label in range(o):
        _weigh(n, label, work, aside)
        _precondition_one(n, label, work, aside, aside)
        _weigh(n, label, work, aside)
    _back_softmax(n, k, o, work, aside, out)
    _add(k, 1.0, r, out, -1.0)


@inner
def _precondition_one(size: int, label: int, work: ClassWorkspace, r: Array, out: Array) -> None:
    g = work.vectors[0]
    g[:size] = r[:size, label]
    apply_root(work.roots[label], size, g, work.vectors[1])
    out[:size, label] = g[:size]


@inner
def _weigh(n: int, label: int, work: ClassWorkspace, u: Array) -> None:
    for i in range(n):
        u[i, label] *= work.wide[_WEIGHT, i, label]


@inner
def _hessian(n: int, k: int, o: int, work: ClassWorkspace, d: Array, out: Array) -> None:
    # The Hessian times d.
    move, P = work.wide[_MOVE], work.wide[_P]
    _ahead(n, k, o, work, d, move)
    for i in range(n):
        mean = 0.0
        for label in range(o):
            mean += P[i, label] * move[i, label]
        for label in range(o):
            move[i, label] = P[i, label] * (move[i, label] - mean)
    _back_softmax(n, k, o, work, move, out)
    _add(k, 1.0, d, out, 1.0)


@inner
def _add(k: int, factor: float, left: Array, right: Array, keep: float) -> None:
    # right <- keep right + factor left.
    for j in range(k):
        for label in range(left.shape[1]):
            right[j, label] = keep * right[j, label] + factor * left[j, label]


@inner
def _direction(n: int, k: int, o: int, work: ClassWorkspace, blocks: bool) -> tuple[float, int]:
    # D = H^-1 G by conjugate gradients, more exact for small gradients; returns G . D and the
    # number of products.
    tall = work.tall
    d, rest, way, back, done = tall[_D], tall[_REST], tall[_WAY], tall[_BACK], tall[_DONE]
    d[:k], rest[:k] = 0.0, tall[_G, :k]
    _precondition(n, k, o, work, blocks, rest, back)
    way[:k] = back[:k]
    norm = _dot(rest, back, k)
    goal, products = norm * max(min(0.01, norm), 1e-30), 0
    for _ in range(_INNER):
        if not norm > goal:
            break
        products += 1
        _hessian(n, k, o, work, way, done)
        length = norm / _dot(way, done, k)
        _add(k, length, way, d, 1.0)
        _add(k, -length, done, rest, 1.0)
        _precondition(n, k, o, work, blocks, rest, back)
        last, norm = norm, _dot(rest, back, k)
        _add(k, 1.0, back, way, norm / last)
    return _dot(tall[_G], d, k), products


@inner
def _descend_softmax(
    n: int, k: int, o: int, fall: float, now: float, work: ClassWorkspace
) -> float:
    # Halve the step until the objective decreases sufficiently (Armijo), up to rounding.
    eta, move, aside = work.wide[_ETA], work.wide[_MOVE], work.wide[_ASIDE]
    v, d = work.tall[_V], work.tall[_D]
    _ahead(n, k, o, work, d, move)
    vv, vd, dd = _dot(v, v, k), _dot(v, d, k), _dot(d, d, k)
    slack, length, new = 1e-13 * (1.0 + abs(now) + 0.5 * vv), 1.0, now
    for _ in range(60):
        for i in range(n):
            for label in range(o):
                aside[i, label] = eta[i, label] - length * move[i, label]
        new = _loss_softmax(aside, n, work.classes)
        change = new - now + length * (0.5 * length * dd - vd)
        if change <= slack - 1e-4 * length * fall:
            break
        length *= 0.5
    eta[:n] = aside[:n]
    _add(k, -length, d, v, 1.0)
    return new
