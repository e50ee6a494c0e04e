"""`coterie onboard`: models of new clients from a run folder and their own rows."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv
from sklearn.preprocessing import StandardScaler

from coterie.cli.main import main
from coterie.core.tree import take
from coterie.data.config import DataConfig, Source
from coterie.data.federated import DataError
from coterie.data.synthetic import synthetic
from coterie.engine.models import stacked_models
from coterie.engine.simulate import check_onboard, simulate
from coterie.evaluation.baselines import score_local
from coterie.evaluation.holdout import hold_out, score_held_out
from coterie.evaluation.score import evaluate
from coterie.methods.base import Shape, registered
from coterie.methods.baselines import Local
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.methods.svm import joined
from coterie.planning.plan import Plan, Privacy
from coterie.report.tables import Entry, held_out_table
from coterie.runs.run import execute
from coterie.serve.onboard import choose, onboard

ROWS, POOLED = Shape.ROWS, Shape.POOLED
METHODS = ["mtlsvm", "pmtl", "fedavg"]
WITH_SHARED_MODEL = [
    kind for kind, method in registered().items() if method().shape not in (ROWS, POOLED)
]


def write(path, *, clients, features=4, seed=0, task="regression", names=None):
    data = synthetic(
        "mean", clients=clients, rows=12, features=features, task=task, spread=0.2, seed=seed
    ).data
    owner = np.repeat(np.arange(clients), data.counts)
    if names is not None:
        owner = np.array([names.format(number) for number in owner])
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
        return folder, execute(Plan.from_table(table), folder=folder)

    return make


@pytest.mark.parametrize("method", METHODS)
def test_new_clients_get_the_models_of_the_outcome(tmp_path, finished, method):
    folder, result = finished(method)
    choice = DataConfig(name=write(tmp_path / "new.npz", clients=3, seed=5), split_seed=0)
    choice = Plan.from_table(
        {
            "data": {"name": choice.name, "source": {"task": "regression"}},
            "method": {"kind": "local"},
            "privacy": {"epsilon": 1.0},
        }
    ).data
    found = onboard(folder, choice, tmp_path / "out")
    train, _ = choice.split()
    expected = result.outcome.onboard(train)
    for name, leaf in expected.items():
        torch.testing.assert_close(found.models[name], leaf)
        torch.testing.assert_close(stacked_models(tmp_path, "out")[name], leaf)
    assert json.loads((tmp_path / "out" / "clients.json").read_text()) == list(train.names)
    shared = np.load(folder / "shared.npz")
    assert set(shared.files) == set(result.outcome.shared)
    if method == "mtlsvm":
        assert joined(found.models).shape == (3, 1, 5)


def test_the_command_states_the_privacy_cost(tmp_path, finished, capsys):
    folder, _ = finished()
    new = write(tmp_path / "new.npz", clients=3, seed=5, names="new {}")
    line = f"onboard {folder} --data {new} --task regression --out {tmp_path / 'models'}"
    assert main([*line.split(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clients"] == 3 and told["metric"] == "nmse" and told["took_part"] == 0
    assert told["epsilon"] <= 4 and told["simulation"] is True and told["caveats"] == []
    assert main(line.split()) == 2
    assert "already holds models" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "models")
    assert main(line.split()) == 0
    assert (
        "epsilon 0" in (said := capsys.readouterr().out) and "clients of the run epsilon 4" in said
    )
    assert "SIMULATION" in said


def test_caveats_of_the_run_are_stated(tmp_path, finished, capsys):
    folder, _ = finished(epsilon=float("inf"))
    plan = folder / "plan.toml"
    result = folder / "result.json"
    stated = json.loads(result.read_text())
    stated["caveats"] = ["The mask is NOT differential privacy: nothing here is."]
    result.write_text(json.dumps(stated))
    assert plan.exists()
    new = write(tmp_path / "new.npz", clients=3, seed=5)
    assert (
        main(f"onboard {folder} --data {new} --task regression --out {tmp_path / 'm'}".split()) == 0
    )
    said = capsys.readouterr().out
    assert "NOT differential privacy" in said and "NOT PRIVATE" in said
    classes = write(tmp_path / "classes.npz", clients=3, task="binary")
    line = f"onboard {folder} --data {classes} --task binary --out {tmp_path / 'n'}"
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert "data.source.task" in err and "'regression'" in err and "'binary'" in err
    rows = dict(np.load(classes))
    np.savez(classes, **{**rows, "y": rows["y"].astype(int)})
    with pytest.raises(ValueError, match="regression task, but the new clients' rows are binary"):
        onboard(folder, DataConfig(name=classes))


def test_unusable_rows_and_runs_are_refused(tmp_path, finished, capsys):
    folder, _ = finished()
    other = write(tmp_path / "wide.npz", clients=3, features=6)
    assert (
        main(f"onboard {folder} --data {other} --task regression --out {tmp_path / 'm'}".split())
        == 2
    )
    assert "features and classes of the training" in capsys.readouterr().err
    (folder / "shared.npz").write_bytes(b"PK")
    new = write(tmp_path / "new.npz", clients=3)
    assert (
        main(f"onboard {folder} --data {new} --task regression --out {tmp_path / 'm'}".split()) == 2
    )
    assert "no finished run" in capsys.readouterr().err
    assert main(f"onboard {tmp_path} --data {new} --out {tmp_path / 'm'}".split()) == 2
    assert "plan.toml" in capsys.readouterr().err
    assert main(f"onboard {folder} --out {tmp_path / 'm'}".split()) == 2
    assert "no data" in capsys.readouterr().err


# --- rows are read and scaled as the training's were


def table_file(path, *, clients, seed, names="n{}", order=("a", "b", "note", "score")):
    """Write rows whose features are far from unit size, and other in every client."""
    draw = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), 16)
    x = draw.normal(size=(len(client), 2))
    y = x @ [1.0, -2.0] + 0.1 * draw.normal(size=len(client))
    a, b = (x * [20.0, 3.0] + 40 * (client[:, None] + 1)).T
    columns = {"a": a, "b": b, "note": draw.normal(size=len(client)), "score": y}
    ids = pa.array([names.format(number) for number in client])
    kept = {name: columns[name] for name in order}
    csv.write_csv(pa.table({"ward": ids, **kept}), path)
    return str(path)


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("wards")
    source = {"client": "ward", "target": "score", "task": "regression"}
    source["features"] = ["a", "b"]
    train = table_file(tmp_path / "train.csv", clients=8, seed=0, names="w{}")
    plan = {
        "data": {"name": train, "source": source, "standardise": "client"},
        "method": {"kind": "fedavg"},
        "privacy": {"epsilon": math.inf},
        "rounds": 3,
        "simulation_seed": 1,
    }
    folder = tmp_path / "wards"
    execute(Plan.from_table(plan), folder=folder)
    return folder


def test_rows_are_read_and_scaled_as_in_training(tmp_path, wards, capsys):
    """No flag is repeated, and the score is that of rows scaled by hand by own training rows."""
    new = table_file(tmp_path / "new.csv", clients=4, seed=7)
    assert main(f"onboard {wards} --data {new} --out {tmp_path / 'm'} --json".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clients"] == 4 and told["took_part"] == 0
    source = Source(client="ward", target="score", task="regression", features=("a", "b"))
    train, test = DataConfig(name=new, source=source).split()
    with np.load(wards / "shared.npz") as arrays:
        weight, bias = arrays["weight"].reshape(-1), float(arrays["bias"].reshape(-1)[0])
    errors, around = 0.0, 0.0
    for number in range(4):
        (x, _), (held, y) = (
            (part.features[rows].double().numpy(), part.targets[rows].double().numpy())
            for part in (train, test)
            for rows in [slice(part.offsets[number], part.offsets[number + 1])]
        )
        scaled = StandardScaler().fit(x).transform(held)
        errors += ((scaled @ weight + bias - y) ** 2).sum()
        around += len(y)
    variance = float(test.targets.double().var(correction=0))
    assert told["value"] == pytest.approx(errors / around / variance, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--standardise none", ["data.standardise", "'client'", "'none'"]),
        ("--features b,a", ["data.source.features", "['a', 'b']"]),
        ("--task binary", ["data.source.task", "'regression'"]),
        ("--positive 3 --task binary", ["data.source.positive"]),
    ],
)
def test_rows_that_would_be_read_otherwise_are_refused(tmp_path, wards, capsys, flags, said):
    new = table_file(tmp_path / "new.csv", clients=3, seed=7)
    assert main(f"onboard {wards} --data {new} {flags} --out {tmp_path / 'm'}".split()) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in said) and err.count("\n") == 1, err
    assert not (tmp_path / "m").exists()


def test_python_callers_are_refused_too(tmp_path, wards):
    new = table_file(tmp_path / "new.csv", clients=3, seed=7)
    source = Source(client="ward", target="score", task="regression", features=("a", "b"))
    with pytest.raises(ValueError, match=r"data\.standardise: .* 'client'"):
        onboard(wards, DataConfig(name=new, source=source))
    constants = replace(source, scale={"a": 2.0})
    with pytest.raises(ValueError, match=r"data\.source\.scale"):
        onboard(wards, DataConfig(name=new, source=constants, standardise="client"))
    again = onboard(wards, choose(wards, {"name": new}))
    assert again.names == ["n0", "n1", "n2"] and again.known == []


def test_columns_in_another_order_are_the_same_features(tmp_path):
    """Files of new clients may order their columns differently."""
    source = {"client": "ward", "target": "score", "task": "regression"}
    train = table_file(tmp_path / "train.csv", clients=6, seed=0, order=("a", "b", "score"))
    plan = {
        "data": {"name": train, "source": source, "standardise": "client"},
        "method": {"kind": "fedavg"},
        "privacy": {"epsilon": math.inf},
        "rounds": 2,
        "simulation_seed": 1,
    }
    execute(Plan.from_table(plan), folder=tmp_path / "run")
    found = []
    for order in (("a", "b", "score"), ("note", "b", "score", "a")):
        new = table_file(tmp_path / f"{order[0]}.csv", clients=3, seed=7, names="x{}", order=order)
        found.append(onboard(tmp_path / "run", choose(tmp_path / "run", {"name": new})))
    assert found[0].score.value == found[1].score.value
    twisted = DataConfig(
        name=str(tmp_path / "note.csv"),
        source=Source(**source, features=("b", "a")),
        standardise="client",
    )
    with pytest.raises(ValueError, match=r"feature 0 \(from 0\) of the training is 'a'"):
        onboard(tmp_path / "run", twisted)


def test_a_column_that_names_clients_otherwise_is_fine(tmp_path, wards, capsys):
    table_file(tmp_path / "new.csv", clients=3, seed=7)
    text = (tmp_path / "new.csv").read_text().replace("ward", "place", 1)
    (tmp_path / "new.csv").write_text(text)
    line = f"onboard {wards} --data {tmp_path / 'new.csv'} --out {tmp_path / 'm'}"
    assert main(line.split()) == 2
    assert "no column 'ward'" in capsys.readouterr().err
    assert main([*line.split(), "--client-column", "place"]) == 0


def test_new_clients_may_lack_classes(tmp_path):
    draw, owner = np.random.default_rng(0), np.repeat(np.arange(8), 12)
    x, y = draw.normal(size=(len(owner), 3)), draw.integers(0, 3, len(owner))
    np.savez(tmp_path / "old.npz", X=x, y=y, client=owner)
    np.savez(tmp_path / "new.npz", X=x[y < 2], y=y[y < 2], client=100 + owner[y < 2])
    plan = {
        "data": {"name": str(tmp_path / "old.npz")},
        "method": {"kind": "fedavg"},
        "privacy": {"epsilon": math.inf},
        "rounds": 1,
        "simulation_seed": 1,
    }
    execute(Plan.from_table(plan), folder=tmp_path / "run")
    found = onboard(tmp_path / "run", choose(tmp_path / "run", {"name": str(tmp_path / "new.npz")}))
    assert set(found.names) <= {str(100 + number) for number in range(8)}


def test_training_clients_do_not_get_epsilon_0(tmp_path, finished, capsys):
    folder, _ = finished("fedavg")
    both = dict(np.load(write(tmp_path / "both.npz", clients=3, seed=5)))
    line = f"onboard {folder} --data {tmp_path / 'both.npz'} --out {tmp_path / 'm'}".split()
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "All of them have names of clients that took part in training" in said
    assert "the run's epsilon 4" in said and "epsilon 0" not in said
    shutil.rmtree(tmp_path / "m")
    both["client"] = np.where(both["client"] == 2, 77, both["client"])
    np.savez(tmp_path / "both.npz", **both)
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "2 of them have names" in said and "The others release nothing" in said
    shutil.rmtree(tmp_path / "m")
    (folder / "models" / "clients.json").unlink()
    assert main(line) == 0
    assert "epsilon 0, if they did not take part" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "m")
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["took_part"] is None


# --- clients that are held out of training


@pytest.mark.parametrize(("asked", "held"), [(0.2, 8), (0.01, 1), (0.5, 20), (3, 3), (39, 39)])
def test_whole_clients_are_held_out(asked, held):
    data = synthetic(clients=40, rows=(1, 5), features=2).data
    training, others = hold_out(data, asked, seed=3)
    assert len(others) == held and len(training) == 40 - held
    assert sorted([*training.names, *others.names]) == sorted(data.names)
    places = [list(data.names).index(name) for name in training.names]
    assert places == sorted(places), "clients keep their order"
    for part in (training, others):
        for number, name in enumerate(part.names):
            old = list(data.names).index(name)
            rows = part.features[part.offsets[number] : part.offsets[number + 1]]
            assert torch.equal(rows, data.features[data.offsets[old] : data.offsets[old + 1]])


def test_who_is_held_out_follows_from_seed_and_number_alone():
    one = synthetic(clients=40, rows=(1, 5), features=2, seed=0).data
    other = synthetic(clients=40, rows=3, features=7, seed=9).data
    train, test = one.split(0.3, seed=1)
    drawn = [list(hold_out(data, 0.25, seed=3)[1].names) for data in (one, other, train, test)]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert list(hold_out(one, 0.25, seed=4)[1].names) != drawn[0]
    apart = {tuple(hold_out(one, 0.25, seed=seed)[1].names) for seed in range(20)}
    assert len(apart) == 20, "not always the first, or the last"


@pytest.mark.parametrize("asked", [0, 0.0, -1, 1.0, 1.5, 40, 41, 0.999, math.nan, True])
def test_nobody_held_out_and_nobody_left_are_refused(asked):
    with pytest.raises(DataError, match=r"held-out clients = .* of 40: expected a share"):
        hold_out(synthetic(clients=40, features=2).data, asked, seed=0)


def outcome_with(method, task="regression", **privacy):
    made = synthetic("mean", task=task, clients=24, rows=14, features=4, spread=0.2, seed=2).data
    (train, new), (test, held) = (hold_out(part, 6, seed=1) for part in made.split(0.3, seed=0))
    privacy = Privacy(**(privacy or {"epsilon": math.inf}))
    plan = Plan(method=method, privacy=privacy, rounds=3, simulation_seed=4)
    return simulate(plan, train), new, held, test


def test_held_out_clients_have_a_local_baseline():
    outcome, train, test, _ = outcome_with(PMTL(), epsilon=8.0)
    assert outcome.guarantee.clients == 18, "of the clients that were trained with"
    posts = len(outcome.posts)
    found = score_held_out(outcome, train, test)
    assert len(outcome.posts) == posts, "they release nothing"
    models = outcome.onboard(train)
    for name, leaf in models.items():
        torch.testing.assert_close(found.models[name], leaf)
    by_hand = evaluate(
        PMTL().model, lambda ids: take(models, torch.from_numpy(ids)), test
    )  # fmt: skip
    assert found.score.value == by_hand.value
    local = Plan(
        method=Local(), privacy=Privacy(epsilon=math.inf), rounds=1, simulation_seed=4
    )  # fmt: skip
    by_hand = evaluate(Local().model, simulate(local, train).rows, test)
    assert found.local is not None and found.local.value == pytest.approx(by_hand.value)
    told = found.to_json()
    assert told["clients"] == 6 and told["metric"] == "nmse"
    assert told["value"] == found.score.value and told["local_value"] == found.local.value
    own = found.score.clients
    assert told["client_error_p90"] == pytest.approx(np.percentile(own, 90))
    assert told["client_error_worst"] == pytest.approx(own.max())
    assert "client_accuracy_mean" not in told
    json.dumps(told, allow_nan=False)
    quick = score_held_out(outcome, train, test, local=False)
    assert quick.local is None and quick.to_json()["share_better_than_local"] is None


def test_held_out_clients_gain_from_a_good_shared_model():
    """Clients are alike, and have few rows: the mean of many is better than one's own fit."""
    outcome, train, test, _ = outcome_with(PMTL(lam=3.0))
    found = score_held_out(outcome, train.at_most(1, seed=0), test)
    assert found.local is not None
    assert found.score.value < 0.5 * found.local.value


