"""What `coterie compare` does: the comparison from flags, progress on stderr, the answer."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from coterie.commands.compare_words import as_json, frontier_table, legend, sentences, troubles
from coterie.commands.flags import literal, plan_table
from coterie.commands.tracked import tracked
from coterie.commands.tune import make_grid
from coterie.comparison.plan import Comparison, make_comparison
from coterie.comparison.results import find, rows_of, write_table
from coterie.comparison.running import State, carry_out, claim_folder, finished, read_comparison
from coterie.comparison.spending import Spent, spent_by
from coterie.comparison.worker import PLAN, Ended
from coterie.config import ConfigError
from coterie.interrupts import stop_status, stoppable
from coterie.report.page import write_report
from coterie.search import Range
from coterie.tracking import check_kinds

_RESUMING = (
    "resume", "workers", "json", "quiet", "no_report", "track", "track_dir", "offline", "command",
    "action",
)  # fmt: skip


def compare(arguments: argparse.Namespace) -> int:
    """Carry out `coterie compare`."""
    check_kinds(arguments.track)
    folder, comparison = _opened(arguments)
    if not arguments.quiet:
        for note in comparison.notes:
            print(f"note: {note}", file=sys.stderr)
    workers = comparison.workers if arguments.workers is None else arguments.workers
    if workers is not None and workers < 0:
        raise ConfigError(
            f"--workers {workers}: expected how many processes, or 0 for this one alone"
        )
    bar = _Bar(quiet=arguments.quiet)
    try:
        with stoppable(partial(_farewell, folder)):
            ended = carry_out(folder, workers=workers, observe=bar)
    except KeyboardInterrupt:
        bar.close()
        print(_farewell(folder), file=sys.stderr)
        return stop_status()
    finally:
        bar.close()
    status = _show(folder, comparison, ended, arguments)
    return tracked(finished(folder), arguments, group=folder) or status


def _farewell(folder: Path) -> str:
    """Say how a comparison that was interrupted goes on."""
    done, total = len(finished(folder)), len(read_comparison(folder).cells())
    told = f"interrupted; {done} of {total} runs are done and kept"
    return f"{told}; go on with: coterie compare --resume {folder}"


def _opened(arguments: argparse.Namespace) -> tuple[Path, Comparison]:
    """Claim a new folder, or go on with one."""
    if arguments.resume is not None:
        _refuse_with_resume(arguments)
        folder = Path(arguments.resume)
        if not (folder / PLAN).exists():
            raise ConfigError(f"{folder} holds no comparison ({PLAN} is missing); check --resume")
        return folder, read_comparison(folder)
    comparison = make_comparison(_table(arguments))
    folder = Path(arguments.out) if arguments.out else _new_folder(comparison)
    claim_folder(folder, comparison)
    return folder, comparison


def _table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lay flags over the TOML plan and its [compare]."""
    if arguments.finetune is not None:
        raise ConfigError(
            "--finetune is of one method: name it among [compare] methods, as {kind = "
            '"finetune", how = "mean", base = {kind = "fedavg"}}'
        )
    if arguments.method is not None and arguments.methods is not None:
        raise ConfigError(
            f"--method {arguments.method} and --methods {arguments.methods}: give --methods alone"
        )
    table = plan_table(arguments)
    if arguments.method is None and table["method"].get("kind") == "auto":
        del table["method"]["kind"]
    compare = table.setdefault("compare", {})
    if not isinstance(compare, dict):
        raise ConfigError(f"compare = {compare!r}: expected a table, such as [compare]")
    compare |= _flags(arguments)
    if arguments.repeats is not None:
        compare.pop("seeds", None)
    if arguments.seeds is not None:
        compare.pop("repeats", None)
    return table


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.seeds is not None and arguments.repeats is not None:
        raise ConfigError("--seeds and --repeats: give seeds for simulations, or repeats")
    given: dict[str, Any] = {
        "methods": arguments.methods and [name.strip() for name in arguments.methods.split(",")],
        "epsilons": arguments.epsilons
        and [literal(e.strip()) for e in arguments.epsilons.split(",")],
        "seeds": None if arguments.seeds is None else _seeds(arguments.seeds),
        "repeats": arguments.repeats,
        "search": arguments.search,
        "trials": arguments.trials,
        "folds": arguments.folds,
        "public": arguments.public or None,
        "charge": arguments.charge_tuning or None,
        "grid": _grid(arguments.grid) or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def _grid(texts: Sequence[str]) -> dict[str, Any]:
    """Read the grid; a range goes to the plan as it was written."""
    return {
        key: f"{values.low}..{values.high}" if isinstance(values, Range) else list(values)
        for key, values in make_grid(texts).items()
    }


def _seeds(text: str) -> Any:
    found = [literal(part.strip()) for part in text.split(",")]
    return found[0] if len(found) == 1 else found


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in _RESUMING and value is not None and value is not False and value != []
    ]
    if given:
        raise ConfigError(f"--resume goes on as it is; leave out {', '.join(given)}")


