"""Epsilon of a certificate's events, computed anew, by view.

Closed forms where there are any (`closed`), cells and one Fourier transform elsewhere
(`divergence`, `releases`). What is computed is the number that is true of the events as dominating
pairs: a stated epsilon has to be at least that, and hardly more.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.verification import releases
from coterie.verification.closed import (
    gaussian_delta,
    gaussian_epsilon,
    mixture_epsilon,
    responses_epsilon,
)
from coterie.verification.divergence import Counted, delta_at, smallest_epsilon

Event = Mapping[str, Any]
_TINY = 1e-9
"""Below this delta training may state the number of a visible cohort, which is larger."""


@dataclass(frozen=True)
class Account:
    """What is to be accounted for: events with their counts, and who takes part in a round."""

    events: tuple[tuple[Event, int], ...]
    kind: str
    rate: float
    visible: bool
    relation: str
    delta: float

    @property
    def hides(self) -> str:
        """How a cohort that nobody sees is drawn; empty where all see it, or all take part."""
        return "" if self.visible or self.rate == 1 else self.kind

    @property
    def seen(self) -> "Account":
        """The same where who takes part is seen."""
        return replace(self, visible=True)


@dataclass(frozen=True)
class Span:
    """Where a stated epsilon may lie: at least the true number, at most what rounding explains.

    Tolerances are 0.05 % and 1e-6 below, for rounding here, and 0.5 % and 1e-4 above, for rounding
    up there. A delta is computed to fewer digits: `is_delta` widens the shares to 1 % and 5 %.
    """

    low: float
    high: float
    is_delta: bool = False

    def holds(self, stated: float) -> bool:
        """Return whether a stated number fits."""
        if math.inf in (stated, self.low):
            return stated == self.low or (stated == math.inf and self.high == math.inf)
        if self.is_delta:
            return self.low * 0.99 - 1e-14 <= stated <= self.high * 1.05 + 1e-10
        return self.low * (1 - 5e-4) - 1e-6 <= stated <= self.high * 1.005 + 1e-4


def recompute(account: Account) -> Span:
    """Compute epsilon of all events together."""
    events = account.events
    if any(event["event"] == "non_private" for event, _ in events):
        return Span(math.inf, math.inf)
    if not events:
        return Span(0.0, 0.0)
    if any(event["event"] == "local_gaussian" for event, _ in events):
        # Whoever adds noise to its own message is seen to send one.
        alike = [(_central(event, event["noise_multiplier"]), times) for event, times in events]
        return recompute(replace(account, events=tuple(alike)).seen)
    if all(event["event"] == "laplace" for event, _ in events):
        return _pure(account)
    if all(event["event"] == "gaussian" for event, _ in events):
        return _gaussian(account)
    return _mixed(account)


def summed(account: Account) -> Span:
    """Compute epsilon of whoever sees sums alone, and every cohort, under local noise."""
    alike = [
        (_central(event, event.get("noise_multiplier", 0) * math.sqrt(event.get("honest", 1))), n)
        for event, n in account.events
    ]
    return recompute(replace(account, events=tuple(alike)).seen)


def message_epsilon(account: Account) -> float | None:
    """Compute epsilon of the least noisy message by itself, where clients add noise."""
    noise = [e["noise_multiplier"] for e, _ in account.events if e["event"] == "local_gaussian"]
    scale = 2.0 if account.relation == "replace" else 1.0
    return gaussian_epsilon(scale / min(noise), account.delta) if noise else None


def recompute_delta(account: Account, epsilon: float) -> float:
    """Compute delta of events that papers print an epsilon for: Wishart, or clients' own noise."""
    events = account.events
    if all(event["event"] == "local_gaussian" for event, _ in events):
        alike = [(_central(event, event["noise_multiplier"]), times) for event, times in events]
        account = replace(account, events=tuple(alike)).seen
        if account.rate == 1:
            return float(gaussian_delta(epsilon, np.array([_mu(account)]))[0])
    return max(delta_at(laws, epsilon) for laws in _laws(account))


def _central(event: Event, noise: float) -> Event:
    if event["event"] != "local_gaussian":
        return event
    return {"event": "gaussian", "noise_multiplier": noise, "replaced": 2.0}


def _shift(event: Event, relation: str) -> float:
    return float(event["replaced"]) if relation == "replace" else 1.0


def _mu(account: Account) -> float:
    return math.sqrt(
        math.fsum(
            times * (_shift(event, account.relation) / event["noise_multiplier"]) ** 2
            for event, times in account.events
            if event["event"] == "gaussian"
        )
    )


def _gaussian(account: Account) -> Span:
    if account.rate == 1:
        found = gaussian_epsilon(_mu(account), account.delta)
        return Span(found, found)
    if not account.hides:
        found = _visible(account)
        return Span(found, found)
    found = _worst(account)
    seen = _visible(account)
    if account.hides == "poisson" and account.relation == "replace":
        if any(event["replaced"] < 2 for event, _ in account.events):
            # Two further bounds hold where a message cannot be turned round; the least counts.
            found = min(found, seen, _worst(replace(account, kind="fixed")))
        return Span(found, max(found, seen) if account.delta < _TINY else found)
    low = min(found, seen)
    return Span(low, max(found, seen) if account.delta < _TINY else found)


