"""The sections of a page as data: paragraphs, tables and charts. The template renders them.

A section leaves out what belongs to a single client where `clients` is false. Metrics are not
covered by epsilon.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.baselines import PROMISE, TITLES, verdicts
from coterie.evaluation.metrics import METRICS, PER_CLIENT
from coterie.privacy.guarantee import (
    COMPARED,
    Guarantee,
    add_up,
    describe_noise,
    is_local,
    reasons,
    round_up,
)
from coterie.privacy.selection import (
    CHOSEN_ONLY,
    FOR_OTHERS,
    THEOREM,
    charged_statement,
    chosen_alone,
)
from coterie.report import charts
from coterie.report.charts import ALARMS, Array, Curve, Figure, Row, axis_bound, can_draw, thin
from coterie.report.read import (
    APART,
    FinishedRun,
    Group,
    are_grouped,
    group,
    named,
    one_by_one,
    rows_of,
)
from coterie.report.tables import (
    DASH,
    SIMULATION,
    Cell,
    Entry,
    Mark,
    Table,
    baselines_table,
    clients_table,
    held_out_table,
    percent,
    results_table,
)

Inline = str | Mark


@dataclass(frozen=True)
class Block:
    """A part of a section; the template renders it by its tag.

    Attributes:
        tag: "text", "heading", "points", "table", "charts", "details", "card" or "formula".
        parts: Text and marks; of a formula epsilon and delta.
        kind: A class of the style sheet.
        table: Of a table.
        figures: Of charts.
        blocks: Inside details and cards.
        list_id: Of details with a list of clients and a search box.
    """

    tag: str
    parts: tuple[Inline, ...] = ()
    kind: str = ""
    table: Table | None = None
    figures: tuple[Figure, ...] = ()
    blocks: tuple["Block", ...] = ()
    list_id: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page with its entry in the menu."""

    id: str
    title: str
    blocks: tuple[Block, ...]


def all_blocks(blocks: Sequence[Block]) -> Iterator[Block]:
    """Return blocks and the blocks inside them, in order."""
    for block in blocks:
        yield block
        yield from all_blocks(block.blocks)


def text(*parts: Inline, kind: str = "") -> Block:
    """Return a paragraph."""
    return Block("text", parts, kind)


def note(said: str) -> Block:
    """Return a paragraph in small print."""
    return text(said, kind="note")


def label(said: str) -> Block:
    """Return a small heading of the block that follows."""
    return text(said, kind="label")


def heading(said: str) -> Block:
    """Return a heading inside a section."""
    return Block("heading", (said,))


def show(table: Table) -> Block:
    """Return a table as a block."""
    return Block("table", table=table)


def grid(titles: Sequence[str], cells: Sequence[Sequence[Cell]], style: str = "small") -> Block:
    """Return a plain table as a block."""
    return show(Table.of(titles, cells, style))


def short(value: float) -> str:
    """Return a number with three digits."""
    return "not a number" if math.isnan(value) else f"{value:.3g}"


def numbers(*blocks: Block) -> tuple[Block, ...]:
    """Return the numbers behind charts: behind a click, or in the open without charts."""
    if can_draw():
        return (Block("details", ("The same in numbers",), blocks=blocks),)
    missing = "Charts need altair: `pip install coterie[report]` installs it."
    return (note(missing), *blocks)


def side_by_side(*figures: Figure | None, wide: bool = False) -> tuple[Block, ...]:
    """Return charts in a grid; nothing where there are none."""
    kept = tuple(one for one in figures if one is not None)
    kind = "wide" if wide or len(kept) == 1 else ""
    return (Block("charts", kind=kind, figures=kept),) if kept else ()


# --- opening


@dataclass(frozen=True)
class Opening:
    """The first screen of a page: the answer, a few numbers, the meaning of epsilon, warnings."""

    title: str
    answer: str
    notes: tuple[str, ...]
    tiles: tuple[tuple[str, str], ...]
    meaning: str
    advice: tuple[str, ...]
    simulation: str
    not_private: str


_STRENGTHS = (
    (1.0, "a strong guarantee"),
    (4.0, "a moderate guarantee"),
    (10.0, "a weak guarantee"),
)


def title_of(runs: Sequence[FinishedRun]) -> str:
    """Return the data sets and numbers of clients of runs."""
    names = dict.fromkeys(
        f"{Path(run.result['data']).name}, {run.result['clients']} clients" for run in runs
    )
    return "; ".join(names) + ", one model per client"


def opening(runs: Sequence[FinishedRun]) -> Opening:
    """Return the first screen, on the best of the private runs."""
    best, several = _best(runs)
    run = best.first
    notes = []
    if several > 1 and run.is_scored:
        kind = "private " if run.private else ""
        of = "groups of runs" if are_grouped(runs) else "runs"
        notes.append(f"This is {best.label}, the best of {several} {kind}{of} by these metrics.")
    bare = named([one for one in runs if one.shares and not one.private], runs)
    return Opening(
        title=title_of(runs),
        answer=f"{_answer(best)}.",
        notes=(*notes, *_best_by_epsilon(runs)),
        tiles=tuple(_tiles(best)),
        meaning=_meaning(run) if run.private else "",
        advice=tuple(_said_by(runs, lambda one: one.advice)),
        simulation=SIMULATION if any(one.result["simulation"] for one in runs) else "",
        not_private=bare,
    )


def _best(runs: Sequence[FinishedRun]) -> tuple[Group, int]:
    """Return the group to report first, and the number of groups it is the best of."""
    groups = rows_of(runs)
    groups = [one for one in groups if one.first.is_scored] or groups
    private = [one for one in groups if one.first.private]
    several = private or [one for one in groups if one.first.shares] or groups
    return min(several, key=lambda one: one.badness), len(several)


