"""Support vector machines of each client's own: nothing is released, so others learn nothing.

    min_w  1/2 |w|^2 + C sum_i loss(y_i, w . x_i)

with the hinge loss (one output against the rest where there are several classes) or |.| beyond a
tube; a bias is penalised like the weights. What `mtlsvm` tends to for C2 -> 0 and C = C1 / C2.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate, refuse_labels
from coterie.methods.base import Method, Silent, register
from coterie.models import Linear, Model
from coterie.solvers.sdca import Losses, fit_local

_MOST_EPOCHS = 2000


def check_svm(method: Method, spec: Spec) -> None:
    """Raise ValueError for other models than linear ones, and class weights that do not fit."""
    if not isinstance(method.model, Linear):
        raise ValueError(
            f"{method.kind} is for linear models, not {type(method.model).__name__}; use pmtl"
        )
    weights = getattr(method, "class_weight", "none")
    if weights != "none" and spec.task == "regression":
        raise ValueError(
            f"class_weight = {weights!r} on regression, which has no classes: use 'none'"
        )
    classes = spec.outputs if spec.task == "multiclass" else 2
    if not isinstance(weights, str) and len(weights) != classes:
        raise ValueError(
            f"class_weight = {weights!r} has {len(weights)} numbers, expected {classes}: one of "
            "each class"
        )


def check_constants(**constants: float) -> None:
    """Raise ValueError for constants that are not positive."""
    for name, value in constants.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ValueError(f"{name} = {value}: expected a finite number above 0")


def joined(tree: Tree) -> Tensor:
    """Put weights (..., o, d) and biases (..., o) side by side: (..., o, d + 1)."""
    if "bias" not in tree:
        return tree["weight"]
    return torch.cat([tree["weight"], tree["bias"][..., None]], dim=-1)


def parted(vectors: Tensor, like: Tree) -> Tree:
    """Take weights and biases apart again."""
    if "bias" not in like:
        return {"weight": vectors}
    return {"weight": vectors[..., :-1], "bias": vectors[..., -1]}


def padded(dual: Tensor, longest: int) -> Tensor:
    """Put zeros behind duals of too few rows."""
    return pad(dual, (0, 0, 0, max(0, longest - dual.shape[1])))


def settled(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """Take the part of a step that the clip kept of what it contributed; none if none was sent."""
    factor = kept.to(after).reshape(-1, *[1] * (after.dim() - 1))
    return torch.where(factor > 0, before + factor * (after - before), before)


class Machines(Method):
    """What methods of support vector machines check alike."""

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that are not linear, and for rows or labels without use."""
        check_svm(self, spec)
        if data is not None:
            refuse_degenerate(data)
            refuse_labels(data)


@register("localsvm", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class LocalSVM(Machines, Silent):
    """One support vector machine per client, trained on its own rows only.

    Attributes:
        model: Linear; a bias is penalised like the weights.
        c: The cost of errors.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by the client's own counts), or a weight per class.
        tol: The relative duality gap of each client's machine, unless its rows are so far from
            the origin, or so unlike in scale, that 2,000 passes do not reach it.
    """

    model: Model = field(default_factory=Linear)
    c: float = 1.0
    tube: float = 0.1
    class_weight: Literal["none", "balanced"] | tuple[float, ...] = "none"
    tol: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_constants(c=self.c, tol=self.tol)
        self.losses()

    def losses(self) -> Losses:
        """Return what rows cost."""
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
