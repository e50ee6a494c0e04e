"""Rows with named columns, one of which is the client: CSV, Parquet and what is read like them.

Memory holds one batch beside the result: the file may be larger than memory. Every cell of a CSV
is read as text and turned into numbers here, so that a bad one is named by line and column, and a
column's type never depends on how far a reader looked ahead. Categorical columns take their
declared levels; a text column without levels is left out, and a note says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coterie.data.cells import (
    NUMBER,
    WHOLE,
    decoded,
    is_gap,
    is_number,
    is_text,
    listed,
    numbers_in,
    texts_in,
)
from coterie.data.coders import Coder, array_coder, choose_columns, plan_coder
from coterie.data.columns import (
    Batch,
    Columns,
    Fail,
    Table,
    find_column,
    one_hot,
    plan_columns,
    unknown_level,
)
from coterie.data.federated import DataError
from coterie.data.source import Source
from coterie.data.table_files import File, Piece, open_file
from coterie.data.text import Tags, plan_tags


def open_table(path: Path, source: Source) -> Table:
    """Open a table, or a folder of Parquet files with the same columns.

    Args:
        path: The file or folder.
        source: The options.
    """
    return open_columns(open_file(path, source), source)


def open_columns(file: File, source: Source) -> Table:
    """Make a table of rows with named columns.

    Args:
        file: The rows.
        source: The options.
    """
    source = _declared(file, source)
    others = _others(file, source)
    coder = plan_coder(source, file.where, file.tokens)
    coder = choose_columns(coder, source, others, file.where) if coder else None
    coder = coder or _arrays(file, source, others)
    tags = plan_tags(source) if source.tags else None
    lost = "without a known tag"
    if coder is not None:
        reader = _Reader(file, coder.columns, coder.plan(source, file.where), source, coder, tags)
        return Table(
            file.where,
            coder.shape,
            reader.plan,
            reader.read,
            file.place,
            (*file.notes, *coder.notes),
            coder.sparse,
            lost=lost,
            declared=source,
        )
    features, notes = _chosen(file, source, others)
    plan = plan_columns(features, source, where=file.where, numbered=False)
    return Table(
        file.where,
        (len(plan.names),),
        plan,
        _Reader(file, features, plan, source, None, tags).read,
        file.place,
        (*file.notes, *notes),
        guessed=file.guessed,
        lost=lost,
        declared=source,
    )


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


def _others(file: File, source: Source) -> list[str]:
    """List the columns that are no client, target or split."""
    taken = [*source.targets, *(() if source.targets_are_clients else (source.client,))]
    for name in taken:
        if name not in file.names:
            raise DataError(
                f"{file.where}: no column {name!r}, the columns are {', '.join(file.names)}; "
                f"{'name the columns in the first line, or ' if file.guessed else ''}set client "
                "and target to those used (--client-column, --target)"
            )
    own = {*taken, source.client, source.split}
    return [n for n in file.names if n not in own and not n.startswith("__index_level_")]


def _chosen(
    file: File, source: Source, others: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the columns of numbers and levels, with a note on those left out."""
    for name in source.features:
        find_column(name, others, where=file.where, numbered=False)
    features, left_out = list(source.features), dict[str, str]()
    if not features:
        features, left_out = _numeric(file, others, source)
    if not features:
        raise DataError(f"{file.where}: no numeric column for features; declare features or levels")
    text = ", ".join(name for name, kind in left_out.items() if not kind)
    rest = ", ".join(f"{name} ({kind})" for name, kind in left_out.items() if kind)
    notes: tuple[str, ...] = ()
    notes += (f"text columns without declared levels left out: {text}",) if text else ()
    notes += (f"columns that are neither numbers nor text left out: {rest}",) if rest else ()
    return tuple(features), notes


def _arrays(file: File, source: Source, others: Sequence[str]) -> Coder | None:
    """Make a coder where the one declared feature is a column of arrays."""
    if len(source.features) != 1 or source.features[0] not in others:
        return None
    name = source.features[0]
    first = next(file.batches([name]), None)
    column = None if first is None else first[1].column(name)
    kind = getattr(column, "type", pa.list_(pa.float64()))
    if column is None or not pa.types.is_nested(kind) or pa.types.is_struct(kind):
        return None
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    shape = np.shape(next((value for value in listed(column) if value is not None), ()))
    return array_coder(name, shape, pixels=len(shape) > 1 and kind == pa.uint8())


