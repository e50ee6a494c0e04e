"""Linear models of all clients together, by the trace norm or the l2,1 norm; no privacy.

    min_W,b  sum_k (1 / n_k) sum_i loss(x_i . w_k + b_k, y_i) + mu/2 |w_k|^2  +  lam g(W)

over stacked models W (m, d), with loss 1/2 (p - y)^2 (regression) or log(1 + exp(-s p)), s = +-1
(binary), and g the sum of singular values (trace) or the sum over features of the l2 norm of that
feature's weights over clients (l21). Biases are not penalised.

The duality gap. Write f_i for the loss of row i over n_k and q_i for any slope. For all W, b

    f_i(x_i . w_k + b_k) >= q_i (x_i . w_k + b_k) - conj f_i(q_i)

so, with V the stacked X_k' q_k and each client's q summing to zero where it has a bias, the
objective is at least  -sum_i conj f_i(q_i) + min_W (V.W + mu/2 |W|^2 + lam g(W)).  If mu = 0 the
minimum is 0 when the norm dual to g (largest singular value, largest norm of a column) of V is at
most lam, and -infinity otherwise; if mu > 0 it is -|V shrunk by lam|^2 / (2 mu). Slopes at the
current models, scaled down to where this is finite, become optimal together with them. Fits end
when the objective less the best bound so far is at most `tol` times the objective.

The trace norm is solved by accelerated proximal steps with restarts (O'Donoghue and Candes 2015);
the l2,1 norm by Newton steps (one is enough for squares) on a working set of features, each by
coordinate descent over features with an exact step for all clients' weights of a feature.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients
from coterie.solvers import _multitask
from coterie.solvers._accelerated import Found, Stop, accelerate
from coterie.solvers._problem import Point, Problem, Taken, original_bias, prepare
from coterie.solvers.prox import shrink_groups, shrink_spectrum

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Penalty = Literal["trace", "l21"]
_GRAM = 1 << 22  # numbers of products of features that are worth keeping, whatever the rows


@dataclass(frozen=True)
class Fit:
    """Models of all clients.

    Attributes:
        weight: (m, d), float64.
        bias: (m,), float64; zeros without one.
        objective: What was minimised, at these models.
        gap: A bound on how far `objective` is above its minimum.
        iterations: Accelerated steps (trace) or sweeps over features (l21).
    """

    weight: Tensor
    bias: Tensor
    objective: float
    gap: float
    iterations: int


@dataclass(frozen=True)
class _Norm:
    """The penalty mu/2 |W|^2 + lam g(W)."""

    penalty: Penalty
    lam: float
    mu: float

    def norms(self, matrix: Floats) -> Floats:
        """Return what g adds up, and the largest of which is the norm dual to g."""
        if self.penalty == "l21":
            return np.asarray(np.sqrt((matrix**2).sum(axis=0)))
        return np.asarray(torch.linalg.svdvals(torch.from_numpy(matrix)))

    def value(self, weight: Floats) -> float:
        size = float(self.norms(weight).sum())
        return self.mu / 2 * float((weight**2).sum()) + self.lam * size

    def shrink(self, target: Floats, curve: float) -> Floats:
        shrink = shrink_groups if self.penalty == "l21" else shrink_spectrum
        return np.asarray(shrink(torch.from_numpy(target), self.lam / curve))

    def bound(self, problem: Problem, point: Point, pull: Floats) -> float:
        return problem.dual(point, self.norms(pull), self.lam, self.mu)


def fit_multitask(
    clients: Clients,
    *,
    penalty: Penalty,
    lam: float,
    mu: float = 0.0,
    bias: bool,
    tol: float = 1e-6,
    most: int = 100_000,
    start: Tensor | None = None,
) -> Fit:
    """Fit all clients together, to a relative duality gap of `tol`.

    A client without rows gets zeros. A binary client whose rows are all of one class has no finite
    best bias: with a bias it gets zero weights, which are the best for the others as well, and the
    bias at which its mean loss is `tol`.

    Args:
        clients: All clients; regression or binary rows, dense or CSR.
        penalty: "trace" or "l21".
        lam: The weight of the norm, > 0.
        mu: The weight of the squares of the models, >= 0.
        bias: Whether clients have biases, which are not penalised.
        tol: The largest relative duality gap of the answer.
        most: How many iterations it may take.
        start: Models to start from, (m, d), such as those for another `lam`; None for zeros.

    Raises:
        ValueError: On numbers out of range, another task, or rows that are not finite.
        RuntimeError: If the gap is above `tol` after `most` iterations.
    """
    _check(penalty, lam, mu, tol)
    # The few looks at all rows that l21 takes would cost less than compressing them.
    taken = prepare(clients, bias=bias, tol=tol, compress=penalty == "trace")
    problem, weight = taken.problem, _start(clients, taken, start)
    if not len(problem):
        return Fit(torch.zeros(len(clients), clients.spec.features).double(),
                   torch.from_numpy(taken.bias), 0.0, 0.0, 0)  # fmt: skip
    norm, stop = _Norm(penalty, lam, mu), Stop.of(problem, tol, most)
    solve = _by_features if penalty == "l21" else accelerate
    found = solve(problem, norm, stop, weight)
    stop.check(found, lam)
    return _fit(clients, taken, found, bias)


def lam_max(clients: Clients, penalty: Penalty, bias: bool) -> float:
    """Return the smallest `lam` from which on all weights are zero."""
    _check(penalty, 1.0, 0.0, 1.0)
    problem = prepare(clients, bias=bias, tol=1e-6, compress=False).problem
    if not len(problem):
        return 0.0
    pull = problem.pull(problem.at(np.zeros(int(problem.offsets[-1]))).slopes)
    return float(_Norm(penalty, 1.0, 0.0).norms(pull).max(initial=0.0))


def _fit(clients: Clients, taken: Taken, found: Found, bias: bool) -> Fit:
    weight = np.zeros((len(clients), clients.spec.features))
    weight[taken.places] = found.weight
    level = np.zeros(len(clients))
    if bias:
        point = taken.problem.at(taken.problem.scores(found.weight))
        level = original_bias(taken, clients, found.weight, point)
    return Fit(
        torch.from_numpy(weight).to(clients.device), torch.from_numpy(level).to(clients.device),
        found.objective, max(found.gap, 0.0), found.iterations,
    )  # fmt: skip


def _by_features(problem: Problem, norm: _Norm, stop: Stop, weight: Floats) -> Found:
    weight, sweeps, bound = weight.copy(), 0, -math.inf
    scores = problem.scores(weight)
    point: Point | None = None
    model: _Model | None = None
    while True:
        point = problem.at(scores, point)
        value = point.value + norm.value(weight)
        pull = problem.pull(point.slopes)
        norms = norm.norms(pull)
        bound = max(bound, problem.dual(point, norms, norm.lam, norm.mu))
        gap = value - bound
        if stop.reached(gap, value) or sweeps >= stop.most:
            return Found(weight, value, gap, sweeps)
        chosen = _working_set(weight, norms, norm.lam, model)
        model = _modelled(problem, point, chosen, None if problem.binary else model)
        # The last step is as accurate as asked for, those before need not be.
        last = len(chosen) == problem.features and not problem.binary
        target = max(0.3 * stop.tol * value, 0.0 if last else 0.03 * gap, stop.floor)
        new, took = _newton(problem, norm, point, model, weight, pull, target, stop.most - sweeps)
        weight, scores = _searched(problem, norm, point, weight, new, scores, value)
        sweeps += took


@dataclass(frozen=True)
class _Model:
    """Second-order model of the loss by the weights of some features.

    Attributes:
        chosen: The features, in the order in which they were added.
        columns: Their values, centred where there are biases and scaled by the roots of the
            curvatures, (p, rows), or (p, n) for one model of all clients.
        products: Of `columns` by client, (p, p, m), or (p, p, 1) for all, or none: (0, 0, 0).
    """

    chosen: Longs
    columns: Floats
    products: Floats


def _working_set(weight: Floats, norms: Floats, lam: float, model: _Model | None) -> Longs:
    # Features in use and before, and of the others those with the largest slopes: all that break
    # the conditions and as many again, but at most as many as are in use.
    old = np.empty(0, dtype=np.int64) if model is None else model.chosen
    inside = np.asarray(weight.any(axis=0), dtype=np.bool_)
    used = int(inside.sum())
    inside[old] = True
    broken = int((norms[~inside] > lam).sum())
    more = min(max(used, 50), 2 * broken + 10)
    ranked = np.argsort(-norms, kind="stable")
    fresh = np.flatnonzero(inside & ~np.isin(np.arange(len(inside)), old))
    return np.concatenate([old, fresh, ranked[~inside[ranked]][:more]])


def _curves(problem: Problem, point: Point) -> Floats:
    # Kept off zero: the line search makes good what that spoils.
    return np.maximum(point.curves, 1e-6 * problem.weights)


def _modelled(problem: Problem, point: Point, chosen: Longs, old: _Model | None) -> _Model:
    # `old` is the model of the first of the chosen features, where the curvatures are the same.
    count = 0 if old is None else len(old.chosen)
    fresh = _columns(problem, point, chosen[count:])
    one = problem.shared is not None and not problem.binary
    columns = fresh if old is None else np.concatenate([old.columns, fresh])
    p, m = len(chosen), 1 if one else len(problem)
    if p * p * m > max(_GRAM, p * int(problem.offsets[-1])):
        if columns.shape[1] < problem.offsets[-1]:
            columns = np.tile(columns, len(problem))
        return _Model(chosen, columns, np.empty((0, 0, 0)))
    products = np.empty((p, p, m))
    if old is not None:
        products[:count, :count] = old.products
    for k in range(m):
        own = slice(None) if one else slice(problem.offsets[k], problem.offsets[k + 1])
        block = columns[:, own] @ fresh[:, own].T
        products[:, count:, k] = block
        products[count:, :count, k] = block[:count].T
    return _Model(chosen, columns, products)


def _columns(problem: Problem, point: Point, chosen: Longs) -> Floats:
    columns, starts = problem.columns(chosen), problem.offsets[:-1]
    if problem.shared is not None:
        if not problem.binary:
            columns -= columns.mean(axis=1, keepdims=True) if problem.free else 0.0
            return np.asarray(columns * math.sqrt(problem.shares[0]))
        columns = np.tile(columns, len(problem))
    curves = _curves(problem, point)
    if problem.free and columns.size:
        weighted = np.add.reduceat(columns * curves, starts, axis=1)
        columns -= (weighted / np.add.reduceat(curves, starts))[:, problem.owner]
    columns *= np.sqrt(curves)
    return columns


def _newton(
    problem: Problem,
    norm: _Norm,
    point: Point,
    model: _Model,
    weight: Floats,
    pull: Floats,
    target: float,
    most: int,
) -> tuple[Floats, int]:
    # The models that minimise the second-order model, and how many sweeps that took.
    whole = float(point.slopes @ (point.slopes / _curves(problem, point))) / 2
    found, _, sweeps = _multitask.solve_model(
        model.products, model.columns, problem.offsets,
        np.ascontiguousarray(pull[:, model.chosen].T),
        np.ascontiguousarray(weight[:, model.chosen].T),
        whole, norm.lam, norm.mu, target, max(most, 1),
    )  # fmt: skip
    new = weight.copy()
    new[:, model.chosen] = found.T
    return new, int(sweeps)


def _searched(
    problem: Problem,
    norm: _Norm,
    point: Point,
    weight: Floats,
    new: Floats,
    scores: Floats,
    value: float,
) -> tuple[Floats, Floats]:
    # Halves the step until the objective falls; squares are their own second-order model.
    ahead = problem.scores(new)
    length = 1.0
    while problem.binary and length > 1e-12:
        trial = new if length == 1.0 else weight + length * (new - weight)
        there = problem.at(scores + length * (ahead - scores), point)
        if there.value + norm.value(trial) <= value + 1e-15:
            return trial, problem.scores(trial)
        length /= 2
    return new, ahead


def _start(clients: Clients, taken: Taken, start: Tensor | None) -> Floats:
    shape = (len(clients), clients.spec.features)
    if start is None:
        return np.zeros((len(taken.places), shape[1]))
    if tuple(start.shape) != shape or not bool(start.isfinite().all()):
        raise ValueError(
            f"start: given shape {tuple(start.shape)}; expected finite models of shape {shape}"
        )
    return np.ascontiguousarray(start.cpu().double().numpy()[taken.places])


def _check(penalty: str, lam: float, mu: float, tol: float) -> None:
    if penalty not in ("trace", "l21"):
        raise ValueError(f"penalty: given {penalty!r}; expected 'trace' or 'l21'")
    if not 0 < lam < math.inf:
        raise ValueError(f"lam: given {lam}; expected a finite number > 0: fit alone for 0")
    if not 0 <= mu < math.inf:
        raise ValueError(f"mu: given {mu}; expected a finite number >= 0")
    if not 0 < tol < math.inf:
        raise ValueError(f"tol: given {tol}; expected a finite number > 0")
