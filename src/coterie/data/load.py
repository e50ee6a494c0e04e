"""Load files, objects and arrays as federated data.

`load` chooses a reader by suffix or layout: tables with a client column (`coterie.data.tables`),
LEAF json (`coterie.data.leaf`), dumps of TensorFlow Federated (`coterie.data.tff`), datasets of the
package `datasets` (`coterie.data.hub`), `.npz` with arrays X, y, client and optionally split and
feature_names, and `.mat` cell arrays with one cell per client (MALSAR's X and Y, or feature and
label), and data frames (`coterie.data.frames`). `from_arrays` and `from_targets` take arrays in
memory. `load_unlabelled` reads rows to be predicted. `coterie.data.assemble` documents the order of
clients and rows.
"""

import math
import operator
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coterie.core.suggest import did_you_mean
from coterie.data.assemble import assemble, targets_of, values_of
from coterie.data.cells import FORMATS, decimal_signs, is_gap, read_dates, trimmed
from coterie.data.config import (
    HDF5,
    JSON,
    PARQUET,
    Source,
    check_file,
    find_files,
    find_twice,
    reading,
)
from coterie.data.federated import ClientArrays, DataError, FederatedDataset, Task, offsets_of
from coterie.data.frames import FRAME, columns_of, is_frame, open_frame
from coterie.data.hub import is_dataset, is_saved, open_dataset, open_saved, refusal
from coterie.data.leaf import open_leaf
from coterie.data.tables import (
    DELIMITED,
    NONE,
    TABLES,
    Batch,
    File,
    Piece,
    Table,
    Unread,
    feature_names,
    is_text,
    open_columns,
    open_file,
    partitions,
    plan_columns,
)
from coterie.data.text_images import PIXELS, Values
from coterie.data.tff import SQLITE, is_sqlite, open_hdf5, open_sqlite

if TYPE_CHECKING:
    from coterie.data.inspect import Proposal

__all__ = ["Source", "from_arrays", "from_targets", "load", "load_unlabelled", "read"]

_SMALL = 1 << 24  # bytes of a file that is read in a moment
_CHUNK = 1 << 24  # bytes of features read at a time
_SUPPORTED = (*TABLES, ".npz", ".mat", ".json", *HDF5, *SQLITE, ".arrow")
_CELLS = (("X", "Y"), ("feature", "label"), ("x", "y"))
_CSR = ("X_data", "X_indices", "X_indptr", "X_shape")
_ROW = "\x00row"  # no column of a file is called so
_MOST_UNREAD = 5  # cells that are no numbers or dates in a column, where they are most of it
NOBODY = "(no client)"
"""The client of rows to be predicted that name none."""
_MOST_ROWS = 1 << 24  # float32, the type of targets, holds row numbers exactly up to here
MOST_VALUES = 1 << 31  # rows, and features: more fit in no array here
_PREDICTED = (*TABLES, ".npz", ".arrow", *HDF5, ".sqlite")
Owners = tuple[Sequence[str], NDArray[np.int64]]
"""Names of the clients and, for each row, an index into them."""


def load(
    given: str | Path | Any,
    source: "Source | Proposal | None" = None,
    *,
    clients: int | None = None,
    name: str | None = None,
    **options: Any,
) -> FederatedDataset:
    """Read a file, a folder, a data frame, or a dataset of the package `datasets`.

    >>> import pyarrow as pa
    >>> rows = pa.table({"school": ["a", "a", "b"], "hours": [1.0, 2.0, 4.0], "mark": [2.5, 3, 5]})
    >>> load(rows, client="school", target="mark").names
    ('a', 'b')

    Args:
        given: A `.csv`, `.tsv` (or `.gz` of them), `.parquet`, `.npz`, `.mat`, `.json` (LEAF),
            `.h5`, `.sqlite` (optionally compressed) or `.arrow` file, a folder, a frame of pandas,
            polars or pyarrow, or a `Dataset` or `DatasetDict`.
        source: The options, or a proposal of `ct.init`, which declares its levels, ranges and
            classes as public.
        clients: The number of clients to take from the start; None takes all.
        name: A name for tables and messages; None takes that of the file.
        options: Options by name, which take precedence: the attributes of `coterie.Source`.

    Raises:
        DataError: The file is absent or bad; the message states the place, the problem and the
            remedy.
    """
    return read(given, source_of(source, options), clients=clients, name=name).tensors()


