"""Accelerated proximal steps with restarts, to a duality gap."""

import math
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.solvers._problem import Point, Problem

Floats = NDArray[np.float64]
_CHECK = 10  # steps between looks at the gap
_ROUNDING = 1e-14  # of the loss at zero: a gap below that is lost in the sums


@dataclass(frozen=True)
class Stop:
    """When to stop: at a gap of `tol` times the objective, or after `most` iterations."""

    tol: float
    most: int
    floor: float

    @classmethod
    def of(cls, problem: Problem, tol: float, most: int) -> "Stop":
        """Allow for the rounding of this problem's sums."""
        zero = problem.at(np.zeros(int(problem.offsets[-1]))).value
        return cls(tol, most, _ROUNDING * zero)

    def reached(self, gap: float, objective: float) -> bool:
        """Return whether a gap is small enough."""
        return gap <= self.tol * objective + self.floor

    def check(self, found: "Found", lam: float) -> None:
        """Refuse an answer whose gap is too large."""
        if not self.reached(found.gap, found.objective):
            self._refuse(found, lam)

    def _refuse(self, found: "Found", lam: float) -> NoReturn:
        raise RuntimeError(
            f"relative gap {found.gap / max(found.objective, 1e-300):.1e} after "
            f"{found.iterations} iterations; expected <= {self.tol:.1e}: raise most, tol or the "
            f"penalty (now {lam:g}), or scale the features to like sizes"
        )


@dataclass(frozen=True)
class Found:
    """Models (m, d), their objective, a bound on how far it is above its minimum, and steps."""

    weight: Floats
    objective: float
    gap: float
    iterations: int


class Penalty(Protocol):
    """What is added to the loss: mu/2 |W|^2 and a part with a proximal operator."""

    @property
    def mu(self) -> float:
        """The weight of the squares."""

    def value(self, weight: Floats) -> float:
        """Return the penalty at models."""

    def shrink(self, target: Floats, curve: float) -> Floats:
        """Minimise curve/2 |W - target|^2 + the part beside the squares."""

    def bound(self, problem: Problem, point: Point, pull: Floats) -> float:
        """Return a lower bound on the minimum of the objective from slopes q and X'q."""


def accelerate(problem: Problem, penalty: Penalty, stop: Stop, weight: Floats) -> Found:
    """Minimise the loss plus a penalty, from given models (Beck and Teboulle 2009).

    Momentum is dropped when it points uphill (O'Donoghue and Candes 2015); the length of a step is
    one over a curvature, which is doubled until the loss bends less than that and lowered slowly.
    """
    here = weight
    scores = problem.scores(here)
    last, last_scores, momentum = here, scores, 1.0
    point = problem.at(scores)
    bound, step, curve = -math.inf, 0, _curve(problem, penalty.mu)
    while True:
        if step % _CHECK == 0 or step >= stop.most:
            point = problem.at(scores, point)
            value = point.value + penalty.value(here)
            bound = max(bound, penalty.bound(problem, point, problem.pull(point.slopes)))
            if stop.reached(value - bound, value) or step >= stop.most:
                return Found(here, value, value - bound, step)
        after = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        beta = (momentum - 1) / after
        ahead, ahead_scores = here + beta * (here - last), scores + beta * (scores - last_scores)
        last, last_scores = here, scores
        here, scores, curve = _proximal(problem, penalty, ahead, ahead_scores, curve)
        uphill = float(((ahead - here) * (here - last)).sum()) > 0
        momentum = 1.0 if uphill else after
        step += 1


def _curve(problem: Problem, mu: float) -> float:
    # A first guess at the curvature, from below: |X_k' u|^2 over |u|^2 for some u of each client.
    slopes = np.sign(problem.targets) * problem.weights
    sizes = (problem.pull(slopes) ** 2).sum(axis=1) / np.maximum(problem.shares, 1e-300)
    level = float(sizes.max()) / max(int(np.diff(problem.offsets).max()), 1)
    return max(level * (0.25 if problem.binary else 1.0), 1e-12) + mu


def _proximal(
    problem: Problem, penalty: Penalty, ahead: Floats, scores: Floats, curve: float
) -> tuple[Floats, Floats, float]:
    point = problem.at(scores)
    slope = problem.pull(point.slopes) + penalty.mu * ahead
    curve = max(0.9 * curve, penalty.mu)
    while True:
        new = penalty.shrink(ahead - slope / curve, curve)
        new_scores = problem.scores(new)
        moved = float(((new - ahead) ** 2).sum())
        bend = _bend(problem, point, new_scores - scores, new_scores)
        if bend <= (curve - penalty.mu) / 2 * moved:
            return new, new_scores, curve
        curve *= 2


def _bend(problem: Problem, point: Point, change: Floats, scores: Floats) -> float:
    # How far the loss is above its tangent; less what rounding adds where it is a difference.
    if not problem.binary:
        change = problem.centred(change)
        return float(change @ (change * problem.weights)) / 2
    bend = problem.at(scores, point).value - point.value - float(point.slopes @ change)
    return bend - 1e-15 * len(problem)
