"""PMTL: mean-regularised personal models around a privately released shared model.

Hu, Wu, Smith, "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023, Algorithm 1, with the mean over a client's rows for the loss (lam then means the same for
small and large clients; `loss = "sum"` is the published sum, lam / n_k against the mean):

    min_{w_1..w_m}  (1/m) sum_k [ mean_i loss(x_i, w_k) + lam/2 |w_k - shared|^2 ]

A client that takes part works on its own last model against the shared one, and contributes a
difference, which is clipped, summed, noised and divided by the expected cohort.

`change_from` says which difference. "own" is as published: w_k' - w_k. Then nothing in the
recursion depends on the level of the shared model, which integrates the noise as a random walk.
"shared" (default; also what the authors' code does): w_k' - shared, so that

    shared' = shared + mean_k clip(w_k' - shared) + noise

forgets old noise. Same sensitivity, same epsilon. Caveat: this difference does not vanish at the
optimum, so a clip below the clients' typical deviation moves the fixed point to a clipped,
median-like centre.

`PMTL.published` makes the plan of the paper's Algorithm 1. It adds N(0, sigma^2 I) to the mean of q
contributions clipped to gamma: a noise multiplier of z = q sigma / gamma on their sum. Theorem 1's
sigma for q = m, 4 gamma sqrt(T log(1/delta)) / (epsilon m), is z = 4 sqrt(T log(1/delta)) /
epsilon: under replace mu = epsilon / (2 sqrt(log(1/delta))), more noise than epsilon needs.

Not copied from the authors' code: weights by row counts (the noise does not cover them) and the
unsquared norm (not the objective). A client starts from the shared model of the round in which it
first takes part; under full participation that is the published start.

`clusters` names a public cluster for each client: the mean is then taken inside each cluster, one
shared model per cluster, and a client is regularised towards its own cluster's. All slots are
released at once. A client's contribution is zero in every slot but its own, so its norm over all
slots is its norm in its own slot, which the clip bounds: the release of all slots has the
sensitivity of one slot, and each slot has its own independent noise of the same multiplier. Others'
slots do not depend on the client at all, so its guarantee is that of a run of its cluster only
with the same noise and the same probability of taking part. Under `replace` another client of the
same cluster takes its place: which cluster a client is in is public and stays. A slot is divided by
its own cluster's expected cohort, so a small cluster's mean is noisier by as much as it is smaller.

The last fit of a linear classifier is free to choose its own strength: fits for penalties from 0.03
to 3 times lam are averaged, weighted by the likelihood of own rows left out times a guess around
lam. Clients with many rows leave the shared model, and those with few stay near it.

`shared = "slice"` is for linear heads on the features of a frozen public map that come in public
order (see `coterie.data.scaling` and `Linear(start=...)`). Shared, and released, are the weights of
the first `directions` features and the biases. In a round a client fits these to its own rows
with all else at the public start, min over the slice of mean_i loss + lam/2 |change|^2, by Newton's
method, and contributes the change. After the last round it fits its whole head towards the public
start with the shared slice in it, and releases nothing more: so it may choose how strongly, of a
few public multiples of lam, by the losses of its own rows left out. Sensitivity and epsilon are
those of any clipped sum; there are fewer numbers for the noise to fall on.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import (
    Tree,
    add,
    by_row,
    finite_or,
    map_leaves,
    send,
    stack,
    subtract,
    take,
    where_rows,
)
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Clipping, Method, Notes, Post, Rounds, Serving, register
from coterie.methods.baselines import best_modes, modes, own_shares
from coterie.methods.proximal import Proximal
from coterie.models import Linear, Model
from coterie.models.linear import (
    check_directions,
    head_of,
    matrix_of,
    put_slice,
    slice_of,
    slice_variances,
)
from coterie.solvers.local import How, LocalProblem, by_anchor
from coterie.solvers.posterior import Prior, add_in_turn
from coterie.solvers.sgd import SGD

if TYPE_CHECKING:
    from coterie.planning.plan import Plan

WIDER, WIDTH = (0.03, 0.1, 0.3, 1.0, 3.0), 1.5
"""The penalties over which classifiers average their last fit, in units of lam, and the width (in
logarithms) of the public guess around lam."""
LAST = (0.5, 1.0, 2.0, 4.0)
"""The penalties that a client chooses from for its last fit of a head, in units of lam."""
BEGUN = "begun"
"""A leaf of the personal state: 1 where a client has taken part. For clients that start from public
models of their own, which are not known when their state is made."""

_AS_PUBLISHED = (
    "As published: the epsilon that the paper claims for this noise is not a guarantee "
    "(`coterie.privacy.published.published_mean`). The epsilon stated here is our account of it."
)


@register("pmtl", releases="a clipped, noised mean change")
@dataclass(frozen=True, kw_only=True)
class PMTL(Proximal):
    """One model per client, regularised towards a privately released mean (Hu et al. 2023).

    Attributes:
        lam: How strongly personal models are regularised towards the shared one.
        solver: "exact" for linear least squares, "sgd", or "auto": exact where it can be.
        sgd: Local steps of a round: learning rate, epochs or steps, batch, momentum, schedule.
        change_from: "shared" (default) or "own" (as published): see the module's docstring.
        last_solve: After the last round every client, sampled or not, solves against the final
            shared model; nothing is released, so it is free.
        last_epochs: Epochs of that last solve (SGD only).
        clusters: The public cluster of each client, in the order of the clients, numbered from 0;
            empty for one cluster of all.
        shared: "all" of the model, or a "slice" of a linear head: see the module's docstring.
        directions: How many of the first features are in the slice; 0 for the biases only.
        loss: "mean" of a client's losses, or their "sum" (as published), which weighs lam by
            1 / n_k. The learning rate is that of the mean in both.
        last_lam: The weight of the last solve of a slice's heads; None for each client's own choice
            of 0.5, 1, 2 or 4 times `lam` by leave-one-out, which is free.
    """

    model: Model = field(default_factory=Linear)
    lam: float = 0.3
    solver: How = "auto"
    sgd: SGD = field(default_factory=SGD)
    change_from: Literal["shared", "own"] = "shared"
    last_solve: bool = True
    last_epochs: int = 5
    clusters: tuple[int, ...] = ()
    shared: Literal["all", "slice"] = "all"
    directions: int = 16
    loss: Literal["mean", "sum"] = "mean"
    last_lam: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_slice()
        object.__setattr__(self, "clusters", tuple(int(place) for place in self.clusters))
        missing = set(range(max(self.clusters, default=-1) + 1)) ^ set(self.clusters)
        if missing:
            raise ValueError(
                f"clusters: {sorted(missing)[:5]} are below 0 or have no client; expected numbers "
                "from 0 on with none left out"
            )

    @classmethod
    def published(
        cls,
        *,
        clients: int,
        cohort: int,
        rounds: int,
        gamma: float,
        sigma: float | None = None,
        epsilon: float | None = None,
        **settings: Any,
    ) -> "Plan":
        """Return the plan of the paper's Algorithm 1: q of m clients, noise sigma on their mean.

        Give `sigma`, or `epsilon` for Theorem 1's sigma (all clients in every round). The delta is
        1 / m. What the plan guarantees, `plan.guarantee(clients).statement()`, is our account of
        that noise, not the paper's. `settings` are those of the method (model, lam, sgd, ...).
        """
        from coterie.planning.plan import Plan, Privacy
        from coterie.privacy.published import theorem_1_sigma
        from coterie.privacy.sampling import FixedSize

        if (sigma is None) == (epsilon is None):
            raise ValueError(f"sigma = {sigma}, epsilon = {epsilon}: give one of them")
        delta = 1 / clients
        if sigma is None:
            if cohort != clients:
                raise ValueError(
                    f"cohort = {cohort}: Theorem 1 has constants for all {clients} clients only; "
                    "give sigma"
                )
            sigma = theorem_1_sigma(float(epsilon or 0), delta, clients, rounds, gamma)
        usual: dict[str, Any] = {
            "change_from": "own", "last_solve": False, "loss": "sum", "solver": "sgd"
        }  # fmt: skip
        privacy = Privacy(
            noise_multiplier=cohort * sigma / gamma, clip=gamma, delta=delta, relation="replace"
        )
        return Plan(
            method=cls(**{**usual, **settings}),
            privacy=privacy,
            sampler=FixedSize(cohort),
            rounds=rounds,
        )

    def _check_slice(self) -> None:
        if self.shared not in ("all", "slice"):
            raise ValueError(f'shared = {self.shared!r}: expected "all" or "slice"')
        if self.loss not in ("mean", "sum"):
            raise ValueError(f'loss = {self.loss!r}: expected "mean" or "sum"')
        if self.shared == "all":
            if self.last_lam is not None:
                raise ValueError(
                    f'last_lam = {self.last_lam}: is for shared = "slice"; set lam, or shared'
                )
            return
        lams = (self.lam, self.lam if self.last_lam is None else self.last_lam)
        if not all(0 < lam < math.inf for lam in lams):
            raise ValueError(
                f"lam = {self.lam}, last_lam = {self.last_lam}: expected finite numbers > 0 for a "
                "slice: without a penalty, classes that a client has no rows of have no fit"
            )
        if self.clusters or self.change_from == "own" or self.solver == "sgd" or self.loss == "sum":
            raise ValueError(
                'shared = "slice" is solved exactly for the mean loss, changes from the shared '
                "slice, and knows no clusters: leave clusters, change_from, solver and loss out, "
                'or use shared = "all"'
            )

    def notes(self, **run: Any) -> Notes:
        """Return what clusters mean for the guarantee, and what is as published."""
        caveats = (_AS_PUBLISHED,) if self.change_from == "own" and self.loss == "sum" else ()
        if not self.clusters:
            return Notes(caveats=caveats)
        return Notes(
            caveats=caveats,
            settings=(
                f"There are {max(self.clusters) + 1} public clusters. The mean of each cluster is "
                "released to all clients, and a client contributes to its own cluster only. So "
                "noise, rounds and epsilon are those of a run of its cluster only.",
            ),
        )

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        if self.shared == "all":
            super().check(spec, **given)
        else:
            Method.check(self, spec, **given)
        if self.clusters:
            check_membership(len(self.clusters), spec.clients, "clusters")

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start every cluster from the same public model."""
        start = self.model.init(spec, rng)
        if self.shared == "slice":
            return slice_of(start, self._directions(spec))
        return stack(start, max(self.clusters) + 1) if self.clusters else start

    def _directions(self, spec: Spec) -> int:
        if not isinstance(self.model, Linear):
            raise ValueError(
                f'shared = "slice" is for linear heads on public features, and this is '
                f'{type(self.model).__name__}: use Linear() on embedded rows, or shared = "all"'
            )
        check_directions(self.directions, spec)
        return self.directions

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Return the bound; by default 1 for a slice, which moves far in few rounds."""
        usual = 1.0 if self.shared == "slice" else None
        return super().clipping(clients, rounds, usual if clip is None else clip)

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start from the shared model; in clusters, from the own cluster's when the time comes."""
        if not self.clusters:
            return stack(self._whole(shared, spec), clients)
        first = map_leaves(lambda leaf: leaf[0], shared)
        return begun(stack(first, clients), yet=False)

    @property
    def serving(self) -> Serving:
        """The model that clients are regularised towards; clusters have a fixed membership."""
        return Serving(shared_model=self._center, whole=True, fixed_membership=bool(self.clusters))

    def _center(self, shared: Tree, clients: Clients) -> Tree:
        """Return the shared model, or each client's cluster's."""
        if not self.clusters:
            return self._whole(shared, clients.spec)
        check_membership(len(self.clusters), clients.spec.clients, "clusters")
        return take(shared, send(self._places(clients.ids), clients.device))

    def _whole(self, shared: Tree, spec: Spec) -> Tree:
        """Return the shared model with what is not released of it at the public start."""
        if self.shared == "all":
            return shared
        return put_slice(self.model.init(spec, Rng.seeded(0)), shared)

    def _places(self, ids: Tensor) -> Tensor:
        return torch.tensor(self.clusters)[ids.cpu()]

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule for rounds, by the mean of the smallest cluster."""
        found = super().rounds(spec)
        if not self.clusters:
            return found
        members = torch.bincount(torch.tensor(self.clusters))
        return replace(
            found,
            dimension=found.dimension // len(members),
            share=float(members.min()) / len(self.clusters),
        )

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Work on the own model against the shared one; contribute the difference."""
        anchor = self._center(shared, clients)
        if self.shared == "slice":
            after = self._fit(anchor, clients, [self.lam], self.directions)
            return after, slice_of(subtract(after, anchor), self.directions)
        start = begin(personal, anchor) if self.clusters else personal
        problem = self._weighed(self.problem(), clients)
        after = problem.solve(start, clients, rng, round=round, anchor=anchor, keep_failed=True)
        change = subtract(after, anchor if self.change_from == "shared" else start)
        after = self._settled(problem, anchor, after, clients)
        if not self.clusters:
            return after, change
        return begun(after), self._placed(change, clients.ids)

    def _placed(self, change: Tree, ids: Tensor) -> Tree:
        """Put each client's change into the slot of its cluster, among zeros."""
        slots = max(self.clusters) + 1
        device = next(iter(change.values())).device
        # As numbers of rows of (clients * slots, ...).
        rows = send(self._places(ids) + slots * torch.arange(len(ids)), device)

        def place(leaf: Tensor) -> Tensor:
            flat = leaf.new_zeros(len(leaf) * slots, *leaf.shape[1:])
            return flat.index_copy_(0, rows, leaf).reshape(len(leaf), slots, *leaf.shape[1:])

        return map_leaves(place, change)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the shared model by the released mean, each cluster's by the mean of its own."""
        if not self.clusters:
            return add(shared, post.mean)
        members = torch.bincount(torch.tensor(self.clusters))
        # post.mean is over the expected cohort of all clients: a cluster's is its share of that.
        more = send(len(self.clusters) / members.float(), post.device)
        return add(shared, map_leaves(lambda leaf: leaf * by_row(more, leaf), post.mean))

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Solve once more against the final shared model, unless switched off."""
        if not self.last_solve:
            return self.current_models(shared, personal, clients)
        anchor = self._center(shared, clients)
        if self.shared == "slice":
            lams = [self.lam * times for times in LAST]
            lams = lams if self.last_lam is None else [self.last_lam]
            return finite_or(self._fit(anchor, clients, lams, clients.spec.features), personal)
        start = begin(personal, anchor) if self.clusters else personal
        problem = self._weighed(self.last_problem(), clients)
        if self._averages(problem, clients.spec):
            return finite_or(self._average(anchor, clients), start)
        after = problem.solve(start, clients, rng, round=0, anchor=anchor)
        return self._settled(problem, anchor, after, clients)

    def _settled(self, problem: LocalProblem, anchor: Tree, after: Tree, clients: Clients) -> Tree:
        """Return networks, and the shared one for clients whose own has diverged."""
        if isinstance(self.model, Linear):
            return after
        if not self.clusters:  # one row for all, without copies
            anchor = map_leaves(lambda leaf: leaf.expand(len(clients), *leaf.shape), anchor)
        return problem.settle(anchor, after, clients)

    def _averages(self, problem: LocalProblem, spec: Spec) -> bool:
        """Return whether the last fits are averaged over penalties."""
        return spec.task != "regression" and problem.is_exact(spec)

    def _average(self, anchor: Tree, clients: Clients) -> Tree:
        """Average the fits of some penalties by the likelihood of own rows left out."""
        assert isinstance(self.model, Linear)
        bias = self.model.bias
        guess = torch.tensor([0.5 * (math.log(times) / WIDTH) ** 2 for times in WIDER])

        def fit(some: Clients, center: Tensor) -> Tensor:
            priors = [
                Prior(center, torch.full_like(center, 1 / (self.lam * times)), per_row=True)
                for times in WIDER
            ]
            shares = own_shares(some, priors, guess, bias=bias)
            fits = torch.stack([modes(some, one, bias=bias) for one in priors])
            return add_in_turn(shares[:, :, None, None] * fits)

        return head_of(by_anchor(clients, matrix_of(anchor), fit), bias)

    def _weighed(self, problem: LocalProblem, clients: Clients) -> LocalProblem:
        """Weigh lam by the rows of each client for a loss that is a sum."""
        if self.loss == "mean" or self.lam == 0:
            return problem
        return replace(problem, lams=self.lam / clients.counts.clamp_min(1).to(clients.device))

    def _fit(self, anchor: Tree, clients: Clients, lams: list[float], directions: int) -> Tree:
        """Fit the first columns of every client's head to its own rows, near the anchor."""
        assert isinstance(self.model, Linear)
        bias, center = self.model.bias, matrix_of(anchor).cpu()
        spreads = [slice_variances(clients.spec, bias, directions, 1 / lam) for lam in lams]
        priors = [Prior(center, variances, per_row=True) for variances in spreads]
        if len(priors) == 1:  # which leaves nothing to choose
            return head_of(modes(clients, priors[0], bias=bias), bias)
        return head_of(best_modes(clients, priors, bias=bias), bias)

    def current_models(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return the own model; before the first round of a client, the shared one."""
        return begin(personal, self._center(shared, clients)) if self.clusters else personal


def check_membership(given: int, clients: int, name: str) -> None:
    """Raise ValueError if a public list of clients has another length than the federation."""
    if given != clients:
        raise ValueError(
            f"{name} has entries for {given} clients, but there are {clients}: give one entry per "
            "client; new clients cannot be onboarded to such a run"
        )


def begin(personal: Tree, start: Tree) -> Tree:
    """Return the models of clients, or the stacked start where they have not taken part yet."""
    own = {name: personal[name] for name in start}
    return where_rows(personal[BEGUN] > 0.5, own, start)


def begun(models: Tree, yet: bool = True) -> Tree:
    """Make the personal state of clients that have taken part, or have not yet."""
    like = next(iter(models.values()))
    return {**models, BEGUN: torch.full((len(like),), float(yet), device=like.device)}
