"""Targets: which task they make, and how labels become numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import Batch, Table
from coterie.data.federated import DataError, Task
from coterie.data.source import Source

SIGNED = "labels -1 and +1 read as 0 and 1"
"""The note of data whose labels were -1 and +1."""
_MOST_UNDECLARED = 10_000
_MOST_GUESSED = 19  # whole numbers up to here, written in text, are taken for classes


@dataclass(frozen=True)
class Range:
    """What a first reading tells about targets.

    `real` is None as long as every file seen stores whole and real numbers alike; `text` is an
    example of a target that is text; `kinds` are the different numbers found, where they are wanted
    (not None), and no more than a few over `_MOST_UNDECLARED` of them.
    """

    lowest: float = np.inf
    highest: float = -np.inf
    zero: bool = False
    whole: bool = True
    width: int = 1
    real: bool | None = None
    text: str | None = None
    kinds: frozenset[float] | None = None

    def extend(self, batch: Batch) -> "Range":
        """Take more targets into account."""
        y = batch.y
        if not y.size:
            return self
        width = 1 if y.ndim == 1 else y.shape[1]
        if y.dtype.kind in "OUS":
            return replace(self, width=width, text=str(y.flat[0]))
        flags = [flag for flag in (self.real, batch.real) if flag is not None]
        return Range(
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
class Target:
    """How targets are written.

    Attributes:
        task: The task.
        outputs: The width of the prediction.
        names: Declared names of the classes.
        signed: Whether -1 and +1 stand for 0 and 1.
        declared: Whether the classes were declared.
        positive: Numbers of the classes that count as 1, against the rest; () without such.
        found: The labels found, in words, where they are more than two.
        notes: What was decided, in words.
        assumed: What was read off the rows and is taken for public.
    """

    task: Task
    outputs: int
    names: tuple[str, ...] | None = None
    signed: bool = False
    declared: bool = True
    positive: tuple[int, ...] = ()
    found: str = ""
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """The number of classes a label may take."""
        return self.outputs if self.task == "multiclass" else 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row's target."""
        return (self.outputs,) if self.task == "multilabel" else ()

    @property
    def dtype(self) -> type[np.generic]:
        """The type targets are held in."""
        return np.int64 if self.task == "multiclass" else np.float32


def plan_target(table: Table, source: Source, found: Range) -> Target:
    """Decide what the targets are, from what is declared and else from their range."""
    task = source.task or _task(table, source, found)
    names = source.classes if isinstance(source.classes, tuple) else None
    if task in ("regression", "multilabel"):
        names = None
    if found.text is not None and names is None:
        raise DataError(
            f"{table.where}: targets are text, e.g. {found.text!r}; declare the classes by name, "
            f"classes=({found.text!r}, ...), or choose a numeric target"
        )
    if found.width > 1 and task != "multilabel":
        raise DataError(f"{table.where}: {task} takes one target, found {found.width}; choose one")
    if source.positives:
        return _one_against_rest(table, source, found)
    return _as_declared(table, source, found, task=task, names=names)


def _as_declared(
    table: Table, source: Source, found: Range, *, task: Task, names: tuple[str, ...] | None
) -> Target:
    size = source.class_count
    expected = {"regression": None, "binary": 2, "multilabel": found.width}.get(task, size)
    if size is not None and size != expected:
        raise DataError(
            f"{table.where}: {size} classes are declared, but {task} with {found.width} target(s) "
            f"takes {expected or 'none'}; correct classes or task"
        )
    signed = names is None and task == "binary" and found.signed
    notes: tuple[str, ...] = (SIGNED,) if signed else ()
    outputs = {"multilabel": found.width, "multiclass": size}.get(task, 1)
    assumed: tuple[str, ...] = ()
    if source.task is None and size is None and task in ("binary", "multiclass"):
        assumed = (_undeclared(1 if task == "binary" else int(found.highest)),)
    elif source.task is None and table.guessed and found.whole and task == "regression":
        notes += ("whole-number targets above 19 read as numbers to predict: declare task=",)
    if outputs is None:
        outputs = _count(table, found)
        assumed = assumed or (_undeclared(outputs - 1),)
    notes += assumed
    declared = size is not None
    return Target(
        task,
        outputs,
        names,
        signed,
        declared=declared,
        found="" if found.two or found.text else f"{found.lowest:g} to {found.highest:g}",
        notes=notes,
        assumed=assumed,
    )


