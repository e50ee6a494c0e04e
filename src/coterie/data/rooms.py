"""Room for the arrays of a data set: in memory, or in a folder that appears whole or not at all."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.federated import DataError

_FILES = ("features.npy", "targets.npy", "split.npy")
Room = Callable[[str, tuple[int, ...], Any], NDArray[Any]]
"""Makes an array of (name, shape, type)."""


@contextmanager
def room_for(folder: str | None) -> Iterator[Room]:
    """Make arrays in memory, or in a folder that appears when all went well."""
    if folder is None:
        yield _in_memory
        return
    final = Path(folder)
    if final.is_file() or not final.parent.is_dir():
        raise DataError(f"memory_map = {folder!r}: expected a folder, in a folder that exists")
    if final.exists() and {path.name for path in final.iterdir()} - set(_FILES):
        raise DataError(f"memory_map = {folder!r} holds other files; name a new or empty folder")
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield lambda name, shape, dtype: _mapped(work / f"{name}.npy", shape, dtype)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise DataError(
            f"no memory for {name} of shape {shape}; set memory_map to hold them in a folder"
        ) from None


def _mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # a full disk must be an error here, not a bus error at the first write
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                size = path.stat().st_size / 1e9
                raise DataError(f"{path.parent}: no room for {size:.1f} GB ({error})") from error
    return array


def let_go(features: NDArray[Any]) -> int:
    """Hand written pages of a memory map to the system: they are in its file, or on their way."""
    mapped = getattr(features, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
    return 0
