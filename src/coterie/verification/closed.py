"""Gaussian DP in closed form: one number mu for any number of releases, and mixtures over it.

A release of a sum with noise multiplier z is s/z-Gaussian DP (s = 1 under zero_out, the event's
`replaced` under replace), and releases add up in squares (Dong, Roth and Su 2022). With
x = epsilon/mu - mu/2,

    delta = phi(x) int_0^inf (1 - e^(-mu y)) e^(-xy - y^2/2) dy,

a sum of positive terms (no digits cancel), by Gauss and Legendre. Where everybody sees who takes
part, epsilon comes from the mean of delta over how often a client does.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Array = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)
_FAR = 1e9
_MANY = 1 << 20


def gaussian_delta(epsilon: float, mu: Array) -> Array:
    """Compute delta of mu-Gaussian DP at an epsilon, for each mu > 0."""
    x = epsilon / mu - mu / 2
    ahead = np.maximum(x, 0.0)
    reach = np.minimum(13.0, 60.0 / np.maximum(ahead, 1e-9))[:, None]
    y = reach * (_NODES + 1) / 2
    terms = -np.expm1(-mu[:, None] * y) * np.exp(-ahead[:, None] * y - y * y / 2)
    tail = (
        np.exp(-ahead * ahead / 2) / math.sqrt(2 * math.pi) * ((terms @ _WEIGHTS) * reach[:, 0] / 2)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        bulk = special.ndtr(-x) - np.exp(epsilon + special.log_ndtr(-x - mu))
    return np.asarray(np.where(x > 0, tail, bulk))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Find epsilon of mu-Gaussian DP."""
    if mu == 0:
        return 0.0
    if mu >= _FAR or delta <= 0:
        return math.inf
    return _solve(lambda e: float(gaussian_delta(e, np.array([mu]))[0]), delta, mu)


def mixture_epsilon(mu: float, rounds: int, rate: float, delta: float) -> float:
    """Find epsilon where a round costs mu and a client takes part in some, for all to see."""
    return _solve(lambda e: mixture_delta(mu, rounds, rate, e), delta, mu * math.sqrt(rounds))


def mixture_delta(mu: float, rounds: int, rate: float, epsilon: float) -> float:
    """Average delta over how often a client takes part."""
    low = max(1, int(stats.binom.ppf(1e-60, rounds, rate)))
    high = max(low, min(rounds, int(stats.binom.isf(1e-60, rounds, rate)) + 1))
    times = np.arange(low, high + 1)
    found = 0.0
    for part in np.array_split(times, 1 + len(times) // 2048):
        mass = stats.binom.pmf(part, rounds, rate)
        found += float(mass @ gaussian_delta(epsilon, mu * np.sqrt(part.astype(np.float64))))
    return found


def responses_epsilon(costs: Mapping[float, int], delta: float) -> float | None:
    """Find epsilon of randomised responses from all sums of their losses; None if too many.

    A response with cost c has the loss c with probability 1/(1 + e^-c), else -c.
    """
    losses, mass = np.zeros(1), np.ones(1)
    for cost, times in costs.items():
        if len(losses) * (times + 1) > _MANY:
            return None
        yes = np.arange(times + 1)
        chance = stats.binom.pmf(yes, times, special.expit(cost))
        losses = np.add.outer(losses, cost * (2.0 * yes - times)).ravel()
        mass = np.multiply.outer(mass, chance).ravel()
    top = float(losses.max())

    def delta_of(epsilon: float) -> float:
        above = losses > epsilon
        return float(mass[above] @ -np.expm1(epsilon - losses[above]))

    if delta_of(0.0) <= delta:
        return 0.0
    return float(optimize.brentq(lambda e: delta_of(e) - delta, 0.0, top, rtol=1e-12))


def _solve(delta_of: Callable[[float], float], delta: float, mu: float) -> float:
    if delta_of(0.0) <= delta:
        return 0.0
    high = mu * mu / 2 + 40 * mu
    return float(
        optimize.brentq(
            lambda e: math.log(max(delta_of(e), 1e-300)) - math.log(delta), 0.0, high, rtol=1e-12
        )
    )
