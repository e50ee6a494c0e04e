"""`coterie plan`: whether joining pays and what it costs, before anything is spent.

From public facts alone it loads neither torch nor data; with data or a plan it opens them and looks
at the spec.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coterie.advice import (
    CLIP,
    KNEE,
    REPLACED,
    ROUNDS,
    Advice,
    Case,
    advise,
    judge,
    mu_of,
    rounds_for,
)
from coterie.commands.budget import make_sampler
from coterie.commands.plan_words import NOTHING, Found, tell
from coterie.plan_curves import noises_near
from coterie.planning import HEAVY, Outline, look_ahead, most_rounds
from coterie.privacy.events import Relation

if TYPE_CHECKING:
    from coterie.data.federated import Spec, Task
    from coterie.plan import Plan

_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_CONCRETE = ("data", "plan", "finetune")
_KNOWN_NOISE = ("gaussian", "local")


def plan(arguments: argparse.Namespace) -> str:
    """Carry out `coterie plan`; give what it prints."""
    flags = _concrete_flags(arguments)
    found = _concrete(arguments, flags) if flags else _from_facts(arguments)
    if arguments.plot:
        from coterie.commands.plan_plot import draw

        draw(found, arguments.plot)
    return tell(found, as_json=arguments.json, sketched=not arguments.no_plot)


def _concrete_flags(arguments: argparse.Namespace) -> list[str]:
    """Name the flags that speak of more than one clipped sum and its budget."""
    given = [name for name in _CONCRETE if getattr(arguments, name) is not None]
    given += ["method"] if arguments.method not in (None, "auto") else []
    given += ["model"] if arguments.model not in (None, "linear") else []
    given += ["set"] if arguments.set else []
    # Whoever counts the numbers posted wants one clipped sum; else noise decides on the method.
    plain = arguments.noise in (None, "gaussian", *(_KNOWN_NOISE if arguments.numbers else ()))
    given += [] if plain else ["noise"]
    return [f"--{name.replace('_', '-')}" for name in given]


def _from_facts(arguments: argparse.Namespace) -> Found:
    """Look ahead from the numbers given; torch is not loaded."""
    clients, numbers = _clients(arguments), _numbers(arguments)
    epsilon, noise = arguments.epsilon, arguments.noise_multiplier
    if epsilon is None and noise is None:
        epsilon = 1.0
    if epsilon == math.inf and noise is None:
        _advice(arguments, clients, numbers, 1.0)  # refuses what is wrong with the other facts
        return Found(words=NOTHING)
    advice = _advice(arguments, clients, numbers, epsilon)
    outline = _outline(arguments, clients, numbers, epsilon, advice.rounds)
    limit = None if noise is None else epsilon
    outlook = look_ahead(outline, epsilon_limit=limit, full=arguments.full)
    heavy = outlook.grid > HEAVY and not arguments.full
    rows = () if noise is not None or heavy else _EPSILONS

    def at(epsilon: float, near: float | None) -> Advice:
        if near is None or epsilon == outline.epsilon:
            return _advice(arguments, clients, numbers, epsilon)
        guessed = replace(outline, epsilon=None, noise_multiplier=near)
        rule = advise(clients, epsilon, numbers, delta=arguments.delta, relation=outline.relation)
        return judge(_case(guessed, epsilon, rule.rounds))

    # Closed forms are instant; an account on a grid is looked at once a row.
    near = noises_near(outline, outlook.noise_multiplier, rows) if outlook.grid and rows else {}
    return Found(
        advice=advice,
        table=[at(one, near.get(one)) for one in rows],
        outline=outline,
        outlook=outlook,
        usual=arguments.numbers is None and arguments.noise != "local" and noise is None,
        limit=limit,
        full=arguments.full,
    )


def _outline(
    arguments: argparse.Namespace, clients: int, numbers: int, epsilon: float | None, rounds: int
) -> Outline:
    noise: float | None = arguments.noise_multiplier
    relation: Relation = arguments.relation or "zero_out"
    return Outline(
        clients=clients,
        numbers=numbers,
        rounds=rounds,
        sampler=make_sampler(arguments.sampling, arguments.cohort, arguments.cohort_visible),
        epsilon=None if noise is not None else epsilon,
        noise_multiplier=noise,
        delta=arguments.delta,
        relation=relation,
        clip=CLIP if arguments.clip is None else arguments.clip,
        local=arguments.noise == "local",
        # Of no matter under zero_out, where the advice's value spares a second search.
        replaced=REPLACED if relation == "zero_out" else 2.0,
    )


def _advice(
    arguments: argparse.Namespace, clients: int, numbers: int, epsilon: float | None
) -> Advice:
    """Return whether joining pays; of noise that is given, by the rounds that it buys."""
    relation: Relation = arguments.relation or "zero_out"
    rounds: int | None = arguments.rounds
    clip = CLIP if arguments.clip is None else arguments.clip
    hidden_coins = arguments.sampling in (None, "poisson") and not arguments.cohort_visible
    if arguments.noise_multiplier is None and hidden_coins and arguments.noise != "local":
        assert epsilon is not None
        usual = {"delta": arguments.delta, "relation": relation, "rounds": rounds}
        return replace(
            advise(clients, epsilon, numbers, cohort=arguments.cohort, **usual), clip=clip
        )
    rule = ROUNDS[1]
    if arguments.noise_multiplier is None:
        assert epsilon is not None
        rule = advise(clients, epsilon, numbers, delta=arguments.delta, relation=relation).rounds
        # Cohorts and noise of clients' own leave less of the budget than the rule knows of.
        felt = _case(_outline(arguments, clients, numbers, epsilon, rule), epsilon, rule).worth
        rule = min(rule, rounds_for(felt, ROUNDS, KNEE))
    outline = _outline(arguments, clients, numbers, epsilon, rounds or rule)
    if arguments.noise_multiplier is not None:
        if rounds is None and epsilon is not None:
            rule = max(1, most_rounds(outline, arguments.noise_multiplier, epsilon))
        outline, epsilon = replace(outline, rounds=rounds or rule), None
    return judge(_case(outline, epsilon, rule))


def _case(outline: Outline, epsilon: float | None, rule: int) -> Case:
    """Return the facts of an advice on an outline."""
    delta = outline.delta_of(outline.clients)
    mu = math.sqrt(outline.rounds) / _felt(outline, delta) / outline.clients
    whole = None if epsilon is None else mu_of(epsilon, delta, outline.relation, outline.replaced)
    return Case(
        clients=outline.clients,
        epsilon=epsilon,
        delta=delta,
        relation=outline.relation,
        mu=mu,
        numbers=outline.numbers,
        rounds=outline.rounds,
        rule=rule,
        clip=outline.clip,
        tolerance=1.0,
        replaced=outline.replaced,
        kept=1.0 if whole is None else mu / whole,
        local=outline.local,
    )


def _felt(outline: Outline, delta: float) -> float:
    """Return the noise of one number of a posted mean over the clip."""
    return outline.error(outline.noise(delta), outline.clients) / math.sqrt(outline.numbers)


def _concrete(arguments: argparse.Namespace, flags: Sequence[str]) -> Found:
    """Advise on a plan made of flags; torch is loaded here."""
    from coterie.commands.flags import plan_table
    from coterie.run_plan import advice_of, plan_from_table, resolve

    facts = arguments.data is None and arguments.plan is None
    if arguments.numbers is not None:
        raise ValueError(
            f"--numbers {arguments.numbers} is of one posted mean and its budget alone, and "
            f"{', '.join(flags)} asks for a whole plan: leave out --numbers"
            f"{' and give --features N' if facts else ''}, or leave out {', '.join(flags)}"
        )
    spec = _spec(arguments) if facts else None
    if facts:
        away = ("features", "classes", "clients", "task")
        told = {**vars(arguments), **dict.fromkeys(away), "data": "synthetic"}
        arguments = argparse.Namespace(**told)
    run_plan = plan_from_table(plan_table(arguments))
    spec = run_plan.data.open().spec if spec is None else spec
    resolved = resolve(run_plan, spec)
    resolved.plan().guarantee(spec.clients)
    resolved.method.check(spec)
    named = None if facts else run_plan.data.name
    about = {"data": named, "method": str(resolved.method), "chosen": resolved.chosen}

    def at(epsilon: float) -> Advice | None:
        budget = replace(run_plan.privacy, epsilon=epsilon, noise_multiplier=None)
        return advice_of(resolve(replace(run_plan, privacy=budget), spec), spec)

    advice = advice_of(resolved, spec)
    if advice is None:
        free = resolved.privacy.epsilon == math.inf
        return Found(about=about, words=NOTHING if free else _UNKNOWN.format(about["method"]))
    outline = _outline_of(resolved.plan(), spec, advice)
    return Found(
        advice=advice,
        table=_existing(at),
        about=about,
        outline=outline,
        outlook=None if outline is None else look_ahead(outline, full=arguments.full),
        full=arguments.full,
    )


def _existing(at: Callable[[float], Advice | None]) -> list[Advice]:
    return [found for one in _EPSILONS if (found := at(one)) is not None]


def _outline_of(plan: "Plan", spec: "Spec", advice: Advice) -> Outline | None:
    """Return the outline of a plan that posts a mean; None if its rounds differ in noise."""
    events, clients = set(plan.guarantee(spec.clients).events), spec.clients
    error = plan.relative_error(spec)
    if len(events) != 1 or error is None:
        return None
    (event,) = events
    noise = getattr(event, "noise_multiplier", None)
    if noise is None:
        return None
    given = plan.privacy.epsilon is None
    outline = Outline(
        clients=clients,
        numbers=advice.numbers,
        rounds=plan.rounds,
        sampler=plan.sampler,
        epsilon=plan.privacy.epsilon,
        noise_multiplier=noise if given else None,
        delta=plan.privacy.delta,
        relation=plan.privacy.relation,
        clip=plan.clip(clients),
        local=event.local,
        replaced=event.replaced,
    )
    # Parts of a contribution may share the budget: then the mean has more noise than one sum has.
    return replace(outline, stretch=error / outline.error(noise, clients))


def _clients(arguments: argparse.Namespace) -> int:
    if arguments.clients is None:
        raise ValueError("how many clients? give --clients N, or --data NAME|FILE")
    return int(arguments.clients)


def _numbers(arguments: argparse.Namespace) -> int:
    """Count what a linear model posts: a weight for each feature and a bias, for each output."""
    if arguments.numbers is None:
        return (_features(arguments) + 1) * _outputs(arguments)
    if arguments.features is not None:
        raise ValueError(
            f"--numbers {arguments.numbers} and --features {arguments.features}: give one of them"
        )
    return int(arguments.numbers)


def _features(arguments: argparse.Namespace) -> int:
    given = arguments.features
    if given is None:
        raise ValueError("what is posted? give --numbers N, or --features N for a linear model")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"--features {given}: without --data, expected how many there are")
    return int(given)


def _outputs(arguments: argparse.Namespace) -> int:
    given = arguments.classes
    if given is None:
        return 1
    count = int(given) if given.isdecimal() else len(given.split(","))
    if count < 2:
        raise ValueError(f"--classes {given}: expected at least 2")
    return count if count > 2 or arguments.task == "multilabel" else 1


def _spec(arguments: argparse.Namespace) -> "Spec":
    """Make the spec of rows that nobody has shown us."""
    from coterie.data.federated import Spec

    outputs = _outputs(arguments)
    usual: Task = (
        "multiclass" if outputs > 1 else "regression" if arguments.classes is None else "binary"
    )
    return Spec((_features(arguments),), outputs, arguments.task or usual, _clients(arguments))


_UNKNOWN = (
    "no verdict on {}: the rule weighs Gaussian noise against a posted mean, and this plan posts "
    "none, or its noise is not Gaussian"
)
