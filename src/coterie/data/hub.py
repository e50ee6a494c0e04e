"""Data sets of the package `datasets` (Hugging Face): objects, or folders by `save_to_disk`.

The package is never imported: an object brings its own code, and a folder is Arrow files with a
`state.json`, which pyarrow reads. A dictionary of parts (`train`, `test`) is the source's split.
Class labels declare the classes. Images and text are read by the same options as in other tables.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from coterie.data.federated import DataError
from coterie.data.source import Source, reading
from coterie.data.table_files import File, Piece, Slice, arrow_column, arrow_errors

_STEP = 1 << 10  # rows of an object taken at a time


@dataclass(frozen=True)
class _Part:
    """One data set: its columns, their labels, and its rows in pieces."""

    names: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    pieces: Callable[[Sequence[str]], Iterator[Piece]]


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def is_dataset(given: Any) -> bool:
    """Whether an object is a data set, or a dictionary of them."""
    if isinstance(given, Mapping):
        return bool(given) and all(is_dataset(part) for part in given.values())
    return all(hasattr(given, name) for name in ("column_names", "features", "__getitem__"))


def open_dataset(given: Any, source: Source) -> File:
    """Open an object.

    Args:
        given: A data set, or a dictionary of them by part.
        source: The options.
    """
    where = f"datasets.{type(given).__name__}"
    if not isinstance(given, Mapping):
        return _file(where, {"": _object(given, where)}, source)
    return _file(where, {str(name): _object(part, where) for name, part in given.items()}, source)


def open_saved(path: Path, source: Source) -> File:
    """Open a folder written by `save_to_disk`, or one `.arrow` file of it.

    Args:
        path: The folder or file.
        source: The options.
    """
    if path.is_file():
        return _file(str(path), {"": _arrow_part([path], {})}, source)
    if (path / "state.json").is_file():
        return _file(str(path), {"": _folder(path)}, source)
    names = _json(path / "dataset_dict.json").get("splits", [])
    return _file(str(path), {name: _folder(path / name) for name in names}, source)


def _file(where: str, parts: Mapping[str, _Part], source: Source) -> File:
    """Put the declared parts under one another, with a column that names the part."""
    if list(parts) == [""]:
        part = parts[""]
        return File(where, part.names, part.pieces, labels=part.labels)
    chosen = [(split, parts[name]) for split, name in enumerate(source.splits) if name in parts]
    if not chosen:
        raise DataError(
            f"{where}: the parts are {', '.join(parts) or 'none'}, expected "
            f"{', '.join(source.splits)}; name them with splits"
        )
    first = chosen[0][1]
    if any(set(part.names) != set(first.names) for _, part in chosen):
        raise DataError(f"{where}: the parts have unlike columns; give every part the same")
    left = [name for name in parts if name not in source.splits]
    own = (source.split,) if len(chosen) > 1 and source.split not in first.names else ()
    return File(
        where,
        (*own, *first.names),
        partial(_in_turn, chosen, own),
        labels=first.labels,
        notes=(f"parts left out: {', '.join(left)}",) if left else (),
    )


def _in_turn(
    chosen: Sequence[tuple[int, _Part]], own: tuple[str, ...], columns: Sequence[str]
) -> Iterator[Piece]:
    wanted = [name for name in columns if name not in own]
    for split, part in chosen:
        for piece in part.pieces(wanted):
            taken = {name: piece.column(name) for name in wanted}
            marks = {name: pa.array([split] * piece.num_rows, pa.int64()) for name in own}
            yield Slice(taken | marks, piece.num_rows)


def _object(given: Any, where: str) -> _Part:
    if not is_dataset(given):
        raise DataError(f"{where}: expected data sets with column_names and features inside")
    names = tuple(given.column_names)
    features = given.features or {}
    labels = {
        name: tuple(getattr(features[name], "names", None) or ())
        for name in names
        if name in features
    }

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        # columns that are not asked for would be decoded too, images among them
        select = getattr(given, "select_columns", None)
        chosen = given if select is None else select(list(columns))
        for start in range(0, len(given), _STEP):
            rows = chosen[start : start + _STEP]
            taken = {name: arrow_column(rows[name]) for name in columns}
            yield Slice(taken, min(_STEP, len(given) - start))

    return _Part(names, labels, pieces)


def _folder(path: Path) -> _Part:
    state = _json(path / "state.json")
    files = [path / str(entry.get("filename")) for entry in state.get("_data_files") or ()]
    if not files:
        raise DataError(f"{path}: state.json names no data files; save the data set again")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{path}: saved with indices; call flatten_indices() and save it again")
    info = path / "dataset_info.json"
    features = (_json(info).get("features") if info.is_file() else None) or {}
    return _arrow_part(files, features)


def _arrow_part(files: Sequence[Path], features: Mapping[str, Any]) -> _Part:
    with _stream(files[0]) as reader:
        names = tuple(reader.schema.names)
    labels = {
        name: tuple(kind.get("names") or ())
        for name, kind in features.items()
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    }

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        for path in files:
            with _stream(path) as reader:
                for batch in reader:
                    yield Slice({n: batch.column(n) for n in columns}, batch.num_rows)

    return _Part(names, labels, pieces)


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    """Open Arrow's stream format; not mapped, or its pages would count as resident."""
    with arrow_errors(path), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield reader


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object; the folder is damaged: save it again")
    return found
