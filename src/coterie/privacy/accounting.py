"""From a plan's events to its profile: closed forms where they exist, a grid of losses elsewhere.

The privacy unit is one client, with its whole data and state. Two neighbouring relations are kept
apart: `zero_out` (the client's contributions become zero) and `replace` (they become any others,
which doubles the sensitivity of a clipped sum). Only plans with a proved account are accepted; all
numbers are upper bounds. This module never imports torch.

The privacy loss of a round that hides its cohort is discretised here in closed form, rounded up by
"connect the dots" (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022), and composed by the
Fourier transforms of dp-accounting (Sommer, Meiser and Mohammadi 2019; Koskela, Jälkö and Honkela
2020). The discretisation of dp-accounting returns the same numbers (a test compares them) but loops
over grid points in Python, and has no cohorts of a fixed size.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from scipy import special

from coterie.privacy.events import (
    SCALE,
    Counted,
    Event,
    Participation,
    Relation,
    check_delta,
    check_relation,
)
from coterie.privacy.profiles import (
    Array,
    GaussianProfile,
    Groups,
    Law,
    Least,
    Profile,
    PureProfile,
    add_epsilons,
    mixture_profile,
    response_law,
    smallest_epsilon,
)

Pair = Literal["remove", "add", "replace", "fixed"]
"""The two distributions between which a round has to be tested: see `_tails`."""

_KEPT = 10.0
"""Standard deviations of noise kept in a round's losses; beyond lies 8e-24 of the mass."""
_FINENESS = 0.01
"""Grid step over the standard deviation of one round's loss: see `_sampled_step`."""
ROUNDING = 2.0**-53
"""Allowance for rounding in delta, per round and per doubling of the transform's length.

The observed error, where the exact value is known, is thirty times smaller.
"""


@dataclass(frozen=True, eq=False)
class Tails:
    """A composed distribution of losses l_i = (first + i) * step, summed from above.

    `above[i]` is P(L > l_i) and `below[i]` is e^l_(i+1) Q(L > l_i), without infinite losses: each
    delta(epsilon) costs one look-up.
    """

    first: int
    step: float
    above: Array
    below: Array
    infinite: float

    @classmethod
    def of(cls, pmf: Any) -> "Tails":
        """Return the tails of a dp-accounting distribution."""
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
        """Return the hockey-stick divergence at this epsilon."""
        place = math.floor(epsilon / self.step) - self.first
        place = min(max(place, 0), len(self.above) - 1)
        shrunk = math.exp(min(0.0, epsilon - (self.first + place + 1) * self.step))
        return self.infinite + float(self.above[place] - shrunk * self.below[place])


@dataclass(frozen=True, eq=False)
class LossProfile(Profile):
    """The profile of composed privacy loss distributions, the worst of its directions.

    `allowance` is what rounding in the Fourier transforms may take from delta, at most. `visible`
    has the arguments of `mixture_profile`, the closed form for a visible cohort. It is a bound too
    (hiding the cohort is post-processing), and replaces this one where it is smaller and the
    allowance dominates delta, or the grid is coarse.

    **Guarantee:** an upper bound on delta(epsilon) of the composed rounds, adaptively chosen (Zhu,
    Dong and Wang 2022: dominating pairs compose). The grid and the truncated tails round up, and
    infinite losses stay infinite. `tests/privacy/test_accounting.py`,
    `tests/privacy/test_profiles_pure.py`.
    """

    directions: tuple[Tails, ...]
    allowance: float
    visible: tuple[Groups, float, float] | None = None
    _known: dict[float, float] = field(default_factory=dict, repr=False)

    @property
    def accountant(self) -> str:  # type: ignore[override]
        """How the bound was computed, for display."""
        return (
            f"privacy loss distribution (dp-accounting {version('dp-accounting')}, "
            f"grid {self.directions[0].step:.0e}, pessimistic)"
        )

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at this epsilon."""
        worst = max(direction.delta(epsilon) for direction in self.directions)
        delta = min(1.0, max(0.0, worst) + self.allowance)
        if self.visible is None:
            return delta
        if delta < 100 * self.allowance or self.directions[0].step > 1:
            return min(delta, self._mixture.delta(epsilon))
        return delta

    @cached_property
    def _mixture(self) -> Profile:
        assert self.visible is not None
        return mixture_profile(*self.visible)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon; infinite if larger losses are too probable."""
        if delta not in self._known:
            top = max(tails.step * (tails.first + len(tails.above)) for tails in self.directions)
            finite = self.visible is not None or self.delta(top) < delta
            self._known[delta] = (
                smallest_epsilon(lambda e: math.log(self.delta(e)), delta) if finite else math.inf
            )
        return self._known[delta]


