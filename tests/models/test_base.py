"""Models against torch.nn modules built independently, and stacks against single clients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.core import config
from coterie.core.rng import Rng
from coterie.core.tree import size, stack
from coterie.data.federated import Spec
from coterie.models import CNN, MLP, MODELS, Linear, Model, layers, register_model, row_losses

FEMNIST = Spec(shape=(28, 28), outputs=62, task="multiclass", clients=205)
CASES = {
    "linear": (Linear(), (3, 4), 5),
    "linear without bias": (Linear(bias=False), (7,), 1),
    "mlp": (MLP(hidden=(6, 5)), (3, 4), 4),
    "mlp tanh, one output": (MLP(hidden=(6,), activation="tanh"), (9,), 1),
    "mlp gelu, nothing hidden": (MLP(hidden=(), activation="gelu"), (9,), 2),
    "cnn": (CNN(channels=(3, 4), kernel=3), (13, 11), 5),
    "cnn, one output": (CNN(channels=(3,), kernel=2, hidden=(6,)), (2, 6, 5), 1),
    "cnn, what fills no window": (CNN(channels=(3, 2), kernel=2, pool=3), (3, 15, 16), 3),
    "cnn without pooling": (CNN(channels=(2, 3), kernel=2, pool=1), (6, 5), 3),
}


def reference(model, spec):
    """The same network out of torch.nn modules."""
    modules = []
    if isinstance(model, CNN):
        inputs = spec.shape[0] if len(spec.shape) == 3 else 1
        if len(spec.shape) == 2:
            modules.append(nn.Unflatten(1, (1, spec.shape[0])))
        for channels in model.channels:
            modules += [nn.Conv2d(inputs, channels, model.kernel), nn.ReLU()]
            modules += [nn.MaxPool2d(model.pool)] if model.pool > 1 else []
            inputs = channels
    modules.append(nn.Flatten())
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
    for width in getattr(model, "hidden", ()):
        modules += [nn.LazyLinear(width), activation[getattr(model, "activation", "relu")]()]
    modules.append(nn.LazyLinear(spec.outputs, bias=getattr(model, "bias", True)))
    network = nn.Sequential(*modules)
    network(torch.zeros(1, *spec.shape))
    return network


def clients_of(model, spec, clients=3, rows=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.randn(clients, *leaf.shape, generator=generator, dtype=dtype) * 0.3
        for name, leaf in model.init(spec, Rng.seeded(0)).items()
    }
    return params, torch.randn(clients, rows, *spec.shape, generator=generator, dtype=dtype)


def of_client(tree, client):
    return {name: leaf[client] for name, leaf in tree.items()}


@pytest.mark.parametrize("case", CASES)
def test_stack_and_client_equal_torch_modules_with_gradients(case):
    model, shape, outputs = CASES[case]
    spec = Spec(shape, outputs, "regression" if outputs == 1 else "multiclass", 3)
    params, x = clients_of(model, spec, dtype=torch.float64)
    params = {name: leaf.requires_grad_() for name, leaf in params.items()}
    found = model.apply_stacked(params, x)
    assert found.shape == ((3, 4) if outputs == 1 else (3, 4, outputs))
    slopes = torch.randn(found.shape, dtype=torch.float64)
    grads = torch.autograd.grad((found * slopes).sum(), tuple(params.values()))
    vmapped = torch.func.vmap(model.apply)(params, x)
    torch.testing.assert_close(found, vmapped)
    for client in range(3):
        network = reference(model, spec).double()
        own = of_client(params, client)
        for given, leaf in zip(network.parameters(), own.values(), strict=True):
            given.data = leaf.detach().clone()
        wanted = network(x[client]).reshape(found[client].shape)
        torch.testing.assert_close(found[client], wanted)
        torch.testing.assert_close(model.apply(own, x[client]), wanted)
        (wanted * slopes[client]).sum().backward()
        for given, grad in zip(network.parameters(), grads, strict=True):
            torch.testing.assert_close(grad[client], given.grad)


@pytest.mark.parametrize("case", CASES)
def test_predictions_without_gradients_in_pieces_are_the_same(case, monkeypatch):
    model, shape, outputs = CASES[case]
    params, x = clients_of(model, Spec(shape, outputs, "multiclass", 3), rows=7)
    wanted = model.apply_stacked(params, x)
    monkeypatch.setattr("coterie.models.zoo._PIECE", {"cpu": 5000})
    with torch.no_grad():
        torch.testing.assert_close(model.apply_stacked(params, x), wanted)
        assert model.apply_stacked(params, x[:, :0]).shape == wanted[:, :0].shape


def test_default_cnn_is_the_femnist_network():
    params = CNN().init(FEMNIST, Rng.seeded(0))
    assert size(params) == 115_646
    assert {name: tuple(leaf.shape) for name, leaf in params.items()} == {
        "conv1.weight": (32, 1, 5, 5), "conv1.bias": (32,),
        "conv2.weight": (64, 32, 5, 5), "conv2.bias": (64,),
        "head.weight": (62, 1024), "head.bias": (62,),
    }  # fmt: skip
    assert CNN().apply_stacked(stack(params, 2), torch.zeros(2, 3, 28, 28)).shape == (2, 3, 62)


@pytest.mark.parametrize(("side", "fits"), [(16, True), (15, False), (4, False)])
def test_images_too_small_for_the_layers_are_refused(side, fits):
    spec = Spec((side, 28), 62, "multiclass", 1)
    if fits:
        CNN().init(spec, Rng.seeded(0))
        return
    with pytest.raises(ValueError, match=f"{side} x 28 are too small.*at least 16 pixels"):
        CNN().init(spec, Rng.seeded(0))


def test_bad_architectures_are_refused():
    with pytest.raises(ValueError, match=r"\(H, W\) or \(C, H, W\); reshape"):
        CNN().init(Spec((784,), 62, "multiclass", 1), Rng.seeded(0))
    with pytest.raises(ValueError, match="at least one convolution"):
        CNN(channels=())
    with pytest.raises(ValueError, match="kernel, pool: given"):
        CNN(pool=0)
    with pytest.raises(ValueError, match="hidden: given"):
        MLP(hidden=(3, 0))
    with pytest.raises(ValueError, match="activation: given 'step'; expected one of relu"):
        MLP(activation="step")


@pytest.mark.parametrize("model", [MLP(hidden=(64,)), CNN()])
def test_initialisation_is_that_of_torch_and_from_the_stream_alone(model):
    params = model.init(FEMNIST, Rng.seeded(3))
    again, other = model.init(FEMNIST, Rng.seeded(3)), model.init(FEMNIST, Rng.seeded(4))
    torch.manual_seed(0)
    network = reference(model, FEMNIST)
    for (name, leaf), given in zip(params.items(), network.parameters(), strict=True):
        assert torch.equal(leaf, again[name]) and not torch.equal(leaf, other[name])
        weight = params[name.replace("bias", "weight")]
        bound = 1 / math.sqrt(weight[0].numel())
        assert leaf.abs().max() <= bound
        if leaf.numel() > 500:
            # Uniform with the reference's spread; 5 standard errors of a uniform's deviation.
            slack = 5 * 0.45 / math.sqrt(leaf.numel())
            assert leaf.std() == pytest.approx(bound / math.sqrt(3), rel=slack)
            assert given.detach().std() == pytest.approx(bound / math.sqrt(3), rel=slack)


def test_linear_starts_from_zeros():
    params = Linear().init(Spec((4, 2), 3, "multiclass", 5), Rng.seeded(0))
    assert all(not leaf.any() for leaf in params.values())
    assert "bias" not in Linear(bias=False).init(Spec((4,), 1, "binary", 5), Rng.seeded(0))


@pytest.fixture(params=["pixel by pixel", "one kernel"])
def maxima(request, monkeypatch):
    """Both ways to take maxima over windows: that of the CPU and that of a GPU."""
    monkeypatch.setattr(layers, "_has_one_kernel", lambda images: request.param == "one kernel")


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_convolution_passes_gradcheck(pool, maxima):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 4, 5, 2), (2, 2, 2, 2, 2), (2, 2))
    inputs = tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    assert torch.autograd.gradcheck(lambda x, w, b: layers.convolve(x, w, b, pool), inputs)
    # The first layer: no gradient of the rows.
    first = inputs[0].detach()
    assert torch.autograd.gradcheck(lambda w, b: layers.convolve(first, w, b, pool), inputs[1:])


def test_linear_layer_passes_gradcheck_twice():
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4), (2, 5, 4), (2, 5))
    )
    assert torch.autograd.gradcheck(layers.stacked_linear, inputs)
    assert torch.autograd.gradgradcheck(layers.stacked_linear, inputs)
    grads = torch.autograd.grad(layers.stacked_linear(*inputs).sum(), inputs)
    assert all(grad.is_contiguous() for grad in grads)


def test_ties_inside_a_window_go_to_the_first_pixel_as_in_torch(maxima):
    # Blank parts of an image make equal pixels everywhere.
    model = CNN(channels=(2,), kernel=3)
    spec = Spec((9, 9), 3, "multiclass", 2)
    params, x = clients_of(model, spec, clients=2)
    x[:, :, :6] = 0
    params = {name: leaf.abs().requires_grad_() for name, leaf in params.items()}
    wanted = torch.func.vmap(model.apply)(params, x)
    by_stack = torch.autograd.grad(
        model.apply_stacked(params, x).square().sum(), tuple(params.values())
    )
    by_torch = torch.autograd.grad(wanted.square().sum(), tuple(params.values()))
    for ours, theirs in zip(by_stack, by_torch, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_not_a_number_stays_with_its_client(maxima):
    model = CNN(channels=(2, 3), kernel=3)
    params, x = clients_of(model, Spec((13, 13), 4, "multiclass", 3))
    params = {name: leaf.requires_grad_() for name, leaf in params.items()}
    x[1, 2, 5, 5] = float("nan")
    outputs = model.apply_stacked(params, x)
    grads = torch.autograd.grad(outputs.sum(), tuple(params.values()))
    assert outputs[1, 2].isnan().all()
    assert outputs[[0, 2]].isfinite().all()
    assert all(grad[[0, 2]].isfinite().all() for grad in grads)
    assert grads[0][1].isnan().any()


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_losses_are_those_of_torch_at_any_depth(task):
    generator = torch.Generator().manual_seed(0)
    wide = task in ("multiclass", "multilabel")
    outputs = torch.randn(2, 5, *((4,) if wide else ()), generator=generator)
    targets = {
        "regression": torch.randn(2, 5, generator=generator),
        "binary": torch.randint(0, 2, (2, 5), generator=generator).float(),
        "multiclass": torch.randint(0, 4, (2, 5), generator=generator),
        "multilabel": torch.randint(0, 2, (2, 5, 4), generator=generator).float(),
    }[task]
    found = row_losses(task, outputs, targets)
    assert found.shape == (2, 5)
    for client in range(2):
        for row in range(5):
            p, y = outputs[client, row], targets[client, row]
            wanted = {
                "regression": lambda p, y: 0.5 * (p - y) ** 2,
                "binary": lambda p, y: torch.log1p(torch.exp(p)) - y * p,
                "multiclass": lambda p, y: functional.nll_loss(p.log_softmax(0), y),
                "multilabel": lambda p, y: (torch.log1p(torch.exp(p)) - y * p).sum(),
            }[task](p, y)
            torch.testing.assert_close(found[client, row], wanted)
        torch.testing.assert_close(
            row_losses(task, outputs[client], targets[client]), found[client]
        )


def test_one_label_may_come_squeezed():
    found = row_losses("multilabel", torch.zeros(2, 5), torch.ones(2, 5, 1))
    torch.testing.assert_close(found, torch.full((2, 5), math.log(2)))


def test_registry_reads_and_writes_tables():
    assert set(MODELS) >= {"linear", "mlp", "cnn"}
    model = CNN(channels=(8, 16), hidden=(32,))
    table = config.to_table(model)
    assert table["kind"] == "cnn"
    assert config.from_table(Model, table, "model") == model
    with pytest.raises(ValueError, match=r"'cnn' is taken by coterie\.models"):
        register_model("cnn")(type("Other", (Linear,), {"__module__": "elsewhere"}))
