"""The kernels against torch autograd, one client and one batch at a time, and scikit-learn."""

from itertools import permutations
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from scipy import sparse, stats
from sklearn.linear_model import LogisticRegression, Ridge

from coterie.core.rng import Rng
from coterie.solvers.sgd_kernels import draw_batches, linear_sgd

TASKS = ("regression", "binary", "multiclass", "multilabel")
COUNTS = np.array([7, 0, 3, 1, 12, 5])
STEPS = np.array([9, 4, 1, 6, 11, 0])
FALSE_ALARM = 1e-6


def keys_of(clients, seed=0):
    return Rng.seeded(seed).keys(np.arange(clients))


def problem(task, features=6, counts=COUNTS, steps=STEPS, seed=0, dtype=np.float32):
    """Rows with gaps between the clients, so that starts are not the sums of counts."""
    generator = np.random.default_rng(seed)
    outputs = 1 if task in ("regression", "binary") else 4
    starts = 2 + np.cumsum(counts + 1) - (counts + 1)
    length = int((starts + counts).max(initial=0)) + 3
    x = generator.normal(size=(length, features)) * (generator.random((length, features)) < 0.5)
    targets = {
        "regression": generator.normal(size=length).astype(dtype),
        "binary": generator.integers(0, 2, length).astype(dtype),
        "multiclass": generator.integers(0, outputs, length),
        "multilabel": generator.integers(0, 2, (length, outputs)).astype(dtype),
    }[task]
    clients = len(counts)
    weight = generator.normal(size=(clients, outputs, features)).astype(dtype)
    bias = generator.normal(size=(clients, outputs)).astype(dtype)
    rows = {
        "features": x.astype(dtype), "targets": targets, "starts": starts, "counts": counts,
        "keys": keys_of(clients), "steps": steps, "batch": 3, "lr": 0.2, "task": task,
    }  # fmt: skip
    anchor = {
        "anchor_weight": generator.normal(size=(outputs, features)).astype(dtype),
        "anchor_bias": generator.normal(size=outputs).astype(dtype),
    }
    return weight, bias, rows, anchor


def as_csr(rows, **changes):
    matrix = sparse.csr_matrix(rows["features"])
    arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data} | changes
    return rows | {"features": SimpleNamespace(**arrays)}


def loss_of(scores, targets, task):
    f = torch.nn.functional
    if task == "regression":
        return (scores[:, 0] - targets).square().mean() / 2
    if task == "binary":
        return f.binary_cross_entropy_with_logits(scores[:, 0], targets)
    if task == "multiclass":
        return f.cross_entropy(scores, targets)
    return f.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1).mean()


def walk(weight, bias, rows, client, batches, settings):
    """One client in float64, by autograd and torch's own optimiser."""
    w = torch.tensor(weight[client], dtype=torch.float64, requires_grad=True)
    leaves = {"anchor_weight": w}
    b = torch.zeros(len(w), dtype=torch.float64)
    if bias is not None:
        b = torch.tensor(bias[client], dtype=torch.float64, requires_grad=True)
        leaves["anchor_bias"] = b
    momentum, lam = settings.get("momentum", 0.0), settings.get("lam", 0.0)
    optimiser = torch.optim.SGD(leaves.values(), lr=rows["lr"], momentum=momentum)
    for batch in batches:
        chosen = rows["starts"][client] + batch[batch >= 0]
        if len(chosen) == 0:
            continue
        x = torch.from_numpy(rows["features"][chosen].astype(np.float64))
        y = torch.from_numpy(rows["targets"][chosen])
        y = y if rows["task"] == "multiclass" else y.double()
        loss = loss_of(x @ w.T + b, y, rows["task"])
        for name, leaf in leaves.items():
            anchor = settings.get(name, np.zeros(leaf.shape))
            anchor = anchor[client] if anchor.ndim > leaf.ndim else anchor
            loss = loss + lam / 2 * (leaf - torch.from_numpy(anchor).double()).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return w.detach().numpy(), b.detach().numpy()


def assert_walks(answers, weight, bias, rows, settings, tolerance=2e-5):
    drawn = draw_batches(rows["keys"], rows["counts"], rows["steps"], rows["batch"])
    for client, batches in enumerate(drawn):
        wanted = walk(weight, bias, rows, client, batches, settings)
        for answer in answers:
            assert answer[0].dtype == weight.dtype
            for got, leaf in zip(answer[: 1 if bias is None else 2], wanted, strict=False):
                np.testing.assert_allclose(got[client], leaf, rtol=tolerance, atol=tolerance)


