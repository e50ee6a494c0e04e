"""Trees: leaf by leaf, nothing shared by accident, and a clip that never exceeds its bound."""

import math
from fractions import Fraction

import pytest
import torch

from coterie.core.tree import add, clip_rows, map_leaves, scale, size, stack, subtract, take, to


def tree(*values):
    return {"w": torch.tensor(values[0]), "b": torch.tensor(values[1])}


def exact_square(rows, client):
    """The squared norm of one row over all leaves, in exact arithmetic."""
    return sum(
        Fraction(value) ** 2 for leaf in rows.values() for value in leaf[client].flatten().tolist()
    )


def test_map_leaves_keeps_names_and_order():
    result = map_leaves(lambda leaf: leaf + 1, {"z": torch.zeros(2), "a": torch.ones(1)})
    assert list(result) == ["z", "a"]
    assert result["z"].tolist() == [1, 1]
    assert result["a"].tolist() == [2]


def test_the_order_of_names_does_not_matter():
    left = {"w": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    right = {"b": torch.tensor([10.0]), "w": torch.tensor([20.0])}
    assert {name: leaf.item() for name, leaf in add(left, right).items()} == {"w": 21.0, "b": 12.0}


@pytest.mark.parametrize("other", [{"w": torch.zeros(1)}, {}, {"w": torch.zeros(1), "c": None}])
def test_trees_with_other_names_are_refused(other):
    with pytest.raises(ValueError, match="different leaves"):
        add({"w": torch.zeros(1), "b": torch.zeros(1)}, other)


def test_arithmetic():
    left, right = tree([1.0, 2.0], [[3.0]]), tree([10.0, 20.0], [[30.0]])
    assert add(left, right)["w"].tolist() == [11.0, 22.0]
    assert subtract(left, right)["b"].tolist() == [[-27.0]]
    assert scale(left, -2.0)["w"].tolist() == [-2.0, -4.0]
    assert left["w"].tolist() == [1.0, 2.0]


def test_an_unstacked_tree_broadcasts_over_a_stacked_one():
    rows = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert subtract(rows, {"w": torch.tensor([1.0, 1.0])})["w"].tolist() == [[0, 1], [2, 3]]


def test_stack_shares_no_memory():
    shared = {"w": torch.zeros(2)}
    rows = stack(shared, 3)
    rows["w"][1] += 5
    assert rows["w"].tolist() == [[0, 0], [5, 5], [0, 0]]
    assert shared["w"].tolist() == [0, 0]


def test_stack_of_one_shares_no_memory():
    shared = {"w": torch.zeros(2)}
    stack(shared, 1)["w"].add_(1)
    assert shared["w"].tolist() == [0, 0]


def test_take_copies_rows_in_the_order_asked():
    rows = {"w": torch.arange(6.0).reshape(3, 2)}
    picked = take(rows, torch.tensor([2, 0]))
    picked["w"] += 100
    assert picked["w"].tolist() == [[104, 105], [100, 101]]
    assert rows["w"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_size_counts_numbers():
    assert size({"w": torch.zeros(3, 4), "b": torch.zeros(()), "e": torch.zeros(0)}) == 13
    assert size({}) == 0


def test_to_moves_every_leaf():
    moved = to({"w": torch.zeros(2)}, "meta")
    assert moved["w"].device.type == "meta"


def test_clip_scales_long_rows_and_leaves_short_ones():
    rows = {"w": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([4.0, 0.4])}
    clipped, kept = clip_rows(rows, 1.0)
    assert kept.tolist() == pytest.approx([0.2, 1.0])
    assert kept[1] == 1
    assert clipped["w"][0].tolist() == pytest.approx([0.6, 0.0])
    assert clipped["b"].tolist() == pytest.approx([0.8, 0.4])
    assert clipped["w"][1].tolist() == rows["w"][1].double().tolist()


def test_clip_works_in_double_precision_and_leaves_its_input_alone():
    rows = {"w": torch.full((2, 3), 7.0)}
    clipped, kept = clip_rows(rows, 1.0)
    assert clipped["w"].dtype == kept.dtype == torch.float64
    assert rows["w"].tolist() == [[7.0] * 3] * 2
    unmoved, _ = clip_rows({"w": torch.ones(1, 1, dtype=torch.float64)}, math.inf)
    assert unmoved["w"].item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["w", "b"])
def test_a_row_that_is_not_finite_becomes_zeros_in_every_leaf(bad, place):
    rows = {"w": torch.ones(3, 2), "b": torch.ones(3)}
    rows[place][1] = bad
    for bound in (1.0, math.inf):
        clipped, kept = clip_rows(rows, bound)
        assert kept[1] == 0
        assert clipped["w"][1].tolist() == [0, 0]
        assert clipped["b"][1] == 0
        assert bool((clipped["w"][[0, 2]] > 0).all()), "the others must not suffer"
        assert kept[0] == kept[2] > 0


def test_an_infinite_bound_keeps_every_finite_row_bit_for_bit():
    values = torch.tensor([[1e308, -1e308, 5e-324], [0.0, -0.0, 1.0]], dtype=torch.float64)
    clipped, kept = clip_rows({"w": values}, math.inf)
    assert torch.equal(clipped["w"], values)
    assert kept.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_bounded(dtype):
    rows = {"w": torch.linspace(-100, 100, 33, dtype=dtype).reshape(1, 33)}
    clipped, kept = clip_rows(rows, 1.0)
    assert exact_square(clipped, 0) <= 1
    assert float(exact_square(clipped, 0)) > 1 - 1e-12
    assert 0 < kept.item() < 1


@pytest.mark.parametrize("scale_of_row", [1e-320, 1e-300, 1e-160, 1e-30, 1.0, 1e30, 1e160, 1e300])
@pytest.mark.parametrize("bound", [1e-300, 1e-9, 1.0, 1e9, 1e300])
def test_squares_neither_overflow_nor_vanish(scale_of_row, bound):
    rows = {"w": torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale_of_row}
    clipped, kept = clip_rows(rows, bound)
    assert exact_square(clipped, 0) <= Fraction(bound) ** 2
    if 5 * scale_of_row <= bound * (1 - 1e-9):
        assert kept.item() == 1
        assert torch.equal(clipped["w"], rows["w"])
    elif bound / (5 * scale_of_row) > 1e-290:
        assert math.sqrt(exact_square(clipped, 0) / Fraction(bound) ** 2) > 1 - 1e-9


def test_a_row_exactly_at_the_bound_loses_at_most_rounding():
    clipped, kept = clip_rows({"w": torch.tensor([[0.6, 0.8]], dtype=torch.float64)}, 1.0)
    assert exact_square(clipped, 0) <= 1
    assert kept.item() > 1 - 1e-14


def test_a_huge_row_with_a_tiny_bound_stays_within_it():
    # The factor itself would be below the normal range of float64 and hold only a few bits.
    for bound in (1e-3, 1e-6, 1e-9, 1e-12, 1e-15):
        for value in torch.linspace(3e307, 1.7e308, 50, dtype=torch.float64).tolist():
            clipped, _ = clip_rows({"w": torch.tensor([[value]], dtype=torch.float64)}, bound)
            assert abs(Fraction(clipped["w"].item())) <= Fraction(bound), (bound, value)


def test_zero_rows_stay_zero_and_are_kept():
    clipped, kept = clip_rows({"w": torch.zeros(2, 3)}, 1.0)
    assert torch.equal(clipped["w"], torch.zeros(2, 3, dtype=torch.float64))
    assert kept.tolist() == [1, 1]


def test_no_clients_and_empty_leaves():
    clipped, kept = clip_rows({"w": torch.zeros(0, 3), "b": torch.zeros(0)}, 1.0)
    assert clipped["w"].shape == (0, 3)
    assert kept.shape == (0,)
    clipped, kept = clip_rows({"w": torch.full((2, 1), 9.0), "e": torch.zeros(2, 0)}, 1.0)
    assert clipped["e"].shape == (2, 0)
    assert clipped["w"].flatten().tolist() == pytest.approx([1.0, 1.0])


def test_each_row_is_clipped_by_itself():
    generator = torch.Generator().manual_seed(1)
    rows = {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    together, kept = clip_rows(rows, 0.7)
    for client in range(5):
        alone, factor = clip_rows(take(rows, torch.tensor([client])), 0.7)
        assert torch.equal(alone["w"][0], together["w"][client])
        assert torch.equal(alone["b"][0], together["b"][client])
        assert factor[0] == kept[client]
