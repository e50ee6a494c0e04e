"""What a run keeps for its report: the score of every round, and errors of the shared model."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import mean_squared_error
from tests.report.runs import make_run

from coterie.cli.main import main
from coterie.data.config import DataConfig
from coterie.engine.simulate import Progress
from coterie.evaluation import history
from coterie.evaluation.history import History, is_cheap
from coterie.methods.base import Method
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.runs.run import execute

pytestmark = pytest.mark.full


def plan_of(method: Method | None = None, **changes: Any) -> Plan:
    options = {"clients": 12, "rows": [6, 14], "features": 3, "task": "regression"}
    settings: dict[str, Any] = {
        "data": DataConfig(name="synthetic", options=options),
        "method": method or PMTL(),
        "privacy": Privacy(epsilon=20.0),
        "rounds": 4,
        "simulation_seed": 3,
        "compare_with_local": False,
    }
    return Plan(**{**settings, **changes})


def lines_of(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(folder / "history.parquet").to_pydict()
    return found


# --- errors of the shared model


@pytest.mark.parametrize("method", [PMTL(), PFEB()], ids=lambda one: one.kind)
def test_errors_of_the_shared_model_are_those_of_its_weights(
    tmp_path: Path, method: Method
) -> None:
    run_plan = plan_of(method)
    made = execute(run_plan, folder=tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pydict()
    _, test = run_plan.data.split()
    shared = made.outcome.shared
    if "mean" in shared:  # of a prior: weights, and the intercept last
        mean = shared["mean"].double().numpy().ravel()
        weight, bias = mean[:-1], mean[-1]
    else:
        weight, bias = shared["weight"].double().numpy().ravel(), float(shared["bias"])
    for client in range(len(test)):
        rows = test.clients(np.array([client]))
        x, y = rows.x[0].double().numpy(), rows.y[0].double().numpy()
        expected = mean_squared_error(y, x @ weight + bias)
        assert table["error_shared"][client] == pytest.approx(expected, rel=1e-4)
    assert table["error_shared"] != table["error"]


@pytest.mark.parametrize("method", [FedAvg(), DPFedMTL(), Local()], ids=lambda one: one.kind)
def test_there_are_none_where_the_shared_model_is_everybodys_or_no_model(
    tmp_path: Path, method: Method
) -> None:
    execute(plan_of(method), folder=tmp_path / "run")
    names = pq.read_table(tmp_path / "run" / "metrics.parquet").column_names
    assert "error" in names and "error_shared" not in names


# --- the score of every round


def test_a_small_run_keeps_its_history_unasked(tmp_path: Path) -> None:
    execute(plan_of(), folder=tmp_path / "a")
    execute(plan_of(history=True), folder=tmp_path / "b")
    execute(plan_of(history=False), folder=tmp_path / "c")
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "b")
    assert lines_of(tmp_path / "a")["round"] == [1, 2, 3, 4]
    assert not (tmp_path / "c" / "history.parquet").exists()
    assert "history" not in (tmp_path / "a" / "plan.toml").read_text()
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    score = lines_of(tmp_path / "a")["value"][-1]
    assert score == pytest.approx(result["value"], rel=0.2), "PMTL solves once more at the end"


def test_a_long_run_scores_sixteen_rounds_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines are those of a history on request, also of a run that was cut off."""
    long = replace(plan_of(), rounds=40)
    execute(replace(long, history=True), folder=tmp_path / "asked")
    usual = History._note

    def note(self: History, progress: Progress) -> None:
        usual(self, progress)
        if progress.round == 20:
            raise CutError

    with monkeypatch.context() as patch:
        patch.setattr(History, "_note", note)
        with pytest.raises(CutError):
            execute(long, folder=tmp_path / "long")
    execute(long, folder=tmp_path / "long")
    few, every = lines_of(tmp_path / "long"), lines_of(tmp_path / "asked")
    assert len(few["round"]) == 16 and few["round"][0] == 1 and few["round"][-1] == 40
    assert set(np.diff(few["round"])) == {2, 3}
    places = [number - 1 for number in few["round"]]
    assert few["value"] == [every["value"][place] for place in places]


def test_a_large_run_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_plan = plan_of()
    train, test = run_plan.data.split()
    assert is_cheap(run_plan.method, train, test, 4)
    assert not is_cheap(run_plan.method, train, test, 10**6)
    assert not is_cheap(Local(), train, test, 0), "nothing is posted, and no round is there"
    monkeypatch.setattr(history, "_CHEAP", 100)
    execute(run_plan, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "history.parquet").exists()
    execute(replace(run_plan, history=True), folder=tmp_path / "asked")
    assert (tmp_path / "asked" / "history.parquet").exists()


def test_the_command_line_has_both(tmp_path: Path, no_pages: None) -> None:
    line = "run --anyway --data synthetic --option clients=8 --rounds 2 --quiet --json"
    line += " --simulation-seed 1"
    for flag, kept in (("", True), ("--history", True), ("--no-history", False)):
        out = tmp_path / f"run{flag}"
        assert main([*line.split(), "--out", str(out), *([flag] if flag else [])]) == 0
        assert (out / "history.parquet").exists() == kept
        told = (out / "plan.toml").read_text()
        assert ("history = " in told) == bool(flag)


class CutError(Exception):
    """Cuts a run off."""


@pytest.mark.parametrize("at", [1, 3, 4])
@pytest.mark.parametrize("scored", [False, True])
def test_a_history_is_whole_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, scored: bool
) -> None:
    """Cut off after a post is out: before its line is written, or right after."""
    execute(plan_of(), folder=tmp_path / "whole")
    usual = History._note

    def note(self: History, progress: Progress) -> None:
        if progress.round == at and not scored:
            raise CutError
        usual(self, progress)
        if progress.round == at:
            raise CutError

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(History, "_note", note)
        with pytest.raises(CutError):
            execute(plan_of(), folder=folder)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 9, "val')
    execute(plan_of(), folder=folder)
    assert lines_of(folder) == lines_of(tmp_path / "whole")
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert sum("val" in line and line.endswith("}") for line in lines) == 4


def test_without_a_seed_nobody_knows_who_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = plan_of(simulation_seed=None, history=True, privacy=Privacy(epsilon=math.inf))
    usual = History._note

    def note(self: History, progress: Progress) -> None:
        if progress.round == 2:
            raise CutError
        usual(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(History, "_note", note)
        with pytest.raises(CutError):
            execute(free, folder=tmp_path / "run")
    made = execute(free, folder=tmp_path / "run")
    assert lines_of(tmp_path / "run")["answered"] == [12, None, 12, 12]
    assert any("12 clients contributed" in told for told in made.summary["notices"])


def test_a_folder_whose_name_the_locale_does_not_know(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "été data")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = (
        "import sys; sys.modules['altair'] = None\n"  # charts take long to import
        "from pathlib import Path; from coterie.report.page import write_report\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[1], 'report.html'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **plain},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").exists()
