"""The compiled part of the multi-task solvers: no checks.

Flat arrays over rows are cut into clients by `offsets`; client k's rows begin at `starts[k]` of the
features. Arrays over features and clients, (p, m), have clients side by side.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
_FAST = {"reassoc", "contract", "nsz"}


def _inner(function: F) -> F:
    return cast(F, njit(cache=True, fastmath=_FAST, error_model="numpy")(function))


def _outer(function: F) -> F:
    compiled = njit(cache=True, fastmath=_FAST, error_model="numpy", parallel=True)(function)
    return cast(F, compiled)


@_outer
def dense_scores(X: Array, starts: Array, offsets: Array, W: Array, out: Array) -> None:
    """Put x_i . w_k of every row into `out`."""
    for k in prange(len(starts)):
        for i in range(offsets[k + 1] - offsets[k]):
            total = 0.0
            for j in range(W.shape[1]):
                total += np.float64(X[starts[k] + i, j]) * W[k, j]
            out[offsets[k] + i] = total


@_outer
def dense_pull(X: Array, starts: Array, offsets: Array, q: Array, out: Array) -> None:
    """Put X_k' q_k of every client into `out`."""
    for k in prange(len(starts)):
        for j in range(out.shape[1]):
            out[k, j] = 0.0
        for i in range(offsets[k + 1] - offsets[k]):
            factor = q[offsets[k] + i]
            for j in range(out.shape[1]):
                out[k, j] += factor * np.float64(X[starts[k] + i, j])


@_outer
def csr_scores(
    indptr: Array, indices: Array, data: Array, starts: Array, offsets: Array, W: Array, out: Array
) -> None:
    """Put x_i . w_k of every row into `out`."""
    for k in prange(len(starts)):
        for i in range(offsets[k + 1] - offsets[k]):
            total = 0.0
            for entry in range(indptr[starts[k] + i], indptr[starts[k] + i + 1]):
                total += np.float64(data[entry]) * W[k, indices[entry]]
            out[offsets[k] + i] = total


@_outer
def csr_pull(
    indptr: Array, indices: Array, data: Array, starts: Array, offsets: Array, q: Array, out: Array
) -> None:
    """Put X_k' q_k of every client into `out`."""
    for k in prange(len(starts)):
        for j in range(out.shape[1]):
            out[k, j] = 0.0
        for i in range(offsets[k + 1] - offsets[k]):
            factor = q[offsets[k] + i]
            for entry in range(indptr[starts[k] + i], indptr[starts[k] + i + 1]):
                out[k, indices[entry]] += factor * np.float64(data[entry])


@_outer
def logistic_slopes(
    scores: Array, signs: Array, offsets: Array, free: bool, b: Array, q: Array, curves: Array,
    losses: Array,
) -> None:  # fmt: skip
    """Fill in derivatives of each client's mean loss by its scores, at its best bias if `free`."""
    for k in prange(len(offsets) - 1):
        first, last = offsets[k], offsets[k + 1]
        if free:
            b[k] = _best_bias(scores, signs, first, last, b[k])
        n, total = last - first, 0.0
        for i in range(first, last):
            score = scores[i] + b[k]
            small, margin = np.exp(-abs(score)), score * signs[i]
            top = 1.0 if margin < 0 else small
            q[i] = -signs[i] * top / (1 + small) / n
            curves[i] = small / (1 + small) ** 2 / n
            total += np.log1p(small) + max(-margin, 0.0)
        losses[k] = total / n


@_inner
def _best_bias(scores: Array, signs: Array, first: int, last: int, b: float) -> float:
    # Newton's method on the slope by the bias, which rises; kept inside a bracket of its zero.
    low, high = -np.inf, np.inf
    for _ in range(200):
        slope, curve = 0.0, 0.0
        for i in range(first, last):
            share = 1 / (1 + np.exp(-scores[i] - b))
            slope += share - (signs[i] > 0)
            curve += share * (1 - share)
        if abs(slope) <= 1e-15 * (last - first):
            break
        if slope > 0:
            high = b
        else:
            low = b
        # Where the curve is flat Newton would leap: a step of 4 crosses it soon enough.
        step = -slope / curve if abs(slope) < 4 * curve else -4.0 * np.sign(slope)
        new = b + step
        if not low < new < high:
            new = (low + high) / 2
        if new == b or not low < new < high:
            break
        b = new
    return b


@_inner
def solve_model(  # noqa: PLR0913, PLR0917 - a problem and when to stop
    Q: Array, X: Array, offsets: Array, G: Array, W: Array, whole: float,
    lam: float, mu: float, goal: float, most: int,
) -> tuple[Array, float, int]:  # fmt: skip
    """Minimise a quadratic model + mu/2 |W|^2 + lam |W|_2,1 by coordinate descent over features.

    The model is 1/2 v'Qv + G.v in v = the change from `W`, (p, m), client by client. Q is either
    given, (p, p, m) or (p, p, 1) for the same of all clients, or, where it has no entries, X'X for
    `X` (p, rows). It is a sum of squares |X v - t|^2 / 2 less `whole` = |t|^2 / 2, so a gap can be
    had from C = G + Qv alone: the dual point is t - X v, and X'(t - X v) = -C.

    Returns:
        The new W, the gap and the number of sweeps.
    """
    start, C = W.copy(), G.copy()
    W = W.copy()
    z = np.zeros(X.shape[1])
    curves = _diagonal(Q, X, offsets, W.shape)
    gap, sweep = np.inf, 0
    while sweep < most:
        if len(Q):
            _gram_sweep(Q, curves, C, W, lam, mu)
        else:
            _rows_sweep(X, offsets, curves, G, z, W, lam, mu)
        sweep += 1
        if sweep % 2 == 0 or sweep == most:
            if not len(Q):
                _refresh(X, offsets, G, z, C)
            gap = _model_gap(C, G, W, start, whole, lam, mu)
            if not gap > goal:
                break
    return W, gap, sweep


