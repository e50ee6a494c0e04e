"""What a finished run says of itself: the summary, and the files that are kept."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.certificate import keep_certificate
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.simulate import Outcome
from coterie.finished_models import MODELS, write_models
from coterie.log import Log
from coterie.methods.base import Shape
from coterie.plan import Plan
from coterie.privacy.files import write_atomically
from coterie.privacy.guarantee import Guarantee, view_of
from coterie.privacy.selection import (
    CHOSEN_ONLY,
    Charged,
    charged_message,
    chosen_alone,
)
from coterie.scores import TITLES, Array, Score, noise_to_signal
from coterie.tree import Tree

TunedOn = Literal["no", "public", "charged", "not covered"]
NOT_COVERED = "NOT COVERED by epsilon: settings were chosen on these rows"
_SPREAD = {"mean": "mean", "weighted_mean": "weighted_mean", "tail": "", "worst": "worst"}
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

    `newcomers` is what is said of clients who joined after training, see `coterie.newcomers`. A run
    that is one of a selection says more, see `paid`.
    """
    plan, guarantee = outcome.plan, outcome.guarantee
    return {
        "method": str(plan.method),
        "data": data,
        "clients": outcome.spec.clients,
        "task": outcome.spec.task,
        # Rows in one place are one release, though nothing is posted.
        "rounds": 1 if plan.method.shape is Shape.POOLED else len(outcome.posts),
        **promised(guarantee),
        **noise_told(plan, outcome.spec),
        **scores_told(score, local),
        "newcomers": None if newcomers is None else dict(newcomers),
        "noise_to_signal": [
            None if ratio is None else json_number(ratio) for ratio in noise_to_signal(outcome)
        ],
        "not_covered": "metrics, references and notices, and any tuning done with them, are not "
        "covered by epsilon",
        "tuning": TUNING[tuned],
        "caveats": [
            *plan.method.notes(private=plan.posts > 0 and guarantee.epsilon < math.inf).caveats,
            *_claimed(guarantee),
        ],
        "notices": [*notices, *_zeroed(outcome)],
        "seconds": round(seconds, 3),
    }


def scores_told(score: Score | None, local: Score | None) -> dict[str, Any]:
    """Return what scores say; all null where none were computed: those of a deployment stay away."""
    return {
        "metric": None if score is None else score.metric,
        "value": None if score is None else json_number(score.value),
        "standard_error": None if score is None else json_number(score.standard_error),
        **_per_client(score),
        **spread_told(score),
        **_calibration(score),
        "test_loss": None if score is None else json_number(score.loss),
        "clients_without_test_rows": None if score is None else score.spread.left_out,
        **_beside_local(score, local),
    }


def noise_told(plan: Plan, spec: Spec) -> dict[str, Any]:
    """Say what noise a plan adds, and whether it can learn under it; all public."""
    clients = spec.clients
    noise = plan.noise_multipliers(clients)
    noised = plan.posts > 0 and plan.privacy.epsilon != math.inf
    error = plan.relative_error(spec) if noised else None
    explained = (
        *plan.method.notes(rounds=plan.rounds, clip=plan.clip(clients)).settings,
        *can_learn(error),
    )
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
    charged_message = f"the noise of a posted mean is {error:.2g} times the clip (relative error)"
    if error <= 0.3:
        return (f"{charged_message}: it is hardly felt",)
    if error <= 1:
        return (f"{charged_message}: it is felt, and what is shared still tells something",)
    return (
        f"{charged_message}: what is shared is mostly noise, and clients lean on their own rows; fewer posted "
        "numbers, fewer rounds, more clients or a larger epsilon would help",
    )


def _per_client(score: Score | None) -> dict[str, Any]:
    """Return the means over clients of what is each client's own; null where it does not apply."""
    found: dict[str, Any] = {}
    owned = dict.fromkeys(TITLES) if score is None else score.per_client
    for key, own in owned.items():
        found[key] = None if own is None else json_number(own.value)
        found[f"{key}_standard_error"] = None if own is None else json_number(own.standard_error)
        found[f"{key}_left_out"] = None if own is None else own.left_out
    r2 = owned["r2"]
    known = np.empty(0) if r2 is None else r2.clients[~np.isnan(r2.clients)]
    # A few clients whose targets hardly differ ruin a mean, not a median.
    found["r2_median"] = json_number(float(np.median(known))) if len(known) else None
    return found


