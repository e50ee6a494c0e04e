"""Faults of a disk, put into a process: at its n-th act of writing it is full, closed, or the end.

Acts are what changes a file system: opening to write, writing, syncing, renaming, removing, making
folders, reserving room. Counted are those under one folder.
"""

import builtins
import errno
import io
import os
import signal

_WRITES = set("wax+")


class _Count:
    """Counts acts, and does the fault when its time has come; a full disk stays full."""

    def __init__(self, kind, at, under, log):
        self.kind, self.at, self.under, self.log = kind, at, under, log
        self.seen = 0

    def concerns(self, path):
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(self.under)
        except TypeError:
            return False

    def __call__(self, act, path, half=None, frees=False):
        self.seen += 1
        if self.log is not None:
            os.write(self.log, f"{act} {os.path.basename(os.fsdecode(path))}\n".encode())
        if self.kind == "none" or self.seen < self.at or (frees and self.kind == "ENOSPC"):
            return
        if half is not None and self.seen == self.at:
            half()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number), os.fsdecode(path))


class _File:
    """A file whose writes are counted."""

    def __init__(self, file, path, count):
        self._file, self._path, self._count = file, path, count

    def write(self, data):
        def half():
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._count("write", self._path, half)
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *told):
        return self._file.__exit__(*told)

    def __iter__(self):
        return iter(self._file)


def install(kind, at, under, log=None):
    """Put a fault into this process: "ENOSPC", "EROFS", "kill" or "none", at the n-th act."""
    handle = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count = _Count(kind, at, os.path.abspath(under), handle)
    builtins.open = io.open = _counting_open(count, io.open)
    for name in ("fsync", "mkdir", "posix_fallocate"):
        _count_calls(count, name, frees=False)
    for name in ("replace", "rename", "unlink", "rmdir", "remove"):
        _count_calls(count, name, frees=True)


def _counting_open(count, opened):
    def open_(path, mode="r", *more, **named):
        if not (isinstance(mode, str) and _WRITES & set(mode)) or not count.concerns(path):
            return opened(path, mode, *more, **named)
        count("open", path)
        return _File(opened(path, mode, *more, **named), path, count)

    return open_


def _count_calls(count, name, frees):
    original = getattr(os, name)

    def wrapped(path, *more, **named):
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        if count.concerns(where):
            count(name, where, frees=frees)
        return original(path, *more, **named)

    setattr(os, name, wrapped)
