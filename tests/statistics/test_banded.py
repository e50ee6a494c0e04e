"""Banded noise has the covariance of its strategy, and no attack beats its account.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a correct
mechanism would be rejected: at most 1e-6 a test.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, not_normal

from coterie.privacy.banded import banded_sums, noise_ratio
from coterie.privacy.entropy import SystemEntropy, open_entropy
from coterie.privacy.mechanisms import GaussianSum

ROUNDS, PERIOD, NUMBERS = 12, 4, 40_000
BOUND, Z = 0.5, 3.0


def noise(seed=1, restart=None):
    """The noise of every round, over the deviation of its normals; numbers are independent."""
    past, found = (), []
    zeros = {"w": torch.zeros(NUMBERS, dtype=torch.float64)}
    for number, one in enumerate(banded_sums([GaussianSum(BOUND, Z)] * ROUNDS, PERIOD)):
        past = () if number == restart else past
        entropy = SystemEntropy() if seed is None else open_entropy(seed, "noise", number)
        value, past = one.perturb_after(zeros, entropy, past)
        found.append(value["w"].numpy() / (BOUND * Z))
    return np.array(found)


def strategy_by_search():
    """C, found again by plain steps of Nelder and Mead, so that the test has one of its own."""
    from scipy import optimize

    def matrix(first):
        first = np.concatenate([[1.0], first])
        whole = sum(c * np.eye(ROUNDS, k=-lag) for lag, c in enumerate(first))
        return whole / np.linalg.norm(first)

    def error(first):
        return ((np.tri(ROUNDS) @ np.linalg.inv(matrix(first))) ** 2).sum()

    found = optimize.minimize(
        error, [0.5, 0.4, 0.3], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    whole = matrix(found.x)
    return whole / np.linalg.norm(whole, axis=0)


def test_noise_has_the_covariance_of_the_strategy():
    """Every entry of the covariance of C N, against the identity: false alarm 1e-6."""
    white = strategy_by_search() @ noise()
    limit = stats.norm.isf(ALARM / ROUNDS**2) / math.sqrt(NUMBERS)
    covariance = white @ white.T / NUMBERS - np.eye(ROUNDS)
    scale = np.where(np.eye(ROUNDS, dtype=bool), math.sqrt(2), 1.0)
    assert np.abs(covariance / scale).max() < limit
    assert not not_normal(white.ravel())


def test_the_test_sees_independent_noise():
    independent = np.random.default_rng(0).standard_normal((ROUNDS, NUMBERS))
    white = strategy_by_search() @ independent
    covariance = white @ white.T / NUMBERS - np.eye(ROUNDS)
    assert np.abs(covariance).max() > 0.2


def test_sums_of_releases_have_the_stated_noise():
    sums = np.cumsum(noise(), axis=0)
    found = math.sqrt((sums**2).mean(axis=1).sum() / (ROUNDS * (ROUNDS + 1) / 2))
    assert found == pytest.approx(noise_ratio(ROUNDS, PERIOD), rel=0.02)
    assert found < 0.72


@pytest.mark.parametrize("restart", [None, 3, 6])
def test_no_linear_attack_beats_the_account(restart):
    """The best test for one client's rounds: its power is that of sqrt(k)/z-GDP, or less.

    Each number of the release is a world of its own. The client contributes the bound in rounds
    1, 5 and 9. The likelihood ratio of Gaussian releases is linear; its weights are found from
    half of the worlds, and its power is measured on the others. False alarm 1e-6.
    """
    rounds = np.arange(1, ROUNDS, PERIOD)
    moved = np.zeros(ROUNDS)
    moved[rounds] = 1 / Z
    found = noise(restart=restart)
    learn, test = found[:, ::2], found[:, 1::2]
    weights = np.linalg.solve(np.cov(learn), moved)
    score = weights @ test / math.sqrt(weights @ np.cov(test) @ weights)
    shift = float(weights @ moved) / math.sqrt(weights @ np.cov(test) @ weights)
    mu = math.sqrt(len(rounds)) / Z
    assert shift <= mu * (1 + 5 * math.sqrt(ROUNDS / NUMBERS))
    if restart is None:
        assert shift > 0.95 * mu  # the account is tight
    for alarm in (0.01, 0.1, 0.5):
        threshold = stats.norm.isf(alarm)
        power = float((score + shift > threshold).mean())
        most = stats.norm.sf(threshold - mu)
        assert power <= most + stats.norm.isf(ALARM) * math.sqrt(most / test.shape[1]) + 0.01


def test_without_a_seed_no_noise_repeats():
    one, two = noise(seed=None), noise(seed=None)
    assert np.abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.02
