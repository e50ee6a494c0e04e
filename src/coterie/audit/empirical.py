"""An empirical audit of client-level privacy: short runs with and without a canary client.

The adversary is the one of the guarantee. It holds the rows of all other clients, sees every
release, and chose the canary's rows; it does not know whether the canary's contributions were
replaced by zeros. Given the releases so far it computes the exact sum m0 of a round without the
canary and m1 with it, by the code that clients run. For a release x with Gaussian noise of standard
deviation s the log-likelihood ratio of the round is

    <x - m0, m1 - m0> / s^2 - |m1 - m0|^2 / (2 s^2),

and for Laplace noise of scale b it is (|x - m0|_1 - |x - m1|_1) / b. Under a hidden Poisson cohort
of rate q a round counts log(1 - q + q e^llr). The score of a run is the sum over rounds: for sums
with Gaussian or Laplace noise no test has more power (Neyman and Pearson). For other releases, such
as second moments, it is a valid score that may have less. Both sums come from whole stacks of
clients, so a canary that moves the contributions of others is noticed too.

A few other clients suffice: the adversary knows their contributions. The rest of the federation
contributes zeros, as in a deployment where they do not answer; noise, clip and the public number of
clients stay those of the plan. Releases are made by the billboard, as in a run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from coterie.audit.bounds import Array, Bound, gaussian_bound, threshold_bound
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import FederatedDataset, offsets_of
from coterie.engine.rounds import ClientHalf, RoundState, client_half, server_half
from coterie.engine.store import Ids, Store
from coterie.methods.base import Shape, per_row_leaves
from coterie.plan.plan import Plan
from coterie.plan.rules import resolve
from coterie.privacy.entropy import open_entropy
from coterie.privacy.mechanisms import Mechanism

_SCALES = (1.0, 10.0, 1e3, 1e6)
_PATTERNS = ("constant", "alternating", "one", "random")
_ROWS = (1, 8, 40)


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        claimed: Epsilon of the guarantee, an upper bound.
        bounds: Lower bounds, one per estimator.
        canary: The canary's pattern, scale and rows, and the mu of Gaussian DP that it uses.
        scores: Scores of runs without and with the canary.
    """

    method: str
    claimed: float
    delta: float
    relation: str
    view: str
    rounds: int
    trials: int
    seconds: float
    bounds: tuple[Bound, ...]
    canary: dict[str, Any]
    scores: tuple[Array, Array]

    @property
    def best(self) -> Bound:
        """The largest lower bound."""
        return max(self.bounds, key=lambda bound: bound.epsilon)

    @property
    def holds(self) -> bool:
        """Whether no lower bound is above the claim."""
        return self.best.epsilon <= self.claimed

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return {
            "method": self.method,
            "claimed": None if math.isinf(self.claimed) else self.claimed,
            "delta": self.delta,
            "relation": self.relation,
            "lower_bound": self.best.epsilon,
            "estimator": self.best.estimator,
            "confidence": self.best.confidence,
            "holds": self.holds,
            "bounds": [bound.to_json() for bound in self.bounds],
            "view": self.view,
            "rounds": self.rounds,
            "trials": self.trials,
            "seconds": self.seconds,
            "canary": self.canary,
        }


@dataclass(frozen=True)
class Canary:
    """Rows that push a client's contribution to its clip."""

    pattern: str
    scale: float
    rows: int

    def fill(self, features: Any, targets: Any, task: str) -> tuple[Any, Any]:
        """Return rows and targets of the shapes of these, with the pattern's values."""
        rng = np.random.default_rng(0)
        sign = np.where(np.arange(self.rows) % 2 == 0, 1.0, -1.0)
        shape = (self.rows, *features.shape[1:])
        x = np.ones(shape)
        if self.pattern == "random":
            x = rng.standard_normal(shape)
            sign = rng.choice([-1.0, 1.0], self.rows)
        elif self.pattern == "alternating":
            x = x * sign.reshape(-1, *[1] * (len(shape) - 1))
        elif self.pattern == "one":
            x.reshape(self.rows, -1)[:, 1:] = 0
        if self.pattern == "constant":
            sign = np.ones(self.rows)
        filled = torch.from_numpy(x * self.scale).to(torch.float32)
        return filled, _targets(sign * self.scale, targets, task)


def _targets(signed: Array, like: torch.Tensor, task: str) -> torch.Tensor:
    if task == "regression":
        return torch.from_numpy(signed).to(like.dtype)
    positive = torch.from_numpy(signed > 0)
    if task == "multilabel":
        return positive[:, None].expand(-1, like.shape[1]).to(like.dtype)
    return positive.to(like.dtype)


@dataclass(frozen=True)
class Attack:
    """How a plan is attacked.

    Attributes:
        canary: None to search for one.
        sees_cohort: Whether the adversary observes the cohort; None as the plan states.
        split: How training rows are chosen from a federation; each world is split by itself.
        others: How many other clients take part.
    """

    canary: Canary | None = None
    sees_cohort: bool | None = None
    split: Callable[[FederatedDataset], FederatedDataset] = lambda data: data
    others: int = 3


