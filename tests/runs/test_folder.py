"""The run folder: what a finished run leaves, in the form that docs/run-folder.md promises."""

import json
import shutil
import zipfile
from datetime import datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from coterie.data.config import DataConfig
from coterie.engine import models as finished_models
from coterie.engine.models import client_model, client_names, stacked_models, write_models
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.guarantee import Guarantee
from coterie.runs import folder as folder_module
from coterie.runs.certificate import seal
from coterie.runs.log import Log
from coterie.runs.run import execute
from coterie.verification import verify

pytestmark = pytest.mark.full

PLAN = Plan(
    data=DataConfig(name="synthetic", options={"clients": 9, "rows": [4, 8], "features": 3}),
    method=PMTL(),
    privacy=Privacy(epsilon=2.0),
    rounds=4,
    simulation_seed=5,
    compare_with_local=False,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder") / "run"
    return folder, execute(PLAN, folder=folder)


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def events(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_reviewer_finds_bounds_noise_and_epsilons_in_the_summary(finished):
    folder, result = finished
    told = json.loads((folder / "result.json").read_text())["reviewer"]
    assert told == result.summary["reviewer"]
    clip, z = result.summary["clip"], result.summary["noise_multiplier"]
    ((release,), (part,)) = told["releases"], told["releases"][0]["parts"]
    assert release["rounds"] == 4 and sorted(part["leaves"]) == ["bias", "weight"]
    assert (part["norm"], part["bound"]) == (2, clip)
    assert part["noise"] == pytest.approx(z * clip)
    assert told["mu"] == pytest.approx({"zero_out": 2 / z, "replace": 4 / z})
    assert told["epsilon"]["zero_out"] == result.summary["epsilon"] < told["epsilon"]["replace"]
    # The certificate lists the same bounds, and stays closed: a reader recomputes the rest.
    stated = json.loads((folder / "guarantee.json").read_text())
    assert stated["releases"][0]["parts"][0]["bound"] == part["bound"]
    assert "reviewer" not in stated
    assert verify(folder).verified


def test_a_finished_run_has_its_files_and_no_scraps(finished):
    folder, _ = finished
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    public = {"plan.toml", "guarantee.json", "posts.npz", "ledger.jsonl", "shared.npz"}
    private = {"models/clients.safetensors", "models/clients.json", "metrics.parquet", "log.jsonl"}
    assert public | private | {"result.json", "data.json", "model.json"} <= found
    assert not any(name.endswith((".partial", "models/weight.npy")) for name in found)
    assert not (folder / "posts").exists()


def test_the_certificate_says_all_and_rebuilds_the_guarantee(finished):
    folder, result = finished
    told = json.loads((folder / "guarantee.json").read_text())
    assert (told["format"], told["format_version"]) == ("coterie certificate", 2)
    assert Guarantee.from_json(told) == result.outcome.guarantee
    assert told["epsilon"] == result.outcome.guarantee.epsilon
    assert [post["index"] for post in told["posts"]] == [0, 1, 2, 3]
    assert seal(told) == told["sha256"]
    assert {"python", "coterie", "numpy", "torch", "dp-accounting"} <= told["versions"].keys()
    assert all(len(told[key]) == 17 for key in ("started", "finished"))  # to the minute
    assert "simulation_seed" not in json.dumps(told)


def test_models_are_those_of_the_run(finished):
    folder, result = finished
    names = client_names(folder)
    assert names == list(result.outcome.names) and len(names) == 9
    whole = stacked_models(folder)
    theirs = load_file(folder / "models" / "clients.safetensors")
    assert list(whole) == list(result.outcome.model(0)) and theirs.keys() == whole.keys()
    for row, name in enumerate(names):
        own = client_model(folder, name)
        for leaf, expected in result.outcome.model(row).items():
            assert torch.equal(own[leaf], expected)
            assert torch.equal(whole[leaf][row], expected)
            assert torch.equal(theirs[leaf][row], expected)


def test_an_unknown_client_is_told_its_neighbours(finished):
    with pytest.raises(ValueError, match=r"'client 12'.*9 clients.*nearest are 'client"):
        client_model(finished[0], "client 12")


@pytest.mark.parametrize("what", ["nothing", "unfinished"])
def test_without_models_the_folder_is_named(tmp_path, what):
    if what == "unfinished":
        (tmp_path / "plan.toml").write_text("")
    told = "--resume" if what == "unfinished" else "finished run"
    for act in (client_names, stacked_models, lambda place: client_model(place, "x")):
        with pytest.raises(FileNotFoundError, match=told):
            act(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "names", "no names", "no rows"])
def test_damaged_models_are_refused(copied, damage):
    rows, names = copied / "models/clients.safetensors", copied / "models/clients.json"
    if damage == "cut":
        rows.write_bytes(rows.read_bytes()[:-8])
    elif damage == "empty":
        rows.write_bytes(b"")
    elif damage == "names":
        names.write_text(json.dumps(client_names(copied)[1:]))
    elif damage == "no names":
        names.write_text("{}")
    else:
        rows.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="clients"):
        stacked_models(copied)


