"""Primitives as wired here, against the vectors of their RFCs and the slow ones of conftest."""

import hmac
import math
import secrets
import struct
from collections import Counter
from fractions import Fraction
from hashlib import sha256
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.deploy.messages import RefusedError
from coterie.deploy.secagg import primitives
from coterie.deploy.secagg.primitives import (
    PRIME,
    Scope,
    add_pair,
    agree,
    combine_shares,
    commitment,
    decrypt,
    encode_info,
    encrypt,
    from_ring,
    hkdf,
    keystream,
    pair_key,
    public_key,
    self_key,
    shares_from_bytes,
    shares_to_bytes,
    split_secret,
    to_ring,
)
from coterie.deploy.secagg.unmask import UnmaskError, unmask_sum

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
    assert encode_info("ab", "c") != encode_info("a", "bc")


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
    sealed = encrypt(key, content, b"from a to b")
    assert sealed == slow.boxed(key, bytes(12), content, b"from a to b")
    assert decrypt(key, sealed, b"from a to b") == content
    with pytest.raises(RefusedError):
        decrypt(key, sealed, b"from b to a")
    with pytest.raises(RefusedError):
        decrypt(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"from a to b")
    with pytest.raises(RefusedError):
        decrypt(key, b"incomplete", b"from a to b")


def test_masks_of_a_pair_cancel():
    total = np.arange(11, dtype=np.uint64)
    add_pair(total, bytes(32), "a", "b")
    assert np.array_equal(total, np.arange(11, dtype=np.uint64) + keystream(bytes(32), 11))
    add_pair(total, bytes(32), "b", "a")
    assert np.array_equal(total, np.arange(11, dtype=np.uint64))


# Shares: against Lagrange's formula over fractions, and by counting in a small field.


PROFILE = settings(derandomize=True, deadline=None, max_examples=100)


def lagrange(points, at):
    """The polynomial through points, at a place, over the rational numbers."""
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(at - other, x - other)
        total += term
    return total


