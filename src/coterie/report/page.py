"""One HTML page for one run or several: the answer, the guarantee, and what each client gains.

The page is self-contained and reads the run folders' files only. Metrics are not private: a page
with every client's errors is for whoever may see the data.
"""

import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie import __version__
from coterie.privacy.accounting import Guarantee
from coterie.privacy.files import write_atomically
from coterie.privacy.views import is_local
from coterie.privacy.words import describe_noise, round_up
from coterie.report import charts
from coterie.report.attack import show_attack
from coterie.report.charts import Html, element, join, percent, short, table
from coterie.report.clients import show_spread
from coterie.report.finished import FinishedRun, read_finished
from coterie.report.history import show_history
from coterie.report.references import show_references
from coterie.report.results import SIMULATION, show_results

_LISTED, _POINTS = 600, 1500
"""Clients named and points drawn on the whole page, shared by its runs; keeps it below 1 MB."""
_VALUES = {"nmse": "test error", "accuracy": "test accuracy"}
_ERRORS = {"nmse": "mean squared error", "accuracy": "share of test rows wrong"}
_NOT_COVERED = (
    "Metrics, and any choice made by looking at them (settings, rounds, which run to keep), are "
    "not covered by epsilon. This page shows clients' own errors: keep it as you keep the data."
)
_AVERAGE = (
    "The promise is an average over clients, not one per client: joining may cost some clients, "
    "and no method here promises a given client that it gains."
)


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write one page about finished runs; charts need the extra `report`.

    Raises:
        ValueError: If no folder is given, or one has no finished run or cannot be read.
    """
    if not folders:
        raise ValueError("no run folders: give at least one folder that `coterie run` has written")
    runs = read_finished(folders)
    first = (_opening, show_results, show_references, show_spread, show_history)
    body = join(*(section(runs) for section in (*first, _guarantees, _clients, _appendix)))
    title = element("title", f"coterie: {_title(runs)}")
    head = join(charts.META, title, element("style", Html(charts.STYLE)))
    page = element("html", element("head", head), element("body", body), lang="en")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, f"<!DOCTYPE html>\n{page}\n".encode())
    return out


def _title(runs: Sequence[FinishedRun]) -> str:
    names = dict.fromkeys(
        f"{Path(run.result['data']).name}, {run.result['clients']} clients" for run in runs
    )
    return "; ".join(names) + ", one model each"


def _best(runs: Sequence[FinishedRun]) -> tuple[FinishedRun, int]:
    """Choose the run to speak of, and say of how many it is the best."""
    private = [run for run in runs if run.private]
    several = private or [run for run in runs if run.shares] or list(runs)

    def badness(run: FinishedRun) -> float:
        value = run.number("value") * (1 if run.result["metric"] == "nmse" else -1)
        return math.inf if math.isnan(value) else value

    return min(several, key=badness), len(several)


def _opening(runs: Sequence[FinishedRun]) -> Html:
    run, several = _best(runs)
    result = run.result
    lead = "Without any privacy" if run.shares else "Without sharing anything"
    if run.private:
        lead = f"At epsilon {round_up(run.epsilon)}"
    what = _VALUES.get(result["metric"], f"test {result['metric']}")
    text = f"{lead}, {result['method']}'s {what} is {short(run.number('value'))}"
    if run.shares and result.get("local_value") is not None:
        text += f" against {short(run.number('local_value'))} alone"
    if run.shares and result.get("share_better_than_local") is not None:
        share = run.number("share_better_than_local")
        text += f"; {percent(share)} of clients are better off than alone"
    parts = [element("h1", _title(runs)), element("p", f"{text}.", class_="answer")]
    if several > 1:
        kind = "private " if run.private else ""
        told = f"This is {run.label}, the best of {several} {kind}runs by these same metrics."
        parts.append(element("p", told, class_="note"))
    parts += [element("p", told) for told in _foretold(runs)]
    if any(run.result["simulation"] for run in runs):
        parts.append(element("p", element("span", SIMULATION, class_="badge")))
    bare = ", ".join(run.label for run in runs if run.shares and not run.private)
    if bare:
        parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), f": {bare}"))
    return element("header", *parts)


def _foretold(runs: Sequence[FinishedRun]) -> list[str]:
    """Give each verdict and each choice of a method once, with the runs that they are of."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for sentence in run.foretold:
            said.setdefault(sentence, []).append(run.label)
    if len(runs) == 1:
        return list(said)
    return [f"{', '.join(labels)}: {sentence}" for sentence, labels in said.items()]


def _guarantees(runs: Sequence[FinishedRun]) -> Html:
    """State every guarantee once, with the runs that share it."""
    by_guarantee: dict[tuple[Guarantee, float | None, tuple[str, ...]], list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda run: (not run.private, not run.shares)):
        stated = (run.guarantee, run.result.get("clip"), run.caveats)
        by_guarantee.setdefault(stated, []).append(run)
    parts: list[str] = [element("h2", "What is guaranteed")]
    for number, ((guarantee, clip, caveats), shared) in enumerate(by_guarantee.items()):
        parts.append(element("h3", ", ".join(run.label for run in shared)))
        if not shared[0].shares:
            parts.append(element("p", "Nothing is released: epsilon is 0."))
        elif not shared[0].private:
            why = ": contributions are released without noise. Whoever sees them may learn all."
            why = why if guarantee.claimed_epsilon is None else f". {guarantee.statement()}"
            parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), why))
        else:
            parts.append(_words(guarantee, clip))
        parts += [element("p", element("strong", caveat)) for caveat in caveats]
        if shared[0].private:
            parts.append(show_attack(guarantee, f"g{number}"))
    parts.append(element("p", _NOT_COVERED, class_="note"))
    return element("section", *parts)


