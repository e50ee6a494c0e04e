"""A formula from the command line to predictions, exported programs, onboarding and sites."""

import json
from dataclasses import replace

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from tests.deploy.deployed import deploy

import coterie as ct
from coterie.cli.main import main
from coterie.data.config import DataConfig
from coterie.data.effects import Effects
from coterie.engine.simulate import simulate
from coterie.estimators import CoterieClassifier, CoterieRegressor
from coterie.methods.pfeb import PFEB
from coterie.privacy.sampling import Everyone
from coterie.serve.export import load_client, read_clients

pytestmark = pytest.mark.full

FORMULA = "score ~ bs(age, 5) + sex * stay + (1 + age | hospital)"


def wards(clients=40, rows=16, seed=0, first=0):
    """Draw a table: wards differ in level and slope, and age counts along a curve."""
    draw = np.random.default_rng(seed)
    ward = np.repeat(np.arange(first, first + clients), rows)
    age = draw.uniform(20, 90, len(ward))
    stay, sex = draw.gamma(2, 3, len(ward)), draw.choice(["F", "M"], len(ward))
    z, own = (age - 55) / 35 * 3, draw.standard_normal((clients, 2))[ward - first]
    score = np.sin(z) + 0.1 * (sex == "M") * stay + 0.5 * own[:, 0] + 0.2 * own[:, 1] * z
    score = 60 + 8 * (score + 0.3 * draw.standard_normal(len(ward)))
    named = {"hospital": [f"w{one}" for one in ward], "age": age, "stay": stay, "sex": sex}
    return pd.DataFrame({**named, "note": "text", "score": score})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    place = tmp_path_factory.mktemp("wards")
    wards().to_csv(place / "wards.csv", index=False)
    flags = ["--formula", FORMULA, "--levels", "sex=F,M", "--epsilon", "2", "--quiet"]
    flags += ["--simulation-seed", "1", "--out", str(place / "run"), "--no-local"]
    for name, low, high in (("age", 20, 90), ("stay", 0, 15), ("score", 20, 100)):
        flags += ["--set", f"data.source.ranges.{name}=[{low},{high}]"]
    assert main(["run", "--data", str(place / "wards.csv"), *flags]) == 0
    return place


def test_a_formula_is_all_that_a_run_needs_to_read_a_table(ran):
    summary = json.loads((ran / "run" / "result.json").read_text())
    assert summary["data_used"]["columns"] == ["age", "sex=F", "sex=M", "stay"]
    assert summary["value"] < 0.6  # 0.3 in fact; the mean of all rows has 1


