"""`coterie verify`: recompute the guarantee of a finished run from its certificate."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import JSON, Commands, command
from coterie.core.files import refuse_special

if TYPE_CHECKING:
    from coterie.verification import Verdict

_CERTIFICATE, _SELECTION = "guarantee.json", "selection.json"
_OF_A_RUN = (_CERTIFICATE, "plan.toml", "ledger.jsonl")
_MORE = """\
Reads guarantee.json with code that shares nothing with training. Recomputes every epsilon only from
the events, compares events with the plan and with the charges of the ledger, hashes every release
and checks that its numbers lie on the stated grid, and compares all counts. Private files (models/,
log.jsonl) may be missing, so a published run can be checked. In a folder of several runs every run
is checked, and a run without a certificate fails. For a selection (selection.json) both epsilons,
the draw and the scores are checked too.

A stated epsilon may be 0.05 % below the recomputed one and 0.5 % above it (rounding on a grid).
Exit status: 0 if every check holds, 1 if one fails or cannot be made, 2 if there is nothing to
check. shared.npz is not checked against the releases. With --key every certificate has to be signed
with that key (`coterie sign`); without it a signature is named and not checked.

--json prints one object: verified, runs (run, verified, checks: name, status, found, expected;
not_checked)."""


def add(commands: Commands) -> None:
    """Add `verify`."""
    parser = command(
        commands,
        "verify",
        "recompute a finished run's guarantee; check its releases, counts and hashes",
        "coterie verify runs/exam-pmtl-20260101-120000",
        _MORE,
        flags={
            "--key PUBLIC": "the signer's public key: a file (PEM, OpenSSH) or 64 hexadecimal "
            "digits; what is not signed with it fails",
            **JSON,
        },
        action=verify,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of one or more runs")


def verify(arguments: argparse.Namespace) -> int:
    """Run `coterie verify`."""
    import json

    from coterie.verification.signature import read_public

    key = None if arguments.key is None else read_public(arguments.key)
    verdicts = [verdict for run in arguments.runs for verdict in judged(Path(run), key)]
    good = all(verdict.verified for verdict in verdicts)
    if arguments.json:
        found = {"verified": good, "runs": [verdict.to_json() for verdict in verdicts]}
        print(json.dumps(found, allow_nan=False))
    else:
        for verdict in verdicts:
            show(verdict, whole=len(verdicts) == 1)
    return 0 if good else 1


def judged(folder: Path, key: bytes | None = None) -> "list[Verdict]":
    """Check a run, or all runs and selections in a folder; with a public key, signatures too."""
    from coterie.verification import Check, UnreadableError, Verdict, verify_selection
    from coterie.verification import verify as check

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give the folder of a finished run")
    refuse_special(folder)
    inside = [] if any((folder / name).exists() for name in _OF_A_RUN) else _inside(folder)
    if not inside:
        return [check(folder, key)]
    found = []
    for part, is_selection in inside:
        try:
            found.append((verify_selection if is_selection else check)(part, key))
        except UnreadableError as error:
            # Among verified runs it would go unnoticed: it fails.
            missing = Check("certificate", "FAILED", str(error), "one for every run that was begun")
            found.append(Verdict(str(part), (missing,), ()))
    return found


def _inside(folder: Path) -> list[tuple[Path, bool]]:
    """Return the runs in a folder, finished or not, and its selections (with True)."""
    found = []
    for place, _, names in os.walk(folder):
        part = Path(place)
        if _SELECTION in names:
            found.append((part, True))
        # The ledger of a selection's scores is checked with the selection.
        scores = part.name == "scores" and (part.parent / _SELECTION).exists()
        # A site's folder of a deployment has no ledger: the coordinator has it.
        site = "run.json" in names and "ledger.jsonl" not in names
        if any(name in names for name in _OF_A_RUN) and not scores and not site:
            found.append((part, False))
    return sorted([*found, *((part, False) for part in _announced(folder))])


def _announced(folder: Path) -> list[Path]:
    """Return the runs that a folder of several was begun for, and that have left no file."""
    import json

    path = folder / "members.json"
    if not path.exists():
        return []
    try:
        named = list(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore it") from error
    parts = [folder / str(name) for name in named]
    return [part for part in parts if not any((part / name).exists() for name in _OF_A_RUN)]


def show(verdict: "Verdict", *, whole: bool) -> None:
    """Print the checks of a run, or only those that fail."""
    for check in verdict.checks:
        good = check.status == "ok"
        if good and not whole:
            continue
        print(f"{check.status:<15} {check.name:<42} {check.found}".rstrip())
        if not good and check.expected:
            print(f"{'':<15} {'':<42} expected: {check.expected}")
    result = "verified" if verdict.verified else "NOT VERIFIED"
    if whole:
        for limit in verdict.unchecked:
            print(f"{'not checked':<15} {limit}")
    absent = sum(check.status == "not here" for check in verdict.checks)
    apart = f", {absent} of private files not here" if absent else ""
    print(f"{verdict.folder}: {result} ({len(verdict.checks)} checks{apart})")