def load_few(path: Path, source: Source) -> tuple[FederatedDataset, tuple[str, ...]]:
    """Read labelled rows of a few clients; also return notes on cells that were taken for gaps.

    Where gaps are filled, cells that are no numbers, dates or declared levels are gaps, as in rows
    to be predicted; else they are errors.
    """
    file = _open_rows(path, source, None) if source.fills and path.exists() else None
    if file is None:
        return load(path, source), ()
    unread = Unread()
    table = open_columns(file, source, unread)
    data = assemble(table, table.declared or source, title=path.name.split(".")[0]).tensors()
    notes = tuple(_unread_notes(table, source, unread, len(data.targets)))
    return replace(data, source=source), notes


def source_of(source: "Source | Proposal | None", options: Mapping[str, Any]) -> Source:
    """Return options with others by name on top; raise DataError for an unknown name."""
    source = source if source is None or isinstance(source, Source) else source.source
    known = [field.name for field in fields(Source)]
    for name in options:
        if name not in known:
            raise DataError(f"no option {name!r} of data; {did_you_mean(name, known)}")
    return replace(source or Source(), **options)


def read(
    given: str | Path | Any,
    source: Source | None = None,
    *,
    clients: int | None = None,
    name: str | None = None,
) -> ClientArrays:
    """Return the data of `load` as NumPy arrays; torch is not imported."""
    source = source or Source()
    if isinstance(given, str | Path):
        path = Path(given)
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; check the path")
        check_file(path)
        table, title = _open(path, source, clients), path.resolve().name.split(".")[0]
    elif is_dataset(given):
        table, title = open_columns(open_dataset(given, source), source), "dataset"
    elif is_frame(given):
        table, title = open_columns(open_frame(given, name or FRAME), source), FRAME
    else:
        raise refusal(given)
    data = assemble(table, table.declared or source, title=name or title)
    data = replace(data, source=source)
    # readers that can take fewer clients have already done so
    return data if clients is None else data.first(clients)


def check(path: Path, source: Source, clients: int | None = None) -> None:
    """Raise DataError for a bad file: a small one is read, of a large table only the columns."""
    check_file(path)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    quick = source.memory_map is None and source.images is None
    if quick and sum(file.stat().st_size for file in files) <= _SMALL:
        read(path, source, clients=clients)
    elif path.name.lower().endswith(TABLES):
        open_columns(open_file(path, source), source)


def _open(path: Path, source: Source, clients: int | None) -> Table:
    name = path.name.lower()
    if source.targets_are_clients and (name.endswith((".mat", ".json")) or path.is_dir()):
        raise DataError(f"{path}: targets_are_clients is for one table; give CSV, Parquet or npz")
    file = _open_rows(path, source, clients)
    if file is not None:
        return open_columns(file, source)
    if path.is_dir() or name.endswith(JSON):
        if source.tags:
            raise DataError(
                f"{path}: tags are a column of tables; leave them out, and declare classes"
            )
        return open_leaf(path, source, clients)
    if not name.endswith((".npz", ".mat")):
        _refuse_workbook(path)
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


def _open_rows(path: Path, source: Source, clients: int | None) -> File | None:
    """Open a source of rows with named columns; None for other formats."""
    name, kind = path.name.lower(), tuple[str, ...]()
    if name.endswith(".arrow") or (path.is_dir() and is_saved(path)):
        return open_saved(path, source)
    if path.is_dir():
        # a folder has the first format that it contains; a note lists other files
        formats = (PARQUET, HDF5) if any(path.rglob("*.json")) else (PARQUET, HDF5, DELIMITED)
        held = (ends for ends in formats if find_files(path, ends, source.splits).files)
        kind = PARQUET if partitions(path) else next(held, ())
    else:
        kind = next((ends for ends in (TABLES, HDF5) if name.endswith(ends)), ())
    if kind:
        return open_hdf5(path, source, clients) if kind == HDF5 else open_file(path, source)
    sqlite = path.is_file() and is_sqlite(name)
    return open_sqlite(path, source, clients) if sqlite else None


def from_arrays(  # noqa: PLR0913  (the common options by name, the others in source)
    X: Any,
    y: Any,
    clients: Any,
    *,
    task: Task | None = None,
    classes: int | tuple[str, ...] | None = None,
    names: Sequence[str] | None = None,
    split: Any = None,
    columns: Sequence[str] | None = None,
    title: str = "arrays",
    source: Source | None = None,
) -> FederatedDataset:
    """Return federated data made from arrays; rows may come in any order.

    >>> data = from_arrays([[1.0], [2.0], [3.0]], [0.5, 1.5, 2.5], ["b", "a", "b"])
    >>> data.names, data.offsets.tolist(), data.targets.tolist()
    (('b', 'a'), [0, 2, 3], [0.5, 2.5, 1.5])

    Args:
        X: Rows: numpy, torch, scipy sparse, nested lists or anything with `to_numpy`.
        y: Targets, one per row, or (rows, labels).
        clients: One integer or text for each row.
        task: The task; None infers it from the type of `y`.
        classes: The number of classes, or their names.
        names: Names of the clients, if `clients` are indices into it; those without rows stay.
        split: 0 (train) or 1 (test) for each row.
        columns: Names of the columns of `X`.
        title: A name for tables and messages.
        source: Further options; the arguments `task` and `classes` take precedence.
    """
    source = source or Source()
    source = replace(source, task=task or source.task, classes=classes or source.classes)
    table = _flat_table(
        _array_rows(values_of(X, title), title),
        targets_of(y, title),
        _owners(clients, names, title),
        split=None if split is None else values_of(split, title),
        columns=columns if columns is not None else getattr(X, "columns", None),
        source=source,
        where=title,
    )
    return assemble(table, source, title=title).tensors()


