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

Where clients add the noise, the adversary is the server: x is the canary's own message, m0 = 0, and
s is the noise of one message.

`audit_one_run` needs a single run. Many canaries each take part by a fair coin, and the adversary
guesses the coins by the scores above, given all contributions (Steinke, Nasr, Jagielski 2023,
"Privacy auditing with one (1) training run", https://arxiv.org/abs/2305.08846; Andrew, Kairouz, Oh,
Oprea, McMahan, Suriyakumar 2024, https://arxiv.org/abs/2302.03098, for clients).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from coterie.audit.bounds import Array, Bound, gaussian_bound, one_run_bound, threshold_bound
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import FederatedDataset, offsets_of
from coterie.engine.rounds import (
    ClientHalf,
    RoundState,
    client_half,
    no_contribution,
    server_half,
)
from coterie.engine.store import Ids, Store
from coterie.methods.base import Shape, per_row_leaves
from coterie.planning.plan import Plan
from coterie.planning.rules import resolve
from coterie.privacy.banded import BandedSum
from coterie.privacy.billboard import Post, Release, absent_shares
from coterie.privacy.entropy import client_entropy, open_entropy
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import Mechanism
from coterie.privacy.noise import SharedNoise
from coterie.privacy.shares import GaussianShares

TOGETHER = "coordinator_and_corrupt"
"""The view of the strongest adversary under noise in shares."""
_SCALES = (1.0, 10.0, 1e3, 1e6)
_PATTERNS = ("constant", "alternating", "one", "random")
_ROWS = (1, 8, 40)
_POINTS = 60
_LIKELY, _FEWEST = 0.05, 25
"""The least probability of a number of rounds, and the fewest trials, that are compared."""


Seen = tuple[Array, Array]
"""An observation: its error and the canary's move, in deviations of the noise."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        bounds: Lower bounds, one per estimator.
        canary: The canary's pattern, scale and rows, and the mu of Gaussian DP that it uses.
        scores: Scores of runs without and with the canary.
        guarantee: The guarantee that was attacked.
    """

    method: str
    view: str
    rounds: int
    trials: int
    seconds: float
    bounds: tuple[Bound, ...]
    canary: dict[str, Any]
    scores: tuple[Array, Array]
    guarantee: Guarantee

    @property
    def claimed(self) -> float:
        """Epsilon of the guarantee against the adversary of the audit, an upper bound."""
        return self.guarantee.views.get(TOGETHER, self.guarantee.epsilon)

    @property
    def errors(self) -> Array:
        """False positives and false negatives of the attack at some thresholds, (n, 2)."""
        out, inside = self.scores
        finite = np.concatenate([out, inside])
        at = np.unique(np.quantile(finite, np.linspace(0, 1, _POINTS)))
        ends = np.concatenate([[-math.inf], at])
        return np.array([((out > one).mean(), (inside <= one).mean()) for one in ends])

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
            "delta": self.guarantee.delta,
            "relation": self.guarantee.relation,
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
            "errors": self.errors.tolist(),
        }


