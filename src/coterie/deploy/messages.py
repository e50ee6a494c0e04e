"""Signed messages between the coordinator of a federation and its sites.

A `Message` states its kind, its run and round, the site that sends or receives it, and the nonce of
the request that it belongs to. It may carry a small JSON body and arrays. The sender signs all of
this with its Ed25519 key. Nobody in between (the SuperLink, other sites) can alter a message,
replay it in another round, or send it in another party's name. An `Envelope` is a signed message as
plain bytes: the form in which Flower, or a socket, carries it.

The receiver states what it expects: kinds, and the names, types and shapes of arrays. It rejects
everything else before any computation, and checks sizes before it allocates memory.

This module does not import torch, because a process that relays a message must start quickly.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

VERSION = 1
MAX_HEADER = 1 << 24
"""Bytes of a header: names of clients and shares of keys, never a model."""
_DOMAIN = b"coterie message v1\n"
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
_MAX_PARTS = 1 << 16
"""Parts of a packed envelope: no model has so many arrays."""


class RefusedError(ValueError):
    """Raised for a message that does not match what was expected; the text can be logged."""


@dataclass(frozen=True)
class Expected:
    """The type and shape that an array must have; `None` in a shape is any length."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Message:
    """The content of a message.

    `kind` is the request, or the kind of answer (see `deploy.site`); `site` sends or receives it;
    `round` is -1 where there is none; `nonce` is fresh for every request, and repeated in the
    answer; `body` is plain JSON.
    """

    kind: str
    run: str
    site: str
    round: int = -1
    nonce: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class RawArray:
    """An array as bytes, in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Envelope:
    """A message in transit: a header, a signature over header and arrays, and arrays."""

    header: bytes
    signature: bytes
    arrays: Mapping[str, RawArray] = field(default_factory=dict)


def public_hex(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """Return a public key as federation.toml has it: 64 hexadecimal digits."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw().hex()


def sign(message: Message, key: Ed25519PrivateKey) -> Envelope:
    """Return a message, signed, in its envelope."""
    fields = {name: getattr(message, name) for name in _FIELDS}
    fields["body"] = dict(message.body)
    raw = {name: _raw(name, array) for name, array in message.arrays.items()}
    header = json.dumps({"version": VERSION, **fields}, sort_keys=True, allow_nan=False).encode()
    return Envelope(header, key.sign(_signed(header, raw)), raw)


def peek(envelope: Envelope) -> Message:
    """Return the header of an envelope; nothing of it is verified."""
    if len(envelope.header) > MAX_HEADER:
        raise RefusedError(f"header of {len(envelope.header)} bytes; at most {MAX_HEADER} are read")
    try:
        fields = json.loads(envelope.header.decode(), parse_constant=_no_constant)
        if b"\\ud" in envelope.header.lower():
            # A lone surrogate makes a string that cannot be written to a log.
            json.dumps(fields, ensure_ascii=False).encode()
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RefusedError(f"header is not JSON ({type(error).__name__})") from error
    _check_header(fields)
    return Message(**{name: fields[name] for name in _FIELDS})


def _check_header(fields: Any) -> None:
    if not isinstance(fields, dict) or set(fields) != {"version", *_FIELDS}:
        raise RefusedError("header does not have the fields of a message")
    for name, kind in _TYPES.items():
        # Not isinstance: true is neither a round nor a version.
        if type(fields[name]) is not kind:
            raise RefusedError(f"{name} is {type(fields[name]).__name__}, expected {kind.__name__}")
    if fields["version"] != VERSION:
        raise RefusedError(f"another format version, expected {VERSION}")
    if not -1 <= fields["round"] < 1 << 31:
        raise RefusedError("round index out of range")


def verify(envelope: Envelope, key: Ed25519PublicKey, expected: Mapping[str, Expected]) -> Message:
    """Return the message of an envelope, after checking its arrays and then its signature."""
    message = peek(envelope)
    if set(envelope.arrays) != set(expected):
        received = [str(name)[:40] for name in sorted(envelope.arrays)[:8]]
        raise RefusedError(f"arrays are {received}, expected {sorted(expected)[:8]}")
    for name, raw in envelope.arrays.items():
        check_array(name, raw, expected[name])
    try:
        key.verify(envelope.signature, _signed(envelope.header, envelope.arrays))
    except (InvalidSignature, TypeError, ValueError) as error:
        raise RefusedError("signature is not the sender's") from error
    return replace(message, arrays={name: _read(raw) for name, raw in envelope.arrays.items()})


