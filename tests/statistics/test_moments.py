"""Noise on moments, squares and rows: of the law that is charged for, on the grid, drawn once.

As in test_noise.py seeds are fixed, and "false alarm" is the probability over seeds that a correct
mechanism would be rejected: at most 1e-6 a test. Each statistic must also reject a mechanism that
is wrong on purpose. Laws of Laplace noise are checked without chance as well: every path of the
sampler is followed, and its probability is a fraction.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import special, stats
from tests.privacy.oracles import ALARM, correlated, memory_board, not_normal

import coterie.privacy.mechanisms as laplace_module
from coterie.core.tree import map_leaves
from coterie.privacy.entropy import DrawnAhead, SeededEntropy
from coterie.privacy.events import SQRT2
from coterie.privacy.mechanisms import (
    GaussianRows,
    GaussianSum,
    LaplaceSum,
    _bernoulli_exp,
    _Words,
    discrete_laplace,
)
from coterie.privacy.moments import GaussianGram, Squares, WishartGram, post_grid, vector_grid
from coterie.privacy.profiles import WishartProfile

pytestmark = pytest.mark.full


def zeros(*shape):
    return {"w": torch.zeros(*shape, dtype=torch.float64)}


def noise(mechanism, total, posts, seed=11):
    """What is posted over zeros, many times: leaves of one post have noise of their own each."""
    many = {f"{index:05d}": total["w"] for index in range(posts)}
    made = mechanism.perturb(many, SeededEntropy(seed, "noise", 0))
    return np.array([leaf.numpy() for leaf in made.values()])


# Symmetric Gaussian noise.

GRAM = GaussianGram(1.7, 1.3)
TAU = 1.3 * 1.7**2


class Quieter(GaussianGram):
    """Off the diagonal, the deviation is tau / 2 in place of tau / sqrt(2)."""

    def perturb(self, total, entropy):
        return map_leaves(
            lambda noisy: noisy / SQRT2 + torch.diag(noisy.diagonal()) * (1 - 1 / SQRT2),
            super().perturb(total, entropy),
        )


class Louder(GaussianGram):
    """The same deviation everywhere: private, and wasteful."""

    def perturb(self, total, entropy):
        return map_leaves(
            lambda noisy: noisy * SQRT2 - torch.diag(noisy.diagonal()) * (SQRT2 - 1),
            super().perturb(total, entropy),
        )


class Doubled(GaussianGram):
    """The sensitivity of Liang et al., 2 K, in place of K^2."""

    def perturb(self, total, entropy):
        return GaussianGram(self.bound, self.noise_multiplier * 2 / self.bound).perturb(
            total, entropy
        )


def halves(mechanism, posts=60, features=60):
    made = noise(mechanism, zeros(features, features), posts)
    assert np.array_equal(made, made.transpose(0, 2, 1)), "not symmetric"
    rows, columns = np.tril_indices(features, -1)
    diagonal = np.diagonal(made, axis1=1, axis2=2).ravel()
    tau = mechanism.noise_multiplier * mechanism.bound**2
    return diagonal / tau, made[:, rows, columns].ravel() / tau * SQRT2


@pytest.mark.parametrize("mechanism", [GRAM, GaussianGram(0.01, 37.0), GaussianGram(50.0, 0.1)])
def test_gram_noise_is_normal_of_variance_tau_squared_and_half_of_it_off_the_diagonal(mechanism):
    diagonal, off = halves(mechanism)
    assert not not_normal(diagonal)
    assert not not_normal(off)


@pytest.mark.parametrize("broken", [Quieter, Louder])
def test_another_variance_off_the_diagonal_is_caught(broken):
    diagonal, off = halves(broken(1.7, 1.3))
    assert not not_normal(diagonal)
    assert not_normal(off)
    assert not_normal(halves(Doubled(3.0, 1.3))[0])


def test_gram_noise_is_the_same_in_every_direction():
    """<S, N>_F is N(0, tau^2) for every symmetric S of norm 1: what makes mu = K^2 / tau exact."""
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal((5, 5))
    v = rng.standard_normal(5)
    directions = [np.eye(5)[:, [0]] @ np.eye(5)[[0]], np.eye(5), drawn + drawn.T, np.outer(v, v)]
    crossed = np.zeros((5, 5))
    crossed[0, 1] = crossed[1, 0] = 1
    made = noise(GRAM, zeros(5, 5), 4000)
    for direction in [*directions, crossed]:
        along = np.tensordot(made, direction / np.linalg.norm(direction)) / TAU
        # Five directions.
        assert stats.kstest(along, "norm").pvalue > ALARM / 5
        low, high = stats.chi2.ppf([ALARM / 10, 1 - ALARM / 10], len(along))
        assert low < (along**2).sum() < high


def test_gram_entries_are_independent():
    made = noise(GRAM, zeros(4, 4), 6000) / TAU
    rows, columns = np.tril_indices(4)
    entries = made[:, rows, columns] * np.where(rows == columns, 1, SQRT2)
    assert not correlated(entries.T)
    entries[:, 3] = entries[:, 0] * 0.1 + entries[:, 3] * math.sqrt(0.99)
    assert correlated(entries.T)


def test_a_client_shifts_the_gram_by_at_most_the_bound_squared_against_full_noise():
    """An adversary who knows w looks at w^T X w / |w|^2: it moves by K^2 against noise tau."""
    K, z = 3.0, 1.3
    w = torch.full((1, 4), 40.0)
    for mechanism, found in ((GaussianGram(K, z), False), (Doubled(K, z), True)):
        clipped, _ = mechanism.clip({"w": w})
        made = noise(mechanism, mechanism.reduce(clipped), 4000)
        along = np.einsum("i,nij,j->n", np.full(4, 0.5), made, np.full(4, 0.5)) / K**2
        # N(s, z^2), s <= 1 and the bound itself but for the rounding. One-sided at 1e-6 / 2 each.
        limit = 1 + stats.norm.isf(ALARM / 2) * z / math.sqrt(len(along))
        assert along.mean() + 6 * z / math.sqrt(len(along)) > 0.99
        assert along.mean() < limit
        spread = float(((along - along.mean()) ** 2).sum()) / z**2
        assert (spread < stats.chi2.ppf(ALARM / 2, len(along) - 1)) == found


MOMENTS = [
    GRAM,
    GaussianGram(1.99, 1e-7),
    GaussianGram(1.0, 1e7),
    GaussianGram(1e-3, 0.5),
    WishartGram(1.7, 5, 0.3),
    WishartGram(1.7, 2, 1e9, centred=False),
    WishartGram(1.0, 1000, 1e-6),
]


@pytest.mark.parametrize("mechanism", MOMENTS, ids=str)
def test_every_posted_moment_is_symmetric_and_on_the_grid(mechanism):
    rows = {"w": torch.randn(5, 9, generator=torch.Generator().manual_seed(0))}
    total = mechanism.reduce(mechanism.clip(rows)[0])
    before = total["w"].clone()
    value = mechanism.perturb(total, SeededEntropy(1, "noise", 0))["w"].numpy()
    assert torch.equal(total["w"], before), "the sum was changed"
    assert np.array_equal(value, value.T)
    if isinstance(mechanism, GaussianGram):
        deviation = mechanism.noise_multiplier * mechanism.bound**2
    else:
        deviation = mechanism.scale * math.sqrt(mechanism.degrees + 8)
    units = value / post_grid(mechanism.bound, deviation)
    assert np.array_equal(units, np.rint(units))


def test_the_noise_of_a_gram_is_added_to_the_sum():
    # At this size the post's grid is that of the products: the same noise, to the bit.
    mechanism = GaussianGram(1.0, 1e-4)
    rows = {"w": torch.randn(5, 9, generator=torch.Generator().manual_seed(0))}
    total = mechanism.reduce(mechanism.clip(rows)[0])
    over = mechanism.perturb(total, SeededEntropy(3, "noise", 0))["w"]
    alone = mechanism.perturb(zeros(9, 9), SeededEntropy(3, "noise", 0))["w"]
    assert torch.equal(over - total["w"], alone)


def test_huge_noise_has_no_fine_structure_from_which_the_sum_could_be_read():
    """Normals have 53 bits: far below them the posted grid must be coarser than that of the sums.

    A neighbour whose product is one grid step larger must not be told by the post's last bits: over
    the same words, the posts are the same.
    """
    mechanism = GaussianGram(1.0, 1e8)
    step = vector_grid(1.0) ** 2
    one = zeros(3, 3)
    one["w"][0, 0] = step
    same = 0
    for index in range(50):
        here = mechanism.perturb(zeros(3, 3), SeededEntropy(2, "noise", index))["w"]
        there = mechanism.perturb(one, SeededEntropy(2, "noise", index))["w"]
        same += torch.equal(here, there)
    # A step is a 2^-34th of a cell: a difference is seen with probability 50 * 2^-34 < 3e-9.
    assert same == 50


# Two posts, through the billboard.


@pytest.mark.parametrize(
    "mechanism",
    [GRAM, GaussianRows(1.0, 2.0, 40), Squares(GaussianSum(4.0, 1.1))],
    ids=lambda m: type(m).__name__,
)
def test_noise_of_two_posts_is_independent(mechanism):
    features = 200 if isinstance(mechanism, GaussianGram) else 2000
    made = memory_board(mechanism, {"w": (features,)}, posts=2, seed=21)
    first, second = (made.post([]).value["w"].numpy() for _ in range(2))
    if isinstance(mechanism, GaussianGram):
        rows, columns = np.tril_indices(features, -1)
        first, second = (x[rows, columns] / TAU * SQRT2 for x in (first, second))
    else:
        inner = mechanism.inner if isinstance(mechanism, Squares) else mechanism
        scale = inner.bound * inner.noise_multiplier
        first, second = first.ravel() / scale, second.ravel() / scale
    assert not not_normal(first)
    assert not correlated([first, second])
    assert correlated([first, first])


def test_noise_of_two_laplace_posts_is_independent():
    made = memory_board(LaplaceSum(1.0, 0.5), {"w": (10_000,)}, posts=2, seed=21)
    first, second = (made.post([]).value["w"].numpy() * 0.5 for _ in range(2))
    # Products of independent Laplace numbers have mean 0 and variance 4: by the central limit,
    # with excesses that are nothing at 1e4 numbers against a limit of 6.5 deviations for 4.9.
    assert abs((first * second).mean()) * math.sqrt(len(first)) / 2 < 6.5
    assert abs((first * first).mean()) * math.sqrt(len(first)) / 2 > 6.5


# Drawn ahead.

ALL = {
    "gram": (GRAM, (6,)),
    "wishart": (WishartGram(1.7, 5, 0.3), (6,)),
    "raw wishart": (WishartGram(1.7, 2, 0.3, 0.5, centred=False), (6,)),
    "squares": (Squares(GaussianSum(2.0, 1.5)), (6,)),
    "laplace squares": (Squares(LaplaceSum(2.0, 1.5)), (6,)),
    "laplace": (LaplaceSum(2.0, 1.5), (6,)),
    "rows": (GaussianRows(2.0, 1.5, 7), (6,)),
    "sum": (GaussianSum(2.0, 1.5), (6,)),
}


class Counted:
    """A source that notes how many words it was asked for."""

    def __init__(self):
        self.source, self.asked = SeededEntropy(4, "noise", 0), []

    def words(self, count):
        self.asked.append(count)
        return self.source.words(count)


@pytest.mark.parametrize("name", ALL)
def test_drawing_ahead_gives_the_same_post_to_the_bit(name):
    mechanism, shape = ALL[name]
    shapes = mechanism.totals({"w": shape, "b": (3,)})
    total = {key: torch.zeros(*dims, dtype=torch.float64) for key, dims in shapes.items()}
    plain = Counted()
    expected = mechanism.perturb(total, plain)
    count = mechanism.draws(shapes)
    if count:
        # One key for all normals: those drawn ahead are used, and they are enough.
        assert plain.asked == [4]
        ahead = Counted()
        drawn = DrawnAhead(ahead, count)
        found = mechanism.perturb(total, drawn)
        assert ahead.asked == [4] and drawn._used == count
        assert all(torch.equal(found[key], leaf) for key, leaf in expected.items())
    else:
        assert set(plain.asked) == {64}
    assert {key: tuple(leaf.shape) for key, leaf in expected.items()} == dict(shapes)
    posted = memory_board(mechanism, {"w": shape, "b": (3,)}, seed=4).post([]).value
    assert all(torch.equal(posted[key], leaf) for key, leaf in expected.items())


# Laplace noise: the exact law.


class _Ask(Exception):  # noqa: N818
    """The script is at its end: one of these answers follows, with its probability."""

    def __init__(self, choices):
        self.choices = choices


class _Again(Exception):  # noqa: N818
    """The sampler rejected what it had and starts over."""


class Script:
    """Answers as written; asks for the next when it comes to the end."""

    def __init__(self, answers):
        self.left = list(answers)
        self.asked = []

    def choose(self, choices):
        if not self.left:
            raise _Ask(choices)
        return self.left.pop(0)

    def below(self, limit):
        if limit == 1:
            return 0
        return self.choose((number, Fraction(1, limit)) for number in range(limit))


class Compared(Script):
    """Draws that are only compared with a threshold: two answers each, however large the limit."""

    def below(self, limit):
        return Drawn(self, limit)


class Drawn:
    def __init__(self, script, limit):
        self.script, self.limit = script, limit

    def __lt__(self, over):
        under = Fraction(over, self.limit)
        return self.script.choose([(True, under), (False, 1 - under)])


class Attempt(Script):
    """Whole numbers below a scale that is asked for once in an attempt, and coins of exp(-x)."""

    def below(self, limit):
        if limit in self.asked:
            raise _Again
        if limit != 2:
            self.asked.append(limit)
        return super().below(limit)

    def coin(self, over, under):
        chance = math.exp(-over / under)
        return self.choose([(True, chance), (False, 1 - chance)])


def paths(script, draw, least):
    """Probabilities of a sampler's outputs, rejection among them: every likely path followed."""
    found, left = {}, 0
    waiting = [((), 1)]
    while waiting:
        answers, chance = waiting.pop()
        if chance < least:
            left += chance
            continue
        try:
            output = draw(script(answers))
        except _Ask as ask:
            waiting += [((*answers, given), chance * p) for given, p in ask.choices if p]
            continue
        except _Again:
            output = None
        found[output] = found.get(output, 0) + chance
    return found, left


