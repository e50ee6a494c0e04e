"""Key derivation for random streams, without torch."""

import hashlib


def derive_key(*parts: str | int) -> int:
    """Derive a 64-bit key from names and numbers (BLAKE2b); distinct inputs give distinct keys."""
    joined = b"".join(
        len(text).to_bytes(4, "little") + text for text in (repr(part).encode() for part in parts)
    )
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
