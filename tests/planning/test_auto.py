"""Auto: what is picked, why, and that nothing else is ever run in its name."""

import json
import math
import re
import shlex
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from numba.core.event import install_listener, trigger_event
from torch import nn

import coterie as ct
from coterie.cli import watch
from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.data.federated import Spec
from coterie.data.synthetic import synthetic
from coterie.methods.auto import Auto
from coterie.methods.base import choices, registered
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.models import CNN, MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import choose, default_method, resolve
from coterie.tune.tune import tune

SMALL = "--data synthetic --option clients=12 --option rows=8 --option features=3"
RUN = f"run --anyway {SMALL}"
SPEC = Spec((9,), 1, "regression", 550)
BUDGET = Privacy(epsilon=1.0)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.cli.train.write_report", lambda folders, out: out)


@pytest.fixture
def coterie(capsys):
    def call(line):
        capsys.readouterr()
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def table(**more):
    data = {"name": "synthetic", "options": {"clients": 12, "rows": 8, "features": 3}}
    return {"data": data, "method": {"kind": "auto"}, "privacy": {"epsilon": 2.0}, **more}


# --- what is picked ------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_linear_models_get_pfeb_whatever_the_task(task):
    outputs = 4 if task.startswith("multi") else 1
    spec = Spec((9,), outputs, task, 550)
    for model in (Linear(), Linear(bias=False)):
        method, why = choose(Auto(model=model), spec, BUDGET)
        assert method == registered()["pfeb"](model=model) == default_method(Auto(model=model))
        numbers = outputs * (9 + model.bias)
        assert why.startswith("pfeb, because the model is linear") and f"({numbers} " in why


@pytest.mark.parametrize("noise", ["local", "laplace", "local_paper"])
def test_noise_that_knows_one_clip_gets_pmtl_and_a_reason(noise):
    privacy = Privacy(epsilon=1.0, noise=noise)
    method, why = choose(Auto(), SPEC, privacy)
    assert method == PMTL(model=Linear()) == default_method(Auto(), privacy)
    assert f"{noise} noise is for contributions under one clip" in why and "pfeb" in why
    plan = ct.plan_for(SPEC, privacy)  # and it can be made, for every round
    assert len(plan.mechanisms(SPEC.clients)) == plan.rounds
    with pytest.raises(
        ValueError, match=r"use gaussian noise, or a method under one clip \(pmtl\)"
    ):
        plan = ct.plan_for(SPEC, privacy, method=registered()["pfeb"]())
        plan.mechanisms(SPEC.clients)


def test_networks_share_their_lower_layers_if_the_whole_is_too_large():
    model, few = MLP(hidden=(5,)), Privacy(epsilon=0.05)
    method, why = choose(Auto(model=model), SPEC, few)
    assert method == DPFedMTL(model=model) and default_method(Auto(model=model)) is None
    assert "50 of 56 parameters" in why  # 9 * 5 + 5 below, 5 + 1 in the head
    flat, why = choose(Auto(model=nn.Linear(9, 1)), replace(SPEC, clients=20), few)
    assert isinstance(flat, PMTL) and "all 10 parameters are released" in why
    images = Spec((1, 28, 28), 10, "multiclass", 100)
    assert isinstance(choose(Auto(model=CNN()), images, BUDGET)[0], DPFedMTL)


def test_networks_that_the_budget_supports_are_one_model_with_finetuning():
    """From half an affordable round of all 56 parameters on (67 clients), of classes a seventh."""
    model = MLP(hidden=(5,))
    whole = Finetune(base=FedAvg(model=model))
    method, why = choose(Auto(model=model), SPEC, BUDGET)
    assert method == whole and "supports all of its 56 parameters" in why
    classes = replace(SPEC, task="binary")
    for spec, clients, joined in ((SPEC, 64, False), (SPEC, 68, True), (classes, 34, False),
                                  (classes, 38, True)):  # fmt: skip
        found = choose(Auto(model=model), replace(spec, clients=clients), BUDGET)[0]
        assert isinstance(found, Finetune) is joined, (spec.task, clients)
    assert choose(Auto(model=model), SPEC, Privacy(epsilon=math.inf))[0] == whole
    tuned = ct.plan_for(SPEC, BUDGET, method=Finetune(base=Auto(model=model), how="kl")).method
    assert tuned == Finetune(base=FedAvg(model=model), how="kl")


