"""One HTML page for one run or several: the answer, the guarantee, and what each client gains.

The page is self-contained and reads the run folders' files only. Metrics are not private: a page
with every client's errors is for whoever may see the data.
"""

import json
import math
import platform
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coterie import __version__, charts
from coterie.charts import Html, element, join, percent, short, table
from coterie.privacy.accounting import Guarantee
from coterie.privacy.files import write_atomically
from coterie.privacy.words import describe_noise, round_up

Array = NDArray[np.float64]

_LISTED, _POINTS = 600, 1500
"""Clients named and points drawn on the whole page, shared by its runs; keeps it below 1 MB."""
_RESULT = {"method", "data", "clients", "rounds", "metric", "value", "simulation"}
_COLUMNS = {"client", "train_rows", "test_rows", "error"}
_VALUES = {"nmse": "test error", "accuracy": "test accuracy"}
_ERRORS = {"nmse": "mean squared error", "accuracy": "share of test rows wrong"}
_DIRECTIONS = {"nmse": "smaller is better", "accuracy": "larger is better"}
_SIMULATION = "SIMULATION: known seed, protects nobody"
_NOT_COVERED = (
    "Metrics, and any choice made by looking at them (settings, rounds, which run to keep), are "
    "not covered by epsilon. This page shows clients' own errors: keep it as you keep the data."
)
_AVERAGE = (
    "The promise is an average over clients, not one per client: joining may cost some clients, "
    "and no method here promises a given client that it gains."
)


