"""Rows found exactly, from rounds in which some did not move or one moved last.

Messages are M = D U: D (T, n) the steps of alpha, U (n, d) the rows u_i = y_i x_i. Where the rows
are independent, each row has a *functional* g_i with g_i . u_j = 1 for j = i and else 0, and M g_i
is the series of its steps. What singles functionals out is that steps are often exactly 0 (a row at
an end of its box, or one masked away) and that the sums of steps lie in [0, C1] and often at its
ends. Both are vertices of polytopes, and linear programs find them (the first is the recovery of
sparsely used dictionaries; Spielman, Wang, Wright 2012). Masks cannot hide this: a mask makes more
steps 0.

Serial steps tell something else: the row that moved last in a round has margin 1 at the end of it,
u . (w + v + a dw) = 1, and all but u is seen. A row that was last in more rounds than it has
unknowns is found by consensus (Fischler and Bolles 1981).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from coterie.audit.view import Array

Flags = NDArray[np.bool_]
_SAME = 1e-9
_MISS = 1e-8
_NEAR = 1e-3
_MOST_ROUNDS = 150
_CHUNK = 2000


def span(messages: Array, tolerance: float = 1e-9) -> Array:
    """Return an orthonormal basis, (d, m), of the space that messages lie in."""
    _, sizes, basis = np.linalg.svd(messages, full_matrices=False)
    kept: Array = basis[sizes > tolerance * sizes.max(initial=0.0)].T
    return kept


@dataclass(frozen=True)
class Found:
    """A candidate and the rounds that speak for it."""

    value: Array
    rounds: Flags

    @property
    def count(self) -> int:
        """How many rounds speak for it."""
        return int(self.rounds.sum())


def functionals(steps: Array, c1: float, tries: int, coins: np.random.Generator) -> list[Found]:
    """Find functionals g, (m,), of messages in coordinates of their span, (T, m); best first."""
    size = np.linalg.norm(steps, axis=1)
    heard = np.flatnonzero(size > 1e-7 * size.max())
    sums = np.cumsum(steps, axis=0)[heard]
    if len(heard) > _MOST_ROUNDS:
        heard = np.sort(coins.choice(heard, _MOST_ROUNDS, replace=False))
        sums = np.cumsum(steps, axis=0)[heard]
    if len(heard) < steps.shape[1] + 3:
        return []
    found = _still(steps[heard] / size[heard, None], tries, coins)
    if np.isfinite(c1):
        found += _boxed(sums, c1, tries, coins)
    return _choose(found, steps.shape[1])


def _still(steps: Array, tries: int, coins: np.random.Generator) -> list[Found]:
    """Minimise the sum of |steps . g| with that of one round held at 1: steps that are often 0."""
    rounds, width = steps.shape
    white, shape = np.linalg.qr(steps)
    white = white * np.sqrt(rounds)
    goal = np.concatenate([np.zeros(width), np.ones(rounds)])
    eye = np.eye(rounds)
    sides = np.block([[white, -eye], [-white, -eye]])
    found = []
    for turn in coins.permutation(rounds)[:tries]:
        held = np.concatenate([white[turn], np.zeros(rounds)])[None]
        solved = _solve(goal, sides, np.zeros(2 * rounds), held)
        if solved is not None:
            moved = white @ solved[:width]
            found.append(Found(np.linalg.solve(shape, solved[:width]), np.abs(moved) < _SAME))
    return found


def _boxed(sums: Array, c1: float, tries: int, coins: np.random.Generator) -> list[Found]:
    """Go to vertices of {g: 0 <= sums . g <= C1}: alphas that are often at an end of the box."""
    white, shape = np.linalg.qr(sums)
    white = white * np.sqrt(len(sums))
    sides = np.concatenate([white, -white])
    ends = np.concatenate([np.full(len(sums), c1), np.zeros(len(sums))])
    found = []
    for turn in range(tries):
        pair = white[coins.integers(len(sums), size=2)]
        goal = pair[1] - pair[0] if turn % 2 else coins.standard_normal(white.shape[1])
        solved = _solve(goal, sides, ends)
        if solved is None:
            continue
        alpha = white @ solved
        low, high = np.abs(alpha) < _SAME * c1, np.abs(alpha - c1) < _SAME * c1
        # A round at the same end as the one before says nothing more: the message has no part in g.
        if alpha.max() > 1e-6 * c1:
            found.append(Found(np.linalg.solve(shape, solved) * np.sqrt(len(sums)), low | high))
    return found


def _solve(goal: Array, sides: Array, ends: Array, held: Array | None = None) -> Array | None:
    equal: dict[str, Any] = {} if held is None else {"A_eq": held, "b_eq": [1.0]}
    solved = linprog(goal, sides, ends, bounds=(None, None), method="highs-ds", **equal)
    return solved.x if solved.status == 0 else None


def _choose(found: list[Found], width: int) -> list[Found]:
    """Keep independent candidates for which more speaks than for any vertex, best first."""
    kept: list[Found] = []
    basis = np.zeros((width, 0))
    for one in sorted(found, key=lambda one: -one.count):
        if one.count < width + 2 or len(kept) == width:
            break
        unit = one.value / np.linalg.norm(one.value)
        apart = unit - basis @ (basis.T @ unit)
        # A mixture of two functionals has, but for accidents, the rounds that both have.
        mixed = any((one.rounds & ~other.rounds).sum() <= 3 for other in kept)
        if np.linalg.norm(apart) > 1e-5 and not mixed:
            kept.append(Found(unit, one.rounds))
            basis = np.column_stack([basis, apart / np.linalg.norm(apart)])
    return kept


def consensus(
    left: Array,
    right: Array,
    scale: Array,
    coins: np.random.Generator,
    *,
    tries: int,
    largest: float = math.inf,
) -> list[Found]:
    """Find x with left @ x = right in more rounds than it has unknowns; best first.

    Args:
        left: (T, r).
        right: (T,).
        scale: What a miss is measured by in each round, (T,).
        coins: For the choice of rounds.
        tries: How many choices of r rounds to solve for.
        largest: The largest |x| to look at: rounds that are nearly alike are solved by huge ones.
    """
    rounds, unknowns = left.shape
    if rounds < unknowns + 3 or not unknowns:
        return []
    found: list[Found] = []
    for _ in range(0, tries, _CHUNK):
        # One row is last in a round: choose among those that no row was found for, or nearly.
        taken = np.zeros(rounds, dtype=bool)
        for one in found:
            near = _NEAR * (1 + np.linalg.norm(one.value)) * scale
            taken |= np.abs(left @ one.value - right) <= near
        open_rounds = np.flatnonzero(~taken)
        if len(open_rounds) < unknowns:
            break
        drawn = coins.random((min(tries, _CHUNK), len(open_rounds)))
        chosen = open_rounds[np.argsort(drawn, axis=1)[:, :unknowns]]
        systems = left[chosen]
        sign, _ = np.linalg.slogdet(systems)
        systems, goals = systems[sign != 0], right[chosen][sign != 0]
        solved = np.linalg.solve(systems, goals[..., None])[..., 0]
        size = np.linalg.norm(solved, axis=1)
        solved, size = solved[size < largest], size[size < largest]
        reach = _MISS * (1 + size)[:, None] * scale
        fits = np.abs(solved @ left.T - right) <= reach
        found += _refined(left, right, scale, fits)
        found = _distinct(found)
    return found


def _refined(left: Array, right: Array, scale: Array, fits: Flags) -> list[Found]:
    """Solve once more with all rounds that fit, for the distinct ones of a chunk, best first."""
    fits = fits[fits.sum(axis=1) >= left.shape[1] + 2]
    refined = []
    while len(fits):
        here = fits[int(np.argmax(fits.sum(axis=1)))]
        weighted, aims = left[here] / scale[here, None], right[here] / scale[here]
        # Rounds that are alike speak once: no round may be all that speaks for an unknown.
        if (np.linalg.qr(weighted)[0] ** 2).sum(axis=1).max() < 0.999:
            refined.append(Found(np.linalg.lstsq(weighted, aims, rcond=None)[0], here))
        # The same row again, or a mixture of rows, which fits where they all fit.
        fits = fits[(fits & ~here).sum(axis=1) > 2]
    return refined


def _distinct(found: list[Found]) -> list[Found]:
    kept: list[Found] = []
    for one in sorted(found, key=lambda one: -one.count):
        if not any((one.rounds & ~other.rounds).sum() <= 2 for other in kept):
            kept.append(one)
    return kept
