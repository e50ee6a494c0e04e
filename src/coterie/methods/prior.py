"""What a post tells of a prior: the steps of PFEB's server, all of them post-processing.

A post holds noisy means over the expected cohort (`methods.pfeb` says of what). The steps here turn
them into a step of the mean and into factors of the variances, each shrunk by what noise, and the
draw of a cohort, can have done to it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.methods.base import Post
from coterie.tree import Tree


@dataclass(frozen=True)
class Told:
    """What a post tells, as means over the expected cohort, and how far noise goes in it.

    `noise` is the variance of the noise of each number of the spread, `still` that of the residual;
    `draw` is the relative variance that a random cohort gives to all of them alike. `noisy` says
    whether chance is in it at all: noise, or the draw of a cohort.
    """

    mean: Tensor
    spread: Tensor
    residual: float
    noise: float
    still: float
    draw: float
    curvature: Tensor | None
    floor: float
    noisy: bool

    @classmethod
    def of(cls, post: Post, shared: Tree) -> "Told":
        """Read a post; what was not posted is as it would be at the optimum."""
        means = {name: leaf.double() / post.cohort for name, leaf in post.value.items()}
        far = {name: one / post.cohort for name, one in post.deviations.items()}
        weights, curvature, floor = len(means["mean"]), None, 0.0
        if "curvature" in means:
            root = math.sqrt(weights)
            curvature = unpacked(means["curvature"] * root, weights)
            # Noise of a symmetric matrix reaches about sqrt(2 p) times its deviation.
            floor = 1.5 * far["curvature"] * root * math.sqrt(2 * weights)
        draw = max(0.0, 1 - post.cohort / float(shared["clients"])) / post.cohort
        return cls(
            mean=means["mean"],
            spread=means.get("spread", torch.ones_like(means["mean"])),
            residual=float(means["residual"]) if "residual" in means else 1.0,
            noise=far.get("spread", 0.0) ** 2,
            still=far.get("residual", 0.0) ** 2,
            draw=draw,
            curvature=curvature,
            floor=floor,
            noisy=draw > 0 or any(far.values()),
        )

    def newton(self) -> Tensor:
        """Divide the mean by the curvature, with eigenvalues from its noise to 1."""
        assert self.curvature is not None
        values, vectors = torch.linalg.eigh(self.curvature)
        values = values.clamp_min(min(max(self.floor, 1e-6), 1.0)).clamp_max(1.0)
        step: Tensor = vectors @ ((vectors.mT @ self.mean) / values)
        return step

    def changes(self, posts: float) -> tuple[Tensor, float]:
        """Give the factors of the variances and of the residual variance."""
        slow = torch.ones_like(self.spread)
        if self.curvature is not None:
            slow = self.curvature.diagonal().clamp(min(max(self.floor, 0.02), 1.0), 1.0)
        spread = 1 + (self.spread - 1) / slow
        if not self.noisy:
            return (self.spread if self.curvature is None else spread.clamp(0.1, 10)), self.residual
        noise = float((self.noise / slow.square()).mean())
        level = float(spread.mean())
        if len(spread) > 1:
            around = max(0.0, 1 - noise / max(float(spread.var()), 1e-300))
            spread = level + around * (spread - level)
        spread = spread + _shrunk(level, self.draw) - level
        pace = min(2 / math.sqrt(max(posts, 1.0)), 2.0)
        residual = _shrunk(self.residual, self.draw)
        return spread.clamp(0.5, 2) ** pace, min(max(residual, 0.4), 2.5) ** min(1.0, pace)


def _shrunk(value: float, variance: float) -> float:
    """Draw a factor to 1 by what chance can have done to it."""
    away = value - 1
    return 1 + away * max(0.0, 1 - variance / max(away**2, 1e-300))


def packed(matrices: Tensor) -> Tensor:
    """Write symmetric matrices as vectors of the same norm: off the diagonal times sqrt(2)."""
    size = matrices.shape[-1]
    rows, columns = torch.triu_indices(size, size)
    weight = torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrices)
    return matrices[..., rows, columns] * weight


def unpacked(vector: Tensor, size: int) -> Tensor:
    """Undo `packed` for one matrix."""
    rows, columns = torch.triu_indices(size, size)
    weight = torch.where(rows == columns, 1.0, 1 / math.sqrt(2)).to(vector)
    matrix = torch.zeros(size, size, dtype=vector.dtype)
    matrix[rows, columns] = vector * weight
    matrix[columns, rows] = vector * weight
    return matrix
