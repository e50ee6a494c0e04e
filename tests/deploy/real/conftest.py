"""Federations of real processes that several tests share."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.real.faulty import FaultyFederation
from tests.deploy.real.trials import QUICK, Attempt, write_trial

from coterie.deploy import processes
from coterie.deploy.keys import make_certificates

SIZES = {"north": 3, "south": 4, "east": 5}
"""No two sets of sites have the same number of clients: a count tells who answered."""


@dataclass(frozen=True)
class Place:
    """A running federation in which apps are tried, one after another."""

    folder: Path
    federation: FaultyFederation

    def attempt(self, name: str, wrongs: dict[str, str] | None = None, **facts: Any) -> Attempt:
        """Write an app and begin a run of it.

        Args:
            name: Of app and run.
            wrongs: What site east does wrong, by kind of question and round.
            **facts: Of `write_trial`.
        """
        keys = self.federation.keys
        trial = write_trial(
            self.folder, name, SIZES, keys=keys, hostile=wrongs is not None, **facts
        )
        for site in SIZES:
            if not self.federation.is_running(site):
                self.federation.start_node(site)
            self.honest(site)
        if wrongs:
            place = self.folder / "sites" / "east"
            place.mkdir(parents=True, exist_ok=True)
            (place / "wrongs.json").write_text(json.dumps(wrongs))
        return Attempt(trial, self.federation, self.folder / "runs" / name)

    def honest(self, site: str) -> None:
        """Let a site do right from now on."""
        for name in ("wrongs.json", "waiting"):
            (self.folder / "sites" / site / name).unlink(missing_ok=True)

    def waits(self, site: str) -> Callable[[], bool]:
        """Return what says whether a site waits in the middle of an answer."""
        return (self.folder / "sites" / site / "waiting").exists


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    keys = folder / "keys"
    make_certificates(keys, list(SIZES))
    trial = write_trial(folder, "first", SIZES, rounds=1, keys=keys)
    nodes = {site: trial.node(site, other="north") for site in SIZES}
    with FaultyFederation(
        folder / "flower", keys, nodes, environment=QUICK, patience=180
    ) as federation:
        yield Place(folder, federation)
    assert processes.tagged(federation.tag) == []
