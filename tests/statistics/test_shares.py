"""The discrete Gaussian sampler, and the noise that shares add up to.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a correct
sampler would be rejected: at most 1e-6 a test.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, gaussian_delta, not_normal

from coterie.privacy import discrete
from coterie.privacy.billboard import bound
from coterie.privacy.discrete import discrete_gaussians
from coterie.privacy.entropy import SeededEntropy, client_entropy
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.moments import GaussianGram
from coterie.privacy.shares import GaussianShares


def drawn(variance, sources=20, count=5000, seed=1):
    made = [SeededEntropy(seed, "test", 0, client) for client in range(sources)]
    return discrete_gaussians(made, count, variance)


def law(variance, reach):
    """P(X = x) for |x| <= reach, from its definition."""
    x = np.arange(-reach, reach + 1)
    mass = np.exp(-(x.astype(float) ** 2) / (2 * variance))
    return x, mass / mass.sum()


@pytest.mark.parametrize("variance", [1, 2, 3, 5, 16, 17, 100])
def test_the_law_is_the_discrete_gaussian(variance):
    """Chi-square over all values expected five times at least; false alarm 1e-6."""
    found = drawn(variance).ravel()
    x, mass = law(variance, 12 * math.isqrt(variance) + 12)
    expected = mass * found.size
    kept = expected >= 5
    counts = np.array([(found == value).sum() for value in x[kept]])
    counts, expected = (
        np.append(counts, found.size - counts.sum()),
        np.append(expected[kept], found.size - expected[kept].sum()),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        square = np.nansum(np.where(expected > 1e-9, (counts - expected) ** 2 / expected, 0.0))
    assert square < stats.chi2.isf(ALARM, int(kept.sum()))


def test_the_test_sees_a_wrong_law():
    found = drawn(16).ravel()
    x, mass = law(17, 60)
    expected = mass * found.size
    kept = expected >= 5
    counts = np.array([(found == value).sum() for value in x[kept]])
    square = ((counts - expected[kept]) ** 2 / expected[kept]).sum()
    assert square > stats.chi2.isf(ALARM, int(kept.sum()) - 1)


@pytest.mark.parametrize("variance", [4096, 2**30, 2**30 + 1, 3 * 2**41, 2**80])
def test_large_variances_look_normal(variance):
    # On so fine a grid the law is that of a rounded normal, to 1e-4 of a deviation.
    found = drawn(variance, 4) / math.sqrt(variance)
    assert not not_normal(found.ravel() + 0.0)


def test_open_comparisons_are_decided_in_decimals(monkeypatch):
    """With a coarse bound on rounding nearly all are decided exactly: the same numbers come out."""
    plain = drawn(1000, 3, 200)
    called = []
    exactly = discrete._exactly

    def count(*given):
        called.append(1)
        return exactly(*given)

    monkeypatch.setattr(discrete, "_exactly", count)
    assert np.array_equal(drawn(1000, 3, 200), plain)
    assert not called
    monkeypatch.setattr(discrete, "_ABSOLUTE", 0.5)
    assert np.array_equal(drawn(1000, 3, 200), plain)
    assert len(called) > 100


@dataclass
class Tied:
    """Words after the first batch: a source whose next words decide a tie."""

    after: list[int] = field(default_factory=list)

    def words(self, count):
        assert count == 1
        return np.array([self.after.pop(0)], dtype=np.uint64)


def test_a_tie_in_64_bits_takes_further_words():
    # x = 0, k = 0: p = 0.8 = 0.110011001100... in bits; its first word is 0xcccc...
    word = 0xCCCCCCCCCCCCCCCC
    assert discrete._exactly(0, 0, 100, word, Tied([0]))
    assert not discrete._exactly(0, 0, 100, word, Tied([2**64 - 1]))
    assert discrete._exactly(0, 0, 100, word, Tied([word, 0]))
    assert not discrete._exactly(0, 0, 100, word, Tied([word, 2**64 - 1]))
    assert discrete._exactly(0, 0, 100, word - 1, Tied())
    assert not discrete._exactly(0, 0, 100, word + 1, Tied())


def test_rows_depend_on_their_own_source_only():
    whole = drawn(5000, 7, 40)
    for client in range(7):
        alone = discrete_gaussians([SeededEntropy(1, "test", 0, client)], 40, 5000)
        assert np.array_equal(whole[client], alone[0])
    assert len({row.tobytes() for row in whole}) == 7


@pytest.mark.parametrize("answered", [9, 7])
def test_sums_carry_the_planned_noise_over_the_honest_shares(answered):
    """Noise of n answers has variance n / (K - C) of the planned one: not normal at 1e-6."""
    mechanism = GaussianShares(GaussianSum(0.7, 1.3), 9, 7, 2)
    zeros = {"w": torch.zeros(answered, 20_000, dtype=torch.float64)}
    total, _ = bound(mechanism, zeros, torch.arange(answered), client_entropy(1, 0))
    noise = total.total["w"].numpy() / (0.7 * 1.3)
    assert not not_normal(noise / math.sqrt(answered / 5))
    assert not_normal(noise / math.sqrt(answered / 7))


def test_shares_of_second_moments_are_symmetric_with_half_the_variance_off_the_diagonal():
    mechanism = GaussianShares(GaussianGram(0.7, 3.0), 5, 4, 1)
    zeros = {"w": torch.zeros(5, 160, dtype=torch.float64)}
    total, _ = bound(mechanism, zeros, torch.arange(5), client_entropy(1, 0))
    noise = total.total["w"].numpy() / (3.0 * 0.49) / math.sqrt(5 / 3)
    assert np.array_equal(noise, noise.T)
    assert not not_normal(noise[np.tril_indices(160, -1)] * math.sqrt(2))
    square = float(np.square(np.diag(noise)).sum())  # chi-square, 160 degrees
    assert stats.chi2.isf(1 - ALARM / 2, 160) < square < stats.chi2.isf(ALARM / 2, 160)


def hockey_stick(one, other, epsilon):
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


@pytest.mark.parametrize("honest", [1, 2, 3, 5])
@pytest.mark.parametrize(("deviation", "moved"), [(150.0, 10), (150.0, 130), (400.0, 57)])
def test_the_exact_law_of_a_few_shares_is_no_less_private_than_the_account(
    honest, deviation, moved
):
    """By convolution of the exact laws: no sampling. Modulo a small ring nothing is lost either."""
    mechanism = GaussianShares(GaussianSum(1.0, 1.0), honest + 2, honest + 1, 1)
    variance = mechanism._variance(Fraction(deviation) ** 2)
    _, one = law(variance, 12 * math.isqrt(variance))
    total = one
    for _ in range(honest - 1):
        total = np.convolve(total, one)
    here, there = np.zeros((2, len(total) + moved))
    here[: len(total)], there[moved:] = total, total
    ring = np.arange(len(here)) % 512
    for epsilon in (0.0, 0.25, 0.5, 1.0, 2.0):
        claimed = gaussian_delta(epsilon, moved / deviation)
        exact = hockey_stick(here, there, epsilon)
        assert exact <= claimed * (1 + 1e-9) + 1e-15
        assert exact >= 0.99 * claimed - 1e-15  # no more noise than it takes
        folded = [np.bincount(ring, weights=mass) for mass in (here, there)]
        assert hockey_stick(*folded, epsilon) <= exact + 1e-15
