"""Whose row is whose: ids of clients, any hashable values, and their numbers from 0."""

import difflib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Whole = NDArray[np.int64]
_GAPS = ("", "None", "nan", "NaT", "<NA>")
_NAMED, _LISTED = 3, 8  # clients and columns named in a message


@dataclass(frozen=True)
class Numbering:
    """Ids of clients in the order of their models."""

    ids: tuple[Hashable, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def places(self) -> dict[Hashable, int]:
        """The number of each client."""
        return {label: place for place, label in enumerate(self.ids)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The ids as text; as Python writes them where two would read alike (1 and "1")."""
        plain = tuple(str(label) for label in self.ids)
        return plain if len(set(plain)) == len(plain) else tuple(repr(label) for label in self.ids)

    @property
    def array(self) -> NDArray[Any]:
        """The ids as an array: of numbers or text where all are, else of objects."""
        kinds = {type(label) for label in self.ids}
        if kinds in ({int}, {str}, {float}):
            return np.array(self.ids)
        found = np.empty(len(self.ids), dtype=object)
        found[:] = self.ids
        return found

    def codes(self, labels: Sequence[Hashable]) -> Whole:
        """Number the client of each row; -1 where it is not known."""
        places = self.places
        return np.array([places.get(label, -1) for label in labels], dtype=np.int64)

    def unknown(self, labels: Sequence[Hashable]) -> list[Hashable]:
        """List ids that are not known, each once."""
        return [label for label in dict.fromkeys(labels) if label not in self.places]

    def close(self, label: Hashable) -> str:
        """Name known clients that are spelled like this one, in words; "" without any."""
        spelled = {str(known): known for known in self.ids}
        found = difflib.get_close_matches(str(label), list(spelled), n=_NAMED)
        return f" (close: {', '.join(repr(spelled[one]) for one in found)})" if found else ""


def labels_of(clients: Any, rows: int) -> list[Hashable]:
    """Read one id for each row; a whole number is the same whether it is an int or a float.

    Raises:
        ValueError: If there is not one hashable id for each row.
    """
    given = clients.to_numpy() if hasattr(clients, "to_numpy") else clients
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise ValueError(f"clients = {given!r}: expected one id for each of the {rows} rows")
    labels = [_plain(one) for one in (given.tolist() if isinstance(given, np.ndarray) else given)]
    if len(labels) != rows:
        raise ValueError(f"clients has {len(labels)} entries for {rows} rows: give one a row")
    for row, label in enumerate(labels):
        if isinstance(label, str) and label:
            continue
        if isinstance(label, list | dict | set) or (
            not isinstance(label, tuple) and str(label) in _GAPS
        ):
            raise ValueError(
                f"clients: row {row} (from 0) has {label!r}, expected an id: text, a number or "
                "another hashable value for each row"
            )
    return labels


def number(labels: Sequence[Hashable]) -> Numbering:
    """Number clients as `coterie.from_arrays` does: numbers in order, others as they come."""
    found: list[Any] = list(dict.fromkeys(labels))
    if all(type(label) in (int, float) for label in found):
        found.sort()
    return Numbering(tuple(found))


def split_column(X: Any, column: Any) -> tuple[Any, Any]:
    """Take the column of ids out of rows: (the other columns, the ids).

    Raises:
        ValueError: If there is no such column.
    """
    if hasattr(X, "columns"):
        if column not in list(X.columns):
            raise ValueError(
                f"client_column = {column!r}: expected one of the columns, "
                f"{', '.join(repr(name) for name in list(X.columns)[:_LISTED])}"
            )
        return X[[name for name in X.columns if name != column]], X[column]
    whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
    rows = X if sparse.issparse(X) else np.asarray(X)
    if not whole or rows.ndim != 2 or not -rows.shape[1] <= column < rows.shape[1]:
        raise ValueError(
            f"client_column = {column!r}: X has no column names and shape {rows.shape}, expected "
            "the place of a column, from 0"
        )
    others = np.delete(np.arange(rows.shape[1]), column)
    if sparse.issparse(X):
        by_column = X.tocsc()
        return by_column[:, others].tocsr(), by_column[:, [column]].toarray().reshape(-1)
    return rows[:, others], rows[:, column]


def _plain(label: Any) -> Any:
    label = label.item() if isinstance(label, np.generic) else label
    return int(label) if isinstance(label, float) and label.is_integer() else label
