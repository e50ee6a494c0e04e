"""What every reader shares: the options, rows in batches, and how columns become numbers.

A reader turns a file into a `Table`: batches of rows that can be read twice, so that
`coterie.data.assemble` can count first and then write each row to its client's place.
"""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.federated import TASKS, DataError, Task

Names = Sequence[str] | range
Values: TypeAlias = NDArray[Any] | sparse.csr_matrix


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to read a file: declared and public, never learnt from the rows of clients.

    Columns of arrays are called "0", "1", ... (or "x0", "x1", ...), beside the names that the
    file gives; "x" in `center` and `scale` stands for every feature.

    Attributes:
        task: None takes it from the targets: real numbers are regression, whole numbers classes.
        client: The column, or the array, that names each row's client.
        target: The target; several are labels, or clients with `targets_are_clients`.
        split: A column of 0 (train) and 1 (test), used where the file has it.
        features: The columns to take; () is every other numeric column, in file order.
        levels: Declared levels of categorical columns; each level becomes a 0/1 column. For
            LEAF text, `levels["x"]` are the characters, each read as its index.
        classes: How many classes there are, or their names.
        positive: One class or several against the rest: rows of these are 1, all others 0, and the
            task is binary. `classes`, if declared, are then those of the file.
        targets_are_clients: Make each target a client, without the rows that lack it.
        missing: Refuse rows with gaps, or drop them (counted in the data's notes).
        center: Constants subtracted from columns.
        scale: Constants that columns are divided by, after `center`.
        clip: Features are clipped to [-clip, clip], last.
        sparse: Keep features as CSR. Sparse input stays CSR in any case.
        shape: The shape of a row, e.g. (28, 28) for flat images; () keeps the file's.
        memory_map: A folder to hold the arrays instead of memory; its parent must exist.
    """

    task: Task | None = None
    client: str = "client"
    target: str | tuple[str, ...] = "y"
    split: str = "split"
    features: tuple[str, ...] = ()
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: int | tuple[str, ...] | None = None
    positive: int | str | tuple[int | str, ...] | None = None
    targets_are_clients: bool = False
    missing: Literal["error", "drop"] = "error"
    center: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
    sparse: bool = False
    shape: tuple[int, ...] = ()
    memory_map: str | None = None

    def __post_init__(self) -> None:
        for name in ("target", "features", "classes", "positive", "shape"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if self.task is not None and self.task not in TASKS:
            raise DataError(f"task = {self.task!r}: choose one of {', '.join(TASKS)}")
        if self.missing not in ("error", "drop"):
            raise DataError(f"missing = {self.missing!r}: choose 'error' or 'drop'")
        if self.clip is not None and not (np.isfinite(self.clip) and self.clip > 0):
            raise DataError(f"clip = {self.clip}: expected a finite number above 0")
        constants = (*self.center.values(), *self.scale.values())
        if not np.isfinite(constants).all() or 0 in self.scale.values():
            raise DataError(
                f"center = {dict(self.center)}, scale = {dict(self.scale)}: expected finite "
                "numbers, and no scale of 0"
            )
        if self.sparse and self.memory_map is not None:
            raise DataError("sparse rows are kept in memory: set sparse or memory_map, not both")
        self._check_names()
        self._check_positive()

    def _check_names(self) -> None:
        groups = {"features": self.features, "target": self.targets}
        groups |= {f"levels of {name!r}": values for name, values in self.levels.items()}
        if not self.targets:
            raise DataError("target = (): name the target column")
        if isinstance(self.classes, tuple):
            groups["classes"] = self.classes
        for kind, names in groups.items():
            if isinstance(names, str) or len(set(names)) < len(names):
                raise DataError(f"{kind} = {names!r}: expected a list of names, none given twice")
        taken = (*self.targets, *self.features)
        if not self.targets_are_clients and self.client in taken:
            raise DataError(f"column {self.client!r} is both the client and a target or feature")
        if set(self.targets) & set(self.features):
            raise DataError(
                f"target = {self.target!r} is among the features too: leave it out there"
            )
        size = self.class_count
        if size is not None and size < (1 if self.task == "multilabel" else 2):
            raise DataError(f"classes = {self.classes!r}: at least two classes are needed")

    def _check_positive(self) -> None:
        if self.positive is None:
            return
        given = self.positive if isinstance(self.positive, tuple) else (self.positive,)
        sound = all(isinstance(one, int | str | np.integer) for one in given)
        if not sound or any(one is True or one is False or one == "" for one in given):
            raise DataError(
                f"positive = {self.positive!r}: expected a class, or several, each a whole number "
                "or a name"
            )
        if not given or len(set(self.positives)) < len(given):
            raise DataError(
                f"positive = {self.positive!r}: expected at least one class, none given twice"
            )
        if self.task not in (None, "binary"):
            raise DataError(
                f"positive = {self.positive!r} makes the task binary, but task = {self.task!r} is "
                "asked for; leave one of them out"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The target columns."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)

    @property
    def positives(self) -> tuple[str, ...]:
        """The classes that count as 1, as they are spelled; none without `positive`."""
        if self.positive is None:
            return ()
        given = self.positive if isinstance(self.positive, tuple) else (self.positive,)
        return tuple(str(one) for one in given)

    @property
    def class_count(self) -> int | None:
        """How many classes are declared, if any."""
        if self.classes is None or isinstance(self.classes, int):
            return self.classes
        return len(self.classes)


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a file.

    Attributes:
        rows: The number of each row in the file, as `Table.place` takes it.
        names: Clients met here, in order of appearance; some may have no row.
        codes: The client of each row, as an index into `names`.
        x: Features, (n, *shape) or CSR; NaN is a gap. None when only counting was asked for.
        y: Targets, (n,) or (n, targets): numbers (NaN is a gap) or text (None is a gap).
        split: 0 train or 1 test for each row.
        real: Whether the targets are written as real numbers, not as whole ones; None where
            the file stores both alike.
    """

    rows: NDArray[np.int64]
    names: Sequence[str]
    codes: NDArray[np.int64]
    x: Values | None
    y: NDArray[Any]
    split: NDArray[Any] | None = None
    real: bool | None = None

    def take(self, keep: NDArray[Any]) -> "Batch":
        """Keep some rows, in order."""
        return replace(
            self,
            rows=self.rows[keep],
            codes=self.codes[keep],
            x=None if self.x is None else self.x[keep],
            y=self.y[keep],
            split=None if self.split is None else self.split[keep],
        )


@dataclass(frozen=True)
class Columns:
    """How the columns of a file become features: which, one-hot levels, constants.

    Attributes:
        names: Names of the features, after one-hot coding.
        picks: The file's columns taken, in order; None takes all as they are.
        levels: Declared levels, by position in `picks`.
        center: Constants by feature, or None.
        scale: Constants by feature, or None.
        target: The target's own center and scale.
    """

    names: Names
    picks: tuple[int, ...] | None = None
    levels: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    center: NDArray[np.float64] | None = None
    scale: NDArray[np.float64] | None = None
    target: tuple[float, float] = (0.0, 1.0)

    def encode(self, x: Values, fail: Callable[[int, str, str], DataError]) -> Values:
        """Take the declared columns of an array and expand the categorical ones.

        Args:
            x: Rows, (n, *shape) or CSR.
            fail: Makes the error for (row of `x`, column, what was found and what to do).
        """
        if self.picks is None:
            return x
        if not self.levels:
            return x[:, list(self.picks)]
        parts = []
        for position, pick in enumerate(self.picks):
            values = np.asarray(x[:, pick], dtype=np.float64)
            if position not in self.levels:
                parts.append(values[:, None])
                continue
            codes = _level_codes(values, self.levels[position])
            lost = np.flatnonzero((codes < 0) & ~np.isnan(values))
            if len(lost):
                value = f"{values[lost[0]]:g}"
                raise fail(int(lost[0]), str(pick), unknown_level(value, self.levels[position]))
            parts.append(one_hot(codes, len(self.levels[position])))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Table:
    """A file, or arrays, as batches that can be read twice.

    Attributes:
        where: The file's name for messages.
        shape: The shape of one row of features.
        columns: What the features are.
        read: Yields batches; its argument says whether features are wanted.
        place: Says where a row is, e.g. "line 7".
        notes: What the reader did, in words.
        sparse: Whether features are CSR.
        guessed: Whether whole numbers are so by their looks alone, as in text files.
    """

    where: str
    shape: tuple[int, ...]
    columns: Columns
    read: Callable[[bool], Iterator[Batch]]
    place: Callable[[int], str] = "row {} (from 0)".format
    notes: tuple[str, ...] = ()
    sparse: bool = False
    guessed: bool = False

    def error(self, batch: Batch, row: int, found: str) -> DataError:
        """Make the error for one row of a batch."""
        client = batch.names[int(batch.codes[row])]
        return DataError(
            f"{self.where}: {self.place(int(batch.rows[row]))}, client {client!r}: {found}"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged or absent file raises into a `DataError` that names it."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: larger than memory; give it as CSV, Parquet or npz, which are streamed"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not whole JSON (line {error.lineno}, character {error.colno}: {error.msg}); "
            "it is truncated or damaged: fetch it again"
        ) from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: could not be read ({error}); it is truncated, damaged or of another format: "
            "fetch it again or check its suffix"
        ) from error


