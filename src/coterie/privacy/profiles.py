"""Privacy profiles in closed form: delta(epsilon) of a run, its inverse, and its trade-off curve.

- `GaussianProfile`: Gaussian DP (Dong, Roth and Su 2022; Balle and Wang 2018).
- `MixtureProfile`: its mean over the rounds that a client attends, for cohorts that are visible.
- `PureProfile`: optimal composition of pure releases. Any epsilon-DP release is a post-processing
  of randomised response with the same epsilon (Kairouz, Oh and Viswanath 2015), so randomised
  responses bound every composition, and no smaller bound depends on the epsilons only.
- `WishartProfile`: one Wishart release, see below.

Rounds that hide the cohort need numerical composition: see `coterie.privacy.accounting`. Grids and
searches round up: a profile may overstate delta or epsilon; floating point takes away at most about
1e-8 of it.

Wishart noise
-------------
Let Sigma = sum w w^T + E, E ~ W_d(nu, c I), k = nu - d + 1 and r = |w|^2 / c. Let X be Sigma minus
the other clients' sum, P the law of X with the client (X = w w^T + E), Q without it (X = E). As
det(X - w w^T) = det(X) (1 - w^T X^-1 w), the densities of E differ by a function of
Y = |w|^2 / (c w^T X^-1 w):

    log dP/dQ = (k - 2)/2 log(1 - r/Y) + r/2   where Y > r, and -infinity where Y <= r.

Under Q, Y ~ chi2_k, and under P, Y ~ r + chi2_k (Sherman and Morrison). So a release is exactly as
private as the number r plus chi2_k noise. For k >= 2 this noise is log-concave, so threshold tests
on Y are optimal and r = K^2/c is the worst case: a dominating pair, which composes (Zhu, Dong and
Wang 2022), also if w depends on earlier releases. With probability P(chi2_k <= r) an output without
the client is impossible with it: no epsilon holds at a smaller delta. Under `replace` the support
moves both ways, and no account is offered. Sampling is charged as full participation.

Trade-off curves
----------------
A mechanism is f-DP if every test between two neighbours with type I error at most alpha has a type
II error of at least f(alpha) (Dong, Roth and Su 2022). A profile implies such a curve (Wasserman
and Zhou 2010): by (epsilon, delta)-DP in both directions

    f(alpha) = sup over epsilon >= 0 of max(0, 1 - delta - e^epsilon alpha,
                                            e^-epsilon (1 - delta - alpha)),  delta = delta(epsilon)

which is convex, decreasing and its own inverse. A supremum over fewer epsilons is smaller, so a
grid is a valid lower bound. Gaussian DP has the closed form Phi(Phi^-1(1 - alpha) - mu).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Array = NDArray[np.float64]
Groups = tuple[tuple[float, int], ...]
"""Noise multipliers, and the number of rounds with each."""
_DROPPED = -200.0
"""Attendances with a smaller log-probability are dropped, and counted as delta = 1."""
_LARGEST_MU = 1e9
"""Above this mu, epsilon (about mu^2/2) loses its digits and is reported as infinite."""
_NODES = 320
_LARGEST = 700.0
"""Above this, e^epsilon overflows float64; the curve is indistinguishable from zero."""


class Profile:
    """An upper bound on delta(epsilon), exact if `accountant`, a text for display, states it.

    A subclass defines `log_delta`, or both `delta` and `epsilon`.
    """

    accountant: str

    def log_delta(self, epsilon: float) -> float:
        """Return the logarithm of delta at this epsilon."""
        raise NotImplementedError

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at this epsilon >= 0."""
        return math.exp(self.log_delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at this delta, 0 <= delta < 1."""
        return smallest_epsilon(self.log_delta, delta)

    def trade_off(self, alphas: Sequence[float] | Array) -> Array:
        """Return a lower bound on the type II error of any test with these type I errors.

        **Guarantee:** a lower bound on the type II error at each alpha; exact for Gaussian DP.
        `tests/privacy/test_profiles_tradeoff.py`.

        >>> PureProfile(1.0, 1).trade_off([0.0, 0.1, 1.0]).round(4).tolist()
        [1.0, 0.7282, 0.0]
        """
        alpha = _rates(alphas)
        epsilon, kept = _tangents(self)
        line = np.exp(epsilon)
        flat = alpha.reshape(-1, 1)
        best = np.maximum(kept - line * flat, (kept - flat) / line).max(axis=1)
        return np.asarray(np.clip(best, 0.0, 1.0).reshape(alpha.shape))


def _rates(alphas: Sequence[float] | Array) -> Array:
    alpha = np.asarray(alphas, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alphas = {alphas}: expected numbers from 0 to 1")
    return alpha


@lru_cache(maxsize=16)
def _tangents(profile: Profile) -> tuple[Array, Array]:
    """Return the epsilons of the supremum, and 1 - delta of a profile at each."""
    largest = profile.epsilon(1e-10)
    # If losses are infinite with a larger probability, delta hardly decreases further.
    top = min(largest, _LARGEST) if largest < math.inf else 20.0
    # A kink of the profile (pure noise) lies at the top; below, tangents in even steps.
    epsilon = np.linspace(0.0, top, _NODES)
    return epsilon, 1 - np.array([profile.delta(float(e)) for e in epsilon])


@dataclass(frozen=True)
class Law:
    """The privacy loss L = log dP/dQ of one release: the range of its mass, and its tails.

    `tails` returns P(L > l) and log Q(L > l) for each l. Mass of P above `high` counts as an
    infinite loss, mass below `low` as `low`: both round up.
    """

    low: float
    high: float
    tails: Callable[[Array], tuple[Array, Array]]


def gaussian_log_delta(epsilon: float, mu: Array) -> Array:
    """Return the logarithm of delta(epsilon) of mu-Gaussian DP, for each mu > 0.

    delta = Phi(-x) - e^epsilon Phi(-x - mu) with x = epsilon/mu - mu/2 (Balle and Wang 2018;
    Dong, Roth and Su 2022). The two terms nearly cancel for small mu, so
    delta is computed as phi(x) (R(x) - R(x + mu)) with Mills' ratio R wherever R does not overflow.

    **Guarantee:** exact to rounding; `tests/privacy/test_accounting.py`.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        x = epsilon / mu - mu / 2
        middle = x + mu / 2
        gap = np.where(mu < 1e-6, mu * (1 - middle * _mills(middle)), _mills(x) - _mills(x + mu))
        # R is convex with -R'(x) <= 1/(1+x^2): a bound where rounding loses the difference.
        gap = np.where(gap > 0, gap, mu / (1 + x * x))
        tail = -x * x / 2 - 0.5 * math.log(2 * math.pi) + np.log(gap)
        upper = special.log_ndtr(-x)
        bulk = upper + np.log1p(-np.exp(epsilon + special.log_ndtr(-x - mu) - upper))
    return np.where(x > -5, tail, bulk)


def _mills(x: Array) -> Array:
    """Return Mills' ratio (1 - Phi(x)) / phi(x)."""
    return np.asarray(math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2)))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the mu of Gaussian DP whose profile passes through (epsilon, delta)."""
    goal = math.log(delta)

    def excess(log_mu: float) -> float:
        value = gaussian_log_delta(epsilon, np.array([math.exp(log_mu)]))[0]
        return max(float(value), -1e5) - goal

    return math.exp(optimize.brentq(excess, -40.0, 40.0, xtol=1e-13, rtol=1e-13))


def smallest_epsilon(log_delta: Callable[[float], float], delta: float) -> float:
    """Return the smallest epsilon >= 0 at which a decreasing log delta is at most log(delta).

    The root is rounded up until the inequality holds as computed. At delta = 0 the result is
    infinite: the noises that use this search have unbounded losses.
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
    """Return the noise z with which `profile_of(z)` meets (epsilon, delta).

    The secant method in log z, within a bracket, on the mu of the Gaussian DP that has the same
    delta: nearly proportional to 1/z, so that a few profiles suffice.

    **Guarantee:** the epsilon of `profile_of(z)` is at most the target and at least 0.9995 of it;
    `tests/privacy/test_accounting.py`.
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
class GaussianProfile(Profile):
    """The profile of mu-Gaussian DP; mu = 0 releases nothing, mu = infinity everything.

    **Guarantee:** exact, for adaptive releases too, with mu^2 the sum of the releases' mu^2 (Dong,
    Roth and Su 2022); `tests/privacy/test_accounting.py`.

    >>> round(GaussianProfile(1.0).epsilon(1e-5), 3)
    4.377
    """

    mu: float
    accountant: str = "exact Gaussian DP"

    def log_delta(self, epsilon: float) -> float:
        """Return the logarithm of delta at this epsilon."""
        if self.mu == 0:
            return -math.inf
        if self.mu == math.inf:
            return 0.0
        return float(gaussian_log_delta(epsilon, np.array([self.mu]))[0])

    def epsilon(self, delta: float) -> float:
        """Return epsilon at this delta."""
        if self.mu == 0:
            return 0.0
        return math.inf if self.mu > _LARGEST_MU else super().epsilon(delta)

    def trade_off(self, alphas: Sequence[float] | Array) -> Array:
        """Return G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu).

        **Guarantee:** exact to rounding; `tests/privacy/test_profiles_tradeoff.py`.

        >>> GaussianProfile(1.0).trade_off([0.0, 0.05, 1.0]).round(4).tolist()
        [1.0, 0.7405, 0.0]
        """
        alpha = _rates(alphas)
        if self.mu == math.inf:
            return np.zeros_like(alpha)
        if self.mu == 0:
            return 1 - alpha
        # Phi^-1(1 - alpha) = -Phi^-1(alpha), without losing the digits of a small alpha.
        return np.asarray(special.ndtr(-special.ndtri(alpha) - self.mu), dtype=np.float64)


@dataclass(frozen=True)
class Least(Profile):
    """The smallest of several valid bounds, at each point.

    **Guarantee:** each of them bounds delta(epsilon), hence the smallest does;
    `tests/privacy/test_profiles_pure.py`.
    """

    bounds: tuple[Profile, ...]

    @property
    def accountant(self) -> str:  # type: ignore[override]
        """How the bound was computed, for display."""
        return " or, if smaller, ".join(dict.fromkeys(bound.accountant for bound in self.bounds))

    def delta(self, epsilon: float) -> float:
        """Return the smallest delta at this epsilon."""
        return min(bound.delta(epsilon) for bound in self.bounds)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at this delta."""
        return min(bound.epsilon(delta) for bound in self.bounds)


