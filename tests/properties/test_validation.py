"""Whatever other sites send, one honest client moves the counted sum by at most the sensitivity.

All privacy checks are exact: what is counted lies on a public grid, hence is a whole number of
steps; norms are compared as Python integers and fractions, with no tolerance.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import units

from coterie.privacy.billboard import admit, admit_sum, bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import (
    Block,
    BlockSum,
    Exact,
    GaussianRows,
    GaussianSum,
    LaplaceSum,
    LocalGaussianSum,
    Shape,
)
from coterie.privacy.moments import GaussianGram, Squares, WishartGram
from coterie.privacy.validation import grid_steps, validate

pytestmark = pytest.mark.full

PROFILE = settings(derandomize=True, deadline=None, max_examples=40)
MANY = 4000
RING = 1 << 64
BLOCKS = (
    Block("w", 1.0, 0.5),
    Block("v", 0.3, 0.3, "positive", per_root=True),
    Block("s", 7.0, 0.2, "single"),
)


@dataclass(frozen=True)
class Case:
    """A mechanism for a bound and so many clients in all, and what its contributions look like."""

    make: object
    leaves: str = "wv"
    norm: int = 2
    vectors: bool = False


CASES = {
    "gaussian sum": Case(lambda B, n: GaussianSum(B, 1.3)),
    "little noise": Case(lambda B, n: GaussianSum(B, 1e-6)),
    "laplace sum": Case(lambda B, n: LaplaceSum(B, 0.7), norm=1),
    "blocks": Case(lambda B, n: BlockSum(BLOCKS, B), leaves="wvs"),
    "gaussian gram": Case(lambda B, n: GaussianGram(B, 1.0), vectors=True),
    "wishart gram": Case(lambda B, n: WishartGram(B, 7, B**2), vectors=True),
    "gaussian squares": Case(lambda B, n: Squares(GaussianSum(B, 2.0))),
    "laplace squares": Case(lambda B, n: Squares(LaplaceSum(B, 1.0)), norm=1),
    "gaussian rows": Case(lambda B, n: GaussianRows(B, 0.9, n)),
}
each_case = pytest.mark.parametrize("name", CASES)
each_sum = pytest.mark.parametrize("name", [name for name in CASES if name != "wishart gram"])
bounds = st.one_of(
    st.sampled_from([1.0, 0.1, 1 / 3, 3.0, 1e-6, 1e6, 1 + 2**-52, 1 - 2**-53, 2 - 2**-52]),
    st.floats(1e-12, 1e12),
)


def shapes_of(case, draw):
    features = draw(st.sampled_from([1, 2, 5, 17]))
    shapes = {"w": (features,), "v": (features,) if case.vectors else (2, features), "s": ()}
    return {name: shapes[name] for name in case.leaves}


def draw_rows(draw, shapes, count):
    """Contributions: random, all alike, or along an axis; small, at the bound, or far above."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    style = draw(st.sampled_from(["random", "alike", "axis", "flat"]))
    far = 10.0 ** draw(st.sampled_from([-8, 0, 0, 3, 20, 150]))
    rows = {}
    for name, shape in shapes.items():
        values = rng.standard_normal((count, *shape))
        if style == "alike":
            values[:] = values[:1]
        elif style == "axis":
            values *= np.arange(math.prod(shape)).reshape(shape) == 0
        elif style == "flat":
            values = np.ones_like(values)
        rows[name] = torch.from_numpy(values * far)
    return rows


def lengths(mechanism, whole, grid, norm):
    """Exact sizes to compare: lists of (size, unit size) in the mechanism's own norm.

    Squared for l2. One for each block, one for each row, or one in all.
    """
    if isinstance(mechanism, BlockSum):
        numbers = {name: len(values) for name, values in whole.items()}
        each = mechanism.each(numbers)
        return [
            (sum(v * v for v in whole[n]), (Fraction(each[n].bound) / Fraction(grid[n])) ** 2)
            for n in whole
        ]
    bounded = mechanism.inner.bound if isinstance(mechanism, Squares) else mechanism.bound
    power = 2 if isinstance(mechanism, GaussianGram | WishartGram) else 1
    (step,) = set(grid.values())
    unit = Fraction(bounded) ** power / Fraction(step)
    rows = mechanism.clients if isinstance(mechanism, GaussianRows) else 1
    flat = [np.split(values, rows) for values in whole.values()]
    found = []
    for row in range(rows):
        values = [v for leaf in flat for v in leaf[row]]
        size = sum(abs(v) for v in values) if norm == 1 else sum(v * v for v in values)
        found.append((size, unit if norm == 1 else unit**2))
    return found