def _visible(account: Account) -> float:
    """Account for Gaussian rounds whose cohorts are seen."""
    costs = Counter[float]()
    for event, times in account.events:
        costs[_shift(event, account.relation) / event["noise_multiplier"]] += times
    if len(costs) == 1:
        ((mu, rounds),) = costs.items()
        return mixture_epsilon(mu, rounds, account.rate, account.delta)
    return _worst(account.seen)


def _pure(account: Account) -> Span:
    costs = _costs(account)
    added = math.fsum(epsilon * times for epsilon, times in costs.items())
    if account.delta == 0:
        return Span(added, added)
    exact = responses_epsilon(costs, account.delta)
    found = min(added, _worst(account) if exact is None else exact)
    return Span(found, found)


def _costs(account: Account) -> Counter[float]:
    costs = Counter[float]()
    for event, times in account.events:
        if event["event"] == "laplace":
            cost = releases.amplified(
                event["epsilon"], account.hides, account.rate, account.relation
            )
            costs[cost] += times
    return costs


def _mixed(account: Account) -> Span:
    """Account for unlike releases: together, or with the epsilons of pure ones simply added."""
    if account.delta == 0:
        return Span(math.inf, math.inf)
    found = _worst(account)
    costs = _costs(account)
    if costs:
        rest = tuple(part for part in account.events if part[0]["event"] != "laplace")
        added = math.fsum(epsilon * times for epsilon, times in costs.items())
        found = min(found, added + recompute(replace(account, events=rest)).low)
    return Span(found, found)


def _worst(account: Account) -> float:
    return max(smallest_epsilon(laws, account.delta) for laws in _laws(account))


def _laws(account: Account) -> tuple[Counted, Counted]:
    """List the losses of all releases, in both directions."""
    pairs: list[tuple[releases.Pair, int]] = [
        (releases.response(cost), times) for cost, times in _costs(account).items()
    ]
    for event, times in account.events:
        if event["event"] == "wishart":
            pairs.append((releases.wishart(event["degrees"], event["ratio"]), times))
    if account.rate == 1:
        mu = _mu(account)
        pairs += [(releases.shifted(1.0, mu), 1)] if mu else []
    else:
        make = _sampled(account)
        for event, times in account.events:
            if event["event"] == "gaussian":
                pairs.append((make(event), times))
    both = [(releases.laws_of(pair), times) for pair, times in pairs]
    return [(one, times) for (one, _), times in both], [(two, times) for (_, two), times in both]


def _sampled(account: Account) -> Callable[[Event], releases.Pair]:
    """Return the maker of the pair of one Gaussian round."""
    rate, relation, how = account.rate, account.relation, account.hides
    if not how:
        return lambda event: releases.by_coin(
            releases.shifted(event["noise_multiplier"], _shift(event, relation)), rate
        )
    if how == "fixed":
        return lambda event: releases.hidden_fixed(
            event["noise_multiplier"] * 2 / _shift(event, relation), rate
        )
    if relation == "replace":
        return lambda event: releases.hidden_replace(event["noise_multiplier"], rate)
    return lambda event: releases.hidden(event["noise_multiplier"], rate)


def by_view(account: Account) -> dict[str, Span]:
    """Compute epsilon by who looks; `epsilon` is the number that heads a certificate.

    The server adds central noise itself, so nothing holds against it. With cohorts of a fixed size
    all other clients together know from their invitations who was drawn.
    """
    main = recompute(account)
    kinds = {event["event"] for event, _ in account.events}
    if "local_gaussian" in kinds:
        sums, bare = summed(account), Span(math.inf, math.inf)
        alone = kinds == {"local_gaussian"}
        return {
            "epsilon": main,
            "other_clients": main,
            "server": main if alone else bare,
            "server_secure_aggregation": sums if alone else bare,
            "outsider": sums,
        }
    bare = Span(math.inf, math.inf) if account.events else Span(0.0, 0.0)
    views = {"epsilon": main, "other_clients": main}
    views |= {"server": bare, "server_secure_aggregation": bare}
    if account.kind == "fixed":
        together = recompute(account.seen)
        views |= {"other_clients": together, "outsider": main}
        views["coalition_of_all_others"] = together
    return views


def count(events: Sequence[Event]) -> tuple[tuple[Event, int], ...]:
    """Count equal events of a list of runs, whatever papers claim of them."""
    found: dict[tuple[Any, ...], int] = {}
    for event in events:
        key = tuple((k, v) for k, v in event.items() if k not in ("rounds", "claimed"))
        found[key] = found.get(key, 0) + int(event["rounds"])
    return tuple((dict(key), times) for key, times in found.items())
