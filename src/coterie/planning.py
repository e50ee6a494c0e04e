"""What a plan costs and what its noise does, from public facts alone: no data, no torch.

The posted mean of q expected clients, each clipped to C, has in each of its p numbers noise of
deviation z C / q, and as a whole noise of norm about sqrt(p) z C / q. Over the clip that is

    error = sqrt(p) z / q                 of every post
          = sqrt(p T) / (m mu)            with all m clients in T rounds of a budget mu (zero_out)

the number that says whether a plan can learn at all: below 0.3 the noise is hardly felt, above 1 a
post is mostly noise. Everything else here turns it round: the rounds, clients, epsilon or numbers
with which it stays within a limit. The rule that says whether joining pays (`coterie.advice`) is
built on the same number.

Epsilon by view is `coterie.privacy.guarantee`; a shared model that is released is a function of the
posts, and costs what they cost.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.advice import ERROR
from coterie.privacy.accounting import LossProfile, profile_of
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import (
    Event,
    Gaussian,
    LocalGaussian,
    Participation,
    Relation,
    default_delta,
)
from coterie.privacy.guarantee import UNIT, Guarantee, reasons, view_of
from coterie.privacy.profiles import Profile
from coterie.privacy.sampling import Poisson, Sampler

MOST_ROUNDS = 1_000_000
HEAVY = 100_000
"""Points of an account's grid beyond which each question takes some tenths of a second."""
_CLOSE = 0.01
"""Rounds beyond a thousand are found to so much of themselves, and rounded down."""
RELEASED = (
    "computed from the posts alone, so to an outsider who receives it, it costs what they cost; a "
    "client who receives it is one of the other clients"
)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The public facts of a plan whose posts are clipped sums with Gaussian noise.

    Attributes:
        clients: How many there are.
        numbers: Of a posted mean.
        rounds: How many posts.
        sampler: Who takes part.
        epsilon: The budget; None where the noise is given instead.
        noise_multiplier: The noise; None where the budget is given instead.
        delta: None for the usual one, which falls with the number of clients.
        relation: What neighbours are.
        clip: The bound on a contribution.
        local: Whether clients add the noise themselves.
        stretch: The noise of the posted sum over the clip is so many times the noise multiplier:
            more than 1 where a contribution's parts share the budget.
        replaced: How much further a replaced client moves the sum than a zeroed one.
    """

    clients: int
    numbers: int
    rounds: int
    sampler: Sampler = field(default_factory=Poisson)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    relation: Relation = "zero_out"
    clip: float = 1.0
    local: bool = False
    stretch: float = 1.0
    replaced: float = 2.0

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon = {self.epsilon}, noise_multiplier = {self.noise_multiplier}: give "
                "exactly one of them"
            )
        for name in ("clients", "numbers", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.rounds > MOST_ROUNDS:
            raise ValueError(f"rounds = {self.rounds}: expected at most {MOST_ROUNDS:,}")
        for name, least, most in (("noise_multiplier", 1e-5, 1e9), ("delta", 1e-30, 1 - 1e-9)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} = {value}: expected a number from {least:g} to {most:g}")

    @property
    def participation(self) -> Participation:
        """Who takes part, for the accountant."""
        return self.sampler.participation(self.clients)

    def delta_of(self, clients: int) -> float:
        """Return the delta for so many clients."""
        return default_delta(clients) if self.delta is None else self.delta

    def event(self, noise_multiplier: float) -> Event:
        """Name a post with such noise."""
        if self.local:
            return LocalGaussian(noise_multiplier)
        return Gaussian(noise_multiplier, self.replaced)

    def noise(self, delta: float) -> float:
        """Return the noise multiplier: as given, or the least that meets the budget."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        who = self.participation
        return calibrate(
            self.epsilon,
            delta,
            weights=(1.0,) * self.rounds,
            participation=who.shown if self.local else who,
            relation=self.relation,
            replaced=2.0 if self.local else self.replaced,
        )

    def error(self, noise_multiplier: float, clients: float) -> float:
        """Return the noise of a posted mean over the clip, cohorts growing with the clients."""
        cohort = self.participation.rate * clients
        heard = math.sqrt(cohort) if self.local else cohort  # each client's own noise adds up
        return math.sqrt(self.numbers) * self.stretch * noise_multiplier / heard

    def spent(self, noise_multiplier: float, rounds: int) -> float:
        """Return epsilon of so many rounds of such noise."""
        if noise_multiplier < 1e-5:
            return math.inf
        counted = ((self.event(noise_multiplier), rounds),)
        found = profile_of(counted, self.participation, self.relation)
        return found.epsilon(self.delta_of(self.clients))


