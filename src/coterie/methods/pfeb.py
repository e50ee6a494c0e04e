r"""PFEB: private federated empirical Bayes, the default for linear models.

Every client's weights are a draw from one prior, w_k ~ N(w, diag(t2)), and its outcomes have
variance s2 around its own model (regression; classes have their likelihood). The prior is fitted
to all clients by private rounds; a client's model is the posterior mean under the final prior, on
its own rows. How strongly clients are drawn together, s2/t2, is learned inside the budget, so
nothing is left to tune (Lindley and Smith 1972; Efron and Morris 1975; mean-regularised
multi-task learning with a learned lam). PMTL is the special case of one constant t2 and no
momentum: `learn = False, momentum = 0`.

In a round a client finds its posterior under the prior N(y, t2), with V_k its covariance
(`solvers.posterior`: exact, or Laplace's approximation for classes), and contributes, in units of
the prior, three blocks that are clipped each on its own and paid for by one release:

    mean       (E w_k - y) / sqrt(t2)                           l2 norm at most C = 1
    spread     diag(V_k) / t2 + (E w_k - y)^2 / t2 - 1          at most sqrt(p)
    residual   (|residuals|^2 + tr(X V_k X')) / (n_k s2) - 2    from -2 to 2; regression only

A spread is less 1, its mean under the prior, so that the clip is for deviations only. (Clipped as a
whole, spreads of clients with many rows lost up to a fifth, and left variances a third too small.)
A residual counts from 0 to 4, less the middle.

**Guarantee:** that of `privacy.mechanisms.BlockSum`, which clips the blocks and pays for them. The
centres are constants, subtracted before the clip, so they move no bound; all blocks are signed, so
that a replaced client moves a sum by at most twice what an absent one does. Assumes that sums are
divided by the expected cohort, a public number. tests/properties/test_pfeb.py has neighbours,
tests/statistics/test_pfeb.py what the clips do at the truth.

From the noisy means D, Q - 1, r - 2 (sums over the *expected* cohort) the server takes, as pure
post-processing, a step of expectation maximisation, lengthened and with momentum:

    w' = y + 4/3 sqrt(t2) D,   y' = w' + b (w' - w),   b = min(t/(t+3), 0.8 - noise of D)
    log t2 += gain (Q - 1),    log s2 += gain (r - 1)

from the second release on, with gains that follow from the noise (`Statistics`): undamped, the
variances would integrate it. Without noise each step is one of EM itself (t2 *= Q, s2 *= r), whose
limit is the maximum-likelihood fit of the mixed model.

A small budget (few rounds, much noise) leaves the strength s2/t2 of the prior uncertain. A client
then averages its posterior means over the uncertainty, weighted by the likelihood of its own rows
left out (as `methods.baselines` does), at no cost; where the strength is known, nothing changes.

Clients of all sizes have one voice: r is the mean over clients of their own mean squares, which
for clients of unequal size is not what a likelihood of all rows would weigh.

`gls`: for few weights and many clients (regression and binary targets) a fourth block releases
K_k = I - V_k / (sqrt(t2) sqrt(t2)'), 0 <= K <= I, Frobenius norm clipped to 0.7 sqrt(p). Then
w' = y + sqrt(t2) (mean K)^-1 D is the generalised-least-squares estimate, in one step where EM
takes 1/K of them; eigenvalues are kept above what noise can have made. The spread is lengthened
likewise, by 1/diag K. Ten rounds are enough.

Fixed effects (`coterie.data.effects`; `spec.personal` names the others) have one coefficient for
all clients, t2 = 0. For the mean a client then takes a *working* prior in which a fixed coefficient
has the variance c = 0.2 / (1 + round / 2), of classes 1 / (1 + round / 2) (Liang and Zeger 1986:
estimating equations with a working covariance). Its contribution is then
C X_k' (S_k + X_k C X_k')^-1 (y_k - X_k w), S_k the covariance of its outcomes under the prior, and
has mean 0 at the truth whatever C is. So the unit of steps and clips is a public number: large at
first, to travel; small in the end, for noise is in the same unit (Robbins and Monro 1951).
Spread and residual come from the prior itself, with t2 = 0 for fixed effects, and only random
effects release a spread: q of p numbers, whose share of the budget shrinks by sqrt(q / p).

`shrink`: where less than two rounds are affordable, noise may be as large as the mean. The variance
of all noise that moved the mean is public (without curvatures; an upper bound, as if no later step
had undone any of it). So the final mean is shrunk towards the public start at no cost, by the
positive part of 1 - variance of the noise / |mean - start|^2 (James and Stein 1961).

Structure: personal effects may be correlated, w_k ~ N(w, S C C' S) with S the standard deviations
and C C' a correlation matrix, which starts as I. For one output, 4 to 32 random effects and a
budget that can show it (`_structure_share`) a further block releases

    second     d_k d_k' - (I - V_k), clipped to the Frobenius norm sqrt(q)

with d_k, V_k mean and covariance of the posterior in units of the whole prior: the gradient of the
log-likelihood in the prior's covariance, 0 on average where C is right. The server averages the
releases. Eigenvalues beyond the edge of what noise and the sampling of clients can make (Wigner
1955) are shrunk as is best for a matrix in such noise (Gavish and Donoho 2017) and change C; all
others count as 0. Once that edge is below 0.55, correlations whose largest eigenvalue is below 1.5
are dropped, C = I, and from then on the block carries mean, spread and residual a second time,
each within its share. So a federation without structure loses what finding out took. What a block
carries is decided by earlier releases alone, and its bound holds for anything that it carries.

Curves: with at most 10 columns, where the budget can show it, a block searches for common curves
of the columns beside the linear models (`methods.curves`, model `Additive`). They are used if they
are earned; otherwise the block carries the others a second time, as that of the structure does.

`huber`: in every round, and at the end, a client first pulls outliers among its outcomes to its
own fit (`solvers.robust`), and its mean squared residual is scaled to that of normal errors. Blocks
and bounds stay as they are.

`shared = "slice"`: for linear heads on public features in public order (`models.features`) only the
weights of the first `directions` features and the biases are shared and released; at the end each
client fits its whole head, the others with the mean variance that was learned, around the public
start.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_unscaled
from coterie.methods.base import (
    Baselines,
    Block,
    Clipping,
    Method,
    Notes,
    Post,
    Rounds,
    Serving,
    register,
)
from coterie.methods.baselines import Local, modes, own_shares, ridge_path
from coterie.methods.curves import SHARE, Bends, below, bends, search_of, searches, straight
from coterie.models import Additive, Linear, Model
from coterie.models.linear import (
    check_directions,
    head_of,
    is_linear,
    matrix_of,
    plain,
    slice_variances,
)
from coterie.planning.advice import (
    FEW_PARAMETERS,
    LARGE_BUDGET,
    LARGE_BUDGET_ROUNDS,
    ROUNDS,
    affordable_rounds,
    rounds_for,
)
from coterie.solvers.posterior import (
    Posterior,
    Prior,
    add_in_turn,
    class_covariances,
    leave_one_out,
    posterior,
    predictive_std,
    row_totals,
)
from coterie.solvers.robust import pulled_in

STEP = 4 / 3
"""Of the mean: curvatures K are at most 1, and steps below (2 + 2b)/(1 + 2b) = 1.38 stay stable
with momentum b = 0.8."""
START_RESIDUAL = 0.5
_SPREAD, _RESIDUAL, _CURVATURE = 1.0, 2.0, 0.7  # bounds of the blocks
_USUAL, _MIDDLE = 1.0, 2.0  # centres of spread and residual
_SHARES = {"mean": 0.6, "spread": 0.3, "residual": 0.1}  # of mu^2
_GLS_SHARES = {"mean": 0.45, "spread": 0.2, "residual": 0.1, "curvature": 0.25}
_STRUCTURE = 1.0  # of the second moment, times sqrt(q)
_WAIT = 2.0  # rounds until the mean has arrived: around one from afar, all effects look alike
_ACT, _EDGE, _KEPT = 1.0, 0.55, 1.5  # noise to act at, noise to decide at, and what is kept then
_LONGER = 6.0  # steps of the structure: clips and few rows show about a sixth of what is missing
_MOST_SHARE, _MOST_NEED = 0.375, 0.7  # of the budget
_STRUCTURED = (4, 32)  # random effects
_EXACT_GLS = 64  # weights up to which a fit without privacy takes whole curvatures
_START, _START_CLASSES = 0.2, 1.0  # variances of weights
_START_LABELS = 4.0  # of biases of several classes: how frequent each is differs most
_LEAST = 1e-10  # a variance that is as good as none
_DOUBTED = 0.1  # variance of a logarithm from which clients average over it
_WIDTHS = torch.arange(-2.0, 4.0, dtype=torch.float64)  # of the proximal terms that they average
SHRUNK = 2.0  # affordable rounds from which the noise of the mean is small
_LIMITED = {
    "spread": "a number",
    "structure": "a number",
    "curves": "a whole number of rounds",
}
_ODDS = 2.0  # logarithm of the odds for joining, with the guard


@register("pfeb", releases="clipped, noised means, variances and residuals")
@dataclass(frozen=True, kw_only=True)
class PFEB(Method):
    """Empirical Bayes: one linear model per client under a prior learned privately.

    Attributes:
        model: Linear, with or without a bias, which is drawn together as the weights are.
        learn: Whether the variances of the prior are learned; else they stay at `variance` (and a
            residual variance of 0.5), and only the mean is released.
        variance: The prior variance to start from, of weights in units of scaled features; None for
            0.2, of classes 1, and 4 of the biases of several classes.
        momentum: The most momentum of the shared mean; 0 for none.
        residual: Whether a residual variance is released; None for outcomes of regression.
        gls: Release curvatures too, see the module's docstring; None for the rule (at most 5
            weights, and clients times mu at least 300; without privacy, at most 64 weights).
        structure: Share of the budget for correlations of effects, relative to the mean's; 0 for
            none; None for the rule.
        curves: Rounds of a search for common curves; 0 for none; None for the rule: a third of the
            rounds, for regression with at most 10 columns and a budget that can show them. The
            model is then `Additive`.
        spread: Share of the budget for the spread of random effects, relative to the mean's; None
            for the rule: 0.5, times sqrt(random / all) where some effects are fixed.
        shrink: Whether the final mean is shrunk towards the public start by its noise, which is
            free; None for the rule: where the budget affords less than two rounds.
        huber: Outcomes count as at most this many residual deviations from a client's own fit
            (Huber 1964), for outliers and heavy tails, such as 2; regression only. None for none.
        guard: A client averages its posterior with fits of its own (those of `local`), weighted by
            the likelihood of its own rows left out, with odds of 7 to 1 for the former: insurance
            against a shared model that is mostly noise. None for the rule: classes, where less than
            ten rounds are affordable, and where fewer rows per client than weights are declared and
            the verdict is not to join. (Rows are never counted.) Without privacy it is off.
        shared: "all" weights, or a "slice" of a head on public features.
        directions: How many of the first features are in the slice.
    """

    model: Model = field(default_factory=Linear)
    learn: bool = True
    variance: float | None = None
    momentum: float = 0.8
    residual: bool | None = None
    gls: bool | None = None
    structure: float | None = None
    curves: int | None = None
    spread: float | None = None
    shrink: bool | None = None
    huber: float | None = None
    guard: bool | None = None
    shared: Literal["all", "slice"] = "all"
    directions: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance is not None and not 1e-8 <= self.variance <= 1e8:
            raise ValueError(
                f"variance = {self.variance}: expected a positive number, such as 0.1 (of weights, "
                "where features and outcomes are of size 1)"
            )
        for name, what in _LIMITED.items():
            given, most = getattr(self, name), 10_000 if name == "curves" else 100
            if given is not None and not 0 <= given <= most:
                raise ValueError(f"{name} = {given}: expected {what} from 0 to {most:,}")
        if self.curves is not None:
            object.__setattr__(self, "model", _curved(self.model, curved=self.curves > 0))
        if self.huber is not None and not 0.5 <= self.huber <= 100:
            raise ValueError(f"huber = {self.huber}: expected a number from 0.5 to 100, such as 2")
        if not 0 <= self.momentum <= 0.8:
            raise ValueError(f"momentum = {self.momentum}: expected a number from 0 to 0.8")
        if self.shared not in ("all", "slice"):
            raise ValueError(f'shared = {self.shared!r}: expected "all" or "slice"')

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule: ten rounds with curvatures, else up to 50."""
        return Rounds(
            between=LARGE_BUDGET_ROUNDS if self.gls else ROUNDS,
            knee=10.0,
            error=0.3,
            without_noise=200,
            dimension=int(self._posted(self.init(spec, Rng.seeded(0))).sum()),
        )

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> Method:
        """Release curvatures if they have few entries and the budget is large."""
        chosen = replace(self, guard=bool(self.guard))
        if self.residual is None and self.learn:
            chosen = replace(chosen, residual=spec.task == "regression")
        if self.shrink is None:
            affordable = affordable_rounds(n_mu, self.rounds(spec).dimension)
            chosen = replace(chosen, shrink=affordable < SHRUNK and not self.gls)
        random = self._random(spec)
        if random is not None and self.spread is None:
            usual = _SHARES["spread"] / _SHARES["mean"]
            share = usual * math.sqrt(float(random.double().mean()))
            chosen = replace(chosen, spread=round(share, 4))
        most = _EXACT_GLS if n_mu == math.inf else FEW_PARAMETERS
        few = spec.features + self._bias <= most and n_mu >= LARGE_BUDGET
        if few and self.gls is None and self._can_gls(spec):
            chosen = replace(chosen, gls=True)
        if self.structure is None:
            chosen = replace(chosen, structure=chosen._structure_share(spec, n_mu))
        if self.curves is None:
            rounds = chosen._usual_rounds(spec, n_mu)
            search = search_of(spec, n_mu, rounds) if self._can_curve(spec) else 0
            chosen = replace(chosen, curves=search)
        return chosen

    def _usual_rounds(self, spec: Spec, n_mu: float) -> int:
        rule = self.rounds(spec)
        affordable = affordable_rounds(n_mu, rule.dimension)
        return rounds_for(affordable, rule.between, rule.knee)

    def _can_curve(self, spec: Spec) -> bool:
        start = getattr(self.model, "start", None)
        usual = spec.task == "regression" and spec.personal is None and start is None
        return usual and self.learn and self.shared == "all"

    def _structure_share(self, spec: Spec, n_mu: float) -> float:
        """Return the share, relative to the mean's, that shows it in a quarter of the rounds.

        A share f gives released second moments noise whose edge is sqrt(8 / f) q / (n mu) then.
        """
        least, most = _STRUCTURED
        size = self._random_size(spec)
        need = 8 * (size / n_mu / _EDGE) ** 2 if n_mu < math.inf else math.inf
        if not (self._can_structure(spec) and least <= size <= most and need <= _MOST_NEED):
            return 0.0
        share = min(need, _MOST_SHARE)
        return round(share / (1 - share) / _SHARES["mean"], 4)

    def _random_size(self, spec: Spec) -> int:
        random = self._random(spec)
        return spec.features + self._bias if random is None else int(random.sum())

    def _can_structure(self, spec: Spec) -> bool:
        usual = self.learn and self.shared == "all" and self.spread != 0
        return usual and spec.outputs == 1 and not self.gls and self._random_size(spec) > 0

    def _can_gls(self, spec: Spec) -> bool:
        whole = self.shared == "all" and spec.personal is None
        return spec.outputs == 1 and self.learn and whole

    @property
    def _bias(self) -> bool:
        assert isinstance(self.model, Linear | Additive)
        return self.model.bias

    def check(self, spec: Spec, *, data: FederatedDataset | None = None, **given: Any) -> None:
        """Raise ValueError for models that are not linear, and curvatures that do not exist."""
        features = 'a linear head on public features (shared = "slice")'
        if not is_linear(self.model):
            name = type(self.model).__name__
            raise ValueError(
                f"{self.kind} is for linear models, not {name}; use dpfedmtl or pmtl, or {features}"
            )
        self._check_blocks(spec)
        if self.huber is not None and spec.task != "regression":
            raise ValueError(
                f"huber = {self.huber} is for regression; this is {spec.task}: use none"
            )
        if self.shared == "slice":
            check_directions(self.directions, spec)
            if spec.personal is not None:
                raise ValueError(
                    'shared = "slice" with effects: a slice is of a head on public features; leave '
                    "formula= and basis= out"
                )
        self.model.init(spec, Rng.seeded(0))
        if data is not None:
            self.model.check_data(data)
            refuse_unscaled(data)

    def _check_blocks(self, spec: Spec) -> None:
        """Raise ValueError for blocks that this task or these settings do not have."""
        if self.curves and not self._can_curve(spec):
            raise ValueError(
                f"curves = {self.curves} needs regression without fixed effects, learn = true, "
                f'shared = "all" and no public start; this is {spec.task}: leave curves out, or '
                "use 0"
            )
        if self.gls and not self._can_gls(spec):
            raise ValueError(
                f'gls = true needs one output, learn = true, shared = "all" and no fixed effects; '
                f"this is {spec.task} with {spec.outputs} outputs: leave gls out, or use false"
            )
        if self.structure and not self._can_structure(spec):
            raise ValueError(
                f"structure = {self.structure} needs one output, random effects and their spread, "
                f'learn = true, shared = "all" and no gls; this is {spec.task} with '
                f"{spec.outputs} outputs: leave structure out, or use 0"
            )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start around the model's public start, with a wide prior."""
        self.check(spec)
        center = matrix_of(self.model.init(spec, rng))
        directions = self.directions if self.shared == "slice" else spec.features
        usual = _START if spec.task == "regression" else _START_CLASSES
        start = usual if self.variance is None else self.variance
        variances = slice_variances(spec, self._bias, directions, start)
        if self.variance is None and self._bias and spec.task == "multiclass":
            variances[:, -1] = _START_LABELS
        random = self._random(spec)
        fixed = {} if random is None else {"random": random.double().expand_as(variances).clone()}
        if self.structure:
            fixed |= _unstructured(variances.shape[1])
        if self.curves:
            fixed |= straight(self.model.init(spec, rng)["curves"].numel())
        return {
            **fixed,
            "ahead": center,
            "mean": center.clone(),
            "variances": variances,
            "residual": _one(START_RESIDUAL if spec.task == "regression" else 1.0),
            "doubt": torch.tensor(DOUBT, dtype=torch.float64),
            "noisy": _one(1.0),
            "noise": _one(0.0),
            "posts": _one(0.0),
            "clients": _one(float(spec.clients)),
        }

    def _random(self, spec: Spec) -> Tensor | None:
        """Return which weights are personal, (p,) bool, the bias last; None for all."""
        if spec.personal is None:
            return None
        own = torch.zeros(spec.features + 1, dtype=torch.bool)
        own[list(spec.personal)] = True
        return own[: spec.features + self._bias]

    def clipping(self, clients: int, rounds: int, clip: float | None = None) -> Clipping:
        """Bound the parts of a contribution separately; by default the mean by 1."""
        clip = 1.0 if clip is None else clip
        return Clipping(clip=clip, blocks=self._blocks(clip))

    def _blocks(self, clip: float) -> tuple[Block, ...]:
        blocks = self._usual_blocks(clip)
        more = {"second": (self.structure or 0.0) * blocks[0].share}
        more["curves"] = SHARE / (1 - SHARE) * (1 + more["second"]) if self.curves else 0.0
        more = {name: share for name, share in more.items() if share}
        whole = 1 + math.fsum(more.values())
        blocks += tuple(Block(name, _STRUCTURE, share) for name, share in more.items())
        shares = [block.share / whole for block in blocks[1:]]
        shares.insert(0, 1 - math.fsum(shares))
        return tuple(replace(b, share=f) for b, f in zip(blocks, shares, strict=True))

    def _usual_blocks(self, clip: float = 1.0) -> tuple[Block, ...]:
        if not self.learn:
            return (Block("mean", clip, 1.0),)
        given = dict(_GLS_SHARES if self.gls else _SHARES)
        if self.spread is not None:
            given["spread"] = self.spread * given["mean"]
        shares = {name: share for name, share in given.items() if self._posts(name)}
        found = {name: share / math.fsum(shares.values()) for name, share in shares.items()}
        bounded = {
            "mean": Block("mean", clip, found["mean"]),
            "spread": Block("spread", _SPREAD, found.get("spread", 1.0), per_root=True),
            "residual": Block("residual", _RESIDUAL, found.get("residual", 1.0)),
            "curvature": Block("curvature", _CURVATURE, found.get("curvature", 1.0)),
        }
        return tuple(bounded[name] for name in found)

    def _posts(self, name: str) -> bool:
        absent = {"residual": self.residual is False, "spread": self.spread == 0}
        return not absent.get(name, False)

    def _posted(self, shared: Tree) -> Tensor:
        """Return which weights are shared, (outputs, p) bool: all, or the slice and the biases."""
        posted: Tensor = torch.ones_like(shared["variances"], dtype=torch.bool)
        if self.shared == "slice":
            posted[:, self.directions : posted.shape[1] - self._bias] = False
        return posted

    def contribution(self, spec: Spec) -> Tree:
        """Contribute mean and spread of each weight, and one residual variance."""
        sizes = self._sizes(self._posted(start := self.init(spec, Rng.seeded(0))), start)
        return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}

    def _sizes(self, posted: Tensor, shared: Tree) -> dict[str, int]:
        weights, spread = int(posted.sum()), int(_spreads(shared, posted).sum())
        sizes = {"mean": weights, "spread": spread, "residual": 1}
        if self.gls:
            sizes["curvature"] = weights * (weights + 1) // 2
        if self.structure:  # room for what it carries later, too
            sizes["second"] = max(spread * (spread + 1) // 2, weights + spread + 1)
        if self.curves:
            usual = math.fsum(sizes.get(block.name, 0) for block in self._usual_blocks())
            sizes["curves"] = max(shared["curves"].numel(), int(usual))
        return {name: size for name, size in sizes.items() if name == "mean" or self._learns(name)}

    def _learns(self, name: str) -> bool:
        return self.learn and self._posts(name)

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds: a client's model follows from its rows and the prior."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Find the own posterior; contribute what the prior learns from."""
        whole, posted = bool(self.gls or self.structure), self._posted(shared)
        working = self._working(shared, clients.spec)
        clients, short = self._pulled_in(self._below(clients, shared), working)
        apart, spread = self.learn and "random" in shared, _spreads(shared, posted)
        here = whole and not apart
        found = own = posterior(clients, working, bias=self._bias, curvature=here)
        if apart:
            itself = replace(working, variances=working.variances * _cpu(shared["random"]))
            own = posterior(clients, itself, bias=self._bias, curvature=whole)
        mean = found.deviation[:, posted.to(found.deviation.device)]
        spread = spread.to(mean.device)
        rows = {
            "mean": mean,
            "residual": (own.residual + short.to(own.residual))[:, None] - _MIDDLE,
        }
        rows["spread"] = own.variances[:, spread] + own.deviation[:, spread].square() - _USUAL
        if self.gls:
            assert found.curvature is not None
            rows["curvature"] = packed(found.curvature) / math.sqrt(mean.shape[1])
        sizes = self._sizes(posted, shared)
        if self.structure:
            rows["spread"], second = second_moments(own, _cpu(shared["mixing"]), spread[0].cpu())
            if float(shared["searching"]) < 0.5:
                second = carried(rows, self._usual_blocks())
            rows["second"] = _padded(second, sizes["second"])
        if self.curves:
            searched = searches(shared)
            rows["curves"] = _padded(
                bends(clients, working, shared, bias=self._bias)
                if searched
                else carried(rows, self._usual_blocks()),
                sizes["curves"],
            )
        return personal, {name: rows[name].to(mean.device) for name in sizes}

    def _below(self, clients: Clients, shared: Tree) -> Clients:
        """Return the clients with outcomes less what common curves explain."""
        return below(clients, shared) if self.curves else clients

    def _pulled_in(self, clients: Clients, prior: Prior) -> tuple[Clients, Tensor]:
        """Return the clients with outliers pulled in, and what their mean squares lack then."""
        if self.huber is None:
            return clients, torch.zeros(len(clients), dtype=torch.float64)
        return pulled_in(clients, prior, self.huber, bias=self._bias)

    def _working(self, shared: Tree, spec: Spec) -> Prior:
        """Return the prior of a round: fixed effects have their public units as variances."""
        return Prior(
            _cpu(shared["ahead"]),
            _cpu(shared["variances"]),
            _residual(shared, spec),
            mixing=_mixing(shared),
        )

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the prior by what was released."""
        found, posted = Statistics.of(post, shared, self._carrying(shared)), self._posted(shared)
        posts, root = float(shared["posts"]), shared["variances"].sqrt()
        if found.curvature is None:
            step = STEP * found.mean
            momentum = max(0.0, min(posts / (posts + 3), self.momentum - found.shaken))
        else:
            step, momentum = found.newton(), 0.0  # of the right length at once
        whole = _on(posted, step)
        if self.structure:
            whole = whole @ shared["mixing"].mT
        mean = shared["ahead"] + root * whole
        ahead = mean + momentum * (mean - shared["mean"])
        after = {**shared, "mean": mean, "ahead": ahead, "posts": shared["posts"] + 1}
        after["noisy"] = _one(float(found.noisy))
        share = shared["variances"][posted].mean()
        after["noise"] = shared["noise"] + (STEP * found.shaken) ** 2 * share
        if "random" in shared:  # units of fixed effects fall as 1 / (1 + rounds / 2)
            fallen = shared["variances"] * (posts + 2) / (posts + 3)
            after["variances"] = torch.where(_is_random(shared), shared["variances"], fallen)
        if not self.learn or (posts < 1 and found.noisy):
            return after  # around a first mean from afar, variances look large
        spread, residual, after["doubt"] = found.changes(shared["doubt"])
        learnt = _spreads(shared, posted)
        if self._posts("spread"):
            moved = (shared["variances"] * _on(learnt, spread)).clamp(_LEAST, 1 / _LEAST)
            after["variances"] = torch.where(learnt, moved, after["variances"])
        after["residual"] = (shared["residual"] * residual).clamp(_LEAST, 1 / _LEAST)
        return after | self._found(found, shared, post.cohort)

    def _found(self, found: "Statistics", shared: Tree, cohort: float) -> dict[str, Tensor]:
        """Return what a release changes of structure and curves."""
        after: dict[str, Tensor] = {}
        if found.second is not None and float(shared["posts"]) > _WAIT:
            learnt = _spreads(shared, self._posted(shared))
            after |= Structure.of(shared, learnt[0]).learn(found, cohort)
        if found.bends is not None:
            after |= found.bends.learn(shared, cohort, self.curves or 0)
            if float(after.get("bending", shared["bending"])) > float(shared["bending"]):
                after["doubt"] = torch.tensor(DOUBT, dtype=torch.float64)  # another model
        return after

    def _carrying(self, shared: Tree) -> dict[str, tuple[Block, ...]]:
        """Return which blocks carry others, and those."""
        found = {}
        if self.structure and float(shared["searching"]) < 0.5:
            found["second"] = self._usual_blocks()
        if self.curves and not searches(shared):
            found["curves"] = self._usual_blocks()
        return found

    def prior(self, shared: Tree, spec: Spec) -> Prior:
        """Return the prior that the releases so far come to, of whole models."""
        variances = _cpu(shared["variances"])
        if "random" in shared:
            variances = variances * _cpu(shared["random"])
        if self.shared == "slice":
            # What is not released varies, for all that is known, as what is.
            usual = variances[:, : self.directions] if self.directions else variances[:, -1:]
            variances = torch.where(variances > 0, variances, usual.mean())
        mixing = _mixing(shared)
        return Prior(self._final(shared, spec), variances, _residual(shared, spec), mixing=mixing)

    def _final(self, shared: Tree, spec: Spec) -> Tensor:
        """Return the mean of the prior after shrinkage by its noise."""
        mean = _cpu(shared["mean"])
        if not self.shrink:
            return mean
        start = matrix_of(self.model.init(spec, Rng.seeded(0)))
        far, noise = float((mean - start).square().sum()), float(shared["noise"])
        return start + (mean - start) * (max(0.0, 1 - noise / far) if far > 0 else 1.0)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return the posterior means; a client whose rows are not numbers has the shared mean."""
        prior = self.prior(shared, clients.spec)
        clients, _ = self._pulled_in(self._below(clients, shared), prior)
        priors = _in_doubt(prior, self._doubt(shared, clients.spec))
        guess = _WIDTHS.square()[: len(priors)] / 2
        if self.guard:
            own, lams = ridge_path(plain(self.model), clients.spec)
            guess = torch.cat([_level(guess), _level(lams) + _ODDS])
            priors += own
        fits = [modes(clients, one, bias=self._bias) for one in priors]
        found = self._averaged(fits, priors, guess, clients)
        good = found.isfinite().flatten(1).all(dim=1) & (clients.counts > 0)
        good = good[:, None, None]
        whole = torch.where(good, found, prior.center)
        return to(self._head(whole, shared), clients.device)

    def _head(self, matrix: Tensor, shared: Tree) -> Tree:
        """Return the models of a matrix of linear parts, with the shared curves."""
        head = head_of(matrix, self._bias)
        if not self.curves:
            return head
        curve = shared["curves"].cpu().float()
        return {**head, "curves": curve.expand(*matrix.shape[:-1], -1).clone()}

    def _doubt(self, shared: Tree, spec: Spec) -> float:
        """Return the variance of log(s2 / t2), the strength of shrinkage, given the releases.

        Nothing without a learned prior, nor without noise: then it is what it is.
        """
        level, _, residual = shared["doubt"].tolist()
        if not self.learn or float(shared["noisy"]) < 0.5:
            return 0.0
        return float(level + (residual if spec.task == "regression" else 0.0))

    def _averaged(
        self, found: list[Tensor], priors: list[Prior], guess: Tensor, clients: Clients
    ) -> Tensor:
        """Average over priors, by the likelihood of own rows left out times exp(-guess)."""
        if len(priors) == 1:
            return found[0].cpu()
        shares = own_shares(clients, priors, guess, bias=self._bias)
        values = torch.stack(found)
        shares = shares.reshape(*shares.shape, *[1] * (values.dim() - 2))
        return add_in_turn(shares * values).cpu()

    def _uncertainty(self, shared: Tree, clients: Clients, rows: Clients) -> Tensor:
        """Return the standard deviation of an outcome, or of the score of a class, row by row.

        With the guard, that of the joined posterior.
        """
        prior = self.prior(shared, clients.spec)
        scores = predictive_std(clients, prior, rows, bias=self._bias)
        noise = prior.residual if clients.spec.task == "regression" else 0.0
        factor = self._judged(shared, self._below(clients, shared), prior).to(scores.device)
        return (factor[:, None, *[None] * (scores.dim() - 2)] * (scores.square() + noise)).sqrt()

    def _judged(self, shared: Tree, clients: Clients, prior: Prior) -> Tensor:
        """Return what each client multiplies variances of outcomes by, given its own rows.

        The residual variance comes from a few noisy releases. With d the variance of its logarithm
        that is left, it counts as 1 / (2 d) rows would, beside the client's own: an error of a row
        left out has the variance s2 / (1 - h), h the row's leverage. Nothing is released.
        """
        factors = torch.ones(len(clients), dtype=torch.float64)
        known = not self._learns("residual") or float(shared["noisy"]) < 0.5
        if known or clients.spec.task != "regression":
            return factors
        left = leave_one_out(clients, prior, bias=self._bias).cpu()
        scores = predictive_std(clients, prior, clients, bias=self._bias).cpu()
        shown = left * (1 - scores.square() / prior.residual).clamp_min(0.0) / prior.residual
        rows = 0.5 / float(shared["doubt"][2])
        return (rows + row_totals(shown, clients)) / (rows + clients.counts.double())

    def _variance(self, shared: Tree, clients: Clients) -> Tensor:
        """Return the matrices of `_uncertainty` of each client: one, or one per output."""
        prior, width = self.prior(shared, clients.spec), clients.spec.features
        if clients.spec.outputs > 1:
            blocks = class_covariances(clients, prior, bias=self._bias)
            return torch.nn.functional.pad(blocks, (0, width + 1 - blocks.shape[-1]) * 2)
        found = posterior(clients, prior, bias=self._bias, curvature=True)
        assert found.curvature is not None
        root = prior.variances[0].sqrt()
        inner = torch.eye(len(root), dtype=torch.float64) - found.curvature.cpu()
        if prior.mixing is not None:
            inner = turned(inner, prior.mixing)
        whole = torch.zeros(len(clients), width + 1, width + 1, dtype=torch.float64)
        whole[:, : len(root), : len(root)] = inner * root[:, None] * root
        whole[:, width, width] += prior.residual if clients.spec.task == "regression" else 0.0
        judged = self._judged(shared, self._below(clients, shared), prior)
        return whole * judged[:, None, None]

    @property
    def serving(self) -> Serving:
        """The mean of the prior as the shared model, and predictive uncertainty."""
        return Serving(
            shared_model=self._mean,
            whole=True,
            uncertainty=self._uncertainty,
            variance=self._variance,
        )

    def _mean(self, shared: Tree, clients: Clients) -> Tree:
        return to(self._head(self._final(shared, clients.spec), shared), clients.device)

    def baselines(self) -> Baselines:
        """Return local training of the linear model: curves are common to all clients."""
        return Baselines(local=Local(model=plain(self.model))) if self.curves else Baselines()

    def notes(self, *, private: bool = True, clip: float = 1.0, **run: Any) -> Notes:
        """Return what the clip bounds, and what the guard does not do."""
        blocks = self._blocks(clip)
        shares = ", ".join(f"{block.name} {100 * block.share:.0f} %" for block in blocks)
        split = f" The budget is split: {shares}." if len(blocks) > 1 else ""
        own = " Clients average joined and local models by their errors on own rows left out."
        return Notes(
            settings=(
                f"Clip: a client's model counts as at most {clip:g} standard deviation"
                f"{'s' * (clip != 1)} away from the mean model.{split}"
                f"{own if self.guard else ''}",
            ),
        )


def _curved(model: Model, *, curved: bool) -> Model:
    """Return a linear model with curves, or without."""
    if curved and isinstance(model, Linear) and model.start is None:
        return Additive(bias=model.bias)
    return model if curved else plain(model)


def _padded(rows: Tensor, size: int) -> Tensor:
    """Return rows with zeros behind them."""
    return torch.nn.functional.pad(rows, (0, size - rows.shape[1]))


def _in_doubt(prior: Prior, doubt: float) -> list[Prior]:
    """Return the priors of all strengths in doubt; one if the strength is known."""
    if doubt < _DOUBTED:
        return [prior]
    factors = torch.exp(_WIDTHS * math.sqrt(doubt)).tolist()
    return [replace(prior, variances=prior.variances * factor) for factor in factors]


def _level(guess: Tensor) -> Tensor:
    """Return minus the logarithms of weights exp(-guess) that add up to 1."""
    return guess + torch.logsumexp(-guess, dim=0)


def _one(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)


def _residual(shared: Tree, spec: Spec) -> float:
    """Return the residual variance of outcomes; classes have none."""
    return float(shared["residual"]) if spec.task == "regression" else 1.0


def _cpu(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().double()


def _mixing(shared: Tree) -> Tensor | None:
    return _cpu(shared["mixing"]) if "mixing" in shared else None


def _spreads(shared: Tree, posted: Tensor) -> Tensor:
    """Return which weights release a spread: those that are shared and personal."""
    return posted & _is_random(shared).to(posted.device) if "random" in shared else posted


def _is_random(shared: Tree) -> Tensor:
    return _cpu(shared["random"]) > 0.5


def _on(posted: Tensor, values: Tensor) -> Tensor:
    """Put released numbers where their weights are, among zeros."""
    whole = torch.zeros(posted.shape, dtype=torch.float64)
    whole[posted.cpu()] = values.double().cpu()
    return whole


def turned(matrices: Tensor, mixing: Tensor) -> Tensor:
    """Return C M C' of each matrix (c, p, p), added in order: the same bits in any company."""
    for _ in range(2):  # M' C' first, then C M C'
        columns = range(len(mixing))
        matrices = reduce(torch.add, (matrices[:, at, :, None] * mixing[:, at] for at in columns))
    return matrices


def second_moments(own: Posterior, mixing: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Return by what spreads of the random effects and second moments exceed the prior.

    The first are in units of their variances, (c, q); the others packed, over sqrt(q).
    """
    assert own.curvature is not None
    # Fixed effects are not mixed with others: only the random ones are needed.
    deviation = own.deviation[:, 0].cpu()[:, random]
    curvature = own.curvature.cpu()[:, random][:, :, random]
    beyond = deviation[:, :, None] * deviation[:, None] - curvature
    spread = turned(beyond, mixing[random][:, random]).diagonal(dim1=1, dim2=2)
    return spread, packed(beyond) / math.sqrt(beyond.shape[-1])


def _unit(block: Block, size: int) -> float:
    """Return the unit in which a block is carried: then all of them have at most norm 1."""
    return block.bound_of(size) / math.sqrt(block.share)


def carried(rows: Mapping[str, Tensor], blocks: tuple[Block, ...]) -> Tensor:
    """Return all blocks of contributions side by side, clipped, in units of joint norm 1."""
    parts = []
    for block in blocks:
        leaf = rows[block.name].cpu()
        bound = block.bound_of(leaf.shape[1])
        norm = add_in_turn(leaf.square().T).sqrt()[:, None]
        parts.append(leaf * (bound / norm.clamp_min(bound)) / _unit(block, leaf.shape[1]))
    return _STRUCTURE * torch.cat(parts, dim=1)


def _unstructured(size: int) -> dict[str, Tensor]:
    """Return the state of effects without correlations that were found so far."""
    eye = torch.eye(size, dtype=torch.float64)
    zero = _one(0.0)
    return {"mixing": eye, "evidence": 0 * eye, "seen": zero, "searching": zero + 1}


@dataclass(frozen=True)
class Structure:
    """Correlations of the random effects, and what releases say against them.

    Attributes:
        random: Which effects are random, (p,) bool.
        mixing: C, (q, q), with rows of norm 1.
        evidence: The mean of released second moments, in units of the prior now.
        seen: How many releases that is.
    """

    random: Tensor
    mixing: Tensor
    evidence: Tensor
    seen: float

    @classmethod
    def of(cls, shared: Tree, random: Tensor) -> "Structure":
        """Read the state."""
        random = random.cpu()
        parts = [shared[name][random][:, random] for name in ("mixing", "evidence")]
        return cls(random, parts[0], parts[1], float(shared["seen"]))

    def learn(self, found: "Statistics", cohort: float) -> dict[str, Tensor]:
        """Return the state after a release of second moments: see the module's docstring."""
        assert found.second is not None
        size, seen = len(self.mixing), self.seen + 1
        evidence = self.evidence + (found.second - self.evidence) / seen
        noise = found.second_noise * math.sqrt(2 * size / seen)
        edge = math.hypot(noise, math.sqrt(size / cohort))
        moved = replace(self, evidence=evidence, seen=seen)
        moved = moved.moved(edge) if noise < _ACT else moved
        largest = float(torch.linalg.eigvalsh(moved.mixing @ moved.mixing.mT)[-1])
        if noise < _EDGE and largest < _KEPT:
            return _unstructured(len(self.random)) | {"searching": _one(0.0)}
        return moved.state()

    def moved(self, edge: float) -> "Structure":
        """Return the structure after a step along what is beyond the edge.

        Levels are the spread's: only differences of eigenvalues count, and rows of C keep norm 1.
        """
        values, vectors = torch.linalg.eigh(self.evidence)
        values = values - values.mean()
        beyond = (values.square() - edge**2).clamp_min(0.0).sqrt() * (values > edge)
        if not bool((beyond > 0).any()):
            return self
        mixing = self.mixing @ ((vectors * (1 + _LONGER * beyond).sqrt()) @ vectors.mT)
        mixing = mixing / mixing.square().sum(dim=1, keepdim=True).sqrt()
        back = torch.linalg.solve(mixing, self.mixing)
        eye = torch.eye(len(mixing), dtype=torch.float64)
        evidence = back @ (eye + self.evidence) @ back.mT - eye
        return replace(self, mixing=mixing, evidence=(evidence + evidence.mT) / 2)

    def state(self) -> dict[str, Tensor]:
        """Return the leaves of the state; fixed effects have no correlations."""
        state = _unstructured(len(self.random)) | {"seen": _one(self.seen)}
        inside = self.random[:, None] & self.random
        state["mixing"][inside] = self.mixing.flatten()
        state["evidence"][inside] = self.evidence.flatten()
        return state


DOUBT = (1.0, 0.3, 1.0)
"""What is not known at the start, as variances of logarithms: see `Statistics.changes`."""
DRIFT = 0.02
"""Doubt that every round adds: what variances should be moves with the mean."""
_STEP = 0.7  # about a factor of 2


@dataclass(frozen=True)
class Statistics:
    """The statistics of a release, as means over the expected cohort, and their noise.

    The server's steps follow the logarithms of the variances as in a Kalman filter (Kalman 1960):
    a step is what the release shows to be missing times

        gain = h P / (h^2 P + v),    P' = P (1 - h gain) + 0.02

    with P the remaining uncertainty, v the variance of the release by noise and by the sampling of
    the cohort (public), and h the part of what is missing that a release shows, about a half.
    Without noise the steps stay full; with much noise they become an average of all releases.

    `noise` is the variance of the noise of each entry of the spread, `still` that of the residual;
    `draw` is the variance that a random cohort gives to the mean of numbers of size 1. `noisy` is
    whether a release is random at all, by noise or by sampling. `shaken` is how far both move the
    mean, in units of the prior. `second` is the release about the structure, (q, q), None where
    there is none, and `second_noise` the deviation of its noise on the diagonal. `bends` is the one
    about curves.
    """

    mean: Tensor
    spread: Tensor
    residual: float
    noise: float
    still: float
    draw: float
    curvature: Tensor | None
    floor: float
    noisy: bool
    shaken: float
    second: Tensor | None = None
    second_noise: float = 0.0
    bends: Bends | None = None

    @classmethod
    def of(
        cls, post: Post, shared: Tree, carrying: Mapping[str, tuple[Block, ...]] | None = None
    ) -> "Statistics":
        """Read a release; what was not released is as it would be at the optimum.

        `carrying` are the blocks that carry others, and those.
        """
        means = {name: leaf.double() / post.cohort for name, leaf in post.value.items()}
        far = {name: one / post.cohort for name, one in post.deviations.items()}
        for name, blocks in (carrying or {}).items():
            copy = means.pop(name)
            _merged(means, far, copy, far.pop(name), blocks)
        second, second_noise = means.pop("second", None), far.pop("second", 0.0)
        bend, bend_noise = means.pop("curves", None), far.pop("curves", 0.0)
        if bend is not None:
            bend = bend[: shared["curves"].numel()]
        if second is not None:
            size = int(_spreads(shared, torch.ones_like(shared["variances"]) > 0).sum())
            root = math.sqrt(size)
            second = unpacked(second[: size * (size + 1) // 2] * root, size)
            second_noise *= root
        weights, curvature, floor = len(means["mean"]), None, 0.0
        if "curvature" in means:
            root = math.sqrt(weights)
            curvature = unpacked(means["curvature"] * root, weights)
            # Noise of a symmetric matrix reaches about sqrt(2 p) times its deviation.
            floor = 1.5 * far["curvature"] * root * math.sqrt(2 * weights)
        draw = max(0.0, 1 - post.cohort / float(shared["clients"])) / post.cohort
        return cls(
            mean=means["mean"],
            spread=_USUAL + means.get("spread", torch.zeros_like(means["mean"])),
            residual=_MIDDLE + float(means["residual"]) if "residual" in means else 1.0,
            noise=far.get("spread", 0.0) ** 2,
            still=far.get("residual", 0.0) ** 2,
            draw=draw,
            curvature=curvature,
            floor=floor,
            noisy=draw > 0 or any(far.values()),
            shaken=math.sqrt(weights * (far["mean"] ** 2 + draw)),
            second=second,
            second_noise=second_noise,
            bends=None if bend is None else Bends(bend, bend_noise),
        )

    def newton(self) -> Tensor:
        """Divide the mean by the curvature, with eigenvalues from its noise to 1."""
        assert self.curvature is not None
        values, vectors = torch.linalg.eigh(self.curvature)
        values = values.clamp_min(min(max(self.floor, 1e-6), 1.0)).clamp_max(1.0)
        step: Tensor = vectors @ ((vectors.mT @ self.mean) / values)
        return step

    def changes(self, doubt: Tensor) -> tuple[Tensor, float, Tensor]:
        """Return the factors of the variances and of the residual variance, and what doubt is left.

        `doubt` are the variances of what is not known yet of three logarithms: the level of the
        variances, each of them around it, and the residual variance.
        """
        slow = torch.ones_like(self.spread)
        if self.curvature is not None:
            slow = self.curvature.diagonal().clamp(min(max(self.floor, 0.02), 1.0), 1.0)
        spread = 1 + (self.spread - 1) / slow
        if not self.noisy:
            plain = self.spread if self.curvature is None else spread.clamp(0.1, 10)
            return plain, self.residual, doubt
        noise = float((self.noise / slow.square()).mean())
        level = spread.mean()
        # What a release shows of what is missing: all of it where it was divided by the curvature.
        seen = 0.5 if self.curvature is None else 1.0
        shown = torch.tensor([seen, seen, 0.7], dtype=torch.float64)
        # Who is drawn moves spreads as squares of normals vary, the residual by its distance of 1.
        noise += 2 * self.draw * float((1 / slow.square()).mean())
        chance = [noise / len(spread), noise, self.still + self.draw]
        gain = shown * doubt / (shown.square() * doubt + torch.tensor(chance, dtype=torch.float64))
        moved = gain[0] * _cut(level - 1) + gain[1] * _cut(spread - level)
        residual = _cut(gain[2] * _cut(torch.tensor(self.residual - 1, dtype=torch.float64)))
        left = doubt * (1 - shown * gain) + DRIFT
        return _cut(moved).exp(), float(residual.exp()), left


def _merged(
    means: dict[str, Tensor],
    far: dict[str, float],
    second: Tensor,
    noise: float,
    blocks: tuple[Block, ...],
) -> None:
    """Average blocks with their copies, weighted by the noise of each, in place."""
    place = 0
    for block in blocks:
        leaf = means[block.name]
        unit = _unit(block, leaf.numel()) / _STRUCTURE
        copy = second[place : place + leaf.numel()] * unit
        place += leaf.numel()
        own, other = far[block.name] ** 2, (noise * unit) ** 2
        share = other / (own + other) if own + other > 0 else 1.0  # copies are clipped
        means[block.name] = share * leaf + (1 - share) * copy
        far[block.name] = math.sqrt(own * share)


def _cut(values: Tensor) -> Tensor:
    """Bound a step of logarithms, alike up and down: noise must not drift one way."""
    return values.clamp(-_STEP, _STEP)


def packed(matrices: Tensor) -> Tensor:
    """Write symmetric matrices as vectors of the same norm: off the diagonal times sqrt(2)."""
    size = matrices.shape[-1]
    rows, columns = torch.triu_indices(size, size)
    weight = torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrices)
    return matrices[..., rows, columns] * weight


def unpacked(vector: Tensor, size: int) -> Tensor:
    """Undo `packed` for one matrix."""
    rows, columns = torch.triu_indices(size, size)
    weight = torch.where(rows == columns, 1.0, 1 / math.sqrt(2)).to(vector)
    matrix = torch.zeros(size, size, dtype=vector.dtype)
    matrix[rows, columns] = vector * weight
    matrix[columns, rows] = vector * weight
    return matrix
