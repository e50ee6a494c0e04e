"""The guarantee of a plan: epsilon for each adversary, and the text that states it.

**Central noise.** The server observes each contribution before noise; under secure aggregation it
still observes the exact sum, to which it adds the noise itself. So nothing holds against it.

**Local noise** (standard deviation z C on each message; s = 1 under zero_out, 2 under replace):

- server: observes the client's noisy message whenever it takes part, and that it does. Given the
  number n of its rounds, all messages together are s sqrt(n)/z-GDP, and n is binomial and does not
  depend on data: the profile of a visible cohort.
- other clients, all together: subtract their own messages from the released sum, and are left with
  the client's message, or with nothing. The same number.
- server under secure aggregation: observes the sum over the cohort, and the cohort. The noise of
  `honest` clients (the client's own included) is known to nobody; the rest of the noise and the
  other contributions are constants to the strongest adversary. So s sqrt(n)/(z sqrt(honest))-GDP.
- outsider: observes only releases, a function of what the server observes under secure aggregation:
  at most its number. (No amplification by hidden sampling is claimed: an absent client takes its
  noise with it, so sums with and without it differ in variance.)

**Noise in shares** (at least K clients in a sum, at most C corrupt): every adversary observes only
opened sums, in which the shares of the clients that do not collude count.

- other clients: at most C of them together; the noise of K - C shares, which is the planned noise.
- coordinator: it draws the cohorts, and could draw the client in every round; sampling counts for
  nothing. The noise of K shares.
- coordinator and corrupt clients: the same with the planned noise.
- coalition of all others: only the client's own share counts. This is also the epsilon against a
  coordinator that breaks the secure aggregation and reads the client's own message.

Texts are rendered from numbers, and never parsed. This module never imports torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from itertools import groupby
from typing import Any

from coterie.core.environment import version_of
from coterie.privacy.accounting import (
    check_covered,
    coalition_profile,
    count,
    of_one_client,
    profile,
)
from coterie.privacy.events import (
    EVENTS,
    SCALE,
    Event,
    Gaussian,
    NonPrivate,
    Participation,
    Relation,
    SharedGaussian,
    check_delta,
    check_relation,
    list_runs,
    read_runs,
)
from coterie.privacy.profiles import Array, GaussianProfile, Profile

OTHERS = "other clients"
EVERYBODY = "the server and the other clients"
COMPARED = {"zero_out": "without it", "replace": "with another client's data in its place"}
RELATIONS = {
    "zero_out": "the client's contributions are replaced by zero",
    "replace": "the client is replaced by any other client",
}
UNIT = "one client, with its whole data and state"
_SERVER_SEES = "the server, which observes each clipped contribution before noise; "
_RESULTS = (
    "metrics, losses and row counts in the output; settings that were chosen by results; a "
    "personal model that its client shares."
)
_CENTRAL = {
    "server": "the server observes each clipped contribution before noise",
    "server_secure_aggregation": "the server adds the noise itself and observes the exact sum",
}
_LARGEST = 700.0


@dataclass(frozen=True, repr=False)
class Guarantee:
    """What a plan guarantees to each client, against the other clients and by view.

    `simulation` says that the noise comes from a known seed: then nothing is guaranteed. `assumed`
    is what is assumed to be public without being declared so. `unit` is the protected unit in the
    owner's words; whatever it says, one client is protected. Raise ValueError if the plan has no
    proved account.

    **Guarantee:** everything released together is (epsilon, delta)-DP in each client, and so are
    jointly the personal models of all other clients, as functions of the releases and of their own
    data (billboard lemma; Hsu, Huang, Roth, Roughgarden and Wu 2016). Assumes a server that adds
    the noise and reveals nothing else; under local noise it assumes nothing of the server, and
    covers what the server observes. Under noise in shares it assumes secure aggregation, that the
    declared number of clients answer, and that no more than the declared number collude.
    `tests/privacy/test_accounting.py`, `tests/privacy/test_accounting_local.py`.
    """

    events: tuple[Event, ...]
    participation: Participation
    relation: Relation
    delta: float
    clients: int
    simulation: bool = False
    assumed: tuple[str, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        check_relation(self.relation)
        check_delta(self.delta, self.events)
        if self.clients < 1:
            raise ValueError(f"clients = {self.clients}: expected at least 1")
        check_covered(count((e, 1) for e in self.events), self.participation, self.relation)
        for event in set(self.events):
            check_honest(event.honest, self.participation, self.clients)
            event.check_clients(self.clients)
        if len({event.in_shares for event in self.events}) > 1:
            raise ValueError("noise in shares in some rounds only: no view is defined for that")

    def __repr__(self) -> str:
        if not self.events:
            return f"<Guarantee: nothing is released by {self.clients:,} clients>"
        seen = "SIMULATION, " if self.simulation else ""
        return (
            f"<Guarantee: {seen}epsilon {round_up(self.epsilon)} at delta {show_delta(self.delta)} "
            f"against the {view_of(self)}, {self.relation}, {self.clients:,} clients, "
            f"{len(self.events)} releases>"
        )

    @property
    def profile(self) -> Profile:
        """The whole profile, against all other clients together."""
        return coalition_profile(self.events, self.participation, self.relation)

    @property
    def epsilon(self) -> float:
        """Epsilon at this guarantee's delta, against all other clients together."""
        return self.epsilon_at(self.delta)

    @property
    def views(self) -> dict[str, float]:
        """Epsilon by adversary: see the module docstring.

        With cohorts of a fixed size, clients know the cohort from their own participation; only an
        outsider's epsilon is smaller if the cohort is hidden.
        """
        bare = math.inf if self.events else 0.0
        views = {"other_clients": self.epsilon}
        if is_local(self):
            central = is_central(self)
            summed = summed_profile(self).epsilon(self.delta)
            views["server"] = math.inf if central else self.epsilon
            views["server_secure_aggregation"] = math.inf if central else summed
            views["outsider"] = summed
            return views
        if is_in_shares(self):
            return views | _views_of_shares(self)
        views |= {"server": bare, "server_secure_aggregation": bare}
        if self.participation.kind == "fixed":
            outside = profile(self.events, self.participation, self.relation)
            views["outsider"] = outside.epsilon(self.delta)
            views["coalition_of_all_others"] = self.epsilon
        return views

    @property
    def per_participation(self) -> float | None:
        """Epsilon of the least noisy message, under local noise; None without local noise.

        **Guarantee:** exact Gaussian DP of one message; `tests/privacy/test_accounting_local.py`.
        """
        noise = [
            z
            for event in self.events
            if event.local and (z := event.as_seen().gaussian_noise(self.relation)) is not None
        ]
        if not noise:
            return None
        return GaussianProfile(SCALE[self.relation] / min(noise)).epsilon(self.delta)

    @property
    def claimed_only(self) -> "Guarantee":
        """The guarantee of the releases for which a paper states an epsilon."""
        return replace(self, events=tuple(e for e in self.events if e.claimed is not None))

    @property
    def claimed_epsilon(self) -> float | None:
        """The sum of the epsilons that papers state for releases of this plan; None without any."""
        claims = [event.claimed for event in self.events if event.claimed is not None]
        return math.fsum(claims) if claims else None

    def delta_at(self, epsilon: float) -> float:
        """Return an upper bound on delta at another epsilon."""
        if not epsilon >= 0:
            raise ValueError(f"epsilon = {epsilon}: expected a number that is not negative")
        return self.profile.delta(epsilon)

    def epsilon_at(self, delta: float) -> float:
        """Return an upper bound on epsilon at another delta."""
        check_delta(delta, self.events)
        return self.profile.epsilon(delta)

    def trade_off(self, alphas: Sequence[float]) -> Array:
        """Return a lower bound on the type II error of any test with type I errors `alphas`.

        See `coterie.privacy.profiles`.
        """
        return self.profile.trade_off(alphas)

    def detection(self, alphas: Sequence[float]) -> Array:
        """Return an upper bound on the true positive rate of any test, at false positive rates."""
        return 1 - self.trade_off(alphas)

    def statement(self) -> str:
        """Return the guarantee as text."""
        return "\n".join(state(self))

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as strict JSON; an infinite epsilon is the string "inf"."""
        who = self.participation
        found: dict[str, Any] = {
            "unit": UNIT,
            "relation": self.relation,
            "view": view_of(self),
            "views": {view: _plain(epsilon) for view, epsilon in self.views.items()},
            "reasons": reasons(self),
            **who.to_json(),
            # A client that adds noise to its own message is observed to send one.
            "participation_seen": who.visible or is_local(self),
            "clients": self.clients,
            "rounds": len(self.events),
            "delta": self.delta,
            "epsilon": _plain(self.epsilon),
            "events": list_runs(self.events),
            "accountant": self.profile.accountant,
            "versions": {
                name: version_of(name) or "not installed"
                for name in ("coterie", "dp-accounting", "scipy")
            },
            "simulation": self.simulation,
            "assumed_public": list(self.assumed),
        }
        if {event.name for event in self.events} <= {
            Gaussian.name,
            SharedGaussian.name,
            NonPrivate.name,
        }:
            noise = [getattr(event, "noise_multiplier", 0.0) for event in self.events]
            found["noise_multipliers"] = [[z, len(list(run))] for z, run in groupby(noise)]
        if self.unit:
            found["about"] = {"unit": self.unit}
        if self.per_participation is not None:
            found["epsilon_per_participation"] = self.per_participation
        claimed = self.claimed_epsilon
        if claimed is not None:
            found["claimed_epsilon"] = claimed
            found["true_delta_at_claimed"] = self.claimed_only.delta_at(claimed)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Guarantee":
        """Return the guarantee of this JSON; epsilon is computed again, not read."""
        events = read_runs(data["events"])
        if len(events) != data.get("rounds", len(events)):
            raise ValueError(f"{len(events)} events are listed for {data['rounds']!r} rounds")
        return cls(
            events=events,
            participation=Participation.from_json(data),
            relation=data["relation"],
            delta=float(data["delta"]),
            clients=int(data["clients"]),
            simulation=bool(data["simulation"]),
            assumed=tuple(data.get("assumed_public", ())),
            unit=str(data.get("about", {}).get("unit", "")),
        )


def _plain(epsilon: float) -> float | str:
    return "inf" if epsilon == math.inf else epsilon


def smallest_cohort(participation: Participation, clients: int) -> int:
    """Return the fewest clients of a round in which a given client takes part."""
    if participation.rate == 1:
        return clients
    # Slightly more, for rates such as 3/7 that are whole numbers of clients up to rounding.
    whole = math.floor(participation.rate * clients * (1 + 1e-12) + 1e-9)
    return max(1, whole) if participation.kind == "fixed" else 1


def check_honest(honest: int, participation: Participation, clients: int) -> None:
    """Raise ValueError for more honest clients than the smallest cohort has."""
    fewest = smallest_cohort(participation, clients)
    if honest > fewest:
        raise ValueError(
            f"honest = {honest}: a round of {participation.kind} sampling may have only {fewest} "
            f"of {clients} clients, so no more can be trusted to add their noise in every round; "
            f"give at most {fewest}, or draw cohorts of a fixed size"
        )


def is_local(guarantee: Guarantee) -> bool:
    """Return whether clients add noise themselves, in some round."""
    return any(event.local for event in guarantee.events)


def is_central(guarantee: Guarantee) -> bool:
    """Return whether the server observes something without noise, in some round."""
    return any(not (event.local or event.in_shares) for event in guarantee.events)


def is_in_shares(guarantee: Guarantee) -> bool:
    """Return whether clients add the noise in shares."""
    return any(event.in_shares for event in guarantee.events)


def _views_of_shares(guarantee: Guarantee) -> dict[str, float]:
    """Return epsilon by adversary under noise in shares, but for the other clients.

    **Guarantee:** upper bounds for the adversaries of the module docstring, each of whom knows all
    shares but those counted; `tests/privacy/test_shares.py`.
    """
    shared = [event for event in guarantee.events if isinstance(event, SharedGaussian)]
    who = guarantee.participation

    def against(events: Sequence[Event], seen: Participation) -> float:
        return profile(events, seen, guarantee.relation).epsilon(guarantee.delta)

    alone = [event.against(event.minimum_clients) for event in shared]
    return {
        "coordinator": against(alone, who.always),
        "coordinator_and_corrupt": against(shared, who.always),
        "coalition_of_all_others": against([e.against(1) for e in shared], who.to_others),
    }


def summed_profile(guarantee: Guarantee) -> Profile:
    """Return the profile for an adversary who observes cohorts and only sums of local noise.

    **Guarantee:** an upper bound on delta(epsilon) for an honest-but-curious server under secure
    aggregation, and for outsiders, if the declared number of honest clients add their noise; see
    the module docstring. `tests/privacy/test_accounting_local.py`.
    """
    events = [event.as_summed() for event in guarantee.events]
    return profile(events, guarantee.participation.shown, guarantee.relation)


def view_of(guarantee: Guarantee) -> str:
    """Return the adversary of the guarantee's epsilon; local noise includes the server."""
    return EVERYBODY if is_local(guarantee) and not is_central(guarantee) else OTHERS