def moved(mechanism, here, there, grid, norm, relation):
    """Whether sums differ by at most the sensitivity, exactly."""
    whole = {name: units(here[name], grid[name]) - units(there[name], grid[name]) for name in grid}
    if isinstance(mechanism, BlockSum):
        shares = {block.name: Fraction(block.share) for block in mechanism.blocks}
        each = dict(zip(whole, lengths(mechanism, whole, grid, norm), strict=True))
        size = sum(shares[name] * part / unit for name, (part, unit) in each.items())
        return size <= Fraction(mechanism.sensitivity(relation)) ** 2 * (1 + Fraction(1, 10**12))
    (step,) = set(grid.values())
    values = [v for leaf in whole.values() for v in leaf]
    size = sum(abs(v) for v in values) if norm == 1 else sum(v * v for v in values)
    limit = Fraction(mechanism.sensitivity(relation)) / Fraction(step)
    # K^2 is a rounded float in what is stated for second moments.
    slack = 1 + Fraction(1, 10**15) if isinstance(mechanism, GaussianGram | WishartGram) else 1
    return size <= (limit if norm == 1 else limit**2) * slack


HOSTILE = ["nan", "infinite", "huge", "off", "random", "opposite", "tiny", "long", "one", "zeros"]


def hostile(draw, totals, grid, bound_, clients):
    """What a broken or hostile site may send."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = {}
    for name, shape in totals.items():
        style = draw(st.sampled_from(HOSTILE))
        values = np.asarray(rng.standard_normal(shape))
        found[name] = np.asarray(spoil(style, values, rng, grid[name], bound_, clients))
    return found


def spoil(style, values, rng, step, bound_, clients):
    some = rng.random(values.shape) < 0.3
    return {
        "nan": lambda: np.where(some, np.nan, values),
        "infinite": lambda: np.where(some, -np.inf, values),
        "huge": lambda: np.sign(values) * 1.7e308,
        "off": lambda: values * bound_ / 7 + step / 3,
        "random": lambda: values * 10.0 ** rng.uniform(-320, 300, values.shape),
        "opposite": lambda: -np.abs(values) * bound_,
        "tiny": lambda: np.full(values.shape, 5e-324),
        "long": lambda: np.rint(values * 2**20 * clients) * step,
        "one": lambda: np.where(np.arange(values.size).reshape(values.shape) == 0, 1e30, 0.0),
        "zeros": lambda: np.zeros_like(values),
    }[style]()


def sent(mechanism, rows, ids):
    """The sum that an honest site sends."""
    part, _ = bound(mechanism, rows, torch.tensor(ids), client_entropy(0, 0))
    return {name: leaf.numpy().copy() for name, leaf in part.total.items()}


def neighbour(draw, rows, who):
    """The rows with one client's replaced, and the relation that this is."""
    how = draw(st.sampled_from(["zeros", "turned", "another", "huge"]))
    other = {name: leaf.clone() for name, leaf in rows.items()}
    for leaf in other.values():
        if how == "zeros":
            leaf[who] = 0
        elif how == "turned":
            leaf[who] = -leaf[who]
        elif how == "another":
            leaf[who] = leaf[who].flatten().roll(1).reshape(leaf[who].shape) * -1e5
        else:
            leaf[who] = 1e200
    return other, "zero_out" if how == "zeros" else "replace"


def same_bits(left, right):
    return all(left[name].tobytes() == right[name].numpy().tobytes() for name in right)


