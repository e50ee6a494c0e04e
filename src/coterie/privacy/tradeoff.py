"""Trade-off curves: what any test of a client's presence must miss, given its false alarms.

A mechanism is f-DP if every test between two neighbours with a type I error (false alarms) of at
most alpha has a type II error (misses) of at least f(alpha) (Dong, Roth and Su 2022). A profile
implies such a curve (Wasserman and Zhou 2010): by (epsilon, delta)-DP in both directions

    f(alpha) = sup over epsilon >= 0 of max(0, 1 - delta - e^epsilon alpha,
                                            e^-epsilon (1 - delta - alpha)),  delta = delta(epsilon)

which is convex, decreasing and its own inverse. The supremum over fewer epsilons can only be
smaller, so a grid understates f: what is given is a true bound. Gaussian DP has the closed form
G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu).

`gdp_approximation` is the central limit of sampled rounds that papers draw (Bu, Dong, Long and Su
2020, in place of a formula that counts rounds twice): an APPROXIMATION, no bound, and far off where
few rounds carry large losses.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np
from scipy import special

from coterie.privacy.events import Gaussian, LocalGaussian
from coterie.privacy.profiles import Array, GaussianProfile, Profile

if TYPE_CHECKING:
    from coterie.privacy.accounting import Guarantee

_NODES = 320
_LARGEST = 700.0
"""Beyond this, e^epsilon leaves float64, and no test tells the curve from nothing."""


def trade_off(profile: Profile, alphas: Sequence[float]) -> Array:
    """Bound from below the misses of any test with these rates of false alarms.

    Raises:
        ValueError: If a rate is not a probability.

    **Guarantee:** a lower bound on the type II error at each alpha; exact for Gaussian DP.
    `tests/accounting/test_tradeoff.py`.

    >>> from coterie.privacy.profiles import GaussianProfile
    >>> trade_off(GaussianProfile(1.0), [0.0, 0.05, 1.0]).round(4).tolist()
    [1.0, 0.7405, 0.0]
    """
    alpha = np.asarray(alphas, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alphas = {alphas}: expected numbers from 0 to 1")
    if isinstance(profile, GaussianProfile):
        return gaussian_trade_off(profile.mu, alpha)
    epsilon, kept = _tangents(cast(Hashable, profile))
    line = np.exp(epsilon)
    flat = alpha.reshape(-1, 1)
    best = np.maximum(kept - line * flat, (kept - flat) / line).max(axis=1)
    return np.asarray(np.clip(best, 0.0, 1.0).reshape(alpha.shape))


def gaussian_trade_off(mu: float, alphas: Sequence[float] | Array) -> Array:
    """Compute G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu).

    **Guarantee:** exact to rounding; `tests/accounting/test_tradeoff.py`.
    """
    alpha = np.asarray(alphas, dtype=np.float64)
    if mu == math.inf:
        return np.zeros_like(alpha)
    if mu == 0:
        return 1 - alpha
    # Phi^-1(1 - alpha) = -Phi^-1(alpha), without losing the digits of a small alpha.
    return np.asarray(special.ndtr(-special.ndtri(alpha) - mu), dtype=np.float64)


@lru_cache(maxsize=16)
def _tangents(hashed: Hashable) -> tuple[Array, Array]:
    """List epsilons over which the supremum runs, and 1 - delta at each, of a profile."""
    profile = cast(Profile, hashed)
    largest = profile.epsilon(1e-10)
    # Where some losses are infinite with more than that, delta hardly falls any further.
    top = min(largest, _LARGEST) if largest < math.inf else 20.0
    # A kink of the profile (pure noise) lies at the top; below, tangents in even steps.
    epsilon = np.linspace(0.0, top, _NODES)
    return epsilon, 1 - np.array([profile.delta(float(e)) for e in epsilon])


@dataclass(frozen=True)
class Approximation:
    """The Gaussian DP to which a plan tends: for drawing beside a bound, and never one itself.

    **Guarantee:** none.
    """

    mu: float

    @property
    def label(self) -> str:
        """What a figure has to say of it."""
        return "approximation, not a bound (central limit of Gaussian DP)"

    def trade_off(self, alphas: Sequence[float]) -> Array:
        """Compute the approximate curve."""
        return gaussian_trade_off(self.mu, alphas)

    def epsilon(self, delta: float) -> float:
        """Compute the approximate epsilon."""
        return GaussianProfile(self.mu).epsilon(delta)


def gdp_approximation(guarantee: "Guarantee") -> Approximation:
    """Approximate a plan of Gaussian releases by its central limit, in the view of `epsilon`.

    With a hidden cohort, under zero_out mu^2 = p^2 sum over rounds of e^(1/z^2) - 1 (Bu, Dong, Long
    and Su 2020); under replace, where a client's message may be turned round, the same limit of the
    pair M(1), M(-1) (see `losses`) gives p^2 sum of 2 (e^(1/z^2) - e^(-1/z^2)). With a visible one,
    or under local noise, mu^2 = p sum of (s/z)^2, the mean over attendances. At p = 1 it is exact.

    Raises:
        ValueError: If a release is not Gaussian.

    **Guarantee:** none: an approximation, which may lie far on either side of the truth.
    """
    who, zero = guarantee.participation, guarantee.relation == "zero_out"
    local = any(isinstance(event, LocalGaussian) for event in guarantee.events)
    total = 0.0
    for event in guarantee.events:
        if not isinstance(event, Gaussian | LocalGaussian):
            raise ValueError(
                f"{type(event).__name__}: expected Gaussian releases alone; other noise has no "
                "such approximation here: use trade_off, which is a bound"
            )
        scale = 1.0 if zero else getattr(event, "replaced", 2.0)
        square = (scale / event.noise_multiplier) ** 2
        if who.rate == 1 or who.visible or local:
            total += who.rate * square
        else:
            total += who.rate**2 * _sampled(square if zero else square / 4, zero)
    return Approximation(math.sqrt(total))


def _sampled(square: float, zero: bool) -> float:
    """Return the limit of a sampled round over p^2, for 1/z^2; infinite where e^(1/z^2) is."""
    if square > _LARGEST:
        return math.inf
    return math.expm1(square) if zero else 4 * math.sinh(square)
