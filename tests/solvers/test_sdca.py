"""Dual coordinate ascent against scikit-learn, closed forms and its own guarantees."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.svm import LinearSVC, LinearSVR
from tests.solvers.rows import everyone, federate

from coterie.core.rng import Rng
from coterie.solvers import sdca
from coterie.solvers.sdca import Losses, Problem, _Joint, certify, fit_joint, fit_local, take_steps

pytestmark = pytest.mark.full

COUNTS = (9, 14, 0, 11)
TUBE = 0.1
TASKS = ["binary", "regression"]


def dataset(task, counts=COUNTS, features=4, is_sparse=False, seed=0, outputs=1, offset=0.3):
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=(sum(counts), features)) + offset).astype(np.float32)
    x[generator.random(x.shape) < 0.3] = 0
    score = x @ generator.normal(size=(features, outputs))
    score = score + 0.7 * generator.normal(size=score.shape)
    y = {
        "binary": (score[:, 0] > 0.3).astype(np.float32),
        "regression": score[:, 0].astype(np.float32),
        "multiclass": score.argmax(axis=1),
        "multilabel": (score > 0.3).astype(np.float32),
    }[task]
    return federate(task, counts, sparse.csr_matrix(x) if is_sparse else x, y, outputs)


def orders(clients, seed=0):
    return Rng.seeded(seed).keys(clients.ids)


def plain(data, bias=False):
    """Rows as float64 with a column of ones for a bias, targets as signs, owners."""
    x = data.features.toarray() if data.is_sparse else data.features.flatten(1).numpy()
    x = x.astype(np.float64)
    x = np.hstack([x, np.ones((len(x), 1))]) if bias else x
    y = data.targets.numpy().astype(np.float64)
    return (
        x,
        2 * y - 1 if data.spec.task == "binary" else y,
        np.repeat(range(len(data)), data.counts),
    )


def row_losses(task, score, y):
    return (
        np.maximum(1 - y * score, 0) if task == "binary" else np.maximum(abs(score - y) - TUBE, 0)
    )


def objective(data, shared, own, c1, c2, bias):
    x, y, owner = plain(data, bias)
    score = np.einsum("id,id->i", x, shared + own[owner])
    size = shared @ shared / 2 + (c2 / 2 * (own**2).sum() if c2 < math.inf else 0)
    return size + c1 * row_losses(data.spec.task, score, y).sum()


def peer(task, x, y, c, **more):
    """Fit one SVM without a bias by scikit-learn."""
    more = {"fit_intercept": False, "tol": 1e-10, "max_iter": 10**6, **more}
    if task == "binary":
        return LinearSVC(loss="hinge", C=c, **more).fit(x, y).coef_[0]
    fit = LinearSVR(loss="epsilon_insensitive", C=c, epsilon=TUBE, dual=True, **more).fit(x, y)
    return fit.coef_


def joint_peer(data, c1, c2, bias):
    """Solve the multi-task problem as one SVM on [x, x / sqrt(c2) in block k]."""
    x, y, owner = plain(data, bias)
    blocks = np.zeros((len(x), len(data), x.shape[1]))
    blocks[np.arange(len(x)), owner] = x / math.sqrt(c2)
    found = peer(data.spec.task, np.hstack([x, blocks.reshape(len(x), -1)]), y, c1)
    own = found[x.shape[1] :].reshape(len(data), -1) / math.sqrt(c2)
    return found[: x.shape[1]], own


def run_rounds(data, losses, c2, rounds, sigma=None, bias=False, dtype=torch.float64, **how):
    """Add up all clients' moves, round by round; give w, v, dual and the history of the dual."""
    clients, width = everyone(data), data.spec.features + bias
    shared = torch.zeros(data.spec.outputs, width, dtype=dtype)
    own = torch.zeros(len(data), data.spec.outputs, width, dtype=dtype)
    dual = torch.zeros(len(data), 0, data.spec.outputs, dtype=dtype)
    scale = (len(data) if sigma is None else sigma) + 1 / c2
    for number in range(rounds):
        dual, moved = take_steps(
            clients, shared + own, scale, dual, losses, keys=orders(clients, number), **how
        )
        shared, own = shared + moved.sum(dim=0), own + moved / c2
    return shared, own, dual


def dual_value(data, dual, c2, bias=False):
    """The objective that steps minimise, from the definition."""
    x, y, owner = plain(data, bias)
    b = np.concatenate([dual[k, :n, 0].numpy() for k, n in enumerate(data.counts)])
    sums = np.stack([b[owner == k] @ x[owner == k] for k in range(len(data))])
    whole = sums.sum(axis=0)
    value = whole @ whole / 2 + (sums**2).sum() / (2 * c2) - b @ y
    return value + (TUBE * abs(b).sum() if data.spec.task == "regression" else 0)


