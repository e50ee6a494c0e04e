"""Selection among private runs: drawn before anything is spent, charged, resumable, labelled."""

import hashlib
import json
import math
import os
import shlex
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import coterie.tune.charge
from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.data.config import DataConfig
from coterie.planning.plan import Plan
from coterie.privacy.ledger import LedgerError, OverspentError, locked
from coterie.privacy.selection import ALL_RUNS, CHOSEN, RunLaw, Selection, charged_message
from coterie.runs.budget import Budget, declare_total, read_register
from coterie.runs.run import execute
from coterie.runs.summary import NOT_COVERED
from coterie.tune.charge import Scoring, offer, select
from coterie.tune.tune import Progress, Range

pytestmark = pytest.mark.full

GRID = {"method.lam": [0.1, 1.0, 10.0]}
FLAGS = "--data rows.csv --method pmtl --epsilon 2 --rounds 2 --no-local --quiet"


def plan(**changes):
    table = {
        "data": {"name": "rows.csv"},
        "method": {"kind": "pmtl"},
        "privacy": {"epsilon": 2.0},
        "rounds": 2,
        "compare_with_local": False,
        "simulation_seed": 5,
    }
    return table | changes


@pytest.fixture(autouse=True)
def _in_a_folder_with_private_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lines = ["client,a,b,y"]
    for client in range(20):
        slopes = draw.normal(size=2)
        for x in draw.normal(size=(16, 2)):
            lines.append(f"c{client},{x[0]},{x[1]},{0.5 * slopes @ x + 0.2 * draw.normal()}")
    Path("rows.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def coterie_(capsys):
    def call(line):
        capsys.readouterr()
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return call


def seed_with(runs, mean=3.0):
    """A seed with which this many runs are drawn."""
    law = RunLaw(mean)
    return next(
        seed
        for seed in range(500)
        if law.draw(coterie.tune.charge.open_entropy(seed, "selection", 0)) == runs
    )


def pick(seed, folder="chosen", **changes):
    table = plan(simulation_seed=seed)
    return select(table, GRID, folder=Path(folder), runs=3.0, **changes)


def entries(folder, kind):
    lines = (Path(folder) / "scores" / "ledger.jsonl").read_text().splitlines()
    return [entry[kind] for entry in map(json.loads, lines) if kind in entry]


# --- what comes out ------------------------------------------------------------------------------


def test_the_best_noisy_score_is_chosen_and_everything_is_recorded():
    shown: list[Progress] = []
    found = pick(seed_with(4), observe=shown.append)
    assert [one.done for one in shown] == [0, 1, 2, 3, 4] and {one.total for one in shown} == {4}
    record = json.loads(Path("chosen/selection.json").read_text())
    assert record == found.record and record["finished"]
    scores = [run["score"] for run in record["runs"]]
    assert scores == list(found.scores) and len(scores) == 4
    best = record["runs"][int(np.argmax(scores))]
    assert record["chosen"] == best["run"] and found.best == best["settings"]
    assert found.run == Path("chosen") / best["run"]
    written = Plan.load(found.run / "plan.toml")
    assert written.method.lam == found.best["method.lam"] and written.tuned == "charged"
    # Both epsilons follow from the record alone.
    again = Selection.from_json(record["guarantee"])
    assert again == found.guarantee
    assert record["guarantee"]["epsilon_chosen_alone"]["epsilon"] == again.chosen_alone
    together = again.of_runs(record["guarantee"]["drawn"])
    assert record["guarantee"]["epsilon_other_clients"]["epsilon"] == together.epsilon
    assert CHOSEN in record["words"] and ALL_RUNS in record["words"]


def test_what_every_run_posts_is_what_is_accounted_for():
    found = pick(seed_with(3))
    assert entries("chosen", "charge") == entries("chosen", "release") == [0, 1, 2]
    events = 0
    for run in found.record["runs"]:
        stated = json.loads((Path("chosen") / run["run"] / "guarantee.json").read_text())
        assert stated["epsilon"] == pytest.approx(2, rel=1e-3) and stated["epsilon"] <= 2
        events += stated["rounds"] + 1
    assert len(found.guarantee.of_runs(found.drawn).events) == events


def test_results_of_the_chosen_run_point_at_the_larger_truth(coterie_):
    found = pick(seed_with(2))
    result = json.loads((found.run / "result.json").read_text())
    paid = charged_message(found.guarantee.chosen_alone, found.guarantee.delta)
    assert result["tuning"] == paid and "selection.json" in paid
    stated = json.loads((found.run / "guarantee.json").read_text())
    assert stated["selection"]["epsilon_chosen_alone"] == found.guarantee.chosen_alone
    assert f"Tuning: {paid}." in coterie_(f"run --resume {found.run} --quiet")[1]
    # How many runs there were is not told by what is handed on.
    assert len(found.run.name) == 16 and set(found.run.name) <= set("0123456789abcdef")


def test_public_data_and_spoilt_plans_are_labelled_so():
    assert pick(seed_with(1), "public", public=True).plan.tuned == "public"
    spoilt = select(
        plan(tuned="not covered", simulation_seed=seed_with(1)), GRID, folder=Path("b"), runs=3.0
    )
    assert spoilt.plan.tuned == "not covered"
    result = json.loads((spoilt.run / "result.json").read_text())
    assert result["tuning"].startswith(f"{NOT_COVERED}; CHARGED: ")


def test_with_enough_clients_bad_settings_are_not_chosen():
    table = plan(
        data={"name": "synthetic", "options": {"clients": 300, "rows": 20, "features": 3}},
        privacy={"epsilon": 8.0},
        simulation_seed=seed_with(6, 6.0),
    )
    grid = {"method.lam": [1.0, 1e6], "privacy.clip": [0.5, 1e-6]}
    found = select(table, grid, folder=Path("big"), runs=6.0)
    assert len({json.dumps(run["settings"]) for run in found.record["runs"]}) > 1
    good = [run["score"] for run in found.record["runs"] if run["settings"] == found.best]
    assert max(good) == max(found.scores)
    assert found.best["method.lam"] == 1.0 or all(
        run["settings"]["method.lam"] == 1e6 for run in found.record["runs"]
    )


def test_it_is_deterministic_in_the_seed_and_runs_are_independent(free):
    first, again = (pick(seed_with(3), name) for name in ("a", "b"))
    assert first.scores == again.scores and first.drawn == again.drawn
    posts = [
        hashlib.sha256((Path("a") / run["run"] / "shared.npz").read_bytes()).hexdigest()
        for run in first.record["runs"]
    ]
    assert len(set(posts)) == len(posts), "every run has noise of its own"
    fresh = [
        select(free, {"method.lam": [1.0]}, folder=Path(name), runs=1.01, budget=None)
        for name in ("c", "d")
    ]
    assert not fresh[0].guarantee.simulation and fresh[0].scores[0] != fresh[1].scores[0]


def test_scored_rows_are_neither_trained_on_nor_tested_on(monkeypatch):
    choice = DataConfig(name="rows.csv", validation=0.25, standardise="client")
    (train, test), (same, held) = choice.split(), choice.split_validation()
    assert (train.targets == same.targets).all() and (train.features == same.features).all()
    parts = [set(part.targets.tolist()) for part in (train, test, held)]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert sum(map(len, parts)) == 20 * 16 and (held.counts == 3).all()
    scored, real = [], coterie.tune.charge.evaluate

    def spy(model, models, data):
        scored.append(set(data.targets.tolist()))
        return real(model, models, data)

    monkeypatch.setattr("coterie.tune.charge.evaluate", spy)
    pick(seed_with(2))
    assert scored == [parts[2]] * 2


def test_a_sampled_score_is_one_more_round():
    table = plan(sampler={"kind": "poisson", "cohort": 8.0}, simulation_seed=seed_with(3))
    found = select(table, GRID, folder=Path("s"), runs=3.0)
    assert found.guarantee.participation.rate == 0.4
    assert len(found.scores) == 3 and all(math.isfinite(score) for score in found.scores)


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["run", "score", "written"])
def test_a_crash_redraws_nothing_and_uncounts_nothing(moment, monkeypatch):
    seed = seed_with(3)
    whole = pick(seed, "whole")
    real = {
        name: getattr(coterie.tune.charge, name) for name in ("execute", "_post_score", "_finish")
    }
    calls = []

    def crash(name):
        def wrapped(*given, **more):
            calls.append(name)
            if calls.count(name) == (1 if name == "_finish" else 2):
                raise RuntimeError("a crash")
            return real[name](*given, **more)

        return wrapped

    at = {"run": "execute", "score": "_post_score", "written": "_finish"}[moment]
    monkeypatch.setattr(f"coterie.tune.charge.{at}", crash(at))
    with pytest.raises(RuntimeError, match="a crash"):
        pick(seed, "cut")
    drawn = json.loads(Path("cut/selection.json").read_text())
    assert not drawn["finished"] and drawn["runs"][0]["score"] is None
    monkeypatch.setattr(f"coterie.tune.charge.{at}", real[at])
    found = pick(seed, "cut")
    assert found.drawn == whole.drawn and found.scores == whole.scores
    assert [run["run"] for run in found.record["runs"]] == [run["run"] for run in drawn["runs"]]


