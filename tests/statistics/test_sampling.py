"""Cohorts: the stated probability for each client, independent, and uniform over subsets.

Seeds are fixed. "False alarm" is the probability over seeds that a correct sampler is rejected: at
most 1e-6 a test. Each statistic must reject samplers that are wrong on purpose.
"""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from coterie.privacy.entropy import SeededEntropy, SystemEntropy, uniforms
from coterie.privacy.sampling import FixedSize, Poisson, _below

ALARM = 1e-6


@cache
def cohorts(sampler, clients, rounds, entropy=None):
    """An inclusion table, rounds by clients."""
    entropy = entropy or SeededEntropy(17, "cohort", 0)
    table = np.zeros((rounds, clients), dtype=bool)
    for number in range(rounds):
        table[number, sampler.draw(clients, entropy)] = True
    return table


def chi_square_is_off(observed, expected):
    # The smallest expected count is above 50 in every use, where the chi-square limit's error at
    # this depth is well below a factor of 10: rejecting at 1e-7 keeps the false alarm below 1e-6.
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert expected.min() > 50
    assert math.isclose(observed.sum(), expected.sum(), rel_tol=1e-9)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic > stats.chi2.isf(ALARM / 10, len(observed) - 1)


def rates_are_off(table, rate):
    # Each client's count is binomial: exact two-sided tests, Bonferroni over clients.
    rounds, clients = table.shape
    level = ALARM / 2 / clients
    low, high = stats.binom.ppf(level, rounds, rate), stats.binom.isf(level, rounds, rate)
    counts = table.sum(axis=0)
    return bool(((counts < low) | (counts > high)).any())


def pairs_are_off(table, rate):
    # If two clients are independent their joint count is binomial(rounds, rate^2); all pairs,
    # two-sided, Bonferroni over pairs.
    rounds, clients = table.shape
    joint = table.astype(np.int64).T @ table.astype(np.int64)
    level = ALARM / 2 / (clients * (clients - 1) / 2)
    low, high = (stats.binom.ppf(level, rounds, rate**2), stats.binom.isf(level, rounds, rate**2))
    upper = joint[np.triu_indices(clients, 1)]
    return bool(((upper < low) | (upper > high)).any())


def sizes_are_off(table, rate):
    # The cohort's size is binomial(clients, rate): chi-square over sizes, rare ones pooled.
    rounds, clients = table.shape
    expected = stats.binom.pmf(np.arange(clients + 1), clients, rate) * rounds
    observed = np.bincount(table.sum(axis=1), minlength=clients + 1)
    common = np.flatnonzero(expected > 100)
    first, last = common[0], common[-1]

    def pooled(counts):
        return [counts[: first + 1].sum(), *counts[first + 1 : last], counts[last:].sum()]

    return chi_square_is_off(pooled(observed), pooled(expected))


def subsets_are_off(table, probabilities):
    """Chi-square over every possible cohort: catches any dependence whatever."""
    codes = table @ (1 << np.arange(table.shape[1]))
    observed = np.bincount(codes, minlength=len(probabilities))
    possible = probabilities > 0
    if observed[~possible].any():
        return True
    return chi_square_is_off(observed[possible], probabilities[possible] * len(table))


def poisson_subsets(clients, rate):
    codes = np.arange(1 << clients)
    sizes = np.array([int(code).bit_count() for code in codes])
    return rate**sizes * (1 - rate) ** (clients - sizes)


def fixed_subsets(clients, cohort):
    codes = np.arange(1 << clients)
    sizes = np.array([int(code).bit_count() for code in codes])
    return (sizes == cohort) / math.comb(clients, cohort)


@pytest.mark.parametrize(("clients", "cohort"), [(40, 4.0), (40, 30.0), (7, 0.7)])
def test_each_client_joins_with_its_rate_and_by_itself(clients, cohort):
    table = cohorts(Poisson(cohort), clients, 20_000)
    assert not rates_are_off(table, cohort / clients)
    assert not pairs_are_off(table, cohort / clients)
    assert not sizes_are_off(table, cohort / clients)


@pytest.mark.parametrize("rate", [0.2, 0.8])
def test_every_poisson_cohort_has_its_probability(rate):
    clients = 4
    table = cohorts(Poisson(rate * clients), clients, 40_000)
    assert not subsets_are_off(table, poisson_subsets(clients, rate))


