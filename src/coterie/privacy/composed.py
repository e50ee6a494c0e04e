"""From a plan's events to its profile: the closed forms where there are any, a grid elsewhere."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from coterie.privacy.events import (
    Counted,
    Event,
    Gaussian,
    LocalGaussian,
    NonPrivate,
    Participation,
    Relation,
    Wishart,
    check_relation,
)
from coterie.privacy.losses import (
    ROUNDING,
    Law,
    Pair,
    Tails,
    coin_law,
    compose,
    discretise,
    gaussian_law,
    loss_profile,
    name_accountant,
    sampled_law,
)
from coterie.privacy.profiles import (
    GaussianProfile,
    Groups,
    Least,
    Profile,
    mixture_profile,
    smallest_epsilon,
)
from coterie.privacy.pure import PureProfile, add_up, pure_groups, response_law
from coterie.privacy.wishart import WishartProfile, impossible, wishart_law

SCALE: dict[Relation, float] = {"zero_out": 1.0, "replace": 2.0}
_FINENESS = 0.01
"""Grid step over the standard deviation of a release's loss, as for sampled Gaussians."""


def count(events: Sequence[Event]) -> Counted:
    """Count equal events, in an order that does not depend on theirs."""
    return tuple(sorted(Counter(events).items(), key=repr))


def check_covered(counted: Counted, participation: Participation, relation: Relation) -> None:
    """Refuse a plan for which no account is proved."""
    check_relation(relation)
    counted, participation = as_seen(counted, participation)
    if relation == "replace" and any(isinstance(event, Wishart) for event, _ in counted):
        raise ValueError(
            "relation = 'replace' with Wishart noise: replacing a client makes outputs impossible "
            "in both directions, and no account is offered; use relation 'zero_out' (if it gives "
            "(epsilon, delta), replacing is (2 epsilon, (1 + e^epsilon) delta)), or Gaussian noise"
        )
    hidden = participation.kind == "fixed" and participation.rate < 1 and not participation.visible
    sampled = any(isinstance(event, Gaussian) for event, _ in counted)
    if sampled and hidden and relation == "zero_out" and not _bare(counted):
        raise ValueError(
            "relation = 'zero_out' with a hidden cohort of fixed size: no amplification is proved "
            "for it, since the cohort's other members depend on whether the client is in; use "
            "relation 'replace', or Poisson sampling, or declare the cohort visible"
        )


def as_seen(counted: Counted, participation: Participation) -> tuple[Counted, Participation]:
    """Put local noise in the words of central noise, as the server and all others together see it.

    A message with noise of its own, seen by itself, is a Gaussian release of a sum of one; and its
    presence is seen, so the cohort is visible. Beside local rounds other releases are taken for
    visible as well: hiding the cohort is post-processing of showing it.
    """
    if not any(isinstance(event, LocalGaussian) for event, _ in counted):
        return counted, participation
    counts: Counter[Event] = Counter()
    for event, times in counted:
        alike = Gaussian(event.noise_multiplier) if isinstance(event, LocalGaussian) else event
        counts[alike] += times
    return tuple(sorted(counts.items(), key=repr)), participation.shown


def _bare(counted: Counted) -> bool:
    return any(isinstance(event, NonPrivate) for event, _ in counted)


@lru_cache(maxsize=16)
def profile_of(counted: Counted, participation: Participation, relation: Relation) -> Profile:
    """Build the profile of a plan's counted events.

    **Guarantee:** an upper bound on delta(epsilon) of all releases together, each of which may
    depend on earlier ones: dominating pairs compose (Zhu, Dong and Wang 2022);
    `tests/accounting/test_laws.py`, `tests/accounting/test_pure.py`,
    `tests/accounting/test_wishart.py`.
    """
    check_covered(counted, participation, relation)
    counted, participation = as_seen(counted, participation)
    if _bare(counted):
        return GaussianProfile(math.inf, "none: something is released without noise")
    if not counted:
        return GaussianProfile(0.0, "none needed: nothing is released")
    wisharts = [(event, times) for event, times in counted if isinstance(event, Wishart)]
    if any(impossible(event.degrees, event.ratio) > 1 - 1e-9 for event, _ in wisharts):
        return GaussianProfile(math.inf, "none: Wishart noise gives nearly every client away")
    pure = pure_groups(counted, participation, relation)
    if not pure and not wisharts:
        return _gaussian(counted, participation, relation)
    if len(pure) == len(counted) == 1:
        return PureProfile(*pure[0])
    if len(counted) == 1 and wisharts[0][1] == 1:
        return WishartProfile(wisharts[0][0].degrees, wisharts[0][0].ratio)
    return _compose(counted, pure, participation, relation)


def _effective(counted: Counted, relation: Relation) -> Groups:
    """Count Gaussian rounds by the multiplier z at which `replace` costs mu = 2 / z."""
    counts: Counter[float] = Counter()
    for event, times in counted:
        if isinstance(event, Gaussian):
            stretch = 2 / event.replaced if relation == "replace" else 1.0
            counts[event.noise_multiplier * stretch] += times
    return tuple(sorted(counts.items()))


def _worst(counted: Counted) -> Groups:
    """Count Gaussian rounds by noise multiplier, as if every message could be turned round."""
    return _effective(counted, "zero_out")


