"""Progress of a run on stderr: rounds, loss and epsilon so far."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba.core.event import Listener, register, unregister

from coterie.cli.options import progress_bar
from coterie.data.federated import FederatedDataset
from coterie.data.inspect import READ_OFF
from coterie.data.scaling import scaling_hint
from coterie.engine.simulate import Observer, Progress, set_clock
from coterie.evaluation.baselines import TITLES
from coterie.evaluation.score import mean_loss
from coterie.methods.base import Shape
from coterie.planning.plan import Plan
from coterie.planning.rules import advice_for
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import round_up

_PATIENCE = 2.0
_COMPILING = "compiling solvers, once on this machine (about 6 s) ..."
_WATCHED_CLIENTS = 200
_MARKS = 8


class Watch:
    """An observer of rounds that shows a progress bar.

    `shown` has the verdict, the reason for auto and the notes on settings that were printed.
    """

    def __init__(self, *, quiet: bool, brief: bool = False) -> None:
        self._quiet, self._brief = quiet, brief
        self._bar: Any = None
        self.shown: set[str] = set()
        self._compiling = _Compiling(self._print)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            unregister("numba:compile", self._compiling)  # type: ignore[no-untyped-call]
            self._bar.stop()
            self._bar = None

    def open(self, plan: Plan, data: FederatedDataset) -> Observer:
        """Start the bar of a run."""
        if self._quiet:
            return lambda progress: None
        for line in _verdict(plan, data, brief=self._brief):
            self.shown.add(line)
            print(line, file=sys.stderr)
        for line in _settings(plan, data):
            self.shown.add(line)
            print(line, file=sys.stderr)
        for hint in _hints(plan, data):
            print(f"hint: {hint}", file=sys.stderr)
        self._plan, self._data = plan, data
        self._seen, self._loss = 0.0, math.nan
        ids = np.arange(data.spec.clients)
        self._ids = ids[:: max(1, len(ids) // _WATCHED_CLIENTS)].astype(np.int64)
        self._marks = self._spend()
        self._bar = progress_bar()
        register("numba:compile", self._compiling)  # type: ignore[no-untyped-call]
        self._task = self._bar.add_task(plan.method.kind, total=plan.posts, visible=plan.posts > 0)
        return self

    def __call__(self, progress: Progress) -> None:
        """Show a round."""
        if self._bar is None:
            return
        last = progress.round == progress.rounds
        if last or time.monotonic() - self._seen > 1.0:
            models = progress.models(self._plan.method, self._data)
            ids = progress.store.kept(self._ids)
            self._loss = mean_loss(self._plan.method.model, models, self._data, ids)
            self._seen = time.monotonic()
        spent = next(e for mark, e in self._marks if mark >= progress.round)
        text = f"{self._plan.method.kind}  loss {self._loss:.4g}"
        text += f"  epsilon so far <= {round_up(spent, 3)}"
        if self._plan.simulation_seed is not None:
            text = f"SIMULATION  {text}"
        self._bar.update(self._task, completed=progress.round, description=text)

    def scoring(self, plan: Plan) -> None:
        """Print what is computed after the last round."""
        named = _baseline_names(plan)
        if named and not self._quiet:
            self._print(f"scoring {named} ...")

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr)
        else:  # above the bar
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _spend(self) -> list[tuple[int, float]]:
        """Return epsilon after some of the rounds; the next mark is an upper bound."""
        posts, clients = self._plan.posts, self._data.spec.clients
        marks = sorted({math.ceil(posts * part / _MARKS) for part in range(1, _MARKS + 1)} - {0})
        guarantee = self._plan.guarantee(clients)
        spent = epsilon_by_round(
            guarantee.events, guarantee.participation, guarantee.relation, guarantee.delta, marks
        )
        return list(zip(marks, spent, strict=True))


class _Compiling(Listener):
    """Prints once that solvers are being compiled, if this takes longer than 2 s in total.

    Compiled solvers are cached on disk, so the next run does not compile.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._depth, self._since, self._spent = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None

    def on_start(self, event: Any) -> None:
        """Start the timer; compiling one solver may compile others."""
        self._depth += 1
        if self._depth > 1 or self._spent > _PATIENCE:
            return
        self._since = time.monotonic()
        self._timer = threading.Timer(_PATIENCE - self._spent, self._show, (_COMPILING,))
        self._timer.daemon = True
        self._timer.start()

    def on_end(self, event: Any) -> None:
        """Stop the timer."""
        self._depth -= 1
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._spent += time.monotonic() - self._since


def _verdict(plan: Plan, data: FederatedDataset, *, brief: bool) -> Iterator[str]:
    """Yield whether joining pays; `brief` leaves out what would change it."""
    advice = advice_for(plan, data.spec)
    if advice is not None:
        yield verdict_line(advice.verdict, advice.reason)
        yield from () if brief else (f"  {remedy}" for remedy in advice.remedies)
    if plan.chosen and not brief:
        yield chosen_line(plan.chosen)


def verdict_line(verdict: str, reason: str) -> str:
    """Return the verdict before a run, as text."""
    return f"Verdict: {verdict}. {reason}"


def chosen_line(chosen: str) -> str:
    """Return which method auto chose and why, as text."""
    return f"Auto chose {chosen.removesuffix('.')}."


def _baseline_names(plan: Plan) -> str:
    """Return the names of the baselines and held-out clients to score, which take time."""
    skip = not plan.compare_with_local or plan.method.shape is Shape.NONE
    names = [TITLES[name] for name in plan.baselines if not (skip and name == "local")]
    held_out = ["held-out clients"] if plan.newcomers is not None else []
    return ", ".join([*names, *held_out])


def _settings(plan: Plan, data: FederatedDataset) -> Iterator[str]:
    """Yield notes on the settings of a plan with a budget."""
    if plan.privacy.epsilon != math.inf:
        rounds, clip = plan.rounds or 1, plan.clip(data.spec.clients)
        yield from plan.method.notes(rounds=rounds, clip=clip).settings


def _hints(plan: Plan, data: FederatedDataset) -> Iterator[str]:
    """Yield hints for the data's owner, before anything is spent."""
    if (scaled := scaling_hint(data)) is not None:
        yield scaled
    read = [note.removesuffix(READ_OFF) for note in data.assumed if note.endswith(READ_OFF)]
    if read:
        yield f"{data.title}: assumed to be public, and read off the rows: {'; '.join(read)}"
    yield from (f"{data.title}: {note}" for note in data.assumed if not note.endswith(READ_OFF))
    yield from plan.method.notes(data=data).data
    yield from plan.method.notes(private=plan.private).caveats
    if plan.stragglers is not None:
        note = set_clock(plan.stragglers, plan, data).note()
        if note is not None:
            pure = "few clients, or none, may answer in time: a release may be pure noise"
            yield pure if plan.private else note