def test_rounds_are_independent():
    # A client's presence in consecutive rounds: pairs of rounds are disjoint, so the joint count
    # is binomial as for two clients.
    table = cohorts(Poisson(3.0), 10, 20_000)
    both = np.concatenate([table[::2], table[1::2]], axis=1)
    assert not pairs_are_off(both, 0.3)


def test_gaps_far_out_keep_the_rate():
    # Many clients and a small rate: the first, the middle and the last hundred thousand clients
    # hold binomial counts; three exact two-sided tests at 1e-6 / 3.
    clients, cohort, rounds = 300_000, 3000.0, 100
    entropy = SeededEntropy(23, "cohort", 0)
    counts = np.zeros(3)
    for _ in range(rounds):
        ids = Poisson(cohort).draw(clients, entropy)
        counts += np.bincount(ids // 100_000, minlength=3)
    for count in counts:
        low = stats.binom.ppf(ALARM / 6, rounds * 100_000, 0.01)
        high = stats.binom.isf(ALARM / 6, rounds * 100_000, 0.01)
        assert low <= count <= high


@pytest.mark.parametrize(("clients", "cohort"), [(5, 2), (7, 3), (4, 1), (5, 4)])
def test_every_fixed_size_cohort_is_equally_likely(clients, cohort):
    table = cohorts(FixedSize(cohort), clients, 15_000)
    assert set(table.sum(axis=1)) == {cohort}
    assert not subsets_are_off(table, fixed_subsets(clients, cohort))


def test_the_systems_coins_are_fair_too():
    # Not seeded: a false alarm at most once in 1e6 runs (chi-square at 1e-7, see above).
    table = cohorts(Poisson(2.0), 4, 5000, SystemEntropy())
    assert not subsets_are_off(table, poisson_subsets(4, 0.5))


# Samplers that are wrong on purpose.


class Table:
    """A sampler that looks its cohorts up."""

    def __init__(self, make):
        self.make = make

    def draw(self, clients, entropy):
        return np.flatnonzero(self.make(uniforms(entropy, clients + 1)))


def test_a_rate_four_per_cent_high_is_caught():
    table = cohorts(Poisson(30.0 * 1.04), 40, 20_000)
    assert rates_are_off(table, 0.75)
    assert sizes_are_off(table, 0.75)


def test_a_client_left_out_is_caught():
    table = cohorts(Poisson(4.0), 40, 20_000).copy()
    table[:, 39] = False
    assert rates_are_off(table, 0.1)


def test_neighbours_that_join_together_are_caught():
    # Clients 0 and 1 share a coin: every rate is right, the pair is not.
    def make(coins):
        coins = coins[:-1].copy()
        coins[1] = coins[0]
        return coins < 0.1

    table = cohorts(Table(make), 40, 5000)
    assert not rates_are_off(table, 0.1)
    assert pairs_are_off(table, 0.1)


def test_a_cohort_of_fixed_size_is_no_poisson_cohort():
    table = cohorts(FixedSize(4), 40, 3000)
    assert not rates_are_off(table, 0.1)
    assert sizes_are_off(table, 0.1)


def test_three_way_dependence_is_caught_by_subsets_alone():
    # The third coin is the parity of two others: pairwise independent, and yet determined.
    def make(coins):
        heads = coins[:-1] < 0.5
        heads[2] = heads[0] ^ heads[1]
        return heads

    table = cohorts(Table(make), 4, 20_000)
    assert not rates_are_off(table, 0.5)
    assert not pairs_are_off(table, 0.5)
    assert subsets_are_off(table, poisson_subsets(4, 0.5))


class Careless(FixedSize):
    """Floyd's algorithm with its swap forgotten: a repeated pick takes the smallest one free."""

    def draw(self, clients, entropy):
        chosen = set()
        for last in range(clients - self.cohort, clients):
            pick = _below(last + 1, int(entropy.words(1)[0]), entropy)
            free = next(i for i in itertools.count() if i not in chosen)
            chosen.add(free if pick in chosen else pick)
        return np.array(sorted(chosen))


def test_a_biased_subset_is_caught():
    table = cohorts(Careless(2), 5, 15_000)
    assert subsets_are_off(table, fixed_subsets(5, 2))
