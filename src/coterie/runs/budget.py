"""The budget register: what private runs have spent on the same clients, and declared totals.

One JSON file of the user's (`register_path`), private to that user. A run is entered with its
planned guarantee, durably, before its first release exists. What is spent stays spent: no function
here removes an entry.

**The same client.** A client is known by its name, within a population. Runs on other columns, rows
or splits of a file, on a copy or another format of it, or on some of its clients have clients in
common, and add up for these: a client has spent the composition of the runs that it took part in.
A population is declared (`data.population`). Without one, all files share a population, so the same
name always is the same client there: a sum may be too large, and is never too small. Each built-in
dataset has a population of its own. Names are kept as hashes under a secret of the register.

Not recognised: clients under other names, the same rows under another client column, a person at
several clients, and runs of other users or machines. Not entered: what promises nothing (no
releases, epsilon = inf, a simulation seed: tuning without --charge and audits are simulations), and
`simulate` and the estimators, which are steps of a user's own program.

This module imports no torch until a run is entered.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.files import refuse_special, replacing, write_atomically
from coterie.privacy.events import default_delta
from coterie.privacy.guarantee import Guarantee, add_up, compose, round_up, show_delta
from coterie.privacy.reviewer import mu_under

if TYPE_CHECKING:
    from coterie.data.config import DataConfig
    from coterie.planning.plan import Plan

VARIABLE = "COTERIE_BUDGET"
MARK = "budget.json"
"""The file of a run's folder that connects it to its entry; private, as the register is."""
_FORMAT = 2
_TEXTS = ("id", "fingerprint", "data", "run", "date", "method")
_ELSEWHERE = f"or set {VARIABLE} to another file"
_WHOLE = re.compile(r"\+?0*(\d+)(\.0*)?", re.ASCII)
_KEY = 16  # hexadecimal digits that stand for a client
_NAMED = 3  # data sets named in a message


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


# --- clients ------------------------------------------------------------------


def population_of(data: "DataConfig") -> str:
    """Return the population in which the names of these clients are compared."""
    from coterie.data.datasets import DATASETS

    if data.population is not None:
        return data.population
    if data.name not in DATASETS:
        return ""
    options = f" {json.dumps(dict(data.options), sort_keys=True)}" if data.options else ""
    return f"{data.name}{options}"


def canonical(name: str) -> str:
    """Return a client's name without what formats and spreadsheets change in it.

    >>> canonical(" North  Hospital"), canonical("007"), canonical("7.0"), canonical("7.5")
    ('north hospital', '7', '7', '7.5')
    """
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


@dataclass(frozen=True)
class Group:
    """Clients of one population, by the keyed hashes of their names."""

    population: str
    keys: frozenset[str]

    def common(self, other: "Group") -> "Group":
        """Return the clients of both."""
        same = self.population == other.population
        return Group(self.population, self.keys & other.keys if same else frozenset())


@dataclass(frozen=True)
class Spending:
    """What a run is about to spend, and on which clients."""

    guarantee: Guarantee
    clients: Sequence[str]
    population: str
    data: str
    method: str


def spending_of(plan: "Plan", clients: Sequence[str], planned: Guarantee) -> Spending | None:
    """Return what a run, or several of one plan, will spend; None for what promises nothing."""
    if planned.simulation or not planned.events or planned.epsilon == math.inf:
        return None
    return Spending(planned, clients, population_of(plan.data), plan.data.name, plan.method.kind)


# --- what a register holds ----------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A private run: its clients, its folder, when it was entered, and its planned guarantee."""

    id: str
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
    """A declared total for some clients: epsilon, and the delta at which all runs are counted."""

    epsilon: float
    delta: float
    data: str


