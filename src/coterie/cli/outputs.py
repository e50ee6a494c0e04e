"""Where a command writes what it was asked for: checked before the work, in words of the flag."""

from pathlib import Path


def check_file(path: Path, flag: str) -> Path:
    """Return a path that a file can be written to.

    Raises:
        ValueError: If it is a folder, or lies in none that is there.
    """
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: no such folder as {path.parent}; make it first")
    return path
