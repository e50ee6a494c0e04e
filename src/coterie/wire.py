"""Letters: what travels between the coordinator of a federation and its sites, and nothing else.

A letter says what it is of (`kind`), in which run and round, from or to which site, under which
nonce of the question it belongs to; it may carry a small body and arrays. It is signed with the
sender's Ed25519 key over all of that, so that nobody between the two (the SuperLink, other sites)
can alter it, send it again in another round, or send it in another's name. A `Parcel` is the same
as plain bytes: the form in which Flower, or a socket, carries it.

Whoever opens a parcel says what it expects: kinds, names, types and shapes of arrays. Everything
else is refused before any of it is computed with; sizes are checked before memory is taken.

This file does not import torch: a message must be handed on in no time.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from numpy.typing import NDArray

VERSION = 1
MOST_HEAD = 1 << 24
"""Bytes of a head: names of clients and shares of keys, never a model."""
_DOMAIN = b"coterie letter v1\n"
_DTYPES = ("float32", "float64", "int64", "uint64", "uint8", "bool")
_TYPES = {
    "version": int,
    "kind": str,
    "run": str,
    "site": str,
    "round": int,
    "nonce": str,
    "body": dict,
}
_FIELDS = tuple(name for name in _TYPES if name != "version")
_MOST_PARTS = 1 << 16
"""Parts of a packed parcel: no model has so many arrays."""


class RefusedError(ValueError):
    """Raised for a letter that is not what was asked for; says why, in words that can be logged."""


@dataclass(frozen=True)
class Expected:
    """The type and shape that an array must have; `None` in a shape is any length."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Letter:
    """A message that is understood.

    Attributes:
        kind: What it is: see `engines.site` and `engines.coordinator`.
        run: The run it belongs to.
        site: The site that it comes from, or goes to.
        round: The index of the round, -1 where there is none.
        nonce: Of the question: fresh with every question, and the same in its answer.
        body: Small facts, plain JSON.
        arrays: Numbers.
    """

    kind: str
    run: str
    site: str
    round: int = -1
    nonce: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RawArray:
    """An array as bytes, in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Parcel:
    """A letter as it travels: a head, a signature over head and arrays, arrays."""

    head: bytes
    signature: bytes
    arrays: Mapping[str, RawArray] = field(default_factory=dict)


def public_hex(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """Write a public key as federation.toml has it: 64 hexadecimal digits."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw().hex()


def seal(letter: Letter, key: Ed25519PrivateKey) -> Parcel:
    """Pack a letter and sign it."""
    told = {name: getattr(letter, name) for name in _FIELDS}
    told["body"] = dict(letter.body)
    raw = {name: _raw(name, array) for name, array in letter.arrays.items()}
    head = json.dumps({"version": VERSION, **told}, sort_keys=True, allow_nan=False).encode()
    return Parcel(head, key.sign(_signed(head, raw)), raw)


def peek(parcel: Parcel) -> Letter:
    """Read a head without trusting it: nothing of it is verified.

    Raises:
        RefusedError: If it cannot be read.
    """
    if len(parcel.head) > MOST_HEAD:
        raise RefusedError(f"a head of {len(parcel.head)} bytes; at most {MOST_HEAD} are read")
    try:
        told = json.loads(parcel.head.decode(), parse_constant=_no_constant)
        if b"\\ud" in parcel.head.lower():
            # Half a surrogate pair is a string that no log can be written with.
            json.dumps(told, ensure_ascii=False).encode()
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RefusedError(f"a head that is not JSON ({type(error).__name__})") from error
    _check_head(told)
    return Letter(**{name: told[name] for name in _FIELDS})


def _check_head(told: Any) -> None:
    if not isinstance(told, dict) or set(told) != {"version", *_FIELDS}:
        raise RefusedError("a head without the fields of a letter")
    for name, kind in _TYPES.items():
        # Not isinstance: true is no round, and no version.
        if type(told[name]) is not kind:
            raise RefusedError(f"{name} is {type(told[name]).__name__}, expected {kind.__name__}")
    if told["version"] != VERSION:
        raise RefusedError(f"another format version; this is version {VERSION}")
    if not -1 <= told["round"] < 1 << 31:
        raise RefusedError("a round that no plan has")


