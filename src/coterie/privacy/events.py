"""What is released and who takes part: the words in which a plan is put to the accountant."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Relation = Literal["zero_out", "replace"]
"""What neighbours are: a client's contributions become zero, or become any others."""
Kind = Literal["everyone", "poisson", "fixed"]


@dataclass(frozen=True)
class Gaussian:
    """One Gaussian release of a sum to which each client contributes at most a bound.

    Args:
        noise_multiplier: Standard deviation of the noise over the bound.
        replaced: How much further a sum moves when a client is replaced than when it is zeroed:
            2 for clipped vectors, which can point opposite ways; sqrt(2) for second moments w w^T
            and for clipped vectors without negative entries, which cannot.

    **Guarantee:** with all clients taking part, s/z-Gaussian DP for noise multiplier z, with s = 1
    for `zero_out` and s = `replaced` for `replace` (Dong, Roth and Su 2022);
    `tests/accounting/test_laws.py`, `tests/accounting/test_pure.py`.
    """

    noise_multiplier: float
    replaced: float = 2.0

    def __post_init__(self) -> None:
        if not (self.noise_multiplier > 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier}: expected a positive finite number; "
                "use NonPrivate() for a release without noise"
            )
        if not 1 <= self.replaced <= 2:
            raise ValueError(
                f"replaced = {self.replaced}: expected the sensitivity under replace over that "
                "under zero_out, a number from 1 to 2; leave it at 2 if it is not known"
            )


@dataclass(frozen=True)
class LocalGaussian:
    """One round in which every client that takes part adds Gaussian noise to its own message.

    The server sees every noisy message and who sent it. All other clients together can subtract
    their own messages from the posted sum, so they see exactly the client's message, or that there
    is none: hiding the cohort is void against them too.

    Args:
        noise_multiplier: Standard deviation of the noise of one message over the bound.
        honest: How many clients, the protected one included, are trusted to add their noise in
            every round in which it takes part: for views in which only the sum is seen.
        claimed: This round's share of the epsilon that a paper prints for the whole plan. It is
            never believed: a plan that holds it is called a reproduction, and accounted for as it
            truly is.

    **Guarantee:** a round in which the client takes part is s/z-Gaussian DP for noise multiplier z,
    with s = 1 for `zero_out` (the contribution becomes zero, the noise is still added) and s = 2
    for `replace`, against the server and against all other clients together; sampling amplifies
    nothing, and rounds without the client cost nothing: what is told there does not depend on it.
    `tests/accounting/test_local.py`.
    """

    noise_multiplier: float
    honest: int = 1
    claimed: float | None = None

    def __post_init__(self) -> None:
        Gaussian(self.noise_multiplier)  # refuses what is no noise
        if type(self.honest) is not int or self.honest < 1:
            raise ValueError(
                f"honest = {self.honest}: expected a whole number of at least 1, the protected "
                "client included"
            )
        if self.claimed is not None and not (self.claimed > 0 and math.isfinite(self.claimed)):
            raise ValueError(
                f"claimed = {self.claimed}: expected a positive finite number (the epsilon "
                "printed), or None"
            )


@dataclass(frozen=True)
class Laplace:
    """One release that is purely epsilon-DP: a sum of vectors clipped in l1, with Laplace noise.

    **Guarantee:** with the client taking part, (epsilon, 0)-DP for `zero_out` and (2 epsilon,
    0)-DP for `replace` (Dwork, McSherry, Nissim and Smith 2006); `tests/accounting/test_pure.py`.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ValueError(
                f"epsilon = {self.epsilon}: expected a positive finite number, the l1 bound over "
                "the scale of the noise; use NonPrivate() for a release without noise"
            )


@dataclass(frozen=True)
class Wishart:
    """One release of a sum of second moments w w^T plus Wishart noise W_d(nu, c I).

    Args:
        degrees: nu - d + 1, the degrees of freedom that any one direction is left with.
        ratio: K^2 / c, for vectors w of norm at most K.
        claimed: This release's share of the epsilon that a paper prints for the whole plan. It is
            never believed: a plan that holds it is called a reproduction, and accounted for as it
            truly is.

    **Guarantee:** for `zero_out`, exactly as private as the number `ratio` plus chi-square noise of
    `degrees` degrees: never pure; `tests/accounting/test_wishart.py`.
    """

    degrees: int
    ratio: float
    claimed: float | None = None

    def __post_init__(self) -> None:
        if type(self.degrees) is not int or self.degrees < 2:
            raise ValueError(
                f"degrees = {self.degrees}: expected a whole number nu - d + 1 of at least 2, that "
                "is nu >= d + 1; with fewer the privacy loss is unbounded both ways: raise nu"
            )
        for name in ("ratio", "claimed"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                meaning = {"ratio": "K^2 / c", "claimed": "the epsilon printed, or None"}[name]
                raise ValueError(
                    f"{name} = {value}: expected a positive finite number ({meaning}); "
                    "use NonPrivate() for a release without noise"
                )


@dataclass(frozen=True)
class NonPrivate:
    """A release without noise: epsilon is infinite.

    **Guarantee:** none.
    """


Event = Gaussian | LocalGaussian | Laplace | Wishart | NonPrivate
Counted = tuple[tuple[Event, int], ...]
"""Different events, and how many releases there are of each."""
_NAMES: dict[str, type[Event]] = {
    "gaussian": Gaussian,
    "local_gaussian": LocalGaussian,
    "laplace": Laplace,
    "wishart": Wishart,
    "non_private": NonPrivate,
}


def list_runs(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Write events as plain data, equal neighbours together.

    >>> list_runs([Laplace(0.5), Laplace(0.5), NonPrivate()])
    [{'event': 'laplace', 'epsilon': 0.5, 'rounds': 2}, {'event': 'non_private', 'rounds': 1}]
    """
    names = {kind: name for name, kind in _NAMES.items()}
    return [
        {"event": names[type(event)], **asdict(event), "rounds": len(list(run))}
        for event, run in itertools.groupby(events)
    ]


