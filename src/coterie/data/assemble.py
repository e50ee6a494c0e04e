"""From batches of rows to `FederatedDataset`, in two passes and one copy.

The first pass counts the rows of every client and looks at the range of the targets; the second
writes each row at its client's place in arrays made once, in memory or in a folder. A folder
appears whole or not at all. Clients keep the order of their numbers when every name is a whole
number, else of first appearance; the rows of a client keep the file's order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.columns import Batch, Table, Values, client_order
from coterie.data.federated import DataError, Features, FederatedDataset, Spec
from coterie.data.labels import Range, Target, encode_target, plan_target
from coterie.data.rooms import let_go, room_for
from coterie.data.source import Source

_RESIDENT = 1 << 26  # bytes of mapped features held before they are let go
_GAP = (
    'give the value, leave such rows out with missing="drop", or leave the column out of features'
)


@dataclass(frozen=True)
class _Survey:
    """What the first pass found."""

    names: tuple[str, ...]
    counts: NDArray[np.int64]
    range: Range
    has_split: bool
    dropped: int
    lost: int

    @property
    def order(self) -> NDArray[np.int64]:
        """The clients by number when every name is a whole number, else as they appeared."""
        return np.array(client_order(self.names), dtype=np.int64)


@dataclass(frozen=True)
class _Places:
    """Where the rows of each client go."""

    where: str
    index: dict[str, int]
    offsets: NDArray[np.int64]
    cursor: NDArray[np.int64]

    def assign(self, batch: Batch) -> NDArray[np.int64]:
        """Return every row of a batch the next free place of its client."""
        codes = np.array([self.index.get(name, -1) for name in batch.names], int)[batch.codes]
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-2))
        rank = np.arange(len(codes)) - np.repeat(starts, np.diff(starts, append=len(codes)))
        places = np.empty(len(codes), dtype=np.int64)
        places[order] = self.cursor[ordered] + rank
        if (codes < 0).any() or (places >= self.offsets[codes + 1]).any():
            raise DataError(f"{self.where}: changed while it was read; read it again")
        np.add.at(self.cursor, codes, 1)
        return places


def assemble(table: Table, source: Source, *, title: str) -> FederatedDataset:
    """Read a table into flat arrays, sorted by client.

    Args:
        table: The rows.
        source: The options.
        title: The name of the data.
    """
    shape = source.shape or table.shape
    survey = _survey(table, source)
    _check(table, source, survey)
    target = plan_target(table, source, survey.range)
    order = survey.order
    names = tuple(survey.names[k] for k in order)
    offsets = np.concatenate([[0], np.cumsum(survey.counts[order])]).astype(np.int64)
    index = {name: k for k, name in enumerate(names)}
    places = _Places(table.where, index, offsets, offsets[:-1].copy())
    rows = int(offsets[-1])
    with room_for(source.memory_map) as room:
        arrays = {"targets": room("targets", (rows, *target.shape), target.dtype)}
        if survey.has_split:
            arrays["split"] = room("split", (rows,), np.int8)
        if not (table.sparse or source.sparse):
            arrays["features"] = room("features", (rows, *shape), np.float32)
        _fill(table, source, target=target, places=places, arrays=arrays)
    if source.memory_map is not None:
        arrays = {
            name: np.load(Path(source.memory_map, f"{name}.npy"), mmap_mode="c") for name in arrays
        }
    return FederatedDataset(
        spec=Spec(shape=shape, outputs=target.outputs, task=target.task, clients=len(names)),
        names=names,
        offsets=offsets,
        features=_features(arrays["features"], shape, table.where),
        targets=torch.from_numpy(arrays["targets"]),
        source_split=np.asarray(arrays["split"]) if "split" in arrays else None,
        title=title,
        notes=(*table.notes, *target.notes, *_notes(table, source, survey)),
        mapped=source.memory_map,
        assumed=target.assumed,
        columns=() if isinstance(table.columns.names, range) else table.columns.names,
    )


def _check(table: Table, source: Source, survey: _Survey) -> None:
    odd = next((name for name in survey.names if not _is_unicode(name)), None)
    if odd is not None:
        raise DataError(
            f"{table.where}: client {odd!r} is no Unicode text (it holds one half of a pair of "
            "surrogates) and could not be written to a file; rename it"
        )
    if not survey.counts.sum():
        lost = f", {survey.lost} {table.lost}" if survey.lost else ""
        raise DataError(
            f"{table.where}: no clients: no row to read ({survey.dropped} dropped for gaps{lost}); "
            "give a file with at least one row"
        )
    if not math.prod(table.shape):
        raise DataError(f"{table.where}: rows have no features; give at least one column")
    if table.sparse and source.memory_map is not None:
        raise DataError(f"{table.where}: sparse rows are kept in memory; leave memory_map out")
    if source.shape and math.prod(source.shape) != math.prod(table.shape):
        raise DataError(
            f"{table.where}: rows of shape {table.shape} do not fit shape = {source.shape}; "
            "declare one of as many numbers"
        )


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _survey(table: Table, source: Source) -> _Survey:
    counts: dict[str, int] = {}
    found = Range(kinds=frozenset() if source.positives else None)
    split = 0
    dropped, lost = 0, 0
    width: tuple[int, ...] | None = None
    for batch, gaps in _clean(table, source, features=source.missing == "drop"):
        width = _width(table, batch, width)
        for name, count in zip(
            batch.names, np.bincount(batch.codes, minlength=len(batch.names)), strict=True
        ):
            counts[name] = counts.get(name, 0) + int(count)
        found = found.extend(batch)
        split += 0 if batch.split is None else len(batch.rows)
        dropped += gaps
        lost += batch.lost
    sizes = np.array(list(counts.values()), dtype=np.int64)
    return _Survey(tuple(counts), sizes, found, split > 0, dropped, lost)


def _width(table: Table, batch: Batch, width: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse targets of another width than the first: NumPy would spread one over all labels."""
    if not len(batch.y):
        return width
    found = batch.y.shape[1:]
    if found == (0,):
        raise table.error(batch, 0, "the target is an empty list; give at least one value")
    if width not in (None, found):
        sizes = [math.prod(one) for one in (found, width or ())]
        raise table.error(
            batch,
            0,
            f"{sizes[0]} targets, where the first row has {sizes[1]}; give every row as many",
        )
    return found


