"""The summary of a finished run: what `coterie run --json` prints and result.json holds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.data.federated import Spec
from coterie.engine.simulate import Outcome
from coterie.evaluation.metrics import Score, json_number, score_json
from coterie.evaluation.score import noise_to_signal
from coterie.methods.base import Shape
from coterie.planning.advice import describe_error
from coterie.planning.plan import Plan, TunedOn
from coterie.privacy.billboard import Billboard
from coterie.privacy.guarantee import Guarantee, view_of
from coterie.privacy.reviewer import review
from coterie.privacy.selection import CHOSEN_ONLY, Charged, charged_message, chosen_alone
from coterie.runs.certificate import noise_of_releases

NOT_COVERED = "NOT COVERED by epsilon: settings were chosen on these rows"
CHARGED = (
    "CHARGED: settings were chosen among earlier private runs by private scores; the cost of that "
    "choice is in their selection.json and comes on top of this epsilon"
)
TUNING: dict[TunedOn, str] = {
    "no": "none",
    "public": "on public data",
    "charged": CHARGED,
    "not covered": NOT_COVERED,
}


def summarise(
    outcome: Outcome,
    score: Score,
    local: Score | None,
    *,
    data: str,
    tuned: TunedOn,
    seconds: float,
    notices: Sequence[str] = (),
    newcomers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary, whose keys are stable; strict JSON.

    `newcomers`: the scores of held-out clients. A run of a charged selection adds more, see `paid`.
    """
    plan, guarantee = outcome.plan, outcome.guarantee
    return {
        "method": str(plan.method),
        "data": data,
        "clients": outcome.spec.clients,
        "task": outcome.spec.task,
        # Centralised training counts as one release.
        "rounds": 1 if plan.method.shape is Shape.POOLED else len(outcome.posts),
        **promised(guarantee),
        "reviewer": for_reviewer(guarantee, outcome.billboard),
        **noise_summary(plan, outcome.spec),
        **score_json(score, local),
        "newcomers": None if newcomers is None else dict(newcomers),
        "noise_to_signal": [
            None if ratio is None else json_number(ratio) for ratio in noise_to_signal(outcome)
        ],
        "not_covered": "Epsilon does not cover metrics, baselines and notes, or tuning that uses "
        "them.",
        "tuning": TUNING[tuned],
        "caveats": [
            *plan.method.notes(private=plan.posts > 0 and guarantee.epsilon < math.inf).caveats,
            *_claimed(guarantee),
        ],
        "notices": [*notices, *_zeroed(outcome)],
        "seconds": round(seconds, 3),
    }


def noise_summary(plan: Plan, spec: Spec) -> dict[str, Any]:
    """Return the noise of a plan, and whether it can learn under it; all public."""
    clients = spec.clients
    noise = plan.noise_multipliers(clients)
    noised = plan.posts > 0 and plan.privacy.epsilon != math.inf
    error = plan.relative_error(spec) if noised else None
    notes = plan.method.notes(rounds=plan.posts, clip=plan.clip(clients)) if noised else None
    banded = noised and any(one.correlated for one in plan.mechanisms(clients))
    explained = (*(notes.settings if notes else ()), *can_learn(error, banded=banded))
    return {
        "noise_multiplier": noise[0] if len(set(noise)) == 1 else None,
        "noise_multipliers": None if len(set(noise)) == 1 else list(noise),
        "clip": plan.clip(clients) if noised else None,
        "relative_error": error,
        "explained": list(explained) if noised else [],
    }


def for_reviewer(guarantee: Guarantee, billboard: Billboard) -> dict[str, Any] | None:
    """Return what a privacy reviewer asks, with bounds and noise of every release; all public.

    None if nothing is released, or something without noise.
    """
    found = review(guarantee)
    return None if found is None else {**found, "releases": noise_of_releases(billboard)}


def can_learn(error: float | None, *, banded: bool = False) -> tuple[str, ...]:
    """Return what the relative error of a released mean implies, as text."""
    if error is None:
        return ()
    noise = "Noise in each released mean is"
    if banded:
        noise = "Noise in sums of released means is as if that of each were"
    text = f"{noise} {error:.2g} of the clipping norm: "
    if error <= 1:
        return (f"{text}{describe_error(error)}.",)
    return (
        f"{text}{describe_error(error)}, so clients rely on their own rows. Fewer shared "
        "parameters, fewer rounds, more clients or a larger epsilon would help.",
    )


def _claimed(guarantee: Guarantee) -> tuple[str, ...]:
    """Return the caveat of a reproduction as published."""
    if guarantee.claimed_epsilon is None:
        return ()
    return (guarantee.statement().splitlines()[0],)


def _zeroed(outcome: Outcome) -> tuple[str, ...]:
    """Return how many contributions were zeros because they could not be computed."""
    count = outcome.zeroed
    were = "1 contribution was" if count == 1 else f"{count} contributions were"
    lines = [f"{were} not finite and counted as zero; the clients kept their models"]
    if outcome.errors:
        # Only its type: the text of an error may quote rows.
        kind = outcome.errors[0].split(": ")[1]
        lines.append(f"some clients could not be computed ({kind}): `Outcome.errors` says why")
    return tuple(lines if count else lines[1:])


def paid(guarantee: Guarantee, tuned: TunedOn, charged: Charged | None) -> dict[str, Any]:
    """Return what differs in the summary of a run of a charged selection."""
    if charged is None:
        return {}
    selection = charged.to_json(guarantee)
    cost = charged_message(selection["epsilon_chosen_alone"], guarantee.delta)
    tuning = cost if tuned == "charged" else f"{TUNING[tuned]}; {cost}"
    # The numbers of its events alone hold against nobody: the run is the best of several.
    return {**promised(guarantee, selection), "reviewer": None, "tuning": tuning}


def promised(guarantee: Guarantee, selection: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the part of a summary that follows from the guarantee.

    For a chosen run (`selection`, from its certificate) epsilon holds against an adversary who
    sees only that run; the epsilon of its events alone is kept apart, and holds against nobody.
    """
    claimed = guarantee.claimed_epsilon
    true = None if claimed is None else guarantee.claimed_only.delta_at(claimed)
    chosen = chosen_alone(guarantee, selection)
    if selection is not None and chosen is not None:
        bare = {view: "inf" for view in guarantee.views if view.startswith("server")}
        return {
            **promised(guarantee),
            "epsilon": json_number(chosen),
            "view": CHOSEN_ONLY,
            # What the other clients may have seen is in selection.json, which is not public.
            "views": {"chosen_alone": json_number(chosen), "other_clients": None, **bare},
            "epsilon_before_choice": json_number(guarantee.epsilon),
            "selection": {**selection, "epsilon_chosen_alone": chosen},
        }
    return {
        "epsilon": json_number(guarantee.epsilon),
        "delta": guarantee.delta,
        "relation": guarantee.relation,
        "view": view_of(guarantee),
        "views": {view: json_number(epsilon) for view, epsilon in guarantee.views.items()},
        "claimed_epsilon": claimed,
        "true_delta_at_claimed": true,
        "simulation": guarantee.simulation,
        "assumed_public": list(guarantee.assumed),
    }
