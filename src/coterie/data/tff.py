"""Dumps of TensorFlow Federated's data sets, such as StackOverflow, as HDF5; no TensorFlow.

A group `examples` has a group for each client, in it a data set for each column. A folder may hold
one file for each part, named by it (`stackoverflow_train.h5`). Clients come in the order of their
names, as in TFF; parts other than the declared ones are left out, and the first clients are those
of the training part. `coterie.data.tff_sqlite` reads the same data as SQLite.

Columns are then read as those of a table: text and tags by public words, arrays as they are. Posts
of StackOverflow are `tokens` and `title`, joined, cut at spaces (as PMTL does).
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import first_clients, kept_note
from coterie.data.federated import DataError
from coterie.data.folders import HDF5, Found, find_files
from coterie.data.source import Source, reading
from coterie.data.table_files import File, Piece, Slice, arrow_column

_ROWS = 1 << 12  # rows of small clients that make one piece


def open_hdf5(path: Path, source: Source, clients: int | None) -> File:
    """Open an HDF5 dump, or a folder of them.

    Args:
        path: The file or folder.
        source: The options.
        clients: Take the first so many clients; None takes all.
    """
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
    return File(
        str(path),
        (*own, *names),
        partial(_hdf5_pieces, parts, frozenset(chosen), source),
        clients=tuple(chosen),
        notes=(*(kept_note(len(chosen), len(named[first])) if clients else ()), *found.notes),
        tokens="spaces",
    )


def _hdf5_parts(path: Path, found: Found, source: Source) -> list[tuple[Path, int]]:
    """Ask for one file a part: clients of a part lie in one file."""
    whole = path.is_file() or len(found.files) == found.parts == len(source.splits)
    if not whole:
        named = ", ".join(sorted(file.name for file in path.rglob("*") if file.is_file()))
        raise DataError(
            f"{path}: the files are {named}; expected one whose name holds each of "
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
        # what a damaged file raises depends on where the damage is
        except (OSError, LookupError, RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(error) from error


def _group(path: Path, file: Any, client: str) -> Mapping[str, Any]:
    """Return the columns of a client."""
    group = file["examples"][client]
    if not hasattr(group, "keys"):
        raise DataError(
            f"{path}: examples/{client} is a data set, not a group of columns; expected TFF's "
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
    pile = Pile(source, columns)
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
    """Take columns of a client; `images` holds which were images of bytes at the first."""
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
        raise DataError(f"{path}: client {client!r} has {sizes} rows; give as many each")
    return values


def _plain(array: NDArray[Any]) -> list[Any]:
    """Return numbers as they are, and bytes as text."""
    if array.dtype.kind in "OS":
        return [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in array.tolist()]
    return list(array.tolist() if array.ndim == 1 else array)


class Pile:
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
