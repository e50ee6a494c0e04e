"""Watching a run: rounds, loss and epsilon so far, on stderr. It watches, and steers nothing."""

import dataclasses
import math
import sys
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coterie.data.federated import FederatedDataset
from coterie.data.scaling import scaling_hint
from coterie.engines.outcome import Progress as RoundProgress
from coterie.engines.simulate import set_clock
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.words import round_up
from coterie.run import RunPlan, advice_of
from coterie.scores import mean_loss

_WATCHED_CLIENTS = 200
_MARKS = 8


class Watch:
    """A progress bar that an engine may call after every round."""

    def __init__(self, *, quiet: bool, brief: bool = False) -> None:
        self._quiet = quiet
        self._brief = brief
        self._bar: Progress | None = None

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

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
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


def _verdict(run_plan: RunPlan, data: FederatedDataset, *, brief: bool) -> Iterator[str]:
    """Say first of all whether joining pays; in brief, one line without what would change it."""
    advice = advice_of(run_plan, data.spec)
    if advice is not None:
        yield f"verdict: {advice.told()}"
        yield from () if brief else (f"  {remedy}" for remedy in advice.remedies)
    if run_plan.chosen and not brief:
        yield f"auto: {run_plan.chosen}"


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
