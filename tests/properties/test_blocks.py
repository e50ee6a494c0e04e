"""One client moves a sum made of blocks by at most what its one event says.

As in test_sensitivity.py all privacy checks are exact: what is summed lies on public grids, one for
each block; moves are whole numbers of steps, and squares are added up as fractions. A move is
measured against the noise as it is drawn, so that bound, share and rounding all count.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL, units

from coterie.core.tree import clip_rows, map_leaves, take
from coterie.privacy.mechanisms import Block, BlockSum, GaussianSum, replaced_by

PROFILE = settings(derandomize=True, deadline=None, max_examples=60)
KINDS = ("signed", "positive", "single")
SQUARES = {"signed": 4, "positive": 2, "single": 1}

bounds = st.one_of(
    st.sampled_from([1.0, 0.1, 1 / 3, 1e-6, 1e6, 1 + 2**-52, 1 - 2**-53]), st.floats(1e-9, 1e9)
)
multipliers = st.one_of(st.sampled_from([1.0, 2.0**-10, 37.3, 1e6]), st.floats(1e-6, 1e6))


@st.composite
def mechanisms(draw):
    """One to four blocks, with shares that add up to 1 as floats do."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    weights = [draw(st.floats(0.01, 1.0)) for _ in kinds]
    shares = [weight / math.fsum(weights) for weight in weights]
    blocks = tuple(
        Block(f"leaf{3 - number}", draw(bounds), share, kind, draw(st.booleans()))
        for number, (kind, share) in enumerate(zip(kinds, shares, strict=True))
    )
    return BlockSum(blocks, draw(multipliers))


