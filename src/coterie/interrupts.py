"""Ctrl-C stays Ctrl-C, whatever happens while it is cleaned up after."""

from collections.abc import Iterator
from contextlib import contextmanager


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
