"""The words of a comparison: the frontier as a table, and which differences are clear."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from coterie.comparison.frontier import FALSE_ALARMS
from coterie.comparison.results import ALONE, Findings, Pair, Point, Row
from coterie.privacy.words import round_up
from coterie.summary import NOT_COVERED, TUNING, json_number

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
        table.add_row(label, shown, *(_score(at.get(epsilon)) for epsilon in found.epsilons))
    return table


def legend(found: Findings, rows: Sequence[Row]) -> str:
    """Say what the numbers of the frontier are, and what must be read with them."""
    better = "smaller" if found.smaller_is_better else "larger"
    over = "clients and seeds" if max(point.seeds for point in found.points) > 1 else "clients"
    said = (
        f"mean ± standard error over {over}, {better} is better",
        "* is the best at its epsilon",
    )
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
    for told in dict.fromkeys(row["tuning"] for row in done):
        labels = ", ".join(dict.fromkeys(row["label"] for row in done if row["tuning"] == told))
        if told == NOT_COVERED:
            yield f"TUNING of {labels}: {told}"
        elif told == TUNING["public"]:
            yield f"tuning of {labels}: {told}"
    paid = [row for row in done if row["epsilon_chosen_alone"] is not None]
    if paid:
        labels = ", ".join(dict.fromkeys(row["label"] for row in paid))
        most = round_up(max(row["epsilon"] for row in paid))
        yield f"tuning of {labels} is CHARGED: epsilon is that of one run, of all runs up to {most}"


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
    counted = "clients and seeds both counted" if most > 1 else "only clients are counted"
    yield (
        "Compared are clients' own errors, each client with itself; the chance of any false alarm "
        f"at one epsilon is at most {FALSE_ALARMS:.0%} ({counted}, all pairs of an epsilon "
        "together). ALONE is learning alone, in the method's own terms.".replace("ALONE", ALONE)
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
    """Give frontier and differences as one strict JSON object."""
    done = [row for row in rows if row["status"] == "done"]
    return {
        "data": rows[0]["data"],
        "metric": found.metric or None,
        "smaller_is_better": found.smaller_is_better,
        "epsilons": [json_number(epsilon) for epsilon in found.epsilons],
        "frontier": [_point(point) for point in found.points],
        "differences": [_pair(pair) for pair in found.pairs],
        "false_alarms": FALSE_ALARMS,
        "simulation": any(row["simulation"] for row in rows),
        "tuning": {row["label"]: row["tuning"] for row in done},
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
