"""The primitives: key agreement, derivation of keys, keystreams, sealed boxes.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), the ChaCha20 keystream and ChaCha20-Poly1305 (RFC 8439),
all from the `cryptography` package. Every key is derived for one purpose, with run, setup, session
and names in HKDF's `info`, and used once; this is why nonces can be zero.
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from coterie.wire import RefusedError

KEY = 32
"""Bytes of a key, public or private, of a seed, and of a commitment."""
TAG = 16
"""Bytes that sealing adds."""
_DOMAIN = "coterie secure aggregation v1"


@dataclass(frozen=True)
class Scope:
    """What keys belong to: a run, and one setup in it."""

    run: str
    setup: str


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of 32 private bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret that two key pairs share.

    Raises:
        RefusedError: If the public key is of low order: it would share zero with everybody.
    """
    theirs = X25519PublicKey.from_public_bytes(public)
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(theirs)
    except ValueError as error:
        raise RefusedError("a public key of low order") from error


def hkdf(secret: bytes, info: bytes, length: int = KEY, salt: bytes | None = None) -> bytes:
    """Derive a key from a secret (RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


def told(*parts: str) -> bytes:
    """Write words so that none can move into its neighbour: each with its length before it."""
    # Text from outside may hold lone surrogates; it is to be refused later, not to end a process.
    encoded = [part.encode(errors="surrogatepass") for part in (_DOMAIN, *parts)]
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)


def pair_key(
    secret: bytes, scope: Scope, session: int, one: str, other: str, context: str = ""
) -> bytes:
    """Derive the key of the mask between two sites, the same at both.

    `context` is what both were told their inputs are about: with other words masks do not cancel.
    """
    first, second = sorted((one, other))
    words = ("pair", scope.run, scope.setup, str(session), first, second, context)
    return hkdf(secret, told(*words))


def self_key(seed: bytes, scope: Scope, session: int, name: str) -> bytes:
    """Derive the key of a site's own mask."""
    return hkdf(seed, told("self", scope.run, scope.setup, str(session), name))


def commitment(seed: bytes, scope: Scope, session: int, name: str) -> bytes:
    """Bind a site to its seed. It hides the seed: 256 random bits cannot be guessed."""
    words = told("seed", scope.run, scope.setup, str(session), name)
    return hashlib.sha256(words + seed).digest()


def keystream(key: bytes, words: int) -> NDArray[np.uint64]:
    """Return ring elements: the ChaCha20 keystream from block 0 at nonce 0, little-endian."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None)
    stream = cipher.encryptor().update(bytes(8 * words))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def add_pair(total: NDArray[np.uint64], key: bytes, one: str, other: str) -> None:
    """Add the mask that `one` wears towards `other`, in place: what `other` wears is minus that."""
    stream = keystream(key, total.size)
    if one < other:
        np.add(total, stream, out=total)
    else:
        np.subtract(total, stream, out=total)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt, bound to `about`. The key must never be used again: the nonce is zero."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Decrypt.

    Raises:
        RefusedError: If it was not sealed under this key about this.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag as error:
        raise RefusedError("a sealed box that does not open here") from error
