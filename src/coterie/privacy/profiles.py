"""Privacy profiles in closed form: delta(epsilon) of a whole training run, and its inverse.

`GaussianProfile` is Gaussian DP (Dong, Roth and Su 2022; Balle and Wang 2018); `MixtureProfile`
averages it over how often a client took part, for a cohort that can be seen. Rounds that hide who
took part need numbers: see `coterie.privacy.losses`.

Grids and searches round up: a profile may overstate delta or epsilon; what floating point takes
away again is at most about 1e-8, relatively.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Array = NDArray[np.float64]
Groups = tuple[tuple[float, int], ...]
"""Noise multipliers and in how many rounds each was used."""
_DROPPED = -200.0
"""Log-probability of an attendance that is not worth a term of its own."""
_LARGEST_MU = 1e9
"""Beyond it epsilon, about mu^2/2, loses its digits; it protects nobody, and is called infinite."""


class Profile(Protocol):
    """An upper bound on delta(epsilon), exact where `accountant` says so."""

    @property
    def accountant(self) -> str:
        """How the numbers were obtained, in words."""

    def delta(self, epsilon: float) -> float:
        """Bound delta at this epsilon, which is not negative."""

    def epsilon(self, delta: float) -> float:
        """Bound epsilon at this delta, which is below 1 and not negative."""


def gaussian_log_delta(epsilon: float, mu: Array) -> Array:
    """Take the logarithm of delta(epsilon) of mu-Gaussian DP, for each mu > 0.

    delta = Phi(-x) - e^epsilon Phi(-x - mu) with x = epsilon/mu - mu/2 (Balle and Wang 2018;
    Dong, Roth and Su 2022). The two terms nearly cancel for small mu, so
    delta is written phi(x) (R(x) - R(x + mu)) with Mills' ratio R wherever R does not overflow.

    **Guarantee:** exact to rounding; `tests/accounting/test_laws.py`.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        x = epsilon / mu - mu / 2
        middle = x + mu / 2
        gap = np.where(mu < 1e-6, mu * (1 - middle * _mills(middle)), _mills(x) - _mills(x + mu))
        # R is convex with -R'(x) <= 1/(1+x^2): an upper bound where rounding ate the difference.
        gap = np.where(gap > 0, gap, mu / (1 + x * x))
        tail = -x * x / 2 - 0.5 * math.log(2 * math.pi) + np.log(gap)
        upper = special.log_ndtr(-x)
        bulk = upper + np.log1p(-np.exp(epsilon + special.log_ndtr(-x - mu) - upper))
    return np.where(x > -5, tail, bulk)


