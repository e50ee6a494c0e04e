"""Events in, epsilon out: what a plan of noisy releases costs each client.

The unit is one client, with its whole data and state. Two relations between neighbours are kept
apart: `zero_out` (the client's contributions become zero) and `replace` (they become any others,
which doubles the sensitivity of a clipped sum). Only plans with a proved account are accepted; all
numbers are upper bounds. This module never imports torch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from coterie.privacy.events import (
    Event,
    Gaussian,
    NonPrivate,
    Participation,
    Relation,
    check_delta,
    check_relation,
    default_delta,
)
from coterie.privacy.losses import loss_profile
from coterie.privacy.profiles import (
    Array,
    GaussianProfile,
    Groups,
    Profile,
    gaussian_mu,
    mixture_profile,
    smallest_noise,
)
from coterie.privacy.words import UNIT, state, view_of

__all__ = [
    "Event",
    "Gaussian",
    "Guarantee",
    "NonPrivate",
    "Participation",
    "Profile",
    "Relation",
    "calibrate",
    "coalition_profile",
    "default_delta",
    "epsilon_by_round",
    "profile",
]

_SCALE: dict[Relation, float] = {"zero_out": 1.0, "replace": 2.0}


def profile(events: Sequence[Event], participation: Participation, relation: Relation) -> Profile:
    """Account for a plan as the other clients see it: every release, and cohorts only if visible.

    Raises:
        ValueError: If no account is proved for this combination, or the relation is unknown.

    **Guarantee:** an upper bound on delta(epsilon) of all releases together, each of which may
    depend on earlier ones; exact where the cohort is everyone. Cohorts must be independent of the
    data and of each other. `tests/accounting/test_laws.py`, `tests/accounting/test_tables.py`.

    >>> plan = [Gaussian(10.0)] * 1000
    >>> round(profile(plan, Participation("everyone"), "zero_out").epsilon(1e-5), 2)
    17.86
    """
    check_relation(relation)
    return _profile(_group(events), participation, relation)


def coalition_profile(
    events: Sequence[Event], participation: Participation, relation: Relation
) -> Profile:
    """Account for a plan as all other clients together see it.

    With cohorts of a fixed size they know from their own invitations when the client was drawn, so
    hiding the cohort is void against them. With Poisson sampling they know nothing more.

    **Guarantee:** as `profile`, against every coalition of other clients.
    """
    if participation.kind == "fixed":
        participation = Participation("fixed", participation.rate, visible=True)
    return profile(events, participation, relation)


def epsilon_by_round(
    events: Sequence[Event],
    participation: Participation,
    relation: Relation,
    delta: float,
    rounds: Sequence[int],
) -> list[float]:
    """Bound epsilon after the first r rounds, for each r, for showing progress.

    **Guarantee:** as `profile`. The rounds must be planned: stopping at a round chosen by looking
    at private data is not covered by that round's number.
    """
    check_delta(delta)
    if not all(0 <= r <= len(events) for r in rounds):
        raise ValueError(f"rounds = {list(rounds)}: expected numbers from 0 to {len(events)}")
    return [profile(events[:r], participation, relation).epsilon(delta) for r in rounds]


def calibrate(
    epsilon: float,
    delta: float,
    *,
    weights: Sequence[float],
    participation: Participation,
    relation: Relation,
) -> float:
    """Find the smallest z with which rounds of Gaussian(z / weight) meet (epsilon, delta).

    A weight multiplies its round's share of mu: all 1 spends evenly.

    Raises:
        ValueError: If the target, a weight or the relation makes no sense, or no account is proved.

    **Guarantee:** `profile` of the events with the returned z has an epsilon of at most the target
    and at least 0.9995 of it; `tests/accounting/test_laws.py`.

    >>> everyone = Participation("everyone")
    >>> z = calibrate(1.0, 1e-5, weights=[1.0], participation=everyone, relation="zero_out")
    >>> round(z, 3)
    3.731
    """
    check_relation(relation)
    check_delta(delta)
    if not 0 < epsilon <= 1e4:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number of at most 10,000, which protects "
            "nobody already; for no noise at all, run with epsilon inf"
        )
    if len(weights) == 0 or not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(
            f"weights = {list(weights)[:5]}...: expected one positive finite number a round; "
            "leave a round out rather than give it no weight"
        )
    counts = Counter(float(weight) for weight in weights)
    return _calibrate(epsilon, delta, tuple(sorted(counts.items())), participation, relation)


@lru_cache(maxsize=64)
def _calibrate(
    epsilon: float, delta: float, weights: Groups, participation: Participation, relation: Relation
) -> float:
    rate, rounds = participation.rate, sum(count for _, count in weights)
    squares = sum(count * weight**2 for weight, count in weights)
    mu = gaussian_mu(epsilon, delta)
    if rate == 1:
        # Closed form; the margin lies above its rounding and far below what anyone could notice.
        return _SCALE[relation] * math.sqrt(squares) / mu * (1 + 1e-8)
    if -math.expm1(rounds * math.log1p(-rate)) <= delta:
        raise ValueError(
            f"delta = {delta}: a client takes part at all with no larger probability, so no noise "
            "would be needed; expected a smaller delta"
        )

    def search(weights: Groups, start: float) -> float:
        def profile_of(z: float) -> Profile:
            return _profile(_divide(z, weights), participation, relation)

        return smallest_noise(profile_of, epsilon, delta, start)

    # The central limit of sampled rounds (Bu, Dong, Long and Su 2020): a guess, not a guarantee.
    spread = math.log1p(mu**2 / (rate**2 * rounds))
    guess = _SCALE[relation] * math.sqrt(squares / rounds / spread)
    if len(weights) > 64:
        sketch: Counter[float] = Counter()
        for weight, count in weights:
            sketch[1.02 ** round(math.log(weight, 1.02))] += count
        guess = search(tuple(sketch.items()), guess)
    return search(weights, guess)


def _check_covered(groups: Groups | None, participation: Participation, relation: Relation) -> None:
    hidden = participation.kind == "fixed" and participation.rate < 1 and not participation.visible
    if groups and hidden and relation == "zero_out":
        raise ValueError(
            "relation = 'zero_out' with a hidden cohort of fixed size: no amplification is proved "
            "for it, since the cohort's other members depend on whether the client is in; use "
            "relation 'replace', or Poisson sampling, or declare the cohort visible"
        )


def _group(events: Sequence[Event]) -> Groups | None:
    """Count rounds by noise multiplier; None if anything is released without noise."""
    counts: Counter[float] = Counter()
    for event in events:
        if isinstance(event, NonPrivate):
            return None
        counts[float(event.noise_multiplier)] += 1
    return tuple(sorted(counts.items()))


def _divide(z: float, weights: Groups) -> Groups:
    """Count rounds by noise multiplier z / weight, exactly as `_group` counts their events."""
    counts: Counter[float] = Counter()
    for weight, count in weights:
        counts[z / weight] += count
    return tuple(sorted(counts.items()))


@lru_cache(maxsize=16)
def _profile(groups: Groups | None, participation: Participation, relation: Relation) -> Profile:
    _check_covered(groups, participation, relation)
    scale, rate = _SCALE[relation], participation.rate
    if groups is None:
        return GaussianProfile(math.inf, "none: something is released without noise")
    if not groups:
        return GaussianProfile(0.0, "none needed: nothing is released")
    if rate == 1:
        return GaussianProfile(scale * math.sqrt(sum(count / z / z for z, count in groups)))
    if participation.visible:
        return mixture_profile(groups, rate, scale)
    if participation.kind == "poisson":
        return loss_profile(groups, ("remove", "add") if scale == 1 else ("replace",), rate)
    return loss_profile(groups, ("fixed",), rate)


@dataclass(frozen=True)
class Guarantee:
    """What a plan guarantees to each client, and what it does not.

    Args:
        events: What is released, in order.
        participation: Who takes part in each round.
        relation: What neighbours are.
        delta: What may be added to the probability of any event, beside the factor e^epsilon.
        clients: How many clients there are.
        simulation: Whether the noise comes from a known seed: then nothing is guaranteed.
        assumed: What was taken for public knowledge without being declared so, in words.

    Raises:
        ValueError: If the plan has no proved account.

    **Guarantee:** everything released together is (epsilon, delta)-DP in each client, and so are
    jointly the personal models of all other clients, as functions of the releases and of their own
    data (billboard lemma; Hsu, Huang, Roth, Roughgarden and Wu 2016), with the epsilon that `views`
    gives for the other clients. Assumes a server that adds the noise and tells nobody.
    `tests/accounting/test_laws.py`.
    """

    events: tuple[Event, ...]
    participation: Participation
    relation: Relation
    delta: float
    clients: int
    simulation: bool = False
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        check_relation(self.relation)
        check_delta(self.delta)
        if self.clients < 1:
            raise ValueError(f"clients = {self.clients}: expected at least 1")
        _check_covered(_group(self.events), self.participation, self.relation)

    @property
    def profile(self) -> Profile:
        """The whole profile, in the view of `epsilon`."""
        return profile(self.events, self.participation, self.relation)

    @property
    def epsilon(self) -> float:
        """Epsilon at this guarantee's delta.

        For the other clients, or, under a hidden cohort of fixed size, an outsider: see `views`.
        """
        return self.epsilon_at(self.delta)

    @property
    def views(self) -> dict[str, float]:
        """Epsilon by who looks; the server sees bounded contributions before noise.

        Under a hidden cohort of fixed size clients know from their invitations who was drawn: for
        them holds the number of the coalition, and `epsilon` for an outsider alone.
        """
        views = {"other_clients": self.epsilon, "server": math.inf if self.events else 0.0}
        if self.participation.kind == "fixed":
            coalition = coalition_profile(self.events, self.participation, self.relation)
            together = coalition.epsilon(self.delta)
            views |= {"outsider": self.epsilon, "coalition_of_all_others": together}
            views["other_clients"] = together
        return views

    def delta_at(self, epsilon: float) -> float:
        """Bound delta at another epsilon."""
        if not epsilon >= 0:
            raise ValueError(f"epsilon = {epsilon}: expected a number that is not negative")
        return self.profile.delta(epsilon)

    def epsilon_at(self, delta: float) -> float:
        """Bound epsilon at another delta."""
        check_delta(delta)
        return self.profile.epsilon(delta)

    def trade_off(self, alphas: Sequence[float]) -> Array:
        """Bound from below the misses of any test of a client's presence with false alarms alpha.

        f(alpha) = sup over epsilon of 1 - delta - e^epsilon alpha and e^-epsilon (1 - delta -
        alpha), where delta = delta(epsilon) (Wasserman and Zhou 2010; Dong, Roth and Su 2022). The
        supremum runs over a grid, which can only understate f.
        """
        alpha = np.asarray(alphas, dtype=np.float64)
        if not np.all((alpha >= 0) & (alpha <= 1)):
            raise ValueError(f"alphas = {alphas}: expected numbers from 0 to 1")
        best = np.zeros_like(alpha)
        largest = self.epsilon_at(1e-10)
        if largest == math.inf:
            return best
        for epsilon in np.linspace(0.0, min(largest, 700.0), 1000):
            rest = 1 - self.delta_at(epsilon)
            best = np.maximum(best, rest - np.exp(epsilon) * alpha)
            best = np.maximum(best, np.exp(-epsilon) * (rest - alpha))
        return best

    def statement(self) -> str:
        """State the guarantee in plain words."""
        return state(self)

    def to_json(self) -> dict[str, Any]:
        """Give the guarantee as strict JSON; an infinite epsilon is the string "inf"."""
        who = self.participation
        noise = [getattr(event, "noise_multiplier", 0.0) for event in self.events]
        return {
            "unit": UNIT,
            "relation": self.relation,
            "view": view_of(self),
            "views": {view: _plain(epsilon) for view, epsilon in self.views.items()},
            "sampling": who.kind,
            "rate": who.rate,
            "cohort": "visible" if who.visible else "hidden",
            "clients": self.clients,
            "rounds": len(self.events),
            "delta": self.delta,
            "epsilon": _plain(self.epsilon),
            "noise_multipliers": [[z, len(list(run))] for z, run in itertools.groupby(noise)],
            "accountant": self.profile.accountant,
            "versions": {name: _version(name) for name in ("coterie", "dp-accounting", "scipy")},
            "simulation": self.simulation,
            "assumed_public": list(self.assumed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Guarantee":
        """Rebuild a guarantee; epsilon is computed anew, not believed."""
        return cls(
            events=tuple(
                Gaussian(float(z)) if z else NonPrivate()
                for z, count in data["noise_multipliers"]
                for _ in range(int(count))
            ),
            participation=Participation(
                data["sampling"], float(data["rate"]), data["cohort"] == "visible"
            ),
            relation=data["relation"],
            delta=float(data["delta"]),
            clients=int(data["clients"]),
            simulation=bool(data["simulation"]),
            assumed=tuple(data.get("assumed_public", ())),
        )


def _plain(epsilon: float) -> float | str:
    return "inf" if epsilon == math.inf else epsilon


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
