"""Joint linear models of all clients on pooled rows: trace norm, l2,1 norm and MTRL; not private.

    min_W,b  sum_k (1 / n_k) sum_i loss(x_i . w_k + b_k, y_i) + mu/2 |w_k|^2  +  penalty(W)

over stacked models W (m, d), with loss 1/2 (p - y)^2 (regression) or log(1 + exp(-s p)), s = +-1
(binary). Biases are not penalised. The penalty is

* "trace": lam times the sum of singular values;
* "l21": lam times the sum over features of the l2 norm of that feature's weights over clients;
* MTRL (Zhang and Yeung 2010): lam/2 min tr(W' R^-1 W) over positive semidefinite R (m, m) of trace
  1. The minimiser is R = (W W')^1/2 over its trace, and the penalty is lam/2 |W|_*^2, the square of
  the trace norm. Alternating over W and R stalls; minimising over W does not.

All are solved by accelerated proximal gradient steps (FISTA, Beck and Teboulle 2009) with restarts
(O'Donoghue and Candes 2015); l2,1 on growing working sets of features.

Fits stop at a relative duality gap. Write f_i for the loss of row i over n_k and q_i for any
derivative. For all W, b

    f_i(x_i . w_k + b_k) >= q_i (x_i . w_k + b_k) - conj f_i(q_i)

so, with V the stacked X_k' q_k and each client's q summing to zero where it has a bias, the
objective is at least  -sum_i conj f_i(q_i) + min_W (V.W + mu/2 |W|^2 + penalty(W)).  For a norm and
mu = 0 the minimum is 0 if the dual norm of V (largest singular value, largest column norm) is at
most lam, otherwise -infinity; for mu > 0 it is -|V shrunk by lam|^2 / (2 mu). For singular values s
of V and lam/2 |W|_*^2 it is minus half the sum of s x, x = max(0, s - t) / mu with t = lam sum x,
or -largest s^2 / (2 lam) if mu = 0. Multiples of q are derivatives too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.kernels import compiled
from coterie.data.federated import Clients
from coterie.solvers.ridge import check_binary, single_class

Array = NDArray[Any]
Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Penalty = Literal["trace", "l21"]
F = TypeVar("F", bound=Callable[..., Any])
_WIDE = 1000  # features beyond which d x d per client are too many
_ROUNDING = 1e-14  # of the loss at zero: rounding of a gap


@dataclass(frozen=True)
class Fit:
    """Models of all clients.

    Attributes:
        weight: (m, d), float64.
        bias: (m,), float64; zeros without one.
        objective: The objective at these models.
        gap: A bound on the distance of `objective` from its minimum.
        iterations: Accelerated steps.
    """

    weight: Tensor
    bias: Tensor
    objective: float
    gap: float
    iterations: int

    @property
    def relation(self) -> Tensor:
        """MTRL's R, (m, m), float64; singular where models are linear combinations of others."""
        return relation_of(self.weight, 0.0)


def fit_multitask(
    clients: Clients,
    *,
    penalty: Penalty,
    lam: float,
    mu: float = 0.0,
    bias: bool,
    tol: float = 1e-6,
    most: int = 100_000,
) -> Fit:
    """Fit all clients together under a norm, to a relative duality gap of `tol`.

    A client without rows gets zeros. A binary client with rows of one class has no finite optimal
    bias: with a bias it gets zero weights, which are optimal for the others as well, and the bias
    at which its mean loss is `tol`. Biases are not penalised. `lam` > 0 is the weight of the norm,
    `mu` >= 0 that of the squares of the models, `most` the largest number of accelerated steps.

    Raises:
        ValueError: On values out of range, another task, or rows that are not finite.
        RuntimeError: If the gap is above `tol` after `most` steps.
    """
    if penalty not in ("trace", "l21"):
        raise ValueError(f"penalty: given {penalty!r}; expected 'trace' or 'l21'")
    _check_weights(lam=lam, tol=tol, mu=mu)
    norm = _Trace(lam, mu) if penalty == "trace" else _Groups(lam, mu)
    return _fit(clients, norm, bias=bias, tol=tol, most=most)


