"""What the sections of a page show: numbers, tables and charts. The template has the words.

A section leaves out what belongs to a single client where `clients` is false. Metrics are not
covered by epsilon.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.baselines import TITLES
from coterie.evaluation.baselines import verdicts as verdicts_of
from coterie.evaluation.metrics import METRICS, PER_CLIENT, is_higher_better
from coterie.evaluation.verdict import Headline
from coterie.privacy.guarantee import (
    RELATIONS,
    Guarantee,
    add_up,
    is_in_shares,
    is_local,
    reasons,
    round_up,
    show_delta,
)
from coterie.privacy.reviewer import review
from coterie.privacy.selection import THEOREM, charged_statement, chosen_alone
from coterie.report import charts
from coterie.report.charts import ALARMS, Array, Curve, Figure, Row, axis_bound, can_draw, thin
from coterie.report.read import (
    APART,
    LOCAL,
    FinishedRun,
    Group,
    Part,
    are_grouped,
    group,
    listed,
    named,
    rows_of,
)
from coterie.report.tables import DASH, Entry, Table, percent, results_table

Order = NDArray[np.int64]


def short(value: float) -> str:
    """Return a number with three digits."""
    return "not a number" if math.isnan(value) else f"{value:.3g}"


def decimal(value: float) -> str:
    """Return a delta, rounded up, and without an exponent if it has few digits.

    >>> decimal(1e-5), decimal(1e-12)
    ('0.00001', '1e-12')
    """
    shown = show_delta(value)
    return f"{float(shown):.12f}".rstrip("0") if 1e-9 < value < 1 else shown


def entry(run: FinishedRun) -> Entry:
    """Return the row of one run in a table."""
    return Entry.of_group(Group(run.label, (run,)))


# --- opening


def title_of(runs: Sequence[FinishedRun]) -> str:
    """Return the datasets and numbers of clients of runs."""
    names = dict.fromkeys(
        f"{Path(run.result['data']).name}, {run.result['clients']} clients" for run in runs
    )
    return "; ".join(names) + ", one model per client"


def best_of(runs: Sequence[FinishedRun]) -> tuple[Group, int]:
    """Return the group to report first, and the number of groups it is the best of.

    Metrics on different data cannot be compared: the groups are those on the first run's data.
    """
    groups = [one for one in rows_of(runs) if one.first.result["data"] == runs[0].result["data"]]
    groups = [one for one in groups if one.first.is_scored] or groups
    private = [one for one in groups if one.first.private]
    several = private or [one for one in groups if one.first.shares] or groups
    return min(several, key=lambda one: one.badness), len(several)


def headlines(runs: Sequence[FinishedRun], given: Sequence[Headline] = ()) -> tuple[Headline, ...]:
    """Return the best private method at each epsilon, where several epsilons have one metric.

    `given` are those of a comparison, which tests differences between methods over seeds too.
    """
    found: dict[str, list[Group]] = {}
    for one in rows_of(runs):
        if one.first.private and one.first.is_scored:
            found.setdefault(round_up(one.first.epsilon), []).append(one)
    if len(found) < 2 or len({run.scored for run in runs}) > 1:
        return ()
    best = (min(found[epsilon], key=lambda one: one.badness) for epsilon in found)
    own = (
        Headline(
            float(round_up(one.first.epsilon)),
            one.first.name,
            one.mean("value"),
            one.mean("local_value"),
            one.verdict,
        )
        for one in best
    )
    return tuple(given) or tuple(sorted(own, key=lambda one: one.epsilon))


def headline_table(
    runs: Sequence[FinishedRun], found: Sequence[Headline]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: one row per epsilon, with the best method and the bound on attacks."""
    several = len({run.name for run in runs if run.private}) > 1
    head = ["budget", *(["method"] if several else [])]
    head += [runs[0].scored, "local training", "clients better, worse"]
    head += ["not clearly worse"] if any(one.as_good for one in found) else []
    head += [f"detection at {percent(ALARMS[0])} false alarms, at most"]
    rows = []
    for one in found:
        shares = one.verdict
        row = [f"epsilon {one.epsilon:g}", *([one.method] if several else [])]
        row += [short(one.value), DASH if math.isnan(one.local) else short(one.local)]
        row += [DASH if shares is None else f"{percent(shares.better)}, {percent(shares.worse)}"]
        row += [listed(one.as_good, 3) or DASH] if any(other.as_good for other in found) else []
        rows.append([*row, _detection(runs, one)])
    return head, rows


