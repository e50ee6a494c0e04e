"""The budget register: what private runs have spent on the same data, and a declared total.

One JSON file of the user's (`register_path`), private to that user: the fingerprints in it are as
private as the rows. A run is entered with its planned guarantee, durably, before its first release
exists. What is spent stays spent: no function here removes an entry.

Two runs are on the same data if their training rows have the same fingerprint. Files that overlap,
other splits and other selections of columns, rows or clients have other fingerprints: the register
does not add those up. It does not see runs of the library, of `coterie tune` and `coterie compare`,
or of deployments either. This module imports no torch until a run is entered.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.files import refuse_special, replacing
from coterie.privacy.guarantee import Guarantee, add_up, round_up

if TYPE_CHECKING:
    from coterie.data.federated import FederatedDataset
    from coterie.plan.plan import Plan

VARIABLE = "COTERIE_BUDGET"
_FORMAT = 1
_TEXTS = ("fingerprint", "data", "run", "date", "method")
_ELSEWHERE = f"or set {VARIABLE} to another file"


def register_path() -> Path:
    """Return the path of the user's register: $COTERIE_BUDGET, or a file in the data folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given).absolute()
    if base := os.environ.get("XDG_DATA_HOME"):
        return Path(base).absolute() / "coterie" / "budget.json"
    try:
        return Path.home() / ".local" / "share" / "coterie" / "budget.json"
    except RuntimeError as error:
        raise ValueError(
            f"the budget register has no place: this user has no home folder; set {VARIABLE} to "
            "the path of a file"
        ) from error


@dataclass(frozen=True)
class Entry:
    """A private run: its data, its folder, when it was started, and its planned guarantee."""

    fingerprint: str
    data: str
    run: str
    date: str
    method: str
    guarantee: Guarantee
    stated: Mapping[str, Any] | None = field(default=None, compare=False)
    """The guarantee as it was read, which is slow to compute again."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as strict JSON."""
        found = {name: getattr(self, name) for name in _TEXTS}
        return {**found, "guarantee": self.stated or self.guarantee.to_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Entry":
        """Return the entry of this JSON; its epsilon is computed again, not read."""
        texts, stated = {name: found[name] for name in _TEXTS}, found["guarantee"]
        if not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"{', '.join(_TEXTS)}: expected text")
        return cls(**texts, guarantee=Guarantee.from_json(stated), stated=stated)


@dataclass(frozen=True)
class Total:
    """A declared total for some data."""

    epsilon: float
    data: str


@dataclass(frozen=True)
class Contents:
    """What a register holds: the entries in order, and the declared totals by fingerprint."""

    entries: tuple[Entry, ...] = ()
    totals: Mapping[str, Total] = field(default_factory=dict)

    @property
    def fingerprints(self) -> list[str]:
        """The data that has a run or a total, in the order of their first runs."""
        return list(dict.fromkeys([*(entry.fingerprint for entry in self.entries), *self.totals]))

    def on(self, fingerprint: str) -> tuple[Entry, ...]:
        """Return the entries of runs on this data."""
        return tuple(entry for entry in self.entries if entry.fingerprint == fingerprint)

    def total(self, fingerprint: str) -> float:
        """Return the declared total of this data; infinity without one."""
        found = self.totals.get(fingerprint)
        return math.inf if found is None else found.epsilon


def spent(entries: Sequence[Entry]) -> tuple[float, float]:
    """Return epsilon and delta of runs together, against clients who observe all of them.

    **Guarantee:** upper bounds (`coterie.privacy.guarantee.add_up`), if every release of these
    runs is in its plan; `tests/run/test_budget.py`.
    """
    return add_up([entry.guarantee for entry in entries])


