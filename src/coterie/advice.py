"""Whether joining pays, from public facts: the rule, its words, and what would change them.

The mean of m clipped vectors of p numbers, posted over T rounds under a budget of mu (Gaussian
differential privacy), has relative error sqrt(p T) / (m mu). Joining pays while it stays near 0.3:

    worth    = (0.3 m mu)^2 / p                        the rounds that the budget bears
    T        = floor(worth) up to 10, floor(sqrt(10 worth)) beyond, from 1 to 50
    T        = 10 where curvatures are posted too (few numbers, long reach)
    verdict  = "learn alone" below 1, "small gain" below 4, "join" from 4 on

and (0.3 m mu)^2 are the most numbers that a posted mean should have. Beyond 10 rounds an error of
0.3 in each is too much noise to add up: they are fewer than are borne. Found on four federations of
65 to 2,410 clients at epsilon 0.5 to 8 (docs/methods/pfeb.md); good to a factor of 3. Classifiers
on public features bear about 20 times as many: isotropic noise mostly cancels in the argmax.

Functions of (clients, budget, numbers), never of a row. This file does not import torch: planning
must be instant. `coterie.rules` applies it to methods and plans.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, Participation, Relation, default_delta
from coterie.privacy.guarantee import round_up
from coterie.privacy.sampling import Poisson

Verdict = Literal["join", "small gain", "learn alone"]

ERROR = 0.3
ROUNDS = (3, 50)
KNEE = 10.0
"""Rounds up to which pfeb takes all that the error bears; beyond, the geometric mean with it."""
FEW_NUMBERS, FAR, FAR_ROUNDS = 5, 300.0, (10, 10)
"""Where so few numbers meet so large a clients times mu, pfeb posts curvatures too."""
MEAN_SHARE = 0.6  # of the budget (mu^2): what pfeb spends on its mean without curvatures
REPLACED = math.sqrt(MEAN_SHARE * 4 + 0.3 * 2 + 0.1)
"""How much further a replaced client moves pfeb's sum than a zeroed one: see `privacy.blocks`."""
CLIP = 1.0  # of a deviation in units of the prior's own (whitened); 2 costs less than .01
SMALL_GAIN, JOIN = 1.0, 4.0
PUBLIC_FEATURES = 20.0
_ALL = Participation("everyone")
_LARGE_EPSILON = 10.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Whether joining pays, and what would change that: a function of public facts.

    Attributes:
        clients: How many there are.
        epsilon: The budget; None where the noise was given instead.
        delta: Of the budget.
        relation: What neighbours are.
        mu: The budget as a posted mean feels it: 1 / (noise of the sum over the clip) if all is
            spent on one round of everyone.
        numbers: Shared weights: the numbers of a posted mean, whatever is posted beside it.
        rounds: As planned, or by rule.
        clip: As planned, or by rule.
        worth: (0.3 clients mu)^2 / numbers, times what classifiers on public features bear.
        most_numbers: The most shared weights with a worth of at least 1.
        verdict: "join", "small gain" or "learn alone".
        words: Why, in one sentence.
        remedies: What would make the verdict better, with numbers.
        needs: For "small gain" and for "join" the fewest `clients` at this budget, the least
            `epsilon` for these clients, and the most `numbers`, one changed at a time.
    """

    clients: int
    epsilon: float | None
    delta: float
    relation: Relation
    mu: float
    numbers: int
    rounds: int
    clip: float
    worth: float
    most_numbers: int
    verdict: Verdict
    words: str
    remedies: tuple[str, ...]
    needs: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; strict JSON."""
        return asdict(self) | {"remedies": list(self.remedies)}

    def told(self) -> str:
        """Say verdict and reason in one line."""
        return f"{self.verdict}: {self.words}"


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
    """Undo `mu_of`."""
    return profile((Gaussian(1 / mu, replaced),), _ALL, relation).epsilon(delta)


def clients_for(
    worth: float,
    epsilon: float,
    numbers: float,
    *,
    delta: float | None = None,
    relation: Relation = "zero_out",
    replaced: float = 2.0,
) -> int:
    """Return the fewest clients with such a worth at this epsilon, all in every round.

    The usual delta falls with the number of clients; so the answer is found by going up to it.

    >>> clients_for(1.0, 1.0, 10)
    40
    """
    clients = 1
    while True:
        mu = mu_of(epsilon, default_delta(clients) if delta is None else delta, relation, replaced)
        enough = max(1, math.ceil(math.sqrt(worth * numbers) / (ERROR * mu) * (1 - 1e-12)))
        if enough <= clients:
            return clients
        clients = enough


