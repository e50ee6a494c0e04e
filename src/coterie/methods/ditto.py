"""Ditto: a shared model trained together, and personal ones that stay near it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021, Algorithm 1. The shared model is FedAvg's, as if there were no personal models; client k
also solves, with the shared model that it received,

    min_v  mean_i loss(x_i, v) + lam/2 |v - shared|^2

A client that takes part does both in the same round, each with its own steps; only the change of
the shared model is contributed. So personal models cost nothing: after the last round every client,
sampled or not, solves once more against the final shared model.

PMTL differs in what is shared: there it is the mean of the personal models, here a model that fits
all clients' rows as well as one model can. With equal weights for clients, and one full-batch step
a round, that is the minimiser of the mean over clients of their own mean losses; more local steps
move FedAvg's fixed point, as is known.
"""

import math
from dataclasses import dataclass, field, replace

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, stack, subtract
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.methods.base import Method, Post, Shape, register
from coterie.models import Linear, Model
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD


@register("ditto", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """A shared FedAvg model, and personal models with a proximal term towards it (Li et al. 2021).

    Attributes:
        model: The model, shared and personal.
        lam: How strongly personal models are regularised towards the shared one.
        solver: Of the personal models: "exact" for linear least squares, "sgd", or "auto".
        sgd: Local steps of a round on the shared model.
        own_sgd: Local steps of a round on the personal model.
        last_epochs: Epochs of the last solve of personal models (SGD only).
    """

    shape = Shape.SUM
    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=5))
    own_sgd: SGD = field(default_factory=SGD)
    last_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam = {self.lam}: expected a finite number >= 0")
        if self.last_epochs < 1:
            raise ValueError(f"last_epochs = {self.last_epochs}: expected at least 1")

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        super().check(spec, cohort=cohort, data=data)
        self._own(self.own_sgd).is_exact(spec)

    def _own(self, sgd: SGD) -> LocalProblem:
        """Return the problem of the personal models."""
        return LocalProblem(model=self.model, how=self.solver, sgd=sgd, lam=self.lam)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Train the shared model and contribute its change; train the personal model as well."""
        together = LocalProblem(model=self.model, how="sgd", sgd=self.sgd, lam=0.0)
        start = stack(shared, len(clients))
        moved = together.solve(
            start, clients, rng.at("shared"), round=round, anchor=None, keep_failed=True
        )
        own = self._own(self.own_sgd).solve(
            personal, clients, rng.at("own"), round=round, anchor=shared
        )
        return own, subtract(moved, shared)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by the released mean."""
        return add(shared, post.mean)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final shared model."""
        longer = replace(self.own_sgd, epochs=self.last_epochs, steps=None)
        return self._own(longer).solve(personal, clients, rng, round=0, anchor=shared)
