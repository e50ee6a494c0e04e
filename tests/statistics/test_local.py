"""The noise that clients add: Gaussian, of the stated size, independent, and everybody's own.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a correct
mechanism would be rejected: at most 1e-6 a test.
"""

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, not_normal

from coterie.privacy.billboard import bound
from coterie.privacy.entropy import client_entropy
from coterie.privacy.mechanisms import GaussianSum, LocalGaussianSum

NUMBERS = 20_000
MECHANISM = LocalGaussianSum(0.7, 1.3, cohort=12.0)


def noise_of(client, number, seed=11, mechanism=MECHANISM, numbers=NUMBERS):
    """One client's standardised noise of a round: its message over zeros."""
    zeros = {"w": torch.zeros(1, numbers, dtype=torch.float64)}
    sent, _ = bound(mechanism, zeros, torch.tensor([client]), client_entropy(seed, number))
    return sent.total["w"].numpy() / (mechanism.noise_multiplier * mechanism.bound)


def test_each_client_adds_the_stated_noise():
    # 8 tests of 1e-6 / 8: the clients' noise together is as many normals.
    assert not any(not_normal(noise_of(client, 0)) for client in range(8))
    assert not not_normal(np.concatenate([noise_of(client, 1) for client in range(8)]))


def test_the_test_sees_half_the_noise():
    halved = LocalGaussianSum(0.7, 0.65, cohort=12.0)
    assert not_normal(noise_of(0, 0, mechanism=halved) / 2)
    assert not_normal(noise_of(0, 0) + 0.05)
    rng = np.random.default_rng(0)
    assert not_normal(rng.uniform(-math.sqrt(3), math.sqrt(3), NUMBERS))


@pytest.mark.parametrize("pairs", [[((0, 0), (1, 0))], [((0, 0), (0, 1))], [((3, 1), (1, 3))]])
def test_noise_is_independent_between_clients_and_rounds(pairs):
    # sqrt(n) times the mean product of independent normals is N(0, 1) for n = 20,000, to 1e-2 in
    # the tail at 5.5 deviations: false alarm below 1e-6. Numbers meet by chance as often as two
    # normals fall into one cell of the grid, n^2 step / (2 sqrt(pi)) times: Poisson, at 1e-6.
    step = GaussianSum(0.7, 1.3).step(NUMBERS) / (0.7 * 1.3)
    meet = stats.poisson.isf(ALARM, NUMBERS**2 * step / (2 * math.sqrt(math.pi)))
    for left, right in pairs:
        one, other = noise_of(*left), noise_of(*right)
        assert abs(np.mean(one * other)) * math.sqrt(NUMBERS) < 5.5
        assert len(np.intersect1d(one, other)) <= meet < 200


def test_streams_are_of_seed_round_and_client_alone():
    assert np.array_equal(noise_of(5, 2), noise_of(5, 2))
    for other in ((6, 2, 11), (5, 3, 11), (5, 2, 12)):
        assert not np.array_equal(noise_of(5, 2), noise_of(*other))


def test_a_sum_carries_the_noise_of_all_its_clients():
    # The variance of a sum over k clients is k times that of one: chi-square at 1e-6.
    count = 9
    zeros = {"w": torch.zeros(count, NUMBERS)}
    total = bound(MECHANISM, zeros, torch.arange(count), client_entropy(1, 0))[0].total["w"].numpy()
    assert not not_normal(total / (0.7 * 1.3 * math.sqrt(count)))


@pytest.mark.parametrize("split", [1, 2, 5, 9])
def test_blocks_move_no_bit(split):
    generator = torch.Generator().manual_seed(0)
    rows = {"w": torch.randn(9, 50, generator=generator), "b": torch.randn(9, generator=generator)}
    ids = torch.tensor([4, 8, 15, 16, 23, 42, 1, 2, 3])
    whole, _ = bound(MECHANISM, rows, ids, client_entropy(7, 3))
    parts = [
        bound(
            MECHANISM,
            {name: leaf[place : place + split] for name, leaf in rows.items()},
            ids[place : place + split],
            client_entropy(7, 3),
        )[0]
        for place in range(0, 9, split)
    ]
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    for name in rows:
        assert torch.equal(whole.total[name], added.total[name])


def test_real_noise_comes_from_the_system(monkeypatch):
    bound(MECHANISM, {"w": torch.zeros(1, 1)}, torch.arange(1), client_entropy(None, 0))
    asked = []  # after the compiler, which names files at random
    system = os.urandom

    def urandom(count):
        asked.append(count)
        return system(count)

    monkeypatch.setattr(os, "urandom", urandom)
    zeros = {"w": torch.zeros(3, 1000)}
    first, second = (
        bound(MECHANISM, zeros, torch.arange(3), client_entropy(None, 0))[0].total["w"]
        for _ in range(2)
    )
    # A key of 32 bytes for each client and draw, which ChaCha20 expands; one read for all three.
    assert asked == [3 * 32] * 2
    assert not torch.equal(first, second)
    assert not not_normal(second.numpy() / (0.7 * 1.3 * math.sqrt(3)))


def test_typical_noise_is_that_of_an_expected_cohort():
    from coterie.privacy.entropy import SeededEntropy

    like = {"w": torch.zeros(NUMBERS, dtype=torch.float64)}
    drawn = MECHANISM.typical_noise(like, SeededEntropy(0, "noise", 0))["w"].numpy()
    assert not not_normal(drawn / (0.7 * 1.3 * math.sqrt(12)))
    central = GaussianSum(0.7, 1.3)
    entropy = [SeededEntropy(0, "noise", 0) for _ in range(2)]
    assert torch.equal(
        central.typical_noise(like, entropy[0])["w"], central.perturb(like, entropy[1])["w"]
    )