def loss_profile(groups: Groups, pairs: tuple[Pair, ...], rate: float) -> LossProfile:
    """Return the profile of sampled Gaussian rounds with a hidden cohort.

    `pairs` are the directions of the neighbouring relation; the worst counts.
    """
    step = _sampled_step(pairs[0], groups, rate)
    directions = tuple(
        Tails.of(compose([(_round_losses(pair, z, rate, step), times) for z, times in groups]))
        for pair in pairs
    )
    rounds = sum(times for _, times in groups)
    length = max(len(direction.above) for direction in directions)
    scale = 1.0 if "remove" in pairs else 2.0
    allowance = ROUNDING * rounds * math.log2(length)
    return LossProfile(directions, allowance, (groups, rate, scale))


def compose(counted: Sequence[tuple[Any, int]]) -> Any:
    """Return the composition of distributions: equal ones at once, then the shortest first."""
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
    """Return log(1 - rate + rate exp((x - 1/2) / z^2)), the loss of a sampled Gaussian at x."""
    exponent = (x - 0.5) / z**2
    small = np.log1p(rate * np.expm1(np.minimum(exponent, 30.0)))
    large = np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)
    return np.where(exponent < 30.0, small, large)


def _loss_inverse(loss: Array, z: float, rate: float) -> Array:
    """Return the x at which `_loss` takes this value; -infinity below its range."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log(np.maximum(np.expm1(np.minimum(loss, 30.0)) + rate, 0.0))
        large = loss + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30.0)))
    return z**2 * (np.where(loss < 30.0, small, large) - math.log(rate)) + 0.5


def _replace_inverse(loss: Array, z: float, rate: float) -> Array:
    """Return the x at which _loss(x) - _loss(-x) takes this value (dp-accounting's closed form)."""
    size = np.abs(loss)
    with np.errstate(divide="ignore"):
        log_sinh = size / 2 + np.log(-np.expm1(-size)) - math.log(2)
    log_y = 0.5 / z**2 + math.log1p(-rate) - math.log(rate) + log_sinh
    arcsinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_y), log_y)
    return np.sign(loss) * z**2 * (arcsinh + size / 2)


def _tails(pair: Pair, losses: Array, z: float, rate: float) -> tuple[Array, Array]:
    """Return P(L > l) and log Q(L > l) of a round's privacy loss L = log dP/dQ.

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
    """Return the range of losses that the grid covers."""
    if pair == "fixed":
        top = _range("remove", z / 2, rate)[1]
        return -top, top
    ends = np.array([-_KEPT * z, 1 + _KEPT * z])
    low, high = (float(value) for value in _loss(ends, z, rate))
    if pair == "replace":
        top = high - float(_loss(-ends[1:], z, rate)[0])
        return -top, top
    return (low, high) if pair == "remove" else (-high, -low)


@lru_cache(maxsize=2048)
def _moments(pair: Pair, z: float, rate: float) -> tuple[float, float]:
    """Return the mean and variance of a round's loss with the client in, by quadrature."""
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


def _sampled_step(pair: Pair, groups: Groups, rate: float) -> float:
    """Return the step of the loss grid for sampled Gaussian rounds.

    Connecting the dots splits each loss between its two neighbours: it adds about step^2/6 to the
    variance of a round's loss and half that to its mean, as a slightly larger mu would. A step of
    1/100 of the standard deviation thus costs 2e-5 of the variance, whatever the number of rounds.
    Where losses are much larger than 1, the split becomes a plain rounding up, which must be small
    against the mean.
    """
    rounds = sum(times for _, times in groups)
    moments = [(*_moments(pair, z, rate), times) for z, times in groups]
    mean = sum(m * times for m, _, times in moments) / rounds
    variance = sum(v * times for _, v, times in moments) / rounds
    widest = max(high - low for low, high in (_range(pair, z, rate) for z, _ in groups))
    return _grid_step(mean, variance, widest / 2**17)


def _grid_step(mean: float, variance: float, least: float) -> float:
    """Return a step for losses of these moments, rounded down to one digit."""
    step = min(_FINENESS * math.sqrt(variance), max(1e-3 * mean, math.sqrt(6e-3 * mean)))
    step = max(step, least)
    power = 10.0 ** math.floor(math.log10(step))
    return float(power * math.floor(step / power))


