"""The interface of a method: a frozen dataclass of pure functions over stacked clients.

A method never sees a mechanism, a ledger or rows of several clients mixed: it turns (shared,
personal, own rows) into (personal', contribution), and a release into a new shared tree. Privacy
happens between the two, in the engine. docs/extend.md has the interface on one page.
"""

import importlib
import math
import operator
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from coterie.core.environment import entry_points
from coterie.core.rng import Rng
from coterie.core.tree import Tree, size, stack
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.models import Linear, Model, as_model
from coterie.privacy.billboard import Post
from coterie.privacy.mechanisms import Block, Shape

__all__ = ["Block", "Post", "Shape"]  # for methods, which import nothing of the privacy package


@dataclass(frozen=True)
class Duality:
    """A relative duality gap, by which runs without privacy stop; it is private data.

    Attributes:
        certify: From (shared, personal, clients) to each client's parts, (c, 2), of the primal
            objective and of the gap.
        shared_cost: From the shared tree to its part of the primal objective.
    """

    stop_gap: float
    certify: Callable[[Tree, Tree, Clients], Tensor]
    shared_cost: Callable[[Tree], float] = lambda shared: 0.0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How the number of rounds is chosen, and what a round costs.

    Attributes:
        between: The smallest and largest number of rounds that the rule chooses.
        knee: Rounds up to which the rule takes all that the error allows; beyond, it takes the
            geometric mean of both.
        error: The relative error of the released mean that the rule aims at.
        without_noise: The rounds of a run without privacy.
        dimension: Parameters of the released mean.
        share: The smallest share of clients that a released mean is over (1 without clusters).
        passes: Passes over a client's rows per round, for the virtual clock.
        duality: The gap by which a run without privacy stops; None for none.
        spending: The shape of the budget over rounds that theory recommends: ("power", alpha) for
            eps_t proportional to t^alpha, ("geometric", Q) for Q^-t. None for none.
        diverged: From the shared tree to why the steps have diverged, or ""; a run without privacy
            then stops. None for steps that cannot diverge.
        ahead: From (clients, stream) of a round: draw what `local_update` needs of this stream and
            no model into `clients.ahead`. A simulation calls it while a GPU computes the round
            before; it changes speed only. None for nothing.
        on_device: Whether `server_update` works on any device, if tree and release are on the same.
    """

    between: tuple[int, int] = (3, 25)
    knee: float = math.inf
    error: float = 0.3
    without_noise: int = 25
    dimension: int = 1
    share: float = 1.0
    passes: int = 1
    duality: Duality | None = None
    spending: tuple[Literal["power", "geometric"], float] | None = None
    diverged: Callable[[Tree], str] | None = None
    ahead: Callable[[Clients, Rng], None] | None = None
    on_device: bool = False


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How contributions are bounded.

    Attributes:
        clip: The clipping norm of a contribution, or of its first block.
        blocks: The leaves that are bounded separately, each with its share of the budget; the
            plan's relative error is that of the first. () for one norm over the contribution.
        rows: The largest number of rows of a client, for methods whose published proof protects
            single rows: the noise is then the one of that proof, converted to whole clients.
    """

    clip: float = 0.5
    blocks: tuple[Block, ...] = ()
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Sentences for the user of a run.

    Attributes:
        settings: Why rounds and clipping norm are as they are, for a private run.
        data: What the owner of the data should know, such as rows that are left out.
        caveats: What must be read with the guarantee.
    """

    settings: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The methods to compare with: None for `local`, and for no centralised counterpart."""

    local: "Method | None" = None
    centralised: "Method | None" = None


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the shared tree allows after training.

    Attributes:
        shared_model: From (shared, clients) to the shared model: leaves by name, unstacked, or one
            per client.
        whole: Whether that is a whole model even though contributions have other leaves.
        fixed_membership: Whether clients have fixed positions (clusters, a relation), so that new
            clients cannot be onboarded.
        uncertainty: From (shared, clients, rows) to the standard deviation of predictions for
            other rows of the same clients, (c, longest of rows[, outputs]); None for none.
        variance: From (shared, clients) to a symmetric matrix per client, (c, features + 1,
            features + 1): with z = (row, 1), z' M z is the square of that standard deviation. So it
            can be kept where the rows are not; None where it is not known.
    """

    shared_model: Callable[[Tree, Clients], Tree]
    whole: bool = False
    fixed_membership: bool = False
    uncertainty: Callable[[Tree, Clients, Clients], Tensor] | None = None
    variance: Callable[[Tree, Clients], Tensor] | None = None


class Method(ABC):
    """A frozen dataclass whose fields are its hyperparameters; it has no other state."""

    kind: ClassVar[str] = ""
    model: Model

    def __post_init__(self) -> None:
        """Accept a torch module, or a function that makes one, as the model."""
        object.__setattr__(self, "model", as_model(self.model))

    def __str__(self) -> str:
        """Return the name used in tables."""
        return self.kind

    @property
    def shape(self) -> Shape:
        """What is released: NONE, SUM, GRAM, SQUARES, ROWS, or POOLED for centralised rows."""
        return Shape.SUM

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return the first shared tree, from public facts only."""
        return self.model.init(spec, rng)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError if the method cannot work on such data, before anything is spent.

        `cohort` is the largest possible cohort, if known; `data` are rows to check as well.
        """
        self.init(spec, Rng.seeded(0))
        if data is not None:
            self.model.check_data(data)

    def contribution(self, spec: Spec) -> Tree:
        """Return one client's contribution with any values; by default like the shared tree."""
        return self.init(spec, Rng.seeded(0))

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Return the personal state of clients before their first round, stacked.

        A leaf of shape (clients, 0, ...) has an entry for each of a client's rows, zero at first.
        """
        return stack(shared, clients)

    @abstractmethod
    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Return the clients' new personal state and their contributions to the round."""

    def on_clipped(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Return the personal state, given the factor of each contribution that clipping kept."""
        return after

    @abstractmethod
    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Return the new shared tree after a release: post-processing, nothing more."""

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return each client's model after the last round; nothing is released, so it is free.

        A method of shape POOLED is given all clients at once.
        """
        return personal

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return each client's model between rounds, for observers."""
        names = self.model.init(clients.spec, Rng.seeded(0)).keys()
        if personal.keys() == names:
            return personal
        if shared.keys() == names:
            return stack(shared, len(clients))
        return self.personalise(shared, personal, clients, Rng.seeded(0))

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> "Method":
        """Return the method with its open settings filled in, from public facts only.

        `n_mu` is clients times mu, the budget as Gaussian DP (infinity without privacy); `cohort`
        the largest possible cohort.
        """
        return self

    def rounds(self, spec: Spec) -> Rounds:
        """Return how the number of rounds is chosen."""
        return Rounds(dimension=size(self.contribution(spec)))

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return how contributions are bounded, with this clip, or the method's default."""
        return Clipping() if clip is None else Clipping(clip=clip)

    def notes(
        self,
        *,
        private: bool = True,
        rounds: int = 1,
        clip: float = 1.0,
        data: FederatedDataset | None = None,
    ) -> Notes:
        """Return sentences about a run with these settings."""
        return Notes()

    def baselines(self) -> Baselines:
        """Return the methods to compare with."""
        return Baselines()

    @property
    def serving(self) -> Serving:
        """What the shared tree allows after training."""
        return Serving(shared_model=self._contributed)

    def _contributed(self, shared: Tree, clients: Clients) -> Tree:
        names = self.contribution(clients.spec)
        return {name: leaf for name, leaf in shared.items() if name in names}

    @staticmethod
    def _choices() -> Mapping[str, type["Method"]]:
        return choices()


class Silent(Method):
    """A method without releases: clients contribute nothing."""

    shape = Shape.NONE

    def contribution(self, spec: Spec) -> Tree:
        """Contribute nothing."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Contribute nothing."""
        return personal, {}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Keep the first shared tree."""
        return shared


def shared_leaves(method: Method, spec: Spec) -> tuple[str, ...]:
    """Return the leaves of the model that the shared model has; () if there is no shared model."""
    while isinstance(inner := getattr(method, "base", None), Method):
        method = inner  # methods around others have their shared model
    first = method.model.init(spec, Rng.seeded(0))
    if method.serving.whole:
        return tuple(first)
    shared = method.contribution(spec)
    fits = all(name in first and leaf.shape == first[name].shape for name, leaf in shared.items())
    return tuple(shared) if fits else ()


def check_linear(method: Method, instead: str) -> None:
    """Raise ValueError for other models than linear ones, and say what to use instead."""
    if not isinstance(method.model, Linear):
        name = type(method.model).__name__
        raise ValueError(f"{method.kind} is for linear models, not {name}; use {instead}")


def check_numbers(settings: object, **limits: str) -> None:
    """Raise ValueError for settings outside limits such as "> 0" and ">= 1"; None is open."""
    for name, limit in limits.items():
        value, (sign, bound) = getattr(settings, name), limit.split()
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        low = operator.gt if sign == ">" else operator.ge
        if not (number and low(value, float(bound)) and value < math.inf):
            raise ValueError(f"{name} = {value}: expected a finite number {limit}")


def keeps_state(method: Method) -> bool:
    """Return whether clients keep something between rounds; True where that is not known."""
    probe, spec = {"": torch.zeros(1)}, Spec((1,), 1, "regression", 1)
    try:
        return bool(method.init_client_state(probe, spec, 1))
    except Exception:
        return True


def per_row_leaves(state: Tree) -> tuple[str, ...]:
    """Return the leaves of a first personal state that have an entry for each row of a client."""
    return tuple(name for name, leaf in state.items() if leaf.dim() > 1 and leaf.shape[1] == 0)


def predictive_std(method: Method, shared: Tree, clients: Clients, rows: Clients) -> Tensor:
    """Return `Serving.uncertainty`; raise NotImplementedError if the method has none."""
    found = method.serving.uncertainty
    if found is None:
        raise NotImplementedError(
            f"{method.kind} has no predictive uncertainty: use pfeb, or leave return_std out"
        )
    return found(shared, clients, rows)


@dataclass(frozen=True, kw_only=True)
class About:
    """What `coterie methods` and the documentation print about a method.

    Attributes:
        summary: One line: the first line of the class's docstring.
        releases: What is released, in a few words.
        not_applicable: Utility contracts that do not apply, with the reason; privacy contracts have
            no exceptions.
        stacked: Whether a method of another package is called with many clients at once: its author
            vouches that no client's rows reach another's contribution. False calls it with one
            client at a time.
    """

    summary: str = ""
    releases: str = ""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    stacked: bool = False


_METHODS: dict[str, type[Method]] = {}
_ABOUT: dict[str, About] = {}
M = TypeVar("M", bound=type[Method])


def register(
    name: str,
    *,
    releases: str = "",
    not_applicable: Mapping[str, str] | None = None,
    stacked: bool = False,
) -> Callable[[M], M]:
    """Return a decorator that registers a method under a name; see `About` for the texts."""

    def put(cls: M) -> M:
        if name in _METHODS and _METHODS[name].__module__ != cls.__module__:
            raise ValueError(
                f"method name {name!r} is taken by {_METHODS[name].__module__}; choose another"
            )
        cls.kind = name
        _METHODS[name] = cls
        _ABOUT[name] = About(
            summary=_first_line(cls),
            releases=releases,
            not_applicable=not_applicable or {},
            stacked=stacked,
        )
        return cls

    return put


def is_ours(method: Method) -> bool:
    """Return whether the code of a method, and of the method that it wraps, is this package's."""
    base = getattr(method, "base", None)
    own = type(method).__module__.partition(".")[0] == "coterie"
    return own and (not isinstance(base, Method) or is_ours(base))


def is_stacked(method: Method) -> bool:
    """Return whether a method may be called with many clients at once; see `About.stacked`."""
    base = getattr(method, "base", method)
    return is_ours(method) or _ABOUT.get(base.kind, About()).stacked


def registered() -> Mapping[str, type[Method]]:
    """Return every method: those of this package, and of the entry points `coterie.methods`."""
    package = importlib.import_module("coterie.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"coterie.methods.{module.name}")
    for point in entry_points(group="coterie.methods"):
        point.load()
    return dict(sorted(_METHODS.items()))


def choices() -> Mapping[str, type[Method]]:
    """Return the methods that a plan may name: "auto", which chooses one, and those registered."""
    auto = importlib.import_module("coterie.methods.auto").Auto
    return {auto.kind: auto, **registered()}


def about(name: str) -> About:
    """Return the texts about a method that a plan may name."""
    methods = choices()
    if name not in methods:
        raise ValueError(f"method {name!r}: expected one of {', '.join(methods)}")
    auto = About(summary=_first_line(methods[name]), releases="as the chosen method")
    return _ABOUT.get(name) or auto


def _first_line(cls: type[Method]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]
