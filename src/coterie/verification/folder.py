"""The checks of a run folder: each holds, fails, or reports why it could not be made.

A run folder has a certificate, a plan, a ledger, its releases and the shared parameters. Models and
log are private and may be missing. The folder of a selection has `selection.json`, the scores, and
every run.
"""

import hashlib
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from coterie.verification import certificate as certificates
from coterie.verification import foreign
from coterie.verification.account import (
    Account,
    Choice,
    Span,
    by_view,
    message_epsilon,
    parameter,
    recompute_delta,
)
from coterie.verification.certificate import (
    CERTIFICATE,
    FEDERATION,
    UnreadableError,
    each,
    is_event,
    is_positive,
    read_toml,
)
from coterie.verification.signature import (
    PARTIES,
    check_signature,
    name_key,
    read_signature,
    signed_by,
)

PUBLIC = ("plan.toml", "ledger.jsonl", "posts.npz", "shared.npz")
RECORD = "selection.json"
Status = Literal["ok", "FAILED", "not recomputed", "not here"]
_DAMAGED = (OSError, ValueError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)
UNCHECKED = (
    "shared.npz: its hash is checked, but only a replay of the releases with the method shows that "
    "its numbers follow from them",
    "that the noise was drawn as stated, that the clip was applied, and that a method with "
    'shape "none" releases nothing',
)
"""What no check of a folder can show."""
_UNCHECKED_SELECTION = ("that K and settings were drawn at random and scores computed as stated",)


# Checks and verdicts.


@dataclass(frozen=True)
class Check:
    """One check: its name and status, what was found and what was expected."""

    name: str
    status: Status
    found: str = ""
    expected: str = ""


