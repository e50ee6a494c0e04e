"""`coterie methods`: every method in a line, the settings of one of them, and the models."""

import argparse
import json
from typing import Any

from coterie.cli.options import Commands, check_name, command, method_texts, names


def add(commands: Commands) -> None:
    """Add `methods`."""
    parser = command(
        commands,
        "methods",
        "list the methods, or the settings of one of them",
        "coterie methods pmtl",
        flags={"--json": "print all methods with settings, as JSON"},
        action=_print,
    )
    parser.add_argument("method", metavar="NAME", nargs="?", help="show the settings of this one")


def _print(arguments: argparse.Namespace) -> None:
    known, texts = names(), method_texts()
    if arguments.method is not None:
        check_name("", arguments.method, "methods")
    if arguments.json or arguments.method is not None or known["methods"] != sorted(texts):
        found = _imported()
        texts = {name: (one["summary"], one["releases"]) for name, one in found.items()}
    if arguments.json:
        shown = found if arguments.method is None else found[arguments.method]
        print(json.dumps(shown, indent=2))
        return
    for name in texts if arguments.method is None else (arguments.method,):
        summary, releases = texts[name]
        print(f"{name}: {summary}" + (f"\n    releases: {releases}" if releases else ""))
    if arguments.method is None:
        print("settings of a method: coterie methods NAME")
        print(f"models (--model): {', '.join(known['models'])}")
        return
    for key, value in found[arguments.method]["settings"].items():
        print(f"    method.{key} = {json.dumps(value)}")


def _imported() -> dict[str, dict[str, Any]]:
    """Return summary, releases and settings of all methods, which imports torch."""
    from dataclasses import fields

    from coterie.core.config import to_table
    from coterie.methods.base import about, choices

    found: dict[str, dict[str, Any]] = {}
    for name, method in choices().items():
        table = to_table(method())
        settings = {key: value for key, value in table.items() if key != "kind"}
        for one in fields(method()):  # type: ignore[arg-type]  # every method is a dataclass
            settings.setdefault(one.name, None)
        text = about(name)
        found[name] = {"summary": text.summary, "releases": text.releases, "settings": settings}
    return found
