"""What the commands that only look do: methods, data, and the page of finished runs."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from coterie.choice import DataChoice
from coterie.commands.compare_words import findings_of
from coterie.commands.flags import data_table
from coterie.commands.run import MEMBERS
from coterie.comparison.running import PLAN, finished
from coterie.config import from_table, to_table
from coterie.data.describe import describe
from coterie.methods.base import Method
from coterie.models import MODELS
from coterie.report.page import write_report
from coterie.report.tables import shorten


def methods(arguments: argparse.Namespace) -> None:
    """Carry out `coterie methods`."""
    found = {}
    for name, method in Method.choices().items():
        summary = (method.__doc__ or "").strip().splitlines()[0]
        found[name] = {"summary": summary, "settings": to_table(method())}
        found[name]["settings"].pop("kind", None)
        for setting in fields(method()):  # type: ignore[arg-type]  # every method is a dataclass
            found[name]["settings"].setdefault(setting.name, None)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, about in found.items():
        print(f"{name}: {about['summary']}")
        for key, value in about["settings"].items():
            print(f"    method.{key} = {json.dumps(value)}")
    print(f"models (--model): {', '.join(sorted(MODELS))}")


def data_show(arguments: argparse.Namespace) -> None:
    """Carry out `coterie data show`."""
    choice = from_table(DataChoice, data_table(arguments), "data")
    facts = {"data": choice.name, **describe(choice.open())}
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return
    for key, value in facts.items():
        for line in _lines(key, value):
            print(line)


def report(arguments: argparse.Namespace) -> None:
    """Carry out `coterie report`."""
    names = {part: label for run in arguments.runs for part, label in _members(Path(run)).items()}
    folders = list(names)
    first = Path(arguments.runs[0])
    usual = first if (first / PLAN).exists() else folders[0]
    out = Path(arguments.out) if arguments.out else usual / "report.html"
    figures = Path(arguments.figures) if arguments.figures else None
    # What differs is said of one comparison; runs of several are not paired.
    alone = len(arguments.runs) == 1 and (first / PLAN).exists() and finished(first)
    write_report(folders, out, figures, names, findings=findings_of(first) if alone else ())
    print(out)


def _members(folder: Path) -> dict[Path, str]:
    """Return the finished runs of a folder of several, or the folder itself, and their names if any.

    Those of a comparison have labels; other runs go by their method.
    """
    alone = {folder: ""}
    if (folder / PLAN).exists():
        return finished(folder) or alone
    if not (folder / MEMBERS).exists():
        return alone
    members = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    done = [folder / name for name in members if (folder / name / "result.json").exists()]
    return dict.fromkeys(done, "") or alone


def _lines(key: str, value: Any) -> list[str]:
    label = key.replace("_", " ")
    if isinstance(value, Mapping):
        parts = ", ".join(f"{name} {shorten(item)}" for name, item in value.items())
        return [f"{label:<20} {parts}"]
    if isinstance(value, list | tuple):
        return [f"{label if i == 0 else '':<20} {shorten(item)}" for i, item in enumerate(value)]
    return [f"{label:<20} {shorten(value)}"]