@dataclass(frozen=True, eq=False)
class MixtureProfile(Profile):
    """The mean of Gaussian DP over a client's attendance, which the adversary observes.

    Attendance does not depend on data, so delta(epsilon) is the mean over attendances of the delta
    of the attended rounds.

    **Guarantee:** exact when all rounds have the same noise; otherwise attendances are rounded to
    a grid of mu^2, upwards, and delta, which increases with mu, is bounded from above.
    `tests/privacy/test_accounting.py`.
    """

    mu: Array
    log_mass: Array
    accountant: str

    def log_delta(self, epsilon: float) -> float:
        """Return the logarithm of delta at this epsilon."""
        terms = self.log_mass + gaussian_log_delta(epsilon, self.mu)
        # Attendances left out are counted as delta = 1.
        return min(0.0, float(special.logsumexp(np.append(terms, _DROPPED + 20))))


def mixture_profile(groups: Groups, rate: float, scale: float) -> MixtureProfile:
    """Return the profile of rounds attended independently with probability `rate`, visibly.

    Attending a round with noise multiplier z costs mu = scale / z.
    """
    if len(groups) == 1:
        (z, count), *_ = groups
        times, log_mass = _attendance(count, rate)
        squares, method = times * (scale / z) ** 2, "exact"
    else:
        squares, log_mass = _attendance_by_grid(groups, rate, scale)
        method = "attended mu^2 rounded up to a grid"
    kept = squares > 0
    return MixtureProfile(
        np.sqrt(squares[kept]),
        log_mass[kept],
        f"binomial mixture of Gaussian DP ({method})",
    )


