"""`coterie tune`: settings chosen by cross-validation, or by charged private runs."""

import argparse
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.budget import counted
from coterie.cli.options import (
    Commands,
    add_flags,
    add_plan,
    add_work,
    check_file,
    check_flags,
    command,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from coterie.tune.charge import Offer, Selected
    from coterie.tune.tune import Grid, Progress, Trial, Tuned

_SHOWN, _REFUSED = 10, 3
_OF_TRIALS = ("settings", "mean", "standard_error", "folds", "refused")
_NOT_PRIVATE = "scores are functions of clients' rows without noise: protect them like the rows"
_RECIPIENT = (
    "The chosen run's folder states the first epsilon: share that folder only. Its recipients must "
    "not learn how many runs there were or how they scored; other clients know it."
)
_MORE = """\
Without --charge, scores are functions of clients' rows without noise. That is free on public data;
on private data no epsilon covers it, and the plan that is written states this. With --charge the
command makes K private runs (K is random) at --epsilon each, scores them privately and keeps the
best. It states two epsilons: against a recipient of the chosen run only, and against the other
clients, who observe all runs. --dry-run prints both before any budget is spent."""


def add(commands: Commands) -> None:
    """Add `tune`."""
    parser = command(
        commands,
        "tune",
        "choose settings by cross-validation inside clients, or by private runs (--charge)",
        "coterie tune --data synthetic --method pmtl --grid method.lam=0.1,0.3,1",
        _MORE,
        usual="--data --client-column --target --plan --method --grid --epsilon --public --charge "
        "--out --json",
        action=tune,
    )
    search = {
        "--grid KEY=VALUE,VALUE...": "values of a setting of the plan to try; several make all "
        "combinations; a range such as method.lam=0.01..10 with --search optuna",
        "--search {grid,optuna}": "all combinations (default), or TPE",
        "--trials N:int": "number of Optuna's proposals (default 30)",
        "--folds N:int": "number of folds of every client's rows (default 5)",
        "--seed N:int": "seed of folds and of the noise of trials (default 0)",
        "--public": "declare the data public: tuning on it is free",
    }
    charge = {
        "--charge": "choose by private runs, and charge each of them",
        "--runs NUMBER:float": "expected number of runs (default 10)",
        "--eta NUMBER:float": "shape of the distribution of the number of runs: 1 geometric "
        "(default), 0 logarithmic",
        "--score-bound NUMBER:float": "the largest error that counts (default 1)",
        "--score-noise NUMBER:float": "noise multiplier of a score (default: that of half a "
        "run's mu)",
        "--validation SHARE:float": "share of rows to score on (default 0.25)",
        "--dry-run": "print the privacy cost, and stop",
    }
    add_flags(parser.add_argument_group("grid"), search)
    add_flags(parser.add_argument_group("charge"), charge)
    add_flags(add_plan(parser), {"--epsilon NUMBER:float": "budget of one run; inf for no privacy"})
    run = parser.add_argument_group("run")
    add_flags(run, {"--out PATH": "the plan (tuned.toml); with --charge a folder (selected)"})
    add_work(run)
    parser.set_defaults(search="grid", folds=5, seed=0, runs=10.0, eta=1.0)
    parser.set_defaults(score_bound=1.0, validation=0.25)


def tune(arguments: argparse.Namespace) -> int:
    """Carry out `coterie tune`."""
    check_flags(arguments)
    if not arguments.grid:
        raise ValueError(
            "nothing to tune: give values to try, for example --grid method.lam=0.1,0.3,1"
        )
    if arguments.dry_run and not arguments.charge:
        raise ValueError("--dry-run prints the cost of --charge: add --charge, or leave it out")
    out = Path(arguments.out or "tuned.toml")
    if not arguments.charge:
        check_file(out, "--out")
        if out.exists():
            raise FileExistsError(f"{out} exists; choose another --out, or remove it")
    from coterie.cli.flags import plan_table

    if arguments.charge:
        return _charge(arguments, plan_table(arguments), _grid(arguments))
    from coterie.core.config import to_table, to_toml
    from coterie.tune import tune as library

    table, grid = plan_table(arguments), _grid(arguments)
    names = ("folds", "seed", "public", "search", "trials")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    bar = ProgressBar("tuning", quiet=arguments.quiet)
    try:
        with bar:
            found = library.tune(table, grid, observe=bar, **given)
    except KeyboardInterrupt:
        if any(trial.folds for trial in bar.trials):
            _show(table, bar.trials, arguments, out)
        print("interrupted: nothing is written; stdout has the best so far", file=sys.stderr)
        return 130
    with out.open("x", encoding="utf-8") as file:
        file.write(to_toml(to_table(found.plan)))
    _show(table, found.table, arguments, out, found)
    return 0


def _grid(arguments: argparse.Namespace) -> "Grid":
    """Return the grid; with --finetune, keys have the same meaning as in --set."""
    grid = make_grid(arguments.grid)
    if arguments.finetune is None:
        return grid
    moved = {"finetune": "method", "method": "method.base"}
    parts = {key: key.partition(".") for key in grid}
    return {f"{moved.get(p[0], p[0])}{p[1]}{p[2]}": grid[key] for key, p in parts.items()}


def make_grid(texts: Sequence[str]) -> "Grid":
    """Read flags such as `method.lam=0.1,0.3`.

    >>> make_grid(["method.lam=0.1,0.3", "method.solver=exact,sgd", "privacy.budget=[1, 2],[2, 1]"])
    {'method.lam': [0.1, 0.3], 'method.solver': ['exact', 'sgd'], 'privacy.budget': [[1, 2], [2, 1]]}
    >>> make_grid(["rounds=1..50"])
    {'rounds': Range(low=1, high=50)}
    """  # noqa: E501
    from coterie.cli.flags import literal, pair
    from coterie.tune.tune import Range

    grid: dict[str, list[Any] | Range] = {}
    for text in texts:
        key, values = pair(text, "--grid")
        if key in grid:
            raise ValueError(f"--grid {key} is given twice: list all its values once")
        ends = [literal(part.strip()) for part in values.split("..")]
        if len(ends) == 2 and all(type(end) in (int, float) for end in ends):
            grid[key] = Range(ends[0], ends[1])
            continue
        try:
            grid[key] = tomllib.loads(f"values = [{values}]")["values"]
        except tomllib.TOMLDecodeError:
            grid[key] = [literal(value.strip()) for value in values.split(",")]
    return grid


class ProgressBar:
    """A progress bar on stderr with the time left and the best trial; keeps the trials."""

    def __init__(self, title: str, *, quiet: bool) -> None:
        self.trials: list[Trial] = []
        self._title, self._quiet = title, quiet
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: "Progress") -> None:
        """Show the progress; the bar is drawn once there is something to do."""
        self.trials = progress.trials
        if self._bar is None and not self._quiet and progress.done < progress.total:
            self._bar = progress_bar()
            self._task = self._bar.add_task(self._title, total=progress.total)
        if self._bar is not None:
            best = f"  {_best(progress.trials[0])}" if progress.trials else ""
            self._bar.update(
                self._task,
                total=progress.total,
                completed=progress.done,
                description=self._title + best,
            )


