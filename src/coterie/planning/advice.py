"""Whether joining pays and what a plan costs, from public facts: no data, no torch.

A released mean of q expected clients, each clipped to C, has noise of standard deviation z C / q in
each of its p parameters. Relative to the clip, the noise of the whole mean is

    error = sqrt(p) z / q                 of every release
          = sqrt(p T) / (m mu)            with all m clients in T rounds of a budget mu (zero_out)

Below 0.3 the noise is negligible; above 1 a release is mostly noise. Joining pays while the error
stays near 0.3, which the budget affords for

    affordable rounds = (0.3 m mu)^2 / p
    T       = all of them up to 10, sqrt(10 affordable) beyond, between 3 and 50
    T       = 10 where second derivatives are released too (few parameters, large m mu)
    verdict = "learn alone" below a cut of 1 affordable round (linear classifiers: 2/5, networks:
              `rules`), "small gain" below 4 times the cut, "join" beyond

Clients with fewer rows than weights move the mean more slowly: where the rows per client are
declared, the cut is larger by weights / rows (`cut_for`),

and (0.3 m mu)^2 is the largest dimension that a released mean should have (of linear classifiers
2.5 times that, and on public features 20 times, because isotropic noise mostly cancels in the
argmax). The rule was found on real federations of 65 to 2,410 clients and on generated ones, and
checked on others (docs/methods/auto.md, `benchmarks/verdict.py`).

`coterie.planning.rules` applies the rule to methods and plans.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from coterie.privacy.accounting import LossProfile, profile, profile_of
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import (
    Event,
    Gaussian,
    LocalGaussian,
    Participation,
    Relation,
    SharedGaussian,
    default_delta,
)
from coterie.privacy.guarantee import UNIT, Guarantee, reasons, round_up, view_of
from coterie.privacy.profiles import Profile, gaussian_mu
from coterie.privacy.sampling import Poisson, Sampler

Verdict = Literal["join", "small gain", "learn alone"]
Points = tuple[tuple[float, float], ...]

ERROR = 0.3
ROUNDS = (3, 50)
KNEE = 10.0
"""Up to this many rounds pfeb takes all that are affordable; beyond, the geometric mean with it."""
FEW_PARAMETERS, LARGE_BUDGET, LARGE_BUDGET_ROUNDS = 5, 300.0, (10, 10)
"""With so few parameters and so large a clients times mu, pfeb releases second derivatives too."""
MEAN_SHARE = 0.6  # of the budget (mu^2): what pfeb spends on its mean without second derivatives
CLIP = 1.0  # in units of the prior's standard deviation; 2 costs less than .01
SMALL_GAIN, JOIN = 1.0, 4.0
PUBLIC_FEATURES = 20.0
CUT_CLASSES = 2 / 5
"""Affordable rounds from which joining gains for linear classifiers; for others 1."""
MOST_ROUNDS = 1_000_000
HEAVY = 100_000
"""Points of an accounting grid beyond which each query takes some tenths of a second."""
RELEASED = (
    "A shared model is computed only from the releases, so its epsilon is that of the releases. A "
    "client who receives it is one of the other clients."
)
_KEYS = {
    "parameters": "numbers",
    "affordable_rounds": "worth",
    "max_parameters": "most_numbers",
    "reason": "words",
}  # where the keys of JSON differ from the names of attributes
_ALL = Participation("everyone")
_LARGE_EPSILON = 10.0
_CLOSE = 0.01  # above a thousand, rounds are found to this relative precision and rounded down
_SHORT = 0.01  # a Newton step this short in log(noise) leaves no visible error


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The public facts of a plan whose releases are clipped sums with Gaussian noise.

    Attributes:
        parameters: Dimension of a released mean.
        epsilon: The budget; None where `noise_multiplier` is given instead.
        delta: None for the default, which falls with the number of clients.
        local: Whether clients add the noise themselves.
        shares: Under noise in shares: fewest clients of a sum, and how many may collude.
        stretch: Noise of the released mean relative to that of one clipped sum; more than 1 where
            parts of a contribution share the budget.
        replaced: How much further a replaced client moves the sum than a zeroed one.
        tolerance: How many times more parameters are tolerable: 20 for public features.
        cut: Affordable rounds from which joining gains.
        classes: Whether the task may be a classification.
    """

    clients: int
    parameters: int
    rounds: int
    sampler: Sampler = field(default_factory=Poisson)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    relation: Relation = "zero_out"
    clip: float = 1.0
    local: bool = False
    shares: tuple[int, int] | None = None
    stretch: float = 1.0
    replaced: float = 2.0
    tolerance: float = 1.0
    cut: float = SMALL_GAIN
    classes: bool = True

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon = {self.epsilon}, noise_multiplier = {self.noise_multiplier}: give "
                "exactly one of them"
            )
        for name in ("clients", "parameters", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.rounds > MOST_ROUNDS:
            raise ValueError(f"rounds = {self.rounds}: expected at most {MOST_ROUNDS:,}")
        for name, least, most in (("noise_multiplier", 1e-5, 1e9), ("delta", 1e-30, 1 - 1e-9)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} = {value}: expected a number from {least:g} to {most:g}")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance = {self.tolerance}: expected a positive number")

    @property
    def participation(self) -> Participation:
        """Who takes part, for the accountant."""
        return self.sampler.participation(self.clients)

    def delta_of(self, clients: int) -> float:
        """Return the delta for a number of clients."""
        return default_delta(clients) if self.delta is None else self.delta

    @property
    def counted(self) -> Participation:
        """The sampling as the budget counts it, against whoever observes or arranges most of it."""
        who = self.participation
        if self.shares is not None:
            return who.always
        return who.shown if self.local else who.to_others

    def event(self, noise_multiplier: float) -> Event:
        """Return the event of a release with this noise."""
        if self.local:
            return LocalGaussian(noise_multiplier)
        if self.shares is not None:
            return SharedGaussian(noise_multiplier, self.replaced, *self.shares)
        return Gaussian(noise_multiplier, self.replaced)

    def noise(self, delta: float) -> float:
        """Return the noise multiplier: as given, or the least that meets the budget."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return calibrate(
            self.epsilon,
            delta,
            weights=(1.0,) * self.rounds,
            participation=self.counted,
            relation=self.relation,
            replaced=2.0 if self.local else self.replaced,
        )

    def error(self, noise_multiplier: float, clients: float) -> float:
        """Return the noise of a released mean over the clip; cohorts grow with the clients."""
        cohort = self.participation.rate * clients
        averaged = math.sqrt(cohort) if self.local else cohort  # each client's own noise adds up
        if self.shares is not None:  # the shares of clients that need not answer add up too
            averaged *= math.sqrt((self.shares[0] - self.shares[1]) / self.clients)
        return math.sqrt(self.parameters) * self.stretch * noise_multiplier / averaged

    def mu(self) -> float:
        """Return the budget as a released mean has it: 1 / (noise of one round of everyone)."""
        z = self.noise(self.delta_of(self.clients))
        per_parameter = self.error(z, self.clients) / math.sqrt(self.parameters)
        return math.sqrt(self.rounds) / per_parameter / self.clients

    def spent(self, noise_multiplier: float, rounds: int) -> float:
        """Return epsilon after a number of rounds with this noise."""
        if noise_multiplier < 1e-5:
            return math.inf
        counted = ((self.event(noise_multiplier), rounds),)
        found = profile_of(counted, self.counted, self.relation)
        return found.epsilon(self.delta_of(self.clients))


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Whether joining pays, and what would change that: a function of public facts.

    Attributes:
        epsilon: The budget; None where the noise was given instead.
        mu: 1 / (noise of the sum over the clip) if the whole budget is spent on one round of
            everyone.
        parameters: Shared parameters: the dimension of a released mean.
        rounds: As planned, or by rule; likewise `clip`.
        affordable_rounds: (0.3 clients mu)^2 / parameters, times the tolerance.
        cut: How many of these are enough for a small gain; four times as many to join.
        max_parameters: The most shared parameters with which joining gains.
        reason: Why the verdict is as it is, as text.
        remedies: What would improve the verdict, with numbers.
        needs: For "small gain" and "join": the fewest `clients`, the least `epsilon` and the most
            `parameters`, one changed at a time.
    """

    clients: int
    epsilon: float | None
    delta: float
    relation: Relation
    mu: float
    parameters: int
    rounds: int
    clip: float
    affordable_rounds: float
    cut: float
    max_parameters: int
    verdict: Verdict
    reason: str
    remedies: tuple[str, ...]
    needs: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the keys that scripts rely on; strict JSON."""

        def keyed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {_KEYS.get(key, key): value for key, value in values.items()}

        needs = {name: keyed(need) for name, need in self.needs.items()}
        return keyed({**vars(self), "remedies": list(self.remedies), "needs": needs})

    def __repr__(self) -> str:
        budget = "" if self.epsilon is None else f", epsilon {self.epsilon:g}"
        return (
            f"<Advice: {self.verdict}, {self.clients:,} clients{budget}, "
            f"{self.parameters:,} shared parameters, {self.rounds:,} rounds>"
        )

    def __str__(self) -> str:
        return f"{self.verdict.capitalize()}: {self.reason[0].lower()}{self.reason[1:]}"


def mu_of(
    epsilon: float, delta: float, relation: Relation = "zero_out", replaced: float = 2.0
) -> float:
    """Return 1 / z of the one release of everyone's clipped sum that spends the whole budget.

    `replaced`: how much further a replaced client moves the sum than a zeroed one.

    >>> round(mu_of(1.0, 1e-5), 3)
    0.268
    """
    return 1 / calibrate(
        epsilon, delta, weights=(1.0,), participation=_ALL, relation=relation, replaced=replaced
    )


def epsilon_of(
    mu: float, delta: float, relation: Relation = "zero_out", replaced: float = 2.0
) -> float:
    """Return the epsilon whose `mu_of` this is."""
    return profile((Gaussian(1 / mu, replaced),), _ALL, relation).epsilon(delta)


def affordable_rounds(n_mu: float, parameters: float, tolerance: float = 1.0) -> float:
    """Return how many rounds keep the error at 0.3, for clients times mu of `n_mu`."""
    return (ERROR * n_mu) ** 2 * tolerance / parameters


def rounds_for(affordable: float, between: tuple[int, int] = ROUNDS, knee: float = math.inf) -> int:
    """Return the rounds by rule: all that are affordable up to the knee, fewer beyond."""
    few, many = between
    wanted = affordable if affordable <= knee else math.sqrt(knee * affordable)
    return int(min(max(wanted, few), many))


def verdict_of(affordable: float, cut: float = SMALL_GAIN) -> Verdict:
    """Return the verdict for a number of affordable rounds, and that from which joining gains."""
    if affordable < SMALL_GAIN * cut:
        return "learn alone"
    return "small gain" if affordable < JOIN * cut else "join"


def cut_for(weights: int, *, classes: bool, rows: float | None = None) -> float:
    """Return the affordable rounds from which joining gains, for linear models.

    `weights` are those of one output; `rows` the usual number of a client, None if not declared.

    >>> cut_for(10, classes=False), cut_for(136, classes=False, rows=12)
    (1.0, 11.333333333333334)
    """
    usual = CUT_CLASSES if classes else SMALL_GAIN
    return usual * (1.0 if rows is None else max(1.0, weights / rows))


def clients_for(
    affordable: float,
    epsilon: float,
    parameters: float,
    *,
    delta: float | None = None,
    relation: Relation = "zero_out",
    replaced: float = 2.0,
) -> int:
    """Return the fewest clients who can afford so many rounds at this epsilon, all in every round.

    >>> clients_for(1.0, 1.0, 10)
    40
    """

    def enough(clients: int) -> float:
        mu = mu_of(epsilon, default_delta(clients) if delta is None else delta, relation, replaced)
        return math.sqrt(affordable * parameters) / (ERROR * mu)

    found = _fewest(enough)
    assert found is not None
    return found


def _fewest(enough: Callable[[int], float | None]) -> int | None:
    """Return the least n with enough(n) <= n; the default delta makes `enough` grow slowly."""
    clients = 1
    for _ in range(200):
        wanted = enough(clients)
        if wanted is None:
            return None
        least = max(1, math.ceil(wanted * (1 - 1e-12)))
        if least <= clients:
            return clients
        clients = least
    return clients


def advise(  # noqa: PLR0913 - facts of a plan
    clients: int,
    epsilon: float,
    parameters: int,
    *,
    delta: float | None = None,
    relation: Relation = "zero_out",
    cohort: float | None = None,
    rounds: int | None = None,
    tolerance: float = 1.0,
    cut: float = SMALL_GAIN,
) -> Advice:
    """Return, before any data is read, whether these clients should join, under pfeb.

    Args:
        clients: Number of clients.
        epsilon: The budget of the whole run.
        parameters: Shared parameters: (features + 1) times outputs for a linear model.
        delta: Default min(1e-5, 1 / (10 clients)).
        relation: "zero_out" or "replace".
        cohort: Expected clients per round under hidden Poisson sampling; None for all.
        rounds: None for the rule's.
        tolerance: How many times more parameters are tolerable: 20 for public features.
        cut: Affordable rounds from which joining gains, see `cut_for`.

    >>> advice = advise(clients=550, epsilon=1.0, parameters=10)
    >>> advice.verdict, advice.rounds, advice.max_parameters
    ('join', 44, 1956)
    >>> advise(clients=30, epsilon=1.0, parameters=10).verdict
    'learn alone'
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number; without privacy there is no noise "
            "to weigh"
        )
    facts = Facts(
        clients=clients,
        parameters=parameters,
        rounds=1 if rounds is None else rounds,
        sampler=Poisson(cohort),
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        clip=CLIP,
        tolerance=tolerance,
        cut=cut,
    )
    mu = mu_of(epsilon, facts.delta_of(clients), relation)
    rule = rounds_for(affordable_rounds(clients * mu, parameters, tolerance), ROUNDS, KNEE)
    if parameters <= FEW_PARAMETERS and clients * mu >= LARGE_BUDGET:
        rule = LARGE_BUDGET_ROUNDS[1]
    facts = replace(facts, rounds=rounds or rule)
    whole = facts.sampler.expected(clients) >= clients
    return judge(facts, mu=mu if whole else facts.mu(), rule=rule)


