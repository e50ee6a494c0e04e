"""Dumps of TensorFlow Federated's datasets, such as StackOverflow: HDF5 and SQLite, no TensorFlow.

HDF5: a group `examples` has a group for each client, with an array for each column. A folder may
hold one file for each part, named by it (`stackoverflow_train.h5`).

SQLite: a table `examples` (split_name, client_id, serialized_example_proto), optionally with
`client_metadata` (client_id, split_name, num_examples), and optionally compressed as a whole.

Clients are sorted by name, as in TFF. Parts other than the declared ones are left out. The first
clients are those of the training part. Columns are then read as those of a table: text and tags by
public words, arrays unchanged. Posts of StackOverflow are `tokens` and `title`, joined, cut at
spaces (as PMTL does).
"""

import bz2
import gzip
import importlib
import lzma
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.config import HDF5, Found, Source, find_files, reading
from coterie.data.federated import DataError
from coterie.data.tables import File, Piece, arrow_column, first_clients, kept_note
from coterie.data.text_images import as_text

SQLITE = (".sqlite", ".sqlite3", ".db")
PACKED: dict[str, Any] = {
    ".lzma": lzma.open,
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zlib": open,
}
_ROWS = 1 << 12  # rows of small clients that make one piece
_ASKED = 400  # clients in one query
_JOURNAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"  # begins a journal that is to be rolled back
_COUNTS = "SELECT split_name, client_id, num_examples FROM client_metadata"
_VARINT, _BYTES = 0, 2  # wire types of protocol buffers
_FIXED = {1: 8, 5: 4}  # wire types of a fixed size
Counts = Mapping[tuple[str, str], int]
"""Rows by (part, client)."""


def open_hdf5(path: Path, source: Source, clients: int | None) -> File:
    """Open an HDF5 dump, or a folder of them; `clients` takes the first of them."""
    found = find_files(path, HDF5, source.splits) if path.is_dir() else Found(((path, None),))
    parts = _hdf5_parts(path, found, source)
    named = {part: _hdf5_clients(part) for part, _ in parts}
    first = next(iter(named))
    chosen = first_clients(sorted(named[first]), clients, str(path))
    if clients is None:
        chosen = first_clients(sorted({n for names in named.values() for n in names}), None, "")
    with _hdf5(first) as file:
        names = tuple(_group(first, file, named[first][0]))
    own = (source.client, *((source.split,) if len(parts) > 1 else ()))
    pieces = partial(_hdf5_pieces, parts, frozenset(chosen), source)
    notes = (*(kept_note(len(chosen), len(named[first])) if clients else ()), *found.notes)
    return File(
        str(path), (*own, *names), pieces, clients=tuple(chosen), notes=notes, tokens="spaces"
    )


def _hdf5_parts(path: Path, found: Found, source: Source) -> list[tuple[Path, int]]:
    """Return the file of each part; a part must be in one file."""
    whole = path.is_file() or len(found.files) == found.parts == len(source.splits)
    if not whole:
        named = ", ".join(sorted(file.name for file in path.rglob("*") if file.is_file()))
        raise DataError(
            f"{path}: the files are {named}; expected one file for each of the parts "
            f"{', '.join(source.splits)}: rename them, set splits, or name one file"
        )
    return [(file, split or 0) for file, split in found.files]


