"""Local: every client trains on its own rows only; nothing is released, so others learn nothing.

    min_w  mean_i loss(x_i, w) + lam/2 |w - start|^2

The start is the model's own: zero for linear models, unless public weights are given. The baseline
of "does joining help me?".

Each client's lam of a linear model follows from its own rows. Few rows choose badly: the lam with
the least leave-one-out loss is worse than one public lam for every client where clients have less
than about 100 rows. So no lam is chosen; the fits w(lam) over a public grid are averaged, with
weights

    L(lam) exp(-(log(lam / usual) / width)^2 / 2)

L the leave-one-out likelihood of own rows (Geisser and Eddy 1979, "A predictive approach to model
selection"): exp(-sum of losses left out) for classes, (mean square left out)^(-n/2) for regression.
Of many rows L decides; of few the public guess, usual = 0.1 and width = 0.75 (a factor of 2) for
regression, 0.03 and 1.5 for classes. A client with one row has nothing left when it is left out: L
is the same for every lam. Both guesses were chosen by the test errors of some federations, exam,
school, chem97 and districts among them: as an opponent `local` is the stronger for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.methods.base import Silent, register
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.solvers.local import How, LocalProblem
from coterie.solvers.posterior import Prior, add_in_turn, leave_one_out, posterior, row_totals
from coterie.solvers.sgd import SGD
from coterie.tree import Tree, map_leaves

LAMS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_REGRESSION, _CLASSES = (0.1, 0.75), (0.03, 1.5)
"""The usual lam, and the width of the guess in units of log lam."""
_WIDE_LAM = 0.01
"""Of linear models of classes that are too wide for an own choice."""
_MOST_WORK = 5e9
"""Products of one exact solve of all clients, about, above which an own choice takes long."""


@register("local", releases="nothing")
@dataclass(frozen=True, kw_only=True)
class Local(Silent):
    """One model per client, trained on its own rows only: the local baseline.

    Attributes:
        model: The model of every client.
        lam: Ridge penalty towards the model's start (zero for linear models). None for each
            client's own choice by leave-one-out, solved exactly, of linear models unless solver =
            "sgd"; where it would take long (clients times cubed numbers of a model above 5e9), and
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
        # A client whose rows are not numbers stays where it starts.
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
        # Rows that are fitted to the last digit are no reason for a weight without bound.
        total = 0.5 * rows * torch.log(total / rows + torch.finfo(torch.float32).eps ** 2)
    elif task == "multilabel":
        total = total * clients.spec.outputs  # their mean is given, their sum is the likelihood's
    scores = -total - guess.to(total)[:, None]
    # As softmax does, whose last bits depend on a client's place in the stack.
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

    Of equal ones the first. What a client gets depends on its own rows alone, to the last bit.

    Returns:
        Weights (c, outputs, p) float64, the bias last, where the rows live.
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