def reasons(guarantee: Guarantee) -> dict[str, str]:
    """Return why a view has its epsilon, where that is not obvious."""
    if is_in_shares(guarantee):
        return _reasons_of_shares(guarantee)
    if is_central(guarantee):
        return dict(_CENTRAL)
    if not is_local(guarantee):
        return {}
    honest = _fewest_honest(guarantee)
    if honest == 1:
        trusted = "only the noise of the client itself counts"
    else:
        trusted = f"{honest} honest clients, the protected one included, add their noise"
    return {
        "server": "the server observes each client's noisy message, and its sender",
        "other_clients": "all others together can subtract their own messages from a release",
        "server_secure_aggregation": f"the server observes sums, and the cohort; {trusted}",
        "outsider": f"an outsider observes only releases; {trusted}",
    }


def _reasons_of_shares(guarantee: Guarantee) -> dict[str, str]:
    least, corrupt = _counts(guarantee)
    return {
        "other_clients": f"at most {corrupt} of them collude; the shares of the others count",
        "coordinator": f"the coordinator observes sums of at least {least} clients, and "
        f"{_may_draw(guarantee.participation)}",
        "coordinator_and_corrupt": f"the coordinator and {corrupt} clients: their shares do not "
        "count",
        "coalition_of_all_others": "only the client's own share of the noise counts",
    }


