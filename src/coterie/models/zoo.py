"""Convolutional networks, and the networks of the papers by name.

Hu, Wu and Smith, "Private Multi-Task Learning" (PMTL; sizes from their code), and Caldas et al.,
"LEAF: A Benchmark for Federated Settings" (and its code), which Wu, Chen and Wang use as well.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Spec
from coterie.models.base import Model, register_model
from coterie.models.layers import Block, convolved, stacked_linear
from coterie.models.linear import (
    Linear,
    check_parameters,
    check_widths,
    dense,
    dense_layers,
    start_layer,
)
from coterie.models.module import Networked

# Entries of the unfolded patches of one piece of work without gradients.
_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}


@register_model("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Convolutions, each rectified and pooled, then fully connected layers.

    The default on 28 x 28 images with 62 classes is PMTL's FEMNIST network (115,646 parameters).
    Rows are images (H, W) or (C, H, W). Leaves: "conv1.weight", "conv1.bias", ..., then as in
    `MLP`, and initialised like `torch.nn.Conv2d` and `torch.nn.Linear`.

    Attributes:
        channels: Filters of each convolution.
        kernel: Side of the filters.
        pool: Side of the windows of maxima after each convolution; 1 for none.
        hidden: Widths of rectified layers between the convolutions and the outputs.
        padding: Zeros on each side of the input of a convolution; (kernel - 1) / 2 keeps its size.
    """

    # Two clients' patches fill a core's cache, and a stack that is a multiple of the threads keeps
    # all threads busy in a batched product.
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
            ValueError: If rows are not images, or too small for the layers.
        """
        channels, sides = self._sides(spec.shape)
        depths, side = (channels, *self.channels), self.kernel
        shapes = [(out, given, side, side) for given, out in itertools.pairwise(depths)]
        check_parameters(*shapes)
        params: dict[str, Tensor] = {}
        for layer, shape in enumerate(shapes, 1):
            params |= start_layer(f"conv{layer}", shape, rng)
        height, width = sides[-1]
        return params | dense_layers(depths[-1] * height * width, (*self.hidden, spec.outputs), rng)

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        images = x[:, None] if x.dim() == 3 else x
        for weight, bias in self._filters(params):
            images = functional.relu(functional.conv2d(images, weight, bias, padding=self.padding))
            images = functional.max_pool2d(images, self.pool)
        return dense(params, images.flatten(1), functional.linear, functional.relu)

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict by one batched product per layer; without gradients, in bounded pieces."""
        if torch.is_grad_enabled():
            return self._forward(params, x)
        pieces = []
        for clients, rows in self._pieces(x):
            part = {name: leaf[clients] for name, leaf in params.items()}
            pieces.append([self._forward(part, x[clients, piece]) for piece in rows])
        return torch.cat([torch.cat(rows, dim=1) for rows in pieces])

    def _forward(self, params: Tree, x: Tensor) -> Tensor:
        how = self.pool, self.padding
        images = convolved(x, [Block(*pair, *how) for pair in self._filters(params)])
        return dense(params, images.flatten(2), stacked_linear, functional.relu)

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


def _expect_rows(name: str, spec: Spec, shapes: Sequence[tuple[int, ...]], what: str) -> None:
    if spec.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"{name}: rows of shape {spec.shape}; expected {wanted}, {what}: reshape the rows, or "
            "use cnn or mlp, which take other sizes"
        )


class _Femnist(CNN):
    """A `CNN` of images of 28 x 28, or flat rows as in LEAF's files."""

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw like `CNN`; rows must be images of 28 x 28, or their 784 pixels."""
        _expect_rows(self.kind, spec, ((28, 28), (1, 28, 28), (784,)), "grey images")
        return super().init(replace(spec, shape=(28, 28)), rng)

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        images = x.reshape(len(x), 28, 28) if x.dim() == 2 else x
        return super().apply(params, images, seed)

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict the rows of many clients like `CNN`."""
        images = x.reshape(*x.shape[:2], 28, 28) if x.dim() == 3 else x
        return super().apply_stacked(params, images, seeds)


@register_model("femnist_cnn")
@dataclass(frozen=True)
class FemnistCNN(_Femnist):
    """PMTL's network for FEMNIST: `CNN` with its defaults, 115,646 parameters for 62 classes."""


@register_model("femnist_leaf")
@dataclass(frozen=True)
class FemnistLeaf(_Femnist):
    """LEAF's network for FEMNIST: padded convolutions and a layer of 2048; 6,603,710 parameters."""

    hidden: tuple[int, ...] = (2048,)
    padding: int = 2


