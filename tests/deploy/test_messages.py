"""Letters: what was signed comes out as it went in; everything else is refused, and only refused.

Fuzzed: whatever bytes arrive, opening them gives a message or a `RefusedError`, never another
exception and never numbers that were not asked for.
"""

import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.deploy import messages as wire
from coterie.deploy.messages import (
    MAX_HEADER,
    Envelope,
    Expected,
    Message,
    RawArray,
    RefusedError,
    check_array,
    digest,
    pack,
    peek,
    sign,
    unpack,
    verify,
)

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PROFILE = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
EXPECTED = {"sum/w": Expected("float64", (2, 3)), "sum/b": Expected("float64", ())}
ARRAYS = {"sum/w": np.arange(6.0).reshape(2, 3), "sum/b": np.array(-0.5)}
LETTER = Message("round", "run1", "north", 3, "n" * 32, {"a": [1, "x", 2.5]}, ARRAYS)
HEAD = json.loads(sign(LETTER, KEY).header)


def opened(envelope, expected=EXPECTED, key=KEY):
    return verify(envelope, key.public_key(), expected)


def headed(**changes):
    """A envelope whose head says something else, signed all the same."""
    seen = {**HEAD, **changes}
    return signed(json.dumps(seen).encode())


def signed(head, arrays=None, key=KEY):
    raws = sign(LETTER, KEY).arrays if arrays is None else arrays
    return Envelope(head, key.sign(wire._signed(head, raws)), raws)


def test_a_letter_comes_out_as_it_went_in():
    message = opened(unpack(pack(sign(LETTER, KEY))))
    assert replace(message, arrays={}) == replace(LETTER, arrays={})
    for name, array in ARRAYS.items():
        assert np.array_equal(message.arrays[name], array)
        assert message.arrays[name].dtype == array.dtype
        assert message.arrays[name].flags.writeable


scalars = st.none() | st.booleans() | st.integers() | st.text()
bodies = st.dictionaries(
    st.text(), st.recursive(scalars | st.floats(allow_nan=False, allow_infinity=False),
                            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                            max_leaves=8),
)  # fmt: skip
dtypes = st.sampled_from(["float32", "float64", "int64", "uint64", "uint8", "bool"])


@settings(PROFILE, max_examples=40)
@given(
    st.text(),
    st.integers(-1, 2**31 - 1),
    bodies,
    st.lists(st.tuples(st.text(max_size=5), dtypes, st.lists(st.integers(0, 3), max_size=3))),
)
def test_every_letter_survives_the_way(text, number, body, listed):
    arrays = {
        name: np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(kind)
        for name, kind, shape in listed
    }
    message = Message(text, text, text, number, text, body, arrays)
    expected = {n: Expected(str(a.dtype), a.shape) for n, a in arrays.items()}
    found = opened(unpack(pack(sign(message, KEY))), expected)
    assert replace(found, arrays={}) == replace(message, arrays={})
    assert digest(found.arrays) == digest(arrays)


def test_big_endian_and_strided_arrays_travel_by_value():
    odd = {"x": np.arange(12, dtype=">i8").reshape(3, 4).T[::2]}
    message = replace(LETTER, arrays={"x": odd["x"].astype("int64")})
    found = opened(sign(message, KEY), {"x": Expected("int64", (None, 3))})
    assert np.array_equal(found.arrays["x"], odd["x"])


@pytest.mark.parametrize("kind", ["float16", "complex128", "object", "<U3", "int32", ">f8"])
def test_only_listed_types_are_sealed(kind):
    array = np.zeros(2).astype(kind)
    with pytest.raises(ValueError, match="expected one of"):
        sign(replace(LETTER, arrays={"x": array}), KEY)


def test_a_body_of_no_numbers_is_not_sealed():
    with pytest.raises(ValueError):
        sign(replace(LETTER, body={"x": float("nan")}), KEY)


def test_another_signature_is_refused():
    envelope = sign(LETTER, KEY)
    for other in (
        replace(envelope, signature=b""),
        replace(envelope, signature=bytes(64)),
        replace(envelope, signature=envelope.signature[:-1]),
        replace(envelope, signature=envelope.signature + b"x"),
        sign(LETTER, OTHER),
    ):
        with pytest.raises(RefusedError, match="signature"):
            opened(other)


def test_nothing_can_be_moved_or_altered_under_a_signature():
    envelope = sign(LETTER, KEY)
    w, b = envelope.arrays["sum/w"], envelope.arrays["sum/b"]
    moved = {"sum/w": RawArray("float64", (2, 3), w.data[:40] + b.data), "sum/b": b}
    head = envelope.header.replace(b'"round": 3', b'"round": 4')
    assert head != envelope.header
    for other in (
        replace(envelope, header=head),
        replace(envelope, header=envelope.header + b" "),
        replace(envelope, arrays=moved),
        replace(envelope, arrays={"sum/w": replace(w, data=bytes(48)), "sum/b": b}),
    ):
        with pytest.raises(RefusedError, match="signature"):
            opened(other)
    swapped = {"a": Expected("float64", ()), "b": Expected("float64", ())}
    two = sign(replace(LETTER, arrays={"a": np.array(1.0), "b": np.array(2.0)}), KEY)
    with pytest.raises(RefusedError, match="signature"):
        opened(replace(two, arrays={"a": two.arrays["b"], "b": two.arrays["a"]}), swapped)