@dataclass(frozen=True, repr=False)
class Verdict:
    """All checks of a folder; verified if each holds, or concerns a private file not here."""

    folder: str
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = UNCHECKED

    @property
    def verified(self) -> bool:
        """Whether nothing failed, and everything public was checked."""
        return all(check.status in ("ok", "not here") for check in self.checks)

    def __bool__(self) -> bool:
        return self.verified

    def __repr__(self) -> str:
        bad = [check.name for check in self.checks if check.status not in ("ok", "not here")]
        named = f": {', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}" if bad else ""
        result = "verified" if self.verified else "NOT VERIFIED"
        return f"<Verdict: {result}, {len(self.checks)} checks{named}; {Path(self.folder).name}>"

    def _repr_html_(self) -> str:
        """Return the verdict and its checks for a notebook."""
        heads = ("status", "check", "found", "expected")
        rows = [(check.status, check.name, check.found, check.expected) for check in self.checks]
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        head = "".join(f"<th>{name}</th>" for name in heads)
        limits = "".join(f"<li>not checked: {escape(limit)}</li>" for limit in self.unchecked)
        result = "Verified" if self.verified else "NOT VERIFIED"
        name = escape(Path(self.folder).name)
        return (
            f"<p><strong>{result}</strong>: {name}, {len(self.checks)} checks</p>"
            f"<details{'' if self.verified else ' open'}><summary>the checks, and what none can "
            f"show</summary><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<ul>{limits}</ul></details>"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return {
            "run": self.folder,
            "verified": self.verified,
            "checks": [asdict(check) for check in self.checks],
            "not_checked": list(self.unchecked),
        }


_Makes = Callable[[], Check | Iterator[Check]]


def _judge(name: str, faults: Iterable[str], expected: str, found: str = "") -> Check:
    """Return a check that holds if there are no faults."""
    faults = list(faults)
    if not faults:
        return Check(name, "ok", found, expected)
    more = f"; {len(faults) - 3} more" if len(faults) > 3 else ""
    text = "; ".join(fault if len(fault) <= 300 else f"{fault[:300]}..." for fault in faults[:3])
    return Check(name, "FAILED", text + more, expected)


def _guarded(parts: Mapping[str, _Makes]) -> Iterator[Check]:
    """Make checks of data that may be anything: one that cannot be made has failed."""
    for name, make in parts.items():
        try:
            made = make()
            yield from [made] if isinstance(made, Check) else list(made)
        except Exception as error:  # a forged file must not prevent a verdict
            text = f"{type(error).__name__}: {str(error)[:200]}"
            yield Check(name, "FAILED", text, "data that can be checked")


def _compared(
    name: str, stated: Mapping[str, Any], recompute: Callable[[], Mapping[str, Span]]
) -> Iterator[Check]:
    """Compare stated numbers with recomputed ones, a check for each."""
    try:
        found = recompute()
    except (ValueError, ArithmeticError, KeyError) as error:
        yield Check(name, "not recomputed", str(error), "a recomputed number")
        return
    for key in sorted({*stated, *found}):
        label = key if key in ("epsilon", name) else f"{name}: {key}"
        if key in stated and key in found:
            yield _near(label, stated[key], found[key])
            continue
        said, expected = f"stated {stated.get(key)}", f"recomputed {found.get(key)}"
        yield Check(label, "FAILED", said, expected)


def _near(label: str, stated: Any, span: Span) -> Check:
    number = math.inf if stated == "inf" else stated
    good = type(number) in (int, float) and span.holds(number)
    digits = 6 if good else 12  # where they differ, enough to see it
    low, high = (f"{end:.{digits}g}" for end in (span.low, span.high))
    expected = low if low == high else f"{low} to {high}"
    said = f"{number:.{digits}g}" if type(number) in (int, float) else str(stated)
    found = f"stated {said}, recomputed {expected}"
    return Check(label, "ok" if good else "FAILED", found, "the same, up to rounding")


# A run.


def verify(folder: Path | str, key: bytes | None = None) -> Verdict:
    """Check a finished run; with a public key, also that its owner signed the certificate.

    Raises:
        UnreadableError: If there is no certificate to check.
        ValueError: If there is a key, and the package cryptography is not installed.
    """
    folder = Path(folder)
    stated = certificates.read_certificate(folder)
    if stated["format"] == foreign.FORMAT:
        return _verify_account(folder, stated, key)
    wrong = certificates.faults(stated)
    first = _judge("certificate well-formed", wrong, "every field of its type, and no other field")
    signed, unchecked = _signature(folder / CERTIFICATE, key)
    rest = () if wrong else tuple(_Run(folder, stated).checks())
    return Verdict(str(folder), (first, *rest, *signed), (*UNCHECKED, *unchecked))


def _verify_account(folder: Path, stated: Mapping[str, Any], key: bytes | None) -> Verdict:
    """Check the account of a strategy of Flower."""
    wrong = list(foreign.faults(stated))
    first = _judge("certificate well-formed", wrong, "every field of its type, and no other field")
    signed, unchecked = _signature(folder / CERTIFICATE, key)

    def unaltered() -> Check:
        altered = [] if foreign.is_sealed(stated) else ["its content has another hash"]
        return _judge("certificate unaltered", altered, f"sha256 {stated['sha256'][:12]}...")

    def epsilons() -> Iterator[Check]:
        views = {**stated["views"], "epsilon": stated["epsilon"]}
        return _compared("epsilon", views, lambda: foreign.recomputed(stated))

    parts: dict[str, _Makes] = {
        "certificate unaltered": unaltered,
        "ledger": lambda: _judge(
            "ledger", foreign.wrong_ledger(folder, stated), "every event charged"
        ),
        "epsilon": epsilons,
    }
    rest = () if wrong else tuple(_guarded(parts))
    return Verdict(str(folder), (first, *rest, *signed), (*foreign.UNCHECKED, *unchecked))


def _signature(path: Path, key: bytes | None) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Return the check of a signature; without a key, what remains unchecked."""
    if key is not None:
        wrong, owner = check_signature(path, key), f"by key {name_key(key)}"
        return (_judge("signature", [wrong] * bool(wrong), owner, owner),), ()
    try:
        found = read_signature(path)
    except ValueError as error:
        return (_judge("signature", [str(error)], "a signature, or none"),), ()
    who = "not signed"
    if found is None and (path.parent / PARTIES).exists():
        return (), ("that the keys in federation.toml belong to the parties that it names",)
    if found is not None:
        who = f"signed by key {found.key_id}, not checked (--key PUBLIC checks it)"
    return (), (f"that the folder is genuine: {path.name} is {who}",)


@dataclass(frozen=True)
class _Run:
    folder: Path
    stated: Mapping[str, Any]

    def checks(self) -> Iterator[Check]:
        plan, ledger = read_toml(self.folder / "plan.toml") or {}, read_ledger(self.folder)
        parts: dict[str, _Makes] = {
            "certificate unaltered": self._seal,
            "public files": self._files,
            "plan": lambda: _judge(
                "plan", certificates.disagreements(plan, self.stated), "as plan.toml"
            ),
            "declarations": lambda: self._declarations(plan),
            "budget": lambda: _judge(
                "budget", certificates.wrong_budget(plan, self.stated), "the noise of the plan"
            ),
            "ledger": lambda: self._ledger(ledger),
            "counts": lambda: self._counts(plan, ledger),
            "events": lambda: self._events(ledger),
            "bounds": lambda: _judge(
                "bounds",
                certificates.wrong_bounds(plan, self.stated),
                "the clip of the plan, and a grid that fits it",
            ),
            "releases": lambda: self._posts(ledger),
            "clients": self._clients,
            "epsilon": self._epsilons,
            "selection": lambda: _chosen(plan, self.stated),
            "deployment": lambda: _deployment(self.folder, self.stated),
            "log": self._log,
        }
        yield from _guarded(parts)

    def _seal(self) -> Check:
        found, expected = certificates.seal(self.stated), self.stated["sha256"]
        wrong = [] if found == expected else [f"its content hashes to {found[:12]}..."]
        return _judge("certificate unaltered", wrong, f"sha256 {expected[:12]}...")

    def _files(self) -> Check:
        stated = self.stated["files"]
        wrong = [f"{name} is not among its files" for name in PUBLIC if name not in stated]
        for name, expected in stated.items():
            if name not in PUBLIC:
                wrong.append(f"{name} is not a public file")
            elif (found := _hash_file(self.folder / name)) != expected:
                wrong.append(f"{name} is {found if found == 'missing' else 'altered'}")
        wrong += stray_bytes(self.folder / "shared.npz")
        return _judge("public files", wrong, f"{', '.join(PUBLIC)} as certified")

    def _declarations(self, plan: Mapping[str, Any]) -> Iterator[Check]:
        """Compare what the owner declares, and public inputs, with the plan."""
        if "inputs" not in self.stated and "about" not in {*self.stated, *plan}:
            return  # an earlier version wrote it
        missing = ["inputs are missing"] * ("inputs" not in self.stated)
        wrong = missing or certificates.wrong_declarations(plan, self.stated)
        found = f"{len(self.stated.get('inputs', ()))} public inputs"
        yield _judge("declarations", wrong, "as [about] and the inputs in plan.toml", found)

    def _ledger(self, ledger: "Ledger") -> Check:
        """Check the ledger, and that it was opened with plan.toml."""
        wrong, header = list(ledger.faults), ledger.header
        extra = sorted(map(str, header.keys() - {"plan", "posts", "events", "plan_file"}))
        wrong += [f"its first line holds {', '.join(extra)}"] * bool(extra)
        if "plan_file" not in header:
            wrong.append("its first line has no plan_file: an earlier version wrote it")
        elif header["plan_file"] != _hash_file(self.folder / "plan.toml"):
            wrong.append("plan.toml is not the one that it was opened with")
        void = f", {ledger.void} cut off by a crash" * bool(ledger.void)
        found = f"{len(ledger.charged) + len(ledger.released)} entries{void}"
        return _judge("ledger", wrong, "every release of the plan charged, then released", found)

    def _counts(self, plan: Mapping[str, Any], ledger: "Ledger") -> Check:
        """Compare the numbers of rounds, events, charges and releases with each other."""
        stated, planned = self.stated, ledger.header.get("posts")
        events, releases = (_total(stated[key]) for key in ("events", "releases"))
        private = {event["event"] for event in stated["events"]} != {"non_private"}
        posts, charges = (events, list(range(events)))
        wrong = [f"{stated['rounds']} rounds, {events} events"] * (stated["rounds"] != events)
        if stated["shape"] == "none":
            due: Any = 0
        elif stated["shape"] == "pooled":  # one release of all rows, with nothing on the billboard
            due, posts = 1, 0
        else:
            due = plan.get("rounds")
        if type(planned) is not int or planned != due:
            wrong.append(f"the ledger is of {planned} releases, the plan of {due}")
        # Without privacy a run may end early.
        elif planned != events and (private or events > planned):
            wrong.append(f"the ledger is of {planned} releases, the certificate of {events} events")
        wrong += [f"the ledger has charges {_some(ledger.charged)}"] * (ledger.charged != charges)
        wrong += [
            f"{number} {what} for {events} events"
            for what, number in (("hashes", len(stated["posts"])), ("releases", releases))
            if number != posts
        ]
        released = list(ledger.released)
        wrong += [f"the ledger has releases {_some(released)}"] * (released != list(range(posts)))
        return _judge("counts", wrong, "one charge and one release per event", f"{events}")

    def _events(self, ledger: "Ledger") -> Check:
        """Compare events with the digest of those that the ledger was opened with."""
        runs = [dict(event) for event in self.stated["events"]]
        planned = ledger.header.get("posts")
        if len(runs) == 1 and runs[0]["event"] == "non_private" and isinstance(planned, int):
            runs[0]["rounds"] = planned  # without privacy a run may end early
        found, expected = _digest(runs), str(ledger.header.get("events"))
        wrong = [] if found == expected else [f"events hash to {found[:12]}..."]
        return _judge("events", wrong, f"the events of the ledger, {expected[:12]}...")

    def _posts(self, ledger: "Ledger") -> Iterator[Check]:
        """Hash every release, and check that each of its numbers lies on the stated grid."""
        grids = _Grids.of(self.stated)
        kept = read_posts(self.folder, grids)
        wrong = list(kept.faults)
        stated = {post["index"]: post["sha256"] for post in self.stated["posts"]}
        wrong += ["releases are not listed in order"] * (list(stated) != list(range(len(stated))))
        wrong += ["a release is listed twice"] * (len(stated) != len(self.stated["posts"]))
        for index in sorted({*stated, *kept.digests, *ledger.released}):
            text = _differs(stated.get(index), kept.digests.get(index), ledger.released.get(index))
            wrong += [f"release {index} {text}"] if text else []
        yield _judge("releases", wrong, "as certified and charged", f"{len(kept.digests)} releases")
        yield grids.check()

    def _clients(self) -> Check:
        named, clients = read_names(self.folder), self.stated["clients"]
        wrong = [
            f"{event['honest']} honest clients in every round"
            for event in self.stated["events"]
            if event.get("honest", 1) > self._fewest()
        ]
        wrong += [
            f"sums of at least {event['minimum_clients']} clients"
            for event in self.stated["events"]
            if event.get("minimum_clients", 1) > clients
        ]
        if named is None and not wrong:
            return Check("clients", "not here", "models/ is private", f"{clients} clients")
        if named is not None:
            rows = read_rows(self.folder)
            wrong += [f"models/clients.json names {named}"] * (named != clients)
            wrong += [f"models have {sorted(rows)} rows"] * bool(rows - {clients})
            wrong += ["models/clients.safetensors is damaged or cut short"] * (not rows)
        return _judge("clients", wrong, f"{clients} clients", f"{named} models")

    def _fewest(self) -> int:
        """Return the fewest clients of a round in which a given client takes part."""
        rate, clients = self.stated["rate"], self.stated["clients"]
        if rate == 1:
            return int(clients)
        whole = math.floor(rate * clients * (1 + 1e-12) + 1e-9)
        return max(1, whole) if self.stated["sampling"] == "fixed" else 1

    def _epsilons(self) -> Iterator[Check]:
        """Recompute every epsilon only from the events."""
        stated, account = self.stated, Account.of(self.stated)
        views = {"epsilon": stated["epsilon"], **stated["views"]}
        yield from _compared("epsilon by view", views, lambda: by_view(account))
        name = "epsilon of one message"
        single = stated.get("epsilon_per_participation")
        yield from _compared(
            name,
            {} if single is None else {name: single},
            lambda: _point(name, message_epsilon(account)),
        )
        yield from self._claims()

    def _claims(self) -> Iterator[Check]:
        """Recompute what is true of releases for which a paper claims an epsilon."""
        events = [event for event in self.stated["events"] if event.get("claimed") is not None]
        keys = ("claimed_epsilon", "true_delta_at_claimed")
        stated = {key: self.stated[key] for key in keys if key in self.stated}

        def found() -> dict[str, Span]:
            if not events:
                return {}
            claimed = math.fsum(event["claimed"] * event["rounds"] for event in events)
            true = recompute_delta(Account.of(self.stated, events), claimed)
            return {**_point(keys[0], claimed), keys[1]: Span(true, true, is_delta=True)}

        yield from _compared("claims of a paper", stated, found)

    def _log(self) -> Check:
        named = read_log(self.folder)
        if named is None:
            return Check("log", "not here", "log.jsonl is private", "")
        wrong = [f"it names certificate {named[:12]}..."] * (named != self.stated["sha256"])
        return _judge("log", wrong, "names this certificate")


def _point(name: str, value: float | None) -> dict[str, Span]:
    return {} if value is None else {name: Span(value, value)}


def _total(runs: list[Mapping[str, Any]]) -> int:
    return sum(run["rounds"] for run in runs)


def _some(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 6 else f"{str(numbers[:3])[:-1]}, ... {numbers[-1]}]"


def _differs(stated: str | None, kept: str | None, released: str | None) -> str:
    if stated is None:
        return "is not certified"
    if kept is None:
        return "is missing"
    if kept != stated:
        return "is altered"
    return "has another hash in the ledger" * (released != stated)


def _digest(runs: list[dict[str, Any]]) -> str:
    """Return the hash of events as the first line of a ledger has it."""
    named = [
        {key: float(value) if isinstance(value, int | float) else value for key, value in one}
        for one in (run.items() for run in runs)
    ]
    return _hash(repr(named))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    """Return the hash of a file; "missing" if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "missing"


# The ledger.

_ENTRY = re.compile(r'\{"charge": \d{1,18}|\{"release": \d{1,18}(, "sha256": "[0-9a-f]{0,64}"?)?')
_BEGUN = ('{"charge": ', '{"release": ', ', "sha256": "')


@dataclass
class Ledger:
    """A ledger, line by line."""

    header: dict[str, Any] = field(default_factory=dict)
    charged: list[int] = field(default_factory=list)
    released: dict[int, str] = field(default_factory=dict)
    void: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, number: int, line: bytes) -> None:
        """Add one line; one that a crash cut off counts for nothing."""
        try:
            entry = json.loads(line.decode())
        except (ValueError, RecursionError):
            if number == 1 or not _is_cut(line):
                self.faults.append(f"line {number} is neither an entry nor the beginning of one")
            self.void += 1
            return
        if json.dumps(entry).encode() != line:
            self.faults.append(f"line {number} is not written as an entry is")
        if not isinstance(entry, dict):
            self.faults.append(f"line {number} is no entry")
        elif number == 1:
            self.header = entry
        elif entry.keys() == {"charge"} and type(entry["charge"]) is int:
            self.charged.append(entry["charge"])
        elif entry.keys() == {"release", "sha256"} and type(entry["release"]) is int:
            self._release(number, entry["release"], str(entry["sha256"]))
        else:
            self.faults.append(f"line {number} is neither charge nor release")

    def _release(self, number: int, index: int, digest: str) -> None:
        if index not in self.charged:
            self.faults.append(f"line {number} has release {index}, which was not charged before")
        if index in self.released:
            self.faults.append(f"line {number} has release {index} again")
        self.released[index] = digest