def plan_columns(names: Names, source: Source, *, where: str, numbered: bool = True) -> Columns:
    """Resolve the declared columns and constants against the columns of a file.

    Args:
        names: The file's feature columns.
        source: The options.
        where: The file's name for messages.
        numbered: Whether columns may also be called by number.
    """
    chosen = [find_column(name, names, where=where, numbered=numbered) for name in source.features]
    levels = {
        find_column(name, names, where=where, numbered=numbered): tuple(values)
        for name, values in source.levels.items()
    }
    picks = tuple(chosen or range(len(names))) if chosen or levels else None
    wide: list[str] = []
    for pick in picks or ():
        name = str(names[pick])
        wide += [f"{name}={level}" for level in levels[pick]] if pick in levels else [name]
    features: Names = names if picks is None else wide
    own = {"y", *source.targets} - (set() if isinstance(names, range) else set(names))

    def spread(given: Mapping[str, float], neutral: float) -> NDArray[np.float64] | None:
        wanted = {name: value for name, value in given.items() if name not in own}
        return _spread(wanted, neutral, features, names, where=where, numbered=numbered)

    return Columns(
        features,
        picks,
        {at: levels[pick] for at, pick in enumerate(picks or ()) if pick in levels},
        center=spread(source.center, 0.0),
        scale=spread(source.scale, 1.0),
        target=(
            next((source.center[name] for name in sorted(own) if name in source.center), 0.0),
            next((source.scale[name] for name in sorted(own) if name in source.scale), 1.0),
        ),
    )