def judge(facts: Facts, *, mu: float, rule: int) -> Advice:
    """Return the verdict on a plan, the reason, and what would change it.

    `mu` is the budget as a released mean has it, see `Facts.mu`; `rule` the rounds that the
    method's own rule chooses.
    """
    affordable = affordable_rounds(facts.clients * mu, facts.parameters, facts.tolerance)
    verdict, delta = verdict_of(affordable, facts.cut), facts.delta_of(facts.clients)
    budget = None
    if facts.epsilon is not None:
        budget = mu_of(facts.epsilon, delta, facts.relation, facts.replaced)
    # The share of mu that is left by sampling and by noise that clients add themselves.
    kept = 1.0 if budget is None else mu / budget
    least = {"small gain": SMALL_GAIN * facts.cut, "join": JOIN * facts.cut}
    needs = {name: _needs(facts, mu, kept, affordable, goal) for name, goal in least.items()}
    better = {name: need for name, need in needs.items() if affordable < least[name]}
    return Advice(
        clients=facts.clients,
        epsilon=facts.epsilon,
        delta=delta,
        relation=facts.relation,
        mu=mu,
        parameters=facts.parameters,
        rounds=facts.rounds,
        clip=facts.clip,
        affordable_rounds=affordable,
        cut=facts.cut,
        max_parameters=math.floor(facts.parameters * affordable / facts.cut),
        verdict=verdict,
        reason=_reason(facts, affordable, rule),
        remedies=(
            *(_remedies(facts, affordable, better) if better else ()),
            *_other_rounds(facts, affordable, kept, rule),
        ),
        needs=needs,
    )


