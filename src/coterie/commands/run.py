"""What the commands that touch data do: run a plan made of flags, show what came out."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.commands.flags import plan_table
from coterie.commands.tracked import tracked
from coterie.commands.watch import Watch
from coterie.config import ConfigError, to_table
from coterie.full_disks import how_to_finish
from coterie.interrupts import stop_status, stoppable
from coterie.methods.auto import Auto
from coterie.methods.base import Method
from coterie.methods.local import Local
from coterie.plan import Privacy
from coterie.privacy.accounting import Guarantee
from coterie.privacy.charged import statement
from coterie.privacy.files import write_atomically
from coterie.privacy.words import add_up, spent_together
from coterie.report.page import write_report
from coterie.report.read import read_summary
from coterie.report.tables import name_of, terminal
from coterie.rules import usual
from coterie.run import execute
from coterie.run_plan import RunPlan, load_plan, plan_from_table
from coterie.summary import promised
from coterie.tracking import check_kinds

MEMBERS = "members.json"
_REFERENCE = "not-private"
_WITH_RESUME = ("resume", "json", "quiet", "track", "track_dir", "command", "action")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `coterie run`."""
    check_kinds(arguments.track)
    if isinstance(arguments.epsilon, tuple):
        return _several(arguments)
    if arguments.resume is not None:
        folder = Path(arguments.resume)
        _refuse_with_resume(arguments)
        if (folder / MEMBERS).exists():
            return _go_through(folder, arguments)
        run_plan = load_plan(folder / "plan.toml")
        if (folder / "result.json").exists():
            _show_finished(folder, as_json=arguments.json)
            return tracked([folder], arguments)
        if (folder / "federation.toml").exists():
            # Here it would go on with rows of this machine, in the account of the sites' rows.
            raise ConfigError(
                f"{folder} is a deployment, and goes on where it was begun: {how_to_finish(folder)}"
            )
    else:
        run_plan = plan_from_table(plan_table(arguments))
        folder = Path(arguments.out) if arguments.out else _new_folder(run_plan)
        if (folder / "plan.toml").exists():
            raise FileExistsError(
                f"{folder} already holds a run; go on with `coterie run --resume {folder}`, "
                "or choose another --out"
            )
    with stoppable(partial(_farewell, folder)):
        return _run_one(run_plan, folder, arguments)


def _run_one(run_plan: RunPlan, folder: Path, arguments: argparse.Namespace) -> int:
    watch = Watch(quiet=arguments.quiet)
    try:
        scoring = None if arguments.json else watch.scoring
        result = execute(run_plan, folder=folder, observer=watch.open, scoring=scoring)
    except KeyboardInterrupt:
        watch.close()
        print(_farewell(folder), file=sys.stderr)
        return stop_status()
    finally:
        watch.close()
    status = _show(folder, result.summary, result.outcome.guarantee, as_json=arguments.json)
    return tracked([folder], arguments) or status


def _farewell(folder: Path) -> str:
    """Say how a run that was interrupted goes on."""
    begun = (folder / "plan.toml").exists() or (folder / MEMBERS).exists()
    told = f"go on with: coterie run --resume {folder}" if begun else "nothing was spent"
    return f"interrupted; {told}"


def _several(arguments: argparse.Namespace) -> int:
    """Train once for each epsilon, beside learning alone and learning without privacy."""
    budgets = sorted(set(arguments.epsilon))
    first = argparse.Namespace(**{**vars(arguments), "epsilon": budgets[0]})
    base = plan_from_table(plan_table(first))
    folder = Path(arguments.out) if arguments.out else _new_folder(base)
    if (folder / MEMBERS).exists() or (folder / "plan.toml").exists():
        raise FileExistsError(
            f"{folder} already holds runs; go on with `coterie run --resume {folder}`, or choose "
            "another --out"
        )
    free = Privacy(epsilon=math.inf, delta=base.privacy.delta, relation=base.privacy.relation)
    plans = {f"epsilon-{e:g}": _with_epsilon(base, e) for e in budgets}
    known = _picked(base)
    alone = known.alone() or Local(model=base.method.model)
    last = known.reference() or known
    members = {"alone": replace(base, method=alone, privacy=free, rounds=None), **plans}
    if math.inf not in budgets:
        members[_REFERENCE] = replace(base, method=last, privacy=free)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / MEMBERS,
        json.dumps({name: to_table(plan) for name, plan in members.items()}).encode(),
    )
    return _go_through(folder, arguments)


def _with_epsilon(base: RunPlan, epsilon: float) -> RunPlan:
    return replace(base, privacy=replace(base.privacy, epsilon=epsilon))


def _go_through(folder: Path, arguments: argparse.Namespace) -> int:
    """Run the members that are not done, then show all of them."""
    tables = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    try:
        with stoppable(partial(_farewell, folder)):
            done = [
                folder / name
                for name, table in tables.items()
                if _train(folder / name, table, arguments)
            ]
    except KeyboardInterrupt:
        print(_farewell(folder), file=sys.stderr)
        return stop_status()
    summaries, guarantees = zip(*(_read_finished(part) for part in done), strict=True)
    report = write_report(done, folder / "report.html")
    spent = [g for g in guarantees if g.events and g.epsilon < math.inf]
    if arguments.json:
        together = add_up(spent) if spent else None
        print(json.dumps({"runs": summaries, "together": together}, allow_nan=False))
        return tracked(done, arguments, group=folder)
    _show_tables(summaries)
    claims = [g for g in guarantees if g.claimed_epsilon is not None]
    for stated in (*spent[-1:], *claims):
        print(stated.statement())
    _say_caveats(summaries)
    _say_tuning(summaries[0])
    if spent:
        print(f"\n{spent_together(spent)}")
    print(f"run folder {folder}, report {report}")
    return tracked(done, arguments, group=folder)


