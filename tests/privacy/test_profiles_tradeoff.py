"""Trade-off curves: closed forms, laws of every curve, attacks on explicit pairs."""

import math

import numpy as np
import pytest
from scipy import stats

from coterie.privacy.accounting import profile
from coterie.privacy.events import (
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    Wishart,
)
from coterie.privacy.guarantee import Guarantee, gdp_approximation
from coterie.privacy.profiles import (
    GaussianProfile,
    Least,
    Profile,
    PureProfile,
)

ALPHAS = np.concatenate([[0.0], np.logspace(-6, -1.5, 25), np.linspace(0.04, 1.0, 60)])
EVERYONE = Participation("everyone")
HIDDEN = Participation("poisson", 0.1)


def guarantee(events, who=EVERYONE, relation="zero_out", delta=1e-5):
    return Guarantee(tuple(events), who, relation, delta, 100)


PLANS = {
    "gaussian": guarantee([Gaussian(2.0)] * 3),
    "poisson": guarantee([Gaussian(1.0)] * 20, HIDDEN),
    "poisson replace": guarantee([Gaussian(1.0)] * 20, HIDDEN, "replace"),
    "fixed": guarantee([Gaussian(2.0)] * 5, Participation("fixed", 0.2), "replace"),
    "visible": guarantee([Gaussian(2.0)] * 20, HIDDEN.shown),
    "local": guarantee([LocalGaussian(3.0)] * 20, HIDDEN),
    "laplace": guarantee([Laplace(0.3)] * 4, delta=0.0),
    "mixed": guarantee([Laplace(0.3), Gaussian(2.0)]),
    "wishart": guarantee([Wishart(40, 1.0)] * 2),
    "one wishart": guarantee([Wishart(2, 0.4)]),
    "tiny": guarantee([Gaussian(1e4)], HIDDEN),
    "huge": guarantee([Gaussian(0.05)] * 4, HIDDEN),
    "nothing": guarantee([]),
    "no noise": guarantee([NonPrivate()]),
}


class Piece(Profile):
    """One point of a profile: (epsilon, delta)-DP, and no more known."""

    accountant = "given"

    def __init__(self, epsilon, delta):
        self.known = epsilon, delta

    def delta(self, epsilon):
        known, delta = self.known
        if epsilon >= known:
            return delta
        # The best that follows at smaller epsilons: the curve is the same.
        return 1 - (1 - delta) * (1 + math.exp(epsilon)) / (1 + math.exp(known))

    def epsilon(self, delta):
        return self.known[0] if delta >= self.known[1] else math.inf


# Closed forms.


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
def test_gaussian_curve_is_exact(mu):
    wanted = stats.norm.cdf(stats.norm.isf(ALPHAS) - mu)
    assert GaussianProfile(mu).trade_off(ALPHAS) == pytest.approx(wanted, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
def test_the_grid_lies_just_below_the_gaussian_curve(mu):
    """`Least` of one bound hides what it is: the curve then comes from its profile."""
    exact = GaussianProfile(mu).trade_off(ALPHAS)
    bound = Least((GaussianProfile(mu),)).trade_off(ALPHAS)
    assert np.all(bound <= exact + 1e-12)
    assert np.all(bound >= exact - 2e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.3, 0.01), (2.0, 0.2)])
def test_a_single_epsilon_and_delta(epsilon, delta):
    wanted = np.maximum.reduce(
        [
            np.zeros_like(ALPHAS),
            1 - delta - np.exp(epsilon) * ALPHAS,
            np.exp(-epsilon) * (1 - delta - ALPHAS),
        ]
    )
    found = Piece(epsilon, max(delta, 1e-10)).trade_off(ALPHAS)
    if delta <= 1e-10:
        assert found == pytest.approx(wanted, abs=1e-8)
    else:
        # The grid ends where delta no longer falls, and need not hit the kink.
        assert np.all(found <= wanted + 1e-9)
        assert found == pytest.approx(wanted, abs=0.02)


