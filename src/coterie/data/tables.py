"""Rows with named columns, one of which is the client: CSV, TSV, Parquet and similar sources.

A reader turns a source into a `Table`: batches of rows that can be read twice, so that
`coterie.data.assemble` counts first and then writes each row to its client's place. Memory holds
one batch beside the result, so a file may be larger than memory.

Every cell of a CSV is read as text and converted by `coterie.data.cells`. So a bad cell is reported
by line and column, and the type of a column never depends on how far a reader looked ahead.
Categorical columns take their declared levels; a text column without levels is left out, with a
note.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial, reduce
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from coterie.core.suggest import hint
from coterie.data.cells import (
    OTHER,
    decimal_signs,
    drop_numbers,
    is_gap,
    parts_of,
    read_dates,
    read_levels,
    read_numbers,
    trimmed,
)
from coterie.data.config import PARQUET, Source, find_files, find_twice, reading
from coterie.data.delimited import BLOCK, ENDS, layout_of, line_of, open_rows
from coterie.data.federated import DataError
from coterie.data.text_images import (
    Coder,
    Fail,
    Tags,
    Values,
    array_coder,
    choose_columns,
    plan_coder,
    plan_tags,
)

TABLES = (*ENDS, *PARQUET)
DELIMITED = (".csv", ".tsv")
"""The files of a folder of delimited text."""
FILE = "file"
"""The column of the name of its file, for `Source.client`, where no column is called so."""
INDEX = "__index_level_"
"""How the column begins in which pandas stores an index without a name."""
Names = Sequence[str] | range
NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
DATE_PARTS = ("year", "month", "weekday", "days")

_BATCH = 1 << 15  # rows of a Parquet file read at a time
_INTEGER_NAME = re.compile(r"-?[0-9]{1,4000}")  # int() takes no more digits
_INTEGER = r"^\s*[+-]?\d+\s*$"


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a source; `rows` are their numbers, as `Table.place` takes them."""

    rows: NDArray[np.int64]
    names: Sequence[str]  # clients in order of appearance; some may have no row
    codes: NDArray[np.int64]  # the client of each row, as an index into names
    x: Values | None  # (n, *shape) or CSR, NaN is a gap; None if only targets were requested
    y: NDArray[Any]  # (n,) or (n, targets): numbers (NaN is a gap) or text (None is a gap)
    split: NDArray[Any] | None = None  # 0 train or 1 test for each row
    real: bool | None = None  # targets are written as real numbers; None: stored as integers are
    lost: int = 0  # rows that the reader left out here, for the reason Table.lost

    def take(self, keep: NDArray[Any]) -> "Batch":
        """Return some of the rows, in order."""
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
    """How the columns of a source become features: which, one-hot levels, constants."""

    names: Names  # of the features, after one-hot coding
    picks: tuple[int, ...] | None = None  # the columns taken, in order; None takes all unchanged
    levels: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by position in picks
    dates: Mapping[int, str] = field(default_factory=dict)  # origins, likewise
    indicators: frozenset[int] = frozenset()  # columns with another one for gaps, likewise
    fill: NDArray[np.float64] | None = None  # for gaps, by feature, after center and scale
    center: NDArray[np.float64] | None = None  # by feature
    scale: NDArray[np.float64] | None = None
    target: tuple[float, float] = (0.0, 1.0)  # its center and scale

    def encode(self, x: Values, fail: Callable[[int, str, str], DataError]) -> Values:
        """Return the declared columns of rows, with categorical ones expanded.

        `fail` returns the error for (row of `x`, column, what was found and what to do).
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
            if OTHER in self.levels[position]:
                codes[(codes < 0) & ~np.isnan(values)] = self.levels[position].index(OTHER)
            lost = np.flatnonzero((codes < 0) & ~np.isnan(values))
            if len(lost):
                value = f"{values[lost[0]]:g}"
                raise fail(int(lost[0]), str(pick), unknown_level(value, self.levels[position]))
            parts.append(one_hot(codes, len(self.levels[position])))
        return np.concatenate(parts, axis=1)


UNDECLARED_COLUMNS = (
    "columns taken by the file's values: declare the features to make this public knowledge "
    "explicit"
)
"""What is assumed where the columns of features are chosen by what is in them."""


@dataclass(frozen=True)
class Table:
    """A source as batches that can be read twice; `where` is its name for messages."""

    where: str
    shape: tuple[int, ...]  # of one row of features
    columns: Columns
    read: Callable[[bool], Iterator[Batch]]  # its argument: whether features are included
    place: Callable[[int], str] = "row {} (from 0)".format
    notes: tuple[str, ...] = ()
    sparse: bool = False
    guessed: bool = False  # integers are recognised by their text only, as in CSV
    lost: str = ""  # why the reader leaves rows out
    left_out: tuple[str, ...] = ()  # columns that are not used
    assumed: tuple[str, ...] = ()  # as `ClientArrays.assumed`
    declared: Source | None = None  # the options, with what the source's own layout declares

    def error(self, batch: Batch, row: int, found: str) -> DataError:
        """Return the error for one row of a batch."""
        client = batch.names[int(batch.codes[row])]
        owner = f", client {client!r}" if client else ""
        return DataError(f"{self.where}: {self.place(int(batch.rows[row]))}{owner}: {found}")


def plan_columns(names: Names, source: Source, *, where: str, numbered: bool = True) -> Columns:
    """Resolve the declared columns and constants; `numbered` allows columns by number."""
    find = partial(find_column, names=names, where=where, numbered=numbered)
    chosen = [find(name) for name in source.features]
    levels = {find(name): tuple(values) for name, values in source.levels.items()}
    dates = {find(name): origin for name, origin in source.dates.items()}
    indicators = {find(name) for name in source.indicators}
    if numbered and (dates or indicators):
        raise DataError(f"{where}: dates and indicators are for tables such as CSV or Parquet")
    made = chosen or levels or dates or indicators
    picks = tuple(chosen or range(len(names))) if made else None
    wide: list[str] = []
    for pick in picks or ():
        wide += feature_names(str(names[pick]), source)
    features: Names = names if picks is None else wide
    known = () if isinstance(names, range) else names
    own = _target_names(source, known)

    def constants(given: Mapping[str, float], neutral: float) -> NDArray[np.float64] | None:
        wanted = {name: value for name, value in given.items() if name not in own}
        return _constants(wanted, neutral, features, names, find, where) if wanted else None

    center, scale = constants(source.centers, 0.0), constants(source.scales, 1.0)
    fill = constants(source.fill, np.nan)
    if fill is not None:  # a column without a constant is filled with its center, which is 0
        fill = (fill - (0.0 if center is None else center)) / (1.0 if scale is None else scale)
        fill = np.nan_to_num(fill)
    return Columns(
        features,
        picks,
        {at: levels[pick] for at, pick in enumerate(picks or ()) if pick in levels},
        {at: dates[pick] for at, pick in enumerate(picks or ()) if pick in dates},
        frozenset(at for at, pick in enumerate(picks or ()) if pick in indicators),
        fill,
        center=center,
        scale=scale,
        target=target_constants(source, known),
    )


def feature_names(column: str, source: Source) -> list[str]:
    """Return the names of the features that a column becomes."""
    if column in source.levels:
        names = [f"{column}={level}" for level in source.levels[column]]
    else:
        names = [f"{column}.{p}" for p in DATE_PARTS] if column in source.dates else [column]
    return [*names, f"{column}.missing"] if column in source.indicators else names


def _target_names(source: Source, columns: Sequence[str]) -> list[str]:
    """Return the names that stand for the target among the constants."""
    return sorted({"y", *source.targets} - set(columns))


def target_constants(source: Source, columns: Sequence[str]) -> tuple[float, float]:
    """Return the declared center and scale of the target, the units of a prediction."""
    own = _target_names(source, columns)
    return (
        next((value for name, value in source.centers.items() if name in own), 0.0),
        next((value for name, value in source.scales.items() if name in own), 1.0),
    )


def feature_constants(
    source: Source, columns: Sequence[str], width: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the declared centers and scales by feature, (width,) each."""
    own, names = _target_names(source, columns), {name: at for at, name in enumerate(columns)}
    found = []
    for given, neutral in ((source.centers, 0.0), (source.scales, 1.0)):
        values = np.full(width, neutral)
        if "x" in given and "x" not in names and "x" not in own:
            values[:] = given["x"]
        for name, value in given.items():
            digits = name.removeprefix("x")
            if name in names:
                values[names[name]] = value
            elif name not in own and digits.isdecimal() and int(digits) < width:
                values[int(digits)] = value
        found.append(values)
    return found[0], found[1]


