"""`coterie predict`: the file's order, own models, names of classes; a run and a file agree."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
from pyarrow import csv, parquet
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.linear_model import LinearRegression

from coterie.cli.main import main
from coterie.data.config import Source
from coterie.data.federated import DataError
from coterie.data.load import load_unlabelled
from coterie.data.tables import feature_constants, target_constants
from coterie.evaluation.predict import decision_function, predict
from coterie.planning.plan import Plan
from coterie.runs.run import execute
from coterie.serve.export import load_client, read_clients, save_client
from coterie.serve.predict import predict_model, predict_run

pytestmark = pytest.mark.full

CLIENTS, ROWS = 5, 12


FILES = ("new.csv", "all.csv")


def rows_of(seed, labels=None):
    """Draw rows of all clients, shuffled: a table with client, two features and a target."""
    draw = np.random.default_rng(seed)
    client = draw.permutation(np.repeat(np.arange(CLIENTS), ROWS))
    x = draw.normal(size=(len(client), 2)) + client[:, None] / 3
    y = x @ [1.0, -2.0] + client + 0.1 * draw.normal(size=len(client))
    target = pa.array(y) if labels is None else pa.array([labels[v] for v in _cut(y, labels)])
    names = pa.array([f"c{number}" for number in client])
    return pa.table({"id": names, "b": x[:, 1], "a": x[:, 0], "out": target})


def _cut(y, labels):
    edges = np.quantile(y, np.linspace(0, 1, len(labels) + 1)[1:-1])
    return np.digitize(y, edges)


def run(folder, data, kind="local", epsilon=math.inf, **more):
    plan = {
        "data": data,
        "method": {"kind": kind, **more.pop("method", {})},
        "privacy": {"epsilon": epsilon},
        "simulation_seed": 1,
        "compare_with_local": False,
        **more,
    }
    return execute(Plan.from_table(plan), folder=folder).outcome


SOURCE = {"client": "id", "target": "out", "features": ["a", "b"]}
UNITS = {"center": {"out": 2.0, "a": 1.0}, "scale": {"out": 3.0, "b": 2.0}, "task": "regression"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("predict")
    csv.write_csv(rows_of(0), root / "train.csv")
    csv.write_csv(rows_of(9).drop_columns(["out"]), root / "new.csv")
    data = {"name": str(root / "train.csv"), "source": {**SOURCE, **UNITS}}
    run(root / "units", data)
    run(root / "scaled", {**data, "standardise": "client"})
    three = rows_of(1, ("low", "mid", "high"))
    csv.write_csv(three, root / "three.csv")
    source = {**SOURCE, "classes": ["low", "mid", "high"]}
    run(root / "three", {"name": str(root / "three.csv"), "source": source})
    return root


def read(path):
    return csv.read_csv(path) if path.suffix == ".csv" else parquet.read_table(path)


def test_rows_come_back_in_the_order_of_the_file(place, tmp_path, capsys):
    given = csv.read_csv(place / "new.csv")
    out = tmp_path / "out.csv"
    arguments = ["predict", str(place / "units"), "--data", str(place / "new.csv")]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == CLIENTS * ROWS and told["clients"] == CLIENTS
    found = read(out)
    assert found["row"].to_pylist() == list(range(given.num_rows))
    assert found["client"].to_pylist() == given["id"].to_pylist()
    # scikit-learn's model with the same numbers, on rows scaled by hand
    by_hand, x = LinearRegression(), np.column_stack([given["a"], given["b"]])
    x = (x - [1, 0]) / [1, 2]
    models = {model.client: model for model in read_clients(place / "units", sorted_names(found))}
    for at, name in enumerate(given["id"].to_pylist()):
        params = models[name].params
        by_hand.coef_, by_hand.intercept_ = params["weight"][0].numpy(), params["bias"][0].item()
        wanted = 2 + 3 * by_hand.predict(x[at : at + 1])[0]
        assert found["prediction"][at].as_py() == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    # the same on stdout, and as Parquet
    assert main(arguments) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main([*arguments, "--out", str(tmp_path / "out.parquet")]) == 0
    np.testing.assert_allclose(
        read(tmp_path / "out.parquet")["prediction"], found["prediction"], rtol=1e-5, atol=1e-6
    )


def sorted_names(table):
    return sorted(set(table["client"].to_pylist()))


@pytest.mark.parametrize("kind", ["units", "scaled", "three"])
def test_a_run_and_its_exported_files_agree(place, tmp_path, kind):
    data = str(place / ("three.csv" if kind == "three" else "new.csv"))
    whole = predict_run(place / kind, data).table()
    clients = np.array(whole["client"].to_pylist())
    for model in read_clients(place / kind, sorted_names(whole)):
        save_client(tmp_path / "m.safetensors", model)
        mine = clients == model.client
        alone = predict_model(load_client(tmp_path / "m.safetensors"), data, all_rows=True).table()
        # every row of the file is taken to be that client's: its own are among them
        for name in whole.column_names[2:]:
            ours, theirs = (np.array(table[name].to_pylist())[mine] for table in (whole, alone))
            if ours.dtype.kind == "f":
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
            else:
                assert (ours == theirs).all()


def test_classes_have_their_names(place):
    outcome_rows = csv.read_csv(place / "three.csv")
    found = predict_run(place / "three", str(place / "three.csv")).table()
    scores = np.column_stack([found[f"decision_{name}"] for name in ("low", "mid", "high")])
    assert found["prediction"].to_pylist() == [
        ("low", "mid", "high")[at] for at in scores.argmax(axis=1)
    ]
    right = np.array(found["prediction"].to_pylist()) == np.array(outcome_rows["out"].to_pylist())
    assert right.mean() > 0.6
    odds = np.column_stack([found[f"probability_{name}"] for name in ("low", "mid", "high")])
    np.testing.assert_allclose(odds, softmax(scores, axis=1), rtol=1e-5)


def test_columns_of_the_file_are_kept(place, tmp_path, capsys):
    """Ids stay as they are written, in the order of the file."""
    given = csv.read_csv(place / "new.csv")
    numbers = pa.array([f"{number:04d}" for number in range(given.num_rows)])
    csv.write_csv(given.append_column("patient", numbers), tmp_path / "new.csv")
    words = ["predict", str(place / "units"), "--data", str(tmp_path / "new.csv"), "--keep"]
    assert main([*words, "patient", "id", "--out", str(tmp_path / "out.csv")]) == 0
    text = csv.ConvertOptions(column_types={"patient": pa.string()})
    found = csv.read_csv(tmp_path / "out.csv", convert_options=text)
    assert found.column_names == ["row", "client", "patient", "id", "prediction"]
    assert found["patient"].to_pylist() == numbers.to_pylist()
    assert found["id"].to_pylist() == given["id"].to_pylist()
    capsys.readouterr()
    for column, problem in (("patiant", "did you mean patient?"), ("prediction", "no column")):
        assert main([*words, column]) == 2
        assert problem in capsys.readouterr().err
    for taken in ("prediction", "row", "client"):
        csv.write_csv(given.append_column(taken, numbers), tmp_path / "new.csv")
        assert main([*words, taken, "--out", str(tmp_path / "out.csv")]) == 0
        found = csv.read_csv(tmp_path / "out.csv", convert_options=text)
        assert found[f"{taken}_kept"].to_pylist() == [int(one) for one in numbers.to_pylist()]


def test_two_classes_and_signs(tmp_path):
    rows = rows_of(3, (-1, 1))
    csv.write_csv(rows, tmp_path / "signed.csv")
    run(tmp_path / "signed", {"name": str(tmp_path / "signed.csv"), "source": SOURCE})
    csv.write_csv(rows_of(3, ("x", "y", "z")), tmp_path / "rest.csv")
    source = {**SOURCE, "classes": ["x", "y", "z"], "positive": ["x", "z"]}
    run(tmp_path / "rest", {"name": str(tmp_path / "rest.csv"), "source": source})
    for name, names in (("signed", ("-1", "1")), ("rest", ("not x or z", "x or z"))):
        found = predict_run(tmp_path / name, str(tmp_path / f"{name}.csv")).table()
        positive = np.array(found["decision"].to_pylist()) > 0
        assert found["prediction"].to_pylist() == [names[int(up)] for up in positive]
        np.testing.assert_allclose(found["probability"], expit(found["decision"]), rtol=1e-5)
        assert set(found["prediction"].to_pylist()) == set(names)


def test_deviations_are_those_of_the_library(tmp_path, capsys):
    csv.write_csv(rows_of(0), tmp_path / "train.csv")
    data = {
        "name": str(tmp_path / "train.csv"),
        "source": {**SOURCE, "task": "regression", "scale": {"out": 4.0}},
        "standardise": "client",
    }
    outcome = run(tmp_path / "pfeb", data, "pfeb", 2.0)
    plan = Plan.from_table({"data": data, "method": {"kind": "pfeb"}, "privacy": {"epsilon": 2}})
    train, test = plan.data.split()
    means, wide = predict(outcome, test, return_std=True, train=train)
    everything = predict_run(tmp_path / "pfeb", str(tmp_path / "train.csv"), std=True)
    found = everything.table()
    given = csv.read_csv(tmp_path / "train.csv")
    ids = np.array(given["id"].to_pylist())
    for at, name in enumerate(test.names):
        ours = np.column_stack([found["prediction"], found["std"]])[ids == name]
        for mean, std in zip(means[at], wide[at], strict=True):
            near = np.abs(ours - [4 * mean, 4 * std]).max(axis=1).min()
            assert near < 1e-4  # the test rows are among the file's
    assert (np.array(found["std"].to_pylist()) > 0).all()
    # some clients in another order, and one alone: the numbers are the same
    for names in (["c3", "c1"], ["c2"]):
        some = given.filter(pa.compute.is_in(given["id"], pa.array(names)))[::-1]
        csv.write_csv(some, tmp_path / "some.csv")
        part = predict_run(tmp_path / "pfeb", str(tmp_path / "some.csv"), std=True).table()
        wanted = np.array(found["std"])[np.isin(ids, names)][::-1]
        np.testing.assert_allclose(part["std"], wanted, rtol=1e-5)


@pytest.mark.parametrize("labels", [("x", "y", "z"), ("x", "y"), None])
@pytest.mark.parametrize("kept", [True, False])
def test_deviations_of_clients_that_the_run_does_not_know(tmp_path, monkeypatch, labels, kept):
    """They have the prior, alone or among others; what is kept suffices without the rows."""
    if not kept:
        monkeypatch.setattr("coterie.evaluation.predict.MOST_VALUES", 0)
    train = tmp_path / "train.csv"
    csv.write_csv(rows_of(0) if labels is None else rows_of(0, labels), train)
    source = {**SOURCE, "task": "regression"} if labels is None else {**SOURCE, "classes": labels}
    run(tmp_path / "pfeb", {"name": str(train), "source": source}, "pfeb", 2.0)
    given = csv.read_csv(train)
    new = given.set_column(given.column_names.index("id"), "id", pa.array(["new"] * len(given)))
    csv.write_csv(new, tmp_path / "new.csv")
    csv.write_csv(pa.concat_tables([new, given]), tmp_path / "all.csv")
    if kept:
        train.unlink()
    tables = {n: predict_run(tmp_path / "pfeb", str(tmp_path / n), std=True).table() for n in FILES}
    names = [name for name in tables["all.csv"].column_names if name.startswith("std")]
    assert len(names) == (3 if labels == ("x", "y", "z") else 1)
    for name in names:
        alone, found = (np.array(tables[one][name]) for one in FILES)
        np.testing.assert_allclose(found[: len(given)], alone, rtol=1e-6)
        assert (alone > 0).all()
        if labels is not None:  # own rows can only narrow scores; they may show a larger residual
            assert (alone > found[len(given) :]).all()


def test_what_cannot_be_said_is_an_error(place, capsys):
    new = str(place / "new.csv")
    model = place / "one.safetensors"
    save_client(model, read_clients(place / "units", ["c0"])[0])
    for arguments, said in (
        ([place / "units", "--data", new, "--std"], "has no uncertainty"),
        ([place / "units", "--data", new, "--client", "c9"], "nearest are"),
        ([place / "units", "--data", new, "--out", "x.txt"], ".csv or .parquet"),
        ([place / "units", "--data", place / "none.csv"], "no such file"),
        ([place / "units", "--data", new, "--json"], "--out"),
        ([place / "units", "--data", "districts"], "rows of shape"),
        ([place / "nowhere", "--data", new], "no such file"),
        ([model, "--data", new, "--std"], "run folder"),
        ([model, "--data", new, "--client", "c1"], "model of 'c0'"),
        ([place / "units", "--data", new, "--client-column", "who"], "no column 'who'"),
    ):
        assert main(["predict", *map(str, arguments)]) == 2, arguments
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err


def test_one_model_answers_rows_of_its_own_client(place, tmp_path, capsys):
    """Another client's rows are never labelled as its own, unless somebody says that they are."""
    model, rows = tmp_path / "c2.safetensors", csv.read_csv(place / "new.csv")
    save_client(model, read_clients(place / "units", ["c2"])[0])
    command = ["predict", str(model), "--out", str(tmp_path / "out.csv"), "--data"]
    assert main([*command, str(place / "new.csv")]) == 2
    err = capsys.readouterr().err
    assert "this is the model of 'c2'" in err and "--client 'c2'" in err and err.count("\n") == 1
    assert main([*command, str(place / "new.csv"), "--client", "c2"]) == 0
    assert f"{len(rows)} rows of 1 client predicted" in capsys.readouterr().out
    whole = read(tmp_path / "out.csv")
    mine = np.array(rows["id"].to_pylist()) == "c2"
    own = rows.filter(pa.array(mine))
    silent, other = own.drop_columns(["id"]), own.rename_columns(["who", *own.column_names[1:]])
    for number, (part, more) in enumerate(
        ((own, []), (silent, []), (other, ["--client-column", "who"]))
    ):
        csv.write_csv(part, tmp_path / f"{number}.csv")
        assert main([*command, str(tmp_path / f"{number}.csv"), *more]) == 0
        found = read(tmp_path / "out.csv")
        assert set(found["client"].to_pylist()) == {"c2"}
        np.testing.assert_allclose(found["prediction"], np.array(whole["prediction"])[mine])
    csv.write_csv(rows.rename_columns(["who", *rows.column_names[1:]]), tmp_path / "who.csv")
    assert main([*command, str(tmp_path / "who.csv"), "--client-column", "who"]) == 2
    assert "this is the model of 'c2'" in capsys.readouterr().err


