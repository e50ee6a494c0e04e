"""`coterie run --epsilon 0.3,1,3`: local training, each budget, training without privacy."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.planning.plan import Plan
from coterie.runs.run import execute

pytestmark = pytest.mark.full

SMALL = [
    "run", "--data", "mpmtl:low_rank", "--option", "clients=60", "--option", "test=30",
    "--method", "mpmtl", "--epsilon", "1,10,0.1", "--simulation-seed", "3", "--quiet",
]  # fmt: skip
ONE = ["1" if word == "1,10,0.1" else word for word in SMALL]
TWO = ["1,10" if word == "1,10,0.1" else word for word in SMALL]
SCHOOL = Path(os.environ.get("COTERIE_DATA", "../shared/data")) / "school" / "school.npz"


def sweep(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def rows_of(out):
    """Return the cells of each row of the first table; a cell may take two lines."""
    lines = iter(out.splitlines())
    while "──" not in next(lines):
        pass
    rows = itertools.takewhile(str.strip, lines)
    return [re.split(r"\s{2,}", row.strip()) for row in rows if not row.startswith("  ")]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of all runs, and their summaries."""
    folder = tmp_path_factory.mktemp("sweep") / "all"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*SMALL, "--out", str(folder), "--json"]) == 0
    return folder, json.loads(out.getvalue())["runs"]


def test_a_table_of_all(swept, capsys):
    folder, _ = swept
    status, out, _ = sweep(capsys, "run", "--resume", folder)
    assert status == 0
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["single", *["mpmtl"] * 3, "mtl"]
    assert [row[-2] for row in rows] == ["0", "0.1", "1", "10", "NOT PRIVATE"]
    assert "observe all of these releases" in out and "SIMULATION" in out
    assert (folder / "report.html").exists()
    for name in ("local", "epsilon-0.1", "epsilon-1", "epsilon-10", "not-private"):
        assert (folder / name / "guarantee.json").exists()
    status, _, err = sweep(capsys, *SMALL, "--out", folder)
    assert status == 2 and "--resume" in err  # an existing folder is left alone


def test_json_and_resume_give_the_same(swept, tmp_path, capsys):
    folder, runs = swept
    assert [run["epsilon"] for run in runs[1:4]] == pytest.approx([0.1, 1, 10], rel=1e-3)
    assert runs[0]["epsilon"] == 0 and runs[4]["epsilon"] == "inf"
    assert runs[4]["value"] < runs[3]["value"] < runs[0]["value"]
    assert all(len(run["noise_to_signal"]) == run["rounds"] for run in runs[1:4])
    copy = shutil.copytree(folder, tmp_path / "all")
    (copy / "epsilon-1" / "result.json").unlink()  # as if cut off before its end
    _, again, _ = sweep(capsys, "run", "--resume", copy, "--json", "--quiet")
    assert [r["value"] for r in json.loads(again)["runs"]] == [r["value"] for r in runs]
    # A finished run is shown by its account, not by its summary.
    path = copy / "epsilon-10" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epsilon": 0.01}))
    _, out, _ = sweep(capsys, "run", "--resume", path.parent, "--json", "--quiet")
    assert json.loads(out)["epsilon"] == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("bad", ["1,x", ",", "1,-2", "0,1"])
def test_bad_budgets(tmp_path, capsys, bad):
    arguments = [*SMALL[:-5], "--epsilon", bad, "--out", str(tmp_path / "bad"), "--quiet"]
    try:
        status, _, err = sweep(capsys, *arguments)
    except SystemExit as stop:
        status, err = stop.code, capsys.readouterr().err
    assert status == 2 and "epsilon" in err and "Traceback" not in err


def test_a_printed_mechanism_is_called_no_guarantee(tmp_path, capsys, no_charts):
    arguments = [*TWO, "--set", "privacy.noise.kind=wishart_paper", "--out", tmp_path / "all"]
    _, out, _ = sweep(capsys, *arguments)
    assert "NOT A GUARANTEE: this reproduces" in out and "epsilon = inf" in out
    page = (tmp_path / "all" / "report.html").read_text()
    assert "NOT A GUARANTEE" in page
    result = json.loads((tmp_path / "all" / "epsilon-1" / "result.json").read_text())
    assert result["epsilon"] == "inf" and result["claimed_epsilon"] == pytest.approx(1.0)
    assert result["true_delta_at_claimed"] > 0.1


