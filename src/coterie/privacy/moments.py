"""Second moments of clients' vectors: sums of w w^T and of squares, with Gaussian or Wishart noise.

Sensitivity, for vectors of norm at most K. zero_out: |w w^T|_F = |w|^2 <= K^2. replace:
|w w^T - v v^T|_F^2 = |w|^4 + |v|^4 - 2 (w . v)^2 <= 2 K^4, attained by orthogonal w, v of norm K.
The same sqrt(2) holds for vectors without negative entries, such as squares. (Liang et al.,
"Model-Protected Multi-Task Learning", use 2 K in their Algorithms 2 and 3, which is too small for
K > 2.) Noise on the symmetric matrix is (G + G^T)/2 times tau, G of independent normals: variance
tau^2 on the diagonal and tau^2/2 off it. That is isotropic in the Frobenius norm, so one release is
exactly mu-GDP with mu = sensitivity / tau. A vector's entries are multiples of g, the largest power
of two with K >= 2^14 g, so products are multiples of g^2 below 2^30 g^2 and sums over 2^22 clients
are exact. The noise is rounded to multiples of g^2, and the release once more, to 2^-20 of the
noise's standard deviation (post-processing), as our normals have 53 bits (ADR 9).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from torch import Tensor

from coterie.core.tree import Tree, clip_rows, map_arrays, map_leaves
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import SQRT2, Event, Gaussian, Relation, Wishart, check_relation
from coterie.privacy.mechanisms import (
    GaussianSum,
    LaplaceSum,
    Mechanism,
    NormBound,
    Shapes,
    check_range,
    gram_rows,
    numbers_per_row,
    round_rows,
    square_shapes,
)

_VECTOR_BITS = 14


def vector_grid(bound: float) -> float:
    """Return the public grid of a vector's entries, a power of two."""
    return float(2.0 ** (math.floor(math.log2(bound)) - _VECTOR_BITS))


def post_grid(bound: float, deviation: float) -> float:
    """Return the public grid of a released second moment: g^2, or coarser for larger noise."""
    coarse = float(2.0 ** (math.floor(math.log2(deviation)) - 20))
    return max(vector_grid(bound) ** 2, coarse)


def clip_vectors(rows: Tree, bound: float) -> tuple[Tree, Tensor]:
    """Return vectors clipped to the bound minus the rounding, then rounded to the grid."""
    numbers = numbers_per_row(rows)
    step = vector_grid(bound)
    slack = step * math.sqrt(numbers) / 2
    if slack > bound / 2:
        raise ValueError(f"{numbers} numbers per client: too many for a second moment")
    clipped, kept = clip_rows(rows, bound - slack)
    return round_rows(clipped, step), kept


class _Gram(Mechanism):
    """Sum of w w^T over vectors clipped to norm `bound`, before noise."""

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return each vector clipped to the bound, on the grid."""
        return clip_vectors(rows, self.bound)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return the sum of w w^T over clients, exactly."""
        return gram_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return square shapes."""
        return square_shapes(contribution)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one Frobenius bound on all matrices."""
        step = vector_grid(self.bound) ** 2
        return (NormBound(totals, Fraction(self.bound) ** 2, step, gram=True),)


