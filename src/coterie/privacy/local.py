"""Noise that clients add themselves: what leaves a client is private already, even to the server.

Each client clips its contribution C, adds N(0, (z C)^2 I) from a source of its own, and hands over
the noisy row; the server only adds rows up. As in `mechanisms` everything lies on one public grid:
a row that lies on the grid plus rounded noise is the rounding of the ideal, real-valued noisy row.
A sum over n clients carries noise of deviation z C sqrt(n), where central noise of the same epsilon
against other clients would be z C: that is what an untrusted server costs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.privacy.entropy import Entropy, normals
from coterie.privacy.events import Event, LocalGaussian, Relation
from coterie.privacy.mechanisms import GaussianSum, Mechanism, Shapes, count_numbers, sum_rows

_MOST_NOISE = 1e5
"""Noise of 2^22 clients of 10^8 numbers then stays below 2^53 grid steps: sums are exact."""

ClientEntropy = Callable[[int], Entropy]
"""Opens the source of a client's own noise, by its number."""


@dataclass(frozen=True)
class LocalGaussianSum:
    """Sum of rows clipped to l2 norm `bound`, each plus N(0, (noise_multiplier * bound)^2 I).

    Attributes:
        bound: The clip.
        noise_multiplier: Deviation of one client's noise, over the bound.
        cohort: The expected number of clients in a round, a public number.
        honest: How many clients are trusted to add their noise: see `LocalGaussian`.
        claimed: A printed epsilon's share: see `LocalGaussian`.

    **Guarantee:** one message is mu-GDP for ideal normals (ADR 9), mu = s / noise_multiplier, s = 1
    under zero_out (the row becomes zeros, its noise stays) and 2 under replace, against everybody
    who sees it, the server included, provided the client's entropy gives independent uniform words
    that nobody else learns, and the client sends one message a round: an engine in which messages
    travel must not send a second one after a crash. The bound holds after floating-point rounding,
    for rows of any size, NaN and infinity included. Whoever sees the sum alone, and not the
    messages, is further off: the noise of `honest` clients adds up to a Gaussian of deviation
    sqrt(honest) * noise_multiplier * bound. (Sums of rounded normals are not rounded sums. But by
    Poisson summation their law on the grid is, to a factor 1 + exp(-2 pi^2 D^2), D the deviation of
    a client in grid steps and above 10^4 for multipliers above 10^-5, that of the ideal sum plus
    honest - 1 uniform numbers of one step, rounded: post-processing of the ideal sum.)
    Tests: tests/properties/test_local.py, tests/statistics/test_local.py.
    """

    bound: float
    noise_multiplier: float
    cohort: float
    honest: int = 1
    claimed: float | None = None

    def __post_init__(self) -> None:
        self._each()
        self.event()
        if self.noise_multiplier > _MOST_NOISE:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier}: expected at most {_MOST_NOISE:g} of "
                "each client's own; sums of more would no longer be exact, and tell nothing"
            )
        if not 0 < self.cohort < math.inf:
            raise ValueError(f"cohort = {self.cohort}: expected a positive number of clients")

    def _each(self) -> GaussianSum:
        return GaussianSum(self.bound, self.noise_multiplier)

    def summed(self) -> GaussianSum:
        """Return the central mechanism with the noise of an expected cohort."""
        return GaussianSum(self.bound, self.noise_multiplier * math.sqrt(self.cohort))

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Clip each row to the bound, on the grid."""
        return self._each().clip(rows)

    def perturb_rows(self, rows: Tree, ids: Tensor, entropy: ClientEntropy) -> Tree:
        """Add to each client's clipped row noise of its own: the client's last step.

        `ids` are the clients' numbers, which name their sources.
        """
        clients = ids.tolist()
        _check_ids(clients, rows)
        shapes = {name: tuple(leaf.shape[1:]) for name, leaf in rows.items()}
        numbers = count_numbers(shapes)
        step = self._each().grid(numbers)
        deviation = self.noise_multiplier * self.bound
        noise = np.empty((len(clients), numbers))
        for place, client in enumerate(clients):
            noise[place] = normals(entropy(client), numbers)
        np.rint(np.multiply(noise, deviation / step, out=noise), out=noise)
        np.multiply(noise, step, out=noise)
        return _add_rows(rows, noise)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Sum over clients."""
        return sum_rows(rows)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution."""
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Draw nothing: the noise is in the messages."""
        return 0

    def sensitivity(self, relation: Relation) -> float:
        """Return the bound, twice under replace."""
        return self._each().sensitivity(relation)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Leave the sum as it is: the server adds nothing."""
        return dict(total)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise of an expected cohort."""
        return self.summed().radius(totals)

    def event(self) -> Event:
        """Name a round of local noise."""
        return LocalGaussian(self.noise_multiplier, self.honest, self.claimed)


def _check_ids(clients: list[int], rows: Tree) -> None:
    count = {len(leaf) for leaf in rows.values()}
    if count != {len(clients)}:
        raise ValueError(f"{len(clients)} ids for rows of {sorted(count)} clients: give one each")
    if len(set(clients)) != len(clients):
        # In a simulation both rows would carry the same noise.
        raise ValueError("a client is listed twice; it sends one message a round")


def _add_rows(rows: Tree, noise: np.ndarray) -> Tree:
    """Add a matrix of noise, one row a client, to stacked leaves.

    In place: clipped rows are copies that nobody else holds.
    """
    used = 0
    for name in sorted(rows):
        leaf = rows[name]
        width = leaf[0].numel() if len(leaf) else 0
        part = torch.from_numpy(noise[:, used : used + width]).reshape(leaf.shape)
        leaf.add_(part.to(leaf.device))
        used += width
    return rows


def typical_noise(mechanism: Mechanism, like: Tree, entropy: Entropy) -> Tree:
    """Draw noise as posts carry it: of the server, or of as many clients as are expected."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in like.items()}
    if isinstance(mechanism, LocalGaussianSum):
        return mechanism.summed().perturb(zeros, entropy)
    return mechanism.perturb(zeros, entropy)