def test_predictions_are_those_of_exported_programs(ran, tmp_path, capsys):
    table = wards(seed=3)
    one = table[table.hospital == "w7"]
    one.drop(columns=["score", "note"]).to_csv(tmp_path / "w7.csv", index=False)
    out = {}
    files = {
        "safetensors": tmp_path / "w7.safetensors",
        "torch": tmp_path / "w7.pt2",
        "onnx": tmp_path / "w7.onnx",
    }
    for kind, path in files.items():
        given = ["--client", "w7", "--format", kind, "--out", str(path)]
        assert main(["export", str(ran / "run"), *given]) == 0
    for model in (ran / "run", files["safetensors"]):
        capsys.readouterr()
        assert main(["predict", str(model), "--data", str(tmp_path / "w7.csv"), "--std"]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        out[model.name] = np.array([line.split(",")[2:] for line in lines], dtype=float)
    np.testing.assert_array_equal(out["run"], out["w7.safetensors"])
    rows = np.column_stack([one.age, one.sex == "F", one.sex == "M", one.stay]).astype(np.float32)
    program = torch.export.load(files["torch"]).module()(torch.from_numpy(rows)).numpy()
    session = onnxruntime.InferenceSession(files["onnx"])
    if len(session.get_inputs()) == 1:
        found = session.run(None, {"rows": rows})[0]
        np.testing.assert_allclose(found, program, rtol=1e-4)
    np.testing.assert_allclose(program, out["run"][:, 0], rtol=1e-4)


def test_an_exported_file_knows_its_effects(ran):
    (model,) = read_clients(ran / "run", ["w3"])
    assert model.info.effects == Effects(formula=FORMULA)
    assert model.info.spec.features == 4
    assert model.params["weight"].shape == (1, 8)
    assert model.variance.shape == (9, 9)


def test_new_clients_are_onboarded_with_the_same_columns(ran, tmp_path, capsys):
    wards(clients=3, seed=5, first=100).to_csv(tmp_path / "new.csv", index=False)
    given = ["--data", str(tmp_path / "new.csv"), "--out", str(tmp_path / "new")]
    assert main(["onboard", str(ran / "run"), *given]) == 0
    assert main(["predict", str(ran / "run"), "--data", str(tmp_path / "new.csv")]) == 0
    assert "w101" in capsys.readouterr().out
    assert main(["onboard", str(ran / "run"), *given[:3], str(tmp_path / "b"), "--basis", "spline"])


def test_rows_standardised_inside_clients_are_expanded_afterwards(tmp_path, capsys):
    path = tmp_path / "wards.csv"
    wards(clients=12).to_csv(path, index=False)
    formula = "score ~ bs(age, 4) + stay + (1 | hospital)"
    flags = ["--formula", formula, "--standardise", "client", "--epsilon", "inf", "--quiet"]
    flags += ["--set", "data.source.ranges.score=[20,100]", "--out", str(tmp_path / "run")]
    assert main(["run", "--data", str(path), *flags, "--rounds", "5"]) == 0
    assert (
        main(
            [
                "export",
                str(tmp_path / "run"),
                "--client",
                "w2",
                "--out",
                str(tmp_path / "w2.safetensors"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    wards(clients=12)[lambda t: t.hospital == "w2"].to_csv(path := tmp_path / "w2.csv", index=False)
    made = []
    for model in (tmp_path / "run", tmp_path / "w2.safetensors"):
        assert main(["predict", str(model), "--data", str(path)]) == 0
        made.append(capsys.readouterr().out)
    assert made[0] == made[1]
    model = load_client(tmp_path / "w2.safetensors")
    assert model.moments[0].shape == (2,)
    assert model.params["weight"].shape == (1, 5)


@pytest.mark.parametrize("formula", ["spline", "~ bs(a, 5) + b * c + (1 | person)"])
def test_estimators_take_a_formula(formula):
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(60), 12)
    x = pd.DataFrame(draw.standard_normal((720, 3)), columns=["a", "b", "c"])
    y = np.sin(2 * x.a) + 0.4 * draw.standard_normal(60)[owner] + 0.2 * draw.standard_normal(720)
    train = np.arange(720) % 12 < 9
    given = {"epsilon": 4.0, "random_state": 0}

    def score(kind, target, **more):
        found = kind(**given, **more)
        with pytest.warns(UserWarning, match="simulation"):
            found.fit(x[train], target[train], clients=owner[train])
        return found, found.score(x[~train], target[~train], clients=owner[~train])

    plain = score(CoterieRegressor, y, method=PFEB(curves=0))[1]
    curved, value = score(CoterieRegressor, y, formula=formula)
    assert value > plain + 0.2
    values, std = curved.predict(x[~train], clients=owner[~train], return_std=True)
    assert values.shape == std.shape == (180,)
    curved.onboard(x[:12], y[:12], clients=["new"] * 12)
    assert score(CoterieClassifier, y > 0, formula=formula)[1] > 0.75


def test_frames_hold_the_client_and_the_target_of_a_formula():
    """A table as it was read gives the fit of its parts, and rows to predict need no target."""
    draw = np.random.default_rng(1)
    owner = np.array([f"H{one}" for one in np.repeat(np.arange(40), 8)])
    table = pd.DataFrame(draw.standard_normal((320, 2)), columns=["age", "stay"])
    table["hospital"], table["score"] = owner, np.sin(table.age) + 0.2 * table.stay
    given = {"epsilon": 4.0, "random_state": 0}
    formula = "score ~ bs(age, 5) + stay + (1 | hospital)"
    with pytest.warns(UserWarning, match="simulation"):
        whole = CoterieRegressor(**given, formula=formula).fit(table, table["score"])
        parts = CoterieRegressor(**given, formula=formula).fit(
            table[["age", "stay"]], table["score"], clients=owner
        )
    assert list(whole.clients_) == list(parts.clients_) and whole.n_features_in_ == 2
    new = table.drop(columns="score")
    expected = parts.predict(table[["age", "stay"]], clients=owner)
    assert (whole.predict(new) == expected).all() and (whole.predict(table) == expected).all()
    assert whole.score(table, table["score"]) > 0.8


def test_sites_make_the_columns_themselves(tmp_path):
    """A deployment with effects has the posts and models of the simulation, bit for bit."""
    made = deploy(
        tmp_path,
        clients=6,
        method=PFEB(),
        sampler=Everyone(),
        effects=Effects(basis="spline"),
        privacy=ct.Privacy(epsilon=4.0),
        rounds=3,
    )
    summary = made.coordinate()
    plan = made.agreement.plan
    train, _ = plan.data.split(made.whole)
    assert train.spec == made.agreement.spec
    assert train.spec.features > made.whole.spec.features
    told = simulate(replace(plan, data=DataConfig(name="")), train, progress=False)
    assert summary["rounds"] == 3
    with np.load(made.run / "shared.npz") as kept:
        for name, leaf in told.shared.items():
            np.testing.assert_array_equal(kept[name], leaf.numpy())
