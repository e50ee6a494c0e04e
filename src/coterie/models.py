"""Models as pure functions of a tree of parameters, for one client or for many side by side.

A model is a frozen dataclass whose fields are its architecture; it holds no parameters. `apply` is
written for one client; `apply_stacked` runs the models of many clients at once, each on its own
rows, and is what solvers call.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie import stacked
from coterie.data.federated import Spec, Task
from coterie.rng import Rng
from coterie.tree import Tree

M = TypeVar("M", bound=type["Model"])
MODELS: dict[str, type["Model"]] = {}

Activation = Literal["relu", "tanh", "gelu"]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
}
# Numbers in the unfolded patches of one piece of work that keeps nothing for a gradient.
_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}


class Model(ABC):
    """A frozen dataclass whose fields are its architecture.

    Class attributes:
        kind: Its registered name.
        clients_per_thread: How many clients a solver should hand to a CPU thread at a time; 0 to
            let the solver choose by the number of parameters.
    """

    kind: ClassVar[str] = ""
    clients_per_thread: ClassVar[int] = 0

    @abstractmethod
    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Make one client's parameters, unstacked, from public facts alone."""

    @abstractmethod
    def apply(self, params: Tree, x: Tensor) -> Tensor:
        """Predict rows (n, *shape) of one client: (n,) for a single output, else (n, outputs)."""

    def apply_stacked(self, params: Tree, x: Tensor) -> Tensor:
        """Predict rows (c, n, *shape) of c clients by their own parameters: (c, n[, outputs])."""
        outputs: Tensor = torch.func.vmap(self.apply)(dict(params), x)
        return outputs

    @classmethod
    def choices(cls) -> Mapping[str, type["Model"]]:
        """Give the registered models by name."""
        return MODELS


def register_model(name: str) -> Callable[[M], M]:
    """Put a model on the list under a name."""

    def put(cls: M) -> M:
        if name in MODELS and MODELS[name].__module__ != cls.__module__:
            raise ValueError(
                f"model name {name!r} is taken by {MODELS[name].__module__}; choose another"
            )
        cls.kind = name
        MODELS[name] = cls
        return cls

    return put


@register_model("linear")
@dataclass(frozen=True)
class Linear(Model):
    """Linear predictions of the flattened row, from zeros: leaves "weight" and "bias".

    >>> shapes = Linear().init(Spec((3, 2), 4, "multiclass", 10), Rng.seeded(0))
    >>> {name: tuple(leaf.shape) for name, leaf in shapes.items()}
    {'weight': (4, 6), 'bias': (4,)}
    """

    bias: bool = True

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros."""
        params = {"weight": torch.zeros(spec.outputs, spec.features)}
        return params | {"bias": torch.zeros(spec.outputs)} if self.bias else params

    def apply(self, params: Tree, x: Tensor) -> Tensor:
        """Predict one client's rows."""
        return _squeezed(functional.linear(x.flatten(1), params["weight"], params.get("bias")))

    def apply_stacked(self, params: Tree, x: Tensor) -> Tensor:
        """Predict by one batched product."""
        return _squeezed(stacked.linear(x.flatten(2), params["weight"], params.get("bias")))


