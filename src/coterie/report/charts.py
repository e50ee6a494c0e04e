"""Charts: Vega-Lite specifications built by Vega-Altair, for a page and for files.

A page holds the JavaScript of Vega once (`bundle`), every chart as data, and a script that draws
them (`STARTER`). Colours are variables of the style sheet, which SVG follows, so that one drawing
serves light, dark and print; a file gets the real colours. A page fetches nothing, and Vega's
expressions are interpreted, not evaluated, so that the page may forbid both. See ADR 23.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.cache import kept
from coterie.core.files import write_atomically
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee, gdp_approximation
from coterie.report.read import FinishedRun, read_finished

Array = NDArray[np.float64]
Row = dict[str, Any]
Curve = tuple[str, Array, Array]

INK, SOFT, LINE = "var(--ink)", "var(--soft)", "var(--line)"
GAIN, LOSS, SHARED = "var(--gain)", "var(--loss)", "var(--shared)"
HUES = tuple(f"var(--hue{number})" for number in range(1, 9))
"""Colours of lines for runs or methods, distinguishable with colour blindness."""
FORMATS = (".svg", ".png", ".pdf")
PAPER = {
    "ink": "#1b1f24", "soft": "#59636e", "line": "#d9dde2", "gain": "#1668a8", "loss": "#c2570c",
    "shared": "#7a7f87", "hue1": "#1668a8", "hue2": "#c2570c", "hue3": "#1b7f5c",
    "hue4": "#9a3f8f", "hue5": "#8a6d00", "hue6": "#3b4252", "hue7": "#0f8ba0", "hue8": "#b3313f",
}  # fmt: skip
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": SOFT, "titleColor": SOFT, "gridColor": LINE, "domainColor": LINE,
        "tickColor": LINE, "ticks": False, "labelPadding": 6, "titlePadding": 8,
        "titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12.5, "domain": False,
        "labelLimit": 220,
    },
    "axisX": {"grid": False, "tickCount": 8, "labelFlush": False},
    "axisY": {"tickCount": 6},
    "legend": {
        "orient": "bottom", "title": None, "labelColor": INK, "labelFontSize": 12.5,
        "labelLimit": 260, "symbolStrokeWidth": 2.5, "columns": 3, "symbolType": "stroke",
    },
    "line": {"strokeWidth": 2.2, "strokeJoin": "round", "strokeCap": "round"},
    "point": {"filled": True, "size": 45},
    "text": {"fill": SOFT, "fontSize": 12},
}  # fmt: skip
STARTER = """
(() => {
  const config = JSON.parse(document.getElementById("chart-config").textContent);
  const options = { ast: true, renderer: "svg", actions: false, config: config,
    tooltip: { theme: "page", disableDefaultStyle: true, maxDepth: 1 } };
  const draw = (place) => {
    const spec = JSON.parse(place.nextElementSibling.textContent);
    embedChart(place, spec, options).then(
      () => { place.dataset.state = "drawn"; },
      (error) => { place.dataset.state = "failed"; place.textContent = String(error); });
  };
  for (const place of document.querySelectorAll(".chart")) draw(place);
})();
"""


@dataclass(frozen=True)
class Figure:
    """One chart: its id (and file name), its caption, and Vega-Lite without title and style."""

    name: str
    title: str
    spec: Mapping[str, Any]

    @property
    def data(self) -> str:
        """The specification as JSON for a script element."""
        return script_json(self.spec)

    def chart(self) -> Any:
        """Return it as an Altair chart with real colours.

        A notebook shows it as a picture, which needs no network; with a renderer of Altair's
        (`alt.renderers.enable("html")`) it shows tooltips, and may fetch Vega.
        """
        spec = {**self._wide(), "title": self._heading()}
        look = {**CONFIG, "background": "white", "font": "sans-serif"}
        return as_picture(altair().Chart.from_dict(json.loads(_on_paper({**spec, "config": look}))))

    def save(self, path: Path | str, *, titled: bool = False) -> Path:
        """Write it to a file, .svg, .png or .pdf; the same figure gives the same bytes.

        `titled` puts its caption above it; a paper has a caption of its own.

        Raises:
            ValueError: If the ending of the name is not that of a format.
        """
        out = Path(path)
        if out.suffix not in FORMATS:
            raise ValueError(f"{out}: expected a name that ends in {', '.join(FORMATS)}")
        import vl_convert

        heading = {"title": self._heading()} if titled else {}
        spec = json.loads(_on_paper({**self._wide(), **heading}))
        look = json.loads(_on_paper({**CONFIG, "background": "white", "font": "sans-serif"}))
        closed: dict[str, Any] = {"vl_version": _vegalite_version(), "config": look}
        closed["allowed_base_urls"] = []  # a spec has its data with it, and fetches nothing
        closed |= {"scale": 2} if out.suffix == ".png" else {}
        made = getattr(vl_convert, f"vegalite_to_{out.suffix[1:]}")(spec, **closed)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, made.encode() if isinstance(made, str) else made)
        return out

    def _wide(self) -> dict[str, Any]:
        """Return the specification with a width in place of that of its container."""
        return {**self.spec, **({"width": 460} if "width" in self.spec else {})}

    def _heading(self) -> dict[str, Any]:
        style = {"anchor": "start", "color": INK, "fontSize": 13, "offset": 10}
        return {"text": wrap(self.title, 66), **style}


def as_picture(chart: Any) -> Any:
    """Return an Altair chart that a notebook shows as SVG, unless a renderer was chosen."""
    kind = type(chart)

    def show(self: Any, *arguments: Any, **given: Any) -> Any:
        if altair().renderers.active != "default":
            return kind._repr_mimebundle_(self, *arguments, **given)
        import vl_convert

        closed: dict[str, Any] = {"vl_version": _vegalite_version(), "allowed_base_urls": []}
        drawn = vl_convert.vegalite_to_svg(self.to_dict(), **closed)
        return {"image/svg+xml": drawn, "text/plain": f"<{kind.__name__}>"}

    object.__setattr__(
        chart, "__class__", type(kind.__name__, (kind,), {"_repr_mimebundle_": show})
    )
    return chart


def figure(name: str, title: str, chart: Any, rows: Mapping[str, Sequence[Row]]) -> Figure:
    """Return the figure of an Altair chart and its rows, by the names of its datasets.

    Tests validate every kind of chart; to validate again takes as long as all the rest of a page.
    """
    spec = chart.to_dict(validate=False)
    spec.pop("config", None)
    spec.pop("$schema", None)
    spec["datasets"] = {
        name: [{key: _plain(value) for key, value in row.items()} for row in found]
        for name, found in rows.items()
    }
    return Figure(name, title, spec)


def script_json(value: Any) -> str:
    """Return JSON for a script element, which no text in it can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@lru_cache(maxsize=1)
