"""The budget register: runs on the same clients add up, once each, before anything is released."""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from scipy.optimize import brentq
from tests.privacy.oracles import gaussian_delta

import coterie.runs.budget as module
from coterie.core.config import to_toml
from coterie.planning.plan import Plan
from coterie.privacy.events import Gaussian, Laplace, Participation
from coterie.privacy.guarantee import Guarantee
from coterie.report.page import write_report
from coterie.runs.budget import (
    Budget,
    Contents,
    Spending,
    declare_population,
    declare_total,
    read_register,
    register_path,
)
from coterie.runs.run import execute, foresee

DELTA = 1e-5
EVERYONE = Participation("everyone")
SMALL = {"clients": 12, "rows": 8, "features": 3}
NAMES = tuple(f"hospital {number}" for number in range(12))


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


def promise(noise=4.0, rounds=2, *, who=EVERYONE, delta=DELTA, relation="zero_out"):
    return Guarantee((Gaussian(noise),) * rounds, who, relation, delta, clients=12)


def spending(noise=4.0, rounds=2, *, names=NAMES, population="", data="rows.csv", **more):
    return Spending(promise(noise, rounds, **more), names, population, data, "pmtl")


def closed(mu, delta=DELTA):
    """Epsilon of mu-Gaussian DP (Dong, Roth and Su 2022)."""
    return brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0, 100, xtol=1e-12)


def rows(register):
    """Epsilon and delta by fingerprint."""
    known = read_register(register)
    accounts = {
        name: known.account(known.groups[name], known.delta(name)) for name in known.fingerprints
    }
    return {name: (len(one.entries), one.epsilon, one.delta) for name, one in accounts.items()}


class StopError(Exception):
    """Ends a run where a test wants it to end."""


@pytest.fixture
def told():
    return []


@pytest.fixture
def budget(register, told):
    return Budget(register, told.append)


@pytest.fixture
def stopped(monkeypatch):
    """End runs before their first release."""

    def stop(*args, **kwargs):
        raise StopError

    monkeypatch.setattr("coterie.runs.run.simulate", stop)


@pytest.fixture
def start(budget, monkeypatch):
    """Return a function that enters a run and ends it before its first release."""

    def begin(folder, what=None):
        def stop(*args, **kwargs):
            raise StopError

        with monkeypatch.context() as patch:
            patch.setattr("coterie.runs.run.simulate", stop)
            with pytest.raises(StopError):
                execute(what or plan(), folder=folder, budget=budget)

    return begin


# --- the sum --------------------------------------------------------------------------------------


def test_gaussian_runs_compose_in_closed_form(budget, register):
    """Runs of mu_1 and mu_2 are sqrt(mu_1^2 + mu_2^2)-GDP together (Dong, Roth and Su 2022)."""
    budget.enter(spending(4.0, 2), None)
    spent = budget.enter(spending(3.0, 3), None)
    mu = math.sqrt(2 / 16 + 3 / 9)
    assert spent == {"runs": 2, "epsilon": pytest.approx(closed(mu), rel=1e-6), "delta": DELTA,
                     "mu": pytest.approx(mu)}  # fmt: skip
    ((count, epsilon, delta),) = rows(register).values()
    assert (count, epsilon, delta) == (2, spent["epsilon"], DELTA)


def test_runs_with_unlike_sampling_are_added(budget, register):
    """Each sampling gets half of delta; two runs of one sampling are composed first."""
    hidden = Participation("poisson", 0.5, visible=True)
    budget.enter(spending(), None)
    budget.enter(spending(), None)
    spent = budget.enter(spending(who=hidden, delta=1e-7), None)
    alone = promise(who=hidden).epsilon_at(DELTA / 2)
    assert spent["epsilon"] == pytest.approx(closed(0.5, DELTA / 2) + alone, rel=1e-6)
    assert spent["delta"] == DELTA and spent["mu"] is None