def fit_mtrl(
    clients: Clients,
    *,
    lam1: float,
    lam2: float,
    bias: bool,
    tol: float = 1e-6,
    most: int = 100_000,
) -> Fit:
    """Fit all clients and their relation, to a relative duality gap of `tol`.

    Args and errors are those of `fit_multitask`; `lam1` is the weight of the squares of the models,
    >= 0, and `lam2` the weight of the relation, > 0.
    """
    _check_weights(lam2=lam2, tol=tol, lam1=lam1)
    return _fit(clients, _SquaredTrace(lam2, lam1), bias=bias, tol=tol, most=most)


def lam_max(clients: Clients, penalty: Penalty, bias: bool) -> float:
    """Return the smallest `lam` at which all weights are zero."""
    problem, _, _ = _prepare(clients, bias=bias, tol=1e-6)
    if not len(problem):
        return 0.0
    gradient = problem.gradient(problem.at_zero().q)
    norm = _Trace(1.0, 0.0) if penalty == "trace" else _Groups(1.0, 0.0)
    return float(norm.norms(gradient).max(initial=0.0))


def relation_of(weight: Tensor, ridge: float) -> Tensor:
    """Return R = (W W' + ridge^2)^1/2 over its trace; the identity over m if W is zero.

    >>> relation_of(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 0.0)
    tensor([[0.7500, 0.0000],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    vectors, sizes, _ = torch.linalg.svd(weight.double(), full_matrices=True)
    values = sizes.new_full((len(weight),), ridge)
    values[: len(sizes)] = torch.hypot(sizes, values[: len(sizes)])
    if not bool(values.sum() > 0):
        values = torch.ones_like(values)
    related: Tensor = (vectors * (values / values.sum())) @ vectors.mT
    return related


@dataclass(frozen=True)
class _Trace:
    """The penalty mu/2 |W|^2 + a part with weight lam and a proximal operator: the trace norm."""

    lam: float
    mu: float
    interval: ClassVar[int] = 10  # steps between computations of the gap

    def norms(self, matrix: Floats) -> Floats:
        """Return the sizes (singular values, column norms) on which the part is defined."""
        return np.asarray(np.linalg.svd(matrix, compute_uv=False))

    def value(self, weight: Floats) -> float:
        """Return the penalty of models."""
        size = float(self.norms(weight).sum())
        return self.mu / 2 * float((weight**2).sum()) + self._part(size)

    def _part(self, size: float) -> float:
        return self.lam * size

    def shrink(self, target: Floats, curvature: float) -> Floats:
        """Minimise curvature/2 |W - target|^2 + the part."""
        # From a Gram matrix of the smaller side: wrong by about 1e-16 s^2 / threshold, s the
        # largest singular value.
        wide = target.shape[0] < target.shape[1]
        gram = target @ target.T if wide else target.T @ target
        squares, vectors = np.linalg.eigh(gram)
        factors = _factors(np.sqrt(np.maximum(squares, 0)), self.lam / curvature)
        linear = (vectors * factors) @ vectors.T
        return np.asarray(linear @ target if wide else target @ linear)

    def bound(self, problem: "_Problem", point: "_Point", norms: Floats) -> float:
        """Return a lower bound on the objective from derivatives q with sizes `norms` of X'q."""
        top, best = float(norms.max(initial=0.0)), problem.best_scale(point)
        feasible = min(best, self.lam / top if top > 0 else math.inf)
        scales = {feasible} if self.mu == 0 else {feasible, best, 1.0}
        return max(problem.dual(point, s) - self._conjugate(norms * s) for s in scales)

    def _conjugate(self, norms: Floats) -> float:
        if self.mu == 0:
            return 0.0
        return float((np.maximum(norms - self.lam, 0) ** 2).sum()) / (2 * self.mu)


