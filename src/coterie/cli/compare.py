"""`coterie compare`: methods x epsilons x seeds in parallel processes, and their differences."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.budget import counted
from coterie.cli.options import (
    ADAPTIVE,
    BLOCK,
    EPSILONS,
    SET,
    TRACKING,
    TRUST,
    Commands,
    add_flags,
    add_plan,
    check_flags,
    command,
    epsilons,
    new_folder,
    print_json,
    refuse_with_resume,
    reword,
)
from coterie.cli.tune import ProgressBar, make_grid

if TYPE_CHECKING:
    from coterie.tune.compare import Comparison, Ended, Row, Spent
    from coterie.tune.frontier import Findings, Point

_MORE = """\
Every cell (method, epsilon, seed) is a run folder; the comparison's folder also has
comparison.parquet (one row per cell) and report.html. Methods that release nothing run once per
seed; centralised methods run without privacy; a method that does not fit the data is shown as
refused. A seed is a simulation seed of split and noise, which protects nobody; --repeats uses real
noise.

A TOML plan may hold the comparison: [compare] with methods (names, or tables with kind, label and
settings), epsilons, seeds or repeats, workers, grid, search, trials, folds, public, charge.

Write a setting of one method with its label: --set pmtl.method.lam=1, --grid pmtl.method.lam=0.1,1.
The exit status is 1 if a cell failed; --resume tries it again."""

_COMPARED = {
    "--seeds N|A,B,C:seeds": "number of simulations, or their seeds (default 3)",
    "--repeats N:int": "instead of seeds: real noise, each run a release",
}
_CHOSEN = {
    "--grid KEY=VALUE,VALUE...": "values to choose from, by cross-validation inside clients; "
    "epsilon does not cover the choice, and the table states it",
    "--search {grid,optuna}": "default grid: all combinations",
    "--trials N:int": "number of Optuna's proposals",
    "--folds N:int": "number of folds of every client's rows (default 5)",
    "--public": "declare the data public: tuning on it is free",
    "--charge": "choose by charged private runs",
}
_RUN = {
    "--out DIR": "folder of the comparison (default runs/compare-DATA-TIME)",
    "--resume DIR": "resume a comparison",
    **TRUST,
    "--workers N:int": "processes (default: one per core; 0: this one)",
    **SET,
    "--device DEVICE": "cpu (default) or cuda",
    "--block N:int": BLOCK,
    "--no-report": "do not write report.html",
    **TRACKING,
    "--json": "end with one JSON object on stdout",
    "--quiet": "no progress on stderr",
}


def add(commands: Commands) -> None:
    """Add `compare`."""
    parser = command(
        commands,
        "compare",
        "compare methods x epsilons x seeds, and show which differences are larger than noise",
        "coterie compare --data districts --method local,fedavg,pfeb --epsilon 1,4",
        _MORE,
        usual="--data --client-column --target --plan --method --epsilon --seeds --grid --out "
        "--resume --json",
        action=compare,
    )
    add_flags(parser.add_argument_group("compared"), _COMPARED)
    add_flags(parser.add_argument_group("settings chosen in every cell"), _CHOSEN)
    add_plan(parser).add_argument(
        "--epsilon",
        type=epsilons,
        metavar=EPSILONS,
        help="budgets (default 0.5,1,2,4); inf for no privacy",
    )
    named = "default local,fedavg,pmtl,auto (see `coterie methods`)"
    reword(parser, method=("NAME[,NAME]", named))
    for action in parser._actions:  # flags of a single run: errors name the right ones
        if action.dest in ("finetune", "noise_multiplier"):
            action.help = argparse.SUPPRESS
    add_flags(parser.add_argument_group("run"), _RUN)


def compare(arguments: argparse.Namespace) -> int:
    """Carry out `coterie compare`."""
    check_flags(arguments)
    from coterie.cli.tracked import tracked
    from coterie.core.signals import stop_status, stoppable
    from coterie.tracking import check_kinds
    from coterie.tune.compare import carry_out, finished

    check_kinds(arguments.track)
    folder, comparison = _open(arguments)
    options = comparison.options
    if arguments.workers is not None:
        options = replace(options, workers=arguments.workers)
    if not arguments.quiet:
        for note in comparison.notes:
            print(f"note: {note}", file=sys.stderr)
    try:
        with (
            ProgressBar("comparing", quiet=arguments.quiet) as bar,
            stoppable(partial(_interrupted, folder)),
        ):
            ended = carry_out(folder, workers=options.workers, observe=bar, budget=counted())
    except KeyboardInterrupt:
        print(_interrupted(folder), file=sys.stderr)
        return stop_status()
    status = _show(folder, comparison, ended, arguments)
    return tracked(finished(folder), arguments, group=folder) or status


def _interrupted(folder: Path) -> str:
    from coterie.tune.compare import finished, read_comparison

    done, total = len(finished(folder)), len(read_comparison(folder).cells())
    text = f"interrupted; {done} of {total} runs are done and kept"
    return f"{text}; resume with: coterie compare --resume {folder}"


def _open(arguments: argparse.Namespace) -> "tuple[Path, Comparison]":
    """Claim a new folder, or read the comparison to resume."""
    from coterie.tune.compare import (
        PLAN,
        check_trust,
        claim_folder,
        make_comparison,
        read_comparison,
    )

    if arguments.resume is not None:
        refuse_with_resume(arguments)
        folder = Path(arguments.resume)
        if not (folder / PLAN).exists():
            raise ValueError(f"{folder} holds no comparison ({PLAN} is missing); check --resume")
        check_trust(folder, trust=arguments.trust)
        return folder, read_comparison(folder)
    comparison = make_comparison(_table(arguments))
    stem = Path(comparison.base["data"]["name"]).stem
    folder = Path(arguments.out) if arguments.out else new_folder(f"compare-{stem}")
    claim_folder(folder, comparison)
    return folder, comparison


def _table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's table with [compare]; flags take precedence."""
    from coterie.cli.flags import plan_table

    if arguments.finetune is not None:
        raise ValueError(
            "--finetune belongs to one method: give it in [compare] methods, as {kind = "
            '"finetune", how = "mean", base = {kind = "fedavg"}}'
        )
    if arguments.clip == ADAPTIVE:
        raise ValueError(
            "--clip adaptive belongs to one method: give it in [compare] methods, as {kind = "
            '"adaptive", base = {kind = "fedavg"}}'
        )
    if arguments.seeds is not None and arguments.repeats is not None:
        raise ValueError("--seeds and --repeats: give seeds for simulations, or repeats")
    single = argparse.Namespace(**{**vars(arguments), "method": None, "epsilon": None})
    table = plan_table(single)
    if table["method"].get("kind") == "auto":
        del table["method"]["kind"]
    compare = table.setdefault("compare", {})
    if not isinstance(compare, dict):
        raise ValueError(f"compare = {compare!r}: expected a table, such as [compare]")
    compare |= _flags(arguments)
    for given, other in (("repeats", "seeds"), ("seeds", "repeats")):
        if getattr(arguments, given) is not None:
            compare.pop(other, None)
    return table


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    from coterie.tune.tune import Range

    budgets = arguments.epsilon
    given: dict[str, Any] = {
        "methods": arguments.method and [name.strip() for name in arguments.method.split(",")],
        "epsilons": [budgets] if isinstance(budgets, float) else budgets and list(budgets),
        "seeds": list(seeds) if isinstance(seeds := arguments.seeds, tuple) else seeds,
        "public": arguments.public or None,
        "charge": arguments.charge or None,
        "grid": {
            key: f"{values.low}..{values.high}" if isinstance(values, Range) else list(values)
            for key, values in make_grid(arguments.grid).items()
        }
        or None,
        **{name: getattr(arguments, name) for name in ("repeats", "search", "trials", "folds")},
    }
    return {key: value for key, value in given.items() if value is not None}


