"""MP-MTL: linear multi-task learning through a noisy second moment of the clients' models.

Liang, Liu, Zhou, Jiang, Zhang and Wang, "Model-Protected Multi-Task Learning", IEEE TPAMI 2020:

    min_W  sum_k L_k(w_k) + lam g(W),   g = trace norm (low_rank) or l2,1 norm (group_sparse)

Every round each client's model, clipped to norm K (the plan's `clip`), enters the released second
moment Sigma = sum_k w_k w_k^T + noise, or its diagonal. Its eigenvalues l (or entries) and vectors
U are public and say in which directions, or features, clients' models lie. Each client uses them
on its own, unclipped model, which never leaves it otherwise.

- `solver = "steps"` is the paper's Algorithms 2 and 3: what_k = U diag(max(0, 1 - eta lam/sqrt(l)))
  U^T w_k, extrapolate, take one gradient step. The output is the last what_k.
- `solver = "solve"` (default) is its Algorithm 1 with another solver. Since lam g(W) is the minimum
  over D of lam/2 (sum_k w_k^T D^-1 w_k + tr D), at D = (sum_k w_k w_k^T)^(1/2), clients minimise

      L_k(w) + lam/2 w^T Sigma^(-1/2) w

  exactly, each by itself: as many of the paper's steps as it takes, for one release. Far better for
  the same epsilon, since most of the paper's releases pay for slow steps (docs/methods/mpmtl.md).

Without noise and clipping both end at the minimum of the objective. `lam_scale = "posted"` measures
lam in units of the released moment's own root mean eigenvalue (a public number): lam is then the
ridge penalty of local training, spread unevenly over directions. Eigenvalues below a
public multiple of the noise's radius are set to their mean (`lift`): as epsilon -> 0 no direction
stands out, and the models are those of local training (the paper's Proposition 1).

Models are in each client's own units (`solvers.structured`), in which every client meets the
public curvature cap L = 1 (logistic: 1/4); eta = 1/L is one public number.

With `decompose`, w_k = p_k + q_k: p_k has the shared structure, q_k is the client's own, sparse
(robust multi-task learning). Only p_k enters the release, so it costs no privacy.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, to, where_rows
from coterie.data.federated import Clients, Spec
from coterie.methods.base import (
    Baselines,
    Notes,
    Post,
    Rounds,
    Shape,
    Silent,
    check_numbers,
    register,
)
from coterie.methods.baselines import MTL, InOwnUnits, Single, usual_lam
from coterie.models import Linear, Model
from coterie.solvers.structured import Lift, OwnUnits, Spectrum, apply, lift

if TYPE_CHECKING:
    from coterie.planning.plan import Plan
    from coterie.privacy.calibrate import Spending

_LIFTS = {"flat": 1.2, "floor": 0.1, "add": 1.5}
_MOST_FEATURES = 4096  # rows of a released matrix
_INNER = 5000  # accelerated steps that a client's own problem with two parts may take
_STILL = 1e-7  # it ends when a step moves it by less than this share


class SecondMoment(InOwnUnits):
    """A method that releases the second moment of linear models, or its diagonal."""

    structure: Literal["low_rank", "group_sparse"]

    @property
    def shape(self) -> Shape:
        """A second moment, or its diagonal."""
        return Shape.GRAM if self.structure == "low_rank" else Shape.SQUARES

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for other models and tasks, and for matrices that are too large."""
        super().check(spec, **given)
        if self.shape is Shape.GRAM and spec.features > _MOST_FEATURES:
            raise ValueError(
                f"{spec.features} features: the released matrix has at most {_MOST_FEATURES} rows; "
                'use structure = "group_sparse", or project the features by public directions'
            )

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule for rounds: at most 4."""
        return replace(super().rounds(spec), between=(1, 4))

    def contribution(self, spec: Spec) -> Tree:
        """Contribute one model, as a vector."""
        return {"moment": torch.zeros(spec.features, dtype=torch.float64)}


@register("mpmtl", releases="a noised second moment of the models, or its diagonal")
@dataclass(frozen=True, kw_only=True)
class MPMTL(SecondMoment):
    """One linear model per client, in a common subspace or on common features (Liang et al. 2020).

    Attributes:
        structure: "low_rank" (releases a symmetric matrix) or "group_sparse" (releases its
            diagonal).
        solver: "solve", or "steps" as published: see the module's docstring.
        lam: Strength of the penalty; None for 0.3 / features (with lam_scale "posted").
        lam_scale: "posted" (in units of the release) or "absolute" (as published).
        mu: Adds mu/2 |w|^2 to every client's loss.
        lift: Treatment of eigenvalues that could be noise, those up to a multiple of its
            radius: "flat" replaces them by their mean, "floor" raises them to the multiple,
            "add" adds it to all.
        lift_by: The multiple; None for 1.2 ("flat"), 0.1 ("floor") or 1.5 ("add"); 0 for no lift.
        acceleration: Of "steps": "off" (beta = 0), "on" ((t-1)/(t+2)) or "strong" (for mu > 0).
        clip_own: Of "steps": apply the map to the clipped model, as published.
        decompose: Weight of the norm of a client's own part; None for no such part.
        decompose_by: "entry" (l1 norm) or "column" (l2 norm: the part is used or not as a whole).
        whole: Of "group_sparse": release the whole second moment and use only its diagonal, as
            published (Algorithm 3), in place of releasing the diagonal.
    """

    model: Model = field(default_factory=Linear)
    structure: Literal["low_rank", "group_sparse"] = "low_rank"
    solver: Literal["solve", "steps"] = "solve"
    lam: float | None = None
    lam_scale: Literal["posted", "absolute"] = "posted"
    mu: float = 0.0
    lift: Lift = "flat"
    lift_by: float | None = None
    acceleration: Literal["off", "on", "strong"] = "on"
    clip_own: bool = False
    decompose: float | None = None
    decompose_by: Literal["entry", "column"] = "entry"
    whole: bool = False

    @classmethod
    def published(  # noqa: PLR0913 - the settings of the paper's algorithms
        cls,
        algorithm: Literal[1, 2, 3] = 2,
        *,
        epsilon: float,
        delta: float,
        clip: float,
        rounds: int = 1,
        lam: float,
        sensitivity: Literal["2K", "K^2"] | None = None,
        matrix: Literal["features", "tasks"] = "features",
        task: Literal["regression", "binary"] = "regression",
        **settings: Any,
    ) -> "Plan":
        """Return the plan of one of the paper's algorithms: a reproduction, NOT A GUARANTEE.

        Algorithm 1 is the framework with Sigma = W W^T, here with exact solves; 2 is low-rank, 3 is
        group-sparse, whose noise falls on the whole of Sigma. The noise is the published Wishart
        noise of `sensitivity` 2K (Algorithms 2 and 3) or K^2 (Algorithm 1), K the `clip`, the
        budget is spent by Theorem 6 (with mu > 0 it depends on the `task` of the data) and composed
        by formula (7). The report shows what is claimed beside the true delta. `settings` are those
        of the method (acceleration, mu, ...).

        `matrix = "tasks"` is Algorithm 1 with Sigma = W^T W: a simulation of the paper's curator,
        who has every model (`TaskMatrix`); `settings` are those of that method.
        """
        from coterie.planning.plan import Plan, Privacy
        from coterie.privacy.noise import PublishedWishart

        if algorithm not in (1, 2, 3):
            raise ValueError(f"algorithm = {algorithm}: expected 1, 2 or 3")
        if matrix not in ("features", "tasks"):
            raise ValueError(f"matrix = {matrix!r}: expected features (W W^T) or tasks (W^T W)")
        if matrix == "tasks":
            if algorithm != 1:
                raise ValueError('matrix = "tasks" (W^T W) is published for algorithm 1 only')
            tasks = TaskMatrix(clip=clip, lam=lam, width=sensitivity or "K^2", **settings)
            return tasks.plan(epsilon, delta, rounds, binary=task == "binary")
        usual: dict[str, Any] = {
            "model": Linear(bias=False), "lam_scale": "absolute", "lam": lam, "lift_by": 0.0
        }  # fmt: skip
        if algorithm > 1:
            usual |= {"solver": "steps", "clip_own": True}
        if algorithm == 3:
            usual |= {"structure": "group_sparse", "whole": True}
        noise = PublishedWishart(sensitivity or ("K^2" if algorithm == 1 else "2K"))
        method = cls(**{**usual, **settings})
        spend = method.published_spend(task == "binary")
        privacy = Privacy(epsilon=epsilon, delta=delta, clip=clip, noise=noise, spend=spend)
        return Plan(method=method, privacy=privacy, rounds=rounds)

    def published_spend(self, binary: bool) -> "Spending":
        """Return the budget over steps by Theorem 6; even for solves."""
        from coterie.privacy.calibrate import Even, Geometric, Power

        if (found := self._theorem_6(binary)) is None:
            return Even()
        kind, number = found
        return Power(number) if kind == "power" else Geometric(number)

    @property
    def shape(self) -> Shape:
        """A second moment, or its diagonal."""
        return Shape.GRAM if self.whole else super().shape

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, lam="> 0", mu=">= 0", lift_by=">= 0", decompose="> 0")
        if self.lam is None and self.lam_scale == "absolute":
            raise ValueError('lam_scale = "absolute" needs a lam: give one')
        if self.acceleration == "strong" and self.mu == 0:
            raise ValueError('acceleration = "strong" needs mu > 0, for example 1e-3')
        if self.whole and self.structure != "group_sparse":
            raise ValueError('whole is for structure = "group_sparse": low_rank releases it anyway')
        if self.solver == "solve" and self.clip_own:
            raise ValueError('clip_own belongs to solver = "steps": a solve has no model to clip')

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start with no structure: all directions equal."""
        self.check(spec)
        ones = torch.ones(spec.features, dtype=torch.float64)
        return {
            "moment": torch.diag(ones) if self.structure == "low_rank" else ones,
            "posts": torch.zeros(1, dtype=torch.float64),
            "clients": torch.full((1,), float(spec.clients), dtype=torch.float64),
        }

    def rounds(self, spec: Spec) -> Rounds:
        """Return the rule for rounds, with an error of 0.25."""
        return replace(
            super().rounds(spec), error=0.25, spending=self._theorem_6(spec.task == "binary")
        )

    def _theorem_6(self, binary: bool) -> tuple[Literal["power", "geometric"], float] | None:
        """Return the budget over steps that Theorem 6 recommends; None for solves."""
        if self.solver == "solve":
            return None
        ratio = self.mu / self._curvature(binary)
        if self.acceleration == "strong":
            return "geometric", (1 - math.sqrt(ratio)) ** (1 / 5)
        if self.acceleration == "on":
            return "power", 2 / 5
        return ("geometric", (1 - ratio) ** (2 / 5)) if self.mu > 0 else ("power", 0.0)

    def _curvature(self, binary: bool) -> float:
        return (0.25 if binary else 1.0) + self.mu

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Start with nothing: the first round fits own rows only."""
        zeros = torch.zeros(clients, spec.features + 1, dtype=torch.float64)
        return {
            "model": zeros,
            "last": zeros.clone(),
            "own": zeros[:, :-1].clone(),
            "begun": zeros[:, 0].clone(),
        }

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Use the released structure on the own model; contribute the model that results."""
        units = self.units(clients)
        if self.solver == "solve":
            after = self._solved(shared, units)
        else:
            before = self._begin(units, to(personal, "cpu"))
            after = self._step(shared, units, before, self._shrunk(shared, units, before))
        after = to(after, clients.device)
        return after, {"moment": after["model"][:, :-1]}

    def on_clipped(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Go on with the clipped model where the paper does."""
        if not self.clip_own:
            return after
        factor = torch.ones_like(after["model"])
        factor[:, :-1] = kept.to(factor)[:, None]
        return {**after, "model": after["model"] * factor}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Keep the released moment, lifted above its noise: post-processing."""
        by = _LIFTS[self.lift] if self.lift_by is None else self.lift_by
        moment = post.value["moment"].double()
        if self.whole:
            moment = moment.diagonal().clone()
        moment = lift(moment, by * post.radius, self.lift)
        # A cohort of part of the clients stands for all of them.
        return {
            **shared,
            "moment": moment * (float(shared["clients"]) / post.cohort),
            "posts": shared["posts"] + 1,
        }

    def baselines(self) -> Baselines:
        """Compare with the same objective on centralised rows, and with the first local fit."""
        penalty: Literal["trace", "l21"] = "trace" if self.structure == "low_rank" else "l21"
        absolute, given = self.lam_scale == "absolute", self.lam
        return Baselines(
            local=Single(model=self.model, lam=None if absolute else given, mu=self.mu),
            centralised=MTL(
                model=self.model, penalty=penalty, lam=given if absolute else None, mu=self.mu
            ),
        )

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Use the last released structure; no step after it."""
        units = self.units(clients)
        if self.solver == "solve":
            final = self._solved(shared, units)
            model = final["model"]
        else:
            final = self._begin(units, to(personal, "cpu"))
            model = self._shrunk(shared, units, final)
        whole = model[:, :-1] + final["own"]
        return to(units.model(whole, model[:, -1]), clients.device)

    def _penalty(self, shared: Tree) -> tuple[Spectrum, float]:
        """Return what the releases say, and lam in the units of the releases."""
        spectrum = Spectrum.of(shared["moment"])
        if spectrum.size == 0:  # noise below zero is all that was released: no structure
            spectrum = Spectrum.of(torch.ones(len(shared["moment"])))
        usual = usual_lam(len(spectrum.roots))
        if not float(shared["posts"]) > 0:
            # Before the first release: a ridge penalty, the same in every direction.
            given = self.lam if self.lam_scale == "posted" else None
            return spectrum, usual if given is None else given
        lam = usual if self.lam is None else self.lam
        return spectrum, lam * (spectrum.size if self.lam_scale == "posted" else 1.0)

    def _step_size(self, units: OwnUnits) -> float:
        curvature = self._curvature(units.binary)
        return 1 / (curvature if self.decompose is None else 2 * curvature)

    def _solved(self, shared: Tree, units: OwnUnits) -> Tree:
        """Solve every client's own problem under the released penalty."""
        spectrum, lam = self._penalty(shared)
        if self.decompose is not None:
            return self._solved_in_parts(spectrum, lam, units)
        weight, level = units.solve(spectrum.spread(lam, self.mu))
        model = torch.cat([weight, level[:, None]], dim=1)
        return _state(model, model, torch.zeros_like(weight))

    def _solved_in_parts(self, spectrum: Spectrum, lam: float, units: OwnUnits) -> Tree:
        """Minimise over the shared-structure part and the own part together (FISTA)."""
        eta = self._step_size(units)
        damped = spectrum.damping(lam, self.mu, eta)
        model = torch.zeros(len(units.clients), len(spectrum.roots) + 1, dtype=torch.float64)
        own = model[:, :-1].clone()
        last, last_own = model, own
        # Each client ends by itself and then stays: its answer does not depend on the others'.
        done = torch.zeros(len(model), 1, dtype=torch.bool)
        for t in range(1, _INNER + 1):
            beta = (t - 1) / (t + 2)
            ahead, ahead_own = model + beta * (model - last), own + beta * (own - last_own)
            last, last_own = model, own
            gradient = units.gradients(_join(ahead, ahead_own))
            step = ahead - eta * gradient
            step[:, :-1] = apply(damped, step[:, :-1])
            model = torch.where(done, last, step)
            own = torch.where(done, last_own, self._soft(ahead_own - eta * gradient[:, :-1], eta))
            moved = (_join(model - last, own - last_own)).norm(dim=1, keepdim=True)
            done = done | ~(moved > _STILL * _join(model, own).norm(dim=1, keepdim=True))
            if bool(done.all()):
                break
        return _state(model, model, own)

    def _begin(self, units: OwnUnits, personal: Tree) -> Tree:
        """Fit clients that have no model yet on their own rows only."""
        new = ~(personal["begun"] > 0)
        if not bool(new.any()):
            return personal
        lam = usual_lam(units.clients.spec.features)
        if self.lam is not None and self.lam_scale == "posted":
            lam = self.lam
        model = self.solve_ridge(units, lam + self.mu)
        return where_rows(new, _state(model, model, torch.zeros_like(model[:, :-1])), personal)

    def _shrunk(self, shared: Tree, units: OwnUnits, personal: Tree) -> Tensor:
        """Apply the public map to the own model; its intercept is unchanged."""
        model = personal["model"]
        if not float(shared["posts"]) > 0:
            return model
        spectrum, lam = self._penalty(shared)
        linear = spectrum.shrinking(self._step_size(units) * lam)
        return torch.cat([apply(linear, model[:, :-1]), model[:, -1:]], dim=1)

    def _step(self, shared: Tree, units: OwnUnits, personal: Tree, shrunk: Tensor) -> Tree:
        """Extrapolate and take one gradient step (the first round only fits)."""
        posts = round(float(shared["posts"]))
        if posts < 1:
            return personal
        eta = self._step_size(units)
        ahead = shrunk + self._beta(posts, units) * (shrunk - personal["last"])
        gradient = units.gradients(_join(ahead, personal["own"]))
        gradient[:, :-1] += self.mu * ahead[:, :-1]
        own = personal["own"]
        if self.decompose is not None:
            own = self._soft(own - eta * gradient[:, :-1], eta)
        return _state(ahead - eta * gradient, shrunk, own)

    def _beta(self, posts: int, units: OwnUnits) -> float:
        if self.acceleration == "off":
            return 0.0
        if self.acceleration == "on":
            return (posts - 1) / (posts + 2)
        ratio = math.sqrt(self.mu / self._curvature(units.binary))
        return (1 - ratio) / (1 + ratio)

    def _soft(self, own: Tensor, eta: float) -> Tensor:
        assert self.decompose is not None
        sizes = own.abs() if self.decompose_by == "entry" else own.norm(dim=1, keepdim=True)
        left = (sizes - eta * self.decompose).clamp_min(0)
        return own * (left / sizes.clamp_min(1e-300))


def _state(model: Tensor, last: Tensor, own: Tensor) -> Tree:
    return {
        "model": model,
        "last": last,
        "own": own,
        "begun": torch.ones(len(model), dtype=torch.float64),
    }


def _join(model: Tensor, own: Tensor) -> Tensor:
    """Add the own part to a model's weights; the level stays."""
    return model + torch.nn.functional.pad(own, (0, 1))


@register("mpmtl_tasks", releases="everything: a curator has every model")
@dataclass(frozen=True, kw_only=True)
class TaskMatrix(InOwnUnits, Silent):
    """MP-MTL through the products between clients' models (W^T W), as published: not private.

    Algorithm 1 of Liang et al. is also published with the clients x clients matrix Sigma = W^T W.
    Shrinking the eigenvalues l of Sigma + noise, with vectors V,

        W <- W V diag(max(0, 1 - eta lam/sqrt(l))) V^T,

    is without noise the step that `mpmtl` takes through W W^T. But this map mixes clients: each
    one's model is computed from all others' models, which have no noise. So a curator must hold
    every model, as in the paper, and no epsilon holds against any client. This simulates the
    curator, to compare the accuracy; `MPMTL.published(1, matrix="tasks")` sets it up.

    Attributes:
        lam: Strength of the penalty, as published.
        clip: K, the norm that models are clipped to.
        width: s of the published noise Wishart_m(m + 1, s/(2 epsilon_t) I): "K^2" or "2K".
        budgets: epsilon_t, one number per iteration.
        acceleration: "off", "on", or "strong" (for mu > 0), as in `mpmtl`.
        mu: Adds mu/2 |w|^2 to every client's loss.
        seed: Of the noise; it protects nobody.
    """

    shape = Shape.POOLED
    model: Model = field(default_factory=lambda: Linear(bias=False))
    lam: float = 0.1
    clip: float = 1.0
    width: Literal["2K", "K^2"] = "K^2"
    budgets: tuple[float, ...] = (1.0,)
    acceleration: Literal["off", "on", "strong"] = "on"
    mu: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, clip="> 0")
        if not self.budgets or not all(0 < one < math.inf for one in self.budgets):
            raise ValueError(f"budgets = {self.budgets}: expected one positive number or more")
        if self.width not in ("2K", "K^2"):
            raise ValueError(f"width = {self.width!r}: expected 2K or K^2")
        self.steps()

    def steps(self) -> MPMTL:
        """Return the steps between two uses of the matrix: those of Algorithm 2."""
        return MPMTL(
            model=self.model, solver="steps", lam=self.lam, lam_scale="absolute", mu=self.mu,
            acceleration=self.acceleration,
        )  # fmt: skip

    def plan(self, epsilon: float, delta: float, rounds: int, *, binary: bool) -> "Plan":
        """Return the plan with the published budgets of so many iterations."""
        from coterie.planning.plan import Plan, Privacy
        from coterie.privacy.published import published_spending

        if type(rounds) is not int or rounds < 1 or not 0 <= delta < 1:
            raise ValueError(
                f"rounds = {rounds}, delta = {delta}: expected a whole number of at least 1, and a "
                "number from 0 to below 1"
            )
        weights = self.steps().published_spend(binary).weights(rounds)
        method = replace(self, budgets=published_spending(epsilon, delta, weights))
        return Plan(method=method, privacy=Privacy(epsilon=math.inf), rounds=1)

    def notes(self, *, private: bool = True, **_: Any) -> Notes:
        """Return that nothing is protected."""
        spent, rounds = math.fsum(self.budgets), len(self.budgets)
        return Notes(caveats=(
            "As published; not a guarantee: a curator has every model, and each client's model is "
            "computed from all others' models, on which there is no noise. The paper's noise is on "
            f"the matrix W^T W only, with epsilons of {spent:.4g} in sum over {rounds} iterations "
            "(less by the paper's composition).",
        ))  # fmt: skip

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for other models and tasks, and for matrices that are too large."""
        super().check(spec, **given)
        if spec.clients > _MOST_FEATURES:
            raise ValueError(
                f"{spec.clients} clients: the matrix has at most {_MOST_FEATURES} rows; use mpmtl"
            )

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Iterate for all clients together: shrink, step, and make the next matrix."""
        steps, units = self.steps(), self.units(clients)
        state = steps._begin(units, steps.init_client_state({}, clients.spec, len(clients)))
        shrunk, noise = state["model"], Rng.seeded(self.seed).at("W^T W").numpy()
        for number, budget in enumerate(self.budgets):
            if number:
                posts = {"posts": torch.tensor([float(number)])}
                state = steps._step(posts, units, state, shrunk)
            shrunk = self._mixed(state["model"], budget, steps._step_size(units), noise)
        return to(units.model(shrunk[:, :-1], shrunk[:, -1]), clients.device)

    def _mixed(self, model: Tensor, budget: float, eta: float, noise: Any) -> Tensor:
        """Clip the models, add the published noise to their products, and mix the models."""
        weight = model[:, :-1]
        weight = weight / (weight.norm(dim=1, keepdim=True) / self.clip).clamp_min(1)
        scale = (2 * self.clip if self.width == "2K" else self.clip**2) / (2 * budget)
        vectors = torch.from_numpy(noise.standard_normal((len(model) + 1, len(model))))
        noisy = weight @ weight.mT + scale * vectors.mT @ vectors
        mixed = Spectrum.of(noisy).shrinking(eta * self.lam) @ weight
        return torch.cat([mixed, model[:, -1:]], dim=1)

    def baselines(self) -> Baselines:
        """Compare with local fits in the same units."""
        return Baselines(local=Single(model=self.model))


