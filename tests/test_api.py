"""One call per command: the numbers are those of the commands, and objects show themselves."""

import dataclasses
import gc
import html.parser
import json
import math
import re
import subprocess
import sys
import textwrap
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

import coterie as ct
from coterie.cli.main import main
from coterie.core.progress import Bar
from coterie.data.config import Source
from coterie.runs.budget import read_register

OPTIONS = {
    "client": "hospital",
    "target": "died",
    "features": ("age", "ward"),
    "classes": ("no", "yes"),
    "levels": {"ward": ("surgery", "oncology", "other")},
    "missing": "client-median",
    "ranges": {"age": (0.0, 120.0)},
}
HOSPITALS = 16


def patients(count=480, seed=0):
    draw = np.random.default_rng(seed)
    hospital = np.arange(count) % HOSPITALS
    age = draw.normal(60, 12, count)
    odds = (age - 60) / 6 + hospital % 3 - 1
    died = draw.random(count) < 1 / (1 + np.exp(-odds))
    return pa.table(
        {
            "patient": [f"P{at:04}" for at in range(count)],
            "hospital": [f"H{at:02}" for at in hospital],
            "age": [None if at % 9 == 0 else float(a) for at, a in enumerate(age)],
            "ward": [("surgery", "oncology", "cardiology")[at % 3] for at in range(count)],
            "died": ["yes" if one else "no" for one in died],
        }
    )


def plan_lines(table):
    source = "\n".join(
        f"{key} = {json.dumps(value)}"
        for key, value in OPTIONS.items()
        if not isinstance(value, dict)
    )
    return f"""
[data]
name = {json.dumps(str(table))}
[data.source]
{source}
levels = {{ward = ["surgery", "oncology", "other"]}}
ranges = {{age = [0.0, 120.0]}}
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run the same plan by the command and by the call, once."""
    folder = tmp_path_factory.mktemp("both")
    csv.write_csv(patients(), folder / "patients.csv")
    (folder / "plan.toml").write_text(plan_lines(folder / "patients.csv"))
    flags = ["--plan", str(folder / "plan.toml"), "--epsilon", "8", "--simulation-seed", "3"]
    assert main(["run", *flags, "--quiet", "--json", "--out", str(folder / "command")]) == 0
    run = ct.run(patients(), epsilon=8, seed=3, out=folder / "call", name="patients", **OPTIONS)
    return folder, run


# --- a run


def test_a_run_of_a_frame_makes_the_releases_of_the_command(both):
    folder, run = both
    for name in ("posts.npz", "shared.npz"):
        with np.load(folder / "command" / name) as one, np.load(folder / "call" / name) as other:
            assert one.files == other.files
            for leaf in one.files:
                assert one[leaf].tobytes() == other[leaf].tobytes()
    expected = json.loads((folder / "command" / "result.json").read_text())
    for key in ("epsilon", "delta", "value", "local_value", "rounds", "clients", "data_used"):
        assert run.summary[key] == expected[key], key
    assert run.epsilon == expected["epsilon"] and run.delta == expected["delta"]
    assert run.score == expected["value"] and run.metric == "accuracy"
    assert run.guarantee.clients == HOSPITALS


def test_predictions_are_those_of_the_command(both):
    folder, run = both
    new = patients(60, seed=9).drop_columns(["died"])
    csv.write_csv(new, folder / "new.csv")
    flags = ["--data", str(folder / "new.csv"), "--keep", "patient", "--quiet"]
    out = folder / "predicted.parquet"
    assert main(["predict", str(folder / "command"), *flags[:-1], "--out", str(out)]) == 0
    expected = pq.read_table(out)
    found = run.predict(new, keep=["patient"])
    assert isinstance(found, pa.Table) and found.equals(expected)
    assert run.predict(folder / "new.csv", keep=["patient"]).to_dict("list") == expected.to_pydict()
    data = ct.load(patients(), **OPTIONS)
    own = run.predict(data)
    assert len(own) == 480 and set(own["client"]) == set(data.names)