@settings(max_examples=30, deadline=None)
@given(
    clients=st.integers(1, 7),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
    kinds=st.lists(
        st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]),
        min_size=4,
        max_size=4,
    ),
    piece=st.sampled_from([1, 16, 1 << 24]),
)
def test_whatever_is_written_is_read_by_safetensors(
    tmp_path_factory, clients, shapes, kinds, piece
):
    place = tmp_path_factory.mktemp("written")
    draw = torch.Generator().manual_seed(0)
    tree = {
        f"layer.{number}/é": (9 * torch.rand(clients, *shape, generator=draw)).to(kind)
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    }
    before = finished_models._PIECE
    finished_models._PIECE = piece
    try:
        write_models(place / "models", tree, range(clients))
    finally:
        finished_models._PIECE = before
    theirs = load_file(place / "models" / "clients.safetensors")
    ours = stacked_models(place)
    assert list(ours) == list(tree) and theirs.keys() == tree.keys()
    for name, leaf in tree.items():
        assert theirs[name].dtype == leaf.dtype and torch.equal(theirs[name], leaf)
        assert torch.equal(ours[name], leaf)
        assert torch.equal(client_model(place, str(clients - 1))[name], leaf[-1])


def test_a_clients_model_is_read_alone(finished, monkeypatch):
    """What is asked of the file are slices of one row."""
    asked = []

    class Watched:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def __getattr__(self, name):
            assert name in ("metadata", "keys", "get_slice"), name
            return getattr(self.file, name)

        def get_slice(self, name):
            part = self.file.get_slice(name)

            class Part:
                def get_shape(self):
                    return part.get_shape()

                def __getitem__(self, rows):
                    asked.append(rows)
                    return part[rows]

            return Part()

    monkeypatch.setattr(finished_models, "safe_open", Watched)
    client_model(finished[0], "client 4")
    assert asked == [slice(4, 5)] * 2


def test_the_log_tells_what_happened(finished):
    told = events(finished[0])
    assert [line["event"] for line in told] == ["started", *["round"] * 4, "packed", "finished"]
    times = [datetime.fromisoformat(line["time"]) for line in told]
    assert times == sorted(times)
    assert [line["round"] for line in told[1:5]] == [1, 2, 3, 4]
    spent = [line["epsilon"] for line in told[1:5]]
    assert spent == sorted(spent) and spent[-1] == told[-1]["epsilon"]
    assert told[-1]["posts"] == 4
    certificate = json.loads((finished[0] / "guarantee.json").read_text())
    assert told[-1]["certificate"] == certificate["sha256"]


def test_the_log_survives_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    Log(path).open()
    with path.open("ab") as file:
        file.write(b'{"time": "2026')
    log = Log(path)
    log.open()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[k])["event"] for k in (0, 2)] == ["started", "resumed"]
    assert log.begun == json.loads(lines[0])["time"]


class Stop(BaseException):
    pass


def read_posts(folder):
    with np.load(folder / "posts.npz") as posts:
        return {name: posts[name] for name in posts.files}


STEPS = ["pack", "write_models", "drop", "shared", "metrics", "keep_certificate", "result"]


@pytest.mark.parametrize("step", STEPS)
def test_a_run_cut_off_while_it_is_kept_goes_on_to_the_same(finished, tmp_path, monkeypatch, step):
    whole, result = finished
    folder = tmp_path / "run"

    def stop(*args, **kwargs):
        raise Stop

    write = folder_module.write_atomically

    def stop_at(path, content):
        if path.name == {"shared": "shared.npz", "result": "result.json"}[step]:
            raise Stop
        write(path, content)

    if step == "pack":
        monkeypatch.setattr("coterie.privacy.transcript.shutil.rmtree", stop)
    elif step == "drop":
        monkeypatch.setattr("coterie.engine.store.Store.drop", stop)
    elif step in ("shared", "result"):
        monkeypatch.setattr(folder_module, "write_atomically", stop_at)
    else:
        monkeypatch.setattr(folder_module, "write_metrics" if step == "metrics" else step, stop)
    with pytest.raises(Stop):
        execute(PLAN, folder=folder)
    monkeypatch.undo()
    assert not (folder / "result.json").exists()
    again = execute(PLAN, folder=folder)
    assert again.summary["value"] == result.summary["value"]
    assert (folder / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    for name, leaf in stacked_models(whole).items():
        assert torch.equal(stacked_models(folder)[name], leaf)
    ours, theirs = read_posts(folder), read_posts(whole)
    assert list(ours) == list(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not (folder / "posts").exists()
    assert not list((folder / "models").glob("*.npy"))
    assert verify(folder).verified
    assert [e["event"] for e in events(folder)].count("resumed") == 1


def test_an_interrupted_run_says_so_in_its_log(tmp_path):
    def watch(run_plan, train):
        def stop(progress):
            if progress.round == 2:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        execute(PLAN, folder=tmp_path / "run", observer=watch)
    assert events(tmp_path / "run")[-1]["event"] == "interrupted"
    assert len(list((tmp_path / "run" / "posts").iterdir())) == 2
    execute(PLAN, folder=tmp_path / "run")
    kinds = [line["event"] for line in events(tmp_path / "run")]
    assert kinds[3:] == ["interrupted", "resumed", "round", "round", "packed", "finished"]
    assert verify(tmp_path / "run").verified


def test_a_run_that_fails_says_what_kind_of_error_it_was(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("client 7 has a secret")

    monkeypatch.setattr("coterie.runs.run.evaluate", broken)
    with pytest.raises(ValueError, match="secret"):
        execute(PLAN, folder=tmp_path / "run")
    last = events(tmp_path / "run")[-1]
    assert (last["event"], last["kind"]) == ("failed", "ValueError")
    assert "secret" not in (tmp_path / "run" / "log.jsonl").read_text()


def test_the_outcome_still_reads_its_posts_and_models_when_they_are_packed(finished):
    _, result = finished
    posts = result.outcome.posts
    assert [post.index for post in posts] == [0, 1, 2, 3]
    assert result.outcome.rows(np.array([0, 8]))["weight"].shape == (2, 1, 3)


def test_the_packed_posts_are_a_plain_archive(finished):
    with zipfile.ZipFile(finished[0] / "posts.npz") as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
