"""The building blocks of secure aggregation: keys, masks, shares, gates, and the ring of sums.

**Keys and masks.** X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), the ChaCha20 keystream and
ChaCha20-Poly1305 (RFC 8439), all from the `cryptography` package. Every key is derived for one
purpose, with run, setup, session and names in HKDF's `info`, and is used once; this is why nonces
can be zero.

**Shares.** Shamir, "How to share a secret", CACM 1979: `threshold` shares give the secret, and
fewer give nothing. The secret is the constant of a polynomial f of degree threshold - 1 over the
field of p = 2^256 + 297 elements, the smallest prime above 2^256, so that any 32 bytes are an
element; all other coefficients are uniform. The share at point x (a public integer from 1) is f(x);
Lagrange's formula recovers f(0). Shares are linear: a sum of shares at one point is a share of the
sum.

**Gates.** A gate is a key that opens an answer only if enough sites answered about the same
survivors. A coordinator that sends different sites different lists of survivors could unmask sums
over fewer sites than the threshold. Bonawitz et al. (2017) prevent this with a further message:
sites sign the list, and reveal shares only when they have `threshold` signatures of the same list.
Here it takes no message. For each session every site i deals, next to its two secrets, n + 1 random
polynomials of degree threshold - 1: a base P and one E_v for each site v. The gate of i for a list
L is

    G_i(L) = P(0) + sum over v in L of E_v(0),

and i encrypts its answer about L under a key derived from G_i(L). Every site that answers about L
sends with its answer, for each i, its share P(x) + sum over v in L of E_v(x) of G_i(L), once.

**Guarantee:** with n sites, c of them dishonest and 2 threshold > n + c, G_i(L) of an honest i is
uniform given all that others see, unless at least threshold - c honest sites answered about exactly
L. Hence the answers about at most one list can be opened. *Proof.* Let honest j have answered about
L_j. Shares are linear, so G_i(L) is either uniform or a fixed combination of what is known:
weights a_j on honest answers, and anything on the polynomials at points of dishonest sites. Write
Q for the polynomial of L, and D_v = E_v if v is not in L, -E_v if it is: j's share is
Q(x_j) + sum of D_v(x_j) over v in S_j, the sites in which L_j and L differ. Polynomials are
independent, so for each v the weights on D_v combine to 0 for every polynomial of that degree: the
a_j of those j with v in S_j, with weights on the c points. Such a combination is empty or has more
than `threshold` points. If some is not empty, the others' weights on Q, less those, still give Q(0)
from points disjoint from these among honest sites, and need `threshold` points: together
2 threshold + 1 <= (n - c) + 2 c = n + c, a contradiction. So only sites with L_j = L have weights,
and Q(0) needs `threshold` points, at least threshold - c of them honest.
Two lists would need 2 (threshold - c) <= n - c honest answers, a contradiction again.

**The ring.** Masks are elements of Z/2^64. Contributions are integer multiples of their mechanism's
public step, a power of two, so nothing is rounded here: x becomes x/step, with negative numbers at
the top of the ring (two's complement), and sums in the ring are exactly the sums of the
contributions. A sum outside -2^63 <= x/step < 2^63 wraps; honest sums are at most 2^53 steps, and
what a hostile site adds is bounded afterwards.
"""

import hashlib
import json
import math
import secrets
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from coterie.deploy.messages import RefusedError

KEY = 32
"""Bytes of a key, public or private, of a seed, and of a commitment."""
TAG = 16
"""Bytes that authenticated encryption adds."""
PRIME = (1 << 256) + 297
WIDTH = 33
"""Bytes of a share."""
MAX_STEPS = 1 << 62
"""A number of a site must be below this many steps."""
_DOMAIN = "coterie secure aggregation v1"


@dataclass(frozen=True)
class Scope:
    """The run and the setup in it that keys belong to."""

    run: str
    setup: str


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of 32 private bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret that two key pairs share.

    A public key of low order is refused: it would share zero with every key.
    """
    theirs = X25519PublicKey.from_public_bytes(public)
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(theirs)
    except ValueError as error:
        raise RefusedError("a public key of low order") from error


def hkdf(secret: bytes, info: bytes, length: int = KEY, salt: bytes | None = None) -> bytes:
    """Return a key derived from a secret (RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


def encode_info(*parts: str) -> bytes:
    """Return texts as bytes, each with its length first, so that none can extend into the next."""
    # Received text may have lone surrogates; it is to be refused later, not to end a process.
    encoded = [part.encode(errors="surrogatepass") for part in (_DOMAIN, *parts)]
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)


def pair_key(
    secret: bytes, scope: Scope, session: int, one: str, other: str, context: str = ""
) -> bytes:
    """Return the key of the mask between two sites, the same at both.

    `context` describes what both inputs are about: with different contexts masks do not cancel.
    """
    first, second = sorted((one, other))
    info = ("pair", scope.run, scope.setup, str(session), first, second, context)
    return hkdf(secret, encode_info(*info))


def self_key(seed: bytes, scope: Scope, session: int, name: str) -> bytes:
    """Return the key of a site's own mask."""
    return hkdf(seed, encode_info("self", scope.run, scope.setup, str(session), name))


def commitment(seed: bytes, scope: Scope, session: int, name: str) -> bytes:
    """Return a commitment of a site to its seed. It hides the seed: 256 random bits."""
    info = encode_info("seed", scope.run, scope.setup, str(session), name)
    return hashlib.sha256(info + seed).digest()


