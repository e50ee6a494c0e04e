"""Single-task learning: ridge, lasso, and logistic regression with l2 or l1, for each client.

    min_w  mean_i loss(x_i, w) + lam/2 |w|^2   or   + lam |w|_1

in each client's own units (`solvers.structured`: rows centred, of mean square norm 1), so that one
lam means the same for every client. Nothing is released, so others learn nothing: epsilon = 0.
The baseline of the linear multi-task methods.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Method, Silent, register
from coterie.models import Linear, Model
from coterie.solvers.structured import OwnUnits


def usual_lam(features: int) -> float:
    """Return the usual ridge penalty: three tenths of the mean curvature of rows of unit norm."""
    return 0.3 / features


def check_linear(method: Method, spec: Spec) -> None:
    """Raise ValueError unless it is linear regression or binary classification."""
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
    """Raise ValueError for a released matrix that is too large."""
    if structure == "low_rank" and spec.features > MOST_FEATURES:
        raise ValueError(
            f"{spec.features} features: the released matrix has at most {MOST_FEATURES} rows; "
            'use structure = "group_sparse", or project the features by public directions'
        )


def own_units(method: Method, clients: Clients) -> OwnUnits:
    """Measure clients for a method with a linear model."""
    assert isinstance(method.model, Linear)
    return OwnUnits.of(clients, bias=method.model.bias)


def check_lam(lam: float | None, name: str = "lam") -> None:
    """Raise ValueError for a penalty that is not positive."""
    if lam is not None and not 0 < lam < math.inf:
        raise ValueError(f"{name} = {lam}: expected a positive number")


@register("single", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class Single(Silent):
    """One linear model per client on its own rows only: ridge, lasso or logistic regression.

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
        super().__post_init__()
        check_lam(self.lam)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, spec)
        if data is not None:
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
