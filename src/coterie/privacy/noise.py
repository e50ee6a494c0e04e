"""Kinds of noise: from a budget to the mechanism of every round.

A method states the shape it needs released, a plan its budget; the kind of noise turns both into
calibrated mechanisms, so that the account of all rounds meets the budget. `Noise.choices` has the
kinds below and those of other packages: see `register_mechanism`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from coterie.core.environment import entry_points
from coterie.privacy import NOISES
from coterie.privacy.banded import banded_sums
from coterie.privacy.calibrate import (
    calibrate,
    calibrate_event,
    calibrate_wishart,
)
from coterie.privacy.events import (
    SQRT2,
    BandedGaussian,
    Event,
    Gaussian,
    Laplace,
    Participation,
    Relation,
    check_delta,
    default_delta,
    share_counts,
)
from coterie.privacy.guarantee import check_honest
from coterie.privacy.mechanisms import (
    Block,
    BlockSum,
    GaussianRows,
    GaussianSum,
    LaplaceSum,
    LocalGaussianSum,
    Mechanism,
    Shape,
    check_blocks,
    replaced_by,
)
from coterie.privacy.moments import GaussianGram, Squares, WishartGram
from coterie.privacy.published import published_sigma, published_spending, rows_to_clients
from coterie.privacy.shares import GaussianShares

_REGISTERED: dict[str, type["_Registered"]] = {}
M = TypeVar("M", bound=type[Mechanism])


@dataclass(frozen=True, kw_only=True)
class Request:
    """The releases for which noise is requested: for a budget, or of a given noise.

    Attributes:
        clip: The bound on a client's contribution; for second moments, on its vector.
        epsilon: The budget of all rounds, or None.
        noise_multiplier: The noise of a round of weight 1, or None.
        rows: If a published proof protects single rows: the most rows of a client, from which the
            budget is converted (see `published`); None otherwise.
        blocks: The bounds of the leaves of a contribution; () for one clip on all of them.
    """

    shape: Shape
    clip: float
    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    weights: tuple[float, ...]
    clients: int
    participation: Participation
    relation: Relation
    rows: int | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def budget(self) -> dict[str, Any]:
        """The target, weights, participation and relation, as `calibrate` takes them.

        A budget holds against all other clients together, who know a cohort of fixed size.
        """
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "weights": self.weights,
            "participation": self.participation.to_others,
            "relation": self.relation,
        }


class Noise(ABC):
    """A kind of noise.

    Attributes:
        kind: Its name in `Privacy(noise=...)`, `--noise` and plan.toml.
        local: Whether clients add the noise themselves: then the cohort is visible.
        by_block: Whether it supports contributions with a bound for each leaf.
        by_row: Whether it supports recipes whose proof protects single rows.
    """

    kind: ClassVar[str] = ""
    shapes: ClassVar[tuple[Shape, ...]] = ()
    local: ClassVar[bool] = False
    by_block: ClassVar[bool] = False
    by_row: ClassVar[bool] = True

    def mechanisms(self, request: Request) -> tuple[Mechanism, ...]:
        """Return the mechanism of each round; raise ValueError for an unsupported request."""
        if request.shape not in self.shapes:
            names = ", ".join(shape.value for shape in self.shapes)
            raise ValueError(
                f"{self.kind} noise supports releases of shape {names}; this method releases "
                f"{request.shape.value}: use gaussian noise"
            )
        for name, value in (("clip", request.clip), ("epsilon", request.epsilon)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: expected a positive number")
        if request.blocks:
            self._check_blocks(request)
        if request.rows is not None and not self.by_row:
            raise ValueError(
                f"{self.kind} noise protects whole clients, not single rows: use gaussian"
            )
        return self._make(request)

    def _check_blocks(self, request: Request) -> None:
        names = ", ".join(block.name for block in request.blocks)
        if not self.by_block:
            raise ValueError(
                f"{self.kind} noise supports contributions under one clip; this method bounds "
                f"{names} separately: use gaussian noise, or a method under one clip (pmtl)"
            )
        if request.shape is not Shape.SUM or request.rows is not None:
            raise ValueError(
                f"blocks {names} apply to sums of whole clients' contributions; got shape "
                f"{request.shape.value}, rows = {request.rows}: leave blocks empty"
            )
        check_blocks(request.blocks)

    @abstractmethod
    def _make(self, request: Request) -> tuple[Mechanism, ...]: ...

    def stretch(self, clients: int) -> float:
        """Return the deviation of the noise in a sum over that which its event counts."""
        return 1.0

    def usual_delta(self, clients: int) -> float:
        """Return the default delta of a budget."""
        return default_delta(clients)

    @classmethod
    def named(cls, kind: str) -> "Noise":
        """Return a kind of noise with its default settings, by name."""
        kinds = cls.choices()
        if kind not in kinds:
            raise ValueError(f"noise = {kind!r}: expected one of {', '.join(sorted(kinds))}")
        return kinds[kind]()

    @classmethod
    def choices(cls) -> Mapping[str, type["Noise"]]:
        """Return the kinds by name: those of this file, registered ones, and entry points."""
        for point in entry_points(group="coterie.mechanisms"):
            found = point.load()
            if isinstance(found, type) and issubclass(found, Mechanism):
                register_mechanism(point.name)(found)
        built_in: tuple[type[Noise], ...] = (
            GaussianNoise,
            SharedNoise,
            BandedNoise,
            LaplaceNoise,
            WishartNoise,
            PublishedWishart,
            LocalNoise,
            PublishedLocal,
        )
        return {**{kind.kind: kind for kind in built_in}, **_REGISTERED}


def register_mechanism(name: str) -> Callable[[M], M]:
    """Register a mechanism class as the kind of noise `name`; use it as a decorator.

    Its instances are made as `Class(bound, noise_multiplier)`. A budget is met by the least
    noise multiplier whose events have an epsilon within it. Raise ValueError if the name is taken.
    """

    def put(cls: M) -> M:
        known = _REGISTERED.get(name)
        if known is not None and _origin(known.made) == _origin(cls):
            return cls  # one class for each kind, so that equal plans compare equal
        if name in NOISES or known is not None:
            raise ValueError(f"noise = {name!r} is taken; choose another name")
        settings = {
            "__doc__": cls.__doc__,
            "kind": name,
            "shapes": cls.shapes,
            "local": cls.local,
            "made": cls,
        }
        _REGISTERED[name] = dataclass(frozen=True)(type(cls.__name__, (_Registered,), settings))
        return cls

    return put


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


class _Searched(Noise):
    """Noise whose least amount is searched for, by the events of its mechanisms."""

    @abstractmethod
    def _one(self, request: Request, less_noise: float) -> Mechanism: ...

    def _event(self, request: Request, less_noise: float) -> Event:
        return self._one(request, less_noise).event()

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        if request.noise_multiplier is not None:
            base = 1 / request.noise_multiplier
        else:
            base = calibrate_event(partial(self._event, request), **request.budget)
        return tuple(self._one(request, base * weight) for weight in request.weights)


class _Registered(_Searched):
    """The kind of noise of a registered mechanism class."""

    by_row: ClassVar[bool] = False
    made: ClassVar[Any]  # a subclass of `Mechanism` made of bound and noise multiplier

    def _one(self, request: Request, less_noise: float) -> Mechanism:
        one: Mechanism = self.made(request.clip, 1 / less_noise)
        return one

    def usual_delta(self, clients: int) -> float:
        """Return 0 for pure noise."""
        return default_delta(clients) if self.made(1.0, 1.0).event().impure else 0.0


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Gaussian noise (default): exact accounts, and the least noise of all kinds here."""

    kind: ClassVar[str] = "gaussian"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM, Shape.GRAM, Shape.SQUARES, Shape.ROWS)
    by_block: ClassVar[bool] = True

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        base = request.noise_multiplier
        if base is None and request.rows is not None and request.epsilon is not None:
            base = rows_to_clients(request.epsilon, request.delta, request.weights, request.rows)
        elif base is None:
            replaced = SQRT2 if request.shape in (Shape.GRAM, Shape.SQUARES) else 2.0
            replaced = replaced_by(request.blocks) if request.blocks else replaced
            base = calibrate(replaced=replaced, **request.budget)
        return tuple(self._one(request, base / weight) for weight in request.weights)

    def _one(self, request: Request, multiplier: float) -> Mechanism:
        if request.blocks:
            return BlockSum(request.blocks, multiplier)
        if request.shape is Shape.GRAM:
            return GaussianGram(request.clip, multiplier)
        if request.shape is Shape.SQUARES:
            return Squares(GaussianSum(request.clip**2, multiplier))
        if request.shape is Shape.ROWS:
            return GaussianRows(request.clip, multiplier, request.clients)
        return GaussianSum(request.clip, multiplier)


