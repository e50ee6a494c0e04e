"""Common curves from the command line to predictions, exported programs, onboarding and sites."""

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
from coterie.data.synthetic import mixed
from coterie.engine.simulate import simulate
from coterie.estimators import CoterieRegressor
from coterie.methods.pfeb import PFEB
from coterie.models import Additive
from coterie.privacy.sampling import Everyone

pytestmark = pytest.mark.full


def table(clients=120, seed=0):
    data = mixed("nonlinear", clients=clients, seed=seed).data
    named = {f"x{at}": data.features[:, at].numpy() for at in range(6)}
    return pd.DataFrame(
        {"client": [f"c{one}" for one in data.owners], **named, "y": data.targets.numpy()}
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    place = tmp_path_factory.mktemp("curves")
    table().to_csv(place / "rows.csv", index=False)
    flags = ["--client-column", "client", "--target", "y", "--task", "regression", "--quiet"]
    flags += ["--epsilon", "4", "--simulation-seed", "1", "--out", str(place / "run")]
    assert main(["run", "--data", str(place / "rows.csv"), *flags]) == 0
    return place


def test_a_run_with_all_defaults_earns_its_curves(ran):
    summary = json.loads((ran / "run" / "result.json").read_text())
    (local,) = (one for one in summary["references"] if one["name"] == "local")
    assert summary["value"] < 0.3 and local["value"] > 0.9, "the baseline is linear"
    assert summary["epsilon"] == pytest.approx(4.0)
    assert main(["verify", str(ran / "run")]) == 0


def test_predictions_are_those_of_exported_programs(ran, tmp_path, capsys):
    one = table()[lambda t: t.client == "c7"]
    one.drop(columns="y").to_csv(tmp_path / "c7.csv", index=False)
    files = {
        kind: tmp_path / f"c7.{suffix}"
        for kind, suffix in (("safetensors", "safetensors"), ("torch", "pt2"), ("onnx", "onnx"))
    }
    for kind, path in files.items():
        given = ["--client", "c7", "--format", kind, "--out", str(path)]
        assert main(["export", str(ran / "run"), *given]) == 0
    out = []
    for model in (ran / "run", files["safetensors"]):
        capsys.readouterr()
        assert main(["predict", str(model), "--data", str(tmp_path / "c7.csv"), "--std"]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        out.append(np.array([line.split(",")[2:] for line in lines], dtype=float))
    np.testing.assert_array_equal(out[0], out[1])
    rows = one[[f"x{at}" for at in range(6)]].to_numpy(np.float32).copy()
    program = torch.export.load(files["torch"]).module()(torch.from_numpy(rows)).numpy()
    session = onnxruntime.InferenceSession(files["onnx"])
    found = session.run(["outputs"], {session.get_inputs()[0].name: rows})[0]
    np.testing.assert_allclose(found, program, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(program, out[0][:, 0], rtol=1e-3, atol=1e-5)


def test_new_clients_have_the_same_curves(ran, tmp_path, capsys):
    new = table(clients=3, seed=5)
    new["client"] = "new" + new["client"]
    new.to_csv(tmp_path / "new.csv", index=False)
    given = ["--data", str(tmp_path / "new.csv"), "--out", str(tmp_path / "new")]
    assert main(["onboard", str(ran / "run"), *given]) == 0
    capsys.readouterr()
    assert main(["predict", str(ran / "run"), "--data", str(tmp_path / "new.csv")]) == 0
    lines = [line.split(",") for line in capsys.readouterr().out.splitlines()[1:]]
    away = np.array([float(line[2]) for line in lines]) - new.y.to_numpy()
    assert (away**2).mean() < 0.35 * new.y.var()


def test_sites_search_as_simulations_do(tmp_path):
    """A deployment has the releases and the state of the simulation, bit for bit."""
    made = deploy(
        tmp_path,
        clients=6,
        method=PFEB(curves=2),
        sampler=Everyone(),
        privacy=ct.Privacy(epsilon=4.0),
        rounds=5,
    )
    summary = made.coordinate()
    plan = made.agreement.plan
    train, _ = plan.data.split(made.whole)
    told = simulate(replace(plan, data=DataConfig(name="")), train, progress=False)
    assert summary["rounds"] == 5 and plan.method.model == Additive()
    with np.load(made.run / "shared.npz") as kept:
        for name, leaf in told.shared.items():
            np.testing.assert_array_equal(kept[name], leaf.numpy())


def test_estimators_earn_their_curves():
    rows = table(clients=200)
    x, owner = rows[[f"x{at}" for at in range(6)]].to_numpy(), rows.client.to_numpy()
    with pytest.warns(UserWarning, match="simulation"):
        found = CoterieRegressor(epsilon=4.0, random_state=0).fit(x, rows.y, clients=owner)
    assert found.score(x, rows.y, clients=owner) > 0.8
