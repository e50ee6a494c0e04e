"""What lies in a run folder, read without trusting it."""

import hashlib
import json
import math
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = "coterie certificate"
FORMAT_VERSION = 1
CERTIFICATE = "guarantee.json"
_PIECE = 1 << 20
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
    "sha256": str,
    "rate": (int, float),
    "delta": (int, float),
    "epsilon": (int, float, str),
    "clients": int,
    "rounds": int,
    "simulation": bool,
    "events": list,
    "posts": list,
    "views": dict,
    "files": dict,
}


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
        raise UnreadableError(
            f"{folder}: no {CERTIFICATE}; give the folder of a finished run, or finish it with "
            f"`coterie run --resume {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read ({error}); restore it") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnreadableError(
            f"{path} is not a certificate (format = {FORMAT!r}); it was written by an earlier "
            "version, or by something else: run the plan again"
        )
    if found.get("format_version") != FORMAT_VERSION:
        raise UnreadableError(
            f"{path}: format_version = {found.get('format_version')!r}, expected "
            f"{FORMAT_VERSION}; check it with the version of coterie that wrote it"
        )
    return found


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
    for event in certificate["events"]:
        found += [f"event {event!r}"] * (not _is_event(event))
    for post in certificate["posts"]:
        found += [f"post {post!r}"] * (
            not isinstance(post, dict) or set(post) != {"index", "sha256"}
        )
    return found


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("event") not in _FIELDS:
        return False
    fields = _FIELDS[event["event"]]
    if set(event) != {"event", "rounds", *fields} or type(event["rounds"]) is not int:
        return False
    for name in fields:
        value = event[name]
        if name == "claimed" and value is None:
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            return False
    whole = all(type(event[name]) is int for name in ("honest", "degrees") if name in fields)
    return whole and event["rounds"] >= 1 and 1 <= event.get("replaced", 1) <= 2


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
    except (OSError, ValueError):
        return {}


@dataclass
class LedgerFound:
    """What a ledger says, line by line."""

    header: dict[str, Any] = field(default_factory=dict)
    charged: list[int] = field(default_factory=list)
    released: dict[int, str] = field(default_factory=dict)
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
    """Read ledger.jsonl; a line that a crash cut off says nothing."""
    found = LedgerFound()
    try:
        lines = (folder / "ledger.jsonl").read_bytes().split(b"\n")
    except OSError as error:
        found.faults.append(f"ledger.jsonl cannot be read ({error.strerror})")
        return found
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line.decode())
        except ValueError:
            continue
        found.take(number, entry)
    return found


@dataclass
class PostsFound:
    """The digests of the posts that lie in a folder, and what else lies among them."""

    digests: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read_posts(folder: Path) -> PostsFound:
    """Hash what each post says, a piece at a time."""
    found = PostsFound()
    if (folder / "posts").exists():
        found.faults.append("a folder posts/ lies beside posts.npz")
    try:
        with zipfile.ZipFile(folder / "posts.npz") as archive:
            _hash_posts(archive, found)
    except (OSError, zipfile.BadZipFile) as error:
        found.faults.append(f"posts.npz cannot be read ({error})")
    return found


def _hash_posts(archive: zipfile.ZipFile, found: PostsFound) -> None:
    hashes: dict[int, Any] = {}
    seen: set[str] = set()
    for name in archive.namelist():
        index, _, leaf = name.removesuffix(".npy").partition(".")
        if not (index.isdecimal() and leaf and name.endswith(".npy")) or name in seen:
            found.faults.append(f"posts.npz holds {name!r}, which belongs to no post")
            continue
        seen.add(name)
        digest = hashes.setdefault(int(index), hashlib.sha256())
        try:
            with archive.open(name) as file:
                _hash_leaf(file, leaf, digest)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            digest.update(b"unreadable")
            found.faults.append(f"{name} of posts.npz is damaged ({error})")
    found.digests = {index: digest.hexdigest() for index, digest in hashes.items()}


def _hash_leaf(file: IO[bytes], leaf: str, digest: Any) -> None:
    """Hash one leaf: a line with its name, type and shape, and its numbers."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of the format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran and len(shape) > 1:
        raise ValueError("numbers in the order of Fortran")
    told = {"leaf": leaf, "dtype": dtype.str, "shape": list(shape)}
    digest.update(json.dumps(told).encode() + b"\n")
    while piece := file.read(_PIECE):
        digest.update(piece)


def read_names(folder: Path) -> int | None:
    """Count the clients that models/clients.json names; None if it is not there."""
    path = folder / "models" / "clients.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return -1
    return len(names) if isinstance(names, list) and len(set(names)) == len(names) else -1


def read_rows(folder: Path) -> set[int]:
    """Give the numbers of rows of the tensors in models/clients.safetensors."""
    try:
        with (folder / "models" / "clients.safetensors").open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 27)))
        return {part["shape"][0] for name, part in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, IndexError):
        return set()


def read_log(folder: Path) -> str | None:
    """Give the certificate's hash that the log names last; None without a log."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    named = ""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "finished":
            named = str(entry.get("certificate", ""))
    return named
