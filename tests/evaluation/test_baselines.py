"""What stands beside a run: pairs of errors, who is left out and why, tables, pages, resuming."""

import html
import io
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from scipy.stats import ttest_rel

from coterie.choice import DataChoice
from coterie.data.synthetic import synthetic
from coterie.engines.simulate import simulate
from coterie.evaluation import baselines as references
from coterie.evaluation.baselines import (
    DESCRIPTIONS,
    Baselines,
    Paired,
    score_baselines,
    verdict,
    verdicts,
)
from coterie.evaluation.metrics import Score
from coterie.evaluation.score import evaluate
from coterie.methods.base import registered
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.methods.local_star import LocalStar
from coterie.methods.pmtl import PMTL
from coterie.methods.pooled import PooledLinear
from coterie.models import MLP, Linear
from coterie.plan import Plan, Privacy
from coterie.report.page import write_report
from coterie.report.read import read_finished
from coterie.report.tables import baselines_table, results_table
from coterie.run import execute
from coterie.run_plan import RunPlan, load_plan

pytestmark = pytest.mark.full

FREE = Privacy(epsilon=math.inf)
HAS_MIXED = "pfeb" in registered()
NAMES = ["local", "local_star", "pooled", *["mixed"] * HAS_MIXED]


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
    assert (same.difference, same.t, same.worse) == (0, 0, 0)
    broken = Paired.of(scored([math.nan, math.inf, 1.0]), scored([1.0, 2.0, 3.0]))
    assert math.isnan(broken.difference) and math.isnan(broken.t)
    assert broken.worse == pytest.approx(2 / 3), "a model that broke is worse than one that did not"
    nobody = Paired.of(scored([math.nan], [0]), scored([math.nan], [0]))
    assert math.isnan(nobody.worse)
    assert math.isnan(Paired.of(scored([1.0]), scored([2.0])).t), "one client has no error"


# --- what is scored


def test_references_are_the_runs_they_name():
    train, test = small()
    score = run_of(PMTL(), train, test, 1.0)
    found = score_baselines(PMTL(), train, test, score=score)
    assert list(found.scores) == NAMES and found.missing == ()
    assert found.local is found.scores["local"]
    for name, method in (
        ("local", Local()),
        ("local_star", LocalStar()),
        ("pooled", PooledLinear()),
    ):
        np.testing.assert_allclose(
            found.scores[name].clients, run_of(method, train, test).clients, rtol=1e-5
        )
    told = found.told(score)
    assert [one["name"] for one in told] == NAMES
    assert [one["releases_nothing"] for one in told] == [True, *[False] * (len(NAMES) - 1)]
    assert not any("private" in one for one in told), "no score here has noise"
    for one in told:
        assert one["label"] == DESCRIPTIONS[one["name"]]
        assert one["value"] == found.scores[one["name"]].value
        assert one["t"] == pytest.approx(one["difference"] / one["difference_standard_error"])
    assert "stronger than any honest client has" in told[1]["label"]
    assert told[1]["share_worse_than_local_star"] == 0
    assert list(found.errors()) == [f"error_{name}" for name in NAMES[1:]]
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_references_of_classes(task):
    train, test = small(task=task)
    score = run_of(PMTL(), train, test, 1.0)
    found = score_baselines(PMTL(), train, test, score=score)
    assert {"local", "local_star", "pooled"} <= set(found.scores), found.missing


def test_who_has_only_local_beside_it_and_why():
    train, test = small()
    score = run_of(PMTL(), train, test, 1.0)
    assert score_baselines(PMTL(), train, test, score=score, which="none").scores == {}
    only = score_baselines(PMTL(), train, test, score=score, which="local")
    assert list(only.scores) == ["local"] and only.missing == ()
    network = FedAvg(model=MLP(hidden=(2,)))
    found = score_baselines(network, train, test, score=run_of(network, train, test))
    assert list(found.scores) == ["local"]
    assert len(found.missing) == len(NAMES) - 1
    assert found.missing[0] == "local* is left out: it is of linear models, and this is MLP"
    alone = score_baselines(Local(), train, test, score=score)
    assert alone.local is score and list(alone.scores) == ["local"] and alone.missing == ()
    asked = score_baselines(Local(), train, test, score=score, which="all")
    assert list(asked.scores) == NAMES


def test_what_would_take_long_is_left_out_unless_asked_for(monkeypatch):
    train, test = small()
    score = run_of(PMTL(), train, test, 1.0)
    one = 16.0 * train.offsets[-1]  # models of 4 numbers
    monkeypatch.setattr(references, "MOST_WORK", 7 * one)
    found = score_baselines(PMTL(), train, test, score=score)
    assert list(found.scores) == ["local", "pooled"]
    why = found.missing[0]
    assert why.startswith("local* is left out, as it would take long: about ")
    assert why.endswith('(references = "all" asks)')
    asked = score_baselines(PMTL(), train, test, score=score, which="all")
    assert list(asked.scores) == NAMES and asked.missing == ()
    monkeypatch.setattr(references, "MOST_WORK", 25 * one)
    found = score_baselines(PMTL(), train, test, score=score)
    assert list(found.scores) == ["local", "local_star", "pooled"]
    monkeypatch.setattr(references, "MOST_WORK", 7 * one - 1)
    assert list(score_baselines(PMTL(), train, test, score=score).scores) == ["local"]