@lru_cache(maxsize=64)
def _round_losses(pair: Pair, z: float, rate: float, step: float) -> Any:
    """Return the discretised loss of one sampled Gaussian round."""
    return discretise(sampled_law(pair, z, rate), step)


def sampled_law(pair: Pair, z: float, rate: float) -> Law:
    """Return the loss of one Gaussian round with a hidden cohort."""
    return Law(*_range(pair, z, rate), lambda losses: _tails(pair, losses, z, rate))


def gaussian_law(mu: float) -> Law:
    """Return the loss of mu-Gaussian DP: N(mu^2/2, mu^2), in either direction."""

    def tails(losses: Array) -> tuple[Array, Array]:
        x = losses / mu
        return special.ndtr(mu / 2 - x), special.log_ndtr(-mu / 2 - x)

    return Law(mu**2 / 2 - _KEPT * mu, mu**2 / 2 + _KEPT * mu, tails)


def visible_law(law: Law, rate: float) -> Law:
    """Return the loss of a release that includes the client with probability `rate`, visibly.

    Participation is observed and has the same law for both neighbours: no loss without the client,
    the loss of the release with it.
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
    """Return a pessimistic discretisation of a privacy loss, as a dp-accounting distribution.

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
    # Denormal probabilities upset the transforms' bounds; as infinite losses they cost nothing.
    tiny = probabilities < 1e-100
    infinite = float(upper[-1] + probabilities[tiny].sum())
    probabilities[tiny] = 0.0
    return pld_pmf.DensePLDPmf(step, first, probabilities, infinite, True)


def count(events: Iterable[tuple[Event, int]]) -> Counted:
    """Return the number of equal events, in an order that does not depend on theirs."""
    counts: Counter[Event] = Counter()
    for event, times in events:
        counts[event] += times
    return tuple(sorted(counts.items(), key=repr))


def check_covered(counted: Counted, participation: Participation, relation: Relation) -> None:
    """Raise ValueError for a plan without a proved account."""
    check_relation(relation)
    counted, participation = as_seen(counted, participation)
    for event, _ in counted:
        event.check(relation)
        event.check_sampling(participation)
        scheduled = participation.kind == "cyclic" and event.noisy
        if scheduled and event.gaussian_noise(relation) is None:
            raise ValueError(
                f"{event.name} noise with a cyclic schedule: expected Gaussian noise, for which "
                "the client that takes part where noise is least can be named; use gaussian noise"
            )
    hidden = participation.kind == "fixed" and participation.rate < 1 and not participation.visible
    sampled = any(event.gaussian_noise(relation) is not None for event, _ in counted)
    noisy = all(event.noisy for event, _ in counted)
    if sampled and hidden and relation == "zero_out" and noisy:
        raise ValueError(
            "relation = 'zero_out' with a hidden cohort of fixed size: no amplification is proved "
            "for it, since the cohort's other members depend on whether the client is in; use "
            "relation 'replace', or Poisson sampling, or declare the cohort visible"
        )


def as_seen(counted: Counted, participation: Participation) -> tuple[Counted, Participation]:
    """Return events and participation as the server and all other clients together observe them.

    A message with its own noise, observed separately, is a Gaussian release of a sum of one; its
    presence is observed, so the cohort is visible. Other releases of the same plan are then
    accounted with a visible cohort too: hiding the cohort is post-processing of showing it.
    """
    if not any(event.local for event, _ in counted):
        return counted, participation
    return count((event.as_seen(), times) for event, times in counted), participation.shown


