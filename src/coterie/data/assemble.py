"""From batches of rows to `ClientArrays`, in two passes and one copy.

The first pass counts the rows of every client and finds the range of the targets. The second pass
writes each row to its client's place in arrays that are allocated once, in memory or in a folder. A
folder appears complete or not at all. Clients are sorted by number if every name is an integer,
else they keep the order of first appearance; the rows of a client keep the order of the source.
"""

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.suggest import counted, listed
from coterie.data.config import Source
from coterie.data.federated import (
    ClientArrays,
    DataError,
    Spec,
    Task,
    client_medians,
    fill_gaps,
    offsets_of,
)
from coterie.data.tables import Batch, Table, client_order
from coterie.data.text_images import Values

SIGNED = "labels -1 and +1 read as 0 and 1"
"""The note of data whose labels were -1 and +1."""
_RESIDENT = 1 << 26  # bytes of mapped features that stay resident
_MOST_UNDECLARED = 10_000
_MOST_GUESSED = 19  # integers up to this, written as text, are taken for classes
_FILES = ("features.npy", "targets.npy", "split.npy")
_GAP = (
    'give the value, fill gaps with missing="client-median" or missing="constant", leave such rows '
    'out with missing="drop", or leave the column out of features'
)
_Allocate = Callable[[str, tuple[int, ...], Any], NDArray[Any]]
"""Allocates an array of (name, shape, type)."""


@dataclass(frozen=True)
class _Range:
    """The range of the targets."""

    lowest: float = np.inf
    highest: float = -np.inf
    zero: bool = False
    whole: bool = True
    width: int = 1
    real: bool | None = None  # None: the source stores integers and real numbers alike
    text: str | None = None  # an example of a target that is text
    # the different numbers, if needed (not None), up to a few more than _MOST_UNDECLARED
    kinds: frozenset[float] | None = None

    def extend(self, batch: Batch) -> "_Range":
        """Return the range with the targets of a batch."""
        y = batch.y
        if not y.size:
            return self
        width = 1 if y.ndim == 1 else y.shape[1]
        if y.dtype.kind in "OUS":
            return replace(self, width=width, text=str(y.flat[0]))
        flags = [flag for flag in (self.real, batch.real) if flag is not None]
        return _Range(
            lowest=min(self.lowest, float(y.min())),
            highest=max(self.highest, float(y.max())),
            zero=self.zero or bool((y == 0).any()),
            whole=self.whole and bool((np.trunc(y) == y).all()),
            width=width,
            real=any(flags) if flags else None,
            text=self.text,
            kinds=self._more_kinds(y),
        )

    def _more_kinds(self, y: NDArray[Any]) -> frozenset[float] | None:
        if self.kinds is None or len(self.kinds) > _MOST_UNDECLARED:
            return self.kinds
        return self.kinds | set(np.unique(y)[: _MOST_UNDECLARED + 1].astype(np.float64).tolist())

    @property
    def signed(self) -> bool:
        """Whether labels are -1 and +1."""
        return self.lowest == -1 and self.highest <= 1 and not self.zero and self.whole

    @property
    def two(self) -> bool:
        """Whether labels are 0 and 1, or -1 and +1."""
        return self.signed or (self.whole and self.lowest >= 0 and self.highest <= 1)


@dataclass(frozen=True)
class _Target:
    """How targets are written."""

    task: Task
    outputs: int
    names: tuple[str, ...] | None = None  # of the classes
    signed: bool = False  # -1 and +1 stand for 0 and 1
    declared: bool = True  # whether the classes were
    positive: tuple[int, ...] = ()  # the classes that count as 1, against the rest
    found: str = ""  # the range of the labels, if there are more than two, for messages
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()  # facts read off the rows and treated as public

    @property
    def classes(self) -> int:
        """The number of classes a label may take."""
        return self.outputs if self.task == "multiclass" else 2

    @property
    def dtype(self) -> type[np.generic]:
        """The type of stored targets."""
        return np.int64 if self.task == "multiclass" else np.float32


