"""One client's rows and its whole site: the attack of benchmarks/site_attack.py."""

import importlib.util
from pathlib import Path

import pytest

from coterie.engine import rounds
from coterie.methods.pmtl import PMTL

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "site_attack.py"


@pytest.fixture
def attack(monkeypatch):
    monkeypatch.setattr(PMTL, "local_update", PMTL.local_update)  # the program replaces it
    spec = importlib.util.spec_from_file_location("site_attack", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda memory: module.attack(100_000, 500, memory, 300)


@pytest.mark.parametrize("memory", [10_000, 400])
def test_a_client_that_does_not_fit_moves_the_sum_by_its_own_contribution(attack, memory):
    found = attack(memory)
    assert 0 < found["clips_moved"] <= 2
    assert found["lower_bound"] <= found["claimed"]


def test_a_site_that_one_client_silences_is_found(attack, monkeypatch):
    """As it was once: if the stacked clients failed, all of them counted as zeros."""
    monkeypatch.setattr(rounds, "_one_by_one", rounds.no_contribution)
    found = attack(10_000)
    assert found["clips_moved"] > 20
    assert found["lower_bound"] > 2 * found["claimed"]
