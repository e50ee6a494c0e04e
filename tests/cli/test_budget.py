"""`coterie budget`, and what `coterie run` says and refuses by the register."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.privacy.oracles import gaussian_delta

from coterie.cli.main import main
from coterie.runs.budget import read_register

DELTA = 1e-5
RUN = "run --data synthetic --option clients=12 --option rows=8 --option features=3 --method pmtl"
TWO = f"{RUN} --rounds 2 --delta 1e-5 --quiet --json --no-local"
FOUR = f"{TWO} --noise-multiplier 4"  # mu = sqrt(2) / 4


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, no_pages):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def coterie(capsys):
    """Return a function that runs a command: exit status, stdout and stderr."""

    def call(line):
        capsys.readouterr()
        try:
            code = main(line.split())
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


def listed(coterie, more=""):
    code, out, err = coterie(f"budget --json {more}")
    assert code == 0 and err == "" and len(out.splitlines()) == 1
    return json.loads(out)


def test_an_empty_register_is_stated_and_not_made(coterie, register):
    code, out, _ = coterie("budget")
    assert code == 0 and out == f"{register}: no private runs and no total\n"
    assert listed(coterie) == {"register": str(register), "data": []}
    assert not register.exists()


def test_two_runs_on_the_same_clients_are_told_of_and_listed(coterie, register):
    code, out, err = coterie(f"{FOUR} --out one")
    assert code == 0 and err == ""
    code, out, err = coterie(f"{TWO} --noise-multiplier 3 --test 2 --out two")
    assert code == 0 and len(out.splitlines()) == 1 and json.loads(out)["run"] == "two"
    assert err.startswith("1 private run on these clients (synthetic): together epsilon at most ")
    assert err.count("\n") == 1

    found = listed(coterie)
    (data,) = found["data"]
    assert found["register"] == str(register)
    assert set(data) == {
        "fingerprint", "data", "population", "clients", "runs", "epsilon", "delta", "mu", "total",
        "remaining",
    }  # fmt: skip
    assert (data["data"], data["clients"]) == ("synthetic", 12)
    assert data["total"] is data["remaining"] is None
    assert [set(run) for run in data["runs"]] == [
        {"run", "data", "fingerprint", "method", "epsilon", "delta", "relation", "date"}
    ] * 2
    # Closed forms of Gaussian DP, for each run and for both.
    together = math.sqrt(2 / 16 + 2 / 9)
    assert data["mu"] == pytest.approx(together)
    for told, mu in zip((*data["runs"], data), (2**0.5 / 4, 2**0.5 / 3, together), strict=True):
        assert gaussian_delta(told["epsilon"], mu) == pytest.approx(DELTA, rel=1e-4)
        assert told["delta"] == DELTA
    assert [run["run"] for run in data["runs"]] == [
        str(Path(one).resolve()) for one in ("one", "two")
    ]
    # What was spent then is in the results, for the owner.
    stated = [
        json.loads(Path(one, "result.json").read_text())["register"] for one in ("one", "two")
    ]
    assert [one["runs"] for one in stated] == [1, 2]
    assert stated[1]["epsilon"] == data["epsilon"]


def test_the_table_rounds_epsilon_up_and_what_remains_down(coterie, register):
    coterie(f"{FOUR} --out one")
    code, out, _ = coterie("budget --total 2 --run one")
    assert code == 0
    head, row, *rest = out.splitlines()
    assert head.split() == [
        "data", "fingerprint", "clients", "runs", "mu", "epsilon", "delta", "total", "remaining",
    ]  # fmt: skip
    data = listed(coterie)["data"][0]
    name, mark, clients, runs, mu, epsilon, delta, total, left = row.split()
    assert (name, clients, runs, delta, total) == ("synthetic", "12", "1", "1e-05", "2")
    assert data["fingerprint"].startswith(mark)
    assert data["mu"] <= float(mu) < data["mu"] * 1.001
    assert data["epsilon"] <= float(epsilon) < data["epsilon"] * 1.001
    assert data["remaining"] == 2 - data["epsilon"]
    assert data["remaining"] - 1e-4 <= float(left) <= data["remaining"]
    assert any(line.endswith(str(Path("one").resolve())) for line in rest)
    assert rest[-1] == f"register {register}"


def test_a_run_beyond_the_total_is_refused_with_status_2_and_leaves_nothing(coterie, register):
    coterie(f"{FOUR} --out one")
    spent = listed(coterie)["data"][0]["epsilon"]
    coterie(f"budget --total {spent + 0.1} --run one")
    before = register.read_bytes()
    code, out, err = coterie(f"{FOUR} --out two")
    assert code == 2 and out == "" and err.count("\n") == 1
    for told in (
        "coterie run: the total", f"epsilon {spent + 0.1:g}", "1 private run spent",
        "this one asks for", "remains", "smaller epsilon", "declare a larger total",
    ):  # fmt: skip
        assert told in err
    assert not Path("two").exists() and register.read_bytes() == before

    mark = listed(coterie)["data"][0]["fingerprint"][:8]
    code, *_ = coterie(f"budget --total 5 --data-fingerprint {mark}")
    assert code == 0
    code, _, err = coterie(f"{FOUR} --out two")
    assert code == 0 and "1 private run on these clients" in err
    # Both runs: mu = sqrt(4) / 4.
    row = listed(coterie)["data"][0]
    assert gaussian_delta(row["epsilon"], 0.5) == pytest.approx(DELTA, rel=1e-4)
    assert row["remaining"] == pytest.approx(5 - row["epsilon"])


def test_several_epsilons_are_several_runs(coterie, register):
    code, *_ = coterie(f"{TWO} --epsilon 0.5,1 --out both")
    assert code == 0
    runs = listed(coterie)["data"][0]["runs"]
    assert [Path(run["run"]).name for run in runs] == ["epsilon-0.5", "epsilon-1"]
    code, *_ = coterie("run --resume both --json --quiet")
    assert code == 0 and len(read_register(register).entries) == 2


PLAN = """
[data]
name = "synthetic"
options = {clients = 12, rows = 8, features = 3}
"""


def test_a_sweep_that_does_not_fit_the_total_is_refused_as_a_whole(coterie, register):
    """Each of the epsilons fits, and the first two do."""
    Path("plan.toml").write_text(PLAN)
    assert coterie("budget --total 1.2 --plan plan.toml")[0] == 0
    code, out, err = coterie(f"{TWO} --epsilon 0.5,0.7,1 --out all")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "these 3 runs ask for" in err and "0 private runs spent at most 0," in err
    assert not Path("all").exists() and not read_register(register).entries
    code, *_ = coterie(f"{TWO} --epsilon 0.5,0.7 --out two")
    assert code == 0 and len(read_register(register).entries) == 2


def test_a_demo_that_does_not_fit_the_total_is_refused_as_a_whole(coterie, register):
    """Three private runs at epsilon 1 each."""
    Path("plan.toml").write_text('[data]\nname = "synthetic"\n')
    coterie("budget --total 1.5 --plan plan.toml")
    code, _, err = coterie("demo --data synthetic --epsilon 1 --out demo")
    assert code == 2 and "runs ask for" in err
    assert not Path("demo").exists() and not read_register(register).entries


def test_the_demo_is_counted_too(register, monkeypatch):
    given = []

    def stop(*args, budget, **kwargs):
        given.append(budget)
        raise ValueError("stop")

    monkeypatch.setattr("coterie.cli.train.execute", stop)
    assert main(["demo", "--data", "synthetic"]) == 2
    assert given[0].register == register


def test_a_total_may_be_declared_before_the_first_run(coterie, register):
    Path("plan.toml").write_text(PLAN)
    assert listed(coterie, "--plan plan.toml")["data"] == []
    assert coterie("budget --total 1.5 --plan plan.toml")[0] == 0
    (row,) = listed(coterie, "--plan plan.toml")["data"]
    assert (row["runs"], row["epsilon"], row["total"], row["remaining"]) == ([], 0.0, 1.5, 1.5)
    assert (row["data"], row["clients"], row["delta"]) == ("synthetic", 12, DELTA)
    assert coterie(f"{FOUR} --out one")[0] == 0
    assert coterie(f"{FOUR} --out two")[0] == 2
    (row,) = listed(coterie, f"--data-fingerprint {row['fingerprint'][:6].upper()}")["data"]
    assert len(row["runs"]) == 1 and row["remaining"] == 1.5 - row["epsilon"]
    coterie("budget --total inf --plan plan.toml")
    assert listed(coterie)["data"][0]["total"] is None


def test_only_the_clients_that_are_asked_for_are_shown(coterie):
    coterie(f"{FOUR} --out one")
    coterie(f"{FOUR} --population b --out two")
    first, second = listed(coterie)["data"]
    assert second["population"] == "b" and first["fingerprint"] != second["fingerprint"]
    assert listed(coterie, "--run two")["data"] == [second]
    code, _, err = coterie("budget --data-fingerprint=")
    assert code == 2 and "not in the register" in err
    # Clients of another population join it.
    code, out, _ = coterie("budget --run one --population b")
    assert code == 0 and "population b" in out
    (row,) = listed(coterie)["data"]
    assert row["fingerprint"] == second["fingerprint"] and len(row["runs"]) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--total 1", "--total: of which clients?"),
        ("--population a", "--population: of which run?"),
        ("--total 0 --plan plan.toml", "expected a positive number"),
        ("--total nan --plan plan.toml", "expected a positive number"),
        ("--data-fingerprint beef", "beef: not in the register"),
        ("--total 1 --data-fingerprint=", "not in the register"),
        ("--total 1 --run nowhere", "nowhere: no such folder"),
        ("--total 1 --run .", "not in the budget register"),
        ("--run . --population a", "not in the budget register"),
        ("--run . --data-fingerprint aa", "give one of them"),
        ("--total 1 --plan none.toml", "none.toml"),
        ("--forget runs/one", "unknown argument '--forget'"),  # spent stays spent
    ],
)
def test_bad_input_is_refused_in_one_line(coterie, register, line, told):
    Path("plan.toml").write_text(PLAN)
    code, out, err = coterie(f"budget {line}")
    assert code == 2 and out == "" and told in err and err.count("\n") == 1
    assert not register.exists()


def test_a_damaged_register_stops_both_commands(coterie, register):
    register.write_text("{}")
    for line in ("budget", f"{FOUR} --out one"):
        code, out, err = coterie(line)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert f"{register}: the budget register is damaged" in err
    assert not Path("one").exists()


def test_it_does_not_import_torch(register):
    code = (
        "import sys; from coterie.cli.main import main; status = main(['budget']);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert str(register) in done.stdout
