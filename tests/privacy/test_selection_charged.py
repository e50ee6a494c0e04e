"""A run that was chosen privately says what that cost, wherever whoever sees it alone may look."""

import dataclasses
import html
import json
import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import coterie.tune.charge
from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.planning.plan import Plan
from coterie.privacy.guarantee import OTHERS, Guarantee, round_up
from coterie.privacy.selection import (
    CHOSEN_ONLY,
    FOR_OTHERS,
    Charged,
    RunLaw,
    charged_statement,
    chosen_alone,
)
from coterie.report.page import write_report
from coterie.runs.run import execute
from coterie.runs.summary import CHARGED, NOT_COVERED
from coterie.tune.charge import select
from coterie.tune.tune import check_grid

pytestmark = pytest.mark.full

RUNS = 3.0


def of_best(candidates, score, eta, mean, delta):
    """Epsilon of Theorem 2 where all take part, by a grid of its own; candidates of (z, rounds)."""
    orders = 1 + np.geomspace(1e-3, 1e3, 20001)
    gamma = 1 / mean  # of the geometric law
    assert eta == 1
    spent = max(rounds / z**2 for z, rounds in candidates) + 1 / score**2
    one = orders * spent / 2
    best = one + (1 + eta) * np.min((1 - 1 / orders) * one + math.log(1 / gamma) / orders)
    best += math.log(mean) / (orders - 1)
    turned = best + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(turned.min())


def with_runs(count):
    law = RunLaw(RUNS)
    draws = (law.draw(coterie.tune.charge.open_entropy(s, "selection", 0)) for s in range(500))
    return next(seed for seed, drawn in enumerate(draws) if drawn == count)


def plan(**changes):
    table = {
        "data": {"name": "rows.csv"},
        "method": {"kind": "pmtl"},
        "privacy": {"epsilon": 1.0},
        "rounds": 2,
        "compare_with_local": False,
        "history": True,
        "simulation_seed": with_runs(3),
    }
    return table | changes