@dataclass(frozen=True)
class GaussianGram(_Gram):
    """Sum of w w^T over vectors clipped to norm `bound`, plus symmetric Gaussian noise.

    The noise has standard deviation tau = noise_multiplier * bound^2 on the diagonal and tau /
    sqrt(2) off it.

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9), mu = s
    / noise_multiplier, s = 1 under zero_out and sqrt(2) under replace, provided `entropy` returns
    independent uniform words that nobody else learns; after rounding, for vectors of any size, NaN
    and infinity included. Tests: tests/properties/test_moments.py, tests/statistics/test_moments.py
    """

    bound: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_range("bound", self.bound, 1e-40, 1e40)
        check_range("noise_multiplier", self.noise_multiplier, 1e-40, 1e40)

    def draws(self, totals: Shapes) -> int:
        """Return one normal for each entry on and below the diagonal."""
        return sum(shape[0] * (shape[0] + 1) // 2 for shape in totals.values())

    def sensitivity(self, relation: Relation) -> float:
        """Return bound^2, times sqrt(2) under replace, in the Frobenius norm."""
        check_relation(relation)
        return self.bound**2 * (SQRT2 if relation == "replace" else 1.0)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus symmetric Gaussian noise, rounded to the grid."""
        step = vector_grid(self.bound) ** 2
        deviation = self.noise_multiplier * self.bound**2 / step
        coarse = post_grid(self.bound, self.noise_multiplier * self.bound**2)
        drawn = normals(entropy, self.draws({name: tuple(t.shape) for name, t in total.items()}))
        noisy, used = {}, 0
        for name, leaf in total.items():
            rows, columns = np.tril_indices(len(leaf))
            scale = np.where(rows == columns, deviation, deviation / SQRT2)
            noise = np.zeros(leaf.shape)
            noise[rows, columns] = np.rint(drawn[used : used + len(rows)] * scale) * step
            noise[columns, rows] = noise[rows, columns]
            used += len(rows)
            noisy[name] = np.rint((leaf.numpy() + noise) / coarse) * coarse
        return map_arrays(noisy)

    def event(self) -> Event:
        """Return a Gaussian release."""
        return Gaussian(self.noise_multiplier, SQRT2)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return tau, that of the diagonal."""
        return dict.fromkeys(totals, self.noise_multiplier * self.bound**2)

    @property
    def noise_over_bound(self) -> float:
        """The noise multiplier."""
        return self.noise_multiplier

    def radius(self, totals: Shapes) -> float:
        """Return tau sqrt(2 d), about the spectral norm of the noise."""
        features = max(shape[0] for shape in totals.values())
        return self.noise_multiplier * self.bound**2 * math.sqrt(2.0 * features)

    def grid(self, totals: Shapes) -> dict[str, float]:
        """Return the grid of the release, coarser than that of a sum if the noise is large."""
        return dict.fromkeys(totals, post_grid(self.bound, self.noise_multiplier * self.bound**2))


@dataclass(frozen=True)
class WishartGram(_Gram):
    """Sum of w w^T over vectors clipped to norm `bound`, plus Wishart noise W_d(nu, scale I).

    nu = degrees + d - 1, so that `degrees` >= 2 is nu >= d + 1. The mean nu * scale * I of the
    noise is public and is subtracted if `centred`.

    **Guarantee:** zero_out only, the exact profile of `Wishart` events, never pure: some outputs
    without the client are impossible with it, with positive probability. A client of several
    vectors is no easier to detect than one of a single vector of the same norm: each vector costs
    its part r_j of r, and successive shifts of log-concave noise cost as much as their sum.
    tests/privacy/test_profiles_wishart.py, tests/statistics/test_moments.py.
    """

    bound: float
    degrees: int
    scale: float
    claimed: float | None = None
    centred: bool = True

    def __post_init__(self) -> None:
        check_range("bound", self.bound, 1e-40, 1e40)
        check_range("scale", self.scale, 1e-40, 1e40)
        self.event()  # raises for degrees without an account

    def _freedom(self, features: int) -> int:
        return self.degrees + features - 1

    def draws(self, totals: Shapes) -> int:
        """Return nu vectors per matrix."""
        return sum(self._freedom(shape[0]) * shape[0] for shape in totals.values())

    def sensitivity(self, relation: Relation) -> float:
        """Return bound^2 under zero_out; infinity under replace, where nothing is proved."""
        check_relation(relation)
        return self.bound**2 if relation == "zero_out" else math.inf

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus a Wishart matrix, the sum of nu outer products of normal vectors."""
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
            coarse = self._post_grid(features)
            noisy[name] = np.rint(whole / coarse) * coarse
        return map_arrays(noisy)

    def _post_grid(self, features: int) -> float:
        return post_grid(self.bound, self.scale * math.sqrt(self._freedom(features)))

    def event(self) -> Event:
        """Return a Wishart release."""
        return Wishart(self.degrees, self.bound**2 / self.scale, self.claimed)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return scale sqrt(2 nu), that of the diagonal."""
        return {
            name: self.scale * math.sqrt(2 * self._freedom(shape[0]))
            for name, shape in totals.items()
        }

    @property
    def noise_over_bound(self) -> float:
        """That of a single feature; more features have slightly more noise."""
        return self.scale * math.sqrt(2 * self.degrees) / self.bound**2

    def radius(self, totals: Shapes) -> float:
        """Return about the spectral norm of centred noise; 0 for raw noise, which is positive."""
        features = max(shape[0] for shape in totals.values())
        norm = self.scale * (2 * math.sqrt(self._freedom(features) * features) + features)
        return norm if self.centred else 0.0

    def grid(self, totals: Shapes) -> dict[str, float]:
        """Return the grid of the release, coarser than that of a sum if the noise is large."""
        return {name: self._post_grid(shape[0]) for name, shape in totals.items()}

    def check_secure_sum(self) -> None:
        """Raise ValueError: the account needs changes w w^T, which folding does not keep."""
        raise ValueError(
            "wishart noise is accounted for changes w w^T only, which the bound on a sum out of "
            "secure aggregation does not keep: use gaussian noise, or trust = 'server'"
        )


@dataclass(frozen=True)
class Squares(Mechanism):
    """Sum of the squares of vectors' entries, through a mechanism for sums with bound K^2.

    `GaussianSum` bounds the l2 norm of the squares, `LaplaceSum` their l1 norm: the l4 and the l2
    norm of the vector are at most K. A vector of l2 norm K has squares of l2 norm at most K^2, and
    far less if it is spread out: bounding the squares keeps more of it.

    **Guarantee:** that of the inner mechanism, with sqrt(2) in place of 2 for `GaussianSum` under
    replace, since squares are not negative. tests/properties/test_moments.py.
    """

    inner: GaussianSum | LaplaceSum

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return the squares of the entries, clipped."""
        numbers = numbers_per_row(rows)
        # Shorter vectors with the same clipped squares, so that squares of huge entries do not
        # overflow: |w^2|_2 >= |w|^2 / sqrt(numbers), so what is cut here is cut below anyway.
        longest = 2 * math.sqrt(self.inner.bound) * max(numbers, 1) ** 0.25
        shorter, kept = clip_rows(rows, longest)
        clipped, part = self.inner.clip(map_leaves(lambda leaf: leaf.square_(), shorter))
        return clipped, kept * part.sqrt()

    def draws(self, totals: Shapes) -> int:
        """Return those of the inner mechanism."""
        return self.inner.draws(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound on the squares, times sqrt(2) (l2) or 2 (l1) under replace."""
        if self.inner.order == 2 and relation == "replace":
            return self.inner.bound * SQRT2
        return self.inner.sensitivity(relation)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus noise."""
        return self.inner.perturb(total, entropy)

    def event(self) -> Event:
        """Return the inner event for contributions without negative entries."""
        return self.inner.event().nonnegative()

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return the inner bounds, without negative numbers."""
        return tuple(replace(one, nonnegative=True) for one in self.inner.norm_bounds(totals))

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return those of the inner mechanism."""
        return self.inner.standard_deviations(totals)

    @property
    def noise_over_bound(self) -> float:
        """That of the inner mechanism."""
        return self.inner.noise_over_bound

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise."""
        return self.inner.radius(totals)
