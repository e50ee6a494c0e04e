"""Banded noise: correlated over rounds, for clients that take part once in b rounds.

Where a method adds releases up, as a shared model adds up mean updates, the noise of a sum of
releases matters, not that of one. Noise that later rounds take back in part leaves less of it. In
units of the deviation of a `GaussianSum`, the noise of round t is the t-th entry of C^-1 z, z
standard normals: a matrix factorisation (Denisov, McMahan, Rush, Smith and Thakurta 2022) whose
strategy C is lower triangular with b bands (Choquette-Choo et al. 2023, "(Amplified) banded matrix
factorization"). C is a Toeplitz matrix with columns divided by their norms; its coefficients
minimise the mean over t of the squared noise of the sum of the first t releases (McKenna 2024,
"Scaling up the banded matrix factorization mechanism").

If everybody takes part in every round, b = 1, and C is diagonal: nothing is gained, and banded
noise is refused.

**Guarantee:** let each client take part in at most k rounds, any two of them at least b apart
(`sampling.Cyclic`, enforced by sites). All releases together are s sqrt(k) / z-GDP, s = 1 under
zero_out and the event's `replaced` under replace: each participation counts as one `GaussianSum` or
`BlockSum` with noise multiplier z. Proof: divide blocks by their units as in `BlockSum`, and let X
have the exact sums as rows, which may depend on earlier releases. Releases Y = X + C^-1 Z are a
function of C Y = C X + Z, and the other way round, round by round. Given releases before round t, a
neighbour moves row t of C X by sum_j C_tj d_j, where d_j, |d_j| <= s, is nonzero only in rounds of
the client. At most one of these has C_tj nonzero, as C has b bands. So the squares of all moves
add up to sum_j |d_j|^2 |C e_j|^2 <= k s^2, as no column has a norm above 1. Gaussian releases whose
squared moves add up to at most k s^2, whatever they depend on, are s sqrt(k) / z-GDP (Denisov et
al. 2022, theorem 2.1; Smith and Thakurta 2022). Rounding to the grid of releases is
post-processing.

*Restarts.* After a crash the noise of earlier rounds is forgotten, and C continues with a new block
on the diagonal: still b bands, and no column longer than 1. So secrets are in memory only, and a
restart costs accuracy, no privacy. With a seed the noise is drawn again, to the same bits.

Assumes that `entropy` returns independent uniform words that nobody else learns. Tests:
tests/privacy/test_banded.py, tests/properties/test_banded.py, tests/statistics/test_banded.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from torch import Tensor

from coterie.core.tree import Tree, size
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import BandedGaussian, Gaussian, Relation
from coterie.privacy.mechanisms import (
    Array,
    BlockSum,
    GaussianSum,
    Mechanism,
    NormBound,
    Past,
    Shapes,
)

_STEPS = 1000
_LARGEST = 10_000_000
"""Rounds times bands up to which the optimum is searched for; it takes seconds there."""
_OVERFLOW = 1e100


@lru_cache(maxsize=32)
def strategy(rounds: int, bands: int) -> Array:
    """Return the first column of C before its columns are divided by their norms; its norm is 1.

    **Guarantee:** none needed: the account holds for any coefficients. The optimum is that of
    jax_privacy 2.0.0, `toeplitz.optimize_banded_toeplitz`; `tests/privacy/test_banded.py`.

    >>> strategy(200, 20)[:3].round(4).tolist()
    [0.5956, 0.3346, 0.2702]
    """
    from scipy import optimize

    bands = min(bands, rounds)
    steps = np.arange(1, bands)
    # The root of the prefix sum (Fichtenberger, Henzinger and Upadhyay 2022), cut after the band.
    first = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    if rounds * bands <= _LARGEST:
        found = optimize.minimize(
            _error,
            first[1:],
            rounds,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _STEPS, "ftol": 1e-15, "gtol": 1e-12},
        )
        if found.fun <= _error(first[1:], rounds)[0]:
            first = np.concatenate([[1.0], found.x])
    first /= np.linalg.norm(first)
    first.setflags(write=False)
    return np.asarray(first)


def _error(rest: Array, rounds: int) -> tuple[float, Array]:
    """Return |c|^2 times the mean squared noise of sums of releases for c = (1, rest).

    And its gradient. A search may try coefficients at which the noise overflows: infinity then.
    """
    from scipy import signal

    first = np.concatenate([[1.0], rest])
    weight = 1 - np.arange(rounds) / rounds
    sums = signal.lfilter([1.0], first, np.ones(rounds))  # the first column of A C^-1
    back = signal.lfilter([1.0], first, (weight * sums)[::-1])[::-1]
    if not np.abs(back).max() < _OVERFLOW:
        return math.inf, np.zeros_like(rest)
    error, norm = float(weight @ sums**2), float(first @ first)
    slopes = np.array([back[lag:] @ sums[: rounds - lag] for lag in range(1, len(first))])
    return norm * error, 2 * error * rest - 2 * norm * slopes


@lru_cache(maxsize=32)
def column_norms(rounds: int, bands: int) -> Array:
    """Return the norms of the columns of the Toeplitz matrix: below 1 for the last ones."""
    first = np.zeros(rounds)
    first[: min(bands, rounds)] = strategy(rounds, bands)
    norms = np.sqrt(np.cumsum(first**2))[::-1]
    norms.setflags(write=False)
    return norms


@lru_cache(maxsize=32)
def deviations(rounds: int, bands: int) -> Array:
    """Return the standard deviation of the noise of each round, over that of its normals."""
    from scipy import signal

    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    inverse = signal.lfilter([1.0], strategy(rounds, bands), impulse)
    return np.asarray(np.sqrt(np.cumsum(inverse**2)) * column_norms(rounds, bands))


@lru_cache(maxsize=32)
def noise_ratio(rounds: int, bands: int) -> float:
    """Return the noise of sums of the first t releases over that of independent noise.

    The root of the ratio of the mean squares over t, at the same epsilon, without the division of
    columns by their norms, which leaves a little less in the last rounds.

    >>> round(noise_ratio(200, 20), 2)
    0.31
    """
    error, _ = _error(strategy(rounds, bands)[1:] / strategy(rounds, bands)[0], rounds)
    return math.sqrt(error / ((rounds + 1) / 2))


@dataclass(frozen=True)
class BandedSum(Mechanism):
    """A round's sum with the noise of a central mechanism, correlated over `bands` rounds.

    **Guarantee:** see the module docstring; the event is `BandedGaussian`.

    Attributes:
        inner: The central mechanism, with the noise of the normals that noise is made of.
        bands: b; clients take part at most once in b rounds.
        rounds: The number of rounds of the plan.
        index: The round, from 0.
    """

    correlated: ClassVar[bool] = True
    inner: GaussianSum | BlockSum
    bands: int
    rounds: int
    index: int

    def __post_init__(self) -> None:
        self.event()  # raises for bands without an account
        if not 0 <= self.index < self.rounds:
            raise ValueError(f"round {self.index}: expected one from 0 to {self.rounds - 1}")

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return what the central mechanism returns."""
        return self.inner.clip(rows)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return the exact sum of the central mechanism."""
        return self.inner.reduce(rows, ids)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return those of the central mechanism."""
        return self.inner.totals(contribution)

    def sensitivity(self, relation: Relation) -> float:
        """Return that of the central mechanism."""
        return self.inner.sensitivity(relation)

    def draws(self, totals: Shapes) -> int:
        """Return one normal per number."""
        return self.inner.draws(totals)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus the noise of a first round, or of one after a restart."""
        return self.perturb_after(total, entropy, ())[0]

    def perturb_after(self, total: Tree, entropy: Entropy, past: Past) -> tuple[Tree, Past]:
        """Return the sum plus noise, and what later rounds need of the noise so far: a secret."""
        first = strategy(self.rounds, self.bands)
        noise = normals(entropy, size(total)).astype(np.float64)
        for coefficient, earlier in zip(first[1:], past, strict=False):
            noise -= coefficient * earlier
        noise /= first[0]
        scale = float(column_norms(self.rounds, self.bands)[self.index])
        kept = (noise, *past)[: len(first) - 1]
        return self.inner.add_normals(total, noise * scale), kept

    @property
    def row(self) -> Array:
        """The entries of this round's row of C: for the round itself, the one before, and so on."""
        norms = column_norms(self.rounds, self.bands)[: self.index + 1][::-1][: self.bands]
        return np.asarray(strategy(self.rounds, self.bands)[: len(norms)] / norms)

    def event(self) -> BandedGaussian:
        """Return a round of banded noise."""
        event = self.inner.event()
        assert isinstance(event, Gaussian)
        return BandedGaussian(event.noise_multiplier, event.replaced, self.bands)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return those of the central mechanism."""
        return self.inner.norm_bounds(totals)

    def grid(self, totals: Shapes) -> dict[str, float] | None:
        """Return that of the central mechanism."""
        return self.inner.grid(totals)

    def alone(self) -> GaussianSum | BlockSum:
        """Return the central mechanism with as much noise as this round has by itself."""
        more = float(deviations(self.rounds, self.bands)[self.index])
        return replace(self.inner, noise_multiplier=self.inner.noise_multiplier * more)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the noise of this round by itself."""
        return self.alone().standard_deviations(totals)

    @property
    def noise_over_bound(self) -> float:
        """That of independent noise that leaves as much in sums of releases."""
        return self.inner.noise_over_bound * noise_ratio(self.rounds, self.bands)

    def typical_noise(self, like: Tree, entropy: Entropy) -> Tree:
        """Return noise of the size of this round's."""
        return self.alone().typical_noise(like, entropy)

    def reported(self, tree: Tree) -> Tree:
        """Return the leaves that the central mechanism reports."""
        return self.inner.reported(tree)


def banded_sums(sums: Sequence[GaussianSum | BlockSum], period: int) -> tuple[BandedSum, ...]:
    """Return the mechanisms of all rounds, of which a client takes part in one of `period`."""
    rounds = len(sums)
    return tuple(
        BandedSum(one, min(period, rounds), rounds, index) for index, one in enumerate(sums)
    )
