"""One client moves a sum by at most the stated sensitivity: checked in exact arithmetic.

Values of a clipped row are multiples of a public grid, hence integers; squares are summed as Python
integers and compared with (bound / step)^2 as fractions. No tolerance appears in any privacy check.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL

from coterie.core.tree import map_leaves, take
from coterie.privacy.events import Gaussian, NonPrivate
from coterie.privacy.mechanisms import Exact, GaussianSum

PROFILE = settings(derandomize=True, deadline=None, max_examples=80)

DENORMAL = 5e-324

HUGE = torch.linspace(3e307, 1.7e308, 50, dtype=torch.float64)[:, None]

bounds = st.one_of(
    st.sampled_from([1.0, 0.5, 0.1, 1 / 3, 1e-3, 1e-6, 1e-9, 1e3, 1e6, 1 + 2**-52, 1 - 2**-53]),
    st.floats(1e-12, 1e12),
)
multipliers = st.one_of(st.sampled_from([1.0, 1e-9, 2.0**-10, 37.3, 1e6]), st.floats(1e-12, 1e8))
mechanisms = st.builds(GaussianSum, bounds, multipliers)


@st.composite
def stacked(draw, clients=None, finite=False):
    """Rows of several leaves: random ones at wild scales, sprinkled with special values."""
    count = draw(st.integers(1, 4)) if clients is None else clients
    shapes = draw(
        st.lists(st.sampled_from([(), (1,), (3,), (2, 2), (17,), (64,)]), min_size=1, max_size=3)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scales = 10.0 ** draw(
        st.lists(st.floats(-310, 305), min_size=count, max_size=count).map(np.array)
    )
    near = draw(st.booleans())
    rows = {}
    for number, shape in enumerate(shapes):
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        values = rng.standard_normal((count, *shape))
        if not near:
            values = values * scales.reshape(-1, *[1] * len(shape))
        pool = SPECIAL if finite else SPECIAL + NOT_FINITE
        mask = rng.random(values.shape) < draw(st.sampled_from([0.0, 0.0, 0.3]))
        values = np.where(mask, rng.choice(pool, values.shape), values)
        if finite and dtype is torch.float32:
            values = np.clip(values, -3.4e38, 3.4e38)
        with np.errstate(over="ignore"):
            rows[f"leaf{number}"] = torch.from_numpy(values).to(dtype)
    return rows


def numbers_of(rows):
    return sum(leaf[0].numel() for leaf in rows.values())


def integers(leaf, step):
    """Grid values as exact integers; fails if one is off the grid."""
    units = leaf.double().numpy() / step  # exact: the step is a power of two
    assert np.array_equal(units, np.rint(units)), "a value is off the grid"
    assert np.all(np.abs(units) <= 2.0**53)
    return units.astype(np.int64)


def sum_of_squares(array):
    """The exact sum of squares of integers below 2^47, as a Python integer."""
    array = np.abs(array.ravel())
    assert array.max(initial=0) < 2**47
    low, middle, high = array & 0xFFFF, (array >> 16) & 0xFFFF, array >> 32
    total = 0
    for start in range(0, len(array), 1 << 20):
        piece = [part[start : start + (1 << 20)] for part in (low, middle, high)]
        for i, left in enumerate(piece):
            for j, right in enumerate(piece):
                total += int((left * right).sum()) << (16 * (i + j))
    return total


def exact_square_norm(row, step):
    return sum(sum_of_squares(integers(leaf, step)) for leaf in row.values())


def within(row, step, limit):
    """Whether a row of grid values has norm <= limit, exactly."""
    return Fraction(exact_square_norm(row, step)) <= (Fraction(limit) / Fraction(step)) ** 2


def client(rows, number):
    return {name: leaf[number] for name, leaf in rows.items()}


def difference(left, right, step):
    """left - right on the grid, exactly, as whole numbers of steps."""
    return {name: integers(left[name], step) - integers(right[name], step) for name in left}


def within_steps(units, step, limit):
    square = sum(sum_of_squares(leaf) for leaf in units.values())
    return Fraction(square) <= (Fraction(limit) / Fraction(step)) ** 2


def test_the_oracle_counts_exactly():
    rng = np.random.default_rng(0)
    array = rng.integers(-(2**46), 2**46, 3000)
    assert sum_of_squares(array) == sum(int(value) ** 2 for value in array)


@PROFILE
@given(mechanisms, stacked())
@example(GaussianSum(1e-9, 1e-9), {"w": HUGE})
@example(GaussianSum(1.0, 1e-9), {"w": torch.full((1, 64), 1e308, dtype=torch.float64)})
@example(GaussianSum(1.0, 1.0), {"w": torch.full((1, 64), DENORMAL, dtype=torch.float64)})
def test_the_norm_after_clipping_and_rounding_is_within_the_bound(mechanism, rows):
    clipped, kept = mechanism.clip(rows)
    step = mechanism.step(numbers_of(rows))
    for number in range(len(kept)):
        assert within(client(clipped, number), step, mechanism.bound)
    assert bool(((kept >= 0) & (kept <= 1)).all())
    assert kept.shape == (len(next(iter(rows.values()))),)


@PROFILE
@given(st.integers(1, 300), bounds, multipliers, st.integers(0, 2**32))
def test_rows_that_sit_on_the_bound_or_round_up_are_within_it(numbers, bound, noise, seed):
    mechanism = GaussianSum(bound, noise)
    step = mechanism.step(numbers)
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(numbers)
    direction /= np.linalg.norm(direction)
    flat = np.full(numbers, 1 / math.sqrt(numbers))
    spike = np.eye(1, numbers)[0]
    # Half-way points of the grid all round up together: the worst case of rounding.
    uneven = (np.floor(flat * bound / step) + 0.5) * step / bound
    rows = [
        row * f for row in (direction, flat, spike, uneven) for f in (1.0, 1 + 2e-16, 1 - 1e-9, 7)
    ]
    clipped, _ = mechanism.clip({"w": torch.from_numpy(np.array(rows) * bound)})
    for row in clipped["w"]:
        assert within({"w": row}, step, bound)


@PROFILE
@given(mechanisms, stacked(), st.data())
def test_neighbours_move_the_sum_by_at_most_the_sensitivity(mechanism, rows, data):
    clipped, kept = mechanism.clip(rows)
    step = mechanism.step(numbers_of(rows))
    who = data.draw(st.integers(0, len(kept) - 1))
    total = mechanism.reduce(clipped)

    silent = {name: leaf.clone() for name, leaf in rows.items()}
    for leaf in silent.values():
        leaf[who] = 0
    moved = difference(total, mechanism.reduce(mechanism.clip(silent)[0]), step)
    assert within_steps(moved, step, mechanism.sensitivity("zero_out"))

    other = {name: leaf.clone() for name, leaf in rows.items()}
    for leaf in other.values():
        leaf[who] = -leaf[who] if data.draw(st.booleans()) else leaf[(who + 1) % len(leaf)] * -1e5
    moved = difference(total, mechanism.reduce(mechanism.clip(other)[0]), step)
    assert within_steps(moved, step, mechanism.sensitivity("replace"))


def test_replace_is_attained_up_to_rounding():
    mechanism = GaussianSum(1.0, 1.0)
    up, down = ({"w": torch.tensor([[sign * 9.0]])} for sign in (1, -1))
    moved = (
        mechanism.reduce(mechanism.clip(up)[0])["w"]
        - mechanism.reduce(mechanism.clip(down)[0])["w"]
    )
    assert 2 * (1 - 1e-3) < moved.item() <= mechanism.sensitivity("replace") == 2


@PROFILE
@given(mechanisms, stacked(clients=6), st.data())
def test_sums_are_the_same_to_the_bit_in_any_order_and_split(mechanism, rows, data):
    clipped, _ = mechanism.clip(rows)
    whole = mechanism.reduce(clipped)
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    blocks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    parts = [mechanism.reduce(take(clipped, torch.tensor(block))) for block in blocks]
    again = [
        mechanism.reduce(mechanism.clip(take(rows, torch.tensor(block)))[0]) for block in blocks
    ]
    for pieces in (parts, parts[::-1], again):
        total = pieces[0]
        for piece in pieces[1:]:
            total = map_leaves(torch.add, total, piece)
        assert all(torch.equal(total[name], whole[name]) for name in whole)


def test_many_clients_at_the_bound_sum_exactly():
    # The finest grid against the largest sum: 2^17 clients of 2^30 steps each stay below 2^53.
    mechanism = GaussianSum(1.0, 1e-12)
    step = mechanism.step(1)
    row, _ = mechanism.clip({"w": torch.full((1, 1), 5.0)})
    clients = 1 << 17
    total = mechanism.reduce({"w": row["w"].expand(clients, 1)})["w"].item()
    assert Fraction(total) == clients * Fraction(row["w"].item())
    # And the room the docstring promises: 2^22 clients of at most bound / step.
    assert (Fraction(mechanism.bound) / Fraction(step)) * 2**22 <= 2**53


@PROFILE
@given(mechanisms, stacked(finite=True))
def test_rows_inside_the_bound_move_by_at_most_the_rounding(mechanism, rows):
    rows = {
        name: torch.nan_to_num(leaf.double() / leaf.double().abs().amax().clamp_min(1e-300))
        for name, leaf in rows.items()
        if leaf.numel()
    }
    numbers = numbers_of(rows)
    rows = {
        name: leaf * (mechanism.bound * 0.999 / math.sqrt(numbers)) for name, leaf in rows.items()
    }
    clipped, kept = mechanism.clip(rows)
    step = mechanism.step(numbers)
    assert kept.tolist() == [1.0] * len(kept)
    for name, leaf in rows.items():
        moved = (clipped[name] - leaf).abs().max().item()
        assert moved <= step / 2 * (1 + 1e-9)


@PROFILE
@given(mechanisms, st.integers(1, 10**9))
def test_the_grid_is_a_public_power_of_two_fine_enough_and_coarse_enough(mechanism, numbers):
    step = mechanism.step(numbers)
    assert math.frexp(step)[0] == 0.5
    deviation = mechanism.bound * mechanism.noise_multiplier
    floor = mechanism.bound * 2.0**-30
    assert step <= max(deviation * 2.0**-20, floor) * (1 + 1e-12)
    assert step * math.sqrt(numbers) / 2 <= max(
        mechanism.bound * 2.0**-10, floor * math.sqrt(numbers)
    )
    assert step > floor / 2 * (1 - 1e-12)


@pytest.mark.parametrize("kind", ["dense", "float32", "spike", "decreasing"])
def test_a_row_of_five_million_numbers_is_within_the_bound(kind):
    # float32 norms of such rows come out low by 1e-4: the clip must not trust them.
    size = 5_000_000
    if kind == "spike":
        row = torch.full((1, size), 1e-4, dtype=torch.float32)
        row[0, size // 2] = 100.0
    elif kind == "decreasing":
        row = (1 / torch.arange(1, size + 1, dtype=torch.float64))[None]
    else:
        generator = torch.Generator().manual_seed(1)
        row = torch.randn(1, size, generator=generator)
        row = row if kind == "float32" else row.double()
    mechanism = GaussianSum(0.7, 1.0)
    clipped, kept = mechanism.clip({"w": row})
    step = mechanism.step(size)
    square = exact_square_norm({"w": clipped["w"][0]}, step)
    limit = (Fraction(0.7) / Fraction(step)) ** 2
    assert square <= limit
    assert square >= limit * Fraction(0.999) ** 2, "the clip must not throw signal away either"
    assert 0 < kept.item() < 1


def test_a_mechanism_that_forgets_to_clip_is_caught():
    class NoClip(GaussianSum):
        def clip(self, rows):
            step = self.step(numbers_of(rows))
            whole = map_leaves(lambda leaf: torch.round(leaf.double() / step) * step, rows)
            return whole, torch.ones(len(next(iter(rows.values()))))

    class NoMargin(GaussianSum):
        def clip(self, rows):
            from coterie.core.tree import clip_rows

            step = self.step(numbers_of(rows))
            clipped, kept = clip_rows(rows, self.bound)
            return map_leaves(lambda leaf: torch.round(leaf / step) * step, clipped), kept

    numbers = 300
    sound = GaussianSum(1.0, 1.0)
    step = sound.step(numbers)
    # Just above a half-way point of the grid in every number: all round up.
    value = (math.floor(1 / math.sqrt(numbers) / step) - 0.49) * step
    over = {"w": torch.full((1, numbers), value + step, dtype=torch.float64)}
    far = {"w": torch.full((1, numbers), 1.0)}
    assert within(client(sound.clip(over)[0], 0), step, 1.0)
    assert not within(client(NoMargin(1.0, 1.0).clip(over)[0], 0), step, 1.0)
    assert not within(client(NoClip(1.0, 1.0).clip(far)[0], 0), step, 1.0)


@PROFILE
@given(stacked())
def test_exact_keeps_finite_rows_and_zeroes_the_others(rows):
    clipped, kept = Exact().clip(rows)
    for number in range(len(kept)):
        finite = all(bool(leaf[number].isfinite().all()) for leaf in rows.values())
        assert kept[number] == (1 if finite else 0)
        for name, leaf in rows.items():
            expected = leaf[number].double() if finite else torch.zeros_like(leaf[number]).double()
            assert torch.equal(clipped[name][number], expected)
    total = Exact().reduce(clipped)
    assert all(total[name].shape == leaf.shape[1:] for name, leaf in rows.items())


def test_exact_admits_that_it_protects_nobody():
    assert Exact().sensitivity("zero_out") == Exact().sensitivity("replace") == math.inf
    assert Exact().event() == NonPrivate()
    given_total = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    assert torch.equal(Exact().perturb(given_total, None)["w"], given_total["w"])


def test_the_event_carries_the_noise_multiplier():
    assert GaussianSum(3.0, 1.5).event() == Gaussian(1.5)
    assert GaussianSum(3.0, 1.5).sensitivity("zero_out") == 3.0
    assert GaussianSum(3.0, 1.5).sensitivity("replace") == 6.0


@pytest.mark.parametrize("relation", ["Replace", "swap", "", None])
def test_an_unknown_relation_has_no_sensitivity(relation):
    # Failing open would halve the sensitivity of a misspelt "replace".
    with pytest.raises(ValueError, match="relation"):
        GaussianSum(1.0, 1.0).sensitivity(relation)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_bounds_and_noise_that_make_no_sense_are_refused(value):
    with pytest.raises(ValueError, match="bound"):
        GaussianSum(value, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianSum(1.0, value)


@pytest.mark.parametrize(("bound", "noise"), [(1e308, 1.0), (5e-324, 1.0), (1e200, 1e200)])
def test_bounds_at_the_ends_of_float64_are_refused_or_sound(bound, noise):
    # Two clients at the bound must not overflow, nor the noise, nor the grid vanish.
    try:
        mechanism = GaussianSum(bound, noise)
    except ValueError as error:
        assert "math domain" not in str(error)
        return
    rows = {"w": torch.full((2, 1), 1.7e308, dtype=torch.float64)}
    total = mechanism.reduce(mechanism.clip(rows)[0])["w"]
    assert bool(total.isfinite().all())
    assert math.isfinite(bound * noise)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=3000)
@given(mechanisms, stacked())
def test_the_bound_holds_over_many_more_rows(mechanism, rows):
    clipped, kept = mechanism.clip(rows)
    step = mechanism.step(numbers_of(rows))
    for number in range(len(kept)):
        assert within(client(clipped, number), step, mechanism.bound)
