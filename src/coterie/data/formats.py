"""Loaders: files, objects and arrays as federated data.

`load` chooses by suffix or layout: tables with a client column (`coterie.data.tables`), LEAF json
(`coterie.data.leaf`), dumps of TensorFlow Federated (`coterie.data.tff`), data sets of the package
`datasets` (`coterie.data.hub`), `.npz` with arrays X, y, client and perhaps split and
feature_names, and `.mat` cell arrays with one cell a client (MALSAR's X and Y, or feature and
label). `from_arrays` and `from_targets` take what is in memory. The order of clients and rows is
that of `coterie.data.assemble`.
"""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import io, sparse

from coterie.data.arrays import (
    CHUNK,
    Owners,
    Rows,
    flat_table,
    from_arrays,
    from_targets,
    owners_of,
    rows_of,
    targets_of,
)
from coterie.data.assemble import assemble
from coterie.data.columns import PIXELS, Batch, Table, Values, plan_columns
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.folders import HDF5, JSON, PARQUET, find_files
from coterie.data.hub import is_dataset, is_saved, open_dataset, open_saved, refusal
from coterie.data.leaf import open_leaf
from coterie.data.source import Source, reading
from coterie.data.table_files import TABLES
from coterie.data.tables import open_columns, open_table
from coterie.data.tff import open_hdf5
from coterie.data.tff_sqlite import SQLITE, is_sqlite, open_sqlite

__all__ = ["Source", "from_arrays", "from_targets", "load"]

_SUPPORTED = (*TABLES, ".npz", ".mat", ".json", *HDF5, *SQLITE, ".arrow")
_CELLS = (("X", "Y"), ("feature", "label"), ("x", "y"))


def load(
    given: str | Path | Any, source: Source | None = None, *, clients: int | None = None
) -> FederatedDataset:
    """Read a file, a folder, or a data set of the package `datasets`.

    Args:
        given: A `.csv`, `.tsv` (or `.gz` of them), `.parquet`, `.npz`, `.mat`, `.json` (LEAF),
            `.h5`, `.sqlite` (perhaps compressed) or `.arrow` file, a folder, or a `Dataset` or
            `DatasetDict`.
        source: The options.
        clients: Take the first so many clients; None takes all.

    Raises:
        DataError: The file is absent or bad; the message says where, what and what to do.
    """
    source = source or Source()
    if not isinstance(given, str | Path):
        if not is_dataset(given):
            raise refusal(given)
        return _whole(open_columns(open_dataset(given, source), source), source, "dataset", clients)
    path = Path(given)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; check the path")
    name = path.name.lower()
    if source.targets_are_clients and (name.endswith((".mat", ".json")) or path.is_dir()):
        raise DataError(f"{path}: targets_are_clients is for one table; give CSV, Parquet or npz")
    table = _open(path, name, source, clients)
    return _whole(table, source, path.resolve().name.split(".")[0], clients)


def _whole(table: Table, source: Source, title: str, clients: int | None) -> FederatedDataset:
    data = assemble(table, table.declared or source, title=title)
    # readers that can take fewer clients have done so
    return data if clients is None else data.first(clients)


def _open(path: Path, name: str, source: Source, clients: int | None) -> Table:
    if path.is_dir() or name.endswith(".json"):
        return _open_layout(path, source, clients)
    if name.endswith(TABLES):
        return open_table(path, source)
    if name.endswith(HDF5):
        return open_columns(open_hdf5(path, source, clients), source)
    if is_sqlite(name):
        return open_columns(open_sqlite(path, source, clients), source)
    if name.endswith(".arrow"):
        return open_columns(open_saved(path, source), source)
    if not name.endswith((".npz", ".mat")):
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; supported are "
            f"{', '.join(_SUPPORTED)}, and folders of LEAF json, Parquet or HDF5, or saved by "
            "datasets"
        )
    if source.text or source.tags or source.images is not None:
        raise DataError(
            f"{path}: text, tags and images are options for tables and LEAF json, and this holds "
            "arrays of numbers; leave them out"
        )
    return _open_npz(path, source) if name.endswith(".npz") else _open_mat(path, source)


