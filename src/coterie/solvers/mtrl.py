"""Linear models of all clients together with how they relate (MTRL, Zhang and Yeung 2010).

    min_W,b,R  sum_k (1 / n_k) sum_i loss(x_i . w_k + b_k, y_i)
               + lam1/2 tr(W W') + lam2/2 tr(W' R^-1 W),    R psd (m, m), tr R = 1

over stacked models W (m, d); R says which clients are alike. The paper alternates two steps:

* W given R (`fit_related`) is a smooth convex problem, quadratic for squares. Newton steps by
  conjugate gradients, preconditioned by what the system would be if all clients had the same rows:
  then it is diagonal in the eigenvectors of R and of the features' products, and nothing of size
  md x md is formed.
* R given W (`relation_of`) is (W W')^1/2 over its trace.

Neither raises the objective, but directions that R has given up come back ever more slowly, and
the steps stall before the joint minimum. At the best R the last term is lam2/2 |W|_*^2, the square
of the sum of singular values, so `fit_mtrl` minimises over W alone, by accelerated proximal steps
to a duality gap, and takes R from W. For singular values s the proximal operator of c/2 |.|_*^2 is
max(0, s - t) with t = c sum max(0, s - t); the conjugate of a/2 |W|^2 + c/2 |W|_*^2 at V is half of
the sum of s x, x = max(0, s - t) / a with t = c sum x, or largest s^2 / (2c) if a = 0; the dual
value is that of `multitask`, for slopes of any size.

There is no privacy in this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients
from coterie.solvers._accelerated import Found, Stop, accelerate
from coterie.solvers._problem import Point, Problem, Taken, original_bias, prepare

Floats = NDArray[np.float64]
_WIDE = 1000  # features beyond which their products are taken for a multiple of the identity
_NEWTON = 100
_EXACT = 1e-12  # of the first residual, for squares


@dataclass(frozen=True)
class RelatedFit:
    """Models of all clients and their relation.

    Attributes:
        weight: (m, d), float64.
        bias: (m,), float64; zeros without one.
        relation: R, (m, m), float64; singular where models are linear combinations of others.
        objective: What was minimised, at these models.
        gap: A bound on how far `objective` is above its minimum.
        iterations: How many accelerated steps were taken.
    """

    weight: Tensor
    bias: Tensor
    relation: Tensor
    objective: float
    gap: float
    iterations: int


@dataclass(frozen=True)
class _Squared:
    """The penalty mu/2 |W|^2 + lam/2 |W|_*^2."""

    mu: float
    lam: float

    def value(self, weight: Floats) -> float:
        size = float(np.linalg.svd(weight, compute_uv=False).sum())
        return self.mu / 2 * float((weight**2).sum()) + self.lam / 2 * size * size

    def shrink(self, target: Floats, curve: float) -> Floats:
        left, sizes, right = np.linalg.svd(target, full_matrices=False)
        kept = np.maximum(sizes - _level(sizes, self.lam / curve), 0)
        return np.asarray((left * kept) @ right)

    def bound(self, problem: Problem, point: Point, pull: Floats) -> float:
        sizes: Floats = np.asarray(np.linalg.svd(pull, compute_uv=False), dtype=np.float64)
        return max(
            problem.worth(point, scale) - self.conjugate(sizes * abs(scale))
            for scale in (1.0, problem.ideal(point))
        )

    def conjugate(self, sizes: Floats) -> float:
        if self.mu == 0:
            return float(sizes.max(initial=0.0)) ** 2 / (2 * self.lam)
        kept = np.maximum(sizes - _level(sizes, self.lam / self.mu), 0) / self.mu
        return float(sizes @ kept) / 2


def _level(sizes: Floats, ratio: float) -> float:
    # t = ratio * sum max(0, s - t), s from large to small: with r of them above t it is linear.
    sums = np.cumsum(sizes)
    levels = ratio * sums / (1 + ratio * np.arange(1, len(sizes) + 1))
    above = int((sizes > levels).sum())
    return float(levels[above - 1]) if above else 0.0


@dataclass(frozen=True)
class _Relation:
    """R by its eigenvectors; lam1 + lam2 / R is what pulls the models to zero."""

    vectors: Floats
    values: Floats
    lam1: float
    lam2: float

    @cached_property
    def pulls(self) -> Floats:
        return self.lam1 + self.lam2 / self.values

    def pull(self, weight: Floats) -> Floats:
        return np.asarray(self.vectors @ (self.pulls[:, None] * (self.vectors.T @ weight)))


def fit_mtrl(
    clients: Clients,
    *,
    lam1: float,
    lam2: float,
    bias: bool,
    tol: float = 1e-6,
    most: int = 100_000,
) -> RelatedFit:
    """Fit all clients and their relation, to a relative duality gap of `tol`.

    A client without rows gets zeros. A binary client whose rows are all of one class has no finite
    best bias: with a bias it gets zero weights, and the bias at which its mean loss is `tol`.

    Args:
        clients: All clients; regression or binary rows, dense or CSR.
        lam1: The weight of the squares of the models, >= 0.
        lam2: The weight of the relation, > 0.
        bias: Whether clients have biases, which are not penalised.
        tol: The largest relative duality gap of the answer.
        most: How many accelerated steps it may take.

    Raises:
        ValueError: On numbers out of range, another task, or rows that are not finite.
        RuntimeError: If the gap is above `tol` after `most` steps.
    """
    _check(lam1, lam2, tol)
    taken = prepare(clients, bias=bias, tol=tol, compress=True)
    weight, level = np.zeros((len(clients), clients.spec.features)), taken.bias
    found = Found(weight[taken.places], 0.0, 0.0, 0)
    if len(taken.problem):
        stop = Stop.of(taken.problem, tol, most)
        found = accelerate(taken.problem, _Squared(lam1, lam2), stop, found.weight)
        stop.check(found, lam2)
        weight[taken.places] = found.weight
    if bias and len(taken.problem):
        point = taken.problem.at(taken.problem.scores(found.weight))
        level = original_bias(taken, clients, found.weight, point)
    weights = torch.from_numpy(weight).to(clients.device)
    levels = torch.from_numpy(level).to(clients.device)
    gap = max(found.gap, 0.0)
    return RelatedFit(
        weights, levels, relation_of(weights, 0.0), found.objective, gap, found.iterations
    )


def fit_related(
    clients: Clients, relation: Tensor, *, lam1: float, lam2: float, bias: bool, tol: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Fit all clients given how they relate: the first of the alternating steps.

    Args:
        clients: All clients; regression or binary rows, dense or CSR.
        relation: R, (m, m), positive definite.
        lam1: The weight of the squares of the models, >= 0.
        lam2: The weight of the relation, > 0.
        bias: Whether clients have biases, which are not penalised.
        tol: The mean loss of binary clients of one class, with a bias.

    Returns:
        Weights (m, d) and biases (m,), float64.
    """
    _check(lam1, lam2, tol)
    count = len(clients)
    if tuple(relation.shape) != (count, count):
        raise ValueError(
            f"relation: given shape {tuple(relation.shape)}; expected {(count, count)}"
        )
    values, vectors = torch.linalg.eigh(relation.cpu().double())
    if not bool((values > 0).all()):
        raise ValueError(
            f"relation: given an eigenvalue of {float(values.min()):g}; expected all > 0: add a "
            "multiple of the identity"
        )
    taken = prepare(clients, bias=bias, tol=tol, compress=True)
    steps = _Steps(taken, count, lam1, lam2)
    start = np.zeros((count, clients.spec.features))
    weight, point = steps.weights(start, _Relation(vectors.numpy(), values.numpy(), lam1, lam2))
    level = original_bias(taken, clients, weight[taken.places], point) if bias else np.zeros(count)
    return torch.from_numpy(weight).to(clients.device), torch.from_numpy(level).to(clients.device)


