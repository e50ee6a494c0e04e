"""Tuning: folds inside clients, nothing of the test rows, and words for what epsilon leaves out."""

import html
import json
import math
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import coterie.tune.tune
from coterie.cli.main import main
from coterie.cli.tune import make_grid
from coterie.core.config import ConfigError
from coterie.data.config import DataConfig
from coterie.data.datasets import open_named
from coterie.planning.plan import Plan
from coterie.runs.run import execute
from coterie.runs.summary import CHARGED, NOT_COVERED
from coterie.tune.tune import Range, Trial, apply_settings, fold_numbers, rank, tune, tuning_label

pytestmark = pytest.mark.full

SMALL = {"clients": 12, "rows": 12, "features": 3}
FLAGS = "--data synthetic --option clients=12 --option rows=12 --option features=3 --rounds 2"
FLAGS += " --method pmtl"
LAMS = {"method.lam": [0.1, 1.0]}


def plan(data="synthetic", options=SMALL, *, epsilon=2.0, method="pmtl", **more):
    chosen = {"name": data, **({"options": options} if options else {})}
    table = {"data": chosen, "method": {"kind": method}, "privacy": {"epsilon": epsilon}}
    return table | {"rounds": 2} | more


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def coterie_(capsys):
    def call(line):
        capsys.readouterr()
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return call


def write_rows(path, *, poison=1.0):
    """Write 10 clients of 12 training and 4 test rows; test rows may be made absurd."""
    draw = np.random.default_rng(0)
    lines = ["client,a,b,y,split"]
    for client in range(10):
        a, b = draw.normal(size=2)
        for row in range(16):
            x, by = draw.normal(size=2), poison if row >= 12 else 1.0
            y = a * x[0] + b * x[1] + 0.3 * draw.normal()
            lines.append(f"c{client},{x[0] * by},{x[1] * by},{y * by},{int(row >= 12)}")
    Path(path).write_text("\n".join(lines) + "\n")


# --- folds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_partition_every_clients_rows(folds):
    data = open_named("synthetic", clients=40, rows=(1, 9), features=2, seed=3)
    numbers = fold_numbers(data, folds, seed=0)
    for client, rows in enumerate(data.counts):
        own = numbers[data.offsets[client] : data.offsets[client + 1]]
        if rows == 1:
            assert own.tolist() == [-1]
            continue
        # Every row is in one fold, and folds differ by a row at most: a row is left to train on.
        sizes = Counter(own.tolist())
        assert set(sizes) <= set(range(folds)) and sum(sizes.values()) == rows
        assert max(sizes.values()) == math.ceil(rows / folds) < rows
        assert min(sizes[fold] for fold in range(folds)) == rows // folds


def test_small_clients_are_spread_over_all_folds():
    data = open_named("synthetic", clients=200, rows=(2, 5), features=2)
    sizes = np.bincount(fold_numbers(data, 5, seed=0), minlength=5)
    assert sizes.min() > 0.7 * sizes.mean()


def test_folds_follow_the_seed_and_nothing_else():
    data = open_named("synthetic", clients=20, rows=10, features=2)
    other = replace(data, features=data.features * 100, targets=-data.targets)
    assert (fold_numbers(data, 5, 1) == fold_numbers(other, 5, 1)).all()
    assert (fold_numbers(data, 5, 1) != fold_numbers(data, 5, 2)).any()


def watch_simulations(monkeypatch):
    seen, real = [], coterie.tune.tune.simulate

    def spy(run, data, **more):
        seen.append((run, data))
        return real(run, data, **more)

    monkeypatch.setattr("coterie.tune.tune.simulate", spy)
    return seen


def test_trials_see_training_rows_of_their_own_client_alone(monkeypatch):
    seen = watch_simulations(monkeypatch)
    tune(plan(), {"method.lam": [0.3]}, folds=3)
    train, _ = DataConfig(name="synthetic", options=SMALL).split()
    times = Counter()
    for _, data in seen:
        for client in range(12):
            own = {tuple(row) for row in client_rows(train, client)}
            used = [tuple(row) for row in client_rows(data, client)]
            assert set(used) < own and len(set(used)) == len(used) == 6
            times.update((client, row) for row in used)
    # Held out once each, so trained on in the two other folds.
    assert len(seen) == 3 and set(times.values()) == {2} and len(times) == 12 * 9


