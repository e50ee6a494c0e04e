"""Any torch module as a model: every layer against torch's own, client by client."""

import copy
import dataclasses
import functools
import math
import sys
import tomllib
import warnings

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn
from torch.nn import functional

import coterie
from coterie.core.config import ConfigError, from_table, to_table, to_toml
from coterie.core.rng import Rng
from coterie.core.tree import stack
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear, Model, Module, as_model, replace_batchnorm, row_losses
from coterie.models.layers import DropoutStream
from coterie.models.module import _network, _replaced
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full


class Last(nn.Module):
    """The last output of a recurrent layer, through a linear one."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        outputs, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs[:, -1]) + last.sum(dim=(0, 2))[:, None]


class TimeFirst(nn.Module):
    """A recurrent layer whose rows are on the second axis, with a state given to it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        state = torch.ones(1, x.shape[0], 5, dtype=x.dtype)
        return self.head(self.layer(x.transpose(0, 1), state)[0][-1])


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = (
            nn.LSTMCell(4, 5),
            nn.GRUCell(5, 5),
            nn.RNNCell(5, 5, nonlinearity="relu"),
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        state = self.lstm(x[:, 0])
        for step in range(1, x.shape[1]):
            state = self.lstm(x[:, step], state)
        return self.head(self.rnn(self.gru(state[0], state[1])))


class Attends(nn.Module):
    def __init__(self, batch_first=True, need_weights=True, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **settings)
        self.head, self.need_weights = nn.Linear(4, 3), need_weights
        self.register_buffer("mask", torch.triu(torch.ones(6, 6, dtype=torch.bool), 1))

    def forward(self, x):
        given = x if self.attention.batch_first else x.transpose(0, 1)
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[:, -1] = True
        keys = given[..., : self.attention.kdim]
        mixed, weights = self.attention(
            given, keys, given, padded, self.need_weights, attn_mask=self.mask
        )
        mixed = mixed if self.attention.batch_first else mixed.transpose(0, 1)
        added = weights.sum(dim=(1, 2))[:, None] if self.need_weights else 0
        return self.head(mixed.mean(dim=1)) + added


class Transformer(nn.Module):
    def __init__(self, decoder=False, **settings):
        super().__init__()
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        layer = kind(4, 2, 8, batch_first=True, **settings)
        self.body = (
            nn.TransformerDecoder(layer, 2)
            if decoder
            else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        )
        self.head, self.decoder = nn.Linear(4, 3), decoder

    def forward(self, x):
        return self.head((self.body(x, x) if self.decoder else self.body(x)).mean(dim=1))


class ColoursLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 4, 2), nn.GroupNorm(2, 4)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x.permute(0, 3, 1, 2))).flatten(1))


class Words(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4, **settings), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(dim=1))


class Bags(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(7, 4, **settings), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x))


class Tied(nn.Module):
    """An output layer that is the table of the input."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x).mean(dim=1))


class Direct(nn.Module):
    """Attention by a function, parameters of its own, and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x * self.scale + self.shift
        return self.head(functional.scaled_dot_product_attention(x, x, x).mean(dim=1))


def sequential(*layers):
    return lambda: nn.Sequential(*(layer() for layer in layers))


def flat(*layers, width):
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.Linear(width, 3))


P = functools.partial
TIME, IMAGE = (6, 4), (2, 7, 6)
# Name: the module, the shape of a row, and how many whole numbers a row is made of (0: any).
CASES = {
    "linear": (P(nn.Linear, 8, 3), (8,), 0),
    "linear without bias": (P(nn.Linear, 8, 3, bias=False), (8,), 0),
    "mlp": (sequential(P(nn.Linear, 8, 5), nn.GELU, P(nn.Linear, 5, 3)), (8,), 0),
    "linear on a sequence": (flat(P(nn.Linear, 4, 5), width=30), TIME, 0),
    "bilinear activations": (sequential(P(nn.Linear, 8, 3), nn.PReLU, nn.SELU), (8,), 0),
    "conv1d": (flat(P(nn.Conv1d, 6, 5, 2, stride=2), width=10), TIME, 0),
    "conv2d": (flat(P(nn.Conv2d, 2, 4, 3), nn.ReLU, P(nn.MaxPool2d, 2), width=16), IMAGE, 0),
    # Filters in two groups, with gaps.
    "conv2d settings": (
        flat(
            P(nn.Conv2d, 2, 4, 3, stride=2, padding=(1, 2), dilation=2, groups=2, bias=False),
            width=36,
        ),
        IMAGE,
        0,
    ),
    "conv2d gaps": (
        flat(P(nn.Conv2d, 2, 4, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2)), width=96),
        IMAGE,
        0,
    ),
    "conv2d same": (flat(P(nn.Conv2d, 2, 3, 4, padding="same"), width=126), IMAGE, 0),
    "conv2d reflect": (
        flat(P(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"), width=126),
        IMAGE,
        0,
    ),
    "conv3d": (flat(P(nn.Unflatten, 1, (1, 2)), P(nn.Conv3d, 1, 2, 2), width=60), IMAGE, 0),
    "conv transposed": (flat(P(nn.ConvTranspose2d, 2, 2, 2), width=112), IMAGE, 0),
    "group norm": (flat(P(nn.Conv2d, 2, 4, 3), P(nn.GroupNorm, 2, 4), width=80), IMAGE, 0),
    "colours last": (ColoursLast, IMAGE, 0),
    "layer norm": (flat(P(nn.LayerNorm, 4), width=24), TIME, 0),
    "rms norm": (flat(P(nn.RMSNorm, 4), width=24), TIME, 0),
    "instance norm": (flat(P(nn.InstanceNorm2d, 2, affine=True), width=84), IMAGE, 0),
    "adaptive pool": (flat(P(nn.Conv2d, 2, 4, 3), P(nn.AdaptiveAvgPool2d, 2), width=16), IMAGE, 0),
    "embedding": (Words, (5,), 7),
    "embedding with padding": (P(Words, padding_idx=1), (5,), 7),
    "embedding bag": (Bags, (5,), 7),
    "embedding bag, maxima": (P(Bags, mode="max", padding_idx=2), (5,), 7),
    "tied": (Tied, (5,), 3),
    "lstm": (lambda: Last(nn.LSTM(4, 5, batch_first=True), 5), TIME, 0),
    "lstm deep, both ways": (
        lambda: Last(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), 10),
        TIME,
        0,
    ),
    "gru": (lambda: Last(nn.GRU(4, 5, 2, batch_first=True), 5), TIME, 0),
    "gru without bias": (lambda: Last(nn.GRU(4, 5, batch_first=True, bias=False), 5), TIME, 0),
    "gru, time first": (TimeFirst, TIME, 0),
    "rnn": (lambda: Last(nn.RNN(4, 5, batch_first=True, bidirectional=True), 10), TIME, 0),
    "rnn relu": (lambda: Last(nn.RNN(4, 5, batch_first=True, nonlinearity="relu"), 5), TIME, 0),
    "cells": (Cells, TIME, 0),
    "attention": (Attends, TIME, 0),
    "attention, time first": (P(Attends, batch_first=False, need_weights=False), TIME, 0),
    "attention, other keys": (P(Attends, kdim=3, bias=False), TIME, 0),
    "attention by function": (Direct, TIME, 0),
    "encoder": (P(Transformer, dropout=0.0), TIME, 0),
    "encoder, norm first": (
        P(Transformer, dropout=0.0, norm_first=True, activation="gelu"),
        TIME,
        0,
    ),
    "decoder": (P(Transformer, decoder=True, dropout=0.0), TIME, 0),
    "weight norm": (
        sequential(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))),
        (8,),
        0,
    ),
}


