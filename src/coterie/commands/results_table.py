"""Results in a terminal: the table of runs, and how their clients fare one by one."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coterie.privacy.guarantee import round_up
from coterie.references import LABELS, verdicts
from coterie.references import TITLES as REFERENCES
from coterie.scores import TITLES
from coterie.summary import NOT_COVERED

_SPREAD = {"mean": "mean", "p10": "10th percentile", "p90": "90th percentile", "worst": "worst"}


def in_short(value: Any) -> str:
    """Write a number with four digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bound(epsilon: float | str) -> str:
    return epsilon if isinstance(epsilon, str) else round_up(epsilon)


def _score(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    error = row["standard_error"]
    return in_short(row["value"]) + ("" if error is None else f" ± {in_short(error)}")


def _area(row: Mapping[str, Any]) -> str:
    area = row.get("auc")
    return "-" if area is None else f"{area:.4f} ({row['auc_left_out']})"


def _mean(row: Mapping[str, Any], key: str) -> str:
    return "-" if row.get(key) is None else in_short(row[key])


def _own(row: Mapping[str, Any], key: str) -> str:
    """Return a mean over clients; of R^2 below -1, which few clients make so, the median."""
    if not _is_ruined(row, key):
        return _mean(row, key)
    median = row.get(f"{key}_median")
    return "< -1" if median is None else f"{in_short(median)}\n(median)"


def _is_ruined(row: Mapping[str, Any], key: str) -> bool:
    return key == "r2" and row.get(key) is not None and float(row[key]) < -1


def _gain(row: Mapping[str, Any]) -> str:
    share = row["share_better_than_local"]
    if share == 0 and row["value"] == row["local_value"]:
        return "the same\nas alone"  # nothing stood out of the noise
    # Where nothing was posted there is nobody to be compared with.
    if share is None or row["rounds"] == 0:
        return "-"
    worse = _by_name(row).get("local", {}).get("share_worse_off") if row.get("references") else None
    # With few test rows many clients are neither better nor worse.
    ties = worse is not None and share + worse <= 0.995
    return _percent(share) + (f",\nworse {_percent(worse)}" if ties and worse is not None else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def results_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Make a table of at most 100 columns, and below it what stands beside the runs, once."""
    beside = references_table(rows)
    if beside is None:
        return _runs_table(rows)
    shown = [row for row in rows if row.get("references") and row["rounds"]]
    told = verdicts({name_of(row, shown): row["references"] for row in shown})
    return Group(_runs_table(rows), beside, *(Text(line) for line in told), Text())


def _runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    # What is the same in every row goes below the table.
    first = rows[0]
    better = "smaller" if first["metric"] == "nmse" else "larger"
    areas, *means = (any(row.get(key) is not None for row in rows) for key in TITLES)
    own = [key for key, shown in zip(list(TITLES)[1:], means, strict=True) if shown]
    deltas = len({row["delta"] for row in rows}) > 1
    table = Table(title=f"{first['data']}: {first['clients']} clients, one model each")
    table.add_column("method", overflow="fold")
    # Heads are broken here: left to the table, long ones take the room of what stands below them.
    metric = f"test {first['metric']} ({better} is better)"
    head = [fill(metric if first["metric"] else "test metric (stayed at the sites)", 16)]
    head += [fill("mean AUC (clients left out)", 9)] * areas
    head += [fill("clients better off than alone", 10), "epsilon", *["delta"] * deltas, "rounds"]
    for name in [*head, *(fill(f"mean {TITLES[key]}", 9) for key in own)]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            _score(row),
            *[_area(row)] * areas,
            _gain(row),
            _bound(row["epsilon"]),
            *[f"{row['delta']:.3g}"] * deltas,
            str(row["rounds"]),
            *(_own(row, key) for key in own),
        )
    what = "replacement" if first["relation"] == "replace" else "zero-out"
    told = f"epsilon: {what} of one client, view of {first['view']}"
    told += "" if deltas else f", delta {first['delta']:.3g}"
    table.caption = "; ".join([told, "metrics are not covered", *_warnings(rows, own)])
    return table


def _warnings(rows: Sequence[Mapping[str, Any]], own: Sequence[str]) -> list[str]:
    first, told = rows[0], []
    for key in own:
        if left := max(row.get(f"{key}_left_out") or 0 for row in rows):
            told.append(f"{TITLES[key]} leaves out {left} clients")
        if any(_is_ruined(row, key) for row in rows):
            told.append(
                f"a mean {TITLES[key]} < -1 may be of few clients, whose targets hardly differ; "
                "the median is shown where it is known"
            )
    if first["simulation"]:
        told.append("SIMULATION: known seed, protects nobody")
    if any(row.get("claimed_epsilon") is not None for row in rows):
        told.append("NOT A GUARANTEE: a printed mechanism, see below")
    if str(first.get("tuning")).startswith(NOT_COVERED):
        told.append("TUNING IS NOT COVERED")
    if any(row.get("caveats") for row in rows):
        told.append("CAVEATS: see below")
    return told


def references_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Make a table of what stands beside runs; None where nothing does, or nothing was shared."""
    shown = [row for row in rows if row.get("references") and row["rounds"]]
    if not shown:
        return None
    table = _beside_one(shown[0]) if len(shown) == 1 else _beside_several(shown)
    names = dict.fromkeys(told["name"] for row in shown for told in row["references"])
    # Local is what everybody knows.
    said = [f"{REFERENCES[name]}: {LABELS[name]}" for name in names if name != "local"]
    said += dict.fromkeys(why for row in shown for why in row.get("references_missing") or ())
    table.caption = "; ".join([*said, "not covered by epsilon"])
    return table


def _beside_one(row: Mapping[str, Any]) -> Table:
    table = Table(title=f"beside {row['method']}, client by client", box=box.SIMPLE)
    table.add_column("reference", no_wrap=True)
    apart = f"own {_unit(row)} less the reference's"
    for head in (f"test {row['metric']}", fill(apart, 17), "t", "clients\nworse off"):
        table.add_column(head, justify="right", no_wrap=True)
    for told in row["references"]:
        apart = _score(
            {"value": told["difference"], "standard_error": told["difference_standard_error"]}
        )
        table.add_row(REFERENCES[told["name"]], _score(told), apart, _t(told), _worse(told))
    return table


def _beside_several(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return each reference once, in the head, and each run's t and share of clients worse off."""
    title = f"t of own {_unit(rows[0])} less the reference's (below 0: better), clients worse off"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("method")
    table.add_column("epsilon", justify="right")
    names = [name for name in REFERENCES if any(name in _by_name(row) for row in rows)]
    for name in names:
        found = {_mean(_by_name(row)[name], "value") for row in rows if name in _by_name(row)}
        # Methods with a way of learning alone of their own differ in it.
        value = found.pop() if len(found) == 1 else "(by method)"
        table.add_column(f"{REFERENCES[name]}\n{value}", justify="right", no_wrap=True)
    for row in rows:
        told = [_by_name(row).get(name) for name in names]
        cells = ["-" if one is None else f"{_t(one)}, {_worse(one)}" for one in told]
        table.add_row(row["method"], _bound(row["epsilon"]), *cells)
    return table


def _by_name(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {told["name"]: told for told in row["references"]}


def _t(told: Mapping[str, Any]) -> str:
    return "-" if told.get("t") is None else f"{float(told['t']):.1f}"


def _worse(told: Mapping[str, Any]) -> str:
    share = told.get("share_worse_off")
    return "-" if share is None else _percent(share)


def _unit(row: Mapping[str, Any]) -> str:
    """Say what a client's own error is: another unit than that of the metric over all rows."""
    return "mean squared error" if row["metric"] == "nmse" else "share of rows wrong"


def clients_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Make a table of how clients fare one by one; None where no run says so."""
    of = "accuracy" if rows[0]["metric"] == "accuracy" else "error"
    names = {key: f"client_{of}_{key}" for key in _SPREAD}
    shown = [key for key, name in names.items() if any(row.get(name) is not None for row in rows)]
    if not shown:
        return None
    way = "mean squared error, smaller" if of == "error" else "accuracy, larger"
    calibrated = any(row.get("calibration_error") is not None for row in rows)
    alone = any(row.get(f"local_client_{of}_mean") is not None for row in rows)
    brackets = "; in brackets: alone" if alone else ""
    # Another look than that of the first table, which is the one to read first.
    title = f"each client's own {way} is better{brackets}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("method")
    heads = ["epsilon", *(_SPREAD[key] for key in shown), *["calibration error"] * calibrated]
    for head in heads:
        table.add_column(fill(head, 11), justify="right", no_wrap=True)
    for row in rows:
        keys = [*(names[key] for key in shown), *["calibration_error"] * calibrated]
        cells = [_beside(row, key) for key in keys]
        table.add_row(row["method"], _bound(row["epsilon"]), *cells)
    left = max(row.get("clients_without_test_rows") or 0 for row in rows)
    told = [f"{left} clients without test rows are left out"] if left else []
    table.caption = "; ".join([*told, "all clients count the same; not covered by epsilon"])
    return table


def _beside(row: Mapping[str, Any], key: str) -> str:
    own, alone = row.get(key), row.get(f"local_{key}")
    if own is None:
        return "-"
    return _three(own) + ("" if alone is None else f" ({_three(alone)})")


def _three(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def name_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Name a run among others: by its method, and by epsilon where several are of one method."""
    alike = [other for other in rows if other["method"] == row["method"]]
    name = str(row["method"])
    return name if len(alike) == 1 else f"{name} at epsilon {_bound(row['epsilon'])}"


def about_newcomers(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say, for each run that had any, how clients fare who joined it after training."""
    for row in rows:
        if not (found := row.get("newcomers")):
            continue
        told = (
            f"{name_of(row, rows)}: {found['clients']} newcomers joined after training and posted "
        )
        told += f"nothing: test {found['metric']} {_score(found)}"
        if found.get("local_value") is not None:
            told += f", {in_short(found['local_value'])} alone"
        if found.get("share_better_than_local") is not None:
            told += f"; {_percent(found['share_better_than_local'])} are better off than alone"
        of = "accuracy" if found["metric"] == "accuracy" else "error"
        parts = [
            f"{name} {_beside(found, f'client_{of}_{key}')}"
            for key, name in _SPREAD.items()
            if found.get(f"client_{of}_{key}") is not None
        ]
        yield f"{told}; each one's own {of} (alone): {', '.join(parts)} (not private)"
