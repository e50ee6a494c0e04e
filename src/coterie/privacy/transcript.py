"""The public transcript: every post, kept so that what was released can be read again.

A post is out when its file has its final name: it is written under another name, synced, renamed
and the folder synced, so a crash leaves either no post or a whole one.
"""

import hashlib
import io
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from coterie.privacy.files import write_atomically
from coterie.tree import Tree, map_arrays

_PREFIX = "leaf."  # keeps a leaf called "file" apart from the arguments of numpy.savez


class Transcript(Protocol):
    """Keeps posted values by index."""

    def write(self, index: int, value: Tree) -> str:
        """Keep a value for good; give its digest."""

    def read(self, index: int) -> Tree:
        """Read a kept value."""

    def has(self, index: int) -> bool:
        """Say whether a value is kept under this index."""


class MemoryTranscript:
    """A transcript that lives as long as the process."""

    def __init__(self) -> None:
        self._values: dict[int, Tree] = {}

    def write(self, index: int, value: Tree) -> str:
        """Keep a value; there is no file, hence no digest."""
        self._values[index] = _copy(value)
        return ""

    def read(self, index: int) -> Tree:
        """Read a kept value."""
        return _copy(self._values[index])

    def has(self, index: int) -> bool:
        """Say whether a value is kept under this index."""
        return index in self._values


class FolderTranscript:
    """A transcript of one `.npz` file per post."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()  # a post that a crash cut off was never out; nobody shall read it

    def write(self, index: int, value: Tree) -> str:
        """Keep a value, atomically and synced."""
        packed = _pack(value)
        write_atomically(self._path(index), packed)
        return hashlib.sha256(packed).hexdigest()

    def read(self, index: int) -> Tree:
        """Read a kept value."""
        with np.load(self._path(index), allow_pickle=False) as arrays:
            return {
                name.removeprefix(_PREFIX): torch.from_numpy(arrays[name]) for name in arrays.files
            }

    def digest(self, index: int) -> str:
        """Hash a kept file."""
        return hashlib.sha256(self._path(index).read_bytes()).hexdigest()

    def has(self, index: int) -> bool:
        """Say whether a value is kept under this index."""
        return self._path(index).exists()

    def indices(self) -> set[int]:
        """Give the indices of all kept values."""
        return {int(path.stem) for path in self.folder.glob("*.npz") if path.stem.isdecimal()}

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npz"


def _copy(value: Tree) -> Tree:
    return map_arrays({name: leaf.numpy().copy() for name, leaf in value.items()})


def _pack(value: Tree) -> bytes:
    buffer = io.BytesIO()
    arrays = {f"{_PREFIX}{name}": leaf.numpy() for name, leaf in value.items()}
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()
