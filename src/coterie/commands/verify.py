"""`coterie verify`: recompute what a finished run promises, from its certificate alone."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.commands.options import Commands, _command

if TYPE_CHECKING:
    from coterie.verification.checks import Verdict

_CERTIFICATE = "guarantee.json"
_MORE = """\
Reads guarantee.json with code that shares nothing with training: computes every epsilon anew from
the events alone, compares events with the plan and with what the ledger was charged, hashes every
post, and counts. Files that are private (models/, log.jsonl) may be missing: what is published can
be checked without them. A folder that holds several runs is gone through.

A stated epsilon may lie 0.05 % below the one recomputed and 0.5 % above it (rounding, on a grid).
Exit status: 0 if every check holds, 1 if one fails or could not be made, 2 if there is nothing to
check. A certificate is not signed: who may have made a whole folder up must be trusted by other
means.

--json prints one object: verified, runs (run, verified, checks: name, status, found, expected)."""


def add(commands: Commands) -> None:
    """Add `verify`."""
    parser = _command(
        commands,
        "verify",
        "recompute a finished run's guarantee; check its posts, counts and hashes",
        "coterie verify runs/exam-pmtl-20260101-120000",
        _MORE,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or of several")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=verify)


def verify(arguments: argparse.Namespace) -> int:
    """Carry out `coterie verify`."""
    import json

    from coterie.verification.checks import verify as check

    folders = [part for run in arguments.runs for part in _finished(Path(run))]
    verdicts = [check(folder) for folder in folders]
    good = all(verdict.verified for verdict in verdicts)
    if arguments.json:
        found = {"verified": good, "runs": [verdict.to_json() for verdict in verdicts]}
        print(json.dumps(found, allow_nan=False))
    else:
        for verdict in verdicts:
            _show(verdict, whole=len(verdicts) == 1)
    return 0 if good else 1


def _finished(folder: Path) -> list[Path]:
    """Give the finished runs of a folder of several, or the folder itself."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give the folder of a finished run")
    if (folder / _CERTIFICATE).exists() or (folder / "plan.toml").exists():
        return [folder]
    inside = sorted(path.parent for path in folder.rglob(_CERTIFICATE))
    return inside or [folder]


def _show(verdict: "Verdict", *, whole: bool) -> None:
    """Print the checks of a run, or only those that do not hold."""
    for check in verdict.checks:
        good = check.status == "ok"
        if good and not whole:
            continue
        print(f"{check.status:<15} {check.name:<42} {check.found}".rstrip())
        if not good and check.expected:
            print(f"{'':<15} {'':<42} expected: {check.expected}")
    told = "verified" if verdict.verified else "NOT VERIFIED"
    absent = sum(check.status == "not here" for check in verdict.checks)
    apart = f", {absent} of private files that are not here" if absent else ""
    print(f"{verdict.folder}: {told} ({len(verdict.checks)} checks{apart})")
