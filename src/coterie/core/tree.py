"""Trees: mappings of name to tensor, the one shape in which parameters travel.

*Stacked* means that every leaf leads with the client axis; one client is a stack of one, so a
method is written once. `clip_rows` is the only place in the project where a contribution is cut.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tree = Mapping[str, Tensor]
_SMALL = 1 << 18


def map_leaves(function: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply a function leaf by leaf to trees with the same names."""
    first = trees[0]
    for other in trees[1:]:
        if other.keys() != first.keys():
            raise ValueError(
                f"trees have different leaves: {sorted(first)} and {sorted(other)}; "
                "combine only trees made from one another"
            )
    return {name: function(*(tree[name] for tree in trees)) for name in first}


def map_arrays(arrays: Mapping[str, NDArray[Any]]) -> Tree:
    """Make a tree of NumPy arrays, without copying them."""
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def add(left: Tree, right: Tree) -> Tree:
    """Add leaf by leaf (an unstacked tree broadcasts over a stacked one)."""
    if _are_on_gpu(left, right):
        return _at_once(torch._foreach_add, left, right)
    return map_leaves(_add, left, right)


def _are_on_gpu(left: Tree, right: Tree) -> bool:
    leaves = (*left.values(), *right.values())
    return left.keys() == right.keys() and all(leaf.is_cuda for leaf in leaves)


def _at_once(function: Callable[..., Any], left: Tree, right: Tree) -> Tree:
    """Apply a function of lists of leaves: one launch, or one call, for all of them."""
    found = function(list(left.values()), [right[name] for name in left])
    return dict(zip(left, found, strict=True))


def _add(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type == "cpu" and left.numel() < _SMALL and not left.requires_grad:
        # NumPy, on one thread: waking torch's threads takes longer than a small sum.
        return torch.from_numpy(np.asarray(left.numpy() + right.numpy()))
    return torch.add(left, right)


def subtract(left: Tree, right: Tree) -> Tree:
    """Subtract leaf by leaf (an unstacked tree broadcasts over a stacked one)."""
    if _are_on_gpu(left, right):
        return _at_once(torch._foreach_sub, left, right)
    return map_leaves(torch.sub, left, right)


def scale(tree: Tree, factor: float) -> Tree:
    """Multiply every leaf by one number."""
    return map_leaves(lambda leaf: leaf * factor, tree)


def take(tree: Tree, ids: Tensor) -> Tree:
    """Pick rows of a stacked tree."""
    return map_leaves(lambda leaf: leaf[ids], tree)


def stack(tree: Tree, clients: int) -> Tree:
    """Repeat an unstacked tree for a number of clients, without sharing memory."""
    return map_leaves(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """Move every leaf to a device."""
    return map_leaves(lambda leaf: leaf.to(device), tree)


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor of the CPU to a device, without waiting for what the device still does."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def by_row(values: Tensor, leaf: Tensor) -> Tensor:
    """Return one number per client in a shape that broadcasts over a stacked leaf."""
    return values.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))


def where_rows(chosen: Tensor, left: Tree, right: Tree) -> Tree:
    """Return the left rows of the chosen clients, (c,) bool, and the right rows of the others."""
    return map_leaves(lambda a, b: torch.where(by_row(chosen, b), a, b), left, right)


def finite_or(after: Tree, before: Tree) -> Tree:
    """Let clients whose row is not finite in every leaf keep the one that they had."""
    good = [leaf.flatten(1).isfinite().all(dim=1) for leaf in after.values()]
    return where_rows(torch.stack(good).all(dim=0), after, before)


def size(tree: Tree) -> int:
    """Count the numbers of an unstacked tree."""
    return sum(leaf.numel() for leaf in tree.values())


def clip_rows(rows: Tree, bound: float) -> tuple[Tree, Tensor]:
    """Scale each client's row so that its l2 norm over all leaves is at most `bound`.

    Works and returns in float64: float32 norms of long vectors come out too small by up to 1e-4,
    and a "clipped" row then exceeds its bound. A row that holds a NaN or an infinity becomes zeros
    (nothing is rejected, so no count depends on data).

    Returns:
        The clipped rows, and the factor kept of each row (0 for a non-finite one), shape (c,).
    """
    flats = {name: _flat(leaf) for name, leaf in rows.items()}
    clients = next(iter(flats.values())).shape[0]
    largest = torch.zeros(clients, dtype=torch.float64, device=next(iter(flats.values())).device)
    for flat in flats.values():
        if flat.shape[1]:
            # The largest entry is NaN or infinite exactly if an entry of the row is.
            largest = torch.maximum(largest, flat.abs().amax(dim=1).double())
    finite = largest.isfinite()
    # float64 rows are measured in units of their largest entry: squares of huge entries would
    # overflow, and a factor bound / norm could be so small that it has lost its digits. Squares of
    # float32 numbers are ordinary float64 numbers.
    wide = any(leaf.dtype == torch.float64 for leaf in rows.values())
    tiny = torch.finfo(torch.float64).tiny
    unit = largest.clamp_min(tiny) if wide else torch.ones_like(largest)
    scaled = {
        name: flat.double() / unit[:, None] if wide else flat.double()
        for name, flat in flats.items()
    }
    squares = torch.stack([flat.square().sum(dim=1) for flat in scaled.values()]).sum(dim=0)
    numbers = sum(flat.shape[1] for flat in flats.values())
    # The computed norm may be low by a relative (numbers + a few) * 2^-53: raise it by more.
    relative = squares.sqrt() * (1 + (numbers + 16) * 2.0**-52)
    over = relative > bound / unit
    factor = torch.where(over, bound / relative.clamp_min(tiny), unit)
    kept = torch.where(finite, (factor / unit).clamp_max(1.0), torch.zeros_like(factor))
    clipped = {}
    for name, leaf in rows.items():
        cut = scaled[name] * factor[:, None]
        if wide:  # a row inside the bound stays as it was, to the last bit
            cut = torch.where(over[:, None], cut, flats[name].double())
        clipped[name] = cut.masked_fill_(~finite[:, None], 0.0).reshape(leaf.shape)
    return clipped, kept


def _flat(leaf: Tensor) -> Tensor:
    return leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
