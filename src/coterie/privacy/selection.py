"""The cost of choosing settings by private runs, in two views that are kept apart.

K runs are made, each with settings drawn at random from a fixed list and a private score of its
own; the run with the best score is kept. K itself is random: it follows the truncated negative
binomial law with shape eta >= 0 and 0 < gamma < 1,

    P[K = k] = (1 - gamma)^k / (gamma^-eta - 1) prod_{l<k} (l + eta) / (l + 1),   k = 1, 2, ...

(eta = 1: geometric; eta -> 0: logarithmic). If one run, settings and score included, is (a, e(a))-
RDP for every order a > 1, then the best run is (a, e'(a))-RDP with

    e'(a) = e(a) + (1 + eta) min_b [(1 - 1/b) e(b) + log(1/gamma) / b] + log(E[K]) / (a - 1)

(Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022, Theorem
2), for an adversary who observes the best run and nothing else: neither another run, nor K. The
other clients take part in all runs and observe every release: for them all runs and scores compose.
K does not depend on data, so the composition of the K runs that were made is a valid bound.

A chosen run states its cost by `Charged`. Its releases are the best of several, so the epsilon of
its own events is not a guarantee. Every run of a selection carries the same `Charged`, since any of
them may be the one that is kept; it does not reveal K.

This module never imports torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

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
from coterie.privacy.guarantee import Guarantee, round_up, show_delta, state

Array = NDArray[np.float64]

THEOREM = "RDP bound (Papernot and Steinke 2022, Theorem 2)"
CHOSEN_ONLY = "an adversary who observes only the chosen run"
CHOSEN = f"{THEOREM}, for {CHOSEN_ONLY}"
ALL_RUNS = "other clients: all runs and scores together"
FOR_OTHERS = (
    "the other clients took part in all runs: their epsilon is in selection.json, and larger than "
    "that of these releases"
)
ORDERS: Array = np.unique(
    np.concatenate(
        [1 + np.geomspace(0.02, 1, 40), np.arange(2, 33, 0.25), np.geomspace(32, 2048, 120).round()]
    )
)
"""Renyi orders of all bounds; the smallest resulting epsilon counts."""
_SHARES = (0.5, 0.9, 0.99)
_TOLERANCE = 1e-9  # above the rounding of float sums


@dataclass(frozen=True)
class RunLaw:
    """The law of K, the number of runs: truncated negative binomial, by its mean.

    Args:
        mean: How many runs to expect, above 1.
        eta: Its shape: 1 is geometric, 0 logarithmic (mostly few runs, sometimes very many). A
            smaller one costs less for an adversary who observes only the chosen run.

    **Guarantee:** none by itself; K has to be drawn by `draw` before any run, and must stay secret.
    `tests/statistics/test_selection.py`.

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
                "for one run give its settings"
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
        """Return the probabilities of 1, 2, ..., `most` runs."""
        gamma, eta = self.gamma, self.eta
        steps = np.arange(1, most, dtype=np.float64)
        ratios = np.concatenate([[0.0], np.log1p(-gamma) + np.log((steps + eta) / (steps + 1))])
        first = eta / math.expm1(-eta * math.log(gamma)) if eta else -1 / math.log(gamma)
        return np.asarray(np.exp(np.cumsum(ratios)) * first * (1 - gamma))

    def quantile(self, share: float) -> int:
        """Return the least number of runs that K exceeds with probability at most 1 - share."""
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
    """Return bounds on the Renyi divergence, at `ORDERS`, of all these releases together.

    Raise ValueError if an event is not Gaussian noise on a sum.

    **Guarantee:** an upper bound on D_a(M(x) || M(x')) in both directions, for releases that may
    each depend on earlier ones. Exact where everyone takes part (a s^2 / (2 z^2)) and for visible
    cohorts (by conditioning on participation); under Poisson sampling that of the dominating pair,
    by quadrature. Hidden cohorts of a fixed size are treated as visible.
    `tests/privacy/test_selection.py`.
    """
    check_relation(relation)
    total = np.zeros_like(ORDERS)
    for event in set(events):
        event.check_sampling(participation)
        if participation.kind == "cyclic":
            raise ValueError(
                "a cyclic schedule: no Renyi bound of selection is offered for it; choose settings "
                "among runs with Poisson sampling, or with everybody in every round"
            )
        if event.in_shares or event.gaussian_noise(relation) is None:  # scores have central noise
            raise ValueError(
                f"{type(event).__name__} noise in a run: no Renyi bound of selection is offered "
                "for it; choose settings among runs with Gaussian noise that the server adds "
                "(noise = 'gaussian')"
            )
        total += events.count(event) * _renyi(event, participation, relation)
    return np.asarray(total * (1 + _TOLERANCE))


