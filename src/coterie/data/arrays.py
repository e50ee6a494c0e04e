"""Data in memory: arrays with one client label a row, or one client a target column."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.assemble import assemble
from coterie.data.columns import PIXELS, Batch, Table, Values, plan_columns
from coterie.data.federated import DataError, FederatedDataset, Task
from coterie.data.source import Source

CHUNK = 1 << 24
Owners = tuple[Sequence[str], NDArray[np.int64]]


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
    """Make federated data of arrays; rows may come in any order.

    >>> data = from_arrays([[1.0], [2.0], [3.0]], [0.5, 1.5, 2.5], ["b", "a", "b"])
    >>> data.names, data.offsets.tolist(), data.targets.tolist()
    (('b', 'a'), [0, 2, 3], [0.5, 2.5, 1.5])

    Args:
        X: Rows: numpy, torch, scipy sparse, nested lists or anything with `to_numpy`.
        y: Targets, one a row, or (rows, labels).
        clients: One whole number or text for each row.
        task: The task, if not to be taken from the type of `y`.
        classes: How many classes there are, or their names.
        names: Names of the clients, if `clients` are 0, 1, ... into it; those without rows stay.
        split: 0 (train) or 1 (test) for each row.
        columns: Names of the columns of `X`.
        title: A name for tables and messages.
        source: Further options; `task` and `classes` here go before its own.
    """
    source = source or Source()
    source = replace(source, task=task or source.task, classes=classes or source.classes)
    columns = columns if columns is not None else getattr(X, "columns", None)
    rows = rows_of(values_of(X, title), title)
    table = flat_table(
        rows,
        targets_of(y, title),
        owners_of(clients, names, title),
        split=None if split is None else values_of(split, title),
        columns=None if columns is None else [str(name) for name in columns],
        source=source,
        where=title,
    )
    return assemble(table, source, title=title)


def from_targets(
    X: Any,
    Y: Any,
    *,
    names: Sequence[str],
    columns: Sequence[str] | None = None,
    title: str = "targets",
    source: Source | None = None,
) -> FederatedDataset:
    """Make each column of `Y` a client, without the rows where it is NaN.

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
    rows, y = rows_of(values_of(X, title), title), targets_of(Y, title)
    nobody = (("",), np.zeros(rows.shape[0], dtype=np.int64))
    listed = None if columns is None else [str(name) for name in columns]
    table = flat_table(rows, y, nobody, columns=listed, source=source, where=title)
    return assemble(table, source, title=title)


