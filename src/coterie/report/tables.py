"""The one table builder: results of runs as columns and rows, for terminal, page and trackers.

A builder takes summaries (result.json) and asks the metrics registry for titles and directions. A
renderer turns a `Table` into text (`to_rich`) or HTML (the template of `coterie.report.page`), so
that a number is the same wherever it is shown.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from coterie.evaluation.baselines import DESCRIPTIONS, verdicts
from coterie.evaluation.baselines import TITLES as BASELINES
from coterie.evaluation.metrics import METRICS, PER_CLIENT, TAILS, Metric, average
from coterie.privacy.guarantee import round_up, show_delta
from coterie.report.read import Group, metric_title

DASH = "\u2013"
SIMULATION = "SIMULATION: known seed, protects nobody"
_TUNED = "tuning NOT COVERED by epsilon"
_SHOWN = {"mean": "mean over clients", "weighted_mean": "mean weighted by rows",
          "p10": "10th percentile", "p90": "90th percentile", "worst": "worst client"}  # fmt: skip
_VALUE = ("value", "standard_error")
_DIFFERENCE = ("difference", "difference_standard_error")


@dataclass(frozen=True)
class Mark:
    """Text with emphasis: "bad", "badge" or "strong"."""

    text: str
    kind: str


@dataclass(frozen=True)
class Number:
    """A value of some significant digits with its standard error; NaN where unknown."""

    value: float
    error: float = math.nan
    digits: int = 3
    note: str = ""

    def text(self, *, error: bool = True) -> str:
        """Return the number as text, with its standard error where known and wanted."""
        if math.isnan(self.value):
            return DASH
        shown = f"{self.value:.{self.digits}g}{self.note}"
        known = error and not math.isnan(self.error)
        return f"{shown} \u00b1 {self.error:.2g}" if known else shown


Cell = str | Mark | Number | tuple[str | Mark, ...]


@dataclass(frozen=True)
class Table:
    """Columns and rows of text, ready to render.

    Attributes:
        keys: Names of the columns for code; `titles` are for readers.
        rows: One cell per column; the first names the row.
    """

    keys: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> "Table":
        """Return a plain table whose columns are named by their titles."""
        return cls(tuple(titles), tuple(titles), tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Entry:
    """A row of a table: one run, or runs that differ in their seed alone.

    Attributes:
        epsilon: Against the adversary of `view`.
        shares: Whether clients release anything.
        planned: Planned rounds, where they are known.
    """

    label: str
    results: tuple[Mapping[str, Any], ...]
    epsilon: float
    view: str
    shares: bool
    planned: int | None = None

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> "Entry":
        """Return the row of one summary."""
        shares = bool(result.get("rounds", 1))
        view = str(result.get("view") or "")
        return cls(
            str(result["method"]), (result,), float(result.get("epsilon") or 0), view, shares
        )

    @classmethod
    def of_group(cls, group: Group) -> "Entry":
        """Return the row of a group of finished runs."""
        run = group.first
        results, planned = tuple(one.result for one in group.runs), len(run.guarantee.events)
        return cls(group.label, results, run.epsilon, run.view, run.shares, planned)

    @property
    def first(self) -> Mapping[str, Any]:
        """The summary of the first run."""
        return self.results[0]

    @property
    def private(self) -> bool:
        """Whether clients release something, and with noise."""
        return self.shares and math.isfinite(self.epsilon)

    def number(self, key: str, error: str = "", digits: int = 3) -> Number:
        """Return the mean over runs of a number of the summary, with its standard error."""
        values = [_float(result.get(key)) for result in self.results]
        errors = [_float(result.get(error)) for result in self.results]
        value, away = average(values, errors)
        return Number(value, away, digits)

    @property
    def epsilon_cell(self) -> Cell:
        """Epsilon, rounded up."""
        if not self.shares:
            return "0"
        return round_up(self.epsilon) if self.private else Mark("NOT PRIVATE (inf)", "bad")


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def percent(share: float) -> str:
    """Return a share in whole per cent, which no line break parts from its sign."""
    return DASH if math.isnan(share) else f"{100 * share:.0f}\u00a0%"


# --- results


def results_table(entries: Sequence[Entry], *, groups: bool = False, badges: bool = True) -> Table:
    """Return the metrics of runs with their local baseline, epsilon and rounds.

    Rows may be groups of runs; `badges` mark simulations in each row.
    """
    names = list(dict.fromkeys(entry.first["metric"] for entry in entries))
    known = [name for name in names if name is not None]
    own = [
        m for m in PER_CLIENT if any(r.get(m.name) is not None for e in entries for r in e.results)
    ]
    columns: dict[str, tuple[str, Callable[[Entry], Cell]]] = {
        "method": ("method", lambda entry: _name(entry, badges))
    }
    if len({entry.first.get("data") for entry in entries}) > 1:
        columns["data"] = ("data", lambda entry: Path(str(entry.first["data"])).name)
    if groups:
        columns["runs"] = ("runs", lambda entry: str(len(entry.results)))
    if known:
        mixed = len(names) > 1
        title = "test metric" if mixed else metric_title(known[0])
        columns["value"] = (title, lambda entry: _headline(entry, mixed))
        columns["local_value"] = ("local", lambda entry: entry.number("local_value", digits=4))
        columns["better"] = ("clients better than local", _better)
    for metric in own:
        columns[metric.name] = (f"test {metric.title}", lambda entry, m=metric: _own(entry, m))  # type: ignore[misc]
    columns["epsilon"] = ("epsilon", lambda entry: entry.epsilon_cell)
    columns |= {name: (name, of) for name, of in _separate(entries).items()}
    columns["rounds"] = ("rounds", _rounds)
    return Table(
        tuple(columns),
        tuple(title for title, _ in columns.values()),
        tuple(tuple(of(entry) for _, of in columns.values()) for entry in entries),
        notes=tuple(_result_notes(entries, own, groups=groups)),
    )


def _name(entry: Entry, badges: bool) -> Cell:
    marks = []
    if badges and any(result.get("simulation") for result in entry.results):
        marks.append(Mark(SIMULATION, "badge"))
    if any("NOT COVERED" in str(result.get("tuning")) for result in entry.results):
        marks.append(Mark(_TUNED, "badge"))
    return (entry.label, *marks) if marks else entry.label


def _headline(entry: Entry, mixed: bool) -> Cell:
    found, name = entry.number(*_VALUE, digits=4), entry.first["metric"]
    return f"{found.text()} {name}" if mixed and name else found


def _better(entry: Entry) -> str:
    """Return the share of clients that are better than local, and the worse ones where some tie."""
    share = entry.number("share_better_than_local").value
    if not entry.shares:
        return DASH
    if share == 0 and entry.first["value"] == entry.first["local_value"]:
        return "same as local"  # nothing stood out of the noise
    local = [by_name(result).get("local", {}) for result in entry.results]
    worse = [_float(one.get("share_worse_off")) for one in local]
    lost = sum(worse) / len(worse)
    ties = share + lost <= 0.995
    return f"{percent(share)}, {percent(lost)} worse" if ties else percent(share)


def by_name(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the baselines of a summary by name."""
    return {one["name"]: one for one in result.get("references") or ()}


