"""How well rows were reconstructed, and how well guessing does.

Only u_i = y_i x_i enters the hinge loss, so a client with (x_i, y_i) and one with (-x_i, -y_i) send
the same messages: no attack tells a row from its negative with the other label, unless something is
known of the rows (a column that is positive in every row, like an appended 1 or a count). Rows are
therefore compared by |cos|, and sizes by y_i x_i.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.audit.view import Array
from coterie.core.rng import Rng

REVEALED = 0.99


@dataclass(frozen=True)
class Success:
    """How near found rows come to true ones, each true row matched to one found.

    Attributes:
        cosine: Mean |cos| of matched rows.
        best: The largest of them.
        worst: The smallest.
        revealed: Share of rows matched with |cos| above 0.99.
        relative_error: Median of |found - true| / |true| of y x.
        labels_right: Share of matched rows with the right label; a coin's 1/2 if the sign of a row
            cannot be known.
    """

    cosine: float
    best: float
    worst: float
    revealed: float
    relative_error: float
    labels_right: float


def match(truth_rows: Array, truth_labels: Array, rows: Array, labels: Array) -> Success:
    """Match found rows to true ones by the Hungarian method.

    The sum of log(1 - |cos|) is made small, so that a row that was found stays matched to itself
    where the sum of cosines would give it up for better guesses elsewhere.

    >>> eye = np.eye(2)
    >>> match(eye, np.ones(2), -3 * eye[::-1], np.array([-1.0, 1.0])).cosine
    1.0
    """
    cosines = np.abs(_unit(truth_rows) @ _unit(rows).T)
    true, found = linear_sum_assignment(np.log(np.maximum(1 - cosines, 1e-9)))
    matched = np.zeros(len(truth_rows))  # a row for which nothing was found scores 0
    matched[true] = cosines[true, found]
    signed = truth_labels[true, None] * truth_rows[true]
    error = np.linalg.norm(labels[found, None] * rows[found] - signed, axis=1)
    errors = np.ones(len(truth_rows))
    errors[true] = error / np.linalg.norm(signed, axis=1)
    right = np.zeros(len(truth_rows))
    right[true] = labels[found] == truth_labels[true]
    return Success(
        cosine=float(matched.mean()),
        best=float(matched.max()),
        worst=float(matched.min()),
        revealed=float((matched > REVEALED).mean()),
        relative_error=float(np.median(errors)),
        labels_right=float(right.mean()),
    )


def chance(rows: Array, *, seed: int = 0, tries: int = 50) -> float:
    """Return the mean |cos| that as many random directions reach: large if d is small or n large."""
    coins = Rng.seeded(seed).at("chance").numpy()
    labels = np.ones(len(rows))
    guesses = (coins.standard_normal(rows.shape) for _ in range(tries))
    return float(np.mean([match(rows, labels, guess, labels).cosine for guess in guesses]))


def _unit(rows: Array) -> Array:
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return scaled
