"""CSV, TSV and Parquet with a client column, streamed in batches.

Memory holds one batch beside the result: the file may be larger than memory. Every cell of a CSV
is read as text and turned into numbers here, so that a bad one is named by line and column, and a
column's type never depends on how far a reader looked ahead. Categorical columns take their
declared levels; a text column without levels is left out, and a note says so.
"""

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv, parquet

from coterie.data.federated import DataError
from coterie.data.source import (
    Batch,
    Columns,
    Source,
    Table,
    find_column,
    one_hot,
    plan_columns,
    reading,
    unknown_level,
)

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")

_BLOCK = 1 << 20
_BATCH = 1 << 15
_GAPS = pa.array(["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL"])
_NUMBER = r"^\s*[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf|infinity|nan)\s*$"
_WHOLE = r"^\s*[+-]?\d+\s*$"
_Fail = Callable[[int, str], DataError]


@dataclass(frozen=True)
class _File:
    """A table on disk: its columns, its batches, and where a row is."""

    path: Path
    names: tuple[str, ...]

    @property
    def is_csv(self) -> bool:
        """Whether lines of text are read, rather than Parquet."""
        return self.path.is_file() and not self.path.name.lower().endswith(".parquet")

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the number of the first row (from 1) and some columns of the next rows."""
        first = 1
        pieces = _csv_batches(self, columns) if self.is_csv else _parquet_batches(self, columns)
        for piece in pieces:
            if piece.num_rows:
                yield first, piece
            first += piece.num_rows

    def place(self, row: int) -> str:
        """Say where a row (from 1) is."""
        return f"line {_line(self.path, row + 1)}" if self.is_csv else f"row {row} (from 1)"


def open_table(path: Path, source: Source) -> Table:
    """Open a table, or a folder of Parquet files with the same columns.

    Args:
        path: The file or folder.
        source: The options.
    """
    file = _File(path, _header(path))
    taken = [*source.targets, *(() if source.targets_are_clients else (source.client,))]
    for name in taken:
        if name not in file.names:
            raise DataError(
                f"{path}: no column {name!r}, the columns are {', '.join(file.names)}; name the "
                "columns in the first line, or set client and target to those used "
                "(--client-column, --target)"
            )
    own = {*taken, source.client, source.split}
    others = [n for n in file.names if n not in own and not n.startswith("__index_level_")]
    for name in source.features:
        find_column(name, others, where=str(path), numbered=False)
    features = list(source.features)
    left_out: list[str] = []
    if not features:
        features, left_out = _numeric(file, others, source)
    if not features:
        raise DataError(f"{path}: no numeric column for features; declare features or levels")
    plan = plan_columns(features, source, where=str(path), numbered=False)
    listed = ", ".join(left_out)
    notes = (f"text columns without declared levels left out: {listed}",) if left_out else ()
    read = partial(_read, file, tuple(features), plan, source)
    guessed = ".parquet" not in path.name and not path.is_dir()
    return Table(str(path), (len(plan.names),), plan, read, file.place, notes, guessed=guessed)


def _read(
    file: _File, features: tuple[str, ...], plan: Columns, source: Source, wanted: bool
) -> Iterator[Batch]:
    has_split = source.split in file.names
    columns = [*source.targets, *((source.split,) if has_split else ())]
    columns += [] if source.targets_are_clients else [source.client]
    columns += features if wanted else ()
    for first, piece in file.batches(columns):
        rows = np.arange(first, first + piece.num_rows)
        names: tuple[str, ...] = ("",)
        codes = np.zeros(len(rows), dtype=np.int64)
        if not source.targets_are_clients:
            names, codes = _clients(file, piece.column(source.client), first, source.client)

        def fail(
            row: int,
            found: str,
            first: int = first,
            names: Sequence[str] = names,
            codes: NDArray[np.int64] = codes,
        ) -> DataError:
            client = f", client {names[codes[row]]!r}" if names != ("",) else ""
            return DataError(f"{file.path}: {file.place(first + row)}{client}: {found}")

        y, real = _targets(piece, source, fail)
        yield Batch(
            rows=rows,
            names=names,
            codes=codes,
            x=_matrix(piece, features, plan, fail) if wanted else None,
            y=y,
            split=_numbers(piece.column(source.split), source.split, fail) if has_split else None,
            real=real,
        )


def _clients(
    file: _File, column: pa.Array, first: int, name: str
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Number the clients of a batch in order of appearance."""
    if pa.types.is_floating(column.type):
        whole = pc.equal(pc.trunc(column), column)
        if not pc.all(pc.fill_null(whole, True)).as_py():
            raise DataError(
                f"{file.path}: column {name!r} holds real numbers; name clients by whole numbers "
                "or text"
            )
        column = pc.cast(column, pa.int64())
    text = _texts(column)
    empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(text), ""), True).to_numpy(
        zero_copy_only=False
    )
    if empty.any():
        row = int(np.flatnonzero(empty)[0])
        raise DataError(
            f"{file.path}: {file.place(first + row)}: the client (column {name!r}) is empty; name "
            "the client of every row"
        )
    coded = pc.dictionary_encode(text)
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return tuple(coded.dictionary.to_pylist()), codes


