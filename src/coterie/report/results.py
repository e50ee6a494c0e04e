"""The results of a report: the table of runs, and what has to be read with it."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from coterie.privacy.guarantee import add_up, round_up
from coterie.report import figures
from coterie.report.deployed import STAYED
from coterie.report.elements import (
    DASH,
    Html,
    can_draw,
    element,
    join,
    percent,
    short,
    side_by_side,
    table,
)
from coterie.report.finished import FinishedRun
from coterie.report.frontier import show_frontier
from coterie.report.groups import APART, Group, are_grouped, group, named, rows_of
from coterie.scores import TITLES

SIMULATION = "SIMULATION: known seed, protects nobody"
_TUNED = "tuning NOT COVERED by epsilon"
_OF_EPSILON: dict[str, Callable[[FinishedRun], str]] = {
    "against": lambda run: run.view if run.private else DASH,
    "delta": lambda run: f"{run.guarantee.delta:.3g}",
    "relation": lambda run: run.guarantee.relation,
}
_UNDEFINED = {
    "auc": "test rows of both classes",
    "balanced_accuracy": "test rows of two classes",
    "r2": "test targets that differ",
}


def show_results(runs: Sequence[FinishedRun], findings: Sequence[str] = ()) -> Html:
    """Show how good every run is beside learning alone, and at what epsilon.

    `findings` are a comparison's own sentences on which differences are larger than noise.
    """
    metrics = {run.scored for run in runs}
    scored = metrics.pop() if len(metrics) == 1 else ""
    groups = rows_of(runs)
    together = are_grouped(runs)
    own = [key for key in TITLES if any(run.result.get(key) is not None for run in runs)]
    known = any(run.is_scored for run in runs)
    head = ["method", *(["runs"] if together else [])]
    head += [scored or "test metric", "alone", "better off than alone"] if known else []
    head += [*(f"test {TITLES[key]}" for key in own)]
    apart = _apart(runs)
    head += ["epsilon", *apart, "rounds"]
    # What is true of all runs is said once, above; in every row it would push columns off a page.
    badges = not all(run.result["simulation"] for run in runs)
    rows = []
    for one in groups:
        metric = one.first.result["metric"] or ""
        cells = _row(one, "" if scored else f" {metric}".rstrip(), own, badges)
        cells = cells if known else [cells[0], *cells[4:]]
        cells[-1:-1] = [of(one.first) for of in apart.values()]
        rows.append([cells[0], str(len(one.runs)), *cells[1:]] if together else cells)
    parts: list[str] = [element("h2", "Results", id="results"), table(head, rows, class_="cards")]
    parts += [element("p", caution, class_="note") for caution in _cautions(runs)]
    parts.append(_show_findings(findings))
    if len(groups) > 1 and scored and all(run.is_scored for run in runs) and can_draw():
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


def _show_findings(findings: Sequence[str]) -> Html:
    """Print sentences; those that are indented are points of the one before them."""
    if not findings:
        return Html("")
    parts: list[str] = [element("h3", "Which differences are larger than noise", id="differences")]
    points: list[Html] = []
    for line in findings:
        if line.startswith("  "):
            points.append(element("li", line.strip()))
            continue
        parts += [element("ul", *points)] if points else []
        points = []
        parts.append(element("p", line))
    return join(*parts, *([element("ul", *points)] if points else []))


def _apart(runs: Sequence[FinishedRun]) -> dict[str, Callable[[FinishedRun], str]]:
    """Return the columns on what epsilon is of that differ; what all share is said below."""
    if len(runs) == 1:
        return dict(_OF_EPSILON)
    private = [run for run in runs if run.private]
    return {name: of for name, of in _OF_EPSILON.items() if len({of(run) for run in private}) > 1}


def _shared_by_all(runs: Sequence[FinishedRun]) -> str:
    """Say of what all epsilons of a table are, where it has no columns for that."""
    private = [run for run in runs if run.private]
    if len(runs) == 1 or not private:
        return ""
    apart = _apart(runs)
    told = [f"{name} {of(private[0])}" for name, of in _OF_EPSILON.items() if name not in apart]
    return f"Every epsilon in the table is {', '.join(told)}." if told else ""


def _row(one: Group, metric: str, own: Sequence[str], badges: bool) -> list[str]:
    run, result, planned = one.first, one.first.result, len(one.first.guarantee.events)
    name: str = one.label
    if badges and any(run.result["simulation"] for run in one.runs):
        name = join(name, Html("<br>"), element("span", SIMULATION, class_="badge"))
    if any("NOT COVERED" in run.result.get("tuning", "") for run in one.runs):
        name = join(name, Html("<br>"), element("span", _TUNED, class_="badge"))
    share, alone = one.mean("share_better_than_local"), one.mean("local_value")
    epsilon: str = f"{round_up(run.epsilon)}" if run.shares else "0 (nothing is released)"
    if run.shares and not run.private:
        epsilon = element("span", "NOT PRIVATE (inf)", class_="bad")
    rounds = result["rounds"]
    return [
        name,
        _plus_minus(one, "value", "standard_error") + metric if run.is_scored else DASH,
        DASH if math.isnan(alone) else short(alone),
        "learns alone" if not run.shares else DASH if math.isnan(share) else percent(share),
        *(DASH if result.get(key) is None else _own(one, key) for key in own),
        epsilon,
        str(rounds) if rounds == planned else f"{rounds} of {planned}",
    ]


def _own(one: Group, key: str) -> str:
    """Return a mean over clients; the median of an R^2 that a few clients have ruined."""
    if any(_is_ruined(run, key) for run in one.runs):
        medians = [np.nanmedian(run.column(key)) for run in one.runs if key in run.metrics]
        return f"{short(float(np.mean(medians)))} (median)"
    return _plus_minus(one, key, f"{key}_standard_error")


def _is_ruined(run: FinishedRun, key: str) -> bool:
    return key == "r2" and run.number(key) < -1 and key in run.metrics


def _plus_minus(one: Group, key: str, error: str) -> str:
    told, away = short(one.mean(key)), one.error(key, error)
    return told if math.isnan(away) else f"{told} \u00b1 {short(away)}"


def _cautions(runs: Sequence[FinishedRun]) -> Iterator[str]:
    several = are_grouped(runs) and any(len(one.runs) > 1 for one in rows_of(runs))
    over = "clients and seeds" if several else "clients"
    if any(run.is_scored for run in runs):
        yield f"\u00b1 is one standard error over {over}. Metrics are not covered by epsilon."
    if away := [run for run in runs if not run.is_scored]:
        yield f"{named(away, runs)}: deployed; {STAYED[0].lower()}{STAYED[1:]}"
    if shared := _shared_by_all(runs):
        yield shared
    if _differ(runs):
        yield "These runs differ in data, split or scaling: do not compare their metrics."
    private = [run for run in runs if run.private]
    if len({(run.guarantee.relation, run.guarantee.delta) for run in private}) > 1:
        yield "Epsilons at different relations or deltas cannot be compared."
    if any(run.selection is not None for run in private):
        yield (
            "Of a run that was chosen privately, epsilon is that of whoever sees it alone; what "
            "other clients have seen of all runs together is in each selection.json, not here."
        )
    elif len(private) > 1 and len({run.guarantee.relation for run in private}) == 1:
        yield _added_up(private)
    yield from _said_once(runs)


def _said_once(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Say what is true of several runs in the same words once, with their names."""
    said: dict[str, list[FinishedRun]] = {}
    for run in runs:
        for caution in _of_one(run):
            said.setdefault(caution, []).append(run)
    for caution, of in said.items():
        who = "All runs" if len(of) == len(runs) > APART else named(of, runs)
        yield f"{who}: {caution}"


