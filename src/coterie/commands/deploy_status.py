"""`coterie deploy status`: rounds, answers and epsilon of a deployment; it only looks."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.commands.options import Commands, _command

if TYPE_CHECKING:
    from rich.console import RenderableType

_MORE = """\
Of a coordinator's run folder: its state (running, stopped, failed, finished), rounds, answers,
sites, epsilon spent and planned by view, and what is needed to go on. Of a site's folder: the runs
that it joined, how far they are settled, models, and what its clients have spent in all of them.
Reads only, while the run goes on too. Who answered a round is private: keep what is shown as you
keep the folder.

--json prints one object. Coordinator: kind, folder, run, state, trust, began, last_word, rounds,
done, charged, released, ledger, epsilon (spent, planned, delta, relation, simulation), by_round,
sites, strangers, node_errors, taken_home, failure, needed, private. Site: kind, folder, site, runs,
errors, worker, spent."""
_EVERY = 2.0
_SHOWN = 12
VIEWS = {
    "other_clients": "the other clients, even all together",
    "coordinator": "the coordinator",
    "outsider": "an outsider who sees the posts alone",
    "coalition_of_all_others": "a coalition of all others",
}
_COUNTED = {
    "asked": "clients asked",
    "answered": "clients answered",
    "refused": "answers refused",
    "failed": "sites failed",
    "silent": "sites silent",
    "scaled": "sums scaled",
    "zeroed": "sums zeroed",
}
_HUES = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow"}


def add_status(commands: Commands) -> None:
    """Add `status`."""
    parser = _command(
        commands,
        "status",
        "rounds, answers and epsilon of a deployment, at the coordinator or at a site",
        "coterie deploy status runs/hospitals",
        _MORE,
    )
    parser.add_argument("folder", metavar="FOLDER", help="of a coordinator's run, or of a site")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="look again until the run has ended")
    parser.set_defaults(action=status)


def status(arguments: argparse.Namespace) -> int:
    """Carry out `coterie deploy status`."""
    from coterie.deployment.status import status_of

    folder = Path(arguments.folder)
    if arguments.json and arguments.watch:
        raise ValueError("--watch is for people, and --json prints one object: give one of them")
    told = status_of(folder)
    if arguments.json:
        print(json.dumps(told, allow_nan=False))
    elif arguments.watch:
        _watch(folder, told)
    else:
        _console().print(rendered(told))
    return 0


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False)


def _watch(folder: Path, told: dict[str, Any]) -> None:
    """Show a run until it has ended; a site, until it is interrupted."""
    from rich.live import Live

    from coterie.deployment.status import status_of

    with Live(rendered(told), console=_console(), auto_refresh=False) as live:
        try:
            while told.get("state", "running") == "running":
                time.sleep(_EVERY)
                told = status_of(folder)
                live.update(rendered(told), refresh=True)
        except KeyboardInterrupt:
            print("stopped looking; the run goes on", file=sys.stderr)


def rendered(told: Mapping[str, Any]) -> "RenderableType":
    """Show a status in a terminal."""
    from rich.console import Group

    return Group(*(_site(told) if told["kind"] == "site" else _run(told)))


def _run(told: Mapping[str, Any]) -> Iterator["RenderableType"]:
    from rich.text import Text

    state = told["state"]
    head = Text.assemble(
        (state, f"bold {_HUES[state]}"),
        f": {told['done']} of {told['rounds']} rounds are posted; {told['charged']} charged, "
        f"{told['released']} released; trust {told['trust']}",
    )
    yield head
    if told["ledger"] != "sound":
        yield Text(f"the ledger is {told['ledger']}", style="bold red")
    yield _epsilons(told["epsilon"])
    if told["by_round"]:
        yield _rounds(told["by_round"])
    yield _sites(told["sites"])
    if told["strangers"]:
        yield Text(f"{told['strangers']} answers of nodes that are not in the federation")
    if told["node_errors"]:
        yield Text(
            f"nodes answered with an error {told['node_errors']} times before they were known as "
            "sites: look at worker.log at the sites that were not met"
        )
    yield Text(f"needed: {told['needed']}")
    yield Text(f"private: {told['private']}", style="dim")


def _epsilons(told: Mapping[str, Any]) -> "RenderableType":
    from rich.table import Table

    mark = "  SIMULATION: known seed, protects nobody" if told["simulation"] else ""
    title = f"epsilon at delta {told['delta']:.3g}, {told['relation']}{mark}"
    table = Table(title=title, title_justify="left")
    table.add_column("against")
    for name in ("spent so far", "planned"):
        table.add_column(name, justify="right")
    for view, planned in told["planned"].items():
        table.add_row(VIEWS.get(view, view), _bound(told["spent"].get(view)), _bound(planned))
    return table


def _bound(epsilon: float | str | None) -> str:
    from coterie.privacy.guarantee import round_up

    return "-" if epsilon is None else round_up(float(epsilon))


def _rounds(rounds: list[dict[str, Any]]) -> "RenderableType":
    """Show the last rounds; columns of trouble only where there was some."""
    from rich.table import Table

    trouble = ("refused", "failed", "silent", "scaled", "zeroed", "void", "asked_again")
    shown = [name for name in trouble if any(one.get(name) for one in rounds)]
    title = "rounds" if len(rounds) <= _SHOWN else f"the last {_SHOWN} of {len(rounds)} rounds"
    table = Table(title=title, title_justify="left")
    for name in ("round", "asked", "answered", *shown):
        table.add_column(_COUNTED.get(name, name.replace("_", " ")), justify="right")
    for one in rounds[-_SHOWN:]:
        counts = [str(one.get(name) or 0) for name in ("asked", "answered", *shown)]
        table.add_row(f"{one['round']}{'' if one['posted'] else ' (not posted)'}", *counts)
    return table


def _sites(sites: Mapping[str, Mapping[str, Any]]) -> "RenderableType":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="sites", title_justify="left")
    for name in ("site", "clients", "last met", "last round that counted", "trouble"):
        table.add_column(name, justify="right" if name == "clients" else "left")
    for name, one in sites.items():
        kinds = ("refused", "declined", "cut", "errors")
        counts = ", ".join(f"{one[kind]} {kind}" for kind in kinds if one[kind])
        last = one["last_trouble"]
        why = f"{counts}: {last['why']}" if last else counts
        met, counted = one["met"], one["counted"]
        table.add_row(
            escape(name),
            str(one["clients"]),
            "never" if met is None else met[:19].replace("T", " "),
            "none yet" if counted is None else str(counted),
            escape(why),
        )
    return table


def _site(told: Mapping[str, Any]) -> Iterator["RenderableType"]:
    from rich.table import Table
    from rich.text import Text

    runs = told["runs"]
    named = f"site {told['site']}" if told["site"] else "site"
    joined = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    yield Text(f"{named}: {joined} joined; {told['errors']} lines in errors.log")
    if told["worker"]:
        yield Text(f"worker.log ends: {told['worker']}")
    if runs:
        table = Table()
        for name in ("run", "joined", "settled", "staged", "models", "epsilon", "delta"):
            side: Any = "left" if name in ("run", "joined") else "right"
            table.add_column(name, justify=side, no_wrap=name in ("run", "settled"))
        for one in runs:
            table.add_row(
                one["run"],
                (one["joined"] or "-").replace("T", " "),
                f"{one['settled']} of {'?' if one['rounds'] is None else one['rounds']}",
                "-" if one["staged"] is None else str(one["staged"]),
                str(one["models"]) if one["finished"] else "not yet",
                _bound(one["epsilon"]) + (" SIMULATION" if one["simulation"] else ""),
                "-" if one["delta"] is None else f"{one['delta']:.3g}",
            )
        yield table
    yield Text(_spent(told["spent"]))


def _spent(spent: Mapping[str, Any]) -> str:
    told = f"spent of its clients: epsilon {_bound(spent['epsilon'])}, delta {spent['delta']:.3g}"
    told += f" ({spent['words']})"
    if spent["simulations"]:
        told += (
            f"; not in it: {spent['simulations']} with noise from a known seed, which protects "
            "nobody: of private rows such a run has no bound"
        )
    if spent["unknown"]:
        told += f"; {spent['unknown']} runs of an earlier version did not note what they spend"
    return told
