"""Scores on held-out rows, per client. Not private: for the report, returned to nobody else.

A score is a ratio of sums over clients (errors over deviations, or correct rows over rows); its
standard error is over clients, by linearising the ratio. Beside it stand means over clients of what
is each client's own (Ponomarenko-Timofeev et al.): the AUC of binary tasks; balanced accuracy, the
mean over the classes of a client's rows of the share of them that is right (of two classes,
(true-positive rate + true-negative rate) / 2); R^2 = 1 - squared errors / squared deviations from
the client's own test mean; and how far confidence is from how often it is right, see
`calibration_error`. A mean hides who pays for it: see `spread`.
`noise_to_signal` looks at posts in place of models.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.calibration_error import BINS, Reliability, own_errors, reliability, tally
from coterie.data.federated import Clients, FederatedDataset, Task
from coterie.engine.simulate import Outcome
from coterie.models import Model
from coterie.predictions import (
    BLOCK,
    Models,
    labels_of,
    outputs_by_block,
    outputs_of,
    wrong_answers,
)
from coterie.privacy.entropy import SeededEntropy, open_entropy
from coterie.privacy.mechanisms import Mechanism
from coterie.spread import Spread, spread_of
from coterie.tree import Tree, size

Array = NDArray[np.float64]

TITLES = {"auc": "AUC", "balanced_accuracy": "balanced accuracy", "r2": "R\u00b2"}
"""What is each client's own, by its key in summaries and tables."""
_DRAWN = 1 << 16  # numbers drawn, at least, to estimate the size of a mechanism's noise


@dataclass(frozen=True)
class PerClient:
    """The mean over clients of a metric that each of them has alone.

    Attributes:
        value: The mean over clients that have one; NaN if none has.
        standard_error: Of that mean, over clients.
        clients: Each client's own; NaN where undefined.
        left_out: Clients for whom it is undefined.
    """

    value: float
    standard_error: float
    clients: Array
    left_out: int


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
        auc: Binary tasks: the area under each client's own ROC curve, the share of pairs of a row
            of class 1 and a row of class 0 in which the first has the larger output, ties counting
            half. Undefined without test rows of both classes.
        balanced: Binary and multiclass tasks: each client's balanced accuracy, over the classes of
            its test rows. Undefined without test rows of two classes.
        r2: Regression: each client's R^2 against its own mean; minus infinity where an output is
            not a number. Undefined without test targets that differ.
        loss: The mean over clients with test rows of their mean loss on them.
        reliability: Classes: all answers by their confidence, for the calibration error.
        calibration: Classes: each client's own calibration error. Undefined for few test rows.
    """

    metric: str
    value: float
    standard_error: float
    clients: Array
    rows: NDArray[np.int64]
    auc: PerClient | None = None
    balanced: PerClient | None = None
    r2: PerClient | None = None
    loss: float = math.nan
    reliability: Reliability | None = None
    calibration: PerClient | None = None

    @property
    def spread(self) -> Spread:
        """How clients fare, one by one."""
        return spread_of(self.metric, self.clients, self.rows)

    @property
    def per_client(self) -> dict[str, PerClient | None]:
        """What is each client's own, by its key in summaries and tables."""
        return {"auc": self.auc, "balanced_accuracy": self.balanced, "r2": self.r2}

    @property
    def smaller_is_better(self) -> bool:
        """Whether a small value is a good one."""
        return self.metric == "nmse"

    def share_better_than(self, other: "Score") -> float:
        """Return the share of clients with test rows whose own error is below that under `other`."""
        known = self.rows > 0
        if not known.any():
            return math.nan
        return float((self.clients[known] < other.clients[known]).mean())


