"""The metrics of a run: one registry that results, history, tables, report and trackers ask.

A new metric is one entry of `METRICS` with its function. Every metric is computed on held-out rows
and is not private.

A *headline* metric (nmse, accuracy) is a ratio of sums over the test rows of all clients; its
standard error is over clients, by linearising the ratio. A *per-client* metric is computed for each
client by itself; its value is the mean over clients. This module does not import torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.data.federated import Clients, FederatedDataset

Array = NDArray[np.float64]

BINS = 15
"""Bins of confidence of the calibration error."""
CALIBRATION_ROWS = 20
"""Test rows that a client needs for a calibration error of its own."""


@dataclass(frozen=True)
class Metric:
    """One entry of the registry.

    Attributes:
        name: Key in result.json, metrics.parquet, history.parquet and trackers.
        title: Name in tables, pages and documentation.
        higher_is_better: Direction.
        tasks: Tasks that it applies to.
        function: Return each client's own value from the outputs on its padded rows. None for a
            headline metric, which `evaluate` computes over all rows.
        needs: Test rows that a client needs to have a value.
        show_median_below: Show the median over clients in place of a mean below this.
        client_error: Of a headline metric: the name of each client's own error, smaller is better.
        client_score: Of a headline metric: what per-client tables show, "accuracy" or "error".
    """

    name: str
    title: str
    higher_is_better: bool
    tasks: tuple[str, ...]
    function: "Callable[[Tensor, Clients], Array] | None" = None
    needs: str = ""
    show_median_below: float = -math.inf
    client_error: str = "error"
    client_score: str = "error"

    @property
    def direction(self) -> str:
        """The direction in words."""
        return "larger is better" if self.higher_is_better else "smaller is better"


@dataclass(frozen=True)
class PerClient:
    """The mean over clients of a metric that each of them has by itself.

    `clients` has each client's own value, NaN where undefined; `left_out` is the number of these.
    """

    value: float
    standard_error: float
    clients: Array
    left_out: int

    @classmethod
    def of(cls, values: Array) -> "PerClient":
        """Return the mean over clients of their own values."""
        known = values[~np.isnan(values)]
        value = float(known.mean()) if len(known) else math.nan
        error = math.nan
        if len(known) > 1 and math.isfinite(value):
            error = float(known.std(ddof=1)) / math.sqrt(len(known))
        return cls(value, error, values, len(values) - len(known))

    @property
    def median(self) -> float:
        """The median over clients that have a value."""
        known = self.clients[~np.isnan(self.clients)]
        return float(np.median(known)) if len(known) else math.nan


@dataclass(frozen=True)
class Distribution:
    """The distribution over clients with test rows of their own accuracy or error.

    Attributes:
        of: "accuracy" (share of a client's rows, or labels, that is predicted correctly; larger is
            better) or "error" (its mean squared error; smaller is better).
        mean: Over clients, equally weighted.
        weighted_mean: Over clients, weighted by test rows.
        tail: The worst decile: the 10th percentile of accuracies, the 90th of errors.
        worst: The worst client: the least accuracy, the largest error.
        left_out: Number of clients without test rows.
    """

    of: str
    mean: float
    weighted_mean: float
    tail: float
    worst: float
    left_out: int


TAILS = {"accuracy": "p10", "error": "p90"}
_DISTRIBUTION = ("mean", "weighted_mean", "tail", "worst")


def distribution_of(metric: str, errors: Array, rows: Array | NDArray[np.int64]) -> Distribution:
    """Return the distribution over clients from each one's own error and test rows.

    An error that is not a number counts as infinite.
    """
    of, known = METRICS[metric].client_score, rows > 0
    left_out = int((~known).sum())
    if not known.any():
        return Distribution(of, math.nan, math.nan, math.nan, math.nan, left_out)
    bad = np.where(np.isnan(errors[known]), np.inf, errors[known])
    found = (bad.mean(), np.average(bad, weights=rows[known]), _quantile(bad, 0.9), bad.max())
    mean, weighted, tail, worst = (float(x) if of == "error" else 1 - float(x) for x in found)
    return Distribution(of, mean, weighted, tail, worst, left_out)


def _quantile(values: Array, level: float) -> float:
    """Interpolate linearly between the two nearest values; infinities are allowed."""
    ordered, place = np.sort(values), level * (len(values) - 1)
    low, high = float(ordered[math.floor(place)]), float(ordered[math.ceil(place)])
    return low if low == high else low + (place - math.floor(place)) * (high - low)


@dataclass(frozen=True)
class Reliability:
    """Predictions by bin of confidence: their number, summed confidence, and correct ones."""

    answers: Array
    confidence: Array
    right: Array

    @property
    def error(self) -> float:
        """The expected calibration error; NaN without any prediction."""
        return float(
            calibration_errors(np.stack([self.answers, self.confidence, self.right])[None])[0]
        )

    def to_json(self) -> dict[str, list[Any]]:
        """Return counts, mean confidence and accuracy per bin; null where a bin is empty."""
        found: dict[str, list[Any]] = {"answers": [int(count) for count in self.answers]}
        for name, sums in (("confidence", self.confidence), ("right", self.right)):
            found[name] = [
                float(total / count) if count else None
                for total, count in zip(sums, self.answers, strict=True)
            ]
        return found


def calibration_errors(counts: Array) -> Array:
    """Return the expected calibration error of each row of counts (n, 3, bins).

    The three are the number of predictions, the sum of their confidences and the number of correct
    ones per bin. Naeini, Cooper and Hauskrecht 2015; Guo, Pleiss, Sun and Weinberger 2017.
    """
    total = counts[:, 0].sum(axis=1)
    gaps = np.abs(counts[:, 2] - counts[:, 1]).sum(axis=1)
    return np.where(total > 0, gaps / np.maximum(total, 1), math.nan)


@dataclass(frozen=True, repr=False)
class Score:
    """A headline metric over the test rows of all clients, and the metrics of each client.

    Attributes:
        metric: Name of the headline metric in `METRICS`.
        value: Over all test rows.
        standard_error: Over clients.
        clients: Each client's own error: mean squared error, or error rate; NaN for a client
            without test rows. Smaller is better.
        rows: Test rows of each client.
        own: Per-client metrics of the task, by name.
        loss: The mean over clients with test rows of their mean loss.
        reliability: Classification: predictions of all clients by confidence.
        calibration: Classification: each client's own calibration error, with at least
            `CALIBRATION_ROWS` test rows.
    """

    metric: str
    value: float
    standard_error: float
    clients: Array
    rows: NDArray[np.int64]
    own: Mapping[str, PerClient] = field(default_factory=dict)
    loss: float = math.nan
    reliability: Reliability | None = None
    calibration: PerClient | None = None

    def __repr__(self) -> str:
        scored = int((self.rows > 0).sum())
        return (
            f"<Score: {self.metric} {self.value:.4g}, standard error {self.standard_error:.2g} "
            f"over {scored:,} clients>"
        )

    @property
    def distribution(self) -> Distribution:
        """The distribution over clients of their own accuracy or error."""
        return distribution_of(self.metric, self.clients, self.rows)

    @property
    def higher_is_better(self) -> bool:
        """Whether a large value is a good one."""
        return METRICS[self.metric].higher_is_better

    def share_better_than(self, other: "Score") -> float:
        """Return the share of clients with test rows whose own error is below that of `other`."""
        known = self.rows > 0
        if not known.any():
            return math.nan
        return float((self.clients[known] < other.clients[known]).mean())


# --- the functions of per-client metrics


def _wrong(outputs: "Tensor", clients: "Clients") -> "Tensor":
    """Return each row's squared error, or whether it is wrong (multilabel: the share of labels)."""
    from coterie.evaluation.predict import wrong_predictions

    task = clients.spec.task
    if task == "regression":
        return (outputs.double() - clients.y.double()).square()
    wrong = wrong_predictions(outputs, clients).double()
    return wrong.mean(dim=-1) if task == "multilabel" else wrong


