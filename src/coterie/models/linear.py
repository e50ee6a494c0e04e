"""Linear models and fully connected networks, and slices of a linear head.

A frozen public map gives features in public order (principal directions of public data). Methods
that share r public directions release only the first r columns of a head and its biases; the other
columns stay at the public start.
"""

import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.effects import curves
from coterie.data.federated import Spec
from coterie.models.base import Model, register_model, squeezed
from coterie.models.layers import stacked_linear

MOST_PARAMETERS = 100_000_000  # of one client's model
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

    Attributes:
        bias: Whether there are biases.
        start: A file of public weights to start from, instead of zeros: an npz with "weight",
            (outputs, features), and "bias", (outputs,); `save_start` writes one. Every reader of
            the plan needs the same file.

    >>> shapes = Linear().init(Spec((3, 2), 4, "multiclass", 10), Rng.seeded(0))
    >>> {name: tuple(leaf.shape) for name, leaf in shapes.items()}
    {'weight': (4, 6), 'bias': (4,)}
    """

    bias: bool = True
    start: str | None = None

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return zeros, or the public weights."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (spec.outputs, spec.features)}
        check_parameters(shapes["weight"])
        if self.bias:
            shapes["bias"] = (spec.outputs,)
        if self.start is None:
            return {name: torch.zeros(shape) for name, shape in shapes.items()}
        return read_start(Path(self.start), shapes)

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        return squeezed(functional.linear(x.flatten(1), params["weight"], params.get("bias")))

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict by one batched product."""
        return squeezed(stacked_linear(x.flatten(2), params["weight"], params.get("bias")))


@register_model("additive")
@dataclass(frozen=True)
class Additive(Model):
    """Linear predictions plus public curves of the columns, from zeros.

    Leaves "weight", "bias" and "curves", the coefficients of splines of each column and of products
    of two (`coterie.data.effects.curves`).

    Attributes:
        bias: Whether there are biases.
    """

    bias: bool = True

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return zeros."""
        made = len(curves(spec.features).names)
        check_parameters((spec.outputs, spec.features + made))
        found = Linear(bias=self.bias).init(spec, rng)
        return {**found, "curves": torch.zeros(spec.outputs, made)}

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        rows = x.flatten(1)
        made = curves(rows.shape[1])(rows).to(rows.dtype)
        straight = functional.linear(rows, params["weight"], params.get("bias"))
        return squeezed(straight + functional.linear(made, params["curves"]))


def is_linear(model: Model) -> bool:
    """Return whether a model is linear, with or without curves."""
    return isinstance(model, Linear | Additive)


def plain(model: Model) -> Model:
    """Return the model without curves."""
    return Linear(bias=model.bias) if isinstance(model, Additive) else model


@register_model("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Fully connected layers on the flattened row, initialised like `torch.nn.Linear`.

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

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        return dense(params, x.flatten(1), functional.linear, _ACTIVATIONS[self.activation])

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict by one batched product per layer."""
        return dense(params, x.flatten(2), stacked_linear, _ACTIVATIONS[self.activation])


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
    """Return initial fully connected layers of these widths; the last is called "head"."""
    check_parameters(*zip(widths, (inputs, *widths), strict=False))
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


def check_parameters(*shapes: tuple[int, ...]) -> None:
    """Raise ValueError if a model of these layers is too large, before memory is taken."""
    count = sum(math.prod(shape) for shape in shapes)
    if count > MOST_PARAMETERS:
        raise ValueError(
            f"the model of a client has {count:,} parameters; expected at most "
            f"{MOST_PARAMETERS:,}: use fewer or narrower layers, or fewer features"
        )


def check_widths(name: str, widths: tuple[int, ...]) -> None:
    """Raise ValueError on widths below 1."""
    if any(width < 1 for width in widths):
        raise ValueError(f"{name}: given {widths}; expected whole numbers of at least 1")


def save_start(path: str | Path, params: Tree) -> None:
    """Write public weights for `Linear(start=...)`."""
    with Path(path).open("wb") as file:  # an open file, or NumPy would add a suffix to the name
        np.savez(file, **{name: leaf.detach().cpu().numpy() for name, leaf in params.items()})  # type: ignore[arg-type]


def read_start(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return public weights of these names and shapes.

    Raises:
        ValueError: If the file is missing, or holds something else.
    """
    try:
        found = os.stat(path)
        arrays = _arrays(str(path), found.st_mtime_ns, found.st_size)
    except FileNotFoundError:
        raise ValueError(
            f"start = {str(path)!r}: no such file; restore the public weights, or remove start"
        ) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"start = {str(path)!r}: could not be read ({error}); expected an npz of arrays: write "
            "it with save_start"
        ) from error
    given = {name: array.shape for name, array in arrays.items()}
    if given != dict(shapes):
        raise ValueError(
            f"start = {str(path)!r}: given {given}; expected {dict(shapes)}: use the "
            "features and classes of the public weights"
        )
    odd = [
        n for n, array in arrays.items() if array.dtype.kind != "f" or not np.isfinite(array).all()
    ]
    if odd:
        raise ValueError(
            f"start = {str(path)!r}: {odd[0]!r} holds values that are not finite floating-point "
            "numbers; write the file again"
        )
    return {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in shapes}


@lru_cache(maxsize=8)
def _arrays(path: str, changed: int, size: int) -> dict[str, NDArray[Any]]:
    # Models are initialised often; a file is read again only if it has changed. Opened here because
    # np.load does not always close its own handle if the file is not an npz.
    with Path(path).open("rb") as file:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise ValueError("the file holds one array without a name")
        return {name: found[name] for name in found.files}


def slice_of(head: Tree, directions: int) -> Tree:
    """Return the first columns of a (stacked) head's weights, and its biases."""
    return {**head, "weight": head["weight"][..., :directions]}


def put_slice(head: Tree, part: Tree) -> Tree:
    """Return a head with these values in its slice."""
    directions = part["weight"].shape[-1]
    rest = head["weight"][..., directions:].to(part["weight"].device)
    return {**part, "weight": torch.cat([part["weight"], rest], dim=-1)}


def slice_variances(spec: Spec, bias: bool, directions: int, variance: float) -> Tensor:
    """Return prior variances of weights and bias, (outputs, p) float64: zero outside the slice."""
    variances = torch.full((spec.outputs, spec.features + bias), variance, dtype=torch.float64)
    variances[:, directions : spec.features] = 0.0
    return variances


def matrix_of(head: Tree) -> Tensor:
    """Return weights and, as the last column, biases of a (stacked) head in one float64 matrix.

    >>> matrix_of({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}).tolist()
    [[1.0, 1.0, 0.0]]
    """
    columns = [head["weight"]] + ([head["bias"][..., None]] if "bias" in head else [])
    return torch.cat(columns, dim=-1).double()


def head_of(matrix: Tensor, bias: bool) -> Tree:
    """Return the head of a matrix from `matrix_of`, in float32."""
    single = matrix.float()
    if not bias:
        return {"weight": single}
    return {"weight": single[..., :-1].contiguous(), "bias": single[..., -1].contiguous()}


def check_directions(directions: int, spec: Spec) -> None:
    """Refuse more directions than there are features."""
    if not 0 <= directions <= spec.features:
        raise ValueError(
            f"directions = {directions}: the rows have {spec.features} features; use a number from "
            f"0 (only the biases) to {spec.features}"
        )