def spec_of(shape, outputs=3, task="multiclass"):
    return Spec(shape, outputs, task, 3)


def stacked_of(model, spec, whole=0, clients=3, rows=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    params = {
        name: (torch.randn(clients, *leaf.shape, generator=generator, dtype=dtype) * 0.4)
        for name, leaf in model.init(spec, Rng.seeded(0)).items()
    }
    x = torch.randn(clients, rows, *spec.shape, generator=generator, dtype=dtype)
    if whole:
        x = torch.randint(0, whole, x.shape, generator=generator).to(dtype)
    return params, x


def of_client(tree, client):
    return {name: leaf[client] for name, leaf in tree.items()}


@pytest.mark.parametrize("case", [name for name in CASES if "conv2d" in name])
def test_convolutions_one_by_one_are_torchs_own(case, monkeypatch):
    monkeypatch.setattr("coterie.models.layers._FEW", 0)
    test_every_layer_is_torchs_own_with_its_gradient(case)


@pytest.mark.parametrize("case", ["linear", "linear without bias", "mlp", "layer norm"])
def test_chains_are_torchs_own_by_the_general_way_as_well(case, monkeypatch):
    assert _network(Module(CASES[case][0]()), spec_of(CASES[case][1]))._chain is not None
    monkeypatch.setattr("coterie.models.module.chain_of", lambda *given: None)
    _network.cache_clear()
    test_every_layer_is_torchs_own_with_its_gradient(case)
    _network.cache_clear()


@pytest.mark.parametrize("case", CASES)
def test_every_layer_is_torchs_own_with_its_gradient(case):
    make, shape, whole = CASES[case]
    torch.manual_seed(0)
    plain = make().double()
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec, whole)
    assert list(params) == [name for name, _ in plain.named_parameters()]
    params = {name: leaf.requires_grad_() for name, leaf in params.items()}
    found = model.apply_stacked(params, x)
    slopes = torch.randn(found.shape, dtype=torch.float64)
    grads = torch.autograd.grad((found * slopes).sum(), tuple(params.values()))
    for client in range(3):
        with torch.no_grad():
            for name, given in plain.named_parameters():
                given.copy_(params[name][client])
        plain.zero_grad()
        rows = x[client].long() if whole else x[client]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = plain(rows)
        torch.testing.assert_close(found[client], wanted)
        torch.testing.assert_close(model.apply(of_client(params, client), x[client]), wanted)
        (wanted * slopes[client]).sum().backward()
        for (name, given), grad in zip(plain.named_parameters(), grads, strict=True):
            torch.testing.assert_close(grad[client], given.grad, msg=lambda m, n=name: f"{n}: {m}")
    # A stack of one, and the stack in another order, are the same clients.
    order = torch.tensor([2, 0, 1])
    again = model.apply_stacked({name: leaf[order] for name, leaf in params.items()}, x[order])
    torch.testing.assert_close(again, found[order])
    one = model.apply_stacked({name: leaf[1:2] for name, leaf in params.items()}, x[1:2])
    torch.testing.assert_close(one, found[1:2])


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_never_read_another_clients_parameters(case):
    make, shape, whole = CASES[case]
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec, whole, clients=2, dtype=torch.float32)
    other = {name: torch.stack([leaf[0], leaf[1] * 3 + 100]) for name, leaf in params.items()}
    size = whole or 10
    bad = torch.tensor([math.nan, math.inf, -2.0, size + 2.0, 1e9])
    # One bad number a row, at the start, in the middle and at the end; and rows of nothing else.
    rows = x[:1, :1].repeat(2, 4 * len(bad), *[1] * len(shape)).flatten(2)
    for at, value in enumerate(bad.repeat(4)):
        place = (0, rows.shape[2] // 2, -1, slice(None))[at // len(bad)]
        rows[0, at, place] = value
    rows = rows.reshape(2, -1, *shape)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found, again = model.apply_stacked(params, rows), model.apply_stacked(other, rows)
        torch.testing.assert_close(found[0], again[0], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(found[1], again[1])


@pytest.mark.parametrize("case", ["mlp", "conv2d", "lstm", "encoder", "embedding", "gru"])
def test_the_plain_reference_of_sgd_gives_the_same_step(case):
    make, shape, whole = CASES[case]
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec, whole)
    y = torch.arange(12).reshape(3, 4) % 3
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    losses = model.losses("multiclass", model.apply_stacked(leaves, x), y)
    by_stack = torch.autograd.grad(losses.sum(), tuple(leaves.values()))

    def loss(params, x, y):
        return model.losses("multiclass", model.apply(params, x), y).sum()

    by_client = torch.func.vmap(torch.func.grad(loss))(params, x, y)
    for ours, theirs in zip(by_stack, by_client.values(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", ["mlp", "conv2d", "lstm"])
def test_predictions_without_gradients_in_pieces_are_the_same(case, monkeypatch):
    make, shape, _ = CASES[case]
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec, rows=7)
    wanted = model.apply_stacked(params, x)
    monkeypatch.setattr("coterie.models.module._PIECE", {"cpu": 20})
    with torch.no_grad():
        torch.testing.assert_close(model.apply_stacked(params, x), wanted)
        assert model.apply_stacked(params, x[:, :0]).shape == (3, 0, 3)
        none = {name: leaf[:0] for name, leaf in params.items()}
        assert model.apply_stacked(none, x[:0]).shape == (0, 7, 3)


# --- dropout ---------------------------------------------------------------------------------


class Drops(nn.Module):
    """Gives what is left of ones after two layers that drop."""

    def __init__(self, layer=nn.Dropout, share=0.3):
        super().__init__()
        self.one, self.scale = layer(share), nn.Parameter(torch.ones(()))

    def forward(self, x):
        ones = torch.ones(x.shape[0], 20, 10, dtype=x.dtype) * self.scale
        return torch.cat([self.one(ones), self.one(ones)], dim=2).flatten(1)


def dropped_by(seeds, layer=nn.Dropout, share=0.3, rows=6):
    model, spec = Module(Drops(layer, share)), Spec((2,), 400, "multiclass", 3)
    params = stack(model.init(spec, Rng.seeded(0)), len(seeds))
    assert model.draws
    outputs = model.apply_stacked(params, torch.zeros(len(seeds), rows, 2), torch.tensor(seeds))
    assert torch.equal(
        model.apply_stacked(params, torch.zeros(len(seeds), rows, 2)),
        torch.ones_like(outputs),
    )
    alone = model.apply(of_client(params, 0), torch.zeros(rows, 2), torch.tensor(seeds[0]))
    assert torch.equal(alone, outputs[0])
    return outputs.reshape(len(seeds), rows, 20, 2, 10).movedim(3, 1)  # client, layer, row, 20, 10


def test_masks_are_the_clients_own_and_differ_by_layer_and_step():
    words = [5, -(2**63), 2**63 - 1, 6, 0]
    masks = dropped_by(words) != 0
    # Of 1200 numbers kept with 0.7, two masks agree in a share 0.58 +- 0.014; 0.66 is 5.6 standard
    # errors off: a false alarm once in 10^8, for each of these 45 pairs.
    flat = masks.flatten(2).flatten(0, 1)
    for one in range(len(flat)):
        for other in range(one):
            agree = (flat[one] == flat[other]).float().mean()
            assert 0.50 < agree < 0.66, (one, other)
    assert torch.equal(
        dropped_by([6, 5]) != 0, masks[[3, 0]]
    )  # not their neighbours', nor the order's
    assert torch.equal(dropped_by([6], rows=4)[0] != 0, masks[3, :, :4])


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for_and_scaled(share):
    found = dropped_by(list(range(40)), share=share)
    kept = (found != 0).double()
    # 96,000 numbers; 5 standard errors of a binomial: a false alarm once in 1.7 million.
    slack = 5 * math.sqrt(share * (1 - share) / kept.numel())
    assert kept.mean() == pytest.approx(1 - share, abs=slack)
    assert torch.allclose(found[found != 0], torch.tensor(1 / (1 - share)))
    # Neighbours in memory, in rows, in clients and in layers are independent: 5 standard errors.
    for axis in range(5):
        one, other = (
            kept.narrow(axis, 0, kept.shape[axis] - 1),
            kept.narrow(axis, 1, kept.shape[axis] - 1),
        )
        both = (one - (1 - share)) * (other - (1 - share))
        assert abs(both.mean()) < 5 * share * (1 - share) / math.sqrt(both.numel())


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.FeatureAlphaDropout])
def test_whole_channels_are_dropped(layer):
    found = dropped_by(list(range(30)), layer=layer)
    assert (found == found[..., :1]).all()  # (row, 20, 10): all ten of a channel alike
    kept = found[..., 0] == found.max()
    slack = 5 * math.sqrt(0.21 / kept.numel())
    assert kept.double().mean() == pytest.approx(0.7, abs=slack)


