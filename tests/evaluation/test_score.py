"""Scores against scikit-learn, and noise-to-signal ratios against the exact sums."""

import functools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, r2_score, roc_auc_score

from coterie.core.tree import Tree, size
from coterie.data.config import DataConfig
from coterie.data.federated import FederatedDataset
from coterie.data.load import from_arrays
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import Outcome, simulate
from coterie.evaluation.metrics import (
    BINS,
    CALIBRATION_ROWS,
    PER_CLIENT,
    PerClient,
    Reliability,
    Score,
    distribution_of,
    json_number,
)
from coterie.evaluation.score import evaluate, mean_loss, noise_to_signal
from coterie.methods.base import Notes
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.entropy import SystemEntropy, open_entropy
from coterie.privacy.mechanisms import Exact, GaussianSum
from coterie.privacy.sampling import Poisson
from coterie.report.page import write_report
from coterie.runs.run import execute
from coterie.runs.summary import summarise


def ragged(clients: int = 40, decimals: int | None = 1) -> tuple[FederatedDataset, Tree]:
    """Binary rows of 1 to 12 a client, with ties where rows are rounded; the true models."""
    made = synthetic(task="binary", clients=clients, rows=(1, 12), features=3, noise=2.0, seed=5)
    rows: Any = made.data.features
    if decimals is None:
        return made.data, made.truth
    data = replace(made.data, features=torch.round(rows, decimals=decimals) * 8)
    truth = {name: torch.round(leaf * 2) for name, leaf in made.truth.items()}
    return data, truth


def ones(ids: np.ndarray) -> Tree:
    return {"weight": torch.ones(len(ids), 1, 10), "bias": torch.zeros(len(ids), 1)}


def evaluated(data: FederatedDataset, models: Tree, **options: int) -> Score:
    return evaluate(
        Linear(), lambda ids: {n: leaf[ids] for n, leaf in models.items()}, data, **options
    )


def score(data: FederatedDataset, models: Tree, **options: int) -> PerClient:
    return evaluated(data, models, **options).own["auc"]


@pytest.mark.parametrize("decimals", [None, 1, 0])
def test_auc_agrees_with_the_oracle(decimals: int | None) -> None:
    data, models = ragged(decimals=decimals)
    found = score(data, models)
    tied = 0
    for client in range(len(data)):
        rows = data.clients(np.array([client]))
        outputs = Linear().apply_stacked(
            {name: leaf[[client]] for name, leaf in models.items()}, rows.x
        )[0]
        labels = rows.y[0].numpy()
        tied += len(outputs) - len(outputs.unique())
        if len(set(labels)) < 2:
            assert math.isnan(found.clients[client])
        else:
            assert found.clients[client] == pytest.approx(roc_auc_score(labels, outputs), abs=1e-12)
    assert (tied > 20) == (decimals == 0)
    known = found.clients[~np.isnan(found.clients)]
    assert found.left_out == len(data) - len(known) > 0
    assert found.value == pytest.approx(known.mean())
    assert found.standard_error == pytest.approx(known.std(ddof=1) / math.sqrt(len(known)))


def test_blocks_change_no_auc() -> None:
    data, models = ragged(decimals=0)
    whole, pieces = score(data, models), score(data, models, block=3)
    np.testing.assert_array_equal(whole.clients, pieces.clients)


def test_auc_by_hand() -> None:
    data = from_arrays(
        [[1.0], [2.0], [3.0], [4.0], [1.0], [1.0], [1.0], [2.0], [5.0], [1.0]],
        [0, 1, 0, 1, 0, 1, 1, 1, 1, 0],
        ["a"] * 4 + ["b"] * 2 + ["c"] * 2 + ["d"] * 2,
    )
    models = {
        "weight": torch.tensor([1.0, 1.0, 1.0, -1.0]).reshape(4, 1, 1),
        "bias": torch.ones(4, 1),
    }
    found = score(data, models)
    np.testing.assert_array_equal(found.clients, [0.75, 0.5, math.nan, 0.0])
    assert found.left_out == 1


@pytest.mark.parametrize("broken", [0, 1])
def test_outputs_that_are_no_numbers_are_ranked_wrongly(broken: int) -> None:
    data = from_arrays([[-1.0], [-2.0], [3.0], [4.0]], [0, 0, 1, 1], ["a"] * 4)
    rows: Any = data.features
    rows[broken * 2] = math.nan
    models = {"weight": torch.ones(1, 1, 1), "bias": torch.zeros(1, 1)}
    assert score(data, models).value == 0.5
    rows[:] = math.nan
    assert score(data, models).value == 0.0