@register_model("tag_logistic")
@dataclass(frozen=True)
class TagLogistic(Linear):
    """PMTL's model for StackOverflow: linear scores of tags from a bag of words (10,000 to 500).

    Softmax over one tag where the task is multiclass, as in the paper; a logistic loss for each tag
    where it is multilabel.
    """

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start from zeros; the task must be one of tags."""
        if spec.task not in ("multiclass", "multilabel"):
            raise ValueError(
                f"tag_logistic: the task is {spec.task}; expected multiclass (one tag a post) or "
                "multilabel (any number of them): use linear"
            )
        return super().init(spec, rng)


@register_model("celeba_cnn")
@dataclass(frozen=True)
class CelebaCNN(Networked):
    """Four convolutions for CelebA, 84 x 84 x 3: conv 3 x 3, norm, maxima over 2 x 2, then linear.

    PMTL's has no activation between its blocks and drops incomplete windows (800 inputs of the
    linear layer with 32 filters); LEAF's keeps them and rectifies (1152). Both have BatchNorm,
    whose statistics over rows are not private: GroupNorm replaces it.

    Attributes:
        leaf: LEAF's variant.
        filters: Filters of each convolution.
        groups: Groups of the norm; must divide `filters`.
    """

    leaf: bool = False
    filters: int = 32
    groups: int = 2

    def __post_init__(self) -> None:
        check_widths("filters, groups", (self.filters, self.groups))
        if self.filters % self.groups:
            raise ValueError(
                f"groups: given {self.groups}; expected a divisor of the {self.filters} filters"
            )

    def build(self, spec: Spec) -> nn.Module:
        """Return the module; rows must be images of 84 x 84 in three colours."""
        shapes = ((3, 84, 84), (84, 84, 3))
        _expect_rows("celeba_cnn", spec, shapes, "images in three colours")
        layers: list[nn.Module] = [] if spec.shape[0] == 3 else [_ColoursFirst()]
        channels, side = 3, 84
        check_parameters(*[(9, self.filters, self.filters)] * 3)
        for _ in range(4):
            layers += [
                nn.Conv2d(channels, self.filters, 3, padding=1),
                nn.GroupNorm(self.groups, self.filters),
                nn.MaxPool2d(2, ceil_mode=self.leaf),
            ]
            layers += [nn.ReLU()] if self.leaf else []
            channels, side = self.filters, -(-side // 2) if self.leaf else side // 2
        head = nn.Linear(channels * side * side, spec.outputs)
        return nn.Sequential(*layers, nn.Flatten(), head)


class _ColoursFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


@register_model("char_lstm")
@dataclass(frozen=True)
class CharLSTM(Networked):
    """LEAF's network for Shakespeare: the next character after a text, by a recurrent network.

    Rows are character indices, 80 of them in LEAF; the last output of the second layer goes through
    a linear layer.

    Attributes:
        vocabulary: Characters that a row may hold; 0 for as many as there are classes.
        embedding: Dimension of the embedding of a character.
        hidden: Width of the recurrent layers.
        layers: Number of recurrent layers.
        dropout: Dropout rate between them.
    """

    vocabulary: int = 0
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_widths("embedding, hidden, layers", (self.embedding, self.hidden, self.layers))
        if self.vocabulary < 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"vocabulary, dropout: given {self.vocabulary}, {self.dropout}; expected a number "
                "of characters or 0, and a share from 0 to below 1"
            )

    def build(self, spec: Spec) -> nn.Module:
        """Return the module; rows must be texts of one length, as character indices."""
        if len(spec.shape) != 1 or spec.shape[0] < 1:
            raise ValueError(
                f"char_lstm: rows of shape {spec.shape}; expected (length,), the indices of the "
                "characters of a text: flatten the rows"
            )
        characters = self.vocabulary or spec.outputs
        if characters < 2:
            raise ValueError(
                f"char_lstm: {characters} characters for a {spec.task} task; expected at least 2: "
                "set vocabulary, such as 80"
            )
        width = self.hidden + max(self.embedding, self.hidden)
        check_parameters((characters, self.embedding), (self.layers, 4 * self.hidden, width))
        return _CharNet(self, characters, spec.outputs)


class _CharNet(nn.Module):
    def __init__(self, of: CharLSTM, characters: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, of.embedding)
        self.lstm = nn.LSTM(
            of.embedding,
            of.hidden,
            of.layers,
            batch_first=True,
            dropout=of.dropout if of.layers > 1 else 0.0,
        )
        self.head = nn.Linear(of.hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.lstm(self.embedding(x))[0][:, -1])
        return outputs
