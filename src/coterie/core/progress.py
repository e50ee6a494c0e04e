"""Progress of long work: a bar in a notebook or on a terminal, and nothing anywhere else.

A notebook shows the bar through its own display, so no package of widgets is needed; a terminal
shows it on stderr. A bar is removed at the end.
"""

import sys
import time
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

_PAUSE = 0.1  # seconds between two changes of a notebook's bar


def in_notebook() -> bool:
    """Return whether this code runs in a notebook, whose output cells show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Bar:
    """A progress bar; `show` is None to show it where somebody can see it.

    `patience` are the seconds before it appears, so that short work shows none.
    """

    def __init__(self, title: str, *, show: bool | None = None, patience: float = 0.0) -> None:
        self._title, self._patience = title, patience
        self.shown = (in_notebook() or sys.stderr.isatty()) if show is None else show
        self._begun = time.monotonic()
        self._last = 0.0
        self._bar: Any = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, done: int, total: int, text: str = "") -> None:
        """Show that `done` of `total` steps are done, and what is done now."""
        now = time.monotonic()
        if not self.shown or now - self._begun < self._patience:
            return
        if self._bar is None:
            self._bar = _Cell() if in_notebook() else _Line()
        elif now - self._last < _PAUSE and 0 < done < total:
            return
        self._last = now
        self._bar.update(f"{self._title}  {text}".rstrip(), done, total)


class _Line:
    """A bar on stderr."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def update(self, text: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=text, completed=done, total=total)

    def stop(self) -> None:
        self._bar.stop()


class _Cell:
    """A bar in the output of a notebook's cell."""

    def __init__(self) -> None:
        display: Any = import_module("IPython.display")
        self._html = display.HTML
        self._handle = display.display(self._html(""), display_id=True)

    def update(self, text: str, done: int, total: int) -> None:
        self._handle.update(
            self._html(
                f'<progress value="{done}" max="{total}"></progress> {done} of {total}  '
                f"{escape(text)}"
            )
        )

    def stop(self) -> None:
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)