def test_auc_without_any_pair_is_unknown() -> None:
    data = from_arrays([[1.0], [2.0]], [1, 0], ["a", "b"])
    models = {"weight": torch.ones(2, 1, 1), "bias": torch.zeros(2, 1)}
    found = score(data, models)
    assert math.isnan(found.value)
    assert math.isnan(found.standard_error)
    assert found.left_out == 2
    empty = score(data.where(np.zeros(2, dtype=bool)), models)
    assert empty.left_out == 2


def test_auc_is_for_binary_tasks() -> None:
    assert "auc" not in evaluate(Linear(), ones, synthetic(clients=4).data).own


# --- balanced accuracy and R^2, each client's own


def own_rows(data: FederatedDataset, models: Tree) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each client's targets and outputs, one client at a time."""
    found = []
    for client in range(len(data)):
        rows = data.clients(np.array([client]))
        params = {name: leaf[client] for name, leaf in models.items()}
        found.append((rows.y[0].numpy(), Linear().apply(params, rows.x[0]).numpy()))
    return found


def check_mean(found: PerClient | None, expected: list[float]) -> None:
    assert found is not None
    # Outputs are products in float32, whose last bits depend on the processor and on the shape.
    np.testing.assert_allclose(found.clients, expected, rtol=1e-5, atol=1e-6)
    known = np.array(expected)[~np.isnan(expected)]
    assert found.left_out == len(expected) - len(known) > 0
    assert found.value == pytest.approx(known.mean())
    assert found.standard_error == pytest.approx(known.std(ddof=1) / math.sqrt(len(known)))


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_balanced_accuracy_agrees_with_the_oracle(task: Any) -> None:
    made = synthetic(task=task, clients=60, rows=(1, 9), features=3, noise=2.0, seed=6)
    expected, unbalanced, right = list[float](), 0, 0.0
    for labels, outputs in own_rows(made.data, made.truth):
        chosen = outputs.argmax(axis=1) if task == "multiclass" else (outputs > 0) * 1
        right += accuracy_score(labels, chosen, normalize=False)
        if len(set(labels)) < 2:
            expected.append(math.nan)
            continue
        with warnings.catch_warnings():
            # Classes that are predicted and not there: they do not count, which is what is wanted.
            warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
            expected.append(balanced_accuracy_score(labels, chosen))
        unbalanced += expected[-1] != pytest.approx(accuracy_score(labels, chosen))
    assert unbalanced > 10, "else this could be mere accuracy"
    score = evaluated(made.data, made.truth)
    check_mean(score.own["balanced_accuracy"], expected)
    assert set(score.own) == {"balanced_accuracy"} | ({"auc"} if task == "binary" else set())
    assert score.metric == "accuracy"
    assert score.value == pytest.approx(right / made.data.counts.sum())
    pieces = evaluated(made.data, made.truth, block=7).own["balanced_accuracy"]
    assert pieces is not None
    np.testing.assert_array_equal(pieces.clients, expected)


def test_balanced_accuracy_of_two_classes_by_hand() -> None:
    """(true-positive rate + true-negative rate) / 2: 3/4 and 1/2 right."""
    data = from_arrays(
        [[1.0], [1.0], [1.0], [-1.0], [-1.0], [1.0], [1.0]],
        [1, 1, 1, 1, 0, 0, 0],
        ["a"] * 6 + ["b"],
    )
    models = {"weight": torch.ones(2, 1, 1), "bias": torch.zeros(2, 1)}
    found = evaluated(data, models).own["balanced_accuracy"]
    assert found is not None
    np.testing.assert_array_equal(found.clients, [0.625, math.nan])


def test_r2_agrees_with_the_oracle() -> None:
    made = synthetic(clients=60, rows=(1, 9), features=3, noise=1.0, seed=6)
    targets: Any = made.data.targets
    start, end = made.data.offsets[np.argmax(made.data.counts)], made.data.offsets[-1]
    targets[start : start + 9] = 0.1  # a client whose targets are all alike
    targets[end - 1] += 1e-3
    expected = [
        r2_score(labels.astype(np.float64), outputs.astype(np.float64))
        if len(set(labels)) > 1
        else math.nan
        for labels, outputs in own_rows(made.data, made.truth)
    ]
    assert np.nanmin(expected) < 0 < np.nanmax(expected)
    score = evaluated(made.data, made.truth)
    check_mean(score.own["r2"], expected)
    assert set(score.own) == {"r2"}
    pieces = evaluated(made.data, made.truth, block=7).own["r2"]
    assert pieces is not None
    np.testing.assert_allclose(pieces.clients, expected, rtol=1e-5, atol=1e-6)


