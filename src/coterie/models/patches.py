"""Convolutions and maxima of a stack of clients, by batched products with patches, for GPUs.

torch computes a stack of convolutions as one with many groups, which is slow. Here every client's
images are (channels, height, width, rows): a patch is then a run of neighbours in memory, and one
product per client and layer is the whole convolution. Results are views in the usual order of axes,
so the next layer finds rows last without a copy.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Entries of the patches of a stack, above which the products need too much memory.
MOST = 1 << 29


def entries(x: Tensor, weight: Tensor) -> int:
    """Return about how many entries the patches of images (c, n, C, ...) have, without padding."""
    return x.numel() * math.prod(weight.shape[3:])


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int]) -> Tensor:
    """Convolve images (c, n, C, H, W) or (c, n, C, L) with filters of stride 1, each its own."""
    if x.dim() == 4:
        return convolution(x[:, :, :, None], weight[:, :, :, None], bias, [0, *padding])[:, :, :, 0]
    made: Tensor = _Convolution.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
    return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int]
    ) -> Tensor:
        images = _padded(x, padding)
        columns = columns_of(images, weight.shape[-2:])
        flat = weight.flatten(2)
        if bias is None:
            made = torch.bmm(flat, columns)
        else:
            made = torch.baddbmm(bias[:, :, None], flat, columns)
        ctx.save_for_backward(weight, columns)
        ctx.images, ctx.padding = images.shape, padding
        return _rows_second(made.reshape(*weight.shape[:2], *_sides(images, weight), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, columns = ctx.saved_tensors
        flat = _rows_last(grad).flatten(2)
        x_grad = None
        if ctx.needs_input_grad[0]:
            images = fold(torch.bmm(weight.flatten(2).mT, flat), ctx.images, weight.shape[-2:])
            high, wide = ctx.padding
            height, width = ctx.images[2:4]
            x_grad = _rows_second(images[:, :, high : height - high, wide : width - wide])
        return (
            x_grad,
            torch.bmm(flat, columns.mT).reshape(weight.shape),
            flat.sum(dim=2) if ctx.needs_input_grad[2] else None,
            None,
        )


def _rows_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 4, 1).contiguous()


def _rows_second(x: Tensor) -> Tensor:
    return x.permute(0, 4, 1, 2, 3)


def _padded(x: Tensor, padding: list[int]) -> Tensor:
    # (c, n, C, H, W) -> (c, C, H + 2 high, W + 2 wide, n), contiguous.
    if not any(padding):
        return _rows_last(x)
    (clients, rows, channels, height, width), (high, wide) = x.shape, padding
    made = x.new_zeros(clients, channels, height + 2 * high, width + 2 * wide, rows)
    made[:, :, high : high + height, wide : wide + width] = x.permute(0, 2, 3, 4, 1)
    return made


def _sides(images: Tensor, weight: Tensor) -> tuple[int, int]:
    tall, broad = weight.shape[-2:]
    return images.shape[2] - tall + 1, images.shape[3] - broad + 1


def columns_of(x: Tensor, sides: Sequence[int]) -> Tensor:
    """Return the patches of images (c, C, H, W, n) as columns (c, C tall broad, H' W' n)."""
    (clients, channels, height, width, rows), (tall, broad) = x.shape, sides
    by_client, by_channel, down, along, by_row = x.stride()
    patches = x.as_strided(
        (clients, channels, tall, broad, height - tall + 1, width - broad + 1, rows),
        (by_client, by_channel, down, along, down, along, by_row),
    )
    return patches.reshape(clients, channels * tall * broad, -1)


def fold(columns: Tensor, shape: Sequence[int], sides: Sequence[int]) -> Tensor:
    """Return images (c, C, H, W, n) with the sums of their patches: the adjoint of `columns_of`."""
    kernels = _kernels() if columns.is_cuda else None
    if kernels is not None and kernels.usable(
        columns, *sides, agrees=lambda like: folds_agree(kernels, sides, like)
    ):
        made: Tensor = kernels.fold(columns, shape, sides)
        return made
    return _fold(columns, shape, sides)


def folds_agree(kernels: Any, sides: Sequence[int], like: Tensor) -> bool:
    """Return whether sums of small whole numbers, which are exact, equal those of torch."""
    (tall, broad), draws = sides, torch.Generator().manual_seed(0)
    drawn = torch.randint(-2, 3, (2, 3 * tall * broad, 3 * 5 * 7), generator=draws)
    columns, shape = drawn.to(like), (2, 3, tall + 2, broad + 4, 7)
    return torch.equal(kernels.fold(columns, shape, sides), _fold(columns, shape, sides))


@cache
def _kernels() -> Any:
    try:
        from coterie.models import patches_gpu
    except Exception as error:  # no Triton, or one that fails
        warnings.warn(f"patches are folded by torch on a GPU: {error}", stacklevel=2)
        return None
    return patches_gpu


def _fold(columns: Tensor, shape: Sequence[int], sides: Sequence[int]) -> Tensor:
    # Along the width, then down the height: tall + broad sums.
    (clients, channels, height, width, rows), (tall, broad) = shape, sides
    down, along = height - tall + 1, width - broad + 1
    patches = columns.reshape(clients, channels, tall, broad, down, along, rows)
    strips = patches[:, :, :, 0]
    if broad > 1:
        strips = columns.new_zeros(clients, channels, tall, down, width, rows)
        for offset in range(broad):
            strips[:, :, :, :, offset : offset + along] += patches[:, :, :, offset]
    if tall == 1:
        return strips[:, :, 0]
    folded = columns.new_zeros(*shape)
    for offset in range(tall):
        folded[:, :, offset : offset + down] += strips[:, :, offset]
    return folded


def maxima(x: Tensor, pool: int) -> Tensor:
    """Return maxima over windows of images (c, n, C, H, W); drop incomplete windows."""
    made: Tensor = _Maxima.apply(x, pool)  # type: ignore[no-untyped-call]
    return made


class _Maxima(torch.autograd.Function):
    # torch's own needs images with rows first, so two copies here and two in the backward pass.

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: int) -> Tensor:
        images = _rows_last(x)
        found, places = maxima_of(images, pool)
        ctx.save_for_backward(places)
        ctx.images, ctx.pool = images.shape, pool
        return _rows_second(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return _rows_second(spread(_rows_last(grad), places, ctx.images, ctx.pool)), None


def maxima_of(images: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    """Return maxima over windows of images (c, C, H, W, n), and their places for `spread`."""
    kernels = _kernels() if images.is_cuda else None
    if kernels is not None and kernels.usable(
        images, pool, agrees=lambda like: maxima_agree(kernels, pool, like)
    ):
        made: tuple[Tensor, Tensor] = kernels.maxima(images, pool)
        return made
    found = functional.max_pool3d(images, (pool, pool, 1), return_indices=True)
    return found[0], found[1]


def spread(grad: Tensor, places: Tensor, shape: Sequence[int], pool: int) -> Tensor:
    """Return images with the gradient of their maxima: the adjoint of `maxima_of`."""
    if places.dtype == torch.uint8:
        made: Tensor = _kernels().spread(grad.contiguous(), places, shape, pool)
        return made
    flat = grad.new_zeros(*shape[:2], math.prod(shape[2:]))
    return flat.scatter_(2, places.flatten(2), grad.flatten(2)).reshape(shape)


def maxima_agree(kernels: Any, pool: int, like: Tensor) -> bool:
    """Return whether maxima of small whole numbers and their gradients equal those of torch."""
    draws, shape = torch.Generator().manual_seed(0), (2, 3, 2 * pool + 1, 3 * pool, 7)
    images = torch.randint(-2, 3, shape, generator=draws).to(like)
    found, codes = kernels.maxima(images, pool)
    wanted, places = functional.max_pool3d(images, (pool, pool, 1), return_indices=True)
    grad = torch.randint(1, 9, found.shape, generator=draws).to(like)
    sides = kernels.spread(grad, codes, shape, pool), spread(grad, places, shape, pool)
    return torch.equal(found, wanted) and torch.equal(*sides)