def test_alpha_dropout_keeps_mean_and_variance_as_torch_does():
    x, seeds = torch.randn(200_000, generator=torch.Generator().manual_seed(0)), DropoutStream()
    layer = nn.AlphaDropout(0.4)
    model = Module(nn.Sequential(nn.Linear(1, 1), layer)).build(Spec((1,), 1, "regression", 1))
    made = _replaced(model, seeds)[1]
    seeds.restart(torch.tensor(3))
    found = made(x)
    assert abs(found.mean()) < 0.015 and abs(found.var() - 1) < 0.03  # 6 standard errors and more
    torch.manual_seed(0)
    theirs = layer.train()(x)
    # Dropped numbers become torch's, and the others are moved as torch moves them.
    low, others = theirs.mode().values, theirs != theirs.mode().values
    assert found.mode().values == pytest.approx(float(low), abs=1e-5)
    both = others & (found != found.mode().values)
    assert both.float().mean() > 0.3
    torch.testing.assert_close(found[both], theirs[both])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Last(nn.LSTM(4, 5, 2, batch_first=True, dropout=0.5), 5), TIME),
        (P(Attends, dropout=0.5), TIME),
        (P(Transformer), TIME),
        (flat(P(nn.Conv2d, 2, 4, 3), P(nn.Dropout2d, 0.5), width=80), IMAGE),
    ],
)
def test_layers_that_drop_inside_follow_the_seeds(make, shape):
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec)
    assert model.draws
    seeds = torch.tensor([3, 3, 9])
    first, again = (model.apply_stacked(params, x, seeds) for _ in range(2))
    assert torch.equal(first, again)
    still, other = model.apply_stacked(params, x), model.apply_stacked(params, x, seeds + 1)
    assert not torch.allclose(first, still) and not torch.allclose(first, other)
    one = model.apply_stacked({name: leaf[2:] for name, leaf in params.items()}, x[2:], seeds[2:])
    torch.testing.assert_close(one, first[2:])
    # Without seeds it is the module in evaluation.
    plain = make().double().eval()
    plain.load_state_dict({**plain.state_dict(), **of_client(params, 0)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(still[0], plain(x[0]))


# --- chains ----------------------------------------------------------------------------------


def repeated():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 3))


