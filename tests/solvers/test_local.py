"""Local problems: every term of the objective, Fisher information, large rows, failed clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from tests.solvers.rows import everyone, federate
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.models import CNN, MLP, Linear, row_losses
from coterie.solvers.local import LocalProblem, fisher, largest_squares
from coterie.solvers.sgd import SGD, Near, computed_in, divergence
from coterie.solvers.sgd_kernels import draw_batches

pytestmark = pytest.mark.full

COUNTS = (7, 1, 0, 13, 3)
RNG = Rng.seeded(9)
MODELS = {
    "linear": (Linear(), (5,)),
    "mlp": (MLP(hidden=(4, 3), activation="tanh"), (5,)),
    "cnn": (CNN(channels=(2,), kernel=2, hidden=(3,)), (5, 4)),
}
TASKS = ("regression", "binary", "multiclass", "multilabel")


def dataset(task, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, outputs = sum(COUNTS), 1 if task in ("regression", "binary") else 3
    x = torch.randn(rows, *shape, generator=generator)
    y = {
        "regression": torch.randn(rows, generator=generator),
        "binary": torch.randint(0, 2, (rows,), generator=generator).float(),
        "multiclass": torch.randint(0, outputs, (rows,), generator=generator),
        "multilabel": torch.randint(0, 2, (rows, outputs), generator=generator).float(),
    }[task]
    return federate(task, COUNTS, x, y, outputs)


def draw(model, data, seed, positive=False):
    generator = torch.Generator().manual_seed(seed)
    tree = {
        name: 0.4 * torch.randn(len(data), *leaf.shape, generator=generator)
        for name, leaf in model.init(data.spec, RNG).items()
    }
    return {name: leaf.abs() for name, leaf in tree.items()} if positive else tree


def plain_divergence(task, ours, theirs):
    """KL both ways by torch.distributions."""
    from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

    kinds = {
        "regression": lambda o: Normal(o, 1.0),
        "binary": lambda o: Bernoulli(logits=o),
        "multilabel": lambda o: Bernoulli(logits=o),
        "multiclass": lambda o: Categorical(logits=o),
    }
    p, q = kinds[task](ours), kinds[task](theirs)
    both = kl_divergence(p, q) + kl_divergence(q, p)
    return both.sum(dim=-1) if task == "multilabel" else both


def plain_loop(settings, model, start, data, client, *, only, anchor, weights, near):
    begin, end = data.offsets[client : client + 2]
    x, y, task = data.features[begin:end], data.targets[begin:end], data.spec.task
    counts = np.array([end - begin])
    batches = draw_batches(
        RNG.keys(np.array([client])), counts, settings.count_steps(counts), settings.batch
    )[0]
    params = {name: leaf[client].clone() for name, leaf in start.items()}
    moved = {name: params[name].requires_grad_() for name in params if name in only}
    optimiser = torch.optim.SGD(moved.values(), lr=settings.lr, momentum=settings.momentum)
    for batch in batches:
        rows = torch.from_numpy(batch[batch >= 0]).long()
        outputs = model.apply(params, x[rows])
        loss = row_losses(task, outputs, y[rows]).mean()
        if near is not None:
            theirs = model.apply({n: leaf[client] for n, leaf in near.toward.items()}, x[rows])
            loss = loss + near.weight / 2 * plain_divergence(task, outputs, theirs).mean()
        for name, leaf in moved.items():
            apart = (leaf - anchor[name][client]).square()
            loss = loss + (weights[name][client] * apart).sum() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in params.items()}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("fast", "momentum"), [(True, 0.0), (True, 0.8), (False, 0.8)])
def test_every_part_of_the_objective_against_a_plain_loop(task, kind, fast, momentum):
    model, shape = MODELS[kind]
    data = dataset(task, shape)
    clients = everyone(data)
    start, anchor, toward = (draw(model, data, seed) for seed in (1, 2, 3))
    weights = draw(model, data, 4, positive=True)
    only = sorted(start)[:2]
    settings = SGD(lr=0.05, epochs=2, batch=4, momentum=momentum, fast=fast)
    near = Near(0.7, toward)
    found = settings(model, start, clients, RNG, anchor=anchor, lam=weights, only=only, near=near)
    for client in range(len(data)):
        wanted = plain_loop(
            settings, model, start, data, client,
            only=only, anchor=anchor, weights=weights, near=near,
        )  # fmt: skip
        for name in start:
            torch.testing.assert_close(found[name][client], wanted[name], rtol=2e-4, atol=2e-5)
    for name in set(start) - set(only):
        assert torch.equal(found[name], start[name])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("task", TASKS[1:])
def test_exact_fits_of_classes_have_no_gradient_left(task, stacked, bias):
    data, lam, model = dataset(task, (5,)), 0.3, Linear(bias=bias)
    anchor = draw(model, data, 3) if stacked else model.init(data.spec, RNG)
    clients = everyone(data)
    problem = LocalProblem(model=model, how="auto", sgd=SGD(), lam=lam)
    assert problem.is_exact(data.spec)
    start = anchor if stacked else stack(anchor, len(data))
    found = problem.solve(start, clients, RNG, round=0, anchor=anchor)
    leaves = {name: leaf.double().clone().requires_grad_() for name, leaf in found.items()}
    losses = model.losses(task, model.apply_stacked(leaves, clients.x.double()), clients.y)
    rows = clients.mask.sum(dim=1).clamp_min(1)
    far = sum((leaves[name] - anchor[name]).square().sum() for name in leaves)
    value = (torch.where(clients.mask, losses, 0).sum(dim=1) / rows).sum() + lam / 2 * far
    value.backward()
    assert max(float(leaf.grad.abs().max()) for leaf in leaves.values()) < 1e-6


def test_an_anchor_that_is_not_finite_spoils_its_own_client_only():
    data = dataset("binary", (5,))
    anchor = draw(Linear(), data, 3)
    problem = LocalProblem(model=Linear(), how="exact", sgd=SGD(), lam=0.3)
    clients = everyone(data)
    sound = problem.solve(anchor, clients, RNG, round=0, anchor=anchor)
    spoilt = {name: leaf.clone() for name, leaf in anchor.items()}
    spoilt["weight"][1] = torch.nan
    found = problem.solve(anchor, clients, RNG, round=0, anchor=spoilt, keep_failed=True)
    others = [0, 2, 3, 4]
    assert bool(found["weight"][1].isnan().all())
    for name, leaf in sound.items():
        assert torch.equal(found[name][others], leaf[others])


@pytest.mark.parametrize("task", TASKS)
def test_divergence_is_that_of_the_distributions(task):
    width = () if task in ("regression", "binary") else (5,)
    ours, theirs = torch.randn(2, 40, *width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        divergence(task, ours, theirs), plain_divergence(task, ours, theirs), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(divergence(task, ours, ours), torch.zeros(40))


def test_leaves_to_train_must_be_the_models():
    data, model = dataset("binary", (5,)), Linear()
    clients, start = data.clients(np.arange(5)), draw(model, data, 1)
    for only in (["heads"], []):
        with pytest.raises(ValueError, match="at least one of weight, bias"):
            SGD()(model, start, clients, RNG, only=only)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", MODELS)
def test_fisher_is_the_mean_of_squared_gradients_row_by_row(task, kind):
    model, shape = MODELS[kind]
    data = dataset(task, shape)
    params = draw(model, data, 1)
    found = fisher(model, params, everyone(data))
    for client in range(len(data)):
        begin, end = data.offsets[client : client + 2]
        wanted = {name: torch.zeros_like(leaf[client]) for name, leaf in params.items()}
        for row in range(begin, end):
            mine = {name: leaf[client].clone().requires_grad_() for name, leaf in params.items()}
            outputs = model.apply(mine, data.features[row : row + 1])
            row_losses(task, outputs, data.targets[row : row + 1]).sum().backward()
            for name in wanted:
                wanted[name] += mine[name].grad.square() / (end - begin)
        for name, leaf in wanted.items():
            torch.testing.assert_close(found[name][client], leaf, rtol=2e-4, atol=1e-6)


def test_a_nan_row_spoils_only_its_own_fisher():
    model, shape = MODELS["mlp"]
    data = dataset("multiclass", shape)
    params, clients = draw(model, data, 1), everyone(data)
    good = fisher(model, params, clients)
    data.features[0] = torch.nan
    bad = fisher(model, params, everyone(data))
    for name in good:
        assert torch.equal(good[name][1:], bad[name][1:])


@pytest.mark.parametrize("many", [1, 16, 17, 40])
def test_fisher_does_not_move_with_the_number_of_rows_of_others(many):
    model, shape = MODELS["mlp"]
    data = dataset("multiclass", shape)
    params, counts = draw(model, data, 1), data.counts.tolist()
    first, last = int(data.offsets[-2]), int(data.offsets[-1])
    repeated = np.r_[np.arange(first), np.arange(many) % (last - first) + first]
    rows = data.features[repeated], data.targets[repeated]
    more = federate("multiclass", [*counts[:-1], many], *rows, 3)
    found, wanted = fisher(model, params, everyone(more)), fisher(model, params, everyone(data))
    for name in wanted:
        assert torch.equal(found[name][:-1], wanted[name][:-1])


def test_stacked_anchors_follow_clients_with_smaller_learning_rates():
    """Linear least squares with large rows: clients have several learning rates."""
    data = dataset("regression", (5,))
    data.features[data.offsets[3] :] *= 3
    model, clients = Linear(), everyone(data)
    start, anchor = draw(model, data, 1), draw(model, data, 2)
    problem = LocalProblem(model=model, how="sgd", sgd=SGD(lr=0.5, epochs=2000, batch=20), lam=2.0)
    assert len(list(problem._rates(clients, 0))) > 1
    found = problem.solve(start, clients, RNG, round=0, anchor=anchor)
    exact = LocalProblem(model=model, how="exact", sgd=SGD(), lam=2.0)
    wanted = exact.solve(start, clients, RNG, round=0, anchor=anchor)
    assert not torch.allclose(found["weight"][0], start["weight"][0], atol=1e-2)
    for client in (0, 1, 3, 4):
        torch.testing.assert_close(
            found["weight"][client], wanted["weight"][client], rtol=1e-3, atol=1e-4
        )


def test_failed_clients_keep_their_start_or_are_returned():
    model, shape = MODELS["mlp"]
    data = dataset("regression", shape)
    data.features[data.offsets[3]] = torch.inf
    clients, start = everyone(data), draw(model, data, 1)
    problem = LocalProblem(model=model, how="sgd", sgd=SGD(epochs=2), lam=0.0)
    reset = problem.solve(start, clients, RNG, round=0, anchor=None)
    kept = problem.solve(start, clients, RNG, round=0, anchor=None, keep_failed=True)
    for name in start:
        assert torch.equal(reset[name][3], start[name][3])
        assert torch.equal(reset[name][:3], kept[name][:3])
    assert any(kept[name][3].isnan().any() for name in kept)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_mixed_precision_is_near_and_leaves_parameters_in_float32(kind):
    model, shape = MODELS[kind]
    data = dataset("multiclass", shape)
    clients, start = everyone(data), draw(model, data, 1)
    settings = SGD(lr=0.1, epochs=3)
    whole = settings(model, start, clients, RNG)
    with computed_in("bfloat16"):
        mixed = settings(model, start, clients, RNG)
    after = settings(model, start, clients, RNG)
    assert all(torch.equal(whole[name], after[name]) for name in whole)
    assert any(not torch.equal(whole[name], mixed[name]) for name in whole)
    for name in whole:
        assert mixed[name].dtype == torch.float32
        moved = (whole[name] - start[name]).norm()
        assert (mixed[name] - whole[name]).norm() < 0.05 * moved + 1e-4


def test_softmax_of_large_outputs_has_a_finite_divergence():
    ours = torch.tensor([[1e4, 0.0], [0.0, 1e4]])
    found = divergence("multiclass", ours, ours.flip(0))
    assert torch.isfinite(found).all() and functional.relu(found).equal(found)


# Large rows.


def make(counts=(3, 0, 5, 1), scales=(1.0, 1.0, 100.0, 1.0), task="regression"):
    generator = torch.Generator().manual_seed(0)
    owner = np.repeat(np.arange(len(counts)), counts)
    x = torch.randn(len(owner), 4, generator=generator)
    x *= torch.tensor(scales)[owner][:, None]
    return FederatedDataset(
        Spec((4,), 1, task, len(counts)),
        [str(i) for i in range(len(counts))],
        np.concatenate([[0], np.cumsum(counts)]),
        x,
        x.sum(dim=1),
    )


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [3, 0, 2], [1], [2, 0]])
@pytest.mark.parametrize("as_sparse", [False, True])
def test_largest_squares(ids, as_sparse):
    data = make()
    if as_sparse:
        rows = sparse.csr_matrix(data.features.numpy())
        kept = FederatedDataset(data.spec, data.names, data.offsets, rows, data.targets)
    else:
        kept = data
    found = largest_squares(kept.clients(np.array(ids)))
    for place, client in enumerate(ids):
        own = data.features[data.offsets[client] : data.offsets[client + 1]]
        wanted = own.square().sum(dim=1).max() if len(own) else torch.tensor(0.0)
        torch.testing.assert_close(found[place], wanted)


def test_large_rows_get_small_steps_and_the_others_what_was_asked():
    data, model = make(), Linear()
    clients = data.clients(np.arange(4))
    start = stack(model.init(data.spec, Rng.seeded(0)), 4)
    sgd = SGD(lr=0.05, epochs=30, batch=2)
    problem = LocalProblem(model=model, how="sgd", sgd=sgd, lam=0.0)
    found = problem.solve(start, clients, Rng.seeded(1), round=0, anchor=None)
    assert all(leaf.isfinite().all() for leaf in found.values())
    plain = sgd(model, start, clients, Rng.seeded(1))
    for name, leaf in found.items():
        assert torch.equal(leaf[[0, 1, 3]], plain[name][[0, 1, 3]]), "unit rows keep their steps"
    assert not plain["weight"][2].isfinite().all(), "without the cap the large client blows up"
    errors = (found["weight"][2, 0] @ data.features[3:8].T + found["bias"][2]) - data.targets[3:8]
    assert errors.square().mean() < 0.1 * data.targets[3:8].square().mean()


def test_a_client_that_blows_up_stays_where_it_was():
    data, model = make(task="regression"), MLP(hidden=(3,), activation="relu")
    clients = data.clients(np.arange(4))
    start = stack(model.init(data.spec, Rng.seeded(0)), 4)
    problem = LocalProblem(model=model, how="sgd", sgd=SGD(lr=0.05, epochs=40), lam=0.0)
    plain = problem.sgd(model, start, clients, Rng.seeded(1))
    found = problem.solve(start, clients, Rng.seeded(1), round=0, anchor=None)
    assert not all(leaf[2].isfinite().all() for leaf in plain.values()), "it must blow up"
    for name, leaf in found.items():
        assert torch.equal(leaf[2], start[name][2])
        assert torch.equal(leaf[[0, 1, 3]], plain[name][[0, 1, 3]])


@pytest.mark.parametrize("counts", [(3, 9, 0, 4, 12), (5, 5, 5, 5, 5)])
def test_losses_of_a_stack_are_those_of_single_clients_and_of_own_rows_to_the_last_bit(counts):
    """A GPU checks grown models side by side."""

    def stacked(counts, bad=None):
        data = synthetic("mean", clients=5, rows=12, features=4, seed=0).data
        keep = np.concatenate([np.arange(12) < count for count in counts])
        features = data.features.clone()
        if bad is not None:
            features[12 * bad : 12 * bad + 12] = torch.nan
        clients = next(replace(data, features=features).where(keep).blocks(np.arange(5), 8))
        start = stack(problem.model.init(data.spec, Rng.seeded(1)), 5)
        more = {name: leaf * 1.5 for name, leaf in start.items()}
        found = problem._stacked_losses((start, more), clients)
        wanted = torch.stack([problem._losses(tree, clients) for tree in (start, more)])
        return found, wanted, clients.ids

    problem = LocalProblem(model=MLP(hidden=(8,)), how="sgd", sgd=SGD(batch=4), lam=0.0)
    found, wanted, ids = stacked(counts)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    other, _, others = stacked((12, *counts[1:]), bad=0)  # client 0 has other rows
    for client in range(1, 5):
        assert torch.equal(found[:, ids == client], other[:, others == client])
