"""Files that survive a crash, and disk errors that say how to go on.

A file written here is whole or absent after a crash, and durable once the function returns. The
ledger holds every charge before its release exists, so a run that could not write resumes where it
stopped.
"""

import errno
import os
import stat
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

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


def write_atomically(path: Path, content: bytes, beside: Path | None = None) -> None:
    """Write a file so that it is whole or absent after a crash, and durable on return.

    `beside` is the folder of the unfinished file, on the same disk; None for that of the file.
    """
    with replacing(path, beside) as file:
        file.write(content)


def refuse_special(path: Path) -> None:
    """Raise ValueError for a FIFO, socket or device, also in a folder: reading may never end."""
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        mode = each.stat().st_mode if each.exists() else stat.S_IFREG
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(
                f"{each}: a FIFO, socket or device; expected a file: copy what it gives to one"
            )


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file to write in pieces; it gets its name when everything is written and synced."""
    partial = (beside or path.parent) / (path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # half a file on a full disk is in the way of what comes next
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file keeps its content, not its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def how_to_resume(folder: Path) -> str:
    """Return how to finish the run in a folder, as text."""
    if (folder / "federation.toml").exists():
        return f"it is a deployment: `coterie deploy status {folder}` shows what it needs"
    return f"resume it with `coterie run --resume {folder}`"


def is_disk_error(error: Exception) -> bool:
    """Return whether an error comes from the disk and not from the request."""
    return isinstance(error, OSError) and error.errno in {**_FULL, **_CLOSED}


@contextmanager
def explain_damage(folder: Path) -> Iterator[None]:
    """Turn what parsers raise on damaged files of a run into one line that names its folder."""
    try:
        yield
    except (RecursionError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(
            f"{folder}: a file in it is damaged ({type(error).__name__}: {error}); restore it, or "
            "start a new run in a new folder"
        ) from error


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a disk error under a run's folder into one line that says how to go on."""
    try:
        yield
    except OSError as error:
        what = _FULL.get(error.errno or 0) or _CLOSED.get(error.errno or 0)
        if what is None:
            raise
        remedy = "Free some space" if error.errno in _FULL else "Make the folder writable"
        named = f" ({error.filename})" if error.filename else ""
        begun = (folder / "plan.toml").exists()
        deployed = (folder / "federation.toml").exists()
        command = f"coterie run --resume {folder}" if begun and not deployed else "the same command"
        spent = "the ledger holds everything that was paid for" if begun else "nothing was spent"
        raise OSError(
            f"{folder}: {what}{named}; {spent}. {remedy}, then continue with: {command}"
        ) from error