def relation_of(weight: Tensor, ridge: float) -> Tensor:
    """Return R = (W W' + ridge^2)^1/2 over its trace; equal shares if that is zero.

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
class _Steps:
    """The problem of the weights given a relation."""

    taken: Taken
    count: int
    lam1: float
    lam2: float

    @property
    def problem(self) -> Problem:
        return self.taken.problem

    @cached_property
    def scale(self) -> float:
        """The norm of the gradient at zero."""
        point = self.problem.at(np.zeros(int(self.problem.offsets[-1])))
        return float(np.linalg.norm(self.problem.pull(point.slopes)))

    @cached_property
    def features(self) -> tuple[Floats, Floats | None]:
        """Eigenvalues and -vectors of the products of features, averaged over all clients."""
        problem, level = self.problem, 0.25 if self.problem.binary else 1.0
        if problem.features > _WIDE:
            ones = np.ones(int(problem.offsets[-1]))
            mean = float((problem.pull(ones * problem.weights) ** 2).sum())
            return np.full(problem.features, level * mean / self.count / problem.features), None
        total = np.zeros((problem.features, problem.features))
        for k in range(1 if problem.shared is not None else len(problem)):
            own = _own(problem, k)
            if problem.free:
                own = own - own.mean(axis=0)
            total += own.T @ own * problem.shares[k]
        copies = len(problem) if problem.shared is not None else 1
        values, vectors = np.linalg.eigh(total * (copies * level / max(self.count, 1)))
        return np.maximum(values, 0), vectors

    def gradient(self, weight: Floats, point: Point, relation: _Relation) -> Floats:
        slope = relation.pull(weight)
        slope[self.taken.places] += self.problem.pull(point.slopes)
        return slope

    def weights(self, weight: Floats, relation: _Relation) -> tuple[Floats, Point]:
        """Minimise over the weights, from given ones."""
        problem, places = self.problem, self.taken.places
        scores = problem.scores(weight[places])
        point = problem.at(scores)
        if not len(problem):
            return np.zeros_like(weight), point
        for _ in range(_NEWTON if problem.binary else 1):
            slope = self.gradient(weight, point, relation)
            size = float(np.linalg.norm(slope))
            if size == 0:
                break
            part = min(0.1, size / max(self.scale, size)) if problem.binary else _EXACT
            step = self.direction(point, relation, slope, part)
            moved = problem.scores(step[places])
            fall = -float((slope * step).sum())
            length = self.length(weight, step, scores, moved, point, relation, fall)
            weight, scores = weight + length * step, scores + length * moved
            point = problem.at(scores, point)
            # Half of `fall` is about what the step gains: no more than rounding does.
            if fall <= 1e-14 * (point.value + fall):
                break
        return weight, point

    def direction(self, point: Point, relation: _Relation, slope: Floats, part: float) -> Floats:
        """Solve for the Newton step."""
        problem, places = self.problem, self.taken.places
        totals = np.add.reduceat(point.curves, problem.offsets[:-1])

        def times(step: Floats) -> Floats:
            scores = problem.scores(step[places])
            bent = point.curves * scores
            if problem.free:
                # Biases follow: what is left is centred, weighted by the curvatures.
                means = np.add.reduceat(bent, problem.offsets[:-1]) / np.maximum(totals, 1e-300)
                bent -= point.curves * means[problem.owner]
            product = relation.pull(step)
            product[places] += problem.pull(bent)
            return product

        values, vectors = self.features
        below = relation.pulls[:, None] + values

        def divide(rest: Floats) -> Floats:
            turned = relation.vectors.T @ rest
            if vectors is None:
                return np.asarray(relation.vectors @ (turned / below))
            return np.asarray(relation.vectors @ (turned @ vectors / below) @ vectors.T)

        return _conjugate_gradients(times, divide, -slope, part)

    def length(
        self, weight: Floats, step: Floats, scores: Floats, moved: Floats, point: Point,
        relation: _Relation, fall: float,
    ) -> float:  # fmt: skip
        """Halve the step until the objective falls as it should; 0 if rounding forbids it."""
        if not self.problem.binary:
            return 1.0
        pulled = relation.pull(step)
        linear, square = float((pulled * weight).sum()), float((pulled * step).sum()) / 2
        length = 1.0
        while length > 1e-10:
            change = self.problem.at(scores + length * moved, point).value - point.value
            change += length * linear + length**2 * square
            if change <= -0.1 * length * fall or (change <= 0 and fall <= 1e-12 * point.value):
                return length
            length /= 2
        return 0.0


def _own(problem: Problem, client: int) -> Floats:
    if problem.shared is not None:
        return problem.shared
    first = int(problem.starts[client])
    rows = problem.rows[first : first + int(np.diff(problem.offsets)[client])]
    return np.asarray(rows if isinstance(rows, np.ndarray) else rows.toarray(), dtype=np.float64)


def _conjugate_gradients(
    times: Callable[[Floats], Floats],
    divide: Callable[[Floats], Floats],
    right: Floats,
    part: float,
) -> Floats:
    # Stops when the preconditioned residual has fallen to `part` of the first.
    found, rest = np.zeros_like(right), right.copy()
    ready = divide(rest)
    direction, size = ready, float((rest * ready).sum())
    goal = part * part * size
    for _ in range(10 * right.size):
        if not size > goal:
            break
        product = times(direction)
        length = size / float((direction * product).sum())
        found += length * direction
        rest -= length * product
        ready = divide(rest)
        size, before = float((rest * ready).sum()), size
        direction = ready + size / before * direction
    return found


def _check(lam1: float, lam2: float, tol: float) -> None:
    if not 0 <= lam1 < math.inf:
        raise ValueError(f"lam1: given {lam1}; expected a finite number >= 0")
    for name, value in (("lam2", lam2), ("tol", tol)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: given {value}; expected a finite number > 0")