def _best(trial: "Trial") -> str:
    from coterie.report.tables import Number
    from coterie.tune.tune import settings_text

    score = Number(trial.mean, trial.standard_error, digits=4).text()
    return f"best so far {trial.metric} {score} ({settings_text(trial.settings)[:60]})"


def _show(
    table: Mapping[str, Any],
    trials: Sequence["Trial"],
    arguments: argparse.Namespace,
    out: Path,
    found: "Tuned | None" = None,
) -> None:
    """Print the result as text or JSON; without `found`, the best so far of an interruption."""
    from rich.console import Console

    from coterie.report.read import metric_title
    from coterie.runs.summary import TUNING
    from coterie.tune.tune import settings_text

    if arguments.json:
        files = {"folds": arguments.folds, "plan": None if found is None else str(out)}
        print_json(_summary(table, trials, found) | files)
        return
    data, method = table["data"]["name"], table["method"]["kind"]
    print(
        f"{data}: {method} at epsilon {table['privacy']['epsilon']:g}, {arguments.folds} folds of "
        f"each client's own training rows: {metric_title(trials[0].metric).removeprefix('test ')}"
    )
    Console().print(_table([trial for trial in trials if trial.folds and trial.refused is None]))
    lines = [
        *_refusals(trials),
        f"best: {settings_text(trials[0].settings)}{_close(trials)}",
        *_ends(trials[0].settings, _grid(arguments)),
        f"Not private: {_NOT_PRIVATE}.",
    ]
    if found is not None:
        lines.append(f"Tuning: {TUNING[found.plan.tuned]}; runs of this plan state it.")
        lines.append(f"\nplan {out}, run it: coterie run --plan {shlex.quote(str(out))}")
    print("\n".join(lines))


