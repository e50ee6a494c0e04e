"""A client's score moves the sum of scores by at most the bound, whatever its rows are."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.privacy.billboard import bound
from coterie.privacy.events import Gaussian
from coterie.selection import Scoring

PROFILE = settings(derandomize=True, deadline=None, max_examples=150)
ANY = st.floats(allow_nan=True, allow_infinity=True)
ERRORS = st.lists(ANY, min_size=1, max_size=12)
BOUNDS = st.floats(1e-3, 1e3)


def summed(scoring, errors, mechanism=None):
    mechanism = mechanism or scoring.mechanism(1.0, 1e-5)
    rows = {"score": scoring.contributions(np.array(errors, dtype=np.float64))}
    total, _ = bound(mechanism, rows, torch.arange(len(errors)))
    return Fraction(float(total.total["score"]))


@PROFILE
@given(ERRORS, ANY, BOUNDS, st.floats(0.3, 50), st.data())
def test_neighbours_differ_by_at_most_the_bound(errors, other, largest, noise, data):
    scoring = Scoring(bound=largest, noise_multiplier=noise)
    mechanism = scoring.mechanism(1.0, 1e-5)
    which = data.draw(st.integers(0, len(errors) - 1))
    replaced = [*errors[:which], other, *errors[which + 1 :]]
    zeroed = [*errors[:which], math.nan, *errors[which + 1 :]]  # contributes nothing
    here = summed(scoring, errors, mechanism)
    for neighbour in (replaced, zeroed):
        assert abs(here - summed(scoring, neighbour, mechanism)) <= Fraction(largest)
    # What is stated of it: one Gaussian release, which replacing moves no further than zeroing.
    assert mechanism.event() == Gaussian(noise, 1.0)
    deviation = mechanism.standard_deviations({"score": ()})["score"]
    assert deviation >= noise * largest * (1 - 1e-12)


@PROFILE
@given(ERRORS, BOUNDS)
def test_contributions_lie_between_zero_and_the_bound(errors, largest):
    found = Scoring(bound=largest).contributions(np.array(errors))
    assert bool(((found >= 0) & (found <= largest)).all())
    for error, kept in zip(errors, found.tolist(), strict=True):
        assert kept == (0 if not math.isfinite(error) else min(max(largest - error, 0), largest))


def test_a_diverged_model_is_the_worst_there_is():
    found = Scoring().contributions(np.array([math.nan, math.inf, 5.0, 1.0, 0.25, 0.0]))
    assert found.tolist() == [0, 0, 0, 0, 0.75, 1]


def test_both_ends_are_attained():
    for other in (math.nan, 7.0):
        moved = summed(Scoring(), [0.0, 0.3]) - summed(Scoring(), [other, 0.3])
        assert Fraction(0.997) < moved <= 1


def test_the_usual_noise_is_that_of_half_a_runs_mu():
    # mu(1, 1e-5) = 0.26805 (privacy notes); half of it is spent on the score.
    noise = Scoring().mechanism(1.0, 1e-5).noise_multiplier
    assert noise == pytest.approx(2 / 0.26805, rel=1e-4)


class Unbounded(Scoring):
    """Forgets to bound: a client with a large error moves the sum further."""

    def contributions(self, errors):
        return torch.from_numpy(self.bound - errors)

    def mechanism(self, epsilon, delta):
        sound = super().mechanism(epsilon, delta)
        return type(sound)(
            tuple(type(b)(b.name, 100 * b.bound, b.share, "signed") for b in sound.blocks),
            sound.noise_multiplier,
        )


def test_a_score_without_a_bound_is_caught():
    assert abs(summed(Unbounded(), [0.0]) - summed(Unbounded(), [9.0])) > 1
