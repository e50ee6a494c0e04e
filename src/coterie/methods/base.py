"""What a method is: a frozen dataclass of pure functions over stacked clients.

A method never sees a mechanism, a ledger or another client's rows mixed with its own: it turns
(shared, personal, own rows) into (personal', contribution), and a `Post` into a new shared tree.
Privacy happens between the two, in the engine. One file per method, found by `register`.
"""

import importlib
import math
import pkgutil
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.models import Model, as_model
from coterie.privacy.billboard import Post
from coterie.privacy.mechanisms import Block, Shape
from coterie.rng import Rng
from coterie.tree import Tree, size, stack

__all__ = ["Block", "Method", "Post", "Shape", "Silent", "register", "registered"]

_METHODS: dict[str, type["Method"]] = {}
M = TypeVar("M", bound=type["Method"])


class _Arranged(ABCMeta):
    """Lets a class arrange what its users hand over before a frozen value is made of it."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return super().__call__(*args, **cls.arranged(settings))  # type: ignore[attr-defined]


class Method(metaclass=_Arranged):
    """A frozen dataclass whose fields are its hyperparameters; it has no other state.

    Class attributes:
        kind: Its registered name.
        not_applicable: Utility contracts that do not apply, with the reason; privacy contracts
            have no exceptions.
        rounds_between: The fewest and most rounds that are chosen by rule.
        rounds_knee: Rounds up to which the rule takes all that the error bears; beyond, it takes
            the geometric mean of both.
        rounds_error: The relative error of a posted mean that the rule aims at.
        rounds_without_noise: The rounds of a run without privacy, if none are asked for.
        per_row: Leaves of the personal state with an entry for each row of a client; `enrol` gives
            them without entries, (clients, 0, ...), and zeros are put in.
    """

    kind: ClassVar[str] = ""
    not_applicable: ClassVar[Mapping[str, str]] = {}
    rounds_between: ClassVar[tuple[int, int]] = (3, 25)
    rounds_knee: ClassVar[float] = math.inf
    rounds_error: ClassVar[float] = 0.3
    rounds_without_noise: ClassVar[int] = 25
    per_row: ClassVar[tuple[str, ...]] = ()
    model: Model

    @classmethod
    def arranged(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Take a torch module, or what makes one, where a model belongs."""
        return settings | {key: as_model(settings[key]) for key in ("model",) if key in settings}

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.kind

    @property
    def has_places(self) -> bool:
        """Whether clients have places by number (clusters, a relation), which newcomers lack."""
        return False

    @property
    def shape(self) -> Shape:
        """What it needs posted."""
        return Shape.SUM

    @property
    def protects_rows(self) -> int | None:
        """The most rows of a client, where the method's own proof speaks of single rows.

        The noise is then what that proof asks for, converted to whole clients; the account is of
        the noise as it is. None for methods that bound whole clients.
        """
        return None

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Make the first shared tree from public facts alone."""
        return self.model.init(spec, rng)

    def check(self, spec: Spec) -> None:
        """Refuse data that this method cannot work on, before anything is spent."""
        self.init(spec, Rng.seeded(0))

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that this method cannot learn from, before anything is spent."""
        self.model.check_data(data)

    def check_cohort(self, largest: int, spec: Spec) -> None:
        """Refuse rounds of so many clients, where the method was set up for fewer."""
        return None

    def for_budget(self, reach: float, spec: Spec) -> "Method":
        """Fill in what a rule decides from clients times mu, before rounds are chosen.

        `reach` is infinity without privacy. What was filled in already has to stay as it is.
        """
        return self

    def for_cohort(self, largest: int, spec: Spec) -> "Method":
        """Fill in what was left to the plan: the most clients that a round may have."""
        return self

    def usual_clip(self, clients: int, rounds: int) -> float:
        """Return the clip where none is asked for, from public facts alone."""
        return 0.5

    def blocks(self, clip: float) -> tuple[Block, ...]:
        """Say how the leaves of a contribution are bounded, each on its own, and paid for.

        From public facts alone; the first is the leaf that a plan's relative error is of, which
        `mean_of` counts. () for one clip on the whole contribution.
        """
        return ()

    def explain(self, rounds: int, clip: float) -> tuple[str, ...]:
        """Say, of a run with a budget, why its rounds and clip are as they are."""
        return ()

    def notices(self, data: FederatedDataset) -> tuple[str, ...]:
        """Say what the data's owner should know of rows that are taken, but in their own way."""
        return ()

    def caveats(self, private: bool) -> tuple[str, ...]:
        """Say, in sentences, what must be read beside the guarantee of a run."""
        return ()

    @property
    def passes(self) -> int:
        """Passes over own rows in a round, at most, for a clock."""
        return 1

    def fit_all(self, clients: Clients) -> Tree:
        """Fit all clients together, rows in one place: methods of shape POOLED alone."""
        raise NotImplementedError(f"{self.kind} is not a pooled method")

    def mean_of(self, spec: Spec) -> tuple[int, float]:
        """Count the numbers of a posted mean, and give the least share of clients that it is of."""
        return size(self.contribution(self.init(spec, Rng.seeded(0)))), 1.0

    def contribution(self, shared: Tree) -> Tree:
        """Return the shapes of one client's contribution; by default those of the shared tree."""
        return shared

    def enrol(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Make the personal state of clients that take part for the first time, stacked."""
        return stack(shared, clients)

    @abstractmethod
    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Do a client's work of a round: new personal state, and what it would contribute."""

    def settle(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Take note of how much of the contribution the clip kept; the client's own business."""
        return after

    @abstractmethod
    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared tree by what was posted: post-processing, nothing more."""

    def reference(self) -> "Method | None":
        """Return the method that says what could be learnt without privacy, None for this one."""
        return None

    def alone(self) -> "Method | None":
        """Return the method that learns alone in the same terms, None for the usual one."""
        return None

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Make each client's model after the last round; free, since nothing is posted."""
        return personal

    def shared_model(self, shared: Tree, clients: Clients) -> Tree:
        """Return what clients share of their models: leaves by name, unstacked, or one a client."""
        return self.contribution(shared)

    def shared_leaves(self, spec: Spec) -> tuple[str, ...]:
        """Name the leaves of the model that `shared_model` gives; () where it gives none."""
        first = self.model.init(spec, Rng.seeded(0))
        shared = self.contribution(self.init(spec, Rng.seeded(0)))
        fits = all(
            name in first and leaf.shape == first[name].shape for name, leaf in shared.items()
        )
        return tuple(shared) if fits else ()

    def standing(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return each client's model as it stands between rounds, for whoever watches."""
        names = self.model.init(clients.spec, Rng.seeded(0)).keys()
        if personal.keys() == names:
            return personal
        if shared.keys() == names:
            return stack(shared, len(clients))
        return self.personalise(shared, personal, clients, Rng.seeded(0))

    def uncertainty(self, shared: Tree, clients: Clients, rows: Clients) -> Tensor:
        """Return the standard deviation of what is predicted for other rows of the same clients.

        (c, longest of `rows`[, outputs]): of an outcome, or of the score of a class.
        """
        raise NotImplementedError(
            f"{self.kind} gives models without their uncertainty: use pfeb, or leave return_std out"
        )

    @property
    def stop_gap(self) -> float | None:
        """The relative duality gap at which a run without privacy is done; None for never.

        The gap is private data: a run with a budget does its rounds whatever it is.
        """
        return None

    def certify(self, shared: Tree, personal: Tree, clients: Clients) -> Tensor:
        """Return each client's own parts, (c, 2), of the primal objective and of the duality gap."""
        raise NotImplementedError(f"{self.kind} has no duality gap")

    def shared_cost(self, shared: Tree) -> float:
        """Return the part of the primal objective that is the shared tree's."""
        return 0.0

    @classmethod
    def choices(cls) -> Mapping[str, type["Method"]]:
        """Return what a plan may name: the registered methods, and "auto", which picks one."""
        auto = importlib.import_module("coterie.methods.auto").Auto
        return {auto.kind: auto, **registered()}


class Silent(Method):
    """A method whose clients contribute nothing to any round."""

    shape = Shape.NONE

    def contribution(self, shared: Tree) -> Tree:
        """Contribute nothing."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Contribute nothing."""
        return personal, {}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Keep the public start."""
        return shared


def register(name: str) -> Callable[[M], M]:
    """Put a method on the list under a name."""

    def put(cls: M) -> M:
        if name in _METHODS and _METHODS[name].__module__ != cls.__module__:
            raise ValueError(
                f"method name {name!r} is taken by {_METHODS[name].__module__}; choose another"
            )
        cls.kind = name
        _METHODS[name] = cls
        return cls

    return put


def registered() -> Mapping[str, type[Method]]:
    """Find every method: the files beside this one, and the entry points `coterie.methods`."""
    package = importlib.import_module("coterie.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"coterie.methods.{module.name}")
    for point in entry_points(group="coterie.methods"):
        point.load()
    return dict(sorted(_METHODS.items()))