def _added_up(private: Sequence[FinishedRun]) -> str:
    """Say what private runs spend together; simulations spend nothing, and protect nobody."""
    if all(run.result["simulation"] for run in private):
        return "Each epsilon is what one run with secret noise would cost; simulations spend none."
    real = [run for run in private if not run.result["simulation"]]
    spent, delta = add_up([run.guarantee for run in real])
    return (
        "Each epsilon is of one run. If clients see all private runs on the same data, these "
        f"spend together up to epsilon {round_up(spent)} at delta {delta:.3g} (against other "
        "clients)."
    )


def _differ(runs: Sequence[FinishedRun]) -> bool:
    """Return whether methods saw other rows; seeds may come with splits of their own."""
    if not are_grouped(runs):
        return any(run.data != runs[0].data for run in runs)
    seen = [sorted({repr(run.data) for run in one.runs}) for one in group(runs)]
    return any(choice != seen[0] for choice in seen)


def _of_one(run: FinishedRun) -> Iterator[str]:
    yield from run.caveats
    if any(word in run.result.get("tuning", "") for word in ("NOT COVERED", "CHARGED")):
        yield f"tuning is {run.result['tuning']}."
    stated = run.guarantee.epsilon if run.selection is None else run.epsilon
    if (claimed := run.number("epsilon")) < stated * 0.999 - 1e-9:
        yield (
            f"result.json says epsilon {claimed:.4g}, but its guarantee.json "
            f"amounts to {round_up(stated)}; what is shown follows from it."
        )
    rounds, planned = run.result["rounds"], len(run.guarantee.events)
    if rounds != planned:
        yield f"ended after {rounds} of {planned} planned rounds; the guarantee is of all of them."
    for key, title in TITLES.items():
        if left := run.result.get(f"{key}_left_out"):
            told = f"{left} clients without {_UNDEFINED[key]}"
            over = "median" if _is_ruined(run, key) else "mean"
            yield f"the {title} is a {over} over clients and leaves out {told}."
    yield from run.notices
