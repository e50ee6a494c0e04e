"""The command line as a contract: what is printed where, the exit status, and what a run leaves.

Commands run in this process through `main`, in an empty working folder; a few run as processes of
their own, where streams or imports matter.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import sparse

from coterie.cli.main import main
from coterie.core.config import to_table, to_toml
from coterie.engine.models import stacked_models
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.runs.run import execute

SMALL = "--data synthetic --option clients=12 --option rows=8 --option features=3"
RUN = f"run --anyway {SMALL}"
PLAN_205 = "--clients 205 --cohort 100 --rounds 1000 --delta 0.0048780487"
PROMISED = {
    "method", "data", "clients", "rounds", "epsilon", "delta", "relation", "view", "metric",
    "value", "standard_error", "share_better_than_local", "seconds", "run",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return strict(self.out)


def strict(text):
    """Read exactly one JSON value without NaN or Infinity, which JSON does not have."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _without_pages(request):
    """Spare the runs their HTML page, which takes most of a small run's time."""
    if "pages" not in request.fixturenames:
        request.getfixturevalue("no_pages")


@pytest.fixture
def pages():
    """Ask for the runs' pages."""


@pytest.fixture
def coterie(capsys):
    def call(line, *more):
        capsys.readouterr()
        try:
            code = main([*shlex.split(line), *map(str, more)])
        except SystemExit as stop:
            code = stop.code
        return Finished(code, *capsys.readouterr())

    return call


def process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


# --- run --json ----------------------------------------------------------------------------------


def test_run_ends_with_one_json_object_and_keeps_progress_off_stdout(coterie):
    done = coterie(f"{RUN} --method pmtl --epsilon 2 --rounds 2 --json")
    assert done.code == 0
    assert len(done.out.splitlines()) == 1 and done.out.endswith("\n")
    assert "epsilon so far" in done.err and "epsilon so far" not in done.out
    found = done.json
    assert found.keys() >= PROMISED
    assert found["method"] == "pmtl" and found["data"] == "synthetic"
    assert found["clients"] == 12 and found["rounds"] == 2
    assert found["epsilon"] == pytest.approx(2, rel=1e-3) and found["epsilon"] <= 2
    assert found["delta"] == 1e-5 and found["relation"] == "zero_out"
    assert found["metric"] == "nmse" and found["value"] > 0 and found["standard_error"] > 0
    assert 0 <= found["share_better_than_local"] <= 1
    assert found["seconds"] > 0
    assert Path(found["run"], "result.json").exists()


def test_without_json_a_table_and_the_guarantee_in_words(coterie):
    done = coterie(f"{RUN} --rounds 1 --quiet --out here")
    assert done.code == 0 and done.err == ""
    for told in ("pfeb", "better", "Protected: one client", "run folder here"):
        assert told in done.out


def test_an_infinite_epsilon_is_the_text_inf(coterie, pages, no_charts):
    found = coterie(f"{RUN} --epsilon inf --rounds 1 --quiet --json --out bare").json
    assert found["epsilon"] == "inf" and float(found["epsilon"]) == math.inf
    assert found["noise_multiplier"] is None and found["clip"] is None
    for name in ("result.json", "guarantee.json"):
        assert strict(Path("bare", name).read_text())["epsilon"] == "inf"
    assert "NOT PRIVATE" in Path("bare/report.html").read_text()
    assert "NOT PRIVATE" in coterie("run --resume bare").out


def test_nothing_posted_costs_nothing_and_nobody_is_better_off_alone_than_alone(coterie):
    found = coterie(f"{RUN} --method local --quiet --json").json
    assert found["epsilon"] == 0 and found["rounds"] == 0
    assert found["value"] == found["local_value"]
    assert found["share_better_than_local"] == 0.0


def test_scores_that_do_not_exist_are_null_and_dashes_in_the_table(coterie):
    # One row a client: it is kept for training, so there is nothing to test on.
    found = coterie(f"{RUN} --option rows=1 --rounds 1 --quiet --json --out one").json
    assert found["value"] is None and found["standard_error"] is None
    assert found["share_better_than_local"] is None
    told = coterie("run --resume one")
    assert told.code == 0 and "None" not in told.out


def test_no_local_leaves_the_comparison_out(coterie):
    found = coterie(f"{RUN} --rounds 1 --no-local --quiet --json --out alone").json
    assert found["share_better_than_local"] is None and found["local_value"] is None
    assert "error_alone" not in pq.read_table("alone/metrics.parquet").column_names


@pytest.mark.parametrize(
    ("sampling", "relation"),
    [
        ("--sampling poisson", "zero_out"),
        ("--cohort 5", "replace"),
        ("--cohort 5 --cohort-visible", "zero_out"),
        ("--sampling everyone", "replace"),
        ("--sampling fixed --cohort 5", "zero_out"),
        ("--sampling fixed --cohort 5", "replace"),
        ("--sampling fixed --cohort 5 --cohort-visible", "zero_out"),
    ],
)
def test_every_sampling_and_relation(coterie, sampling, relation):
    done = coterie(
        f"{RUN} --epsilon 1 --rounds 2 --no-local --quiet --json {sampling} "
        f"--relation {relation} --out run"
    )
    if sampling == "--sampling fixed --cohort 5" and relation == "zero_out":
        assert done.code == 2 and "replace" in done.err and not Path("run").exists()
        return
    assert done.code == 0, done.err
    assert done.json["relation"] == relation
    assert 0.999 <= done.json["epsilon"] <= 1
    stated = strict(Path("run/guarantee.json").read_text())
    assert stated["cohort"] == ("visible" if "visible" in sampling else "hidden")
    assert ("coalition_of_all_others" in stated["views"]) == ("fixed" in sampling)
    assert stated["views"]["server"] == "inf"
    if "fixed" in sampling and "visible" not in sampling:
        views = done.json["views"]
        assert views["coalition_of_all_others"] == done.json["epsilon"] > views["outsider"]
        told = coterie("run --resume run").out
        assert "know from their own participation who takes part" in told


# --- seeds ---------------------------------------------------------------------------------------


