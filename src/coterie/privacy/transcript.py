"""The public transcript: every post, kept so that what was released can be read again.

A post is out when its file has its final name: it is written under another name, synced, renamed
and the folder synced, so a crash leaves either no post or a whole one.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from coterie.tree import Tree


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
        self._values[index] = value
        return ""

    def read(self, index: int) -> Tree:
        """Read a kept value."""
        return self._values[index]

    def has(self, index: int) -> bool:
        """Say whether a value is kept under this index."""
        return index in self._values


class FolderTranscript:
    """A transcript of one `.npz` file per post."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, index: int, value: Tree) -> str:
        """Keep a value, atomically and synced."""
        packed = _pack(value)
        write_atomically(self._path(index), packed)
        return hashlib.sha256(packed).hexdigest()

    def read(self, index: int) -> Tree:
        """Read a kept value."""
        with np.load(self._path(index), allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def digest(self, index: int) -> str:
        """Hash a kept file."""
        return hashlib.sha256(self._path(index).read_bytes()).hexdigest()

    def has(self, index: int) -> bool:
        """Say whether a value is kept under this index."""
        return self._path(index).exists()

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npz"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it is whole or absent, and stays once this returns."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _pack(value: Tree) -> bytes:
    buffer = io.BytesIO()
    arrays = {name: leaf.numpy() for name, leaf in value.items()}
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()
