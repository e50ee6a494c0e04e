"""Local steps on a GPU, in Triton: what takes torch several launches, or passes over memory.

`move` is the update of `SGD` for a list of leaves,

    v <- momentum v + g + lam (w - anchor),  w <- w - lr v

with `lam` one number or one per entry; without momentum v is not kept. `weighted_losses` sums each
client's cross-entropies, and has their gradient from the same pass, in float64: a small kernel in
place of eight. `row_norms` returns the norm of each client's model over all leaves.

Imported only on a GPU. `checked` compares with torch before the first use on a device. Every number
is a function of one client's numbers. Tests: tests/solvers/test_sgd.py, without a GPU in Triton's
interpreter.
"""

import itertools
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024
_LEAVES = 16  # of a launch
_LONG = 1 << 13  # numbers of a client that are read at once
_TILE = 1 << 13  # scores of a client
_CHECKED: dict[torch.device, bool] = {}


def usable(leaves: Sequence[Tensor]) -> bool:
    """Return whether the kernels take these leaves; compile and compare at first use."""
    if any(leaf.dtype != torch.float32 or not leaf.is_contiguous() for leaf in leaves):
        return False
    return checked(leaves[0].device)


def checked(device: torch.device) -> bool:
    """Return whether the kernels compute what torch computes on a device."""
    if device not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[device] = _agrees(device)
    return _CHECKED[device]


def _agrees(device: torch.device) -> bool:
    try:
        wrong = [name for name, same in _CHECKS.items() if not same(device)]
        if not wrong:
            return True
        why = f"numbers differ from those of torch: {', '.join(wrong)}"
    except Exception as error:  # no compiler, an old GPU: torch computes the same
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"local steps are not fused on {device}: {why}", stacklevel=2)
    return False


def _moves(device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(0)
    sizes = ((3, 700), (3, 5), (3, 2000))
    w, g, v, a, lam = (
        [torch.rand(size, generator=draws).to(device) for size in sizes] for _ in range(5)
    )
    for anchors in (a, [leaf[:1] for leaf in a]):
        offsets = torch._foreach_mul(torch._foreach_sub(w, anchors), lam)
        wanted = torch._foreach_add(torch._foreach_add(torch._foreach_mul(v, 0.9), g), offsets)
        wanted += torch._foreach_sub(w, torch._foreach_mul(wanted, 0.5))
        move(w, g, v, anchors, lam, lr=0.5, lam=0.0, momentum=0.9)
        pairs = zip([*v, *w], wanted, strict=True)
        if not all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in pairs):
            return False
    return True


