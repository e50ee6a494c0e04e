"""Shares of a secret, of which `threshold` give it and fewer give nothing.

Shamir, "How to share a secret", CACM 1979: the secret is the constant of a polynomial f of degree
threshold - 1 over the field of p = 2^256 + 297 elements, the smallest prime above 2^256, so that
any 32 bytes are an element; all other coefficients are uniform. The share at place x (a public
whole number from 1) is f(x); f(0) is recovered by Lagrange's formula. Shares are linear: a sum of
shares at one place is a share of the sum.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from coterie.wire import RefusedError

PRIME = (1 << 256) + 297
WIDTH = 33
"""Bytes of a share."""


def split(secret: int, threshold: int, places: Sequence[int]) -> list[int]:
    """Share an element of the field among places.

    Raises:
        ValueError: If places are not distinct and positive, or fewer than the threshold.
    """
    if not 0 <= secret < PRIME:
        raise ValueError("a secret outside the field: expected 0 <= secret < 2^256 + 297")
    if not 1 <= threshold <= len(places):
        raise ValueError(f"threshold = {threshold} with {len(places)} places: expected 1 to that")
    if len(set(places)) < len(places) or not all(0 < place < PRIME for place in places):
        raise ValueError(f"places {list(places)[:8]}: expected distinct whole numbers from 1")
    higher = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [_value([secret, *higher], place) for place in places]


def combine(shares: Mapping[int, int], at: int = 0) -> int:
    """Return the value at a place, 0 for the secret, of the polynomial through shares by place."""
    weights = _weights(tuple(shares), at)
    return sum(w * share for w, share in zip(weights, shares.values(), strict=True)) % PRIME


def to_bytes(values: Sequence[int]) -> bytes:
    """Write elements of the field, 33 bytes each, little-endian."""
    return b"".join(value.to_bytes(WIDTH, "little") for value in values)


def from_bytes(content: bytes) -> list[int]:
    """Read elements of the field.

    Raises:
        RefusedError: If they are none.
    """
    if len(content) % WIDTH:
        raise RefusedError(f"{len(content)} bytes of shares: expected a multiple of {WIDTH}")
    pieces = (content[at : at + WIDTH] for at in range(0, len(content), WIDTH))
    values = [int.from_bytes(piece, "little") for piece in pieces]
    if any(value >= PRIME for value in values):
        raise RefusedError("a share outside the field")
    return values


def _value(coefficients: Sequence[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total


@lru_cache(maxsize=1024)
def _weights(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    # Places are public, and the same ones come for every secret of a round.
    found = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * (at - other) % PRIME
                below = below * (place - other) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
