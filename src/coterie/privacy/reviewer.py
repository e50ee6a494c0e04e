"""What a privacy reviewer asks of a guarantee, beside its epsilon.

Every number is against all other clients together (under local noise: the server too), and is
computed from the events of a run alone:

- epsilon at the same delta under the other neighbouring relation;
- mu, where all releases together are exactly one Gaussian release;
- the profile delta(epsilon) at a few epsilons;
- the true positive rate of the best attack at small false positive rates;
- epsilon for a person whose rows are at several clients.

**A person at k clients.** With or without this person's rows, each of the k clients contributes
something: its contributions are replaced, and do not become zero. So the bound starts from
`replace`, also for a run that states epsilon under `zero_out`. Let M be (e, d)-DP under a relation.
A chain of k neighbours gives (k e, d (1 + e^e + ... + e^((k-1) e)))-DP (Dwork and Roth 2014,
theorem 2.2; Vadhan 2017, lemma 2.2). Gaussian DP has the exact form k mu (Dong, Roth and Su 2022,
theorem 2.14). Two bounds that know more of the mechanism replace it where they are smaller:

- Sampled Gaussian sums: a round in which any of the k clients takes part moves the sum at most k
  times as far as one replaced client. Adversaries who observe cohorts, and more rounds with these
  clients, learn no less. So one client of k times the sensitivity is a bound, in visible cohorts,
  at the probability that any of the k is drawn: 1 - (1 - q)^k under Poisson sampling, at most k q
  in cohorts of a fixed size.
- Local noise: each client's messages carry noise of their own, so those of k clients are as many
  releases of one; who takes part is independent under Poisson sampling.

This module never imports torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.privacy.accounting import coalition_profile
from coterie.privacy.events import SCALE, Gaussian, Participation, Relation
from coterie.privacy.guarantee import Guarantee, view_of
from coterie.privacy.profiles import GaussianProfile, Least, Profile

EPSILONS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Epsilons at which the profile is listed."""
ALARMS = (0.01, 0.1)
"""False positive rates at which the best attack is bounded."""
PERSON = (1, 2, 3)
"""Numbers of clients at which a person may appear."""
_LARGEST = 700.0
"""Above this, e^epsilon overflows float64, and only a delta of 0 is bounded."""
_STEP = 1.05
"""Growth of the bracket in the search for epsilon."""
_HALVINGS = 45


@dataclass(frozen=True)
class GroupProfile(Profile):
    """The profile of a group of clients, from the profile of one client.

    **Guarantee:** if `one` bounds delta(epsilon) for each client, this bounds it for any `size`
    clients that change together: delta(epsilon) = (1 + e^x + ... + e^((size-1) x)) delta_one(x) at
    x = epsilon / size. Assumes nothing of the mechanism. It is not tight;
    `tests/privacy/test_reviewer.py`.

    >>> from coterie.privacy.profiles import PureProfile
    >>> GroupProfile(PureProfile(0.5, 2), 3).epsilon(0.0)
    3.0
    """

    one: Profile
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size = {self.size}: expected at least 1 client")

    @property
    def accountant(self) -> str:  # type: ignore[override]
        """How the bound was computed, for display."""
        return f"group of {self.size} ({self.one.accountant})"

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at this epsilon >= 0."""
        each = epsilon / self.size
        delta = self.one.delta(each)
        if delta == 0:
            return 0.0
        if epsilon > _LARGEST:  # the terms overflow
            return 1.0
        return min(1.0, delta * math.fsum(math.exp(each * step) for step in range(self.size)))

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at this delta; infinite if none is found.

        The terms are at least 1, so epsilon is at least `size` times that of one client. From
        there the bracket grows until the bound holds as computed.
        """
        low = self.size * self.one.epsilon(delta)
        if low == math.inf or self.delta(low) <= delta:
            return low
        high = max(low, 1e-6)
        while self.delta(high) > delta:
            low, high = high, high * _STEP
            if high > _LARGEST:
                return math.inf
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def profile_of_group(one: Profile, size: int) -> Profile:
    """Return the profile of `size` clients that change together, from that of one client.

    **Guarantee:** exact for Gaussian DP (k mu); otherwise the bound of `GroupProfile`. Assumes that
    `one` holds for every client. `tests/privacy/test_reviewer.py`.
    """
    if isinstance(one, GaussianProfile):
        return GaussianProfile(size * one.mu)
    if isinstance(one, GroupProfile):  # one longer chain is tighter than a chain of chains
        return GroupProfile(one.one, size * one.size)
    return one if size == 1 else GroupProfile(one, size)


def profile_under(guarantee: Guarantee, relation: Relation) -> Profile:
    """Return the profile of a run under either relation, against all other clients together.

    **Guarantee:** an upper bound on delta(epsilon) under `relation`, with the events and the
    sampling of the guarantee. Where no account under `replace` is proved (Wishart noise), a
    replacement is two steps of `zero_out`: the client's contributions become zero, and then the
    other client's. `tests/privacy/test_reviewer.py`.
    """
    try:
        return coalition_profile(guarantee.events, guarantee.participation, relation)
    except ValueError:
        if relation != "replace":
            raise
        zeroed = coalition_profile(guarantee.events, guarantee.participation, "zero_out")
        return profile_of_group(zeroed, 2)


