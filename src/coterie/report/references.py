"""What stands beside runs: a section of a report, with whom joining paid for and whom it did not.

Learning alone and what could be had without privacy, on the same test rows and client by client;
see `coterie.references`. Nothing of it is covered by epsilon.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.references import LABELS, TITLES, verdicts
from coterie.report import charts
from coterie.report.charts import (
    GAIN,
    INK,
    LOSS,
    Array,
    Html,
    axis_bound,
    element,
    join,
    numbers,
    percent,
    short,
    table,
    thin,
)
from coterie.report.finished import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASH = "\u2013"
_VALUE = ("value", "standard_error")
_POINTS = 500
_DRAWN = 4
"""Runs whose clients are drawn on a page: a chart each."""
_READ = (
    "Own error less the reference's: the mean over clients of their own test error under the run "
    "less that under the reference, with its standard error over clients; below 0 the run is "
    "better. t is the one over the other. Not covered by epsilon."
)
_LEVELS = {"most gained": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
_LEVELS |= {"90 %": 0.9, "most lost": 1.0}


def show_references(runs: Sequence[FinishedRun]) -> Html:
    """Show what stands beside runs that share something; nothing where nothing does."""
    shown = {run.label: run for run in runs if run.shares and run.references}
    if not shown:
        return Html("")
    parts: list[str] = [element("h2", "Beside learning alone, and without privacy")]
    parts += [element("p", told) for told in verdicts({k: r.references for k, r in shown.items()})]
    several = list(shown.values())
    parts.append(_one(several[0]) if len(several) == 1 else _together(several))
    parts += [element("p", told, class_="note") for told in _notes(several)]
    parts.append(_charts(_drawn(several)))
    return element("section", *parts)


def _one(run: FinishedRun) -> Html:
    head = ["reference", run.scored, "own error less the reference's", "t", "clients worse off"]
    return table(head, [_row(told) for told in run.references], class_="cards")


def _together(runs: Sequence[FinishedRun]) -> Html:
    """Give each reference once, with its value, and how every run compares with it."""
    by_run = [{told["name"]: told for told in run.references} for run in runs]
    names = [name for name in TITLES if any(name in told for told in by_run)]
    head = ["method"]
    for name in names:
        found = {_plus_minus(told[name], *_VALUE) for told in by_run if name in told}
        # Methods with a way of learning alone of their own differ in it.
        head.append(f"{TITLES[name]}: {found.pop() if len(found) == 1 else 'by method'}")
    rows = [
        [run.label, *(_cell(told.get(name)) for name in names)]
        for run, told in zip(runs, by_run, strict=True)
    ]
    note = element("p", "Each reference with its test metric; t, and clients worse off.")
    return join(note, table(head, rows, class_="cards"))


def _cell(told: Mapping[str, Any] | None) -> str:
    return _DASH if told is None else f"{_number(told, 't')}; {_worse(told)}"


def _drawn(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Choose the runs to draw: those with a budget first, and no more than a few."""
    compared = [run for run in runs if _against(run) is not None]
    return sorted(compared, key=lambda run: not run.private)[:_DRAWN]


def _row(told: Mapping[str, Any]) -> list[str]:
    return [
        TITLES.get(told["name"], str(told["name"])),
        _plus_minus(told, *_VALUE),
        _plus_minus(told, "difference", "difference_standard_error"),
        _number(told, "t"),
        _worse(told),
    ]


def _worse(told: Mapping[str, Any]) -> str:
    share = told.get("share_worse_off")
    return _DASH if share is None else percent(float(share))


def _number(told: Mapping[str, Any], key: str) -> str:
    return _DASH if told.get(key) is None else short(float(told[key]))


def _plus_minus(told: Mapping[str, Any], key: str, error: str) -> str:
    value, away = _number(told, key), _number(told, error)
    return value if _DASH in (value, away) else f"{value} \u00b1 {away}"


def _notes(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Say what the references are, why some are missing, and how to read the table."""
    names = dict.fromkeys(str(told["name"]) for run in runs for told in run.references)
    for name in names:
        if name in LABELS:
            yield f"{TITLES[name]}: {LABELS[name]}."
    missing = (str(why) for run in runs for why in run.result.get("references_missing") or ())
    yield from (f"{why}." for why in dict.fromkeys(missing))
    yield _READ


def _against(run: FinishedRun) -> tuple[str, Array] | None:
    """Give what clients lose by joining, sorted: against `local*`, or else `local`."""
    for name, column in (("local_star", "error_local_star"), ("local", "error_alone")):
        if column in run.metrics:
            apart = run.column("error") - run.column(column)
            known = np.sort(apart[np.isfinite(apart) & (run.column("test_rows") > 0)])
            return (TITLES[name], known) if len(known) else None
    return None


def _charts(runs: Sequence[FinishedRun]) -> Html:
    """Draw each run's clients from the most gained to the most lost, and give quantiles."""
    drawn, told = [], []
    for number, run in enumerate(runs):
        found = _against(run)
        assert found is not None
        title, apart = found
        if charts.can_draw():
            drawn.append(_draw(f"beside{number}", run.label, title, apart))
        rows = [[name, short(float(np.quantile(apart, at)))] for name, at in _LEVELS.items()]
        head = ["clients, sorted", f"own error less that of {title}"]
        told.append(join(element("p", run.label, class_="label"), table(head, rows)))
    if not told:
        return Html("")
    return join(element("div", *drawn, class_="charts"), numbers(*told))


def _draw(key: str, label: str, title: str, apart: Array) -> Html:
    bound = axis_bound(apart)
    shown = np.clip(apart[thin(len(apart), _POINTS)], -bound, bound)
    edges = np.linspace(0, 100, len(shown) + 1)
    low, high = 1.05 * min(float(shown.min()), 0.0), 1.05 * max(float(shown.max()), 0.0)
    mean = float(np.mean(apart))

    def paint(axes: "Axes") -> None:
        axes.stairs(np.minimum(shown, 0), edges, fill=True, color=GAIN)
        axes.stairs(np.maximum(shown, 0), edges, fill=True, color=LOSS)
        axes.axhline(0, color=INK, linewidth=0.8)
        if math.isfinite(mean) and low <= mean <= high:
            axes.axhline(mean, color=INK, linewidth=0.8, linestyle="--", label="mean")
            axes.figure.legend(loc="outside lower right")
        axes.set(xlim=(0, 100), ylim=(low, high) if low < high else (-1, 1))
        axes.set(xlabel="% of clients, sorted", ylabel=f"error joined - {title}")

    return charts.draw(key, f"{label}: what clients gain (below 0) or lose against {title}", paint)
