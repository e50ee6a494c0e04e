"""Figures on plain arrays: what is drawn, with a word on hover for every mark."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.report.charts import GAIN, HUES, INK, LOSS, SHARED, SOFT, Figure, Row, figure
from coterie.report.elements import Array
from coterie.report.marks import (
    POINTS,
    Curve,
    altair,
    axis_of,
    dash_of,
    hover,
    hue_of,
    looks,
    on,
    rows_of,
    scale_of,
    sized,
    told,
    x_of,
    y_of,
)


def trade_off(
    name: str,
    title: str,
    *,
    alarms: Array,
    misses: Array,
    marks: Array,
    approximation: Array | None = None,
) -> Figure:
    """Show the least misses by false alarms, and guessing, 1 - alpha.

    Args:
        name: Of the figure.
        title: Above it.
        alarms: Type I errors, ascending.
        misses: The least type II errors at these; no attack gets below.
        marks: Points of the curve to point out, (n, 2).
        approximation: An approximation of the curve at the same alarms, which bounds nothing.
    """
    best, rough, guess = "best possible attack", "approximation, not a bound", "guessing"
    curves = [(best, alarms, misses)]
    curves += [] if approximation is None else [(rough, alarms, approximation)]
    curves.append((guess, np.array([0.0, 1.0]), np.array([1.0, 0.0])))
    look = {best: (GAIN, (1, 0)), rough: (LOSS, (6, 3)), guess: (SOFT, (2, 3))}
    names = [curve[0] for curve in curves]
    hues, dashes = zip(*(look[one] for one in names), strict=True)
    rows = rows_of(curves)
    pointed = [{"kind": best, "x": x, "y": y, "caught": 1 - y} for x, y in marks.tolist()]
    x = x_of(
        "x", "false positives", scale=altair().Scale(domain=[0, 1]), axis=altair().Axis(format="%")
    )
    y = y_of("y", "clients missed, f", scale=altair().Scale(domain=[0, 1]))
    y = y.axis(format="%")
    words = told(("kind", "curve", ""), ("x", "false positives", ".1%"), ("y", "missed", ".1%"))
    caught = told(("x", "false positives", ".0%"), ("caught", "true positives, at most", ".1%"))
    base = on().encode(x=x, y=y)
    only = altair().FieldEqualPredicate(field="kind", equal=best)
    reach = on().transform_filter(only).mark_area(color=GAIN, opacity=0.12).encode(x=x, y=y)
    lines = base.mark_line().encode(color=hue_of(names, hues), strokeDash=dash_of(names, dashes))
    points = on("marks").mark_point(size=70, color=GAIN, opacity=1).encode(x=x, y=y, tooltip=caught)
    word = on("word").mark_text(align="left", color=GAIN).encode(x=x, y=y, text="said:N")
    chart = altair().layer(reach, lines, word, hover(base).encode(tooltip=words), points)
    said = [{"x": 0.03, "y": 0.06, "said": "out of reach"}]
    return figure(name, title, sized(chart), {"rows": rows, "marks": pointed, "word": said})


def spending(name: str, title: str, *, rounds: Sequence[int], epsilons: Sequence[float]) -> Figure:
    """Show epsilon against the rounds done."""
    rows = [{"x": 0, "y": 0.0}, *({"x": r, "y": e} for r, e in zip(rounds, epsilons, strict=True))]
    words = told(("x", "rounds done", "d"), ("y", "epsilon spent", ".4g"))
    x = x_of("x", "rounds done", scale=altair().Scale(nice=False), axis=_whole())
    base = on().encode(x=x, y=y_of("y", "epsilon"), tooltip=words)
    area = base.mark_area(color=GAIN, opacity=0.12)
    chart = altair().layer(area, base.mark_line(color=GAIN), base.mark_point(color=GAIN, opacity=1))
    return figure(name, title, sized(chart), {"rows": rows})


def _whole() -> Any:
    """Label an axis with whole numbers."""
    return altair().Axis(tickMinStep=1, format="d")


def loss_and_epsilon(
    name: str,
    title: str,
    *,
    curves: Mapping[str, tuple[Array, Array]],
    spent: tuple[Sequence[int], Sequence[float]],
    metric: str = "loss",
) -> Figure:
    """Show a metric of every round, and what was spent by then.

    Args:
        name: Of the figure.
        title: Above it.
        curves: By name (training loss, test loss, ...): rounds, and the metric after each.
        spent: Rounds, and epsilon after each of them; infinite ones are not drawn.
        metric: What the left axis is called. It is not covered by epsilon.
    """
    known = [(r, e) for r, e in zip(*spent, strict=True) if math.isfinite(e)]
    names = [*curves, *(["epsilon"] if known else [])]
    hues = [*HUES[: len(curves)], SOFT] if len(curves) < len(HUES) else [HUES[0]] * len(names)
    dashes = [*([(1, 0)] * len(curves)), (2, 3)]
    rows = rows_of([(one, *curve) for one, curve in curves.items()])
    x = x_of("x", "rounds done", scale=altair().Scale(nice=False), axis=_whole())
    colour = hue_of(names, hues[: len(names)])
    dash = dash_of(names, dashes[: len(names)])
    left = on().encode(
        x=x, y=y_of("y", f"{metric} (not private)", scale=altair().Scale(zero=False))
    )
    words = told(("kind", "curve", ""), ("x", "rounds done", "d"), ("y", metric, ".4g"))
    lines = left.mark_line().encode(color=colour, strokeDash=dash)
    parts = [altair().layer(lines, hover(left).encode(tooltip=words))]
    steps = [{"kind": "epsilon", "x": r, "y": e} for r, e in [(0, 0.0), *known]] if known else []
    if steps:
        right = on("spent").encode(
            x=x, y=y_of("y", "epsilon spent", axis=altair().Axis(grid=False))
        )
        words = told(("x", "rounds done", "d"), ("y", "epsilon spent", ".4g"))
        drawn = right.mark_line().encode(color=colour, strokeDash=dash)
        parts.append(altair().layer(drawn, hover(right).encode(tooltip=words)))
    chart = altair().layer(*parts).resolve_scale(y="independent")
    return figure(name, title, sized(chart), {"rows": rows, "spent": steps})


def reliability(name: str, title: str, curves: Sequence[Curve]) -> Figure:
    """Show how often answers are right by how sure the models are of them.

    Args:
        name: Of the figure.
        title: Above it.
        curves: Names, mean confidences and shares right of the bins that are not empty.
    """
    names, hues, dashes = looks([curve[0] for curve in curves])
    scale, form = altair().Scale(domain=[0, 1]), altair().Axis(format="%")
    x, y = x_of("x", "confidence", scale=scale, axis=form), y_of("y", "share right", scale=scale)
    base = on().encode(x=x, y=y.axis(format="%"), color=hue_of(names, hues))
    words = told(("kind", "run", ""), ("x", "confidence", ".1%"), ("y", "share right", ".1%"))
    just = on("just").mark_line(color=SOFT, strokeDash=[2, 3], strokeWidth=1.2).encode(x=x, y=y)
    lines = base.mark_line().encode(strokeDash=dash_of(names, dashes))
    chart = altair().layer(just, lines, base.mark_point(opacity=1).encode(tooltip=words))
    ends = [{"x": 0, "y": 0}, {"x": 1, "y": 1}]
    return figure(name, title, sized(chart), {"rows": rows_of(curves), "just": ends})


def lines(
    name: str,
    title: str,
    curves: Sequence[Curve],
    *,
    along: str,
    up: str,
    points: int = POINTS,
    height: float = 250,
) -> Figure:
    """Show one line a run; values that span much are drawn on a scale of factors."""
    rows = rows_of(curves, points)
    names, hues, dashes = looks([curve[0] for curve in curves])
    found = [row["y"] for row in rows]
    y = y_of("y", up, scale=scale_of(found), axis=axis_of(found))
    x = x_of("x", along, scale=altair().Scale(nice=False, zero=True))
    base = on().encode(x=x, y=y, color=hue_of(names, hues))
    words = told(("kind", "run", ""), ("x", along, ".4~g"), ("y", up, ".4g"))
    drawn = base.mark_line().encode(strokeDash=dash_of(names, dashes))
    chart = altair().layer(drawn, hover(base).encode(tooltip=words))
    return figure(name, title, sized(chart, height), {"rows": rows})


def scores(
    name: str,
    title: str,
    *,
    labels: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    alone: Sequence[float],
) -> Figure:
    """Show each run's score with two standard errors, and that of learning alone."""
    rows = [
        {"label": label, "kind": "this run", "value": value, "low": value - 2 * error,
         "high": value + 2 * error, "error": error}
        for label, value, error in zip(labels, values, np.nan_to_num(errors), strict=True)
        if math.isfinite(value)
    ]  # fmt: skip
    beside = [
        {"label": label, "kind": "alone", "value": value}
        for label, value in zip(labels, alone, strict=True)
        if math.isfinite(value)
    ]
    names = ["this run", *(["alone"] if beside else [])]
    alt = altair()
    y = alt.Y(field="label", type="nominal", sort=None, title=None, axis=alt.Axis(grid=False))
    x = x_of("value", None, scale=alt.Scale(zero=False), axis=alt.Axis(format="~g"))
    shape = alt.Shape(field="kind", type="nominal", title=None)
    shape = shape.scale(domain=names, range=["circle", "diamond"][: len(names)])
    legend = alt.Legend(symbolType="circle", symbolStrokeWidth=0)
    colour = hue_of(names, [GAIN, LOSS][: len(names)]).legend(legend)
    words = told(("label", "run", ""), ("value", "mean", ".4g"), ("error", "standard error", ".2g"))
    base = on().encode(y=y, x=x)
    bars = base.mark_rule(color=GAIN, strokeWidth=1.6).encode(x=x_of("low", None), x2="high")
    points = base.mark_point(opacity=1, size=70).encode(color=colour, shape=shape, tooltip=words)
    words = told(("label", "run", ""), ("value", "alone", ".4g"))
    others = on("alone").mark_point(opacity=1, size=55).encode(y=y, x=x, color=colour, shape=shape)
    chart = alt.layer(bars, others.encode(tooltip=words), points)
    height = max(90.0, 26.0 * len(set(labels)))
    return figure(name, title, sized(chart, height), {"rows": rows, "alone": beside})


