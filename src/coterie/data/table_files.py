"""Where the rows of a table come from: CSV, TSV and Parquet, a piece at a time."""

import gzip
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from coterie.data.federated import DataError
from coterie.data.folders import PARQUET, Found, find_files
from coterie.data.source import Source, reading

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")

_BLOCK = 1 << 20
_BATCH = 1 << 15


class Piece(Protocol):
    """Consecutive rows: an Arrow record batch, or what looks like one."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def column(self, name: str) -> Any:
        """Return a column: an Arrow array, or a list of values that Arrow does not know."""


@dataclass(frozen=True)
class Slice:
    """Rows that look like an Arrow record batch."""

    columns: Mapping[str, Any]
    num_rows: int

    def column(self, name: str) -> Any:
        """Return a column."""
        return self.columns[name]


def arrow_column(values: Any, small: bool = False) -> Any:
    """Make an Arrow array where Arrow knows the values, else a list; images stay as they are.

    Args:
        values: The values.
        small: Whether numbers are declared as bytes; arrays of NumPy's bytes are so in any case.
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
    """Return lists of whole numbers the type of bytes, by which images are known."""
    kind, depth = column.type, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    small = pa.uint8()
    for _ in range(depth):
        small = pa.list_(small)
    return column.cast(small) if pa.types.is_integer(kind) else column


def stored(batch: pa.RecordBatch, columns: Sequence[str]) -> Piece:
    """Take columns as they are stored: a package may have told Arrow types of its own."""
    taken = {name: batch.column(name) for name in columns}
    return Slice(
        {
            name: column.storage if isinstance(column.type, pa.BaseExtensionType) else column
            for name, column in taken.items()
        },
        batch.num_rows,
    )


@dataclass(frozen=True)
class File:
    """Rows with named columns that can be read again and again.

    Attributes:
        where: The name for messages.
        names: The columns.
        pieces: Yields some columns of consecutive rows.
        place: Says where a row (from 1) is.
        clients: All clients in order, where the file lists them.
        labels: Names of the classes of columns whose layout declares them.
        notes: What the reader did, in words.
        tokens: How its text is cut, unless the options say.
        guessed: Whether whole numbers are so by their looks alone, as in text files.
    """

    where: str
    names: tuple[str, ...]
    pieces: Callable[[Sequence[str]], Iterator[Piece]]
    place: Callable[[int], str] = "row {} (from 1)".format
    clients: tuple[str, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokens: str = "words"
    guessed: bool = False

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Piece]]:
        """Yield the number of the first row (from 1) and some columns of the next rows."""
        first = 1
        for piece in self.pieces(columns):
            if piece.num_rows:
                yield first, piece
            first += piece.num_rows


def open_file(path: Path, source: Source) -> File:
    """Open a table, or a folder of Parquet files with the same columns.

    Args:
        path: The file or folder.
        source: The options.
    """
    if path.is_dir():
        return _open_folder(path, find_files(path, PARQUET, source.splits), source)
    names = _header(path)
    if path.name.lower().endswith(PARQUET):
        return File(str(path), names, partial(_parquet_pieces, [(path, None)], ()))
    return File(
        str(path),
        names,
        partial(_csv_pieces, path),
        lambda row: f"line {_line(path, row + 1)}",
        guessed=True,
    )


def _open_folder(path: Path, found: Found, source: Source) -> File:
    headers = {file: _header(file) for file, _ in found.files}
    first, names = next(iter(headers.items()))
    for file, others in headers.items():
        if set(others) != set(names):
            raise DataError(
                f"{file}: columns {', '.join(others)}, where {first.name} has "
                f"{', '.join(names)}; give every file the same columns"
            )
    own = (source.split,) if found.parts > 1 and source.split not in names else ()
    pieces = partial(_parquet_pieces, found.files, own)
    return File(str(path), (*own, *names), pieces, notes=found.notes)


def _header(path: Path) -> tuple[str, ...]:
    with arrow_errors(path):
        if path.name.lower().endswith(PARQUET):
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


def _csv_pieces(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    options = csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, pa.string()),
        strings_can_be_null=False,
    )
    with arrow_errors(path), _open_csv(path, options) as reader:
        yield from reader


def _parquet_pieces(
    files: Sequence[tuple[Path, int | None]], own: Sequence[str], columns: Sequence[str]
) -> Iterator[Piece]:
    wanted = [name for name in columns if name not in own]
    for path, split in files:
        with arrow_errors(path), parquet.ParquetFile(path) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH, columns=wanted):
                yield marked(stored(batch, wanted), wanted, own, split)


def marked(piece: Piece, columns: Sequence[str], own: Sequence[str], split: int | None) -> Piece:
    """Add a column that names the part."""
    taken = {name: piece.column(name) for name in columns}
    marks = {name: pa.array([split] * piece.num_rows, pa.int64()) for name in own}
    return Slice(taken | marks, piece.num_rows)


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
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
