"""Files of delimited text: their encoding, the delimiter, the line of names, and where rows start.

All of it is seen in the file itself: UTF-8, UTF-16 or Windows-1252 (which holds latin-1); commas,
semicolons, tabs or bars; a first line "sep=;" as spreadsheets write it; a title over the table.
Names lose the spaces around them. Columns without a name, and names given twice, get one:
"unnamed", "age (2)".
"""

import codecs
import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import TextIOWrapper
from itertools import chain, count
from pathlib import Path
from typing import IO

from pyarrow import csv as arrow_csv

from coterie.data.federated import DataError

BLOCK = 1 << 20
"""Bytes that are read at a time; no line may be longer."""
ENDS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
_DELIMITERS = (",", ";", "\t", "|")
_TITLE = 20  # lines that a title may have
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_SEPARATOR = re.compile(r"sep=(.)[\r\n]*", re.IGNORECASE)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Layout:
    """How a file is written; `skipped` lines come before the line of names."""

    encoding: str
    delimiter: str
    names: tuple[str, ...]
    skipped: int = 0
    notes: tuple[str, ...] = ()


def layout_of(path: Path) -> Layout:
    """Return how a file is written; raise DataError if it has no line of names."""
    facts = path.stat()
    return _layout(path, facts.st_mtime_ns, facts.st_size)


def open_rows(path: Path, columns: Sequence[str]) -> arrow_csv.CSVStreamingReader:
    """Return a reader of some columns, as text."""
    layout = layout_of(path)
    options = arrow_csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, "string"),
        strings_can_be_null=False,
    )
    return arrow_csv.open_csv(
        path,
        # with threads, errors have no row numbers
        read_options=arrow_csv.ReadOptions(
            block_size=BLOCK,
            use_threads=False,
            column_names=layout.names,
            skip_rows=layout.skipped,
            skip_rows_after_names=1,
            encoding=layout.encoding.removesuffix("-sig"),
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=layout.delimiter, newlines_in_values=True, invalid_row_handler=None
        ),
        convert_options=options,
    )


def line_of(path: Path, record: int) -> int:
    """Return the line on which a record starts (both from 1, the line of names is record 1)."""
    layout, seen, quotes = layout_of(path), 0, 0
    with _text(path, layout.encoding) as file:
        for number, line in enumerate(file, start=1):
            starts = number > layout.skipped and quotes % 2 == 0 and bool(line.strip("\r\n"))
            seen += starts
            if starts and seen == record:
                return number
            quotes += line.count('"')
    return record


@lru_cache(maxsize=64)
def _layout(path: Path, changed: int, size: int) -> Layout:
    encoding = _encoding(path)
    with _text(path, encoding) as file:
        head, skipped = _first_line(file)
        if (given := _SEPARATOR.fullmatch(head)) is not None:
            head, more = _first_line(file)
            skipped += 1 + more
        title, head = _title(file, head, given[1] if given else "")
        skipped += title
        delimiter = given[1] if given else _delimiter(head, path)
        lines = chain([head], iter(lambda: file.readline(BLOCK), ""))
        found = next(csv.reader(lines, delimiter=delimiter))  # a name may hold a line break
    found = [name.strip() for name in found]
    names = _named(found)
    _check_quotes(path, encoding, delimiter)
    notes = tuple(_notes(encoding, found, names, title and skipped))
    return Layout(encoding, delimiter, names, skipped, notes)


def _check_quotes(path: Path, encoding: str, delimiter: str) -> None:
    """Raise DataError for a quote that is never closed: its cell holds all rows that follow."""
    with _opened(path) as file:
        count = sum(piece.count(b'"') for piece in iter(lambda: file.read(BLOCK), b""))
    if count % 2 == 0:
        return
    with _text(path, encoding) as file:
        reader, line = csv.reader(file, delimiter=delimiter, strict=True), 0
        try:
            for _ in reader:
                line = reader.line_num
        except csv.Error as error:
            if "expected after" not in str(error):
                text = "a quote is opened and not closed; close it, or write it twice"
                raise DataError(f"{path}: line {line + 1}: {text}") from error