def bundle() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed as one script.

    It is kept in the cache: to put it together takes about as long as to draw all charts.
    """
    import vl_convert

    wanted = _vegalite_version()

    def bundled() -> bytes:
        made = vl_convert.javascript_bundle("window.embedChart = vegaEmbed;", vl_version=wanted)
        return str(made).encode()

    made = kept(f"vega-{wanted}-by-{version('vl-convert-python')}.js", bundled).decode()
    # In a script element these would end it, or change how it is parsed.
    made = re.sub(r"</(script)", r"<\\/\1", made, flags=re.IGNORECASE)
    # A closure of its own keeps the many short names of the bundle off the page.
    return f"(() => {{{made.replace('<!--', '<' + chr(92) + '!--')}}})();"


def hash_of(script: str) -> str:
    """Return the source expression of a script for a Content-Security-Policy."""
    found = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(found).decode()}'"


def _plain(value: Any) -> Any:
    """Return a value of strict JSON: six digits, null in place of what is not finite."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _on_paper(value: Any) -> str:
    """Return JSON with real colours in place of the variables of the style sheet."""
    text = json.dumps(value, allow_nan=False)
    return re.sub(r"var\(--(\w+)\)", lambda found: PAPER.get(found[1], found[0]), text)


@lru_cache(maxsize=1)
def _vegalite_version() -> str:
    """Return the newest installed version of Vega-Lite that Altair writes for."""
    import altair
    import vl_convert

    written = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known: list[str] = vl_convert.get_vegalite_versions()
    return written if written in known else known[-1]


# --- parts of charts


def can_draw() -> bool:
    """Return whether the extra `report` is installed."""
    try:
        return find_spec("altair") is not None and find_spec("vl_convert") is not None
    except ValueError:  # blocked in sys.modules
        return False


