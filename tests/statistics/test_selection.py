"""Selection as it is drawn: the law of K, the noise of scores, and an attack on what is chosen.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a sound
selection would be rejected: at most 1e-6 a test. The attack must also catch an account that forgets
what choosing costs.
"""

import math

import numpy as np
import pytest
from scipy import stats
from tests.privacy.oracles import ALARM, memory_board

from coterie.privacy.billboard import bound
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.selection import RunLaw, Selection, renyi_to_epsilon
from coterie.tune.charge import Scoring

pytestmark = pytest.mark.full

DRAWS = 200_000
DELTA = 1e-2


@pytest.mark.parametrize("law", [RunLaw(4.0), RunLaw(6.0, 0.0)])
def test_the_number_of_runs_follows_its_law(law):
    # Pearson's chi-square over cells with at least 20 expected: alarm at 1e-6.
    entropy, count = SeededEntropy(4, "selection", 0), 20_000
    drawn = np.array([law.draw(entropy) for _ in range(count)])
    expected = law.probabilities(1000) * count
    cells = int((expected >= 20).sum())
    sizes = np.bincount(np.minimum(drawn, cells + 1), minlength=cells + 2)[1:]
    wanted = np.append(expected[:cells], count - expected[:cells].sum())
    assert stats.chisquare(sizes, wanted).pvalue > ALARM
    # One run more each time is another law.
    off = np.bincount(np.minimum(drawn + 1, cells + 1), minlength=cells + 2)[1:]
    assert stats.chisquare(off, wanted).pvalue < ALARM


def test_a_posted_score_is_the_mean_with_noise_of_the_stated_size():
    # Exact tests of mean and size of normal noise, 1e-6 / 2 each.
    scoring, count = Scoring(noise_multiplier=3.0, bound=0.5), 1500
    mechanism = scoring.mechanism(1.0, 1e-5)
    board = memory_board(mechanism, {"score": ()}, posts=count, seed=8, cohort=4.0, purpose="score")
    rows = {"score": scoring.contributions(np.array([0.1, 0.2, math.nan, 0.9]))}
    posts = [board.post([bound(mechanism, rows)[0]]) for _ in range(count)]
    means = np.array([float(post.value["score"]) / post.cohort for post in posts])
    noise = (means - (0.4 + 0.3) / 4) / (3.0 * 0.5 / 4)
    assert abs(noise.mean()) * math.sqrt(count) < stats.norm.isf(ALARM / 4)
    low, high = stats.chi2.ppf([ALARM / 4, 1 - ALARM / 4], count)
    assert low < float((noise**2).sum()) < high


# --- an attack -----------------------------------------------------------------------------------

SELECTION = Selection(
    candidates=((Gaussian(10.0),),),
    score=Gaussian(1.0, 1.0),
    law=RunLaw(300.0),
    participation=Participation("everyone"),
    relation="zero_out",
    delta=DELTA,
    clients=100,
)


def chosen_runs(shift, seed):
    """Make many selections; give the best score of each and what that run posted.

    A client contributes `shift` to every sum; scores and posts are over their noise's deviation.
    """
    draw, law = np.random.default_rng(seed), SELECTION.law
    below = np.cumsum(law.probabilities(20_000))
    runs = np.searchsorted(below, draw.random(DRAWS)) + 1
    # The largest of k uniforms is u^(1/k).
    best = stats.norm.ppf(draw.random(DRAWS) ** (1 / runs))
    scores = best + shift / SELECTION.score.noise_multiplier
    posts = draw.normal(size=DRAWS) + shift / SELECTION.candidates[0][0].noise_multiplier
    return scores, posts


def log_density(scores, posts, shift):
    """The density of what is chosen, up to a constant: f'(F(s)) f(s), times that of the post."""
    gamma = SELECTION.law.gamma
    s = scores - shift / SELECTION.score.noise_multiplier
    t = posts - shift / SELECTION.candidates[0][0].noise_multiplier
    weight = -2 * np.log1p(-(1 - gamma) * stats.norm.cdf(s))  # geometric K
    return weight + stats.norm.logpdf(s) + stats.norm.logpdf(t)


def shown_epsilon():
    """Bound epsilon from below by the best test, at a confidence of 1 - 1e-6 (Clopper-Pearson)."""
    ratios = []
    for shift, seed in ((1.0, 1), (0.0, 2)):
        seen = chosen_runs(shift, seed)
        ratios.append(log_density(*seen, 1.0) - log_density(*seen, 0.0))
    found = []
    # Thresholds are fixed beforehand; Bonferroni over them, both rates and both directions.
    thresholds = np.linspace(-4, 4, 33)
    alarm = ALARM / (4 * len(thresholds))
    for sign, (hits, false) in ((1, ratios), (-1, ratios[::-1])):
        for threshold in thresholds:
            true = int((sign * hits > threshold).sum())
            wrong = int((sign * false > threshold).sum())
            low = stats.beta.ppf(alarm, true, DRAWS - true + 1) if true else 0.0
            high = stats.beta.isf(alarm, wrong + 1, DRAWS - wrong) if wrong < DRAWS else 1.0
            if low > DELTA:
                found.append(math.log((low - DELTA) / high))
    return max(found)


def test_an_attack_stays_below_the_bound_and_above_one_run():
    shown = shown_epsilon()
    assert shown <= SELECTION.chosen_alone
    assert shown > 0.3 * SELECTION.chosen_alone, "the attack is worth something"
    # An account that forgets the choice states no more than one run's epsilon: caught, whether by
    # the exact accountant or by Renyi bounds.
    forgot = SELECTION.of_runs([0]).epsilon
    by_renyi = renyi_to_epsilon(SELECTION.one_run, DELTA)
    assert 1.2 * forgot < 1.2 * by_renyi < shown
