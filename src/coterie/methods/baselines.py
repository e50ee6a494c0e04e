"""Baselines: local training and centralised rows, on linear models.

`Local` and `Single` release nothing. `LocalStar`, `PooledLinear`, `MTL` and `MTRL` have all rows in
one place: they release everything, and show what privacy costs. All but `Local`, `LocalStar` and
`PooledLinear` work in each client's own units (`solvers.structured`: rows centred, of mean square
norm 1), so that one lam means the same for every client.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, finite_or, stack, take, to
from coterie.data.federated import Clients, FederatedDataset, Spec, Task
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import (
    Baselines,
    Method,
    Shape,
    Silent,
    check_linear,
    check_numbers,
    register,
)
from coterie.models import Linear, Model
from coterie.models.linear import head_of, matrix_of
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.multitask import fit_mtrl, fit_multitask
from coterie.solvers.paths import fit_path, own_rows
from coterie.solvers.posterior import Prior, add_in_turn, leave_one_out, posterior, row_totals
from coterie.solvers.sgd import SGD
from coterie.solvers.structured import OwnUnits

LAMS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_REGRESSION, _CLASSES = (0.1, 0.75), (0.03, 1.5)  # the usual lam, its width in log lam
# Regression: fits near the client's own mean. The lam of the bias, the grid, the usual lam and its
# width, and minus the log of their weight.
_OWN_MEAN = (0.01, (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (1.0, 1.25), 1.5)
_USUAL_LAM = 0.01  # of linear classifiers without an own choice
_WIDE, _WIDE_FITS = 64, 256  # features, and features times outputs, of narrow models
_MOST_WORK = 1 << 31  # multiplications of the Hessians of a client's fit: some seconds
# Wide models: mean squared row norm by penalty (classes: by the penalty beside the sum of losses;
# regression: beside the mean), the usual one, its width in logs, and the square of the constant
# column for the bias (classes: by the mean squared row norm).
_GRIDS = {
    "classes": (tuple(0.1 * 5.0**step for step in range(8)), 10.0, 2.0, 0.3),
    "regression": (tuple(10.0 ** (step / 2) for step in range(-1, 9)), 100.0, 2.0, 30.0),
}
_STEPS = (1.0, 3.0)
_MEAN = tuple(step * 10.0**power for power in range(-4, 2) for step in _STEPS)
_SUM = tuple(step * 10.0**power for power in range(-2, 4) for step in _STEPS)
_CELLS = 1 << 24  # padded losses computed side by side
_POOLED_LAMS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


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
    width = 0.75 for regression, 0.03 and 1.5 for classes. In regression the grid also has fits
    near the client's own mean: the penalty of their bias is 0.01 whatever lam (usual = 1, width =
    1.25), with weights times exp(-3/2).

    Models of more than 64 features, or 256 features times outputs, are solved in the smaller of
    rows and columns (`solvers.paths`), and lam is in units of the client's mean squared row norm s:
    usual lam = .01 s for regression and .1 s / n for classes, width 2. So they need no scaling.

    The guesses were chosen by the test errors of several federations (exam, school, chem97,
    districts, wagepan, airfare, crime4, digits, landmine), which makes `local` a stronger baseline.

    Attributes:
        lam: Ridge penalty towards the model's start (zero for linear models). None for each
            client's own choice by leave-one-out, solved exactly, of linear models unless solver =
            "sgd". A client whose own choice takes more than about 2e9 multiplications per fit
            has SGD and 0.1, as networks have; 0.01 for classes.
        solver: "exact" for linear models, "sgd", or "auto".
        sgd: Steps from the start; many epochs, since there is only one round.
    """

    model: Model = field(default_factory=Linear)
    lam: float | None = None
    solver: How = "auto"
    sgd: SGD = field(default_factory=lambda: SGD(epochs=50))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam=">= 0")

    def chooses(self) -> bool:
        """Return whether each client chooses its own lam."""
        return self.lam is None and self.solver != "sgd" and isinstance(self.model, Linear)

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that do not fit, and exact solves that do not exist."""
        super().check(spec, **given)
        if not self.chooses():
            self.problem(spec).is_exact(spec)

    def problem(self, spec: Spec) -> LocalProblem:
        """Return the local problem of one lam for every client."""
        linear = isinstance(self.model, Linear) and spec.task != "regression"
        lam = self.lam if self.lam is not None else _USUAL_LAM if linear else _REGRESSION[0]
        how = "sgd" if self.lam is None else self.solver
        return LocalProblem(model=self.model, how=how, sgd=self.sgd, lam=lam)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit every client's own rows, regularised towards the public start."""
        some, after = torch.arange(len(clients)), personal
        if self.chooses():
            # A client with non-finite rows keeps its start.
            after = finite_or(own_choice(clients, self.model), personal)
            some = _too_large(clients)
        if not len(some):
            return after
        here = some.to(clients.device)
        start = take(personal, here)
        steps = self.problem(clients.spec).solve(
            start, clients.at(some), rng, round=0, anchor=shared
        )
        return {name: leaf.index_copy(0, here, steps[name]) for name, leaf in after.items()}


