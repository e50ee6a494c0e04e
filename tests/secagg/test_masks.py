"""Primitives as wired here, against the vectors of their RFCs and the slow ones of conftest."""

import hmac
import secrets
import struct
from hashlib import sha256

import numpy as np
import pytest

from coterie.secagg.masks import (
    Scope,
    add_pair,
    agree,
    commitment,
    hkdf,
    keystream,
    pair_key,
    public_key,
    seal,
    self_key,
    told,
    unseal,
)
from coterie.wire import RefusedError

ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
SCOPE = Scope("run", "setup")


def test_agreement_is_that_of_rfc_7748():
    assert public_key(ALICE).hex() == (
        "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    )
    assert public_key(BOB).hex() == (
        "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    )
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert agree(ALICE, public_key(BOB)).hex() == shared
    assert agree(BOB, public_key(ALICE)).hex() == shared


def test_agreement_is_that_of_a_slow_ladder(slow):
    for _ in range(4):
        private, public = secrets.token_bytes(32), public_key(secrets.token_bytes(32))
        assert agree(private, public) == slow.ladder(private, public)


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)])
def test_keys_of_low_order_are_refused(public):
    with pytest.raises(RefusedError, match="low order"):
        agree(ALICE, public)


def test_derivation_is_that_of_rfc_5869():
    secret = b"\x0b" * 22
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    assert hkdf(secret, info, 42, salt).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert hkdf(secret, b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_keys_for_masks_are_derived_as_documented():
    """HKDF by hand: extract with a salt of zeros, one block of expansion."""
    parts = ["coterie secure aggregation v1", "pair", "run", "setup", "7", "a", "b", "told"]
    info = b"".join(struct.pack("<I", len(part)) + part.encode() for part in parts)
    key = hmac.digest(bytes(32), b"secret", sha256)
    expected = hmac.digest(key, info + b"\1", sha256)
    assert pair_key(b"secret", SCOPE, 7, "b", "a", "told") == expected
    assert pair_key(b"secret", SCOPE, 7, "a", "b", "told") == expected


def test_every_key_has_one_purpose():
    seed = bytes(32)
    made = [
        pair_key(seed, SCOPE, 0, "a", "b"),
        pair_key(seed, SCOPE, 1, "a", "b"),
        pair_key(seed, SCOPE, 0, "a", "b", "told"),
        pair_key(seed, SCOPE, 0, "a", "c"),
        pair_key(seed, Scope("run", "other"), 0, "a", "b"),
        pair_key(seed, Scope("other", "setup"), 0, "a", "b"),
        pair_key(seed, Scope("ru", "nsetup"), 0, "a", "b"),
        self_key(seed, SCOPE, 0, "a"),
        self_key(seed, SCOPE, 0, "b"),
        self_key(seed, SCOPE, 1, "a"),
        commitment(seed, SCOPE, 0, "a"),
        commitment(seed, SCOPE, 0, "b"),
    ]
    assert len(set(made)) == len(made)
    assert told("ab", "c") != told("a", "bc")


def test_keystream_is_that_of_rfc_8439(slow):
    """Appendix A.1, vectors 1 and 2: a key of zeros, blocks 0 and 1."""
    blocks = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert keystream(bytes(32), 16).tolist() == list(struct.unpack("<16Q", blocks))
    assert b"".join(slow.block(bytes(32), at, bytes(12)) for at in (0, 1)) == blocks


def test_keystream_is_that_of_a_slow_cipher(slow):
    key = secrets.token_bytes(32)
    blocks = b"".join(slow.block(key, counter, bytes(12)) for counter in range(5))
    for words in (0, 1, 7, 8, 9, 40):
        stream = keystream(key, words)
        assert stream.dtype == np.uint64
        assert stream.tolist() == list(struct.unpack(f"<{words}Q", blocks[: 8 * words]))


def test_the_slow_box_is_that_of_rfc_8439(slow):
    """Section 2.8.2."""
    content = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    about, nonce = (
        bytes.fromhex("50515253c0c1c2c3c4c5c6c7"),
        bytes.fromhex("070000004041424344454647"),
    )
    assert slow.boxed(bytes(range(0x80, 0xA0)), nonce, content, about).hex() == (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
        "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
        "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b6116"
        "1ae10b594f09e26a7e902ecbd0600691"
    )


@pytest.mark.parametrize("length", [0, 1, 33, 64, 200])
def test_boxes_are_those_of_the_slow_one(slow, length):
    key, content = secrets.token_bytes(32), secrets.token_bytes(length)
    sealed = seal(key, content, b"from a to b")
    assert sealed == slow.boxed(key, bytes(12), content, b"from a to b")
    assert unseal(key, sealed, b"from a to b") == content
    with pytest.raises(RefusedError):
        unseal(key, sealed, b"from b to a")
    with pytest.raises(RefusedError):
        unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"from a to b")
    with pytest.raises(RefusedError):
        unseal(key, b"short", b"from a to b")


def test_masks_of_a_pair_cancel():
    total = np.arange(11, dtype=np.uint64)
    add_pair(total, bytes(32), "a", "b")
    assert np.array_equal(total, np.arange(11, dtype=np.uint64) + keystream(bytes(32), 11))
    add_pair(total, bytes(32), "b", "a")
    assert np.array_equal(total, np.arange(11, dtype=np.uint64))