Share = Callable[[Tree, Tensor, float], Tree]
Solve = Callable[[Tree, Clients], Tensor]


@dataclass(frozen=True, kw_only=True)
class Framework(SecondMoment):
    """MP-MTL's general framework, Algorithm 1, with any two functions; see `framework`.

    From the released second moments of the clients' models, `share` makes shared information; with
    it, `solve` fits each client to its own rows, and the fits enter the next release. One round is
    the non-iterative setting: local fits, one release, fits again. Privacy depends on neither
    function: `share` sees releases only, and `solve` one client's rows and releases.

    Attributes:
        model: Linear without a bias (`solve` gives weights only).
        structure: "low_rank" releases the second moment, "group_sparse" its diagonal.
    """

    model: Model = field(default_factory=lambda: Linear(bias=False))
    structure: Literal["low_rank", "group_sparse"] = "low_rank"

    @abstractmethod
    def share(self, before: Tree, moment: Tensor, radius: float) -> Tree:
        """Make shared information (a tree) of the former one and a new release.

        `moment` is for all clients, (d, d) or (d,); `radius` is the range of noise by itself.
        """

    @abstractmethod
    def solve(self, information: Tree, clients: Clients) -> Tensor:
        """Fit every client on its own rows: weights (c, d). Information is empty at first.

        `clients.x` and `clients.y` are padded with zeros to the longest client; `clients.mask`
        says which rows are real.
        """

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Know nothing yet but the sizes."""
        self.check(spec)
        return {
            "framework.clients": torch.tensor([float(spec.clients)], dtype=torch.float64),
            "framework.blank": torch.zeros(spec.features, dtype=torch.float64),
        }

    def init_client_state(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Fit with what is known; contribute the model."""
        return personal, {"moment": self.solve(_known(shared), clients).double()}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Make shared information of the release."""
        whole = float(shared["framework.clients"]) / post.cohort
        moment = post.value["moment"].double() * whole
        own = {name: leaf for name, leaf in shared.items() if name.startswith("framework.")}
        return {**self.share(_known(shared), moment, post.radius * whole), **own}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit once more with all that is known."""
        return {"weight": self.solve(_known(shared), clients).float()[:, None]}


def _known(shared: Tree) -> Tree:
    return {name: leaf for name, leaf in shared.items() if not name.startswith("framework.")}


def framework(
    name: str,
    share: Share,
    solve: Solve,
    *,
    structure: Literal["low_rank", "group_sparse"] = "low_rank",
) -> Framework:
    """Return a method made of two functions; `name` stands for them in plans and ledgers.

    def share(before, moment, radius):       # information, from the former one and a release
        return {"direction": torch.linalg.eigh(moment)[1][:, -1]}

    def solve(information, clients):         # (c, d) weights, from own rows and information
        ...

    method = framework("mine", share, solve)
    """
    members = {
        "kind": name,
        "share": lambda self, before, moment, radius: share(before, moment, radius),
        "solve": lambda self, information, clients: solve(information, clients),
        "__module__": solve.__module__,  # the caller's code: called with one client at a time
        "__doc__": f"The framework with the functions of {name}.",
    }
    made: type[Framework] = type(name, (Framework,), members)
    return made(structure=structure)