def _detection(runs: Sequence[FinishedRun], found: Headline) -> str:
    """Return the bound on attacks of the runs of a headline; all have the same guarantee."""
    alike = (
        run for run in runs
        if run.name == found.method and float(round_up(run.epsilon)) == found.epsilon
    )  # fmt: skip
    run = next(alike, None)
    if run is None or run.selection is not None:
        return DASH
    return ceiling(float(run.guarantee.detection(ALARMS[:1])[0]))


def answer(best: Group) -> str:
    """Return the one sentence that answers whether joining helps."""
    run, verdict = best.first, best.verdict
    if not run.shares:
        return f"Nothing is shared, and no budget is spent: {_score(best)}."
    lead = f"At epsilon {round_up(run.epsilon)}" if run.private else "Without privacy"
    if run.selection is not None:
        lead += f" ({run.view})"
    if not run.is_scored:
        sites = run.deployment.get("sites")
        return (
            f"{lead}, {run.name} trained a model for each of {run.guarantee.clients} clients at "
            f"{sites} {'site' if sites == 1 else 'sites'}; models and scores stay at the sites."
        )
    return f"{lead}, {_score(best)}." if verdict is None else f"{lead}, {verdict}."


def _score(best: Group) -> str:
    name = best.first.scored.partition(" (")[0]
    return f"{best.first.name} has {name} {short(best.mean('value'))}"


def caveat(best: Group) -> str:
    """Return where the metric, which counts rows, and the verdict on clients do not agree."""
    run, verdict = best.first, best.verdict
    own, local = best.mean("value"), best.mean("local_value")
    if verdict is None or math.isnan(own - local) or own == local:
        return ""
    better = (own > local) == is_higher_better(run.result["metric"])
    claims = {"joining helps": True, "joining seems to help": True,
              "joining hurts": False, "joining seems to hurt": False}  # fmt: skip
    if claims.get(verdict.lead, better) == better:
        return ""
    side = "better" if better else "worse"
    name = run.scored.partition(" (")[0]
    return (
        f"By {name}, which counts all test rows alike, joining is {side} than {LOCAL}; the "
        "sentence above counts all clients alike."
    )


def detections(run: FinishedRun) -> tuple[str, str]:
    """Return a rate of false alarms, and the bound on the best attack at it."""
    return percent(ALARMS[0]), ceiling(float(run.guarantee.detection(ALARMS[:1])[0]))


def uncovered(run: FinishedRun) -> str:
    """Return which adversary no bound covers, and what it observes; "" if there is none."""
    found = [who for who, epsilon, _ in views(run) if math.isinf(epsilon)]
    if not found:
        return ""
    sees = "each contribution before noise is added"
    if run.deployment:
        sees = str(run.deployment.get("coordinator_sees"))
    return f"It does not hold against {found[0]}, which observes {sees}."


def remedies(best: Group) -> list[str]:
    """Return what would help, by the rule before the run; [] where joining helps."""
    if best.verdict is not None and best.verdict.lead == "joining helps":
        return []
    return [str(line) for line in best.first.forecast.get("remedies") or ()]


def said_by(
    runs: Sequence[FinishedRun], of: Callable[[FinishedRun], Iterable[str]]
) -> Iterator[str]:
    """Return each sentence once, with the names of the runs that it is about."""
    said: dict[str, list[FinishedRun]] = {}
    for run in runs:
        for sentence in of(run):
            said.setdefault(sentence, []).append(run)
    for sentence, some in said.items():
        who = "All runs" if len(some) == len(runs) > APART else named(some, runs)
        yield sentence if len(runs) == 1 else f"{who}: {sentence}"


# --- before the runs


