"""`coterie report`: one HTML page for one run or several."""

import argparse
import json
from pathlib import Path

from coterie.cli.options import TRUST, Commands, check_run, command


def add(commands: Commands) -> None:
    """Add `report`."""
    parser = command(
        commands,
        "report",
        "write one HTML page for one or more runs",
        "coterie report runs/*",
        flags={
            "--out FILE": "page to write (default RUN/report.html of the first run)",
            "--figures DIR": "also write every chart of the page as PNG and SVG",
            **TRUST,
        },
        action=_write,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")


def _write(arguments: argparse.Namespace) -> None:
    for run in arguments.runs:
        check_run(run)
    from coterie.report.page import write_report
    from coterie.tune.compare import PLAN, check_trust, finished
    from coterie.tune.frontier import findings_of

    for run in arguments.runs:
        if (Path(run) / PLAN).exists():  # its methods are looked up; a single run's are not
            check_trust(Path(run), trust=arguments.trust)
    labels = {part: label for run in arguments.runs for part, label in _members(Path(run)).items()}
    folders = list(labels)
    first = Path(arguments.runs[0])
    usual = first if (first / PLAN).exists() else folders[0]
    out = Path(arguments.out) if arguments.out else usual / "report.html"
    figures = Path(arguments.figures) if arguments.figures else None
    # Differences are tested within one comparison; runs of several are not paired.
    single = len(arguments.runs) == 1 and (first / PLAN).exists() and finished(first)
    write_report(folders, out, figures, labels, findings=findings_of(first) if single else ())
    print(out)


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