def encode_target(table: Table, batch: Batch, target: Target) -> NDArray[Any]:
    """Turn the targets of a batch into what `FederatedDataset` holds, or say which one is wrong."""
    if target.task == "regression":
        center, scale = table.columns.target
        with np.errstate(over="ignore"):
            y = ((batch.y.astype(np.float64) - center) / scale).astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(y))
        if len(wrong):
            row = int(wrong[0])
            raise table.error(
                batch, row, f"the target is {batch.y[row]}; correct it, or declare a scale for it"
            )
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


def _one_against_rest(table: Table, source: Source, found: Range) -> Target:
    """Make the declared classes 1 and all others 0."""
    names = _class_names(table, source, found)
    declared = source.classes is not None
    kind = "declared classes" if declared else "classes found"
    for name in source.positives:
        if name not in names:
            lead = f"class {name} is not declared" if declared else f"no row of class {name}"
            raise DataError(
                f"{table.where}: {lead}; the {kind} are {_listed(names)}: correct positive"
            )
    if len(source.positives) == len(names):
        raise DataError(
            f"{table.where}: positive names all {kind}, {_listed(names)}; leave at least one of "
            "them for the rest"
        )
    return Target(
        "binary",
        1,
        names,
        declared=declared,
        positive=tuple(names.index(name) for name in source.positives),
        notes=(f"class {', '.join(source.positives)} read as 1, every other class as 0",),
    )


def _class_names(table: Table, source: Source, found: Range) -> tuple[str, ...]:
    if isinstance(source.classes, tuple):
        return source.classes
    if source.classes is not None:
        signed = source.classes == 2 and found.signed
        return ("-1", "1") if signed else tuple(str(kind) for kind in range(source.classes))
    kinds = found.kinds or frozenset()
    finite = np.isfinite([found.lowest, found.highest]).all()
    if not found.whole or not finite or len(kinds) > _MOST_UNDECLARED:
        raise DataError(
            f"{table.where}: positive chooses classes, but the targets are numbers from "
            f"{found.lowest:g} to {found.highest:g}, not all of them whole or too many of them; "
            "choose a target of whole numbers, or declare its classes by name"
        )
    return tuple(str(int(kind)) for kind in sorted(kinds))


def _listed(names: Sequence[str], most: int = 12) -> str:
    """List classes shortly: 0..5 where they are counted from 0."""
    if len(names) > 2 and all(name == str(at) for at, name in enumerate(names)):
        return f"0..{len(names) - 1}"
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _task(table: Table, source: Source, found: Range) -> Task:
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


def _count(table: Table, found: Range) -> int:
    if not found.whole or found.lowest < 0 or found.highest >= _MOST_UNDECLARED:
        raise DataError(
            f"{table.where}: whole-number targets from {found.lowest:g} to {found.highest:g} are "
            'no labels 0, 1, 2, ...; declare classes by name, or task="regression"'
        )
    return max(int(found.highest) + 1, 2)


def _undeclared(highest: int) -> str:
    return (
        f"classes taken from the file's labels (0..{highest}): declare classes= to make this "
        "public knowledge explicit"
    )


def _named(table: Table, batch: Batch, target: Target, names: Sequence[str]) -> NDArray[Any]:
    kinds, codes = np.unique(batch.y, return_inverse=True)
    whole = kinds.dtype.kind in "f" and bool((np.trunc(kinds) == kinds).all())
    spelled = [str(int(k) if whole and np.isfinite(k) else k) for k in kinds]
    if kinds.dtype.kind == "b":
        spelled = [str(int(kind)) for kind in kinds]
    index = {name: at for at, name in enumerate(names)}
    known = np.array([index.get(name, -1) for name in spelled], dtype=np.int64)
    y = known[codes.reshape(-1)]
    wrong = np.flatnonzero(y < 0)
    if len(wrong):
        value = spelled[int(codes.reshape(-1)[wrong[0]])]
        raise table.error(batch, int(wrong[0]), _outside(repr(value), _listed(names), target))
    return y.astype(target.dtype)


def _outside(value: str, known: str, target: Target) -> str:
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