@each_case
def test_an_honest_sum_passes_bit_for_bit(name):
    case = CASES[name]

    @PROFILE
    @given(bounds, st.sampled_from([1, 1, 2, 7, 60, 900, MANY]), st.data())
    def check(B, count, data):
        shapes = shapes_of(case, data.draw)
        mechanism = case.make(B, MANY + 3)
        ids = list(range(2, 2 + count))
        total = sent(mechanism, draw_rows(data.draw, shapes, count), ids)
        part, verdict = admit(mechanism, total, np.array(ids), shapes)
        assert verdict.taken
        assert (verdict.why, verdict.kept, verdict.changed) == ("", 1.0, 0)
        assert same_bits(total, part.total)
        if name != "wishart gram":
            everybody = np.arange(MANY + 3)
            assert same_bits(total, admit_sum(mechanism, total, everybody, shapes).total)
            assert same_bits(total, admit_sum(mechanism, total, np.array(ids), shapes).total)

    check()


@PROFILE
@given(st.sampled_from([1, 2, 2]), st.sampled_from([1, 3, 50]), st.integers(1, 400), st.data())
def test_a_sum_that_sits_on_its_bound_is_not_touched(norm, clients, width, data):
    # The bound is the float just above the exact norm of a sum on the grid, over the clients:
    # floats alone could not tell on which side it lies.
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    step = LaplaceSum(1.0, 1.0).step() if norm == 1 else GaussianSum(1.0, 1.0).step(width)
    values = rng.standard_normal(width)
    values *= rng.uniform(1.1, 1.9) * clients / np.linalg.norm(values, norm)
    whole = [int(v) for v in np.rint(values / step)]
    B = math.fsum(abs(v) for v in whole) if norm == 1 else math.sqrt(sum(v * v for v in whole))
    B = B * step / clients * (1 - 2.0**-50)
    while not inside(whole, norm, B, clients, step):
        B = math.nextafter(B, math.inf)
    mechanism = LaplaceSum(B, 1.0) if norm == 1 else GaussianSum(B, 1.0)
    assert grid_steps(mechanism, {"w": (width,)}) == {"w": step}
    total = {"w": np.array([float(v) for v in whole]) * step}
    part, verdict = admit(mechanism, total, np.arange(clients), {"w": (width,)})
    assert verdict.taken
    assert same_bits(total, part.total)


def inside(whole, norm, B, clients, step):
    limit = Fraction(B) * clients / Fraction(step)
    if norm == 1:
        return sum(abs(v) for v in whole) <= limit
    return sum(v * v for v in whole) <= limit**2


@PROFILE
@given(
    bounds,
    st.sampled_from([1e-5, 1.0, 300.0]),
    st.sampled_from([1, 3, 200]),
    st.sampled_from([1, 40, 3000]),
    st.integers(0, 2**32),
)
def test_an_honest_sum_with_its_clients_noise_passes_bit_for_bit(B, noise, count, width, seed):
    mechanism = LocalGaussianSum(B, noise, cohort=5.0)
    rows = {"w": torch.ones(count, width, dtype=torch.float64) * 1e9}
    part, _ = bound(mechanism, rows, torch.arange(count), client_entropy(seed, 0))
    total = {"w": part.total["w"].numpy().copy()}
    taken, verdict = admit(mechanism, total, np.arange(count), {"w": (width,)})
    assert verdict.taken
    assert same_bits(total, taken.total)
    assert same_bits(total, admit_sum(mechanism, total, np.arange(count), {"w": (width,)}).total)


@pytest.mark.parametrize("shape", [Shape.SUM, Shape.GRAM, Shape.SQUARES, Shape.ROWS])
def test_an_honest_sum_without_privacy_passes_bit_for_bit(shape):
    @PROFILE
    @given(st.data())
    def check(data):
        mechanism = Exact(shape, 9)
        rows = draw_rows(data.draw, {"w": (5,)}, 4)
        ids = [1, 3, 4, 8]
        total = sent(mechanism, rows, ids)
        part, verdict = admit(mechanism, total, np.array(ids), {"w": (5,)})
        assert verdict.taken
        assert same_bits(total, part.total)

    check()