def test_a_reference_is_not_compared_with_itself():
    train, test = small()
    for method, name in ((LocalStar(), "local_star"), (PooledLinear(), "pooled")):
        score = run_of(method, train, test)
        found = score_baselines(method, train, test, score=score, private=False)
        assert list(found.scores) == [other for other in NAMES if other != name]


@pytest.mark.skipif(not HAS_MIXED, reason="no mixed model is registered")
def test_the_mixed_model_of_a_run_without_privacy_is_itself():
    train, test = small()
    method = registered()["pfeb"]()
    score = run_of(method, train, test)
    assert "mixed" not in score_baselines(method, train, test, score=score, private=False).scores
    found = score_baselines(method, train, test, score=score).scores
    by_hand = replace(method.for_budget(math.inf, train.spec), model=Linear())
    plan = Plan(method=by_hand, privacy=FREE, rounds=method.rounds_without_noise, simulation_seed=0)
    again = evaluate(by_hand.model, simulate(plan, train).rows, test)
    np.testing.assert_array_equal(found["mixed"].clients, again.clients)


# --- a run and its folder


def plan_of(**settings):
    options = {"clients": 25, "rows": 7, "features": 3}
    return RunPlan(
        data=DataChoice(name="synthetic", options=options),
        method=PMTL(),
        privacy=Privacy(epsilon=4.0),
        rounds=2,
        simulation_seed=3,
        **settings,
    )


def without_time(summary):
    return {key: value for key, value in summary.items() if key not in ("seconds", "run")}


def test_a_run_keeps_its_references(tmp_path):
    result = execute(plan_of(), folder=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [one["name"] for one in kept["references"]] == NAMES
    assert kept["references_missing"] == []
    local = kept["references"][0]
    assert local["value"] == kept["local_value"] == result.local.value
    metrics = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pydict()
    columns = {name: metrics[f"error_{name}"] for name in NAMES[1:]}
    columns["local"] = metrics["error_alone"]
    for one in kept["references"]:
        apart = np.array(metrics["error"]) - np.array(columns[one["name"]])
        assert one["difference"] == pytest.approx(apart.mean())
        assert one["share_worse_off"] == (apart > 0).mean()
    assert load_plan(tmp_path / "run" / "plan.toml").references == "auto"


@pytest.mark.parametrize("settings", [{"references": "none"}, {"compare_with_local": False}])
def test_a_run_that_nobody_wants_compared(settings):
    result = execute(plan_of(**settings))
    assert result.local is None and result.summary["references"] == []
    assert result.summary["local_value"] is None


def test_a_failing_reference_does_not_lose_the_run(tmp_path, monkeypatch):
    def fail(self, clients):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PooledLinear, "fit_all", fail)
    summary = execute(plan_of(), folder=tmp_path / "run").summary
    assert [one["name"] for one in summary["references"]] == [n for n in NAMES if n != "pooled"]
    told = ["pooled could not be computed (RuntimeError: out of memory)"]
    assert summary["references_missing"] == told
    assert (tmp_path / "run" / "result.json").exists()


def test_a_reference_that_refuses_the_rows_names_no_client():
    train, test = small()
    train, test = (replace(part, features=part.features * 1000) for part in (train, test))
    found = score_baselines(PMTL(), train, test, score=run_of(Local(), train, test))
    assert found.missing == ("mixed model is left out: the rows are not scaled for it",)
    assert "mixed" not in found.scores and "local_star" in found.scores


def test_a_run_that_is_killed_beside_its_references_ends_the_same(tmp_path, monkeypatch):
    whole = execute(plan_of(), folder=tmp_path / "whole").summary
    done = PooledLinear.fit_all

    def die(self, clients):
        raise KeyboardInterrupt

    monkeypatch.setattr(PooledLinear, "fit_all", die)
    with pytest.raises(KeyboardInterrupt):
        execute(plan_of(), folder=tmp_path / "killed")
    assert not (tmp_path / "killed" / "result.json").exists()
    monkeypatch.setattr(PooledLinear, "fit_all", done)
    again = execute(load_plan(tmp_path / "killed" / "plan.toml"), folder=tmp_path / "killed")
    assert without_time(again.summary) == without_time(whole)
    first, second = (
        pq.read_table(tmp_path / name / "metrics.parquet") for name in ("whole", "killed")
    )
    assert first.equals(second)


# --- words


def told_of(name="local_star", t=-20.0, worse=0.09, **more):
    keys = {"value": 0.5, "standard_error": 0.01, "difference": (t or 0) / 1000}
    keys |= {"difference_standard_error": 0.001, "share_worse_than_local_star": None}
    return {
        "name": name,
        "label": DESCRIPTIONS[name],
        "t": t,
        "share_worse_off": worse,
        **keys,
        **more,
    }


