"""Scores of every client's model on its held-out rows, and the noise in each release. Not private.

The metrics are those of `coterie.evaluation.metrics`. The confidence of a prediction, for the
calibration error, is the largest softmax of the outputs (multiclass) or the logistic of the
output's size (binary, and each label of a multilabel task). Models fitted by another loss than
cross-entropy are read in the same way, though their outputs are not log-odds.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, size, stack
from coterie.data.federated import Clients, FederatedDataset, Task
from coterie.engine.simulate import Outcome
from coterie.evaluation.metrics import (
    BINS,
    CALIBRATION_ROWS,
    METRICS,
    Array,
    PerClient,
    Reliability,
    Score,
    calibration_errors,
    headline,
    per_client_of,
    ratio,
    summed_errors,
)
from coterie.evaluation.predict import (
    BLOCK,
    Models,
    outputs_by_block,
    outputs_of,
    wrong_predictions,
)
from coterie.methods.base import Method, Shape, per_row_leaves, shared_leaves
from coterie.models import Model
from coterie.privacy.entropy import SeededEntropy, open_entropy
from coterie.privacy.mechanisms import Mechanism

_DRAWN = 1 << 16  # values drawn, at least, to estimate the size of a mechanism's noise


def evaluate(model: Model, models: Models, data: FederatedDataset, block: int = BLOCK) -> Score:
    """Return the score of every client's model on its own rows of `data`."""
    task, rows = data.spec.task, data.counts
    errors, losses = np.zeros(len(data)), np.full(len(data), np.nan)
    own = {metric.name: np.full(len(data), np.nan) for metric in per_client_of(task)}
    counts = np.zeros((len(data), 3, BINS))
    for clients, outputs in outputs_by_block(model, models, data, block):
        ids = clients.ids.numpy()
        errors[ids] = summed_errors(outputs, clients)
        losses[ids] = _losses(model, outputs, clients)
        for name, values in own.items():
            values[ids] = _own(name, outputs, clients)
        if task != "regression":
            counts[ids] = _count_by_confidence(outputs, clients)
    with np.errstate(invalid="ignore"):
        shares = np.where(rows > 0, errors / np.maximum(rows, 1), np.nan)
    right = (rows - errors, rows.astype(np.float64))
    value, deviation = ratio(*((errors, _deviations(data)) if task == "regression" else right))
    calibrated = task != "regression"
    calibration = np.where(rows >= CALIBRATION_ROWS, calibration_errors(counts), math.nan)
    return Score(
        headline(task).name,
        value,
        deviation,
        shares,
        rows,
        own={name: PerClient.of(values) for name, values in own.items()},
        loss=float(losses[rows > 0].mean()) if (rows > 0).any() else math.nan,
        reliability=Reliability(*counts.sum(axis=0)) if calibrated else None,
        calibration=PerClient.of(calibration) if calibrated else None,
    )


def _own(name: str, outputs: Tensor, clients: Clients) -> Array:
    function = METRICS[name].function
    assert function is not None
    return function(outputs, clients)


def confidence(task: Task, outputs: Tensor) -> Tensor:
    """Return the confidence of each prediction; 1 where the outputs are not numbers."""
    wide = outputs.double()
    # A softmax of infinite outputs is not a number either: these count as certain.
    sure = wide.softmax(dim=-1).amax(dim=-1) if task == "multiclass" else wide.abs().sigmoid()
    return torch.where(sure.isnan(), torch.ones_like(sure), sure)


def _count_by_confidence(outputs: Tensor, clients: Clients) -> Array:
    """Return per client and bin of confidence: predictions, summed confidence, correct ones."""
    mask = clients.mask
    right = ~wrong_predictions(outputs, clients)[mask]
    sure = confidence(clients.spec.task, outputs[mask])
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=sure.device)
    bins = torch.bucketize(sure, edges[1:-1])
    owner = mask.nonzero()[:, 0].reshape(-1, *[1] * (sure.dim() - 1))
    cells = (owner * BINS + bins).flatten().cpu().numpy()
    found = np.empty((len(clients), 3, BINS))
    for place, weights in enumerate((torch.ones_like(sure), sure, right.double())):
        sums = np.bincount(cells, weights.flatten().cpu().numpy(), len(clients) * BINS)
        found[:, place] = sums.reshape(-1, BINS)
    return found