def is_prime(number, rounds=40):
    """Miller and Rabin's test: a composite passes with probability at most 4^-40."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 2 + rounds):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_field_is_of_the_smallest_prime_above_2_256():
    assert is_prime(PRIME)
    assert not any(is_prime(number, 5) for number in range(2**256 + 1, PRIME))


@PROFILE
@given(st.integers(0, PRIME - 1), st.integers(1, 9), st.integers(0, 6), st.randoms())
def test_any_threshold_of_shares_give_the_secret(secret, threshold, more, random):
    places = random.sample(range(1, 60), threshold + more)
    shares = dict(zip(places, split_secret(secret, threshold, places), strict=True))
    chosen = random.sample(places, threshold)
    points = {place: shares[place] for place in chosen}
    # Lagrange over fractions, taken modulo the prime at the end.
    exact = lagrange(points, 0)
    assert exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME == secret
    assert combine_shares(points) == secret
    for place in places:
        assert combine_shares(points, place) == shares[place]


def test_fewer_shares_than_the_threshold_fit_every_secret(monkeypatch):
    """Exact, by counting: in the field of 7 elements all polynomials are listed."""
    small, threshold, places = 7, 3, (1, 2, 4)
    monkeypatch.setattr(primitives, "PRIME", small)
    monkeypatch.setattr(primitives.secrets, "randbelow", lambda _: next(drawn))
    seen = {}
    for secret in range(small):
        counts = Counter()
        for coefficients in product(range(small), repeat=threshold - 1):
            drawn = iter(coefficients)
            shares = split_secret(secret, threshold, places)
            for pair in combinations(range(3), 2):
                counts[pair, tuple(shares[at] for at in pair)] += 1
        seen[secret] = counts
    # Each pair of shares comes exactly once, whatever the secret is: it tells nothing of it.
    assert all(counts == seen[0] for counts in seen.values())
    assert set(seen[0].values()) == {1}
    assert len(seen[0]) == 3 * small**2


def test_coefficients_come_from_the_system_and_fill_the_field(monkeypatch):
    asked = []
    monkeypatch.setattr(primitives.secrets, "randbelow", lambda below: asked.append(below) or 5)
    assert split_secret(7, 4, [1, 2, 3, 4, 5])[0] == 7 + 5 + 5 + 5
    assert asked == [PRIME] * 3


def test_shares_are_linear():
    one, other = split_secret(11, 2, [1, 2, 3]), split_secret(31, 2, [1, 2, 3])
    assert combine_shares({2: one[1] + other[1], 3: one[2] + other[2]}) == 42


def test_bytes():
    values = [0, 1, PRIME - 1, 2**256]
    assert shares_from_bytes(shares_to_bytes(values)) == values
    assert len(shares_to_bytes(values)) == 4 * 33
    with pytest.raises(RefusedError, match="multiple of 33"):
        shares_from_bytes(bytes(34))
    with pytest.raises(RefusedError, match="outside the field"):
        shares_from_bytes(PRIME.to_bytes(33, "little"))


@pytest.mark.parametrize(
    ("secret", "threshold", "places"),
    [
        (PRIME, 2, [1, 2]),
        (-1, 2, [1, 2]),
        (1, 0, [1]),
        (1, 3, [1, 2]),
        (1, 2, [0, 1]),
        (1, 2, [1, 1]),
    ],
)
def test_what_cannot_be_shared_is_refused(secret, threshold, places):
    with pytest.raises(ValueError, match="expected"):
        split_secret(secret, threshold, places)


# Numbers on a grid, in the ring: exact there and back, and nothing else is let in.


COUNTS = st.lists(st.integers(-(2**53), 2**53), min_size=0, max_size=9)


@PROFILE
@given(COUNTS, COUNTS, st.integers(-60, 30), st.integers(-60, 30))
def test_there_and_back_is_exact(first, second, low, high):
    steps = {"b": 2.0**low, "a": 2.0**high}
    arrays = {"b": np.array(first) * steps["b"], "a": np.array(second) * steps["a"]}
    vector = to_ring(arrays, steps)
    # Leaves in the order of their names, each number its count of steps modulo 2^64.
    assert vector.tolist() == [count % 2**64 for count in (*second, *first)]
    shapes = {name: array.shape for name, array in arrays.items()}
    back = from_ring(vector, shapes, steps)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


@PROFILE
@given(
    st.lists(st.lists(st.integers(-(2**50), 2**50), min_size=3, max_size=3), min_size=1, max_size=8)
)
def test_sums_in_the_ring_are_sums_of_contributions(sites):
    steps = {"w": 2.0**-20}
    vectors = [to_ring({"w": np.array(counts) * steps["w"]}, steps) for counts in sites]
    total = from_ring(np.sum(vectors, axis=0, dtype=np.uint64), {"w": (3,)}, steps)["w"]
    exact = [Fraction(sum(column), 2**20) for column in zip(*sites, strict=True)]
    assert [Fraction(number) for number in total] == exact


def test_shapes_come_back_in_order_and_form():
    rng = np.random.default_rng(3)
    steps = {"z": 0.5, "w": 0.25, "one": 4.0}
    arrays = {
        "z": rng.integers(-9, 9, (2, 3)) * 0.5,
        "w": rng.integers(-9, 9, (4, 1, 2)) * 0.25,
        "one": np.array(-8.0),
    }
    back = from_ring(to_ring(arrays, steps), {name: a.shape for name, a in arrays.items()}, steps)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert np.array_equal(back[name], array)


@pytest.mark.parametrize(
    "number",
    [0.3, 1.5, math.nan, math.inf, -math.inf, 5e-324, 2.0**62, -(2.0**62), 2.0**80, 1e308],
)
def test_numbers_off_the_grid_or_too_large_are_refused(number):
    with pytest.raises(ValueError, match=r"w\[1\] = "):
        to_ring({"w": np.array([1.0, number])}, {"w": 1.0})


def test_a_number_that_a_division_would_lose_is_refused():
    with pytest.raises(ValueError, match="not an integer multiple"):
        to_ring({"w": np.array([5e-324])}, {"w": 2.0**10})


def test_the_largest_number_is_taken():
    vector = to_ring({"w": np.array([-(2.0**62 - 2**10)])}, {"w": 1.0})
    assert vector.tolist() == [2**64 - 2**62 + 2**10]


@pytest.mark.parametrize("step", [0.0, -1.0, 0.3, 3.0, math.nan, math.inf])
def test_steps_are_powers_of_two(step):
    with pytest.raises(ValueError, match="power of two"):
        to_ring({"w": np.zeros(1)}, {"w": step})


def test_other_leaves_and_sizes_are_refused():
    with pytest.raises(ValueError, match="one step per leaf"):
        to_ring({"w": np.zeros(1)}, {"v": 1.0})
    with pytest.raises(ValueError, match="expected uint64"):
        from_ring(np.zeros(3, np.uint64), {"w": (2,)}, {"w": 1.0})
    with pytest.raises(ValueError, match="expected uint64"):
        from_ring(np.zeros(2), {"w": (2,)}, {"w": 1.0})


# The gate: answers open if enough sites were told the same survivors, and only then.
#
# That a gate is hidden otherwise is checked exactly: everything that is seen is linear in the
# secret coefficients, so the gate is known if and only if it is in the row space of what is seen.


FIELD = 10007
"""A small prime: ranks of such matrices are those over the large field, but for bad luck, which
could only fail the test: choices are fixed."""


def reduced(rows, row):
    """Take from a row all that rows in echelon form have in common with it."""
    row = [value % FIELD for value in row]
    for pivot, other in rows:
        if row[pivot]:
            factor = row[pivot]
            row = [(a - factor * b) % FIELD for a, b in zip(row, other, strict=True)]
    return row


def spanned(rows, target):
    """Return whether a target is a combination of rows."""
    echelon = []
    for row in rows:
        left = reduced(echelon, row)
        pivot = next((at for at, value in enumerate(left) if value), None)
        if pivot is not None:
            inverse = pow(left[pivot], -1, FIELD)
            echelon.append((pivot, [value * inverse % FIELD for value in left]))
    return not any(reduced(echelon, target))


def share_row(sites, threshold, place, listed):
    """Write a share of a list's gate in terms of coefficients of the base and of each E_v."""
    powers = [pow(place, k, FIELD) for k in range(threshold)]
    row = list(powers)
    for site in range(sites):
        row += powers if site in listed else [0] * threshold
    return row


