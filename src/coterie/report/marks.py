"""What figures are made of: axes, colours, dashes and hovers of Altair, in few words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from coterie.report.charts import HUES, Row
from coterie.report.elements import Array, thin

POINTS = 200
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
Curve = tuple[str, Array, Array]


def altair() -> Any:
    """Return Altair, which is an extra and is loaded when it is needed."""
    import altair as found

    return found


def on(rows: str = "rows") -> Any:
    """Begin a chart of the rows of this name."""
    alt = altair()
    return alt.Chart(alt.NamedData(rows))


def sized(chart: Any, height: float = 250) -> Any:
    """Make a chart as wide as its place on the page."""
    return chart.properties(width="container", height=height)


def told(*fields: tuple[str, str, str]) -> list[Any]:
    """Say what a hover shows: fields, their names and formats ("" for texts)."""
    alt = altair()
    return [
        alt.Tooltip(field=field, type="quantitative", title=title, format=form)
        if form
        else alt.Tooltip(field=field, type="nominal", title=title)
        for field, title, form in fields
    ]


def x_of(field: str, title: str | None, **settings: Any) -> Any:
    """Lay a number along the chart."""
    return altair().X(field=field, type="quantitative", title=title, **settings)


def y_of(field: str, title: str | None, **settings: Any) -> Any:
    """Lay a number up the chart."""
    return altair().Y(field=field, type="quantitative", title=title, **settings)


def hue_of(names: Sequence[str], hues: Sequence[str], field: str = "kind") -> Any:
    """Tell kinds apart by colour; a single one needs no legend."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=list(hues))
    legend = None if len(names) < 2 else alt.Undefined
    return alt.Color(field=field, type="nominal", title=None, scale=scale, legend=legend)


def dash_of(names: Sequence[str], dashes: Sequence[Sequence[int]], field: str = "kind") -> Any:
    """Tell kinds apart by their dashes."""
    alt = altair()
    scale = alt.Scale(domain=list(names), range=[list(dash) for dash in dashes])
    legend = None if len(names) < 2 else alt.Undefined
    return alt.StrokeDash(field=field, type="nominal", title=None, scale=scale, legend=legend)


def rows_of(curves: Iterable[Curve], points: int = POINTS) -> list[Row]:
    """Return curves as rows, thinned, without what is not finite."""
    found = []
    for name, x, y in curves:
        known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        kept = known[thin(len(known), points)] if len(known) else known
        found += [{"kind": name, "x": float(x[i]), "y": float(y[i])} for i in kept]
    return found


def spans_much(values: Sequence[float]) -> bool:
    """Return whether values are better told apart on a scale of factors."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) / min(known) > 30


def scale_of(values: Sequence[float]) -> Any:
    """Choose a scale: of factors where values span much; neither begins at 0 by force."""
    alt = altair()
    return alt.Scale(type="log", nice=False) if spans_much(values) else alt.Scale(zero=False)


def axis_of(values: Sequence[float], **settings: Any) -> Any:
    """Label an axis of `scale_of` with few round numbers."""
    alt = altair()
    if not spans_much(values):
        return alt.Axis(format="~g", tickCount=6, **settings)
    known = [value for value in values if math.isfinite(value)]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps = (1, 2, 5) if high - low <= 3 else (1,) if high - low <= 10 else ()
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    if not ticks:  # so many powers of ten that a few of them do
        ticks = [float(f"1e{power}") for power in range(low, high + 1, (high - low) // 8)]
    return alt.Axis(format="~g", values=ticks, labelOverlap=True, **settings)


def hover(marks: Any) -> Any:
    """Make the marks that answer to a hover: large, and not seen."""
    return marks.mark_point(size=140, opacity=0, filled=True)


def looks(names: Sequence[str]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return every name once, a colour, and dashes where colours come round again."""
    once = list(dict.fromkeys(names))
    dashes = [_DASHES[i // len(HUES) % len(_DASHES)] for i in range(len(once))]
    return once, [HUES[i % len(HUES)] for i in range(len(once))], dashes
