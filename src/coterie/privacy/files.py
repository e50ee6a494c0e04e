"""Files that survive: whole or absent after a crash, and there once a function has returned."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it is whole or absent, and stays once this returns."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file keeps its content, not its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
