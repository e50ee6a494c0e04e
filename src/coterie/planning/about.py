"""What the owner of a run declares about it, and the public inputs that its plan names.

Declarations are text: the protected unit in the owner's words, who runs it and why, where public
inputs come from. They are stated with the guarantee, in the certificate and in the report. They
change no release, and the ledger is not bound to them.

Public inputs are found by their place in the plan's table, and hashed: a file by its bytes, a value
of the plan by its JSON (`digest_of`), code by the file that defines it.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 120
_MOST_INPUTS = 100
_SOURCE = {
    "vocabulary": "vocabulary",
    "tags": "vocabulary of tags",
    "classes": "names of classes",
    "levels": "levels of categories",
    "dates": "origins of dates",
    "ranges": "scaling constants",
    "center": "scaling constants",
    "scale": "scaling constants",
    "fill": "constants for gaps",
}
_METHOD = {
    "start": "start weights",
    "weights": "start weights",
    "make": "code",
    "loss": "code",
    "clusters": "clusters of clients",
    "omega": "relation of clients",
    "diagonal": "relation of clients",
    "factors": "relation of clients",
    "signs": "relation of clients",
}
"""Kinds of public inputs, by the key of `[data.source]` or of the method that names them."""
_FILES = ("start", "vocabulary", "tags")
READ_OFF_KEYS = ("levels", "ranges", "dates", "classes")
"""What `coterie init` reads off the rows."""
_CODE = re.compile(r"([\w.]+):[\w.]+")


@dataclass(frozen=True, kw_only=True)
class PublicInput:
    """What the owner declares about one public input.

    Attributes:
        name: Its place in the plan, such as "data.source.vocabulary" or "method.model.start"; or
            any name, with `file`, for an input that the plan does not name, such as an encoder.
        file: The file of an input that the plan does not name.
        kind: What such a file is, e.g. "encoder".
        source: Where it comes from, e.g. a DOI.
        licence: Its licence.
        no_private_rows: The statement that no rows of these clients had a part in it.
    """

    name: str
    file: str | None = None
    kind: str | None = None
    source: str | None = None
    licence: str | None = None
    no_private_rows: bool = False

    def __post_init__(self) -> None:
        _check_texts(self, "about.inputs")
        if self.kind is not None and self.file is None:
            raise ValueError(f"about.inputs {self.name!r} has a kind and no file: give both")


@dataclass(frozen=True, kw_only=True)
class About:
    """What the owner declares about a run; each text is one printable line.

    Attributes:
        unit: The protected unit in the owner's words, e.g. "one hospital with all its patients".
        operator: Who carries out the run.
        purpose: What the models are for.
        contact: Whom to ask.
        data_period: When the rows were collected, e.g. "2019 to 2023".
        region: Where the rows are from, or whose law applies.
        inputs: Declarations on public inputs.
    """

    unit: str | None = None
    operator: str | None = None
    purpose: str | None = None
    contact: str | None = None
    data_period: str | None = None
    region: str | None = None
    inputs: tuple[PublicInput, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        _check_texts(self, "about")
        names = [one.name for one in self.inputs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"about.inputs: {twice!r} is declared twice; declare it once")
        if len(names) > _MOST_INPUTS:
            raise ValueError(f"about.inputs: {len(names)} inputs; expected at most {_MOST_INPUTS}")

    def texts(self) -> dict[str, str]:
        """Return what is declared, without inputs."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: text for name, text in given.items() if isinstance(text, str)}

    def check(self, table: Mapping[str, Any]) -> None:
        """Raise ValueError for declarations that do not fit the plan of this table."""
        known = {name for name, _, _ in _named(table)}
        read = bool(table.get("data", {}).get("source", {}).get("accepted"))
        for one in self.inputs:
            if (one.name in known) == (one.file is not None):
                listed = ", ".join(sorted(known)) or "none"
                raise ValueError(
                    f"about.inputs {one.name!r}: expected a public input of the plan ({listed}), "
                    "or a new name with `file`, the file of an input that the plan does not name"
                )
            if one.no_private_rows and read and _key(one.name) in READ_OFF_KEYS:
                raise ValueError(
                    f"about.inputs {one.name!r}: no_private_rows contradicts data.source.accepted, "
                    "which lists facts that were read off the rows; leave one of them out"
                )


def describe_inputs(about: About | None, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every public input of a plan's table, for the certificate.

    `hashed` says what `sha256` is of: a "file", a "value" of the plan or "code". It is null if the
    file is not at hand, as at a coordinator whose sites have it. What was not declared is null.
    """
    declared = {one.name: one for one in (about.inputs if about is not None else ())}
    found = []
    for name, kind, value in _named(table):
        how, digest = _hash(_key(name), value)
        found.append(_entry(name, kind, how, digest, declared.get(name)))
    for name, one in declared.items():
        if one.file is not None:
            digest = _of_file(Path(one.file))
            found.append(_entry(name, one.kind or "other", "file", digest, one))
    return found


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value of a plan: its JSON without spaces, keys sorted."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(
    name: str, kind: str, how: str, digest: str | None, declared: PublicInput | None
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "hashed": how,
        "sha256": digest,
        "source": None if declared is None else declared.source,
        "licence": None if declared is None else declared.licence,
        "no_private_rows": declared is not None and declared.no_private_rows,
    }


def _named(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield place, kind and value of the public inputs that a plan's table names."""
    source = table.get("data", {}).get("source", {})
    for key, kind in _SOURCE.items():
        if source.get(key) and not isinstance(source[key], int):  # a number of classes
            yield f"data.source.{key}", kind, source[key]
    if encoder := table.get("data", {}).get("effects", {}).get("encoder"):
        yield "data.effects.encoder", "encoder", encoder
    yield from _of_method(table.get("method", {}), "method")


def _of_method(table: Mapping[str, Any], place: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in table.items():
        named = value and key in _METHOD and not (key == "loss" and not _is_code(value))
        if named:
            yield f"{place}.{key}", _METHOD[key], value
        elif isinstance(value, Mapping):
            yield from _of_method(value, f"{place}.{key}")


def _hash(key: str, value: Any) -> tuple[str, str | None]:
    if isinstance(value, str) and key in _FILES:
        return "file", _of_file(Path(value))
    if _is_code(value):
        module = sys.modules.get(value.partition(":")[0])  # imported when the plan was read
        defined = getattr(module, "__file__", None)
        return "code", None if defined is None else _of_file(Path(defined))
    return "value", digest_of(value)


def _of_file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _is_code(value: Any) -> bool:
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _check_texts(value: Any, where: str) -> None:
    """Raise ValueError for text that is not one short printable line."""
    for field in fields(value):
        text = getattr(value, field.name)
        if not isinstance(text, str):
            continue
        odd = next((one for one in text if not one.isprintable()), None)
        if odd is not None or not 0 < len(text.strip()) <= len(text) <= MOST_CHARACTERS:
            given = f"{len(text)} characters" if odd is None else f"a character {odd!a}"
            raise ValueError(
                f"{where}.{field.name} has {given}; expected one line of printable text, with 1 to "
                f"{MOST_CHARACTERS} characters"
            )
