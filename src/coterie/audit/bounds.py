"""Lower bounds on epsilon from the scores of an attack.

An attack gives each trial a score: large if it believes that the canary client took part. `out` are
scores of runs without the canary, `inside` of runs with it. If a mechanism is (epsilon, delta)-DP,
every event S satisfies P1(S) <= e^epsilon P0(S) + delta, and the same with the worlds exchanged. So
rates of an attack that break the inequality disprove the claim.

- `threshold_bound` assumes nothing: a threshold is chosen on one half of the trials, and
  Clopper-Pearson intervals bound its two rates on the other half (Jagielski, Ullman, Oprea 2020).
- `gaussian_bound` assumes that scores are normal with one variance, as log-likelihood ratios of
  Gaussian releases are: it bounds mu of Gaussian DP and converts it (Dong, Roth, Su 2022). It is
  tight, and reaches epsilons that rates of a few thousand trials cannot show.
- `one_run_bound` takes guesses about many canaries of a single run (Steinke, Nasr, Jagielski 2023).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from coterie.privacy.profiles import GaussianProfile

Array = NDArray[np.float64]
LARGEST = 100.0
"""No bound above this is searched for."""


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon that holds with the stated confidence.

    `detail` says how it was reached: mu, or threshold and rates, or guesses.
    """

    estimator: str
    epsilon: float
    confidence: float
    detail: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """Return a dictionary that can be written as JSON."""
        return {
            "estimator": self.estimator,
            "lower_bound": self.epsilon,
            "confidence": self.confidence,
            **self.detail,
        }


def gaussian_bound(out: Array, inside: Array, delta: float, confidence: float) -> Bound:
    """Return the bound for normal scores of one variance.

    mu = (mean inside - mean out) / sd has an estimate whose variance is close to
    1/n0 + 1/n1 + mu^2 / (2 (n0 + n1 - 2)).
    """
    n0, n1 = len(out), len(inside)
    free = n0 + n1 - 2
    pooled = math.sqrt(((n0 - 1) * out.var(ddof=1) + (n1 - 1) * inside.var(ddof=1)) / free)
    gap = float(inside.mean() - out.mean())
    if pooled == 0:
        # Without any spread the worlds are equal, or told apart for certain.
        mu, lower = (0.0, 0.0) if gap == 0 else (math.inf, math.inf)
    else:
        mu = abs(gap) / pooled
        error = math.sqrt(1 / n0 + 1 / n1 + mu**2 / (2 * free))
        lower = max(0.0, mu - float(stats.norm.ppf((1 + confidence) / 2)) * error)
    found = min(GaussianProfile(lower).epsilon(delta), LARGEST) if lower > 0 else 0.0
    return Bound("gaussian", found, confidence, {"mu": mu, "mu_lower": lower})


def threshold_bound(out: Array, inside: Array, delta: float, confidence: float) -> Bound:
    """Return the bound by the rates of one threshold; it assumes nothing about the scores."""
    chosen = _best_threshold(out[::2], inside[::2], delta, confidence)
    at, sign = chosen
    epsilon, low, high = _by_rates(
        sign * out[1::2], sign * inside[1::2], sign * at, delta, confidence, swap=sign < 0
    )
    rates = {"threshold": at, "rate_at_least": low, "other_rate_at_most": high}
    return Bound("threshold", epsilon, confidence, rates)


def _best_threshold(
    out: Array, inside: Array, delta: float, confidence: float
) -> tuple[float, int]:
    """Return the threshold, and +1 to accuse above it or -1 to acquit below it."""
    points = np.unique(np.quantile(np.concatenate([out, inside]), np.linspace(0.001, 0.999, 400)))
    best, chosen = -1.0, (float(points[0]), 1)
    for sign in (1, -1):
        likely, rare = (out, inside) if sign < 0 else (inside, out)
        # Of each point how many scores are above it, or below it where the sign is turned.
        hits, alarms = (
            (sign * scores > sign * points[:, None]).sum(axis=1) for scores in (likely, rare)
        )
        found = _epsilons(hits, alarms, len(likely), len(rare), delta, confidence)[0]
        at = int(found.argmax())
        if found[at] > best:
            best, chosen = float(found[at]), (float(points[at]), sign)
    return chosen


def _by_rates(
    out: Array, inside: Array, at: float, delta: float, confidence: float, *, swap: bool
) -> tuple[float, float, float]:
    """Return epsilon and the two bounded rates of the event that a score is above `at`."""
    likely, rare = (out, inside) if swap else (inside, out)
    hits, alarms = (np.array([(scores > at).sum()]) for scores in (likely, rare))
    epsilon, low, high = _epsilons(hits, alarms, len(likely), len(rare), delta, confidence)
    return float(epsilon[0]), float(low[0]), float(high[0])


def _epsilons(
    hits: NDArray[np.int64],
    alarms: NDArray[np.int64],
    likely: int,
    rare: int,
    delta: float,
    confidence: float,
) -> tuple[Array, Array, Array]:
    """Return epsilons and both bounded rates (Clopper-Pearson) of several events."""
    level = (1 - confidence) / 2
    low, high = np.zeros(len(hits)), np.ones(len(hits))
    some, few = hits > 0, alarms < rare
    low[some] = stats.beta.ppf(level, hits[some], likely - hits[some] + 1)
    high[few] = stats.beta.ppf(1 - level, alarms[few] + 1, rare - alarms[few])
    epsilon = np.zeros(len(hits))
    above = low > delta
    epsilon[above] = np.maximum(0.0, np.log((low[above] - delta) / high[above]))
    return epsilon, low, high


def one_run_bound(
    guesses: NDArray[np.int64], truth: NDArray[np.int64], delta: float, confidence: float
) -> Bound:
    """Return the bound from guesses (+1, -1, or 0 for none) about canaries of a single run.

    Each canary took part by an independent fair coin. If the run is (epsilon, delta)-DP, the number
    of right guesses is at most a binomial with probability e^epsilon / (1 + e^epsilon), but for a
    slack of 2 m delta max_i P(V - i <= X < V) / i over m canaries (Theorem 5.2 there).
    """
    made = int((guesses != 0).sum())
    right = int((guesses == truth)[guesses != 0].sum())
    level, many = 1 - confidence, len(truth)

    def excess(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        tail = float(stats.binom.sf(right - 1, made, q))
        below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), made, q))
        slack = float((below / np.arange(1, right + 1)).max()) if right else 0.0
        return tail + 2 * many * delta * slack - level

    if made == 0 or excess(0.0) >= 0:
        epsilon = 0.0
    elif excess(LARGEST) < 0:
        epsilon = LARGEST
    else:
        epsilon = float(optimize.brentq(excess, 0.0, LARGEST, xtol=1e-6))
    counts = {"canaries": float(many), "guesses": float(made), "right": float(right)}
    return Bound("one_run", epsilon, confidence, counts)
