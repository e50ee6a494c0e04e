"""Mechanisms: clip on the client, sum, perturb on the server, and the event that pays for it.

A mechanism owns its sensitivity: nobody can state another. `GaussianSum` works on a public grid of
step g, a power of two. A client's clipped row is rounded to the grid *before* it leaves, with the
clip lowered so that the norm after rounding is at most the bound; sums of multiples of g are exact
in float64, in any order; and the noise is rounded to the same grid. Since rounding x + N to a grid
that x lies on equals x + rounded N, the post is a function of the ideal, real-valued Gaussian
mechanism: no low-order bits of a sum survive for a floating-point attack (Mironov 2012, "On
significance of the least significant bits for differential privacy"). ADR 0009 says what remains.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Tree, clip_rows, map_arrays, map_leaves, size
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import Event, Gaussian, NonPrivate, Relation, check_relation

MOST_CLIENTS = 1 << 22
"""Sums over more clients could exceed 2^53 grid steps, and would no longer be exact."""


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a contribution or of a post, by leaf, without the client axis."""


class Shape(Enum):
    """What a method needs posted of its clients' contributions.

    NONE: nothing. SUM: their sum. GRAM: the sum of w w^T over vectors w, a symmetric matrix.
    SQUARES: the diagonal of that alone. ROWS: each client's own, in a row of its own.
    POOLED: everything in clear, all rows in one place; never private, for reference methods.
    """

    NONE = "none"
    SUM = "sum"
    GRAM = "gram"
    SQUARES = "squares"
    ROWS = "rows"
    POOLED = "pooled"


class Mechanism(Protocol):
    """Clip, reduce, perturb, and the event: one frozen value."""

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Bound each client's row; give the bounded rows and the factor kept of each."""

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Add bounded rows up over clients (with these numbers); additive over blocks."""

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a post for contributions of such shapes."""

    def draws(self, totals: Shapes) -> int:
        """Count the normals that the noise of one post takes, to draw them ahead; 0 if none."""

    def sensitivity(self, relation: Relation) -> float:
        """Bound what one client can change in `reduce(clip(rows))`, in the norm of the noise."""

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add noise to a sum."""

    def radius(self, totals: Shapes) -> float:
        """Say how far noise alone reaches, about: a public number, for post-processing.

        The spectral norm of a symmetric matrix of noise, else its largest entry.
        """

    def event(self) -> Event:
        """Name the release for the ledger."""


@dataclass(frozen=True)
class GaussianSum:
    """Sum of rows clipped to l2 norm `bound`, plus N(0, (noise_multiplier * bound)^2 I).

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9 says how
    far ours are from them), mu = s / noise_multiplier, s = 1 under zero_out (the client's row
    replaced by zeros) and 2 under replace, provided `entropy` gives independent uniform words that
    nobody else learns. The bound holds after floating-point rounding, for rows of any size, NaN and
    infinity included. Tests:
    tests/properties/test_sensitivity.py, tests/statistics/test_noise.py.
    """

    bound: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        for name in ("bound", "noise_multiplier"):
            value = getattr(self, name)
            # Far from the ends of float64, so that squares and grid steps are ordinary numbers.
            if not (1e-100 <= value <= 1e100):
                raise ValueError(
                    f"{name} = {value}: expected a positive number between 1e-100 and 1e100; "
                    "for a run without privacy ask for epsilon = inf instead"
                )

    def grid(self, numbers: int) -> float:
        """Return the public grid step for rows of so many numbers, a power of two.

        Fine against the noise (2^-20 of its standard deviation) and against the clip (rounding a
        row moves it by at most 2^-10 of the bound), but never finer than 2^-30 of the bound, so
        that sums over 2^22 clients stay exact in float64.
        """
        fine = min(self.noise_multiplier * 2.0**-20, 2.0**-9 / math.sqrt(max(numbers, 1)))
        return float(2.0 ** math.floor(math.log2(self.bound * max(fine, 2.0**-30))))

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip to the bound less the rounding, then round to the grid."""
        numbers = sum(leaf[0].numel() if len(leaf) else 0 for leaf in rows.values())
        step = self.grid(numbers)
        clipped, kept = clip_rows(rows, self.bound - step * math.sqrt(numbers) / 2)
        # In place: the clipped rows are this function's own. 1/step is exact, a power of two.
        return map_leaves(lambda leaf: leaf.mul_(1 / step).round_().mul_(step), clipped), kept

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum over clients, exactly."""
        return sum_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution."""
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw one normal a number."""
        return count_numbers(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound, twice under replace."""
        check_relation(relation)
        return self.bound * (2.0 if relation == "replace" else 1.0)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add Gaussian noise, rounded to the grid of the sum."""
        step = self.grid(size(total))
        deviation = self.noise_multiplier * self.bound

        noise = np.rint(normals(entropy, size(total)) * (deviation / step)) * step
        noisy, used = {}, 0
        for name in sorted(total):
            leaf = total[name].numpy()
            noisy[name] = leaf + noise[used : used + leaf.size].reshape(leaf.shape)
            used += leaf.size
        return map_arrays(noisy)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest of as many normals."""
        numbers = max(count_numbers(totals), 2)
        return self.noise_multiplier * self.bound * math.sqrt(2 * math.log(numbers))

    def event(self) -> Event:
        """Name a Gaussian release."""
        return Gaussian(self.noise_multiplier)


