"""LEAF json (Caldas et al., 2018, arXiv:1812.01097): users, num_samples, user_data.

A path is one file, a folder of files, or a folder with `train/` and `test/`, which then are the
source's split. A file is never read whole: `coterie.data.json_stream` finds where each user's x and
y are, and users are decoded one after the other, large ones some rows at a time, so memory holds a
few rows and one user's y beside the result.

Rows are numbers (FEMNIST), text of declared characters, each read as its index (Shakespeare), text
by a public vocabulary (Sent140, where a row is a list with the text at place 4), or names of images
(CelebA).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coterie.data.arrays import targets_of
from coterie.data.coders import plan_coder
from coterie.data.columns import (
    Batch,
    Columns,
    Table,
    first_clients,
    kept_note,
    plan_columns,
)
from coterie.data.federated import DataError
from coterie.data.folders import JSON, Found, find_files
from coterie.data.json_stream import Index, Pairs, index_json
from coterie.data.leaf_rows import Coded, Numbers, Rows, User, numbers_of, text_place
from coterie.data.source import Source, reading

LEAF_CHARACTERS: tuple[str, ...] = tuple(
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The 80 characters of LEAF's own Shakespeare models."""
_KINDS = {dict: "an object", str: "text", type(None): "null", bool: "true or false"}
_DEPTH = 3  # the file, user_data, one user: its x and y lie deeper
_TOGETHER = 1 << 20  # bytes of small users that make one batch
_LARGE = 1 << 22  # bytes of a user that is decoded some rows at a time


@dataclass(frozen=True)
class _Entry:
    """Where the rows of one user of one file are."""

    index: Index
    name: str
    x: int
    y: int
    count: Any
    split: int | None

    @property
    def where(self) -> str:
        """The file and the user, for messages."""
        return f"{self.index.path}: client {self.name!r}"


def open_leaf(path: Path, source: Source, clients: int | None = None) -> Table:
    """Open a LEAF file or folder.

    Args:
        path: A `.json` file, a folder of them, or one with `train/` and `test/`.
        source: The options; for text, `levels["x"]` are the characters and `classes` the targets'.
        clients: Take the first so many clients; None takes all.
    """
    where = str(path)
    found = _files(path, source)
    entries = _entries(found.files)
    notes = found.notes
    if clients is not None:
        names = list(dict.fromkeys(entry.name for entry in entries))
        wanted = set(first_clients(names, clients, where))
        entries = [entry for entry in entries if entry.name in wanted]
        notes += kept_note(len(wanted), len(names))
    coder = plan_coder(source, where)
    if coder is not None:
        rows: Rows = Coded(coder, text_place(source, where))
        shape, plan = coder.shape, coder.plan(source, where)
    else:
        shape, plan = _plannumbers_of(entries, source, where)
        rows = Numbers(source, shape, plan)
        shape = shape if plan.picks is None else (len(plan.names),)
    place = "row {} (from 0) of its user_data".format
    is_sparse = coder is not None and coder.sparse
    notes += () if coder is None else coder.notes
    return Table(where, shape, plan, partial(_read, entries, rows), place, notes, is_sparse)


def _plannumbers_of(
    entries: Sequence[_Entry], source: Source, where: str
) -> tuple[tuple[int, ...], Columns]:
    """Find the shape of a row by the first user that has one."""
    first = next(
        (user for user, more in _users(entries, True) for user in more or [user] if user.x), None
    )
    if first is None:
        return (0,), Columns(range(0))
    shape = numbers_of(first, source, None).shape[1:]
    columns = range(int(np.prod(shape)))
    # text has no columns that options could name
    named = not isinstance(first.x[0], str)
    return shape, plan_columns(columns, source, where=where) if named else Columns(columns)


def _read(entries: Sequence[_Entry], rows: Rows, features: bool) -> Iterator[Batch]:
    for group, parts in _groups(entries, features):
        sizes = [len(user.y) for user in group]
        y = np.concatenate([user.y for user in group if len(user.y)] or [group[0].y])
        splits = [user.split for user in group]
        whole = Batch(
            rows=np.concatenate([np.arange(size) for size in sizes]),
            names=[user.name for user in group],
            codes=np.repeat(np.arange(len(group)), sizes),
            x=None,
            y=y,
            split=None if splits[0] is None else np.repeat(np.array(splits), sizes),
            real=y.dtype.kind == "f",
        )
        if not features or not len(y):
            yield whole
            continue
        yield whole.take(np.zeros(0, dtype=np.int64))  # every name, before rows in parts
        for part in parts:
            for start, x in rows.encode(part):
                at = np.arange(start, start + x.shape[0]) + part[0].first
                yield replace(whole.take(at), x=x)


_Group = tuple[list[User], Iterable[list[User]]]
"""Users, and the same again in parts, each with some rows of one or all rows of several."""


def _groups(entries: Sequence[_Entry], features: bool) -> Iterator[_Group]:
    """Put small users together, as long as their targets are alike; large ones stay alone."""
    group: list[User] = []
    size, kind = 0, None
    for user, more in _users(entries, features):
        mine = (user.y.dtype.kind in "OU", user.y.shape[1:]) if len(user.y) else kind
        if group and (more is not None or kind not in (None, mine)):
            yield group, [group]
            group, size, kind = [], 0, None
        if more is not None:
            yield [user], ([part] for part in more)
            continue
        group.append(user)
        size += user.size
        kind = mine if kind is None else kind
        del user  # or it would be held while the next one is decoded
        if size > _TOGETHER:
            yield group, [group]
            group.clear()
            size, kind = 0, None
    if group:
        yield group, [group]