class _Groups(_Trace):
    interval = 4

    def norms(self, matrix: Floats) -> Floats:
        return np.asarray(np.sqrt((matrix**2).sum(axis=0)))

    def shrink(self, target: Floats, curvature: float) -> Floats:
        return np.asarray(target * _factors(self.norms(target), self.lam / curvature))


class _SquaredTrace(_Trace):
    def _part(self, size: float) -> float:
        return self.lam / 2 * size * size

    def shrink(self, target: Floats, curvature: float) -> Floats:
        left, sizes, right = np.linalg.svd(target, full_matrices=False)
        kept = np.maximum(sizes - _threshold(sizes, self.lam / curvature), 0)
        return np.asarray((left * kept) @ right)

    def bound(self, problem: "_Problem", point: "_Point", norms: Floats) -> float:
        return max(
            problem.dual(point, scale) - self._conjugate(norms * abs(scale))
            for scale in (1.0, problem.best_scale(point))
        )

    def _conjugate(self, sizes: Floats) -> float:
        if self.mu == 0:
            return float(sizes.max(initial=0.0)) ** 2 / (2 * self.lam)
        kept = np.maximum(sizes - _threshold(sizes, self.lam / self.mu), 0) / self.mu
        return float(sizes @ kept) / 2


def _factors(norms: Floats, threshold: float) -> Floats:
    kept = norms > threshold
    return np.asarray(np.where(kept, 1 - threshold / np.where(kept, norms, 1.0), 0.0))


def _threshold(sizes: Floats, ratio: float) -> float:
    # t = ratio * sum max(0, s - t), s in descending order: linear with r of them above t.
    thresholds = ratio * np.cumsum(sizes) / (1 + ratio * np.arange(1, len(sizes) + 1))
    above = int((sizes > thresholds).sum())
    return float(thresholds[above - 1]) if above else 0.0


@dataclass(frozen=True)
class _Stop:
    """Stop at a gap of `tol` times the objective, or after `most` steps."""

    tol: float
    most: int
    floor: float

    def reached(self, gap: float, objective: float) -> bool:
        return gap <= self.tol * objective + self.floor


# Models (m, d), their objective, a bound on its distance from the minimum, and steps.
_Found = tuple[Floats, float, float, int]


def _fit(clients: Clients, term: _Trace, *, bias: bool, tol: float, most: int) -> Fit:
    problem, places, intercepts = _prepare(clients, bias=bias, tol=tol)
    weight = np.zeros((len(places), clients.spec.features))
    objective, gap, steps = 0.0, 0.0, 0
    if len(problem):
        stop = _Stop(tol, most, _ROUNDING * problem.at_zero().value)
        weight, objective, gap, steps = _by_working_sets(problem, term, stop, weight)
        if not stop.reached(gap, objective):
            raise RuntimeError(
                f"relative gap {gap / max(objective, 1e-300):.1e} after {steps} iterations; "
                f"expected <= {tol:.1e}: raise most, tol or the penalty (now {term.lam:g}), or "
                "scale the features to similar sizes"
            )
        if bias:
            intercepts[places] = problem.at(problem.scores(weight)).bias
    models = np.zeros((len(clients), clients.spec.features))
    models[places] = weight
    found, biases = (torch.from_numpy(g).to(clients.device) for g in (models, intercepts))
    return Fit(found, biases, objective, max(gap, 0.0), steps)


