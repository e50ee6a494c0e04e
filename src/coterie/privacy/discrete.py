"""Discrete Gaussian integers, drawn exactly from uniform words, for many sources side by side.

The discrete Gaussian of variance parameter v has P(x) proportional to exp(-x^2 / (2 v)) on the
integers (Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy"). It is
drawn by rejection. Let S = 2^b with S/2 < sqrt(v) <= S. A word of 64 bits is a proposal: b bits are
a uniform rest r, one bit is the sign, and the position k of the lowest set bit among the others is
geometric. x = k S + r is proposed with probability 2^-(k+1) / S and kept with probability

    p = 2^k exp(-x^2 / (2 v)) / 1.25 <= 1,

since v <= S^2 and max_k 2^k exp(-k^2 / 2) = 1.213. A proposal of minus zero is dropped. The
comparison of a second uniform word with p is decided in float64 if they differ by more than a bound
on its rounding; otherwise in decimals, with as many further words as it takes. So no rounding
reaches the law, at a cost of a few words for each number.

**Guarantee:** each number is independent and has the law above, given |x| < 23 sqrt(v), if the
sources return independent uniform words. The cut, at 63 - b >= 23 multiples of S, has a probability
below 1e-114. Test: tests/statistics/test_shares.py.
"""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.entropy import Entropy

Integers = NDArray[np.int64]

LARGEST_VARIANCE = 1 << 80
"""With S of at most 2^40, squares of proposals lose no more than a bit in float64."""
_MOST = 1.25
_RELATIVE, _ABSOLUTE = 2.0**-36, 2.0**-50
"""Bounds on the rounding of p: its exponent is below 1100 in size wherever p exceeds 2^-50."""
_WORDS = 1 << 21
"""Words that are drawn at once, about."""


def discrete_gaussians(sources: Sequence[Entropy], count: int, variance: int) -> Integers:
    """Return a row of `count` numbers for each source; a row depends on its own source only."""
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"variance = {variance}: expected a whole number from 1 to 2^80")
    found = np.zeros((len(sources), count), dtype=np.int64)
    width = (math.isqrt(variance - 1)).bit_length() if variance > 1 else 0
    kept = math.sqrt(2 * math.pi * variance) / (4 * _MOST * 2**width)
    tries = math.ceil(count / kept + 4 * math.sqrt(count) / kept + 8)
    size = max(1, _WORDS // (2 * tries))
    for first in range(0, len(sources), size):
        part = slice(first, first + size)
        _fill(found[part], sources[part], tries, width, variance)
    return found


def _fill(found: Integers, sources: Sequence[Entropy], tries: int, width: int, v: int) -> None:
    """Write the first numbers that are kept of each source's proposals, in order."""
    words = np.stack([source.words(2 * tries) for source in sources]).reshape(-1, 2, tries)
    x, kept = _propose(words, width, v, sources)
    place = np.cumsum(kept, axis=1) - 1
    rows, columns = np.nonzero(kept & (place < found.shape[1]))
    found[rows, place[rows, columns]] = x[rows, columns]
    for row in np.flatnonzero(place[:, -1] + 1 < found.shape[1]).tolist():
        rest = found[row : row + 1, place[row, -1] + 1 :]
        rest[...] = discrete_gaussians([sources[row]], rest.shape[1], v)


def _propose(
    words: NDArray[np.uint64], width: int, v: int, sources: Sequence[Entropy]
) -> tuple[Integers, NDArray[np.bool_]]:
    """Return proposals, and which of them are kept."""
    first, second = words[:, 0], words[:, 1]
    rest = (first & np.uint64((1 << width) - 1)).astype(np.int64)
    sign = 1 - 2 * ((first >> np.uint64(width)) & np.uint64(1)).astype(np.int64)
    others = first >> np.uint64(width + 1)
    lowest = others & (~others + np.uint64(1))
    k = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1  # -1 where no bit is set
    x = (k << width) + rest
    squares = np.square(x.astype(np.float64)) / (2.0 * v)
    p = np.exp(k * math.log(2) - squares) / _MOST
    uniform = (second.astype(np.float64) + 0.5) * 2.0**-64
    kept = uniform < p
    for row, column in np.argwhere(np.abs(uniform - p) <= p * _RELATIVE + _ABSOLUTE):
        kept[row, column] = _exactly(
            int(x[row, column]), int(k[row, column]), v, int(second[row, column]), sources[row]
        )
    kept &= (k >= 0) & ((x > 0) | (sign > 0))
    return sign * x, kept


def _exactly(x: int, k: int, v: int, word: int, source: Entropy) -> bool:
    """Return whether the uniform number that begins with this word is below p."""
    bits = 64
    while True:
        with localcontext() as context:
            context.prec = bits // 3 + 40
            p = (Decimal(k) * Decimal(2).ln() - Decimal(x * x) / Decimal(2 * v)).exp()
            p = p / Decimal(_MOST) * Decimal(2) ** bits
            slack = p * Decimal(10) ** -(bits // 3 + 20)
            if word + 1 <= p - slack:
                return True
            if word >= p + slack:
                return False
        word, bits = (word << 64) | int(source.words(1)[0]), bits + 64