def _plan_target(table: Table, source: Source, found: _Range) -> _Target:
    """Return how targets are written, by what is declared, else by their range."""
    task = source.task or _task(table, source, found)
    names = source.classes if isinstance(source.classes, tuple) else None
    names = None if task in ("regression", "multilabel") else names
    if found.text is not None and names is None:
        raise DataError(
            f"{table.where}: targets are text, e.g. {found.text!r}; declare the classes by "
            "name with classes=, or choose a numeric target"
        )
    if found.width > 1 and task != "multilabel":
        raise DataError(f"{table.where}: {task} takes one target, found {found.width}; choose one")
    if source.positives:
        return _one_against_rest(table, source, found)
    return _as_declared(table, source, found, task=task, names=names)


def _as_declared(
    table: Table, source: Source, found: _Range, *, task: Task, names: tuple[str, ...] | None
) -> _Target:
    size = source.class_count
    expected = {"regression": None, "binary": 2, "multilabel": found.width}.get(task, size)
    if size is not None and size != expected:
        raise DataError(
            f"{table.where}: {size} classes are declared, but {task} with {found.width} target(s) "
            f"takes {expected or 'none'}; correct classes= or task="
        )
    signed = names is None and task == "binary" and found.signed
    notes: tuple[str, ...] = (SIGNED,) if signed else ()
    outputs = {"multilabel": found.width, "multiclass": size}.get(task, 1)
    assumed: tuple[str, ...] = ()
    if source.task is None and size is None:
        # One target of one client can decide on the task, and so on the shape of the releases.
        highest = 1 if task == "binary" else int(found.highest) if task == "multiclass" else None
        assumed = (_undeclared(highest) if highest else _UNDECLARED_TASK.format(task),)
        if table.guessed and found.whole and task == "regression":
            notes += ("integer targets above 19 read as regression targets: declare the task",)
    if outputs is None:
        outputs = _count(table, found)
        assumed = assumed or (_undeclared(outputs - 1),)
    between = "" if found.two or found.text else f"{found.lowest:g} to {found.highest:g}"
    declared = size is not None
    if task in ("binary", "multiclass"):
        notes += assumed
    return _Target(task, outputs, names, signed, declared, (), between, notes, assumed)


def _encode_target(table: Table, batch: Batch, target: _Target) -> NDArray[Any]:
    """Return the targets of a batch as they are stored, or raise an error for a wrong one."""
    if target.task == "regression":
        center, scale = table.columns.target
        with np.errstate(over="ignore"):
            y = ((batch.y.astype(np.float64) - center) / scale).astype(np.float32)
        if not np.isfinite(y).all():
            row = int(np.argmin(np.isfinite(y)))
            text = f"the target is {batch.y[row]}; correct it, or declare a scale for it"
            raise table.error(batch, row, text)
        return y.reshape(-1)
    if table.columns.target != (0.0, 1.0):
        raise DataError(
            f"{table.where}: a constant is declared for the target, but {target.task} labels are "
            "not scaled; leave it out"
        )
    if target.names is not None:
        named = _named(table, batch, target, target.names)
        return np.isin(named, target.positive).astype(target.dtype) if target.positive else named
    labels = (batch.y + 1) / 2 if target.signed else batch.y
    sound = (labels >= 0) & (labels < target.classes) & (np.trunc(labels) == labels)
    if not sound.all():
        row = int(np.argwhere(~sound)[0][0])
        value = batch.y[row][~sound[row]][0] if batch.y.ndim > 1 else batch.y[row]
        known = f"0..{target.classes - 1}" if not target.signed else "-1 and +1"
        raise table.error(batch, row, _outside(f"{value:g}", known, target))
    return labels.astype(target.dtype)


