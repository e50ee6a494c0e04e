"""The noise of a sum made of blocks: of each block's own size, independent between blocks.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a correct
mechanism would be rejected: at most 1e-6 a test. Each statistic must also reject a mechanism that
is wrong on purpose.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, correlated

from coterie.privacy.billboard import bound
from coterie.privacy.entropy import DrawnAhead, SeededEntropy
from coterie.privacy.mechanisms import Block, BlockSum, GaussianSum

COUNT = 60_000
BLOCKS = (
    Block("mean", 0.7, 0.6),
    Block("variances", 1.5, 0.3, "positive", per_root=True),
    Block("extra", 20.0, 0.1),
)
MECHANISM = BlockSum(BLOCKS, 1.3)
SHAPES = {"mean": (COUNT,), "variances": (COUNT,), "extra": (COUNT,)}
# z B_b / sqrt(f_b), by hand.
STATED = {
    "mean": 1.3 * 0.7 / math.sqrt(0.6),
    "variances": 1.3 * 1.5 * math.sqrt(COUNT) / math.sqrt(0.3),
    "extra": 1.3 * 20.0 / math.sqrt(0.1),
}


class Shared(BlockSum):
    """Every block gets the noise of the whole budget: too little."""

    def each(self, numbers):
        sound = super().each(numbers)
        return {name: GaussianSum(one.bound, self.noise_multiplier) for name, one in sound.items()}


class Repeated(BlockSum):
    """The same normals in every block."""

    def perturb(self, total, entropy):
        class Again:
            def words(self, count):
                return SeededEntropy(5, "noise", 0).words(count)

        alone = {
            b.name: GaussianSum(
                b.bound_of(total[b.name].numel()), self.noise_multiplier / b.share**0.5
            )
            for b in self.blocks
        }
        return {n: one.perturb({n: total[n]}, Again())[n] for n, one in alone.items()}


def noise_of(mechanism, seed=11):
    """What is posted over zeros, over the deviation that each block should have."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    noisy = mechanism.perturb(zeros, SeededEntropy(seed, "noise", 0))
    return {name: leaf.numpy() / STATED[name] for name, leaf in noisy.items()}


def size_is_off(noise):
    # Two exact two-sided tests, of sqrt(n) mean and of the chi-square, at 1e-6 / 2 each.
    far = abs(noise.mean()) * math.sqrt(len(noise)) > stats.norm.isf(ALARM / 4)
    low, high = stats.chi2.ppf([ALARM / 4, 1 - ALARM / 4], len(noise))
    return far or not low < float((noise**2).sum()) < high


def shape_is_off(noise):
    # Kolmogorov-Smirnov against N(0, 1): below 1e-6 with probability 1e-6.
    return stats.kstest(noise, "norm").pvalue < ALARM


@pytest.mark.parametrize("name", SHAPES)
def test_each_block_has_gaussian_noise_of_its_own_size(name):
    # 6 tests of 1e-6 each.
    noise = noise_of(MECHANISM)[name]
    assert not size_is_off(noise)
    assert not shape_is_off(noise)


@pytest.mark.parametrize("name", SHAPES)
def test_noise_without_the_share_is_caught(name):
    noise = noise_of(Shared(BLOCKS, 1.3))[name]
    assert size_is_off(noise)
    assert shape_is_off(noise)


def test_five_per_cent_too_little_noise_is_caught():
    assert size_is_off(noise_of(MECHANISM)["extra"] * 0.95)


def test_blocks_are_independent_of_each_other_and_of_other_posts():
    series = [*noise_of(MECHANISM).values(), *noise_of(MECHANISM, seed=12).values()]
    assert not correlated(series)
    shifted = [*noise_of(MECHANISM).values()]
    lags = [shifted[0][: COUNT - 1], *(noise[1:] for noise in shifted)]
    assert not correlated(lags)


def test_noise_repeated_between_blocks_is_caught():
    assert correlated([*noise_of(Repeated(BLOCKS, 1.3)).values()])


def test_the_stated_deviations_are_those_of_the_noise():
    found = MECHANISM.standard_deviations(SHAPES)
    assert found == pytest.approx(STATED, rel=1e-11)
    assert all(found[name] >= STATED[name] * (1 - 1e-15) for name in STATED), "never too little"


def test_noise_lies_on_the_grid_and_does_not_depend_on_the_sum():
    rng = np.random.default_rng(0)
    rows = {name: torch.from_numpy(rng.standard_normal((3, 40))) for name in SHAPES}
    total = MECHANISM.reduce(MECHANISM.clip(rows)[0])
    zeros = {name: torch.zeros_like(leaf) for name, leaf in total.items()}
    over, alone = (MECHANISM.perturb(s, SeededEntropy(3, "noise", 0)) for s in (total, zeros))
    for name, one in MECHANISM.each(dict.fromkeys(SHAPES, 40)).items():
        units = over[name].numpy() / one.step(40)
        assert np.array_equal(units, np.rint(units))
        assert torch.equal(over[name] - total[name], alone[name])


@pytest.mark.parametrize("each", [50, 2000])
def test_noise_drawn_ahead_is_the_same_noise(each):
    """Few numbers are drawn at once, many in a thread."""
    zeros = {name: torch.zeros(each, dtype=torch.float64) for name in SHAPES}
    count = MECHANISM.draws(dict.fromkeys(SHAPES, (each,)))
    assert count == 3 * each
    ahead = MECHANISM.perturb(zeros, DrawnAhead(SeededEntropy(3, "noise", 0), count))
    now = MECHANISM.perturb(zeros, SeededEntropy(3, "noise", 0))
    assert all(torch.equal(ahead[name], now[name]) for name in zeros)


# End to end: what an adversary who knows all but one client can tell.


def distinguishes(mechanism, trials=3000, width=8):
    """The shift that a client makes in the best linear test of its presence, in units of noise.

    Blocks are divided by the noise that they should have; then with and without the client a
    projection on its contribution is N(s / z, 1) and N(0, 1), s <= 1.
    """
    rows = {name: torch.full((1, width), 40.0) for name in SHAPES}
    sound = MECHANISM.standard_deviations(dict.fromkeys(SHAPES, (width,)))

    def flat(tree):
        return np.concatenate([tree[name].numpy().ravel() / sound[name] for name in SHAPES])

    direction = flat(bound(MECHANISM, rows)[0].total)
    direction /= np.linalg.norm(direction)
    sums = [{name: torch.zeros(width, dtype=torch.float64) for name in SHAPES}]
    sums.append(bound(mechanism, rows)[0].total)
    seen = [
        float(
            flat(mechanism.perturb(sums[trial % 2], SeededEntropy(9, "noise", trial))) @ direction
        )
        for trial in range(2 * trials)
    ]
    return np.mean(seen[1::2]) - np.mean(seen[::2])


def test_a_client_shifts_all_blocks_together_by_one_over_z():
    # The mean difference has deviation sqrt(2 / trials); two-sided at 1e-6.
    error = stats.norm.isf(ALARM / 2) * math.sqrt(2 / 3000)
    assert abs(distinguishes(MECHANISM) - 1 / 1.3) < error

    class NoClip(BlockSum):
        def clip(self, rows):
            whole = {name: leaf.double() for name, leaf in rows.items()}
            return whole, torch.ones(1)

    assert distinguishes(NoClip(BLOCKS, 1.3), 50) > 2