# Optima


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("c2", "is_sparse"), [(0.5, True), (10.0, False)])
def test_joint_fit_matches_scikit_learn(task, bias, c2, is_sparse):
    data = dataset(task, is_sparse=is_sparse)
    fit = fit_joint(everyone(data), Losses(c1=0.7), c2=c2, bias=bias, tol=1e-9)
    shared, own = fit.shared[0].numpy(), fit.own[:, 0].numpy()
    ours = objective(data, shared, own, 0.7, c2, bias)
    theirs = objective(data, *joint_peer(data, 0.7, c2, bias), 0.7, c2, bias)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(fit.primal, ours, rtol=1e-12)
    assert 0 <= fit.gap <= 1e-9 * fit.primal + 1e-12
    np.testing.assert_allclose(shared, (c2 * own).sum(axis=0), atol=1e-10)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bias", [False, True])
def test_rounds_of_safe_steps_match_scikit_learn(task, bias):
    data = dataset(task)
    losses = Losses(c1=0.7)
    shared, own, dual = run_rounds(data, losses, 2.0, 400, bias=bias, epochs=20)
    ours = objective(data, shared[0].numpy(), own[:, 0].numpy(), 0.7, 2.0, bias)
    theirs = objective(data, *joint_peer(data, 0.7, 2.0, bias), 0.7, 2.0, bias)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    loss, gap = certify(everyone(data), shared + own, dual, losses)
    squares = float((shared**2).sum() / 2 + (own**2).sum())
    np.testing.assert_allclose(float(loss.sum()) + squares, ours, rtol=1e-12)
    np.testing.assert_allclose(
        float(gap.sum()), ours + dual_value(data, dual, 2.0, bias), atol=1e-9
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("c1", [0.05, 3.0])
def test_fit_local_matches_scikit_learn(task, bias, c1):
    data = dataset(task, counts=(25, 1, 0, 40))
    fit = fit_local(everyone(data), Losses(c1=c1), bias=bias, tol=1e-9)
    x, y, owner = plain(data, bias)
    for client in range(len(data)):
        mine = owner == client
        weight = fit.weight[client, 0].numpy()
        if not mine.any():
            assert not weight.any()
            assert fit.primal[client] == 0
            continue
        ours = weight @ weight / 2 + c1 * row_losses(task, x[mine] @ weight, y[mine]).sum()
        np.testing.assert_allclose(float(fit.primal[client]), ours, rtol=1e-12)
        np.testing.assert_allclose(
            weight, fit.dual[client, : mine.sum(), 0].numpy() @ x[mine], atol=1e-12
        )
        if len(set(y[mine])) > 1:
            found = peer(task, x[mine], y[mine], c1)
            theirs = found @ found / 2 + c1 * row_losses(task, x[mine] @ found, y[mine]).sum()
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@given(
    seed=st.integers(0, 10**6),
    task=st.sampled_from(TASKS),
    c1=st.sampled_from([0.01, 1.0, 20.0]),
    features=st.integers(1, 6),
    bias=st.booleans(),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_gaps_close_on_any_problem(seed, task, c1, features, bias, counts):
    clients = everyone(dataset(task, counts=counts, features=features, seed=seed))
    losses = Losses(c1=c1)
    alone = fit_local(clients, losses, bias=bias, tol=1e-9)
    loss, gap = certify(clients, alone.weight, alone.dual, losses)
    primal = loss + (alone.weight**2).sum(dim=(1, 2)) / 2
    assert bool((gap <= 1e-8 * primal + 1e-12).all())
    joint = fit_joint(clients, losses, c2=2.0, bias=bias, tol=1e-9)
    _, gap = certify(clients, joint.shared + joint.own, joint.dual, losses)
    assert float(gap.sum()) <= 1e-8 * joint.primal + 1e-12


@pytest.mark.parametrize("task", TASKS)
def test_limits_of_c2(task):
    data = dataset(task, counts=(15, 20, 12))
    clients = everyone(data)
    pooled = fit_joint(clients, Losses(c1=0.4), c2=math.inf, bias=False, tol=1e-10)
    assert not pooled.own.any()
    x, y, _ = plain(data)
    np.testing.assert_allclose(pooled.shared[0].numpy(), peer(task, x, y, 0.4), atol=1e-5)
    near = fit_joint(clients, Losses(c1=0.4), c2=1e7, bias=False, tol=1e-10)
    np.testing.assert_allclose(near.shared.numpy(), pooled.shared.numpy(), atol=1e-4)
    alone = fit_local(clients, Losses(c1=0.4), bias=False, tol=1e-10)
    apart = fit_joint(clients, Losses(c1=0.4 * 1e-6), c2=1e-6, bias=False, tol=1e-10)
    np.testing.assert_allclose((apart.shared + apart.own).numpy(), alone.weight.numpy(), atol=1e-3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("c2", [0.5, math.inf])
def test_moving_all_free_duals_at_once_makes_the_dual_better(task, c2):
    data = dataset(task, counts=(25, 30, 20), features=6)
    problem = Problem.of(everyone(data), Losses(c1=0.5), bias=True)
    better = 0
    for epochs in range(1, 9):
        joint = _Joint.zero(problem, torch.float64, c2)
        joint.solve(orders(everyone(data)), 1e-12, epochs)
        before = dual_value(data, torch.from_numpy(joint.dual), c2, bias=True)
        joint._accelerate()
        after = dual_value(data, torch.from_numpy(joint.dual), c2, bias=True)
        assert after <= before + 1e-12
        better += after < before - 1e-6
        assert abs(joint.dual).max() <= 0.5
        x, _, owner = plain(data, bias=True)
        b = np.concatenate([joint.dual[k, :n, 0] for k, n in enumerate(data.counts)])
        np.testing.assert_allclose(joint.shared, b @ x, atol=1e-10)
        for k in range(3):
            own = b[owner == k] @ x[owner == k] / c2
            np.testing.assert_allclose(joint.own[k], own, atol=1e-10)
    assert better >= 4


def test_hard_margins_take_few_epochs():
    data = dataset("binary", counts=(60,), features=80, seed=5)
    fit = fit_local(everyone(data), Losses(c1=100.0), bias=False, tol=1e-6)
    x, y, _ = plain(data)
    assert (y * (x @ fit.weight[0, 0].numpy()) > 1 - 1e-4)[x.any(axis=1)].all()
    assert int(fit.epochs) < 500


@pytest.mark.parametrize("is_sparse", [False, True])
def test_threads_change_nothing(is_sparse, monkeypatch):
    data = dataset("binary", counts=(9, 14, 11, 7, 30, 2), is_sparse=is_sparse)

    def run():
        clients = everyone(data)
        dual, moved = take_steps(
            clients, torch.ones(6, 1, 4).double(), 2.0, torch.zeros(6, 0, 1), Losses(c1=1.0),
            keys=orders(clients), epochs=4,
        )  # fmt: skip
        alone = fit_local(clients, Losses(c1=1.0), bias=True)
        joint = fit_joint(clients, Losses(c1=1.0), c2=2.0, bias=True)
        losses = certify(clients, alone.weight, alone.dual, Losses(c1=1.0))
        return dual, moved, alone.weight, joint.shared, joint.own, *losses

    single = run()
    data.forget()
    monkeypatch.setattr(sdca, "_SMALL", 0)
    monkeypatch.setattr(sdca.numba, "get_num_threads", lambda: 4)
    assert all(torch.equal(a, b) for a, b in zip(single, run(), strict=True))


# The paper's examples


def printed_step(b, w, v, x, y, c2):
    """The regression step of equation (27) as printed."""
    a, g = (1 / c2 - 1) * x * x, x * (v - w) - y
    u = a * b - g
    return math.copysign(max(abs(u) - TUBE, 0), u) / a


@pytest.mark.parametrize(("c2", "b", "printed"), [(0.5, 0.3, 2.7), (2.0, 0.6, -2.7)])
def test_one_sample_where_the_printed_step_fails(c2, b, printed):
    data = federate("regression", (1,), np.ones((1, 1), np.float32), torch.ones(1))
    shared, own, dual = run_rounds(data, Losses(c1=1.0), c2, 3)
    np.testing.assert_allclose(float(dual), b, rtol=1e-12)
    np.testing.assert_allclose(float(shared + own), 0.9, rtol=1e-12)
    held = 0.0
    for _ in range(100):
        held = printed_step(held, held, held / c2, 1.0, 1.0, c2)
    np.testing.assert_allclose(held + held / c2, printed, rtol=1e-12)


@pytest.mark.parametrize("c2", [0.5, 2.0])
def test_the_printed_step_diverges_on_three_tasks(c2):
    data = dataset("regression", counts=(5, 5, 5), features=2, seed=3)
    x, y, owner = plain(data)
    assert x.any(axis=1).all()
    b, w, v = np.zeros(15), np.zeros(2), np.zeros((3, 2))
    for _ in range(300):
        for i, k in enumerate(owner):
            size = (1 / c2 - 1) * (x[i] @ x[i])
            u = size * b[i] - (x[i] @ (v[k] - w) - y[i])
            change = math.copysign(max(abs(u) - TUBE, 0), u) / size - b[i]
            b[i], w, v[k] = b[i] + change, w + change * x[i], v[k] + change * x[i] / c2
        if abs(w).max() > 1e12:
            break
    assert abs(w).max() > 1e12
    fit = fit_joint(everyone(data), Losses(c1=1.0), c2=c2, bias=False, tol=1e-9)
    theirs = objective(data, *joint_peer(data, 1.0, c2, False), 1.0, c2, False)
    np.testing.assert_allclose(fit.primal, theirs, rtol=1e-6)


def test_adding_up_identical_clients_is_safe_with_sigma_and_not_without():
    data = federate("binary", (1,) * 20, np.ones((20, 1), np.float32), torch.ones(20))
    unsafe = [float(run_rounds(data, Losses(c1=1.0), 10.0, n, sigma=1)[0]) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(unsafe, [20 / 1.1, 0, 20 / 1.1, 0], atol=1e-9)
    safe = float(run_rounds(data, Losses(c1=1.0), 10.0, 200)[0])
    np.testing.assert_allclose(safe, 20 / 20.1, rtol=1e-9)


# What a step promises


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_dual_never_gets_worse_whoever_answers(task, masked):
    data = dataset(task, counts=(9, 6, 12, 8, 10))
    generator, c2, losses = np.random.default_rng(3), 2.0, Losses(c1=1.5)
    shared, own = torch.zeros(1, 4).double(), torch.zeros(5, 1, 4).double()
    dual = torch.zeros(5, 12, 1).double()
    values = [dual_value(data, dual, c2)]
    for number in range(60):
        ids = np.flatnonzero(generator.random(5) < 0.6)
        clients = data.clients(ids)
        mask = torch.from_numpy(generator.random((len(ids), 12))) if masked else None
        new, moved = take_steps(
            clients, shared + own[ids], 5 + 1 / c2, dual[ids], losses,
            keys=orders(clients, number), mask=mask, epochs=1 + number % 3,
        )  # fmt: skip
        dual[ids], shared = new, shared + moved.sum(dim=0)
        own[ids] += moved / c2
        values.append(dual_value(data, dual, c2))
    assert (np.diff(values) <= 1e-12).all()
    assert values[-1] < values[0] - 0.1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_are_kept_and_duals_outside_are_cut(task, dtype):
    data = dataset(task)
    clients, c1 = everyone(data), 0.3
    x, y, _ = plain(data)
    wild = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 16, 1)) * 5).to(dtype)
    start = torch.zeros(4, 1, 4, dtype=dtype)
    dual, moved = take_steps(clients, start, 2.0, wild, Losses(c1=c1), keys=orders(clients))
    limit = float(torch.tensor(c1, dtype=dtype))
    rows = dual[clients.mask.nonzero(as_tuple=True)].numpy()[:, 0].astype(np.float64)
    assert abs(rows).max() == limit
    if task == "binary":
        assert (rows * y >= 0).all()
    for client, count in enumerate(data.counts):
        assert torch.equal(dual[client, count:], wild[client, count:])
        begin = data.offsets[client]
        change = (dual - wild)[client, :count, 0].double().numpy()
        np.testing.assert_allclose(
            moved[client, 0].numpy(), change @ x[begin : begin + count], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("task", TASKS)
def test_what_is_returned_belongs_to_the_duals(task):
    data = dataset(task)
    clients = everyone(data)
    x, _, owner = plain(data, bias=True)
    generator = np.random.default_rng(1)
    mask = torch.from_numpy(generator.random((4, 14)))
    start = torch.from_numpy(generator.normal(size=(4, 1, 5)))
    empty = torch.zeros(4, 0, 1)
    for how in ({}, {"mask": mask}, {"replace": True}, {"epochs": 5}):
        dual, moved = take_steps(
            clients, start, 3.0, empty, Losses(c1=1.0), keys=orders(clients), **how
        )
        for k, n in enumerate(data.counts):
            np.testing.assert_allclose(
                moved[k, 0].numpy(), dual[k, :n, 0].numpy() @ x[owner == k], atol=1e-12
            )
    how = {"keys": orders(clients), "mask": mask}
    dual, moved = take_steps(clients, start, 3.0, empty, Losses(c1=1.0), paper_mask=True, **how)
    full, _ = take_steps(clients, start, 3.0, empty, Losses(c1=1.0), keys=orders(clients))
    assert torch.equal(dual, full)
    for k, n in enumerate(data.counts):
        kept = dual[k, :n, 0].numpy() * mask[k, :n].numpy()
        np.testing.assert_allclose(moved[k, 0].numpy(), kept @ x[owner == k], atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_masks_keep_the_optimum_and_the_printed_one_does_not(task):
    data, losses, c2 = dataset(task, counts=(10, 12, 8)), Losses(c1=1.0), 2.0
    best = fit_joint(everyone(data), losses, c2=c2, bias=False, tol=1e-10)
    mask = torch.from_numpy(np.random.default_rng(0).random((3, 12)) * 0.9 + 0.1)
    shared, own, dual = run_rounds(data, losses, c2, 1500, mask=mask)
    ours = objective(data, shared[0].numpy(), own[:, 0].numpy(), 1.0, c2, False)
    np.testing.assert_allclose(ours, best.primal, rtol=1e-6)
    _, gap = certify(everyone(data), shared + own, dual, losses)
    assert float(gap.sum()) <= 1e-6 * best.primal
    shared, own, dual = run_rounds(data, losses, c2, 100, mask=mask, paper_mask=True)
    x, _, _ = plain(data)
    b = np.concatenate([dual[k, :n, 0].numpy() for k, n in enumerate(data.counts)])
    assert abs(shared[0].numpy() - b @ x).max() > 1e-2


@given(seed=st.integers(0, 10**6), task=st.sampled_from(TASKS), bias=st.booleans())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_every_term_of_the_gap_is_positive(seed, task, bias):
    data = dataset(task, counts=(1,) * 30, seed=seed)
    generator = np.random.default_rng(seed)
    point = torch.from_numpy(generator.normal(size=(30, 1, 4 + bias)) * 3)
    dual = torch.from_numpy(generator.normal(size=(30, 1, 1)))
    loss, gap = certify(everyone(data), point, dual, Losses(c1=0.5))
    x, y, _ = plain(data, bias)
    score = np.einsum("id,id->i", x, point[:, 0].numpy())
    costs = 0.5 * row_losses(task, score, y) * (bias | x.any(axis=1))
    np.testing.assert_allclose(loss.numpy(), costs, atol=1e-12)
    low = np.where(y > 0, 0, -0.5) if task == "binary" else np.full(30, -0.5)
    high = np.where(y > 0, 0.5, 0) if task == "binary" else np.full(30, 0.5)
    b = np.clip(dual[:, 0, 0].numpy(), low, high) * (bias | x.any(axis=1))
    conjugate = -b * y + (TUBE * abs(b) if task == "regression" else 0)
    np.testing.assert_allclose(gap.numpy(), costs + conjugate + b * score, atol=1e-12)
    assert (gap >= 0).all()


@pytest.mark.parametrize("task", TASKS)
def test_leaving_rows_out_changes_nothing_in_the_end(task):
    data = dataset(task, counts=(30, 45, 20))
    clients, losses, zeros = everyone(data), Losses(c1=1.0), torch.zeros(3, 1, 4).double()
    keys = orders(clients)
    _, shrunk = take_steps(
        clients, zeros, 1.0, torch.zeros(3, 0, 1), losses, keys=keys, epochs=3000, tol=1e-9
    )
    ones = torch.ones(3, 45)  # a mask turns it off
    dual, whole = take_steps(
        clients, zeros, 1.0, torch.zeros(3, 0, 1), losses, keys=keys, epochs=3000, mask=ones
    )
    np.testing.assert_allclose(shrunk.numpy(), whole.numpy(), atol=1e-7)
    fixed, rest = take_steps(clients, whole, 1.0, dual, losses, keys=keys, epochs=5)
    np.testing.assert_allclose(fixed.numpy(), dual.numpy(), atol=1e-7)
    assert float(rest.abs().max()) < 1e-7


def test_a_tolerance_stops_early():
    data = dataset("binary", counts=(30, 45))
    clients, losses, zeros = everyone(data), Losses(c1=1.0), torch.zeros(2, 1, 4).double()
    how = {"keys": orders(clients)}
    empty = torch.zeros(2, 0, 1)
    loose, at = take_steps(clients, zeros, 1.0, empty, losses, epochs=5000, tol=0.05, **how)
    exact, _ = take_steps(clients, zeros, 1.0, empty, losses, epochs=5000, **how)
    assert not torch.equal(loose, exact)
    x, y, owner = plain(data)
    score = np.einsum("id,id->i", x, at[owner, 0].numpy()) - y
    b = np.concatenate([loose[k, :n, 0].numpy() for k, n in enumerate(data.counts)]) * y
    slack = np.where(
        b <= 0, np.minimum(score * y, 0), np.where(b >= 1, np.maximum(score * y, 0), score)
    )
    assert 0 < abs(slack[x.any(axis=1)]).max() < 0.2


# Rows of all kinds


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_sparse_rows_give_what_dense_rows_give(task, index):
    dense, thin = dataset(task), dataset(task, is_sparse=True)
    thin.features.indices = thin.features.indices.astype(index)
    thin.features.indptr = thin.features.indptr.astype(index)
    results = []
    for data in (dense, thin):
        clients = everyone(data)
        start = torch.ones(4, 1, 5, dtype=torch.float64)
        results.append(
            take_steps(
                clients, start, 2.0, torch.zeros(4, 0, 1), Losses(c1=1.0),
                keys=orders(clients), epochs=3,
            )
        )  # fmt: skip
        results[-1] += certify(clients, start, results[-1][0], Losses(c1=1.0))
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), atol=1e-11)


def test_columns_given_twice_are_added_up():
    x = sparse.csr_matrix((np.float32([1, 1, 3]), [0, 0, 1], [0, 3]), shape=(1, 2))
    data = federate("regression", (1,), x, torch.ones(1))
    dual, _ = take_steps(
        everyone(data), torch.zeros(1, 1, 2).double(), 1.0, torch.zeros(1, 0, 1),
        Losses(c1=9.0, tube=0.0), keys=orders(everyone(data)),
    )  # fmt: skip
    np.testing.assert_allclose(float(dual), 1 / 13, rtol=1e-12)
    assert x.nnz == 3


@pytest.mark.parametrize("task", TASKS)
def test_float32_is_close_to_float64(task):
    clients = everyone(dataset(task, counts=(30, 20)))
    wide = fit_local(clients, Losses(c1=0.5), bias=True, tol=1e-6)
    narrow = fit_local(clients, Losses(c1=0.5), bias=True, tol=1e-4, dtype=torch.float32)
    assert narrow.weight.dtype == narrow.dual.dtype == torch.float32
    np.testing.assert_allclose(narrow.primal.numpy(), wide.primal.numpy(), rtol=2e-4)
    joint = [
        fit_joint(clients, Losses(c1=0.5), c2=2.0, bias=True, tol=tol, dtype=dtype)
        for dtype, tol in ((torch.float64, 1e-6), (torch.float32, 1e-4))
    ]
    np.testing.assert_allclose(joint[0].primal, joint[1].primal, rtol=2e-4)
    assert joint[1].own.dtype == torch.float32


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_client_does_not_see_the_others(is_sparse):
    data = dataset("binary", counts=(9, 14, 11, 7), is_sparse=is_sparse)
    start = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1, 4)))

    def run(ids, rows=data):
        clients = rows.clients(np.array(ids))
        dual, moved = take_steps(
            clients, start[ids], 2.0, torch.zeros(len(ids), 0, 1), Losses(c1=1.0),
            keys=orders(clients), epochs=4,
        )  # fmt: skip
        fit = fit_local(clients, Losses(c1=1.0), bias=False)
        return [
            (dual[i, : data.counts[k]], moved[i], fit.weight[i], fit.gap[i])
            for i, k in enumerate(ids)
        ]

    whole = run([0, 1, 2, 3])
    for ids in ([2], [3, 1], [1, 0, 2]):
        for k, mine in zip(ids, run(ids), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, whole[k], strict=True))
    if is_sparse:
        return
    broken = data.features.clone()
    broken[data.offsets[1] + 3, 2] = float("nan")
    mixed = run([0, 1, 2, 3], replace(data, features=broken))
    for k in (0, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(mixed[k], whole[k], strict=True))
    assert all(bool(leaf.isnan().all()) for leaf in mixed[1])