def evaluate(model: Model, models: Models, data: FederatedDataset, block: int = BLOCK) -> Score:
    """Score every client's model on its own rows of `data`."""
    task, rows = data.spec.task, data.counts
    errors, losses = np.zeros(len(data)), np.full(len(data), np.nan)
    own = {name: np.full(len(data), np.nan) for name in _MEASURES[task]}
    tallies = np.zeros((len(data), 3, BINS))
    for clients, outputs in outputs_by_block(model, models, data, block):
        ids = clients.ids.numpy()
        errors[ids] = _errors(outputs, clients)
        losses[ids] = _losses(model, outputs, clients)
        for name, measure in _MEASURES[task].items():
            own[name][ids] = measure(outputs, clients)
        if task != "regression":
            tallies[ids] = tally(outputs, clients)
    means = {name: _mean(values) for name, values in own.items()}
    loss = float(losses[rows > 0].mean()) if (rows > 0).any() else math.nan
    with np.errstate(invalid="ignore"):
        shares = np.where(rows > 0, errors / np.maximum(rows, 1), np.nan)
    right = (rows - errors, rows.astype(np.float64))
    value, deviation = _ratio(*((errors, _deviations(data)) if task == "regression" else right))
    metric = "nmse" if task == "regression" else "accuracy"
    area, balanced, r2 = (means.get(name) for name in ("auc", "balanced", "r2"))
    found = Score(metric, value, deviation, shares, rows, area, balanced, r2, loss)
    if task == "regression":
        return found
    own_calibration = _mean(own_errors(tallies, rows))
    return replace(found, reliability=reliability(tallies), calibration=own_calibration)


def auc(model: Model, models: Models, data: FederatedDataset, block: int = BLOCK) -> PerClient:
    """Return the mean over clients of their own AUC on their own rows of `data`.

    Exact, by ranks; an output that is not a number counts as ranked wrongly.

    Raises:
        ValueError: If the task is not binary.
    """
    if data.spec.task != "binary":
        raise ValueError(
            f"{data.title} is a {data.spec.task} task: an AUC is of two classes; use evaluate()"
        )
    areas = np.full(len(data), np.nan)
    for clients, outputs in outputs_by_block(model, models, data, block):
        areas[clients.ids.numpy()] = _areas(outputs, clients)
    return _mean(areas)


def noise_to_signal(outcome: Outcome) -> list[float | None]:
    """Give, for every post of a run, the norm of its noise over that of the sum without noise.

    In a simulation both are exact: the noise is drawn again from the seed. Otherwise, and where
    clients add the noise, they are estimated from the post and the expected square of the noise, a
    function of public things alone; of contributions made of blocks, whose units differ, the first
    block alone counts.
    None where the noise hides the signal so well that its estimated square is not positive.
    Infinity where there is noise and no signal, 0 where there is no noise.
    """
    seed, expected = outcome.plan.simulation_seed, dict[Mechanism, float]()
    ratios: list[float | None] = []
    for post in outcome.posts:
        mechanism = outcome.billboard.mechanism(post.index)
        if seed is not None and not mechanism.local:
            entropy = open_entropy(seed, "noise", post.index)
            noise = mechanism.reported(mechanism.typical_noise(post.value, entropy))
            signal = {name: post.value[name] - leaf for name, leaf in noise.items()}
            ratios.append(_norm_ratio(_square(noise), _square(signal)))
            continue
        if mechanism not in expected:
            expected[mechanism] = _expected_square(mechanism, post.value)
        left = _square(mechanism.reported(post.value)) - expected[mechanism]
        hidden = expected[mechanism] > 0 and left <= 0
        ratios.append(None if hidden else _norm_ratio(expected[mechanism], left))
    return ratios


def mean_loss(
    model: Model, models: Models, data: FederatedDataset, ids: NDArray[np.int64]
) -> float:
    """Return the mean over some clients of their mean loss, for whoever watches. Not private."""
    total, count = 0.0, 0
    for clients in data.blocks(ids[data.counts[ids] > 0], 256):
        outputs = outputs_of(model, models(clients.ids.numpy()), clients)
        total += float(_losses(model, outputs, clients).sum())
        count += len(clients)
    return total / count if count else math.nan


