"""Charts: Vega-Lite specifications built and checked by Vega-Altair, for a page and for files.

A page holds the JavaScript of Vega once (`bundle`), every chart as data, and a script that draws
them (`starter`). Colours are names of the style sheet's variables, which SVG follows, so that one
drawing serves light, dark and paper; a file gets the real ones. Nothing is fetched, and Vega's
expressions are interpreted, not evaluated, so that a page may forbid both. See ADR 23.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.report.elements import Html, element, holding

Row = dict[str, Any]

INK, SOFT, LINE = "var(--ink)", "var(--soft)", "var(--line)"
GAIN, LOSS, SHARED = "var(--gain)", "var(--loss)", "var(--shared)"
HUES = tuple(f"var(--hue{number})" for number in range(1, 9))
"""Colours of lines that stand for runs or methods, told apart by those who see few colours too."""
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
    """One chart.

    Attributes:
        name: Its id on the page and its file's name.
        title: What it says, above it and for those who do not see it.
        spec: Vega-Lite, with its data, without title and look.
    """

    name: str
    title: str
    spec: Mapping[str, Any]

    def show(self) -> Html:
        """Return it as a part of a page; `starter` draws it there."""
        data = element_of_data(self.spec)
        place = element("div", id=self.name, class_="chart", role="img", aria_label=self.title)
        caption = element("figcaption", self.title)
        return holding(element("figure", caption, place, data), (self,))

    def save(self, path: Path | str) -> Path:
        """Write it to a file: .svg, .png or .pdf; the same figure gives the same bytes.

        Raises:
            ValueError: If the ending of the name is not that of a format.
        """
        out = Path(path)
        if out.suffix not in FORMATS:
            raise ValueError(f"{out}: expected a name that ends in {', '.join(FORMATS)}")
        import vl_convert

        spec = json.loads(_on_paper({**self.spec, "width": 460, "title": self._heading()}))
        look = json.loads(_on_paper({**CONFIG, "background": "white", "font": "sans-serif"}))
        closed: dict[str, Any] = {"vl_version": _vegalite_version(), "config": look}
        closed["allowed_base_urls"] = []  # a spec has its data with it, and fetches nothing
        if out.suffix == ".svg":
            made = vl_convert.vegalite_to_svg(spec, **closed).encode()
        elif out.suffix == ".png":
            made = vl_convert.vegalite_to_png(spec, scale=2, **closed)
        else:
            made = vl_convert.vegalite_to_pdf(spec, **closed)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, made)
        return out

    def _heading(self) -> dict[str, Any]:
        style = {"anchor": "start", "color": INK, "fontSize": 13, "offset": 10}
        return {"text": _wrapped(self.title), **style}


def figure(name: str, title: str, chart: Any, rows: Mapping[str, Sequence[Row]]) -> Figure:
    """Make a figure of an Altair chart and its rows, by the names that the chart has for them.

    Altair checks the chart; rows of plain numbers and texts need no check, and there are many.
    """
    spec = chart.to_dict(validate=True)
    spec.pop("config", None)
    spec.pop("$schema", None)
    spec["datasets"] = {key: [_plain_row(row) for row in found] for key, found in rows.items()}
    return Figure(name, title, spec)


def element_of_data(value: Any, **attributes: str) -> Html:
    """Write data into a page as JSON that no text in it can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return element("script", Html(text), type="application/json", **attributes)


def scripts() -> list[Html]:
    """Return what draws the charts of a page, in order; the texts of script elements."""
    return [Html(bundle()), Html(STARTER)]


def config_element() -> Html:
    """Return the look of all charts of a page."""
    return element_of_data(CONFIG, id="chart-config")


@lru_cache(maxsize=1)
def bundle() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed as one text."""
    import vl_convert

    made = vl_convert.javascript_bundle(
        "window.embedChart = vegaEmbed;", vl_version=_vegalite_version()
    )
    # In a script element these would end it, or change how it is read.
    made = re.sub(r"</(script)", r"<\\/\1", made, flags=re.IGNORECASE)
    # A closure of its own keeps the many short names of the bundle off the page.
    return f"(() => {{{made.replace('<!--', '<' + chr(92) + '!--')}}})();"


def hash_of(script: str) -> str:
    """Return the source expression by which a Content-Security-Policy knows a script."""
    found = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(found).decode()}'"


def save_all(page: Html, folder: Path) -> list[Path]:
    """Write every chart of a page as PNG and SVG."""
    return [
        one.save(folder / f"{one.name}{ending}")
        for one in page.figures
        for ending in (".png", ".svg")
    ]


def _plain_row(row: Row) -> Row:
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """Return a value that strict JSON has: few digits, null in place of what is not finite."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _on_paper(value: Any) -> str:
    """Write real colours for the variables of the style sheet."""
    text = json.dumps(value, allow_nan=False)
    return re.sub(r"var\(--(\w+)\)", lambda found: PAPER.get(found[1], found[0]), text)


@lru_cache(maxsize=1)
def _vegalite_version() -> str:
    """Return the newest version of Vega-Lite that is here and that Altair writes for."""
    import altair
    import vl_convert

    written = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known: list[str] = vl_convert.get_vegalite_versions()
    return written if written in known else known[-1]


def _wrapped(title: str, width: int = 66) -> list[str]:
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