@pytest.mark.parametrize("where", ["target", "start", "dual"])
def test_a_number_that_is_none_stays_with_its_client(where):
    data = dataset("regression", counts=(5, 6))
    start, dual = torch.zeros(2, 1, 4).double(), torch.zeros(2, 7, 1).double()
    if where == "target":
        data.targets[2] = math.inf
    elif where == "start":
        start[0, 0, 1] = math.nan
    else:
        dual[0, 3] = math.nan
    clients, losses = everyone(data), Losses(c1=1.0)
    after, moved = take_steps(clients, start, 1.0, dual, losses, keys=orders(clients))
    assert bool(after[0, :5].isnan().all())
    assert bool(moved[0].isnan().all())
    assert torch.equal(after[0, 5:], dual[0, 5:])
    assert bool(after[1].isfinite().all())
    assert bool(moved[1].isfinite().all())
    loss, gap = certify(clients, start, dual, losses)
    assert bool(gap[0].isnan())
    assert bool(torch.isfinite(loss[1] + gap[1]))
    if where == "target":
        with pytest.raises(ValueError, match=r"client 0 has a NaN.*remove it from the joint fit"):
            fit_joint(clients, losses, c2=1.0, bias=False)


def test_what_is_kept_of_rows_belongs_to_them():
    data = dataset("binary")
    clients = everyone(data)
    first = fit_local(clients, Losses(c1=1.0), bias=False, tol=1e-9)
    other = replace(clients, features=2 * data.features)
    twice = fit_local(other, Losses(c1=0.25), bias=False, tol=1e-9)
    again = fit_local(clients, Losses(c1=1.0), bias=False, tol=1e-9)
    np.testing.assert_allclose(2 * twice.weight.numpy(), first.weight.numpy(), atol=1e-4)
    assert torch.equal(first.weight, again.weight)