def _losses(model: Model, outputs: Tensor, clients: Clients) -> Array:
    """Return each client's mean loss over its rows."""
    losses = model.losses(clients.spec.task, outputs, clients.y)
    kept = torch.where(clients.mask, losses, torch.zeros_like(losses)).double()
    return (kept.sum(dim=1) / clients.mask.sum(dim=1)).cpu().numpy()


def _errors(outputs: Tensor, clients: Clients) -> Array:
    """Sum over rows of squared errors, or of wrong answers."""
    wrong = _wrong(outputs, clients)
    masked = torch.where(clients.mask, wrong, torch.zeros_like(wrong))
    return masked.sum(dim=1).cpu().numpy()


def _wrong(outputs: Tensor, clients: Clients) -> Tensor:
    """Return each row's squared error, or whether (multilabel: how far) it is wrong."""
    task = clients.spec.task
    if task == "regression":
        return (outputs.double() - clients.y.double()).square()
    wrong = wrong_answers(outputs, clients).double()
    return wrong.mean(dim=-1) if task == "multilabel" else wrong


def _areas(outputs: Tensor, clients: Clients) -> Array:
    """Return each client's AUC, from the ranks of its rows of class 1 (Mann and Whitney 1947)."""
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


def _balances(outputs: Tensor, clients: Clients) -> Array:
    """Return each client's mean over the classes of its rows of the share of them that is right."""
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


def _determinations(outputs: Tensor, clients: Clients) -> Array:
    """Return each client's R^2."""
    mask = clients.mask
    zero = torch.zeros((), dtype=torch.float64, device=clients.device)
    targets = clients.y.double()
    means = torch.where(mask, targets, zero).sum(dim=1) / mask.sum(dim=1)
    around = torch.where(mask, targets - means[:, None], zero)
    # By the targets themselves: deviations of equal ones from their mean may be off by rounding.
    vary = ((targets != targets[:, :1]) & mask).any(dim=1).cpu().numpy()
    deviations = around.square().sum(dim=1).cpu().numpy()
    errors = _errors(outputs, clients)
    errors = np.where(np.isnan(errors), np.inf, errors)
    return np.where(vary, 1 - errors / np.where(vary, deviations, 1.0), np.nan)


_MEASURES: Mapping[Task, Mapping[str, Callable[[Tensor, Clients], Array]]] = {
    "regression": {"r2": _determinations},
    "binary": {"auc": _areas, "balanced": _balances},
    "multiclass": {"balanced": _balances},
    "multilabel": {},
}


def _mean(own: Array) -> PerClient:
    known = own[~np.isnan(own)]
    value = float(known.mean()) if len(known) else math.nan
    error = math.nan
    if len(known) > 1 and math.isfinite(value):
        error = float(known.std(ddof=1)) / math.sqrt(len(known))
    return PerClient(value, error, own, len(own) - len(known))


def _expected_square(mechanism: Mechanism, like: Tree) -> float:
    """Estimate the expected squared norm of the noise from draws of its own, at a fixed seed."""
    draws = max(2, -(-_DRAWN // max(1, size(like))))
    entropy = SeededEntropy(0, "size of noise", 0)
    drawn = (mechanism.typical_noise(like, entropy) for _ in range(draws))
    return sum(_square(mechanism.reported(noise)) for noise in drawn) / draws


def _square(tree: Tree) -> float:
    return sum(float(leaf.double().square().sum()) for leaf in tree.values())


def _norm_ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal > 0 else math.inf


def _deviations(data: FederatedDataset) -> Array:
    targets = data.targets.double().cpu().numpy()
    squares = (targets - targets.mean()) ** 2 if len(targets) else targets
    owner = np.repeat(np.arange(len(data)), data.counts)
    sums = np.bincount(owner, weights=squares, minlength=len(data))
    return np.asarray(sums, dtype=np.float64)


def _ratio(over: Array, under: Array) -> tuple[float, float]:
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