@dataclass(frozen=True)
class Account:
    """What clients have spent: the most of any of them, and what is left of a total."""

    entries: tuple[Entry, ...] = ()
    touched: int = 0  # how many of these clients took part in any of these runs
    epsilon: float = 0.0
    delta: float = 0.0
    mu: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the sums as strict JSON; an infinite epsilon is the string "inf"."""
        epsilon = self.epsilon if self.epsilon < math.inf else "inf"
        return {"epsilon": epsilon, "delta": self.delta, "mu": self.mu}


@dataclass(frozen=True)
class Contents:
    """What a register holds: clients and totals by fingerprint, and the entries in order."""

    secret: str = ""
    groups: Mapping[str, Group] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    totals: Mapping[str, Total] = field(default_factory=dict)

    @property
    def fingerprints(self) -> list[str]:
        """The clients that have a run or a total, in the order of their first runs."""
        return list(dict.fromkeys([*(entry.fingerprint for entry in self.entries), *self.totals]))

    def group(self, clients: Sequence[str], population: str) -> Group:
        """Return clients as this register knows them."""
        key = bytes.fromhex(self.secret)
        names = {canonical(name).encode() for name in clients}
        hashes = (hashlib.blake2b(name, key=key, digest_size=_KEY // 2) for name in names)
        return Group(population, frozenset(one.hexdigest() for one in hashes))

    def fingerprint(self, group: Group) -> str:
        """Return a keyed hash of a population and its clients."""
        text = "\0".join([group.population, *sorted(group.keys)]).encode()
        return hashlib.blake2b(text, key=bytes.fromhex(self.secret), digest_size=16).hexdigest()

    def on(self, group: Group) -> tuple[Entry, ...]:
        """Return the entries of runs with any of these clients."""
        shared = {name for name, one in self.groups.items() if group.common(one).keys}
        return tuple(entry for entry in self.entries if entry.fingerprint in shared)

    def delta(self, name: str) -> float:
        """Return the delta at which the runs of these clients are counted."""
        if (total := self.totals.get(name)) is not None:
            return total.delta
        return max((entry.guarantee.delta for entry in self.on(self.groups[name])), default=0.0)

    def entry_of(self, folder: Path) -> Entry:
        """Return the entry of the run in a folder, also if it was moved."""
        mark, run = _read_mark(folder).get("id"), str(folder.resolve())
        for entry in reversed(self.entries):
            if entry.id == mark or entry.run == run:
                return entry
        raise ValueError(
            f"{folder}: not in the budget register; expected the folder of a private run that this "
            "user started on this machine"
        )

    def account(self, group: Group, delta: float, also: Sequence[Guarantee] = ()) -> Account:
        """Return what these clients have spent at a delta, and would with further runs of all.

        **Guarantee:** epsilon is an upper bound for each of these clients, against other clients
        who observe all of the runs that it took part in (`guarantee.add_up`), if every release of
        these runs is in its plan. `tests/runs/test_budget.py`.
        """
        entries, attended = self.on(group), {frozenset[str](): group.keys}
        for name in {entry.fingerprint for entry in entries}:
            attended = _divide(attended, name, self.groups[name].keys)
        touched = sum(len(keys) for names, keys in attended.items() if names)
        found = Account(entries, touched, delta=delta)
        # Of two clients, one of whom took part in all runs of the other, that one has spent more.
        for most in [one for one in attended if not any(one < other for other in attended)]:
            of = [entry.guarantee for entry in entries if entry.fingerprint in most]
            epsilon, _ = add_up([*of, *also], delta)
            if epsilon >= found.epsilon:
                found = replace(found, epsilon=epsilon, mu=_mu([*of, *also]))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the contents as strict JSON."""
        groups = {
            name: {"population": one.population, "clients": "".join(sorted(one.keys))}
            for name, one in self.groups.items()
        }
        totals = {name: vars(total) for name, total in self.totals.items()}
        runs = [entry.to_json() for entry in self.entries]
        return {
            "format": _FORMAT, "secret": self.secret, "groups": groups, "totals": totals,
            "runs": runs,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Contents":
        """Return the contents of this JSON; raise an error that says what is wrong with it."""
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}: expected {_FORMAT}")
        if len(bytes.fromhex(found["secret"])) != 32:
            raise ValueError("secret: expected 64 hexadecimal digits")
        groups = {name: _read_group(table) for name, table in found["groups"].items()}
        totals = {name: _read_total(table) for name, table in found["totals"].items()}
        entries = tuple(Entry.from_json(entry) for entry in found["runs"])
        known = cls(found["secret"], groups, entries, totals)
        if absent := set(known.fingerprints) - set(groups):
            raise ValueError(f"groups: {absent.pop()!r} is missing")
        return known