def from_targets(
    X: Any,
    Y: Any,
    *,
    names: Sequence[str],
    columns: Sequence[str] | None = None,
    title: str = "targets",
    source: Source | None = None,
) -> FederatedDataset:
    """Return federated data with one client per column of `Y`, without the rows where it is NaN.

    >>> gap = float("nan")
    >>> data = from_targets([[1.0], [2.0]], [[5.0, 6.0], [gap, 7.0]], names=("kidney", "liver"))
    >>> data.names, data.counts.tolist()
    (('kidney', 'liver'), [1, 2])

    Args:
        X: Rows, as for `from_arrays`.
        Y: Targets, (rows, clients).
        names: A name for each column of `Y`.
        columns: Names of the columns of `X`.
        title: A name for tables and messages.
        source: Further options.
    """
    source = replace(source or Source(), target=tuple(names), targets_are_clients=True)
    rows, y = _array_rows(values_of(X, title), title), targets_of(Y, title)
    nobody = (("",), np.zeros(rows.shape[0], dtype=np.int64))
    table = _flat_table(rows, y, nobody, columns=columns, source=source, where=title)
    return assemble(table, source, title=title).tensors()


@dataclass(frozen=True)
class _Rows:
    """Rows of features that can be read more than once, a slice at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Callable[[], Iterator[Values]]
    sparse: bool = False
    place: Callable[[int], str] = "row {} (from 0)".format
    typed: bool = True  # else whole and real targets are stored alike


def _flat_table(
    rows: _Rows,
    y: NDArray[Any],
    clients: Owners,
    *,
    split: Values | None = None,
    columns: Any = None,
    source: Source,
    where: str,
) -> Table:
    """Return a table of arrays with one entry per row."""
    lengths = {"X": rows.shape[0], "y": len(y), "client": len(clients[1])}
    lengths |= {} if split is None else {"split": split.shape[0]}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(f"{where}: {found} rows; give the same number of each")
    shape = rows.shape[1:]
    width = int(np.prod(shape))
    if columns is not None and len(columns) != width:
        raise DataError(f"{where}: {len(columns)} column names for {width} columns; name each once")
    if (source.features or source.levels) and (len(shape) > 1 or (rows.sparse and source.levels)):
        raise DataError(
            f"{where}: features and levels choose columns of flat, dense rows, but rows are "
            f"{'sparse' if rows.sparse else shape}; leave them out"
        )
    names = range(width) if columns is None else [str(name) for name in columns]
    plan = plan_columns(names, source, where=where)
    pixels = rows.dtype == np.uint8 and len(shape) > 1
    real = y.dtype.kind == "f" if rows.typed else None

    def read(features: bool) -> Iterator[Batch]:
        for batch in _batches(rows if features else None, y, clients, split, real):

            def fail(row: int, column: str, found: str, batch: Batch = batch) -> DataError:
                return table.error(batch, row, f"column {column!r}: {found}")

            x = None if batch.x is None else plan.encode(batch.x, fail)
            scaled = pixels and x is not None
            yield replace(batch, x=np.float32(x) / np.float32(255) if scaled else x)

    shape = shape if plan.picks is None else (len(plan.names),)
    notes = (PIXELS,) if pixels else ()
    table = Table(where, shape, plan, read, rows.place, notes, sparse=rows.sparse)
    return table


def _batches(
    rows: _Rows | None, y: NDArray[Any], clients: Owners, split: Values | None, real: bool | None
) -> Iterator[Batch]:
    names, owner = clients
    # All names first: clients without rows stay, and the order is independent of chunks.
    yield Batch(NONE, names, NONE, None, y[:0], None, real)
    start = 0
    for chunk in (None,) if rows is None else rows.chunks():
        at = np.arange(start, start + (len(y) if chunk is None else chunk.shape[0]))
        start += len(at)
        met, codes = np.unique(owner[at], return_inverse=True)
        yield Batch(
            rows=at,
            names=[names[k] for k in met],
            codes=codes.reshape(-1),
            x=chunk,
            y=y[at],
            split=None if split is None else split[at],
            real=real,
        )


def _array_rows(x: Values, where: str) -> _Rows:
    """Return the rows of an array in memory."""
    if len(x.shape) < 2:
        raise DataError(f"{where}: X has shape {x.shape}; expected (rows, features)")
    step = max(1, _CHUNK // max(1, 8 * int(np.prod(x.shape[1:]))))

    def chunks() -> Iterator[Values]:
        for start in range(0, x.shape[0], step):
            yield x[start : start + step]

    return _Rows(tuple(x.shape), x.dtype, chunks, sparse=not isinstance(x, np.ndarray))


def _owners(clients: Any, names: Sequence[str] | None, where: str) -> Owners:
    """Return `Owners` of integers or text; with `names`, of indices into these."""
    labels = clients
    for step in ("detach", "cpu", "numpy", "to_numpy"):
        labels = getattr(labels, step)() if hasattr(labels, step) else labels
    if not isinstance(labels, np.ndarray):
        # np.asarray would turn [1, "1"] into two equal texts
        labels = np.fromiter(labels, dtype=object)
    if labels.ndim != 1:
        raise DataError(f"{where}: clients has shape {labels.shape}; expected one label per row")
    if names is not None:
        return _named(labels, [str(name) for name in names], where)
    if labels.dtype.kind in "iu":
        found, codes = np.unique(labels, return_inverse=True)
        return [str(number) for number in found.tolist()], codes.reshape(-1).astype(np.int64)
    index: dict[Any, int] = {}
    codes = np.empty(len(labels), dtype=np.int64)
    for row, label in enumerate(labels.tolist()):
        codes[row] = index.setdefault(_label(label, row, where), len(index))
    spelled = [str(label) for label in index]
    if (twice := find_twice(spelled)) is not None:
        raise DataError(
            f"{where}: duplicate client name {twice!r}, once as a number and once as text; give "
            "all labels as one type"
        )
    return spelled, codes


def _label(label: Any, row: int, where: str) -> int | str:
    if isinstance(label, str) and label:
        return label
    whole = isinstance(label, (int, np.integer)) or (
        isinstance(label, (float, np.floating)) and float(label).is_integer()
    )
    if whole and not isinstance(label, bool):
        return int(label)
    what = "is empty" if str(label) in ("", "None", "nan", "<NA>") else f"is {label!r}"
    raise DataError(
        f"{where}: row {row} (from 0): the client {what}; give a whole number or text for each row"
    )


def _named(labels: NDArray[Any], names: list[str], where: str) -> Owners:
    if (twice := find_twice(names)) is not None:
        raise DataError(f"{where}: duplicate client name {twice!r}; name each client once")
    codes = np.array([_label(label, row, where) for row, label in enumerate(labels.tolist())])
    if codes.dtype.kind != "i" or (len(codes) and not 0 <= codes.min() <= codes.max() < len(names)):
        raise DataError(
            f"{where}: with names, clients are indices 0..{len(names) - 1} into them; found others"
        )
    return names, codes.astype(np.int64)


def _open_npz(path: Path, source: Source, unlabelled: "_Unlabelled | None" = None) -> Table:
    """Read the small arrays of an archive at once; X is streamed."""
    where, targets = str(path), () if unlabelled else source.targets
    # the file is opened here, since np.load would leave a damaged one open
    with reading(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: one array, not an archive; save X, y and client by np.savez")
        with archive:
            wanted = [*targets, source.client, source.split, "feature_names", *_CSR]
            small = {name: archive[name] for name in wanted if name in archive.files}
            present = set(archive.files)
        if odd := [name for name, value in small.items() if not isinstance(value, np.ndarray)]:
            raise DataError(f"{path}: {odd[0]!r} is no array; save it again by np.savez")
    client = unlabelled.client_of(source.client in small) if unlabelled else None
    needed = [*targets, *([] if "X_data" in present else ["X"])]
    needed += [] if source.targets_are_clients or client is not None else [source.client]
    if absent := [name for name in needed if name not in present]:
        remedy = "name the client of all rows with --client"
        raise DataError(
            f"{path}: no array {absent[0]!r}, the arrays are {', '.join(sorted(present))}; add it, "
            f"or {remedy if unlabelled else 'set client and target'}"
        )
    rows = _sparse_rows(small, where) if "X_data" in present else _streamed_rows(path)
    columns = small.get("feature_names")
    if columns is not None and columns.shape != (int(np.prod(rows.shape[1:])),):
        columns = None
    if unlabelled and columns is not None:
        source = replace(source, features=file_columns(source, unlabelled.columns))
    owners: Owners = ((client or "",), np.zeros(rows.shape[0], dtype=np.int64))
    if source.client in needed:
        owners = _owners(small[source.client], None, where)
    parts = [targets_of(small[name], where) for name in targets]
    parts = parts or [np.arange(rows.shape[0], dtype=np.float64)]
    y = parts[0] if len(parts) == 1 else np.column_stack(parts)
    split = None if unlabelled else small.get(source.split)
    return _flat_table(rows, y, owners, split=split, columns=columns, source=source, where=where)


def _sparse_rows(small: Mapping[str, NDArray[Any]], where: str) -> _Rows:
    try:
        parts = tuple(small[f"X_{name}"] for name in ("data", "indices", "indptr"))
        shape = tuple(operator.index(size) for size in small["X_shape"].tolist())
        x = checked_csr(parts, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: X_data, X_indices, X_indptr and X_shape are no CSR matrix ({error}); save "
            "the data, indices, indptr and shape of one"
        ) from error
    return _array_rows(x, where)


def checked_csr(values: Any, shape: tuple[int, ...] | None = None) -> Values:
    """Return a CSR matrix whose indices were all checked: compiled kernels read by them.

    Raises:
        ValueError: If an index is out of range, or indptr out of order.
    """
    from scipy import sparse

    if shape is not None and (len(shape) != 2 or not 0 <= max(shape) < MOST_VALUES):
        raise ValueError(f"shape {shape}: expected rows and features, below {MOST_VALUES} each")
    x = sparse.csr_matrix(values, shape=shape)
    _check_sparse(x)
    return x


def _check_sparse(x: Any) -> None:
    """Raise ValueError if a matrix in CSR or CSC format points outside its own arrays."""
    # Of a matrix whose indptr ends with 0, SciPy checks nothing.
    if (np.diff(x.indptr) < 0).any():
        raise ValueError("indptr is out of order")
    x.check_format(full_check=True)


def _streamed_rows(path: Path) -> _Rows:
    """Return the rows of X, read from the archive a slice at a time."""
    with reading(path), zipfile.ZipFile(path) as archive, archive.open("X.npy") as file:
        shape, by_column, dtype = _header(file)
        held = archive.getinfo("X.npy").file_size
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > held:
        raise DataError(
            f"{path}: X has shape {shape} and {held} bytes; its header is damaged: save it again"
        )
    if dtype.kind not in "fiub":
        raise DataError(f"{path}: X is {dtype}, expected numbers; save it as floats")
    if len(shape) < 2:
        raise DataError(f"{path}: X has shape {shape}; expected (rows, features)")
    if by_column:
        with reading(path), np.load(path, allow_pickle=False) as whole:
            return _array_rows(whole["X"], str(path))
    size = int(np.prod(shape[1:])) * dtype.itemsize
    step = max(1, _CHUNK // max(1, size))

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

    return _Rows(shape, dtype, chunks)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    first = np.lib.format.read_magic(file) == (1, 0)
    form = np.lib.format
    return form.read_array_header_1_0(file) if first else form.read_array_header_2_0(file)


def _open_mat(path: Path, source: Source) -> Table:
    """Read cell arrays with one cell per client; clients are named "0", "1", ... in cell order."""
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
                "give one target per row (rows are the first dimension)"
            )
    held = [(x, y) for x, y in cells if x.shape[0]]
    if len({y.shape[1:] for _, y in held}) > 1:
        raise DataError(f"{path}: clients have different numbers of targets; give each the same")
    offsets = offsets_of([x.shape[0] for x, _ in cells])
    owner = np.repeat(np.arange(len(cells)), np.diff(offsets))
    rows = _Rows(
        (int(offsets[-1]), *shape),
        held[0][0].dtype if held else np.dtype(np.float64),
        lambda: iter([x for x, _ in held]),
        sparse=not all(isinstance(x, np.ndarray) for x, _ in cells),
        place=lambda row: f"row {row - offsets[owner[row]]} (from 0) of its cell",
        typed=False,  # MATLAB stores both as doubles
    )
    y = np.concatenate([y for _, y in held] or [np.zeros(0)])
    names = [str(at) for at in range(len(cells))]
    return _flat_table(rows, y, (names, owner), source=source, where=str(path))


def _cells(path: Path) -> list[tuple[Values, NDArray[Any]]]:
    from scipy import io

    with reading(path):
        try:
            found = io.loadmat(path)
        except NotImplementedError as error:
            raise DataError(f"{path}: MATLAB 7.3 (HDF5) file; save it again with -v7") from error
        except Exception as error:  # a damaged file can trip the parser anywhere
            raise ValueError(f"{type(error).__name__}: {error}") from error
    pair = next((pair for pair in _CELLS if set(pair) <= set(found)), None)
    named = ", ".join(name for name in found if not name.startswith("__")) or "none"
    expected = "cell arrays X and Y, or feature and label, one cell per client"
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
    from scipy import sparse

    try:
        for values in (x, y):
            if sparse.issparse(values):
                _check_sparse(values)  # before it is converted
        x = checked_csr(x) if sparse.issparse(x) else np.asarray(x)
    except ValueError as error:
        raise DataError(
            f"{path}: rows of client '{at}' are a damaged sparse matrix ({error}); save the file "
            "again"
        ) from error
    y = np.asarray(y.toarray() if sparse.issparse(y) else y)
    for kind, values in (("features", x), ("targets", y)):
        if values.dtype.kind not in "fiub":
            raise DataError(
                f"{path}: the {kind} of client '{at}' are {values.dtype}, expected numbers; "
                "save them as numbers"
            )
    return (x if x.shape[0] * x.shape[1] else x[:0]), (y.reshape(-1) if 1 in y.shape else y)


@dataclass(frozen=True)
class Unlabelled:
    """Rows of clients, sorted by client, and the number of each row in its file, from 0."""

    data: FederatedDataset
    order: NDArray[np.int64]
    notes: tuple[str, ...] = ()  # on cells that were taken for gaps


@dataclass(frozen=True)
class _Unlabelled:
    """How rows to be predicted are read: the features of training, and the client of all rows."""

    columns: Sequence[str]
    client: str | None
    owner: str | None
    known: Sequence[str] = ()

    def client_of(self, named: bool) -> str | None:
        """Return the client of all rows; None if the file names the client of each row."""
        return self.client if self.client is not None or named else self.owner


def load_unlabelled(
    given: Path | Any,
    source: Source,
    *,
    columns: Sequence[str] = (),
    client: str | None = None,
    owner: str | None = None,
    known: Sequence[str] = (),
) -> Unlabelled:
    """Read rows to be predicted, as training data were read; a target column is ignored.

    All rows are returned: gaps that no constant fills stay NaN, and so do cells of tables that are
    no numbers, dates or declared levels.

    The row number takes the place of the target: rows are sorted by client, and predictions are
    returned in the order of the file or frame. `columns` are the features of the training, where
    they had names. `client` is the client of all rows, even if the file names others; `owner` if it
    names none. `known` are clients whose numbers may be written otherwise: 1.0 or 01 for 1.

    Raises:
        DataError: If the file cannot be read; if it has no client column and none is given; if most
            cells of a column cannot be read.
    """
    plain, options = _without_target(source), _Unlabelled(columns, client, owner, known)
    unread = Unread()
    if isinstance(given, Path) and given.exists() and given.name.lower().endswith(".npz"):
        check_file(given)
        table = _open_npz(given, plain, options)
    else:
        file = open_rows(given, plain, "rows to be predicted are read from")
        plain = replace(plain, features=file_columns(plain, columns))
        if absent := [name for name in plain.features if name not in file.names]:
            raise DataError(
                f"{file.where}: without {_named_columns(absent)}, which the models were trained "
                f"with; the columns are {', '.join(file.names)}: add what is missing; empty cells "
                "are read as gaps"
            )
        plain = replace(plain, decimal_commas=_decimal_commas(file, plain))
        plain = replace(plain, dates={**plain.dates, **_other_dates(file, plain)})
        table = open_columns(_numbered(file, source, options), plain, unread)
    title = given.name if isinstance(given, Path) else FRAME
    data = assemble(table, plain, title=title, keep_gaps=True).tensors()
    if len(data.targets) > _MOST_ROWS:
        raise DataError(f"{title}: {len(data.targets)} rows; give at most {_MOST_ROWS} at once")
    notes = (
        *_sign_notes(source.decimal_commas, plain.decimal_commas),
        *(
            f"column {name!r}: dates are read as {how.partition(' ')[2]}, not as in training"
            for name, how in plain.dates.items()
            if how != source.dates[name]
        ),
        *_unread_notes(table, plain, unread, len(data.targets)),
    )
    return Unlabelled(data, data.targets.numpy().astype(np.int64), notes)


def _decimal_commas(file: File, source: Source) -> tuple[str, ...]:
    """Return the columns with decimal commas: those declared, unless the file shows otherwise."""
    names = [n for n in source.features if n not in source.levels and n not in source.dates]
    found = {name: [0, 0] for name in names}
    for _, piece in file.batches(names) if names else ():
        for name in names:
            column = piece.columns[name]
            if not isinstance(column, list) and is_text(column.type):
                for at, signs in enumerate(decimal_signs(trimmed(column))):
                    found[name][at] += int(signs.sum())
    declared = {name: name in source.decimal_commas for name in names}
    for name, (commas, points) in found.items():
        if (commas > 0) != (points > 0):
            declared[name] = commas > 0
    return tuple(name for name, commas in declared.items() if commas)


def _other_dates(file: File, source: Source) -> dict[str, str]:
    """Return how columns of dates are read of which most have another format than in training.

    One format, and no other, has to read nearly all of them.
    """
    texts: dict[str, set[str]] = {n: set() for n in source.features if n in source.dates}
    for _, piece in file.batches(list(texts)) if texts else ():
        for name, seen in texts.items():
            column = piece.columns[name]
            if not isinstance(column, list) and is_text(column.type):
                seen.update(pc.unique(column).drop_null().to_pylist())
    found = {}
    for name, seen in texts.items():
        values, gaps = pa.array(sorted(seen), pa.string()), source.gaps.get(name, ())
        origin, _, declared = source.dates[name].partition(" ")
        if not seen or read_dates(values, declared, gaps=gaps)[1].mean() <= 0.5:
            continue
        wrong = {form: read_dates(values, form, gaps=gaps)[1].mean() for form in FORMATS[1:]}
        best = [form for form, share in wrong.items() if share == min(wrong.values()) <= 0.1]
        if len({form.replace("%B", "%b") for form in best}) == 1:  # "May" is a full name too
            found[name] = f"{origin} {best[-1]}"
    return found


def _sign_notes(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    for sign, names in (("comma", set(now) - set(before)), ("point", set(before) - set(now))):
        if names:
            yield f"numbers are read with a decimal {sign} in {', '.join(sorted(names))}"


def _named_columns(names: Sequence[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def _unread_notes(table: Table, source: Source, unread: Unread, rows: int) -> Iterator[str]:
    """Yield what was taken for gaps; raise DataError if that is most of a column."""
    for name, number in unread.signs.items():
        sign, other = ("comma", ",") if name not in source.decimal_commas else ("point", ".")
        yield (
            f"column {name!r}: {number!r} has a decimal {sign}, and the training rows had none: "
            f"'1{other}234' is read as 1234; write numbers as in training"
        )
    for name, cells in unread.cells.items():
        if not cells:
            continue
        row = min(cells)
        form = source.dates.get(name, "").partition(" ")[2] or "YYYY-MM-DD"
        wanted = f"dates ({form})" if name in source.dates else "numbers"
        wanted = "declared levels" if name in source.levels else wanted
        text = f"column {name!r}: {len(cells)} of {rows} values are no {wanted}, such as "
        text += f"{cells[row][:40]!r} ({table.place(row)})"
        if name not in source.levels and len(cells) > max(_MOST_UNREAD, rows / 2):
            raise DataError(f"{table.where}: {text}; write them as in training")
        yield f"{text}: read as gaps"


def read_columns(given: Path | Any, source: Source, names: Sequence[str]) -> pa.Table:
    """Return columns of a file or frame in its own order; text for CSV, so that "007" stays so.

    A name may be several, with commas between them.

    Raises:
        DataError: If the file has no such column, or no named columns.
    """
    if isinstance(given, Path) and given.name.lower().endswith(".npz"):
        raise DataError(f"{given}: this format has no named columns to keep; leave --keep out")
    file = open_rows(given, source)
    cut = ([name] if name in file.names else name.split(",") for name in names)
    names = list(dict.fromkeys(chain.from_iterable(cut)))
    for name in names:
        if name not in file.names:
            raise DataError(f"{file.where}: no column {name!r}; {did_you_mean(name, file.names)}")
    if is_frame(given):
        return columns_of(given, names)
    pieces = [piece.columns for piece in file.pieces(names)]
    found = {name: [value for one in pieces for value in _listed(one[name])] for name in names}
    return pa.table({name: pa.array(values) for name, values in found.items()})


def _refuse_workbook(path: Path) -> None:
    """Raise DataError for files of spreadsheets and of statistics packages, with what to save."""
    if path.suffix.lower() in (".xlsx", ".xls", ".xlsm", ".ods"):
        raise DataError(f"{path}: a workbook; save the sheet of the rows as CSV (UTF-8)")
    reader = {".sav": "spss", ".dta": "stata", ".sas7bdat": "sas"}.get(path.suffix.lower())
    if reader is not None:
        raise DataError(
            f"{path}: not read; save it as CSV, or with pandas: pandas.read_{reader}({path.name!r})"
            f".to_parquet({path.with_suffix('.parquet').name!r})"
        )


def open_rows(
    given: Path | Any,
    source: Source | None = None,
    expected: str = "expected a table with named columns:",
) -> File:
    """Open a frame, or a file or folder of rows with named columns; raise DataError for others."""
    if not isinstance(given, Path):
        if not is_frame(given):
            raise refusal(given)
        return open_frame(given)
    if not given.exists():
        raise DataError(f"{given}: no such file or folder; check the path")
    check_file(given)
    file = _open_rows(given, source or Source(), None)
    if file is None:
        _refuse_workbook(given)
        raise DataError(
            f"{given}: {expected} {', '.join(_PREDICTED)}, and folders of CSV or Parquet; save it "
            "as one of them"
        )
    return file


def _listed(values: Any) -> list[Any]:
    return values.to_pylist() if hasattr(values, "to_pylist") else list(values)


def _without_target(source: Source) -> Source:
    """Return the options without those of targets; the row number replaces the target."""
    # Names that are no columns are constants of the target.
    own = {"y", *source.targets} - set(source.features)

    def kept(given: Any) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in own}

    return replace(
        source,
        task="regression",
        target=_ROW,
        classes=None,
        positive=None,
        tags=(),
        targets_are_clients=False,
        memory_map=None,
        ranges=kept(source.ranges),
        center=kept(source.center),
        scale=kept(source.scale),
    )


def file_columns(source: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the file that became these features; levels of a column are one."""
    if source.features or not columns:
        return source.features
    made = {*source.levels, *source.dates, *source.indicators}
    origin = {feature: name for name in made for feature in feature_names(name, source)}
    return tuple(dict.fromkeys(origin.get(column, column) for column in columns))