def test_a_seeded_run_says_simulation_everywhere_and_repeats(coterie, pages):
    line = f"{RUN} --rounds 2 --simulation-seed 3 --quiet"
    told = coterie(f"{line} --out first")
    assert told.out.count("SIMULATION") >= 2  # under the table, and in the guarantee
    again = coterie(f"{line} --json --out second").json
    assert again["simulation"] is True
    assert strict(Path("first/result.json").read_text())["value"] == again["value"]
    assert strict(Path("second/guarantee.json").read_text())["simulation"] is True
    assert "SIMULATION" in Path("first/report.html").read_text()
    weights = [stacked_models(Path(name))["weight"] for name in ("first", "second")]
    np.testing.assert_array_equal(*weights)


def test_an_unseeded_run_says_nothing_of_simulation_and_does_not_repeat(coterie, pages, no_charts):
    line = f"{RUN} --rounds 2 --quiet"
    told = coterie(f"{line} --out first")
    again = coterie(f"{line} --json --out second").json
    assert "SIMULATION" not in told.out and again["simulation"] is False
    assert strict(Path("first/guarantee.json").read_text())["simulation"] is False
    assert "SIMULATION" not in Path("first/report.html").read_text()
    weights = [stacked_models(Path(name))["weight"] for name in ("first", "second")]
    assert not np.array_equal(*weights)


# --- the run folder ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    line = f"{RUN} --method pmtl --set method.lam=0.7 --set method.solver=sgd --epsilon 2"
    line += " --rounds 3 --cohort 6 --simulation-seed 7 --quiet --json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*shlex.split(line), "--out", str(folder)]) == 0
    return folder, strict(out.getvalue())


def test_the_plan_in_the_folder_reads_back_whole(finished):
    folder, _ = finished
    plan = Plan.load(folder / "plan.toml")
    assert to_toml(to_table(plan)) == (folder / "plan.toml").read_text()
    assert plan.method == PMTL(lam=0.7, solver="sgd")
    assert (plan.privacy.epsilon, plan.rounds, plan.simulation_seed) == (2.0, 3, 7)
    assert plan.sampler.cohort == 6 and plan.data.options["clients"] == 12


def test_the_guarantee_in_the_folder_can_be_computed_anew(finished):
    folder, result = finished
    stated = strict((folder / "guarantee.json").read_text())
    rebuilt = Guarantee.from_json(stated)
    again = rebuilt.to_json()
    keys = (again.keys() & stated.keys()) - {"versions", "unit"}
    assert {"events", "views", "epsilon", "rate"} < keys
    assert {key: again[key] for key in keys} == {key: stated[key] for key in keys}
    assert rebuilt == Plan.load(folder / "plan.toml").guarantee(12)
    assert rebuilt.epsilon == result["epsilon"]


def test_the_folder_holds_posts_models_metrics_and_a_report(finished):
    folder, result = finished
    assert strict((folder / "result.json").read_text()) == result
    with np.load(folder / "posts.npz") as posts:
        assert {name.partition(".")[0] for name in posts.files} == {"000000", "000001", "000002"}
        first = [posts[name].shape for name in posts.files if name.startswith("000000")]
    assert sorted(first) == [(1,), (1, 3)] and not (folder / "posts").exists()
    models = {name: tuple(leaf.shape) for name, leaf in stacked_models(folder).items()}
    assert models == {"weight": (12, 1, 3), "bias": (12, 1)}
    names = json.loads((folder / "models/clients.json").read_text())
    metrics = pq.read_table(folder / "metrics.parquet").to_pydict()
    own = ["client", "train_rows", "test_rows", "error", "r2", "error_alone"]
    assert list(metrics) == [*own, "error_shared"]
    assert metrics["client"] == names and len(set(names)) == 12
    assert metrics["train_rows"] == [6] * 12 and metrics["test_rows"] == [2] * 12
    better = np.array(metrics["error"]) < np.array(metrics["error_alone"])
    assert better.mean() == pytest.approx(result["share_better_than_local"])
    assert "<html" in (folder / "report.html").read_text()
    assert not list(folder.rglob("*.partial"))


