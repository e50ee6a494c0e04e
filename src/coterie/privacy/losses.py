"""Privacy loss distributions of rounds that hide who took part.

A round's privacy loss is discretised here in closed form, rounded up by "connect the dots"
(Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022), and composed by dp-accounting's Fourier
transforms (Sommer, Meiser and Mohammadi 2019; Koskela, Jälkö and Honkela 2020). The library's own
discretisation gives the same numbers (a test compares them) but loops over grid points in Python,
and knows no cohorts of a fixed size.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from scipy import special

from coterie.privacy.profiles import (
    Array,
    Groups,
    MixtureProfile,
    mixture_profile,
    smallest_epsilon,
)

Pair = Literal["remove", "add", "replace", "fixed"]
"""Which two distributions a round makes an adversary tell apart: see `_tails`."""

_REACH = 10.0
"""Standard deviations of noise kept in a round's losses; beyond lies 8e-24 of the mass."""
_FINENESS = 0.01
"""Grid step over the standard deviation of one round's loss: see `_grid`."""
ROUNDING = 2.0**-53
"""Allowance for floating point in delta, a round and a doubling of the transform's length.

The error seen where the truth is known is thirty times smaller.
"""


@dataclass(frozen=True, eq=False)
class Tails:
    """A composed distribution of losses l_i = (first + i) * step, summed from above.

    `above[i]` is P(L > l_i), `below[i]` is e^l_(i+1) Q(L > l_i), infinite losses apart, so that
    any delta(epsilon) costs one look-up.
    """

    first: int
    step: float
    above: Array
    below: Array
    infinite: float

    @classmethod
    def of(cls, pmf: Any) -> "Tails":
        """Sum a dp-accounting distribution, which offers no other way to its probabilities."""
        from scipy import signal

        # Only losses above an epsilon matter, and no epsilon is negative.
        kept = min(max(0, -int(pmf._lower_loss)), len(pmf._probs) - 1)
        shifted = np.append(0.0, pmf._probs[kept:][::-1])
        decay = math.exp(-pmf._discretization)
        return cls(
            first=int(pmf._lower_loss) + kept - 1,
            step=float(pmf._discretization),
            above=np.cumsum(shifted)[::-1],
            below=signal.lfilter([1.0], [1.0, -decay], shifted)[::-1],
            infinite=float(pmf._infinity_mass),
        )

    def delta(self, epsilon: float) -> float:
        """Compute the hockey-stick divergence at this epsilon."""
        place = math.floor(epsilon / self.step) - self.first
        place = min(max(place, 0), len(self.above) - 1)
        shrunk = math.exp(min(0.0, epsilon - (self.first + place + 1) * self.step))
        return self.infinite + float(self.above[place] - shrunk * self.below[place])


@dataclass(frozen=True, eq=False)
class LossProfile:
    """The profile of composed privacy loss distributions, the worst of its directions.

    **Guarantee:** an upper bound on delta(epsilon) of the composed rounds, adaptively chosen (Zhu,
    Dong and Wang 2022: dominating pairs compose). The grid and the truncated tails round up; an
    allowance of about 2e-15 a round covers the rounding of the Fourier transforms. Below a hundred
    times that, or on a coarse grid, the closed-form bound for a visible cohort takes over where it
    is smaller (hiding the cohort is post-processing). `tests/accounting/test_laws.py`,
    `tests/accounting/test_traps.py`.
    """

    groups: Groups
    rate: float
    scale: float
    directions: tuple[Tails, ...]
    _known: dict[float, float] = field(default_factory=dict, repr=False)

    @property
    def accountant(self) -> str:
        """How the numbers were obtained, in words."""
        return name_accountant(self.directions[0].step)

    @cached_property
    def allowance(self) -> float:
        """Bound what floating point may have taken from delta."""
        rounds = sum(count for _, count in self.groups)
        length = max(len(direction.above) for direction in self.directions)
        return ROUNDING * rounds * math.log2(length)

    @cached_property
    def _visible(self) -> MixtureProfile:
        return mixture_profile(self.groups, self.rate, self.scale)

    def delta(self, epsilon: float) -> float:
        """Bound delta at this epsilon."""
        worst = max(direction.delta(epsilon) for direction in self.directions)
        delta = min(1.0, max(0.0, worst) + self.allowance)
        if delta < 100 * self.allowance or self.directions[0].step > 1:
            return min(delta, self._visible.delta(epsilon))
        return delta

    def epsilon(self, delta: float) -> float:
        """Bound epsilon at this delta."""
        if delta not in self._known:
            self._known[delta] = smallest_epsilon(lambda e: math.log(self.delta(e)), delta)
        return self._known[delta]