def place(data: FederatedDataset, canary: Canary | None, others: int) -> FederatedDataset:
    """Return the federation with the canary as client 0, `others` clients, and no other rows."""
    kept = np.argsort(-data.counts[1:], kind="stable")[:others] + 1
    rest = data.where(np.isin(data.owners, kept))
    if canary is None:
        return rest
    dense = rest.features
    if not isinstance(dense, torch.Tensor):
        dense = torch.from_numpy(dense.toarray().astype(np.float32))
    x, y = canary.fill(dense, rest.targets, data.spec.task)
    counts = rest.counts.copy()
    counts[0] = canary.rows
    return replace(
        rest,
        features=torch.cat([x, dense]),
        targets=torch.cat([y, rest.targets]),
        offsets=offsets_of(counts),
        source_split=None,
        mapped=None,
    )


class Adversary:
    """Runs a plan in one of two worlds, and scores what it released.

    The canary computes in every round, drawn or not: a client may do so, and the guarantee does not
    depend on how it arrives at its contribution.

    Args:
        plan: The resolved plan.
        worlds: The rows without the canary's, and with them.
        sees_cohort: Whether it observes who takes part.
    """

    def __init__(
        self, plan: Plan, worlds: tuple[FederatedDataset, FederatedDataset], *, sees_cohort: bool
    ) -> None:
        self.plan, self.worlds, self.spec = plan, worlds, worlds[0].spec
        self.others = np.flatnonzero(worlds[0].counts > 0)
        self.rate = plan.sampler.participation(self.spec.clients).rate
        self.hidden = self.rate < 1 and not sees_cohort

    def attack(self, seed: int, *, inside: bool) -> tuple[float, float, float]:
        """Run the plan once in a world; return two scores, and the mu that the canary uses.

        The first score is the log-likelihood ratio of all releases. The second compares releases
        that follow each other, <e_t - e_t', m_t - m_t'> with e = (x - m0)/s and m = (m1 - m0)/s:
        noise that was drawn once and used twice cancels in it.
        """
        plan = replace(self.plan, simulation_seed=seed)
        billboard, rng = plan.open(self.spec), Rng.seeded(seed)
        shared = plan.method.init(self.spec, Rng.seeded(0).at("init"))
        stores = [self._open_store(world, shared) for world in self.worlds]
        total = repeated = square = 0.0
        last: tuple[Array, Array] | None = None
        for number in range(plan.posts):
            drawn = plan.sampler.draw(self.spec.clients, open_entropy(seed, "cohort", number))
            others, is_drawn = np.intersect1d(self.others, drawn), 0 in drawn[:1]
            with billboard.charged(number) as release:
                state = RoundState(plan.method, release.mechanism, shared, rng, number, seed)
                half0 = self._half(0, state, stores[0], others)
                half1 = self._half(1, state, stores[1], np.concatenate([[0], others]))
                release.add((half1 if inside and is_drawn else half0).part)
                shared, post = server_half(plan.method, shared, release)
            error, move = self._standardised(release.mechanism, post.value, half0, half1)
            total += self._counted(self._ratio(release.mechanism, error, move), is_drawn)
            square += float(move @ move)
            if last is not None:
                repeated += float((error - last[0]) @ (move - last[1]))
            last = error, move
        return total, repeated, math.sqrt(square)

    def _half(self, world: int, state: RoundState, store: Store, ids: Ids) -> ClientHalf:
        method = self.plan.method
        personal = store.take(ids, lambda n: method.init_client_state(state.shared, self.spec, n))
        half = client_half(state, personal, self.worlds[world].clients(ids))
        store.put(ids, half.personal)
        return half

    def _standardised(
        self, mechanism: Mechanism, released: Tree, half0: ClientHalf, half1: ClientHalf
    ) -> tuple[Array, Array]:
        """Return (x - m0) / s and (m1 - m0) / s over all independent numbers of a release."""
        shapes = {name: tuple(leaf.shape) for name, leaf in released.items()}
        errors, moves = [], []
        for name, s in mechanism.standard_deviations(shapes).items():
            trees = released, half0.part.total, half1.part.total
            x, low, high = (self._numbers(tree[name]) for tree in trees)
            errors.append((x - low) / s)
            moves.append((high - low) / s)
        return np.concatenate(errors), np.concatenate(moves)

    def _ratio(self, mechanism: Mechanism, error: Array, move: Array) -> float:
        if mechanism.order == 1:  # Laplace noise of scale s / sqrt(2)
            return math.sqrt(2) * float((np.abs(error) - np.abs(error - move)).sum())
        return float(error @ move - move @ move / 2)

    def _counted(self, ratio: float, is_drawn: bool) -> float:
        if self.hidden:
            return float(np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + ratio))
        return ratio if is_drawn else 0.0

    def _numbers(self, leaf: torch.Tensor) -> Array:
        """Return the independent numbers of a leaf: of a symmetric matrix, one triangle."""
        array = np.asarray(leaf, dtype=np.float64)
        if self.plan.method.shape is Shape.GRAM and array.ndim == 2:
            return array[np.triu_indices(len(array))]
        return array.reshape(-1)

    def _open_store(self, world: FederatedDataset, shared: Tree) -> Store:
        first = self.plan.method.init_client_state(shared, self.spec, 1)
        return Store(first, self.spec.clients, per_row=per_row_leaves(first), offsets=world.offsets)


