"""What lies in a run folder, read without trusting it."""

import hashlib
import json
import re
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "coterie certificate"
FORMAT_VERSION = 1
CERTIFICATE, FEDERATION = "guarantee.json", "federation.toml"
MOST = 10**7
"""Rounds of a run that can be checked."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "gaussian": ("noise_multiplier", "replaced"),
    "local_gaussian": ("noise_multiplier", "honest", "claimed"),
    "laplace": ("epsilon",),
    "wishart": ("degrees", "ratio", "claimed"),
    "non_private": (),
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "relation": str,
    "sampling": str,
    "cohort": str,
    "statement": str,
    "unit": str,
    "view": str,
    "accountant": str,
    "sha256": str,
    "rate": (int, float),
    "delta": (int, float),
    "epsilon": (int, float, str),
    "clients": int,
    "rounds": int,
    "simulation": bool,
    "participation_seen": bool,
    "events": list,
    "posts": list,
    "not_covered": list,
    "assumed_public": list,
    "views": dict,
    "files": dict,
    "reasons": dict,
    "versions": dict,
}
_ENTRY = re.compile(r'\{"charge": \d{1,18}|\{"release": \d{1,18}(, "sha256": "[0-9a-f]{0,64}"?)?')
_BEGUN = ('{"charge": ', '{"release": ', ', "sha256": "')


class UnreadableError(ValueError):
    """Raised when a folder cannot be checked at all."""


def read_certificate(folder: Path) -> dict[str, Any]:
    """Read the certificate of a run.

    Raises:
        UnreadableError: If there is none, or it is of a form that is not known here.
    """
    path = folder / CERTIFICATE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        onward = f"finish it with `coterie run --resume {folder}`"
        if (folder / FEDERATION).exists():
            onward = f"see what it needs to go on: `coterie deploy status {folder}`"
        raise UnreadableError(
            f"{folder}: no {CERTIFICATE}; give the folder of a finished run, or {onward}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read ({error}); restore it") from error
    if is_of_site(folder):
        raise UnreadableError(
            f"{folder} is a site's folder of a deployment, which has models and no account: check "
            "the coordinator's folder of the run, or the public files that it gives out"
        )
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnreadableError(
            f"{path} is not a certificate (format = {FORMAT!r}); it was written by an earlier "
            "version, or by something else: run the plan again"
        )
    version = found.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UnreadableError(
            f"{path}: format_version = {version!r}, expected {FORMAT_VERSION}; check it "
            "with the version of coterie that wrote it"
        )
    return found


def is_of_site(folder: Path) -> bool:
    """Return whether a folder is what a site keeps of a deployment: it never has an account."""
    return (folder / "run.json").exists() and not (folder / "ledger.jsonl").exists()


def read_federation(folder: Path) -> dict[str, Any] | None:
    """Read the federation of a deployment; None where there is none, empty if it is damaged."""
    try:
        return tomllib.loads((folder / FEDERATION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}


def faults(certificate: Mapping[str, Any]) -> list[str]:
    """List what is missing or of a wrong kind in a certificate."""
    found = [
        f"{key} is {certificate.get(key)!r}"
        for key, kind in _KINDS.items()
        if not isinstance(certificate.get(key), kind)
        or (isinstance(certificate[key], bool) and kind is not bool)
    ]
    if found:
        return found
    known = {
        "relation": ("zero_out", "replace"),
        "sampling": ("everyone", "poisson", "fixed"),
        "cohort": ("visible", "hidden"),
    }
    found += [
        f"{key} is {certificate[key]!r}" for key in known if certificate[key] not in known[key]
    ]
    found += [f"rate is {certificate['rate']}"] * (not 0 < certificate["rate"] <= 1)
    found += [f"delta is {certificate['delta']}"] * (not 0 <= certificate["delta"] < 1)
    found += [
        f"{key} is {_short(certificate[key])}"
        for key, least in (("clients", 1), ("rounds", 0))
        if not least <= certificate[key] <= 10**15
    ]
    found += [f"event {_short(event)}" for event in certificate["events"] if not is_event(event)]
    found += [f"post {_short(post)}" for post in certificate["posts"] if not _is_post(post)]
    return found or _too_many(certificate["events"])


def _too_many(events: list[Any]) -> list[str]:
    rounds = sum(event["rounds"] for event in events)
    return [f"{_short(rounds)} events, more than {MOST}"] * (rounds > MOST)


def _short(value: Any) -> str:
    """Write what was found; it may be very long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than are written, or a maze
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= 120 else f"{text[:120]}..."


