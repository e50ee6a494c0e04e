"""`coterie compare`: cells, the table, refusals, privacy spent and workers."""

import json
import math
import multiprocessing
from multiprocessing import resource_tracker
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.methods.base import registered
from coterie.planning.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import locked
from coterie.runs.budget import Budget, declare_total, read_register
from coterie.runs.run import execute, foresee
from coterie.runs.summary import NOT_COVERED
from coterie.tune import compare as library
from coterie.tune.compare import (
    COLUMNS,
    Spent,
    carry_out,
    claim_folder,
    finished,
    make_comparison,
    privacy_spent,
    read_comparison,
    rows_of,
)
from coterie.tune.frontier import find
from coterie.verification.account import gaussian_epsilon

pytestmark = pytest.mark.full

BASE = {"data": {"name": "districts", "clients": 20}}
SMALL = [
    "compare", "--data", "districts", "--clients", "20", "--set", "rounds=3",
    "--quiet", "--no-report",
]  # fmt: skip


def compare(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def cells_of(**given):
    return make_comparison({**BASE, "compare": given}).cells()


def read(folder):
    return pq.read_table(folder / "comparison.parquet").to_pylist()


# --- the plan -----------------------------------------------------------------


def test_cells_by_what_methods_post():
    cells = cells_of(methods=["local", "pmtl", "mtl"], epsilons=[1, 0.5, math.inf], seeds=2)
    found = [(cell.label, cell.epsilon, cell.seed) for cell in cells]
    assert found == [
        *[("local", None, seed) for seed in (0, 1)],
        *[("pmtl", epsilon, seed) for epsilon in (0.5, 1.0, math.inf) for seed in (0, 1)],
        *[("mtl", math.inf, seed) for seed in (0, 1)],
    ]
    assert len({cell.place for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.table["simulation_seed"] == cell.table["data"]["split_seed"] == cell.seed


def test_every_registered_method_has_cells():
    cells = cells_of(methods=list(registered()), epsilons=[1.0], seeds=1)
    assert [cell.label for cell in cells] == list(registered())
    # A method that needs more than its defaults says so in its cell, and nothing is raised.
    assert all(isinstance(cell.refused, str | None) for cell in cells)
    assert sum(cell.refused is None for cell in cells) > 15


def test_settings_by_method_and_by_label():
    made = make_comparison(
        {
            **BASE,
            "method": {"last_lam": 0.5},
            "strong": {"privacy": {"clip": 0.25}, "method": {"last_lam": 9.0}},
            "compare": {
                "methods": ["local", "pmtl", {"kind": "pmtl", "label": "strong"}],
                "epsilons": 1.0,
                "seeds": [7],
            },
        }
    )
    by_label = {cell.label: cell.table for cell in made.cells()}
    assert "last_lam" not in by_label["local"]["method"]
    assert by_label["pmtl"]["method"]["last_lam"] == 0.5
    assert by_label["strong"]["method"]["last_lam"] == 9.0
    assert by_label["strong"]["privacy"] == {"clip": 0.25, "epsilon": 1.0}
    assert by_label["pmtl"]["privacy"] == {"epsilon": 1.0}
    assert made.notes == ("method.last_lam is no setting of local and is ignored there",)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    made = make_comparison(
        {
            **BASE,
            "compare": {
                "methods": ["local", {"kind": "pmtl", "label": "pmtl, pulled", "lam": 3.0}],
                "epsilons": [1, math.inf],
                "seeds": [3, 1],
                "grid": {"method.sgd.lr": [0.1, 1.0], "pmtl, pulled.privacy.clip": [0.5, 1.0]},
            },
        }
    )
    claim_folder(tmp_path / "c", made)
    again = read_comparison(tmp_path / "c")
    assert again.cells() == made.cells() and again.options.grid == made.options.grid
    assert dict(again.cells()[-1].grid) == {
        "method.sgd.lr": [0.1, 1.0], "privacy.clip": [0.5, 1.0],
    }  # fmt: skip
    with pytest.raises(FileExistsError, match="--resume"):
        claim_folder(tmp_path / "c", made)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"methods": ["pmtl", "nonesuch"]}, "method nonesuch: no such method; expected one of"),
        ({"methods": ["pmtl", "pmtl"]}, "label 'pmtl'"),
        ({"methods": [{"kind": "pmtl", "lamb": 1}]}, "has no setting lamb"),
        ({"methods": [{"kind": "pmtl", "label": "data"}]}, "label 'data'"),
        ({"epsilons": [1, 0]}, "epsilons = "),
        ({"epsilons": ["a"]}, "epsilons = "),
        ({"seeds": 0}, "seeds = 0"),
        ({"seeds": [1, -2]}, "seeds = "),
        ({"seeds": 2, "repeats": 2}, "seeds and repeats"),
        ({"repeats": [1]}, "repeats = "),
        ({"colour": 1}, "unknown setting 'colour'"),
        ({"workers": -1}, "workers = -1"),
        ({"search": "luck"}, "expected one of 'grid', 'optuna'"),
        ({"grid": {"method.nonesuch": [1]}}, "none of the methods"),
        ({"grid": {"method.lam": 1}}, "expected a list"),
    ],
)
def test_invalid_options_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        make_comparison({**BASE, "compare": {"methods": ["local", "pmtl"], **given}})


