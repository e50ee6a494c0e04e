"""Second moments of clients' vectors: noisy sums of w w^T, of their diagonals, and of single rows.

Sensitivity, for vectors of norm at most K. zero_out: |w w^T|_F = |w|^2 <= K^2. replace:
|w w^T - v v^T|_F^2 = |w|^4 + |v|^4 - 2 (w . v)^2 <= 2 K^4, attained by orthogonal w, v of norm K.
The same sqrt(2) holds for vectors without negative entries, such as squares, whose products are
never negative. (Liang et al., "Model-Protected Multi-Task Learning", set 2 K in their Algorithms 2
and 3, which is too small for K > 2 and not of the dimension of a square.)

Noise on the symmetric matrix is (G + G^T)/2 times tau, G of independent normals: variance tau^2 on
the diagonal and tau^2/2 off it. That is isotropic in the Frobenius norm, so one release is exactly
mu-GDP with mu = sensitivity / tau.

As in `mechanisms`, contributions lie on a public grid: a vector's entries are multiples of g, the
largest power of two with K >= 2^14 g, so products are multiples of g^2 below 2^30 g^2, sums over
2^22 clients are exact in float64 in any order, and the noise is rounded to multiples of g^2. The
noise may be far coarser than g^2, and our normals have 53 bits only: a post is rounded once more,
to 2^-20 of the noise's standard deviation (post-processing), so that a cell of what is posted is as
wide, against the steps of the sampler, as for `GaussianSum` (ADR 9).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from coterie.core.tree import Tree, clip_rows, map_arrays, map_leaves
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import Event, Gaussian, Relation, Wishart, check_relation
from coterie.privacy.laplace import LaplaceSum
from coterie.privacy.mechanisms import (
    GaussianSum,
    Shapes,
    count_numbers,
    gram_rows,
    place_rows,
    square_shapes,
)

SQRT2 = math.sqrt(2.0)  # in float64 this lies above the square root of two
_FINENESS = 14


def vector_grid(bound: float) -> float:
    """Return the public grid of a vector's entries, a power of two."""
    return float(2.0 ** (math.floor(math.log2(bound)) - _FINENESS))


def post_grid(bound: float, deviation: float) -> float:
    """Return the public grid of a posted second moment, a power of two: g^2, or coarser for noise."""
    coarse = float(2.0 ** (math.floor(math.log2(deviation)) - 20))
    return max(vector_grid(bound) ** 2, coarse)


def clip_vectors(rows: Tree, bound: float) -> tuple[Tree, Tensor]:
    """Clip vectors to the bound less the rounding, then round to the grid."""
    numbers = sum(leaf[0].numel() if len(leaf) else 0 for leaf in rows.values())
    step = vector_grid(bound)
    slack = step * math.sqrt(numbers) / 2
    if slack > bound / 2:
        raise ValueError(f"{numbers} numbers a client: too many for a second moment")
    clipped, kept = clip_rows(rows, bound - slack)
    return map_leaves(lambda leaf: leaf.mul_(1 / step).round_().mul_(step), clipped), kept


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 1e-40 <= value <= 1e40:
            raise ValueError(f"{name} = {value}: expected a positive number between 1e-40 and 1e40")


@dataclass(frozen=True)
class GaussianGram:
    """Sum of w w^T over vectors clipped to norm `bound`, plus symmetric Gaussian noise.

    The noise has standard deviation tau = noise_multiplier * bound^2 on the diagonal and tau /
    sqrt(2) off it.

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9), mu = s
    / noise_multiplier, s = 1 under zero_out and sqrt(2) under replace, provided `entropy` gives
    independent uniform words that nobody else learns; after rounding, for vectors of any size, NaN
    and infinity included. Tests: tests/properties/test_moments.py, tests/statistics/test_moments.py
    """

    bound: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check_positive(bound=self.bound, noise_multiplier=self.noise_multiplier)

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip each vector to the bound, on the grid."""
        return clip_vectors(rows, self.bound)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum w w^T over clients, exactly."""
        return gram_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return square shapes."""
        return square_shapes(contribution)

    def draws(self, totals: Shapes) -> int:
        """Draw one normal for each entry on and below the diagonal."""
        return sum(shape[0] * (shape[0] + 1) // 2 for shape in totals.values())

    def sensitivity(self, relation: Relation) -> float:
        """Return bound^2, times sqrt(2) under replace, in the Frobenius norm."""
        check_relation(relation)
        return self.bound**2 * (SQRT2 if relation == "replace" else 1.0)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add symmetric Gaussian noise, rounded to the grid of the sum."""
        step = vector_grid(self.bound) ** 2
        deviation = self.noise_multiplier * self.bound**2 / step
        drawn = normals(entropy, self.draws({name: tuple(t.shape) for name, t in total.items()}))
        used = 0

        def noise(features: int) -> np.ndarray:
            nonlocal used
            rows, columns = np.tril_indices(features)
            scale = np.where(rows == columns, deviation, deviation / SQRT2)
            values = np.rint(drawn[used : used + len(rows)] * scale) * step
            used += len(rows)
            matrix = np.zeros((features, features))
            matrix[rows, columns] = values
            matrix[columns, rows] = values
            return matrix

        posted = post_grid(self.bound, self.noise_multiplier * self.bound**2)
        noisy = {name: leaf.numpy() + noise(len(leaf)) for name, leaf in total.items()}
        return map_arrays({name: np.rint(leaf / posted) * posted for name, leaf in noisy.items()})

    def radius(self, totals: Shapes) -> float:
        """Return tau sqrt(2 d), about the spectral norm of the noise."""
        features = max(shape[0] for shape in totals.values())
        return self.noise_multiplier * self.bound**2 * math.sqrt(2.0 * features)

    def event(self) -> Event:
        """Name a Gaussian release."""
        return Gaussian(self.noise_multiplier, SQRT2)


