"""One support vector machine for every client: DATA LEAVES THE CLIENTS, so it is never private.

    min_w  1/2 |w|^2 + C sum_ik loss(y_ik, w . x_ik)

What `mtlsvm` tends to for C2 -> infinity: the baseline with all rows in one place.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from coterie.data.federated import Clients
from coterie.methods.base import Baselines, register
from coterie.methods.localsvm import LocalSVM, Machines, check_constants, parted
from coterie.methods.mtl import Pooled
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.sdca import Losses, fit_joint
from coterie.tree import Tree, stack, to

_MOST_EPOCHS = 2000


@register(
    "globalsvm",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class GlobalSVM(Machines, Pooled):
    """One support vector machine on rows in one place: not private, a baseline.

    Attributes:
        model: Linear; a bias is penalised like the weights.
        c: The cost of errors.
        tube: Errors up to this are free (regression).
        class_weight: "none", "balanced" (by each client's own counts), or a weight per class.
        tol: The relative duality gap, unless 2,000 passes do not reach it.
    """

    model: Model = field(default_factory=Linear)
    c: float = 1.0
    tube: float = 0.1
    class_weight: Literal["none", "balanced"] | tuple[float, ...] = "none"
    tol: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_constants(c=self.c, tol=self.tol)
        self.losses()

    def losses(self) -> Losses:
        """Return what rows cost."""
        return Losses(c1=self.c, tube=self.tube, class_weight=self.class_weight)

    def baselines(self) -> Baselines:
        """Compare with local fits with the same constant."""
        return Baselines(
            local=LocalSVM(
                model=self.model, c=self.c, tube=self.tube, class_weight=self.class_weight
            )
        )

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit one machine, and give it to every client."""
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
