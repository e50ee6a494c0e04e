"""Attacks on posts with a hostile site in the federation: no epsilon above the ledger's.

Seeds are fixed. "False alarm" is the probability, over the choice of the seed, that a sound door
would be rejected: at most 1e-6 a test. Each attack must also catch a door that is unsound on
purpose.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.privacy.oracles import ALARM, gaussian_delta, memory_board

from coterie.privacy import validation as arrivals
from coterie.privacy.billboard import admit, admit_sum, bound
from coterie.privacy.events import Participation
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import GaussianSum

pytestmark = pytest.mark.full

DELTA = 1e-3
POSTS = 800
MECHANISM = GaussianSum(1.0, 2.0)
SHAPES = {"w": (4,)}
STEP = MECHANISM.step(4)
HONEST = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.2, 0.0, 0.0, -0.1]], dtype=torch.float64)
RING = 1 << 64


def ledger_epsilon():
    """Of one post, as the ledger counts it."""
    guarantee = Guarantee(
        events=(MECHANISM.event(),),
        participation=Participation("everyone", 1.0, visible=True),
        relation="zero_out",
        delta=DELTA,
        clients=5,
        simulation=True,
    )
    return guarantee.epsilon


class Quiet(GaussianSum):
    """A quarter of the noise that it is accounted for."""

    def perturb(self, total, entropy):
        return GaussianSum(self.bound, self.noise_multiplier / 4).perturb(total, entropy)


def open_board(seed, mechanism=MECHANISM):
    return memory_board(mechanism, SHAPES, posts=POSTS, seed=seed, cohort=4.0)


def honest(present):
    rows = HONEST.clone()
    rows[0] *= float(present)
    return bound(MECHANISM, {"w": rows})[0].total["w"].numpy()


def attacked(scores_with, scores_without):
    """A lower bound of epsilon: Clopper-Pearson on both rates, at thresholds fixed beforehand.

    Four thresholds, two directions and two rates: each at 1e-6 / 16.
    """
    each, best = ALARM / 16, 0.0
    for threshold in (-1.0, 0.0, 1.0, 2.0):
        for sign in (1, -1):
            hits = int((sign * scores_with > sign * threshold).sum())
            alarms = int((sign * scores_without > sign * threshold).sum())
            low = stats.beta.ppf(each, hits, POSTS - hits + 1) if hits else 0.0
            high = stats.beta.isf(each, alarms + 1, POSTS - alarms) if alarms < POSTS else 1.0
            if low > DELTA:
                best = max(best, math.log((low - DELTA) / high))
            if 1 - high > DELTA:
                best = max(best, math.log((1 - high - DELTA) / (1 - low)) if low < 1 else 0.0)
    return best


def play(present, message, seed, mechanism=MECHANISM):
    """Post with a hostile site that answers to earlier posts; give the attacker's scores.

    It knows its own message and what the door makes of it, takes that off, and looks along the
    client's contribution.
    """
    board, scores, last = open_board(seed, mechanism), [], np.zeros(4)
    sent, known = honest(present), honest(False)
    for _ in range(POSTS):
        hostile, _ = admit(mechanism, {"w": message(last)}, np.array([2, 3]), SHAPES)
        part, _ = admit(mechanism, {"w": sent}, np.array([0, 1]), SHAPES)
        last = board.post([part, hostile]).value["w"].numpy()
        left = last - hostile.total["w"].numpy() - known
        scores.append(float(left.sum() / 2 / mechanism.noise_multiplier))
    board.ledger.close()
    return np.array(scores)


MESSAGES = {
    "nan": lambda last: np.array([math.nan, 1.0, 0.0, 0.0]),
    "huge": lambda last: np.full(4, 1e308),
    "off the grid": lambda last: np.full(4, 0.3 + STEP / 3),
    "against the last post": lambda last: -1e6 * last + STEP / 7,
}


def test_the_ledgers_epsilon_is_that_of_the_closed_form():
    assert gaussian_delta(ledger_epsilon(), 0.5) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_hostile_site_makes_no_post_tell_more(name):
    with_client = play(True, MESSAGES[name], seed=1)
    without = play(False, MESSAGES[name], seed=2)
    assert attacked(with_client, without) <= ledger_epsilon()
    # What is left after the hostile part is the noise alone: N(0, 1), Kolmogorov-Smirnov at 1e-6.
    assert stats.kstest(without, "norm").pvalue > ALARM
    # And the client moves it by its bound: N(1 / 2, 1), to the rounding of the clip.
    assert stats.kstest(with_client - 0.5, "norm").pvalue > ALARM


def masked_sum(present, aim):
    """A sum out of the ring, with hostile numbers that bring the sum without the client to aim."""
    whole = [int(v) for v in honest(present) / STEP]
    hide = [aim - int(v) for v in honest(False) / STEP]
    ring = [(a + b) % RING for a, b in zip(whole, hide, strict=True)]
    return np.array([float(v - RING if v >= RING // 2 else v) for v in ring]) * STEP


def play_sum(present, aim, seed):
    board, scores = open_board(seed), []
    known = admit_sum(MECHANISM, {"w": masked_sum(False, aim)}, np.arange(5), SHAPES)
    opened = masked_sum(present, aim)
    for _ in range(POSTS):
        part = admit_sum(MECHANISM, {"w": opened}, np.arange(5), SHAPES)
        left = board.post([part]).value["w"].numpy() - known.total["w"].numpy()
        scores.append(float(left.sum() / 2 / MECHANISM.noise_multiplier))
    board.ledger.close()
    return np.array(scores)


AIMS = {
    "inside": 0,
    "the limit": round(5 / STEP),
    "twice the limit": round(10 / STEP) - 3,
    "where the ring turns over": RING // 2 - 3,
}


@pytest.mark.parametrize("name", AIMS)
def test_a_hostile_part_of_a_masked_sum_makes_no_post_tell_more(name):
    scores = play_sum(True, AIMS[name], seed=3), play_sum(False, AIMS[name], seed=4)
    assert attacked(*scores) <= ledger_epsilon()


def test_the_attack_catches_a_sum_that_is_clamped(monkeypatch):
    # The plain clamp, where the ring turns over: the sum jumps from one end to the other.
    monkeypatch.setattr(arrivals, "_fold", lambda whole, most: np.clip(whole, -most, most))
    aim = AIMS["where the ring turns over"]
    scores = play_sum(True, aim, seed=3), play_sum(False, aim, seed=4)
    assert attacked(*scores) > 2 * ledger_epsilon()


def test_the_attack_catches_too_little_noise():
    quiet = Quiet(1.0, 2.0)
    scores = (play(there, MESSAGES["nan"], 5 + there, quiet) for there in (True, False))
    assert attacked(*scores) > ledger_epsilon()
