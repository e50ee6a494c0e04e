"""Layers of torch that cannot be stacked over clients as they are, and what takes their place.

A layer keeps its parameters, their names and its settings; only what it computes is exchanged:

- dropout: whether a number is kept is a hash of the client's coin, of how many layers drew before
  in this pass, and of the number's place. A client's mask depends neither on who else is in the
  stack nor on the order or the size of the stack; without a coin nothing is dropped;
- linear layers and convolutions: the same function, by kernels that are fast for a stack;
- embeddings: rows are float32, whole numbers among them are rounded to look them up. A number that
  is not in the table becomes NaN, on every device alike: the client's loss then is no number, which
  is noticed, and the run of the others goes on. torch's own lookup of a stack would read the table
  of the next client there;
- PReLU: its weight is of the type of the numbers that it meets, also where they are of bfloat16.

Recurrent layers and attention are in `coterie.models.sequences`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie import stacked

# SplitMix64 (Steele, Lea, Flood 2014), as signed words, and the multipliers of a 32-bit finaliser
# ("lowbias32", Wellons 2018).
_GOLDEN = -0x61C8864680B583EB
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHORT = (0x7FEB352D, -0x7B935975)
_SPREAD = -0x61C88647
# Numbers in the patches of a client's images, up to which products of a stack beat a loop.
_FEW = 1 << 16
# What SELU makes of minus infinity: what a dropped number becomes (Klambauer et al. 2017).
_LOWEST = -1.7580993408473766


class Coins:
    """The coin of the client at work, and how many layers have drawn in this pass."""

    def __init__(self) -> None:
        self._word: Tensor | None = None
        self._draws = 0

    def toss(self, word: Tensor | None) -> None:
        """Begin a pass by the client's whole number, (c,) of a stack, or without draws."""
        self._word, self._draws = word, 0

    def kept(self, like: Tensor, shape: tuple[int, ...], share: float) -> Tensor | None:
        """Draw 1 for what is kept and 0 for what is dropped; None if nothing is to be dropped.

        `shape` is that of one client's numbers; of a stack, (c, *shape) are drawn.
        """
        if self._word is None or share <= 0:
            return None
        self._draws += 1
        if share >= 1:
            return like.new_zeros(shape)
        key = _mixed(self._word + _wrapped(self._draws * _GOLDEN))[..., None]
        places = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=like.device)
        words = places * _SPREAD + key.to(torch.int32)
        for by, factor in ((16, _SHORT[0]), (15, _SHORT[1])):
            words.bitwise_xor_((words >> by) & ((1 << (32 - by)) - 1)).mul_(factor)
            words.bitwise_xor_((key >> 32).to(torch.int32))
        words.bitwise_xor_((words >> 16) & 0xFFFF)
        least = min(round(share * 2**32), 2**32 - 1) - 2**31
        return (words >= least).to(like.dtype).reshape(*key.shape[:-1], *shape)


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _mixed(words: Tensor) -> Tensor:
    for by, factor in ((30, _MIX[0]), (27, _MIX[1])):
        words = (words ^ ((words >> by) & ((1 << (64 - by)) - 1))) * factor
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def dropped(x: Tensor, share: float, coins: Coins) -> Tensor:
    """Drop a share of the numbers, and scale the others up."""
    kept = coins.kept(x, tuple(x.shape), share)
    return x if kept is None else x * (kept / max(1 - share, 1e-12))


def _by_channel(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[:2]) + (1,) * (x.dim() - 2)


class Dropout(nn.Dropout):
    """Drops single numbers."""

    _coins: Coins

    def forward(self, input: Tensor) -> Tensor:
        """Drop by the client's coin."""
        return dropped(input, self.p, self._coins)


class ChannelDropout(nn.Dropout):
    """Drops whole channels, (rows, channels, ...)."""

    _coins: Coins

    def forward(self, input: Tensor) -> Tensor:
        """Drop by the client's coin."""
        kept = self._coins.kept(input, _by_channel(input), self.p)
        return input if kept is None else input * (kept / max(1 - self.p, 1e-12))


