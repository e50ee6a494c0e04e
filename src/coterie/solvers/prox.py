"""Shrinking the models of all clients together: proximal operators of matrix norms.

W is stacked, one client a row: (m, d). The trace norm is the sum of its singular values, the l2,1
norm the sum over features of the l2 norm of a column (that feature's weights over clients). Both
operators are linear in W once a second moment of the clients is known, W'W or its diagonal, so the
d x d map can be public while W is not:

    argmin_V 1/2 |V - W|_F^2 + t |V|_trace = W U diag(max(0, 1 - t / s_j)) U'
    argmin_V 1/2 |V - W|_F^2 + t |V|_2,1   = W diag(max(0, 1 - t / |W_:j|))

with W'W = U diag(s^2) U'. Everything is computed in float64.
"""

import math

import torch
from torch import Tensor


def shrink_spectrum(weight: Tensor, threshold: float) -> Tensor:
    """Apply the proximal operator of `threshold` times the trace norm.

    The singular values come from a Gram matrix of the smaller side: the result is wrong by about
    1e-16 s^2 / threshold, s the largest of them, and never by more than the threshold.

    Args:
        weight: Stacked models, (m, d); if one number is not finite, all of the result is NaN.
        threshold: How much is taken off every singular value, >= 0.

    Returns:
        Shrunk models, (m, d), float64.

    >>> shrink_spectrum(torch.diag(torch.tensor([3.0, 1.0, 0.5])), 1.0).diagonal()
    tensor([2., 0., 0.], dtype=torch.float64)
    """
    weight = _matrix(weight)
    if weight.shape[0] < weight.shape[1]:
        return spectrum_map(weight @ weight.mT, threshold) @ weight
    return weight @ spectrum_map(weight.mT @ weight, threshold)


def shrink_groups(weight: Tensor, threshold: float) -> Tensor:
    """Apply the proximal operator of `threshold` times the l2,1 norm, by features.

    Args:
        weight: Stacked models, (m, d); a number that is not finite makes its feature NaN.
        threshold: How much is taken off the norm of every feature, >= 0.

    Returns:
        Shrunk models, (m, d), float64.

    >>> shrink_groups(torch.tensor([[3.0, 0.0], [4.0, 1.0]]), 2.5)
    tensor([[1.5000, 0.0000],
            [2.0000, 0.0000]], dtype=torch.float64)
    """
    weight = _matrix(weight)
    # Scaled by the largest entry: squares of tiny or huge weights leave the range of float64.
    top = weight.abs().amax(dim=0) if len(weight) else weight.new_zeros(weight.shape[1])
    safe = torch.where(top > 0, top, 1.0)
    return weight * _factors(top * (weight / safe).norm(dim=0), threshold)


def spectrum_map(gram: Tensor, threshold: float) -> Tensor:
    """Return the linear map that shrinks the spectrum of models with this second moment.

    Args:
        gram: W'W, (d, d), perhaps with noise; its symmetric part counts, and eigenvalues below 0
            count as 0, so that their directions are removed. If one number is not finite, all of
            the map is NaN.
        threshold: How much is taken off every singular value, >= 0; at 0 nothing is.

    Returns:
        The symmetric map M, (d, d), float64, that takes models W to W M.
    """
    gram = _matrix(gram)
    if gram.shape[0] != gram.shape[1]:
        raise ValueError(
            f"gram: given shape {tuple(gram.shape)}; expected a square second moment W'W"
        )
    if not bool(gram.isfinite().all()):
        _check(threshold)
        return torch.full_like(gram, torch.nan)
    squares, directions = torch.linalg.eigh((gram + gram.mT) / 2)
    shrunk: Tensor = (directions * group_scale(squares, threshold)) @ directions.mT
    return shrunk


def group_scale(squares: Tensor, threshold: float) -> Tensor:
    """Return the factors that shrink groups with these squared norms.

    Args:
        squares: The diagonal of W'W, (d,), perhaps with noise; what is below 0 counts as 0, so
            that its group is removed. NaN stays NaN.
        threshold: How much is taken off every norm, >= 0; at 0 nothing is.

    Returns:
        Factors from 0 to 1, (d,), float64.

    >>> group_scale(torch.tensor([4.0, 1.0, -3.0]), 1.0)
    tensor([0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """
    return _factors(squares.double().clamp_min(0).sqrt(), threshold)


def _factors(norms: Tensor, threshold: float) -> Tensor:
    _check(threshold)
    if threshold == 0:
        return torch.where(norms.isnan(), norms, torch.ones_like(norms))
    kept = norms > threshold
    factors = torch.where(kept, 1 - threshold / torch.where(kept, norms, 1.0), 0.0)
    return torch.where(norms.isnan(), norms, factors)


def _check(threshold: float) -> None:
    if not 0 <= threshold < math.inf:
        raise ValueError(f"threshold: given {threshold}; expected a finite number >= 0")


def _matrix(given: Tensor) -> Tensor:
    if given.dim() != 2:
        raise ValueError(
            f"given shape {tuple(given.shape)}; expected a matrix: flatten stacked models to "
            "(clients, features) first"
        )
    return given.double()
