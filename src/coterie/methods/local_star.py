"""Local*: local training with one penalty for all of them: NOT private, a baseline.

    min_w  (mean or sum over own rows of) loss(x_i, w) + lam/2 |w - start|^2

lam, and whether it applies to the mean or the sum, are those with the least leave-one-out loss
over the rows of all clients together. No honest client has it: the choice needs every client's
rows. It is a stronger opponent than `local`, and so a fair one for a method that learns its penalty
from every client.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.methods.base import Shape, Silent, register
from coterie.methods.local import has_bias, linear_tree, modes, ridge_prior
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.posterior import Prior, leave_one_out, row_totals
from coterie.tree import Tree

_STEPS = (1.0, 3.0)
_MEAN = tuple(step * 10.0**power for power in range(-4, 2) for step in _STEPS)
_SUM = tuple(step * 10.0**power for power in range(-2, 4) for step in _STEPS)
_CELLS = 1 << 24  # padded losses computed side by side


@register(
    "local_star",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class LocalStar(Silent):
    """One linear model per client, one penalty tuned over all: not private, a baseline.

    Attributes:
        model: Linear; a bias is penalised like the weights.
    """

    shape = Shape.POOLED

    model: Model = field(default_factory=Linear)

    def __str__(self) -> str:
        return "local*"

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that are not linear."""
        check_linear_model(self.kind, self.model)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Choose one penalty on every client's rows, then fit each client locally."""
        bias, prior = has_bias(self.model), choose_prior(clients, self.model)
        return linear_tree(modes(clients, prior, bias=bias), bias=bias)


def choose_prior(clients: Clients, model: Model) -> Prior:
    """Return the penalty with the least leave-one-out loss over the rows of all clients.

    Among equals the larger one; a client whose rows are not numbers has no say.
    """
    priors = [ridge_prior(model, clients.spec, lam) for lam in _MEAN]
    priors += [ridge_prior(model, clients.spec, lam, per_row=False) for lam in _SUM]
    bias, parts = has_bias(model), list(_parts(clients))
    totals = [math.fsum(_total(part, prior, bias) for part in parts) for prior in priors]
    least = min(totals)
    return priors[max(at for at, total in enumerate(totals) if total <= least)]


def check_linear_model(kind: str, model: Model) -> None:
    """Raise ValueError for other models than linear ones."""
    if not isinstance(model, Linear):
        raise ValueError(f"{kind} is for linear models, not {type(model).__name__}; use local")


def _total(part: Clients, prior: Prior, bias: bool) -> float:
    losses = row_totals(leave_one_out(part, prior, bias=bias), part)
    return math.fsum(losses[losses.isfinite()].tolist())


def _parts(clients: Clients) -> Iterator[Clients]:
    """Return clients of like size together, so that padding stays small."""
    order = torch.argsort(clients.counts, stable=True)
    sizes = clients.counts[order].tolist()
    begin = 0
    for end in range(1, len(sizes) + 1):
        # Sorted: the next one would be the longest.
        if end < len(sizes) and (end + 1 - begin) * sizes[end] <= _CELLS:
            continue
        here, begin = order[begin:end], end
        ids, starts, counts = clients.ids[here], clients.starts[here], clients.counts[here]
        yield replace(clients, ids=ids, starts=starts, counts=counts)