def _fill(
    table: Table, source: Source, *, target: Target, places: _Places, arrays: dict[str, Any]
) -> None:
    rows = int(places.offsets[-1])
    parts: list[tuple[NDArray[np.int64], sparse.csr_matrix]] = []
    unseen = 0
    for batch, _ in _clean(table, source, features=True):
        if not len(batch.rows):
            continue
        at = places.assign(batch)
        arrays["targets"][at] = encode_target(table, batch, target)
        if batch.split is not None:
            arrays["split"][at] = _split(table, batch)
        x = _scaled(table, batch, source)
        if "features" in arrays:
            arrays["features"].reshape(rows, -1)[at] = x
            unseen += x.nbytes
            if unseen > _RESIDENT:
                unseen = let_go(arrays["features"])
        else:
            parts.append((at, sparse.csr_matrix(x)))
    if parts:
        stacked = sparse.vstack([part for _, part in parts], format="csr")
        arrays["features"] = stacked[np.argsort(np.concatenate([at for at, _ in parts]))]


def _clean(table: Table, source: Source, *, features: bool) -> Iterator[tuple[Batch, int]]:
    """Yield batches without gaps, each with the number of rows dropped from it."""
    for whole in table.read(features):
        for batch in _by_target(whole, source) if source.targets_are_clients else (whole,):
            gaps = _gaps(batch.y) if batch.x is None else _gaps(batch.y) | _gaps(batch.x)
            if not gaps.any():
                yield batch, 0
            elif source.missing == "drop":
                yield batch.take(~gaps), int(gaps.sum())
            else:
                raise _gap_error(table, batch, int(np.flatnonzero(gaps)[0]))


def _by_target(batch: Batch, source: Source) -> Iterator[Batch]:
    """Make each target a client with the rows that have it."""
    y = batch.y if batch.y.ndim > 1 else batch.y[:, None]
    named = source.targets if len(source.targets) == y.shape[1] else None
    for at in range(y.shape[1]):
        keep = ~_gaps(y[:, at])
        kept = batch.take(keep)
        name = named[at] if named else f"{source.targets[0]}{at}"
        yield replace(kept, names=(name,), codes=np.zeros_like(kept.codes), y=y[keep, at])


def _gaps(values: Values) -> NDArray[np.bool_]:
    """Tell which rows hold NaN or None."""
    if not isinstance(values, np.ndarray):
        gaps = np.zeros(values.shape[0], dtype=bool)
        holes = np.flatnonzero(np.isnan(values.data))
        gaps[np.searchsorted(values.indptr, holes, side="right") - 1] = True
        return gaps
    if values.dtype.kind == "O":
        missing = np.array([value is None for value in values.flat], dtype=bool)
    elif values.dtype.kind == "f":
        missing = np.isnan(values)
    else:
        return np.zeros(len(values), dtype=bool)
    width = math.prod(values.shape[1:])
    return np.asarray(missing.reshape(len(values), width).any(axis=1), dtype=bool)