def both(weight, bias, rows, settings):
    return (
        linear_sgd(weight, bias, **rows, **settings),
        linear_sgd(weight, bias, **as_csr(rows), **settings),
    )


SETTINGS = ({}, {"momentum": 0.8}, {"lam": 0.4}, {"momentum": 0.8, "lam": 0.4})


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_walk_is_that_of_autograd(task, settings, has_bias):
    weight, bias, rows, anchor = problem(task)
    if not has_bias:
        bias = None
        del anchor["anchor_bias"]
    settings = settings | anchor
    answers = both(weight, bias, rows, settings)
    for new_weight, new_bias in answers:
        assert new_weight.shape == weight.shape
        assert new_bias.shape == ((len(weight), 0) if bias is None else bias.shape)
    assert_walks(answers, weight, bias, rows, settings)


@pytest.mark.parametrize("task", ["regression", "multiclass"])
def test_an_anchor_for_each_client(task):
    weight, bias, rows, _ = problem(task)
    settings = {"lam": 0.7, "anchor_weight": weight[::-1].copy(), "anchor_bias": bias[::-1].copy()}
    assert_walks(both(weight, bias, rows, settings), weight, bias, rows, settings)
    shared = {"lam": 0.7, "anchor_weight": weight[:1], "anchor_bias": bias[:1]}
    same = {"lam": 0.7, "anchor_weight": weight[0], "anchor_bias": bias[0]}
    zeros = {"lam": 0.7, "anchor_weight": 0 * weight[0], "anchor_bias": 0 * bias[0]}
    for one, other in ((shared, same), ({"lam": 0.7}, zeros)):
        left, right = (linear_sgd(weight, bias, **rows, **given) for given in (one, other))
        assert_same(left, right)


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("batch", [1, 5, 100])
def test_wide_rows_and_other_batches(batch):
    counts, steps = np.array([9, 4]), np.array([20, 7])
    weight, bias, rows, anchor = problem("multilabel", 50, counts, steps)
    rows["batch"] = batch
    settings = {"momentum": 0.5, "lam": 0.3} | anchor
    assert_walks(both(weight, bias, rows, settings), weight, bias, rows, settings)


def test_more_outputs_than_a_tile():
    generator = np.random.default_rng(0)
    _, _, rows, _ = problem("multiclass", 30)
    weight = generator.normal(size=(len(COUNTS), 37, 30)).astype(np.float32)
    bias = generator.normal(size=(len(COUNTS), 37)).astype(np.float32)
    rows["targets"] = generator.integers(0, 37, len(rows["targets"]))
    settings = {"lam": 0.1}
    assert_walks(both(weight, bias, rows, settings), weight, bias, rows, settings)


def test_csr_with_repeated_and_empty_entries():
    weight, bias, rows, anchor = problem("binary")
    wanted = linear_sgd(weight, bias, **rows, lam=0.2, momentum=0.3, **anchor)
    csr = as_csr(rows)["features"]
    # Every entry as two halves: a legal, not canonical CSR.
    halves = {"indices": np.repeat(csr.indices, 2), "data": np.repeat(csr.data / 2, 2)}
    given = as_csr(rows, indptr=2 * csr.indptr, **halves)
    got = linear_sgd(weight, bias, **given, lam=0.2, momentum=0.3, **anchor)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_double_precision(task):
    weight, bias, rows, anchor = problem(task, dtype=np.float64)
    settings = {"momentum": 0.8, "lam": 0.4} | anchor
    assert_walks(both(weight, bias, rows, settings), weight, bias, rows, settings, tolerance=1e-12)


def test_many_steps_reach_the_optimum_of_scikit_learn():
    counts = np.array([40, 25])
    lam = 0.2
    settings = {"lam": lam, "momentum": 0.9}
    for task in ("regression", "binary", "multiclass"):
        weight, bias, rows, _ = problem(task, 4, counts, np.array([2000, 2000]))
        rows["batch"] = 40
        dense = linear_sgd(weight, bias, **rows, **settings)
        csr = linear_sgd(weight, bias, **as_csr(rows), **settings)
        for client, (start, count) in enumerate(zip(rows["starts"], counts, strict=True)):
            x = rows["features"][start : start + count].astype(np.float64)
            x = np.hstack([x, np.ones((count, 1))])
            y = rows["targets"][start : start + count]
            if task == "regression":
                best = Ridge(alpha=lam * count, fit_intercept=False).fit(x, y)
            else:
                best = LogisticRegression(C=1 / (lam * count), fit_intercept=False, tol=1e-10)
                best = best.set_params(max_iter=10_000).fit(x, y)
            for w, b in (dense, csr):
                found = np.hstack([w[client], b[client][:, None]])
                np.testing.assert_allclose(found, np.atleast_2d(best.coef_), atol=2e-5)