def _attendance(count: int, rate: float) -> tuple[Array, Array]:
    """Return the possible numbers of attended rounds, and the log-probability of each."""
    times = np.arange(count + 1, dtype=np.float64)
    # scipy.stats has this too, but takes half a second to import.
    ways = special.gammaln(count + 1) - special.gammaln(times + 1)
    ways -= special.gammaln(count - times + 1)
    log_mass = ways + times * math.log(rate) + (count - times) * math.log1p(-rate)
    kept = log_mass > _DROPPED
    return times[kept], log_mass[kept]


def _attendance_by_grid(groups: Groups, rate: float, scale: float) -> tuple[Array, Array]:
    """Return a bound on the law of the attended sum of mu^2, for rounds with different noise."""
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


def add_epsilons(groups: Groups) -> float:
    """Return the sum of the epsilons: the cost of pure releases at delta 0."""
    return math.fsum(epsilon * count for epsilon, count in groups)


def response_law(epsilon: float) -> Law:
    """Return the loss of randomised response: epsilon or -epsilon, e^epsilon times as likely."""
    log_yes = -math.log1p(math.exp(-epsilon))

    def tails(losses: Array) -> tuple[Array, Array]:
        none, all_ = losses >= epsilon, losses < -epsilon
        upper = np.where(none, 0.0, np.where(all_, 1.0, math.exp(log_yes)))
        return upper, np.where(none, -np.inf, np.where(all_, 0.0, log_yes - epsilon))

    return Law(-epsilon, epsilon, tails)


