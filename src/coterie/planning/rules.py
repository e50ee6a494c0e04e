"""Rules: fill in what was left open in a plan, from public facts, before any data is used.

They choose the method (`choose`), the number of rounds (`rounds_by_rule`) and the clip, and decide
whether joining pays (`advice_for`), by the rule of `coterie.planning.advice`. Everything here is a
function of the data's spec and of the plan's own settings, so nothing here costs privacy.
"""

import math
from dataclasses import replace
from typing import Any

from coterie.data.federated import Spec
from coterie.methods.auto import Auto
from coterie.methods.base import Method, Shape
from coterie.methods.baselines import Local, is_wide
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models.linear import is_linear
from coterie.planning.advice import (
    ERROR,
    KNEE,
    LARGE_BUDGET_ROUNDS,
    PUBLIC_FEATURES,
    ROUNDS,
    SMALL_GAIN,
    Advice,
    Facts,
    affordable_rounds,
    cut_for,
    format_count,
    judge,
    mu_of,
    rounds_for,
    verdict_of,
)
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.calibrate import Geometric, Power, Spending
from coterie.privacy.events import default_delta
from coterie.privacy.mechanisms import replaced_by
from coterie.privacy.noise import SharedNoise
from coterie.privacy.sampling import Poisson, Sampler

