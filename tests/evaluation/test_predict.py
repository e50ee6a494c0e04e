"""Predictions: one array a client, in order, against a model applied to one client at a time."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score

import coterie as ct
from coterie.data.federated import FederatedDataset
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import Outcome, simulate
from coterie.evaluation.predict import decision_function, predict
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sgd import SGD

TASKS = ["regression", "binary", "multiclass", "multilabel"]


def trained(task: Any, method: Any = None) -> tuple[Outcome, FederatedDataset]:
    """A run, and ragged test rows in which clients 1 and 5 have none."""
    data = synthetic(task=task, clients=12, rows=(2, 9), features=3, seed=4).data
    method = method or PMTL(sgd=SGD(steps=5))
    plan = Plan(method=method, privacy=Privacy(epsilon=math.inf), rounds=1, simulation_seed=0)
    owner = np.repeat(np.arange(12), data.counts)
    return simulate(plan, data), data.where(~np.isin(owner, (1, 5)))


def one_by_one(outcome: Outcome, data: FederatedDataset) -> list[np.ndarray]:
    model, rows = outcome.plan.method.model, data.features
    assert isinstance(rows, torch.Tensor)
    return [
        model.apply(outcome.model(k), rows[data.offsets[k] : data.offsets[k + 1]]).numpy()
        for k in range(len(data))
    ]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", [None, Local(model=MLP(hidden=(4,)), sgd=SGD(epochs=2))])
def test_outputs_are_each_clients_own_in_order(task: str, method: Any) -> None:
    outcome, data = trained(task, method)
    found, expected = decision_function(outcome, data), one_by_one(outcome, data)
    assert [len(rows) for rows in found] == data.counts.tolist()
    assert len(set(data.counts.tolist())) > 3 and data.counts[1] == data.counts[5] == 0
    for rows, wanted in zip(found, expected, strict=True):
        assert rows.shape == wanted.shape
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_predictions_follow_from_outputs(task: str) -> None:
    outcome, data = trained(task)
    turn: Any = {
        "regression": lambda rows: rows,
        "binary": lambda rows: np.where(rows > 0, 1, 0),
        "multiclass": lambda rows: rows.argmax(axis=1),
        "multilabel": lambda rows: np.where(rows > 0, 1, 0),
    }[task]
    found = predict(outcome, data)
    for rows, outputs in zip(found, decision_function(outcome, data), strict=True):
        assert rows.dtype == (np.float32 if task == "regression" else np.int64)
        np.testing.assert_array_equal(rows, turn(outputs))
        assert rows.shape == turn(outputs).shape


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_scores_are_of_these_predictions(task: str) -> None:
    outcome, data = trained(task)
    told = np.concatenate(predict(outcome, data))
    expected = accuracy_score(data.targets.numpy(), told)
    found = evaluate(outcome.plan.method.model, outcome.rows, data).value
    assert found == pytest.approx(expected)
    assert len(set(told)) > 1


def test_a_single_label_keeps_its_axis() -> None:
    data = synthetic(task="binary", clients=3, rows=4, features=2).data
    labels = replace(data.spec, task="multilabel")
    data = replace(data, spec=labels, targets=data.targets[:, None])
    plan = Plan(method=Local(), privacy=Privacy(epsilon=math.inf), rounds=1, simulation_seed=0)
    found = predict(simulate(plan, data), data)
    assert [rows.shape for rows in found] == [(4, 1)] * 3


@pytest.mark.parametrize(("task", "shape"), [("binary", (0,)), ("multilabel", (0, 3))])
def test_nobody_has_rows(task: str, shape: tuple[int, ...]) -> None:
    outcome, data = trained(task)
    empty = data.where(np.zeros(len(data.targets), dtype=bool))
    assert {rows.shape for rows in decision_function(outcome, empty)} == {shape}
    assert {rows.dtype for rows in predict(outcome, empty)} == {np.dtype(np.int64)}


def test_rows_of_others_are_refused() -> None:
    outcome, data = trained("binary")
    other = synthetic(task="binary", clients=11, features=3).data
    with pytest.raises(ValueError, match=r"clients=11.*made for.*clients=12.*same clients"):
        predict(outcome, other)
    wrong = replace(data, spec=replace(data.spec, task="regression"))
    with pytest.raises(ValueError, match="of the same shape"):
        decision_function(outcome, wrong)


def test_they_are_public_names() -> None:
    assert ct.predict is predict and ct.decision_function is decision_function
    assert {"predict", "decision_function"} <= set(ct.__all__)
