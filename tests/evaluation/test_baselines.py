"""Baselines: pairs of errors, which are scored and why not, sentences, pages, resuming."""

import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import ttest_rel

from coterie.cli.main import main
from coterie.data.config import DataConfig
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.baselines import (
    DESCRIPTIONS,
    TITLES,
    Baselines,
    Paired,
    score_baselines,
)
from coterie.evaluation.metrics import Score
from coterie.evaluation.score import evaluate
from coterie.methods.base import registered
from coterie.methods.baselines import Local, LocalStar, PooledLinear
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.report.page import write_report
from coterie.report.read import read_finished
from coterie.runs.run import execute

pytestmark = pytest.mark.full

FREE = Privacy(epsilon=math.inf)
NAMES = list(TITLES)


def scored(errors, rows=None, value=0.5):
    errors = np.asarray(errors, dtype=np.float64)
    rows = np.full(len(errors), 3) if rows is None else np.asarray(rows)
    return Score("nmse", value, 0.01, errors, rows)


def small(clients=30, task="regression", **settings):
    data = synthetic("mean", clients=clients, rows=(4, 9), features=3, task=task, **settings).data
    return data.split(2, 0)


def run_of(method, train, test, epsilon=math.inf):
    plan = Plan(method=method, privacy=Privacy(epsilon=epsilon), rounds=3, simulation_seed=0)
    return evaluate(method.model, simulate(plan, train).rows, test)


# --- pairs of errors


def test_pairs_are_those_of_a_paired_t_test():
    draw = np.random.default_rng(0)
    ours, theirs = draw.gamma(2, 1, 40), draw.gamma(2, 1.2, 40)
    rows = np.full(40, 2)
    rows[:4], ours[:4], theirs[:4] = 0, math.nan, math.nan
    paired = Paired.of(scored(ours, rows), scored(theirs, rows))
    oracle = ttest_rel(ours[4:], theirs[4:])
    assert paired.t == pytest.approx(oracle.statistic)
    assert paired.difference == pytest.approx((ours - theirs)[4:].mean())
    assert paired.worse == ((ours > theirs)[4:]).mean()
    turned = Paired.of(scored(theirs, rows), scored(ours, rows))
    assert turned.t == pytest.approx(-paired.t) and turned.worse == pytest.approx(1 - paired.worse)


def test_pairs_without_numbers():
    same = Paired.of(scored([1.0, 2.0]), scored([1.0, 2.0]))
    assert (same.difference, same.t, same.worse, same.better) == (0, 0, 0, 0)
    broken = Paired.of(scored([math.nan, math.inf, 1.0]), scored([1.0, 2.0, 3.0]))
    assert math.isnan(broken.difference) and math.isnan(broken.t)
    assert broken.worse == pytest.approx(2 / 3), "a model that broke is worse than one that did not"
    nobody = Paired.of(scored([math.nan], [0]), scored([math.nan], [0]))
    assert math.isnan(nobody.worse)
    assert math.isnan(Paired.of(scored([1.0]), scored([2.0])).t), "one client has no error"


# --- what is scored


def score_all(method, train, test, score, **more):
    return score_baselines(method, train, test, score=score, names=NAMES, **more)


def test_baselines_are_the_runs_they_name():
    train, test = small()
    score = run_of(PMTL(), train, test, 1.0)
    found = score_all(PMTL(), train, test, score)
    assert list(found.scores) == NAMES and found.missing == ()
    assert found.local is found.scores["local"]
    for name, method in (
        ("local", Local()),
        ("local_star", LocalStar()),
        ("centralised", PooledLinear()),
    ):
        np.testing.assert_allclose(
            found.scores[name].clients, run_of(method, train, test).clients, rtol=1e-5
        )
    kept = found.to_json(score)
    assert [one["name"] for one in kept] == NAMES
    assert [one["releases_nothing"] for one in kept] == [True, *[False] * (len(NAMES) - 1)]
    for one in kept:
        assert one["label"] == DESCRIPTIONS[one["name"]]
        assert one["value"] == found.scores[one["name"]].value
        assert one["t"] == pytest.approx(one["difference"] / one["difference_standard_error"])
    assert kept[1]["share_worse_than_local_star"] == 0
    assert list(found.errors()) == [f"error_{name}" for name in NAMES[1:]]
    json.dumps(kept, allow_nan=False)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_baselines_of_classes(task):
    train, test = small(task=task)
    found = score_all(PMTL(), train, test, run_of(PMTL(), train, test, 1.0))
    assert {"local", "local_star", "centralised"} <= set(found.scores), found.missing


