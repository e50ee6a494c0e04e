"""Dumps of TensorFlow Federated's data sets, such as StackOverflow: HDF5 or SQLite, no TensorFlow.

HDF5: a group `examples` with a group for each client, in it a data set for each column. A folder
may hold one file for each part, named by its end (`stackoverflow_train.h5`). SQLite: a table
`examples` (split_name, client_id, serialized_example_proto), perhaps with `client_metadata`, and
perhaps compressed as a whole. Clients come in the order of their names, as in TFF; parts other than
the declared ones are left out, and the first clients are those of the training part.

Columns are then read as those of a table: text and tags by public words, arrays as they are. Posts
of StackOverflow are `tokens` and `title`, joined, cut at spaces (as PMTL does).
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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.columns import first_clients, kept_note
from coterie.data.federated import DataError
from coterie.data.source import Source, reading
from coterie.data.table_files import File, Piece, Slice, arrow_column
from coterie.data.tf_example import parse_example

HDF5 = (".h5", ".hdf5")
SQLITE = (".sqlite", ".sqlite3", ".db")
PACKED: dict[str, Any] = {
    ".lzma": lzma.open,
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zlib": None,
}
_ROWS = 1 << 12  # rows of small clients that make one piece
_ASKED = 500  # clients in one query


def is_sqlite(name: str) -> bool:
    """Whether a lower-case name is that of a SQLite file, perhaps compressed."""
    return name.removesuffix(next((end for end in PACKED if name.endswith(end)), "")).endswith(
        SQLITE
    )


def open_hdf5(path: Path, source: Source, clients: int | None) -> File:
    """Open an HDF5 dump, or a folder of them.

    Args:
        path: The file or folder.
        source: The options.
        clients: Take the first so many clients; None takes all.
    """
    parts = _hdf5_parts(path, source)
    named = {part: _hdf5_clients(part) for part, _ in parts}
    first = next(iter(named))
    chosen = first_clients(sorted(named[first]), clients, str(path))
    if clients is None:
        chosen = first_clients(sorted({n for names in named.values() for n in names}), None, "")
    with _hdf5(first) as file:
        names = tuple(file["examples"][named[first][0]])
    own = (source.client, *((source.split,) if len(parts) > 1 else ()))
    return File(
        str(path),
        (*own, *names),
        partial(_hdf5_pieces, parts, frozenset(chosen), source),
        clients=tuple(chosen),
        notes=kept_note(len(chosen), len(named[first])) if clients else (),
        tokens="spaces",
    )


def _hdf5_parts(path: Path, source: Source) -> list[tuple[Path, int]]:
    if path.is_file():
        return [(path, 0)]
    files = sorted(file for file in path.iterdir() if file.name.lower().endswith(HDF5))
    parts = [
        (file, split)
        for split, name in enumerate(source.splits)
        for file in files
        if file.stem == name or file.stem.endswith(f"_{name}")
    ]
    if len(parts) != len(source.splits):
        raise DataError(
            f"{path}: the files are {', '.join(file.name for file in files)}; expected one whose "
            f"name ends in each of {', '.join(source.splits)}: rename them, set splits, or name "
            "one file"
        )
    return parts


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
            file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(error) from error
        with file:
            if "examples" not in file:
                raise DataError(
                    f"{path}: no group 'examples', the groups are {', '.join(file) or 'none'}; "
                    "expected TFF's layout, examples/CLIENT/COLUMN"
                )
            try:
                yield file
            except (KeyError, RuntimeError) as error:
                raise ValueError(error) from error


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
    for path, split in parts:
        with _hdf5(path) as file:
            for client in file["examples"]:
                if client not in wanted:
                    continue
                group = file["examples"][client]
                for name in pile.own:
                    if name not in group:
                        raise DataError(
                            f"{path}: client {client!r} has no {name!r}, only {', '.join(group)}; "
                            "give every client the same columns"
                        )
                values = {name: _plain(group[name][()]) for name in pile.own}
                sizes = {name: len(column) for name, column in values.items()}
                if len(set(sizes.values())) > 1:
                    raise DataError(
                        f"{path}: client {client!r} has {sizes} rows; give as many each"
                    )
                rows = next(iter(sizes.values()), 0)
                yield from pile.add(client, split, rows, values)
    yield from pile.rest()


def _plain(values: Any) -> list[Any]:
    """Give numbers as they are, and bytes as text."""
    array = np.atleast_1d(values)
    if array.dtype.kind in "OS":
        return [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in array.tolist()]
    return list(array.tolist() if array.ndim == 1 else array)


class _Pile:
    """Rows of small clients, gathered into pieces."""

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self.source, self.columns = source, list(columns)
        self.own = [name for name in columns if name not in (source.client, source.split)]
        self.clear()

    def clear(self) -> None:
        """Start the next piece."""
        self.values: dict[str, list[Any]] = {name: [] for name in self.columns}
        self.rows = 0

    def add(
        self, client: str, split: int, rows: int, values: dict[str, list[Any]]
    ) -> Iterator[Piece]:
        """Take rows of one client; yield a piece when there are enough."""
        given = {**values, self.source.client: [client] * rows, self.source.split: [split] * rows}
        for name in self.columns:
            self.values[name] += given[name]
        self.rows += rows
        if self.rows >= _ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[Piece]:
        """Yield what is left."""
        if self.rows:
            columns = {name: arrow_column(held) for name, held in self.values.items()}
            yield Slice(columns, self.rows)
        self.clear()


@dataclass(frozen=True)
class _Base:
    """A SQLite file; `file` is where it is unpacked."""

    path: Path
    file: Path

    @contextmanager
    def ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[sqlite3.Cursor]:
        """Ask the file, which is never written to."""
        address = f"{self.file.resolve().as_uri()}?mode=ro&immutable=1"
        with reading(self.path):
            try:
                with closing(sqlite3.connect(address, uri=True)) as base:
                    yield base.execute(query, values)
            except sqlite3.Error as error:
                raise ValueError(error) from error


def open_sqlite(path: Path, source: Source, clients: int | None) -> File:
    """Open a SQLite dump; see `open_hdf5`."""
    base = _unpacked(path)
    with base.ask("SELECT name FROM sqlite_master WHERE type = 'table'") as rows:
        tables = [name for (name,) in rows]
    if "examples" not in tables:
        raise DataError(
            f"{path}: no table 'examples', the tables are {', '.join(tables) or 'none'}; expected "
            "TFF's layout: split_name, client_id, serialized_example_proto"
        )
    listed = "client_metadata" if "client_metadata" in tables else "examples"
    with base.ask(f"SELECT DISTINCT split_name, client_id FROM {listed}") as rows:  # noqa: S608
        pairs = [(str(split), str(client)) for split, client in rows]
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
    note = (f"parts left out: {', '.join(left)}",) if left else ()
    own = (source.client, *((source.split,) if len(parts) > 1 else ()))
    return File(
        str(path),
        (*own, *names),
        partial(_sqlite_pieces, base, parts, chosen if clients else None, source),
        clients=tuple(chosen),
        notes=(*(kept_note(len(chosen), len(taken)) if clients else ()), *note),
        tokens="spaces",
    )


def _sqlite_columns(base: _Base, parts: Sequence[str]) -> tuple[str, ...]:
    query = "SELECT serialized_example_proto FROM examples WHERE split_name = ? LIMIT 1"
    with base.ask(query, parts[:1]) as rows:
        first = rows.fetchone()
    if first is None:
        raise DataError(f"{base.path}: no rows in the part {parts[0]!r}; give at least one")
    return tuple(_example(base, first[0], "first row"))


def _sqlite_pieces(
    base: _Base,
    parts: Sequence[str],
    chosen: Sequence[str] | None,
    source: Source,
    columns: Sequence[str],
) -> Iterator[Piece]:
    pile = _Pile(source, columns)
    query = "SELECT split_name, client_id, serialized_example_proto FROM examples WHERE"
    query += f" split_name IN ({', '.join('?' * len(parts))})"
    groups = [chosen[at : at + _ASKED] for at in range(0, len(chosen), _ASKED)] if chosen else [()]
    for group in groups:
        asked = f" AND client_id IN ({', '.join('?' * len(group))})" if group else ""
        with base.ask(f"{query}{asked} ORDER BY rowid", [*parts, *group]) as rows:
            for split, client, blob in rows:
                found = _example(base, blob, f"client {str(client)!r}")
                values = {name: [_one(found.get(name))] for name in pile.own}
                yield from pile.add(str(client), parts.index(split), 1, values)
    yield from pile.rest()


def _one(values: list[Any] | None) -> Any:
    """Give the one value of a feature, or all of several; bytes as text."""
    if not values:
        return None
    texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
    return texts[0] if len(texts) == 1 else texts


def _example(base: _Base, blob: Any, where: str) -> dict[str, list[Any]]:
    try:
        return parse_example(bytes(blob))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{base.path}: {where}: no tf.train.Example ({error}); the file is damaged or of "
            "another layout: fetch it again"
        ) from error


def _unpacked(path: Path) -> _Base:
    """Unpack a compressed file among temporary ones, for as long as it is read."""
    end = path.suffix.lower()
    if end not in PACKED:
        return _Base(path, path)
    folder = tempfile.mkdtemp(prefix="coterie-")
    base = _Base(path, Path(folder) / "base.sqlite")
    weakref.finalize(base, shutil.rmtree, folder, ignore_errors=True)
    with reading(path), base.file.open("wb") as out:
        try:
            if (opener := PACKED[end]) is not None:
                with opener(path, "rb") as packed:
                    shutil.copyfileobj(packed, out, 1 << 20)
            else:
                _inflate(path, out)
        except lzma.LZMAError as error:
            raise ValueError(error) from error
    return base


def _inflate(path: Path, out: Any) -> None:
    engine = zlib.decompressobj()
    with path.open("rb") as packed:
        while chunk := packed.read(1 << 20):
            out.write(engine.decompress(chunk))
    out.write(engine.flush())
    if not engine.eof:
        raise EOFError("it ends too early")
