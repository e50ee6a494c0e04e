"""Where the parts of a large JSON file are, found without reading it whole.

`index_json` looks at quotes and brackets alone, a chunk at a time. Every list that opens deeper
than a given depth is replaced by a mark, [k], every object by {"": k}, and the small rest, the
skeleton, is parsed as usual; the marked parts are decoded one at a time, when they are asked for,
and long lists a chunk at a time. Memory holds a chunk, the skeleton and two numbers for each part.
"""

import codecs
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coterie.data.federated import DataError

_CHUNK = 1 << 22
_MOST = 1 << 28  # bytes of a skeleton: with more, rows are not where they are looked for
_LIST, _COMMA = 0x5B, 0x2C
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = 0x22, 0x5C, 0x7B, 0x7D

Pairs = list[tuple[str, Any]]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Index:
    """A file's skeleton and the byte ranges of its marked parts.

    Attributes:
        path: The file.
        content: The parsed skeleton; marks at the depth of a part stand for it.
        starts: Where each part starts.
        ends: Where each part ends.
    """

    path: Path
    content: Any
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def size(self, part: int) -> int:
        """The bytes of a part."""
        return int(self.ends[part] - self.starts[part])

    def value(self, file: BinaryIO, part: int) -> Any:
        """Decode one part.

        Args:
            file: The open file.
            part: The number in its mark.

        Raises:
            DataError: It is no JSON; the message says at which byte.
        """
        start = int(self.starts[part])
        file.seek(start)
        return _decode(self.path, file.read(self.size(part)), lambda at: start + at)

    def items(self, file: BinaryIO, part: int) -> Iterator[list[Any]]:
        """Decode one list, as many of its items at a time as a chunk holds; at least once.

        Args:
            file: The open file.
            part: The number in its mark.

        Raises:
            DataError: It is no JSON; the message says at which byte.
        """
        begin, end = int(self.starts[part]) + 1, int(self.ends[part]) - 1
        file.seek(end)
        if file.read(1) != b"]":
            raise broken(self.path, end, "Expecting ',' delimiter")  # as json says it
        held, state, cut = bytearray(), _State(depth=1), False
        at = begin
        while at < end:
            file.seek(at)
            chunk = next(_chunks(file, end - at), b"")
            if not chunk:
                raise broken(self.path, at, "the file ends inside a list")
            at += len(chunk)
            comma = state.take(chunk)
            if comma is None:
                held += chunk
                continue
            held += chunk[:comma]
            yield self._list(bytes(held), begin, True)
            begin, cut = begin + len(held) + 1, True
            held = bytearray(chunk[comma + 1 :])
        yield self._list(bytes(held), begin, cut)

    def _list(self, data: bytes, begin: int, cut: bool) -> list[Any]:
        """Decode the items between two cuts, which are at commas: none would be too few."""
        found: list[Any] = _decode(self.path, b"[%b]" % data, lambda at: begin - 1 + at)
        if cut and not found:
            raise broken(self.path, begin, "Expecting value")
        return found


def index_json(path: Path, depth: int, hook: Callable[[Pairs], Any]) -> Index:
    """Find the parts of a file that open deeper than `depth` brackets.

    Args:
        path: The file, in UTF-8.
        depth: How many brackets deep the skeleton goes.
        hook: Makes the objects of the skeleton, as json's `object_pairs_hook`.

    Raises:
        DataError: The file is no whole JSON; the message says at which byte.
    """
    scan = _Scan(path, depth)
    with path.open("rb") as file:
        mark = file.read(len(codecs.BOM_UTF8))
        # some editors begin a file with a mark that is no JSON
        scan.taken = file.seek(len(mark) if mark == codecs.BOM_UTF8 else 0)
        for chunk in _chunks(file):
            scan.take(chunk)
    scan.finish()
    content = _decode(path, bytes(scan.skeleton), scan.at, hook)
    starts, ends = (np.array(found, dtype=np.int64) for found in (scan.starts, scan.ends))
    return Index(path, content, starts, ends)


def _chunks(file: BinaryIO, most: int = _CHUNK) -> Iterator[bytes]:
    """Read in chunks that never end between a backslash and what it escapes."""
    while chunk := file.read(min(_CHUNK, most)):
        rest = bytearray()
        while (rest or chunk).endswith(b"\\") and (more := file.read(1)):
            rest += more
        yield chunk + bytes(rest)


@dataclass
class _State:
    """Where a list is read: how deep, and whether inside a text."""

    depth: int
    quoted: bool = False

    def take(self, chunk: bytes) -> int | None:
        """Look at the next bytes; give the place of the last comma between items of the list."""
        values = np.frombuffer(chunk, dtype=np.uint8)
        quotes = _quotes(values, b"\\" in chunk)
        where, up = _brackets(values, quotes, self.quoted)
        depths = self.depth + np.concatenate([[0], np.cumsum(np.where(up, 1, -1))])
        commas = np.flatnonzero(values == _COMMA)
        level = depths[np.searchsorted(where, commas)]
        outside = (np.searchsorted(quotes, commas) + self.quoted) % 2 == 0
        between = commas[(level == 1) & outside]
        self.depth = int(depths[-1])
        self.quoted ^= len(quotes) % 2 == 1
        return int(between[-1]) if len(between) else None