def fill_constants(source: Source, columns: Sequence[str], width: int) -> NDArray[np.float64]:
    """Return the declared constants for gaps by feature, after center, scale and clip."""
    center, scale = feature_constants(source, columns, width)
    raw = np.full(width, np.nan)
    for name, value in source.fill.items():
        at = list(columns).index(name) if name in columns else int(name.removeprefix("x"))
        raw[at] = value
    fill = np.nan_to_num((raw - center) / scale)
    return fill if source.clip is None else np.clip(fill, -source.clip, source.clip)


def _constants(
    wanted: dict[str, float],
    neutral: float,
    features: Names,
    names: Names,
    find: Callable[[str], int],
    where: str,
) -> NDArray[np.float64]:
    """Return the declared constants by feature, `neutral` where none is declared."""
    values = np.full(len(features), neutral)
    if "x" in wanted and (isinstance(names, range) or "x" not in names):
        values[:] = wanted.pop("x")
    position = {str(name): at for at, name in enumerate(features)} if wanted else {}
    for name, value in wanted.items():
        at = position.get(name)
        at = position.get(str(names[find(name)])) if at is None else at
        if at is None:
            raise DataError(
                f"{where}: a constant is declared for {name!r}, which is categorical or not among "
                "features; leave the constant out"
            )
        values[at] = value
    return values