@pytest.mark.parametrize(("over", "under"), [(0, 3), (1, 3), (1, 1), (2, 3), (5, 7), (7, 10**12)])
def test_the_coin_falls_with_probability_exp(over, under):
    found, left = paths(
        Compared, lambda words: _bernoulli_exp(over, under, words), Fraction(1, 10**18)
    )
    assert sum(found.values()) + left == 1
    assert left < 1e-15
    assert float(found.get(True, 0)) == pytest.approx(math.exp(-over / under), rel=1e-14)


@pytest.mark.parametrize("scale", [3, 5, 17])
def test_the_paths_of_the_laplace_sampler_have_the_exact_law(scale, monkeypatch):
    """Given exact coins (above), an attempt gives x with a probability prop. to exp(-|x|/scale)."""
    monkeypatch.setattr(
        laplace_module, "_bernoulli_exp", lambda over, under, words: words.coin(over, under)
    )
    found, left = paths(Attempt, lambda words: discrete_laplace(scale, words), 1e-14)
    kept = 1 - found.pop(None)
    assert left < 1e-11
    decay = math.exp(-1 / scale)
    for x in range(-10 * scale, 10 * scale + 1):
        exact = (1 - decay) / (1 + decay) * decay ** abs(x)
        assert found[x] / kept == pytest.approx(exact, rel=1e-9)
    assert sum(found.values()) / kept == pytest.approx(1, rel=1e-9)
    # So that outputs of neighbouring sums are within exp(distance / scale), to rounding.
    assert max(abs(math.log(found[x + 1] / found[x])) for x in range(-50, 50)) < (
        (1 + 1e-9) / scale
    )


