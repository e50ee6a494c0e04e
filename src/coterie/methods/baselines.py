"""Baselines: local training and rows in one place, on linear models.

`Local` and `Single` release nothing. `LocalStar`, `PooledLinear`, `MTL` and `MTRL` have all rows in
one place: they release everything, and show what privacy costs. All but `Local`, `LocalStar` and
`PooledLinear` work in each client's own units (`solvers.structured`: rows centred, of mean square
norm 1), so that one lam means the same for every client.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, map_leaves, stack, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Baselines, Method, Shape, Silent, register
from coterie.models import Linear, Model
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.multitask import fit_mtrl, fit_multitask
from coterie.solvers.posterior import Prior, add_in_turn, leave_one_out, posterior, row_totals
from coterie.solvers.sgd import SGD
from coterie.solvers.structured import OwnUnits

LAMS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_REGRESSION, _CLASSES = (0.1, 0.75), (0.03, 1.5)  # the usual lam, its width in log lam
_WIDE_LAM = 0.01  # of linear classifiers that are too wide for an own choice
_MOST_WORK = 5e9  # multiplications of one exact solve of all clients that are still fast
_STEPS = (1.0, 3.0)
_MEAN = tuple(step * 10.0**power for power in range(-4, 2) for step in _STEPS)
_SUM = tuple(step * 10.0**power for power in range(-2, 4) for step in _STEPS)
_CELLS = 1 << 24  # padded losses computed side by side
_POOLED_LAMS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
MOST_FEATURES = 4096  # rows of a released matrix


@register("local", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class Local(Silent):
    """One model per client, trained on its own rows only: the local baseline.

        min_w  mean_i loss(x_i, w) + lam/2 |w - start|^2

    The start is the model's: zero for linear models, unless public weights are given. A linear
    model's lam follows from the client's own rows. The lam with the least leave-one-out loss is
    worse than one public lam for clients with fewer than about 100 rows. So the fits w(lam) over a
    public grid are averaged, with weights

        L(lam) exp(-(log(lam / usual) / width)^2 / 2)

    L is the leave-one-out likelihood of own rows (Geisser and Eddy 1979, "A predictive approach to
    model selection"): exp(-sum of losses left out) for classes, (mean square left out)^(-n/2) for
    regression. With many rows L decides. With few rows the public guess decides: usual = 0.1 and
    width = 0.75 (a factor of 2) for regression, 0.03 and 1.5 for classes. Both guesses were chosen
    by the test errors of several federations (exam, school, chem97, districts), which makes
    `local` a stronger baseline.

    Attributes:
        model: The model of every client.
        lam: Ridge penalty towards the model's start (zero for linear models). None for each
            client's own choice by leave-one-out, solved exactly, of linear models unless solver =
            "sgd". Where that takes long (clients times cubed parameters above 5e9), and
            for networks, 0.1; linear models of classes then have 0.01.
        solver: "exact" for linear least squares, "sgd", or "auto".
        sgd: Steps from the start; many epochs, since there is only one round.
    """

    model: Model = field(default_factory=Linear)
    lam: float | None = None
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=50))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam is not None and not 0 <= self.lam < math.inf:
            raise ValueError(f"lam = {self.lam}: expected a finite number >= 0")

    def chooses(self, spec: Spec) -> bool:
        """Return whether each client chooses its own lam."""
        if self.lam is not None or self.solver == "sgd" or not isinstance(self.model, Linear):
            return False
        width = spec.features + self.model.bias
        # Labels are solved one by one, classes together.
        work = (spec.outputs * width) ** 3 if spec.task == "multiclass" else spec.outputs * width**3
        return spec.clients * work <= _MOST_WORK

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        super().check(spec, cohort=cohort, data=data)
        if not self.chooses(spec):
            self.problem(spec).is_exact(spec)

    def problem(self, spec: Spec) -> LocalProblem:
        """Return the local problem of one lam for every client."""
        wide = isinstance(self.model, Linear) and spec.task != "regression"
        lam = self.lam if self.lam is not None else _WIDE_LAM if wide else _REGRESSION[0]
        return LocalProblem(model=self.model, how=self.solver, sgd=self.sgd, lam=lam)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit every client's own rows, regularised towards the public start."""
        if not self.chooses(clients.spec):
            return self.problem(clients.spec).solve(personal, clients, rng, round=0, anchor=shared)
        found = own_choice(clients, self.model)
        # A client with non-finite rows keeps its start.
        good = found["weight"].isfinite().flatten(1).all(dim=1)
        return map_leaves(lambda new, old: torch.where(_like(good, new), new, old), found, personal)


def own_choice(clients: Clients, model: Model) -> Tree:
    """Fit every client for each lam of the grid, and average by its own leave-one-out."""
    bias, total = has_bias(model), torch.zeros(())
    for lam, share in zip(LAMS, _shares(_left_out(clients, model), clients), strict=True):
        fit = modes(clients, ridge_prior(model, clients.spec, lam), bias=bias)
        total = total.to(fit) + share[:, None, None] * fit
    return linear_tree(total, bias=bias)


def own_losses(clients: Clients, model: Model) -> Tensor:
    """Return each row's loss when it is left out of its client's own choice, (c, longest).

    The mean of those of the fits, with the weights of the average: losses are convex, so that of
    the average is no larger. As of `leave_one_out`: squared errors, or log-losses.
    """
    losses = _left_out(clients, model)
    return add_in_turn(_shares(losses, clients)[..., None] * losses)


def _left_out(clients: Clients, model: Model) -> Tensor:
    """Return each row's loss when it is left out of the fit with each lam, (lams, c, longest)."""
    priors = [ridge_prior(model, clients.spec, lam) for lam in LAMS]
    return torch.stack([leave_one_out(clients, one, bias=has_bias(model)) for one in priors])


def _shares(losses: Tensor, clients: Clients) -> Tensor:
    """Return the weights of the fits of each client, (lams, c), which add up to 1."""
    usual, width = _REGRESSION if clients.spec.task == "regression" else _CLASSES
    guess = torch.tensor([0.5 * (math.log(lam / usual) / width) ** 2 for lam in LAMS])
    return _weighed(losses, clients, guess)


def own_shares(clients: Clients, priors: Sequence[Prior], guess: Tensor, *, bias: bool) -> Tensor:
    """Weigh priors by the likelihood of own rows left out, times exp(-guess): (priors, c)."""
    losses = [leave_one_out(clients, prior, bias=bias) for prior in priors]
    return _weighed(torch.stack(losses), clients, guess)


def _weighed(losses: Tensor, clients: Clients, guess: Tensor) -> Tensor:
    task, total = clients.spec.task, row_totals(losses, clients)
    if task == "regression":
        rows = clients.counts.to(total).clamp_min(1)
        # Bounds the weight of a fit without any error.
        total = 0.5 * rows * torch.log(total / rows + torch.finfo(torch.float32).eps ** 2)
    elif task == "multilabel":
        total = total * clients.spec.outputs  # from the mean over labels
    scores = -total - guess.to(total)[:, None]
    # A softmax; torch.softmax depends on a client's position in its last bits.
    parts = torch.exp(scores - scores.amax(dim=0))
    return parts / add_in_turn(parts)


def has_bias(model: Model) -> bool:
    """Return whether a linear model has a bias."""
    assert isinstance(model, Linear)
    return model.bias


def ridge_prior(model: Model, spec: Spec, lam: float, *, per_row: bool = True) -> Prior:
    """Return the prior whose mode has the least mean (or sum) of losses + lam/2 |w - start|^2."""
    start = model.init(spec, Rng.seeded(0))
    leaves = [start["weight"], *([start["bias"][:, None]] if "bias" in start else [])]
    center = torch.cat(leaves, dim=1).double()
    return Prior(center, torch.full_like(center, 1 / lam), per_row=per_row)


def modes(clients: Clients, prior: Prior, *, bias: bool) -> Tensor:
    """Return the modes, (c, outputs, p) float64, the bias last."""
    found = posterior(clients, prior, bias=bias).deviation
    return found * prior.variances.sqrt().to(found.device) + prior.center.to(found.device)


def best_modes(clients: Clients, priors: Sequence[Prior], *, bias: bool) -> Tensor:
    """Return each client's mode under that of the priors with the least loss of own rows left out.

    Of equal ones the first. The result depends on a client's own rows only, to the last bit.

    Returns:
        Weights (c, outputs, p) float64, the bias last, on the device of the rows.
    """
    losses = torch.stack([leave_one_out(clients, prior, bias=bias) for prior in priors])
    chosen = row_totals(losses, clients).cpu().argmin(dim=0)
    found = torch.empty((len(clients), *priors[0].center.shape), dtype=torch.float64)
    for place, prior in enumerate(priors):
        here = (chosen == place).nonzero()[:, 0]
        taken = {name: getattr(clients, name)[here] for name in ("ids", "starts", "counts")}
        found[here] = modes(replace(clients, **taken), prior, bias=bias).cpu()
    return found.to(clients.device)


def linear_tree(rows: Tensor, *, bias: bool) -> Tree:
    """Make stacked linear models of weights (c, outputs, p), the bias last."""
    rows = rows.float()
    if not bias:
        return {"weight": rows.contiguous()}
    return {"weight": rows[..., :-1].contiguous(), "bias": rows[..., -1].contiguous()}


def _like(good: Tensor, leaf: Tensor) -> Tensor:
    return good.reshape(-1, *[1] * (leaf.dim() - 1))


@register(
    "local_star",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class LocalStar(Silent):
    """One linear model per client, one penalty tuned over all: not private, a baseline.

        min_w  (mean or sum over own rows of) loss(x_i, w) + lam/2 |w - start|^2

    lam, and whether it applies to the mean or the sum, have the least leave-one-out loss over the
    rows of all clients. The choice needs every client's rows. This is a stronger baseline than
    `local`, for methods that learn their penalty from every client.

    Attributes:
        model: Linear; a bias is penalised like the weights.
    """

    shape = Shape.POOLED

    model: Model = field(default_factory=Linear)

    def __str__(self) -> str:
        return "local*"

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that are not linear."""
        check_linear_model(self.kind, self.model)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Choose one penalty on every client's rows, then fit each client locally."""
        bias, prior = has_bias(self.model), choose_prior(clients, self.model)
        return linear_tree(modes(clients, prior, bias=bias), bias=bias)


def choose_prior(clients: Clients, model: Model) -> Prior:
    """Return the penalty with the least leave-one-out loss over the rows of all clients.

    Among equals the larger one; clients with non-finite rows do not count.
    """
    priors = [ridge_prior(model, clients.spec, lam) for lam in _MEAN]
    priors += [ridge_prior(model, clients.spec, lam, per_row=False) for lam in _SUM]
    bias, parts = has_bias(model), list(_parts(clients))
    totals = [math.fsum(_total(part, prior, bias) for part in parts) for prior in priors]
    least = min(totals)
    return priors[max(at for at, total in enumerate(totals) if total <= least)]


def check_linear_model(kind: str, model: Model) -> None:
    """Raise ValueError for other models than linear ones."""
    if not isinstance(model, Linear):
        raise ValueError(f"{kind} is for linear models, not {type(model).__name__}; use local")


def _total(part: Clients, prior: Prior, bias: bool) -> float:
    losses = row_totals(leave_one_out(part, prior, bias=bias), part)
    return math.fsum(losses[losses.isfinite()].tolist())


def _parts(clients: Clients) -> Iterator[Clients]:
    """Return clients of similar size together, to keep padding small."""
    order = torch.argsort(clients.counts, stable=True)
    sizes = clients.counts[order].tolist()
    begin = 0
    for end in range(1, len(sizes) + 1):
        # Sorted: the next one would be the longest.
        if end < len(sizes) and (end + 1 - begin) * sizes[end] <= _CELLS:
            continue
        here, begin = order[begin:end], end
        ids, starts, counts = clients.ids[here], clients.starts[here], clients.counts[here]
        yield replace(clients, ids=ids, starts=starts, counts=counts)


@register(
    "pooled",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class PooledLinear(Silent):
    """One linear model on rows in one place: not private, a baseline.

        min_w  sum over all rows of loss(x_i, w) + lam/2 |w - start|^2

    with the lam of the least leave-one-out loss: ridge, logistic or softmax regression.

    Attributes:
        model: Linear; a bias is penalised like the weights.
    """

    shape = Shape.POOLED

    model: Model = field(default_factory=Linear)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for models that are not linear."""
        check_linear_model(self.kind, self.model)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit one model to all rows, for every client."""
        bias, one = has_bias(self.model), _as_one(clients)
        priors = [ridge_prior(self.model, clients.spec, lam, per_row=False) for lam in _POOLED_LAMS]
        losses = [float(leave_one_out(one, prior, bias=bias).sum()) for prior in priors]
        least = min(losses)
        prior = priors[max(at for at, loss in enumerate(losses) if loss <= least)]
        found = linear_tree(modes(one, prior, bias=bias), bias=bias)
        return stack({name: leaf[0] for name, leaf in found.items()}, len(clients))


def _as_one(clients: Clients) -> Clients:
    """Make one client of all of them, whose rows follow one another."""
    order = torch.argsort(clients.starts, stable=True)
    starts, counts = clients.starts[order], clients.counts[order]
    follow = bool((starts[1:] == (starts + counts)[:-1]).all())
    if not follow:
        raise ValueError("pooled fits all clients of a data set together; leave none of them out")
    return replace(
        clients,
        ids=torch.zeros(1, dtype=torch.int64),
        starts=starts[:1],
        counts=counts.sum()[None],
        memory={},  # solvers cache per client
    )


def usual_lam(features: int) -> float:
    """Return the usual ridge penalty: three tenths of the mean curvature of rows of unit norm."""
    return 0.3 / features


def check_linear(method: Method, spec: Spec) -> None:
    """Raise ValueError unless it is linear regression or binary classification."""
    if not isinstance(method.model, Linear):
        raise ValueError(
            f"{method.kind} is for linear models, not {type(method.model).__name__}; use pmtl"
        )
    if spec.task not in ("regression", "binary"):
        raise ValueError(
            f"{method.kind} is for regression and binary targets, not {spec.task}; use pmtl, or "
            "one binary target per class"
        )


def check_matrix(structure: str, spec: Spec) -> None:
    """Raise ValueError for a released matrix that is too large."""
    if structure == "low_rank" and spec.features > MOST_FEATURES:
        raise ValueError(
            f"{spec.features} features: the released matrix has at most {MOST_FEATURES} rows; "
            'use structure = "group_sparse", or project the features by public directions'
        )


def own_units(method: Method, clients: Clients) -> OwnUnits:
    """Measure clients for a method with a linear model."""
    assert isinstance(method.model, Linear)
    return OwnUnits.of(clients, bias=method.model.bias)


def check_lam(lam: float | None, name: str = "lam") -> None:
    """Raise ValueError for a penalty that is not positive."""
    if lam is not None and not 0 < lam < math.inf:
        raise ValueError(f"{name} = {lam}: expected a positive number")


@register("single", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class Single(Silent):
    """One linear model per client on its own rows only: ridge, lasso or logistic regression.

        min_w  mean_i loss(x_i, w) + lam/2 |w|^2   or   + lam |w|_1

    Attributes:
        model: Linear, with or without a bias, which is not penalised.
        penalty: "l2" or "l1".
        lam: Its strength; None for 0.3 / features (l2) or 0.1 / features (l1).
        mu: Of "l2": added to lam.
    """

    model: Model = field(default_factory=Linear)
    penalty: Literal["l1", "l2"] = "l2"
    lam: float | None = None
    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lam(self.lam)

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, spec)
        if data is not None:
            refuse_degenerate(data)

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Share nothing."""
        self.check(spec)
        return self.model.init(spec, rng)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit own rows."""
        units, features = own_units(self, clients), clients.spec.features
        lam = usual_lam(features) if self.lam is None else self.lam
        if self.penalty == "l1":
            lam = lam / 3 if self.lam is None else lam
            found = units.solve_sparse(lam)
        else:
            root = 1 / math.sqrt(lam + self.mu)
            found = units.solve(torch.full((features,), root, dtype=torch.float64))
        return to(units.model(*found), clients.device)


class Pooled(Silent):
    """A method with all rows in one place; it releases everything and is not private."""

    shape = Shape.POOLED

    def check(
        self, spec: Spec, *, cohort: int | None = None, data: FederatedDataset | None = None
    ) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, spec)
        if data is not None:
            refuse_degenerate(data)

    def baselines(self) -> Baselines:
        """Compare with local fits in the same units."""
        return Baselines(local=Single(model=self.model))


@register(
    "mtl",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class MTL(Pooled):
    """Trace-norm or l2,1 multi-task learning on rows in one place: not private, a baseline.

        min_W  sum_k mean loss of client k(w_k) + mu/2 |w_k|^2 + lam g(W)

    g is the trace norm ("trace": models in a common subspace; Ji and Ye 2009, "An accelerated
    gradient method for trace norm minimization") or the l2,1 norm ("l21": a common set of features;
    Liu, Ji and Ye 2009, "Multi-task feature learning via efficient l2,1-norm minimization").

    Attributes:
        model: Linear, with or without a bias of each client's own, which is not penalised.
        penalty: "trace" or "l21".
        lam: Its strength; None for 0.3 / features times the root mean square, over features, of
            the local models.
        mu: Adds mu/2 |w|^2 to every client's loss.
        tol: The relative duality gap at which it stops.
    """

    model: Model = field(default_factory=Linear)
    penalty: Literal["trace", "l21"] = "trace"
    lam: float | None = None
    mu: float = 0.0
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lam(self.lam)
        check_lam(self.tol, "tol")

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit all clients together."""
        units, features = own_units(self, clients), clients.spec.features
        lam, ridge = self.lam, usual_lam(features)
        if lam is None:
            local, _ = units.solve(torch.full((features,), 1 / math.sqrt(ridge)).double())
            size = float(local.square().sum() / features) ** 0.5
            lam = ridge * (size or 1.0)  # models that are all zero have no scale
        fit = fit_multitask(
            units.moved(),
            penalty=self.penalty,
            lam=lam,
            mu=self.mu,
            bias=units.bias and units.binary,
            tol=self.tol,
        )
        return to(units.model(fit.weight, fit.bias), clients.device)


@register(
    "mtrl",
    releases="everything: rows in one place",
    not_applicable={"learns": "a centralised method has no private run"},
)
@dataclass(frozen=True, kw_only=True)
class MTRL(Pooled):
    """Models and the relation between clients, rows in one place: not private, a baseline.

        min_{W, Omega}  sum_k mean loss of client k(w_k) + lam1/2 |W|^2 + lam2/2 tr(W^T Omega^-1 W)

    over positive semidefinite Omega (clients by clients) of trace 1. Zhang and Yeung 2010, "A
    convex formulation for learning task relationships in multi-task learning".

    Attributes:
        model: Linear, with or without a bias of each client's own, which is not penalised.
        lam1: Weight of the squares of the models; None for a tenth of lam2's effect on
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
