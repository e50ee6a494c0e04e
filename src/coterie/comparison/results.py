"""What came out of a comparison: the tidy table, the frontier, and which differences are clear.

`comparison.parquet` has a row a cell; `COLUMNS` documents it. The frontier is the mean of the
metric over seeds by method and epsilon. Differences are of clients' own errors, which every run
keeps in its `metrics.parquet`; see `coterie.comparison.frontier` for the test.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.comparison.cells import Cell
from coterie.comparison.frontier import Array, Difference, adjust, compare_errors
from coterie.comparison.running import read_result
from coterie.comparison.worker import Ended, run_of, selection_of
from coterie.evaluation.metrics import average
from coterie.privacy.files import write_atomically
from coterie.privacy.selection import Selection
from coterie.privacy.words import OTHERS
from coterie.run_plan import read_toml
from coterie.summary import TUNING, TunedOn

TABLE = "comparison.parquet"
ALONE = "alone"
"""What stands for learning alone in a pair."""

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "data": (pa.string(), "name or file"),
    "method": (pa.string(), "registered name"),
    "label": (pa.string(), "what the comparison calls it"),
    "settings": (pa.string(), "JSON: the resolved settings of method, privacy and rounds"),
    "epsilon_asked": (pa.float64(), "the budget; null where nothing is posted"),
    "epsilon": (pa.float64(), "computed, an upper bound; inf where NOT PRIVATE"),
    "epsilon_chosen_alone": (
        pa.float64(),
        "where settings were chosen privately: for whoever sees the chosen run alone",
    ),
    "delta": (pa.float64(), "at which epsilon is stated"),
    "relation": (pa.string(), "zero_out or replace"),
    "view": (pa.string(), "whose view epsilon is of"),
    "seed": (pa.int64(), "of split and noise; of the split alone with real noise"),
    "metric": (pa.string(), "nmse (smaller is better) or accuracy (larger is better)"),
    "value": (pa.float64(), "over all test rows"),
    "standard_error": (pa.float64(), "of value, over clients"),
    "local_value": (pa.float64(), "the metric of learning alone"),
    "share_better_than_local": (pa.float64(), "of clients, by their own errors"),
    "client_error_p90": (pa.float64(), "90th percentile of clients' own errors (nmse)"),
    "client_accuracy_p10": (pa.float64(), "10th percentile of clients' own accuracies"),
    "clients": (pa.int64(), "how many"),
    "rounds": (pa.int64(), "posts"),
    "seconds": (pa.float64(), "of the run"),
    "tuning": (
        pa.string(),
        "none, on public data, CHARGED: ..., or NOT COVERED by epsilon: ..., or two of these",
    ),
    "private": (pa.bool_(), "false where the run is NOT PRIVATE (epsilon is infinite)"),
    "simulation": (pa.bool_(), "true where noise came from a known seed and protects nobody"),
    "status": (pa.string(), "done, refused: why, failed: why, or not run"),
    "run": (pa.string(), "run folder, relative to the comparison's"),
}
"""Columns of the table: type and meaning."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A method at an epsilon: mean over seeds.

    Attributes:
        label: Of the method.
        epsilon: The column it stands in; methods that post nothing stand in all of them.
        value: Mean over seeds of the metric.
        standard_error: Over clients and seeds.
        seeds: How many are in it.
        alone: Mean over seeds of learning alone.
        private: Whether epsilon is finite.
        is_best: Whether no other of its epsilon is better.
    """

    label: str
    epsilon: float
    value: float
    standard_error: float
    seeds: int
    alone: float
    private: bool
    is_best: bool = False


@dataclass(frozen=True)
class Pair:
    """Two methods at an epsilon; the second may be learning alone."""

    epsilon: float
    first: str
    second: str
    difference: Difference


@dataclass(frozen=True)
class Findings:
    """The frontier and the differences of a comparison.

    Attributes:
        metric: Its name; "" where nothing is done.
        epsilons: The columns, ascending.
        points: By label, then by epsilon.
        pairs: By epsilon; p-values adjusted within it.
    """

    metric: str
    epsilons: tuple[float, ...]
    points: tuple[Point, ...]
    pairs: tuple[Pair, ...]

    @property
    def smaller_is_better(self) -> bool:
        """Whether a small value is a good one."""
        return self.metric == "nmse"

    def at(self, epsilon: float) -> list[Point]:
        """Return the points of one epsilon."""
        return [point for point in self.points if point.epsilon == epsilon]


def rows_of(cells: Sequence[Cell], ended: Mapping[int, Ended], folder: Path) -> list[Row]:
    """Return the table's rows, one a cell."""
    return [_row(cell, ended.get(number), folder) for number, cell in enumerate(cells)]