def _users(
    entries: Sequence[_Entry], features: bool
) -> Iterator[tuple[User, Iterator[User] | None]]:
    """Decode users one after the other, x only if features are wanted.

    Of a large user x is left out, and handed out in parts beside it.
    """
    path, file = None, None
    with ExitStack() as stack:
        for entry in entries:
            if file is None or path != entry.index.path:
                stack.close()
                path = entry.index.path
                with reading(path):
                    file = stack.enter_context(path.open("rb"))
            if features and entry.index.size(entry.x) > _LARGE:
                large = _user(entry, file, False)
                yield large, _parts(entry, file, large)
            else:
                yield _user(entry, file, features), None  # no name here holds it any longer


def _user(entry: _Entry, file: BinaryIO, features: bool) -> User:
    index = entry.index
    with reading(index.path):
        y = index.value(file, entry.y)
        off = entry.count is not None and entry.count != len(y)
        x = index.value(file, entry.x) if features else []
        rows = sum(map(len, index.items(file, entry.x))) if off else len(x)
    if (features or off) and rows != len(y):
        raise _unequal(entry, rows, len(y))
    if off:
        raise DataError(
            f"{entry.where}: num_samples says {entry.count}, user_data has {len(y)} rows; correct "
            "the count, or fetch the file again if rows are lost"
        )
    size = index.size(entry.x) + index.size(entry.y)
    return User(entry.where, entry.name, x, _labels(y, entry.where), entry.split, size)


def _parts(entry: _Entry, file: BinaryIO, user: User) -> Iterator[User]:
    """Decode the rows of a large user, some at a time."""
    first, rows = 0, len(user.y)
    with reading(entry.index.path):
        for x in entry.index.items(file, entry.x):
            if x and first + len(x) <= rows:
                yield replace(user, x=x, first=first)
            first += len(x)
    if first != rows:
        raise _unequal(entry, first, rows)


def _unequal(entry: _Entry, rows: int, targets: int) -> DataError:
    return DataError(f"{entry.where}: x has {rows} rows, y {targets}; give one target a row")


def _files(path: Path, source: Source) -> Found:
    """List the files with the split each is of."""
    if path.is_file():
        return Found(((path, None),))
    found = find_files(path, JSON, source.splits)
    if not found.files:
        raise DataError(
            f"{path}: no LEAF json here; expected *.json, or train/*.json and test/*.json, or "
            "*.parquet, *.h5, or a folder saved by datasets"
        )
    return found


def _entries(files: Sequence[tuple[Path, int | None]]) -> list[_Entry]:
    """Find the users of all files."""
    seen: dict[tuple[str, int | None], Path] = {}
    entries: list[_Entry] = []
    for path, split in files:
        index = _index(path)
        users, data = index.content["users"], index.content["user_data"]
        counts = index.content.get("num_samples") or [None] * len(users)
        if len(counts) != len(users) or len(data) != len(users):
            raise DataError(
                f"{path}: {len(users)} users, {len(counts)} num_samples and {len(data)} entries of "
                "user_data; it needs one of each for a user"
            )
        for name, count in zip(map(str, users), counts, strict=True):
            if (name, split) in seen:
                raise DataError(
                    f"{path}: duplicate client {name!r}, already in {seen[name, split]}; name each "
                    "client once in a split"
                )
            if count is not None and not _is_count(count):
                raise DataError(
                    f"{path}: client {name!r}: num_samples is {count!r}; expected a whole number"
                )
            seen[name, split] = path
            x, y = _marks(f"{path}: client {name!r}", data.get(name))
            entries.append(_Entry(index, name, x, y, count, split))
    return entries


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0


def _index(path: Path) -> Index:
    with reading(path):
        index = index_json(path, _DEPTH, partial(_objects, path))
    found = index.content
    if not isinstance(found, dict) or not {"users", "user_data"} <= set(found):
        raise DataError(f"{path}: not LEAF json; expected the keys users and user_data")
    kinds = {"users": list, "user_data": dict, "num_samples": list | None}
    if not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise DataError(
            f"{path}: not LEAF json; users and num_samples are lists and user_data an object there"
        )
    return index


def _objects(path: Path, pairs: Pairs) -> Any:
    """Make an object of the skeleton; a user with rows becomes the marks of its x and y."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        once = (
            "give it"
            if twice in ("x", "y", "users", "user_data", "num_samples")
            else "name each client"
        )
        raise DataError(f"{path}: {twice!r} is given twice; {once} once")
    marks = [found.get(key) for key in "xy"]
    if not all(isinstance(mark, list) and len(mark) == 1 for mark in marks):
        return found
    return tuple(mark[0] for mark in marks if mark)


def _marks(where: str, rows: Any) -> tuple[int, int]:
    if isinstance(rows, tuple) and all(isinstance(mark, int) for mark in rows):
        return rows[0], rows[1]
    if isinstance(rows, dict) and {"x", "y"} <= set(rows):
        odd = next((key for key in "xy" if not isinstance(rows[key], list)), "x")
        raise DataError(
            f"{where}: {odd} is {_KINDS.get(type(rows[odd]), 'a number')}; expected a list with "
            "one item a row"
        )
    raise DataError(f"{where}: user_data holds no x and y for it; add them or take it out")


def _labels(y: list[Any], where: str) -> NDArray[Any]:
    try:
        return targets_of(y, where)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: targets of unequal widths; give as many each") from error