def _compares(device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(1)
    after = [torch.rand(size, generator=draws).to(device) for size in ((4, 2, 9000), (4, 7))]
    before = [leaf[:1].expand_as(leaf) / 2 for leaf in after]
    before[0] = after[0][0].expand_as(after[0])
    after[1][1], after[1][2] = 500.0, torch.nan
    norms, grown = compare(after, before, 2.0)
    wanted = torch.cat([leaf.flatten(1).double() for leaf in after], dim=1).norm(dim=1).float()
    alike = torch.allclose(norms, wanted, rtol=1e-5, equal_nan=True)
    return alike and grown.tolist() == [False, True, True, False]


def _loses(device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(2)
    scores = 20 * torch.randn(4, 5, 9, generator=draws)
    labels, share = torch.randint(0, 9, (4, 5), generator=draws), torch.rand(4, 5, generator=draws)
    scores[3, 2, 1] = torch.nan
    found = []
    for plain in (True, False):
        given = (scores.double() if plain else scores.to(device)).requires_grad_()
        y, weights = labels.to(given.device), share.to(given)
        with torch.enable_grad():
            if plain:
                losses = torch.nn.functional.cross_entropy(given.mT, y, reduction="none")
                sums = (losses * weights).sum(dim=1)
            else:
                sums = _Losses.apply(given, y, weights)
            (grad,) = torch.autograd.grad(sums[:3].sum(), given)
        found.append((sums.detach().cpu().double(), grad[:3].cpu().double()))
    close = partial(torch.allclose, rtol=1e-6, atol=1e-7, equal_nan=True)
    return all(map(close, *found))


_CHECKS = {"steps": _moves, "growth": _compares, "losses": _loses}


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
    one = bool(anchors) and len(anchors[0]) == 1 < len(leaves[0])  # for all clients
    has = {"MOVES": bool(velocities), "PULLS": bool(anchors), "WEIGHS": bool(weights), "ONE": one}
    for first in range(0, len(leaves), _LEAVES):
        some = slice(first, first + _LEAVES)
        mine = tuple(leaf.detach() for leaf in leaves[some])
        # A missing list is not read: any pointers will do.
        lists = [tuple(part[some]) or mine for part in (velocities, anchors, weights)]
        sizes = tuple(leaf.numel() for leaf in mine)
        ends, wide = _ends(sizes), tuple(leaf.numel() // max(1, len(leaf)) for leaf in mine)
        given: tuple[Any, ...] = (mine, tuple(g.contiguous() for g in grads[some]), *lists)
        if ends[-1]:
            with torch.cuda.device_of(mine[0]):
                _move[(ends[-1],)](
                    *given,
                    sizes,
                    ends,
                    wide,
                    lr,
                    lam,
                    momentum,
                    COUNT=len(mine),
                    BLOCK=_BLOCK,
                    **has,
                )


@triton.jit
def _move(
    leaves, grads, velocities, anchors, weights, sizes, ends, wide, lr, lam, momentum,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
    MOVES: tl.constexpr, PULLS: tl.constexpr, WEIGHS: tl.constexpr, ONE: tl.constexpr,
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
                there = at
                if ONE:  # the same place in a row that all clients have in common
                    there = ((block - begin).to(tl.int64) * BLOCK) % wide[leaf] + tl.arange(
                        0, BLOCK
                    )
                    if wide[leaf] < BLOCK:
                        there = there % wide[leaf]
                    else:
                        there = tl.where(there < wide[leaf], there, there - wide[leaf])
                offset = w - tl.load(anchors[leaf] + there, mask=ok)
                if WEIGHS:
                    step += offset * tl.load(weights[leaf] + at, mask=ok)
                else:
                    step += offset * lam
            if MOVES:
                step += tl.load(velocities[leaf] + at, mask=ok) * momentum
                tl.store(velocities[leaf] + at, step, mask=ok)
            tl.store(leaves[leaf] + at, w - step * lr, mask=ok)
        begin = ends[leaf]


def compare(after: Sequence[Tensor], before: Sequence[Tensor], far: float) -> tuple[Tensor, Tensor]:
    """Return the norm of each client's row over all stacked leaves, and whether it has grown.

    It has if it is above `far` times that of `before`, and `far` / 2 more, or is not a number.
    `before` may be one row that is expanded to all clients.
    """
    clients = len(after[0])
    norms = after[0].new_empty(clients)
    grown = torch.empty(clients, dtype=torch.bool, device=norms.device)
    wide = tuple(leaf.numel() // clients for leaf in after)
    with torch.cuda.device_of(norms):
        _compare[(clients,)](
            tuple(after), tuple(before), wide, tuple(leaf.stride(0) for leaf in before), norms,
            grown, far, COUNT=len(after), TRIPS=triton.cdiv(max(wide), _LONG), BLOCK=_LONG,
            num_warps=16,
        )  # fmt: skip
    return norms, grown


@triton.jit
def _compare(
    after, before, wide, steps, norms, grown, far,
    COUNT: tl.constexpr, TRIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    ours, theirs = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for leaf in tl.static_range(COUNT):
        for trip in range(TRIPS):
            at = trip * BLOCK + tl.arange(0, BLOCK)
            ok = at < wide[leaf]
            x = tl.load(after[leaf] + client * wide[leaf] + at, mask=ok, other=0.0)
            y = tl.load(before[leaf] + client * steps[leaf] + at, mask=ok, other=0.0)
            ours += x * x
            theirs += y * y
    size = tl.sqrt(tl.sum(ours, axis=0))
    tl.store(norms + client, size)
    within = size <= far * tl.sqrt(tl.sum(theirs, axis=0)) + far / 2
    tl.store(grown + client, within == 0)  # NaN too


def weighted_losses(scores: Tensor, labels: Tensor, share: Tensor) -> Tensor | None:
    """Return each client's sum of cross-entropies (c, n, ways) times `share`; None if too large.

    A client's sum is NaN, and so is its gradient, where a score is NaN.
    """
    rows, ways = scores.shape[1:]
    tile = triton.next_power_of_2(rows) * triton.next_power_of_2(ways)
    if tile > _TILE or not scores.numel() or labels.dtype != torch.int64:
        return None
    found: Tensor = _Losses.apply(scores, labels, share)
    return found


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        scores, (clients, rows, ways) = scores.contiguous(), scores.shape
        sums, grads = scores.new_empty(clients), torch.empty_like(scores)
        with torch.cuda.device_of(scores):
            _entropies[(clients,)](
                scores, labels.contiguous(), share.contiguous(), sums, grads, rows, ways,
                ROWS=triton.next_power_of_2(rows), WAYS=triton.next_power_of_2(ways),
            )  # fmt: skip
        ctx.save_for_backward(grads)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:
        (grads,) = ctx.saved_tensors
        return grads * given[:, None, None], None, None


@triton.jit
def _entropies(
    scores, labels, share, sums, grads, rows, ways, ROWS: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    n, k = tl.arange(0, ROWS), tl.arange(0, WAYS)
    real, inside = n < rows, (n < rows)[:, None] & (k < ways)[None, :]
    at = (client * rows + n)[:, None] * ways + k[None, :]
    z = tl.load(scores + at, mask=inside, other=float("-inf")).to(tl.float64)
    label = tl.load(labels + client * rows + n, mask=real, other=0)
    weight = tl.load(share + client * rows + n, mask=real, other=0.0).to(tl.float64)
    top = tl.max(z, axis=1)
    parts = tl.exp(z - top[:, None])
    total = tl.sum(parts, axis=1)
    hit = k[None, :] == label[:, None]
    loss = tl.log(total) + top - tl.sum(tl.where(hit, z, 0.0), axis=1)
    slope = (parts / total[:, None] - tl.where(hit, 1.0, 0.0)) * weight[:, None]
    tl.store(grads + at, slope.to(tl.float32), mask=inside)
    tl.store(sums + client, tl.sum(tl.where(real, loss * weight, 0.0), axis=0).to(tl.float32))