def _open_layout(path: Path, source: Source, clients: int | None) -> Table:
    """Open a folder by what is in it, or a LEAF file."""
    if path.is_dir() and is_saved(path):
        return open_columns(open_saved(path, source), source)
    kinds = (PARQUET, HDF5, JSON) if path.is_dir() else ()
    # a folder is of the first format that it holds; a note names what else lies there
    kind = next((ends for ends in kinds if find_files(path, ends, source.splits).files), JSON)
    if kind == PARQUET:
        return open_table(path, source)
    if kind == HDF5:
        return open_columns(open_hdf5(path, source, clients), source)
    if source.tags:
        raise DataError(f"{path}: tags are a column of tables; leave them out, and declare classes")
    return open_leaf(path, source, clients)


def _open_npz(path: Path, source: Source) -> Table:
    """Read the small arrays of an archive whole and leave X to be streamed."""
    where = str(path)
    # the file is opened here, since np.load would leave a damaged one open
    with reading(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: one array, not an archive; save X, y and client by np.savez")
        with archive:
            wanted = [*source.targets, source.client, source.split, "feature_names"]
            wanted += ["X_data", "X_indices", "X_indptr", "X_shape"]
            small = {name: archive[name] for name in wanted if name in archive.files}
            present = set(archive.files)
    needed = [*source.targets, *(() if source.targets_are_clients else (source.client,))]
    needed += [] if "X_data" in present else ["X"]
    for name in needed:
        if name not in present:
            raise DataError(
                f"{path}: no array {name!r}, the arrays are {', '.join(sorted(present))}; add it, "
                "or set client and target to the names used"
            )
    rows = _sparse_rows(small, where) if "X_data" in present else _streamed_rows(path)
    columns = small.get("feature_names")
    if columns is not None and columns.shape != (int(np.prod(rows.shape[1:])),):
        columns = None
    owners: Owners = (("",), np.zeros(rows.shape[0], dtype=np.int64))
    if not source.targets_are_clients:
        owners = owners_of(small[source.client], None, where)
    parts = [targets_of(small[name], where) for name in source.targets]
    return flat_table(
        rows,
        parts[0] if len(parts) == 1 else np.column_stack(parts),
        owners,
        split=small.get(source.split),
        columns=None if columns is None else [str(name) for name in columns],
        source=source,
        where=where,
    )


def _sparse_rows(small: Mapping[str, NDArray[Any]], where: str) -> Rows:
    try:
        parts = tuple(small[f"X_{name}"] for name in ("data", "indices", "indptr"))
        x = sparse.csr_matrix(parts, shape=tuple(small["X_shape"].tolist()))
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{where}: X_data, X_indices, X_indptr and X_shape are no CSR matrix ({error}); save "
            "the data, indices, indptr and shape of one"
        ) from error
    return rows_of(x, where)