def test_arrays_of_others_are_refused_by_one_model(place, tmp_path):
    model = read_clients(place / "units", ["c2"])[0]
    x, names = np.zeros((3, 2)), ["c2", "c1", "c2"]
    np.savez(tmp_path / "mixed.npz", X=x, id=names, feature_names=["a", "b"])
    with pytest.raises(ValueError, match=r"rows of 'c1', and this is the model of 'c2'"):
        predict_model(model, str(tmp_path / "mixed.npz"))
    np.savez(tmp_path / "silent.npz", X=x, feature_names=["a", "b"])
    assert len(predict_model(model, str(tmp_path / "silent.npz")).outputs) == 3
    with pytest.raises(ValueError, match="districts has no client 'c2'"):
        predict_model(model, "districts")


def test_a_file_that_names_no_client_lists_its_own_columns(place, tmp_path, capsys):
    rows = csv.read_csv(place / "new.csv")
    csv.write_csv(rows.rename_columns(["school", *rows.column_names[1:]]), tmp_path / "new.csv")
    assert main(["predict", str(place / "units"), "--data", str(tmp_path / "new.csv")]) == 2
    err = capsys.readouterr().err
    assert "no column 'id'" in err and "the columns are school, b, a:" in err, err
    assert "__row__" not in err and "--target" not in err
    assert "--client-column" in err and "--client" in err