def _may_draw(who: Participation) -> str:
    if who.kind == "cyclic":
        return "cannot ask a client in another round than its own"
    return "may draw a client in every round"


def _counts(guarantee: Guarantee) -> tuple[int, int]:
    """Return the fewest clients of a sum, and how many may collude in every round, under shares."""
    shared = [event for event in guarantee.events if isinstance(event, SharedGaussian)]
    return min(e.minimum_clients for e in shared), min(e.corrupt for e in shared)


def _fewest_honest(guarantee: Guarantee) -> int:
    return min(event.honest for event in guarantee.events if event.local)


def gdp_approximation(guarantee: Guarantee) -> GaussianProfile:
    """Return the central limit of Gaussian releases, against the other clients, as papers plot it.

    With a hidden cohort, under zero_out mu^2 = p^2 sum over rounds of e^(1/z^2) - 1 (Bu, Dong, Long
    and Su 2020); under replace, the same limit of the pair M(1), M(-1) (see `accounting`) is
    p^2 sum of 2 (e^(1/z^2) - e^(-1/z^2)). With a visible cohort, or under local noise,
    mu^2 = p sum of (s/z)^2, the mean over attendances. At p = 1 it is exact. Raise ValueError if a
    release is not Gaussian.

    **Guarantee:** none: an approximation, which may be far above or below the true value.
    """
    who, zero = guarantee.participation.to_others, guarantee.relation == "zero_out"
    if who.kind == "cyclic" and isinstance(guarantee.profile, GaussianProfile):
        return guarantee.profile  # exact, of the client for which most counts
    visible = who.rate == 1 or who.visible or is_local(guarantee)
    total = 0.0
    for event in guarantee.events:
        z = event.as_seen().gaussian_noise(guarantee.relation)
        if z is None:
            raise ValueError(
                f"{type(event).__name__}: expected only Gaussian releases; other noise has no "
                "such approximation here: use trade_off, which is a bound"
            )
        square = (SCALE[guarantee.relation] / z) ** 2
        if visible:
            total += who.rate * square
        else:
            total += who.rate**2 * _sampled(square if zero else square / 4, zero)
    label = "approximation, not a bound (central limit of Gaussian DP)"
    return GaussianProfile(math.sqrt(total), label)