@dataclass(frozen=True)
class Exact:
    """What `shape` asks for, as it is: no clipping, no noise, no privacy.

    **Guarantee:** none; the event says so and the ledger answers infinity.
    """

    shape: Shape = Shape.SUM
    clients: int = 0

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Turn non-finite rows into zeros; keep the others."""
        return clip_rows(rows, math.inf)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Add up over clients."""
        if self.shape is Shape.GRAM:
            return gram_rows(rows)
        if self.shape is Shape.SQUARES:
            return sum_rows(map_leaves(torch.square, rows))
        return sum_rows(rows) if self.shape is Shape.SUM else place_rows(rows, ids, self.clients)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a post."""
        if self.shape is Shape.GRAM:
            return square_shapes(contribution)
        if self.shape is Shape.ROWS:
            return {name: (self.clients, *shape) for name, shape in contribution.items()}
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw nothing."""
        return 0

    def sensitivity(self, relation: Relation) -> float:
        """Return infinity."""
        return math.inf

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Leave the sum as it is."""
        return dict(total)

    def radius(self, totals: Shapes) -> float:
        """Return zero: there is no noise."""
        return 0.0

    def event(self) -> Event:
        """Name a release without privacy."""
        return NonPrivate()


def count_numbers(shapes: Shapes) -> int:
    """Count the numbers in a tree of such shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def sum_rows(rows: Tree) -> Tree:
    """Sum over clients, and bring the sums to the CPU in one transfer."""
    sums = {name: leaf.sum(dim=0) for name, leaf in rows.items()}
    flat = torch.cat([leaf.reshape(-1) for leaf in sums.values()]).cpu()
    parts = torch.split(flat, [leaf.numel() for leaf in sums.values()])
    return {
        name: part.reshape(leaf.shape)
        for (name, leaf), part in zip(sums.items(), parts, strict=True)
    }


def gram_rows(rows: Tree) -> Tree:
    """Sum w w^T over clients: one product of (features, clients) by (clients, features)."""
    return {name: (leaf.mT @ leaf).cpu() for name, leaf in rows.items()}


def square_shapes(contribution: Shapes) -> Shapes:
    """Return the shapes of second moments of vectors.

    Raises:
        ValueError: If a contribution is not a vector.
    """
    for name, shape in contribution.items():
        if len(shape) != 1:
            raise ValueError(
                f"{name} has shape {shape}: a second moment is posted of vectors; "
                "contribute one vector a client"
            )
    return {name: (*shape, *shape) for name, shape in contribution.items()}


def place_rows(rows: Tree, ids: Tensor | None, clients: int) -> Tree:
    """Put each client's row where its number says, among zeros."""
    if ids is None:
        raise ValueError("rows of their own need the clients' numbers: give ids")
    placed = {}
    for name, leaf in rows.items():
        total = torch.zeros(clients, *leaf.shape[1:], dtype=leaf.dtype)
        placed[name] = total.index_copy(0, ids.cpu(), leaf.cpu())
    return placed