def epsilon_under(guarantee: Guarantee, relation: Relation) -> float | None:
    """Return epsilon at the guarantee's delta under either relation; None if none is bounded.

    **Guarantee:** an upper bound, as `profile_under`; exact with Gaussian noise and all clients in
    every round. `tests/privacy/test_reviewer.py`.
    """
    epsilon = profile_under(guarantee, relation).epsilon(guarantee.delta)
    return epsilon if epsilon < math.inf else None


def mu_under(guarantee: Guarantee, relation: Relation) -> float | None:
    """Return the mu of Gaussian DP of all releases together; None where they are not Gaussian.

    **Guarantee:** exact: Gaussian noise, and every client in every round, so that mu^2 is the sum
    of the releases' mu^2 (Dong, Roth and Su 2022). Sampling and other noise have no mu.
    `tests/privacy/test_reviewer.py`.
    """
    found = profile_under(guarantee, relation)
    return found.mu if isinstance(found, GaussianProfile) and found.mu < math.inf else None


def deltas(guarantee: Guarantee, epsilons: Sequence[float] = EPSILONS) -> list[float]:
    """Return an upper bound on delta at each epsilon, under the guarantee's relation.

    **Guarantee:** as `Guarantee.profile`: each pair (epsilon, delta) holds, and all of them do
    together. `tests/privacy/test_reviewer.py`.
    """
    return [guarantee.delta_at(epsilon) for epsilon in epsilons]


def attack_power(guarantee: Guarantee, alarms: Sequence[float] = ALARMS) -> list[float]:
    """Return the largest true positive rate of any attack, at each false positive rate.

    **Guarantee:** an upper bound for any test between two neighbours under the guarantee's
    relation, by all other clients together, with unlimited computation: Phi(Phi^-1(alpha) + mu)
    for Gaussian DP, else from the whole profile, in both directions (`Profile.trade_off`).
    `tests/privacy/test_reviewer.py`.
    """
    return [float(power) for power in guarantee.detection(alarms)]


def epsilon_of_person(guarantee: Guarantee, clients: int) -> float | None:
    """Return epsilon, at the guarantee's delta, for a person with rows at several clients.

    None if no epsilon is bounded.
    """
    epsilon = profile_of_person(guarantee, clients).epsilon(guarantee.delta)
    return epsilon if epsilon < math.inf else None


def profile_of_person(guarantee: Guarantee, clients: int) -> Profile:
    """Return the profile of a person with rows at several clients.

    **Guarantee:** an upper bound between runs with and without the rows of a person, or with other
    rows, at up to `clients` clients, against all clients without rows of this person. Assumes that
    these rows change nothing else: not who takes part, not the settings, not other clients' rows.
    Uses `replace`, also for runs under `zero_out`: see the module docstring.
    `tests/privacy/test_reviewer.py`.
    """
    events, who = guarantee.events, guarantee.participation.to_others
    bounds = [profile_of_group(profile_under(guarantee, "replace"), clients)]
    noise = [event.as_seen().gaussian_noise("replace") for event in events]
    scheduled = who.kind == "cyclic"  # k mu is all that is proved for clients of several groups
    if clients > 1 and who.rate < 1 and None not in noise and not scheduled:
        moved = [Gaussian(z / clients) for z in noise if z is not None]
        bounds.append(coalition_profile(moved, _any_of(who, clients), "replace"))
    if clients > 1 and who.kind not in ("fixed", "cyclic") and all(e.local for e in events):
        bounds.append(coalition_profile(events * clients, who, "replace"))
    return bounds[0] if len(bounds) == 1 else Least(tuple(bounds))


def _any_of(who: Participation, clients: int) -> Participation:
    """Return visible sampling at least as likely to draw one client as `who` any of several."""
    several = min(1.0, clients * who.rate)
    if who.kind == "poisson":
        several = -math.expm1(clients * math.log1p(-who.rate))
    return Participation("poisson", several, visible=True)


def review(guarantee: Guarantee) -> dict[str, Any] | None:
    """Return what a privacy reviewer asks, as strict JSON; null where a number has no bound.

    None if nothing is released, or something without noise.

    **Guarantee:** each number as the function that computes it; all for secret noise, so none
    holds for a simulation. `tests/privacy/test_reviewer.py`.
    """
    if not guarantee.events or any(event.unbounded for event in guarantee.events):
        return None
    return {
        "adversary": view_of(guarantee),
        "delta": guarantee.delta,
        "epsilon": {relation: epsilon_under(guarantee, relation) for relation in SCALE},
        "mu": {relation: mu_under(guarantee, relation) for relation in SCALE},
        "profile": [
            {"epsilon": epsilon, "delta": delta}
            for epsilon, delta in zip(EPSILONS, deltas(guarantee), strict=True)
        ],
        "attack": [
            {"false_positives": alarm, "true_positives": power}
            for alarm, power in zip(ALARMS, attack_power(guarantee), strict=True)
        ],
        "person": [
            {"clients": count, "epsilon": epsilon_of_person(guarantee, count)} for count in PERSON
        ],
    }