def own_choice(clients: Clients, model: Model) -> Tree:
    """Fit every client for each lam of the grid, and average by its own leave-one-out.

    A client for which that would take too long gets NaN.
    """
    spec, bias = clients.spec, has_bias(model)
    if is_wide(spec):
        return head_of(_wide_choice(clients, model), bias)
    priors, guess = ridge_path(model, spec)
    total = torch.zeros(())
    shares = own_shares(clients, priors, guess, bias=bias)
    for prior, share in zip(priors, shares, strict=True):
        fit = modes(clients, prior, bias=bias)
        total = total.to(fit) + share[:, None, None] * fit
    return head_of(total, bias)


def ridge_path(model: Model, spec: Spec) -> tuple[list[Prior], Tensor]:
    """Return the priors of local training, and minus the logarithms of their weights."""
    own = _REGRESSION if spec.task == "regression" else _CLASSES
    priors = [ridge_prior(model, spec, lam) for lam in LAMS]
    guess = _unlikely(LAMS, *own)
    if spec.task == "regression" and has_bias(model):
        lam_of_bias, lams, near, more = _OWN_MEAN
        priors += [_with_bias(ridge_prior(model, spec, lam), lam_of_bias) for lam in lams]
        guess += [more + one for one in _unlikely(lams, *near)]
    return priors, torch.tensor(guess)


def _unlikely(lams: Sequence[float], usual: float, width: float) -> list[float]:
    return [0.5 * (math.log(lam / usual) / width) ** 2 for lam in lams]


def _with_bias(prior: Prior, lam: float) -> Prior:
    """Return the prior with another penalty on the bias."""
    variances = prior.variances.clone()
    variances[:, -1] = 1 / lam
    return replace(prior, variances=variances)


def is_wide(spec: Spec) -> bool:
    """Return whether own fits are solved in the smaller of rows and columns."""
    return spec.features > _WIDE or spec.features * spec.outputs > _WIDE_FITS


def _too_large(clients: Clients) -> Tensor:
    """Return the clients for which an own choice takes too long."""
    if not is_wide(clients.spec):
        return torch.arange(0)
    counts, width = clients.counts, clients.spec.features + 1
    fits = 1 if clients.spec.task == "regression" else clients.spec.outputs
    work = counts.double() * width * counts.clamp_max(width) * fits
    return torch.nonzero(work > _MOST_WORK)[:, 0]


def _wide_choice(clients: Clients, model: Model) -> Tensor:
    """Return the averaged fits, (c, outputs, p) float64, of clients one by one."""
    bias = has_bias(model)
    center = matrix_of(model.init(clients.spec, Rng.seeded(0)))
    found = center.expand(len(clients), *center.shape).clone()
    large = set(_too_large(clients).tolist())
    for place in range(len(clients)):
        if place in large:
            found[place] = math.nan
        elif int(clients.counts[place]):
            found[place] = _wide_fit(*own_rows(clients, place), clients.spec.task, center, bias)
    return found.to(clients.device)


def _wide_fit(X: Tensor, y: Tensor, task: Task, center: Tensor, bias: bool) -> Tensor:
    n, size = len(X), float(X.square().sum() / len(X)) + 1
    grid, usual, width, constant = _GRIDS["regression" if task == "regression" else "classes"]
    ratios = torch.tensor(grid, dtype=torch.float64)
    penalties = size / ratios * (n if task == "regression" else 1)
    # A bias is the weight of a constant column: the larger that is, the weaker its penalty.
    column = math.sqrt(constant * (1 if task == "regression" else size))
    units = torch.ones(center.shape[1], dtype=torch.float64)
    if bias:
        units[-1] = column
        X = torch.cat([X, X.new_full((n, 1), column)], dim=1)
    fits, losses = fit_path(X, y, task, center / units, penalties)
    totals = losses.sum(dim=1) * (len(center) if task == "multilabel" else 1)
    if task == "regression":
        totals = 0.5 * n * torch.log(totals / n + torch.finfo(torch.float32).eps ** 2)
    shares = torch.softmax(-totals - 0.5 * ((ratios / usual).log() / width).square(), dim=0)
    return (shares[:, None, None] * fits).sum(dim=0) * units


