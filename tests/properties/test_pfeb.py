"""One client of PFEB moves a round's sums by at most what its one event says, whatever its rows.

End to end: adversarial rows through the posterior, the method's own blocks and the clip. A move is
measured in units of the noise that is drawn, block by block.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.rng import Rng
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import ClientNames
from coterie.engine.rounds import RoundState, client_half
from coterie.methods.pfeb import PFEB, packed, unpacked
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for

PROFILE = settings(derandomize=True, deadline=None, max_examples=40)
ROOM = 1 + 1e-9
WILD = [0.0, 1.0, -1.0, 1e-30, 1e8, -1e20, 3e38, math.nan, math.inf, -math.inf]
CASES = [
    ("regression", {}),
    ("regression", {"gls": True}),
    ("regression", {"structure": 1.0}),
    ("regression", {"structure": 0.5, "personal": (0, 2)}),
    ("regression", {"curves": 2}),
    ("regression", {"curves": 2, "structure": 1.0}),
    ("binary", {"structure": 1.0}),
    ("regression", {"learn": False}),
    ("regression", {"personal": (0, 2)}),
    ("binary", {"personal": (2,)}),
    ("multiclass", {"personal": ()}),
    ("binary", {}),
    ("binary", {"gls": True}),
    ("multiclass", {}),
    ("multilabel", {}),
]


def drawn(draw, task, clients, tame):
    """Draw ragged clients, some without rows; unless tame, with entries of any size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(0, 7, clients)
    total, outputs = int(counts.sum()), 3 if task.startswith("multi") else 1
    x = rng.standard_normal((total, 2)) * 10.0 ** rng.integers(-3, 3 if tame else 9, (total, 1))
    y = rng.standard_normal(total) * 10.0 ** rng.integers(-2, 1 if tame else 9, total)
    if not tame:
        wild = rng.random((total, 2)) < draw(st.sampled_from([0.0, 0.2, 1.0]))
        x = np.where(wild, rng.choice(WILD, (total, 2)), x)
        y = np.where(rng.random(total) < 0.1, rng.choice(WILD, total), y)
    targets = {
        "regression": torch.from_numpy(y.astype(np.float32)),
        "binary": torch.from_numpy((y > 0).astype(np.float32)),
        "multiclass": torch.from_numpy(rng.integers(0, outputs, total)),
        "multilabel": torch.from_numpy(rng.integers(0, 2, (total, outputs)).astype(np.float32)),
    }[task]
    return FederatedDataset(
        Spec((2,), outputs, task, clients),
        ClientNames(clients),
        np.concatenate([[0], np.cumsum(counts)]),
        torch.from_numpy(x.astype(np.float32)),
        targets,
    )


def swapped(data, other, who):
    """Put the rows of a client of other data in the place of those of `who`."""
    pieces = [(other if client == who else data, client) for client in range(len(data))]
    cut = [(d, d.offsets[k], d.offsets[k + 1]) for d, k in pieces]
    return replace(
        data,
        offsets=np.concatenate([[0], np.cumsum([stop - start for _, start, stop in cut])]),
        features=torch.cat([d.features[start:stop] for d, start, stop in cut]),
        targets=torch.cat([d.targets[start:stop] for d, start, stop in cut]),
    )


def law_of(draw, method, spec):
    """Draw a shared tree such as posts may have led to: far, tight or wide."""
    shared = method.init(spec, Rng.seeded(0))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tuple(shared["mean"].shape)
    center = rng.standard_normal(shape) * 10.0 ** draw(st.integers(-2, 3))
    variances = 10.0 ** rng.uniform(-10, 4, shape)
    far = {"ahead": torch.from_numpy(center), "mean": torch.from_numpy(center)}
    if spec.task == "regression":
        far["residual"] = torch.full((1,), 10.0 ** draw(st.integers(-8, 4)), dtype=torch.float64)
    if "mixing" in shared:  # any structure, and the block in both of its uses
        mixing = torch.from_numpy(rng.standard_normal((shape[1], shape[1])))
        far["mixing"] = mixing / mixing.norm(dim=1, keepdim=True)
        far["searching"] = torch.full((1,), float(draw(st.booleans())), dtype=torch.float64)
    if "curves" in shared:  # a search before, in and after it, and curves of any size
        far["bending"] = torch.full((1,), float(draw(st.integers(0, 2))), dtype=torch.float64)
        far["posts"] = torch.full((1,), float(draw(st.integers(0, 4))), dtype=torch.float64)
        size = shared["curves"].numel()
        far["curves"] = torch.from_numpy(rng.standard_normal(size) * 10.0 ** rng.integers(-2, 3))
    return {**shared, **far, "variances": torch.from_numpy(variances)}


