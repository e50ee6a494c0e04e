"""The table builder, as a terminal shows it."""

import io
import math
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.report.runs import EVERYONE, NOISE, make_run

from coterie.cli.main import main
from coterie.evaluation.baselines import DESCRIPTIONS
from coterie.evaluation.metrics import METRICS, PER_CLIENT, Metric
from coterie.privacy.events import Gaussian
from coterie.privacy.guarantee import Guarantee
from coterie.report import tables
from coterie.report.tables import Entry, Number, baselines_table, clients_table, terminal


def baseline(name="local_star", t=-20.0, worse=0.09, **more):
    keys = {"value": 0.5, "standard_error": 0.01, "difference": (t or 0) / 1000}
    keys |= {"difference_standard_error": 0.001, "share_worse_than_local_star": None}
    keys |= {"share_worse_off": worse, "share_better_off": 1 - worse}
    return {"name": name, "t": t, **keys, **more}


def row_of(method="pmtl", epsilon=1.00123, **changes):
    row = {
        "data": "d", "clients": 1000, "method": method, "metric": "nmse", "value": 0.87654,
        "standard_error": 0.0123456, "share_better_than_local": 1.0, "local_value": 0.5,
        "rounds": 25, "epsilon": epsilon, "delta": 1e-5, "relation": "zero_out",
        "view": "other clients", "simulation": False,
        "references": [baseline(name, t=-123.456, worse=0.987) for name in DESCRIPTIONS],
        "references_missing": ["centralised could not be computed (ValueError: why)"],
    }  # fmt: skip
    return row | changes


