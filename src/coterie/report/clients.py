"""How clients fare one by one: a section of a report, for those of the training and newcomers.

A mean hides who pays for it: the worst tenth of clients, those whose models are surer than they are
right, and those who were never trained with. Nothing of it is covered by epsilon.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.report import figures
from coterie.report.elements import (
    DASH,
    Array,
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
from coterie.report.marks import Curve
from coterie.spread import Spread, spread_of

_POINTS = 1500
"""Points drawn in the chart of clients, shared by its lines."""
_OWN = {
    "accuracy": "accuracy (larger is better)",
    "error": "mean squared error (smaller is better)",
}
_SPREAD, _WORST = ("mean", "weighted_mean", "tail"), ("worst",)
"""What is told of a spread; the worst is one client's own."""
_TAILS = {"accuracy": "10th percentile", "error": "90th percentile"}
_ALONE = (
    "In brackets: the same of learning alone. Clients count the same, save in the mean by rows."
)
_CALIBRATION = (
    "Calibration error: how far the models' confidence is from how often they are right, over 15 "
    "bins of confidence and all test rows together; a client's own is of those with 20 test rows "
    "or more, and of few rows it is large by luck."
)
_NEWCOMERS = (
    "Newcomers were held out of training by a public seed. They take the shared model and fit "
    "their own part to their own rows: they post nothing, so nobody learns anything of them, and "
    "the guarantee is of the clients that were trained with."
)


