"""What stands beside runs: a section of a report, with whom joining paid for and whom it did not.

Learning alone and what could be had without privacy, on the same test rows and client by client;
see `coterie.references`. Nothing of it is covered by epsilon.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.references import LABELS, PROMISE, TITLES, verdicts
from coterie.report import client_figures
from coterie.report.elements import (
    DASH,
    Html,
    can_draw,
    element,
    join,
    numbers,
    percent,
    short,
    side_by_side,
    table,
    thin,
)
from coterie.report.finished import FinishedRun
from coterie.report.groups import one_by_one
from coterie.report.joining import own_error

_VALUE = ("value", "standard_error")
_POINTS = 400
_DRAWN = 4
"""Runs whose clients are drawn on a page: a chart each."""
_READ = (
    "Own {error} less the reference's: the mean over clients of their own {error} on test rows "
    "under the run less that under the reference, with its standard error over clients; below 0 "
    "the run is better. It has another unit than the {metric}. t is the one over the other. Not "
    "covered by epsilon."
)
_LEVELS = {"most gained": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
_LEVELS |= {"90 %": 0.9, "most lost": 1.0}


def show_references(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """Show what stands beside runs that share something; nothing where nothing does.

    Without clients there are no charts and quantiles of them.
    """
    shown = {run.label: run for run in one_by_one(runs) if run.shares and run.references}
    if not shown:
        return Html("")
    parts: list[str] = [element("h2", "Beside learning alone, and without privacy", id="beside")]
    said = verdicts({label: run.references for label, run in shown.items()})
    # What the promise is stands above, where clients are asked whether to join.
    parts += [element("p", told) for told in said if told != PROMISE]
    several = list(shown.values())
    parts.append(_one(several[0]) if len(several) == 1 else _together(several))
    parts += [element("p", told, class_="note") for told in _notes(several)]
    if clients:
        parts.append(_charts(_drawn(several)))
    return element("section", *parts)


def _one(run: FinishedRun) -> Html:
    apart = f"own {own_error(run)} less the reference's"
    head = ["reference", run.scored, apart, "t", "clients worse off"]
    return table(head, [_row(told) for told in run.references], class_="cards")


def _together(runs: Sequence[FinishedRun]) -> Html:
    """Return each reference once, with its value, and how every run compares with it."""
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
    return DASH if told is None else f"{_number(told, 't')}; {_worse(told)}"


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
    return DASH if share is None else percent(float(share))


def _number(told: Mapping[str, Any], key: str) -> str:
    return DASH if told.get(key) is None else short(float(told[key]))


def _plus_minus(told: Mapping[str, Any], key: str, error: str) -> str:
    value, away = _number(told, key), _number(told, error)
    return value if DASH in (value, away) else f"{value} \u00b1 {away}"


def _notes(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Say what the references are, why some are missing, and how to read the table."""
    names = dict.fromkeys(str(told["name"]) for run in runs for told in run.references)
    for name in names:
        if name in LABELS:
            yield f"{TITLES[name]}: {LABELS[name]}."
    missing = (str(why) for run in runs for why in run.result.get("references_missing") or ())
    yield from (f"{why}." for why in dict.fromkeys(missing))
    for metric, error in dict.fromkeys((r.result["metric"], own_error(r)) for r in runs):
        yield _READ.format(error=error, metric=metric)


def _against(run: FinishedRun) -> tuple[str, str] | None:
    """Choose what clients' gains are shown against, and its column: `local*`, or else `local`."""
    for name, column in (("local_star", "error_local_star"), ("local", "error_alone")):
        if column in run.metrics:
            return (TITLES[name], column) if len(_known(run, column)) else None
    return None


def _known(run: FinishedRun, column: str) -> NDArray[np.int64]:
    """Return the clients of whom both errors are known, from the most lost to the most gained."""
    apart = run.column(column) - run.column("error")
    known = np.flatnonzero(np.isfinite(apart) & (run.column("test_rows") > 0))
    return known[np.argsort(apart[known], kind="stable")]


def _charts(runs: Sequence[FinishedRun]) -> Html:
    """Draw each run's clients from the most lost to the most gained, and give quantiles."""
    drawn, told = [], []
    for number, run in enumerate(runs):
        found = _against(run)
        assert found is not None
        title, column = found
        order = _known(run, column)
        if can_draw():
            drawn.append(_draw(f"beside-{number + 1}", run, title, column))
        apart = (run.column("error") - run.column(column))[order]
        rows = [[name, short(float(np.quantile(apart, at)))] for name, at in _LEVELS.items()]
        head = ["clients, sorted", f"own {own_error(run)} less that of {title}"]
        told.append(join(element("p", run.label, class_="label"), table(head, rows)))
    return join(side_by_side(*drawn), numbers(*told)) if told else Html("")


def _draw(name: str, run: FinishedRun, title: str, column: str) -> Html:
    order = _known(run, column)
    order = order[thin(len(order), _POINTS)]
    beside, own = run.column(column), run.column("error")
    rows = [
        {
            "client": str(run.metrics["client"][i])[:60],
            "train_rows": run.metrics["train_rows"][i],
            "test_rows": run.metrics["test_rows"][i],
            "alone": beside[i],
            "joined": own[i],
            "gain": beside[i] - own[i],
        }
        for i in order.tolist()
    ]
    said = f"{run.label}: what clients gain (above 0) or lose against {title}"
    return client_figures.gains(name, said, rows, than=title).show()