@dataclass(frozen=True)
class _Run:
    """What a finished run folder holds.

    Attributes:
        folder: Where it is.
        label: Its name on the page.
        result: The summary.
        guarantee: Rebuilt, so that epsilon is computed anew.
        plan: The plan's text.
        versions: Of the software that stated the guarantee.
        metrics: Columns by name, a row a client; `error_alone` may be missing.
    """

    folder: Path
    label: str
    result: dict[str, Any]
    guarantee: Guarantee
    plan: str
    versions: dict[str, str]
    metrics: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """Epsilon, computed anew."""
        return self.guarantee.epsilon

    @property
    def shares(self) -> bool:
        """Whether clients post anything: if not, each of them learns alone."""
        return len(self.guarantee.events) > 0

    @property
    def private(self) -> bool:
        """Whether clients post, and under noise."""
        return self.shares and math.isfinite(self.epsilon)

    @property
    def data(self) -> Any:
        """The plan's choice of data."""
        return tomllib.loads(self.plan).get("data")

    def number(self, key: str) -> float:
        """Read a number of the summary; null is not-a-number."""
        value = self.result.get(key)
        return math.nan if value is None else float(value)

    def column(self, name: str) -> Array:
        """Read a column of numbers; null is not-a-number."""
        return np.array([math.nan if x is None else x for x in self.metrics[name]], np.float64)


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write one page about finished runs; charts need the extra `report`.

    Raises:
        ValueError: If no folder is given, or one has no finished run or cannot be read.
    """
    if not folders:
        raise ValueError("no run folders: give at least one folder that `coterie run` has written")
    runs = _name([_read(Path(folder)) for folder in folders])
    sections = (_opening, _results, _guarantees, _clients, _appendix)
    body = join(*(section(runs) for section in sections))
    title = element("title", f"coterie: {_title(runs)}")
    head = join(charts.META, title, element("style", Html(charts.STYLE)))
    page = element("html", element("head", head), element("body", body), lang="en")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, f"<!DOCTYPE html>\n{page}\n".encode())
    return out


def _read(folder: Path) -> _Run:
    if not (folder / "result.json").exists():
        raise ValueError(
            f"{folder} has no finished run; resume it with `coterie run --resume {folder}`"
        )
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        plan = (folder / "plan.toml").read_text(encoding="utf-8")
        tomllib.loads(plan)
        metrics = pq.read_table(folder / "metrics.parquet").to_pydict()
        guarantee = Guarantee.from_json(stated)
        missing = (_RESULT - result.keys()) | (_COLUMNS - metrics.keys())
        if missing:
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({type(error).__name__}: {error}); its files are not as "
            "`coterie run` wrote them: run the plan again into a new folder"
        ) from error
    versions = stated.get("versions", {})
    return _Run(folder, result["method"], result, guarantee, plan, versions, metrics)


def _name(runs: Sequence[_Run]) -> list[_Run]:
    """Give every run a label of its own: the method, with epsilon and a number where needed."""
    methods = Counter(run.label for run in runs)
    seen: Counter[str] = Counter()
    named = []
    for run in runs:
        label = run.label
        if methods[label] > 1 and run.shares:
            label = f"{label}, epsilon {round_up(run.epsilon)}"
        seen[label] += 1
        named.append(replace(run, label=f"{label} ({seen[label]})" if seen[label] > 1 else label))
    return named


def _title(runs: Sequence[_Run]) -> str:
    names = dict.fromkeys(
        f"{Path(run.result['data']).name}, {run.result['clients']} clients" for run in runs
    )
    return "; ".join(names) + ", one model each"


def _best(runs: Sequence[_Run]) -> tuple[_Run, int]:
    """Choose the run to speak of, and say of how many it is the best."""
    private = [run for run in runs if run.private]
    several = private or [run for run in runs if run.shares] or list(runs)

    def badness(run: _Run) -> float:
        value = run.number("value") * (1 if run.result["metric"] == "nmse" else -1)
        return math.inf if math.isnan(value) else value

    return min(several, key=badness), len(several)


def _opening(runs: Sequence[_Run]) -> Html:
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
    if any(run.result["simulation"] for run in runs):
        parts.append(element("p", element("span", _SIMULATION, class_="badge")))
    bare = ", ".join(run.label for run in runs if run.shares and not run.private)
    if bare:
        parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), f": {bare}"))
    return element("header", *parts)


def _results(runs: Sequence[_Run]) -> Html:
    metrics = {run.result["metric"] for run in runs}
    metric = metrics.pop() if len(metrics) == 1 else ""
    way = _DIRECTIONS.get(metric, "")
    scored = f"test {metric} ({way})" if way else "test metric"
    binary = any(run.result.get("auc") is not None for run in runs)
    head = ["method", scored, "alone", "better off than alone", *(["test AUC"] if binary else [])]
    head += ["epsilon", "delta", "relation", "rounds"]
    rows = [_row(run, "" if way else f" {run.result['metric']}", binary) for run in runs]
    parts: list[str] = [element("h2", "Results"), table(head, rows, class_="cards")]
    parts += [element("p", caution, class_="note") for caution in _cautions(runs)]
    if len(runs) > 1 and way and charts.can_draw():
        chart = charts.scores(
            "scores",
            f"test {metric} ({way}), with two standard errors",
            labels=[run.label for run in runs],
            values=np.array([run.number("value") for run in runs]),
            errors=np.nan_to_num([run.number("standard_error") for run in runs]),
            alone=np.array([run.number("local_value") for run in runs]),
        )
        parts.append(element("div", chart, class_="charts"))
    return element("section", *parts)


def _row(run: _Run, metric: str, binary: bool) -> list[str]:
    result = run.result
    name: str = run.label
    if result["simulation"]:
        name = join(name, Html("<br>"), element("span", _SIMULATION, class_="badge"))
    share = run.number("share_better_than_local")
    epsilon: str = f"{round_up(run.epsilon)}" if run.shares else "0 (nothing is released)"
    if run.shares and not run.private:
        epsilon = element("span", "NOT PRIVATE (inf)", class_="bad")
    return [
        name,
        _plus_minus(run, "value", "standard_error") + metric,
        "\u2013" if result.get("local_value") is None else short(run.number("local_value")),
        "learns alone" if not run.shares else "\u2013" if math.isnan(share) else percent(share),
        *([_plus_minus(run, "auc", "auc_standard_error")] if binary else []),
        epsilon,
        f"{run.guarantee.delta:.3g}",
        run.guarantee.relation,
        str(result["rounds"]),
    ]


def _plus_minus(run: _Run, key: str, error: str) -> str:
    told, away = short(run.number(key)), run.number(error)
    return told if math.isnan(away) else f"{told} \u00b1 {short(away)}"


def _cautions(runs: Sequence[_Run]) -> list[str]:
    told = ["\u00b1 is one standard error over clients. Metrics are not covered by epsilon."]
    for run in (run for run in runs if run.result.get("auc_left_out")):
        left = f"{run.result['auc_left_out']} clients without test rows of both classes"
        told.append(f"{run.label}: the AUC is a mean over clients and leaves out {left}.")
    if any(run.data != runs[0].data for run in runs):
        told.append("These runs differ in data, split or scaling: do not compare their metrics.")
    private = [run for run in runs if run.private]
    if len({(run.guarantee.relation, run.guarantee.delta) for run in private}) > 1:
        told.append("Epsilons at different relations or deltas cannot be compared.")
    if len(private) > 1 and len({run.guarantee.relation for run in private}) == 1:
        spent = sum(run.epsilon for run in private)
        delta = sum(run.guarantee.delta for run in private)
        told.append(
            "Each epsilon is of one run. If clients see all private runs on the same data, these "
            f"spend together up to epsilon {round_up(spent)} at delta {delta:.3g}."
        )
    for run in runs:
        if run.result.get("tuning", "").startswith("NOT COVERED"):
            told.append(f"{run.label}: tuning is {run.result['tuning']}.")
        if (claimed := run.number("epsilon")) < run.epsilon * 0.999 - 1e-9:
            told.append(
                f"{run.label}: result.json says epsilon {claimed:.4g}, but its guarantee.json "
                f"amounts to {round_up(run.epsilon)}, which is shown."
            )
    return told


def _guarantees(runs: Sequence[_Run]) -> Html:
    """State every guarantee once, with the runs that share it."""
    by_guarantee: dict[tuple[Guarantee, Any], list[_Run]] = {}
    for run in sorted(runs, key=lambda run: (not run.private, not run.shares)):
        by_guarantee.setdefault((run.guarantee, run.result.get("clip")), []).append(run)
    parts: list[str] = [element("h2", "What is guaranteed")]
    for number, ((guarantee, clip), shared) in enumerate(by_guarantee.items()):
        parts.append(element("h3", ", ".join(run.label for run in shared)))
        if not shared[0].shares:
            parts.append(element("p", "Nothing is released: epsilon is 0."))
        elif not shared[0].private:
            why = ": contributions are released without noise. Whoever sees them may learn all."
            why = why if guarantee.claimed_epsilon is None else f". {guarantee.statement()}"
            parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), why))
        else:
            parts.append(_words(guarantee, clip))
            parts.append(charts.show_attack(guarantee, f"g{number}"))
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
    meaning = (
        f"M is all {len(guarantee.events)} posts together; D and D\u2032 differ in one client by "
        f"{guarantee.relation}. A post adds up what clients contribute, each clipped to {bound}, "
        f"plus {describe_noise(guarantee.events)}. The other clients' models are "
        "functions of the posts and of their own data, and obey the same bound jointly."
    )
    return element(
        "div",
        *said,
        element("p", "In symbols", class_="label"),
        element("p", symbols, class_="symbols"),
        element("p", meaning, class_="note"),
        class_="card",
    )


def _clients(runs: Sequence[_Run]) -> Html:
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


def _gains(run: _Run, key: str, sharing: int) -> Html:
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


def _listing(run: _Run, known: NDArray[np.int64], listed: int) -> Html:
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


def _appendix(runs: Sequence[_Run]) -> Html:
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