def summed_errors(outputs: "Tensor", clients: "Clients") -> Array:
    """Return each client's sum over rows of squared errors, or of wrong predictions."""
    import torch

    wrong = _wrong(outputs, clients)
    masked = torch.where(clients.mask, wrong, torch.zeros_like(wrong))
    return masked.sum(dim=1).cpu().numpy()


def _auc(outputs: "Tensor", clients: "Clients") -> Array:
    """Return each client's AUC, from the ranks of its rows of class 1 (Mann and Whitney 1947).

    An output that is not a number is ranked wrongly.
    """
    mask = clients.mask.cpu().numpy()
    owner = np.nonzero(mask)[0]  # ascending: rows of a client lie together
    positive = clients.y.cpu().numpy()[mask] > 0.5
    scores = outputs.double().cpu().numpy()[mask]
    # Not a number: last where it should be first, and first where it should be last.
    scores = np.where(np.isnan(scores), np.where(positive, -np.inf, np.inf), scores)
    order = np.lexsort((scores, owner))
    scores, positive = scores[order], positive[order]
    first = np.flatnonzero(np.r_[True, (scores[1:] != scores[:-1]) | (owner[1:] != owner[:-1])])
    last = np.r_[first[1:], len(scores)]
    ranks = np.repeat((first + last + 1) / 2, last - first)  # ties share the mean of their ranks
    ranks -= np.searchsorted(owner, owner)  # from 1 inside each client
    ones = np.bincount(owner[positive], minlength=len(clients))
    pairs = ones * (clients.counts.numpy() - ones)
    won = np.bincount(owner[positive], ranks[positive], len(clients)) - ones * (ones + 1) / 2
    return np.where(pairs > 0, won / np.maximum(pairs, 1), np.nan)


