"""DP-MTRL: relationship learning on models that are released one by one, each with noise.

Gupta, Rana and Venkatesh 2016, "Differentially private multi-task learning": every round each
client releases its model with noise (output perturbation); the server learns the relation Omega
between clients from the noisy models V, and each client fits again, pulled to what the others say:

    min_w  mean squares + lam1/2 |w|^2 + lam2/2 (Q_kk |w|^2 + 2 w . sum_{j != k} Q_kj v_j)

with Q = Omega^-1, Omega = (V V^T)^(1/2) / tr: the terms of MTRL's objective in w_k, in closed form.
The proof needs that form, so classification is by least squares on targets -1 and 1 too, as in the
comparison of Liang et al. Their Proposition 3 converts the row-level guarantee: see `dpaggr`, whose
words on noise and on what is enforced hold here too. Every client's row is posted, and is protected
by noise of its own alone: that is why this needs so much of it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Method, Post, Shape, register
from coterie.methods.dpaggr import first_rows
from coterie.methods.mtrl import MTRL
from coterie.methods.single import Single, check_lam, check_linear, usual_lam
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.structured import OwnUnits
from coterie.tree import Tree, to

_LEAST = 1e-6


@register("dpmtrl")
@dataclass(frozen=True, kw_only=True)
class DPMTRL(Method):
    """Noisy models of all clients are posted, and the relation between clients learnt from them.

    Attributes:
        model: Linear, with or without a bias of each client's own, which is never posted.
        lam1: Weight of the squares of a model; None for 0.03 / features.
        lam2: Weight of the relation; None for 0.3 / (features clients).
        rows: The most rows of a client that are used, a public number.
        convert: Ask for the noise of the row-level proof, converted to clients.
    """

    shape = Shape.ROWS
    rounds_between = (1, 1)
    not_applicable = {  # noqa: RUF012
        "learns": "at epsilon 8 over 15 rounds each client's own row is buried in noise"
    }
    model: Model = field(default_factory=Linear)
    lam1: float | None = None
    lam2: float | None = None
    rows: int = 1000
    convert: bool = True

    def __post_init__(self) -> None:
        check_lam(self.lam1, "lam1")
        check_lam(self.lam2, "lam2")
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}: expected at least 1")

    @property
    def protects_rows(self) -> int | None:
        """The most rows of a client."""
        return self.rows if self.convert else None

    def check(self, spec: Spec) -> None:
        """Refuse other models and tasks."""
        check_linear(self, spec)

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that nothing can be learnt from."""
        refuse_degenerate(data)

    def _weights(self, clients: int, features: int) -> tuple[float, float]:
        ridge = usual_lam(features)
        lam1 = 0.1 * ridge if self.lam1 is None else self.lam1
        return lam1, ridge / clients if self.lam2 is None else self.lam2

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start with unrelated clients: Q = clients times the identity, no pull anywhere."""
        self.check(spec)
        return {
            "towards": torch.zeros(spec.clients, spec.features, dtype=torch.float64),
            "strength": torch.full((spec.clients,), float(spec.clients), dtype=torch.float64),
        }

    def contribution(self, shared: Tree) -> Tree:
        """Contribute one model, as a vector."""
        return {"model": torch.zeros(shared["towards"].shape[1], dtype=torch.float64)}

    def enrol(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {"begun": torch.zeros(clients)}

    def _fit(self, shared: Tree, clients: Clients) -> tuple[OwnUnits, Tensor]:
        """Fit every client, pulled to what the others' noisy models say."""
        assert isinstance(self.model, Linear)
        few = first_rows(clients, self.rows)
        units = OwnUnits.of(few, bias=self.model.bias, signs=True, bounded=True)
        ids = clients.ids.cpu()
        lam1, lam2 = self._weights(clients.spec.clients, clients.spec.features)
        strength = lam2 * shared["strength"].cpu()[ids]
        total = lam1 + strength
        anchor = shared["towards"].cpu()[ids] * (strength / total)[:, None]
        # A penalty of each client's own is one of 1 in units that are so much shorter.
        moved = units.rescaled(total.rsqrt()).moved()
        pulled = {"weight": (anchor * total.sqrt()[:, None])[:, None]}
        fit = solve_ridge(moved, anchor=pulled, lam=1.0, bias=False)
        return units, fit["weight"][:, 0].double() * total.rsqrt()[:, None]

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Fit, and contribute the model."""
        _, model = self._fit(shared, clients)
        return personal, {"model": model.to(clients.device)}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Learn the relation from the noisy models, and what it says to each client."""
        noisy = post.value["model"].double()
        vectors, sizes, _ = torch.linalg.svd(noisy, full_matrices=False)
        # Omega = V diag(sizes) V^T / sum + a little, its inverse by the same vectors.
        shares = sizes / sizes.sum().clamp_min(1e-300)
        little = _LEAST + 1 / len(noisy) ** 2
        inside = 1 / (shares + little) - 1 / little
        strength = 1 / little + (vectors.square() * inside).sum(dim=1)
        others = noisy / little + (vectors * inside) @ (vectors.mT @ noisy)
        others = others - strength[:, None] * noisy
        return {"towards": -others / strength[:, None], "strength": strength}

    def reference(self) -> Method:
        """Learn the relation with all rows in one place."""
        return MTRL(model=self.model)

    def alone(self) -> Method:
        """Learn alone by ridge or logistic regression."""
        return Single(model=self.model)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit once more, pulled to what the last noisy models say."""
        units, model = self._fit(shared, clients)
        return to(units.model(model, torch.zeros(len(model))), clients.device)