def test_neighbouring_outputs_have_probabilities_within_a_factor_of_e_to_epsilon():
    """Every pair of neighbouring sums in two dimensions, every output, in exact arithmetic.

    p(y | a) is proportional to exp(-|y - a|_1 / scale): the log-ratio is a fraction. Among grid
    sums whose l1 distance is at most the bound it reaches epsilon and never exceeds it; at
    distances that an l2 clip would allow it does.
    """
    bound_steps, scale = 4, 3
    epsilon = Fraction(bound_steps, scale)
    reach = range(-6, 7)

    def worst(left, right):
        return max(
            Fraction(
                abs(y - right[0]) + abs(z - right[1]) - abs(y - left[0]) - abs(z - left[1]), scale
            )
            for y in reach
            for z in reach
        )

    moves = list(itertools.product(range(-4, 5), repeat=2))
    inside = [m for m in moves if abs(m[0]) + abs(m[1]) <= bound_steps]
    round_ = [m for m in moves if m[0] ** 2 + m[1] ** 2 <= bound_steps**2]
    assert max(worst((0, 0), move) for move in inside) == epsilon
    assert max(worst((0, 0), move) for move in round_) > epsilon


@pytest.mark.parametrize(("limit", "shift", "cells"), [(6, 0, 6), (2**70, 67, 8), (5 << 64, 64, 5)])
def test_words_below_a_limit_are_uniform(limit, shift, cells):
    # 20,000 numbers, by their leading digits and by parity: two chi-square tests.
    words = _Words(SeededEntropy(8, "noise", 0))
    drawn = [words.below(limit) for _ in range(20_000)]
    assert max(drawn) < limit
    assert min(drawn) >= 0
    for cell, count in ((lambda n: n >> shift, cells), (lambda n: n & 1, 2)):
        seen = np.bincount([cell(n) for n in drawn], minlength=count)
        assert stats.chisquare(seen).pvalue > ALARM / 2