def test_local_is_scored_by_default_and_others_on_request():
    train, test = small()
    score = run_of(PMTL(), train, test, 1.0)
    assert list(score_baselines(PMTL(), train, test, score=score).scores) == ["local"]
    assert score_baselines(PMTL(), train, test, score=score, names=()).scores == {}
    some = score_baselines(PMTL(), train, test, score=score, names=("centralised",))
    assert list(some.scores) == ["centralised"] and some.local is None
    alone = score_all(Local(), train, test, score)
    assert alone.local is score and list(alone.scores) == NAMES
    network = FedAvg(model=MLP(hidden=(2,)))
    found = score_all(network, train, test, run_of(network, train, test))
    assert list(found.scores) == ["local"] and len(found.missing) == len(NAMES) - 1
    assert found.missing[0] == "local* is left out: it needs a linear model, and this is MLP"


def test_a_run_is_not_compared_with_itself():
    train, test = small()
    for method, name in ((LocalStar(), "local_star"), (PooledLinear(), "centralised")):
        found = score_all(method, train, test, run_of(method, train, test), private=False)
        assert list(found.scores) == [other for other in NAMES if other != name]


def test_the_mixed_model_of_a_run_without_privacy_is_itself():
    train, test = small()
    method = registered()["pfeb"]()
    score = run_of(method, train, test)
    assert "mixed" not in score_all(method, train, test, score, private=False).scores
    found = score_all(method, train, test, score).scores
    free = method.resolve(train.spec, n_mu=math.inf, cohort=len(train))
    by_hand = replace(free, model=Linear())
    rounds = by_hand.rounds(train.spec).without_noise
    plan = Plan(method=by_hand, privacy=FREE, rounds=rounds, simulation_seed=0)
    again = evaluate(by_hand.model, simulate(plan, train).rows, test)
    np.testing.assert_array_equal(found["mixed"].clients, again.clients)


# --- a run and its folder


def plan_of(baselines=tuple(TITLES), **settings):
    options = {"clients": 25, "rows": 7, "features": 3}
    return Plan(
        data=DataConfig(name="synthetic", options=options),
        method=PMTL(),
        privacy=Privacy(epsilon=4.0),
        rounds=2,
        simulation_seed=3,
        baselines=baselines,
        **settings,
    )


CHOSEN = "pmtl, because <it> is asked for"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a finished run with all baselines, and its result."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, execute(plan_of(chosen=CHOSEN), folder=folder)


def without_time(summary):
    return {key: value for key, value in summary.items() if key not in ("seconds", "run")}


def test_a_run_keeps_its_baselines(whole):
    folder, result = whole
    kept = json.loads((folder / "result.json").read_text())
    assert [one["name"] for one in kept["references"]] == NAMES
    assert kept["references_missing"] == []
    local = kept["references"][0]
    assert local["value"] == kept["local_value"] == result.local.value
    metrics = pq.read_table(folder / "metrics.parquet").to_pydict()
    columns = {name: metrics[f"error_{name}"] for name in NAMES[1:]}
    columns["local"] = metrics["error_alone"]
    for one in kept["references"]:
        apart = np.array(metrics["error"]) - np.array(columns[one["name"]])
        assert one["difference"] == pytest.approx(apart.mean())
        assert one["share_worse_off"] == (apart > 0).mean()
        assert one["share_better_off"] == (apart < 0).mean()
    assert Plan.load(folder / "plan.toml").baselines == tuple(NAMES)


@pytest.mark.parametrize("settings", [{"baselines": ()}, {"compare_with_local": False}])
def test_a_run_that_nobody_wants_compared(settings):
    result = execute(plan_of(**{"baselines": ("local",), **settings}))
    assert result.local is None and result.summary["references"] == []
    assert result.summary["local_value"] is None


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], ("local",)),
        (["--baselines"], tuple(TITLES)),
        (["--baselines", "pooled,local_star"], ("local", "centralised", "local_star")),
    ],
)
def test_the_flag_names_baselines(tmp_path, capsys, no_pages, flags, names):
    line = "run --data synthetic --option clients=12 --rounds 1 --simulation-seed 1 --quiet --json"
    assert main([*line.split(), "--out", str(tmp_path / "run"), *flags]) == 0
    assert Plan.load(tmp_path / "run" / "plan.toml").baselines == names
    found = json.loads(capsys.readouterr().out)["references"]
    assert {one["name"] for one in found} == set(names)


