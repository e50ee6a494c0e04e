"""Sources of randomness for cohorts and noise: the operating system, or a seed in simulations.

An adversary who guesses a client's data can subtract the guess from a release and examine the
noise; a statistical generator (PCG, Mersenne twister) could then be recognised. So a real run takes
everything from `os.urandom`: cohorts word by word, and for noise a fresh key of 256 bits for each
release, and for each client that adds its own, which ChaCha20 expands (see `chacha` and ADR 9).
Seeded sources are for simulations only, and their results are labelled "simulation".
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.core.rng import derive_key, derive_keys

Words = NDArray[np.uint64]


class Entropy(Protocol):
    """A source of independent uniform 64-bit words."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw words that were never drawn before."""


@dataclass(frozen=True)
class SystemEntropy:
    """The operating system's cryptographic generator."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw words from `os.urandom`."""
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


@dataclass
class SeededEntropy:
    """A reproducible stream, for simulations only."""

    seed: int
    purpose: str
    index: int
    client: int | None = None
    _bits: np.random.Philox = field(init=False, repr=False)

    def __post_init__(self) -> None:
        whose = () if self.client is None else (self.client,)
        self._bits = np.random.Philox(key=derive_key(self.seed, self.purpose, self.index, *whose))

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw the next words of the stream."""
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64).reshape(count)


def open_entropy(seed: int | None, purpose: str, index: int, client: int | None = None) -> Entropy:
    """Open the source for one use: the system's unless a simulation seed is given."""
    return SystemEntropy() if seed is None else SeededEntropy(seed, purpose, index, client)


_CLIENT_NOISE = "client-noise"


@dataclass(frozen=True)
class ClientSources:
    """Each client's own source of a round, by the client's id.

    In a simulation a client's stream depends only on the seed, the round and the client: not on the
    cohort, nor on which clients are computed together.
    """

    seed: int | None
    round: int

    def __call__(self, client: int) -> Entropy:
        """Open a client's source."""
        return open_entropy(self.seed, _CLIENT_NOISE, self.round, client)

    def keys(self, clients: Sequence[int]) -> NDArray[np.uint32]:
        """Draw a fresh key for each client, (k, 8): those of `draw_keys`, all at once."""
        if self.seed is None:
            return np.frombuffer(os.urandom(32 * len(clients)), dtype="<u4").reshape(-1, 8)
        keys = derive_keys(clients, self.seed, _CLIENT_NOISE, self.round)
        return _first_words(keys).astype("<u8").view("<u4")


def client_entropy(seed: int | None, round: int) -> ClientSources:
    """Return a function that opens each client's own source of a round, by the client's id."""
    return ClientSources(seed, round)


def uniforms(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """Draw uniforms in the open interval (0, 1)."""
    return ((entropy.words(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def draw_keys(sources: Sequence[Entropy]) -> NDArray[np.uint32]:
    """Draw a key of 256 bits from each source, (k, 8); a key is for one use."""
    words = [source.words(4) for source in sources]
    return np.array(words, dtype="<u8").reshape(-1, 4).view("<u4")


def _first_words(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the first four words of `np.random.Philox` under each key, (k, 4), all at once.

    Philox 4x64 with 10 rounds (Salmon et al. 2011), counter 1; opening a generator for each client
    takes longer than its noise.
    """
    even, odd = np.zeros((2, 2, len(keys)), dtype=np.uint64)  # words 0 and 2, words 1 and 3
    even[0] = 1
    key = np.stack([keys, np.zeros_like(keys)])
    with np.errstate(over="ignore"):
        for _ in range(10):
            # High and low words of two products of 128 bits.
            u, v = even >> _HALF, even & _LOW
            cross = _FACTORS[0] * v + (_FACTORS[1] * v >> _HALF)
            rest = _FACTORS[1] * u + (cross & _LOW)
            high = _FACTORS[0] * u + (cross >> _HALF) + (rest >> _HALF)
            even, odd = high[::-1] ^ odd ^ key, (even * _FACTORS[2])[::-1]
            key = key + _WEYL
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_WHOLE = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_FACTORS = (_WHOLE >> _HALF, _WHOLE & _LOW, _WHOLE)


def normals(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """Draw standard normals with full tails, from a fresh key of the source.

    One bit of 128 is the sign, 127 bits are the tail probability, which is inverted. In float64
    that probability has 53 significant bits wherever it lies, so that values far out in the tail
    are as finely spaced as those in the middle; callers round the result to a coarser public grid
    (see `mechanisms`). With 64 bits, nothing would reach some cells of that grid beyond 7
    deviations, which would reveal inputs.

    **Guarantee:** none by itself; `chacha` states what is assumed of the key. Test:
    tests/statistics/test_noise.py.
    """
    if isinstance(entropy, DrawnAhead):
        return entropy.normals(count)
    from coterie.privacy.chacha import normals_of_keys

    (found,) = normals_of_keys(draw_keys([entropy]), count)
    return np.asarray(found)


_WORTH_A_THREAD = 4096
"""Fewer normals take less time than the start of a thread (0.3 ms against 1 ms)."""


class DrawnAhead:
    """Normals of a source, drawn in a thread while the contributions are still being computed.

    Noise does not depend on data, so it may be drawn before the sum is known; each number is used
    once. Few numbers are drawn at once, without a thread: they are the same numbers.
    """

    def __init__(self, source: Entropy, count: int) -> None:
        self._source, self._count, self._used = source, count, 0
        self._drawn: Future[NDArray[np.float64]] = Future()
        if count < _WORTH_A_THREAD:
            self._drawn.set_result(normals(source, count))
        else:
            thread = ThreadPoolExecutor(1)
            self._drawn = thread.submit(normals, source, count)
            thread.shutdown(wait=False)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw fresh words of the source, once the normals are drawn."""
        self._drawn.result()
        return self._source.words(count)

    def normals(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers; further ones than those drawn ahead are drawn now."""
        drawn = self._drawn.result()
        if self._used + count > self._count:
            return normals(self._source, count)
        first, self._used = self._used, self._used + count
        return drawn[first : self._used]
