"""Wishart noise on a sum of second moments: the exact privacy of a release that is never pure.

With Sigma = sum w w^T + E, E ~ W_d(nu, c I), k = nu - d + 1 and r = |w|^2 / c, let X be Sigma less
what the other clients gave, P the law of X with the client (X = w w^T + E) and Q without (X = E).
det(X - w w^T) = det(X) (1 - w^T X^-1 w), so the densities of E at either differ by a function of Y
= |w|^2 / (c w^T X^-1 w) alone:

    log dP/dQ = (k - 2)/2 log(1 - r/Y) + r/2   where Y > r, and -infinity where Y <= r.

Under Q, Y ~ chi2_k (a classical fact of the Wishart law), and under P, Y ~ r + chi2_k (Sherman and
Morrison): a release is exactly as private as the number r plus chi2_k noise. For k >= 2 the noise
is log-concave, so threshold tests on Y are best and r = K^2/c is the worst w: a dominating pair,
which composes (Zhu, Dong and Wang 2022), also where w depends on what was released before.

With probability P(chi2_k <= r) what comes out without the client could not have come out with it:
no epsilon holds at a smaller delta. Replacing a client moves the support both ways; then only the
group bound (2 epsilon, (1 + e^epsilon) delta) is known, and no account is offered. Taking part by
a coin is charged as always taking part: seeing the coin is no worse than that, and not seeing it
is post-processing.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from coterie.privacy.losses import Law
from coterie.privacy.profiles import Array, smallest_epsilon

_UNSEEN = 1e-17
"""Mass of large losses counted as infinite in a round, far below what floating point can tell."""
_ROUNDED = 2e-12
"""Allowance for rounding in a difference of two chi-square probabilities, relative to the larger.

The largest relative error seen of one, against 40 digits, was 3e-13 (at 1,000 degrees).
"""


def _lower(x: Array, degrees: int) -> Array:
    """Compute P(chi2 <= x)."""
    return np.asarray(special.gammainc(degrees / 2, np.maximum(x, 0.0) / 2))


def _upper(x: Array, degrees: int) -> Array:
    """Compute P(chi2 > x)."""
    return np.asarray(special.gammaincc(degrees / 2, np.maximum(x, 0.0) / 2))


def impossible(degrees: int, ratio: float) -> float:
    """Return the probability that a release without the client is impossible with it."""
    return float(special.gammainc(degrees / 2, ratio / 2))


def _adding(losses: Array, degrees: int, ratio: float) -> tuple[Array, Array]:
    """Compute Q(L > l) and log P(L > l) of the loss L = log dQ/dP; L > l where Y < t(l)."""
    if degrees == 2:
        below = losses < -ratio / 2
        return np.where(below, 1.0, -math.expm1(-ratio / 2)), np.where(below, 0.0, -np.inf)
    with np.errstate(over="ignore", divide="ignore"):
        # t - r, which keeps its digits where t is next to r.
        beyond = ratio / np.expm1(np.maximum(2 * (losses + ratio / 2) / (degrees - 2), 0.0))
        log_lower = np.log(_lower(beyond, degrees))
    return _lower(ratio + beyond, degrees), log_lower


def _removing(losses: Array, degrees: int, ratio: float) -> tuple[Array, Array]:
    """Compute P(L > l) and log Q(L > l) of the loss L = log dP/dQ; L > l where Y > t(l)."""
    none = losses >= ratio / 2
    if degrees == 2:
        return np.where(none, 0.0, 1.0), np.where(none, -np.inf, -ratio / 2)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # t = r / (1 - e^-x), t - r = r / (e^x - 1) with x = (r - 2 l) / (k - 2).
        beyond = ratio / np.expm1((ratio - 2 * np.minimum(losses, ratio / 2)) / (degrees - 2))
        log_upper = np.log(_upper(ratio + beyond, degrees))
    return np.where(none, 0.0, _upper(beyond, degrees)), np.where(none, -np.inf, log_upper)


def wishart_law(degrees: int, ratio: float, direction: str) -> Law:
    """Return the loss of one release, "remove" (with the client against without) or "add"."""
    half = (degrees - 2) / 2
    if direction == "remove":
        least = 2 * float(special.gammaincinv(degrees / 2, _UNSEEN))
        low = half * math.log(least / (least + ratio)) + ratio / 2
        return Law(low, ratio / 2, lambda losses: _removing(losses, degrees, ratio))
    lost = impossible(degrees, ratio)
    # Losses beyond `high` count as infinite: next to nothing, or little beside what is anyway.
    reach = min(lost + max(_UNSEEN, 1e-6 * lost), 1.0)
    beyond = 2 * float(special.gammaincinv(degrees / 2, reach)) - ratio if reach < 1 else 0.0
    # A chi-square density of two degrees or more is at most 1/2.
    beyond = max(beyond, 2 * _UNSEEN)
    high = half * math.log1p(ratio / beyond) - ratio / 2
    return Law(-ratio / 2, high, lambda losses: _adding(losses, degrees, ratio))


@dataclass(frozen=True)
class WishartProfile:
    """The profile of one Wishart release under `zero_out`, the worse of both directions.

    **Guarantee:** exact; `tests/accounting/test_wishart.py`.

    >>> one = WishartProfile(100, 2.5236)
    >>> round(one.epsilon(1e-5), 4), WishartProfile(2, 0.2).epsilon(1e-5)
    (0.9996, inf)
    """

    degrees: int
    ratio: float
    accountant: str = "exact profile of one Wishart release"

    def adding(self, epsilon: float) -> float:
        """Compute delta between runs without the client and with it."""
        found, log_other = _adding(np.array([epsilon]), self.degrees, self.ratio)
        return self._difference(epsilon, float(found[0]), float(log_other[0]))

    def removing(self, epsilon: float) -> float:
        """Compute delta between runs with the client and without it."""
        if epsilon >= self.ratio / 2:
            return 0.0
        found, log_other = _removing(np.array([epsilon]), self.degrees, self.ratio)
        return self._difference(epsilon, float(found[0]), float(log_other[0]))

    def _difference(self, epsilon: float, upper: float, log_lower: float) -> float:
        taken = math.exp(min(epsilon + log_lower, 0.0))
        return min(1.0, max(0.0, upper - taken) + _ROUNDED * upper)

    def delta(self, epsilon: float) -> float:
        """Compute delta at this epsilon."""
        return max(self.adding(epsilon), self.removing(epsilon))

    def epsilon(self, delta: float) -> float:
        """Compute epsilon at this delta; infinite where outputs are impossible more often."""
        if delta <= self.delta(1e9):
            return math.inf
        return smallest_epsilon(lambda e: math.log(max(self.delta(e), 1e-300)), delta)