def read_ledger(folder: Path) -> Ledger:
    """Return what ledger.jsonl holds."""
    found = Ledger()
    try:
        lines = (folder / "ledger.jsonl").read_bytes().split(b"\n")
    except OSError as error:
        found.faults.append(f"ledger.jsonl cannot be read ({error.strerror})")
        return found
    for number, line in enumerate(lines[:-1], 1):
        found.take(number, line)
    if lines[-1]:
        found.faults.append("its last line has no end")
    return found


def _is_cut(line: bytes) -> bool:
    """Return whether a line is the beginning of an entry, as a crash leaves it."""
    # A file system may know a line's length before it knows its bytes.
    text = line.decode("latin-1").rstrip("\0")
    if _ENTRY.fullmatch(text) or any(begun.startswith(text) for begun in _BEGUN[:2]):
        return True
    release, _, rest = text.partition(",")
    return bool(_ENTRY.fullmatch(release)) and _BEGUN[2].startswith(f",{rest}")


# Releases in zip files. A zip file is read from its end, and readers skip bytes before, between and
# behind its members, comments and extra fields. Nothing published may hide there: every byte has to
# belong to a member or to the directory.

_PIECE = 1 << 20
_LOCAL, _CENTRAL, _END, _END64 = 30, 46, 22, 22 + 20 + 56
_PREFIX = "leaf."
_Place = Callable[[str], tuple[int, str] | None]
"""From a member's name to the index of its release and the name of its leaf; None for others."""