def test_r2_is_about_a_clients_own_mean() -> None:
    """Two clients far apart, each told its own mean: R^2 is 0, though nmse is small."""
    data = from_arrays([[1.0]] * 4, [9.0, 11.0, -9.0, -11.0], ["a", "a", "b", "b"])
    models = {"weight": torch.zeros(2, 1, 1), "bias": torch.tensor([[10.0], [-10.0]])}
    score = evaluated(data, models)
    assert score.own["r2"].value == pytest.approx(0)
    assert score.value == pytest.approx(4 / 404)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_outputs_that_are_no_numbers_are_wrong_whatever_they_say(task: Any) -> None:
    made = synthetic(task=task, clients=20, rows=8, features=3, seed=1)
    broken = {name: torch.full_like(leaf, math.nan) for name, leaf in made.truth.items()}
    score = evaluated(made.data, broken)
    assert score.value == 0
    assert all(own.value == 0 for own in score.own.values())


def test_r2_of_outputs_that_are_no_numbers_is_not_left_out() -> None:
    made = synthetic(clients=5, rows=8, features=3, seed=1)
    made.truth["weight"][2] = math.nan
    found = evaluated(made.data, made.truth).own["r2"]
    assert found is not None
    assert found.clients[2] == found.value == -math.inf and found.left_out == 0
    assert math.isnan(found.standard_error)
    assert json_number(found.value) == "-inf"


def test_a_single_label_is_scored() -> None:
    made = synthetic(task="binary", clients=6, rows=5, features=2, noise=2.0)
    labels = replace(made.data.spec, task="multilabel")
    single = replace(made.data, spec=labels, targets=made.data.targets[:, None])
    expected = evaluated(made.data, made.truth)
    found = evaluated(single, made.truth)
    assert found.value == expected.value < 1
    np.testing.assert_array_equal(found.clients, expected.clients)


def test_nobody_has_any() -> None:
    data = from_arrays([[1.0], [2.0]], [1.0, 3.0], ["a", "b"])
    models = {"weight": torch.ones(2, 1, 1), "bias": torch.zeros(2, 1)}
    for rows in (data, data.where(np.zeros(2, dtype=bool))):
        found = evaluated(rows, models).own["r2"]
        assert found is not None and found.left_out == 2
        assert math.isnan(found.value) and math.isnan(found.standard_error)


# --- how clients fare, one by one


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
def test_the_spread_of_clients_agrees_with_the_oracle(task: Any) -> None:
    made = synthetic(task=task, clients=41, rows=(1, 9), features=3, noise=2.0, seed=6)
    data = made.data.where(np.arange(made.data.counts.sum()) >= made.data.offsets[3])
    assert data.counts[:3].tolist() == [0, 0, 0] and (data.counts[3:] > 0).all()
    own = []
    for labels, outputs in own_rows(data, made.truth)[3:]:
        if task == "regression":
            own.append(float(np.square(labels.astype(np.float64) - outputs).mean()))
        elif task == "multiclass":
            own.append(float((outputs.argmax(axis=1) == labels).mean()))
        else:
            own.append(float(((outputs > 0) == (labels > 0.5)).mean()))
    found = evaluated(data, made.truth)
    spread, bad = found.distribution, task == "regression"
    assert (spread.of, spread.left_out) == ("error" if bad else "accuracy", 3)
    assert spread.mean == pytest.approx(np.mean(own))
    assert spread.weighted_mean == pytest.approx(np.average(own, weights=data.counts[3:]))
    assert spread.tail == pytest.approx(np.percentile(own, 90 if bad else 10))
    assert spread.worst == pytest.approx(max(own) if bad else min(own))
    assert spread.mean != pytest.approx(spread.weighted_mean)
    if not bad:
        assert spread.weighted_mean == pytest.approx(found.value)