def test_laplace_draws_fit_the_exact_probabilities_at_a_small_scale():
    # Chi-square at 1e-6, over cells of at least 50 expected draws, where its limit law holds.
    scale, count = 2, 50_000
    words = _Words(SeededEntropy(6, "noise", 0))
    drawn = np.array([discrete_laplace(scale, words) for _ in range(count)])
    decay = math.exp(-1 / scale)
    edge = 10
    inner = np.arange(-edge, edge + 1)
    chances = (1 - decay) / (1 + decay) * decay ** np.abs(inner)
    tail = decay ** (edge + 1) / (1 + decay)
    expected = count * np.array([tail, *chances, tail])
    seen = [(drawn < -edge).sum(), *[(drawn == x).sum() for x in inner], (drawn > edge).sum()]
    assert expected.min() > 50
    assert stats.chisquare(seen, expected, sum_check=False).pvalue > ALARM
    # It can fail: zero twice as likely (no redraw of minus zero), or a continuous law rounded.
    wrong = np.where(inner == 0, 2.0, 1.0) * chances
    twice = count * np.array([tail, *wrong, tail]) / (2 * tail + wrong.sum())
    assert stats.chisquare(seen, twice).pvalue < ALARM
    laplace = stats.laplace(scale=scale)
    cells = laplace.cdf(inner + 0.5) - laplace.cdf(inner - 0.5)
    rounded = count * np.array([laplace.cdf(-edge - 0.5), *cells, laplace.sf(edge + 0.5)])
    assert stats.chisquare(seen, rounded, sum_check=False).pvalue < ALARM