def test_a_client_has_spent_the_runs_that_it_took_part_in(budget, register):
    """The sum is that of the client who spent most, and not of all runs on any of the clients."""
    west, east, middle = NAMES[:5], NAMES[7:], NAMES[3:9]
    for names, noise in ((west, 4.0), (east, 3.0), (middle, 5.0)):
        budget.enter(spending(noise, 1, names=names), None)
    known = read_register(register)

    def epsilon(names, also=()):
        return known.account(known.group(names, ""), DELTA, also).epsilon

    assert epsilon(NAMES[:3]) == pytest.approx(closed(1 / 4), rel=1e-6)
    assert epsilon(west) == pytest.approx(closed(math.hypot(1 / 4, 1 / 5)), rel=1e-6)
    assert epsilon(NAMES) == epsilon(east)  # nobody is in the west and the east
    assert epsilon(east) == pytest.approx(closed(math.hypot(1 / 3, 1 / 5)), rel=1e-6)
    assert epsilon(("nobody",)) == 0.0
    new = epsilon(NAMES, [promise(2.0, 1)])
    assert new == pytest.approx(closed(math.sqrt(1 / 9 + 1 / 25 + 1 / 4)), rel=1e-6)
    assert [count for count, *_ in rows(register).values()] == [2, 2, 3]


def test_any_clients_spend_what_brute_force_adds_up(budget, register):
    """Against the largest sum over single clients, for random runs on random clients."""
    draw, attended = np.random.default_rng(0), []
    for _ in range(7):
        names = [name for name in NAMES if draw.random() < 0.4] or [NAMES[0]]
        noise = float(draw.uniform(2, 9))
        budget.enter(spending(noise, 1, names=names), None)
        attended.append((set(names), noise))
    known = read_register(register)
    for _ in range(20):
        some = [name for name in NAMES if draw.random() < 0.3]
        squares = [sum(z**-2 for names, z in attended if one in names) for one in some]
        most = math.sqrt(max(squares, default=0.0))
        found = known.account(known.group(some, ""), DELTA)
        assert found.epsilon == pytest.approx(closed(most) if most else 0.0, rel=1e-6)
        touched = [one for one in some if any(one in names for names, _ in attended)]
        assert found.touched == len(touched)
        assert len(found.entries) == sum(bool(names & set(some)) for names, _ in attended)


# --- the same clients -----------------------------------------------------------------------------


def patients(path, *, names=None, columns=("a", "b", "c"), client="clinic", rows=8):
    """Write a table of twelve clinics."""
    draw = np.random.default_rng(0)
    names = [str(number) for number in range(1, 13)] if names is None else names
    table = {client: np.repeat(names, rows)}
    table |= {name: draw.normal(size=len(names) * rows) for name in (*columns, "y", "z")}
    made = pa.table(table)
    if path.suffix == ".parquet":
        pa.parquet.write_table(made, path)
    else:
        pa.csv.write_csv(made, path)
    return path


def on(path, *, client="clinic", source=None, **data):
    read = {"client": client, "features": ["a"], **(source or {})}
    return plan(data={"name": str(path), "source": read, **data})