def is_event(event: Any) -> bool:
    """Return whether something is an event with its numbers, as a certificate lists it."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    fields = _FIELDS.get(event["event"])
    if fields is None or set(event) != {"event", "rounds", *fields}:
        return False
    for name in fields:
        if not (name == "claimed" and event[name] is None) and not is_positive(event[name]):
            return False
    whole = all(type(event[name]) is int for name in ("honest", "degrees") if name in fields)
    counted = type(event["rounds"]) is int and event["rounds"] >= 1
    return whole and counted and 1 <= event.get("replaced", 1) <= 2


def is_positive(value: Any) -> bool:
    """Return whether something is a number above 0 that a float can hold."""
    return type(value) in (int, float) and 0 < value < 1.7e308


def _is_post(post: Any) -> bool:
    return (
        isinstance(post, dict)
        and set(post) == {"index", "sha256"}
        and type(post["index"]) is int
        and isinstance(post["sha256"], str)
    )


def seal(certificate: Mapping[str, Any]) -> str:
    """Hash a certificate but for its own hash: as JSON without spaces, keys in order."""
    rest = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Hash a file; "missing" if it is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "missing"


def read_plan(folder: Path) -> dict[str, Any]:
    """Read plan.toml; empty if it cannot be read."""
    try:
        return tomllib.loads((folder / "plan.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


@dataclass
class LedgerFound:
    """What a ledger says, line by line."""

    header: dict[str, Any] = field(default_factory=dict)
    charged: list[int] = field(default_factory=list)
    released: dict[int, str] = field(default_factory=dict)
    void: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, number: int, entry: Any) -> None:
        """Take one line in."""
        if not isinstance(entry, dict):
            self.faults.append(f"line {number} is no entry")
        elif number == 1:
            self.header = entry
        elif entry.keys() == {"charge"} and type(entry["charge"]) is int:
            self.charged.append(entry["charge"])
        elif entry.keys() == {"release", "sha256"} and type(entry["release"]) is int:
            self._release(number, entry["release"], entry["sha256"])
        else:
            self.faults.append(f"line {number} is neither charge nor release")

    def _release(self, number: int, index: int, digest: Any) -> None:
        if index not in self.charged:
            self.faults.append(f"line {number} releases post {index}, which was not charged before")
        if index in self.released:
            self.faults.append(f"line {number} releases post {index} again")
        self.released[index] = str(digest)


def read_ledger(folder: Path) -> LedgerFound:
    """Read ledger.jsonl; a line that a crash cut off says nothing, and is counted."""
    found = LedgerFound()
    try:
        lines = (folder / "ledger.jsonl").read_bytes().split(b"\n")
    except OSError as error:
        found.faults.append(f"ledger.jsonl cannot be read ({error.strerror})")
        return found
    for number, line in enumerate(lines[:-1], 1):
        _take(found, number, line)
    if lines[-1]:
        found.faults.append("its last line has no end")
    return found


def _take(found: LedgerFound, number: int, line: bytes) -> None:
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        if number == 1 or not _is_cut(line):
            found.faults.append(f"line {number} is neither an entry nor the beginning of one")
        found.void += 1
        return
    if json.dumps(entry).encode() != line:
        found.faults.append(f"line {number} is not written as an entry is")
    found.take(number, entry)


def _is_cut(line: bytes) -> bool:
    """Return whether a line is the beginning of an entry, as a crash leaves it."""
    # A file system may know of a line's length before it knows of its bytes.
    text = line.decode("latin-1").rstrip("\0")
    if _ENTRY.fullmatch(text) or any(begun.startswith(text) for begun in _BEGUN[:2]):
        return True
    release, _, rest = text.partition(",")
    return bool(_ENTRY.fullmatch(release)) and _BEGUN[2].startswith(f",{rest}")


def read_names(folder: Path) -> int | None:
    """Count the clients that models/clients.json names; None if there are no models."""
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
    """Return the numbers of rows of the tensors in models/clients.safetensors; -1 for no number."""
    try:
        path = folder / "models" / "clients.safetensors"
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 27)))
        parts = [part for name, part in header.items() if name != "__metadata__"]
        rows = [part["shape"][0] for part in parts]
        ends = max((part["data_offsets"][1] for part in parts), default=0)
        if path.stat().st_size != 8 + length + ends:  # cut short, or with bytes behind it
            rows.append(-1)
    except (OSError, ValueError, RecursionError, struct.error):
        return set()
    except (LookupError, TypeError, AttributeError):  # a header of another form
        return set()
    return {count if type(count) is int else -1 for count in rows}


def read_log(folder: Path) -> str | None:
    """Return the certificate's hash that the log names last; None without a log."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return "nothing that can be read"
    named = ""
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and entry.get("event") == "finished":
            named = str(entry.get("certificate", ""))
    return named
