"""Laws that every account must obey, and independent oracles where there are any."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from tests.privacy.oracles import gaussian_delta

from coterie.privacy.accounting import coalition_profile, epsilon_by_round, loss_profile, profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, NonPrivate, Participation, default_delta
from coterie.privacy.guarantee import OTHERS, Guarantee, view_of
from coterie.privacy.profiles import (
    GaussianProfile,
    gaussian_log_delta,
    gaussian_mu,
    smallest_noise,
)

EVERYONE = Participation("everyone")
POISSON = Participation("poisson", 0.2)
PAIRS = {"zero_out": ("remove", "add"), "replace": ("replace",), "fixed": ("fixed",)}
VIEWS = [
    (EVERYONE, "zero_out"),
    (EVERYONE, "replace"),
    (POISSON, "zero_out"),
    (POISSON, "replace"),
    (Participation("fixed", 0.2), "replace"),
    (Participation("poisson", 0.2, visible=True), "zero_out"),
    (Participation("fixed", 0.2, visible=True), "replace"),
]
IDS = [f"{who.kind}-{'visible' if who.visible else 'hidden'}-{relation}" for who, relation in VIEWS]
each_view = pytest.mark.parametrize(("who", "relation"), VIEWS, ids=IDS)


def eps(z, rounds, who, relation, delta=1e-5):
    return profile([Gaussian(z)] * rounds, who, relation).epsilon(delta)


# Closed forms


def test_gaussian_delta_is_the_textbook_formula():
    for mu, epsilon in itertools.product([0.01, 0.3, 1.0, 5.0, 12.0], [0.0, 0.1, 1.0, 8.0]):
        ours = GaussianProfile(mu).delta(epsilon)
        assert ours == pytest.approx(gaussian_delta(epsilon, mu), rel=1e-9, abs=2e-15)


@pytest.mark.parametrize("mu", [1e-9, 1e-7, 9e-7, 1.1e-6, 1e-4, 1e-2])
def test_tiny_mu_keeps_its_digits(mu):
    # delta(0) = erf(mu / sqrt(8)), and near 0 delta(x mu) / mu = phi(x) - x Phi(-x).
    assert GaussianProfile(mu).delta(0.0) == pytest.approx(math.erf(mu / math.sqrt(8)), rel=1e-8)
    for x in (0.5, 2.0, 5.0):
        limit = stats.norm.pdf(x) - x * stats.norm.sf(x)
        assert GaussianProfile(mu).delta(x * mu) / mu == pytest.approx(limit, rel=1e-6 + 3 * mu)


@pytest.mark.parametrize("mu", [20.0, 100.0, 1e3, 1e5])
def test_huge_mu_keeps_its_digits(mu):
    # Phi(-x) is then nearly all of delta: epsilon = mu^2/2 + x mu up to a correction of order 1.
    x = stats.norm.isf(1e-5)
    assert GaussianProfile(mu).epsilon(1e-5) == pytest.approx(mu**2 / 2 + x * mu, abs=1.1)


def test_log_delta_falls_and_never_becomes_nan():
    mus = np.logspace(-10, 6, 60)
    before = np.full_like(mus, np.inf)
    for epsilon in [0.0, *np.logspace(-10, 9, 60)]:
        now = gaussian_log_delta(epsilon, mus)
        assert not np.isnan(now).any()
        assert (now <= before + 1e-9).all()
        assert (now <= 1e-15).all()
        before = now


def test_epsilon_and_mu_invert_delta():
    for mu, delta in itertools.product([1e-3, 0.3, 1.0, 7.0, 60.0], [1e-2, 1e-5, 1e-9, 1e-30]):
        epsilon = GaussianProfile(mu).epsilon(delta)
        assert GaussianProfile(mu).delta(epsilon) <= delta
        if epsilon > 0:
            assert GaussianProfile(mu).delta(epsilon * 0.999) > delta
            assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-8)


@pytest.mark.parametrize(("relation", "scale"), [("zero_out", 1), ("replace", 2)])
def test_full_participation_is_gaussian_dp_whatever_the_sampler_is_called(relation, scale):
    noise = [3.0, 5.0, 5.0, 40.0]
    mu = scale * math.sqrt(sum(1 / z**2 for z in noise))
    for kind, visible in itertools.product(("everyone", "poisson", "fixed"), (False, True)):
        found = profile([Gaussian(z) for z in noise], Participation(kind, 1.0, visible), relation)
        assert found.epsilon(1e-5) == GaussianProfile(mu).epsilon(1e-5)
        assert found.accountant == "exact Gaussian DP"


# Privacy loss distributions against what is known


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (2.0, 7), (30.0, 1000), (150.0, 10_000)])
@pytest.mark.parametrize("relation", ["zero_out", "replace", "fixed"])
def test_losses_at_rate_one_are_gaussian_dp_from_above(z, rounds, relation):
    rate = 1 - 2.0**-50
    found = loss_profile(((z, rounds),), PAIRS[relation], rate)
    exact = GaussianProfile((1 if relation == "zero_out" else 2) * math.sqrt(rounds) / z)
    for delta in (0.1, 1e-3, 1e-5, 1e-8):
        epsilon = exact.epsilon(delta)
        assert 0.999 * delta <= exact.delta(epsilon) <= found.delta(epsilon)
        assert found.epsilon(delta) == pytest.approx(epsilon, rel=2e-4)
    for delta in (1e-9, 1e-11, 1e-13):  # where the transforms' rounding would show
        assert found.delta(exact.epsilon(delta)) >= 0.999 * delta


CASES = [(1.0, 0.3, 20), (5.0, 0.5, 300), (40.0, 0.05, 1000), (0.2, 0.1, 30)]


@pytest.mark.parametrize(("z", "rate", "rounds"), CASES)
@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_losses_agree_with_dp_accounting(z, rate, rounds, relation):
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    ours = loss_profile(((z, rounds),), PAIRS[relation], rate)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=ours.directions[0].step,
        sampling_prob=rate,
        neighboring_relation={
            "zero_out": NeighboringRelation.REPLACE_SPECIAL,
            "replace": NeighboringRelation.REPLACE_ONE,
        }[relation],
    ).self_compose(rounds)
    for delta in (1e-2, 1e-5, 1e-7):
        epsilon = theirs.get_epsilon_for_delta(delta)
        assert ours.epsilon(delta) == pytest.approx(epsilon, rel=5e-4, abs=1e-9)
        # Their second differences of delta leave some spurious mass on a fine grid.
        assert ours.delta(epsilon) >= theirs.get_delta_for_epsilon(epsilon) * (1 - 1e-5)


@pytest.mark.parametrize(("z", "rate", "rounds"), CASES)
def test_fixed_size_losses_follow_their_profile(z, rate, rounds):
    """One round against the closed form p delta(log(1 + (e^eps - 1)/p)), several against itself."""
    one = loss_profile(((z, 1),), ("fixed",), rate)
    base = GaussianProfile(2 / z)
    for epsilon in (0.0, 0.01, 0.2, 1.0, 5.0):
        exact = rate * base.delta(math.log1p(math.expm1(epsilon) / rate))
        assert exact <= one.delta(epsilon) <= exact * (1 + 2e-2) + 1e-13
    many = loss_profile(((z, rounds),), ("fixed",), rate)
    poisson = loss_profile(((z, rounds),), ("replace",), rate)
    assert many.epsilon(1e-5) >= poisson.epsilon(1e-5)


def test_poisson_losses_agree_with_simulation():
    """Mean of (1 - e^(epsilon - L))+ over 2e6 drawn losses L; false alarm below 1e-6 (Hoeffding).

    12 two-sided comparisons at 8e-8 each.
    """
    rate, z, rounds, draws = 0.3, 1.0, 5, 2_000_000
    rng = np.random.default_rng(20_240_501)
    allowed = math.sqrt(math.log(2 / 8e-8) / (2 * draws))

    def log_ratio(x):
        return np.log1p(rate * np.expm1((x - 0.5) / z**2))

    losses = {name: np.zeros(draws) for name in ("remove", "add", "replace")}
    for _ in range(rounds):
        away = rng.normal(size=draws) * z
        present = away + (rng.random(draws) < rate)
        losses["remove"] += log_ratio(present)
        losses["add"] -= log_ratio(away)
        losses["replace"] += log_ratio(present) - log_ratio(-present)
    for pair, drawn in losses.items():
        exact = loss_profile(((z, rounds),), (pair,), rate)
        for epsilon in (0.0, 0.4, 1.0, 2.0):
            seen = np.maximum(0.0, -np.expm1(np.minimum(epsilon - drawn, 0.0))).mean()
            assert abs(exact.delta(epsilon) - seen) <= allowed + 1e-3 * seen


@pytest.mark.parametrize(
    ("z", "rate", "rounds"), [(1.0, 0.01, 500), (3.0, 0.2, 200), (20, 0.5, 99)]
)
def test_losses_do_not_exceed_renyi(z, rate, rounds):
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, rounds))
    for delta in (1e-3, 1e-5, 1e-8):
        bound = accountant.get_epsilon(delta)
        assert 0.5 * bound < eps(z, rounds, Participation("poisson", rate), "zero_out", delta)
        assert eps(z, rounds, Participation("poisson", rate), "zero_out", delta) <= bound * 1.001


# Laws


@pytest.mark.parametrize("relation", ["zero_out", "replace", "fixed"])
def test_composing_at_a_stroke_is_composing_one_by_one(relation):
    together = loss_profile(((2.0, 24),), PAIRS[relation], 0.2)
    apart = loss_profile(((2.0, 1),) * 24, PAIRS[relation], 0.2)
    halves = loss_profile(((2.0, 11), (2.0, 13)), PAIRS[relation], 0.2)
    for delta in (1e-2, 1e-5, 1e-8):
        assert apart.epsilon(delta) == pytest.approx(together.epsilon(delta), rel=1e-6)
        assert halves.epsilon(delta) == pytest.approx(together.epsilon(delta), rel=1e-6)


@each_view
def test_order_of_rounds_does_not_matter_and_mixed_noise_lies_between(who, relation):
    mixed = [Gaussian(2.0), Gaussian(9.0)] * 30
    found = profile(mixed, who, relation).epsilon(1e-5)
    assert found == profile(sorted(mixed, key=repr), who, relation).epsilon(1e-5)
    assert eps(9.0, 60, who, relation) < found < eps(2.0, 60, who, relation)
    assert eps(2.0, 30, who, relation) < found


@each_view
def test_nearly_equal_noise_costs_nearly_the_same(who, relation):
    """The general account for rounds that differ meets the special one for rounds that do not."""
    equal = profile([Gaussian(4.0)] * 60, who, relation)
    nearly = profile([Gaussian(4.0), Gaussian(4.0 * (1 - 1e-9))] * 30, who, relation)
    for delta in (1e-2, 1e-5, 1e-8):
        assert nearly.epsilon(delta) == pytest.approx(equal.epsilon(delta), rel=2e-3)
        assert nearly.epsilon(delta) >= equal.epsilon(delta) * (1 - 1e-6)


@each_view
def test_monotone_in_noise_rounds_and_delta(who, relation):
    by_noise = [eps(z, 50, who, relation) for z in (0.05, 0.5, 1, 3, 10, 100)]
    assert by_noise == sorted(by_noise, reverse=True)
    by_rounds = [eps(3.0, rounds, who, relation) for rounds in (1, 2, 10, 100, 1000)]
    assert by_rounds == sorted(by_rounds)
    one = profile([Gaussian(3.0)] * 50, who, relation)
    by_delta = [one.epsilon(delta) for delta in (1e-14, 1e-11, 1e-8, 1e-5, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True)
    deltas = [one.delta(epsilon) for epsilon in (0, 0.1, 1, 5, 20)]
    assert deltas == sorted(deltas, reverse=True)


@pytest.mark.parametrize(("kind", "relation"), [("poisson", "zero_out"), ("fixed", "replace")])
@pytest.mark.parametrize("visible", [False, True])
def test_monotone_in_rate_up_to_everyone(kind, relation, visible):
    rates = (0.001, 0.01, 0.1, 0.5, 0.9, 0.999, 1.0)
    found = [eps(3.0, 50, Participation(kind, rate, visible), relation) for rate in rates]
    assert found == sorted(found)
    assert found[-2] == pytest.approx(found[-1], rel=0.01)


@pytest.mark.parametrize("z", [0.02, 0.3, 1.0, 5.0, 50.0])
def test_who_sees_more_learns_more(z):
    hidden, visible = POISSON, Participation("poisson", 0.2, visible=True)
    for relation in ("zero_out", "replace"):
        assert eps(z, 80, hidden, relation) <= eps(z, 80, visible, relation)
        assert eps(z, 80, visible, relation) <= eps(z, 80, EVERYONE, relation)
    for who in (hidden, visible, EVERYONE):
        assert eps(z, 80, who, "zero_out") <= eps(z, 80, who, "replace") * (1 + 1e-6)
    fixed = Participation("fixed", 0.2)
    together = coalition_profile([Gaussian(z)] * 80, fixed, "replace").epsilon(1e-5)
    assert eps(z, 80, hidden, "replace") <= eps(z, 80, fixed, "replace") <= together
    # The coalition knows the attendance n: a mixture of 2 sqrt(n)/z-GDP over Binomial(80, 1/5).
    for epsilon, holds in ((together, True), (0.98 * together, False)):
        mixed = sum(
            stats.binom.pmf(n, 80, 0.2) * GaussianProfile(2 * math.sqrt(n) / z).delta(epsilon)
            for n in range(1, 81)
        )
        assert (mixed <= 1e-5 * (1 + 1e-6)) == holds


@pytest.mark.parametrize("z,rate", [(3.0, 0.2), (0.7, 0.05), (1.0, 0.9)])
def test_a_coalition_gains_nothing_from_poisson_sampling(z, rate):
    """Others subtract what they sent; their own coins say nothing of the client's.

    What is left of one round is noise, or with the client's coin noise about 1: integrated here.
    """
    x = np.linspace(-12 * z, 12 * z + 1, 400_001)
    without = stats.norm.pdf(x, 0, z)
    joined = (1 - rate) * without + rate * stats.norm.pdf(x, 1, z)
    found = coalition_profile([Gaussian(z)], Participation("poisson", rate), "zero_out")
    for epsilon in (0.01, 0.1, 0.3):
        pairs = ((joined, without), (without, joined))
        gains = [np.maximum(p - math.exp(epsilon) * q, 0) for p, q in pairs]
        exact = max(float(gain.sum() * (x[1] - x[0])) for gain in gains)
        assert exact * (1 - 1e-6) <= found.delta(epsilon) <= exact * 1.01 + 1e-9


def test_visible_mixture_is_the_mean_over_attendance():
    z, rounds, rate = 2.0, 12, 0.3
    who = Participation("poisson", rate, visible=True)
    for epsilon in (0.0, 0.5, 3.0):
        mean = sum(
            stats.binom.pmf(n, rounds, rate) * GaussianProfile(math.sqrt(n) / z).delta(epsilon)
            for n in range(1, rounds + 1)
        )
        found = profile([Gaussian(z)] * rounds, who, "zero_out").delta(epsilon)
        assert found == pytest.approx(mean, rel=1e-9)


def test_visible_mixture_of_different_noise_is_bounded_tightly():
    noise, rate = [1.5, 2.0, 2.5, 4.0, 7.0, 7.0, 9.0, 13.0], 0.3
    who = Participation("poisson", rate, visible=True)
    found = profile([Gaussian(z) for z in noise], who, "replace")
    for epsilon in (0.0, 0.5, 3.0):
        mean = 0.0
        for attended in itertools.product((0, 1), repeat=len(noise)):
            mass = math.prod(rate if a else 1 - rate for a in attended)
            mu = 2 * math.sqrt(sum(a / z**2 for a, z in zip(attended, noise, strict=True)))
            mean += mass * GaussianProfile(mu).delta(epsilon)
        assert mean <= found.delta(epsilon) <= mean * 1.005


def test_a_large_plan_with_tiny_deltas_stays_finite():
    found = profile([Gaussian(10.0)] * 1000, Participation("poisson", 0.5), "zero_out")
    assert found.epsilon(1e-30) < 40
    assert found.delta(100.0) < 1e-60


# Extremes


@each_view
def test_nothing_released_costs_nothing(who, relation):
    found = profile([], who, relation)
    assert (found.epsilon(1e-9), found.delta(0.0)) == (0.0, 0.0)


@each_view
def test_one_release_without_noise_costs_everything(who, relation):
    found = profile([Gaussian(5.0), NonPrivate()], who, relation)
    assert (found.epsilon(0.5), found.delta(1e9)) == (math.inf, 1.0)


@each_view
@pytest.mark.parametrize("z", [1e-4, 0.05])
def test_little_noise_is_accounted_for(who, relation, z):
    found = eps(z, 100, who, relation)
    attended = 100 if who.rate == 1 else stats.binom.isf(1e-5, 100, who.rate)
    scale = 1 if relation == "zero_out" or (who.kind == "poisson" and not who.visible) else 2
    # The loss of n attended rounds is near n (scale / z)^2 / 2.
    assert found == pytest.approx(attended * (scale / z) ** 2 / 2, rel=0.25)


# Calibration


@each_view
@pytest.mark.parametrize(("epsilon", "delta"), [(0.01, 1e-5), (8.0, 1e-7), (3e3, 1e-3)])
def test_calibration_meets_its_target_from_below(who, relation, epsilon, delta):
    z = calibrate(epsilon, delta, weights=[1.0] * 40, participation=who, relation=relation)
    assert 0.998 * epsilon <= eps(z, 40, who, relation, delta) <= epsilon


@each_view
@pytest.mark.parametrize("rounds", [5, pytest.param(80, marks=pytest.mark.slow)])
def test_calibration_with_weights(who, relation, rounds):
    weights = [float(t + 1) ** 0.7 for t in range(rounds)]
    z = calibrate(2.0, 1e-5, weights=weights, participation=who, relation=relation)
    found = profile([Gaussian(z / weight) for weight in weights], who, relation).epsilon(1e-5)
    assert 0.998 * 2.0 <= found <= 2.0
    doubled = [2 * weight for weight in weights]
    scaled = calibrate(2.0, 1e-5, weights=doubled, participation=who, relation=relation)
    assert scaled == pytest.approx(2 * z, rel=2e-3)


def test_calibration_with_many_weights():
    weights = [float(t + 1) ** 0.7 for t in range(80)]
    who = Participation("poisson", 0.2, visible=True)
    z = calibrate(2.0, 1e-5, weights=weights, participation=who, relation="zero_out")
    found = profile([Gaussian(z / weight) for weight in weights], who, "zero_out").epsilon(1e-5)
    assert 0.998 * 2.0 <= found <= 2.0


@pytest.mark.parametrize(
    "profile_of",
    [lambda z: GaussianProfile(1.0), lambda z: GaussianProfile(9.0 if z < 5 else 0.1)],
    ids=["constant", "jump"],
)
def test_calibration_gives_up_rather_than_return_a_wrong_noise(profile_of):
    with pytest.raises(RuntimeError, match="no noise multiplier found"):
        smallest_noise(profile_of, 1.0, 1e-5, 1.0)


def test_calibration_follows_a_steep_profile():
    z = smallest_noise(lambda z: GaussianProfile(z**-9), 1.0, 1e-5, 1.0)
    assert z**-9 == pytest.approx(gaussian_mu(1.0, 1e-5), rel=1e-3)


def test_calibration_of_thousand_sampled_rounds_needs_few_profiles():
    from coterie.privacy import accounting

    before = accounting.profile_of.cache_info().misses
    who = Participation("poisson", 100 / 205)
    calibrate(1.234, 1e-5, weights=[1.0] * 1000, participation=who, relation="zero_out")
    assert accounting.profile_of.cache_info().misses - before <= 6


def test_calibration_refuses_a_delta_that_needs_no_noise():
    with pytest.raises(ValueError, match="no noise is needed"):
        calibrate(
            1.0,
            0.1,
            weights=[1.0],
            participation=Participation("poisson", 0.05),
            relation="zero_out",
        )


@each_view
def test_progress_is_the_account_of_the_first_rounds(who, relation):
    plan = [Gaussian(2.0)] * 10 + [Gaussian(5.0)] * 10
    found = epsilon_by_round(plan, who, relation, 1e-5, [0, 1, 10, 15, 20])
    assert found == sorted(found)
    assert found[0] == 0.0
    assert found[2] == eps(2.0, 10, who.to_others, relation)
    assert found[-1] == coalition_profile(plan, who, relation).epsilon(1e-5)


# The guarantee


def guarantee(**changes):
    values = {
        "events": [Gaussian(3.0)] * 20,
        "participation": POISSON,
        "relation": "zero_out",
        "delta": 1e-5,
        "clients": 100,
    }
    return Guarantee(**(values | changes))


def test_trade_off_of_gaussian_dp_is_the_closed_form():
    alphas = np.linspace(0, 1, 101)
    for z, relation in ((1.0, "zero_out"), (4.0, "replace"), (0.3, "zero_out")):
        found = guarantee(events=[Gaussian(z)], participation=EVERYONE, relation=relation)
        mu = (1 if relation == "zero_out" else 2) / z
        exact = stats.norm.cdf(stats.norm.isf(alphas) - mu)
        betas = found.trade_off(alphas)
        assert (betas <= exact + 1e-9).all()
        np.testing.assert_allclose(betas, exact, atol=1e-4)


@each_view
def test_trade_off_is_convex_decreasing_and_below_chance(who, relation):
    alphas = np.linspace(0, 1, 51)
    betas = guarantee(participation=who, relation=relation).trade_off(alphas)
    assert (np.diff(betas) <= 1e-12).all()
    assert (np.diff(betas, 2) >= -1e-9).all()
    assert (betas <= 1 - alphas + 1e-12).all()
    assert betas[0] == pytest.approx(1.0, abs=1e-6)


def test_trade_off_of_nothing_and_of_everything():
    alphas = [0.0, 0.25, 1.0]
    np.testing.assert_allclose(guarantee(events=[]).trade_off(alphas), [1.0, 0.75, 0.0])
    np.testing.assert_allclose(guarantee(events=[NonPrivate()]).trade_off(alphas), 0.0)


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"events": []},
        {"events": [Gaussian(1.5), Gaussian(1.5), NonPrivate(), Gaussian(2.5)]},
        {"participation": Participation("fixed", 0.1), "relation": "replace", "simulation": True},
        {"participation": Participation("poisson", 0.1, visible=True), "delta": 1e-7},
        {"participation": EVERYONE},
    ],
)
def test_json_is_strict_and_comes_back(changes):
    before = guarantee(**changes)
    data = strict(json.dumps(before.to_json(), allow_nan=False))
    assert Guarantee.from_json(data) == before
    assert data["epsilon"] == ("inf" if before.epsilon == math.inf else before.epsilon)
    assert sum(count for _, count in data["noise_multipliers"]) == len(before.events)
    wanted = {"unit", "relation", "view", "views", "sampling", "rate", "cohort", "rounds", "delta"}
    assert wanted | {"epsilon", "accountant", "versions", "simulation"} <= set(data)


def test_versions_are_stated_even_from_a_source_tree(monkeypatch):
    found = guarantee(participation=EVERYONE)
    assert set(found.to_json()["versions"]) == {"coterie", "dp-accounting", "scipy"}
    monkeypatch.setattr("coterie.privacy.guarantee.version_of", lambda name: None)
    assert set(found.to_json()["versions"].values()) == {"not installed"}


def test_views():
    server = {"server": math.inf, "server_secure_aggregation": math.inf}
    assert guarantee().views == {"other_clients": guarantee().epsilon, **server}
    fixed = guarantee(participation=Participation("fixed", 0.2), relation="replace")
    assert fixed.views["outsider"] < fixed.views["coalition_of_all_others"] == fixed.epsilon
    assert fixed.views["other_clients"] == fixed.epsilon and view_of(fixed) == OTHERS
    shown = guarantee(participation=Participation("fixed", 0.2, True), relation="replace")
    assert fixed.epsilon == shown.epsilon == shown.views["outsider"]
    assert guarantee(events=[]).views == {"other_clients": 0.0} | dict.fromkeys(server, 0.0)
    assert "observes the exact sum" in guarantee().to_json()["reasons"]["server_secure_aggregation"]
    assert guarantee(events=[]).to_json()["reasons"] == {}


def test_guarantee_queries_its_profile():
    found = guarantee()
    assert found.delta_at(found.epsilon) <= found.delta
    assert found.epsilon_at(1e-3) < found.epsilon == found.epsilon_at(1e-5)
    assert found.events == (Gaussian(3.0),) * 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["one client", "replaced by zero", "do not observe", "delta = 1e-05", "20 rounds"]),
        ({"relation": "replace"}, ["any other client"]),
        ({}, ["as without it, plus 1e-05.", "and do not observe who takes part."]),
        ({"participation": EVERYONE}, ["together, who observe every release.", "all 100 clients"]),
        (
            {"participation": Participation("poisson", 0.2, visible=True)},
            ["observe every", "and observe"],
        ),
        (
            {"participation": Participation("fixed", 0.2), "relation": "replace"},
            ["fixed size", "an outsider", "know from their own participation"],
        ),
        ({"events": [NonPrivate()]}, ["epsilon = inf", "NOT PRIVATE", "any number of"]),
        ({"simulation": True}, ["SIMULATION: noise from a known seed, not a guarantee"]),
    ],
)
def test_statement_says_what_holds_and_what_does_not(changes, words):
    text = guarantee(**changes).statement()
    for word in [*words, "Accountant", "Not covered", "server", "metrics", "personal model"]:
        assert word in text
    assert ("SIMULATION" in text) == changes.get("simulation", False)


def test_default_delta():
    assert [default_delta(m) for m in (1, 205, 10_000, 10**6)] == [1e-5, 1e-5, 1e-5, 1e-7]


# Refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gaussian(0.0), "noise_multiplier = 0.0.*positive finite.*NonPrivate"),
        (lambda: Gaussian(-1.0), "noise_multiplier = -1.0"),
        (lambda: Gaussian(math.nan), "noise_multiplier = nan"),
        (lambda: Gaussian(math.inf), "noise_multiplier = inf"),
        (lambda: Participation("some"), "kind = 'some'.*everyone, poisson, fixed"),
        (lambda: Participation("poisson", 0.0), "rate = 0.0.*probability"),
        (lambda: Participation("poisson", 1.5), "rate = 1.5"),
        (lambda: Participation("fixed", math.nan), "rate = nan"),
        (lambda: Participation("everyone", 0.5), "rate = 0.5.*poisson"),
        (lambda: profile([Gaussian(1.0)], EVERYONE, "add"), "relation = 'add'.*zero_out, replace"),
        (lambda: eps(1.0, 3, Participation("fixed", 0.5), "zero_out"), "replace.*Poisson.*visible"),
        (lambda: guarantee(participation=Participation("fixed", 0.5)), "fixed size"),
        (lambda: guarantee(delta=0.0), "delta = 0.0.*between 0 and 1.*default_delta"),
        (lambda: guarantee(delta=1.0), "delta = 1.0"),
        (lambda: guarantee(relation="remove"), "relation = 'remove'"),
        (lambda: guarantee(clients=0), "clients = 0"),
        (lambda: guarantee().epsilon_at(math.nan), "delta = nan"),
        (lambda: guarantee().delta_at(-1.0), "epsilon = -1.0"),
        (lambda: guarantee().trade_off([1.5]), "alphas"),
        (lambda: default_delta(0), "clients = 0"),
        (lambda: epsilon_by_round([], EVERYONE, "zero_out", 1e-5, [1]), r"rounds = \[1\].*0 to 0"),
    ],
)
def test_refusals_say_what_was_given_and_what_to_do(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"weights": []}, "weights = "),
        ({"weights": [1.0, 0.0]}, "weights = "),
        ({"relation": "both"}, "relation = 'both'"),
        ({"participation": Participation("fixed", 0.5)}, "fixed size"),
    ],
)
def test_calibration_refuses_nonsense(changes, words):
    values = {
        "epsilon": 1.0,
        "delta": 1e-5,
        "weights": [1.0],
        "participation": EVERYONE,
        "relation": "zero_out",
    }
    with pytest.raises(ValueError, match=words):
        calibrate(**(values | changes))


def test_closed_forms_load_neither_torch_nor_dp_accounting():
    code = """
import sys
import coterie.privacy.sampling, coterie.privacy.selection  # planning does not load torch either
from coterie.privacy.accounting import profile
from coterie.privacy.events import Gaussian, Participation
profile([Gaussian(1.0)], Participation("everyone"), "zero_out").epsilon(1e-5)
assert not {"torch", "dp_accounting", "scipy.stats"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hidden_fixed_cohort_of_two_hides_nothing_from_the_other_client():
    """Two clients, one drawn: whoever is not invited knows that the other is.

    The other client sees the victim's exact attendance, Binomial(10, 1/2) releases of 2/z-GDP.
    """
    plan = guarantee(
        events=[Gaussian(4.0)] * 10,
        participation=Participation("fixed", 0.5),
        relation="replace",
        clients=2,
    )
    exact = sum(
        math.comb(10, n)
        / 2**10
        * float(np.exp(gaussian_log_delta(5.8, np.array([math.sqrt(n) / 2])))[0])
        for n in range(1, 11)
    )
    assert plan.epsilon == plan.views["other_clients"] >= 5.8 > plan.views["outsider"]
    assert exact > 1e-5, "5.8 is not reached: the amplified epsilon does not hold for that client"
    assert "an outsider" in plan.statement()