@dataclass(frozen=True)
class SharedNoise(GaussianNoise):
    """Gaussian noise that all clients add in shares: private to the coordinator too.

    For secure aggregation (`trust = "nobody"`): a budget holds against the coordinator and the
    other clients, if at most `corrupt` clients collude. See `coterie.privacy.shares`. Sampling
    reduces no noise, because the coordinator could draw a client in every round.

    Attributes:
        minimum_clients: How many clients a sum has at least; fewer answers are not released.
            Default: two thirds of all.
        corrupt: How many clients may collude, at most. Default: a tenth of `minimum_clients`.
    """

    kind: ClassVar[str] = "shares"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM, Shape.GRAM, Shape.SQUARES)
    by_row: ClassVar[bool] = False
    minimum_clients: int | None = None
    corrupt: int | None = None

    def counts(self, clients: int) -> tuple[int, int]:
        """Return the minimum and the number of corrupt clients, of so many clients."""
        return share_counts(clients, self.minimum_clients, self.corrupt)

    def stretch(self, clients: int) -> float:
        """Return the noise of all shares over the planned noise."""
        least, corrupt = self.counts(clients)
        return math.sqrt(clients / (least - corrupt))

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        least, corrupt = self.counts(request.clients)
        return tuple(
            GaussianShares(one, request.clients, least, corrupt)  # type: ignore[arg-type]
            for one in super()._make(replace(request, participation=request.participation.always))
        )