@dataclass(frozen=True, kw_only=True)
class Within:
    """What keeps the error within a limit, one fact changed at a time.

    Attributes:
        error: The limit.
        rounds: The most rounds at this budget; 0 if one is too many. None where noise was given, or
            the answer would take long.
        clients: The fewest clients, cohorts growing with them; None where no number is known.
        epsilon: The least epsilon in these rounds; None where the answer would take long.
        numbers: The most numbers posted.
    """

    error: float
    rounds: int | None
    clients: int | None
    epsilon: float | None
    numbers: int


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a plan costs, and what its noise does to a post.

    Attributes:
        noise_multiplier: Deviation of the noise of a posted sum over the clip (of a client's own
            message, where clients add it).
        epsilon: Spent, in the view that `Guarantee.epsilon` has.
        view: Whose view that is.
        unit: Who is protected.
        relation: What runs are compared.
        delta: At which it is stated.
        views: Epsilon by who looks; `released_shared_model` is that of an outsider who gets it.
        reasons: Why, where that is not obvious.
        accountant: How epsilon was found.
        cohort: Expected clients a round.
        rounds: How many posts.
        per_number: Deviation of the noise of each number of a posted mean.
        over_clip: The same over the clip.
        error: Noise of a whole posted mean over the clip.
        verdict: What that comes to, in words.
        rounds_at_noise: Where noise was given, the most rounds of it within the epsilon that was
            given as a limit; None without.
        within: What keeps the error within 0.3.
        statement: The guarantee in plain words.
        grid: Points of the account's grid, 0 for closed forms: how long further questions take.
    """

    noise_multiplier: float
    epsilon: float
    view: str
    unit: str
    relation: str
    delta: float
    views: dict[str, float]
    reasons: dict[str, str]
    accountant: str
    cohort: float
    rounds: int
    per_number: float
    over_clip: float
    error: float
    verdict: str
    rounds_at_noise: int | None
    within: Within
    statement: str
    grid: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; an infinite epsilon is the string "inf"."""
        found: dict[str, Any] = _strict(asdict(self))
        return found


def look_ahead(
    outline: Outline, *, epsilon_limit: float | None = None, full: bool = True
) -> Outlook:
    """Say what a plan costs and what its noise does, before any data is touched.

    `epsilon_limit`: where the noise is given, an epsilon that the rounds should stay within.
    `full = False` leaves out what would keep the error within 0.3 where that takes seconds.

    **Guarantee:** `views` are upper bounds, as `Guarantee.views`; the rest are facts about noise.
    `tests/test_planning.py` holds each against closed forms and dp-accounting.

    >>> found = look_ahead(Outline(clients=550, numbers=10, rounds=44, epsilon=1.0))
    >>> round(found.noise_multiplier, 2), round(found.error, 3), found.verdict
    (24.75, 0.142, 'the noise is hardly felt')
    >>> found.within.rounds
    195
    """
    delta = outline.delta_of(outline.clients)
    z = outline.noise(delta)
    guarantee = Guarantee(
        events=(outline.event(z),) * outline.rounds,
        participation=outline.participation,
        relation=outline.relation,
        delta=delta,
        clients=outline.clients,
    )
    epsilon, error, views = guarantee.epsilon, outline.error(z, outline.clients), guarantee.views
    grid = grid_of(guarantee.profile)
    over_clip = error / math.sqrt(outline.numbers)
    return Outlook(
        noise_multiplier=z,
        epsilon=epsilon,
        view=view_of(guarantee),
        unit=UNIT,
        relation=outline.relation,
        delta=delta,
        views={**views, "released_shared_model": views.get("outsider", epsilon)},
        reasons={**reasons(guarantee), "released_shared_model": RELEASED},
        accountant=guarantee.profile.accountant,
        cohort=outline.sampler.expected(outline.clients),
        rounds=outline.rounds,
        per_number=over_clip * outline.clip,
        over_clip=over_clip,
        error=error,
        verdict=judge_error(error),
        rounds_at_noise=None
        if epsilon_limit is None or outline.epsilon is not None
        else most_rounds(outline, z, epsilon_limit, outline.rounds),
        within=_within(outline, z, full=full or grid <= HEAVY),
        statement=guarantee.statement(),
        grid=grid,
    )


def judge_error(error: float) -> str:
    """Say what such an error comes to.

    >>> judge_error(0.1), judge_error(33.0)
    ('the noise is hardly felt', 'a posted mean is mostly noise')
    """
    if error <= ERROR:
        return "the noise is hardly felt"
    if error <= 1:
        return "the noise is felt, and a posted mean is still more signal than noise"
    return "a posted mean is mostly noise"


