"""Scores on held-out rows, per client. Not private: for the report, returned to nobody else.

A score is a ratio of sums over clients (errors over deviations, or correct rows over rows); its
standard error is over clients, by linearising the ratio. Binary tasks also have the mean over
clients of each client's own AUC. `noise_to_signal` looks at posts in place of models.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset
from coterie.engines.simulate import Outcome
from coterie.models import Model, row_losses
from coterie.privacy.entropy import Entropy, SeededEntropy, open_entropy
from coterie.privacy.mechanisms import Mechanism
from coterie.tree import Tree, size

Models = Callable[[NDArray[np.int64]], Tree]

_DRAWN = 1 << 16  # numbers drawn, at least, to estimate the size of a mechanism's noise


@dataclass(frozen=True)
class Auc:
    """The mean over clients of the area under each client's own ROC curve.

    Attributes:
        value: The mean over clients that have one; NaN if none has.
        standard_error: Of that mean, over clients.
        clients: Each client's own: the share of pairs of a row of class 1 and a row of class 0 in
            which the first has the larger output, ties counting half; NaN where undefined.
        left_out: Clients without test rows of both classes, for whom it is undefined.
    """

    value: float
    standard_error: float
    clients: NDArray[np.float64]
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
        auc: For binary tasks.
    """

    metric: str
    value: float
    standard_error: float
    clients: NDArray[np.float64]
    rows: NDArray[np.int64]
    auc: Auc | None = None

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
    errors, areas = np.zeros(len(data)), np.full(len(data), np.nan)
    for clients, outputs in _predictions(model, models, data, block):
        ids = clients.ids.numpy()
        errors[ids] = _errors(outputs, clients)
        if data.spec.task == "binary":
            areas[ids] = _areas(outputs, clients)
    rows = data.counts
    with np.errstate(invalid="ignore"):
        own = np.where(rows > 0, errors / np.maximum(rows, 1), np.nan)
    if data.spec.task == "regression":
        value, deviation = _ratio(errors, _deviations(data))
        return Score("nmse", value, deviation, own, rows)
    value, deviation = _ratio(rows - errors, rows.astype(np.float64))
    curve = _mean_area(areas) if data.spec.task == "binary" else None
    return Score("accuracy", value, deviation, own, rows, curve)


def auc(model: Model, models: Models, data: FederatedDataset, block: int = 1024) -> Auc:
    """Give the mean over clients of their own AUC on their own rows of `data`.

    Exact, by ranks; an output that is not a number counts as ranked wrongly.

    Raises:
        ValueError: If the task is not binary.
    """
    if data.spec.task != "binary":
        raise ValueError(
            f"{data.title} is a {data.spec.task} task: an AUC is of two classes; use evaluate()"
        )
    areas = np.full(len(data), np.nan)
    for clients, outputs in _predictions(model, models, data, block):
        areas[clients.ids.numpy()] = _areas(outputs, clients)
    return _mean_area(areas)


def noise_to_signal(outcome: Outcome) -> list[float | None]:
    """Give, for every post of a run, the norm of its noise over that of the sum without noise.

    In a simulation both are exact: the noise is drawn again from the seed. Otherwise they are
    estimated from the post and the expected square of the noise, a function of public things alone;
    None where the noise hides the signal so well that its estimated square is not positive.
    Infinity where there is noise and no signal, 0 where there is no noise.
    """
    seed, expected = outcome.plan.simulation_seed, dict[Mechanism, float]()
    ratios: list[float | None] = []
    for post in outcome.posts:
        mechanism = outcome.billboard.mechanism(post.index)
        if seed is not None:
            noise = _noise(mechanism, post.value, open_entropy(seed, "noise", post.index))
            signal = {name: leaf - noise[name] for name, leaf in post.value.items()}
            ratios.append(_norm_ratio(_square(noise), _square(signal)))
            continue
        if mechanism not in expected:
            expected[mechanism] = _expected_square(mechanism, post.value)
        left = _square(post.value) - expected[mechanism]
        hidden = expected[mechanism] > 0 and left <= 0
        ratios.append(None if hidden else _norm_ratio(expected[mechanism], left))
    return ratios


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


def _predictions(
    model: Model, models: Models, data: FederatedDataset, block: int
) -> Iterator[tuple[Clients, Tensor]]:
    for clients in data.blocks(np.flatnonzero(data.counts > 0), block):
        yield clients, _predict(model, models(clients.ids.numpy()), clients)


def _errors(outputs: Tensor, clients: Clients) -> NDArray[np.float64]:
    """Sum over rows of squared errors, or of wrong answers; NaN predictions count as wrong."""
    task = clients.spec.task
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


def _areas(outputs: Tensor, clients: Clients) -> NDArray[np.float64]:
    """Give each client's AUC, from the ranks of its rows of class 1 (Mann and Whitney 1947)."""
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


def _mean_area(areas: NDArray[np.float64]) -> Auc:
    known = areas[~np.isnan(areas)]
    value = float(known.mean()) if len(known) else math.nan
    error = float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Auc(value, error, areas, len(areas) - len(known))


def _noise(mechanism: Mechanism, like: Tree, entropy: Entropy) -> Tree:
    """Draw a mechanism's noise by perturbing zeros: every mechanism adds noise to a sum."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in like.items()}
    return mechanism.perturb(zeros, entropy)


def _expected_square(mechanism: Mechanism, like: Tree) -> float:
    """Estimate the expected squared norm of the noise from draws of its own, at a fixed seed."""
    draws = max(2, -(-_DRAWN // max(1, size(like))))
    entropy = SeededEntropy(0, "size of noise", 0)
    return sum(_square(_noise(mechanism, like, entropy)) for _ in range(draws)) / draws


def _square(tree: Tree) -> float:
    return sum(float(leaf.double().square().sum()) for leaf in tree.values())


def _norm_ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal > 0 else math.inf


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