@each_case
def test_whatever_arrives_becomes_a_sum_that_could_be(name):
    case = CASES[name]

    @PROFILE
    @given(bounds, st.integers(0, 9), st.data())
    def check(B, count, data):
        shapes = shapes_of(case, data.draw)
        mechanism = case.make(B, 12)
        totals = mechanism.totals(shapes)
        grid = grid_steps(mechanism, totals)
        ids = np.sort(data.draw(st.permutations(range(12)))[:count])
        arrays = hostile(data.draw, totals, grid, B, count)
        part, verdict = admit(mechanism, arrays, ids, shapes)
        held = {leaf: part.total[leaf].numpy() for leaf in totals}
        whole = {leaf: units(held[leaf], grid[leaf]) for leaf in totals}
        clients = 1 if isinstance(mechanism, GaussianRows) else count
        power = 1 if case.norm == 1 else 2
        # What is cut is inside exactly; what is not was inside in floats, to 2^-51 a number.
        room = 1 if verdict.status == "scaled" else 1 + Fraction(500, 2**50)
        for size, unit in lengths(mechanism, whole, grid, case.norm):
            assert size <= unit * clients**power * room
        check_kind(mechanism, held, ids, verdict, arrays)
        again, second = validate(mechanism, part.total, ids)
        assert second.taken
        assert all(torch.equal(again[leaf], part.total[leaf]) for leaf in totals)

    check()


def check_kind(mechanism, held, ids, verdict, arrays):
    if isinstance(mechanism, GaussianGram | WishartGram):
        for leaf in held.values():
            assert np.array_equal(leaf, leaf.T)
            assert (np.diag(leaf) >= 0).all()
        trace = sum(np.trace(leaf) for leaf in held.values())
        assert trace <= len(ids) * mechanism.bound**2 * (1 + 1e-12)
    if isinstance(mechanism, Squares):
        assert all((leaf >= 0).all() for leaf in held.values())
    if isinstance(mechanism, BlockSum):
        assert (held["v"] >= 0).all()
        assert held["s"] >= 0
    if isinstance(mechanism, GaussianRows):
        others = np.setdiff1d(np.arange(12), ids)
        assert all((leaf[others] == 0).all() for leaf in held.values())
    same = all(np.array_equal(held[leaf], arrays[leaf]) for leaf in held)
    assert verdict.taken == same
    finite = all(np.isfinite(leaf).all() for leaf in arrays.values())
    if not finite:
        assert (verdict.status, verdict.why) == ("zeroed", "not_finite")
        assert all((leaf == 0).all() for leaf in held.values())


@each_case
def test_one_honest_client_moves_the_sum_over_sites_by_at_most_the_sensitivity(name):
    case = CASES[name]

    @PROFILE
    @given(bounds, st.integers(1, 4), st.integers(1, 3), st.data())
    def check(B, count, others, data):
        shapes = shapes_of(case, data.draw)
        mechanism = case.make(B, 12)
        totals = mechanism.totals(shapes)
        grid = grid_steps(mechanism, totals)
        rows = draw_rows(data.draw, shapes, count)
        other, relation = neighbour(data.draw, rows, data.draw(st.integers(0, count - 1)))
        if mechanism.sensitivity(relation) == math.inf:
            mechanism = GaussianGram(B, 1.0)  # the same sums; what is proved holds for both
        ids = list(range(count))
        hostiles = [
            (hostile(data.draw, totals, grid, B, 2), np.array([4 + 2 * i, 5 + 2 * i]))
            for i in range(others)
        ]
        sums = []
        for world in (rows, other):
            parts = [admit(mechanism, sent(mechanism, world, ids), np.array(ids), shapes)[0]]
            parts += [admit(mechanism, arrays, who, shapes)[0] for arrays, who in hostiles]
            added = parts[0]
            for part in parts[1:]:
                added = added + part
            sums.append({leaf: added.total[leaf].numpy() for leaf in totals})
        assert moved(mechanism, *sums, grid, case.norm, relation)

    check()


