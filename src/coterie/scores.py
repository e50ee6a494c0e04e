"""Scores on held-out rows, per client. Not private: for the report, returned to nobody else.

A score is a ratio of sums over clients (errors over deviations, or correct rows over rows); its
standard error is over clients, by linearising the ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset
from coterie.models import Model, row_losses
from coterie.tree import Tree

Models = Callable[[NDArray[np.int64]], Tree]


@dataclass(frozen=True)
class Score:
    """A metric over all clients' test rows together, and each client's own.

    Attributes:
        metric: "nmse" (smaller is better: squared errors over squared deviations of the test
            targets from their mean) or "accuracy" (share of rows right; of labels for multilabel).
        value: Over all test rows together.
        standard_error: Over clients.
        clients: Each client's own error: mean squared error, or share of rows wrong; NaN for a
            client without test rows. Smaller is better for both metrics.
        rows: Test rows of each client.
    """

    metric: str
    value: float
    standard_error: float
    clients: NDArray[np.float64]
    rows: NDArray[np.int64]

    @property
    def smaller_is_better(self) -> bool:
        """Whether a small value is a good one."""
        return self.metric == "nmse"

    def share_better_than(self, other: "Score") -> float:
        """Give the share of clients with test rows whose own error is below that under `other`."""
        known = self.rows > 0
        if not known.any():
            return math.nan
        return float((self.clients[known] < other.clients[known]).mean())


def evaluate(model: Model, models: Models, data: FederatedDataset, block: int = 1024) -> Score:
    """Score every client's model on its own rows of `data`."""
    errors = np.zeros(len(data))
    for clients in data.blocks(np.flatnonzero(data.counts > 0), block):
        ids = clients.ids.numpy()
        params = models(ids)
        errors[ids] = _errors(model, params, clients)
    rows = data.counts
    with np.errstate(invalid="ignore"):
        own = np.where(rows > 0, errors / np.maximum(rows, 1), np.nan)
    if data.spec.task == "regression":
        value, deviation = _ratio(errors, _deviations(data))
        return Score("nmse", value, deviation, own, rows)
    value, deviation = _ratio(rows - errors, rows.astype(np.float64))
    return Score("accuracy", value, deviation, own, rows)


def mean_loss(
    model: Model, models: Models, data: FederatedDataset, ids: NDArray[np.int64]
) -> float:
    """Give the mean over some clients of their mean loss, for a progress bar. Not private."""
    total, count = 0.0, 0
    for clients in data.blocks(ids[data.counts[ids] > 0], 256):
        outputs = _predict(model, models(clients.ids.numpy()), clients)
        losses = row_losses(data.spec.task, outputs, clients.y) * clients.mask
        total += float((losses.sum(dim=1) / clients.mask.sum(dim=1)).sum())
        count += len(clients)
    return total / count if count else math.nan


def _predict(model: Model, params: Tree, clients: Clients) -> Tensor:
    with torch.no_grad():
        moved = {name: leaf.to(clients.device) for name, leaf in params.items()}
        return model.apply_stacked(moved, clients.x)


def _errors(model: Model, params: Tree, clients: Clients) -> NDArray[np.float64]:
    """Sum over rows of squared errors, or of wrong answers; NaN predictions count as wrong."""
    outputs, task = _predict(model, params, clients), clients.spec.task
    if task == "regression":
        wrong = (outputs.double() - clients.y.double()).square()
    elif task == "multiclass":
        wrong = (outputs.argmax(dim=-1) != clients.y).double()
    elif task == "binary":
        wrong = ((outputs > 0) != (clients.y > 0.5)).double()
    else:
        wrong = ((outputs > 0) != (clients.y > 0.5)).double().mean(dim=-1)
    masked = torch.where(clients.mask, wrong, torch.zeros_like(wrong))
    return masked.sum(dim=1).cpu().numpy()


def _deviations(data: FederatedDataset) -> NDArray[np.float64]:
    targets = data.targets.double().cpu().numpy()
    squares = (targets - targets.mean()) ** 2 if len(targets) else targets
    owner = np.repeat(np.arange(len(data)), data.counts)
    sums = np.bincount(owner, weights=squares, minlength=len(data))
    return np.asarray(sums, dtype=np.float64)


def _ratio(over: NDArray[np.float64], under: NDArray[np.float64]) -> tuple[float, float]:
    total = float(under.sum())
    if total <= 0:
        return math.nan, math.nan
    value = float(over.sum()) / total
    used = under > 0
    count = int(used.sum())
    if count < 2:
        return value, math.nan
    residuals = over[used] - value * under[used]
    return value, math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total
