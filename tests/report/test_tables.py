"""The table builder, as a terminal shows it."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.runs import EVERYONE, NOISE, make_run

from coterie.cli import main
from coterie.evaluation.baselines import DESCRIPTIONS
from coterie.privacy.accounting import Gaussian, Guarantee
from coterie.report.tables import Entry, baselines_table, clients_table, terminal, to_rich

def told_of(name="local_star", t=-20.0, worse=0.09, **more):
    keys = {"value": 0.5, "standard_error": 0.01, "difference": (t or 0) / 1000}
    keys |= {"difference_standard_error": 0.001, "share_worse_than_local_star": None}
    return {
        "name": name,
        "label": DESCRIPTIONS[name],
        "t": t,
        "share_worse_off": worse,
        **keys,
        **more,
    }


def row_of(method="pmtl", epsilon=1.00123, **changes):
    beside = [told_of(name, t=-123.456, worse=0.987) for name in DESCRIPTIONS]
    row = {
        "data": "d", "clients": 1000, "method": method, "metric": "nmse", "value": 0.87654,
        "standard_error": 0.0123456, "share_better_than_local": 1.0, "local_value": 0.5,
        "rounds": 25, "epsilon": epsilon, "delta": 1e-5, "relation": "zero_out",
        "view": "other clients", "simulation": False, "references": beside,
        "references_missing": ["pooled could not be computed (ValueError: why)"],
    }  # fmt: skip
    return row | changes


def printed(what):
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(what)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    return lines, " ".join(" ".join(lines).split())


def test_a_table_of_references_for_one_run():
    lines, told = printed(results_table([row_of()]))
    (line,) = [line.split() for line in lines if line.strip().startswith("local* ")]
    assert line == [
        "local*",
        "0.5",
        "\u00b1",
        "0.01",
        "-0.1235",
        "\u00b1",
        "0.001",
        "-123.5",
        "99",
        "%",
    ]
    assert "stronger than any honest client has: tuned over all clients non-privately" in told
    assert "ValueError: why" in told and "not covered by epsilon" in told
    assert "99 % of clients would have done better alone (local)" in told


def test_a_mean_r2_that_few_clients_ruin_does_not_frighten():
    lines, told = printed(results_table([row_of(r2=-7393.4), row_of("b", r2=0.25), row_of("c")]))
    assert "7393" not in told and "0.25" in told
    assert any("pmtl" in line and "< -1" in line for line in lines)
    assert "a mean R² < -1 may be of few clients, whose targets hardly differ" in told
    told = printed(results_table([row_of(r2="-inf")]))[1]
    assert "-inf" not in told and "< -1" in told
    told = printed(results_table([row_of(r2=-0.99)]))[1]
    assert "-0.99" in told and "hardly differ" not in told


def test_references_of_several_runs_are_shown_once():
    rows = [row_of("finetune(dpfedmtl)", 0.5), row_of("finetune(dpfedmtl)", 8.0), row_of("pmtl")]
    silent = row_of("local", references=[told_of("local", t=0.0)], rounds=0)
    lines, told = printed(results_table([silent, *rows]))
    assert told.count("stronger than any honest client has") == 1
    assert told.count("The promise is an average") == 1
    cells = [line.split() for line in lines if "-123.5," in line]
    assert len(cells) == 3 and all(line.count("-123.5,") == 4 for line in cells)
    rows[0]["references"][0]["value"] = 0.7
    assert "(by method)" in printed(baselines_table(rows))[1]
    assert baselines_table([silent]) is None
    assert baselines_table([{"rounds": 3}]) is None, "a folder of an earlier version"


# --- the same in a terminal


@pytest.mark.parametrize("deltas", [(1e-5, 1e-5), (1e-5, 0.0)])
@pytest.mark.parametrize(
    "own",
    [
        {"auc": 0.87654, "auc_left_out": 123, "balanced_accuracy": 0.76543,
         "balanced_accuracy_left_out": 123},
        {"balanced_accuracy": 0.76543, "balanced_accuracy_left_out": 123},
        {"r2": -0.234561, "r2_left_out": 123},
    ],
    ids=["binary", "multiclass", "regression"],
)  # fmt: skip
def test_a_table_of_a_hundred_columns_breaks_no_cell(
    own: dict[str, float], deltas: tuple[float, ...]
) -> None:
    metric = "nmse" if "r2" in own else "accuracy"
    rows = [
        {
            "data": "d", "clients": 1000, "method": "mtlsvm", "metric": metric, "value": 0.87654,
            "standard_error": 0.0123456, "share_better_than_local": 1.0, "local_value": 0.5,
            "rounds": 1000, "epsilon": 1.00123, "delta": delta, "relation": "zero_out",
            "view": "other clients", "simulation": False, **own,
        }
        for delta in deltas
    ]  # fmt: skip
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(results_table(rows))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 100
    cells = [[cell.strip() for cell in li.split("\u2502")[1:-1]] for li in lines if "\u2502" in li]
    assert len(cells) == 2, "a cell takes two lines"
    expected = ["mtlsvm", "0.8765 \u00b1 0.01235", "100 %", "1.002", "1000"]
    expected += ["-0.2346" if "r2" in own else "0.7654"]
    assert [cell for cell in cells[0] if cell not in ("0.8765 (123)", "1e-05")] == expected
    assert ("0.8765 (123)" in cells[0]) == ("auc" in own)
    told = " ".join(" ".join(lines).split())
    assert ("delta 1e-05;" in told) == (deltas[0] == deltas[1])
    title = "R\u00b2" if "r2" in own else "balanced accuracy"
    assert f"{title} leaves out 123 clients" in told


@pytest.mark.parametrize("metric", ["nmse", "accuracy"])
def test_a_second_table_says_how_clients_fare(metric: str) -> None:
    of, tail = ("error", "p90") if metric == "nmse" else ("accuracy", "p10")
    row: dict[str, object] = {
        "method": "finetune(dpfedmtl)", "metric": metric, "clients_without_test_rows": 12,
        "epsilon": 1.00123,
        **{f"client_{of}_{key}": 0.81234 for key in ("mean", tail)},
        **{f"local_client_{of}_{key}": 0.71234 for key in ("mean", tail, "worst")},
        f"client_{of}_worst": "inf" if metric == "nmse" else 0.0123,
    }  # fmt: skip
    if metric == "accuracy":
        row |= {"calibration_error": 0.0456, "local_calibration_error": 0.0567}
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    old = {"method": "old", "metric": metric, "epsilon": "inf"}
    table = clients_table([row, old])
    assert table is not None
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 100
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    worst = "inf (0.712)" if metric == "nmse" else "0.0123 (0.712)"
    expected = ["finetune(dpfedmtl)", "1.002", "0.812 (0.712)", "0.812 (0.712)", worst]
    assert expected + (["0.0456 (0.0567)"] if metric == "accuracy" else []) in cells
    assert ["old", "inf", *["-"] * (3 + (metric == "accuracy"))] in cells
    told = " ".join(" ".join(lines).split())
    assert f" {tail[1:]}th " in told and "percentile" in told
    assert "12 clients without test rows" in told
    assert ("smaller" if metric == "nmse" else "larger") in told
    assert clients_table([old]) is None


def test_caveats_follow_the_guarantee_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caveat = "The mask is NOT differential privacy."
    run = make_run(tmp_path / "run", caveats=[caveat, "And more."])
    assert main(["run", "--resume", str(run)]) == 0
    out = capsys.readouterr().out
    guarantee = Guarantee((Gaussian(NOISE),) * 20, EVERYONE, "zero_out", 1e-5, 60)
    assert f"{guarantee.statement()}\npmtl: {caveat}\npmtl: And more.\n" in out
    assert "CAVEATS: see below" in out
    assert main(["run", "--resume", str(make_run(tmp_path / "plain"))]) == 0
    assert "CAVEATS" not in capsys.readouterr().out


# --- a terminal of 80 columns


def narrow(what):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_nothing_is_cut_at_80_columns():
    row = row_of("pfeb", r2=-43.9, r2_median=0.217, r2_left_out=6, share_better_than_local=0.46)
    told = narrow(results_table([row]))
    assert "\u2026" not in told and max(map(len, told.splitlines())) <= 80
    for word in ("pfeb", "46 %", "0.217", "(median)", "mixed model", "worse off"):
        assert word in told
    assert "46%" not in told and "43.9" not in told


def test_the_difference_names_its_unit():
    assert "squared" in narrow(baselines_table([row_of()]))
    told = narrow(baselines_table([row_of(metric="accuracy")]))
    assert "rows wrong" in " ".join(told.split()) and "squared" not in told


def test_ties_are_told_in_a_terminal():
    row = row_of(share_better_than_local=0.23)
    row["references"][0]["share_worse_off"] = 0.08
    told = narrow(results_table([row]))
    assert "23 %," in told and "worse 8 %" in told
    row["references"][0]["share_worse_off"] = 0.77
    assert "worse 77 %" not in narrow(results_table([row]))