def test_every_post_was_charged_before_it_was_released(finished):
    folder, _ = finished
    entries = [strict(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kinds = [
        (key, entry[key]) for entry in entries for key in ("charge", "release") if key in entry
    ]
    assert kinds == [(key, index) for index in range(3) for key in ("charge", "release")]


def test_a_kept_plan_makes_the_same_run_elsewhere(coterie, finished):
    folder, result = finished
    again = coterie("run --quiet --json --out again --plan", folder / "plan.toml").json
    assert Path("again/plan.toml").read_text() == (folder / "plan.toml").read_text()
    assert (again["value"], again["epsilon"]) == (result["value"], result["epsilon"])


def test_a_finished_run_resumes_to_the_same_answer_and_spends_nothing(coterie, finished, tmp_path):
    folder, result = finished
    copy = shutil.copytree(folder, tmp_path / "copy")
    done = coterie("run --quiet --json --resume", copy)
    assert done.code == 0 and done.json["value"] == result["value"]
    assert (copy / "ledger.jsonl").read_text() == (folder / "ledger.jsonl").read_text()
    weights = [stacked_models(place)["weight"] for place in (folder, copy)]
    np.testing.assert_array_equal(*weights)


def test_resuming_a_finished_unseeded_run_keeps_its_models(coterie):
    line = f"{RUN} --method pmtl --rounds 2 --set method.solver=sgd --option rows=40"
    coterie(f"{line} --quiet --out run")
    before = stacked_models(Path("run"))["weight"], strict(Path("run/result.json").read_text())
    assert coterie("run --resume run --quiet").code == 0
    np.testing.assert_array_equal(stacked_models(Path("run"))["weight"], before[0])
    assert strict(Path("run/result.json").read_text()) == before[1]


def test_an_unfinished_run_goes_on_where_it_stood(coterie, pages, finished, tmp_path):
    whole, result = finished
    folder = tmp_path / "stopped"

    def stop_after_two(plan, data):
        def watch(progress):
            if progress.round == 2:
                raise KeyboardInterrupt

        return watch

    with pytest.raises(KeyboardInterrupt):
        execute(Plan.load(whole / "plan.toml"), folder=folder, observer=stop_after_two)
    assert len(list((folder / "posts").glob("*.npz"))) == 2
    assert not (folder / "result.json").exists()
    refused = coterie("report", folder)
    assert refused.code == 2 and "--resume" in refused.err
    done = coterie("run --quiet --json --resume", folder)
    assert done.code == 0, done.err
    for key in ("value", "epsilon", "rounds", "noise_multiplier"):
        assert done.json[key] == result[key]
    assert (folder / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        "--epsilon 3",
        "--data synthetic",
        "--rounds 3",
        "--set method.lam=0.7",
        "--out elsewhere",
        "--no-local",
        "--option clients=12",
        "--plan other.toml",
        "--simulation-seed 7",
        "--simulation-seed 0",
        "--epsilon 0",
    ],
)
def test_resume_refuses_to_change_the_plan(coterie, finished, flags):
    folder, _ = finished
    done = coterie(f"run --quiet --json {flags} --resume", folder)
    assert done.code == 2 and flags.split()[0] in done.err and done.out == ""


def test_a_folder_that_holds_a_run_is_not_run_into(coterie, finished):
    folder, _ = finished
    before = (folder / "ledger.jsonl").read_text()
    done = coterie(f"{RUN} --quiet --out", folder)
    assert done.code == 2 and "--resume" in done.err and "--out" in done.err
    assert (folder / "ledger.jsonl").read_text() == before


def test_a_run_can_be_kept_on_disk_and_in_blocks(coterie, finished):
    _, result = finished
    line = f"{RUN} --method pmtl --set method.lam=0.7 --set method.solver=sgd --epsilon 2"
    line += " --rounds 3 --cohort 6 --simulation-seed 7 --quiet --json --store disk --block 5"
    assert coterie(line).json["value"] == pytest.approx(result["value"], rel=1e-5)


def test_runs_of_the_same_second_get_folders_of_their_own(coterie):
    line = f"{RUN} --method local --quiet --json"
    assert len({coterie(line).json["run"] for _ in range(3)}) == 3


# --- plans, flags and --set ----------------------------------------------------------------------

TOML = """
rounds = 2
compare_with_local = false

[data]
name = "synthetic"
options = { clients = 12, rows = 8, features = 3 }

[method]
kind = "pmtl"
lam = 0.7
sgd = { lr = 0.05, epochs = 3 }

[privacy]
epsilon = 2.0
relation = "replace"

[sampler]
kind = "poisson"
cohort = 6
"""


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TOML)
    return path


def test_a_toml_plan_is_enough(coterie, plan_file):
    found = coterie("run --quiet --json --out run --plan", plan_file).json
    assert (found["relation"], found["rounds"]) == ("replace", 2)
    plan = Plan.load(Path("run/plan.toml"))
    assert (plan.method.lam, plan.method.sgd.lr, plan.method.sgd.epochs) == (0.7, 0.05, 3)
    assert plan.sampler.cohort == 6 and plan.compare_with_local is False


def test_flags_go_over_the_plan_and_set_over_both(coterie, plan_file):
    line = "run --quiet --out run --noise-multiplier 4 --relation zero_out --rounds 3 --cohort 5"
    line += " --set rounds=1 --set method.lam=0.1 --set method.sgd.momentum=0.5 --plan"
    assert coterie(line, plan_file).code == 0
    plan = Plan.load(Path("run/plan.toml"))
    assert (plan.privacy.epsilon, plan.privacy.noise_multiplier) == (None, 4.0)
    assert plan.privacy.relation == "zero_out" and plan.rounds == 1 and plan.sampler.cohort == 5
    assert plan.method.lam == 0.1
    assert (plan.method.sgd.lr, plan.method.sgd.epochs, plan.method.sgd.momentum) == (0.05, 3, 0.5)


def test_another_method_does_not_inherit_the_plans_settings(coterie, plan_file):
    assert coterie("run --quiet --out run --method fedavg --plan", plan_file).code == 0
    plan = Plan.load(Path("run/plan.toml"))
    assert plan.method.kind == "fedavg" and plan.method.sgd.lr == 0.1


def test_cohort_visible_keeps_the_plans_cohort(coterie, plan_file):
    assert coterie("run --quiet --out run --cohort-visible --plan", plan_file).code == 0
    sampler = Plan.load(Path("run/plan.toml")).sampler
    assert sampler.visible and sampler.cohort == 6


def test_set_reaches_every_part_of_the_plan(coterie):
    expected = {
        "method.lam=1": lambda plan: plan.method.lam == 1.0,
        "method.change_from=own": lambda plan: plan.method.change_from == "own",
        "method.last_solve=false": lambda plan: plan.method.last_solve is False,
        "method.sgd.batch=4": lambda plan: plan.method.sgd.batch == 4,
        "method.model.bias=false": lambda plan: plan.method.model.bias is False,
        "privacy.clip=2": lambda plan: plan.privacy.clip == 2.0,
        "privacy.budget=[1, 2]": lambda plan: plan.privacy.budget == (1.0, 2.0),
        "sampler.cohort=5": lambda plan: plan.sampler.cohort == 5,
        "speed.block=3": lambda plan: plan.speed.block == 3,
        "data.test=2": lambda plan: plan.data.test == 2,
        "data.standardise=client": lambda plan: plan.data.standardise == "client",
    }
    flags = [part for setting in expected for part in ("--set", setting)]
    line = f"{RUN} --method pmtl --rounds 2 --no-local --quiet --out run"
    done = coterie(line, *flags)
    assert done.code == 0, done.err
    plan = Plan.load(Path("run/plan.toml"))
    assert [setting for setting, holds in expected.items() if not holds(plan)] == []


def test_set_alone_is_enough(coterie):
    line = "run --set data.name=synthetic --set privacy.noise_multiplier=2"
    done = coterie(f"{line} --rounds 1 --no-local --quiet --out run")
    assert done.code == 0, done.err
    plan = Plan.load(Path("run/plan.toml"))
    assert plan.data.name == "synthetic" and plan.privacy.noise_multiplier == 2