@dataclass(frozen=True)
class PureProfile(Profile):
    """The profile of equal pure releases, each accounted as a randomised response.

    **Guarantee:** exact for randomised responses, hence the best bound for all
    `rounds`-fold adaptive compositions of `step`-DP releases (Kairouz, Oh and Viswanath 2015,
    theorem 3.3); `tests/privacy/test_profiles_pure.py`.

    >>> round(PureProfile(0.1, 100).epsilon(1e-5), 3), PureProfile(0.125, 8).epsilon(0.0)
    (4.307, 1.0)
    """

    step: float
    rounds: int
    accountant: str = "optimal composition of pure releases (as randomised responses)"

    def log_delta(self, epsilon: float) -> float:
        """Return the logarithm of delta at this epsilon."""
        yes = np.arange(self.rounds + 1, dtype=np.float64)
        loss = (2 * yes - self.rounds) * self.step
        kept = yes[loss > epsilon]
        if len(kept) == 0 or epsilon >= add_epsilons(((self.step, self.rounds),)):
            return -math.inf
        no = self.rounds - kept
        ways = (
            special.gammaln(self.rounds + 1) - special.gammaln(kept + 1) - special.gammaln(no + 1)
        )
        log_mass = ways - self.rounds * math.log1p(math.exp(-self.step)) - no * self.step
        gain = np.log(-np.expm1(epsilon - loss[loss > epsilon]))
        return min(0.0, float(special.logsumexp(log_mass + gain)))

    def epsilon(self, delta: float) -> float:
        """Return epsilon at this delta."""
        together = add_epsilons(((self.step, self.rounds),))
        return together if delta == 0 else min(together, smallest_epsilon(self.log_delta, delta))


_UNSEEN = 1e-17
"""Mass of large losses that one round counts as infinite: far below float64 resolution."""
_ROUNDED = 2e-12
"""Allowance for rounding in a difference of two chi-square probabilities, relative to the larger.

The largest relative error observed against 40 digits is 3e-13 (at 1,000 degrees).
"""


