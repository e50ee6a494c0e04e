"""Curves and tables of a plan that is looked ahead at: what other facts would come to.

Built on `coterie.planning`, which has the numbers of the plan itself; no data, no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from coterie.planning import MOST_ROUNDS, Outline
from coterie.privacy.accounting import profile_of
from coterie.privacy.profiles import gaussian_mu

Points = tuple[tuple[float, float], ...]
_SHORT = 0.01
"""A step so short, in the logarithm of the noise, leaves nothing to be seen of its error."""


def noises_near(
    outline: Outline, noise_multiplier: float, epsilons: Sequence[float]
) -> dict[float, float]:
    """Return about the noise for other epsilons, each from that for the nearest; good to 2 %."""
    assert outline.epsilon is not None
    centre = outline.epsilon
    known = {centre: noise_multiplier}
    for epsilon in sorted(epsilons, key=lambda one: abs(math.log(one / centre))):
        if epsilon not in known:
            nearest = min(known, key=lambda one: abs(math.log(one / epsilon)))
            there = replace(outline, epsilon=nearest)
            known[epsilon] = noise_near(there, known[nearest], epsilon)
    return known


def noise_near(outline: Outline, noise_multiplier: float, epsilon: float) -> float:
    """Return about the noise for another epsilon, from that for `outline.epsilon`.

    One or two looks at the account instead of a search: a guess by the central limit of sampled
    rounds (Bu, Dong, Long and Su 2020), scaled so that it is right at the known noise, then a step
    of Newton's on the mu of the Gaussian DP with the same delta, and one of the secant where that
    step was long. For tables, never for a guarantee.
    """
    delta, rounds = outline.delta_of(outline.clients), outline.rounds
    rate = outline.participation.rate
    assert outline.epsilon is not None

    def limit(mu: float) -> float:
        return 1 / math.sqrt(math.log1p(mu**2 / (rate**2 * rounds)))

    def reached(z: float) -> float:
        found = profile_of(((outline.event(z), rounds),), outline.participation, outline.relation)
        return gaussian_mu(epsilon, min(max(found.delta(epsilon), 1e-300), 1 - 1e-9))

    goal = gaussian_mu(epsilon, delta)
    first = noise_multiplier / limit(gaussian_mu(outline.epsilon, delta)) * limit(goal)
    slope = math.log(limit(goal * 1.01) / limit(goal)) / math.log(1.01)
    mu = reached(first)
    second = float(first * (goal / mu) ** slope)
    if abs(math.log(second / first)) < _SHORT:
        return second
    again = reached(second)
    secant = math.log(second / first) / math.log(again / mu) if again != mu else slope
    return float(second * (goal / again) ** secant)


def epsilon_by_rounds(outline: Outline, noise_multiplier: float, points: int = 6) -> Points:
    """Return epsilon against rounds at this noise, up to three times those planned."""
    beyond = min(3 * outline.rounds, MOST_ROUNDS)
    return tuple(
        (float(rounds), outline.spent(noise_multiplier, rounds))
        for rounds in (*_spaced(1, outline.rounds, points - 1), beyond)
    )


def error_by_clients(outline: Outline, noise_multiplier: float, points: int = 8) -> Points:
    """Return the error against clients at this noise, from a tenth to ten times as many."""
    few, many = max(1, outline.clients // 10), 10 * outline.clients
    return tuple(
        (float(clients), outline.error(noise_multiplier, clients))
        for clients in _spaced(few, many, points)
    )


def _spaced(low: int, high: int, points: int) -> list[int]:
    """Return whole numbers between two, evenly spread in their logarithms, both ends included."""
    step = math.log(high / low) / max(1, points - 1)
    return sorted({low, high, *(round(low * math.exp(step * turn)) for turn in range(points))})