def _words(guarantee: Guarantee, clip: float | None) -> Html:
    said = [element("p", line) for line in guarantee.statement().splitlines()]
    bound = "C" if clip is None else f"C = {clip:.4g}"
    symbols = Html(
        "Pr[<i>M</i>(<i>D</i>) &isin; <i>S</i>] &le; e<sup>&epsilon;</sup> "
        "Pr[<i>M</i>(<i>D</i>&prime;) &isin; <i>S</i>] + &delta; for every set <i>S</i>, "
        f"&epsilon; = {round_up(guarantee.epsilon)}, &delta; = {guarantee.delta:.3g}"
    )
    others = guarantee.views["other_clients"]
    jointly = "the same bound" if others == guarantee.epsilon else f"epsilon = {round_up(others)}"
    released = "messages" if is_local(guarantee) else "posts"
    meaning = (
        f"M is the {released} of all {len(guarantee.events)} rounds together; D and D\u2032 differ "
        f"in one client by {guarantee.relation}. A post adds up what clients contribute, each "
        f"clipped to {bound}, "
        f"plus {describe_noise(guarantee.events)}. The other clients' models are "
        f"functions of the posts and of their own data, and obey {jointly} jointly."
    )
    return element(
        "div",
        *said,
        element("p", "In symbols", class_="label"),
        element("p", symbols, class_="symbols"),
        element("p", meaning, class_="note"),
        class_="card",
    )


def _clients(runs: Sequence[FinishedRun]) -> Html:
    parts: list[str] = [element("h2", "Does joining help me?"), element("p", _AVERAGE)]
    shown = [run for run in runs if run.shares]
    if not shown:
        parts.append(element("p", "Nobody joins anything here: every client learns alone."))
    for number, run in enumerate(shown):
        parts.append(element("h3", run.label))
        if "error_alone" in run.metrics:
            parts.append(_gains(run, f"r{number}", len(shown)))
        else:
            parts.append(element("p", "This run did not compare itself with learning alone."))
    return element("section", *parts)


def _gains(run: FinishedRun, key: str, sharing: int) -> Html:
    rows, joined, alone = (run.column(n) for n in ("test_rows", "error", "error_alone"))
    known = rows > 0
    if not known.any():
        return element("p", "No client has test rows.")
    total = int(known.sum())
    gain, same = int((joined < alone)[known].sum()), int((joined == alone)[known].sum())
    lose = total - gain - same
    told = (
        f"{gain} of {total} clients gain ({percent(gain / total)}), {lose} lose "
        f"({percent(lose / total)}), {same} see no difference. A client's error is its "
        f"{_ERRORS.get(run.result['metric'], 'error')}; with a median of "
        f"{np.median(rows[known]):.4g} test rows a client, one client's difference is partly luck."
    )
    finite = known & np.isfinite(joined) & np.isfinite(alone)
    if total < len(rows):
        told += f" {len(rows) - total} clients have no test rows and are not counted."
    if finite.sum() < total:
        told += f" {total - int(finite.sum())} have no finite error and are not drawn."
    parts: list[str] = [element("p", told)]
    if finite.any():
        parts.append(charts.show_gains(alone[finite], joined[finite], key, _POINTS // sharing))
    parts.append(_listing(run, np.flatnonzero(known), max(40, _LISTED // sharing)))
    return join(*parts)


def _listing(run: FinishedRun, known: NDArray[np.int64], listed: int) -> Html:
    """List clients from the most lost to the most gained; of many, only both ends."""
    joined, alone = run.column("error"), run.column("error_alone")
    with np.errstate(invalid="ignore"):
        order = known[np.argsort(np.nan_to_num((alone - joined)[known], nan=-math.inf))]
    title = "Every client"
    if len(order) > listed:
        half = listed // 2
        order = np.concatenate([order[:half], order[-half:]])
        title = f"The {half} clients that lose most and the {half} that gain most"
    columns = ("client", "train_rows", "test_rows")
    rows = [
        [*(str(run.metrics[name][i]) for name in columns), short(alone[i]), short(joined[i])]
        for i in order.tolist()
    ]
    head = ["client", "train rows", "test rows", "error alone", "error joined"]
    told = f"{title} (all are in metrics.parquet)"
    return element("details", element("summary", told), table(head, rows))


def _appendix(runs: Sequence[FinishedRun]) -> Html:
    parts: list[str] = [element("h2", "Plan and versions")]
    for run in runs:
        title = element("summary", f"{run.label}: {run.folder.resolve().name}/plan.toml")
        opened = {"open": ""} if len(runs) == 1 else {}
        used = ", ".join(f"{name} {told}" for name, told in run.versions.items())
        inside = (title, element("pre", run.plan), element("p", f"Run with {used}."))
        parts.append(element("details", *inside, class_="plan", **opened))
    drawn = f", matplotlib {version('matplotlib')}" if charts.can_draw() else ""
    made = f"Page by coterie {__version__}, Python {platform.python_version()}{drawn}."
    parts.append(element("p", made, class_="note"))
    return element("section", *parts)