def test_rows_of_any_shape_are_read_in_place():
    flat = dataset("binary", features=6)
    square = federate("binary", COUNTS, flat.features.numpy().reshape(-1, 2, 3), flat.targets)
    before = square.features.clone()
    fits = [fit_local(everyone(data), Losses(c1=1.0), bias=True) for data in (flat, square)]
    assert torch.equal(fits[0].weight, fits[1].weight)
    assert torch.equal(square.features, before)


@pytest.mark.parametrize("task", TASKS)
def test_rows_of_zeros_are_left_out(task):
    data = dataset(task, counts=(8, 9))
    data.features[[0, 3, 10]] = 0
    clients = everyone(data)
    keep = np.ones(17, dtype=bool)
    keep[[0, 3, 10]] = False
    rest = everyone(data.where(keep))
    dual = torch.ones(2, 9, 1).double()
    after, _ = take_steps(
        clients, torch.zeros(2, 1, 4).double(), 1.0, dual, Losses(c1=1.0), keys=orders(clients)
    )
    assert not after[0, [0, 3]].any()
    assert not after[1, 2].any()
    with_zeros, without = (
        fit_local(part, Losses(c1=1.0), bias=False, tol=1e-10) for part in (clients, rest)
    )
    np.testing.assert_allclose(with_zeros.primal.numpy(), without.primal.numpy(), rtol=1e-8)
    counted = fit_local(clients, Losses(c1=1.0), bias=True, tol=1e-10)
    x, y, owner = plain(data, bias=True)
    score = np.einsum("id,id->i", x, counted.weight[owner, 0].numpy())
    primal = np.bincount(owner, row_losses(task, score, y))
    primal += (counted.weight.numpy() ** 2).sum(axis=(1, 2)) / 2
    np.testing.assert_allclose(counted.primal.numpy(), primal, rtol=1e-10)


