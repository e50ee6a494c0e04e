"""The networks of the papers: their sizes, and the same networks built of torch.nn directly."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.core.config import from_table, to_table
from coterie.core.rng import Rng
from coterie.core.tree import size
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.methods.pmtl import PMTL
from coterie.models import (
    CNN,
    MLP,
    MODELS,
    CelebaCNN,
    CharLSTM,
    FemnistCNN,
    FemnistLeaf,
    Model,
    TagLogistic,
)


class Grey(nn.Module):
    def forward(self, x):
        return x[:, None]


def femnist_cnn():
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 62),
    )  # fmt: skip


def femnist_leaf():
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 32, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 62),
    )  # fmt: skip


class Celeba(nn.Module):
    def __init__(self, leaf):
        super().__init__()
        self.leaf = leaf
        for block in range(1, 5):
            setattr(self, f"conv{block}", nn.Conv2d(3 if block == 1 else 32, 32, 3, padding=1))
            setattr(self, f"norm{block}", nn.GroupNorm(2, 32))
        self.head = nn.Linear(1152 if leaf else 800, 2)

    def forward(self, x):
        for block in range(1, 5):
            x = getattr(self, f"norm{block}")(getattr(self, f"conv{block}")(x))
            x = functional.max_pool2d(x, 2, ceil_mode=self.leaf)
            x = x.relu() if self.leaf else x
        return self.head(x.flatten(1))


class Shakespeare(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.first = nn.LSTM(8, 256, batch_first=True)
        self.second = nn.LSTM(256, 256, batch_first=True)
        self.head = nn.Linear(256, 80)

    def forward(self, x):
        outputs, _ = self.second(self.first(self.embedding(x.long()))[0])
        return self.head(outputs[:, -1])


class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10_000, 500)

    def forward(self, x):
        return self.linear(x)


# Name: the model, the shape of a row, classes, numbers, the plain network.
ZOO = {
    "femnist_cnn": (FemnistCNN(), (28, 28), 62, 115_646, femnist_cnn),
    "femnist_leaf": (FemnistLeaf(), (28, 28), 62, 6_603_710, femnist_leaf),
    "celeba_cnn": (CelebaCNN(), (3, 84, 84), 2, 28_640 + 1_602 + 256, lambda: Celeba(False)),
    "celeba_cnn leaf": (
        CelebaCNN(leaf=True), (3, 84, 84), 2, 28_640 + 2_306 + 256, lambda: Celeba(True),
    ),
    "tag_logistic": (TagLogistic(), (10_000,), 500, 5_000_500, Tags),
    "char_lstm": (
        CharLSTM(), (80,), 80,
        640 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (512 + 2) + 80 * 257, Shakespeare,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_sizes_and_outputs_are_those_of_plain_networks(name):
    model, shape, classes, numbers, make = ZOO[name]
    spec = Spec(shape, classes, "multiclass", 2)
    params, plain = model.init(spec, Rng.seeded(0)), make()
    assert size(params) == numbers == sum(given.numel() for given in plain.parameters())
    generator = torch.Generator().manual_seed(0)
    stack = {
        name: leaf + 0.05 * torch.randn(2, *leaf.shape, generator=generator)
        for name, leaf in params.items()
    }
    x = torch.rand(2, 3, *shape, generator=generator)
    x = (x * 79).round() if name == "char_lstm" else x
    found = model.apply_stacked(stack, x)
    assert found.shape == (2, 3, classes)
    for client in range(2):
        with torch.no_grad():
            for given, leaf in zip(plain.parameters(), stack.values(), strict=True):
                given.copy_(leaf[client])
            wanted = plain(x[client])
        scale = wanted.abs().max()
        torch.testing.assert_close(found[client] / scale, wanted / scale, rtol=0, atol=1e-5)
    assert not model.draws
    assert len(model.head(spec)) == 2 and params[model.head(spec)[0]].shape[0] == classes


def test_all_are_found_by_name_and_written_to_plans():
    assert {"femnist_cnn", "femnist_leaf", "celeba_cnn", "tag_logistic", "mlp", "char_lstm"} <= set(
        MODELS
    )
    for model, *_ in ZOO.values():
        assert from_table(Model, to_table(model), "model") == model
        assert from_table(Model, {"kind": model.kind}, "model") == type(model)()


@pytest.mark.parametrize(
    ("model", "spec", "message"),
    [
        (FemnistCNN(), Spec((783,), 62, "multiclass", 2), r"expected \(28, 28\) or \(1, 28, 28\)"),
        (FemnistLeaf(), Spec((3, 28, 28), 62, "multiclass", 2), "femnist_leaf: rows of shape"),
        (CelebaCNN(), Spec((3, 64, 64), 2, "multiclass", 2), r"expected \(3, 84, 84\) or"),
        (CharLSTM(), Spec((8, 10), 80, "multiclass", 2), r"expected \(length,\)"),
        (CharLSTM(), Spec((8,), 1, "binary", 2), "1 characters for a binary task"),
        (TagLogistic(), Spec((8,), 1, "regression", 2), "the task is regression; expected multi"),
    ],
)
def test_rows_and_tasks_of_other_shapes_are_refused(model, spec, message):
    with pytest.raises(ValueError, match=message):
        model.init(spec, Rng.seeded(0))


@pytest.mark.parametrize("model", [FemnistCNN(), FemnistLeaf(hidden=(20,))])
def test_flat_images_are_the_same_images(model):
    flat, square = (Spec(shape, 62, "multiclass", 2) for shape in ((784,), (28, 28)))
    params = model.init(square, Rng.seeded(0))
    again = model.init(flat, Rng.seeded(0))
    assert list(again) == list(params) and all(torch.equal(again[k], params[k]) for k in params)
    assert model.head(flat) == model.head(square)
    x = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    stacked = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in params.items()}
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = model.apply_stacked(stacked, x.flatten(2))
            assert torch.equal(found, model.apply_stacked(stacked, x))
    assert found.shape == (2, 3, 62)
    assert torch.equal(model.apply(params, x[0].flatten(1)), model.apply(params, x[0]))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="groups: given 3; expected a divisor of the 32"):
        CelebaCNN(groups=3)
    with pytest.raises(ValueError, match=r"vocabulary, dropout: given 0, 1\.0"):
        CharLSTM(dropout=1.0)
    with pytest.raises(ValueError, match="padding: given 5; expected a whole number from 0 to 4"):
        CNN(padding=5)


def test_colours_may_come_last():
    images = torch.rand(2, 3, 84, 84)
    spec = Spec((84, 84, 3), 2, "multiclass", 2)
    model = CelebaCNN(filters=4)
    params = model.init(spec, Rng.seeded(0))
    first = model.init(Spec((3, 84, 84), 2, "multiclass", 2), Rng.seeded(0))
    wanted = model.apply(first, images)
    torch.testing.assert_close(model.apply(params, images.movedim(1, -1)), wanted)


def test_tags_may_be_many_a_row():
    spec = Spec((6,), 4, "multilabel", 2)
    model = TagLogistic()
    outputs = model.apply(model.init(spec, Rng.seeded(0)), torch.rand(3, 6))
    losses = model.losses("multilabel", outputs, torch.ones(3, 4))
    torch.testing.assert_close(losses, torch.full((3,), 4 * 0.6931472))


def test_a_text_model_drops_between_layers_and_takes_other_sizes():
    model = CharLSTM(vocabulary=20, hidden=6, embedding=3, dropout=0.5)
    spec = Spec((5,), 4, "multiclass", 2)
    params = model.init(spec, Rng.seeded(0))
    assert params["embedding.weight"].shape == (20, 3) and model.draws
    x = torch.arange(20.0).reshape(4, 5)
    assert not torch.allclose(model.apply(params, x), model.apply(params, x, torch.tensor(1)))


def test_texts_of_more_characters_than_the_vocabulary_are_refused():
    rows = torch.arange(30.0).reshape(6, 5) % 21
    data = FederatedDataset(
        Spec((5,), 4, "multiclass", 2), ("a", "b"), np.array([0, 3, 6]), rows, torch.arange(6) % 4
    )
    CharLSTM(vocabulary=21, hidden=6).check_data(data)
    MLP().check_data(data)
    for vocabulary, most in ((20, 19), (0, 3)):
        message = rf"from 0 to 20 for layer 'embedding'.*0 to {most};.*vocabulary = 21"
        with pytest.raises(DataError, match=message):
            PMTL(model=CharLSTM(vocabulary=vocabulary, hidden=6)).check(data.spec, data=data)


@pytest.mark.parametrize("padding", [1, 2])
@pytest.mark.parametrize("pool", [1, 2, 3])
def test_padded_convolutions_are_torchs_with_gradients(padding, pool):
    model = CNN(channels=(3, 4), kernel=3, pool=pool, padding=padding)
    spec = Spec((2, 9, 11), 5, "multiclass", 2)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(2, *leaf.shape, generator=generator).double().requires_grad_()
        for name, leaf in model.init(spec, Rng.seeded(0)).items()
    }
    x = torch.randn(2, 3, *spec.shape, generator=generator).double()
    outputs = model.apply_stacked(params, x)
    grads = torch.autograd.grad(outputs.square().sum(), tuple(params.values()))
    for client in range(2):
        plain = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(pool),
            nn.Conv2d(3, 4, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(pool),
            nn.Flatten(), nn.Linear(params["head.weight"].shape[-1], 5),
        ).double()  # fmt: skip
        for given, leaf in zip(plain.parameters(), params.values(), strict=True):
            given.data = leaf[client].detach().clone()
        wanted = plain(x[client])
        torch.testing.assert_close(outputs[client], wanted)
        wanted.square().sum().backward()
        for given, grad in zip(plain.parameters(), grads, strict=True):
            torch.testing.assert_close(grad[client], given.grad)


def test_padding_lets_smaller_images_in():
    spec = Spec((4, 4), 3, "multiclass", 2)
    with pytest.raises(ValueError, match="at least 10 pixels"):
        CNN(kernel=3).init(spec, Rng.seeded(0))
    assert CNN(kernel=3, padding=1).init(spec, Rng.seeded(0))["head.weight"].shape == (3, 64)
    with pytest.raises(ValueError, match=r"3 x 4 are too small.*at least 4 pixels"):
        CNN(kernel=3, padding=1).init(Spec((3, 4), 3, "multiclass", 2), Rng.seeded(0))