@lru_cache(maxsize=256)
def _renyi(event: Event, participation: Participation, relation: Relation) -> Array:
    rate, z = participation.rate, event.gaussian_noise("zero_out")
    assert z is not None
    scale = 1.0 if relation == "zero_out" else event.replaced
    seen = _log_mixed(ORDERS * (ORDERS - 1) * (scale / z) ** 2 / 2, rate) / (ORDERS - 1)
    if rate == 1 or participation.visible or participation.kind == "fixed":
        return np.asarray(seen)
    found = [sampled_log_moment(order, rate, z, relation) for order in ORDERS]
    return np.minimum(seen, np.array(found) / (ORDERS - 1))


def _log_mixed(moments: Array, rate: float) -> Array:
    """Return log(1 - rate + rate e^m): the log moment of a visible cohort."""
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
    """Return bounds on the Renyi divergence of the best run, from those of one run (Theorem 2).

    **Guarantee:** for runs that are independent given the data, with a total order on their
    outputs, and K drawn from `law` independently of the data, for an adversary who observes the
    best output and nothing else. `tests/privacy/test_selection.py`.
    """
    extra = float(np.min((1 - 1 / ORDERS) * one - math.log(law.gamma) / ORDERS))
    mean = law_mean(law.gamma, law.eta)
    return np.asarray(one + (1 + law.eta) * extra + math.log(mean) / (ORDERS - 1))


def renyi_to_epsilon(divergences: Array, delta: float) -> float:
    """Return epsilon at delta from Renyi bounds (Canonne, Kamath and Steinke 2020, Proposition 12).

    **Guarantee:** (epsilon, delta)-DP for any mechanism with these divergences at `ORDERS`;
    `tests/privacy/test_selection.py`.
    """
    check_delta(delta)
    found = divergences + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return max(0.0, float(np.min(found)))


@dataclass(frozen=True)
class Forecast:
    """Epsilon against other clients if K is at most `runs`, which has probability `share`."""

    share: float
    runs: int
    epsilon: float