class AlphaDropout(nn.AlphaDropout):
    """Drops single numbers to SELU's lowest value, and keeps mean and variance."""

    _coins: Coins

    def forward(self, input: Tensor) -> Tensor:
        """Drop by the client's coin."""
        return _dropped_alike(input, self._coins.kept(input, tuple(input.shape), self.p), self.p)


class ChannelAlphaDropout(nn.FeatureAlphaDropout):
    """Drops whole channels to SELU's lowest value, and keeps mean and variance."""

    _coins: Coins

    def forward(self, input: Tensor) -> Tensor:
        """Drop by the client's coin."""
        return _dropped_alike(input, self._coins.kept(input, _by_channel(input), self.p), self.p)


def _dropped_alike(x: Tensor, kept: Tensor | None, share: float) -> Tensor:
    if kept is None:
        return x
    if share >= 1:
        return x * kept
    scale = ((1 - share) * (1 + share * _LOWEST**2)) ** -0.5
    made: Tensor = scale * (x * kept + _LOWEST * (1 - kept) - share * _LOWEST)
    return made


class Embedding(nn.Embedding):
    """Looks rows up by whole numbers that may come as floats.

    Attributes:
        lookups: What it was asked for, in a trial that wants to know; None otherwise.
    """

    lookups: list[Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Round to whole numbers and look them up; NaN for those that are not in the table."""
        if self.lookups is not None:
            self.lookups.append(input)
        index, outside = numbers_in(input, len(self.weight))
        with torch._C.DisableTorchFunction():  # a lookup in bounds, which a trial lets pass
            found = functional.embedding(index, self.weight)
        found = found.masked_fill(outside[..., None], float("nan"))
        if self.padding_idx is None:
            return found
        # Not trained there: in a stack torch forgets that.
        return torch.where((index == self.padding_idx)[..., None], found.detach(), found)


class EmbeddingBag(nn.EmbeddingBag):
    """Looks up and sums, by whole numbers that may come as floats.

    Attributes:
        lookups: As those of `Embedding`.
    """

    lookups: list[Tensor] | None = None

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Round to whole numbers; NaN for a bag with one that is not in the table."""
        if self.lookups is not None:
            self.lookups.append(input)
        index, outside = numbers_in(input, len(self.weight))
        with torch._C.DisableTorchFunction():  # as in `Embedding`
            found: Tensor = super().forward(index, offsets, per_sample_weights)
        bad = outside.any(dim=-1, keepdim=True) if input.dim() == 2 else outside.any()
        return found.masked_fill(bad, float("nan"))


def numbers_in(given: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Round to whole numbers from 0 to below `size`; also say which are not, and become 0."""
    whole = given.round() if given.is_floating_point() else given
    kept = whole.clamp(0, size - 1)
    outside = whole != kept  # NaN is not equal to itself
    return kept.masked_fill(outside, 0).long(), outside


class GroupNorm(nn.GroupNorm):
    """The same norm; torch's cannot look at the order of a stack's numbers in memory."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise every group of channels of a row."""
        return super().forward(input.contiguous())


class PReLU(nn.PReLU):
    """The same slopes; under autocast torch's stack cannot mix types."""

    def forward(self, input: Tensor) -> Tensor:
        """Scale what is below 0."""
        return functional.prelu(input, self.weight.to(input.dtype))


class Linear(nn.Linear):
    """The same products, by a kernel whose gradients lie in memory as the weights do."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the last axis."""
        mapped: Tensor = _Products.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return mapped


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
        given = x.flatten(0, -2) if x.dim() > 1 else x[None]
        given, weight = given.to(grad.dtype), weight.to(grad.dtype)
        bias_grad = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad @ weight, rows.mT @ given, bias_grad

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None and in_dims[2] is None:
            return functional.linear(x.movedim(in_dims[0], 0), weight, bias), 0
        clients = info.batch_size
        rows = _leading(x, in_dims[0], clients)
        mapped = stacked.linear(
            rows.reshape(clients, -1, rows.shape[-1]),
            _leading(weight, in_dims[1], clients),
            None if bias is None else _leading(bias, in_dims[2], clients),
        )
        return mapped.reshape(*rows.shape[:-1], mapped.shape[-1]), 0


def _leading(x: Tensor, dim: int | None, clients: int) -> Tensor:
    return x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)


class Conv1d(nn.Conv1d):
    """The same convolution, by what is fast for a stack."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolved(self, input, weight, bias)


class Conv2d(nn.Conv2d):
    """The same convolution, by what is fast for a stack."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolved(self, input, weight, bias)


class Conv3d(nn.Conv3d):
    """The same convolution, by what is fast for a stack."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolved(self, input, weight, bias)


def _convolved(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    ends = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        x = functional.pad(x, ends, mode=layer.padding_mode)
        padding = [0] * (x.dim() - 2)
    elif ends[0::2] != ends[1::2]:
        # "same" with an even kernel: one more at the far end.
        x, padding = functional.pad(x, ends), [0] * (x.dim() - 2)
    else:
        padding = ends[0::2][::-1]
    made: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, list(layer.stride), padding, list(layer.dilation), layer.groups
    )
    return made


class _Convolution(torch.autograd.Function):
    # torch makes one convolution of many groups of a stack. That is the way on a GPU; on the CPU it
    # is at times thirty times slower than one client after the other, and small images, where most
    # of the time goes into calls, are fastest as products with their patches.

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        return _plain(x, weight, bias, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.how = inputs[3:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)
        stride, padding, dilation, groups = ctx.how
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], stride, padding, dilation, False,
            [0] * len(stride), groups, list(ctx.needs_input_grad[:3]),
        )  # fmt: skip
        return (*found, None, None, None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Any, *how: Any
    ) -> tuple[Tensor, int]:
        def plain(*given: Any) -> Tensor:
            return _plain(given[0], given[1], given[2], how)

        clients = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:
            rows = x.movedim(in_dims[0], 0)
            made = plain(rows.flatten(0, 1), weight, bias)
            return made.reshape(clients, -1, *made.shape[1:]), 0
        if not x.is_cpu:
            return torch.func.vmap(plain, in_dims[:3])(x, weight, bias), 0
        rows, filters = _leading(x, in_dims[0], clients), _leading(weight, in_dims[1], clients)
        shifts = None if bias is None else _leading(bias, in_dims[2], clients)
        patches = rows[0].numel() * filters[0, 0, 0].numel()
        if rows.dim() == 5 and how[3] == 1 and patches <= _FEW:
            return _unfolded(rows, filters, shifts, how), 0
        each: Any = [None] * clients if shifts is None else shifts.unbind()
        return torch.stack(list(map(plain, rows.unbind(), filters.unbind(), each))), 0


def _unfolded(rows: Tensor, filters: Tensor, shifts: Tensor | None, how: Any) -> Tensor:
    # The images as they are seen from each place of the filters, and one product a client. torch's
    # own `unfold` wakes its threads for every single image.
    (down, along), (high, wide), (apart, aside), _ = how
    padded = functional.pad(rows, (wide, wide, high, high)).transpose(1, 2)
    tall, broad = filters.shape[-2:]
    height = (padded.shape[-2] - apart * (tall - 1) - 1) // down + 1
    width = (padded.shape[-1] - aside * (broad - 1) - 1) // along + 1
    seen = [
        padded[..., i : i + down * (height - 1) + 1 : down, j : j + along * (width - 1) + 1 : along]
        for i in range(0, apart * tall, apart)
        for j in range(0, aside * broad, aside)
    ]
    patches = torch.stack(seen, dim=2)
    flat = patches.reshape(len(rows), -1, patches[0, 0, 0].numel())
    made = filters.flatten(2) @ flat
    if shifts is not None:
        made = made + shifts[:, :, None]
    images = made.reshape(*made.shape[:2], rows.shape[1], height, width)
    return images.transpose(1, 2).contiguous()


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    stride, padding, dilation, groups = how
    return torch.convolution(
        x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
    )


REPLACED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: ChannelDropout,
    nn.Dropout2d: ChannelDropout,
    nn.Dropout3d: ChannelDropout,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: ChannelAlphaDropout,
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
    nn.GroupNorm: GroupNorm,
    nn.PReLU: PReLU,
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