def _needs(
    facts: Facts, mu: float, kept: float, affordable: float, goal: float
) -> dict[str, float]:
    """Return what would afford `goal` rounds, if one fact at a time were changed."""
    factor = math.sqrt(goal / affordable)
    delta = facts.delta_of(facts.clients)
    if facts.epsilon is None or facts.local:
        clients = math.ceil(facts.clients * factor ** (2 if facts.local else 1))
    else:
        clients = clients_for(
            goal,
            facts.epsilon,
            facts.parameters / facts.tolerance / kept**2,
            # Only the default delta moves with the clients; one that was given stays.
            delta=None if delta == default_delta(facts.clients) else delta,
            relation=facts.relation,
            replaced=facts.replaced,
        )
    return {
        "clients": clients,
        "epsilon": epsilon_of(mu / kept * factor, delta, facts.relation, facts.replaced),
        "parameters": math.floor(facts.parameters * affordable / goal),
    }


def _reason(facts: Facts, affordable: float, rule: int) -> str:
    budget = "this noise" if facts.epsilon is None else f"epsilon {facts.epsilon:g}"
    clients = "1 client" if facts.clients == 1 else f"{facts.clients:,} clients"
    most = format_count(facts.parameters * affordable / facts.cut)
    text = (
        f"With {clients}, {budget} supports models with up to {most} shared parameters. "
        f"This model shares {facts.parameters:,}: "
    )
    verdict = verdict_of(affordable, facts.cut)
    if verdict == "learn alone":
        return f"{text}too many even for one round."
    rounds = rounds_for(affordable, (1, rule))
    text += f"enough budget for {'one round' if rounds == 1 else f'{rounds} rounds'}"
    if rounds < facts.rounds:
        text += f"; the {facts.rounds:,} rounds of this plan are noisier"
    return f"{text}. Expect a small gain." if verdict == "small gain" else f"{text}."