# Classes


@pytest.mark.parametrize("class_weight", ["none", "balanced", (0.5, 2.5)])
def test_class_weights_match_scikit_learn(class_weight):
    data = dataset("binary", counts=(30, 40), seed=2, offset=0.6)
    fit = fit_local(everyone(data), Losses(c1=0.3, class_weight=class_weight), bias=False, tol=1e-9)
    x, y, owner = plain(data)
    given_there = {"none": None, "balanced": "balanced", (0.5, 2.5): {-1: 0.5, 1: 2.5}}
    for k in range(2):
        found = peer(
            "binary", x[owner == k], y[owner == k], 0.3, class_weight=given_there[class_weight]
        )
        np.testing.assert_allclose(fit.weight[k, 0].numpy(), found, atol=1e-4)


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("class_weight", ["none", "balanced"])
def test_outputs_are_svms_of_their_own(task, class_weight):
    data = dataset(task, counts=(40, 30), outputs=3, seed=1)
    losses = Losses(c1=0.5, class_weight=class_weight)
    fit = fit_local(everyone(data), losses, bias=True, tol=1e-9)
    assert fit.weight.shape == (2, 3, 5)
    assert fit.dual.shape == (2, 40, 3)
    pooled = fit_joint(everyone(data), losses, c2=math.inf, bias=True, tol=1e-9)
    x, _, owner = plain(data, bias=True)
    targets = data.targets.numpy()
    how = {"class_weight": None if class_weight == "none" else "balanced"}
    for output in range(3):
        y = targets == output if task == "multiclass" else targets[:, output] > 0
        for k in range(2):
            found = peer("binary", x[owner == k], y[owner == k], 0.5, **how)
            np.testing.assert_allclose(fit.weight[k, output].numpy(), found, atol=1e-4)
        if class_weight == "none":
            found = peer("binary", x, y, 0.5)
            np.testing.assert_allclose(pooled.shared[output].numpy(), found, atol=1e-4)
    loss, gap = certify(everyone(data), fit.weight, fit.dual, losses)
    np.testing.assert_allclose(gap.numpy(), fit.gap.numpy(), atol=1e-9)
    primal = loss + (fit.weight**2).sum(dim=(1, 2)) / 2
    np.testing.assert_allclose(primal.numpy(), fit.primal.numpy(), rtol=1e-12)