# --- from flags to table ------------------------------------------------------


def test_table_frontier_and_text(tmp_path, capsys):
    out = tmp_path / "c"
    status, printed, _ = compare(
        capsys, *SMALL, "--methods", "local,pmtl,mtl", "--epsilons", "1,8", "--seeds", 2,
        "--workers", 0, "--out", out,
    )  # fmt: skip
    assert status == 0
    rows = read(out)
    assert len(rows) == 2 + 4 + 2 and rows[0].keys() == COLUMNS.keys()
    for row in rows:
        assert row["status"] == "done" and row["simulation"] and row["tuning"] == "none"
        result = json.loads((out / row["run"] / "result.json").read_text())
        assert row["value"] == result["value"] and row["local_value"] == result["local_value"]
        assert row["epsilon"] == float(result["epsilon"]) and row["seconds"] == result["seconds"]
    by_label = {row["label"]: row for row in rows}
    assert by_label["local"]["epsilon"] == 0 and by_label["local"]["epsilon_asked"] is None
    assert by_label["mtl"]["epsilon"] == math.inf and not by_label["mtl"]["private"]
    assert by_label["pmtl"]["private"] and by_label["pmtl"]["epsilon"] <= 8
    assert json.loads(by_label["pmtl"]["settings"])["rounds"] == 3
    described = pq.read_schema(out / "comparison.parquet").field("epsilon").metadata
    assert b"upper bound" in described[b"description"]
    printed = " ".join(printed.split())
    for words in ("NOT PRIVATE", "SIMULATION", "At epsilon 1:", "false alarm", "2 seeds"):
        assert words in printed, words
    assert "* is the best at its epsilon" in printed


def test_progress_and_frontier_by_hand(tmp_path):
    made = make_comparison(
        {**BASE, "rounds": 3, "compare": {"methods": ["local", "pmtl"], "epsilons": 4, "seeds": 2}}
    )
    claim_folder(tmp_path / "c", made)
    seen = []
    ended = carry_out(tmp_path / "c", workers=0, observe=seen.append)
    assert [progress.done for progress in seen] == [0, 1, 2, 3, 4] and seen[0].total == 4
    assert all(end.status == "done" for end in ended.values())
    assert len(seen[2].trials) == 1  # a method without a time runs first
    (best,) = seen[-1].trials
    assert best.settings == {"method": "pmtl", "epsilon": 4.0} and len(best.folds) == 2
    rows = rows_of(made.cells(), ended, tmp_path / "c")
    found = find(rows, tmp_path / "c")
    values = [row["value"] for row in rows if row["label"] == "pmtl"]
    point = next(point for point in found.points if point.label == "pmtl")
    assert point.value == pytest.approx(sum(values) / 2) and point.seeds == 2
    best = min(found.at(4.0), key=lambda point: point.value)
    assert [point.best for point in found.points] == [p is best for p in found.points]
    # `local` is the local baseline here: one pair, not two of the same.
    assert [(pair.first, pair.second) for pair in found.pairs] == [("local", "pmtl")]
    ours = [
        pq.read_table(tmp_path / "c" / row["run"] / "metrics.parquet")["error"].to_pylist()
        for row in rows
    ]
    apart = [a - b for k in range(2) for a, b in zip(ours[k], ours[2 + k], strict=True)]
    assert found.pairs[0].difference.mean == pytest.approx(sum(apart) / len(apart))
    assert found.pairs[0].difference.clients == 20


