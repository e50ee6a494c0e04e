"""What a public second moment says: directions (or features), and how much lies along each.

A moment is a symmetric (d, d) matrix or its diagonal (d,). Functions of it are taken on its
eigenvalues, U f(l) U^T, or entry by entry; negative eigenvalues, which noise can make, count as 0.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie.solvers._structured import few_threads, map_rows


@dataclass(frozen=True)
class Spectrum:
    """Square roots of a moment's eigenvalues, and its eigenvectors (None for a diagonal)."""

    roots: Tensor
    vectors: Tensor | None

    @classmethod
    def of(cls, moment: Tensor) -> "Spectrum":
        """Take a moment apart."""
        moment = moment.double().cpu()
        if moment.dim() == 1:
            return cls(moment.clamp_min(0).sqrt(), None)
        values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
        return cls(values.clamp_min(0).sqrt(), vectors)

    @property
    def size(self) -> float:
        """The root of the mean eigenvalue."""
        return float(self.roots.square().mean().sqrt())

    def shrinking(self, threshold: float) -> Tensor:
        """Return the map U diag(max(0, 1 - threshold / sqrt(l))) U^T, or its diagonal.

        Of the moment of models themselves it is the proximal map of the trace norm (or l2,1 norm).
        """
        safe = torch.where(self.roots > 0, self.roots, 1.0)
        kept = torch.where(self.roots > 0, (1 - threshold / safe).clamp_min(0), 0.0)
        return self._matrix(kept)

    def spread(self, lam: float, mu: float) -> Tensor:
        """Return a root of the inverse of the penalty lam Sigma^(-1/2) + mu I: see `structured`."""
        return self._matrix((self.roots / (lam + mu * self.roots)).sqrt())

    def damping(self, lam: float, mu: float, step: float) -> Tensor:
        """Return (I + step P)^-1, the proximal map of 1/2 w^T P w for the same penalty P."""
        inverse = self.roots / (lam + mu * self.roots)
        return self._matrix(inverse / (inverse + step))

    def _matrix(self, factors: Tensor) -> Tensor:
        if self.vectors is None:
            return factors
        return (self.vectors * factors) @ self.vectors.mT


def apply(linear: Tensor, models: Tensor) -> Tensor:
    """Apply a symmetric map, or a diagonal one, to every row.

    Row by row: in one product, how many rows there are could move the last bits of each.
    """
    if linear.dim() == 1:
        return torch.mul(models, linear)
    out = np.empty(tuple(models.shape))
    rows, matrix = (np.ascontiguousarray(part.double().numpy()) for part in (models, linear))
    with few_threads(rows.size * len(matrix)):
        map_rows(rows, matrix, out)
    return torch.from_numpy(out)


Lift = Literal["flat", "floor", "add"]


def lift(moment: Tensor, by: float, how: Lift) -> Tensor:
    """Keep noise from looking like structure: no eigenvalue stays below what noise could make.

    "flat": eigenvalues up to `by` cannot be told from noise, so all of them become their mean,
    which noise moves little. "floor": they become `by`. "add": every eigenvalue is raised by `by`.
    """
    if by == 0:
        return moment
    if moment.dim() == 1:
        return _lifted(moment, by, how)
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    return torch.matmul(vectors * _lifted(values, by, how), vectors.mT)


def _lifted(values: Tensor, by: float, how: Lift) -> Tensor:
    if how == "add":
        return values + by
    if how == "floor":
        return values.clamp_min(by)
    low = values <= by
    # The mean of noise alone is near 0, and may be below: something is left in every direction.
    level = values[low].mean().clamp_min(0.02 * by) if bool(low.any()) else values.new_tensor(0.0)
    return torch.where(low, level, values)