NETWORK_ROUNDS = (3, 50)
NETWORK_ERROR = 20.0
CUT_FINETUNED, CUT_FINETUNED_CLASSES, CUT_PMTL = 1 / 2, 1 / 7, 1 / 3
"""Affordable rounds from which joining gains for networks, in the study of docs/networks.md: fedavg
with finetuning (regression; classes), and pmtl. Other methods: 1."""
_HEEDED = (
    "local training, because the verdict is to learn alone; the flag --anyway spends the budget"
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
    """Return a plan whose open settings are filled in by rule, from public facts.

    `spec` is the data's: `data.spec`. Without a method one is chosen, see `choose`; without a
    sampler everyone takes part in every round.
    """
    plan = Plan(
        method=Auto() if method is None else method,
        privacy=privacy,
        sampler=Poisson() if sampler is None else sampler,
        rounds=rounds,
        simulation_seed=simulation_seed,
    )
    return resolve(plan, spec)


def resolve(plan: Plan, spec: Spec) -> Plan:
    """Return the plan with method, delta, rounds and clip filled in by rule."""
    clients, privacy, rounds = spec.clients, plan.privacy, plan.rounds
    if privacy.delta is None:
        privacy = replace(privacy, delta=privacy.noise.usual_delta(clients))
    method, chosen = _chosen(plan.method, spec, privacy)
    # Noise that was given buys more with every round: ask for the rounds of a large budget.
    soon = min(rounds or LARGE_BUDGET_ROUNDS[1], LARGE_BUDGET_ROUNDS[1])
    n_mu = clients_times_mu(privacy, clients, soon, replaced=_replaced(method))
    if isinstance(method, PFEB) and method.guard is None:
        method = replace(method, guard=_guards(method, spec, n_mu, plan.data.rows_per_client))
    method = method.resolve(spec, n_mu=n_mu, cohort=plan.sampler.largest(clients))
    if privacy.spend.by_method:
        privacy = replace(privacy, spend=_spending(method, spec))
    if rounds is None:
        rounds = len(privacy.budget) or rounds_by_rule(method, privacy, spec)
    if privacy.clip is None:
        privacy = replace(privacy, clip=method.clipping(clients, rounds).clip)
    chosen = chosen or plan.chosen
    return replace(plan, method=method, privacy=privacy, rounds=rounds, chosen=chosen)


def _spending(method: Method, spec: Spec) -> Spending:
    """Return the shape of the budget that the method's theory recommends."""
    found = method.rounds(spec).spending
    if found is None:
        raise ValueError(
            f'spend = "theorem": there is no theorem for {method.kind} with these settings; it is '
            'for mpmtl with solver = "steps"; use "even", "power" or "geometric"'
        )
    kind, number = found
    return Power(number) if kind == "power" else Geometric(number)


def heed_verdict(plan: Plan, resolved: Plan, spec: Spec) -> Plan:
    """Return the plan to run: `auto` trains locally, and spends nothing, if that is the verdict.

    A method that the plan names is run: whoever names one has chosen it.
    """
    advice = advice_for(resolved, spec) if isinstance(plan.method, Auto) else None
    if advice is None or advice.verdict != "learn alone":
        return resolved
    known = resolved.method.baselines().local
    local = Local(model=resolved.method.model) if known is None else known
    found = resolve(replace(plan, method=local, privacy=resolved.privacy), spec)
    return replace(found, chosen=_HEEDED, heeded=True)


def rounds_by_rule(method: Method, privacy: Privacy, spec: Spec) -> int:
    """Return the number of rounds, from public facts.

    The mean of m clipped vectors of p parameters over T rounds has relative error about
    sqrt(p T) / (m mu). Linear models get the largest T that keeps it below the method's goal (0.3),
    between its limits (3 to 25), and fewer beyond its knee. Networks learn from means that are
    mostly noise and would get nowhere in so few rounds: they get the rounds that keep it below 20,
    from 3 to 50 (on FEMNIST, of 10, 50 and 200 rounds, 10 were best at epsilon 2 and 50 at epsilon
    8: docs/methods/neural.md).
    """
    if method.shape in (Shape.NONE, Shape.POOLED):
        return 1
    releasing = _releasing(method)
    network = not is_linear(releasing.model)
    rule = releasing.rounds(spec)
    few, many = NETWORK_ROUNDS if network else rule.between
    if privacy.epsilon is None:
        return many
    if privacy.epsilon == math.inf:
        return many if network else rule.without_noise
    parameters, share = rule.dimension, rule.share
    if releasing.shape is Shape.GRAM:
        parameters = parameters * (parameters + 1) // 2
    error = NETWORK_ERROR if network else rule.error
    n_mu = clients_times_mu(privacy, spec.clients, replaced=_replaced(releasing))
    affordable = (error * share * n_mu) ** 2 / parameters * _tolerance(method, spec)
    return rounds_for(affordable, (few, many), math.inf if network else rule.knee)


def clients_times_mu(
    privacy: Privacy, clients: int, rounds: int | None = None, *, replaced: float = 2.0
) -> float:
    """Return clients times mu, everyone in every round; infinity without privacy.

    Where noise was given instead of a budget, mu grows with the rounds: these, else 50.
    `replaced`: how much further a replaced client moves the sum than a zeroed one.
    """
    if privacy.epsilon == math.inf:
        return math.inf
    stretch = privacy.noise.stretch(clients)
    # A pure budget buys about as many rounds as one with a customary delta.
    delta = privacy.delta or default_delta(clients)
    if privacy.epsilon is not None:
        return clients * mu_of(privacy.epsilon, delta, privacy.relation, replaced) / stretch
    assert privacy.noise_multiplier is not None
    weights = privacy.weights(rounds) if rounds else privacy.budget or (1.0,) * ROUNDS[1]
    return clients * math.hypot(*weights) / privacy.noise_multiplier / stretch


def advice_for(plan: Plan, spec: Spec) -> Advice | None:
    """Return whether joining pays under a resolved plan, by the noise of its rounds.

    None for methods that release no mean, for runs without privacy, and for noise that is not
    Gaussian: the rule does not apply to them. A plan that heeds a verdict has that verdict.
    """
    if plan.heeded:
        joined = replace(plan, method=Auto(model=plan.method.model), heeded=False, chosen="")
        return advice_for(resolve(replace(joined, rounds=None), spec), spec)
    method, privacy = plan.method, plan.privacy
    if method.shape is not Shape.SUM or not plan.private:
        return None
    clients, multipliers = spec.clients, plan.noise_multipliers(spec.clients)
    if not multipliers:
        return None
    parameters, share = method.rounds(spec).dimension, method.rounds(spec).share
    cohort = plan.sampler.expected(clients)
    # Every client's own noise adds up.
    averaged = math.sqrt(cohort) if privacy.noise.local else privacy.noise.stretch(clients)
    mu = share * cohort / clients / averaged * math.hypot(*(1 / z for z in multipliers))
    facts = _facts(
        plan,
        spec,
        parameters=parameters,
        noise_multiplier=privacy.noise_multiplier,
        delta=plan.delta(clients) or None,
        replaced=_replaced(method),
        tolerance=_tolerance(method, spec),
        cut=_cut(method, spec, plan.data.rows_per_client),
        classes=spec.task != "regression",
    )
    return judge(facts, mu=mu, rule=rounds_by_rule(method, privacy, spec))


def facts_of(plan: Plan, spec: Spec, advice: Advice) -> Facts | None:
    """Return the facts of a plan that releases a mean; None if its rounds differ in noise."""
    events, clients = set(plan.guarantee(spec.clients).events), spec.clients
    error = plan.relative_error(spec)
    if len(events) != 1 or error is None:
        return None
    (event,) = events
    noise = getattr(event, "noise_multiplier", None)
    if noise is None:
        return None
    facts = _facts(
        plan,
        spec,
        parameters=advice.parameters,
        noise_multiplier=None if plan.privacy.epsilon is not None else noise,
        delta=plan.privacy.delta,
        replaced=event.replaced,
    )
    # Parts of a contribution may share the budget: then the mean has more noise than one sum.
    return replace(facts, stretch=error / facts.error(noise, clients))


def _facts(plan: Plan, spec: Spec, **more: Any) -> Facts:
    noise = plan.privacy.noise
    return Facts(
        clients=spec.clients,
        rounds=plan.posts,
        sampler=plan.sampler,
        epsilon=plan.privacy.epsilon,
        relation=plan.privacy.relation,
        clip=plan.clip(spec.clients),
        local=plan.privacy.noise.local,
        shares=noise.counts(spec.clients) if isinstance(noise, SharedNoise) else None,
        **more,
    )


def _releasing(method: Method) -> Method:
    """Return the method that releases, without the finetuning around it."""
    return method.base if isinstance(method, Finetune) else method


def _replaced(method: Method) -> float:
    """Return how much further a replaced client moves what is released than a zeroed one."""
    blocks = method.clipping(1, 1, 1.0).blocks
    return replaced_by(blocks) if blocks else 2.0


def _tolerance(method: Method, spec: Spec) -> float:
    """Return how many times more parameters are tolerable: classifiers on public features."""
    sliced = getattr(_releasing(method), "shared", None) == "slice"
    return PUBLIC_FEATURES if sliced and spec.task == "multiclass" else 1.0


def _cut(method: Method, spec: Spec, rows: int | None) -> float:
    """Return the affordable rounds from which joining gains; public features are counted before."""
    releasing, classes = _releasing(method), spec.task != "regression"
    if not is_linear(releasing.model):
        finetuned = isinstance(method, Finetune) and isinstance(releasing, FedAvg)
        if finetuned:
            return CUT_FINETUNED_CLASSES if classes else CUT_FINETUNED
        return CUT_PMTL if isinstance(releasing, PMTL) else SMALL_GAIN
    if _tolerance(method, spec) > 1:
        return SMALL_GAIN
    return cut_for(spec.features + 1, classes=spec.task != "regression", rows=rows)


def _guards(method: PFEB, spec: Spec, n_mu: float, rows: int | None) -> bool:
    """Return whether clients hedge: of classes, of small budgets, and short ones unless they join.

    Hedging costs up to 6 % of the error where a large budget meets few rows (districts), and next
    to nothing where less than ten rounds are affordable.
    """
    if n_mu == math.inf or method.shared != "all":
        return False
    if spec.task != "regression" or is_wide(spec):
        return spec.task != "regression"
    affordable = affordable_rounds(n_mu, method.rounds(spec).dimension)
    short = rows is not None and rows <= spec.features
    joins = verdict_of(affordable, _cut(method, spec, rows)) == "join"
    return affordable < KNEE or (short and not joins)


def default_method(auto: Auto, privacy: Privacy | None = None) -> Method | None:
    """Return the method that is chosen whatever the data; None where it depends on their spec."""
    if not is_linear(auto.model):
        return None
    if privacy is not None and _needs_one_clip(privacy):
        return PMTL(model=auto.model)
    return PFEB(model=auto.model)


def _needs_one_clip(privacy: Privacy) -> bool:
    """Return whether this noise is only for sums under one clip, which pfeb's are not."""
    return Shape.SUM in privacy.noise.shapes and not privacy.noise.by_block


def choose(auto: Auto, spec: Spec, privacy: Privacy) -> tuple[Method, str]:
    """Return a method chosen from public facts, and the reason as text.

    Linear models: pfeb, or pmtl under noise for one clip (laplace, local). Networks: fedavg with
    finetuning where the budget supports all of their parameters (docs/networks.md has the study).
    Else dpfedmtl, which releases only the lower layers, or pmtl where there is no head.
    """
    found = default_method(auto, privacy)
    if found is not None:
        parameters = found.rounds(spec).dimension
        if isinstance(found, PMTL):
            return found, (
                f"pmtl, because the model is linear ({parameters:,} shared parameters) and "
                f"{privacy.noise.kind} noise is for contributions under one clip; pfeb, which "
                "bounds several parts, needs gaussian noise"
            )
        return found, (
            f"{found.kind}, because the model is linear ({parameters:,} shared parameters); it "
            "learns inside the budget how similar clients are, and leaves nothing to tune"
        )
    n_mu = clients_times_mu(privacy, spec.clients)
    tuned = Finetune(base=FedAvg(model=auto.model))
    whole = tuned.rounds(spec).dimension
    if affordable_rounds(n_mu, whole) >= _cut(tuned, spec, None):
        return tuned, (
            f"fedavg with finetuning, because the model is a network, and this budget supports all "
            f"of its {whole:,} parameters"
        )
    found, why = _for_network(auto, spec)
    parameters = found.rounds(spec).dimension
    if n_mu == math.inf or affordable_rounds(n_mu, parameters) >= SMALL_GAIN:
        return found, why
    most = (ERROR * n_mu) ** 2
    return found, (
        f"{why}. This budget supports {format_count(most)} shared parameters for {spec.clients:,} "
        "clients, which is fewer: a linear model on public features (of a network trained on "
        f'public data) may have {format_count(PUBLIC_FEATURES * most)}, and shared = "slice" '
        f"releases {spec.outputs} per direction"
    )


def _for_network(auto: Auto, spec: Spec) -> tuple[Method, str]:
    split, whole = DPFedMTL(model=auto.model), PMTL(model=auto.model)
    total = whole.rounds(spec).dimension
    try:
        split.heads(spec)
    except ValueError:
        return whole, (
            f"pmtl, because the model is a network without lower layers to share: all {total:,} "
            "parameters are released"
        )
    lower = split.rounds(spec).dimension
    return split, (
        f"dpfedmtl, because the model is a network: its lower layers ({lower:,} of {total:,} "
        "parameters) are released, and each client keeps its own head"
    )


def _chosen(method: Method, spec: Spec, privacy: Privacy) -> tuple[Method, str]:
    if isinstance(method, Auto):
        return choose(method, spec, privacy)
    if isinstance(method, Finetune) and isinstance(method.base, Auto):
        found, chosen = choose(method.base, spec, privacy)
        return replace(method, base=_releasing(found), model=None), chosen
    return method, ""
