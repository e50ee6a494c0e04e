"""The budget register: runs on the same data add up, once each, before anything is released."""

import json
import math
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
from tests.privacy.oracles import gaussian_delta

import coterie.run.budget as module
from coterie.plan.plan import Plan
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.guarantee import Guarantee
from coterie.run.budget import (
    Budget,
    Contents,
    Entry,
    declare_total,
    read_register,
    register_path,
    spent,
)
from coterie.run.run import execute

DELTA = 1e-5
EVERYONE = Participation("everyone")
SMALL = {"clients": 12, "rows": 8, "features": 3}


def plan(noise=4.0, rounds=2, *, kind="pmtl", **changes):
    privacy = {"noise_multiplier": noise, "delta": DELTA}
    return Plan.from_table(
        {
            "data": {"name": "synthetic", "options": SMALL},
            "method": {"kind": kind},
            "privacy": changes.pop("privacy", privacy),
            **({} if rounds is None else {"rounds": rounds}),
            **changes,
        }
    )


def promise(noise, rounds, *, who=EVERYONE, delta=DELTA, relation="zero_out"):
    return Guarantee((Gaussian(noise),) * rounds, who, relation, delta, clients=12)


def entry(noise=4.0, rounds=2, *, data="a" * 32, run="/run", date="1", **more):
    return Entry(data, "rows.csv", run, date, "pmtl", promise(noise, rounds, **more))


class StopError(Exception):
    """Ends a run where a test wants it to end."""


@pytest.fixture
def told():
    return []


@pytest.fixture
def budget(register, told):
    return Budget(register, told.append)


@pytest.fixture
def start(budget, monkeypatch):
    """Return a function that enters a run and ends it before its first release."""

    def begin(folder, what=None):
        def stop(*args, **kwargs):
            raise StopError

        with monkeypatch.context() as patch:
            patch.setattr("coterie.run.run.simulate", stop)
            with pytest.raises(StopError):
                execute(what or plan(), folder=folder, budget=budget)

    return begin


# --- the sum --------------------------------------------------------------------------------------


def test_gaussian_runs_compose_in_closed_form():
    """Runs of mu_1 and mu_2 are sqrt(mu_1^2 + mu_2^2)-GDP together (Dong, Roth and Su 2022)."""
    first, second = math.sqrt(2) / 4, math.sqrt(3) / 3
    epsilon, delta = spent([entry(4.0, 2), entry(3.0, 3, date="2")])
    assert delta == DELTA
    assert gaussian_delta(epsilon, math.hypot(first, second)) == pytest.approx(DELTA, rel=1e-4)
    assert gaussian_delta(epsilon, second) < DELTA / 2  # one of them alone costs less


def test_runs_with_unlike_sampling_are_added():
    hidden = Participation("poisson", 0.5, visible=True)
    one, two = entry(), entry(who=hidden, delta=2e-5)
    epsilon, delta = spent([one, two])
    assert epsilon == pytest.approx(one.guarantee.epsilon + two.guarantee.epsilon)
    assert delta == pytest.approx(3e-5)


def test_nothing_spent_is_zero():
    assert spent([]) == (0.0, 0.0)


def test_two_runs_on_the_same_rows_add_up_and_are_told_of(budget, told, start, tmp_path):
    start(tmp_path / "one", plan(4.0, 2))
    assert told == []
    start(tmp_path / "two", plan(3.0, 3))
    known = read_register(budget.path)
    (data,) = known.fingerprints
    assert json.loads((tmp_path / "one/data.json").read_text())["fingerprint"] == data
    assert [Path(one.run).name for one in known.on(data)] == ["one", "two"]
    (line,) = told
    assert line.startswith("This data has already been used by 1 private run: together with this")
    epsilon = float(line.split("at most ")[1].split()[0])
    # Shown rounded up, to four digits.
    mu = math.sqrt(2 / 16 + 3 / 9)
    assert DELTA * 0.99 < gaussian_delta(epsilon, mu) <= DELTA and "(delta 1e-05)" in line
    start(tmp_path / "three")
    assert "used by 2 private runs:" in told[1]


def test_other_rows_are_other_data(budget, told, start, tmp_path):
    start(tmp_path / "one")
    other = plan(data={"name": "synthetic", "options": {**SMALL, "rows": 9}})
    start(tmp_path / "two", other)
    assert told == [] and len(read_register(budget.path).fingerprints) == 2


# --- when and what is entered ---------------------------------------------------------------------