def test_json_report_and_resume(tmp_path, capsys):
    out = tmp_path / "c"
    flags = ["--methods", "local,pmtl", "--epsilons", "1", "--seeds", "5,6", "--workers", "0"]
    small = [word for word in SMALL if word != "--no-report"]
    _, printed, _ = compare(capsys, *small, *flags, "--out", out, "--json")
    told = json.loads(printed)
    assert told["done"] == told["cells"] == 4 and told["epsilons"] == [1.0] and told["simulation"]
    assert told["report"] == str(out / "report.html") and (out / "report.html").exists()
    assert {row["label"] for row in told["frontier"]} == {"local", "pmtl"}
    assert told["differences"][0]["seeds"] == 2 and told["together"] is None
    status, _, err = compare(capsys, *small, *flags, "--out", out)
    assert status == 2 and "--resume" in err
    place = list(finished(out))[-1]
    before = (place / "metrics.parquet").read_bytes()
    (place / "result.json").unlink()  # as if cut off before its end
    _, again, _ = compare(capsys, "compare", "--resume", out, "--json", "--quiet", "--workers", "0")
    assert json.loads(again) == told
    assert (place / "metrics.parquet").read_bytes() == before
    status, _, err = compare(capsys, "compare", "--resume", out, "--epsilons", "2")
    assert status == 2 and "leave out --epsilon" in err
    assert compare(capsys, "compare", "--resume", tmp_path)[0] == 2
    (out / "report.html").unlink()
    assert compare(capsys, "report", out)[0] == 0 and (out / "report.html").exists()


def test_a_method_that_refuses_the_data_is_a_row(tmp_path, capsys):
    out = tmp_path / "c"
    status, printed, _ = compare(
        capsys, "compare", "--data", "digits", "--option", "clients=20", "--set", "rounds=2",
        "--methods", "local,mtlsvm,mpmtl", "--epsilons", "4", "--seeds", "1", "--workers", "0",
        "--quiet", "--no-report", "--out", out,
    )  # fmt: skip
    status_of = {row["label"]: row["status"] for row in read(out)}
    assert status == 0 and status_of["local"] == "done"
    refused = [label for label, told in status_of.items() if told.startswith("refused: ")]
    assert refused, status_of
    for label in refused:
        assert f"{label}: {status_of[label]}" in " ".join(printed.split())
    assert "only clients vary" in printed


def test_nothing_that_can_be_run_is_an_error(tmp_path, capsys):
    status, _, err = compare(
        capsys, "compare", "--data", "digits", "--option", "clients=20", "--methods", "mpmtl",
        "--workers", "0", "--seeds", "1", "--quiet", "--out", tmp_path / "c",
    )  # fmt: skip
    assert status == 2 and "no cell could be run; mpmtl: refused: " in err


def test_a_failed_cell_does_not_lose_the_others(tmp_path, capsys):
    out = tmp_path / "c"
    flags = ["--methods", "local,pmtl", "--epsilons", "1", "--seeds", "1", "--workers", "0"]
    blocked = out / "runs" / "pmtl" / "epsilon-1"
    made = make_comparison(
        {**BASE, "rounds": 3, "compare": {"methods": ["local", "pmtl"], "epsilons": 1, "seeds": 1}}
    )
    claim_folder(out, made)
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    status, printed, err = compare(capsys, "compare", "--resume", out, *flags[-2:], "--no-report")
    assert status == 1 and "failed" in printed and "--resume" in err
    assert [row["status"][:6] for row in read(out)] == ["done", "failed"]
    blocked.unlink()
    status, _, _ = compare(capsys, "compare", "--resume", out, *flags[-2:], "--no-report")
    assert status == 0 and [row["status"] for row in read(out)] == ["done", "done"]


