"""The ledger: a durable record of the planned releases that are charged, before they exist.

A plan lists its events by round; the ledger admits exactly those, each index once. `charge` is on
disk before a release is computed, `release` records that it exists. After a crash

- a charged index without a release is repeated: no second charge (nobody observed the first
  attempt), fresh noise;
- a released index is never repeated: it is read from disk.

**Guarantee:** at every moment the events charged include every release that exists. Assumes that
the file system keeps what `fsync` acknowledged. Tests: tests/privacy/test_ledger.py,
tests/runs/test_kill.py.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import IO, Any

from coterie.core.files import is_disk_error, sync_folder
from coterie.privacy.events import Event, list_runs

_FILE = "plan_file"


class OverspentError(RuntimeError):
    """Raised when a release is requested that the plan does not contain."""


class LedgerError(RuntimeError):
    """Raised when a ledger on disk cannot be trusted or is in use."""


class Ledger:
    """Charges of a plan's events, one per round, in memory or in an append-only file.

    `plan` is a digest of the plan: a ledger on disk is refused to any other plan.
    """

    def __init__(self, events: Sequence[Event], path: Path | None = None, plan: str = "") -> None:
        self.events = tuple(events)
        self.charged: set[int] = set()
        self.released: dict[int, str] = {}
        self._path = path
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _lock(path.open("ab"), path)
            try:
                self._recover(path, plan)
            except BaseException:
                self.close()
                raise

    def charge(self, index: int) -> None:
        """Charge the release of this index, before it exists, or raise OverspentError."""
        self._check_open()
        if not 0 <= index < len(self.events):
            raise OverspentError(
                f"release {index} was requested, but the plan has {len(self.events)} releases "
                f"(0 to {len(self.events) - 1}); make a new plan with more rounds"
            )
        if index in self.released:
            raise OverspentError(f"release {index} exists and is never computed again")
        if index in self.charged:
            return  # a crash between charge and release: nobody observed the first attempt
        self._append({"charge": index})
        self.charged.add(index)

    def release(self, index: int, digest: str) -> None:
        """Record that the release of a charged index exists."""
        if index not in self.charged:
            raise OverspentError(f"release {index} exists but was never charged")
        if index not in self.released:
            self._append({"release": index, "sha256": digest})
            self.released[index] = digest

    def close(self) -> None:
        """Release the lock on the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, entry: dict[str, Any]) -> None:
        self._check_open()
        if self._file is None:
            return
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check_open(self) -> None:
        if self._path is not None and self._file is None:
            raise LedgerError(f"{self._path} is closed: it takes no further charge or release")

    def _recover(self, path: Path, plan: str) -> None:
        lines = path.read_bytes().split(b"\n")
        torn = lines.pop()  # b"" unless the last write was cut off
        if _is_entry(torn):
            lines.append(torn)  # only its newline is missing: it was written, and counts
        entries = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
        assert self._file is not None
        # The events are part of the header: the account must never state other noise than charged.
        header = {"plan": plan, "posts": len(self.events), "events": events_digest(self.events)}
        header |= _plan_file(path)
        if not entries:
            self._file.truncate(0)
            self._append(header)
            sync_folder(path.parent)
            return
        # Older ledgers have no hash of plan.toml, and are resumed without it.
        unsaid = {_FILE} - entries[0].keys()
        if entries[0] != {key: value for key, value in header.items() if key not in unsaid}:
            raise LedgerError(
                f"{path} belongs to another plan, or plan.toml was edited; resume with the plan it "
                "was started with, or choose a new folder"
            )
        if torn:
            self._file.write(b"\n")  # a line that was cut stays, and reads as void
            self._file.flush()
        for entry in entries[1:]:
            self._take(path, entry)
        self._check(path)

    def _take(self, path: Path, entry: dict[str, Any]) -> None:
        if entry.keys() == {"charge"} and type(entry["charge"]) is int:
            self.charged.add(entry["charge"])
        elif (
            entry.keys() == {"release", "sha256"}
            and type(entry["release"]) is int
            and isinstance(entry["sha256"], str)
        ):
            self.released[entry["release"]] = entry["sha256"]
        elif entry.keys() != {"void"}:
            raise LedgerError(f"{path} holds an entry that is neither charge nor release: {entry}")

    def _check(self, path: Path) -> None:
        if not (set(self.released) <= self.charged <= set(range(len(self.events)))):
            raise LedgerError(f"{path} records releases that it never charged; it was altered")
        if set(self.released) != set(range(len(self.released))):
            raise LedgerError(f"{path} lacks an early release; it was altered")


def events_digest(events: Sequence[Event]) -> str:
    """Return the hash of a plan's events, as in the first line of its ledger."""
    named = [
        {key: float(value) if isinstance(value, Real) else value for key, value in run.items()}
        for run in list_runs(events)
    ]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def _plan_file(path: Path) -> dict[str, str]:
    """Return the hash of plan.toml next to a ledger, so that later edits are detected."""
    try:
        return {_FILE: hashlib.sha256((path.parent / "plan.toml").read_bytes()).hexdigest()}
    except FileNotFoundError:
        return {}  # the plan exists only in memory


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process, from its plan to its result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        if is_disk_error(error) and (folder / "plan.toml").exists():
            raise  # a run to be resumed cannot use another folder
        raise OSError(
            f"{folder}: cannot be made a run folder ({error.strerror}); choose another --out"
        ) from error
    with _lock(file, folder):
        yield


def _lock(file: IO[bytes], what: Path) -> IO[bytes]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise LedgerError(
            f"{what} is in use by another process; wait for it to end or choose another --out"
        ) from error
    return file


def _is_entry(line: bytes) -> bool:
    """Return whether a line without its newline is a whole entry."""
    try:
        return isinstance(json.loads(line.decode()), dict)
    except ValueError:
        return False


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode())  # as text: bytes would be guessed to be UTF-16
    except ValueError:
        # A line cut off by a crash was never acknowledged; anything longer-lived is an alteration.
        entry = {"void": line.decode(errors="replace")}
    if not isinstance(entry, dict):
        raise LedgerError(f"{path}, line {number}: expected an entry, found {line[:80]!r}")
    return entry
