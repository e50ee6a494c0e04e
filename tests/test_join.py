"""`coterie join`: clients who come after training, from a run folder and their own rows."""

import json
import shutil

import numpy as np
import pytest
import torch

from coterie.choice import DataChoice
from coterie.cli import main
from coterie.data.synthetic import synthetic
from coterie.join import join
from coterie.methods.localsvm import joined
from coterie.run import execute, plan_from_table

METHODS = ["mtlsvm", "pmtl", "fedavg"]


def write(path, *, clients, features=4, seed=0, task="regression"):
    data = synthetic(
        "mean", clients=clients, rows=12, features=features, task=task, spread=0.2, seed=seed
    ).data
    owner = np.repeat(np.arange(clients), data.counts)
    np.savez(path, X=data.features.numpy(), y=data.targets.numpy(), client=owner)
    return str(path)


@pytest.fixture
def finished(tmp_path):
    def make(method="mtlsvm", **privacy):
        table = {
            "data": {"name": write(tmp_path / "old.npz", clients=20)},
            "method": {"kind": method},
            "privacy": privacy or {"epsilon": 4.0},
            "rounds": 3,
            "simulation_seed": 1,
        }
        table["data"]["source"] = {"task": "regression"}
        folder = tmp_path / f"run-{method}"
        return folder, execute(plan_from_table(table), folder=folder)

    return make


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_get_what_the_outcome_would_give_them(tmp_path, finished, method):
    folder, result = finished(method)
    choice = DataChoice(name=write(tmp_path / "new.npz", clients=3, seed=5), split_seed=0)
    choice = plan_from_table(
        {
            "data": {"name": choice.name, "source": {"task": "regression"}},
            "method": {"kind": "local"},
            "privacy": {"epsilon": 1.0},
        }
    ).data
    found = join(folder, choice, tmp_path / "out")
    train, _ = choice.split()
    expected = result.outcome.join(train)
    for name, leaf in expected.items():
        torch.testing.assert_close(found.models[name], leaf)
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}.npy"), leaf.numpy())
    assert json.loads((tmp_path / "out" / "clients.json").read_text()) == list(train.names)
    shared = np.load(folder / "shared.npz")
    assert set(shared.files) == set(result.outcome.shared)
    if method == "mtlsvm":
        assert joined(found.models).shape == (3, 1, 5)


def test_the_command_says_what_it_costs(tmp_path, finished, capsys):
    folder, _ = finished()
    new = write(tmp_path / "new.npz", clients=3, seed=5)
    line = f"join {folder} --data {new} --task regression --out {tmp_path / 'models'}"
    assert main([*line.split(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["newcomers"] == 3 and told["metric"] == "nmse"
    assert told["epsilon"] <= 4 and told["simulation"] is True and told["caveats"] == []
    assert main(line.split()) == 2
    assert "holds models already" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "models")
    assert main(line.split()) == 0
    assert "epsilon 0" in (said := capsys.readouterr().out) and "public at epsilon 4" in said
    assert "SIMULATION" in said


def test_what_a_mask_is_not_is_said_to_newcomers_too(tmp_path, finished, capsys):
    folder, _ = finished(epsilon=float("inf"))
    plan = folder / "plan.toml"
    result = folder / "result.json"
    stated = json.loads(result.read_text())
    stated["caveats"] = ["The mask is NOT differential privacy: nothing here is."]
    result.write_text(json.dumps(stated))
    assert plan.exists()
    new = write(tmp_path / "new.npz", clients=3, seed=5)
    assert main(f"join {folder} --data {new} --task regression --out {tmp_path / 'm'}".split()) == 0
    said = capsys.readouterr().out
    assert "NOT differential privacy" in said and "NOT PRIVATE" in said
    classes = write(tmp_path / "classes.npz", clients=3, task="binary")
    line = f"join {folder} --data {classes} --task binary --out {tmp_path / 'n'}"
    assert main(line.split()) == 2
    assert "regression task" in capsys.readouterr().err


def test_what_cannot_be_joined_is_said(tmp_path, finished, capsys):
    folder, _ = finished()
    other = write(tmp_path / "wide.npz", clients=3, features=6)
    assert (
        main(f"join {folder} --data {other} --task regression --out {tmp_path / 'm'}".split()) == 2
    )
    assert "features and classes of the training" in capsys.readouterr().err
    (folder / "shared.npz").write_bytes(b"PK")
    new = write(tmp_path / "new.npz", clients=3)
    assert main(f"join {folder} --data {new} --task regression --out {tmp_path / 'm'}".split()) == 2
    assert "no finished run" in capsys.readouterr().err
    assert main(f"join {tmp_path} --data {new} --out {tmp_path / 'm'}".split()) == 2
    assert "plan.toml" in capsys.readouterr().err
    assert main(f"join {folder} --out {tmp_path / 'm'}".split()) == 2
    assert "no data" in capsys.readouterr().err
