"""The noise of a post: Gaussian, of the stated size, independent, on the grid, and from the system.

Seeds are fixed, so a test gives the same answer every time. "False alarm" is the probability, over
the choice of the seed, that a correct mechanism would be rejected: at most 1e-6 a test. Each
statistic must also reject a mechanism that is wrong on purpose.
"""

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, correlated, memory_board, not_normal

from coterie.privacy.billboard import bound
from coterie.privacy.entropy import (
    SeededEntropy,
    SystemEntropy,
    client_entropy,
    normals,
    open_entropy,
)
from coterie.privacy.mechanisms import (
    Block,
    BlockSum,
    GaussianRows,
    GaussianSum,
    LocalGaussianSum,
)

COUNT = 300_000
MECHANISM = GaussianSum(0.7, 1.3)
TEMPLATE = {"w": torch.zeros(40_000), "b": torch.zeros(200, 200)}


class Halved(GaussianSum):
    """A mechanism with half the noise it is charged for."""

    def perturb(self, total, entropy):
        return GaussianSum(self.bound, self.noise_multiplier / 2).perturb(total, entropy)


class Uniform(GaussianSum):
    """A mechanism with the right variance and the wrong shape."""

    def perturb(self, total, entropy):
        width = self.noise_multiplier * self.bound * math.sqrt(12)
        return {
            name: leaf
            + torch.from_numpy(entropy.words(leaf.numel()) / 2.0**64 - 0.5).reshape(leaf.shape)
            * width
            for name, leaf in total.items()
        }


class Shifted(GaussianSum):
    """A mechanism whose noise is not centred."""

    def perturb(self, total, entropy):
        noisy = super().perturb(total, entropy)
        return {name: leaf + 0.02 * self.bound for name, leaf in noisy.items()}


class Truncated(GaussianSum):
    """A mechanism whose noise is cut off at 3.5 standard deviations."""

    def perturb(self, total, entropy):
        limit = 3.5 * self.noise_multiplier * self.bound
        noisy = super().perturb(total, entropy)
        return {name: leaf.clamp(-limit, limit) for name, leaf in noisy.items()}


def noise_of(mechanism, count=COUNT, seed=11):
    """Standardised noise: what is posted over zeros, over the deviation that is charged for."""
    zeros = {"w": torch.zeros(count, dtype=torch.float64)}
    noisy = mechanism.perturb(zeros, SeededEntropy(seed, "noise", 0))["w"].numpy()
    return noisy / (mechanism.noise_multiplier * mechanism.bound)


def mean_is_off(noise):
    # sqrt(n) * mean is N(0, 1): two-sided, false alarm 1e-6 exactly (rounding to the grid, 2^-20
    # of a deviation and symmetric, does not count).
    return abs(noise.mean()) * math.sqrt(len(noise)) > stats.norm.isf(ALARM / 2)


def variance_is_off(noise):
    # The sum of squares is chi-square with n degrees of freedom: two-sided, false alarm 1e-6.
    square = float((noise**2).sum())
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(noise))
    return not low < square < high


def shape_is_off(noise):
    # Kolmogorov-Smirnov against N(0, 1): its p-value is below 1e-6 with probability 1e-6. The grid
    # moves the distribution function by at most 2^-21 * 0.4, far below 1 / sqrt(n) = 1.8e-3.
    return stats.kstest(noise, "norm").pvalue < ALARM


def tails_are_off(noise):
    # Counts beyond 3, 3.5, 4 and 4.5 are binomial: 4 two-sided exact tests at 1e-6 / 4 each.
    for threshold in (3.0, 3.5, 4.0, 4.5):
        seen = int((np.abs(noise) > threshold).sum())
        chance = 2 * stats.norm.sf(threshold)
        low = stats.binom.cdf(seen, len(noise), chance)
        high = stats.binom.sf(seen - 1, len(noise), chance)
        if min(low, high) < ALARM / 8:
            return True
    return False


