"""The page: its text, escaping, self-containment, sections, and pages of many runs."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import altair
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import norm
from tests.deploy.deployed import deploy
from tests.report.runs import (
    BINS,
    EVERYONE,
    NOISE,
    Checker,
    add_history,
    add_losses,
    add_shared,
    chart,
    check,
    drawn,
    known_cohort,
    least_epsilon,
    make_comparison,
    make_run,
    read,
    read_words,
    up,
)

import coterie as ct
from coterie.cli.main import main
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.events import Event, Gaussian, Laplace, NonPrivate, Participation
from coterie.privacy.guarantee import Guarantee, gdp_approximation
from coterie.privacy.sampling import Everyone
from coterie.report.charts import (
    draw_trade_off,
    reconstruction,
    save_losses,
    save_trade_off,
    spent_by_round,
)
from coterie.report.page import write_report
from coterie.report.read import group, one_by_one, read_finished

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Checker, str]:
    folder = tmp_path_factory.mktemp("comparison")
    text, parts = read(make_comparison(folder), folder / "new" / "report.html")
    return text, parts, (folder / "new" / "report.html").read_text(encoding="utf-8")


def test_answer_comes_first(comparison: tuple[str, Checker, str]) -> None:
    text, _, page = comparison
    counted = re.search(r"(\d+) of 57 clients gain \(\d+ %\), (\d+) lose", text)
    assert counted is not None
    better, worse = (f"{100 * int(count) / 57:.0f} %" for count in counted.groups())
    answer = (
        f"At epsilon 1, joining helps: {better} of 57 clients predict better than with local "
        f"training, {worse} worse."
    )
    opening = text[: text.index("What epsilon means")]
    assert answer in opening and "0.31 test NMSE (smaller is better); local training has" in opening
    assert "districts, 60 clients, one model per client" in text
    assert "best of" not in text
    assert '<html lang="en">' in page and "prefers-color-scheme: dark" in page


def test_table_tells_private_from_not(comparison: tuple[str, Checker, str]) -> None:
    text, _, page = comparison
    for cell in ("0.31 \u00b1 0.02", "0.45 \u00b1 0.02", "local 0.6 \u00b1 0.02 0.6 \u2013 0 0"):
        assert cell in text
    assert '<span class="bad">NOT PRIVATE (inf)</span>' in page
    assert "test NMSE (smaller is better)" in text
    assert "zero_out" in text and "1e-05" in text
    assert "SIMULATION" not in text


def test_guarantee_in_words_and_symbols(comparison: tuple[str, Checker, str]) -> None:
    text, _, page = comparison
    guarantee = Guarantee((Gaussian(NOISE),) * 20, EVERYONE, "zero_out", 1e-5, 60)
    for line in guarantee.statement().splitlines():
        assert line in text
    assert "e<sup>&epsilon;</sup>" in page and "&epsilon; = 1, &delta; = 1e-05" in page
    assert "not covered by epsilon" in text
    # mu-Gaussian DP: the best test has Phi(Phi^-1(alpha) + mu) true positives.
    mu = math.sqrt(20) / NOISE
    for alarm in (0.01, 0.1):
        best = 100 * float(norm.cdf(norm.ppf(alarm) + mu))
        shown = math.ceil(10 * best) / 10
        assert f"{shown:.1f} %" in text


def test_clients_see_what_joining_does(comparison: tuple[str, Checker, str]) -> None:
    text, _, _ = comparison
    assert "Gains are averages over clients; no single client is promised a gain." in text
    assert "3 clients without test rows are not counted" in text
    assert "district 59" in text and "district 0 " not in text
    assert "median of 4 test rows" in text


def test_every_chart_is_drawn(comparison: tuple[str, Checker, str]) -> None:
    text, parts, page = comparison
    # scores; clients; spent and trade-off of one private guarantee; three for each run that shares
    assert len(drawn(parts)) == 1 + 1 + 2 + 2 * 3
    for title in (
        "test NMSE (smaller is better), with two standard errors",
        "Mean squared error of each client (smaller is better), from worst to best",
        "Epsilon spent by round",
        "f-DP trade-off: no attack by other clients gets below the curve",
        "Gain (above 0) or loss of each client",
        "Local against personal: below the line is a gain",
    ):
        assert title in text
    assert "var(--gain)" in page
    for spec in drawn(parts).values():
        altair.Chart.from_dict(spec, validate=True)
        assert not re.search(r'"#[0-9a-fA-F]{3,8}"', json.dumps(spec)), "a colour of its own"
        assert "tooltip" in json.dumps(spec), "no word on hover"
        assert "url" not in json.dumps(spec)
    assert "pip install" not in text
    assert "Privacy against utility" not in text, "one epsilon has no frontier"


def test_plan_and_versions_end_the_page(comparison: tuple[str, Checker, str]) -> None:
    text, parts, page = comparison
    assert page.count('<details class="plan">') == 3 and ("open", "") not in parts.attributes
    assert 'kind = "pmtl"' in text and "[privacy] epsilon" in text
    assert "dp-accounting" in text and "Written by coterie" in text
    assert "planned rounds" not in text and "eld-out" not in text


def test_simulation_and_not_private_are_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=(NonPrivate(),) * 3, simulation=True)
    text = read_words([run], tmp_path / "report.html")
    assert "Without privacy, joining helps" in text and "0.31 test NMSE" in text
    assert text.count("SIMULATION: known seed, protects nobody") == 1, "said once, at the top"
    assert text.index("SIMULATION: known seed") < text.index("Without privacy, joining"), "first"
    folded = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<details class="plan">' in folded, "folded on the page of a single run too"
    assert text.count("NOT PRIVATE") == 4, "at the top, in two tables, and as the guarantee"
    assert "Bounds on any attack" not in text and "f-DP trade-off:" not in text


def test_simulated_guarantee_says_that_it_is_none(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        events=(Gaussian(3.0),) * 5,
        simulation=True,
        relation="replace",
        participation=Participation("fixed", 0.2),
        metric="accuracy",
        value=0.8,
    )
    text = read_words([run], tmp_path / "report.html")
    assert "SIMULATION: noise from a known seed, not a guarantee." in text
    assert "the noise of a simulation is known" in text
    assert "0.8 test accuracy (larger is better); local training has" in text
    assert "its error rate" in text
    assert "know from their own participation who takes part" in text
    assert "come from its data or from another's" in text


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"><img src=x onerror=y>&amp;"
    names = [f"{evil}{i}" for i in range(60)]
    run = make_run(
        tmp_path / "run", names=names, method=evil, data=evil.replace("/", "").replace('"', "")
    )
    plan = run / "plan.toml"
    plan.write_text("# </pre><script src='//x'></script>\n[data]\nname = 'a'\n", encoding="utf-8")
    text, parts = read([run], tmp_path / "report.html")
    assert "img" not in parts.tags
    assert evil in text and "</pre><script" in text


def test_five_thousand_clients_stay_small(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(i), clients=5000, events=(Gaussian(NOISE + i),) * 20, gain=0.1 * i)
        for i in range(3)
    ]
    text, _ = read(runs, tmp_path / "report.html")
    assert "of 4997 clients are drawn" in text
    assert "The 300 clients with the largest losses and the 300 with the largest gains" in text


def test_several_private_runs_add_up(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", value=0.5), make_run(tmp_path / "b", value=0.4)]
    text, parts = read([*runs, runs[0]], tmp_path / "report.html")
    assert "This is pmtl at epsilon 1 (2), the best of 3 private runs by these metrics" in text
    # sixty posts of the same noise: Gaussian DP of sqrt(60) / z
    spent = least_epsilon({math.sqrt(60) / NOISE: 1.0})
    assert f"spend together at most epsilon {up(spent)} at delta 1e-05." in text
    assert "do not compare" not in text
    # the same guarantee is stated once
    assert text.count("Accountant:") == 1 and text.count("Epsilon spent by round") == 1
    assert "pmtl at epsilon 1 (3)" in text
    assert len(drawn(parts)) == 1 + 1 + 2 + 3 * 3


def test_runs_that_cannot_be_compared_say_so(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", data="districts"),
        make_run(tmp_path / "b", data="digits", metric="accuracy", relation="replace"),
    ]
    text = read_words(runs, tmp_path / "report.html")
    assert "do not compare their metrics" in text
    assert "Epsilons at different relations or deltas cannot be compared" in text
    assert "spend together" not in text
    assert "0.31 \u00b1 0.02 accuracy" in text


def test_epsilon_is_computed_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epsilon=0.1)
    text = read_words([run], tmp_path / "report.html")
    assert "At epsilon 1, joining" in text
    assert "result.json has epsilon 0.1, but its guarantee.json implies 1, which is shown" in text


@pytest.mark.parametrize("changed", [{"compared": False}, {"empty": 60}, {"value": None}])
def test_what_is_missing_is_said(tmp_path: Path, changed: dict[str, object]) -> None:
    run = make_run(tmp_path / "run", share_better_than_local=None, **changed)  # type: ignore[arg-type]
    text, _ = read([run], tmp_path / "report.html")
    told = {
        "compared": "This run has no local baseline",
        "empty": "No client has test rows",
        "value": "not a number test NMSE",
    }
    assert told[next(iter(changed))] in text
    assert "nan" not in text.split("Plan and versions")[0]


def test_errors_that_are_equal_broken_or_far_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=200, empty=0)
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    error = np.array(table["error"])
    error[:10], error[10], error[11] = table["error_alone"][:10], math.nan, 1e6
    table["error"] = error
    pq.write_table(pa.table(table), run / "metrics.parquet")
    text, _ = read([run], tmp_path / "report.html")
    assert "10 are equal" in text
    assert "1 clients have no finite error and are not drawn" in text
    assert "1 clients lie beyond the axis of the left chart" in text
    table["error"] = table["error_alone"] = np.zeros(200)
    pq.write_table(pa.table(table), run / "metrics.parquet")
    text, _ = read([run], tmp_path / "report.html")
    assert "0 of 200 clients gain (0 %), 0 lose (0 %), 200 are equal" in text


def test_learning_alone_has_a_page_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", method="local", events=(), value=0.6)
    text, parts = read([run], tmp_path / "report.html")
    assert "Nothing is shared, and no budget is spent: local has test NMSE 0.6." in text
    assert "Every client trains on its own rows only." in text
    assert "no single client is promised a gain" not in text
    assert "figure" not in parts.tags and "script" not in parts.tags


def test_without_altair_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    text, parts = read(make_comparison(tmp_path), tmp_path / "report.html")
    assert "figure" not in parts.tags and len(parts.scripts) == 1, "the filter box alone"
    assert "pip install coterie[report]" in text
    assert "rounds done epsilon 1 " in text and "true positives, at most" in text
    assert "largest gain" in text and "median" in text


def test_same_runs_give_the_same_page(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a")]
    first = write_report(runs, tmp_path / "a.html").read_bytes()
    assert write_report(runs, tmp_path / "b.html").read_bytes() == first
    assert not list(tmp_path.glob("*.partial"))


def test_caveats_are_beside_every_guarantee(tmp_path: Path) -> None:
    caveat = "The mask is <b>NOT</b> differential privacy & never was."
    runs = [
        make_run(tmp_path / "a", method="plain"),
        make_run(tmp_path / "b", method="masked", caveats=[caveat]),
        make_run(tmp_path / "c", method="bare", events=(NonPrivate(),) * 3, caveats=[caveat]),
        make_run(tmp_path / "d", method="alone", events=(), caveats=["Alone, too."]),
    ]
    text, parts = read(runs, tmp_path / "report.html")
    assert "b" not in parts.tags
    results, _, guarantees = text.rpartition(" Guarantee ")
    assert f"masked, bare: {caveat}" in results and "alone: Alone, too." in results
    # The same guarantee with and without a caveat is stated apart.
    first = Guarantee((Gaussian(NOISE),) * 20, EVERYONE, "zero_out", 1e-5, 60).statement()[:20]
    starts = {"plain": first, "masked": first, "bare": "NOT PRIVATE", "alone": "Nothing"}
    places = sorted((guarantees.index(f"{name} {start}"), name) for name, start in starts.items())
    ends = [place for place, _ in places[1:]] + [guarantees.index("Metrics, and any choice")]
    said = {name: guarantees[at:end] for (at, name), end in zip(places, ends, strict=True)}
    assert caveat in said["masked"] and caveat in said["bare"] and "Alone, too." in said["alone"]
    assert caveat not in said["plain"]


def test_notices_are_notes(tmp_path: Path) -> None:
    told = "3 clients have rows of one class alone: 'a', '<u>'"
    run = make_run(tmp_path / "run", notices=[told, "5 rows are zeros"])
    text, parts = read([run], tmp_path / "report.html")
    assert told in text and "5 rows are zeros" in text
    assert "u" not in parts.tags
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<p class="note">5 rows are zeros</p>' in page


def test_a_run_that_ended_early_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=(NonPrivate(),) * 20, rounds=7)
    text = read_words([run], tmp_path / "report.html")
    assert " 7 of 20 " in text
    assert "ended after 7 of 20 planned rounds; the guarantee covers all of them." in text


def test_metrics_of_each_client_have_columns_where_they_apply(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / "a", metric="accuracy", balanced_accuracy=0.71,
            balanced_accuracy_standard_error=0.03, balanced_accuracy_left_out=4,
        ),
        make_run(tmp_path / "b", method="old", metric="accuracy"),
        make_run(
            tmp_path / "c", method="broken", metric="accuracy", balanced_accuracy=None,
            balanced_accuracy_standard_error=None, balanced_accuracy_left_out=60,
        ),
    ]  # fmt: skip
    text = read_words(runs, tmp_path / "report.html")
    assert "test balanced accuracy" in text and "0.71 \u00b1 0.03" in text
    assert "AUC" not in text and "R\u00b2" not in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('<td data-label="test balanced accuracy">\u2013</td>') == 2
    note = "Balanced accuracy is not defined for 60 clients without test rows of two classes."
    assert note in text


# --- how clients fare, one by one


@pytest.mark.parametrize("metric", ["nmse", "accuracy"])
def test_the_worst_clients_are_shown(tmp_path: Path, metric: str) -> None:
    run = make_run(tmp_path / "run", metric=metric)
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    own, alone = (np.array(table[name])[3:] for name in ("error", "error_alone"))
    if metric == "accuracy":
        own, alone = 1 - own, 1 - alone
    tail, worst = (90, np.max) if metric == "nmse" else (10, np.min)
    text = read_words([run], tmp_path / "report.html")
    section = text[text.index("Each client's own") : text.rindex(" Guarantee ")]
    for find in (np.mean, lambda x: np.percentile(x, tail), worst):
        assert f"{find(own):.3g} ({find(alone):.3g})" in section
    assert f"{tail}th percentile" in section and "3 clients without test rows" in section
    assert "local baseline" in section and "calibration" not in section.lower()


def test_calibration_is_shown_beside_a_diagram(tmp_path: Path) -> None:
    told = {"calibration_error": 0.123, "client_calibration_error": 0.21, "reliability": BINS}
    local = {f"local_{key}": value for key, value in told.items()}
    local["local_calibration_error"] = 0.077
    run = make_run(tmp_path / "a", metric="accuracy", **told, **local)
    other = make_run(tmp_path / "b", metric="accuracy", method="old")
    text, parts = read([run, other], tmp_path / "report.html")
    _, without = read([other, other], tmp_path / "old.html")
    assert len(drawn(parts)) == len(drawn(without)) + 1
    assert "0.123 (0.077)" in text and "0.21 (0.21)" in text
    assert chart(parts, "Accuracy by confidence: below the line is overconfident")
    assert "mean confidence of a bin" in text and "0.967 0.78" in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<td data-label="calibration error">\u2013</td>' in page


@pytest.mark.parametrize("bins", [{"answers": [], "confidence": [], "right": []}, None])
def test_a_diagram_of_nothing_is_not_drawn(tmp_path: Path, bins: object) -> None:
    run = make_run(tmp_path / "a", metric="accuracy", calibration_error=0.1, reliability=bins)
    text, _ = read([run], tmp_path / "report.html")
    assert "Calibration error" in text and "Accuracy by confidence" not in text


def test_held_out_clients_have_a_table(tmp_path: Path) -> None:
    told = {
        "clients": 7, "metric": "accuracy", "value": 0.713, "standard_error": 0.01,
        "local_value": 0.622, "share_better_than_local": 0.86, "client_accuracy_mean": 0.701,
        "client_accuracy_p10": 0.444, "client_accuracy_worst": 0.333,
        "local_client_accuracy_worst": 0.111,
    }  # fmt: skip
    run = make_run(tmp_path / "run", metric="accuracy", value=0.8, newcomers=told)
    columns = {"client": ["a", "b"], "train_rows": [3, 3], "test_rows": [4, 4], "error": [0.1, 0.3]}
    (run / "newcomers").mkdir()
    pq.write_table(pa.table(columns), run / "newcomers" / "metrics.parquet")
    text, parts = read([run], tmp_path / "report.html")
    assert "They release nothing, so epsilon is 0 for them" in text
    assert "pmtl 7 0.713 \u00b1 0.01 0.622 86 % 0.701 0.444 0.333 (0.111) 0.8" in text
    rows = chart(parts, "from worst to best")["datasets"]["rows"]
    shown = sorted(row["y"] for row in rows if row["kind"] == "pmtl, held-out clients")
    assert shown == pytest.approx([0.7, 0.9])
    _, text, _ = write_without([run], tmp_path / "page.html")
    assert "held-out clients" in text and "0.444" in text, "the worst decile is of several"
    assert "0.333" not in text and "0.111" not in text


def test_errors_without_any_number_are_still_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    table["error"] = table["error_alone"] = np.full(60, math.nan)
    pq.write_table(pa.table(table), run / "metrics.parquet")
    text, _ = read([run], tmp_path / "report.html")
    assert "57 clients have no finite error" in text and "from worst to best" not in text


# --- what an attacker can do


def sampled(**changes: object) -> Guarantee:
    who = Participation("poisson", 0.1)
    return Guarantee((Gaussian(0.8),) * 40, who, "zero_out", 1e-5, 100, **changes)  # type: ignore[arg-type]


def test_the_approximation_is_beside_the_curve_and_bounds_nothing(tmp_path: Path) -> None:
    who = Participation("poisson", 0.1)
    run = make_run(tmp_path / "run", events=(Gaussian(0.8),) * 40, participation=who)
    text, _ = read([run], tmp_path / "report.html")
    assert "approximation, not a bound" in text
    rough = 1 - gdp_approximation(sampled()).trade_off([0.01, 0.1])
    most = [math.ceil(1000 * x) / 10 for x in 1 - sampled().trade_off([0.01, 0.1])]
    assert "false positives true positives, at most Gaussian approximation, not a bound" in text
    assert (
        f"1 % {most[0]:.1f} % {100 * rough[0]:.1f} % 10 % {most[1]:.1f} % {100 * rough[1]:.1f} %"
        in text
    )


@pytest.mark.parametrize("event", [Gaussian(NOISE), Laplace(20.0)])
def test_no_approximation_where_the_curve_is_exact_or_other(tmp_path: Path, event: Event) -> None:
    run = make_run(tmp_path / "run", events=(event,) * 20)
    text, parts = read([run], tmp_path / "report.html")
    assert "f-DP trade-off:" in text and "approximation" not in text
    kinds = {row["kind"] for row in chart(parts, "f-DP")["datasets"]["rows"]}
    assert kinds == {"best possible attack", "guessing"}


def test_a_trade_off_curve_can_be_saved(tmp_path: Path) -> None:
    first = save_trade_off(sampled(), tmp_path / "new" / "curve.svg")
    drawn = first.read_text(encoding="utf-8")
    for said in ("best possible attack", "approximation, not a bound", "guessing", "#1668a8"):
        assert said in drawn
    assert "var(--" not in drawn, "a variable of the page's style sheet"
    again = save_trade_off(sampled(), tmp_path / "again.svg")
    assert again.read_bytes() == first.read_bytes()
    assert save_trade_off(sampled(), tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert save_trade_off(sampled(), tmp_path / "c.pdf").read_bytes()[:4] == b"%PDF"
    with pytest.raises(ValueError, match=r"curve.bmp: expected a name that ends in .svg"):
        save_trade_off(sampled(), tmp_path / "curve.bmp")


def test_reconstructed_rows_are_drawn_by_setting() -> None:
    errors = {"trusted server": np.array([1e-12, 0.02]), "guess": np.array([1.0, 1.4])}
    spec = reconstruction(errors, 0.1, "rows").spec
    altair.Chart.from_dict(dict(spec), validate=True)
    assert [row["x"] for row in spec["datasets"]["rows"]] == [1e-4, 0.02, 1.0, 1.4]
    assert [mark["x"] for mark in spec["datasets"]["marks"]] == [0.1, 1.0]


def test_the_curve_that_is_drawn_is_the_bound() -> None:
    spec = draw_trade_off(sampled()).spec
    rows = spec["datasets"]["rows"]
    curves = {kind: np.array([(r["x"], r["y"]) for r in rows if r["kind"] == kind])
              for kind in dict.fromkeys(row["kind"] for row in rows)}  # fmt: skip
    x, y = curves["best possible attack"].T
    np.testing.assert_allclose(y, sampled().trade_off([float(a) for a in x]), atol=1e-5)
    assert curves["guessing"].tolist() == [[0, 1], [1, 0]]
    rough = gdp_approximation(sampled()).trade_off([float(a) for a in x])
    np.testing.assert_allclose(curves["approximation, not a bound"][:, 1], rough, atol=1e-5)
    assert np.all(y <= 1 - x + 1e-12)
    marks = {mark["x"]: mark["caught"] for mark in spec["datasets"]["marks"]}
    assert list(marks) == [0.01, 0.1]
    for alarm, caught in marks.items():
        assert caught == pytest.approx(1 - sampled().trade_off([alarm])[0], rel=1e-4)


# --- histories


def charted(text: str) -> list[str]:
    return [t for t in (", by round", ", against virtual seconds") if f"is better){t}" in text]


def test_histories_of_all_runs_are_drawn_together(
    comparison: tuple[str, Checker, str], tmp_path: Path
) -> None:
    text, before, _ = comparison
    assert "Round by round" not in text and charted(text) == []
    runs = make_comparison(tmp_path)
    add_history(runs[1])
    add_history(runs[2], clock=False)
    text, parts = read(runs, tmp_path / "report.html")
    assert len(charted(text)) == 2
    assert len(drawn(parts)) == len(drawn(before)) + 2
    assert "choosing the number of rounds by it is tuning on these rows" in text
    last = f"{0.3 + math.exp(-5):.3g}"
    assert f"fedavg 50 9 {last} 0.625 75 pmtl 50 \u2013 {last} 0.625 \u2013" in text
    assert "final R\u00b2" in text and "final balanced accuracy" not in text
    rows = chart(parts, ", by round")["datasets"]["rows"]
    assert {row["kind"] for row in rows} == {"fedavg", "pmtl"}
    at = {(row["kind"], row["x"]): row["y"] for row in rows}
    assert at["pmtl", 10] == pytest.approx(0.3 + math.exp(-1), rel=1e-5)
    rows = chart(parts, "against virtual")["datasets"]["rows"]
    assert {row["kind"] for row in rows} == {"fedavg"}, "the other has no clock"


def test_different_metrics_are_drawn_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / m, metric=m, events=()) for m in ("nmse", "accuracy")]
    for run in runs:
        add_history(run, clock=False, own="balanced_accuracy")
    text, _ = read(runs, tmp_path / "report.html")
    assert charted(text) == [", by round"], "without a clock"
    for metric in ("NMSE (smaller", "accuracy (larger"):
        assert f"test {metric} is better), by round" in text
    assert "final balanced accuracy" in text


@pytest.mark.parametrize(
    "values", [[None, math.nan, math.inf, 0.5], [None] * 4, [1e-6, 1e30, 0.1, 5.0], [-1.0] * 4]
)
def test_odd_histories_are_drawn_as_far_as_they_go(tmp_path: Path, values: list[object]) -> None:
    run = make_run(tmp_path / "run", events=())
    add_history(run, 4, values=pa.array(values, pa.float64()))
    text, _ = read([run], tmp_path / "report.html")
    assert bool(charted(text)) == (values != [None] * 4)
    add_history(run, 0)
    assert "Round by round" not in read([run], tmp_path / "report.html")[0]


def test_names_of_runs_cannot_break_a_chart(tmp_path: Path) -> None:
    names = ("_hidden", "$\\frac{<b>$", "\u6c34</text>", *(f"run {i}" for i in range(12)))
    runs = [make_run(tmp_path / str(i), method=name, events=()) for i, name in enumerate(names)]
    for run in runs:
        add_history(run, 3)
    _, parts = read(runs, tmp_path / "report.html")
    kinds = {row["kind"] for row in chart(parts, ", by round")["datasets"]["rows"]}
    assert len(kinds) == 6 and kinds <= set(names), "of many runs a few are drawn"
    labels = [row["label"] for row in chart(parts, "two standard errors")["datasets"]["rows"]]
    assert labels == list(names) and "b" not in parts.tags


def test_long_histories_stay_small(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(i), events=()) for i in range(5)]
    for run in runs:
        add_history(run, 20_000)
    read(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1_400_000


def test_losses_are_drawn_beside_what_was_spent(tmp_path: Path) -> None:
    run, bare = make_run(tmp_path / "a"), make_run(tmp_path / "b", method="old")
    add_losses(run)
    add_history(bare, 20)
    text, parts = read([run, bare], tmp_path / "report.html")
    assert text.count("loss and epsilon by round") == 1
    spec = chart(parts, "loss and epsilon by round")
    assert {row["kind"] for row in spec["datasets"]["rows"]} == {"training loss", "test loss"}
    assert spec["datasets"]["spent"][-1]["y"] == pytest.approx(1.0, abs=1e-3)
    assert "epsilon spent" in json.dumps(spec) and "loss (not private)" in json.dumps(spec)
    guarantee = Guarantee((Gaussian(NOISE),) * 20, EVERYONE, "zero_out", 1e-5, 60)
    rounds, spent = spent_by_round(guarantee)
    assert rounds[-1] == 20 and spent[-1] == pytest.approx(guarantee.epsilon)
    by_hand = epsilon_by_round(guarantee.events, EVERYONE, "zero_out", 1e-5, rounds)
    assert list(spent) == by_hand and by_hand == sorted(by_hand)


def test_losses_can_be_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    add_losses(run)
    drawn = save_losses(run, tmp_path / "loss.svg").read_text(encoding="utf-8")
    assert "training loss" in drawn and "epsilon spent" in drawn
    free = make_run(tmp_path / "b", events=(NonPrivate(),) * 20)
    add_losses(free)
    drawn = save_losses(free, tmp_path / "free.svg").read_text(encoding="utf-8")
    assert "training loss" in drawn and "epsilon spent" not in drawn
    with pytest.raises(ValueError, match="kept no losses: run it with --history"):
        save_losses(make_run(tmp_path / "c"), tmp_path / "none.svg")


def test_histories_without_altair_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    run = make_run(tmp_path / "run", events=())
    add_history(run)
    text, parts = read([run], tmp_path / "report.html")
    assert "figure" not in parts.tags and "clients that answered, mean" in text


def test_a_broken_history_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "history.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be read"):
        write_report([run], tmp_path / "report.html")
    pq.write_table(pa.table({"round": [1], "value": [0.5]}), run / "history.parquet")
    with pytest.raises(ValueError, match=r"history.parquet lacks answered, seconds"):
        write_report([run], tmp_path / "report.html")


def test_unfinished_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "result.json").unlink()
    told = f"{run} has no finished run; resume it with `coterie run --resume {run}`"
    with pytest.raises(ValueError, match=re.escape(told)):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["result.json", "guarantee.json", "plan.toml", "metrics.parquet"])
def test_broken_file_is_named(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    (run / name).write_bytes(b"{]")
    with pytest.raises(ValueError, match="cannot be read"):
        write_report([run], tmp_path / "report.html")
    (run / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match="cannot be read"):
        write_report([run], tmp_path / "report.html")


def test_no_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folders"):
        write_report([], tmp_path / "report.html")


def test_bounds_on_attacks_hold_for_other_clients(tmp_path: Path) -> None:
    """Under a hidden cohort of fixed size the adversary is all other clients, not an outsider."""
    noise, who = (Gaussian(2.0),) * 10, Participation("fixed", 0.1)
    guarantee = Guarantee(noise, who, "replace", delta=1e-5, clients=60)
    assert guarantee.views["outsider"] < guarantee.epsilon == guarantee.views["other_clients"]
    run = make_run(tmp_path / "run", events=noise, participation=who, relation="replace")
    told = read_words([run], tmp_path / "report.html").partition("Bounds on any attack")[2]
    for alarm in (0.01, 0.1):
        caught = float(guarantee.detection([alarm])[0])
        assert f"{100 * alarm:.0f} % {math.ceil(1000 * caught - 1e-9) / 10:.1f} %" in told
    rounds, spent = spent_by_round(guarantee)
    assert rounds[-1] == 10 and spent[-1] == pytest.approx(guarantee.epsilon)


HIDDEN = Participation("fixed", 0.2)


def test_epsilon_of_a_hidden_cohort_is_against_other_clients(tmp_path: Path) -> None:
    """The smaller epsilon against an outsider is shown in its own row only."""
    drawn_so: dict[str, Any] = {"participation": HIDDEN, "relation": "replace"}
    runs = [make_run(tmp_path / n, events=(Gaussian(3.0),) * 5, **drawn_so) for n in "ab"]
    guarantee = Guarantee((Gaussian(3.0),) * 5, HIDDEN, "replace", 1e-5, 60)
    others, outsider = known_cohort(5, 0.2, 3.0), guarantee.views["outsider"]
    assert outsider < 0.7 * others
    text = read_words(runs, tmp_path / "report.html")
    said = text.partition("Guarantee pmtl")[0]
    assert f"At epsilon {up(others)}, joining" in said
    assert f"{up(others)} epsilon at delta 0.00001, against other clients" in said
    assert f"{up(others)} 5 pmtl" in said, "in the table: epsilon, rounds"
    assert "Epsilon: against other clients, delta 1e-05, relation replace." in said
    assert f"pmtl at epsilon {up(others)} (2)" in said
    assert "as likely with a client's data as with another client's data in its place" in said
    assert up(outsider) not in said and f"{outsider:.4g}" not in said
    together = known_cohort(10, 0.2, 3.0)
    assert together > 2 * outsider, "the sum of epsilons against an outsider is too small"
    assert f"together at most epsilon {up(together)} at delta 1e-05" in said
    assert f"an outsider who receives the shared model {up(outsider)}" in text


def test_guarantees_in_short_name_their_view(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{z}", events=(Gaussian(z),) * 5) for z in (3.0, 4.0, 5.0, 6.0)]
    who: dict[str, Any] = {"participation": HIDDEN, "relation": "replace"}
    runs.append(make_run(tmp_path / "short", events=(Gaussian(7.0),) * 5, **who))
    text = read_words(runs, tmp_path / "report.html")
    told = text.partition("Further guarantees")[2]
    assert f"{up(known_cohort(5, 0.2, 7.0))} other clients 1e-05 replace 5 fixed size" in told


def write_without(runs: list[Path], out: Path) -> tuple[str, str, Checker]:
    """Write a page without clients: its source, its text and its parts."""
    write_report(runs, out, clients=False)
    page = out.read_text(encoding="utf-8")
    parts = check(page)
    return page, " ".join(" ".join(parts.texts).split()), parts


def numbers_in(spec: Any) -> set[str]:
    """Return all numbers of a chart's rows, to six digits."""
    if isinstance(spec, dict):
        return {n for value in spec.values() for n in numbers_in(value)}
    if isinstance(spec, list):
        return {n for value in spec for n in numbers_in(value)}
    return {f"{spec:.6g}"} if isinstance(spec, float) else set()