def _numbered(file: File, source: Source, options: _Unlabelled) -> File:
    """Add the row number as the target, and the client of all rows where one is given."""
    client = options.client_of(source.client in file.names)
    if client is None and source.client not in file.names:
        raise DataError(
            f"{file.where}: no column {source.client!r}, which would name the client of each row; "
            f"the columns are {', '.join(file.names)}: name one with --client-column, or the "
            "client of all rows with --client"
        )
    own = (_ROW,) if client is None else (_ROW, source.client)
    hidden = {*source.targets, source.split, *own} - set(source.features)
    names = (*own, *(name for name in file.names if name not in hidden))

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        first = 0
        # A reader that is asked for no column returns all of them.
        wanted = [name for name in columns if name not in own] or list(file.names[:1])
        for piece in file.pieces(wanted):
            rows = piece.num_rows
            made = {_ROW: pa.array(np.arange(first, first + rows, dtype=np.float64))}
            if client is not None:
                made[source.client] = pa.array([client] * rows)
            elif source.client in columns and not isinstance(piece.columns[source.client], list):
                made[source.client] = _as_known(piece.columns[source.client], source, known)
            yield Piece({**piece.columns, **made}, rows)
            first += rows

    known = _by_number(options.known)
    clients = file.clients if client is None else ()
    return replace(file, names=names, pieces=pieces, clients=clients, labels={})