def _own(entry: Entry, metric: Metric) -> Number:
    """Return a mean over clients; the median where a few clients dominate the mean."""
    if _shows_median(entry, metric):
        found = entry.number(f"{metric.name}_median")
        return Number(found.value, note=" (median)")
    return entry.number(metric.name, f"{metric.name}_standard_error")


def _shows_median(entry: Entry, metric: Metric) -> bool:
    return any(_float(one.get(metric.name)) < metric.show_median_below for one in entry.results)


def _rounds(entry: Entry) -> str:
    done = entry.first["rounds"]
    return str(done) if entry.planned in (None, done) else f"{done} of {entry.planned}"


_CONDITIONS: dict[str, Callable[[Entry], str]] = {
    "against": lambda entry: entry.view if entry.private else DASH,
    "delta": lambda entry: show_delta(_float(entry.first.get("delta"))),
    "relation": lambda entry: str(entry.first.get("relation")),
}
"""What an epsilon depends on."""


def _separate(entries: Sequence[Entry]) -> dict[str, Callable[[Entry], str]]:
    """Return the conditions of epsilon that differ between rows."""
    private = [entry for entry in entries if entry.private]
    return {name: of for name, of in _CONDITIONS.items() if len({of(e) for e in private}) > 1}


def _result_notes(
    entries: Sequence[Entry], own: Sequence[Metric], *, groups: bool
) -> Iterator[str]:
    over = "clients and seeds" if groups and any(len(e.results) > 1 for e in entries) else "clients"
    if any(entry.first["metric"] is not None for entry in entries):
        yield f"\u00b1 is one standard error over {over}. Metrics are not covered by epsilon."
    if private := [entry for entry in entries if entry.private]:
        same = {n: of(private[0]) for n, of in _CONDITIONS.items() if n not in _separate(entries)}
        if same:
            yield f"Epsilon: {', '.join(f'{name} {value}' for name, value in same.items())}."
    for metric in own:
        left = max(
            _float(r.get(f"{metric.name}_left_out") or 0) for e in entries for r in e.results
        )
        if left:
            title = f"{metric.title[0].upper()}{metric.title[1:]}"
            yield f"{title} is not defined for {_clients(int(left))} without {metric.needs}."
        if any(_shows_median(entry, metric) for entry in entries):
            yield (
                f"The mean {metric.title} is below {metric.show_median_below:g}, so the median "
                "over clients is shown: a few clients can dominate the mean."
            )