def _gaussian(counted: Counted, participation: Participation, relation: Relation) -> Profile:
    """Account for Gaussian releases alone."""
    groups, rate, scale = _effective(counted, relation), participation.rate, SCALE[relation]
    if rate == 1:
        return GaussianProfile(scale * math.sqrt(sum(times / z / z for z, times in groups)))
    if participation.visible:
        return mixture_profile(groups, rate, scale)
    if participation.kind == "fixed":
        return loss_profile(groups, ("fixed",), rate)
    if relation == "zero_out":
        return loss_profile(groups, ("remove", "add"), rate)
    turned = loss_profile(_worst(counted), ("replace",), rate)
    if groups == _worst(counted):
        return turned
    # Where a replaced client cannot be turned round, M(1) against M(-1) still bounds the round:
    # each message lies within 1/z of none. The messages lie within replaced/z of each other and,
    # as replaced >= 1, of none, so the argument for cohorts of a fixed size (see `_tails`) holds
    # too. And hiding the cohort is post-processing of showing it.
    shifted = loss_profile(groups, ("fixed",), rate)
    return Least((turned, shifted, mixture_profile(groups, rate, scale)))


@dataclass(frozen=True, eq=False)
class ComposedProfile:
    """The profile of unlike releases, composed on a grid of losses, the worst of its directions.

    **Guarantee:** an upper bound on delta(epsilon); the grid, the tails and an allowance for the
    Fourier transforms round up as in `coterie.privacy.losses`, and infinite losses stay infinite.
    `tests/accounting/test_pure.py`, `tests/accounting/test_wishart.py`.
    """

    directions: tuple[Tails, ...]
    rounds: int
    _known: dict[float, float] = field(default_factory=dict, repr=False)

    @property
    def accountant(self) -> str:
        """How the numbers were obtained, in words."""
        return name_accountant(self.directions[0].step)

    @cached_property
    def allowance(self) -> float:
        """Bound what floating point may have taken from delta."""
        length = max(len(direction.above) for direction in self.directions)
        return ROUNDING * (self.rounds + 1) * math.log2(length + 2)

    def delta(self, epsilon: float) -> float:
        """Bound delta at this epsilon."""
        worst = max(direction.delta(epsilon) for direction in self.directions)
        return min(1.0, max(0.0, worst) + self.allowance)

    def epsilon(self, delta: float) -> float:
        """Bound epsilon at this delta; infinite where losses are with a larger probability."""
        if delta not in self._known:
            top = max(tails.step * (tails.first + len(tails.above)) for tails in self.directions)
            known = math.inf
            if self.delta(top) < delta:
                known = smallest_epsilon(lambda e: math.log(self.delta(e)), delta)
            self._known[delta] = known
        return self._known[delta]


@dataclass(frozen=True)
class AddedProfile:
    """Pure releases beside others, their epsilons simply added: right at any delta, 0 included.

    **Guarantee:** if the others are (epsilon, delta)-DP, all together are (epsilon + pure, delta);
    `tests/accounting/test_pure.py`.
    """

    pure: float
    others: Profile
    accountant: str = "epsilons of pure releases added"

    def delta(self, epsilon: float) -> float:
        """Bound delta at this epsilon."""
        return self.others.delta(epsilon - self.pure) if epsilon >= self.pure else 1.0

    def epsilon(self, delta: float) -> float:
        """Bound epsilon at this delta."""
        return self.pure + self.others.epsilon(delta)


def _compose(
    counted: Counted, pure: Groups, participation: Participation, relation: Relation
) -> Profile:
    """Compose whatever a plan holds on one grid; beside pure releases their sum is a bound too."""
    directions: tuple[Pair, ...] = ("remove", "add")
    if relation == "replace":
        hidden = participation.rate < 1 and not participation.visible
        directions = ("fixed" if participation.kind == "fixed" and hidden else "replace",)
    laws = [_laws(counted, pure, participation, relation, pair) for pair in directions]
    step = max(_grid(law) for law in laws)
    tails = tuple(
        Tails.of(compose([(discretise(one, step), times) for one, times in law])) for law in laws
    )
    composed = ComposedProfile(tails, sum(times for _, times in counted))
    if not pure:
        return composed
    rest = tuple((event, times) for event, times in counted if not _is_pure(event))
    return Least((composed, AddedProfile(add_up(pure), profile_of(rest, participation, relation))))


def _is_pure(event: Event) -> bool:
    return not isinstance(event, Gaussian | Wishart | NonPrivate)


def _laws(
    counted: Counted, pure: Groups, participation: Participation, relation: Relation, pair: Pair
) -> list[tuple[Law, int]]:
    """List the losses of all releases in one direction."""
    rate, scale = participation.rate, SCALE[relation]
    laws = [(response_law(epsilon), times) for epsilon, times in pure]
    for event, times in counted:
        if isinstance(event, Wishart):
            laws.append((wishart_law(event.degrees, event.ratio, pair), times))
    groups = _effective(counted, relation)
    if not groups:
        return laws
    if rate == 1:
        mu = scale * math.sqrt(sum(times / z / z for z, times in groups))
        return [*laws, (gaussian_law(mu), 1)]
    if participation.visible:
        return laws + [(coin_law(gaussian_law(scale / z), rate), times) for z, times in groups]
    sampled = _worst(counted) if pair == "replace" else groups
    return laws + [(sampled_law(pair, z, rate), times) for z, times in sampled]


def _grid(laws: Sequence[tuple[Law, int]]) -> float:
    """Choose the step of the grid: fine against a round's loss, as for sampled Gaussians.

    The moments are read off a few thousand points, and only choose the step: any step is sound.
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
    mean /= rounds
    step = min(_FINENESS * math.sqrt(variance / rounds), max(1e-3 * mean, math.sqrt(6e-3 * mean)))
    longest = sum(times * (law.high - law.low) for law, times in laws)
    step = max(step, widest / 2**17, longest / 2**24, 1e-12)
    power = 10.0 ** math.floor(math.log10(step))
    return float(power * math.floor(step / power))