def _one_against_rest(table: Table, source: Source, found: _Range) -> _Target:
    """Make the declared classes 1 and all others 0."""
    names = _class_names(table, source, found)
    declared = source.classes is not None
    kind = "declared classes" if declared else "classes found"
    for name in source.positives:
        if name not in names:
            lead = f"class {name} is not declared" if declared else f"no row of class {name}"
            raise DataError(
                f"{table.where}: {lead}; the {kind} are {_listed(names)}: correct positive="
            )
    if len(source.positives) == len(names):
        raise DataError(
            f"{table.where}: positive= names all {kind}, {_listed(names)}; leave at least one of "
            "them for the rest"
        )
    return _Target(
        "binary",
        1,
        names,
        declared=declared,
        positive=tuple(names.index(name) for name in source.positives),
        notes=(f"class {', '.join(source.positives)} read as 1, every other class as 0",),
    )


def _class_names(table: Table, source: Source, found: _Range) -> tuple[str, ...]:
    if isinstance(source.classes, tuple):
        return source.classes
    if source.classes is not None:
        signed = source.classes == 2 and found.signed
        return ("-1", "1") if signed else tuple(str(kind) for kind in range(source.classes))
    kinds = found.kinds or frozenset()
    finite = np.isfinite([found.lowest, found.highest]).all()
    if not found.whole or not finite or len(kinds) > _MOST_UNDECLARED:
        raise DataError(
            f"{table.where}: positive= chooses classes, but the targets are numbers from "
            f"{found.lowest:g} to {found.highest:g}, not all of them whole or too many of them; "
            "choose a target of whole numbers, or declare its classes by name"
        )
    return tuple(str(int(kind)) for kind in sorted(kinds))


def _listed(names: Sequence[str], most: int = 12) -> str:
    """Return a short list of classes: 0..5 where they are numbered from 0."""
    if len(names) > 2 and all(name == str(at) for at, name in enumerate(names)):
        return f"0..{len(names) - 1}"
    return listed(names, most)


def _task(table: Table, source: Source, found: _Range) -> Task:
    if source.positives:
        return "binary"
    if found.width > 1:
        if found.text is None and not (found.two and not found.signed):
            raise DataError(
                f"{table.where}: {found.width} targets that are not all 0 or 1; choose one, or set "
                "targets_are_clients to make each a client"
            )
        return "multilabel"
    if source.classes is not None:
        return "binary" if source.class_count == 2 else "multiclass"
    if found.real or (found.real is None and not found.two):
        return "regression"
    if table.guessed and (found.highest > _MOST_GUESSED or found.lowest < -1):
        return "regression"
    return "binary" if found.two else "multiclass"


def _count(table: Table, found: _Range) -> int:
    if not found.whole or found.lowest < 0 or found.highest >= _MOST_UNDECLARED:
        raise DataError(
            f"{table.where}: whole-number targets from {found.lowest:g} to {found.highest:g} are "
            'no labels 0, 1, 2, ...; declare classes by name, or task="regression"'
        )
    return max(int(found.highest) + 1, 2)


_UNDECLARED_TASK = (
    "task taken from the file's targets ({}): declare the task to make this public knowledge "
    "explicit"
)


def _undeclared(highest: int) -> str:
    return (
        f"classes taken from the file's labels (0..{highest}): declare the classes to make this "
        "public knowledge explicit"
    )


def _named(table: Table, batch: Batch, target: _Target, names: Sequence[str]) -> NDArray[Any]:
    kinds, codes = np.unique(batch.y, return_inverse=True)
    is_real = kinds.dtype.kind == "f" and not (np.trunc(kinds) == kinds).all()
    whole = kinds.dtype.kind in "fb" and not is_real
    spelled = [str(int(k) if whole and np.isfinite(k) else k) for k in kinds]
    index = {name: at for at, name in enumerate(names)}
    known = np.array([index.get(name, -1) for name in spelled], dtype=np.int64)
    y = known[codes.reshape(-1)]
    if (y < 0).any():
        row = int(np.argmax(y < 0))
        value = spelled[int(codes.reshape(-1)[row])]
        raise table.error(batch, row, _outside(repr(value), _listed(names), target))
    return y.astype(target.dtype)


