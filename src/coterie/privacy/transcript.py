"""The public transcript: every release, stored so that it can be read again.

A release exists when its file has its final name: it is written under another name, synced,
renamed and the folder synced, so a crash leaves either no release or a complete one. After the last
round the files of `posts/` are packed into one, `posts.npz`, in the same way; until it has its name
the single files stay.

A release's digest depends on its content, not on its file: for each leaf a line of JSON with name,
type and shape, then its numbers (see `digest_of`).
"""

import hashlib
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.files import replacing, write_atomically
from coterie.core.tree import Tree, map_arrays, to

_MOST_THERE = 4 << 30  # bytes of releases in the memory of a GPU
_PREFIX = "leaf."  # keeps a leaf called "file" apart from the arguments of numpy.savez
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
Arrays = Mapping[str, NDArray[Any]]


def digest_of(arrays: Arrays) -> str:
    """Return the hash of names, types, shapes and numbers of a release's leaves, in order."""
    found = hashlib.sha256()
    for name, array in arrays.items():
        plain = _rows(array)
        header = {"leaf": name, "dtype": plain.dtype.str, "shape": list(plain.shape)}
        found.update(json.dumps(header).encode() + b"\n")
        found.update(plain.tobytes())
    return found.hexdigest()


class Transcript(Protocol):
    """Stores released values by index."""

    def write(self, index: int, value: Tree) -> str:
        """Store a value permanently; return its digest."""

    def read(self, index: int) -> Tree:
        """Return a stored value."""

    def has(self, index: int) -> bool:
        """Return whether this index has a stored value."""


class MemoryTranscript:
    """A transcript in memory; releases that a GPU made stay there while they are few.

    Without `keep` it has indices alone: values cannot be read.
    """

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep
        self._values: dict[int, Tree] = {}
        self._there = 0

    def write(self, index: int, value: Tree) -> str:
        """Store a value; there is no file, hence no digest."""
        if not self._keep:
            self._values[index] = {}
            return ""
        there = sum(leaf.nbytes for leaf in value.values() if leaf.is_cuda)
        self._there += there
        self._values[index] = _copied_there(value) if there else _copy(value)
        if self._there > _MOST_THERE:
            self._values = {number: to(kept, "cpu") for number, kept in self._values.items()}
            self._there = 0
        return ""

    def read(self, index: int) -> Tree:
        """Return a stored value; raise KeyError if values are not kept."""
        if not self._keep and index in self._values:
            raise KeyError(
                f"release {index} was made, but releases were not kept (Speed.keep_posts = False)"
            )
        return _copy(self._values[index])

    def has(self, index: int) -> bool:
        """Return whether this index has a stored value."""
        return index in self._values


class FolderTranscript:
    """A transcript of one `.npz` file per release in a folder; packed, of one file beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packed = folder.with_name(folder.name + ".npz")
        self._archive: zipfile.ZipFile
        self._inside: dict[int, list[str]] = {}
        # A release that is not recorded yet is made again with other noise: two noisy versions of
        # one sum cost twice. So its unfinished file is never where releases are published.
        self._unreleased = folder.with_name(".unreleased")
        self._writes = False  # a reader removes nothing: another process may be writing
        if self.packed.exists():
            self._open()
        else:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, index: int, value: Tree) -> str:
        """Store a value, atomically and synced."""
        arrays = {name: leaf.cpu().numpy() for name, leaf in value.items()}
        if not arrays:
            raise ValueError(f"release {index} has no leaf: there is nothing to store")
        if not self._writes:
            shutil.rmtree(self._unreleased, ignore_errors=True)
            self._writes = True
        self.folder.mkdir(exist_ok=True)
        self._unreleased.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self._path(index), _pack(arrays), self._unreleased)
        return digest_of(arrays)

    def read(self, index: int) -> Tree:
        """Return a stored value."""
        return map_arrays(self._arrays(index))

    def digest(self, index: int) -> str:
        """Return the digest of a stored value; empty if it cannot be read."""
        try:
            return digest_of(self._arrays(index))
        except _DAMAGED:
            return ""

    def has(self, index: int) -> bool:
        """Return whether this index has a stored value."""
        return index in self._inside or self._path(index).exists()

    def indices(self) -> set[int]:
        """Return the indices of all stored values."""
        return set(self._inside) | self._loose()

    def pack(self) -> None:
        """Write all releases into one file, then delete the single files.

        A crash leaves the single files, or the packed one and perhaps some of them.
        """
        if self._loose() - set(self._inside) or not self.packed.exists():
            with replacing(self.packed) as file, zipfile.ZipFile(file, "w") as archive:
                for index in sorted(self.indices()):
                    for name, array in self._arrays(index).items():
                        place = f"{index:06d}.{name}.npy"
                        with archive.open(place, "w", force_zip64=True) as out:
                            np.lib.format.write_array(out, _rows(array), allow_pickle=False)
            self._open()
        for done in (self.folder, self._unreleased):
            shutil.rmtree(done, ignore_errors=True)

    def _open(self) -> None:
        """List the content of the packed file; a damaged one counts as empty."""
        self._inside = {}
        try:
            # Stays open: reading its directory for every release takes quadratic time.
            self._archive = zipfile.ZipFile(self.packed)
        except _DAMAGED:
            return
        for name in self._archive.namelist():
            index, dot, _ = name.partition(".")
            if index.isdecimal() and dot:
                self._inside.setdefault(int(index), []).append(name)

    def _loose(self) -> set[int]:
        return {int(path.stem) for path in self.folder.glob("*.npz") if path.stem.isdecimal()}

    def _arrays(self, index: int) -> Arrays:
        if index in self._inside:
            return _unpack(self._archive, self._inside[index], f"{index:06d}.")
        with zipfile.ZipFile(self._path(index)) as archive:
            return _unpack(archive, archive.namelist(), _PREFIX)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npz"


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with its numbers row by row and the low byte first, as files hold them."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _unpack(archive: zipfile.ZipFile, places: Sequence[str], prefix: str) -> Arrays:
    found = {}
    for place in places:
        with archive.open(place) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        found[place.removeprefix(prefix).removesuffix(".npy")] = array
    return found


def _copied_there(value: Tree) -> Tree:
    """Return a copy on the GPU by one launch; leaves that are elsewhere are copied as well."""
    made = [torch.empty_like(leaf) for leaf in value.values()]
    torch._foreach_copy_(made, list(value.values()))
    return dict(zip(value, made, strict=True))


def _copy(value: Tree) -> Tree:
    return map_arrays({name: leaf.cpu().numpy().copy() for name, leaf in value.items()})


def _pack(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    named: dict[str, Any] = {f"{_PREFIX}{name}": _rows(array) for name, array in arrays.items()}
    np.savez(buffer, allow_pickle=False, **named)
    return buffer.getvalue()
