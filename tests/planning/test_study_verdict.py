"""The studies of verdict and utility: one small federation each, and what their tables count."""

import importlib
import math
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # programs of benchmarks
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def programs():
    before = sys.path.copy()
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("verdict"), importlib.import_module("study")
    finally:
        sys.path[:] = before


def line(**changes):
    usual = {
        "task": "regression", "features": "9", "rows": "20", "n_mu": "40", "parameters": "10",
        "local": "0.5", "joined": "0.4", "shrunk": "0.45", "joined_t": "-3", "shrunk_t": "-3",
    }  # fmt: skip
    return usual | changes


def test_the_rule_and_the_outcome_of_a_line(programs):
    verdict, _ = programs
    rounds, found = verdict.of_line(line(), declared=False)  # (0.3 * 40)^2 / 10
    assert rounds == pytest.approx(14.4) and found == "join"
    assert verdict.of_line(line(rows="1"), declared=True)[1] == "small gain"
    assert verdict.of_line(line(rows="1"), declared=False)[1] == "join"
    assert verdict.outcome_of(line()) == ("gain", pytest.approx(-0.2))
    assert verdict.outcome_of(line(joined_t="-1"))[0] == "even"  # not clear
    assert verdict.outcome_of(line(n_mu="10"))[1] == pytest.approx(-0.1)  # shrunk


def test_a_federation_is_measured_and_the_study_goes_on(programs, tmp_path, capsys):
    verdict, study = programs
    options = {
        "kind": "mean", "task": "binary", "outputs": None, "clients": 30, "features": 3,
        "rows": 12, "spread": 0.3, "noise": 0.5,
    }  # fmt: skip
    lines = list(verdict.measure(options, [0.5, 4.0], 7))
    assert [one["epsilon"] for one in lines] == [0.5, 4.0]
    for one in lines:
        assert 0 < one["joined"] < 0.6 and 0 < one["shrunk"] < 0.6 and 0 < one["hedged"] < 0.6
    given = ["mixed:opposed", "--quick", "--epsilon", "0.01", "--out", str(tmp_path)]
    study.main(given)
    first = study.read(tmp_path / "study.csv")
    alone = next(one for one in first if one["method"] == "default")
    local = next(one for one in first if one["method"] == "local")
    assert alone["verdict"] == "learn alone" and float(alone["spent"]) == 0
    assert alone["error"] == local["error"]
    study.main(given)  # nothing is computed again
    assert study.read(tmp_path / "study.csv") == first
    assert "| mixed:opposed | 0.01 | learn alone |" in (tmp_path / "study.md").read_text()
    told = f"{float(local['error']):.3f}"
    assert f"| opposed | 1 | {told} | {told}= |" in capsys.readouterr().out


def test_from_how_many_clients_a_network_pays(programs, tmp_path):
    scaling = importlib.import_module("scaling")

    def cell(method, clients, error, epsilon="1.0"):
        named = {"kind": "image", "method": method, "epsilon": epsilon}
        return named | {"clients": str(clients), "seed": "0", "error": str(error)}

    lines = [
        cell(f"local {m}", n, e, "inf")
        for n in (10, 20, 40)
        for m, e in (("linear", 0.5), ("network", 0.4))
    ]
    for n, errors in {10: (0.3, 0.41, 0.2), 20: (0.41, 0.42, 0.397), 40: (0.2, 0.43, 0.1)}.items():
        lines += [cell(m, n, e) for m, e in zip(("pmtl", "head", "dpfedmtl"), errors, strict=True)]
    found = scaling.means([*lines, cell("pmtl", 40, 0.4)])
    assert found["image", "local", 0.0, 20] == 0.4
    assert found["image", "pmtl", 1.0, 40] == pytest.approx(0.3)
    start = {m: scaling.pays_from(found, "image", m, 1.0) for m in ("pmtl", "head", "dpfedmtl")}
    assert start == {"pmtl": 40, "head": None, "dpfedmtl": 40}  # .397 is not 1 % better
    assert "| head | 1 | 0.410 | 0.420 | 0.430 | never here |" in scaling.table(found)
    scaling.draw(found, tmp_path)
    assert "image, epsilon 1" in (tmp_path / "scaling.svg").read_text()
    scaling.draw_pays(found, tmp_path)
    assert "clients until joining pays" in (tmp_path / "pays.svg").read_text()
    assert scaling.crossing(found, "image", "head", 1.0) is None
    between = scaling.crossing(found, "image", "pmtl", 1.0)  # ratios 1.025 and .75
    assert between == pytest.approx(20 * 2 ** (math.log(1.025 / 0.99) / math.log(1.025 / 0.75)))
    larger = scaling.means([*lines, cell("pmtl", 80, 0.1)])  # no local training of 80 clients
    assert larger["image", "local", 0.0, 80] == 0.4


def test_a_small_federation_of_the_network_study_is_measured_once(programs, tmp_path, capsys):
    scaling = importlib.import_module("scaling")
    given = ["image", "--clients", "6", "--epsilon", "8", "--seeds", "1", "--out", str(tmp_path)]
    given += ["--methods", "pmtl", "head"]
    scaling.main(given)
    first = scaling.read(tmp_path / "scaling.csv")
    assert [one["method"] for one in first] == ["local linear", "local network", "pmtl", "head"]
    assert all(0 < float(one["error"]) < 1 for one in first)
    scaling.main(given)
    assert scaling.read(tmp_path / "scaling.csv") == first
