"""How clients fare one by one: what a mean over all of them hides. Not private."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """How clients with test rows fare, one by one.

    Attributes:
        of: "accuracy" (the share of a client's rows, or labels, that is right: larger is better) or
            "error" (its mean squared error: smaller is better).
        mean: Over clients, all with the same weight.
        weighted_mean: Over clients, by their test rows: that of all rows together.
        tail: Where the tenth of clients that fare worst begins: the 10th percentile of accuracies,
            the 90th of errors.
        worst: The client that fares worst: the least accuracy, the largest error.
        left_out: Clients without test rows, who are not counted.
    """

    of: str
    mean: float
    weighted_mean: float
    tail: float
    worst: float
    left_out: int

    @property
    def tail_name(self) -> str:
        """What the tail is called in keys: p10 of accuracies, p90 of errors."""
        return "p10" if self.of == "accuracy" else "p90"


def spread_of(metric: str, errors: Array, rows: Array | NDArray[np.int64]) -> Spread:
    """Say how clients fare, from each one's own error and test rows.

    An error that is not a number is infinite: the worst there is.
    """
    of, known = "error" if metric == "nmse" else "accuracy", rows > 0
    left_out = int((~known).sum())
    if not known.any():
        return Spread(of, math.nan, math.nan, math.nan, math.nan, left_out)
    bad = np.where(np.isnan(errors[known]), np.inf, errors[known])
    found = (bad.mean(), np.average(bad, weights=rows[known]), _quantile(bad, 0.9), bad.max())
    mean, weighted, tail, worst = (float(x) if of == "error" else 1 - float(x) for x in found)
    return Spread(of, mean, weighted, tail, worst, left_out)


def _quantile(values: Array, level: float) -> float:
    """Interpolate between the two nearest, as usual; but infinities are numbers like others."""
    ordered, place = np.sort(values), level * (len(values) - 1)
    low, high = float(ordered[math.floor(place)]), float(ordered[math.ceil(place)])
    return low if low == high else low + (place - math.floor(place)) * (high - low)
