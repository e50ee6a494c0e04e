"""A worker of a comparison: a process of one thread that imports torch once and runs many cells.

It is told the number of a cell on a line of its standard input, runs it in the cell's own folder,
and answers with a line of JSON on what was its standard output. When the input ends, whoever dealt
the cells is gone, and so is the worker, in the middle of whatever it does: a run folder bears it.
"""

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coterie.comparison.cells import Cell, Selection
from coterie.comparison.plan import Comparison, make_comparison
from coterie.core.config import read_toml, to_table, to_toml
from coterie.core.environment import go_offline, is_offline
from coterie.core.files import write_atomically
from coterie.core.signals import as_interrupt, stoppable
from coterie.plan.plan import Plan
from coterie.privacy.ledger import LedgerError
from coterie.run.run import execute
from coterie.search import Range
from coterie.selection import select
from coterie.tuning import tune

_TRIES = 5
PLAN = "compare.toml"
"""The file of a comparison's folder that says it all."""


@dataclass(frozen=True)
class Ended:
    """How a cell ended: "done", "refused" (the data or plan do not fit) or "failed", and why."""

    status: str
    why: str = ""
    seconds: float = 0.0


def read_comparison(folder: Path) -> Comparison:
    """Read the comparison that a folder holds."""
    return make_comparison(read_toml(folder / PLAN))


def run_of(place: Path) -> Path:
    """Return the run that a cell is scored by: its own, or the one that was chosen privately."""
    record = selection_of(place)
    return place if record is None else place / str(record["chosen"])


def selection_of(place: Path) -> dict[str, Any] | None:
    """Read the record of a private selection that is finished; None where there is none."""
    path = place / "selection.json"
    record: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return record if record.get("finished") else None


def is_done(place: Path) -> bool:
    """Return whether a cell needs no more work."""
    return (run_of(place) / "result.json").exists()


def run_cell(cell: Cell, folder: Path, selection: Selection) -> Ended:
    """Run one cell, or go on with it; whatever goes wrong is its own."""
    started = time.perf_counter()
    place = folder / cell.place
    try:
        if not is_done(place):
            _run(cell, folder, selection)
    except (ValueError, NotImplementedError) as error:
        # A folder is claimed when the plan fits the data: before that, it does not.
        claimed = (place / "plan.toml").exists() or (place / "selection.json").exists()
        status = "failed" if claimed else "refused"
        return Ended(status, _said(error), time.perf_counter() - started)
    except Exception as error:  # a cell's failure must not lose the others
        return Ended("failed", f"{type(error).__name__}: {_said(error)}")
    return Ended("done", seconds=time.perf_counter() - started)


def _run(cell: Cell, folder: Path, selection: Selection) -> None:
    place = folder / cell.place
    paid = selection.charge and cell.epsilon is not None and cell.epsilon < math.inf
    if paid and cell.grid:
        choose = partial(select, folder=place, public=selection.public)
        _patiently(partial(choose, cell.table, _choices(cell.grid)))
        return
    plan = _chosen(cell, folder, selection)
    _patiently(partial(execute, plan, folder=place))


def _choices(grid: Mapping[str, Any]) -> dict[str, Any]:
    """Read ranges, which a plan writes as "0.01..10"."""
    found: dict[str, Any] = {}
    for key, values in grid.items():
        ends = values.split("..") if isinstance(values, str) else ()
        found[key] = Range(*map(_end, ends)) if len(ends) == 2 else values
    return found


def _end(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _patiently(work: Callable[[], object]) -> None:
    """Do work in a folder that a worker of a killed comparison may hold for a moment."""
    for left in reversed(range(_TRIES)):
        try:
            work()
            return
        except LedgerError:
            if not left:
                raise
            time.sleep(1.0)


def _chosen(cell: Cell, folder: Path, selection: Selection) -> Plan:
    """Return a cell's plan; settings are chosen once, and kept beside the runs."""
    place = folder / cell.place
    if (place / "plan.toml").exists():
        return Plan.load(place / "plan.toml")
    if not cell.grid:
        return Plan.from_table(cell.table)
    kept = folder / f"{cell.place.replace('runs/', 'tuned/', 1)}.toml"
    if kept.exists():
        return Plan.load(kept)
    options: dict[str, Any] = {}
    if selection.search != "grid":
        options = {"search": selection.search, "trials": selection.trials}
    found = tune(
        cell.table,
        _choices(cell.grid),
        folds=selection.folds,
        seed=cell.seed,
        public=selection.public,
        **options,
    )
    # What rules fill in is filled in again by the run: the plan as asked for is kept.
    plan = replace(found.plan, simulation_seed=cell.table.get("simulation_seed"))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, to_toml(to_table(plan)).encode())
    return plan


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def serve(folder: Path) -> None:
    """Run cells as they are dealt, until told to stop."""
    comparison = read_comparison(folder)
    cells = comparison.cells()
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    dealt: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(dealt,), daemon=True).start()
    _answer(answers, {"ready": os.getpid()})
    with stoppable(lambda: "stopped"), as_interrupt():
        while (number := dealt.get()) is not None:
            ended = run_cell(cells[number], folder, comparison.selection)
            _answer(answers, {"cell": number, **asdict(ended)})


def _listen(dealt: "queue.SimpleQueue[int | None]") -> None:
    for line in sys.stdin:
        dealt.put(None if line.strip() == "stop" else int(line))
    os._exit(3)  # nobody is left to answer to


def _answer(answers: Any, told: Mapping[str, Any]) -> None:
    answers.write(json.dumps(told) + "\n")
    answers.flush()


def main() -> None:
    """Run as `python -m coterie.comparison.worker FOLDER`."""
    if is_offline():
        go_offline()
    try:
        serve(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