def _streamed_rows(path: Path) -> Rows:
    """Read X from its archive a slice at a time, so that it need not fit in memory."""
    with reading(path), zipfile.ZipFile(path) as archive, archive.open("X.npy") as file:
        shape, by_column, dtype = _header(file)
    if dtype.kind not in "fiub":
        raise DataError(f"{path}: X is {dtype}, where numbers belong; save it as floats")
    if len(shape) < 2:
        raise DataError(f"{path}: X has shape {shape}; expected (rows, features)")
    if by_column:
        with reading(path), np.load(path, allow_pickle=False) as whole:
            return rows_of(whole["X"], str(path))
    size = int(np.prod(shape[1:])) * dtype.itemsize
    step = max(1, CHUNK // max(1, size))

    def chunks() -> Iterator[Values]:
        with reading(path), zipfile.ZipFile(path) as archive, archive.open("X.npy") as file:
            _header(file)
            for start in range(0, shape[0], step):
                count = min(step, shape[0] - start)
                data = file.read(count * size)
                if len(data) < count * size:
                    raise EOFError(f"X ends in row {start + len(data) // max(1, size)}")
                yield np.frombuffer(data, dtype).reshape(count, *shape[1:])
            file.read(1)  # past the end, where the archive's checksum is compared

    return Rows(shape, dtype, chunks)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _open_mat(path: Path, source: Source) -> Table:
    """Read cell arrays with one cell a client; clients are called "0", "1", ... in cell order."""
    cells = _cells(path)
    shape = next((x.shape[1:] for x, _ in cells if x.shape[0]), (0,))
    for at, (x, y) in enumerate(cells):
        if x.shape[0] and (x.shape[1:] != shape or len(x.shape) < 2):
            raise DataError(
                f"{path}: client '{at}' has rows of shape {x.shape[1:]}, the first has {shape}; "
                "give every client the same features"
            )
        if x.shape[0] != len(y):
            raise DataError(
                f"{path}: client '{at}' has {x.shape[0]} rows of features and {len(y)} targets; "
                "give one target a row (rows are the first dimension)"
            )
    plan = plan_columns(range(int(np.prod(shape))), source, where=str(path))
    pixels = len(shape) > 1 and cells[0][0].dtype == np.uint8

    def read(features: bool) -> Iterator[Batch]:
        for at, (x, y) in enumerate(cells):
            rows, codes = np.arange(len(y)), np.zeros(len(y), dtype=np.int64)
            if not len(y) or not features:
                yield Batch(rows, (str(at),), codes, None, y)
                continue

            def fail(row: int, column: str, found: str, at: int = at) -> DataError:
                return DataError(f"{path}: client '{at}', row {row}, column {column!r}: {found}")

            values = plan.encode(x, fail)
            values = np.float32(values) / np.float32(255) if pixels else values
            yield Batch(rows, (str(at),), codes, values, y)

    shape = shape if plan.picks is None else (len(plan.names),)
    place = "row {} (from 0) of its cell".format
    notes = (PIXELS,) if pixels else ()
    is_sparse = any(sparse.issparse(x) for x, _ in cells)
    return Table(str(path), shape, plan, read, place, notes, is_sparse)


def _cells(path: Path) -> list[tuple[Values, NDArray[Any]]]:
    with reading(path):
        try:
            found = io.loadmat(path)
        except NotImplementedError as error:
            raise DataError(f"{path}: MATLAB 7.3 (HDF5) file; save it again with -v7") from error
        except Exception as error:  # a damaged file can trip the parser anywhere
            raise ValueError(f"{type(error).__name__}: {error}") from error
    pair = next((pair for pair in _CELLS if set(pair) <= set(found)), None)
    named = ", ".join(name for name in found if not name.startswith("__")) or "none"
    expected = "cell arrays X and Y, or feature and label, one cell a client"
    if pair is None:
        raise DataError(f"{path}: expected {expected}; the variables are {named}")
    x, y = (found[name] for name in pair)
    if x.dtype != object or y.dtype != object or x.size != y.size:
        raise DataError(
            f"{path}: {pair[0]} is {x.dtype} of shape {x.shape}, {pair[1]} {y.dtype} of shape "
            f"{y.shape}; expected {expected}"
        )
    return [_cell(path, at, *pair) for at, pair in enumerate(zip(x.flat, y.flat, strict=True))]


def _cell(path: Path, at: int, x: Any, y: Any) -> tuple[Values, NDArray[Any]]:
    y = np.asarray(y.toarray() if sparse.issparse(y) else y)
    x = sparse.csr_matrix(x) if sparse.issparse(x) else np.asarray(x)
    for kind, values in (("features", x), ("targets", y)):
        if values.dtype.kind not in "fiub":
            raise DataError(
                f"{path}: the {kind} of client '{at}' are {values.dtype}, where numbers belong; "
                "save them as numbers"
            )
    return (x if x.shape[0] * x.shape[1] else x[:0]), (y.reshape(-1) if 1 in y.shape else y)
