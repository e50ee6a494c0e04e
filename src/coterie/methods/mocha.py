"""MOCHA: multi-task support vector machines by a primal-dual method that releases a row per client.

Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning", NeurIPS 2017:

    min_W  C1 sum_tk loss(y_tk, w_t . x_tk) + 1/2 sum_ts (M^-1)_ts w_t . w_s

with M^-1 = lam1 Omega^-1 + lam2 I where the relation between clients is learnt (Omega = (W W^T)^1/2
over its trace, times the number of clients), or M = 1 1^T + I / C2 for mean regularisation, which
is `mtlsvm`'s objective. In duals W = M Q, Q the rows q_t = sum_i b_ti x_ti. Clients take dual steps
on their own rows against w_t, with the quadratic term enlarged by

    sigma = max_t sum_s |M_ts| / M_tt,

so that steps taken side by side never overshoot; a client that was dropped has taken none (theta =
1), one that stops early is less accurate (theta in between). Each client's own q_t goes to the
server in a row of its own. No other noise covers it: this is a baseline, not a private method.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, map_leaves
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Baselines, Duality, Post, Rounds, Shape, check_numbers, register
from coterie.methods.svm import ClassWeight, Machines, joined, kept_part, padded, parted
from coterie.models import Linear, Model
from coterie.solvers.sdca import Losses, certify, take_steps

_LEAST = 1e-3  # of the mean eigenvalue of the relation: its inverse must exist


@register(
    "mocha",
    releases="a row per client, each with its own noise",
    not_applicable={
        "learns": "the noise on each client's own row hides it; not designed for privacy"
    },
)
@dataclass(frozen=True, kw_only=True)
class MOCHA(Machines):
    """Support vector machines with related clients, not designed for privacy (Smith et al. 2017).

    Attributes:
        c1: The cost of errors.
        relation: "mean" (`mtlsvm`'s objective) or "learned".
        c2: Of "mean": what being different costs.
        lam1: Of "learned": weight of the relation.
        lam2: Of "learned": weight of the squares.
        every: Of "learned": rounds between updates of the relation.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by each client's own counts), or a weight per class.
        epochs: Local passes in a round, which decide how exact a local solve is.
        draws: "replacement" (as published) or "permutation".
        stop: The relative duality gap at which a run without privacy is done ("mean" only: a
            relation that changes has another objective every time).
    """

    shape = Shape.ROWS
    model: Model = field(default_factory=Linear)
    c1: float = 1.0
    relation: Literal["mean", "learned"] = "mean"
    c2: float = 10.0
    lam1: float = 1.0
    lam2: float = 0.1
    every: int = 10
    tube: float = 0.1
    class_weight: ClassWeight = "none"
    epochs: int = 1
    draws: Literal["replacement", "permutation"] = "replacement"
    stop: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, c1="> 0", c2="> 0", lam1="> 0", lam2="> 0", stop="> 0")
        check_numbers(self, every=">= 1", epochs=">= 1")
        self.losses()

    def losses(self) -> Losses:
        """Return what rows cost."""
        return Losses(c1=self.c1, tube=self.tube, class_weight=self.class_weight)

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule for rounds; a learned relation has no fixed objective, so no gap."""
        return replace(
            super().rounds(spec),
            between=(1, 5),
            without_noise=1000,
            passes=self.epochs,
            duality=Duality(self.stop, self._certify) if self.relation == "mean" else None,
        )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros, and from mean regularisation or unrelated clients."""
        self.check(spec)
        model = joined(map_leaves(torch.Tensor.double, self.model.init(spec, rng)))
        rows = model.new_zeros(spec.clients, *model.shape)
        return {"models": rows, "sums": rows.clone(), "matrix": self._matrix(rows)}

    def _matrix(self, models: Tensor) -> Tensor:
        """Return M for these models."""
        clients = len(models)
        if self.relation == "mean":
            return torch.ones(clients, clients).double() + torch.eye(clients).double() / self.c2
        vectors, sizes, _ = torch.linalg.svd(models.flatten(1), full_matrices=False)
        total = float(sizes.sum())
        if total <= 0:
            return torch.eye(clients).double() / (self.lam1 + self.lam2)
        omega = clients * sizes / total
        # Eigenvalues o / (lam1 + lam2 o); those outside the span of the models are _LEAST.
        values = (omega + _LEAST) / (self.lam1 + self.lam2 * (omega + _LEAST))
        rest = _LEAST / (self.lam1 + self.lam2 * _LEAST)
        inside: Tensor = (vectors * (values - rest)) @ vectors.mT
        return inside + rest * torch.eye(clients).double()

    def contribution(self, spec: Spec) -> Tree:
        """Contribute the change of one client's q."""
        return {"sums": self.init(spec, Rng.seeded(0))["sums"][0]}

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start with no dual steps taken."""
        return {"dual": torch.zeros(clients, 0, spec.outputs, dtype=torch.float64)}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Take dual steps against the own model; contribute their sum over own rows."""
        ids, matrix = clients.ids.cpu(), shared["matrix"].cpu()
        sigma = (matrix.abs().sum(dim=1) / matrix.diagonal()).max()
        dual, moved = take_steps(
            clients,
            shared["models"].cpu()[ids],
            sigma * matrix.diagonal()[ids],
            personal["dual"],
            self.losses(),
            keys=rng.at("order").keys(clients.ids),
            epochs=self.epochs,
            replace=self.draws == "replacement",
        )
        return {"dual": dual.to(clients.device)}, {"sums": moved.to(clients.device)}

    def on_clipped(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Take the part of the dual step that the clip kept."""
        start = padded(before["dual"], after["dual"].shape[1])
        return {"dual": kept_part(start, after["dual"], kept)}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Add the released rows, update the relation every `every` rounds, recompute all models."""
        sums = shared["sums"] + post.value["sums"].to(shared["sums"])
        matrix = shared["matrix"]
        if self.relation == "learned" and (post.index + 1) % self.every == 0:
            matrix = self._matrix(shared["models"].cpu()).to(matrix)
        models = (matrix @ sums.flatten(1)).reshape(sums.shape)
        return {"models": models, "sums": sums, "matrix": matrix}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return each client its own model."""
        own = shared["models"][clients.ids.to(shared["models"].device)].float()
        return parted(own, self.model.init(clients.spec, rng))

    def _certify(self, shared: Tree, personal: Tree, clients: Clients) -> Tensor:
        """Return the own half of w . q and the rows' losses, and the part of the duality gap."""
        ids = clients.ids.cpu()
        models, sums = shared["models"].cpu()[ids], shared["sums"].cpu()[ids]
        costs, gaps = certify(clients, models, personal["dual"], self.losses())
        ridge = 0.5 * (models * sums).flatten(1).sum(dim=1)
        return torch.stack([ridge + costs, gaps], dim=1)

    def baselines(self) -> Baselines:
        """Compare with local support vector machines."""
        c = self.c1 / (self.c2 if self.relation == "mean" else self.lam1 + self.lam2)
        return Baselines(local=self.local_machine(c))
