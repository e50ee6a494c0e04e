"""Figures on plain arrays: drawn into a page, or saved to a file as SVG, PNG or PDF.

A figure is a function that paints with the colours it is given: marks of the style sheet on a page,
real ones in a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.report.charts import GAIN, INK, LINE, LOOK, LOSS, Array, Html, draw, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".svg", ".png", ".pdf")
_POINTS = 200
Curve = tuple[str, Array, Array]


@dataclass(frozen=True)
class Colours:
    """What a figure is painted with."""

    ink: str
    line: str
    gain: str
    loss: str


PAGE = Colours(INK, LINE, GAIN, LOSS)
PAPER = Colours("#1b1f24", "#cfd4da", "#1668a8", "#c2570c")


@dataclass(frozen=True)
class Figure:
    """A title, and how to paint what is below it."""

    title: str
    paint: Callable[["Axes", Colours], None]
    height: float = 2.7

    def show(self, key: str) -> Html:
        """Draw it into a page; `key` keeps its ids apart from those of other charts."""
        return draw(key, self.title, lambda axes: self.paint(axes, PAGE), height=self.height)

    def save(self, path: Path | str) -> Path:
        """Write it to a file; the same figure gives the same bytes.

        Raises:
            ValueError: If the ending of the name is not that of a format.
        """
        out = Path(path)
        if out.suffix not in _FORMATS:
            raise ValueError(f"{out}: expected a name that ends in {', '.join(_FORMATS)}")
        import matplotlib
        from matplotlib.figure import Figure as Drawing

        real = ((INK, PAPER.ink), (LINE, PAPER.line))
        marked = {k: to for k, v in LOOK.items() for mark, to in real if v == mark}
        look: Any = {**LOOK, **marked, "svg.hashsalt": self.title}
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[out.suffix]
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(look)
            drawing = Drawing(figsize=(4.6, self.height + 0.3), layout="constrained")
            axes = drawing.add_subplot()
            self.paint(axes, PAPER)
            axes.set_title(self.title, fontsize=9.5, loc="left")
            out.parent.mkdir(parents=True, exist_ok=True)
            drawing.savefig(out, dpi=200, metadata=dated)
        return out


def trade_off(
    title: str, *, alarms: Array, misses: Array, marks: Array, approximation: Array | None = None
) -> Figure:
    """Show the least misses by false alarms, and guessing, 1 - alpha.

    Args:
        title: Above it.
        alarms: Type I errors, ascending.
        misses: The least type II errors at these; no attack gets below.
        marks: Points of the curve to point out, (n, 2).
        approximation: An approximation of the curve at the same alarms, which bounds nothing.
    """

    def paint(axes: "Axes", colours: Colours) -> None:
        axes.fill_between(alarms, 0, misses, color=colours.gain, alpha=0.13, linewidth=0)
        axes.plot(alarms, misses, color=colours.gain, label="best possible attack")
        if approximation is not None:
            told = "approximation, not a bound"
            axes.plot(alarms, approximation, "--", color=colours.loss, linewidth=1.2, label=told)
        axes.plot([0, 1], [1, 0], ":", color=colours.ink, linewidth=0.8, label="guessing")
        axes.plot(marks[:, 0], marks[:, 1], "o", color=colours.gain, markersize=4)
        axes.set(xlabel="false positives", ylabel="clients missed, f", xlim=(0, 1), ylim=(0, 1.02))
        axes.text(0.04, 0.05, "out of reach", color=colours.gain)
        axes.legend(loc="upper right")

    return Figure(title, paint)


def spending(title: str, *, rounds: Sequence[int], epsilons: Sequence[float]) -> Figure:
    """Show epsilon against the rounds done."""
    from matplotlib.ticker import MaxNLocator

    def paint(axes: "Axes", colours: Colours) -> None:
        axes.plot([0, *rounds], [0.0, *epsilons], "-o", color=colours.gain, markersize=3)
        axes.set(xlabel="rounds done", ylabel="epsilon", xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))

    return Figure(title, paint)


def loss_and_epsilon(
    title: str,
    *,
    curves: Mapping[str, tuple[Array, Array]],
    spent: tuple[Sequence[int], Sequence[float]],
    metric: str = "loss",
) -> Figure:
    """Show a metric of every round, and what was spent by then.

    Args:
        title: Above it.
        curves: By name (training loss, test loss, ...): rounds, and the metric after each.
        spent: Rounds, and epsilon after each of them; infinite ones are not drawn.
        metric: What the left axis is called. It is not covered by epsilon.
    """
    from matplotlib.ticker import MaxNLocator

    known = [(r, e) for r, e in zip(*spent, strict=True) if np.isfinite(e)]

    def paint(axes: "Axes", colours: Colours) -> None:
        drawn = []
        styles = [(s, c) for c in (colours.gain, colours.ink) for s in ("-", "--", ":", "-.")]
        for number, (x, y) in enumerate(curves.values()):
            style, color = styles[number % len(styles)]
            kept = thin(len(x), _POINTS)
            drawn += axes.plot(x[kept], y[kept], style, color=color)
        axes.set(xlabel="rounds done", ylabel=f"{metric} (not private)", xlim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        names = [_plain(name) for name in curves]
        if known:
            right = axes.twinx()
            right.spines["right"].set_visible(True)
            right.grid(visible=False)
            steps = np.array([(0, 0.0), *known])
            drawn += right.plot(steps[:, 0], steps[:, 1], color=colours.loss, linewidth=1.2)
            right.set(ylabel="epsilon spent", ylim=(0, None))
            names.append("epsilon")
        legend = axes.figure.legend(drawn, names, loc="outside lower right", ncols=3)
        for text in legend.get_texts():
            text.set_parse_math(False)

    return Figure(title, paint, height=3.0)


def reliability(title: str, curves: Sequence[Curve]) -> Figure:
    """Show how often answers are right by how sure the models are of them.

    Args:
        title: Above it.
        curves: Names, mean confidences and shares right of the bins that are not empty.
    """

    def paint(axes: "Axes", colours: Colours) -> None:
        axes.plot([0, 1], [0, 1], ":", color=colours.ink, linewidth=0.8)
        drawn = []
        hues = (colours.gain, colours.loss, colours.ink)
        for number, (_, x, y) in enumerate(curves):
            style = ("-", "--", "-.", ":")[number // 3 % 4]
            color = hues[number % 3]
            drawn += axes.plot(x, y, style, color=color, marker="o", markersize=3)
        axes.set(xlabel="confidence", ylabel="share right", xlim=(0, 1.02), ylim=(0, 1.02))
        names = [_plain(name) for name, _, _ in curves]
        legend = axes.figure.legend(drawn, names, loc="outside lower right", ncols=2)
        for text in legend.get_texts():
            text.set_parse_math(False)

    return Figure(title, paint, height=2.7 + 0.1 * len(curves))


def _plain(name: str) -> str:
    """Fit a name into a legend: matplotlib leaves out those with "_" first."""
    return name.encode("ascii", "replace").decode().lstrip("_")