def client_rows(data, client):
    return data.features[data.offsets[client] : data.offsets[client + 1]].tolist()


def test_features_are_scaled_by_the_rows_outside_the_fold(monkeypatch):
    seen = watch_simulations(monkeypatch)
    table = plan()
    table["data"] = {**table["data"], "standardise": "client"}
    assert tune(table, {"method.lam": [0.3]}, folds=3).plan.data.standardise == "client"
    for _, data in seen:
        for client in range(12):
            assert np.mean(client_rows(data, client), axis=0) == pytest.approx(0, abs=1e-5)


def test_the_test_rows_are_never_touched():
    write_rows("clean.csv")
    write_rows("poisoned.csv", poison=1e8)
    found = [tune(plan(name, None), LAMS) for name in ("clean.csv", "poisoned.csv")]
    assert found[0].table == found[1].table and found[0].best == found[1].best


# --- the choice ----------------------------------------------------------------------------------


def test_the_chosen_penalty_is_about_the_best_on_test_rows():
    table = plan("mpmtl:low_rank", {"clients": 40, "test": 60}, method="mpmtl", epsilon=4.0)
    table |= {"compare_with_local": False, "simulation_seed": 5}
    lams = [0.001, 0.01, 0.1, 1.0]
    found = tune(table, {"method.lam": lams})
    errors = {
        lam: execute(Plan.from_table(apply_settings(table, {"method.lam": lam}))).score.value
        for lam in lams
    }
    assert errors[found.best["method.lam"]] <= 1.05 * min(errors.values())
    assert max(errors.values()) > 1.5 * min(errors.values())  # there was something to choose
    assert found.plan.method.lam == found.best["method.lam"]


def test_it_is_deterministic_in_the_seed():
    first, again, other = (tune(plan(), LAMS, folds=3, seed=seed) for seed in (1, 1, 2))
    assert first == again and first.table != other.table


def test_trials_are_simulations_at_the_runs_epsilon_and_the_plan_is_not(monkeypatch):
    seen = watch_simulations(monkeypatch)
    found = tune(plan(), LAMS, folds=2)
    for run, data in seen:
        assert run.guarantee(len(data)).epsilon == pytest.approx(2, rel=1e-3)
    seeds = [run.simulation_seed for run, _ in seen]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]  # the same noise for all, by fold
    assert found.plan.simulation_seed is None and found.plan.rounds == 2


def test_rounds_left_to_the_rule_are_resolved():
    table = plan()
    del table["rounds"]
    assert tune(table, LAMS, folds=2).plan.rounds >= 1


def test_mean_and_standard_error_are_over_folds():
    trial = Trial({}, "nmse", (0.1, 0.2, 0.6))
    assert trial.mean == pytest.approx(0.3)
    assert trial.standard_error == pytest.approx(math.sqrt(0.07 / 3))
    for given in tune(plan(), LAMS, folds=3).table:
        assert len(given.folds) == 3 and given.mean == pytest.approx(np.mean(given.folds))


def test_an_error_that_is_not_a_number_never_wins_and_an_undefined_auc_does_not_count():
    bad, good = Trial({"a": 1}, "nmse", (math.nan, 0.1)), Trial({"a": 2}, "nmse", (5.0, 5.0))
    assert rank([bad, good])[0] is good
    areas = [Trial({"a": i}, "auc", folds) for i, folds in enumerate([(0.6, math.nan), (0.7, 0.8)])]
    assert areas[0].mean == 0.6 and rank(areas)[0] is areas[1]


def test_binary_tasks_are_scored_by_the_mean_of_clients_auc(monkeypatch):
    scores, real = [], coterie.tune.tune.evaluate

    def spy(*given):
        scores.append(real(*given))
        return scores[-1]

    monkeypatch.setattr("coterie.tune.tune.evaluate", spy)
    found = tune(plan(options={**SMALL, "rows": 24, "task": "binary"}), LAMS, folds=2)
    assert found.table[0].metric == "auc" and found.table[0].mean >= found.table[1].mean
    by_fold = {score.own["auc"].value for score in scores}
    assert {value for trial in found.table for value in trial.folds} == by_fold


