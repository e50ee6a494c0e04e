"""What the site is made of beside its sources: the page of the command line, and the decisions.

The page of the command line is written from the parser itself, so it cannot say anything else than
`coterie --help` does. Decisions are put into the menu as they are found in docs/adr.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_HEAD = """\
# Command line

This page is generated from the parser. Results go to stdout, progress and notes to stderr. Exit
status: 0 success, 1 a failed check, 2 bad input, 130 interrupted.
"""


def on_config(config: Any) -> Any:
    """Put every decision into the menu, in order."""
    folder = Path(config.docs_dir) / "adr"
    pages = [{_title(page): f"adr/{page.name}"} for page in sorted(folder.glob("0*.md"))]
    (reference,) = (section["Reference"] for section in config.nav if "Reference" in section)
    (decisions,) = (section for section in reference if "Decisions" in section)
    decisions["Decisions"] = ["adr/index.md", *pages]  # also where it was done before, by a rebuild
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the page of the command line."""
    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files


def cli_page() -> str:
    """Write the page of the command line from the parser."""
    from coterie.cli.main import build_parser

    os.environ["COLUMNS"] = "100"  # help is as wide as the page, whoever builds it
    parser = build_parser()
    parts = [_HEAD, "## coterie", _shown(parser)]
    for name, command in commands(parser).items():
        parts += [f"## coterie {name}", _shown(command)]
    return "\n\n".join(parts) + "\n"


def commands(parser: argparse.ArgumentParser, before: str = "") -> dict[str, Any]:
    """Find all commands, and those inside commands, by name."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[before + name] = command
                found |= commands(command, f"{before}{name} ")
    return found


def _shown(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```"


def _title(page: Path) -> str:
    """Return the number and the heading of a decision."""
    heading = next(
        line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
    )
    words = re.sub(r"^(ADR )?\d+[.:]?\s*", "", heading.removeprefix("# "))
    return f"{int(page.name[:4])}. {words}"