def test_randomised_response_and_laplace():
    """epsilon-DP has the curve of randomised response; Laplace noise lies above it, as it must."""
    epsilon = 0.8
    curve = np.maximum(1 - np.exp(epsilon) * ALPHAS, np.exp(-epsilon) * (1 - ALPHAS))
    found = PureProfile(epsilon, 1).trade_off(ALPHAS)
    assert found == pytest.approx(np.maximum(curve, 0), abs=1e-9)
    # The test of Lap(0, 1) against Lap(epsilon, 1) that is best at each level.
    level = stats.laplace.isf(ALPHAS[1:-1])
    laplace = stats.laplace.cdf(level - epsilon)
    assert np.all(found[1:-1] <= laplace + 1e-9)


def test_ends_and_extremes():
    assert PLANS["nothing"].trade_off(ALPHAS) == pytest.approx(1 - ALPHAS)
    assert np.all(PLANS["no noise"].trade_off(ALPHAS) == 0)
    assert np.all(PLANS["no noise"].detection([0.0, 0.1]) == 1)
    for name, plan in PLANS.items():
        first, last = plan.trade_off([0.0, 1.0])
        assert last == 0
        if name not in ("no noise", "wishart", "one wishart", "huge"):
            assert first == pytest.approx(1, abs=1e-6)
    # With Wishart noise some outputs are impossible: a test without false alarms finds some.
    assert PLANS["one wishart"].trade_off([0.0])[0] == pytest.approx(math.exp(-0.2), abs=1e-6)
    # Where no alarm may be false, epsilons beyond 700 would count; the bound leaves them out.
    assert PLANS["huge"].trade_off([0.0])[0] <= 1


@pytest.mark.parametrize("alphas", [[-0.1], [1.1], [math.nan]])
def test_rates_that_are_none_are_refused(alphas):
    with pytest.raises(ValueError, match="from 0 to 1"):
        PLANS["poisson"].trade_off(alphas)


def test_shapes_are_kept():
    assert PLANS["poisson"].trade_off(np.full((2, 3), 0.1)).shape == (2, 3)
    assert PLANS["poisson"].trade_off([]).shape == (0,)


# Laws of every curve.


@pytest.mark.parametrize("name", PLANS)
def test_curves_fall_are_convex_and_lie_below_chance(name):
    even = np.linspace(0, 1, 401)
    curve = PLANS[name].trade_off(even)
    assert np.all((curve >= 0) & (curve <= 1 - even + 1e-12))
    assert np.all(np.diff(curve) <= 1e-12)
    assert np.all(np.diff(curve, 2) >= -1e-9)
    assert PLANS[name].detection(even) == pytest.approx(1 - curve)


@pytest.mark.parametrize("name", [n for n in PLANS if n not in ("no noise", "huge")])
def test_curves_are_their_own_inverse(name):
    """f(f(alpha)) = alpha wherever f falls strictly: errors of both kinds play the same part."""
    curve = PLANS[name].trade_off(ALPHAS)
    inside = (curve > 1e-9) & (ALPHAS > 1e-9)
    back = PLANS[name].trade_off(np.clip(curve, 0, 1))
    assert np.all(back[inside] <= ALPHAS[inside] + 1e-9)
    top = PLANS[name].trade_off([0.0])[0]
    strict = inside & (curve < top - 1e-6)
    assert back[strict] == pytest.approx(ALPHAS[strict], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in PLANS if n != "no noise"])
def test_every_epsilon_and_delta_is_in_the_curve(name):
    """The curve implies no better (epsilon, delta) than the profile, and nearly the same."""
    plan = PLANS[name]
    curve = plan.trade_off(ALPHAS)
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        implied = float(np.max(1 - curve - math.exp(epsilon) * ALPHAS))
        assert implied <= plan.delta_at(epsilon) + 5e-3
        assert np.all(curve >= 1 - plan.delta_at(epsilon) - math.exp(epsilon) * ALPHAS - 5e-3)


