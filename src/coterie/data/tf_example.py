"""tf.train.Example without TensorFlow: the few lines of protocol buffers that it needs.

An Example is Features (field 1), a map (field 1) from names to Feature, which is one of a list of
bytes (1), of floats (2) or of integers (3), each the repeated field 1, packed or not.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """Return the values of every feature.

    Raises:
        ValueError: It is no Example, or not a whole one.
    """
    found: dict[str, list[Any]] = {}
    for features in _nested(data, 1):
        for entry in _nested(features, 1):
            parts = dict(_fields(entry))
            name, feature = parts.get(1), parts.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name")
            found[name.decode("utf-8")] = _values(feature)
    return found


def _values(feature: bytes) -> list[Any]:
    values: list[Any] = []
    for kind, listed in _fields(feature):
        if not isinstance(listed, bytes):
            raise ValueError("a feature that is no list")
        for number, value in _fields(listed):
            if number == 1:
                values += _unpacked(kind, value)
    return values


def _unpacked(kind: int, value: bytes | int) -> list[Any]:
    """Return one value, or several that are packed."""
    if kind == 1:
        return [value]
    if kind == 2:
        raw = value if isinstance(value, bytes) else struct.pack("<I", value)
        return list(np.frombuffer(raw, dtype="<f4").tolist())
    if isinstance(value, int):
        return [_signed(value)]
    at, values = 0, []
    while at < len(value):
        number, at = _varint(value, at)
        values.append(_signed(number))
    return values


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _nested(data: bytes, wanted: int) -> Iterator[bytes]:
    for number, value in _fields(data):
        if number == wanted:
            if not isinstance(value, bytes):
                raise ValueError("a number where a message belongs")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value: bytes | int
            value, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            value, at = int.from_bytes(_slice(data, at, size), "little"), at + size
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value, at = _slice(data, at, size), at + size
        else:
            raise ValueError(f"a field of the unknown type {kind}")
        yield key >> 3, value


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ValueError("it ends too early")
    return data[at : at + size]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while at < len(data) and shift < 70:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number & ((1 << 64) - 1), at
    raise ValueError("a number does not end")