@pytest.mark.parametrize(
    ("setting", "listed"),
    [
        ("method.lamda=3", "model, lam, solver, sgd, change_from, last_solve, last_epochs"),
        ("method.sgd.rate=3", "lr, epochs, steps, most_steps, batch, momentum, halve_every"),
        ("privacy.eps=3", "epsilon, noise_multiplier, delta, relation, clip, spend, budget"),
        ("data.source.colour=3", "task, client, target, split, features, levels"),
        ("data.options.colour=3", "kind, clients, rows, features, task"),
        ("round=3", "method, privacy, sampler, rounds, simulation_seed"),
        ("speed.gpus=3", "block, device, store"),
    ],
)
def test_an_unknown_key_is_refused_and_the_known_ones_listed(coterie, setting, listed):
    done = coterie(f"{RUN} --method pmtl --quiet --json --set {setting}")
    assert done.code == 2 and done.out == ""
    assert setting.split("=")[0].split(".")[-1] in done.err and listed in done.err


# --- account and calibrate -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "epsilon"),
    [
        ("", 4.611),
        ("--relation replace", 11.99),
        ("--cohort-visible", 7.504),
        ("--sampling fixed --relation replace", 20.45),
    ],
)
def test_account_gives_the_tables_numbers(coterie, flags, epsilon):
    found = coterie(f"account {PLAN_205} --noise-multiplier 10 --json {flags}").json
    assert found["epsilon"] == pytest.approx(epsilon, rel=0.01)
    assert found["views"]["other_clients"] == found["epsilon"]
    if "fixed" in flags:
        assert found["views"]["outsider"] == pytest.approx(12.72, rel=0.01)
    assert found["views"]["server"] == "inf"
    assert (found["delta"], found["noise_multiplier"]) == (0.0048780487, 10)
    if "fixed" in flags:
        assert found["views"]["coalition_of_all_others"] == pytest.approx(20.45, rel=0.01)


def test_calibrate_turns_account_around(coterie):
    found = coterie(f"calibrate {PLAN_205} --epsilon 4.611422 --json").json
    assert found["epsilon"] <= 4.611422
    assert found["noise_multiplier"] == pytest.approx(10, rel=1e-3)
    assert found.keys() >= {"epsilon", "delta", "noise_multiplier", "views"}


def test_account_without_a_cohort_is_exact_gaussian_dp(coterie):
    found = coterie("account --clients 205 --rounds 1000 --noise-multiplier 10 --json").json
    assert found["epsilon"] == pytest.approx(17.8566, rel=1e-4)
    assert found["delta"] == 1e-5 and found["cohort"] == 205
    assert found["accountant"] == "exact Gaussian DP"


def test_account_tells_a_person_the_same(coterie):
    told = coterie(f"account {PLAN_205} --noise-multiplier 10").out
    assert re.search(r"epsilon \(other clients\) +4\.611", told)
    for part in ("epsilon (server)", "zero_out", "Not covered"):
        assert part in told


