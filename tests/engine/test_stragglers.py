"""Stragglers in the simulation: who is late contributes nothing, and the clock is kept."""

import json
import math
import tomllib
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from coterie.data.config import DataConfig
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import set_clock, simulate
from coterie.evaluation.history import History
from coterie.evaluation.score import evaluate
from coterie.methods.mtlsvm import MTLSVM
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.planning.stragglers import Stragglers
from coterie.privacy.sampling import Poisson
from coterie.runs.run import execute

FREE = Privacy(epsilon=math.inf)


def toy(task="binary"):
    return synthetic(
        "mean", clients=12, rows=(5, 25), features=4, task=task, spread=0.3, seed=0
    ).data


@pytest.mark.parametrize("method", [MTLSVM(epochs=2, stop=1e-12), PMTL()])
def test_late_clients_stay_as_they_were(method):
    data = toy("regression")
    stragglers = Stragglers(wait="45%", hardware="spread")
    plan = Plan(method=method, privacy=FREE, rounds=6, simulation_seed=4)
    clock = set_clock(stragglers, plan, data)
    everyone = np.arange(12)
    before, seen = {}, []

    def look(progress):
        rows = progress.store.take(
            everyone, lambda n: method.init_client_state(progress.shared, data.spec, n)
        )
        answered = set(clock.round(progress.round - 1).answered.tolist())
        assert progress.answered == len(answered)
        seen.append(len(answered))
        for client in set(range(12)) - answered:
            if client in before:
                for name, leaf in rows.items():
                    assert np.array_equal(leaf[client].numpy(), before[client][name])
        for client in everyone[progress.store.started.numpy()].tolist():
            before[client] = {name: leaf[client].numpy() for name, leaf in rows.items()}
        assert progress.seconds == pytest.approx(progress.round * (clock.wait + 0.01))

    simulate(plan, data, observe=look, stragglers=stragglers)
    assert len(seen) == 6 and 0 < np.mean(seen) < 12


def test_waiting_for_all_is_no_clock_at_all():
    data, method = toy(), MTLSVM(epochs=2, stop=1e-12)
    plan = Plan(method=method, privacy=FREE, rounds=5, simulation_seed=4)
    bare = simulate(plan, data)
    waited = simulate(plan, data, stragglers=Stragglers(wait=1e9))
    np.testing.assert_array_equal(
        bare.models.leaves["weight"].numpy(), waited.models.leaves["weight"].numpy()
    )


def test_waits_that_clients_report_are_not_covered_by_a_budget():
    data = toy()
    plan = Plan(method=MTLSVM(), privacy=Privacy(epsilon=1.0), rounds=2)
    for wait in ("all", "45%"):
        with pytest.raises(ValueError, match="epsilon does not cover"):
            simulate(plan, data, stragglers=Stragglers(wait=wait))
    outcome = simulate(plan, data, stragglers=Stragglers(wait=0.0155))
    assert outcome.guarantee.epsilon == pytest.approx(1.0, rel=5e-3)


def test_nobody_in_time_is_said_and_changes_nothing():
    table = {
        "data": {"name": "synthetic", "options": {"clients": 8, "rows": 10, "task": "binary"}},
        "method": {"kind": "mtlsvm"},
        "privacy": {"epsilon": math.inf},
        "rounds": 4,
        "simulation_seed": 1,
        "stragglers": {"wait": 0.0001},
    }
    result = execute(Plan.from_table(table))
    assert not result.outcome.shared["weight"].any()
    assert any("in 4 of 4 rounds no client answered" in told for told in result.summary["notices"])
    clock = set_clock(Stragglers(wait=0.0001), result.outcome.plan, toy())
    assert "no round makes an update" in clock.note()