def own_shares(clients: Clients, priors: Sequence[Prior], guess: Tensor, *, bias: bool) -> Tensor:
    """Weigh priors by the likelihood of own rows left out, times exp(-guess): (priors, c)."""
    losses = torch.stack([leave_one_out(clients, prior, bias=bias) for prior in priors])
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
    center = matrix_of(model.init(spec, Rng.seeded(0)))
    return Prior(center, torch.full_like(center, 1 / lam), per_row=per_row)


def modes(clients: Clients, prior: Prior, *, bias: bool) -> Tensor:
    """Return the modes, (c, outputs, p) float64, the bias last."""
    return prior.weights(posterior(clients, prior, bias=bias).deviation)


def best_modes(clients: Clients, priors: Sequence[Prior], *, bias: bool) -> Tensor:
    """Return each client's mode under that of the priors with the least loss of own rows left out.

    Of equal ones the first. The result, (c, outputs, p) float64 with the bias last, depends on a
    client's own rows only, to the last bit.
    """
    losses = torch.stack([leave_one_out(clients, prior, bias=bias) for prior in priors])
    chosen = row_totals(losses, clients).cpu().argmin(dim=0)
    found = torch.empty((len(clients), *priors[0].center.shape), dtype=torch.float64)
    for place, prior in enumerate(priors):
        here = (chosen == place).nonzero()[:, 0]
        found[here] = modes(_some(clients, here), prior, bias=bias).cpu()
    return found.to(clients.device)


def _some(clients: Clients, here: Tensor) -> Clients:
    taken = {name: getattr(clients, name)[here] for name in ("ids", "starts", "counts")}
    return replace(clients, **taken)


class _OneLam(Silent):
    """A method with centralised rows, whose lam has the least leave-one-out loss."""

    shape = Shape.POOLED

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for models that are not linear."""
        check_linear(self, "local")

    def _fit(self, clients: Clients, lams: Sequence[float], sums: Sequence[float]) -> Tree:
        """Fit with a penalty beside the mean or the sum of losses: the best, of equals the last."""
        bias, spec = has_bias(self.model), clients.spec
        priors = [ridge_prior(self.model, spec, lam) for lam in lams]
        priors += [ridge_prior(self.model, spec, lam, per_row=False) for lam in sums]
        parts = list(_parts(clients))
        totals = [math.fsum(_total(part, prior, bias) for part in parts) for prior in priors]
        best = max(at for at, total in enumerate(totals) if total <= min(totals))
        return head_of(modes(clients, priors[best], bias=bias), bias)


@register("local_star", releases="everything: centralised rows")
@dataclass(frozen=True, kw_only=True)
class LocalStar(_OneLam):
    """One linear model per client, one penalty tuned over all: not private, a baseline.

        min_w  (mean or sum over own rows of) loss(x_i, w) + lam/2 |w - start|^2

    lam, and whether it applies to the mean or the sum, have the least leave-one-out loss over the
    rows of all clients. The choice needs every client's rows. This is a stronger baseline than
    `local`, for methods that learn their penalty from every client. Biases are penalised as well.
    """

    model: Model = field(default_factory=Linear)

    def __str__(self) -> str:
        return "local*"

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Choose one penalty on every client's rows, then fit each client locally."""
        return self._fit(clients, _MEAN, _SUM)


def _total(part: Clients, prior: Prior, bias: bool) -> float:
    """Return the sum of losses of rows left out; clients with non-finite rows do not count."""
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
        yield _some(clients, order[begin:end])
        begin = end