def _remedies(
    facts: Facts, affordable: float, needs: dict[str, dict[str, float]]
) -> tuple[str, ...]:
    """Return what would improve the verdict: clients, epsilon, parameters, public features."""
    at = "at this noise" if facts.epsilon is None else f"at epsilon {facts.epsilon:g}"
    clients = _by_verdict({name: f"{need['clients']:,}" for name, need in needs.items()})
    epsilons = {
        name: round_up(need["epsilon"], 3)
        for name, need in needs.items()
        if need["epsilon"] <= _LARGE_EPSILON
    }
    fewer = {
        name: f"{need['parameters']:,.0f}" for name, need in needs.items() if need["parameters"]
    }
    return (
        f"More clients: {clients}, {at}.",
        f"A larger epsilon: {_by_verdict(epsilons)}, for these {facts.clients:,} clients."
        if epsilons
        else f"No epsilon up to {_LARGE_EPSILON:g} is enough for {facts.clients:,} clients.",
        f"Fewer shared parameters: at most {_by_verdict(fewer)}; use fewer features, or share a "
        "slice."
        if fewer
        else "No number of shared parameters is small enough.",
        *_public_features(facts, affordable),
    )


def _by_verdict(values: dict[str, str]) -> str:
    ends = {"small gain": "for a small gain", "join": "to join"}
    return ", ".join(f"{value} {ends[name]}" for name, value in values.items())


