"""Conversions and compositions as papers print them, for rivals and reproductions.

What a run guarantees is always the ledger's account of the noise that was added; these decide only
how much noise a published recipe asks for.
"""

import math
from collections.abc import Sequence

from scipy import optimize

from coterie.privacy.events import Gaussian, check_delta
from coterie.privacy.profiles import gaussian_mu

_MOST = 500.0


def printed_composition(epsilons: Sequence[float], delta: float) -> float:
    """Compose pure releases as formula (7) of Liang et al. (Kairouz, Oh and Viswanath 2017).

    >>> printed_composition([0.5, 0.5], 0.0), round(printed_composition([0.01] * 100, 1e-5), 3)
    (1.0, 0.434)
    """
    simple = math.fsum(epsilons)
    if delta == 0:
        return simple
    drift = math.fsum(e * math.tanh(e / 2) for e in epsilons)
    squares = math.fsum(e * e for e in epsilons)
    first = drift + math.sqrt(2 * squares * math.log(1 / delta))
    second = drift + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta))
    return min(simple, first, second)


def spent_as_printed(epsilon: float, delta: float, weights: Sequence[float]) -> tuple[float, ...]:
    """Find the largest budgets, proportional to the weights, whose printed composition fits."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: expected a positive number")

    def excess(base: float) -> float:
        return printed_composition([base * weight for weight in weights], delta) - epsilon

    high = epsilon
    while excess(high) < 0:
        high *= 2
    base = float(optimize.brentq(excess, 0.0, high, xtol=1e-14, rtol=1e-12))
    return tuple(base * weight for weight in weights)


def printed_sigma(epsilon: float, delta: float) -> float:
    """Return the noise of Wu et al. (DPFedMTL): sqrt(2 log(1.25/delta))/epsilon, once for all rounds.

    The classic bound for one release without sampling, proved for epsilon below 1 alone.

    >>> [round(printed_sigma(epsilon, 1e-5), 4) for epsilon in (45, 8, 2, 0.5)]
    [0.1077, 0.6056, 2.4224, 9.6896]
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def printed_epsilon(sigma: float, delta: float) -> float:
    """Return the epsilon with which Wu et al. label noise sigma: what they claim, not what is true.

    >>> round(printed_epsilon(9.69, 1e-5), 3)
    0.5
    """
    return printed_sigma(sigma, delta)


def rows_to_clients(epsilon: float, delta: float, weights: Sequence[float], rows: int) -> float:
    """Find the noise multiplier of a recipe that protects rows, for clients of so many rows.

    Proposition 3 of Liang et al.: (epsilon, delta) for whole clients of at most n rows follows from
    (epsilon/n, delta/(n e^epsilon)) for one row. One row of n moves a client's strongly convex fit,
    whose norm is at most the bound B, by at most 2 B/n, so the noise is (2/n)/mu' in units of B,
    mu' the Gaussian DP of that row-level budget, with rounds composed exactly.

    Args:
        epsilon: Of the client-level target.
        delta: Of the client-level target.
        weights: Of the rounds; round t gets the noise multiplier returned over its weight.
        rows: The most rows of a client, a public number.

    **Guarantee:** never less noise than the exact client-level account asks for under zero_out or
    replace: n times mu' is below the mu of (epsilon, delta), as group privacy loses.
    `tests/accounting/test_published.py`.
    """
    if rows < 1:
        raise ValueError(f"rows = {rows}: expected the most rows of a client, at least 1")
    check_delta(delta, (Gaussian(1.0),))
    if not 0 < epsilon <= _MOST:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number of at most {_MOST:g}, beyond which "
            "the delta for one row vanishes; that much protects nobody: run with epsilon inf"
        )
    mu = gaussian_mu(epsilon / rows, delta / rows * math.exp(-epsilon))
    # The margin is that of `calibrate`: above rounding, and far below what anyone could notice.
    return 2 / rows * math.sqrt(math.fsum(weight**2 for weight in weights)) / mu * (1 + 1e-8)