def test_strangers_are_refused_or_take_the_shared_model(place, tmp_path, capsys):
    rows = rows_of(5)
    names = [name.replace("c1", "c1b") for name in rows["id"].to_pylist()]
    csv.write_csv(rows.set_column(0, "id", pa.array(names)), tmp_path / "odd.csv")
    data = {"name": str(place / "train.csv"), "source": {**SOURCE, **UNITS}}
    run(tmp_path / "fedavg", data, "fedavg", 5.0, rounds=3)
    odd = ["--data", str(tmp_path / "odd.csv")]
    refused = ["--unknown-clients", "refuse"]
    assert main(["predict", str(tmp_path / "fedavg"), *odd, *refused]) == 2
    assert (
        "'c1b'" in (err := capsys.readouterr().err) and "'c1'" in err and "coterie onboard" in err
    )
    out = tmp_path / "out.csv"
    more = [*odd, "--out", str(out)]
    assert main(["predict", str(tmp_path / "fedavg"), *more]) == 0
    assert "(c1b), predicted by the shared model" in capsys.readouterr().err
    found = read(out)
    with np.load(tmp_path / "fedavg" / "shared.npz") as shared:
        weight, bias = shared["weight"][0], shared["bias"][0]
    x = (np.column_stack([rows["a"], rows["b"]]) - [1, 0]) / [1, 2]
    mine = np.array(names) == "c1b"
    assert np.array(found["model"].to_pylist())[mine].tolist() == ["shared"] * ROWS
    wanted = 2 + 3 * (x @ weight + bias)
    np.testing.assert_allclose(np.array(found["prediction"])[mine], wanted[mine], rtol=1e-4)
    upper = rows.set_column(0, "id", pa.array([name.upper() for name in names]))
    csv.write_csv(upper, tmp_path / "upper.csv")
    notes = predict_run(tmp_path / "fedavg", str(tmp_path / "upper.csv")).notes
    assert any("; did you mean 'c" in note for note in notes)
    # local training shares nothing, and scaled rows need rows of one's own: no prediction
    for folder in (place / "units", place / "scaled"):
        assert main(["predict", str(folder), *more]) == 0
        assert "12 rows without a prediction" in capsys.readouterr().err
        empty = np.array([one is None for one in read(out)["prediction"].to_pylist()])
        assert (empty == mine).all()
    csv.write_csv(
        rows.set_column(0, "id", pa.array(names)).filter(pa.array(mine)), tmp_path / "strange.csv"
    )
    assert main(["predict", str(folder), "--data", str(tmp_path / "strange.csv")]) == 2
    assert "not among the 5 clients" in capsys.readouterr().err


