"""Rules: what was left open in a plan, filled in from public facts before any data is touched.

Which method (`choose`), how many rounds (`rounds_by_rule`), which clip; and whether joining pays at
all (`advice_for`), by the rule of `coterie.advice`. Everything here is a function of the spec of
the data and of the plan's own settings, so nothing here is paid for.
"""

import math
from dataclasses import dataclass, replace

from coterie.advice import (
    ERROR,
    FAR_ROUNDS,
    PUBLIC_FEATURES,
    ROUNDS,
    SMALL_GAIN,
    Advice,
    Case,
    advise,
    count_of,
    judge,
    mu_of,
    rounds_for,
    worth_of,
)
from coterie.data.federated import Spec
from coterie.methods.auto import Auto
from coterie.methods.base import Method, Shape
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.plan import Plan, Privacy
from coterie.privacy.events import default_delta
from coterie.privacy.mechanisms import replaced_by
from coterie.privacy.sampling import Poisson, Sampler

__all__ = [
    "Advice",
    "Settled",
    "advice_for",
    "advise",
    "choose",
    "plan_for",
    "reach_of",
    "rounds_by_rule",
    "settle",
    "usual",
]

NETWORK_ROUNDS = (3, 50)
NETWORK_ERROR = 20.0


def rounds_by_rule(method: Method, privacy: Privacy, spec: Spec) -> int:
    """Choose the number of rounds from public facts.

    The mean of m clipped vectors of p numbers over T rounds has relative error about
    sqrt(p T) / (m mu); linear models get the largest T that keeps it below what the method aims at
    (0.3), between its limits (3 to 25), and fewer beyond its knee. Networks learn from means that
    are mostly noise, and would get nowhere in so few rounds: they get those that keep it below 20,
    from 3 to 50 (on FEMNIST, of 10, 50 and 200 rounds, 10 were best at epsilon 2 and 50 at epsilon
    8: docs/methods/neural.md).
    """
    if method.shape in (Shape.NONE, Shape.POOLED):
        return 1
    posting = _posting(method)
    network = not isinstance(posting.model, Linear)
    rule = posting.rounds(spec)
    few, many = NETWORK_ROUNDS if network else rule.between
    if privacy.epsilon is None:
        return many
    if privacy.epsilon == math.inf:
        return many if network else rule.without_noise
    numbers, share = rule.dimension, rule.share
    if posting.shape is Shape.GRAM:
        numbers = numbers * (numbers + 1) // 2
    error = NETWORK_ERROR if network else rule.error
    reach = reach_of(privacy, spec.clients, replaced=_replaced(posting))
    affordable = (error * share * reach) ** 2 / numbers * _tolerance(method, spec)
    return rounds_for(affordable, (few, many), math.inf if network else rule.knee)


def _posting(method: Method) -> Method:
    """Return the method whose posts these are."""
    return method.base if isinstance(method, Finetune) else method


def _replaced(method: Method) -> float:
    """Say how much further a replaced client moves what is posted than a zeroed one."""
    blocks = method.clipping(1, 1, 1.0).blocks
    return replaced_by(blocks) if blocks else 2.0


def reach_of(
    privacy: Privacy, clients: int, rounds: int | None = None, *, replaced: float = 2.0
) -> float:
    """Return clients times mu, everyone in every round; infinity without privacy.

    Where noise was given in place of a budget, mu grows with the rounds: these, else 50.
    `replaced`: how much further a replaced client moves the sum than a zeroed one.
    """
    if privacy.epsilon == math.inf:
        return math.inf
    # A pure budget buys about as many rounds as one with a customary delta.
    delta = privacy.delta or default_delta(clients)
    if privacy.epsilon is not None:
        return clients * mu_of(privacy.epsilon, delta, privacy.relation, replaced)
    assert privacy.noise_multiplier is not None
    weights = privacy.weights(rounds) if rounds else privacy.budget or (1.0,) * ROUNDS[1]
    return clients * math.hypot(*weights) / privacy.noise_multiplier


def advice_for(
    method: Method,
    privacy: Privacy,
    sampler: Sampler,
    spec: Spec,
    rounds: int | None = None,
) -> Advice | None:
    """Say of a plan whether joining pays, by the noise that its rounds have.

    None for methods that post no mean, for runs without privacy, and for noise that is not
    Gaussian: the rule knows nothing of them.
    """
    if method.shape is not Shape.SUM or privacy.epsilon == math.inf:
        return None
    clients, rule = spec.clients, rounds_by_rule(method, privacy, spec)
    plan = Plan(method=method, privacy=privacy, sampler=sampler, rounds=rounds or rule)
    multipliers = plan.noise_multipliers(clients)
    if not multipliers:
        return None
    numbers, share = method.rounds(spec).dimension, method.rounds(spec).share
    cohort = sampler.expected(clients)
    apart = math.sqrt(cohort) if privacy.noise.local else 1.0  # every client's noise adds up
    mu = share * cohort / clients / apart * math.hypot(*(1 / z for z in multipliers))
    epsilon, delta, replaced = privacy.epsilon, plan.delta(clients), _replaced(method)
    whole = None if epsilon is None else mu_of(epsilon, delta, privacy.relation, replaced)
    return judge(
        Case(
            clients=clients,
            epsilon=epsilon,
            delta=delta,
            relation=privacy.relation,
            mu=mu,
            numbers=numbers,
            rounds=plan.rounds,
            clip=plan.clip(clients),
            tolerance=_tolerance(method, spec),
            replaced=replaced,
            kept=1.0 if whole is None else mu / whole,
            local=privacy.noise.local,
            classes=spec.task != "regression",
            rule=rule,
        )
    )


