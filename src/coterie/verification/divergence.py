"""Privacy losses in cells, composed by one Fourier transform of tilted masses.

A release is a pair of laws (P, Q), here as the masses of both in a few thousand cells of what comes
out. Which cell it is tells no more than the release itself, so what is computed from cells alone is
a lower bound, and the cells are so fine that it is exact to about 1e-4. With the loss
l = log P/Q of a cell and M(t) = E_P e^(tl), a composition of releases has

    delta(epsilon) = E_P (1 - e^(epsilon - L))_+ ,   L the sum of the losses,

and L's law is a convolution. Under the tilted masses e^(tl) P / M(t), with t at the saddle point of
the Chernoff bound, L lies around epsilon: all digits are spent where they matter, however small
delta is (Koskela, Jälkö and Honkela 2020; tilting as Esscher 1932). Losses are split between
their two neighbours on a grid so that tilted means are kept: errors are of second order, and
neither up nor down.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, special

Array = NDArray[np.float64]
_CELLS = 2048
_REACH = 14.0
"""Standard deviations of noise that cells cover; beyond lies 1e-44 of the mass."""
_FINE = 0.02
"""Grid step over the tilted deviation of a round's loss, to begin with."""
_SAME = 2e-4
"""Share by which epsilon may change when the grid is made finer, to be called found."""
_LONGEST = 1 << 20
_WIDE = 20.0
"""Half the width of the grid, in tilted deviations of the whole sum."""
_LOST = 1e-5
"""Share of delta by which the largest losses may be called infinite."""
_ASKED = 16
"""Laws that are asked where the saddle point lies: any tilt is right, that one is best."""


@dataclass(frozen=True, eq=False)
class Law:
    """The losses of one release: their values, their masses under P, and the mass at infinity."""

    losses: Array
    log_mass: Array
    infinite: float

    @classmethod
    def of(cls, first: Array, second: Array) -> "Law":
        """Take the losses of P against Q from the logarithms of the masses of cells."""
        seen = first > -np.inf
        first, second = first[seen], second[seen]
        known = second > -np.inf
        return cls(first[known] - second[known], first[known], float(np.exp(first[~known]).sum()))

    def log_moment(self, tilt: float) -> float:
        """Take the logarithm of E e^(tilt loss), infinite losses apart."""
        return float(special.logsumexp(self.log_mass + tilt * self.losses))

    def cut(self, mass: float) -> "Law":
        """Call the largest losses infinite, as long as that moves no more than this mass."""
        order = np.argsort(-self.losses, kind="stable")
        kept = np.cumsum(np.exp(self.log_mass[order])) > mass
        found = np.exp(self.log_mass[order[~kept]]).sum()
        order = order[kept]
        return Law(self.losses[order], self.log_mass[order], self.infinite + float(found))

    def tilted(self, tilt: float) -> tuple[Array, float, float]:
        """Return tilted masses that add up to 1, their mean and variance."""
        mass = np.exp(self.log_mass + tilt * self.losses - self.log_moment(tilt))
        mean = float(mass @ self.losses)
        return mass, mean, float(mass @ (self.losses - mean) ** 2)


Counted = Sequence[tuple[Law, int]]


def smallest_epsilon(laws: Counted, delta: float) -> float:
    """Find epsilon of releases composed, in one direction; delta must be above 0."""
    laws, lost = _cut(laws, delta)
    left = delta - lost
    if left <= 0:
        return math.inf
    asked = _ask(laws)
    tilt = _least(lambda t: (_moments(asked, t) - math.log(left)) / t)
    before = math.inf
    for halvings in range(8):
        found = _solve(laws, tilt, left, _FINE / 2**halvings)
        if abs(found - before) <= _SAME * found + 1e-9:
            break
        before = found
    return found


def _solve(laws: Counted, tilt: float, delta: float, fine: float) -> float:
    for _ in range(60):
        found = _Composed.of(laws, tilt, fine).epsilon(delta)
        if found is not None:
            return found
        tilt /= 2  # the window lies above epsilon: losses have a long tail
    raise ValueError("epsilon could not be bracketed")


def delta_at(laws: Counted, epsilon: float) -> float:
    """Compute delta of releases composed, in one direction."""
    laws, lost = _cut(laws, 1e-12)
    asked = _ask(laws)
    tilt = _least(lambda t: _moments(asked, t) - t * epsilon)
    return min(1.0, _Composed.of(laws, tilt, _FINE / 8).delta(epsilon) + lost)