def _lower(x: Array, degrees: int) -> Array:
    """Return P(chi2 <= x)."""
    return np.asarray(special.gammainc(degrees / 2, np.maximum(x, 0.0) / 2))


def _upper(x: Array, degrees: int) -> Array:
    """Return P(chi2 > x)."""
    return np.asarray(special.gammaincc(degrees / 2, np.maximum(x, 0.0) / 2))


def impossible(degrees: int, ratio: float) -> float:
    """Return the probability that a release without the client is impossible with it."""
    return float(special.gammainc(degrees / 2, ratio / 2))


def _adding(losses: Array, degrees: int, ratio: float) -> tuple[Array, Array]:
    """Return Q(L > l) and log P(L > l) of the loss L = log dQ/dP; L > l where Y < t(l)."""
    if degrees == 2:
        below = losses < -ratio / 2
        return np.where(below, 1.0, -math.expm1(-ratio / 2)), np.where(below, 0.0, -np.inf)
    with np.errstate(over="ignore", divide="ignore"):
        # t - r, which keeps its digits where t is next to r.
        beyond = ratio / np.expm1(np.maximum(2 * (losses + ratio / 2) / (degrees - 2), 0.0))
        log_lower = np.log(_lower(beyond, degrees))
    return _lower(ratio + beyond, degrees), log_lower


def _removing(losses: Array, degrees: int, ratio: float) -> tuple[Array, Array]:
    """Return P(L > l) and log Q(L > l) of the loss L = log dP/dQ; L > l where Y > t(l)."""
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
    # Losses above `high` count as infinite: a negligible mass, or negligible against `lost`.
    mass = min(lost + max(_UNSEEN, 1e-6 * lost), 1.0)
    beyond = 2 * float(special.gammaincinv(degrees / 2, mass)) - ratio if mass < 1 else 0.0
    # A chi-square density of two degrees or more is at most 1/2.
    beyond = max(beyond, 2 * _UNSEEN)
    high = half * math.log1p(ratio / beyond) - ratio / 2
    return Law(-ratio / 2, high, lambda losses: _adding(losses, degrees, ratio))


@dataclass(frozen=True)
class WishartProfile(Profile):
    """The profile of one Wishart release under `zero_out`, the worse of both directions.

    **Guarantee:** exact; `tests/privacy/test_profiles_wishart.py`.

    >>> one = WishartProfile(100, 2.5236)
    >>> round(one.epsilon(1e-5), 4), WishartProfile(2, 0.2).epsilon(1e-5)
    (0.9996, inf)
    """

    degrees: int
    ratio: float
    accountant: str = "exact profile of one Wishart release"

    def adding(self, epsilon: float) -> float:
        """Return delta between runs without the client and with it."""
        found, log_other = _adding(np.array([epsilon]), self.degrees, self.ratio)
        return self._difference(epsilon, float(found[0]), float(log_other[0]))

    def removing(self, epsilon: float) -> float:
        """Return delta between runs with the client and without it."""
        if epsilon >= self.ratio / 2:
            return 0.0
        found, log_other = _removing(np.array([epsilon]), self.degrees, self.ratio)
        return self._difference(epsilon, float(found[0]), float(log_other[0]))

    def _difference(self, epsilon: float, upper: float, log_lower: float) -> float:
        taken = math.exp(min(epsilon + log_lower, 0.0))
        return min(1.0, max(0.0, upper - taken) + _ROUNDED * upper)

    def delta(self, epsilon: float) -> float:
        """Return delta at this epsilon."""
        return max(self.adding(epsilon), self.removing(epsilon))

    def epsilon(self, delta: float) -> float:
        """Return epsilon at this delta; infinite if outputs are impossible too often."""
        if delta <= self.delta(1e9):
            return math.inf
        return smallest_epsilon(lambda e: math.log(max(self.delta(e), 1e-300)), delta)