def _show(
    folder: Path,
    comparison: "Comparison",
    ended: "dict[int, Ended]",
    arguments: argparse.Namespace,
) -> int:
    """Write the table and the report, and print the results."""
    from rich.console import Console

    from coterie.tune import compare as library
    from coterie.tune.frontier import find, headlines
    from coterie.tune.frontier import sentences as describe

    cells = comparison.cells()
    rows = library.rows_of(cells, ended, folder)
    table, done = library.write_table(folder, rows), library.finished(folder)
    places = [folder / cell.place for cell in cells] if comparison.real_noise else []
    spent = library.privacy_spent(places)
    if not done:
        more = f" {spent.text()}" if spent != library.Spent() else ""
        raise ValueError(f"no cell could be run; {next(_troubles(rows))}.{more}")
    found = find(rows, folder)
    sentences = list(describe(found))
    told = {"findings": sentences, "headlines": headlines(found)}
    report = None if arguments.no_report else _report(done, folder, told)
    failed = any(row["status"].startswith("failed") for row in rows)
    if arguments.json:
        files = {"table": str(table), "folder": str(folder), "report": report and str(report)}
        print_json(_summary(found, rows, spent) | files)
        return int(failed)
    Console().print(_frontier(found, rows))
    for line in (_legend(found, rows), "", *sentences, *_troubles(rows)):
        print(line)
    print(_SIMULATION if not comparison.real_noise else spent.text())
    print(f"\nfolder {folder}, table {table}" + ("" if report is None else f", report {report}"))
    if failed:
        again = f"coterie compare --resume {folder}"
        print(f"some runs failed; try them again: {again}", file=sys.stderr)
    return int(failed)


