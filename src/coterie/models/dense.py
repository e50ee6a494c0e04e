"""Linear models and fully connected networks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from coterie import stacked
from coterie.data.federated import Spec
from coterie.models.base import Model, register_model, squeezed
from coterie.rng import Rng
from coterie.tree import Tree

Activation = Literal["relu", "tanh", "gelu"]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
}


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

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        return squeezed(functional.linear(x.flatten(1), params["weight"], params.get("bias")))

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict by one batched product."""
        return squeezed(stacked.linear(x.flatten(2), params["weight"], params.get("bias")))


@register_model("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Fully connected layers on the flattened row, started as `torch.nn.Linear` starts.

    Leaves: "layer1.weight", "layer1.bias", ... and "head.weight", "head.bias".
    """

    hidden: tuple[int, ...] = (64,)
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        check_widths("hidden", self.hidden)
        if self.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation: given {self.activation!r}; expected one of {', '.join(_ACTIVATIONS)}"
            )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw weights and biases uniformly within 1 / sqrt(inputs)."""
        return dense_layers(spec.features, (*self.hidden, spec.outputs), rng)

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        return dense(params, x.flatten(1), functional.linear, _ACTIVATIONS[self.activation])

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict by one batched product a layer."""
        return dense(params, x.flatten(2), stacked.linear, _ACTIVATIONS[self.activation])


def dense(
    params: Tree,
    x: Tensor,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply the layers of `dense_layers`, with the activation between them."""
    layer = 1
    while f"layer{layer}.weight" in params:
        x = activation(linear(x, params[f"layer{layer}.weight"], params[f"layer{layer}.bias"]))
        layer += 1
    return squeezed(linear(x, params["head.weight"], params["head.bias"]))


def dense_layers(inputs: int, widths: tuple[int, ...], rng: Rng) -> dict[str, Tensor]:
    """Start fully connected layers of these widths; the last is called "head"."""
    params: dict[str, Tensor] = {}
    for layer, width in enumerate(widths, 1):
        name = "head" if layer == len(widths) else f"layer{layer}"
        params |= start_layer(name, (width, inputs), rng)
        inputs = width
    return params


def start_layer(name: str, shape: tuple[int, ...], rng: Rng) -> dict[str, Tensor]:
    """Draw uniformly within 1 / sqrt(fan in), as torch.nn.Linear and Conv2d do."""
    generator, bound = rng.at(name).torch(), 1 / math.sqrt(math.prod(shape[1:]))
    weight = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(shape[0]).uniform_(-bound, bound, generator=generator)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def check_widths(name: str, widths: tuple[int, ...]) -> None:
    """Refuse widths below 1."""
    if any(width < 1 for width in widths):
        raise ValueError(f"{name}: given {widths}; expected whole numbers of at least 1")
