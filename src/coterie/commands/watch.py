"""Watching a run: rounds, loss and epsilon so far, on stderr. It watches, and steers nothing."""

import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba.core.event import Listener, register, unregister
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coterie.data.federated import FederatedDataset
from coterie.data.scaling import scaling_hint
from coterie.engines.outcome import Progress as RoundProgress
from coterie.engines.simulate import set_clock
from coterie.evaluation.baselines import TITLES
from coterie.evaluation.score import mean_loss
from coterie.methods.base import Shape
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.words import round_up
from coterie.run_plan import RunPlan, advice_of

_PATIENCE = 2.0
_COMPILING = "compiling solvers, once on this machine (about 20 s) ..."
_WATCHED_CLIENTS = 200
_MARKS = 8


class Watch:
    """A progress bar that an engine may call after every round."""

    def __init__(self, *, quiet: bool, brief: bool = False) -> None:
        self._quiet = quiet
        self._brief = brief
        self._bar: Progress | None = None
        self._compiling = _Compiling(self._say)

    def open(self, run_plan: RunPlan, data: FederatedDataset) -> "Watch | _Silent":
        """Get ready for a run."""
        if self._quiet:
            return _Silent()
        for line in _verdict(run_plan, data, brief=self._brief):
            print(line, file=sys.stderr)
        for hint in _hints(run_plan, data):
            print(f"hint: {hint}", file=sys.stderr)
        self._plan = run_plan.plan()
        self._data = data
        self._seen = 0.0
        self._loss = math.nan
        ids = np.arange(data.spec.clients)
        self._ids = ids[:: max(1, len(ids) // _WATCHED_CLIENTS)].astype(np.int64)
        self._marks = self._spend()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        register("numba:compile", self._compiling)  # type: ignore[no-untyped-call]
        self._task = self._bar.add_task(self._plan.method.kind, total=self._plan.posts)
        return self

    def __call__(self, progress: RoundProgress) -> None:
        """Show a round."""
        if self._bar is None:
            return
        last = progress.round == progress.rounds
        if last or time.monotonic() - self._seen > 1.0:
            self._loss = self._measure(progress)
            self._seen = time.monotonic()
        spent = next(e for mark, e in self._marks if mark >= progress.round)
        told = f"{self._plan.method.kind}  loss {self._loss:.4g}"
        told += f"  epsilon so far <= {round_up(spent, 3)}"
        if self._plan.simulation_seed is not None:
            told = f"SIMULATION  {told}"
        self._bar.update(self._task, completed=progress.round, description=told)

    def scoring(self, run_plan: RunPlan) -> None:
        """Say what is computed when the rounds are done."""
        named = _beside(run_plan)
        if named and not self._quiet:
            self._say(f"scoring baselines: {named} ...")

    def _say(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr)
        else:  # above the bar, which stays
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            unregister("numba:compile", self._compiling)  # type: ignore[no-untyped-call]
            self._bar.stop()
            self._bar = None

    def _spend(self) -> list[tuple[int, float]]:
        """Epsilon after some of the rounds; shown is the next mark's, an upper bound."""
        posts, clients = self._plan.posts, self._data.spec.clients
        marks = sorted({math.ceil(posts * part / _MARKS) for part in range(1, _MARKS + 1)} - {0})
        guarantee = self._plan.guarantee(clients)
        spent = epsilon_by_round(
            guarantee.events, guarantee.participation, guarantee.relation, guarantee.delta, marks
        )
        return list(zip(marks, spent, strict=True))

    def _measure(self, progress: RoundProgress) -> float:
        models = progress.models(self._plan.method, self._data)
        return mean_loss(self._plan.method.model, models, self._data, self._ids)


class _Compiling(Listener):
    """Hears of solvers that are compiled, and says so once if that takes longer than 2 s in all.

    A compiled solver is kept on disk: the next run finds it there, and nothing is to be heard.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._depth, self._since, self._spent = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None

    def on_start(self, event: Any) -> None:
        """Start to wait; a solver may have others compiled for it."""
        self._depth += 1
        if self._depth > 1 or self._spent > _PATIENCE:
            return
        self._since = time.monotonic()
        self._timer = threading.Timer(_PATIENCE - self._spent, self._say, (_COMPILING,))
        self._timer.daemon = True
        self._timer.start()

    def on_end(self, event: Any) -> None:
        """Stop waiting."""
        self._depth -= 1
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._spent += time.monotonic() - self._since


def _verdict(run_plan: RunPlan, data: FederatedDataset, *, brief: bool) -> Iterator[str]:
    """Say first of all whether joining pays; in brief, one line without what would change it."""
    advice = advice_of(run_plan, data.spec)
    if advice is not None:
        yield f"verdict: {advice.told()}"
        yield from () if brief else (f"  {remedy}" for remedy in advice.remedies)
    if run_plan.chosen and not brief:
        yield f"auto: {run_plan.chosen}"


def _beside(run_plan: RunPlan) -> str:
    """Return the names of the baselines and held-out clients to score, which take time."""
    skip = not run_plan.compare_with_local or run_plan.method.shape is Shape.NONE
    names = [TITLES[name] for name in run_plan.baselines if not (skip and name == "local")]
    held_out = ["held-out clients"] if run_plan.newcomers is not None else []
    return ", ".join([*names, *held_out])


def _hints(run_plan: RunPlan, data: FederatedDataset) -> Iterator[str]:
    """Say what the data's owner should know before anything is spent."""
    scaled = scaling_hint(data)
    if scaled is not None:
        yield scaled
    yield from (f"{data.title}: {note}" for note in data.assumed)
    yield from run_plan.method.notices(data)
    if run_plan.privacy.epsilon != math.inf:
        rounds, clip = run_plan.rounds or 1, run_plan.plan().clip(data.spec.clients)
        yield from run_plan.method.explain(rounds, clip)
    yield from run_plan.method.caveats(run_plan.privacy.epsilon != math.inf)
    if run_plan.stragglers is not None:
        told = set_clock(run_plan.stragglers, run_plan.plan(), data).note()
        if told is not None and run_plan.privacy.epsilon != math.inf:
            told = "few clients, or none, may answer in time; their posts would be noise alone"
        if told is not None:
            yield told


@dataclasses.dataclass(frozen=True)
class _Silent:
    def __call__(self, progress: RoundProgress) -> None:
        """Show nothing."""