def test_multiclass_tasks_are_scored_by_accuracy():
    found = tune(plan(options={**SMALL, "task": "multiclass"}), LAMS, folds=2)
    assert found.table[0].metric == "accuracy" and found.table[0].mean >= found.table[1].mean


def test_ctrl_c_ranks_trials_by_folds_done():
    ahead, behind = Trial({"a": 1}, "nmse", (0.9, 0.9)), Trial({"a": 2}, "nmse", (0.1,))
    assert rank([behind, ahead]) == [ahead, behind]


# --- Optuna --------------------------------------------------------------------------------------


def test_ranges_are_searched_and_found():
    pytest.importorskip("optuna")
    table = plan("mpmtl:low_rank", {"clients": 40, "test": 60}, method="mpmtl", epsilon=4.0)
    shown = []
    found = tune(
        table,
        {
            "method.lam": Range(1e-4, 10.0),
            "rounds": Range(1, 4),
            "method.acceleration": ["on", "off"],
        },
        folds=2,
        search="optuna",
        trials=15,
        observe=shown.append,
    )
    assert [one.done for one in shown] == list(range(16)) and shown[-1].total == 15
    lams = [trial.settings["method.lam"] for trial in found.table]
    assert all(1e-4 <= lam <= 10 for lam in lams) and min(lams) < 0.1 < max(lams)
    rounds = [trial.settings["rounds"] for trial in found.table]
    assert all(type(count) is int and 1 <= count <= 4 for count in rounds)
    # The same folds and noise as a grid has: a settings' score is the same either way.
    again = tune(table, {key: [value] for key, value in found.best.items()}, folds=2)
    assert again.table[0].folds == found.table[0].folds
    few = tune(table, {"method.lam": [1e-4, 0.01, 10.0]}, folds=2)
    assert found.table[0].mean <= 1.1 * few.table[0].mean


def test_proposals_follow_the_seed_and_repeat_nothing(monkeypatch):
    pytest.importorskip("optuna")
    seen = watch_simulations(monkeypatch)
    given = {"method.lam": [0.1, 1.0]}
    first, again = (tune(plan(), given, folds=2, search="optuna", trials=9) for _ in range(2))
    assert first == again and len(first.table) == 2
    assert len(seen) == 2 * 2 * 2, "settings that were tried are not run again"
    both = tune(plan(), given, folds=2)
    assert first.best == both.best and first.table == both.table


def test_refused_proposals_do_not_end_the_search():
    pytest.importorskip("optuna")
    grid = {"method.lam": Range(-2.0, 1.0)}
    found = tune(plan(), grid, folds=2, search="optuna", trials=10)
    assert any(trial.refused for trial in found.table) and found.best["method.lam"] >= 0
    with pytest.raises(ConfigError, match="all 3 combinations are refused"):
        tune(plan(), {"method.lam": Range(-2.0, -1.0)}, folds=2, search="optuna", trials=3)


def test_scales_of_ranges():
    assert Range(0.01, 10.0).is_logarithmic
    assert Range(1, 50).is_logarithmic and Range(1, 50).is_integer
    for even in (Range(1.0, 5.0), Range(0.0, 10.0), Range(-1, 100)):
        assert not even.is_logarithmic
    for ends in ((1.0, 1.0), (2, 1), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ConfigError, match="smaller one first"):
            Range(*ends)


def test_without_optuna_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"coterie\[tune\]"):
        tune(plan(), {"method.lam": Range(0.1, 1.0)}, folds=2, search="optuna")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "a range needs Optuna"),
        ({"search": "random"}, "expected 'grid' or 'optuna'"),
        ({"trials": 5}, "a grid search tries all combinations"),
        ({"search": "optuna", "trials": 0}, "at least 1"),
    ],
)
def test_searches_that_do_not_fit_say_why(changes, told):
    grid = LAMS if "trials" in changes or changes.get("search") == "random" else {}
    with pytest.raises(ConfigError, match=told):
        tune(plan(), grid or {"method.lam": Range(0.1, 1.0)}, folds=2, **changes)