def _notes(
    encoding: str, given: Sequence[str], names: Sequence[str], skipped: int
) -> Iterator[str]:
    if skipped:
        yield f"left out before the names of the columns: {skipped} line{'s' * (skipped > 1)}"
    if not encoding.startswith("utf-8"):
        yield f"the file is read as {encoding}: it is not UTF-8"
    for name, read in zip(given, names, strict=True):
        if name != read:
            yield f"a column {'without a name' if not name else repr(name)} is read as {read!r}"


def _encoding(path: Path) -> str:
    """Return the encoding of a file: UTF-8 if its first characters beyond ASCII are."""
    with _opened(path) as file:
        head = file.read(4)
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if _is_utf8(path):  # one that goes on otherwise is damaged: its reader says where
        return "utf-8"
    return "cp1252" if _decodes(path, "cp1252") else "latin-1"


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _opened(path) as file:
        while piece := file.read(BLOCK):
            try:
                if not decoder.decode(piece).isascii():
                    return True
            except UnicodeDecodeError as error:
                return not piece[: error.start].isascii()
    return True


def _decodes(path: Path, encoding: str) -> bool:
    try:
        with _opened(path) as file:
            while piece := file.read(BLOCK):
                piece.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _first_line(file: TextIOWrapper) -> tuple[str, int]:
    """Return the next line that is not blank, and how many lines came before it."""
    line, before = file.readline(BLOCK + 1), 0
    while line and not line.strip("\r\n"):
        line, before = file.readline(BLOCK + 1), before + 1
    if not line.strip():
        raise DataError(f"{file.name}: no line of column names; give one, then one line per row")
    if len(line) > BLOCK:
        raise DataError(
            f"{file.name}: a line is longer than {BLOCK} bytes; give rows this wide as Parquet or "
            "npz"
        )
    return line, before


def _title(file: TextIOWrapper, head: str, delimiter: str) -> tuple[int, str]:
    """Return how many lines come before the line of names, from a first line on, and that line.

    A title has one cell that is not empty, and the lines of a table have several: the first two
    lines in a row that are cut as often are those of the table.
    """
    if _is_cut(head, delimiter):
        return 0, head
    lines = [head]
    while len(lines) <= _TITLE and (line := file.readline(BLOCK)):
        several = _is_cut(line, delimiter) and _is_cut(lines[-1], delimiter)
        if several and _cells(line, delimiter) == _cells(lines[-1], delimiter):
            return len(lines) - 1, lines[-1]
        lines.append(line)
    return 0, _again(file, head)


def _is_cut(line: str, delimiter: str) -> bool:
    """Return whether a line has several cells, other than empty ones at its end."""
    signs = delimiter or "".join(_DELIMITERS)
    return _cells(line.rstrip(f"{signs} \r\n"), delimiter) > 1


def _again(file: TextIOWrapper, head: str) -> str:
    """Go back to the line after the first that is not blank, which is returned."""
    file.seek(0)
    while file.readline(BLOCK + 1) != head:
        pass
    return head


def _cells(line: str, delimiter: str) -> int:
    plain = _QUOTED.sub("", line)
    return 1 + max(plain.count(sign) for sign in (delimiter or _DELIMITERS))


def _delimiter(head: str, path: Path) -> str:
    """Return the delimiter that occurs most often among the names, outside quotes."""
    plain = _QUOTED.sub("", head)
    tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    ordered = ("\t", *_DELIMITERS) if tabs else _DELIMITERS
    return max(ordered, key=plain.count)


def _named(names: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each column, none twice."""
    found: list[str] = []
    for name in names:
        plain = name or "unnamed"
        tries = chain([plain], (f"{plain} ({number})" for number in count(2)))
        fresh = (one for one in tries if one not in found and (one == name or one not in names))
        found.append(next(fresh))
    return tuple(found)


def _opened(path: Path) -> IO[bytes]:
    packed = path.name.lower().endswith(".gz")
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _text(path: Path, encoding: str) -> TextIOWrapper:
    return TextIOWrapper(_opened(path), encoding, errors="replace", newline="")