@dataclass
class _Grids:
    """The grid step of each leaf of each release, and the numbers that do not lie on it."""

    steps: list[dict[str, float | None]]
    private: bool
    off: list[str] = field(default_factory=list)
    without: set[str] = field(default_factory=set)
    seen: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> "_Grids":
        runs = {
            id(run): {leaf: part["grid"] for part in run["parts"] for leaf in part["leaves"]}
            for run in stated["releases"]
        }
        private = any(event["event"] != "non_private" for event in stated["events"])
        return cls([runs[id(run)] for run in each(stated["releases"])], private)

    def take(self, index: int, leaf: str, values: "np.ndarray[Any, Any]") -> None:
        """Check some of the numbers of a leaf."""
        steps = self.steps[index] if 0 <= index < len(self.steps) else {}
        if leaf not in steps:
            self.off.append(f"release {index}: {leaf!r} has no stated grid")
            return
        self.seen.setdefault(index, set()).add(leaf)
        step = steps[leaf]
        if step is None:
            self.without.add(leaf)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            whole = values / step  # exact: the step is a power of two
            count = int((whole != np.rint(whole)).sum() + (~np.isfinite(whole)).sum())
        if count:
            self.off.append(f"release {index}: {count} numbers of {leaf!r} are not on the grid")

    def check(self) -> Check:
        """Return the check of all numbers."""
        for index, steps in enumerate(self.steps):
            absent = sorted(steps.keys() - self.seen.get(index, set()))
            self.off += [f"release {index} has no leaf {', '.join(absent)}"] * bool(absent)
        if self.without and not self.off:
            names = ", ".join(sorted(self.without)[:6])
            why = "no noise is added" if not self.private else "the mechanism states none"
            return Check("grid", "ok", f"no grid for {names}: {why}", "multiples of its step")
        return _judge(
            "grid", self.off, "multiples of the stated step", f"{len(self.steps)} releases"
        )


