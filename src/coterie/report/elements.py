"""The parts of a page: elements that escape what they hold, tables, and numbers in words.

An element knows the charts that lie in it, so that a page can be had as a page and its charts as
files, and neither is parsed to make the other.
"""

import html
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from coterie.report.charts import Figure

Array = NDArray[np.float64]

DASH = "\u2013"
_NO_CHARTS = "altair is not installed: `pip install coterie[report]` draws the charts."


class Html(str):
    """Text that is HTML already; any other text is escaped on its way into an element.

    Attributes:
        figures: The charts that lie in it, in order.
    """

    figures: tuple["Figure", ...] = ()


def element(name: str, *children: str, **attributes: str) -> Html:
    """Build an element; `class_` and `data_label` stand for `class` and `data-label`.

    >>> element("p", "1 < 2, ", element("b", "surely"), class_="note")
    '<p class="note">1 &lt; 2, <b>surely</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    inside = join(*children)
    if name == "input":  # has no end
        return Html(f"<{name}{written}>")
    return holding(f"<{name}{written}>{inside}</{name}>", inside.figures)


def join(*children: str) -> Html:
    """Put texts and elements one after another, escaping the texts."""
    text = "".join(c if isinstance(c, Html) else html.escape(c) for c in children)
    return holding(text, tuple(f for c in children for f in getattr(c, "figures", ())))


def holding(text: str, figures: "tuple[Figure, ...]") -> Html:
    """Mark text as HTML that holds these charts."""
    found = Html(text)
    found.figures = figures
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, class_: str = "small") -> Html:
    """Build a table whose rows are named by their first cell."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(
                element("td", cell, **({"data_label": name} if "cards" in class_.split() else {}))
                for name, cell in zip(head[1:], row[1:], strict=True)
            ),
        )
        for row in rows
    )
    made = element("table", element("thead", top), element("tbody", *body), class_=class_)
    # A table that is wider than a narrow screen moves by itself, and not the page with it.
    return element("div", made, class_="scroll")


def can_draw() -> bool:
    """Return whether the extra `report` is installed."""
    try:
        return find_spec("altair") is not None and find_spec("vl_convert") is not None
    except ValueError:  # blocked: its name stands for nothing
        return False


def numbers(*tables: str) -> Html:
    """Put tables of what is drawn behind a click; in the open where nothing can be drawn."""
    if can_draw():
        return element("details", element("summary", "The same in numbers"), *tables)
    return join(element("p", _NO_CHARTS, class_="note"), *tables)


def side_by_side(*drawn: str, wide: bool = False) -> Html:
    """Lay charts out in a grid; nothing where there are none."""
    kept = [one for one in drawn if one]
    if not kept:
        return Html("")
    return element("div", *kept, class_="charts wide" if wide or len(kept) == 1 else "charts")


def short(value: float) -> str:
    """Write a number with three digits."""
    return "not a number" if math.isnan(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """Write a share in whole per cent."""
    return f"{100 * share:.0f} %"


def listed(labels: Sequence[str], most: int = 6) -> str:
    """Name a few things, and count the others.

    >>> listed(["a", "b"]), listed(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    if len(labels) <= most:
        return ", ".join(labels)
    return f"{', '.join(labels[: most - 1])} and {len(labels) - most + 1} more"


def thin(count: int, points: int) -> NDArray[np.int64]:
    """Choose at most `points` places out of so many, evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, points)).round().astype(np.int64))


def axis_bound(values: Array) -> float:
    """Choose where an axis ends: at the largest value, unless a few lie far from all others."""
    sizes = np.abs(values)
    largest, usual = float(sizes.max()), 1.5 * float(np.quantile(sizes, 0.98))
    return usual if 0 < usual < largest / 2 else largest
