"""The in-process engine: all clients here, vectorised in blocks, on the CPU or a GPU.

Block size, device and store are settings of speed: they never touch the guarantee, and results
agree over block sizes to float tolerance (sums of contributions agree exactly: see `mechanisms`).
"""

import math
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from coterie.data.federated import FederatedDataset, Spec
from coterie.engines.clock import Clock, Stragglers
from coterie.engines.outcome import Observer, Outcome, Progress
from coterie.engines.rounds import RoundState, Timing, clients_work, server_half
from coterie.engines.store import Ids, Store
from coterie.interrupts import raise_if_asked
from coterie.methods.base import Shape
from coterie.plan import Plan
from coterie.privacy.billboard import Billboard, Bounded
from coterie.privacy.entropy import open_entropy
from coterie.privacy.files import write_atomically
from coterie.privacy.ledger import LedgerError
from coterie.rng import Rng
from coterie.solvers.sgd import Precision, computed_in
from coterie.tree import Tree, size, to


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Settings that change how fast a run is and nothing else.

    Attributes:
        block: Clients computed side by side; 0 chooses by the model's size.
        device: "cpu" or "cuda".
        store: "memory", or "disk" to keep personal models memory-mapped, so that clients x
            parameters may exceed memory.
        precision: Of the products in local steps of networks: "float32" or "bfloat16" (mixed).
    """

    block: int = 0
    device: str = "cpu"
    store: Literal["memory", "disk"] = "memory"
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.block < 0:
            raise ValueError(f"block = {self.block}: expected a number of clients, or 0 to choose")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device = {self.device!r}: expected 'cpu' or 'cuda'")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device = {self.device!r}: no CUDA device is available; use 'cpu'")

    def clients(self, tree: Tree) -> int:
        """Return the block size for clients with such a tree."""
        row = 32.0 * max(size(tree), 1)  # bytes: float64 copies of a contribution
        if self.device != "cpu":
            return self.block or int(np.clip(8e9 / row, 1, 16384))
        # Blocks that stay in a core's cache, but never so few clients that threads run dry, unless
        # memory asks for it.
        return self.block or int(np.clip(16e6 / row, max(1.0, min(64.0, 1e9 / row)), 4096))


def simulate(
    plan: Plan,
    data: FederatedDataset,
    *,
    observe: Observer | None = None,
    folder: Path | None = None,
    speed: Speed | None = None,
    stragglers: Stragglers | None = None,
    recovered: Observer | None = None,
) -> Outcome:
    """Run a plan on clients held in this process.

    Args:
        plan: What to do and what to spend.
        data: Training rows.
        observe: Called after every round.
        folder: Where to keep ledger, posts and personal state; a run with a folder survives a
            crash and goes on where it stood when called again with the same plan and data.
        speed: Block size, device, store.
        stragglers: How long clients take on a virtual clock, and how long they are waited for;
            those who are late contribute nothing to the round. None for no clock.
        recovered: Shown the last round that is out of a run that goes on, before the next one.
    """
    return _Simulation(plan, data, folder, speed or Speed(), stragglers).run(observe, recovered)


def set_clock(stragglers: Stragglers, plan: Plan, data: FederatedDataset) -> Clock:
    """Set the virtual clock of a run; the same one when the run goes on after a crash.

    Raises:
        ValueError: If a run with a budget would wait by times that clients report: these follow
            from how many rows they have, and no event pays for that.
    """
    if stragglers.wait_is_reported and plan.privacy.epsilon != math.inf:
        raise ValueError(
            f"stragglers.wait = {stragglers.wait!r} follows from times that clients report, which "
            "epsilon does not cover: give seconds, or run with epsilon = inf"
        )
    if plan.shows_cohort(len(data)) and plan.privacy.epsilon != math.inf:
        raise ValueError(
            "stragglers under a visible cohort: who is late follows from how many rows a client "
            "has, and everybody would see it; hide the cohort, or run with epsilon = inf"
        )
    rng = Rng.seeded(plan.simulation_seed or 0).at("clock")
    return stragglers.clock(data.counts, data.spec.features, rng, plan.method.passes)


class _Simulation:
    """One run: the state that lives between rounds."""

    def __init__(
        self,
        plan: Plan,
        data: FederatedDataset,
        folder: Path | None,
        speed: Speed,
        stragglers: Stragglers | None,
    ) -> None:
        self.plan, self.speed, self.folder = plan, speed, folder
        self.data = data if speed.device == "cpu" else data.to(speed.device)
        seed = plan.simulation_seed
        self.rng = Rng.fresh() if seed is None else Rng.seeded(seed)
        # The start is public: it comes from the specification and a fixed stream.
        self.data.forget()
        plan.method.check(data.spec)
        plan.method.check_cohort(plan.sampler.largest(data.spec.clients), data.spec)
        plan.method.check_data(data)
        self.clock = None if stragglers is None else set_clock(stragglers, plan, data)
        self.shared = plan.method.init(data.spec, Rng.seeded(seed or 0).at("init"))
        self.billboard = plan.open(data.spec, self.shared, folder)
        self._ended: int | None = None
        self._noted = 0
        self._zeroed = torch.zeros((), dtype=torch.int64, device=speed.device)
        self._next_look = 0
        try:
            self.store = self._open_store("personal")
        except BaseException:
            self.billboard.ledger.close()
            raise

    def run(self, observe: Observer | None, recovered: Observer | None = None) -> Outcome:
        """Do the rounds that are still to do, then personalise."""
        started = time.perf_counter()
        try:
            self._recover()
            if recovered is not None and self.billboard.next:
                recovered(self._last_progress(self.billboard.next - 1))
            if self.plan.method.shape is Shape.POOLED:
                return self._outcome(self._pool(), started, 0.0)
            for number in range(self.billboard.next, self.plan.posts):
                raise_if_asked()
                if self._is_solved(number):
                    break
                answered, seconds = self._round(number, self.billboard)
                if observe is not None:
                    done = Progress(
                        number + 1, self.plan.posts, self.shared, self.store, answered, seconds
                    )
                    observe(done)
            rounds = time.perf_counter() - started
            models = self._personalise()
            return self._outcome(models, started, rounds)
        finally:
            self.billboard.ledger.close()

    def _outcome(self, models: Store, started: float, rounds: float) -> Outcome:
        return Outcome(
            plan=self.plan,
            spec=self.data.spec,
            shared=self.shared,
            models=models,
            billboard=self.billboard,
            guarantee=replace(
                self.plan.guarantee(self.data.spec.clients, self._ended), assumed=self.data.assumed
            ),
            timing=Timing(rounds, time.perf_counter() - started),
            gap=self._gap() if self._stops else None,
            names=self.data.names,
            zeroed=int(self._zeroed),
        )

    @property
    def _stops(self) -> bool:
        """Whether this run may end by its duality gap, which is private data."""
        return self.plan.method.stop_gap is not None and self.plan.privacy.epsilon == math.inf

    def _is_solved(self, number: int) -> bool:
        """Look at the gap now and then: a look costs about as much as an epoch."""
        gap = self.plan.method.stop_gap
        if not self._stops or gap is None or number < self._next_look:
            return False
        self._next_look = number + 1 + number // 10
        if number == 0 or self._gap() > gap:
            return False
        self._ended = number
        return True

    def _gap(self) -> float:
        """Return the relative duality gap of all clients together. Not private."""
        method, shared = self.plan.method, to(self.shared, self.speed.device)
        primal, gap = method.shared_cost(self.shared), 0.0
        everyone = np.arange(self.data.spec.clients, dtype=np.int64)
        for block in self.data.blocks(everyone, self.speed.clients(self.shared)):
            personal = self.store.take(block.ids.numpy(), self._enrol(shared))
            parts = method.certify(shared, personal, block).double().sum(dim=0)
            primal, gap = primal + float(parts[0]), gap + float(parts[1])
        return gap / primal if primal > 0 else gap

    def _pool(self) -> Store:
        """Fit all clients with their rows in one place: a reference, and never private."""
        self.billboard.ledger.charge(0)
        everyone = np.arange(self.data.spec.clients, dtype=np.int64)
        rows = self.plan.method.fit_all(self.data.clients(everyone))
        models = self._open_store("models", {name: row[:1] for name, row in rows.items()})
        models.put(everyone, rows)
        models.flush()
        return models

    def _recover(self) -> None:
        ledger, started = self.billboard.ledger, bool(self.store.started.any())
        if started and not ledger.charged and self.folder is not None:
            raise LedgerError(
                f"{self.folder}: personal state is here, but the ledger is empty: posts may be out "
                "that it does not count; start a new run in a new folder"
            )
        if ledger.released and self.store.is_new and self.folder is not None:
            raise LedgerError(
                f"{self.folder}: posts are out, but the personal state is gone; "
                "restore the folder, or start a new run"
            )
        for post in self.billboard.posts:
            self.shared = self.plan.method.server_update(self.shared, post)
        self.store.recover(self.billboard.next)
        noted = None if self.folder is None else self.folder / "personal" / "zeroed.json"
        if noted is not None and noted.exists() and noted.read_text().isdecimal():
            self._noted = int(noted.read_text())
            self._zeroed = self._zeroed + self._noted

    def _last_progress(self, number: int) -> Progress:
        """Return what an observer was shown after a round; without a seed nobody knows its cohort."""
        answered, seconds = None, None
        if self.plan.simulation_seed is not None:
            cohort, seconds = self._cohort(number)
            answered = len(cohort)
        return Progress(number + 1, self.plan.posts, self.shared, self.store, answered, seconds)

    def _cohort(self, number: int) -> tuple[Ids, float | None]:
        entropy = open_entropy(self.plan.simulation_seed, "cohort", number)
        cohort = self.plan.sampler.draw(self.data.spec.clients, entropy)
        if self.clock is None:
            return cohort, None
        timed = self.clock.round(number)
        # Whoever is late throws its steps away: for others it is as if it had taken none.
        return np.intersect1d(cohort, timed.answered), timed.next_broadcast

    def _round(self, number: int, billboard: Billboard) -> tuple[int, float | None]:
        cohort, seconds = self._cohort(number)
        self.shared, _ = server_half(
            self.plan.method, billboard, self.shared, self._parts(number, cohort)
        )
        self.store.commit()
        self._note_zeroed()
        return len(cohort), seconds

    def _note_zeroed(self) -> None:
        """Keep the count over a crash; as private as the personal state that it lies beside."""
        if self.folder is None or int(self._zeroed) == self._noted:
            return
        self._noted = int(self._zeroed)
        write_atomically(self.folder / "personal" / "zeroed.json", str(self._noted).encode())

    def _parts(self, number: int, cohort: Ids) -> Iterator[Bounded]:
        """Compute the cohort by blocks; new personal rows are staged before the post exists."""
        shared = to(self.shared, self.speed.device)
        mechanism = self.billboard.mechanism(number)
        state = RoundState(
            self.plan.method,
            mechanism,
            shared,
            self.rng,
            number,
            self.plan.simulation_seed,
            self.speed.precision,
        )
        self.store.discard()
        for block in self.data.blocks(cohort, self.speed.clients(self.shared)):
            ids = block.ids.numpy()
            before = self.store.take(ids, self._enrol(shared))
            part, after, failed = clients_work(state, before, block)
            self._zeroed = self._zeroed + failed.sum().to(self._zeroed.device)
            self.store.stage(ids, after)
            yield part
        self.store.seal(number)

    def _personalise(self) -> Store:
        """Make every client's model, drawn or not."""
        method, spec = self.plan.method, self.data.spec
        shared = to(self.shared, self.speed.device)
        coins = self.rng.at("personalise")
        models: Store | None = None
        everyone = np.arange(spec.clients, dtype=np.int64)
        for block in self.data.blocks(everyone, self.speed.clients(self.shared)):
            ids = block.ids.numpy()
            personal = self.store.take(ids, self._enrol(shared))
            with computed_in(self.speed.precision):
                rows = method.personalise(shared, personal, block, coins)
            if models is None:
                models = self._open_store("models", {name: row[:1] for name, row in rows.items()})
            models.put(ids, rows)
        if models is None:
            raise ValueError("there are no clients to make models for")
        models.flush()
        return models

    def _enrol(self, shared: Tree) -> "_Enrol":
        return _Enrol(self.plan, shared, self.data.spec)

    def _open_store(self, name: str, template: Tree | None = None) -> Store:
        per_row: tuple[str, ...] = ()
        if template is None:
            template = self.plan.method.enrol(self.shared, self.data.spec, 1)
            per_row = self.plan.method.per_row
        place = None if self.folder is None else self.folder / name
        in_memory = place is None and self.speed.store == "memory"
        scratch = None if place or in_memory else Path(tempfile.mkdtemp(prefix="coterie-"))
        store = Store(
            template,
            self.data.spec.clients,
            place or scratch,
            self.speed.device,
            per_row=per_row,
            offsets=self.data.offsets,
        )
        if scratch is None:
            return store
        weakref.finalize(store, shutil.rmtree, scratch, ignore_errors=True)
        return store


@dataclass(frozen=True)
class _Enrol:
    """Makes the first personal state of clients from the shared tree of the round."""

    plan: Plan
    shared: Tree
    spec: Spec

    def __call__(self, count: int) -> Tree:
        return self.plan.method.enrol(self.shared, self.spec, count)