def _summary(
    table: Mapping[str, Any], trials: Sequence["Trial"], found: "Tuned | None"
) -> dict[str, Any]:
    from coterie.runs.summary import TUNING

    best = trials[0]
    return {
        "data": table["data"]["name"],
        "method": table["method"]["kind"],
        "epsilon": table["privacy"]["epsilon"],
        "metric": best.metric,
        "best": best.settings,
        "mean": best.mean,
        "standard_error": best.standard_error,
        "trials": [{name: getattr(trial, name) for name in _OF_TRIALS} for trial in trials],
        "tuning": None if found is None else TUNING[found.plan.tuned],
        "not_private": _NOT_PRIVATE,
        "interrupted": found is None,
    }


def _table(trials: Sequence["Trial"]) -> Any:
    from coterie.report.tables import Number, Table, to_rich
    from coterie.tune.tune import value_text

    first, more = trials[0], len(trials) - _SHOWN
    rows = [
        (
            Number(trial.mean, trial.standard_error, digits=4).text(),
            str(len(trial.folds)),
            *map(value_text, trial.settings.values()),
        )
        for trial in trials[:_SHOWN]
    ]
    titles = (first.metric, "folds", *first.settings)
    table = Table.of(titles, rows)
    return to_rich(replace(table, notes=(f"and {more} worse",) if more > 0 else ()))


def _refusals(trials: Sequence["Trial"]) -> list[str]:
    """Return each reason once, with the first combination that was refused for it."""
    from coterie.tune.tune import settings_text

    refused = [trial for trial in trials if trial.refused is not None]
    if not refused:
        return []
    times = Counter(trial.refused for trial in refused)
    first = {trial.refused: trial for trial in reversed(refused)}
    lines = [f"{len(refused)} of {len(trials)} combinations are refused:"]
    lines += [
        f"  {count} such as {settings_text(first[why].settings)}: {why}"
        for why, count in times.most_common(_REFUSED)
    ]
    more = len(times) - _REFUSED
    return lines + ([f"  and for {more} other reasons (--json has all)"] if more > 0 else [])


def _close(trials: Sequence["Trial"]) -> str:
    best = trials[0]
    near = sum(
        trial.refused is None
        and len(trial.folds) == len(best.folds)
        and trial.loss <= best.loss + best.standard_error
        for trial in trials[1:]
    )
    return f" ({near} more within one standard error)" if near else ""