def find_canary(plan: Plan, data: FederatedDataset, others: int = 3) -> Canary:
    """Return the candidate that uses most of the allowed mu.

    Patterns, scales and numbers of rows are tried one after another, on one run each.
    """
    best, found, without = -1.0, Canary("constant", 1.0, 1), place(data, None, others)
    for pattern, scale, rows in product(_PATTERNS, _SCALES, _ROWS):
        canary = Canary(pattern, scale, rows)
        worlds = without, place(data, canary, others)
        mu = Adversary(plan, worlds, sees_cohort=True).attack(0, inside=True)[2]
        if math.isfinite(mu) and mu > best * 1.001:
            best, found = mu, canary
    return found


def audit(
    plan: Plan,
    data: FederatedDataset,
    *,
    trials: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    attack: Attack | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Return lower bounds on epsilon from `trials` runs in each of two worlds.

    Args:
        plan: What to audit; open values are filled in by rule.
        data: Rows, of which a few clients are kept.
        trials: Runs without the canary, and as many with it.
        confidence: That all bounds hold together.
        seed: Noise, cohorts and client streams of trial i come from (seed, i).
        attack: The canary and what the adversary sees; None searches for a canary.
        progress: Called after every trial with how many are done.
    """
    started, how = time.perf_counter(), attack or Attack()
    plan = resolve(plan, data.spec)
    guarantee = plan.guarantee(data.spec.clients)
    _check(plan, trials)
    canary = how.canary or find_canary(plan, data, how.others)
    shown = plan.shows_cohort(data.spec.clients)
    worlds = [how.split(place(data, one, how.others)) for one in (None, canary)]
    sees = shown if how.sees_cohort is None else how.sees_cohort
    adversary = Adversary(plan, (worlds[0], worlds[1]), sees_cohort=sees)
    scores = np.empty((2, trials, 3))
    for trial in range(trials):
        for world in (0, 1):
            words = np.random.SeedSequence([seed, trial, world]).generate_state(1, np.uint64)
            scores[world, trial] = adversary.attack(int(words[0] >> 1), inside=bool(world))
        progress(trial + 1, trials)
    # Rounds in which the canary is not drawn score 0, so sampled scores are no normals.
    normal = adversary.rate == 1 and _is_gaussian(plan, data.spec.clients)
    return Audit(
        method=str(plan.method),
        claimed=guarantee.epsilon,
        delta=guarantee.delta,
        relation=guarantee.relation,
        view="other clients",
        rounds=plan.posts,
        trials=trials,
        seconds=time.perf_counter() - started,
        bounds=_bounds(scores, guarantee.delta, confidence, normal=normal),
        canary={**asdict(canary), "mu": float(scores[:, :, 2].mean())},
        scores=(scores[0, :, 0], scores[1, :, 0]),
    )


def _bounds(scores: Array, delta: float, confidence: float, *, normal: bool) -> tuple[Bound, ...]:
    """Return every estimator's bound; together they hold with the confidence (Bonferroni)."""
    level = 1 - (1 - confidence) / (4 if normal else 2)
    found = []
    for at, suffix in ((0, ""), (1, "_repeated_noise")):
        out, inside = scores[0, :, at], scores[1, :, at]
        estimators = (gaussian_bound, threshold_bound) if normal else (threshold_bound,)
        for estimate in estimators:
            bound = estimate(out, inside, delta, level)
            found.append(replace(bound, estimator=bound.estimator + suffix, confidence=confidence))
    return tuple(found)


def _is_gaussian(plan: Plan, clients: int) -> bool:
    relation, mechanisms = plan.privacy.relation, plan.mechanisms(clients)
    return all(one.event().gaussian_noise(relation) is not None for one in set(mechanisms))


def _check(plan: Plan, trials: int) -> None:
    if trials < 50:
        raise ValueError(f"trials = {trials}: expected at least 50 runs in each world")
    if plan.posts == 0 or not plan.private:
        raise ValueError(
            f"{plan.method.kind} at epsilon = {plan.privacy.epsilon}: there is no claim to audit; "
            "give a method that releases something, and a finite epsilon"
        )
    if plan.privacy.noise.local:
        raise ValueError(
            f"noise = {plan.privacy.noise.kind!r}: messages with a client's own noise cannot be "
            "audited yet; give a plan whose noise is added to sums"
        )
