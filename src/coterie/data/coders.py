"""Rows that are no columns of numbers: text, images and arrays, as one coder each.

Readers hand a coder the values of its columns, a few rows at a time, and take back features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import PIXELS, Columns, Fail, Values, plan_columns
from coterie.data.federated import DataError
from coterie.data.images import STEP, Images
from coterie.data.source import Source
from coterie.data.text import plan_text

TEXT_COLUMNS = (("tokens", "title"), ("text",))
IMAGE_COLUMNS = (("image",), ("img",))


@dataclass(frozen=True)
class Coder:
    """How values become the features of a row.

    Attributes:
        shape: The shape of one row.
        encode: Turns columns of values into rows; its second argument makes errors.
        kind: What the values are, for messages.
        columns: The columns that are read, where the file has columns.
        sparse: Whether rows are CSR.
        step: The most rows to take at a time.
        notes: What is done, in words.
    """

    shape: tuple[int, ...]
    encode: Callable[[Sequence[Sequence[Any]], Fail], Values]
    kind: str
    columns: tuple[str, ...] = ()
    sparse: bool = False
    step: int = 1 << 15
    notes: tuple[str, ...] = ()

    def plan(self, source: Source, where: str) -> Columns:
        """Spread the declared constants over the features."""
        plain = replace(source, features=(), levels={})
        return plan_columns(range(int(np.prod(self.shape))), plain, where=where)


def plan_coder(source: Source, where: str, tokens: str = "words") -> Coder | None:
    """Choose the coder that the options ask for, if any.

    Args:
        source: The options.
        where: The file's name for messages.
        tokens: How text is cut where the options do not say.
    """
    if source.text is not None:
        return _text_coder(source, tokens)
    if source.images is None:
        return None
    folder = Path(source.images) if source.images else None
    if folder is not None and not folder.is_dir():
        raise DataError(f"{where}: images = {source.images!r}: no such folder; check the path")
    images = Images(folder, *source.size)
    note = f"images as RGB from 0 to 1, resized to {source.size[0]} x {source.size[1]}"

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        return images.encode(columns[0], fail)

    return Coder(images.shape, encode, "images", step=STEP, notes=(note,))


def _text_coder(source: Source, tokens: str) -> Coder:
    text = plan_text(source, tokens)
    what = "characters" if text.tokens == "characters" else "words"
    kind = f"{source.bag} bags of {what}" if text.length is None else f"indices of {what}"
    note = f"text read as {kind} over {len(text.index)} public {what}"

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        rows = enumerate(zip(*columns, strict=True))
        return text.encode([_joined(parts, row, fail) for row, parts in rows])

    return Coder(text.shape, encode, "text", sparse=text.length is None, notes=(note,))


def _joined(parts: Sequence[Any], row: int, fail: Fail) -> str | None:
    """Join the texts of one row; a gap in one makes a gap of all."""
    if any(part is None for part in parts):
        return None
    texts = [part.decode("utf-8", "replace") if isinstance(part, bytes) else part for part in parts]
    odd = next((part for part in texts if not isinstance(part, str)), None)
    if odd is not None:
        raise fail(row, f"found {str(odd)[:60]} where text belongs; name the columns of text")
    return " ".join(texts)


def choose_columns(coder: Coder, source: Source, names: Sequence[str], where: str) -> Coder:
    """Say which columns of a table a coder reads: those declared, else the usual ones."""
    usual = TEXT_COLUMNS if coder.kind == "text" else IMAGE_COLUMNS
    columns = source.features or next((group for group in usual if set(group) <= set(names)), ())
    listed = ", ".join(names)
    lost = next((name for name in columns if name not in names), None)
    if lost is not None or not columns:
        found = f"no column {lost!r}" if lost else f"which column holds {coder.kind} is not said"
        raise DataError(f"{where}: {found}, the columns are {listed}; name it with features=")
    if coder.kind == "images" and len(columns) > 1:
        raise DataError(f"{where}: features = {columns!r}: expected one column of images")
    return replace(coder, columns=tuple(columns))


def array_coder(column: str, shape: tuple[int, ...], pixels: bool) -> Coder:
    """Make the coder of a column whose values are arrays.

    Args:
        column: Its name.
        shape: The shape of the first row.
        pixels: Whether values are bytes of images, to be divided by 255.
    """

    def encode(columns: Sequence[Sequence[Any]], fail: Fail) -> Values:
        x = np.empty((len(columns[0]), *shape))
        for row, value in enumerate(columns[0]):
            x[row] = _array(value, shape, row, fail)
        return x / 255 if pixels else x

    notes = (PIXELS,) if pixels else ()
    return Coder(shape, encode, "arrays", (column,), step=1 << 10, notes=notes)


def _array(value: Any, shape: tuple[int, ...], row: int, fail: Fail) -> NDArray[np.float64]:
    if value is None:
        return np.full(shape, np.nan)
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise fail(row, f"found {str(value)[:60]} where numbers belong; correct the row") from None
    if found.shape != shape:
        raise fail(
            row,
            f"values of shape {found.shape}, where the first row has {shape}; give every row as "
            "many",
        )
    return found