def test_clients_who_joined_are_answered_too(place, tmp_path):
    data = {"name": str(place / "train.csv"), "source": {**SOURCE, **UNITS}}
    for scaling in ("none", "client"):
        folder = tmp_path / scaling
        outcome = run(
            folder, {**data, "standardise": scaling}, "fedavg", 5.0, rounds=2, newcomers=2
        )
        found = predict_run(folder, str(place / "new.csv")).table()
        held = set(found["client"].to_pylist()) - set(outcome.names)
        assert len(held) == 2
        models = {model.client: model for model in read_clients(folder, sorted(held))}
        for name, model in models.items():
            mine = np.array(found["client"].to_pylist()) == name
            alone = predict_model(model, str(place / "new.csv"), all_rows=True).table()
            np.testing.assert_allclose(
                np.array(found["prediction"])[mine], np.array(alone["prediction"])[mine], rtol=1e-5
            )


def test_named_data_and_one_client(tmp_path):
    data = {"name": "synthetic", "options": {"clients": 6, "rows": 8}}
    outcome = run(tmp_path / "run", data)
    plan = Plan.from_table({"data": data, "method": {"kind": "local"}, "privacy": {"epsilon": 1}})
    everybody = plan.data.open()
    found = predict_run(tmp_path / "run", "synthetic").table()
    wanted = np.concatenate(decision_function(outcome, everybody))
    np.testing.assert_allclose(np.array(found["prediction"]), wanted, rtol=1e-5, atol=1e-6)
    one = predict_run(tmp_path / "run", "synthetic", client=everybody.names[3]).table()
    np.testing.assert_allclose(
        one["prediction"], wanted[everybody.offsets[3] : everybody.offsets[4]], rtol=1e-5
    )


