"""DP-MTRL: relationship learning on models that are released one by one, each with noise.

Gupta, Rana and Venkatesh 2016, "Differentially private multi-task learning": every round each
client releases its model with noise (output perturbation); the server learns the relation Omega
between clients from the noisy models V, and each client fits again, regularised towards what the
others say:

    min_w  mean squares + lam1/2 |w|^2 + lam2/2 (Q_kk |w|^2 + 2 w . sum_{j != k} Q_kj v_j)

with Q = Omega^-1, Omega = (V V^T)^(1/2) / tr: the terms of MTRL's objective in w_k, in closed form.
The proof needs that form, so classification is by least squares on targets -1 and 1 too, as in the
comparison of Liang et al. Their Proposition 3 converts the row-level guarantee: see `dpaggr`, whose
words on noise and on what is enforced hold here too. Every client's row is released, and is
protected by its own noise only, which is why the noise is large.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Baselines, Post, Shape, check_numbers, register
from coterie.methods.baselines import MTRL, Single, usual_lam
from coterie.methods.dpaggr import RowLevel
from coterie.models import Linear, Model
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.structured import OwnUnits

_LEAST = 1e-6


@register(
    "dpmtrl",
    releases="each client's model, each with its own noise",
    not_applicable={"learns": "at epsilon 8 the noise on each client's own row hides it"},
)
@dataclass(frozen=True, kw_only=True)
class DPMTRL(RowLevel):
    """Personal linear models, related by noised models (Gupta et al. 2016).

    Attributes:
        lam1: Weight of the squares of a model; None for 0.03 / features.
        lam2: Weight of the relation; None for 0.3 / (features clients).
        rows: The most rows of a client that are used, a public number.
        convert: Ask for the noise of the row-level proof, converted to clients.
    """

    shape = Shape.ROWS
    model: Model = field(default_factory=Linear)
    lam1: float | None = None
    lam2: float | None = None
    rows: int = 1000
    convert: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam1="> 0", lam2="> 0")

    def _weights(self, clients: int, features: int) -> tuple[float, float]:
        ridge = usual_lam(features)
        lam1 = 0.1 * ridge if self.lam1 is None else self.lam1
        return lam1, ridge / clients if self.lam2 is None else self.lam2

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start with unrelated clients: Q = clients times the identity, no proximal term."""
        self.check(spec)
        return {
            "towards": torch.zeros(spec.clients, spec.features, dtype=torch.float64),
            "strength": torch.full((spec.clients,), float(spec.clients), dtype=torch.float64),
        }

    def contribution(self, spec: Spec) -> Tree:
        """Contribute one model, as a vector."""
        return {"model": torch.zeros(spec.features, dtype=torch.float64)}

    def _fit(self, shared: Tree, clients: Clients) -> tuple[OwnUnits, Tensor]:
        """Fit every client, regularised towards what the others' noisy models say."""
        units, ids = self.bounded_units(clients, signs=True), clients.ids.cpu()
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

    def baselines(self) -> Baselines:
        """Compare with MTRL on centralised rows, and with local ridge or logistic regression."""
        return Baselines(local=Single(model=self.model), centralised=MTRL(model=self.model))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit once more, regularised towards what the last noisy models say."""
        units, model = self._fit(shared, clients)
        return to(units.model(model, torch.zeros(len(model))), clients.device)
