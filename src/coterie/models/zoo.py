"""The networks of the papers, by name.

Hu, Wu and Smith, "Private Multi-Task Learning" (PMTL; sizes from their code), and Caldas et al.,
"LEAF: A Benchmark for Federated Settings" (and its code), which Wu, Chen and Wang use as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Spec
from coterie.models.base import register_model
from coterie.models.cnn import CNN
from coterie.models.dense import Linear, check_widths
from coterie.models.module import Networked


def _expect_rows(name: str, spec: Spec, shapes: Sequence[tuple[int, ...]], what: str) -> None:
    if spec.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"{name}: rows of shape {spec.shape}; expected {wanted}, {what}: reshape the rows, or "
            "use cnn or mlp, which take other sizes"
        )


class _Femnist(CNN):
    """A `CNN` of images of 28 x 28, which may come flat, as in LEAF's files."""

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw as `CNN` does; rows must be images of 28 x 28, or their 784 numbers."""
        _expect_rows(self.kind, spec, ((28, 28), (1, 28, 28), (784,)), "grey images")
        return super().init(replace(spec, shape=(28, 28)), rng)

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        images = x.reshape(len(x), 28, 28) if x.dim() == 2 else x
        return super().apply(params, images, coins)

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict the rows of many clients as `CNN` does."""
        images = x.reshape(*x.shape[:2], 28, 28) if x.dim() == 3 else x
        return super().apply_stacked(params, images, coins)


@register_model("femnist_cnn")
@dataclass(frozen=True)
class FemnistCNN(_Femnist):
    """PMTL's network for FEMNIST: `CNN` with its own defaults, 115,646 numbers for 62 classes."""


@register_model("femnist_leaf")
@dataclass(frozen=True)
class FemnistLeaf(_Femnist):
    """LEAF's network for FEMNIST: padded convolutions and a layer of 2048; 6,603,710 numbers."""

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

    PMTL's has nothing between its blocks and drops what fills no window (800 inputs of the linear
    layer with 32 filters); LEAF's keeps it and rectifies (1152). Both have BatchNorm, whose
    statistics over rows cannot be kept here: GroupNorm stands in its place.

    Attributes:
        leaf: LEAF's variant.
        filters: Of each convolution.
        groups: Of the norm; must divide `filters`.
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
        """Make the module; rows must be images of 84 x 84 in three colours."""
        shapes = ((3, 84, 84), (84, 84, 3))
        _expect_rows("celeba_cnn", spec, shapes, "images in three colours")
        layers: list[nn.Module] = [] if spec.shape[0] == 3 else [_ColoursFirst()]
        channels, side = 3, 84
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

    Rows are the numbers of characters, 80 of them in LEAF; the last output of the second layer goes
    through a linear layer.

    Attributes:
        vocabulary: Characters that a row may hold; 0 for as many as there are classes.
        embedding: Numbers that a character becomes.
        hidden: Width of the recurrent layers.
        layers: How many there are.
        dropout: Share dropped between them.
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
        """Make the module; rows must be texts of one length, as numbers of characters."""
        if len(spec.shape) != 1 or spec.shape[0] < 1:
            raise ValueError(
                f"char_lstm: rows of shape {spec.shape}; expected (length,), the numbers of the "
                "characters of a text: flatten the rows"
            )
        characters = self.vocabulary or spec.outputs
        if characters < 2:
            raise ValueError(
                f"char_lstm: {characters} characters for a {spec.task} task; expected at least 2: "
                "give their number, vocabulary = 80 say"
            )
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