def _divide(
    attended: Mapping[frozenset[str], frozenset[str]], name: str, keys: frozenset[str]
) -> dict[frozenset[str], frozenset[str]]:
    """Return clients by the groups that they belong to, with one more group."""
    inside = {names | {name}: some & keys for names, some in attended.items()}
    parts = {**inside, **{names: some - keys for names, some in attended.items()}}
    return {names: some for names, some in parts.items() if some}


def _mu(guarantees: Sequence[Guarantee]) -> float | None:
    """Return the mu of all releases together, if they are one Gaussian release."""
    parts = compose(guarantees)
    return mu_under(parts[0], parts[0].relation) if len(parts) == 1 else None


def _read_group(found: Mapping[str, Any]) -> Group:
    population, text = found["population"], found["clients"]
    if not isinstance(population, str) or not re.fullmatch(rf"([0-9a-f]{{{_KEY}}})*", text):
        raise ValueError("groups: expected a population and hashes of clients")
    return Group(population, frozenset(text[at : at + _KEY] for at in range(0, len(text), _KEY)))


def _read_total(found: Mapping[str, Any]) -> Total:
    epsilon, delta, data = float(found["epsilon"]), float(found["delta"]), str(found["data"])
    if not 0 < epsilon < math.inf or not 0 < delta < 1:
        raise ValueError(f"total {epsilon!r} at delta {delta!r}: expected positive numbers")
    return Total(epsilon, delta, data)


# --- the file -----------------------------------------------------------------


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
        return Contents.from_json(json.loads(text.decode()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: the budget register is damaged, or of a newer version "
            f"({type(error).__name__}: {error}); restore it, {_ELSEWHERE}, which starts "
            "without what was spent"
        ) from error


@contextmanager
def _held(path: Path) -> Iterator[tuple[Path, Contents]]:
    """Hold a register for this process and yield its contents: others wait, so none is lost."""
    try:
        path = path.resolve()  # a link stays one
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError) as error:
        raise _failed(path, "written", error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise _failed(path, "locked", error) from error
        known = read_register(path)
        yield path, known if known.secret else replace(known, secret=secrets.token_hex(32))
    finally:
        os.close(handle)


def _write(path: Path, contents: Contents) -> None:
    """Write a register, durably and readable by its user only."""
    text = json.dumps(contents.to_json(), indent=1, allow_nan=False)
    try:
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text.encode())
    except OSError as error:
        raise _failed(path, "written", error) from error


def _failed(path: Path, what: str, error: Exception) -> OSError:
    """Return an error that names the register; without a number, so that no run is blamed."""
    why = getattr(error, "strerror", None) or error
    where = "; a register is on a disk with file locks" if what == "locked" else ""
    return OSError(
        f"{path}: the budget register cannot be {what} ({why}{where}); make it accessible, "
        f"{_ELSEWHERE}"
    )