@_inner
def _diagonal(Q: Array, X: Array, offsets: Array, shape: tuple[int, int]) -> Array:
    curves = np.empty(shape)
    for j in range(shape[0]):
        for k in range(shape[1]):
            if len(Q):
                curves[j, k] = Q[j, j, min(k, Q.shape[2] - 1)]
            else:
                total = 0.0
                for i in range(offsets[k], offsets[k + 1]):
                    total += X[j, i] * X[j, i]
                curves[j, k] = total
    return curves


@_inner
def _refresh(X: Array, offsets: Array, G: Array, z: Array, C: Array) -> None:
    for j in range(len(C)):
        for k in range(C.shape[1]):
            total = G[j, k]
            for i in range(offsets[k], offsets[k + 1]):
                total += X[j, i] * z[i]
            C[j, k] = total


@_inner
def _gram_sweep(Q: Array, curves: Array, C: Array, W: Array, lam: float, mu: float) -> None:
    p, m = W.shape
    change, new = np.empty(m), np.empty(m)
    for j in range(p):
        if not _best_feature(C[j], W[j], curves[j], lam, mu, new):
            continue
        for k in range(m):
            change[k] = new[k] - W[j, k]
            W[j, k] = new[k]
        _follow(Q[j], change, C)


@_inner
def _follow(Q: Array, change: Array, C: Array) -> None:
    shared = Q.shape[1] == 1
    for i in range(len(C)):
        if shared:
            factor = Q[i, 0]
            for k in range(len(change)):
                C[i, k] += factor * change[k]
        else:
            for k in range(len(change)):
                C[i, k] += Q[i, k] * change[k]


@_inner
def _rows_sweep(
    X: Array, offsets: Array, curves: Array, G: Array, z: Array, W: Array, lam: float, mu: float
) -> None:
    p, m = W.shape
    slopes, new = np.empty(m), np.empty(m)
    for j in range(p):
        for k in range(m):
            total = G[j, k]
            for i in range(offsets[k], offsets[k + 1]):
                total += X[j, i] * z[i]
            slopes[k] = total
        if not _best_feature(slopes, W[j], curves[j], lam, mu, new):
            continue
        for k in range(m):
            change = new[k] - W[j, k]
            for i in range(offsets[k], offsets[k + 1]):
                z[i] += X[j, i] * change
            W[j, k] = new[k]


@_inner
def _best_feature(
    slopes: Array, w: Array, curves: Array, lam: float, mu: float, new: Array
) -> bool:
    # The exact minimum over one feature's weights: u_k = a_k / (h_k + lam / |u|), 0 if |a| <= lam.
    # Says whether anything moves.
    square, high, low, still = 0.0, 0.0, np.inf, True
    for k in range(len(w)):
        a = curves[k] * w[k] - slopes[k]
        new[k] = a
        square += a * a
        high, low = max(high, curves[k] + mu), min(low, curves[k] + mu)
        still = still and w[k] == 0.0
    if square <= lam * lam:
        for k in range(len(w)):
            new[k] = 0.0
        return not still
    size = (np.sqrt(square) - lam) / high
    if low < high:
        size = _size(new, curves, mu, lam, size)
    for k in range(len(w)):
        new[k] *= size / ((curves[k] + mu) * size + lam)
    return True


@_inner
def _size(a: Array, curves: Array, mu: float, lam: float, size: float) -> float:
    # Newton on sum (a / (h s + lam))^2 = 1, written as (...)^-1/2 = 1: concave, so that from below
    # it rises to the root; in one step if all h are equal.
    for _ in range(50):
        value, slope = 0.0, 0.0
        for k in range(len(a)):
            h = curves[k] + mu
            share = a[k] / (h * size + lam)
            value += share * share
            slope += share * share * h / (h * size + lam)
        step = (np.sqrt(value) - 1) * value / slope
        size += step
        if not step > 1e-14 * size:
            break
    return size


@_inner
def _model_gap(
    C: Array, G: Array, W: Array, start: Array, whole: float, lam: float, mu: float
) -> float:
    linear, square, ridge, groups, cross, top = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for j in range(len(W)):
        norm, slope = 0.0, 0.0
        for k in range(W.shape[1]):
            v = W[j, k] - start[j, k]
            linear += G[j, k] * v
            square += v * (C[j, k] - G[j, k])
            cross += C[j, k] * start[j, k]
            norm += W[j, k] * W[j, k]
            slope += C[j, k] * C[j, k]
        ridge += norm
        groups += np.sqrt(norm)
        top = max(top, slope)
    rest = whole + linear + square / 2  # |t - X v|^2 / 2
    primal = rest + mu / 2 * ridge + lam * groups
    along = 2 * whole + linear - cross  # (t - X v).(t + X start)
    scale = min(1.0, lam / np.sqrt(top)) if top > 0 else 1.0
    best = scale * along - scale * scale * rest
    if mu > 0:
        excess = 0.0
        for j in range(len(C)):
            slope = 0.0
            for k in range(C.shape[1]):
                slope += C[j, k] * C[j, k]
            excess += max(np.sqrt(slope) - lam, 0.0) ** 2
        best = max(best, along - rest - excess / (2 * mu))
    return primal - best
