"""The look of a report: elements that escape what they hold, the style sheet and the charts.

Charts are drawn by matplotlib (extra `report`) as SVG with real text. Colours are drawn as marks
that stand for the style sheet's variables, so that one drawing serves light, dark and paper.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

INK, LINE, GAIN, LOSS = "#010203", "#010204", "#010205", "#010206"
_NO_CHARTS = "matplotlib is not installed: `pip install coterie[report]` draws the charts."
_VARIABLES = {INK: "currentColor", LINE: "var(--line)", GAIN: "var(--gain)", LOSS: "var(--loss)"}
LOOK: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "font.sans-serif": ["DejaVu Sans"],
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "xtick.major.pad": 5.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}

STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --page: #fbfbf9; --card: #fff; --line: #cfd4da;
  --gain: #1668a8; --loss: #c2570c; --bad: #b3131b; --warn: #8a5a00; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --soft: #a3adb8; --page: #14171b; --card: #1c2026; --line: #3f4751;
    --gain: #6cb6f5; --loss: #f59f57; --bad: #ff8080; --warn: #e6b450; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--page); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--soft); margin: 0; }
h2 { font-size: 1.4rem; margin: 3rem 0 .6rem; }
h3 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
.answer { font-size: clamp(1.3rem, 1rem + 1.6vw, 1.9rem); line-height: 1.3; font-weight: 650;
  max-width: none; margin: .4rem 0 .8rem; }
.bad { color: var(--bad); font-weight: 700; }
.badge { display: inline-block; color: var(--warn); border: 1px solid; border-radius: .3rem;
  padding: 0 .4rem; font-size: .8rem; font-weight: 600; }
.note, figcaption, caption, .label { color: var(--soft); font-size: .9rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem 1.1rem; margin: 1rem 0; }
.symbols { font-family: "Cambria Math", "STIX Two Math", Cambria, Georgia, serif;
  font-size: 1.05rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  margin: .6rem 0; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
thead th { color: var(--soft); font-size: .85rem; font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; }
caption { text-align: left; padding-bottom: .3rem; }
td { white-space: nowrap; }
.small { width: auto; font-size: .9rem; }
.charts { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; max-width: 36rem; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { fill: currentColor; font-family: system-ui, sans-serif !important; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; padding: .3rem 0; }
pre { overflow-x: auto; font-size: .82rem; line-height: 1.45; white-space: pre-wrap; }
@media screen and (max-width: 44rem) {
  .cards thead { position: absolute; clip-path: inset(50%); height: 1px; overflow: hidden; }
  .cards tr { display: block; border: 1px solid var(--line); border-radius: .6rem;
    margin: .6rem 0; padding: .3rem .2rem; background: var(--card); }
  .cards th, .cards td { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    padding: .2rem .7rem; }
  .cards th { flex-direction: column; gap: 0; }
  .cards td::before { content: attr(data-label); color: var(--soft); text-align: left; } }
@media print {
  html { font-size: 10pt; } body { max-width: none; padding: 0; background: none; }
  details:not(.plan) { display: none; } .plan::details-content { content-visibility: visible; }
  .card, figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } h2 { margin-top: 1.5rem; } }
"""


class Html(str):
    """Text that is HTML already; any other text is escaped on its way into an element."""

    __slots__ = ()


# Nothing may be fetched or run, whatever a file of the run folder says.
META = Html(
    """
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""
)


def element(name: str, *children: str, **attributes: str) -> Html:
    """Build an element; `class_` and `data_label` stand for `class` and `data-label`.

    >>> element("p", "1 < 2, ", element("b", "surely"), class_="note")
    '<p class="note">1 &lt; 2, <b>surely</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str) -> Html:
    """Put texts and elements one after another, escaping the texts."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, class_: str = "small") -> Html:
    """Build a table whose rows are named by their first cell."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(
                element("td", cell, **({"data_label": name} if class_ == "cards" else {}))
                for name, cell in zip(head[1:], row[1:], strict=True)
            ),
        )
        for row in rows
    )
    return element("table", element("thead", top), element("tbody", *body), class_=class_)


def can_draw() -> bool:
    """Say whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(key: str, title: str, paint: Callable[["Axes"], None], *, height: float = 2.7) -> Html:
    """Draw one chart as a figure; `key` keeps its ids apart from those of other charts."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        # A person's own settings (LaTeX text, for one) must not reach the page.
        matplotlib.rcdefaults()
        look: Any = {**LOOK, "svg.hashsalt": key}
        matplotlib.rcParams.update(look)
        figure = Figure(figsize=(4.6, height), layout="constrained")
        paint(figure.add_subplot())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    drawing = Html(_inline(buffer.getvalue(), key, title))
    return element("figure", element("figcaption", title), drawing)


