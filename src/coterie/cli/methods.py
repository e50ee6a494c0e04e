"""`coterie methods`: every registered method, its settings, and the models."""

import argparse
import json
from dataclasses import fields
from typing import Any

from coterie.cli.options import Commands, command


def add(commands: Commands) -> None:
    """Add `methods`."""
    parser = command(commands, "methods", "the methods and their settings", "coterie methods")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=_print)


def _print(arguments: argparse.Namespace) -> None:
    from coterie.core.config import to_table
    from coterie.methods.base import about, choices
    from coterie.models import MODELS

    found: dict[str, dict[str, Any]] = {}
    for name, method in choices().items():
        text = about(name)
        found[name] = {"summary": text.summary, "releases": text.releases}
        found[name]["settings"] = to_table(method())
        found[name]["settings"].pop("kind", None)
        for setting in fields(method()):  # type: ignore[arg-type]  # every method is a dataclass
            found[name]["settings"].setdefault(setting.name, None)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, shown in found.items():
        print(f"{name}: {shown['summary']}")
        if shown["releases"]:
            print(f"    releases: {shown['releases']}")
        for key, value in shown["settings"].items():
            print(f"    method.{key} = {json.dumps(value)}")
    print(f"models (--model): {', '.join(sorted(MODELS))}")
