"""The smooth part of multi-task problems over stacked clients, and bounds from its dual.

    f(W) = sum_k min_b (1 / n_k) sum_i loss(x_i . w_k + b, y_i)

with b = 0 where there is no bias. The best bias is put in at once, for each client: its loss is
then a convex function of the scores alone whose slopes q sum to zero, and W'gradient is X_k' q_k.

Least squares of a client with more rows than features depend on the rows through d numbers a
feature: the triangle R of X = O R replaces X, O'y replaces y, and what is left of y is a constant.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients
from coterie.solvers import _multitask
from coterie.solvers.single import check_binary, single_class

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
_WIDE = 1000  # features beyond which d x d of every client are too many


@dataclass(frozen=True)
class Point:
    """The loss at some scores: its value, slopes, curvatures and best biases."""

    value: float
    slopes: Floats
    curves: Floats
    bias: Floats


@dataclass(frozen=True)
class Problem:
    """Clients' rows and what their scores cost.

    Attributes:
        binary: Logistic loss of signs `targets`, else squares.
        free: Whether each client has a bias; the rows of squares may be centred already.
        rows: (total, d) dense, or CSR; client k's begin at `starts[k]`.
        shared: (n, d) if all clients have these same rows, and then `rows` is not used.
        offsets: Where the clients' scores begin, (m + 1,).
        shares: 1 / n_k, n_k the rows that the client's mean is over, (m,).
        rest: The loss that no score can take away.
    """

    binary: bool
    free: bool
    features: int
    rows: Any
    shared: Floats | None
    starts: Longs
    offsets: Longs
    targets: Floats
    shares: Floats
    rest: float = 0.0

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def owner(self) -> Longs:
        """The client of every row."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def weights(self) -> Floats:
        """The share of every row in its client's mean."""
        return self.shares[self.owner]

    def scores(self, weight: Floats) -> Floats:
        """Return x_i . w_k of every row, (rows,)."""
        if self.shared is not None:
            return np.ascontiguousarray(weight @ self.shared.T).reshape(-1)
        out, weight = np.empty(int(self.offsets[-1])), np.ascontiguousarray(weight)
        if isinstance(self.rows, np.ndarray):
            _multitask.dense_scores(self.rows, self.starts, self.offsets, weight, out)
        else:
            _multitask.csr_scores(*_parts(self.rows), self.starts, self.offsets, weight, out)
        return out

    def pull(self, slopes: Floats) -> Floats:
        """Return X_k' q_k of every client, (m, d)."""
        if self.shared is not None:
            return np.asarray(slopes.reshape(len(self), -1) @ self.shared)
        out = np.empty((len(self), self.features))
        if isinstance(self.rows, np.ndarray):
            _multitask.dense_pull(self.rows, self.starts, self.offsets, slopes, out)
        else:
            _multitask.csr_pull(*_parts(self.rows), self.starts, self.offsets, slopes, out)
        return out

    def centred(self, scores: Floats) -> Floats:
        """Take each client's mean off its scores, where it has a bias."""
        if not self.free:
            return scores
        return np.asarray(scores - self.means(scores)[self.owner])

    def means(self, values: Floats) -> Floats:
        """Return each client's mean over rows."""
        return np.asarray(np.add.reduceat(values, self.offsets[:-1]) / np.diff(self.offsets))

    def at(self, scores: Floats, before: Point | None = None) -> Point:
        """Return the loss at scores, with a start for the biases."""
        if not self.binary:
            left = scores - self.targets
            bias = -self.means(left) if self.free else np.zeros(len(self))
            left += bias[self.owner]
            slopes = left * self.weights
            return Point(self.rest + float(slopes @ left) / 2, slopes, self.weights, bias)
        bias = np.zeros(len(self)) if before is None else before.bias.copy()
        slopes, curves, losses = np.empty_like(scores), np.empty_like(scores), np.empty(len(self))
        _multitask.logistic_slopes(
            scores, self.targets, self.offsets, self.free, bias, slopes, curves, losses
        )
        return Point(float(losses.sum()), slopes, curves, bias)

    def columns(self, chosen: Longs) -> Floats:
        """Return some features of all rows, (p, rows), or (p, n) where the rows are shared."""
        if self.shared is not None:
            return np.ascontiguousarray(self.shared[:, chosen].T)
        out = np.empty((len(chosen), int(self.offsets[-1])))
        for k, start in enumerate(self.starts.tolist()):
            first, last = self.offsets[k], self.offsets[k + 1]
            own = self.rows[start : start + last - first]
            if isinstance(self.rows, np.ndarray):
                out[:, first:last] = own[:, chosen].T
            else:
                out[:, first:last] = own[:, chosen].toarray().T
        return out

    def dual(self, point: Point, norms: Floats, lam: float, mu: float) -> float:
        """Return a lower bound on min_W f(W) + mu/2 |W|^2 + lam g(W).

        For slopes q with X'q = V the dual value is -sum_i conj_i(q_i) - h(V), h the conjugate of
        mu/2 |W|^2 + lam g(W): 0 where the dual norm of g at V is <= lam and infinite elsewhere if
        mu = 0, else |V shrunk by lam|^2 / (2 mu). Multiples of q are feasible slopes as well; the
        best of a few is taken.

        Args:
            point: Where the slopes are from.
            norms: Singular values of V (trace norm) or its columns' norms (l2,1).
            lam: The weight of g.
            mu: The weight of the squares.
        """
        top = float(norms.max(initial=0.0))
        cut = lam / top if top > 0 else math.inf
        ideal = self.ideal(point)
        scales = {min(ideal, cut)} if mu == 0 else {min(ideal, cut), ideal, 1.0}
        return max(self.worth(point, s) - _conjugate(norms * s, lam, mu) for s in scales)

    def ideal(self, point: Point) -> float:
        """Return the multiple of the slopes that is worth most by itself (logistic: at most 1)."""
        if self.binary:
            return 1.0
        square = float(point.slopes @ (point.slopes / self.weights))
        return -float(point.slopes @ self.targets) / square if square > 0 else 0.0

    def worth(self, point: Point, scale: float) -> float:
        """Return -sum_i conj_i of a multiple of the slopes: the dual value but for the penalty."""
        if self.binary:
            return self._entropy(point, scale)
        # Squares: q = r / n, so -conj is -q.y - n q^2 / 2.
        along = -float(point.slopes @ self.targets)
        square = float(point.slopes @ (point.slopes / self.weights))
        return self.rest + scale * along - scale * scale * square / 2

    def _entropy(self, point: Point, scale: float) -> float:
        share = np.minimum(np.abs(point.slopes) / self.weights * scale, 1.0)
        inside = np.clip(share, 1e-300, None)
        other = np.clip(1 - share, 1e-300, None)
        return -float(self.weights @ (share * np.log(inside) + (1 - share) * np.log(other)))