@register_model("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Fully connected layers on the flattened row, started as `torch.nn.Linear` starts.

    Leaves: "layer1.weight", "layer1.bias", ... and "head.weight", "head.bias".
    """

    hidden: tuple[int, ...] = (64,)
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        _check_widths("hidden", self.hidden)
        if self.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation: given {self.activation!r}; expected one of {', '.join(_ACTIVATIONS)}"
            )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw weights and biases uniformly within 1 / sqrt(inputs)."""
        return _dense_layers(spec.features, (*self.hidden, spec.outputs), rng)

    def apply(self, params: Tree, x: Tensor) -> Tensor:
        """Predict one client's rows."""
        return _dense(params, x.flatten(1), functional.linear, _ACTIVATIONS[self.activation])

    def apply_stacked(self, params: Tree, x: Tensor) -> Tensor:
        """Predict by one batched product a layer."""
        return _dense(params, x.flatten(2), stacked.linear, _ACTIVATIONS[self.activation])


@register_model("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Convolutions without padding, each rectified and pooled, then fully connected layers.

    The default on 28 x 28 images with 62 classes is PMTL's network for FEMNIST (115,646 numbers).
    Rows are images (H, W) or (C, H, W). Leaves: "conv1.weight", "conv1.bias", ..., then as in
    `MLP`, and started as `torch.nn.Conv2d` and `torch.nn.Linear` start.

    Attributes:
        channels: Filters of each convolution.
        kernel: Side of the filters.
        pool: Side of the windows of maxima after each convolution; 1 for none.
        hidden: Widths of rectified layers between the convolutions and the outputs.
    """

    # Two clients' patches fill a core's cache, and a stack that is a multiple of the threads keeps
    # all of them busy in a batched product.
    clients_per_thread: ClassVar[int] = 2

    channels: tuple[int, ...] = (32, 64)
    kernel: int = 5
    pool: int = 2
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.channels:
            raise ValueError("channels: given none; expected at least one convolution, or use MLP")
        _check_widths("channels", self.channels)
        _check_widths("hidden", self.hidden)
        _check_widths("kernel, pool", (self.kernel, self.pool))

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw weights and biases uniformly within 1 / sqrt(inputs).

        Raises:
            ValueError: If rows are no images, or too small for the layers.
        """
        channels, sides = self._sides(spec.shape)
        params: dict[str, Tensor] = {}
        for layer, filters in enumerate(self.channels, 1):
            shape = (filters, channels, self.kernel, self.kernel)
            params |= _layer(f"conv{layer}", shape, rng)
            channels = filters
        height, width = sides[-1]
        return params | _dense_layers(channels * height * width, (*self.hidden, spec.outputs), rng)

    def apply(self, params: Tree, x: Tensor) -> Tensor:
        """Predict one client's rows."""
        images = x[:, None] if x.dim() == 3 else x
        for weight, bias in self._filters(params):
            images = functional.relu(functional.conv2d(images, weight, bias))
            images = functional.max_pool2d(images, self.pool)
        return _dense(params, images.flatten(1), functional.linear, functional.relu)

    def apply_stacked(self, params: Tree, x: Tensor) -> Tensor:
        """Predict by one batched product a layer; without gradients, in pieces of bounded size."""
        if torch.is_grad_enabled():
            return self._forward(params, x)
        pieces = []
        for clients, rows in self._pieces(x):
            part = {name: leaf[clients] for name, leaf in params.items()}
            pieces.append([self._forward(part, x[clients, piece]) for piece in rows])
        return torch.cat([torch.cat(rows, dim=1) for rows in pieces])

    def _forward(self, params: Tree, x: Tensor) -> Tensor:
        images = stacked.rows_last(x)
        for weight, bias in self._filters(params):
            images = stacked.convolve(images, weight, bias, self.pool)
        # Rows first again: products with few columns are several times slower.
        rows = images.flatten(1, 3).mT.contiguous()
        return _dense(params, rows, stacked.linear, functional.relu)

    def _filters(self, params: Tree) -> list[tuple[Tensor, Tensor]]:
        layers = range(1, len(self.channels) + 1)
        return [(params[f"conv{layer}.weight"], params[f"conv{layer}.bias"]) for layer in layers]

    def _pieces(self, x: Tensor) -> Iterator[tuple[slice, list[slice]]]:
        channels, sides = self._sides(tuple(x.shape[2:]))
        depths = (channels, *self.channels)
        patch = max(
            depth * (self.kernel * self.pool) ** 2 * (height + 1) * (width + 1)
            for depth, (height, width) in zip(depths, sides, strict=False)
        )
        clients, rows = x.shape[:2]
        budget = _PIECE.get(x.device.type, _PIECE["cpu"])
        most_rows = max(1, min(rows, budget // patch))
        most_clients = max(1, budget // (patch * most_rows))
        pieces = [slice(start, start + most_rows) for start in range(0, max(rows, 1), most_rows)]
        for start in range(0, max(clients, 1), most_clients):
            yield slice(start, start + most_clients), pieces

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        # Channels of the image, and its height and width after each layer.
        if len(shape) not in (2, 3):
            raise ValueError(
                f"rows of shape {shape}: a CNN expects images (H, W) or (C, H, W); reshape the "
                "rows, or use MLP"
            )
        height, width = shape[-2:]
        sides = []
        for layer in range(1, len(self.channels) + 1):
            height, width = (
                (side - self.kernel + 1) // self.pool if side >= self.kernel else 0
                for side in (height, width)
            )
            if min(height, width) < 1:
                raise ValueError(
                    f"images of {shape[-2]} x {shape[-1]} are too small: nothing is left after "
                    f"convolution {layer} (kernel {self.kernel}, pool {self.pool}); expected at "
                    f"least {self._smallest()} pixels a side: use fewer channels, a smaller kernel "
                    "or pool, or larger images"
                )
            sides.append((height, width))
        return (shape[0] if len(shape) == 3 else 1), sides

    def _smallest(self) -> int:
        side = 1
        for _ in self.channels:
            side = side * self.pool + self.kernel - 1
        return side


def row_losses(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the loss of every row, shape (..., n).

    1/2 (p - y)^2 for regression, logistic on 0/1 for binary, cross-entropy for multiclass, the sum
    over labels of logistic for multilabel; `outputs` are what a model predicts, (..., n) if there
    is one, else (..., n, outputs).
    """
    if task == "multiclass":
        flat = functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten().long(), reduction="none"
        )
        return flat.reshape(targets.shape)
    wanted = targets.to(outputs.dtype)
    if task == "regression":
        return 0.5 * (outputs - wanted).square()
    logistic = functional.binary_cross_entropy_with_logits(
        outputs.reshape(wanted.shape), wanted, reduction="none"
    )
    return logistic.sum(dim=-1) if task == "multilabel" else logistic


def _dense(
    params: Tree,
    x: Tensor,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    layer = 1
    while f"layer{layer}.weight" in params:
        x = activation(linear(x, params[f"layer{layer}.weight"], params[f"layer{layer}.bias"]))
        layer += 1
    return _squeezed(linear(x, params["head.weight"], params["head.bias"]))


def _dense_layers(inputs: int, widths: tuple[int, ...], rng: Rng) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    for layer, width in enumerate(widths, 1):
        name = "head" if layer == len(widths) else f"layer{layer}"
        params |= _layer(name, (width, inputs), rng)
        inputs = width
    return params


def _layer(name: str, shape: tuple[int, ...], rng: Rng) -> dict[str, Tensor]:
    # As torch.nn.Linear and Conv2d do: Kaiming's uniform with a = sqrt(5) is 1 / sqrt(fan in).
    generator, bound = rng.at(name).torch(), 1 / math.sqrt(math.prod(shape[1:]))
    weight = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(shape[0]).uniform_(-bound, bound, generator=generator)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _squeezed(outputs: Tensor) -> Tensor:
    return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs


def _check_widths(name: str, widths: tuple[int, ...]) -> None:
    if any(width < 1 for width in widths):
        raise ValueError(f"{name}: given {widths}; expected whole numbers of at least 1")