def test_repeats_are_releases_that_add_up(tmp_path, capsys):
    out = tmp_path / "c"
    flags = ["--methods", "local,pmtl", "--epsilons", "1", "--repeats", "2", "--workers", "0"]
    _, printed, _ = compare(capsys, *SMALL, *flags, "--out", out, "--json")
    told = json.loads(printed)
    assert not told["simulation"] and not any(row["simulation"] for row in read(out))
    epsilon, _ = told["together"]
    assert 1 < epsilon < 2  # two Gaussian runs composed: more than one, less than their sum
    values = [row["value"] for row in read(out) if row["label"] == "pmtl"]
    assert values[0] != values[1]
    _, printed, _ = compare(capsys, "compare", "--resume", out, "--quiet", "--no-report")
    assert "2 runs have released results" in " ".join(printed.split())
    assert "SIMULATION" not in printed


# --- the budget register -------------------------------------------------------

ALONE = Plan.from_table(
    {**BASE, "method": {"kind": "pmtl"}, "privacy": {"epsilon": 0.5}, "rounds": 3}
)
REAL = ["--method", "local,pmtl", "--epsilon", "0.5,1", "--repeats", "2"]


def test_cells_with_real_noise_are_entered_once_each(tmp_path, capsys, register):
    out = tmp_path / "c"
    execute(ALONE, budget=Budget())
    _, _, err = compare(capsys, *SMALL, *REAL, "--workers", "0", "--out", out)
    assert err.startswith("1 private run on these clients (districts): together epsilon at most")
    assert "with these 4 (delta 1e-05)." in err and err.count("private run") == 1
    entries = read_register(register).entries
    places = [Path(entry.run).relative_to(out).as_posix() for entry in entries[1:]]
    assert sorted(places) == sorted(row["run"] for row in read(out) if row["label"] == "pmtl")
    _, _, err = compare(capsys, "compare", "--resume", out, "--quiet", "--no-report")
    assert err == "" and read_register(register).entries == entries


def test_a_comparison_that_does_not_fit_the_total_is_refused_as_a_whole(tmp_path, capsys, register):
    """Any two of its four runs fit."""
    (asked,) = foresee([ALONE])
    declare_total(register, (asked.clients, asked.population), 1.5, "districts")
    before = register.read_bytes()
    status, printed, err = compare(capsys, *SMALL, *REAL, "--out", tmp_path / "c")
    assert status == 2 and printed == "" and err.count("\n") == 1
    assert "these 4 runs ask for" in err and "coterie budget --total E" in err
    assert not (tmp_path / "c").exists() and register.read_bytes() == before
    # A choice of settings by charged runs counts with the most runs that are likely.
    one = ["--method", "pmtl", "--epsilon", "0.5", "--repeats", "1"]
    grid = ["--grid", "method.lam=0.1,1", "--charge", "--out", tmp_path / "d"]
    status, _, err = compare(capsys, *SMALL, *one, *grid)
    assert status == 2 and "the total declared for these clients" in err
    assert not (tmp_path / "d").exists() and register.read_bytes() == before


def test_simulations_are_not_entered(tmp_path, capsys, register):
    flags = ["--method", "pmtl", "--epsilon", "0.5", "--seeds", "1", "--workers", "0"]
    compare(capsys, *SMALL, *flags, "--out", tmp_path / "c")
    assert not register.exists()


# --- settings chosen inside ---------------------------------------------------


def test_the_table_states_what_covers_tuning(tmp_path, capsys):
    out = tmp_path / "c"
    flags = ["--methods", "local,pmtl", "--epsilons", "4", "--seeds", "1", "--workers", "0"]
    grid = ["--grid", "method.change_from=shared,own", "--folds", "2"]
    loud = [word for word in SMALL if word != "--quiet"]
    _, printed, err = compare(capsys, *loud, *flags, *grid, "--out", out)
    by_label = {row["label"]: row for row in read(out)}
    assert by_label["local"]["tuning"] == "none"
    assert by_label["pmtl"]["tuning"].startswith("NOT COVERED by epsilon")
    assert json.loads(by_label["pmtl"]["settings"])["change_from"] in ("shared", "own")
    assert "TUNING of pmtl: NOT COVERED by epsilon" in " ".join(printed.split())
    assert "method.change_from is no setting of local" in err
    kept = (out / "tuned" / "pmtl" / "epsilon-4" / "seed-0.toml").read_text()
    assert "not covered" in kept
    free = tmp_path / "free"
    compare(capsys, *SMALL, *flags, *grid, "--public", "--out", free)
    assert {row["label"]: row["tuning"] for row in read(free)}["pmtl"] == "on public data"


