"""A metric over seeds: its mean, and a standard error that counts clients and seeds both.

With values v_1..v_S of S seeds and their standard errors over clients e_1..e_S,

    error^2 = (e_1^2 + ... + e_S^2) / S + var(v) / S.

A page and a comparison's own table say the same error of the same runs: both take it from here.
"""

import math
from collections.abc import Sequence

import numpy as np


def average(values: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a metric over seeds and its standard error over clients and seeds.

    `errors` are over clients, one a seed. Clients come back in every seed, so that theirs do not
    shrink with seeds: the mean of their squares is kept whole, and the variance of the mean over
    seeds added. What both count is counted twice; the sum errs on the large side.
    """
    known = np.asarray(values, dtype=np.float64)
    if not len(known):
        return math.nan, math.nan
    mean = float(known.mean())
    squares = np.square(np.asarray(errors, dtype=np.float64))
    several = len(known) > 1 and bool(np.isfinite(known).all())
    over_seeds = float(known.var(ddof=1)) / len(known) if several else 0.0
    return mean, math.sqrt(float(squares.mean()) + over_seeds)