@dataclass(frozen=True)
class Canary:
    """Rows that push a client's contribution to its clip."""

    pattern: str
    scale: float
    rows: int
    seed: int = 0

    def fill(self, features: Any, targets: Any, task: str) -> tuple[Any, Any]:
        """Return rows and targets of the shapes of these, with the pattern's values."""
        rng = np.random.default_rng(self.seed)
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
        sites: Through how many deployed sites, in this process; 0 for none.
        hostile: Whether their coordinator asks for more than the protocol says.
        split: How training rows are chosen from a federation; each world is split by itself.
        others: How many other clients take part.
    """

    canary: Canary | None = None
    sees_cohort: bool | None = None
    sites: int = 0
    hostile: bool = False
    split: Callable[[FederatedDataset], FederatedDataset] = lambda data: data
    others: int = 3


def place(
    data: FederatedDataset, canary: Canary | None, others: int, canaries: int = 1
) -> FederatedDataset:
    """Return the federation with canaries as first clients, `others` clients, and no other rows.

    Several canaries differ in the seed of their rows.
    """
    kept = np.argsort(-data.counts[canaries:], kind="stable")[:others] + canaries
    rest = data.where(np.isin(data.owners, kept))
    if canary is None:
        return rest
    dense = rest.features
    if not isinstance(dense, torch.Tensor):
        dense = torch.from_numpy(dense.toarray().astype(np.float32))
    made = [
        replace(canary, seed=canary.seed + number).fill(dense, rest.targets, data.spec.task)
        for number in range(canaries)
    ]
    counts = rest.counts.copy()
    counts[:canaries] = canary.rows
    return replace(
        rest,
        features=torch.cat([*(x for x, _ in made), dense]),
        targets=torch.cat([*(y for _, y in made), rest.targets]),
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

    def attack(self, seed: int, *, inside: bool) -> tuple[float, float, float, int]:
        """Run the plan once in a world; return two scores, the canary's mu, and its rounds.

        The first score is the log-likelihood ratio of all releases. The second compares releases
        that follow each other, <e_t - e_t', m_t - m_t'> with e = (x - m0)/s and m = (m1 - m0)/s:
        noise that was drawn once and used twice cancels in it.
        """
        plan = replace(self.plan, simulation_seed=seed)
        billboard, rng = plan.open(self.spec), Rng.seeded(seed)
        shared = plan.method.init(self.spec, Rng.seeded(0).at("init"))
        stores = [self.open_store(plan, world, shared) for world in self.worlds]
        total, repeated, square, drawn_rounds = 0.0, 0.0, 0.0, 0
        last: Seen | None = None
        earlier: list[Seen] = []
        for number in range(plan.posts):
            drawn = plan.sampler.draw(
                self.spec.clients, open_entropy(seed, "cohort", number), number
            )
            others, is_drawn = np.intersect1d(self.others, drawn), 0 in drawn[:1]
            with billboard.charged(number) as release:
                mechanism = release.mechanism.of_message()
                state = RoundState(plan.method, mechanism, shared, rng, number, seed)
                watch = self._messages if release.mechanism.local else self._sums
                watch = self._shares if release.mechanism.in_shares else watch
                post, seen = watch(state, release, stores, others, inside and is_drawn)
                shared = plan.method.server_update(shared, post)
            drawn_rounds += is_drawn
            if isinstance(release.mechanism, BandedSum):
                earlier.insert(0, (seen[0][0], seen[0][1] * is_drawn))
                seen, is_drawn = [_independent(release.mechanism, earlier)], True
            for error, move in seen:
                total += self._counted(self._ratio(release.mechanism, error, move), is_drawn)
                square += float(move @ move)
                if last is not None:
                    repeated += float((error - last[0]) @ (move - last[1]))
                last = error, move
        for store in stores:
            self.close_store(store)
        return total, repeated, math.sqrt(square), drawn_rounds

    def close_store(self, store: Any) -> None:
        """Remove what a run left behind."""

    def _sums(
        self, state: RoundState, release: Release, stores: list[Any], others: Ids, inside: bool
    ) -> tuple[Post, list[Seen]]:
        """Publish the sum of a round; return it, and error and move in deviations of the noise."""
        half0 = self.half(0, state, stores[0], others)
        half1 = self.half(1, state, stores[1], np.concatenate([[0], others]))
        release.add((half1 if inside else half0).part)
        post = release.publish()
        sums = half0.part.total, half1.part.total
        mechanism = release.mechanism
        measured = mechanism.inner if isinstance(mechanism, BandedSum) else mechanism
        return post, [self.standardised(measured, post.value, *sums)]

    def _shares(
        self, state: RoundState, release: Release, stores: list[Any], others: Ids, inside: bool
    ) -> tuple[Post, list[Seen]]:
        """Publish a sum with shares of noise, of which the adversary knows all but the honest ones.

        The canary's share is among K - C honest ones. The adversary subtracts those of all other
        clients: it is the coordinator together with corrupt clients, and the sum has K at least.
        """
        mechanism = release.mechanism
        assert isinstance(mechanism, GaussianShares)
        planned = replace(state, mechanism=mechanism.inner)
        cohort = np.concatenate([[0], others]) if inside else others
        noisy = replace(state, mechanism=mechanism)
        first = partial(self.plan.method.init_client_state, state.shared, self.spec)
        world = int(inside)
        own = stores[world].take(cohort, first)
        release.add(client_half(noisy, own, self.worlds[world].clients(cohort)).part)
        half0 = self.half(0, planned, stores[0], others)
        half1 = self.half(1, planned, stores[1], np.concatenate([[0], others]))
        sums = half0.part.total, half1.part.total
        shapes = {name: tuple(leaf.shape) for name, leaf in sums[0].items()}
        noise = client_entropy(state.simulation_seed, state.round)
        everyone = np.arange(self.spec.clients)
        rest = torch.from_numpy(np.setdiff1d(everyone, cohort))
        release.add(absent_shares(mechanism, shapes, rest, noise))
        post = release.publish()
        honest = np.concatenate([[0], np.setdiff1d(everyone[1:], others), others])
        known = torch.from_numpy(honest[mechanism.honest_shares :])
        if not len(known):
            return post, [self.standardised(mechanism.inner, post.value, *sums)]
        dealt = absent_shares(mechanism, shapes, known, noise).total
        seen = {name: post.value[name] - dealt[name] for name in post.value}
        return post, [self.standardised(mechanism.inner, seen, *sums)]

    def _messages(
        self, state: RoundState, release: Release, stores: list[Any], others: Ids, inside: bool
    ) -> tuple[Post, list[Seen]]:
        """Send noisy messages; return the release, and error and move of the canary's messages."""
        noisy = replace(state, mechanism=release.mechanism)
        canary = np.zeros(1, dtype=np.int64)
        first = partial(self.plan.method.init_client_state, state.shared, self.spec)
        own, rows = stores[1].take(canary, first), self.worlds[1].clients(canary)
        sent = (client_half if inside else no_contribution)(noisy, own, rows).part
        release.add(sent)
        if len(others):
            release.add(self.half(0, noisy, stores[0], others).part)
        exact = self.half(1, state, stores[1], canary).part.total
        post = release.publish()
        nothing = {name: torch.zeros_like(leaf) for name, leaf in exact.items()}
        return post, [self.standardised(state.mechanism, sent.total, nothing, exact)]

    def half(self, world: int, state: RoundState, store: Any, ids: Ids) -> ClientHalf:
        """Return the clients' half of a round in a world, and keep their personal state."""
        method = self.plan.method
        personal = store.take(ids, lambda n: method.init_client_state(state.shared, self.spec, n))
        half = client_half(state, personal, self.worlds[world].clients(ids))
        store.put(ids, half.personal)
        return half

    def standardised(
        self, mechanism: Mechanism, released: Tree, without: Tree, with_canary: Tree
    ) -> tuple[Array, Array]:
        """Return (x - m0) / s and (m1 - m0) / s over all independent numbers of a release."""
        shapes = {name: tuple(leaf.shape) for name, leaf in released.items()}
        errors, moves = [], []
        for name, s in mechanism.standard_deviations(shapes).items():
            trees = released, without, with_canary
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

    def open_store(self, plan: Plan, world: FederatedDataset, shared: Tree) -> Any:
        """Return a store for the clients of a world."""
        first = plan.method.init_client_state(shared, self.spec, 1)
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
    _check(plan, data.spec.clients, trials)
    canary = how.canary or find_canary(plan, data, how.others)
    shown = plan.shows_cohort(data.spec.clients)
    worlds = [how.split(place(data, one, how.others)) for one in (None, canary)]
    shown = shown or _view(plan) == TOGETHER
    sees = shown if how.sees_cohort is None else how.sees_cohort
    adversary = Adversary(plan, (worlds[0], worlds[1]), sees_cohort=sees)
    if how.sites:
        from coterie.audit.sites import SiteAdversary

        adversary = SiteAdversary(
            plan, (worlds[0], worlds[1]), sites=how.sites, hostile=how.hostile
        )
    scores = np.empty((2, trials, 4))
    for trial in range(trials):
        for world in (0, 1):
            words = np.random.SeedSequence([seed, trial, world]).generate_state(1, np.uint64)
            scores[world, trial] = adversary.attack(int(words[0] >> 1), inside=bool(world))
        progress(trial + 1, trials)
    normal = not adversary.hidden and _is_gaussian(plan, data.spec.clients)
    drawn = _law_of_rounds(plan, data.spec.clients)
    return Audit(
        method=str(plan.method),
        view=_view(plan),
        rounds=plan.posts,
        trials=trials,
        seconds=time.perf_counter() - started,
        bounds=_bounds(scores, guarantee.delta, confidence, drawn if normal else None),
        canary={**asdict(canary), "mu": float(scores[:, :, 2].mean())},
        scores=(scores[0, :, 0], scores[1, :, 0]),
        guarantee=guarantee,
    )


