"""The study of PFEB on a federation of one's own: its numbers by hand, and how it goes on."""

import csv
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from coterie.evaluation.predict import predict

pytestmark = pytest.mark.slow  # a program of benchmarks
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study():
    before = sys.path.copy()
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("pfeb")
    finally:
        sys.path[:] = before


@pytest.fixture
def table(tmp_path):
    """Write 12 clients of unequal size, scores near 20, as a file."""
    generator = np.random.default_rng(5)
    lines = ["school,x0,x1,score"]
    for school in range(12):
        slopes = [1.0, -0.5] + 0.3 * generator.normal(size=2)
        for row in generator.normal(size=(8 + school, 2)):
            score = 20 + 12 * (row @ slopes + 0.5 * generator.normal())
            lines.append(f"s{school},{row[0]:.5f},{row[1]:.5f},{score:.4f}")
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(study, table, out, *more):
    words = f"--data {table} --client-column school --target score --center score=20"
    words += f" --scale score=12 --splits 2 --epsilon 1 --processes 1 --out {out}"
    study.main([*words.split(), *more])
    with (out / "regression.csv").open(newline="") as file:
        return {(row["method"], row["epsilon"]): row for row in csv.DictReader(file)}


def squares(study, federation, name, epsilon, split):
    """Squared errors of all test rows, client by client, from predictions."""
    method = study.METHODS[name][1]
    outcome, _ = study.carry_out(method, federation, epsilon, split)
    test = study.parts(federation, split)[1]
    truth = np.split(test.targets.double().numpy(), test.offsets[1:-1])
    return [(p - t) ** 2 for p, t in zip(predict(outcome, test), truth, strict=True)], truth


def test_numbers_are_those_of_plain_arithmetic(study, table, tmp_path, capsys):
    found = run(study, table, tmp_path / "out")
    printed = capsys.readouterr().out
    options = ["--data", str(table), "--client-column", "school", "--target", "score"]
    options += ["--center", "score=20", "--scale", "score=12"]
    (federation,) = study.chosen(study.parsed(options))
    for name, epsilon in (("pfeb", 1.0), ("oneshot", 1.0), ("pooled", math.inf)):
        values, gains = [], []
        for split in range(2):
            ours, truth = squares(study, federation, name, epsilon, split)
            alone, _ = squares(study, federation, "local_star", math.inf, split)
            every = np.concatenate(truth)
            values.append(np.concatenate(ours).sum() / ((every - every.mean()) ** 2).sum())
            gains.append([a.mean() - o.mean() for a, o in zip(alone, ours, strict=True)])
        gain, row = np.mean(gains, axis=0), found[name, f"{epsilon:g}"]
        assert float(row["nmse"]) == pytest.approx(np.mean(values), rel=1e-4)
        assert float(row["t"]) == pytest.approx(ttest_1samp(gain, 0).statistic, rel=1e-3)
        assert float(row["worse_off"]) == pytest.approx((gain < 0).mean(), abs=1e-4)
    assert f"{float(found['pfeb', '1']['nmse']):.3f}"[1:] in printed
    assert "mine m=12 p=3" in printed


def test_a_study_that_was_stopped_goes_on(study, table, tmp_path):
    first = run(study, table, tmp_path / "first")
    assert not (tmp_path / "first" / "regression.csv.part").exists()
    out = tmp_path / "second"
    out.mkdir()
    lines = (tmp_path / "first" / "regression.csv").read_text().splitlines()
    kept = [lines[0], lines[1].replace(first["pfeb", "1"]["nmse"], "0.12345")]
    (out / "regression.csv.part").write_text("\n".join(kept) + "\n")
    again = run(study, table, out)
    assert again["pfeb", "1"]["nmse"] == "0.12345"
    assert {key: row for key, row in again.items() if key != ("pfeb", "1")} == {
        key: row for key, row in first.items() if key != ("pfeb", "1")
    }
    (out / "regression.csv.part").write_text("\n".join(kept) + "\n")
    assert run(study, table, out, "--fresh") == first


def test_what_cannot_be_studied_is_left_out_with_a_word(study, tmp_path, capsys):
    with pytest.raises(SystemExit, match="nothing to do"):
        study.main(["--data", str(tmp_path / "absent.csv"), "--data", "digits"])
    told = capsys.readouterr().err
    assert "absent is left out" in told and "digits is left out" in told


def test_rows_of_another_unit_are_left_out_with_the_remedy(study, table, tmp_path, capsys):
    words = f"--data {table} --client-column school --target score --splits 1 --epsilon 1"
    study.main([*words.split(), "--processes", "1", "--out", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert "pfeb 1: left out" in told and "declare public constants for the target" in told
