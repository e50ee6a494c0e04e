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

from coterie.data.federated import FederatedDataset
from coterie.engines.outcome import Outcome
from coterie.methods.base import Shape
from coterie.privacy.accounting import Guarantee
from coterie.privacy.files import write_atomically
from coterie.privacy.words import view_of
from coterie.scores import Score, noise_to_signal

TunedOn = Literal["no", "public", "not covered"]
NOT_COVERED = "NOT COVERED by epsilon: settings were chosen on these rows"
TUNING: dict[TunedOn, str] = {"no": "none", "public": "on public data", "not covered": NOT_COVERED}


def summarise(
    outcome: Outcome,
    score: Score,
    local: Score | None,
    *,
    data: str,
    tuned: TunedOn,
    seconds: float,
    notices: Sequence[str] = (),
) -> dict[str, Any]:
    """Give the summary that others may script against; strict JSON."""
    plan, guarantee = outcome.plan, outcome.guarantee
    noise = plan.noise_multipliers(outcome.spec.clients)
    noised = plan.posts > 0 and plan.privacy.epsilon != math.inf
    return {
        "method": plan.method.kind,
        "data": data,
        "clients": outcome.spec.clients,
        "task": outcome.spec.task,
        # Rows in one place are one release, though nothing is posted.
        "rounds": 1 if plan.method.shape is Shape.POOLED else len(outcome.posts),
        **promised(guarantee),
        "noise_multiplier": noise[0] if len(set(noise)) == 1 else None,
        "noise_multipliers": None if len(set(noise)) == 1 else list(noise),
        "clip": plan.clip(outcome.spec.clients) if noised else None,
        "metric": score.metric,
        "value": json_number(score.value),
        "standard_error": json_number(score.standard_error),
        **_per_client(score),
        "share_better_than_local": (
            None if local is None else json_number(score.share_better_than(local))
        ),
        "local_value": None if local is None else json_number(local.value),
        "noise_to_signal": [
            None if ratio is None else json_number(ratio) for ratio in noise_to_signal(outcome)
        ],
        "not_covered": "metrics and notices, and any tuning done with them, are not covered by "
        "epsilon",
        "tuning": TUNING[tuned],
        "caveats": list(plan.method.caveats(plan.posts > 0 and guarantee.epsilon < math.inf)),
        "notices": list(notices),
        "explained": list(plan.method.explain(plan.rounds, plan.clip(outcome.spec.clients)))
        if noised
        else [],
        "seconds": round(seconds, 3),
    }


def _per_client(score: Score) -> dict[str, Any]:
    """Give the means over clients of what is each client's own; null where it does not apply."""
    found: dict[str, Any] = {}
    for key, own in score.per_client.items():
        found[key] = None if own is None else json_number(own.value)
        found[f"{key}_standard_error"] = None if own is None else json_number(own.standard_error)
        found[f"{key}_left_out"] = None if own is None else own.left_out
    return found


def promised(guarantee: Guarantee) -> dict[str, Any]:
    """Give the part of a summary that the guarantee decides."""
    claimed = guarantee.claimed_epsilon
    true = None if claimed is None else guarantee.claimed_alone.delta_at(claimed)
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
) -> None:
    """Write what a finished run leaves behind; `result.json` comes last and marks it as done."""
    stated = outcome.guarantee.to_json()
    if summary["tuning"] != TUNING["no"]:
        stated["tuning"] = summary["tuning"]
    if summary["caveats"]:
        stated["caveats"] = summary["caveats"]
    guarantee = json.dumps(stated, indent=2, allow_nan=False)
    write_atomically(folder / "guarantee.json", guarantee.encode())
    names = json.dumps(list(train.names)).encode()
    write_atomically(folder / "models" / "clients.json", names)
    shared = io.BytesIO()
    arrays = {name: leaf.cpu().numpy() for name, leaf in outcome.shared.items()}
    np.savez(shared, allow_pickle=False, **arrays)
    write_atomically(folder / "shared.npz", shared.getvalue())
    columns = {
        "client": pa.array(list(train.names)),
        "train_rows": pa.array(train.counts),
        "test_rows": pa.array(score.rows),
        "error": pa.array(score.clients),
    }
    for key, own in score.per_client.items():
        if own is not None:
            columns[key] = pa.array(own.clients)
    if local is not None:
        columns["error_alone"] = pa.array(local.clients)
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_atomically(folder / "metrics.parquet", buffer.getvalue().to_pybytes())
    text = json.dumps(dict(summary), indent=2, allow_nan=False)
    write_atomically(folder / "result.json", text.encode())
