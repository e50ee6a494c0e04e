"""Convolutions, maxima and lookups as in a stack on a GPU, on the CPU, against torch by client."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.data.synthetic import synthetic
from coterie.models import as_model, layers, patches
from coterie.solvers.sgd import SGD

CASES = {
    "plain": ((3, 4, 2, 7, 6), (5, 2, 3, 3), True, [0, 0]),
    "padded": ((2, 3, 2, 5, 4), (4, 2, 5, 5), True, [2, 2]),
    "one row, without bias": ((3, 1, 3, 6, 6), (2, 3, 2, 2), False, [1, 0]),
    "broad": ((2, 4, 1, 4, 9), (3, 1, 1, 5), True, [0, 2]),
    "tall": ((2, 4, 2, 9, 3), (3, 2, 4, 1), True, [1, 0]),
    "a pixel": ((2, 3, 4, 3, 3), (5, 4, 1, 1), True, [0, 0]),
    "one dimension": ((3, 4, 2, 9), (5, 2, 3), True, [1]),
}


def leaves_of(case):
    rows, filters, has_bias, padding = case
    draws = torch.Generator().manual_seed(0)
    shapes = [rows, (rows[0], *filters)] + [(rows[0], filters[0])] * has_bias
    made = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    return [leaf.requires_grad_() for leaf in made], padding


def one_by_one(x, weight, bias, padding):
    convolve = functional.conv1d if x.dim() == 4 else functional.conv2d
    return torch.stack(
        [
            convolve(rows, filters, None if bias is None else bias[client], padding=padding)
            for client, (rows, filters) in enumerate(zip(x, weight, strict=True))
        ]
    )


def with_gradients(made, leaves):
    pull = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=made.dtype)
    return [made, *torch.autograd.grad((made * pull).sum(), leaves)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_convolutions_and_their_gradients_are_torchs(case):
    leaves, padding = leaves_of(case)
    x, weight, bias = (*leaves, None)[:3]
    found = with_gradients(patches.convolution(x, weight, bias, padding), leaves)
    wanted = with_gradients(one_by_one(x, weight, bias, padding), leaves)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_first_layer_folds_nothing(monkeypatch):
    (x, weight, bias), padding = leaves_of(CASES["padded"])
    made = patches.convolution(x.detach(), weight, bias, padding)
    monkeypatch.setattr(patches, "fold", None)
    torch.autograd.grad(made.sum(), [weight, bias])


KERNELS = """
import torch
from coterie.models import patches, patches_gpu
torch.cuda.is_current_stream_capturing = lambda: False
for dtype in (torch.float32, torch.bfloat16):
    for sides in ((5, 5), (1, 3), (4, 1), (2, 3)):
        assert patches.folds_agree(patches_gpu, sides, torch.zeros(0, dtype=dtype)), sides
    for pool in (1, 2, 3):
        assert patches.maxima_agree(patches_gpu, pool, torch.zeros(0, dtype=dtype)), pool
x = torch.zeros(3)
assert patches_gpu.usable(x, 2, agrees=lambda like: True)
assert not patches_gpu.usable(x, 9, 9, agrees=lambda like: True)
found, codes = patches_gpu.maxima(torch.tensor([1, torch.nan, 3, 2]).reshape(1, 1, 2, 2, 1), 2)
assert found.isnan().all() and codes.item() == 1
"""


@pytest.mark.slow
def test_kernels_of_patches_and_windows_are_torchs_in_the_interpreter():
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error::UserWarning", "-c", KERNELS]
    subprocess.run(command, check=True, env=environment)


@pytest.mark.parametrize("pool", [2, 3])
def test_maxima_and_their_gradients_are_torchs(pool):
    x = leaves_of(CASES["plain"])[0][0]
    found = with_gradients(patches.maxima(x, pool), [x])
    wanted = with_gradients(torch.stack([functional.max_pool2d(rows, pool) for rows in x]), [x])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Images(nn.Module):
    """Blocks, convolutions outside of blocks, and some that stay as they are."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3),
            nn.Conv2d(4, 6, 2, padding="same"), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        )  # fmt: skip
        self.alone, self.pool = nn.Conv2d(6, 4, (2, 1), bias=False), nn.MaxPool2d((2, 2))
        self.strided, self.line = nn.Conv2d(4, 4, 1, stride=2, groups=2), nn.Conv1d(4, 3, 1)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.block(x.reshape(-1, 1, 10, 10))
        x = self.strided(self.pool(torch.relu(self.alone(x))))
        return self.head(self.line(x.flatten(2)).flatten(1))


class Texts(nn.Module):
    """Lookups of floats and of whole numbers, with and without padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(9, 4, padding_idx=2)
        self.second, self.head = nn.Embedding(9, 4), nn.Linear(8, 3)

    def forward(self, x):
        both = torch.cat([self.first(x), self.second(x.long())], -1)
        return self.head(both.reshape(len(x), -1, 8).tanh().mean(dim=1))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("limit", [0, 1 << 26], ids=["torch", "product"])
def test_lookups_by_the_ways_of_a_gpu_are_the_same(fast, limit, monkeypatch):
    truth = synthetic("mean", clients=4, rows=12, features=6, task="multiclass", outputs=3)
    data, model = truth.data, as_model(Texts)
    data.features.copy_((data.features * 3).round().clamp(0, 8))
    data.features[data.offsets[2]] = 9.0  # outside: its client fails, and no other
    start = stack(model.init(data.spec, Rng.seeded(0)), 4)
    clients, solver = data.clients(torch.arange(4).numpy()), SGD(epochs=2, batch=5, fast=fast)
    wanted = solver(model, start, clients, Rng.seeded(1))
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(layers, "_FEW_LOOKUPS", limit)
    found = solver(model, start, clients, Rng.seeded(1))
    good = [0, 1, 3]
    for name, leaf in wanted.items():
        torch.testing.assert_close(found[name][good], leaf[good], rtol=1e-4, atol=1e-6)
    assert any(leaf[2].isnan().any() for leaf in found.values())


@pytest.mark.parametrize("fast", [True, False])
def test_steps_by_the_ways_of_a_gpu_are_the_same(fast, monkeypatch):
    truth = synthetic("mean", clients=5, rows=12, features=100, task="multiclass", outputs=3)
    data, model = truth.data, as_model(Images)
    start = stack(model.init(data.spec, Rng.seeded(0)), 5)
    clients, solver = data.clients(torch.arange(5).numpy()), SGD(epochs=2, batch=5, fast=fast)
    wanted = solver(model, start, clients, Rng.seeded(1))
    used = []
    convolution = patches.convolution
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(
        patches, "convolution", lambda *given: used.append(1) or convolution(*given)
    )
    found = solver(model, start, clients, Rng.seeded(1))
    assert used
    for name, leaf in wanted.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-4, atol=1e-5)


def test_too_many_patches_are_left_to_torch(monkeypatch):
    x, weight = torch.randn(2, 3, 1, 5, 5), torch.randn(2, 4, 1, 3, 3)
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(patches, "convolution", None)
    monkeypatch.setattr(patches, "MOST", patches.entries(x, weight) - 1)
    layer = nn.Conv2d(1, 4, 3)
    layer.__class__ = layers.REPLACED[nn.Conv2d]
    bias = torch.zeros(2, 4)
    found = torch.func.vmap(
        lambda w, b, x: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))
    )(weight, bias, x)
    torch.testing.assert_close(found, one_by_one(x, weight, bias, 0))
