"""Sums that travelled: what is taken, what is cut, and what is said of it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import memory_board

from coterie.privacy.billboard import Bounded, admit, admit_sum, bound
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.mechanisms import (
    Block,
    BlockSum,
    Exact,
    GaussianRows,
    GaussianSum,
    LaplaceSum,
    LocalGaussianSum,
    Mechanism,
    Shape,
)
from coterie.privacy.moments import GaussianGram, Squares, WishartGram
from coterie.privacy.validation import Verdict, fold, grid_steps, validate

SUM = GaussianSum(1.0, 2.0)
TEMPLATE = {"w": (3,), "b": ()}
TWO = np.array([4, 7])


def arrays(w, b=0.0):
    return {"w": np.array(w, dtype=np.float64), "b": np.array(b)}


def one(mechanism, values, ids=TWO, shape=None):
    """What is counted of a single leaf, and the verdict."""
    values = np.array(values, dtype=np.float64)
    part, verdict = admit(mechanism, {"w": values}, ids, {"w": shape or values.shape})
    return part.total["w"].numpy(), verdict


EVERY = {
    "gaussian": (GaussianSum(3.0, 1.0), {"w": (2, 4), "b": (5,)}),
    "laplace": (LaplaceSum(3.0, 0.1), {"w": (2, 4), "b": (5,)}),
    "blocks": (
        BlockSum((Block("w", 5.0, 0.5), Block("b", 0.01, 0.5, "positive")), 2.0),
        {"w": (2, 4), "b": (5,)},
    ),
    "local": (LocalGaussianSum(3.0, 20.0, 4.0), {"w": (2, 4), "b": (5,)}),
    "gram": (GaussianGram(3.0, 1.0), {"w": (4,), "b": (5,)}),
    "wishart": (WishartGram(3.0, 9, 1.0), {"w": (4,), "b": (5,)}),
    "squares": (Squares(GaussianSum(3.0, 1.0)), {"w": (4,), "b": (5,)}),
    "laplace squares": (Squares(LaplaceSum(3.0, 1.0)), {"w": (4,), "b": (5,)}),
    "rows": (GaussianRows(3.0, 1e4, 6), {"w": (4,), "b": (5,)}),
}


@pytest.mark.parametrize("name", EVERY)
def test_steps_are_powers_of_two_that_sums_and_noise_lie_on(name):
    mechanism, shapes = EVERY[name]
    totals = mechanism.totals(shapes)
    grid = grid_steps(mechanism, totals)
    assert set(grid) == set(totals)
    assert all(math.frexp(step)[0] == 0.5 for step in grid.values())
    rng = np.random.default_rng(0)
    rows = {leaf: torch.from_numpy(rng.standard_normal((6, *s))) for leaf, s in shapes.items()}
    total = mechanism.reduce(mechanism.clip(rows)[0], torch.arange(6))
    posted = mechanism.perturb(total, SeededEntropy(0, "noise", 0))
    for leaf, step in grid.items():
        for value in (total[leaf].numpy() / step, posted[leaf].numpy() / step):
            assert np.array_equal(value, np.rint(value))
        # As fine as a sum of these clients is: with a coarser step half of them would be off.
        halves = total[leaf].numpy() / (2 * step)
        assert not np.array_equal(halves, np.rint(halves))


def test_a_sum_without_privacy_has_no_grid():
    assert grid_steps(Exact(), {"w": (3,)}) is None


def test_a_sum_inside_the_bound_is_taken_as_it_is():
    part, verdict = admit(SUM, arrays([1.5, -1.0, 0.0], 0.5), TWO, TEMPLATE)
    assert type(part) is Bounded
    assert verdict == Verdict("taken", "", 2, 1.0, 0)
    assert verdict.taken
    assert not verdict.zeroed
    assert part.total["w"].tolist() == [1.5, -1.0, 0.0]
    assert part.total["b"].item() == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*EVERY, "exact"])
def test_anything_that_is_no_number_makes_all_of_it_zeros(name, bad):
    mechanism, shapes = EVERY.get(name, (Exact(), {"w": (4,), "b": (5,)}))
    totals = mechanism.totals(shapes)
    sent = {leaf: np.ones(shape) for leaf, shape in totals.items()}
    sent["b"].flat[-1] = bad
    part, verdict = admit(mechanism, sent, np.array([0, 1]), shapes)
    assert (verdict.status, verdict.why, verdict.kept) == ("zeroed", "not_finite", 0.0)
    assert verdict.zeroed
    assert all(not leaf.any() for leaf in part.total.values())


def test_a_long_sum_is_scaled_onto_the_bound_of_its_clients():
    for size in (2.001, 1e5, 1e200, 1.7e308):
        held, verdict = one(SUM, [size, 0.0, -size])
        assert (verdict.status, verdict.why, verdict.changed) == ("scaled", "norm", 2)
        # To a grid step each: two clients of norm 1 have a sum of norm 2 at most.
        assert 2 - 2 * SUM.step(3) <= np.linalg.norm(held) <= 2
        assert verdict.kept == pytest.approx(math.sqrt(2) / size)
        assert held[0] == -held[2]


def test_the_norm_is_the_mechanisms_own():
    held, verdict = one(LaplaceSum(1.0, 1.0), [1.5, 1.5, 0.0])
    assert verdict.why == "norm"
    assert held.tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert np.abs(held).sum() <= 2
    assert one(SUM, [1.25, 1.25, 0.0])[1].taken  # the same is inside in l2


def test_all_leaves_are_one_vector_and_blocks_are_each_their_own():
    part, verdict = admit(SUM, arrays([2.0, 0.0, 0.0], 2.0), TWO, TEMPLATE)
    assert verdict.why == "norm"
    assert part.total["b"].item() == pytest.approx(math.sqrt(2), rel=1e-5)
    blocks = BlockSum((Block("w", 1.0, 0.5), Block("b", 1.0, 0.5)), 1.0)
    part, verdict = admit(blocks, arrays([2.0, 0.0, 0.0], 8.0), TWO, TEMPLATE)
    assert part.total["w"].tolist() == [2.0, 0.0, 0.0]
    assert part.total["b"].item() == pytest.approx(2.0, rel=1e-5)


def test_numbers_between_grid_steps_are_rounded_towards_zero():
    step = SUM.step(3)
    held, verdict = one(SUM, [2.75 * step, -2.75 * step, 3 * step])
    assert (held / step).tolist() == [2.0, -2.0, 3.0]
    assert verdict == Verdict("mended", "grid", 2, 1.0, 2)


def test_what_cannot_be_negative_is_not():
    blocks = BlockSum((Block("w", 1.0, 0.5, "positive"), Block("b", 1.0, 0.5, "single")), 1.0)
    part, verdict = admit(blocks, arrays([0.5, -9.0, 0.25], -3.0), TWO, TEMPLATE)
    assert part.total["w"].tolist() == [0.5, 0.0, 0.25]
    assert part.total["b"].item() == 0
    assert verdict == Verdict("mended", "sign", 2, 1.0, 2)
    for mechanism in (Squares(SUM), Squares(LaplaceSum(1.0, 1.0)), Exact(Shape.SQUARES)):
        held, verdict = one(mechanism, [0.5, -0.25, 0.0])
        assert held.tolist() == [0.5, 0.0, 0.0]
        assert (verdict.status, verdict.why) == ("mended", "sign")


@pytest.mark.parametrize("mechanism", [GaussianGram(1.0, 1.0), WishartGram(1.0, 4, 1.0)])
def test_a_second_moment_is_symmetric_with_no_negative_square_and_a_bounded_trace(mechanism):
    held, verdict = one(mechanism, [[0.5, 9.0], [0.25, 0.5]], shape=(2,))
    assert held.tolist() == [[0.5, 0.25], [0.25, 0.5]]  # the lower triangle counts
    assert verdict.why == "symmetry"
    held, verdict = one(mechanism, [[-0.5, 0.0], [0.0, 0.5]], shape=(2,))
    assert held.tolist() == [[0.0, 0.0], [0.0, 0.5]]
    assert verdict.why == "sign"
    # Frobenius norm below 2, trace 2.5 above it: no two vectors of norm 1 have such a sum.
    held, verdict = one(mechanism, np.eye(2) * 1.25, shape=(2,))
    assert verdict.why == "norm"
    assert np.trace(held) == pytest.approx(2.0, rel=1e-6)
    held, verdict = one(mechanism, [[0.0, 8.0], [8.0, 0.0]], shape=(2,))
    assert np.linalg.norm(held) == pytest.approx(2.0, rel=1e-6)


def test_each_client_has_its_own_row_and_nobody_elses():
    mechanism = GaussianRows(1.0, 1.0, 5)
    sent = np.zeros((5, 2))
    sent[1], sent[2], sent[4] = (0.5, 0.5), (3.0, 0.0), (0.25, 0.0)
    held, verdict = one(mechanism, sent, np.array([1, 2]), (2,))
    assert held[1].tolist() == [0.5, 0.5]
    assert held[2].tolist() == pytest.approx([1.0, 0.0], rel=1e-5)
    assert not held[[0, 3, 4]].any()
    assert (verdict.status, verdict.why, verdict.changed) == ("scaled", "norm", 2)
    sent[2] = 0
    _, verdict = one(mechanism, sent, np.array([1, 2]), (2,))
    assert (verdict.status, verdict.why, verdict.changed) == ("mended", "rows", 1)
    held, verdict = one(Exact(Shape.ROWS, 5), sent, np.array([1]), (2,))
    assert verdict.why == "rows"
    assert held[1].tolist() == [0.5, 0.5]
    assert not held[4].any()


@pytest.mark.parametrize("name", [*EVERY, "exact"])
def test_a_site_of_which_nobody_was_asked_counts_as_zeros(name):
    mechanism, shapes = EVERY.get(name, (Exact(), {"w": (4,), "b": (5,)}))
    totals = mechanism.totals(shapes)
    nobody = np.array([], dtype=np.int64)
    zeros = {leaf: np.zeros(shape) for leaf, shape in totals.items()}
    assert admit(mechanism, zeros, nobody, shapes)[1].taken
    sent = {leaf: np.full(shape, 0.5) for leaf, shape in totals.items()}
    part, verdict = admit(mechanism, sent, nobody, shapes)
    assert (verdict.status, verdict.why, verdict.clients) == ("zeroed", "nobody", 0)
    assert all(not leaf.any() for leaf in part.total.values())


@pytest.mark.parametrize("clients", [1, 5, 3000])
@pytest.mark.parametrize("numbers", [1, 30, 100_000])
def test_honest_noise_of_clients_passes_its_limits_ever_so_rarely(clients, numbers):
    # The laws in closed form: the norm of normals is chi, a single number is normal.
    mechanism = LocalGaussianSum(0.7, 1.3, 4.0)
    (limit,) = mechanism.norm_bounds({"w": (numbers,)})
    deviation = 1.3 * 0.7 * math.sqrt(clients)
    rounding = clients * limit.step / 2
    free = limit.norm_limit(clients) - clients * 0.7 - rounding * math.sqrt(numbers)
    assert stats.chi.sf(free / deviation, numbers) < 1e-13
    single = limit.step_limit(clients) * limit.step - clients * 0.7 - rounding
    assert 2 * numbers * stats.norm.sf(single / deviation) < 1e-13
    # And they are limits: not much further off than noise reaches.
    assert free < deviation * (math.sqrt(numbers) + 8)
    assert single < deviation * 10
    held, verdict = one(mechanism, [1e9] + [0.0] * (numbers - 1), np.arange(clients))
    assert verdict.status == "scaled"
    assert held[0] <= limit.step_limit(clients) * limit.step


@pytest.mark.parametrize("door", [admit, admit_sum])
def test_other_shapes_names_and_types_are_refused(door):
    with pytest.raises(ValueError, match=r"\(4,\).*expected.*\(3,\)"):
        door(SUM, arrays([1.0] * 4), TWO, TEMPLATE)
    with pytest.raises(ValueError, match="expected"):
        door(SUM, {"w": np.zeros(3)}, TWO, TEMPLATE)
    with pytest.raises(ValueError, match="float32: expected float64"):
        door(SUM, {"w": np.zeros(3, np.float32), "b": np.zeros(())}, TWO, TEMPLATE)
    with pytest.raises(ValueError, match="expected"):
        door(GaussianGram(1.0, 1.0), {"w": np.zeros(3)}, TWO, {"w": (3,)})


@pytest.mark.parametrize("door", [admit, admit_sum])
@pytest.mark.parametrize("ids", [[1, 1], [-1], [0.5], [[1]]])
def test_ids_are_different_clients(door, ids):
    with pytest.raises(ValueError, match="ids"):
        door(SUM, arrays([0.0] * 3), np.array(ids), TEMPLATE)
    with pytest.raises(ValueError, match="below 5"):
        door(GaussianRows(1.0, 1.0, 5), {"w": np.zeros((5, 2))}, np.array([5]), {"w": (2,)})


def test_a_mechanism_without_norm_bounds_does_not_exist():
    class Other(GaussianSum):
        norm_bounds = Mechanism.norm_bounds

    with pytest.raises(TypeError, match="norm_bounds"):
        Other(1.0, 1.0)


def test_what_was_admitted_is_a_copy_with_a_mark_of_its_own():
    for mechanism in (SUM, Exact()):
        sent = arrays([0.5, 0.0, 0.0])
        first, second = (admit(mechanism, sent, TWO, TEMPLATE)[0] for _ in range(2))
        sent["w"][:] = 1e9
        assert first.total["w"].tolist() == [0.5, 0.0, 0.0]
    assert first.marks.isdisjoint(second.marks)
    with pytest.raises(ValueError, match="twice"):
        first + first
    summed = admit_sum(SUM, arrays([0.5, 0.0, 0.0]), TWO, TEMPLATE)
    assert summed.marks.isdisjoint(first.marks)


def test_what_arrives_is_left_as_it_came():
    total = {"w": torch.tensor([[1e9, math.nan], [3.0, -1.0]], dtype=torch.float64)}
    before = total["w"].clone()
    validate(GaussianGram(1.0, 1.0), total, TWO)
    assert torch.equal(torch.nan_to_num(before), torch.nan_to_num(total["w"]))


def test_a_verdict_is_plain_data():
    _, verdict = one(SUM, [1e308, 0.0, 0.0])
    told = json.loads(json.dumps(dataclasses.asdict(verdict), allow_nan=False))
    assert told.pop("kept") == pytest.approx(2 / 1e308)
    assert told == {"status": "scaled", "why": "norm", "clients": 2, "changed": 1}


def test_a_sum_that_travelled_posts_as_one_that_did_not():
    rows = {"w": torch.tensor([[0.3, 0.2, 0.1], [9.0, 0.0, 0.0]]), "b": torch.zeros(2)}
    stayed = bound(SUM, rows)[0]
    numbers = {name: leaf.numpy() for name, leaf in stayed.total.items()}
    travelled = admit(SUM, numbers, TWO, TEMPLATE)[0]
    posts = []
    for part in (stayed, travelled):
        board = memory_board(SUM, TEMPLATE, seed=0, cohort=2.0)
        posts.append(board.post([part]).value)
    assert all(torch.equal(posts[0][name], posts[1][name]) for name in posts[0])


# Sums out of secure aggregation.


def folded(values, clients=3, mechanism=SUM):
    step = mechanism.step(len(values))
    total = {"w": torch.tensor(values, dtype=torch.float64) * step}
    return (fold(mechanism, total, np.arange(clients))["w"].numpy() / step).tolist()


def test_numbers_are_folded_at_the_bound_and_vanish_beyond_twice():
    most = round(3 / SUM.step(9))
    values = [0, 5, most, most + 5, 2 * most - 1, 2 * most, 2 * most + 1, 2.0**62, -(2.0**63)]
    expected = [0, 5, most, most - 5, 1, 0, 0, 0, 0]
    assert folded(values) == expected
    assert folded([-v for v in values]) == [-v for v in expected]


def test_numbers_that_are_never_negative_fold_to_zero_below_it():
    squares = Squares(SUM)
    step = SUM.step(4)
    most = round(3 / step)
    total = {"w": torch.tensor([-5.0, 5.0, most + 2.0, -(2.0**63)]).double() * step}
    held = fold(squares, total, np.arange(3))["w"].numpy() / step
    assert held.tolist() == [0, 5, most - 2, 0]


def test_rows_of_others_and_second_moments_in_a_sum():
    rows = torch.ones(5, 2, dtype=torch.float64) / 2
    held = fold(GaussianRows(1.0, 1.0, 5), {"w": rows}, np.array([1, 4]))["w"]
    assert held.tolist() == [[0, 0], [0.5, 0.5], [0, 0], [0, 0], [0.5, 0.5]]
    matrix = torch.tensor([[-0.5, 9.0], [0.25, 0.5]], dtype=torch.float64)
    held = fold(GaussianGram(1.0, 1.0), {"w": matrix}, np.arange(2))["w"]
    assert held.tolist() == [[0.0, 0.25], [0.25, 0.5]]


def test_what_is_no_sum_out_of_a_ring_is_refused():
    for bad in (math.nan, math.inf, 1.7e308, SUM.step(3) / 2):
        with pytest.raises(ValueError, match="whole steps"):
            fold(SUM, {"w": torch.tensor([0.0, bad, 0.0]).double()}, TWO)


def test_sums_that_float64_could_not_hold_are_refused():
    # 1.99 * 2^30 steps a client, and twice the sum has to stay below 2^53.
    quiet = GaussianSum(1.99, 1e-9)
    assert quiet.step(1) == 2.0**-30
    with pytest.raises(ValueError, match="not represent exactly"):
        folded([0.0], 2_120_000, quiet)
    assert folded([7.0], 2_100_000, quiet) == [7.0]


def test_mechanisms_whose_sum_cannot_be_folded_are_refused():
    for mechanism, why in ((Exact(), "grid"), (WishartGram(1.0, 4, 1.0), "wishart")):
        with pytest.raises(ValueError, match=why):
            mechanism.check_secure_sum()
        with pytest.raises(ValueError, match=why):
            fold(mechanism, {"w": torch.zeros(2, 2)}, TWO)
    for mechanism, _ in (EVERY[name] for name in EVERY if name != "wishart"):
        mechanism.check_secure_sum()
