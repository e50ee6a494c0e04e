"""PMTL: mean-regularised personal models around a privately posted shared model.

Hu, Wu, Smith, "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023, Algorithm 1, with the mean over a client's rows for the loss (lam then means the same for
small and large clients):

    min_{w_1..w_m}  (1/m) sum_k [ mean_i loss(x_i, w_k) + lam/2 |w_k - shared|^2 ]

A client that takes part works on its own last model against the shared one, and contributes a
difference, which is clipped, summed, noised and divided by the expected cohort.

`change_from` says which difference. "own" is printed: w_k' - w_k. Then nothing in the recursion
depends on the level of the shared model, which integrates the noise as a random walk. "shared"
(default; also what the authors' code does): w_k' - shared, so that

    shared' = shared + mean_k clip(w_k' - shared) + noise

forgets old noise. Same sensitivity, same epsilon. Caveat: this difference does not vanish at the
optimum, so a clip below the clients' typical deviation moves the fixed point to a clipped,
median-like centre.

Not copied from the authors' code: weights by row counts (the noise does not cover them) and the
unsquared norm (not the objective). A client enrols with the shared model of the round in which it
first takes part; under full participation that is the printed start.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Post, Shape, register
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD
from coterie.tree import Tree, add, subtract


@register("pmtl")
@dataclass(frozen=True, kw_only=True)
class PMTL(Method):
    """One model per client, pulled towards a shared model that is posted privately.

    Attributes:
        model: The model of every client.
        lam: How strongly personal models are pulled towards the shared one.
        solver: "exact" for linear least squares, "sgd", or "auto": exact where it can be.
        sgd: Local steps of a round: learning rate, epochs or steps, batch, momentum, schedule.
        change_from: "shared" (default) or "own" (as printed): see the module's words.
        last_solve: After the last round every client, drawn or not, solves against the final
            shared model; nothing is posted, so it is free.
        last_epochs: Epochs of that last solve (SGD only).
    """

    shape = Shape.SUM
    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    solver: How = "auto"
    sgd: SGD = field(default_factory=SGD)
    change_from: Literal["shared", "own"] = "shared"
    last_solve: bool = True
    last_epochs: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam = {self.lam}: expected a finite number >= 0")
        if self.last_epochs < 1:
            raise ValueError(
                f"last_epochs = {self.last_epochs}: expected at least 1; to leave the last solve "
                "out, set last_solve = false"
            )

    def check(self, spec: Spec) -> None:
        """Refuse models that do not fit the rows, and exact solves that do not exist."""
        super().check(spec)
        self.problem().is_exact(spec)

    def problem(self) -> LocalProblem:
        """Give the local problem of a round."""
        return LocalProblem(model=self.model, how=self.solver, sgd=self.sgd, lam=self.lam)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Work on the own model against the shared one; contribute the difference."""
        after = self.problem().solve(personal, clients, rng, round=round, anchor=shared)
        origin = shared if self.change_from == "shared" else personal
        return after, subtract(after, origin)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by the posted mean."""
        return add(shared, post.mean)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final shared model, unless switched off."""
        if not self.last_solve:
            return personal
        longer = replace(self.sgd, epochs=self.last_epochs, steps=None)
        problem = replace(self.problem(), sgd=longer)
        return problem.solve(personal, clients, rng, round=0, anchor=shared)
