"""Public relations between clients, decomposed: Omega = D + B diag(s) B^T.

D is diagonal, s = -1 or 1, B is clients x r: the form in which a relation is served by posted sums
(see `coterie.methods.related`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_ZERO = 1e-12  # of the largest eigenvalue: what is left of a decomposition in rounding
SAME = 1e-9
"""Of the largest entry: what counts as the same number."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Omega = D + B diag(s) B^T, in float64.

    Attributes:
        diagonal: D, (m,), positive.
        factors: B, (m, r).
        signs: s, (r,), -1 or 1.
    """

    diagonal: Tensor
    factors: Tensor
    signs: Tensor

    @property
    def omega(self) -> Tensor:
        """Multiply it out."""
        return torch.diag(self.diagonal) + (self.factors * self.signs) @ self.factors.mT

    @cached_property
    def unit(self) -> float:
        """The length of the longest row of B."""
        return float(self.factors.norm(dim=1).max())

    @cached_property
    def inner(self) -> Tensor:
        """B^T D^-1 B."""
        return self.factors.mT @ (self.factors / self.diagonal[:, None])

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The least and the largest eigenvalue of D^(-1/2) B diag(s) B^T D^(-1/2), or 0 beyond it.

        Those that are not 0 are also those of G^(1/2) diag(s) G^(1/2), G = B^T D^-1 B, r x r.
        """
        values, vectors = torch.linalg.eigh(self.inner)
        root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
        found = torch.linalg.eigvalsh((root * self.signs) @ root)
        return min(0.0, float(found[0])), max(0.0, float(found[-1]))

    @property
    def step(self) -> float:
        """How much of a round's answer is taken, so that rounds converge."""
        return 2 / (2 + self.extremes[1])


def mean_relation(clients: int) -> Decomposition:
    """Return Omega = I - 1 1^T / m: everybody is pulled towards the mean of all."""
    one = torch.ones(1, dtype=torch.float64)
    return Decomposition(one.expand(clients), one.expand(clients, 1) / math.sqrt(clients), -one)


def decompose(omega: Tensor, diagonal: Tensor | None = None) -> Decomposition:
    """Write a symmetric Omega as D + B diag(s) B^T with as few columns of B as there can be.

    D is the one given, else c I with the positive eigenvalue c that occurs most often (the largest
    of those): it takes as many columns as there are other eigenvalues.

    Raises:
        ValueError: If no eigenvalue is positive and no diagonal is given.
    """
    omega = omega.double()
    if diagonal is None:
        diagonal = torch.full_like(omega[0], _commonest(torch.linalg.eigvalsh(omega)))
    rest = omega - torch.diag(diagonal)
    values, vectors = torch.linalg.eigh((rest + rest.mT) / 2)
    kept = values.abs() > _ZERO * max(float(omega.abs().max()), float(diagonal.abs().max()))
    factors = vectors[:, kept] * values[kept].abs().sqrt()
    # Either sign of a column will do: that in which its largest entry is positive.
    largest = factors.abs().argmax(dim=0, keepdim=True)
    factors = factors * factors.gather(0, largest).sign()
    return Decomposition(diagonal, factors, values[kept].sign())


def _commonest(values: Tensor) -> float:
    """Return the positive value that occurs most often in an ascending list, the largest of such."""
    near = SAME * float(values.abs().max())
    groups: list[list[float]] = []
    for value in values.tolist():
        if value <= near:
            continue
        if groups and value - groups[-1][-1] <= near:
            groups[-1].append(value)
        else:
            groups.append([value])
    if not groups:
        raise ValueError("omega has no positive eigenvalue: give one that pulls somewhere")
    best = max(groups, key=lambda group: (len(group), group[-1]))
    return sum(best) / len(best)


def check_relation(relation: Decomposition) -> None:
    """Refuse a relation that has no answer: a diagonal not above 0, or directions below 0."""
    least = int(relation.diagonal.argmin())
    if not 0 < float(relation.diagonal[least]) < math.inf:
        raise ValueError(
            f"diagonal: client {least} has {float(relation.diagonal[least]):g}; expected positive "
            "numbers, since a client is pulled with that strength: give another diagonal"
        )
    if relation.factors.numel() == 0 or relation.unit == 0:
        raise ValueError(
            "omega is diagonal: clients are not related and nothing would be posted; use local"
        )
    if relation.extremes[0] < -1 - SAME:
        raise ValueError(
            "omega has a negative eigenvalue: the objective falls without end along it; expected "
            "a positive semidefinite matrix, such as a Laplacian: add to its diagonal"
        )
