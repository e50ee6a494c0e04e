"""Noise in shares: every client adds a part of the noise, and secure aggregation opens only sums.

No party ever holds a sum without noise, so the coordinator needs no trust (`trust = "nobody"`). Of
M clients at least K answer a round, or it is not opened; at most C of all clients collude with the
adversary, and what they add does not count. Each client, drawn in the round or not, adds an integer
discrete Gaussian share to every number of the sum, in units of the public grid, of variance

    v = ceil((D^2 + 16) / (K - C)),    D = planned deviation of the number / grid step,

so that the K - C honest shares in an opened sum carry the planned noise. The price is the noise of
all M shares, M / (K - C) times the planned variance.

Why discrete Gaussians: sums of Skellam variables (Agarwal, Kairouz and Liu 2021) are Skellam again,
but have no closed account. Sums of discrete Gaussians (Kairouz, Liu and Steinke 2021) are not
discrete Gaussians, but on grids as fine as ours they are a Gaussian release up to a factor that no
float can hold, by the argument below. So the account is that of central Gaussian noise, exactly.

**Guarantee:** an opened sum is as private as `GaussianSum`, `BlockSum`, `GaussianGram` or `Squares`
with the planned noise, against any adversary who observes the sum, chooses the cohort and knows the
shares of all but h = K - C clients of the sum, among them the protected client. Each number's
privacy loss grows by less than 1e-136, and delta by less than 1e-113 for each number of a share,
because the sampler cuts the tails (`discrete`): float64 holds neither next to an epsilon or delta.

Let f_s(x) = exp(-x^2 / (2 s^2)) and e(s) = 2 sum_{j >= 1} exp(-2 pi^2 s^2 j^2). By Poisson
summation, for every real c,

    sum over integers k of f_s(k - c)  lies in  s sqrt(2 pi) [1 - e(s), 1 + e(s)].        (1)

1. *Sums of shares.* Let X be a sum of n shares of variance v, with P(X = k) within a factor A of
   the density of N(0, n v) at k. With a further share Y, P(X + Y = k) is, within A, a sum over j of
   products of two such densities, which are the density of N(0, (n + 1) v) at k times f_s(j - c_k)
   up to its normalisation, s^2 = v n / (n + 1) >= v / 2. By (1) A grows by at most
   (1 + e(s)) / (1 - e(sqrt(v))) (Kairouz, Liu and Steinke 2021, theorem 12, bounds the same
   distance). For v >= 4096, which is required, e(s) < 1e-17000.
2. *From a Gaussian release to the sum.* Let y = m + N(0, a^2), a^2 = h v - 16, m an integer: a
   Gaussian release of the exact sum m in grid steps. Round y at random, to k with probability
   proportional to f_4(k - y). By (1) the result is k with probability within 1 +- e(4) of the
   density of N(m, h v) at k (a convolution of Gaussians; Peikert 2010, "An efficient and parallel
   Gaussian sampler for lattices"). e(4) < 1e-136. So m plus h shares is post-processing of a
   Gaussian release with deviation a >= D, up to that factor, number by number.
3. *The rest is post-processing*: other clients' shares and contributions, which the adversary may
   know, are added to it. So is the reduction modulo 2^64 in secure aggregation: m is bounded before
   noise is added, and a sum that wraps around is a function of one that does not. **Wrapping costs
   no delta**; it would only spoil the release, with a probability below 1e-13 for honest sites.
4. *Dropouts.* Sites open one sum of a round, of the survivors that all of them agree on, and only
   if these host at least K clients (`deploy.site`). More answers carry more noise.
5. *Absence.* A client that is not drawn adds its share as well, so noise does not depend on the
   cohort: hidden cohorts amplify against other clients, who do not see who is drawn. Against the
   coordinator nothing amplifies: it draws the cohorts, and is counted as drawing the client always.
6. *Sites.* A dishonest site knows the shares of all its clients: C counts them all
   (`deploy.federation.colluding_sites`).

Assumes that `entropy` returns independent uniform words that nobody else learns, that a client adds
one share per round, and the security of the aggregation (`deploy.secagg`). Against all other
clients together only the client's own share counts: see `Guarantee.views`. Tests:
tests/properties/test_shares.py, tests/statistics/test_shares.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.privacy.discrete import LARGEST_VARIANCE, Integers, discrete_gaussians
from coterie.privacy.entropy import Entropy
from coterie.privacy.events import Event, Gaussian, Relation, SharedGaussian
from coterie.privacy.mechanisms import (
    BlockSum,
    ClientEntropy,
    GaussianSum,
    Mechanism,
    NormBound,
    Shapes,
)
from coterie.privacy.moments import GaussianGram, Squares

_ROUNDED = 16
"""Variance of the random rounding in the argument, in squared grid steps."""
_LEAST_VARIANCE = 4096
_SLACK = 1 + Fraction(1, 1 << 40)
"""More than float64 loses in deviations and bounds."""
_EXACT = 2.0**52
Central = GaussianSum | BlockSum | GaussianGram | Squares


@dataclass(frozen=True)
class GaussianShares(Mechanism):
    """The noise of a central mechanism, added by all clients in shares.

    **Guarantee:** see the module docstring; the event is `SharedGaussian`.

    Attributes:
        inner: The central mechanism with the planned noise.
        clients: M, all clients; each adds a share in every round.
        minimum_clients: K, how many clients an opened sum has at least.
        corrupt: C, how many clients at most collude with an adversary.
    """

    in_shares: ClassVar[bool] = True
    inner: Central
    clients: int
    minimum_clients: int
    corrupt: int = 0

    def __post_init__(self) -> None:
        event = self.event()  # raises for numbers without an account
        event.check_clients(self.clients)

    @property
    def needed(self) -> int:
        """K."""
        return self.minimum_clients

    @property
    def honest_shares(self) -> int:
        """How many shares carry the planned noise."""
        return self.minimum_clients - self.corrupt

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return what the central mechanism returns."""
        return self.inner.clip(rows)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return the exact sum of the central mechanism."""
        return self.inner.reduce(rows, ids)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return those of the central mechanism."""
        return self.inner.totals(contribution)

    def sensitivity(self, relation: Relation) -> float:
        """Return that of the central mechanism."""
        return self.inner.sensitivity(relation)

    def add_shares(self, total: Tree, ids: Tensor, entropy: ClientEntropy) -> Tree:
        """Return a sum plus these clients' shares; `ids` name the sources."""
        clients = ids.tolist()
        if len(set(clients)) < len(clients):
            raise ValueError("a client is listed twice; it adds one share per round")
        sources = [entropy(client) for client in clients]
        noisy = dict(total)
        for name, step, parts in self._parts({n: tuple(t.shape) for n, t in total.items()}):
            drawn = np.zeros(total[name].numel(), dtype=np.int64)
            for places, variance in parts:
                drawn[places] = discrete_gaussians(sources, len(places), variance).sum(axis=0)
            drawn = drawn.reshape(tuple(total[name].shape))
            if len(parts) > 1:  # a symmetric matrix, of which the lower triangle was drawn
                drawn = drawn + np.tril(drawn, -1).T
            noisy[name] = total[name] + torch.from_numpy(np.asarray(drawn * step))
        return noisy

    def _parts(self, totals: Shapes) -> Iterator[tuple[str, float, list[tuple[Integers, int]]]]:
        """Yield leaf, grid step, and the places of its numbers by the variance of their shares."""
        deviations = self.inner.standard_deviations(totals)
        for one in self.inner.norm_bounds(totals):
            for name, shape in sorted(one.shapes.items()):
                square = (Fraction(deviations[name]) / Fraction(one.step)) ** 2
                variance = self._variance(square)
                places = np.arange(math.prod(shape))
                if not one.gram:
                    yield name, one.step, [(places, variance)]
                    continue
                rows, columns = np.divmod(places, shape[0])
                diagonal, lower = places[rows == columns], places[rows > columns]
                yield name, one.step, [(diagonal, variance), (lower, self._variance(square / 2))]

    def _variance(self, square: Fraction) -> int:
        """Return the variance of a share, for a planned variance in squared grid steps."""
        variance = math.ceil((square * _SLACK + _ROUNDED) / self.honest_shares)
        largest = math.sqrt(variance * self.clients)
        if not _LEAST_VARIANCE <= variance <= LARGEST_VARIANCE or 64 * largest > _EXACT:
            raise ValueError(
                f"a share of the noise has a deviation of {math.sqrt(variance):.3g} grid steps: "
                "expected 64 to 2^40, and 2^46 for the sum of all; choose a noise multiplier "
                "between 1e-3 and 1e4"
            )
        return variance

    def draws(self, totals: Shapes) -> int:
        """Return 0: sums carry the noise."""
        return 0

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum unchanged: nobody adds noise to an opened sum."""
        return dict(total)

    def event(self) -> SharedGaussian:
        """Return a round of noise in shares."""
        event: Event = self.inner.event()
        assert isinstance(event, Gaussian)
        return SharedGaussian(
            event.noise_multiplier, event.replaced, self.minimum_clients, self.corrupt
        )

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return the bounds of the central mechanism, with one client's share inside the sum."""
        noise = {name: step * math.sqrt(parts[0][1]) for name, step, parts in self._parts(totals)}
        return tuple(
            replace(one, nonnegative=False, noise=max(noise[name] for name in one.shapes))
            for one in self.inner.norm_bounds(totals)
        )

    def summed(self) -> Central:
        """Return the central mechanism with the noise of all clients' shares."""
        factor = math.sqrt(self.clients / self.honest_shares)
        if isinstance(self.inner, Squares):
            inner = self.inner.inner
            assert isinstance(inner, GaussianSum)
            return Squares(replace(inner, noise_multiplier=inner.noise_multiplier * factor))
        return replace(self.inner, noise_multiplier=self.inner.noise_multiplier * factor)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the noise of all clients' shares."""
        return self.summed().standard_deviations(totals)

    @property
    def noise_over_bound(self) -> float:
        """That of all clients' shares."""
        return self.summed().noise_over_bound

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise of all clients' shares."""
        return self.summed().radius(totals)

    def typical_noise(self, like: Tree, entropy: Entropy) -> Tree:
        """Return the noise of all clients' shares, as a central mechanism draws it."""
        return self.summed().typical_noise(like, entropy)

    def reported(self, tree: Tree) -> Tree:
        """Return the leaves that the central mechanism reports."""
        return self.inner.reported(tree)