@pytest.mark.parametrize("is_csr", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_client_depends_on_its_own_rows_to_the_last_bit(is_csr, task):
    weight, bias, rows, anchor = problem(task, 33)
    settings = {"momentum": 0.5, "lam": 0.3} | anchor

    def run(ids, spoiled=None):
        given = dict(rows)
        if spoiled is not None:
            given["features"] = rows["features"].copy()
            given["features"][rows["starts"][spoiled]] = np.nan
        given = as_csr(given) if is_csr else given
        for name in ("starts", "counts", "keys", "steps"):
            given[name] = rows[name][ids]
        return linear_sgd(weight[ids], bias[ids], **given, **settings)

    everyone = np.arange(len(COUNTS))
    together = run(everyone)
    for client in everyone:
        alone = run(np.array([client]))
        assert_same(alone, [leaf[client : client + 1] for leaf in together])
    shuffled = np.array([4, 2, 5, 0, 1, 3])
    assert_same(run(shuffled), [leaf[shuffled] for leaf in together])
    spoiled = run(everyone, spoiled=4)
    others = everyone != 4
    assert np.isnan(spoiled[0][4]).all()
    assert_same([leaf[others] for leaf in spoiled], [leaf[others] for leaf in together])
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert_same(run(everyone), together)
    finally:
        numba.set_num_threads(threads)


@pytest.mark.parametrize("is_csr", [False, True])
def test_inputs_stay_and_idle_clients_do_not_move(is_csr):
    weight, bias, rows, anchor = problem("binary")
    given = as_csr(rows) if is_csr else rows
    arrays = {"weight": weight, "bias": bias} | anchor
    arrays |= {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    before = {name: value.copy() for name, value in arrays.items()}
    new_weight, new_bias = linear_sgd(weight, bias, **given, lam=1.0, momentum=0.5, **anchor)
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    idle = (COUNTS == 0) | (STEPS == 0)
    assert idle.sum() == 2
    np.testing.assert_array_equal(new_weight[idle], weight[idle])
    np.testing.assert_array_equal(new_bias[idle], bias[idle])
    assert (new_weight[~idle] != weight[~idle]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_huge_scores_do_not_overflow(task):
    weight, bias, rows, _ = problem(task)
    weight *= 1e4
    assert_walks(both(weight, bias, rows, {}), weight, bias, rows, {})


@pytest.mark.parametrize("is_csr", [False, True])
def test_no_clients(is_csr):
    none = np.zeros(0, np.int64)
    weight, bias, rows, _ = problem("binary", counts=none, steps=none)
    new_weight, new_bias = linear_sgd(weight, bias, **(as_csr(rows) if is_csr else rows))
    assert new_weight.shape == (0, 1, 6)
    assert new_bias.shape == (0, 1)
    assert draw_batches(keys_of(0), none, none, 3).shape == (0, 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.zeros((40, 6))}, "features: given float64"),
        ({"features": np.zeros((40, 12), np.float32)[:, ::2]}, "not contiguous"),
        ({"targets": np.zeros(3, np.float32)}, "targets: given float32"),
        ({"counts": COUNTS + 100}, "offsets that belong"),
        ({"starts": COUNTS - 100}, "offsets that belong"),
        ({"starts": COUNTS[:2]}, "starts: given int64"),
        ({"keys": COUNTS}, "keys: given int64"),
        ({"steps": -STEPS}, "steps: given"),
        ({"batch": 0}, "batch: given 0"),
        ({"task": "ranking"}, "task: given 'ranking'"),
        ({"task": "multilabel"}, "targets: given"),
        ({"anchor_weight": np.zeros((2, 1, 6), np.float32)}, "anchor_weight"),
        ({"anchor_bias": None}, "expected both or none"),
    ],
)
def test_bad_input_is_refused(change, message):
    weight, bias, rows, anchor = problem("binary")
    length = len(rows["targets"])
    if "features" in change:
        change = {"features": change["features"][:length]}
    with pytest.raises(ValueError, match=message):
        linear_sgd(weight, bias, **(rows | anchor | change))