REAL = LaplaceSum(0.7, 0.3)


def laplace_noise(mechanism=REAL, count=40_000):
    return noise(mechanism, zeros(count), 1)[0]


def test_laplace_noise_at_the_real_scale():
    made = laplace_noise()
    scale = REAL.bound / REAL.epsilon
    sizes = np.abs(made) / scale
    share = ALARM / 6
    # A scale is some 2^31 steps: sizes are exponential up to 1e-9, their sum is a gamma number.
    low, high = stats.gamma.ppf([share / 2, 1 - share / 2], len(sizes))
    assert low < sizes.sum() < high
    assert stats.kstest(made / scale, "laplace").pvalue > share
    assert stats.binomtest(int((made > 0).sum()), len(made)).pvalue > share
    for threshold in (4.0, 8.0, 10.0):
        seen = int((sizes > threshold).sum())
        chance = math.exp(-threshold)
        assert stats.binom.cdf(seen, len(sizes), chance) > share / 2
        assert stats.binom.sf(seen - 1, len(sizes), chance) > share / 2
    # And a mechanism with half the noise is caught.
    assert not low < (np.abs(laplace_noise(replace(REAL, epsilon=0.6))) / scale).sum() < high


def test_laplace_noise_is_on_the_grid_to_the_last_step():
    """Low-order bits are uniform wherever the number lies: no gap, no lump, as floats have."""
    units = laplace_noise() / REAL.step()
    assert np.array_equal(units, np.rint(units))
    whole = np.abs(units).astype(np.int64)
    far = whole > 3 * REAL.bound / REAL.epsilon / REAL.step()
    for part in (whole, whole[far]):
        # About 2,000 far out; 16 cells, exactly uniform up to 1e-8. Two tests.
        assert len(part) > 1500
        assert stats.chisquare(np.bincount(part & 15, minlength=16)).pvalue > ALARM / 2


