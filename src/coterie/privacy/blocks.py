"""Sums of contributions made of blocks, each with a bound and a share of the budget of its own.

A contribution may hold parts of different units: a mean, variances, a residual. One clip on all of
them together would let the largest crowd out the others. Here block b is clipped to l2 norm B_b and
gets the share f_b of mu^2, with sum_b f_b = 1: noise of standard deviation z B_b / sqrt(f_b) on
each of its numbers. In units of B_b / sqrt(f_b), block by block, a client moves the sum by at most
sqrt(sum_b f_b) = 1, against noise of standard deviation z in every direction: one Gaussian release,
not one for each block.

Under replace a block moves by r_b B_b, and the sum by sqrt(sum_b f_b r_b^2): r = 2 for a signed
block (a vector can be turned round); sqrt(2) for one without negative entries, as
|a - b|^2 = |a|^2 + |b|^2 - 2 a.b <= 2 B^2; 1 for a single number from 0 to B. Every one of these is
attained, and since blocks are bounded each on its own, all of them by one pair of clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Tree, map_arrays, size
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import Event, Gaussian, Relation, check_relation
from coterie.privacy.mechanisms import GaussianSum, Shapes, count_numbers, sum_rows
from coterie.privacy.moments import SQRT2

BlockKind = Literal["signed", "positive", "single"]
_REPLACED: Mapping[BlockKind, float] = {"signed": 2.0, "positive": SQRT2, "single": 1.0}
_ROOM = 1e-12
"""Shares add up to 1 within this, and the noise is larger by it: sums of floats are never exact."""


@dataclass(frozen=True)
class Block:
    """How one leaf of a contribution is bounded, and what part of the budget it gets.

    Attributes:
        name: The leaf.
        bound: Of its l2 norm.
        share: Its part of mu^2, the square of the Gaussian DP parameter of a release.
        kind: "signed"; "positive", whose entries below 0 become 0 before the clip; "single", one
            number that is not negative.
        per_root: The bound is multiplied by the square root of the leaf's count of numbers.
    """

    name: str
    bound: float
    share: float
    kind: BlockKind = "signed"
    per_root: bool = False

    def __post_init__(self) -> None:
        if not 1e-80 <= self.bound <= 1e80:
            raise ValueError(
                f"bound = {self.bound} of block {self.name!r}: expected a positive number between "
                "1e-80 and 1e80"
            )
        if not 1e-12 <= self.share <= 1:
            raise ValueError(
                f"share = {self.share} of block {self.name!r}: expected a part of the budget, from "
                "1e-12 to 1; the shares of all blocks add up to 1"
            )
        if self.kind not in get_args(BlockKind):
            raise ValueError(
                f"kind = {self.kind!r} of block {self.name!r}: expected one of "
                f"{', '.join(get_args(BlockKind))}"
            )

    def bound_of(self, numbers: int) -> float:
        """Return the bound on a leaf of so many numbers.

        Raises:
            ValueError: If the block is of a single number and the leaf has another count.
        """
        if self.kind == "single" and numbers != 1:
            raise ValueError(
                f"block {self.name!r} is of a single number, and the leaf has {numbers}: make it "
                "'positive' or 'signed'"
            )
        return self.bound * math.sqrt(max(numbers, 1)) if self.per_root else self.bound


def check_blocks(blocks: Sequence[Block]) -> None:
    """Refuse blocks that no release can be made of.

    Raises:
        ValueError: If there are none, two of one name, or shares that do not add up to 1.
    """
    names = [block.name for block in blocks]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"blocks are of {names}: expected at least one, each leaf once")
    total = math.fsum(block.share for block in blocks)
    if abs(total - 1) > _ROOM:
        shares = {block.name: block.share for block in blocks}
        raise ValueError(
            f"shares {shares} add up to {total}: expected 1, all of the budget; divide each by "
            "their sum"
        )


def replaced_by(blocks: Sequence[Block]) -> float:
    """Return how much further a replaced client moves the sum than a zeroed one, from 1 to 2.

    >>> replaced_by([Block("mean", 1.0, 0.5), Block("residual", 3.0, 0.5, "single")])
    1.5811388300841898
    """
    square = math.fsum(block.share * _REPLACED[block.kind] ** 2 for block in blocks)
    return min(2.0, max(1.0, math.sqrt(square)))


@dataclass(frozen=True)
class BlockSum:
    """Sum of contributions clipped block by block, plus Gaussian noise of each block's own size.

    Each block is a `GaussianSum` of bound B_b and noise multiplier z / sqrt(f_b) on a public grid
    of its own; all blocks are one release, paid for once. A client whose contribution holds a NaN
    or an infinity in any block counts as zeros in all of them.

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9), mu = s
    / noise_multiplier, s = 1 under zero_out and s = sqrt(sum_b f_b r_b^2) under replace, provided
    `entropy` gives independent uniform words that nobody else learns. Proof: divide block b by
    B_b / sqrt(f_b), a public number. Noise is then N(0, z^2 I). zero_out: a client with |x_b| <=
    B_b moves the sum by sqrt(sum_b f_b |x_b|^2 / B_b^2) <= sqrt(sum_b f_b) = 1. replace: x by y
    moves it by sqrt(sum_b f_b |x_b - y_b|^2 / B_b^2), and |x_b - y_b| <= r_b B_b with r = 2 for
    signed blocks, sqrt(2) where no entry is negative, 1 for one number from 0 to B_b. Both are
    attained: by any x with |x_b| = B_b, and by x_b = -y_b, by two different axes of length B_b
    (a positive block of at least two numbers), by B_b and 0. A post is a function of a Gaussian
    release of that sensitivity, and so is what an adversary learns under hidden sampling. The
    bounds hold after rounding, for rows of any size. Tests: tests/properties/test_blocks.py,
    tests/statistics/test_blocks.py, tests/privacy/test_blocks.py.

    Attributes:
        blocks: One for each leaf of a contribution; the first is the one whose error is reported.
        noise_multiplier: z, that of the whole release.
    """

    blocks: tuple[Block, ...]
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        check_blocks(self.blocks)
        GaussianSum(1.0, self.noise_multiplier)  # refuses what is no noise

    @property
    def first(self) -> Block:
        """The block that relative errors and clipped parts are told of."""
        return self.blocks[0]

    def each(self, numbers: Mapping[str, int]) -> dict[str, GaussianSum]:
        """Return the mechanism of each leaf, for leaves of so many numbers.

        Raises:
            ValueError: If the leaves are not those of the blocks.
        """
        names = {block.name for block in self.blocks}
        if set(numbers) != names:
            raise ValueError(
                f"a contribution has leaves {sorted(numbers)}, its blocks are of {sorted(names)}: "
                "give one block for each leaf"
            )
        return {
            block.name: GaussianSum(
                block.bound_of(numbers[block.name]),
                self.noise_multiplier / math.sqrt(block.share) * (1 + _ROOM),
            )
            for block in self.blocks
        }

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip each block to its bound; give the factor kept of the first block."""
        each = self.each({name: math.prod(leaf.shape[1:]) for name, leaf in rows.items()})
        # Before negative entries are cut: minus infinity must not pass for a zero.
        broken = torch.stack([_broken(leaf) for leaf in rows.values()]).any(dim=0)
        clipped, kept = {}, {}
        for block in self.blocks:
            leaf = rows[block.name]
            leaf = leaf if block.kind == "signed" else leaf.clamp_min(0.0)
            cut, kept[block.name] = each[block.name].clip({block.name: leaf})
            flags = broken.reshape(-1, *[1] * (leaf.dim() - 1))
            clipped[block.name] = cut[block.name].masked_fill_(flags, 0.0)
        return clipped, kept[self.first.name].masked_fill(broken, 0.0)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum over clients, exactly."""
        return sum_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution; refuse one whose leaves are not the blocks'."""
        self.each(_count(contribution))
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw one normal a number."""
        return count_numbers(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return 1, or the root of sum_b f_b r_b^2 under replace: in units of B_b / sqrt(f_b)."""
        check_relation(relation)
        return replaced_by(self.blocks) if relation == "replace" else 1.0

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add Gaussian noise to each block, rounded to the grid of its sum."""
        each = self.each({name: leaf.numel() for name, leaf in total.items()})
        # All at once: drawn ahead or not, a seed gives the same numbers.
        drawn = normals(entropy, size(total))
        noisy, used = {}, 0
        for name in sorted(total):
            leaf = total[name].numpy()
            step = each[name].grid(leaf.size)
            deviation = each[name].noise_multiplier * each[name].bound
            part = drawn[used : used + leaf.size].reshape(leaf.shape)
            noisy[name] = leaf + np.rint(part * (deviation / step)) * step
            used += leaf.size
        return map_arrays(noisy)

    def deviations(self, totals: Shapes) -> dict[str, float]:
        """Return the standard deviation of the noise of each number, by leaf."""
        each = self.each(_count(totals))
        return {name: one.noise_multiplier * one.bound for name, one in each.items()}

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise of the noisiest block."""
        each = self.each(_count(totals))
        return max(one.radius({name: totals[name]}) for name, one in each.items())

    def event(self) -> Event:
        """Name one Gaussian release."""
        return Gaussian(self.noise_multiplier, replaced_by(self.blocks))


def _broken(leaf: Tensor) -> Tensor:
    flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    # x - x is 0 for finite x and not a number otherwise; many times quicker than asking each.
    return (flat - flat).sum(dim=1) != 0


def _count(shapes: Shapes) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in shapes.items()}