def test_weights_of_several_classes_are_those_of_the_row():
    data = dataset("multiclass", counts=(40,), outputs=3, seed=1)
    losses = Losses(c1=0.5, class_weight=(1.0, 3.0, 0.2))
    fit = fit_local(everyone(data), losses, bias=False, tol=1e-9)
    x, _, _ = plain(data)
    costs = np.array([1.0, 3.0, 0.2])[data.targets.numpy()]
    for output in range(3):
        y = data.targets.numpy() == output
        how = {"fit_intercept": False, "tol": 1e-10, "max_iter": 10**6}
        found = LinearSVC(loss="hinge", C=0.5, **how).fit(x, y, sample_weight=costs).coef_[0]
        np.testing.assert_allclose(fit.weight[0, output].numpy(), found, atol=1e-4)


# What is refused


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"c1": 0.0}, "c1: given 0.0; expected a finite number > 0"),
        ({"c1": math.inf}, "c1: given inf"),
        ({"c1": 1.0, "tube": -0.1}, "tube: given -0.1"),
        ({"c1": 1.0, "class_weight": "even"}, "class_weight: given 'even'"),
        ({"c1": 1.0, "class_weight": (1.0, 0.0)}, "one finite number > 0 per class"),
    ],
)
def test_losses_are_checked(settings_, words):
    with pytest.raises(ValueError, match=words):
        Losses(**settings_)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.0}, "scale: given 0.0; expected finite numbers > 0"),
        ({"scale": torch.tensor([1.0, -1, 1, 1])}, "scale: given"),
        ({"scale": torch.ones(3)}, r"scale: given shape \(3,\)"),
        ({"start": torch.zeros(4, 1, 7)}, r"start: given shape \(4, 1, 7\); expected \(4, 1, 4\)"),
        ({"start": torch.zeros(4, 1, 4).long()}, "start: given torch.int64"),
        ({"dual": torch.zeros(3, 0, 1)}, r"dual: given shape \(3, 0, 1\)"),
        ({"mask": torch.ones(4, 5)}, r"mask: given shape \(4, 5\); expected \(4, 14\)"),
        ({"mask": torch.full((4, 14), 1.5)}, r"mask: given numbers outside \[0, 1\]"),
        ({"mask": torch.full((4, 14), math.nan)}, "mask: given numbers outside"),
        ({"epochs": 0}, "epochs: given 0"),
        ({"keys": np.zeros(4, dtype=np.int64)}, "keys: given int64"),
        ({"losses": Losses(c1=1.0, class_weight=(1.0, 2.0, 3.0))}, "given 3 numbers; expected 2"),
    ],
)
def test_steps_are_checked(change, words):
    clients = everyone(dataset("binary"))
    usual = {
        "start": torch.zeros(4, 1, 4),
        "scale": 1.0,
        "dual": torch.zeros(4, 0, 1),
        "losses": Losses(c1=1.0),
        "keys": orders(clients),
    }
    with pytest.raises(ValueError, match=words):
        take_steps(clients, **{**usual, **change})


