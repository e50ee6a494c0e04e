"""Does joining help me? A section of a report: each client alone, by the shared model, and joined.

Errors are of clients' own test rows, and private as these are.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.report import client_figures
from coterie.report.charts import Row
from coterie.report.elements import (
    Array,
    Html,
    axis_bound,
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

_LISTED, _POINTS, _PAIRED = 1800, 1200, 150
"""Clients named and points drawn on the whole page, shared by its runs; keeps it small."""
_ERRORS = {"nmse": "mean squared error", "accuracy": "share of test rows wrong"}
_AVERAGE = (
    "The promise is an average over clients, not one per client: joining may cost some clients, "
    "and no method here promises a given client that it gains."
)
_LEVELS = {"most lost": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
_LEVELS |= {"90 %": 0.9, "most gained": 1.0}
_NAME = 60
"""Characters of a client's name on hover; all of them are in the list."""


def show_joining(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """Show, for every run that shares something, what each client has of it.

    Without clients only how many gain and how many lose is told, and nothing is any client's own.
    """
    runs = [run for run in runs if run.is_scored]
    if not runs:
        return Html("")
    parts: list[str] = [
        element("h2", "Does joining help me?", id="joining"),
        element("p", _AVERAGE),
    ]
    sharing = sorted((run for run in runs if run.shares), key=lambda run: not run.private)
    shown = one_by_one(sharing)
    if not sharing:
        parts.append(element("p", "Nobody joins anything here: every client learns alone."))
    if len(shown) < len(sharing):
        told = f"{len(shown)} of {len(sharing)} runs are shown here; `coterie report RUN` shows one"
        parts.append(element("p", f"{told} by itself.", class_="note"))
    for number, run in enumerate(shown):
        parts.append(element("h3", run.label))
        if "error_alone" in run.metrics:
            told, known = _counted(run)
            parts.append(told)
            if clients and known.any():
                parts.append(_each(run, known, f"joining-{number + 1}", len(shown)))
        else:
            parts.append(element("p", "This run did not compare itself with learning alone."))
    return element("section", *parts)


def _counted(run: FinishedRun) -> tuple[Html, NDArray[np.bool_]]:
    """Say how many gain, and which clients have test rows to say it of."""
    rows, joined, alone = (run.column(n) for n in ("test_rows", "error", "error_alone"))
    known = rows > 0
    if not known.any():
        return element("p", "No client has test rows."), known
    total = int(known.sum())
    gain, same = int((joined < alone)[known].sum()), int((joined == alone)[known].sum())
    lose = total - gain - same
    told = (
        f"{gain} of {total} clients gain ({percent(gain / total)}), {lose} lose "
        f"({percent(lose / total)}), {same} see no difference. A client's error is its "
        f"{own_error(run)}; with a median of "
        f"{np.median(rows[known]):.4g} test rows a client, one client's difference is partly luck."
    )
    if total < len(rows):
        told += f" {len(rows) - total} clients have no test rows and are not counted."
    if unknown := total - int(_finite(run, known).sum()):
        told += f" {unknown} have no finite error and are not drawn."
    return join(element("p", told), _shared_words(run, known)), known


def own_error(run: FinishedRun) -> str:
    """Say what a client's own error is: another unit than that of the metric over all rows."""
    return _ERRORS.get(run.result["metric"], "error")


def _finite(run: FinishedRun, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return known & np.isfinite(run.column("error")) & np.isfinite(run.column("error_alone"))


def _each(run: FinishedRun, known: NDArray[np.bool_], key: str, sharing: int) -> Html:
    """Draw and list clients one by one."""
    finite = _finite(run, known)
    parts = [_drawn(run, np.flatnonzero(finite), key, sharing)] if finite.any() else []
    parts.append(_listing(run, np.flatnonzero(known), key, max(40, _LISTED // sharing)))
    return join(*parts)


def _shared_words(run: FinishedRun, known: NDArray[np.bool_]) -> Html:
    """Say for whom the model that all share would be as good as a model of their own."""
    if "error_shared" not in run.metrics:
        return Html("")
    shared, joined = run.column("error_shared"), run.column("error")
    better = float((joined < shared)[known].mean())
    told = (
        f"For {percent(better)} of clients their own model is better than the shared model taken "
        "as it is: that is what a model of one's own is for."
    )
    return element("p", told)


def client_rows(run: FinishedRun, order: NDArray[np.int64]) -> list[Row]:
    """Return what is drawn and told of clients: who, rows, errors and the gain."""
    joined, alone = run.column("error"), run.column("error_alone")
    shared = run.column("error_shared") if "error_shared" in run.metrics else None
    return [
        {
            "client": _cut(str(run.metrics["client"][i])),
            "train_rows": run.metrics["train_rows"][i],
            "test_rows": run.metrics["test_rows"][i],
            "alone": alone[i],
            **({} if shared is None else {"shared": shared[i]}),
            "joined": joined[i],
            "gain": alone[i] - joined[i],
        }
        for i in order.tolist()
    ]


def _drawn(run: FinishedRun, known: NDArray[np.int64], key: str, sharing: int) -> Html:
    """Show how gains spread over clients: charts, and quantiles."""
    differences = (run.column("error_alone") - run.column("error"))[known]
    order = known[np.argsort(differences, kind="stable")]
    rows = [[told, short(float(np.quantile(differences, at)))] for told, at in _LEVELS.items()]
    quantiles = table(["clients, sorted", "error alone - joined"], rows)
    if not can_draw():
        return numbers(quantiles)
    points = max(60, min(_POINTS // sharing, 500))
    clients = client_rows(run, order[thin(len(order), points)])
    pairs = client_rows(run, order[thin(len(order), min(points, _PAIRED))])
    above = "What each client gains (above 0) or loses"
    below = "Alone against joined: below the line is a gain"
    each = "Each client's error alone, by the shared model and joined"
    each = each if "error_shared" in run.metrics else "Each client's error alone and joined"
    charts = side_by_side(
        client_figures.gains(f"{key}-gain", above, clients).show(),
        client_figures.against_alone(f"{key}-alone", below, clients).show(),
    )
    wide = side_by_side(client_figures.models(f"{key}-models", each, pairs).show(), wide=True)
    told = _left_out(differences, points)
    note = [element("p", told, class_="note")] if told else []
    return join(charts, wide, *note, numbers(quantiles))


def _left_out(differences: Array, points: int) -> str:
    """Say what the charts do not show."""
    beyond = int((np.abs(differences) > axis_bound(differences)).sum())
    told = f"{beyond} clients lie beyond the left chart's axis. " if beyond else ""
    if len(differences) > points:
        told += f"{points} of {len(differences)} clients are drawn, evenly from the sorted. "
    if len(differences) > min(points, _PAIRED):
        told += f"The last chart has {min(points, _PAIRED)} of them."
    return told.strip()


def _listing(run: FinishedRun, known: NDArray[np.int64], key: str, listed: int) -> Html:
    """List clients from the most lost to the most gained; of many, only both ends."""
    joined, alone = run.column("error"), run.column("error_alone")
    with np.errstate(invalid="ignore"):
        gain = alone - joined
        order = known[np.argsort(np.nan_to_num(gain[known], nan=-math.inf), kind="stable")]
    title = "Find a client: all of them, from most lost to most gained"
    if len(order) > listed:
        half = listed // 2
        order = np.concatenate([order[:half], order[-half:]])
        title = f"The {half} clients that lose most and the {half} that gain most"
    columns = [("train rows", "train_rows"), ("test rows", "test_rows")]
    errors = {"error alone": alone}
    if "error_shared" in run.metrics:
        errors["error of the shared model"] = run.column("error_shared")
    errors |= {"error joined": joined, "gain": gain}
    rows = [
        [
            str(run.metrics["client"][i]),
            *(str(run.metrics[name][i]) for _, name in columns),
            *(short(float(found[i])) for found in errors.values()),
        ]
        for i in order.tolist()
    ]
    head = ["client", *(name for name, _ in columns), *errors]
    return element(
        "details",
        element("summary", f"{title} (all are in metrics.parquet)"),
        _filter_box(key),
        element("div", table(head, rows), class_="list", id=f"{key}-list"),
    )


def _filter_box(key: str) -> Html:
    """Return a box that narrows the list to names with what is typed in it."""
    list_id = f"{key}-list"
    told = {"type": "search", "placeholder": "type a client's name", "class_": "filter"}
    box = element("input", aria_label="filter clients by name", data_of=list_id, **told)
    count = element("span", class_="note", id=f"{list_id}-count", role="status")
    return element("p", box, " ", count)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}\u2026"