def test_a_page_without_clients_has_nothing_of_a_single_one(tmp_path: Path) -> None:
    beside = {"name": "local", "value": 0.6, "standard_error": 0.1, "difference": -0.2,
              "difference_standard_error": 0.1, "t": -2.0, "share_worse_off": 0.25}  # fmt: skip
    names = [f"school of {i:03}" for i in range(60)]
    run = make_run(tmp_path / "run", names=names, references=[beside], client_error_worst=9.87)
    add_shared(run)
    add_history(run)
    whole = write_report([run], tmp_path / "whole.html").read_text()
    page, text, parts = write_without([run], tmp_path / "page.html")
    assert all(name in whole for name in names[3:]), "the first three have no test rows"
    assert not any(name in page for name in names) and "school of" not in page
    errors = pq.read_table(run / "metrics.parquet").to_pydict()
    own = {f"{e:.6g}" for key in errors if key.startswith("error") for e in errors[key][3:]}
    shown = {n for spec in drawn(parts).values() for n in numbers_in(spec["datasets"])}
    assert shown and not own & shown
    worst = max(errors["error"][3:])
    assert f"{worst:.3g}" not in text and "worst client" not in text
    # what is of all clients together stays
    gain = sum(a > b for a, b in zip(errors["error_alone"], errors["error"], strict=True))
    assert f"{gain} of 57 clients gain" in text and "90th percentile" in text
    assert "For 100 % of clients the personal model is better" in text and "25 %" in text
    assert "no names and no numbers of single clients" in text and "protect it like" not in text
    assert "not covered by epsilon" in text and "by round" in text


