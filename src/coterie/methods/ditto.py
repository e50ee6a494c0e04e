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

from dataclasses import dataclass, field, replace

from coterie.core.rng import Rng
from coterie.core.tree import Tree, stack, subtract
from coterie.data.federated import Clients
from coterie.methods.base import register
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD


@register("ditto", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class Ditto(Proximal):
    """A shared FedAvg model, and personal models with a proximal term towards it (Li et al. 2021).

    Attributes:
        lam: How strongly personal models are regularised towards the shared one.
        solver: Of the personal models: "exact" for linear least squares, "sgd", or "auto".
        sgd: Local steps of a round on the shared model.
        own_sgd: Local steps of a round on the personal model.
        last_epochs: Epochs of the last solve of personal models (SGD only).
    """

    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=5))
    own_sgd: SGD = field(default_factory=SGD)
    last_epochs: int = 5

    def problem(self) -> LocalProblem:
        """Return the problem of the personal models."""
        return replace(super().problem(), sgd=self.own_sgd)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Train the shared model and contribute its change; train the personal model as well."""
        together = LocalProblem(model=self.model, how="sgd", sgd=self.sgd, lam=0.0)
        start = stack(shared, len(clients))
        moved = together.solve(
            start, clients, rng.at("shared"), round=round, anchor=None, keep_failed=True
        )
        own = self.problem().solve(personal, clients, rng.at("own"), round=round, anchor=shared)
        return own, subtract(moved, shared)