def _conjugate(norms: Floats, lam: float, mu: float) -> float:
    if mu == 0:
        return 0.0
    return float((np.maximum(norms - lam, 0) ** 2).sum()) / (2 * mu)


def _parts(rows: Any) -> tuple[Any, Any, Any]:
    return rows.indptr, rows.indices, rows.data


@dataclass(frozen=True)
class Taken:
    """The clients that a joint fit is about, and biases of the others.

    Attributes:
        problem: The clients with something to learn.
        places: Their places among all, (m,).
        bias: (clients,), of clients with rows of one class alone; 0 elsewhere.
    """

    problem: Problem
    places: Longs
    bias: Floats


def prepare(clients: Clients, *, bias: bool, tol: float, compress: bool) -> Taken:
    """Take the clients' rows without copying them; `compress` those of tall least squares.

    Clients without rows, and with a bias those whose rows are all of one class, are left out.

    Raises:
        ValueError: On another task, targets that are no classes or rows that are not finite.
    """
    if clients.spec.task not in ("regression", "binary"):
        raise ValueError(
            f"clients: given the task {clients.spec.task!r}; expected 'regression' or 'binary'"
        )
    binary = clients.spec.task == "binary"
    starts, counts = clients.starts.numpy(), clients.counts.numpy()
    targets = clients.targets.cpu().double().numpy()
    kept, levels = [], np.zeros(len(clients))
    for k in np.flatnonzero(counts):
        own = targets[starts[k] : starts[k] + counts[k]]
        only = single_class(own, tol) if binary and bias and np.isfinite(own).all() else None
        if only is None:
            kept.append(k)
        else:
            levels[k] = only
    places = np.asarray(kept, dtype=np.int64)
    starts, counts = starts[places], counts[places]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    y = np.concatenate(
        [np.empty(0), *(targets[s : s + n] for s, n in zip(starts, counts, strict=True))]
    )
    rows = _rows_of(clients)
    _check_finite(clients, rows, y, starts, counts, places)
    if binary:
        check_binary(y)
        y = 2 * y - 1
    problem = Problem(
        binary, bias, clients.spec.features, rows, _shared(rows, starts, counts),
        starts, offsets, y, 1 / np.maximum(counts, 1),
    )  # fmt: skip
    return Taken(_compressed(problem) if compress and not binary else problem, places, levels)