def _inline(svg: str, key: str, title: str) -> str:
    """Fit a stand-alone SVG into a page: no prolog, no style of its own, ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    named = rf'<svg role="img" aria-label="{html.escape(title)}"'
    svg = re.sub(r'<svg(.*?) width="[^"]*"', lambda m: named + m[1], svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' height="[^"]*pt"', "", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    for mark, variable in _VARIABLES.items():
        svg = svg.replace(mark, variable)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', _round, svg)
    return re.sub(r"\n\s*", "\n", svg)


def _round(attribute: re.Match[str]) -> str:
    """Keep two digits after the point: a hundredth of a point is far below what can be seen."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def scores(
    key: str, title: str, *, labels: Sequence[str], values: Array, errors: Array, alone: Array
) -> Html:
    """Draw each run's score with two standard errors, and that of learning alone."""
    places = np.arange(len(labels))[::-1]

    def paint(axes: "Axes") -> None:
        axes.errorbar(values, places, xerr=2 * errors, fmt="o", color=GAIN, label="this run")
        axes.plot(alone, places, "D", color=LOSS, fillstyle="none", label="alone")
        plain = [label.encode("ascii", "replace").decode() for label in labels]
        axes.set_yticks(places, plain, parse_math=False)
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside lower right", ncols=2)

    return draw(key, title, paint, height=1.1 + 0.3 * len(labels))


def axis_bound(values: Array) -> float:
    """Choose where an axis ends: at the largest value, unless a few lie far from all others."""
    sizes = np.abs(values)
    largest, usual = float(sizes.max()), 1.5 * float(np.quantile(sizes, 0.98))
    return usual if 0 < usual < largest / 2 else largest


def gains(key: str, title: str, *, sorted_gains: Array, points: int) -> Html:
    """Draw every client's gain from the largest loss to the largest gain, thinned to `points`."""
    bound = axis_bound(sorted_gains)
    shown = np.clip(sorted_gains[thin(len(sorted_gains), points)], -bound, bound)
    edges = np.linspace(0, 100, len(shown) + 1)
    low, high = 1.05 * min(float(shown.min()), 0.0), 1.05 * max(float(shown.max()), 0.0)

    def paint(axes: "Axes") -> None:
        axes.stairs(np.maximum(shown, 0), edges, fill=True, color=GAIN)
        axes.stairs(np.minimum(shown, 0), edges, fill=True, color=LOSS)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set(xlim=(0, 100), ylim=(low, high) if low < high else (-1, 1))
        axes.set(xlabel="% of clients, sorted", ylabel="error alone - joined")

    return draw(key, title, paint)


def against_alone(key: str, title: str, *, alone: Array, joined: Array, points: int) -> Html:
    """Draw error joined against error alone, a point a client, thinned to `points`."""
    kept = np.argsort(alone - joined, kind="stable")[thin(len(alone), points)]
    x, y = alone[kept], joined[kept]
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))

    def paint(axes: "Axes") -> None:
        for over, color in ((y < x, GAIN), (y > x, LOSS), (y == x, INK)):
            axes.plot(x[over], y[over], "o", color=color, markersize=3.5, alpha=0.6, mew=0)
        axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
        if low > 0 and high / low > 30:
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="error alone", ylabel="error joined")

    return draw(key, title, paint)


def thin(count: int, points: int) -> NDArray[np.int64]:
    """Choose at most `points` places out of so many, evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, points)).round().astype(np.int64))


def show_gains(alone: Array, joined: Array, key: str, points: int) -> Html:
    """Show how gains spread over clients: two charts, or quantiles without matplotlib."""
    differences = np.sort(alone - joined)
    levels = {"most lost": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
    levels |= {"90 %": 0.9, "most gained": 1.0}
    rows = [[name, short(float(np.quantile(differences, at)))] for name, at in levels.items()]
    quantiles = table(["clients, sorted", "error alone - joined"], rows)
    if not can_draw():
        return numbers(quantiles)
    points = max(60, min(points, 500))
    beyond = int((np.abs(differences) > axis_bound(differences)).sum())
    above = "What each client gains (above 0) or loses"
    below = "Alone against joined: below the line is a gain"
    drawn = (
        gains(f"{key}-gain", above, sorted_gains=differences, points=points),
        against_alone(f"{key}-pair", below, alone=alone, joined=joined, points=points),
    )
    told = f"{beyond} clients lie beyond the left chart's axis. " if beyond else ""
    told += f"{points} of {len(alone)} clients are drawn." if len(alone) > points else ""
    note = [element("p", told.strip(), class_="note")] if told else []
    return join(element("div", *drawn, class_="charts"), *note, numbers(quantiles))


def numbers(*tables: str) -> Html:
    """Put tables of what is drawn behind a click; in the open where nothing can be drawn."""
    if can_draw():
        return element("details", element("summary", "The same in numbers"), *tables)
    return join(element("p", _NO_CHARTS, class_="note"), *tables)


def short(value: float) -> str:
    """Write a number with three digits."""
    return "not a number" if math.isnan(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """Write a share in whole per cent."""
    return f"{100 * share:.0f} %"
