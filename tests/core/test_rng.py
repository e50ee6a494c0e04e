"""Random streams: named, reproducible anywhere, and apart from each other."""

import hashlib
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.rng import Rng, derive_key, derive_keys

MASK = (1 << 64) - 1
names = st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4).map(tuple)


def splitmix_finaliser(word):
    """SplitMix64's output function in plain integers (Steele, Lea and Flood 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_keys_are_blake2b_of_length_prefixed_parts():
    text = b"".join(len(p).to_bytes(4, "little") + p for p in (b"'client'", b"17", b"-3"))
    expected = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    assert derive_key("client", 17, -3) == expected
    assert 0 <= derive_key() < 2**64


@settings(derandomize=True, deadline=None, max_examples=100)
@given(left=names, right=names)
def test_distinct_names_give_distinct_keys(left, right):
    assert (derive_key(*left) == derive_key(*right)) == (left == right)


def test_names_do_not_run_into_each_other():
    cases = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), (1, 23), (12, 3), (123,)]
    cases += [("1", 23), ("",), (), ("", ""), ("'a'",), ("a",), ("a', 'b",), ("a", "b")]
    keys = {derive_key(*case) for case in cases}
    assert len(keys) == len(cases)


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.int32(3)])
def test_a_number_is_the_same_name_whatever_its_type(number):
    # A client's coins depend on its id, not on whether the id came out of an array.
    assert Rng.seeded(1).at("client", number) == Rng.seeded(1).at("client", 3)
    assert Rng.seeded(number) == Rng.seeded(3)


def test_a_text_is_the_same_name_whatever_its_type():
    assert derive_key(np.str_("client"), 3) == derive_key("client", 3)


@pytest.mark.parametrize("part", [1.0, None, b"client", 3.5])
def test_only_texts_and_whole_numbers_are_names(part):
    with pytest.raises(TypeError):
        derive_key(part)


def test_streams_are_the_same_in_another_process():
    code = (
        "from coterie.core.rng import Rng; import torch; r = Rng.seeded(5).at('client', 2); "
        "print(r.key, r.numpy().integers(1 << 62), r.keys(torch.arange(3)).tolist(), "
        "torch.rand(1, generator=r.torch()).item())"
    )
    here = Rng.seeded(5).at("client", 2)
    shown = (
        f"{here.key} {here.numpy().integers(1 << 62)} {here.keys(torch.arange(3)).tolist()} "
        f"{torch.rand(1, generator=here.torch()).item()}"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == shown


def test_the_key_is_not_shown():
    stream = Rng.seeded(3)
    assert str(stream.key) not in repr(stream)


def test_fresh_streams_differ():
    assert len({Rng.fresh().key for _ in range(20)}) == 20


def test_derivation_is_a_path_and_does_not_change_the_parent():
    root = Rng.seeded(1)
    before = root.key
    child = root.at("a")
    assert root.key == before
    assert child != root
    assert child.at("b") != root.at("b")
    assert root.at("a", "b") != root.at("b", "a")


def test_client_keys_follow_the_stated_function():
    stream = Rng.seeded(9).at("client", 4)
    ids = [0, 1, 2, 12345, 2**40, 2**63 - 1]
    expected = [
        splitmix_finaliser(splitmix_finaliser((i + 0x9E3779B97F4A7C15) & MASK) ^ stream.key)
        for i in ids
    ]
    assert stream.keys(np.array(ids)).tolist() == expected


def test_client_keys_do_not_depend_on_who_else_is_there():
    stream = Rng.seeded(2)
    ids = np.random.default_rng(0).permutation(1000)
    together = stream.keys(ids)
    assert together.dtype == np.uint64
    alone = np.array([stream.keys(np.array([i]))[0] for i in ids])
    assert np.array_equal(together, alone)
    assert np.array_equal(together, stream.keys(torch.from_numpy(ids)))
    assert np.array_equal(together[:300], stream.keys(ids[:300]))


def test_client_keys_are_distinct_and_differ_between_streams():
    ids = np.arange(100_000)
    first, second = (Rng.seeded(0).at("client", r).keys(ids) for r in (0, 1))
    assert len(np.unique(first)) == len(ids)
    assert len(np.intersect1d(first, second)) == 0


def test_client_keys_spread_over_all_bits():
    # Each of 64 bits over 100,000 ids is a fair coin: |z| < 6.2 in all 64 but for 64 * 5.6e-10.
    keys = Rng.seeded(0).at("client", 0).keys(np.arange(100_000))
    ones = np.array([int(((keys >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(64)])
    assert np.abs(ones - 50_000).max() < 6.2 * math.sqrt(25_000)


def test_neighbouring_streams_are_uncorrelated():
    # 45 correlations of 50,000 pairs; |r| sqrt(n) > 6 happens by chance with 45 * 2e-9.
    draws = [Rng.seeded(0).at("client", r).numpy().standard_normal(50_000) for r in range(10)]
    for left, right in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(left, right)[0, 1]) * math.sqrt(50_000) < 6


def test_generators_repeat_and_are_independent_objects():
    stream = Rng.seeded(4).at("x")
    assert stream.numpy().random() == stream.numpy().random()
    first, second = stream.torch(), stream.torch()
    assert torch.rand(3, generator=first).tolist() == torch.rand(3, generator=second).tolist()
    assert Rng.seeded(4).at("y").numpy().random() != stream.numpy().random()


def test_torch_takes_the_largest_key():
    Rng(MASK).torch()
    Rng(MASK).numpy()
    assert Rng(MASK).keys(np.array([0])).shape == (1,)


@given(names, st.lists(st.integers(0, MASK), max_size=5))
def test_keys_derived_together_are_those_derived_one_by_one(parts, numbers):
    wanted = [derive_key(*parts, number) for number in numbers]
    assert derive_keys(numbers, *parts).tolist() == wanted