@dataclass(frozen=True)
class _Reader:
    """How the pieces of a file become batches."""

    file: File
    features: tuple[str, ...]
    plan: Columns
    source: Source
    coder: Coder | None = None
    tags: Tags | None = None

    def read(self, wanted: bool) -> Iterator[Batch]:
        """Yield batches; `wanted` says whether features are."""
        source = self.source
        if self.file.clients:
            none = np.zeros(0, dtype=np.int64)
            # every client first, so that their order is the file's own list, and none is lost
            yield Batch(none, self.file.clients, none, None, none)
        columns = [*source.targets, *((source.split,) if source.split in self.file.names else ())]
        columns += [] if source.targets_are_clients else [source.client]
        columns += self.features if wanted else ()
        for first, piece in self.file.batches(columns):
            yield from self._batches(first, piece, wanted)

    def _batches(self, first: int, piece: Piece, wanted: bool) -> Iterator[Batch]:
        file, source = self.file, self.source
        self._refuse_lists(piece, wanted)
        names: tuple[str, ...] = ("",)
        codes = np.zeros(piece.num_rows, dtype=np.int64)
        if not source.targets_are_clients:
            names, codes = _clients(file, piece.column(source.client), first, source.client)

        def fail(row: int, found: str) -> DataError:
            client = f", client {names[codes[row]]!r}" if names != ("",) else ""
            return DataError(f"{file.where}: {file.place(first + row)}{client}: {found}")

        y, real, keep = self._targets(piece, fail)
        whole = Batch(
            rows=np.arange(first, first + piece.num_rows),
            names=names,
            codes=codes,
            x=None,
            y=y,
            split=self._split(piece, fail),
            real=real,
        )
        if not wanted or self.coder is None:
            x = _matrix(piece, self.features, self.plan, fail) if wanted else None
            yield replace(replace(whole, x=x).take(keep), lost=int((~keep).sum()))
            return
        yield replace(whole.take(np.zeros(0, dtype=np.int64)), lost=int((~keep).sum()))
        values = [listed(piece.column(name)) for name in self.features]
        for start in range(0, piece.num_rows, self.coder.step):
            part = np.arange(start, min(start + self.coder.step, piece.num_rows))[
                keep[start : start + self.coder.step]
            ]
            chosen = [[column[at] for at in part] for column in values]
            moved = partial(_moved, fail, part)
            yield replace(whole.take(part), x=self.coder.encode(chosen, moved))

    def _refuse_lists(self, piece: Piece, wanted: bool) -> None:
        """Refuse columns that Arrow does not know where numbers or names belong."""
        source = self.source
        plain = [source.split] if source.split in self.file.names else []
        plain += [] if source.targets_are_clients else [source.client]
        plain += source.targets if self.tags is None else ()
        plain += self.features if wanted and self.coder is None else ()
        for name in plain:
            if isinstance(piece.column(name), list):
                raise DataError(
                    f"{self.file.where}: column {name!r} holds values of several kinds, or none "
                    "that are numbers or text; leave it out, or read it with images= or text="
                )

    def _targets(
        self, piece: Piece, fail: Fail
    ) -> tuple[NDArray[Any], bool | None, NDArray[np.bool_]]:
        if self.tags is None:
            return *_targets(piece, self.source, fail), np.ones(piece.num_rows, dtype=bool)
        y, known = self.tags.encode(listed(piece.column(self.source.targets[0])))
        return y, False, known

    def _split(self, piece: Piece, fail: Fail) -> NDArray[np.float64] | None:
        name = self.source.split
        if name not in self.file.names:
            return None
        column = decoded(piece.column(name))
        if is_text(column.type):
            # parts may be called by name
            for code, part in enumerate(self.source.splits):
                column = pc.if_else(pc.equal(column, part), str(code), column)
        return numbers_in(column, name, partial(_no_part, fail, self.source.splits, column))


def _no_part(
    fail: Fail, splits: Sequence[str], column: pa.Array, row: int, found: str
) -> DataError:
    if not is_text(column.type):
        return fail(row, found)
    return fail(
        row,
        f"the split is {column[row].as_py()!r}; expected 0 (train) or 1 (test), or the names "
        f"{', '.join(splits)}: correct it, or set splits",
    )