# --- baselines


def baselines_table(entries: Sequence[Entry]) -> Table | None:
    """Return the comparison of runs with baselines; None where there is none."""
    shown = [entry for entry in entries if entry.shares and entry.first.get("references")]
    if not shown:
        return None
    table = _one_run(shown[0]) if len(shown) == 1 else _several_runs(shown)
    names = dict.fromkeys(name for entry in shown for name in by_name(entry.first))
    notes = [f"{BASELINES[name]}: {DESCRIPTIONS[name]}." for name in names if name in BASELINES]
    missing = (why for entry in shown for why in entry.first.get("references_missing") or ())
    notes += [f"{why}." for why in dict.fromkeys(map(str, missing))]
    for error in dict.fromkeys(_client_error(entry) for entry in shown):
        notes.append(
            f"Difference: mean over clients of ({error} under the run - {error} under the "
            "baseline); below 0 the run is better. t is the difference in standard errors over "
            "clients. Not covered by epsilon."
        )
    return Table(table.keys, table.titles, table.rows, table.title, tuple(notes))


def _client_error(entry: Entry) -> str:
    metric = METRICS.get(entry.first["metric"])
    return "error" if metric is None else metric.client_error


def _one_run(entry: Entry) -> Table:
    rows = tuple(
        (
            BASELINES.get(name, name),
            _number(one, *_VALUE, digits=4),
            _number(one, *_DIFFERENCE),
            _t(one),
            percent(_float(one.get("share_worse_off"))),
        )
        for name, one in by_name(entry.first).items()
    )
    titles = ("baseline", metric_title(entry.first["metric"]),
              f"difference in {_client_error(entry)}", "t", "clients worse off")  # fmt: skip
    keys = ("baseline", "value", "difference", "t", "worse")
    return Table(keys, titles, rows, f"{entry.label} and its baselines")


def _several_runs(entries: Sequence[Entry]) -> Table:
    """Return each baseline once, in the head, and each run's t and share of clients worse off."""
    found = [by_name(entry.first) for entry in entries]
    names = [name for name in BASELINES if any(name in one for one in found)]
    titles = []
    for name in names:
        values = {_number(one[name], *_VALUE, digits=4).text() for one in found if name in one}
        # The local baseline of some methods is their own.
        titles.append(f"{BASELINES[name]}: {values.pop() if len(values) == 1 else 'by method'}")
    rows = tuple(
        (entry.label, entry.epsilon_cell, *(_compared(one.get(name)) for name in names))
        for entry, one in zip(entries, found, strict=True)
    )
    title = "runs and baselines: t, clients worse off"
    return Table(("method", "epsilon", *names), ("method", "epsilon", *titles), rows, title)


def _number(one: Mapping[str, Any], key: str, error: str, digits: int = 3) -> Number:
    return Number(_float(one.get(key)), _float(one.get(error)), digits)


def _t(one: Mapping[str, Any]) -> str:
    return DASH if one.get("t") is None else f"{float(one['t']):.1f}"


def _compared(one: Mapping[str, Any] | None) -> str:
    return DASH if one is None else f"{_t(one)}, {percent(_float(one.get('share_worse_off')))}"


# --- distribution over clients, and held-out clients