@dataclass(frozen=True)
class Selection:
    """The guarantees of a selection among private runs, by adversary.

    `candidates` are the events of a run without its score, for each candidate setting; `score` is
    the event of one run's score; `law` is of the number of runs; `simulation` says that noise, K
    and settings come from a known seed. Raise ValueError if a run has no Renyi bound.

    **Guarantee:** `chosen_alone` for an adversary who observes the chosen run's settings, releases
    and score and nothing else (not K, no other run, not how long it took); `of_runs` for the other
    clients, who observe every run. Assumes that settings and K were drawn independently of data,
    that every run has noise of its own, and that the best is chosen by the noisy scores only.
    `tests/privacy/test_selection.py`, `tests/statistics/test_selection.py`.
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
            raise ValueError("there are no candidate settings: give values to try")
        check_delta(self.delta)
        self.one_run  # noqa: B018 (raises before anything is spent if there is no bound)

    @property
    def one_run(self) -> Array:
        """Renyi bounds of one run with its score, for any settings.

        Settings have the same law for neighbours and are released, so a run's moment is the mean
        of theirs over settings, and at most the largest.
        """
        return np.asarray(np.max([self._renyi(events) for events in self._kinds], axis=0))

    @property
    def chosen_alone(self) -> float:
        """Epsilon for an adversary who observes only the chosen run; known before the runs."""
        return renyi_to_epsilon(renyi_of_best(self.one_run, self.law), self.delta)

    def of_runs(self, drawn: Sequence[int]) -> Guarantee:
        """Return the guarantee against other clients who observe runs of these candidates."""
        runs = (self.candidates[number] for number in drawn)
        return Guarantee(
            events=tuple(event for events in runs for event in (*events, self.score)),
            participation=self.participation,
            relation=self.relation,
            delta=self.delta,
            clients=self.clients,
            simulation=self.simulation,
        )

    def forecast(self, shares: Sequence[float] = _SHARES) -> list[Forecast]:
        """Return epsilon against other clients for likely numbers of runs.

        As if every run had the most expensive settings; the drawn settings decide in the end.
        """
        worst = [(share, self.most_expensive(share)) for share in shares]
        return [Forecast(share, self.law.quantile(share), one.epsilon) for share, one in worst]

    def most_expensive(self, share: float) -> Guarantee:
        """Return the guarantee against other clients that this share of selections keeps."""
        runs = self.law.quantile(share)
        first = [self.candidates.index(events) for events in self._kinds]
        return max((self.of_runs([number] * runs) for number in first), key=lambda g: g.epsilon)

    @property
    def _kinds(self) -> list[tuple[Event, ...]]:
        return list(dict.fromkeys(self.candidates))

    def _renyi(self, events: tuple[Event, ...]) -> Array:
        return renyi((*events, self.score), self.participation, self.relation)

    def to_json(self, drawn: Sequence[int] = ()) -> dict[str, Any]:
        """Return both epsilons and everything that determines them, as strict JSON."""
        found: dict[str, Any] = {
            "relation": self.relation,
            "delta": self.delta,
            "clients": self.clients,
            **self.participation.to_json(),
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
                "bound": ALL_RUNS,
                "accountant": all_runs.profile.accountant,
            }
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Selection":
        """Return the selection of this JSON; epsilons are computed again, not read."""
        score = read_runs(data["score"])
        if len(score) != 1:
            raise ValueError(f"score = {data['score']!r}: expected one Gaussian event")
        return cls(
            candidates=tuple(read_runs(events) for events in data["candidates"]),
            score=_gaussian(score[0]),
            law=RunLaw(float(data["law"]["mean"]), float(data["law"]["eta"])),
            participation=Participation.from_json(data),
            relation=data["relation"],
            delta=float(data["delta"]),
            clients=int(data["clients"]),
            simulation=bool(data["simulation"]),
        )

    def statement(self, drawn: Sequence[int] = ()) -> str:
        """Return both views as text; before the runs, a forecast for the other clients."""
        at = f"at delta = {show_delta(self.delta)}"
        lines = [f"{CHOSEN}: epsilon = {round_up(self.chosen_alone)} {at}."]
        if drawn:
            epsilon = round_up(self.of_runs(drawn).epsilon)
            runs = "1 run" if len(drawn) == 1 else f"{len(drawn)} runs"
            lines.append(f"{ALL_RUNS} ({runs}): epsilon = {epsilon} {at}.")
        else:
            likely = ", ".join(
                f"{round_up(one.epsilon)} ({one.share:.0%}: at most {one.runs} runs)"
                for one in self.forecast()
            )
            lines.append(f"{ALL_RUNS}: epsilon {at} is at most {likely}.")
        if self.simulation:
            lines.insert(0, "SIMULATION: noise from a known seed, not a guarantee.")
        return "\n".join(lines)


def _gaussian(event: Event) -> Gaussian:
    if not isinstance(event, Gaussian):
        raise ValueError(f"{type(event).__name__} noise: selection supports only Gaussian noise")
    return event


Runs = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Charged:
    """How a run was chosen, as far as it is public; it does not reveal K.

    Attributes:
        runs: Mean of the number of runs; `eta` is the shape of its law.
        candidates: The events of a run, for each candidate: of equal neighbouring events their
            noise multiplier, `replaced`, and number.
    """

    runs: float
    eta: float
    score_noise: float
    score_replaced: float
    candidates: Runs

    @classmethod
    def of(cls, selection: Selection) -> "Charged":
        """Return the public part of a selection."""
        score = selection.score
        kinds = dict.fromkeys(selection.candidates)
        return cls(
            runs=selection.law.mean,
            eta=selection.law.eta,
            score_noise=score.noise_multiplier,
            score_replaced=score.replaced,
            candidates=tuple(_triples(events) for events in kinds),
        )

    def selection(self, run: Guarantee) -> Selection:
        """Return the selection in which a run was chosen; its epsilon is computed again.

        Raise ValueError if the run's own events are not among the candidates.

        **Guarantee:** as `Selection.chosen_alone`, if the run was made by a private selection;
        `tests/privacy/test_selection_charged.py`.
        """
        offered = tuple(_events(triples) for triples in self.candidates)
        if run.events not in offered:
            raise ValueError(
                f"a run of {len(run.events)} releases was chosen among {len(offered)} kinds of "
                "runs, and is none of them: restore its plan.toml and guarantee.json"
            )
        return Selection(
            candidates=offered,
            score=Gaussian(self.score_noise, self.score_replaced),
            law=RunLaw(self.runs, self.eta),
            participation=run.participation,
            relation=run.relation,
            delta=run.delta,
            clients=run.clients,
            simulation=run.simulation,
        )

    def to_json(self, run: Guarantee) -> dict[str, Any]:
        """Return the certificate's record of the choice: epsilon and what determines it."""
        made = self.selection(run)
        return {
            "epsilon_chosen_alone": made.chosen_alone,
            "delta": run.delta,
            "theorem": THEOREM,
            "view": CHOSEN_ONLY,
            "other_clients": FOR_OTHERS,
            "runs_mean": self.runs,
            "eta": self.eta,
            "score_event": list_runs([made.score])[0],
            "candidates": [list_runs(events) for events in made.candidates],
        }

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> "Charged":
        """Return what `to_json` wrote; epsilon is computed again, not read."""
        (event,) = read_runs([stated["score_event"]])
        score = _gaussian(event)
        return cls(
            runs=float(stated["runs_mean"]),
            eta=float(stated["eta"]),
            score_noise=score.noise_multiplier,
            score_replaced=score.replaced,
            candidates=tuple(_triples(read_runs(events)) for events in stated["candidates"]),
        )