def check_array(name: str, raw: RawArray, expected: Expected) -> None:
    """Raise `RefusedError` if an array has another type, shape or length in bytes than expected."""
    if raw.dtype != expected.dtype:
        raise RefusedError(f"{name} is {str(raw.dtype)[:40]}, expected {expected.dtype}")
    shape = tuple(raw.shape)
    valid = len(shape) == len(expected.shape) and all(type(n) is int and n >= 0 for n in shape)
    if not valid or any(
        want is not None and want != got for got, want in zip(shape, expected.shape, strict=True)
    ):
        raise RefusedError(f"{name} has shape {str(shape)[:80]}, expected {expected.shape}")
    size = np.dtype(expected.dtype).itemsize
    for length in shape:
        size *= length
    if len(raw.data) != size:
        raise RefusedError(f"{name} has {len(raw.data)} bytes, expected {size}")


def pack(envelope: Envelope) -> bytes:
    """Return an envelope as one string of bytes, for a socket or a file."""
    index = {name: [raw.dtype, list(raw.shape)] for name, raw in envelope.arrays.items()}
    parts = [envelope.header, envelope.signature, json.dumps(index).encode()]
    parts += [raw.data for raw in envelope.arrays.values()]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(content: bytes) -> Envelope:
    """Return the envelope that `pack` wrote; refuse anything else."""
    parts, at = [], 0
    while at < len(content):
        if at + 8 > len(content):
            raise RefusedError("envelope is truncated")
        (length,) = struct.unpack_from("<Q", content, at)
        if at + 8 + length > len(content):
            raise RefusedError("envelope is truncated")
        parts.append(content[at + 8 : at + 8 + length])
        at += 8 + length
        if len(parts) > _MAX_PARTS:
            raise RefusedError(f"envelope has more than {_MAX_PARTS} parts")
    try:
        index = json.loads(parts[2])
        raws = zip(index.items(), parts[3:], strict=True)
        arrays = {name: _unpacked(kind, shape, data) for (name, (kind, shape)), data in raws}
    except (IndexError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RefusedError("envelope cannot be read") from error
    return Envelope(parts[0], parts[1], arrays)


def _unpacked(kind: Any, shape: Any, data: bytes) -> RawArray:
    if type(kind) is not str or type(shape) is not list or any(type(n) is not int for n in shape):
        raise TypeError("array without a type and a shape")
    return RawArray(kind, tuple(shape), data)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def digest(arrays: Arrays) -> str:
    """Return a hash of the names, types, shapes and values of arrays."""
    raw = {name: _raw(name, array) for name, array in arrays.items()}
    return hashlib.sha256(_signed(b"", raw)).hexdigest()


def _signed(header: bytes, arrays: Mapping[str, RawArray]) -> bytes:
    """Return the bytes to sign: every part with its length, so that parts cannot be regrouped."""
    parts = [_DOMAIN, hashlib.sha256(header).digest()]
    for name in sorted(arrays):
        raw = arrays[name]
        line = json.dumps([name, raw.dtype, list(raw.shape)]).encode()
        parts += [struct.pack("<Q", len(line)), line, hashlib.sha256(raw.data).digest()]
    return b"".join(parts)


def _raw(name: str, array: NDArray[Any]) -> RawArray:
    kind = str(array.dtype)
    if kind not in _DTYPES:
        raise ValueError(f"{name} is {kind}: expected one of {', '.join(_DTYPES)}")
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return RawArray(kind, tuple(array.shape), flat.tobytes())


def _read(raw: RawArray) -> NDArray[Any]:
    # A copy, because an array over received bytes is not writable.
    kind = np.dtype(raw.dtype).newbyteorder("<")
    return np.frombuffer(raw.data, dtype=kind).reshape(raw.shape).astype(raw.dtype)
