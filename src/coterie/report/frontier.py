"""The privacy/utility frontier: a metric against epsilon, a line a method; a part of a report."""

import math
from collections.abc import Iterator, Sequence

from coterie.report import figures
from coterie.report.charts import Row
from coterie.report.elements import Html, can_draw, element, join, side_by_side
from coterie.report.finished import FinishedRun
from coterie.report.groups import Group, group

_METHODS = 8
_READ = (
    "What privacy costs: further left is more private. Bars are one standard error, over clients, "
    "and over seeds where there are several; lines that lie within each other's bars may differ by "
    "luck alone."
)


def show_frontier(runs: Sequence[FinishedRun]) -> Html:
    """Show runs of one metric at several epsilons; nothing where there is one epsilon."""
    parts: list[str] = []
    for number, scored in enumerate(dict.fromkeys(run.scored for run in runs)):
        groups = group([run for run in runs if run.scored == scored])
        private = [one for one in groups if one.first.private and not math.isnan(one.mean("value"))]
        if len({round(one.first.epsilon, 6) for one in private}) > 1 and can_draw():
            parts.append(_drawn(f"frontier-{number + 1}", scored, private, groups))
    if not parts:
        return Html("")
    title = element("h3", "Privacy against utility")
    return join(title, element("p", _READ, class_="note"), side_by_side(*parts, wide=True))


def _drawn(name: str, scored: str, private: Sequence[Group], groups: Sequence[Group]) -> Html:
    best = {one.first.name: one.badness for one in private}
    for one in private:
        method = one.first.name
        best[method] = min(best[method], one.badness)
    kept = sorted(best, key=lambda method: best[method])[:_METHODS]
    rows = [_row(one) for one in private if one.first.name in kept]
    title = f"{scored} against epsilon"
    if len(kept) < len(best):
        title += f", the best {len(kept)} of {len(best)} methods"
    levels = list(_levels(groups))
    return figures.frontier(name, title, rows=rows, levels=levels, up=scored).show()


def _row(one: Group) -> Row:
    error = one.error("value", "standard_error")
    return {
        "kind": one.first.name,
        "x": one.first.epsilon,
        "y": one.mean("value"),
        "error": 0.0 if math.isnan(error) else error,
        "runs": len(one.runs),
    }


def _levels(groups: Sequence[Group]) -> Iterator[Row]:
    """Return what has no epsilon: learning alone, and without privacy (one of each)."""
    alone = [one.mean("local_value") for one in groups if one.first.shares]
    known = [value for value in alone if not math.isnan(value)]
    if known:
        yield {"kind": "alone", "y": known[0]}
    bare = [one for one in groups if one.first.shares and not one.first.private]
    for one in bare[:3]:
        if not math.isnan(one.mean("value")):
            yield {"kind": f"{one.first.result['method']}, NOT PRIVATE", "y": one.mean("value")}
