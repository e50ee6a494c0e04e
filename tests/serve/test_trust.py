"""Code that a file of others names runs only with --trust, and is a maker of modules at most."""

import contextlib
import json
import shlex
import shutil
import sys

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.core.config import ConfigError, read_toml, refuse_code, to_toml
from coterie.serve.export import read_clients
from coterie.serve.onboard import choose, onboard
from coterie.serve.predict import predict_run

NETS = """
import sys
from pathlib import Path
from torch import nn

Path("imported").touch()

def make(spec):
    Path("called").touch()
    return nn.Linear(spec.features, spec.outputs)

def leaves(spec):
    sys.exit(0)

class Other:
    def __init__(self, spec):
        Path("called").touch()
"""
RUN = "run --data rows.npz --task regression --epsilon 8 --rounds 2 --no-local --quiet --no-history"
OWN = "--method fedavg --model trusted_nets:make"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with rows, a user's module and a run of it, begun by his own command."""
    root = tmp_path_factory.mktemp("trust")
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(40, 2)), np.arange(40) % 5
    np.savez(root / "rows.npz", X=x, y=x @ [1.0, -1.0], client=client)
    (root / "trusted_nets.py").write_text(NETS)
    with contextlib.chdir(root):
        assert main(shlex.split(f"{RUN} {OWN} --out run")) == 0
        forget(root)
    return root


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """Return the current folder, a copy of it."""
    place = tmp_path / "here"
    shutil.copytree(made, place)
    monkeypatch.chdir(place)
    yield place
    forget(place)


def said(capsys, line, status=2):
    """Run a command; return what it printed to stderr, after checking that it is one line."""
    assert main(shlex.split(line)) == status
    err = capsys.readouterr().err
    assert status != 2 or (err.count("\n") == 1 and "Traceback" not in err), err
    return err


def forget(place):
    """Forget the module and the marks of its code."""
    sys.modules.pop("trusted_nets", None)
    for mark in ("imported", "called"):
        (place / mark).unlink(missing_ok=True)


COMMANDS = (
    "predict run --data rows.npz",
    "export run --client 1 --out m.safetensors",
    "onboard run --data rows.npz --out new",
    "join run --data rows.npz --out new",
    "run --resume run --quiet",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_run_that_names_code_needs_trust(place, capsys, line):
    if "--resume" in line:
        (place / "run" / "result.json").unlink()
    err = said(capsys, line)
    assert "run/plan.toml" in err and "'trusted_nets:make'" in err and "--trust" in err
    assert not (place / "imported").exists() and not (place / "called").exists()
    assert said(capsys, f"{line} --trust", 0) == "" and (place / "imported").exists()


def tamper(path, model):
    """Write another model into a plan."""
    table = read_toml(path)
    table["method"] |= {"kind": "fedavg", "model": {"kind": "module", **model}}
    path.write_text(to_toml(table))


SYSTEM = {"make": "os:system", "options": {"command": "touch called"}}
REFUSED = {
    "os:system": SYSTEM,
    "subprocess:Popen": {"make": "subprocess:Popen", "options": {"args": ["touch", "called"]}},
    "trusted_nets:Other": {"make": "trusted_nets:Other"},
    "sys:exit": {"make": "sys:exit"},
    "trusted_nets:leaves": {"make": "trusted_nets:leaves"},
    "loss": {"make": "trusted_nets:make", "loss": "os:system"},
    "trusted_nets": {"make": "trusted_nets"},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_makes_no_module_is_refused_even_if_trusted(place, capsys, kind):
    tamper(place / "run" / "plan.toml", REFUSED[kind])
    for line in (COMMANDS[0], COMMANDS[2]):
        err = said(capsys, f"{line} --trust")
        assert "make = " in err or "loss = " in err
        assert not (place / "called").exists()
    said(capsys, "run --plan run/plan.toml --out own")  # a plan of one's own as well
    assert not (place / "called").exists() and not (place / "own" / "plan.toml").exists()


def test_python_functions_that_open_runs_take_trust(place):
    folder = place / "run"
    calls = (
        lambda **trust: predict_run(folder, "rows.npz", **trust),
        lambda **trust: read_clients(folder, ["1"], **trust),
        lambda **trust: onboard(folder, choose(folder, {"name": "rows.npz"}), **trust),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"plan\.toml: it names code.*trust=True"):
            call()
        assert not (place / "imported").exists()
    assert all(call(trust=True) for call in calls)


@pytest.mark.full
def test_runs_of_several_epsilons_resume_by_the_same_rule(place, capsys):
    line = RUN.replace("--epsilon 8", "--epsilon 4,8")
    assert main(shlex.split(f"{line} {OWN} --out runs")) == 0
    forget(place)
    (place / "runs" / "epsilon-8" / "result.json").unlink()
    capsys.readouterr()
    err = said(capsys, "run --resume runs --quiet")
    assert "runs/members.json" in err and "--trust" in err and not (place / "imported").exists()
    assert main(shlex.split("run --resume runs --quiet --trust")) == 0


@pytest.mark.full
def test_comparisons_follow_the_same_rule(place, capsys):
    line = "compare --data rows.npz --task regression --methods fedavg --epsilons 8 --seeds 1"
    own = OWN.removeprefix("--method fedavg ")
    assert main(shlex.split(f"{line} {own} --rounds 2 --workers 0 --quiet --out all")) == 0
    forget(place)
    for again in ("compare --resume all --workers 0 --quiet", "report all"):
        err = said(capsys, again)
        assert "all/" in err and "--trust" in err and not (place / "imported").exists()
        assert main(shlex.split(f"{again} --trust")) == 0
        forget(place)
        capsys.readouterr()


def test_every_name_of_code_is_seen_and_data_is_none(tmp_path):
    deep = {"a": "pkg.mod:fn"}
    for _ in range(5000):
        deep = {"a": [deep]}
    for table in (deep, {"method": {"split": "a:b"}}, {"x": ["é.b:c.d"]}):
        with pytest.raises(ConfigError, match="names code"):
            refuse_code(table, tmp_path)
    plain = {"data": {"name": "synthetic:linear"}, "speed": {"device": "cuda:0"}, "chosen": "a: b"}
    refuse_code(json.loads(json.dumps(plain)), tmp_path)
