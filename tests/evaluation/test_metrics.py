"""The registry: what asks it, and means over seeds."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.data.synthetic import synthetic
from coterie.evaluation import metrics
from coterie.evaluation.history import COLUMNS
from coterie.evaluation.metrics import METRICS, PER_CLIENT, average, headline, score_json
from coterie.evaluation.score import evaluate
from coterie.models import Linear

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_every_task_has_one_headline_metric(task):
    assert [m for m in METRICS.values() if m.function is None and task in m.tasks] == [
        headline(task)
    ]


def test_a_new_metric_is_one_entry(monkeypatch):
    """Scores and summaries ask the registry; tables: see tests/report/test_tables.py."""
    r2 = METRICS["r2"]
    new = replace(r2, name="again", title="R2 again")
    monkeypatch.setitem(METRICS, "again", new)
    monkeypatch.setattr(metrics, "PER_CLIENT", (*PER_CLIENT, new))
    made = synthetic(clients=6, features=2)
    found = evaluate(Linear(), lambda ids: {n: t[ids] for n, t in made.truth.items()}, made.data)
    assert found.own["again"].value == found.own["r2"].value
    kept = score_json(found, None)
    assert kept["again"] == kept["r2"] and kept["again_left_out"] == 0


def test_history_and_docs_have_every_metric():
    said = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    for metric in PER_CLIENT:
        assert metric.name in COLUMNS and f"`{metric.name}`" in said
    for name in METRICS:
        assert name in said


def test_the_registry_needs_no_torch():
    code = "import sys, coterie.report.page, coterie.tracking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mean_over_seeds_keeps_the_clients_error_whole():
    mean, error = average([1.0, 2.0, 3.0], [0.3, 0.4, 0.5])
    assert mean == 2
    assert error == pytest.approx(math.sqrt((0.09 + 0.16 + 0.25) / 3 + 1 / 3))
    assert average([1.0], [0.3]) == (1.0, 0.3)
    assert math.isnan(average([], [])[0])