_SIMULATION = (
    "SIMULATION: one seed decides split and noise, so these runs protect nobody. Each epsilon is "
    "the cost of one run with real noise."
)


def _report(done: Mapping[Path, str], folder: Path, told: Mapping[str, Any]) -> Path:
    from coterie.report.page import write_report

    try:
        return write_report(list(done), folder / "report.html", names=done, **told)
    except OSError as error:
        raise OSError(
            f"{folder}: the runs are done and kept, but their report cannot be written "
            f"({error.strerror or error}); free disk space, then: coterie report {folder}"
        ) from error


def _frontier(found: "Findings", rows: "Sequence[Row]") -> Any:
    """Return the frontier as a table: one row per method, one column per epsilon."""
    from coterie.report.tables import Cell, Number, Table, to_rich

    first = next(row for row in rows if row["status"] == "done")
    heads = [
        f"epsilon {epsilon:g}" + (": NOT PRIVATE" if math.isinf(epsilon) else "")
        for epsilon in found.epsilons
    ]
    body: list[tuple[Cell, ...]] = []
    for label in dict.fromkeys(point.label for point in found.points):
        at = {point.epsilon: point for point in found.points if point.label == label}
        local = Number(next(iter(at.values())).local_value)
        scores = (_score(at.get(epsilon)) for epsilon in found.epsilons)
        body.append(((label, *_tuning_notes(label, rows)), local, *scores))
    title = f"{first['data']}: {first['clients']} clients, test {found.metric}"
    return to_rich(Table.of(("method", "local", *heads), body), title=title)


def _tuning_notes(label: str, rows: "Sequence[Row]") -> Iterator[str]:
    """Yield, below a method's name, what covers the choice of its settings."""
    from coterie.runs.summary import NOT_COVERED, TUNING

    tuning = [row["tuning"] or "" for row in rows if row["label"] == label]
    if any(NOT_COVERED in text for text in tuning):
        yield "tuning NOT COVERED by epsilon"
    elif any(TUNING["public"] in text for text in tuning):
        yield "tuned on public data"
    if any("CHARGED" in text for text in tuning):
        yield "tuning CHARGED on top of epsilon"


def _score(point: "Point | None") -> str:
    from coterie.report.tables import Number

    if point is None:
        return Number(math.nan).text()
    error = point.standard_error if 0 < point.standard_error < math.inf else math.nan
    return Number(point.value, error, digits=4).text() + ("*" if point.best else "")


