"""Exported models: one client's own, equal to the run's, wherever they are loaded."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from scipy.stats import binom, norm
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import StandardScaler
from torch import nn

from coterie.cli.main import main
from coterie.cli.options import check_file
from coterie.evaluation.predict import decision_function
from coterie.planning.plan import Plan
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.guarantee import Guarantee
from coterie.runs.run import execute
from coterie.runs.summary import promised
from coterie.serve.export import (
    Predictor,
    all_clients,
    file_name,
    file_names,
    load_client,
    metadata,
    read_clients,
    save_client,
    save_onnx,
    save_torch,
)

pytestmark = pytest.mark.full

CLIENTS, ROWS = 6, 14


class Small(nn.Module):
    """A user's module with a constant that no tree holds, and a layer that drops."""

    def __init__(self, spec):
        super().__init__()
        self.first = nn.Linear(spec.features, 5)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(5, spec.outputs)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x.flatten(1)) + self.shift)))


def table(data, method="local", model=None, **more):
    made = {"kind": method, **({} if model is None else {"model": model})}
    return {
        "data": data,
        "method": made,
        "privacy": {"epsilon": math.inf},
        "simulation_seed": 3,
        "compare_with_local": False,
        **more,
    }


def write_csv(path, *, classes=None, seed=0):
    """Write clients with unlike units, a column of levels and a target in its own units."""
    draw = np.random.default_rng(seed)
    lines = ["school,age,kind,score,out"]
    for client in range(CLIENTS):
        for _ in range(ROWS):
            age, kind, score = draw.normal(40, 9), draw.integers(2), draw.normal(client, 1 + client)
            value = 50 + 0.8 * age + 5 * kind + score + draw.normal()
            out = f"{value:.5f}" if classes is None else classes[int(value) % len(classes)]
            lines.append(f"s{client},{age:.5f},{('day', 'night')[kind]},{score:.5f},{out}")
    path.write_text("\n".join(lines) + "\n")
    return path


def source(**more):
    return {"client": "school", "target": "out", "levels": {"kind": ["day", "night"]}, **more}


