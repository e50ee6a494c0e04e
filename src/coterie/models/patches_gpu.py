"""Sums of patches and maxima over windows on a GPU, in Triton: every entry is read once.

Imported only on a GPU. `usable` compares with torch before the first use of a size of patches or
windows on a device. Tests: tests/models/test_patches.py, without a GPU in Triton's interpreter.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
_LARGEST = 64  # entries of a patch, each of them a line of the kernel


# What a kernel is compiled for, and whether it is used.
_CHECKED: dict[tuple[object, ...], bool] = {}


def usable(x: Tensor, *sides: int, agrees: Callable[[Tensor], bool]) -> bool:
    """Return whether kernels compute patches or windows of x; compile and compare at first use.

    Args:
        x: Their input.
        sides: Two of a patch, or one of a window.
        agrees: Compares with torch, given an empty tensor like x.
    """
    known = (torch.float32, torch.bfloat16)
    if math.prod(sides) > _LARGEST or x.dtype not in known or not x.is_contiguous():
        return False
    key = (*sides, x.dtype, x.device)
    if key not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[key] = _compared(x, sides, agrees)
    return _CHECKED[key]


def _compared(x: Tensor, sides: tuple[int, ...], agrees: Callable[[Tensor], bool]) -> bool:
    try:
        if agrees(x.new_empty(0)):
            return True
        why = "their numbers differ from those of torch"
    except Exception as error:  # no compiler, an old GPU: torch computes the same
        why = f"{type(error).__name__}: {error}"
    what = "patches" if len(sides) == 2 else "windows"
    warnings.warn(f"no kernels for {what} of {sides} on {x.device}: {why}", stacklevel=3)
    return False


def fold(columns: Tensor, shape: Sequence[int], sides: Sequence[int]) -> Tensor:
    """Return images (c, C, H, W, n), each entry the sum of its entries in all patches."""
    clients, channels, height, width, rows = shape
    images = columns.new_empty(*shape)
    size = height * width * rows
    if images.numel():
        grid = (clients * channels, triton.cdiv(size, _BLOCK))
        with torch.cuda.device_of(columns):
            _fold[grid](columns, images, height, width, rows, size, *sides, BLOCK=_BLOCK)
    return images


def maxima(images: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    """Return maxima over windows of images (c, C, H, W, n), and their places in the windows."""
    clients, channels, height, width, rows = images.shape
    found = images.new_empty(clients, channels, height // pool, width // pool, rows)
    codes = torch.empty_like(found, dtype=torch.uint8)
    size = math.prod(found.shape[2:])
    if found.numel():
        grid = (clients * channels, triton.cdiv(size, _BLOCK))
        facts = (height * width * rows, width, found.shape[3], rows, size)
        with torch.cuda.device_of(images):
            _maxima[grid](images, found, codes, *facts, POOL=pool, BLOCK=_BLOCK)
    return found, codes


def spread(grad: Tensor, codes: Tensor, shape: Sequence[int], pool: int) -> Tensor:
    """Return images with the gradient of their maxima: the adjoint of `maxima`."""
    clients, channels, height, width, rows = shape
    images = grad.new_empty(*shape)
    size = height * width * rows
    if images.numel():
        grid = (clients * channels, triton.cdiv(size, _BLOCK))
        facts = (width, *grad.shape[2:4], rows, size)
        with torch.cuda.device_of(grad):
            _spread[grid](grad, codes, images, *facts, POOL=pool, BLOCK=_BLOCK)
    return images


@triton.jit
def _fold(
    columns, images, height, width, rows, size,
    TALL: tl.constexpr, BROAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    row, x, y = at % rows, (at // rows) % width, at // (rows * width)
    down, along = height - TALL + 1, width - BROAD + 1
    columns += plane * TALL * BROAD * down * along * rows
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TALL):
        for j in tl.static_range(BROAD):
            v, u = y - i, x - j
            inside = ok & (v >= 0) & (v < down) & (u >= 0) & (u < along)
            place = (((i * BROAD + j) * down + v) * along + u) * rows + row
            total += tl.load(columns + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(images + plane * size + at, total, mask=ok)


@triton.jit
def _maxima(
    images, found, codes, plane_size, width, along, rows, size,
    POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    row, x, y = at % rows, (at // rows) % along, at // (rows * along)
    images += plane * plane_size
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    code = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(POOL):
        for j in tl.static_range(POOL):
            place = ((y * POOL + i) * width + x * POOL + j) * rows + row
            value = tl.load(images + place, mask=ok, other=0.0).to(tl.float32)
            better = (value > best) | (value != value)  # noqa: PLR0124 - NaN
            best = tl.where(better, value, best)
            code = tl.where(better, i * POOL + j, code)
    tl.store(found + plane * size + at, best, mask=ok)
    tl.store(codes + plane * size + at, code.to(tl.uint8), mask=ok)


@triton.jit
def _spread(
    grad, codes, images, width, down, along, rows, size,
    POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, x, y = at % rows, (at // rows) % width, at // (rows * width)
    v, u = y // POOL, x // POOL
    inside = (at < size) & (v < down) & (u < along)
    place = plane * down * along * rows + (v * along + u) * rows + row
    code = tl.load(codes + place, mask=inside, other=255).to(tl.int32)
    value = tl.load(grad + place, mask=inside, other=0.0)
    mine = code == (y % POOL) * POOL + x % POOL
    tl.store(images + plane * size + at, tl.where(mine, value, 0.0), mask=at < size)
