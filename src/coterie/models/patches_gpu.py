"""The adjoint of unfolding patches on a GPU, in Triton: every entry is read once.

Imported only on a GPU. `usable` compares with torch before the first use of a size of patches on a
device. Tests: tests/models/test_patches.py, without a GPU in Triton's interpreter.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
_LARGEST = 64  # entries of a patch, each of them a line of the kernel
Fold = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


class _Kind(NamedTuple):
    tall: int
    broad: int
    dtype: torch.dtype
    device: torch.device


_CHECKED: dict[_Kind, bool] = {}


def usable(columns: Tensor, sides: Sequence[int], plain: Fold) -> bool:
    """Return whether the kernel computes what `plain` does; compile and compare at first use."""
    tall, broad = sides
    known = (torch.float32, torch.bfloat16)
    if tall * broad > _LARGEST or columns.dtype not in known or not columns.is_contiguous():
        return False
    kind = _Kind(tall, broad, columns.dtype, columns.device)
    if kind not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[kind] = _agrees(kind, plain)
    return _CHECKED[kind]


def _agrees(kind: _Kind, plain: Fold) -> bool:
    shape = (2, 3, kind.tall + 2, kind.broad + 4, 7)
    draws = torch.Generator().manual_seed(0)
    # Small whole numbers, whose sums are exact.
    columns = torch.randint(-2, 3, (2, 3 * kind.tall * kind.broad, 3 * 5 * 7), generator=draws)
    columns = columns.to(kind.device, kind.dtype)
    sides = (kind.tall, kind.broad)
    try:
        if torch.equal(fold(columns, shape, sides), plain(columns, shape, sides)):
            return True
        why = "its sums differ from those of torch"
    except Exception as error:  # no compiler, an old GPU: torch computes the same
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"patches are folded by torch on {kind.device}: {why}", stacklevel=2)
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