@pytest.mark.parametrize(
    "arrays,word",
    [
        ({}, "arrays"),
        ({"sum/w": np.zeros((2, 3))}, "arrays"),
        ({**ARRAYS, "more": np.zeros(1)}, "arrays"),
        ({"sum/w": np.zeros((3, 2)), "sum/b": np.array(0.0)}, "shape"),
        ({"sum/w": np.zeros((2, 3, 1)), "sum/b": np.array(0.0)}, "shape"),
        ({"sum/w": np.zeros(6), "sum/b": np.array(0.0)}, "shape"),
        ({"sum/w": np.zeros((2, 3), np.float32), "sum/b": np.array(0.0)}, "float32"),
        ({"sum/w": np.zeros((2, 3), bool), "sum/b": np.array(0.0)}, "bool"),
    ],
)
def test_other_arrays_than_expected_are_refused_before_the_signature(arrays, word):
    with pytest.raises(RefusedError, match=word):
        opened(sign(replace(LETTER, arrays=arrays), OTHER))


@pytest.mark.parametrize(
    "raw,word",
    [
        (RawArray("float64", (2, 3), bytes(47)), "bytes"),
        (RawArray("float64", (2, 3), b""), "bytes"),
        (RawArray("float64", (2, -3), bytes(48)), "shape"),
        (RawArray("float64", (2, True), bytes(16)), "shape"),
        (RawArray("float64", (2, 3.0), bytes(48)), "shape"),
        (RawArray("float64", ("2", "3"), bytes(48)), "shape"),
        (RawArray("<f8", (2, 3), bytes(48)), "<f8"),
        (RawArray("object", (2, 3), bytes(48)), "object"),
        (RawArray("x" * 10**6, (2, 3), bytes(48)), "xxx"),
    ],
)
def test_raw_arrays_that_lie_about_themselves(raw, word):
    with pytest.raises(RefusedError, match=word) as refusal:
        check_array("w", raw, Expected("float64", (2, 3)))
    assert len(str(refusal.value)) < 200


def test_no_memory_is_taken_for_a_shape_that_is_claimed():
    raw = RawArray("float64", (2**40, 2**40), b"")
    with pytest.raises(RefusedError, match="bytes"):
        check_array("w", raw, Expected("float64", (None, None)))


@pytest.mark.parametrize(
    "changes,word",
    [
        ({"round": True}, "round is bool"),
        ({"round": 3.0}, "round is float"),
        ({"round": "3"}, "round is str"),
        ({"round": None}, "round is NoneType"),
        ({"round": -2}, "out of range"),
        ({"round": 2**31}, "out of range"),
        ({"version": True}, "version is bool"),
        ({"version": 2}, "version"),
        ({"version": 1.0}, "version is float"),
        ({"version": [[1]]}, "version is list"),
        ({"kind": 1}, "kind is int"),
        ({"run": None}, "run is NoneType"),
        ({"site": ["north"]}, "site is list"),
        ({"nonce": {}}, "nonce is dict"),
        ({"body": []}, "body is list"),
        ({"more": 1}, "fields"),
    ],
)
def test_heads_of_other_types_are_refused(changes, word):
    with pytest.raises(RefusedError, match=word):
        opened(headed(**changes))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b"{}",
        b"\xff\xfe",
        b"{" * 10,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"version": ' + b"9" * 10_000 + b"}",
        json.dumps(HEAD).replace("2.5", "NaN").encode(),
        json.dumps(HEAD).replace("2.5", "-Infinity").encode(),
        json.dumps({**HEAD, "nonce": "\ud800"}).encode(),
        json.dumps({**HEAD, "body": {"reason": "\udc00x"}}).encode(),
        json.dumps(HEAD).encode("utf-16"),
    ],
)
def test_heads_that_are_no_heads_are_refused(head):
    for attempt in (lambda: peek(Envelope(head, b"")), lambda: opened(signed(head))):
        with pytest.raises(RefusedError) as refusal:
            attempt()
        assert len(str(refusal.value)) < 200


def test_deep_nesting_in_a_body_is_refused_or_read():
    for depth in (10, 500, 900, 980, 1000, 5000):
        body = '{"x": ' + "[" * depth + "]" * depth + "}"
        head = json.dumps({**HEAD, "body": 0}).replace('"body": 0', f'"body": {body}').encode()
        try:
            message = opened(signed(head))
        except RefusedError:
            continue
        assert message.body["x"] is not None


