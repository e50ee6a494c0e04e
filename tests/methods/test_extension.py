"""A method and a mechanism of another package, by entry points: examples/extension, installed.

What a user does with a method of this package works with one of another: help, plan, run, report,
comparison, verification, deployment and the contract suite.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ["--data", "synthetic:mean", "--model", "mlp", "--epsilon", "8", "--rounds", "3"]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Install the package into a folder of its own; return a runner of python with it."""
    work = tmp_path_factory.mktemp("extension")
    source = shutil.copytree(ROOT / "examples" / "extension", work / "source")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, *command, "--target", str(work / "site"), str(source)],
        check=True,
        capture_output=True,
    )
    paths = [str(work / "site"), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments, cwd=work):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def coterie(python):
    return lambda *arguments: python("-m", "coterie.cli", *arguments)


def test_it_is_listed_with_its_texts_and_settings(coterie):
    found = json.loads(coterie("methods", "--json"))["fedrep"]
    assert found["summary"].startswith("A shared representation")
    assert found["releases"] == "a clipped, noised mean change of the representation"
    assert found["settings"]["head_sgd"]["epochs"] == 5
    assert "fedrep" in coterie("completion", "bash")
    assert "two_servers" in coterie("run", "--help")


def test_it_is_planned_run_reported_and_compared(coterie, tmp_path):
    planned = json.loads(coterie("plan", *DATA, "--method", "fedrep", "--json"))
    assert planned["method"] == "fedrep"
    folder = tmp_path / "run"
    line = ["--method", "fedrep", "--out", str(folder), "--quiet", "--json"]
    result = json.loads(coterie("run", *DATA, *line))
    assert result["epsilon"] <= 8 and result["share_better_than_local"] is not None
    assert "fedrep" in (folder / "report.html").read_text()
    both = tmp_path / "both"
    line = ["--methods", "local,fedrep", "--seeds", "1", "--out", str(both), "--quiet"]
    coterie("compare", *[*DATA[:4], "--rounds", "2"], "--epsilons", "8", *line)
    assert "fedrep" in (both / "report.html").read_text()


@pytest.fixture(scope="module")
def noised(coterie, tmp_path_factory):
    """A run of the method with the mechanism: its folder and its result."""
    folder = tmp_path_factory.mktemp("noised") / "run"
    line = ["--noise", "two_servers", "--out", str(folder), "--quiet", "--json"]
    return folder, json.loads(coterie("run", *DATA, "--method", "fedrep", *line))


def test_a_run_with_its_mechanism_meets_the_budget(noised):
    assert 7.9 < noised[1]["epsilon"] <= 8


def test_its_run_verifies(coterie, noised):
    coterie("verify", str(noised[0]))


def test_its_noise_is_that_of_two_servers(python):
    """Variance 2 (z B)^2 of 40,000 values: within 5 standard errors, false alarm 6e-7."""
    code = """
import torch
from coterie.privacy.entropy import open_entropy
from coterie_extension import TwoServers
made = TwoServers(0.5, 3.0)
noise = made.perturb({"w": torch.zeros(40000, dtype=torch.float64)}, open_entropy(1, "noise", 0))
print(float(noise["w"].var()), made.standard_deviations({"w": (40000,)})["w"] ** 2)
"""
    found, stated = map(float, python("-c", code).split())
    assert stated == pytest.approx(2 * 1.5**2)
    assert abs(found / stated - 1) < 5 * (2 / 40000) ** 0.5


@pytest.mark.full
def test_it_keeps_the_contracts(python):
    chosen = "fedrep and (pure or independence or replay or declared or epsilon or round_trips)"
    said = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts", "-k", chosen, cwd=ROOT
    )
    assert "passed" in said and "failed" not in said


@pytest.mark.full
def test_it_is_deployed(python):
    """Two sites and a coordinator release what a simulation releases."""
    chosen = ["tests/deploy/test_coordinator.py", "-k", "fedrep"]
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=ROOT)
    assert "passed" in said and "failed" not in said
