"""The page and the pictures of a plan: whether joining should pay, and what it costs.

Everything here is a function of public facts. Torch is not loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.planning.advice import ERROR, Advice, Forecast, Points, describe_error
from coterie.report import charts, page
from coterie.report.charts import GAIN, INK, LOSS, SOFT, Figure, altair, on, tooltip, x_of, y_of

KINDS = (".html", *charts.FORMATS)
ANSWERS = {
    "join": "Joining should pay",
    "small gain": "Joining should bring a small gain",
    "learn alone": "Joining should not pay: train locally",
}
"""The verdict of the rule as a headline."""
_PAPER_WIDTH = 400


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page shows of a plan.

    Attributes:
        facts: Names and values, as the terminal lists them.
        limits: What keeps the noise small, one change at a time: a sentence, names and values.
        by_epsilon: Head and rows of the verdicts at other epsilons.
        by_rounds: Epsilon after a number of rounds, at this noise; empty if unknown.
        by_clients: Noise of a released mean, with a number of clients.
    """

    title: str
    advice: Advice
    forecast: Forecast
    facts: Sequence[tuple[str, str]]
    limits: tuple[str, Sequence[tuple[str, str]]]
    by_epsilon: tuple[Sequence[str], Sequence[Sequence[str]]]
    by_rounds: Points
    by_clients: Points


def write_plan(shown: Shown, out: Path) -> Path:
    """Write a page (.html) or both charts side by side (.svg, .png, .pdf); needs the extra."""
    if out.suffix.lower() != ".html":
        return picture(shown).save(out.with_suffix(out.suffix.lower()))
    drawn = list[Figure]()
    given = {"shown": shown, "drawn": drawn, "can_draw": True, "figures_of": figures_of(shown)}
    given |= {
        "answers": ANSWERS,
        "clients": False,
        "described": describe_error(shown.forecast.error),
    }
    written: Any = page.environment().get_template("plan.html.j2").make_module(given)
    found = [
        (key, menu, title, getattr(written, macro)())
        for macro, key, menu, title in (
            ("changes", "changes", "Changes", "What a change costs"),
            ("epsilons", "epsilons", "Epsilon", "Other epsilons"),
            ("facts", "facts", "Numbers", "Numbers of this plan"),
            ("terms", "glossary", "Glossary", "Glossary"),
        )
    ]
    sections = [section for section in found if section[-1].strip()]
    text = page.render_page(shown.title, written.opening(), sections, bool(drawn))
    write_atomically(out, text.strip().encode(errors="replace") + b"\n")
    return out


def figures_of(shown: Shown) -> list[Figure]:
    """Return epsilon against rounds, and noise against clients, each with the plan as a point."""
    facts, found = shown.forecast.facts, shown.forecast
    noise = f"{found.noise_multiplier:.4g}"
    drawn = []
    if shown.by_rounds:
        drawn.append(_epsilon_by_rounds(shown.by_rounds, (facts.rounds, found.epsilon), noise))
    if shown.by_clients:
        drawn.append(_noise_by_clients(shown.by_clients, (facts.clients, found.error)))
    return drawn


def _epsilon_by_rounds(points: Points, here: tuple[float, float], noise: str) -> Figure:
    alt = altair()
    whole = alt.Axis(tickMinStep=1, format=",d", tickCount=6)
    x = x_of("x", "rounds", scale=alt.Scale(zero=True, nice=False), axis=whole)
    y = y_of("y", "epsilon", scale=alt.Scale(zero=True), axis=alt.Axis(format="~g", tickCount=6))
    tip = tooltip(("x", "rounds", ",d"), ("y", "epsilon", ".4g"))
    base = on("by_rounds").encode(x=x, y=y)
    line = base.mark_line(color=GAIN, interpolate="monotone")
    chart = alt.layer(
        line, *_here("rounds_here", x, y, tip, below=True), charts.hover(base).encode(tooltip=tip)
    )
    title = f"Epsilon against rounds, at noise multiplier {noise}"
    rows = {"by_rounds": [{"x": a, "y": b} for a, b in points], "rounds_here": [_point(here)]}
    return charts.figure("epsilon-by-rounds", title, charts.sized(chart), rows)


def _noise_by_clients(points: Points, here: tuple[float, float]) -> Figure:
    alt = altair()
    limits = [{"y": ERROR, "text": "below: negligible"}, {"y": 1.0, "text": "above: mostly noise"}]
    xs, ys = ([point[axis] for point in (*points, here)] for axis in (0, 1))
    axes = charts.axis_of(xs), charts.axis_of([*ys, 1.0])
    x = x_of("x", "clients", scale=alt.Scale(type="log", nice=False), axis=axes[0])
    x = x.axis(format=",d", labelOverlap=True)
    y = y_of("y", "noise / clipping norm", scale=alt.Scale(type="log", nice=False), axis=axes[1])
    tip = tooltip(("x", "clients", ",d"), ("y", "noise / clipping norm", ".3g"))
    base = on("by_clients").encode(x=x, y=y)
    rules = on("limits").mark_rule(color=LOSS, strokeDash=[4, 4]).encode(y=y)
    words = on("limits").mark_text(align="right", dy=-6, dx=-4, color=LOSS, baseline="bottom")
    words = words.encode(x=alt.value("width"), y=y, text="text:N")
    line = base.mark_line(color=GAIN)
    chart = alt.layer(
        rules,
        words,
        line,
        *_here("clients_here", x, y, tip),
        charts.hover(base).encode(tooltip=tip),
    )
    rows = {
        "by_clients": [{"x": a, "y": b} for a, b in points],
        "clients_here": [_point(here)],
        "limits": limits,
    }
    title = "Noise of a released mean against clients, both on logarithmic scales"
    return charts.figure("noise-by-clients", title, charts.sized(chart), rows)


def _point(here: tuple[float, float]) -> dict[str, Any]:
    return {"x": here[0], "y": here[1], "text": "this plan"}


def _here(rows: str, x: Any, y: Any, tip: Sequence[Any], *, below: bool = False) -> tuple[Any, Any]:
    """Return the plan itself as a point with its name, on the side where no line is."""
    point = on(rows).mark_point(size=130, color=INK, opacity=1).encode(x=x, y=y, tooltip=list(tip))
    word = on(rows).mark_text(align="left", dx=9, dy=12 if below else -9, color=INK)
    word = word.encode(x=x, y=y, text="text:N")
    return point, word


def picture(shown: Shown) -> Figure:
    """Return both charts side by side with the verdict as their title, for a file."""
    parts, rows = [], dict[str, Any]()
    for figure in figures_of(shown):
        spec = dict(figure.spec)
        rows |= spec.pop("datasets")
        heading = {"text": figure.title, "anchor": "start", "color": SOFT, "fontSize": 12}
        heading["fontWeight"] = "normal"
        parts.append({**spec, "width": _PAPER_WIDTH, "height": 260, "title": heading})
    title: Mapping[str, Any] = {
        "text": f"{shown.title}: {ANSWERS[shown.advice.verdict].lower()}",
        "anchor": "start",
        "color": INK,
        "fontSize": 15,
        "offset": 16,
    }
    spec = {"hconcat": parts, "spacing": 40, "padding": 12, "title": title, "datasets": rows}
    return Figure("plan", shown.title, spec)