def test_optuna_takes_a_range(tmp_path, capsys):
    pytest.importorskip("optuna")
    out = tmp_path / "c"
    status, printed, _ = compare(
        capsys, "compare", "--data", "synthetic", "--option", "clients=8", "--methods", "pmtl",
        "--epsilons", "1", "--seeds", "1", "--grid", "method.lam=0.2..0.3", "--search", "optuna",
        "--trials", "2", "--folds", "2", "--workers", "0", "--quiet", "--no-report", "--out", out,
    )  # fmt: skip
    (row,) = read(out)
    assert status == 0 and row["tuning"] == "on public data"
    assert "*" not in printed  # one method has no best
    assert 0.2 <= json.loads(row["settings"])["lam"] <= 0.3


@pytest.fixture
def two_runs(monkeypatch):
    """Have a charged selection make two runs."""
    monkeypatch.setattr("coterie.privacy.selection.RunLaw.draw", lambda law, entropy: 2)


def test_charged_tuning_is_in_epsilon(tmp_path, capsys, two_runs):
    out = tmp_path / "c"
    status, printed, _ = compare(
        capsys, *SMALL, "--methods", "local,pmtl", "--epsilons", "1", "--seeds", "1",
        "--grid", "pmtl.method.lam=0.01,1", "--charge-tuning", "--workers", "0", "--out", out,
    )  # fmt: skip
    assert status == 0
    row = {row["label"]: row for row in read(out)}["pmtl"]
    assert row["tuning"].startswith("CHARGED") and row["epsilon"] > 1
    assert row["epsilon_chosen_alone"] > 1 and row["epsilon_asked"] == 1
    assert (out / row["run"] / "result.json").exists()
    assert row["view"] == "other clients"
    printed = " ".join(printed.split())
    assert "tuning of pmtl is CHARGED" in printed
    table, _, _ = printed.partition("mean ± standard error")
    assert "tuning CHARGED on top of epsilon" in table and "NOT COVERED" not in table


def test_what_an_earlier_choice_left_uncovered_is_not_covered_by_a_later_one(
    tmp_path, capsys, two_runs
):
    (tmp_path / "plan.toml").write_text('tuned = "not covered"\n')
    out = tmp_path / "c"
    status, printed, _ = compare(
        capsys, *SMALL, "--plan", tmp_path / "plan.toml", "--methods", "pmtl", "--epsilons", "1",
        "--seeds", "1", "--grid", "method.lam=0.01,1", "--charge-tuning", "--workers", "0",
        "--no-report", "--out", out,
    )  # fmt: skip
    (row,) = read(out)
    assert status == 0 and row["tuning"].startswith(f"{NOT_COVERED}; CHARGED: ")
    printed = " ".join(printed.split())
    table, _, below = printed.partition("mean ± standard error")
    assert "tuning NOT COVERED by epsilon" in table and "tuning CHARGED" in table
    assert f"TUNING of pmtl: {NOT_COVERED}" in below and "tuning of pmtl is CHARGED" in below
    again = ("compare", "--resume", out, "--json", "--quiet", "--workers", "0", "--no-report")
    told = compare(capsys, *again)[1]
    assert json.loads(told)["frontier"][0]["tuning"] == row["tuning"]


# --- what was spent -----------------------------------------------------------


def spoil(place):
    """Have a cell that has posted fail when it goes on: its network is another."""
    (place / "result.json").unlink()
    (place / "model.json").write_text('{"leaves": {}, "outputs": []}')


