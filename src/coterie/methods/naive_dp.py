"""Naive client-level privacy: the models of all clients are one big model, and it is released.

This is the baseline of Figure 1 of Hu, Wu, Smith, "Private Multi-Task Learning", TMLR 2023: plain
differential privacy for whole clients, on the concatenation W = [w_1 .. w_m] of all personal
models. **It is not useful; it shows the cost of differential privacy without the billboard.** Plain
differential privacy bounds how much every output depends on any one client, including the client's
personal model. But row k of W is computed from client k's data only, and nothing is averaged over
clients. So its noise is as large as its whole contribution, in each parameter: at any useful budget
the rows are noise. Joint (billboard) privacy lets a client's personal model depend on its own data;
the other methods of this package use it.

The objective is PMTL's, mean_i loss(x_i, w_k) + lam/2 |w_k - wbar|^2, wbar the mean of the released
rows. In a round a client starts from its released row W_k, works on its own problem, and
contributes w_k' - W_k, clipped; every row gets noise of its own, and W moves by the release. A
client's model is its released row: there is no private state and no last solve, since plain
differential privacy would not cover its result.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, map_leaves, send, stack, subtract, take
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Notes, Post, Rounds, Shape, register
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.local import How
from coterie.solvers.sgd import SGD


@register(
    "naive_dp",
    releases="every client's model, each with its own noise",
    not_applicable={"learns": "a demonstration: the noise on each client's row hides it"},
)
@dataclass(frozen=True, kw_only=True)
class NaiveDP(Proximal):
    """All personal models released with noise: shows why joint privacy is needed.

    Attributes:
        lam: How strongly models are regularised towards the mean of the released ones.
        solver: "exact" for linear least squares, "sgd", or "auto".
        sgd: Local steps of a round.
    """

    shape = Shape.ROWS
    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    solver: How = "auto"
    sgd: SGD = field(default_factory=SGD)

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule: one round, since more only add noise."""
        return replace(super().rounds(spec), between=(1, 1))

    def notes(self, *, private: bool = True, rounds: int = 1, clip: float = 1.0, **_: Any) -> Notes:
        """Return that this is a demonstration, and why no setting helps."""
        caveat = (
            "naive_dp is a demonstration that is MEANT to be useless: it releases every client's "
            "model under plain differential privacy, so the noise on each model hides it. It shows "
            "why joint privacy is needed; use pmtl to learn something."
        )
        if not private:
            caveat = (
                "naive_dp is a demonstration; without noise it is mean-regularised learning that "
                "releases every client's model in clear."
            )
        return Notes(
            settings=(
                f"{rounds} round{'s' * (rounds > 1)}, clip {clip:.3g}: no choice helps, since "
                "nothing is averaged over clients and the noise grows with the clip.",
            ),
            caveats=(caveat,),
        )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start every row from the same public model."""
        return stack(self.model.init(spec, rng), spec.clients)

    def contribution(self, spec: Spec) -> Tree:
        """Contribute the change of one row."""
        return self.model.init(spec, Rng.seeded(0))

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing at home."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Work from the own released row, towards the mean of all; contribute the change."""
        start = self.current_models(shared, personal, clients)
        mean = map_leaves(lambda leaf: leaf.mean(dim=0), shared)
        after = self.problem().solve(
            start, clients, rng, round=round, anchor=mean, keep_failed=True
        )
        return personal, subtract(after, start)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move every row by its own released change, with its noise."""
        return add(shared, map_leaves(torch.Tensor.float, post.value))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return the released rows, which every client observes."""
        return self.current_models(shared, personal, clients)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return the released rows."""
        return take(shared, send(clients.ids, clients.device))
