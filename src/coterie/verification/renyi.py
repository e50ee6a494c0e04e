"""Epsilon of the best of several runs, computed anew (Papernot and Steinke 2022, Theorem 2).

With e(a) the Renyi divergence of order a of one run with its score, K runs of the truncated
negative binomial law (shape eta, parameter gamma), and any orders a, b > 1, whoever sees the best
run alone is guaranteed

    e(a) + (1 + eta) [(1 - 1/b) e(b) + log(1/gamma) / b] + log(E[K]) / (a - 1),

and epsilon at delta follows for every a (Canonne, Kamath and Steinke 2020, Proposition 12). Orders
are searched over without a grid, and moments of sampled rounds integrated by Gauss and Legendre.
All that is stated on a grid is at least this, and hardly more.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize, special

Event = Mapping[str, Any]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)
_MOST = 20_000


@dataclass(frozen=True)
class Choice:
    """What a selection's epsilon follows from: runs on offer, a score, the law of their number."""

    candidates: Sequence[Sequence[Event]]
    score: Event
    mean: float
    eta: float
    sampling: str
    rate: float
    visible: bool
    relation: str
    delta: float

    def chosen_alone(self) -> float:
        """Compute epsilon for whoever sees the chosen run alone."""
        gamma = parameter(self.mean, self.eta)
        one = self._divergence
        at_b = _least(lambda b: (1 - 1 / b) * one(b) - math.log(gamma) / b)
        extra = (1 + self.eta) * at_b

        def bound(a: float) -> float:
            spread = (math.log(self.mean) - math.log(self.delta * a)) / (a - 1)
            return one(a) + extra + spread + math.log1p(-1 / a)

        return max(0.0, _least(bound))

    def _divergence(self, order: float) -> float:
        """Take the divergence of one run with its score, of settings that cost most."""
        return max(self._of([*events, self.score], order) for events in self.candidates)

    def _of(self, events: Iterable[Event], order: float) -> float:
        return math.fsum(event["rounds"] * self._one(event, order) for event in events)

    def _one(self, event: Event, order: float) -> float:
        shift = float(event["replaced"]) if self.relation == "replace" else 1.0
        noise = float(event["noise_multiplier"])
        whole = order * (order - 1) * (shift / noise) ** 2 / 2
        seen = whole if self.rate == 1 else _mixed(self.rate, whole)
        if self.rate < 1 and not self.visible and self.sampling == "poisson":
            seen = min(seen, _hidden(order, self.rate, noise, self.relation))
        return seen / (order - 1)


def parameter(mean: float, eta: float) -> float:
    """Find gamma, at which the law of this shape has this mean."""

    def excess(log: float) -> float:
        gamma = math.exp(log)
        if eta == 0:
            return math.log((1 / gamma - 1) / -log) - math.log(mean)
        return math.log(eta * (1 / gamma - 1) / -math.expm1(eta * log)) - math.log(mean)

    return math.exp(float(optimize.brentq(excess, -40.0, -1e-9, xtol=1e-14)))


def _mixed(rate: float, exponent: float) -> float:
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))


@lru_cache(maxsize=4096)
def _hidden(order: float, rate: float, noise: float, relation: str) -> float:
    """Take log E_Q (P/Q)^a of a sampled Gaussian, piece by piece.

    P = (1 - q) N(0) + q N(1) against Q = N(0), or against (1 - q) N(0) + q N(-1) under replace;
    the integrand lies between -1 and 2 a, and changes within z and z^2.
    """
    low, high = -1 - 14 * noise, 2 * order + 14 * noise
    pieces = math.ceil((high - low) / min(2 * noise, 4 * noise * noise))
    if pieces > _MOST:
        return math.inf
    edges = np.linspace(low, high, pieces + 1)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    stay, come, square = math.log1p(-rate), math.log(rate), 2 * noise * noise
    terms = -x * x / square - math.log(noise * math.sqrt(2 * math.pi))
    terms += order * np.logaddexp(stay, come + (2 * x - 1) / square)
    if relation == "replace":
        terms += (1 - order) * np.logaddexp(stay, come - (2 * x + 1) / square)
    return max(0.0, float(special.logsumexp(terms + np.log(half * _WEIGHTS))))


def _least(bound: Callable[[float], float]) -> float:
    """Minimise over orders above 1: on a grid first, then around the best of it."""

    def at(log: float) -> float:
        return bound(1 + math.exp(log))

    coarse = np.linspace(math.log(0.02), math.log(2047.0), 41)
    best = float(coarse[int(np.argmin([at(log) for log in coarse]))])
    step = float(coarse[1] - coarse[0])
    found = optimize.minimize_scalar(at, bounds=(best - step, best + step), method="bounded")
    return min(float(found.fun), at(best))
