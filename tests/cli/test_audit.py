"""`coterie audit`: its JSON, its exit status, and what it refuses."""

import json

import pytest

from coterie.cli.main import main
from coterie.privacy.mechanisms import GaussianSum

GIVEN = "audit --data synthetic --option clients=20 --option rows=8 --option features=2 --rounds 1"
ROWS = f"{GIVEN} --rows 1 --attack reconstruction"
KEYS = {"claimed", "lower_bound", "estimator", "bounds", "trials", "seconds", "view", "holds"}


def run(line, capsys):
    status = main(line.split())
    return status, capsys.readouterr()


def test_an_honest_plan_holds(capsys):
    status, told = run(f"{GIVEN} --method pmtl --epsilon 2 --trials 60 --json", capsys)
    found = json.loads(told.out)
    assert status == 0 and found.keys() >= KEYS
    assert found["holds"] and found["lower_bound"] <= found["claimed"] <= 2
    assert {one["estimator"] for one in found["bounds"]} >= {"gaussian", "threshold"}
    assert (found["trials"], found["view"], found["rounds"]) == (60, "other clients", 1)


def test_a_broken_mechanism_ends_with_status_1(capsys, monkeypatch):
    on_grid = GaussianSum.on_grid
    quiet = lambda self, drawn, step: on_grid(self, drawn / 10, step)  # noqa: E731
    monkeypatch.setattr(GaussianSum, "on_grid", quiet)
    status, told = run(f"{GIVEN} --method pmtl --epsilon 1 --trials 60", capsys)
    assert status == 1 and "ABOVE THE CLAIM" in told.out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("audit --epsilon 1", "no data"),
        ("audit nowhere.toml", "nowhere.toml: no such file"),
        (f"{GIVEN} --method local --epsilon 1", "no claim to audit"),
        (f"{GIVEN} --method pmtl --epsilon inf", "no claim to audit"),
        (f"{GIVEN} --method pmtl --trials 3", "at least 50"),
        (f"{GIVEN} --method pmtl --confidence 2", "--confidence 2"),
        (f"{GIVEN} --method pmtl --one-run --trials 60", "give one of them"),
        (f"{GIVEN} --method pmtl --canaries 5", "those of --one-run"),
        (f"{GIVEN} --method pmtl --view server", "no epsilon is claimed against it"),
        (f"{GIVEN} --method pmtl --noise local --view clients", "audit --view server"),
        (f"{GIVEN} --method pmtl --view me", "expected clients or server"),
        (f"{GIVEN} --method pmtl --plot x.txt", "expected a name that ends in .svg"),
        (f"{ROWS} --one-run", "leave out --one-run, or leave out --attack"),
        (f"{ROWS} --canaries 3", "leave out --canaries"),
        (f"{ROWS} --view server", "leave out --view"),
        (f"{ROWS} --confidence 0.9", "leave out --confidence"),
        (f"{ROWS} --trials 0", "--trials 0: expected at least 1 client"),
        (f"{ROWS} --method mpmtl", "no reconstruction attack for mpmtl"),
    ],
)
def test_what_cannot_be_audited_is_refused(capsys, line, expected):
    status, told = run(line, capsys)
    assert status == 2 and expected in told.err and told.err.count("\n") == 1


def test_one_run_is_printed(capsys):
    status, told = run(f"{GIVEN} --method pmtl --one-run --canaries 8 --epsilon 2", capsys)
    assert status == 0 and "8 canaries of 8 rows" in told.out and "One run" in told.out


def test_the_audit_of_a_run_is_kept_and_reported(capsys, tmp_path, monkeypatch):
    """It draws the attack, and the run still verifies."""
    monkeypatch.chdir(tmp_path)
    flags = "--method pmtl --epsilon 2 --no-local --quiet --out done"
    assert main(f"run {GIVEN.removeprefix('audit ')} {flags}".split()) == 0
    status, _ = run("audit done --trials 50 --plot roc.svg --json", capsys)
    assert status == 0 and "attack of the audit" in (tmp_path / "roc.svg").read_text()
    kept = json.loads((tmp_path / "done" / "audit.json").read_text())
    assert kept.keys() >= KEYS and kept["trials"] == 50
    assert main(["report", "done", "--out", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Empirical audit" in page and "No lower bound is above the claim" in page
    assert main(["verify", "done"]) == 0
    (tmp_path / "done" / "audit.json").write_text("{}")
    assert main(["report", "done", "--out", "page.html"]) == 2


def test_reconstruction_is_printed_drawn_and_is_no_test_of_a_claim(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, told = run(f"{ROWS} --method pmtl --trials 2 --plot rows.svg --json", capsys)
    found = json.loads(told.out)
    assert status == 0 and found["attack"] == "reconstruction" and found["rows"] == [1, 1]
    names = {"trusted", "secure_aggregation", "client_noise", "guess"}
    assert found["settings"].keys() == names
    assert found["settings"]["trusted"]["found"] == 1 and found["epsilon"] == pytest.approx(1)
    assert {"error", "errors", "best_cosine", "mean_cosine"} <= found["settings"]["trusted"].keys()
    assert "secure aggregation" in (tmp_path / "rows.svg").read_text()
    status, told = run(ROWS, capsys)  # pfeb, which has no noise of clients
    assert status == 0 and "5 clients with 1 row each" in told.out
    assert "reconstructs 100% of these rows" in told.out and "left out" in told.out
    status, told = run(f"{ROWS.replace('--rows 1', '--rows 2')} --method fedavg --trials 1", capsys)
    assert status == 0 and "takes 5 local steps for one gradient step" in told.out