def test_bad_rows_are_refused():
    weight, bias, rows, _ = problem("multiclass")
    wrong = rows["targets"].copy()
    wrong[rows["starts"][2]] = 4
    with pytest.raises(ValueError, match="place 2 has a class outside"):
        linear_sgd(weight, bias, **(rows | {"targets": wrong}))
    csr = as_csr(rows)["features"]
    with pytest.raises(ValueError, match="place 2 has a class outside"):
        linear_sgd(weight, bias, **(as_csr(rows) | {"targets": wrong}))
    for bad in (6, -1):
        indices = csr.indices.copy()
        indices[csr.indptr[rows["starts"][4]] :] = bad
        with pytest.raises(ValueError, match="place 4 has a CSR row"):
            linear_sgd(weight, bias, **as_csr(rows, indices=indices))
    indptr = csr.indptr.copy()
    indptr[rows["starts"][4] + 1] = 10**6
    with pytest.raises(ValueError, match="place 4 has a CSR row"):
        linear_sgd(weight, bias, **as_csr(rows, indptr=indptr))
    with pytest.raises(ValueError, match="indices: given float32"):
        linear_sgd(weight, bias, **as_csr(rows, indices=csr.data))


@pytest.mark.parametrize("batch", [1, 3, 4, 50])
def test_every_epoch_is_a_permutation(batch):
    steps = np.full(len(COUNTS), 60)
    drawn = draw_batches(keys_of(len(COUNTS)), COUNTS, steps, batch)
    assert drawn.shape == (len(COUNTS), 60, batch)
    assert drawn.dtype == np.int32
    for client, count in enumerate(COUNTS):
        if count == 0:
            assert (drawn[client] == -1).all()
            continue
        epoch = -(-count // batch)
        for first in range(0, 60 - epoch + 1, epoch):
            batches = drawn[client, first : first + epoch]
            rows = batches[batches >= 0]
            assert sorted(rows) == list(range(count))
            # Only the last batch of an epoch is short, and padding is at its end.
            assert (batches.reshape(-1)[:count] >= 0).all()
    if batch < COUNTS.max():
        assert len({tuple(rows) for rows in drawn[4].tolist()[:: -(-12 // batch)]}) > 1


def test_batches_depend_on_key_count_steps_and_batch_alone():
    keys = keys_of(len(COUNTS))
    together = draw_batches(keys, COUNTS, STEPS, 4)
    for client, steps in enumerate(STEPS):
        one = slice(client, client + 1)
        alone = draw_batches(keys[one], COUNTS[one], STEPS[one], 4)
        np.testing.assert_array_equal(alone[0], together[client, :steps])
        assert (together[client, steps:] == -1).all()
    shuffled = np.array([4, 2, 5, 0, 1, 3])
    np.testing.assert_array_equal(
        draw_batches(keys[shuffled], COUNTS[shuffled], STEPS[shuffled], 4), together[shuffled]
    )
    assert (draw_batches(keys_of(6, seed=1), COUNTS, STEPS, 4) != together).any()


def test_fewer_steps_are_a_prefix():
    keys, counts = keys_of(2), np.array([10, 11])
    long = draw_batches(keys, counts, np.array([3, 3]), 3)
    short = draw_batches(keys, counts, np.array([2, 2]), 3)
    np.testing.assert_array_equal(short, long[:, :2])


def test_permutations_are_uniform_and_epochs_independent():
    """False alarm: 1e-6 a test statistic; the keys are fixed, so a pass stays a pass."""
    clients = 50_000
    keys = keys_of(clients)
    orders = draw_batches(keys, np.full(clients, 5), np.full(clients, 1), 5)[:, 0]
    code = {order: place for place, order in enumerate(permutations(range(5)))}
    seen = np.bincount([code[tuple(order)] for order in orders.tolist()], minlength=120)
    assert stats.chisquare(seen).pvalue > FALSE_ALARM
    twice = draw_batches(keys, np.full(clients, 3), np.full(clients, 2), 3)
    code = {order: place for place, order in enumerate(permutations(range(3)))}
    pairs = [6 * code[tuple(a)] + code[tuple(b)] for a, b in twice.tolist()]
    assert stats.chisquare(np.bincount(pairs, minlength=36)).pvalue > FALSE_ALARM
    first = draw_batches(keys, np.full(clients, 1000), np.full(clients, 1), 1)[:, 0, 0]
    assert stats.chisquare(np.bincount(first, minlength=1000)).pvalue > FALSE_ALARM