def read_register(path: Path) -> Contents:
    """Return what a register holds; raise ValueError if it is damaged. No file: an empty one."""
    try:
        if not path.is_dir():
            refuse_special(path)
        text = path.read_bytes()
    except FileNotFoundError:
        return Contents()
    except OSError as error:
        raise _failed(path, "read", error) from error
    try:
        found = json.loads(text.decode())
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}: expected {_FORMAT}")
        entries = tuple(Entry.from_json(entry) for entry in found["runs"])
        totals = {key: _total(table) for key, table in found["totals"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: the budget register is damaged ({type(error).__name__}: {error}); restore "
            f"it, {_ELSEWHERE}, which starts without what was spent"
        ) from error
    return Contents(entries, totals)


def declare_total(path: Path, fingerprint: str, epsilon: float, data: str) -> None:
    """Declare the total epsilon of some data, instead of an earlier one; infinity withdraws it."""
    if not epsilon > 0:
        raise ValueError(f"--total {epsilon:g}: expected a positive number, or inf for no total")
    with _locked(path):
        known = read_register(path)
        totals = {key: total for key, total in known.totals.items() if key != fingerprint}
        if epsilon != math.inf:
            totals[fingerprint] = Total(epsilon, data)
        _write(path, replace(known, totals=totals))


@dataclass(frozen=True)
class Budget:
    """Enters runs in a register, and refuses those that would exceed a declared total.

    `tell` gets one line of text if earlier private runs used the same data. Not entered: runs
    without releases, with epsilon = inf or with a simulation seed, which promise nothing.
    """

    path: Path
    tell: Callable[[str], None]

    def check(self, plan: "Plan", train: "FederatedDataset", folder: Path | None) -> None:
        """Raise ValueError if a run that is not begun would exceed the total of its data."""
        if folder is None:
            raise ValueError("a run without a folder cannot be entered in a register: give folder")
        if (folder / "plan.toml").exists():
            return  # `enter` knows whether it is counted already
        if (entry := _entry(plan, train, folder, "")) is not None:
            _judge(read_register(self.path), entry)

    def enter(self, plan: "Plan", train: "FederatedDataset", folder: Path) -> None:
        """Enter a run before its first release, once; raise ValueError if it exceeds the total.

        The log of the run has to be open: the time of its first line marks the run.
        """
        from coterie.run.log import now

        entry = _entry(plan, train, folder, _begun(folder) or now())
        if entry is None:
            return
        with _locked(self.path):
            known = read_register(self.path)
            if any(_is_same_run(earlier, entry) for earlier in known.entries):
                return
            text = _judge(known, entry)
            _write(self.path, replace(known, entries=(*known.entries, entry)))
        if text:
            self.tell(text)


def remaining(total: float, epsilon: float) -> float:
    """Return what is left of a total."""
    return max(0.0, total - epsilon)


def show_remaining(total: float, epsilon: float) -> str:
    """Return what is left of a total as text, rounded down.

    >>> show_remaining(3, 1.23456), show_remaining(1, 2), show_remaining(math.inf, 2)
    ('1.7654', '0', 'inf')
    """
    left = remaining(total, epsilon)
    return f"{math.floor(left * 1e4) / 1e4:g}" if left < math.inf else "inf"


def _entry(plan: "Plan", train: "FederatedDataset", folder: Path, date: str) -> Entry | None:
    """Return the entry of a run; None if it promises nothing."""
    planned = plan.guarantee(train.spec.clients)
    if planned.simulation or not planned.events or planned.epsilon == math.inf:
        return None
    return Entry(
        fingerprint=train.fingerprint(),
        data=plan.data.name,
        run=str(folder.resolve()),
        date=date,
        method=plan.method.kind,
        guarantee=planned,
    )


def _begun(folder: Path) -> str:
    """Return when the run of a folder was started, from its log; empty if there is none."""
    from coterie.run.log import Log

    return Log(folder / "log.jsonl").begun


def _is_same_run(earlier: Entry, entry: Entry) -> bool:
    """Return whether an entry is of this run: resumed, also after its folder was moved.

    A run that is resumed in a copy of its folder makes releases of its own, and so does a new run
    in a folder that was emptied.
    """
    if (earlier.fingerprint, earlier.date) != (entry.fingerprint, entry.date):
        return False
    return earlier.run == entry.run or _begun(Path(earlier.run)) != earlier.date


def _judge(known: Contents, entry: Entry) -> str:
    """Return what to tell about earlier runs; raise ValueError if the total would be exceeded."""
    before, total = known.on(entry.fingerprint), known.total(entry.fingerprint)
    if not before and total == math.inf:
        return ""
    runs = f"{len(before)} private run{'' if len(before) == 1 else 's'}"
    epsilon, delta = spent([*before, entry])
    if epsilon > total:
        used, slack = spent(before)
        raise ValueError(
            f"the total declared for this data is epsilon {total:g}; {runs} spent at most "
            f"{round_up(used)} (delta {slack:.3g}), this one asks for "
            f"{round_up(entry.guarantee.epsilon)}, together at most {round_up(epsilon)} (delta "
            f"{delta:.3g}), and {show_remaining(total, used)} remains. Nothing was released: ask "
            "for a smaller epsilon, or declare a larger total with `coterie budget --total E "
            f"--data-fingerprint {entry.fingerprint}`"
        )
    if not before:
        return ""
    return (
        f"This data has already been used by {runs}: together with this one, epsilon at most "
        f"{round_up(epsilon)} (delta {delta:.3g})."
    )


def _total(found: Mapping[str, Any]) -> Total:
    epsilon, data = float(found["epsilon"]), str(found["data"])
    if not 0 < epsilon < math.inf:
        raise ValueError(f"total {epsilon!r}: expected a positive number")
    return Total(epsilon, data)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the register for this process: others wait, so that no entry is lost."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failed(path, "written", error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, contents: Contents) -> None:
    """Write a register, durably and readable by its user only."""
    found = {
        "format": _FORMAT,
        "totals": {key: vars(total) for key, total in contents.totals.items()},
        "runs": [entry.to_json() for entry in contents.entries],
    }
    text = json.dumps(found, indent=1, allow_nan=False)
    try:
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text.encode())
    except OSError as error:
        raise _failed(path, "written", error) from error


def _failed(path: Path, what: str, error: OSError) -> OSError:
    """Return an error that names the register; without a number, so that no run is blamed."""
    return OSError(
        f"{path}: the budget register cannot be {what} ({error.strerror or error}); make it "
        f"accessible, {_ELSEWHERE}"
    )