def test_accounting_loads_neither_torch_nor_data(tmp_path):
    script = (
        "import sys\n"
        "from coterie.cli.main import main\n"
        "line = '--clients 205 --cohort 100 --rounds 10 --json'.split()\n"
        "codes = [main(['account', *line, '--noise-multiplier', '10']),\n"
        "         main(['calibrate', *line, '--epsilon', '2'])]\n"
        "heavy = {'torch', 'numba', 'pandas', 'sklearn', 'matplotlib', 'pyarrow'}\n"
        "print(codes, sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = process("-c", script)
    assert done.stderr.splitlines()[-1] == "[0, 0] []"


# --- methods, data show, help, demo --------------------------------------------------------------


def test_methods_lists_every_method_with_its_settings(coterie):
    found = coterie("methods --json").json
    assert found.keys() >= {"local", "fedavg", "pmtl"}
    assert found["pmtl"]["settings"]["lam"] == PMTL().lam
    assert all(about["summary"] for about in found.values())
    told = coterie("methods").out  # read from source, without importing
    for name, about in found.items():
        releases = f"\n    releases: {about['releases']}" if about["releases"] else ""
        assert f"{name}: {about['summary']}{releases}\n" in told
    told = coterie("methods pmtl").out
    assert "method.lam = 0.3" in told and 'method.change_from = "shared"' in told
    assert "did you mean pmtl?" in coterie("methods pmlt").err


@pytest.mark.parametrize(
    ("name", "clients", "rows", "features"),
    [("districts", 537, 3638, 12), ("digits", 30, 1797, 64), ("synthetic", 100, 2000, 10)],
)
def test_data_show_on_names(coterie, name, clients, rows, features):
    found = coterie(f"data show {name} --json").json
    assert (found["clients"], found["rows"], found["features"]) == (clients, rows, features)
    spread = found["rows_per_client"]
    assert spread.keys() == {"min", "median", "max", "mean", "sd", "skew"}
    assert spread["mean"] == pytest.approx(rows / clients)
    told = coterie(f"data show {name}")
    assert told.code == 0
    for part in (f"clients              {clients}", f"rows                 {rows}", "skew"):
        assert part in told.out


def test_data_show_counts_classes(coterie):
    found = coterie("data show digits --option clients=10 --option skew=0.1 --json").json
    assert found["clients"] == 10 and found["outputs"] == 10
    assert 1 <= found["classes_per_client"]["min"] <= found["classes_per_client"]["max"] <= 10


@pytest.mark.full
def test_demo_ends_with_the_table_and_writes_the_report(coterie, pages):
    done = coterie("demo --data synthetic --out demo --simulation-seed 1")
    assert done.code == 0, done.err
    for told in ("local", "fedavg", "pmtl", "pfeb", "better", "epsilon", "SIMULATION"):
        assert told in done.out
    assert done.out.rstrip().endswith("report: demo/report.html")
    page = Path("demo/report.html").read_text()
    assert all(name in page for name in ("local", "fedavg", "pmtl", "pfeb", "SIMULATION"))
    scores = {
        name: strict(Path("demo", name, "result.json").read_text())["value"]
        for name in ("local", "fedavg", "pmtl", "auto")
    }
    assert max(scores["pmtl"], scores["auto"]) < min(scores["local"], scores["fedavg"])
    spent = float(re.search(r"and no others: epsilon = ([\d.]+)", done.out).group(1))
    # Three mu-GDP runs: mu = 0.26805 sqrt(3) at delta 1e-5 (Gaussian DP in closed form).
    assert spent == pytest.approx(1.835, rel=5e-3)


@pytest.mark.full
def test_demo_shows_the_four_systems_and_the_default(coterie, pages):
    done = coterie("demo --epsilon 1 --out demo")
    assert done.code == 0, done.err
    on = {
        name: strict(Path("demo", name, "result.json").read_text())["data"]
        for name in ("auto", "pmtl", "mpmtl", "dpfedmtl", "mtlsvm")
    }
    assert on == {
        "auto": "districts", "pmtl": "districts", "mpmtl": "mpmtl:low_rank", "dpfedmtl": "digits",
        "mtlsvm": "synthetic:mean",
    }  # fmt: skip
    page = Path("demo/report.html").read_text()
    assert all(name in done.out and name in page for name in ("mpmtl", "dpfedmtl", "mtlsvm"))
    for told in (
        "pfeb: epsilon = 1 at delta = 1e-05, over 37 rounds",
        "mpmtl: epsilon = 1 at",
        "fedavg, pmtl, pfeb: Sampling: all 537 clients",
        "mtlsvm: Sampling: all 200",
    ):
        assert told in done.out  # each guarantee with the runs that it is of
    # Only the three private runs on districts share clients.
    spent = float(re.search(r"and no others: epsilon = ([\d.]+)", done.out).group(1))
    assert spent == pytest.approx(1.835, rel=5e-3)
    assert "at most epsilon 1.835 at delta" in page and "of 3 private runs on districts by" in page


@pytest.mark.full
def test_report_puts_several_runs_on_one_page(coterie, pages, finished):
    coterie(f"{RUN} --method local --quiet --out alone")
    done = coterie("report --out pages/all.html alone", finished[0])
    assert done.code == 0 and done.out.strip() == "pages/all.html"
    assert all(name in Path("pages/all.html").read_text() for name in ("local", "pmtl"))


# --- data from files -----------------------------------------------------------------------------


@pytest.fixture
def exam(tmp_path):
    draw = np.random.default_rng(0)
    lines = ["school,hours,kind,score"]
    for school in range(8):
        for _ in range(8):
            hours, night = draw.normal(), draw.integers(2)
            score = 0.5 * hours - night + 0.1 * school + 0.1 * draw.normal()
            lines.append(f"s{school},{hours:.4f},{('day', 'night')[night]},{score:.4f}")
    path = tmp_path / "exam.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


CSV = "--client-column school --target score --levels kind=day,night"
EXAM = f"run --anyway --data exam.csv {CSV}"


def test_a_csv_from_end_to_end(coterie, exam):
    found = coterie(f"{EXAM} --epsilon 4 --rounds 2 --quiet --json --out r").json
    assert (found["data"], found["clients"], found["metric"]) == ("exam.csv", 8, "nmse")
    assert stacked_models(Path("r"))["weight"].shape == (8, 1, 3)  # hours, kind=day, kind=night
    assert json.loads(Path("r/models/clients.json").read_text()) == [f"s{k}" for k in range(8)]
    assert Plan.load(Path("r/plan.toml")).data.source.levels == {"kind": ("day", "night")}
    assert coterie("run --resume r --quiet --json").json["value"] == found["value"]


def test_data_show_on_a_csv(coterie, exam):
    found = coterie(f"data show exam.csv {CSV} --json").json
    assert (found["clients"], found["rows"], found["features"]) == (8, 64, 3)
    without = coterie("data show exam.csv --client-column school --target score --json").json
    assert without["features"] == 1 and "kind" in " ".join(without["notes"])


def test_a_csv_standardised_inside_clients(coterie, exam):
    line = f"{EXAM} --standardise client --test 2 --rounds 1 --quiet --json"
    done = coterie(f"{line} --out r")
    assert done.code == 0 and Plan.load(Path("r/plan.toml")).data.standardise == "client"
    assert pq.read_table("r/metrics.parquet")["test_rows"].to_pylist() == [2] * 8


@pytest.mark.full
def test_targets_are_clients(coterie, tmp_path):
    lines = [f"{i},{i % 3},{'' if i % 5 == 0 else i * 0.1:.3}" for i in range(1, 30)]
    (tmp_path / "wide.csv").write_text("\n".join(["x,kidney,liver", *lines]) + "\n")
    line = "--target kidney,liver --targets-are-clients --task regression"
    found = coterie(f"data show wide.csv {line} --json").json
    assert (found["clients"], found["rows"]) == (2, 29 + 24)
    assert (
        coterie(f"run --anyway --data wide.csv {line} --rounds 1 --quiet --json").json["clients"]
        == 2
    )


def test_sparse_npz_stays_sparse(coterie, tmp_path):
    draw = np.random.default_rng(0)
    rows = sparse.random(60, 200, density=0.05, format="csr", random_state=draw)
    arrays = {f"X_{name}": getattr(rows, name) for name in ("data", "indices", "indptr", "shape")}
    client, y = np.repeat(np.arange(6), 10), draw.integers(0, 2, 60)
    np.savez(tmp_path / "words.npz", y=y, client=client, **arrays)
    shown = coterie("data show words.npz --json").json
    assert shown["sparse"] is True and shown["features"] == 200 and shown["task"] == "binary"
    found = coterie("run --anyway --data words.npz --rounds 2 --quiet --json --out r").json
    assert (found["metric"], found["clients"]) == ("accuracy", 6)
    assert stacked_models(Path("r"))["weight"].shape == (6, 1, 200)


@pytest.mark.full
def test_digits_with_a_network(coterie):
    line = "run --anyway --data digits --option clients=10 --model mlp"
    line += " --set method.model.hidden=[8]"
    found = coterie(f"{line} --rounds 2 --epsilon 5 --no-local --quiet --json --out r").json
    assert found["metric"] == "accuracy" and 0 <= found["value"] <= 1
    assert stacked_models(Path("r"))["layer1.weight"].shape == (10, 8, 64)
    assert stacked_models(Path("r"))["head.bias"].shape == (10, 10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "task"), [("local", "binary"), ("fedavg", "multiclass"), ("pmtl", "multilabel")]
)
def test_every_task(coterie, method, task):
    line = f"{RUN} --option task={task} --method {method} --rounds 1 --quiet --json"
    found = coterie(line).json
    assert found["metric"] == "accuracy" and 0 <= found["value"] <= 1