def _legend(found: "Findings", rows: "Sequence[Row]") -> str:
    """Return the meaning of the frontier's numbers, and its warnings."""
    better = "smaller" if found.smaller_is_better else "larger"
    over = "clients and seeds" if max(point.seeds for point in found.points) > 1 else "clients"
    parts = [f"mean ± standard error over {over}, {better} is better"]
    if any(point.best for point in found.points):
        parts.append("* is the best at its epsilon")
    done = [row for row in rows if row["status"] == "done"]
    return "; ".join([*parts, *_guarantee_notes(done), *_tuning_warnings(done)]) + "."


def _guarantee_notes(done: "Sequence[Row]") -> Iterator[str]:
    from coterie.privacy.guarantee import show_delta

    first = done[0]
    what = "replacement" if first["relation"] == "replace" else "zero-out"
    at = f", delta {show_delta(first['delta'])}" if len({row["delta"] for row in done}) == 1 else ""
    views = {row["view"] for row in done if row["epsilon_asked"] is not None}
    view = f", against {views.pop()}" if len(views) == 1 else ""
    yield f"epsilon: {what} of one client{view}{at}"
    yield "metrics are not covered"
    if any(row["simulation"] for row in done):
        yield "SIMULATION: known seeds, protects nobody"


def _tuning_warnings(done: "Sequence[Row]") -> Iterator[str]:
    from coterie.privacy.guarantee import round_up
    from coterie.runs.summary import NOT_COVERED, TUNING

    for text, word in ((NOT_COVERED, "TUNING"), (TUNING["public"], "tuning")):
        named = dict.fromkeys(row["label"] for row in done if row["tuning"].startswith(text))
        if named:
            yield f"{word} of {', '.join(named)}: {text}"
    charged = [row for row in done if row["epsilon_chosen_alone"] is not None]
    if charged:
        labels = ", ".join(dict.fromkeys(row["label"] for row in charged))
        others = round_up(max(row["epsilon"] for row in charged))
        chosen = round_up(max(row["epsilon_chosen_alone"] for row in charged))
        yield (
            f"tuning of {labels} is CHARGED: the epsilon of a column is that of one run; against "
            f"other clients, who see all runs, it is up to {others}; against a recipient of the "
            f"chosen run only, {chosen}"
        )


def _troubles(rows: "Sequence[Row]") -> Iterator[str]:
    """Yield each reason once why cells were refused or failed."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] not in ("done", "not run"):
            found.setdefault((row["label"], row["status"]), []).append(row)
    for (label, status), alike in found.items():
        places = "" if status.startswith("refused") else f" ({', '.join(r['run'] for r in alike)})"
        yield f"{label}: {status}{places}"


def _summary(found: "Findings", rows: "Sequence[Row]", spent: "Spent") -> dict[str, Any]:
    """Return frontier and differences as one JSON object."""
    from coterie.tune.frontier import FALSE_ALARMS

    done = [row for row in rows if row["status"] == "done"]
    tuning = {row["label"]: row["tuning"] for row in done}
    keys = ("label", "epsilon_asked", "seed", "status", "run")
    other = {
        status: [{k: row[k] for k in keys} for row in rows if row["status"].startswith(status)]
        for status in ("refused", "failed")
    }
    return {
        "data": rows[0]["data"],
        "metric": found.metric or None,
        "smaller_is_better": found.smaller_is_better,
        "epsilons": found.epsilons,
        "frontier": [
            {**asdict(point), "tuning": tuning.get(point.label)} for point in found.points
        ],
        "differences": [pair.to_json() for pair in found.pairs],
        "false_alarms": FALSE_ALARMS,
        "simulation": any(row["simulation"] for row in rows),
        "tuning": tuning,
        "cells": len(rows),
        "done": len(done),
        **other,
        "together": spent.together,
        "unfinished_but_counted": [str(place) for place in spent.unfinished],
        "posted_but_not_counted": {str(place): why for place, why in spent.uncounted},
    }
