"""The log of a run, and the versions that computed it."""

import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.core.environment import code_of, version_of
from coterie.engine.simulate import Observer, Progress
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee

_PACKAGES = ("coterie", "dp-accounting", "numpy", "scipy", "torch")
_MARKS = 8


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute a run, and which code of coterie runs."""
    found = {name: version_of(name) or "not installed" for name in _PACKAGES}
    return {"python": platform.python_version(), **found, **code_of("coterie")}


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Log:
    """The log of a run, `log.jsonl`: one JSON object per event, in order, only ever appended.

    Events are started, resumed, round, packed, finished, interrupted and failed. The log is
    private: how long a round took depends on who took part and on their rows, which no epsilon
    covers. It never holds rows or a seed. Lines that are not synced may be lost in a crash: the
    ledger, not the log, is the account.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        held = path.read_bytes() if path.exists() else b""
        self.begun = _first(held)
        self._torn = bool(held) and not held.endswith(b"\n")  # a crash cut the last line off

    def note(self, event: str, *, sync: bool = False, **facts: Any) -> None:
        """Add an event."""
        line = json.dumps({"time": now(), "event": event, **facts}, allow_nan=False)
        with self.path.open("ab") as file:
            file.write((b"\n" if self._torn else b"") + line.encode() + b"\n")
            self._torn = False
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def open(self) -> None:
        """Log that a run is started or resumed."""
        self.note("resumed" if self.begun else "started", sync=True, versions=versions())
        self.begun = self.begun or _first(self.path.read_bytes())

    @contextmanager
    def until_end(self, *, reasons: bool = False) -> Iterator[None]:
        """Log the interrupt or error that ends a run early.

        `reasons` adds the text of an error: only where no error can quote rows.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.note("interrupted", sync=True)
            raise
        except Exception as error:
            why = {"reason": str(error)[:500]} if reasons else {}
            with suppress(OSError):  # a full disk must not hide the error
                self.note("failed", sync=True, kind=type(error).__name__, **why)
            raise


class Logged:
    """An observer that logs every round and then calls another observer.

    Every eighth of the rounds it logs epsilon so far too, where that is cheap to compute: for many
    unlike rounds with hidden cohorts it is not.
    """

    def __init__(self, log: Log, guarantee: Guarantee, then: Observer | None = None) -> None:
        self._log, self._guarantee, self._then = log, guarantee, then
        posts = len(guarantee.events)
        cheap = guarantee.participation.rate == 1 or len(set(guarantee.events)) <= _MARKS
        parts = range(1, _MARKS + 1) if cheap else ()
        self._marks = {math.ceil(posts * part / _MARKS) for part in parts}

    def __call__(self, progress: Progress) -> None:
        """Log a round."""
        facts: dict[str, Any] = {"round": progress.round}
        if progress.round in self._marks:
            facts["epsilon"] = self._spent(progress.round)
        self._log.note("round", **facts)
        if self._then is not None:
            self._then(progress)

    def _spent(self, round: int) -> float | str:
        promised = self._guarantee
        (spent,) = epsilon_by_round(
            promised.events, promised.participation, promised.relation, promised.delta, [round]
        )
        return "inf" if spent == math.inf else spent


def _first(held: bytes) -> str:
    """Return the time of the first line; empty if none can be read."""
    try:
        line: Mapping[str, Any] = json.loads(held.partition(b"\n")[0].decode())
        return str(line["time"])
    except (ValueError, KeyError, TypeError):
        return ""
