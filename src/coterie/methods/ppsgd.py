"""PP-SGD: linear models that are the sum of a shared and a personal part.

Bietti, Wei, Dudik, Langford, Wu, "Personalization Improves Privacy-Accuracy Tradeoffs in Federated
Learning", ICML 2022:

    min_{w, theta_1..theta_m}  (1/m) sum_k mean_i loss(y_i, (w + theta_k) . x_i)

w is shared and released, theta_k stays with its client. Both have the same gradient g, that of the
loss at u = w + theta_k. With step sizes eta_w and eta_theta one joint step moves u by
(eta_w + eta_theta) g, of which the share rho = eta_w / (eta_w + eta_theta) is w's, and so does any
number of local steps: a client takes local steps of length eta_w + eta_theta on u, contributes

    rho (u' - u),      and keeps      theta' = theta + (1 - rho) (u' - u).

So there is no solver of its own here, and one local step a round is the paper's algorithm with the
clip on eta_w g. What the clip cuts off is lost to w only; theta keeps its own part.

`ridge` adds ridge/2 |theta_k|^2, by a proximal step on theta after the local steps of a round, as
long as these were: theta <- theta / (1 + ridge eta_theta steps). After the last round every client,
sampled or not, takes steps on theta only, w held fixed; with a ridge it solves for theta exactly.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, by_row, map_leaves, scale, stack, subtract
from coterie.data.federated import Clients, Spec
from coterie.methods.base import check_linear, check_numbers, register
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.sgd import SGD


@register("ppsgd", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class PPSGD(Proximal):
    """A shared plus a personal linear model, trained together (Bietti et al. 2022).

    Attributes:
        model: Linear; other models are not sums of two parts.
        share: rho = eta_w / (eta_w + eta_theta): the shared part's share of every step.
        sgd: Local steps of a round; `sgd.lr` is eta_w + eta_theta.
        ridge: Weight of the squares of theta.
        last_epochs: Epochs of the last steps, on theta only.
    """

    model: Model = field(default_factory=Linear)
    share: float = 0.5
    sgd: SGD = field(default_factory=lambda: SGD(epochs=5))
    ridge: float = 0.0
    last_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise ValueError(
                f"share = {self.share}: expected a number between 0 and 1; use local for 0 and "
                "fedavg for 1"
            )
        check_numbers(self, ridge=">= 0")

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models whose predictions are not sums of those of two parts."""
        check_linear(self, "linear, or pmtl or ditto for this model")
        super().check(spec, **given)

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start with theta = 0."""
        return map_leaves(torch.zeros_like, stack(shared, clients))

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Take steps on w + theta; contribute w's share of the way, keep theta's."""
        start = add(personal, shared)
        after = self.problem().solve(
            start, clients, rng, round=round, anchor=None, keep_failed=True
        )
        moved = subtract(after, start)
        theta = map_leaves(lambda own, way: own + (1 - self.share) * way, personal, moved)
        return self._shrunk(theta, clients, round), scale(moved, self.share)

    def _shrunk(self, theta: Tree, clients: Clients, round: int) -> Tree:
        """Take the ridge's proximal step, as long as the steps of this round."""
        if self.ridge == 0:
            return theta
        steps = torch.from_numpy(self.sgd.count_steps(clients.counts.numpy()))
        length = self.ridge * (1 - self.share) * self.sgd.rate(round) * steps.float()
        factor = (1 / (1 + length)).to(clients.device)
        return map_leaves(lambda leaf: leaf * by_row(factor, leaf), theta)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return w + theta, after more steps on theta only."""
        last = self.last_problem()
        slower = replace(last.sgd, lr=(1 - self.share) * self.sgd.lr)
        problem = replace(last, how="auto", sgd=slower, lam=self.ridge)
        start = self.current_models(shared, personal, clients)
        return problem.solve(start, clients, rng, round=0, anchor=shared)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return w + theta."""
        return add(personal, shared)