def _cut(laws: Counted, delta: float) -> tuple[Counted, float]:
    """Cut long tails off; give what is left, and the probability of an infinite loss."""
    rounds = sum(times for _, times in laws)
    short = [(law.cut(_LOST * delta / rounds), times) for law, times in laws]
    kept = math.fsum(times * math.log1p(-min(law.infinite, 1 - 1e-16)) for law, times in short)
    return [(law, times) for law, times in short if len(law.losses)], -math.expm1(kept)


def _ask(laws: Counted) -> Counted:
    """Pick some of many laws, to stand for all."""
    every = max(1, len(laws) // _ASKED)
    return [(law, times * every) for law, times in laws[::every]]


def _moments(laws: Counted, tilt: float) -> float:
    return math.fsum(times * law.log_moment(tilt) for law, times in laws)


def _least(bound: Callable[[float], float]) -> float:
    coarse = np.linspace(-14.0, 16.0, 31)
    values = [bound(math.exp(log)) for log in coarse]
    best = coarse[int(np.nanargmin(values))]
    found = optimize.minimize_scalar(
        lambda log: bound(math.exp(log)), bounds=(best - 1, best + 1), method="bounded"
    )
    return math.exp(float(found.x))


@dataclass(frozen=True, eq=False)
class _Composed:
    """The law of the sum of losses on a window of a grid, tilted."""

    losses: Array
    mass: Array
    tilt: float
    log_moment: float

    @classmethod
    def of(cls, laws: Counted, tilt: float, fine: float) -> "_Composed":
        parts = [(*law.tilted(tilt), law, times) for law, times in laws]
        rounds = sum(times for *_, times in parts)
        mean = math.fsum(m * times for _, m, _, _, times in parts)
        spread = math.sqrt(math.fsum(v * times for _, _, v, _, times in parts))
        # Besides the spread of the sum, one release may be far off, and no two need differ.
        half = _WIDE * spread + max(_width(mass, law) for mass, _, _, law, _ in parts)
        half += 0.1 * abs(mean) + 1e-9
        step = max(fine * spread / math.sqrt(rounds), 2 * half / _LONGEST)
        length = fft.next_fast_len(math.ceil(2 * half / step), real=True)
        product = np.ones(length // 2 + 1, dtype=np.complex128)
        for mass, _, _, law, times in parts:
            product *= fft.rfft(_laid(law.losses, mass, step, length)) ** times
        first = round(mean / step) - length // 2
        mass = np.roll(fft.irfft(product, length), -(first % length))
        losses = step * (first + np.arange(length, dtype=np.float64))
        return cls(losses, np.maximum(mass, 0.0), tilt, _moments(laws, tilt))

    def delta(self, epsilon: float) -> float:
        above = self.losses > epsilon
        beyond = self.losses[above] - epsilon
        parts = self.mass[above] * np.exp(-self.tilt * beyond) * -np.expm1(-beyond)
        return float(parts.sum()) * math.exp(min(self.log_moment - self.tilt * epsilon, 700.0))

    def epsilon(self, delta: float) -> float | None:
        """Find epsilon; None where it lies below the window."""
        low, high = max(0.0, float(self.losses[0])), float(self.losses[-1])
        if high <= 0:
            return 0.0
        if self.delta(low) <= delta:
            return None if low > 0 else 0.0
        return float(
            optimize.brentq(lambda e: self.delta(e) - delta, low, high, xtol=1e-12, rtol=1e-10)
        )


def _width(mass: Array, law: Law) -> float:
    """Return the range of losses whose tilted mass is worth a word."""
    held = law.losses[mass > 1e-14]
    return float(held.max() - held.min())


def _laid(losses: Array, mass: Array, step: float, length: int) -> Array:
    """Split losses between their neighbours on a grid that goes round in a circle."""
    place = losses / step
    below = np.floor(place)
    upper = (place - below) * mass
    index = below.astype(np.int64) % length
    laid = np.bincount(index, weights=mass - upper, minlength=length)
    laid += np.bincount((index + 1) % length, weights=upper, minlength=length)
    return np.asarray(laid, dtype=np.float64)


def gaussian_edges(deviation: float, *means: float) -> Array:
    """Return the edges of cells that are fine around each of some means, and reach to infinity."""
    steps = np.linspace(-_REACH * deviation, _REACH * deviation, _CELLS)
    inner = np.concatenate([mean + steps for mean in means])
    return np.unique(np.concatenate([[-np.inf], inner, [np.inf]]))


def gaussian_cells(edges: Array, mean: float, deviation: float) -> Array:
    """Take logarithms of the masses of a Gaussian between edges, however small they are."""
    x = (edges - mean) / deviation
    low, high = x[:-1], x[1:]
    right = low > 0
    near = special.log_ndtr(np.where(right, -low, high))
    far = special.log_ndtr(np.where(right, -high, low))
    return np.asarray(near + np.log1p(-np.exp(far - near)))