# --- mistakes ------------------------------------------------------------------------------------

ACCOUNT = "account --clients 205 --cohort 100 --rounds 10 --noise-multiplier 10"
CALIBRATE = "calibrate --clients 205 --cohort 100 --rounds 10 --epsilon 2"
FILES = {
    "ok.csv": "client,a,colour,y\n" + "".join(f"c{i % 3},{i},red,{i / 10}\n" for i in range(9)),
    "ragged.csv": "client,a,y\nc1,1,2\nc1,3\n",
    "words.csv": "client,a,y\nc1,1,2\nc1,foo,2\n",
    "empty.csv": "",
    "header.csv": "client,a,y\n",
    "nobody.csv": "a,y\n1,2\n",
    "unnamed.csv": "client,a,y\nc,1,2\n,1,3\n",
    "gap.csv": "client,a,y\nc,1,2\nc,,3\n",
    "infinite.csv": "client,a,y\nc,1,2\nc,inf,3\n",
    "cut.json": '{"users": ["a"',
    "cut.npz": "PK\x03\x04",
    "plain.txt": "x",
    "broken.toml": "rounds = [\n",
    "unknown.toml": 'rouds = 3\n[data]\nname = "synthetic"\n',
    "method.toml": 'method = "pmtl"\n[data]\nname = "synthetic"\n',
    "privacy.toml": 'privacy = 3\n[data]\nname = "synthetic"\n',
    "data.toml": 'data = "synthetic"\n',
}
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")

