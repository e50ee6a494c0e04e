"""FedAvg and FedProx: one model for every client.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017; Li et al., "Federated Optimization in Heterogeneous
Networks" (FedProx), MLSys 2020. A client starts from the shared model, works on

    mean_i loss(x_i, w) + prox/2 |w - shared|^2      (prox = 0: FedAvg)

and contributes w' - shared, with the same weight for every client (weights by row counts are
private data that the noise does not cover). Every client is evaluated on the shared model.
"""

from dataclasses import dataclass, field, replace

from coterie.core.rng import Rng
from coterie.core.tree import Tree, stack, subtract
from coterie.data.federated import Clients, Spec
from coterie.methods.base import check_numbers, register
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD


@register("fedavg", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Proximal):
    """One shared model for all clients (FedAvg; FedProx with `prox`).

    Attributes:
        prox: Weight of FedProx's proximal term towards the shared model; 0 is FedAvg.
        solver: "exact" for linear least squares with prox > 0, "sgd", or "auto".
        sgd: Local steps of a round.
        step_noise: As published for DPFedAvg (Wu et al.): the standard deviation of noise on every
            local gradient, without clipping; it guarantees nothing. See `dpfedmtl`.
    """

    model: Model = field(default_factory=Linear)
    prox: float = 0.0
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=5))
    step_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, prox=">= 0")

    def problem(self) -> LocalProblem:
        """Return the local problem of a round."""
        return replace(super().problem(), lam=self.prox)

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Work from the shared model; contribute the difference to it."""
        start = stack(shared, len(clients))
        if self.step_noise:
            noisy = self.noisy_steps(start, tuple(shared), clients, rng, round)
            return personal, subtract(noisy, shared)
        after = self.problem().solve(
            start, clients, rng, round=round, anchor=shared, keep_failed=True
        )
        return personal, subtract(after, shared)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return the shared model as every client's model."""
        return stack(shared, len(clients))