def find_column(name: str, names: Names, *, where: str, numbered: bool = True) -> int:
    """Return the position of a column by name, or by number ("3" or "x3")."""
    if not isinstance(names, range) and name in names:
        return list(names).index(name)
    digits = name.removeprefix("x")
    if numbered and digits.isdecimal() and int(digits) < len(names):
        return int(digits)
    listed = f"0..{len(names) - 1}" if isinstance(names, range) else _short(names)
    meant = "" if isinstance(names, range) else hint(name, names)
    raise DataError(f"{where}: no column {name!r}{meant}; the columns are {listed}")


def client_order(names: Sequence[str]) -> list[int]:
    """Return the order of clients: by number if every name is an integer, else unchanged."""
    if all(_INTEGER_NAME.fullmatch(name) for name in names):
        return sorted(range(len(names)), key=lambda k: int(names[k]))
    return list(range(len(names)))


def first_clients(names: Sequence[str], clients: int | None, where: str) -> list[str]:
    """Return the first `clients` clients, in their order; None returns all."""
    ordered = [names[k] for k in client_order(names)]
    if clients is not None and not 1 <= clients <= len(ordered):
        raise DataError(
            f"{where}: clients = {clients}: expected 1 to {len(ordered)}, the number of clients; "
            "take fewer"
        )
    return ordered[:clients]


def kept_note(kept: int, known: int) -> tuple[str, ...]:
    """Return a note if clients were left out."""
    return (f"{kept} of {known} clients kept",) if kept < known else ()


def one_hot(codes: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Return 0/1 columns for level numbers; -1 is a gap and gives NaN."""
    wide = np.zeros((len(codes), size))
    wide[np.arange(len(codes)), codes] = 1.0
    wide[codes < 0] = np.nan
    return wide


def unknown_level(value: str, levels: Sequence[str]) -> str:
    """Return the message for a value that is not among the declared levels."""
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


def _short(names: Sequence[str], most: int = 12) -> str:
    listed = ", ".join(repr(str(name)) for name in names[:most])
    return f"{listed}, ... ({len(names)} in all)" if len(names) > most else listed


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a file: Arrow arrays, or lists of values that Arrow cannot hold."""

    columns: Mapping[str, Any]
    num_rows: int

    def values(self, name: str) -> list[Any]:
        """Return the values of a column as Python objects."""
        column = self.columns[name]
        return column if isinstance(column, list) else list(column.to_pylist())


@dataclass(frozen=True)
class File:
    """Rows with named columns that can be read more than once; see `Table`."""

    where: str
    names: tuple[str, ...]
    pieces: Callable[[Sequence[str]], Iterator[Piece]]  # some columns of consecutive rows
    place: Callable[[int], str] = "row {} (from 1)".format
    clients: tuple[str, ...] = ()  # all of them in order, where the file lists them
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # classes, by column
    notes: tuple[str, ...] = ()
    tokens: str = "words"  # how its text is cut, unless the options set it
    guessed: bool = False

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Piece]]:
        """Yield the number of the first row (from 1) and some columns of the next rows."""
        first = 1
        for piece in self.pieces(columns):
            if piece.num_rows:
                yield first, piece
            first += piece.num_rows


def arrow_column(values: Any, small: bool = False) -> Any:
    """Return an Arrow array where Arrow can hold the values, else a list, e.g. of images.

    `small` declares integers as bytes; NumPy arrays of uint8 always are.
    """
    listed = list(values)
    small = small or (bool(listed) and all(_is_bytes(value) for value in listed))
    plain = [value.tolist() if hasattr(value, "tolist") else value for value in listed]
    try:
        column = pa.array(plain)
        return _as_bytes(column) if small else column
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return listed


def _is_bytes(value: Any) -> bool:
    return getattr(value, "dtype", None) == np.uint8 and getattr(value, "ndim", 0) > 0


def _as_bytes(column: pa.Array) -> pa.Array:
    """Cast lists of integers to lists of uint8, the type by which images are recognised."""
    kind, depth = column.type, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    small = reduce(lambda inner, _: pa.list_(inner), range(depth), pa.uint8())
    return column.cast(small) if pa.types.is_integer(kind) else column


def arrow_piece(batch: pa.RecordBatch, columns: Sequence[str]) -> Piece:
    """Return some columns of a record batch.

    Extension types are read as they are stored: a package may have registered types of its own.
    """
    taken = {name: batch.column(name) for name in columns}
    for name, column in taken.items():
        if isinstance(column.type, pa.BaseExtensionType):
            taken[name] = column.storage
    return Piece(taken, batch.num_rows)


