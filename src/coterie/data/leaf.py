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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
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
from coterie.data.text_images import Coder, Fail, Values, array_coder, plan_coder, to_array

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
    targets: "Mapping[str, _User]" = field(default_factory=dict)  # users without x, in their order

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

    def first(self, key: str) -> Any:
        """Return the value of `users` or `num_samples`, None where absent."""
        if not self.strict:
            return self._parsed().get(key)
        with self._opened() as file:
            return next(ijson.items(file, key, use_float=True), None)

    def users(self) -> "Iterator[_User]":
        """Yield the users with their rows, in the order of the file."""
        if not self.strict:
            whole = self._parsed().get("user_data")
            yield from starmap(self._user, whole.items() if isinstance(whole, dict) else ())
            return
        with self._opened() as file:
            items = ijson.kvitems(file, "user_data", use_float=True, map_type=_Object)
            yield from starmap(self._user, items)

    def _user(self, name: str, content: Any) -> "_User":
        where = f"{self.path}: client {name!r}"
        if not isinstance(content, dict) or not {"x", "y"} <= set(content):
            raise DataError(f"{where}: user_data holds no x and y for it; add them or take it out")
        if isinstance(content, _Object) and content.twice is not None:
            raise DataError(f"{where}: {content.twice!r} is given twice; give it once")
        for key in "xy":
            if not isinstance(content[key], list):
                kind = next((text for kind, text in _KINDS if isinstance(content[key], kind)), "")
                raise DataError(
                    f"{where}: {key} is {kind or 'a number'}; expected a list with one item per row"
                )
        x, y = content["x"], content["y"]
        if len(x) != len(y):
            raise DataError(f"{where}: x has {len(x)} rows, y {len(y)}; give one target per row")
        try:
            return _User(where, name, x, targets_of(y, where))
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{where}: targets of unequal widths; give each the same") from error

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

    where: str  # the file and the user, for messages
    name: str
    x: list[Any]
    y: NDArray[Any]

    @property
    def size(self) -> int:
        """The approximate number of values."""
        first = self.x[0] if self.x else None
        return len(self.y) * (len(first) if isinstance(first, list | str) else 1)


def open_leaf(path: Path, source: Source, clients: int | None = None) -> Table:
    """Open a LEAF file or folder; `clients` takes the first of them."""
    where, found = str(path), Found(((path, None),))
    if path.is_dir():
        found = find_files(path, JSON, source.splits)
    if not found.files:
        raise DataError(
            f"{path}: no LEAF json here; expected *.json, or train/*.json and test/*.json, or "
            "*.parquet, *.h5, or a folder saved by datasets"
        )
    files = [_with_targets(_File(file, split)) for file, split in found.files]
    _refuse_duplicates(files)
    names = list(dict.fromkeys(name for file in files for name in file.targets))
    wanted = names if clients is None else first_clients(names, clients, where)
    notes = (*found.notes, *kept_note(len(wanted), len(names)))
    coder, position = plan_coder(source, where), 0
    if coder is not None:
        position, columns = _text_position(source, where), coder_columns(coder, source, where)
    else:
        chosen = frozenset(wanted)
        users = (user for file in files for user in file.users() if user.name in chosen)
        coder, columns = _plan_numbers(users, source, where)
    rows = partial(_coded, coder, columns, position)
    return Table(
        where,
        coder.shape if columns.picks is None else (len(columns.names),),
        columns,
        partial(_read, files, wanted, rows),
        "row {} (from 0) of its user_data".format,
        (*notes, *coder.notes),
        sparse=coder.sparse,
    )


def _with_targets(file: _File) -> _File:
    """Check a file, and read the targets of its users."""
    file.check()
    try:
        return _read_targets(file)
    except ijson.JSONError as error:
        if file.path.stat().st_size > _WHOLE:
            found = " ".join(str(error).split())
            raise DataError(
                f"{file.path}: not whole JSON ({found}); it is truncated or damaged: fetch it again"
            ) from error
    return _read_targets(replace(file, strict=False))