def _tolerance(method: Method, spec: Spec) -> float:
    """Classifiers on a slice of public features bear more; nothing else is known to."""
    sliced = getattr(_posting(method), "shared", None) == "slice"
    return PUBLIC_FEATURES if sliced and spec.task == "multiclass" else 1.0


def usual(auto: Auto, privacy: Privacy | None = None) -> Method | None:
    """Return the method that is picked whatever the data; None where it depends on their spec."""
    if not isinstance(auto.model, Linear):
        return None
    if privacy is not None and _needs_one_clip(privacy):
        return PMTL(model=auto.model)
    return PFEB(model=auto.model)


def _needs_one_clip(privacy: Privacy) -> bool:
    """Return whether this noise is of sums under one clip alone, which pfeb's are not."""
    return Shape.SUM in privacy.noise.shapes and not privacy.noise.by_block


def choose(auto: Auto, spec: Spec, privacy: Privacy) -> tuple[Method, str]:
    """Pick a method from public facts, and say why in a sentence or two.

    Linear models: pfeb, or pmtl under noise that knows one clip alone (laplace, local). Networks
    with lower layers and a head: dpfedmtl, which posts the lower layers alone. Other networks:
    pmtl.
    """
    found = usual(auto, privacy)
    if found is not None:
        numbers = found.rounds(spec).dimension
        if isinstance(found, PMTL):
            return found, (
                f"pmtl, because the model is linear ({numbers:,} shared weights) and "
                f"{privacy.noise.kind} noise is for contributions under one clip; pfeb, which "
                "bounds their parts each on its own, needs gaussian noise"
            )
        return found, (
            f"{found.kind}, because the model is linear ({numbers:,} shared weights): how strongly "
            "clients are drawn together is learned inside the budget, and nothing is left to tune"
        )
    found, why = _for_network(auto, spec)
    numbers = found.rounds(spec).dimension
    reach = reach_of(privacy, spec.clients)
    if reach == math.inf or worth_of(reach, numbers, 1.0) >= SMALL_GAIN:
        return found, why
    most = (ERROR * reach) ** 2
    return found, (
        f"{why}. That is more than the {count_of(most)} numbers that {spec.clients:,} clients bear "
        "at this budget: a linear model on public features (of a network that was trained on "
        f'public data) would bear {count_of(PUBLIC_FEATURES * most)}, and shared = "slice" posts '
        f"{spec.outputs} for each of their directions"
    )


def _for_network(auto: Auto, spec: Spec) -> tuple[Method, str]:
    split, whole = DPFedMTL(model=auto.model), PMTL(model=auto.model)
    total = whole.rounds(spec).dimension
    try:
        split.heads(spec)
    except ValueError:
        return whole, (
            f"pmtl, because the model is a network without lower layers to share: all {total:,} "
            "numbers are posted"
        )
    lower = split.rounds(spec).dimension
    return split, (
        f"dpfedmtl, because the model is a network: its lower layers ({lower:,} of {total:,} "
        "numbers) are posted, and the head stays with each client"
    )


def plan_for(
    spec: Spec,
    privacy: Privacy,
    *,
    method: Method | None = None,
    sampler: Sampler | None = None,
    rounds: int | None = None,
    simulation_seed: int | None = None,
) -> Plan:
    """Make a plan whose open ends are filled in by rule, from public facts alone.

    Args:
        spec: Of the data: `data.spec`.
        privacy: What may be spent.
        method: None to have one picked, see `choose`.
        sampler: None for everyone in every round.
        rounds: None for those of the rule.
        simulation_seed: See `Plan`.
    """
    sampler = Poisson() if sampler is None else sampler
    settled = settle(Auto() if method is None else method, privacy, sampler, spec, rounds)
    return Plan(
        method=settled.method,
        privacy=settled.privacy,
        sampler=sampler,
        rounds=settled.rounds,
        simulation_seed=simulation_seed,
    )


@dataclass(frozen=True)
class Settled:
    """What rules made of an open plan; `chosen` says why a method was picked, if one was."""

    method: Method
    privacy: Privacy
    rounds: int
    chosen: str


def settle(
    method: Method, privacy: Privacy, sampler: Sampler, spec: Spec, rounds: int | None = None
) -> Settled:
    """Fill in method, delta, rounds and clip by rule."""
    clients = spec.clients
    if privacy.delta is None:
        privacy = replace(privacy, delta=privacy.noise.usual_delta(clients))
    method, chosen = _picked(method, spec, privacy)
    # Noise that was given buys more with every round: curvatures are asked of those they would run.
    soon = min(rounds or FAR_ROUNDS[1], FAR_ROUNDS[1])
    reach = reach_of(privacy, clients, soon, replaced=_replaced(method))
    method = method.resolve(spec, n_mu=reach, cohort=sampler.largest(clients))
    if rounds is None:
        rounds = len(privacy.budget) or rounds_by_rule(method, privacy, spec)
    if privacy.clip is None:
        privacy = replace(privacy, clip=method.clipping(clients, rounds).clip)
    return Settled(method, privacy, rounds, chosen)


def _picked(method: Method, spec: Spec, privacy: Privacy) -> tuple[Method, str]:

    if isinstance(method, Auto):
        return choose(method, spec, privacy)
    if isinstance(method, Finetune) and isinstance(method.base, Auto):
        base, chosen = choose(method.base, spec, privacy)
        return replace(method, base=base), chosen
    return method, ""
