"""Events in, epsilon out: what a plan of noisy releases costs each client.

The unit is one client, with its whole data and state. Two relations between neighbours are kept
apart: `zero_out` (the client's contributions become zero) and `replace` (they become any others,
which doubles the sensitivity of a clipped sum). Only plans with a proved account are accepted; all
numbers are upper bounds. This module never imports torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

from coterie.privacy.calibration import calibrate, calibrate_laplace, calibrate_wishart
from coterie.privacy.composed import check_covered, count
from coterie.privacy.composed import profile_of as _profile
from coterie.privacy.events import (
    Event,
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    Relation,
    Wishart,
    check_delta,
    check_relation,
    default_delta,
    list_runs,
    read_runs,
)
from coterie.privacy.profiles import Array, Profile
from coterie.privacy.tradeoff import trade_off
from coterie.privacy.views import (
    check_honest,
    epsilon_by_view,
    is_local,
    per_participation,
    reasons,
)
from coterie.privacy.words import UNIT, state, view_of

__all__ = [
    "Event",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "LocalGaussian",
    "NonPrivate",
    "Participation",
    "Profile",
    "Relation",
    "Wishart",
    "calibrate",
    "calibrate_laplace",
    "calibrate_wishart",
    "coalition_profile",
    "default_delta",
    "epsilon_by_round",
    "profile",
]


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
    return _profile(count(events), participation, relation)


def coalition_profile(
    events: Sequence[Event], participation: Participation, relation: Relation
) -> Profile:
    """Account for a plan as all other clients together see it.

    With cohorts of a fixed size they know from their own invitations when the client was drawn, so
    hiding the cohort is void against them. With Poisson sampling they know nothing more. Where
    clients add the noise themselves, `profile` is theirs already.

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
    check_delta(delta, events)
    if not all(0 <= r <= len(events) for r in rounds):
        raise ValueError(f"rounds = {list(rounds)}: expected numbers from 0 to {len(events)}")
    return [profile(events[:r], participation, relation).epsilon(delta) for r in rounds]


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
    gives for the other clients. Assumes a server that adds the noise and tells nobody; under local
    noise it assumes nothing of the server, and covers what the server sees.
    `tests/accounting/test_laws.py`, `tests/accounting/test_local.py`.
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
        check_delta(self.delta, self.events)
        if self.clients < 1:
            raise ValueError(f"clients = {self.clients}: expected at least 1")
        check_covered(count(self.events), self.participation, self.relation)
        for event in set(self.events):
            if isinstance(event, LocalGaussian):
                check_honest(event.honest, self.participation, self.clients)

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
        """Epsilon by who looks: see `coterie.privacy.views`.

        Under a hidden cohort of fixed size clients know from their invitations who was drawn: for
        them holds the number of the coalition, and `epsilon` for an outsider alone. Under local
        noise `epsilon` is that of the server and of the other clients alike.
        """
        coalition = coalition_profile(self.events, self.participation, self.relation)
        return epsilon_by_view(self, coalition)

    @property
    def per_participation(self) -> float | None:
        """Epsilon of one message, under local noise; None where no client adds noise."""
        return per_participation(self)

    @property
    def for_others(self) -> "Guarantee":
        """The same in the view of the other clients, whose invitations tell them who was drawn.

        Differs under a hidden cohort of fixed size alone, where `epsilon` is an outsider's.
        """
        who = self.participation
        if who.kind != "fixed" or who.visible:
            return self
        return replace(self, participation=who.shown)

    @property
    def claimed_alone(self) -> "Guarantee":
        """The releases for which a paper prints an epsilon, and no others."""
        return replace(self, events=tuple(e for e in self.events if _claim(e) is not None))

    @property
    def claimed_epsilon(self) -> float | None:
        """The epsilons that papers print for releases of this plan, added up; None without any."""
        claims = [claim for event in self.events if (claim := _claim(event)) is not None]
        return math.fsum(claims) if claims else None

    def delta_at(self, epsilon: float) -> float:
        """Bound delta at another epsilon."""
        if not epsilon >= 0:
            raise ValueError(f"epsilon = {epsilon}: expected a number that is not negative")
        return self.profile.delta(epsilon)

    def epsilon_at(self, delta: float) -> float:
        """Bound epsilon at another delta."""
        check_delta(delta, self.events)
        return self.profile.epsilon(delta)

    def trade_off(self, alphas: Sequence[float]) -> Array:
        """Bound from below the misses of any test of a client's presence with false alarms alpha.

        See `coterie.privacy.tradeoff`.
        """
        return trade_off(self.profile, alphas)

    def detection(self, alphas: Sequence[float]) -> Array:
        """Bound what an attacker can do: the rate of true alarms at rates alpha of false ones.

        In the view of `epsilon`; `for_others` is that of the other clients.
        """
        return 1 - self.trade_off(alphas)

    def statement(self) -> str:
        """State the guarantee in plain words."""
        return state(self)

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as strict JSON; an infinite epsilon is the string "inf"."""
        who = self.participation
        found: dict[str, Any] = {
            "unit": UNIT,
            "relation": self.relation,
            "view": view_of(self),
            "views": {view: _plain(epsilon) for view, epsilon in self.views.items()},
            "reasons": reasons(self),
            "sampling": who.kind,
            "rate": who.rate,
            "cohort": "visible" if who.visible else "hidden",
            # Whoever adds noise to its own message is seen to send one.
            "participation_seen": who.visible or is_local(self),
            "clients": self.clients,
            "rounds": len(self.events),
            "delta": self.delta,
            "epsilon": _plain(self.epsilon),
            "events": list_runs(self.events),
            "accountant": self.profile.accountant,
            "versions": {name: _version(name) for name in ("coterie", "dp-accounting", "scipy")},
            "simulation": self.simulation,
            "assumed_public": list(self.assumed),
        }
        if all(isinstance(event, Gaussian | NonPrivate) for event in self.events):
            noise = [getattr(event, "noise_multiplier", 0.0) for event in self.events]
            found["noise_multipliers"] = [[z, len(list(run))] for z, run in groupby(noise)]
        if self.per_participation is not None:
            found["epsilon_per_participation"] = self.per_participation
        claimed = self.claimed_epsilon
        if claimed is not None:
            found["claimed_epsilon"] = claimed
            found["true_delta_at_claimed"] = self.claimed_alone.delta_at(claimed)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Guarantee":
        """Rebuild a guarantee; epsilon is computed anew, not believed."""
        events: tuple[Event, ...]
        if "events" in data:
            events = read_runs(data["events"])
        else:  # written before there were other events than these two
            events = tuple(
                Gaussian(float(z)) if z else NonPrivate()
                for z, times in data["noise_multipliers"]
                for _ in range(int(times))
            )
        if len(events) != data.get("rounds", len(events)):
            raise ValueError(f"{len(events)} events are listed for {data['rounds']!r} rounds")
        if data["cohort"] not in ("visible", "hidden"):
            raise ValueError(f"cohort = {data['cohort']!r}: expected 'visible' or 'hidden'")
        return cls(
            events=events,
            participation=Participation(
                data["sampling"], float(data["rate"]), data["cohort"] == "visible"
            ),
            relation=data["relation"],
            delta=float(data["delta"]),
            clients=int(data["clients"]),
            simulation=bool(data["simulation"]),
            assumed=tuple(data.get("assumed_public", ())),
        )


def _claim(event: Event) -> float | None:
    return event.claimed if isinstance(event, Wishart | LocalGaussian) else None


def _plain(epsilon: float) -> float | str:
    return "inf" if epsilon == math.inf else epsilon


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