def name_accountant(step: float) -> str:
    """Say in words how numbers from a grid of losses were obtained."""
    return (
        f"privacy loss distribution (dp-accounting {version('dp-accounting')}, "
        f"grid {step:.0e}, pessimistic)"
    )


def loss_profile(groups: Groups, pairs: tuple[Pair, ...], rate: float) -> LossProfile:
    """Build the profile of sampled Gaussian rounds with a hidden cohort.

    `pairs` are the directions of the neighbouring relation, of which the worst counts.
    """
    step = _grid(pairs[0], groups, rate)
    directions = tuple(Tails.of(_compose(pair, groups, rate, step)) for pair in pairs)
    scale = 1.0 if "remove" in pairs else 2.0
    return LossProfile(groups, rate, scale, directions)


def _compose(pair: Pair, groups: Groups, rate: float, step: float) -> Any:
    """Compose all rounds of a plan of sampled Gaussians."""
    return compose([(_round_losses(pair, z, rate, step), count) for z, count in groups])


def compose(counted: Sequence[tuple[Any, int]]) -> Any:
    """Compose distributions, equal ones at a stroke, then the shortest first."""
    from dp_accounting.pld import pld_pmf

    heap = []
    for place, (one, count) in enumerate(counted):
        several = one if count == 1 else one.self_compose(count)
        heap.append((several.size, place, several))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, place, left = heapq.heappop(heap)
        right = heap[0][2]
        both = pld_pmf.compose_pmfs(left, right, tail_mass_truncation=1e-15)
        heapq.heapreplace(heap, (both.size, place, both))
    return heap[0][2]


def _loss(x: Array, z: float, rate: float) -> Array:
    """Compute log(1 - rate + rate exp((x - 1/2) / z^2)), the loss of a sampled Gaussian at x."""
    exponent = (x - 0.5) / z**2
    small = np.log1p(rate * np.expm1(np.minimum(exponent, 30.0)))
    large = np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)
    return np.where(exponent < 30.0, small, large)


def _loss_inverse(loss: Array, z: float, rate: float) -> Array:
    """Find the x at which `_loss` takes this value; -infinity below its range."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log(np.maximum(np.expm1(np.minimum(loss, 30.0)) + rate, 0.0))
        large = loss + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30.0)))
    return z**2 * (np.where(loss < 30.0, small, large) - math.log(rate)) + 0.5


def _replace_inverse(loss: Array, z: float, rate: float) -> Array:
    """Find the x at which _loss(x) - _loss(-x) takes this value (dp-accounting's closed form)."""
    size = np.abs(loss)
    with np.errstate(divide="ignore"):
        log_sinh = size / 2 + np.log(-np.expm1(-size)) - math.log(2)
    log_y = 0.5 / z**2 + math.log1p(-rate) - math.log(rate) + log_sinh
    arcsinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_y), log_y)
    return np.sign(loss) * z**2 * (arcsinh + size / 2)


