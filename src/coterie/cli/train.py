"""`coterie run` and `coterie demo`: run a plan made of flags, and show the result."""

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.cli.budget import counted
from coterie.cli.flags import make_plan
from coterie.cli.options import new_folder, refuse_with_resume
from coterie.cli.tracked import tracked
from coterie.cli.watch import Watch, chosen_line, verdict_line
from coterie.core.config import ConfigError, naming, refuse_code, to_table
from coterie.core.files import how_to_resume, write_atomically
from coterie.core.ranks import RankError, Ranks, joined
from coterie.core.signals import stop_status, stoppable
from coterie.methods.auto import Auto
from coterie.methods.base import Method
from coterie.methods.baselines import Local
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import default_method
from coterie.privacy.guarantee import Guarantee, add_up, spent_together
from coterie.privacy.selection import charged_statement
from coterie.report.page import write_report
from coterie.report.read import read_summary
from coterie.report.tables import name_of, terminal
from coterie.runs.run import assist_run, execute, foresee
from coterie.runs.summary import promised
from coterie.tracking import check_kinds

MEMBERS = "members.json"
_BASELINE = "not-private"
_DEMO = ("local", "fedavg", "pmtl", "auto")
_SYSTEMS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"kind": "mpmtl"}, {"name": "mpmtl:low_rank", "options": {"noise": 0.22}}),
    ({"kind": "dpfedmtl", "model": {"kind": "mlp"}}, {"name": "digits"}),
    ({"kind": "mtlsvm"}, {"name": "synthetic:mean", "options": {"task": "binary", "clients": 200}}),
)
"""Beside districts, the built-in data: the three other published systems, each on data for it."""


def run(arguments: argparse.Namespace) -> int:
    """Carry out `coterie run`, alone or as one of several processes."""
    with joined() as ranks:
        return _run(arguments, ranks) if ranks.is_first else _assist(ranks)


def _assist(ranks: Ranks) -> int:
    """Compute this rank's clients; rank 0 prints, also why it begins no run."""
    with suppress(RankError):
        assist_run(ranks)
    return 0


def _run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    check_kinds(arguments.track)
    if ranks.size > 1:
        _check_one_run(arguments)
    if isinstance(arguments.epsilon, tuple):
        return _several(arguments)
    if arguments.resume is not None:
        folder = Path(arguments.resume)
        refuse_with_resume(arguments)
        if (folder / MEMBERS).exists():
            return _run_members(folder, arguments)
        if (folder / "result.json").exists():
            status = _show(folder, *_read_finished(folder), as_json=arguments.json)
            return tracked([folder], arguments) or status
        plan = Plan.load(folder / "plan.toml", trust=arguments.trust)
        if (folder / "federation.toml").exists():
            # It would continue with rows of this machine, in the ledger of the sites' rows.
            raise ConfigError(f"{folder} is a deployment; {how_to_resume(folder)}")
    else:
        plan = make_plan(arguments)
        folder = Path(arguments.out) if arguments.out else _new_folder(plan)
        if (folder / "plan.toml").exists():
            raise FileExistsError(
                f"{folder} already holds a run; resume it with `coterie run --resume {folder}`, "
                "or choose another --out"
            )
    with stoppable(partial(_last_line, folder)):
        return _run_one(plan, folder, arguments, ranks)


def _check_one_run(arguments: argparse.Namespace) -> None:
    """Raise ValueError for several runs in one command."""
    members = arguments.resume is not None and (Path(arguments.resume) / MEMBERS).exists()
    if members or isinstance(arguments.epsilon, tuple):
        raise ValueError(
            "--epsilon with several values makes several runs, and torchrun shares one run among "
            "processes: give one value, or start coterie without torchrun"
        )


def _run_one(plan: Plan, folder: Path, arguments: argparse.Namespace, ranks: Ranks) -> int:
    try:
        with Watch(quiet=arguments.quiet) as watch:
            scoring = None if arguments.json else watch.scoring
            result = execute(
                plan,
                folder=folder,
                observer=watch.open,
                scoring=scoring,
                budget=counted(),
                anyway=arguments.anyway or arguments.resume is not None,
                ranks=ranks,
            )
    except RankError as error:
        print(f"coterie run: {error}; {_last_line(folder)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(_last_line(folder), file=sys.stderr)
        return stop_status()
    stated = result.outcome.guarantee
    status = _show(folder, result.summary, stated, as_json=arguments.json, shown=watch.shown)
    return tracked([folder], arguments) or status


def _last_line(folder: Path) -> str:
    """Return how to resume an interrupted run, as text."""
    begun = (folder / "plan.toml").exists() or (folder / MEMBERS).exists()
    how = f"resume with: coterie run --resume {folder}" if begun else "nothing was spent"
    return f"interrupted; {how}"


def _several(arguments: argparse.Namespace) -> int:
    """Train once per epsilon, and also locally and without privacy."""
    budgets = sorted(set(arguments.epsilon))
    first = argparse.Namespace(**{**vars(arguments), "epsilon": budgets[0]})
    base = make_plan(first)
    folder = Path(arguments.out) if arguments.out else _new_folder(base)
    if (folder / MEMBERS).exists() or (folder / "plan.toml").exists():
        raise FileExistsError(
            f"{folder} already holds runs; resume with `coterie run --resume {folder}`, or choose "
            "another --out"
        )
    free = Privacy(epsilon=math.inf, delta=base.privacy.delta, relation=base.privacy.relation)
    plans = {
        f"epsilon-{e:g}": replace(base, privacy=replace(base.privacy, epsilon=e)) for e in budgets
    }
    known = _known_method(base)
    local = known.baselines().local or Local(model=base.method.model)
    last = known.baselines().centralised or known
    members = {"local": replace(base, method=local, privacy=free, rounds=None), **plans}
    if math.inf not in budgets:
        members[_BASELINE] = replace(base, method=last, privacy=free)
    _check_totals({folder / name: plan for name, plan in members.items()}, anyway=arguments.anyway)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / MEMBERS,
        json.dumps({name: to_table(plan) for name, plan in members.items()}).encode(),
    )
    return _run_members(folder, arguments)