def clients_table(entries: Sequence[Entry], *, worst: bool = True) -> Table | None:
    """Return the per-client distribution of the rows' one metric; None where no run has one.

    The worst client is one client's own number, and `worst` = False leaves it out.
    """
    of = _client_score(entries[0].first["metric"])
    keys = [f"client_{of}_{name}" for name in ("mean", "weighted_mean", TAILS[of], "worst")]
    keys = [key for key in keys if worst or not key.endswith("worst")]
    if not any(entry.first.get(key) is not None for entry in entries for key in keys):
        return None
    titles = [_SHOWN[key.removeprefix(f"client_{of}_")] for key in keys]
    if any(entry.first.get("calibration_error") is not None for entry in entries):
        keys += ["calibration_error", "client_calibration_error"]
        titles += ["calibration error", "client's own calibration error, mean"]
    rows = tuple(
        (entry.label, entry.epsilon_cell, *(with_local(entry.first, key) for key in keys))
        for entry in entries
    )
    way = "accuracy, larger" if of == "accuracy" else "mean squared error, smaller"
    notes = ["Clients have equal weight, except in a column weighted by rows."]
    if any("(" in str(cell) for row in rows for cell in row[2:]):
        notes.insert(0, "In brackets: the local baseline.")
    if "calibration_error" in keys:
        notes.append(
            "Calibration error: the mean gap between the confidence of predictions and their "
            "accuracy, over 15 bins of confidence. A client's own needs 20 test "
            "rows."
        )
    if left := max(int(entry.first.get("clients_without_test_rows") or 0) for entry in entries):
        notes.append(f"Left out: {_clients(left)} without test rows.")
    notes.append("Not covered by epsilon.")
    head = ("method", "epsilon")
    title = f"Each client's own {way} is better"
    return Table((*head, *keys), (*head, *titles), rows, title, tuple(notes))


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count:,} clients"


def _client_score(metric: str | None) -> str:
    return METRICS[metric].client_score if metric in METRICS else "error"


def with_local(result: Mapping[str, Any], key: str) -> str:
    """Return a number of a summary, with that of the local baseline in brackets."""
    own, local = result.get(key), result.get(f"local_{key}")
    if own is None:
        return DASH
    return f"{float(own):.3g}" + ("" if local is None else f" ({float(local):.3g})")


def held_out_table(entries: Sequence[Entry], *, worst: bool = True) -> Table | None:
    """Return the scores of held-out clients; None where no run has any."""
    shown = [entry for entry in entries if entry.first.get("newcomers")]
    if not shown:
        return None
    titles = {
        "method": "method",
        "clients": "held-out clients",
        "value": "test metric",
        "local_value": "local",
        "better": "better than local",
        "held_mean": "mean over clients",
        "tail": "worst decile",
        "held_worst": "worst client",
        "trained": "training clients",
    }
    keys = tuple(key for key in titles if worst or key != "held_worst")
    rows = [dict(zip(titles, _held_out_row(entry), strict=True)) for entry in shown]
    return Table(
        keys,
        tuple(titles[key] for key in keys),
        tuple(tuple(row[key] for key in keys) for row in rows),
        "Held-out clients",
        ("Held-out clients take the shared model, fit their own part and release nothing.",),
    )


def _held_out_row(entry: Entry) -> list[Cell]:
    found = entry.first["newcomers"]
    of = _client_score(found["metric"])
    cells = (with_local(found, f"client_{of}_{key}") for key in ("mean", TAILS[of], "worst"))
    return [
        entry.label,
        str(found["clients"]),
        _number(found, *_VALUE, digits=4),
        Number(_float(found.get("local_value")), digits=4),
        percent(_float(found.get("share_better_than_local"))),
        *cells,
        entry.number("value", digits=4),
    ]


# --- rendering as text


_WIDE_ONLY = ("weighted_mean", "client_calibration_error", "held_mean", "held_worst", "trained")
_WITH_ERROR = ("value", "difference")


def to_text(cell: Cell, *, error: bool = True) -> str:
    """Return a cell as plain text."""
    if isinstance(cell, Number):
        return cell.text(error=error)
    if isinstance(cell, tuple):
        return "\n".join(to_text(part) for part in cell if isinstance(part, str))
    return cell.text if isinstance(cell, Mark) else cell


_NAMES = (12, 24)
"""The least width of the column of names, and the most where columns compete for room."""
_GAP = 2
"""Spaces between columns."""


