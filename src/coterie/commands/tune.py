"""What `coterie tune` does: the grid from flags, progress on stderr, the words of the answer."""

import argparse
import json
import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from coterie import tuning
from coterie.commands.charge import charge
from coterie.commands.flags import literal, pair, plan_table
from coterie.commands.told import Told
from coterie.config import ConfigError, to_table, to_toml
from coterie.evaluation.metrics import json_number
from coterie.search import Range
from coterie.summary import TUNING
from coterie.tuning import Grid, Progress, Trial, Tuned

_SHOWN, _REFUSED = 10, 3
_NOT_PRIVATE = "scores are functions of clients' rows without noise: keep them as you keep the rows"


def tune(arguments: argparse.Namespace) -> Told:
    """Carry out `coterie tune`; nothing is printed here but the bar."""
    if arguments.charge:
        return charge(arguments, plan_table(arguments), _grid(arguments))
    if arguments.dry_run:
        raise ConfigError("--dry-run tells what --charge would cost: give --charge, or leave it")
    arguments.out = arguments.out or "tuned.toml"
    out = Path(arguments.out)
    _check_out(out)
    table, grid = plan_table(arguments), _grid(arguments)
    bar = _Bar(quiet=arguments.quiet)
    try:
        found = tuning.tune(
            table,
            grid,
            folds=arguments.folds,
            seed=arguments.seed,
            public=arguments.public,
            search=arguments.search,
            trials=arguments.trials,
            observe=bar,
        )
    except KeyboardInterrupt:
        bar.close()
        told = _tell(table, bar.trials, arguments) if any(t.folds for t in bar.trials) else ""
        return Told(told, "interrupted: the best so far, if any, is shown; nothing is written", 130)
    finally:
        bar.close()
    plan = to_table(found.plan)
    with out.open("x", encoding="utf-8") as file:
        file.write(to_toml(plan))
    return Told(_tell(table, found.table, arguments, found))


def _grid(arguments: argparse.Namespace) -> Grid:
    """Make the grid; beside --finetune, keys mean what they mean in --set."""
    grid = make_grid(arguments.grid)
    if arguments.finetune is None:
        return grid
    moved = {"finetune": "method", "method": "method.base"}
    parts = {key: key.partition(".") for key in grid}
    return {f"{moved.get(p[0], p[0])}{p[1]}{p[2]}": grid[key] for key, p in parts.items()}


def make_grid(texts: Sequence[str]) -> Grid:
    """Read `method.lam=0.1,0.3` and its like.

    >>> make_grid(["method.lam=0.1,0.3", "method.solver=exact,sgd", "privacy.budget=[1, 2],[2, 1]"])
    {'method.lam': [0.1, 0.3], 'method.solver': ['exact', 'sgd'], 'privacy.budget': [[1, 2], [2, 1]]}
    >>> make_grid(["rounds=1..50"])
    {'rounds': Range(low=1, high=50)}
    """  # noqa: E501
    grid: dict[str, list[Any] | Range] = {}
    for text in texts:
        key, values = pair(text, "--grid")
        if key in grid:
            raise ConfigError(f"--grid {key} is given twice: list all its values once")
        if (ends := _ends_of(values)) is not None:
            grid[key] = Range(*ends)
            continue
        try:
            grid[key] = tomllib.loads(f"values = [{values}]")["values"]
        except tomllib.TOMLDecodeError:
            grid[key] = [literal(value.strip()) for value in values.split(",")]
    return grid


def _ends_of(text: str) -> tuple[float, float] | None:
    """Read `0.01..10`; None if it is not of this form."""
    parts = [literal(part.strip()) for part in text.split("..")]
    numbers = [part for part in parts if type(part) in (int, float)]
    return (numbers[0], numbers[1]) if len(numbers) == len(parts) == 2 else None


def _check_out(out: Path) -> None:
    if out.exists():
        raise FileExistsError(f"{out} exists and is kept; choose another --out, or remove it")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} is no folder; make it, or choose another --out")