def audit_one_run(
    plan: Plan,
    data: FederatedDataset,
    *,
    canaries: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """Return a lower bound on epsilon from a single run with many canaries.

    Args:
        plan: What to audit, with noise on sums of all clients; open values are filled in by rule.
        data: Its spec is that of the run; its rows are not used, every client is a canary or empty.
        canaries: How many; None for half of the clients, at most 500.
        confidence: That the bound holds.
        seed: Of coins, noise and canaries.
    """
    started = time.perf_counter()
    plan = replace(resolve(plan, data.spec), simulation_seed=seed)
    guarantee, clients = plan.guarantee(data.spec.clients), data.spec.clients
    many = canaries or min(500, max(2, clients // 2))
    _check(plan, data.spec.clients, 50)
    _check_one_run(plan, many, clients)
    truth = np.random.default_rng(seed).choice(np.array([-1, 1]), many)
    candidates = [Canary("random", scale, 8, seed) for scale in (0.1, *_SCALES)]
    used = [_first_move(plan, place(data, one, 0, many), many) for one in candidates]
    canary = candidates[int(np.argmax(used))]
    scores = _score_canaries(plan, place(data, canary, 0, many), truth, seed)
    guessed = np.zeros(many, dtype=np.int64)
    sure = np.argsort(-np.abs(scores), kind="stable")[: max(1, many // 2)]
    guessed[sure] = np.where(scores[sure] > 0, 1, -1)
    return Audit(
        method=str(plan.method),
        view=_view(plan),
        rounds=plan.posts,
        trials=1,
        seconds=time.perf_counter() - started,
        bounds=(one_run_bound(guessed, truth, guarantee.delta, confidence),),
        canary={**asdict(canary), "canaries": many},
        scores=(scores[truth < 0], scores[truth > 0]),
        guarantee=guarantee,
    )


def _first_move(plan: Plan, world: FederatedDataset, canaries: int) -> float:
    """Return the mean norm of the canaries' contributions to the first round."""
    clients = world.clients(np.arange(canaries))
    shared = plan.method.init(world.spec, Rng.seeded(0).at("init"))
    own = plan.method.init_client_state(shared, world.spec, canaries)
    own = {**own, **{name: own[name].new_zeros(canaries, 8) for name in per_row_leaves(own)}}
    mechanism = plan.mechanisms(world.spec.clients)[0]
    _, rows = plan.method.local_update(shared, own, clients, Rng.seeded(0), 0)
    clipped = mechanism.clip(rows)[0]
    return float(sum(leaf.double().square().sum() for leaf in clipped.values()))


def _score_canaries(
    plan: Plan, world: FederatedDataset, truth: NDArray[np.int64], seed: int
) -> Array:
    """Run a plan with the canaries that take part, and score each: large if it seems to.

    Each canary computes its contribution, whether it takes part or not. Let the rows of C be the
    contributions in all rounds, in deviations of the noise, and x the releases. The coins of all
    canaries are unknown, so the score is the best linear estimate of a coin,
    (I + C C^T / 4)^-1 C (x - C^T 1 / 2).
    """
    adversary = Adversary(plan, (world, world), sees_cohort=True)
    billboard, rng = plan.open(world.spec), Rng.seeded(seed)
    shared = plan.method.init(world.spec, Rng.seeded(0).at("init"))
    store = adversary.open_store(plan, world, shared)
    released, moved = [], []
    for number in range(plan.posts):
        with billboard.charged(number) as release:
            state = RoundState(plan.method, release.mechanism, shared, rng, number, seed)
            ids = [np.array([one], dtype=np.int64) for one in range(len(truth))]
            parts = [adversary.half(1, state, store, one).part for one in ids]
            for part, takes_part in zip(parts, truth > 0, strict=True):
                if takes_part:
                    release.add(part)
            shared, post = server_half(plan.method, shared, release)
        nothing = {name: torch.zeros_like(leaf) for name, leaf in post.value.items()}
        pairs = [
            adversary.standardised(release.mechanism, post.value, nothing, part.total)
            for part in parts
        ]
        released.append(pairs[0][0])
        moved.append(np.stack([move for _, move in pairs]))
    moves = np.concatenate(moved, axis=1)
    left = np.concatenate(released) - moves.sum(axis=0) / 2
    found: Array = np.linalg.solve(np.eye(len(truth)) + moves @ moves.T / 4, moves @ left)
    return found


def _check_one_run(plan: Plan, canaries: int, clients: int) -> None:
    if not 2 <= canaries <= clients:
        raise ValueError(f"canaries = {canaries}: expected 2 to {clients}, the number of clients")
    if plan.privacy.noise.local or plan.sampler.participation(clients).rate < 1:
        raise ValueError(
            "a single run is audited with noise on sums of all clients: leave out sampling and "
            "noise of clients, or audit by repeated runs"
        )


def _view(plan: Plan) -> str:
    if isinstance(plan.privacy.noise, SharedNoise):
        return TOGETHER
    return "server" if plan.privacy.noise.local else "other clients"


def _bounds(scores: Array, delta: float, confidence: float, drawn: Any) -> tuple[Bound, ...]:
    """Return every estimator's bound; together they hold with the confidence (Bonferroni).

    `drawn` is the law of the number of rounds that the canary takes part in, where that is visible
    and scores are normal given it. Trials with one number k of rounds are then compared: since
    P1(S, k) <= e^epsilon P0(S, k) + delta, their delta is delta / P(k).
    """
    level = 1 - (1 - confidence) / (2 if drawn is None else 4)
    found = []
    for at, suffix in ((0, ""), (1, "_repeated_noise")):
        bounds = [threshold_bound(scores[0, :, at], scores[1, :, at], delta, level)]
        if drawn is not None:
            rounds = np.arange(drawn.args[0] + 1)
            k = rounds[drawn.pmf(rounds) >= _LIKELY][-1]
            out, inside = (world[world[:, 3] == k, at] for world in scores)
            if min(len(out), len(inside)) >= _FEWEST:
                less = delta / float(drawn.pmf(k))
                bounds.insert(0, gaussian_bound(out, inside, less, level))
        found += [
            replace(one, estimator=one.estimator + suffix, confidence=confidence) for one in bounds
        ]
    return tuple(found)


def _independent(mechanism: BandedSum, earlier: Sequence[Seen]) -> Seen:
    """Return error and move of a round where the noise of earlier ones is taken off: C Y."""
    found = [
        sum(weight * values for weight, values in zip(mechanism.row, several, strict=False))
        for several in zip(*earlier, strict=True)
    ]
    return np.asarray(found[0]), np.asarray(found[1])


def _law_of_rounds(plan: Plan, clients: int) -> Any:
    """Return the law of the number of rounds that the canary, client 0, takes part in."""
    who = plan.sampler.participation(clients)
    if who.kind == "cyclic":
        return stats.binom(len(range(0, plan.posts, who.period)), 1.0)
    return stats.binom(plan.posts, who.rate)


def _is_gaussian(plan: Plan, clients: int) -> bool:
    relation, mechanisms = plan.privacy.relation, plan.mechanisms(clients)
    events = {one.of_message().event() for one in mechanisms}
    return all(event.gaussian_noise(relation) is not None for event in events)


def _check(plan: Plan, clients: int, trials: int) -> None:
    if trials < 50:
        raise ValueError(f"trials = {trials}: expected at least 50 runs in each world")
    if plan.posts == 0 or not plan.private:
        raise ValueError(
            f"{plan.method.kind} at epsilon = {plan.privacy.epsilon}: there is no claim to audit; "
            "give a method that releases something, and a finite epsilon"
        )