@dataclass
class Posts:
    """The digests of the releases in a folder, and what else is among them."""

    digests: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read_posts(folder: Path, grids: _Grids | None = None) -> Posts:
    """Hash every release of posts.npz, a piece at a time."""
    found = Posts()
    if (folder / "posts").exists():
        found.faults.append("there is a folder posts/ as well as posts.npz")

    def place(name: str) -> tuple[int, str] | None:
        index, _, leaf = name.removesuffix(".npy").partition(".")
        good = index.isdecimal() and len(index) < 19 and leaf and name.endswith(".npy")
        return (int(index), leaf) if good else None

    _read(folder / "posts.npz", place, found, grids)
    return found


def read_loose(folder: Path) -> Posts:
    """Hash the releases of a folder that has one file per release."""
    found = Posts()
    if not folder.is_dir():
        found.faults.append(f"{folder.name}/ is missing")
        return found
    for path in sorted(folder.iterdir()):
        if not (path.suffix == ".npz" and path.stem.isdecimal()):
            found.faults.append(f"{path.name} belongs to no release")
            continue

        def place(name: str, index: int = int(path.stem)) -> tuple[int, str] | None:
            leaf = name.removeprefix(_PREFIX).removesuffix(".npy")
            return (index, leaf) if name == f"{_PREFIX}{leaf}.npy" and leaf else None

        _read(path, place, found, None)
    return found


def _read_number(path: Path, leaf: str) -> float:
    """Return a release's leaf that is a single number; not-a-number if it is none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return float(arrays[f"{_PREFIX}{leaf}"])
    except (*_DAMAGED, KeyError, TypeError):
        return math.nan


def _read(path: Path, place: _Place, found: Posts, grids: _Grids | None) -> None:
    faults = stray_bytes(path)
    found.faults += faults
    if faults:
        return  # a member may be of a kind that cannot be read at all
    hashes: dict[int, Any] = {}
    seen: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            where = place(name)
            if where is None or name in seen:
                found.faults.append(f"{path.name} holds {name!r}, which belongs to no release")
                continue
            seen.add(name)
            digest = hashes.setdefault(where[0], hashlib.sha256())
            try:
                with archive.open(name) as leaf:
                    _hash_leaf(leaf, where, digest, grids)
            except (*_DAMAGED, zlib.error) as error:
                digest.update(b"unreadable")
                found.faults.append(f"{name} of {path.name} is damaged ({error})")
    found.digests |= {index: digest.hexdigest() for index, digest in hashes.items()}


def _hash_leaf(file: IO[bytes], where: tuple[int, str], digest: Any, grids: _Grids | None) -> None:
    """Hash one leaf: a line with its name, type and shape, then its numbers."""
    start = file.read(10)
    if start[:8] != b"\x93NUMPY\x01\x00" or len(start) < 10:
        raise ValueError("it does not begin as version 1.0 of the format does")
    (length,) = struct.unpack("<H", start[8:])
    head = file.read(length)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(start[8:] + head))
    if fortran and len(shape) > 1:
        raise ValueError("numbers in the order of Fortran")
    plain = f"{{'descr': {dtype.str!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    if head.decode("latin-1").rstrip(" \n") != plain:
        raise ValueError("its header holds more than type, order and shape")
    index, leaf = where
    line = {"leaf": leaf, "dtype": dtype.str, "shape": list(shape)}
    digest.update(json.dumps(line).encode() + b"\n")
    while piece := file.read(_PIECE):
        digest.update(piece)
        if grids is not None:
            grids.take(index, leaf, np.frombuffer(piece, dtype=dtype))


def stray_bytes(path: Path) -> list[str]:
    """Return what a zip file holds apart from its members."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return list(_strays(file, archive))
    except (*_DAMAGED, NotImplementedError, zlib.error) as error:
        return [f"{path.name} cannot be read ({error})"]