def forecasts(runs: Sequence[FinishedRun]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the verdicts before the runs, each once."""
    head = ["runs", "verdict before the run", "shared parameters", "supported, at most", "rounds"]
    found: dict[tuple[str, ...], list[FinishedRun]] = {}
    for run in runs:
        told = run.forecast
        if told:
            numbers = (told.get(key) for key in ("numbers", "most_numbers", "rounds"))
            cells = (DASH if one is None else f"{one:,}" for one in numbers)
            found.setdefault((str(told["verdict"]), *cells), []).append(run)
    return head, [[named(some, runs), *cells] for cells, some in found.items()]


def settings_chosen(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Return what was chosen by rule before the runs."""
    return said_by(runs, lambda run: run.settings_chosen)


# --- results

_METHODS = 8
"""Methods in a chart of the frontier."""


def results(runs: Sequence[FinishedRun]) -> Table:
    """Return the table of runs, or of groups of runs."""
    # A note on all runs is printed once, above the table.
    badges = not all(run.result["simulation"] for run in runs)
    entries = [Entry.of_group(one) for one in rows_of(runs)]
    return results_table(entries, groups=are_grouped(runs), badges=badges)


def scores(runs: Sequence[FinishedRun]) -> list[Figure]:
    """Return the chart of the scores of several runs with one metric."""
    groups, scored = rows_of(runs), {run.scored for run in runs}
    alike = len(groups) > 1 and len(scored) == 1 and all(run.is_scored for run in runs)
    if not alike or not can_draw():
        return []
    return [
        charts.scores(
            f"{runs[0].result['metric']}-by-run",
            f"{scored.pop()}, with two standard errors",
            labels=[one.label for one in groups],
            values=[one.mean("value") for one in groups],
            errors=[one.error("value", "standard_error") for one in groups],
            local=[one.mean("local_value") for one in groups],
        )
    ]


def paragraphs(findings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return sentences, each with the indented ones after it as its points."""
    found: list[tuple[str, list[str]]] = []
    for line in findings:
        if line.startswith("  ") and found:
            found[-1][1].append(line.strip())
        elif line:
            found.append((line, []))
    return found


def differ(runs: Sequence[FinishedRun]) -> bool:
    """Return whether methods used different rows; each seed may have its own split."""
    if not are_grouped(runs):
        return any(run.data != runs[0].data for run in runs)
    seen = [sorted({repr(run.data) for run in one.runs}) for one in group(runs)]
    return any(choice != seen[0] for choice in seen)


def added_up(private: Sequence[FinishedRun]) -> tuple[float, float] | None:
    """Return the most that private runs on the same data spend together; None for simulations."""
    by_data: dict[str, list[Guarantee]] = {}
    for run in private:
        if not run.result["simulation"]:
            by_data.setdefault(str(run.result["data"]), []).append(run.guarantee)
    sums = [add_up(together) for together in by_data.values()]
    return (max(one for one, _ in sums), max(delta for _, delta in sums)) if sums else None


def cautions(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Return what to know about single runs."""
    return said_by(runs, _cautions)


def _cautions(run: FinishedRun) -> Iterator[str]:
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


def frontiers(runs: Sequence[FinishedRun]) -> Iterator[Figure]:
    """Return the metric against epsilon, where runs of one metric have several epsilons."""
    for metric in dict.fromkeys(run.result["metric"] for run in runs):
        groups = group([run for run in runs if run.result["metric"] == metric])
        scored = groups[0].first.scored
        private = [one for one in groups if one.first.private and not math.isnan(one.mean("value"))]
        if len({round(one.first.epsilon, 6) for one in private}) > 1 and can_draw():
            yield _frontier(f"{metric}-against-epsilon", scored, private, groups)


def _frontier(name: str, scored: str, private: Sequence[Group], groups: Sequence[Group]) -> Figure:
    best: dict[str, float] = {}
    for one in private:
        method = one.first.name
        best[method] = min(best.get(method, math.inf), one.badness)
    kept = sorted(best, key=lambda method: best[method])[:_METHODS]
    rows = [
        {
            "kind": one.first.name,
            "x": one.first.epsilon,
            "y": one.mean("value"),
            "error": np.nan_to_num(one.error("value", "standard_error"), posinf=math.inf),
            "runs": len(one.runs),
        }
        for one in private
        if one.first.name in kept
    ]
    title = f"{scored} against epsilon"
    if len(kept) < len(best):
        title += f", the best {len(kept)} of {len(best)} methods"
    return charts.frontier(name, title, rows=rows, levels=list(_levels(groups)), up=scored)


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


# --- each client against a baseline

_LISTED, _POINTS, _PAIRED = 1800, 1200, 150
"""Clients listed and points drawn on the whole page, shared by its runs; keeps it small."""
_BASELINE_POINTS, _DRAWN = 400, 4
"""Points of a chart of gains over `local*`, and runs that have one."""
_LEVELS = {"largest loss": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75}
_LEVELS |= {"90 %": 0.9, "largest gain": 1.0}
_NAME = 60
"""Characters of a client's name in a tooltip; the list has all of them."""


def gain_of(run: FinishedRun, column: str = "error_alone") -> tuple[Array, Order]:
    """Return what clients gain over a baseline, and those with a finite gain, in that order."""
    with np.errstate(invalid="ignore"):
        gain = run.column(column) - run.column("error")
    known = np.flatnonzero(np.isfinite(gain) & (run.column("test_rows") > 0))
    return gain, known[np.argsort(gain[known], kind="stable")]


def gain_counts(run: FinishedRun) -> dict[str, Any]:
    """Return how many clients with test rows gain over local training."""
    rows, joined, local = (run.column(n) for n in ("test_rows", "error", "error_alone"))
    known = rows > 0
    total = int(known.sum())
    gain, same = int((joined < local)[known].sum()), int((joined == local)[known].sum())
    has_shared = "error_shared" in run.metrics
    shared = run.column("error_shared")[known] if has_shared else joined[known]
    return {
        "total": total,
        "gain": gain,
        "same": same,
        "lose": total - gain - same,
        "rows": float(np.median(rows[known])) if total else math.nan,
        "without_rows": len(rows) - total,
        "not_finite": total - len(gain_of(run)[1]),
        "than_shared": float((joined[known] < shared).mean()) if total and has_shared else None,
    }


def gain_points(sharing: int) -> int:
    """Return how many clients of a run are drawn."""
    return max(60, min(_POINTS // sharing, 500))


def gain_charts(run: FinishedRun, sharing: int) -> list[Figure]:
    """Return two charts of every client's gain, and one of its errors."""
    _, order = gain_of(run)
    if not len(order) or not can_draw():
        return []
    points = gain_points(sharing)
    some = _client_rows(run, order[thin(len(order), points)])
    pairs = _client_rows(run, order[thin(len(order), min(points, _PAIRED))])
    which = "local, shared and personal" if "error_shared" in run.metrics else "local and personal"
    return [
        charts.gains(f"gain-{run.slug}", "Gain (above 0) or loss of each client", some),
        charts.against_local(f"personal-against-local-{run.slug}", some),
        charts.models(f"errors-by-client-{run.slug}", which, pairs),
    ]


def not_drawn(run: FinishedRun, sharing: int) -> str:
    """Return which clients the charts of gains leave out."""
    gain, order = gain_of(run)
    points, differences = gain_points(sharing), gain[order]
    beyond = int((np.abs(differences) > axis_bound(differences)).sum())
    said = [f"{beyond} clients lie beyond the axis of the left chart."] if beyond else []
    if len(order) > points:
        said.append(f"{points} of {len(order)} clients are drawn, evenly from the sorted list.")
    if len(order) > min(points, _PAIRED):
        said.append(f"The last chart shows {min(points, _PAIRED)} of them.")
    return " ".join(said)


def quantiles(run: FinishedRun, column: str = "error_alone") -> list[list[str]]:
    """Return quantiles of the gains over a baseline; empty where no client has one."""
    gain, order = gain_of(run, column)
    if not len(order):
        return []
    return [[name, short(float(np.quantile(gain[order], at)))] for name, at in _LEVELS.items()]


def _client_rows(run: FinishedRun, order: Order, column: str = "error_alone") -> list[Row]:
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


def client_list(run: FinishedRun, sharing: int) -> tuple[str, list[str], list[list[str]]]:
    """Return title, head and rows: from the largest loss to the largest gain; of many, both ends.

    Clients whose gain is unknown come first.
    """
    gain, known = gain_of(run)[0], np.flatnonzero(run.column("test_rows") > 0)
    order = known[np.argsort(np.nan_to_num(gain[known], nan=-math.inf), kind="stable")]
    title = "All clients, from the largest loss to the largest gain"
    if len(order) > (listed := max(40, _LISTED // sharing)):
        half = listed // 2
        order = np.concatenate([order[:half], order[-half:]])
        title = f"The {half} clients with the largest losses and the {half} with the largest gains"
    errors = {"error local": run.column("error_alone")}
    if "error_shared" in run.metrics:
        errors["error of the shared model"] = run.column("error_shared")
    errors |= {"error personal": run.column("error"), "gain": gain}
    rows = [
        [
            *(str(run.metrics[name][i]) for name in ("client", "train_rows", "test_rows")),
            *(short(float(found[i])) for found in errors.values()),
        ]
        for i in order.tolist()
    ]
    return title, ["client", "train rows", "test rows", *errors], rows


def verdicts(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Return how runs compare with local training."""
    return verdicts_of({run.label: run.result for run in runs})


def compared(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs whose gains over `local*` are drawn; those over `local` all are."""
    column = "error_local_star"
    found = [run for run in runs if column in run.metrics and len(gain_of(run, column)[1])]
    return sorted(found, key=lambda run: not run.private)[:_DRAWN]


def baseline_charts(runs: Sequence[FinishedRun]) -> list[Figure]:
    """Return each run's gains over `local*`."""
    found, column, than = [], "error_local_star", TITLES["local_star"]
    for run in runs if can_draw() else ():
        _, order = gain_of(run, column)
        rows = _client_rows(run, order[thin(len(order), _BASELINE_POINTS)], column)
        title = f"{run.label}: gain (above 0) or loss of each client against {than}"
        found.append(charts.gains(f"gain-over-local-star-{run.slug}", title, rows, than=than))
    return found


# --- per-client distribution

_CLIENT_POINTS = 1500


def distribution_charts(
    runs: Sequence[FinishedRun], curves: Sequence[Curve], *, clients: bool
) -> list[Figure]:
    """Return every client's own score, from the worst to the best, and reliability diagrams."""
    if not can_draw():
        return []
    shown = clients and any(run.shares for run in runs)
    found = list(_sorted_chart(runs)) if shown else []
    return [*found, charts.reliability(curves)] if curves else found


def _sorted_chart(runs: Sequence[FinishedRun]) -> Iterator[Figure]:
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
    of = metric.client_error if metric.client_score == "error" else metric.client_score
    title = f"{of.capitalize()} of each client ({metric.direction}), from worst to best"
    name, along = f"clients-{metric.client_score}", "% of clients"
    if drawn:
        yield charts.lines(name, title, drawn, along=along, up=of, points=_CLIENT_POINTS)


def reliability(runs: Sequence[FinishedRun]) -> list[Curve]:
    """Return the reliability diagram of every run, and of the local baseline."""
    runs = [run for run in runs if run.result.get("calibration_error") is not None]
    diagrams = [(run.label, run.result.get("reliability")) for run in runs]
    if all(run.shares for run in runs):
        diagrams += [("local", run.result.get("local_reliability")) for run in runs[:1]]
    found = []
    for name, bins in diagrams:
        if bins:
            x, y = (np.array(bins[key], dtype=np.float64) for key in ("confidence", "right"))
            known = np.isfinite(x) & np.isfinite(y)
            found += [(name, x[known], y[known])] if known.any() else []
    return found


# --- round by round

_ROUND_POINTS, _LOSS_FIGURES = 2000, 4
"""Points drawn on the whole page, shared by its runs, and runs whose losses are drawn."""


def round_charts(runs: Sequence[FinishedRun], *, clients: bool) -> Iterator[Figure]:
    """Return the metric after each round, against rounds and virtual seconds, and the losses."""
    if not can_draw():
        return
    for metric in dict.fromkeys(run.result["metric"] for run in runs):
        alike = [run for run in runs if run.result["metric"] == metric]
        scored, errors = alike[0].scored, {r.label: r.number("standard_error") for r in alike}
        timed = [run for run in alike if clients or not run.hides_cohort]
        for name, along, title, shown in (
            ("round", "rounds done", f"{scored}, by round; bar: \u00b1 2 standard errors", alike),
            ("seconds", "virtual seconds", f"{scored}, against virtual seconds", timed),
        ):
            made = (_line(run, name, _ROUND_POINTS // len(runs)) for run in shown)
            lines, key = [line for line in made if len(line[1])], f"{metric}-by-{name}"
            more: dict[str, Any] = {"errors": errors, "points": _ROUND_POINTS}
            if lines:
                more["whole"] = name == "round"
                yield charts.lines(key, title, lines, along=along, up=scored, **more)
    with_losses = [run for run in runs if run.shares and charts.losses_of(run)]
    for run in with_losses[:_LOSS_FIGURES]:
        yield charts.draw_losses(run, f"losses-{run.slug}")


def _line(run: FinishedRun, name: str, points: int) -> Curve:
    x, y = run.history[name], run.history["value"]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    kept = thin(len(x), max(60, points))
    return run.label, x[kept], y[kept]


def last_rounds(runs: Sequence[FinishedRun], *, clients: bool) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the last values of the histories.

    A hidden cohort stays hidden: for runs with a budget the number of clients that answered is not
    shown, and without clients neither is the time, which depends on who was sampled.
    """
    own = [m for m in PER_CLIENT if any(np.isfinite(_last(run, m.name)) for run in runs)]
    counted = not all(run.hides_cohort for run in runs)
    head = ["run", "rounds", *(["clients that answered, mean"] if counted else [])]
    head += ["final metric", *(f"final {metric.title}" for metric in own), "virtual seconds"]
    rows = []
    for run in runs:
        answered = math.nan if run.hides_cohort else float(np.nanmean(run.history["answered"]))
        values = [*([answered] if counted else []), _last(run, "value")]
        values += [_last(run, metric.name) for metric in own]
        values.append(_last(run, "seconds") if clients or not run.hides_cohort else math.nan)
        cells = (short(value) if np.isfinite(value) else DASH for value in values)
        rows.append([run.label, f"{_last(run, 'round'):.0f}", *cells])
    return head, rows


def _last(run: FinishedRun, name: str) -> float:
    """Return the last value of a column; NaN where there is no such column."""
    return float(run.history[name][-1]) if name in run.history else math.nan


# --- guarantees

_STATED = 4
"""Private guarantees stated in full on a page; the others are in a table."""
VIEWS = {
    "other_clients": "all other clients together",
    "server": "the server",
    "server_secure_aggregation": "the server, with secure aggregation",
    "coordinator": "the coordinator, which sees only sums",
    "coordinator_and_corrupt": "the coordinator with the clients that may collude",
    "outsider": "an outsider who receives the shared model",
}
_OUTSIDER = (
    "the shared model is a function of the releases; a client that receives it is one of the other "
    "clients"
)
_SAMPLED = {
    "everyone": "every client in every round",
    "poisson": "Poisson",
    "fixed": "fixed size",
    "cyclic": "by a public schedule",
}


def guarantees(
    runs: Sequence[FinishedRun],
) -> tuple[list[tuple[FinishedRun, str]], list[list[str]]]:
    """Return every guarantee once, by its first run, with the names of all runs that share it.

    Guarantees beyond the first few are rows of a table.
    """
    alike: dict[Any, list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda run: (not run.private, not run.shares)):
        chosen = chosen_alone(run.guarantee, run.selection)
        key = (run.guarantee, run.result.get("clip"), run.caveats, chosen)
        alike.setdefault(key, []).append(run)
    whole, further = [], []
    for number, shared in enumerate(alike.values()):
        if shared[0].private and number >= _STATED:
            further.append(_in_short(shared[0], named(shared, runs)))
        else:
            whole.append((shared[0], named(shared, runs)))
    return whole, further


def _in_short(run: FinishedRun, labels: str) -> list[str]:
    guarantee = run.guarantee
    return [
        labels,
        round_up(run.epsilon),
        run.view,
        show_delta(guarantee.delta),
        guarantee.relation,
        str(len(guarantee.events)),
        _sampling(guarantee),
        guarantee.profile.accountant if run.selection is None else THEOREM,
    ]


def _sampling(guarantee: Guarantee) -> str:
    who = guarantee.participation
    if who.rate == 1:
        return _SAMPLED["everyone"]
    seen = "visible" if who.visible or is_local(guarantee) else "hidden"
    return f"{_SAMPLED[who.kind]}, rate {who.rate:.4g} per round, {seen}"


def sentences(run: FinishedRun) -> list[tuple[str, str]]:
    """Return the sentences of a guarantee, each with its subject or "".

    For a deployment they include what its coordinator observes.
    """
    sees = None
    if run.deployment:
        bounded = math.isfinite(float(run.deployment.get("epsilon_coordinator", math.inf)))
        observed = run.deployment.get("coordinator_sees")
        sees = "" if bounded else f"the coordinator, which observes {observed}; "
    found = []
    for line in charged_statement(run.guarantee, run.selection, server=sees).splitlines():
        about, colon, said = line.partition(":")
        found.append((f"{about}:", said) if colon and len(about) <= 20 else ("", line))
    return found


def has_blocks(guarantee: Guarantee) -> bool:
    """Return whether contributions are made of blocks with bounds of their own."""
    # Only blocks move by less than twice their bounds; the method defines these bounds.
    return any(getattr(event, "replaced", 2.0) != 2.0 for event in guarantee.events)


def views(run: FinishedRun) -> list[tuple[str, float, str]]:
    """Return adversary, epsilon and reason; for a deployment, its own adversaries."""
    guarantee, deployed = run.guarantee, run.deployment
    # The shared model is a function of the releases: an outsider observes no more than these.
    epsilons = {"outsider": guarantee.epsilon, **guarantee.views}
    why = {**reasons(guarantee), "outsider": _OUTSIDER}
    if deployed:
        own = str(deployed.get("coordinator_view"))
        why[own] = f"it observes {deployed.get('coordinator_sees')}"
    return [(who, epsilons[view], why.get(view, "")) for view, who in adversaries(run).items()]


def adversaries(run: FinishedRun) -> dict[str, str]:
    """Return the name of each adversary, by view; for a deployment, its own adversaries."""
    guarantee, deployed = run.guarantee, run.deployment
    known = {"outsider", *guarantee.views}
    labels = {view: who for view, who in VIEWS.items() if view in known}
    if is_in_shares(guarantee):
        labels["other_clients"] = "other clients, as many as may collude"
        labels["coalition_of_all_others"] = "all other clients together"
    if deployed:
        own = str(deployed.get("coordinator_view"))
        labels = {view: who for view, who in labels.items() if "server" not in view or view == own}
        labels[own] = "the coordinator"
    return labels


def attack_bounds(guarantee: Guarantee) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the bounds on the best attack by the other clients."""
    head = ["false positives", "true positives, at most"]
    most = guarantee.trade_off(ALARMS)
    rows = [[percent(a), ceiling(1 - miss)] for a, miss in zip(ALARMS, most, strict=True)]
    rough = charts.approximation(guarantee, ALARMS)
    if rough is not None:
        head.append("Gaussian approximation, not a bound")
        rows = [[*row, f"{100 * (1 - miss):.1f} %"] for row, miss in zip(rows, rough, strict=True)]
    return head, rows


def attack_charts(
    guarantee: Guarantee, slug: str, audit: Mapping[str, Any] | None = None
) -> list[Figure]:
    """Return the trade-off curve, with that of an audit's attack, and epsilon by round."""
    if not can_draw():
        return []
    errors = None if audit is None else np.array(audit["errors"], dtype=np.float64)
    return [
        charts.draw_trade_off(guarantee, f"trade-off-{slug}", errors),
        charts.spending(f"epsilon-by-round-{slug}", guarantee),
    ]


def audit_rows(audit: Mapping[str, Any]) -> list[list[str]]:
    """Return the lower bounds of an audit, by estimator."""
    return [
        [bound["estimator"].replace("_", " "), f"{bound['lower_bound']:.4g}"]
        for bound in audit["bounds"]
    ]


def spent_rows(guarantee: Guarantee) -> list[list[str]]:
    """Return some rounds, and epsilon after each."""
    steps = zip(*charts.spent_by_round(guarantee), strict=True)
    return [[str(done), round_up(epsilon)] for done, epsilon in steps]


def selected_bounds(epsilon: float, delta: float) -> list[list[str]]:
    """Return bounds on any attack from epsilon and delta only.

    True positives are at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)) at a false
    positives (Kairouz, Oh and Viswanath 2015).
    """
    caught = [
        min(math.exp(epsilon) * alarm + delta, 1 - math.exp(-epsilon) * (1 - delta - alarm))
        for alarm in ALARMS
    ]
    return [[percent(a), ceiling(most)] for a, most in zip(ALARMS, caught, strict=True)]


def ceiling(share: float) -> str:
    """Return a bound in per cent with one decimal, rounded up."""
    return f"{min(100.0, math.ceil(1000 * share - 1e-9) / 10):.1f}\u00a0%"


# --- for a privacy reviewer

_NO_BOUND = "no bound"
_NO_MU = "none: not one Gaussian release (sampling, or other noise)"
_NORMS = {None: "", 1: " (l1 norm)", 2: " (l2 norm)"}


def reviewer_rows(run: FinishedRun) -> list[list[str]]:
    """Return quantity, value and meaning, recomputed from the events of the certificate."""
    told = review(run.guarantee)
    if told is None:
        return []
    stated, delta = run.guarantee.relation, show_delta(told["delta"])
    rows = [
        [f"epsilon, {relation}", _epsilon(value), f"{RELATIONS[relation]}; at delta {delta}"]
        for relation, value in told["epsilon"].items()
    ]
    mu = "; ".join(f"{round_up(m)} ({name})" for name, m in told["mu"].items() if m is not None)
    rows.append(["mu", mu or _NO_MU, "all releases together are mu-Gaussian DP"])
    curve = [f"{one['epsilon']:g}:\u00a0{round_up(one['delta'], 2)}" for one in told["profile"]]
    rows.append([f"delta by epsilon, {stated}", "; ".join(curve), "the privacy profile"])
    rows += [
        [
            f"attack, {percent(one['false_positives'])} false positives",
            ceiling(one["true_positives"]),
            f"true positives of the best attack, at most; {stated}",
        ]
        for one in told["attack"]
    ]
    rows += [
        [
            f"epsilon, person at {one['clients']} clients",
            _epsilon(one["epsilon"]),
            f"each of the {one['clients']} clients is replaced; at delta {delta}",
        ]
        for one in told["person"][1:]
    ]
    whose = "of one message" if is_local(run.guarantee) else "of a released sum"
    return rows + [_part_row(part, whose) for part in run.parts]


def _part_row(part: Part, whose: str) -> list[str]:
    bound = "none" if part.bounds is None else f"{_between(*part.bounds)}{_NORMS[part.norm]}"
    return [
        f"release: {listed(part.leaves, 3)}",
        f"bound {bound}, noise {_between(*part.noise)}",
        f"bound on one client's contribution; standard deviation of one number {whose}",
    ]


def _between(low: float, high: float) -> str:
    least, most = f"{low:.4g}", f"{high:.4g}"
    return least if least == most else f"{least} to {most}"


def _epsilon(value: float | None) -> str:
    return _NO_BOUND if value is None else round_up(value)


# --- data used

_NAMED_COLUMNS = 40  # columns named at most


def data_rows(runs: Sequence[FinishedRun], *, clients: bool = True) -> list[list[str]]:
    """Return facts of the data that the first run used; [] where they are not kept.

    What earlier runs on the same clients spent is for the owner: it is left out without `clients`.
    """
    used = runs[0].result.get("data_used")
    if not isinstance(used, Mapping):
        return []
    empty, columns = used.get("clients_without_rows"), used.get("columns") or ()
    without = f", {empty:,} of them without training rows" if empty else ""
    rows = [
        ["clients", f"{used.get('clients', 0):,}{without}"],
        ["rows", f"{used.get('rows', 0):,}, of which {used.get('training_rows', 0):,} train"],
    ]
    for title, names in (("features", columns), ("columns left out", used.get("columns_left_out"))):
        if names:
            more = f", ... ({len(names)} in all)" if len(names) > _NAMED_COLUMNS else ""
            rows.append([title, ", ".join(map(str, names[:_NAMED_COLUMNS])) + more])
    rows += [["note", str(note)] for note in used.get("notes") or ()]
    return rows + (_register_rows(runs) if clients else [])


def _register_rows(runs: Sequence[FinishedRun]) -> list[list[str]]:
    """Return what private runs on these clients have spent, up to the last of these."""
    found = [run.result.get("register") for run in runs]
    stated = [one for one in found if isinstance(one, Mapping)]
    if not stated:
        return []
    last = max(stated, key=lambda one: int(one["runs"]))
    text = f"epsilon at most {round_up(float(last['epsilon']))} (delta {show_delta(last['delta'])})"
    return [["private runs on these clients", f"{last['runs']} with this one: {text}"]]