def of_one_client(
    counted: Counted, participation: Participation, relation: Relation
) -> tuple[Counted, Participation]:
    """Return the releases that count for the client for which most counts, of a cyclic schedule.

    Of n releases in b groups a client takes part in at most ceil(n / b), wherever a run ends; those
    with the least noise bound them, in whatever order they were made. It takes part in these with
    certainty. Other sampling is returned unchanged.

    **Guarantee:** the profile of the returned releases is an upper bound for every client;
    `tests/privacy/test_banded.py`.
    """
    if participation.kind != "cyclic":
        return counted, participation
    left = -(-sum(times for _, times in counted) // participation.period)
    found: list[tuple[Event, int]] = []
    for event, times in sorted(counted, key=lambda one: one[0].gaussian_noise(relation) or 0.0):
        found.append((event, min(times, left)))
        left -= min(times, left)
    kept = count((event.as_scheduled(), times) for event, times in found if times)
    return kept, Participation("everyone", visible=True)


@lru_cache(maxsize=16)
def profile_of(counted: Counted, participation: Participation, relation: Relation) -> Profile:
    """Return the profile of a plan's counted events.

    **Guarantee:** an upper bound on delta(epsilon) of all releases together, each of which may
    depend on earlier ones: dominating pairs compose (Zhu, Dong and Wang 2022);
    `tests/privacy/test_accounting.py`, `tests/privacy/test_profiles_pure.py`,
    `tests/privacy/test_profiles_wishart.py`.
    """
    check_covered(counted, participation, relation)
    counted, participation = as_seen(counted, participation)
    for event, _ in counted:
        if event.unbounded:
            return GaussianProfile(math.inf, event.unbounded)
    counted, participation = of_one_client(counted, participation, relation)
    if not counted:
        return GaussianProfile(0.0, "none needed: nothing is released")
    if all(event.gaussian_noise(relation) is not None for event, _ in counted):
        return _gaussian(counted, participation, relation)
    pure = _group(counted, lambda event: event.pure_epsilon(participation, relation))
    if len(pure) == len(counted) == 1:
        return PureProfile(*pure[0])
    (first, times), *others = counted
    alone = first.profile()
    if not others and times == 1 and alone is not None:
        return alone
    return _compose(counted, pure, participation, relation)


def _group(counted: Counted, value: Callable[[Event], float | None]) -> Groups:
    """Return the number of releases by a number of each, of those that have one."""
    counts: Counter[float] = Counter()
    for event, times in counted:
        found = value(event)
        if found is not None:
            counts[found] += times
    return tuple(sorted(counts.items()))


def _by_noise(counted: Counted, relation: Relation) -> Groups:
    """Return the number of Gaussian rounds by the z at which `replace` costs mu = 2 / z.

    Under zero_out: by noise multiplier, which bounds messages of either sign.
    """
    return _group(counted, lambda event: event.gaussian_noise(relation))


def _gaussian(counted: Counted, participation: Participation, relation: Relation) -> Profile:
    """Return the profile of Gaussian releases only."""
    groups, rate, scale = _by_noise(counted, relation), participation.rate, SCALE[relation]
    if rate == 1:
        return GaussianProfile(scale * math.sqrt(sum(times / z / z for z, times in groups)))
    if participation.visible:
        return mixture_profile(groups, rate, scale)
    if participation.kind == "fixed":
        return loss_profile(groups, ("fixed",), rate)
    if relation == "zero_out":
        return loss_profile(groups, ("remove", "add"), rate)
    either_sign = _by_noise(counted, "zero_out")
    turned = loss_profile(either_sign, ("replace",), rate)
    if groups == either_sign:
        return turned
    # Where a replaced client's message cannot change sign, M(1) against M(-1) still bounds the
    # round: each message lies within 1/z of none. The messages lie within replaced/z of each other
    # and, as replaced >= 1, of none, so the argument for cohorts of a fixed size (see `_tails`)
    # holds too. And hiding the cohort is post-processing of showing it.
    shifted = loss_profile(groups, ("fixed",), rate)
    return Least((turned, shifted, mixture_profile(groups, rate, scale)))


@dataclass(frozen=True)
class AddedProfile(Profile):
    """Pure releases and others, by adding epsilons: valid at any delta, 0 included.

    **Guarantee:** if the others are (epsilon, delta)-DP, all together are (epsilon + pure, delta);
    `tests/privacy/test_profiles_pure.py`.
    """

    pure: float
    others: Profile
    accountant: str = "epsilons of pure releases added"

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at this epsilon."""
        return self.others.delta(epsilon - self.pure) if epsilon >= self.pure else 1.0

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at this delta."""
        return self.pure + self.others.epsilon(delta)


def _compose(
    counted: Counted, pure: Groups, participation: Participation, relation: Relation
) -> Profile:
    """Return the composition of all releases on one grid, or by adding pure epsilons if smaller."""
    directions: tuple[Pair, ...] = ("remove", "add")
    if relation == "replace":
        hidden = participation.rate < 1 and not participation.visible
        directions = ("fixed" if participation.kind == "fixed" and hidden else "replace",)
    laws = [_laws(counted, pure, participation, relation, pair) for pair in directions]
    step = max(_composed_step(law) for law in laws)
    tails = tuple(
        Tails.of(compose([(discretise(one, step), times) for one, times in law])) for law in laws
    )
    rounds, length = sum(times for _, times in counted), max(len(one.above) for one in tails)
    composed = LossProfile(tails, ROUNDING * (rounds + 1) * math.log2(length + 2))
    if not pure:
        return composed
    rest = [one for one in counted if one[0].pure_epsilon(participation, relation) is None]
    added = AddedProfile(add_epsilons(pure), profile_of(tuple(rest), participation, relation))
    return Least((composed, added))


def _laws(
    counted: Counted, pure: Groups, participation: Participation, relation: Relation, pair: Pair
) -> list[tuple[Law, int]]:
    """Return the losses of all releases in one direction."""
    rate, scale = participation.rate, SCALE[relation]
    laws = [(response_law(epsilon), times) for epsilon, times in pure]
    own = [(event.loss_law(pair), times) for event, times in counted]
    laws += [(law, times) for law, times in own if law is not None]
    groups = _by_noise(counted, relation)
    if not groups:
        return laws
    if rate == 1:
        mu = scale * math.sqrt(sum(times / z / z for z, times in groups))
        return [*laws, (gaussian_law(mu), 1)]
    if participation.visible:
        return laws + [(visible_law(gaussian_law(scale / z), rate), times) for z, times in groups]
    sampled = _by_noise(counted, "zero_out") if pair == "replace" else groups
    return laws + [(sampled_law(pair, z, rate), times) for z, times in sampled]


def _composed_step(laws: Sequence[tuple[Law, int]]) -> float:
    """Return the step of the grid: fine against a round's loss, as for sampled Gaussians.

    The moments come from a few thousand points, and only choose the step: any step is sound.
    """
    rounds, mean, variance = 0, 0.0, 0.0
    for law, times in laws:
        points = np.linspace(law.low, law.high, 4001)
        upper, _ = law.tails(points)
        mass, middle = -np.diff(upper), (points[1:] + points[:-1]) / 2
        centre = float(mass @ middle)
        rounds += times
        mean += times * abs(centre)
        variance += times * float(mass @ (middle - centre) ** 2)
    widest = max(law.high - law.low for law, _ in laws)
    longest = sum(times * (law.high - law.low) for law, times in laws)
    return _grid_step(mean / rounds, variance / rounds, max(widest / 2**17, longest / 2**24, 1e-12))


def profile(events: Sequence[Event], participation: Participation, relation: Relation) -> Profile:
    """Return the profile of all releases for an adversary who observes cohorts only if visible.

    Raise ValueError if no account is proved for this combination.

    **Guarantee:** an upper bound on delta(epsilon) of all releases together, each of which may
    depend on earlier ones; exact where the cohort is everyone. Cohorts must be independent of the
    data and of each other. `tests/privacy/test_accounting.py`,
    `tests/privacy/test_published_tables.py`.

    >>> from coterie.privacy.events import Gaussian
    >>> plan = [Gaussian(10.0)] * 1000
    >>> round(profile(plan, Participation("everyone"), "zero_out").epsilon(1e-5), 2)
    17.86
    """
    return profile_of(count((event, 1) for event in events), participation, relation)


def coalition_profile(
    events: Sequence[Event], participation: Participation, relation: Relation
) -> Profile:
    """Return the profile of all releases for all other clients together.

    With cohorts of a fixed size they know from their own participation when the client is drawn, so
    hiding the cohort has no effect against them. With Poisson sampling they learn nothing more.
    Under local noise `profile` already is theirs.

    **Guarantee:** as `profile`, against every coalition of other clients.
    """
    return profile(events, participation.to_others, relation)


def epsilon_by_round(
    events: Sequence[Event],
    participation: Participation,
    relation: Relation,
    delta: float,
    rounds: Sequence[int],
) -> list[float]:
    """Return epsilon against the other clients after the first r rounds, for each r.

    **Guarantee:** as `coalition_profile`. Stopping at a round that is chosen from private
    data is not covered: rounds must be planned.
    """
    check_delta(delta, events)
    if not all(0 <= r <= len(events) for r in rounds):
        raise ValueError(f"rounds = {list(rounds)}: expected numbers from 0 to {len(events)}")
    return [coalition_profile(events[:r], participation, relation).epsilon(delta) for r in rounds]
