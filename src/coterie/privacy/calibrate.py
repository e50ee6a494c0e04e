"""From a budget to noise: the least noise with which weighted rounds meet (epsilon, delta).

`Spending` spreads a budget over rounds: evenly, as a power of the round, or geometrically (Liang et
al., "Model-Protected Multi-Task Learning", section 3.5, with budgets eps_t per round). The noise of
a round is proportional to 1/eps_t, so eps_t is the round's weight in the sum of squared mu; rounds
of unequal noise compose exactly.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from coterie.privacy.accounting import check_covered, count, of_one_client, profile_of
from coterie.privacy.events import (
    SCALE,
    Event,
    Gaussian,
    Participation,
    Relation,
    Wishart,
    check_delta,
    check_relation,
)
from coterie.privacy.profiles import Groups, Profile, gaussian_mu, smallest_noise


def calibrate(
    epsilon: float,
    delta: float,
    *,
    weights: Sequence[float],
    participation: Participation,
    relation: Relation,
    replaced: float = 2.0,
) -> float:
    """Return the smallest z with which rounds of Gaussian(z / weight, replaced) meet a target.

    A weight multiplies its round's share of mu: all 1 spends evenly. Raise ValueError if the
    target, a weight or the relation is invalid, or no account is proved.

    **Guarantee:** `profile` of the events with the returned z has an epsilon of at most the target
    and at least 0.9995 of it; `tests/privacy/test_accounting.py`.

    >>> everyone = Participation("everyone")
    >>> z = calibrate(1.0, 1e-5, weights=[1.0], participation=everyone, relation="zero_out")
    >>> round(z, 3)
    3.731
    """
    groups = _check(Gaussian(1.0, replaced), epsilon, delta, weights, participation, relation)
    return _calibrate(epsilon, delta, groups, participation, relation, replaced)


def _check(
    event: Event,
    epsilon: float,
    delta: float,
    weights: Sequence[float],
    participation: Participation,
    relation: Relation,
) -> Groups:
    """Raise ValueError for an invalid target; return the number of equal weights."""
    check_delta(delta, (event,))
    check_relation(relation)
    if not 1e-9 <= epsilon <= 1e4:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number of at least 1e-9 (below, releases "
            "are only noise) and at most 10,000 (which protects nobody); for no noise, run with "
            "epsilon inf"
        )
    if len(weights) == 0 or not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(
            f"weights = {list(weights)[:5]}...: expected one positive finite number per round; "
            "leave a round out rather than give it no weight"
        )
    check_covered(((event, 1),), participation, relation)
    return tuple(sorted(Counter(float(weight) for weight in weights).items()))


@lru_cache(maxsize=64)
def _calibrate(
    epsilon: float,
    delta: float,
    weights: Groups,
    participation: Participation,
    relation: Relation,
    replaced: float,
) -> float:
    if participation.kind == "cyclic":
        weights, participation = _of_one_client(weights, participation)
    rate, rounds = participation.rate, sum(times for _, times in weights)
    scale = 1.0 if relation == "zero_out" else replaced
    squares = sum(times * weight**2 for weight, times in weights)
    mu = gaussian_mu(epsilon, delta)
    if rate == 1:
        # Closed form; the margin covers its rounding and is negligible.
        return scale * math.sqrt(squares) / mu * (1 + 1e-8)
    if -math.expm1(rounds * math.log1p(-rate)) <= delta:
        raise ValueError(
            f"delta = {delta}: the probability that a client takes part at all is no larger, so no "
            "noise is needed; expected a smaller delta"
        )

    def search(weights: Groups, start: float) -> float:
        def with_noise(z: float) -> Profile:
            rounds = ((Gaussian(z / weight, replaced), times) for weight, times in weights)
            return profile_of(count(rounds), participation, relation)

        return smallest_noise(with_noise, epsilon, delta, start)

    # The central limit of sampled rounds (Bu, Dong, Long and Su 2020): a guess, not a guarantee.
    spread = math.log1p(mu**2 / (rate**2 * rounds))
    guess = scale * math.sqrt(squares / rounds / spread)
    if len(weights) > 64:
        guess = search(_sketch(weights), guess)
    return search(weights, guess)


def _of_one_client(weights: Groups, participation: Participation) -> tuple[Groups, Participation]:
    """Return the largest weights of one client's rounds: see `accounting.of_one_client`."""
    counted = count((Gaussian(1 / weight), times) for weight, times in weights)
    kept, always = of_one_client(counted, participation, "zero_out")
    noise = {1 / weight: weight for weight, _ in weights}
    return tuple((noise[e.noise_multiplier], n) for e, n in kept if isinstance(e, Gaussian)), always