@dataclass
class _Scan:
    """The state between two chunks: how deep, and whether inside a text or a part."""

    path: Path
    cut: int
    depth: int = 0
    quoted: bool = False
    taken: int = 0
    skeleton: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)  # (skeleton, file) positions

    def take(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        values = np.frombuffer(chunk, dtype=np.uint8)
        quotes = _quotes(values, b"\\" in chunk)
        where, up = _brackets(values, quotes, self.quoted)
        depths = self.depth + np.cumsum(np.where(up, 1, -1))
        if len(depths) and depths.min() < 0:
            at = self.taken + int(where[int(np.argmax(depths < 0))])
            raise broken(self.path, at, "a bracket closes that was never opened")
        edge = np.where(up, depths == self.cut + 1, depths == self.cut)
        self._copy(chunk, where[edge].tolist(), up[edge].tolist())
        self.depth = int(depths[-1]) if len(depths) else self.depth
        self.quoted ^= len(quotes) % 2 == 1
        self.taken += len(chunk)

    def _copy(self, chunk: bytes, where: list[int], opens: list[bool]) -> None:
        """Keep what lies outside of parts, and marks for the parts."""
        begin = 0
        inside = len(self.starts) > len(self.ends)
        for at, is_open in zip(where, opens, strict=True):
            if is_open:
                self._keep(chunk, begin, at)
                mark = b"[%d]" if chunk[at] == _LIST else b'{"": %d}'
                self.skeleton += mark % len(self.starts)
                self.starts.append(self.taken + at)
            else:
                begin = at + 1
                self.ends.append(self.taken + begin)
            inside = is_open
        if not inside:
            self._keep(chunk, begin, len(chunk))
        if len(self.skeleton) > _MOST:
            raise DataError(f"{self.path}: not LEAF json; expected rows inside user_data, x and y")

    def _keep(self, chunk: bytes, begin: int, end: int) -> None:
        self.kept.append((len(self.skeleton), self.taken + begin))
        self.skeleton += chunk[begin:end]

    def finish(self) -> None:
        """Refuse a file that ends too early."""
        if self.quoted:
            raise broken(self.path, self.taken, "the file ends inside a text")
        if self.depth:
            raise broken(self.path, self.taken, f"the file ends with {self.depth} brackets open")

    def at(self, position: int) -> int:
        """Return the place in the file of a place in the skeleton."""
        if not self.kept:
            return 0
        start, byte = self.kept[bisect_right(self.kept, position, key=lambda pair: pair[0]) - 1]
        return byte + position - start


def _quotes(values: NDArray[np.uint8], escapes: bool) -> NDArray[np.int64]:
    """Find the quotes that begin or end a text."""
    quotes: NDArray[np.int64] = np.flatnonzero(values == _QUOTE)
    if not escapes or not len(quotes):
        return quotes
    before = np.where(quotes > 0, values[quotes - 1], 0) == _BACKSLASH
    for at in np.flatnonzero(before).tolist():
        run = 1
        while run < quotes[at] and values[quotes[at] - 1 - run] == _BACKSLASH:
            run += 1
        before[at] = run % 2 == 1
    return np.delete(quotes, np.flatnonzero(before))


def _brackets(
    values: NDArray[np.uint8], quotes: NDArray[np.int64], quoted: bool
) -> tuple[NDArray[np.int64], _Flags]:
    """Find the brackets outside of texts, in order, and which of them open."""
    # "[" and "{" differ in one bit only, and so do "]" and "}"
    folded = values | 0x20
    opens, closes = np.flatnonzero(folded == _OPEN), np.flatnonzero(folded == _CLOSE)
    where = np.concatenate([opens, closes])
    order = np.argsort(where, kind="stable")
    where, up = where[order], order < len(opens)
    outside = (np.searchsorted(quotes, where) + quoted) % 2 == 0
    return where[outside], up[outside]


def _decode(
    path: Path,
    data: bytes,
    at: Callable[[int], int],
    hook: Callable[[Pairs], Any] | None = None,
) -> Any:
    """Decode JSON; `at` gives the place in the file of a place in `data`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise broken(path, at(error.start), "not UTF-8") from error
    del data  # the text and its values are enough to hold
    try:
        return json.loads(text, object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        raise broken(path, at(len(text[: error.pos].encode())), error.msg) from error
    except RecursionError as error:
        raise broken(path, at(0), "brackets too deep from here on") from error


def broken(path: Path, byte: int, found: str) -> DataError:
    """Make the error for a file that is no whole JSON."""
    line, left = 1, byte
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            line, left = line + chunk.count(b"\n"), left - len(chunk)
    return DataError(
        f"{path}: not whole JSON (line {line}, byte {byte}: {found}); it is truncated or damaged: "
        "fetch it again"
    )
