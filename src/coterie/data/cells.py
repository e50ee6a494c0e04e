"""The cells of a column as numbers or text."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coterie.data.columns import Fail

_GAPS = pa.array(["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL"])
NUMBER = r"^\s*[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf|infinity|nan)\s*$"
WHOLE = r"^\s*[+-]?\d+\s*$"


def listed(column: Any) -> list[Any]:
    """Return the values of a column."""
    return column if isinstance(column, list) else list(column.to_pylist())


def numbers_in(column: pa.Array, name: str, fail: Fail) -> NDArray[np.float64]:
    """Turn a column into numbers, NaN where one is missing."""
    column = decoded(column)
    if not is_text(column.type):
        if not is_number(column.type):
            raise fail(0, f"column {name!r} holds {column.type}, no numbers; leave it out")
        return _plain(pc.cast(column, pa.float64(), safe=False))
    for text in (column, pc.utf8_trim_whitespace(column)):
        try:
            return _plain(
                pc.cast(pc.if_else(is_gap(text), pa.scalar(None, text.type), text), pa.float64())
            )
        except pa.ArrowInvalid:
            continue
    number = pc.match_substring_regex(text, NUMBER, ignore_case=True)
    bad = pc.fill_null(pc.invert(pc.or_(is_gap(text), number)), False)
    row = int(np.flatnonzero(bad.to_numpy(zero_copy_only=False))[0])
    raise fail(
        row,
        f"column {name!r}: found {column[row].as_py()!r} where a number belongs; correct it, or "
        "declare the column's levels (for a target: its classes by name)",
    )


def _plain(column: pa.Array) -> NDArray[np.float64]:
    values: NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
    return values


def texts_in(column: pa.Array, name: str, fail: Fail) -> pa.Array:
    """Turn a column into text."""
    column = decoded(column)
    try:
        return pc.cast(column, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise fail(
            0, f"column {name!r} holds {column.type}, which is no text; name another column"
        ) from error


def decoded(column: pa.Array) -> pa.Array:
    """Write out a column that is stored as numbers into a list of its values."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_gap(text: pa.Array) -> pa.Array:
    """Tell which texts stand for a missing value."""
    return pc.fill_null(pc.is_in(text, _GAPS), True)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests)
