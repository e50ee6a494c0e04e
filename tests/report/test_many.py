"""Pages of many runs, figures as files, and what a newcomer reads."""

import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.report.finished import read_finished
from coterie.report.groups import group, one_by_one

pytestmark = pytest.mark.full

TESTS = Path(__file__).resolve().parent.parent


def load(name: str) -> Any:
    """Load a file of the tests as a module: tests are no package."""
    spec = importlib.util.spec_from_file_location(f"of_many_{name}", TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made = load("test_report")
METHODS = {"local": 0.6, "fedavg": 0.55, "pmtl": 0.4, "pfeb": 0.35, "ditto": 0.5}


def value_of(method: str, noise: float, seed: int) -> float:
    return METHODS[method] + (0.01 * noise if method != "local" else 0) + 0.004 * (seed - 1)


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five methods, four epsilons, three seeds, 537 clients."""
    folder = tmp_path_factory.mktemp("sixty")
    return [
        made.make_run(
            folder / f"{method}-{scale}-{seed}",
            method=method,
            events=() if method == "local" else (made.Gaussian(scale * made.NOISE),) * 20,
            value=value_of(method, scale, seed),
            standard_error=0.5,
            clients=537,
        )
        for method in METHODS
        for scale in (0.5, 1.0, 2.0, 4.0)
        for seed in range(3)
    ]


def test_many_runs_are_grouped_and_their_page_is_small(sixty: list[Path], tmp_path: Path) -> None:
    started = time.perf_counter()
    text, _ = made.read(sixty, tmp_path / "all.html")
    assert time.perf_counter() - started < 20
    assert (tmp_path / "all.html").stat().st_size < 2_000_000
    assert "This is pfeb at epsilon" in text and "private groups of runs" in text
    # mean and standard error over clients (0.5) and seeds, by hand
    values = [value_of("pfeb", 1.0, seed) for seed in range(3)]
    error = math.sqrt(0.5**2 + np.var(values, ddof=1) / 3)
    assert f"pfeb at epsilon 1 3 {np.mean(values):.3g} \u00b1 {error:.3g}" in text
    assert f"1: pfeb {np.mean(values):.3g}; " in text.partition("The best at each epsilon:")[2]
    assert "standard error over clients and seeds" in text
    assert text.count("clients gain (") == 6, "a few runs are shown one by one"
    assert "6 of 48 runs are shown here" in text
    assert "Further guarantees, in short" not in text, "seeds and methods share guarantees"


def test_the_frontier_has_a_line_a_method_with_bars(sixty: list[Path], tmp_path: Path) -> None:
    _, parts = made.read(sixty, tmp_path / "all.html")
    data = made.chart(parts, "against epsilon")["datasets"]
    rows = [row for row in data["rows"] if row["kind"] == "pmtl"]
    assert len(rows) == 4 and all(row["runs"] == 3 for row in rows)
    for scale in (0.5, 1.0, 2.0, 4.0):
        values = [value_of("pmtl", scale, seed) for seed in range(3)]
        (row,) = [one for one in rows if one["y"] == pytest.approx(np.mean(values), rel=1e-5)]
        error = math.sqrt(0.5**2 + np.var(values, ddof=1) / 3)
        assert row["error"] == pytest.approx(error, rel=1e-4)
        assert row["high"] - row["low"] == pytest.approx(2 * row["error"], rel=1e-3)
    epsilons = sorted(row["x"] for row in rows)
    assert epsilons[1] < 1.001 and epsilons == sorted(epsilons)
    assert {row["kind"] for row in data["levels"]} == {"alone"}
    (one,) = read_finished(sixty[24:25])
    assert min(abs(x - one.epsilon) for x in epsilons) < 1e-4


def test_one_epsilon_has_no_frontier(tmp_path: Path) -> None:
    text, _ = made.read(made.make_comparison(tmp_path), tmp_path / "report.html")
    assert "Privacy against utility" not in text


def test_groups_are_of_method_epsilon_and_data(sixty: list[Path]) -> None:
    runs = read_finished(sixty)
    groups = group(runs)
    assert len(groups) == 1 + 4 * 4 and sum(len(one.runs) for one in groups) == 60
    assert {len(one.runs) for one in groups if one.first.shares} == {3}
    assert [one.label for one in groups if not one.first.shares] == ["local"]
    assert len(one_by_one(runs)) == 6 and all(run.private for run in one_by_one(runs))
    assert one_by_one(runs[:8]) == runs[:8]


def test_a_group_of_one_run_has_the_error_over_clients(tmp_path: Path) -> None:
    (one,) = group(read_finished([made.make_run(tmp_path / "a")]))
    assert one.error("value", "standard_error") == 0.02
    assert math.isnan(one.error("value", "no_such_error"))


# --- figures as files


def test_every_chart_of_a_page_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.make_run(tmp_path / "run", names=['</svg>"', *(f"var(--x) {i}" for i in range(59))])
    made.add_losses(run)
    out, figures = tmp_path / "page.html", tmp_path / "figures"
    assert main(["report", str(run), "--out", str(out), "--figures", str(figures)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    parts = made.check(out.read_text(encoding="utf-8"))
    names = {value for name, value in parts.attributes if name == "id"}
    stems = {path.stem for path in figures.iterdir()}
    assert len(stems) == len(made.drawn(parts)) and stems <= names
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".png"}
    for path in figures.iterdir():
        if path.suffix == ".png":
            assert path.read_bytes()[:4] == b"\x89PNG"
            continue
        drawn = path.read_text(encoding="utf-8")
        assert drawn.startswith("<svg") and "var(--" not in drawn.replace("var(--x)", "")
    assert "epsilon spent" in (figures / "losses-1.svg").read_text(encoding="utf-8")


def test_figures_without_altair_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "altair", None)
    assert main(["report", str(run), "--figures", str(tmp_path / "f")]) == 2
    assert "pip install coterie[report]" in capsys.readouterr().err


# --- the three models of a client, and who sees what


def test_each_client_has_three_errors(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    text, _ = made.read([run], tmp_path / "before.html")
    assert "shared model taken as it is" not in text
    made.add_shared(run)
    text, parts = made.read([run], tmp_path / "report.html")
    assert "For 100 % of clients their own model is better than the shared model" in text
    rows = made.chart(parts, "alone, by the shared model and joined")["datasets"]["rows"]
    assert all(row["shared"] == pytest.approx(1.2 * row["joined"], rel=1e-4) for row in rows)
    gains = [row["gain"] for row in rows]
    assert gains == sorted(gains) and len(rows) == 57
    assert "error of the shared model" in text


def test_epsilon_is_told_by_view(tmp_path: Path) -> None:
    text, _ = made.read([made.make_run(tmp_path / "run")], tmp_path / "report.html")
    for told in (
        "the other clients, even all together 1",
        "the server no bound (inf) infinite: the server sees each bounded contribution",
        "the server, under secure aggregation no bound (inf)",
        "an outsider who is given the shared model 1",
    ):
        assert told in text
    assert "unit one client: its whole data" in text and "accountant exact Gaussian DP" in text


def test_a_newcomer_is_told_what_epsilon_means(tmp_path: Path) -> None:
    text, _ = made.read([made.make_run(tmp_path / "run")], tmp_path / "report.html")
    assert "What epsilon means: whatever the other clients see" in text
    assert "at most 2.72 times as probable" in text and "That is a strong promise" in text
    weak = made.make_run(tmp_path / "weak", events=(made.Gaussian(0.4),) * 20)
    text, _ = made.read([weak], tmp_path / "weak.html")
    assert "At this size the promise is next to nothing" in text
    assert "What the words mean" in text


def test_entries_of_one_method_are_kept_apart(tmp_path: Path) -> None:
    """Two entries of a comparison may be of one method: their runs are never averaged together."""
    names = {}
    for label, value in (("weak pull", 0.5), ("strong pull", 0.3)):
        for seed in range(5):
            run = made.make_run(tmp_path / f"{label}-{seed}", method="pmtl", value=value)
            names[run] = label
    found = {one.label: one.mean("value") for one in group(read_finished(list(names), names))}
    assert found == pytest.approx({"weak pull": 0.5, "strong pull": 0.3})


def test_other_settings_are_another_group(tmp_path: Path) -> None:
    runs = []
    for lam, value in ((0.1, 0.5), (3.0, 0.3)):
        for seed in range(5):
            run = made.make_run(tmp_path / f"{lam}-{seed}", method="pmtl", value=value)
            plan = f'simulation_seed = {seed}\n[method]\nkind = "pmtl"\nlam = {lam}\n'
            (run / "plan.toml").write_text(plan)
            runs.append(run)
    found = group(read_finished(runs))
    assert [one.label for one in found] == ["pmtl at epsilon 1 (1)", "pmtl at epsilon 1 (2)"]
    assert [one.mean("value") for one in found] == pytest.approx([0.5, 0.3])