def _best_by_epsilon(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Return the best run at each epsilon, where several epsilons have one metric."""
    found: dict[str, list[Group]] = {}
    for one in rows_of(runs):
        if one.first.private and one.first.is_scored:
            found.setdefault(round_up(one.first.epsilon), []).append(one)
    if len(found) < 2 or len({run.scored for run in runs}) > 1:
        return
    said = []
    for epsilon in sorted(found, key=float):
        best = min(found[epsilon], key=lambda one: one.badness)
        said.append(f"{epsilon}: {best.first.name} {short(best.mean('value'))}")
    yield f"Best at each epsilon: {'; '.join(said)}."


def _metric(run: FinishedRun) -> str:
    metric = METRICS.get(run.result["metric"])
    return f"test {run.result['metric'] if metric is None else metric.title}"


def _answer(best: Group) -> str:
    run = best.first
    lead = "Without privacy" if run.shares else "Without sharing anything"
    lead = f"At epsilon {round_up(run.epsilon)}" if run.private else lead
    if not run.is_scored:
        sites = run.deployment.get("sites")
        return (
            f"{lead}, {run.name} trained a model for each of {run.guarantee.clients} clients at "
            f"{sites} {'site' if sites == 1 else 'sites'}; models and scores stay at the sites"
        )
    lead += f" ({run.view})" if run.private and run.selection is not None else ""
    answer = f"{lead}, {run.name} has {_metric(run)} {short(best.mean('value'))}"
    local, share = best.mean("local_value"), best.mean("share_better_than_local")
    if run.shares and not math.isnan(local):
        answer += f"; local training has {short(local)}"
    if run.shares and not math.isnan(share):
        answer += f". {percent(share)} of clients are better than with local training"
        answer += _ties(best, share)
    return answer


def _ties(best: Group, share: float) -> str:
    """Return the share of clients that are worse, where some tie."""
    worse = float(np.mean([run.share_worse_than_local for run in best.runs]))
    if math.isnan(worse) or share + worse > 0.995:
        return ""
    return f", {percent(worse)} are worse, the rest are equal"


def _tiles(best: Group) -> Iterator[tuple[str, str]]:
    """Return the few numbers to remember."""
    run = best.first
    share, local = best.mean("share_better_than_local"), best.mean("local_value")
    spent = round_up(run.epsilon) if run.private else "0" if not run.shares else "\u221e"
    against = f", against {run.view}" if run.private else ""
    yield spent, f"epsilon at delta {run.guarantee.delta:.3g}{against}"
    if run.is_scored:
        metric = METRICS.get(run.result["metric"])
        other = "" if math.isnan(local) or not run.shares else f"; local {short(local)}"
        way = "" if metric is None else f" ({metric.direction})"
        yield short(best.mean("value")), f"{_metric(run)}{other}{way}"
    if run.deployment:
        yield str(run.deployment.get("sites")), "sites, which keep their clients' models"
    if run.shares and run.is_scored:
        yield percent(share), "of clients are better than with local training"
    if run.shares:
        clients = run.guarantee.clients if run.deployment else run.result["clients"]
        yield str(run.result["rounds"]), f"rounds with {clients} clients"


def _meaning(run: FinishedRun) -> str:
    """Return the meaning of epsilon as text."""
    epsilon, delta = run.epsilon, run.guarantee.delta
    strength = next((said for most, said in _STRENGTHS if epsilon <= most + 1e-9), "")
    factor = f"{round_up(math.exp(epsilon), 3)} times" if epsilon < 30 else "any number of times"
    alone = run.selection is not None
    who = "an adversary who sees only this run" if alone else "the other clients together"
    said = (
        f"any event that {who} can observe is at most {factor} as likely with a client's data as "
        f"{COMPARED[run.guarantee.relation]}"
    )
    said += f" (except with probability {delta:.3g}). " if delta else ". "
    said += f"This is {strength}." if strength else "At this size the guarantee is very weak."
    if alone:
        said += f" It does not hold against the other clients: {FOR_OTHERS}."
    if run.guarantee.simulation:
        said += " It holds for secret noise; the noise of a simulation is known."
    return said


def _said_by(
    runs: Sequence[FinishedRun], of: Callable[[FinishedRun], Sequence[str] | Iterator[str]]
) -> Iterator[str]:
    """Return each sentence once, with the names of the runs that it is about."""
    said: dict[str, list[FinishedRun]] = {}
    for run in runs:
        for sentence in of(run):
            said.setdefault(sentence, []).append(run)
    for sentence, some in said.items():
        if len(runs) == 1:
            yield sentence
        else:
            who = "All runs" if len(some) == len(runs) > APART else named(some, runs)
            yield f"{who}: {sentence}"


# --- results


def results(runs: Sequence[FinishedRun], findings: Sequence[str] = ()) -> Section:
    """Return the table of runs with what to read with it, and the frontier.

    `findings` are a comparison's sentences on which differences exceed the noise.
    """
    groups, together = rows_of(runs), are_grouped(runs)
    entries = [Entry.of_group(one) for one in groups]
    # A note on all runs is printed once, above the table.
    badges = not all(run.result["simulation"] for run in runs)
    table = results_table(entries, groups=together, badges=badges)
    blocks: list[Block] = [show(table), *map(note, table.notes), *map(note, _cautions(runs))]
    blocks += _finding_blocks(findings)
    scored = {run.scored for run in runs}
    if len(groups) > 1 and len(scored) == 1 and all(r.is_scored for r in runs) and can_draw():
        blocks += side_by_side(_scores_chart(groups, scored.pop()), wide=len(groups) > APART)
    blocks += _frontier(runs)
    return Section("results", "Results", tuple(blocks))


def _scores_chart(groups: Sequence[Group], scored: str) -> Figure:
    return charts.scores(
        "scores",
        f"{scored}, with two standard errors",
        labels=[one.label for one in groups],
        values=[one.mean("value") for one in groups],
        errors=[one.error("value", "standard_error") for one in groups],
        local=[one.mean("local_value") for one in groups],
    )


def _finding_blocks(findings: Sequence[str]) -> Iterator[Block]:
    """Return paragraphs, with indented sentences as points of the one before them."""
    if findings:
        yield heading("Which differences exceed the noise")
    points: list[str] = []
    for line in (*findings, ""):
        if line.startswith("  "):
            points.append(line.strip())
            continue
        if points:
            yield Block("points", tuple(points))
            points = []
        if line:
            yield text(line)


def _cautions(runs: Sequence[FinishedRun]) -> Iterator[str]:
    if away := [run for run in runs if not run.is_scored]:
        yield f"{named(away, runs)}: {STAYED}"
    if _differ(runs):
        yield "These runs differ in data, split or scaling: do not compare their metrics."
    private = [run for run in runs if run.private]
    if len({(run.guarantee.relation, run.guarantee.delta) for run in private}) > 1:
        yield "Epsilons at different relations or deltas cannot be compared."
    if any(run.selection is not None for run in private):
        yield (
            "The epsilon of a privately selected run holds against an adversary who sees only that "
            "run. Epsilon against the other clients, for all runs, is in each selection.json."
        )
    elif len(private) > 1 and len({run.guarantee.relation for run in private}) == 1:
        yield _added_up(private)
    yield from _said_by(runs, _of_one)


def _added_up(private: Sequence[FinishedRun]) -> str:
    """Return what private runs spend together; simulations spend nothing."""
    if all(run.result["simulation"] for run in private):
        return "Each epsilon is the cost of one run with secret noise; simulations spend nothing."
    real = [run for run in private if not run.result["simulation"]]
    spent, delta = add_up([run.guarantee for run in real])
    return (
        "Each epsilon is for one run. Against other clients who see all private runs on the same "
        f"data, the runs spend together at most epsilon {round_up(spent)} at delta {delta:.3g}."
    )


def _differ(runs: Sequence[FinishedRun]) -> bool:
    """Return whether methods used different rows; each seed may have its own split."""
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
            f"result.json has epsilon {claimed:.4g}, but its guarantee.json implies "
            f"{round_up(stated)}, which is shown."
        )
    rounds, planned = run.result["rounds"], len(run.guarantee.events)
    if rounds != planned:
        yield f"ended after {rounds} of {planned} planned rounds; the guarantee covers all of them."
    yield from run.notices


_METHODS = 8
_FRONTIER = (
    "Further left is more private. Bars are one standard error, over clients, and over seeds where "
    "there are several; lines within each other's bars may differ by chance."
)


def _frontier(runs: Sequence[FinishedRun]) -> Iterator[Block]:
    """Return the metric against epsilon, where runs of one metric have several epsilons."""
    drawn: list[Figure] = []
    for number, scored in enumerate(dict.fromkeys(run.scored for run in runs)):
        groups = group([run for run in runs if run.scored == scored])
        private = [one for one in groups if one.first.private and not math.isnan(one.mean("value"))]
        if len({round(one.first.epsilon, 6) for one in private}) > 1 and can_draw():
            drawn.append(_frontier_chart(f"frontier-{number + 1}", scored, private, groups))
    if drawn:
        yield heading("Privacy against utility")
        yield note(_FRONTIER)
        yield from side_by_side(*drawn, wide=True)


def _frontier_chart(
    name: str, scored: str, private: Sequence[Group], groups: Sequence[Group]
) -> Figure:
    best: dict[str, float] = {}
    for one in private:
        method = one.first.name
        best[method] = min(best.get(method, math.inf), one.badness)
    kept = sorted(best, key=lambda method: best[method])[:_METHODS]
    rows = [_frontier_row(one) for one in private if one.first.name in kept]
    title = f"{scored} against epsilon"
    if len(kept) < len(best):
        title += f", the best {len(kept)} of {len(best)} methods"
    return charts.frontier(name, title, rows=rows, levels=list(_levels(groups)), up=scored)


def _frontier_row(one: Group) -> Row:
    error = one.error("value", "standard_error")
    return {
        "kind": one.first.name,
        "x": one.first.epsilon,
        "y": one.mean("value"),
        "error": 0.0 if math.isnan(error) else error,
        "runs": len(one.runs),
    }


def _levels(groups: Sequence[Group]) -> Iterator[Row]:
    """Return what has no epsilon: the local baseline, and runs without privacy."""
    local = [one.mean("local_value") for one in groups if one.first.shares]
    known = [value for value in local if not math.isnan(value)]
    if known:
        yield {"kind": "local", "y": known[0]}
    bare = [one for one in groups if one.first.shares and not one.first.private]
    for one in bare[:3]:
        if not math.isnan(one.mean("value")):
            yield {"kind": f"{one.first.result['method']}, NOT PRIVATE", "y": one.mean("value")}


# --- each client against local training


_LISTED, _POINTS, _PAIRED = 1800, 1200, 150
"""Clients listed and points drawn on the whole page, shared by its runs; keeps it small."""
_LEVELS = {"largest loss": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
_LEVELS |= {"90 %": 0.9, "largest gain": 1.0}
_NAME = 60
"""Characters of a client's name in a tooltip; the list has all of them."""


def gains(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section | None:
    """Return what each client gains over local training, for runs that share something.

    Without clients: only how many gain and lose.
    """
    runs = [run for run in runs if run.is_scored]
    if not runs:
        return None
    blocks: list[Block] = [text(PROMISE)]
    sharing = sorted((run for run in runs if run.shares), key=lambda run: not run.private)
    shown = one_by_one(sharing)
    if not sharing:
        blocks.append(text("Nothing is shared: every client trains on its own rows only."))
    if len(shown) < len(sharing):
        said = f"{len(shown)} of {len(sharing)} runs are shown; `coterie report RUN` shows one run."
        blocks.append(note(said))
    for number, run in enumerate(shown):
        blocks.append(heading(run.label))
        if "error_alone" not in run.metrics:
            blocks.append(text("This run has no local baseline."))
            continue
        known = run.column("test_rows") > 0
        blocks += _counts(run, known)
        if clients and known.any():
            blocks += _each_client(run, known, f"gains-{number + 1}", len(shown))
    return Section("gains", "Does joining help a client?", tuple(blocks))


def _counts(run: FinishedRun, known: NDArray[np.bool_]) -> Iterator[Block]:
    """Return how many clients with test rows gain over local training."""
    rows, joined, local = (run.column(n) for n in ("test_rows", "error", "error_alone"))
    if not known.any():
        yield text("No client has test rows.")
        return
    total = int(known.sum())
    gain, same = int((joined < local)[known].sum()), int((joined == local)[known].sum())
    lose = total - gain - same
    said = (
        f"{gain} of {total} clients gain ({percent(gain / total)}), {lose} lose "
        f"({percent(lose / total)}), {same} are equal. The error of a client is its "
        f"{run.client_error}. Clients have a median of {np.median(rows[known]):.4g} test rows, so "
        "the difference of one client is partly chance."
    )
    if total < len(rows):
        said += f" {len(rows) - total} clients without test rows are not counted."
    if unknown := total - int(_finite(run, known).sum()):
        said += f" {unknown} clients have no finite error and are not drawn."
    yield text(said)
    if "error_shared" in run.metrics:
        better = float((joined < run.column("error_shared"))[known].mean())
        yield text(
            f"For {percent(better)} of clients the personal model is better than the shared one."
        )


def _finite(run: FinishedRun, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return known & np.isfinite(run.column("error")) & np.isfinite(run.column("error_alone"))


def _each_client(
    run: FinishedRun, known: NDArray[np.bool_], key: str, sharing: int
) -> Iterator[Block]:
    finite = np.flatnonzero(_finite(run, known))
    if len(finite):
        yield from _gain_charts(run, finite, key, sharing)
    yield _client_list(run, np.flatnonzero(known), key, max(40, _LISTED // sharing))


def client_rows(
    run: FinishedRun, order: NDArray[np.int64], column: str = "error_alone"
) -> list[Row]:
    """Return the rows of client charts: name, rows, errors and the gain over a baseline."""
    personal, local = run.column("error"), run.column(column)
    shared = run.column("error_shared") if "error_shared" in run.metrics else None
    return [
        {
            "client": _cut(str(run.metrics["client"][i])),
            "train_rows": run.metrics["train_rows"][i],
            "test_rows": run.metrics["test_rows"][i],
            "local": local[i],
            **({} if shared is None else {"shared": shared[i]}),
            "personal": personal[i],
            "gain": local[i] - personal[i],
        }
        for i in order.tolist()
    ]


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}\u2026"


def _gain_charts(
    run: FinishedRun, known: NDArray[np.int64], key: str, sharing: int
) -> Iterator[Block]:
    """Return the distribution of gains over clients: charts and quantiles."""
    differences = (run.column("error_alone") - run.column("error"))[known]
    order = known[np.argsort(differences, kind="stable")]
    quantiles = show(_quantiles("error local \u2212 personal", differences))
    if can_draw():
        points = max(60, min(_POINTS // sharing, 500))
        some = client_rows(run, order[thin(len(order), points)])
        pairs = client_rows(run, order[thin(len(order), min(points, _PAIRED))])
        which = (
            "local, shared and personal" if "error_shared" in run.metrics else "local and personal"
        )
        yield from side_by_side(
            charts.gains(f"{key}-gain", "Gain (above 0) or loss of each client", some),
            charts.against_local(
                f"{key}-local", "Local against personal: below the line is a gain", some
            ),
        )
        title = f"Error of each client: {which}"
        yield from side_by_side(charts.models(f"{key}-models", title, pairs), wide=True)
        if said := _not_drawn(differences, points):
            yield note(said)
    yield from numbers(quantiles)


def _quantiles(title: str, values: Array) -> Table:
    rows = [[name, short(float(np.quantile(values, at)))] for name, at in _LEVELS.items()]
    return Table.of(["clients, sorted", title], rows)


def _not_drawn(differences: Array, points: int) -> str:
    beyond = int((np.abs(differences) > axis_bound(differences)).sum())
    said = [f"{beyond} clients lie beyond the axis of the left chart."] if beyond else []
    if len(differences) > points:
        said.append(
            f"{points} of {len(differences)} clients are drawn, evenly from the sorted list."
        )
    if len(differences) > min(points, _PAIRED):
        said.append(f"The last chart shows {min(points, _PAIRED)} of them.")
    return " ".join(said)


def _client_list(run: FinishedRun, known: NDArray[np.int64], key: str, listed: int) -> Block:
    """Return clients from the largest loss to the largest gain; of many, only both ends."""
    personal, local = run.column("error"), run.column("error_alone")
    with np.errstate(invalid="ignore"):
        gain = local - personal
        order = known[np.argsort(np.nan_to_num(gain[known], nan=-math.inf), kind="stable")]
    title = "Find a client: all clients, from the largest loss to the largest gain"
    if len(order) > listed:
        half = listed // 2
        order = np.concatenate([order[:half], order[-half:]])
        title = f"The {half} clients with the largest losses and the {half} with the largest gains"
    errors = {"error local": local}
    if "error_shared" in run.metrics:
        errors["error of the shared model"] = run.column("error_shared")
    errors |= {"error personal": personal, "gain": gain}
    rows = [
        [
            str(run.metrics["client"][i]),
            *(str(run.metrics[name][i]) for name in ("train_rows", "test_rows")),
            *(short(float(found[i])) for found in errors.values()),
        ]
        for i in order.tolist()
    ]
    table = Table.of(["client", "train rows", "test rows", *errors], rows)
    said = f"{title} (metrics.parquet has all)"
    return Block("details", (said,), blocks=(show(table),), list_id=f"{key}-list")


# --- baselines


_BASELINE_POINTS, _DRAWN = 400, 4
"""Points of a chart of clients, and runs whose clients are drawn."""


def baselines(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section | None:
    """Return the comparison with baselines; without clients there are no charts of them."""
    shown = [run for run in one_by_one(runs) if run.shares and run.baselines]
    table = (
        baselines_table([Entry.of_group(Group(run.label, (run,))) for run in shown])
        if shown
        else None
    )
    if table is None:
        return None
    said = verdicts({run.label: run.baselines for run in shown})
    # The section above states the promise.
    blocks: list[Block] = [text(one) for one in said if one != PROMISE]
    blocks += [show(table), *map(note, table.notes)]
    if clients:
        blocks += _baseline_charts(shown)
    return Section("baselines", "Baselines", tuple(blocks))


def _baseline_charts(runs: Sequence[FinishedRun]) -> Iterator[Block]:
    """Return each run's gains over `local*`; those over `local` are in the section above."""
    name, column = "local_star", "error_local_star"
    drawn: list[Figure] = []
    tables: list[Block] = []
    compared = [run for run in runs if column in run.metrics and len(_sorted_by_gain(run, column))]
    for number, run in enumerate(sorted(compared, key=lambda run: not run.private)[:_DRAWN]):
        order = _sorted_by_gain(run, column)
        gain = (run.column(column) - run.column("error"))[order]
        tables += [
            label(run.label),
            show(_quantiles(f"error {TITLES[name]} \u2212 personal", gain)),
        ]
        if can_draw():
            rows = client_rows(run, order[thin(len(order), _BASELINE_POINTS)], column)
            title = f"{run.label}: gain (above 0) or loss of each client against {TITLES[name]}"
            drawn.append(charts.gains(f"baseline-{number + 1}", title, rows, than=TITLES[name]))
    yield from side_by_side(*drawn)
    if tables:
        yield from numbers(*tables)


def _sorted_by_gain(run: FinishedRun, column: str) -> NDArray[np.int64]:
    """Return the clients whose errors are known, from the largest loss to the largest gain."""
    gain = run.column(column) - run.column("error")
    known = np.flatnonzero(np.isfinite(gain) & (run.column("test_rows") > 0))
    return known[np.argsort(gain[known], kind="stable")]


# --- per-client distribution


_CLIENT_POINTS = 1500
_HELD_OUT = (
    "A public seed holds these clients out of training. They release nothing, so epsilon is 0 for "
    "them; the guarantee covers the clients that take part in training."
)


def distribution(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section | None:
    """Return the per-client distribution of all runs, and held-out clients.

    Without clients: neither the worst client nor any chart of clients.
    """
    runs = [run for run in one_by_one(runs) if run.is_scored]
    blocks: list[Block] = []
    for metric in dict.fromkeys(run.result["metric"] for run in runs):
        alike = [run for run in runs if run.result["metric"] == metric]
        table = clients_table([_entry(run) for run in alike], worst=clients)
        if table is not None:
            blocks += [label(f"{table.title}."), show(table)]
            blocks.append(note(" ".join(table.notes)))
            blocks += _distribution_charts(alike, clients=clients)
    if not blocks:
        return None
    table = held_out_table([_entry(run) for run in runs], worst=clients)
    if table is not None:
        blocks += [heading(table.title), text(_HELD_OUT), show(table)]
    return Section("clients", "Clients one by one" if clients else "Clients", tuple(blocks))


def _entry(run: FinishedRun) -> Entry:
    return Entry.of_group(Group(run.label, (run,)))


def _distribution_charts(runs: Sequence[FinishedRun], *, clients: bool) -> Iterator[Block]:
    curves = list(_reliability_curves(runs))
    if can_draw():
        drawn = [_sorted_chart(runs)] if clients and any(run.shares for run in runs) else []
        if curves:
            title = "Accuracy by confidence: below the line is overconfident"
            drawn.append(charts.reliability("reliability", title, curves))
        yield from side_by_side(*drawn)
    if curves:
        head = ["mean confidence of a bin", "accuracy"]
        tables: list[Block] = []
        for name, x, y in curves:
            rows = [[short(sure), short(right)] for sure, right in zip(x, y, strict=True)]
            tables += [label(name), grid(head, rows)]
        yield from numbers(*tables)


def _sorted_chart(runs: Sequence[FinishedRun]) -> Figure | None:
    """Return every client's own score, from the worst to the best."""
    metric = METRICS[runs[0].result["metric"]]
    lines: list[tuple[str, Array]] = []
    for run in runs:
        lines.append((run.label, run.column("error")))
        if run.held_out:
            lines.append((f"{run.label}, held-out clients", run.column("error", held_out=True)))
    sharing = [run for run in runs if run.shares and "error_alone" in run.metrics]
    if sharing and all(run.shares for run in runs):
        lines.append(("local", sharing[0].column("error_alone")))
    drawn = []
    for name, errors in lines:
        known = np.sort(errors[np.isfinite(errors)])[::-1]
        if len(known):
            kept = thin(len(known), max(60, _CLIENT_POINTS // len(lines)))
            places = 100 * (np.arange(len(known)) + 0.5) / len(known)
            shown = known if metric.client_score == "error" else 1 - known
            drawn.append((name, places[kept], shown[kept]))
    if not drawn:
        return None
    of = metric.client_error if metric.client_score == "error" else metric.client_score
    title = f"{of.capitalize()} of each client ({metric.direction}), from worst to best"
    return charts.lines(
        f"clients-{metric.client_score}", title, drawn, along="% of clients", up=of,
        points=_CLIENT_POINTS,
    )  # fmt: skip


def _reliability_curves(runs: Sequence[FinishedRun]) -> Iterator[Curve]:
    """Return the reliability diagram of every run, and of the local baseline."""
    runs = [run for run in runs if run.result.get("calibration_error") is not None]
    found = [(run.label, run.result.get("reliability")) for run in runs]
    if all(run.shares for run in runs):
        found += [("local", run.result.get("local_reliability")) for run in runs[:1]]
    for name, bins in found:
        if not bins:
            continue
        x, y = (np.array(bins[key], dtype=np.float64) for key in ("confidence", "right"))
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            yield name, x[known], y[known]


# --- round by round


_ROUND_POINTS, _LOSS_FIGURES = 2000, 4
"""Points drawn on the whole page, shared by its runs, and runs whose losses are drawn."""


def rounds(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section | None:
    """Return the histories of all runs that kept one.

    A hidden cohort stays hidden: for runs with a budget the number of clients that answered is not
    shown, and without clients neither is the time, which depends on who was sampled.
    """
    kept = [run for run in one_by_one(runs) if len(run.history.get("round", ()))]
    if not kept:
        return None
    drawn: list[Figure] = []
    if can_draw():
        for number, scored in enumerate(dict.fromkeys(run.scored for run in kept)):
            alike = [run for run in kept if run.scored == scored]
            drawn += _history_charts(alike, number + 1, _ROUND_POINTS // len(kept), clients=clients)
        with_losses = [run for run in kept if run.shares and charts.losses_of(run)]
        for number, run in enumerate(with_losses[:_LOSS_FIGURES]):
            drawn.append(charts.draw_losses(run, f"losses-{number + 1}"))
    said = (
        "The metric on test rows after each round. It is not covered by epsilon: choosing the "
        "number of rounds by it is tuning on these rows."
    )
    blocks = [
        note(said),
        *side_by_side(*drawn),
        *numbers(show(_last_rounds(kept, clients=clients))),
    ]
    return Section("rounds", "Round by round", tuple(blocks))


def _history_charts(
    runs: Sequence[FinishedRun], number: int, points: int, *, clients: bool
) -> Iterator[Figure]:
    scored = runs[0].scored
    for name, along in (("round", "rounds done"), ("seconds", "virtual seconds")):
        shown = runs if name == "round" else [run for run in runs if _is_timed(run, clients)]
        lines = [line for line in (_line(run, name, points) for run in shown) if len(line[1])]
        title = f"{scored}, by round" if name == "round" else f"{scored}, against {along}"
        if lines:
            yield charts.lines(
                f"history-{number}-{name}", title, lines, along=along, up=scored,
                points=_ROUND_POINTS,
            )  # fmt: skip


def _line(run: FinishedRun, name: str, points: int) -> Curve:
    x, y = run.history[name], run.history["value"]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    kept = thin(len(x), max(60, points))
    return run.label, x[kept], y[kept]


def _is_timed(run: FinishedRun, clients: bool) -> bool:
    """Return whether a page may show when the rounds of a run were done."""
    return clients or not run.hides_cohort


def _last_rounds(runs: Sequence[FinishedRun], *, clients: bool) -> Table:
    """Return the last values of the histories."""
    own = [m for m in PER_CLIENT if any(np.isfinite(_last(run, m.name)) for run in runs)]
    counted = not all(run.hides_cohort for run in runs)
    head = ["run", "rounds", *(["clients that answered, mean"] if counted else [])]
    head += ["final metric", *(f"final {metric.title}" for metric in own), "virtual seconds"]
    rows = []
    for run in runs:
        answered = math.nan if run.hides_cohort else float(np.nanmean(run.history["answered"]))
        values = [*([answered] if counted else []), _last(run, "value")]
        values += [_last(run, metric.name) for metric in own]
        values.append(_last(run, "seconds") if _is_timed(run, clients) else math.nan)
        cells = (short(value) if np.isfinite(value) else DASH for value in values)
        rows.append([run.label, f"{_last(run, 'round'):.0f}", *cells])
    return Table.of(head, rows)


def _last(run: FinishedRun, name: str) -> float:
    """Return the last value of a column; NaN where there is no such column."""
    return float(run.history[name][-1]) if name in run.history else math.nan


# --- deployment


STAYED = "Models of clients and their scores stay at the sites."
_TRUST = {
    "server": "server: the coordinator sees the sum of each site",
    "secure_aggregation": "secure aggregation: the coordinator sees only the sum over sites",
}
_SITES = 12


def deployment(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section | None:
    """Return how runs were deployed, and which adversary sees what; public facts alone."""
    shown = [run for run in runs if run.deployment]
    if not shown:
        return None
    blocks: list[Block] = []
    for run in shown:
        blocks += [heading(run.label)] if len(runs) > 1 else []
        blocks.append(show(_deployment_facts(run, clients=clients)))
        blocks.append(label("What each adversary sees"))
        rows = [
            [str(one["who"]), str(one["sees"]), _bounded(float(one["epsilon"]))]
            for one in run.deployment.get("sees") or ()
        ]
        blocks.append(grid(["adversary", "sees", "epsilon"], rows, "facts cards"))
        blocks += [note(STAYED)] if not run.is_scored else []
    return Section("deployment", "Deployment", tuple(blocks))


def _deployment_facts(run: FinishedRun, *, clients: bool) -> Table:
    facts = run.deployment
    share = percent(float(facts.get("minimum") or 0))
    of = "of all clients" if facts.get("hidden_cohort") else "of the sampled clients"
    rows: list[list[Cell]] = [
        ["trust", _TRUST.get(str(facts.get("trust")), str(facts.get("trust")))],
        ["sites", f"{facts.get('sites')}{_hosted(facts) if clients else ''}"],
        ["clients", str(run.guarantee.clients)],
        ["rounds", str(run.result["rounds"])],
        ["deadline", f"{float(facts.get('deadline') or 0):g} s for the answers to a request"],
        [
            "minimum",
            f"{share} {of}; a round with fewer is repeated up to {facts.get('patience')} times",
        ],
    ]
    if facts.get("sites_needed") is not None:
        needed = f"{facts['sites_needed']} of {facts.get('sites')} sites"
        needed += " must answer a round (else it is repeated) and its unmasking (else it fails)"
        rows.append(["sites needed", needed])
    if facts.get("site"):
        rows.insert(0, ["this page", f"site {facts['site']}: scores of its own clients"])
    return Table.of(["fact", "value"], rows, "facts short")


def _hosted(facts: Mapping[str, Any]) -> str:
    """Return the sites with their numbers of clients; of many, a few."""
    hosted = dict(facts.get("clients_by_site") or {})
    if not hosted:
        return ""
    some = [f"{name} {count}" for name, count in list(hosted.items())[:_SITES]]
    more = f" and {len(hosted) - _SITES} more" if len(hosted) > _SITES else ""
    return f" (clients per site: {', '.join(some)}{more})"


def _bounded(epsilon: float) -> Cell:
    return Mark("no bound (inf)", "bad") if math.isinf(epsilon) else round_up(epsilon)


# --- guarantees


_STATED = 4
"""Private guarantees stated in full on a page; the others are in a table."""
_UNCOVERED = (
    "Metrics, and any choice made by them (settings, rounds, runs), are not covered by epsilon. "
)
_KEEP = "This page shows errors of single clients: protect it like the data."
_LEFT_OUT = (
    "This page has no names and no numbers of single clients; means are computed from their rows."
)
_NO_METRICS = (
    "This page has no metrics: scores stay at the sites. Choices made by them are not covered by "
    "epsilon."
)
_VIEWS = {
    "other_clients": "all other clients together",
    "server": "the server",
    "server_secure_aggregation": "the server, with secure aggregation",
    "released": "an outsider who receives the shared model",
}
_RELEASED = (
    "the shared model is a function of the releases; a client that receives it is one of the other "
    "clients"
)
_SAMPLED = {"everyone": "every client in every round", "poisson": "Poisson", "fixed": "fixed size"}
_QUESTIONS = {
    "zero_out": "whether the contributions of one given client come from its data or are zero",
    "replace": "whether the contributions of one given client come from its data or from another's",
}
Stated = tuple[Guarantee, float | None, tuple[str, ...], float | None]


def guarantees(runs: Sequence[FinishedRun], *, clients: bool = True) -> Section:
    """Return every guarantee once, with the runs that share it."""
    by_guarantee: dict[Stated, list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda run: (not run.private, not run.shares)):
        chosen = chosen_alone(run.guarantee, run.selection)
        stated = (run.guarantee, run.result.get("clip"), run.caveats, chosen)
        by_guarantee.setdefault(stated, []).append(run)
    blocks: list[Block] = []
    further: list[list[Cell]] = []
    for number, (stated, shared) in enumerate(by_guarantee.items()):
        if shared[0].private and number >= _STATED:
            further.append(_in_short(stated[0], shared[0], named(shared, runs)))
            continue
        blocks.append(heading(named(shared, runs)))
        blocks += _one_guarantee(stated, shared[0], f"guarantee-{number + 1}")
    if further:
        head = [
            "runs",
            "epsilon",
            "against",
            "delta",
            "relation",
            "rounds",
            "sampling",
            "accountant",
        ]
        blocks += [heading("Further guarantees"), grid(head, further)]
    said = _UNCOVERED + (_KEEP if clients else _LEFT_OUT)
    blocks.append(note(said if any(run.is_scored for run in runs) else _NO_METRICS))
    return Section("guarantee", "Guarantee", tuple(blocks))


def _one_guarantee(stated: Stated, run: FinishedRun, key: str) -> Iterator[Block]:
    guarantee, clip, caveats, chosen = stated
    if not run.shares:
        yield text("Nothing is released: epsilon is 0.")
    elif not run.private:
        why = ": contributions are released without noise and may reveal everything."
        why = why if guarantee.claimed_epsilon is None else f". {guarantee.statement()}"
        yield text(Mark("NOT PRIVATE", "bad"), why)
    else:
        yield Block("card", blocks=tuple(_statement(run, clip)))
    yield from (text(Mark(caveat, "strong")) for caveat in caveats)
    if run.private and chosen is not None:
        yield from _selected_views(guarantee, chosen)
        yield from _selected_attack(chosen, guarantee.delta)
    elif run.private:
        yield from _views(guarantee, run.deployment)
        yield from attack(guarantee, key)


def _sentences(run: FinishedRun) -> str:
    """Return the sentences of a guarantee; for a deployment, with what its coordinator sees."""
    sees = None
    if run.deployment:
        bounded = math.isfinite(float(run.deployment.get("epsilon_coordinator", math.inf)))
        observed = run.deployment.get("coordinator_sees")
        sees = "" if bounded else f"the coordinator, which observes {observed}; "
    return charged_statement(run.guarantee, run.selection, server=sees)


def _statement(run: FinishedRun, clip: float | None) -> Iterator[Block]:
    guarantee = run.guarantee
    yield from (_sentence(line) for line in _sentences(run).splitlines())
    epsilon = guarantee.epsilon if run.selection is None else run.epsilon
    yield label("As a formula")
    yield Block("formula", (round_up(epsilon), f"{guarantee.delta:.3g}"))
    yield note(_symbols(run, clip))


def _sentence(line: str) -> Block:
    """Return a sentence with its subject in bold."""
    about, colon, said = line.partition(":")
    if not colon or len(about) > 20:
        return text(line)
    return text(Mark(f"{about}:", "strong"), said)


def _symbols(run: FinishedRun, clip: float | None) -> str:
    """Return what the letters of the formula mean."""
    guarantee = run.guarantee
    others = guarantee.views["other_clients"]
    same = others == guarantee.epsilon
    bound = "C" if clip is None else f"C = {clip:.4g}"
    # Only blocks move by less than twice their bounds; the method defines these bounds.
    blocks = any(getattr(event, "replaced", 2.0) != 2.0 for event in guarantee.events)
    clipped = "each block clipped to its own bound" if blocks else f"each clipped to {bound}"
    messages = "messages" if is_local(guarantee) else "releases"
    said = (
        f"M is the {messages} of all {len(guarantee.events)} rounds together; D and D\u2032 differ "
        f"in one client by {guarantee.relation}. A release is the sum of clients' contributions, "
        f"{clipped}, plus {describe_noise(guarantee.events)}. "
    )
    if run.selection is not None:
        return f"{said}The run is the best of several by private scores; M includes this selection."
    jointly = "the same bound" if same else f"epsilon = {round_up(others)}"
    return (
        f"{said}The models of the other clients are functions of the releases and their data; "
        f"together they satisfy {jointly}."
    )


def _sampling(guarantee: Guarantee) -> str:
    who = guarantee.participation
    if who.rate == 1:
        return _SAMPLED["everyone"]
    seen = "visible" if who.visible or is_local(guarantee) else "hidden"
    return f"{_SAMPLED[who.kind]}, rate {who.rate:.4g} per round, {seen}"


def _views(guarantee: Guarantee, deployed: Mapping[str, Any]) -> Iterator[Block]:
    """Return epsilon by adversary, with the reason; for a deployment, its own adversaries."""
    views = dict(guarantee.views)
    # The shared model is a function of the releases: an outsider sees no more than these.
    views["released"] = views.get("outsider", guarantee.epsilon)
    why = {**reasons(guarantee), "released": _RELEASED}
    labels = dict(_VIEWS)
    if deployed:
        own = str(deployed.get("coordinator_view"))
        labels = {
            view: label for view, label in labels.items() if "server" not in view or view == own
        }
        labels[own] = "the coordinator"
        why[own] = f"it sees {deployed.get('coordinator_sees')}"
    rows = [[label, _bounded(views[view]), why.get(view, "")] for view, label in labels.items()]
    yield label("Epsilon by adversary")
    yield grid(["against", "epsilon", "reason"], rows, "facts cards")


def _selected_views(guarantee: Guarantee, epsilon: float) -> Iterator[Block]:
    """Return epsilon by adversary for a privately selected run."""
    before = round_up(guarantee.epsilon)
    rows: list[list[Cell]] = [
        [CHOSEN_ONLY, round_up(epsilon), f"{THEOREM}; an upper bound for the shared model too"],
        [_VIEWS["other_clients"], f"not stated here, above {before}", FOR_OTHERS],
        [_VIEWS["server"], _bounded(math.inf), reasons(guarantee).get("server", "")],
    ]
    yield label("Epsilon by adversary")
    yield grid(["against", "epsilon", "reason"], rows, "facts cards")


def attack(guarantee: Guarantee, key: str) -> Iterator[Block]:
    """Return bounds on the best attack by the other clients, and epsilon by round."""
    done, spent = charts.spent_by_round(guarantee)
    caught = [_ceiling(1 - miss) for miss in guarantee.trade_off(ALARMS)]
    few, many = (percent(alarm) for alarm in ALARMS)
    said = (
        "Even all other clients together can only guess from the releases "
        f"{_QUESTIONS[guarantee.relation]}. At {few} false positives, any attack has at most "
        f"{caught[0]} true positives; at {many}, {caught[1]}. Guessing has {few} and {many}."
    )
    if is_local(guarantee):
        said += " The same holds for the server, which sees who sends a message."
    if guarantee.simulation:
        said += " This holds for secret noise; the noise of a simulation is known."
    yield text(said)
    yield from _attack_table(guarantee, caught)
    if can_draw():
        yield from side_by_side(
            charts.draw_trade_off(guarantee, name=f"{key}-trade-off"),
            charts.spending(f"{key}-spent", "Epsilon spent by round", rounds=done, epsilons=spent),
        )
    steps = [[str(r), round_up(epsilon)] for r, epsilon in zip(done, spent, strict=True)]
    yield from numbers(grid(["rounds done", "epsilon"], steps))


def _attack_table(guarantee: Guarantee, caught: Sequence[str]) -> Iterator[Block]:
    head = ["false positives", "true positives, at most"]
    rows = [[percent(alarm), most] for alarm, most in zip(ALARMS, caught, strict=True)]
    rough = charts.approximation(guarantee, ALARMS)
    if rough is not None:
        head.append("Gaussian approximation, not a bound")
        for row, miss in zip(rows, rough, strict=True):
            row.append(f"{100 * (1 - miss):.1f} %")
    yield label("Bounds on any attack")
    yield grid(head, rows)


def _selected_attack(epsilon: float, delta: float) -> Iterator[Block]:
    """Return bounds on any attack from epsilon and delta alone.

    True positives are at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)) at a false
    positives (Kairouz, Oh and Viswanath 2015).
    """
    caught = [
        min(math.exp(epsilon) * alarm + delta, 1 - math.exp(-epsilon) * (1 - delta - alarm))
        for alarm in ALARMS
    ]
    rows = [[percent(a), _ceiling(most)] for a, most in zip(ALARMS, caught, strict=True)]
    yield text(
        "Bounds on any attack by an adversary who sees only this run, from epsilon and delta. A "
        "privately selected run has no trade-off curve and no epsilon by round of its own."
    )
    yield grid(["false positives", "true positives, at most"], rows)


def _in_short(guarantee: Guarantee, run: FinishedRun, labels: str) -> list[Cell]:
    return [
        labels,
        round_up(run.epsilon),
        run.view,
        f"{guarantee.delta:.3g}",
        guarantee.relation,
        str(len(guarantee.events)),
        _sampling(guarantee),
        guarantee.profile.accountant if run.selection is None else THEOREM,
    ]


def _ceiling(share: float) -> str:
    """Return a bound in per cent with one decimal, rounded up."""
    return f"{min(100.0, math.ceil(1000 * share - 1e-9) / 10):.1f} %"