@dataclass(frozen=True)
class BandedNoise(GaussianNoise):
    """Gaussian noise that later rounds take back in part: less of it where releases are added up.

    For clients that take part once in b rounds by a public schedule (`Cyclic`). See
    `coterie.privacy.banded`.
    """

    kind: ClassVar[str] = "banded"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    by_row: ClassVar[bool] = False

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        who = request.participation
        BandedGaussian(1.0).check_sampling(who)
        if len(set(request.weights)) > 1:
            raise ValueError(
                f"weights = {request.weights[:3]}...: banded noise is accounted for rounds of "
                "equal weight; spend evenly"
            )
        sums = super()._make(request)
        return banded_sums(sums, who.period)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LaplaceNoise(_Searched):
    """Laplace noise on sums clipped in l1: a pure epsilon, delta = 0."""

    kind: ClassVar[str] = "laplace"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM, Shape.SQUARES)

    def _one(self, request: Request, less_noise: float) -> Mechanism:
        if request.shape is Shape.SQUARES:
            return Squares(LaplaceSum(request.clip**2, less_noise))
        return LaplaceSum(request.clip, less_noise)

    def _event(self, request: Request, less_noise: float) -> Event:
        return Laplace(less_noise)  # the search may try what `LaplaceSum` refuses

    def usual_delta(self, clients: int) -> float:
        """Return 0: the noise is pure."""
        return 0.0


@dataclass(frozen=True)
class WishartNoise(Noise):
    """Wishart noise on second moments, calibrated by its exact profile; zero_out only.

    Never less noise than Gaussian, to which it tends as `degrees` grow (ADR 14).

    Attributes:
        degrees: nu - d + 1; at least 2, and best above 1000.
    """

    kind: ClassVar[str] = "wishart"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.GRAM,)
    degrees: int = 1000

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        if request.epsilon is None:
            raise ValueError("wishart noise is calibrated: give epsilon, not noise_multiplier")
        ratio = calibrate_wishart(degrees=self.degrees, **request.budget)
        return tuple(
            WishartGram(request.clip, self.degrees, request.clip**2 / (ratio * weight))
            for weight in request.weights
        )


