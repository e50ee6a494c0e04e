"""Related clients: a public, fixed matrix Omega says who should be like, or unlike, whom.

Hu, Wu, Smith, "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023, name the general problem, of which PMTL is the mean-regularised case:

    min_W  sum_k mean_i loss(x_i, w_k) + lam tr(W Omega W^T),      W = [w_1 .. w_m]

with W less the model's public start (zero for linear models). To fit it to a released sum, write

    Omega = D + B diag(s) B^T,      D diagonal and positive, s = -1 or 1, B (m x r)

all public. With B_k for row k of B, the gradient of the second term in w_k is

    2 lam (D_kk w_k + (W B) diag(s) B_k)

Client k needs only W B of the others. It solves its local problem with proximal weight 2 lam D_kk
towards a_k = -(W B) diag(s) B_k / D_kk. Its own part of W B is its model times B_k (r scaled
copies of the model), so W B is a sum over clients, and that sum is released.

**What is sent.** a_k follows from what was released, so a client need not send its model but only
how far it is from a_k: (w_k - a_k) B_k / b, b = max_j |B_j| (`change_from = "anchor"`). Every
client can add sum_k a_k B_k. The clip then bounds |w_k - a_k| |B_k| / b: the model's distance from
its anchor, for the client with the longest row, so the usual 0.5 means what it does in PMTL.
"start" sends (w_k - start) B_k / b, the published form. Sensitivity and guarantee are those of any
clipped sum.

**Damping.** A round answers the last W B with a new one. For squared loss with Hessians A_k this
map has the derivative -K, K similar to M^(-1/2) B diag(s) B^T M^(-1/2) with M = D + A / (2 lam).
Its eigenvalues are real and from -1 to L, L the largest eigenvalue of D^(-1/2) B diag(s) B^T
D^(-1/2), or 0. Where L > 1, plain rounds may diverge: clients that should be unlike each other
answer with ever larger opposites. A step of 2 / (2 + L) has derivatives 1 - 2 (1 + K) / (2 + L), of
size below 1. It is public, and 1 (no damping) where all s = -1, as for means, clusters, and any
Omega whose largest eigenvalue is the one that occurs most often.

The mean relation is D = I, s = -1, B = 1 / sqrt(m): it is used where no Omega is given, and every
round is then PMTL's with lam = half of PMTL's.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, map_leaves, send, stack, subtract
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Notes, Post, Serving, check_numbers, register
from coterie.methods.pmtl import begin, begun, check_membership
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.sgd import SGD
from coterie.solvers.structured import SAME, Decomposition, check_relation, decompose, mean_relation

Matrix = tuple[tuple[float, ...], ...]
_SUMS = (
    "related."  # shared leaves that hold the mean of what clients send, before their model's name
)


@register("related", releases="clipped, noised sums of changes")
@dataclass(frozen=True, kw_only=True)
class Related(Proximal):
    """One model per client, with a public matrix of relations between clients.

    Attributes:
        lam: Weight of the relation.
        omega: Omega, m x m, symmetric and positive semidefinite, in the order of the clients; empty
            for the mean relation, unless `factors` are given.
        diagonal: D of the decomposition, positive; empty to choose it.
        factors: In place of `omega`, with `diagonal` and `signs`: B, m x r.
        signs: s, -1 or 1 for each column of B.
        solver: "exact" for linear least squares, "sgd", or "auto".
        sgd: Local steps of a round.
        change_from: "anchor" (default) or "start": see the module's docstring.
        last_epochs: Epochs of the last solve, which every client does and which is free (SGD only).
    """

    model: Model = field(default_factory=Linear)
    lam: float = 0.15
    omega: Matrix = ()
    diagonal: tuple[float, ...] = ()
    factors: Matrix = ()
    signs: tuple[float, ...] = ()
    solver: How = "auto"
    sgd: SGD = field(default_factory=SGD)
    change_from: Literal["anchor", "start"] = "anchor"
    last_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam="> 0")
        if self._given is not None:
            check_relation(self._given)

    @cached_property
    def _given(self) -> Decomposition | None:
        """Decompose what was given; None for the mean relation."""
        if self.factors:
            return self._spelt_out()
        if self.signs or (self.diagonal and not self.omega):
            raise ValueError("diagonal and signs: expected with factors, or diagonal with omega")
        if not self.omega:
            return None
        omega, clients = _matrix("omega", self.omega), len(self.omega)
        if omega.shape != (clients, clients) or not torch.allclose(
            omega, omega.mT, rtol=0, atol=SAME * float(omega.abs().max())
        ):
            raise ValueError(
                f"omega: given {clients} rows of {omega.shape[1]} numbers; expected a symmetric "
                "matrix with a row and a column for each client"
            )
        if self.diagonal and len(self.diagonal) != clients:
            raise ValueError(f"diagonal: given {len(self.diagonal)} numbers, expected {clients}")
        chosen = torch.tensor(self.diagonal, dtype=torch.float64) if self.diagonal else None
        return decompose(omega, chosen)

    def _spelt_out(self) -> Decomposition:
        factors = _matrix("factors", self.factors)
        if self.omega or len(self.diagonal) != len(factors) or len(self.signs) != factors.shape[1]:
            raise ValueError(
                f"factors: given {tuple(factors.shape)} with {len(self.diagonal)} numbers in "
                f"diagonal and {len(self.signs)} in signs; expected one of diagonal a row, one of "
                "signs a column, and no omega"
            )
        if not set(self.signs) <= {-1.0, 1.0}:
            raise ValueError(f"signs = {self.signs}: expected -1 or 1; put sizes into factors")
        diagonal = torch.tensor(self.diagonal, dtype=torch.float64)
        return Decomposition(diagonal, factors, torch.tensor(self.signs, dtype=torch.float64))

    def relation(self, clients: int) -> Decomposition:
        """Return the decomposition of Omega; raise ValueError if it is for another number."""
        if self._given is None:
            return mean_relation(clients)
        check_membership(len(self._given.diagonal), clients, "omega")
        return self._given

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models and relations that do not fit the clients."""
        self.relation(spec.clients)
        super().check(spec, **given)

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> Method:
        """Write the decomposition out: eigenvectors may differ between machines."""
        if not self.omega:
            return self
        relation = self.relation(spec.clients)
        return replace(
            self,
            omega=(),
            diagonal=tuple(relation.diagonal.tolist()),
            factors=tuple(map(tuple, relation.factors.tolist())),
            signs=tuple(relation.signs.tolist()),
        )

    def notes(self, **run: Any) -> Notes:
        """Return why rounds are damped, if they are."""
        if self._given is None or self._given.step == 1:
            return Notes()
        return Notes(
            settings=(
                f"Each round is damped by a factor of {self._given.step:.2g}: some clients are to "
                "be unlike each other, and undamped rounds could diverge.",
            )
        )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from the public model, and from nothing sent."""
        start, columns = self.model.init(spec, rng), len(self.relation(spec.clients).signs)
        sums = {_SUMS + name: leaf.new_zeros(columns, *leaf.shape) for name, leaf in start.items()}
        return {**start, **sums}

    def contribution(self, spec: Spec) -> Tree:
        """Contribute a model for each column of B."""
        return _sums(self.init(spec, Rng.seeded(0)))

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start from the own anchor when the time comes."""
        return begun(stack(_start(shared), clients), yet=False)

    @property
    def serving(self) -> Serving:
        """The centres of the proximal terms; a given relation fixes the membership."""
        return Serving(
            shared_model=self._center, whole=True, fixed_membership=self._given is not None
        )

    def _center(self, shared: Tree, clients: Clients) -> Tree:
        """Return the centre of each client's proximal term: the start and a_k."""
        relation = self.relation(clients.spec.clients)
        ids = clients.ids.cpu()
        factors = -relation.factors[ids] * relation.signs / relation.diagonal[ids, None]
        factors = send(factors * relation.unit * clients.spec.clients, clients.device)

        def towards(start: Tensor, sums: Tensor) -> Tensor:
            moved: Tensor = torch.tensordot(factors.to(sums), sums, dims=1)
            return start + moved

        return map_leaves(towards, _start(shared), _sums(shared))

    def problem(self) -> LocalProblem:
        """Return the local problem of the client with the strongest proximal term."""
        largest = 1.0 if self._given is None else float(self._given.diagonal.max())
        return replace(super().problem(), lam=2 * self.lam * largest)

    def _solve(
        self, problem: LocalProblem, start: Tree, clients: Clients, rng: Rng, **how: Any
    ) -> Tree:
        """Solve every client's problem with its own proximal term, 2 lam D_kk."""
        diagonal = self.relation(clients.spec.clients).diagonal
        if bool((diagonal == diagonal[0]).all()):
            return problem.solve(start, clients, rng, **how)
        lams = (2 * self.lam * diagonal[clients.ids.cpu()]).to(clients.device)
        return replace(problem, lams=lams).solve(start, clients, rng, **how)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Work on the own model against its anchor; contribute the distance times B_k."""
        anchor = self._center(shared, clients)
        start = begin(personal, anchor)
        after = self._solve(
            self.problem(), start, clients, rng, round=round, anchor=anchor, keep_failed=True
        )
        origin = anchor if self.change_from == "anchor" else _start(shared)
        relation = self.relation(clients.spec.clients)
        rows = send(relation.factors[clients.ids.cpu()] / relation.unit, clients.device)
        return begun(after), map_leaves(
            lambda leaf: torch.einsum("cr,c...->cr...", rows.to(leaf), leaf),
            subtract(after, origin),
        )

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Take the released mean of what clients sent, and what is public of it; damped."""
        # Of the mean relation the inner product is 1 for any number of clients.
        relation = self._given or mean_relation(1)
        known, step = send(-relation.inner * relation.signs, post.device), relation.step

        def move(sums: Tensor, mean: Tensor) -> Tensor:
            if self.change_from == "anchor":
                mean = mean + torch.tensordot(known.to(sums), sums, dims=1)
            return (1 - step) * sums + step * mean

        moved = map_leaves(move, _sums(shared), post.mean)
        return {**_start(shared), **{_SUMS + name: leaf for name, leaf in moved.items()}}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final anchor."""
        anchor = self._center(shared, clients)
        start = begin(personal, anchor)
        return self._solve(self.last_problem(), start, clients, rng, round=0, anchor=anchor)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return the own model; before the first round of a client, its anchor."""
        return begin(personal, self._center(shared, clients))


def _sums(shared: Tree) -> Tree:
    sums = (name for name in shared if name.startswith(_SUMS))
    return {name.removeprefix(_SUMS): shared[name] for name in sums}


def _start(shared: Tree) -> Tree:
    return {name: leaf for name, leaf in shared.items() if not name.startswith(_SUMS)}


def _matrix(name: str, rows: Matrix) -> Tensor:
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{name}: rows have different lengths; expected a full matrix")
    matrix = torch.tensor(rows, dtype=torch.float64)
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{name}: some numbers are not finite; expected finite ones")
    return matrix
