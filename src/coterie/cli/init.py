"""`coterie init`: look at a table, list its problems, and write a plan for it."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import JSON, Commands, aligned, check_file, command

if TYPE_CHECKING:
    from coterie.data.inspect import Proposal

_MORE = """\
It reads CSV, TSV, Parquet and folders of Parquet, without training anything. It prints all problems
at once, proposes the client column, the target, levels of categories, value ranges, dates and how
gaps are filled, and writes them to a commented plan. Levels, ranges and classes are read off the
rows: by accepting them (--yes, or the last question) you declare that they are public knowledge.
The plan lists them, and every guarantee states them as assumptions.

Exit status: 0 a plan was written, 2 a problem must be solved first."""


def add(commands: Commands) -> None:
    """Add `init`."""
    parser = command(
        commands,
        "init",
        "look at a table and write a plan for it",
        "coterie init patients.csv --client hospital --target readmitted --yes --out plan.toml",
        _MORE,
        flags={
            "--client/--client-column COLUMN": "column that names the client (default: guessed)",
            "--target COLUMN": "column to predict (default: guessed)",
            "--out FILE": "the plan to write (default plan.toml)",
            "--yes": "accept all proposals; ask nothing",
            **JSON,
        },
        action=init,
    )
    parser.add_argument("file", metavar="FILE", help="csv, tsv, parquet, or a folder of parquet")


def init(arguments: argparse.Namespace) -> int:
    """Carry out `coterie init`."""
    out = check_file(Path(arguments.out or "plan.toml"), "--out")
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it, or name another file with --out")
    path = Path(arguments.file)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; check the path")
    from coterie.data.inspect import inspect

    asks = not arguments.yes and not arguments.json and sys.stdin.isatty()
    proposal = inspect(path, client=arguments.client, target=arguments.target)
    if asks:
        client = _ask("client column", proposal.source.client, arguments.client)
        target = _ask("column to predict", str(proposal.source.target), arguments.target)
        proposal = inspect(path, client=client, target=target)
    if not arguments.json:
        _show(path, proposal)
    if not proposal.blocking and not arguments.yes and not (asks and _accepts()):
        raise ValueError(
            "the proposal declares facts of private rows as public, and was not accepted: give "
            "--yes to accept it; nothing was written"
        )
    if not proposal.blocking:
        from coterie.core.files import write_atomically

        write_atomically(out, "\n".join(plan_lines(path, proposal)).encode())
    return _end(path, out, proposal, as_json=arguments.json)


def _end(path: Path, out: Path, proposal: "Proposal", *, as_json: bool) -> int:
    status = 2 if proposal.blocking else 0
    if as_json:
        found = {
            "file": str(path),
            "plan": None if status else str(out),
            "client": proposal.source.client,
            "target": proposal.source.target,
            "task": proposal.source.task,
            "rows": proposal.rows,
            "clients": proposal.clients,
            "columns": dict(proposal.columns),
            "left_out": dict(proposal.left_out),
            "problems": [*proposal.blocking, *proposal.problems],
            "read_from_rows": list(proposal.read),
        }
        print(json.dumps(found, allow_nan=False))
    elif status:
        print(f"coterie init: solve this first: {'; '.join(proposal.blocking)}", file=sys.stderr)
    else:
        print(f"\nplan written to {out}: read it, then: coterie run --plan {out} --epsilon 1")
    return status


def _ask(question: str, proposed: str, given: str | None) -> str:
    """Return the answer on a terminal; an empty one takes the proposal."""
    if given is not None:
        return given
    return input(f"{question} [{proposed}]: ").strip() or proposed


def _accepts() -> bool:
    question = "Declare these levels, ranges and classes as public knowledge, and write the plan?"
    return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")


def _show(path: Path, proposal: "Proposal") -> None:
    print(f"{path}: {proposal.rows:,} rows of {proposal.clients:,} clients\n")
    for line in aligned([*proposal.columns.items()]):
        print(f"  {line}")
    problems = (*proposal.blocking, *proposal.problems)
    if problems:
        print("\nproblems")
        for problem in problems:
            print(f"  - {problem}")
    print("\nread off the rows; public once you accept it")
    for fact in proposal.read:
        print(f"  - {fact.removesuffix(' read off the rows and accepted as public')}")


def plan_lines(path: Path, proposal: "Proposal") -> Iterator[str]:
    """Yield the lines of a commented plan."""
    source = proposal.source
    yield f"# How to read {path.name}, proposed by `coterie init`. Every value may be edited."
    yield "# coterie run --plan THIS FILE --epsilon 1"
    yield from ("", "[privacy]", "epsilon = 1.0  # for the whole run; --epsilon overrides it")
    yield from ("", "[method]", 'kind = "auto"  # chosen by rule; see `coterie methods`')
    yield from ("", "[data]", f"name = {_value(str(path))}")
    yield from ("", "[data.source]", f"client = {_value(source.client)}")
    yield f"target = {_value(source.target)}"
    yield f"task = {_value(source.task)}"
    if source.classes:
        yield f"classes = {_value(source.classes)}  # the last one is predicted as 1, if binary"
    yield f"features = {_value(source.features)}"
    for name, reason in proposal.left_out.items():
        yield f"# left out: {json.dumps(name, ensure_ascii=False)} ({reason})"
    yield "# Gaps: error, drop, constant, or client-median (the median of the client's own rows)."
    yield f"missing = {_value(source.missing)}"
    yield f"indicators = {_value(source.indicators)}  # columns that get a 0/1 column for gaps"
    yield f"clip = {source.clip}  # ranges are scaled to -3 to 3; values outside are cut"
    yield "# Facts that were read off the rows and accepted as public; guarantees state them."
    yield f"accepted = {_value(source.accepted)}"
    yield from _table(
        "levels", source.levels, 'Categories. "other" takes every value that is not listed.'
    )
    yield from _table(
        "dates", source.dates, "Dates: the origin, and the format of the column if it is not ISO."
    )
    yield from _table("ranges", source.ranges, "Value ranges, in the column's own unit.")
    yield ""


def _table(name: str, values: Mapping[str, Any], text: str) -> Iterator[str]:
    if values:
        yield from ("", f"# {text}", f"[data.source.{name}]")
        for key, value in values.items():
            yield f"{json.dumps(key, ensure_ascii=False)} = {_value(value)}"


def _value(value: Any) -> str:
    """Return text, numbers and lists as TOML; JSON writes them in the same way."""
    return json.dumps(value, ensure_ascii=False)
