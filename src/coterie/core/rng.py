"""Named random streams for everything but noise: `rng.at("client", round).keys(ids)`.

A stream is a key; a name or number derives another key from it (BLAKE2b). A client's random
numbers depend only on its id and the round, not on its block or on the other clients of the round.
Privacy noise and cohorts do not come from here: see `coterie.privacy.entropy`.
"""

import hashlib
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # planning and accounting do not load torch
    import torch


def derive_key(*parts: str | int) -> int:
    """Derive a 64-bit key from names and numbers (BLAKE2b); distinct inputs give distinct keys."""
    return int.from_bytes(_hashed(*parts).digest(), "little")


def derive_keys(numbers: Sequence[int], *parts: str | int) -> NDArray[np.uint64]:
    """Derive the keys of numbers: `derive_key(*parts, number)` of each."""
    before, found = _hashed(*parts), bytearray()
    for number in numbers:
        one = before.copy()
        one.update(_encoded(number))
        found += one.digest()
    return np.frombuffer(bytes(found), dtype="<u8")


def _hashed(*parts: str | int) -> "hashlib.blake2b":
    return hashlib.blake2b(b"".join(map(_encoded, parts)), digest_size=8)


def _encoded(part: str | int) -> bytes:
    # A number is the same name whatever its type (int, numpy.int64, True).
    text = repr(str(part) if isinstance(part, str) else operator.index(part)).encode()
    return len(text).to_bytes(4, "little") + text


@dataclass(frozen=True)
class Rng:
    """A random stream named by a 64-bit key.

    >>> Rng.seeded(1).at("client", 3) == Rng.seeded(1).at("client", 3)
    True
    >>> Rng.seeded(1).at("client", 3) == Rng.seeded(1).at("client", 4)
    False
    """

    key: int = field(repr=False)

    @classmethod
    def seeded(cls, seed: int) -> "Rng":
        """Make the stream of a seed."""
        return cls(derive_key("coterie", int(seed)))

    @classmethod
    def fresh(cls) -> "Rng":
        """Make a stream from the operating system's entropy."""
        return cls(secrets.randbits(64))

    def at(self, *names: str | int) -> "Rng":
        """Derive the stream of a name."""
        return Rng(derive_key(self.key, *names))

    def keys(self, ids: "NDArray[np.int64] | torch.Tensor") -> NDArray[np.uint64]:
        """Derive one key per client id, for kernels that draw each client's own random stream."""
        words = np.asarray(ids if isinstance(ids, np.ndarray) else ids.cpu()).astype(np.uint64)
        with np.errstate(over="ignore"):
            return _mix(_mix(words + np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(self.key))

    def words(self, ids: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a random word for each place of each client's own stream, e.g. for its rows."""
        with np.errstate(over="ignore"):
            steps = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            return _mix(self.keys(ids) + steps)

    def numpy(self) -> np.random.Generator:
        """Make a NumPy generator of this stream."""
        return np.random.Generator(np.random.Philox(key=self.key))

    def torch(self, device: "torch.device | str" = "cpu") -> "torch.Generator":
        """Make a torch generator of this stream."""
        import torch

        return torch.Generator(device).manual_seed(self.key >> 1)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
