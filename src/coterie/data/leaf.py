"""LEAF json (Caldas et al., 2018, arXiv:1812.01097): users, num_samples, user_data.

A path is one file, a folder of files, or a folder with `train/` and `test/`, which then are the
source's split. Files are read one after the other, so memory holds the largest of them beside the
result. Text rows (Shakespeare) become the index of each character among declared ones.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.arrays import targets_of
from coterie.data.federated import DataError
from coterie.data.source import (
    Batch,
    Columns,
    Source,
    Table,
    plan_columns,
    reading,
    unknown_level,
)

LEAF_CHARACTERS: tuple[str, ...] = tuple(
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The 80 characters of LEAF's own Shakespeare models."""


@dataclass(frozen=True)
class _User:
    """One user of one file; `where` names both."""

    where: str
    name: str
    x: list[Any]
    y: list[Any]
    split: int | None


def open_leaf(path: Path, source: Source) -> Table:
    """Open a LEAF file or folder.

    Args:
        path: A `.json` file, a folder of them, or one with `train/` and `test/`.
        source: The options; for text, `levels["x"]` are the characters and `classes` the targets'.
    """
    files = _files(path)
    # the cache spares a single file its second parsing
    users = partial(_users, files, lru_cache(maxsize=1)(_parse))
    first = next((user for user in users() if user.x), None)
    shape = (0,) if first is None else _features(first, source, None).shape[1:]
    columns = range(int(np.prod(shape)))
    # text has no columns that options could name
    named = not (first is not None and isinstance(first.x[0], str))
    plan = plan_columns(columns, source, where=str(path)) if named else Columns(columns)

    def read(features: bool) -> Iterator[Batch]:
        for user in users():
            y = _labels(user)
            x = _features(user, source, shape) if features and user.x else None
            yield Batch(
                rows=np.arange(len(y)),
                names=(user.name,),
                codes=np.zeros(len(y), dtype=np.int64),
                x=None if x is None else plan.encode(x, partial(_fail, user)),
                y=y,
                split=None if user.split is None else np.full(len(y), user.split),
                real=y.dtype.kind == "f",
            )

    shown = shape if plan.picks is None else (len(plan.names),)
    return Table(str(path), shown, plan, read, "row {} (from 0) of its user_data".format)


def _files(path: Path) -> list[tuple[Path, int | None]]:
    """List the files with the split each is of."""
    if path.is_file():
        return [(path, None)]
    parts = [(path / name, split) for split, name in enumerate(("train", "test"))]
    if all(part.is_dir() for part, _ in parts):
        files: list[tuple[Path, int | None]] = [
            (file, split) for part, split in parts for file in sorted(part.glob("*.json"))
        ]
    else:
        files = [(file, None) for file in sorted(path.glob("*.json"))]
    if not files:
        raise DataError(
            f"{path}: no LEAF json here; expected *.json, or train/*.json and test/*.json, or "
            "*.parquet"
        )
    return files


def _parse(path: Path) -> dict[str, Any]:
    with reading(path):
        with path.open(encoding="utf-8") as file:
            found = json.load(file, object_pairs_hook=partial(_unique, path))
        if not isinstance(found, dict) or not {"users", "user_data"} <= set(found):
            raise DataError(f"{path}: not LEAF json; expected the keys users and user_data")
        if not isinstance(found["users"], list) or not isinstance(found["user_data"], dict):
            raise DataError(f"{path}: not LEAF json; users is a list and user_data an object there")
        return found


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DataError(f"{path}: {twice!r} is given twice; name each client once")
    return found


def _users(
    files: list[tuple[Path, int | None]], parse: Callable[[Path], dict[str, Any]]
) -> Iterator[_User]:
    seen: dict[tuple[str, int | None], Path] = {}
    for path, split in files:
        found = parse(path)
        counts = found.get("num_samples") or [None] * len(found["users"])
        if len(counts) != len(found["users"]) or len(found["user_data"]) != len(found["users"]):
            raise DataError(
                f"{path}: {len(found['users'])} users, {len(counts)} num_samples and "
                f"{len(found['user_data'])} entries of user_data; it needs one of each for a user"
            )
        for name, count in zip(map(str, found["users"]), counts, strict=True):
            if (name, split) in seen:
                raise DataError(
                    f"{path}: duplicate client {name!r}, already in {seen[name, split]}; name each "
                    "client once in a split"
                )
            seen[name, split] = path
            yield _user(path, name, found["user_data"].get(name), count, split)


def _user(path: Path, name: str, rows: Any, count: Any, split: int | None) -> _User:
    where = f"{path}: client {name!r}"
    if not isinstance(rows, dict) or not {"x", "y"} <= set(rows):
        raise DataError(f"{where}: user_data holds no x and y for it; add them or take it out")
    x, y = rows["x"], rows["y"]
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        sizes = [len(part) if isinstance(part, list) else "no list" for part in (x, y)]
        raise DataError(f"{where}: x has {sizes[0]} rows, y {sizes[1]}; give one target a row")
    if count is not None and count != len(y):
        raise DataError(
            f"{where}: num_samples says {count}, user_data has {len(y)} rows; correct the count, "
            "or fetch the file again if rows are lost"
        )
    return _User(where, name, x, y, split)


def _features(user: _User, source: Source, shape: tuple[int, ...] | None) -> NDArray[np.float64]:
    """Make an array of a user's rows, all of one shape."""
    rows: Any = user.x
    if any(isinstance(row, str) for row in rows):
        rows = _characters(user, source)
    try:
        x = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _bad_rows(user, rows) from error
    x = x[:, None] if x.ndim == 1 else x
    if shape is not None and x.shape[1:] != shape:
        raise DataError(
            f"{user.where}: rows of shape {x.shape[1:]}, where the first client has {shape}; give "
            "every row as many values"
        )
    return x


def _characters(user: _User, source: Source) -> list[list[int]]:
    levels = source.levels.get("x", ())
    index = {character: at for at, character in enumerate(levels)}
    for at, row in enumerate(user.x):
        if not levels or not isinstance(row, str):
            raise DataError(
                f"{user.where}, row {at} (from 0): found {str(row)[:40]!r} where numbers belong; "
                "for text declare its characters, levels={'x': (...)}, and the classes"
            )
        lost = next((character for character in row if character not in index), None)
        if lost is not None:
            raise _fail(user, at, "x", unknown_level(lost, levels))
    return [[index[character] for character in row] for row in user.x]


def _labels(user: _User) -> NDArray[Any]:
    try:
        return targets_of(user.y, user.where)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{user.where}: targets of unequal widths; give as many each") from error


def _bad_rows(user: _User, rows: list[Any]) -> DataError:
    """Find the row that is no list of numbers, or of another width than the first."""
    width = np.shape(rows[0]) if not isinstance(rows[0], list) else (len(rows[0]),)
    for at, row in enumerate(rows):
        try:
            values = np.array(row, dtype=np.float64)
        except (TypeError, ValueError):
            return DataError(
                f"{user.where}, row {at} (from 0): found {str(row)[:60]} where numbers belong; "
                "correct the row"
            )
        if values.shape[:1] != width:
            return DataError(
                f"{user.where}, row {at} (from 0): {len(np.atleast_1d(values))} values, where the "
                f"first row has {width[0] if width else 1}; give every row as many"
            )
    return DataError(f"{user.where}: rows of unequal shapes; give every row the same")


def _fail(user: _User, row: int, column: str, found: str) -> DataError:
    return DataError(f"{user.where}, row {row} (from 0), column {column!r}: {found}")