def _sketch(weights: Groups) -> Groups:
    """Return weights rounded to 2 %, as a starting point."""
    sketch: Counter[float] = Counter()
    for weight, times in weights:
        sketch[1.02 ** round(math.log(weight, 1.02))] += times
    return tuple(sketch.items())


def calibrate_event(
    event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    *,
    weights: Sequence[float],
    participation: Participation,
    relation: Relation,
) -> float:
    """Return the largest x with which rounds of event(x * weight) meet (epsilon, delta).

    `event(x)` must be less private the larger x is, about in proportion, such as `Laplace`. At
    delta = 0 the epsilons of pure events are added; at a larger delta, composition may allow more.
    Raise ValueError as `calibrate` does.

    **Guarantee:** `profile` of the events with the returned x has an epsilon of at most the target
    and at least 0.999 of it; `tests/privacy/test_profiles_pure.py`.

    >>> plan = {"participation": Participation("everyone"), "relation": "zero_out"}
    >>> from coterie.privacy.events import Laplace
    >>> calibrate_event(Laplace, 1.0, 0.0, weights=[1.0, 3.0], **plan)
    0.25
    """
    groups = _check(event(1.0), epsilon, delta, weights, participation, relation)

    def spent(x: float) -> float:
        rounds = ((event(x * weight), times) for weight, times in groups)
        return profile_of(count(rounds), participation, relation).epsilon(delta)

    return _largest(spent, epsilon, epsilon / SCALE[relation] / math.fsum(w * n for w, n in groups))


def calibrate_wishart(
    epsilon: float,
    delta: float,
    *,
    degrees: int,
    weights: Sequence[float],
    participation: Participation,
    relation: Relation,
) -> float:
    """Return the largest r with which rounds of Wishart(degrees, r * weight) meet (epsilon, delta).

    Raise ValueError as `calibrate` does, and for delta 0 or the relation `replace`.

    **Guarantee:** `profile` of the events with the returned r has a delta at epsilon of at most
    the target and at least 0.999 of it; `tests/privacy/test_profiles_wishart.py`.

    >>> everyone = Participation("everyone")
    >>> plan = {"weights": [1.0], "participation": everyone, "relation": "zero_out"}
    >>> round(calibrate_wishart(1.0, 1e-5, degrees=100, **plan), 3)
    2.524
    """
    groups = _check(Wishart(degrees, 1.0), epsilon, delta, weights, participation, relation)

    def spent(r: float) -> float:
        rounds = ((Wishart(degrees, r * weight), times) for weight, times in groups)
        return profile_of(count(rounds), participation, relation).delta(epsilon)

    # As k grows, a release tends to Gaussian DP with mu = r / sqrt(2 k): a starting point.
    squares = sum(times * weight**2 for weight, times in groups)
    return _largest(spent, delta, gaussian_mu(epsilon, delta) * math.sqrt(2 * degrees / squares))


def _bracket(
    spent: Callable[[float], float], goal: float, start: float
) -> tuple[float, float, float, float]:
    """Return low < high with spent(low) <= goal < spent(high), and both values."""
    here, at = start, spent(start)
    up = at <= goal
    for _ in range(200):
        there = here * 2 if up else here / 2
        at_there = spent(there)
        if (at_there <= goal) != up:
            return (here, there, at, at_there) if up else (there, here, at_there, at)
        here, at = there, at_there
    raise RuntimeError(f"no noise found that spends {goal}: at {here} it is {at}")