def advise(
    clients: int,
    epsilon: float,
    numbers: int,
    *,
    delta: float | None = None,
    relation: Relation = "zero_out",
    cohort: float | None = None,
    rounds: int | None = None,
    tolerance: float = 1.0,
) -> Advice:
    """Say, before any data is touched, whether so many clients should join, by pfeb.

    Args:
        clients: How many there are.
        epsilon: The budget of the whole run.
        numbers: Shared weights: (features + 1) times outputs for a linear model.
        delta: Default min(1e-5, 1 / (10 clients)).
        relation: "zero_out" or "replace".
        cohort: Expected clients a round, hidden coins; None for all.
        rounds: None for those of the rule.
        tolerance: How many times as many numbers are borne: 20 for classifiers on public features.

    >>> advice = advise(clients=550, epsilon=1.0, numbers=10)
    >>> advice.verdict, advice.rounds, advice.most_numbers
    ('join', 44, 1956)
    >>> advise(clients=30, epsilon=1.0, numbers=10).verdict
    'learn alone'
    """
    _check(epsilon, tolerance, clients=clients, numbers=numbers, rounds=rounds)
    delta = default_delta(clients) if delta is None else delta
    mu = mu_of(epsilon, delta, relation, REPLACED)
    rule = _usual_rounds(clients * mu, numbers, tolerance)
    sampler = Poisson(cohort)
    case = Case(
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        mu=mu,
        numbers=numbers,
        rounds=rounds or rule,
        rule=rule,
        clip=CLIP,
        tolerance=tolerance,
        replaced=REPLACED,
    )
    if sampler.expected(clients) < clients:
        z = calibrate(
            epsilon,
            delta,
            weights=(1.0,) * case.rounds,
            participation=sampler.participation(clients),
            relation=relation,
            replaced=REPLACED,
        )
        felt = sampler.expected(clients) * math.sqrt(case.rounds) / (z * clients)
        case = replace(case, mu=felt, kept=felt / mu)
    return judge(case)


def _usual_rounds(reach: float, numbers: int, tolerance: float) -> int:
    if numbers <= FEW_NUMBERS and reach >= FAR:
        return FAR_ROUNDS[1]
    return rounds_for(worth_of(reach, numbers, tolerance), ROUNDS, KNEE)


def rounds_for(worth: float, between: tuple[int, int] = ROUNDS, knee: float = math.inf) -> int:
    """Return the rounds for such a worth: all that it bears up to the knee, fewer beyond."""
    few, many = between
    wanted = worth if worth <= knee else math.sqrt(knee * worth)
    return int(min(max(wanted, few), many))


def verdict_of(worth: float) -> Verdict:
    """Name what such a worth comes to."""
    if worth < SMALL_GAIN:
        return "learn alone"
    return "small gain" if worth < JOIN else "join"


def worth_of(reach: float, numbers: float, tolerance: float = 1.0) -> float:
    """Return the rounds that are borne, for clients times mu of `reach`."""
    return (ERROR * reach) ** 2 * tolerance / numbers