def test_more_releases_are_told_more_easily():
    for event, who in (
        (Gaussian(1.0), HIDDEN),
        (Laplace(0.2), EVERYONE),
        (Gaussian(2.0), EVERYONE),
    ):
        curves = [
            profile([event] * rounds, who, "zero_out") for rounds in (1, 4, 16)
        ]  # each against the next
        few, some, many = (one.trade_off(ALPHAS) for one in curves)
        assert np.all(few >= some - 1e-6)
        assert np.all(some >= many - 1e-6)


# An explicit pair.


def test_no_attack_on_a_sampled_sum_does_better():
    """The best test of T sampled rounds, by its likelihood ratio; false-alarm rate below 1e-6.

    P: each round N(1, z^2) with probability p, else N(0, z^2); Q: always N(0, z^2). The rates of
    the test are estimated from 10^5 runs each; both estimates move by five deviations.
    """
    z, rate, rounds, runs = 1.0, 0.1, 20, 100_000
    rng = np.random.default_rng(7)

    def ratios(present):
        joined = rng.random((runs, rounds)) < rate if present else 0
        seen = joined + z * rng.standard_normal((runs, rounds))
        return np.log1p(rate * np.expm1((seen - 0.5) / z**2)).sum(axis=1)

    without, with_ = np.sort(ratios(False)), np.sort(ratios(True))
    levels = np.quantile(without, np.linspace(0.01, 0.995, 60))
    alarms = 1 - np.searchsorted(without, levels) / runs
    misses = np.searchsorted(with_, levels) / runs
    slack = 5 * np.sqrt(0.25 / runs)
    bound = PLANS["poisson"].trade_off(np.minimum(alarms + slack, 1))
    assert np.all(misses + slack >= bound)
    # And the bound is no empty one: the attack comes close.
    assert np.max(misses - PLANS["poisson"].trade_off(alarms)) < 0.03


# The approximation.


def test_the_approximation_is_exact_where_everybody_takes_part():
    for relation, events in (
        ("zero_out", [Gaussian(2.0), Gaussian(5.0)]),
        ("replace", [Gaussian(2.0, math.sqrt(2)), LocalGaussian(3.0)]),
    ):
        plan = guarantee(events, EVERYONE, relation)
        near = gdp_approximation(plan)
        assert near.mu == pytest.approx(plan.profile.mu, rel=1e-12)
        assert near.epsilon(1e-5) == pytest.approx(plan.epsilon)
        assert near.trade_off(ALPHAS) == pytest.approx(plan.trade_off(ALPHAS))
        assert "approximation, not a bound" in near.accountant


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_the_approximation_comes_close_where_many_rounds_tell_little(relation):
    plan = guarantee([Gaussian(4.0)] * 2000, Participation("poisson", 0.02), relation)
    near = gdp_approximation(plan)
    assert near.epsilon(1e-5) == pytest.approx(plan.epsilon, rel=0.02)
    assert near.trade_off(ALPHAS) == pytest.approx(plan.trade_off(ALPHAS), abs=5e-3)


def test_the_approximation_with_a_visible_cohort():
    for plan in (PLANS["visible"], PLANS["local"]):
        z = plan.events[0].noise_multiplier
        assert gdp_approximation(plan).mu == pytest.approx(math.sqrt(0.1 * 20) / z)


def test_the_approximation_is_no_bound():
    """CelebA, sigma = .65 (20 of 9343 clients, 400 steps): 0.465 where 1.415 is true."""
    plan = guarantee([Gaussian(0.65)] * 400, Participation("poisson", 20 / 9343))
    near = gdp_approximation(plan)
    assert near.epsilon(1e-5) == pytest.approx(0.465, rel=0.01)
    assert plan.epsilon == pytest.approx(1.415, rel=0.01)
    few = np.logspace(-5, -3, 5)
    assert np.all(near.trade_off(few) > plan.trade_off(few))


def test_other_noise_has_no_such_approximation():
    for name in ("laplace", "wishart", "no noise"):
        with pytest.raises(ValueError, match="only Gaussian releases"):
            gdp_approximation(PLANS[name])
    assert gdp_approximation(PLANS["huge"]).mu < math.inf
    assert gdp_approximation(guarantee([Gaussian(0.02)], HIDDEN)).mu == math.inf