def test_laplace_noise_reaches_beyond_twenty_scales_and_is_whole_there():
    # The path that leads there: a rest of 12345677 that is kept, 25 times one more scale, plus.
    scale = 2**31 + 11
    found = discrete_laplace(scale, Script([12_345_677, scale - 1, *heads(25), 1]))
    assert found == 12_345_677 + 25 * scale
    # Rare numbers survive the addition to a sum and the way to float64.
    step = REAL.step()
    assert Fraction(float(found) * step + 2**22 * 2.0**30 * step) == Fraction(step) * (
        found + 2**52
    )


def heads(times):
    """Answers for which a coin of probability exp(-1) falls heads so often, then tails.

    below(1) is always 0 < 1; then below(2) < 1 makes count 3 and asks below(3); an answer of 1 or
    more ends it: odd counts are heads.
    """
    return [0, 1] * times + [1]


# Wishart noise.

RAW = WishartGram(1.7, 5, 0.3, centred=False)
CENTRED = WishartGram(1.7, 5, 0.3)
FEATURES, FREEDOM = 4, 8
POSTS = 4000


@pytest.fixture(scope="module")
def raw():
    return noise(RAW, zeros(FEATURES, FEATURES), POSTS) / RAW.scale


def test_raw_wishart_noise_has_mean_nu_times_the_scale(raw):
    # Diagonal entries are independent chi-squares of nu degrees: so is their sum, of all degrees.
    diagonal = np.diagonal(raw, axis1=1, axis2=2)
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], FREEDOM * diagonal.size)
    assert low < diagonal.sum() < high
    assert bool((np.linalg.eigvalsh(raw)[:, 0] > 0).all())
    # One degree more or less would be caught.
    assert not low < diagonal.sum() * (FREEDOM + 1) / FREEDOM < high


def test_centred_wishart_noise_is_the_raw_one_less_its_public_mean(raw):
    centred = noise(CENTRED, zeros(FEATURES, FEATURES), 200) / CENTRED.scale
    public = FREEDOM * np.eye(FEATURES)
    step = post_grid(1.7, 0.3 * math.sqrt(FREEDOM)) / 0.3
    assert np.abs(centred + public - raw[:200]).max() <= 1.01 * step
    # Mean zero, of the trace as a whole: 1e-6 by the chi-square of the sum.
    traces = np.trace(centred, axis1=1, axis2=2).sum()
    degrees = FREEDOM * FEATURES * 200
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], degrees)
    assert low < traces + degrees < high


def test_wishart_noise_is_chi_square_in_every_direction(raw):
    # x^T E x / (c |x|^2) is chi-square of nu degrees, hence of variance 2 nu. Three directions.
    rng = np.random.default_rng(1)
    for x in (np.eye(FEATURES)[0], np.ones(FEATURES), rng.standard_normal(FEATURES)):
        along = np.einsum("i,nij,j->n", x, raw, x) / (x @ x)
        assert stats.kstest(along, stats.chi2(FREEDOM).cdf).pvalue > ALARM / 3
        # Its variance 2 nu = 16, within 8 standard errors (5 for a normal mean; powers of four have
        # heavier tails): the fourth central moment is (12 nu + 48) nu.
        error = math.sqrt((12 * FREEDOM + 48) * FREEDOM - (2 * FREEDOM) ** 2) / math.sqrt(POSTS)
        assert abs(along.var() - 2 * FREEDOM) < 8 * error


def test_wishart_entries_off_the_diagonal_have_mean_zero_and_variance_nu(raw):
    # Sums of nu products of normals, six entries: 5.4 deviations for means of 4,000 that were
    # normal; 6 and, for their squares, whose tails are heavier, 8 are allowed.
    rows, columns = np.tril_indices(FEATURES, -1)
    off = raw[:, rows, columns]
    assert np.abs(off.mean(axis=0)).max() < 6 * math.sqrt(FREEDOM / POSTS)
    fourth = 3 * FREEDOM**2 + 6 * FREEDOM
    error = math.sqrt((fourth - FREEDOM**2) / POSTS)
    assert np.abs((off**2).mean(axis=0) - FREEDOM).max() < 8 * error


def told(mechanism, posts, w):
    """Y = |w|^2 / (c w^T X^-1 w), all that a post of a known rest tells about a client with w."""
    inverse = np.linalg.inv(posts)
    return (w @ w) / mechanism.scale / np.einsum("i,nij,j->n", w, inverse, w)


def vector_of(mechanism):
    rows = {"w": torch.tensor([[3.0, -1.0, 0.5, 2.0]])}
    return mechanism.clip(rows)[0]["w"], mechanism.clip(rows)[0]["w"][0].numpy()