CHAINS = {
    "one layer": (P(nn.Linear, 8, 3), (8,)),
    "dropout": (
        sequential(
            P(nn.Linear, 8, 5), P(nn.ReLU, inplace=True), P(nn.Dropout, 0.4), P(nn.Dropout, 0.0),
            P(nn.Linear, 5, 5, bias=False), nn.SiLU, P(nn.Dropout, 0.2), P(nn.Linear, 5, 3),
        ),
        (8,),
    ),
    "all dropped": (sequential(P(nn.Linear, 8, 3), P(nn.Dropout, 1.0)), (8,)),
    "sequence": (
        flat(P(nn.Linear, 4, 5), P(nn.LayerNorm, 5), nn.GELU, P(nn.Dropout, 0.3), width=30), TIME,
    ),
    "norms": (
        flat(
            P(nn.LayerNorm, (6, 4), bias=False), P(nn.LayerNorm, 4, elementwise_affine=False),
            sequential(P(nn.Linear, 4, 2), sequential(nn.Softplus)), width=12,
        ),
        TIME,
    ),
    "one layer twice": (repeated, (8,)),
    "convolutions": (
        sequential(
            P(nn.Conv2d, 2, 3, 3, padding=1), nn.ReLU, P(nn.MaxPool2d, 2),
            P(nn.Conv2d, 3, 3, 1), nn.ReLU, P(nn.Conv2d, 3, 4, 2), P(nn.MaxPool2d, 2, 2), nn.ReLU,
            P(nn.Conv2d, 4, 2, 1, padding="valid"), nn.ReLU, nn.Flatten, P(nn.Linear, 8, 3),
        ),
        (2, 11, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_gives_the_numbers_and_gradients_of_the_general_way(case):
    make, shape = CHAINS[case]
    model, spec = Module(make()), spec_of(shape)
    params, x = stacked_of(model, spec)
    leaves = {name: leaf.requires_grad_() for name, leaf in params.items()}
    network = _network(model, spec)
    chain, seeds = network._chain, torch.tensor([3, -(2**63), 2**40]) if model.draws else None
    assert chain is not None
    for thrown in (None, seeds):
        found, grads = [], []
        for way in (chain, None):
            network._chain = way
            found.append(model.apply_stacked(leaves, x, thrown))
            total = (found[-1] * torch.arange(1.0, 4.0)).square().sum()
            grads.append(torch.autograd.grad(total, list(leaves.values())))
        network._chain = chain
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*grads)
        assert found[0].shape == (3, 4, 3)
    alone = model.apply(of_client(params, 1), x[1], None if seeds is None else seeds[1])
    torch.testing.assert_close(found[0][1], alone)
    with torch.no_grad():
        torch.testing.assert_close(model.apply_stacked(leaves, x, seeds), found[0])


@pytest.mark.parametrize(
    "layers",
    [
        [P(nn.Conv2d, 2, 3, 3, stride=2), nn.ReLU],
        [P(nn.Conv2d, 2, 4, 3, groups=2), nn.ReLU],
        [P(nn.Conv2d, 2, 3, 3, dilation=2), nn.ReLU],
        [P(nn.Conv2d, 2, 3, (3, 2)), nn.ReLU],
        [P(nn.Conv2d, 2, 3, 3, padding=(1, 0)), nn.ReLU],
        [P(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"), nn.ReLU],
        [P(nn.Conv2d, 2, 3, 3, bias=False), nn.ReLU],
        [P(nn.Conv2d, 2, 3, 3), nn.Tanh],
        [P(nn.Conv2d, 2, 3, 3), nn.ReLU, P(nn.MaxPool2d, 2, stride=1)],
        [P(nn.Conv2d, 2, 3, 3), nn.ReLU, P(nn.MaxPool2d, 2, padding=1)],
        [P(nn.Conv2d, 2, 3, 3), nn.ReLU, P(nn.MaxPool2d, 2, ceil_mode=True)],
    ],
)
def test_other_convolutions_go_the_general_way(layers):
    module = sequential(*layers, nn.Flatten, P(nn.LazyLinear, 3))()
    module(torch.zeros(1, 2, 9, 8))
    assert _network(Module(module), spec_of((2, 9, 8)))._chain is None


def shifted_by_its_scale():
    module = nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3))
    module[1].bias = module[1].weight
    return module


def test_a_layer_that_holds_a_parameter_twice_adds_it_as_well():
    model, spec = Module(shifted_by_its_scale()), spec_of((8,))
    params, x = stacked_of(model, spec)
    assert _network(model, spec)._chain is not None
    mapped = torch.einsum("cni,coi->cno", x, params["0.weight"]) + params["0.bias"][:, None]
    centred = mapped - mapped.mean(dim=-1, keepdim=True)
    normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    scale = params["1.weight"][:, None]
    torch.testing.assert_close(model.apply_stacked(params, x), normed * scale + scale)


def test_a_chain_that_gives_other_numbers_is_dropped(monkeypatch):
    def wrong(*given):
        steps = chain_of(*given)
        return [*steps, lambda params, x: x + 0.01]

    chain_of = sys.modules["coterie.models.module"].chain_of
    monkeypatch.setattr("coterie.models.module.chain_of", wrong)
    model, spec = Module(nn.Linear(8, 3)), spec_of((8,))
    assert _network(model, spec)._chain is None
    _network.cache_clear()


def hooked():
    module = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    module[0].register_forward_hook(lambda layer, given, made: made * 2)
    return module


def rewritten():
    module = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    module[1].forward = torch.sin
    return module


def half_frozen():
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    module[0].bias.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        rewritten,
        half_frozen,
        lambda: type("Own", (nn.Sequential,), {})(nn.Linear(8, 3)),
        sequential(P(nn.Linear, 8, 3), P(nn.Softmax, dim=-1)),
        sequential(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))),
        sequential(P(nn.Unflatten, 1, (2, 4)), P(nn.Flatten, 1, 2), P(nn.Linear, 8, 3)),
    ],
)
def test_what_is_no_chain_of_known_layers_goes_the_general_way(make):
    model, spec = Module(make()), spec_of((8,))
    assert _network(model, spec)._chain is None
    params = model.init(spec, Rng.seeded(0))
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        wanted = model.build(spec)(x[1])
    torch.testing.assert_close(model.apply_stacked(stack(params, 2), x)[1], wanted)


# --- what it is made of ----------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, width=5, rates=(1.0,)):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 3)
        self.rates = rates

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x)))) * self.rates[0]


def fitted(spec, width=6):
    """A function that is given the Spec."""
    body = nn.Linear(spec.features, width)
    return nn.Sequential(nn.Flatten(), body, nn.ReLU(), nn.Linear(width, spec.outputs))


def fails(spec):
    raise RuntimeError("no")


def half_squared(outputs, targets):
    return 0.5 * (outputs - targets).square()


SPEC = spec_of((4,))


def test_a_function_draws_from_the_stream_and_leaves_torchs_state_alone():
    model = as_model(Small)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    params, other = model.init(SPEC, Rng.seeded(3)), model.init(SPEC, Rng.seeded(4))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    again = model.init(SPEC, Rng.seeded(3))
    for name, leaf in params.items():
        assert torch.equal(leaf, again[name]) and not torch.equal(leaf, other[name])
        assert not leaf.requires_grad
    assert model.head(SPEC) == ("head.weight", "head.bias")
    assert as_model(P(Small, width=9)) == Module(Small, {"width": 9})
    assert as_model(model) is model


def test_a_module_is_copied_and_starts_from_its_own_weights():
    module = Small().eval()
    before = copy.deepcopy(module.state_dict())
    model = as_model(module)
    params = model.init(SPEC, Rng.seeded(0))
    assert all(torch.equal(leaf, before[name]) for name, leaf in params.items())
    params["head.bias"].fill_(7.0)
    with torch.no_grad():
        module.head.bias.fill_(5.0)
    assert torch.equal(model.init(SPEC, Rng.seeded(0))["head.bias"], before["head.bias"])
    assert type(module.drop) is nn.Dropout and not module.training
    assert module.body.weight.grad is None and not module.drop._forward_hooks


def test_a_function_of_one_argument_is_given_the_spec():
    model = Module(fitted, {"width": 9})
    params = model.init(spec_of((2, 3), outputs=4), Rng.seeded(0))
    assert params["3.weight"].shape == (4, 9) and params["1.weight"].shape == (9, 6)
    # Parameters from elsewhere, and a model that has never seen data: the width is found.
    stranger = Module(fitted, {"width": 6})
    leaves = {
        "1.weight": torch.ones(6, 6),
        "1.bias": torch.ones(6),
        "3.weight": torch.ones(2, 6),
        "3.bias": torch.ones(2),
    }
    assert stranger.draws
    assert stranger.apply(leaves, torch.zeros(5, 2, 3)).shape == (5, 2)
    assert not stranger.draws
    with pytest.raises(ValueError, match="expected parameters that its `init` made"):
        stranger.apply({"else": torch.ones(3)}, torch.zeros(5, 2, 3))