def _public_features(facts: Facts, affordable: float) -> tuple[str, ...]:
    most = PUBLIC_FEATURES * facts.parameters * affordable / facts.tolerance
    if facts.tolerance >= PUBLIC_FEATURES or most < 1 or not facts.classes:
        return ()
    return (
        "Public features: a classifier on features of a network trained on public data tolerates "
        f"about {PUBLIC_FEATURES:g} times as many parameters ({format_count(most)}); shared = "
        '"slice" shares a few of their directions per class.',
    )


def _other_rounds(facts: Facts, affordable: float, kept: float, rule: int) -> Iterator[str]:
    """Yield what small cohorts and too many rounds cost, as text."""
    small = kept < 1 - 1e-6  # noise is calibrated to about so many digits
    now, whole = (verdict_of(one, facts.cut) for one in (affordable, affordable / kept**2))
    if now != "join" and small and not facts.local and whole != now:
        yield f"All clients in every round: the verdict would be {whole!r}."
    if facts.rounds > 2 * rule:
        yield (
            f"Fewer rounds: the budget affords {rule}, and {facts.rounds} are planned; every "
            "further round adds noise."
        )


def format_count(number: float) -> str:
    """Return a count, rounded down; below one, two digits."""
    return f"{math.floor(number):,}" if number >= 1 else f"{number:.2g}"