def _as_known(column: pa.Array, source: Source, known: Mapping[str, str]) -> pa.Array:
    """Return the clients of rows by the names that are known, and `NOBODY` for gaps."""
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    try:
        text = trimmed(pc.cast(column, pa.string()))
    except pa.ArrowException:
        return column  # its reader says what is wrong
    gap = is_gap(text, source.gaps.get(source.client, ()))
    coded = pc.dictionary_encode(pc.if_else(gap, NOBODY, text))
    names = coded.dictionary.to_pylist()
    spelled = [known.get(_plain_name(name), name) for name in names]
    return pa.array(spelled, pa.string()).take(coded.indices)


def written_as(name: str, known: Sequence[str]) -> str:
    """Return the known client whose number is written otherwise, else the name itself.

    >>> written_as("7", ["007", "008"]), written_as("9", ["007", "008"])
    ('007', '9')
    """
    return name if name in known else _by_number(known).get(_plain_name(name), name)


def _by_number(known: Sequence[str]) -> dict[str, str]:
    """Return clients by their plain names; {} where two have the same, as 1 and 01."""
    found = {_plain_name(name): name for name in known}
    return found if len(found) == len(known) else {}


def _plain_name(name: str) -> str:
    """Return a client's number without leading zeros and decimals; other names as they are.

    >>> _plain_name("007"), _plain_name("7.0"), _plain_name("7,0"), _plain_name("H07")
    ('7', '7', '7', 'H07')
    """
    whole = name.removesuffix(".0").removesuffix(",0")
    return str(int(whole)) if whole.isdecimal() and len(whole) < 100 else name
