"""Layers of many clients at once, each client with its own weights.

`stacked_linear` and `convolve` are batched products; on CUDA, chains of convolutions run in kernels
made for their shapes (see `convolve_gpu`). Images are (clients, channels, height, width,
rows): with rows last a patch is a run of width * rows neighbours in memory, so unfolding is a plain
strided copy, one matrix product per client is the whole convolution, and its output already has the
layout of the next layer.

`REPLACED` maps torch layers that cannot be stacked over clients to replacements, which keep their
parameters, names and settings:

- dropout: a hash of the client's seed, of the number of earlier draws in this pass and of the
  position decides whether an entry is kept. A client's mask does not depend on the other clients
  in the stack; without a seed nothing is dropped;
- linear layers and convolutions: the same function, by kernels that are fast for a stack, with
  gradients in the memory layout of the weights;
- GroupNorm: torch's fails on the memory layout of a stack;
- embeddings: rows are float32; integers among them are rounded for the lookup. An index outside the
  table becomes NaN on every device, so the client's loss is NaN, which is detected. torch's own
  lookup in a stack would read the table of the next client;
- PReLU: its weight takes the type of its input, also under bfloat16;
- recurrent layers and attention: explicit loops and products. torch's are single library calls,
  which know no stack of weights and draw their own dropout.

On a GPU (`on_gpu`) a stack of convolutions with stride 1 is a product with patches, an LSTM or GRU
runs in kernels of its own (see `recurrent_gpu`), and an nn.Sequential inside a module computes its
blocks of convolution, ReLU and maxima as the convolutional models do. `stacked_by` puts such a
function of a stack beside the function of one client, which defines it.

`chain_of` takes an nn.Sequential of simple layers apart, because the bookkeeping of
`torch.func.vmap` costs more than the products of a small network. A chain with any other layer, a
hook, or fixed parameters is not taken apart.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from coterie.core.tree import Tree
from coterie.models import patches

# SplitMix64 (Steele, Lea, Flood 2014), as signed words, and the multipliers of a 32-bit finaliser
# ("lowbias32", Wellons 2018).
_GOLDEN = -0x61C8864680B583EB
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHORT = (0x7FEB352D, -0x7B935975)
_SPREAD = -0x61C88647
# Entries in the patches of a client's images, up to which products of a stack beat a loop.
_FEW = 1 << 16
# Lookups of a stack times the size of a table, up to which the gradient is a product.
_FEW_LOOKUPS = 1 << 26
# SELU of minus infinity, the value of a dropped entry (Klambauer et al. 2017).
_LOWEST = -1.7580993408473766


class DropoutStream:
    """The random stream of dropout: a seed per client, and the number of draws in this pass."""

    def __init__(self) -> None:
        self._seed: Tensor | None = None
        self._draws = 0

    def restart(self, seed: Tensor | None) -> None:
        """Begin a pass with the client's seed, (c,) for a stack, or without dropout."""
        self._seed, self._draws = seed, 0

    def kept(self, like: Tensor, shape: tuple[int, ...], share: float) -> Tensor | None:
        """Return a mask, 1 for kept and 0 for dropped entries; None if nothing is dropped.

        `shape` is that of one client's entries; for a stack the mask is (c, *shape).
        """
        if self._seed is None or share <= 0:
            return None
        self._draws += 1
        if share >= 1:
            return like.new_zeros(shape)
        key = _mixed(self._seed + _wrapped(self._draws * _GOLDEN))[..., None]
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