def keystream(key: bytes, size: int) -> NDArray[np.uint64]:
    """Return ring elements: the ChaCha20 keystream from block 0 at nonce 0, little-endian."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None)
    stream = cipher.encryptor().update(bytes(8 * size))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def add_pair(total: NDArray[np.uint64], key: bytes, one: str, other: str) -> None:
    """Add the mask of `one` towards `other`, in place; the mask of `other` is its negative."""
    stream = keystream(key, total.size)
    if one < other:
        np.add(total, stream, out=total)
    else:
        np.subtract(total, stream, out=total)


def encrypt(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt, bound to `about`. The key must never be used again: the nonce is zero."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def decrypt(key: bytes, encrypted: bytes, about: bytes) -> bytes:
    """Decrypt; refuse what was not encrypted under this key about this."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), encrypted, about)
    except InvalidTag as error:
        raise RefusedError("cannot be decrypted here") from error


def split_secret(secret: int, threshold: int, points: Sequence[int]) -> list[int]:
    """Return shares of an element of the field, one for each point."""
    if not 0 <= secret < PRIME:
        raise ValueError("secret is outside the field: expected 0 <= secret < 2^256 + 297")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold = {threshold} with {len(points)} points: expected 1 to that")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError(f"points {list(points)[:8]}: expected distinct integers from 1")
    higher = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [_value([secret, *higher], point) for point in points]


def combine_shares(shares: Mapping[int, int], at: int = 0) -> int:
    """Return the value at a point, 0 for the secret, of the polynomial through shares by point."""
    weights = _weights(tuple(shares), at)
    return sum(w * share for w, share in zip(weights, shares.values(), strict=True)) % PRIME


def shares_to_bytes(values: Sequence[int]) -> bytes:
    """Return elements of the field as bytes, 33 each, little-endian."""
    return b"".join(value.to_bytes(WIDTH, "little") for value in values)


def shares_from_bytes(content: bytes) -> list[int]:
    """Return the elements of the field in bytes; refuse anything else."""
    if len(content) % WIDTH:
        raise RefusedError(f"{len(content)} bytes of shares: expected a multiple of {WIDTH}")
    pieces = (content[at : at + WIDTH] for at in range(0, len(content), WIDTH))
    values = [int.from_bytes(piece, "little") for piece in pieces]
    if any(value >= PRIME for value in values):
        raise RefusedError("a share outside the field")
    return values


def _value(coefficients: Sequence[int], point: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return total


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], at: int) -> tuple[int, ...]:
    # Points are public, and the same for every secret of a round.
    found = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * (at - other) % PRIME
                below = below * (point - other) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)


def new_gate(names: Sequence[str]) -> list[int]:
    """Return random constants of a gate: of the base, then of each name."""
    return [secrets.randbelow(PRIME) for _ in range(len(names) + 1)]


def gate_value(row: Sequence[int], names: Sequence[str], survivors: Collection[str]) -> int:
    """Return the gate of a list from a row of constants, or a share of it from a row of shares."""
    base, *others = row
    listed = (value for name, value in zip(names, others, strict=True) if name in survivors)
    return (base + sum(listed)) % PRIME


def survivors_digest(survivors: Collection[str]) -> str:
    """Return a hash of a list of survivors."""
    return hashlib.sha256(json.dumps(sorted(survivors)).encode()).hexdigest()


def gate_key(gate: int, scope: Scope, session: int, name: str) -> bytes:
    """Return the key under which a site encrypts its answer."""
    info = encode_info("gate", scope.run, scope.setup, str(session), name)
    return hkdf(shares_to_bytes([gate]), info)


def to_ring(
    arrays: Mapping[str, NDArray[np.float64]], steps: Mapping[str, float]
) -> NDArray[np.uint64]:
    """Return arrays as one vector of the ring: leaves in the order of their names, flattened."""
    _check_steps(set(arrays), steps)
    parts = [_count(name, arrays[name], steps[name]) for name in sorted(arrays)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def from_ring(
    vector: NDArray[np.uint64], shapes: Mapping[str, tuple[int, ...]], steps: Mapping[str, float]
) -> dict[str, NDArray[np.float64]]:
    """Return the arrays of a ring vector; numbers above the middle of the ring are negative."""
    _check_steps(set(shapes), steps)
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    if vector.dtype != np.uint64 or vector.shape != (sum(sizes.values()),):
        raise ValueError(
            f"a vector of {vector.dtype} {vector.shape}: expected uint64 ({sum(sizes.values())},)"
        )
    signed, found, at = np.ascontiguousarray(vector).view(np.int64), {}, 0
    for name, size in sizes.items():
        counts = signed[at : at + size].astype(np.float64)
        found[name] = (counts * steps[name]).reshape(shapes[name])
        at += size
    return found


def _count(name: str, array: NDArray[np.float64], step: float) -> NDArray[np.uint64]:
    numbers = np.asarray(array, dtype=np.float64).ravel()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        counts = numbers / step
        # The product detects what the division loses: a number far below the step becomes 0 in it.
        whole = np.isfinite(counts) & (np.floor(counts) == counts) & (counts * step == numbers)
    if not whole.all():
        at = int(np.argmin(whole))
        raise ValueError(
            f"{name}[{at}] = {numbers[at]!r} is not an integer multiple of {step!r}: put "
            "contributions on the mechanism's grid first"
        )
    if np.any(np.abs(counts) >= MAX_STEPS):
        at = int(np.argmax(np.abs(counts)))
        raise ValueError(
            f"{name}[{at}] = {numbers[at]!r} is 2^62 steps of {step!r} or more: clip it first"
        )
    return counts.astype(np.int64).view(np.uint64)


def _check_steps(names: set[str], steps: Mapping[str, float]) -> None:
    if names != set(steps):
        raise ValueError(
            f"leaves {sorted(names)} with steps for {sorted(steps)}: expected one step per leaf"
        )
    for name, step in steps.items():
        if not 0 < step < math.inf or math.frexp(step)[0] != 0.5:
            raise ValueError(f"step {step!r} of {name}: expected a power of two")