@register("pooled", releases="everything: centralised rows")
@dataclass(frozen=True, kw_only=True)
class PooledLinear(_OneLam):
    """One linear model on centralised rows: not private, a baseline.

        min_w  sum over all rows of loss(x_i, w) + lam/2 |w - start|^2

    with the lam of the least leave-one-out loss: ridge, logistic or softmax regression. Biases are
    penalised as well.
    """

    model: Model = field(default_factory=Linear)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit one model to all rows, for every client."""
        found = self._fit(_as_one(clients), (), _POOLED_LAMS)
        return stack({name: leaf[0] for name, leaf in found.items()}, len(clients))


def _as_one(clients: Clients) -> Clients:
    """Make one client of all of them, whose rows follow one another."""
    order = torch.argsort(clients.starts, stable=True)
    starts, counts = clients.starts[order], clients.counts[order]
    if not bool((starts[1:] == (starts + counts)[:-1]).all()):
        raise ValueError("pooled fits all clients of a dataset together; leave none of them out")
    one = torch.zeros(1, dtype=torch.int64)
    # Solvers cache per client.
    return replace(clients, ids=one, starts=starts[:1], counts=counts.sum()[None], memory={})


def usual_lam(features: int) -> float:
    """Return the usual ridge penalty: three tenths of the mean curvature of rows of unit norm."""
    return 0.3 / features


class InOwnUnits(Method):
    """A method of linear models for regression and binary targets in each client's own units."""

    def check(self, spec: Spec, *, data: FederatedDataset | None = None, **given: Any) -> None:
        """Raise ValueError for other models and tasks, and for rows without variation."""
        check_linear(self, "pmtl")
        if spec.task not in ("regression", "binary"):
            raise ValueError(
                f"{self.kind} is for regression and binary targets, not {spec.task}; use pmtl, or "
                "one binary target per class"
            )
        if data is not None:
            refuse_degenerate(data)

    def units(self, clients: Clients, **how: bool) -> OwnUnits:
        """Return the clients in own units."""
        return OwnUnits.of(clients, bias=has_bias(self.model), **how)

    def solve_ridge(self, units: OwnUnits, lam: float) -> Tensor:
        """Return local fits with a ridge penalty: weights and, last, intercepts, (c, d + 1)."""
        root = torch.full((units.clients.spec.features,), 1 / math.sqrt(lam), dtype=torch.float64)
        weight, level = units.solve(root)
        return torch.cat([weight, level[:, None]], dim=1)


@register("single", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class Single(InOwnUnits, Silent):
    """One linear model per client on its own rows only: ridge, lasso or logistic regression.

        min_w  mean_i loss(x_i, w) + lam/2 |w|^2   or   + lam |w|_1

    Attributes:
        lam: Its strength; None for 0.3 / features (l2) or 0.1 / features (l1).
        mu: Of "l2": added to lam.
    """

    model: Model = field(default_factory=Linear)
    penalty: Literal["l1", "l2"] = "l2"
    lam: float | None = None
    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam="> 0")

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Share nothing."""
        self.check(spec)
        return self.model.init(spec, rng)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit own rows."""
        units = self.units(clients)
        lam = usual_lam(clients.spec.features) if self.lam is None else self.lam
        if self.penalty == "l1":
            found = units.solve_sparse(lam / 3 if self.lam is None else lam)
            return to(units.model(*found), clients.device)
        fit = self.solve_ridge(units, lam + self.mu)
        return to(units.model(fit[:, :-1], fit[:, -1]), clients.device)


class _Together(InOwnUnits, Silent):
    """A method with centralised rows; it releases everything and is not private."""

    shape = Shape.POOLED

    def baselines(self) -> Baselines:
        """Compare with local fits in the same units."""
        return Baselines(local=Single(model=self.model))


@register("mtl", releases="everything: centralised rows")
@dataclass(frozen=True, kw_only=True)
class MTL(_Together):
    """Trace-norm or l2,1 multi-task learning on centralised rows: not private, a baseline.

        min_W  sum_k mean loss of client k(w_k) + mu/2 |w_k|^2 + lam g(W)

    g is the trace norm ("trace": models in a common subspace; Ji and Ye 2009, "An accelerated
    gradient method for trace norm minimization") or the l2,1 norm ("l21": a common set of features;
    Liu, Ji and Ye 2009, "Multi-task feature learning via efficient l2,1-norm minimization").

    Attributes:
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
        check_numbers(self, lam="> 0", tol="> 0")

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit all clients together."""
        units, features = self.units(clients), clients.spec.features
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


@register("mtrl", releases="everything: centralised rows")
@dataclass(frozen=True, kw_only=True)
class MTRL(_Together):
    """Models and the relation between clients, centralised rows: not private, a baseline.

        min_{W, Omega}  sum_k mean loss of client k(w_k) + lam1/2 |W|^2 + lam2/2 tr(W^T Omega^-1 W)

    over positive semidefinite Omega (clients by clients) of trace 1. Zhang and Yeung 2010, "A
    convex formulation for learning task relationships in multi-task learning".

    Attributes:
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
        check_numbers(self, lam1="> 0", lam2="> 0", tol="> 0")

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit all clients and their relation."""
        units = self.units(clients)
        ridge = usual_lam(clients.spec.features)
        fit = fit_mtrl(
            units.moved(),
            lam1=0.1 * ridge if self.lam1 is None else self.lam1,
            lam2=ridge / len(clients) if self.lam2 is None else self.lam2,
            bias=units.bias and units.binary,
            tol=self.tol,
        )
        return to(units.model(fit.weight, fit.bias), clients.device)
