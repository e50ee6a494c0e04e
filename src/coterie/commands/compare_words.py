"""The words of a comparison: the frontier as a table, and which differences are clear."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from coterie.comparison.frontier import FALSE_ALARMS
from coterie.comparison.results import ALONE, Findings, Pair, Point, Row, find, rows_of
from coterie.comparison.worker import Ended, is_done, read_comparison
from coterie.evaluation.metrics import json_number
from coterie.privacy.words import round_up
from coterie.summary import NOT_COVERED, TUNING

_ENOUGH_SEEDS = 5


def frontier_table(found: Findings, rows: Sequence[Row]) -> Table:
    """Make the frontier: methods down, epsilons across, learning alone beside."""
    first = next(row for row in rows if row["status"] == "done")
    title = f"{first['data']}: {first['clients']} clients, test {found.metric}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    table.add_column("alone", justify="right", no_wrap=True)
    for epsilon in found.epsilons:
        head = f"epsilon {epsilon:g}" + ("\nNOT PRIVATE" if math.isinf(epsilon) else "")
        table.add_column(head, justify="right", no_wrap=True)
    for label in dict.fromkeys(point.label for point in found.points):
        at = {point.epsilon: point for point in found.points if point.label == label}
        alone = next(iter(at.values())).alone
        shown = "-" if math.isnan(alone) else f"{alone:.3g}"
        name = "\n".join([label, *_choosing(label, rows)])
        table.add_row(name, shown, *(_score(at.get(epsilon)) for epsilon in found.epsilons))
    return table


def _choosing(label: str, rows: Sequence[Row]) -> Iterator[str]:
    """Say below a method's name what covers the choice of its settings, where there was one."""
    said = [row["tuning"] or "" for row in rows if row["label"] == label]
    if any(NOT_COVERED in tuning for tuning in said):
        yield "tuning NOT COVERED by epsilon"
    elif any(TUNING["public"] in tuning for tuning in said):
        yield "tuned on public data"
    if any("CHARGED" in tuning for tuning in said):
        yield "tuning CHARGED on top of epsilon"


def legend(found: Findings, rows: Sequence[Row]) -> str:
    """Say what the numbers of the frontier are, and what must be read with them."""
    better = "smaller" if found.smaller_is_better else "larger"
    over = "clients and seeds" if max(point.seeds for point in found.points) > 1 else "clients"
    said = [f"mean ± standard error over {over}, {better} is better"]
    if any(point.is_best for point in found.points):
        said.append("* is the best at its epsilon")
    return "; ".join([*said, *_warnings(rows)]) + "."


def _score(point: Point | None) -> str:
    if point is None or math.isnan(point.value):
        return "-"
    error, mark = point.standard_error, "*" if point.is_best else " "
    if not 0 < error < math.inf:
        return f"{point.value:.4g}{mark}"
    digits = min(6, max(0, 1 - math.floor(math.log10(error))))  # two digits of what is not known
    return f"{point.value:.{digits}f} ± {error:.{digits}f}{mark}"


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    done = [row for row in rows if row["status"] == "done"]
    first = done[0]
    what = "replacement" if first["relation"] == "replace" else "zero-out"
    deltas = {row["delta"] for row in done}
    at = f", delta {first['delta']:.3g}" if len(deltas) == 1 else ""
    views = {row["view"] for row in done if row["epsilon_asked"] is not None}
    view = f", view of {views.pop()}" if len(views) == 1 else ""
    yield f"epsilon: {what} of one client{view}{at}"
    yield "metrics are not covered"
    if any(row["simulation"] for row in done):
        yield "SIMULATION: known seeds, protects nobody"
    for told, word in ((NOT_COVERED, "TUNING"), (TUNING["public"], "tuning")):
        # What was charged beside it is said after it, and is another sentence.
        named = dict.fromkeys(row["label"] for row in done if row["tuning"].startswith(told))
        if named:
            yield f"{word} of {', '.join(named)}: {told}"
    paid = [row for row in done if row["epsilon_chosen_alone"] is not None]
    if paid:
        labels = ", ".join(dict.fromkeys(row["label"] for row in paid))
        most = round_up(max(row["epsilon"] for row in paid))
        least = round_up(max(row["epsilon_chosen_alone"] for row in paid))
        yield (
            f"tuning of {labels} is CHARGED: epsilon is that of one run before the choice; for "
            f"other clients, of all runs, up to {most}; for whoever sees a chosen run alone {least}"
        )