def test_a_calibration_run_sets_the_clock_and_is_kept_in_the_plan(tmp_path):
    table = {
        "data": {"name": "synthetic", "options": {"clients": 6, "rows": [20, 200]}},
        "method": {"kind": "mtlsvm"},
        "privacy": {"epsilon": math.inf},
        "rounds": 2,
        "simulation_seed": 1,
        "stragglers": {"wait": "75%", "calibrate": True},
    }
    execute(Plan.from_table(table), folder=tmp_path / "run")
    kept = tomllib.loads((tmp_path / "run" / "plan.toml").read_text())["stragglers"]
    assert kept["calibrate"] is False
    assert (kept["constant"], kept["seconds_per_number"]) != (0.01, 1e-6)
    assert 0 < kept["constant"] + 2000 * kept["seconds_per_number"] < 1
    table["privacy"] = {"epsilon": 1.0}
    table["stragglers"] = {"wait": 1.0, "calibrate": True}
    with pytest.raises(ValueError, match="measures clients' own rows"):
        execute(Plan.from_table(table), folder=tmp_path / "other")
    assert not (tmp_path / "other" / "plan.toml").exists(), "nothing is claimed"


def test_who_is_late_must_not_be_seen_under_a_budget():
    plan = Plan(
        method=MTLSVM(), privacy=Privacy(epsilon=1.0), rounds=2, sampler=Poisson(6, visible=True)
    )
    with pytest.raises(ValueError, match="visible cohort"):
        simulate(plan, toy(), stragglers=Stragglers(wait=1.0))


def test_a_budget_does_not_tell_who_answered(tmp_path):
    table = {
        "data": {"name": "synthetic", "options": {"clients": 8, "rows": 10, "task": "binary"}},
        "method": {"kind": "mtlsvm"},
        "privacy": {"epsilon": 1.0},
        "rounds": 2,
        "stragglers": {"wait": 0.0001},
    }
    result = execute(Plan.from_table(table), folder=tmp_path / "run")
    assert not any(
        "answered" in told or "contributed" in told for told in result.summary["notices"]
    )
    assert any("late clients contributed nothing" in told for told in result.summary["caveats"])


def test_history_is_kept_line_by_line_and_goes_on(tmp_path):
    data = toy()
    train, test = data.split(0.3, 0)
    method = MTLSVM(epochs=1, stop=1e-12)
    plan = Plan(method=method, privacy=FREE, rounds=6, simulation_seed=4)
    whole = History(method, train, test)
    outcome = simulate(plan, train, observe=whole, stragglers=Stragglers(wait="75%"))
    folder = tmp_path / "run"

    class CutError(Exception):
        pass

    def stop(progress):
        if progress.round == 3:
            raise CutError

    folder.mkdir()
    with pytest.raises(CutError):
        simulate(
            plan, train, folder=folder, stragglers=Stragglers(wait="75%"),
            observe=History(method, train, test, folder, stop),
        )  # fmt: skip
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "sec')  # a line that was cut short
    again = History(method, train, test, folder)
    resumed = simulate(plan, train, folder=folder, observe=again, stragglers=Stragglers(wait="75%"))
    assert again.lines == whole.lines and [line["round"] for line in again.lines] == [*range(1, 7)]
    np.testing.assert_array_equal(
        outcome.models.leaves["weight"].numpy(), resumed.models.leaves["weight"].numpy()
    )
    again.keep(folder)
    table = pq.read_table(folder / "history.parquet").to_pydict()
    assert table["round"] == [*range(1, 7)] and all(s > 0 for s in table["seconds"])
    assert table["balanced_accuracy"][-1] is not None and table["r2"] == [None] * 6
    last = replace(plan, method=replace(method, last_solve=False))
    score = evaluate(method.model, simulate(last, train, stragglers=Stragglers(wait="75%")).rows,
                     test)  # fmt: skip
    assert table["value"][-1] == pytest.approx(score.value)


def test_the_command_line_has_a_clock(tmp_path, capsys):
    from coterie.cli.main import main

    out = tmp_path / "run"
    arguments = (
        "run --data synthetic --option clients=10 --option rows=12 --method mtlsvm --epsilon inf "
        f"--rounds 3 --wait 45% --hardware spread --simulation-seed 1 --out {out} --json --quiet"
    )
    assert main(arguments.split()) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["rounds"] == 3 and summary["gap"] > 0
    assert 'wait = "45%"' in (out / "plan.toml").read_text()
    assert pq.read_table(out / "history.parquet").num_rows == 3
    plan = Plan(
        data=DataConfig(name="synthetic"), method=MTLSVM(), privacy=FREE,
        stragglers=Stragglers(wait="45%"),
    )  # fmt: skip
    from coterie.core.config import to_table

    assert Plan.from_table(to_table(plan)) == plan