def _outside(value: str, known: str, target: _Target) -> str:
    kind = "declared classes" if target.declared else "classes"
    if target.task == "binary" and target.found:
        return (
            f"label {value} is outside the {kind} {known} of a binary task (labels found: "
            f"{target.found}); correct the row, or name the classes that count as 1 with positive="
        )
    return (
        f"label {value} is outside the {kind} {known}; correct the row, or declare all classes "
        "with classes="
    )


@dataclass
class _Counts:
    """Results of the first pass."""

    range: _Range
    clients: dict[str, int] = field(default_factory=dict)
    has_split: bool = False
    dropped: int = 0
    filled: int = 0
    lost: int = 0


@dataclass(frozen=True)
class _Places:
    """Where the rows of each client go."""

    where: str
    index: dict[str, int]
    offsets: NDArray[np.int64]
    cursor: NDArray[np.int64]

    def assign(self, batch: Batch) -> NDArray[np.int64]:
        """Assign the next free place of its client to every row of a batch."""
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


def _fill_medians(flat: Any, offsets: Any) -> tuple[Any, Any]:
    """Fill gaps by each client's medians; return where they were, and the medians."""
    gaps = np.isnan(flat)
    fills = client_medians(flat, gaps, offsets)
    fill_gaps(flat, gaps, offsets, fills)
    return gaps, fills


def assemble(table: Table, source: Source, *, title: str, keep_gaps: bool = False) -> ClientArrays:
    """Read a table into flat arrays, sorted by client.

    With `keep_gaps`, for rows to be predicted, no row is dropped for a gap: those that a constant
    does not fill stay NaN. Medians are of all rows of a client until they are split.
    """
    shape = source.shape or table.shape
    survey = _survey(table, source, keep_gaps)
    _check(table, source, survey)
    target = _plan_target(table, source, survey.range)
    listed = tuple(survey.clients)
    names = tuple(listed[k] for k in client_order(listed))
    offsets = offsets_of([survey.clients[name] for name in names])
    index = {name: k for k, name in enumerate(names)}
    places = _Places(table.where, index, offsets, offsets[:-1].copy())
    rows = int(offsets[-1])
    labels = (target.outputs,) if target.task == "multilabel" else ()
    with _allocator(source.memory_map) as allocate:
        arrays: dict[str, Any] = {"targets": allocate("targets", (rows, *labels), target.dtype)}
        if survey.has_split:
            arrays["split"] = allocate("split", (rows,), np.int8)
        if not (table.sparse or source.sparse):
            arrays["features"] = allocate("features", (rows, *shape), np.float32)
        _fill(table, source, target=target, places=places, arrays=arrays, keep_gaps=keep_gaps)
        scaling, gaps = {}, None
        if source.missing == "client-median" and not keep_gaps:
            gaps, scaling["fills"] = _fill_medians(arrays["features"].reshape(rows, -1), offsets)
    _finish(table, source, arrays, shape)
    return ClientArrays(
        spec=Spec(shape=shape, outputs=target.outputs, task=target.task, clients=len(names)),
        names=names,
        offsets=offsets,
        features=arrays["features"],
        targets=arrays["targets"],
        source_split=np.asarray(arrays["split"]) if "split" in arrays else None,
        title=title,
        notes=(*table.notes, *target.notes, *_notes(table, source, survey)),
        mapped=source.memory_map,
        assumed=(*source.accepted, *table.assumed, *target.assumed),
        columns=() if isinstance(table.columns.names, range) else table.columns.names,
        left_out=table.left_out,
        scaling=scaling,
        gaps=gaps,
    )