# (command line, a part of what is said)
MISTAKES = [
    # numbers of a run
    (f"{RUN} --epsilon 0", "--epsilon 0: expected"),
    (f"{RUN} --epsilon -1", "--epsilon -1: expected"),
    (f"{RUN} --epsilon nan", "--epsilon nan: expected"),
    (f"{RUN} --epsilon much", "--epsilon"),
    (f"{RUN} --epsilon 1 --noise-multiplier 1", "exactly one"),
    (f"{RUN} --noise-multiplier 0", "--noise-multiplier 0: expected"),
    (f"{RUN} --noise-multiplier inf", "--noise-multiplier inf: expected"),
    (f"{RUN} --delta 0", "delta = 0.0"),
    (f"{RUN} --delta 1", "--delta 1: expected a number"),
    (f"{RUN} --delta nan", "--delta nan: expected a number"),
    (f"{RUN} --clip 0", "--clip 0: expected"),
    (f"{RUN} --clip nan", "--clip nan: expected"),
    (f"{RUN} --rounds 0", "--rounds 0: expected"),
    (f"{RUN} --rounds -1", "--rounds -1: expected"),
    (f"{RUN} --rounds 1.5", "--rounds"),
    (f"{RUN} --cohort 0", "--cohort 0: expected"),
    (f"{RUN} --cohort 13", "number of clients (12)"),
    (f"{RUN} --cohort nan", "--cohort nan: expected"),
    (f"{RUN} --test 1.5", "test = 1.5"),
    (f"{RUN} --test 0", "test = 0"),
    (f"{RUN} --test -1", "test = -1"),
    (f"{RUN} --test some", "--test"),
    (f"{RUN} --block -1", "block = -1"),
    (f"{RUN} --simulation-seed x", "--simulation-seed"),
    # names
    (f"{RUN} --method nope", "globalsvm, local, local_star, localsvm"),
    (f"{RUN} --model nope", "expected one of additive, celeba_cnn, char_lstm, cnn,"),
    ("run", "--data"),
    ("run --data nope.csv", "nope.csv"),
    ("data show nope.csv", "nope.csv"),
    ("data show synthetic:nope", "synthetic:nope"),
    ("data", "show"),
    ("nope", "calibrate"),
    ("", "COMMAND"),
    # sampling
    (f"{RUN} --sampling fixed --relation replace", "--cohort"),
    (f"{RUN} --sampling fixed --cohort 5.5 --relation replace", "whole number"),
    (f"{RUN} --sampling fixed --cohort 5", "replace"),
    (f"{RUN} --sampling everyone --cohort 5", "--sampling everyone"),
    (f"{RUN} --sampling sometimes", "--sampling"),
    (f"{RUN} --relation cousin", "--relation"),
    (f"{ACCOUNT} --sampling fixed", "replace"),
    # devices and folders
    pytest.param(f"{RUN} --device cuda", "no CUDA device", marks=NO_CUDA),
    (f"{RUN} --store cloud", "--store"),
    (f"{RUN} --out plain.txt", "plain.txt"),
    (f"{RUN} --out plain.txt/run", "plain.txt"),
    ("run --resume nowhere", "nowhere"),
    ("report nowhere", "nowhere"),
    ("report", "RUN"),
    # plans and settings
    ("run --plan nowhere.toml", "nowhere.toml"),
    ("run --plan broken.toml", "broken.toml"),
    ("run --plan .", "."),
    ("run --plan unknown.toml", "rouds"),
    (f"{RUN} --set lam", "KEY=VALUE"),
    (f"{RUN} --set =3", "KEY=VALUE"),
    (f"{RUN} --method pmtl --set method.lam=", "method.lam"),
    (f"{RUN} --method pmtl --set method.lam=high", "expected float"),
    (f"{RUN} --method pmtl --set method.lam=-1", "lam = -1.0"),
    (f"{RUN} --method pmtl --set method.lam=nan", "lam = nan"),
    (f"{RUN} --method pmtl --set method.lam=[1]", "expected float"),
    (f"{RUN} --method pmtl --set method.lam.x=1", "method.lam"),
    (f"{RUN} --method pmtl --set method.sgd.lr=0", "lr"),
    (f"{RUN} --method pmtl --set method.sgd.epochs=1.5", "expected int"),
    (f"{RUN} --method pmtl --set method.solver=magic", "'auto', 'exact', 'sgd'"),
    (f"{RUN} --method pmtl --set method.change_from=me", "'shared', 'own'"),
    (f"{RUN} --set compare_with_local=3", "expected bool"),
    (f"{RUN} --set rounds=true", "expected int"),
    (f"{RUN} --set sampler.kind=nope", "everyone, fixed, poisson"),
    (f"{RUN} --set privacy.budget=[0]", "positive weights"),
    (f"{RUN} --rounds 3 --set privacy.budget=[1,2]", "one weight per round"),
    (f"{RUN} --option clients", "KEY=VALUE"),
    (f"{RUN} --option colour=3", "colour"),
    (f"{RUN} --option clients=-1", "clients = -1: expected 1 or more"),
    (f"{RUN} --option task=magic", "magic"),
    # account and calibrate
    (f"{ACCOUNT} --delta 0", "delta"),
    (f"{ACCOUNT} --rounds 0", "--rounds 0"),
    (f"{ACCOUNT} --clients 0", "--clients 0"),
    (f"{ACCOUNT} --cohort 206", "number of clients (205)"),
    (f"{ACCOUNT} --noise-multiplier nan", "multiplier"),
    (f"{ACCOUNT} --clients many", "--clients"),
    ("account --clients 10", "--rounds"),
    (f"{CALIBRATE} --epsilon 0", "epsilon = 0.0"),
    (f"{CALIBRATE} --epsilon nan", "epsilon = nan"),
    (f"{CALIBRATE} --epsilon inf", "epsilon = inf"),
    (f"{CALIBRATE} --delta 1", "delta"),
    (f"{CALIBRATE} --delta 0.999", "no noise"),
    # files
    ("run --data ragged.csv", "line 3"),
    ("run --data words.csv", "'foo'"),
    ("run --data empty.csv", "empty.csv"),
    ("run --data header.csv", "no row"),
    ("run --data unnamed.csv", "line 3"),
    ("run --data gap.csv", "line 3"),
    ("run --data infinite.csv", "found inf"),
    ("run --data cut.json", "truncated"),
    ("run --data cut.npz", "cut.npz"),
    ("run --data plain.txt", "no column 'y'"),
    ("data show ragged.csv", "line 3"),
    ("run --data ok.csv --target nope", "'nope'"),
    ("run --data ok.csv --client-column nope", "'nope'"),
    ("run --data ok.csv --features nope", "'nope'"),
    ("run --data ok.csv --levels colour=blue", "'red'"),
    ("run --data ok.csv --classes 1", "at least two classes"),
    ("run --data ok.csv --task binary", "label"),
    ("run --data ok.csv --target a,y --levels colour=red", "2 targets"),
    ("run --data ok.csv --features a,a", "given twice"),
    ("run --data ok.csv --set data.source.scale.a=0", "no scale of 0"),
    # values that once raised other errors
    ("run --plan method.toml", "method"),
    ("run --plan privacy.toml", "privacy"),
    ("run --plan data.toml", "data = 'synthetic'"),
    (f"{RUN} --device gpu", "cuda"),
    (f"{RUN} --device mps", "cuda"),
    (f"{RUN} --option clients=many", "clients"),
    (f"{RUN} --option clients=2.5", "clients"),
    (f"{RUN} --option rows=2.5", "rows"),
    (f"{RUN} --option spread=wide", "spread"),
    ("run --data digits --option clients=many", "clients"),
    ("run --data digits --option skew=high", "skew"),
    (f"{RUN} --simulation-seed -1", "simulation_seed = -1"),
    (f"{RUN} --set simulation_seed=x", "simulation_seed"),
    (f"{RUN} --model cnn", "MLP"),
    (f"{RUN} --set method.lam=inf", "lam"),
    (
        f"{RUN} --method pmtl --set method.last_epochs=0 --set method.solver=sgd --rounds 1",
        "last_epochs",
    ),
    ("run --data nope", "districts"),
    ("run --data synthetic:nope", "synthetic:mean"),
    (f"{RUN} --target score --rounds 1", "--target"),
    ("run --data ok.csv --option clients=3 --rounds 1", "--option"),
    (f"{CALIBRATE} --epsilon 1e6", "epsilon"),
    (f"{CALIBRATE} --epsilon 1e300", "epsilon"),
    (f"{CALIBRATE} --delta 1e-300", "delta"),
    (f"{ACCOUNT} --delta 1e-300", "delta"),
    (f"{ACCOUNT} --noise-multiplier 1e-300", "noise"),
    (f"{ACCOUNT} --noise-multiplier 1e300", "noise"),
    (f"{ACCOUNT} --noise-multiplier 0", "--noise-multiplier 0"),
    (f"{ACCOUNT} --delta 1", "--delta 1"),
    ("run --data ok.csv --levels colour", "COLUMN=A,B"),
    ("run --data nobody.csv", "--client-column"),
    (
        "account --clients 9 --cohort inf --rounds 2 --noise-multiplier 1 --sampling fixed",
        "whole",
    ),
    (
        "account --clients 9 --cohort nan --rounds 2 --noise-multiplier 1 --sampling fixed",
        "whole",
    ),
    ("account --clients 99999999999999999999 --rounds 2 --noise-multiplier 1", "at most"),
    ("account --clients 9 --rounds 99999999999 --noise-multiplier 1", "at most"),
    (
        "account --clients 9 --rounds 2 --noise-multiplier 1 --sampling everyone --cohort-visible",
        "no cohort",
    ),
    (f"{RUN} --noise-multiplier 1e-9", "1e-5"),
    (f"{RUN} --epsilon 1 --delta 1e-300", "1e-30"),
    # other commands
    ("demo --epsilon 0 --out demo", "--epsilon 0: expected"),
    ("demo --data nope --out demo", "nope"),
]


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_a_users_mistake_gets_status_2_and_a_clear_line(coterie, pages, files, line, told):
    check_refused(coterie(line), line, told)


def check_refused(done, line, told):
    assert done.code == 2
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith(f"coterie {line.split()[0]}:" if line not in ("", "nope") else "coterie")
    assert told in last
    assert "Traceback" not in done.err and len(last) < 500
    made = {path.name for path in Path().iterdir()} - FILES.keys()
    assert not made, f"left behind: {made}"