def spread_told(score: Score | None, prefix: str = "") -> dict[str, Any]:
    """Return how clients fare one by one; null where it does not apply, or nothing was scored.

    The tail is named by the percentile that it is: p10 of accuracies, p90 of errors.
    """
    found: dict[str, Any] = {}
    spread = None if score is None else score.spread
    for of, tail in (("accuracy", "p10"), ("error", "p90")):
        shown = spread if spread is not None and spread.of == of else None
        for name, key in _SPREAD.items():
            charged_message = None if shown is None else json_number(getattr(shown, name))
            found[f"{prefix}client_{of}_{key or tail}"] = charged_message
    return found


def _beside_local(score: Score | None, local: Score | None) -> dict[str, Any]:
    """Return what learning alone comes to; null where nobody asked."""
    better = None
    if score is not None and local is not None:
        better = json_number(score.share_better_than(local))
    return {
        "share_better_than_local": better,
        "local_value": None if local is None else json_number(local.value),
        **spread_told(local, "local_"),
        **_calibration(local, "local_"),
    }


def _calibration(score: Score | None, prefix: str = "") -> dict[str, Any]:
    """Return calibration errors and what a reliability diagram shows; null for regression."""
    pooled = None if score is None else score.reliability
    own = None if score is None else score.calibration
    return {
        f"{prefix}calibration_error": None if pooled is None else json_number(pooled.error),
        f"{prefix}client_calibration_error": None if own is None else json_number(own.value),
        f"{prefix}client_calibration_error_left_out": None if own is None else own.left_out,
        f"{prefix}reliability": None if pooled is None else pooled.to_json(),
    }


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
    cost = charged_message(selection["epsilon_chosen_alone"], guarantee.delta)
    tuning = cost if tuned == "charged" else f"{TUNING[tuned]}; {cost}"
    return {**promised(guarantee, selection), "tuning": tuning}


def promised(guarantee: Guarantee, selection: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the part of a summary that the guarantee decides.

    Of a run that was chosen (`selection`, of its certificate) epsilon is that of whoever sees it
    alone; what its events come to by themselves is true of nobody, and kept apart.
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
            # What the other clients may have seen is in selection.json, which is not for all.
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


def json_number(value: float) -> float | str | None:
    """Write a number as strict JSON: infinity is "inf" or "-inf", not-a-number is null."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


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
    `errors` are further columns of the metrics: clients' own errors under references, by name.
    """
    log = log or Log(folder / "log.jsonl")
    outcome.billboard.pack()
    write_models(folder / MODELS, outcome.models.leaves, train.names)
    outcome.models.drop()
    log.note("packed")
    keep_shared(folder, outcome.shared)
    write_metrics(folder / "metrics.parquet", train, score, local, errors)
    keep_certificate(folder, summary, outcome.guarantee, outcome.plan, outcome.billboard, log)
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


def write_metrics(
    path: Path,
    train: FederatedDataset,
    score: Score,
    local: Score | None,
    errors: Mapping[str, Array] = _NOTHING,
) -> None:
    """Write a row a client: its rows, its error, what else is its own, its error alone, others."""
    columns = {
        "client": pa.array(list(train.names)),
        "train_rows": pa.array(train.counts),
        "test_rows": pa.array(score.rows),
        "error": pa.array(score.clients),
    }
    for key, own in {**score.per_client, "calibration_error": score.calibration}.items():
        if own is not None:
            columns[key] = pa.array(own.clients)
    if local is not None:
        columns["error_alone"] = pa.array(local.clients)
        if local.calibration is not None:
            columns["calibration_error_alone"] = pa.array(local.calibration.clients)
    columns |= {name: pa.array(found) for name, found in errors.items()}
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_atomically(path, buffer.getvalue().to_pybytes())
