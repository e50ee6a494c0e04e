"""`coterie budget`: what private runs have spent on the same clients, and a declared total."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import JSON, Commands, check_run, command, print_json

if TYPE_CHECKING:
    from coterie.runs.budget import Budget, Contents

_FLAGS = {
    "--total NUMBER:float": "declare the total epsilon of these clients; inf for none",
    "--run RUN": "only the clients of this run folder",
    "--plan FILE": "only the clients of this plan's data, also before its first run",
    "--data-fingerprint HEX": "only these clients: their fingerprint, or how it begins",
    "--population NAME": "with --run: whose clients these are, to tell equal names apart",
    **JSON,
}
_MORE = """\
Every private run is entered in a register before its first release, with its planned guarantee:
those of run, demo, tune --charge and compare --repeats, of coterie.execute and coterie.run, and of
sites of a deployment. This command adds up the runs on the same clients: for the client that spent
most, epsilon at most, with delta, against other clients who observe all of its runs; and mu, where
all of them are one Gaussian release. Runs with the same sampling and relation are composed; others
are added (a sum over both relations holds under zero_out). With a declared total, a run that would
exceed it is refused. What is spent stays spent: no run can be removed.

A client is known by its name. Other columns, rows, splits, copies or formats of the data change
nothing. NOT recognised: clients under new names, another client column, a person at several
clients, other users and machines. Clients of other data with equal names count as the same, unless
--population says whose they are. Not entered: runs that promise nothing (epsilon inf, simulation
seeds, tune without --charge, audits, methods without releases), estimators and coterie.simulate.

The register is one private file: $COTERIE_BUDGET, or coterie/budget.json in $XDG_DATA_HOME
(default ~/.local/share).

--json prints one object: register, data (fingerprint, data, population, clients, runs: run, data,
fingerprint, method, epsilon, delta, relation, date; epsilon, delta, mu, total, remaining)."""
_HEAD = ("data", "fingerprint", "clients", "runs", "mu", "epsilon", "delta", "total", "remaining")
_SHOWN = 12


def add(commands: Commands) -> None:
    """Add `budget`."""
    command(
        commands,
        "budget",
        "add up what private runs spent on the same clients; declare a total for them",
        "coterie budget --total 3 --run runs/exam-pmtl-20260101-120000",
        _MORE,
        flags=_FLAGS,
        action=budget,
    )


def counted() -> "Budget":
    """Return the user's register, for a run; what it tells goes to stderr."""
    from coterie.runs.budget import Budget

    return Budget(tell=lambda text: print(text, file=sys.stderr))


def budget(arguments: argparse.Namespace) -> int:
    """Run `coterie budget`."""
    _check(arguments)
    from coterie.runs.budget import read_register, register_path

    path = register_path()
    chosen = _chosen(arguments, path)
    known = read_register(path)
    if chosen is None:
        shown = known.fingerprints
    else:
        shown = [name for name in known.fingerprints if name == chosen]
    rows = [_row(known, name) for name in shown]
    if arguments.json:
        print_json({"register": str(path), "data": rows})
    elif not rows:
        which = "" if chosen is None else " on these clients"
        print(f"{path}: no private runs{which} and no total")
    else:
        _show(path, rows, whole=chosen is not None)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together."""
    named = [arguments.run, arguments.plan, arguments.data_fingerprint]
    given = len(named) - named.count(None)
    if given > 1:
        raise ValueError("--run, --plan and --data-fingerprint name the clients: give one of them")
    if arguments.total is not None and not given:
        raise ValueError("--total: of which clients? add --run, --plan or --data-fingerprint")
    if arguments.population is not None and arguments.run is None:
        raise ValueError(
            "--population: of which run? add --run; a new run has its own --population"
        )


def _chosen(arguments: argparse.Namespace, path: Path) -> str | None:
    """Declare what is declared; return the fingerprint that was asked for, if any."""
    from coterie.runs.budget import declare_population, declare_total, read_register

    known, total, name, data = read_register(path), arguments.total, None, ""
    if arguments.plan is not None:
        clients, data = _read_plan(Path(arguments.plan))
        if total is not None:
            return declare_total(path, clients, total, data)
        return known.fingerprint(known.group(*clients)) if known.secret else ""
    if arguments.run is not None:
        run = check_run(arguments.run)
        name = known.entry_of(run).fingerprint
        if arguments.population is not None:
            name = declare_population(path, run, arguments.population)
    elif arguments.data_fingerprint is not None:
        name = _of_fingerprint(known, arguments.data_fingerprint)
    if name is not None and total is not None:
        declare_total(path, name, total, _name(read_register(path), name))
    return name


def _of_fingerprint(known: "Contents", given: str) -> str:
    """Return the fingerprint that begins like this."""
    start = given.lower()
    found = [one for one in known.fingerprints if one.startswith(start)] if start else []
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} begin with it" if found else "not in the register"
    raise ValueError(
        f"--data-fingerprint {given}: {what}; expected one that `coterie budget` shows (--plan "
        "names clients without runs)"
    )


def _read_plan(path: Path) -> tuple[tuple[Any, str], str]:
    """Return the clients of a plan's data with their population, and the name of the data."""
    from coterie.core.config import from_table, naming, read_toml
    from coterie.data.config import DataConfig
    from coterie.runs.budget import population_of

    with naming(path):
        data = from_table(DataConfig, read_toml(path).get("data", {}), "plan.data")
    return (data.read().names, population_of(data)), data.name


