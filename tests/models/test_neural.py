"""Networks from the command line, from plan files and in examples: what a user types."""

import importlib
import json
import math
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from coterie.cli.main import main
from coterie.data.datasets import open_named
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve
from coterie.privacy.sampling import Poisson
from coterie.solvers.sgd import SGD

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
DIGITS = "--data digits --simulation-seed 0 --quiet --json --no-local"


class Net(nn.Module):
    """A user's module, found by its name."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1))
        self.top = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.top(self.body(x.flatten(1)))


@pytest.fixture(autouse=True)
def no_page(request, monkeypatch):
    """Pages take most of the time of such short runs: those of finetuned runs are written."""
    if request.function is not test_finetuning_by_flag:
        monkeypatch.setattr("coterie.cli.train.write_report", lambda *_: None)


@pytest.fixture
def run(capsys, tmp_path):
    def call(line, code=0):
        capsys.readouterr()
        out = [] if "--out" in line or "--resume" in line else ["--out", str(tmp_path / "run")]
        found = main([*shlex.split(line), *out])
        said = capsys.readouterr()
        assert found == code, said.err
        return json.loads(said.out.splitlines()[-1]) if code == 0 else said.err

    return call


@pytest.mark.parametrize("how", ["plain", "kl"])
def test_finetuning_by_flag(run, how, tmp_path):
    found = run(
        f"run {DIGITS} --method dpfedmtl --epsilon 4 --rounds 2 --finetune {how} "
        "--set finetune.lam=0.5 --set method.model.hidden=[8]"
    )
    assert found["method"] == f"dpfedmtl+{how}" and found["epsilon"] <= 4
    plan = tomllib.loads((tmp_path / "run" / "plan.toml").read_text())
    assert plan["method"]["kind"] == "finetune" and plan["method"]["lam"] == 0.5
    assert plan["method"]["base"]["model"]["hidden"] == [8]
    again = run(f"run --resume {tmp_path / 'run'} --quiet --json")
    assert again["value"] == found["value"]


def test_a_plan_says_whether_it_can_learn(run, tmp_path):
    found = run(f"run {DIGITS} --method fedavg --model mlp --epsilon 1 --rounds 5")
    numbers = 64 * 64 + 64 + 64 * 10 + 10
    wanted = math.sqrt(numbers) * found["noise_multiplier"] / 30
    assert found["relative_error"] == pytest.approx(wanted)
    assert any("larger than any signal" in line for line in found["explained"])
    free = run(
        f"run {DIGITS} --method fedavg --model mlp --epsilon inf --rounds 2 --out {tmp_path}/free"
    )
    assert free["relative_error"] is None


def test_rounds_of_networks_follow_from_the_budget():
    spec, method = open_named("digits").spec, FedAvg(model=MLP())
    rounds = [
        resolve(Plan(method=method, privacy=Privacy(epsilon=epsilon)), spec).rounds
        for epsilon in (0.1, 2, 20, math.inf)
    ]
    assert rounds[0] == 3 and rounds[-1] == 50
    assert rounds == sorted(rounds) and len(set(rounds)) > 2


def test_noise_of_clients_own_by_flag(run):
    found = run(f"run {DIGITS} --method dpfedmtl --epsilon 6 --rounds 2 --noise local --cohort 15")
    assert found["views"]["server"] <= 6 and found["epsilon"] <= 6


def test_newcomers_by_flag(run):
    found = run(f"run {DIGITS} --method dpfedmtl --epsilon 6 --rounds 2 --newcomers 0.2")
    assert found["clients"] == 24 and found["newcomers"]["clients"] == 6


def test_precision_and_block_by_flag(run):
    found = run(
        f"run {DIGITS} --method pmtl --model mlp --epsilon 6 --rounds 2 --precision bfloat16"
    )
    assert 0 < found["value"] <= 1


def test_a_module_in_a_plan_file(run, tmp_path, monkeypatch):
    """A user's module by its import path, in the current folder."""
    monkeypatch.chdir(tmp_path)
    away = [path for path in sys.path if path not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", away)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef make(hidden=8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), "
        "nn.Linear(hidden, 10))\n"
    )
    (tmp_path / "plan.toml").write_text(
        'rounds = 2\nsimulation_seed = 0\n[data]\nname = "digits"\n[method]\nkind = "dpfedmtl"\n'
        '[method.model]\nkind = "module"\nmake = "nets:make"\n[method.model.options]\nhidden = 6\n'
        "[privacy]\nepsilon = 5.0\n"
    )
    found = run("run --plan plan.toml --out out --quiet --json --no-local")
    assert found["epsilon"] <= 5
    sys.modules.pop("nets")
    with np.load(tmp_path / "out" / "posts.npz") as posted:
        assert sorted(posted.files)[:2] == ["000000.1.bias", "000000.1.weight"]


def test_a_module_that_changed_is_noticed(tmp_path, monkeypatch, capsys):
    """The plan names a file; the run goes on, and is joined, only with what it was begun with."""
    monkeypatch.chdir(tmp_path)
    net = tmp_path / "changing.py"
    text = (
        "from torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))\n"
    )
    net.write_text(text)
    line = f"run {DIGITS} --method fedavg --model module --epsilon 5 --rounds 2 --out run"
    assert main([*shlex.split(line), "--set", "method.model.make=changing:make"]) == 0
    sys.modules.pop("changing")
    importlib.invalidate_caches()
    net.write_text(text.replace("nn.ReLU()", "nn.Tanh()") + "# another size\n")
    for again in (
        "join run --data digits --out new --trust",
        "run --resume run --quiet --json --trust",
    ):
        assert main(shlex.split(again)) == 2
        (tmp_path / "run" / "result.json").unlink(missing_ok=True)  # as if it had been stopped
        assert "has changed since this run began" in capsys.readouterr().err
    sys.modules.pop("changing")


