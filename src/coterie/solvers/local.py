"""The local problem that several methods share, and who solves it.

    min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2

Small least-squares models are solved exactly; everything else by SGD from the start given.
"""

from dataclasses import dataclass
from typing import Literal

from coterie.data.federated import Clients, Spec
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.sgd import SGD
from coterie.tree import Tree

How = Literal["auto", "exact", "sgd"]
_SMALL = 1024


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """Solves the regularised local problem of stacked clients.

    Attributes:
        model: The model.
        how: "exact" (linear least squares with lam > 0), "sgd", or "auto": exact where it can be.
        sgd: The settings of SGD.
        lam: The weight of the pull towards the anchor.
    """

    model: Model
    how: How
    sgd: SGD
    lam: float

    def is_exact(self, spec: Spec) -> bool:
        """Say whether these clients' problem is solved in closed form."""
        possible = isinstance(self.model, Linear) and spec.task == "regression" and self.lam > 0
        if self.how == "exact" and not possible:
            raise ValueError(
                f'solver = "exact" solves linear least squares with lam > 0; this is '
                f'{type(self.model).__name__} on {spec.task} with lam = {self.lam}: use "sgd"'
            )
        return possible and (
            self.how == "exact" or (self.how == "auto" and spec.features <= _SMALL)
        )

    def solve(
        self, start: Tree, clients: Clients, rng: Rng, *, round: int, anchor: Tree | None
    ) -> Tree:
        """Solve from a stacked start; the anchor is the shared tree, or None for zero."""
        if self.is_exact(clients.spec):
            assert isinstance(self.model, Linear)
            return solve_ridge(clients, anchor=anchor, lam=self.lam, bias=self.model.bias)
        return self.sgd(self.model, start, clients, rng, round=round, anchor=anchor, lam=self.lam)
