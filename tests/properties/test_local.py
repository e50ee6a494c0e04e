"""Local noise: a client moves its own message by the bound at most, and nobody's noise by a bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL, units

from coterie.privacy.billboard import bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import GaussianSum, LocalGaussianSum

PROFILE = settings(derandomize=True, deadline=None, max_examples=40)

mechanisms = st.builds(
    LocalGaussianSum,
    st.sampled_from([1.0, 0.1, 1 / 3, 1e-6, 1e6]),
    st.sampled_from([1.0, 1e-4, 37.3, 1e4]),
    st.sampled_from([1.0, 20.5]),
)


@st.composite
def stacked(draw, clients):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = {}
    for name, shape in (("w", (5,)), ("b", ()), ("k", (2, 3))):
        values = rng.standard_normal((clients, *shape)) * 10.0 ** draw(st.floats(-8, 8))
        mask = rng.random(values.shape) < draw(st.sampled_from([0.0, 0.3]))
        rows[name] = torch.from_numpy(
            np.where(mask, rng.choice(SPECIAL + NOT_FINITE, values.shape), values)
        )
    return rows


def messages(mechanism, rows, ids, seed=5, number=2):
    """What each client sends: its own row, bounded and noised by itself."""
    return [
        bound(
            mechanism,
            {name: leaf[place : place + 1] for name, leaf in rows.items()},
            torch.tensor([client]),
            client_entropy(seed, number),
        )[0].total
        for place, client in enumerate(ids)
    ]


def steps(left, right, step):
    """left - right in whole steps of the grid, exactly."""
    found = []
    for name in sorted(left):
        found.append(units(left[name], step) - units(right[name], step))
    return np.concatenate(found)


@PROFILE
@given(mechanisms, stacked(1), stacked(1))
def test_neighbours_messages_differ_by_the_sensitivity_at_most(mechanism, one, other):
    """Same coins, other data: the difference is that of clipped rows, exactly, and bounded."""
    step = GaussianSum(mechanism.bound, mechanism.noise_multiplier).step(12)
    nothing = {name: torch.zeros_like(leaf) for name, leaf in one.items()}
    first, second, silent = (messages(mechanism, r, [3])[0] for r in (one, other, nothing))
    for left, right, relation in ((first, silent, "zero_out"), (first, second, "replace")):
        moved = sum(unit**2 for unit in steps(left, right, step))
        # In units of the step; the norm is compared with squares of integers, exactly.
        limit = mechanism.sensitivity(relation) / step
        assert moved <= int(limit) ** 2 + 2 * int(limit) + 1
        assert moved <= limit**2 * (1 + 1e-12)


@PROFILE
@given(mechanisms, stacked(4), st.integers(0, 3))
def test_noise_depends_neither_on_data_nor_on_company(mechanism, rows, who):
    """A client's noise: its message less its clipped row, alone, in a block, among others' data."""
    ids = [7, 2, 40, 11]
    central = GaussianSum(mechanism.bound, mechanism.noise_multiplier)
    step, coarse = central.step(12), central.release_step(12)
    nothing = {name: torch.zeros_like(leaf) for name, leaf in rows.items()}
    silent, spoken = messages(mechanism, nothing, ids), messages(mechanism, rows, ids)
    clipped = mechanism.clip({name: leaf.clone() for name, leaf in rows.items()})[0]
    own = {name: leaf[who] for name, leaf in clipped.items()}
    zeros = {name: torch.zeros_like(leaf) for name, leaf in own.items()}
    noise = steps(silent[who], zeros, step)
    assert np.any(noise != 0)
    # Both messages are rounded to the grid of releases, by half a step of it each.
    moved = np.abs(steps(spoken[who], own, step) - noise) * step
    assert moved.max() <= (coarse if coarse > step else 0)
    # A block's sum is the sum of its messages, in any order: the others' data moves no noise.
    whole = bound(mechanism, rows, torch.tensor(ids), client_entropy(5, 2))[0].total
    for name, leaf in whole.items():
        assert torch.equal(leaf, sum(message[name] for message in reversed(spoken)))


@PROFILE
@given(mechanisms, stacked(3))
def test_what_is_kept_is_that_of_central_noise(mechanism, rows):
    central = GaussianSum(mechanism.bound, mechanism.noise_multiplier)
    part, kept = bound(mechanism, rows, torch.arange(3), client_entropy(0, 0))
    plain, same = bound(central, rows)
    assert torch.equal(kept, same)
    assert part.total.keys() == plain.total.keys()


def test_rows_are_not_touched():
    rows = {"w": torch.full((2, 3), 0.1, dtype=torch.float64)}
    bound(LocalGaussianSum(1.0, 1.0, 2.0), rows, torch.arange(2), client_entropy(0, 0))
    assert torch.equal(rows["w"], torch.full((2, 3), 0.1, dtype=torch.float64))


def test_nothing_leaves_without_noise():
    mechanism, rows = LocalGaussianSum(1.0, 1.0, 2.0), {"w": torch.ones(2, 3)}
    for ids, entropy in ((None, None), (torch.arange(2), None), (None, client_entropy(0, 0))):
        with pytest.raises(ValueError, match="add the noise themselves"):
            bound(mechanism, rows, ids, entropy)
    with pytest.raises(ValueError, match="twice"):
        bound(mechanism, rows, torch.tensor([1, 1]), client_entropy(0, 0))
    with pytest.raises(ValueError, match="3 ids"):
        bound(mechanism, rows, torch.arange(3), client_entropy(0, 0))


def test_central_noise_never_opens_a_clients_source():
    def refuse(client):
        raise AssertionError(client)

    bound(GaussianSum(1.0, 1.0), {"w": torch.ones(2, 3)}, torch.arange(2), refuse)
