"""What the methods around one local problem have in common; no method itself.

min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2      (`solvers.local`)
"""

from dataclasses import replace
from typing import Any

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Post, Shape, check_numbers
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD


class Proximal(Method):
    """Clients solve the local problem near the shared model; the mean of changes is released.

    It declares no dataclass fields: a method has those of these settings that it lists.
    """

    shape = Shape.SUM
    lam: float = 0.0
    solver: How = "sgd"
    sgd: SGD
    last_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam=">= 0", last_epochs=">= 1")

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        super().check(spec, **given)
        self.problem().is_exact(spec)

    def problem(self) -> LocalProblem:
        """Return the local problem of a round."""
        return LocalProblem(model=self.model, how=self.solver, sgd=self.sgd, lam=self.lam)

    def last_problem(self) -> LocalProblem:
        """Return the problem that every client solves after the last round, which is free."""
        problem = self.problem()
        return replace(problem, sgd=replace(problem.sgd, epochs=self.last_epochs, steps=None))

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by the released mean."""
        return add(shared, post.mean)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final shared model."""
        return self.last_problem().solve(personal, clients, rng, round=0, anchor=shared)
