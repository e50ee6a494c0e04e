"""Which differences between methods are larger than noise: clients and seeds both counted.

Two methods are run on the same clients k = 1..K with the same seeds s = 1..S (split and noise).
Over paired differences of clients' own errors d[k, s], in the crossed random effects model

    d[k, s] = mu + a_k + b_s + e[k, s],

the mean has variance va/K + vb/S + ve/(K S): clients come back in every seed, and a seed's split
and noise are shared by its clients, so that K S numbers are far from independent. Let A be the
sample variance of the K client means over K, and B that of the S seed means over S:

    E[A] = (va + ve/S) / K,    E[B] = (vb + ve/K) / S,    E[A + B] = Var(mean) + ve/(K S).

A + B never falls short on average. The test at level alpha calls a difference one where

    mean^2 > t(K-1)^2 A + t(S-1)^2 B,    t(f): the 1 - alpha/2 quantile of Student's t.

It holds its level however the variance splits (Banerjee, "Approximate confidence interval for
linear functions of means of k populations when the population variances are not equal", Sankhya
1960): with w and 1 - w the shares of E[A] and E[B] in their sum, and F the distribution function of
chi-squared of one degree of freedom, which is concave, P(no alarm) >= E F(w X + (1-w) Y) >=
w E F(X) + (1-w) E F(Y) = 1 - alpha, X = t(K-1)^2 A / E[A], Y = t(S-1)^2 B / E[B]; A and B are
independent of the mean. Adding the variances and guessing degrees of freedom (Satterthwaite) does
not hold it for few seeds. Several pairs at one epsilon go through Holm's steps (Scand. J. Statist.
1979), so that 5 % is the chance of any false alarm at that epsilon.

With one seed B is unknown and left out: then only clients vary, and whoever shows it says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

FALSE_ALARMS = 0.05
"""The chance of any false alarm among the pairs of one epsilon."""
_LEAST_P = 1e-12


@dataclass(frozen=True)
class Difference:
    """How two methods differ in clients' own errors, at one epsilon.

    Attributes:
        mean: Over clients and seeds, of the first's error less the second's; below 0 the first is
            better. Not a number where an error is not finite, or no client has rows in all seeds.
        standard_error: sqrt(A + B), or sqrt(A) with one seed; see the module.
        clients: How many were compared: those with test rows in every seed.
        seeds: How many.
        p: The level at which the difference is just called one, alone.
        adjusted: The same among all pairs of its epsilon (Holm).
    """

    mean: float
    standard_error: float
    clients: int
    seeds: int
    p: float
    adjusted: float = math.nan

    @property
    def is_clear(self) -> bool:
        """Whether it is larger than noise."""
        return self.adjusted <= FALSE_ALARMS


def compare_errors(first: Array, second: Array) -> Difference:
    """Compare two methods by clients' own errors, (clients, seeds) each.

    A client without test rows in some seed (not a number under both) is left out.

    Raises:
        ValueError: If shapes differ.
    """
    if first.shape != second.shape or first.ndim != 2:
        raise ValueError(
            f"errors of shapes {first.shape} and {second.shape}: expected (clients, seeds) twice"
        )
    known = ~(np.isnan(first) & np.isnan(second)).any(axis=1)
    with np.errstate(invalid="ignore"):
        apart = (first - second)[known]
    clients, seeds = apart.shape
    if clients < 2 or not np.isfinite(apart).all():
        return Difference(math.nan, math.nan, clients, seeds, 1.0)
    mean = float(apart.mean())
    over_clients = _variance(apart.mean(axis=1))
    over_seeds = _variance(apart.mean(axis=0)) if seeds > 1 else 0.0
    error = math.sqrt(over_clients + over_seeds)
    p = _level(mean, (over_clients, clients - 1), (over_seeds, seeds - 1))
    return Difference(mean, error, clients, seeds, p)


def adjust(differences: Sequence[Difference]) -> list[Difference]:
    """Put the pairs of one epsilon through Holm's steps."""
    levels = holm([difference.p for difference in differences])
    return [replace(d, adjusted=level) for d, level in zip(differences, levels, strict=True)]


def holm(levels: Sequence[float]) -> list[float]:
    """Adjust p-values for their number; the order is kept.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, least = [0.0] * len(levels), 0.0
    order = sorted(range(len(levels)), key=lambda place: levels[place])
    for step, place in enumerate(order):
        least = max(least, min(1.0, levels[place] * (len(levels) - step)))
        found[place] = least
    return found


def _variance(values: Array) -> float:
    """Return the variance of the mean of these values."""
    return float(values.var(ddof=1)) / len(values)


def _level(mean: float, *parts: tuple[float, int]) -> float:
    """Find the level at which mean^2 is just the threshold: it falls as the level grows."""
    used = [(variance, freedom) for variance, freedom in parts if freedom > 0]

    def is_called(level: float) -> bool:
        threshold = sum(v * float(special.stdtrit(f, 1 - level / 2)) ** 2 for v, f in used)
        return mean**2 > threshold

    if not is_called(1.0):
        return 1.0
    low, high = math.log(_LEAST_P), 0.0
    if is_called(_LEAST_P):
        return _LEAST_P
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_called(math.exp(middle)) else (middle, high)
    return math.exp(high)
