"""One client moves a second moment, a sum of squares or a row by at most the stated sensitivity.

As in test_sensitivity.py all privacy checks are exact: what is reduced lies on a public grid, hence
is a whole number of steps; norms are compared as Python integers and fractions.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL, units

import coterie.privacy.mechanisms as laplace_module
from coterie.core.tree import map_leaves, take
from coterie.privacy.billboard import bound as bound_rows
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.events import SQRT2, Gaussian, Laplace, Wishart
from coterie.privacy.mechanisms import GaussianRows, GaussianSum, LaplaceSum
from coterie.privacy.moments import GaussianGram, Squares, WishartGram, post_grid, vector_grid

pytestmark = pytest.mark.full

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)
MANY = settings(derandomize=True, deadline=None, max_examples=1500)
RELATIONS = ("zero_out", "replace")
CLIENTS = 5


@dataclass(frozen=True)
class Case:
    """A kind of mechanism: how it is made for a bound, its grid, and the norm of its noise."""

    make: object
    step: object
    norm: int = 2
    replaced: int = 4
    """The square of the sensitivity under replace over that under zero_out."""
    power: int = 2
    """The sensitivity is the bound to this power."""


CASES = {
    "gaussian gram": Case(
        lambda K: GaussianGram(K, 1.0), lambda m, d: vector_grid(m.bound) ** 2, replaced=2
    ),
    "wishart gram": Case(
        lambda K: WishartGram(K, 7, K**2), lambda m, d: vector_grid(m.bound) ** 2, replaced=2
    ),
    "gaussian squares": Case(
        lambda K: Squares(GaussianSum(K**2, 1.0)), lambda m, d: m.inner.step(d), replaced=2
    ),
    "laplace squares": Case(
        lambda K: Squares(LaplaceSum(K**2, 1.0)), lambda m, d: m.inner.step(), norm=1
    ),
    "laplace sum": Case(lambda K: LaplaceSum(K, 1.0), lambda m, d: m.step(), norm=1, power=1),
    "gaussian rows": Case(lambda K: GaussianRows(K, 1.0, CLIENTS), lambda m, d: m.step(d), power=1),
}
each_case = pytest.mark.parametrize("name", CASES)

bounds = st.one_of(
    st.sampled_from([1.0, 0.5, 0.1, 1 / 3, 1e-6, 1e6, 3.0, 1 + 2**-52, 1 - 2**-53, 2 - 2**-52]),
    st.floats(1e-12, 1e12),
)


@st.composite
def vectors(draw, clients=None, tame=False):
    """Vectors of several clients, at wild sizes and sprinkled with special values."""
    count = draw(st.integers(1, CLIENTS)) if clients is None else clients
    features = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal((count, features))
    style = "near" if tame else draw(st.sampled_from(["near", "wild", "axis", "flat"]))
    if style == "wild":
        sizes = draw(st.lists(st.floats(-310, 305), min_size=count, max_size=count))
        values *= 10.0 ** np.array(sizes)[:, None]
    elif style == "axis":
        values = np.eye(features)[rng.integers(0, features, count)] * 1e3
    elif style == "flat":
        values = np.sign(values) * 1e3
    if not tame:
        mask = rng.random(values.shape) < draw(st.sampled_from([0.0, 0.0, 0.2]))
        values = np.where(mask, rng.choice(SPECIAL + NOT_FINITE, values.shape), values)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    with np.errstate(over="ignore"):
        return {"w": torch.from_numpy(values).to(dtype)}


def size(whole, norm):
    """The exact l1 norm, or the square of the l2 (Frobenius) norm."""
    return sum(abs(v) for v in whole) if norm == 1 else sum(v * v for v in whole)


def allowed(case, K, mechanism, relation, step):
    """The exact limit in steps (squared for l2): what is stated, and what is proved."""
    stated = Fraction(mechanism.sensitivity(relation)) / Fraction(step)
    proved = Fraction(K) ** case.power / Fraction(step)
    if case.norm == 1:
        return min(stated, proved * (2 if relation == "replace" else 1)), stated
    squared = proved**2 * (case.replaced if relation == "replace" else 1)
    # A stated bound may be a rounded float; what is proved is not.
    return squared, stated**2


def reduced(mechanism, rows):
    ids = torch.arange(len(rows["w"]))
    return mechanism.reduce(mechanism.clip(rows)[0], ids)["w"]


def other_rows(rows, who, how, rng):
    """The rows of a neighbour: client `who` replaced."""
    other = rows["w"].clone()
    if how == "zeros":
        other[who] = 0
    elif how == "another":
        other[who] = other[(who + 1) % len(other)] * -1e5
    elif how == "turned":
        other[who] = -other[who]
    elif how == "rolled":
        other[who] = other[who].roll(1)
    elif how == "axis":
        other[who] = 0
        other[who, int(rng.integers(other.shape[1]))] = 1e30
    elif how == "nan":
        other[who, 0] = math.nan
    return {"w": other}


def check_neighbours(name, K, rows, who, how, rng):
    case = CASES[name]
    mechanism = case.make(K)
    step = case.step(mechanism, rows["w"].shape[1])
    here = units(reduced(mechanism, rows), step)
    relation = "zero_out" if how in ("zeros", "nan") else "replace"
    if name == "wishart gram" and relation == "replace":
        assert mechanism.sensitivity("replace") == math.inf
        mechanism = GaussianGram(K, 1.0)  # the same clip and sum; what is proved holds for both
    there = units(reduced(mechanism, other_rows(rows, who, how, rng)), step)
    moved = size(here - there, case.norm)
    proved, stated = allowed(case, K, mechanism, relation, step)
    assert moved <= stated
    # K^2 in a Squares is a rounded float, and is what is clipped to.
    if not name.endswith("squares"):
        assert moved <= proved


@each_case
def test_neighbours_move_what_is_reduced_by_at_most_the_sensitivity(name):
    hows = ["zeros", "another", "turned", "rolled", "axis", "nan"]

    @PROFILE
    @given(bounds, vectors(), st.data())
    @example(1.0, {"w": torch.full((1, 40), 1e308, dtype=torch.float64)}, None)
    @example(3.0, {"w": torch.full((2, 1), 5e-324, dtype=torch.float64)}, None)
    def check(K, rows, data):
        who = 0 if data is None else data.draw(st.integers(0, len(rows["w"]) - 1))
        for how in hows if data is None else [data.draw(st.sampled_from(hows))]:
            check_neighbours(name, K, rows, who, how, np.random.default_rng(0))

    check()


@pytest.mark.slow
@each_case
def test_neighbours_over_many_more_rows(name):
    @MANY
    @given(bounds, vectors(), st.data())
    def check(K, rows, data):
        who = data.draw(st.integers(0, len(rows["w"]) - 1))
        how = data.draw(st.sampled_from(["zeros", "another", "turned", "rolled", "axis", "nan"]))
        check_neighbours(name, K, rows, who, how, np.random.default_rng(0))

    check()


@PROFILE
@given(st.one_of(bounds, st.floats(1e-40, 1e40)), vectors())
def test_the_norm_of_a_vector_after_rounding_is_within_the_bound(K, rows):
    for mechanism in (GaussianGram(K, 1.0), WishartGram(K, 2, 1.0)):
        clipped, kept = mechanism.clip(rows)
        step = vector_grid(K)
        limit = (Fraction(K) / Fraction(step)) ** 2
        for row in clipped["w"]:
            assert size(units(row, step), 2) <= limit
        assert bool(((kept >= 0) & (kept <= 1)).all())


@PROFILE
@given(st.integers(1, 40), bounds, st.integers(0, 2**32))
def test_vectors_that_sit_on_the_bound_or_round_up_are_within_it(features, K, seed):
    step = vector_grid(K)
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(features)
    direction /= np.linalg.norm(direction)
    flat = np.full(features, 1 / math.sqrt(features))
    uneven = (np.floor(flat * K / step) + 0.5) * step / K  # half-way points all round together
    rows = [r * f for r in (direction, flat, uneven) for f in (1.0, 1 + 2e-16, 1 - 1e-9, 7)]
    stacked = {"w": torch.from_numpy(np.array(rows) * K)}
    for row in GaussianGram(K, 1.0).clip(stacked)[0]["w"]:
        assert size(units(row, step), 2) <= (Fraction(K) / Fraction(step)) ** 2
    # Rounding is towards zero in l1, and moves nothing over the bound there either.
    norms = np.abs(np.array(rows)).sum(axis=1, keepdims=True)
    ones = torch.from_numpy(np.array(rows) / norms * K * rng.choice([1.0, 1 + 2e-16, 1 - 1e-16]))
    mechanism = LaplaceSum(K, 1.0)
    for row in mechanism.clip({"w": ones})[0]["w"]:
        assert size(units(row, mechanism.step()), 1) <= Fraction(K) / Fraction(mechanism.step())


# The sensitivities are attained: none could be stated smaller.


def moved_by(mechanism, left, right):
    def total(row):
        return reduced(mechanism, {"w": torch.tensor([row], dtype=torch.float64)})

    return (total(left) - total(right)).flatten()


def axis(place, features=6, length=1e9):
    return [length if i == place else 0.0 for i in range(features)]


@pytest.mark.parametrize("K", [1e-3, 1.0, 2.5, 1e4])
@each_case
def test_the_extremes_are_attained(name, K):
    case = CASES[name]
    mechanism = case.make(K)
    # The farthest other: an orthogonal vector where signs do not matter, else the opposite one.
    farthest = axis(0, length=-1e9) if case.replaced == 4 and case.norm == 2 else axis(1)
    for relation, other in (("zero_out", [0.0] * 6), ("replace", farthest)):
        if relation == "replace" and name == "wishart gram":
            continue
        moved = moved_by(mechanism, axis(0), other)
        found = float(moved.abs().sum() if case.norm == 1 else moved.norm())
        assert 0.999 * mechanism.sensitivity(relation) <= found <= mechanism.sensitivity(relation)


@pytest.mark.parametrize("K", [2.01, 3.0, 10.0, 100 * math.sqrt(5)])
def test_twice_the_bound_is_no_sensitivity_of_a_second_moment(K):
    # Liang et al. set 2 K. A single client moves the sum by K^2, which is more for every K > 2.
    moved = moved_by(GaussianGram(K, 1.0), axis(0), [0.0] * 6)
    assert float(moved.norm()) > 2 * K
    turned = moved_by(GaussianGram(K, 1.0), axis(0), axis(1))
    assert float(turned.norm()) > 1.41 * float(moved.norm())
    assert float(turned.norm()) <= GaussianGram(K, 1.0).sensitivity("replace")


def test_a_turned_vector_has_the_same_second_moment():
    rows = {"w": torch.tensor([[3.0, -1.0, 0.25]])}
    for mechanism in (GaussianGram(2.0, 1.0), Squares(GaussianSum(4.0, 1.0))):
        here = reduced(mechanism, rows)
        assert torch.equal(here, reduced(mechanism, map_leaves(torch.neg, rows)))


def test_the_factor_of_replace_lies_above_the_square_root_of_two():
    assert Fraction(SQRT2) ** 2 > 2
    for K in (0.1, 1 / 3, 1.7):
        assert GaussianGram(K, 1.0).sensitivity("replace") == K**2 * SQRT2
    assert Squares(GaussianSum(2.0, 1.0)).sensitivity("replace") == 2 * SQRT2
    assert Squares(LaplaceSum(2.0, 1.0)).sensitivity("replace") == 4


def test_several_vectors_of_a_client_share_the_bound():
    # Blocks w_a w_a^T and w_b w_b^T: |w_a|^4 + |w_b|^4 <= (|w_a|^2 + |w_b|^2)^2 <= K^4.
    mechanism = GaussianGram(1.5, 1.0)
    rows = {"a": torch.full((1, 3), 7.0), "b": torch.full((1, 2), 9.0)}
    total = mechanism.reduce(mechanism.clip(rows)[0])
    traces = sum(float(leaf.diagonal().sum()) for leaf in total.values())
    assert 0.999 * 1.5**2 < traces <= 1.5**2
    assert sum(float(leaf.square().sum()) for leaf in total.values()) <= 1.5**4


# Sums.


@each_case
def test_sums_are_the_same_to_the_bit_in_any_order_and_split(name):
    @PROFILE
    @given(bounds, vectors(clients=CLIENTS), st.data())
    def check(K, rows, data):
        mechanism = CASES[name].make(K)
        clipped, _ = mechanism.clip(rows)
        whole = mechanism.reduce(clipped, torch.arange(CLIENTS))["w"]
        order = data.draw(st.permutations(range(CLIENTS)))
        cuts = sorted(data.draw(st.sets(st.integers(1, CLIENTS - 1))))
        blocks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, CLIENTS], strict=True)]
        parts = []
        for block in blocks:
            ids = torch.tensor(block)
            here = mechanism.reduce(take(clipped, ids), ids)["w"]
            # Nor does what a client gives depend on who else is in its block.
            alone = mechanism.reduce(mechanism.clip(take(rows, ids))[0], ids)["w"]
            assert torch.equal(here, alone)
            parts.append(here)
        for pieces in (parts, parts[::-1]):
            assert torch.equal(sum(pieces[1:], pieces[0]), whole)

    check()


@PROFILE
@given(bounds, vectors(clients=CLIENTS))
def test_a_second_moment_is_the_exact_sum_of_products(K, rows):
    mechanism = GaussianGram(K, 1.0)
    clipped, _ = mechanism.clip(rows)
    step = vector_grid(K)
    total = mechanism.reduce(clipped)["w"]
    whole = np.array([units(row, step) for row in clipped["w"]], dtype=object)
    expected = whole.T @ whole  # Python integers
    assert np.array_equal(units(total, step**2).reshape(expected.shape), expected)
    assert torch.equal(total, total.T)


def test_many_clients_on_the_bound_sum_exactly():
    K = 2 - 2.0**-52  # the most grid steps a bound can have
    mechanism, step = GaussianGram(K, 1.0), vector_grid(K)
    row, _ = mechanism.clip({"w": torch.tensor([[5.0, 5.0, -5.0]])})
    clients = 1 << 16
    total = mechanism.reduce({"w": row["w"].expand(clients, 3)})["w"]
    expected = [clients * Fraction(a) * Fraction(b) for a in row["w"][0].tolist()
                for b in row["w"][0].tolist()]  # fmt: skip
    assert [Fraction(v) for v in total.flatten().tolist()] == expected
    # The room that the docstring promises: 2^22 clients of at most (K / step)^2.
    assert (Fraction(K) / Fraction(step)) ** 2 * 2**22 <= 2**53
    assert (Fraction(K) / Fraction(LaplaceSum(K, 1.0).step())) * 2**22 <= 2**53


@each_case
def test_an_empty_block_adds_nothing(name):
    mechanism = CASES[name].make(1.0)
    empty, kept = bound_rows(mechanism, {"w": torch.zeros(0, 3)}, torch.arange(0))
    assert kept.shape == (0,)
    shapes = mechanism.totals({"w": (3,)})
    assert tuple(empty.total["w"].shape) == shapes["w"]
    assert not empty.total["w"].any()


# What a client keeps.


@each_case
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_client_that_is_not_finite_gives_zeros_and_disturbs_nobody(name, bad):
    mechanism = CASES[name].make(1.0)
    rows = {"w": torch.tensor([[0.3, 0.1, -0.2], [0.5, bad, 0.5], [2.0, 0.0, 1.0]])}
    clipped, kept = mechanism.clip(rows)
    assert not clipped["w"][1].any()
    assert kept[1] == 0
    assert bool((kept[[0, 2]] > 0).all())
    silent = {"w": rows["w"].clone()}
    silent["w"][1] = 0
    assert torch.equal(reduced(mechanism, rows), reduced(mechanism, silent))


@each_case
def test_kept_is_the_factor_of_the_vector(name):
    case = CASES[name]

    @PROFILE
    @given(st.floats(0.01, 100), vectors(tame=True))
    def check(K, rows):
        mechanism = case.make(K)
        clipped, kept = mechanism.clip(rows)
        step = case.step(mechanism, rows["w"].shape[1])
        wanted = rows["w"].double() * kept[:, None]
        if name.endswith("gram"):
            step = vector_grid(K)
        elif name.endswith("squares"):
            wanted = wanted.square()
        slack = step * 1.01 + 1e-9 * float(wanted.abs().max())
        assert bool(((clipped["w"] - wanted).abs() <= slack).all())
        # Nothing is thrown away: a vector that was cut reaches the bound, up to the rounding.
        cut = clipped["w"][kept < 1]
        if name.endswith("squares"):
            lengths = cut.sum(dim=1) if case.norm == 1 else cut.norm(dim=1)
            K = K**2
        else:
            lengths = cut.abs().sum(dim=1) if case.norm == 1 else cut.norm(dim=1)
        assert bool((lengths >= 0.99 * K).all())
        assert bool((kept <= 1).all())

    check()


def test_inside_the_bound_nothing_is_cut():
    rows = {"w": torch.tensor([[0.25, -0.5, 0.125]])}
    for name, case in CASES.items():
        clipped, kept = case.make(1.0).clip(rows)
        assert kept.tolist() == [1.0], name
        wanted = rows["w"].square() if name.endswith("squares") else rows["w"]
        assert torch.equal(clipped["w"], wanted.double()), name


@PROFILE
@given(bounds, vectors(clients=3), st.permutations(range(CLIENTS)))
def test_a_client_moves_its_own_row_alone(K, rows, places):
    mechanism, ids = GaussianRows(K, 1.0, CLIENTS), torch.tensor(places[:3])
    total = mechanism.reduce(mechanism.clip(rows)[0], ids)["w"]
    assert total.shape == (CLIENTS, rows["w"].shape[1])
    assert not total[torch.tensor(places[3:])].any()
    other = {"w": rows["w"].clone()}
    other["w"][1] = 1e9
    moved = total - mechanism.reduce(mechanism.clip(other)[0], ids)["w"]
    moved[places[1]] = 0
    assert not moved.any()


def test_rows_need_to_know_whose_they_are():
    mechanism = GaussianRows(1.0, 1.0, 3)
    with pytest.raises(ValueError, match="ids"):
        mechanism.reduce({"w": torch.zeros(2, 3)})
    with pytest.raises((IndexError, RuntimeError)):
        mechanism.reduce({"w": torch.zeros(1, 3)}, torch.tensor([3]))


# Laplace noise is wide enough, exactly.


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.one_of(bounds, st.floats(1e-80, 1e80)), st.floats(1e-4, 1e4))
def test_the_scale_of_laplace_noise_pays_for_the_sensitivity(bound, epsilon):
    """log p(x)/p(x') <= |x - x'|_1 / scale <= (B / g) / scale <= epsilon, in fractions."""
    asked = []

    def spy(scale, words):
        asked.append(scale)
        return 0

    mechanism = LaplaceSum(bound, epsilon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laplace_module, "discrete_laplace", spy)
        mechanism.perturb({"w": torch.zeros(2, dtype=torch.float64)}, SeededEntropy(0, "noise", 0))
    (scale, again) = asked
    assert type(scale) is int
    assert scale == again
    step = Fraction(mechanism.step())
    for relation, paid in (("zero_out", Fraction(epsilon)), ("replace", 2 * Fraction(epsilon))):
        assert Fraction(mechanism.sensitivity(relation)) / step / scale <= paid
    # And no wider than it has to be: by less than one step.
    assert Fraction(bound) / step / (scale - 1) > Fraction(epsilon) if scale > 1 else True


# Grids, events and refusals.


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.floats(1e-40, 1e40), st.floats(1e-30, 1e30))
def test_a_posted_moment_is_rounded_to_a_public_power_of_two(bound, multiplier):
    deviation = multiplier * bound**2
    step = post_grid(bound, deviation)
    assert math.frexp(step)[0] == 0.5
    fine = vector_grid(bound) ** 2
    assert step >= fine
    # The sums lie on it or are rounded to it; it never costs more than a 2^-20th of the noise.
    assert step == fine or deviation * 2.0**-21 <= step <= deviation * 2.0**-20
    # Normals are spaced by 2^-53 or so: a cell holds many of them, however large the noise.
    assert step >= deviation * 2.0**-21


def test_events_carry_what_the_noise_is_made_of():
    assert GaussianGram(3.0, 1.5).event() == Gaussian(1.5, SQRT2)
    assert Squares(GaussianSum(9.0, 1.5)).event() == Gaussian(1.5, SQRT2)
    assert Squares(LaplaceSum(9.0, 0.25)).event() == LaplaceSum(9.0, 0.25).event() == Laplace(0.25)
    assert GaussianRows(3.0, 1.5, 4).event() == Gaussian(1.5, 2.0)
    assert WishartGram(3.0, 12, 4.5).event() == Wishart(12, 2.0)


@pytest.mark.parametrize("relation", ["Replace", "swap", "", None])
@each_case
def test_an_unknown_relation_has_no_sensitivity(name, relation):
    with pytest.raises(ValueError, match="relation"):
        CASES[name].make(1.0).sensitivity(relation)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e300])
def test_bounds_and_noise_that_make_no_sense_are_refused(value):
    for make in (
        lambda: GaussianGram(value, 1.0),
        lambda: GaussianGram(1.0, value),
        lambda: WishartGram(value, 5, 1.0),
        lambda: WishartGram(1.0, 5, value),
        lambda: LaplaceSum(value, 1.0),
        lambda: LaplaceSum(1.0, value),
        lambda: GaussianRows(value, 1.0, 3),
        lambda: GaussianRows(1.0, value, 3),
    ):
        with pytest.raises(ValueError, match="expected a"):
            make()


def test_shapes_that_make_no_sense_are_refused():
    for mechanism in (GaussianGram(1.0, 1.0), WishartGram(1.0, 5, 1.0)):
        with pytest.raises(ValueError, match="vector"):
            mechanism.totals({"w": (3, 2)})
    with pytest.raises(ValueError, match="clients"):
        GaussianRows(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="degrees"):
        WishartGram(1.0, 1, 1.0)


def test_broken_mechanisms_are_caught():
    """The checks above can fail: without the clip, with the wrong norm, without the margin."""
    case = CASES["laplace sum"]
    rows = {"w": torch.full((1, 16), 1.0)}

    class Euclid(LaplaceSum):
        def clip(self, rows):
            return GaussianSum(self.bound, 1.0).clip(rows)

    step = GaussianSum(1.0, 1.0).step(16)
    assert size(units(reduced(Euclid(1.0, 1.0), rows), step), 1) > 1 / Fraction(step)
    assert size(units(reduced(case.make(1.0), rows), case.make(1.0).step()), 1) <= 1 / Fraction(
        case.make(1.0).step()
    )

    class Whole(Squares):
        def clip(self, rows):
            return map_leaves(lambda leaf: leaf.double().square(), rows), torch.ones(1)

    assert reduced(Whole(GaussianSum(1.0, 1.0)), rows).norm() > 1
    assert reduced(Squares(GaussianSum(1.0, 1.0)), rows).norm() <= 1