def test_modules_by_class_instance_and_function():
    data = open_named("digits")
    train, test = data.split(0.25, 0)

    def function():
        return Net(8)

    torch.manual_seed(0)
    for model in (Net, Net(8), function):
        method = DPFedMTL(model=model, head="top", sgd=SGD(lr=0.2, epochs=3))
        plan = Plan(method=method, privacy=Privacy(epsilon=math.inf), rounds=5, simulation_seed=0)
        outcome = simulate(plan, train)
        assert set(outcome.posts[0].value) == {"body.0.weight", "body.0.bias"}
        assert evaluate(method.model, outcome.rows, test).value > 0.5


def test_outputs_that_do_not_fit_the_classes():
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    with pytest.raises(ValueError, match=r"7.*10|10.*7"):
        simulate(
            Plan(method=FedAvg(model=wrong), privacy=Privacy(epsilon=1.0), rounds=1),
            open_named("digits"),
        )


def test_the_example_of_an_own_model_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "epsilon = " in told
    assert float(told.rsplit("accuracy", 1)[1]) > 0.5


@pytest.mark.slow  # a program of benchmarks
def test_the_study_in_small():
    """The FEMNIST study on digits: what docs/methods/neural.md says of it holds here too.

    Noise drowns a shared network at small budgets; finetuned and personal models carry on.
    """
    train, test = open_named("digits").split(0.25, 0)
    model, sgd = MLP(hidden=(16,)), SGD(lr=0.1, steps=8)

    def score(method, epsilon, ways=("plain",)):
        plan = Plan(
            method=method,
            privacy=Privacy(epsilon=epsilon),
            sampler=Poisson(15.0),
            rounds=10 if epsilon < math.inf else 60,
            simulation_seed=0,
        )
        outcome = simulate(plan, train)
        tuned = {
            way: evaluate(
                model,
                outcome.finetune(Finetune(how=way, lam=0.1, sgd=SGD(lr=0.1, epochs=30)), train),
                test,
            ).value
            for way in ways
        }
        return evaluate(model, outcome.rows, test).value, tuned

    alone, _ = score(Local(model=model, lam=0.0, sgd=SGD(lr=0.1, epochs=60)), math.inf, ())
    for method in (
        FedAvg(model=model, sgd=sgd),
        FedAvg(model=model, sgd=sgd, prox=0.1),
        PMTL(model=model, sgd=sgd, lam=0.1, last_epochs=30),
        DPFedMTL(model=model, sgd=sgd, head_epochs=30),
    ):
        drowned, carried = score(method, 0.8)
        if isinstance(method, FedAvg):
            assert drowned < 0.5 < alone
        assert carried["plain"] > drowned - 0.02
        assert carried["plain"] > alone - 0.2
        free, tuned = score(method, math.inf, ("plain", "mean", "kl", "ewc"))
        assert max(free, *tuned.values()) > drowned + 0.05
        assert min(tuned.values()) > 0.5


def test_flags_for_finetuning_lie_over_a_plan(run, tmp_path):
    line = f"run {DIGITS} --method fedavg --model mlp --epsilon 4 --rounds 1"
    assert "give --finetune" in run(f"{line} --set finetune.lam=1 --out {tmp_path}/a", code=2)
    run(f"{line} --finetune mean --out {tmp_path}/b")
    again = run(
        f"run --plan {tmp_path}/b/plan.toml --finetune ewc --quiet --json --out {tmp_path}/c"
    )
    assert again["method"] == "fedavg+ewc"


def test_tuning_of_finetuning_speaks_as_set_does(capsys, tmp_path):
    out = tmp_path / "tuned.toml"
    line = (
        "tune --data digits --clients 6 --method pmtl --model mlp --finetune mean --epsilon 4 "
        "--rounds 1 --folds 2 --public --grid finetune.lam=0.1,1 --grid method.lam=0.2,0.4 --quiet"
    )
    assert main([*shlex.split(line), "--out", str(out)]) == 0, capsys.readouterr().err
    method = tomllib.loads(out.read_text())["method"]
    assert method["lam"] in (0.1, 1) and method["base"]["lam"] in (0.2, 0.4)


def test_budgets_of_noise_that_clients_add(capsys):
    common = "--clients 100 --cohort 20 --rounds 10 --noise local --json"
    assert main(shlex.split(f"calibrate {common} --epsilon 8")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 8 and found["views"]["server"] == found["views"]["other_clients"]
    assert 0 < found["epsilon_per_participation"] < found["epsilon"]
    noise = found["noise_multiplier"]
    assert main(shlex.split(f"account {common} --noise-multiplier {noise}")) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(found["epsilon"])
    assert main(shlex.split(f"calibrate {common.replace('local', 'gaussian')} --epsilon 8")) == 0
    assert json.loads(capsys.readouterr().out)["noise_multiplier"] < noise
