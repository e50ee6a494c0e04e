"""Datasets of the package `datasets` (Hugging Face): objects, or folders by `save_to_disk`.

The package is never imported: an object has its own methods, and a folder holds Arrow files with a
`state.json`, which pyarrow reads. A dictionary of parts (`train`, `test`) is the source's split.
Class labels declare the classes. Images and text are read by the same options as in other tables.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from coterie.data.config import Source, reading
from coterie.data.federated import DataError
from coterie.data.tables import (
    File,
    Piece,
    arrow_column,
    arrow_errors,
    arrow_piece,
    concatenate,
)

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # ends Arrow's stream format
_STEP = 1 << 10  # rows of an object taken at a time


def is_saved(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def is_dataset(given: Any) -> bool:
    """Return whether an object is a dataset, or a dictionary of datasets."""
    if isinstance(given, Mapping):
        return bool(given) and all(is_dataset(part) for part in given.values())
    # a streamed dataset may have __getitem__, which raises, but has no length
    wanted = ("column_names", "features", "__getitem__", "__len__")
    return all(hasattr(given, name) for name in wanted)


def refusal(given: Any) -> DataError:
    """Return the error for an object that is no dataset."""
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    if any(hasattr(part, "column_names") and hasattr(part, "features") for part in parts):
        return DataError(
            f"cannot load {type(given).__name__}: it is streamed, but rows are read twice; "
            "load it without streaming=True, or save it and give the folder"
        )
    return DataError(
        f"cannot load {type(given).__name__}; give a path, a frame of pandas, polars or pyarrow, "
        "or a dataset of the package datasets; for arrays use from_arrays"
    )


def open_dataset(given: Any, source: Source) -> File:
    """Open a dataset object, or a dictionary of datasets by part."""
    where = f"datasets.{type(given).__name__}"
    if not isinstance(given, Mapping):
        return _object(given, where)
    return _file(where, {str(name): _object(part, where) for name, part in given.items()}, source)


def open_saved(path: Path, source: Source) -> File:
    """Open a folder written by `save_to_disk`, or one `.arrow` file of it."""
    if path.is_file():
        return _arrow_part(str(path), [path], {})
    if (path / "state.json").is_file():
        return _folder(path)
    names = _json(path / "dataset_dict.json").get("splits", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{path}: dataset_dict.json holds splits = {names!r}; expected a list of names: save "
            "the dataset again"
        )
    return _file(str(path), {name: _folder(path / name) for name in names}, source)


def _file(where: str, parts: Mapping[str, File], source: Source) -> File:
    """Concatenate the declared parts, with a column for the part."""
    chosen = [(split, parts[name]) for split, name in enumerate(source.splits) if name in parts]
    if not chosen:
        raise DataError(
            f"{where}: the parts are {', '.join(parts) or 'none'}, expected "
            f"{', '.join(source.splits)}; name them with splits"
        )
    left = [name for name in parts if name not in source.splits]
    notes = (f"parts left out: {', '.join(left)}",) if left else ()
    return concatenate(where, chosen, source.split, notes)


def _object(given: Any, where: str) -> File:
    if not is_dataset(given):
        raise DataError(f"{where}: expected datasets with column_names and features inside")
    names, features = tuple(given.column_names), given.features or {}
    plain = _without_format(given)
    small = {name for name in names if _is_small(features.get(name))}
    labels = {name: tuple(getattr(features.get(name), "names", None) or ()) for name in names}

    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        # other columns would be decoded too, images among them
        select = getattr(plain, "select_columns", None)
        chosen = plain if select is None else select(list(columns))
        for start in range(0, len(given), _STEP):
            rows = chosen[start : start + _STEP]
            taken = {name: arrow_column(rows[name], name in small) for name in columns}
            yield Piece(taken, min(_STEP, len(given) - start))

    return File(where, names, pieces, labels=labels)


def _without_format(given: Any) -> Any:
    """Return the dataset without a format such as torch, which changes types or drops columns.

    A transform of the user is kept, since it makes the rows.
    """
    kind = dict(getattr(given, "format", None) or {}).get("type")
    return given.with_format(None) if kind not in (None, "custom") else given


def _is_small(feature: Any) -> bool:
    """Return whether a column is declared as arrays of bytes, which are read as images."""
    nested = False
    while feature is not None and not isinstance(feature, Mapping):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if inner is None:
            # ArrayXD has a shape and the type of its numbers
            shaped = nested or getattr(feature, "shape", None) is not None
            return shaped and getattr(feature, "dtype", None) == "uint8"
        feature, nested = inner, True
    return False


def _folder(path: Path) -> File:
    state = _json(path / "state.json")
    files = _data_files(path, state.get("_data_files"))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{path}: saved with indices; call flatten_indices() and save it again")
    info = path / "dataset_info.json"
    features = (_json(info).get("features") if info.is_file() else None) or {}
    return _arrow_part(str(path), files, features)


def _data_files(path: Path, listed: Any) -> list[Path]:
    """Return the files that state.json lists, which lie beside it."""
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    odd = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if not names or odd:
        found = f"names {odd[0]!r} among its" if odd else "names no"
        raise DataError(
            f"{path}: state.json {found} data files; expected names of files beside it: save the "
            "dataset again"
        )
    return [path / name for name in names if isinstance(name, str)]


def _arrow_part(where: str, files: Sequence[Path], features: Any) -> File:
    features = features if isinstance(features, dict) else {}
    labels = {
        name: tuple(kind.get("names") or ())
        for name, kind in features.items()
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    }
    joined = concatenate(where, [(None, _arrow_file(path)) for path in files], "")
    return replace(joined, labels=labels)


def _arrow_file(path: Path) -> File:
    def pieces(columns: Sequence[str]) -> Iterator[Piece]:
        with _stream(path) as reader:
            for batch in reader:
                # Offsets outside their buffer would be read as they are.
                batch.validate(full=True)
                yield arrow_piece(batch, columns)

    with _stream(path) as reader:
        return File(str(path), tuple(reader.schema.names), pieces)


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    """Open Arrow's stream format; not mapped, since its pages would count as resident.

    The end mark is required: without it, a file that is cut between two messages reads as a shorter
    one. The counts in dataset_info.json do not help: they may be older than a selection of rows.
    """
    with reading(path), path.open("rb") as file:
        file.seek(-min(len(_END), file.seek(0, io.SEEK_END)), io.SEEK_END)
        if file.read() != _END:
            raise EOFError("no end mark of Arrow's stream format")
    with arrow_errors(path), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield reader


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object; the folder is damaged: save it again")
    return found