class _Bar:
    """A progress bar with an estimate; keeps the trials as they stand."""

    def __init__(self, *, quiet: bool) -> None:
        self.trials: list[Trial] = []
        self._bar: Bar | None = None
        if not quiet:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("tuning", total=None)
            self._bar.start()

    def __call__(self, progress: Progress) -> None:
        """Show a run that is done."""
        self.trials = progress.trials
        if self._bar is not None:
            told = f"tuning  best so far {_score(progress.trials[0])}"
            self._bar.update(
                self._task, total=progress.total, completed=progress.done, description=told
            )

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _tell(
    table: Mapping[str, Any],
    trials: Sequence[Trial],
    arguments: argparse.Namespace,
    found: Tuned | None = None,
) -> str:
    """Say what came out, or, where it was interrupted, what would have so far."""
    if arguments.json:
        return json.dumps(_summary(table, trials, arguments, found), allow_nan=False)
    data, method = table["data"]["name"], table["method"]["kind"]
    lines = [
        f"{data}: {method} at epsilon {table['privacy']['epsilon']:g}, {arguments.folds} folds of "
        "every client's own training rows",
        "",
        *_table([trial for trial in trials if trial.folds and trial.refused is None]),
        *_refusals(trials),
        "",
        f"best: {_settings(trials[0].settings)}{_rivals(trials)}",
    ]
    lines += _ends(trials[0].settings, _grid(arguments))
    lines.append(f"Not private: {_NOT_PRIVATE}.")
    if found is not None:
        lines.append(f"Tuning: {TUNING[found.plan.tuned]}; runs of the plan will say so.")
        run = f"coterie run --plan {shlex.quote(arguments.out)}"
        lines.append(f"\nplan {arguments.out}, run it: {run}")
    return "\n".join(lines)


def _summary(
    table: Mapping[str, Any],
    trials: Sequence[Trial],
    arguments: argparse.Namespace,
    found: Tuned | None,
) -> dict[str, Any]:
    best = trials[0]
    return {
        "data": table["data"]["name"],
        "method": table["method"]["kind"],
        "epsilon": json_number(table["privacy"]["epsilon"]),
        "folds": arguments.folds,
        "metric": best.metric,
        "best": best.settings,
        "mean": json_number(best.mean),
        "standard_error": json_number(best.standard_error),
        "trials": [
            {
                "settings": trial.settings,
                "mean": json_number(trial.mean),
                "standard_error": json_number(trial.standard_error),
                "folds": [json_number(score) for score in trial.folds],
                "refused": trial.refused,
            }
            for trial in trials
        ],
        "tuning": None if found is None else TUNING[found.plan.tuned],
        "not_private": _NOT_PRIVATE,
        "interrupted": found is None,
        "plan": None if found is None else str(arguments.out),
    }


def _table(trials: Sequence[Trial]) -> list[str]:
    first = trials[0]
    better = "smaller" if first.metric == "nmse" else "larger"
    rows = [[f"{first.metric} ({better} is better)", "folds", *first.settings]]
    rows += [
        [_score(trial, named=False), str(len(trial.folds)), *map(_value, trial.settings.values())]
        for trial in trials[:_SHOWN]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    more = len(trials) - _SHOWN
    return lines + ([f"and {more} worse"] if more > 0 else [])


def _refusals(trials: Sequence[Trial]) -> list[str]:
    """Return every reason once, with the first combination that was refused for it."""
    refused = [trial for trial in trials if trial.refused is not None]
    if not refused:
        return []
    times = Counter(trial.refused for trial in refused)
    first = {trial.refused: trial for trial in reversed(refused)}
    lines = ["", f"{len(refused)} of {len(trials)} combinations are refused:"]
    lines += [
        f"  {count} such as {_settings(first[why].settings)}: {why}"
        for why, count in times.most_common(_REFUSED)
    ]
    more = len(times) - _REFUSED
    return lines + ([f"  and for {more} other reasons (--json has all)"] if more > 0 else [])


def _rivals(trials: Sequence[Trial]) -> str:
    best = trials[0]
    near = sum(
        trial.refused is None
        and len(trial.folds) == len(best.folds)
        and trial.badness <= best.badness + best.standard_error
        for trial in trials[1:]
    )
    return f" ({near} more within a standard error of it)" if near else ""


def _ends(settings: Mapping[str, Any], grid: Grid) -> list[str]:
    """Point at the best values that are the first or last of those tried."""
    lines = []
    for key, value in settings.items():
        values = grid[key]
        if isinstance(values, Range):
            continue
        tried = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(tried) < max(3, len(values)):
            continue
        for end, word in ((min(tried), "smaller"), (max(tried), "larger")):
            if value == end:
                lines.append(f"{key} = {value} is an end of what was tried: try {word} ones too")
    return lines


def _score(trial: Trial, *, named: bool = True) -> str:
    told = f"{trial.metric} " if named else ""
    error = trial.standard_error
    return f"{told}{trial.mean:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
