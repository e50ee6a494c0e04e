"""The results of a report: the table of runs, and what has to be read with it."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from coterie.privacy.words import round_up
from coterie.report import figures
from coterie.report.elements import (
    DASH,
    Html,
    can_draw,
    element,
    join,
    listed,
    percent,
    short,
    side_by_side,
    table,
)
from coterie.report.finished import FinishedRun
from coterie.report.frontier import show_frontier
from coterie.report.groups import APART, Group, group, rows_of
from coterie.scores import TITLES

SIMULATION = "SIMULATION: known seed, protects nobody"
_UNDEFINED = {
    "auc": "test rows of both classes",
    "balanced_accuracy": "test rows of two classes",
    "r2": "test targets that differ",
}


def show_results(runs: Sequence[FinishedRun]) -> Html:
    """Show how good every run is beside learning alone, and at what epsilon."""
    named = {run.scored for run in runs}
    scored = named.pop() if len(named) == 1 else ""
    groups = rows_of(runs)
    together = len(runs) > APART
    own = [key for key in TITLES if any(run.result.get(key) is not None for run in runs)]
    head = ["method", *(["runs"] if together else []), scored or "test metric", "alone"]
    head += ["better off than alone", *(f"test {TITLES[key]}" for key in own)]
    head += ["epsilon", "delta", "relation", "rounds"]
    rows = []
    for one in groups:
        cells = _row(one, "" if scored else f" {one.first.result['metric']}", own)
        rows.append([cells[0], str(len(one.runs)), *cells[1:]] if together else cells)
    parts: list[str] = [element("h2", "Results", id="results"), table(head, rows, class_="cards")]
    parts += [element("p", caution, class_="note") for caution in _cautions(runs)]
    if len(groups) > 1 and scored and can_draw():
        parts.append(side_by_side(_drawn(groups, scored), wide=len(groups) > APART))
    parts.append(show_frontier(runs))
    return element("section", *parts)


def _drawn(groups: Sequence[Group], scored: str) -> Html:
    made = figures.scores(
        "scores",
        f"{scored}, with two standard errors",
        labels=[one.label for one in groups],
        values=[one.mean("value") for one in groups],
        errors=[one.error("value", "standard_error") for one in groups],
        alone=[one.mean("local_value") for one in groups],
    )
    return made.show()


def _row(one: Group, metric: str, own: Sequence[str]) -> list[str]:
    run, result, planned = one.first, one.first.result, len(one.first.guarantee.events)
    name: str = one.label
    if any(run.result["simulation"] for run in one.runs):
        name = join(name, Html("<br>"), element("span", SIMULATION, class_="badge"))
    share, alone = one.mean("share_better_than_local"), one.mean("local_value")
    epsilon: str = f"{round_up(run.epsilon)}" if run.shares else "0 (nothing is released)"
    if run.shares and not run.private:
        epsilon = element("span", "NOT PRIVATE (inf)", class_="bad")
    rounds = result["rounds"]
    return [
        name,
        _plus_minus(one, "value", "standard_error") + metric,
        DASH if math.isnan(alone) else short(alone),
        "learns alone" if not run.shares else DASH if math.isnan(share) else percent(share),
        *(DASH if result.get(key) is None else _own(one, key) for key in own),
        epsilon,
        f"{run.guarantee.delta:.3g}",
        run.guarantee.relation,
        str(rounds) if rounds == planned else f"{rounds} of {planned}",
    ]


def _own(one: Group, key: str) -> str:
    """Give a mean over clients; the median of an R^2 that a few clients have ruined."""
    run = one.first
    if key == "r2" and one.mean(key) < -1 and key in run.metrics:
        return f"{short(float(np.nanmedian(run.column(key))))} (median)"
    return _plus_minus(one, key, f"{key}_standard_error")


def _plus_minus(one: Group, key: str, error: str) -> str:
    told, away = short(one.mean(key)), one.error(key, error)
    return told if math.isnan(away) else f"{told} \u00b1 {short(away)}"


def _cautions(runs: Sequence[FinishedRun]) -> Iterator[str]:
    over = "runs that differ in their seed alone" if len(runs) > APART else "clients"
    yield f"\u00b1 is one standard error over {over}. Metrics are not covered by epsilon."
    if _differ(runs):
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
        named = "All runs" if len(labels) == len(runs) > APART else listed(labels)
        yield f"{named}: {caution}"


def _differ(runs: Sequence[FinishedRun]) -> bool:
    """Say whether methods saw other rows; seeds may come with splits of their own."""
    if len(runs) <= APART:
        return any(run.data != runs[0].data for run in runs)
    seen = [sorted({repr(run.data) for run in one.runs}) for one in group(runs)]
    return any(choice != seen[0] for choice in seen)


def _of_one(run: FinishedRun) -> Iterator[str]:
    yield from run.caveats
    if run.result.get("tuning", "").startswith(("NOT COVERED", "CHARGED")):
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
