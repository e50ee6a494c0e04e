"""The joint multi-task SVM of `coterie.solvers.sdca.fit_joint`, on its way to the solution."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.solvers import _sdca
from coterie.solvers.svm import Array, Problem, share

_SELDOM = 50  # epochs after which the gap is looked at in any case


@dataclass
class Joint:
    """One output of the problem: duals (c, L, 1), w (D,), v_k (c, D) and how good they are."""

    problem: Problem
    c2: float
    parts: int
    dual: Array
    shared: Array
    own: Array
    order: Array
    active: Array
    primal: float = math.inf
    gap: float = math.inf
    floor: float = 0.0
    epochs: int = 0

    @classmethod
    def begun(cls, problem: Problem, dtype: torch.dtype, c2: float, parts: int) -> "Joint":
        """Start at zero."""
        stack, clients = problem.stack, len(problem.ids)
        dual = problem.padded(torch.zeros(clients, 0, 1), dtype).numpy()
        own = np.zeros((clients, problem.features + stack.bias), dual.dtype)
        order = np.arange(stack.counts.sum()) - np.repeat(stack.bases, stack.counts)
        parts = max(min(parts, clients), 1)
        shared = np.zeros_like(own, shape=own.shape[1:])
        return cls(problem, c2, parts, dual, shared, own, order, stack.counts.copy())

    def solve(self, keys: NDArray[np.uint64], tol: float, most: int) -> "Joint":
        """Sweep until the gap is small enough; what sweeps find says when to look at it."""
        members = [np.arange(part, len(keys), self.parts) for part in range(self.parts)]
        self._certify()
        limit, due = math.inf, _SELDOM
        with ThreadPoolExecutor(self.parts) as pool:
            while self.gap > tol * self.primal + self.floor and self.epochs < most:
                self.epochs += 1
                limit, guess = self._sweep(pool, keys, members, limit)
                look = guess <= tol * self.primal or not self.active.any()
                if look or self.epochs >= min(due, most):
                    self._certify()
                    self.active[:], limit = self.problem.stack.counts, math.inf
                    due = self.epochs + _SELDOM
        return self

    def _sweep(
        self,
        pool: ThreadPoolExecutor,
        keys: NDArray[np.uint64],
        members: list[Array],
        limit: float,
    ) -> tuple[float, float]:
        moved = np.zeros((self.parts, len(self.shared)), self.shared.dtype)

        def work(part: int) -> tuple[float, float]:
            return _sdca.visit(
                self.problem.rows, self.problem.stack, keys, self.epochs, members[part],
                float(self.parts), 1 / self.c2, limit, self.shared.copy(), self.own, self.dual,
                self.order, self.active, moved[part],
            )  # fmt: skip

        slopes, gaps = zip(*pool.map(work, range(self.parts)), strict=True)
        self.shared = self.shared + moved.sum(axis=0)
        return max(slopes), sum(gaps)

    def _certify(self) -> None:
        """Build the models from the duals anew, and measure them."""
        problem, clients = self.problem, len(self.own)
        rows, stack = problem.rows, problem.stack
        sums, out = np.zeros_like(self.own), np.zeros((clients, 1, 3))
        cost = problem.work(1)
        share(
            lambda begin, end: _sdca.rebuild(rows, stack, self.dual, sums, begin, end),
            clients,
            cost,
        )
        self.shared, self.own = sums.sum(axis=0), (sums / self.c2).astype(sums.dtype)
        at = (self.shared + self.own)[:, None]
        share(
            lambda begin, end: _sdca.gaps(rows, stack, at, self.dual, begin, end, out),
            clients,
            cost,
        )
        loss, self.gap, size = out.sum(axis=(0, 1)).tolist()
        self.primal = loss + 0.5 * float((self.shared.astype(np.float64) ** 2).sum())
        if self.c2 < math.inf:
            self.primal += 0.5 * self.c2 * float((self.own.astype(np.float64) ** 2).sum())
        precision = float(np.finfo(self.dual.dtype).eps)
        self.floor = _sdca.ROUNDING * precision * (size + self.primal)