def _tails(pair: Pair, losses: Array, z: float, rate: float) -> tuple[Array, Array]:
    """Compute P(L > l) and log Q(L > l) of a round's privacy loss L = log dP/dQ.

    With N(a) the Gaussian of mean a and deviation z, and M(a) = (1-rate) N(0) + rate N(a):

    remove: M(1) against N(0); add: N(0) against M(1) (Zhu, Dong and Wang 2022).

    replace: M(1) against M(-1). No messages a, b of norm at most 1 do worse, in any dimension: a
    set S with N(0)(S) = Phi(t) has N(a)(S) <= Phi(t + 1/z) and N(b)(S) >= Phi(t - 1/z) by Neyman
    and Pearson, and half-lines attain both under M(1) and M(-1).

    fixed: cohorts of a fixed size, clients replaced. Advanced joint convexity (Balle, Barthe and
    Gaboardi 2018) bounds delta(e) for e >= 0 by that of `remove` with twice the shift; the
    relation is symmetric, which gives delta(-e) = 1 - exp(-e) + exp(-e) delta(e).
    """
    if pair == "fixed":
        upper, log_lower = _tails("remove", np.abs(losses), z / 2, rate)
        mirrored = losses < 0
        with np.errstate(divide="ignore"):
            log_lower_mirror = np.log1p(-np.minimum(upper, 1.0))
        return (
            np.where(mirrored, -np.expm1(log_lower), upper),
            np.where(mirrored, log_lower_mirror, log_lower),
        )
    log_out, log_in = math.log1p(-rate), math.log(rate)
    if pair == "add":
        x = _loss_inverse(-losses, z, rate)
        still, moved = special.log_ndtr(x / z), special.log_ndtr((x - 1) / z)
        return np.exp(still), np.logaddexp(log_out + still, log_in + moved)
    x = (_loss_inverse if pair == "remove" else _replace_inverse)(losses, z, rate)
    still, moved = special.log_ndtr(-x / z), special.log_ndtr((1 - x) / z)
    upper = np.exp(np.logaddexp(log_out + still, log_in + moved))
    if pair == "remove":
        return upper, still
    return upper, np.logaddexp(log_out + still, log_in + special.log_ndtr((-1 - x) / z))


def _range(pair: Pair, z: float, rate: float) -> tuple[float, float]:
    """Bound the losses worth a grid point."""
    if pair == "fixed":
        top = _range("remove", z / 2, rate)[1]
        return -top, top
    ends = np.array([-_REACH * z, 1 + _REACH * z])
    low, high = (float(value) for value in _loss(ends, z, rate))
    if pair == "replace":
        top = high - float(_loss(-ends[1:], z, rate)[0])
        return -top, top
    return (low, high) if pair == "remove" else (-high, -low)


@lru_cache(maxsize=2048)
def _moments(pair: Pair, z: float, rate: float) -> tuple[float, float]:
    """Compute the mean and variance of a round's loss with the client in, by quadrature."""
    if pair == "fixed":
        return _moments("remove", z / 2, rate)
    nodes = np.linspace(-8, 8, 801)
    weight = np.exp(-(nodes**2) / 2)
    weight /= weight.sum()
    x = np.concatenate([z * nodes, 1 + z * nodes])
    loss = _loss(x, z, rate) - (_loss(-x, z, rate) if pair == "replace" else 0.0)
    weight = np.concatenate([(1 - rate) * weight, rate * weight])
    mean = float(weight @ loss)
    return mean, float(weight @ (loss - mean) ** 2)


def _grid(pair: Pair, groups: Groups, rate: float) -> float:
    """Choose the step of the loss grid for a plan.

    Connecting the dots splits each loss between its two neighbours: it adds about step^2/6 to the
    variance of a round's loss and half that to its mean, as a slightly larger mu would. A step of
    1/100 of the standard deviation thus costs 2e-5 of the variance, whatever the number of rounds.
    Where losses are large against 1 the split becomes a plain rounding up, which must be small
    against the mean.
    """
    rounds = sum(count for _, count in groups)
    means, variances = zip(*(_moments(pair, z, rate) for z, _ in groups), strict=True)
    mean = sum(m * count for m, (_, count) in zip(means, groups, strict=True)) / rounds
    variance = sum(v * count for v, (_, count) in zip(variances, groups, strict=True)) / rounds
    step = min(_FINENESS * math.sqrt(variance), max(1e-3 * mean, math.sqrt(6e-3 * mean)))
    widest = max(high - low for low, high in (_range(pair, z, rate) for z, _ in groups))
    step = max(step, widest / 2**17)
    power = 10.0 ** math.floor(math.log10(step))
    return float(power * math.floor(step / power))


