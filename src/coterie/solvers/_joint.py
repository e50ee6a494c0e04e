"""The joint multi-task SVM of `coterie.solvers.sdca.fit_joint`, on its way to the solution."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.rng import Rng
from coterie.solvers import _fits, _sdca
from coterie.solvers.svm import Array, Problem, share

_BURST = 10  # epochs between two moves of all free duals
_TURNS = 20  # conjugate gradients of one move
_CHUNK = 32  # rows of one client that are visited in a row


@dataclass
class Joint:
    """One output of the problem: duals (c, L, 1), w (D,), v_k (c, D) and how good they are."""

    problem: Problem
    c2: float
    members: list[Array]
    order: Array
    dual: Array
    shared: Array
    own: Array
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
        members = [np.arange(part, clients, parts) for part in range(parts)]
        shared = np.zeros(own.shape[1], dual.dtype)
        return cls(problem, c2, members, order, dual, shared, own)

    def solve(self, keys: NDArray[np.uint64], tol: float, most: int) -> "Joint":
        """Sweep until the gap is small enough; what sweeps find says when to look at it."""
        self._certify()
        limit, due, active = math.inf, _fits.SELDOM, self.problem.stack.counts.copy()
        with ThreadPoolExecutor(len(self.members)) as pool:
            while self.gap > tol * self.primal + self.floor and self.epochs < most:
                self.epochs += 1
                limit, guess = self._sweep(pool, keys, active, limit)
                look = guess <= tol * self.primal or not active.any()
                if self.epochs % _BURST == 0:
                    self.accelerate()
                if look or self.epochs >= min(due, most):
                    self._certify()
                    active[:], limit = self.problem.stack.counts, math.inf
                    due = max(_fits.SELDOM, 2 * self.epochs)
        return self

    def _sweep(
        self, pool: ThreadPoolExecutor, keys: NDArray[np.uint64], active: Array, limit: float
    ) -> tuple[float, float]:
        """Go through the active rows once, each part by a thread against a w of its own."""
        parts = len(self.members)
        copies = [self.shared.copy() for _ in range(parts)]

        def work(part: int) -> tuple[float, float]:
            key = Rng(int(keys[0])).at("epoch", self.epochs, part).key
            return _fits.visit(
                self.problem.rows, self.problem.stack, np.uint64(key), self.members[part],
                _CHUNK, self.order, active, limit, float(parts), 1 / self.c2, copies[part],
                self.own, self.dual,
            )  # fmt: skip

        slopes, gaps = zip(*pool.map(work, range(parts)), strict=True)
        moved = [(copy - self.shared) / parts for copy in copies]
        self.shared = self.shared + sum(moved)
        return max(slopes), sum(gaps)

    def accelerate(self) -> None:
        """Move all duals that are inside their boxes at once."""
        apart = self.c2 < math.inf
        _fits.accelerate(
            self.problem.rows, self.problem.stack, 0, np.arange(len(self.own)), 1 / self.c2,
            self.shared, self.own if apart else self.own[:0], self.dual,
            _TURNS,
        )  # fmt: skip

    def _certify(self) -> None:
        """Build the models from the duals anew, and measure them."""
        problem, clients = self.problem, len(self.own)
        rows, stack = problem.rows, problem.stack
        sums, out = np.zeros_like(self.own), np.zeros((clients, 1, 3))
        cost = problem.work(1)
        share(
            lambda begin, end: _fits.rebuild(rows, stack, self.dual, sums, begin, end),
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
        self.floor = _fits.ROUNDING * precision * (size + self.primal)
