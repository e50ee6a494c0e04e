"""Lower bounds on epsilon: coverage by Monte Carlo, closed forms, degenerate scores."""

import math

import numpy as np
import pytest
from scipy import special, stats

from coterie.audit.bounds import LARGEST, gaussian_bound, one_run_bound, threshold_bound
from coterie.privacy.profiles import GaussianProfile

MU, DELTA, CONFIDENCE = 1.0, 1e-3, 0.95
TRUE = GaussianProfile(MU).epsilon(DELTA)


def scores(rng, count, mu=MU):
    return rng.normal(-mu * mu / 2, mu, count), rng.normal(mu * mu / 2, mu, count)


@pytest.mark.parametrize(
    ("estimate", "count", "repeats", "near"),
    [(gaussian_bound, 400, 400, 0.8), (threshold_bound, 4000, 40, 0.45)],
)
def test_a_bound_exceeds_the_truth_as_rarely_as_its_confidence_states(
    estimate, count, repeats, near
):
    rng = np.random.default_rng(1)
    found = [estimate(*scores(rng, count), DELTA, CONFIDENCE).epsilon for _ in range(repeats)]
    above = sum(one > TRUE for one in found)
    # False alarms of this test: one in a million.
    assert above <= stats.binom.ppf(1 - 1e-6, repeats, 1 - CONFIDENCE)
    assert np.median(found) > near * TRUE


def test_equal_worlds_give_nothing_and_separate_worlds_everything():
    rng = np.random.default_rng(2)
    same = rng.normal(size=2000)
    for estimate in (gaussian_bound, threshold_bound):
        assert estimate(same, same, DELTA, CONFIDENCE).epsilon == 0
    zeros, ones = np.zeros(2000), np.ones(2000)
    assert gaussian_bound(zeros, ones, DELTA, CONFIDENCE).epsilon == LARGEST
    far = threshold_bound(zeros, ones, DELTA, CONFIDENCE)
    # No alarm among 1,000: at most 1 - (0.025)^(1/1000).
    assert far.epsilon == pytest.approx(
        math.log((0.025**0.001 - DELTA) / (1 - 0.025**0.001)), rel=1e-9
    )


@pytest.mark.parametrize(("right", "made"), [(70, 100), (500, 600), (100, 100), (40, 100)])
def test_guesses_of_one_run_at_delta_zero_are_a_binomial(right, made):
    truth = np.ones(made + 20, dtype=np.int64)
    guesses = np.zeros_like(truth)
    guesses[:made] = -1
    guesses[:right] = 1
    found = one_run_bound(guesses, truth, 0.0, CONFIDENCE).epsilon
    lower = stats.beta.ppf(1 - CONFIDENCE, right, made - right + 1)
    assert found == pytest.approx(max(0.0, special.logit(lower)), abs=1e-5)
    assert one_run_bound(guesses, truth, 1e-4, CONFIDENCE).epsilon <= found


def test_no_guess_gives_no_bound():
    truth = np.ones(10, dtype=np.int64)
    assert one_run_bound(np.zeros(10, dtype=np.int64), truth, 0.0, CONFIDENCE).epsilon == 0
