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
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.privacy.accounting import Event, Gaussian, NonPrivate, Relation
from coterie.privacy.entropy import Entropy, normals
from coterie.tree import Tree, clip_rows, map_arrays, map_leaves, size

MOST_CLIENTS = 1 << 22
"""Sums over more clients could exceed 2^53 grid steps, and would no longer be exact."""


class Shape(Enum):
    """What a method needs posted: nothing, or a sum of contributions."""

    NONE = "none"
    SUM = "sum"


class Mechanism(Protocol):
    """Clip, reduce, perturb, and the event: one frozen value."""

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Bound each client's row; give the bounded rows and the factor kept of each."""

    def reduce(self, rows: Tree) -> Tree:
        """Sum bounded rows over clients; additive over blocks."""

    def sensitivity(self, relation: Relation) -> float:
        """Bound in l2 what one client can change in `reduce(clip(rows))`."""

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add noise to a sum."""

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
        """Give the public grid step for rows of so many numbers, a power of two.

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

    def reduce(self, rows: Tree) -> Tree:
        """Sum over clients, exactly."""
        return _sum(rows)

    def sensitivity(self, relation: Relation) -> float:
        """Give the bound, twice under replace."""
        if relation not in ("zero_out", "replace"):
            raise ValueError(f"relation = {relation!r}: expected 'zero_out' or 'replace'")
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

    def event(self) -> Event:
        """Name a Gaussian release."""
        return Gaussian(self.noise_multiplier)


@dataclass(frozen=True)
class Exact:
    """Sum of rows as they are: no clipping, no noise, no privacy.

    **Guarantee:** none; the event says so and the ledger answers infinity.
    """

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Turn non-finite rows into zeros; keep the others."""
        return clip_rows(rows, math.inf)

    def reduce(self, rows: Tree) -> Tree:
        """Sum over clients."""
        return _sum(rows)

    def sensitivity(self, relation: Relation) -> float:
        """Give infinity."""
        return math.inf

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Leave the sum as it is."""
        return dict(total)

    def event(self) -> Event:
        """Name a release without privacy."""
        return NonPrivate()


def _sum(rows: Tree) -> Tree:
    """Sum over clients, and bring the sums to the CPU in one transfer."""
    sums = {name: leaf.sum(dim=0) for name, leaf in rows.items()}
    flat = torch.cat([leaf.reshape(-1) for leaf in sums.values()]).cpu()
    parts = torch.split(flat, [leaf.numel() for leaf in sums.values()])
    return {
        name: part.reshape(leaf.shape)
        for (name, leaf), part in zip(sums.items(), parts, strict=True)
    }