STATISTICS = {
    "mean": (mean_is_off, Shifted),
    "variance": (variance_is_off, Halved),
    "shape": (shape_is_off, Uniform),
    "tails": (tails_are_off, Truncated),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("mechanism", [MECHANISM, GaussianSum(1e-3, 37.0), GaussianSum(50.0, 0.1)])
def test_noise_is_gaussian_of_the_stated_size(name, mechanism):
    # 12 tests of 1e-6 each.
    rejects, _ = STATISTICS[name]
    assert not rejects(noise_of(mechanism))


@pytest.mark.parametrize("name", STATISTICS)
def test_each_statistic_can_fail(name):
    rejects, mutant = STATISTICS[name]
    assert rejects(noise_of(mutant(0.7, 1.3)))


def test_half_the_noise_is_caught_by_variance_shape_and_tails():
    noise = noise_of(Halved(0.7, 1.3))
    assert variance_is_off(noise)
    assert shape_is_off(noise)
    assert tails_are_off(noise)
    assert not mean_is_off(noise)


def test_five_per_cent_too_little_noise_is_caught():
    assert variance_is_off(noise_of(MECHANISM) * 0.95)


def test_noise_is_added_to_the_sum_and_does_not_depend_on_it():
    total = {"w": torch.linspace(-3, 3, 1000, dtype=torch.float64)}
    step = MECHANISM.step(1000)
    total["w"] = torch.round(total["w"] / step) * step
    zeros = {"w": torch.zeros(1000, dtype=torch.float64)}
    over = MECHANISM.perturb(total, SeededEntropy(3, "noise", 0))["w"]
    alone = MECHANISM.perturb(zeros, SeededEntropy(3, "noise", 0))["w"]
    assert torch.equal(over - total["w"], alone)
    assert torch.equal(total["w"], torch.round(total["w"] / step) * step), "the sum was changed"


@pytest.mark.parametrize("mechanism", [MECHANISM, GaussianSum(1e-3, 37.0), GaussianSum(3.0, 1e-7)])
def test_every_posted_value_is_on_the_grid(mechanism):
    rows = {"w": torch.randn(5, 999, generator=torch.Generator().manual_seed(0))}
    total = mechanism.reduce(mechanism.clip(rows)[0])
    value = mechanism.perturb(total, SeededEntropy(1, "noise", 0))["w"].numpy()
    units = value / mechanism.step(999)
    assert np.array_equal(units, np.rint(units))


COARSE = [
    GaussianSum(1.0, 1e6),
    GaussianSum(3e-4, 5e4),
    GaussianRows(0.5, 1e7, 5),
    LocalGaussianSum(2.0, 1e5, 5.0),
    BlockSum((Block("w", 0.7, 1.0),), 1e6),
]


@pytest.mark.parametrize("mechanism", COARSE, ids=lambda one: type(one).__name__)
def test_large_noise_is_released_on_a_grid_of_its_own(mechanism):
    """A grid far finer than the noise would show the lattice of the sampler."""
    numbers = 4096
    rows = {"w": torch.randn(5, numbers, generator=torch.Generator().manual_seed(0))}
    ids = torch.arange(5)
    clipped = mechanism.clip(rows)[0]
    clipped = mechanism.perturb_rows(clipped, ids, client_entropy(3, 0))
    total = mechanism.reduce(clipped, ids)
    value = mechanism.perturb(total, SeededEntropy(1, "noise", 0))["w"].numpy()
    shapes = {"w": tuple(value.shape)}
    (grid,) = mechanism.grid(shapes).values()
    deviation = getattr(mechanism, "deviation", mechanism.standard_deviations(shapes)["w"])
    assert 2.0**-21 < grid / deviation <= 2.0**-20
    units = value / grid
    assert np.array_equal(units, np.rint(units))
    spread = mechanism.standard_deviations(shapes)["w"]
    # Variance of 4,096 normals or more, false alarm below 1e-6.
    assert abs(value.var() / spread**2 - 1) < 5 * math.sqrt(2 / numbers)


def test_small_noise_keeps_the_grid_of_sums():
    for mechanism in (MECHANISM, GaussianSum(1e-3, 37.0), GaussianSum(3.0, 1e-7)):
        assert mechanism.grid({"w": (999,)}) == {"w": mechanism.step(999)}


def test_both_signs_and_the_centre_are_reached():
    noise = noise_of(MECHANISM)
    assert (noise > 0).any()
    assert (noise < 0).any()
    assert np.abs(noise).min() < 1e-4
    # 300,000 normals exceed 4 in absolute value about 19 times, never with probability 5.6e-9.
    assert np.abs(noise).max() > 4


# Independence.


def board(seed=21, posts=3):
    return memory_board(MECHANISM, TEMPLATE, posts=posts, seed=seed)


def series_of(posts):
    scale = MECHANISM.bound * MECHANISM.noise_multiplier
    return [leaf.flatten().numpy() / scale for post in posts for leaf in post.value.values()]


def test_noise_of_different_posts_and_leaves_is_independent():
    made = board()
    posts = [made.post([]) for _ in range(3)]
    assert not correlated(series_of(posts))


def test_noise_within_a_post_is_independent_of_its_neighbours():
    noise = noise_of(MECHANISM)
    lags = [noise[lag : lag + 200_000] for lag in (0, 1, 2, 3, 4, 64, 256, 4096)]
    assert not correlated(lags)


def test_noise_is_independent_of_the_cohort_drawn_in_the_same_round():
    noise = noise_of(MECHANISM, 100_000, seed=21)
    cohort = normals(SeededEntropy(21, "cohort", 0), 100_000)
    assert not correlated([noise, cohort])


def test_reused_noise_is_caught():
    same = board()
    same._entropy = lambda index: open_entropy(21, "noise", 0)
    assert correlated(series_of([same.post([]) for _ in range(2)]))


class OneStream:
    """An entropy that starts over for every leaf."""

    def words(self, count):
        return SeededEntropy(1, "noise", 0).words(count)


def test_noise_reused_between_posts_is_caught():
    made = board(posts=2)
    made._entropy = lambda index: OneStream()
    assert correlated(series_of([made.post([]), made.post([])]))


# Where it comes from.


def test_system_entropy_reads_the_operating_system(monkeypatch):
    asked = []

    def fake(count):
        asked.append(count)
        return bytes(range(256)) * (count // 256) + bytes(range(count % 256))

    monkeypatch.setattr(os, "urandom", fake)
    words = SystemEntropy().words(3)
    assert asked == [24]
    assert words.tolist() == [
        int.from_bytes(bytes(range(8 * i, 8 * i + 8)), "little") for i in range(3)
    ]


def test_a_real_run_draws_a_key_for_each_release_from_the_system(monkeypatch):
    drawn = []
    real = os.urandom

    def count(size):
        drawn.append(size)
        return real(size)

    monkeypatch.setattr(os, "urandom", count)
    made = board(seed=None)
    normals(SystemEntropy(), 1)  # compiled, which names files at random
    drawn.clear()
    for _ in range(2):
        made.post([])
    assert drawn == [32, 32]
    drawn.clear()
    board(seed=1).post([])
    assert drawn == []


def test_numpy_and_torch_seeds_do_not_touch_the_noise():
    def seeded_all():
        np.random.seed(0)
        torch.manual_seed(0)
        return board(seed=None).post([]).value["w"]

    assert not torch.equal(seeded_all(), seeded_all())


def test_billboards_differ_without_a_seed_and_repeat_with_one():
    def value(seed):
        return board(seed).post([]).value["w"]

    assert not torch.equal(value(None), value(None))
    assert torch.equal(value(3), value(3))
    assert not torch.equal(value(3), value(4))


def test_system_noise_is_gaussian_too():
    # Not seeded: a false alarm once in 3e6 runs (mean, variance and shape at 1e-7 each).
    assert not not_normal(normals(SystemEntropy(), 200_000), alarm=3e-7)


# A whole post, end to end: what an adversary who knows all but one client can tell.


def distinguishes(mechanism, trials=4000):
    """Test a client's presence by projecting posts on its contribution; give the shift found.

    With and without the client the projection is N(s, z^2) and N(0, z^2) in units of the bound,
    s <= 1. The mean difference of 2 * `trials` posts has deviation z sqrt(2 / trials).
    """
    rows = {"w": torch.full((1, 16), 40.0)}
    total = bound(mechanism, rows)[0].total
    direction = np.full(16, 0.25)
    # Every number has noise of its own: the rows of one post are as many posts.
    sums = torch.zeros(2 * trials, 16, dtype=torch.float64)
    sums[1::2] = total["w"]
    noisy = mechanism.perturb({"w": sums}, SeededEntropy(9, "noise", 0))["w"].numpy()
    shifts = noisy @ direction / mechanism.bound
    return shifts[1::2].mean() - shifts[::2].mean()


def test_a_client_shifts_the_post_by_at_most_the_bound_against_full_noise():
    shift = distinguishes(MECHANISM)
    # One-sided z-test at 1e-6; the shift is the bound itself but for the rounding.
    error = MECHANISM.noise_multiplier * math.sqrt(2 / 4000)
    assert shift < 1 + stats.norm.isf(ALARM) * error

    class NoClip(GaussianSum):
        def clip(self, rows):
            whole = {name: leaf.double() for name, leaf in rows.items()}
            return whole, torch.ones(len(next(iter(rows.values()))))

    assert distinguishes(NoClip(0.7, 1.3), 200) > 1 + stats.norm.isf(ALARM) * 1.3 * 0.1