@pytest.mark.parametrize("line", [f"{RUN} --epsilon much", f"{ACCOUNT} --rounds 1.5", "nope"])
def test_one_line_is_enough(coterie, line):
    assert len(coterie(line).err.splitlines()) == 1


# --- as a process of its own ---------------------------------------------------------------------


def test_the_command_as_a_process_on_a_terminal_without_unicode():
    line = f"{RUN} --method pmtl --rounds 2 --no-local --simulation-seed 1 --out run"
    # The page takes as long as all the rest.
    code = "import coterie.cli.train as train\ntrain.write_report = lambda folders, out: out\n"
    code += "from coterie.cli.main import entry\nentry()"
    done = process("-c", code, *shlex.split(line), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "report run/report.html" in done.stdout and "epsilon so far" in done.stderr


@pytest.mark.full
def test_a_mistake_as_a_process():
    done = process("-m", "coterie.cli.main", "data", "show", "nowhere.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "nowhere.csv" in done.stderr


def test_a_run_does_not_go_on_with_other_rows(coterie, tmp_path):
    rows = "client,x,y\n" + "".join(f"c{i % 8},{i % 5},{i % 7}.5\n" for i in range(64))
    Path("a.csv").write_text(rows)
    coterie("run --data a.csv --rounds 3 --quiet --json --out r")
    Path("r/result.json").unlink()
    assert coterie("run --resume r --quiet --json").code == 0
    Path("r/result.json").unlink()
    Path("a.csv").write_text(rows.replace("1.5", "9.5"))
    changed = coterie("run --resume r --quiet --json")
    assert changed.code == 2
    assert "not those the run was started with" in changed.err


def test_the_plan_states_its_delta_and_rounds(coterie):
    coterie(f"{RUN} --quiet --json --out stated")
    plan = tomllib.loads(Path("stated/plan.toml").read_text())
    assert plan["privacy"]["delta"] == 1e-5
    assert plan["rounds"] >= 1


def test_classes_read_off_the_rows_are_said_wherever_epsilon_is(coterie, pages, no_charts):
    Path("l.csv").write_text(
        "client,x,y\n" + "".join(f"c{i % 9},{i / 90},{i % 3}\n" for i in range(90))
    )
    loud = coterie("run --anyway --data l.csv --rounds 2 --json --out r")
    assert "classes taken" in loud.err
    assert [text.split(" by ")[0].split(" from ")[0] for text in loud.json["assumed_public"]] == [
        "columns taken",
        "classes taken",
    ]
    assert "Assumed public" in coterie("run --resume r").out
    assert "classes taken" in Path("r/report.html").read_text()
    declared = coterie(
        "run --anyway --data l.csv --classes 3 --features x --rounds 2 --json --quiet --out d"
    ).json
    assert declared["assumed_public"] == []


def test_steps_that_are_too_large_for_a_client_are_made_smaller(coterie):
    flags = "run --data districts --method pmtl --set method.solver=sgd --simulation-seed 1 --quiet"
    flags += " --json"
    assert coterie(flags).json["value"] < 0.6


def test_printed_bounds_are_never_below_the_true_ones(coterie):
    exact = coterie(f"account {PLAN_205} --noise-multiplier 10 --json").json["epsilon"]
    text = coterie(f"account {PLAN_205} --noise-multiplier 10").out
    shown = [float(part) for part in re.findall(r"epsilon[^=\n]*?(?:=|  )\s*([\d.]+)", text)]
    assert len(shown) >= 2 and all(exact <= value < exact * 1.001 for value in shown)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A folder as a kill leaves it: no result, all posts but the last."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    line = f"{RUN} --method pmtl --rounds 4 --quiet --json --simulation-seed 1"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*shlex.split(line), "--out", str(folder)]) == 0
    for name in ("result.json", "guarantee.json", "metrics.parquet"):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize(
    "damage,told",
    [
        (
            lambda run: shutil.rmtree(run / "personal"),
            "the personal state of the published rounds is missing",
        ),
        (lambda run: os.truncate(run / "personal" / "weight.npy", 140), "damaged"),
        (lambda run: (run / "personal" / "weight.npy").write_text("x"), "damaged"),
        (lambda run: (run / "plan.toml").unlink(), "plan.toml"),
        (
            lambda run: ((run / "posts.npz").unlink(), (run / "ledger.jsonl").unlink()),
            "ledger is empty",
        ),
        (lambda run: (run / "ledger.jsonl").unlink(), "never charged"),
    ],
    ids=["no-personal", "short", "garbage", "no-plan", "no-ledger-no-posts", "no-ledger"],
)
def test_a_damaged_run_is_refused(coterie, killed_run, damage, told):
    shutil.copytree(killed_run, "hurt")
    damage(Path("hurt"))
    done = coterie("run --resume hurt --quiet --json")
    assert done.code == 2
    assert told in done.err and "Traceback" not in done.err


def test_a_folder_with_parts_of_a_run_is_not_taken_over(coterie, killed_run):
    shutil.copytree(killed_run, "parts")
    Path("parts/plan.toml").unlink()
    done = coterie(f"{RUN} --rounds 3 --quiet --json --out parts")
    assert done.code == 2 and "without its plan.toml" in done.err
    assert not Path("parts/plan.toml").exists()


def test_two_processes_do_not_share_a_folder(coterie):
    from coterie.privacy.ledger import locked

    with locked(Path("busy")):
        done = coterie(f"{RUN} --rounds 2 --quiet --json --out busy")
    assert done.code == 2 and "in use by another process" in done.err
    assert not Path("busy/plan.toml").exists()


def test_a_column_is_one_thing(coterie):
    Path("c.csv").write_text("client,x,y\na,1,2.5\nb,2,3.5\n")
    done = coterie("data show c.csv --target client")
    assert done.code == 2 and "both the client and a target" in done.err


def test_a_broken_certificate_is_named(coterie):
    coterie(f"{RUN} --rounds 2 --quiet --json --out cert")
    Path("cert/guarantee.json").write_text('{"epsilon": 0.0001}')
    done = coterie("run --resume cert --json")
    assert done.code == 2 and "guarantee.json" in done.err