def test_kill_and_go_on(forks):
    """kill -9 in the middle of a run or a score, twice; then it goes on as if nothing had been."""
    seed = seed_with(4)
    whole = pick(seed, "whole")
    line = ["tune", "--charge", *shlex.split(FLAGS), "--grid", "method.lam=0.1,1,10", "--json"]
    line += ["--runs", "3", "--out", "killed", "--simulation-seed", str(seed)]
    line += ["--set", "data.split_seed=0"]
    for kill in (True, True, False):
        before, job = posted(), forks.start(*line)
        while kill and posted() < before + 1 and not (said(job.out) or said(job.err)):
            time.sleep(0.002)
        if kill:
            os.kill(job.pid, signal.SIGKILL)
        code, out, err = forks.finish(job)
        assert code in {0, -signal.SIGKILL if kill else 0}, err
        assert set(range(posted())) <= set(entries("killed", "charge")), "every post was charged"
    assert [run["score"] for run in json.loads(out)["runs"]] == list(whole.scores)
    assert entries("killed", "charge") == entries("killed", "release") == list(range(4))


def said(path):
    return path.stat().st_size > 0


def posted():
    return len(list(Path("killed/scores/posts").glob("*.npz")))


def test_a_folder_holds_one_selection():
    pick(seed_with(1))
    with pytest.raises(FileExistsError, match="another selection"):
        select(plan(simulation_seed=seed_with(1)), GRID, folder=Path("chosen"), runs=4.0)
    Path("chosen/selection.json").unlink()
    with pytest.raises(FileExistsError, match=r"without its selection\.json"):
        pick(seed_with(1))
    with locked(Path("busy")), pytest.raises(LedgerError, match="in use"):
        pick(seed_with(1), "busy")