def _strays(file: IO[bytes], archive: zipfile.ZipFile) -> Iterator[str]:
    """Follow members from the first byte to the directory, and that to the last."""
    name, place, directory = Path(file.name).name, 0, 0
    if archive.comment:
        yield f"{name} has a comment"
    for member in sorted(archive.infolist(), key=lambda one: one.header_offset):
        head = _head_of(file, member)
        if head is None:
            yield f"{name}: {member.filename!r} is not simply stored, or has further fields"
            return
        if member.header_offset != place:
            yield f"{name} has bytes before {member.filename!r} that belong to nothing"
            return
        label, extra = head
        place += _LOCAL + label + extra + member.compress_size
        directory += _CENTRAL + label + len(member.extra)
    file.seek(0, io.SEEK_END)
    if place != archive.start_dir:
        yield f"{name} has bytes before its directory that belong to nothing"
    elif file.tell() - place - directory not in (_END, _END64):
        yield f"{name} has bytes behind its directory that belong to nothing"


def _head_of(file: IO[bytes], member: zipfile.ZipInfo) -> tuple[int, int] | None:
    """Return the sizes of a member's name and extra field; None if numpy would not write it."""
    file.seek(member.header_offset)
    head = file.read(_LOCAL)
    flags, method = struct.unpack("<HH", head[6:10])
    named, extra = struct.unpack("<HH", head[26:30])
    label, more = file.read(named), file.read(extra)
    sizes = struct.pack("<HHQQ", 1, 16, member.file_size, member.compress_size)
    plain = (
        flags == member.flag_bits
        and flags & ~0x800 == 0
        and method == member.compress_type == zipfile.ZIP_STORED
        and member.file_size == member.compress_size
        and label == member.orig_filename.encode("utf-8" if flags else "cp437")
        and more in (b"", sizes)
        and not member.comment
        and (not member.extra or member.extra[:2] == b"\x01\x00")
    )
    return (named, extra) if plain else None


# Private files.


def read_names(folder: Path) -> int | None:
    """Count the clients in models/clients.json; None without models, -1 if it cannot be read."""
    path = folder / "models" / "clients.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return -1 if path.with_name("clients.safetensors").exists() else None
    except (OSError, ValueError, RecursionError):
        return -1
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return len(names) if good and len(set(names)) == len(names) else -1