def _by_working_sets(problem: "_Problem", term: _Trace, stop: _Stop, weight: Floats) -> _Found:
    # Only the l2,1 norm makes weights of features zero; the others take all features at once.
    if not isinstance(term, _Groups):
        return _accelerate(problem.compressed(), term, stop, weight)
    weight, steps, bound, chosen = weight.copy(), 0, -math.inf, np.empty(0, dtype=np.int64)
    point: _Point | None = None
    while True:
        point = problem.at(problem.scores(weight), point)
        value = point.value + term.value(weight)
        norms = term.norms(problem.gradient(point.q))
        bound = max(bound, term.bound(problem, point, norms))
        gap = value - bound
        if stop.reached(gap, value) or steps >= stop.most:
            return weight, value, gap, steps
        chosen = _working_set(weight, norms, term.lam, chosen)
        # The last solve is as accurate as requested; those before need not be.
        last = len(chosen) == problem.features
        target = max(0.3 * stop.tol * value, 0.0 if last else 0.1 * gap)
        inner = _Stop(0.0, stop.most - steps, max(target, stop.floor))
        part = problem.restricted(chosen).compressed()
        weight[:, chosen], _, _, took = _accelerate(part, term, inner, weight[:, chosen])
        steps += max(took, 1)


def _working_set(weight: Floats, norms: Floats, lam: float, old: Longs) -> Longs:
    # Features in use now or before, and those with the largest gradients: all that violate the
    # optimality conditions and as many again, but at most as many as are in use.
    inside = np.asarray(weight.any(axis=0), dtype=np.bool_)
    used = int(inside.sum())
    inside[old] = True
    violated = int((norms[~inside] > lam).sum())
    ranked = np.argsort(-norms, kind="stable")
    fresh = ranked[~inside[ranked]][: min(max(used, 50), 2 * violated + 10)]
    return np.concatenate([np.flatnonzero(inside), fresh])


def _accelerate(problem: "_Problem", term: _Trace, stop: _Stop, weight: Floats) -> _Found:
    """Minimise the loss plus a penalty from given models.

    Momentum is reset when it points uphill. The inverse step size is a curvature, which doubles
    until it bounds the loss and decreases slowly.
    """
    here, scores = weight, problem.scores(weight)
    last, last_scores, momentum = here, scores, 1.0
    point: _Point | None = None
    bound, step, curvature = -math.inf, 0, _first_curvature(problem, term.mu)
    while True:
        if step % term.interval == 0 or step >= stop.most:
            point = problem.at(scores, point)
            value = point.value + term.value(here)
            norms = term.norms(problem.gradient(point.q))
            bound = max(bound, term.bound(problem, point, norms))
            if stop.reached(value - bound, value) or step >= stop.most:
                return here, value, value - bound, step
        after = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        beta = (momentum - 1) / after
        ahead, ahead_scores = here + beta * (here - last), scores + beta * (scores - last_scores)
        last, last_scores = here, scores
        here, scores, curvature = _proximal(problem, term, ahead, ahead_scores, curvature)
        uphill = float(((ahead - here) * (here - last)).sum()) > 0
        momentum = 1.0 if uphill else after
        step += 1


def _first_curvature(problem: "_Problem", mu: float) -> float:
    # A lower bound on the curvature: |X_k' u|^2 over |u|^2 for some u of each client.
    q = np.sign(problem.targets) * problem.weights
    sizes = (problem.gradient(q) ** 2).sum(axis=1) / np.maximum(problem.shares, 1e-300)
    found = float(sizes.max()) / max(int(np.diff(problem.offsets).max()), 1)
    return max(found * (0.25 if problem.binary else 1.0), 1e-12) + mu


def _proximal(
    problem: "_Problem", term: _Trace, ahead: Floats, scores: Floats, curvature: float
) -> tuple[Floats, Floats, float]:
    point = problem.at(scores)
    gradient = problem.gradient(point.q) + term.mu * ahead
    curvature = max(0.9 * curvature, term.mu)
    while True:
        new = term.shrink(ahead - gradient / curvature, curvature)
        new_scores = problem.scores(new)
        moved = float(((new - ahead) ** 2).sum())
        bend = problem.above_tangent(point, new_scores - scores, new_scores)
        if bend <= (curvature - term.mu) / 2 * moved:
            return new, new_scores, curvature
        curvature *= 2