def test_plans_of_functions_are_read_back():
    plain = Module(Small, {"width": 7, "rates": [0.5, 2.0]}, half_squared)
    for model in (plain, Module(nn.Identity), Module(fitted, loss="squared")):
        plan = Plan(method=PMTL(model=model), privacy=Privacy(epsilon=1.0), rounds=3)
        text = to_toml(plan.to_table())
        again = Plan.from_table(tomllib.loads(text))
        assert again == plan and hash(again.method.model) == hash(model)
    assert to_table(Module(nn.Identity))["make"] == "torch.nn.modules.linear:Identity"
    with pytest.raises(ConfigError, match=r"expected 'package\.module:name'"):
        from_table(Model, {"kind": "module", "make": "nowhere:Net"}, "model")


def test_plans_of_modules_name_their_weights_and_cannot_be_read_back():
    module = Small()
    table = to_table(as_model(module))
    assert set(table) == {"kind", "options", "weights"} and ":Small sha256:" in table["weights"]
    assert as_model(copy.deepcopy(module)) == as_model(module)
    assert hash(as_model(copy.deepcopy(module))) == hash(as_model(module))
    others = [copy.deepcopy(module) for _ in range(4)]
    with torch.no_grad():
        others[0].head.bias[0] += 1e-3
    others[1].rates = (2.0,)
    others[2].drop.p = 0.3
    others[3].body.weight.requires_grad_(False)
    assert len({as_model(each).weights for each in (module, *others)}) == 5
    with pytest.raises(ConfigError, match="holds no weights; set make = "):
        from_table(Model, table, "model")


def test_what_is_not_trained_stays_out_of_the_tree():
    module = Small()
    module.body.requires_grad_(False)
    model = as_model(module)
    params = model.init(SPEC, Rng.seeded(0))
    assert list(params) == ["head.weight", "head.bias"]
    x = torch.randn(2, 3, 4)
    outputs = model.apply_stacked(stack(params, 2), x)
    torch.testing.assert_close(outputs[1], module.eval()(x[1]))
    assert list(as_model(Tied()).init(spec_of((5,)), Rng.seeded(0))) == [
        "table.weight",
        "head.bias",
    ]
    assert as_model(Tied()).head(spec_of((5,))) == ("table.weight", "head.bias")


def test_mixed_precision_gives_nearly_the_same_gradient():
    for case in ("mlp", "conv2d", "lstm", "gru", "encoder", "bilinear activations"):
        make, shape, whole = CASES[case]
        model, spec = Module(make()), spec_of(shape)
        params, x = stacked_of(model, spec, whole, dtype=torch.float32)
        params = {name: leaf.requires_grad_() for name, leaf in params.items()}
        grads = []
        for lowered in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
                outputs = model.apply_stacked(params, x)
            total = outputs.float().square().sum()
            grads.append(
                torch.cat([g.flatten() for g in torch.autograd.grad(total, list(params.values()))])
            )
        assert (grads[0] - grads[1]).norm() < 0.05 * grads[0].norm(), case
        assert not torch.equal(*grads)


# --- lookups ---------------------------------------------------------------------------------


class Prefixed(nn.Module):
    """A sign of its own before the text, places, and a second text that is shifted."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.shifted = (nn.Embedding(size, 3) for size in (20, 4, 60))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        start = torch.full_like(x[:, :1], 19)
        text = self.words(torch.cat([start, x[:, :3]], dim=1).long())
        place = self.places(torch.arange(4, device=x.device))
        return self.head((text + place).mean(dim=1) + self.shifted(x[:, 4] + 2))


def numbered(rows, per_client=5, title="texts"):
    rows = torch.as_tensor(rows, dtype=torch.float32)
    clients = len(rows) // per_client
    targets = torch.arange(len(rows)) % 3
    return FederatedDataset(
        Spec(tuple(rows.shape[1:]), 3, "multiclass", clients),
        [str(client) for client in range(clients)],
        np.arange(clients + 1) * per_client,
        rows,
        targets,
        title=title,
    )


def texts(most=20, shape=(20, 5)):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("make", [Words, Bags])
def test_numbers_that_are_not_in_a_table_become_nan_alone(make):
    model, spec = Module(make()), spec_of((5,))
    params, x = stacked_of(model, spec, whole=7)
    wanted = model.apply_stacked(params, x)
    for bad in (-1.0, 7.0, 1e30, math.inf, math.nan):
        spoilt = x.clone()
        spoilt[1, 2, 3] = bad
        found = model.apply_stacked(params, spoilt)
        assert found[1, 2].isnan().all() and int(found.isnan().any(dim=-1).sum()) == 1
        good = ~found.isnan()
        torch.testing.assert_close(found[good], wanted[good])
        assert model.apply(of_client(params, 1), spoilt[1])[2].isnan().all()


def test_rows_that_are_not_in_a_table_are_refused_before_anything_is_spent(tmp_path):
    def check(data):
        made.check(data.spec, data=data)

    rows = texts()
    rows[13, 2] = 67
    made = PMTL(model=Module(P(Words)), sgd=SGD(lr=0.1))
    plan = Plan(method=made, privacy=Privacy(epsilon=2.0, delta=1e-3), rounds=3, simulation_seed=0)
    said = r"texts: the rows hold indices from 0 to 67 .*layer 'table' \(Embedding\).*0 to 6; .*68"
    with pytest.raises(coterie.DataError, match=said):
        simulate(plan, numbered(rows), folder=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    with pytest.raises(coterie.DataError, match="from -1 to 6 for layer"):
        check(numbered(texts(most=8) - 1))
    check(numbered(texts(most=7)))
    sparse = dataclasses.replace(numbered(rows), features=csr_matrix(rows.numpy()))
    with pytest.raises(coterie.DataError, match="from 0 to 67"):
        check(sparse)


def test_only_columns_that_reach_a_table_as_they_are_are_checked():
    model, rows = as_model(Prefixed), texts()
    rows[3, 3], rows[5, 4] = 500, 57
    model.check_data(numbered(rows))
    rows[4, 1] = 20
    with pytest.raises(coterie.DataError, match=r"0 to 20 for layer 'words'.*holds 0 to 19"):
        model.check_data(numbered(rows))
    reads = _network(model, numbered(rows).spec).reads
    assert [(each.name, each.columns.tolist()) for each in reads] == [("words", [0, 1, 2])]


class Handles(nn.Module):
    """Numbers that are not in the table become some that are."""

    def __init__(self, how):
        super().__init__()
        self.words, self.head, self.how = nn.Embedding(40, 3), nn.Linear(3, 3), how

    def forward(self, x):
        return self.head(self.words(self.how(x)).mean(dim=1))


@pytest.mark.parametrize(
    ("how", "values", "outside"),
    [
        (lambda x: x % 40, (54, -3), None),
        (lambda x: x.clamp(0, 39), (54, -3), None),
        (lambda x: torch.where(x < 40, x, 0), (54,), -3),
        (lambda x: torch.where(x < 0, 0, x), (-3,), 54),
        (lambda x: torch.where(x == 54, 0, x), (54,), 55),
    ],
)
def test_numbers_that_the_module_handles_itself_are_not_refused(how, values, outside):
    model, rows = Module(Handles(how)), texts(shape=(200, 5))
    for value in values:
        rows[:50, 2] = value
        model.check_data(numbered(rows))
    assert _network(model, numbered(rows).spec).reads  # they were looked at
    if outside is not None:
        rows[150, 2] = outside
        with pytest.raises(coterie.DataError, match="for layer 'words'"):
            model.check_data(numbered(rows))


def test_a_run_goes_on_without_the_client_whose_numbers_are_not_in_a_table():
    rows = texts()
    rows[5, 4] = 58  # 60 in a table of 60, by a sum that is not seen before
    made = PMTL(model=Prefixed, sgd=SGD(lr=0.1))
    plan = Plan(method=made, privacy=Privacy(epsilon=2.0, delta=1e-3), rounds=3, simulation_seed=0)
    outcome = simulate(plan, numbered(rows))
    assert outcome.zeroed == 3  # one client in every round
    assert all(leaf.isfinite().all() for leaf in outcome.shared.values())


# --- wrapped, tied and spare layers ----------------------------------------------------------


class Spare(nn.Module):
    """A head that is registered first, and layers whose outputs are not used."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)
        self.called, self.spare = nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x):
        x = torch.relu(self.body(x))
        outputs = self.head(x)
        self.called(x)
        return outputs


