"""Run folders written by hand, and what holds for every page."""

import base64
import hashlib
import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from coterie.evaluation.metrics import Score, distribution_json
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Event, Gaussian, NonPrivate, Participation, Relation
from coterie.privacy.guarantee import Guarantee
from coterie.report.page import write_report

PLAN = """rounds = {rounds}
compare_with_local = true

[data]
name = "{data}"
split_seed = 0

[method]
kind = "{method}"

[privacy]
epsilon = {epsilon}
"""
VOID = {"meta", "br", "input"}
EVERYONE = Participation("everyone")
NOISE = calibrate(1.0, 1e-5, weights=(1.0,) * 20, participation=EVERYONE, relation="zero_out")


def make_run(
    folder: Path,
    *,
    method: str = "pmtl",
    events: tuple[Event, ...] = (Gaussian(NOISE),) * 20,
    value: float | None = 0.31,
    metric: str = "nmse",
    clients: int = 60,
    names: list[str] | None = None,
    compared: bool = True,
    simulation: bool = False,
    data: str = "districts",
    relation: Relation = "zero_out",
    participation: Participation = EVERYONE,
    empty: int = 3,
    gain: float = 0.25,
    **changes: object,
) -> Path:
    """Write the files of a finished run by hand, as `coterie.runs.run` documents them."""
    folder.mkdir(parents=True)
    guarantee = Guarantee(events, participation, relation, 1e-5, clients, simulation)
    draw = np.random.default_rng(7)
    alone = draw.gamma(2.0, 0.3, clients)
    error = alone * np.exp(draw.normal(-gain, 0.3, clients)) if events else alone.copy()
    rows = np.full(clients, 4)
    rows[:empty] = 0
    error[:empty] = alone[:empty] = math.nan
    columns = {
        "client": pa.array(names or [f"district {i}" for i in range(clients)]),
        "train_rows": pa.array(np.full(clients, 12)),
        "test_rows": pa.array(rows),
        "error": pa.array(error),
    }
    if compared:
        columns["error_alone"] = pa.array(alone)
    pq.write_table(pa.table(columns), folder / "metrics.parquet")
    epsilon = guarantee.epsilon
    told = "inf" if math.isinf(epsilon) else epsilon
    summary = {
        "method": method,
        "data": data,
        "clients": clients,
        "rounds": len(events),
        "epsilon": told,
        "delta": guarantee.delta,
        "relation": relation,
        "view": "other clients",
        "noise_multiplier": NOISE if events and told != "inf" else None,
        "clip": 1.0 if events and told != "inf" else None,
        "metric": metric,
        "value": value,
        "standard_error": 0.02,
        "share_better_than_local": float((error < alone).sum() / max(1, (rows > 0).sum())),
        "local_value": 0.6,
        "simulation": simulation,
        "not_covered": "metrics, and any tuning done with them, are not covered by epsilon",
        "seconds": 1.5,
        "run": str(folder),
    }
    summary |= distribution_json(Score(metric, 0.0, 0.0, error, rows))
    summary |= {"clients_without_test_rows": empty}
    if compared:
        summary |= distribution_json(Score(metric, 0.0, 0.0, alone, rows), "local_")
    else:
        summary |= {"share_better_than_local": None, "local_value": None}
    (folder / "result.json").write_text(json.dumps(summary | changes))
    (folder / "guarantee.json").write_text(json.dumps(guarantee.to_json()))
    plan = PLAN.format(rounds=len(events), data=data, method=method, epsilon=told)
    (folder / "plan.toml").write_text(plan, encoding="utf-8")
    return folder


def least_epsilon(weights: dict[float, float], delta: float = 1e-5) -> float:
    """Solve for epsilon at delta of a mixture of Gaussian DP, mu to probability: closed form."""

    def delta_at(epsilon: float) -> float:
        return sum(
            p * (norm.cdf(m / 2 - epsilon / m) - math.exp(epsilon) * norm.cdf(-m / 2 - epsilon / m))
            for m, p in weights.items()
            if m > 0
        )

    return float(brentq(lambda epsilon: delta_at(epsilon) - delta, 1e-6, 100, xtol=1e-12))


def known_cohort(rounds: int, rate: float, noise: float) -> float:
    """Return epsilon (replace) against an adversary who knows the number of a client's rounds."""
    times = range(rounds + 1)
    drawn = {2 * math.sqrt(n) / noise: float(binom.pmf(n, rounds, rate)) for n in times}
    return least_epsilon(drawn)


def up(bound: float) -> str:
    """Write four digits, rounded up."""
    step = 10.0 ** (math.floor(math.log10(bound)) - 3)
    return f"{math.ceil(bound / step - 1e-6) * step:.4g}"