def test_public_features_are_spoken_of_where_networks_post_too_much():
    model, spec = MLP(hidden=(64,)), Spec((64,), 10, "multiclass", 105)
    _, why = choose(Auto(model=model), spec, BUDGET)
    for part in ("supports 71 ", "public features", "may have 1,42", "releases 10 per"):
        assert part in why
    for enough in (Privacy(epsilon=math.inf), Privacy(noise_multiplier=0.01)):
        assert "public features" not in choose(Auto(model=model), spec, enough)[1]
    many = replace(spec, clients=10_000)
    assert "public features" not in choose(Auto(model=model), many, BUDGET)[1]


def test_why_is_the_same_sentence_for_the_same_public_facts():
    one, two = (choose(Auto(), SPEC, BUDGET) for _ in range(2))
    assert one == two


# --- plans ---------------------------------------------------------------------------------------


def test_a_resolved_plan_names_the_method_and_keeps_why():
    plan = resolve(Plan.from_table(table()), SPEC)
    assert plan.method.kind == "pfeb" and plan.chosen.startswith("pfeb, because")
    again = resolve(plan, SPEC)
    assert again == plan  # resolving what is resolved changes nothing
    named = resolve(Plan.from_table(table(method={"kind": "pmtl"})), SPEC)
    assert named.chosen == ""


def test_finetuning_goes_around_what_is_picked():
    method = {"kind": "finetune", "how": "mean", "base": {"kind": "auto"}}
    plan = resolve(Plan.from_table(table(method=method)), SPEC)
    assert plan.method.kind == "finetune" and plan.method.base.kind == "pfeb"
    assert plan.chosen.startswith("pfeb")


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "auto", "lam": 3.0},
        {"kind": "finetune", "how": "mean", "base": {"kind": "auto", "lam": 3.0}},
    ],
)
def test_settings_of_no_method_are_refused_in_so_many_words(method):
    with pytest.raises(ConfigError, match=r"method.lam was set, but no method is named.*--method"):
        Plan.from_table(table(method=method))


def test_auto_is_a_choice_but_no_registered_method():
    assert "auto" in choices() and "auto" not in registered()
    assert [setting.name for setting in fields(ct.Auto)] == ["model"]


def test_simulating_it_is_refused_and_plan_for_is_the_way():
    data = synthetic("mean", clients=6, rows=5, features=3, seed=0).data
    with pytest.raises(ValueError, match="plan_for"):
        ct.simulate(Plan(method=Auto(), privacy=BUDGET, simulation_seed=0), data)
    plan = ct.plan_for(data.spec, Privacy(epsilon=1.0), simulation_seed=0)
    assert plan.method.kind == "pfeb" and plan.rounds == 3
    outcome = ct.simulate(plan, data)
    assert len(outcome.posts) == 3 and outcome.guarantee.epsilon <= 1


# --- the command line ----------------------------------------------------------------------------


def test_run_says_the_verdict_first_and_goes_on(coterie):
    code, out, err = coterie(f"{RUN} --epsilon 1 --json")
    found = json.loads(out)
    assert code == 0 and found["method"] == "pfeb"
    first = err.splitlines()[0]
    assert first.startswith(
        "Verdict: learn alone. With 12 clients, epsilon 1 supports models with up to 0.93 shared"
    )
    assert err.index("Verdict:") < err.index("Auto chose pfeb, because") < err.index("loss")
    assert "  More clients:" in err and "scoring" not in err
    assert found["verdict"]["verdict"] == "learn alone" and found["verdict"]["numbers"] == 4
    assert found["chosen"].startswith("pfeb, because")
    assert Path(found["run"]).name.startswith("synthetic-pfeb-")
    kept = json.loads(Path(found["run"], "result.json").read_text())
    assert kept["verdict"] == found["verdict"] and kept["chosen"] == found["chosen"]
    plan = Plan.load(Path(found["run"], "plan.toml"))
    assert plan.method.kind == "pfeb" and plan.chosen == found["chosen"]


@pytest.mark.full
def test_quiet_runs_say_it_with_the_answer(coterie):
    code, out, err = coterie(f"{RUN} --rounds 1 --quiet --out here")
    assert code == 0 and err == ""
    assert "Verdict: learn alone. With" in out and out.count("Auto chose pfeb") == 1


