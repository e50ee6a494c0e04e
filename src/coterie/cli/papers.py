"""`coterie papers`: every item of the four papers, what became of it, and the command."""

import argparse
from typing import TYPE_CHECKING

from coterie.cli.options import JSON, Commands, command, print_json
from coterie.core.suggest import did_you_mean

if TYPE_CHECKING:
    from coterie.papers import Item, Paper

_MORE = """\
Every algorithm, equation, theorem, baseline, data set, figure and table of the four papers, by its
printed number. Status: runs (implemented; there is no number to compare), reproduced (within the
paper's error), differs, not reproduced; the last two with the reason. Commands that start with
`python benchmarks/` run in a clone of the project; their data is described in docs/papers/index.md.

--json prints a list of objects: paper, item, kind, status, command, ours, published, page."""


def add(commands: Commands) -> None:
    """Add `papers`."""
    parser = command(
        commands,
        "papers",
        "list what the four papers describe: what runs here, and how close it comes",
        "coterie papers mpmtl",
        _MORE,
        flags={**JSON, "--status STATUS": "only items of this status, such as differs"},
        action=papers,
    )
    parser.add_argument(
        "paper", metavar="PAPER", nargs="?", help="pmtl, mpmtl, dpfedmtl or mtlsvm (default: all)"
    )


def papers(arguments: argparse.Namespace) -> None:
    """Carry out `coterie papers`."""
    from typing import get_args

    from coterie.papers import PAPERS, Status, read_papers

    for given, known in ((arguments.paper, PAPERS), (arguments.status, get_args(Status))):
        if given is not None and given not in known:
            raise ValueError(f"{given!r}: {did_you_mean(given, known)}")
    found = [paper for paper in read_papers() if arguments.paper in (None, paper.key)]
    wanted = (arguments.status,) if arguments.status else get_args(Status)
    if arguments.json:
        print_json([item.to_json() for paper in found for item in paper.items
                    if item.status in wanted])  # fmt: skip
        return
    for paper in found:
        _show(paper, wanted)


def _show(paper: "Paper", wanted: tuple[str, ...]) -> None:
    print(f"{paper.key}: {paper.authors}, {paper.title!r}, {paper.venue}. {paper.link}")
    print(
        f"{len(paper.items)} items: {paper.count('runs')} run, {paper.count('reproduced')} "
        f"reproduced, {paper.count('differs')} differ, {paper.count('not reproduced')} not "
        "reproduced\n"
    )
    for item in paper.items:
        if item.status in wanted:
            for line in _lines(item):
                print(line)
    print()


def _lines(item: "Item") -> list[str]:
    lines = [f"{item.item} ({item.status}): {item.about}"]
    for name, text in (
        ("here", item.where),
        ("published", item.published),
        ("ours", item.ours),
        ("how close", item.tolerance),
        ("why", item.why),
        ("run", item.command),
    ):
        if text:
            lines.append(f"    {name}: {text}")
    return lines