def _targets(
    piece: pa.RecordBatch, source: Source, fail: _Fail
) -> tuple[NDArray[Any], bool | None]:
    """Take the targets of a batch, and whether they are written as real numbers."""
    parts, real = [], False
    for name in source.targets:
        column = piece.column(name)
        if isinstance(source.classes, tuple) and source.task not in ("regression", "multilabel"):
            text = _texts(column)
            gap = pc.and_(_is_gap(text), pc.invert(pc.is_in(text, pa.array(source.classes))))
            values = pc.if_else(gap, pa.scalar(None, pa.string()), text)
            parts.append(values.to_numpy(zero_copy_only=False).astype(object))
            continue
        parts.append(_numbers(column, name, fail))
        if _is_text(column.type):
            text = _texts(column)
            whole = pc.or_(_is_gap(text), pc.match_substring_regex(text, _WHOLE))
            real = real or not pc.all(pc.fill_null(whole, True)).as_py()
        else:
            real = real or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
    return (parts[0] if len(parts) == 1 else np.column_stack(parts)), real


def _matrix(
    piece: pa.RecordBatch, features: tuple[str, ...], plan: Columns, fail: _Fail
) -> NDArray[np.float64]:
    """Make the features of a batch, NaN where a value is missing."""
    x = np.empty((piece.num_rows, len(plan.names)))
    at = 0
    for position, name in enumerate(features):
        column = piece.column(name)
        if position not in plan.levels:
            x[:, at] = _numbers(column, name, fail)
            at += 1
            continue
        levels = plan.levels[position]
        text = _texts(column)
        found = pc.fill_null(pc.index_in(text, pa.array(levels)), -1)
        codes = found.to_numpy(zero_copy_only=False).astype(np.int64)
        gaps = pc.fill_null(_is_gap(text), True).to_numpy(zero_copy_only=False)
        lost = np.flatnonzero((codes < 0) & ~gaps)
        if len(lost):
            value = text[int(lost[0])].as_py()
            raise fail(int(lost[0]), f"column {name!r}: {unknown_level(value, levels)}")
        x[:, at : at + len(levels)] = one_hot(codes, len(levels))
        at += len(levels)
    return x