@dataclass(frozen=True)
class _Point:
    """The loss at some scores: value, derivatives q by the scores, and optimal biases."""

    value: float
    q: Floats
    bias: Floats


@dataclass(frozen=True)
class _Problem:
    """The smooth part: f(W) = sum_k min_b (1 / n_k) sum_i loss(x_i . w_k + b, y_i).

    The optimal bias is eliminated per client: the loss is then a convex function of the scores
    whose derivatives q sum to zero per client.

    Attributes:
        binary: Whether the loss is logistic, with signs as targets.
        free: Whether each client has a bias.
        rows: (total, d); client k's begin at `starts[k]`.
        shared: (n, d) if all clients have these same rows; `rows` is then not used.
        offsets: First score of each client, (m + 1,).
        shares: 1 / n_k, n_k the number of rows in the client's mean, (m,).
        rest: Loss that no model can change.
    """

    binary: bool
    free: bool
    rows: Array
    shared: Floats | None
    starts: Longs
    offsets: Longs
    targets: Floats
    shares: Floats
    rest: float = 0.0

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def features(self) -> int:
        return int((self.rows if self.shared is None else self.shared).shape[1])

    @cached_property
    def owner(self) -> Longs:
        """The client of every row."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def weights(self) -> Floats:
        """The weight of every row in its client's mean."""
        return self.shares[self.owner]

    def scores(self, weight: Floats) -> Floats:
        """Return x_i . w_k of every row, (rows,)."""
        if self.shared is not None:
            return np.ascontiguousarray(weight @ self.shared.T).reshape(-1)
        out = np.empty(int(self.offsets[-1]))
        _scores(self.rows, self.starts, self.offsets, np.ascontiguousarray(weight), out)
        return out

    def gradient(self, q: Floats) -> Floats:
        """Return X_k' q_k of every client, (m, d)."""
        if self.shared is not None:
            return np.asarray(q.reshape(len(self), -1) @ self.shared)
        out = np.zeros((len(self), self.features))
        _gradient(self.rows, self.starts, self.offsets, q, out)
        return out

    def means(self, values: Floats) -> Floats:
        """Return each client's mean over rows."""
        return np.asarray(np.add.reduceat(values, self.offsets[:-1]) / np.diff(self.offsets))

    def at(self, scores: Floats, before: _Point | None = None) -> _Point:
        """Return the loss at scores; `before` holds a start for the biases."""
        if not self.binary:
            left = scores - self.targets
            bias = -self.means(left) if self.free else np.zeros(len(self))
            left += bias[self.owner]
            q = left * self.weights
            return _Point(self.rest + float(q @ left) / 2, q, bias)
        bias = np.zeros(len(self)) if before is None else before.bias.copy()
        q, losses = np.empty_like(scores), np.empty(len(self))
        _logistic(scores, self.targets, self.offsets, self.free, bias, q, losses)
        return _Point(float(losses.sum()), q, bias)

    def at_zero(self) -> _Point:
        """Return the loss of zero weights."""
        return self.at(np.zeros(int(self.offsets[-1])))

    def above_tangent(self, point: _Point, change: Floats, scores: Floats) -> float:
        """Return the distance of the loss from its tangent, less rounding for a difference."""
        if not self.binary:
            if self.free:
                change = change - self.means(change)[self.owner]
            return float(change @ (change * self.weights)) / 2
        bend = self.at(scores, point).value - point.value - float(point.q @ change)
        return bend - 1e-15 * len(self)

    def best_scale(self, point: _Point) -> float:
        """Return the multiple of q with the largest `dual` (logistic: 1)."""
        if self.binary:
            return 1.0
        square = float(point.q @ (point.q / self.weights))
        return -float(point.q @ self.targets) / square if square > 0 else 0.0

    def dual(self, point: _Point, scale: float) -> float:
        """Return -sum_i conj f_i of a multiple of q: the dual value except the penalty."""
        if not self.binary:  # q = r / n, so -conj is -q.y - n q^2 / 2
            along = -float(point.q @ self.targets)
            square = float(point.q @ (point.q / self.weights))
            return self.rest + scale * along - scale * scale * square / 2
        share = np.minimum(np.abs(point.q) / self.weights * scale, 1.0)
        logs = np.log(np.clip([share, 1 - share], 1e-300, None))
        return -float(self.weights @ (share * logs[0] + (1 - share) * logs[1]))

    def restricted(self, chosen: Longs) -> "_Problem":
        """Return the problem of some features."""
        if self.shared is not None:
            return replace(self, shared=np.ascontiguousarray(self.shared[:, chosen]))
        return replace(self, rows=np.ascontiguousarray(self.rows[:, chosen]))

    def compressed(self) -> "_Problem":
        """Return least squares with at most d rows per client: R of X = O R, and O'y for y."""
        d, counts = self.features, np.diff(self.offsets)
        if self.binary or d > _WIDE or not (counts > d).any():
            return self
        if self.shared is not None:
            y = self.targets.reshape(len(self), -1).T
            own, kept, left = _triangle(self.shared, y, self.free)
            offsets = np.arange(len(self) + 1, dtype=np.int64) * len(own)
            return replace(
                self, free=False, shared=own, offsets=offsets, rest=self.shares[0] * left / 2,
                targets=np.ascontiguousarray(kept.T).reshape(-1),
            )  # fmt: skip
        rows, targets, rest = [], [], 0.0
        for k, start in enumerate(self.starts.tolist()):
            y = self.targets[self.offsets[k] : self.offsets[k + 1], None]
            own, kept, left = _triangle(self.rows[start : start + len(y)], y, self.free)
            rest += self.shares[k] * left / 2
            rows.append(own)
            targets.append(kept[:, 0])
        offsets = np.concatenate([[0], np.cumsum([len(y) for y in targets])]).astype(np.int64)
        return replace(
            self, free=False, rows=np.concatenate(rows), starts=offsets[:-1].copy(),
            offsets=offsets, targets=np.concatenate(targets), rest=rest,
        )  # fmt: skip


