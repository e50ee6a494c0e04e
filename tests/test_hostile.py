"""Hostile and damaged files end in one line that names them: no traceback, no hang, no flood.

The corpus holds files that were once mishandled, found by hand or by `make fuzz`.
"""

import errno
import gzip
import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv
from safetensors.torch import load_file, save_file

from coterie.cli.main import main
from coterie.core.config import ConfigError, to_toml
from coterie.data.federated import DataError
from coterie.data.load import Source, load, load_unlabelled
from coterie.planning.plan import Plan
from coterie.runs.run import execute
from coterie.serve.export import load_client, read_clients, save_client
from coterie.serve.predict import predict_model

ROOT = Path(__file__).resolve().parent.parent
REGRESSION = Source(task="regression")
NAMES = ("=1+1", "+a", "-a", "@a", "\ta", "a=1", "-7", "b")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with rows and a small finished run on them."""
    root = tmp_path_factory.mktemp("hostile")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 2))
    table = {"client": np.repeat(NAMES, 10), "y": x @ [1.0, -1.0], "x0": x[:, 0], "x1": x[:, 1]}
    csv.write_csv(pa.table(table), root / "rows.csv")
    plan = {
        "data": {"name": str(root / "rows.csv"), "source": {"task": "regression"}},
        "method": {"kind": "pmtl"},
        "privacy": {"epsilon": 4.0},
        "rounds": 2,
        "compare_with_local": False,
        "speed": {"store": "disk"},
    }
    execute(Plan.from_table(plan), folder=root / "run")
    (root / "plan.toml").write_text(to_toml(plan))
    save_client(root / "b.safetensors", read_clients(root / "run", ["b"])[0])
    return root


def said(capsys, *line):
    """Run a command that is refused; return the one line that it prints."""
    capsys.readouterr()
    assert main([str(part) for part in line]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err


# --- exported models --------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
METADATA = {
    "no client": {"client": None},
    "no leaves": {"leaves": None},
    "leaves are no list": {"leaves": "7"},
    "leaves of another model": {"leaves": '["head.weight", "head.bias"]'},
    "scaled without moments": {"scaled": "client"},
    "model is a list": {"model": "[]"},
    "model is text": {"model": '"linear"'},
    "model of another kind": {"model": '{"kind": "mlp", "hidden": [3]}'},
    "model too large": {"model": '{"kind": "mlp", "hidden": [1000000000]}'},
    "a model that is unknown": {"model": '{"kind": "evil"}'},
    "an unknown task": {"task": "evil"},
    "another task": {"task": "multiclass"},
    "outputs": {"outputs": "three"},
    "many outputs": {"outputs": "1000000000", "task": "multiclass"},
    "shape": {"shape": "[-2]"},
    "a large shape": {"shape": "[1000000000000, 3000000]"},
    "shape is a number": {"shape": "2"},
    "columns": {"columns": '["a"]'},
    "columns of numbers": {"columns": "[1, 2]"},
    "classes": {"classes": '["a", "b"]'},
    "source": {"source": "[1]"},
    "guarantee": {"guarantee": "7"},
    "a deep guarantee": {"guarantee": DEEP},
    "a deep model": {"model": DEEP},
}


@pytest.mark.parametrize("kind", METADATA)
def test_exported_models_with_odd_metadata(made, tmp_path, capsys, kind):
    path = tmp_path / "odd.safetensors"
    rewrite(made / "b.safetensors", path, **METADATA[kind])
    err = said(capsys, "predict", path, "--data", made / "rows.csv", "--client", "b")
    assert str(path) in err


@pytest.mark.parametrize(
    "odd", [torch.zeros(1, 2, dtype=torch.int8), torch.zeros(1, 3), torch.zeros(())]
)
def test_exported_models_with_odd_tensors(made, tmp_path, odd):
    rewrite(made / "b.safetensors", tmp_path / "odd.safetensors", {"model.weight": odd})
    with pytest.raises(ValueError, match=r"odd\.safetensors: damaged"):
        load_client(tmp_path / "odd.safetensors")


def rewrite(path, out, tensors=(), **metadata):
    """Write an exported model with other tensors or metadata; None leaves a key out."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = {**file.metadata(), **metadata}
    kept = {key: value for key, value in text.items() if value is not None}
    save_file({**load_file(path), **dict(tensors)}, out, metadata=kept)


def test_a_whole_model_is_still_read(made):
    model = load_client(made / "b.safetensors")
    assert predict_model(model, str(made / "rows.csv"), all_rows=True).table().num_rows == 80


# --- plans ------------------------------------------------------------------------------------

PLANS = {
    "privacy.epsilon=1e-300": "epsilon = 1e-300",
    "rounds=1000000000": "rounds = 1000000000",
    "method.model={kind='mlp',hidden=[1000000000]}": "100,000,000",
    "method.model={kind='cnn',channels=[1000000000]}": "rows of shape",
    "method.model={kind='char_lstm',hidden=1000000000,vocabulary=5}": "100,000,000",
}


