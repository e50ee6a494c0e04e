"""`coterie verify` of settings that were chosen by private runs: both numbers computed anew."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.privacy.entropy import open_entropy
from coterie.privacy.events import Gaussian, Participation, list_runs
from coterie.privacy.guarantee import round_up
from coterie.privacy.selection import RunLaw, Selection
from coterie.tune.charge import select
from coterie.verification import verify, verify_selection
from coterie.verification.account import Account, Choice, parameter
from coterie.verification.certificate import seal

pytestmark = pytest.mark.full

PLAN = {
    "data": {"name": "synthetic", "options": {"clients": 24, "rows": [6, 9], "features": 3}},
    "method": {"kind": "pmtl", "model": {"kind": "linear"}},
    "privacy": {"epsilon": 1.0},
    "rounds": 2,
    "compare_with_local": False,
    "history": False,
}
GRID = {"method.lam": [0.1, 1.0], "rounds": [2, 3]}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    for seed in range(100):
        if RunLaw(3.0).draw(open_entropy(seed, "selection", 0)) == 3:
            break
    folder = tmp_path_factory.mktemp("selected") / "selection"
    select(PLAN, GRID, folder=folder, runs=3.0, seed=seed)
    assert len(read(folder)["runs"]) == 3
    return folder


@pytest.fixture
def folder(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "selection")


def read(folder):
    return json.loads((folder / "selection.json").read_text())


def write(folder, record):
    (folder / "selection.json").write_text(json.dumps(record))


def chosen(folder):
    return folder / read(folder)["chosen"]


def failed(folder):
    return [check.name for check in verify_selection(folder).checks if check.status != "ok"]


def test_a_selection_and_its_runs_verify(healthy, capsys):
    assert failed(healthy) == []
    assert main(["verify", str(healthy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert len(found) == 4 and all(one["verified"] for one in found)
    assert found[0]["run"] == str(healthy)
    names = {check["name"] for check in found[0]["checks"]}
    assert {"epsilon of the chosen run only", "epsilon of the other clients"} < names


def test_a_chosen_run_verifies_without_the_rest(healthy, tmp_path):
    alone = shutil.copytree(chosen(healthy), tmp_path / "alone")
    verdict = verify(alone)
    assert verdict.verified
    assert "epsilon of the chosen run only" in {check.name for check in verdict.checks}


def lowered(key, value):
    def change(record):
        record["guarantee"][key]["epsilon"] = value

    return change


def guaranteed(**fields):
    return lambda record: record["guarantee"].update(fields)


def drop_a_run(record):
    """Say that there were fewer runs, and state their number; the chosen one stays."""
    number = next(n for n, run in enumerate(record["runs"]) if run["run"] != record["chosen"])
    del record["runs"][number]
    del record["guarantee"]["drawn"][number]


def other_chosen(record):
    record["chosen"] = min(record["runs"], key=lambda run: run["score"])["run"]


def swapped(record):
    first, second = record["runs"][:2]
    first["score"], second["score"] = second["score"], first["score"]


def law(**fields):
    return lambda record: record["guarantee"]["law"].update(fields)


CHANGES = {
    "chosen alone": (lowered("epsilon_chosen_alone", 0.01), "epsilon of the chosen run only"),
    "other clients": (lowered("epsilon_other_clients", 1.0), "epsilon of the other clients"),
    "a run dropped": (drop_a_run, "scores"),
    "another chosen": (other_chosen, "scores"),
    "scores swapped": (swapped, "scores"),
    "the law's mean": (law(mean=2.0), "draw"),
    "the law's gamma": (law(gamma=0.9), "draw"),
    "simulation hidden": (guaranteed(simulation=False), "draw"),
    "delta": (guaranteed(delta=1e-3), "runs"),
    "clients": (guaranteed(clients=2400), "runs"),
    "relation": (guaranteed(relation="replace"), "runs"),
    "asked": (lambda record: record["asked"].update(public=True), "scores"),
    "the score's noise": (
        lambda record: record["guarantee"]["score"][0].update(noise_multiplier=50.0),
        "scores",
    ),
    "candidates": (
        lambda record: [
            runs[0].update(noise_multiplier=50.0) for runs in record["guarantee"]["candidates"]
        ],
        "runs",
    ),
    "unfinished": (lambda record: record.update(finished=False), "selection well-formed"),
    "no draw": (guaranteed(drawn=[]), "selection well-formed"),
    "a draw of nothing": (guaranteed(drawn=[9, 9, 9]), "selection well-formed"),
    "a draw of anything": (guaranteed(drawn=[[1]]), "selection well-formed"),
    "no guarantee": (lambda record: record.pop("guarantee"), "selection well-formed"),
    "a score that is none": (
        lambda record: record["runs"][0].update(score="0.9"),
        "scores",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_that_was_altered_is_found(folder, name, capsys):
    change, check = CHANGES[name]
    record = read(folder)
    change(record)
    assert record != read(folder)
    write(folder, record)
    assert check in failed(folder)
    assert main(["verify", str(folder)]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_fails(folder, capsys):
    (folder / "selection.json").write_text("[" * 200_000)
    assert main(["verify", str(folder)]) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_scores_without_their_record_fail(folder, capsys):
    (folder / "selection.json").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "scores: NOT VERIFIED" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["a post gone", "a post altered", "no ledger", "a post more"])
def test_scores_that_were_altered_are_found(folder, damage):
    posts = folder / "scores" / "posts"
    if damage == "a post gone":
        (posts / "000001.npz").unlink()
    elif damage == "no ledger":
        (folder / "scores" / "ledger.jsonl").unlink()
    elif damage == "a post more":
        shutil.copy(posts / "000000.npz", posts / "000003.npz")
    else:
        np.savez(posts / "000001.npz", **{"leaf.score": np.float32(23.9)})
    assert "scores" in failed(folder)


def test_runs_that_are_missing_or_too_many_are_found(folder):
    runs = sorted((folder / "runs").iterdir())
    shutil.copytree(runs[0], folder / "runs" / "one-more")
    assert failed(folder) == ["runs"]
    shutil.rmtree(folder / "runs" / "one-more")
    assert failed(folder) == []
    shutil.rmtree(runs[0])
    assert failed(folder) == ["runs"]


# What the chosen run says of itself.


def forge(run, change, *lines):
    """Change certificate and plan of a run, and hash anew whatever hashes them."""
    told = json.loads((run / "guarantee.json").read_text())
    change(told)
    text = (run / "plan.toml").read_text()
    for old, new in lines:
        assert old in text
        text = text.replace(old, new)
    (run / "plan.toml").write_text(text)
    entries = (run / "ledger.jsonl").read_text().splitlines()
    entries[0] = json.dumps(json.loads(entries[0]) | {"plan_file": sha(run / "plan.toml")})
    (run / "ledger.jsonl").write_text("".join(f"{entry}\n" for entry in entries))
    told["files"] = {name: sha(run / name) for name in told["files"]}
    told["sha256"] = seal(told)
    (run / "guarantee.json").write_text(json.dumps(told))
    (run / "log.jsonl").unlink()
    return {check.name for check in verify(run).checks if check.status == "FAILED"}


def sha(path: Path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def selected(**fields):
    return lambda told: told["selection"].update(fields)


FORGED = {
    "epsilon": (selected(epsilon_chosen_alone=1.0), (), "epsilon of the chosen run only"),
    "a law": (
        selected(runs_mean=1.1),
        (("runs = 3.0", "runs = 1.1"),),
        "epsilon of the chosen run only",
    ),
    "a law in the certificate alone": (selected(runs_mean=1.1), (), "selection"),
    "delta": (selected(delta=0.1), (), "selection"),
    "other candidates": (
        lambda told: told["selection"]["candidates"].pop(),
        (),
        "selection",
    ),
    "score": (selected(score_event={"event": "non_private", "rounds": 1}), (), "selection"),
    "candidates of no kind": (selected(candidates=[[[]]]), (), "selection"),
    "nothing": (lambda told: told.pop("selection"), (), "selection"),
    "tuning": (lambda told: told.update(tuning="not covered"), (), "plan"),
    "text": (lambda told: told.update(view="other clients"), (), "certificate well-formed"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_chosen_run_that_says_otherwise_is_found(folder, name):
    change, lines, check = FORGED[name]
    assert check in forge(chosen(folder), change, *lines)


def test_forging_nothing_is_not_found(folder):
    assert forge(chosen(folder), lambda told: None) == set()


# The number itself.

SAMPLINGS = {
    "everyone": Participation("everyone"),
    "hidden coins": Participation("poisson", 0.2),
    "visible coins": Participation("poisson", 0.2, visible=True),
    "fixed": Participation("fixed", 0.2),
}


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("eta", [0.0, 1.0, 4.0])
def test_epsilon_of_the_best_run_agrees_with_training(sampling, relation, eta):
    """Two codes of one theorem: what is stated lies on a grid of orders, so just above."""
    who = SAMPLINGS[sampling]
    if who.kind == "fixed" and relation == "zero_out":
        relation = "replace"
    runs = ((Gaussian(6.0),) * 4, (Gaussian(3.0, math.sqrt(2)), Gaussian(9.0)))
    score = Gaussian(5.0, 1.0)
    made = Selection(runs, score, RunLaw(8.0, eta), who, relation, 1e-5, 100)
    account = Account((), who.kind, who.rate, who.visible, relation, 1e-5)
    candidates = [list_runs(events) for events in runs]
    choice = Choice(candidates, list_runs([score])[0], 8.0, eta, account)
    assert 1 - 1e-6 <= made.chosen_alone / choice.epsilon() <= 1.005


def test_epsilon_of_the_best_run_is_the_printed_one():
    """Theorem 2 where all take part and K is geometric, by hand on a fine grid of orders."""
    mean, delta, spent = 5.0, 1e-6, 3 / 4.0**2 + 1 / 6.0**2
    orders = 1 + np.geomspace(1e-3, 1e3, 40001)
    one = orders * spent / 2
    extra = np.min((1 - 1 / orders) * one + math.log(mean) / orders)
    best = one + 2 * extra + math.log(mean) / (orders - 1)
    hand = np.min(best + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    event = {"event": "gaussian", "replaced": 2.0}
    candidates = [[event | {"noise_multiplier": 4.0, "rounds": 3}]]
    score = event | {"noise_multiplier": 6.0, "rounds": 1}
    account = Account((), "everyone", 1.0, False, "zero_out", delta)
    choice = Choice(candidates, score, mean, 1.0, account)
    assert choice.epsilon() == pytest.approx(hand, rel=1e-6)


@pytest.mark.parametrize(("mean", "eta"), [(2.0, 1.0), (10.0, 0.0), (10.0, 0.5), (900.0, 3.0)])
def test_the_law_has_the_mean_that_it_is_named_by(mean, eta):
    """From the probabilities of the paper, summed one by one."""
    gamma = parameter(mean, eta)
    number = np.arange(1, 2_000_000)
    steps = np.log((number[1:] + eta - 1) / number[1:]) + math.log1p(-gamma)
    mass = np.exp(np.cumsum([0.0, *steps]))
    assert float(number @ (mass / mass.sum())) == pytest.approx(mean, rel=1e-5)


def test_the_record_of_a_selection_is_signed_too(folder, tmp_path):
    key, public = str(tmp_path / "owner"), str(tmp_path / "owner.pub")
    assert main(["sign", "--new-key", key]) == 0
    assert main(["verify", str(folder), "--key", public]) == 1
    assert main(["sign", str(folder), "--key", key]) == 0
    assert (folder / "selection.sig").exists() and (chosen(folder) / "guarantee.sig").exists()
    assert main(["verify", str(folder), "--key", public]) == 0
    path = folder / "selection.json"
    path.write_text(f"{path.read_text()} ")  # the same record, other bytes
    assert main(["verify", str(folder)]) == 0
    assert main(["verify", str(folder), "--key", public]) == 1


def test_a_chosen_run_has_a_statement(healthy, tmp_path):
    """Its epsilon is that of the choice; no bound on attacks of the other clients is stated."""
    page = tmp_path / "page.html"
    assert main(["report", str(chosen(healthy)), "--statement", str(page)]) == 0
    text = page.read_text()
    stated = read(healthy)["guarantee"]["epsilon_chosen_alone"]["epsilon"]
    assert round_up(stated) in text and "not stated" in text and "false alarms" not in text