def make_comparison(folder: Path) -> list[Path]:
    return [
        make_run(folder / "a", method="local", events=(), value=0.6),
        make_run(folder / "b", method="fedavg", events=(NonPrivate(),) * 20, value=0.45),
        make_run(folder / "c"),
    ]


class Checker(HTMLParser):
    """Follows tags as they open and close; collects text, ids and references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[tuple[str, str]] = []
        self.kind = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.kind = dict(attrs).get("type") or ""
        for name, value in attrs:
            self.attributes.append((name, value or ""))
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append((self.kind, data))
        elif "style" not in self.open:
            self.texts.append(data)


def check(page: str) -> Checker:
    """Check what holds for every page, and give its parts."""
    parts = Checker()
    parts.feed(page)
    parts.close()
    assert parts.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert len(parts.ids) == len(set(parts.ids))
    assert {value for name, value in parts.attributes if name == "href"} <= {
        f"#{place}" for place in parts.ids
    }
    for name, value in parts.attributes:
        assert "//" not in value or name == "content", (name, value)
        assert not name.startswith("on") and name != "src"
    assert "link" not in parts.tags and "img" not in parts.tags and "svg" not in parts.tags
    style = page[page.index("<style>") : page.index("</style>")]
    assert "http" not in style and "url(" not in style
    # Every script that runs is named by its hash, and nothing else may run or be fetched.
    policy = next(v for n, v in parts.attributes if n == "content" and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src ")
    allowed = policy.partition("script-src ")[2].split()
    run = [data for kind, data in parts.scripts if kind == ""]
    hashes = [hashlib.sha256(data.encode()).digest() for data in run]
    named = [f"'sha256-{base64.b64encode(h).decode()}'" for h in hashes]
    assert allowed == (named or ["'none'"])
    assert {kind for kind, _ in parts.scripts} <= {"", "application/json"}
    assert len(page.encode()) < 2_000_000
    return parts


def drawn(parts: Checker) -> dict[str, dict[str, Any]]:
    """Return the specifications of a page's charts, by their titles, strict JSON all of them."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = [
        json.loads(data, parse_constant=refuse)
        for kind, data in parts.scripts
        if kind == "application/json"
    ]
    specs = [one for one in found if "datasets" in one]
    titles = [value for name, value in parts.attributes if name == "aria-label"]
    titles = [title for title in titles if not title.startswith(("sections of", "filter clients"))]
    assert len(specs) == len(titles) == parts.tags.count("figure")
    return {
        f"{n}: {title}": spec for n, (title, spec) in enumerate(zip(titles, specs, strict=True))
    }


def chart(parts: Checker, title: str) -> dict[str, Any]:
    """Return the one chart whose title holds this, checked against the schema."""
    (found,) = [spec for name, spec in drawn(parts).items() if title in name]
    altair.Chart.from_dict(found, validate=True)
    return found


def read(folders: list[Path], out: Path) -> tuple[str, Checker]:
    assert write_report(folders, out) == out
    page = out.read_text(encoding="utf-8")
    parts = check(page)
    return " ".join(" ".join(parts.texts).split()), parts


def read_words(folders: list[Path], out: Path) -> str:
    """Return the text of a page without charts, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "altair", None)
        return read(folders, out)[0]


def add_history(
    run: Path, rounds: int = 50, *, clock: bool = True, values: object = None, own: str = "r2"
) -> None:
    """Write a history by hand, as a run with a virtual clock keeps it."""
    at = np.arange(1, rounds + 1)
    columns = {
        "round": pa.array(at),
        "seconds": pa.array(1.5 * at) if clock else pa.nulls(rounds, pa.float64()),
        "answered": pa.array(np.full(rounds, 9)),
        "value": pa.array(0.3 + np.exp(-at / 10) if values is None else values),
        own: pa.array(np.full(rounds, 0.625)),
    }
    columns |= {
        name: pa.nulls(rounds) for name in ("balanced_accuracy", "r2") if name not in columns
    }
    pq.write_table(pa.table(columns), run / "history.parquet")


def add_losses(run: Path, rounds: int = 20) -> None:
    at = np.arange(1, rounds + 1)
    add_history(run, rounds)
    table = pq.read_table(run / "history.parquet").to_pydict()
    losses = {"train_loss": 2.0 / at, "test_loss": 1.0 + 2.0 / at}
    pq.write_table(pa.table({**table, **losses}), run / "history.parquet")


def add_shared(run: Path) -> None:
    """Add the errors of the shared model, as `coterie.evaluation.score` computes them."""
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    error = np.array(table["error"], dtype=float)
    pq.write_table(pa.table({**table, "error_shared": 1.2 * error}), run / "metrics.parquet")


BINS = {
    "answers": [0] * 7 + [10] * 8,
    "confidence": [None] * 7 + [(b + 0.5) / 15 for b in range(7, 15)],
    "right": [None] * 7 + [0.5 + 0.04 * b for b in range(8)],
}
