"""A disk that is full, or that may not be written, said in one line, with what to do about it.

Whatever a run had on disk stays as it was: the ledger has every charge before its post exists, so a
run that could not go on writing goes on where it stood, once it can.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of disk space is used up",
    errno.EFBIG: "a file has reached the largest size allowed here",
}
_CLOSED = {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "there is no permission to write",
    errno.EPERM: "there is no permission to write",
    errno.EIO: "the disk reports an error",
}


def how_to_finish(folder: Path) -> str:
    """Say what finishes the run in a folder: the command that began it."""
    if (folder / "federation.toml").exists():
        return f"it is a deployment: `coterie deploy status {folder}` says what it needs to go on"
    return f"resume it with `coterie run --resume {folder}`"


def is_of_disk(error: Exception) -> bool:
    """Return whether an error is of the disk, and not of what was asked of it."""
    return isinstance(error, OSError) and error.errno in {**_FULL, **_CLOSED}


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an error of the disk under a run's folder into one line that says how to go on."""
    try:
        yield
    except OSError as error:
        what = _FULL.get(error.errno or 0) or _CLOSED.get(error.errno or 0)
        if what is None:
            raise
        remedy = "make room" if error.errno in _FULL else "make the folder writable"
        named = f" ({error.filename})" if error.filename else ""
        begun = (folder / "plan.toml").exists()
        deployed = (folder / "federation.toml").exists()
        onward = f"coterie run --resume {folder}" if begun and not deployed else "the same command"
        spent = (
            "what is paid for is in the ledger, and nothing of it is lost"
            if begun
            else ("nothing was spent")
        )
        raise OSError(
            f"{folder}: {what}{named}; {spent}: {remedy}, then go on with: {onward}"
        ) from error