def _finish(table: Table, source: Source, arrays: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Open arrays in a folder for reading, and merge duplicates of sparse rows."""
    if source.memory_map is not None:
        for name in arrays:
            arrays[name] = np.load(Path(source.memory_map, f"{name}.npy"), mmap_mode="c")
    if table.sparse or source.sparse:
        if len(shape) > 1:
            raise DataError(f"{table.where}: sparse rows are flat; leave shape = {shape} out")
        arrays["features"].sum_duplicates()


def _check(table: Table, source: Source, survey: _Counts) -> None:
    check_names(survey.clients, table.where)
    if not any(survey.clients.values()):
        lost = f", {survey.lost} {table.lost}" if survey.lost else ""
        raise DataError(
            f"{table.where}: no clients: no row to read ({survey.dropped} dropped for gaps{lost}); "
            "give a file with at least one row"
        )
    if not math.prod(table.shape):
        raise DataError(f"{table.where}: rows have no features; give at least one column")
    if table.sparse and source.memory_map is not None:
        raise DataError(f"{table.where}: sparse rows are kept in memory; leave memory_map out")
    if table.sparse and source.fills:
        raise DataError(
            f"{table.where}: missing = {source.missing!r} does not fill sparse rows; use drop"
        )
    if source.shape and math.prod(source.shape) != math.prod(table.shape):
        raise DataError(
            f"{table.where}: rows of shape {table.shape} do not fit shape = {source.shape}; "
            "declare a shape with as many values"
        )


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names of clients that are not Unicode text."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: client {name!r} is not Unicode text (it holds one half of a surrogate "
                "pair); rename it"
            ) from error


def _survey(table: Table, source: Source, keep_gaps: bool) -> _Counts:
    seen = _Counts(_Range(kinds=frozenset() if source.positives else None))
    width: tuple[int, ...] | None = None
    # Features are read in this pass only where gaps are dropped or counted.
    features = source.missing != "error" and not keep_gaps
    for batch, gaps in _clean(table, source, features=features, keep_gaps=keep_gaps):
        width = _width(table, batch, width)
        counts = np.bincount(batch.codes, minlength=len(batch.names)).tolist()
        for name, count in zip(batch.names, counts, strict=True):
            seen.clients[name] = seen.clients.get(name, 0) + count
        seen.range = seen.range.extend(batch)
        seen.has_split |= batch.split is not None and len(batch.rows) > 0
        seen.dropped += gaps
        seen.filled += 0 if batch.x is None or not source.fills else int(_gaps(batch.x).sum())
        seen.lost += batch.lost
    return seen


def _width(table: Table, batch: Batch, width: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse targets of another width than the first: NumPy would broadcast one to all labels."""
    if not len(batch.y):
        return width
    found = batch.y.shape[1:]
    if found == (0,):
        raise table.error(batch, 0, "the target is an empty list; give at least one value")
    if width not in (None, found):
        many, first = math.prod(found), math.prod(width or ())
        text = f"{many} targets, where the first row has {first}; give every row the same"
        raise table.error(batch, 0, text)
    return found


def _fill(
    table: Table,
    source: Source,
    *,
    target: _Target,
    places: _Places,
    arrays: dict[str, Any],
    keep_gaps: bool,
) -> None:
    rows = int(places.offsets[-1])
    parts: list[tuple[NDArray[np.int64], Values]] = []
    resident = 0
    for batch, _ in _clean(table, source, features=True, keep_gaps=keep_gaps):
        if not len(batch.rows):
            continue
        at = places.assign(batch)
        arrays["targets"][at] = _encode_target(table, batch, target)
        if batch.split is not None:
            arrays["split"][at] = _split(table, batch)
        x = _scaled(table, batch, source, keep_gaps)
        if "features" in arrays:
            arrays["features"].reshape(rows, -1)[at] = x
            resident += x.nbytes
            if resident > _RESIDENT:
                resident = _evict(arrays["features"])
        else:
            parts.append((at, _csr(x)))
    if parts:
        from scipy import sparse

        stacked = sparse.vstack([x for _, x in parts], format="csr")
        arrays["features"] = stacked[np.argsort(np.concatenate([at for at, _ in parts]))]


def _clean(
    table: Table, source: Source, *, features: bool, keep_gaps: bool
) -> Iterator[tuple[Batch, int]]:
    """Yield batches without gaps that stay, each with the number of rows dropped from it."""
    for whole in table.read(features):
        for batch in _by_target(whole, source) if source.targets_are_clients else (whole,):
            gaps = _gaps(batch.y)
            if batch.x is not None and not source.fills and not keep_gaps:
                gaps = gaps | _gaps(batch.x)
            if not gaps.any():
                yield batch, 0
            elif source.missing != "error":
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
    """Return which rows hold NaN or None."""
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
        text = 'the target is missing; give it, or leave such rows out with missing="drop"'
        return table.error(batch, row, text)
    one = batch.x[row : row + 1]
    one = one if isinstance(one, np.ndarray) else one.toarray()
    column = int(np.flatnonzero(np.isnan(one.reshape(-1)))[0])
    name = str(table.columns.names[column])
    return table.error(batch, row, f"column {name!r}: found a gap (NaN or empty); {_GAP}")


def _scaled(table: Table, batch: Batch, source: Source, keep_gaps: bool) -> Values:
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
    kept = (source.fills or keep_gaps) and not sound.all()
    gaps = np.isnan(raw) if kept else np.zeros_like(sound)
    if not (sound | gaps).all():
        row, column = (int(at) for at in np.argwhere(~(sound | gaps))[0])
        name = str(table.columns.names[column])
        raise table.error(batch, row, f"column {name!r}: {_too_large(raw[row, column])}")
    if source.missing == "constant" and gaps.any():
        fill = np.zeros(x.shape[1]) if table.columns.fill is None else table.columns.fill
        fill = fill if source.clip is None else np.clip(fill, -source.clip, source.clip)
        x = np.where(gaps, fill, x).astype(np.float32)
    return _unit_rows(x) if source.unit_rows else x


def _unit_rows(x: NDArray[Any]) -> NDArray[Any]:
    """Divide rows by their l2 norms, in float64, where no square overflows."""
    wide = x.astype(np.float64)
    norms = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    return (wide / np.where(norms > 0, norms, 1)).astype(np.float32)


def _scaled_sparse(table: Table, batch: Batch, source: Source) -> Values:
    if table.columns.center is not None:
        raise DataError(
            f"{table.where}: center would fill every zero of sparse features; declare scale alone"
        )
    raw = _csr(batch.x)
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
    found = _csr((data, x.indices, x.indptr), shape=x.shape)
    return _unit_sparse(found) if source.unit_rows else found


def _unit_sparse(x: Values) -> Values:
    x.sum_duplicates()  # entries given twice count once, as their sum
    squares = np.bincount(_rows_of(x), x.data.astype(np.float64) ** 2, x.shape[0])
    norms = np.sqrt(np.where(squares > 0, squares, 1))
    data = (x.data / norms[_rows_of(x)]).astype(np.float32)
    return _csr((data, x.indices, x.indptr), shape=x.shape)


def _rows_of(x: Values) -> NDArray[np.int64]:
    return np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))