def _mills(x: Array) -> Array:
    """Compute Mills' ratio (1 - Phi(x)) / phi(x)."""
    return np.asarray(math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2)))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Find the mu of Gaussian DP whose profile passes through (epsilon, delta)."""
    goal = math.log(delta)

    def excess(log_mu: float) -> float:
        value = gaussian_log_delta(epsilon, np.array([math.exp(log_mu)]))[0]
        return max(float(value), -1e5) - goal

    return math.exp(optimize.brentq(excess, -40.0, 40.0, xtol=1e-13, rtol=1e-13))


def smallest_epsilon(log_delta: Callable[[float], float], delta: float) -> float:
    """Find the smallest epsilon >= 0 at which a decreasing log delta is at most log(delta).

    The root is rounded up until the inequality holds as computed. At delta = 0 the loss would have
    to be bounded, which it is under no noise that is searched here.
    """
    if delta <= 0:
        return math.inf
    goal = math.log(delta)
    if log_delta(0.0) <= goal:
        return 0.0
    high = 1.0
    while log_delta(high) > goal:
        high *= 2
    while high > 1e-12 and log_delta(high / 2) <= goal:
        high /= 2

    def excess(epsilon: float) -> float:
        return max(log_delta(epsilon), -1e5) - goal

    root = float(optimize.brentq(excess, high / 2, high, xtol=1e-11 * high, rtol=1e-11))
    step = 1e-11 * high
    while log_delta(root) > goal:
        root += step
        step *= 2
    return root


def smallest_noise(
    profile_of: Callable[[float], Profile], epsilon: float, delta: float, start: float
) -> float:
    """Solve for the noise z with which `profile_of(z)` meets (epsilon, delta).

    The secant method in log z, within a bracket, on the mu of the Gaussian DP that has the same
    delta: nearly proportional to 1/z, so that a few profiles suffice.

    **Guarantee:** the epsilon of `profile_of` the result is at most the one asked for, and at
    least 0.9995 of it; `tests/accounting/test_laws.py`.
    """
    aim = 0.9998 * epsilon
    goal = math.log(gaussian_mu(aim, delta))
    low, high = -math.inf, math.inf
    point, slope = math.log(start), -1.0
    last = (math.nan, math.nan)
    for _ in range(100):
        found = profile_of(math.exp(point))
        if found.delta(epsilon) <= delta <= found.delta(0.9995 * epsilon):
            return math.exp(point)
        reached = min(max(found.delta(aim), 1e-300), 1 - 1e-9)
        excess = math.log(gaussian_mu(aim, reached)) - goal
        low, high = (point, high) if excess > 0 else (low, point)
        if point != last[0]:
            secant = (excess - last[1]) / (point - last[0])
            slope = secant if secant < -0.01 else slope
        last = point, excess
        point += min(max(-excess / slope, -1.0), 1.0)
        if not low < point < high:
            point = (low + high) / 2
    raise RuntimeError(f"no noise multiplier found for epsilon = {epsilon}, delta = {delta}")


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of mu-Gaussian DP; mu = 0 releases nothing, mu = infinity everything.

    **Guarantee:** exact, for adaptive releases too, with mu^2 the sum of the releases' mu^2 (Dong,
    Roth and Su 2022); `tests/accounting/test_laws.py`.

    >>> round(GaussianProfile(1.0).epsilon(1e-5), 3)
    4.377
    """

    mu: float
    accountant: str = "exact Gaussian DP"

    def log_delta(self, epsilon: float) -> float:
        """Take the logarithm of delta at this epsilon."""
        if self.mu == 0:
            return -math.inf
        if self.mu == math.inf:
            return 0.0
        return float(gaussian_log_delta(epsilon, np.array([self.mu]))[0])

    def delta(self, epsilon: float) -> float:
        """Compute delta at this epsilon."""
        return math.exp(self.log_delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Compute epsilon at this delta."""
        if self.mu == 0:
            return 0.0
        if self.mu > _LARGEST_MU:
            return math.inf
        return smallest_epsilon(self.log_delta, delta)


@dataclass(frozen=True)
class Least:
    """The smaller of several valid bounds, wherever asked.

    **Guarantee:** each of them bounds delta(epsilon), hence the smallest does;
    `tests/accounting/test_pure.py`.
    """

    bounds: tuple[Profile, ...]

    @property
    def accountant(self) -> str:
        """How the numbers were obtained, in words."""
        return " or, if smaller, ".join(dict.fromkeys(bound.accountant for bound in self.bounds))

    def delta(self, epsilon: float) -> float:
        """Take the smallest delta at this epsilon."""
        return min(bound.delta(epsilon) for bound in self.bounds)

    def epsilon(self, delta: float) -> float:
        """Take the smallest epsilon at this delta."""
        return min(bound.epsilon(delta) for bound in self.bounds)


@dataclass(frozen=True, eq=False)
class MixtureProfile:
    """Gaussian DP averaged over a client's attendance, which the adversary knows.

    Who takes part does not depend on data, so delta(epsilon) is the mean over attendances of the
    delta of the rounds attended.

    **Guarantee:** exact when all rounds have the same noise; otherwise attendances are rounded to
    a grid of mu^2, upwards, and delta, which increases with mu, is bounded from above.
    `tests/accounting/test_laws.py`.
    """

    mu: Array
    log_mass: Array
    accountant: str

    def log_delta(self, epsilon: float) -> float:
        """Take the logarithm of delta at this epsilon."""
        terms = self.log_mass + gaussian_log_delta(epsilon, self.mu)
        # Attendances left out are counted as delta = 1.
        return min(0.0, float(special.logsumexp(np.append(terms, _DROPPED + 20))))

    def delta(self, epsilon: float) -> float:
        """Compute delta at this epsilon."""
        return math.exp(self.log_delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Compute epsilon at this delta."""
        return smallest_epsilon(self.log_delta, delta)


def mixture_profile(groups: Groups, rate: float, scale: float) -> MixtureProfile:
    """Build the profile of rounds attended independently with probability `rate`, visibly.

    Attending a round with noise multiplier z costs mu = scale / z.
    """
    if len(groups) == 1:
        (z, count), *_ = groups
        times, log_mass = _attendance(count, rate)
        squares, words = times * (scale / z) ** 2, "exact"
    else:
        squares, log_mass = _attendance_by_grid(groups, rate, scale)
        words = "attended mu^2 rounded up to a grid"
    kept = squares > 0
    return MixtureProfile(
        np.sqrt(squares[kept]),
        log_mass[kept],
        f"binomial mixture of Gaussian DP ({words})",
    )


def _attendance(count: int, rate: float) -> tuple[Array, Array]:
    """List how often a client may attend, and the log-probability of each."""
    times = np.arange(count + 1, dtype=np.float64)
    # scipy.stats has this too, but takes half a second to import.
    ways = special.gammaln(count + 1) - special.gammaln(times + 1)
    ways -= special.gammaln(count - times + 1)
    log_mass = ways + times * math.log(rate) + (count - times) * math.log1p(-rate)
    kept = log_mass > _DROPPED
    return times[kept], log_mass[kept]


def _attendance_by_grid(groups: Groups, rate: float, scale: float) -> tuple[Array, Array]:
    """Bound the law of the attended sum of mu^2, for rounds that differ in noise."""
    total = sum(count * (scale / z) ** 2 for z, count in groups)
    cells = min(2**18, max(2**14, 1000 * len(groups)))
    step = total / cells
    law, top = np.zeros(cells + len(groups) + 2), 0
    law[0] = 1.0
    for z, count in groups:
        times, log_mass = _attendance(count, rate)
        places = np.ceil(times * ((scale / z) ** 2 / step) * (1 - 1e-12)).astype(np.int64)
        before = law[: top + 1].copy()
        law[: top + 1] = 0.0
        for place, mass in zip(places, np.exp(log_mass), strict=True):
            law[place : place + top + 1] += mass * before
        top += int(places[-1])
    # One more rounding up, to a few thousand terms, keeps each query cheap.
    used = np.flatnonzero(law > math.exp(_DROPPED))
    width = 1 + (int(used[-1]) - int(used[0])) // 4096
    cell = used[0] + -(-(used - used[0]) // width) * width
    squares, where = np.unique(cell, return_inverse=True)
    return squares * step, np.log(np.bincount(where, weights=law[used]))
