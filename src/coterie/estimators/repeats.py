"""How often the same rows were fitted: every private fit spends an epsilon of its own.

`GridSearchCV` and `cross_val_score` fit the same clients again and again, and a choice among the
fits is covered by none of them. An estimator cannot see who calls it; but it can tell rows that
this process fitted before. Rows are hashed, and the least hashes of each fit are kept: two sets of
rows with a good part in common have some of them in common (Broder 1997, "On the resemblance and
containment of documents"). Kept in memory of this process alone, never written.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Words = NDArray[np.uint64]
_KEPT = 64  # hashes of a fit
_FITS = 256  # fits remembered
_IN_COMMON = 2  # a row of zeros may be anybody's


@dataclass(frozen=True)
class Fit:
    """A private fit: the least hashes of its rows, and what it spent."""

    hashes: frozenset[int]
    epsilon: float
    delta: float


_PAST: deque[Fit] = deque(maxlen=_FITS)


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


def remember(rows: Rows, epsilon: float, delta: float) -> tuple[Fit, ...]:
    """Note a private fit; give those of this process so far, this one last, that share its rows."""
    hashes = rows.hashes
    fit = Fit(hashes, epsilon, delta)
    least = min(_IN_COMMON, len(hashes))
    before = tuple(past for past in _PAST if len(past.hashes & hashes) >= least)
    _PAST.append(fit)
    return (*before, fit)


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