def test_arrays_dense_and_sparse(tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 3)) * (draw.random((20, 3)) < 0.5)
    client, y = np.repeat(["p", "q"], 10), x.sum(axis=1)
    whole = sparse.csr_matrix(x)
    parts = {f"X_{key}": getattr(whole, key) for key in ("data", "indices", "indptr", "shape")}
    for name, rows in (("dense", {"X": x}), ("sparse", parts)):
        np.savez(tmp_path / f"{name}.npz", y=y, client=client, **rows)
        np.savez(tmp_path / f"{name}-new.npz", client=client[::-1], **rows)
        data = {"name": str(tmp_path / f"{name}.npz"), "standardise": "client"}
        run(tmp_path / name, data)
        given = str(tmp_path / f"{name}-new.npz")
        found = predict_run(tmp_path / name, given).table()
        assert found["client"].to_pylist() == client[::-1].tolist()
        (model,) = read_clients(tmp_path / name, ["q"])
        alone = predict_model(model, given, all_rows=True).table()
        mine = client[::-1] == "q"
        np.testing.assert_allclose(
            np.array(found["prediction"])[mine], np.array(alone["prediction"])[mine], rtol=1e-5
        )
    np.savez(tmp_path / "bare.npz", X=x)
    with pytest.raises(DataError, match="no array 'client'"):
        predict_run(tmp_path / "dense", str(tmp_path / "bare.npz"))
    assert predict_run(
        tmp_path / "dense", str(tmp_path / "bare.npz"), client="p"
    ).outputs.shape == (20,)