@contextmanager
def _hdf5(path: Path) -> Iterator[Any]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise DataError(
            f"{path}: reading HDF5 needs h5py, which is not installed; pip install coterie[hdf5]"
        ) from error
    with reading(path):
        try:
            with h5py.File(path, "r") as file:
                if not isinstance(file.get("examples"), h5py.Group):
                    raise DataError(
                        f"{path}: no group 'examples', the groups are {', '.join(file) or 'none'}; "
                        "expected TFF's layout, examples/CLIENT/COLUMN"
                    )
                yield file
        # the error of a damaged file depends on the place of the damage
        except (OSError, LookupError, RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(error) from error


def _group(path: Path, file: Any, client: str) -> Mapping[str, Any]:
    """Return the columns of a client."""
    group = file["examples"][client]
    if not hasattr(group, "keys"):
        raise DataError(
            f"{path}: examples/{client} is an array, not a group of columns; expected TFF's "
            "layout, examples/CLIENT/COLUMN"
        )
    return dict(group.items())


def _hdf5_clients(path: Path) -> list[str]:
    with _hdf5(path) as file:
        names = list(file["examples"])
    if not names:
        raise DataError(f"{path}: no clients in 'examples'; give at least one")
    return names


def _hdf5_pieces(
    parts: Sequence[tuple[Path, int]],
    wanted: frozenset[str],
    source: Source,
    columns: Sequence[str],
) -> Iterator[Piece]:
    pile = _Pile(source, columns)
    images: dict[str, bool] = {}
    for path, split in parts:
        with _hdf5(path) as file:
            for client in file["examples"]:
                if client not in wanted:
                    continue
                values = _columns(path, client, _group(path, file, client), pile.own, images)
                rows = len(next(iter(values.values()), ()))
                yield from pile.add(client, split, rows, values)
    yield from pile.rest()


def _columns(
    path: Path,
    client: str,
    group: Mapping[str, Any],
    names: Sequence[str],
    images: dict[str, bool],
) -> dict[str, list[Any]]:
    """Return columns of a client; `images` records which columns are images of bytes."""
    values: dict[str, list[Any]] = {}
    for name in names:
        if not hasattr(group.get(name), "shape"):
            raise DataError(
                f"{path}: client {client!r} has no {name!r}, only {', '.join(group)}; give every "
                "client the same columns"
            )
        found = np.atleast_1d(group[name][()])
        values[name] = _plain(found)
        is_image = found.dtype == np.uint8 and found.ndim > 2
        if len(found) and images.setdefault(name, is_image) != is_image:
            raise DataError(
                f"{path}: client {client!r} holds {name!r} as {found.dtype} of shape "
                f"{found.shape}, and others do not; images of bytes are divided by 255, so give "
                "every client the same type"
            )
    sizes = {name: len(column) for name, column in values.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"{path}: client {client!r} has {sizes} rows; give the same number of each")
    return values


def _plain(array: NDArray[Any]) -> list[Any]:
    """Return numbers unchanged, and bytes as text."""
    if array.dtype.kind in "OS":
        return [as_text(value) for value in array.tolist()]
    return list(array.tolist() if array.ndim == 1 else array)


class _Pile:
    """Collects rows of small clients into pieces."""

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self.source, self.rows = source, 0
        self.own = [name for name in columns if name not in (source.client, source.split)]
        self.values: dict[str, list[Any]] = {name: [] for name in columns}

    def add(
        self, client: str, split: int, rows: int, values: dict[str, list[Any]]
    ) -> Iterator[Piece]:
        """Add rows of one client; yield a piece when there are enough."""
        given = {**values, self.source.client: [client] * rows, self.source.split: [split] * rows}
        for name in self.values:
            self.values[name] += given[name]
        self.rows += rows
        if self.rows >= _ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[Piece]:
        """Yield the remaining rows."""
        if self.rows:
            columns = {name: arrow_column(held) for name, held in self.values.items()}
            yield Piece(columns, self.rows)
        self.values, self.rows = {name: [] for name in self.values}, 0


def is_sqlite(name: str) -> bool:
    """Return whether a lower-case name is that of a SQLite file, optionally compressed."""
    return name.endswith((*SQLITE, *(end + packing for end in SQLITE for packing in PACKED)))


@dataclass(frozen=True)
class _Database:
    """A SQLite file; `file` is its unpacked copy."""

    path: Path
    file: Path

    @contextmanager
    def query(self, text: str, values: Sequence[Any] = ()) -> Iterator[sqlite3.Cursor]:
        """Run a query; the file is opened read-only."""
        address = f"{self.file.resolve().as_uri()}?mode=ro&immutable=1"
        with reading(self.path):
            try:
                with closing(sqlite3.connect(address, uri=True)) as base:
                    yield base.execute(text, values)
            except sqlite3.Error as error:
                raise ValueError(error) from error


def open_sqlite(path: Path, source: Source, clients: int | None) -> File:
    """Open a SQLite dump; see `open_hdf5`."""
    _refuse_pending(path)
    base = _unpack(path)
    with base.query("SELECT name FROM sqlite_master WHERE type = 'table'") as rows:
        tables = [name for (name,) in rows]
    if "examples" not in tables:
        raise DataError(
            f"{path}: no table 'examples', the tables are {', '.join(tables) or 'none'}; expected "
            "TFF's layout: split_name, client_id, serialized_example_proto"
        )
    counts = _counts(base) if "client_metadata" in tables else None
    pairs = _pairs(base) if counts is None else list(counts)
    splits = list(dict.fromkeys(split for split, _ in pairs))
    parts = [name for name in source.splits if name in splits]
    if not parts:
        raise DataError(
            f"{path}: the parts are {', '.join(map(repr, splits)) or 'none'}, expected "
            f"{', '.join(map(repr, source.splits))}; name them with splits"
        )
    taken = {client for split, client in pairs if split in (parts[:1] if clients else parts)}
    chosen = first_clients(sorted(taken), clients, str(path))
    names = _sqlite_columns(base, parts)
    left = [name for name in splits if name not in parts]
    notes = kept_note(len(chosen), len(taken)) if clients else ()
    notes += (f"parts left out: {', '.join(left)}",) if left else ()
    own = (source.client, *((source.split,) if len(parts) > 1 else ()))
    pieces = partial(_sqlite_pieces, base, parts, chosen if clients else None, source, counts)
    return File(
        str(path), (*own, *names), pieces, clients=tuple(chosen), notes=notes, tokens="spaces"
    )


def _refuse_pending(path: Path) -> None:
    """Refuse a file with pending changes beside it, which would not be read."""
    log, journal = (path.with_name(f"{path.name}-{end}") for end in ("wal", "journal"))
    if log.is_file() and log.stat().st_size:
        raise DataError(
            f"{path}: {log.name} holds rows that are not in the file yet; checkpoint it: PRAGMA "
            "wal_checkpoint(TRUNCATE)"
        )
    if journal.is_file() and journal.read_bytes()[: len(_JOURNAL)] == _JOURNAL:
        raise DataError(
            f"{path}: {journal.name} holds a change that was never finished; open the file once "
            "with sqlite3, which undoes it"
        )


def _pairs(base: _Database) -> list[tuple[str, str]]:
    """Return parts and clients, from the rows."""
    with base.query("SELECT DISTINCT split_name, client_id FROM examples") as rows:
        return [(str(split), _client(base, client)) for split, client in rows]


def _counts(base: _Database) -> dict[tuple[str, str], int] | None:
    """Return the number of rows of each client in each part, where the file declares it."""
    with base.query("SELECT name FROM pragma_table_info('client_metadata')") as rows:
        columns = {name for (name,) in rows}
    if not {"split_name", "client_id", "num_examples"} <= columns:
        return None
    counts: Counter[tuple[str, str]] = Counter()
    with base.query(_COUNTS) as rows:
        for split, client, count in rows:
            if not isinstance(count, int):
                raise DataError(
                    f"{base.path}: client_metadata declares {count!r} rows for client {client!r}; "
                    "expected a whole number"
                )
            counts[str(split), _client(base, client)] += count
    return counts


def _client(base: _Database, name: Any) -> str:
    """Return a client's name; columns without a type may hold integers."""
    if isinstance(name, str | int):
        return str(name)
    what = "missing (NULL)" if name is None else f"{name!r}"
    raise DataError(
        f"{base.path}: a client_id is {what}; name the client of every row by text or a whole "
        "number"
    )


def _compare(
    base: _Database,
    counts: Counts,
    found: Counts,
    parts: Sequence[str],
    chosen: frozenset[str] | None,
) -> None:
    """Refuse a file whose rows do not match the declared counts."""
    for split, client in (*counts, *found):
        if split not in parts or not (chosen is None or client in chosen):
            continue
        said, rows = counts.get((split, client)), found.get((split, client), 0)
        if said != rows:
            lead = "does not list it" if said is None else f"declares {said} rows"
            raise DataError(
                f"{base.path}: client {client!r}, part {split!r}: client_metadata {lead}, the "
                f"table examples has {rows}; rows are lost or added: fetch the file again"
            )


def _sqlite_columns(base: _Database, parts: Sequence[str]) -> tuple[str, ...]:
    query = "SELECT serialized_example_proto FROM examples WHERE split_name = ? LIMIT 1"
    with base.query(query, parts[:1]) as rows:
        first = rows.fetchone()
    if first is None:
        raise DataError(f"{base.path}: no rows in the part {parts[0]!r}; give at least one")
    return tuple(_example(base, first[0], "first row"))


def _sqlite_pieces(
    base: _Database,
    parts: Sequence[str],
    chosen: Sequence[str] | None,
    source: Source,
    counts: Counts | None,
    columns: Sequence[str],
) -> Iterator[Piece]:
    pile = _Pile(source, columns)
    found: Counter[tuple[str, str]] = Counter()
    query = "SELECT split_name, client_id, serialized_example_proto FROM examples WHERE"
    query += f" split_name IN ({', '.join('?' * len(parts))})"
    for at in range(0, len(chosen) if chosen else 1, _ASKED):
        some = chosen[at : at + _ASKED] if chosen else ()
        # a column without a type distinguishes integers from text
        group = [*some, *(int(name) for name in some if _is_integer(name))]
        asked = f" AND client_id IN ({', '.join('?' * len(group))})" if group else ""
        with base.query(f"{query}{asked} ORDER BY rowid", [*parts, *group]) as rows:
            for split, given, blob in rows:
                client = _client(base, given)
                found[split, client] += 1
                features = _example(base, blob, f"client {client!r}")
                values = {name: [_one(features.get(name))] for name in pile.own}
                yield from pile.add(client, parts.index(split), 1, values)
    if counts is not None:
        _compare(base, counts, found, parts, frozenset(chosen) if chosen else None)
    yield from pile.rest()


def _is_integer(name: str) -> bool:
    """Return whether a name is an integer as SQLite writes it, in 64 bits."""
    return len(name) < 19 and name.removeprefix("-").isdecimal() and name == str(int(name))


def _one(values: list[Any] | None) -> Any:
    """Return the one value of a feature, or all of several; bytes as text."""
    if not values:
        return None
    texts = [as_text(value) for value in values]
    return texts[0] if len(texts) == 1 else texts


def _example(base: _Database, blob: Any, where: str) -> dict[str, list[Any]]:
    try:
        return parse_example(bytes(blob))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{base.path}: {where}: no tf.train.Example ({error}); the file is damaged or of "
            "another layout: fetch it again"
        ) from error


