"""`coterie audit`: its JSON, its exit status, and what it refuses."""

import json

import pytest

from coterie.cli.main import main
from coterie.privacy.mechanisms import GaussianSum

GIVEN = "audit --data synthetic --option clients=20 --option rows=8 --option features=2 --rounds 1"
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
        ("audit nowhere.toml", "nowhere.toml: cannot be read"),
        (f"{GIVEN} --method local --epsilon 1", "no claim to audit"),
        (f"{GIVEN} --method pmtl --epsilon inf", "no claim to audit"),
        (f"{GIVEN} --method pmtl --trials 3", "at least 50"),
        (f"{GIVEN} --method pmtl --confidence 2", "--confidence 2"),
    ],
)
def test_what_cannot_be_audited_is_refused(capsys, line, expected):
    status, told = run(line, capsys)
    assert status == 2 and expected in told.err and told.err.count("\n") == 1