def test_an_error_that_is_no_number_is_the_worst() -> None:
    errors = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, math.nan])
    found = distribution_of("nmse", errors, np.ones(11))
    assert found.tail == 9.0 and found.worst == found.mean == math.inf
    assert distribution_of("nmse", errors[:-1], np.ones(10)).tail == pytest.approx(8.1)
    two = distribution_of("nmse", np.array([1.0, math.nan]), np.ones(2))
    assert two.tail == math.inf, "no way to go to infinity but the whole"
    same = distribution_of("nmse", np.full(4, math.nan), np.ones(4))
    assert same.tail == math.inf and json_number(same.tail) == "inf"
    nobody = distribution_of("accuracy", np.full(2, math.nan), np.zeros(2))
    assert nobody.left_out == 2 and math.isnan(nobody.mean) and math.isnan(nobody.tail)


# --- calibration


def expected_error(sure: list[float], right: list[bool]) -> float:
    """The expected calibration error by a plain loop over bins."""
    total = 0.0
    for b in range(BINS):
        inside = [i for i, p in enumerate(sure) if b / BINS < p <= (b + 1) / BINS]
        if inside:
            often = sum(right[i] for i in inside) / len(inside)
            total += (
                len(inside) / len(sure) * abs(often - sum(sure[i] for i in inside) / len(inside))
            )
    return total


def answers(task: str, labels: np.ndarray, outputs: np.ndarray) -> tuple[list[float], list[bool]]:
    """Confidence and rightness of answers, one by one, in plain floats."""
    sure, right = list[float](), list[bool]()
    for label, output in zip(labels, outputs, strict=True):
        if task == "multiclass":
            shares = [math.exp(v) for v in output.astype(float) - float(output.max())]
            sure.append(max(shares) / math.fsum(shares))
            right.append(int(np.argmax(output)) == int(label))
            continue
        for one, value in zip(np.atleast_1d(label), np.atleast_1d(output), strict=True):
            probability = 1 / (1 + math.exp(-float(value)))
            sure.append(max(probability, 1 - probability))
            right.append((probability > 0.5) == (one > 0.5))
    return sure, right


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_calibration_error_agrees_with_a_plain_loop(task: Any) -> None:
    made = synthetic(task=task, clients=30, rows=(10, 30), features=3, noise=2.0, seed=6)
    sure, right, own = list[float](), list[bool](), list[float]()
    for labels, outputs in own_rows(made.data, made.truth):
        mine = answers(task, labels, outputs)
        own.append(expected_error(*mine) if len(labels) >= CALIBRATION_ROWS else math.nan)
        sure += mine[0]
        right += mine[1]
    found = evaluated(made.data, made.truth)
    assert found.reliability is not None
    assert found.reliability.error == pytest.approx(expected_error(sure, right), abs=1e-6)
    assert found.reliability.error > 0.01, "else this could be anything"
    assert found.reliability.answers.sum() == len(sure)
    assert found.calibration is not None
    np.testing.assert_allclose(found.calibration.clients, own, atol=1e-6)
    assert 0 < found.calibration.left_out == int(np.isnan(own).sum()) < 30
    assert found.calibration.value == pytest.approx(np.nanmean(own), abs=1e-6)
    pieces = evaluated(made.data, made.truth, block=7)
    assert pieces.reliability is not None
    np.testing.assert_allclose(pieces.reliability.right, found.reliability.right)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_calibration_error_that_is_known() -> None:
    """Said 0.9, right 7 of 10: off by 0.2. Said 0.6, right 3 of 5: off by 0. In all 2/15."""
    features = [[logit(0.9)]] * 10 + [[-logit(0.6)]] * 5
    labels = [1] * 7 + [0] * 3 + [0] * 3 + [1] * 2
    data = from_arrays(features, labels, ["a"] * 15)
    found = evaluated(data, {"weight": torch.ones(1, 1, 1), "bias": torch.zeros(1, 1)})
    assert found.reliability is not None and found.calibration is not None
    assert found.reliability.error == pytest.approx(10 / 15 * 0.2, abs=1e-6)
    told = found.reliability.to_json()
    assert (told["answers"][8], told["answers"][13], sum(told["answers"])) == (5, 10, 15)
    assert told["right"][13] == pytest.approx(0.7) and told["right"][0] is None
    assert told["confidence"][13] == pytest.approx(0.9, abs=1e-6)
    assert found.calibration.left_out == 1, "15 rows are too few for one of its own"


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_outputs_that_are_no_numbers_are_wrong_and_sure(task: Any) -> None:
    made = synthetic(task=task, clients=4, rows=25, features=3, seed=1)
    broken = {name: torch.full_like(leaf, math.nan) for name, leaf in made.truth.items()}
    found = evaluated(made.data, broken)
    assert found.reliability is not None and found.calibration is not None
    assert found.reliability.error == found.calibration.value == 1
    assert found.reliability.right.sum() == 0
    told = found.reliability.to_json()
    assert told["confidence"][-1] == 1 and told["right"][-1] == 0


