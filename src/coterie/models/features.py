"""The slice of a linear head that is shared: the weights of the first features, and the biases.

A frozen public map gives features in public order (the principal directions of public data), so "r
public directions" are the first r columns of a head. Only these are posted; the other columns stay
at the public start.
"""

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Spec


def slice_of(head: Tree, directions: int) -> Tree:
    """Return the first columns of a head's weights, and its biases; also of stacked heads."""
    return {**head, "weight": head["weight"][..., :directions]}


def put_slice(head: Tree, part: Tree) -> Tree:
    """Return a head with these values in its slice, and its own elsewhere."""
    directions = part["weight"].shape[-1]
    rest = head["weight"][..., directions:].to(part["weight"].device)
    return {**part, "weight": torch.cat([part["weight"], rest], dim=-1)}


def slice_variances(spec: Spec, bias: bool, directions: int, variance: float) -> Tensor:
    """Return prior variances of weights and bias, (outputs, p) float64: zero beside the slice."""
    variances = torch.full((spec.outputs, spec.features + bias), variance, dtype=torch.float64)
    variances[:, directions : spec.features] = 0.0
    return variances


def matrix_of(head: Tree) -> Tensor:
    """Return weights and, as the last column, biases in one matrix, float64; also of stacked heads.

    >>> matrix_of({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}).tolist()
    [[1.0, 1.0, 0.0]]
    """
    columns = [head["weight"]] + ([head["bias"][..., None]] if "bias" in head else [])
    return torch.cat(columns, dim=-1).double()


def head_of(matrix: Tensor, bias: bool) -> Tree:
    """Undo `matrix_of`, in float32."""
    single = matrix.float()
    if not bias:
        return {"weight": single}
    return {"weight": single[..., :-1].contiguous(), "bias": single[..., -1].contiguous()}


def check_directions(directions: int, spec: Spec) -> None:
    """Refuse more directions than there are features."""
    if not 0 <= directions <= spec.features:
        raise ValueError(
            f"directions = {directions}: the rows have {spec.features} features; use a number from "
            f"0 (the biases alone) to {spec.features}"
        )