@dataclass(frozen=True)
class _Fitted:
    """A table that fits the terminal: columns that have no room go into a further table below.

    Every part repeats the column of names, which is never narrower than `_NAMES`.
    """

    table: Table
    title: str

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Return the parts, and the notes below them."""
        from rich.text import Text

        room, title = options.max_width, self.title or self.table.title
        columns = [_column(self.table, i) for i in _shown(self.table)]
        if _total(columns) > room:
            columns = [_column(self.table, i, narrow=True) for i in _shown(self.table)]
        for part in _parts(columns, room):
            yield _part(part, title)
            yield ""
            title = ""
        if self.table.notes:
            # A caption would be wrapped at the table's width, which may exceed the terminal's.
            yield Text(" ".join(self.table.notes) + "\n")


Column = tuple[str, ...]
"""The head of a column and its cells, with the line breaks that they need."""


def to_rich(table: Table, *, title: str = "") -> Any:
    """Return a table for a terminal: fewer columns than a page, errors where they matter."""
    return _Fitted(table, title)


def _shown(table: Table) -> list[int]:
    return [i for i, key in enumerate(table.keys) if not key.endswith(_WIDE_ONLY)]


def _column(table: Table, place: int, *, narrow: bool = False) -> Column:
    """Return a column as text, with line breaks."""
    width = 12 if place else 20
    head = "\n".join(fill(part, width) for part in table.titles[place].split(": "))
    cells = []
    for row in table.rows:
        text = to_text(row[place], error=table.keys[place] in _WITH_ERROR)
        least = 12 if narrow and not isinstance(row[place], Number) else 16
        cells.append(fill(text, least) if place else text)
    return (head, *cells)


def _width(column: Column) -> int:
    from rich.cells import cell_len  # letters of some scripts are two columns wide

    return max(cell_len(line) for cell in column for line in cell.splitlines() or [""])


def _total(columns: Sequence[Column]) -> int:
    return sum(_width(column) + _GAP for column in columns) - _GAP


def _parts(columns: Sequence[Column], room: int) -> list[list[Column]]:
    """Return the columns by table, each with the names first and no wider than the room."""
    names, *others = columns
    least, most = _NAMES
    narrow = max(least, min(most, room // 3))
    if _total(columns) > room:
        names = tuple(_broken(cell, narrow) for cell in names)
    parts: list[list[Column]] = [[names]]
    for column in others:
        if len(parts[-1]) > 1 and _total([*parts[-1], column]) > room:
            parts.append([names])
        parts[-1].append(column)
    return parts


def _broken(text: str, width: int) -> str:
    """Return text with lines of this width at most; words break where they are longer."""
    return "\n".join(fill(line, width) for line in text.splitlines())


def _part(columns: Sequence[Column], title: str) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    look: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    made = RichTable(title=title or None, padding=(0, _GAP - 1, 0, 0), **look)
    for place, (head, *_) in enumerate(columns):
        made.add_column(Text(head), justify="right" if place else "left", overflow="fold")
    for cells in zip(*(column[1:] for column in columns), strict=True):
        # A plain string would be read as markup; scripts look for plain spaces.
        made.add_row(*(Text(cell.replace("\u00a0", " ")) for cell in cells))
    return made


def terminal(results: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Return everything that a terminal shows of runs: tables, and sentences on baselines."""
    from rich.text import Text

    entries = [Entry.of_result(result) for result in results]
    first = results[0]
    title = f"{first['data']}: {first['clients']} clients, one model per client"
    if len({result["data"] for result in results}) > 1:
        title = "one model per client"
    yield to_rich(results_table(entries, badges=False), title=title)
    warnings = list(_warnings(results))
    if warnings:
        yield Text("\n".join(warnings) + "\n")
    if (table := baselines_table(entries)) is not None:
        shown = [result for result in results if result.get("references") and result["rounds"]]
        yield to_rich(table)
        yield Text("\n".join(verdicts({name_of(r, shown): r for r in shown})) + "\n")
    for found in (clients_table(entries), held_out_table(entries)):
        if found is not None:
            yield to_rich(found)


def _warnings(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(result.get("simulation") for result in results):
        yield SIMULATION
    if any(result.get("claimed_epsilon") is not None for result in results):
        yield "NOT A GUARANTEE: a mechanism as published, see below"
    if any("NOT COVERED" in str(result.get("tuning")) for result in results):
        yield "TUNING IS NOT COVERED by epsilon"
    if any(result.get("caveats") for result in results):
        yield "CAVEATS: see below"


def name_of(result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a run among others: its method, with epsilon where several have one."""
    name = str(result["method"])
    if sum(other["method"] == name for other in results) == 1:
        return name
    return f"{name} at epsilon {round_up(float(result['epsilon']))}"
