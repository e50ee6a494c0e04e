"""Limits: what the sum of so many clients' bounded contributions can be, mechanism by mechanism.

A `Ball` names leaves that are bounded together. The sum of n clients has norm at most n B in them,
no number above n B, and lies on a public grid of step g. Where clients add noise themselves, the
sum reaches further; then limits are such that honest noise passes one with probability below 1e-13.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import singledispatch
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.blocks import BlockSum
from coterie.privacy.laplace import LaplaceSum
from coterie.privacy.local import LocalGaussianSum
from coterie.privacy.mechanisms import Exact, GaussianSum, Shapes, count_numbers
from coterie.privacy.moments import GaussianGram, GaussianRows, Squares, WishartGram, vector_grid

_RARE = 1e-13
"""How often honest local noise may pass a limit, at most; it has two, of norm and of numbers."""


@dataclass(frozen=True)
class Ball:
    """Leaves that are bounded together: what the sum of one client's part of them can be.

    `bound` is exact, `order` the norm (1 or 2), `rows` how many rows have a limit each, `deviation`
    that of noise inside the sum.
    """

    shapes: Shapes
    bound: Fraction
    step: float
    order: Literal[1, 2] = 2
    positive: bool = False
    gram: bool = False
    rows: int = 1
    deviation: float = 0.0

    @property
    def numbers(self) -> int:
        """How many numbers have one limit together."""
        return count_numbers(self.shapes) // self.rows

    def clients(self, ids: NDArray[np.int64]) -> int:
        """Count the clients that a limit is of: one where each has a row of its own."""
        return len(ids) if self.rows == 1 else 1

    def reach(self, clients: int) -> float:
        """Return the limit of the norm of so many clients' sum.

        With noise: P(|N| > sqrt(d) + t) <= exp(-t^2/2) for d standard normals N, and each of them
        is rounded by at most half a step.
        """
        limit = float(clients * self.bound)
        if self.deviation:
            far = math.sqrt(self.numbers) + math.sqrt(-2 * math.log(_RARE))
            limit += self.deviation * math.sqrt(clients) * far
            limit += clients * self.step * math.sqrt(self.numbers) / 2
        return limit

    def most(self, clients: int) -> int:
        """Return the limit of a single number, in whole steps.

        With noise: P(|N| > t) <= exp(-t^2/2) for a normal N; over all numbers, a union.
        """
        limit = clients * self.bound / Fraction(self.step)
        if self.deviation:
            far = math.sqrt(2 * math.log(max(self.numbers, 1) / _RARE))
            noise = self.deviation / self.step * math.sqrt(clients) * far
            limit += math.ceil(noise) + clients
        return math.floor(limit)


@singledispatch
def balls(mechanism: Any, totals: Shapes) -> tuple[Ball, ...]:
    """Return the limits of a mechanism's sums, of such shapes; none for sums without privacy.

    Raises:
        TypeError: For a mechanism that no rule is known for.
    """
    raise TypeError(
        f"no rule says what a sum of a {type(mechanism).__name__} can be: add one to "
        "privacy/limits.py before it travels"
    )


@balls.register
def _(mechanism: Exact, totals: Shapes) -> tuple[Ball, ...]:
    return ()


@balls.register
def _(mechanism: GaussianSum | LocalGaussianSum | GaussianRows, totals: Shapes) -> tuple[Ball, ...]:
    one = GaussianSum(mechanism.bound, mechanism.noise_multiplier)
    rows = mechanism.clients if isinstance(mechanism, GaussianRows) else 1
    step = one.grid(count_numbers(totals) // rows)
    local = isinstance(mechanism, LocalGaussianSum)
    inside = one.noise_multiplier * one.bound if local else 0.0
    return (Ball(totals, Fraction(one.bound), step, rows=rows, deviation=inside),)


@balls.register
def _(mechanism: LaplaceSum, totals: Shapes) -> tuple[Ball, ...]:
    return (Ball(totals, Fraction(mechanism.bound), mechanism.grid(), order=1),)


@balls.register
def _(mechanism: Squares, totals: Shapes) -> tuple[Ball, ...]:
    return tuple(replace(ball, positive=True) for ball in balls(mechanism.inner, totals))


@balls.register
def _(mechanism: BlockSum, totals: Shapes) -> tuple[Ball, ...]:
    each = mechanism.each({name: math.prod(shape) for name, shape in totals.items()})
    found = []
    for block in mechanism.blocks:
        (ball,) = balls(each[block.name], {block.name: totals[block.name]})
        found.append(replace(ball, positive=block.kind != "signed"))
    return tuple(found)


@balls.register
def _(mechanism: GaussianGram | WishartGram, totals: Shapes) -> tuple[Ball, ...]:
    step = vector_grid(mechanism.bound) ** 2
    return (Ball(totals, Fraction(mechanism.bound) ** 2, step, gram=True),)