def test_the_head_is_the_last_linear_layer_that_is_trained():
    assert as_model(Spare()).head(SPEC) == ("head.weight", "head.bias")
    params, x = stacked_of(as_model(Spare()), SPEC)
    grads = torch.autograd.grad(
        as_model(Spare())
        .apply_stacked({k: v.requires_grad_() for k, v in params.items()}, x)
        .sum(),
        list(params.values()),
        allow_unused=True,
    )
    unused = [name for name, grad in zip(params, grads, strict=True) if grad is None]
    assert unused == ["called.weight", "called.bias", "spare.weight", "spare.bias"]


def test_compiled_modules_are_the_modules_they_were_made_of():
    compiled, plain = P(torch.compile, backend="eager"), Small()
    half = copy.deepcopy(plain)
    half.body, half.head = compiled(half.body), compiled(half.head)
    itself = copy.deepcopy(plain)
    itself.compile(backend="eager")
    for wrapped in (compiled(plain), half, compiled(half), itself):
        model = as_model(wrapped)
        assert model == as_model(plain) and model.weights == as_model(plain).weights
        params = model.init(SPEC, Rng.seeded(0))
        assert list(params) == list(plain.state_dict())
        assert all(torch.equal(leaf, plain.state_dict()[name]) for name, leaf in params.items())
        x = torch.ones(1, 2, 4)
        torch.testing.assert_close(
            model.apply_stacked(stack(params, 1), x)[0], copy.deepcopy(plain).eval()(x[0])
        )
    assert "body._orig_mod.weight" in half.state_dict()  # as it was handed over
    made = as_model(lambda: compiled(Small()))
    assert list(made.init(SPEC, Rng.seeded(0))) == list(plain.state_dict())


def test_a_tied_layer_names_the_leaf_that_it_shares():
    model, spec = as_model(Tied()), spec_of((5,))
    assert model.alias(spec, "head.weight") == model.alias(spec, "head") == "table.weight"
    for path in ("table", "table.weight", "head.bias", "hea", "nothing"):
        assert model.alias(spec, path) is None
    assert MLP().alias(spec, "head") is None


# --- losses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "task", "wanted"),
    [
        (
            "cross_entropy",
            "multiclass",
            lambda o, y: functional.cross_entropy(o, y, reduction="none"),
        ),
        (
            "binary_cross_entropy",
            "multiclass",
            lambda o, y: sum(functional.softplus(o[:, k]) - (y == k) * o[:, k] for k in range(3)),
        ),
        (
            "binary_cross_entropy",
            "multilabel",
            lambda o, y: (functional.softplus(o) - y * o).sum(1),
        ),
        ("squared", "multiclass", lambda o, y: 0.5 * ((o - functional.one_hot(y, 3)) ** 2).sum(1)),
        ("squared", "multilabel", lambda o, y: 0.5 * ((o - y) ** 2).sum(1)),
        ("squared", "regression", lambda o, y: 0.5 * (o - y) ** 2),
        ("squared", "binary", lambda o, y: 0.5 * (o - y) ** 2),
        ("binary_cross_entropy", "binary", lambda o, y: functional.softplus(o) - y * o),
        (
            lambda o, y: functional.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
            "multiclass",
            lambda o, y: functional.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
        ),
        (lambda o, y: (o - y).abs().sum(-1), "multilabel", lambda o, y: (o - y).abs().sum(-1)),
        (half_squared, "regression", lambda o, y: 0.5 * (o - y) ** 2),
    ],
)
def test_losses_are_what_they_are_called(loss, task, wanted):
    generator = torch.Generator().manual_seed(0)
    wide = task in ("multiclass", "multilabel")
    outputs = torch.randn(2, 5, *((3,) if wide else ()), generator=generator)
    targets = {
        "multiclass": torch.randint(0, 3, (2, 5), generator=generator),
        "multilabel": torch.randint(0, 2, (2, 5, 3), generator=generator).float(),
    }.get(task, torch.randint(0, 2, (2, 5), generator=generator).float())
    model = Module(Small, loss=loss)
    found = model.losses(task, outputs, targets)
    for client in range(2):
        torch.testing.assert_close(found[client], wanted(outputs[client], targets[client]))
        alone = model.losses(task, outputs[client], targets[client])
        torch.testing.assert_close(alone, found[client])
    torch.testing.assert_close(
        Module(Small).losses(task, outputs, targets), row_losses(task, outputs, targets)
    )


def test_a_loss_sees_one_client_alone():
    model = Module(Small, loss=lambda o, y: (o - o.mean()).square())
    outputs, targets = torch.randn(2, 5), torch.zeros(2, 5)
    far = outputs.clone()
    far[1] += 100
    found = [model.losses("regression", each, targets)[0] for each in (outputs, far)]
    assert torch.equal(*found)


# --- refusals --------------------------------------------------------------------------------


class Bad(nn.Module):
    """A linear layer, and something wrong in the way it is called."""

    def __init__(self, what):
        super().__init__()
        self.inner, self.what = nn.Linear(4, 3), what
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return getattr(self, self.what)(self.inner(x))

    def functional_dropout(self, x):
        return functional.dropout(x, 0.5, training=self.training)

    def branches(self, x):
        return x if x.sum() > 0 else -x

    def counts(self, x):
        self.seen += 1
        return x

    def averages(self, x):
        self.seen = 0.9 * self.seen + 0.1
        return x + self.seen

    def adds_up(self, x):
        self.seen += x.sum(dim=0)
        return x

    def mixes(self, x):
        return x - x.mean(dim=0)

    def mixes_many(self, x):
        return x - x.mean(dim=0) if len(x) > 3 else x

    def mixes_first(self, x):
        return torch.cat([x[:1] + x[-1:], x[1:]]) if len(x) > 1 else x

    def looks_up(self, x):
        return x + functional.embedding(torch.zeros(len(x)).long(), self.inner.weight)[:, :3]

    def looks_up_directly(self, x):
        return x + torch.embedding(self.inner.weight, torch.zeros(len(x)).long())[:, :3]

    def looks_up_deeper(self, x):
        found = torch.ops.aten.embedding(self.inner.weight, torch.zeros(len(x)).long())
        return x + found[:, :3]

    def looks_up_bags(self, x):
        return x + functional.embedding_bag((x[:, :2] * 0).long(), self.inner.weight)[:, :3]

    def pairs(self, x):
        return x, x

    def crashes(self, x):
        raise KeyError("no such thing")


