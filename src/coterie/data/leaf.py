"""LEAF json (Caldas et al., 2018, arXiv:1812.01097): users, num_samples, user_data.

A path is one file, a folder of files, or a folder with `train/` and `test/`, which then are the
source's split. ijson reads a file user by user, so memory holds the rows of a few users and the
targets of all beside the result.

Rows are numbers (FEMNIST), text of declared characters, each read as its index (Shakespeare), text
by a public vocabulary (Sent140, where a row is a list with the text at position 4), or names of
images (CelebA).
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ijson
import numpy as np
from numpy.typing import NDArray

from coterie.data.assemble import check_names, targets_of
from coterie.data.config import JSON, Found, Source, find_files, find_twice, reading
from coterie.data.federated import DataError
from coterie.data.tables import (
    NONE,
    Batch,
    Columns,
    Table,
    coder_columns,
    first_clients,
    kept_note,
    plan_columns,
    unknown_level,
)
from coterie.data.text_images import Coder, Values, plan_coder

LEAF_CHARACTERS: tuple[str, ...] = tuple(
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The 80 characters of LEAF's own Shakespeare models."""
_SENT140_TEXT = 4  # position of the text in a row of Sent140: [id, date, query, user, text, ...]
_KINDS = ((dict, "an object"), (str, "text"), (type(None), "null"), (bool, "true or false"))
_Encode = Callable[[Sequence["_User"]], Iterator[tuple[int, Values]]]
"""Yields the number of the first row, and the features of the next rows."""
_TOGETHER = 1 << 16  # values of small users that make one batch
_WHOLE = 1 << 30  # bytes of a file that json may read at once
_CHUNK = 1 << 15  # bytes scanned at a time
_DEEPEST = 32  # levels of brackets; ijson crashes on very deep ones
_OPEN, _CLOSE = tuple(b"[{"), tuple(b"]}")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:', re.DOTALL)


class _Object(dict[str, Any]):
    """A JSON object that remembers a key that is given twice."""

    twice: str | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        self.twice = key if key in self else self.twice
        super().__setitem__(key, value)

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> "_Object":
        made = cls()
        for key, value in pairs:
            made[key] = value
        return made


