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

from dataclasses import dataclass, field, replace

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Baselines, Clipping, Post, Rounds, check_numbers, register
from coterie.methods.baselines import InOwnUnits, Single, usual_lam
from coterie.models import Linear, Model
from coterie.solvers.structured import OwnUnits


class RowLevel(InOwnUnits):
    """A method whose published proof protects single rows, of which a client has at most `rows`."""

    rows: int
    convert: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, rows=">= 1")

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule: one round."""
        return replace(super().rounds(spec), between=(1, 1))

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return the bound, and the largest number of rows that the published proof needs."""
        usual = super().clipping(clients, rounds, clip)
        return replace(usual, rows=self.rows if self.convert else None)

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {}

    def bounded_units(self, clients: Clients, **how: bool) -> OwnUnits:
        """Return the first rows of every client in own units, cut to norm 1."""
        if int(clients.counts.max()) > self.rows:
            clients = replace(clients, counts=clients.counts.clamp_max(self.rows), memory={})
        return self.units(clients, bounded=True, **how)


@register(
    "dpaggr",
    releases="one clipped, noised mean of local models",
    not_applicable={
        "learns": "one average of clipped models is every client's model, shorter than any of them"
    },
)
@dataclass(frozen=True, kw_only=True)
class DPAggr(RowLevel):
    """One noised mean of local models as every client's model (Pathak et al. 2010).

    Attributes:
        lam: The ridge penalty of the fits; None for 0.3 / features.
        rows: The most rows of a client that are used, a public number.
        convert: Ask for the noise of the row-level proof, converted to clients; else for the noise
            that a bound on whole clients needs.
    """

    model: Model = field(default_factory=Linear)
    lam: float | None = None
    rows: int = 1000
    convert: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam="> 0")

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros: weights and a level."""
        self.check(spec)
        return {"model": torch.zeros(spec.features + 1, dtype=torch.float64)}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Fit locally; contribute the model."""
        lam = usual_lam(clients.spec.features) if self.lam is None else self.lam
        model = self.solve_ridge(self.bounded_units(clients), lam)
        return personal, {"model": model.to(clients.device)}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Take the released mean for every client's model."""
        return {"model": post.mean["model"].double()}

    def baselines(self) -> Baselines:
        """Compare with the local fit that is averaged."""
        return Baselines(local=Single(model=self.model, lam=self.lam))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Use the average in each client's own units."""
        units = self.units(clients)
        model = shared["model"].cpu().expand(len(clients), -1)
        return to(units.model(model[:, :-1], model[:, -1]), clients.device)