def _sampled(square: float, zero: bool) -> float:
    """Return the limit of a sampled round over p^2, for 1/z^2; infinite where e^(1/z^2) is."""
    if square > _LARGEST:
        return math.inf
    return math.expm1(square) if zero else 4 * math.sinh(square)


# Text


def round_up(bound: float, digits: int = 4) -> str:
    """Return an upper bound with few digits, never below it.

    >>> round_up(4.61142), round_up(1.0), round_up(1.0000000001), round_up(math.inf)
    ('4.612', '1', '1.001', 'inf')
    >>> round_up(0.99999998), round_up(28.0656), round_up(8.125e7), round_up(0.1)
    ('1', '28.07', '8.125e+7', '0.1')
    """
    if not 0 < bound < math.inf:
        return f"{bound:g}"
    # In decimals, where the last digit shown is exact: floats would round on the way.
    shown = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(bound)))
    return f"{shown.normalize():f}" if -5 <= shown.adjusted() < 6 else f"{shown:.{digits - 1}e}"


def show_delta(delta: float) -> str:
    """Return an upper bound on delta with three digits: epsilon holds at no smaller one.

    >>> show_delta(1e-5), show_delta(8.1004e-06), show_delta(3e-5 + 1e-21), show_delta(0.0)
    ('1e-05', '8.11e-06', '3e-05', '0')
    """
    # Float sums of deltas may be off in their last bits.
    exact = Context(prec=12).create_decimal(repr(float(delta)))
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).plus(exact)):.3g}"