def sentences(found: Findings) -> Iterator[str]:
    """Say which differences are larger than noise, epsilon by epsilon."""
    for epsilon in found.epsilons:
        pairs = [pair for pair in found.pairs if pair.epsilon == epsilon]
        if pairs:
            yield f"At epsilon {epsilon:g}:"
            yield from (f"  {line}" for line in _told(pairs))
    if not found.pairs:
        return
    most = max(pair.difference.seeds for pair in found.pairs)
    unit = "mean squared errors" if found.smaller_is_better else "shares of test rows wrong"
    counted = "clients and seeds both counted" if most > 1 else "only clients are counted"
    yield (
        f"Compared are clients' own {unit}, each client with itself; the chance of any false alarm "
        f"at one epsilon is at most {100 * FALSE_ALARMS:.0f} % ({counted}, all pairs of an epsilon "
        f"together). {ALONE} is learning alone, in the method's own terms."
    )
    if most == 1:
        yield (
            "With one seed only clients vary: another split and other noise could turn these "
            "around; give --seeds 5."
        )
    elif most < _ENOUGH_SEEDS:
        yield (
            f"{most} seeds say little of how much seeds matter, and the test allows for that: more "
            "seeds tell smaller differences apart."
        )


def findings_of(folder: Path) -> list[str]:
    """Return the sentences on what is done of a comparison, anew from its runs."""
    cells = read_comparison(folder).cells()
    done = {n: Ended("done") for n, cell in enumerate(cells) if is_done(folder / cell.place)}
    return list(sentences(find(rows_of(cells, done, folder), folder)))


def _told(pairs: Sequence[Pair]) -> Iterator[str]:
    """Group clear differences by who is better, then name what is not told apart."""
    better: dict[str, list[str]] = {}
    close: list[str] = []
    unknown: list[str] = []
    for pair in pairs:
        if math.isnan(pair.difference.mean):
            unknown.append(f"{pair.first} and {pair.second}")
        elif pair.difference.is_clear:
            first, second = pair.first, pair.second
            if pair.difference.mean > 0:
                first, second = second, first
            away = f"{second} (by {_gap(pair)})"
            better.setdefault(first, []).append(away)
        else:
            close.append(f"{pair.first} and {pair.second}")
    for label, others in better.items():
        yield f"{label} is better than {', '.join(others)}"
    if close:
        yield f"not told apart: {', '.join(close)}"
    if unknown:
        yield f"not comparable (errors that are not finite): {', '.join(unknown)}"


def _gap(pair: Pair) -> str:
    return f"{abs(pair.difference.mean):.2g} ± {pair.difference.standard_error:.1g}"


def troubles(rows: Sequence[Row]) -> Iterator[str]:
    """Say once each why cells were refused or failed."""
    said: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] not in ("done", "not run"):
            said.setdefault((row["label"], row["status"]), []).append(row)
    for (label, status), alike in said.items():
        places = "" if status.startswith("refused") else f" ({', '.join(r['run'] for r in alike)})"
        yield f"{label}: {status}{places}"


def as_json(found: Findings, rows: Sequence[Row]) -> dict[str, Any]:
    """Return frontier and differences as one strict JSON object."""
    done = [row for row in rows if row["status"] == "done"]
    tuning = {row["label"]: row["tuning"] for row in done}
    return {
        "data": rows[0]["data"],
        "metric": found.metric or None,
        "smaller_is_better": found.smaller_is_better,
        "epsilons": [json_number(epsilon) for epsilon in found.epsilons],
        "frontier": [
            {**_point(point), "tuning": tuning.get(point.label)} for point in found.points
        ],
        "differences": [_pair(pair) for pair in found.pairs],
        "false_alarms": FALSE_ALARMS,
        "simulation": any(row["simulation"] for row in rows),
        "tuning": tuning,
        "cells": len(rows),
        "done": len(done),
        "refused": _count(rows, "refused"),
        "failed": _count(rows, "failed"),
    }


def _count(rows: Sequence[Row], status: str) -> list[dict[str, Any]]:
    keys = ("label", "epsilon_asked", "seed", "status", "run")
    found = [{key: row[key] for key in keys} for row in rows if row["status"].startswith(status)]
    for row in found:
        asked = row["epsilon_asked"]
        row["epsilon_asked"] = None if asked is None else json_number(asked)
    return found


def _point(point: Point) -> dict[str, Any]:
    numbers: Mapping[str, float] = {
        "epsilon": point.epsilon,
        "value": point.value,
        "standard_error": point.standard_error,
        "alone": point.alone,
    }
    told = {key: json_number(value) for key, value in numbers.items()}
    return {
        "label": point.label,
        **told,
        "seeds": point.seeds,
        "private": point.private,
        "best": point.is_best,
    }


def _pair(pair: Pair) -> dict[str, Any]:
    difference = pair.difference
    return {
        "epsilon": json_number(pair.epsilon),
        "first": pair.first,
        "second": pair.second,
        "difference": json_number(difference.mean),
        "standard_error": json_number(difference.standard_error),
        "clients": difference.clients,
        "seeds": difference.seeds,
        "p": difference.p,
        "p_adjusted": difference.adjusted,
        "larger_than_noise": difference.is_clear,
    }
