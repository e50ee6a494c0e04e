"""Sums with Laplace noise that is pure to the last bit: integers, and no floating point at all.

Contributions are multiples of a public power of two g. The noise is g times an integer X with
P(X = x) proportional to exp(-|x| g / b), the discrete Laplace law, drawn exactly from uniform words
by rejection with whole numbers alone (Canonne, Kamath and Steinke 2020, "The discrete Gaussian for
differential privacy", algorithms 1 and 2). Floating-point samplers of the Laplace law have gaps
that give inputs away (Mironov 2012) and can at best claim a small delta.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Tree, clip_rows, map_arrays
from coterie.privacy.entropy import Entropy
from coterie.privacy.events import Event, Laplace, Relation, check_relation
from coterie.privacy.mechanisms import Shapes, count_numbers, sum_rows


@dataclass(frozen=True)
class LaplaceSum:
    """Sum of rows clipped to l1 norm `bound`, plus discrete Laplace noise of scale bound / epsilon.

    **Guarantee:** one release that includes the client is epsilon-DP under zero_out and 2
    epsilon-DP under replace, with delta = 0, provided `entropy` gives independent uniform words
    that nobody else learns. Neighbouring sums differ by multiples of g of l1 norm at most the bound
    (twice under replace), after rounding, for rows of any size, NaN and infinity included. Tests:
    tests/properties/test_moments.py, tests/statistics/test_moments.py.
    """

    bound: float
    epsilon: float

    def __post_init__(self) -> None:
        if not 1e-80 <= self.bound <= 1e80:
            raise ValueError(f"bound = {self.bound}: expected a number between 1e-80 and 1e80")
        if not 1e-4 <= self.epsilon <= 1e4:
            raise ValueError(f"epsilon = {self.epsilon}: expected a number between 1e-4 and 1e4")

    def grid(self) -> float:
        """Return the public grid step, 2^-30 of the bound or a little more, a power of two."""
        return float(2.0 ** (math.floor(math.log2(self.bound)) - 29))

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip in l1, then round towards zero, which makes no norm larger."""
        numbers = sum(leaf[0].numel() if len(leaf) else 0 for leaf in rows.values())
        # |x|_1 >= |x|_2: what this cuts is cut below anyway, and nothing overflows afterwards.
        shorter, kept = clip_rows(rows, 2 * self.bound)
        flats = [leaf.reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in shorter.values()]
        norms = torch.stack([flat.abs().sum(dim=1) for flat in flats]).sum(dim=0)
        norms = norms * (1 + (numbers + 16) * 2.0**-52)
        part = torch.where(norms > self.bound, self.bound / norms.clamp_min(1e-300), 1.0)
        step = self.grid()
        clipped = {}
        for name, leaf in shorter.items():
            factor = part.reshape(-1, *[1] * (leaf.dim() - 1))
            # The factor may be rounded up: 2^-50 less leaves no norm above the bound.
            cut = torch.where(factor < 1, leaf * factor * (1 - 2.0**-50), leaf)
            clipped[name] = (cut / step).trunc() * step
        return clipped, kept * part

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum over clients, exactly."""
        return sum_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution."""
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw no normals."""
        return 0

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound in l1, twice under replace."""
        check_relation(relation)
        return self.bound * (2.0 if relation == "replace" else 1.0)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add discrete Laplace noise on the grid of the sum."""
        step = self.grid()
        # In grid steps, as exact fractions of the floats given; rounded up, so never too little.
        scale = math.ceil(Fraction(self.bound) / Fraction(step) / Fraction(self.epsilon))
        words = _Words(entropy)
        noisy = {}
        for name in sorted(total):
            leaf = total[name].numpy()
            # Whole numbers until the sum is made: what is posted is a function of the exact sum.
            steps = [int(number) for number in (leaf / step).reshape(-1)]
            sums = [float(number + discrete_laplace(scale, words)) for number in steps]
            noisy[name] = np.array(sums).reshape(leaf.shape) * step
        return map_arrays(noisy)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest of as many Laplace numbers."""
        return self.bound / self.epsilon * (math.log(max(count_numbers(totals), 1)) + 1)

    def event(self) -> Event:
        """Name a pure release."""
        return Laplace(self.epsilon)


class _Words:
    """Whole numbers from a source of words, without bias."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._left: list[int] = []

    def below(self, limit: int) -> int:
        """Draw a whole number from 0 to limit - 1."""
        bits = (limit - 1).bit_length()
        while True:
            number = 0
            for _ in range(0, bits, 64):
                number = (number << 64) | self._word()
            number &= (1 << bits) - 1
            if number < limit:
                return number

    def _word(self) -> int:
        if not self._left:
            self._left = [int(word) for word in self._entropy.words(64)]
        return self._left.pop()


def _bernoulli_exp(over: int, under: int, words: _Words) -> bool:
    """Flip a coin of probability exp(-over/under) for 0 <= over <= under (CKS, algorithm 1)."""
    count = 1
    while over and words.below(under * count) < over:
        count += 1
    return over == 0 or count % 2 == 1


def discrete_laplace(scale: int, words: _Words) -> int:
    """Draw an integer x with probability proportional to exp(-|x| / scale) (CKS, algorithm 2)."""
    while True:
        rest = words.below(scale)
        if not _bernoulli_exp(rest, scale, words):
            continue
        whole = 0
        while _bernoulli_exp(1, 1, words):
            whole += 1
        size = rest + scale * whole
        if words.below(2):
            return size
        if size:
            return -size
