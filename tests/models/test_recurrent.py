"""The kernels of LSTM and GRU against torch's own layers, client by client."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from coterie.models import layers

KERNELS = """
import numpy as np
import triton.language as tl
from triton.runtime import interpreter as i

# The interpreter of triton 3.6 cannot count to a scalar of NumPy 2.4, nor multiply bfloat16.
patch, dot = i._patch_lang_tensor, i.InterpreterBuilder.create_dot
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
def wide(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return i.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
i._patch_lang_tensor = patched
i.InterpreterBuilder.create_dot = lambda self, a, b, *r: dot(self, wide(a), wide(b), *r)
"""
BOTH = """
import torch
from tests.models.test_recurrent import SHAPES, largest_error
from coterie.models import recurrent_gpu
for mode in ("LSTM", "GRU"):
    for shape in SHAPES:
        for low, near in ((False, 2e-6), (True, 4e-2)):
            kind = recurrent_gpu.Kind(mode, shape[-1], low, torch.device("cpu"))
            # In one launch, and in one per time step.
            recurrent_gpu.WIDEST[low] = 18 if shape[-1] == 5 else 5
            error = largest_error(kind, *shape)
            assert error < near, (kind, shape, error)
"""
STEPS = """
import torch
from tests.models.test_recurrent import Recurs, same_steps
torch.cuda.is_current_stream_capturing = lambda: False
same_steps(Recurs)

import warnings
from coterie.models import layers, recurrent_gpu
for name, found in (("_apart", lambda *given: 1.0), ("_apart", None)):
    setattr(recurrent_gpu, name, found)
    recurrent_gpu._CHECKED.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            kind = recurrent_gpu.Kind("LSTM", 6, False, torch.device("cpu"))
            assert not recurrent_gpu.usable(kind, layers._steps)
    assert len(said) == 1 and "LSTM of width 6 runs step by step" in str(said[0].message)
"""
# Time, rows, inputs, layers, directions, hidden.
SHAPES = [(3, 17, 4, 1, 1, 5), (1, 2, 3, 2, 2, 18), (4, 1, 2, 1, 2, 32)]


def by_torch(layer, given):
    """Outputs and last states of two clients, by torch's layer for each of them."""
    found = []
    for client in range(2):
        own = {name: given[name][client] for name, _ in layer.named_parameters()}
        start = tuple(part[client] for part in given["start"])
        start = start[0] if start and isinstance(layer, nn.GRU) else start or None
        out, last = torch.func.functional_call(layer, own, (given["x"][client], start))
        found.append((out, *(last if isinstance(last, tuple) else (last,))))
    return [torch.stack(part) for part in zip(*found, strict=True)]


def by_kernels(kind, layer, given):
    from coterie.models import recurrent_gpu

    rest, lasts, directions = given["x"], [], 1 + layer.bidirectional
    for place in range(layer.num_layers * directions):
        number, direction = divmod(place, directions)
        if direction == 0:
            sides = []
        ending = f"l{number}" + "_reverse" * direction
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [given[f"{name}_{ending}"] for name in names]
        state = [part[:, place] for part in given["start"]]
        out, *cells = recurrent_gpu.recurrence(kind, direction == 1, rest, weights, state)
        sides.append(out)
        lasts.append((out[:, 0 if direction else -1], *cells))
        rest = torch.cat(sides, -1) if direction == directions - 1 else rest
    return [rest, *(torch.stack(part, dim=1) for part in zip(*lasts, strict=True))]


def with_gradients(function, given, dtype, device="cpu"):
    leaves = {name: part.to(device, dtype).requires_grad_() for name, part in given.items()}
    found, pulls = function(leaves), torch.Generator().manual_seed(2)
    grads = torch.autograd.grad(
        [part.to(dtype) for part in found],
        list(leaves.values()),
        [torch.randn(part.shape, generator=pulls).to(device, dtype) for part in found],
        materialize_grads=True,
    )
    return [part.detach().double().cpu() for part in (*found, *grads)]


def largest_error(kind, time, rows, inputs, depth, directions, hidden):
    """The largest error of a stack's outputs, states and gradients against torch in float64."""
    draws = torch.Generator().manual_seed(1)
    layer = getattr(nn, kind.mode)(inputs, hidden, depth, bidirectional=directions == 2).double()
    states, errors = 2 if kind.mode == "LSTM" else 1, []
    for started in (False, True):
        shapes = {name: (2, *leaf.shape) for name, leaf in layer.named_parameters()}
        shapes["x"] = (2, time, rows, inputs)
        shapes["start"] = (states * started, 2, depth * directions, rows, hidden)
        # Weights of torch's size: larger ones let rounding grow from step to step.
        size = min(0.4, hidden**-0.5)
        given = {name: torch.randn(shape, generator=draws) * size for name, shape in shapes.items()}
        wanted = with_gradients(partial(by_torch, layer), given, torch.float64)
        kernels = partial(by_kernels, kind, layer)
        found = with_gradients(kernels, given, torch.float32, kind.device)
        for theirs, mine in zip(wanted, found, strict=True):
            errors.append(float((mine - theirs).norm() / theirs.norm().clamp_min(1e-9)))
    return max(errors)


class Recurs(nn.Module):
    """Two directions, dropout, last states and a given start."""

    def __init__(self):
        super().__init__()
        self.body = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.4, bidirectional=True)
        self.after, self.head = nn.GRU(12, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x):
        x, last = self.body(x.reshape(-1, 4, 4))
        return self.head(self.after(x.transpose(0, 1), last[1][:1, :, :5])[1][0])


def same_steps(make):
    """Assert that kernels and steps train the same models, also by the gradients of torch.func."""
    import numpy as np

    from coterie.core.rng import Rng
    from coterie.core.tree import stack
    from coterie.data.synthetic import synthetic
    from coterie.models import as_model, recurrent_gpu
    from coterie.solvers.sgd import SGD

    model = as_model(make)
    data = synthetic("mean", clients=3, rows=9, features=16, task="multiclass", outputs=3).data
    start = stack(model.init(data.spec, Rng.seeded(0)), 3)
    clients = data.clients(np.arange(3))
    for fast in (True, False):
        made = []
        for gpu in (False, True):
            layers.on_gpu = lambda x, gpu=gpu: gpu
            solver = SGD(steps=2, batch=5, fast=fast)
            made.append(solver(model, start, clients, Rng.seeded(1)))
        for name, leaf in made[0].items():
            torch.testing.assert_close(made[1][name], leaf, rtol=1e-4, atol=1e-6)
    assert all(recurrent_gpu._CHECKED.values()) and len(recurrent_gpu._CHECKED) == 2


@pytest.mark.slow
@pytest.mark.parametrize("program", [BOTH, STEPS], ids=["kernels", "steps"])
def test_kernels_compute_the_same_in_the_interpreter(program):
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", KERNELS + program], check=True, env=environment)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [5, 32, 64, 130])
@pytest.mark.parametrize("mode", ["LSTM", "GRU"])
def test_a_gpu_computes_layers_as_torch(mode, hidden, low):
    pytest.importorskip("triton")
    from coterie.models import recurrent_gpu

    kind = recurrent_gpu.Kind(mode, hidden, low, torch.device("cuda", 0))
    assert recurrent_gpu.usable(kind, layers._steps)  # a warning fails the test
    assert largest_error(kind, 7, 18, 9, 2, 2, hidden) < (6e-2 if low else 2e-5)