def test_a_run_is_entered_before_its_ledger_exists_and_once(budget, told, start, tmp_path):
    folder = tmp_path / "run"
    start(folder)
    assert not (folder / "ledger.jsonl").exists() and not (folder / "posts").exists()
    (found,) = read_register(budget.path).entries
    assert (found.run, found.method, found.data) == (str(folder), "pmtl", "synthetic")
    result = execute(plan(), folder=folder, budget=budget)
    assert read_register(budget.path).entries == (found,) and told == []
    # The planned guarantee is that of the finished run.
    assert found.guarantee == result.outcome.guarantee


NOTHING_PROMISED = {
    "simulation": {"simulation_seed": 1},
    "no privacy": {"privacy": {"epsilon": math.inf}},
    "no releases": {"kind": "local", "privacy": {"epsilon": 1.0}, "rounds": None},
}


@pytest.mark.parametrize("changes", NOTHING_PROMISED.values(), ids=NOTHING_PROMISED)
def test_runs_that_promise_nothing_are_not_entered(register, start, tmp_path, changes):
    start(tmp_path / "run", plan(**changes))
    assert not register.exists()


def test_the_library_enters_nothing_by_default(register, monkeypatch, tmp_path):
    def stop(*args, **kwargs):
        raise StopError

    monkeypatch.setattr("coterie.run.run.simulate", stop)
    with pytest.raises(StopError):
        execute(plan(), folder=tmp_path / "run")
    assert not register.exists()


def test_a_run_without_a_folder_cannot_be_entered(budget):
    with pytest.raises(ValueError, match="without a folder"):
        execute(plan(), budget=budget)


def test_a_moved_run_is_counted_once(budget, start, tmp_path):
    start(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    start(tmp_path / "moved")
    assert len(read_register(budget.path).entries) == 1


def test_a_copy_of_a_run_makes_releases_of_its_own(budget, start, tmp_path):
    start(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    start(tmp_path / "copy")
    start(tmp_path / "copy")
    assert len(read_register(budget.path).entries) == 2


def test_a_new_run_in_an_emptied_folder_is_another_run(budget, start, tmp_path):
    start(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    start(tmp_path / "run")
    assert len(read_register(budget.path).entries) == 2


# --- a declared total -----------------------------------------------------------------------------


def fingerprint(start, budget, folder):
    start(folder)
    return read_register(budget.path).fingerprints[0]


def test_a_total_is_exceeded_by_composition_not_by_addition(budget, start, tmp_path):
    """Two runs of mu fit a total of epsilon(mu sqrt 2), and nothing below it."""
    data = fingerprint(start, budget, tmp_path / "one")
    low, high = 0.1, 10.0  # epsilon of mu = sqrt(4/16) by bisection of the closed form
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, 0.5) > DELTA else (low, middle)
    declare_total(budget.path, data, high * 0.999, "synthetic")
    with pytest.raises(ValueError, match="the total declared for this data"):
        execute(plan(), folder=tmp_path / "two", budget=budget)
    assert not (tmp_path / "two").exists()  # refused before anything is written
    assert len(read_register(budget.path).entries) == 1
    declare_total(budget.path, data, high * 1.001, "synthetic")
    start(tmp_path / "two")
    assert len(read_register(budget.path).entries) == 2


def test_the_refusal_names_total_spent_asked_and_remaining(budget, start, tmp_path):
    data = fingerprint(start, budget, tmp_path / "one")
    each = promise(4.0, 2).epsilon
    declare_total(budget.path, data, each + 0.01, "synthetic")
    with pytest.raises(ValueError) as refused:
        execute(plan(), folder=tmp_path / "two", budget=budget)
    text = str(refused.value)
    assert "\n" not in text and f"is epsilon {each + 0.01:g}; 1 private run spent" in text
    asked = float(text.split("asks for ")[1].split(",", maxsplit=1)[0])
    assert each <= asked < each * 1.001
    assert "and 0.01 remains" in text or "and 0.0099 remains" in text
    assert f"coterie budget --total E --data-fingerprint {data}" in text


def test_a_run_with_exactly_the_total_is_accepted(budget, start, tmp_path):
    data = fingerprint(start, budget, tmp_path / "probe")
    budget.path.unlink()
    declare_total(budget.path, data, 1.0, "synthetic")
    start(tmp_path / "run", plan(privacy={"epsilon": 1.0, "delta": DELTA}))
    budget.path.unlink()
    declare_total(budget.path, data, 1.0, "synthetic")
    with pytest.raises(ValueError, match="0 private runs spent at most 0 "):
        execute(
            plan(privacy={"epsilon": 1.01, "delta": DELTA}), folder=tmp_path / "x", budget=budget
        )


def test_a_counted_run_resumes_although_the_total_was_lowered(budget, start, tmp_path):
    data = fingerprint(start, budget, tmp_path / "run")
    declare_total(budget.path, data, 0.01, "synthetic")
    start(tmp_path / "run")
    assert len(read_register(budget.path).entries) == 1


def test_a_run_that_was_begun_elsewhere_is_refused_on_resuming(budget, start, tmp_path):
    data = fingerprint(start, budget, tmp_path / "run")
    budget.path.unlink()
    declare_total(budget.path, data, 0.01, "synthetic")
    with pytest.raises(ValueError, match="the total declared"):
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan])
def test_strange_totals_are_refused(register, total):
    with pytest.raises(ValueError, match="expected a positive number"):
        declare_total(register, "a" * 32, total, "rows.csv")
    assert not register.exists()