def _balanced_accuracy(outputs: "Tensor", clients: "Clients") -> Array:
    """Return each client's mean recall over the classes of its rows."""
    from coterie.evaluation.predict import labels_of

    mask = clients.mask.cpu().numpy()
    classes, count = max(2, clients.spec.outputs), len(clients)
    labels = labels_of(clients).cpu().numpy()[mask]
    right = 1 - _wrong(outputs, clients).cpu().numpy()[mask]
    cells = np.nonzero(mask)[0] * classes + labels
    rows = np.bincount(cells, minlength=count * classes).reshape(count, classes)
    hits = np.bincount(cells, right, count * classes).reshape(count, classes)
    present = (rows > 0).sum(axis=1)
    shares = (hits / np.maximum(rows, 1)).sum(axis=1) / np.maximum(present, 1)
    return np.where(present > 1, shares, np.nan)


def _r2(outputs: "Tensor", clients: "Clients") -> Array:
    """Return each client's R^2 against its own test mean; -inf for an output that is NaN."""
    import torch

    mask = clients.mask
    zero = torch.zeros((), dtype=torch.float64, device=clients.device)
    targets = clients.y.double()
    means = torch.where(mask, targets, zero).sum(dim=1) / mask.sum(dim=1)
    around = torch.where(mask, targets - means[:, None], zero)
    # Compare the targets themselves: deviations of equal ones may be off by rounding.
    vary = ((targets != targets[:, :1]) & mask).any(dim=1).cpu().numpy()
    deviations = around.square().sum(dim=1).cpu().numpy()
    errors = summed_errors(outputs, clients)
    errors = np.where(np.isnan(errors), np.inf, errors)
    return np.where(vary, 1 - errors / np.where(vary, deviations, 1.0), np.nan)


_CLASSES = ("binary", "multiclass")
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("nmse", "NMSE", False, ("regression",), client_error="mean squared error"),
        Metric(
            "accuracy", "accuracy", True, (*_CLASSES, "multilabel"),
            client_error="error rate", client_score="accuracy",
        ),
        Metric("auc", "AUC", True, ("binary",), _auc, "test rows of both classes"),
        Metric(
            "balanced_accuracy", "balanced accuracy", True, _CLASSES, _balanced_accuracy,
            "test rows of two classes",
        ),
        Metric(
            "r2", "R\u00b2", True, ("regression",), _r2, "different test targets",
            # A few clients whose targets hardly differ dominate the mean, not the median.
            show_median_below=-1.0,
        ),
    )
}  # fmt: skip
"""All metrics by name: headline metrics first."""
PER_CLIENT = tuple(metric for metric in METRICS.values() if metric.function is not None)
"""The metrics that each client has by itself."""


def is_higher_better(name: str | None) -> bool:
    """Return whether larger values of a metric are better; of an unknown name, they are."""
    return name not in METRICS or METRICS[name].higher_is_better


def headline(task: str) -> Metric:
    """Return the headline metric of a task."""
    return next(m for m in METRICS.values() if m.function is None and task in m.tasks)


def ratio(over: Array, under: Array) -> tuple[float, float]:
    """Return a ratio of sums over clients and its standard error over clients."""
    total = float(under.sum())
    if total <= 0:
        return math.nan, math.nan
    value = float(over.sum()) / total
    used = under > 0
    count = int(used.sum())
    if count < 2:
        return value, math.nan
    with np.errstate(over="ignore", invalid="ignore"):  # losses of a diverged model are infinite
        squares = float(((over[used] - value * under[used]) ** 2).sum())
    return value, math.sqrt(count / (count - 1) * squares) / total