def _csr(values: Any, **options: Any) -> Values:
    from scipy import sparse

    return sparse.csr_matrix(values, **options)


def _too_large(value: Any) -> str:
    if np.isfinite(value):
        return f"found {value:g}, too large for float32; declare a scale for the column"
    return f"found {value}; correct the row or take it out"


def _split(table: Table, batch: Batch) -> NDArray[np.int8]:
    split = np.asarray(batch.split)
    wrong = ~np.isin(split, (0, 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        # the repr of NumPy includes the type
        value = repr(str(split[row])) if isinstance(split[row], str) else f"{split[row]}"
        found = "missing" if value in ("None", "nan") else value.removesuffix(".0")
        text = f"the split is {found}; expected 0 (train) or 1 (test), or set split to the name of "
        raise table.error(batch, row, text + "the column that holds them")
    return split.astype(np.int8)


def _notes(table: Table, source: Source, survey: _Counts) -> Iterator[str]:
    if survey.lost:
        yield f"{counted(survey.lost, 'row')} {table.lost} left out"
    if survey.dropped:
        why = "without a target" if source.fills else "with gaps"
        yield f"{counted(survey.dropped, 'row')} {why} dropped"
    if survey.filled:
        by = "a constant" if source.missing == "constant" else "the median of the client's rows"
        yield f"gaps in {counted(survey.filled, 'row')} filled with {by}"
    if source.centers or source.scales:
        named = sorted({*source.centers, *source.scales})
        yield f"declared center and scale applied to {listed(named)}"
    if source.clip is not None:
        yield f"features clipped to [-{source.clip:g}, {source.clip:g}]"
    if source.unit_rows:
        yield "each row divided by its l2 norm"


def values_of(given: Any, where: str) -> Values:
    """Return the numbers of an array, a sparse matrix, a tensor, a data frame or a list."""
    if hasattr(given, "tocsr"):
        return _csr(given)
    if hasattr(given, "detach"):
        return given.detach().cpu().numpy()
    try:
        array = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)
    except ValueError as error:
        widths = [len(row) if hasattr(row, "__len__") else 1 for row in given]
        odd = next((at for at, width in enumerate(widths) if width != widths[0]), 0)
        raise DataError(
            f"{where}: row {odd} (from 0) has {widths[odd]} values, row 0 has {widths[0]}; give "
            "every row the same number"
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
            text = str(value)
            text = text if len(text) <= 60 else f"{text[:60]}..."
            return DataError(
                f"{where}: row {at[0]} (from 0){column}: found {text!r}, expected a number; "
                "correct it, or code the column as numbers"
            )
    return DataError(f"{where}: {array.dtype} values that are no numbers; convert them")


def targets_of(given: Any, where: str) -> NDArray[Any]:
    """Return targets: numbers, or text with None as a gap."""
    given = given.to_numpy() if hasattr(given, "to_numpy") else given
    array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if array.dtype.kind == "O" and not any(isinstance(value, str) for value in array.flat):
        array = np.asarray(values_of(array, where))
    if array.dtype.kind not in "fiubOU" or array.ndim not in (1, 2):
        raise DataError(
            f"{where}: y is {array.dtype} of shape {array.shape}; expected numbers or text, one "
            "per row, or (rows, labels)"
        )
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


@contextmanager
def _allocator(folder: str | None) -> Iterator[_Allocate]:
    """Yield a function that allocates arrays in memory, or in a folder that appears on success."""
    if folder is None:
        yield _in_memory
        return
    final = Path(folder)
    if final.is_file() or not final.parent.is_dir():
        raise DataError(f"memory_map = {folder!r}: expected a folder, in a folder that exists")
    if final.exists() and {path.name for path in final.iterdir()} - set(_FILES):
        raise DataError(f"memory_map = {folder!r} holds other files; name a new or empty folder")
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield lambda name, shape, dtype: _mapped(work / f"{name}.npy", shape, dtype)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise DataError(
            f"no memory for {name} of shape {shape}; set memory_map to hold them in a folder"
        ) from None


def _mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # a full disk must be an error here, not a bus error at the first write
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                size = path.stat().st_size / 1e9
                raise DataError(f"{path.parent}: no space for {size:.1f} GB ({error})") from error
    return array


def _evict(features: NDArray[Any]) -> int:
    """Release the resident pages of a memory map and return 0; the file keeps their content."""
    mapped = getattr(features, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
    return 0
