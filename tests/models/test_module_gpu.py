"""Torch modules on a GPU: the same draws, the same steps, recorded or not."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.data.synthetic import synthetic
from coterie.models import CharLSTM, Module, as_model
from coterie.solvers import sgd as graphs
from coterie.solvers.sgd import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop, self.head = nn.Dropout2d(0.3), nn.Linear(8 * 4, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x.reshape(-1, 1, 4, 4))).flatten(1))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(4.0)[:, None] / 4)
        self.body = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x.reshape(-1, 4, 4) + self.places).mean(dim=1))


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.4, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(x.reshape(-1, 4, 4))[0][:, -1])


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(16, 8), nn.AlphaDropout(0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(torch.selu(self.body(x))))


MODELS = {
    "images": as_model(Images),
    "attention": as_model(Attends),
    "recurrent": as_model(Recurs),
    "plain": as_model(Plain),
    "own loss": Module(Plain, loss="squared"),
    "chars": CharLSTM(vocabulary=8, hidden=6, dropout=0.2),
}


def data_of(name):
    data = synthetic(
        "mean", clients=7, rows=12, features=16, task="multiclass", outputs=3, seed=0
    ).data
    if name == "chars":
        data.features.copy_(data.features.abs().mul(3).round().clamp(0, 7))
    return data


@pytest.mark.parametrize("name", MODELS)
def test_draws_are_the_same_on_both_devices(name):
    model, data = MODELS[name], data_of(name)
    params = stack(model.init(data.spec, Rng.seeded(0)), 7)
    x, seeds = data.clients(np.arange(7)).x, torch.arange(7) * 2**59
    assert model.draws
    for given in (None, seeds):
        host = model.apply_stacked(params, x, given)
        moved = {leaf: rows.cuda() for leaf, rows in params.items()}
        device = model.apply_stacked(moved, x.cuda(), None if given is None else given.cuda())
        torch.testing.assert_close(device.cpu(), host, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 6}], ids=["ragged", "recorded"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_same_on_both_devices(name, length):
    """Twice on the device, so that a recording is replayed with other numbers and other seeds."""
    model, data = MODELS[name], data_of(name)
    start = stack(model.init(data.spec, Rng.seeded(0)), 7)
    solver = SGD(**length, batch=5, lr=0.05, momentum=0.5)
    clients, moved = data.clients(np.arange(7)), data.to("cuda").clients(np.arange(7))
    on_device = {leaf: rows.cuda() for leaf, rows in start.items()}
    first = solver(model, on_device, moved, Rng.seeded(1))
    found = solver(model, on_device, moved, Rng.seeded(2))
    wanted = solver(model, start, clients, Rng.seeded(2))
    for leaf, rows in wanted.items():
        torch.testing.assert_close(found[leaf].cpu(), rows, rtol=1e-2, atol=5e-3)
    assert any(not torch.allclose(first[leaf], found[leaf]) for leaf in found)


@pytest.mark.parametrize("name", ["images", "recurrent", "plain"])
def test_a_step_with_seeds_can_be_recorded(name, monkeypatch):
    made = []
    record = graphs.record_all.__wrapped__

    def noted(recipe):
        made.append(record(recipe))
        return made[-1]

    monkeypatch.setattr("coterie.solvers.sgd.record_all", noted)
    model, data = MODELS[name], data_of(name).to("cuda")
    start = {
        leaf: rows.cuda() for leaf, rows in stack(model.init(data.spec, Rng.seeded(0)), 7).items()
    }
    SGD(steps=4, batch=5)(model, start, data.clients(np.arange(7)), Rng.seeded(1))
    assert len(made) == 1 and made[0] is not None


def test_mixed_precision_on_the_device():
    for name in ("images", "attention", "recurrent", "plain"):
        model, data = MODELS[name], data_of(name)
        params = {
            leaf: rows.cuda().requires_grad_()
            for leaf, rows in stack(model.init(data.spec, Rng.seeded(0)), 7).items()
        }
        x, grads = data.clients(np.arange(7)).x.cuda(), []
        for lowered in (False, True):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=lowered):
                outputs = model.apply_stacked(params, x)
            found = torch.autograd.grad(outputs.float().square().sum(), list(params.values()))
            grads.append(torch.cat([grad.flatten() for grad in found]))
        assert (grads[0] - grads[1]).norm() < 0.05 * grads[0].norm(), name