@pytest.mark.parametrize(
    ("who", "told"),
    [
        (Participation("poisson", 0.3), False),
        (HIDDEN, False),
        (Participation("poisson", 0.3, visible=True), True),
    ],
)
def test_a_hidden_cohort_stays_hidden(tmp_path: Path, who: Participation, told: bool) -> None:
    noise = (Gaussian(3.0),) * 5
    run = make_run(tmp_path / "run", participation=who, events=noise, relation="replace")
    add_history(run)
    text, _ = read([run], tmp_path / "whole.html")
    assert ("clients that answered" in text) == told
    # Of rounds that wait for whoever was drawn, the clock tells something of who that was.
    assert charted(text) == [", by round", ", against virtual seconds"]
    _, text, _ = write_without([run], tmp_path / "page.html")
    assert ("clients that answered" in text) == told
    assert (", against virtual seconds" in charted(text)) == told


def test_no_budget_hides_no_cohort(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=(NonPrivate(),) * 5, method="fedavg")
    add_history(run)
    _, text, _ = write_without([run], tmp_path / "page.html")
    assert "clients that answered" in text


# --- what a reader trips over


def test_a_comparison_says_the_same_error_as_its_terminal(tmp_path: Path) -> None:
    """Clients and seeds both count; seeds alone would make bars several times too short."""
    values = (0.30, 0.32, 0.31)
    names = {}
    for seed, value in enumerate(values):
        run = make_run(tmp_path / f"{seed}", value=value, simulation=True)
        plan = (run / "plan.toml").read_text()
        (run / "plan.toml").write_text(f"simulation_seed = {seed + 4}\n{plan}")
        names[run] = "ours"
    names[make_run(tmp_path / "alone", method="local", events=(), simulation=True)] = "local"
    out = tmp_path / "report.html"
    said = (
        "At epsilon 1:",
        "  ours is better than local (by 0.1 \u00b1 0.02)",
        "Compared are <b>.",
    )
    write_report(list(names), out, names=names, findings=said)
    parts = check(out.read_text(encoding="utf-8"))
    text = " ".join(" ".join(parts.texts).split())
    over_seeds = sum((value - 0.31) ** 2 for value in values) / 2 / 3
    error = math.sqrt(0.02**2 + over_seeds)
    assert f"ours 3 0.31 \u00b1 {error:.2g}" in text
    (row,) = (
        one
        for one in chart(parts, "two standard errors")["datasets"]["rows"]
        if one["label"] == "ours"
    )
    assert row["error"] == pytest.approx(error, rel=1e-4)
    assert "one standard error over clients and seeds" in text
    assert "exceed the noise At epsilon 1: ours is better than local (by" in text
    assert "Compared are <b>." in text, "texts are escaped"
    assert "ours at epsilon 1 (seed 5)" in text and "(2)" not in text
    assert "spend together" not in text and "simulations spend nothing" in text
    assert text.count("SIMULATION: known seed") == 1


