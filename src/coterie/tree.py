"""Trees: mappings of name to tensor, the one shape in which parameters travel.

*Stacked* means that every leaf leads with the client axis; one client is a stack of one, so a
method is written once. `clip_rows` is the only place in the project where a contribution is cut.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tree = Mapping[str, Tensor]


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


def add(left: Tree, right: Tree) -> Tree:
    """Add leaf by leaf (an unstacked tree broadcasts over a stacked one)."""
    return map_leaves(torch.add, left, right)


def subtract(left: Tree, right: Tree) -> Tree:
    """Subtract leaf by leaf (an unstacked tree broadcasts over a stacked one)."""
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
    clients = next(iter(rows.values())).shape[0]
    finite = torch.stack([_flat(leaf).isfinite().all(dim=1) for leaf in rows.values()]).all(dim=0)
    doubles = {
        name: torch.where(_column(finite, leaf), leaf, torch.zeros_like(leaf)).double()
        for name, leaf in rows.items()
    }
    # In units of the row's largest entry: squares of huge entries would overflow, and a factor
    # bound / norm can be so small that it has lost its digits.
    none = torch.zeros(clients, 1, dtype=torch.float64, device=finite.device)
    unit = none.squeeze(1).clamp_min(torch.finfo(torch.float64).tiny)
    for leaf in doubles.values():
        unit = torch.maximum(unit, torch.cat([_flat(leaf).abs(), none], dim=1).amax(dim=1))
    units = {name: leaf / _column(unit, leaf) for name, leaf in doubles.items()}
    squares = torch.stack([_flat(leaf).square().sum(dim=1) for leaf in units.values()]).sum(dim=0)
    numbers = sum(_flat(leaf).shape[1] for leaf in rows.values())
    # The computed norm may be low by a relative (numbers + a few) * 2^-53: raise it by more.
    relative = squares.sqrt() * (1 + (numbers + 16) * 2.0**-52)
    over = relative > bound / unit
    factor = bound / relative.clamp_min(torch.finfo(torch.float64).tiny)
    kept = torch.where(over, (factor / unit).clamp_max(1.0), torch.ones_like(unit))
    kept = torch.where(finite, kept, torch.zeros_like(kept))

    def clip(whole: Tensor, scaled: Tensor) -> Tensor:
        return torch.where(_column(over, whole), scaled * _column(factor, scaled), whole)

    return map_leaves(clip, doubles, units), kept


def _flat(leaf: Tensor) -> Tensor:
    return leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))


def _column(vector: Tensor, leaf: Tensor) -> Tensor:
    return vector.reshape(-1, *([1] * (leaf.dim() - 1)))