def choose(folder, **changes):
    grid = {"method.lam": [0.1, 1.0], "rounds": [2, 3]}
    return select(plan(**changes), grid, folder=Path(folder), runs=RUNS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with private rows and a selection among runs on them."""
    folder = tmp_path_factory.mktemp("chosen")
    draw = np.random.default_rng(0)
    lines = ["client,a,b,y"]
    for client in range(20):
        slopes = draw.normal(size=2)
        for x in draw.normal(size=(16, 2)):
            lines.append(f"c{client},{x[0]},{x[1]},{0.5 * slopes @ x + 0.2 * draw.normal()}")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        choose("selected")
    return folder


@pytest.fixture
def chosen(place, monkeypatch, tmp_path):
    """The chosen run as it is handed on: its folder alone."""
    monkeypatch.chdir(place)
    record = json.loads(Path("selected/selection.json").read_text())
    return Path(shutil.copytree(Path("selected") / record["chosen"], tmp_path / "handed-on"))


@pytest.fixture
def coterie_(capsys):
    def call(line):
        capsys.readouterr()
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return call


def read(folder, name):
    return json.loads((folder / name).read_text())


def record():
    return json.loads(Path("selected/selection.json").read_text())


def test_certificate_and_result_state_the_number_of_the_choice(chosen):
    stated, result = read(chosen, "guarantee.json"), read(chosen, "result.json")
    told = stated["selection"]
    offered = {(e["noise_multiplier"], e["rounds"]) for run in told["candidates"] for e in run}
    assert len(offered) == 2 and told["runs_mean"] == RUNS
    score = told["score_event"]["noise_multiplier"]
    expected = of_best(offered, score, told["eta"], RUNS, stated["delta"])
    found = told["epsilon_chosen_alone"]
    assert expected * (1 - 1e-3) <= found <= expected * 1.02 and found > 1.5
    assert found == record()["guarantee"]["epsilon_chosen_alone"]["epsilon"]
    # What its own events come to is said to be nobody's.
    assert stated["epsilon"] <= 1
    text = charged_statement(Guarantee.from_json(stated), told)
    first = text.splitlines()[1]
    assert first.startswith(f"epsilon = {round_up(found)} at delta = 1e-05, over ")
    assert round_up(math.exp(found), 3) in first and FOR_OTHERS in text
    assert "who observe every release" not in text
    assert result["epsilon"] == found and result["view"] == CHOSEN_ONLY
    assert result["views"]["other_clients"] is None and result["epsilon_before_choice"] <= 1
    assert result["reviewer"] is None, "the numbers of its events alone hold against nobody"
    assert round_up(found) in result["tuning"] and FOR_OTHERS in result["tuning"]


def test_nothing_that_is_handed_on_tells_how_many_runs_there_were(chosen):
    others = record()["guarantee"]["epsilon_other_clients"]["epsilon"]
    for path in chosen.rglob("*"):
        if path.is_file():
            assert f"{others:.6g}".encode() not in path.read_bytes(), path.name
    folders = [Path("selected") / run["run"] for run in record()["runs"]]
    told = [read(folder, "guarantee.json")["selection"] for folder in folders]
    assert len(told) == 3 and told[0] == told[1] == told[2]


def test_the_number_is_computed_anew_and_not_believed(chosen, coterie_):
    stated = read(chosen, "guarantee.json")
    true = stated["selection"]["epsilon_chosen_alone"]
    stated["selection"]["epsilon_chosen_alone"] = 0.01
    (chosen / "guarantee.json").write_text(json.dumps(stated))
    run = Guarantee.from_json(stated)
    assert chosen_alone(run, stated["selection"]) == true and chosen_alone(run, None) is None
    assert f"epsilon = {round_up(true)} " in charged_statement(run, stated["selection"])
    assert charged_statement(run, None) == run.statement()
    shown = json.loads(coterie_(f"run --resume {chosen} --json")[1])
    assert shown["epsilon"] == true == shown["selection"]["epsilon_chosen_alone"]
    printed = " ".join(coterie_(f"run --resume {chosen}")[1].split())
    assert f"epsilon = {round_up(true)} " in printed and CHOSEN_ONLY in printed
    with pytest.raises(ValueError, match="is none of them"):
        charged = Charged.from_json(stated["selection"])
        charged.selection(dataclasses.replace(run, events=run.events * 2))


def test_export_says_it_too(chosen, coterie_):
    found = read(chosen, "guarantee.json")["selection"]["epsilon_chosen_alone"]
    code, _, err = coterie_(f"export {chosen} --client c3 --out {chosen}/c3.safetensors")
    assert code == 0, err
    with safe_open(chosen / "c3.safetensors", framework="np") as file:
        told = file.metadata()
    assert float(told["epsilon"]) == found
    assert json.loads(told["guarantee"])["view"] == CHOSEN_ONLY
    assert FOR_OTHERS in json.loads(told["guarantee"])["tuning"]


def test_the_page_never_speaks_of_the_other_clients_with_that_number(chosen):
    found = read(chosen, "guarantee.json")["selection"]["epsilon_chosen_alone"]
    page = html.unescape(write_report([chosen], chosen / "page.html").read_text())
    page = page.replace("\u00a0", " ")
    assert f"At epsilon {round_up(found)} ({CHOSEN_ONLY})" in page
    assert f"{round_up(math.exp(found), 3)} times as likely" in page
    assert "any event that an adversary who observes only this run can observe" in page
    for wrong in (
        "2.72 times",
        "this is a strong guarantee",
        "that the other clients together can",
    ):
        assert wrong not in page
    assert OTHERS in page and "has no trade-off curve" in page and "trade-off-" not in page
    assert "against the other clients, for all runs, is in each selection.json" in page
    # The bound at 10 % false positives, by hand.
    most = min(math.exp(found) * 0.1 + 1e-5, 1 - math.exp(-found) * (1 - 1e-5 - 0.1))
    assert f"{math.ceil(1000 * most - 1e-9) / 10:.1f} %" in page


def test_verification_agrees(chosen, coterie_):
    code, out, err = coterie_(f"verify {chosen}")
    assert code == 0, out + err


def test_settings_run_again_are_another_run(chosen, coterie_):
    written = Plan.load(chosen / "plan.toml")
    assert written.charged is not None
    with pytest.raises(ValueError, match=r"leave out the table \[charged\]"):
        execute(written, folder=chosen.parent / "again")
    with pytest.raises(ValueError, match="comes on top"):
        execute(written)
    code, out, _ = coterie_(
        f"run --plan {chosen}/plan.toml --out {chosen.parent}/again --quiet --json"
    )
    result = json.loads(out)
    assert code == 0 and result["tuning"] == CHARGED and result["epsilon"] <= 1
    assert "on top of this epsilon" in CHARGED and result["view"] == "other clients"
    assert Plan.load(chosen.parent / "again" / "plan.toml").charged is None
    with pytest.raises(ConfigError, match="charged selection writes it"):
        check_grid({"charged.runs": [1.0]})


def test_what_was_never_covered_stays_so(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    found = choose(tmp_path / "spoilt", tuned="not covered", simulation_seed=with_runs(1))
    result = read(found.run, "result.json")
    assert result["tuning"].startswith(f"{NOT_COVERED}; CHARGED: ")
    assert result["epsilon"] == found.guarantee.chosen_alone
    page = write_report([found.run], tmp_path / "page.html").read_text()
    assert "tuning NOT COVERED by epsilon</span>" in page


def test_hidden_cohorts_of_a_fixed_size_are_no_smaller_for_it(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    sampler = {"kind": "fixed", "cohort": 5}
    privacy = {"epsilon": 1.0, "relation": "replace"}
    seed = with_runs(1)
    found = choose(tmp_path / "f", sampler=sampler, privacy=privacy, simulation_seed=seed)
    stated = read(found.run, "guarantee.json")
    run = Guarantee.from_json(stated)
    # PMTL's clients keep state, so the cohort counts as visible to an outsider too.
    assert stated["selection"]["epsilon_chosen_alone"] > run.epsilon == run.views["outsider"]
    before = f"(epsilon = {round_up(run.epsilon)}, before the choice)"
    text = charged_statement(run, stated["selection"])
    assert before in text and "an outsider" not in text