def _largest(spent: Callable[[float], float], goal: float, start: float) -> float:
    """Return the largest x with spent(x) <= goal, to 0.999 of the goal, for an increasing `spent`.

    Regula falsi in log x and log spent (Illinois), which are nearly proportional.
    """
    for near in (start, start * (1 - 1e-12)):  # a closed form may be off by a rounding
        if 0.999 * goal <= spent(near) <= goal:
            return near
    low, high, at_low, at_high = _bracket(spent, goal, start)
    aim = math.log(0.9995 * goal)
    below, above = math.log(max(at_low, 1e-300)) - aim, math.log(at_high) - aim
    for turn in range(200):
        if at_low >= 0.999 * goal:
            return low
        share = 0.5 if turn % 4 == 3 or not math.isfinite(above) else -below / (above - below)
        share = min(max(share, 0.01), 0.99)
        middle = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        at = spent(middle)
        if at <= goal:
            low, at_low, below, above = middle, at, math.log(max(at, 1e-300)) - aim, above / 2
        else:
            high, above, below = middle, math.log(at) - aim, below / 2
    raise RuntimeError(f"no noise found that spends {goal}: at {low} it is {at_low}")


_LEAST = 1e-4
"""Smallest share of a round, relative to the largest."""


class Spending(ABC):
    """How a budget is spread over rounds."""

    kind: ClassVar[str] = ""
    by_method: ClassVar[bool] = False
    """Whether the method's theory chooses the shape, once the data's spec is known."""

    @abstractmethod
    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return the rounds' shares, the largest of which is 1."""

    def weights(self, rounds: int) -> tuple[float, ...]:
        """Return the rounds' weights; raise ValueError if the share of a round is negligible."""
        try:
            shares = self.shares(rounds)
        except OverflowError:
            shares = (0.0,)
        if not all(_LEAST <= share < float("inf") for share in shares):
            raise ValueError(
                f"{self} over {rounds} rounds: a round gets less than {_LEAST:g} of the largest "
                "share, so its release is only noise; choose a flatter spending, or fewer rounds"
            )
        return shares

    @classmethod
    def choices(cls) -> Mapping[str, type["Spending"]]:
        """Return the kinds of spending by name."""
        kinds: tuple[type[Spending], ...] = (Even, Power, Geometric, Theorem)
        return {kind.kind: kind for kind in kinds}


@dataclass(frozen=True)
class Even(Spending):
    """The same budget in every round."""

    kind: ClassVar[str] = "even"

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return ones."""
        return (1.0,) * rounds


@dataclass(frozen=True)
class Power(Spending):
    """eps_t proportional to t^alpha: 2/5 suits accelerated steps on convex losses."""

    kind: ClassVar[str] = "power"
    alpha: float = 0.4

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return t^alpha over the largest."""
        top = rounds if self.alpha > 0 else 1
        return tuple(float((t / top) ** self.alpha) for t in range(1, rounds + 1))


@dataclass(frozen=True)
class Geometric(Spending):
    """eps_t proportional to Q^-t: for strongly convex losses; Q below 1 spends more later.

    (1 - mu/L)^(2/5) suits plain steps, (1 - sqrt(mu/L))^(1/5) accelerated ones.
    """

    kind: ClassVar[str] = "geometric"
    Q: float = 0.97

    def __post_init__(self) -> None:
        if not 0 < self.Q < float("inf"):
            raise ValueError(f"Q = {self.Q}: expected a positive number, such as 0.97")

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return Q^-t over the largest."""
        top = rounds if self.Q < 1 else 1
        return tuple(float(self.Q ** (top - t)) for t in range(1, rounds + 1))


@dataclass(frozen=True)
class Theorem(Spending):
    """The shape that the method's theory recommends (`Rounds.spending`); a plan resolves it."""

    kind: ClassVar[str] = "theorem"
    by_method: ClassVar[bool] = True

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return ones until the plan is resolved."""
        return (1.0,) * rounds