def _unpack(path: Path) -> _Database:
    """Unpack a compressed file into a temporary one, which is removed after use."""
    end = path.suffix.lower()
    if end not in PACKED:
        return _Database(path, path)
    folder = tempfile.mkdtemp(prefix="coterie-")
    base = _Database(path, Path(folder) / "base.sqlite")
    weakref.finalize(base, shutil.rmtree, folder, ignore_errors=True)
    with reading(path), base.file.open("wb") as out, PACKED[end](path, "rb") as packed:
        engine = zlib.decompressobj() if end == ".zlib" else None
        try:
            while chunk := packed.read(1 << 20):
                out.write(engine.decompress(chunk) if engine else chunk)
        except lzma.LZMAError as error:
            raise ValueError(error) from error
        if engine and not engine.eof:
            raise EOFError("it ends too early")
    return base


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """Return the values of every feature of a tf.train.Example.

    An Example is Features (field 1), a map (field 1) from names to Feature, which is one of a list
    of bytes (1), floats (2) or integers (3), each the repeated field 1, packed or not.

    Raises:
        ValueError: The bytes are no complete Example.
    """
    found: dict[str, list[Any]] = {}
    for features in _nested(data, 1):
        for entry in _nested(features, 1):
            parts = dict(_fields(entry))
            name, feature = parts.get(1), parts.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name")
            found[name.decode("utf-8")] = _values(feature)
    return found


