"""Tracking, read back by the trackers' own readers."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coterie.cli.main import main
from coterie.privacy.guarantee import Guarantee
from coterie.tracking import KINDS, check_kinds, close_parent, open_parent, read_record, track

pytestmark = pytest.mark.full
SMALL = "--data synthetic --option clients=12 --option rows=8 --option features=3 --quiet"
RUN = f"run --anyway {SMALL}"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # For the readers in here; what is tested sets it by itself, see test_files_need_no_switch.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    line = f"{RUN} --epsilon 2 --rounds 3 --history --simulation-seed 1 --out"
    assert main([*shlex.split(line), str(folder)]) == 0
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def client(where):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=Path(where).resolve().as_uri())


def check_record(found, run):
    """Hold what MLflow gives back against the files of the run."""
    result = json.loads((run / "result.json").read_text())
    guarantee = Guarantee.from_json(json.loads((run / "guarantee.json").read_text()))
    assert found.data.params["method.kind"] == "pfeb" and found.data.params["rounds"] == "3"
    assert found.data.metrics["nmse"] == result["value"] == found.data.metrics["value"]
    assert found.data.metrics["epsilon"] == guarantee.epsilon
    assert found.data.tags["coterie.simulation"] == "true"
    assert found.data.tags["coterie.relation"] == "zero_out"
    assert found.data.tags["coterie.view"] == "other clients"
    assert "not covered" in found.data.tags["coterie.not_covered"]
    assert found.info.status == "FINISHED"


def test_mlflow_gives_back_what_the_run_kept(run):
    store = client("mlruns")
    name = track(run, "mlflow")
    check_record(store.get_run(name), run)
    spent = store.get_metric_history(name, "epsilon_by_round")
    assert [point.step for point in spent] == [1, 2, 3]
    guarantee = Guarantee.from_json(json.loads((run / "guarantee.json").read_text()))
    assert spent[-1].value == guarantee.epsilon > spent[0].value > 0
    kept = pq.read_table(run / "history.parquet").to_pylist()
    told = store.get_metric_history(name, "round_value")
    assert [(p.step, p.value) for p in told] == [(line["round"], line["value"]) for line in kept]


def test_no_model_and_nothing_of_a_single_client_is_handed_on(run):
    store = client("mlruns")
    name = track(run, "mlflow")
    kept = {item.path for item in store.list_artifacts(name)}
    assert kept == {"guarantee.json", "report.html", "plan.toml"}
    metrics = store.get_run(name).data.metrics
    assert not [key for key in metrics if key.endswith("worst") or "answered" in key]


def names_in(run):
    """Return the names of a run's clients; its own page shows them."""
    names = pq.read_table(run / "metrics.parquet")["client"].to_pylist()
    page = (run / "report.html").read_text()
    assert all(f">{name}<" in page for name in names)
    return names


def test_the_page_that_is_handed_on_has_no_clients(run, tmp_path):
    store, names = client("mlruns"), names_in(run)
    kept = (run / "report.html").read_bytes()
    place = store.download_artifacts(track(run, "mlflow"), "report.html", str(tmp_path))
    page = Path(place).read_text()
    assert not any(f">{name}<" in page or f'"{name}"' in page for name in names)
    assert "clients gain" in page and "not covered by epsilon" in page
    assert "clients that answered" not in page
    assert (run / "report.html").read_bytes() == kept, "the folder's own page stays as it is"


def test_where_there_is_no_page_none_is_handed_on(run):
    (run / "report.html").unlink()
    store = client("mlruns")
    kept = {item.path for item in store.list_artifacts(track(run, "mlflow"))}
    assert kept == {"guarantee.json", "plan.toml"}


def test_epsilon_of_a_hidden_cohort_is_against_other_clients(tmp_path, no_pages):
    flags = "--method fedavg --epsilon 1 --rounds 3 --sampling fixed --cohort 4 --relation replace"
    line = f"{RUN} {flags} --no-local --simulation-seed 1 --out {tmp_path / 'fixed'}"
    assert main(shlex.split(line)) == 0
    found = read_record(tmp_path / "fixed")
    views = json.loads((tmp_path / "fixed" / "result.json").read_text())["views"]
    assert found.tags["coterie.view"] == "other clients"
    assert views["outsider"] < found.metrics["epsilon"] == views["other_clients"] < 1.001


def test_a_run_is_not_logged_twice(run):
    store = client("mlruns")
    assert track(run, "mlflow") == track(run, "mlflow")
    place = store.get_experiment_by_name("coterie").experiment_id
    assert len(store.search_runs([place])) == 1


def test_a_log_that_was_cut_short_is_made_anew(run):
    store = client("mlruns")
    first = track(run, "mlflow")
    store.update_run(first, status="RUNNING")
    second = track(run, "mlflow")
    place = store.get_experiment_by_name("coterie").experiment_id
    assert second != first and [one.info.run_id for one in store.search_runs([place])] == [second]
    check_record(store.get_run(second), run)


