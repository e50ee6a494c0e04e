"""Fixtures shared by all tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Find a real data set under $COTERIE_DATA or beside the repository, or skip."""

    def find(name: str) -> Path:
        root = Path(os.environ.get("COTERIE_DATA", REPOSITORY.parent / "shared" / "data"))
        path = root / name
        if not path.exists():
            pytest.skip(f"{name} is not in {root}; set COTERIE_DATA to the folder that holds it")
        return path

    return find
