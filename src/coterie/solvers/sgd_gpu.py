"""The update of `SGD` on a GPU, in Triton: one pass over memory for a list of leaves.

    v <- momentum v + g + lam (w - anchor),  w <- w - lr v

with `lam` one number or one per entry; without momentum v is not kept. torch reads and writes the
leaves once for each of up to five operations.

Imported only on a GPU. `usable` compares with torch before the first use on a device. Tests:
tests/solvers/test_sgd.py, without a GPU in Triton's interpreter.
"""

import itertools
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_LEAVES = 16  # of a launch
_CHECKED: dict[torch.device, bool] = {}


def usable(leaves: Sequence[Tensor]) -> bool:
    """Return whether the kernel updates these leaves; compile and compare at first use."""
    device = leaves[0].device
    if any(leaf.dtype != torch.float32 or not leaf.is_contiguous() for leaf in leaves):
        return False
    if device not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[device] = _agrees(device)
    return _CHECKED[device]


def _agrees(device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(0)
    sizes = ((3, 700), (3, 5))
    w, g, v, a, lam = (
        [torch.rand(size, generator=draws).to(device) for size in sizes] for _ in range(5)
    )
    offsets = torch._foreach_mul(torch._foreach_sub(w, a), lam)
    wanted = torch._foreach_add(torch._foreach_add(torch._foreach_mul(v, 0.9), g), offsets)
    wanted += torch._foreach_sub(w, torch._foreach_mul(wanted, 0.5))
    try:
        move(w, g, v, a, lam, lr=0.5, lam=0.0, momentum=0.9)
        pairs = zip([*v, *w], wanted, strict=True)
        if all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in pairs):
            return True
        why = "its numbers differ from those of torch"
    except Exception as error:  # no compiler, an old GPU: torch computes the same
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"local steps are not fused on {device}: {why}", stacklevel=2)
    return False


@cache
def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(-(-size // _BLOCK) for size in sizes))


def move(
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    anchors: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    lr: float,
    lam: float,
    momentum: float,
) -> None:
    """Update leaves, and velocities if there are any; arguments are those of a `Stack`."""
    has = {"MOVES": bool(velocities), "PULLS": bool(anchors), "WEIGHS": bool(weights)}
    for first in range(0, len(leaves), _LEAVES):
        some = slice(first, first + _LEAVES)
        mine = tuple(leaf.detach() for leaf in leaves[some])
        # A missing list is not read: any pointers will do.
        lists = [tuple(part[some]) or mine for part in (velocities, anchors, weights)]
        sizes = tuple(leaf.numel() for leaf in mine)
        ends = _ends(sizes)
        given: tuple[Any, ...] = (mine, tuple(g.contiguous() for g in grads[some]), *lists)
        if ends[-1]:
            with torch.cuda.device_of(mine[0]):
                _move[(ends[-1],)](
                    *given, sizes, ends, lr, lam, momentum, COUNT=len(mine), BLOCK=_BLOCK, **has
                )


@triton.jit
def _move(
    leaves, grads, velocities, anchors, weights, sizes, ends, lr, lam, momentum,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
    MOVES: tl.constexpr, PULLS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    begin = 0
    for leaf in tl.static_range(COUNT):
        if (block >= begin) & (block < ends[leaf]):
            at = (block - begin).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            ok = at < sizes[leaf]
            w = tl.load(leaves[leaf] + at, mask=ok)
            step = tl.load(grads[leaf] + at, mask=ok)
            if PULLS:
                offset = w - tl.load(anchors[leaf] + at, mask=ok)
                if WEIGHS:
                    step += offset * tl.load(weights[leaf] + at, mask=ok)
                else:
                    step += offset * lam
            if MOVES:
                step += tl.load(velocities[leaf] + at, mask=ok) * momentum
                tl.store(velocities[leaf] + at, step, mask=ok)
            tl.store(leaves[leaf] + at, w - step * lr, mask=ok)
        begin = ends[leaf]