def thin(count: int, points: int) -> NDArray[np.int64]:
    """Return at most `points` indices out of `count`, evenly spaced, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, points)).round().astype(np.int64))


def axis_bound(values: Array) -> float:
    """Return the end of an axis: the largest size, unless a few values are outliers."""
    sizes = np.abs(values)
    largest, usual = float(sizes.max()), 1.5 * float(np.quantile(sizes, 0.98))
    return usual if 0 < usual < largest / 2 else largest


POINTS = 200
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])


def altair() -> Any:
    """Return Altair, an optional dependency that is imported on first use."""
    import altair as found

    return found


def on(rows: str = "rows") -> Any:
    """Return an empty chart of a named dataset."""
    alt = altair()
    return alt.Chart(alt.NamedData(rows))


def sized(chart: Any, height: float = 250) -> Any:
    """Make a chart as wide as its container, and return it.

    In place: a copy, as `chart.properties` makes, copies every layer several times.
    """
    chart.width, chart.height = "container", height
    return chart


def tooltip(*fields: tuple[str, str, str]) -> list[Any]:
    """Return the tooltip of a mark: fields, their names and formats ("" for text)."""
    alt = altair()
    return [
        alt.Tooltip(field=field, type="quantitative", title=title, format=form)
        if form
        else alt.Tooltip(field=field, type="nominal", title=title)
        for field, title, form in fields
    ]


def x_of(field: str, title: str | None, **settings: Any) -> Any:
    """Return a quantitative x axis."""
    return altair().X(field=field, type="quantitative", title=title, **settings)


def y_of(field: str, title: str | None, **settings: Any) -> Any:
    """Return a quantitative y axis."""
    return altair().Y(field=field, type="quantitative", title=title, **settings)


def _legend_columns(names: Sequence[str]) -> int:
    """Return how many columns of these names fit into a narrow chart, at most 3.

    About 280 px are beside the axis; a letter takes up to 8 px, and a symbol with its space 30 px.
    """
    return max(1, min(3, 280 // (30 + 8 * max(map(len, names)))))


def _by_kind(channel: Any, names: Sequence[str], looks: Sequence[Any], field: str) -> Any:
    """Return a channel by kind; a single kind needs no legend."""
    scale = altair().Scale(domain=list(names), range=list(looks))
    legend = None if len(names) < 2 else altair().Legend(columns=_legend_columns(names))
    return channel(field=field, type="nominal", title=None, scale=scale, legend=legend)


def hue_of(names: Sequence[str], hues: Sequence[str], field: str = "kind") -> Any:
    """Return colours by kind."""
    return _by_kind(altair().Color, names, hues, field)


def dash_of(names: Sequence[str], dashes: Sequence[Sequence[int]]) -> Any:
    """Return dashes by kind."""
    return _by_kind(altair().StrokeDash, names, [list(dash) for dash in dashes], "kind")


def rows_of(curves: Iterable[Curve], points: int = POINTS) -> list[Row]:
    """Return curves as rows, thinned, with finite values only."""
    found = []
    for name, x, y in curves:
        known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        kept = known[thin(len(known), points)] if len(known) else known
        found += [{"kind": name, "x": float(x[i]), "y": float(y[i])} for i in kept]
    return found


_LEAST_SPAN = 0.1
"""An axis spans at least this share of its largest value: less of it would magnify noise."""
_NOISE_SPAN = 6.0
"""An axis spans at least so many standard errors of what it shows."""


def spans_much(values: Sequence[float]) -> bool:
    """Return whether values need a logarithmic scale."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) / min(known) > 30