def _check(epsilon: float, tolerance: float, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: expected at least 1")
    if not 0 < epsilon < math.inf:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number; without privacy there is no noise, "
            "and nothing to be weighed"
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance = {tolerance}: expected a positive number, such as 1 or 20")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The facts of an advice.

    `replaced` is as in `mu_of`, `kept` the share of mu that cohorts and other noise leave, `local`
    says that clients add the noise themselves, `classes` that they may be predicted, and `rule` are
    the rounds that a method's own rule gives.
    """

    clients: int
    epsilon: float | None
    delta: float
    relation: Relation
    mu: float
    numbers: int
    rounds: int
    rule: int
    clip: float
    tolerance: float
    replaced: float = 2.0
    kept: float = 1.0
    local: bool = False
    classes: bool = True

    @property
    def worth(self) -> float:
        """The rounds that are borne."""
        return worth_of(self.clients * self.mu, self.numbers, self.tolerance)

    def needs(self, worth: float) -> dict[str, float]:
        """Return what would come to such a worth, if one fact at a time were changed."""
        factor = math.sqrt(worth / self.worth)
        if self.epsilon is None or self.local:
            clients = math.ceil(self.clients * factor ** (2 if self.local else 1))
        else:
            # Only the usual delta moves with the clients; one that was given stays.
            usual = self.delta == default_delta(self.clients)
            clients = clients_for(
                worth,
                self.epsilon,
                self.numbers / self.tolerance / self.kept**2,
                delta=None if usual else self.delta,
                relation=self.relation,
                replaced=self.replaced,
            )
        whole = self.mu / self.kept * factor
        return {
            "clients": clients,
            "epsilon": epsilon_of(whole, self.delta, self.relation, self.replaced),
            "numbers": math.floor(self.numbers * self.worth / worth),
        }


def judge(case: Case) -> Advice:
    """Return the verdict on a case, why, and what would change it."""
    worth = case.worth
    verdict = verdict_of(worth)
    least = {"small gain": SMALL_GAIN, "join": JOIN}
    needs = {name: case.needs(enough) for name, enough in least.items()}
    better = {name: need for name, need in needs.items() if worth < least[name]}
    return Advice(
        clients=case.clients,
        epsilon=case.epsilon,
        delta=case.delta,
        relation=case.relation,
        mu=case.mu,
        numbers=case.numbers,
        rounds=case.rounds,
        clip=case.clip,
        worth=worth,
        most_numbers=math.floor(case.numbers * worth),
        verdict=verdict,
        words=_words(case, verdict),
        remedies=(*_remedies(case, better), *_fewer_rounds(case)),
        needs=needs,
    )


def _words(case: Case, verdict: Verdict) -> str:
    budget = "this noise" if case.epsilon is None else f"epsilon {case.epsilon:g}"
    told = (
        f"{case.clients:,} clients at {budget} bear {count_of(case.numbers * case.worth)} shared "
        f"weights, and {case.numbers:,} are to be shared"
    )
    if verdict == "learn alone":
        return f"{told}, which is too many even for one round"
    borne = rounds_for(case.worth, (1, case.rule))
    rounds = "one round" if borne == 1 else f"{borne} rounds"
    if verdict == "small gain":
        return f"{told}, which is enough for {rounds}: expect a little"
    return f"{told}, which is enough for {rounds}"


def _remedies(case: Case, needs: dict[str, dict[str, float]]) -> tuple[str, ...]:
    """Say what would change the verdict: clients, epsilon, shared weights, public features."""
    if not needs:
        return ()
    at = "at this noise" if case.epsilon is None else f"at epsilon {case.epsilon:g}"
    clients = _by_verdict({name: f"{need['clients']:,}" for name, need in needs.items()})
    epsilons = {
        name: round_up(need["epsilon"], 3)
        for name, need in needs.items()
        if need["epsilon"] <= _LARGE_EPSILON
    }
    fewer = {name: f"{need['numbers']:,.0f}" for name, need in needs.items() if need["numbers"]}
    bearable = PUBLIC_FEATURES * case.numbers * case.worth / case.tolerance
    return (
        f"More clients: {clients}, {at}.",
        f"A larger epsilon: {_by_verdict(epsilons)}, for these {case.clients:,} clients."
        if epsilons
        else f"No epsilon of up to {_LARGE_EPSILON:g} is enough for {case.clients:,} clients.",
        f"Fewer shared weights: at most {_by_verdict(fewer)}; leave features out, or share a slice."
        if fewer
        else "However few weights are shared, it is not enough.",
        *_public_features(case, bearable),
        *_everyone(case),
    )


def _by_verdict(values: dict[str, str]) -> str:
    ends = {"small gain": "for a small gain", "join": "to join"}
    return ", ".join(f"{value} {ends[name]}" for name, value in values.items())


def _public_features(case: Case, bearable: float) -> tuple[str, ...]:
    if case.tolerance > 1 or bearable < 1 or not case.classes:
        return ()
    return (
        "Public features: a classifier on those of a network that was trained on public data bears "
        f"about {PUBLIC_FEATURES:g} times as many weights ({count_of(bearable)}); shared = "
        '"slice" shares a few of their directions times the classes.',
    )


def _everyone(case: Case) -> tuple[str, ...]:
    """Say what small cohorts cost."""
    whole = case.worth / case.kept**2
    small = case.kept < 1 - 1e-6  # noise is found to about so many digits
    if case.local or not small or verdict_of(whole) == verdict_of(case.worth):
        return ()
    return (f"Everyone in every round: the same budget would come to {verdict_of(whole)!r}.",)


def _fewer_rounds(case: Case) -> tuple[str, ...]:
    if case.rounds <= 2 * case.rule:
        return ()
    return (
        f"Fewer rounds: the budget bears {case.rule}, and {case.rounds} are asked for; each round "
        "more adds noise.",
    )


def count_of(number: float) -> str:
    """Write how many, with as many digits as matter."""
    return f"{math.floor(number):,}" if number >= 10 else f"{number:.2g}"
