"""Processes that carry a mark: found wherever they have gone, ended one by one, never by name.

Flower starts processes of its own, some in sessions of their own, and these start others. All of
them inherit the environment, so a variable in it marks a process and all its descendants, also
after their parents have ended. A process is held by a handle (`pidfd_open`) before its mark is read
for the last time, so that no signal can reach another that has got the same number since.

Needs /proc, which is Linux's.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "COTERIE_FEDERATION_PROCESS"
_PROC = Path("/proc")
_GRACE = 6.0


def marked(mark: str) -> dict[int, str]:
    """Return the processes whose mark begins so, each with its command line."""
    if not _PROC.is_dir() or not hasattr(os, "pidfd_open"):
        raise OSError("starting a federation on this machine needs Linux (/proc and pidfd_open)")
    found = {}
    for place in _PROC.iterdir():
        if place.name.isdigit() and _has(place, mark):
            with suppress(OSError):
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(place.name)] = words.decode(errors="replace").strip()
    found.pop(os.getpid(), None)
    return found


def send(process: int, mark: str, number: signal.Signals) -> bool:
    """Send a signal to a process that carries the mark, and to no other; False if it is gone."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return False
    try:
        if not _has(_PROC / str(process), mark):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def end_all(mark: str, reap: Callable[[], None], grace: float = _GRACE) -> None:
    """End all processes that carry the mark: asked first, made to after a while.

    Args:
        mark: How their marks begin.
        reap: Called again and again: collects ended children, which else stay as zombies.
        grace: Seconds that they have to end by themselves.
    """
    asked: set[int] = set()
    end = time.monotonic() + grace
    while time.monotonic() < end:
        reap()
        left = set(marked(mark))
        if not left:
            return
        for process in left - asked:  # also those that were started meanwhile
            send(process, mark, signal.SIGTERM)
        asked |= left
        time.sleep(0.05)
    while left := set(marked(mark)):
        for process in left:
            send(process, mark, signal.SIGKILL)
        reap()
        time.sleep(0.02)


def kill_all(mark: str, reap: Callable[[], None]) -> None:
    """Kill all processes that carry the mark, at once."""
    end_all(mark, reap, grace=0)


def guard(parent: int, mark: str, grace: float = _GRACE) -> None:
    """Wait for a process to end, however it does, and then end what carries the mark.

    A context manager ends its processes on errors and on Ctrl-C; this is for when it is killed.
    """
    try:
        handle = os.pidfd_open(parent)
    except OSError:
        handle = None
    if handle is not None:
        import select

        select.select([handle], [], [])
        os.close(handle)
    end_all(mark, lambda: None, grace)


def _has(place: Path, mark: str) -> bool:
    """Return whether a process carries a mark that begins so, and has not ended."""
    try:
        variables = (place / "environ").read_bytes().split(b"\0")
        ended = (place / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return False
    begun = f"{MARK}={mark}".encode()
    return not ended and any(variable.startswith(begun) for variable in variables)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