def unseal(parcel: Parcel, key: Ed25519PublicKey, expected: Mapping[str, Expected]) -> Letter:
    """Open a parcel: check arrays against what is expected, then the signature.

    Raises:
        RefusedError: If anything is not as expected.
    """
    letter = peek(parcel)
    if set(parcel.arrays) != set(expected):
        came = [str(name)[:40] for name in sorted(parcel.arrays)[:8]]
        raise RefusedError(f"arrays {came} came, expected {sorted(expected)[:8]}")
    for name, raw in parcel.arrays.items():
        check_array(name, raw, expected[name])
    try:
        key.verify(parcel.signature, _signed(parcel.head, parcel.arrays))
    except (InvalidSignature, TypeError, ValueError) as error:
        raise RefusedError("a signature that is not the sender's") from error
    arrays = {name: _read(raw) for name, raw in parcel.arrays.items()}
    return Letter(**{**{name: getattr(letter, name) for name in _FIELDS}, "arrays": arrays})


def check_array(name: str, raw: RawArray, expected: Expected) -> None:
    """Refuse an array of another type, shape or length in bytes than expected."""
    if raw.dtype != expected.dtype:
        raise RefusedError(f"{name} is {str(raw.dtype)[:40]}, expected {expected.dtype}")
    shape = tuple(raw.shape)
    whole = len(shape) == len(expected.shape) and all(type(n) is int and n >= 0 for n in shape)
    if not whole or any(
        want is not None and want != got for got, want in zip(shape, expected.shape, strict=True)
    ):
        raise RefusedError(f"{name} has shape {str(shape)[:80]}, expected {expected.shape}")
    size = np.dtype(expected.dtype).itemsize
    for length in shape:
        size *= length
    if len(raw.data) != size:
        raise RefusedError(f"{name} has {len(raw.data)} bytes, expected {size}")


def pack(parcel: Parcel) -> bytes:
    """Write a parcel as one string of bytes, for a socket or a file."""
    listed = {name: [raw.dtype, list(raw.shape)] for name, raw in parcel.arrays.items()}
    parts = [parcel.head, parcel.signature, json.dumps(listed).encode()]
    parts += [raw.data for raw in parcel.arrays.values()]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(content: bytes) -> Parcel:
    """Read what `pack` wrote.

    Raises:
        RefusedError: If it is something else.
    """
    parts, at = [], 0
    while at < len(content):
        if at + 8 > len(content):
            raise RefusedError("a parcel that is cut short")
        (length,) = struct.unpack_from("<Q", content, at)
        if at + 8 + length > len(content):
            raise RefusedError("a parcel that is cut short")
        parts.append(content[at + 8 : at + 8 + length])
        at += 8 + length
        if len(parts) > _MOST_PARTS:
            raise RefusedError(f"a parcel of more than {_MOST_PARTS} parts")
    try:
        listed = json.loads(parts[2])
        raws = zip(listed.items(), parts[3:], strict=True)
        arrays = {name: _listed(kind, shape, data) for (name, (kind, shape)), data in raws}
    except (IndexError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RefusedError("a parcel that cannot be read") from error
    return Parcel(parts[0], parts[1], arrays)


def _listed(kind: Any, shape: Any, data: bytes) -> RawArray:
    if type(kind) is not str or type(shape) is not list or any(type(n) is not int for n in shape):
        raise TypeError("an array without a type and a shape")
    return RawArray(kind, tuple(shape), data)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Name arrays by a hash of names, types, shapes and numbers."""
    raw = {name: _raw(name, array) for name, array in arrays.items()}
    return hashlib.sha256(_signed(b"", raw)).hexdigest()


def _signed(head: bytes, arrays: Mapping[str, RawArray]) -> bytes:
    """Return the bytes that a signature is of: every part with its length, so that none can move."""
    told = [_DOMAIN, hashlib.sha256(head).digest()]
    for name in sorted(arrays):
        raw = arrays[name]
        line = json.dumps([name, raw.dtype, list(raw.shape)]).encode()
        told += [struct.pack("<Q", len(line)), line, hashlib.sha256(raw.data).digest()]
    return b"".join(told)


def _raw(name: str, array: NDArray[Any]) -> RawArray:
    kind = str(array.dtype)
    if kind not in _DTYPES:
        raise ValueError(f"{name} is of {kind}: expected one of {', '.join(_DTYPES)}")
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return RawArray(kind, tuple(array.shape), flat.tobytes())


def _read(raw: RawArray) -> NDArray[Any]:
    # A copy: numbers from outside are computed with, and bytes are not writable.
    kind = np.dtype(raw.dtype).newbyteorder("<")
    return np.frombuffer(raw.data, dtype=kind).reshape(raw.shape).astype(raw.dtype)
