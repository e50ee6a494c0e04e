"""`coterie init`: look at a table, list its problems, and write a plan for it."""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import JSON, Commands, aligned, check_file, command
from coterie.core.suggest import counted, did_you_mean

if TYPE_CHECKING:
    from coterie.data.inspect import Look, Overrides, Proposal

_MORE = """\
It reads CSV, TSV, Parquet and folders of these, without training anything. It prints all problems
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
            "--features COLUMN,COLUMN": "columns to predict from (default: all that can be used)",
            "--categories COLUMN,COLUMN": "read these as categories, such as codes that are "
            "numbers",
            "--task {regression,binary,multiclass}": "type of the target (default: by its values)",
            "--out FILE": "the plan to write (default plan.toml)",
            "--yes": "accept all proposals; ask nothing",
            **JSON,
        },
        action=init,
    )
    place: dict[str, Any] = {"nargs": "?", "default": argparse.SUPPRESS, "metavar": "FILE"}
    parser.add_argument("file", help="csv, tsv, parquet, or a folder of these", **place)
    parser.add_argument("--data", dest="file", metavar="FILE", help="the same, as elsewhere")


def init(arguments: argparse.Namespace) -> int:
    """Carry out `coterie init`."""
    out = check_file(Path(arguments.out or "plan.toml"), "--out")
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it, or name another file with --out")
    if arguments.file is None:
        raise ValueError("no data: give FILE, a table of yours")
    path = Path(arguments.file)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; check the path")
    return _propose(path, out, arguments)


def _propose(path: Path, out: Path, arguments: argparse.Namespace) -> int:
    from coterie.data.inspect import Look, Overrides, look

    asks = not arguments.yes and not arguments.json and sys.stdin.isatty()
    overrides = Overrides(
        client=arguments.client,
        target=arguments.target,
        task=arguments.task,
        features=_listed(arguments.features),
        categories=_listed(arguments.categories),
    )
    proposal = (_asked if asks else Look.propose)(look(path), overrides)
    if not arguments.json:
        _show(path, proposal)
    accepted = not proposal.blocking and (arguments.yes or (asks and _accepts()))
    if accepted:
        from coterie.core.files import write_atomically

        write_atomically(out, "\n".join(plan_lines(path, proposal)).encode())
    if arguments.json:
        _print_json(path, out if accepted else None, proposal)
    elif accepted:
        print(f"\nplan written to {out}: read it, then: coterie run --plan {out} --epsilon 1")
    if proposal.blocking:
        raise ValueError(f"solve this first: {'; '.join(proposal.blocking)}")
    if not accepted:
        raise ValueError(
            "the proposal declares facts of private rows as public, and was not accepted: give "
            "--yes to accept it; nothing was written"
        )
    return 0


def _listed(text: str | None) -> tuple[str, ...]:
    """Return the columns of a flag."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _asked(seen: "Look", overrides: "Overrides") -> "Proposal":
    """Return a proposal with the columns that are answered on a terminal."""
    if overrides.client is None:
        client = _ask("client column", seen.propose(overrides).source.client, seen.columns)
        overrides = replace(overrides, client=client)
    if overrides.target is None:
        target = _ask("column to predict", str(seen.propose(overrides).source.target), seen.columns)
        overrides = replace(overrides, target=target)
    return seen.propose(overrides)


def _print_json(path: Path, out: Path | None, proposal: "Proposal") -> None:
    found = {
        "file": str(path),
        "plan": None if out is None else str(out),
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


def _ask(question: str, proposed: str, known: Collection[str]) -> str:
    """Return the column that is answered; an empty answer takes the proposal."""
    while (found := _input(f"{question} [{proposed}]: ") or proposed) not in known:
        print(f"no column {found!r}; {did_you_mean(found, list(known))}")
    return found


def _accepts() -> bool:
    question = "Declare these levels, ranges and classes as public knowledge, and write the plan?"
    return _input(f"{question} [y/N]: ").lower() in ("y", "yes")


def _input(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        raise ValueError("no answer: give --client, --target and --yes to ask nothing") from None


def _show(path: Path, proposal: "Proposal") -> None:
    print(f"{path}: {counted(proposal.rows, 'row')} of {counted(proposal.clients, 'client')}\n")
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
    yield from _declarations(source.client)
    yield from ("", "[data]", f"name = {_value(str(path))}")
    yield from ("", "[data.source]", f"client = {_value(source.client)}")
    yield f"target = {_value(source.target)}"
    yield f"task = {_value(source.task)}"
    if isinstance(source.classes, tuple):
        last = source.classes[-1]
        note = f"  # probability is that of {_value(last)}" if source.task == "binary" else ""
        yield f"classes = {_value(source.classes)}{note}"
    yield f'split = {_value(source.split)}  # column of train (0) and test (1) rows; "" for none'
    yield f"features = {_value(source.features)}"
    for name, reason in proposal.left_out.items():
        yield f"# left out: {_value(name)} ({reason})"
    yield "# Gaps: error, drop, constant, or client-median (of the client's own training rows)."
    yield f"missing = {_value(source.missing)}"
    yield f"indicators = {_value(source.indicators)}  # columns that get a 0/1 column for gaps"
    if source.decimal_commas:
        yield f"decimal_commas = {_value(source.decimal_commas)}  # 1.234,5 is 1234.5"
    yield f"clip = {source.clip}  # ranges are scaled to -3 to 3; values outside are cut"
    yield "# Facts that were read off the rows and accepted as public; guarantees state them."
    yield f"accepted = {_value(source.accepted)}"
    yield from _table("units", source.units, "Units after numbers, which are dropped.")
    yield from _table(
        "gaps",
        source.gaps,
        "Values that stand for a gap, beside empty cells, NA, null, ? and such.",
    )
    yield from _table(
        "levels", source.levels, 'Categories. "other" takes every value that is not listed.'
    )
    yield from _table(
        "dates", source.dates, "Dates: the origin, and the format of the column if it is not ISO."
    )
    yield from _table("ranges", source.ranges, "Value ranges, in the column's own unit.")
    yield ""


def _declarations(client: str) -> Iterator[str]:
    yield from ("", "# What is stated with every guarantee: say what one client is.", "# [about]")
    yield f"# unit = {_value(f'one value of the column {client}, with all its rows')}"
    yield from ('# operator = "..."', '# purpose = "..."')


def _table(name: str, values: Mapping[str, Any], text: str) -> Iterator[str]:
    if values:
        yield from ("", f"# {text}", f"[data.source.{name}]")
        for key, value in values.items():
            yield f"{_value(key)} = {_value(value)}"


def _value(value: Any) -> str:
    """Return text, numbers and lists as TOML; JSON writes them in the same way, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