def test_a_record_with_other_draws_does_not_open_the_scores():
    pick(seed_with(3))
    path = Path("chosen/selection.json")
    record = json.loads(path.read_text())
    record["guarantee"]["drawn"][0] = (record["guarantee"]["drawn"][0] + 1) % 3
    path.write_text(json.dumps(record))
    with pytest.raises(LedgerError, match="another plan"):
        pick(seed_with(3))


def test_no_score_beyond_those_drawn_is_posted():
    found = pick(seed_with(1))
    board = coterie.tune.charge._open_scores(
        Path("chosen/scores"),
        found.record,
        offer(plan(simulation_seed=seed_with(1)), GRID),
        Scoring(),
    )
    with pytest.raises(OverspentError):
        board.post([])
    board.ledger.close()


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "grid", "told"),
    [
        ({"privacy": {"epsilon": math.inf}}, GRID, "nothing to charge"),
        ({"privacy": {"noise_multiplier": 3.0}}, GRID, "epsilon = None.*one run"),
        ({"newcomers": 3}, GRID, "leave --holdout-clients out"),
        ({}, {}, "grid is empty"),
        ({}, {"sampler.cohort": [3.0, 5.0]}, "one sampling"),
        ({}, {"privacy.epsilon": [1.0]}, "one budget"),
        ({}, {"method.lam": Range(0.1, 1.0)}, "list the values"),
        ({}, {"method.lam": [-1.0]}, "lam"),
        ({"privacy": {"epsilon": 2.0, "noise": {"kind": "local"}}}, GRID, "LocalGaussian"),
        ({"privacy": {"epsilon": 2.0, "noise": {"kind": "laplace"}}}, GRID, "Laplace"),
        ({"privacy": {"epsilon": 2.0, "noise": {"kind": "shares"}}}, GRID, "SharedGaussian"),
    ],
)
def test_what_cannot_be_charged_is_refused_before_anything_is_spent(changes, grid, told):
    with pytest.raises(ValueError, match=told):
        select(plan(**changes), grid, folder=Path("no"))
    assert not Path("no").exists()


def test_no_rows_to_spare_is_said():
    with pytest.raises(ConfigError, match="row to spare"):
        select(plan(), GRID, folder=Path("no"), scoring=Scoring(rows=0.01))


def test_refused_settings_are_never_drawn():
    found = offer(plan(), {"method.lam": [-1.0, 1.0]})
    assert found.settings == [{"method.lam": 1.0}]
    assert [one.settings for one in found.refused] == [{"method.lam": -1.0}]


# --- the command ---------------------------------------------------------------------------------


def test_a_dry_run_tells_both_views_and_spends_nothing(coterie_):
    line = f"tune --charge {FLAGS} --grid method.lam=0.1,1 --runs 5 --dry-run"
    code, out, _ = coterie_(line)
    assert code == 0 and CHOSEN in out and ALL_RUNS in out and "No budget is spent" in out
    found = json.loads(coterie_(f"{line} --json")[1])
    assert found["guarantee"]["epsilon_chosen_alone"]["epsilon"] > 2
    assert [one["share"] for one in found["other_clients"]] == [0.5, 0.9, 0.99]
    assert sorted(path.name for path in Path().iterdir()) == ["rows.csv"]