def test_an_unknown_baseline_is_refused(capsys):
    with pytest.raises(ValueError, match="'best' is unknown; expected one of local, local_star"):
        execute(plan_of(baselines=("best",)))
    with pytest.raises(SystemExit):
        main(["run", "--data", "synthetic", "--baselines", "best"])
    assert "'best': no such baseline; expected one of local, " in capsys.readouterr().err


def test_a_failing_baseline_does_not_lose_the_run(tmp_path, monkeypatch):
    def fail(self, shared, personal, clients, rng):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PooledLinear, "personalise", fail)
    summary = execute(plan_of(), folder=tmp_path / "run").summary
    assert [one["name"] for one in summary["references"]] == [
        n for n in NAMES if n != "centralised"
    ]
    told = ["centralised could not be computed (RuntimeError: out of memory)"]
    assert summary["references_missing"] == told
    assert (tmp_path / "run" / "result.json").exists()


def test_a_baseline_that_refuses_the_rows_names_no_client():
    train, test = small()
    train, test = (replace(part, features=part.features * 1000) for part in (train, test))
    found = score_all(PMTL(), train, test, run_of(Local(), train, test))
    assert found.missing == ("mixed model is left out: the rows are not scaled for it",)
    assert "mixed" not in found.scores and "local_star" in found.scores


def test_a_run_that_is_killed_during_its_baselines_ends_the_same(whole, tmp_path, monkeypatch):
    done, plan = PooledLinear.personalise, plan_of(chosen=CHOSEN)

    def die(self, shared, personal, clients, rng):
        raise KeyboardInterrupt

    monkeypatch.setattr(PooledLinear, "personalise", die)
    with pytest.raises(KeyboardInterrupt):
        execute(plan, folder=tmp_path / "killed")
    assert not (tmp_path / "killed" / "result.json").exists()
    monkeypatch.setattr(PooledLinear, "personalise", done)
    again = execute(Plan.load(tmp_path / "killed" / "plan.toml"), folder=tmp_path / "killed")
    assert without_time(again.summary) == without_time(whole[1].summary)
    killed = pq.read_table(tmp_path / "killed" / "metrics.parquet")
    assert killed.equals(pq.read_table(whole[0] / "metrics.parquet"))


# --- words


def test_a_page_shows_the_baselines_the_verdict_and_the_choice(whole, tmp_path):
    folders = [Path(shutil.copytree(whole[0], tmp_path / "one"))]
    for name, method in (("two", FedAvg()), ("three", Local())):
        execute(replace(plan_of(), method=method), folder=tmp_path / name)
        folders.append(tmp_path / name)
    page = write_report(folders[:1], tmp_path / "one.html").read_text()
    assert '<h2 id="baselines">Baselines</h2>' in page
    assert page.count(DESCRIPTIONS["local_star"]) == 1
    assert "<svg" in page and "against local*" in page
    told = read_finished(folders[:1])[0].baselines
    assert f"{100 * told[1]['share_worse_off']:.0f} %" in page
    verdict = whole[1].summary["verdict"]
    top = page[page.index("<header") : page.index("</header>")]
    assert "Verdict" not in top and "Chosen" not in top, "the first screen has one verdict"
    before = page[page.index('<h2 id="plan"') :]
    assert f"Chosen by auto: {html.escape(CHOSEN)}." in before
    assert verdict["verdict"] in ("join", "small gain", "learn alone")
    assert f"The verdict was: {verdict['verdict']}. {html.escape(verdict['words'])}" in before
    assert all(html.escape(told) in before for told in verdict["remedies"])
    result = json.loads((folders[0] / "result.json").read_text())
    (folders[0] / "result.json").write_text(json.dumps(result | {"r2": -7393.0, "r2_median": 0.21}))
    several = write_report(folders, tmp_path / "all.html").read_text()
    assert several.count(DESCRIPTIONS["local_star"]) == 1
    assert several.count('<th scope="col">local*: ') == 1
    assert several.count("against local*</figcaption>") == 2
    assert "pmtl: Chosen by auto" in several and "verdict before the run" in several
    shown = re.findall('data-label="test R\u00b2">([^<]*)<', several)
    assert shown[0] == "0.21 (median)" and all(cell.endswith(" (median)") for cell in shown)
    # Folders of earlier versions have none of this, and are shown without.
    for key in ("references", "references_missing", "verdict", "chosen"):
        del result[key]
    (folders[0] / "result.json").write_text(json.dumps(result))
    old = write_report(folders[:1], tmp_path / "old.html").read_text()
    assert 'id="baselines"' not in old and "The verdict was" not in old


def test_nothing_is_told_of_nothing():
    assert Baselines({}).to_json(scored([1.0])) == [] and Baselines({}).local is None