def test_every_section_is_in_the_menu_and_the_promise_is_told_once(
    comparison: tuple[str, Checker, str],
) -> None:
    text, _, page = comparison
    menu = page[page.index("<nav") : page.index("</nav>")]
    places = re.findall(r'<h2 id="([^"]+)"', page)
    assert len(places) > 4 and re.findall(r'href="#([^"]+)"', menu) == places
    assert text.count("no single client is promised a gain") == 1


def test_ties_are_no_losses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    alone = list(table["error_alone"])
    # three without test rows, 40 equal, 14 better, 3 worse
    own = [a if i < 43 else a / 2 if i < 57 else 2 * a for i, a in enumerate(alone)]
    pq.write_table(pa.table(table | {"error": own}), run / "metrics.parquet")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"share_better_than_local": 14 / 57}))
    text = read_words([run], tmp_path / "report.html")
    assert (
        "25 % of 57 clients predict better than with local training, 5 % worse, the others "
        "equally well"
    ) in text


def test_parts_with_bounds_of_their_own_are_not_said_to_have_one(
    comparison: tuple[str, Checker, str], tmp_path: Path
) -> None:
    assert "of clients' contributions, each clipped to C = 1, plus" in comparison[0]
    parted = make_run(tmp_path / "b", method="pfeb", events=(Gaussian(NOISE, 1.76),) * 20)
    text = read_words([parted], tmp_path / "b.html")
    assert "contributions, each block clipped to its own bound, plus" in text
    assert "clipped to C" not in text