def test_the_words_of_a_selection(coterie_):
    seed = seed_with(3)
    line = f"tune --charge {FLAGS} --grid method.lam=0.1,1,10 --runs 3 --simulation-seed {seed}"
    code, out, err = coterie_(line)
    assert code == 0 and err == "" and "private runs: 3" in out
    for told in (
        "chosen: method.lam = ",
        CHOSEN,
        f"{ALL_RUNS} (3 runs)",
        "SIMULATION",
        "share that folder only",
    ):
        assert told in out
    found = json.loads(coterie_(f"{line} --json")[1], parse_constant=pytest.fail)
    assert found["run"].startswith("selected/runs/") and len(found["runs"]) == 3
    assert found["tuned"] == "charged" and found["best"].keys() == {"method.lam"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--charge --search optuna", "leave --search out"),
        ("--dry-run", "--dry-run prints the cost of --charge"),
        ("--charge --runs 1", "for one run give its settings"),
        ("--charge --epsilon inf", "nothing to charge"),
    ],
)
def test_flags_that_do_not_fit_say_so(coterie_, flags, told):
    code, out, err = coterie_(f"tune {FLAGS} --grid method.lam=1,2 {flags}")
    assert code == 2 and not out and told in err and len(err.splitlines()) == 1


def test_ctrl_c_says_how_to_go_on(coterie_, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.tune.charge.execute", stop)
    code, out, err = coterie_(f"tune --charge {FLAGS} --grid method.lam=1,2")
    assert code == 130 and not out and "the same command resumes" in err
    assert not json.loads(Path("selected/selection.json").read_text())["finished"]


# --- the budget register --------------------------------------------------------------------------


@pytest.fixture
def free():
    """A plan with secret noise."""
    return {key: value for key, value in plan().items() if key != "simulation_seed"}


@pytest.fixture
def few(monkeypatch):
    """Draw three runs; the settings are drawn as usual."""
    monkeypatch.setattr(RunLaw, "draw", lambda law, entropy: 3)


def test_a_selection_is_one_entry_for_all_runs_and_scores(free, few, register, monkeypatch):
    """It is made once K is drawn and before the first run, and not again on resuming."""

    def stop(*args, **kwargs):
        (entry,) = read_register(register).entries
        record = json.loads(Path("chosen/selection.json").read_text())
        stated = Selection.from_json(record["guarantee"])
        assert entry.guarantee == stated.of_runs(record["guarantee"]["drawn"])
        assert len(entry.guarantee.events) == 3 * (2 + 1)  # two releases and a score each
        assert entry.run == str(Path("chosen").resolve())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("coterie.tune.charge.execute", stop)
        with pytest.raises(KeyboardInterrupt):
            select(free, GRID, folder=Path("chosen"), runs=3.0)
    told = []
    budget = Budget(tell=told.append)
    found = select(free, GRID, folder=Path("chosen"), runs=3.0, budget=budget)
    assert len(read_register(register).entries) == 1 and told == []
    execute(Plan.load(found.run / "plan.toml"), folder=found.run)  # resumed by itself
    assert len(read_register(register).entries) == 1
    # Whoever gets the chosen run only learns nothing of the others.
    result = json.loads((found.run / "result.json").read_text())
    assert result["register"] is None and not (found.run / "budget.json").exists()


def test_a_selection_that_may_exceed_a_total_is_refused_before_anything_is_drawn(
    free, register, monkeypatch
):
    """One run at epsilon 2 fits, and so do three; the most of 99 in 100 selections do not."""
    names = [f"c{number}" for number in range(20)]
    made = offer(free, GRID, runs=3.0)
    ours = [one.epsilon for one in made.guarantee.forecast((0.5, 0.99))]
    declare_total(register, (names, ""), (ours[0] + ours[1]) / 2, "rows.csv")
    monkeypatch.setattr(RunLaw, "draw", lambda law, entropy: pytest.fail("K was drawn"))
    with pytest.raises(ValueError, match="the total declared for these clients"):
        select(free, GRID, folder=Path("chosen"), runs=3.0)
    assert not Path("chosen").exists()


def test_the_command_tells_of_earlier_runs(coterie_, few, register):
    assert coterie_(f"run {FLAGS} --out run")[0] == 0
    grid = "--grid method.lam=0.1,1 --charge --runs 3 --out chosen"
    code, _, err = coterie_(f"tune {FLAGS} {grid}")
    assert code == 0 and err.startswith("1 private run on these clients (rows.csv): together")
    assert len(read_register(register).entries) == 2


def test_simulated_selections_and_plain_tuning_are_not_entered(coterie_, register):
    pick(seed_with(1))
    grid = "--grid method.lam=0.1,1 --folds 2 --out tuned.toml"
    assert coterie_(f"tune {FLAGS} {grid}")[0] == 0
    assert not register.exists()
