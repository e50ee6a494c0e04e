"""Local: every client learns alone; nothing is posted, so others learn nothing.

    min_w  mean_i loss(x_i, w) + lam/2 |w|^2

The baseline of "does joining help me?".
"""

import math
from dataclasses import dataclass, field

from coterie.data.federated import Clients, Spec
from coterie.methods.base import Silent, register
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD
from coterie.tree import Tree


@register("local")
@dataclass(frozen=True, kw_only=True)
class Local(Silent):
    """One model per client, from its own rows alone.

    Attributes:
        model: The model of every client.
        lam: Ridge penalty towards the model's start (zero for linear models).
        solver: "exact" for linear least squares, "sgd", or "auto".
        sgd: Steps from the start; many epochs, since there is only one round.
    """

    model: Model = field(default_factory=Linear)
    lam: float = 0.1
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=50))

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam = {self.lam}: expected a finite number >= 0")

    def check(self, spec: Spec) -> None:
        """Refuse models that do not fit the rows, and exact solves that do not exist."""
        super().check(spec)
        self.problem().is_exact(spec)

    def problem(self) -> LocalProblem:
        """Give the local problem."""
        return LocalProblem(model=self.model, how=self.solver, sgd=self.sgd, lam=self.lam)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit every client's own rows, pulled towards the public start."""
        return self.problem().solve(personal, clients, rng, round=0, anchor=shared)
