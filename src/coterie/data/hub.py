"""Data sets of the package `datasets` (Hugging Face): objects, or folders by `save_to_disk`.

The package is never imported: an object brings its own code, and a folder is Arrow files with a
`state.json`, which pyarrow reads. A dictionary of parts (`train`, `test`) is the source's split.
Class labels declare the classes. Images and text are read by the same options as in other tables.
"""

import io
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
from coterie.data.table_files import (
    File,
    Piece,
    Slice,
    arrow_column,
    arrow_errors,
    marked,
    stored,
)

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # ends Arrow's stream format
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
    # data that is streamed may have __getitem__, which only raises, but no length
    wanted = ("column_names", "features", "__getitem__", "__len__")
    return all(hasattr(given, name) for name in wanted)


def refusal(given: Any) -> DataError:
    """Make the error for an object that is no data set."""
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    streamed = any(hasattr(part, "column_names") and hasattr(part, "features") for part in parts)
    if streamed:
        return DataError(
            f"cannot load {type(given).__name__}: it is streamed, and rows are read twice here; "
            "load it without streaming=True, or save it and give the folder"
        )
    return DataError(
        f"cannot load {type(given).__name__}; give a path, or a data set of the package datasets; "
        "for arrays there is from_arrays"
    )


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
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{path}: dataset_dict.json holds splits = {names!r}; expected a list of names: save "
            "the data set again"
        )
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
            yield marked(piece, wanted, own, split)


def _object(given: Any, where: str) -> _Part:
    if not is_dataset(given):
        raise DataError(f"{where}: expected data sets with column_names and features inside")
    names = tuple(given.column_names)
    features = given.features or {}
    plain = _without_format(given)
    small = {name for name in names if _is_small(features.get(name))}
    labels = {
        name: tuple(getattr(features[name], "names", None) or ())
        for name in names
        if name in features
    }

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        # columns that are not asked for would be decoded too, images among them
        select = getattr(plain, "select_columns", None)
        chosen = plain if select is None else select(list(columns))
        for start in range(0, len(given), _STEP):
            rows = chosen[start : start + _STEP]
            taken = {name: arrow_column(rows[name], name in small) for name in columns}
            yield Slice(taken, min(_STEP, len(given) - start))

    return _Part(names, labels, pieces)


def _without_format(given: Any) -> Any:
    """Take rows as they are: a format, such as torch, hands out other types, or fewer columns.

    A transform of the user's own is kept, since it makes the rows.
    """
    kind = dict(getattr(given, "format", None) or {}).get("type")
    return given.with_format(None) if kind not in (None, "custom") else given


def _is_small(feature: Any) -> bool:
    """Whether a column is declared as arrays of bytes: they are then read as images."""
    nested = False
    while feature is not None and not isinstance(feature, Mapping):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if inner is None:
            # ArrayXD has a shape and names the type of its numbers
            shaped = nested or getattr(feature, "shape", None) is not None
            return shaped and getattr(feature, "dtype", None) == "uint8"
        feature, nested = inner, True
    return False


def _folder(path: Path) -> _Part:
    state = _json(path / "state.json")
    files = _data_files(path, state.get("_data_files"))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{path}: saved with indices; call flatten_indices() and save it again")
    info = path / "dataset_info.json"
    features = (_json(info).get("features") if info.is_file() else None) or {}
    return _arrow_part(files, features)


def _data_files(path: Path, listed: Any) -> list[Path]:
    """Return the files that state.json names, which lie beside it."""
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    odd = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if not names or odd:
        found = f"names {odd[0]!r} among its" if odd else "names no"
        raise DataError(
            f"{path}: state.json {found} data files; expected names of files beside it: save the "
            "data set again"
        )
    return [path / name for name in names if isinstance(name, str)]


def _arrow_part(files: Sequence[Path], features: Any) -> _Part:
    with _stream(files[0]) as reader:
        names = tuple(reader.schema.names)
    for path in files[1:]:
        with _stream(path) as reader:
            lost = set(names) ^ set(reader.schema.names)
        if lost:
            raise DataError(
                f"{path}: columns unlike those of {files[0].name}: {', '.join(sorted(lost))} in "
                "one of them only; save the data set again"
            )
    features = features if isinstance(features, dict) else {}
    labels = {
        name: tuple(kind.get("names") or ())
        for name, kind in features.items()
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    }

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        for path in files:
            with _stream(path) as reader:
                for batch in reader:
                    yield stored(batch, columns)

    return _Part(names, labels, pieces)


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    """Open Arrow's stream format; not mapped, or its pages would count as resident.

    The mark at its end is asked for: without it, a file that is cut between two messages reads as a
    shorter one. The counts in dataset_info.json are no help, since those of a data set that rows
    were chosen from are the old ones.
    """
    with reading(path), path.open("rb") as file:
        file.seek(-min(len(_END), file.seek(0, io.SEEK_END)), io.SEEK_END)
        if file.read() != _END:
            raise EOFError("no mark of Arrow's stream format at its end")
    with arrow_errors(path), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield reader


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object; the folder is damaged: save it again")
    return found
