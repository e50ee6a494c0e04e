"""How runs came to their metrics, round by round: a section of a report.

The metrics are those of test rows after each round, without noise; nothing of them is released.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.report import charts, figures
from coterie.report.attack import spent_by_round
from coterie.report.charts import GAIN, INK, LOSS, Array, Html, element, numbers, short, table, thin
from coterie.report.figures import Figure
from coterie.report.finished import FinishedRun, read_finished
from coterie.scores import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[str, Array, Array]

_POINTS = 2000
"""Points drawn on the whole page, shared by its runs."""
_LOSSES = {"train_loss": "training loss", "test_loss": "test loss"}
_LOSS_FIGURES = 4
"""Runs whose losses are drawn on a page: a figure each."""
_STYLES = [(style, color) for style in ("-", "--", ":", "-.") for color in (GAIN, LOSS, INK)]
_WATCHED = (
    "The metric on test rows after each round. It is not covered by epsilon: a number of rounds "
    "that is chosen by it is tuned on these rows."
)


def show_history(runs: Sequence[FinishedRun]) -> Html:
    """Show all runs that kept a history together; nothing where none did."""
    kept = [run for run in runs if len(run.history.get("round", ()))]
    if not kept:
        return Html("")
    drawn: list[str] = []
    for number, scored in enumerate(dict.fromkeys(run.scored for run in kept)):
        together = [run for run in kept if run.scored == scored]
        for name, along in (("round", "rounds done"), ("seconds", "virtual seconds")):
            lines = [_line(run, name, _POINTS // len(kept)) for run in together]
            lines = [line for line in lines if len(line[1])]
            title = f"{scored}, by round" if name == "round" else f"{scored}, against {along}"
            if lines and charts.can_draw():
                drawn.append(draw_lines(f"history{number}-{name}", title, along, lines))
    told_losses = [run for run in kept if run.shares and losses_of(run)]
    if charts.can_draw():
        for number, run in enumerate(told_losses[:_LOSS_FIGURES]):
            drawn.append(draw_losses(run).show(f"losses{number}"))
    own = [key for key in TITLES if any(np.isfinite(_last(run, key)) for run in kept)]
    head = ["run", "rounds", "clients that answered, mean", "metric after the last"]
    head += [f"{TITLES[key]} after the last" for key in own]
    head += ["virtual seconds"]
    told = numbers(table(head, [_row(run, own) for run in kept]))
    parts = [element("h2", "Round by round"), element("p", _WATCHED, class_="note")]
    return element("section", *parts, element("div", *drawn, class_="charts"), told)


def losses_of(run: FinishedRun) -> dict[str, tuple[Array, Array]]:
    """Give the losses that a run kept, by name: rounds, and the loss after each."""
    found = {}
    for key, name in _LOSSES.items():
        if key in run.history:
            x, y = run.history["round"], run.history[key]
            known = np.isfinite(x) & np.isfinite(y)
            if known.any():
                found[name] = (x[known], y[known])
    return found


def draw_losses(run: FinishedRun) -> Figure:
    """Give the losses of every round of a run beside the epsilon spent by then, as a figure."""
    spent = spent_by_round(run.guarantee) if run.private else ((), ())
    title = f"{run.label}: loss and epsilon by round"
    return figures.loss_and_epsilon(title, curves=losses_of(run), spent=spent)


def save_losses(folder: Path | str, path: Path | str) -> Path:
    """Write losses and epsilon by round of a finished run to a file: .svg, .png or .pdf.

    Raises:
        ValueError: If the run kept no losses.
    """
    (run,) = read_finished([Path(folder)])
    if not losses_of(run):
        raise ValueError(f"{folder} kept no losses: run it with --history, into a new folder")
    return draw_losses(run).save(path)


def draw_lines(key: str, title: str, along: str, lines: Sequence[Line]) -> Html:
    """Draw one line a run; a metric that spans much is drawn on a scale of factors."""
    shown = np.concatenate([y for _, _, y in lines])
    low, high = float(shown.min()), float(shown.max())

    def paint(axes: "Axes") -> None:
        drawn = []
        for number, (_, x, y) in enumerate(lines):
            style, color = _STYLES[number % len(_STYLES)]
            mark = "o" if len(x) < 30 else ""
            drawn += axes.plot(x, y, style, color=color, marker=mark, markersize=3)
        axes.set(xlabel=along, xlim=(0, None))
        if low > 0 and high / low > 30:
            axes.set(yscale="log")
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
        if len(lines) > 1:
            # matplotlib takes no other characters for granted, and leaves out names with "_" first.
            plain = [name.encode("ascii", "replace").decode().lstrip("_") for name, _, _ in lines]
            legend = axes.figure.legend(drawn, plain, loc="outside lower right", ncols=2)
            for text in legend.get_texts():
                text.set_parse_math(False)

    return charts.draw(key, title, paint, height=2.7 + 0.1 * len(lines))


def _line(run: FinishedRun, name: str, points: int) -> Line:
    x, y = run.history[name], run.history["value"]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    kept = thin(len(x), max(60, points))
    return run.label, x[kept], y[kept]


def _row(run: FinishedRun, own: Sequence[str]) -> list[str]:
    beside = [_last(run, key) for key in (*own, "seconds")]
    return [
        run.label,
        f"{_last(run, 'round'):.0f}",
        short(float(run.history["answered"].mean())),
        short(_last(run, "value")),
        *(short(value) if np.isfinite(value) else "\u2013" for value in beside),
    ]


def _last(run: FinishedRun, name: str) -> float:
    """Give what a column ends with; not-a-number where there is no such column."""
    return float(run.history[name][-1]) if name in run.history else math.nan