CONSTANTS = {
    "task": "regression",
    "center": {"age": 40.0, "out": 90.0},
    "scale": {"age": 10.0, "score": 4.0, "out": 12.0},
    "clip": 3.0,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make one small run of each sort of model: (folder, outcome, all rows as they were read)."""
    root = tmp_path_factory.mktemp("export")
    number, named = write_csv(root / "n.csv"), write_csv(root / "c.csv", classes=("a", "b", "c"))
    images = np.random.default_rng(1)
    np.savez(
        root / "images.npz",
        X=images.normal(size=(40, 8, 8)).astype(np.float32),
        y=images.integers(0, 2, 40),
        client=np.repeat(["c0", "c1", "c2", "c3"], 10),
    )
    kinds = {
        "linear": table(
            {"name": str(number), "source": source(**CONSTANTS, features=["age", "kind", "score"])}
        ),
        "scaled": table(
            {
                "name": str(named),
                "source": source(classes=["a", "b", "c"], features=["age", "kind", "score"]),
                "standardise": "client",
            },
            model={"kind": "mlp", "hidden": [4]},
        ),
        "cnn": table(
            {"name": str(root / "images.npz")}, model={"kind": "cnn", "channels": [3], "kernel": 3}
        ),
        "module": table(
            {"name": str(number), "source": source(**CONSTANTS)},
            method="fedavg",
            model={"kind": "module", "make": f"{__name__}:Small"},
            rounds=2,
        ),
    }
    made = {}
    for kind, plan in kinds.items():
        run_plan = Plan.from_table(plan)
        result = execute(run_plan, folder=root / kind)
        made[kind] = root / kind, result.outcome, run_plan.data
    return made


KINDS = ("linear", "scaled", "cnn", "module")


def raw_rows(choice, client):
    """Return a client's rows before any constant, in the order of the features that are read."""
    data = type(choice)(
        name=choice.name,
        source=type(choice.source)(
            **{**vars(choice.source), "center": {}, "scale": {}, "clip": None}
        ),
    ).open()
    at = list(data.names).index(client)
    return data.features[int(data.offsets[at]) : int(data.offsets[at + 1])]


def outputs_of(outcome, choice, client):
    """Return what the library says of the same rows, by the run in memory."""
    if choice.standardise == "client":
        train, test = choice.split()
        parts = [(train, True), (test, False)]
    else:
        parts = [(choice.open(), True)]
    at = list(parts[0][0].names).index(client)
    return [decision_function(outcome, part)[at] for part, _ in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(runs, tmp_path, kind):
    folder, outcome, _ = runs[kind]
    name = all_clients(folder)[2]
    (given,) = read_clients(folder, [name], trust=True)
    save_client(tmp_path / "m.safetensors", given)
    if kind == "module":
        with pytest.raises(ValueError, match="trust"):
            load_client(tmp_path / "m.safetensors")
    found = load_client(tmp_path / "m.safetensors", trust=True)
    assert found.client == name and found.info == given.info
    wanted = outcome.model(2)
    assert list(found.params) == list(wanted)
    for leaf in wanted:
        torch.testing.assert_close(found.params[leaf], wanted[leaf], rtol=0, atol=0)


def fed(session, rows):
    """Return the inputs of a program: rows, or the columns age, kind (text) and score."""
    if [one.name for one in session.get_inputs()] == ["rows"]:
        return {"rows": rows.numpy()}
    age, day, _, score = rows.double().numpy().T[:, :, None]
    kind = np.where(day == 1, "day", "night").astype(object)
    return {"age": age, "kind": kind, "score": score}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_agree_with_the_run(runs, tmp_path, kind):
    folder, outcome, choice = runs[kind]
    name = all_clients(folder)[1]
    (model,) = read_clients(folder, [name], trust=True)
    save_torch(tmp_path / "m.pt2", model)
    save_onnx(tmp_path / "m.onnx", model)
    rows = raw_rows(choice, name)
    told = {"coterie.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=told).module()
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    with torch.no_grad():
        here, there = Predictor(model).eval()(rows), program(rows)
    graph = session.run(["outputs"], fed(session, rows))[0]
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(graph, here, rtol=1e-4, atol=1e-4)
    assert json.loads(told["coterie.json"])["client"] == name
    assert session.get_modelmeta().custom_metadata_map["client"] == name
    # one row, and many: the number of rows is free
    assert session.run(["outputs"], fed(session, rows[:1]))[0].shape[0] == 1
    wanted = outputs_of(outcome, choice, name)
    if kind in ("linear", "module"):
        np.testing.assert_allclose(here, 90 + 12 * wanted[0], rtol=1e-4, atol=1e-4)
    elif kind == "cnn":
        np.testing.assert_allclose(here, wanted[0], rtol=1e-4, atol=1e-4)
    else:
        # standardised parts are split: compare them as sets of rows
        both = np.sort(np.concatenate(wanted), axis=0)
        np.testing.assert_allclose(np.sort(here.numpy(), axis=0), both, rtol=1e-4, atol=1e-4)


def write_stays(path):
    """Write clients with text, gaps, dates and a class by name."""
    draw = np.random.default_rng(4)
    lines = ["ward,age,kind,day,result"]
    for client in range(CLIENTS):
        for row in range(ROWS):
            age = "" if row % 5 == 1 else f"{draw.normal(60, 15):.1f}"
            kind = draw.choice(["acute", "planned", "", "new"])
            day = draw.choice(["03.02.2024", "2024-07-28", "NA", "31.02.2024"])
            lines.append(f"w{client},{age},{kind},{day},{draw.choice(['bad', 'good'])}")
    path.write_text("\n".join(lines) + "\n")
    return path


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_an_onnx_program_takes_the_columns_of_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = write_stays(tmp_path / "stays.csv")
    source = {
        "client": "ward",
        "target": "result",
        "task": "binary",
        "classes": ["bad", "good"],
        "features": ["age", "kind", "day"],
        "levels": {"kind": ["acute", "planned", "other"]},
        "dates": {"day": "2024-01-01 %d.%m.%Y"},
        "ranges": {"age": [20, 100], "day.days": [0, 366]},
        "clip": 3.0,
        "missing": "client-median",
        "indicators": ["age"],
        "gaps": {"day": ["31.02.2024"]},
    }
    execute(Plan.from_table(table({"name": str(file), "source": source})), folder=tmp_path / "run")
    assert main(["predict", "run", "--data", "stays.csv", "--out", "all.csv"]) == 0
    assert main(["export", "run", "--client", "w3", "--format", "onnx", "--out", "w3.onnx"]) == 0
    capsys.readouterr()
    rows, predicted = (read_csv(one) for one in (file, Path("all.csv")))
    own = [at for at, row in enumerate(rows) if row["ward"] == "w3"]
    columns = {name: np.array([[rows[at][name]] for at in own], object) for name in rows[0]}
    age = np.array([[float(value or "nan")] for (value,) in columns["age"]])
    session = onnxruntime.InferenceSession(tmp_path / "w3.onnx")
    assert [one.name for one in session.get_inputs()] == ["age", "kind", "day"]
    given = {"age": age, "kind": columns["kind"], "day": columns["day"]}
    prediction, probability = session.run(["prediction", "probability"], given)
    assert prediction.tolist() == [predicted[at]["prediction"] for at in own]
    wanted = [float(predicted[at]["probability"]) for at in own]
    np.testing.assert_allclose(probability, wanted, rtol=1e-5)
    assert len(set(wanted)) > ROWS / 2
    inputs = json.loads(session.get_modelmeta().custom_metadata_map["inputs"])
    assert [one["kind"] for one in inputs] == ["number", "category", "date"]


def test_programs_divide_rows_by_their_norms_where_the_run_did(runs):
    folder, _, choice = runs["linear"]
    (model,) = read_clients(folder, ["s3"])
    info = replace(model.info, source=replace(model.info.source, unit_rows=True))
    rows = raw_rows(choice, "s3").numpy().astype(np.float64)  # age, day, night, score
    x = np.clip((rows - [40, 0, 0, 0]) / [10, 1, 1, 4], -3, 3)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    wanted = x @ model.params["weight"][0].numpy() + model.params["bias"][0].numpy()
    with torch.no_grad():
        found = Predictor(replace(model, info=info)).eval()(raw_rows(choice, "s3"))
    np.testing.assert_allclose(found, 90 + 12 * wanted, rtol=1e-4)


def test_a_linear_model_is_that_of_scikit_learn(runs, tmp_path):
    folder, _, choice = runs["linear"]
    (model,) = read_clients(folder, ["s3"])
    save_client(tmp_path / "m.safetensors", model)
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        weight, bias = file.get_tensor("model.weight"), file.get_tensor("model.bias")
    by_hand = LinearRegression()
    by_hand.coef_, by_hand.intercept_ = weight[0], bias[0]
    rows = raw_rows(choice, "s3").numpy().astype(np.float64)  # age, day, night, score
    x = np.clip((rows - [40, 0, 0, 0]) / [10, 1, 1, 4], -3, 3)
    with torch.no_grad():
        found = Predictor(model).eval()(raw_rows(choice, "s3"))
    np.testing.assert_allclose(found, 90 + 12 * by_hand.predict(x), rtol=1e-4)


def test_own_means_and_deviations_are_those_of_its_training_rows(runs):
    folder, _, choice = runs["scaled"]
    plain = type(choice)(name=choice.name, source=choice.source).split()[0]
    for name, model in zip(
        ("s0", "s4"), read_clients(folder, ["s0", "s4"], trust=True), strict=True
    ):
        at = list(plain.names).index(name)
        rows = plain.features[int(plain.offsets[at]) : int(plain.offsets[at + 1])].numpy()
        scaler = StandardScaler().fit(rows.astype(np.float64))
        center, scale = model.moments
        np.testing.assert_allclose(center, scaler.mean_, rtol=1e-6)
        varies = scaler.var_ > 0
        np.testing.assert_allclose(scale[varies], np.sqrt(scaler.var_[varies]), rtol=1e-6)
        assert np.isinf(scale[~varies]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_others_is_in_the_file(runs, tmp_path, kind):
    folder, outcome, _ = runs[kind]
    names = all_clients(folder)
    save_client(tmp_path / "m.safetensors", read_clients(folder, names[:1], trust=True)[0])
    content = (tmp_path / "m.safetensors").read_bytes()
    own = {leaf.numpy().tobytes() for leaf in outcome.model(0).values()}
    for other in range(1, len(names)):
        for leaf in outcome.model(other).values():
            row = leaf.contiguous().numpy().tobytes()
            assert row in own or row not in content
        assert f'"{names[other]}"'.encode() not in content
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        told = file.metadata()
        found = {name.removeprefix("model.") for name in file.keys()}  # noqa: SIM118
    scaling = {"scaling.center", "scaling.scale"} if kind == "scaled" else set()
    assert found == set(outcome.models.leaves) | scaling
    assert str(folder) not in str(told) and str(folder.parent) not in str(told)
    assert told["epsilon"] == ("inf" if kind == "module" else "0.0")  # alone, nothing is posted
    assert 0 < float(told["delta"]) < 1
    assert json.loads(told["guarantee"])["simulation"] is True


def test_a_client_reads_the_epsilon_of_clients_not_of_outsiders(runs):
    """Whoever holds the file was invited: a hidden cohort of fixed size does not hide from it."""
    guarantee = Guarantee(
        (Gaussian(3.0),) * 5, Participation("fixed", 0.2), "replace", 1e-5, CLIENTS
    )
    (model,) = read_clients(runs["linear"][0], all_clients(runs["linear"][0])[:1])
    told = metadata(replace(model, info=replace(model.info, guarantee=promised(guarantee))))
    # Drawn n times of 5, known to all: a mixture of Gaussian DP with mu = 2 sqrt(n) / 3.
    epsilon, delta = float(told["epsilon"]), 0.0
    for n in range(1, 6):
        mu = 2 * math.sqrt(n) / 3
        miss = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        delta += binom.pmf(n, 5, 0.2) * miss
    assert delta == pytest.approx(1e-5, rel=1e-4) and epsilon == guarantee.epsilon
    assert epsilon > 1.5 * guarantee.views["outsider"]
    assert told["view"] == "other clients"
    poisson = replace(guarantee, participation=Participation("poisson", 0.2), relation="zero_out")
    told = metadata(replace(model, info=replace(model.info, guarantee=promised(poisson))))
    assert (float(told["epsilon"]), told["view"]) == (poisson.epsilon, "other clients")


def test_gone_or_changed_rows_do_not_matter_since_scaling_is_kept(tmp_path):
    path = write_csv(tmp_path / "gone.csv")
    plan = table({"name": str(path), "source": source(**CONSTANTS), "standardise": "client"})
    folder = tmp_path / "run"
    execute(Plan.from_table(plan), folder=folder)
    (before,) = read_clients(folder, ["s1"])
    write_csv(path, seed=5)
    (after,) = read_clients(folder, ["s1"])
    assert all(np.array_equal(*pair) for pair in zip(before.moments, after.moments, strict=True))
    (folder / "models" / "scaling.npz").unlink()
    with pytest.raises(ValueError, match="not those the run was started with"):
        read_clients(folder, ["s1"])
    path.unlink()
    with pytest.raises(ValueError, match=r"training rows are needed.*gone\.csv"):
        read_clients(folder, ["s1"])


@pytest.mark.parametrize(
    ("name", "found"), [("a/b", "a%2Fb.onnx"), ("..", "%2E%2E.onnx"), ("é x", "%C3%A9 x.onnx")]
)
def test_any_name_makes_a_file_name(name, found):
    assert file_name(name, ".onnx") == found
    assert Path(found).name == found


def test_a_run_that_was_interrupted_is_named_plainly(tmp_path, runs, capsys):
    folder = tmp_path / "run"
    shutil.copytree(runs["linear"][0], folder, ignore=shutil.ignore_patterns("guarantee.json"))
    assert main(["export", str(folder), "--client", "s1"]) == 2
    told = capsys.readouterr().err
    assert "no finished run (no guarantee.json)" in told and "Errno" not in told


def test_the_command_writes_one_file_or_one_a_client(runs, tmp_path, capsys, monkeypatch):
    folder, _, _ = runs["linear"]
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(folder), "--client", "s2"]) == 0
    assert load_client(tmp_path / "s2.safetensors").client == "s2"
    assert main(["export", str(folder), "--all", "out", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {entry["client"] for entry in told["files"]} == set(all_clients(folder))
    for entry in told["files"]:
        assert load_client(Path(entry["file"])).client == entry["client"]
    for given, said in (
        (["--client", "s22"], "nearest are 's2'"),
        (["--client", "s2", "--out", "nowhere/m.pt2"], "no such folder"),
        (["--all", "out", "--out", "x"], "one of them"),
    ):
        assert main(["export", str(folder), *given]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_names_that_differ_in_capitals_have_files_that_differ_in_more():
    names = ["Ward 1", "ward 1", "WARD 1", "Ward 2", "%57ard 1", "É", "é", "a/B", "A/b"]
    found = file_names(names, ".pt2")
    assert len({name.lower() for name in found}) == len(names)
    assert [unquote(name.removesuffix(".pt2")) for name in found] == names
    assert found[3] == "Ward 2.pt2", "only where it is needed"


def test_the_command_tells_capitals_apart(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    names = np.repeat(["Ward 1", "ward 1"], 10)
    np.savez(tmp_path / "r.npz", X=draw.normal(size=(20, 2)), y=draw.normal(size=20), client=names)
    data = {"name": str(tmp_path / "r.npz"), "source": {"task": "regression"}}
    execute(Plan.from_table(table(data)), folder=tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--all", str(tmp_path / "all")]) == 0
    files = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert files == ["%57ard 1.safetensors", "ward 1.safetensors"]
    for file, name in zip(files, ("Ward 1", "ward 1"), strict=True):
        assert load_client(tmp_path / "all" / file).client == name
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "--client", "Ward 1"]) == 0
    assert load_client(tmp_path / files[0]).client == "Ward 1"


def test_a_folder_that_is_not_there_is_said_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (
        "export nothere --all out",
        "export nothere --client a",
        "export nothere --client a --out b.safetensors",
        "report nothere",
        "join nothere --data districts --out m",
        "run --resume nothere",
    ):
        assert main(line.split()) == 2
        err = capsys.readouterr().err
        assert "nothere: no such folder" in err and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_export_is_refused(tmp_path, runs, capsys):
    (tmp_path / "odd.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_client(tmp_path / "odd.safetensors")
    folder, _, _ = runs["linear"]
    with pytest.raises(ValueError, match="coterie export"):
        load_client(folder / "models" / "clients.safetensors")
    assert main(["export", str(tmp_path), "--client", "a"]) == 2
    assert "expected a run folder" in capsys.readouterr().err


def test_onnx_names_the_extra_where_it_is_missing(runs, tmp_path, monkeypatch):
    folder, _, _ = runs["linear"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"coterie\[onnx\]"):
        save_onnx(tmp_path / "m.onnx", read_clients(folder, ["s0"])[0])


def test_a_name_too_long_for_a_file_is_cut_and_hashed():
    first, second = "s" * 300 + "1", "s" * 300 + "2"
    names = file_names([first, second, "s3"], ".safetensors")
    assert len(set(names)) == 3 and all(len(name) <= 200 for name in names)
    assert names == file_names([first, second, "s3"], ".safetensors")


def test_a_folder_where_a_file_is_meant(tmp_path):
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        check_file(tmp_path, "--out")
    with pytest.raises(ValueError, match="no such folder"):
        check_file(tmp_path / "nowhere" / "model.onnx", "--out")
