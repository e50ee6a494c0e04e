"""A SuperNode to be started on this machine: its config, its keys, a port."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Node:
    """A SuperNode to be started.

    Attributes:
        config: Its `--node-config`.
        keys: Its folder of keys; None for `sites/NAME` of the federation's.
        authority: Instead of the CA of its folder of keys.
        registered: Whether the SuperLink is told of its key.
        started: Whether it is started with the federation.
    """

    config: Config = field(default_factory=dict)
    keys: Path | None = None
    authority: Path | None = None
    registered: bool = True
    started: bool = True


def node_config(config: Config) -> str:
    """Write a `--node-config` for Flower: TOML values, separated by spaces.

    >>> node_config({"site": "north", "runs": 2, "plain": True})
    'site="north" runs=2 plain=true'
    """
    return " ".join(f"{name}={_literal(name, value)}" for name, value in config.items())


def _literal(name: str, value: Any) -> str:
    # Flower splits at quotes and has no escapes for them.
    if isinstance(value, str) and ('"' in value or "\\" in value or "\n" in value):
        raise ValueError(f"{name} = {value!r}: a --node-config cannot hold quotes or backslashes")
    return json.dumps(value)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
