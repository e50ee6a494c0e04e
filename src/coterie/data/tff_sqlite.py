"""Dumps of TensorFlow Federated's data sets as SQLite; no TensorFlow.

A table `examples` (split_name, client_id, serialized_example_proto), perhaps with `client_metadata`
(client_id, split_name, num_examples), and perhaps compressed as a whole. Clients and parts are
those of `coterie.data.tff`.
"""

import bz2
import gzip
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

from coterie.data.columns import first_clients, kept_note
from coterie.data.federated import DataError
from coterie.data.source import Source, reading
from coterie.data.table_files import File, Piece
from coterie.data.tf_example import parse_example
from coterie.data.tff import Pile

SQLITE = (".sqlite", ".sqlite3", ".db")
PACKED: dict[str, Any] = {
    ".lzma": lzma.open,
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zlib": None,
}
_ASKED = 400  # clients in one query
_JOURNAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"  # begins a journal that is to be rolled back
_COUNTS = "SELECT split_name, client_id, num_examples FROM client_metadata"
Counts = Mapping[tuple[str, str], int]
"""Rows by (part, client)."""


def is_sqlite(name: str) -> bool:
    """Whether a lower-case name is that of a SQLite file, perhaps compressed."""
    return name.removesuffix(next((end for end in PACKED if name.endswith(end)), "")).endswith(
        SQLITE
    )


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
    _refuse_pending(path)
    base = _unpacked(path)
    with base.ask("SELECT name FROM sqlite_master WHERE type = 'table'") as rows:
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
    note = (f"parts left out: {', '.join(left)}",) if left else ()
    own = (source.client, *((source.split,) if len(parts) > 1 else ()))
    return File(
        str(path),
        (*own, *names),
        partial(_sqlite_pieces, base, parts, chosen if clients else None, source, counts),
        clients=tuple(chosen),
        notes=(*(kept_note(len(chosen), len(taken)) if clients else ()), *note),
        tokens="spaces",
    )


def _refuse_pending(path: Path) -> None:
    """Refuse a file with changes beside it: it is read alone, and they would be lost."""
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


def _pairs(base: _Base) -> list[tuple[str, str]]:
    """List parts and clients by the rows themselves."""
    with base.ask("SELECT DISTINCT split_name, client_id FROM examples") as rows:
        return [(str(split), _client(base, client)) for split, client in rows]


def _counts(base: _Base) -> dict[tuple[str, str], int] | None:
    """Read how many rows each client has in each part, where the file says so."""
    with base.ask("SELECT name FROM pragma_table_info('client_metadata')") as rows:
        columns = {name for (name,) in rows}
    if not {"split_name", "client_id", "num_examples"} <= columns:
        return None
    counts: Counter[tuple[str, str]] = Counter()
    with base.ask(_COUNTS) as rows:
        for split, client, count in rows:
            if not isinstance(count, int):
                raise DataError(
                    f"{base.path}: client_metadata says that client {client!r} has {count!r} rows; "
                    "expected a whole number"
                )
            counts[str(split), _client(base, client)] += count
    return counts


def _client(base: _Base, name: Any) -> str:
    """Return a client's name; columns without a type hold whole numbers too."""
    if isinstance(name, str | int):
        return str(name)
    what = "missing (NULL)" if name is None else f"{name!r}"
    raise DataError(
        f"{base.path}: a client_id is {what}; name the client of every row by text or a whole "
        "number"
    )


def _compare(
    base: _Base, counts: Counts, found: Counts, parts: Sequence[str], chosen: frozenset[str] | None
) -> None:
    """Refuse a file whose rows are not as many as it says."""
    for split, client in (*counts, *found):
        if split not in parts or not (chosen is None or client in chosen):
            continue
        said, rows = counts.get((split, client)), found.get((split, client), 0)
        if said != rows:
            lead = "does not name it" if said is None else f"says {said} rows"
            raise DataError(
                f"{base.path}: client {client!r}, part {split!r}: client_metadata {lead}, the "
                f"table examples has {rows}; rows are lost or added: fetch the file again"
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
    counts: Counts | None,
    columns: Sequence[str],
) -> Iterator[Piece]:
    pile = Pile(source, columns)
    found: Counter[tuple[str, str]] = Counter()
    query = "SELECT split_name, client_id, serialized_example_proto FROM examples WHERE"
    query += f" split_name IN ({', '.join('?' * len(parts))})"
    for some in _groups(chosen):
        # a column without a type keeps whole numbers apart from text
        group = [*some, *(int(name) for name in some if _is_number(name))]
        asked = f" AND client_id IN ({', '.join('?' * len(group))})" if group else ""
        with base.ask(f"{query}{asked} ORDER BY rowid", [*parts, *group]) as rows:
            for split, given, blob in rows:
                client = _client(base, given)
                found[split, client] += 1
                features = _example(base, blob, f"client {client!r}")
                values = {name: [_one(features.get(name))] for name in pile.own}
                yield from pile.add(client, parts.index(split), 1, values)
    if counts is not None:
        _compare(base, counts, found, parts, frozenset(chosen) if chosen else None)
    yield from pile.rest()


def _groups(chosen: Sequence[str] | None) -> list[Sequence[str]]:
    if not chosen:
        return [()]
    return [chosen[at : at + _ASKED] for at in range(0, len(chosen), _ASKED)]


def _is_number(name: str) -> bool:
    """Whether a name is a whole number as SQLite writes it, in 64 bits."""
    return len(name) < 19 and name.removeprefix("-").isdecimal() and name == str(int(name))


def _one(values: list[Any] | None) -> Any:
    """Return the one value of a feature, or all of several; bytes as text."""
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