def _values(feature: bytes) -> list[Any]:
    values: list[Any] = []
    for kind, listed in _fields(feature):
        if not isinstance(listed, bytes):
            raise ValueError("a feature that is no list")
        for number, value in _fields(listed):
            if number == 1:
                values += _unpacked(kind, value)
    return values


def _unpacked(kind: int, value: bytes | int) -> list[Any]:
    """Return one value, or several that are packed."""
    if kind == 1:
        return [value]
    if isinstance(value, int):
        return [value - (1 << 64) if value >= 1 << 63 else value]
    if kind == 2:
        return list(np.frombuffer(value, dtype="<f4").tolist())
    at, values = 0, list[Any]()
    while at < len(value):
        number, at = _varint(value, at)
        values += _unpacked(kind, number)
    return values


def _nested(data: bytes, wanted: int) -> Iterator[bytes]:
    for number, value in _fields(data):
        if number == wanted:
            if not isinstance(value, bytes):
                raise ValueError("a number where a message belongs")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if kind != _BYTES and kind not in _FIXED:
            raise ValueError(f"a field of the unknown type {kind}")
        size, at = _varint(data, at) if kind == _BYTES else (_FIXED[kind], at)
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while at < len(data) and shift < 70:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number & ((1 << 64) - 1), at
    raise ValueError("a number does not end")