def find_column(name: str, names: Names, *, where: str, numbered: bool = True) -> int:
    """Find a column by name, or by number ("3" or "x3")."""
    if not isinstance(names, range) and name in names:
        return list(names).index(name)
    digits = name.removeprefix("x")
    if numbered and digits.isdecimal() and int(digits) < len(names):
        return int(digits)
    listed = f"0..{len(names) - 1}" if isinstance(names, range) else _short(names)
    raise DataError(f"{where}: no column {name!r}; the columns are {listed}")


def one_hot(codes: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Turn level numbers into 0/1 columns; -1 is a gap and gives NaN."""
    wide = np.zeros((len(codes), size))
    wide[np.arange(len(codes)), codes] = 1.0
    wide[codes < 0] = np.nan
    return wide


def unknown_level(value: str, levels: Sequence[str]) -> str:
    """Say that a value is not among the declared levels."""
    return (
        f"found {value!r}, which is none of the declared levels {_short(levels)}; "
        "correct it or declare the level"
    )


def _level_codes(values: NDArray[np.float64], levels: Sequence[str]) -> NDArray[np.int64]:
    codes = np.full(len(values), -1, dtype=np.int64)
    for code, level in enumerate(levels):
        try:
            codes[values == float(level)] = code
        except ValueError:
            raise DataError(
                f"level {level!r} of a numeric column is not a number: declare numbers, e.g. '1'"
            ) from None
    return codes


def _spread(
    wanted: dict[str, float],
    neutral: float,
    features: Names,
    names: Names,
    *,
    where: str,
    numbered: bool,
) -> NDArray[np.float64] | None:
    """Spread declared constants over the features; the identity where none is declared."""
    if not wanted:
        return None
    spread = np.full(len(features), neutral)
    if "x" in wanted and (isinstance(names, range) or "x" not in names):
        spread[:] = wanted.pop("x")
    position = {str(name): at for at, name in enumerate(features)} if wanted else {}
    for name, value in wanted.items():
        real = str(names[find_column(name, names, where=where, numbered=numbered)])
        if real not in position:
            raise DataError(
                f"{where}: a constant is declared for {name!r}, which is categorical or not "
                "among features; leave the constant out"
            )
        spread[position[real]] = value
    return spread


def _short(names: Sequence[str], most: int = 12) -> str:
    listed = ", ".join(repr(str(name)) for name in names[:most])
    return f"{listed}, ... ({len(names)} in all)" if len(names) > most else listed
