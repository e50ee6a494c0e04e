"""Support vector machines without releases: local ones, and one for all rows, centralised.

    min_w  1/2 |w|^2 + C sum_i loss(y_i, w . x_i)

The loss is the hinge (one output against the rest where there are several classes), or |.| beyond a
tube; a bias is penalised like the weights. `mtlsvm` tends to `LocalSVM` for C2 -> 0 with
C = C1 / C2, and to `GlobalSVM` for C2 -> infinity.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.core.rng import Rng
from coterie.core.tree import Tree, by_row, stack, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate, refuse_labels
from coterie.methods.base import (
    Baselines,
    Method,
    Shape,
    Silent,
    check_linear,
    check_numbers,
    register,
)
from coterie.models import Linear, Model
from coterie.solvers.sdca import Losses, fit_joint, fit_local

ClassWeight = Literal["none", "balanced"] | tuple[float, ...]
_MOST_EPOCHS = 2000


def joined(tree: Tree) -> Tensor:
    """Return weights (..., o, d) and biases (..., o) as one tensor (..., o, d + 1)."""
    if "bias" not in tree:
        return tree["weight"]
    return torch.cat([tree["weight"], tree["bias"][..., None]], dim=-1)


def parted(vectors: Tensor, like: Tree) -> Tree:
    """Return weights and biases; the inverse of `joined`."""
    if "bias" not in like:
        return {"weight": vectors}
    return {"weight": vectors[..., :-1], "bias": vectors[..., -1]}


def padded(dual: Tensor, longest: int) -> Tensor:
    """Return duals padded with zeros to the longest client."""
    return pad(dual, (0, 0, 0, max(0, longest - dual.shape[1])))


def kept_part(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """Return the state after the part of a step that clipping kept; none if none was sent."""
    factor = by_row(kept.to(after), after)
    return torch.where(factor > 0, before + factor * (after - before), before)


class Machines(Method):
    """The checks of all methods of support vector machines, and their local baseline."""

    tube: float
    class_weight: ClassWeight

    def check(self, spec: Spec, *, data: FederatedDataset | None = None, **given: Any) -> None:
        """Raise ValueError for other models, class weights that do not fit, and constant data."""
        check_linear(self, "pmtl")
        weights = self.class_weight
        if weights != "none" and spec.task == "regression":
            raise ValueError(
                f"class_weight = {weights!r} on regression, which has no classes: use 'none'"
            )
        classes = spec.outputs if spec.task == "multiclass" else 2
        if not isinstance(weights, str) and len(weights) != classes:
            raise ValueError(
                f"class_weight = {weights!r} has {len(weights)} numbers, expected {classes}: one "
                "of each class"
            )
        if data is not None:
            refuse_degenerate(data)
            refuse_labels(data)

    def local_machine(self, c: float) -> "LocalSVM":
        """Return local machines with the same losses."""
        return LocalSVM(model=self.model, c=c, tube=self.tube, class_weight=self.class_weight)


@register("localsvm", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class LocalSVM(Machines, Silent):
    """One support vector machine per client, trained on its own rows only.

    Attributes:
        c: The cost of errors.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by the client's own counts), or a weight per class.
        tol: The relative duality gap of each client's machine, unless 2,000 passes do
            not reach it: rows far from the origin, or features of very different scales.
    """

    model: Model = field(default_factory=Linear)
    c: float = 1.0
    tube: float = 0.1
    class_weight: ClassWeight = "none"
    tol: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, c="> 0", tol="> 0")
        self.losses()

    def losses(self) -> Losses:
        """Return the loss of rows."""
        return Losses(c1=self.c, tube=self.tube, class_weight=self.class_weight)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit own rows."""
        assert isinstance(self.model, Linear)
        fit = fit_local(
            clients,
            self.losses(),
            bias=self.model.bias,
            tol=self.tol,
            keys=rng.at("order").keys(clients.ids),
            most=_MOST_EPOCHS,
            strict=False,
        )
        return to(parted(fit.weight.float(), shared), clients.device)


@register("globalsvm", releases="everything: centralised rows")
@dataclass(frozen=True, kw_only=True)
class GlobalSVM(LocalSVM):
    """One support vector machine on centralised rows: not private, a baseline."""

    shape = Shape.POOLED
    tol: float = 1e-3

    def baselines(self) -> Baselines:
        """Compare with local fits with the same constant."""
        return Baselines(local=self.local_machine(self.c))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit one machine for every client."""
        assert isinstance(self.model, Linear)
        fit = fit_joint(
            clients,
            self.losses(),
            c2=torch.inf,
            bias=self.model.bias,
            tol=self.tol,
            most=_MOST_EPOCHS,
            strict=False,
            keys=Rng.seeded(0).keys(clients.ids),
        )
        like = self.model.init(clients.spec, Rng.seeded(0))
        return to(stack(parted(fit.shared.float(), like), len(clients)), clients.device)