def declare_total(
    path: Path, clients: str | tuple[Sequence[str], str], epsilon: float, data: str
) -> str:
    """Declare the total epsilon of some clients, instead of an earlier one; return who they are.

    `clients` is a fingerprint of the register, or names and their population. Infinity withdraws a
    total. It holds at the smallest delta of the runs so far, else at the usual one, so that no
    larger delta of a later run stretches it.
    """
    if not epsilon > 0:
        raise ValueError(f"--total {epsilon:g}: expected a positive number, or inf for no total")
    with _held(path) as (place, known):
        if isinstance(clients, str):
            name, groups = clients, dict(known.groups)
        else:
            group = known.group(*clients)
            name = known.fingerprint(group)
            groups = {**known.groups, name: group}
        totals = {key: total for key, total in known.totals.items() if key != name}
        if epsilon != math.inf:
            deltas = [entry.guarantee.delta for entry in known.on(groups[name])]
            usual = default_delta(max(len(groups[name].keys), 1))
            delta = min((delta for delta in deltas if delta > 0), default=usual)
            totals[name] = Total(epsilon, delta, data)
        _write(place, replace(known, groups=groups, totals=totals))
    return name


def declare_population(path: Path, run: Path, population: str) -> str:
    """Move the clients of a run to another population; return their new fingerprint."""
    with _held(path) as (place, known):
        entry = known.entry_of(run)
        group = Group(population, known.groups[entry.fingerprint].keys)
        name = known.fingerprint(group)
        moved = replace(entry, fingerprint=name)
        entries = tuple(moved if one == entry else one for one in known.entries)
        _write(place, replace(known, groups={**known.groups, name: group}, entries=entries))
    return name


# --- runs ---------------------------------------------------------------------


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # the caller of the run


@dataclass(frozen=True)
class Budget:
    """Enters runs in a register, and refuses those that would exceed a declared total.

    `path` is None for the user's register; `tell` gets a line of text if earlier private runs used
    the same clients.
    """

    path: Path | None = None
    tell: Callable[[str], None] = _warn

    @property
    def register(self) -> Path:
        """The path of the register."""
        return self.path or register_path()

    @property
    def has_totals(self) -> bool:
        """Whether a total is declared for any clients."""
        return bool(read_register(self.register).totals)

    def check(self, *runs: Spending | None) -> str:
        """Return what was spent before and would be with these runs, as text; empty if nothing was.

        Raise ValueError if runs on the same clients would exceed a total, all together, and OSError
        if the register cannot be used. Nothing is entered.
        """
        asked = [run for run in runs if run is not None]
        if not asked:
            return ""
        with _held(self.register) as (_, known):
            group = known.group(asked[0].clients, asked[0].population)
            return _judge(known, group, asked)[1]

    def enter(self, run: Spending | None, folder: Path | None) -> dict[str, Any] | None:
        """Enter a run before its first release, once; return what was spent then, with this run.

        Raise ValueError if a total would be exceeded. The folder, if there is one, is marked: a run
        that is resumed is known by its mark.
        """
        if run is None:
            return None
        with _held(self.register) as (place, known):
            group, mark = known.group(run.clients, run.population), _read_mark(folder)
            name = known.fingerprint(group)
            made = Entry(
                id=secrets.token_hex(8),
                fingerprint=name,
                data=run.data,
                run="" if folder is None else str(folder.resolve()),
                date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                method=run.method,
                guarantee=run.guarantee,
            )
            same = [one for one in known.entries if _is_same_run(one, made, mark)]
            # Its population may have been declared since.
            if any(known.groups[one.fingerprint].keys == group.keys for one in same):
                return dict(mark["spent"])
            spent, text = _judge(known, group, [run])
            if folder is not None:  # first: an entry without its mark would be made again
                found = json.dumps({"id": made.id, "spent": spent}, allow_nan=False)
                write_atomically(folder / MARK, found.encode())
            groups = {**known.groups, name: group}
            _write(place, replace(known, groups=groups, entries=(*known.entries, made)))
        if text:
            self.tell(text)
        return spent


REGISTER = Budget()
"""The user's register."""