def test_infinite_outputs_are_as_sure_as_can_be() -> None:
    made = synthetic(task="multiclass", clients=2, rows=4, features=3, seed=1)
    bias = torch.zeros_like(made.truth["bias"])
    bias[:, 1] = math.inf
    weight = torch.zeros_like(made.truth["weight"])
    found = evaluated(made.data, {**made.truth, "weight": weight, "bias": bias})
    assert found.reliability is not None
    assert found.reliability.confidence[-1] == 8
    assert found.reliability.right[-1] == int((made.data.targets == 1).sum())


def test_nothing_is_calibrated_without_answers_or_classes() -> None:
    assert evaluate(Linear(), ones, synthetic(clients=4).data).reliability is None
    empty = Reliability(*np.zeros((3, BINS)))
    assert math.isnan(empty.error) and empty.to_json()["right"] == [None] * BINS
    data = synthetic(task="binary", clients=2, rows=4).data
    none = evaluate(Linear(), ones, data.where(np.zeros(8, dtype=bool)))
    assert none.reliability is not None and math.isnan(none.reliability.error)
    assert math.isnan(none.loss) and math.isnan(none.distribution.mean)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_the_loss_is_a_mean_over_clients(task: Any) -> None:
    made = synthetic(task=task, clients=9, rows=(1, 9), features=3, noise=2.0, seed=6)
    losses = []
    for labels, outputs in own_rows(made.data, made.truth):
        sure: Any = outputs.astype(np.float64)
        if task == "regression":
            each = np.square(labels - sure) / 2
        elif task == "binary":
            each = np.logaddexp(0, np.where(labels > 0.5, -sure, sure))
        else:
            each = np.log(np.exp(sure).sum(axis=1)) - sure[np.arange(len(labels)), labels]
        losses.append(each.mean())
    found = evaluated(made.data, made.truth)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    everyone = np.arange(9)
    again = mean_loss(
        Linear(), lambda ids: {n: leaf[ids] for n, leaf in made.truth.items()}, made.data, everyone
    )
    assert again == pytest.approx(found.loss)