def describe_error(error: float) -> str:
    """Return what the relative error of a released mean implies: the clip bounds every signal.

    >>> describe_error(0.1), describe_error(33.0)
    ('negligible', 'larger than any signal')
    """
    if error <= ERROR:
        return "negligible"
    return "noticeable" if error <= 1 else "larger than any signal"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan costs, and what its noise does to a release.

    Attributes:
        noise_multiplier: Noise of a released sum over the clip (of a client's own message, where
            clients add the noise).
        error: Noise of a whole released mean over the clip.
        rounds_at_noise: Where noise was given, the most rounds within `epsilon_limit`.
        within: What keeps the error within 0.3, one fact changed at a time: the most `rounds` (0 if
            one is too many), the fewest `clients`, the least `epsilon`, the most `parameters`; None
            where unknown, or where the answer would take long.
        grid: Points of the accounting grid, 0 for closed forms: how long further queries take.
    """

    facts: Facts
    guarantee: Guarantee
    noise_multiplier: float
    error: float
    rounds_at_noise: int | None
    within: dict[str, float | None]
    grid: int

    @property
    def epsilon(self) -> float:
        """Epsilon that is spent, against `view`."""
        return self.guarantee.epsilon

    @property
    def over_clip(self) -> float:
        """Standard deviation of each parameter of a released mean over the clip."""
        return self.error / math.sqrt(self.facts.parameters)

    @property
    def cohort(self) -> float:
        """Expected clients per round."""
        return self.facts.sampler.expected(self.facts.clients)

    @property
    def views(self) -> dict[str, float]:
        """Epsilon by adversary; an outsider may receive a released shared model."""
        views = self.guarantee.views
        return {**views, "released_shared_model": views.get("outsider", self.epsilon)}

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the keys that scripts rely on; infinity is "inf"."""
        guarantee = self.guarantee
        within = {_KEYS.get(key, key): value for key, value in self.within.items()}
        found: dict[str, Any] = _strict(
            {
                "noise_multiplier": self.noise_multiplier,
                "accountant": guarantee.profile.accountant,
                "cohort": self.cohort,
                "rounds_at_noise": self.rounds_at_noise,
                "within": {"error": ERROR, **within},
                "statement": guarantee.statement(),
                "epsilon_spent": self.epsilon,
                "epsilon_by_view": self.views,
                "view": view_of(guarantee),
                "unit": UNIT,
                "reasons": {**reasons(guarantee), "released_shared_model": RELEASED},
                "sampling": self.facts.sampler.kind,
                "cohort_visible": self.facts.participation.visible,
                "error": {
                    "per_number": self.over_clip * self.facts.clip,
                    "over_clip": self.over_clip,
                    "relative": self.error,
                    "verdict": describe_error(self.error),
                },
            }
        )
        return found