def concatenate(
    where: str,
    parts: Sequence[tuple[int | None, File]],
    split: str,
    notes: tuple[str, ...] = (),
) -> File:
    """Join files with the same columns; a column `split` is added if they belong to several parts.

    Raises:
        DataError: The files have different columns.
    """
    first = parts[0][1]
    for _, part in parts[1:]:
        if lost := set(first.names) ^ set(part.names):
            raise DataError(
                f"{part.where}: columns differ from {Path(first.where).name}: "
                f"{', '.join(sorted(lost))} in one of them only; give each the same columns"
            )
    several = len({number for number, _ in parts}) > 1
    own = (split,) if several and split not in first.names else ()

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        wanted = [name for name in columns if name not in own]
        for number, part in parts:
            for piece in part.pieces(wanted):
                added = {name: pa.array([number] * piece.num_rows) for name in own}
                yield Piece({**piece.columns, **added}, piece.num_rows)

    place = "row {} (from 1)".format
    return replace(
        first, where=where, names=(*own, *first.names), pieces=pieces, notes=notes, place=place
    )


def open_file(path: Path, source: Source) -> File:
    """Open a table, or a folder of files with the same columns: Parquet, else delimited text.

    Folders called COLUMN=VALUE add a column, as partitioned Parquet has them.
    """
    if path.is_dir():
        return _open_folder(path, source)
    if path.name.lower().endswith(PARQUET):
        file = File(str(path), _header(path), partial(_parquet_pieces, path))
        return _named_file(file, path, source)
    with reading(path):
        layout = layout_of(path)
    file = File(
        str(path),
        layout.names,
        partial(_csv_pieces, path),
        lambda row: f"line {line_of(path, row + 1)}",
        notes=layout.notes,
        guessed=True,
    )
    return _named_file(file, path, source)


def _open_folder(path: Path, source: Source) -> File:
    if folders := partitions(path):
        opened = [
            (None, _with_constant(open_file(folder, source), name, value))
            for folder, name, value in folders
        ]
        return concatenate(str(path), opened, source.split)
    parquets = find_files(path, PARQUET, source.splits)
    found = parquets if parquets.files else find_files(path, DELIMITED, source.splits)
    parts = [(split, open_file(file, source)) for file, split in found.files]
    return concatenate(str(path), parts, source.split, found.notes)


def partitions(folder: Path) -> list[tuple[Path, str, str]]:
    """Return the folders inside that are called COLUMN=VALUE, with column and value."""
    found = sorted(path for path in folder.iterdir() if "=" in path.name and path.is_dir())
    cut = [(path, path.name.partition("=")) for path in found]
    return [(path, unquote(name), unquote(value)) for path, (name, _, value) in cut]


def _named_file(file: File, path: Path, source: Source) -> File:
    """Return a file with its name, without suffix, as the client of its rows, where asked for."""
    if source.client != FILE or FILE in file.names:
        return file
    ends = sorted((end for end in TABLES if path.name.lower().endswith(end)), key=len)
    return _with_constant(file, FILE, path.name[: -len(ends[-1])] if ends else path.stem)


def _with_constant(file: File, name: str, value: str) -> File:
    """Return a file with another column, which has one value."""
    if name in file.names:
        raise DataError(f"{file.where}: column {name!r} is also a folder; rename one of them")

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        wanted = [column for column in columns if column != name]
        for piece in file.pieces(wanted or file.names[:1]):
            constant = pa.repeat(value, piece.num_rows)
            yield Piece({**piece.columns, name: constant}, piece.num_rows)

    return replace(file, names=(name, *file.names), pieces=pieces)


def _header(path: Path) -> tuple[str, ...]:
    with arrow_errors(path), parquet.ParquetFile(path) as file:
        names = tuple(file.schema_arrow.names)
    if (twice := find_twice(names)) is not None:
        raise DataError(f"{path}: two columns are called {twice!r}; rename one")
    return names


def _csv_pieces(path: Path, columns: Sequence[str]) -> Iterator[Piece]:
    with arrow_errors(path), open_rows(path, columns) as reader:
        for batch in reader:
            yield arrow_piece(batch, columns)