def grid_of(profile: Profile) -> int:
    """Count the points of the grid that an account was made on; 0 for closed forms."""
    directions = profile.directions if isinstance(profile, LossProfile) else ()
    return max((len(direction.above) for direction in directions), default=0)


def _within(outline: Outline, z: float, *, full: bool) -> Within:
    quietest = z * ERROR / outline.error(z, outline.clients)
    most = None
    if full and outline.epsilon is not None:
        guess = math.floor(outline.rounds * (quietest / z) ** 2)
        most = most_rounds(outline, quietest, outline.epsilon, guess)
    return Within(
        error=ERROR,
        rounds=most,
        clients=clients_within(outline, ERROR),
        epsilon=outline.spent(quietest, outline.rounds) if full else None,
        numbers=math.floor(outline.numbers * (quietest / z) ** 2 * (1 + 1e-9)),
    )


def most_rounds(outline: Outline, noise_multiplier: float, epsilon: float, start: int = 1) -> int:
    """Return the most rounds of such noise within epsilon; 0 if one is too many.

    Exact up to 1,000, beyond that at most 1 % too few. Looked for up to `most_looked_for`: that
    answer means as many or more. `start` is a guess, which only saves time.

    >>> outline = Outline(clients=100, numbers=1, rounds=1, epsilon=1.0, delta=1e-5)
    >>> most_rounds(outline, 10.0, 1.0)  # (10 * 0.26805)^2 = 7.19
    7
    """

    def excess(rounds: int) -> float:
        spent = outline.spent(noise_multiplier, rounds)
        # A rounding above the epsilon asked for is no excess.
        return math.log(max(spent, 1e-12) / epsilon) - 1e-9 if spent < math.inf else 1e3

    most = most_looked_for(outline.rounds)
    here = min(max(start, 1), most)
    at = excess(here)
    low, high = (here, at), (here, at)
    # Epsilon is nearly a power of the rounds, at most the first: steps that pass the answer.
    while low[1] > 0 and low[0] > 1:
        high, here = low, max(1, math.floor(low[0] * math.exp(-1.1 * min(low[1], 6.0)) * 0.95))
        low = here, excess(here)
    while high[1] <= 0 and high[0] < most:
        low, here = high, min(most, math.ceil(high[0] * math.exp(-2.2 * max(high[1], -3.0)) * 1.05))
        high = here, excess(here)
    if low[1] > 0:
        return 0
    return most if high[1] <= 0 else _close_in(excess, low, high)


def most_looked_for(rounds: int) -> int:
    """Say up to how many rounds an answer is looked for: ten times those planned, or 10,000."""
    return min(MOST_ROUNDS, max(10 * rounds, 10_000))


def _close_in(
    excess: Callable[[int], float], below: tuple[int, float], above: tuple[int, float]
) -> int:
    """Find the last whole number with excess <= 0 between two that bracket it.

    By the secant in the logarithm, halving now and then.
    """
    (low, at_low), (high, at_high) = below, above
    for turn in range(100):
        if high - low <= (1 if low < 1000 else _CLOSE * low):
            break
        share = 0.5 if turn % 4 == 3 else -at_low / (at_high - at_low)
        middle = round(math.exp(math.log(low) + share * math.log(high / low)))
        middle = min(max(middle, low + 1), high - 1)
        at = excess(middle)
        if at <= 0:
            low, at_low = middle, at
        else:
            high, at_high = middle, at
    return low


def clients_within(outline: Outline, limit: float) -> int | None:
    """Return the fewest clients whose posted mean has an error within a limit, in these rounds.

    Cohorts grow with the clients, so the share that takes part stays. The usual delta falls with
    the number of clients; so the answer is found by going up to it.

    >>> clients_within(Outline(clients=30, numbers=10, rounds=3, epsilon=1.0), 0.3)
    69
    """
    clients, power = 1, 2 if outline.local else 1
    for _ in range(200):
        delta = outline.delta_of(clients)
        if outline.epsilon is not None and -math.expm1(_log_never(outline)) <= delta:
            return None  # taking part at all is rarer than this delta: no noise would be needed
        # It falls with their number; with its square root where each adds noise.
        alone = outline.error(outline.noise(delta), 1.0)
        enough = max(1, math.ceil((alone / limit) ** power * (1 - 1e-12)))
        if enough <= clients:
            return clients
        clients = enough
    return clients


def _log_never(outline: Outline) -> float:
    rate = outline.participation.rate
    return -math.inf if rate == 1 else outline.rounds * math.log1p(-rate)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return "inf" if value == math.inf else value