def forecast(facts: Facts, *, epsilon_limit: float | None = None, full: bool = True) -> Forecast:
    """Return what a plan costs and what its noise does, before any data is read.

    `epsilon_limit`: where the noise is given, an epsilon that the rounds should stay within.
    `full = False` omits what would keep the error within 0.3 where that takes seconds.

    **Guarantee:** `views` are upper bounds, as `Guarantee.views`; the rest are facts about noise.
    `tests/planning/test_advice.py` checks each against closed forms and dp-accounting.

    >>> found = forecast(Facts(clients=550, parameters=10, rounds=44, epsilon=1.0))
    >>> round(found.noise_multiplier, 2), round(found.error, 3), found.within["rounds"]
    (24.75, 0.142, 195)
    """
    delta = facts.delta_of(facts.clients)
    z = facts.noise(delta)
    guarantee = Guarantee(
        events=(facts.event(z),) * facts.rounds,
        participation=facts.participation,
        relation=facts.relation,
        delta=delta,
        clients=facts.clients,
    )
    grid = 0 if facts.shares is not None else grid_of(guarantee.profile)
    most = None
    if epsilon_limit is not None and facts.epsilon is None:
        most = most_rounds(facts, z, epsilon_limit, facts.rounds)
    return Forecast(
        facts=facts,
        guarantee=guarantee,
        noise_multiplier=z,
        error=facts.error(z, facts.clients),
        rounds_at_noise=most,
        within=_within(facts, z, full=full or grid <= HEAVY),
        grid=grid,
    )


def grid_of(profile: Profile) -> int:
    """Return the number of points of an accounting grid; 0 for closed forms."""
    directions = profile.directions if isinstance(profile, LossProfile) else ()
    return max((len(direction.above) for direction in directions), default=0)


def _within(facts: Facts, z: float, *, full: bool) -> dict[str, float | None]:
    quietest = z * ERROR / facts.error(z, facts.clients)
    rounds = None
    if full and facts.epsilon is not None:
        guess = math.floor(facts.rounds * (quietest / z) ** 2)
        rounds = most_rounds(facts, quietest, facts.epsilon, guess)
    return {
        "rounds": rounds,
        "clients": clients_within(facts, ERROR),
        "epsilon": facts.spent(quietest, facts.rounds) if full else None,
        "parameters": math.floor(facts.parameters * (quietest / z) ** 2 * (1 + 1e-9)),
    }


def most_rounds(facts: Facts, noise_multiplier: float, epsilon: float, start: int = 1) -> int:
    """Return the most rounds of this noise within epsilon; 0 if one is too many.

    Exact up to 1,000; beyond, at most 1 % too few. The search ends at `search_limit`: that answer
    means as many or more. `start` is a guess, which only saves time.

    >>> facts = Facts(clients=100, parameters=1, rounds=1, epsilon=1.0, delta=1e-5)
    >>> most_rounds(facts, 10.0, 1.0)  # (10 * 0.26805)^2 = 7.19
    7
    """

    def excess(rounds: int) -> float:
        spent = facts.spent(noise_multiplier, rounds)
        # Rounding above the epsilon asked for is no excess.
        return math.log(max(spent, 1e-12) / epsilon) - 1e-9 if spent < math.inf else 1e3

    most = search_limit(facts.rounds)
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
    return most if high[1] <= 0 else _bisect(excess, low, high)


def search_limit(rounds: int) -> int:
    """Return up to how many rounds an answer is searched: ten times those planned, or 10,000."""
    return min(MOST_ROUNDS, max(10 * rounds, 10_000))


def _bisect(
    excess: Callable[[int], float], below: tuple[int, float], above: tuple[int, float]
) -> int:
    """Return the last whole number with excess <= 0, by secants in the logarithm and halving."""
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