def _triangle(rows: Array, y: Floats, free: bool) -> tuple[Floats, Floats, float]:
    # Centred rows, or R and O'y of rows = O R if there are more rows than columns, with |y|^2
    # outside the span of the columns.
    own, d = rows.astype(np.float64), rows.shape[1]
    if free:
        own, y = own - own.mean(axis=0), y - y.mean(axis=0)
    if len(own) <= d:
        return own, y, 0.0
    triangle: Floats = np.asarray(np.linalg.qr(np.hstack([own, y]), mode="r"))
    return triangle[:d, :d], triangle[:d, d:], float((triangle[d:, d:] ** 2).sum())


def _prepare(clients: Clients, *, bias: bool, tol: float) -> tuple[_Problem, Longs, Floats]:
    """Return the problem of clients with rows (with a bias: of two classes).

    And their places among all, (m,), and biases (c,) of the clients of one class.
    """
    if clients.spec.task not in ("regression", "binary"):
        raise ValueError(
            f"clients: given the task {clients.spec.task!r}; expected 'regression' or 'binary'"
        )
    binary = clients.spec.task == "binary"
    starts, counts = clients.starts.numpy(), clients.counts.numpy()
    targets = clients.targets.cpu().double().numpy()
    kept, intercepts = [], np.zeros(len(clients))
    for k in np.flatnonzero(counts):
        own = targets[starts[k] : starts[k] + counts[k]]
        only = single_class(own, tol) if binary and bias and np.isfinite(own).all() else None
        if only is None:
            kept.append(k)
        else:
            intercepts[k] = only
    places = np.asarray(kept, dtype=np.int64)
    starts, counts = starts[places], counts[places]
    features: Any = clients.features
    dense = isinstance(features, Tensor)
    rows = features.flatten(1).cpu().numpy() if dense else features.toarray()
    own_targets = [targets[s : s + n] for s, n in zip(starts, counts, strict=True)]
    for at, own in enumerate(own_targets):
        x = rows[starts[at] : starts[at] + len(own)]
        if not (np.isfinite(x).all() and np.isfinite(own).all()):
            raise ValueError(
                f"client {int(clients.ids[places[at]])}: given rows with NaN or infinity; expected "
                "finite numbers, since a joint fit spreads them to all: remove the client"
            )
    y = np.concatenate([np.empty(0), *own_targets])
    if binary:
        check_binary(y)
        y = 2 * y - 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shared, shares = _shared(rows, starts, counts), 1 / np.maximum(counts, 1)
    problem = _Problem(binary, bias, rows, shared, starts, offsets, y, shares)
    return problem, places, intercepts


