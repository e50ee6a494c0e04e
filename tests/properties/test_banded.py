"""Banded noise: neighbours of a schedule move all releases together by sqrt(k) bounds at most."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.oracles import NOT_FINITE, SPECIAL

from coterie.core.rng import Rng
from coterie.privacy.banded import banded_sums, column_norms, strategy
from coterie.privacy.entropy import open_entropy
from coterie.privacy.mechanisms import Block, BlockSum, GaussianSum
from coterie.privacy.sampling import Cyclic

PROFILE = settings(derandomize=True, deadline=None, max_examples=30)
BLOCKS = (Block("w", 0.7, 0.5), Block("v", 0.2, 0.3, "positive"), Block("r", 2.0, 0.2, "single"))
SHAPES = {"w": (5,), "v": (4,), "r": ()}
CENTRAL = {"sum": GaussianSum(0.7, 1.3), "blocks": BlockSum(BLOCKS, 12.0)}
CLIENTS = 7


def rows_of(seed, number, ids):
    rng = np.random.default_rng([seed, number])
    found = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal((CLIENTS, *shape)) * 10.0 ** rng.uniform(-6, 6)
        odd = rng.choice(SPECIAL + NOT_FINITE, values.shape)
        mask = rng.random(values.shape) < rng.choice([0.0, 0.3])
        found[name] = torch.from_numpy(np.asarray(np.where(mask, odd, values)))[ids]
    return found


def releases(mechanisms, period, seed, changed=None):
    """All releases with the same normals; a client's rows in its rounds are others, or zeros."""
    past, found = (), []
    schedule = Cyclic(math.ceil(CLIENTS / period))
    assert schedule.period(CLIENTS) == period
    for number, one in enumerate(mechanisms):
        ids = schedule.draw(CLIENTS, Rng.seeded(0), number)
        rows = {n: leaf.clone() for n, leaf in rows_of(seed, number, ids).items()}
        if changed is not None and changed[0] in ids.tolist():
            place = ids.tolist().index(changed[0])
            other = rows_of(seed + 1, number, ids)
            for name, leaf in rows.items():
                leaf[place] = other[name][place] if changed[1] == "replace" else 0.0
        total = one.reduce(one.clip(rows)[0])
        value, past = one.perturb_after(total, open_entropy(seed, "noise", number), past)
        found.append(value)
    return found


@pytest.mark.parametrize("kind", CENTRAL)
@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@PROFILE
@given(
    seed=st.integers(0, 2**32),
    who=st.integers(0, CLIENTS - 1),
    rounds=st.integers(1, 15),
    period=st.sampled_from([2, 3, 4, 7]),
)
def test_neighbours_move_all_releases_by_the_account_at_most(
    kind, relation, seed, who, rounds, period
):
    """In units of the noise's normals: the moves of C Y add up to event mu squared, k times."""
    mechanisms = banded_sums([CENTRAL[kind]] * rounds, period)
    here = releases(mechanisms, period, seed)
    there = releases(mechanisms, period, seed, (who, relation))
    totals = SHAPES
    deviations = CENTRAL[kind].standard_deviations(totals)
    moved = np.array(
        [
            np.concatenate(
                [((one[n] - two[n]).numpy() / deviations[n]).reshape(-1) for n in sorted(SHAPES)]
            )
            for one, two in zip(here, there, strict=True)
        ]
    )
    bands = min(period, rounds)
    first, norms = strategy(rounds, bands), column_norms(rounds, bands)
    whitened = sum(
        coefficient * np.eye(rounds, k=-lag) for lag, coefficient in enumerate(first)
    ) @ (moved / norms[:, None])
    times = len(range(who % period, rounds, period))
    event = mechanisms[0].event()
    shift = event.replaced if relation == "replace" else 1.0
    assert (whitened**2).sum() <= times * (shift / event.noise_multiplier) ** 2 * (1 + 1e-9)
    assert times <= math.ceil(rounds / period)