def _rows_of(clients: Clients) -> Any:
    features: Any = clients.features
    return features.flatten(1).cpu().numpy() if isinstance(features, Tensor) else features


def _check_finite(
    clients: Clients, rows: Any, y: Floats, starts: Longs, counts: Longs, places: Longs
) -> None:
    ends = np.cumsum(counts)
    for k, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = rows[start : start + count]
        values = own if isinstance(own, np.ndarray) else own.data
        if not (np.isfinite(values).all() and np.isfinite(y[ends[k] - count : ends[k]]).all()):
            raise ValueError(
                f"client {int(clients.ids[places[k]])}: given rows with NaN or infinity; expected "
                "finite numbers, since a joint fit spreads them to everyone: leave the client out"
            )


def _shared(rows: Any, starts: Longs, counts: Longs) -> Floats | None:
    # The same people with a target for each client are common; their rows are then kept once.
    if not isinstance(rows, np.ndarray) or len(starts) < 2 or (counts != counts[0]).any():
        return None
    first = rows[starts[0] : starts[0] + counts[0]]
    for start in starts[1:].tolist():
        if not np.array_equal(rows[start], first[0]):
            return None
        if not np.array_equal(rows[start : start + counts[0]], first):
            return None
    return first.astype(np.float64)


def _compressed(problem: Problem) -> Problem:
    d, counts = problem.features, np.diff(problem.offsets)
    dense = isinstance(problem.rows, np.ndarray)
    tall = counts > d
    if d > _WIDE or not (tall.any() if dense else tall.all()) or not len(problem):
        return problem
    if problem.shared is not None:
        return _compressed_shared(problem)
    rows, targets, rest = [], [], 0.0
    for k, start in enumerate(problem.starts.tolist()):
        own = problem.rows[start : start + int(counts[k])]
        own = (own if dense else own.toarray()).astype(np.float64)
        y = problem.targets[problem.offsets[k] : problem.offsets[k + 1]]
        if problem.free:
            own, y = own - own.mean(axis=0), y - y.mean()
        if tall[k]:
            own, kept, left = _triangle(own, y[:, None])
            rest += problem.shares[k] * left / 2
            y = kept[:, 0]
        rows.append(own)
        targets.append(y)
    sizes = [len(y) for y in targets]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return replace(
        problem, free=False, rows=np.concatenate(rows), starts=offsets[:-1].copy(),
        offsets=offsets, targets=np.concatenate(targets), rest=rest,
    )  # fmt: skip


def _compressed_shared(problem: Problem) -> Problem:
    assert problem.shared is not None
    rows, y = problem.shared, problem.targets.reshape(len(problem), -1).T
    if problem.free:
        rows, y = rows - rows.mean(axis=0), y - y.mean(axis=0)
    short, kept, left = _triangle(rows, y)
    offsets = np.arange(len(problem) + 1, dtype=np.int64) * len(short)
    return replace(
        problem, free=False, shared=short, offsets=offsets,
        targets=np.ascontiguousarray(kept.T).reshape(-1), rest=problem.shares[0] * left / 2,
    )  # fmt: skip


def _triangle(rows: Floats, y: Floats) -> tuple[Floats, Floats, float]:
    # R and O'y of rows = O R, and |y|^2 outside the span of the rows' columns.
    d = rows.shape[1]
    triangle: Floats = np.asarray(np.linalg.qr(np.hstack([rows, y]), mode="r"))
    return triangle[:d, :d], triangle[:d, d:], float((triangle[d:, d:] ** 2).sum())


def original_bias(taken: Taken, clients: Clients, weight: Floats, point: Point) -> Floats:
    """Return the best bias of every client, (clients,), also where the rows were centred.

    Args:
        taken: What the fit was about.
        clients: All clients.
        weight: Models of the clients in `taken`, (m, d).
        point: The loss at their scores.
    """
    bias = taken.bias.copy()
    if taken.problem.binary:
        bias[taken.places] = point.bias
        return bias
    rows, targets = _rows_of(clients), clients.targets.cpu().double().numpy()
    for place, own in zip(taken.places.tolist(), weight, strict=True):
        start, count = int(clients.starts[place]), int(clients.counts[place])
        mine: Any = rows[start : start + count]
        mean = np.asarray(mine.mean(axis=0, dtype=np.float64)).reshape(-1)
        bias[place] = targets[start : start + count].mean() - mean @ own
    return bias