def _row(cell: Cell, ended: Ended | None, folder: Path) -> Row:
    place = folder / cell.place
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"data": cell.table["data"]["name"], "method": cell.kind, "label": cell.label}
    row |= {"epsilon_asked": cell.epsilon, "seed": cell.seed, "run": cell.place}
    row["simulation"] = "simulation_seed" in cell.table
    row["settings"] = json.dumps({k: v for k, v in cell.table["method"].items() if k != "kind"})
    if ended is None or ended.status != "done":
        row["status"] = "not run" if ended is None else f"{ended.status}: {ended.why}"
        return row
    record = selection_of(place)
    place = run_of(place)
    row["run"] = place.relative_to(folder).as_posix()
    result = read_result(place)
    row |= {key: _number(result[key]) for key in COLUMNS.keys() & result.keys() - {"method", "run"}}
    plan = read_toml(place / "plan.toml")
    settings = {k: v for k, v in plan["method"].items() if k != "kind"}
    settings |= {"rounds": plan.get("rounds"), "privacy": _without_budget(plan["privacy"])}
    row["settings"] = json.dumps(settings)
    if record is not None:
        row |= _charged(record, plan.get("tuned", "charged"))
    return row | {"private": row["epsilon"] < math.inf, "status": "done"}


def _charged(record: Mapping[str, Any], tuned: TunedOn) -> Row:
    """Return what a private choice cost: all runs and scores count for the other clients.

    What an earlier choice has left uncovered stays so, and is said first.
    """
    stated = Selection.from_json(record["guarantee"])
    drawn = record["guarantee"]["drawn"]
    told = f"CHARGED: epsilon is of {len(drawn)} runs and their scores, one of which was chosen"
    both = {"epsilon": stated.of_runs(drawn).epsilon, "epsilon_chosen_alone": stated.chosen_alone}
    said = told if tuned == "charged" else f"{TUNING[tuned]}; {told}"
    return {**both, "tuning": said, "view": OTHERS}


def _without_budget(privacy: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in privacy.items() if key != "epsilon"}


def _number(value: Any) -> Any:
    """Read what strict JSON wrote of a number."""
    return float(value) if value in ("inf", "-inf") else value


def write_table(folder: Path, rows: Sequence[Row]) -> Path:
    """Write the tidy table; its columns carry what they mean."""
    schema = pa.schema(
        [
            pa.field(name, kind, metadata={"description": told})
            for name, (kind, told) in COLUMNS.items()
        ]
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), buffer)
    write_atomically(folder / TABLE, buffer.getvalue().to_pybytes())
    return folder / TABLE


def find(rows: Sequence[Row], folder: Path) -> Findings:
    """Make the frontier, and test all pairs of every epsilon."""
    done = [row for row in rows if row["status"] == "done"]
    asked = {float(row["epsilon_asked"]) for row in done if row["epsilon_asked"] is not None}
    # Where nothing is posted at all, there is one column: epsilon is 0.
    columns = tuple(sorted(asked or {0.0}))
    labels = list(dict.fromkeys(row["label"] for row in done))
    metric = done[0]["metric"] if done else ""
    points: list[Point] = []
    pairs: list[Pair] = []
    read = _Errors(folder)
    for epsilon in columns:
        at = {label: _at(done, label, epsilon) for label in labels}
        shown = {label: found for label, found in at.items() if found}
        points += _marked([_point(found, epsilon) for found in shown.values()], metric)
        pairs += _pairs(shown, epsilon, read)
    order = {label: place for place, label in enumerate(labels)}
    points.sort(key=lambda point: (order[point.label], point.epsilon))
    return Findings(metric, columns, tuple(points), tuple(pairs))


