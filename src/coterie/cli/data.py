"""`coterie data show`: describe client-partitioned data, for the data's owner (not private)."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from coterie.cli.options import JSON, Commands, add_source, check_flags, command


def add(commands: Commands) -> None:
    """Add `data show`."""
    parser = command(
        commands, "data", "describe client-partitioned data", "coterie data show districts"
    )
    inner = parser.add_subparsers(dest="data_command", required=True, metavar="show")
    show = command(
        inner,
        "show",
        "show clients, rows per client, features, classes (for the data's owner; not private)",
        "coterie data show exam.csv --client-column school --target score",
        flags={"--plan FILE": "read as a plan does; flags override it", **JSON},
        usual="--plan --client-column --target --features --task --missing --clients --json",
        action=_show,
    )
    add_source(show, positional=True)


def _show(arguments: argparse.Namespace) -> None:
    check_flags(arguments)
    if arguments.data is None and arguments.plan is None:
        raise ValueError("no data: give NAME|FILE, for example districts, or --plan")
    from coterie.cli.flags import data_table
    from coterie.core.config import from_table
    from coterie.data.config import DataConfig
    from coterie.data.federated import describe

    config = from_table(DataConfig, data_table(arguments), "data")
    facts = {"data": config.name, **describe(config.read())}
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return
    for key, value in facts.items():
        for line in _lines(key, value):
            print(line)


def _lines(key: str, value: Any) -> list[str]:
    label = key.replace("_", " ")
    if isinstance(value, Mapping):
        parts = ", ".join(f"{name} {_short(item)}" for name, item in value.items())
        return [f"{label:<20} {parts}"]
    if isinstance(value, list | tuple):
        return [f"{label if i == 0 else '':<20} {_short(item)}" for i, item in enumerate(value)]
    return [f"{label:<20} {_short(value)}"]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