@dataclass(frozen=True)
class _File:
    """One LEAF file; `split` is the number of its part.

    ijson accepts strict JSON only. A file that it refuses is read at once by json, which accepts
    NaN and Infinity, and reports the line and character of an error. `check` runs before both.
    """

    path: Path
    split: int | None
    strict: bool = True

    def check(self) -> None:
        """Refuse a file that is nested too deeply, or has a top-level key twice."""
        with reading(self.path):
            keys = _KEY.findall(b"".join(self._top_level()))
        twice = find_twice([key.decode("utf-8", "replace") for key in keys])
        if twice is not None:
            raise DataError(f"{self.path}: {twice!r} is given twice; give it once")

    def _top_level(self) -> Iterator[bytes]:
        """Yield the bytes of the file that lie inside one bracket."""
        depth, quoted, rest = 0, False, b""
        with self._opened() as file:
            while chunk := file.read(_CHUNK):
                text = rest + chunk
                masked = _ESCAPE.sub(b"__", text)
                # an escape that the chunk cuts is read with the next chunk
                text, rest = (text[:-1], b"\\") if masked.endswith(b"\\") else (text, b"")
                if not text:
                    continue
                plain = np.frombuffer(masked, np.uint8, len(text))
                inside = np.logical_xor.accumulate(plain == ord('"')) ^ quoted
                steps = np.isin(plain, _OPEN).astype(np.int32) - np.isin(plain, _CLOSE)
                levels = np.cumsum(np.where(inside, 0, steps)) + depth
                if levels.max() > _DEEPEST:
                    raise DataError(
                        f"{self.path}: brackets are nested deeper than {_DEEPEST} levels, which is "
                        "not LEAF json; correct the file"
                    )
                yield np.frombuffer(text, np.uint8)[levels == 1].tobytes()
                depth, quoted = int(levels[-1]), bool(inside[-1])

    def names(self) -> Any:
        """Return `users` with every character unchanged; ijson.items reads half a pair as "?"."""
        with self._opened() as file:
            return next(ijson.get_backend("python").items(file, "users"), None)

    def head(self) -> tuple[Any, Any]:
        """Return `users` and `num_samples`, None where absent."""
        if not self.strict:
            whole = self._parsed()
            return whole.get("users"), whole.get("num_samples")
        return self._first("users"), self._first("num_samples")

    def _first(self, key: str) -> Any:
        with self._opened() as file:
            return next(ijson.items(file, key, use_float=True), None)

    def users(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the content of each user, in the order of the file."""
        if not self.strict:
            whole = self._parsed().get("user_data")
            yield from whole.items() if isinstance(whole, dict) else ()
            return
        with self._opened() as file:
            yield from ijson.kvitems(file, "user_data", use_float=True, map_type=_Object)

    def _opened(self) -> Any:
        file = self.path.open("rb")
        # some editors begin a file with a byte order mark
        file.seek(len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)
        return file

    def _parsed(self) -> Any:
        with reading(self.path):
            text = self.path.read_text(encoding="utf-8-sig")
            found = json.loads(text, object_pairs_hook=_Object.of)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _User:
    """One user of one file; x is empty where only y is kept."""

    path: Path
    name: str
    x: list[Any]
    y: NDArray[Any]

    @property
    def where(self) -> str:
        """The file and the user, for messages."""
        return f"{self.path}: client {self.name!r}"

    @property
    def size(self) -> int:
        """The approximate number of values."""
        first = self.x[0] if self.x else None
        return len(self.y) * (len(first) if isinstance(first, list | str) else 1)


@dataclass(frozen=True)
class _Index:
    """One file, and its users with their targets, in the order of `users`."""

    file: _File
    users: Mapping[str, _User]

    def rows(self) -> Iterator[_User]:
        """Yield the users with their rows, in the order of the file."""
        yield from map(partial(_user, self.file.path), self.file.users())


def open_leaf(path: Path, source: Source, clients: int | None = None) -> Table:
    """Open a LEAF file or folder; `clients` takes the first of them."""
    where, found = str(path), _files(path, source)
    indexes = [_index(_File(file, split)) for file, split in found.files]
    _refuse_duplicates(indexes)
    names = list(dict.fromkeys(name for index in indexes for name in index.users))
    wanted = names if clients is None else first_clients(names, clients, where)
    notes = (*found.notes, *kept_note(len(wanted), len(names)))
    coder = plan_coder(source, where)
    if coder is not None:
        rows: _Encode = partial(_coded, coder, _text_position(source, where))
        shape, columns = coder.shape, coder_columns(coder, source, where)
        notes += coder.notes
    else:
        shape, columns = _plan_numbers(indexes, frozenset(wanted), source, where)
        rows = partial(_encoded, source, shape, columns)
        shape = shape if columns.picks is None else (len(columns.names),)
    return Table(
        where,
        shape,
        columns,
        partial(_read, indexes, wanted, rows),
        "row {} (from 0) of its user_data".format,
        notes,
        sparse=coder is not None and coder.sparse,
    )


def _files(path: Path, source: Source) -> Found:
    """List the files with the part of each."""
    if path.is_file():
        return Found(((path, None),))
    found = find_files(path, JSON, source.splits)
    if not found.files:
        raise DataError(
            f"{path}: no LEAF json here; expected *.json, or train/*.json and test/*.json, or "
            "*.parquet, *.h5, or a folder saved by datasets"
        )
    return found


def _index(file: _File) -> _Index:
    """Check a file, and read the targets of its users."""
    file.check()
    try:
        return _strict_index(file)
    except ijson.JSONError as error:
        if file.path.stat().st_size > _WHOLE:
            found = " ".join(str(error).split())
            raise DataError(
                f"{file.path}: not whole JSON ({found}); it is truncated or damaged: fetch it again"
            ) from error
    return _strict_index(replace(file, strict=False))


def _strict_index(file: _File) -> _Index:
    path = file.path
    with reading(path):
        users, counts = file.head()
        found: dict[str, _User] = {}
        for user in map(partial(_user, path), file.users()):
            if user.name in found:
                raise DataError(f"{path}: {user.name!r} is given twice; name each client once")
            found[user.name] = replace(user, x=[])
            del user  # or its rows would be held while the next user is read
    if users is None:
        raise DataError(f"{path}: not LEAF json; expected the keys users and user_data")
    if not isinstance(users, list) or not isinstance(counts, list | None):
        raise DataError(
            f"{path}: not LEAF json; users and num_samples are lists and user_data an object there"
        )
    names = [str(name) for name in users]
    if file.strict and any("?" in name for name in names):
        check_names([str(name) for name in file.names()], str(path))
    _check_counts(path, names, counts or [None] * len(names), found)
    return _Index(file, {name: found[name] for name in names})


def _check_counts(
    path: Path, names: list[str], counts: list[Any], found: Mapping[str, _User]
) -> None:
    if len(counts) != len(names) or len(found) != len(names):
        raise DataError(
            f"{path}: {len(names)} users, {len(counts)} num_samples and {len(found)} entries of "
            "user_data; it needs one of each for a user"
        )
    if (twice := find_twice(names)) is not None:
        raise DataError(f"{path}: duplicate client {twice!r}; name each client once in a split")
    for name, count in zip(names, counts, strict=True):
        where = f"{path}: client {name!r}"
        if name not in found:
            raise DataError(f"{where}: user_data holds no x and y for it; add them or take it out")
        whole = isinstance(count, int | float) and not isinstance(count, bool) and count % 1 == 0
        if count is not None and not whole:
            raise DataError(f"{where}: num_samples is {count!r}; expected a whole number")
        if count is not None and count != len(found[name].y):
            raise DataError(
                f"{where}: num_samples says {count}, user_data has {len(found[name].y)} rows; "
                "correct the count, or fetch the file again if rows are lost"
            )


def _refuse_duplicates(indexes: Sequence[_Index]) -> None:
    seen: dict[tuple[str, int | None], Path] = {}
    for index in indexes:
        for name in index.users:
            key = (name, index.file.split)
            if key in seen:
                raise DataError(
                    f"{index.file.path}: duplicate client {name!r}, already in {seen[key]}; name "
                    "each client once in a split"
                )
            seen[key] = index.file.path


def _user(path: Path, item: tuple[str, Any]) -> _User:
    """Check the content of one user."""
    name, content = item
    where = f"{path}: client {name!r}"
    if not isinstance(content, dict) or not {"x", "y"} <= set(content):
        raise DataError(f"{where}: user_data holds no x and y for it; add them or take it out")
    if isinstance(content, _Object) and content.twice is not None:
        raise DataError(f"{where}: {content.twice!r} is given twice; give it once")
    for key in "xy":
        if not isinstance(content[key], list):
            raise DataError(
                f"{where}: {key} is {_kind(content[key])}; expected a list with one item per row"
            )
    x, y = content["x"], content["y"]
    if len(x) != len(y):
        raise DataError(f"{where}: x has {len(x)} rows, y {len(y)}; give one target per row")
    try:
        return _User(path, name, x, targets_of(y, where))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{where}: targets of unequal widths; give each the same") from error


def _kind(value: Any) -> str:
    return next((text for kind, text in _KINDS if isinstance(value, kind)), "a number")


def _read(
    indexes: Sequence[_Index], wanted: Sequence[str], rows: _Encode, features: bool
) -> Iterator[Batch]:
    # All clients first: their order is that of `users`, and those without rows stay.
    yield Batch(NONE, wanted, NONE, None, NONE)
    chosen = frozenset(wanted)
    for index in indexes:
        users = index.rows() if features else iter(index.users.values())
        # filter, unlike a generator expression, does not hold a user while the next one is read
        for group in _groups(filter(lambda user: user.name in chosen, users)):
            whole = _batch(group, index.file.split)
            if not features or not len(whole.y):
                yield whole
                continue
            for start, x in rows(group):
                yield replace(whole.take(np.arange(start, start + x.shape[0])), x=x)


def _groups(users: Iterator[_User]) -> Iterator[list[_User]]:
    """Group consecutive users up to a size, as long as their targets are alike."""
    group: list[_User] = []
    size, kind = 0, None
    for user in users:
        mine = (user.y.dtype.kind in "OU", user.y.shape[1:]) if len(user.y) else kind
        if group and kind not in (None, mine):
            yield group
            group, size, kind = [], 0, None
        group.append(user)
        size += user.size
        kind = mine if kind is None else kind
        del user  # or its rows would be held while the next user is read
        if size > _TOGETHER:
            yield group
            group.clear()
            size, kind = 0, None
    if group:
        yield group


def _batch(group: Sequence[_User], split: int | None) -> Batch:
    sizes = [len(user.y) for user in group]
    y = np.concatenate([user.y for user in group if len(user.y)] or [group[0].y])
    return Batch(
        rows=np.concatenate([np.arange(size) for size in sizes]),
        names=[user.name for user in group],
        codes=np.repeat(np.arange(len(group)), sizes),
        x=None,
        y=y,
        split=None if split is None else np.full(len(y), split),
        real=y.dtype.kind == "f",
    )


def _coded(coder: Coder, position: int, group: Sequence[_User]) -> Iterator[tuple[int, Values]]:
    """Encode rows that are text or names of images, as many together as the coder takes."""
    owners = [(user, at) for user in group for at in range(len(user.x))]
    for start in range(0, len(owners), coder.step):
        part = owners[start : start + coder.step]

        def fail(row: int, found: str, part: Any = part) -> DataError:
            user, at = part[row]
            return DataError(f"{user.where}, row {at} (from 0): {found}")

        rows = [user.x[at] for user, at in part]
        if coder.kind == "text":
            # a row that is a list holds its text at one position, as in Sent140
            rows = [
                row[position] if isinstance(row, list) and position < len(row) else row
                for row in rows
            ]
        yield start, coder.encode([rows], fail)


def _text_position(source: Source, where: str) -> int:
    if not source.features:
        return _SENT140_TEXT
    if len(source.features) > 1 or not source.features[0].isdecimal():
        raise DataError(
            f"{where}: features = {source.features!r}: expected the position of the text in a row, "
            "from 0, e.g. '4'"
        )
    return int(source.features[0])


def _plan_numbers(
    indexes: Sequence[_Index], wanted: frozenset[str], source: Source, where: str
) -> tuple[tuple[int, ...], Columns]:
    """Return the shape of a row of the first user that has one, and the columns."""
    users = (user for index in indexes for user in index.rows())
    first = next((user for user in users if user.x and user.name in wanted), None)
    if first is None:
        return (0,), Columns(range(0))
    shape = _numbers(first, source, None).shape[1:]
    columns = range(int(np.prod(shape)))
    # text has no columns that options could name
    named = not isinstance(first.x[0], str)
    return shape, plan_columns(columns, source, where=where) if named else Columns(columns)


def _encoded(
    source: Source, shape: tuple[int, ...], columns: Columns, group: Sequence[_User]
) -> Iterator[tuple[int, Values]]:
    """Encode rows that are numbers, or text of declared characters."""
    parts = [
        columns.encode(_numbers(user, source, shape), partial(_fail, user))
        for user in group
        if user.x
    ]
    yield 0, np.concatenate(parts)


def _numbers(user: _User, source: Source, shape: tuple[int, ...] | None) -> NDArray[np.float64]:
    """Return a user's rows as one array."""
    rows: Any = user.x
    if any(isinstance(row, str) for row in rows):
        rows = _characters(user, source)
    try:
        x = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad_rows(user, rows) from error
    x = x[:, None] if x.ndim == 1 else x
    if shape is not None and x.shape[1:] != shape:
        raise DataError(
            f"{user.where}: rows of shape {x.shape[1:]}, where the first client has {shape}; give "
            "every row the same number of values"
        )
    return x


def _characters(user: _User, source: Source) -> list[list[int]]:
    levels = source.levels.get("x", ())
    index = {character: at for at, character in enumerate(levels)}
    for at, row in enumerate(user.x):
        if not levels or not isinstance(row, str):
            raise DataError(
                f"{user.where}, row {at} (from 0): found {str(row)[:40]!r}, expected numbers; "
                "for text declare its characters, levels={'x': (...)}, and the classes, or set "
                "text= and a public vocabulary=; for names of images set images= to their folder"
            )
        lost = next((character for character in row if character not in index), None)
        if lost is not None:
            raise _fail(user, at, "x", unknown_level(lost, levels))
    return [[index[character] for character in row] for row in user.x]


def _bad_rows(user: _User, rows: list[Any]) -> DataError:
    """Return the error for a row that is no list of numbers, or has another width."""
    width = np.shape(rows[0]) if not isinstance(rows[0], list) else (len(rows[0]),)
    for at, row in enumerate(rows):
        where = f"{user.where}, row {at} (from 0)"
        try:
            values = np.array(row, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            return DataError(
                f"{where}: found {str(row)[:60]}, expected numbers; correct the row, or set text= "
                "and a public vocabulary= for text"
            )
        if values.shape[:1] != width:
            return DataError(
                f"{where}: {len(np.atleast_1d(values))} values, where the first row has "
                f"{width[0] if width else 1}; give every row the same number"
            )
    return DataError(f"{user.where}: rows of unequal shapes; give every row the same")


def _fail(user: _User, row: int, column: str, found: str) -> DataError:
    return DataError(f"{user.where}, row {row} (from 0), column {column!r}: {found}")
