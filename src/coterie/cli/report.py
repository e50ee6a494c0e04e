"""`coterie report`: one HTML page for one run or several; a privacy statement, a registry entry."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from coterie.cli.options import TRUST, Commands, check_file, check_run, command


def add(commands: Commands) -> None:
    """Add `report`."""
    parser = command(
        commands,
        "report",
        "write one HTML page for one or more runs",
        "coterie report runs/*",
        flags={
            "--out FILE": "page to write (default RUN/report.html of the first run)",
            "--figures DIR": "also write every chart of the page as SVG, PNG and PDF",
            "--statement FILE": "instead, write a privacy statement of one run: HTML, one page of "
            "A4 when printed, without metrics",
            "--registry FILE": "instead, write a draft entry (YAML) for the OpenDP registry of "
            "deployments",
            **TRUST,
        },
        action=_write,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")


def _write(arguments: argparse.Namespace) -> None:
    for run in arguments.runs:
        check_run(run)
    if arguments.statement or arguments.registry:
        _write_for_others(arguments)
        if not (arguments.out or arguments.figures):
            return
    from coterie.report.page import write_report
    from coterie.tune.compare import PLAN, check_trust, finished
    from coterie.tune.frontier import findings_of, headlines, sentences

    for run in arguments.runs:
        if (Path(run) / PLAN).exists():  # its methods are looked up; a single run's are not
            check_trust(Path(run), trust=arguments.trust)
    labels = {part: label for run in arguments.runs for part, label in _members(Path(run)).items()}
    folders = list(labels)
    first = Path(arguments.runs[0])
    out = Path(arguments.out) if arguments.out else first / "report.html"
    figures = Path(arguments.figures) if arguments.figures else None
    # Differences are tested within one comparison; runs of several are not paired.
    single = len(arguments.runs) == 1 and (first / PLAN).exists() and finished(first)
    told: dict[str, Any] = {}
    if single:
        found = findings_of(first)
        told = {"findings": list(sentences(found)), "headlines": headlines(found)}
    write_report(folders, out, figures, labels, **told)
    print(out)


def _write_for_others(arguments: argparse.Namespace) -> None:
    """Write the privacy statement and the registry entry of one run."""
    if len(arguments.runs) != 1:
        raise ValueError(
            f"{len(arguments.runs)} runs: a statement or an entry is of one run; give one folder"
        )
    from coterie.report.registry import write_entry
    from coterie.report.statement import write_statement

    folder = Path(arguments.runs[0])
    if arguments.statement:
        print(write_statement(folder, check_file(Path(arguments.statement), "--statement")))
    if arguments.registry:
        out = check_file(Path(arguments.registry), "--registry")
        missing = write_entry(folder, out)
        print(out)
        if missing:
            print(f"fill in: {', '.join(missing)} (or declare them in [about])", file=sys.stderr)


def _members(folder: Path) -> dict[Path, str]:
    """Return the finished runs of a folder and their labels; the folder itself if it is a run.

    Runs of a comparison have labels; other runs go by their method.
    """
    from coterie.cli.train import MEMBERS
    from coterie.tune.compare import PLAN, finished

    single = {folder: ""}
    if (folder / PLAN).exists():
        return finished(folder) or single
    if not (folder / MEMBERS).exists():
        return single
    members = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    done = [folder / name for name in members if (folder / name / "result.json").exists()]
    return dict.fromkeys(done, "") or single
