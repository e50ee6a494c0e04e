"""Fixtures for loaders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.data.federated import DataError
from coterie.data.load import Source, load


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Assert that a file is refused by an error that names it, and that nothing is left behind."""

    def check(path: Path, source: Source | None = None) -> str:
        source = source or Source()
        before = sorted(tmp_path.iterdir())
        with pytest.raises(DataError) as caught:
            load(path, source)
        assert str(path) in str(caught.value)
        assert ";" in str(caught.value), "no remedy"
        if not source.sparse:
            mapped = Source(**{**vars(source), "memory_map": str(tmp_path / "mapped")})
            with pytest.raises(DataError):
                load(path, mapped)
        assert sorted(tmp_path.iterdir()) == before
        return str(caught.value)

    return check


@pytest.fixture
def leaf_file() -> Callable[..., Path]:
    """Write a LEAF file."""

    def write(path: Path, **users: tuple[list, list]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write