Kept = tuple[dict[str, Any], dict[str, Any], str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    """Return result, metrics and page of a run of a task; each task is run once."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not strict JSON")

    @functools.cache
    def run_once(task: str) -> Kept:
        folder = tmp_path_factory.mktemp(task) / "run"
        options = {"clients": 30, "rows": [4, 24], "features": 3, "task": task}
        plan = Plan(
            data=DataConfig(name="synthetic", options=options),
            method=PMTL(),
            privacy=Privacy(epsilon=5.0),
            rounds=2,
            simulation_seed=1,
        )
        execute(plan, folder=folder)
        result = json.loads((folder / "result.json").read_text(), parse_constant=refuse)
        table = pq.read_table(folder / "metrics.parquet").to_pydict()
        page = write_report([folder], folder / "page.html").read_text()
        return result, table, page.replace("\u00a0", " ")

    return run_once


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_a_run_shows_what_is_each_clients_own(kept: Callable[[str], Kept], task: str) -> None:
    found, table, page = kept(task)
    for metric in PER_CLIENT:
        key, title = metric.name, metric.title
        told = [found[key], found[f"{key}_standard_error"], found[f"{key}_left_out"]]
        if task not in metric.tasks:
            assert key not in table and told == [None] * 3 and f"test {title}" not in page
            continue
        known = np.array(table[key], dtype=float)
        known = known[~np.isnan(known)]
        error = known.std(ddof=1) / math.sqrt(len(known))
        assert told == pytest.approx([known.mean(), error, 30 - len(known)])
        assert len(known) < 30
        assert f"test {title}" in page and f"{told[0]:.3g} \u00b1 {told[1]:.2g}" in page
        said = f"{title[0].upper()}{title[1:]} is not defined for {told[2]} clients"
        assert f"{said} without {metric.needs}" in page


def test_a_run_says_how_its_clients_fare(kept: Callable[[str], Kept]) -> None:
    found, table, page = kept("multiclass")
    rows = np.array(table["test_rows"])
    assert found["clients_without_test_rows"] == int((rows == 0).sum())
    for prefix, column in (("", "error"), ("local_", "error_alone")):
        own = 1 - np.array(table[column], dtype=float)[rows > 0]
        told = {key: found[f"{prefix}client_accuracy_{key}"] for key in ("mean", "p10", "worst")}
        expected = {"mean": own.mean(), "p10": np.percentile(own, 10), "worst": own.min()}
        assert told == pytest.approx(expected)
        assert found[f"{prefix}client_error_p90"] is None
        assert 0 <= found[f"{prefix}calibration_error"] <= 1
        assert sum(found[f"{prefix}reliability"]["answers"]) == rows.sum()
    assert found["client_accuracy_weighted_mean"] == pytest.approx(found["value"])
    assert found["client_calibration_error_left_out"] == 30, "nobody has 20 test rows"
    assert found["client_calibration_error"] is None
    assert np.isnan(np.array(table["calibration_error"], dtype=float)).all()
    assert found["test_loss"] > 0 and found["newcomers"] is None
    assert f"{found['client_accuracy_p10']:.3g} ({found['local_client_accuracy_p10']:.3g})" in page


def test_errors_of_a_regression_have_a_bad_side_of_their_own(kept: Callable[[str], Kept]) -> None:
    found, table, _ = kept("regression")
    own = np.array(table["error"], dtype=float)[np.array(table["test_rows"]) > 0]
    assert found["client_error_p90"] == pytest.approx(np.percentile(own, 90))
    assert found["client_error_worst"] == pytest.approx(own.max())
    assert found["client_accuracy_p10"] is found["calibration_error"] is None
    assert found["reliability"] is None and "calibration_error" not in table


# --- the summary


def told(outcome: Outcome, **more: Any) -> dict[str, Any]:
    models = evaluate(outcome.plan.method.model, outcome.rows, synthetic(clients=25, seed=2).data)
    return summarise(outcome, models, None, data="rows", tuned="no", seconds=1.0, **more)


def test_rounds_are_the_posts_that_are_out() -> None:
    outcome = run(epsilon=math.inf, features=10, rounds=3)
    longer = replace(outcome.plan, rounds=8)
    cut = replace(outcome, plan=longer, guarantee=longer.guarantee(25))
    assert [told(done)["rounds"] for done in (outcome, cut)] == [3, 3]
    assert len(told(cut)["noise_to_signal"]) == 3


@pytest.mark.parametrize(
    ("privacy", "private"), [({"epsilon": math.inf}, False), ({"noise_multiplier": 1.0}, True)]
)
def test_caveats_and_notices_are_in_the_summary(
    monkeypatch: pytest.MonkeyPatch, privacy: dict[str, float], private: bool
) -> None:
    outcome = run(features=10, **privacy)
    assert (told(outcome)["caveats"], told(outcome)["notices"]) == ([], [])
    monkeypatch.setattr(
        PMTL, "notes", lambda self, *, private=True, **_: Notes(caveats=(f"private: {private}",))
    )
    found = told(outcome, notices=("3 rows are zeros",))
    assert found["caveats"] == [f"private: {private}"]
    assert found["notices"] == ["3 rows are zeros"]


@pytest.mark.parametrize(
    ("zeroed", "said"),
    [
        (0, []),
        (1, ["1 contribution was not finite and counted as zero; the clients kept their models"]),
        (3, ["3 contributions were not finite and counted as zero; the clients kept their models"]),
    ],
)
def test_contributions_that_became_zero_are_told(zeroed: int, said: list[str]) -> None:
    outcome = replace(run(epsilon=math.inf, features=10), zeroed=zeroed)
    assert told(outcome)["notices"] == said


# --- noise and signal


def norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in tree.values()))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """The sums as the billboard hands them over, before any noise."""
    seen: list[Tree] = []
    perturb = GaussianSum.perturb

    def watch(self: GaussianSum, total: Tree, entropy: Any) -> Tree:
        seen.append({name: leaf.clone() for name, leaf in total.items()})
        return perturb(self, total, entropy)

    monkeypatch.setattr(GaussianSum, "perturb", watch)
    return seen


def run(seed: int | None = 1, features: int = 60, rounds: int = 4, **privacy: Any) -> Outcome:
    data = synthetic(clients=25, rows=6, features=features, seed=2).data
    plan = Plan(
        method=PMTL(), privacy=Privacy(**privacy), rounds=rounds, simulation_seed=seed,
        sampler=Poisson(15.0),
    )  # fmt: skip
    return simulate(plan, data)


@pytest.mark.parametrize("budget", [(), (1.0, 2.0, 3.0, 4.0)])
def test_a_simulation_tells_noise_from_signal_exactly(
    sums: list[Tree], budget: tuple[float, ...]
) -> None:
    outcome = run(noise_multiplier=1.0, budget=budget)
    posted = sums.copy()
    found = noise_to_signal(outcome)
    assert len(found) == len(posted) == 4
    for index, (ratio, total) in enumerate(zip(found, posted, strict=True)):
        value = outcome.posts[index].value
        mechanism = outcome.plan.mechanisms(25)[index]
        zeros = {name: torch.zeros_like(leaf) for name, leaf in value.items()}
        noise = mechanism.perturb(zeros, open_entropy(1, "noise", index))
        for name, leaf in value.items():
            assert torch.equal(leaf - noise[name], total[name])
        assert ratio == pytest.approx(norm(noise) / norm(total), rel=1e-12)
    if budget:
        values = [ratio or 0.0 for ratio in found]
        assert values[0] > 1.5 * values[-1], "noise shrinks as weights grow"


def test_without_a_seed_the_ratio_is_estimated() -> None:
    outcome = run(noise_multiplier=0.06, features=400)
    exact = noise_to_signal(outcome)
    blind = replace(outcome, plan=replace(outcome.plan, simulation_seed=None))
    guessed = noise_to_signal(blind)
    assert guessed == noise_to_signal(blind), "public, and the same for everybody"
    for known, guess in zip(exact, guessed, strict=True):
        assert known is not None
        assert 0.5 < known < 2
        assert guess == pytest.approx(known, rel=0.3)
        assert guess != known
    for post, guess in zip(outcome.posts, guessed, strict=True):
        noise = math.sqrt(size(post.value)) * 0.06 * outcome.plan.clip(25)
        expected = noise / math.sqrt(norm(post.value) ** 2 - noise**2)
        assert guess == pytest.approx(expected, rel=0.05)


def test_a_signal_that_cannot_be_told_is_none() -> None:
    outcome = run(noise_multiplier=1000.0, features=5, rounds=8)
    exact = noise_to_signal(outcome)
    guessed = noise_to_signal(replace(outcome, plan=replace(outcome.plan, simulation_seed=None)))
    for post, known, guess in zip(outcome.posts, exact, guessed, strict=True):
        noise = math.sqrt(size(post.value)) * 1000.0 * outcome.plan.clip(25)
        assert known is not None
        assert known > 50
        assert (guess is None) == (norm(post.value) < noise)
    assert None in guessed
    assert any(guess is not None for guess in guessed)


def test_a_real_run_has_ratios_too() -> None:
    found = noise_to_signal(run(seed=None, noise_multiplier=0.01))
    assert all(ratio is not None and 0 < ratio < 0.5 for ratio in found)


@pytest.mark.parametrize("seed", [None, 1])
def test_exact_posts_have_no_noise(seed: int | None) -> None:
    outcome = run(seed=seed, epsilon=math.inf)
    assert isinstance(outcome.billboard.mechanism(0), Exact)
    assert noise_to_signal(outcome) == [0.0] * 4


def test_pure_noise_has_no_signal() -> None:
    """A cohort that nobody turned up to."""
    data = synthetic(clients=2, rows=3, features=2, seed=0).data
    plan = Plan(
        method=PMTL(), privacy=Privacy(noise_multiplier=1.0), rounds=3, simulation_seed=0,
        sampler=Poisson(0.01),
    )  # fmt: skip
    assert noise_to_signal(simulate(plan, data)) == [math.inf] * 3


def test_system_entropy_is_not_asked_for_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(seed=None, noise_multiplier=0.1)

    def refuse(self: SystemEntropy, count: int) -> None:
        raise AssertionError("an estimate needs no secret randomness")

    monkeypatch.setattr(SystemEntropy, "words", refuse)
    assert len(noise_to_signal(outcome)) == 4