def _parquet_pieces(path: Path, columns: Sequence[str]) -> Iterator[Piece]:
    with arrow_errors(path), parquet.ParquetFile(path) as opened:
        for batch in opened.iter_batches(batch_size=_BATCH, columns=list(columns)):
            yield arrow_piece(batch, columns)


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Add the file and line to the errors of pyarrow."""
    with reading(path):
        try:
            yield
        except pa.ArrowInvalid as error:
            if "straddling" in str(error) or "cannot infer number" in str(error):
                wide = path.name.lower().endswith(".gz") or path.stat().st_size >= BLOCK
                raise DataError(
                    f"{path}: a line is longer than {BLOCK} bytes; give rows this wide as Parquet "
                    "or npz"
                    if wide
                    else f"{path}: no rows; give a line of column names, then one line per row"
                ) from error
            found = re.search(r"Row #(\d+): (.*)", str(error), re.DOTALL)
            if found is None:
                raise
            why = " ".join(found[2].split())[:200]
            raise DataError(
                f"{path}: line {line_of(path, int(found[1]))}: {why}; give every "
                "line as many values as the first, in UTF-8, and quote text that holds a delimiter"
            ) from error


@dataclass
class Unread:
    """Cells of rows to be predicted that are no numbers, dates or levels: they count as gaps.

    `cells` has the text of each by column and row (from 1), `signs` a number by column whose
    decimal sign is not the declared one.
    """

    cells: dict[str, dict[int, str]] = field(default_factory=dict)
    signs: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, first: int, column: pa.Array, wrong: NDArray[np.bool_]) -> None:
        """Add the wrong cells of a column, whose first row has this number."""
        own = self.cells.setdefault(name, {})
        for row in np.flatnonzero(wrong).tolist():
            own[first + row] = str(column[row].as_py())

    def add_sign(self, name: str, column: pa.Array, *, commas: bool) -> None:
        """Add a number with the other decimal sign, if the column has one."""
        others = decimal_signs(column)[int(commas)]
        if others.any():
            self.signs.setdefault(name, str(column[int(np.argmax(others))].as_py()))


def open_columns(file: File, source: Source, unread: Unread | None = None) -> Table:
    """Return a table of rows with named columns; `unread` takes cells that are else errors."""
    source = _declared(file, source)
    others = _other_columns(file, source)
    coder = plan_coder(source, file.where, file.tokens)
    coder = choose_columns(coder, source, others, file.where) if coder else None
    coder = coder or _array_coder(file, source, others)
    tags = plan_tags(source) if source.tags else None
    if coder is not None:
        features, notes = coder.columns, coder.notes
        columns, shape = coder_columns(coder, source, file.where), coder.shape
        assumed: tuple[str, ...] = ()
    else:
        features, notes, assumed = _chosen(file, source, others)
        columns = plan_columns(features, source, where=file.where, numbered=False)
        shape = (len(columns.names),)
    return Table(
        file.where,
        shape,
        columns,
        _Reader(file, features, columns, source, coder, tags, unread).read,
        file.place,
        (*file.notes, *notes),
        sparse=coder is not None and coder.sparse,
        guessed=coder is None and file.guessed,
        lost="without a client" if tags is None else "without a known tag",
        left_out=tuple(name for name in others if name not in features),
        assumed=assumed,
        declared=source,
    )


def coder_columns(coder: Coder, source: Source, where: str) -> Columns:
    """Return the features of a coder, with the declared constants."""
    if source.dates or source.indicators:
        raise DataError(f"{where}: dates and indicators are for columns, not for text or images")
    plain = replace(source, features=(), levels={})
    return plan_columns(range(int(np.prod(coder.shape))), plain, where=where)


def _declared(file: File, source: Source) -> Source:
    """Add what the file's layout and the tags declare: the target and the classes."""
    if source.tags and source.target == "y" and {"y", "tags"} & set(file.names) == {"tags"}:
        source = replace(source, target="tags")
    if source.tags:
        size = source.class_count or len(plan_tags(source).index)
        return replace(source, classes=size, task=source.task or "multiclass")
    labels = file.labels.get(source.targets[0], ())
    plain = source.classes is None and source.task in (None, "multiclass", "binary")
    if plain and not source.positives and len(labels) > 1:
        return replace(source, classes=len(labels))
    return source


def _no_column(file: File, name: str) -> str:
    """Return the error for a client or target column that a file does not have."""
    meant = hint(name, file.names)
    text = f"{file.where}: no column {name!r}{meant}; the columns are {', '.join(file.names)}"
    if meant:
        return text
    head = "name the columns in the first line, or " if file.guessed else ""
    text += (
        f": {head}set client and target to those used (--client-column, --target); `coterie init "
        "FILE` proposes both, and so does ct.init in Python"
    )
    if Path(file.where).is_dir():
        text += f"; where each client has a file, --client-column {FILE} takes their names"
    return text


def _other_columns(file: File, source: Source) -> list[str]:
    """List the columns other than client, target and split."""
    taken = [*source.targets, *(() if source.targets_are_clients else (source.client,))]
    if absent := [name for name in taken if name not in file.names]:
        raise DataError(_no_column(file, absent[0]))
    own = {*taken, source.client, source.split}
    return [n for n in file.names if n not in own and not n.startswith(INDEX)]