SAME = {
    "another split": lambda path: on(path, split_seed=3),
    "more test rows": lambda path: on(path, test=0.5),
    "other columns": lambda path: on(path, source={"features": ["b", "c"]}),
    "another target": lambda path: on(path, source={"target": "z"}),
    "fewer rows": lambda path: on(path, most_rows=2),
    "the first clients": lambda path: on(path, clients=5),
    "scaled": lambda path: on(path, standardise="client"),
    "a copy": lambda path: on(shutil.copy(path, path.with_name("copy.csv"))),
    "other rows": lambda path: on(patients(path.with_name("later.csv"), rows=9)),
    "another format": lambda path: on(patients(path.with_name("rows.parquet"))),
    "numbers for text": lambda path: on(
        patients(path.with_name("rows.parquet"), names=[float(n) for n in range(1, 13)])
    ),
    "another order": lambda path: on(
        patients(path.with_name("turned.csv"), names=[str(n) for n in range(12, 0, -1)])
    ),
    "another header": lambda path: on(
        patients(path.with_name("renamed.csv"), client="site"), client="site"
    ),
    "clinics added": lambda path: on(
        patients(path.with_name("more.csv"), names=[str(n) for n in range(5, 40)])
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_the_same_clients_are_recognised(budget, told, start, tmp_path, what):
    path = patients(tmp_path / "rows.csv")
    start(tmp_path / "one", on(path))
    start(tmp_path / "two", SAME[what](path))
    (line,) = told
    assert "1 private run on " in line and "these clients (rows.csv)" in line
    assert f"{closed(0.5):.3g}"[:4] in line  # two runs of mu = sqrt(2) / 4
    ours = read_register(budget.path).entries[-1].fingerprint
    assert rows(budget.path)[ours][:2] == (2, pytest.approx(closed(0.5), rel=1e-6))


OTHERS = {
    "other names": lambda path: on(
        patients(path.with_name("b.csv"), names=[f"b{n}" for n in range(12)])
    ),
    "a population": lambda path: on(path, population="schools"),
    "built-in data": lambda path: plan(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_clients_do_not_add_up(budget, told, start, tmp_path, what):
    path = patients(tmp_path / "rows.csv")
    start(tmp_path / "one", on(path))
    start(tmp_path / "two", OTHERS[what](path))
    assert told == [] and [count for count, *_ in rows(budget.path).values()] == [1, 1]


def test_a_population_may_be_declared_for_other_data_too(budget, told, start, tmp_path):
    start(tmp_path / "one", on(patients(tmp_path / "rows.csv"), population="clinics"))
    start(tmp_path / "two", on(patients(tmp_path / "new.parquet"), population="clinics"))
    assert len(told) == 1 and "a population (--population) tells others apart" in told[0]
    ((name, (_, spent, _)),) = rows(budget.path).items()
    declare_total(budget.path, name, spent + 0.01, "rows.csv")
    with pytest.raises(
        ValueError, match=r"declare a larger total .* a population \(--population\)"
    ):
        start(tmp_path / "three", on(patients(tmp_path / "late.csv"), population="clinics"))


def test_each_built_in_dataset_is_a_population(budget, told, start, tmp_path):
    start(tmp_path / "one")
    start(tmp_path / "two", plan(data={"name": "synthetic", "options": {**SMALL, "rows": 9}}))
    assert told == []
    start(tmp_path / "three", plan(data={"name": "synthetic", "options": SMALL, "split_seed": 5}))
    assert len(told) == 1


def test_names_differ_in_spelling_only():
    for name in ("Nord-Klinik", " nord-klinik", "NORD-KLINIK "):
        assert module.canonical(name) == "nord-klinik"
    for name in ("7", "007", "7.0", "+7", "７"):  # the last one is a full-width digit
        assert module.canonical(name) == "7"
    apart = ("7.5", "-7", "7a", "70", "", "nord klinik")
    assert len({module.canonical(name) for name in (*apart, "7", "nord-klinik")}) == 8


def test_the_file_holds_no_names_and_fingerprints_need_its_secret(budget, register, tmp_path):
    names = ("Sankt Elisabeth", "Charite")
    budget.enter(spending(names=names), None)
    text = register.read_text().casefold()
    assert "elisabeth" not in text and "charite" not in text
    known, other = read_register(register), Contents(secret="00" * 32)
    group = known.group(names, "")
    assert known.fingerprint(group) in known.groups
    assert not group.keys & other.group(names, "").keys
    assert other.fingerprint(other.group(names, "")) not in known.groups


def test_held_out_clients_spend_nothing(budget, start, tmp_path):
    path = patients(tmp_path / "rows.csv")
    start(tmp_path / "run", Plan.from_table({**on(path).to_table(), "newcomers": 4}))
    (group,) = read_register(budget.path).groups.values()
    assert len(group.keys) == 8


# --- when and what is entered ---------------------------------------------------------------------


def test_two_runs_are_told_of_and_stated_in_their_results(budget, told, tmp_path):
    first = execute(plan(4.0, 2), folder=tmp_path / "one", budget=budget)
    assert told == []
    alone = {"runs": 1, "epsilon": pytest.approx(closed(8**-0.5), rel=1e-6), "delta": DELTA}
    assert first.summary["register"] == {**alone, "mu": pytest.approx(8**-0.5)}
    second = execute(plan(3.0, 3), folder=tmp_path / "two", budget=budget)
    both = math.sqrt(2 / 16 + 3 / 9)
    stated = json.loads((tmp_path / "two/result.json").read_text())["register"]
    assert stated == second.summary["register"]
    assert (stated["runs"], stated["mu"]) == (2, pytest.approx(both))
    (line,) = told
    assert line.startswith("1 private run on these clients (synthetic): together epsilon at most")
    before, after = line.split("at most ")[1].split(" so far, ")
    before, after = float(before), float(after.split()[0])
    # Shown rounded up, to four digits.
    assert closed(8**-0.5) <= before < 1.001 * closed(8**-0.5)
    assert closed(both) <= after < 1.001 * closed(both) and "(delta 1e-05)" in line
    # The certificate is public and says nothing of other runs; nor does a page to be shared.
    assert "register" not in (tmp_path / "two/guarantee.json").read_text()
    page = write_report([tmp_path / "two"], tmp_path / "own.html").read_text()
    shared = write_report([tmp_path / "two"], tmp_path / "shared.html", clients=False).read_text()
    said = f"2 with this one: epsilon at most {after:g} (delta 1e-05)"
    assert said in page and "with this one" not in shared


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
    assert result.summary["register"]["runs"] == 1


NOTHING_PROMISED = {
    "simulation": {"simulation_seed": 1},
    "no privacy": {"privacy": {"epsilon": math.inf}},
    "no releases": {"kind": "local", "privacy": {"epsilon": 1.0}, "rounds": None},
}


@pytest.mark.parametrize("changes", NOTHING_PROMISED.values(), ids=NOTHING_PROMISED)
def test_runs_that_promise_nothing_are_not_entered(register, start, tmp_path, changes):
    start(tmp_path / "run", plan(**changes))
    assert not register.exists()
    assert not (tmp_path / "run" / "budget.json").exists()


def test_the_library_enters_runs_by_default(register, stopped, tmp_path):
    with pytest.raises(StopError):
        execute(plan(), folder=tmp_path / "run")
    with (
        pytest.warns(UserWarning, match="1 private run on these clients"),
        pytest.raises(StopError),
    ):
        execute(plan())
    first, second = read_register(register).entries
    assert (first.run, second.run) == (str(tmp_path / "run"), "")
    with pytest.raises(StopError), warnings.catch_warnings():
        execute(plan(), budget=None)
    assert len(read_register(register).entries) == 2


def test_runs_in_memory_are_counted_each_time(budget, told, stopped):
    for _ in range(3):
        with pytest.raises(StopError):
            execute(plan(), budget=budget)
    assert [entry.run for entry in read_register(budget.path).entries] == [""] * 3
    assert "2 private runs" in told[-1]


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


def test_a_mark_that_was_kept_does_not_hide_another_plan(budget, start, tmp_path):
    start(tmp_path / "run")
    mark = (tmp_path / "run/budget.json").read_bytes()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/budget.json").write_bytes(mark)
    start(tmp_path / "run", plan(2.0))
    assert [e.guarantee.events[0].noise_multiplier for e in read_register(budget.path).entries] == [
        4.0, 2.0,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{", '{"id": 3}', "\xff"])
def test_a_damaged_mark_counts_the_run_again(budget, start, tmp_path, text):
    start(tmp_path / "run")
    (tmp_path / "run/budget.json").write_text(text)
    start(tmp_path / "run")
    assert len(read_register(budget.path).entries) == 2


DIES = """
import os, sys
from pathlib import Path
import coterie.runs.budget as budget
import coterie.runs.run as run
from coterie.planning.plan import Plan

def kill(*args, **more):
    os.kill(os.getpid(), 9)

places = {"mark": (budget, "write_atomically"), "entry": (budget, "_write"),
          "release": (run, "simulate")}
for name, (module, function) in places.items():  # killed just before it
    if os.fork() == 0:
        os.environ["COTERIE_BUDGET"] = name + ".json"
        setattr(module, function, kill)
        run.execute(Plan.load(Path("asked.toml")), folder=Path(name))
    assert os.wait()[1] == 9
"""


@pytest.mark.full
def test_a_run_that_is_killed_is_counted_once_when_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("asked.toml").write_text(to_toml(plan().to_table()))
    done = subprocess.run([sys.executable, "-c", DIES], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("mark", "entry", "release"):
        register = Path(f"{name}.json")
        assert register.exists() == (name == "release")
        assert Path(name, "budget.json").exists() == (name != "mark")
        execute(plan(), folder=Path(name), budget=Budget(register))
        (entry,) = read_register(register).entries
        assert entry.run == str(tmp_path / name)


# --- a declared total -----------------------------------------------------------------------------


def fingerprint(start, budget, folder):
    start(folder)
    return read_register(budget.path).fingerprints[0]


def test_a_total_is_exceeded_by_composition_not_by_addition(budget, start, tmp_path):
    """Two runs of mu fit a total of epsilon(mu sqrt 2), and nothing below it."""
    data = fingerprint(start, budget, tmp_path / "one")
    high = closed(0.5)
    declare_total(budget.path, data, high * 0.999, "synthetic")
    with pytest.raises(ValueError, match="the total declared for these clients"):
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
    assert "\n" not in text
    assert f"is epsilon {each + 0.01:g} at delta 1e-05; 1 private run spent" in text
    asked = float(text.split("asks for ")[1].split(",", maxsplit=1)[0])
    assert each <= asked < each * 1.001
    assert "and 0.01 remains" in text or "and 0.0099 remains" in text
    assert f"coterie budget --total E --data-fingerprint {data}" in text


def test_a_run_with_exactly_the_total_is_accepted(budget, start, tmp_path):
    (asked,) = foresee([plan()])
    clients = (asked.clients, asked.population)
    declare_total(budget.path, clients, 1.0, "synthetic")
    start(tmp_path / "run", plan(privacy={"epsilon": 1.0, "delta": DELTA}))
    budget.path.unlink()
    declare_total(budget.path, clients, 1.0, "synthetic")
    with pytest.raises(ValueError, match="0 private runs spent at most 0,"):
        execute(
            plan(privacy={"epsilon": 1.01, "delta": DELTA}), folder=tmp_path / "x", budget=budget
        )


def test_a_large_delta_does_not_stretch_a_total(budget):
    """At delta 0.2 both runs together have a smaller epsilon than the first one at 1e-5."""
    budget.enter(spending(2.0, 4), None)
    name = read_register(budget.path).fingerprints[0]
    declare_total(budget.path, name, closed(1.0) + 0.1, "rows.csv")
    assert closed(math.hypot(1.0, 0.5), 0.2) < closed(1.0)
    with pytest.raises(ValueError, match="at delta 1e-05"):
        budget.enter(spending(2.0, 1, delta=0.2), None)
    budget.enter(spending(50.0, 1, delta=0.2), None)
    ((_, epsilon, delta),) = rows(budget.path).values()
    assert delta == DELTA
    assert epsilon == pytest.approx(closed(math.hypot(1.0, 0.02)), rel=1e-6)


def test_a_total_of_pure_runs_is_at_the_usual_delta(budget):
    pure = Guarantee((Laplace(0.5),), EVERYONE, "zero_out", 0.0, 12)
    asked = Spending(pure, NAMES, "", "rows.csv", "pmtl")
    budget.enter(asked, None)
    name = declare_total(budget.path, (NAMES, ""), 1.0, "rows.csv")
    assert read_register(budget.path).totals[name].delta == 1e-5
    budget.enter(asked, None)
    with pytest.raises(ValueError, match="the total declared"):
        budget.enter(asked, None)


def test_a_total_holds_for_each_of_its_clients(budget):
    """It is declared for some clients, and refuses what would exceed it for one of them."""
    declare_total(budget.path, (NAMES[:3], ""), closed(0.45), "some.csv")
    budget.enter(spending(3.0, 1, names=NAMES[3:]), None)  # none of them
    budget.enter(spending(3.0, 1, names=NAMES[2:]), None)
    with pytest.raises(ValueError, match="1 private run spent"):
        budget.enter(spending(3.0, 1, names=NAMES), None)
    budget.enter(spending(3.0, 1, names=NAMES[:2]), None)  # who have not spent anything
    budget.enter(spending(3.0, 1, names=NAMES, population="others"), None)


def test_a_total_does_not_hold_for_other_clients(budget):
    """Also a run that alone exceeds it starts, if it has none of its clients."""
    total = closed(0.45)
    declare_total(budget.path, (NAMES[:3], ""), total, "some.csv")
    large = spending(0.5, 1, names=NAMES)
    assert large.guarantee.epsilon > total
    with pytest.raises(ValueError, match="the total declared"):
        budget.enter(large, None)
    budget.enter(spending(0.5, 1, names=NAMES[3:]), None)
    budget.enter(spending(0.5, 1, names=NAMES, population="others"), None)


def test_several_runs_are_checked_together_and_none_is_entered(budget, register):
    name = declare_total(register, (NAMES, ""), closed(0.5) * 1.0001, "rows.csv")
    before = register.read_bytes()
    budget.check(spending(), spending())
    budget.check(None, spending())
    with pytest.raises(ValueError, match=r"these 3 runs ask for .*together at most") as refused:
        budget.check(spending(), None, spending(), spending())
    assert name in str(refused.value)
    assert register.read_bytes() == before


def test_a_counted_run_resumes_although_the_total_was_lowered(budget, start, tmp_path):
    data = fingerprint(start, budget, tmp_path / "run")
    declare_total(budget.path, data, 0.01, "synthetic")
    start(tmp_path / "run")
    assert len(read_register(budget.path).entries) == 1


def test_a_run_that_was_begun_elsewhere_is_refused_on_resuming(budget, start, tmp_path):
    start(tmp_path / "run")
    (asked,) = foresee([plan()])
    budget.path.unlink()
    declare_total(budget.path, (asked.clients, asked.population), 0.01, "synthetic")
    with pytest.raises(ValueError, match="the total declared"):
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert (tmp_path / "run" / "plan.toml").exists()  # what was begun elsewhere stays


def test_a_run_that_loses_a_race_leaves_nothing(budget, start, tmp_path, monkeypatch):
    """Another run takes the rest of a total between the check of this one and its entry."""
    data = fingerprint(start, budget, tmp_path / "one")
    claim = module.Budget.check

    def check(self, *runs):
        claim(self, *runs)
        declare_total(budget.path, data, 0.01, "synthetic")

    monkeypatch.setattr(module.Budget, "check", check)
    with pytest.raises(ValueError, match="the total declared"):
        execute(plan(), folder=tmp_path / "two", budget=budget)
    assert not (tmp_path / "two").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="the total declared"):
        execute(plan(), folder=tmp_path / "kept", budget=budget)
    assert [path.name for path in (tmp_path / "kept").glob("[!.]*")] == ["notes.txt"]


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan])
def test_strange_totals_are_refused(register, total):
    with pytest.raises(ValueError, match="expected a positive number"):
        declare_total(register, (NAMES, ""), total, "rows.csv")
    assert not register.exists()


def test_an_infinite_total_withdraws_a_total_and_keeps_the_runs(budget, register):
    budget.enter(spending(), None)
    entries = read_register(register).entries
    name = declare_total(register, (NAMES, ""), 2.0, "rows.csv")
    assert read_register(register).totals[name].epsilon == 2.0
    assert declare_total(register, name, math.inf, "rows.csv") == name
    assert read_register(register).totals == {} and read_register(register).entries == entries


def test_a_run_is_moved_to_another_population(budget, register, start, tmp_path):
    """Clients who only share their names are told apart later; what was spent stays."""
    start(tmp_path / "one", on(patients(tmp_path / "clinics.csv")))
    start(tmp_path / "two", on(patients(tmp_path / "schools.csv")))
    assert [count for count, *_ in rows(register).values()] == [2]
    (tmp_path / "two").rename(tmp_path / "moved")
    name = declare_population(register, tmp_path / "moved", "schools")
    known = read_register(register)
    assert known.groups[name].population == "schools" and len(known.entries) == 2
    assert [count for count, *_ in rows(register).values()] == [1, 1]
    with pytest.raises(ValueError, match="not in the budget register"):
        declare_population(register, tmp_path, "schools")
    start(tmp_path / "moved", on(tmp_path / "schools.csv"))  # resumed
    assert len(read_register(register).entries) == 2


# --- the file -------------------------------------------------------------------------------------


def test_processes_wait_for_each_other(register, monkeypatch):
    """Each writer reads slowly: without the lock, all but one entry would be lost."""
    read = module.read_register

    def slowly(path):
        found = read(path)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(module, "read_register", slowly)
    budget = Budget(register, lambda text: None)
    asked = [spending(data=f"{number}.csv") for number in range(5)]
    threads = [threading.Thread(target=budget.enter, args=(one, None)) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.data for entry in read(register).entries) == [one.data for one in asked]


def test_of_runs_at_the_same_time_only_those_within_the_total_start(register):
    """Five threads ask for a run each, and three fit."""
    declare_total(register, (NAMES, ""), closed(math.sqrt(3 / 8)) * 1.0001, "rows.csv")
    budget, refused = Budget(register, lambda text: None), []

    def begin():
        try:
            budget.enter(spending(4.0, 2), None)
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2 and len(read_register(register).entries) == 3


def test_only_the_user_can_read_the_register(register):
    before = os.umask(0)
    try:
        declare_total(register, (NAMES, ""), 1.0, "rows.csv")
    finally:
        os.umask(before)
    assert stat.S_IMODE(register.stat().st_mode) == 0o600


def test_a_linked_register_stays_a_link(budget, register, tmp_path):
    """A register on another disk: replacing the link would start a second account."""
    register.symlink_to(tmp_path / "shared.json")
    budget.enter(spending(), None)
    budget.enter(spending(), None)
    assert register.is_symlink() and len(read_register(tmp_path / "shared.json").entries) == 2


def test_a_register_survives_a_failed_write(register, monkeypatch):
    name = declare_total(register, (NAMES, ""), 1.0, "rows.csv")
    before = register.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="cannot be written"):
        declare_total(register, name, 2.0, "rows.csv")
    assert register.read_bytes() == before


def test_a_full_disk_refuses_the_run_and_leaves_nothing(budget, register, tmp_path, monkeypatch):
    def full(path, contents):
        raise module._failed(path, "written", OSError(28, "No space left on device"))

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\)"):
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert not (tmp_path / "run").exists() and not register.exists()


def test_a_disk_without_locks_is_named(budget, register, monkeypatch, tmp_path):
    def no_locks(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(OSError, match="cannot be locked") as refused:
            budget.check(spending())
    assert "disk with file locks" in str(refused.value) and "COTERIE_BUDGET" in str(refused.value)


def test_entries_are_read_as_they_were_written(budget, register):
    budget.enter(spending(), None)
    budget.enter(spending(3.0, 1, relation="replace", names=NAMES[:4], population="x"), None)
    declare_total(register, (NAMES, "y"), 2.0, "rows.csv")
    known, text = read_register(register), register.read_text()
    module._write(register, known)
    assert read_register(register) == known and register.read_text() == text


def good():
    known = Contents(secret="5e" * 32)
    group = known.group(NAMES, "")
    name = known.fingerprint(group)
    made = module.Entry("1", name, "rows.csv", "/run", "2026", "pmtl", promise())
    known = Contents(known.secret, {name: group}, (made,), {name: module.Total(2.0, 1e-5, "x")})
    assert Contents.from_json(json.loads(json.dumps(known.to_json()))) == known
    return known.to_json()


def damaged():
    whole = good()
    (name,), (entry,) = whole["groups"], whole["runs"]
    total = whole["totals"][name]
    yield "empty", ""
    yield "torn", json.dumps(whole)[:-40]
    yield "a list", "[]"
    yield "a number", "3"
    yield "deep", "[" * 100_000
    for key, value in (
        ("format", 1), ("secret", "00"), ("secret", "x" * 64), ("secret", 3), ("groups", {}),
        ("groups", []), ("groups", {name: {"population": 1, "clients": ""}}),
        ("groups", {name: {"population": "", "clients": "abc"}}), ("totals", [1]),
        ("totals", {name: {**total, "epsilon": -1}}), ("totals", {name: {**total, "delta": 0}}),
        ("totals", {"other": total}), ("runs", [{**entry, "guarantee": None}]),
        ("runs", [{**entry, "run": 3}]), ("runs", [{**entry, "fingerprint": "other"}]),
    ):  # fmt: skip
        yield f"{key} {value}"[:40], json.dumps(whole | {key: value})
    yield "no runs", json.dumps({key: whole[key] for key in whole if key != "runs"})


DAMAGED = dict(damaged())


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


@pytest.mark.parametrize("why", [errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_a_register_that_cannot_be_made_is_named_before_a_folder_is(
    budget, register, tmp_path, monkeypatch, why
):
    opened = os.open

    def closed_to_us(path, *how, **more):
        if str(path) == f"{register}.lock":
            raise OSError(why, os.strerror(why))
        return opened(path, *how, **more)

    monkeypatch.setattr(os, "open", closed_to_us)
    with pytest.raises(OSError, match=rf"cannot be written \({os.strerror(why)}\)") as refused:
        execute(plan(), folder=tmp_path / "run", budget=budget)
    assert str(refused.value).startswith(str(register)) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_register_of_another_user_is_named(register, monkeypatch):
    declare_total(register, (NAMES, ""), 1.0, "rows.csv")

    def closed_to_us(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", closed_to_us)
    with pytest.raises(OSError, match=r"cannot be read \(Permission denied\)"):
        read_register(register)


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
