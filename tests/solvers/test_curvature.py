"""The largest squared row norm of each client, and what LocalProblem makes of it."""

import numpy as np
import pytest
import torch
from scipy import sparse

from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.data.federated import FederatedDataset, Spec
from coterie.models import MLP, Linear
from coterie.solvers.curvature import largest_squares
from coterie.solvers.local import LocalProblem
from coterie.solvers.sgd import SGD


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