def test_a_head_of_a_hundred_megabytes_is_refused_unread(monkeypatch):
    monkeypatch.setattr(wire.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(RefusedError, match=f"at most {MAX_HEADER}"):
        peek(Envelope(bytes(100 << 20), b""))


def test_refusals_are_short_whatever_came():
    long = "x" * 10**6
    for envelope in (
        sign(replace(LETTER, arrays={long: np.zeros(1)}), KEY),
        headed(version=long),
        headed(**{long: 1}),
    ):
        with pytest.raises(RefusedError) as refusal:
            opened(envelope)
        assert len(str(refusal.value)) < 600


@PROFILE
@given(st.binary(max_size=400))
def test_bytes_are_unpacked_or_refused(content):
    try:
        envelope = unpack(content)
        opened(envelope)
    except RefusedError:
        return
    pytest.fail("somebody else's bytes were opened")


def parts_of(*parts):
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


junk = st.recursive(scalars | st.floats(), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=4), inner, max_size=3))  # fmt: skip


@PROFILE
@given(junk, junk, st.binary(max_size=64), st.lists(st.binary(max_size=48), max_size=3))
def test_well_framed_junk_is_refused(seen, listed, signature, datas):
    content = parts_of(json.dumps(seen).encode(), signature, json.dumps(listed).encode(), *datas)
    with pytest.raises(RefusedError):
        opened(unpack(content))


@PROFILE
@given(st.sampled_from([*HEAD, "more"]), junk)
def test_fields_of_any_type_are_read_or_refused(name, value):
    try:
        message = opened(headed(**{name: value}))
    except RefusedError:
        return
    assert type(message.round) is int and isinstance(message.body, dict)
    assert all(type(getattr(message, n)) is str for n in ("kind", "run", "site", "nonce"))


@PROFILE
@given(st.data())
def test_no_flipped_bit_gets_through(data):
    whole = pack(sign(LETTER, KEY))
    at = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at // 8] ^= 1 << (at % 8)
    with pytest.raises(RefusedError):
        opened(unpack(bytes(flipped)))


@PROFILE
@given(st.integers(0, 10_000))
def test_no_cut_parcel_gets_through(length):
    whole = pack(sign(LETTER, KEY))
    with pytest.raises(RefusedError):
        opened(unpack(whole[: length % len(whole)]))


@pytest.mark.parametrize(
    "listed,datas",
    [
        ({"w": ["float64", [1]]}, []),
        ({"w": ["float64", [1]]}, [bytes(8), bytes(8)]),
        ({"w": ["float64"]}, [bytes(8)]),
        ({"w": "float64"}, [bytes(8)]),
        ({"w": [1, [1]]}, [bytes(8)]),
        ({"w": ["float64", "1"]}, [bytes(8)]),
        ({"w": ["float64", [True]]}, [bytes(8)]),
        ({"w": ["float64", [1.0]]}, [bytes(8)]),
        ({"w": ["float64", [[1]]]}, [bytes(8)]),
        ({"w": ["float64", {"1": 2}]}, [bytes(8)]),
        ([], []),
        ("w", [b""]),
    ],
)
def test_lists_of_arrays_that_do_not_fit(listed, datas):
    with pytest.raises(RefusedError):
        opened(unpack(parts_of(b"{}", b"", json.dumps(listed).encode(), *datas)), {})


def test_a_list_of_arrays_that_nests_without_end():
    with pytest.raises(RefusedError):
        unpack(parts_of(b"{}", b"", b'{"w":' * 100_000))


def test_a_length_that_reaches_beyond_memory():
    with pytest.raises(RefusedError, match="truncated"):
        unpack(struct.pack("<Q", 2**64 - 1) + b"x")


def test_a_parcel_of_empty_parts_is_refused_early():
    with pytest.raises(RefusedError, match="parts"):
        unpack(bytes(16 << 20))


def test_digests_tell_names_types_shapes_and_numbers_apart():
    base = {"a": np.zeros(4), "b": np.ones(1)}
    others = [
        {"a": np.zeros(4)},
        {"a": np.zeros((2, 2)), "b": np.ones(1)},
        {"a": np.zeros(4, np.float32), "b": np.ones(1)},
        {"a": np.zeros(4, np.int64), "b": np.ones(1)},
        {"b": np.zeros(4), "a": np.ones(1)},
        {"a": -np.zeros(4), "b": np.ones(1)},
        {"a": np.zeros(4), "b": np.ones(1), "c": np.zeros(0)},
    ]
    assert digest(base) == digest(dict(reversed(base.items())))
    assert len({digest(base), *map(digest, others)}) == len(others) + 1


def test_a_message_is_handed_on_without_torch():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, coterie.deploy.messages; sys.exit('torch' in sys.modules)",
        ],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
