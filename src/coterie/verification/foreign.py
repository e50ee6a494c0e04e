"""The certificate of an account that Flower's own strategies filled: format "coterie account".

There is no plan and no release to check, because another program made them. The checks are those of
arithmetic and of the ledger: every epsilon is recomputed from the events, and the events are those
that the ledger charged.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from coterie.verification.account import Account, by_view
from coterie.verification.certificate import ACCOUNT, is_event, seal

FORMAT, FORMAT_VERSION = ACCOUNT, 1
LEDGER = "ledger.jsonl"
UNCHECKED = (
    "that the strategy clipped, added the noise and divided by a fixed number, as wrappers of "
    "Flower do in accounted mode",
    "that nothing but the releases left the server: metrics are not counted",
)
_KEYS = {
    "format", "format_version", "unit", "relation", "sampling", "rate", "cohort", "clients",
    "rounds", "delta", "epsilon", "views", "events", "simulation", "assumed_public", "files",
    "versions", "finished", "sha256",
}  # fmt: skip
_MODELS = {
    "no-amplification": ("everyone", "zero_out"),
    "poisson": ("poisson", "zero_out"),
    "without-replacement": ("fixed", "replace"),
}


def faults(stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a certificate lacks, has in addition, or has of a wrong type."""
    yield from (f"{key} is missing" for key in sorted(_KEYS - stated.keys()))
    optional = {"epsilon_per_participation"}
    yield from (f"unknown field {key[:60]}" for key in sorted(stated.keys() - _KEYS - optional))
    if stated.get("format_version") != FORMAT_VERSION:
        yield f"format_version is {stated.get('format_version')!r}"
    events = stated.get("events")
    if not isinstance(events, list) or not all(map(is_event, events)):
        yield "events are not of the vocabulary"


def wrong_ledger(folder: Path, stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the certificate differs from the ledger."""
    content = (folder / LEDGER).read_bytes()
    if hashlib.sha256(content).hexdigest() != stated["files"].get(LEDGER):
        yield "it changed after the certificate was written: certify again"
    header, *lines = [json.loads(line) for line in content.split(b"\n") if line]
    config = header["config"]
    charges = [line["charge"] for line in lines if "charge" in line]
    if lines and "charge" not in lines[-1]:
        yield "a round was begun and is not charged"
    found = [
        {"event": "gaussian", "noise_multiplier": noise, "replaced": 2.0}
        | {"rounds": sum(one["count"] for one in run)}
        for noise, run in groupby(charges, key=lambda one: float(one["noise_multiplier"]))
    ]
    if found != stated["events"]:
        yield f"its charges are {str(found)[:200]}"
    kind, relation = _MODELS[config["sampling_method"]]
    sizes = {one["sample_size"] for one in charges}
    rate = 1.0 if kind == "everyone" else max(sizes, default=1) / config["population_size"]
    if rate < 1 and len(sizes) > 1:
        yield f"samples of {sorted(sizes)[:4]} clients"
    expected = {
        "relation": relation,
        "sampling": kind if rate < 1 else "everyone",
        "rate": rate,
        "clients": config["population_size"],
        "delta": config["target_delta"],
        "rounds": sum(one["count"] for one in charges),
    }
    yield from (
        f"{key} is {stated[key]}, and {value} by the ledger"
        for key, value in expected.items()
        if stated[key] != value
    )


def recomputed(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return epsilon by view, computed from the events alone."""
    return by_view(Account.of(stated))


def is_sealed(stated: Mapping[str, Any]) -> bool:
    """Return whether the hash of the certificate is that of its content."""
    return bool(seal(stated) == stated["sha256"])
