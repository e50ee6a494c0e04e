"""How runs came to their metrics, round by round: a section of a report.

The metrics are those of test rows after each round, without noise; nothing of them is released.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.report import figures
from coterie.report.attack import spent_by_round
from coterie.report.charts import Figure
from coterie.report.elements import (
    DASH,
    Array,
    Html,
    can_draw,
    element,
    numbers,
    short,
    side_by_side,
    table,
    thin,
)
from coterie.report.finished import FinishedRun, read_finished
from coterie.report.groups import one_by_one
from coterie.report.marks import Curve
from coterie.scores import TITLES

_POINTS = 2000
"""Points drawn on the whole page, shared by its runs."""
_LOSSES = {"train_loss": "training loss", "test_loss": "test loss"}
_LOSS_FIGURES = 4
"""Runs whose losses are drawn on a page: a figure each."""
_WATCHED = (
    "The metric on test rows after each round. It is not covered by epsilon: a number of rounds "
    "that is chosen by it is tuned on these rows."
)


def show_history(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """Show all runs that kept a history together; nothing where none did.

    A hidden cohort stays hidden: of runs with a budget nobody is told how many clients answered.
    Without clients nor is when they did, which follows from who was asked.
    """
    kept = [run for run in one_by_one(runs) if len(run.history.get("round", ()))]
    if not kept:
        return Html("")
    drawn: list[str] = []
    for number, scored in enumerate(dict.fromkeys(run.scored for run in kept)):
        together = [run for run in kept if run.scored == scored]
        for name, along in (("round", "rounds done"), ("seconds", "virtual seconds")):
            shown = together if name == "round" else [r for r in together if _timed(r, clients)]
            lines = [_line(run, name, _POINTS // len(kept)) for run in shown]
            lines = [line for line in lines if len(line[1])]
            title = f"{scored}, by round" if name == "round" else f"{scored}, against {along}"
            if lines and can_draw():
                made = figures.lines(
                    f"history-{number + 1}-{name}", title, lines, along=along, up=scored,
                    points=_POINTS,
                )  # fmt: skip
                drawn.append(made.show())
    told_losses = [run for run in kept if run.shares and losses_of(run)]
    if can_draw():
        for number, run in enumerate(told_losses[:_LOSS_FIGURES]):
            drawn.append(draw_losses(run, f"losses-{number + 1}").show())
    own = [key for key in TITLES if any(np.isfinite(_last(run, key)) for run in kept)]
    told = numbers(_ends(kept, own, clients=clients))
    parts = [element("h2", "Round by round", id="rounds"), element("p", _WATCHED, class_="note")]
    return element("section", *parts, side_by_side(*drawn), told)


def losses_of(run: FinishedRun) -> dict[str, tuple[Array, Array]]:
    """Return the losses that a run kept, by name: rounds, and the loss after each."""
    found = {}
    for key, name in _LOSSES.items():
        if key in run.history:
            x, y = run.history["round"], run.history[key]
            known = np.isfinite(x) & np.isfinite(y)
            if known.any():
                found[name] = (x[known], y[known])
    return found


def draw_losses(run: FinishedRun, name: str = "losses") -> Figure:
    """Return the losses of every round of a run beside the epsilon spent by then, as a figure."""
    # The posts of a run that was chosen have no epsilon by round: that of the choice is of all.
    told = run.private and run.selection is None
    spent = spent_by_round(run.guarantee) if told else ((), ())
    title = f"{run.label}: loss and epsilon by round"
    return figures.loss_and_epsilon(name, title, curves=losses_of(run), spent=spent)


def save_losses(folder: Path | str, path: Path | str) -> Path:
    """Write losses and epsilon by round of a finished run to a file: .svg, .png or .pdf.

    Raises:
        ValueError: If the run kept no losses.
    """
    (run,) = read_finished([Path(folder)])
    if not losses_of(run):
        raise ValueError(f"{folder} kept no losses: run it with --history, into a new folder")
    return draw_losses(run).save(path)


def _line(run: FinishedRun, name: str, points: int) -> Curve:
    x, y = run.history[name], run.history["value"]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    kept = thin(len(x), max(60, points))
    return run.label, x[kept], y[kept]


def _timed(run: FinishedRun, clients: bool) -> bool:
    """Return whether a page may tell when the rounds of a run were done."""
    return clients or not run.hides_cohort


def _ends(runs: Sequence[FinishedRun], own: Sequence[str], *, clients: bool) -> Html:
    """Put what the histories end with into a table."""
    counted = not all(run.hides_cohort for run in runs)
    head = ["run", "rounds", *(["clients that answered, mean"] if counted else [])]
    head += ["metric after the last", *(f"{TITLES[key]} after the last" for key in own)]
    rows = []
    for run in runs:
        answered = math.nan if run.hides_cohort else float(np.nanmean(run.history["answered"]))
        seconds = _last(run, "seconds") if _timed(run, clients) else math.nan
        beside = [*([answered] if counted else []), _last(run, "value")]
        beside += [*(_last(run, key) for key in own), seconds]
        told = (short(value) if np.isfinite(value) else DASH for value in beside)
        rows.append([run.label, f"{_last(run, 'round'):.0f}", *told])
    return table([*head, "virtual seconds"], rows)


def _last(run: FinishedRun, name: str) -> float:
    """Return what a column ends with; not-a-number where there is no such column."""
    return float(run.history[name][-1]) if name in run.history else math.nan
