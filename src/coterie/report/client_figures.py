"""Figures of clients one by one: what each of them gains by joining, with its name on hover."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.report.charts import GAIN, INK, LOSS, SHARED, SOFT, Figure, Row, figure
from coterie.report.elements import axis_bound
from coterie.report.marks import altair, axis_of, hue_of, on, scale_of, sized, told, x_of, y_of

_WAYS = {"gains": GAIN, "loses": LOSS, "no difference": SOFT}
_MODELS = {"alone": LOSS, "shared": SHARED, "joined": GAIN}


def told_of(rows: Sequence[Row], than: str = "alone") -> list[Any]:
    """Say what a hover tells of a client; of the shared model only where there is one."""
    fields = [("client", "client", ""), ("train_rows", "train rows", "d"),
              ("test_rows", "test rows", "d"), ("alone", f"error {than}", ".4g")]  # fmt: skip
    if any(row.get("shared") is not None for row in rows):
        fields.append(("shared", "error of the shared model", ".4g"))
    return told(*fields, ("joined", "error joined", ".4g"), ("gain", "gain", ".3g"))


def gains(name: str, title: str, rows: Sequence[Row], *, than: str = "alone") -> Figure:
    """Show what every client gains, from the largest loss to the largest gain.

    Args:
        name: Of the figure.
        title: Above it.
        rows: Clients in that order: `gain`, and what `told_of` tells.
        than: What joining stands beside.
    """
    alt = altair()
    found = np.array([row["gain"] for row in rows])
    bound = axis_bound(found)
    step = 100 / len(rows)
    shown = [
        {**row, "from": step * place, "to": step * (place + 1),
         "shown": float(np.clip(row["gain"], -bound, bound)), "way": way(row["gain"])}
        for place, row in enumerate(rows)
    ]  # fmt: skip
    x = x_of("from", "% of clients, sorted", scale=alt.Scale(domain=[0, 100], nice=False))
    up = f"error {than} \u2212 joined"
    y = y_of("shown", up)
    colour = hue_of(list(_WAYS), list(_WAYS.values()), "way").legend(None)
    bars = on().mark_rect(strokeWidth=0).encode(x=x, x2="to", y=y, color=colour)
    bars = bars.encode(y2=alt.Y2(datum=0))
    # A small gain has a small mark: the whole height of a client answers to a hover.
    whole = on().mark_rect(opacity=0).encode(x=x, x2="to", tooltip=told_of(rows, than))
    zero = on("zero").mark_rule(color=INK, strokeWidth=1).encode(y=y_of("y", up))
    chart = alt.layer(bars, zero, whole)
    return figure(name, title, sized(chart), {"rows": shown, "zero": [{"y": 0}]})


def against_alone(name: str, title: str, rows: Sequence[Row]) -> Figure:
    """Show error joined against error alone, a point a client."""
    alt = altair()
    ends = [float(row[key]) for row in rows for key in ("alone", "joined")]
    low, high = min(ends), max(ends)
    scale = scale_of(ends)
    form = axis_of(ends, grid=True)
    shown = [{**row, "way": way(row["gain"])} for row in rows]
    x = x_of("alone", "error alone", scale=scale, axis=form)
    y = y_of("joined", "error joined", scale=scale, axis=form)
    points = on().mark_point(size=34, opacity=0.65, strokeWidth=0).encode(x=x, y=y)
    points = points.encode(color=hue_of(list(_WAYS), list(_WAYS.values()), "way").legend(None))
    line = on("line").mark_line(color=INK, strokeWidth=1).encode(x=x, y=y)
    chart = alt.layer(line, points.encode(tooltip=told_of(rows)))
    drawn = [{"alone": low, "joined": low}, {"alone": high, "joined": high}]
    return figure(name, title, sized(chart), {"rows": shown, "line": drawn})


def models(name: str, title: str, rows: Sequence[Row]) -> Figure:
    """Show each client's error alone, of the shared model and joined, one above the other."""
    alt = altair()
    names = [one for one in _MODELS if any(_is_number(row.get(one)) for row in rows)]
    step = 100 / len(rows)
    placed = [{**row, "place": step * (i + 0.5)} for i, row in enumerate(rows)]
    found = [float(row[one]) for row in rows for one in names if _is_number(row.get(one))]
    scale = scale_of(found)
    along = "% of clients, from most lost to most gained"
    x = x_of("place", along, scale=alt.Scale(domain=[0, 100]))
    up = "a client\u2019s own error"
    y = y_of("error", up, scale=scale, axis=axis_of(found))
    legend = alt.Legend(symbolType="circle", symbolStrokeWidth=0)
    colour = hue_of(names, [_MODELS[one] for one in names]).legend(legend)
    links = on().mark_rule(strokeWidth=1.2, opacity=0.55, color=SOFT)
    links = links.encode(x=x, y=y_of("alone", up, scale=scale), y2="joined")
    points = on().transform_fold(names, as_=["kind", "error"])
    points = points.mark_point(size=38, opacity=0.9, strokeWidth=0).encode(x=x, y=y, color=colour)
    chart = alt.layer(links, points.encode(tooltip=told_of(rows)))
    return figure(name, title, sized(chart, 300), {"rows": placed})


def _is_number(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def way(gain: float) -> str:
    """Say which way joining went for a client."""
    return "gains" if gain > 0 else "loses" if gain < 0 else "no difference"