def _new_folder(comparison: Comparison) -> Path:
    stem = Path(comparison.base["data"]["name"]).stem.replace(":", "-")
    base = Path("runs") / f"compare-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def _show(
    folder: Path,
    comparison: Comparison,
    ended: dict[int, Ended],
    arguments: argparse.Namespace,
) -> int:
    """Write the table and the report, and say what came out."""
    rows = rows_of(comparison.cells(), ended, folder)
    table = write_table(folder, rows)
    done = finished(folder)
    failed = any(row["status"].startswith("failed") for row in rows)
    places = [folder / cell.place for cell in comparison.cells()]
    spent = spent_by(places) if comparison.real_noise else Spent()
    if not done:
        said = "" if spent == Spent() else f" {spent.told()}"
        raise ConfigError(f"no cell could be run; {next(troubles(rows))}.{said}")
    found = find(rows, folder)
    report = None if arguments.no_report else _report(done, folder, list(sentences(found)))
    if arguments.json:
        told = as_json(found, rows) | _together(spent)
        told |= {"table": str(table), "report": None if report is None else str(report)}
        print(json.dumps(told | {"folder": str(folder)}, allow_nan=False))
        return int(failed)
    Console().print(frontier_table(found, rows))
    for line in (legend(found, rows), "", *sentences(found), *troubles(rows)):
        print(line)
    print(_nature(comparison, spent))
    print(f"\nfolder {folder}, table {table}" + ("" if report is None else f", report {report}"))
    if failed:
        again = f"coterie compare --resume {folder}"
        print(f"some runs failed; try them again: {again}", file=sys.stderr)
    return int(failed)


def _report(done: Mapping[Path, str], folder: Path, findings: Sequence[str]) -> Path:
    out = folder / "report.html"
    try:
        return write_report(list(done), out, names=done, findings=findings)
    except OSError as error:
        raise OSError(
            f"{folder}: the runs are done and kept, but their report cannot be written "
            f"({error.strerror or error}); make room, then: coterie report {folder}"
        ) from error


def _together(spent: Spent) -> dict[str, Any]:
    """Return what all cells have spent; null where nothing was, or where there is no bound."""
    return {
        "together": spent.together,
        "unfinished_but_counted": [str(place) for place in spent.unfinished],
        "posted_but_not_counted": {str(place): why for place, why in spent.uncounted},
    }


def _nature(comparison: Comparison, spent: Spent) -> str:
    if not comparison.real_noise:
        return (
            "SIMULATION: a seed decides split and noise together; these runs protect nobody, and "
            "each epsilon is what one run with real noise would cost."
        )
    return spent.told()


class _Bar:
    """Cells done, the time left, and the best so far; on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self._bar: Progress | None = None
        if not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("comparing", total=None, left="")
            self._bar.start()

    def __call__(self, state: State) -> None:
        """Show how far it is."""
        if self._bar is None:
            return
        told = f"comparing  best so far {state.best}" if state.best else "comparing"
        left = (
            "" if math.isnan(state.seconds_left) else f"about {_duration(state.seconds_left)} left"
        )
        done, total = len(state.ended), len(state.cells)
        self._bar.update(self._task, total=total, completed=done, description=told, left=left)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