@dataclass(frozen=True)
class WishartGram:
    """Sum of w w^T over vectors clipped to norm `bound`, plus Wishart noise W_d(nu, scale I).

    nu = degrees + d - 1, so that `degrees` >= 2 is nu >= d + 1. The mean nu * scale * I of the
    noise is public and is taken off again where `centred`.

    **Guarantee:** zero_out only, the exact profile of `Wishart` events, never pure: what comes out
    without the client is impossible with it, with positive probability. A client of several vectors
    is told no better than one of a single vector of the same norm: each costs its part r_j of r,
    and shifts of log-concave noise one after the other are told exactly like their sum.
    tests/accounting/test_wishart.py, tests/statistics/test_moments.py.
    """

    bound: float
    degrees: int
    scale: float
    claimed: float | None = None
    centred: bool = True

    def __post_init__(self) -> None:
        _check_positive(bound=self.bound, scale=self.scale)
        self.event()  # refuses degrees that have no account

    @classmethod
    def of(cls, nu: int, scale: float, *, bound: float, features: int) -> "WishartGram":
        """Make the mechanism for nu degrees of freedom in so many dimensions.

        Raises:
            ValueError: If nu < features + 1, where the loss is unbounded both ways.
        """
        if nu < features + 1:
            raise ValueError(
                f"nu = {nu} with {features} features: expected at least {features + 1}; below "
                "that the privacy loss has no bound in either direction"
            )
        return cls(bound, nu - features + 1, scale)

    @classmethod
    def paper(
        cls, epsilon: float, *, bound: float, sensitivity: Literal["2K", "K^2"] = "2K"
    ) -> "WishartGram":
        """Make the noise that Liang et al. print for one release at `epsilon`: not a guarantee.

        W_d(d + 1, s / (2 epsilon) I) with s = 2 K (their Algorithms 2 and 3) or K^2 (Algorithm 1).
        """
        width = {"2K": 2 * bound, "K^2": bound**2}[sensitivity]
        return cls(bound, 2, width / (2 * epsilon), claimed=epsilon, centred=False)

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip each vector to the bound, on the grid."""
        return clip_vectors(rows, self.bound)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum w w^T over clients, exactly."""
        return gram_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return square shapes."""
        return square_shapes(contribution)

    def _freedom(self, features: int) -> int:
        return self.degrees + features - 1

    def draws(self, totals: Shapes) -> int:
        """Draw nu vectors a matrix."""
        return sum(self._freedom(shape[0]) * shape[0] for shape in totals.values())

    def sensitivity(self, relation: Relation) -> float:
        """Return bound^2 under zero_out; infinity under replace, where nothing is proved."""
        check_relation(relation)
        return self.bound**2 if relation == "zero_out" else math.inf

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add a Wishart matrix, the sum of nu outer products of normal vectors."""
        step = vector_grid(self.bound) ** 2
        drawn = normals(entropy, self.draws({name: tuple(t.shape) for name, t in total.items()}))
        noisy, used = {}, 0
        for name, leaf in total.items():
            features = len(leaf)
            freedom = self._freedom(features)
            vectors = drawn[used : used + freedom * features].reshape(freedom, features)
            used += freedom * features
            noise = self.scale * (vectors.T @ vectors)
            if self.centred:
                noise -= freedom * self.scale * np.eye(features)
            lower = np.tril(np.rint(noise / step) * step)
            whole = leaf.numpy() + (lower + np.tril(lower, -1).T)
            posted = post_grid(self.bound, self.scale * math.sqrt(freedom))
            noisy[name] = np.rint(whole / posted) * posted
        return map_arrays(noisy)

    def radius(self, totals: Shapes) -> float:
        """Return about the spectral norm of centred noise; 0 for raw noise, which is positive."""
        features = max(shape[0] for shape in totals.values())
        reach = self.scale * (2 * math.sqrt(self._freedom(features) * features) + features)
        return reach if self.centred else 0.0

    def event(self) -> Event:
        """Name a Wishart release."""
        return Wishart(self.degrees, self.bound**2 / self.scale, self.claimed)