def show_spread(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """Show how clients of all runs fare; nothing where no client has test rows.

    Without clients neither the worst of them is told nor any of them drawn.
    """
    runs = [run for run in one_by_one(runs) if run.is_scored]
    parts: list[str] = []
    for of in _OWN:
        alike = [run for run in runs if _spread(run).of == of and not math.isnan(_spread(run).mean)]
        if alike:
            parts += _of_kind(of, alike, clients=clients)
    if not parts:
        return Html("")
    joined = [run for run in runs if run.result.get("newcomers")]
    parts += _newcomers(joined, clients=clients)
    title = "How clients fare, one by one" if clients else "How clients fare"
    return element("section", element("h2", title, id="clients"), *parts)


def _spread(run: FinishedRun, error: str = "error", *, newcomers: bool = False) -> Spread:
    errors, rows = (run.column(name, newcomers=newcomers) for name in (error, "test_rows"))
    return spread_of(run.result["metric"], errors, rows)


def _of_kind(of: str, runs: Sequence[FinishedRun], *, clients: bool) -> Iterator[Html]:
    """Show runs whose clients are measured alike: a table and charts."""
    calibrated = [run for run in runs if run.result.get("calibration_error") is not None]
    kept = [*_SPREAD, *(_WORST if clients else ())]
    head = ["method", "mean over clients", "mean by rows", _TAILS[of], *_WORST][: 1 + len(kept)]
    head += ["calibration error", "a client's own, mean"] if calibrated else []
    yield element("p", f"Each client's own {_OWN[of]}.", class_="label")
    rows = [_row(run, kept, calibrated=bool(calibrated)) for run in runs]
    yield table(head, rows, class_="cards")
    left = {run.label: _spread(run).left_out for run in runs}
    told = [_ALONE, *([_CALIBRATION] if calibrated else [])]
    if any(left.values()):
        told.append(f"{max(left.values())} clients without test rows are left out.")
    yield element("p", " ".join(told), class_="note")
    curves = list(_curves(calibrated))
    if can_draw():
        drawn = [_sorted(of, runs)] if clients and any(run.shares for run in runs) else []
        if curves:
            title = "How often answers are right, by confidence: below the line is too sure"
            drawn.append(figures.reliability("reliability", title, curves).show())
        yield side_by_side(*drawn)
    if curves:
        head = ["confidence, mean of a bin", "share right"]
        told = [
            join(element("p", name, class_="label"), table(head, _pairs(x, y)))
            for name, x, y in curves
        ]
        yield numbers(*told)


def _pairs(x: Array, y: Array) -> list[list[str]]:
    return [[short(sure), short(right)] for sure, right in zip(x, y, strict=True)]


def _row(run: FinishedRun, names: Sequence[str], *, calibrated: bool) -> list[str]:
    own = _spread(run)
    alone = _spread(run, "error_alone") if "error_alone" in run.metrics else None
    cells = [
        short(getattr(own, name)) + ("" if alone is None else f" ({short(getattr(alone, name))})")
        for name in names
    ]
    keys = ("calibration_error", "client_calibration_error") if calibrated else ()
    return [run.label, *cells, *(_beside(run.result, key) for key in keys)]


def _beside(told: Mapping[str, Any], key: str) -> str:
    own, alone = told.get(key), told.get(f"local_{key}")
    if own is None:
        return DASH
    return short(float(own)) + ("" if alone is None else f" ({short(float(alone))})")


def _sorted(of: str, runs: Sequence[FinishedRun]) -> Html:
    """Draw every client's own score, from the worst to the best."""
    lines: list[tuple[str, Array]] = []
    for run in runs:
        lines.append((run.label, run.column("error")))
        if run.newcomers:
            lines.append((f"{run.label}, newcomers", run.column("error", newcomers=True)))
    sharing = [run for run in runs if run.shares and "error_alone" in run.metrics]
    if sharing and all(run.shares for run in runs):
        lines.append(("alone", sharing[0].column("error_alone")))
    drawn = []
    for name, errors in lines:
        known = np.sort(errors[np.isfinite(errors)])[::-1]
        if len(known):
            kept = thin(len(known), max(60, _POINTS // len(lines)))
            places = 100 * (np.arange(len(known)) + 0.5) / len(known)
            shown = known if of == "error" else 1 - known
            drawn.append((name, places[kept], shown[kept]))
    if not drawn:
        return Html("")
    title = f"Each client's own {_OWN[of]}, from worst to best"
    made = figures.lines(
        f"clients-{of}", title, drawn, along="% of clients", up=f"own {of}", points=_POINTS
    )
    return made.show()


def _curves(runs: Sequence[FinishedRun]) -> Iterator[Curve]:
    """Return the reliability of every run, and of learning alone beside them."""
    told = [(run.label, run.result.get("reliability")) for run in runs]
    if all(run.shares for run in runs):
        told += [("alone", run.result.get("local_reliability")) for run in runs[:1]]
    for name, bins in told:
        if not bins:
            continue
        x, y = (np.array(bins[key], dtype=np.float64) for key in ("confidence", "right"))
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            yield name, x[known], y[known]


def _newcomers(runs: Sequence[FinishedRun], *, clients: bool) -> Iterator[Html]:
    """Say how clients fare who joined after training."""
    if not runs:
        return
    yield element("h3", "Newcomers")
    yield element("p", _NEWCOMERS)
    head = ["method", "newcomers", "test metric", "alone", "better off than alone"]
    worst = _WORST if clients else ()
    head += ["mean over newcomers", "worst tenth begins at", *worst, "clients of the training"]
    yield table(head, [_newcomer_row(run, worst) for run in runs], class_="cards")


def _newcomer_row(run: FinishedRun, worst: Sequence[str]) -> list[str]:
    told = run.result["newcomers"]
    share, alone = told.get("share_better_than_local"), told.get("local_value")
    of = "accuracy" if told["metric"] == "accuracy" else "error"
    tail = "p10" if of == "accuracy" else "p90"
    cells = (_beside(told, f"client_{of}_{key}") for key in ("mean", tail, *worst))
    return [
        run.label,
        str(told["clients"]),
        f"{_beside({'value': told['value']}, 'value')} {told['metric']}",
        DASH if alone is None else short(float(alone)),
        DASH if share is None else percent(float(share)),
        *cells,
        short(run.number("value")),
    ]
