"""Key derivation for random streams, without torch."""

import hashlib
import operator


def derive_key(*parts: str | int) -> int:
    """Derive a 64-bit key from names and numbers (BLAKE2b); distinct inputs give distinct keys."""
    # A number is the same name whatever its type (int, numpy.int64, True).
    plain = [str(part) if isinstance(part, str) else operator.index(part) for part in parts]
    encoded = [repr(part).encode() for part in plain]
    joined = b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