def _moved(fail: Fail, rows: NDArray[np.int64], row: int, found: str) -> DataError:
    return fail(int(rows[row]), found)


def _clients(
    file: File, column: pa.Array, first: int, name: str
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Number the clients of a batch in order of appearance."""
    if pa.types.is_floating(column.type):
        whole = pc.equal(pc.trunc(column), column)
        if not pc.all(pc.fill_null(whole, True)).as_py():
            raise DataError(
                f"{file.where}: column {name!r} holds real numbers; name clients by whole numbers "
                "or text"
            )
        column = pc.cast(column, pa.int64())

    def fail(row: int, found: str) -> DataError:
        return DataError(f"{file.where}: {file.place(first + row)}: {found}")

    text = texts_in(column, name, fail)
    empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(text), ""), True).to_numpy(
        zero_copy_only=False
    )
    if empty.any():
        raise fail(
            int(np.flatnonzero(empty)[0]),
            f"the client (column {name!r}) is empty; name the client of every row",
        )
    coded = pc.dictionary_encode(text)
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return tuple(coded.dictionary.to_pylist()), codes


def _targets(piece: Piece, source: Source, fail: Fail) -> tuple[NDArray[Any], bool | None]:
    """Take the targets of a batch, and whether they are written as real numbers."""
    parts, real = [], False
    for name in source.targets:
        column = piece.column(name)
        if isinstance(source.classes, tuple) and source.task not in ("regression", "multilabel"):
            text = texts_in(column, name, fail)
            gap = pc.and_(is_gap(text), pc.invert(pc.is_in(text, pa.array(source.classes))))
            values = pc.if_else(gap, pa.scalar(None, pa.string()), text)
            parts.append(values.to_numpy(zero_copy_only=False).astype(object))
            continue
        parts.append(numbers_in(column, name, fail))
        if is_text(column.type):
            text = texts_in(column, name, fail)
            whole = pc.or_(is_gap(text), pc.match_substring_regex(text, WHOLE))
            real = real or not pc.all(pc.fill_null(whole, True)).as_py()
        else:
            real = real or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
    return (parts[0] if len(parts) == 1 else np.column_stack(parts)), real


def _matrix(
    piece: Piece, features: tuple[str, ...], plan: Columns, fail: Fail
) -> NDArray[np.float64]:
    """Make the features of a batch, NaN where a value is missing."""
    x = np.empty((piece.num_rows, len(plan.names)))
    at = 0
    for position, name in enumerate(features):
        column = piece.column(name)
        if position not in plan.levels:
            x[:, at] = numbers_in(column, name, fail)
            at += 1
            continue
        levels = plan.levels[position]
        text = texts_in(column, name, fail)
        found = pc.fill_null(pc.index_in(text, pa.array(levels)), -1)
        codes = found.to_numpy(zero_copy_only=False).astype(np.int64)
        gaps = pc.fill_null(is_gap(text), True).to_numpy(zero_copy_only=False)
        lost = np.flatnonzero((codes < 0) & ~gaps)
        if len(lost):
            value = text[int(lost[0])].as_py()
            raise fail(int(lost[0]), f"column {name!r}: {unknown_level(value, levels)}")
        x[:, at : at + len(levels)] = one_hot(codes, len(levels))
        at += len(levels)
    return x


def _numeric(file: File, names: Sequence[str], source: Source) -> tuple[list[str], dict[str, str]]:
    """Tell the columns to take from the others, by the first batch; these with what they hold.

    A column in which some values are numbers is taken, so that the others are found as errors.
    """
    first = next(file.batches(names), None) if names else None
    if first is None:
        return list(names), {}
    taken: list[str] = []
    left_out: dict[str, str] = {}
    for name in names:
        column = first[1].column(name)
        if isinstance(column, list):
            left_out[name] = "values of several kinds"
            continue
        column = decoded(column)
        usable = name in source.levels or is_number(column.type)
        if not usable and is_text(column.type):
            number = pc.match_substring_regex(column, NUMBER, ignore_case=True)
            usable = bool(pc.any(number).as_py()) or bool(pc.all(is_gap(column)).as_py())
        if usable:
            taken.append(name)
        else:
            left_out[name] = "" if is_text(column.type) else str(column.type)
    return taken, left_out