def clients_within(facts: Facts, limit: float) -> int | None:
    """Return the fewest clients whose released mean has an error within a limit.

    Cohorts grow with the clients, so the sampling rate stays.

    >>> clients_within(Facts(clients=30, parameters=10, rounds=3, epsilon=1.0), 0.3)
    69
    """
    rate = facts.counted.rate
    certain = rate == 1 or facts.counted.kind == "cyclic"
    log_never = -math.inf if certain else facts.rounds * math.log1p(-rate)

    def enough(clients: int) -> float | None:
        delta = facts.delta_of(clients)
        if facts.epsilon is not None and -math.expm1(log_never) <= delta:
            return None  # taking part at all is rarer than delta: no noise would be needed
        error = facts.error(facts.noise(delta), 1.0) / limit
        return error**2 if facts.local else error

    return _fewest(enough)


def noises_near(
    facts: Facts, noise_multiplier: float, epsilons: Sequence[float]
) -> dict[float, float]:
    """Return the approximate noise for other epsilons, each from that of the nearest; to 2 %."""
    assert facts.epsilon is not None
    centre = facts.epsilon
    known = {centre: noise_multiplier}
    for epsilon in sorted(epsilons, key=lambda one: abs(math.log(one / centre))):
        if epsilon not in known:
            nearest = min(known, key=lambda one: abs(math.log(one / epsilon)))
            known[epsilon] = _noise_near(replace(facts, epsilon=nearest), known[nearest], epsilon)
    return known


def _noise_near(facts: Facts, noise_multiplier: float, epsilon: float) -> float:
    """Return the approximate noise for another epsilon, from that for `facts.epsilon`.

    One or two queries instead of a search: a guess by the central limit of sampled rounds (Bu,
    Dong, Long and Su 2020), scaled to be right at the known noise, then a Newton step on the mu of
    the Gaussian DP with the same delta, and a secant step where that one was long. For tables,
    never for a guarantee.
    """
    delta, rounds = facts.delta_of(facts.clients), facts.rounds
    rate = facts.participation.rate
    assert facts.epsilon is not None

    def limit(mu: float) -> float:
        return 1 / math.sqrt(math.log1p(mu**2 / (rate**2 * rounds)))

    def reached(z: float) -> float:
        found = profile_of(((facts.event(z), rounds),), facts.counted, facts.relation)
        return gaussian_mu(epsilon, min(max(found.delta(epsilon), 1e-300), 1 - 1e-9))

    goal = gaussian_mu(epsilon, delta)
    first = noise_multiplier / limit(gaussian_mu(facts.epsilon, delta)) * limit(goal)
    slope = math.log(limit(goal * 1.01) / limit(goal)) / math.log(1.01)
    mu = reached(first)
    second = float(first * (goal / mu) ** slope)
    if abs(math.log(second / first)) < _SHORT:
        return second
    again = reached(second)
    secant = math.log(second / first) / math.log(again / mu) if again != mu else slope
    return float(second * (goal / again) ** secant)


def epsilon_by_rounds(found: Forecast, points: int = 6) -> Points:
    """Return epsilon against rounds at this noise, up to three times those planned."""
    facts = found.facts
    beyond = min(3 * facts.rounds, MOST_ROUNDS)
    return tuple(
        (float(rounds), facts.spent(found.noise_multiplier, rounds))
        for rounds in (*_spaced(1, facts.rounds, points - 1), beyond)
    )


def error_by_clients(found: Forecast, points: int = 8) -> Points:
    """Return the error against clients at this noise, from a tenth to ten times as many."""
    clients = found.facts.clients
    return tuple(
        (float(count), found.facts.error(found.noise_multiplier, count))
        for count in _spaced(max(1, clients // 10), 10 * clients, points)
    )


def _spaced(low: int, high: int, points: int) -> list[int]:
    """Return whole numbers between two, evenly spaced in their logarithms, both ends included."""
    step = math.log(high / low) / max(1, points - 1)
    return sorted({low, high, *(round(low * math.exp(step * turn)) for turn in range(points))})


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    return "inf" if value == math.inf else value