def _numbers(column: pa.Array, name: str, fail: _Fail) -> NDArray[np.float64]:
    """Turn a column into numbers, NaN where one is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_text(column.type):
        if not _is_number(column.type):
            raise fail(0, f"column {name!r} holds {column.type}, no numbers; leave it out")
        return _plain(pc.cast(column, pa.float64(), safe=False))
    for text in (column, pc.utf8_trim_whitespace(column)):
        try:
            return _plain(
                pc.cast(pc.if_else(_is_gap(text), pa.scalar(None, text.type), text), pa.float64())
            )
        except pa.ArrowInvalid:
            continue
    number = pc.match_substring_regex(text, _NUMBER, ignore_case=True)
    bad = pc.fill_null(pc.invert(pc.or_(_is_gap(text), number)), False)
    row = int(np.flatnonzero(bad.to_numpy(zero_copy_only=False))[0])
    raise fail(
        row,
        f"column {name!r}: found {column[row].as_py()!r} where a number belongs; correct it, or "
        "declare the column's levels (for a target: its classes by name)",
    )


def _plain(column: pa.Array) -> NDArray[np.float64]:
    values: NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
    return values


def _texts(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return pc.cast(column, pa.string())


def _is_gap(text: pa.Array) -> pa.Array:
    return pc.fill_null(pc.is_in(text, _GAPS), True)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests)


def _numeric(file: _File, names: Sequence[str], source: Source) -> tuple[list[str], list[str]]:
    """Tell the columns to take from those of text, by the first batch.

    A column in which some values are numbers is taken, so that the others are found as errors.
    """
    first = next(file.batches(names), None) if names else None
    if first is None:
        return list(names), []
    taken: list[str] = []
    left_out: list[str] = []
    for name in names:
        column = first[1].column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        usable = name in source.levels or _is_number(column.type)
        if not usable and _is_text(column.type):
            number = pc.match_substring_regex(column, _NUMBER, ignore_case=True)
            usable = bool(pc.any(number).as_py()) or bool(pc.all(_is_gap(column)).as_py())
        (taken if usable else left_out).append(name)
    return taken, left_out


def _header(path: Path) -> tuple[str, ...]:
    if path.is_dir():
        headers = {file: _header(file) for file in sorted(path.glob("*.parquet"))}
        first, names = next(iter(headers.items()))
        for file, others in headers.items():
            if set(others) != set(names):
                raise DataError(
                    f"{file}: columns {', '.join(others)}, where {first.name} has "
                    f"{', '.join(names)}; give every file the same columns"
                )
        return names
    with _arrow(path):
        if path.name.lower().endswith(".parquet"):
            with parquet.ParquetFile(path) as file:
                names = tuple(file.schema_arrow.names)
        else:
            with _open_csv(path, csv.ConvertOptions()) as reader:
                names = tuple(reader.schema.names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: two columns are called {twice!r}; rename one")
    return names


def _open_csv(path: Path, options: csv.ConvertOptions) -> csv.CSVStreamingReader:
    tabs = path.name.lower().split(".gz")[0].endswith(".tsv")
    return csv.open_csv(
        path,
        # threads would lose the row numbers of errors
        read_options=csv.ReadOptions(block_size=_BLOCK, use_threads=False),
        parse_options=csv.ParseOptions(delimiter="\t" if tabs else ","),
        convert_options=options,
    )


def _csv_batches(file: _File, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    options = csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, pa.string()),
        strings_can_be_null=False,
    )
    with _arrow(file.path), _open_csv(file.path, options) as reader:
        yield from reader


def _parquet_batches(file: _File, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    folder = file.path.is_dir()
    for path in sorted(file.path.glob("*.parquet")) if folder else (file.path,):
        with _arrow(path), parquet.ParquetFile(path) as opened:
            yield from opened.iter_batches(batch_size=_BATCH, columns=list(columns))


@contextmanager
def _arrow(path: Path) -> Iterator[None]:
    """Name the file and line in what pyarrow raises."""
    with reading(path):
        try:
            yield
        except pa.ArrowInvalid as error:
            if "straddling" in str(error) or "cannot infer number" in str(error):
                raise DataError(
                    f"{path}: a line is longer than {_BLOCK} bytes; give rows this wide as Parquet "
                    "or npz"
                ) from error
            found = re.search(r"Row #(\d+): (.*)", str(error), re.DOTALL)
            if found is None:
                raise
            raise DataError(
                f"{path}: line {_line(path, int(found[1]))}: {found[2].strip()[:200]}; give every "
                "line as many values as the first, in UTF-8, and quote text that holds a delimiter"
            ) from error


def _line(path: Path, record: int) -> int:
    """Find the line on which a record starts (both from 1, the header is record 1)."""
    seen, quotes = 0, 0
    with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            starts = quotes % 2 == 0 and bool(line.strip(b"\r\n"))
            seen += starts
            if starts and seen == record:
                return number
            quotes += line.count(b'"')
    return record