def span_of(values: Sequence[float], noise: float = 0.0) -> tuple[float, float]:
    """Return the ends of an axis: all values, and wide enough for differences that are not noise.

    `noise` is the standard error of a value. An axis never leaves the range of its values: shares
    stay between 0 and 1, and errors above 0.

    >>> [round(end, 3) for end in span_of([0.695, 0.701], noise=0.02)]
    [0.638, 0.758]
    >>> span_of([0.0, 8.0])
    (0.0, 8.0)
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    least = max(_LEAST_SPAN * max(abs(low), abs(high)), _NOISE_SPAN * noise)
    room = max(0.0, least - (high - low)) / 2
    bottom = 0.0 if low >= 0 else -math.inf
    top = 1.0 if low >= 0 and high <= 1 else math.inf
    low, high = max(bottom, low - room), min(top, high + room)
    return (low, high) if high > low else (low, low + 1.0)


def scale_of(values: Sequence[float], noise: float = 0.0) -> Any:
    """Return a scale that need not include 0: logarithmic where values span much."""
    alt = altair()
    if spans_much(values):
        return alt.Scale(type="log", nice=False)
    return alt.Scale(zero=False, domain=list(span_of(values, noise)))


def axis_of(values: Sequence[float], **settings: Any) -> Any:
    """Return an axis for `scale_of` with few round numbers."""
    alt = altair()
    if not spans_much(values):
        return alt.Axis(format="~g", tickCount=6, **settings)
    known = [value for value in values if math.isfinite(value)]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps = (1, 2, 5) if high - low <= 3 else (1,) if high - low <= 10 else ()
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    if not ticks:  # too many powers of ten to label each
        ticks = [float(f"1e{power}") for power in range(low, high + 1, (high - low) // 8)]
    return alt.Axis(format="~g", values=ticks, labelOverlap=True, **settings)


def hover(marks: Any) -> Any:
    """Return large transparent marks that carry tooltips."""
    return marks.mark_point(size=140, opacity=0, filled=True)


def looks(names: Sequence[str]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return unique names, colours, and dashes where colours repeat."""
    once = list(dict.fromkeys(names))
    dashes = [_DASHES[i // len(HUES) % len(_DASHES)] for i in range(len(once))]
    return once, [HUES[i % len(HUES)] for i in range(len(once))], dashes


# --- charts of arrays


def trade_off(
    name: str,
    title: str,
    *,
    alarms: Array,
    misses: Array,
    marks: Array,
    approximation: Array | None = None,
    attack: Array | None = None,
) -> Figure:
    """Return the trade-off curve: the least type II error at each type I error, and guessing.

    `attack` are both errors of an audit's attack, (n, 2).
    """
    best, rough, guess = "best possible attack", "approximation, not a bound", "guessing"
    tried = "attack of the audit"
    curves = [(best, alarms, misses)]
    curves += [] if approximation is None else [(rough, alarms, approximation)]
    curves += [] if attack is None else [(tried, attack[:, 0], attack[:, 1])]
    curves.append((guess, np.array([0.0, 1.0]), np.array([1.0, 0.0])))
    look = {best: (GAIN, (1, 0)), rough: (LOSS, (6, 3)), tried: (INK, (1, 0))}
    look[guess] = (SOFT, (2, 3))
    names = [curve[0] for curve in curves]
    hues, dashes = zip(*(look[one] for one in names), strict=True)
    rows = rows_of(curves)
    pointed = [{"kind": best, "x": x, "y": y, "caught": 1 - y} for x, y in marks.tolist()]
    share = {"scale": altair().Scale(domain=[0, 1]), "axis": _shares()}
    x, y = x_of("x", "false positives", **share), y_of("y", "false negatives", **share)
    tip = tooltip(
        ("kind", "curve", ""), ("x", "false positives", ".1%"), ("y", "false negatives", ".1%")
    )
    caught = tooltip(("x", "false positives", ".0%"), ("caught", "true positives, at most", ".1%"))
    base = on().encode(x=x, y=y)
    only = altair().FieldEqualPredicate(field="kind", equal=best)
    area = on().transform_filter(only).mark_area(color=GAIN, opacity=0.12).encode(x=x, y=y)
    lines = base.mark_line().encode(color=hue_of(names, hues), strokeDash=dash_of(names, dashes))
    points = on("marks").mark_point(size=70, color=GAIN, opacity=1).encode(x=x, y=y, tooltip=caught)
    word_at = [{"x": 0.03, "y": 0.06, "text": "impossible"}]
    word = on("word").mark_text(align="left", color=GAIN).encode(x=x, y=y, text="text:N")
    chart = altair().layer(area, lines, word, hover(base).encode(tooltip=tip), points)
    return figure(name, title, sized(chart), {"rows": rows, "marks": pointed, "word": word_at})


def reconstruction(errors: Mapping[str, Array], found: float, name: str) -> Figure:
    """Return the error of every attacked row, by setting, with lines at `found` and at 1.

    The mean row has error 1 as a guess, on average. Errors below 1e-4 are drawn there.
    """
    rows = [
        {"kind": kind, "x": max(float(error), 1e-4)}
        for kind, some in errors.items()
        for error in some
    ]
    ends = [max(float(error), 1e-4) for some in errors.values() for error in some]
    ends += [found / 10, 10.0]
    marks = [{"x": found, "text": "found"}, {"x": 1.0, "text": "1"}]
    x = x_of("x", "error of a row", scale=altair().Scale(type="log"), axis=axis_of(ends))
    y = altair().Y(field="kind", type="nominal", title=None, sort=list(errors))
    tip = tooltip(("kind", "setting", ""), ("x", "error", ".3g"))
    points = on().mark_point(size=50, color=GAIN).encode(x=x, y=y, tooltip=tip)
    lines_at = on("marks").mark_rule(color=INK, strokeDash=[4, 3]).encode(x=x)
    words = on("marks").mark_text(dy=-8, baseline="bottom").encode(x=x, text="text:N")
    words = words.encode(y=altair().value(0))
    title = "Error of each reconstructed row, by what the server receives"
    chart = altair().layer(lines_at, words, points)
    return figure(name, title, sized(chart, 120), {"rows": rows, "marks": marks})


def spending(name: str, guarantee: Guarantee) -> Figure:
    """Return epsilon against the rounds done."""
    steps = zip(*spent_by_round(guarantee), strict=True)
    rows = [{"x": 0, "y": 0.0}, *({"x": done, "y": epsilon} for done, epsilon in steps)]
    tip = tooltip(("x", "rounds done", "d"), ("y", "epsilon spent", ".4g"))
    x = x_of("x", "rounds done", scale=altair().Scale(nice=False), axis=_whole())
    base = on().encode(x=x, y=y_of("y", "epsilon"), tooltip=tip)
    area = base.mark_area(color=GAIN, opacity=0.12)
    chart = altair().layer(area, base.mark_line(color=GAIN), base.mark_point(color=GAIN, opacity=1))
    return figure(name, "Epsilon spent by round", sized(chart), {"rows": rows})


def _shares() -> Any:
    """Return an axis from 0 to 100 % in steps of 20."""
    return altair().Axis(format=".0%", tickCount=5)


def _whole() -> Any:
    """Return an axis with whole numbers."""
    return altair().Axis(tickMinStep=1, format="d")


def draw_losses(run: FinishedRun, name: str = "losses") -> Figure:
    """Return the losses of every round of a run, and the epsilon spent by then."""
    curves, title = losses_of(run), f"{run.label}: loss and epsilon by round"
    # A privately selected run has no epsilon by round: the selection accounts for all of it.
    private = run.private and run.selection is None
    spent = zip(*spent_by_round(run.guarantee), strict=True) if private else ()
    known = [(r, e) for r, e in spent if math.isfinite(e)]
    names = [*curves, *(["epsilon"] if known else [])]
    hues = [*HUES[: len(curves)], SOFT]
    dashes = [*([(1, 0)] * len(curves)), (2, 3)]
    rows = rows_of([(one, *curve) for one, curve in curves.items()])
    found = [row["y"] for row in rows]
    x = x_of("x", "rounds done", scale=altair().Scale(nice=False), axis=_whole())
    colour = hue_of(names, hues[: len(names)])
    dash = dash_of(names, dashes[: len(names)])
    left = on().encode(
        x=x, y=y_of("y", "loss (not private)", scale=scale_of(found), axis=axis_of(found))
    )
    tip = tooltip(("kind", "curve", ""), ("x", "rounds done", "d"), ("y", "loss", ".4g"))
    lines = left.mark_line().encode(color=colour, strokeDash=dash)
    parts = [altair().layer(lines, hover(left).encode(tooltip=tip))]
    steps = [{"kind": "epsilon", "x": r, "y": e} for r, e in [(0, 0.0), *known]] if known else []
    if steps:
        right = on("spent").encode(
            x=x, y=y_of("y", "epsilon spent", axis=altair().Axis(grid=False))
        )
        tip = tooltip(("x", "rounds done", "d"), ("y", "epsilon spent", ".4g"))
        drawn = right.mark_line().encode(color=colour, strokeDash=dash)
        parts.append(altair().layer(drawn, hover(right).encode(tooltip=tip)))
    chart = altair().layer(*parts).resolve_scale(y="independent")
    return figure(name, title, sized(chart), {"rows": rows, "spent": steps})


def reliability(curves: Sequence[Curve]) -> Figure:
    """Return a reliability diagram: accuracy by confidence."""
    title = "Accuracy by confidence: below the line is overconfident"
    names, hues, dashes = looks([curve[0] for curve in curves])
    scale, form = altair().Scale(domain=[0, 1]), _shares()
    x, y = x_of("x", "confidence", scale=scale, axis=form), y_of("y", "accuracy", scale=scale)
    base = on().encode(x=x, y=y.axis(_shares()), color=hue_of(names, hues))
    tip = tooltip(("kind", "run", ""), ("x", "confidence", ".1%"), ("y", "accuracy", ".1%"))
    just = on("just").mark_line(color=SOFT, strokeDash=[2, 3], strokeWidth=1.2).encode(x=x, y=y)
    lines = base.mark_line().encode(strokeDash=dash_of(names, dashes))
    chart = altair().layer(just, lines, base.mark_point(opacity=1).encode(tooltip=tip))
    ends = [{"x": 0, "y": 0}, {"x": 1, "y": 1}]
    return figure("reliability", title, sized(chart), {"rows": rows_of(curves), "just": ends})


def lines(
    name: str,
    title: str,
    curves: Sequence[Curve],
    *,
    along: str,
    up: str,
    points: int = POINTS,
    errors: Mapping[str, float] | None = None,
    whole: bool = False,
) -> Figure:
    """Return one line per run, on a logarithmic scale where values span much.

    `errors` are the standard errors of runs: a bar at the end of a line is two of them each way.
    `whole`: the x axis counts, so that its ticks are whole numbers.
    """
    rows = rows_of(curves, points)
    names, hues, dashes = looks([curve[0] for curve in curves])
    found, ends = [row["y"] for row in rows], _ends(rows, errors or {})
    noise = max((end["error"] for end in ends), default=0.0)
    shown = [*found, *(end[side] for end in ends for side in ("low", "high"))]
    y = y_of("y", up, scale=scale_of(shown, noise), axis=axis_of(shown))
    settings = {"axis": _whole()} if whole else {}
    x = x_of("x", along, scale=altair().Scale(nice=False, zero=True), **settings)
    base = on().encode(x=x, y=y, color=hue_of(names, hues))
    tip = tooltip(("kind", "run", ""), ("x", along, ".4~g"), ("y", up, ".4g"))
    layers = [base.mark_line().encode(strokeDash=dash_of(names, dashes))]
    if ends:
        bars = on("ends").mark_rule(strokeWidth=1.6).encode(x=x, color=hue_of(names, hues))
        layers.append(bars.encode(y=y_of("low", up), y2="high"))
    chart = altair().layer(*layers, hover(base).encode(tooltip=tip))
    return figure(
        name, title, sized(chart), {"rows": rows, "ends": ends} if ends else {"rows": rows}
    )


def _ends(rows: Sequence[Row], errors: Mapping[str, float]) -> list[Row]:
    """Return the last point of every line whose standard error is known, with two of them."""
    last = {row["kind"]: row for row in rows}
    return [
        {**row, "error": errors[kind], "low": row["y"] - 2 * errors[kind],
         "high": row["y"] + 2 * errors[kind]}
        for kind, row in last.items()
        if math.isfinite(errors.get(kind, math.nan))
    ]  # fmt: skip


def scores(
    name: str,
    title: str,
    *,
    labels: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    local: Sequence[float],
) -> Figure:
    """Return each run's score with two standard errors, and its local baseline."""
    rows = [
        {"label": label, "kind": "this run", "value": value, "low": value - 2 * error,
         "high": value + 2 * error, "error": error}
        for label, value, error in zip(labels, values, np.nan_to_num(errors), strict=True)
        if math.isfinite(value)
    ]  # fmt: skip
    local_rows = [
        {"label": label, "kind": "local", "value": value}
        for label, value in zip(labels, local, strict=True)
        if math.isfinite(value)
    ]
    names = ["this run", *(["local"] if local_rows else [])]
    alt = altair()
    y = alt.Y(field="label", type="nominal", sort=None, title=None, axis=alt.Axis(grid=False))
    ends = [row[side] for row in rows for side in ("low", "high")]
    ends += [row["value"] for row in local_rows]
    x = x_of("value", None, scale=alt.Scale(zero=False, domain=list(span_of(ends))))
    x = x.axis(format="~g")
    shape = alt.Shape(field="kind", type="nominal", title=None)
    shape = shape.scale(domain=names, range=["circle", "diamond"][: len(names)])
    legend = alt.Legend(symbolType="circle", symbolStrokeWidth=0)
    colour = hue_of(names, [GAIN, LOSS][: len(names)]).legend(legend)
    tip = tooltip(
        ("label", "run", ""), ("value", "mean", ".4g"), ("error", "standard error", ".2g")
    )
    base = on().encode(y=y, x=x)
    bars = base.mark_rule(color=GAIN, strokeWidth=1.6).encode(x=x_of("low", None), x2="high")
    points = base.mark_point(opacity=1, size=70).encode(color=colour, shape=shape, tooltip=tip)
    tip = tooltip(("label", "run", ""), ("value", "local", ".4g"))
    others = on("local").mark_point(opacity=1, size=55).encode(y=y, x=x, color=colour, shape=shape)
    chart = alt.layer(bars, others.encode(tooltip=tip), points)
    height = max(90.0, 26.0 * len(set(labels)))
    return figure(name, title, sized(chart, height), {"rows": rows, "local": local_rows})


def frontier(
    name: str, title: str, *, rows: Sequence[Row], levels: Sequence[Row], up: str
) -> Figure:
    """Return a metric against epsilon, one line per method."""
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
    ends = [row[side] for row in shown for side in ("low", "high")]
    ends += [row["y"] for row in levels]
    y = y_of("y", up, scale=alt.Scale(zero=False, domain=list(span_of(ends))))
    y = y.axis(format="~g")
    colour, dash = hue_of(names, hues), dash_of(names, dashes)
    base = on().encode(x=x, y=y, color=colour)
    tip = tooltip(("kind", "method", ""), ("x", "epsilon", ".4~g"), ("y", "mean", ".4g"),
                 ("error", "standard error", ".2g"), ("runs", "runs", "d"))  # fmt: skip
    bars = base.mark_rule(strokeWidth=1.6).encode(y=y_of("low", up), y2="high")
    points = base.mark_point(opacity=1, size=60).encode(tooltip=tip)
    drawn = base.mark_line().encode(strokeDash=dash)
    rule = on("levels").mark_rule(strokeWidth=1.6).encode(y=y, color=colour, strokeDash=dash)
    rule = rule.encode(tooltip=tooltip(("kind", "", ""), ("y", "mean", ".4g")))
    chart = alt.layer(rule, drawn, bars, points)
    return figure(name, title, sized(chart, 300), {"rows": shown, "levels": list(levels)})


# --- charts of clients

_WAYS = {"better": GAIN, "worse": LOSS, "equal": SOFT}
_MODELS = {"local": LOSS, "shared": SHARED, "personal": GAIN}


def client_tooltip(rows: Sequence[Row], than: str = "local") -> list[Any]:
    """Return the tooltip of a client: name, rows, errors and gain."""
    fields = [("client", "client", ""), ("train_rows", "train rows", "d"),
              ("test_rows", "test rows", "d"), ("local", f"error {than}", ".4g")]  # fmt: skip
    if any(row.get("shared") is not None for row in rows):
        fields.append(("shared", "error of the shared model", ".4g"))
    return tooltip(*fields, ("personal", "error personal", ".4g"), ("gain", "gain", ".3g"))


def gains(name: str, title: str, rows: Sequence[Row], *, than: str = "local") -> Figure:
    """Return what every client gains, from the largest loss to the largest gain."""
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
    up = f"error {than} \u2212 personal"
    usual = float(np.median([row["local"] for row in rows]))
    ends = [min(float(found.min()), 0.0), max(float(found.max()), 0.0)]
    reach = max(0.0, _LEAST_SPAN * usual - (ends[1] - ends[0])) / 2
    domain = [max(-bound, ends[0]) - reach, min(bound, ends[1]) + reach]
    y = y_of("shown", up, scale=alt.Scale(domain=domain) if domain[1] > domain[0] else alt.Scale())
    colour = hue_of(list(_WAYS), list(_WAYS.values()), "way").legend(None)
    bars = on().mark_rect(strokeWidth=0).encode(x=x, x2="to", y=y, color=colour)
    bars = bars.encode(y2=alt.Y2(datum=0))
    # A small gain has a small mark: the tooltip covers the whole height.
    whole = on().mark_rect(opacity=0).encode(x=x, x2="to", tooltip=client_tooltip(rows, than))
    zero = on("zero").mark_rule(color=INK, strokeWidth=1).encode(y=y_of("y", up))
    chart = alt.layer(bars, zero, whole)
    return figure(name, title, sized(chart), {"rows": shown, "zero": [{"y": 0}]})


def against_local(name: str, rows: Sequence[Row]) -> Figure:
    """Return the personal error against the local error, one point per client."""
    title = "Local against personal: below the line is a gain"
    alt = altair()
    ends = [float(row[key]) for row in rows for key in ("local", "personal")]
    low, high = min(ends), max(ends)
    scale = scale_of(ends)
    form = axis_of(ends, grid=True)
    shown = [{**row, "way": way(row["gain"])} for row in rows]
    x = x_of("local", "error local", scale=scale, axis=form)
    y = y_of("personal", "error personal", scale=scale, axis=form)
    points = on().mark_point(size=34, opacity=0.65, strokeWidth=0).encode(x=x, y=y)
    points = points.encode(color=hue_of(list(_WAYS), list(_WAYS.values()), "way").legend(None))
    line = on("line").mark_line(color=INK, strokeWidth=1).encode(x=x, y=y)
    chart = alt.layer(line, points.encode(tooltip=client_tooltip(rows)))
    drawn = [{"local": low, "personal": low}, {"local": high, "personal": high}]
    return figure(name, title, sized(chart), {"rows": shown, "line": drawn})


def models(name: str, which: str, rows: Sequence[Row]) -> Figure:
    """Return each client's error: local, of the shared model, and personal."""
    alt, title = altair(), f"Error of each client: {which}"
    names = [one for one in _MODELS if any(_is_number(row.get(one)) for row in rows)]
    step = 100 / len(rows)
    placed = [{**row, "place": step * (i + 0.5)} for i, row in enumerate(rows)]
    found = [float(row[one]) for row in rows for one in names if _is_number(row.get(one))]
    scale = scale_of(found)
    along = "% of clients, from largest loss to largest gain"
    x = x_of("place", along, scale=alt.Scale(domain=[0, 100]))
    up = "a client\u2019s own error"
    y = y_of("error", up, scale=scale, axis=axis_of(found))
    legend = alt.Legend(symbolType="circle", symbolStrokeWidth=0)
    colour = hue_of(names, [_MODELS[one] for one in names]).legend(legend)
    links = on().mark_rule(strokeWidth=1.2, opacity=0.55, color=SOFT)
    links = links.encode(x=x, y=y_of("local", up, scale=scale), y2="personal")
    points = on().transform_fold(names, as_=["kind", "error"])
    points = points.mark_point(size=38, opacity=0.9, strokeWidth=0).encode(x=x, y=y, color=colour)
    chart = alt.layer(links, points.encode(tooltip=client_tooltip(rows)))
    return figure(name, title, sized(chart, 300), {"rows": placed})


def _is_number(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def way(gain: float) -> str:
    """Return whether a client gains."""
    return "better" if gain > 0 else "worse" if gain < 0 else "equal"


# --- charts of guarantees and runs

ALARMS = (0.01, 0.1)
"""False-positive rates that a page states."""
TRADE_OFF = "f-DP trade-off: no attack by other clients gets below the curve"
_MARKS = 12
_LOSSES = {"train_loss": "training loss", "test_loss": "test loss"}


def draw_trade_off(
    guarantee: Guarantee, name: str = "trade-off", attack: Array | None = None
) -> Figure:
    """Return the trade-off curve of a guarantee against the other clients, and random guessing.

    The Gaussian approximation of some papers is dashed where it differs; it is not a bound.
    `attack` are the false positives and false negatives of an audit's attack, (n, 2).
    """
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 0.1, 30), np.linspace(0.12, 1, 45)])
    listed = [float(alarm) for alarm in alarms]
    return trade_off(
        name,
        TRADE_OFF,
        alarms=alarms,
        misses=guarantee.trade_off(listed),
        marks=np.column_stack([ALARMS, guarantee.trade_off(ALARMS)]),
        approximation=approximation(guarantee, listed),
        attack=attack,
    )


