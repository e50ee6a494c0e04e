"""Pooled: one linear model for every client: DATA LEAVES THE CLIENTS, so it is never private.

    min_w  sum over all rows of loss(x_i, w) + lam/2 |w - start|^2

with the lam of the least leave-one-out loss: ridge, logistic or softmax regression on all rows in
one place. What a shared model can do at best, where clients are not allowed to differ.
"""

from dataclasses import dataclass, field, replace

import torch

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.methods.base import Shape, Silent, register
from coterie.methods.local import has_bias, linear_tree, modes, ridge_prior
from coterie.methods.local_star import check_linear_model
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.posterior import leave_one_out
from coterie.tree import Tree, stack

_LAMS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@register(
    "pooled",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class PooledLinear(Silent):
    """One linear model on rows in one place: not private, a baseline.

    Attributes:
        model: Linear; a bias is penalised like the weights.
    """

    shape = Shape.POOLED

    model: Model = field(default_factory=Linear)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that are not linear."""
        check_linear_model(self.kind, self.model)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit one model to all rows, and give it to every client."""
        bias, one = has_bias(self.model), _as_one(clients)
        priors = [ridge_prior(self.model, clients.spec, lam, per_row=False) for lam in _LAMS]
        losses = [float(leave_one_out(one, prior, bias=bias).sum()) for prior in priors]
        least = min(losses)
        prior = priors[max(at for at, loss in enumerate(losses) if loss <= least)]
        found = linear_tree(modes(one, prior, bias=bias), bias=bias)
        return stack({name: leaf[0] for name, leaf in found.items()}, len(clients))


def _as_one(clients: Clients) -> Clients:
    """Make one client of all of them, whose rows follow one another."""
    order = torch.argsort(clients.starts, stable=True)
    starts, counts = clients.starts[order], clients.counts[order]
    follow = bool((starts[1:] == (starts + counts)[:-1]).all())
    if not follow:
        raise ValueError("pooled fits all clients of a data set together; leave none of them out")
    return replace(
        clients,
        ids=torch.zeros(1, dtype=torch.int64),
        starts=starts[:1],
        counts=counts.sum()[None],
        memory={},  # what solvers keep is of single clients
    )
