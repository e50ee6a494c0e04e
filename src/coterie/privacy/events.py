"""Events: what a plan releases, and who takes part, as the accountant needs to know it.

The events are a closed vocabulary: `gaussian`, `gaussian_shares`, `gaussian_banded`,
`local_gaussian`, `laplace`, `wishart` and `non_private`. Each class holds plain numbers and answers
the accountant's questions, so that no other module tests its type. A mechanism of another package
states one of them: `Laplace` is the event of every purely epsilon-DP release, `Gaussian` of every
mu-GDP release.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from coterie.privacy.profiles import Law, Profile, WishartProfile, impossible, wishart_law

Relation = Literal["zero_out", "replace"]
"""The neighbouring relation: a client's contributions become zero, or become any others."""
Kind = Literal["everyone", "poisson", "fixed", "cyclic"]
SQRT2 = math.sqrt(2.0)  # in float64 this lies above the square root of two
SCALE: dict[Relation, float] = {"zero_out": 1.0, "replace": 2.0}
"""Sensitivity of a clipped sum in units of the bound."""


@dataclass(frozen=True)
class Participation:
    """The clients of each round, as the accountant needs to know them.

    Args:
        kind: "everyone"; "poisson" (each client independently); "fixed" (a cohort of fixed size
            drawn without replacement), where each round draws a new cohort; "cyclic" (once in b
            rounds, by a public schedule).
        rate: The probability that a given client takes part in a given round; 1/b for "cyclic".
        visible: Whether the adversary observes the cohort. A visible cohort amplifies nothing.

    **Guarantee:** none; it states an assumption that the sampler has to meet.
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
        if self.kind == "cyclic" and not (self.visible and self.rate == 1 / self.period):
            raise ValueError(
                f"rate = {self.rate}, visible = {self.visible} with kind = 'cyclic': expected one "
                "over a whole number of rounds, and visible = True, since the schedule is public"
            )

    @property
    def period(self) -> int:
        """How many rounds there are for each in which a client takes part, about."""
        return round(1 / self.rate)

    @property
    def shown(self) -> "Participation":
        """The same sampling with a visible cohort."""
        return replace(self, visible=True)

    @property
    def to_others(self) -> "Participation":
        """The sampling as all other clients together observe it.

        From their own participation they know a cohort of fixed size exactly; under Poisson
        sampling they learn nothing about another client.
        """
        return self.shown if self.kind == "fixed" else self

    @property
    def always(self) -> "Participation":
        """A client in every round: what a coordinator that draws the cohorts can arrange.

        A public schedule stays as it is: a client's site refuses any other round.
        """
        return self if self.kind == "cyclic" else Participation("everyone", visible=True)

    def to_json(self) -> dict[str, Any]:
        """Return the sampling as the fields of a certificate."""
        cohort = "visible" if self.visible else "hidden"
        return {"sampling": self.kind, "rate": self.rate, "cohort": cohort}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Participation":
        """Return the sampling that `to_json` wrote."""
        if data["cohort"] not in ("visible", "hidden"):
            raise ValueError(f"cohort = {data['cohort']!r}: expected 'visible' or 'hidden'")
        return cls(data["sampling"], float(data["rate"]), data["cohort"] == "visible")


class Event:
    """One release, as the ledger records it. Subclasses are frozen dataclasses of plain numbers.

    Attributes:
        local: Whether clients add the noise to their own messages.
        in_shares: Whether clients add the noise in shares, of which only sums are observed.
        impure: Why no epsilon holds at delta = 0; empty if one does.
        noise_text: The noise as text, with `{}` for the value of the field `noise_field`.
        honest: How many clients are trusted to add their noise; 0 for central noise.
        replaced: Sensitivity under replace over that under zero_out.
        claimed: The share of the epsilon that a paper states for the plan; None without a claim.
    """

    name: ClassVar[str]
    local: ClassVar[bool] = False
    in_shares: ClassVar[bool] = False
    noisy: ClassVar[bool] = True
    impure: ClassVar[str] = ""
    noise_text: ClassVar[str] = ""
    noise_field: ClassVar[str] = ""
    honest: int = 0
    replaced: float = 2.0
    claimed: float | None = None

    @property
    def unbounded(self) -> str:
        """Why no epsilon is finite at any useful delta; empty if one may be."""
        return ""

    def check(self, relation: Relation) -> None:
        """Raise ValueError if no account is proved under this relation."""

    def check_clients(self, clients: int) -> None:
        """Raise ValueError if the event needs more clients than there are."""

    def check_sampling(self, participation: Participation) -> None:
        """Raise ValueError if no account is proved under this sampling."""

    def as_seen(self) -> "Event":
        """Return the event as the server and all other clients together observe it."""
        return self

    def as_summed(self) -> "Event":
        """Return the event for an adversary who observes only sums over clients."""
        return self

    def as_central(self) -> "Event":
        """Return the event for other clients, as if a server had added the noise."""
        return self

    def as_scheduled(self) -> "Event":
        """Return the event of a round in which the client takes part, by a public schedule."""
        return self

    def nonnegative(self) -> "Event":
        """Return the event for contributions without negative entries."""
        return self

    def gaussian_noise(self, relation: Relation) -> float | None:
        """Return the z with mu = 1/z (zero_out) or 2/z (replace); None if not Gaussian."""
        return None

    def pure_epsilon(self, participation: Participation, relation: Relation) -> float | None:
        """Return the epsilon of one pure release, amplified by sampling; None if not pure."""
        return None

    def loss_law(self, direction: str) -> Law | None:
        """Return the privacy loss of an event that is neither Gaussian nor pure."""
        return None

    def profile(self) -> Profile | None:
        """Return the exact profile of one release, where there is a closed form of its own."""
        return None


def _check_positive(name: str, value: float, meaning: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name} = {value}: expected a positive finite number ({meaning}); "
            "use NonPrivate() for a release without noise"
        )


@dataclass(frozen=True)
class Gaussian(Event):
    """One Gaussian release of a sum to which each client contributes at most a bound.

    Args:
        noise_multiplier: Standard deviation of the noise over the bound.
        replaced: Sensitivity under replace over that under zero_out: 2 for clipped vectors, which
            can have opposite signs; sqrt(2) for second moments w w^T and for clipped vectors
            without negative entries.

    **Guarantee:** with all clients taking part, s/z-Gaussian DP for noise multiplier z, with s = 1
    for `zero_out` and s = `replaced` for `replace` (Dong, Roth and Su 2022);
    `tests/privacy/test_accounting.py`, `tests/privacy/test_profiles_pure.py`.
    """

    name: ClassVar[str] = "gaussian"
    impure: ClassVar[str] = (
        "under Gaussian noise the privacy loss has no bound, so no epsilon holds at delta 0"
    )
    noise_text: ClassVar[str] = "Gaussian noise of z times the sensitivity, z = {}"
    noise_field: ClassVar[str] = "noise_multiplier"
    noise_multiplier: float
    replaced: float = 2.0

    def __post_init__(self) -> None:
        _check_positive("noise_multiplier", self.noise_multiplier, "deviation over the bound")
        if not 1 <= self.replaced <= 2:
            raise ValueError(
                f"replaced = {self.replaced}: expected the sensitivity under replace over that "
                "under zero_out, a number from 1 to 2; leave it at 2 if it is not known"
            )

    def gaussian_noise(self, relation: Relation) -> float:
        """Return the noise multiplier, larger under replace if `replaced` is below 2."""
        stretch = 2 / self.replaced if relation == "replace" else 1.0
        return self.noise_multiplier * stretch

    def nonnegative(self) -> "Gaussian":
        """Return the event with `replaced` of at most sqrt(2)."""
        return replace(self, replaced=min(self.replaced, SQRT2))


@dataclass(frozen=True)
class SharedGaussian(Gaussian):
    """One sum to which every client adds a share of the noise before anybody observes it.

    Args:
        noise_multiplier: Of the noise that `minimum_clients - corrupt` shares carry, over the
            bound.
        replaced: As for `Gaussian`.
        minimum_clients: How many clients a sum has at least; with fewer it is not opened.
        corrupt: How many clients at most collude with the adversary; their shares do not count.

    **Guarantee:** as `Gaussian`, for an adversary who observes the sum and colludes with at most
    `corrupt` clients, the coordinator among its members or not (see `coterie.privacy.shares`);
    `tests/privacy/test_shares.py`.
    """

    name: ClassVar[str] = "gaussian_shares"
    in_shares: ClassVar[bool] = True
    noise_text: ClassVar[str] = "Gaussian noise of z times the bound, added in shares, z = {}"
    minimum_clients: int = 1
    corrupt: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("minimum_clients", 1), ("corrupt", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} = {value}: expected a whole number of at least {least}")
        if self.corrupt >= self.minimum_clients:
            raise ValueError(
                f"corrupt = {self.corrupt} of at least {self.minimum_clients} clients "
                "(minimum_clients): no honest share is left; expect fewer, or ask for more clients"
            )

    def check_clients(self, clients: int) -> None:
        """Raise ValueError for a minimum above the number of clients."""
        if self.minimum_clients > clients:
            raise ValueError(
                f"minimum_clients = {self.minimum_clients}: expected at most {clients}, the number "
                "of clients"
            )

    def as_central(self) -> Gaussian:
        """Return central noise of the honest shares."""
        return self.against(self.minimum_clients - self.corrupt)

    def against(self, honest: int) -> Gaussian:
        """Return the release as an adversary observes it who does not know so many shares."""
        factor = math.sqrt(honest / (self.minimum_clients - self.corrupt))
        return Gaussian(self.noise_multiplier * factor, self.replaced)


@dataclass(frozen=True)
class BandedGaussian(Gaussian):
    """One sum with noise that is correlated over at most `bands` rounds.

    Args:
        noise_multiplier: Of each normal that the noise is made of, over the bound.
        replaced: As for `Gaussian`.
        bands: The width of the band of the strategy, whose columns have norm 1 at most.

    **Guarantee:** each round in which a client takes part counts as `Gaussian` of the same noise
    multiplier, if there are at least `bands - 1` rounds between two of them (see
    `coterie.privacy.banded`); `tests/privacy/test_banded.py`.
    """

    name: ClassVar[str] = "gaussian_banded"
    noise_text: ClassVar[str] = "banded Gaussian noise, of normals of z times the bound, z = {}"
    bands: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.bands) is not int or self.bands < 1:
            raise ValueError(f"bands = {self.bands}: expected a whole number of at least 1")

    def as_scheduled(self) -> Gaussian:
        """Return independent noise: the client is in one round of each band only."""
        return Gaussian(self.noise_multiplier, self.replaced)

    def check_sampling(self, participation: Participation) -> None:
        """Raise ValueError unless clients take part at most once in `bands` rounds."""
        if participation.rate == 1:
            raise ValueError(
                "banded noise where everybody takes part in every round: the best noise is "
                "independent there; use gaussian noise, or a cyclic schedule with a smaller cohort"
            )
        if participation.kind != "cyclic" or participation.period < self.bands:
            raise ValueError(
                f"banded noise of {self.bands} bands with {participation.kind} sampling: expected "
                "a cyclic schedule of at least as many rounds, because the noise of rounds within "
                "a band is correlated, and a client may take part in one of them only"
            )


def share_counts(
    clients: int, minimum_clients: int | None = None, corrupt: int | None = None
) -> tuple[int, int]:
    """Return how many clients a sum has at least, and how many may collude; defaults where None.

    **Guarantee:** none; a convention: two thirds of all clients, and a tenth of these.

    >>> share_counts(537), share_counts(537, corrupt=0)
    ((358, 35), (358, 0))
    """
    least = -(-2 * clients // 3) if minimum_clients is None else minimum_clients
    return least, least // 10 if corrupt is None else corrupt


@dataclass(frozen=True)
class LocalGaussian(Event):
    """One round in which every participating client adds Gaussian noise to its own message.

    The server observes every noisy message and its sender. All other clients together can subtract
    their own messages from the released sum, so they observe the client's message, or its absence:
    hiding the cohort has no effect against them either.

    Args:
        noise_multiplier: Standard deviation of the noise of one message over the bound.
        honest: How many clients, the protected one included, are trusted to add their noise in
            every round in which it takes part: for views that observe only sums.
        claimed: This round's share of the epsilon that a paper states for the whole plan. It is not
            used: the plan is labelled a reproduction, and accounted for like any other.

    **Guarantee:** a round in which the client takes part is s/z-Gaussian DP for noise multiplier z,
    with s = 1 for `zero_out` (the contribution becomes zero, the noise is still added) and s = 2
    for `replace`, against the server and against all other clients together. Sampling amplifies
    nothing; rounds without the client cost nothing, as their messages do not depend on it.
    `tests/privacy/test_accounting_local.py`.
    """

    name: ClassVar[str] = "local_gaussian"
    local: ClassVar[bool] = True
    impure: ClassVar[str] = Gaussian.impure
    noise_text: ClassVar[str] = "Gaussian noise of z times the bound, added by each client, z = {}"
    noise_field: ClassVar[str] = "noise_multiplier"
    noise_multiplier: float
    honest: int = 1
    claimed: float | None = None

    def __post_init__(self) -> None:
        _check_positive("noise_multiplier", self.noise_multiplier, "deviation over the bound")
        if type(self.honest) is not int or self.honest < 1:
            raise ValueError(
                f"honest = {self.honest}: expected a whole number of at least 1, the protected "
                "client included"
            )
        if self.claimed is not None:
            _check_positive("claimed", self.claimed, "the epsilon as published, or None")

    def as_seen(self) -> Gaussian:
        """Return a Gaussian release of one message."""
        return Gaussian(self.noise_multiplier)

    def as_summed(self) -> Gaussian:
        """Return a Gaussian release with the noise of the honest clients."""
        return Gaussian(self.noise_multiplier * math.sqrt(self.honest))


@dataclass(frozen=True)
class Laplace(Event):
    """One release that is purely epsilon-DP, such as a sum clipped in l1 with Laplace noise.

    **Guarantee:** with the client taking part, (epsilon, 0)-DP for `zero_out` and (2 epsilon,
    0)-DP for `replace` (Dwork, McSherry, Nissim and Smith 2006);
    `tests/privacy/test_profiles_pure.py`.
    """

    name: ClassVar[str] = "laplace"
    noise_text: ClassVar[str] = "Laplace noise of the sensitivity over e, e = {}"
    noise_field: ClassVar[str] = "epsilon"
    epsilon: float

    def __post_init__(self) -> None:
        _check_positive("epsilon", self.epsilon, "the l1 bound over the scale of the noise")

    def pure_epsilon(self, participation: Participation, relation: Relation) -> float:
        """Return the epsilon of one release, amplified by sampling."""
        return amplify(self.epsilon, participation, relation)


@dataclass(frozen=True)
class Wishart(Event):
    """One release of a sum of second moments w w^T plus Wishart noise W_d(nu, c I).

    Args:
        degrees: nu - d + 1, the degrees of freedom of the noise in any one direction.
        ratio: K^2 / c, for vectors w of norm at most K.
        claimed: This release's share of the epsilon that a paper states for the whole plan. It is
            not used: the plan is labelled a reproduction, and accounted for like any other.

    **Guarantee:** for `zero_out`, exactly as private as the number `ratio` plus chi-square noise of
    `degrees` degrees: never pure; `tests/privacy/test_profiles_wishart.py`.
    """

    name: ClassVar[str] = "wishart"
    impure: ClassVar[str] = (
        "under Wishart noise some outputs are impossible for a neighbour, with positive "
        "probability, so no epsilon holds at delta 0"
    )
    noise_text: ClassVar[str] = "Wishart noise of scale C squared over r, r = {}"
    noise_field: ClassVar[str] = "ratio"
    degrees: int
    ratio: float
    claimed: float | None = None

    def __post_init__(self) -> None:
        if type(self.degrees) is not int or self.degrees < 2:
            raise ValueError(
                f"degrees = {self.degrees}: expected a whole number nu - d + 1 of at least 2, that "
                "is nu >= d + 1; with fewer the privacy loss is unbounded both ways: raise nu"
            )
        _check_positive("ratio", self.ratio, "K^2 / c")
        if self.claimed is not None:
            _check_positive("claimed", self.claimed, "the epsilon as published, or None")

    @property
    def unbounded(self) -> str:
        """Why no epsilon is finite, if nearly every output identifies the client."""
        sure = impossible(self.degrees, self.ratio) > 1 - 1e-9
        return "none: Wishart noise reveals the client in nearly every output" if sure else ""

    def check(self, relation: Relation) -> None:
        """Raise ValueError under replace, for which no account is offered."""
        if relation == "replace":
            raise ValueError(
                "relation = 'replace' with Wishart noise: replacing a client makes outputs "
                "impossible in both directions, and no account is offered; use relation "
                "'zero_out' (if it gives (epsilon, delta), replacing is (2 epsilon, "
                "(1 + e^epsilon) delta)), or Gaussian noise"
            )

    def loss_law(self, direction: str) -> Law:
        """Return the privacy loss of one release."""
        return wishart_law(self.degrees, self.ratio, direction)

    def profile(self) -> WishartProfile:
        """Return the exact profile of one release."""
        return WishartProfile(self.degrees, self.ratio)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without noise: epsilon is infinite.

    **Guarantee:** none.
    """

    name: ClassVar[str] = "non_private"
    noisy: ClassVar[bool] = False

    @property
    def unbounded(self) -> str:
        """Why no epsilon is finite."""
        return "none: something is released without noise"


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        Gaussian,
        SharedGaussian,
        BandedGaussian,
        LocalGaussian,
        Laplace,
        Wishart,
        NonPrivate,
    )
}
"""The closed vocabulary, by name."""
Counted = tuple[tuple[Event, int], ...]
"""Different events, and the number of releases of each."""


