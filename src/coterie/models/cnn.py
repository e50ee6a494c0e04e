"""Convolutional networks of many clients, without a loop over them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie import stacked
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Spec
from coterie.models.base import Model, register_model
from coterie.models.dense import check_widths, dense, dense_layers, start_layer

# Numbers in the unfolded patches of one piece of work that keeps nothing for a gradient.
_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}


@register_model("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Convolutions, each rectified and pooled, then fully connected layers.

    The default on 28 x 28 images with 62 classes is PMTL's network for FEMNIST (115,646 numbers).
    Rows are images (H, W) or (C, H, W). Leaves: "conv1.weight", "conv1.bias", ..., then as in
    `MLP`, and started as `torch.nn.Conv2d` and `torch.nn.Linear` start.

    Attributes:
        channels: Filters of each convolution.
        kernel: Side of the filters.
        pool: Side of the windows of maxima after each convolution; 1 for none.
        hidden: Widths of rectified layers between the convolutions and the outputs.
        padding: Zeros on each side of what a convolution is given; (kernel - 1) / 2 keeps its size.
    """

    # Two clients' patches fill a core's cache, and a stack that is a multiple of the threads keeps
    # all of them busy in a batched product.
    clients_per_thread: ClassVar[int] = 2

    channels: tuple[int, ...] = (32, 64)
    kernel: int = 5
    pool: int = 2
    hidden: tuple[int, ...] = ()
    padding: int = 0

    def __post_init__(self) -> None:
        if not self.channels:
            raise ValueError("channels: given none; expected at least one convolution, or use MLP")
        check_widths("channels", self.channels)
        check_widths("hidden", self.hidden)
        check_widths("kernel, pool", (self.kernel, self.pool))
        if not 0 <= self.padding < self.kernel:
            raise ValueError(
                f"padding: given {self.padding}; expected a whole number from 0 to "
                f"{self.kernel - 1}, below the side of the filters"
            )

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw weights and biases uniformly within 1 / sqrt(inputs).

        Raises:
            ValueError: If rows are no images, or too small for the layers.
        """
        channels, sides = self._sides(spec.shape)
        params: dict[str, Tensor] = {}
        for layer, filters in enumerate(self.channels, 1):
            shape = (filters, channels, self.kernel, self.kernel)
            params |= start_layer(f"conv{layer}", shape, rng)
            channels = filters
        height, width = sides[-1]
        return params | dense_layers(channels * height * width, (*self.hidden, spec.outputs), rng)

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        images = x[:, None] if x.dim() == 3 else x
        for weight, bias in self._filters(params):
            images = functional.relu(functional.conv2d(images, weight, bias, padding=self.padding))
            images = functional.max_pool2d(images, self.pool)
        return dense(params, images.flatten(1), functional.linear, functional.relu)

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
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
            images = stacked.convolve(stacked.pad(images, self.padding), weight, bias, self.pool)
        # Rows first again: products with few columns are several times slower.
        rows = images.flatten(1, 3).mT.contiguous()
        return dense(params, rows, stacked.linear, functional.relu)

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
                max(side + 2 * self.padding - self.kernel + 1, 0) // self.pool
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
            side = max(1, side * self.pool + self.kernel - 1 - 2 * self.padding)
        return side
