"""MTL: linear multi-task learning without privacy, solved to optimality.

    min_W  sum_k mean loss of client k(w_k) + mu/2 |w_k|^2 + lam g(W)

g the trace norm (penalty "trace": models in a common subspace) or the l2,1 norm ("l21": a common
set of features), in each client's own units (`solvers.structured`), to a relative duality gap
(`solvers.multitask`). Ji and Ye 2009, "An accelerated gradient method for trace norm
minimization"; Liu, Ji and Ye 2009, "Multi-task feature learning via efficient l2,1-norm
minimization". All rows are in one place: the baseline that says what privacy costs.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Baselines, Shape, Silent, register
from coterie.methods.single import Single, check_lam, check_linear, own_units, usual_lam
from coterie.models import Linear, Model
from coterie.solvers.multitask import fit_multitask


class Pooled(Silent):
    """A method that has all rows in one place; it releases everything and promises nothing."""

    shape = Shape.POOLED

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, spec)
        if data is not None:
            refuse_degenerate(data)

    def baselines(self) -> Baselines:
        """Compare with local fits in the same units."""
        return Baselines(local=Single(model=self.model))


@register(
    "mtl",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class MTL(Pooled):
    """Trace-norm or l2,1 multi-task learning on rows in one place: not private, a baseline.

    Attributes:
        model: Linear, with or without a bias of each client's own, which is not penalised.
        penalty: "trace" or "l21".
        lam: Its strength; None for 0.3 / features times the root mean square, over features, of
            the local models.
        mu: Adds mu/2 |w|^2 to every client's loss.
        tol: The relative duality gap at which it stops.
    """

    model: Model = field(default_factory=Linear)
    penalty: Literal["trace", "l21"] = "trace"
    lam: float | None = None
    mu: float = 0.0
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lam(self.lam)
        check_lam(self.tol, "tol")

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit all clients together."""
        units, features = own_units(self, clients), clients.spec.features
        lam, ridge = self.lam, usual_lam(features)
        if lam is None:
            alone, _ = units.solve(torch.full((features,), 1 / math.sqrt(ridge)).double())
            size = float(alone.square().sum() / features) ** 0.5
            lam = ridge * (size or 1.0)  # models that are all zero say nothing of a scale
        fit = fit_multitask(
            units.moved(),
            penalty=self.penalty,
            lam=lam,
            mu=self.mu,
            bias=units.bias and units.binary,
            tol=self.tol,
        )
        return to(units.model(fit.weight, fit.bias), clients.device)