def test_text_is_read_by_the_words_of_training(tmp_path):
    draw, words = np.random.default_rng(0), ("up", "down", "left")
    (tmp_path / "words.txt").write_text("\n".join(words))
    texts = [" ".join(draw.choice(words, 4)) for _ in range(24)]
    names, up = ["a", "b"] * 12, [text.count("up") / 4 for text in texts]
    csv.write_csv(pa.table({"client": names, "said": texts, "y": up}), tmp_path / "t.csv")
    csv.write_csv(pa.table({"client": names, "said": texts}), tmp_path / "new.csv")
    source = {
        "features": ["said"],
        "text": "bag",
        "vocabulary": str(tmp_path / "words.txt"),
        "task": "regression",
    }
    run(tmp_path / "run", {"name": str(tmp_path / "t.csv"), "source": source})
    whole = predict_run(tmp_path / "run", str(tmp_path / "new.csv")).table()
    save_client(tmp_path / "a.safetensors", read_clients(tmp_path / "run", ["a"])[0])
    (tmp_path / "words.txt").unlink()  # the exported file holds the public words itself
    alone = predict_model(
        load_client(tmp_path / "a.safetensors"), str(tmp_path / "new.csv"), all_rows=True
    ).table()
    np.testing.assert_allclose(
        np.array(alone["prediction"])[::2], np.array(whole["prediction"])[::2], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("columns", "given", "wanted"),
    [
        (("a", "b", "c"), {"b": 2.0, "y": 9.0}, [0, 2, 0]),
        (("a", "x", "c"), {"x": 2.0}, [0, 2, 0]),
        ((), {"x": 2.0, "x1": 5.0}, [2, 5, 2]),
        ((), {"2": 4.0}, [0, 0, 4]),
    ],
)
def test_declared_constants_are_spread_as_reading_does(tmp_path, columns, given, wanted):
    center, scale = feature_constants(Source(center=given), columns, 3)
    assert center.tolist() == wanted and scale.tolist() == [1, 1, 1]
    names = {} if not columns else {"feature_names": np.array(columns)}
    np.savez(tmp_path / "d.npz", X=np.zeros((2, 3)), client=np.array(["a", "a"]), **names)
    rows = load_unlabelled(tmp_path / "d.npz", Source(center=given), columns=columns)
    np.testing.assert_allclose(rows.data.features[0], -center)
    assert target_constants(Source(center=given), columns)[0] == given.get("y", 0.0)


def test_a_row_with_a_gap_that_nothing_fills_has_no_prediction(place, tmp_path):
    (tmp_path / "gap.csv").write_text("id,a,b\nc1,1,2\nc2,,3\nc3,2,3\n")
    found = predict_run(place / "units", str(tmp_path / "gap.csv"))
    assert [one is None for one in found.table()["prediction"].to_pylist()] == [False, True, False]
    assert any("1 row without a prediction" in note for note in found.notes)
