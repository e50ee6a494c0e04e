"""What a post tells of a prior: the steps of PFEB's server, all of them post-processing.

A post holds noisy means over the expected cohort (`methods.pfeb` says of what). The steps here turn
them into a step of the mean and into factors of the variances. Variances are followed by their
logarithms as in a Kalman filter (Kalman 1960): a step is what the post shows to be missing times

    gain = h P / (h^2 P + v),    P' = P (1 - h gain) + 0.02

P what is in doubt still, v what noise and the draw of a cohort do to the post (public numbers), and
h the part of what is missing that a post shows, about a half. Without noise the steps stay full;
with much of it they become an average of all posts, and never integrate it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.methods.base import Post

DOUBT = (1.0, 0.3, 1.0)
"""What is not known at the start, as variances of logarithms: see `Told.changes`."""
DRIFT = 0.02
"""Doubt that every round adds: what variances should be moves with the mean."""
_STEP = 0.7  # about a factor of 2


@dataclass(frozen=True)
class Told:
    """What a post tells, as means over the expected cohort, and how far noise goes in it.

    `noise` is the variance of the noise of each number of the spread, `still` that of the residual;
    `draw` is the relative variance that a random cohort gives to all of them alike. `noisy` says
    whether chance is in it at all: noise, or the draw of a cohort. `shaken` is how far both move
    the mean, in units of the prior.
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
    shaken: float

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
            shaken=math.sqrt(weights * (far["mean"] ** 2 + draw)),
        )

    def newton(self) -> Tensor:
        """Divide the mean by the curvature, with eigenvalues from its noise to 1."""
        assert self.curvature is not None
        values, vectors = torch.linalg.eigh(self.curvature)
        values = values.clamp_min(min(max(self.floor, 1e-6), 1.0)).clamp_max(1.0)
        step: Tensor = vectors @ ((vectors.mT @ self.mean) / values)
        return step

    def changes(self, doubt: Tensor) -> tuple[Tensor, float, Tensor]:
        """Return the factors of the variances and of the residual variance, and what doubt is left.

        `doubt` are the variances of what is not known yet of three logarithms: the level of the
        variances, each of them around it, and the residual variance.
        """
        slow = torch.ones_like(self.spread)
        if self.curvature is not None:
            slow = self.curvature.diagonal().clamp(min(max(self.floor, 0.02), 1.0), 1.0)
        spread = 1 + (self.spread - 1) / slow
        if not self.noisy:
            plain = self.spread if self.curvature is None else spread.clamp(0.1, 10)
            return plain, self.residual, doubt
        noise = float((self.noise / slow.square()).mean())
        level = spread.mean()
        # What a post shows of what is missing: all of it where it was divided by the curvature.
        seen = 0.5 if self.curvature is None else 1.0
        shown = torch.tensor([seen, seen, 0.7], dtype=torch.float64)
        # Who is drawn moves all numbers alike, and each around them as squares of normals vary.
        draw = self.draw * float((1 / slow.square()).mean())
        chance = [noise / len(spread) + draw, noise + 2 * draw, self.still + self.draw]
        gain = shown * doubt / (shown.square() * doubt + torch.tensor(chance, dtype=torch.float64))
        moved = gain[0] * _cut(level - 1) + gain[1] * _cut(spread - level)
        residual = _cut(gain[2] * _cut(torch.tensor(self.residual - 1, dtype=torch.float64)))
        left = doubt * (1 - shown * gain) + DRIFT
        return _cut(moved).exp(), float(residual.exp()), left


def _cut(values: Tensor) -> Tensor:
    """Bound a step of logarithms, alike up and down: noise must not drift one way."""
    return values.clamp(-_STEP, _STEP)


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
