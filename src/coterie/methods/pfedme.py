"""pFedMe: the shared model minimises the clients' Moreau envelopes, personal models attain them.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
Algorithm 1:

    min_w  mean_k F_k(w),      F_k(w) = min_theta  mean_i loss(x_i, theta) + lam/2 |theta - w|^2

grad F_k(w) = lam (w - theta_k(w)), so a client that takes part does `local_rounds` steps on its
copy of the shared model, w_k = shared at first,

    theta <- argmin of F_k at w_k,      w_k <- w_k - lr lam (w_k - theta)

and contributes w_k - shared; the server moves by beta times the released mean (beta = 1: the plain
mean; the paper allows more). The personal model is theta: it never leaves, and every client solves
for it once more at the end, against the final shared model.

The inner problem is the one that PMTL and Ditto solve, exactly for linear least squares, else by
`sgd` from the last theta. With one local round and lr lam = 1 it is PMTL's round; at any lr with
one local round its fixed point is PMTL's, w = mean_k theta_k(w). Why this and not APFL: ADR 18.
"""

from dataclasses import dataclass, field

from coterie.core.rng import Rng
from coterie.core.tree import Tree, add, map_leaves, scale, stack, subtract
from coterie.data.federated import Clients
from coterie.methods.base import Post, check_numbers, register
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.local import How
from coterie.solvers.sgd import SGD


@register("pfedme", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class PFedMe(Proximal):
    """A shared model by the clients' Moreau envelopes, and personal models (Dinh et al. 2020).

    Attributes:
        lam: How strongly personal models are regularised towards the shared one.
        lr: Step of a client's copy of the shared model along its envelope; lr lam is the share of
            the way to theta that it goes, at most 1.
        local_rounds: Steps of that copy in a round, each with a solve for theta.
        beta: What the server takes of the released mean.
        solver: Of theta: "exact" for linear least squares, "sgd", or "auto".
        sgd: Local steps of one solve for theta.
        last_epochs: Epochs of the last solve (SGD only).
    """

    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    lr: float = 1.0
    local_rounds: int = 5
    beta: float = 1.0
    solver: How = "auto"
    sgd: SGD = field(default_factory=SGD)
    last_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam="> 0", lr="> 0", beta="> 0", local_rounds=">= 1")
        if self.lr * self.lam > 1:
            raise ValueError(
                f"lr = {self.lr} with lam = {self.lam}: steps of lr lam > 1 go beyond the personal "
                f"model; use lr = {1 / self.lam:.3g} or less"
            )

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Move a copy of the shared model along the own envelope; contribute its change."""
        copy, theta, inner = stack(shared, len(clients)), personal, self.problem()
        step = self.lr * self.lam
        for local in range(self.local_rounds):
            stream = rng.at("local", local)
            theta = inner.solve(theta, clients, stream, round=round, anchor=copy, keep_failed=True)
            copy = map_leaves(lambda w, near: w + step * (near - w), copy, theta)
        return theta, subtract(copy, shared)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by beta times the released mean."""
        return add(shared, scale(post.mean, self.beta))