def state(
    guarantee: Guarantee,
    *,
    epsilon: float | None = None,
    adversary: str | None = None,
    accountant: str | None = None,
    server: str | None = None,
) -> list[str]:
    """Return the sentences that state a guarantee.

    A run that was selected among several has another epsilon than its own, with sentences on its
    adversary and accountant. `server` is what a central server observes, where it is not each
    clipped contribution.
    """
    own = epsilon is None
    spent = guarantee.epsilon if epsilon is None else epsilon
    whole = f"Protected: {protected(guarantee)}."
    if not guarantee.events:
        return [
            "epsilon = 0: nothing is released, so nothing that an adversary can observe depends on "
            "a client's data.",
            whole,
            f"Not covered: {_RESULTS}",
        ]
    lines = [
        state_epsilon(spent, guarantee.delta, len(guarantee.events), guarantee.relation),
        f"{whole} In neighbouring runs {RELATIONS[guarantee.relation]}.",
        adversary or _adversary(guarantee),
        f"Sampling: {_sampling(guarantee)}",
        accountant or f"Accountant: {guarantee.profile.accountant}.",
        f"Not covered: {_uncovered(guarantee, server)}{_RESULTS}",
    ]
    if guarantee.assumed:
        lines.append(f"Assumed public: {'; '.join(_grouped(guarantee.assumed))}.")
    if spent == math.inf:
        # Under Wishart noise a larger delta may still have an epsilon; without noise none has.
        finite = own and guarantee.delta_at(1e9) < 1
        at = f" at delta = {show_delta(guarantee.delta)}" if finite else ""
        lines.insert(0, f"NOT PRIVATE: epsilon is infinite{at}.")
    if guarantee.simulation:
        lines.insert(0, "SIMULATION: noise from a known seed, not a guarantee.")
    if guarantee.claimed_epsilon is not None:
        lines.insert(0, _compare_claim(guarantee, guarantee.claimed_epsilon))
    return lines


def _grouped(assumed: Sequence[str]) -> Iterator[str]:
    """Yield what is assumed, with what is said of several facts said once.

    >>> list(_grouped(["levels of a read off the rows", "b", "task of y read off the rows"]))
    ['levels of a; task of y (read off the rows)', 'b']
    """
    facts: dict[str, list[str]] = {}
    for text in assumed:
        fact, mark, rest = text.partition(" read off ")
        facts.setdefault(f"{mark}{rest}", []).append(fact)
    for tail, heads in facts.items():
        yield "; ".join(heads) + (f" ({tail.strip()})" if tail else "")


def protected(guarantee: Guarantee) -> str:
    """Return the protected unit; what the owner calls it comes first."""
    return f'"{guarantee.unit}" (the owner\'s words for {UNIT})' if guarantee.unit else UNIT


