"""The in-process engine: all clients in this process, vectorised in blocks, on the CPU or a GPU.

Block size, device and store change speed only: the guarantee never depends on them, and results
agree over block sizes to float tolerance (sums of contributions agree exactly: see `mechanisms`).

While a GPU computes a round, this process draws the cohort and the batches of the next one. It does
not wait for the GPU to check steps, but notes doubts (`solvers.local.Doubts`) and looks at them
before it publishes.

**Guarantee:** a round is charged, durably, before its steps start, and nothing of it is published
before the check of its steps is known. A round with doubts is made again under its charge, with
fresh noise where there is no seed, and only that result is published. What is drawn ahead stays in
this process, with its clients. So releases are those of a run that waits, to the last bit. Tests:
tests/engine/test_simulate.py.

Several processes can share a run (`coterie.core.ranks`): each computes the clients that it owns,
rank 0 does everything else. With a budget the releases are the same to the last bit for any number
of processes, with the same block size and number of threads.
"""

import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from coterie.core.files import write_atomically
from coterie.core.progress import Bar
from coterie.core.ranks import ALONE, Ranks
from coterie.core.rng import Rng
from coterie.core.signals import raise_if_stopped
from coterie.core.tree import Tree, add, to
from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.engine.rounds import (
    RoundState,
    absent_half,
    check_separate,
    client_half,
    personal_models,
    server_half,
)
from coterie.engine.store import Ids, Store, arrange, folder_of
from coterie.methods.base import Duality, Method, Shape, per_row_leaves
from coterie.methods.finetune import Finetune
from coterie.planning.plan import Plan, Speed
from coterie.planning.stragglers import Clock, Stragglers
from coterie.privacy.billboard import Billboard, Bounded, Post, Release
from coterie.privacy.entropy import open_entropy
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import LedgerError
from coterie.solvers.local import Doubts, checked_later
from coterie.solvers.sgd import computed_in

_ERRORS = 10
"""Errors of clients that are kept."""
_STATE = "state"  # what is drawn ahead: the personal state of a block
_WAITS = 16
"""Rounds in which the host waits for steps on a GPU, after one that was made twice."""


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of a run."""

    rounds: float
    total: float


@dataclass(frozen=True)
class Progress:
    """What an observer receives after a round.

    `answered` is the number of clients that contributed (None if unknown after a resumed run),
    `seconds` the time on the virtual clock, if there is one.
    """

    round: int
    rounds: int
    shared: Tree
    store: Store
    answered: int | None = 0
    seconds: float | None = None

    def models(self, method: Method, data: FederatedDataset) -> Callable[[Ids], Tree]:
        """Return a function from clients to their current models."""

        def current(ids: Ids) -> Tree:
            first = partial(method.init_client_state, self.shared, data.spec)
            rows = self.store.take(ids, first)
            return method.current_models(self.shared, rows, data.clients(ids))

        return current


class Observer(Protocol):
    """A callable that watches a run. It returns None, so it cannot change the run."""

    def __call__(self, progress: Progress) -> None:
        """Receive the state after a round."""


@dataclass(frozen=True, repr=False)
class Outcome:
    """A finished run: one model per client, the public transcript, and the guarantee.

    Attributes:
        gap: The relative duality gap, of runs without privacy that stop by it; not private.
        names: The clients' names, in the order of their models.
        zeroed: The number of contributions that were not finite, or could not be computed, and
            counted as zero; not private.
        errors: Why clients could not be computed, a line for each of the first; not private.
    """

    plan: Plan
    spec: Spec
    shared: Tree
    models: Store
    billboard: Billboard
    guarantee: Guarantee
    timing: Timing
    gap: float | None = None
    names: Sequence[str] = ()
    zeroed: int = 0
    errors: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Outcome of {self.plan.method.kind}: {self.spec.clients:,} models, "
            f"{repr(self.guarantee)[1:-1]}>"
        )

    @property
    def posts(self) -> tuple[Post, ...]:
        """The public transcript."""
        return self.billboard.posts

    def rows(self, ids: Ids) -> Tree:
        """Return the models of some clients, stacked."""
        return self.models.take(ids, lambda count: {})

    def model(self, client: int) -> Tree:
        """Return one client's model parameters."""
        return {name: leaf[client] for name, leaf in self.models.leaves.items()}

    def finetune(self, method: Finetune, data: FederatedDataset) -> Callable[[Ids], Tree]:
        """Finetune the models of this run, as a run of `Finetune` of its method would.

        Nothing is released, so it costs no privacy; one run can be finetuned in several ways. The
        base of `method` is replaced by the method of this run. Return a function from clients to
        their finetuned models, stacked.
        """
        if data.spec != self.spec or list(data.names) != list(self.names):
            raise ValueError(
                f"the data to finetune on has {data.spec} and {len(data)} names, expected the "
                f"training data with {self.spec} and the same clients in the same order"
            )
        # `model` would replace the model of the base
        method = replace(method, base=self.plan.method, model=None)
        method.check(self.spec, data=data)
        stream = _client_rng(self.plan.simulation_seed).at("personalise")

        def rows(ids: Ids) -> Tree:
            clients = data.clients(ids)
            shared = to(self.shared, clients.device)
            return method.refine(shared, to(self.rows(ids), clients.device), clients, stream)

        return rows

    def onboard(self, data: FederatedDataset) -> Tree:
        """Return models for new clients, from the shared tree and their own rows.

        Nothing of theirs is released, so it costs no privacy. Raise ValueError if the rows have
        another spec, or the method cannot onboard clients.
        """
        return onboard(self.plan.method, self.shared, self.spec, data, self.plan.simulation_seed)


