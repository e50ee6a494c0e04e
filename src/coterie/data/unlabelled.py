"""Rows to be predicted: files that are read as training data were, whether or not a target is in.

What stands where the target would be is the number of the row: data are sorted by client, and
answers go back into the file's order. A target column that a file has is not looked at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.arrays import from_arrays
from coterie.data.assemble import assemble
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.folders import HDF5
from coterie.data.hub import is_saved, open_saved
from coterie.data.source import Source, reading
from coterie.data.table_files import TABLES, File, Piece, Slice, open_file
from coterie.data.tables import open_columns
from coterie.data.tff import open_hdf5
from coterie.data.tff_sqlite import is_sqlite, open_sqlite

_ROW = "__row__"
_MOST = 1 << 24  # row numbers that float32, in which targets are held, tells apart
_READ = (*TABLES, ".npz", ".arrow", *HDF5, ".sqlite")


@dataclass(frozen=True)
class Unlabelled:
    """Rows of clients, sorted by client, and the number of each row in its file, from 0."""

    data: FederatedDataset
    order: NDArray[np.int64]


def load_unlabelled(
    path: Path,
    source: Source,
    *,
    columns: Sequence[str] = (),
    client: str | None = None,
    owner: str | None = None,
) -> Unlabelled:
    """Read rows to be predicted.

    Args:
        path: A table, an npz with X (and client), or another file of rows with named columns.
        source: How the training data were read.
        columns: The features of the training, in order, where they had names.
        client: Take every row to be this client's, whatever the file says.
        owner: Whose rows they are where the file does not say.

    Raises:
        DataError: If the file cannot be read; if it has no client column and none is given.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; check the path")
    plain = _plain(source)
    if path.name.lower().endswith(".npz"):
        data = _from_npz(path, plain, columns, client, owner)
    else:
        opened = _open(path, plain)
        file = _numbered(opened, source, _whose(opened, plain, client, owner))
        chosen = replace(plain, features=file_columns(plain, columns))
        data = assemble(open_columns(file, chosen), chosen, title=path.name)
    if len(data.targets) > _MOST:
        raise DataError(f"{path}: {len(data.targets)} rows; give at most {_MOST} in one file")
    return Unlabelled(data, data.targets.numpy().astype(np.int64))


def target_constants(source: Source, columns: Sequence[str]) -> tuple[float, float]:
    """Return the declared center and scale of the target: what is predicted is in these units."""
    own = sorted({"y", *source.targets} - set(columns))
    return (
        next((source.center[name] for name in own if name in source.center), 0.0),
        next((source.scale[name] for name in own if name in source.scale), 1.0),
    )


def feature_constants(
    source: Source, columns: Sequence[str], width: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Spread the declared constants over the features: centers and scales, (width,) each."""
    own = {"y", *source.targets} - set(columns)
    names = {name: at for at, name in enumerate(columns)}
    found = []
    for given, neutral in ((source.center, 0.0), (source.scale, 1.0)):
        spread = np.full(width, neutral)
        if "x" in given and "x" not in names:
            spread[:] = given["x"]
        for name, value in given.items():
            digits = name.removeprefix("x")
            if name in names:
                spread[names[name]] = value
            elif name not in own and digits.isdecimal() and int(digits) < width:
                spread[int(digits)] = value
        found.append(spread)
    return found[0], found[1]


def _plain(source: Source) -> Source:
    """Take off what is said of targets: the row's number stands in their place."""
    own = {"y", *source.targets} - set(source.features)

    def kept(given: Any) -> dict[str, float]:
        return {name: value for name, value in given.items() if name not in own}

    return replace(
        source,
        task="regression",
        target=_ROW,
        classes=None,
        positive=None,
        tags=(),
        targets_are_clients=False,
        missing="error",
        memory_map=None,
        center=kept(source.center),
        scale=kept(source.scale),
    )


def file_columns(source: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """Name the file's columns that became these features; levels of one column are one."""
    if source.features or not columns:
        return source.features
    levels = {f"{name}={level}": name for name, given in source.levels.items() for level in given}
    return tuple(dict.fromkeys(levels.get(column, column) for column in columns))


def _open(path: Path, source: Source) -> File:
    name = path.name.lower()
    if name.endswith(".arrow") or (path.is_dir() and is_saved(path)):
        return open_saved(path, source)
    if name.endswith(TABLES) or path.is_dir():
        return open_file(path, source)
    if name.endswith(HDF5):
        return open_hdf5(path, source, None)
    if is_sqlite(name):
        return open_sqlite(path, source, None)
    raise DataError(
        f"{path}: rows to be predicted are read from {', '.join(_READ)}; save them as CSV or "
        "Parquet"
    )


def _whose(file: File, source: Source, client: str | None, owner: str | None) -> str | None:
    """Return the client of all rows; None where a column names each row's."""
    if client is not None or source.client in file.names:
        return client
    if owner is None:
        raise DataError(
            f"{file.where}: no column {source.client!r}, which would name the client of each row; "
            f"the columns are {', '.join(file.names)}: name one with --client-column, or the "
            "client of all rows with --client"
        )
    return owner


def _numbered(file: File, source: Source, client: str | None) -> File:
    """Put the row's number where the target would be, and the client where one is given."""
    own = (_ROW,) if client is None else (_ROW, source.client)
    hidden = {*source.targets, source.split, *own} - set(source.features)
    names = (*own, *(name for name in file.names if name not in hidden))

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        first = 0
        # A reader that is asked for no column would give all of them.
        wanted = [name for name in columns if name not in own] or list(file.names[:1])
        for piece in file.pieces(wanted):
            rows = piece.num_rows
            made = {_ROW: pa.array(np.arange(first, first + rows, dtype=np.float64))}
            made |= {} if client is None else {source.client: pa.array([client] * rows)}
            yield Slice({**{name: piece.column(name) for name in wanted}, **made}, rows)
            first += rows

    clients = file.clients if client is None else ()
    return replace(file, names=names, pieces=pieces, clients=clients, labels={})


def _from_npz(
    path: Path, source: Source, columns: Sequence[str], client: str | None, owner: str | None
) -> FederatedDataset:
    wanted = ("X", "X_data", "X_indices", "X_indptr", "X_shape", source.client, "feature_names")
    with reading(path), path.open("rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: one array, not an archive; save X and client by np.savez")
        with archive:
            found = {name: archive[name] for name in wanted if name in archive.files}
    x: Any = found.get("X")
    if x is None and {"X_data", "X_indices", "X_indptr", "X_shape"} <= found.keys():
        parts = tuple(found[f"X_{name}"] for name in ("data", "indices", "indptr"))
        x = sparse.csr_matrix(parts, shape=tuple(found["X_shape"].tolist()))
    client = owner if client is None and source.client not in found else client
    if x is None or (client is None and source.client not in found):
        lost = "X" if x is None else source.client
        raise DataError(
            f"{path}: no array {lost!r}; add it, or name the client of all rows with --client"
        )
    named = found.get("feature_names")
    own = None if named is None else [str(name) for name in named]
    chosen = source if own is None else replace(source, features=file_columns(source, columns))
    clients = [client] * x.shape[0] if client is not None else found[source.client]
    rows = np.arange(x.shape[0], dtype=np.float64)
    return from_arrays(x, rows, clients, columns=own, source=chosen, title=str(path))