def _gap_error(table: Table, batch: Batch, row: int) -> DataError:
    if _gaps(batch.y[row : row + 1])[0] or batch.x is None:
        return table.error(
            batch,
            row,
            'the target is missing; give it, or leave such rows out with missing="drop"',
        )
    column = int(np.flatnonzero(np.isnan(_dense(batch.x, row)))[0])
    name = str(table.columns.names[column])
    return table.error(batch, row, f"column {name!r}: found a gap (NaN or empty); {_GAP}")


def _dense(x: Values, row: int) -> NDArray[Any]:
    one = x[row : row + 1]
    return np.asarray(one if isinstance(one, np.ndarray) else one.toarray()).reshape(-1)


def _scaled(table: Table, batch: Batch, source: Source) -> Values:
    """Apply the declared constants and turn features into finite float32."""
    raw = batch.x
    center, scale = table.columns.center, table.columns.scale
    if not isinstance(raw, np.ndarray):
        return _scaled_sparse(table, batch, source)
    raw = raw.reshape(len(raw), -1)
    x = raw
    if center is not None or scale is not None:
        x = (raw.astype(np.float64) - (0.0 if center is None else center)) / (
            1.0 if scale is None else scale
        )
    if source.clip is not None:
        x = np.clip(x, -float(source.clip), float(source.clip))
    with np.errstate(over="ignore"):
        x = x.astype(np.float32, copy=False)
    sound = np.isfinite(x) & np.isfinite(raw) if source.clip is not None else np.isfinite(x)
    if not sound.all():
        row, column = (int(at) for at in np.argwhere(~sound)[0])
        name = str(table.columns.names[column])
        raise table.error(batch, row, f"column {name!r}: {_too_large(raw[row, column])}")
    return x


def _scaled_sparse(table: Table, batch: Batch, source: Source) -> sparse.csr_matrix:
    if table.columns.center is not None:
        raise DataError(
            f"{table.where}: center would fill every zero of sparse features; declare scale alone"
        )
    raw = sparse.csr_matrix(batch.x)
    x = raw if table.columns.scale is None else raw.multiply(1.0 / table.columns.scale).tocsr()
    data = x.data if source.clip is None else np.clip(x.data, -source.clip, source.clip)
    with np.errstate(over="ignore"):
        data = data.astype(np.float32)
    sound = np.isfinite(data) & np.isfinite(x.data)
    if not sound.all():
        at = int(np.flatnonzero(~sound)[0])
        row = int(np.searchsorted(x.indptr, at, side="right")) - 1
        name = str(table.columns.names[int(x.indices[at])])
        raise table.error(batch, row, f"column {name!r}: {_too_large(x.data[at])}")
    return sparse.csr_matrix((data, x.indices, x.indptr), shape=x.shape)


def _too_large(value: Any) -> str:
    if np.isfinite(value):
        return f"found {value:g}, too large for float32; declare a scale for the column"
    return f"found {value}; correct the row or take it out"


def _split(table: Table, batch: Batch) -> NDArray[np.int8]:
    split = np.asarray(batch.split)
    wrong = np.flatnonzero(~np.isin(split, (0, 1)))
    if len(wrong):
        raise table.error(
            batch,
            int(wrong[0]),
            f"the split is {_spelled(split[wrong[0]])}; expected 0 (train) or 1 (test), or set "
            "split to the name of the column that holds them",
        )
    return split.astype(np.int8)


def _spelled(value: Any) -> str:
    """Write a number as it would be read; NumPy's own repr names its type."""
    if isinstance(value, str):
        return repr(str(value))
    return "missing" if value is None or np.isnan(value) else f"{value:g}"


def _features(found: Any, shape: tuple[int, ...], where: str) -> Features:
    if not sparse.issparse(found):
        return torch.from_numpy(found)
    if len(shape) > 1:
        raise DataError(f"{where}: sparse rows are flat; leave shape = {shape} out")
    rows = sparse.csr_matrix(found)
    rows.sum_duplicates()
    return rows


def _notes(table: Table, source: Source, survey: _Survey) -> Iterator[str]:
    if survey.lost:
        yield f"{survey.lost} rows {table.lost} left out"
    if survey.dropped:
        yield f"{survey.dropped} rows with gaps dropped"
    if source.center or source.scale:
        named = sorted({*source.center, *source.scale})
        yield f"declared center and scale applied to {', '.join(named)}"
    if source.clip is not None:
        yield f"features clipped to [-{source.clip:g}, {source.clip:g}]"