def read_runs(runs: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """Read what `list_runs` wrote.

    Raises:
        ValueError: If an event has a name that is not known.
    """
    events: list[Event] = []
    for run in runs:
        kind = _NAMES.get(run["event"])
        if kind is None:
            raise ValueError(
                f"event = {run['event']!r}: expected one of {', '.join(_NAMES)}; "
                "a later version may know it"
            )
        values = {key: value for key, value in run.items() if key not in ("event", "rounds")}
        if type(run["rounds"]) is not int or run["rounds"] < 1:
            raise ValueError(
                f"rounds = {run['rounds']!r} of an event: expected a whole number >= 1"
            )
        events += [kind(**values)] * run["rounds"]
    return tuple(events)


@dataclass(frozen=True)
class Participation:
    """Who takes part in each round, as far as accounting cares.

    Args:
        kind: "everyone"; "poisson" (each client by its own coin); "fixed" (a cohort of fixed size
            drawn without replacement). Cohorts are drawn afresh each round.
        rate: The probability that a given client takes part in a given round.
        visible: Whether the adversary sees who takes part. A visible cohort amplifies nothing.

    **Guarantee:** none by itself; it states an assumption that the sampler has to meet.
    """

    kind: Kind
    rate: float = 1.0
    visible: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind = {self.kind!r}: expected one of {', '.join(get_args(Kind))}")
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"rate = {self.rate}: expected a probability above 0 and at most 1; "
                "give expected cohort size / number of clients"
            )
        if self.kind == "everyone" and self.rate != 1:
            raise ValueError(
                f"rate = {self.rate} with kind = 'everyone': expected 1; "
                "use kind 'poisson' to sample clients"
            )

    @property
    def shown(self) -> "Participation":
        """The same sampling, seen by the adversary."""
        return replace(self, visible=True)


def default_delta(clients: int) -> float:
    """Choose delta well below 1/clients, at which publishing one client in clear would pass.

    **Guarantee:** none; a convention.

    >>> default_delta(205), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    if clients < 1:
        raise ValueError(f"clients = {clients}: expected at least 1")
    return min(1e-5, 1 / (10 * clients))


def check_relation(relation: Relation) -> None:
    """Refuse a relation that has no account."""
    if relation not in get_args(Relation):
        raise ValueError(
            f"relation = {relation!r}: expected one of {', '.join(get_args(Relation))}"
        )


def check_delta(delta: float, events: Sequence[Event] | None = None) -> None:
    """Refuse a delta at which no epsilon is defined; 0 is one for these events if all are pure."""
    if 1e-30 <= delta < 1:
        return
    reason = ""
    if delta == 0 and events is not None:
        kinds = {type(event) for event in events}
        normal = bool(kinds & {Gaussian, LocalGaussian})
        if not normal and Wishart not in kinds:
            return
        reason = (
            "under Gaussian noise the privacy loss has no bound, so no epsilon holds at delta 0"
            if normal
            else "under Wishart noise some outputs are impossible for a neighbour, with positive "
            "probability, so no epsilon holds at delta 0"
        ) + "; use Laplace noise for a pure guarantee, or "
    raise ValueError(
        f"delta = {delta}: expected a number strictly between 0 and 1, of at least 1e-30; "
        f"{reason}default_delta(clients) gives a sound one"
    )