@dataclass(frozen=True)
class Rows:
    """Rows of features that can be read again and again, a slice at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Callable[[], Iterator[Values]]
    sparse: bool = False


def flat_table(
    rows: Rows,
    y: NDArray[Any],
    clients: Owners,
    *,
    split: Values | None = None,
    columns: Sequence[str] | None = None,
    source: Source,
    where: str,
) -> Table:
    """Make a table of arrays with one entry a row.

    Args:
        rows: The features.
        y: Targets.
        clients: Names of the clients and, for each row, an index into them.
        split: 0 or 1 for each row.
        columns: Names of the columns.
        source: The options.
        where: The name for messages.
    """
    lengths = {"X": rows.shape[0], "y": len(y), "client": len(clients[1])}
    lengths |= {} if split is None else {"split": split.shape[0]}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(f"{where}: {found} rows; give as many of each")
    shape = rows.shape[1:]
    width = int(np.prod(shape))
    if columns is not None and len(columns) != width:
        raise DataError(f"{where}: {len(columns)} column names for {width} columns; name each once")
    if (source.features or source.levels) and (len(shape) > 1 or (rows.sparse and source.levels)):
        raise DataError(
            f"{where}: features and levels choose columns of flat, dense rows, but rows are "
            f"{'sparse' if rows.sparse else shape}; leave them out"
        )
    plan = plan_columns(range(width) if columns is None else columns, source, where=where)
    pixels = rows.dtype == np.uint8 and len(shape) > 1

    def read(features: bool) -> Iterator[Batch]:
        for batch in _batches(rows if features else None, y, clients, split):
            if batch.x is None:
                yield batch
                continue
            x = plan.encode(batch.x, partial(_fail, where, batch))
            yield replace(batch, x=np.float32(x) / np.float32(255) if pixels else x)

    shape = shape if plan.picks is None else (len(plan.names),)
    notes = (PIXELS,) if pixels else ()
    return Table(where, shape, plan, read, notes=notes, sparse=rows.sparse)


def _fail(where: str, batch: Batch, row: int, column: str, found: str) -> DataError:
    client = batch.names[int(batch.codes[row])]
    owner = f", client {client!r}" if client else ""
    return DataError(f"{where}: row {batch.rows[row]} (from 0){owner}, column {column!r}: {found}")


def _batches(
    rows: Rows | None, y: NDArray[Any], clients: Owners, split: Values | None
) -> Iterator[Batch]:
    names, owner = clients
    real = y.dtype.kind == "f"
    none = np.zeros(0, dtype=np.int64)
    # every name first: clients without rows stay, and the order does not depend on the chunks
    yield Batch(none, names, none, None, y[:0], None, real)
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


def rows_of(x: Values, where: str) -> Rows:
    """Slice an array that is in memory."""
    if len(x.shape) < 2:
        raise DataError(f"{where}: X has shape {x.shape}; expected (rows, features)")
    step = max(1, CHUNK // max(1, 8 * int(np.prod(x.shape[1:]))))

    def chunks() -> Iterator[Values]:
        for start in range(0, x.shape[0], step):
            yield x[start : start + step]

    return Rows(tuple(x.shape), x.dtype, chunks, sparse=sparse.issparse(x))


def values_of(given: Any, where: str) -> Values:
    """Take numbers from whatever holds them."""
    if sparse.issparse(given):
        return sparse.csr_matrix(given)
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().numpy()
    try:
        array = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)
    except ValueError as error:
        widths = [len(row) if hasattr(row, "__len__") else 1 for row in given]
        odd = next((at for at, width in enumerate(widths) if width != widths[0]), 0)
        raise DataError(
            f"{where}: row {odd} (from 0) has {widths[odd]} values, row 0 has {widths[0]}; give "
            "every row as many"
        ) from error
    if array.dtype.kind in "fiub":
        return array
    if array.dtype.kind not in "OUS":
        raise DataError(f"{where}: arrays of {array.dtype} are not numbers; convert them")
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise _text_error(array, where) from error


def _text_error(array: NDArray[Any], where: str) -> DataError:
    for at, value in np.ndenumerate(array):
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            column = "".join(f", column {number}" for number in at[1:])
            return DataError(
                f"{where}: row {at[0]} (from 0){column}: found {_shortly(value)!r} where a number "
                "belongs; correct it, or code the column as numbers"
            )
    return DataError(f"{where}: {array.dtype} values that are no numbers; convert them")


def _shortly(value: Any, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def targets_of(given: Any, where: str) -> NDArray[Any]:
    """Take targets: numbers, or text with None as a gap."""
    array = np.asarray(given.to_numpy()) if hasattr(given, "to_numpy") else None
    if array is None:
        array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
        array = np.asarray(array)
    if array.dtype.kind == "O" and not any(isinstance(value, str) for value in array.flat):
        array = np.asarray(values_of(array, where))
    if array.dtype.kind not in "fiubOU" or array.ndim not in (1, 2):
        raise DataError(
            f"{where}: y is {array.dtype} of shape {array.shape}; expected numbers or text, one "
            "a row, or (rows, labels)"
        )
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


def owners_of(clients: Any, names: Sequence[str] | None, where: str) -> Owners:
    """Number the clients: their names and, for each row, an index into them.

    Args:
        clients: One whole number or text for each row.
        names: Names that whole numbers stand for, or None.
        where: The name for messages.
    """
    if isinstance(clients, torch.Tensor):
        clients = clients.detach().cpu().numpy()
    labels = clients.to_numpy() if hasattr(clients, "to_numpy") else clients
    if not isinstance(labels, np.ndarray):
        labels = _objects(labels)
    if labels.ndim != 1:
        raise DataError(f"{where}: clients has shape {labels.shape}; expected one label a row")
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
    if len(set(spelled)) < len(spelled):
        twice = next(name for name in spelled if spelled.count(name) > 1)
        raise DataError(
            f"{where}: duplicate client name {twice!r}, once as a number and once as text; give "
            "all labels as one type"
        )
    return spelled, codes


def _objects(labels: Any) -> NDArray[Any]:
    # np.asarray would turn [1, "1"] into two equal texts
    listed = list(labels)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array


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
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: duplicate client name {twice!r}; name each client once")
    codes = np.array([_label(label, row, where) for row, label in enumerate(labels.tolist())])
    if codes.dtype.kind != "i" or (len(codes) and not 0 <= codes.min() <= codes.max() < len(names)):
        raise DataError(
            f"{where}: with names, clients are numbers 0..{len(names) - 1} into them; found others"
        )
    return names, codes.astype(np.int64)