def test_predictions_are_of_the_kind_of_the_frame(both):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    _, run = both
    new = patients(60, seed=9)
    expected = run.predict(new, keep=["patient"])
    frame = new.to_pandas().set_index("patient")
    found = run.predict(frame)
    assert isinstance(found, pandas.DataFrame) and list(found.index) == list(frame.index)
    assert found["probability"].tolist() == expected["probability"].to_pylist()
    assert frame.join(found["prediction"]).shape == (60, 5)
    other = run.predict(polars.from_arrow(new), keep=["patient"])
    assert (
        isinstance(other, polars.DataFrame) and other.to_arrow().to_pydict() == expected.to_pydict()
    )


def test_standard_deviations_need_no_training_rows(both):
    _, run = both
    found = run.predict(patients(30, seed=9), std=True)
    assert (found["std"].to_numpy() > 0).all()
    again = ct.open_run(run.folder).predict(patients(30, seed=9), std=True)
    assert again["std"].to_pylist() == found["std"].to_pylist()


def test_quantiles_are_those_of_the_normal_distribution():
    run = ct.run("synthetic", method="pfeb", epsilon=8, seed=0, rounds=2)
    rows = run.predict("synthetic", std=True, quantiles=(0.05, 0.95))
    low, high = (rows[f"quantile_{share}"].to_numpy() for share in (0.05, 0.95))
    width = 1.6448536269514722 * rows["std"].to_numpy()
    np.testing.assert_allclose(low, rows["prediction"] - width, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(high, rows["prediction"] + width, rtol=1e-4, atol=1e-4)


def test_a_row_per_client_adds_up_to_the_result(both):
    _, run = both
    frame, stated = run.to_frame("pyarrow").to_pydict(), run.summary
    rows, error, local = (np.array(frame[n]) for n in ("test_rows", "error", "error_local"))
    assert sum(frame["train_rows"]) == stated["data_used"]["training_rows"]
    assert sum(frame["train_rows"]) + sum(rows) == stated["data_used"]["rows"] == 480
    assert 1 - (error * rows).sum() / rows.sum() == pytest.approx(stated["value"])
    assert 1 - (local * rows).sum() / rows.sum() == pytest.approx(stated["local_value"])
    assert (error < local).mean() == pytest.approx(stated["share_better_than_local"])
    assert type(run.to_frame()).__module__.startswith("pandas")
    assert run.to_frame("polars").height == HOSPITALS


def test_an_opened_run_is_the_same_object(both):
    folder, run = both
    again = ct.open_run(folder / "call")
    assert again.summary == run.summary and again.outcome is None
    assert repr(again) == repr(run) and again.guarantee == run.guarantee
    for name in ("H00", "H07"):
        for leaf, value in run.model(name).items():
            assert (again.model(name)[leaf] == value).all()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ct.open_run(folder / "nothing")
    assert again.report(folder / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_same_cell_again_releases_nothing_again(tmp_path, register):
    asked = {"epsilon": 8, "out": tmp_path / "run", "method": "pmtl", "rounds": 3, **OPTIONS}
    run = ct.run(patients(), **asked)
    before = (tmp_path / "run" / "posts.npz").read_bytes()
    assert len(read_register(register).entries) == 1
    again = ct.run(patients(), **asked)
    assert (tmp_path / "run" / "posts.npz").read_bytes() == before
    assert len(read_register(register).entries) == 1 and again.summary == run.summary
    with pytest.raises(FileExistsError, match="another plan"):
        ct.run(patients(), **{**asked, "epsilon": 2})
    with pytest.raises(ValueError, match="rows are not those"):
        ct.run(patients(seed=1), **asked)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    asked = {"epsilon": 8, "out": tmp_path / "run", "method": "pmtl", "rounds": 3, "seed": 1}

    def interrupt(*arguments, **given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("coterie.runs.run.evaluate", interrupt)
        ct.run(patients(), **asked, **OPTIONS)
    run = ct.run(patients(), **asked, **OPTIONS)
    other = ct.run(patients(), **{**asked, "out": tmp_path / "other"}, **OPTIONS)
    assert run.score == other.score and run.epsilon == other.epsilon


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*arguments, **given):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.runs.run.evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        ct.run(patients(), epsilon=8, method="pmtl", rounds=2, **OPTIONS)
    (note,) = raised.value.__notes__
    (folder,) = tmp_path.glob("runs/*")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    out = re.search(r"out='(.*)'", note)[1]
    assert (tmp_path / out) == folder
    run = ct.run(patients(), epsilon=8, method="pmtl", rounds=2, out=out, **OPTIONS)
    assert ct.verify(run) and len(list(tmp_path.glob("runs/*"))) == 1


def test_a_private_run_keeps_its_record_where_the_command_does(tmp_path, monkeypatch, register):
    monkeypatch.chdir(tmp_path)
    run = ct.run(patients(), epsilon=8, method="pmtl", rounds=2, name="patients", **OPTIONS)
    assert run.folder.parent.name == "runs" and run.folder.name.startswith("patients-pmtl-")
    (entry,) = read_register(register).entries
    assert entry.run == str(run.folder.resolve()) and ct.verify(run)
    place = run.folder
    del run
    gc.collect()
    assert ct.open_run(place).epsilon == pytest.approx(8, rel=1e-3)


def test_a_simulation_leaves_nothing(tmp_path, monkeypatch, register):
    monkeypatch.chdir(tmp_path)
    run = ct.run(patients(), epsilon=8, method="pmtl", rounds=2, seed=0, **OPTIONS)
    free = ct.run(patients(), epsilon=math.inf, method="pmtl", rounds=2, **OPTIONS)
    assert not read_register(register).entries and not list(tmp_path.iterdir())
    assert "NOT PRIVATE" in repr(free) and "SIMULATION" in repr(run)
    place = run.folder
    assert place.exists() and str(place) not in repr(run)
    del run
    gc.collect()
    assert not place.parent.exists()


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ("patients.xlsx", {}, "no such file"),
        ("districts", {"epsilonn": 1}, r"no setting 'epsilonn'; did you mean epsilon\?"),
        ("district", {}, r"no data named 'district' \(did you mean 'districts'\?\)"),
        ("districts", {"target": "math4"}, r"options of files .* do not apply"),
        ("districts", {"name": "schools"}, "these data have a name"),
        (ct.plan(clients=9, parameters=3), {}, "this plan was made of numbers"),
        ("districts", {"method": "pmlt"}, r"kind = 'pmlt' \(did you mean 'pmtl'\?\): expected one"),
        ({"a": [1]}, {}, "cannot load dict; give a path, a frame of pandas, polars or pyarrow"),
        (pa.table({"a": [1]}), {"clent": "a"}, r"no setting 'clent'; did you mean client\?"),
    ],
)
def test_wrong_calls_are_refused_in_a_line(given, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        ct.run(given, **settings)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


def test_a_dataset_that_was_read_takes_no_options_of_reading():
    data = ct.load(patients(), **OPTIONS)
    with pytest.raises(ValueError, match=r"levels: this dataset has been read already.*ct\.load"):
        ct.run(data, levels={"ward": ("surgery",)})


def test_settings_have_the_names_of_the_plan(tmp_path):
    data = ct.load(patients(), **OPTIONS)
    run = ct.run(
        data, noise_multiplier=3.0, method=ct.PMTL(lam=0.7), rounds=2, cohort=8, clip=0.5, test=3,
        seed=0, unit="one hospital", clients=12, baselines=("local", "local_star"),
    )  # fmt: skip
    plan = run.plan
    assert plan.method.lam == 0.7 and plan.rounds == 2 and plan.sampler == ct.Poisson(8)
    assert plan.privacy.clip == 0.5 and plan.privacy.noise_multiplier == 3.0
    assert plan.data.test == 3 and plan.about.unit == "one hospital"
    assert plan.data.source == Source(**OPTIONS) and plan.data.split_seed == 0
    assert (
        run.guarantee.clients == 12 and "error_local_star" in run.to_frame("pyarrow").column_names
    )
    # the plan is enough to run it again, with other settings on top
    again = ct.run(ct.plan(data, clients=12, method="pmtl", rounds=2), seed=5, epsilon=3)
    assert again.plan.privacy.epsilon == 3 and again.guarantee.clients == 12


def test_no_two_settings_share_a_name():
    from coterie.api import _PLACES, _SECTIONS

    named = [
        one.name for kind, apart in _SECTIONS.values() for one in dataclasses.fields(kind)
        if one.init and one.name not in apart
    ]  # fmt: skip
    assert len(named) == len(_PLACES) and len(_PLACES) > 60


# --- plans and proposals


@pytest.mark.parametrize(
    ("call", "flags"),
    [
        ({"clients": 550, "parameters": 10, "epsilon": 1}, "--clients 550 --parameters 10"),
        ({"clients": 99, "features": 9, "cohort": 33.0}, "--clients 99 --features 9 --cohort 33"),
        (
            {"clients": 99, "features": 9, "rows_per_client": 200},
            "--clients 99 --features 9 --rows-per-client 200",
        ),
        (
            {"clients": 80, "parameters": 5, "noise_multiplier": 4.0, "rounds": 7},
            "--clients 80 --parameters 5 --noise-multiplier 4 --rounds 7",
        ),
    ],
)  # fmt: skip
def test_a_plan_of_numbers_is_that_of_the_command(call, flags, capsys):
    assert main(["plan", *flags.split(), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    found = ct.plan(**call)
    assert json.loads(json.dumps(found.to_dict())) == expected
    assert found.verdict == expected["verdict"]
    assert len(found.to_frame("pyarrow")) == len(expected["by_epsilon"])


def test_a_plan_for_data_is_that_of_the_command(both, capsys):
    folder, _ = both
    assert main(["plan", "--plan", str(folder / "plan.toml"), "--epsilon", "2", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    found = json.loads(json.dumps(ct.plan(patients(), epsilon=2, **OPTIONS).to_dict()))
    assert {**found, "data": None} == {**expected, "data": None}
    assert ct.plan(folder / "plan.toml", epsilon=2).to_dict() == expected


def test_a_plan_needs_data_or_numbers():
    with pytest.raises(ValueError, match="give data, or numbers: clients, and parameters"):
        ct.plan(epsilon=1)
    with pytest.raises(ValueError, match="method: give data too"):
        ct.plan(clients=10, parameters=3, method="pmtl")
    assert ct.plan(clients=10, parameters=3, epsilon=math.inf).verdict is None


def test_a_proposal_is_all_that_a_run_needs():
    proposal = ct.init(patients(), client="hospital", target="died")
    assert proposal.source.accepted and "ranges of age" in " ".join(proposal.read)
    run = ct.run(patients(), source=proposal.source, epsilon=8, seed=0)
    assert set(run.guarantee.assumed) >= set(proposal.source.accepted) or any(
        "accepted as public" in note for note in run.summary["data_used"]["notes"]
    )
    assert ct.load(patients(), proposal).source == ct.load(patients(), proposal.source).source
    again = ct.run(patients(), source=proposal, epsilon=8, seed=0)
    assert again.score == run.score


# --- comparisons


COMPARED = {"methods": ["local", "pmtl"], "epsilons": [2, 8], "seeds": 2, "rounds": 2}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Compare in this process, once."""
    folder = tmp_path_factory.mktemp("compared")
    found = ct.compare(patients(), out=folder / "call", workers=0, **COMPARED, **OPTIONS)
    return folder, found


def test_a_comparison_is_that_of_the_command(compared):
    folder, found = compared
    csv.write_csv(patients(), folder / "patients.csv")
    (folder / "plan.toml").write_text("rounds = 2\n" + plan_lines(folder / "patients.csv"))
    flags = ["--plan", str(folder / "plan.toml"), "--methods", "local,pmtl", "--epsilons", "2,8"]
    flags += ["--seeds", "2", "--workers", "0", "--quiet", "--no-report", "--json"]
    assert main(["compare", *flags, "--out", str(folder / "command")]) == 0
    expected = pq.read_table(folder / "command" / "comparison.parquet").to_pydict()
    rows = found.to_frame("pyarrow").to_pydict()
    for name in expected.keys() - {"data", "seconds"}:
        np.testing.assert_equal(rows[name], expected[name], err_msg=name)
    assert len(rows["run"]) == 6 and set(rows["status"]) == {"done"}


def test_a_comparison_finds_what_its_frontier_says(compared):
    _, found = compared
    points = {(p.label, p.epsilon): p.value for p in found.found.points}
    rows = found.to_frame("pyarrow").to_pylist()
    for (label, epsilon), value in points.items():
        alike = [
            r["value"]
            for r in rows
            if r["label"] == label and r["epsilon_asked"] in (None, epsilon)
        ]
        assert value == pytest.approx(np.mean(alike))
    assert found.findings[0].startswith("At epsilon 2:") and len(found.runs) == 6
    assert "At epsilon 2" in found._repr_html_()
    assert found.plot().to_dict()["config"]["background"] == "white"  # fmt: skip


def test_a_comparison_goes_on_where_it_stopped(compared):
    folder, found = compared
    times = {p: p.stat().st_mtime_ns for p in folder.glob("call/runs/**/result.json")}
    again = ct.compare(patients(), out=folder / "call", workers=0, **COMPARED, **OPTIONS)
    assert times == {p: p.stat().st_mtime_ns for p in folder.glob("call/runs/**/result.json")}
    assert again.to_frame("pyarrow").equals(found.to_frame("pyarrow"))
    other = {**COMPARED, "epsilons": [2, 4]}
    with pytest.raises(FileExistsError, match="another comparison"):
        ct.compare(patients(), out=folder / "call", workers=0, **other, **OPTIONS)


def test_a_grid_needs_data_that_can_be_read_again():
    grid = {"grid": {"method.lam": [0.1, 1.0]}, "seeds": 1, "epsilons": [2], "methods": ["pmtl"]}
    with pytest.raises(ValueError, match="save the rows as Parquet"):
        ct.compare(patients(), workers=0, rounds=1, **grid, **OPTIONS)


@pytest.mark.full
def test_a_script_without_a_guard_compares_in_workers(tmp_path):
    parquet = tmp_path / "patients.parquet"
    pq.write_table(patients(96), parquet)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            print("begun")
            import pyarrow.parquet as pq
            import coterie as ct
            found = ct.compare(
                pq.read_table({str(parquet)!r}), methods=["pmtl"], epsilons=[8], seeds=1,
                rounds=1, workers=1, out={str(tmp_path / "out")!r}, client="hospital",
                target="died", classes=("no", "yes"), features=("age",), missing="drop",
            )
            print(set(found.to_frame("pyarrow")["status"].to_pylist()))
            import __main__
            print(__main__.__file__)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["begun", "{'done'}", str(script)]


def test_methods_are_names_objects_or_tables():
    methods = ["local", ct.PMTL(lam=1.0), {"kind": "pmtl", "label": "weak", "lam": 0.1}]
    given = {"methods": methods, "epsilons": 4, "seeds": (3,), "rounds": 1, "workers": 0}
    found = ct.compare(patients(), **given, **OPTIONS)
    rows = found.to_frame("pyarrow").to_pylist()
    assert [(row["label"], row["seed"]) for row in rows] == [("local", 3), ("pmtl", 3), ("weak", 3)]
    assert [json.loads(row["settings"]).get("lam") for row in rows] == [None, 1.0, 0.1]


class Net(torch.nn.Linear):
    """A network of this file."""

    def __init__(self, spec):
        super().__init__(spec.features, 1)


def test_a_network_is_a_class(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
    monkeypatch.setattr(Net, "__module__", "__main__")
    run = ct.run(patients(), epsilon=8, seed=0, model=Net, method="pmtl", rounds=1, **OPTIONS)
    assert run.plan.method.model.make is Net and len(run.predict(patients(20, seed=4))) == 20
    from coterie.tune.compare import _without_main, make_comparison

    table = {"data": {"name": "districts"}, "compare": {"methods": [run.plan.to_table()["method"]]}}
    assert _without_main(make_comparison(table), None) == 0


def test_methods_of_a_notebook_are_compared_in_its_process(monkeypatch):
    from coterie.methods.base import choices

    kinds = {**choices(), "mine": type("Mine", (ct.PMTL,), {"__module__": "__main__"})}
    monkeypatch.setattr("coterie.tune.compare.choices", lambda: kinds)
    from coterie.tune.compare import _without_main, make_comparison

    table = {"data": {"name": "districts"}, "compare": {"methods": ["pmtl"]}}
    assert _without_main(make_comparison(table), 3) == 3
    kinds["pmtl"] = kinds["mine"]
    assert _without_main(make_comparison(table), None) == 0
    with pytest.raises(ValueError, match="workers = 3: worker processes do not import"):
        _without_main(make_comparison(table), 3)


# --- verdicts


def test_a_verdict_is_true_only_if_all_holds(both, tmp_path):
    import shutil

    folder, run = both
    good = ct.verify(run)
    checks = good.to_frame("pyarrow").to_pylist()
    assert checks == good.to_json()["checks"] and {"name", "status"} <= checks[0].keys()
    assert good and "verified" in repr(good) and "NOT" not in repr(good)
    place = shutil.copytree(folder / "call", tmp_path / "call")
    stated = json.loads((place / "guarantee.json").read_text())
    (place / "guarantee.json").write_text(json.dumps({**stated, "epsilon": 0.1}))
    bad = ct.verify(place)
    assert not bad and "NOT VERIFIED" in repr(bad) and "FAILED" in bad._repr_html_()


# --- how objects show themselves


class Page(html.parser.HTMLParser):
    """Checks that every element is closed, and collects names and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.attributes = [], set(), []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in ("br", "img", "input", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_everything_shows_itself_shortly(both, compared):
    _, run = both
    _, comparison = compared
    data = ct.load(patients(), **OPTIONS)
    plan = ct.plan_for(data.spec, ct.Privacy(epsilon=8.0), simulation_seed=1)
    outcome = ct.simulate(plan, data)
    shown = [
        run, comparison, data, plan, outcome, ct.verify(run), run.guarantee,
        ct.plan(data, epsilon=8), ct.plan(clients=550, parameters=10),
        ct.plan(clients=9, parameters=3, epsilon=math.inf),
        ct.init(patients(), client="hospital", target="died"), ct.advise(550, 1.0, 10), run.plan,
        ct.evaluate(plan.method.model, outcome.rows, data), ct.open_named("districts"),
    ]  # fmt: skip
    for one in shown:
        assert len(repr(one)) < 300 and "\n" not in repr(one), repr(one)
        if hasattr(one, "_repr_html_"):
            page = Page(one._repr_html_())
            assert not {"script", "link", "iframe", "object", "img"} & page.names
            assert not [name for name in page.attributes if name.startswith("on") or name == "src"]


def test_a_plan_shows_counts_as_the_command_does(capsys):
    assert main(["plan", "--clients", "550", "--parameters", "10", "--no-plot"]) == 0
    printed = capsys.readouterr().out.splitlines()[-5:]
    found = ct.plan(clients=550, parameters=10)._repr_html_()
    rows = re.findall(r"<tr>((?:<td>.*?</td>)+)</tr>", found)
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [
        re.split(r"  +", line.strip()) for line in printed
    ]


def test_the_first_screen_is_that_of_the_report(both):
    folder, run = both
    found = run._repr_html_()
    texts = re.findall(r'<p class="answer">(.*?)</p>', found, re.S)
    assert len(texts) == 1 and texts[0] in run.report(folder / "page.html").read_text()
    assert "SIMULATION" in found
    rules = re.search(r"<style>(.*?)</style>", found, re.S)[1]
    heads = [one.strip() for head in re.findall(r"([^{}]+)\{", rules) for one in head.split(",")]
    assert heads and all(head.startswith(".coterie") for head in heads)


def test_names_from_data_cannot_break_out_of_html():
    evil = "<script>alert(1)</script>"
    table = patients().rename_columns(["patient", "hospital", "age", evil, "died"])
    data = ct.load(table, client="hospital", target="died", classes=("no", "yes"), missing="drop")
    proposal = ct.init(table, client="hospital", target="died")
    for one in (data, proposal, ct.plan(data, epsilon=8)):
        assert "script" not in Page(one._repr_html_()).names


@pytest.mark.parametrize("which", [None, "gains", "clients", "rounds", "privacy"])
def test_plots_are_altair_charts(both, which):
    alt = pytest.importorskip("altair")
    _, run = both
    chart = run.plot(which)
    assert isinstance(chart, alt.TopLevelMixin)
    shown = chart._repr_mimebundle_(None, None)
    assert shown["image/svg+xml"].startswith("<svg") and "<script" not in shown["image/svg+xml"]
    assert "var(--" not in json.dumps(chart.to_dict())
    with alt.renderers.enable("mimetype"):
        assert any("vegalite" in kind for kind in chart._repr_mimebundle_(None, None)[0])
    with pytest.raises(ValueError, match="plot 'gain': expected one of gains, clients"):
        run.plot("gain")


def test_a_plan_is_drawn():
    chart = ct.plan(clients=550, parameters=10, epsilon=1).plot()
    assert chart._repr_mimebundle_(None, None)["image/svg+xml"].startswith("<svg")
    with pytest.raises(ValueError, match="nothing to plot"):
        ct.plan(clients=9, parameters=3, epsilon=math.inf).plot()


def test_without_altair_all_but_charts_works(both, monkeypatch):
    _, run = both
    monkeypatch.setitem(sys.modules, "altair", None)
    assert "answer" in run._repr_html_()
    with pytest.raises(ValueError, match=r"plot needs altair.*pip install 'coterie\[report\]'"):
        run.plot()


# --- progress


def test_nobody_watches_a_test(capsys):
    data = ct.load(patients(), **OPTIONS)
    ct.run(data, epsilon=8, method="pmtl", rounds=2, seed=0)
    ct.simulate(ct.plan_for(data.spec, ct.Privacy(epsilon=8.0), simulation_seed=0), data)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_on_stderr(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, stderr is a terminal then
    ct.run(patients(), epsilon=8, method="pmtl", rounds=3, seed=0, progress=True, **OPTIONS)
    out, err = capsys.readouterr()
    assert not out and "3/3" in err and "scoring" in err


def test_a_notebook_gets_a_bar_that_goes_away(monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=lambda found, **more: shown.append(found))
    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda *given, **more: handle
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with Bar("<training>") as bar:
        for done in range(4):
            bar.update(done, 3)
    assert 'value="0" max="3"' in shown[0] and 'value="3" max="3"' in shown[-2]
    assert "&lt;training&gt;" in shown[0] and not any(shown[-1].values())
    ipython.get_ipython = lambda: None  # a plain interpreter with IPython installed
    with Bar("training") as bar:
        assert not bar.shown


def test_short_work_shows_no_bar(capsys):
    with Bar("fast", show=True, patience=5.0) as bar:
        bar.update(1, 2)
    assert capsys.readouterr() == ("", "")


def test_importing_the_package_does_not_load_the_calls():
    code = "import coterie, sys; assert not {'coterie.api', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
