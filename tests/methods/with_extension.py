"""What `test_extension` runs in a process in which examples/extension is installed."""

import json

import pytest
import torch

from coterie.cli.main import main
from coterie.privacy.entropy import open_entropy

DATA = ["--data", "synthetic:mean", "--option", "clients=20", "--model", "mlp", "--rounds", "2"]
PRIVATE = [*DATA, "--epsilon", "8", "--method", "fedrep"]


@pytest.fixture
def coterie(capsys):
    def run(*line):
        assert main(line) == 0
        return capsys.readouterr().out

    return run


def test_it_is_listed_with_its_texts_and_settings(coterie, capsys):
    found = json.loads(coterie("methods", "--json"))["fedrep"]
    assert found["summary"].startswith("A shared representation")
    assert found["releases"] == "a clipped, noised mean change of the representation"
    assert found["settings"]["head_sgd"]["epochs"] == 5
    assert "fedrep" in coterie("completion", "bash")
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    assert "two_servers" in capsys.readouterr().out


def test_it_is_planned_and_compared(coterie, tmp_path):
    assert json.loads(coterie("plan", *PRIVATE, "--json"))["method"] == "fedrep"
    line = ["--methods", "local,fedrep", "--seeds", "1", "--out", str(tmp_path / "both"), "--quiet"]
    coterie("compare", *DATA, "--epsilons", "8", "--workers", "0", *line)
    assert "fedrep" in (tmp_path / "both" / "report.html").read_text()


def test_a_run_with_its_mechanism_meets_the_budget_is_reported_and_verifies(coterie, tmp_path):
    folder = tmp_path / "run"
    line = ["--noise", "two_servers", "--out", str(folder), "--quiet", "--json"]
    result = json.loads(coterie("run", *PRIVATE, *line))
    assert 7.9 < result["epsilon"] <= 8 and result["share_better_than_local"] is not None
    assert "fedrep" in (folder / "report.html").read_text()
    coterie("verify", str(folder))


def test_its_noise_is_that_of_two_servers():
    """Variance 2 (z B)^2 of 40,000 values: within 5 standard errors, false alarm 6e-7."""
    from coterie_extension import TwoServers

    made = TwoServers(0.5, 3.0)
    zeros = {"w": torch.zeros(40000, dtype=torch.float64)}
    found = float(made.perturb(zeros, open_entropy(1, "noise", 0))["w"].var())
    stated = made.standard_deviations({"w": (40000,)})["w"] ** 2
    assert stated == pytest.approx(2 * 1.5**2)
    assert abs(found / stated - 1) < 5 * (2 / 40000) ** 0.5