def frontier(
    name: str, title: str, *, rows: Sequence[Row], levels: Sequence[Row], up: str
) -> Figure:
    """Show a metric against epsilon, a line a method.

    Args:
        name: Of the figure.
        title: Above it.
        rows: `kind` (method), `x` (epsilon), `y` (mean), `error` (standard error), `runs`.
        levels: `kind`, `y` of what has no epsilon: learning alone, no privacy.
        up: What is measured.
    """
    alt = altair()
    shown = [{**row, "low": row["y"] - row["error"], "high": row["y"] + row["error"]}
             for row in rows]  # fmt: skip
    methods, hues, _ = looks([row["kind"] for row in rows])
    names = [*methods, *dict.fromkeys(row["kind"] for row in levels)]
    hues += [INK, SOFT, SHARED, LOSS][: len(names) - len(methods)]
    hues += [SOFT] * (len(names) - len(hues))
    dashes = [[1, 0]] * len(methods) + [[4, 3]] * (len(names) - len(methods))
    ticks = sorted({float(f"{row['x']:.3g}") for row in rows})
    axis = alt.Axis(values=ticks, format="~g", labelOverlap=True)
    span = alt.Scale(type="log", domain=[ticks[0] / 1.3, ticks[-1] * 1.3], nice=False)
    x = x_of("x", "epsilon (smaller is more private)", scale=span, axis=axis)
    y = y_of("y", up, scale=alt.Scale(zero=False), axis=alt.Axis(format="~g"))
    colour, dash = hue_of(names, hues), dash_of(names, dashes)
    base = on().encode(x=x, y=y, color=colour)
    words = told(("kind", "method", ""), ("x", "epsilon", ".4~g"), ("y", "mean", ".4g"),
                 ("error", "standard error", ".2g"), ("runs", "runs", "d"))  # fmt: skip
    bars = base.mark_rule(strokeWidth=1.6).encode(y=y_of("low", up), y2="high")
    points = base.mark_point(opacity=1, size=60).encode(tooltip=words)
    drawn = base.mark_line().encode(strokeDash=dash)
    rule = on("levels").mark_rule(strokeWidth=1.6).encode(y=y, color=colour, strokeDash=dash)
    rule = rule.encode(tooltip=told(("kind", "", ""), ("y", "mean", ".4g")))
    chart = alt.layer(rule, drawn, bars, points)
    return figure(name, title, sized(chart, 300), {"rows": shown, "levels": list(levels)})