def _name(known: "Contents", fingerprint: str) -> str:
    """Return the name of some data: that of its last run, or that it was declared with."""
    runs = [entry.data for entry in known.entries if entry.fingerprint == fingerprint]
    return runs[-1] if runs else known.totals[fingerprint].data


def _row(known: "Contents", fingerprint: str) -> dict[str, Any]:
    """Return what is known of some clients, as JSON."""
    from coterie.runs.budget import remaining

    group, total = known.groups[fingerprint], known.totals.get(fingerprint)
    spent = known.account(group, known.delta(fingerprint))
    return {
        "fingerprint": fingerprint,
        "data": _name(known, fingerprint),
        "population": group.population,
        "clients": len(group.keys),
        "runs": [
            {
                "run": entry.run,
                "data": entry.data,
                "fingerprint": entry.fingerprint,
                "method": entry.method,
                "epsilon": entry.guarantee.epsilon,
                "delta": entry.guarantee.delta,
                "relation": entry.guarantee.relation,
                "date": entry.date,
            }
            for entry in spent.entries
        ],
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "mu": spent.mu,
        "total": None if total is None else total.epsilon,
        "remaining": None if total is None else remaining(total.epsilon, spent.epsilon),
    }


def _show(path: Path, rows: list[dict[str, Any]], *, whole: bool) -> None:
    """Print a table of the clients, and of the runs on them if some were asked for."""
    for line in _table([_HEAD, *(_cells(row) for row in rows)]):
        print(line)
    for row in rows if whole else ():
        print(f"\nfingerprint {row['fingerprint']}")
        if row["population"]:
            print(f"population {row['population']}")
        for line in _table([_run_cells(run) for run in row["runs"]]):
            print(line)
    print(
        "\nEpsilon is an upper bound for each client, against other clients who observe all of its "
        f"runs.\nClients are known by their names (coterie budget --help).\nregister {path}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from coterie.privacy.guarantee import round_up, show_delta
    from coterie.runs.budget import show_remaining

    total, epsilon, mu = row["total"], row["epsilon"], row["mu"]
    left = ("none", "-") if total is None else (f"{total:g}", show_remaining(total, epsilon))
    name, clients, runs = row["data"] or "-", str(row["clients"]), str(len(row["runs"]))
    cost = "-" if mu is None else round_up(mu), round_up(epsilon), show_delta(row["delta"])
    return (name, row["fingerprint"][:_SHOWN], clients, runs, *cost, *left)


def _run_cells(run: dict[str, Any]) -> tuple[str, ...]:
    from coterie.privacy.guarantee import round_up, show_delta

    cost = f"epsilon {round_up(run['epsilon'])}", f"delta {show_delta(run['delta'])}"
    return (run["date"][:16], run["method"], *cost, run["relation"], run["run"] or "(in memory)")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return one line per row, with aligned columns."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