def dropped(
    x: Tensor, share: float, stream: DropoutStream, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Return entries after dropout, the kept ones scaled up; a mask of `shape` is broadcast."""
    kept = stream.kept(x, tuple(x.shape) if shape is None else shape, share)
    return x if kept is None else x * (kept / max(1 - share, 1e-12))


def _dropped_alike(x: Tensor, share: float, kept: Tensor | None) -> Tensor:
    # Dropped entries become SELU's lowest value; mean and variance are kept.
    if kept is None:
        return x
    if share >= 1:
        return x * kept
    scale = ((1 - share) * (1 + share * _LOWEST**2)) ** -0.5
    made: Tensor = scale * (x * kept + _LOWEST * (1 - kept) - share * _LOWEST)
    return made


def _by_channel(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[:2]) + (1,) * (x.dim() - 2)


# Forward passes of the replacements, by `REPLACED`; `layer` is a torch layer of the same settings.


def _dropout(layer: Any, input: Tensor) -> Tensor:
    return dropped(input, layer.p, layer._stream)


def _channel_dropout(layer: Any, input: Tensor) -> Tensor:
    return dropped(input, layer.p, layer._stream, _by_channel(input))


def _alpha_dropout(layer: Any, input: Tensor) -> Tensor:
    kept = layer._stream.kept(input, tuple(input.shape), layer.p)
    return _dropped_alike(input, layer.p, kept)


def _channel_alpha_dropout(layer: Any, input: Tensor) -> Tensor:
    kept = layer._stream.kept(input, _by_channel(input), layer.p)
    return _dropped_alike(input, layer.p, kept)


def _embedding(layer: Any, input: Tensor) -> Tensor:
    if layer.lookups is not None:
        layer.lookups.append(input)
    one = partial(_looked_up, layer.padding_idx)
    if not on_gpu(input):
        return one(input, layer.weight)
    many = partial(_looked_up_by_product, layer.padding_idx)
    found: Tensor = stacked_by(one, many, input, layer.weight)
    return found


def _looked_up(padding: int | None, input: Tensor, table: Tensor) -> Tensor:
    index, outside = indices_in(input, len(table))
    with torch._C.DisableTorchFunction():  # a lookup in bounds, which a trial allows
        found = functional.embedding(index, table)
    found = found.masked_fill(outside[..., None], float("nan"))
    if padding is None:
        return found
    # Without gradient there, which torch ignores in a stack.
    return torch.where((index == padding)[..., None], found.detach(), found)


def _looked_up_by_product(padding: int | None, input: Tensor, tables: Tensor) -> Tensor | None:
    # For a stack. torch sorts all indices for the gradient.
    if input.numel() * tables.shape[1] > _FEW_LOOKUPS:
        return None
    index, outside = indices_in(input, tables.shape[1])
    still = outside if padding is None else outside | (index == padding)
    made: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        index.flatten(1), index.masked_fill(still, -1).flatten(1), tables
    )
    made = made.reshape(*index.shape, tables.shape[2])
    return made.masked_fill(outside[..., None], float("nan"))


class _Lookup(torch.autograd.Function):
    # Rows of tables (c, size, width); those whose place is -1 have no gradient.

    @staticmethod
    def forward(ctx: Any, index: Tensor, places: Tensor, tables: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = tables.shape[1]
        return tables.gather(1, index[:, :, None].expand(-1, -1, tables.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        sizes = torch.arange(ctx.size, device=grad.device)
        hits = (places[:, None, :] == sizes[None, :, None]).to(grad.dtype)
        return None, None, torch.bmm(hits, grad)


def _embedding_bag(
    layer: Any,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    if layer.lookups is not None:
        layer.lookups.append(input)
    index, outside = indices_in(input, len(layer.weight))
    with torch._C.DisableTorchFunction():  # as in `_embedding`
        found = nn.EmbeddingBag.forward(layer, index, offsets, per_sample_weights)
    bad = outside.any(dim=-1, keepdim=True) if input.dim() == 2 else outside.any()
    return found.masked_fill(bad, float("nan"))


def indices_in(given: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return rounded indices below `size`, 0 where they are outside, and where that is."""
    whole = given.round() if given.is_floating_point() else given
    kept = whole.clamp(0, size - 1)
    outside = whole != kept  # NaN is not equal to itself
    return kept.masked_fill(outside, 0).long(), outside


def _group_norm(layer: Any, input: Tensor) -> Tensor:
    return nn.GroupNorm.forward(layer, input.contiguous())


def _prelu(layer: Any, input: Tensor) -> Tensor:
    return functional.prelu(input, layer.weight.to(input.dtype))


def _mapped(layer: Any, input: Tensor) -> Tensor:
    mapped: Tensor = _Products.apply(input, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
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
        mapped = stacked_linear(
            rows.reshape(clients, -1, rows.shape[-1]),
            _leading(weight, in_dims[1], clients),
            None if bias is None else _leading(bias, in_dims[2], clients),
        )
        return mapped.reshape(*rows.shape[:-1], mapped.shape[-1]), 0


def on_gpu(x: Tensor) -> bool:
    """Return whether a stack is computed by the ways of a GPU."""
    return not x.is_cpu


def stacked_by(one: Callable[..., Any], many: Callable[..., Any], *given: Tensor | None) -> Any:
    """Return a function of one client's tensors, in a stack by a faster one where that can.

    Args:
        one: The function of one client; any number of outputs.
        many: The same of a stack, with clients along the first axes; None if it cannot.
        given: The tensors.
    """
    return _StackedBy.apply(one, many, *given)  # type: ignore[no-untyped-call]


class _StackedBy(torch.autograd.Function):
    @staticmethod
    def forward(one: Any, many: Any, *given: Tensor | None) -> Any:
        return one(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.one, ctx.is_given = inputs[0], [part is not None for part in inputs[2:]]
        ctx.save_for_backward(*(part for part in inputs[2:] if part is not None))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        parts = [next(saved) if given else None for given in ctx.is_given]

        def one(*moved: Tensor) -> Any:
            left = iter(moved)
            pairs = zip(parts, needs, strict=True)
            return ctx.one(*(next(left) if moves else part for part, moves in pairs))

        moved = [part for part, moves in zip(parts, needs, strict=True) if moves]
        made, pull = torch.func.vjp(one, *moved)[:2]
        found = iter(pull(grads if isinstance(made, tuple) else grads[0]))
        return None, None, *(next(found) if moves else None for moves in needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], one: Any, many: Any, *given: Any) -> Any:
        made = many(
            *(
                None if part is None else _leading(part, dim, info.batch_size)
                for part, dim in zip(given, in_dims[2:], strict=True)
            )
        )
        if made is None:
            made = torch.func.vmap(one, in_dims[2:])(*given)
        return made, (0,) * len(made) if isinstance(made, tuple) else 0


def _leading(x: Tensor, dim: int | None, clients: int) -> Tensor:
    return x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)


def _pooled(layer: Any, input: Tensor) -> Any:
    size = _side(layer)
    if not size or not on_gpu(input) or input.dim() != 4:
        return nn.MaxPool2d.forward(layer, input)
    return stacked_by(
        lambda x: functional.max_pool2d(x, size), lambda x: patches.maxima(x, size), input
    )


def _in_order(layer: Any, input: Any) -> Any:
    # Blocks of a convolution, ReLU and maxima at once, where that is faster.
    left = list(layer)
    while left:
        count = 0
        if isinstance(input, Tensor) and on_gpu(input) and input.dim() == 4:
            count = _in_blocks(list(itertools.takewhile(_is_plain, left)))
        input = _through(left[:count], input) if count else left[0](input)
        left = left[count or 1 :]
    return input


def _through(layers: list[Any], x: Tensor) -> Any:
    settings = _settings(layers)

    def one(x: Tensor, *pairs: Tensor) -> Tensor:
        for place, (_, pool, padding) in enumerate(settings):
            weight, bias = pairs[2 * place : 2 * place + 2]
            x = functional.max_pool2d(functional.conv2d(x, weight, bias, padding=padding), pool)
            x = x.relu()
        return x

    def many(x: Tensor, *pairs: Tensor) -> Tensor | None:
        pixels = x.numel() // x.shape[2]
        for weight, (_, pool, _) in zip(pairs[::2], settings, strict=True):
            if pixels * weight[0, 0].numel() > patches.MOST:
                return None
            pixels //= pool * pool
        filters = zip(pairs[::2], pairs[1::2], settings, strict=True)
        blocks = [Block(weight, bias, *how) for weight, bias, (_, *how) in filters]
        return convolved(x, blocks)

    pairs = [part for layer, _, _ in settings for part in (layer.weight, layer.bias)]
    return stacked_by(one, many, x, *pairs)


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
    # torch computes a stack as one convolution with many groups. On the CPU this can be 30 times
    # slower than a loop over clients; small images are fastest as products with their patches.

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
        rows, filters = _leading(x, in_dims[0], clients), _leading(weight, in_dims[1], clients)
        shifts = None if bias is None else _leading(bias, in_dims[2], clients)
        if on_gpu(x):
            convolved = _by_kernels(rows, filters, shifts, how)
            if convolved is not None:
                return convolved, 0
            if _is_dense(rows, filters, how):
                rows, filters, shifts = _lowered(rows, filters, shifts)
                return patches.convolution(rows, filters, shifts, how[1]), 0
            return torch.func.vmap(plain, in_dims[:3])(x, weight, bias), 0
        few = rows[0].numel() * filters[0, 0, 0].numel() <= _FEW
        if rows.dim() == 5 and how[3] == 1 and few:
            return _unfolded(rows, filters, shifts, how), 0
        each: Any = [None] * clients if shifts is None else shifts.unbind()
        return torch.stack(list(map(plain, rows.unbind(), filters.unbind(), each))), 0


def _by_kernels(rows: Tensor, filters: Tensor, shifts: Tensor | None, how: Any) -> Tensor | None:
    # By kernels made for this shape, if there can be any.
    stride, padding, dilation, groups = how
    plain = {*stride, *dilation, groups} == {1} and rows.dim() == 5 and len({*padding}) == 1
    if not (plain and rows.is_cuda):
        return None
    from coterie.models.convolve_gpu import convolutions

    bias = filters.new_zeros(filters.shape[:2]) if shifts is None else shifts
    return convolutions(rows, [Block(filters, bias, 1, padding[0])], relu=False)


def _is_dense(rows: Tensor, filters: Tensor, how: Any) -> bool:
    # Whether patches and batched products compute it, in one or two dimensions.
    stride, _, dilation, groups = how
    plain = {*stride, *dilation, groups} == {1} and rows.dim() in (4, 5)
    return plain and patches.entries(rows, filters) <= patches.MOST


def _unfolded(rows: Tensor, filters: Tensor, shifts: Tensor | None, how: Any) -> Tensor:
    # The image shifted to each position of the filter, and one product per client. torch's `unfold`
    # wakes its threads for every image.
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
    columns = torch.stack(seen, dim=2)
    flat = columns.reshape(len(rows), -1, columns[0, 0, 0].numel())
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


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map rows (c, n, in) by weights (c, out, in) and biases (c, out) to (c, n, out)."""
    low = x.is_cuda and torch.is_autocast_enabled(x.device.type)
    if low and _few_rows(x.float(), weight) is not None:
        x = x.float()  # faster in float32 than factors that are converted first
    else:
        x, weight, bias = _lowered(x, weight, bias)
    mapped: Tensor = _StackedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return mapped


def _lowered(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    # Under autocast convert all three here: inside custom functions torch would lower the products
    # of the forward pass, and find two types in the backward pass.
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def rows_last(x: Tensor) -> Tensor:
    """Return images (c, n, H, W) or (c, n, C, H, W) as (c, C, H, W, n)."""
    with_channels = x[:, :, None] if x.dim() == 4 else x
    return with_channels.permute(0, 2, 3, 4, 1).contiguous()


def pad_images(x: Tensor, width: int) -> Tensor:
    """Pad images (c, C, H, W, n) with `width` zeros on each side."""
    return functional.pad(x, (0, 0, width, width, width, width)) if width else x


def convolve(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Convolve, rectify and take maxima over windows of `pool` x `pool`; drop incomplete windows.

    From images (c, C, H, W, n), contiguous, and filters (c, O, C, k, k), stride 1, no padding (see
    `pad_images`), to (c, O, (H - k + 1) // pool, (W - k + 1) // pool, n).
    """
    x, weight, bias = _lowered(x, weight, bias)
    pooled: Tensor = _Convolve.apply(x, weight, bias, pool)  # type: ignore[no-untyped-call]
    return pooled


class Block(NamedTuple):
    """A convolution with stride 1, rectified, and maxima over windows, of a stack.

    Attributes:
        weight: Filters (c, O, C, k, k).
        bias: Biases (c, O).
        pool: Side of the windows; incomplete ones are dropped.
        padding: Zeros on each side of the images.
    """

    weight: Tensor
    bias: Tensor
    pool: int
    padding: int


def convolved(x: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return images (c, n, H, W) or (c, n, C, H, W) after blocks, (c, n, O, h, w)."""
    if x.is_cuda:
        from coterie.models.convolve_gpu import convolutions

        made = convolutions(x[:, :, None] if x.dim() == 4 else x, blocks)
        if made is not None:
            return made
    images = rows_last(x)
    for weight, bias, pool, padding in blocks:
        images = convolve(pad_images(images, padding), weight, bias, pool)
    # Rows first again: products with few columns are several times slower.
    return images.flatten(1, 3).mT.contiguous().reshape(*x.shape[:2], *images.shape[1:4])


class _StackedLinear(torch.autograd.Function):
    # Autograd through baddbmm returns the weights' gradient transposed in memory, which slows down
    # every later sum with the weights.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        kernels = _few_rows(x, weight)
        if kernels is not None:
            made: Tensor = kernels.forward(x, weight, bias)
            return made
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None, :], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        kernels = _few_rows(x, weight)
        if kernels is not None:
            found: tuple[Tensor | None, ...] = kernels.backward(grad, x, weight, needs[0], needs[2])
            return found
        x_grad = torch.bmm(grad, weight) if needs[0] else None
        bias_grad = grad.sum(dim=1) if needs[2] else None
        return x_grad, torch.bmm(grad.mT, x), bias_grad


def _few_rows(x: Tensor, weight: Tensor) -> Any:
    # Kernels for a batch of few rows.
    if not x.is_cuda:
        return None
    from coterie.models.linear_gpu import products

    return products(x, weight)


class _Convolve(torch.autograd.Function):
    # Autograd through unfold, product, maximum and rectifier needs twice the traffic: it keeps
    # the unpooled images and always folds the gradient back, also in the first layer.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
        kernel = weight.shape[-1]
        columns = patches.columns_of(x, (kernel, kernel))
        images = torch.baddbmm(bias[:, :, None], weight.flatten(2), columns)
        height, width = x.shape[2] - kernel + 1, x.shape[3] - kernel + 1
        images = images.reshape(*weight.shape[:2], height, width, x.shape[-1])
        pooled, beats = _maxima(images, pool)
        pooled = pooled.clamp_min_(0)
        ctx.save_for_backward(x, weight, pooled, *beats)
        ctx.columns, ctx.image_shape, ctx.pool = columns, images.shape, pool
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pooled, *beats = ctx.saved_tensors
        sides, columns = weight.shape[-2:], ctx.columns
        if columns is None:
            columns = patches.columns_of(x, sides)
        grad = torch.ops.aten.threshold_backward(grad, pooled, 0)
        images = _spread(grad, beats, ctx.image_shape, ctx.pool).flatten(2)
        weight_grad = torch.bmm(images, columns.mT).reshape(weight.shape)
        bias_grad = grad.sum(dim=(2, 3, 4))
        x_grad = None
        if ctx.needs_input_grad[0]:
            # Reuse the memory of the columns: allocating it is as slow as the product. Those of
            # 1 x 1 filters are the images themselves.
            own = columns if weight.shape[-1] > 1 else None
            folded = torch.bmm(weight.flatten(2).mT, images, out=own)
            ctx.columns = None
            x_grad = patches.fold(folded, x.shape, sides)
        return x_grad, weight_grad, bias_grad, None


def _maxima(images: Tensor, pool: int) -> tuple[Tensor, list[Tensor]]:
    # Maxima, and masks for _spread. The first of equal pixels wins, as in torch.nn.MaxPool2d.
    if _has_one_kernel(images):
        found, places = patches.maxima_of(images, pool)
        return found, [places]
    # Pixel by pixel of the window; beats[j] is 1 where pixel j + 1 exceeds all before it.
    first, *others = _pixels(images, pool)
    best, beats = first, []
    for pixel in others:
        # A float mask: products with booleans are not vectorised.
        beats.append(torch.gt(pixel, best, out=torch.empty_like(best)))
        best = torch.maximum(best, pixel)
    return (best.clone() if best is first else best), beats


def _spread(grad: Tensor, beats: list[Tensor], shape: tuple[int, ...], pool: int) -> Tensor:
    # The adjoint of _maxima: the last pixel that beat all before it takes the gradient.
    if _has_one_kernel(grad):
        return patches.spread(grad, beats[0], shape, pool)
    fills = shape[2] % pool == 0 and shape[3] % pool == 0
    images = grad.new_empty(shape) if fills else grad.new_zeros(shape)
    first, *others = _pixels(images, pool)
    rest = grad
    for pixel, beat in zip(reversed(others), reversed(beats), strict=True):
        taken = rest * beat
        pixel.copy_(taken)
        rest = rest - taken
    first.copy_(rest)
    return images


def _has_one_kernel(images: Tensor) -> bool:
    # On a GPU one launch for all pixels is faster; on the CPU that code is not vectorised.
    return images.is_cuda


def _pixels(images: Tensor, pool: int) -> list[Tensor]:
    # Views (c, C, H // pool, W // pool, n), one per position in a window.
    high, wide = images.shape[2] // pool, images.shape[3] // pool
    return [
        images[:, :, down : high * pool : pool, along : wide * pool : pool]
        for down in range(pool)
        for along in range(pool)
    ]


# (input term, recurrent term, last state) -> state; the first part of a state is the output.
Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _lstm(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    let_in, forget, new, let_out = (given + recalled).chunk(4, -1)
    kept = torch.sigmoid(forget) * state[1] + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(let_out) * torch.tanh(kept), kept


def _gru(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (reset, update, new), (by_reset, by_update, by_new) = given.chunk(3, -1), recalled.chunk(3, -1)
    fresh = torch.tanh(new + torch.sigmoid(reset + by_reset) * by_new)
    return (fresh + torch.sigmoid(update + by_update) * (state[0] - fresh),)


def _tanh(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(given + recalled),)


def _relu(given: Tensor, recalled: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (functional.relu(given + recalled),)


_CELLS: Mapping[str, Cell] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}
_IN_ONE = ("LSTM", "GRU")  # modes with a kernel for all time steps


def _run(layer: Any, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    # Over (time, rows, inputs), from states (layers x directions, rows, hidden); none for zeros.
    directions = 2 if layer.bidirectional else 1
    lasts: list[tuple[Tensor, ...]] = []
    for number in range(layer.num_layers):
        sides = []
        for direction in range(directions):
            state = tuple(part[number * directions + direction] for part in start)
            ending = f"l{number}" + "_reverse" * direction
            outputs, last = _run_one(layer, x, state, ending)
            sides.append(outputs)
            lasts.append(last)
        x = sides[0] if directions == 1 else torch.cat(sides, -1)
        if number < layer.num_layers - 1:
            x = dropped(x, layer.dropout, layer._stream)
    return x, tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))


def _run_one(
    layer: Any, x: Tensor, state: tuple[Tensor, ...], ending: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    names = (f"{part}_{ending}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    weights: list[Any] = [getattr(layer, name, None) for name in names]
    backwards = ending.endswith("_reverse")
    steps = partial(_steps, layer.mode, backwards)
    if on_gpu(x) and layer.mode in _IN_ONE:
        in_one = partial(_in_one, layer.mode, backwards)
        outputs, *rest = stacked_by(steps, in_one, x, *weights, *state)
    else:
        outputs, *rest = steps(x, *weights, *state)
    return outputs, (outputs[0 if backwards else -1], *rest)


def _steps(
    mode: str,
    backwards: bool,
    x: Tensor,
    weight: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    bias_hh: Tensor | None,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    # Outputs over (time, rows, inputs), and of an LSTM the last cells.
    if not state:
        zeros = x.new_zeros(x.shape[1], weight_hh.shape[1])
        state = (zeros, zeros) if mode == "LSTM" else (zeros,)
    given, outputs = functional.linear(x, weight, bias), []
    for now in reversed(given.unbind(0)) if backwards else given.unbind(0):
        state = _CELLS[mode](now, functional.linear(state[0], weight_hh, bias_hh), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), *state[1:]


def _in_one(mode: str, backwards: bool, *given: Tensor | None) -> tuple[Tensor, ...] | None:
    # `_steps` of a stack by the kernels of a GPU; None if there are none for these tensors.
    x, w, u, b, b2, *start = given
    assert x is not None and u is not None
    kernels, device = _recurrent_kernels(), x.device
    low = torch.is_autocast_enabled(device.type)
    if kernels is None or (low and torch.get_autocast_dtype(device.type) != torch.bfloat16):
        return None
    known = (torch.float32, torch.bfloat16) if low else (torch.float32,)
    if any(part is not None and part.dtype not in known for part in given):
        return None
    kind = kernels.Kind(mode, u.shape[-1], low, device)
    if not kernels.usable(kind, _steps):
        return None
    made: tuple[Tensor, ...] = kernels.recurrence(kind, backwards, x, [w, u, b, b2], tuple(start))
    return made


@cache
def _recurrent_kernels() -> Any:
    try:
        from coterie.models import recurrent_gpu
    except Exception as error:  # no Triton, or one that fails
        warnings.warn(f"recurrent layers run step by step on a GPU: {error}", stacklevel=2)
        return None
    return recurrent_gpu


def _sequence(layer: Any, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    if not isinstance(input, Tensor) or input.dim() != 3:
        shape = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(
            f"given {shape}; expected (rows, time, inputs) with batch_first=True, padded to one "
            "length (a packed sequence cannot be stacked over clients)"
        )
    x = input.transpose(0, 1) if layer.batch_first else input
    start = () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)
    outputs, last = _run(layer, x, start)
    outputs = outputs.transpose(0, 1) if layer.batch_first else outputs
    return outputs, last if layer.mode == "LSTM" else last[0]


def _one_step(layer: Any, input: Tensor, hx: Any = None) -> Any:
    mode = type(layer).__name__.removesuffix("Cell")
    mode = f"RNN_{layer.nonlinearity.upper()}" if mode == "RNN" else mode
    if hx is None:
        empty = input.new_zeros(*input.shape[:-1], layer.hidden_size)
        hx = (empty, empty) if mode == "LSTM" else empty
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    given = functional.linear(input, layer.weight_ih, layer.bias_ih)
    recalled = functional.linear(state[0], layer.weight_hh, layer.bias_hh)
    made = _CELLS[mode](given, recalled, state)
    return made if mode == "LSTM" else made[0]


def _attention(  # noqa: PLR0913, PLR0917 - the signature of torch
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if query.dim() != 3:
        raise ValueError(
            f"given {tuple(query.shape)}; expected (rows, time, {layer.embed_dim}) with "
            "batch_first=True"
        )
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True without attn_mask; expected both, as in torch")
    given = (query, key, value)
    if not layer.batch_first:
        given = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    asked, found, mixed = _projected(layer, *given)
    scores = asked @ found.mT / math.sqrt(layer.head_dim)
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(-1, layer.num_heads, *attn_mask.shape[1:])
        scores = _masked(scores, attn_mask)
    if key_padding_mask is not None:
        scores = _masked(scores, key_padding_mask[:, None, None, :])
    weights = dropped(scores.softmax(-1), layer.dropout, layer._stream)
    heads = (weights @ mixed).transpose(1, 2).flatten(2)
    outputs = functional.linear(heads, layer.out_proj.weight, layer.out_proj.bias)
    outputs = outputs if layer.batch_first else outputs.transpose(0, 1)
    if not need_weights:
        return outputs, None
    return outputs, weights.mean(dim=1) if average_attn_weights else weights


def _projected(layer: Any, *given: Tensor) -> tuple[Tensor, ...]:
    # Each (rows, heads, time, head dimension).
    weights: Any = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    if layer._qkv_same_embed_dim:
        weights = layer.in_proj_weight.chunk(3)
    biases: Any = (None, None, None)
    if layer.in_proj_bias is not None:
        biases = layer.in_proj_bias.chunk(3)
    made = map(functional.linear, given, weights, biases)
    return tuple(
        part.reshape(*part.shape[:-1], layer.num_heads, layer.head_dim).transpose(1, 2)
        for part in made
    )


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, float("-inf"))
    return scores + mask.to(scores.dtype)


_FORWARD: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.Dropout: _dropout,
    nn.Dropout1d: _channel_dropout,
    nn.Dropout2d: _channel_dropout,
    nn.Dropout3d: _channel_dropout,
    nn.AlphaDropout: _alpha_dropout,
    nn.FeatureAlphaDropout: _channel_alpha_dropout,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.GroupNorm: _group_norm,
    nn.PReLU: _prelu,
    nn.MaxPool2d: _pooled,
    nn.Sequential: _in_order,
    nn.Linear: _mapped,
    nn.LSTM: _sequence,
    nn.GRU: _sequence,
    nn.RNN: _sequence,
    nn.LSTMCell: _one_step,
    nn.GRUCell: _one_step,
    nn.RNNCell: _one_step,
    nn.MultiheadAttention: _attention,
}


def _replacement(kind: type[nn.Module], **members: Any) -> type[nn.Module]:
    # The same name, for messages. The lookups of an embedding are recorded in a trial.
    lookups = {"lookups": None} if kind in (nn.Embedding, nn.EmbeddingBag) else {}
    return cast(type[nn.Module], type(kind.__name__, (kind,), members | lookups))


REPLACED: Mapping[type[nn.Module], type[nn.Module]] = {
    **{kind: _replacement(kind, forward=forward) for kind, forward in _FORWARD.items()},
    **{
        kind: _replacement(kind, _conv_forward=_convolved)
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    },
}


# From stacked parameters and rows (c, n, ...) to the next rows.
Step = Callable[[Tree, Tensor], Tensor]
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def chain_of(module: nn.Module, leaves: Tree, stream: DropoutStream) -> list[Step] | None:
    """Return a module as steps; None if it is not a chain of known layers."""
    names = {id(given): name for name, given in module.named_parameters() if name in leaves}
    layers, steps = list(_links(module)), []
    while layers:
        count = _in_blocks(layers)
        taken, layers = layers[: count or 1], layers[count or 1 :]
        # A parameter may have two names in a layer.
        every = [layer.named_parameters(remove_duplicate=False) for layer in taken]
        owned = [{part: names.get(id(given)) for part, given in each} for each in every]
        if not all(map(_is_plain, taken)) or any(None in each.values() for each in owned):
            return None
        step = _blocks(taken, owned) if count else _step(taken[0], owned[0], stream)
        if step is None:
            return None
        steps.append(step)
    return steps


def _links(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is REPLACED[nn.Sequential] and _is_plain(module):
        for layer in cast(nn.Sequential, module):
            yield from _links(layer)
    else:
        yield module


def _is_plain(layer: nn.Module) -> bool:
    return "forward" not in vars(layer) and not any(getattr(layer, hooks) for hooks in _HOOKS)


def _step(layer: Any, names: dict[str, Any], stream: DropoutStream) -> Step | None:
    if type(layer) in _ELEMENTWISE:
        return lambda params, x: layer.forward(x)
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda params, x: x.flatten(2)
    if type(layer) is REPLACED[nn.Linear]:
        return _linear(names)
    if type(layer) is nn.LayerNorm:
        return _layer_norm(layer, names)
    if type(layer) is REPLACED[nn.Dropout]:
        share = cast(float, layer.p)
        return lambda params, x: dropped(x, share, stream, tuple(x.shape[1:]))
    return None


def _in_blocks(layers: Sequence[Any]) -> int:
    # How many of the first layers are blocks.
    count = 0
    while used := _block(layers[count : count + 3])[0]:
        count += used
    return count


def _block(layers: Sequence[Any]) -> tuple[int, int]:
    # How many of these layers are one block, and the side of its windows; 0 for none.
    kinds = [type(layer) for layer in layers]
    if kinds[:1] != [REPLACED[nn.Conv2d]] or not _is_simple(layers[0]):
        return 0, 1
    maxima = REPLACED[nn.MaxPool2d]
    if sorted(kinds[1:], key=lambda kind: kind is nn.ReLU) == [maxima, nn.ReLU]:
        side = _side(layers[1 if kinds[1] is maxima else 2])
        if side:
            return 3, side
    return (2, 1) if kinds[1:2] == [nn.ReLU] else (0, 1)


def _settings(layers: Sequence[Any]) -> list[tuple[Any, int, int]]:
    # Of blocks: the convolution, the side of windows and the padding.
    found, at = [], 0
    while at < len(layers):
        used, pool = _block(layers[at : at + 3])
        found.append((layers[at], pool, int(layers[at]._reversed_padding_repeated_twice[0])))
        at += used
    return found


def _is_simple(layer: Any) -> bool:
    # Square filters that move by one, within a border of zeros.
    usual = layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    high, wide = layer.kernel_size
    ends = set(layer._reversed_padding_repeated_twice)
    zeros = layer.padding_mode == "zeros" and len(ends) == 1 and max(ends) < high
    return usual and zeros and high == wide and layer.bias is not None


def _side(layer: Any) -> int:
    # Of windows side by side, without a border; 0 for others.
    sides = {
        given if isinstance(given, tuple) else (given, given)
        for given in (layer.kernel_size, layer.stride)
    }
    high, wide = next(iter(sides))
    others = layer.ceil_mode or layer.return_indices or layer.padding not in (0, (0, 0))
    plain = len(sides) == 1 and high == wide and layer.dilation in (1, (1, 1)) and not others
    return int(high) if plain else 0


def _blocks(layers: Sequence[Any], names: Sequence[dict[str, Any]]) -> Step:
    owners = dict(zip(map(id, layers), names, strict=True))
    settings = [
        (owners[id(layer)]["weight"], owners[id(layer)]["bias"], pool, padding)
        for layer, pool, padding in _settings(layers)
    ]

    def step(params: Tree, x: Tensor) -> Tensor:
        if x.is_cpu and not torch.is_grad_enabled():
            return _one_by_one(params, x, settings)
        blocks = [Block(params[weight], params[bias], *how) for weight, bias, *how in settings]
        return convolved(x, blocks)

    return step


def _one_by_one(params: Tree, x: Tensor, settings: Sequence[tuple[str, str, int, int]]) -> Tensor:
    # Many rows without gradients, whose patches would not fit the memory.
    images = list(x)
    for weight, bias, pool, padding in settings:
        given = zip(images, params[weight], params[bias], strict=True)
        made = [functional.conv2d(rows, w, b, padding=padding).relu() for rows, w, b in given]
        images = [functional.max_pool2d(rows, pool) for rows in made]
    return torch.stack(images)


def _linear(names: dict[str, str]) -> Step:
    weight, bias = names["weight"], names.get("bias")

    def step(params: Tree, x: Tensor) -> Tensor:
        rows = x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])
        made = stacked_linear(rows, params[weight], None if bias is None else params[bias])
        return made if x.dim() == 3 else made.reshape(*x.shape[:-1], made.shape[-1])

    return step


def _layer_norm(layer: nn.LayerNorm, names: dict[str, str]) -> Step:
    shape = list(layer.normalized_shape)

    def step(params: Tree, x: Tensor) -> Tensor:
        x = functional.layer_norm(x, shape, None, None, layer.eps)
        ones = [1] * (x.dim() - 1 - len(shape))
        if "weight" in names:
            x = x * params[names["weight"]].reshape(len(x), *ones, *shape)
        if "bias" in names:
            x = x + params[names["bias"]].reshape(len(x), *ones, *shape)
        return x

    return step