def printed(rows, width=100):
    """Return the lines of a terminal, none of them cut, and their words."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    for shown in terminal(rows):
        console.print(shown)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in console.file.getvalue()
    return [line.split() for line in lines], " ".join(" ".join(lines).split())


def test_one_run_and_its_baselines():
    lines, text = printed([row_of()])
    assert ["local*", "0.5", "±", "0.01", "-0.123", "±", "0.001", "-123.5", "99", "%"] in lines
    assert ["pmtl", "0.8765", "±", "0.012", "0.5", "100", "%", "1.002", "25"] in lines
    assert DESCRIPTIONS["local_star"] in text and "ValueError: why" in text
    assert "joining helps on average, but more clients lose than gain: 99 % of 1,000" in text
    assert "not covered by epsilon" in text.lower()


def test_runs_on_several_data_sets_name_their_data():
    rows = [row_of(), row_of("mtlsvm", data="folder/rows.csv", metric="accuracy")]
    _, text = printed(rows)
    assert "rows.csv" in text and "folder/" not in text and "d: 1000 clients" not in text
    assert "accuracy" in text and "nmse" in text
    assert "data" not in tables.results_table([Entry.of_result(row_of())]).keys


def test_baselines_of_several_runs_are_shown_once():
    rows = [row_of("finetune(dpfedmtl)", 0.5), row_of("finetune(dpfedmtl)", 8.0), row_of("pmtl")]
    silent = row_of("local", references=[baseline("local", t=0.0)], rounds=0)
    lines, text = printed([silent, *rows])
    assert text.count(DESCRIPTIONS["local_star"]) == text.count("no single client is promised") == 1
    cells = [line for line in lines if "-123.5," in line]
    assert len(cells) == 3 and all(line.count("-123.5,") == 4 for line in cells)
    assert "finetune(dpfedmtl) at epsilon 8: Compared with local training, joining" in text
    rows[0]["references"][0]["value"] = 0.7
    entries = [Entry.of_result(row) for row in rows]
    assert any("by method" in title for title in baselines_table(entries).titles)
    assert baselines_table([Entry.of_result(silent)]) is None
    assert baselines_table([Entry.of_result(row_of(references=[]))]) is None


@pytest.mark.parametrize(  # a column for delta needs 100 columns
    ("width", "deltas"), [(80, (1e-5, 1e-5)), (100, (1e-5, 1e-5)), (100, (1e-5, 0.0))]
)
@pytest.mark.parametrize(
    "own",
    [
        {"auc": 0.87654, "auc_left_out": 123, "balanced_accuracy": 0.76543},
        {"balanced_accuracy": 0.76543, "balanced_accuracy_left_out": 123},
        {"r2": -0.234561, "r2_left_out": 123},
        {"r2": -43.9, "r2_left_out": 6, "r2_median": 0.217},
    ],
    ids=["binary", "multiclass", "regression", "median"],
)
def test_no_cell_is_cut(own, deltas, width):
    metric = "nmse" if "r2" in own else "accuracy"
    lines, text = printed([row_of(metric=metric, delta=delta, **own) for delta in deltas], width)
    for name, value in own.items():
        if name in METRICS and value > -1:
            assert any(f"{value:.3g}" in line for line in lines)
        if name.endswith("_left_out"):
            title = METRICS[name.removesuffix("_left_out")].title
            title = title[0].upper() + title[1:]
            assert f"{title} is not defined for {value} clients without" in text
    assert ("0.217 (median)" in text) == ("r2_median" in own) and "43.9" not in text
    assert ("delta 1e-05, relation" in text) == (deltas[0] == deltas[1])
    assert METRICS[metric].direction in text


def in_first_column(lines, label):
    """Return whether lines in a row begin with the parts of this label, and nothing else."""
    starts = [re.split(r"\s{2,}", line)[0].strip() for line in lines]
    wanted = "".join(label.split())
    for place in range(len(starts)):
        joined = ""
        for start in starts[place:]:
            joined += "".join(start.split())
            if joined == wanted:
                return True
            if not joined or not wanted.startswith(joined):
                break
    return False


LABELS = ["pfeb", "finetune(mpmtl, how=mean)", "a" * 70, "[bold]x[/bold]", "\u533b\u9662 1"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_names_never_collapse_and_no_value_is_lost(task, width):
    metrics = [one for one in PER_CLIENT if task in one.tasks]
    metric = "nmse" if task == "regression" else "accuracy"
    own = {one.name: 0.81 + 0.0123 * n for n, one in enumerate(metrics)}
    of, tail = ("error", "p90") if metric == "nmse" else ("accuracy", "p10")
    own |= {f"client_{of}_{key}": 0.71234 for key in ("mean", tail, "worst")}
    own |= {"calibration_error": 0.0456, "client_calibration_error": 0.0567}
    held = {"clients": 7, "metric": metric, "value": 0.4, "standard_error": 0.01,
            "local_value": 0.7, "share_better_than_local": 0.6}  # fmt: skip
    rows = [row_of(label, 1 + n, metric=metric, newcomers=held, **own)
            for n, label in enumerate(LABELS)]  # fmt: skip
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    for shown in terminal(rows):
        console.print(shown)
    printed = console.file.getvalue()
    lines = printed.splitlines()
    assert max(map(cell_len, lines)) <= width and "\u2026" not in printed
    assert all(in_first_column(lines, label) for label in LABELS)
    for cell in (*(f"{own[one.name]:.3g}" for one in metrics), "0.712", "0.0456", "60 %"):
        assert printed.count(cell) >= len(LABELS), cell
    # A part of a name that stands alone in its line is a name that is broken, and not collapsed.
    parts = {re.split(r"\s{2,}", line)[0] for line in lines}
    assert min(len(part) for part in parts if part and set(part) == {"a"}) >= 10


def test_ties_are_shown():
    row = row_of(share_better_than_local=0.23)
    row["references"][0]["share_worse_off"] = 0.08
    assert "23 %, 8 % worse" in printed([row], 80)[1]
    row["references"][0]["share_worse_off"] = 0.77
    assert "77 % worse" not in printed([row], 80)[1]
    same = row_of(share_better_than_local=0.0, value=0.5, local_value=0.5, references=[])
    assert "same as local" in printed([same])[1]


def test_the_difference_has_the_unit_of_a_clients_error():
    for metric, error in (("nmse", "mean squared error"), ("accuracy", "error rate")):
        text = " ".join(printed([row_of(metric=metric)])[1].split())
        assert f"({error} under the run - {error} under the baseline)" in text


@pytest.mark.parametrize("metric", ["nmse", "accuracy"])
def test_a_table_of_single_clients(metric):
    of, tail = ("error", "p90") if metric == "nmse" else ("accuracy", "p10")
    more = {
        "clients_without_test_rows": 12,
        **{f"client_{of}_{key}": 0.81234 for key in ("mean", tail)},
        **{f"local_client_{of}_{key}": 0.71234 for key in ("mean", tail, "worst")},
        f"client_{of}_worst": "inf" if metric == "nmse" else 0.0123,
    }
    if metric == "accuracy":
        more |= {"calibration_error": 0.0456, "local_calibration_error": 0.0567}
    row = row_of("finetune(dpfedmtl)", metric=metric, references=[], **more)
    bare = row_of("bare", "inf", metric=metric, references=[])
    lines, text = printed([row, bare])
    worst = "inf (0.712)" if metric == "nmse" else "0.0123 (0.712)"
    cells = f"finetune(dpfedmtl) 1.002 0.812 (0.712) 0.812 (0.712) {worst}"
    cells += " 0.0456 (0.0567)" if metric == "accuracy" else ""
    assert cells.split() in lines
    assert f"{tail[1:]}th" in text and "12 clients without test rows" in text
    assert clients_table([Entry.of_result(bare)]) is None
    shown = clients_table([Entry.of_result(row)], worst=False)
    assert shown is not None and "worst client" not in shown.titles


def test_notes_are_of_what_is_shown():
    alone = row_of(metric="accuracy", client_accuracy_mean=0.8, client_accuracy_worst=0.1,
                   clients_without_test_rows=1, balanced_accuracy=0.7,
                   balanced_accuracy_left_out=1, references=[])  # fmt: skip
    text = printed([alone])[1]
    assert "In brackets" not in text and "Clients have equal weight" in text
    assert "Left out: 1 client without test rows." in text
    assert "Balanced accuracy is not defined for 1 client without" in text


def test_held_out_clients_have_a_table():
    found = {"clients": 7, "metric": "nmse", "value": 0.4, "standard_error": 0.01,
             "local_value": 0.7, "share_better_than_local": 0.6,
             "client_error_p90": 0.9}  # fmt: skip
    lines, text = printed([row_of(newcomers=found)], 80)
    assert ["pmtl", "7", "0.4", "±", "0.01", "0.7", "60", "%", "0.9"] in lines
    assert "release nothing" in text


def test_a_new_metric_is_one_entry(monkeypatch):
    """Tables ask the registry: a new entry has a column, and nothing else names it."""
    f1 = Metric("f1", "F1", True, ("binary",), lambda outputs, clients: outputs, "class 1")
    monkeypatch.setattr(tables, "PER_CLIENT", (*PER_CLIENT, f1))
    lines, text = printed([row_of(metric="accuracy", f1=0.6543, f1_left_out=3, references=[])])
    assert any("0.654" in line for line in lines) and "F1" in text
    assert "F1 is not defined for 3 clients without class 1." in text


def test_a_number_without_a_value_is_a_dash():
    assert Number(math.nan).text() == "\u2013" and Number(1.0, math.nan).text() == "1"
    assert Number(0.123456, 0.00123).text() == "0.123 \u00b1 0.0012"


@pytest.mark.full
def test_caveats_follow_the_guarantee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caveat = "The mask is NOT differential privacy."
    run = make_run(tmp_path / "run", caveats=[caveat, "And more."])
    assert main(["run", "--resume", str(run)]) == 0
    out = capsys.readouterr().out
    guarantee = Guarantee((Gaussian(NOISE),) * 20, EVERYONE, "zero_out", 1e-5, 60)
    assert f"{guarantee.statement()}\npmtl: {caveat}\npmtl: And more.\n" in out
    assert "CAVEATS: see below" in out
    assert main(["run", "--resume", str(make_run(tmp_path / "plain"))]) == 0
    assert "CAVEATS" not in capsys.readouterr().out
