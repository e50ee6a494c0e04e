"""Shared by the tests of privacy: exact arithmetic on grids, statistics, and textbook formulas.

The statistics state their false alarm: the probability, over the choice of the seed, that a correct
mechanism would be rejected.
"""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from coterie.privacy.billboard import Billboard
from coterie.privacy.entropy import open_entropy
from coterie.privacy.ledger import Ledger
from coterie.privacy.transcript import MemoryTranscript

ALARM = 1e-6
NOT_FINITE = [math.nan, math.inf, -math.inf]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-310, 2.2e-308, 1e-160, 1e-45, 1e-20, 1e20]
SPECIAL += [3.4e38, -3.4e38, 1e160, 1e300, 1.7976931348623157e308, -1.7976931348623157e308]


def golden(name):
    """The rows of a table of reference numbers."""
    with (Path(__file__).parents[1] / "golden" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def gaussian_delta(epsilon, mu):
    """Delta of mu-Gaussian DP (Balle and Wang 2018; Dong, Roth and Su 2022)."""
    upper = stats.norm.cdf(mu / 2 - epsilon / mu)
    return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def memory_board(mechanism, template, *, posts=1, seed=1, cohort=1.0, purpose="noise"):
    """A billboard in memory; the template holds shapes or tensors."""
    return Billboard(
        mechanisms=(mechanism,) * posts,
        template={n: torch.zeros(t) if isinstance(t, tuple) else t for n, t in template.items()},
        cohort=cohort,
        ledger=Ledger([mechanism.event()] * posts),
        transcript=MemoryTranscript(),
        entropy=lambda index: open_entropy(seed, purpose, index),
    )


def units(leaf, step):
    """Grid values as whole numbers of steps (Python integers); fails if one is off the grid."""
    exact = np.asarray(leaf, dtype=np.float64) / step  # exact: the step is a power of two
    assert np.array_equal(exact, np.rint(exact)), "a value is off the grid"
    assert np.all(np.abs(exact) <= 2.0**53)
    return np.array([int(value) for value in exact.ravel()], dtype=object)


def not_normal(noise, alarm=ALARM):
    """Reject N(0, 1) by mean, sum of squares (chi-square) and Kolmogorov-Smirnov, alarm / 3 each.

    The first two laws are exact; grids of 2^-20 of a deviation do not count.
    """
    share, n = alarm / 3, len(noise)
    low, high = stats.chi2.ppf([share / 2, 1 - share / 2], n)
    return (
        abs(noise.mean()) * math.sqrt(n) > stats.norm.isf(share / 2)
        or not low < float((noise**2).sum()) < high
        or stats.kstest(noise, "norm").pvalue < share
    )


def correlated(series):
    """Reject independence of series of normals, with a false alarm of 1e-6 in all.

    r sqrt(n) is N(0, 1) up to 1/n, and so is that of the centred squares: two statistics a pair,
    Bonferroni over pairs.
    """
    pairs = list(itertools.combinations(series, 2))
    limit = stats.norm.isf(ALARM / 2 / (2 * len(pairs)))
    for left, right in pairs:
        for a, b in ((left, right), (left**2 - 1, right**2 - 1)):
            r = float(np.mean(a * b)) / math.sqrt(float(np.mean(a**2)) * float(np.mean(b**2)))
            if abs(r) * math.sqrt(len(left)) > limit:
                return True
    return False
