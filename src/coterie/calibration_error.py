"""How far the models' confidence is from how often they are right. Not private.

Naeini, Cooper, Hauskrecht, "Obtaining Well Calibrated Probabilities Using Bayesian Binning", AAAI
2015; Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017. Answers
are put into 15 bins of equal width by their confidence, ((b - 1)/15, b/15], and

    expected calibration error = sum_b (answers in b / answers) |share right in b - mean confidence|

The confidence of an answer is what the model gives to the class it chose: the largest softmax of
the outputs (multiclass), or the logistic of the output's size (binary, and every label of a
multilabel task by itself). Models that were fitted by another loss than cross-entropy (a hinge,
squares) are read in the same way, though their outputs were never meant as log-odds. An answer that
rests on an output that is not a number is wrong at confidence 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients, Task
from coterie.predictions import wrong_answers

Array = NDArray[np.float64]

BINS = 15
OWN_ROWS = 20
"""Test rows that a client needs for an error of its own: of fewer, most of it would be luck."""


@dataclass(frozen=True)
class Reliability:
    """Answers by confidence: what a reliability diagram shows.

    Attributes:
        answers: How many fall into each bin.
        confidence: Their confidences, added up.
        right: How many of them are right.
    """

    answers: Array
    confidence: Array
    right: Array

    @property
    def error(self) -> float:
        """The expected calibration error; NaN without any answer."""
        return float(_errors(np.stack([self.answers, self.confidence, self.right])[None])[0])

    def to_json(self) -> dict[str, list[Any]]:
        """Give, bin by bin: answers, mean confidence, share right; null where a bin is empty."""
        found: dict[str, list[Any]] = {"answers": [int(count) for count in self.answers]}
        for name, sums in (("confidence", self.confidence), ("right", self.right)):
            found[name] = [
                float(total / count) if count else None
                for total, count in zip(sums, self.answers, strict=True)
            ]
        return found


def confidence(task: Task, outputs: Tensor) -> Tensor:
    """Return the confidence of each answer to rows (n,) or (n, outputs); 1 where it has no number."""
    wide = outputs.double()
    # Infinite outputs leave a softmax without a value too: they are as sure as can be.
    sure = wide.softmax(dim=-1).amax(dim=-1) if task == "multiclass" else wide.abs().sigmoid()
    return torch.where(sure.isnan(), torch.ones_like(sure), sure)


def tally(outputs: Tensor, clients: Clients) -> Array:
    """Put each client's answers into bins: (c, 3, 15) answers, confidences added up, right ones."""
    mask = clients.mask
    right = ~wrong_answers(outputs, clients)[mask]
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


def reliability(tallies: Array) -> Reliability:
    """Put the answers of all clients together."""
    return Reliability(*tallies.sum(axis=0))


def own_errors(tallies: Array, rows: NDArray[np.int64]) -> Array:
    """Return each client's own calibration error; NaN for clients with few rows."""
    return np.where(rows >= OWN_ROWS, _errors(tallies), math.nan)


def _errors(tallies: Array) -> Array:
    total = tallies[:, 0].sum(axis=1)
    gaps = np.abs(tallies[:, 2] - tallies[:, 1]).sum(axis=1)
    return np.where(total > 0, gaps / np.maximum(total, 1), math.nan)