def mean_loss(
    model: Model, models: Models, data: FederatedDataset, ids: NDArray[np.int64]
) -> float:
    """Return the mean over some clients of their mean loss."""
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


def noise_to_signal(outcome: Outcome) -> list[float | None]:
    """Return, for every release of a run, the norm of its noise over the norm of the exact sum.

    In a simulation both are exact: the noise is drawn again from the seed. Otherwise, and where
    clients add the noise, both are estimated from the release and the expected square of the
    noise, which is public. Of contributions made of blocks only the first block counts, since the
    units of blocks differ. The result is None where the estimated square of the signal is not
    positive, infinity where there is noise and no signal, and 0 where there is no noise.
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
            expected[mechanism] = _expected_square(outcome.plan.method.shape, mechanism, post.value)
        left = _square(mechanism.reported(post.value)) - expected[mechanism]
        hidden = expected[mechanism] > 0 and left <= 0
        ratios.append(None if hidden else _norm_ratio(expected[mechanism], left))
    return ratios


def _expected_square(shape: Shape, mechanism: Mechanism, like: Tree) -> float:
    """Return the expected squared norm of the noise; of second moments, estimated from draws."""
    if shape in (Shape.SUM, Shape.ROWS):  # independent numbers, each with its leaf's deviation
        totals = {name: tuple(leaf.shape) for name, leaf in like.items()}
        deviations = mechanism.standard_deviations(totals)
        shown = mechanism.reported(like).items()
        return sum(leaf.numel() * deviations[name] ** 2 for name, leaf in shown)
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


# --- errors of the shared model


def shared_errors(
    outcome: Outcome, train: FederatedDataset, test: FederatedDataset
) -> dict[str, Array]:
    """Return clients' own errors under the shared model, as a further column of the metrics.

    Empty where the method shares no complete model, or where every client uses that model.
    """
    method = outcome.plan.method
    if not _shares_model(method, train) or _is_everyones(outcome, train):
        return {}

    def models(ids: NDArray[np.int64]) -> Tree:
        return _stacked(outcome, train, ids)

    return {"error_shared": evaluate(method.model, models, test).clients}


def _shares_model(method: Method, train: FederatedDataset) -> bool:
    if method.shape is not Shape.SUM:
        return False
    first = method.init(train.spec, Rng.seeded(0))
    if per_row_leaves(method.init_client_state(first, train.spec, 1)):
        return False
    return set(shared_leaves(method, train.spec)) == set(_template(method, train))


def _is_everyones(outcome: Outcome, train: FederatedDataset) -> bool:
    """Return whether every client's model is the shared one."""
    everyone = np.arange(len(train), dtype=np.int64)
    for start in range(0, len(everyone), BLOCK):
        ids = everyone[start : start + BLOCK]
        own, shared = outcome.rows(ids), _stacked(outcome, train, ids)
        if not all(torch.equal(own[name].cpu(), leaf.cpu()) for name, leaf in shared.items()):
            return False
    return True


def _stacked(outcome: Outcome, train: FederatedDataset, ids: NDArray[np.int64]) -> Tree:
    """Return the shared model once per client; some methods have one per group of clients."""
    method, clients = outcome.plan.method, train.clients(ids)
    shared, like = method.serving.shared_model(outcome.shared, clients), _template(method, train)
    return {
        name: leaf if leaf.dim() > like[name].dim() else stack({name: leaf}, len(clients))[name]
        for name, leaf in shared.items()
    }


def _template(method: Method, train: FederatedDataset) -> Tree:
    return method.model.init(train.spec, Rng.seeded(0))