def _shared(rows: Array, starts: Longs, counts: Longs) -> Floats | None:
    # Clients often have the same rows with different targets; these are then kept once.
    if len(starts) < 2 or (counts != counts[0]).any():
        return None
    first = rows[starts[0] : starts[0] + counts[0]]
    for start in starts[1:].tolist():
        if not np.array_equal(rows[start : start + counts[0]], first):
            return None
    return first.astype(np.float64)


def _check_weights(**weights: float) -> None:
    # The last may be 0.
    for place, (name, value) in enumerate(weights.items(), 1):
        zero = place == len(weights)
        if not (0 < value < math.inf or (zero and value == 0)):
            least = ">=" if zero else ">"
            raise ValueError(f"{name}: given {value}; expected a finite number {least} 0")


def _compiled(function: F) -> F:
    fast = {"reassoc", "contract", "nsz"}
    return compiled(fastmath=fast, error_model="numpy", parallel=True)(function)


@_compiled
def _scores(X: Array, starts: Array, offsets: Array, W: Array, out: Array) -> None:
    for k in prange(len(starts)):
        for i in range(offsets[k + 1] - offsets[k]):
            total = 0.0
            for j in range(W.shape[1]):
                total += np.float64(X[starts[k] + i, j]) * W[k, j]
            out[offsets[k] + i] = total


@_compiled
def _gradient(X: Array, starts: Array, offsets: Array, q: Array, out: Array) -> None:
    for k in prange(len(starts)):
        for i in range(offsets[k + 1] - offsets[k]):
            factor = q[offsets[k] + i]
            for j in range(out.shape[1]):
                out[k, j] += factor * np.float64(X[starts[k] + i, j])


@_compiled
def _logistic(
    scores: Array, signs: Array, offsets: Array, free: bool, b: Array, q: Array, losses: Array
) -> None:
    # Derivatives of each client's mean loss by its scores, at its optimal bias if `free`.
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
            total += np.log1p(small) + max(-margin, 0.0)
        losses[k] = total / n


@compiled(error_model="numpy")
def _best_bias(scores: Array, signs: Array, first: int, last: int, b: float) -> float:
    # Newton's method on the derivative by the bias, kept inside a bracket of its zero.
    low, high = -np.inf, np.inf
    for _ in range(200):
        gradient, curvature = 0.0, 0.0
        for i in range(first, last):
            share = 1 / (1 + np.exp(-scores[i] - b))
            gradient += share - (signs[i] > 0)
            curvature += share * (1 - share)
        if abs(gradient) <= 1e-15 * (last - first):
            break
        if gradient > 0:
            high = b
        else:
            low = b
        # Newton would leap where the curve is flat: limit the step to 4.
        flat = abs(gradient) >= 4 * curvature
        new = b + (-4.0 * np.sign(gradient) if flat else -gradient / curvature)
        if not low < new < high:
            new = (low + high) / 2
        if new == b or not low < new < high:
            break
        b = new
    return b
