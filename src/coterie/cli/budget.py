"""`coterie budget`: what private runs have spent on the same data, and a declared total."""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import JSON, Commands, check_run, command, print_json

if TYPE_CHECKING:
    from coterie.run.budget import Budget, Contents

_FLAGS = {
    "--total NUMBER:float": "declare the total epsilon of the data; inf for none",
    "--data-fingerprint HEX": "only this data: its fingerprint, or how it begins",
    "--run RUN": "only the data of this run folder",
    **JSON,
}
_MORE = """\
`coterie run` and `coterie demo` enter every private run in a register before its first release,
with its planned guarantee. This command adds up the runs on the same data: epsilon at most, with
delta, for other clients who observe all of them. Runs with the same sampling and relation are
composed; others are added (a sum over both relations holds under zero_out). With a declared total,
`coterie run` refuses a run that would exceed it at the delta shown. What is spent stays spent: no
run can be removed.

Data is the same if the training rows are the same. Files that overlap, other splits, and other
choices of columns, rows or clients are NOT recognised. Not entered: runs that promise nothing
(epsilon inf, simulation seeds, methods without releases), runs of the library, of `coterie tune`
and `coterie compare`, and deployments.

The register is one private file: $COTERIE_BUDGET, or coterie/budget.json in $XDG_DATA_HOME
(default ~/.local/share).

--json prints one object: register, data (fingerprint, data, runs: run, method, epsilon, delta,
relation, date; epsilon, delta, total, remaining)."""
_HEAD = ("data", "fingerprint", "runs", "epsilon", "delta", "total", "remaining")
_WHOLE, _SHOWN = 32, 12


def add(commands: Commands) -> None:
    """Add `budget`."""
    command(
        commands,
        "budget",
        "add up what private runs spent on the same data; declare a total for it",
        "coterie budget --total 3 --run runs/exam-pmtl-20260101-120000",
        _MORE,
        flags=_FLAGS,
        action=budget,
    )


def counted() -> "Budget":
    """Return the user's register, for a run; what it tells goes to stderr."""
    from coterie.run.budget import Budget, register_path

    return Budget(register_path(), lambda text: print(text, file=sys.stderr))


def budget(arguments: argparse.Namespace) -> int:
    """Run `coterie budget`."""
    if arguments.run is not None and arguments.data_fingerprint is not None:
        raise ValueError("--run and --data-fingerprint both name the data: give one of them")
    if arguments.total is not None and arguments.run is None and arguments.data_fingerprint is None:
        raise ValueError("--total: of which data? add --run RUN or --data-fingerprint HEX")
    from coterie.run.budget import declare_total, read_register, register_path

    path = register_path()
    known = read_register(path)
    chosen, name = _chosen(arguments, known)
    if arguments.total is not None and chosen is not None:
        declare_total(path, chosen, arguments.total, name)
        known = read_register(path)
    rows = [_row(known, one) for one in known.fingerprints if chosen in (None, one)]
    if arguments.json:
        print_json({"register": str(path), "data": rows})
    elif not rows:
        which = "" if chosen is None else " on this data"
        print(f"{path}: no private runs{which} and no total")
    else:
        _show(path, rows, whole=chosen is not None)
    return 0


def _chosen(arguments: argparse.Namespace, known: "Contents") -> tuple[str | None, str]:
    """Return the fingerprint that was asked for, if any, and the name of its data."""
    if arguments.run is not None:
        return _read_run(check_run(arguments.run))
    if arguments.data_fingerprint is None:
        return None, ""
    given = arguments.data_fingerprint.lower()
    found = [one for one in known.fingerprints if one.startswith(given)] if given else []
    if len(found) == 1:
        return found[0], _name(known, found[0])
    if re.fullmatch(f"[0-9a-f]{{{_WHOLE}}}", given):
        return given, ""  # of data that no run has used yet
    what = f"{len(found)} data begin with it" if found else "not in the register"
    raise ValueError(
        f"--data-fingerprint {arguments.data_fingerprint}: {what}; expected one that `coterie "
        f"budget` shows, or all {_WHOLE} hexadecimal digits"
    )


def _read_run(folder: Path) -> tuple[str, str]:
    """Return the fingerprint and the name of a run's data; raise ValueError without them."""
    import json

    from coterie.core.config import read_toml

    path = folder / "data.json"
    try:
        fingerprint = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        name = read_toml(folder / "plan.toml").get("data", {}).get("name", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: the fingerprint of its data cannot be read ({error}); expected a run "
            "folder of this machine with plan.toml and data.json"
        ) from error
    return str(fingerprint), str(name)


def _name(known: "Contents", fingerprint: str) -> str:
    """Return the name of some data: that of its last run, or that it was declared with."""
    runs = known.on(fingerprint)
    return runs[-1].data if runs else known.totals[fingerprint].data


def _row(known: "Contents", fingerprint: str) -> dict[str, Any]:
    """Return what is known of some data, as JSON."""
    from coterie.run.budget import remaining, spent

    entries, total = known.on(fingerprint), known.totals.get(fingerprint)
    epsilon, delta = spent(entries)
    return {
        "fingerprint": fingerprint,
        "data": _name(known, fingerprint),
        "runs": [
            {
                "run": entry.run,
                "method": entry.method,
                "epsilon": entry.guarantee.epsilon,
                "delta": entry.guarantee.delta,
                "relation": entry.guarantee.relation,
                "date": entry.date,
            }
            for entry in entries
        ],
        "epsilon": epsilon,
        "delta": delta,
        "total": None if total is None else total.epsilon,
        "remaining": None if total is None else remaining(total.epsilon, epsilon),
    }


def _show(path: Path, rows: list[dict[str, Any]], *, whole: bool) -> None:
    """Print a table of the data, and of the runs on it if one was asked for."""
    for line in _table([_HEAD, *(_cells(row) for row in rows)]):
        print(line)
    for row in rows if whole else ():
        print(f"\nfingerprint {row['fingerprint']}")
        for line in _table([_run_cells(run) for run in row["runs"]]):
            print(line)
    print(
        "\nEpsilon is an upper bound, for other clients who observe all of these runs. Overlapping "
        f"data is not recognised.\nregister {path}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from coterie.privacy.guarantee import round_up
    from coterie.run.budget import show_remaining

    total, epsilon = row["total"], row["epsilon"]
    left = ("none", "-") if total is None else (f"{total:g}", show_remaining(total, epsilon))
    name, runs = row["data"] or "-", str(len(row["runs"]))
    cost = round_up(epsilon), f"{row['delta']:.3g}"
    return (name, row["fingerprint"][:_SHOWN], runs, *cost, *left)


def _run_cells(run: dict[str, Any]) -> tuple[str, ...]:
    from coterie.privacy.guarantee import round_up

    cost = f"epsilon {round_up(run['epsilon'])}", f"delta {run['delta']:.3g}"
    return (run["date"][:16], run["method"], *cost, run["relation"], run["run"])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return one line per row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