def _ends(settings: Mapping[str, Any], grid: "Grid") -> list[str]:
    """Return hints for best values at the end of the values tried."""
    lines = []
    for key, value in settings.items():
        values = grid[key]
        listed = values if isinstance(values, list) else []
        tried = [v for v in listed if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(tried) < max(3, len(listed)):
            continue
        for end, word in ((min(tried), "smaller"), (max(tried), "larger")):
            if value == end:
                lines.append(f"{key} = {value} is the {word[:-2]}est value tried: try {word} ones")
    return lines


# --- --charge -----------------------------------------------------------------


def _charge(arguments: argparse.Namespace, table: dict[str, Any], grid: "Grid") -> int:
    from coterie.tune.charge import Scoring, offer, select

    if arguments.search != "grid":
        raise ValueError(
            f"--charge with --search {arguments.search}: proposals that depend on scores are not "
            "covered; --charge draws settings from a grid at random: leave --search out"
        )
    scoring = Scoring(
        noise_multiplier=arguments.score_noise,
        bound=arguments.score_bound,
        rows=arguments.validation,
    )
    asked: dict[str, Any] = {name: getattr(arguments, name) for name in ("runs", "eta", "public")}
    if arguments.dry_run:
        _print_offer(arguments, offer(table, grid, scoring=scoring, **asked))
        return 0
    folder = Path(arguments.out or "selected")
    try:
        with ProgressBar("private runs", quiet=arguments.quiet) as bar:
            found = select(
                table,
                grid,
                folder=folder,
                observe=bar,
                scoring=scoring,
                budget=counted(),
                **asked,
            )
    except KeyboardInterrupt:
        print(f"interrupted: the same command resumes {folder}; no draw changes", file=sys.stderr)
        return 130
    _print_selected(arguments, found)
    return 0


def _print_offer(arguments: argparse.Namespace, found: "Offer") -> None:
    from coterie.privacy.guarantee import round_up, show_delta
    from coterie.privacy.selection import ALL_RUNS, CHOSEN
    from coterie.tune.tune import settings_text

    guarantee, refused = found.guarantee, found.refused
    foreseen = guarantee.forecast()
    if arguments.json:
        summary = {
            "candidates": found.settings,
            "refused": [{"settings": one.settings, "why": one.refused} for one in refused],
            "guarantee": guarantee.to_json(),
            "other_clients": [asdict(one) for one in foreseen],
        }
        print_json(summary)
        return
    lines = [
        f"{len(found.settings)} settings, {guarantee.law.mean:g} runs expected; one run with its "
        f"score: epsilon = {round_up(guarantee.of_runs([0]).epsilon)} at delta = "
        f"{show_delta(guarantee.delta)}"
    ]
    if refused:
        lines.append(
            f"{len(refused)} combinations are refused and never drawn, such as "
            f"{settings_text(refused[0].settings)}: {refused[0].refused}"
        )
    lines += [
        "",
        f"{CHOSEN}:",
        f"  epsilon = {round_up(guarantee.chosen_alone)}",
        f"{ALL_RUNS}:",
        *(
            f"  epsilon = {round_up(at.epsilon)} for {at.runs} runs "
            f"({at.share:.0%} of selections make no more)"
            for at in foreseen
        ),
        "",
        "No budget is spent yet: leave --dry-run out to start.",
    ]
    print("\n".join(lines))


def _print_selected(arguments: argparse.Namespace, found: "Selected") -> None:
    from coterie.tune.tune import settings_text

    record = found.record
    if arguments.json:
        summary = {key: record[key] for key in ("guarantee", "words", "runs", "note")}
        summary |= {"best": found.best, "run": str(found.run), "tuned": found.plan.tuned}
        print_json(summary)
        return
    scored = sorted(record["runs"], key=lambda run: -run["score"])
    lines = [
        f"private runs: {len(found.scores)}; noisy score ({arguments.score_bound:g} minus the mean "
        "error on held-out rows; larger is better)",
        *(f"  {run['score']:.4g}  {settings_text(run['settings'])}" for run in scored),
        "",
        f"chosen: {settings_text(found.best)} (noisy score {max(found.scores):.4g})",
        found.guarantee.statement(found.drawn),
        _RECIPIENT,
        f"\nrun {found.run}, its report: coterie report {shlex.quote(str(found.run))}",
    ]
    print("\n".join(lines))