def test_the_command_reads_ranges(coterie_):
    pytest.importorskip("optuna")
    assert make_grid(["method.lam=0.01..10", "rounds=1..5", "method.kind=a..b"]) == {
        "method.lam": Range(0.01, 10),
        "rounds": Range(1, 5),
        "method.kind": ["a..b"],
    }
    line = f"tune {FLAGS} --folds 2 --quiet --grid method.lam=0.1..10"
    code, out, err = coterie_(f"{line} --search optuna --trials 3 --json")
    found = json.loads(out)
    assert code == 0 and err == "" and len(found["trials"]) == 3
    assert found["best"]["method.lam"] == Plan.load(Path("tuned.toml")).method.lam
    code, out, err = coterie_(f"{line} --out b.toml")
    assert code == 2 and "--search optuna" in err


# --- refusals ------------------------------------------------------------------------------------


def test_refused_combinations_are_reported_and_not_fatal():
    grid = {"method.acceleration": ["on", "strong"], "method.mu": [0.0, 0.01]}
    found = tune(plan(method="mpmtl"), grid, folds=2)
    refused = [trial for trial in found.table if trial.refused]
    assert [trial.settings for trial in refused] == [
        {"method.acceleration": "strong", "method.mu": 0.0}
    ]
    assert "needs mu > 0" in refused[0].refused and found.table[-1] is refused[0]
    assert not refused[0].folds


