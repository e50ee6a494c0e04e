"""What a row of LEAF json may be: numbers, declared characters, text, or the name of an image."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.data.coders import Coder
from coterie.data.columns import Columns, Values, unknown_level
from coterie.data.federated import DataError
from coterie.data.source import Source

SENT140_TEXT = 4
"""Where the text is in a row of LEAF's Sent140: [id, date, query, user, text, ...]."""


@dataclass(frozen=True)
class User:
    """One user of one file, decoded; `where` names both. x is empty where only y was wanted.

    Of a large user x holds some rows only; `first` is the number of the first of them.
    """

    where: str
    name: str
    x: list[Any]
    y: NDArray[Any]
    split: int | None
    size: int  # bytes in the file
    first: int = 0


class Rows(Protocol):
    """How the rows of users become features."""

    def encode(self, group: Sequence[User]) -> Iterator[tuple[int, Values]]:
        """Yield the number of the first row, and features of the next rows."""


@dataclass(frozen=True)
class Coded:
    """Rows that are text or names of images."""

    coder: Coder
    place: int

    def encode(self, group: Sequence[User]) -> Iterator[tuple[int, Values]]:
        """Encode as many rows together as the coder takes."""
        owners = [(user, at) for user in group for at in range(len(user.x))]
        for start in range(0, len(owners), self.coder.step):
            part = owners[start : start + self.coder.step]

            def fail(row: int, found: str, part: Any = part) -> DataError:
                user, at = part[row]
                return DataError(f"{user.where}, row {user.first + at} (from 0): {found}")

            values = [self._value(user.x[at]) for user, at in part]
            yield start, self.coder.encode([values], fail)

    def _value(self, row: Any) -> Any:
        """Take the text of a row that is a list, as in Sent140."""
        is_list = self.coder.kind == "text" and isinstance(row, list)
        return row[self.place] if is_list and self.place < len(row) else row


def text_place(source: Source, where: str) -> int:
    """Say at which place of a list its text is."""
    if not source.features:
        return SENT140_TEXT
    if len(source.features) > 1 or not source.features[0].isdecimal():
        raise DataError(
            f"{where}: features = {source.features!r}: expected the place of the text in a row, "
            "from 0, e.g. '4'"
        )
    return int(source.features[0])


@dataclass(frozen=True)
class Numbers:
    """Rows that are numbers, or text of declared characters."""

    source: Source
    shape: tuple[int, ...]
    plan: Columns

    def encode(self, group: Sequence[User]) -> Iterator[tuple[int, Values]]:
        """Encode the rows of a few users."""
        parts = [
            self.plan.encode(numbers_of(user, self.source, self.shape), partial(_fail, user))
            for user in group
            if user.x
        ]
        yield 0, np.concatenate(parts)


def numbers_of(user: User, source: Source, shape: tuple[int, ...] | None) -> NDArray[np.float64]:
    """Make an array of a user's rows, all of one shape."""
    rows: Any = user.x
    if any(isinstance(row, str) for row in rows):
        rows = _characters(user, source)
    try:
        x = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad_rows(user, rows) from error
    x = x[:, None] if x.ndim == 1 else x
    if shape is not None and x.shape[1:] != shape:
        place = f", row {user.first} (from 0)" if user.first else ""
        raise DataError(
            f"{user.where}{place}: rows of shape {x.shape[1:]}, where the first client has "
            f"{shape}; give every row as many values"
        )
    return x


def _characters(user: User, source: Source) -> list[list[int]]:
    levels = source.levels.get("x", ())
    index = {character: at for at, character in enumerate(levels)}
    for at, row in enumerate(user.x):
        if not levels or not isinstance(row, str):
            raise DataError(
                f"{user.where}, row {user.first + at} (from 0): found {str(row)[:40]!r} where "
                "numbers belong; "
                "for text declare its characters, levels={'x': (...)}, and the classes, or set "
                "text= and a public vocabulary=; for names of images set images= to their folder"
            )
        lost = next((character for character in row if character not in index), None)
        if lost is not None:
            raise _fail(user, at, "x", unknown_level(lost, levels))
    return [[index[character] for character in row] for row in user.x]


def _bad_rows(user: User, rows: list[Any]) -> DataError:
    """Find the row that is no list of numbers, or of another width than the first."""
    width = np.shape(rows[0]) if not isinstance(rows[0], list) else (len(rows[0]),)
    for at, row in enumerate(rows, start=user.first):
        try:
            values = np.array(row, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            return DataError(
                f"{user.where}, row {at} (from 0): found {str(row)[:60]} where numbers belong; "
                "correct the row, or set text= and a public vocabulary= for text"
            )
        if values.shape[:1] != width:
            return DataError(
                f"{user.where}, row {at} (from 0): {len(np.atleast_1d(values))} values, where the "
                f"first row has {width[0] if width else 1}; give every row as many"
            )
    return DataError(f"{user.where}: rows of unequal shapes; give every row the same")


def _fail(user: User, row: int, column: str, found: str) -> DataError:
    at = user.first + row
    return DataError(f"{user.where}, row {at} (from 0), column {column!r}: {found}")
