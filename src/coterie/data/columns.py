"""Rows in batches, and how the columns of a file become numbers.

A reader turns a file into a `Table`: batches of rows that can be read twice, so that
`coterie.data.assemble` can count first and then write each row to its client's place.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from coterie.data.federated import DataError
from coterie.data.source import Source

Names = Sequence[str] | range
Values: TypeAlias = NDArray[Any] | sparse.csr_matrix
Fail = Callable[[int, str], DataError]
"""Makes the error for (row, what was found and what to do)."""
_WHOLE = re.compile(r"-?[0-9]{1,4000}")  # int() takes no more
PIXELS = "uint8 images divided by 255"


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
        lost: Rows that the reader left out in front of or among these, as `Table.lost` says.
    """

    rows: NDArray[np.int64]
    names: Sequence[str]
    codes: NDArray[np.int64]
    x: Values | None
    y: NDArray[Any]
    split: NDArray[Any] | None = None
    real: bool | None = None
    lost: int = 0

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
        lost: Why the reader leaves rows out, e.g. "without a known tag".
        declared: The options with what the file's own layout declares; None: as given.
    """

    where: str
    shape: tuple[int, ...]
    columns: Columns
    read: Callable[[bool], Iterator[Batch]]
    place: Callable[[int], str] = "row {} (from 0)".format
    notes: tuple[str, ...] = ()
    sparse: bool = False
    guessed: bool = False
    lost: str = ""
    declared: Source | None = None

    def error(self, batch: Batch, row: int, found: str) -> DataError:
        """Make the error for one row of a batch."""
        client = batch.names[int(batch.codes[row])]
        return DataError(
            f"{self.where}: {self.place(int(batch.rows[row]))}, client {client!r}: {found}"
        )


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


def client_order(names: Sequence[str]) -> list[int]:
    """Order clients by number when every name is a whole number, else leave them as they are."""
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(range(len(names)), key=lambda k: int(names[k]))
    return list(range(len(names)))


def first_clients(names: Sequence[str], clients: int | None, where: str) -> list[str]:
    """Take the first so many clients, in their order; None takes all."""
    ordered = [names[k] for k in client_order(names)]
    if clients is None:
        return ordered
    if not 1 <= clients <= len(ordered):
        raise DataError(
            f"{where}: clients = {clients}: expected 1 to {len(ordered)}, as many as there are; "
            "take fewer"
        )
    return ordered[:clients]


def kept_note(kept: int, known: int) -> tuple[str, ...]:
    """Say that clients were left out, if any were."""
    return (f"{kept} of {known} clients kept",) if kept < known else ()


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
