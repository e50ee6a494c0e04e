"""What choosing settings by private runs costs, in two views that are kept apart.

K runs are made, each with settings drawn at random from a fixed list and a private score of its
own; the run with the best score is kept. K itself is random: it follows the truncated negative
binomial law with shape eta >= 0 and 0 < gamma < 1,

    P[K = k] = (1 - gamma)^k / (gamma^-eta - 1) prod_{l<k} (l + eta) / (l + 1),   k = 1, 2, ...

(eta = 1: geometric; eta -> 0: logarithmic). If one run, settings and score included, is (a, e(a))-
RDP for every order a > 1, then the best run alone is (a, e'(a))-RDP with

    e'(a) = e(a) + (1 + eta) min_b [(1 - 1/b) e(b) + log(1/gamma) / b] + log(E[K]) / (a - 1)

(Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022, Theorem
2). This holds for whoever sees the best run and nothing else: neither another run, nor K. The other
clients took part in all runs and saw every post: for them all runs and scores compose. K does not
depend on data, so the composition of the K runs that were made is a true bound.

This module never imports torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from coterie.privacy.accounting import Guarantee
from coterie.privacy.entropy import Entropy, uniforms
from coterie.privacy.events import (
    Event,
    Gaussian,
    Participation,
    Relation,
    check_delta,
    check_relation,
    list_runs,
    read_runs,
)
from coterie.privacy.words import round_up

Array = NDArray[np.float64]

CHOSEN = "RDP bound (Papernot and Steinke 2022, Theorem 2), for whoever sees the chosen run alone"
OTHERS = "other clients: all runs and scores together"
ORDERS: Array = np.unique(
    np.concatenate(
        [1 + np.geomspace(0.02, 1, 40), np.arange(2, 33, 0.25), np.geomspace(32, 2048, 120).round()]
    )
)
"""Renyi orders at which bounds are kept; the best of them is taken."""
_SHARES = (0.5, 0.9, 0.99)
_ROOM = 1e-9  # above what sums of floats lose


@dataclass(frozen=True)
class RunLaw:
    """The law of K, the number of runs: truncated negative binomial, by its mean.

    Args:
        mean: How many runs to expect, above 1.
        eta: Its shape: 1 is geometric, 0 logarithmic (many selections make few runs, some very
            many). A smaller one costs less in the view of the chosen run alone.

    **Guarantee:** none by itself; K has to be drawn by `draw` before any run, and nobody outside
    may learn it. `tests/statistics/test_selection.py`.

    >>> law = RunLaw(10.0)
    >>> round(law.gamma, 6), law.quantile(0.5), law.quantile(0.99)
    (0.1, 7, 44)
    """

    mean: float
    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 1 < self.mean <= 1000:
            raise ValueError(
                f"runs = {self.mean}: expected the mean number of runs, above 1 and at most 1000; "
                "for one run give its settings, there is nothing to choose"
            )
        if not 0 <= self.eta <= 100:
            raise ValueError(
                f"eta = {self.eta}: expected a number from 0 (logarithmic) to 100; 1 is geometric"
            )

    @property
    def gamma(self) -> float:
        """The parameter of this shape at which K has this mean."""
        return _gamma(self.mean, self.eta)

    def probabilities(self, most: int) -> Array:
        """Return the probabilities of 1, 2, ... so many runs."""
        gamma, eta = self.gamma, self.eta
        steps = np.arange(1, most, dtype=np.float64)
        ratios = np.concatenate([[0.0], np.log1p(-gamma) + np.log((steps + eta) / (steps + 1))])
        first = eta / math.expm1(-eta * math.log(gamma)) if eta else -1 / math.log(gamma)
        return np.asarray(np.exp(np.cumsum(ratios)) * first * (1 - gamma))

    def quantile(self, share: float) -> int:
        """Return the least number of runs that K exceeds with probability at most 1 - share.

        Raises:
            ValueError: If the share is not a probability below 1.
        """
        if not 0 <= share < 1:
            raise ValueError(f"share = {share}: expected a probability from 0 to below 1")
        most = 64
        while most < 1 << 26:
            below = np.cumsum(self.probabilities(most))
            if below[-1] > share:
                return int(np.searchsorted(below, share, side="right")) + 1
            most *= 4
        raise ValueError(f"share = {share}: so near 1 that K is beyond {most} runs")

    def draw(self, entropy: Entropy) -> int:
        """Draw K."""
        return self.quantile(float(uniforms(entropy, 1)[0]) * (1 - 1e-12))


def law_mean(gamma: float, eta: float) -> float:
    """Return the mean of the truncated negative binomial law.

    >>> law_mean(0.1, 1.0)
    10.0
    """
    if eta == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 / gamma - 1) / -math.expm1(eta * math.log(gamma))


@lru_cache(maxsize=64)
def _gamma(mean: float, eta: float) -> float:
    # The mean falls from infinity to 1 as gamma goes from 0 to 1.
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if law_mean(middle, eta) > mean else (low, middle)
    return high


def renyi(events: Sequence[Event], participation: Participation, relation: Relation) -> Array:
    """Bound the Renyi divergence, at `ORDERS`, of all these releases together.

    Raises:
        ValueError: If an event is not Gaussian noise on a sum.

    **Guarantee:** an upper bound on D_a(M(x) || M(x')) in both directions, for releases that may
    each depend on earlier ones. Exact where everyone takes part (a s^2 / (2 z^2)) and for visible
    cohorts (by the coin that is seen); under Poisson sampling that of the dominating pair, by
    quadrature. Hidden cohorts of a fixed size are taken for visible.
    `tests/accounting/test_selection.py`.
    """
    check_relation(relation)
    total = np.zeros_like(ORDERS)
    for event in set(events):
        if not isinstance(event, Gaussian):
            raise ValueError(
                f"{type(event).__name__} noise in a run: no Renyi bound of selection is offered "
                "for it; choose settings among runs with Gaussian noise that the server adds "
                "(noise = 'gaussian')"
            )
        total += events.count(event) * _renyi(event, participation, relation)
    return np.asarray(total * (1 + _ROOM))


@lru_cache(maxsize=256)
def _renyi(event: Gaussian, participation: Participation, relation: Relation) -> Array:
    rate, z = participation.rate, event.noise_multiplier
    scale = 1.0 if relation == "zero_out" else event.replaced
    seen = _log_mixed(ORDERS * (ORDERS - 1) * (scale / z) ** 2 / 2, rate) / (ORDERS - 1)
    if rate == 1 or participation.visible or participation.kind == "fixed":
        return np.asarray(seen)
    found = [sampled_log_moment(order, rate, z, relation) for order in ORDERS]
    return np.minimum(seen, np.array(found) / (ORDERS - 1))


def _log_mixed(moments: Array, rate: float) -> Array:
    """Return log(1 - rate + rate e^m): the log moment where a coin is seen."""
    if rate == 1:
        return moments
    return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + moments))


def sampled_log_moment(order: float, rate: float, z: float, relation: Relation) -> float:
    """Return log E_Q[(P/Q)^a] of a sampled contribution, by the trapezoidal rule.

    P = (1 - q) N(0, z^2) + q N(1, z^2), and Q = N(0, z^2), the worst direction of `zero_out`
    (Mironov, Talwar and Zhang 2019); or Q = (1 - q) N(0, z^2) + q N(-1, z^2) under `replace`. Where
    P^a Q^(1-a) is not small, x lies between -1 and 2 a, give or take deviations of the noise; it is
    analytic within pi z^2 of the real line, so that the rule errs by less than 1e-15 of it.
    """
    step, low, high = min(z / 16, z * z / 4), -1 - 12 * z, 2 * order + 12 * z
    if high - low > 400_000 * step:
        return math.inf
    x = np.arange(low, high, step)
    stay, density = math.log1p(-rate), -x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    terms = density + order * np.logaddexp(stay, math.log(rate) + (2 * x - 1) / (2 * z * z))
    if relation == "replace":
        back = math.log(rate) - (2 * x + 1) / (2 * z * z)
        terms += (1 - order) * np.logaddexp(stay, back)
    return max(0.0, float(logsumexp(terms)) + math.log(step) + 1e-11)


def renyi_of_best(one: Array, law: RunLaw) -> Array:
    """Bound the Renyi divergence of the best run alone, from that of one run (Theorem 2).

    **Guarantee:** for runs that are independent given the data, with a total order on their
    outputs, and K drawn from `law` whatever the data, for whoever sees the best output and nothing
    else. `tests/accounting/test_selection.py` compares with exact divergences.
    """
    extra = float(np.min((1 - 1 / ORDERS) * one - math.log(law.gamma) / ORDERS))
    mean = law_mean(law.gamma, law.eta)
    return np.asarray(one + (1 + law.eta) * extra + math.log(mean) / (ORDERS - 1))


def renyi_to_epsilon(divergences: Array, delta: float) -> float:
    """Turn Renyi bounds into epsilon at delta (Canonne, Kamath and Steinke 2020, Proposition 12).

    **Guarantee:** (epsilon, delta)-DP for any mechanism with these divergences at `ORDERS`;
    `tests/accounting/test_selection.py`.
    """
    check_delta(delta)
    found = divergences + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return max(0.0, float(np.min(found)))


@dataclass(frozen=True)
class Foreseen:
    """What other clients may come to know: K is at most `runs` with probability `share`."""

    share: float
    runs: int
    epsilon: float


@dataclass(frozen=True)
class Selection:
    """What a selection among private runs guarantees, and to whom.

    Args:
        candidates: What a run posts, by settings on offer: its events, the score left out.
        score: The event of one run's score.
        law: Of the number of runs.
        participation: Who takes part in every round, and in a score.
        relation: What neighbours are.
        delta: At which epsilons are stated.
        clients: How many clients there are.
        simulation: Whether noise, K and settings come from a known seed.

    Raises:
        ValueError: If nothing is on offer, or a run has no Renyi bound.

    **Guarantee:** `chosen_alone` for whoever sees the chosen run's settings, posts and score and
    nothing else (not K, no other run, not how long it took); `of_runs` for the other clients, who
    see every run. Assumes that settings and K were drawn independently of data, that every run has
    noise of its own, and that the best is chosen by the noisy scores alone.
    `tests/accounting/test_selection.py`, `tests/statistics/test_selection.py`.
    """

    candidates: tuple[tuple[Event, ...], ...]
    score: Gaussian
    law: RunLaw
    participation: Participation
    relation: Relation
    delta: float
    clients: int
    simulation: bool = False

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("no settings are on offer: give values to try")
        check_delta(self.delta)
        self.one_run  # noqa: B018 (refuses what has no bound before anything is spent)

    @property
    def one_run(self) -> Array:
        """Renyi bounds of one run with its score, whatever settings it draws.

        Settings are drawn alike for neighbours and shown, so a run's moment is the mean over
        settings of theirs, and at most the largest.
        """
        return np.asarray(np.max([self._renyi(events) for events in self._kinds], axis=0))

    @property
    def chosen_alone(self) -> float:
        """Epsilon for whoever sees the chosen run alone; known before anything is spent."""
        return renyi_to_epsilon(renyi_of_best(self.one_run, self.law), self.delta)

    def of_runs(self, drawn: Sequence[int]) -> Guarantee:
        """State what other clients are guaranteed who saw these runs, by their candidates."""
        runs = (self.candidates[number] for number in drawn)
        return Guarantee(
            events=tuple(event for events in runs for event in (*events, self.score)),
            participation=self.participation,
            relation=self.relation,
            delta=self.delta,
            clients=self.clients,
            simulation=self.simulation,
        ).for_others

    def foresee(self, shares: Sequence[float] = _SHARES) -> list[Foreseen]:
        """Say what other clients may come to know, by how many runs there may be.

        As if every run had the settings that cost most; what was drawn decides in the end.
        """
        first = [self.candidates.index(events) for events in self._kinds]
        found = []
        for share in shares:
            runs = self.law.quantile(share)
            epsilon = max(self.of_runs([number] * runs).epsilon for number in first)
            found.append(Foreseen(share, runs, epsilon))
        return found

    @property
    def _kinds(self) -> list[tuple[Event, ...]]:
        return list(dict.fromkeys(self.candidates))

    def _renyi(self, events: tuple[Event, ...]) -> Array:
        return renyi((*events, self.score), self.participation, self.relation)

    def to_json(self, drawn: Sequence[int] = ()) -> dict[str, Any]:
        """Return all that both epsilons follow from, and them, as strict JSON."""
        who = self.participation
        found: dict[str, Any] = {
            "relation": self.relation,
            "delta": self.delta,
            "clients": self.clients,
            "sampling": who.kind,
            "rate": who.rate,
            "cohort": "visible" if who.visible else "hidden",
            "simulation": self.simulation,
            "law": {"mean": self.law.mean, "eta": self.law.eta, "gamma": self.law.gamma},
            "score": list_runs([self.score]),
            "candidates": [list_runs(events) for events in self.candidates],
            "epsilon_chosen_alone": {"epsilon": self.chosen_alone, "bound": CHOSEN},
        }
        if drawn:
            all_runs = self.of_runs(drawn)
            found["drawn"] = list(drawn)
            found["epsilon_other_clients"] = {
                "epsilon": all_runs.epsilon,
                "bound": OTHERS,
                "accountant": all_runs.profile.accountant,
            }
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Selection":
        """Rebuild it; epsilons are computed anew, not believed."""
        score = read_runs(data["score"])
        if len(score) != 1 or not isinstance(score[0], Gaussian):
            raise ValueError(f"score = {data['score']!r}: expected one Gaussian event")
        visible = data["cohort"] == "visible"
        return cls(
            candidates=tuple(read_runs(events) for events in data["candidates"]),
            score=score[0],
            law=RunLaw(float(data["law"]["mean"]), float(data["law"]["eta"])),
            participation=Participation(data["sampling"], float(data["rate"]), visible),
            relation=data["relation"],
            delta=float(data["delta"]),
            clients=int(data["clients"]),
            simulation=bool(data["simulation"]),
        )

    def statement(self, drawn: Sequence[int] = ()) -> str:
        """State both views in plain words; before the runs, what may come of them."""
        at = f"at delta = {self.delta:.3g}"
        lines = [f"{CHOSEN}: epsilon = {round_up(self.chosen_alone)} {at}."]
        if drawn:
            epsilon = round_up(self.of_runs(drawn).epsilon)
            runs = "1 run" if len(drawn) == 1 else f"{len(drawn)} runs"
            lines.append(f"{OTHERS} ({runs}): epsilon = {epsilon} {at}.")
        else:
            told = ", ".join(
                f"{round_up(one.epsilon)} ({one.share:.0%}: at most {one.runs} runs)"
                for one in self.foresee()
            )
            lines.append(f"{OTHERS}: epsilon {at} is at most {told}.")
        if self.simulation:
            lines.insert(0, "SIMULATION: noise from a known seed, not a guarantee.")
        return "\n".join(lines)