def test_targets_and_rows_are_checked():
    data = dataset("binary")
    data.targets[12] = 2.0
    with pytest.raises(ValueError, match=r"client 1 has a target other than 0 and 1: recode"):
        fit_local(everyone(data), Losses(c1=1.0), bias=False)
    with pytest.raises(ValueError, match=r"class_weight: given for regression"):
        fit_local(
            everyone(dataset("regression")), Losses(c1=1.0, class_weight="balanced"), bias=False
        )
    thin = dataset("binary", is_sparse=True)
    thin.features.indices[0] = 99
    with pytest.raises(ValueError, match=r"client 0 has a CSR row .* outside 0 .. 3: rebuild"):
        fit_local(everyone(thin), Losses(c1=1.0), bias=False)


def test_fits_that_do_not_get_there_say_so():
    clients = everyone(dataset("binary", counts=(30, 40)))
    with pytest.raises(RuntimeError, match=r"client 0: relative gap .* after 1 epochs.*raise most"):
        fit_local(clients, Losses(c1=1.0), bias=False, tol=1e-9, most=1)
    with pytest.raises(RuntimeError, match=r"joint fit: relative gap .* after 2 epochs"):
        fit_joint(clients, Losses(c1=1.0), c2=1.0, bias=False, tol=1e-9, most=2)
    loose = {"bias": False, "tol": 1e-9, "most": 1, "strict": False}
    assert bool((fit_local(clients, Losses(c1=1.0), **loose).gap > 0.01).all())
    assert fit_joint(clients, Losses(c1=1.0), c2=1.0, **loose).gap > 0.01
    for wrong in ({"c2": 0.0}, {"c2": 1.0, "tol": 0.0}):
        with pytest.raises(ValueError, match=r"given 0"):
            fit_joint(clients, Losses(c1=1.0), bias=False, **wrong)


def test_nobody_at_all_is_no_trouble():
    clients = dataset("binary").clients(np.zeros(0, dtype=np.int64))
    fit = fit_local(clients, Losses(c1=1.0), bias=True)
    assert fit.weight.shape == (0, 1, 5)
    dual, moved = take_steps(
        clients, torch.zeros(0, 1, 4), 1.0, torch.zeros(0, 0, 1), Losses(c1=1.0),
        keys=orders(clients),
    )  # fmt: skip
    assert dual.shape == (0, 0, 1)
    assert moved.shape == (0, 1, 4)
    assert fit_joint(clients, Losses(c1=1.0), c2=1.0, bias=False).primal == 0