def state_epsilon(epsilon: float, delta: float, rounds: int, relation: Relation) -> str:
    """Return the sentences that state epsilon and delta, and what they mean."""
    factor = round_up(math.exp(epsilon), 3) if epsilon < _LARGEST else "any number of"
    pure = "pure " if delta == 0 else ""
    shown = show_delta(delta)
    slack = f", plus {shown}" if delta else ""
    return (
        f"{pure}epsilon = {round_up(epsilon)} at delta = {shown}, "
        f"over {rounds} round{'s' * (rounds != 1)}. Any event that an adversary can "
        f"observe is at most {factor} times as likely with a client's data as "
        f"{COMPARED[relation]}{slack}."
    )


def _uncovered(guarantee: Guarantee, server: str | None) -> str:
    if is_in_shares(guarantee):
        return "the noise of fewer honest clients than declared; "
    if not is_local(guarantee) or is_central(guarantee):
        return _SERVER_SEES if server is None else server
    return "an adversary who reads a client's memory before it adds noise; "


def _compare_claim(guarantee: Guarantee, claimed: float) -> str:
    """Return what a paper claims for a mechanism, and what is true of it."""
    part = guarantee.claimed_only
    single = part.per_participation
    each = "" if single is None else f"; {round_up(single)} for a single message"
    local = is_local(part)
    how = "as the paper labels it" if local else "by the paper's own composition"
    whom = ", against the server and all other clients together" if local else ""
    return (
        "NOT A GUARANTEE: this reproduces a published mechanism. Published for "
        f"{len(part.events)} of {len(guarantee.events)} releases, {how}: epsilon = "
        f"{round_up(claimed)} at delta = {show_delta(guarantee.delta)}. True{whom}: delta = "
        f"{round_up(part.delta_at(claimed))} at that epsilon, and epsilon = "
        f"{round_up(part.epsilon)} at delta = {show_delta(guarantee.delta)}{each}."
    )


def _adversary(guarantee: Guarantee) -> str:
    who = guarantee.participation
    if is_in_shares(guarantee):
        return _shared_adversary(guarantee)
    if is_local(guarantee):
        return _local_adversary(guarantee)
    if who.kind == "fixed" and who.rate < 1 and not who.visible:
        return (
            "Adversary: all other clients together, who observe every release and know from their "
            "own participation who takes part, so sampling does not reduce epsilon. For an "
            f"outsider, who observes only releases: epsilon = "
            f"{round_up(guarantee.views['outsider'])}."
        )
    seen = " and observe who takes part" if who.visible else " and do not observe who takes part"
    cohort = "" if who.rate == 1 else seen
    return f"Adversary: all other clients together, who observe every release{cohort}."


def _shared_adversary(guarantee: Guarantee) -> str:
    (least, corrupt), views = _counts(guarantee), guarantee.views
    return (
        "Noise: every client adds a share, and secure aggregation opens only sums of at least "
        f"{least} clients. Adversary: other clients, at most {corrupt} of them together, who "
        f"observe every release. For the coordinator, which {_may_draw(guarantee.participation)}: "
        f"epsilon = {round_up(views['coordinator'])}; together with {corrupt} clients: "
        f"{round_up(views['coordinator_and_corrupt'])}. If all other clients collude, or the "
        "coordinator reads a single client's message, one share of the noise is left: epsilon = "
        f"{round_up(views['coalition_of_all_others'])}."
    )


def _local_adversary(guarantee: Guarantee) -> str:
    single, honest = guarantee.per_participation, _fewest_honest(guarantee)
    assert single is not None
    trusted = "no other client adds" if honest == 1 else f"{honest} honest clients add"
    all_take_part = guarantee.participation.rate == 1
    sampled = ". They observe who takes part, so sampling does not reduce epsilon"
    each = "" if all_take_part else " in which a client takes part"
    server = "" if is_central(guarantee) else "the server, which observes every message, and "
    return (
        "Noise: each client adds it to its own contribution, before sending it. "
        f"Adversary: {server}all other clients together, who can subtract their own messages from "
        f"a release{'' if all_take_part else sampled}: epsilon = {round_up(single)} for each round"
        f"{each}, {round_up(guarantee.epsilon)} in total. For an adversary who observes only sums "
        f"(the server under secure aggregation, outsiders), if {trusted} noise: epsilon = "
        f"{round_up(guarantee.views['outsider'])}."
    )