def save_trade_off(guarantee: Guarantee, path: Path | str) -> Path:
    """Write the trade-off curve of a guarantee to a file: .svg, .png or .pdf."""
    return draw_trade_off(guarantee).save(path, titled=True)


def approximation(guarantee: Guarantee, alarms: Sequence[float]) -> Array | None:
    """Return the Gaussian approximation; None where there is none, or where it is exact."""
    try:
        found = gdp_approximation(guarantee).trade_off(alarms)
    except ValueError:  # other noise than Gaussian
        return None
    return None if np.allclose(found, guarantee.trade_off(alarms), atol=1e-9) else found


@lru_cache(maxsize=64)
def spent_by_round(guarantee: Guarantee) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return some rounds, with the last one, and epsilon against the other clients after each."""
    total = len(guarantee.events)
    # Accounting for sampled rounds with many noise levels takes seconds.
    marks = min(total, _MARKS if len(set(guarantee.events)) <= 8 else 4)
    rounds = tuple(sorted({round(r) for r in np.linspace(1, total, marks)}))
    who, relation = guarantee.participation, guarantee.relation
    spent = epsilon_by_round(guarantee.events, who, relation, guarantee.delta, rounds)
    return rounds, tuple(spent)


def losses_of(run: FinishedRun) -> dict[str, tuple[Array, Array]]:
    """Return the losses of a run by name: rounds, and the loss after each."""
    found = {}
    for key, name in _LOSSES.items():
        if key in run.history:
            x, y = run.history["round"], run.history[key]
            known = np.isfinite(x) & np.isfinite(y)
            if known.any():
                found[name] = (x[known], y[known])
    return found


def save_losses(folder: Path | str, path: Path | str) -> Path:
    """Write losses and epsilon by round of a finished run to a file: .svg, .png or .pdf.

    Raises:
        ValueError: If the run kept no losses.
    """
    (run,) = read_finished([Path(folder)])
    if not losses_of(run):
        raise ValueError(f"{folder} kept no losses: run it with --history, into a new folder")
    return draw_losses(run).save(path, titled=True)
