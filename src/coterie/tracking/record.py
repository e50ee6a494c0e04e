"""What a tracker is told of a finished run.

The plan's settings, the guarantee, epsilon after each round, the score and losses of each round
where the run kept them (`--history`), and the final metrics; as artefacts the certificate, the plan
and a page without clients (`coterie.tracking.track` has it made). Never models, nor a name or a
number of one single client, nor how many answered in a round: a hidden cohort stays hidden.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.full_disks import how_to_finish
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.selection import CHOSEN_ONLY, charged_statement, chosen_alone

ARTEFACTS = ("guarantee.json", "plan.toml")
"""What goes out as it is; the page of a run folder names clients and stays where it is."""
NOT_COVERED = "metrics are of clients' rows and not covered by epsilon"
_SHOWN = ("value", "balanced_accuracy", "r2", "train_loss", "test_loss")
_SINGLE = "_worst"
"""Ends the names of metrics that are one client's."""
_MARKS = 50
"""Epsilon is shown after at most so many rounds: each is an account of its own."""


@dataclass(frozen=True)
class Record:
    """What is told of a finished run: plain values, nothing of a single client."""

    name: str
    settings: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    by_round: tuple[tuple[int, str, float], ...]
    artefacts: tuple[Path, ...]
    charged_statement: str


def read_record(folder: Path) -> Record:
    """Read what is told of a finished run.

    Raises:
        ValueError: If the folder holds no finished run.
    """
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        plan = tomllib.loads((folder / "plan.toml").read_text(encoding="utf-8"))
        guarantee = Guarantee.from_json(stated)
        chosen = chosen_alone(guarantee, stated.get("selection"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: no finished run to track ({error!r}); {how_to_finish(folder)}"
        ) from error
    return Record(
        name=folder.name,
        settings={key: _text(value) for key, value in flatten(plan).items()},
        tags=_tags(result, guarantee) | ({} if chosen is None else {"coterie.view": CHOSEN_ONLY}),
        metrics=_final(result, guarantee, chosen),
        # What the posts of a chosen run come to by themselves is true of nobody.
        by_round=(
            *(_epsilons(guarantee) if chosen is None else ()),
            *_history(folder / "history.parquet"),
        ),
        artefacts=tuple(path for name in ARTEFACTS if (path := folder / name).exists()),
        charged_statement=charged_statement(guarantee, stated.get("selection")),
    )


def flatten(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names.

    >>> flatten({"rounds": 3, "method": {"kind": "pmtl", "lam": 0.3}})
    {'rounds': 3, 'method.kind': 'pmtl', 'method.lam': 0.3}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _tags(result: Mapping[str, Any], guarantee: Guarantee) -> dict[str, str]:
    stated = guarantee.to_json()
    return {
        "coterie.method": str(result.get("method")),
        "coterie.data": str(result.get("data")),
        "coterie.simulation": str(guarantee.simulation).lower(),
        "coterie.relation": guarantee.relation,
        "coterie.view": stated["view"],
        "coterie.sampling": stated["sampling"],
        "coterie.accountant": stated["accountant"],
        "coterie.tuning": str(result.get("tuning", "none")),
        "coterie.not_covered": NOT_COVERED,
    }


def _final(
    result: Mapping[str, Any], guarantee: Guarantee, chosen: float | None
) -> dict[str, float]:
    """Return the numbers of the summary, and epsilon computed anew; infinities are no metrics.

    Beside epsilon, whose view a tag names, stands that of the other clients: under a hidden cohort
    of fixed size it is larger. Of a run that was `chosen` epsilon is that of the choice.
    """
    numbers = {
        key: float(value)
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if not key.endswith(_SINGLE)
    }
    if isinstance(result.get("metric"), str) and "value" in numbers:
        numbers[result["metric"]] = numbers["value"]
    numbers |= {"epsilon": guarantee.epsilon if chosen is None else chosen}
    numbers |= {"delta": guarantee.delta}
    if chosen is None:
        numbers["epsilon_other_clients"] = guarantee.views["other_clients"]
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def _epsilons(guarantee: Guarantee) -> list[tuple[int, str, float]]:
    """Return epsilon after some of the rounds, the last among them."""
    rounds = len(guarantee.events)
    marks = sorted({math.ceil(rounds * part / _MARKS) for part in range(1, _MARKS + 1)} - {0})
    spent = epsilon_by_round(
        guarantee.events, guarantee.participation, guarantee.relation, guarantee.delta, marks
    )
    return [
        (mark, "epsilon_by_round", epsilon)
        for mark, epsilon in zip(marks, spent, strict=True)
        if math.isfinite(epsilon)
    ]


def _history(path: Path) -> list[tuple[int, str, float]]:
    if not path.exists():
        return []
    import pyarrow.parquet as pq

    return [
        (int(line["round"]), f"round_{key}", float(value))
        for line in pq.read_table(path).to_pylist()
        for key, value in line.items()
        if key in _SHOWN and isinstance(value, int | float) and math.isfinite(value)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