def test_an_infinite_total_withdraws_a_total_and_keeps_the_runs(register):
    module._write(register, Contents((entry(),)))
    declare_total(register, "a" * 32, 2.0, "rows.csv")
    assert read_register(register).total("a" * 32) == 2.0
    declare_total(register, "a" * 32, math.inf, "rows.csv")
    assert read_register(register) == Contents((entry(),))


# --- the file -------------------------------------------------------------------------------------


def test_processes_wait_for_each_other(register, monkeypatch):
    """Each writer reads slowly: without the lock, all but one total would be lost."""
    read = module.read_register

    def slowly(path):
        found = read(path)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(module, "read_register", slowly)
    keys = [f"{number:032x}" for number in range(5)]
    threads = [threading.Thread(target=declare_total, args=(register, k, 1.0, "x")) for k in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read(register).totals) == keys


def test_only_the_user_can_read_the_register(register):
    before = os.umask(0)
    try:
        declare_total(register, "a" * 32, 1.0, "rows.csv")
    finally:
        os.umask(before)
    assert stat.S_IMODE(register.stat().st_mode) == 0o600


def test_a_register_survives_a_failed_write(register, monkeypatch):
    declare_total(register, "a" * 32, 1.0, "rows.csv")
    before = register.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="cannot be written"):
        declare_total(register, "a" * 32, 2.0, "rows.csv")
    assert register.read_bytes() == before


def test_entries_are_read_as_they_were_written(register):
    known = Contents((entry(), entry(3.0, 1, date="2", relation="replace")), {})
    module._write(register, known)
    assert read_register(register) == known
    module._write(register, read_register(register))
    assert read_register(register) == known


def good():
    return {"format": 1, "totals": {}, "runs": [entry().to_json()]}


DAMAGED = {
    "empty": "",
    "torn": json.dumps(good())[:-40],
    "a list": "[]",
    "a number": "3",
    "deep": "[" * 100_000,
    "later": json.dumps(good() | {"format": 2}),
    "no runs": json.dumps({"format": 1, "totals": {}}),
    "no guarantee": json.dumps(good() | {"runs": [{**entry().to_json(), "guarantee": None}]}),
    "no folder": json.dumps(good() | {"runs": [{**entry().to_json(), "run": 3}]}),
    "a strange total": json.dumps(good() | {"totals": {"a": {"epsilon": -1, "data": "x"}}}),
    "totals in a list": json.dumps(good() | {"totals": [1]}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_register_is_refused_in_one_line_that_names_it(register, text):
    register.write_text(text)
    with pytest.raises(ValueError, match="damaged") as error:
        read_register(register)
    assert str(register) in str(error.value) and "\n" not in str(error.value)
    assert register.read_text() == text


def test_a_run_does_not_start_with_a_damaged_register(budget, register, tmp_path):
    register.write_text("{")
    with pytest.raises(ValueError, match="the budget register is damaged"):
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert not (tmp_path / "run").exists()


def test_a_register_that_cannot_be_made_is_named(tmp_path, told):
    (tmp_path / "file").write_text("")
    budget = Budget(tmp_path / "file" / "budget.json", told.append)
    with pytest.raises(OSError, match=r"file/budget\.json: the budget register cannot be"):
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_folder_and_a_pipe_are_no_registers(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="cannot be read"):
        read_register(tmp_path)
    with pytest.raises(ValueError, match="FIFO"):
        read_register(tmp_path / "pipe")


def test_where_the_register_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COTERIE_BUDGET", str(tmp_path / "own.json"))
    assert register_path() == tmp_path / "own.json"
    monkeypatch.setenv("COTERIE_BUDGET", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert register_path() == tmp_path / "data" / "coterie" / "budget.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert register_path() == tmp_path / ".local" / "share" / "coterie" / "budget.json"