def _train(part: Path, table: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Carry out a member unless it is done; say whether it is."""
    if (part / "result.json").exists():
        return True
    if not arguments.quiet:
        print(f"training {table['method']['kind']} ({part.name}) ...", file=sys.stderr)
    watch = Watch(quiet=arguments.quiet, brief=True)
    try:
        scoring = None if arguments.json else watch.scoring
        execute(plan_from_table(table), folder=part, observer=watch.open, scoring=scoring)
    except (ValueError, RuntimeError) as error:
        if part.name != _REFERENCE:
            raise
        # The private runs are paid for: their table is shown all the same.
        print(f"no run without privacy to compare with: {error}", file=sys.stderr)
        return False
    finally:
        watch.close()
    return True


def _show_finished(folder: Path, *, as_json: bool) -> int:
    """Show a run that is done as it was: its last solve is not drawn a second time."""
    summary, guarantee = _read_finished(folder)
    _show(folder, summary, guarantee, as_json=as_json)
    return 0


def _read_finished(folder: Path) -> tuple[dict[str, Any], Guarantee]:
    try:
        summary, stated, guarantee = read_summary(folder)
        summary |= promised(guarantee, stated.get("selection")) | {"run": str(folder)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; or remove result.json and resume") from error
    return summary, guarantee


def _show(folder: Path, summary: Mapping[str, Any], guarantee: Guarantee, *, as_json: bool) -> int:
    status = _report(folder)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return status
    _show_tables([summary])
    print(statement(guarantee, summary.get("selection")))
    _say_caveats([summary])
    _say_tuning(summary)
    for notice in summary.get("notices") or ():
        print(f"Note for the data's owner, not covered by epsilon: {notice}.")
    print(f"\nrun folder {folder}, report {folder / 'report.html'}")
    return status


def _report(folder: Path) -> int:
    """Write the page of a run that is done and kept; say so if it cannot be, and lose nothing."""
    try:
        write_report([folder], folder / "report.html")
    except OSError as error:
        print(
            f"{folder}: the run is done and kept, but its report cannot be written "
            f"({error.strerror or error}); make room, then: coterie report {folder}",
            file=sys.stderr,
        )
        return 2
    return 0


def _show_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    console = Console()
    for shown in terminal(rows):
        console.print(shown)


def _say_caveats(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what must be read beside the guarantee, and why the plan is as it is, once each."""
    said: dict[str, list[str]] = {}
    for row in rows:
        told = (*(row.get("caveats") or ()), *_foreseen(row), *(row.get("explained") or ()))
        for caveat in told:
            said.setdefault(caveat, []).append(name_of(row, rows))
    for caveat, methods in said.items():
        print(f"{', '.join(dict.fromkeys(methods))}: {caveat}")


def _foreseen(row: Mapping[str, Any]) -> Iterator[str]:
    """Return the verdict that came before the run, and why its method was picked."""
    if (verdict := row.get("verdict")) is not None:
        yield f"verdict before the run: {verdict['verdict']}: {verdict['words']}"
    if row.get("chosen"):
        yield f"chosen by auto: {row['chosen']}"


def _say_tuning(summary: Mapping[str, Any]) -> None:
    if summary.get("tuning", "none") != "none":
        print(f"Tuning: {summary['tuning']}.")


def demo(arguments: argparse.Namespace) -> int:
    """Carry out `coterie demo`: three methods and what auto picks, with a report."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out = Path(arguments.out or f"runs/demo-{stamp}")
    results, folders = [], []
    for method in ("local", "fedavg", "pmtl", "auto"):
        table: dict[str, Any] = {
            "data": {"name": arguments.data},
            "method": {"kind": method},
            "privacy": {"epsilon": arguments.epsilon},
        }
        if arguments.simulation_seed is not None:
            table["simulation_seed"] = arguments.simulation_seed
            table["data"]["split_seed"] = arguments.simulation_seed
        print(f"training {method} on {arguments.data} ...", file=sys.stderr)
        watch = Watch(quiet=False)
        try:
            folder, run_plan = out / method, plan_from_table(table)
            found = execute(run_plan, folder=folder, observer=watch.open, scoring=watch.scoring)
            results.append(found)
            folders.append(folder)
        finally:
            watch.close()
    report = out / "report.html"
    write_report(folders, report)
    summaries = [result.summary for result in results]
    _show_tables(summaries)
    print(results[-1].outcome.guarantee.statement())
    _say_caveats(summaries)
    print(f"\n{spent_together([result.outcome.guarantee for result in results])}\nreport: {report}")
    return 0


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in _WITH_RESUME
        and value is not None
        and value is not False  # by identity: 0 is a value too
        and value != []
    ]
    if given:
        raise ConfigError(f"--resume goes on with the plan as it is; leave out {', '.join(given)}")


def _picked(run_plan: RunPlan) -> Method:
    """Return the method that will be run, as far as that is known before data is opened."""
    method = run_plan.method
    found = usual(method, run_plan.privacy) if isinstance(method, Auto) else None
    return found or method


def _new_folder(run_plan: RunPlan) -> Path:
    stem = Path(run_plan.data.name).stem.replace(":", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{_picked(run_plan).kind}-{stamp}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder
