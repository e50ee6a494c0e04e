"""Numbers on a grid, in the ring: exact there and back, and nothing else is let in."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secagg.ring import from_ring, to_ring

PROFILE = settings(derandomize=True, deadline=None, max_examples=100)
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
    with pytest.raises(ValueError, match="not a whole multiple"):
        to_ring({"w": np.array([5e-324])}, {"w": 2.0**10})


def test_the_largest_number_is_taken():
    vector = to_ring({"w": np.array([-(2.0**62 - 2**10)])}, {"w": 1.0})
    assert vector.tolist() == [2**64 - 2**62 + 2**10]


@pytest.mark.parametrize("step", [0.0, -1.0, 0.3, 3.0, math.nan, math.inf])
def test_steps_are_powers_of_two(step):
    with pytest.raises(ValueError, match="power of two"):
        to_ring({"w": np.zeros(1)}, {"w": step})


def test_other_leaves_and_sizes_are_refused():
    with pytest.raises(ValueError, match="one step a leaf"):
        to_ring({"w": np.zeros(1)}, {"v": 1.0})
    with pytest.raises(ValueError, match="expected uint64"):
        from_ring(np.zeros(3, np.uint64), {"w": (2,)}, {"w": 1.0})
    with pytest.raises(ValueError, match="expected uint64"):
        from_ring(np.zeros(2), {"w": (2,)}, {"w": 1.0})