def _at(rows: Sequence[Row], label: str, epsilon: float) -> list[Row]:
    return [r for r in rows if r["label"] == label and r["epsilon_asked"] in (None, epsilon)]


def _point(rows: Sequence[Row], epsilon: float) -> Point:
    values, errors, alone = (
        [math.nan if row[key] is None else row[key] for row in rows]
        for key in ("value", "standard_error", "local_value")
    )
    value, error = average(values, errors)
    private = all(row["private"] for row in rows)
    label = rows[0]["label"]
    return Point(label, epsilon, value, error, len(rows), float(np.mean(alone)), private)


def _marked(points: list[Point], metric: str) -> Iterator[Point]:
    known = [point.value for point in points if not math.isnan(point.value)]
    best = (min if metric == "nmse" else max)(known) if len(known) > 1 else math.nan
    for point in points:
        yield Point(**{**vars(point), "is_best": point.value == best})


class _Errors:
    """Reads clients' own errors, each file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, dict[str, dict[str, float]]] = {}

    def of(self, row: Row) -> dict[str, dict[str, float]]:
        """Return {"error": {client: own error}, "error_alone": ...}."""
        if row["run"] not in self._kept:
            table = pq.read_table(self._folder / row["run"] / "metrics.parquet")
            names = table["client"].to_pylist()
            self._kept[row["run"]] = {
                key: dict(zip(names, table[key].to_numpy(), strict=True))
                for key in ("error", "error_alone")
                if key in table.column_names
            }
        return self._kept[row["run"]]


def _pairs(shown: Mapping[str, list[Row]], epsilon: float, read: _Errors) -> list[Pair]:
    """Test every method against every other, and against learning alone where it posts."""
    asked = [(first, second, "error") for first, second in itertools.combinations(shown, 2)]
    silent = [label for label, rows in shown.items() if rows[0]["epsilon_asked"] is None]
    asked += [(label, label, "error_alone") for label in shown if label not in silent]
    found: list[tuple[str, str, Difference]] = []
    for first, second, against in asked:
        errors = _side_by_side(shown[first], shown[second], read, against)
        if errors is None or (
            against == "error_alone" and any(_is_alone(shown[s], errors[1], read) for s in silent)
        ):
            continue  # a method that learns alone in the same way stands for it
        other = ALONE if against == "error_alone" else second
        found.append((first, other, compare_errors(*errors)))
    adjusted = adjust([difference for *_, difference in found])
    return [
        Pair(epsilon, first, second, difference)
        for (first, second, _), difference in zip(found, adjusted, strict=True)
    ]


def _is_alone(rows: Sequence[Row], alone: Array, read: _Errors) -> bool:
    errors = _side_by_side(rows, rows, read, "error")
    return errors is not None and np.array_equal(errors[0], alone, equal_nan=True)


def _side_by_side(
    first: Sequence[Row], second: Sequence[Row], read: _Errors, against: str
) -> tuple[Array, Array] | None:
    """Return errors on the seeds and clients that both have, (clients, seeds) each."""
    ours = {row["seed"]: read.of(row)["error"] for row in first}
    theirs = {row["seed"]: read.of(row).get(against) for row in second}
    pairs = [(ours[seed], other) for seed in ours if (other := theirs.get(seed)) is not None]
    if not pairs:
        return None
    names = sorted(set.intersection(*(set(part) for pair in pairs for part in pair)))
    return _stacked([ours for ours, _ in pairs], names), _stacked([b for _, b in pairs], names)


def _stacked(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> Array:
    return np.array([[part[name] for part in parts] for name in names], dtype=np.float64).reshape(
        len(names), len(parts)
    )