def test_runs_of_a_comparison_are_nested(made, tmp_path):
    store = client("elsewhere")
    group = tmp_path / "comparison"
    runs = [Path(shutil.copytree(made, group / name)) for name in ("a", "b")]
    (group / "report.html").write_text(f"<p>{names_in(runs[0])[0]}</p>")
    where = Path("elsewhere")
    parent = open_parent(group, "mlflow", where=where)
    names = [track(run, "mlflow", parent=parent, where=where) for run in runs]
    labels = dict(zip(runs, ("weak pull", "strong pull"), strict=True))
    close_parent(group, "mlflow", parent, labels, where=where)
    for name in names:
        assert store.get_run(name).data.tags["mlflow.parentRunId"] == parent
    assert store.get_run(parent).info.status == "FINISHED"
    assert [item.path for item in store.list_artifacts(parent)] == ["report.html"]
    page = Path(store.download_artifacts(parent, "report.html", str(tmp_path))).read_text()
    assert "weak pull" in page and "strong pull" in page
    assert not any(name in page for name in names_in(runs[0]))
    assert open_parent(group, "mlflow", where=where) == parent


def test_files_need_no_switch(run, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    assert track(run, "mlflow") and Path("mlruns").is_dir()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the database's own library
def test_mlflow_in_a_database(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path}/tracked.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    check_record(MlflowClient(tracking_uri=address).get_run(track(run, "mlflow")), run)


def read_events(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_gives_back_what_the_run_kept(run):
    found = read_events(track(run, "tensorboard"))
    result = json.loads((run / "result.json").read_text())
    spent = found.Scalars("epsilon_by_round")
    assert [point.step for point in spent] == [1, 2, 3] and spent[-1].value == pytest.approx(2)
    assert found.Scalars("final/nmse")[0].value == pytest.approx(result["value"], rel=1e-6)
    kept = pq.read_table(run / "history.parquet").to_pylist()
    losses = [point.value for point in found.Scalars("round_train_loss")]
    assert losses == pytest.approx([line["train_loss"] for line in kept], rel=1e-6)
    (text,) = found.Tensors("guarantee")
    assert b"Protected: one client" in text.tensor_proto.string_val[0]
    (plan,) = found.Tensors("plan")
    assert b"method.kind = pfeb" in plan.tensor_proto.string_val[0]


def test_tensorboards_file_names_no_host_and_is_replaced_not_repeated(run):
    folder = Path(track(run, "tensorboard"))
    assert Path(track(run, "tensorboard")) == folder == run / "tensorboard"
    assert [path.name for path in folder.iterdir()] == ["events.out.tfevents.coterie"]
    assert len(read_events(folder).Scalars("epsilon_by_round")) == 3


def test_the_flag_tracks_a_run_and_a_resumed_one(capsys, no_pages):
    pytest.importorskip("mlflow")
    line = f"{RUN} --rounds 1 --no-local --out here --json"
    assert main(shlex.split(f"{line} --track tensorboard")) == 0
    assert main(shlex.split("run --resume here --quiet --json --track mlflow")) == 0
    out = capsys.readouterr().out
    assert all(json.loads(line)["run"] == "here" for line in out.splitlines())
    name = json.loads(Path("here/tracking.json").read_text())["mlflow"]["run"]
    assert client("mlruns").get_run(name).info.status == "FINISHED"
    assert Path("here/tensorboard").exists()


def test_a_run_over_several_budgets_is_a_comparison(capsys):
    pytest.importorskip("mlflow")
    line = f"{RUN} --epsilon 1,2 --rounds 1 --no-local --out all --json --track mlflow"
    assert main(shlex.split(line)) == 0
    parent = json.loads(Path("all/tracking.json").read_text())["mlflow"]["run"]
    store = client("mlruns")
    place = store.get_experiment_by_name("coterie").experiment_id
    nested = [one for one in store.search_runs([place]) if one.info.run_id != parent]
    assert len(nested) == 4
    assert {one.data.tags["mlflow.parentRunId"] for one in nested} == {parent}


@pytest.mark.parametrize(
    ("kind", "told"), [("wandb", "one of mlflow, tensorboard"), ("mlflow", "coterie[track]")]
)
def test_what_cannot_be_tracked_with_is_refused_before_anything_is_spent(
    kind, told, monkeypatch, capsys
):
    monkeypatch.setattr("coterie.tracking.importlib.util.find_spec", lambda name: None)
    line = shlex.split(f"{RUN} --out here --track {kind}")
    if kind in KINDS:
        assert main(line) == 2
    else:
        with pytest.raises(SystemExit, match="2"):
            main(line)
    err = capsys.readouterr().err
    assert told in err and len(err.splitlines()) == 1 and not Path("here").exists()
    with pytest.raises(ValueError, match=kind):
        check_kinds([kind])


def test_a_tracker_that_fails_costs_no_run(monkeypatch, capsys, no_pages):
    def broken(*args, **more):
        raise OSError("no space left")

    monkeypatch.setattr("coterie.tracking.track", broken)
    assert main(shlex.split(f"{RUN} --rounds 1 --no-local --out here --track tensorboard")) == 1
    err = capsys.readouterr().err
    assert "no space left" in err and "coterie run --resume here --track tensorboard" in err
    assert Path("here/result.json").exists()


def test_an_unfinished_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        track(tmp_path, "tensorboard")


def test_tensorboard_needs_no_torch(run):
    import subprocess

    pytest.importorskip("tensorboard")
    code = (
        "import sys; from pathlib import Path; from coterie.tracking import track\n"
        "track(Path(sys.argv[1]), 'tensorboard'); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