def check_onboard(method: Method) -> None:
    """Raise ValueError if the method has no models for clients that it was not trained with."""
    if method.shape in (Shape.ROWS, Shape.POOLED):
        raise ValueError(
            f"{method.kind} has models for its training clients only, so new clients cannot be "
            "onboarded: do not hold clients out, or use a method with a shared model, such as pmtl"
        )
    if method.serving.fixed_membership:
        raise ValueError(
            f"{method.kind} has a fixed membership (clusters or a relation between numbered "
            "clients), so new clients cannot be onboarded: do not hold clients out, or use a "
            "method without fixed membership"
        )


def onboard(
    method: Method, shared: Tree, spec: Spec, data: FederatedDataset, seed: int | None
) -> Tree:
    """Return models for new clients, from the shared tree of a federation with this spec."""
    check_onboard(method)
    if replace(data.spec, clients=0) != replace(spec, clients=0):
        raise ValueError(f"the new clients have {data.spec}, expected the training spec {spec}")
    method.check(spec, data=data)
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    personal = method.init_client_state(shared, spec, len(clients))
    return method.personalise(shared, personal, clients, _client_rng(seed).at("join"))


def simulate(  # noqa: PLR0913
    plan: Plan,
    data: FederatedDataset,
    *,
    observe: Observer | None = None,
    folder: Path | None = None,
    speed: Speed | None = None,
    stragglers: Stragglers | None = None,
    recovered: Observer | None = None,
    progress: bool | None = None,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Run a plan on clients held in this process.

    Args:
        plan: The plan.
        data: The training rows.
        observe: Called after every round.
        folder: The folder for ledger, releases and personal state. A run with a folder survives a
            crash: called again with the same plan and data, it continues.
        speed: Block size, device, store.
        stragglers: How long clients compute on a virtual clock, and how long the coordinator
            waits; late clients contribute nothing to the round. None for no clock.
        recovered: Called with the last finished round of a resumed run, before the next one.
        progress: Whether to show a progress bar; None: in a notebook or on a terminal.
        ranks: The processes that share the run; this one is rank 0, and the others `assist`.
    """
    run = _Simulation(plan, data, folder, speed or Speed(), stragglers, ranks)
    with Bar(plan.method.kind, show=progress, patience=0.5) as bar:
        return run.run(bar_of_rounds(bar, observe), recovered)


def assist(
    plan: Plan, data: FederatedDataset, folder: Path | None, speed: Speed, ranks: Ranks
) -> None:
    """Compute the clients of this rank, beside the `simulate` of rank 0 with the same arguments."""
    _Simulation(plan, data, folder, speed, None, ranks).assist()


def check_ranks(plan: Plan, clients: int, ranks: Ranks) -> None:
    """Raise ValueError if several processes cannot share a run of this plan."""
    if ranks.size == 1:
        return
    refused = {
        f"method {plan.method.kind}, which has all rows in one place": plan.method.shape
        is Shape.POOLED,
        "--history, which scores the models of all clients every round": bool(plan.history),
        "--wait (stragglers), which scores the models of all clients every round": plan.stragglers
        is not None,
        f"{clients} clients, fewer than processes": clients < ranks.size,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"{ranks.size} processes cannot share a run with {what}; leave it out, or start "
                "coterie without torchrun"
            )


def bar_of_rounds(bar: Bar, then: Observer | None = None) -> Observer | None:
    """Return an observer that shows every round on a bar, and then calls another observer."""
    if not bar.shown:
        return then

    def watch(progress: Progress) -> None:
        bar.update(progress.round, progress.rounds)
        if then is not None:
            then(progress)

    return watch


def set_clock(stragglers: Stragglers, plan: Plan, data: FederatedDataset) -> Clock:
    """Return the virtual clock of a run; a resumed run gets the same one.

    Raise ValueError if a private run would wait by times that clients report: these depend on the
    clients' row counts, which epsilon does not cover.
    """
    if stragglers.wait_is_reported and plan.privacy.epsilon != math.inf:
        raise ValueError(
            f"stragglers.wait = {stragglers.wait!r} follows from times that clients report, which "
            "epsilon does not cover: give seconds, or run with epsilon = inf"
        )
    if plan.shows_cohort(len(data)) and plan.privacy.epsilon != math.inf:
        raise ValueError(
            "stragglers under a visible cohort: which clients are late depends on their row "
            "counts, and adversaries would observe it; hide the cohort, or run with epsilon = inf"
        )
    rng = Rng.seeded(plan.simulation_seed or 0).at("clock")
    passes = plan.method.rounds(data.spec).passes
    return stragglers.clock(data.counts, data.spec.features, rng, passes)


def _client_rng(seed: int | None) -> Rng:
    return Rng.fresh() if seed is None else Rng.seeded(seed)


class _Simulation:
    """One run: the state between rounds."""

    def __init__(
        self,
        plan: Plan,
        data: FederatedDataset,
        folder: Path | None,
        speed: Speed,
        stragglers: Stragglers | None,
        ranks: Ranks = ALONE,
    ) -> None:
        check_ranks(plan, data.spec.clients, ranks)
        self.plan, self.speed, self.folder, self.ranks = plan, speed, folder, ranks
        self.owned = ranks.owned(data.spec.clients)
        data = data.at_most(plan.data.most_rows, plan.data.split_seed)
        self.data = data if speed.device == "cpu" else data.to(speed.device)
        seed = plan.simulation_seed
        self.rng = ranks.share(_client_rng(seed))
        self.data.forget()
        cohort = plan.sampler.largest(data.spec.clients)
        plan.method.check(data.spec, cohort=cohort, data=data)
        check_separate(plan.method, data.spec)
        self.clock = None if stragglers is None else set_clock(stragglers, plan, data)
        # The first shared tree is public: it comes from the spec and a fixed stream.
        self.shared = plan.method.init(data.spec, Rng.seeded(seed or 0).at("init"))
        # Rank 0 owns ledger and releases; the others only look up mechanisms.
        self.billboard = plan.open(
            data.spec, folder if ranks.is_first else None, keep_posts=self.speed.keep_posts
        )
        # The gap is private data: only a run without privacy may stop by it.
        is_free = plan.privacy.epsilon == math.inf
        rule = plan.method.rounds(data.spec)
        self.duality = rule.duality if is_free else None
        self.diverged = rule.diverged if is_free else None
        self.ahead, self.on_device = rule.ahead, rule.on_device
        self._ended: int | None = None
        self._noted = 0
        self._zeroed = torch.zeros((), dtype=torch.int64, device=speed.device)
        self._next_look = 0
        self._next: tuple[int, Ids, float | None, list[Clients]] | None = None
        self._patience = 0  # rounds until doubts are noted again
        self._taken: list[tuple[Ids, Tree]] = []  # personal state of a round that may be repeated
        self._errors: tuple[str, ...] = ()
        try:
            self.store = self._open_personal()
        except BaseException:
            self.billboard.ledger.close()
            raise

    def run(self, observe: Observer | None, recovered: Observer | None = None) -> Outcome:
        """Run the remaining rounds, then personalise."""
        started = time.perf_counter()
        try:
            first = self._recover()
            if recovered is not None and first:
                recovered(self._last_progress(first - 1))
            pooled = self.plan.method.shape is Shape.POOLED
            for number in range(first, 0 if pooled else self.plan.posts):
                raise_if_stopped()
                if self._is_solved(number) or self._has_diverged(number):
                    break
                answered, seconds = self._round(number)
                if observe is not None:
                    observe(self._progress(number, answered, seconds))
            rounds = time.perf_counter() - started
            models = self._personalise()
            gap = None if self.duality is None else self._gap(self.duality)
            return self._outcome(models, gap, started, rounds)
        finally:
            self.billboard.ledger.close()

    def assist(self) -> None:
        """Do the part of `run` that is the same on every rank, with this rank's clients."""
        for number in range(self._recover(), self.plan.posts):
            raise_if_stopped()
            if self._is_solved(number) or self._has_diverged(number):
                break
            self._assist_round(number)
        for ids, rows in self._models():
            self.ranks.send((ids, to(rows, "cpu")))
        self.ranks.send((None, self._errors))
        if self.duality is not None:
            self._gap(self.duality)

    def _round(self, number: int) -> tuple[int, float | None]:
        """Run one round: the client's half by blocks, then the server's half."""
        cohort, seconds, blocks = self._drawn(number)
        doubts = self._doubts(blocks)
        before = self._zeroed, self._errors
        with self.billboard.charged(number, self.speed.device) as release:
            for part in self._parts(number, cohort, blocks, doubts):
                release.add(part)
            if doubts is not None:
                release.perturb()
            self._draw_ahead(number + 1)
            if doubts is None or not doubts.any():
                self._finish(release)
                return len(cohort), seconds
        # Nothing was published. The round is made again, with the personal state from before it.
        self._zeroed, self._errors = before
        self._next = None
        self._put_back()
        self._patience = _WAITS
        with self.billboard.charged(number, self.speed.device) as release:
            for part in self._parts(number, cohort, self._cut(cohort), None):
                release.add(part)
            self._finish(release)
        return len(cohort), seconds

    def _finish(self, release: Release) -> None:
        """Publish a round's release, and keep the clients' new state."""
        release.combine(self.ranks)
        self.shared, _ = server_half(self.plan.method, self.shared, release, self.on_device)
        self.ranks.share(self.shared)
        self._taken = []
        self.store.commit()
        self._note_zeroed()

    def _drawn(self, number: int) -> tuple[Ids, float | None, Iterable[Clients]]:
        """Return a round's cohort, its time and its blocks, drawn ahead or now."""
        if self._next is not None and self._next[0] == number:
            return self._next[1:]
        cohort, seconds = self.ranks.share(self._cohort(number))
        return cohort, seconds, self._cut(cohort)

    def _draw_ahead(self, number: int) -> None:
        """Draw the next round while a GPU computes this one."""
        self._next = None
        if not self._overlaps or number >= self.plan.posts:
            return
        cohort, seconds = self._cohort(number)
        blocks = list(self._cut(cohort))
        if len(blocks) == 1:
            if self.ahead is not None:
                self.ahead(blocks[0], self.rng.at("client", number))
            ids = blocks[0].ids.numpy()
            if self.store.knows(ids):
                blocks[0].ahead[_STATE] = self.store.take(ids, lambda count: {})
        self._next = (number, cohort, seconds, blocks)

    @property
    def _overlaps(self) -> bool:
        """Whether a GPU computes while this process, which is alone, does something else."""
        return self.speed.device != "cpu" and self.ranks.size == 1

    def _doubts(self, blocks: Iterable[Clients]) -> Doubts | None:
        """Return where to note doubts about steps, if a round may be made again for them.

        It may if all its clients are one block, whose personal state is on the GPU.
        """
        self._patience = max(0, self._patience - 1)
        one = isinstance(blocks, list) and len(blocks) == 1
        return Doubts() if one and not self._patience and self.store.in_memory else None

    def _put_back(self) -> None:
        """Undo the staging of this round's personal state, which is in memory."""
        for ids, rows in self._taken:
            self.store.put(ids, rows)

    def _assist_round(self, number: int) -> None:
        """Compute this rank's clients in a round; rank 0 releases the sum of all ranks."""
        cohort, _ = self.ranks.share(self._nobody)
        total: Tree = {
            name: torch.zeros(shape, dtype=torch.float64)
            for name, shape in self.billboard.shapes(number).items()
        }
        for part in self._parts(number, cohort, self._cut(cohort), None):
            total = add(total, to(part.total, "cpu"))
        self.ranks.add(total)
        self.shared = self.ranks.share(self.shared)
        self.store.commit()

    def _parts(
        self, number: int, cohort: Ids, blocks: Iterable[Clients], doubts: Doubts | None
    ) -> Iterator[Bounded]:
        """Yield the bounded sums of this rank's clients by blocks, and stage their new state."""
        shared = to(self.shared, self.speed.device)
        state = RoundState(
            self.plan.method,
            self.billboard.mechanism(number),
            shared,
            self.rng,
            number,
            self.plan.simulation_seed,
            self.speed.precision,
        )
        self.store.discard()
        zeroed: torch.Tensor | int = 0
        for block, personal in self._with_state(blocks, shared):
            with checked_later(doubts):
                half = client_half(state, personal, block)
            self._taken = [] if doubts is None else [(block.ids.numpy(), personal)]
            yield half.part
            self.store.stage(block.ids.numpy(), half.personal)
            zeroed = half.zeroed.sum().to(self.speed.device) + zeroed
            self._errors = (self._errors + half.errors)[:_ERRORS]
        shares = absent_half(state, self.data.spec, cohort, self.owned)
        if shares is not None:
            yield shares
        found = torch.as_tensor(zeroed, device=self.speed.device)
        self._zeroed = self._zeroed + self.ranks.add({"zeroed": found})["zeroed"]
        # New personal rows are on disk before the release exists: see `Store`.
        self.store.seal(number)

    def _blocks(self, ids: Ids, shared: Tree) -> Iterator[tuple[Clients, Tree]]:
        """Yield the clients' rows by blocks, with their personal state."""
        return self._with_state(self._cut(ids), shared)

    def _with_state(
        self, blocks: Iterable[Clients], shared: Tree
    ) -> Iterator[tuple[Clients, Tree]]:
        first = partial(self.plan.method.init_client_state, shared, self.data.spec)
        for block in blocks:
            taken = block.ahead.pop(_STATE, None)
            yield block, self.store.take(block.ids.numpy(), first) if taken is None else taken

    def _cut(self, ids: Ids) -> Iterator[Clients]:
        """Yield the clients' rows by blocks."""
        method = self.plan.method
        # Where everybody has a row of the shared tree, a client works on its own row only.
        rows = method.shape is Shape.ROWS
        like = method.contribution(self.data.spec) if rows else self.shared
        return self.data.blocks(ids, self.speed.clients(like), self.owned)

    def _cohort(self, number: int) -> tuple[Ids, float | None]:
        entropy = open_entropy(self.plan.simulation_seed, "cohort", number)
        cohort = self.plan.sampler.draw(self.data.spec.clients, entropy, number)
        if self.clock is None:
            return cohort, None
        timed = self.clock.round(number)
        # A late client discards its update, so others see no difference to a client not sampled.
        return np.intersect1d(cohort, timed.answered), timed.next_broadcast

    def _personalise(self) -> Store:
        """Return every client's model, sampled or not."""
        models: Store | None = None
        for ids, rows in self._models_of_ranks():
            if models is None:
                template = {name: row[:1] for name, row in rows.items()}
                models = self._open_store("models", template)
            models.put(ids, rows)
        if models is None:
            raise ValueError("there are no clients to make models for")
        models.flush()
        return models

    def _models_of_ranks(self) -> Iterator[tuple[Ids, Tree]]:
        yield from self._models()
        for rank in range(1, self.ranks.size):
            ids, found = self.ranks.receive(rank)
            while ids is not None:
                yield ids, found
                ids, found = self.ranks.receive(rank)
            self._errors = (self._errors + found)[:_ERRORS]

    def _models(self) -> Iterator[tuple[Ids, Tree]]:
        """Yield the models of this rank's clients; baselines have all rows in one place."""
        method, shared = self.plan.method, to(self.shared, self.speed.device)
        stream, blocks = self.rng.at("personalise"), self._blocks(self._everyone, shared)
        if method.shape is Shape.POOLED:
            self.billboard.ledger.charge(0)
            stream, blocks = Rng.seeded(0), iter([(self.data.clients(self._everyone), {})])
        for block, personal in blocks:
            with computed_in(self.speed.precision):
                if method.shape is Shape.POOLED:
                    rows = method.personalise(shared, personal, block, stream)
                else:
                    rows, errors = personal_models(method, shared, personal, block, stream)
                    self._errors = (self._errors + errors)[:_ERRORS]
            yield block.ids.numpy(), rows

    @property
    def _nobody(self) -> tuple[Ids, float | None]:
        return np.empty(0, dtype=np.int64), None

    @property
    def _everyone(self) -> Ids:
        return np.arange(self.data.spec.clients, dtype=np.int64)

    def _is_solved(self, number: int) -> bool:
        """Return whether the gap is small; computed now and then, since it costs an epoch."""
        if self.duality is None or number < self._next_look:
            return False
        self._next_look = number + 1 + number // 10
        if number == 0 or self._gap(self.duality) > self.duality.stop_gap:
            return False
        self._ended = number
        return True

    def _has_diverged(self, number: int) -> bool:
        """Return whether published steps have diverged: more of them would only overflow."""
        if self.diverged is None or not self.diverged(self.shared):
            return False
        self._ended = number
        return True

    def _gap(self, duality: Duality) -> float:
        """Return the relative duality gap of all clients together. Not private."""
        shared = to(self.shared, self.speed.device)
        parts = torch.zeros(2, dtype=torch.float64)
        for block, personal in self._blocks(self._everyone, shared):
            parts += duality.certify(shared, personal, block).double().sum(dim=0).cpu()
        found, gap = self.ranks.share(self.ranks.add({"parts": parts})["parts"]).tolist()
        primal = duality.shared_cost(self.shared) + found
        return float(gap / primal if primal > 0 else gap)

    def _outcome(self, models: Store, gap: float | None, started: float, rounds: float) -> Outcome:
        return Outcome(
            plan=self.plan,
            spec=self.data.spec,
            shared=to(self.shared, "cpu"),
            models=models,
            billboard=self.billboard,
            guarantee=replace(
                self.plan.guarantee(self.data.spec.clients, self._ended), assumed=self.data.assumed
            ),
            timing=Timing(rounds, time.perf_counter() - started),
            gap=gap,
            names=self.data.names,
            zeroed=int(self._zeroed),
            errors=self._errors,
        )

    def _recover(self) -> int:
        """Bring shared tree and personal state up to date; return the next round."""
        ledger, started = self.billboard.ledger, bool(self.store.started.any())
        released, is_charged = self.ranks.share((self.billboard.next, bool(ledger.charged)))
        if started and not is_charged and self.folder is not None:
            raise LedgerError(
                f"{self.folder}: personal state is here, but the ledger is empty: there may be "
                "releases that it does not count; start a new run in a new folder"
            )
        if released and self.store.is_new and self.folder is not None:
            raise LedgerError(
                f"{self.folder}: the personal state of the published rounds is missing; "
                "restore the folder, or start a new run"
            )
        for post in self.billboard.posts:
            self.shared = self.plan.method.server_update(self.shared, post)
        self.shared = self.ranks.share(self.shared)
        self.store.recover(released)
        noted = None if self.folder is None else self.folder / "personal" / "zeroed.json"
        if noted is not None and noted.exists() and noted.read_text().isdecimal():
            self._noted = int(noted.read_text())
            self._zeroed = self._zeroed + self._noted
        return released

    def _note_zeroed(self) -> None:
        """Keep the count over a crash; it is as private as the personal state."""
        if self.folder is None or int(self._zeroed) == self._noted:
            return
        self._noted = int(self._zeroed)
        write_atomically(self.folder / "personal" / "zeroed.json", str(self._noted).encode())

    def _progress(self, number: int, answered: int | None, seconds: float | None) -> Progress:
        return Progress(number + 1, self.plan.posts, self.shared, self.store, answered, seconds)

    def _last_progress(self, number: int) -> Progress:
        """Return the progress after a round of a resumed run; its cohort is known from a seed."""
        if self.plan.simulation_seed is None:
            return self._progress(number, None, None)
        cohort, seconds = self._cohort(number)
        return self._progress(number, len(cohort), seconds)

    def _open_personal(self) -> Store:
        """Open the personal state of this rank's clients; rank 0 first lays it out for all."""
        if self.folder is not None and self.ranks.is_first:
            personal, ranges = self.folder / "personal", self.ranks.ranges(self.data.spec.clients)
            arrange(personal, ranges, self._personal_at, self.billboard.next)
        self.ranks.wait()
        place = self.folder and self.folder / "personal"
        if place is not None and self.ranks.size > 1:
            place = folder_of(place, self.owned)
        return self._personal_at(place, self.owned)

    def _personal_at(self, place: Path | None, owned: range) -> Store:
        template = self.plan.method.init_client_state(self.shared, self.data.spec, 1)
        return self._store_at(place, template, owned, per_row_leaves(template))

    def _open_store(self, name: str, template: Tree) -> Store:
        place = None if self.folder is None else self.folder / name
        return self._store_at(place, template, range(self.data.spec.clients))

    def _store_at(
        self, place: Path | None, template: Tree, owned: range, per_row: Sequence[str] = ()
    ) -> Store:
        in_memory = place is None and self.speed.store == "memory"
        scratch = None if place or in_memory else Path(tempfile.mkdtemp(prefix="coterie-"))
        store = Store(
            template,
            len(owned),
            place or scratch,
            self.speed.device,
            per_row=per_row,
            offsets=self.data.offsets[owned.start : owned.stop + 1],
            first=owned.start,
        )
        if scratch is not None:
            weakref.finalize(store, shutil.rmtree, scratch, ignore_errors=True)
        return store