@pytest.mark.parametrize("setting", PLANS)
def test_what_no_plan_may_ask_for_is_refused_before_memory_is_taken(
    made, tmp_path, capsys, setting
):
    given = ("run", "--plan", made / "plan.toml", "--set", setting, "--out", tmp_path / "run")
    assert PLANS[setting] in said(capsys, *given, "--quiet")
    assert not (tmp_path / "run" / "plan.toml").exists()


TOML = {
    "deep lists": f"budget = {'[' * 5000}{']' * 5000}",
    "deep tables": f"{'a.' * 5000}a = 1",
    "a deep method": f"[method{'.base' * 3000}]\nkind = 'finetune'",
    "a long number": f"rounds = {'9' * 5000}",
    "empty": "",
    "not UTF-8": b"\xff\xfe",
    "an unknown key": "[privacy]\nepsilonn = 1.0",
}


@pytest.mark.parametrize("kind", TOML)
def test_plans_that_are_none_name_their_file(tmp_path, capsys, kind):
    path = tmp_path / "odd.toml"
    path.write_bytes(TOML[kind] if isinstance(TOML[kind], bytes) else TOML[kind].encode())
    with pytest.raises(ConfigError, match=r"odd\.toml: "):
        Plan.load(path)
    if kind != "empty":
        assert "odd.toml: " in said(capsys, "run", "--plan", path, "--data", "digits")


# --- data -------------------------------------------------------------------------------------


def array(header, data=b""):
    """Return an .npy of any header."""
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def npz(**members):
    """Return an npz of raw members; the others are those of whole rows."""
    whole = {"X": np.ones((4, 2)), "y": np.arange(4.0), "client": np.arange(4) % 2}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in {**whole, **members}:
            one = io.BytesIO()
            np.save(one, whole.get(name, np.zeros(1)))
            file.writestr(f"{name}.npy", members.get(name, one.getvalue()))
    return buffer.getvalue()


def header(shape, descr="'<f8'"):
    """Return the header of an array."""
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


FILES = {
    "many_rows.npz": npz(X=array(header("(1000000000000, 2)"))),
    "many_columns.npz": npz(X=array(header("(4, 1000000000000)"))),
    "negative.npz": npz(X=array(header("(4, -2)"))),
    "overflow.npz": npz(X=array(header("(4, 9223372036854775808)"))),
    "by_column.npz": npz(X=array(header("(99999999999, 2)").replace("False", "True"))),
    "many_targets.npz": npz(y=array(header("(1000000000000,)"))),
    "negative_targets.npz": npz(y=array(header("(-4,)"))),
    "half_a_header.npz": npz(y=array("{'descr': '<f8', 'shape': (4,")),
    "no_header.npz": npz(X=array("[" * 3000)),
    "odd_type.npz": npz(X=array(header("(4, 2)", "[('a', '<f8')]"), b"\x00" * 64)),
    "no_array.npz": npz(client=b"client"),
    "quote.csv": b'client,y,x0\na,1,2\na,"1\n2",3,4\n',
    **{f"empty.{end}": b"" for end in ("csv", "tsv", "parquet", "npz", "mat", "json", "arrow")},
    "empty.csv.gz": b"",
    "empty_inside.csv.gz": gzip.compress(b""),
    "newlines.csv": b"\n\n\n",
    "header_alone.csv": b"client,y,x0\n",
    "nulls.csv": b"\x00" * 100,
    "deep.json": b"[" * 200_000,
    "odd.h5": b"\x89HDF\r\n\x1a\n" + b"\x00" * 50,
    "odd.sqlite": b"SQLite format 3\x00" + b"\xff" * 100,
    "empty.sqlite": b"",
    "empty.h5": b"",
}


LABELS = ("many_targets.npz", "negative_targets.npz", "half_a_header.npz")  # not read to predict