def test_a_note_calls_a_median_a_median(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", r2=-43.9, r2_left_out=6, r2_median=0.2)
    text = read_words([run], tmp_path / "report.html")
    assert "0.2 (median)" in text and "-43.9" not in text
    assert "is not defined for 6 clients" in text and "the median over clients is shown" in text


# --- many runs

METHODS = {"local": 0.6, "fedavg": 0.55, "pmtl": 0.4, "pfeb": 0.35, "ditto": 0.5}


def value_of(method: str, noise: float, seed: int) -> float:
    return METHODS[method] + (0.01 * noise if method != "local" else 0) + 0.004 * (seed - 1)


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five methods, four epsilons, three seeds, 537 clients."""
    folder = tmp_path_factory.mktemp("sixty")
    return [
        make_run(
            folder / f"{method}-{scale}-{seed}",
            method=method,
            events=() if method == "local" else (Gaussian(scale * NOISE),) * 20,
            value=value_of(method, scale, seed),
            standard_error=0.5,
            clients=537,
        )
        for method in METHODS
        for scale in (0.5, 1.0, 2.0, 4.0)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def many(sixty: list[Path]) -> tuple[str, Checker]:
    return read(sixty, sixty[0].parent / "all.html")


def test_many_runs_are_grouped(sixty: list[Path], many: tuple[str, Checker]) -> None:
    text, _ = many
    assert "At every epsilon, joining helps: " in text
    # mean and standard error over clients (0.5) and seeds, by hand
    values = [value_of("pfeb", 1.0, seed) for seed in range(3)]
    error = math.sqrt(0.5**2 + np.var(values, ddof=1) / 3)
    assert f"pfeb at epsilon 1 3 {np.mean(values):.4g} \u00b1 {error:.2g}" in text
    opening = text[: text.index("What epsilon means")]
    (one,) = read_finished(sixty[39:40])
    assert one.name == "pfeb"
    alarms = math.ceil(1000 * float(one.guarantee.detection([0.01])[0]) - 1e-9) / 10
    row = rf"epsilon (\S+) pfeb {np.mean(values):.3g} 0.6 \d+ %, \d+ % {alarms:.1f} %"
    found = re.search(row, opening)
    assert found is not None and float(found[1]) >= one.epsilon - 1e-9
    assert "standard error over clients and seeds" in text
    assert text.count("clients gain (") == 6, "a few runs are shown one by one"
    assert "6 of 48 runs are shown" in text
    assert "Further guarantees" not in text, "seeds and methods share guarantees"


def test_the_frontier_has_a_line_a_method_with_bars(
    sixty: list[Path], many: tuple[str, Checker]
) -> None:
    data = chart(many[1], "against epsilon")["datasets"]
    rows = [row for row in data["rows"] if row["kind"] == "pmtl"]
    assert len(rows) == 4 and all(row["runs"] == 3 for row in rows)
    for scale in (0.5, 1.0, 2.0, 4.0):
        values = [value_of("pmtl", scale, seed) for seed in range(3)]
        (row,) = [one for one in rows if one["y"] == pytest.approx(np.mean(values), rel=1e-5)]
        error = math.sqrt(0.5**2 + np.var(values, ddof=1) / 3)
        assert row["error"] == pytest.approx(error, rel=1e-4)
        assert row["high"] - row["low"] == pytest.approx(2 * row["error"], rel=1e-3)
    epsilons = sorted(row["x"] for row in rows)
    assert epsilons[1] < 1.001 and epsilons == sorted(epsilons)
    assert {row["kind"] for row in data["levels"]} == {"local"}
    (one,) = read_finished(sixty[24:25])
    assert min(abs(x - one.epsilon) for x in epsilons) < 1e-4


def test_groups_are_of_method_epsilon_and_data(sixty: list[Path]) -> None:
    runs = read_finished(sixty)
    groups = group(runs)
    assert len(groups) == 1 + 4 * 4 and sum(len(one.runs) for one in groups) == 60
    assert {len(one.runs) for one in groups if one.first.shares} == {3}
    assert [one.label for one in groups if not one.first.shares] == ["local"]
    assert len(one_by_one(runs)) == 6 and all(run.private for run in one_by_one(runs))
    assert one_by_one(runs[:8]) == runs[:8]


def test_a_group_of_one_run_has_the_error_over_clients(tmp_path: Path) -> None:
    (one,) = group(read_finished([make_run(tmp_path / "a")]))
    assert one.error("value", "standard_error") == 0.02
    assert math.isnan(one.error("value", "no_such_error"))


# --- figures as files


def test_every_chart_of_a_page_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", names=['</svg>"', *(f"var(--x) {i}" for i in range(59))])
    add_losses(run)
    out, figures = tmp_path / "page.html", tmp_path / "figures"
    assert main(["report", str(run), "--out", str(out), "--figures", str(figures)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    parts = check(out.read_text(encoding="utf-8"))
    names = {value for name, value in parts.attributes if name == "id"}
    stems = {path.stem for path in figures.iterdir()}
    assert len(stems) == len(drawn(parts)) and stems <= names
    assert {"gain-pmtl-epsilon-1", "trade-off-pmtl-epsilon-1", "losses-pmtl-epsilon-1"} <= stems
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF"}
    for path in figures.iterdir():
        if path.suffix in starts:
            assert path.read_bytes()[:4] == starts[path.suffix]
            continue
        svg = path.read_text(encoding="utf-8")
        assert svg.startswith("<svg") and "var(--" not in svg.replace("var(--x)", "")
    losses = (figures / "losses-pmtl-epsilon-1.svg").read_text(encoding="utf-8")
    assert "epsilon spent" in losses
    assert "loss and epsilon by round" not in losses, "a paper has captions of its own"


def test_figures_without_altair_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "altair", None)
    assert main(["report", str(run), "--figures", str(tmp_path / "f")]) == 2
    assert "pip install coterie[report]" in capsys.readouterr().err


# --- the three models of a client, and who sees what


def test_each_client_has_three_errors(comparison: tuple[str, Checker, str], tmp_path: Path) -> None:
    assert "than the shared one" not in comparison[0]
    run = make_run(tmp_path / "run")
    add_shared(run)
    text, parts = read([run], tmp_path / "report.html")
    assert "For 100 % of clients the personal model is better than the shared one" in text
    rows = chart(parts, "local, shared and personal")["datasets"]["rows"]
    assert all(row["shared"] == pytest.approx(1.2 * row["personal"], rel=1e-4) for row in rows)
    gains = [row["gain"] for row in rows]
    assert gains == sorted(gains) and len(rows) == 57
    assert "error of the shared model" in text


def test_epsilon_by_adversary(comparison: tuple[str, Checker, str]) -> None:
    text, _, page = comparison
    assert page.count('data-label="reason"') == 4, "read on a phone, too"
    for told in (
        "all other clients together 1",
        "the server inf the server observes each clipped contribution before noise",
        "the server, with secure aggregation inf the server adds the noise itself",
        "an outsider who receives the shared model 1",
    ):
        assert told in text
    assert "Accountant: exact Gaussian DP" in text


def test_the_page_explains_epsilon(comparison: tuple[str, Checker, str], tmp_path: Path) -> None:
    text, _, _ = comparison
    assert "What epsilon means: any event that the other clients together can observe" in text
    assert "at most 2.72 times as likely" in text
    assert "Terms of this page" in text
    # No scale of strong and weak: none has a source. The bounds on attacks show what it means.
    large = make_run(tmp_path / "large", events=(Gaussian(0.4),) * 20)
    for told in (text, read_words([large], tmp_path / "large.html")):
        assert not re.search(r"\b(strong|moderate|weak|fair)\b", told)


PARTS = [
    {"leaves": ["mean"], "norm": 2, "bound": 0.5, "noise": 3.0},
    {"leaves": ["a", "b", "c", "d"], "norm": 1, "bound": 2.0, "noise": 7.25},
    {"leaves": ["raw"], "norm": None, "bound": None, "noise": 1.5},
]


def test_a_reviewer_finds_every_number(tmp_path: Path) -> None:
    later = [{**part, "noise": 2 * part["noise"]} for part in PARTS]  # type: ignore[operator]
    releases = [{"rounds": 10, "parts": PARTS}, {"rounds": 10, "parts": later}]
    # Numbers that follow from the events are computed anew: those of result.json are not shown.
    told = {"releases": releases, "epsilon": {"zero_out": 1e-9, "replace": 1e-9}}
    run = make_run(tmp_path / "run", reviewer=told)
    text = read_words([run], tmp_path / "report.html").replace("\u00a0", " ")
    text = text[text.index("For a privacy reviewer These numbers") :]
    mu = math.sqrt(20) / NOISE

    def delta(epsilon: float) -> float:
        upper = norm.cdf(mu / 2 - epsilon / mu)
        return float(upper - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    assert f"mu {up(mu)} (zero_out); {up(2 * mu)} (replace)" in text
    for name, scale in {"zero_out": 1, "replace": 2, "person at 2 clients": 4,
                        "person at 3 clients": 6}.items():  # fmt: skip
        assert f"epsilon, {name} {up(least_epsilon({scale * mu: 1.0}))} " in text
    shown = re.search(r"0: (\S+); 0.5: (\S+); 1: (\S+); 2: (\S+);", text)
    assert shown is not None
    for epsilon, found in zip((0, 0.5, 1, 2), shown.groups(), strict=True):
        assert delta(epsilon) * 0.9999 <= float(found) <= delta(epsilon) * 1.1
    for alarm in (0.01, 0.1):
        best = math.ceil(1000 * float(norm.cdf(norm.ppf(alarm) + mu))) / 10
        assert f"attack, {100 * alarm:.0f} % false positives {best:.1f} %" in text
    assert "release: mean bound 0.5 (l2 norm), noise 3 to 6 " in text
    assert "release: a, b and 2 more bound 2 (l1 norm), noise 7.25 to 14.5 " in text
    assert "release: raw bound none, noise 1.5 to 3 " in text
    assert "secret noise" not in text


def test_a_reviewer_reads_what_sampling_and_simulations_change(tmp_path: Path) -> None:
    who = Participation("poisson", 0.1)
    run = make_run(tmp_path / "run", participation=who, simulation=True)
    text = read_words([run], tmp_path / "report.html")
    text = text[text.index("For a privacy reviewer These numbers") :]
    assert "mu none: not one Gaussian release" in text
    assert "release:" not in text, "an older run has no bounds and noise in its summary"
    assert "the noise of a simulation is known" in text
    bare = make_run(tmp_path / "bare", events=(NonPrivate(),) * 3)
    assert "For a privacy reviewer" not in read_words([bare], tmp_path / "bare.html")


@pytest.mark.parametrize(
    "reviewer",
    ["text", [1], {"releases": [{}]}, {"releases": [{"parts": [{**PARTS[0], "norm": 3}]}]},
     {"releases": [{"parts": [{**PARTS[0], "noise": None}]}]}],
)  # fmt: skip
def test_a_damaged_summary_is_refused_by_name(tmp_path: Path, reviewer: object) -> None:
    run = make_run(tmp_path / "run", reviewer=reviewer)
    with pytest.raises(ValueError, match=r"run cannot be read"):
        read_finished([run])


def test_entries_of_one_method_are_kept_apart(tmp_path: Path) -> None:
    """Two entries of a comparison may be of one method: their runs are never averaged together."""
    names = {}
    for label, value in (("weak pull", 0.5), ("strong pull", 0.3)):
        for seed in range(5):
            run = make_run(tmp_path / f"{label}-{seed}", method="pmtl", value=value)
            names[run] = label
    found = {one.label: one.mean("value") for one in group(read_finished(list(names), names))}
    assert found == pytest.approx({"weak pull": 0.5, "strong pull": 0.3})


def test_other_settings_are_another_group(tmp_path: Path) -> None:
    runs = []
    for lam, value in ((0.1, 0.5), (3.0, 0.3)):
        for seed in range(5):
            run = make_run(tmp_path / f"{lam}-{seed}", method="pmtl", value=value)
            plan = f'simulation_seed = {seed}\n[method]\nkind = "pmtl"\nlam = {lam}\n'
            (run / "plan.toml").write_text(plan)
            runs.append(run)
    found = group(read_finished(runs))
    assert [one.label for one in found] == ["pmtl at epsilon 1 (1)", "pmtl at epsilon 1 (2)"]
    assert [one.mean("value") for one in found] == pytest.approx([0.5, 0.3])


# --- deployments

SERVER = "the server, which observes each clipped contribution before noise"


def page_of(tmp_path, **settings) -> str:
    made = deploy(tmp_path, **settings)
    made.coordinate()
    return read_words([made.run], tmp_path / "page.html")


@pytest.mark.parametrize(("sites", "needed"), [(3, 3), (6, 4)])
def test_under_secure_aggregation_no_single_contribution_is_seen(tmp_path, sites, needed):
    """How many sites must stay is told in sites: two thirds, with 2 t > n + 1, by hand."""
    text = page_of(tmp_path, sites=sites, trust="secure_aggregation")
    assert f"{needed} of {sites} sites must answer a round (else it is repeated)" in text
    assert "67 %" not in text and SERVER not in text
    assert "Not covered: the coordinator, which observes who took part, and the exact sum" in text


def test_a_coordinator_with_a_bound_is_not_among_what_is_not_covered(tmp_path):
    noise = ct.Privacy(epsilon=4.0, noise="local")
    text = page_of(tmp_path, trust="server", privacy=noise, sampler=Everyone())
    assert SERVER not in text and "Not covered: the coordinator" not in text
    assert "Not covered: an adversary who reads a client's memory" in text
    assert "50 % of the sampled clients" in text


def test_the_minimum_is_of_all_where_the_cohort_is_hidden(tmp_path):
    text = page_of(tmp_path, sampler=ct.Poisson(6))
    assert "50 % of all clients" in text and "sites must answer" not in text


# --- sentences of one page agree


@pytest.mark.parametrize("clients", [6, 60, 400])
@pytest.mark.parametrize("gain", [0.4, 0.0, -0.4])
@pytest.mark.parametrize("metric", ["nmse", "accuracy"])
@pytest.mark.parametrize("value", [0.3, 0.9])
def test_sentences_of_a_page_do_not_contradict(
    tmp_path: Path, clients: int, gain: float, metric: str, value: float
) -> None:
    """The metric may be on another side than the clients: then the page says why."""
    run = make_run(tmp_path / "run", clients=clients, gain=gain, metric=metric, value=value)
    text = read_words([run], tmp_path / "report.html")
    (one,) = read_finished([run])
    assert one.verdict is not None
    lead = one.verdict.lead
    opening, _, rest = text.partition("What epsilon means")
    assert f"At epsilon 1, {one.verdict}." in opening
    assert "joining" not in rest.replace("Joining", "").partition("Guarantee")[0], "said once"
    gained, lost = (
        int(n) for n in re.findall(r"(\d+) of \d+ clients gain .*?, (\d+) lose", rest)[0]
    )
    if lead == "joining helps":
        assert gained > lost
    if lead == "joining hurts":
        assert lost > gained
    if "no clear" in lead:
        assert abs(gained - lost) < 0.5 * (clients - 3)
    better = (value > 0.6) == (metric == "accuracy")  # the local value is 0.6
    sided = {"joining helps": True, "joining seems to help": True, "joining hurts": False,
             "joining seems to hurt": False}.get(lead, better)  # fmt: skip
    assert ("which counts all test rows alike" in opening) == (sided != better)


@pytest.mark.parametrize(
    "who",
    [EVERYONE, Participation("poisson", 0.1), Participation("poisson", 0.1, visible=True),
     Participation("fixed", 0.1), Participation("fixed", 0.1, visible=True),
     Participation("poisson", 1.0)],
)  # fmt: skip
def test_nobody_hides_in_a_cohort_of_everybody(who: Participation) -> None:
    relation: Any = "replace" if who.kind == "fixed" else "zero_out"
    for event in (Gaussian(3.0), Laplace(30.0)):
        told = Guarantee((event,) * 5, who, relation, 1e-5, 60).statement()
        everyone = "all 60 clients take part in every round" in told
        assert everyone == (who.rate == 1)
        assert not (everyone and "observe who takes part" in told)
        assert ("do not observe who takes part" in told) <= (not who.visible)
