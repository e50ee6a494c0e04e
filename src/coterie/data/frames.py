"""Data frames in and out: pandas, polars, pyarrow, and all else that exports Arrow streams.

A frame is read as a Parquet file of its rows would be. No library of frames is imported to read
one: `__arrow_c_stream__`, the Arrow PyCapsule interface, gives Arrow arrays.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_args

import pyarrow as pa

from coterie.data.config import find_twice
from coterie.data.federated import DataError
from coterie.data.tables import File, Piece, arrow_piece

Kind = Literal["pandas", "polars", "pyarrow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FRAME = "frame"
"""The name of data that was given as a frame, unless its owner names it."""

_BATCH = 1 << 15  # rows taken at a time, as from Parquet files


def is_frame(given: Any) -> bool:
    """Return whether an object is a table of rows with named columns in memory."""
    return hasattr(given, "__arrow_c_stream__") or _kind_of(given) == "pandas"


def open_frame(given: Any, name: str = FRAME) -> File:
    """Open a frame; raise DataError if it cannot be read as a table."""
    table = as_table(given, name)

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        chosen = list(columns) or table.column_names[:1]
        for batch in table.select(chosen).to_batches(max_chunksize=_BATCH):
            yield arrow_piece(_plain(batch), chosen)

    return File(name, tuple(table.column_names), pieces, lambda row: f"row {row - 1} (from 0)")


def as_table(given: Any, name: str = FRAME) -> pa.Table:
    """Return a frame as an Arrow table, without a copy where its library can."""
    try:
        table = pa.table(given)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"{name}: {type(given).__name__} cannot be read as a table ({why}); give every column "
            "values of one kind, such as numbers, text or dates"
        ) from error
    if (twice := find_twice(table.column_names)) is not None:
        raise DataError(f"{name}: two columns are called {twice!r}; rename one")
    return table


def columns_of(given: Any, names: Sequence[str]) -> pa.Table:
    """Return columns of a frame, with plain text."""
    batches = as_table(given).select(list(names)).to_batches()
    return pa.Table.from_batches([_plain(batch) for batch in batches])


def to_frame(table: pa.Table, kind: str | None = None) -> Any:
    """Return an Arrow table as a frame; None is pandas, else polars, else pyarrow, as installed.

    Raises:
        ValueError: If there is no such kind, or it is not installed.
    """
    kind = kind or next(name for name in KINDS if find_spec(name) is not None)
    if kind not in KINDS:
        raise ValueError(f"frame = {kind!r}: expected one of {', '.join(KINDS)}")
    if kind == "pyarrow":
        return table
    if find_spec(kind) is None:
        raise ValueError(f"frame = {kind!r}: not installed; pip install {kind}, or give 'pyarrow'")
    if kind == "pandas":
        return table.to_pandas()
    import polars

    return polars.from_arrow(table)


def like(table: pa.Table, given: Any, rows: Sequence[int]) -> Any:
    """Return an Arrow table as a frame of the same kind as another one.

    Line k belongs to row `rows[k]` of the other one: pandas gets its index.
    """
    kind = _kind_of(given) or "pyarrow"
    found = to_frame(table, kind)
    if kind == "pandas":
        found.index = given.index[list(rows)]
    return found


def _kind_of(given: Any) -> Kind | None:
    """Return the library of a frame, if it is a known one."""
    for kind in ("pandas", "polars"):
        library = sys.modules.get(kind)
        if library is not None and isinstance(given, getattr(library, "DataFrame", ())):
            return "pandas" if kind == "pandas" else "polars"
    return "pyarrow" if isinstance(given, pa.Table | pa.RecordBatch) else None


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with plain text, as Parquet files give it, also in place of categories."""
    columns = [_plain_column(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain_column(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        values = _plain_column(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    # `string_view`, which polars gives, has no test of its own in older versions of pyarrow
    text = pa.types.is_large_string(column.type) or str(column.type) == "string_view"
    return column.cast(pa.string()) if text else column
