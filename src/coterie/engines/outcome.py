"""What an engine shows while it runs, and what it gives when it is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from coterie.data.federated import FederatedDataset, Spec
from coterie.engines.rounds import Timing
from coterie.engines.store import Ids, Store
from coterie.methods.base import Method, Shape
from coterie.methods.finetune import Finetune
from coterie.plan import Plan
from coterie.privacy.billboard import Billboard, Post
from coterie.privacy.guarantee import Guarantee
from coterie.rng import Rng
from coterie.tree import Tree, to


@dataclass(frozen=True)
class Progress:
    """What an observer is shown after a round; nothing it does comes back.

    `answered` is how many clients contributed (None where that is not known any more), `seconds`
    the time on the virtual clock, where there is one.
    """

    round: int
    rounds: int
    shared: Tree
    store: Store
    answered: int | None = 0
    seconds: float | None = None

    def models(self, method: Method, data: FederatedDataset) -> Callable[[Ids], Tree]:
        """Return a function from clients to their models as they stand."""

        def standing(ids: Ids) -> Tree:
            rows = self.store.take(ids, lambda n: method.enrol(self.shared, data.spec, n))
            return method.standing(self.shared, rows, data.clients(ids))

        return standing


class Observer(Protocol):
    """Watches a run. Returns None, and so steers nothing."""

    def __call__(self, progress: Progress) -> None:
        """Look at the state after a round."""


@dataclass(frozen=True)
class Outcome:
    """A finished run: one model per client, the public transcript, and what it guarantees."""

    plan: Plan
    spec: Spec
    shared: Tree
    models: Store
    billboard: Billboard
    guarantee: Guarantee
    timing: Timing
    gap: float | None = None  # relative duality gap, of runs without privacy that stop by it
    names: Sequence[str] = ()  # of the clients, in the order of their models
    zeroed: int = 0  # contributions that were no numbers and counted as zero; not private

    @property
    def posts(self) -> tuple[Post, ...]:
        """The public transcript."""
        return self.billboard.posts

    def rows(self, ids: Ids) -> Tree:
        """Return the models of some clients, stacked."""
        return self.models.take(ids, lambda count: {})

    def model(self, client: int) -> Tree:
        """Return one client's model parameters."""
        return {name: leaf[client] for name, leaf in self.models.leaves.items()}

    def finetune(self, method: Finetune, data: FederatedDataset) -> Callable[[Ids], Tree]:
        """Finetune this run's models: as if the run had been one of `Finetune` of its method.

        Nothing is posted, so it costs nothing; several ways can be compared after one run.

        Args:
            method: How; its base is taken to be this run's method.
            data: The training rows.

        Returns:
            A function from clients to their finetuned models, stacked.
        """
        if data.spec != self.spec or list(data.names) != list(self.names):
            raise ValueError(
                f"finetuning is of the clients that the run was trained with: given {data.spec}, "
                f"{len(data)} names, expected {self.spec} and the same clients in the same order"
            )
        method = replace(method, base=self.plan.method)
        method.check(self.spec)
        method.check_data(data)
        seed = self.plan.simulation_seed
        coins = (Rng.fresh() if seed is None else Rng.seeded(seed)).at("personalise")

        def rows(ids: Ids) -> Tree:
            clients = data.clients(ids)
            shared = to(self.shared, clients.device)
            return method.refine(shared, to(self.rows(ids), clients.device), clients, coins)

        return rows

    def join(self, data: FederatedDataset) -> Tree:
        """Make models for clients who come after training, from the shared tree and own rows.

        Nothing of theirs is posted, so it costs nobody anything.

        Raises:
            ValueError: If the rows are of another kind, or the method keeps rows of named clients.
        """
        seed = self.plan.simulation_seed
        return join_shared(self.plan.method, self.shared, self.spec, data, seed)


def check_joinable(method: Method) -> None:
    """Refuse methods that newcomers cannot join.

    Raises:
        ValueError: If the method has models, or places, of the clients that it was trained with
            alone.
    """
    if method.shape in (Shape.ROWS, Shape.POOLED):
        raise ValueError(
            f"{method.kind} has models of the clients that it was trained with alone, and nobody "
            "can join it: leave them out, or use a method with a shared model, such as pmtl"
        )
    if method.has_places:
        raise ValueError(
            f"{method.kind} gives clients places by number (clusters, a relation), and newcomers "
            "have none: leave them out, train with them, or use a method without places"
        )


def join_shared(
    method: Method, shared: Tree, spec: Spec, data: FederatedDataset, seed: int | None
) -> Tree:
    """Make models for newcomers from a shared tree of a federation with this spec."""
    check_joinable(method)
    if replace(data.spec, clients=0) != replace(spec, clients=0):
        raise ValueError(f"newcomers have rows {data.spec}, expected those of the training: {spec}")
    method.check_data(data)
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    personal = method.enrol(shared, spec, len(clients))
    rng = Rng.fresh() if seed is None else Rng.seeded(seed)
    return method.personalise(shared, personal, clients, rng.at("join"))