def in_ring(total, grid):
    return {name: [v % RING for v in units(total[name], grid[name])] for name in grid}


def out_of_ring(ring, totals, grid):
    """Signed numbers as float64, times the step: large ones are rounded, as they are in earnest."""
    signed = {n: [v - RING if v >= RING // 2 else v for v in vs] for n, vs in ring.items()}
    return {
        name: np.array([float(v) for v in signed[name]]).reshape(totals[name]) * grid[name]
        for name in totals
    }


def hidden(draw, honest, most):
    """What hostile sites hide under masks: it knows the honest sum, and aims at every edge."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = {}
    for name, values in honest.items():
        aims = [0, most[name], 2 * most[name], -most[name], -2 * most[name], RING // 2]
        added = []
        for value in values:
            aim = aims[int(rng.integers(len(aims)))] + int(rng.integers(-3, 4))
            style = rng.integers(4)
            if style == 0:
                added.append(int(rng.integers(0, RING, dtype=np.uint64)))
            elif style == 1:
                added.append(0)
            else:
                added.append((aim - value) % RING)
        found[name] = added
    return found


@each_sum
def test_one_honest_client_moves_a_sum_out_of_secure_aggregation_by_at_most_the_sensitivity(name):
    case = CASES[name]

    @PROFILE
    @given(bounds, st.integers(1, 4), st.data())
    def check(B, count, data):
        shapes = shapes_of(case, data.draw)
        mechanism = case.make(B, 12)
        totals = mechanism.totals(shapes)
        grid = grid_steps(mechanism, totals)
        rows = draw_rows(data.draw, shapes, count)
        other, relation = neighbour(data.draw, rows, data.draw(st.integers(0, count - 1)))
        ids, everybody = list(range(count)), np.arange(12)
        here, there = (in_ring(sent(mechanism, world, ids), grid) for world in (rows, other))
        most = {leaf: largest(mechanism, leaf, totals, grid) for leaf in totals}
        hide = hidden(data.draw, here, most)
        sums = []
        for honest in (here, there):
            ring = {n: [(a + b) % RING for a, b in zip(honest[n], hide[n], strict=True)]
                    for n in honest}  # fmt: skip
            part = admit_sum(mechanism, out_of_ring(ring, totals, grid), everybody, shapes)
            sums.append({leaf: part.total[leaf].numpy() for leaf in totals})
            for leaf in totals:
                assert max(abs(v) for v in units(sums[-1][leaf], grid[leaf])) <= most[leaf]
        assert moved(mechanism, *sums, grid, case.norm, relation)

    check()


def largest(mechanism, name, totals, grid):
    """The most steps that a number of an honest sum of 12 clients can have, by hand."""
    if isinstance(mechanism, BlockSum):
        each = mechanism.each({leaf: math.prod(shape) for leaf, shape in totals.items()})
        one = Fraction(each[name].bound)
    elif isinstance(mechanism, GaussianGram):
        one = Fraction(mechanism.bound) ** 2
    else:
        one = Fraction(mechanism.inner.bound if isinstance(mechanism, Squares) else mechanism.bound)
    clients = 1 if isinstance(mechanism, GaussianRows) else 12
    return math.floor(clients * one / Fraction(grid[name]))


@PROFILE
@given(st.integers(1, 2000), st.integers(0, RING - 1), st.integers(-(2**42), 2**42))
def test_folding_moves_no_further_than_the_ring(clients, start, move):
    # f on the whole ring, against |f(t) - f(t')| <= |t - t'|: whole numbers, no tolerance.
    mechanism = GaussianSum(1.0, 1.0)
    step = mechanism.step(1)
    edge = math.floor(clients / Fraction(step))
    for t in (start, edge, 2 * edge, RING // 2, -edge, -2 * edge, -1):
        pair = [out_of_ring({"w": [(t + by) % RING]}, {"w": (1,)}, {"w": step}) for by in (0, move)]
        folded = [
            units(admit_sum(mechanism, one, np.arange(clients), {"w": (1,)}).total["w"], step)[0]
            for one in pair
        ]
        assert abs(folded[0] - folded[1]) <= abs(move)