def _check_totals(plans: Mapping[Path, Plan], *, anyway: bool) -> None:
    """Raise ValueError if runs that are not begun would exceed a total, all of them together."""
    begun = {folder for folder in plans if (folder / "plan.toml").exists()}
    new = [plan for folder, plan in plans.items() if plan.private and folder not in begun]
    if new and counted().has_totals:
        counted().check(*foresee(new, anyway=anyway))


def _run_members(folder: Path, arguments: argparse.Namespace) -> int:
    """Run the members that are not finished, then show all of them."""
    tables = _read_members(folder / MEMBERS, trust=arguments.trust or arguments.resume is None)
    if arguments.resume is not None:
        with naming(folder / MEMBERS):
            plans = {folder / name: Plan.from_table(table) for name, table in tables.items()}
        _check_totals(plans, anyway=arguments.anyway)
    shown: set[str] = set()
    try:
        with stoppable(partial(_last_line, folder)):
            done = [
                folder / name
                for name, table in tables.items()
                if _train(folder / name, table, arguments, shown)
            ]
    except KeyboardInterrupt:
        print(_last_line(folder), file=sys.stderr)
        return stop_status()
    summaries, guarantees = zip(*(_read_finished(part) for part in done), strict=True)
    status, report = _report(folder, done)
    spent = [g for g in guarantees if g.events and g.epsilon < math.inf]
    if arguments.json:
        together = add_up(spent) if spent else None
        print(json.dumps({"runs": summaries, "together": together}, allow_nan=False))
        return tracked(done, arguments, group=folder) or status
    _show_tables(summaries)
    _print_statements(summaries, guarantees)
    _print_caveats(summaries, shown)
    _print_tuning(summaries[0])
    if spent:
        print(f"\n{spent_together(spent)}")
    print(f"run folder {folder}{report}")
    return tracked(done, arguments, group=folder) or status


def _read_members(path: Path, *, trust: bool) -> dict[str, dict[str, Any]]:
    """Return the plan of each member, by name; raise ConfigError if the file is damaged."""
    with naming(path):
        tables = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            raise ConfigError("damaged: expected the plan of each run; restore it")
        for table in () if trust else tables.values():
            refuse_code(table, path)
    return tables


def _train(
    part: Path, table: Mapping[str, Any], arguments: argparse.Namespace, shown: set[str]
) -> bool:
    """Run a member unless it is finished; return whether it is. Add to `shown` what is printed."""
    if (part / "result.json").exists():
        return True
    begun = (part / "plan.toml").exists()  # such a run keeps its method
    with naming(part.parent / MEMBERS):
        plan = Plan.load(part / "plan.toml") if begun else Plan.from_table(table)
    if not arguments.quiet:
        print(f"training {plan.method.kind} ({part.name}) ...", file=sys.stderr)
    try:
        with Watch(quiet=arguments.quiet, brief=True) as watch:
            scoring = None if arguments.json else watch.scoring
            execute(
                plan,
                folder=part,
                observer=watch.open,
                scoring=scoring,
                budget=counted(),
                anyway=arguments.anyway or begun,
            )
        shown |= watch.shown
    except (ValueError, RuntimeError) as error:
        if part.name != _BASELINE:
            raise
        # The private runs have spent their budget: show their table in any case.
        print(f"no run without privacy to compare with: {error}", file=sys.stderr)
        return False
    return True


