"""The compiled part of `coterie.solvers.single`: one client, no checks.

Rows come transposed, `A` (d, n): a feature is one stretch of memory. A kernel returns the relative
gap that it reached (NaN if a number left the range of float64) and how many sweeps it took.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
# Sums may be reordered and products fused, which vectorises them; NaN and infinity keep their
# meaning.
_FAST = {"reassoc", "contract", "nsz"}
_ROUNDING = 1e-14  # of the objective at zero: a gap below that is lost in the sums


def _compiled(function: F) -> F:
    return cast(F, njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")(function))


@_compiled
def _dot(left: Array, right: Array) -> float:
    total = 0.0
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@_compiled
def _shift(target: Array, factor: float, by: Array) -> None:
    for place in range(len(target)):
        target[place] += factor * by[place]


@_compiled
def _soft(value: float, threshold: float) -> float:
    if value > threshold:
        return value - threshold
    if value < -threshold:
        return value + threshold
    return 0.0


@_compiled
def _excess(gap: float, floor: float, primal: float) -> float:
    # The relative gap beyond rounding; NaN stays NaN.
    return 0.0 if gap <= floor else (gap - floor) / primal


@_compiled
def lasso(A: Array, y: Array, lam: float, tol: float, most: int, w: Array) -> tuple[float, int]:
    """Minimise |y - A'w|^2 / (2n) + lam |w|_1 by coordinate descent from w = 0.

    Full sweeps, each with a look at the gap, and between them sweeps over the features in use. The
    dual point is the residual scaled to |A r|_inf <= n lam.
    """
    d, n = A.shape
    squares = np.empty(d)
    for j in range(d):
        squares[j] = _dot(A[j], A[j])
    rest = y.copy()
    floor, sweeps = _ROUNDING * _dot(y, y) / (2 * n), 0
    while True:
        gap, primal = _lasso_gap(A, y, rest, w, lam)
        if not gap > tol * primal + floor or sweeps >= most:
            return _excess(gap, floor, primal), sweeps
        first = _lasso_sweep(A, rest, w, squares, lam, False)
        sweeps += 1
        slow = True
        # As many sweeps as a direct solve would cost, about.
        for _ in range(10 + np.count_nonzero(w)):
            if sweeps >= most:
                break
            sweeps += 1
            if not _lasso_sweep(A, rest, w, squares, lam, True) > 0.01 * first:
                slow = False
                break
        if slow:
            _lasso_jump(A, y, rest, w, lam)


@_compiled
def _lasso_jump(A: Array, y: Array, rest: Array, w: Array, lam: float) -> None:
    # To the minimum for these signs; a weight that would change its sign stops there and drops
    # out. The objective is one parabola all the way, so it falls.
    used = np.flatnonzero(w)
    B = A[used]
    G = np.dot(B, B.T)
    right = np.dot(B, y) - len(y) * lam * np.sign(w[used])
    while len(used):
        tiny = 1e-13 * np.trace(G)
        v = w[used]
        step = _cholesky_solve(G + tiny * np.eye(len(used)), right - np.dot(G, v), tiny)
        length, stop = 1.0, -1
        for i in range(len(used)):
            if step[i] * v[i] < 0 and -v[i] / step[i] < length:
                length, stop = -v[i] / step[i], i
        v += length * step
        if stop >= 0:
            v[stop] = 0.0
        rest -= np.dot(v - w[used], B)
        w[used] = v
        if stop < 0:
            break
        kept = np.flatnonzero(v)
        used, right, G, B = used[kept], right[kept], G[kept][:, kept].copy(), B[kept]


@_compiled
def _times(A: Array, right: Array) -> Array:
    # Not by BLAS, whose own threads would fight over the cores with those over clients.
    product = np.empty(len(A))
    for j in range(len(A)):
        product[j] = _dot(A[j], right)
    return product


@_compiled
def _lasso_gap(A: Array, y: Array, rest: Array, w: Array, lam: float) -> tuple[float, float]:
    n, top, size = len(y), 0.0, 0.0
    for j in range(len(A)):
        top = max(top, abs(_dot(A[j], rest)))
        size += abs(w[j])
    squares = _dot(rest, rest)
    primal = squares / (2 * n) + lam * size
    # The best multiple of the residual: r.y / r.r, cut to where it is feasible.
    scale = _dot(rest, y) / squares if squares > 0 else 0.0
    if top > 0:
        limit = n * lam / top
        scale = min(max(scale, -limit), limit)
    dual = scale * _dot(rest, y) / n - scale * scale * squares / (2 * n)
    return primal - dual, primal


@_compiled
def _lasso_sweep(A: Array, rest: Array, w: Array, squares: Array, lam: float, used: bool) -> float:
    n, moved = A.shape[1], 0.0
    for j in range(len(A)):
        if squares[j] == 0.0 or (used and w[j] == 0.0):
            continue
        old = w[j]
        w[j] = _soft(old + _dot(A[j], rest) / squares[j], n * lam / squares[j])
        if w[j] != old:
            _shift(rest, old - w[j], A[j])
            moved += squares[j] * (w[j] - old) ** 2
    return moved


@_compiled
def _logistic(scores: Array, signs: Array) -> float:
    total = 0.0
    for i in range(len(scores)):
        margin = scores[i] * signs[i]
        total += np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0)
    return total / len(scores)


@_compiled
def _slopes(scores: Array, signs: Array, slopes: Array, curves: Array) -> None:
    # First and second derivatives of the mean loss by the scores.
    n = len(scores)
    for i in range(n):
        small = np.exp(-abs(scores[i]))
        top = 1.0 if scores[i] * signs[i] < 0 else small
        slopes[i] = -signs[i] * top / (1 + small) / n
        curves[i] = small / (1 + small) ** 2 / n


@_compiled
def _balance(slopes: Array, dual: Array, bias: bool) -> None:
    # A dual point that sums to zero, as a free bias asks: the heavier side is scaled down.
    up, down = 0.0, 0.0
    for i in range(len(slopes)):
        up += max(slopes[i], 0.0)
        down += max(-slopes[i], 0.0)
    for i in range(len(slopes)):
        dual[i] = slopes[i]
        if bias and slopes[i] > 0 and up > down:
            dual[i] *= down / up
        if bias and slopes[i] < 0 and down > up:
            dual[i] *= up / down


@_compiled
def _entropy(dual: Array, scale: float) -> float:
    n, total = len(dual), 0.0
    for i in range(n):
        share = min(abs(dual[i]) * n * scale, 1.0)
        if share > 0:
            total -= share * np.log(share)
        if share < 1:
            total -= (1 - share) * np.log1p(-share)
    return total / n


@_compiled
def _cholesky_solve(H: Array, right: Array, tiny: float) -> Array:
    # In place, H = L L'; a pivot that rounding took below `tiny` is put there.
    d = len(H)
    solved = right.copy()
    for i in range(d):
        for j in range(i + 1):
            rest = H[i, j] - _dot(H[i, :j], H[j, :j])
            H[i, j] = np.sqrt(max(rest, tiny)) if i == j else rest / H[j, j]
        solved[i] = (solved[i] - _dot(H[i, :i], solved[:i])) / H[i, i]
    for i in range(d - 1, -1, -1):
        solved[i] /= H[i, i]
        _shift(solved[:i], -solved[i], H[i, :i])
    return solved


@_compiled
def ridge_logistic(
    A: Array, signs: Array, lam: float, bias: bool, tol: float, most: int, w: Array, b: Array
) -> tuple[float, int]:
    """Minimise mean logistic loss + lam/2 |w|^2 by Newton steps with a line search, from zero.

    The dual point of slopes q (sum zero if there is a bias) is worth mean entropy - |Aq|^2/(2 lam).
    With fewer rows than features the steps are taken in the span of the rows, w = A a.
    """
    d, n = A.shape
    wide = n < d
    K = np.dot(A.T, A) if wide else np.empty((0, 0))
    a, scores = np.zeros(n), np.zeros(n)
    slopes, curves, dual = np.empty(n), np.empty(n), np.empty(n)
    for step in range(most + 1):
        _slopes(scores, signs, slopes, curves)
        _balance(slopes, dual, bias)
        primal = _logistic(scores, signs) + lam / 2 * _dot(w, w)
        pull = np.dot(A, dual)
        gap = primal - _entropy(dual, 1.0) + _dot(pull, pull) / (2 * lam)
        if not gap > tol * primal + _ROUNDING or step == most:
            break
        if wide:
            move, by = _wide_step(K, slopes, curves, a, lam, bias)
            direction = np.dot(A, move)
        else:
            direction, by = _tall_step(A, slopes, curves, w, lam, bias)
            move = a
        change = np.dot(direction, A) + by
        length = _newton_length(scores, change, signs, w, direction, slopes, lam)
        _shift(scores, length, change)
        _shift(w, length, direction)
        b[0] += length * by
        if wide:
            _shift(a, length, move)
    return _excess(gap, _ROUNDING, primal), step


@_compiled
def _tall_step(
    A: Array, slopes: Array, curves: Array, w: Array, lam: float, bias: bool
) -> tuple[Array, float]:
    # The bias is eliminated by centring the rows, weighted by their curvatures.
    d = len(A)
    whole = curves.sum()
    centre = np.dot(A, curves) / whole if bias and whole > 0 else np.zeros(d)
    scaled = (A - centre.reshape(d, 1)) * np.sqrt(curves)
    H = np.dot(scaled, scaled.T)
    for j in range(d):
        H[j, j] += lam
    level = slopes.sum()
    right = centre * level - np.dot(A, slopes) - lam * w
    direction = _cholesky_solve(H, right, lam)
    by = -level / whole - _dot(centre, direction) if bias and whole > 0 else 0.0
    return direction, by


@_compiled
def _wide_step(
    K: Array, slopes: Array, curves: Array, a: Array, lam: float, bias: bool
) -> tuple[Array, float]:
    # (lam + D K) u = -v by (lam + S K S)^-1, S S = D; K is centred by P = 1 - 1 curves' / whole.
    n = len(K)
    whole = curves.sum()
    shares = curves / whole if bias and whole > 0 else np.zeros(n)
    rows = np.dot(K, shares)
    centred = K - rows.reshape(n, 1) - rows + _dot(shares, rows)
    roots = np.sqrt(curves)
    H = centred * roots * roots.reshape(n, 1)
    for i in range(n):
        H[i, i] += lam
    v = slopes + lam * a
    inner = _cholesky_solve(H, roots * np.dot(centred, v), lam)
    u = (roots * inner - v) / lam
    u -= shares * u.sum()
    by = -slopes.sum() / whole - _dot(rows, u) if bias and whole > 0 else 0.0
    return u, by


@_compiled
def _newton_length(
    scores: Array, change: Array, signs: Array, w: Array, direction: Array, slopes: Array,
    lam: float,
) -> float:  # fmt: skip
    # Halves the step until the objective falls as it should (Armijo).
    here = _logistic(scores, signs)
    linear, square = lam * _dot(w, direction), lam / 2 * _dot(direction, direction)
    slope = _dot(slopes, change) + linear
    length = 1.0
    for _ in range(60):
        new = _logistic(scores + length * change, signs)
        if new - here + length * linear + length * length * square <= 0.1 * length * slope + 1e-15:
            break
        length /= 2
    return length


@_compiled
def sparse_logistic(
    A: Array, signs: Array, lam: float, bias: bool, tol: float, most: int, w: Array, b: Array
) -> tuple[float, int]:
    """Minimise mean logistic loss + lam |w|_1 by proximal Newton steps, from zero.

    Each step minimises the second-order model of the loss + lam |w|_1 by coordinate descent, then
    searches along the line. The dual point is the slopes, scaled to |A q|_inf <= lam.
    """
    d, n = A.shape
    scores, slopes, curves, dual = np.zeros(n), np.empty(n), np.empty(n), np.empty(n)
    sweeps = 0
    while True:
        _slopes(scores, signs, slopes, curves)
        _balance(slopes, dual, bias)
        size = np.abs(w).sum()
        primal = _logistic(scores, signs) + lam * size
        top = np.abs(_times(A, dual)).max() if d else 0.0
        gap = primal - _entropy(dual, min(1.0, lam / top) if top > 0 else 1.0)
        if not gap > tol * primal + _ROUNDING or sweeps >= most:
            return _excess(gap, _ROUNDING, primal), sweeps
        curves = np.maximum(curves, 1e-6 / n)
        new, change = w.copy(), np.zeros(n)
        by, took = _model_sweeps(A, slopes, curves, new, change, lam, bias, most - sweeps)
        sweeps += took
        slope = _dot(slopes, change) + lam * (np.abs(new).sum() - size)
        length = 1.0
        for _ in range(60):
            trial = _logistic(scores + length * change, signs)
            trial += lam * np.abs(w + length * (new - w)).sum()
            if trial <= primal + 0.1 * length * slope + 1e-15:
                break
            length /= 2
        if length == 1.0:
            w[:] = new
        else:
            w += length * (new - w)
        scores += length * change
        b[0] += length * by


@_compiled
def _model_sweeps(
    A: Array, slopes: Array, curves: Array, new: Array, change: Array, lam: float, bias: bool,
    most: int,
) -> tuple[float, int]:  # fmt: skip
    # Coordinate descent on slopes.c + 1/2 c' curves c + lam |new|_1, c = change of the scores.
    squares = _times(A * A, curves)
    pull = slopes.copy()  # slopes + curves * change, kept up to date
    whole, by, first = curves.sum(), 0.0, 0.0
    for sweep in range(most):
        # All features every fourth sweep, those in use otherwise.
        moved = _model_sweep(A, curves, squares, pull, new, change, lam, sweep % 4 > 0)
        if bias:
            lift = -pull.sum() / whole
            by += lift
            change += lift
            _shift(pull, lift, curves)
            moved += whole * lift * lift
        if sweep == 0:
            first = moved
        elif moved <= 1e-4 * first and sweep % 4 == 0:
            return by, sweep + 1
    return by, most


@_compiled
def _model_sweep(
    A: Array, curves: Array, squares: Array, pull: Array, new: Array, change: Array, lam: float,
    used: bool,
) -> float:  # fmt: skip
    moved = 0.0
    for j in range(len(A)):
        if squares[j] == 0.0 or (used and new[j] == 0.0):
            continue
        old = new[j]
        new[j] = _soft(old - _dot(A[j], pull) / squares[j], lam / squares[j])
        if new[j] != old:
            for i in range(A.shape[1]):
                change[i] += (new[j] - old) * A[j, i]
                pull[i] += (new[j] - old) * A[j, i] * curves[i]
            moved += squares[j] * (new[j] - old) ** 2
    return moved