def _read_targets(file: _File) -> _File:
    path = file.path
    with reading(path):
        users, counts = file.first("users"), file.first("num_samples")
        found: dict[str, _User] = {}
        for user in file.users():
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
    return replace(file, targets={name: found[name] for name in names})


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


def _refuse_duplicates(files: Sequence[_File]) -> None:
    seen: dict[tuple[str, int | None], Path] = {}
    for file in files:
        for name in file.targets:
            first = seen.setdefault((name, file.split), file.path)
            if first != file.path:
                raise DataError(
                    f"{file.path}: duplicate client {name!r}, already in {first}; name each client "
                    "once in a split"
                )


def _read(
    files: Sequence[_File], wanted: Sequence[str], rows: _Encode, features: bool
) -> Iterator[Batch]:
    # All clients first: their order is that of `users`, and those without rows stay.
    yield Batch(NONE, wanted, NONE, None, NONE)
    chosen = frozenset(wanted)
    for file in files:
        users = file.users() if features else iter(file.targets.values())
        # filter, unlike a generator expression, does not hold a user while the next one is read
        for group in _groups(filter(lambda user: user.name in chosen, users)):
            whole = _batch(group, file.split)
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


def _coded(
    coder: Coder, columns: Columns, position: int, group: Sequence[_User]
) -> Iterator[tuple[int, Values]]:
    """Encode rows, as many together as the coder takes."""
    owners = [(user, at) for user in group for at in range(len(user.x))]
    for start in range(0, len(owners), coder.step):
        part = owners[start : start + coder.step]

        def fail(row: int, found: str, part: Any = part) -> DataError:
            user, at = part[row]
            return DataError(f"{user.where}, row {at} (from 0): {found}")

        def fail_column(row: int, column: str, found: str, fail: Fail = fail) -> DataError:
            return fail(row, f"column {column!r}: {found}")

        rows = [user.x[at] for user, at in part]
        if coder.kind == "text":
            # a row that is a list holds its text at one position, as in Sent140
            rows = [
                row[position] if isinstance(row, list) and position < len(row) else row
                for row in rows
            ]
        yield start, columns.encode(coder.encode([rows], fail), fail_column)


def _text_position(source: Source, where: str) -> int:
    if not source.features:
        return _SENT140_TEXT
    if len(source.features) > 1 or not source.features[0].isdecimal():
        raise DataError(
            f"{where}: features = {source.features!r}: expected the position of the text in a row, "
            "from 0, e.g. '4'"
        )
    return int(source.features[0])


def _plan_numbers(users: Iterator[_User], source: Source, where: str) -> tuple[Coder, Columns]:
    """Return the coder of numbers, or text of declared characters, and the columns."""
    first = next((user for user in users if user.x), None)
    if first is None:
        return array_coder("x", (0,), pixels=False), Columns(range(0))
    levels = source.levels.get("x", ())
    codes = {character: at for at, character in enumerate(levels)}

    def values(row: Any, at: int, fail: Fail) -> Any:
        if not isinstance(row, str):
            return row if isinstance(row, list | None) else [row]
        if not levels:
            raise fail(
                at,
                f"found {row[:40]!r}, expected numbers; for text declare its characters, "
                "levels= of column x, and the classes, or set text= and a public vocabulary=; for "
                "names of images set images= to their folder",
            )
        lost = next((character for character in row if character not in codes), None)
        if lost is not None:
            raise fail(at, f"column 'x': {unknown_level(lost, levels)}")
        return [codes[character] for character in row]

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        return coder.encode([[values(row, at, fail) for at, row in enumerate(columns[0])]], fail)

    def fail_first(row: int, found: str) -> DataError:
        return DataError(f"{first.where}, row {row} (from 0): {found}")

    shape = to_array(values(first.x[0], 0, fail_first), None, 0, fail_first).shape
    coder = array_coder("x", shape, pixels=False)
    # text has no columns that options could name
    plan = partial(plan_columns, source=source, where=where)
    columns = range(int(np.prod(shape)))
    found = Columns(columns) if isinstance(first.x[0], str) else plan(columns)
    return replace(coder, encode=encode), found