def average(values: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a metric over seeds, and its standard error over clients and seeds.

    With values v_1..v_S of S seeds and their standard errors over clients e_1..e_S,

        error^2 = (e_1^2 + ... + e_S^2) / S + var(v) / S.

    Every seed has the same clients, so their part does not shrink with seeds. What both parts
    contain is counted twice: the sum is conservative.
    """
    known = np.asarray(values, dtype=np.float64)
    if not len(known):
        return math.nan, math.nan
    mean = float(known.mean())
    squares = np.square(np.asarray(errors, dtype=np.float64))
    several = len(known) > 1 and bool(np.isfinite(known).all())
    over_seeds = float(known.var(ddof=1)) / len(known) if several else 0.0
    return mean, math.sqrt(float(squares.mean()) + over_seeds)


# --- metrics in files


def json_number(value: float) -> float | str | None:
    """Write a number as strict JSON: infinity is "inf" or "-inf", not-a-number is null."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def score_json(score: Score | None, local: Score | None) -> dict[str, Any]:
    """Return the scores of a run and of its local baseline as strict JSON; null where unknown."""
    return {
        "metric": None if score is None else score.metric,
        "value": None if score is None else json_number(score.value),
        "standard_error": None if score is None else json_number(score.standard_error),
        **_own_json(score),
        **distribution_json(score),
        **_calibration_json(score),
        "test_loss": None if score is None else json_number(score.loss),
        "clients_without_test_rows": None if score is None else score.distribution.left_out,
        "share_better_than_local": None
        if score is None or local is None
        else json_number(score.share_better_than(local)),
        "local_value": None if local is None else json_number(local.value),
        **distribution_json(local, "local_"),
        **_calibration_json(local, "local_"),
    }


def _own_json(score: Score | None) -> dict[str, Any]:
    """Return the means over clients of all per-client metrics; null where one does not apply."""
    found: dict[str, Any] = {}
    for metric in PER_CLIENT:
        own = None if score is None else score.own.get(metric.name)
        found[metric.name] = None if own is None else json_number(own.value)
        error = None if own is None else json_number(own.standard_error)
        found[f"{metric.name}_standard_error"] = error
        found[f"{metric.name}_left_out"] = None if own is None else own.left_out
        found[f"{metric.name}_median"] = None if own is None else json_number(own.median)
    return found


def distribution_json(score: Score | None, prefix: str = "") -> dict[str, Any]:
    """Return the per-client distribution; null where it does not apply, or nothing was scored.

    The tail is named by its percentile: p10 of accuracies, p90 of errors.
    """
    found: dict[str, Any] = {}
    over = None if score is None else score.distribution
    for of, tail in TAILS.items():
        for name in _DISTRIBUTION:
            value = getattr(over, name) if over is not None and over.of == of else math.nan
            found[f"{prefix}client_{of}_{tail if name == 'tail' else name}"] = json_number(value)
    return found


def _calibration_json(score: Score | None, prefix: str = "") -> dict[str, Any]:
    """Return calibration errors and the reliability diagram; null for regression."""
    together = None if score is None else score.reliability
    own = None if score is None else score.calibration
    return {
        f"{prefix}calibration_error": None if together is None else json_number(together.error),
        f"{prefix}client_calibration_error": None if own is None else json_number(own.value),
        f"{prefix}client_calibration_error_left_out": None if own is None else own.left_out,
        f"{prefix}reliability": None if together is None else together.to_json(),
    }


def write_metrics(
    path: Path,
    train: "FederatedDataset",
    score: Score,
    local: Score | None,
    errors: Mapping[str, Array] | None = None,
) -> None:
    """Write metrics.parquet: one row per client, with its rows, errors and own metrics.

    `errors` are further columns: errors under baselines and under the shared model, by name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "client": pa.array(list(train.names)),
        "train_rows": pa.array(train.counts),
        "test_rows": pa.array(score.rows),
        "error": pa.array(score.clients),
        **{name: pa.array(own.clients) for name, own in score.own.items()},
    }
    if score.calibration is not None:
        columns["calibration_error"] = pa.array(score.calibration.clients)
    if local is not None:
        columns["error_alone"] = pa.array(local.clients)
        if local.calibration is not None:
            columns["calibration_error_alone"] = pa.array(local.calibration.clients)
    columns |= {name: pa.array(found) for name, found in (errors or {}).items()}
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_atomically(path, buffer.getvalue().to_pybytes())


def per_client_of(task: str) -> Iterable[Metric]:
    """Return the per-client metrics of a task."""
    return (metric for metric in PER_CLIENT if task in metric.tasks)