def test_a_cell_that_has_posted_and_then_failed_is_counted(tmp_path, capsys):
    out = tmp_path / "c"
    flags = (*SMALL, "--methods", "local,pmtl", "--epsilons", "1", "--repeats", "3", "--json")
    told = compare(capsys, *flags, "--workers", "0", "--no-report", "--out", out)[1]
    before = json.loads(told)["together"]
    # Three runs alike, everyone in every round: mu grows by the root of 3.
    cells = [out / "runs" / "pmtl" / "epsilon-1" / f"repeat-{number}" for number in range(3)]
    stated = json.loads((cells[0] / "guarantee.json").read_text())
    one = Guarantee.from_json(stated)
    mu = math.sqrt(3 * sum(1 / event.noise_multiplier**2 for event in one.events))
    assert before[0] == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
    spoil(cells[1])
    again = ("compare", "--resume", out, "--quiet", "--no-report", "--workers", "0")
    status, told, _ = compare(capsys, *again, "--json")
    found = json.loads(told)
    assert status == 1 and len(found["failed"]) == 1
    assert found["together"] == before and found["unfinished_but_counted"] == [str(cells[1])]
    printed = " ".join(compare(capsys, *again)[1].split())
    assert (
        "3 runs have released results" in printed
        and "Unfinished cells count with their whole plan" in printed
    )
    # A certificate is not needed; a plan that no longer fits its ledger leaves no bound.
    (cells[1] / "guarantee.json").unlink()
    assert privacy_spent(cells).together == tuple(before)
    plan = cells[1] / "plan.toml"
    plan.write_text(plan.read_text().replace("epsilon = 1.0", "epsilon = 0.5"))
    spent = privacy_spent(cells)
    assert (
        spent.together is None and "NO BOUND" in spent.text() and "other releases" in spent.text()
    )
    assert [place for place, _ in spent.uncounted] == [cells[1]]
    assert privacy_spent([out / "runs" / "local"]) == Spent()


def test_a_selection_that_was_cut_short_is_counted_by_what_was_drawn(tmp_path, capsys, two_runs):
    out = tmp_path / "c"
    flags = (*SMALL, "--methods", "pmtl", "--epsilons", "1", "--repeats", "1", "--charge-tuning")
    flags += ("--grid", "method.lam=0.01,1", "--workers", "0", "--no-report", "--json")
    whole = json.loads(compare(capsys, *flags, "--out", out)[1])["together"]
    (place,) = (out / "runs" / "pmtl").glob("*/repeat-0")
    record = json.loads((place / "selection.json").read_text())
    (place / "selection.json").write_text(json.dumps({**record, "finished": False}))
    spent = privacy_spent([place])
    assert spent.together == tuple(whole) and spent.unfinished == (place,)
    (place / "selection.json").unlink()
    assert privacy_spent([place]).together is None and "NO BOUND" in privacy_spent([place]).text()


# --- workers ------------------------------------------------------------------


def test_a_second_process_is_refused(tmp_path, capsys):
    made = make_comparison({**BASE, "compare": {"methods": ["local"], "seeds": 1}})
    claim_folder(tmp_path / "c", made)
    with locked(tmp_path / "c"):
        status, _, err = compare(capsys, "compare", "--resume", tmp_path / "c", "--quiet")
    assert status == 2 and "in use by another process" in err


def test_workers_that_cannot_start_raise(tmp_path, monkeypatch):
    made = make_comparison({**BASE, "compare": {"methods": ["local"], "epsilons": 1, "seeds": 1}})
    claim_folder(tmp_path / "c", made)
    resource_tracker.ensure_running()  # it must not use the executable below
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    with pytest.raises(OSError, match=r"workers end before their first cell \(exit status 1\)"):
        carry_out(tmp_path / "c", workers=1)


def test_a_cell_that_kills_its_worker_twice_fails(tmp_path):
    schedule = library._Schedule(cells_of(methods=["local"], seeds=1), tmp_path, None)
    schedule.lose(schedule.take(), "signal 9")
    assert schedule.left == {0} and not schedule.ended
    schedule.lose(schedule.take(), "signal 9")
    assert not schedule.left and not schedule.busy
    ended = schedule.ended[0]
    assert ended.status == "failed" and "2 times (signal 9)" in ended.why


def test_workers_are_counted_from_none(tmp_path, capsys):
    out = tmp_path / "c"
    line = ["compare", "--data", "synthetic", "--methods", "local", "--out", str(out)]
    assert main([*line, "--workers", "-3"]) == 2
    assert "workers = -3: expected an integer >= 0" in capsys.readouterr().err
    assert not (out / "runs").exists()