def seen_by_all_others(sites, threshold, dishonest, found):
    """All rows that a coordinator sees, with all polynomials at the dishonest sites' places."""
    rows = [
        share_row(sites, threshold, place + 1, listed)
        for place, listed in found.items()
        if place not in dishonest
    ]
    for place in dishonest:
        powers = [pow(place + 1, k, FIELD) for k in range(threshold)]
        for at in range(sites + 1):
            row = [0] * (threshold * (sites + 1))
            row[at * threshold : (at + 1) * threshold] = powers
            rows.append(row)
    return rows


def lists(sites, threshold):
    return [
        frozenset(chosen)
        for size in range(threshold, sites + 1)
        for chosen in combinations(range(sites), size)
    ]


def cases():
    """Everything for three sites and for four with one colluder; a fixed choice of the rest."""
    rng = np.random.default_rng(8)
    for sites, threshold, colluders in ((3, 2, 0), (3, 3, 1), (4, 3, 1)):
        assert 2 * threshold > sites + colluders
        honest = range(colluders, sites)
        for found in product(lists(sites, threshold), repeat=len(honest)):
            yield sites, threshold, colluders, dict(zip(honest, found, strict=True))
    for sites, threshold, colluders in ((4, 3, 0), (5, 4, 2), (6, 4, 1), (7, 5, 2)):
        honest, several = range(colluders, sites), lists(sites, threshold)
        for number in range(60):
            # Few different lists: many agree, so that both outcomes are common.
            few = rng.choice(len(several), size=2 + number % 3, replace=False)
            picks = rng.choice(few, size=len(honest))
            yield (
                sites,
                threshold,
                colluders,
                {site: several[at] for site, at in zip(honest, picks, strict=True)},
            )