def test_runs_without_a_verdict_have_none(coterie):
    _, out, err = coterie(f"{RUN} --method local --json")
    assert json.loads(out)["verdict"] is None and json.loads(out)["chosen"] == ""
    assert "verdict" not in err.lower() and "scoring" not in err


@pytest.mark.full
def test_what_is_waited_for_is_said_unless_nobody_listens(coterie):
    line = f"{RUN} --rounds 1"
    _, out, err = coterie(line)
    assert "scoring local ..." in err
    for said in ("Verdict: ", "Auto chose", "Clip: "):
        assert (out + err).count(said) == 1
    assert err.index("Verdict") < err.index("scoring local")
    _, _, err = coterie(f"{line} --no-local --holdout-clients 2")
    assert "scoring held-out clients ..." in err and "scoring local" not in err


@pytest.mark.parametrize(("waits", "said"), [((0.0, 0.0), 0), ((0.3,), 1), ((0.06, 0.06), 1)])
def test_compiling_is_said_once_and_only_if_it_takes_long(monkeypatch, waits, said):
    monkeypatch.setattr(watch, "_PATIENCE", 0.1)
    heard = []
    listener = watch._Compiling(heard.append)
    for wait in (*waits, *waits):
        with install_listener("numba:compile", listener):
            with trigger_event("numba:compile"), trigger_event("numba:compile"):
                time.sleep(wait)
            time.sleep(0.12)  # other work is not compiling
    assert len(heard) == said and all("compiling solvers, once" in line for line in heard)


@pytest.mark.full
def test_sweeps_say_a_line_for_each_epsilon(coterie):
    code, _, err = coterie(f"{RUN} --epsilon 1,8 --rounds 1 --out sweep")
    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("Verdict")]
    assert [re.search(r"epsilon (\d)", line)[1] for line in lines] == ["1", "8"]
    assert "More clients" not in err
    kinds = {name: Plan.load(Path("sweep", name, "plan.toml")).method.kind for name in
             ("local", "epsilon-1", "epsilon-8", "not-private")}  # fmt: skip
    assert kinds["epsilon-1"] == kinds["epsilon-8"] == "pfeb" and kinds["local"] != "pfeb"


@pytest.mark.full
def test_models_and_finetuning_go_with_it(coterie):
    line = "run --anyway --data digits --option clients=10 --model mlp"
    line += " --set method.model.hidden=[8]"
    code, out, err = coterie(f"{line} --rounds 1 --no-local --quiet --json")
    assert code == 0, err
    found = json.loads(out)
    assert found["method"] == "dpfedmtl" and "-auto-" in found["run"]
    code, out, err = coterie(f"{RUN} --finetune mean --rounds 1 --quiet --json")
    assert code == 0, err
    assert json.loads(out)["method"] == "pfeb+mean"


def test_settings_without_a_method_end_in_one_line(coterie):
    code, out, err = coterie(f"{RUN} --set method.lam=3")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert "method.lam was set, but no method is named" in err and "--method" in err
    assert not Path("runs").exists()


@pytest.mark.full
def test_tuning_with_it_chooses_a_plan_that_says_what_was_picked():
    found = tune(table(), {"privacy.clip": [0.5, 1.0]}, folds=2)
    assert found.plan.method.kind == "pfeb" and found.plan.chosen.startswith("pfeb")
    with pytest.raises(ConfigError, match="no method is named"):
        tune(table(), {"method.lam": [0.1, 1.0]}, folds=2)
    both = tune(table(), {"method.kind": ["pmtl", "auto"]}, folds=2)
    assert not any(trial.refused for trial in both.table)


def test_methods_lists_it_first(coterie):
    assert coterie("methods")[1].startswith("auto: ")
    assert "    method.model = " in coterie("methods auto")[1]
    found = json.loads(coterie("methods --json")[1])
    assert found["auto"]["settings"] == {"model": {"kind": "linear", "bias": True}}


@pytest.mark.full
def test_rows_that_are_refused_leave_no_folder(coterie):
    rows = "".join(f"c{i % 9},{i * 1000},{i % 7}\n" for i in range(90))
    Path("big.csv").write_text("client,x,y\n" + rows)
    code, out, err = coterie(
        "run --anyway --data big.csv --task regression --quiet --json --out here"
    )
    assert (code, out) == (2, "") and "--standardise" in err
    assert not Path("here").exists()
    line = "run --anyway --data big.csv --task regression --standardise client --quiet --out here"
    assert coterie(line)[0] == 0