def test_every_kind_of_noise_ends_with_a_report(tmp_path, capsys, no_charts):
    for structure, kind in (("group_sparse", "laplace"), ("low_rank", "wishart")):
        _, out, _ = sweep(
            capsys, *ONE, "--set", f"method.structure={structure}",
            "--set", f"privacy.noise.kind={kind}", "--out", tmp_path / kind,
        )  # fmt: skip
        pure = "at delta = 0" in out
        assert pure == (kind == "laplace") and "NOT A GUARANTEE" not in out
        assert kind in (tmp_path / kind / "report.html").read_text().lower()


def test_fixed_cohorts_together_cost_the_clients_their_own_view(tmp_path, capsys, no_pages):
    _, out, _ = sweep(
        capsys, *TWO, "--rounds", "2", "--sampling", "fixed", "--cohort", "20",
        "--method", "fedavg", "--relation", "replace", "--out", tmp_path / "all",
    )  # fmt: skip
    last = next(line for line in out.splitlines() if "observe all of these releases" in line)
    assert "so sampling does not reduce epsilon" in out
    alone = [line for line in out.splitlines() if line.startswith("fedavg at epsilon")]
    alone = [line for line in alone if "over 2 rounds" in line]
    together, *single = (
        float(line.split("epsilon = ", 1)[1].split()[0].rstrip(".")) for line in (last, *alone)
    )
    assert len(single) == 2 and together > max(single)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    folder = tmp_path / "all"
    command = [sys.executable, "-m", "coterie.cli.main", *SMALL, "--out", str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while not (folder / "epsilon-0.1" / "ledger.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    resume = [sys.executable, "-m", "coterie.cli.main", "run", "--resume", str(folder), "--json"]
    again = subprocess.run(resume, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, again.stderr
    whole = [sys.executable, "-m", "coterie.cli.main", *SMALL, "--out", f"{folder}-2", "--json"]
    fresh = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=True)
    values = [[r["value"] for r in json.loads(done.stdout)["runs"]] for done in (again, fresh)]
    assert values[0] == values[1]


@pytest.mark.full
@pytest.mark.parametrize("data", ["districts", "school"])
def test_real_clients_gain(data):
    """On real clients epsilon 1 is better than local training, with the settings chosen by rule.

    Over five seeds of split and noise; errors of the same seed are compared.
    """
    if data == "school" and not SCHOOL.exists():
        pytest.skip(f"{SCHOOL} is not here: set COTERIE_DATA to the folder of the shared data")
    name = str(SCHOOL) if data == "school" else data
    gains = []
    for seed in range(5):
        table = {
            "data": {"name": name, "split_seed": seed},
            "method": {"kind": "mpmtl"},
            "privacy": {"epsilon": 1.0},
            "simulation_seed": seed,
        }
        summary = execute(Plan.from_table(table)).summary
        gains.append(summary["local_value"] - summary["value"])
    error = (sum((g - sum(gains) / 5) ** 2 for g in gains) / 20) ** 0.5
    assert sum(gains) / 5 > 3 * error > 0


def test_private_runs_are_shown_whatever_becomes_of_their_reference(
    tmp_path, capsys, monkeypatch, no_pages
):
    def fail(*_, **__):
        raise RuntimeError("no certificate")

    monkeypatch.setattr("coterie.methods.baselines.fit_multitask", fail)
    status, out, err = sweep(capsys, *TWO, "--out", tmp_path / "all")
    assert status == 0 and "no certificate" in err
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["single", *["mpmtl"] * 2]


def test_a_binary_table_shows_the_area_under_the_curve(tmp_path, capsys, no_pages):
    _, out, _ = sweep(
        capsys, "run", "--data", "synthetic", "--option", "clients=30", "--option", "task=binary",
        "--method", "mpmtl", "--epsilon", "1,5", "--simulation-seed", "0", "--quiet",
        "--out", tmp_path / "all",
    )  # fmt: skip
    assert "AUC" in out


def test_machines_of_several_budgets_say_why_and_are_reported_together(tmp_path, capsys):
    line = (
        "run --data synthetic --option clients=30 --option rows=12 --method mtlsvm --epsilon 1,8 "
        f"--simulation-seed 1 --quiet --rounds 12 --out {tmp_path / 'all'}"
    )
    status, out, _ = sweep(capsys, *line.split())
    assert status == 0 and "much local work" in out
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["localsvm", *["mtlsvm"] * 3]
    page = tmp_path / "page.html"
    status, _, _ = sweep(capsys, "report", tmp_path / "all", "--out", page)
    assert status == 0
    text = page.read_text()
    assert "localsvm" in text and "epsilon 8" in text and "much local work" in text