def test_a_gate_is_known_if_and_only_if_enough_honest_sites_agree():
    outcomes = set()
    for sites, threshold, colluders, found in cases():
        rows = seen_by_all_others(sites, threshold, range(colluders), found)
        opened = set()
        for listed in set(found.values()):
            agree = sum(other == listed for other in found.values())
            target = [1 if at % threshold == 0 else 0 for at in range(threshold)]
            for site in range(sites):
                target += [int(site in listed and at == 0) for at in range(threshold)]
            known = spanned(rows, target)
            assert known == (agree + colluders >= threshold), (sites, threshold, found, listed)
            outcomes.add(known)
            opened |= {listed} if known else set()
        assert len(opened) <= 1
    assert outcomes == {True, False}


def test_the_condition_on_colluders_is_needed():
    """Four sites, a threshold of 3 and two colluders: 2 x 3 = 4 + 2, and two lists open."""
    found = {2: frozenset({0, 1, 2}), 3: frozenset({0, 1, 3})}
    rows = seen_by_all_others(4, 3, range(2), found)
    for listed in found.values():
        target = [1, 0, 0]
        for site in range(4):
            target += [int(site in listed), 0, 0]
        assert spanned(rows, target)


def test_parts_are_shares_of_the_gate():
    names, places = ["a", "b", "c", "d"], [1, 2, 3, 4]
    constants = primitives.new_gate(names)
    assert len(set(constants)) == 5
    shares = [split_secret(constant, 3, places) for constant in constants]
    for listed in (["a", "b", "c"], ["b", "c", "d"], names):
        points = {
            place: primitives.gate_value([column[at] for column in shares], names, listed)
            for at, place in enumerate(places)
        }
        chosen = {place: points[place] for place in (4, 1, 3)}
        by_hand = constants[0] + sum(
            c for name, c in zip(names, constants[1:], strict=True) if name in listed
        )
        assert (
            combine_shares(chosen)
            == primitives.gate_value(constants, names, listed)
            == by_hand % PRIME
        )


def test_keys_and_lists_are_told_apart():
    scope = Scope("run", "setup")
    keys = {
        primitives.gate_key(value, scope, session, name)
        for value in (1, 2)
        for session in (0, 1)
        for name in "ab"
    }
    assert len(keys) == 8
    assert primitives.survivors_digest(["b", "a"]) == primitives.survivors_digest(("a", "b"))
    assert primitives.survivors_digest(["a", "b"]) != primitives.survivors_digest(["ab"])


def test_a_coordinator_that_tells_different_lists_opens_nothing(ready):
    """Four sites, threshold 3: two are told that all are left, two that site-00 fell out.

    Without a gate the seeds of the other three would be open, told by all four.
    """
    group = ready(4, 3)
    names = sorted(group.members)
    masked = {name: m.mask(0, np.ones(2, np.uint64)) for name, m in group.members.items()}
    found = {name: names if name < "site-02" else names[1:] for name in names}
    revealed = {name: group.members[name].reveal(0, found[name]) for name in names}
    for survivors in (names, names[1:]):
        digest = primitives.survivors_digest(survivors)
        # As if all had answered about this list.
        forged = {name: {**one, "list": digest} for name, one in revealed.items()}
        some = {name: masked[name] for name in survivors}
        with pytest.raises(UnmaskError, match="do not decrypt its answer"):
            unmask_sum(0, some, forged, group.advertisements, 3)
