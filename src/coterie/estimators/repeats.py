"""How often the same rows were fitted: every private fit spends an epsilon of its own.

`GridSearchCV` and `cross_val_score` fit the same clients again and again, and a choice among the
fits is covered by none of them. An estimator cannot see who calls it; but it can tell rows that
this process fitted before. Rows are hashed, and the least hashes of each fit are kept: two sets of
rows with a good part in common have some of them in common (Broder 1997, "On the resemblance and
containment of documents"). Kept in memory of this process alone, never written.

What was spent is a running total by rows, which no later fit pushes out: beyond so many different
sets of rows the two oldest are taken for one, so that a fit may be counted where it does not
belong, and none is left out. Rows are not recognised in another process; nor where a step of a
pipeline has changed the features (or the order of columns) of targets that do not tell rows apart,
as classes; nor where fewer than two of the hashes that are kept agree.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Words = NDArray[np.uint64]
_KEPT = 64  # hashes of a fit
_SETS = 256  # sets of rows told apart
_IN_COMMON = 2  # a row of zeros may be anybody's


@dataclass(frozen=True)
class Spent:
    """What private fits of the same rows have spent, added up."""

    fits: int = 0
    epsilon: float = 0.0
    delta: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.fits + other.fits, self.epsilon + other.epsilon, self.delta + other.delta)


_PAST: dict[frozenset[int], Spent] = {}
"""By the least hashes of rows, the oldest first."""


@dataclass(frozen=True)
class Rows:
    """Rows of a fit: features, targets, and whose they are."""

    X: Any
    y: NDArray[Any]
    codes: NDArray[np.int64]
    names: Sequence[str]

    @property
    def hashes(self) -> frozenset[int]:
        """The least hashes of rows and, where targets tell rows apart, of targets by client.

        The latter stay the same where a step of a pipeline has changed the features.
        """
        found = _least(_hashes(self.X, self.y))
        if 2 * len(np.unique(self.y)) <= len(self.y):
            return found
        owners = np.array([_word(name) for name in self.names], dtype=np.uint64)
        return found | _least(_mixed(_mixed(_words(self.y)) + owners[self.codes]))


def remember(rows: Rows, epsilon: float, delta: float) -> Spent:
    """Note a private fit; give what those of this process that share its rows spent, with it."""
    hashes = rows.hashes
    least = min(_IN_COMMON, len(hashes))
    _PAST[hashes] = _PAST.get(hashes, Spent()) + Spent(1, epsilon, delta)
    while len(_PAST) > _SETS:
        _join_oldest()
    shared = [spent for known, spent in _PAST.items() if len(known & hashes) >= least]
    return sum(shared, Spent())


def _join_oldest() -> None:
    """Take the two oldest sets of rows for one: a total is too large then, never too small."""
    first, second = list(_PAST)[:2]
    both = _PAST.pop(first) + _PAST.pop(second)
    old = {first | second: both}
    for known, spent in list(_PAST.items()):
        old[known] = old.get(known, Spent()) + spent
    _PAST.clear()
    _PAST.update(old)


def _least(hashes: Words) -> frozenset[int]:
    return frozenset(np.unique(hashes)[:_KEPT].tolist())


def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _hashes(X: Any, y: NDArray[Any]) -> Words:
    """Hash each row with its target; equal rows have equal hashes."""
    width = int(np.prod(X.shape[1:]))
    factors = _mixed(np.arange(1, width + 2, dtype=np.uint64)) | np.uint64(1)
    if sparse.issparse(X):
        terms = _words(X.data) * factors[X.indices]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
        rows = sums[X.indptr[1:]] - sums[X.indptr[:-1]]
    else:
        rows = (_words(X).reshape(len(X), width) * factors[:width]).sum(axis=1, dtype=np.uint64)
    return _mixed(rows + _words(y) * factors[width])


def _words(values: NDArray[Any]) -> Words:
    # 0.0 and -0.0 are one number with two spellings.
    return np.ascontiguousarray(np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)


def _mixed(words: Words) -> Words:
    """Spread the bits (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