def sums(plan, shared, data, without=None):
    """Return the sums that the billboard is handed, of all clients or of all but one."""
    ids = np.array([k for k in range(len(data)) if k != without], dtype=np.int64)
    mechanism = plan.mechanisms(len(data))[0]
    state = RoundState(plan.method, mechanism, shared, Rng.seeded(0), 0)
    part, *_ = client_half(state, {}, data.clients(ids))
    return mechanism, part.total


def move(mechanism, left, right):
    """How far one sum is from another, in units of B / sqrt(f), block by block."""
    deviations = mechanism.standard_deviations(
        {name: tuple(leaf.shape) for name, leaf in left.items()}
    )
    squares = [
        float((left[name] - right[name]).square().sum()) / deviations[name] ** 2 for name in left
    ]
    return mechanism.noise_multiplier * math.sqrt(math.fsum(squares))


@pytest.mark.parametrize(("task", "given_settings"), CASES)
def test_neighbours(task, given_settings):
    largest = []
    chosen = {name: one for name, one in given_settings.items() if name != "personal"}
    effects = given_settings.get("personal")

    @PROFILE
    @given(st.data())
    def check(data):
        clients, who = 4, data.draw(st.integers(0, 3))
        one, two = (drawn(data.draw, task, clients, tame=data.draw(st.booleans())) for _ in "ab")
        one, two = (replace(d, spec=replace(d.spec, personal=effects)) for d in (one, two))
        private = Privacy(epsilon=1.0, delta=1e-5)
        plan = plan_for(one.spec, private, method=PFEB(**chosen), rounds=3)
        shared = law_of(data.draw, plan.method, one.spec)
        mechanism, total = sums(plan, shared, one)
        assert all(bool(leaf.isfinite().all()) for leaf in total.values())
        gone = move(mechanism, total, sums(plan, shared, one, without=who)[1])
        assert gone <= ROOM
        assert mechanism.sensitivity("zero_out") == 1
        other = move(mechanism, total, sums(plan, shared, swapped(one, two, who))[1])
        assert other <= mechanism.sensitivity("replace") * ROOM
        largest.append(gone)

    check()
    # The rows do reach the bounds: a check that nothing comes near would show nothing.
    assert max(largest) > 0.8


@PROFILE
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_packed_matrices_keep_their_norm_and_come_back(size, seed):
    half = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, size, size)))
    matrices = half + half.mT
    vectors = packed(matrices)
    assert vectors.shape == (3, size * (size + 1) // 2)
    torch.testing.assert_close(vectors.norm(dim=1), matrices.flatten(1).norm(dim=1))
    torch.testing.assert_close(unpacked(vectors[1], size), matrices[1])


@PROFILE
@given(st.data())
def test_curvatures_lie_between_zero_and_the_identity(data):
    rows = drawn(data.draw, "regression", 4, tame=True)
    plan = plan_for(rows.spec, Privacy(epsilon=math.inf), method=PFEB(gls=True), rounds=1)
    shared = law_of(data.draw, plan.method, rows.spec)
    everyone = rows.clients(np.arange(4))
    _, sent = plan.method.local_update(shared, {}, everyone, Rng.seeded(0), 0)
    for vector in sent["curvature"]:
        values = torch.linalg.eigvalsh(unpacked(vector * math.sqrt(3), 3))
        assert float(values.min()) >= -1e-9 and float(values.max()) <= 1 + 1e-9
    # Spreads and residuals are not negative: less their centres, at least -1 and -2.
    assert bool((sent["spread"] >= -1).all()) and bool((sent["residual"] >= -2).all())