def _read_finished(folder: Path) -> tuple[dict[str, Any], Guarantee]:
    try:
        summary, stated, guarantee = read_summary(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; or remove result.json and resume") from error
    return summary | promised(guarantee, stated.get("selection")) | {"run": str(folder)}, guarantee


def _show(
    folder: Path,
    summary: Mapping[str, Any],
    guarantee: Guarantee,
    *,
    as_json: bool,
    shown: Collection[str] = (),
) -> int:
    """Write the report and print the result, without the lines that were shown before the run."""
    status, report = _report(folder, [folder])
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return status
    _show_tables([summary])
    print(charged_statement(guarantee, summary.get("selection")))
    _print_caveats([summary], shown)
    _print_tuning(summary)
    _print_data(summary.get("data_used") or {})
    for notice in summary.get("notices") or ():
        print(f"Note for the data's owner, not covered by epsilon: {notice}.")
    print(f"\nrun folder {folder}{report}")
    return status


def _report(folder: Path, runs: Sequence[Path], before: str = ", report ") -> tuple[int, str]:
    """Write the report of finished runs; return the exit status, and text that names the page."""
    try:
        return 0, f"{before}{write_report(runs, folder / 'report.html')}"
    except OSError as error:
        print(
            f"{folder}: the run is finished and saved, but its report cannot be written "
            f"({error.strerror or error}); free some space, then: coterie report {folder}",
            file=sys.stderr,
        )
        return 2, ""


def _show_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    console = Console()
    for shown in terminal(rows):
        console.print(shown)


def _print_statements(rows: Sequence[Mapping[str, Any]], stated: Sequence[Guarantee]) -> None:
    """Print the guarantees of private runs: what differs behind the names of its runs."""
    users: dict[str, list[str]] = {}
    lines = [
        (name_of(row, rows), one.statement().splitlines())
        for row, one in zip(rows, stated, strict=True)
        if one.events and (one.epsilon < math.inf or one.claimed_epsilon is not None)
    ]
    for place in range(max((len(found) for _, found in lines), default=0)):
        for name, found in lines:
            if place < len(found):
                users.setdefault(found[place], []).append(name)
    for line, names in users.items():
        print(line if len(names) == len(lines) else f"{', '.join(names)}: {line}")


def _print_caveats(rows: Sequence[Mapping[str, Any]], shown: Collection[str] = ()) -> None:
    """Print caveats of the guarantee, and reasons of the plan that are not shown yet, once each."""
    users: dict[str, list[str]] = {}
    for row in rows:
        reasons = (*_prior(row), *(row.get("explained") or ()))
        new = (reason for reason in reasons if reason not in shown)
        for caveat in (*(row.get("caveats") or ()), *new):
            users.setdefault(caveat, []).append(name_of(row, rows))
    for caveat, methods in users.items():
        print(f"{', '.join(dict.fromkeys(methods))}: {caveat}")


def _prior(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the verdict before the run, and why its method was chosen."""
    if (verdict := row.get("verdict")) is not None:
        yield verdict_line(verdict["verdict"], verdict["words"])
    if row.get("chosen"):
        yield chosen_line(row["chosen"])


def _print_data(used: Mapping[str, Any]) -> None:
    """Print what was left out of the data."""
    left_out = used.get("columns_left_out")
    lines = [f"columns left out: {', '.join(left_out)}"] if left_out else []
    for line in (*lines, *(used.get("notes") or ())):
        print(f"Data: {line}.")


def _print_tuning(summary: Mapping[str, Any]) -> None:
    if summary.get("tuning", "none") != "none":
        print(f"Tuning: {summary['tuning']}.")


def demo(arguments: argparse.Namespace) -> int:
    """Carry out `coterie demo`: methods on the data; with districts, the other systems too."""
    out = Path(arguments.out) if arguments.out else new_folder("demo")
    results, shown = [], set[str]()
    given = {"name": arguments.data}
    plans = {kind: _demo_plan({"kind": kind}, given, arguments) for kind in _DEMO}
    if arguments.data == "districts":
        plans |= {one["kind"]: _demo_plan(one, data, arguments) for one, data in _SYSTEMS}
    _check_totals({out / method: plan for method, plan in plans.items()}, anyway=True)
    for method, plan in plans.items():
        print(f"training {method} on {plan.data.name} ...", file=sys.stderr)
        with Watch(quiet=False) as watch:
            results.append(
                execute(
                    plan,
                    folder=out / method,
                    observer=watch.open,
                    scoring=watch.scoring,
                    budget=counted(),
                )
            )
        shown |= watch.shown
    status, report = _report(out, [out / method for method in plans], "\nreport: ")
    summaries = [result.summary for result in results]
    _show_tables(summaries)
    guarantees = [result.outcome.guarantee for result in results]
    _print_statements(summaries, guarantees)
    _print_caveats(summaries, shown)
    print(f"\n{spent_together(guarantees[: len(_DEMO)])}{report}")
    return status


def _demo_plan(
    method: Mapping[str, Any], data: Mapping[str, Any], arguments: argparse.Namespace
) -> Plan:
    table: dict[str, Any] = {
        "data": dict(data),
        "method": method,
        "privacy": {"epsilon": arguments.epsilon},
    }
    if arguments.simulation_seed is not None:
        table["simulation_seed"] = arguments.simulation_seed
        table["data"]["split_seed"] = arguments.simulation_seed
    return Plan.from_table(table)


def _known_method(plan: Plan) -> Method:
    """Return the method that will run, as far as that is known before data is read."""
    method = plan.method
    found = default_method(method, plan.privacy) if isinstance(method, Auto) else None
    return found or method


def _new_folder(plan: Plan) -> Path:
    return new_folder(f"{Path(plan.data.name).stem}-{_known_method(plan).kind}")