def _sampling(guarantee: Guarantee) -> str:
    who, clients = guarantee.participation, guarantee.clients
    if who.rate == 1:
        return f"all {clients} clients take part in every round."
    how = {
        "poisson": f"each of {clients} clients takes part in a round independently",
        "fixed": f"cohorts of a fixed size are drawn from {clients} clients",
        "cyclic": f"each of {clients} clients takes part once in {who.period} rounds, by a public "
        "schedule",
    }[who.kind]
    if who.kind == "cyclic":
        return f"{how}."
    return f"{how} (probability {who.rate:.4g})."


def describe_noise(events: Sequence[Event]) -> str:
    """Return the noise of a plan's releases as text, kind by kind."""
    found = []
    for kind in (kind for kind in EVENTS.values() if kind.noise_text):
        values = [getattr(event, kind.noise_field) for event in events if event.name == kind.name]
        if values:
            low, high = f"{min(values):.4g}", f"{max(values):.4g}"
            found.append(kind.noise_text.format(low if low == high else f"{low} to {high}"))
    return " or ".join(found) or "no noise"


def compose(guarantees: Sequence[Guarantee]) -> list[Guarantee]:
    """Return one guarantee for all runs of each sampling and relation: their releases composed.

    **Guarantee:** each is that of a single run with the releases of these runs, at the largest of
    their deltas, for a client of all of them: a release may depend on earlier ones, also of other
    runs. Noise in shares beside other noise counts as central noise, which it is for other clients
    of whom no more collude than each of these runs declares. `tests/privacy/test_guarantee.py`.
    """
    alike: dict[tuple[Participation, Relation], list[Guarantee]] = {}
    for one in map(_of_one_client, guarantees):
        if one.events:
            alike.setdefault((one.participation, one.relation), []).append(one)
    return [
        replace(
            runs[0],
            events=_without_some_in_shares([event for one in runs for event in one.events]),
            delta=max(one.delta for one in runs),  # a pure run has none by itself
            clients=max(one.clients for one in runs),  # only limits how many may be honest
        )
        for runs in alike.values()
    ]


def _of_one_client(guarantee: Guarantee) -> Guarantee:
    """Return the guarantee of the client of a cyclic schedule for which most counts.

    Of two runs a client may take part in one round more than of one with as many rounds.
    """
    who = guarantee.participation
    if who.kind != "cyclic":
        return guarantee
    counted, always = of_one_client(
        count((event, 1) for event in guarantee.events), who, guarantee.relation
    )
    events = tuple(event for event, times in counted for _ in range(times))
    return replace(guarantee, events=events, participation=always)


def _without_some_in_shares(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return events; if only some have noise in shares, these as central noise."""
    if len({event.in_shares for event in events}) < 2:
        return tuple(events)
    return tuple(event.as_central() for event in events)


def add_up(guarantees: Sequence[Guarantee], delta: float | None = None) -> tuple[float, float]:
    """Return epsilon and delta of several runs against other clients who observe all of them.

    Runs with the same sampling and relation are composed (`compose`). Others are added: epsilons
    and deltas, or epsilons at equal shares of a given `delta`. Without one, each sampling counts at
    the largest delta of its runs.

    **Guarantee:** an upper bound for a client of all of these runs or of some; under `replace` if
    all runs are, else under `zero_out`, which `replace` covers: contributions of zero are those of
    some other client. Assumes that no budget was chosen by results of earlier runs.
    `tests/privacy/test_guarantee.py`.
    """
    parts = compose(guarantees)
    if delta is not None:
        share = delta / max(len(parts), 1)
        return math.fsum(part.profile.epsilon(share) for part in parts), delta
    each = [(part.epsilon, part.delta) for part in parts]
    if any(epsilon == math.inf for epsilon, _ in each):  # impossible outputs add up to over delta
        each = [(one.epsilon, one.delta) for one in guarantees if one.events]
    return math.fsum(epsilon for epsilon, _ in each), math.fsum(delta for _, delta in each)


def spent_together(guarantees: Sequence[Guarantee]) -> str:
    """Return the total cost of several runs on the same data, as text."""
    epsilon, delta = add_up(guarantees)
    spent = sum(bool(guarantee.events) for guarantee in guarantees)
    runs = "1 run has" if spent == 1 else f"{spent} runs have"
    return (
        f"{runs} released results about the same clients. Against other clients who observe all "
        f"of these releases, and no others: epsilon = {round_up(epsilon)} at delta = "
        f"{show_delta(delta)}."
    )
