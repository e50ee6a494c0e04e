"""Read and write the models of a run folder: one safetensors file, one row per client.

`models/clients.safetensors` has one tensor per parameter, stacked over clients;
`models/clients.json` has the names of the clients, `models/scaling.npz` their medians, means and
standard deviations where rows are prepared by them, and what standard deviations of predictions
need. A safetensors file is eight bytes of length, a
JSON header and the raw values: it is written in pieces, so it may be larger than memory, and one
client's row is read without the others. All of them are private.
"""

import difflib
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coterie.core.files import how_to_resume, replacing, write_atomically
from coterie.core.tree import Tree

FORMAT = "1"
MODELS = "models"
SCALING = "scaling.npz"
_ROWS, _NAMES = "clients.safetensors", "clients.json"
_PIECE = 1 << 24  # bytes held at a time
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def client_names(folder: Path, place: str = MODELS) -> list[str]:
    """Return the names of the clients of a finished run, in the order of their models.

    `place` is the subfolder: "models", or that of the clients held out of training. All readers
    here raise FileNotFoundError if there is no finished run, and ValueError for damaged files.
    """
    path = folder / place / _NAMES
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _unfinished(folder, path) from error
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); restore it") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: expected a list of clients' names; restore it")
    return names


def client_model(folder: Path, name: str, place: str = MODELS) -> Tree:
    """Read one client's model only; raise ValueError if the client is unknown."""
    names = client_names(folder, place)
    (row,) = _rows_of(folder, [name], names)
    return {
        leaf: found.reshape(found.shape[1:])
        for leaf, found in _read(folder / place, len(names), slice(row, row + 1))
    }


def stacked_models(folder: Path, place: str = MODELS) -> Tree:
    """Read the models of all clients, stacked."""
    return dict(_read(folder / place, len(client_names(folder, place)), slice(None)))


def client_scaling(folder: Path, names: Sequence[str], place: str = MODELS) -> dict[str, Any]:
    """Return what prepares the rows of clients, as `ClientArrays.scaling`; {} if none is kept."""
    path = folder / place / SCALING
    if not path.exists():
        return {}
    places = _rows_of(folder, names, client_names(folder, place))
    try:
        with np.load(path, allow_pickle=False) as kept:
            return {name: kept[name][places] for name in kept.files}
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: damaged ({error!r}); restore it") from error


def write_models(
    place: Path, models: Tree, names: Sequence[Any], scaling: Mapping[str, Any] | None = None
) -> None:
    """Write stacked models and the clients' names; each file is whole or absent after a crash.

    `scaling` is what prepares each client's rows (`ClientArrays.scaling`), and what standard
    deviations of predictions need (`evaluation.predict.variances`), written if there is any.
    """
    place.mkdir(parents=True, exist_ok=True)
    if scaling:
        with replacing(place / SCALING) as file:
            np.savez(file, allow_pickle=False, **scaling)
    with replacing(place / _ROWS) as file:
        _write(file, models)
    write_atomically(place / _NAMES, json.dumps([str(name) for name in names]).encode())


def _write(file: IO[bytes], models: Tree) -> None:
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "coterie_models": FORMAT,
            "leaves": json.dumps(list(models)),  # in the order of the model's tree
        }
    }
    at, leaves = 0, sorted(models, key=lambda name: -models[name].element_size())
    for name in leaves:  # the widest types first, so that all are aligned
        leaf = models[name]
        end = at + leaf.numel() * leaf.element_size()
        kind = {"dtype": _KINDS[leaf.dtype], "shape": list(leaf.shape)}
        header[name] = {**kind, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in leaves:
        for piece in _pieces(models[name]):
            file.write(piece)


def _pieces(leaf: Tensor) -> Iterator[bytes]:
    """Yield the bytes of a leaf a few clients at a time."""
    row = max(1, leaf[:1].numel() * leaf.element_size())
    step = max(1, _PIECE // row)
    for start in range(0, len(leaf) if leaf.numel() else 0, step):
        found = leaf[start : start + step].detach().cpu().contiguous().numpy()
        yield found.astype(found.dtype.newbyteorder("<"), copy=False).tobytes()


def _read(place: Path, clients: int, rows: slice) -> Iterator[tuple[str, Tensor]]:
    path = place / _ROWS
    try:
        with safe_open(path, framework="pt") as file:
            for name in _leaves(file.metadata() or {}, file.keys()):
                part = file.get_slice(name)
                if part.get_shape()[0] != clients:
                    raise ValueError(
                        f"{path} holds {part.get_shape()[0]} models and {_NAMES} {clients} names; "
                        "restore both"
                    )
                yield name, part[rows]
    except FileNotFoundError as error:
        raise _unfinished(place.parent, path) from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged ({error}); restore it") from error


def _leaves(metadata: Mapping[str, str], names: Sequence[str]) -> list[str]:
    ordered = metadata.get("leaves")
    return [str(name) for name in json.loads(ordered)] if ordered else list(names)


def _unfinished(folder: Path, path: Path) -> FileNotFoundError:
    if (folder / "federation.toml").exists() and not (folder / "run.json").exists():
        return FileNotFoundError(
            f"{folder} is the coordinator's folder of a deployment: clients' models stay at the "
            "sites; give a site's folder of this run"
        )
    if (folder / "plan.toml").exists():
        return FileNotFoundError(f"{path} does not exist; {how_to_resume(folder)}")
    return FileNotFoundError(f"{path} does not exist; give the folder of a finished run")


def _rows_of(folder: Path, wanted: Sequence[str], names: Sequence[str]) -> list[int]:
    rows = {name: row for row, name in enumerate(names)}
    for name in wanted:
        if name not in rows:
            raise ValueError(_unknown(folder, name, names))
    return [rows[name] for name in wanted]


def _unknown(folder: Path, name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    known = "nearest are" if near else "they are" if len(names) <= 3 else "such as"
    shown = ", ".join(map(repr, near or names[:3]))
    return f"client = {name!r}: not among the {len(names)} clients of {folder}; {known} {shown}"