def test_the_promise_is_an_average():
    mixed = told_of("mixed", share_worse_than_local_star=0.08)
    said = verdict([told_of("local", worse=0.05), told_of(), mixed])
    assert said == (
        "Joining pays on average: 5 % of clients would have done better alone (local). Against "
        "local*, which no client could have had, joining is better on average (t = -20.0): 9 % of "
        "clients fare worse, and more budget hardly changes that: without any privacy it is 8 %."
    )
    far = told_of("mixed", share_worse_than_local_star=0.01)
    assert "and without any privacy it would be 1 %" in verdict([told_of(worse=0.4), far])
    assert "hardly" not in verdict([told_of(worse=0.4), far])
    assert "alone (local)" in verdict([told_of("local")])
    lines = list(verdicts({"pmtl": [told_of()]}))
    assert lines[1:] == ["The promise is an average over clients, not one per client."]
    lost = [told_of("local", t=5.0, worse=0.8)]
    several = list(verdicts({"pmtl": [told_of("local")], "fedavg": lost}))
    assert several[1] == (
        "fedavg: Joining did not pay on average (t = 5.0 over clients): 80 % of clients would have "
        "done better alone (local)."
    )
    assert "alone" not in verdict([told_of(t=5.0)]), "nobody alone could have had local*"
    assert several[0].startswith("pmtl: Joining pays") and len(several) == 3


def test_the_promise_is_told_where_joining_did_not_pay_too():
    for t, words in ((3.0, "did not pay"), (1.0, "no clear difference"), (-1.0, "no clear")):
        line, promise = verdicts({"pmtl": [told_of("local", t=t)]})
        assert words in line and "pays" not in line
        assert promise == "The promise is an average over clients, not one per client."
    assert verdict([]) == "" and verdict([told_of(t=None)]) == ""
    assert list(verdicts({"pmtl": [told_of(t=None)]})) == [promise]
    assert list(verdicts({"local": []})) == []


def test_a_page_shows_the_references(tmp_path):
    folders = []
    for name, method in (("one", PMTL()), ("two", FedAvg()), ("three", Local())):
        execute(replace(plan_of(), method=method), folder=tmp_path / name)
        folders.append(tmp_path / name)
    page = write_report(folders[:1], tmp_path / "one.html").read_text()
    assert "Beside learning alone, and without privacy" in page
    assert page.count(DESCRIPTIONS["local_star"]) == 1
    assert "<svg" in page and "against local*" in page
    told = read_finished(folders[:1])[0].references
    assert f"{100 * told[1]['share_worse_off']:.0f} %" in page
    several = write_report(folders, tmp_path / "all.html").read_text()
    assert several.count(DESCRIPTIONS["local_star"]) == 1
    assert several.count('<th scope="col">local*: ') == 1
    assert several.count("against local*</figcaption>") == 2
    # Folders of earlier versions have none, and are shown without.
    result = json.loads((folders[0] / "result.json").read_text())
    del result["references"], result["references_missing"]
    (folders[0] / "result.json").write_text(json.dumps(result))
    old = write_report(folders[:1], tmp_path / "old.html").read_text()
    assert "Beside learning alone" not in old


def test_a_page_opens_with_the_verdict_and_the_choice(tmp_path):
    made = execute(plan_of(chosen="pmtl, because <it> is asked for"), folder=tmp_path / "a")
    verdict = made.summary["verdict"]
    page = write_report([tmp_path / "a"], tmp_path / "a.html").read_text()
    top = page[page.index("<header") : page.index("</header>")]
    assert "Picked by auto: pmtl, because &lt;it&gt; is asked for." in top
    assert verdict["verdict"] in ("join", "small gain", "learn alone")
    assert f"the verdict was {verdict['verdict']}: " in top
    assert html.escape(verdict["words"]) in top
    assert all(html.escape(told) in top for told in verdict["remedies"])
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    (tmp_path / "a" / "result.json").write_text(json.dumps(result | {"r2": -7393.0}))
    execute(replace(plan_of(), method=FedAvg()), folder=tmp_path / "b")
    both = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text()
    top = both[both.index("<header") : both.index("</header>")]
    assert "pmtl: Picked by auto" in top
    own = pq.read_table(tmp_path / "a" / "metrics.parquet").to_pydict()["r2"]
    assert f"{np.median(own):.3g} (median)" in both and "7393" not in both
    # Folders of earlier versions say nothing of it.
    older = {key: told for key, told in result.items() if key not in ("verdict", "chosen")}
    (tmp_path / "a" / "result.json").write_text(json.dumps(older))
    assert "verdict" not in write_report([tmp_path / "a"], tmp_path / "o.html").read_text()


def test_nothing_is_told_of_nothing():
    assert Baselines({}).told(scored([1.0])) == [] and Baselines({}).local is None


