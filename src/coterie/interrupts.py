"""Ctrl-C stays Ctrl-C, whatever happens while it is cleaned up after; SIGTERM is as polite.

A run with a folder may end at any moment and goes on afterwards. So the first signal raises
KeyboardInterrupt where the program stands; others that follow at once change nothing, and one that
comes later, while something does not end, ends the process there and then.
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

_PATIENCE = 1.0  # seconds in which a further signal is taken for the same one
_USUAL: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_ASKED: list[tuple[int, float]] = []  # signals that asked to stop, and when


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Let an interrupt through as one, where code on its way out raised an error in its place.

    A file or a lock that is closed in the middle of something may refuse to be.
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
def stoppable(farewell: Callable[[], str]) -> Iterator[None]:
    """Take SIGINT and SIGTERM as requests to stop; in the main thread, where nobody else does.

    Args:
        farewell: Gives the line for whoever does not wait for the end.
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
            # Written past all buffers: whoever holds their locks may be what does not end.
            os.write(2, f"\n{farewell()}\n".encode())
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
            signal.signal(number, _USUAL[number])


def raise_if_asked() -> None:
    """Stop if that was asked for and got lost: an interrupt inside a destructor goes nowhere."""
    if _ASKED:
        raise KeyboardInterrupt


def stop_status() -> int:
    """Return the exit status of a program that was asked to stop: 128 and the signal's number."""
    return 128 + (_ASKED[0][0] if _ASKED else signal.SIGINT)


def _quietly(found: Any, otherwise: Callable[[Any], Any]) -> None:
    """Say nothing of an interrupt that got lost: `raise_if_asked` has it."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        otherwise(found)