def stacked(mechanism, data, clients=4, finite=False):
    """Rows for a mechanism: wild sizes, special values, and negative entries in every block."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size = data.draw(st.sampled_from(["near", "wild", "axis"]))
    scales = 10.0 ** rng.uniform(-310, 305, clients) if size == "wild" else np.ones(clients)
    rows = {}
    for block in mechanism.blocks:
        shape = data.draw(st.sampled_from([(), (1,)] if block.kind == "single" else [(3,), (2, 9)]))
        values = rng.standard_normal((clients, *shape))
        if size == "axis":
            flat = np.zeros((clients, math.prod(shape)))
            flat[np.arange(clients), rng.integers(0, flat.shape[1], clients)] = 1e12
            values = flat.reshape(clients, *shape)
        values = values * scales.reshape(-1, *[1] * len(shape))
        values = values if size == "wild" else values * block.bound
        mask = rng.random(values.shape) < data.draw(st.sampled_from([0.0, 0.0, 0.3]))
        pool = SPECIAL if finite else SPECIAL + NOT_FINITE
        values = np.where(mask, rng.choice(pool, values.shape), values)
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
        if finite:
            limit = float(torch.finfo(dtype).max)
            values = np.clip(values, -limit, limit)
        with np.errstate(over="ignore"):
            rows[block.name] = torch.from_numpy(np.asarray(values)).to(dtype)
    return rows


def numbers_of(rows):
    return {name: math.prod(leaf.shape[1:]) for name, leaf in rows.items()}


def square_move(mechanism, left, right):
    """The exact square of a move, block by block in units of the noise that is drawn there."""
    numbers = {name: leaf.numel() for name, leaf in left.items()}
    deviations = mechanism.standard_deviations(
        {name: tuple(leaf.shape) for name, leaf in left.items()}
    )
    total = Fraction(0)
    for name, one in mechanism.each(numbers).items():
        step = one.step(numbers[name])
        pairs = zip(units(left[name], step), units(right[name], step), strict=True)
        square = sum((a - b) ** 2 for a, b in pairs)
        total += square * (Fraction(step) / Fraction(deviations[name])) ** 2
    return total


def allowed(mechanism, relation):
    """The square of mu, as the event has it."""
    event = mechanism.event()
    scale = Fraction(event.replaced) if relation == "replace" else 1
    return (scale / Fraction(event.noise_multiplier)) ** 2


def sum_of(mechanism, rows):
    return mechanism.reduce(mechanism.clip(rows)[0])


def changed(rows, who, others):
    """The same rows with those of one client put in."""
    rows = {name: leaf.clone() for name, leaf in rows.items()}
    for name, leaf in rows.items():
        leaf[who] = others[name][who].to(leaf.dtype)
    return rows


@PROFILE
@given(mechanisms(), st.data())
def test_neighbours_move_the_sum_by_at_most_what_the_event_says(mechanism, data):
    rows = stacked(mechanism, data)
    who = data.draw(st.integers(0, 3))
    total = sum_of(mechanism, rows)
    silent = changed(rows, who, map_leaves(torch.zeros_like, rows))
    assert square_move(mechanism, total, sum_of(mechanism, silent)) <= allowed(
        mechanism, "zero_out"
    )
    turned = {
        name: -leaf if data.draw(st.booleans()) else leaf.roll(1, 0) * -1e5
        for name, leaf in rows.items()
    }
    moved = square_move(mechanism, total, sum_of(mechanism, changed(rows, who, turned)))
    assert moved <= allowed(mechanism, "replace")


THREE = BlockSum(
    (
        Block("mean", 1.0, 0.7),
        Block("variances", 1.5, 0.2, "positive", per_root=True),
        Block("residual", 3.0, 0.1, "single"),
    ),
    1.3,
)


def extremes(mechanism, features, dtype=torch.float64):
    """Two clients as far apart as blocks allow: opposite, on two axes, and at both ends."""
    up, down = {}, {}
    for block in mechanism.blocks:
        width = 1 if block.kind == "single" else features
        first, last = torch.zeros(1, width, dtype=dtype), torch.zeros(1, width, dtype=dtype)
        first[0, 0] = 1e6
        if block.kind == "signed":
            last[0, 0] = -1e6
        elif block.kind == "positive":
            last[0, -1] = 1e6
        up[block.name], down[block.name] = first, last
    return up, down


@pytest.mark.parametrize("features", [2, 7, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_bounds_are_attained_but_for_the_rounding(features, dtype):
    up, down = extremes(THREE, features, dtype)
    zeros = map_leaves(torch.zeros_like, up)
    for relation, other in (("zero_out", zeros), ("replace", down)):
        moved = square_move(THREE, sum_of(THREE, up), sum_of(THREE, other))
        limit = allowed(THREE, relation)
        assert limit * Fraction(0.997) < moved <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_block_attains_its_own_bound(kind):
    mechanism = BlockSum((Block("leaf", 0.3, 1.0, kind),), 2.0)
    up, down = extremes(mechanism, 5)
    moved = square_move(mechanism, sum_of(mechanism, up), sum_of(mechanism, down))
    limit = Fraction(SQUARES[kind], 4)  # r^2 / z^2
    assert limit * Fraction(0.997) < moved <= limit * (1 + Fraction(1, 10**11))
    assert mechanism.sensitivity("replace") == pytest.approx(math.sqrt(SQUARES[kind]), rel=1e-15)


def test_no_share_can_be_moved_to_another_block():
    """A client that spends nothing in one block cannot move further in another."""
    only = {
        name: torch.zeros(1, width, dtype=torch.float64)
        for name, width in (("mean", 4), ("variances", 4), ("residual", 1))
    }
    for block in THREE.blocks:
        rows = dict(only)
        rows[block.name] = torch.full_like(rows[block.name], 1e9)
        moved = square_move(THREE, sum_of(THREE, rows), only)
        share = Fraction(block.share) / Fraction(THREE.noise_multiplier) ** 2
        assert share * Fraction(0.997) < moved <= share


@PROFILE
@given(mechanisms(), st.data())
def test_every_block_keeps_its_bound_and_its_sign_after_rounding(mechanism, data):
    rows = stacked(mechanism, data)
    clipped, kept = mechanism.clip(rows)
    each = mechanism.each(numbers_of(rows))
    for block in mechanism.blocks:
        leaf, step = clipped[block.name], each[block.name].step(numbers_of(rows)[block.name])
        assert leaf.shape == rows[block.name].shape
        assert leaf.dtype == torch.float64
        limit = (Fraction(block.bound_of(numbers_of(rows)[block.name])) / Fraction(step)) ** 2
        for row in leaf:
            assert sum(value**2 for value in units(row, step)) <= limit
        if block.kind != "signed":
            assert bool((leaf >= 0).all())
    assert kept.shape == (4,)
    assert bool(((kept >= 0) & (kept <= 1)).all())


@PROFILE
@given(mechanisms(), st.data())
def test_a_client_with_a_broken_block_counts_as_zeros_in_all(mechanism, data):
    rows = stacked(mechanism, data, finite=True)
    block = data.draw(st.sampled_from(mechanism.blocks))
    broken = {name: leaf.clone() for name, leaf in rows.items()}
    broken[block.name][1].view(-1)[-1] = data.draw(st.sampled_from(NOT_FINITE))
    clipped, kept = mechanism.clip(broken)
    whole, untouched = mechanism.clip(rows)
    assert kept[1] == 0
    for name, leaf in clipped.items():
        assert not leaf[1].any()
        for other in (0, 2, 3):
            assert torch.equal(leaf[other], whole[name][other])
    assert kept[[0, 2, 3]].tolist() == untouched[[0, 2, 3]].tolist()


def test_minus_infinity_is_not_cut_to_a_zero_that_passes():
    rows = {
        "mean": torch.ones(3, 2),
        "variances": torch.tensor([[1.0, -math.inf], [1.0, -1.0], [1.0, 1.0]]),
        "residual": torch.tensor([1.0, -2.0, -math.inf]),
    }
    clipped, kept = THREE.clip(rows)
    assert kept.tolist()[0::2] == [0.0, 0.0]
    assert [bool(leaf[0].any() or leaf[2].any()) for leaf in clipped.values()] == [False] * 3
    assert clipped["variances"][1].tolist() == [1.0, 0.0], "cut, and the rest stays"
    assert clipped["residual"][1] == 0


@PROFILE
@given(mechanisms(), st.data())
def test_sums_are_the_same_to_the_bit_in_any_order_and_split(mechanism, data):
    rows = stacked(mechanism, data, clients=6)
    whole = sum_of(mechanism, rows)
    order = data.draw(st.permutations(range(6)))
    cut = data.draw(st.integers(1, 5))
    parts = [sum_of(mechanism, take(rows, torch.tensor(p))) for p in (order[:cut], order[cut:])]
    total = map_leaves(torch.add, *parts)
    assert all(torch.equal(total[name], whole[name]) for name in whole)


@PROFILE
@given(mechanisms(), st.data())
def test_the_part_kept_is_that_of_the_first_block(mechanism, data):
    rows = stacked(mechanism, data, finite=True)
    kept = mechanism.clip(rows)[1]
    first = mechanism.blocks[0]
    leaf = rows[first.name]
    leaf = leaf if first.kind == "signed" else leaf.clamp_min(0)
    bound = first.bound_of(numbers_of(rows)[first.name])
    _, expected = clip_rows({first.name: leaf}, bound)
    # But for the room that rounding needs, which is at most 2^-9 of the bound.
    assert torch.allclose(kept, expected, rtol=2.0**-8, atol=0)


OVER = BlockSum((Block("a", 0.1, 0.5), Block("b", 1 / 3, 0.5 + 9e-13)), 1.3)


@PROFILE
@given(mechanisms(), st.integers(1, 40))
@example(OVER, 1)
def test_a_client_on_every_bound_is_within_the_account(mechanism, features):
    """Exactly, with bounds and deviations as the floats they are, shares past 1 included."""
    shapes = {b.name: (1 if b.kind == "single" else features,) for b in mechanism.blocks}
    deviations = mechanism.standard_deviations(shapes)
    parts = {
        b.name: (Fraction(b.bound_of(*shapes[b.name])) / Fraction(deviations[b.name])) ** 2
        for b in mechanism.blocks
    }
    assert sum(parts.values()) <= allowed(mechanism, "zero_out")
    turned = sum(parts[b.name] * SQUARES[b.kind] for b in mechanism.blocks)
    assert turned <= allowed(mechanism, "replace")


@PROFILE
@given(mechanisms())
@example(BlockSum((Block("a", 1.0, 1 / 3), Block("b", 1.0, 1 / 3), Block("c", 1.0, 1 / 3)), 1.0))
def test_the_event_says_exactly_how_far_a_replaced_client_moves(mechanism):
    square = sum(Fraction(block.share) * SQUARES[block.kind] for block in mechanism.blocks)
    event = mechanism.event()
    assert event.noise_multiplier == mechanism.noise_multiplier
    assert abs(Fraction(event.replaced) ** 2 - square) <= Fraction(1, 10**12) * 4
    assert mechanism.sensitivity("replace") == event.replaced == replaced_by(mechanism.blocks)
    assert mechanism.sensitivity("zero_out") == 1.0


# What the checks above are worth: mechanisms that are wrong on purpose are caught.


class NoSign(BlockSum):
    """Negative entries stay where none are allowed."""

    def clip(self, rows):
        signed = BlockSum(tuple(replace(b, kind="signed") for b in self.blocks), 1.0)
        return BlockSum(signed.blocks, self.noise_multiplier).clip(rows)


class OneClip(BlockSum):
    """Blocks are clipped to twice their bounds."""

    def clip(self, rows):
        wide = tuple(replace(b, bound=2 * b.bound) for b in self.blocks)
        return BlockSum(wide, self.noise_multiplier).clip(rows)


class NoShare(BlockSum):
    """Every block gets noise as if the whole budget were its own."""

    def each(self, numbers):
        sound = super().each(numbers)
        return {name: GaussianSum(one.bound, self.noise_multiplier) for name, one in sound.items()}


@pytest.mark.parametrize("mutant", [NoSign, OneClip, NoShare])
def test_wrong_mechanisms_are_caught(mutant):
    wrong = mutant(THREE.blocks, THREE.noise_multiplier)
    up, down = extremes(THREE, 6)
    down = {name: torch.where(down[name] == 0, -up[name], down[name]) for name in down}
    limit = allowed(THREE, "replace")
    assert square_move(THREE, sum_of(THREE, up), sum_of(THREE, down)) <= limit
    assert square_move(wrong, sum_of(wrong, up), sum_of(wrong, down)) > limit


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=2000)
@given(mechanisms(), st.data())
def test_neighbours_over_many_more_rows(mechanism, data):
    rows, others = stacked(mechanism, data), stacked(mechanism, data)
    total = sum_of(mechanism, rows)
    if any(others[name].shape != leaf.shape for name, leaf in rows.items()):
        return
    moved = square_move(mechanism, total, sum_of(mechanism, changed(rows, 0, others)))
    assert moved <= allowed(mechanism, "replace")