def list_runs(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return events as plain data, equal neighbours together.

    >>> list_runs([Laplace(0.5), Laplace(0.5), NonPrivate()])
    [{'event': 'laplace', 'epsilon': 0.5, 'rounds': 2}, {'event': 'non_private', 'rounds': 1}]
    """
    return [
        {"event": event.name, **asdict(event), "rounds": len(list(run))}  # type: ignore[call-overload]
        for event, run in itertools.groupby(events)
    ]


def read_runs(runs: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """Return the events that `list_runs` wrote; raise ValueError for an unknown one."""
    events: list[Event] = []
    for run in runs:
        kind = EVENTS.get(run["event"])
        if kind is None:
            raise ValueError(
                f"event = {run['event']!r}: expected one of {', '.join(EVENTS)}; "
                "a later version may know it"
            )
        values = {key: value for key, value in run.items() if key not in ("event", "rounds")}
        if type(run["rounds"]) is not int or run["rounds"] < 1:
            raise ValueError(
                f"rounds = {run['rounds']!r} of an event: expected a whole number >= 1"
            )
        events += [kind(**values)] * run["rounds"]
    return tuple(events)


def default_delta(clients: int) -> float:
    """Return a delta well below 1/clients, at which publishing one client in clear would pass.

    **Guarantee:** none; a convention.

    >>> default_delta(205), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    if clients < 1:
        raise ValueError(f"clients = {clients}: expected at least 1")
    return min(1e-5, 1 / (10 * clients))


def check_relation(relation: Relation) -> None:
    """Raise ValueError for an unknown relation."""
    if relation not in get_args(Relation):
        raise ValueError(
            f"relation = {relation!r}: expected one of {', '.join(get_args(Relation))}"
        )


def check_delta(delta: float, events: Sequence[Event] | None = None) -> None:
    """Raise ValueError for a delta without an epsilon; 0 is valid if all these events are pure."""
    if 1e-30 <= delta < 1:
        return
    reason = ""
    if delta == 0 and events is not None:
        reasons = sorted({event.impure for event in events} - {""})
        if not reasons:
            return
        reason = f"{reasons[0]}; use Laplace noise for a pure guarantee, or "
    raise ValueError(
        f"delta = {delta}: expected a number strictly between 0 and 1, of at least 1e-30; "
        f"{reason}default_delta(clients) gives a sound one"
    )


def amplify(epsilon: float, participation: Participation, relation: Relation) -> float:
    """Return the epsilon of a sampled release that is epsilon-DP (`zero_out`) with the client.

    With P0 the law of the output when the client stays away, P1 and Q1 when it takes part with
    either neighbour's data, and q the rate, a hidden cohort gives P = (1-q) P0 + q P1 against Q =
    (1-q) P0 + q Q1.

    Poisson: clients are drawn independently, so P1 and Q1 are within e^epsilon of P0.
    `zero_out` has Q1 = P0: P/Q <= 1 - q + q e^epsilon, and Q/P <= 1 / (1 - q + q e^-epsilon), which
    is smaller (harmonic and arithmetic mean). `replace`: P/Q is at most the product of both.

    Fixed size under `replace`: without the client another one is drawn, a replacement, so
    P0, P1 and Q1 are pairwise within a = e^(2 epsilon). Then (1 + q (a - 1)) Q - P = q ((1-q)(a-1)
    P0 + (1 + q (a-1)) Q1 - P1) >= 0, since the weights of P0 and Q1 add up to a.

    Elsewhere nothing is amplified: visible sampling is no worse than full participation, and hiding
    a cohort is post-processing.

    **Guarantee:** the release is purely DP with the returned epsilon;
    `tests/privacy/test_profiles_pure.py`.
    """
    rate, whole = participation.rate, epsilon * SCALE[relation]
    if rate == 1 or participation.visible:
        return whole
    if participation.kind == "poisson":
        up = _log_mean(epsilon, rate)
        return up if relation == "zero_out" else min(whole, up - _log_mean(-epsilon, rate))
    return _log_mean(whole, rate) if relation == "replace" else whole


def _log_mean(exponent: float, rate: float) -> float:
    """Return log(1 - rate + rate e^exponent)."""
    if exponent < 30:
        return math.log1p(rate * math.expm1(exponent))
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