class Writes(nn.Module):
    """Writes into the rows, so that it shows, does not show, or spoils the gradient."""

    def __init__(self, what):
        super().__init__()
        self.inner, self.what = nn.Linear(4, 3), what

    def forward(self, x):
        if self.what == "adds":
            x += 1
        elif self.what == "sets":
            x[:, 0] = 0.5
        else:
            x[:, 0] = self.inner(x)[:, 0]
        return self.inner(x)


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(5, 3), nn.Embedding(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head((self.table(x) + self.places(torch.arange(4))).mean(dim=1))


def with_plain_tensor():
    module = Small()
    module.fixed = torch.ones(3)
    return module


def with_old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)))


def complex_parameters():
    module = nn.Linear(4, 3)
    module.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return module


def frozen():
    return nn.Linear(4, 3).requires_grad_(False)


def own_embedding():
    module = Words()
    module.table = type("Mine", (nn.Embedding,), {"forward": _rounded})(7, 4)
    return module


def _rounded(layer, x):
    return functional.embedding(x.long(), layer.weight)


LOOKS_UP = r"\(Bad\) cannot.*looks up by a function.*next client.*use the layers nn\.Embedding"
REFUSED = {
    "no parameters": (nn.Flatten, "Flatten has no parameters to train"),
    "all frozen": (frozen, "has no parameters to train"),
    "batch norm": (
        sequential(P(nn.Linear, 4, 3), P(nn.BatchNorm1d, 3)),
        r"layer '1' \(BatchNorm1d\).*coterie\.models\.replace_batchnorm",
    ),
    "deep batch norm": (
        sequential(P(nn.Linear, 4, 3), sequential(P(nn.SyncBatchNorm, 3))),
        r"layer '1\.0' \(SyncBatchNorm\)",
    ),
    "running statistics": (
        sequential(P(nn.InstanceNorm1d, 3, track_running_stats=True)),
        r"layer '0' \(InstanceNorm1d\).*track_running_stats=False",
    ),
    "lazy": (sequential(P(nn.LazyLinear, 3)), r"layer '0' \(LazyLinear\) has uninitialised param"),
    "max norm": (P(Words, max_norm=1.0), r"layer 'table' \(Embedding\).*max_norm=None"),
    "projections": (
        lambda: Last(nn.LSTM(4, 5, proj_size=2, batch_first=True), 2),
        r"layer 'layer' \(LSTM\) has proj_size > 0",
    ),
    "extra keys": (P(Attends, add_bias_kv=True), r"layer 'attention'.*add_bias_kv=False"),
    "own dropout": (
        lambda: nn.Sequential(nn.Linear(4, 3), type("Mine", (nn.Dropout,), {})(0.5)),
        r"layer '1' \(Mine\) is a custom dropout layer; use nn\.Dropout",
    ),
    "random activation": (
        sequential(P(nn.Linear, 4, 3), nn.RReLU),
        r"layer '1' \(RReLU\) cannot be stacked over clients: it draws random numbers",
    ),
    "adds to rows": (P(Writes, "adds"), r"changes its input in place.*x = x \+ 1"),
    "sets rows": (P(Writes, "sets"), "changes its input in place"),
    "spoils rows": (P(Writes, "spoils"), r"changes a tensor in place that its gradient needs"),
    "rectifies rows": (
        sequential(P(nn.ReLU, inplace=True), P(nn.Linear, 4, 3)),
        "changes its input in place.*inplace=False",
    ),
    "small table": (Places, r"layer 'places' \(Embedding\) looked up 3 .*holds 0 to 2;"),
    "plain tensor": (with_plain_tensor, r"holds the tensor 'fixed'.*register_buffer\('fixed'"),
    "old weight norm": (with_old_weight_norm, r"layer '0' \(Linear\) holds.*parametrizations"),
    "spectral norm": (
        sequential(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))),
        "stacked over clients|changes the buffer",
    ),
    "complex": (complex_parameters, "parameter 'phase' has type torch.complex64"),
    "functional dropout": (P(Bad, "functional_dropout"), r"\(Bad\) cannot.*use an nn\.Dropout"),
    "branches": (P(Bad, "branches"), r"branches on values.*use torch\.where"),
    "counts": (P(Bad, "counts"), "changes the buffer 'seen'"),
    "averages": (P(Bad, "averages"), "changes the buffer 'seen'"),
    "adds up": (P(Bad, "adds_up"), "writes into an existing tensor"),
    "mixes rows": (P(Bad, "mixes"), "changes with the other rows of its batch.*batch_first=True"),
    "mixes many rows": (P(Bad, "mixes_many"), "changes with the other rows of its batch"),
    "mixes into the first": (P(Bad, "mixes_first"), "changes with the other rows of its batch"),
    "looks up": (P(Bad, "looks_up"), LOOKS_UP),
    "looks up directly": (P(Bad, "looks_up_directly"), LOOKS_UP),
    "looks up deeper": (P(Bad, "looks_up_deeper"), LOOKS_UP),
    "looks up bags": (P(Bad, "looks_up_bags"), LOOKS_UP),
    "own embedding": (own_embedding, r"layer 'table' \(Mine\).*by a function.*nn\.Embedding"),
    "pairs": (P(Bad, "pairs"), "expected a module that takes rows|returns a tensor"),
    "crashes": (P(Bad, "crashes"), r"\(Bad\) failed on 8 rows: KeyError"),
    "wrong inputs": (
        sequential(P(nn.Linear, 4, 5), P(nn.Linear, 6, 3)),
        r"layer '1' \(Linear\) failed on 8 rows",
    ),
    "wrong outputs": (
        P(nn.Linear, 4, 5),
        r"returned \(8, 5\).*expected \(8, 3\), one logit for each",
    ),
    "not a row's": (P(nn.Linear, 4, 3), r"layer '\(the module itself\)' \(Linear\) failed"),
}


# A module given as an object is copied first, which some of them refuse.
COPIED = ("batch norm", "lazy", "plain tensor", "old weight norm", "spectral norm", "crashes")


