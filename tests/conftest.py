"""Fixtures shared by all tests."""

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
_numbers = itertools.count()


gc.disable()  # until tests are collected: imports make half a million objects, which stay


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_syncs() -> Iterator[None]:
    """Do not wait for the disk: only a machine that dies needs it, and tests kill processes.

    Tests of what is synced, and when, watch the calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(np.memmap, "flush", lambda mapped: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def registers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the budget register of this user out of all tests, also out of their processes."""
    folder = tmp_path_factory.mktemp("registers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_BUDGET", str(folder / "session.json"))
        yield folder


@pytest.fixture(autouse=True)
def register(registers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a budget register of its own, which does not exist yet."""
    path = registers / f"{next(_numbers)}.json"
    monkeypatch.setenv("COTERIE_BUDGET", str(path))
    return path


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Find a real data set under $COTERIE_DATA or beside the repository, or skip."""

    def find(name: str) -> Path:
        root = Path(os.environ.get("COTERIE_DATA", REPOSITORY.parent / "shared" / "data"))
        path = root / name
        if not path.exists():
            pytest.skip(f"{name} is not in {root}; set COTERIE_DATA to the folder that holds it")
        return path

    return find


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare runs their HTML page, which takes most of a small run's time."""
    monkeypatch.setattr("coterie.cli.train.write_report", lambda folders, out: out)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages written as where Altair is not installed: charts take most of a page's time."""
    monkeypatch.setitem(sys.modules, "altair", None)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Return the one server of forked commands."""
    from tests.runs.forked import Forks

    server = Forks(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()