def chosen_alone(run: Guarantee, stated: Mapping[str, Any] | None) -> float | None:
    """Return epsilon for an adversary who observes only a chosen run; None for other runs.

    `stated` is the field `selection` of the run's certificate, if it has one.
    """
    return None if stated is None else Charged.from_json(stated).selection(run).chosen_alone


def charged_statement(
    run: Guarantee, stated: Mapping[str, Any] | None, *, server: str | None = None
) -> str:
    """Return a run's guarantee as text, for an adversary who observes only it if it was chosen.

    `server` is what a central server observes, where it is not each clipped contribution.
    """
    epsilon = chosen_alone(run, stated)
    if epsilon is None:
        return "\n".join(state(run, server=server))
    adversary = (
        "Adversary: observes this run, which was chosen by private scores, and neither another "
        "run, nor selection.json, nor the number of runs. For others it does not hold: "
        f"{FOR_OTHERS} (epsilon = {round_up(run.epsilon)}, before the choice)."
    )
    accountant = (
        f"Accountant: {THEOREM}; of the releases before the choice: {run.profile.accountant}."
    )
    lines = state(run, epsilon=epsilon, adversary=adversary, accountant=accountant, server=server)
    return "\n".join(lines)


def charged_message(epsilon: float, delta: float) -> str:
    """Return the cost of a chosen run, as one line."""
    return (
        "CHARGED: settings were chosen among private runs by private scores: epsilon = "
        f"{round_up(epsilon)} at delta = {show_delta(delta)} for {CHOSEN_ONLY}, {THEOREM}; "
        f"{FOR_OTHERS}"
    )


def _triples(events: Sequence[Event]) -> tuple[tuple[float, ...], ...]:
    found = []
    for one, alike in groupby(events):
        event = _gaussian(one)
        found.append((event.noise_multiplier, event.replaced, float(len(list(alike)))))
    return tuple(found)


def _events(triples: tuple[tuple[float, ...], ...]) -> tuple[Gaussian, ...]:
    for triple in triples:
        if len(triple) != 3 or not 1 <= triple[2] <= 1e7 or triple[2] % 1:
            raise ValueError(
                f"candidates: {triple} was given; expected noise, replaced and how many rounds"
            )
    return tuple(Gaussian(z, far) for z, far, times in triples for _ in range(int(times)))