@pytest.mark.full
@pytest.mark.parametrize("kind", WITH_SHARED_MODEL)
def test_every_method_with_a_shared_model_can_onboard(kind):
    for task in ("binary", "regression"):
        method = registered()[kind]()
        try:
            outcome, train, test, old = outcome_with(method, task)
        except (ValueError, NotImplementedError):
            continue  # not of this task
        found = score_held_out(outcome, train, test)
        assert math.isfinite(found.score.value)
        assert {len(leaf) for leaf in found.models.values()} == {6}
        assert math.isfinite(evaluate(method.model, outcome.rows, old).value)
        return
    pytest.fail(f"{kind} works on neither task")


def test_methods_without_a_shared_model_are_refused_before_they_spend():
    with pytest.raises(
        ValueError, match=r"mocha has models for its training clients .* such as pmtl"
    ):
        check_onboard(registered()["mocha"]())
    for method in (PMTL(), FedAvg(), Local()):
        check_onboard(method)


def test_held_out_clients_are_written_and_shown(tmp_path):
    outcome, train, test, _ = outcome_with(FedAvg(), "binary")
    found = score_held_out(outcome, train, test)
    found.keep(tmp_path)
    place = tmp_path / "newcomers"
    assert json.loads((place / "clients.json").read_text()) == list(train.names)
    for name, leaf in found.models.items():
        assert torch.equal(stacked_models(tmp_path, "newcomers")[name], leaf)
    table = pq.read_table(place / "metrics.parquet").to_pydict()
    np.testing.assert_allclose(table["error"], found.score.clients)
    np.testing.assert_allclose(table["error_alone"], found.local.clients)
    summary = {"method": "fedavg", "value": 0.5, "newcomers": found.to_json()}
    shown = held_out_table([Entry.of_result(one) for one in (summary, {"method": "x"})])
    (row,) = [dict(zip(shown.keys, row, strict=True)) for row in shown.rows]
    own = 1 - found.score.clients
    assert (row["method"], row["clients"]) == ("fedavg", "6")
    assert row["tail"].startswith(f"{np.percentile(own, 10):.3g} (")