def _chosen(
    file: File, source: Source, others: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the columns of numbers and levels, notes on those left out, and what is assumed."""
    if absent := [name for name in source.features if name not in others]:
        meant = hint(absent[0], others) if len(absent) == 1 else ""
        raise DataError(
            f"{file.where}: no column{'s' if len(absent) > 1 else ''} {_short(absent)}{meant}; the "
            f"columns are {_short(others)}"
        )
    features, left_out, assumed = list(source.features), dict[str, str](), False
    if not features:
        features, left_out, assumed = _numeric(file, others, source)
    if not features:
        raise DataError(
            f"{file.where}: no numeric column for features; declare features= or levels="
        )
    text = ", ".join(name for name, kind in left_out.items() if not kind)
    rest = ", ".join(f"{name} ({kind})" for name, kind in left_out.items() if kind)
    notes = {
        f"text columns without declared levels left out: {text}": text,
        f"columns that are neither numbers nor text left out: {rest}": rest,
    }
    listed = tuple(note for note, listed in notes.items() if listed)
    return tuple(features), listed, (UNDECLARED_COLUMNS,) if assumed else ()


def _numeric(
    file: File, names: Sequence[str], source: Source
) -> tuple[list[str], dict[str, str], bool]:
    """Return the columns to take, by the first batch, and the others with their types.

    A column in which some values are numbers is taken, so that its other values are errors. Also
    return whether values decided, and not the types of the columns alone: a single client's, if all
    others have gaps there, or if it fills the first batch.
    """
    first = next(file.batches(names), None) if names else None
    if first is None:
        return list(names), {}, False
    taken: list[str] = []
    left_out: dict[str, str] = {}
    by_values = False
    for name in names:
        column = first[1].columns[name]
        if isinstance(column, list):
            left_out[name], by_values = "values of several kinds", True
            continue
        column = _decoded(column)
        usable = name in source.levels or name in source.dates or is_number(column.type)
        if not usable and is_text(column.type):
            by_values = True
            numbers, wrong = read_numbers(column)
            usable = not wrong.any() or not np.isnan(numbers).all()
        if usable:
            taken.append(name)
        else:
            left_out[name] = "" if is_text(column.type) else str(column.type)
    return taken, left_out, by_values


def _array_coder(file: File, source: Source, others: Sequence[str]) -> Coder | None:
    """Return a coder where the one declared feature is a column of arrays."""
    if len(source.features) != 1 or source.features[0] not in others:
        return None
    name = source.features[0]
    first = next(file.batches([name]), None)
    column = None if first is None else first[1].columns[name]
    kind = getattr(column, "type", pa.list_(pa.float64()))
    if first is None or not pa.types.is_nested(kind) or pa.types.is_struct(kind):
        return None
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    shape = np.shape(next((value for value in first[1].values(name) if value is not None), ()))
    return array_coder(name, shape, pixels=len(shape) > 1 and kind == pa.uint8())


@dataclass(frozen=True)
class _Reader:
    """How the pieces of a file become batches."""

    file: File
    features: tuple[str, ...]
    columns: Columns
    source: Source
    coder: Coder | None
    tags: Tags | None
    unread: Unread | None = None

    def read(self, wanted: bool) -> Iterator[Batch]:
        """Yield batches; `wanted` selects whether features are included."""
        if self.file.clients:
            # All clients first: their order is that of the file, and those without rows stay.
            yield Batch(NONE, self.file.clients, NONE, None, NONE)
        columns = [*self.source.targets, *self._keys]
        columns += self.features if wanted else ()
        for first, piece in self.file.batches(columns):
            yield from self._batches(first, piece, wanted)

    @property
    def _keys(self) -> list[str]:
        """The columns of the split and the client, as far as there are any."""
        keys = [self.source.split] if self.source.split in self.file.names else []
        return keys + ([] if self.source.targets_are_clients else [self.source.client])

    def _batches(self, first: int, piece: Piece, wanted: bool) -> Iterator[Batch]:
        file = self.file
        self._check_types(piece, wanted)
        names: tuple[str, ...] = ("",)
        codes = np.zeros(piece.num_rows, dtype=np.int64)

        def fail(row: int, found: str) -> DataError:
            client = f", client {names[codes[row]]!r}" if names not in ((), ("",)) else ""
            return DataError(f"{file.where}: {file.place(first + row)}{client}: {found}")

        owned = np.ones(piece.num_rows, dtype=bool)
        if not self.source.targets_are_clients:
            names, codes, owned = self._clients(piece.columns[self.source.client], fail)
        y, real, keep = self._targets(piece, fail)
        keep &= owned
        rows = np.arange(first, first + piece.num_rows)
        whole = Batch(rows, names, codes, None, y, self._split(piece, fail), real)
        if not wanted or self.coder is None:
            x = self._matrix(first, piece, fail) if wanted else None
            yield replace(replace(whole, x=x).take(keep), lost=int((~keep).sum()))
            return
        yield replace(whole.take(NONE), lost=int((~keep).sum()))
        values = [piece.values(name) for name in self.features]
        for start in range(0, piece.num_rows, self.coder.step):
            part = start + np.flatnonzero(keep[start : start + self.coder.step])

            def fail_part(row: int, found: str, part: NDArray[np.int64] = part) -> DataError:
                return fail(int(part[row]), found)

            chosen = [[column[at] for at in part] for column in values]
            yield replace(whole.take(part), x=self.coder.encode(chosen, fail_part))

    def _check_types(self, piece: Piece, wanted: bool) -> None:
        """Refuse columns that Arrow cannot hold where numbers or names are expected."""
        plain = [*self._keys, *(self.source.targets if self.tags is None else ())]
        plain += self.features if wanted and self.coder is None else ()
        for name in plain:
            if isinstance(piece.columns[name], list):
                raise DataError(
                    f"{self.file.where}: column {name!r} holds values of several kinds, or none "
                    "that are numbers or text; leave it out, or read it with images= or text="
                )

    def _clients(
        self, column: pa.Array, fail: Fail
    ) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the clients of a piece in order of appearance, each row's, and if it has one."""
        name = self.source.client
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
            whole = pc.equal(pc.trunc(column), column)
            if not pc.all(pc.fill_null(whole, True)).as_py():
                raise DataError(
                    f"{self.file.where}: column {name!r} holds real numbers; name clients by whole "
                    "numbers or text"
                )
            column = pc.cast(column, pa.int64())
        text = trimmed(_texts(column, name, fail))
        gap = is_gap(text, self.source.gaps.get(name, ()))
        empty = _numpy(gap)
        if empty.any() and self.source.missing == "error":
            raise fail(
                int(np.flatnonzero(empty)[0]),
                f"the client (column {name!r}) is empty; name the client of every row, or leave "
                'such rows out with missing="drop"',
            )
        coded = pc.dictionary_encode(pc.if_else(gap, pa.scalar(None, text.type), text))
        codes = _numpy(pc.fill_null(coded.indices, 0)).astype(np.int64)
        return tuple(coded.dictionary.to_pylist()), codes, ~empty

    def _targets(
        self, piece: Piece, fail: Fail
    ) -> tuple[NDArray[Any], bool | None, NDArray[np.bool_]]:
        """Return targets, whether they are written as real numbers, and which rows to keep."""
        if self.tags is not None:
            y, known = self.tags.encode(piece.values(self.source.targets[0]))
            return y, False, known
        classes, task = self.source.classes, self.source.task
        parts, real = [], False
        for name in self.source.targets:
            column, gaps = piece.columns[name], self.source.gaps.get(name, ())
            if isinstance(classes, tuple) and task not in ("regression", "multilabel"):
                parts.append(_class_names(_texts(column, name, fail), classes, gaps))
                continue
            values, wrong = self._numbers(column, name, fail)
            if wrong.any():
                found = column[int(np.flatnonzero(wrong)[0])].as_py()
                raise fail(
                    int(np.flatnonzero(wrong)[0]),
                    f"the target {name!r}: found {found!r}, expected a number; correct it, or "
                    "declare classes by name (--classes A,B; `coterie init FILE` proposes them, "
                    "and so does ct.init in Python)",
                )
            parts.append(values)
            real = real or _is_written_real(column, name, fail)
        y = parts[0] if len(parts) == 1 else np.column_stack(parts)
        return y, real, np.ones(piece.num_rows, dtype=bool)

    def _matrix(self, first: int, piece: Piece, fail: Fail) -> NDArray[np.float64]:
        """Return the features of a piece, NaN where a value is missing.

        Where gaps are filled, one in a categorical column is the level "other", or no level, and
        an infinite number is a gap.
        """
        columns, filled = self.columns, self.source.fills
        x = np.empty((piece.num_rows, len(columns.names)))
        at = 0
        for position, name in enumerate(self.features):
            column = _decoded(piece.columns[name])
            part, wrong, found = self._features(position, name, column, fail)
            if wrong.any() and self.unread is None:
                raise fail(int(np.flatnonzero(wrong)[0]), found)
            if self.unread is not None:
                self.unread.add(name, first, column, wrong)
            part = np.where(np.isinf(part), np.nan, part) if filled else part
            gaps = np.isnan(part).any(axis=1)
            if filled and position in columns.levels:
                part[gaps] = [level == OTHER for level in columns.levels[position]]
            if position in columns.indicators:
                part = np.column_stack([part, gaps])
            x[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        return x

    def _features(
        self, position: int, name: str, column: pa.Array, fail: Fail
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], str]:
        """Return the features of a column, which cells cannot be read, and the error for these."""
        gaps = self.source.gaps.get(name, ())
        if position in self.columns.levels:
            return _level_columns(
                _texts(column, name, fail), name, self.columns.levels[position], gaps
            )
        if position in self.columns.dates:
            return _date_columns(column, name, self.columns.dates[position], fail, gaps)
        values, wrong = self._numbers(column, name, fail)
        return values[:, None], wrong, _no_number(column, name, wrong) if wrong.any() else ""

    def _numbers(
        self, column: pa.Array, name: str, fail: Fail
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return a column as numbers, NaN where one is missing, and which values are none."""
        column, gaps = _decoded(column), self.source.gaps.get(name, ())
        if is_text(column.type):
            commas, unit = name in self.source.decimal_commas, self.source.units.get(name, "")
            if self.unread is not None:
                self.unread.add_sign(name, column, commas=commas)
            return read_numbers(column, commas=commas, gaps=gaps, unit=unit)
        if not is_number(column.type):
            raise fail(0, f"column {name!r} holds {column.type}, no numbers; leave it out")
        values = _numpy(pc.cast(column, pa.float64(), safe=False))
        return drop_numbers(values, gaps), np.zeros(len(values), dtype=bool)

    def _split(self, piece: Piece, fail: Fail) -> NDArray[np.float64] | None:
        name, splits = self.source.split, self.source.splits
        if name not in self.file.names:
            return None
        column = _decoded(piece.columns[name])
        if not is_text(column.type):
            return self._numbers(column, name, fail)[0]
        numbered = column
        for code, part in enumerate(splits):  # parts may be given by name
            numbered = pc.if_else(pc.equal(numbered, part), str(code), numbered)

        numbers, wrong = self._numbers(numbered, name, fail)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise fail(
                row,
                f"the split is {column[row].as_py()!r}; expected 0 (train) or 1 (test), or the "
                f"names {', '.join(splits)}: correct it, or set splits",
            )
        return numbers


def _class_names(text: pa.Array, classes: tuple[str, ...], gaps: Sequence[str]) -> NDArray[Any]:
    """Return the classes as they are declared, None for gaps, and other text as it is."""
    codes, gap = read_levels(text, classes, gaps=gaps)
    named = np.array([*classes, None], dtype=object)[codes]
    other = (codes < 0) & ~gap
    named[other] = _numpy(trimmed(text))[other]
    return named


def _is_written_real(column: pa.Array, name: str, fail: Fail) -> bool:
    if not is_text(column.type):
        return bool(pa.types.is_floating(column.type) or pa.types.is_decimal(column.type))
    text = trimmed(_texts(column, name, fail))
    whole = pc.or_(is_gap(text), pc.match_substring_regex(text, _INTEGER))
    return not pc.all(pc.fill_null(whole, True)).as_py()


def _level_columns(
    text: pa.Array, name: str, levels: tuple[str, ...], gaps: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], str]:
    """Return 0/1 columns for the levels, NaN for a gap; which are unknown, and the error."""
    codes, gap = read_levels(text, levels, gaps=gaps)
    unknown = (codes < 0) & ~gap
    if OTHER in levels:
        codes[unknown] = levels.index(OTHER)
        unknown[:] = False
    found = ""
    if unknown.any():
        value = text[int(np.flatnonzero(unknown)[0])].as_py()
        found = f"column {name!r}: {unknown_level(value, levels)}"
    return one_hot(codes, len(levels)), unknown, found


def _date_columns(
    column: pa.Array, name: str, declared: str, fail: Fail, gaps: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], str]:
    """Return `DATE_PARTS` of dates, NaN for a gap; which cells are no dates, and the error."""
    first, _, form = declared.partition(" ")
    origin, found = date.fromisoformat(first), ""
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        zoned = pa.types.is_timestamp(column.type) and column.type.tz is not None
        local = pc.local_timestamp(column) if zoned else column
        days = pc.cast(local, pa.date32(), safe=False)
        days, wrong = read_dates(pc.cast(days, pa.string()), gaps=gaps)
    else:
        days, wrong = read_dates(_texts(column, name, fail), form, gaps=gaps)
    if wrong.any():
        found = (
            f"column {name!r}: found {column[int(np.flatnonzero(wrong)[0])].as_py()!r}, expected a "
            f"date ({form or 'YYYY-MM-DD'}); correct it, or declare the format after the origin of "
            "dates"
        )
    return parts_of(days, origin), wrong, found


def _no_number(column: pa.Array, name: str, wrong: NDArray[np.bool_]) -> str:
    return (
        f"column {name!r}: found {column[int(np.flatnonzero(wrong)[0])].as_py()!r}, expected a "
        "number; correct it, declare the value as a gap (data.source.gaps), or the column's levels"
    )


def _numpy(column: pa.Array) -> NDArray[Any]:
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _texts(column: pa.Array, name: str, fail: Fail) -> pa.Array:
    """Return a column as text."""
    column = _decoded(column)
    try:
        return pc.cast(column, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise fail(
            0, f"column {name!r} holds {column.type}, which is no text; name another column"
        ) from error


def _decoded(column: pa.Array) -> pa.Array:
    """Return a dictionary-encoded column as plain values."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is one of text."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(text) or str(kind) == "string_view"  # which older versions have no test for


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is one of numbers."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests) or bool(pa.types.is_null(kind))