@pytest.mark.parametrize("degrees", [2, 5, 40])
def test_what_tells_a_client_is_chi_square_of_the_degrees_charged(degrees):
    """The law on which the account of Wishart events rests, of the matrices really drawn.

    Without the client Y is chi-square of event().degrees, with it the same plus |w|^2 / c: two
    Kolmogorov-Smirnov tests.
    """
    mechanism = WishartGram(1.7, degrees, 0.3, centred=False)
    event = mechanism.event()
    stacked, w = vector_of(mechanism)
    without = noise(mechanism, zeros(FEATURES, FEATURES), POSTS)
    law = stats.chi2(event.degrees).cdf
    assert stats.kstest(told(mechanism, without, w), law).pvalue > ALARM / 2
    within = noise(mechanism, mechanism.reduce({"w": stacked}), POSTS, seed=12)
    moved = float(w @ w) / mechanism.scale
    assert moved <= event.ratio
    assert moved > 0.999 * event.ratio
    y = told(mechanism, within, w)
    # The post is rounded: an inverse of an ill-conditioned matrix may move Y by far below this.
    assert y.min() > moved * (1 - 1e-5)
    assert stats.kstest(y - moved, law).pvalue > ALARM / 2
    # Other degrees would be caught.
    other = stats.chi2(event.degrees + (1 if degrees < 10 else 5)).cdf
    assert stats.kstest(told(mechanism, without, w), other).pvalue < ALARM


def test_outputs_that_a_client_makes_impossible_come_as_often_as_charged():
    mechanism = WishartGram(1.7, 6, 1.2)
    event = mechanism.event()
    _, w = vector_of(mechanism)
    posts = noise(mechanism, zeros(FEATURES, FEATURES), POSTS)
    posts += (6 + FEATURES - 1) * mechanism.scale * np.eye(FEATURES)
    impossible = np.linalg.eigvalsh(posts - np.outer(w, w))[:, 0] < 0
    chance = float(special.gammainc(3, (w @ w) / mechanism.scale / 2))
    assert stats.binomtest(int(impossible.sum()), POSTS, chance).pvalue > ALARM
    charged = WishartProfile(event.degrees, event.ratio).delta(50.0)
    assert charged == pytest.approx(chance, rel=5e-3)
    assert charged >= chance


# Rows and squares.


def test_rows_have_noise_of_the_stated_size_on_the_grid_of_a_row():
    mechanism = GaussianRows(0.7, 1.3, 300)
    made = noise(mechanism, zeros(300, 200), 1)[0]
    assert not not_normal(made.ravel() / (0.7 * 1.3))
    units = made / GaussianSum(0.7, 1.3).step(200)
    assert np.array_equal(units, np.rint(units))
    # Of 4 million cells or so 60,000 draws share few: no row has another's noise.
    assert len(np.unique(made)) > 0.99 * made.size


@pytest.mark.parametrize("inner", [GaussianSum(4.0, 1.1), LaplaceSum(4.0, 1.1)])
def test_squares_add_the_noise_of_what_is_inside(inner):
    total = {"w": torch.linspace(0, 4, 64, dtype=torch.float64)}
    found = Squares(inner).perturb(total, SeededEntropy(1, "noise", 0))["w"]
    assert torch.equal(found, inner.perturb(total, SeededEntropy(1, "noise", 0))["w"])
    assert not torch.equal(found, total["w"])


# How far noise reaches, for post-processing.


def test_the_radius_is_about_the_size_of_the_noise():
    """A public rule of thumb: within a factor of 2 of what is seen (no test of chance)."""
    for mechanism, norm in ((GaussianGram(1.7, 1.3), 2), (WishartGram(1.7, 100, 0.3), 2)):
        made = noise(mechanism, zeros(30, 30), 20)
        seen = np.linalg.norm(made, norm, axis=(1, 2)).mean()
        assert 0.5 < mechanism.radius({"w": (30, 30)}) / seen < 2
    for mechanism in (Squares(GaussianSum(4.0, 1.1)), LaplaceSum(4.0, 1.1)):
        seen = np.abs(noise(mechanism, zeros(1000), 20)).max(axis=1).mean()
        assert 0.5 < mechanism.radius({"w": (1000,)}) / seen < 2
    assert RAW.radius({"w": (4, 4)}) == 0