@dataclass(frozen=True)
class PublishedWishart(Noise):
    """The noise that Liang et al. publish: a reproduction, NOT A GUARANTEE (see docs/privacy.md).

    W_d(d + 1, s / (2 epsilon_t) I). The report shows the claimed epsilon next to the true epsilon
    and delta.

    Attributes:
        sensitivity: s, "2K" as in their Algorithms 2 and 3, or "K^2" as in Algorithm 1.
    """

    kind: ClassVar[str] = "wishart_paper"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.GRAM,)
    sensitivity: Literal["2K", "K^2"] = "2K"

    def __post_init__(self) -> None:
        if self.sensitivity not in ("2K", "K^2"):
            raise ValueError(f"sensitivity = {self.sensitivity!r}: expected 2K or K^2")

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        if request.epsilon is None:
            raise ValueError("wishart_paper noise is computed from epsilon: give epsilon")
        budgets = published_spending(request.epsilon, request.delta, request.weights)
        total, clip = math.fsum(budgets), request.clip
        width = {"2K": 2 * clip, "K^2": clip**2}[self.sensitivity]
        # Each round claims its share of the whole, so that the claims add up to it.
        return tuple(
            WishartGram(clip, 2, width / (2 * b), request.epsilon * b / total, centred=False)
            for b in budgets
        )


@dataclass(frozen=True)
class LocalNoise(Noise):
    """Gaussian noise that each client adds to its own contribution: private to the server too.

    A budget holds against the server and all other clients together, who observe the cohort:
    sampling hides nothing, it only reduces the rounds in which a client takes part. The released
    sum carries the noise of a whole cohort.

    Attributes:
        honest: How many clients, the protected one included, are trusted to add their noise in
            every round in which it takes part; only views that observe sums depend on it. At most
            the size of the smallest cohort: the fixed size, all clients if everybody takes part, 1
            under Poisson sampling.
    """

    kind: ClassVar[str] = "local"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    local: ClassVar[bool] = True
    by_row: ClassVar[bool] = False
    honest: int = 1

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        check_honest(self.honest, request.participation, request.clients)
        base = request.noise_multiplier
        if base is None:
            seen = {**request.budget, "participation": request.participation.shown}
            base = calibrate(**seen)
        cohort = request.participation.rate * request.clients
        return tuple(
            LocalGaussianSum(request.clip, base / weight, cohort, self.honest)
            for weight in request.weights
        )


@dataclass(frozen=True)
class PublishedLocal(Noise):
    """The noise that Wu et al. (DPFedMTL) publish: a reproduction, NOT A GUARANTEE.

    Each client adds N(0, sigma^2 S^2), S = 2 C K/M, K of M clients expected in a round. Their sigma
    is `noise_multiplier`, or sqrt(2 log(1.25/delta))/epsilon of `epsilon`, which is all that the
    published epsilon means. The report shows it next to the true epsilon (see docs/privacy.md).
    """

    kind: ClassVar[str] = "local_paper"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    local: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    def _make(self, request: Request) -> tuple[Mechanism, ...]:
        check_delta(request.delta, (Gaussian(1.0),))
        if len(set(request.weights)) > 1:
            raise ValueError(
                f"weights = {request.weights[:3]}...: local_paper noise is the same in every "
                "round; spend evenly"
            )
        sigma = request.noise_multiplier
        if sigma is None:
            assert request.epsilon is not None
            sigma = published_sigma(request.epsilon, request.delta)
        rate, rounds = request.participation.rate, len(request.weights)
        # Each round claims its share of the label, so that the claims add up to it.
        share = published_sigma(sigma, request.delta) / rounds
        one = LocalGaussianSum(request.clip, 2 * sigma * rate, rate * request.clients, 1, share)
        return (one,) * rounds
