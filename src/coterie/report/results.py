"""The results of a report: the table of runs, and what has to be read with it."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from coterie.privacy.words import round_up
from coterie.report import charts
from coterie.report.charts import Html, element, join, percent, short, table
from coterie.report.finished import FinishedRun
from coterie.scores import TITLES

SIMULATION = "SIMULATION: known seed, protects nobody"
_DASH = "\u2013"
_UNDEFINED = {
    "auc": "test rows of both classes",
    "balanced_accuracy": "test rows of two classes",
    "r2": "test targets that differ",
}


def show_results(runs: Sequence[FinishedRun]) -> Html:
    """Show how good every run is beside learning alone, and at what epsilon."""
    named = {run.scored for run in runs}
    scored = named.pop() if len(named) == 1 else ""
    own = [key for key in TITLES if any(run.result.get(key) is not None for run in runs)]
    head = ["method", scored or "test metric", "alone", "better off than alone"]
    head += [f"test {TITLES[key]}" for key in own]
    head += ["epsilon", "delta", "relation", "rounds"]
    rows = [_row(run, "" if scored else f" {run.result['metric']}", own) for run in runs]
    parts: list[str] = [element("h2", "Results"), table(head, rows, class_="cards")]
    parts += [element("p", caution, class_="note") for caution in _cautions(runs)]
    if len(runs) > 1 and scored and charts.can_draw():
        chart = charts.scores(
            "scores",
            f"{scored}, with two standard errors",
            labels=[run.label for run in runs],
            values=np.array([run.number("value") for run in runs]),
            errors=np.nan_to_num([run.number("standard_error") for run in runs]),
            alone=np.array([run.number("local_value") for run in runs]),
        )
        parts.append(element("div", chart, class_="charts"))
    return element("section", *parts)


def _row(run: FinishedRun, metric: str, own: Sequence[str]) -> list[str]:
    result, planned = run.result, len(run.guarantee.events)
    name: str = run.label
    if result["simulation"]:
        name = join(name, Html("<br>"), element("span", SIMULATION, class_="badge"))
    share = run.number("share_better_than_local")
    epsilon: str = f"{round_up(run.epsilon)}" if run.shares else "0 (nothing is released)"
    if run.shares and not run.private:
        epsilon = element("span", "NOT PRIVATE (inf)", class_="bad")
    rounds = result["rounds"]
    return [
        name,
        _plus_minus(run, "value", "standard_error") + metric,
        _DASH if result.get("local_value") is None else short(run.number("local_value")),
        "learns alone" if not run.shares else _DASH if math.isnan(share) else percent(share),
        *(_DASH if result.get(key) is None else _own(run, key) for key in own),
        epsilon,
        f"{run.guarantee.delta:.3g}",
        run.guarantee.relation,
        str(rounds) if rounds == planned else f"{rounds} of {planned}",
    ]


def _own(run: FinishedRun, key: str) -> str:
    """Give a mean over clients; the median of an R^2 that a few clients have ruined."""
    if key == "r2" and run.number(key) < -1 and key in run.metrics:
        return f"{short(float(np.nanmedian(run.column(key))))} (median)"
    return _plus_minus(run, key, f"{key}_standard_error")


def _plus_minus(run: FinishedRun, key: str, error: str) -> str:
    told, away = short(run.number(key)), run.number(error)
    return told if math.isnan(away) else f"{told} \u00b1 {short(away)}"


def _cautions(runs: Sequence[FinishedRun]) -> Iterator[str]:
    yield "\u00b1 is one standard error over clients. Metrics are not covered by epsilon."
    if any(run.data != runs[0].data for run in runs):
        yield "These runs differ in data, split or scaling: do not compare their metrics."
    private = [run for run in runs if run.private]
    if len({(run.guarantee.relation, run.guarantee.delta) for run in private}) > 1:
        yield "Epsilons at different relations or deltas cannot be compared."
    if len(private) > 1 and len({run.guarantee.relation for run in private}) == 1:
        spent = sum(run.epsilon for run in private)
        delta = sum(run.guarantee.delta for run in private)
        yield (
            "Each epsilon is of one run. If clients see all private runs on the same data, these "
            f"spend together up to epsilon {round_up(spent)} at delta {delta:.3g}."
        )
    # What is said of several runs in the same words is said once.
    said: dict[str, list[str]] = {}
    for run in runs:
        for caution in _of_one(run):
            said.setdefault(caution, []).append(run.label)
    for caution, labels in said.items():
        yield f"{', '.join(labels)}: {caution}"


def _of_one(run: FinishedRun) -> Iterator[str]:
    yield from run.caveats
    if run.result.get("tuning", "").startswith("NOT COVERED"):
        yield f"tuning is {run.result['tuning']}."
    if (claimed := run.number("epsilon")) < run.epsilon * 0.999 - 1e-9:
        yield (
            f"result.json says epsilon {claimed:.4g}, but its guarantee.json "
            f"amounts to {round_up(run.epsilon)}, which is shown."
        )
    rounds, planned = run.result["rounds"], len(run.guarantee.events)
    if rounds != planned:
        yield f"ended after {rounds} of {planned} planned rounds; the guarantee is of all of them."
    for key, title in TITLES.items():
        if left := run.result.get(f"{key}_left_out"):
            told = f"{left} clients without {_UNDEFINED[key]}"
            yield f"the {title} is a mean over clients and leaves out {told}."
    yield from run.notices