def plan_with_held_out(path, *, far):
    """Return the plan of a run whose first held-out client's features are `far` times too large."""
    rows = dict(np.load(write(path, clients=12)))
    table = {
        "data": {"name": str(path), "source": {"task": "regression"}},
        "method": {"kind": "pfeb"},
        "privacy": {"epsilon": 4.0},
        "rounds": 2,
        "simulation_seed": 1,
        "newcomers": 3,
    }
    plan = Plan.from_table(table)
    data = plan.data.open()
    first = list(data.names).index(hold_out(data, 3, plan.data.split_seed)[1].names[0])
    rows["X"][rows["client"] == first] *= far
    np.savez(path, **rows)
    return plan


def test_unscaled_held_out_clients_are_refused_before_the_run(tmp_path):
    plan = plan_with_held_out(tmp_path / "rows.npz", far=1000.0)
    for folder in (None, tmp_path / "run"):
        with pytest.raises(DataError, match=r"held-out clients: .*beyond.*--standardise"):
            execute(plan, folder=folder)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_kept_if_held_out_clients_cannot_be_scored(tmp_path):
    """The run resumes after a crash; rows of held-out clients have changed since."""
    folder = tmp_path / "run"
    told = execute(plan_with_held_out(tmp_path / "rows.npz", far=1.0), folder=folder).summary
    assert told["newcomers"]["clients"] == 3 and not any("held-out" in n for n in told["notices"])
    (folder / "result.json").unlink()
    again = execute(plan_with_held_out(tmp_path / "rows.npz", far=1000.0), folder=folder).summary
    assert again["value"] == told["value"] and again["newcomers"] is None
    (why,) = [notice for notice in again["notices"] if "held-out" in notice]
    assert "could not be scored (DataError" in why and "beyond" in why
    assert json.loads((folder / "result.json").read_text())["notices"] == again["notices"]


@pytest.mark.parametrize("finetuned", [False, True])
def test_the_local_baseline_is_that_of_the_run(tmp_path, finetuned):
    table = {
        "data": {"name": write(tmp_path / "old.npz", clients=10, task="binary")},
        "method": {"kind": "pmtl", "sgd": {"lr": 0.05}},
        "privacy": {"epsilon": 4.0},
        "rounds": 2,
        "simulation_seed": 1,
    }
    table["data"]["source"] = {"task": "binary"}
    if finetuned:
        table["method"] = {"kind": "finetune", "base": table["method"]}
    plan = Plan.from_table(table)
    result = execute(plan)
    train, test = plan.data.split()
    again = score_local(plan.method, train, test, seed=1)
    np.testing.assert_allclose(again.clients, result.local.clients)