@pytest.mark.parametrize(
    ("case", "way"),
    [*((case, "function") for case in REFUSED), *((case, "module") for case in COPIED)],
)
def test_what_cannot_be_stacked_is_refused_by_name(case, way):
    make, message = REFUSED[case]
    shape = {"max norm": (5,), "projections": TIME, "extra keys": TIME, "not a row's": (5,)}
    given = make() if way == "module" else lambda case=case: REFUSED[case][0]()
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=message):
        model = Module(given, loss="squared")
        PMTL(model=model).check(spec_of(shape.get(case, (4,))))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_on_the_second_axis_are_noticed():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    with pytest.raises(ValueError, match="batch_first=True in recurrent and attention layers"):
        as_model(Wrong()).init(spec_of((6, 4)), Rng.seeded(0))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: as_model(3), "model = 3: expected a model such as Linear"),
        (lambda: as_model(Linear), r"model = Linear: expected Linear\(\)"),
        (lambda: as_model(dict), "expected a model such as Linear"),
        (lambda: PMTL(model="mlp"), "expected a model such as Linear"),
        (Module, "expected a torch.nn.Module, or a class or function"),
        (lambda: Module(Small(), {"width": 3}), "given with a module object"),
        (lambda: Module(Small, loss="hinge"), "loss = 'hinge': expected one of cross_entropy"),
        (lambda: Module(P(Small, 5)), "expected named arguments"),
        (lambda: Module(lambda: 3).init(SPEC, Rng.seeded(0)), "it made 3; expected a torch.nn"),
        (lambda: Module(nn.Linear).init(SPEC, Rng.seeded(0)), "it needs in_features, out_features"),
        (lambda: Module(Small, {"depth": 3}).init(SPEC, Rng.seeded(0)), "it failed: TypeError"),
        (
            lambda: Module(fails).init(SPEC, Rng.seeded(0)),
            r"make = \S*test_module:fails: called with the Spec, it failed: RuntimeError: no; "
            "expected a torch.nn.Module: call it by hand",
        ),
        (
            lambda: Module(Small, loss="cross_entropy").init(
                Spec((4,), 3, "multilabel", 2), Rng.seeded(0)
            ),
            "'cross_entropy' on a multilabel task",
        ),
        (
            lambda: Module(
                P(nn.Linear, in_features=4, out_features=1), loss="binary_cross_entropy"
            ).init(Spec((4,), 1, "regression", 2), Rng.seeded(0)),
            "on a regression task; expected targets that are 0 or 1",
        ),
        (
            lambda: Module(Small, loss=functional.cross_entropy).init(SPEC, Rng.seeded(0)),
            r"returned shape \(\) for 8 rows; expected one number per row.*reduction='none'",
        ),
        (
            lambda: Module(Small, loss=lambda o, y: o.missing).init(SPEC, Rng.seeded(0)),
            "loss: it failed on 8 rows: AttributeError",
        ),
        (
            lambda: as_model(sequential(P(nn.Conv1d, 4, 3, 6), nn.Flatten)).head(spec_of((4, 6))),
            "no linear layer among the parameters 0.weight, 0.bias",
        ),
    ],
)
def test_bad_settings_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_batch_norm_is_replaced_in_a_copy():
    module = nn.Sequential(
        nn.Conv2d(2, 64, 3),
        nn.BatchNorm2d(64, eps=1e-3),
        nn.Sequential(nn.BatchNorm2d(64, affine=False)),
        nn.Flatten(),
        nn.Linear(64 * 20, 10),
        nn.BatchNorm1d(10),
        nn.Linear(10, 3),
    )
    with torch.no_grad():
        module[1].weight.fill_(2.0)
        module[5].bias.requires_grad_(False)
    made = replace_batchnorm(module)
    assert type(module[1]) is nn.BatchNorm2d and "1.running_mean" not in made.state_dict()
    assert made[1].num_groups == 4 and made[1].eps == 1e-3 and made[1].weight[0] == 2.0
    assert not made[2][0].affine and made[5].num_groups == 1
    assert list(made.state_dict()) == [
        name
        for name in module.state_dict()
        if not any(part in name for part in ("running", "num_batches"))
    ]
    params = as_model(made).init(spec_of(IMAGE), Rng.seeded(0))
    assert "1.weight" in params and "5.bias" not in params
    assert isinstance(replace_batchnorm(nn.BatchNorm1d(512)), nn.GroupNorm)
    assert replace_batchnorm(nn.BatchNorm1d(512)).num_groups == 32
    with pytest.raises(ValueError, match=r"layer '0' \(BatchNorm1d\) has 1 features"):
        replace_batchnorm(nn.Sequential(nn.BatchNorm1d(1)))


# --- training --------------------------------------------------------------------------------


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))


@pytest.mark.parametrize("method", [PMTL, FedAvg])
def test_training_a_module_lowers_the_loss(method):
    data = synthetic("mean", clients=12, rows=20, features=4, spread=0.1, noise=0.1, seed=1).data
    made = method(model=Regressor, solver=SGD(lr=0.1, epochs=5))
    plan = Plan(method=made, privacy=Privacy(epsilon=math.inf), rounds=8, simulation_seed=0)
    outcome = simulate(plan, data)
    score = coterie.evaluate(made.model, outcome.rows, data)
    start = made.model.init(data.spec, Rng.seeded(0))
    before = coterie.evaluate(made.model, lambda ids: stack(start, len(ids)), data)
    assert score.value < 0.5 * before.value


def test_steps_with_dropout_do_not_depend_on_the_stack():
    data = synthetic("mean", clients=5, rows=8, features=4, seed=1).data
    model, solver = as_model(Regressor), SGD(lr=0.1, epochs=2, batch=3)
    start = model.init(data.spec, Rng.seeded(0))
    clients = data.clients(np.arange(5))
    together = solver(model, stack(start, 5), clients, Rng.seeded(2))
    plain = SGD(lr=0.1, epochs=2, batch=3, fast=False)
    reference = plain(model, stack(start, 5), clients, Rng.seeded(2))
    for name, leaf in together.items():
        torch.testing.assert_close(leaf, reference[name])
    for client in range(5):
        mine = data.clients(np.array([client]))
        alone = solver(model, stack(start, 1), mine, Rng.seeded(2))
        for name, leaf in alone.items():
            torch.testing.assert_close(leaf[0], together[name][client])
    other = solver(model, stack(start, 5), clients, Rng.seeded(3))
    assert not torch.allclose(other["head.weight"], together["head.weight"])


def test_an_mlp_and_the_same_module_train_alike():
    data = synthetic("mean", clients=4, rows=8, features=4, seed=1).data
    clients, mlp = data.clients(np.arange(4)), MLP(hidden=(8,), activation="tanh")
    module = as_model(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    theirs = stack(mlp.init(data.spec, Rng.seeded(0)), 4)
    ours = dict(zip(module.init(data.spec, Rng.seeded(0)), theirs.values(), strict=True))
    solver = SGD(lr=0.1, epochs=3, batch=4, momentum=0.5)
    found = solver(module, ours, clients, Rng.seeded(1))
    wanted = solver(mlp, theirs, clients, Rng.seeded(1))
    assert not module.draws
    for one, other in zip(found.values(), wanted.values(), strict=True):
        torch.testing.assert_close(one, other)