@pytest.mark.parametrize("name", FILES)
def test_odd_files_of_data_are_named(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with pytest.raises(DataError) as caught:
        load(path, REGRESSION)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert "longer than" not in str(caught.value)
    assert str(path) in said(capsys, "data", "show", path)
    if name not in LABELS:
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            load_unlabelled(path, REGRESSION)


# --- FIFOs, sockets and devices ---------------------------------------------------------------


def special(path, kind):
    """Make a file that is none."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # the path of a socket is short
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_what_is_no_file_is_not_opened(made, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    for end in ("csv", "csv.gz", "json", "npz", "parquet", "sqlite", "h5", "mat", "arrow"):
        path = tmp_path / f"odd.{end}"
        special(path, kind)
        assert f"{path}: a FIFO, socket or device" in said(capsys, "data", "show", path)
        err = said(capsys, "predict", made / "run", "--data", path)
        assert f"{path}: a FIFO, socket or device" in err
    for end, line in {
        "toml": "run --plan odd.toml --data digits",
        "safetensors": f"predict odd.safetensors --data {made / 'rows.csv'}",
    }.items():
        special(tmp_path / f"odd.{end}", kind)
        err = said(capsys, *shlex.split(line))
        assert f"odd.{end}" in err and ("FIFO" in err or "no such file" in err)
    words = ("--text", "bag", "--features", "x0", "--vocabulary", tmp_path / "odd.csv")
    assert f"{tmp_path / 'odd.csv'}" in said(capsys, "data", "show", made / "rows.csv", *words)


def test_a_run_folder_with_a_fifo_is_refused(made, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    (run / "guarantee.json").unlink()
    os.mkfifo(run / "guarantee.json")
    data = ("--data", made / "rows.csv")
    for line in (
        ("predict", run, *data),
        ("export", run, "--client", "b", "--out", tmp_path / "m.safetensors"),
        ("onboard", run, *data, "--out", tmp_path / "new"),
        ("report", run),
        ("verify", run),
        ("run", "--resume", run),
    ):
        assert f"{run / 'guarantee.json'}: a FIFO" in said(capsys, *line)


# --- run folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", array("{'descr': '<f8', 'shape': (4,"), array(header("(-1, 2)")), b"\x93NUMPY"]
)
def test_damaged_personal_models_are_named_on_resume(made, tmp_path, capsys, content):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    for part in ("result.json", "models/clients.safetensors", "models/clients.json"):
        (run / part).unlink()
    (run / "personal").mkdir(exist_ok=True)
    (run / "personal" / "weight.npy").write_bytes(content)
    err = said(capsys, "run", "--resume", run, "--quiet")
    assert f"{run / 'personal' / 'weight.npy'}: damaged" in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("models/clients.json", DEEP.encode()),
        ("data.json", DEEP.encode()),
        ("shared.npz", b""),
        ("posts.npz", npz(y=array("{'descr': '<f8', (4,"))),
    ],
)
def test_damaged_files_of_a_run_end_in_one_line(made, tmp_path, capsys, file, content):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    (run / file).write_bytes(content)
    data = ("--data", made / "rows.csv")
    for line in (
        ("predict", run, *data),
        ("export", run, "--client", "b", "--out", tmp_path / "b.safetensors"),
        ("onboard", run, *data, "--out", tmp_path / "new"),
        ("run", "--resume", run, "--quiet"),
    ):
        if "--resume" in line:
            (run / "result.json").unlink()
        capsys.readouterr()
        status, err = main([str(part) for part in line]), capsys.readouterr().err
        assert "Traceback" not in err and (status == 0 or str(run) in err), err


def test_names_in_csv_are_no_formulas(made, tmp_path, capsys):
    out = tmp_path / "p.csv"
    line = ("predict", made / "run", "--data", made / "rows.csv")
    assert main([str(part) for part in (*line, "--out", out)]) == 0
    found = set(csv.read_csv(out)["client"].to_pylist())
    assert found == {"'=1+1", "'+a", "'-a", "'@a", "a", "a=1", "-7", "b"}
    capsys.readouterr()
    assert main([str(part) for part in line]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main([str(part) for part in (*line, "--out", tmp_path / "p.parquet")]) == 0
    kept = pa.parquet.read_table(tmp_path / "p.parquet")["client"].to_pylist()
    assert set(kept) == {name.strip() for name in NAMES}  # values for programs are as they are


@pytest.mark.full
@pytest.mark.parametrize("epsilon", ["4", "2,4"])
def test_a_report_that_cannot_be_written_is_not_announced(
    made, tmp_path, monkeypatch, capsys, epsilon
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("coterie.cli.train.write_report", full)
    out = tmp_path / "run"
    line = f"run --plan {made / 'plan.toml'} --epsilon {epsilon} --quiet --out {out}"
    for again in (line, f"run --resume {out} --quiet"):
        assert main(shlex.split(again)) == 2
        printed = capsys.readouterr()
        assert f"run folder {out}\n" in printed.out and "report.html" not in printed.out
        assert f"coterie report {out}" in printed.err
    monkeypatch.undo()
    assert main(shlex.split(f"run --resume {out} --quiet")) == 0
    assert f"report {out / 'report.html'}" in capsys.readouterr().out


def test_damaged_members_are_named(made, tmp_path, capsys):
    for text in ("", "[]", '{"a": 1}', '{"a": {"method": 3}}', DEEP):
        (tmp_path / "members.json").write_text(text)
        assert "members.json" in said(capsys, "run", "--resume", tmp_path, "--quiet")


# --- mutants ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_few_mutants_of_every_reader():
    """Run the first mutants of `make fuzz`."""
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--mutants", "46"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
