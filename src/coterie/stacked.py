"""Layers of many clients at once, each client with weights of its own: batched matrix products.

Images travel as (clients, channels, height, width, rows). With the rows last a patch is a run of
width * rows neighbours in memory, so unfolding is a plain strided copy, one matrix product a
client is the whole convolution, and its output already has the layout of the next layer.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map rows (c, n, in) by weights (c, out, in) and biases (c, out) to (c, n, out)."""
    x, weight, bias = _lowered(x, weight, bias)
    mapped: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return mapped


def _lowered(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    # Under autocast all three in its type, here: inside our own functions torch would lower the
    # products of the way there, and find two types on the way back.
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def rows_last(x: Tensor) -> Tensor:
    """Turn images (c, n, H, W) or (c, n, C, H, W) into (c, C, H, W, n)."""
    with_channels = x[:, :, None] if x.dim() == 4 else x
    return with_channels.permute(0, 2, 3, 4, 1).contiguous()


def pad(x: Tensor, width: int) -> Tensor:
    """Put zeros around images (c, C, H, W, n), `width` pixels on each side."""
    return functional.pad(x, (0, 0, width, width, width, width)) if width else x


def convolve(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Convolve, rectify and take maxima over windows of `pool` x `pool`.

    Args:
        x: Images, (c, C, H, W, n), contiguous.
        weight: Filters of each client, (c, O, C, k, k); stride 1, no padding (see `pad`).
        bias: Per client, (c, O).
        pool: Side of the windows; what does not fill a window is dropped.

    Returns:
        (c, O, (H - k + 1) // pool, (W - k + 1) // pool, n).
    """
    x, weight, bias = _lowered(x, weight, bias)
    pooled: Tensor = _Convolve.apply(x, weight, bias, pool)  # type: ignore[no-untyped-call]
    return pooled


class _Linear(torch.autograd.Function):
    # Autograd through baddbmm gives the weights' gradient transposed in memory, which makes every
    # later sum with the weights slow.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None, :], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        bias_grad = grad.sum(dim=1) if ctx.needs_input_grad[2] else None
        return x_grad, torch.bmm(grad.mT, x), bias_grad


class _Convolve(torch.autograd.Function):
    # Autograd through unfold, product, maximum and rectifier makes twice the traffic: it keeps
    # the unpooled images and always folds the gradient back, which the first layer never needs.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
        kernel = weight.shape[-1]
        columns = _columns(x, kernel)
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
        columns = _columns(x, weight.shape[-1]) if ctx.columns is None else ctx.columns
        grad = torch.ops.aten.threshold_backward(grad, pooled, 0)
        images = _spread(grad, beats, ctx.image_shape, ctx.pool).flatten(2)
        weight_grad = torch.bmm(images, columns.mT).reshape(weight.shape)
        bias_grad = grad.sum(dim=(2, 3, 4))
        x_grad = None
        if ctx.needs_input_grad[0]:
            # Into the memory of the columns: fresh memory of that size is as slow as the product.
            torch.bmm(weight.flatten(2).mT, images, out=columns)
            ctx.columns = None
            x_grad = _fold(columns, x.shape, weight.shape[-1])
        return x_grad, weight_grad, bias_grad, None


def _columns(x: Tensor, kernel: int) -> Tensor:
    # (c, C, H, W, n) -> (c, C k k, H' W' n), the patches as columns.
    clients, channels, height, width, rows = x.shape
    by_client, by_channel, down, along, by_row = x.stride()
    patches = x.as_strided(
        (clients, channels, kernel, kernel, height - kernel + 1, width - kernel + 1, rows),
        (by_client, by_channel, down, along, down, along, by_row),
    )
    return patches.reshape(clients, channels * kernel * kernel, -1)


def _fold(columns: Tensor, shape: tuple[int, ...], kernel: int) -> Tensor:
    # The adjoint of _columns: first along the width, then down the height, 2 k sums instead of k k.
    clients, channels, height, width, rows = shape
    down, along = height - kernel + 1, width - kernel + 1
    patches = columns.reshape(clients, channels, kernel, kernel, down, along, rows)
    strips = columns.new_zeros(clients, channels, kernel, down, width, rows)
    for offset in range(kernel):
        strips[:, :, :, :, offset : offset + along] += patches[:, :, :, offset]
    folded = columns.new_zeros(shape)
    for offset in range(kernel):
        folded[:, :, offset : offset + down] += strips[:, :, offset]
    return folded


def _maxima(images: Tensor, pool: int) -> tuple[Tensor, list[Tensor]]:
    # With what _spread needs to know. The first of equal pixels wins, as in torch.nn.MaxPool2d.
    if _has_one_kernel(images):
        found = functional.max_pool3d(images, (pool, pool, 1), return_indices=True)
        return found[0], [found[1]]
    # Pixel by pixel of the window; beats[j] is 1 where pixel j + 1 exceeds all before it.
    first, *others = _pixels(images, pool)
    best, beats = first, []
    for pixel in others:
        # A mask of numbers: products with booleans are not vectorised.
        beats.append(torch.gt(pixel, best, out=torch.empty_like(best)))
        best = torch.maximum(best, pixel)
    return (best.clone() if best is first else best), beats


def _spread(grad: Tensor, beats: list[Tensor], shape: tuple[int, ...], pool: int) -> Tensor:
    # The adjoint of _maxima: the last pixel that beat all before it takes the gradient.
    if _has_one_kernel(grad):
        flat = grad.new_zeros(*shape[:2], math.prod(shape[2:]))
        return flat.scatter_(2, beats[0].flatten(2), grad.flatten(2)).reshape(shape)
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
    # On a GPU one launch for all pixels pays; on the CPU that code is not vectorised.
    return images.is_cuda


def _pixels(images: Tensor, pool: int) -> list[Tensor]:
    # Views (c, C, H // pool, W // pool, n), one for each place in a window.
    high, wide = images.shape[2] // pool, images.shape[3] // pool
    return [
        images[:, :, down : high * pool : pool, along : wide * pool : pool]
        for down in range(pool)
        for along in range(pool)
    ]