def read_rows(folder: Path) -> set[int]:
    """Return the numbers of rows of models/clients.safetensors; empty if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "models" / "clients.safetensors", framework="np") as models:
            shapes = [models.get_slice(name).get_shape() for name in models.keys()]  # noqa: SIM118
        return {shape[0] for shape in shapes}
    except (OSError, SafetensorError, LookupError):
        return set()


def read_log(folder: Path) -> str | None:
    """Return the certificate's hash that the log names last; None without a log."""
    named = "nothing that can be read"
    try:
        for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == "finished":
                    named = str(entry.get("certificate"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        pass
    return named


# Deployments.

_VIEWS = {
    "server": "server",
    "secure_aggregation": "server_secure_aggregation",
    "nobody": "coordinator",
}


def _deployment(folder: Path, stated: Mapping[str, Any]) -> Iterator[Check]:
    """Check how a run was deployed; nothing of a simulated run."""
    deployment, federation = stated.get("deployment"), read_toml(folder / FEDERATION)
    if deployment is None and federation is None:
        return
    wrong = _wrong_deployment(folder, stated, deployment, federation)
    yield _judge("deployment", wrong, "trust, sites and clients as in federation.toml")
    if (folder / PARTIES).exists() and federation is not None:
        yield from _signers(folder, federation, stated)


def _signers(
    folder: Path, federation: Mapping[str, Any], stated: Mapping[str, Any]
) -> Iterator[Check]:
    """Check who signed the run; without the package cryptography nobody is named."""
    if find_spec("cryptography") is None:
        yield Check("signed by", "not here", "needs the package cryptography", "signatures")
        return
    signers, wrong = signed_by(folder, federation, stated)
    expected = "signatures under the keys of federation.toml"
    yield _judge("signed by", wrong, expected, "; ".join(signers))


def _wrong_deployment(
    folder: Path, stated: Mapping[str, Any], deployment: Any, federation: Mapping[str, Any] | None
) -> Iterator[str]:
    if not isinstance(deployment, dict):
        yield "there is a federation.toml, and the certificate states no deployment"
        return
    if federation is None:
        yield "federation.toml is missing"
        return
    if _hash_file(folder / FEDERATION) != deployment.get("federation"):
        yield "federation.toml is altered"
    trust, clients = str(federation.get("trust", "server")), _hosted(federation)
    view = _VIEWS.get(trust)
    expected = {
        "trust": trust,
        "sites": len(clients),
        "clients_by_site": clients,
        "coordinator_view": view,
        "epsilon_coordinator": stated["views"].get(view),
    }
    if view not in stated["views"]:
        yield f"trust = {trust!r}: the views of the noise are {', '.join(sorted(stated['views']))}"
    for name, value in expected.items():
        if deployment.get(name) != value:
            yield f"{name}: certificate {deployment.get(name)!r}, federation.toml {value!r}"
    if sum(clients.values()) != stated["clients"]:
        yield f"{stated['clients']} clients, federation.toml lists {sum(clients.values())}"


def _hosted(federation: Mapping[str, Any]) -> dict[str, int]:
    sites = federation.get("sites")
    listed = sites if isinstance(sites, dict) else {}
    return {
        str(name): len(site["clients"])
        for name, site in listed.items()
        if isinstance(site, dict) and isinstance(site.get("clients"), list)
    }


# Selections: a run that was chosen, and the folder of the whole selection.

_CHOSEN = "epsilon of the chosen run only"
_SAME = ("relation", "delta", "clients", "sampling", "rate", "cohort", "simulation")


def _chosen(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[Check]:
    """Check what the certificate of a chosen run, and its plan, state about the choice."""
    charged, selection = plan.get("charged"), stated.get("selection")
    if charged is None and selection is None:
        return
    if not isinstance(charged, dict) or not isinstance(selection, dict):
        yield Check("selection", "FAILED", "one of plan and certificate states none", "both")
        return
    wrong = _wrong_choice(charged, selection, stated)
    yield _judge("selection", wrong, "as [charged] in plan.toml, with this run a candidate")
    if not wrong:
        choice = _choice(
            stated,
            selection["candidates"],
            selection["score_event"],
            (selection["runs_mean"], selection["eta"]),
        )
        number = {_CHOSEN: selection.get("epsilon_chosen_alone")}
        yield from _compared(_CHOSEN, number, lambda: {_CHOSEN: choice.span()})


def _wrong_choice(
    charged: Mapping[str, Any], selection: Mapping[str, Any], stated: Mapping[str, Any]
) -> list[str]:
    score, offered = selection.get("score_event"), selection.get("candidates")
    if not _is_offer(offered) or not _is_score(score):
        return ["candidates or score_event are no lists of Gaussian events"]
    mean, eta = selection.get("runs_mean"), selection.get("eta")
    if not _is_law(mean, eta):
        return [f"runs_mean = {mean!r}, eta = {eta!r}"]
    assert isinstance(score, dict) and isinstance(offered, list)
    planned = {
        "runs": mean,
        "eta": eta,
        "score_noise": score["noise_multiplier"],
        "score_replaced": score["replaced"],
        "candidates": [
            [[run["noise_multiplier"], run["replaced"], run["rounds"]] for run in runs]
            for runs in offered
        ],
    }
    found = [
        f"{key}: certificate {value}, plan {charged.get(key)}"
        for key, value in planned.items()
        if charged.get(key) != value
    ]
    found += ["its own events are no candidate"] * (stated["events"] not in offered)
    return found + ["another delta"] * (selection.get("delta") != stated["delta"])


def _choice(
    stated: Mapping[str, Any], offered: list[Any], score: Mapping[str, Any], law: tuple[Any, Any]
) -> Choice:
    kinds = {json.dumps(runs): runs for runs in offered}
    account = Account.of(stated, ())
    return Choice(list(kinds.values()), score, float(law[0]), float(law[1]), account)


def _is_offer(offered: Any) -> bool:
    return (
        isinstance(offered, list)
        and bool(offered)
        and all(isinstance(runs, list) and runs for runs in offered)
        and all(is_event(run) and run["event"] == "gaussian" for runs in offered for run in runs)
    )


def _is_score(score: Any) -> bool:
    return is_event(score) and score["event"] == "gaussian" and score["rounds"] == 1


def _is_law(mean: Any, eta: Any) -> bool:
    good = is_positive(mean) and 1 < mean <= 1000
    return good and type(eta) in (int, float) and 0 <= eta <= 100


def verify_selection(folder: Path | str, key: bytes | None = None) -> Verdict:
    """Check a whole selection: both epsilons, the scores, and that the runs belong to it.

    The runs themselves are checked separately, by `verify`. With a public key, the record has to be
    signed too.

    Raises:
        UnreadableError: If there is no record of it to check.
        ValueError: If there is a key, and the package cryptography is not installed.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{folder / RECORD} cannot be read ({error}); restore it") from error
    checks = tuple(_guarded({"selection well-formed": lambda: _formed(record)}))
    if checks[0].status == "ok":
        checks += tuple(_Selection(folder, record).checks())
    signed, unchecked = _signature(folder / RECORD, key)
    return Verdict(str(folder), (*checks, *signed), (*_UNCHECKED_SELECTION, *unchecked))


def _formed(record: Any) -> Check:
    stated = record["guarantee"]
    drawn, runs, law, score = stated["drawn"], record["runs"], stated["law"], stated["score"]
    wrong = ["candidates are no lists of Gaussian events"] * (not _is_offer(stated["candidates"]))
    if not isinstance(score, list) or len(score) != 1 or not _is_score(score[0]):
        wrong.append("score is no Gaussian event")
    wrong += [f"law is {law!r}"] * (not _is_law(law["mean"], law["eta"]))
    if not isinstance(drawn, list) or not all(type(number) is int for number in drawn):
        wrong.append("drawn are no numbers")
    elif not drawn or not 0 <= min(drawn) <= max(drawn) < len(stated["candidates"]):
        wrong.append("drawn are numbers of no candidate")
    wrong += [f"{len(runs)} runs, {len(drawn)} drawn"] * (len(runs) != len(drawn))
    sized = all(is_positive(stated[key]) for key in ("rate", "delta", "clients"))
    if not sized or not stated["rate"] <= 1 > stated["delta"]:
        wrong.append("rate, delta or clients are out of range")
    names = [run["run"] for run in runs]
    wrong += ["a run is listed twice"] * (len(set(names)) != len(names))
    if record["finished"] is not True:
        wrong.append("it is not finished: continue with the command that began it")
    return _judge("selection well-formed", wrong, "every field of its type")


@dataclass(frozen=True)
class _Selection:
    folder: Path
    record: Mapping[str, Any]

    @property
    def stated(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.record["guarantee"]
        return found

    def checks(self) -> Iterator[Check]:
        yield from _guarded(
            {
                "draw": self._draw,
                _CHOSEN: self._alone,
                "epsilon of the other clients": self._others,
                "scores": self._scores,
                "runs": self._runs,
            }
        )

    def _draw(self) -> Check:
        """Compare what was drawn, and from what, with what was asked for."""
        stated, asked = self.stated, self.record["asked"]
        law = stated["law"]
        wrong = [
            f"{key}: asked for {asked[key]}, law {law[name]}"
            for key, name in (("runs", "mean"), ("eta", "eta"))
            if asked[key] != law[name]
        ]
        gamma = parameter(float(law["mean"]), float(law["eta"]))
        if not math.isclose(law["gamma"], gamma, rel_tol=1e-6):
            wrong.append(f"gamma {law['gamma']}, of this mean {gamma}")
        wrong += ["a seed, and no simulation"] * ((asked["seed"] is None) == stated["simulation"])
        settings: dict[int, Any] = {}
        for number, run in zip(stated["drawn"], self.record["runs"], strict=True):
            if settings.setdefault(number, run["settings"]) != run["settings"]:
                wrong.append(f"candidate {number} has several settings")
        return _judge("draw", wrong, "the law that was asked for", f"{len(stated['drawn'])} runs")

    def _alone(self) -> Iterator[Check]:
        stated = self.stated
        law = (stated["law"]["mean"], stated["law"]["eta"])
        choice = _choice(stated, stated["candidates"], stated["score"][0], law)
        number = {_CHOSEN: stated["epsilon_chosen_alone"]["epsilon"]}
        yield from _compared(_CHOSEN, number, lambda: {_CHOSEN: choice.span()})

    def _others(self) -> Iterator[Check]:
        """Compose all runs and scores, as the other clients see them."""
        stated, name = self.stated, "epsilon of the other clients"
        events = [
            event
            for number in stated["drawn"]
            for event in (*stated["candidates"][number], *stated["score"])
        ]
        account = Account.of(stated, events)
        number = {name: stated["epsilon_other_clients"]["epsilon"]}
        yield from _compared(name, number, lambda: {name: by_view(account)["other_clients"]})

    def _scores(self) -> Check:
        """Check the ledger and the releases of the scores, and that the best was chosen."""
        scores, runs, stated = self.folder / "scores", self.record["runs"], self.stated
        ledger, kept = read_ledger(scores), read_loose(scores / "posts")
        wrong, all_ = [*ledger.faults, *kept.faults], list(range(len(runs)))
        header = {
            "plan": _hash(json.dumps([self.record["asked"], stated["drawn"]], sort_keys=True)),
            "posts": len(runs),
            "events": _digest([{**stated["score"][0], "rounds": len(runs)}]),
        }
        wrong += [
            f"its ledger was opened for another {key}"
            for key, value in header.items()
            if ledger.header.get(key) != value
        ]
        if not ledger.charged == list(ledger.released) == sorted(kept.digests) == all_:
            wrong.append(f"{len(kept.digests)} scores for {len(runs)} runs")
        wrong += [
            f"score {index} is altered"
            for index, digest in kept.digests.items()
            if ledger.released.get(index) != digest
        ]
        wrong += self._best()
        return _judge("scores", wrong, "one per run, and the best chosen", f"{len(runs)}")

    def _best(self) -> list[str]:
        cohort, runs = float(self.stated["rate"]) * self.stated["clients"], self.record["runs"]
        posts = self.folder / "scores" / "posts"
        found = [_read_number(posts / f"{i:06d}.npz", "score") / cohort for i in range(len(runs))]
        wrong = [
            f"score {index}: stated {run['score']}, released {score:g}"
            for index, (run, score) in enumerate(zip(runs, found, strict=True))
            if not math.isclose(run["score"], score, rel_tol=1e-6, abs_tol=1e-12)
        ]
        best = runs[max(range(len(runs)), key=lambda index: found[index])]["run"]
        chosen = self.record["chosen"]
        return wrong + [f"chosen is {chosen}, the best is {best}"] * (chosen != best)

    def _runs(self) -> Check:
        """Compare each run's certificate with the candidate that it was drawn as."""
        listed = {run["run"] for run in self.record["runs"]}
        kept = {f"runs/{path.name}" for path in (self.folder / "runs").iterdir()}
        wrong = [f"{name} is not of this selection" for name in sorted(kept - listed)]
        for number, run in zip(self.stated["drawn"], self.record["runs"], strict=True):
            if run["run"] not in kept:
                wrong.append(f"{run['run']} is missing")
                continue
            wrong += [f"{run['run']}: {text}" for text in self._unlike(number, run["run"])]
        return _judge("runs", wrong, "each as it was drawn", f"{len(listed)} runs")

    def _unlike(self, number: int, name: str) -> list[str]:
        text = (self.folder / name / CERTIFICATE).read_text(encoding="utf-8")
        run, stated = json.loads(text), self.stated
        found = [f"another {key}" for key in _SAME if run[key] != stated[key]]
        found += ["other events"] * (run["events"] != stated["candidates"][number])
        expected = stated["epsilon_chosen_alone"]["epsilon"]
        chosen = run.get("selection", {}).get("epsilon_chosen_alone")
        if not is_positive(chosen) or not math.isclose(chosen, expected, rel_tol=1e-9):
            found.append(f"{_CHOSEN} {chosen}, selection {expected}")
        return found
