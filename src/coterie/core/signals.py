"""SIGINT and SIGTERM end a run cleanly, once.

A run with a folder may end at any moment and resumes afterwards. The first signal raises
KeyboardInterrupt where the program stands. Signals within a second of it change nothing. A later
one, while the run does not end, ends the process at once. When the run has ended, further signals
are ignored until the process is gone: it exits with the status of the first one.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PATIENCE = 1.0  # seconds in which a further signal counts as the same request
_USUAL: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_ASKED: list[tuple[int, float]] = []  # signals that asked to stop, and when


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt where clean-up code replaced it with an error of its own.

    A file or a lock that is closed in the middle of an operation may raise.
    """
    try:
        yield
    except Exception as error:
        before: BaseException | None = error
        while before is not None:
            if isinstance(before, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            before = before.__context__
        raise


@contextmanager
def stoppable(last_line: Callable[[], str]) -> Iterator[None]:
    """Take SIGINT and SIGTERM as requests to stop, in the main thread, where nobody else does.

    Args:
        last_line: Returns the line to print when the process must end at once.
    """
    _ASKED.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        _ASKED.append((number, time.monotonic()))
        if len(_ASKED) == 1:
            raise KeyboardInterrupt
        if time.monotonic() - _ASKED[0][1] > _PATIENCE:
            # Unbuffered: the code that does not end may hold the locks of the buffers.
            os.write(2, f"\n{last_line()}\n".encode())
            os._exit(stop_status())

    # A shell starts background jobs with SIGINT ignored: that stays so.
    taken = [number for number, usual in _USUAL.items() if signal.getsignal(number) is usual]
    hook = sys.unraisablehook
    for number in taken:
        signal.signal(number, ask)
    sys.unraisablehook = lambda found: _quietly(found, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            # The process is about to exit with the status of the first signal. A handler of
            # Python's would be reset to the default when the interpreter ends; this one stays.
            signal.signal(number, signal.SIG_IGN if _ASKED else _USUAL[number])


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt if a request to stop got lost inside a destructor."""
    if _ASKED:
        raise KeyboardInterrupt


def stop_status() -> int:
    """Return the exit status of a stopped program: 128 plus the number of the first signal."""
    return 128 + (_ASKED[0][0] if _ASKED else signal.SIGINT)


def _quietly(found: Any, otherwise: Callable[[Any], Any]) -> None:
    """Report an unraisable error, unless it is an interrupt: `raise_if_stopped` handles those."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        otherwise(found)
