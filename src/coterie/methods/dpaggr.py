"""DP-AGGR: every client's model is one noisy average of models fitted locally.

Pathak, Rane and Raj 2010, "Multiparty differential privacy via aggregation of locally trained
classifiers": each client minimises its mean loss + lam/2 |w|^2 locally, and the average of the
models is released once, with noise for one row: where the loss is 1-Lipschitz on rows of norm at
most 1, one of n rows moves a model by at most 2/(n lam).

Liang et al. compare whole clients, by their Proposition 3: (epsilon, delta) for clients of at most
n rows from (epsilon/n, delta/(n e^epsilon)) for rows. That decides how much noise is added here,
with 2 B/n for what a row does, B the plan's `clip` in place of the proof's 1/lam. What the proof
assumes of rows is enforced: in a client's own units those longer than 1 are cut to that length, and
only the first `rows` of them are used. Since the units are made of all rows, nothing is claimed for
single rows all the same: promised is the ledger's account of the noise, for whole clients, whose
models are clipped to B.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Baselines, Clipping, Method, Post, Rounds, Shape, register
from coterie.methods.baselines import Single, check_lam, check_linear, own_units, usual_lam
from coterie.models import Linear, Model
from coterie.solvers.structured import OwnUnits


def first_rows(clients: Clients, rows: int) -> Clients:
    """Keep the first rows of every client: a public number of them at most."""
    if int(clients.counts.max()) <= rows:
        return clients
    return replace(clients, counts=clients.counts.clamp_max(rows), memory={})


@register(
    "dpaggr",
    releases="one clipped, noised mean of local models",
    not_applicable={
        "learns": "one average of clipped models is every client's model, shorter than any of them"
    },
)
@dataclass(frozen=True, kw_only=True)
class DPAggr(Method):
    """One noised mean of local models as every client's model (Pathak et al. 2010).

    Attributes:
        model: Linear, with or without a bias.
        lam: The ridge penalty of the fits; None for 0.3 / features.
        rows: The most rows of a client that are used, a public number.
        convert: Ask for the noise of the row-level proof, converted to clients; else for the noise
            that a bound on whole clients needs.
    """

    shape = Shape.SUM
    model: Model = field(default_factory=Linear)
    lam: float | None = None
    rows: int = 1000
    convert: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lam(self.lam)
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}: expected at least 1")

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule: one round."""
        return replace(super().rounds(spec), between=(1, 1))

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return the bound, and the largest number of rows that the published proof needs."""
        usual = super().clipping(clients, rounds, clip)
        return replace(usual, rows=self.rows if self.convert else None)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, spec)
        if data is not None:
            refuse_degenerate(data)

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros: weights and a level."""
        self.check(spec)
        return {"model": torch.zeros(spec.features + 1, dtype=torch.float64)}

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {"begun": torch.zeros(clients)}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Fit locally; contribute the model."""
        assert isinstance(self.model, Linear)
        few = first_rows(clients, self.rows)
        units = OwnUnits.of(few, bias=self.model.bias, bounded=True)
        lam = usual_lam(clients.spec.features) if self.lam is None else self.lam
        root = torch.full((clients.spec.features,), 1 / math.sqrt(lam), dtype=torch.float64)
        weight, level = units.solve(root)
        return personal, {"model": torch.cat([weight, level[:, None]], dim=1).to(clients.device)}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Take the released mean for every client's model."""
        return {"model": post.mean["model"].double()}

    def baselines(self) -> Baselines:
        """Compare with the local fit that is averaged."""
        return Baselines(local=Single(model=self.model, lam=self.lam))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Use the average in each client's own units."""
        units = own_units(self, clients)
        model = shared["model"].cpu().expand(len(clients), -1)
        return to(units.model(model[:, :-1], model[:, -1]), clients.device)