@lru_cache(maxsize=64)
def _round_losses(pair: Pair, z: float, rate: float, step: float) -> Any:
    """Discretise one sampled Gaussian round."""
    return discretise(sampled_law(pair, z, rate), step)


@dataclass(frozen=True)
class Law:
    """One release's privacy loss L = log dP/dQ: between which losses its mass lies, and its tails.

    `tails` gives P(L > l) and log Q(L > l) for each l. What P puts above `high` counts as an
    infinite loss, what it puts below `low` as `low`: both round up.
    """

    low: float
    high: float
    tails: Callable[[Array], tuple[Array, Array]]


def sampled_law(pair: Pair, z: float, rate: float) -> Law:
    """Return the loss of one Gaussian round with a hidden cohort."""
    return Law(*_range(pair, z, rate), lambda losses: _tails(pair, losses, z, rate))


def gaussian_law(mu: float) -> Law:
    """Return the loss of mu-Gaussian DP: N(mu^2/2, mu^2), in either direction."""

    def tails(losses: Array) -> tuple[Array, Array]:
        x = losses / mu
        return special.ndtr(mu / 2 - x), special.log_ndtr(-mu / 2 - x)

    return Law(mu**2 / 2 - _REACH * mu, mu**2 / 2 + _REACH * mu, tails)


def coin_law(law: Law, rate: float) -> Law:
    """Return the loss of a release in which the client takes part by a coin that all can see.

    The coin's fall is part of what is seen, and has the same law for both neighbours: no loss if
    the client stays away, the release's own if it does not.
    """

    def tails(losses: Array) -> tuple[Array, Array]:
        upper, log_lower = law.tails(losses)
        away = losses < 0
        with np.errstate(divide="ignore"):
            log_away = np.log(np.where(away, 1 - rate, 0.0))
        upper = rate * upper + (1 - rate) * away
        return upper, np.logaddexp(log_away, math.log(rate) + log_lower)

    return Law(min(law.low, 0.0), max(law.high, 0.0), tails)


def discretise(law: Law, step: float) -> Any:
    """Discretise a privacy loss, pessimistically, as a dp-accounting distribution.

    Connect the dots: the mass of each cell goes to its two ends so that both its probability under
    P and that under Q are kept (Doroshenko et al. 2022, algorithm 1). Done on masses rather than
    on second differences of delta, which lose half the digits on a fine grid.
    """
    from dp_accounting.pld import pld_pmf

    first = math.floor(law.low / step)
    # One point more than needed: an atom at `high` must not fall above the last by rounding.
    last = max(math.ceil(law.high / step), first) + 1
    losses = step * np.arange(first, last + 1, dtype=np.float64)
    upper, log_lower = law.tails(losses)
    upper = np.minimum.accumulate(np.minimum(upper, 1.0))
    scaled = np.exp(np.minimum(losses + log_lower, 0.0))
    mass = -np.diff(upper)
    to_right = (mass - scaled[:-1] + math.exp(-step) * scaled[1:]) / -math.expm1(-step)
    to_right = np.clip(to_right, 0.0, mass)
    probabilities = np.zeros(len(losses))
    probabilities[:-1] += mass - to_right
    probabilities[1:] += to_right
    probabilities[0] += 1 - upper[0]
    # Numbers next to underflow upset the transforms' bounds; as infinite losses they cost nothing.
    tiny = probabilities < 1e-100
    infinite = float(upper[-1] + probabilities[tiny].sum())
    probabilities[tiny] = 0.0
    return pld_pmf.DensePLDPmf(step, first, probabilities, infinite, True)
