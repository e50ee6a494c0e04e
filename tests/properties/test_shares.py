"""Noise in shares: a client moves a sum by the bound at most, and no share depends on data."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL, units

from coterie.deploy.secagg.primitives import from_ring, to_ring
from coterie.privacy.billboard import absent_shares, bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import Block, BlockSum, GaussianSum
from coterie.privacy.moments import GaussianGram, Squares
from coterie.privacy.shares import GaussianShares
from coterie.privacy.validation import fold, grid_steps

PROFILE = settings(derandomize=True, deadline=None, max_examples=25)
BLOCKS = (Block("w", 0.7, 0.5), Block("v", 0.2, 0.3, "positive"), Block("r", 2.0, 0.2, "single"))
SHAPES = {"w": (5,), "v": (4,), "r": ()}
CENTRAL = {
    "sum": GaussianSum(0.7, 1.3),
    "blocks": BlockSum(BLOCKS, 12.0),
    "gram": GaussianGram(0.7, 3.0),
    "squares": Squares(GaussianSum(0.49, 3.0)),
}
CLIENTS = 6


def shared(kind, minimum=5, corrupt=1):
    return GaussianShares(CENTRAL[kind], CLIENTS, minimum, corrupt)


def shapes_of(kind):
    return SHAPES if kind in ("sum", "blocks") else {"w": (5,)}


def stacked(kind, seed, clients):
    rng = np.random.default_rng(seed)
    rows = {}
    for name, shape in shapes_of(kind).items():
        values = rng.standard_normal((clients, *shape)) * 10.0 ** rng.uniform(-6, 6)
        mask = rng.random(values.shape) < rng.choice([0.0, 0.3])
        odd = rng.choice(SPECIAL + NOT_FINITE, values.shape)
        rows[name] = torch.from_numpy(np.asarray(np.where(mask, odd, values), dtype=np.float64))
    return rows


def summed(mechanism, rows, ids, seed=5, number=2):
    copies = {name: leaf.clone() for name, leaf in rows.items()}
    noise = client_entropy(seed, number)
    return bound(mechanism, copies, torch.tensor(ids), noise)[0].total


def moved(mechanism, left, right):
    """left - right in whole steps of each leaf's grid, exactly, and the steps."""
    totals = {name: tuple(leaf.shape) for name, leaf in left.items()}
    steps = grid_steps(mechanism, totals)
    return {n: units(left[n], steps[n]) - units(right[n], steps[n]) for n in left}, steps


@pytest.mark.parametrize("kind", CENTRAL)
@PROFILE
@given(seed=st.integers(0, 2**32), who=st.integers(0, 3))
def test_neighbours_sums_differ_by_the_sensitivity_at_most(kind, seed, who):
    """Same coins, one client's rows zeroed or replaced: the noisy sums differ as exact sums do."""
    mechanism, ids = shared(kind), [3, 0, 5, 1]
    rows, other = stacked(kind, seed, 4), stacked(kind, seed + 1, 4)
    here = summed(mechanism, rows, ids)
    for relation, row in (("zero_out", None), ("replace", other)):
        changed = {name: leaf.clone() for name, leaf in rows.items()}
        for name, leaf in changed.items():
            leaf[who] = 0.0 if row is None else row[name][who]
        difference, steps = moved(mechanism, here, summed(mechanism, changed, ids))
        square = Fraction(0)
        for name, numbers in difference.items():
            # In units in which the planned noise of every number has deviation z.
            unit = Fraction(1)
            if kind == "blocks":
                block = next(one for one in BLOCKS if one.name == name)
                unit = Fraction(block.share) / Fraction(block.bound) ** 2
            square += unit * sum(Fraction(steps[name]) ** 2 * int(n) ** 2 for n in numbers.flat)
        limit = mechanism.inner.sensitivity(relation)
        assert math.sqrt(square) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("kind", CENTRAL)
@PROFILE
@given(seed=st.integers(0, 2**32))
def test_a_share_depends_neither_on_data_nor_on_company_nor_on_the_cohort(kind, seed):
    mechanism, ids = shared(kind), [0, 1, 2, 3, 4, 5]
    rows = stacked(kind, seed, CLIENTS)
    noise = client_entropy(5, 2)
    template = mechanism.totals(shapes_of(kind))
    shares = [absent_shares(mechanism, template, torch.tensor([one]), noise) for one in ids]
    central = {name: leaf.clone() for name, leaf in rows.items()}
    exact = mechanism.reduce(mechanism.clip(central)[0])
    for drawn in (ids, [0, 4], []):
        part = {name: leaf[drawn] for name, leaf in rows.items()}
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in template.items()}
        if drawn:
            total = summed(mechanism, part, drawn)
            exact = mechanism.reduce(mechanism.clip(part)[0])
        else:
            exact = total
        for one in set(ids) - set(drawn):
            total = {name: total[name] + shares[one].total[name] for name in total}
        noise_only, _ = moved(mechanism, total, exact)
        expected = sum(np.array(list(_flat(mechanism, shares[one].total))) for one in ids)
        assert np.array_equal(np.concatenate([noise_only[n].ravel() for n in total]), expected)


def _flat(mechanism, total):
    zeros = {name: torch.zeros_like(leaf) for name, leaf in total.items()}
    difference, _ = moved(mechanism, total, zeros)
    return itertools.chain.from_iterable(difference[name].ravel() for name in total)


@pytest.mark.parametrize("kind", CENTRAL)
def test_honest_sums_pass_the_ring_and_the_fold_unchanged(kind):
    mechanism = shared(kind)
    for seed in range(5):
        total = summed(mechanism, stacked(kind, seed, CLIENTS), list(range(CLIENTS)), seed)
        totals = {name: tuple(leaf.shape) for name, leaf in total.items()}
        steps = grid_steps(mechanism, totals)
        arrays = {name: leaf.numpy() for name, leaf in total.items()}
        back = from_ring(to_ring(arrays, steps), totals, steps)
        trees = {name: torch.from_numpy(np.array(leaf)) for name, leaf in back.items()}
        folded = fold(mechanism, trees, np.arange(CLIENTS))
        for name in total:
            assert np.array_equal(folded[name].numpy(), arrays[name])
        if kind == "gram":
            assert np.array_equal(arrays["w"], arrays["w"].T)


def test_shares_carry_the_planned_noise_and_no_less():
    """h v - 16 is at least the planned variance in squared steps, and barely more."""
    for kind, (minimum, corrupt) in itertools.product(CENTRAL, ((6, 0), (5, 1), (4, 3))):
        mechanism = shared(kind, minimum, corrupt)
        totals = mechanism.totals(shapes_of(kind))
        planned = mechanism.inner.standard_deviations(totals)
        for name, step, parts in mechanism._parts(totals):
            for turn, (_, variance) in enumerate(parts):
                square = (Fraction(planned[name]) / Fraction(step)) ** 2 / (1 + turn)
                carried = (minimum - corrupt) * variance - 16
                assert square <= carried <= square * Fraction(1_000_001, 1_000_000) + CLIENTS


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"minimum": 7}, "at most 6"),
        ({"minimum": 3, "corrupt": 3}, "no honest share"),
        ({"minimum": 0}, "at least 1"),
        ({"corrupt": -1}, "at least 0"),
    ],
)
def test_counts_without_an_account_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        shared("sum", **settings)


def test_noise_that_the_grid_cannot_carry_is_refused():
    mechanism = GaussianShares(GaussianSum(1.0, 1e-8), 6, 6, 0)
    with pytest.raises(ValueError, match="grid steps"):
        mechanism.norm_bounds({"w": (3,)})
