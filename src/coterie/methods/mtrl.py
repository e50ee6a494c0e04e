"""MTRL: multi-task relationship learning without privacy.

Zhang and Yeung 2010, "A convex formulation for learning task relationships in multi-task
learning":

    min_{W, Omega}  sum_k mean loss of client k(w_k) + lam1/2 |W|^2 + lam2/2 tr(W^T Omega^-1 W)

over positive semidefinite Omega (clients by clients) of trace 1, to a relative duality gap of the
equivalent problem in W alone (`solvers.mtrl`), in each client's own units. All rows are in one
place: a baseline.
"""

from dataclasses import dataclass, field

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients
from coterie.methods.base import register
from coterie.methods.mtl import Pooled
from coterie.methods.single import check_lam, own_units, usual_lam
from coterie.models import Linear, Model
from coterie.solvers.multitask import fit_mtrl


@register(
    "mtrl",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class MTRL(Pooled):
    """Models and the relation between clients, rows in one place: not private, a baseline.

    Attributes:
        model: Linear, with or without a bias of each client's own, which is not penalised.
        lam1: Weight of the squares of the models; None for a tenth of what lam2 does for
            unrelated clients.
        lam2: Weight of the relation; None for 0.3 / (features clients), a ridge penalty of 0.3 /
            features for unrelated clients.
        tol: The relative duality gap at which it stops.
    """

    model: Model = field(default_factory=Linear)
    lam1: float | None = None
    lam2: float | None = None
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lam(self.lam1, "lam1")
        check_lam(self.lam2, "lam2")
        check_lam(self.tol, "tol")

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit all clients and their relation."""
        units = own_units(self, clients)
        ridge = usual_lam(clients.spec.features)
        fit = fit_mtrl(
            units.moved(),
            lam1=0.1 * ridge if self.lam1 is None else self.lam1,
            lam2=ridge / len(clients) if self.lam2 is None else self.lam2,
            bias=units.bias and units.binary,
            tol=self.tol,
        )
        return to(units.model(fit.weight, fit.bias), clients.device)
