"""Sites in a setup, and slow writings of the primitives, for tests of secure aggregation."""

import hmac
import struct
from hashlib import sha256
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.deploy.secagg.member import Member


def names_of(count):
    return [f"site-{number:02d}" for number in range(count)]


def begun(count, sessions, setup="setup-0", run="run"):
    """Members that advertised; keys from fixed seeds: only signatures depend on them."""
    private = {
        name: Ed25519PrivateKey.from_private_bytes(bytes([number + 1] * 32))
        for number, name in enumerate(names_of(count))
    }
    keys = {name: key.public_key() for name, key in private.items()}
    members, advertisements = {}, {}
    for name, key in private.items():
        members[name], advertisements[name] = Member.begin(run, setup, name, sessions, key)
    return SimpleNamespace(
        private=private, keys=keys, members=members, advertisements=advertisements
    )


def set_up(count, threshold, sessions=1, setup="setup-0"):
    """Members that are ready."""
    group = begun(count, sessions, setup)
    group.threshold = threshold
    group.dealt = {
        name: member.share(group.advertisements, group.keys, threshold)
        for name, member in group.members.items()
    }
    for name, member in group.members.items():
        member.receive(
            {dealer: dealt[name] for dealer, dealt in group.dealt.items() if dealer != name}
        )
    return group


def block(key, counter, nonce):
    """One block of ChaCha20, as RFC 8439 section 2.3 describes it."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter]
    start += struct.unpack("<3I", nonce)
    state = list(start)

    def turn(number, bits):
        return ((number << bits) | (number >> (32 - bits))) & 0xFFFFFFFF

    def quarter(a, b, c, d):
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & 0xFFFFFFFF
            state[z] = turn(state[z] ^ state[x], bits)

    for _ in range(10):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for at in range(4):
            quarter(at, 4 + (at + 1) % 4, 8 + (at + 2) % 4, 12 + (at + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(state, start, strict=True)))


def boxed(key, nonce, content, about):
    """ChaCha20-Poly1305, as RFC 8439 section 2.8 describes it."""
    stream = b"".join(block(key, 1 + at, nonce) for at in range(len(content) // 64 + 1))
    hidden = bytes(a ^ b for a, b in zip(content, stream, strict=False))

    def padded(part):
        return part + bytes(-len(part) % 16)

    said = padded(about) + padded(hidden) + struct.pack("<QQ", len(about), len(hidden))
    one_time = block(key, 0, nonce)
    r = int.from_bytes(one_time[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for at in range(0, len(said), 16):
        total = (total + int.from_bytes(said[at : at + 16] + b"\1", "little")) * r % (2**130 - 5)
    tag = (total + int.from_bytes(one_time[16:32], "little")) % 2**128
    return hidden + tag.to_bytes(16, "little")


def ladder(scalar, u):
    """X25519, as RFC 7748 section 5 describes it."""
    p = 2**255 - 19
    k = (int.from_bytes(scalar, "little") & ~7 & (2**254 - 1)) | 2**254
    x1 = int.from_bytes(u, "little") % 2**255
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in reversed(range(255)):
        flip = (k >> bit) & 1
        if flip:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a, c * b
        e = a * a - b * b
        x3, z3 = pow(da + cb, 2, p), x1 * pow(da - cb, 2, p) % p
        x2, z2 = a * a * b * b % p, e * (a * a + 121665 * e) % p
        if flip:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def derived(secret, *parts):
    """HKDF-SHA256 (RFC 5869) to 32 bytes without salt, for words that are told."""
    words = ("coterie secure aggregation v1", *parts)
    info = b"".join(struct.pack("<I", len(word)) + word.encode() for word in words)
    return hmac.digest(hmac.digest(bytes(32), secret, sha256), info + b"\1", sha256)


def words_of(key, count):
    """The first words of a keystream, as Python's whole numbers."""
    stream = b"".join(block(key, at, bytes(12)) for at in range(count // 8 + 1))
    return struct.unpack(f"<{count}Q", stream[: 8 * count])


@pytest.fixture
def slow():
    return SimpleNamespace(
        block=block, boxed=boxed, ladder=ladder, derived=derived, words_of=words_of
    )


@pytest.fixture
def begin():
    return begun


@pytest.fixture
def ready():
    return set_up
