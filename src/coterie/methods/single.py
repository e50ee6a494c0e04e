"""Single-task learning: ridge, lasso, and logistic regression with l2 or l1, each client alone.

    min_w  mean_i loss(x_i, w) + lam/2 |w|^2   or   + lam |w|_1

in each client's own units (`solvers.structured`: rows centred, of mean square norm 1), so that one
lam means the same for every client. Nothing is posted, so others learn nothing: epsilon = 0.
The baseline of the linear multi-task methods.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Method, Silent, register
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.structured import OwnUnits
from coterie.tree import Tree, to


def usual_lam(features: int) -> float:
    """Return the usual ridge penalty: three tenths of the mean curvature of rows of unit norm."""
    return 0.3 / features


def check_linear(method: Method, spec: Spec) -> None:
    """Refuse other models and tasks than linear regression and binary classification."""
    if not isinstance(method.model, Linear):
        raise ValueError(
            f"{method.kind} is for linear models, not {type(method.model).__name__}; use pmtl"
        )
    if spec.task not in ("regression", "binary"):
        raise ValueError(
            f"{method.kind} is for regression and binary targets, not {spec.task}; use pmtl, or "
            "one binary target per class"
        )


MOST_FEATURES = 4096


def check_matrix(structure: str, spec: Spec) -> None:
    """Refuse a posted matrix that is too large."""
    if structure == "low_rank" and spec.features > MOST_FEATURES:
        raise ValueError(
            f"{spec.features} features: the posted matrix is kept to {MOST_FEATURES} a side; "
            'use structure = "group_sparse", or project the features by public directions'
        )


def own_units(method: Method, clients: Clients) -> OwnUnits:
    """Measure clients for a method with a linear model."""
    assert isinstance(method.model, Linear)
    return OwnUnits.of(clients, bias=method.model.bias)


def check_lam(lam: float | None, name: str = "lam") -> None:
    """Refuse a penalty that is none."""
    if lam is not None and not 0 < lam < math.inf:
        raise ValueError(f"{name} = {lam}: expected a positive number")


@register("single")
@dataclass(frozen=True, kw_only=True)
class Single(Silent):
    """One linear model per client, from its own rows alone: ridge, lasso or logistic.

    Attributes:
        model: Linear, with or without a bias, which is not penalised.
        penalty: "l2" or "l1".
        lam: Its strength; None for 0.3 / features (l2) or 0.1 / features (l1).
        mu: Of "l2": added to lam.
    """

    model: Model = field(default_factory=Linear)
    penalty: Literal["l1", "l2"] = "l2"
    lam: float | None = None
    mu: float = 0.0

    def __post_init__(self) -> None:
        check_lam(self.lam)

    def check(self, spec: Spec) -> None:
        """Refuse other models and tasks."""
        check_linear(self, spec)

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that nothing can be learnt from."""
        refuse_degenerate(data)

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Share nothing."""
        self.check(spec)
        return self.model.init(spec, rng)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit own rows."""
        units, features = own_units(self, clients), clients.spec.features
        lam = usual_lam(features) if self.lam is None else self.lam
        if self.penalty == "l1":
            lam = lam / 3 if self.lam is None else lam
            found = units.solve_sparse(lam)
        else:
            root = 1 / math.sqrt(lam + self.mu)
            found = units.solve(torch.full((features,), root, dtype=torch.float64))
        return to(units.model(*found), clients.device)