@dataclass(frozen=True)
class Squares:
    """Sum of the squares of vectors' entries, through a mechanism for sums with bound K^2.

    `GaussianSum` bounds the l2 norm of the squares, `LaplaceSum` their l1 norm: in terms of the
    vector, its l4 norm respectively its l2 norm is at most K. A vector of l2 norm K has squares of
    l2 norm at most K^2, and far less if it is spread out: bounding what the noise is made for
    keeps more of it.

    **Guarantee:** that of the mechanism inside, with sqrt(2) in place of 2 for `GaussianSum` under
    replace, since squares are never negative. tests/properties/test_moments.py.
    """

    inner: GaussianSum | LaplaceSum

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Square each entry and clip the squares."""
        numbers = sum(leaf[0].numel() if len(leaf) else 0 for leaf in rows.values())
        # Shorter vectors with the same clipped squares, so that squares of huge entries do not
        # overflow: |w^2|_2 >= |w|^2 / sqrt(numbers), so what is cut here is cut below anyway.
        reach = 2 * math.sqrt(self.inner.bound) * max(numbers, 1) ** 0.25
        shorter, kept = clip_rows(rows, reach)
        clipped, part = self.inner.clip(map_leaves(lambda leaf: leaf.square_(), shorter))
        return clipped, kept * part.sqrt()

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum over clients, exactly."""
        return self.inner.reduce(rows, ids)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution."""
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw what the mechanism inside draws."""
        return self.inner.draws(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound on the squares, times sqrt(2) (l2) or 2 (l1) under replace."""
        if isinstance(self.inner, GaussianSum) and relation == "replace":
            return self.inner.bound * SQRT2
        return self.inner.sensitivity(relation)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add noise."""
        return self.inner.perturb(total, entropy)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise."""
        return self.inner.radius(totals)

    def event(self) -> Event:
        """Name the release."""
        if isinstance(self.inner, GaussianSum):
            return Gaussian(self.inner.noise_multiplier, SQRT2)
        return self.inner.event()


@dataclass(frozen=True)
class GaussianRows:
    """Each client's row clipped to `bound`, in a row of its own, plus Gaussian noise everywhere.

    **Guarantee:** as `GaussianSum`: a client changes its own row alone, by at most the bound (twice
    under replace). Which client is which is public. tests/properties/test_moments.py.
    """

    bound: float
    noise_multiplier: float
    clients: int

    def __post_init__(self) -> None:
        self._each()
        if self.clients < 1:
            raise ValueError(f"clients = {self.clients}: expected at least 1")

    def _each(self) -> GaussianSum:
        return GaussianSum(self.bound, self.noise_multiplier)

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip each row to the bound, on the grid."""
        return self._each().clip(rows)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Put each row in its place."""
        return place_rows(rows, ids, self.clients)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return shapes with a row for every client."""
        return {name: (self.clients, *shape) for name, shape in contribution.items()}

    def draws(self, totals: Shapes) -> int:
        """Draw one normal a number."""
        return count_numbers(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound, twice under replace."""
        return self._each().sensitivity(relation)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Add Gaussian noise, rounded to the grid of a single row."""
        numbers = count_numbers({name: tuple(leaf.shape[1:]) for name, leaf in total.items()})
        step = self._each().grid(numbers)
        deviation = self.noise_multiplier * self.bound
        drawn = np.rint(normals(entropy, self.clients * numbers) * (deviation / step)) * step
        return _spread(total, drawn, np.add)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise."""
        return self._each().radius(totals)

    def event(self) -> Event:
        """Name a Gaussian release."""
        return Gaussian(self.noise_multiplier)


def _spread(
    total: Tree, drawn: np.ndarray, put: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Tree:
    noisy, used = {}, 0
    for name in sorted(total):
        leaf = total[name].numpy()
        noisy[name] = put(leaf, drawn[used : used + leaf.size].reshape(leaf.shape))
        used += leaf.size
    return map_arrays(noisy)
