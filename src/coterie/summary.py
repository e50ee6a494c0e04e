"""What a finished run says of itself: the summary, and the files that are kept."""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.certificate import certify
from coterie.data.federated import FederatedDataset, Spec
from coterie.engines.outcome import Outcome
from coterie.evaluation.metrics import Array, Score, json_number, score_json, write_metrics
from coterie.evaluation.score import noise_to_signal
from coterie.finished_models import MODELS, write_models
from coterie.log import Log, now, versions
from coterie.methods.base import Shape
from coterie.plan import Plan
from coterie.privacy.accounting import Guarantee
from coterie.privacy.charged import ALONE, BEFORE, Charged, chosen_alone, statement, told
from coterie.privacy.files import write_atomically
from coterie.privacy.words import view_of
from coterie.tree import Tree

TunedOn = Literal["no", "public", "charged", "not covered"]
NOT_COVERED = "NOT COVERED by epsilon: settings were chosen on these rows"
_NOTHING: Mapping[str, Array] = {}
CHARGED = (
    "CHARGED: settings were chosen among earlier private runs by private scores; what that choice "
    "cost is in the selection.json of these, and comes on top of the epsilon here"
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
    """Return the summary that others may script against; strict JSON.

    `newcomers` is the part on held-out clients, see `coterie.evaluation.holdout`. A run that is one
    of a selection has further keys, see `paid`.
    """
    plan, guarantee = outcome.plan, outcome.guarantee
    return {
        "method": plan.method.title,
        "data": data,
        "clients": outcome.spec.clients,
        "task": outcome.spec.task,
        # Rows in one place are one release, though nothing is posted.
        "rounds": 1 if plan.method.shape is Shape.POOLED else len(outcome.posts),
        **promised(guarantee),
        **noise_told(plan, outcome.spec),
        **score_json(score, local),
        "newcomers": None if newcomers is None else dict(newcomers),
        "noise_to_signal": [
            None if ratio is None else json_number(ratio) for ratio in noise_to_signal(outcome)
        ],
        "not_covered": "metrics, baselines and notices, and any tuning done with them, are not "
        "covered by epsilon",
        "tuning": TUNING[tuned],
        "caveats": [
            *plan.method.caveats(plan.posts > 0 and guarantee.epsilon < math.inf),
            *_claimed(guarantee),
        ],
        "notices": [*notices, *_zeroed(outcome)],
        "seconds": round(seconds, 3),
    }


def noise_told(plan: Plan, spec: Spec) -> dict[str, Any]:
    """Say what noise a plan adds, and whether it can learn under it; all public."""
    clients = spec.clients
    noise = plan.noise_multipliers(clients)
    noised = plan.posts > 0 and plan.privacy.epsilon != math.inf
    error = plan.relative_error(spec) if noised else None
    explained = (*plan.method.explain(plan.rounds, plan.clip(clients)), *can_learn(error))
    return {
        "noise_multiplier": noise[0] if len(set(noise)) == 1 else None,
        "noise_multipliers": None if len(set(noise)) == 1 else list(noise),
        "clip": plan.clip(clients) if noised else None,
        "relative_error": error,
        "explained": list(explained) if noised else [],
    }


def can_learn(error: float | None) -> tuple[str, ...]:
    """Say in words whether a plan can learn at all, from the relative error of a posted mean."""
    if error is None:
        return ()
    told = f"the noise of a posted mean is {error:.2g} times the clip (relative error)"
    if error <= 0.3:
        return (f"{told}: it is hardly felt",)
    if error <= 1:
        return (f"{told}: it is felt, and what is shared still tells something",)
    return (
        f"{told}: what is shared is mostly noise, and clients lean on their own rows; fewer posted "
        "numbers, fewer rounds, more clients or a larger epsilon would help",
    )


def _claimed(guarantee: Guarantee) -> tuple[str, ...]:
    """Say of a reproduction that it is one, wherever its epsilon is written."""
    if guarantee.claimed_epsilon is None:
        return ()
    return (guarantee.statement().splitlines()[0],)


def _zeroed(outcome: Outcome) -> tuple[str, ...]:
    """Say how many contributions were not numbers: their clients' models may be worth a look."""
    count = outcome.zeroed
    if not count:
        return ()
    if count == 1:
        return ("1 contribution was not a number and counted as zero; its client kept its model",)
    return (
        f"{count} contributions of clients were not numbers and counted as zero; their clients "
        "kept their models",
    )


def paid(guarantee: Guarantee, tuned: TunedOn, charged: Charged | None) -> dict[str, Any]:
    """Return what the summary of a run says otherwise that is one of a selection.

    What was never covered stays so, and is said first.
    """
    if charged is None:
        return {}
    selection = charged.to_json(guarantee)
    cost = told(selection["epsilon_chosen_alone"], guarantee.delta)
    tuning = cost if tuned == "charged" else f"{TUNING[tuned]}; {cost}"
    return {**promised(guarantee, selection), "tuning": tuning}


def promised(guarantee: Guarantee, selection: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the part of a summary that the guarantee decides.

    Of a run that was chosen (`selection`, of its certificate) epsilon is that of whoever sees it
    alone; what its events come to by themselves is true of nobody, and kept apart.
    """
    claimed = guarantee.claimed_epsilon
    true = None if claimed is None else guarantee.claimed_alone.delta_at(claimed)
    chosen = chosen_alone(guarantee, selection)
    if selection is not None and chosen is not None:
        bare = {view: "inf" for view in guarantee.views if view.startswith("server")}
        return {
            **promised(guarantee),
            "epsilon": json_number(chosen),
            "view": ALONE,
            # What the other clients may have seen is in selection.json, which is not for all.
            "views": {"chosen_alone": json_number(chosen), "other_clients": None, **bare},
            "epsilon_before_choice": json_number(guarantee.for_others.epsilon),
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


def keep(
    folder: Path,
    summary: Mapping[str, Any],
    outcome: Outcome,
    train: FederatedDataset,
    *,
    score: Score,
    local: Score | None,
    errors: Mapping[str, Array] = _NOTHING,
    log: Log | None = None,
) -> None:
    """Write what a finished run leaves behind; `result.json` comes last and marks it as done.

    Posts are packed and models are written before it, so that a run cut off in between goes on.
    `errors` are further columns of the metrics: clients' own errors under baselines, by name.
    """
    log = log or Log(folder / "log.jsonl")
    outcome.billboard.pack()
    write_models(folder / MODELS, outcome.models.leaves, train.names)
    outcome.models.drop()
    log.note("packed")
    keep_shared(folder, outcome.shared)
    write_metrics(folder / "metrics.parquet", train, score, local, errors)
    released = outcome.billboard.ledger.released
    keep_certificate(folder, summary, outcome.guarantee, outcome.plan.method.kind, released, log)
    keep_summary(folder, summary)


def keep_shared(folder: Path, shared: Tree) -> None:
    """Write the shared tree after the last post, which newcomers start from."""
    buffer = io.BytesIO()
    arrays = {name: leaf.cpu().numpy() for name, leaf in shared.items()}
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(folder / "shared.npz", buffer.getvalue())


def keep_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write result.json: the run is done."""
    text = json.dumps(dict(summary), indent=2, allow_nan=False)
    write_atomically(folder / "result.json", text.encode())


def keep_certificate(
    folder: Path,
    summary: Mapping[str, Any],
    guarantee: Guarantee,
    method: str,
    released: Mapping[int, str],
    log: Log,
) -> None:
    """Write what others can check; the log says which one it was."""
    more: dict[str, Any] = {"method": method}
    if summary["tuning"] != TUNING["no"]:
        more["tuning"] = summary["tuning"]
    if summary["caveats"]:
        more["caveats"] = summary["caveats"]
    if (deployment := summary.get("deployment")) is not None:
        # Hashed here and not among the files: a simulated run has no such file.
        federation = hashlib.sha256((folder / "federation.toml").read_bytes()).hexdigest()
        more["deployment"] = {**deployment, "federation": federation}
    if (selection := summary.get("selection")) is not None:
        # Epsilon by events alone stays what the events come to; it is true of nobody any more.
        more |= {"selection": selection, "view": BEFORE}
        more["statement"] = statement(guarantee, selection)
    finished = now()
    begun = log.begun or finished
    if deployment is not None:
        # To the day: how long rounds were waited for would tell who was drawn.
        begun, finished = (f"{time[:10]}T00:00" for time in (begun, finished))
    certificate = certify(
        folder,
        guarantee,
        released,
        begun=begun,
        finished=finished,
        versions=versions(),
        more=more,
    )
    text = json.dumps(certificate, indent=2, allow_nan=False)
    write_atomically(folder / "guarantee.json", text.encode())
    epsilon, posts = certificate["epsilon"], len(certificate["posts"])
    told = certificate["sha256"]
    log.note("finished", sync=True, posts=posts, epsilon=epsilon, certificate=told)