def _read_mark(folder: Path | None) -> dict[str, Any]:
    """Return the mark of a run's folder; empty if there is none that can be read."""
    try:
        found = json.loads((folder / MARK).read_bytes()) if folder is not None else {}
        return {"id": str(found["id"]), "spent": dict(found["spent"])} if found else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def read_spent(folder: Path) -> dict[str, Any] | None:
    """Return what was spent when the run in a folder was entered; None if it was not."""
    return _read_mark(folder).get("spent")


def _is_same_run(earlier: Entry, made: Entry, mark: Mapping[str, Any]) -> bool:
    """Return whether an entry is of the run in a marked folder: resumed, also after a move.

    A run that is resumed in a copy of its folder makes releases of its own, and so does a new run
    in a folder that was emptied.
    """
    if earlier.id != mark.get("id") or earlier.guarantee != made.guarantee:
        return False
    return earlier.run == made.run or _read_mark(Path(earlier.run)).get("id") != earlier.id


def _judge(known: Contents, group: Group, runs: Sequence[Spending]) -> tuple[dict[str, Any], str]:
    """Return what these clients will have spent, and text on earlier runs, if there are any.

    Raise ValueError if runs of these clients would exceed the total of any of them.
    """
    asked, earlier = [run.guarantee for run in runs], known.on(group)
    _refuse(known, group, runs)
    delta = max(one.delta for one in (*asked, *(entry.guarantee for entry in earlier)))
    before, after = known.account(group, delta), known.account(group, delta, asked)
    text = _describe(before, after, group, runs) if earlier else ""
    return {"runs": len(earlier) + len(runs), **after.to_json()}, text


def _refuse(known: Contents, group: Group, runs: Sequence[Spending]) -> None:
    """Raise ValueError if runs of these clients would exceed the total of any of them."""
    asked = [run.guarantee for run in runs]
    for name, total in known.totals.items():
        both = known.groups[name].common(group)
        after = known.account(both, total.delta, asked)
        if not both.keys or after.epsilon <= total.epsilon:
            continue
        before, (alone, _) = known.account(both, total.delta), add_up(asked, total.delta)
        many = len(before.entries)
        these = "this one asks" if len(asked) == 1 else f"these {len(asked)} runs ask"
        raise ValueError(
            f"the total declared for these clients is epsilon {total.epsilon:g} at delta "
            f"{show_delta(total.delta)}; {_runs(many)} spent at most {round_up(before.epsilon)}, "
            f"{these} for {round_up(alone)}, together at most {round_up(after.epsilon)}, and "
            f"{show_remaining(total.epsilon, before.epsilon)} remains. Nothing was released: ask "
            "for a smaller epsilon, or declare a larger total with `coterie budget --total E "
            f"--data-fingerprint {name}`.{_equal_names(before, runs)}"
        )


def _describe(before: Account, after: Account, group: Group, runs: Sequence[Spending]) -> str:
    """Return what earlier runs on the same clients have spent, and with further ones, as text."""
    names = _data_of(before)
    more = ", ..." if len(names) > _NAMED else ""
    some = "" if before.touched == len(group.keys) else f"{before.touched} of "
    text = (
        f"{_runs(len(before.entries))} on {some}these clients ({', '.join(names[:_NAMED])}{more}): "
        f"together epsilon at most {round_up(before.epsilon)} so far, {round_up(after.epsilon)} "
        f"with {'this one' if len(runs) == 1 else f'these {len(runs)}'} (delta "
        f"{show_delta(after.delta)})."
    )
    return f"{text}{_equal_names(before, runs)}"


def _data_of(account: Account) -> list[str]:
    """Return the names of the data of runs."""
    return list(dict.fromkeys(Path(entry.data).name for entry in account.entries))


def _equal_names(before: Account, runs: Sequence[Spending]) -> str:
    """Return how to tell clients with equal names apart, if earlier runs were on other data."""
    if {*_data_of(before)} <= {Path(runs[0].data).name}:
        return ""
    return " Clients are known by their names: a population (--population) tells others apart."


def _runs(count: int) -> str:
    return f"{count} private run{'' if count == 1 else 's'}"


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