def test_shapes_of_the_budget_and_methods_can_be_in_the_grid():
    grid = {"privacy.spend.kind": ["even", "power"], "privacy.spend.alpha": [0.4]}
    found = tune(plan(), grid, folds=2)
    assert found.plan.privacy.spend.kind == "power" and "alpha" in found.table[-1].refused
    table = plan(method="pmtl")
    table["method"] |= {"lam": 0.7, "model": {"kind": "linear", "bias": False}}
    both = tune(table, {"method.kind": ["pmtl", "local"], "method.model.bias": [True]}, folds=2)
    assert not any(trial.refused for trial in both.table)
    laid = apply_settings(table, {"method.kind": "local"})["method"]
    assert laid == {"kind": "local", "model": {"kind": "linear", "bias": False}}
    assert table["method"]["lam"] == 0.7


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({}, "grid is empty"),
        ({"method.lam": []}, "method.lam = .*expected a list"),
        ({"method.lam": "0.1"}, "expected a list"),
        (
            {"method.lamm": [1.0]},
            r"unknown setting 'lamm': did you mean lam\? Expected one of .*lam",
        ),
        ({"nothing.at.all": [1]}, "unknown setting 'nothing': expected one of"),
        ({"rounds.x": [1]}, "rounds is not a table"),
        ({"method.lam": [-1.0, -2.0]}, "all 2 combinations are refused.*lam = -1"),
        ({"data.split_seed": [1, 2]}, "data cannot be tuned"),
        ({"baselines": [["local"], ["mixed"]]}, "baselines cannot be tuned"),
        ({"simulation_seed": [1, 2]}, "lucky"),
        ({"privacy.epsilon": [1, 2]}, "one budget"),
        ({"privacy.delta": [1e-5, 1e-3]}, "one budget"),
        ({"tuned": ["no"]}, "tuning writes it"),
    ],
)
def test_grids_that_do_not_fit_say_why_before_any_run(grid, told, monkeypatch):
    seen = watch_simulations(monkeypatch)
    with pytest.raises(ConfigError, match=told):
        tune(plan(), grid)
    assert not seen


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"folds": 1}, "folds = 1: expected at least 2"),
        ({"folds": 10}, "no client of .* has more than 9 training rows"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_folds_that_do_not_fit_say_why(changes, told):
    with pytest.raises(ValueError, match=told):
        tune(plan(), LAMS, **changes)


def test_settings_are_compared_at_one_epsilon():
    table = plan()
    table["privacy"] = {"noise_multiplier": 3.0}
    with pytest.raises(ConfigError, match="give epsilon"):
        tune(table, LAMS)


def test_no_auc_in_any_fold_is_said_before_any_run(monkeypatch):
    seen = watch_simulations(monkeypatch)
    with pytest.raises(ConfigError, match="both classes"):
        tune(plan(options={**SMALL, "rows": 4, "task": "binary"}), LAMS, folds=3)
    assert not seen


# --- what it costs, in words ---------------------------------------------------------------------


def test_generated_and_declared_data_are_public_and_all_other_is_not():
    def labelled(name, *, public=False, tuned="no"):
        return tuning_label(Plan.from_table(plan(name, None, tuned=tuned)), public=public)

    for name in ("synthetic", "synthetic:clusters", "mpmtl:low_rank"):
        assert labelled(name) == "public"
    for name in ("districts", "digits", "exam.csv", "synthetic.csv", "mpmtl:mine.csv"):
        assert labelled(name) == "not covered"
        assert labelled(name, public=True) == "public"
    # What was chosen on private rows stays so.
    assert labelled("synthetic", public=True, tuned="not covered") == "not covered"
    # What was paid for stays paid for, unless private rows are looked at afterwards.
    assert labelled("synthetic", tuned="charged") == "charged"
    assert labelled("exam.csv", tuned="charged") == "not covered"


@pytest.mark.parametrize(
    ("tuned", "told"),
    [
        ("no", "none"),
        ("public", "on public data"),
        ("charged", CHARGED),
        ("not covered", NOT_COVERED),
    ],
)
def test_every_result_says_how_it_was_tuned(tuned, told, coterie_, no_charts):
    line = f"run {FLAGS} --set tuned='{tuned}' --quiet --out run"
    code, out, _ = coterie_(line)
    page = Path("run/report.html").read_text()
    assert code == 0 and Plan.load(Path("run/plan.toml")).tuned == tuned
    assert json.loads(Path("run/result.json").read_text())["tuning"] == told
    assert json.loads(Path("run/guarantee.json").read_text())["tuning"] == tuned
    assert (f"Tuning: {told}." in out) == (tuned != "no")
    loud = tuned == "not covered"
    assert ("TUNING IS NOT COVERED" in " ".join(out.split())) == loud
    assert (f"tuning is {NOT_COVERED}." in page) == loud
    assert (f"tuning is {html.escape(CHARGED)}." in page) == (tuned == "charged")
    again = coterie_("run --resume run")[1]  # shown from the files
    assert (f"Tuning: {told}." in again) == (tuned != "no")
    assert json.loads(coterie_("run --resume run --json")[1])["tuning"] == told


def test_a_plan_knows_four_labels_only():
    with pytest.raises(ConfigError, match="one of 'no', 'public', 'charged', 'not covered'"):
        Plan.from_table(plan(tuned="privately"))


# --- the command ---------------------------------------------------------------------------------


def test_the_plan_that_is_written_runs(coterie_):
    code, out, err = coterie_(f"tune {FLAGS} --epsilon 3 --folds 3 --grid method.lam=0.1,1")
    assert code == 0 and "6/6" in err and "6/6" not in out  # progress is on stderr
    for told in ("NMSE (smaller is better)", "best: method.lam = ", "Not private:", " ± "):
        assert told in out
    assert "Tuning: on public data" in out and "coterie run --plan tuned.toml" in out
    written = Plan.load(Path("tuned.toml"))
    assert written.tuned == "public" and written.privacy.epsilon == 3
    assert written.privacy.delta == 1e-5 and written.simulation_seed is None
    code, out, _ = coterie_("run --plan tuned.toml --quiet --json")
    found = json.loads(out)
    assert code == 0 and found["tuning"] == "on public data" and not found["simulation"]


def test_private_files_are_not_covered_unless_declared_public(coterie_):
    write_rows("exam.csv")
    line = "tune --data exam.csv --method pmtl --rounds 2 --folds 2 --quiet"
    line += " --grid method.lam=0.3,1"
    code, out, err = coterie_(f"{line} --out private.toml")
    assert code == 0 and err == "" and f"Tuning: {NOT_COVERED}" in out
    assert Plan.load(Path("private.toml")).tuned == "not covered"
    code, out, _ = coterie_(f"{line} --public --out public.toml")
    assert "Tuning: on public data" in out and Plan.load(Path("public.toml")).tuned == "public"
    assert f"Tuning: {NOT_COVERED}" in coterie_("run --plan private.toml --quiet")[1]
    # Going on from a plan that was tuned on private rows does not wash it clean.
    more = "--grid privacy.clip=0.5,1 --public --folds 2 --quiet --out more.toml"
    assert coterie_(f"tune --plan private.toml {more}")[0] == 0
    assert Plan.load(Path("more.toml")).tuned == "not covered"


def test_json_is_one_object(coterie_):
    line = f"tune {FLAGS} --folds 2 --quiet --json --method mpmtl"
    code, out, err = coterie_(f"{line} --grid method.acceleration=on,strong --grid method.mu=0,0.1")
    found = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and err == "" and len(out.splitlines()) == 1
    assert found["plan"] == "tuned.toml" and not found["interrupted"]
    assert found["tuning"] == "on public data" and "without noise" in found["not_private"]
    best = found["trials"][0]
    assert found["best"] == best["settings"] and found["mean"] == best["mean"]
    assert len(best["folds"]) == 2 and best["refused"] is None
    assert [bool(trial["refused"]) for trial in found["trials"]] == [False, False, False, True]


def test_refusals_and_ends_of_the_grid_are_pointed_out(coterie_):
    line = f"tune {FLAGS} --folds 2 --quiet --grid method.lam=-2,-1,100,1000,2000"
    out = coterie_(line)[1]
    assert "2 of 5 combinations are refused" in out and "lam = -2" in out
    worse = coterie_(f"tune {FLAGS} --folds 2 --quiet --grid method.lam=0.3,300,3000 --out b.toml")
    assert "method.lam = 0.3 is the smallest value tried: try smaller ones" in worse[1]


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_shows_the_best_so_far_and_writes_nothing(coterie_, monkeypatch, as_json):
    real, calls = coterie.tune.tune.simulate, []

    def interrupted(*given, **more):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr("coterie.tune.tune.simulate", interrupted)
    flags = "--folds 3 --quiet --grid method.lam=0.3,3000" + (" --json" if as_json else "")
    code, out, err = coterie_(f"tune {FLAGS} {flags}")
    assert code == 130 and "interrupted" in err and not Path("tuned.toml").exists()
    if as_json:
        found = json.loads(out)
        assert found["interrupted"] and found["plan"] is None
        assert found["best"] == {"method.lam": 0.3}
    else:
        assert "best: method.lam = 0.3" in out and "coterie run" not in out


def test_ctrl_c_before_the_first_result(coterie_, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.tune.tune.simulate", stop)
    code, out, err = coterie_(f"tune {FLAGS} --grid method.lam=0.3,3 --quiet")
    assert code == 130 and out == "" and "interrupted" in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "nothing to tune"),
        ("--grid method.lam", "KEY=VALUE,VALUE"),
        ("--grid method.lam=", "expected a list"),
        ("--grid method.lam=1,2 --grid method.lam=3", "given twice"),
        ("--grid method.lamm=1,2", "unknown setting 'lamm': did you mean lam?"),
        ("--grid method.lam=low,high", "expected float"),
        ("--grid method.lam=1,2 --folds 1", "at least 2"),
        ("--grid method.lam=1,2 --folds 10", "more than 9 training rows"),
        ("--grid method.lam=1,2 --noise-multiplier 3", "give epsilon"),
        ("--grid method.lam=1,2 --out kept.toml", "kept.toml exists"),
        ("--grid method.lam=1,2 --out no/such.toml", "no such folder"),
    ],
)
def test_mistakes_are_one_line(coterie_, flags, told):
    Path("kept.toml").write_text("mine")
    code, out, err = coterie_(f"tune {FLAGS} --quiet {flags}")
    assert code == 2 and told in err and len(err.splitlines()) == 1 and out == ""
    assert Path("kept.toml").read_text() == "mine" and not Path("tuned.toml").exists()


def test_grids_are_read_as_toml_or_words():
    grid = make_grid(["a=1,0.5", "b=on,off", "c=true,false", 'd="x,y"', "e=[1,2],[3]"])
    assert grid == {
        "a": [1, 0.5],
        "b": ["on", "off"],
        "c": [True, False],
        "d": ["x,y"],
        "e": [[1, 2], [3]],
    }
