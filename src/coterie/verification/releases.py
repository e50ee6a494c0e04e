"""From an event of a certificate to the pair of laws that an adversary has to tell apart.

With N(a) the Gaussian of mean a and deviation z, and M(a) = (1 - q) N(0) + q N(a):

- everybody takes part: N(1) against N(0); under replace N(s), s the event's `replaced`;
- hidden coins: M(1) against N(0) and the other way round; under replace M(1) against M(-1)
  (Zhu, Dong and Wang 2022);
- hidden cohorts of a fixed size, under replace: advanced joint convexity (Balle, Barthe and
  Gaboardi 2018): above 0 the losses of M(2) against N(0), below 0 their mirror image, for the
  relation is symmetric;
- who takes part is seen: a cell of its own for staying away, of the same mass under both;
- Laplace: randomised response with the same epsilon, which every release that is purely
  epsilon-DP follows from (Kairouz, Oh and Viswanath 2015), after amplification by a hidden coin;
- Wishart with k degrees and ratio r: r + chi2_k against chi2_k, and the other way round.
"""

import math
from typing import Any

import numpy as np
from scipy import stats

from coterie.verification.divergence import Array, Law, gaussian_cells, gaussian_edges

Pair = tuple[Array, Array]
"""Logarithms of the masses of cells, under P and under Q."""
_CELLS = 4096


def shifted(noise: float, shift: float) -> Pair:
    """Tell N(shift) from N(0)."""
    edges = gaussian_edges(noise, 0.0, shift)
    return gaussian_cells(edges, shift, noise), gaussian_cells(edges, 0.0, noise)


def by_coin(pair: Pair, rate: float) -> Pair:
    """Let the client stay away at times, for all to see."""
    away = math.log1p(-rate)
    return np.append(math.log(rate) + pair[0], away), np.append(math.log(rate) + pair[1], away)


def hidden(noise: float, rate: float, shift: float = 1.0) -> Pair:
    """Tell M(shift) from N(0)."""
    moved, away = shifted(noise, shift)
    return _mixed(away, moved, rate), away


def hidden_replace(noise: float, rate: float) -> Pair:
    """Tell M(1) from M(-1)."""
    edges = gaussian_edges(noise, -1.0, 0.0, 1.0)
    left, away, right = (gaussian_cells(edges, mean, noise) for mean in (-1.0, 0.0, 1.0))
    return _mixed(away, right, rate), _mixed(away, left, rate)


def hidden_fixed(noise: float, rate: float) -> Pair:
    """Return the pair that bounds cohorts of a fixed size, a client replaced."""
    first, second = hidden(noise, rate, 2.0)
    gain = first > second
    first, second = first[gain], second[gain]
    rest = max(1e-300, 1 - float(np.exp(first).sum()) - float(np.exp(second).sum()))
    return np.concatenate([first, second, [math.log(rest)]]), np.concatenate(
        [second, first, [math.log(rest)]]
    )


def response(epsilon: float) -> Pair:
    """Return randomised response."""
    yes = -math.log1p(math.exp(-epsilon))
    return np.array([yes, yes - epsilon]), np.array([yes - epsilon, yes])


def wishart(degrees: int, ratio: float) -> Pair:
    """Tell r + chi2_k from chi2_k."""
    law = stats.chi2(degrees)
    top = float(law.isf(1e-40)) + ratio
    fine = ratio + np.geomspace(1e-12, top, _CELLS // 2)
    edges = np.unique(np.concatenate([np.linspace(0.0, top, _CELLS), fine, [ratio]]))
    return _chi2_cells(edges - ratio, law), _chi2_cells(edges, law)


def _mixed(away: Array, here: Array, rate: float) -> Array:
    return np.asarray(np.logaddexp(math.log1p(-rate) + away, math.log(rate) + here))


def _chi2_cells(edges: Array, law: Any) -> Array:
    below, above = law.cdf(edges), law.sf(edges)
    mass = np.where(below[:-1] > 0.5, above[:-1] - above[1:], below[1:] - below[:-1])
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(mass))


def amplified(epsilon: float, kind: str, rate: float, relation: str) -> float:
    """Return what a pure release costs after a coin that nobody sees; `kind` is "" where all see it.

    Poisson: laws with and without the client are within e^epsilon, so a mixture with weight q is
    within 1 + q (e^epsilon - 1). A fixed size under replace: whoever is drawn instead is a
    replacement, so all laws are within e^(2 epsilon) of each other.
    """
    whole = 2 * epsilon if relation == "replace" else epsilon
    if kind == "poisson":
        up = _mean(epsilon, rate)
        return up if relation == "zero_out" else min(whole, up - _mean(-epsilon, rate))
    if kind == "fixed" and relation == "replace":
        return _mean(whole, rate)
    return whole


def _mean(exponent: float, rate: float) -> float:
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))


def laws_of(pair: Pair) -> tuple[Law, Law]:
    """Return the losses in both directions."""
    return Law.of(pair[0], pair[1]), Law.of(pair[1], pair[0])
