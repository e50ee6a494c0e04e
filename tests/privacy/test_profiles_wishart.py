"""Wishart noise: the exact profile against true matrices, compositions, and what is refused."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from coterie.privacy.accounting import epsilon_by_round, profile
from coterie.privacy.calibrate import calibrate_wishart
from coterie.privacy.events import Gaussian, Laplace, NonPrivate, Participation, Wishart
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.profiles import GaussianProfile, WishartProfile, impossible

pytestmark = pytest.mark.full

EVERYONE = Participation("everyone")
POISSON = Participation("poisson", 0.2)
GRID = [(2, 0.7), (3, 0.4), (5, 2.0), (23, 4.0), (100, 2.5), (5000, 30.0)]


def of(events, who=EVERYONE):
    return profile(events, who, "zero_out")


# One release


def hockey_stick(p, q, epsilon, x):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(("degrees", "ratio"), [(4, 0.5), (5, 2.0), (23, 4.0), (100, 2.5)])
def test_one_release_is_a_shifted_chi_square(degrees, ratio):
    """Integrate the two densities on a line."""
    x = np.linspace(0, degrees + 40 * math.sqrt(2 * degrees), 2_000_001)
    away, joined = stats.chi2.pdf(x, degrees), stats.chi2.pdf(x - ratio, degrees)
    one = WishartProfile(degrees, ratio)
    for epsilon in (0.0, 0.3, 1.0, 2.5):
        added, removed = one.adding(epsilon), one.removing(epsilon)
        assert added == pytest.approx(hockey_stick(away, joined, epsilon, x), abs=2e-7)
        assert removed == pytest.approx(hockey_stick(joined, away, epsilon, x), abs=2e-7)


def draw(rng, draws, d, nu):
    """Wishart matrices as sums of outer products, which is how they are defined."""
    normal = rng.normal(size=(draws, d, nu))
    return normal @ normal.transpose(0, 2, 1)


def log_density(matrices, nu):
    """Up to a constant; -infinity off the cone.

    A rank-one change of a positive matrix leaves at most one eigenvalue negative: the sign of the
    determinant tells.
    """
    d = matrices.shape[1]
    sign, log_det = np.linalg.slogdet(matrices)
    trace = np.trace(matrices, axis1=1, axis2=2)
    return np.where(sign > 0, (nu - d - 1) / 2 * log_det - trace / 2, -np.inf)


def test_true_matrices_and_their_densities_confirm_both_directions():
    """Mean of (1 - e^(0.5 - L))+ over 100,000 matrices each; false alarm below 1e-6 (Hoeffding).

    Four two-sided comparisons at 2.5e-7 each.
    """
    d, nu, draws, epsilon = 8, 30, 100_000, 0.5
    rng = np.random.default_rng(11)
    w = rng.normal(size=d)
    w *= 2 / np.linalg.norm(w)
    allowed = math.sqrt(math.log(2 / 2.5e-7) / (2 * draws))
    one = WishartProfile(nu - d + 1, 4.0)
    assert one.adding(epsilon) == pytest.approx(0.1251, abs=5e-5)
    assert one.removing(epsilon) == pytest.approx(0.0545, abs=5e-5)
    for joined, exact in ((False, one.adding), (True, one.removing)):
        seen = draw(rng, draws, d, nu) + joined * np.outer(w, w)
        with np.errstate(invalid="ignore"):
            loss = log_density(seen, nu) - log_density(seen - np.outer(w, w), nu)
        loss = -loss if joined else loss
        for level in (epsilon, 0.0):
            gain = np.where(loss > level, -np.expm1(np.minimum(level - loss, 0)), 0.0).mean()
            assert abs(gain - exact(level)) <= allowed


@pytest.mark.parametrize(("degrees", "ratio"), GRID)
def test_no_epsilon_holds_below_the_probability_of_the_impossible(degrees, ratio):
    one, lost = WishartProfile(degrees, ratio), impossible(degrees, ratio)
    assert lost == pytest.approx(stats.chi2.cdf(ratio, degrees), rel=1e-9, abs=1e-300)
    assert one.delta(1e6) == pytest.approx(lost, rel=1e-9, abs=1e-300)
    if lost > 1e-200:
        assert one.epsilon(lost * 0.99) == math.inf
        assert one.epsilon(min(1.2 * lost, 0.999)) < math.inf
    deltas = [one.delta(epsilon) for epsilon in (0, 0.1, 0.5, 1, 2, 5)]
    assert deltas == sorted(deltas, reverse=True)


def test_a_shorter_vector_is_never_easier_to_tell():
    for degrees, ratio in GRID:
        for epsilon in (0.0, 0.3, 1.0):
            found = [WishartProfile(degrees, s * ratio).delta(epsilon) for s in (0.3, 0.9, 1.0)]
            assert found == sorted(found)


def test_many_degrees_tend_to_gaussian_dp():
    """mu = r / sqrt(2 k)."""
    degrees = 1_000_000
    one = WishartProfile(degrees, math.sqrt(2 * degrees))
    assert one.epsilon(1e-5) == pytest.approx(GaussianProfile(1.0).epsilon(1e-5), rel=1e-2)


# Several


def simulate(rng, plan, draws, adding):
    """Losses of all releases together, from chi-squares."""
    loss = np.zeros(draws)
    for event in plan:
        y = rng.chisquare(event.degrees, draws) + (0 if adding else event.ratio)
        with np.errstate(divide="ignore", invalid="ignore"):
            one = (event.degrees - 2) / 2 * np.log1p(-event.ratio / y) + event.ratio / 2
        one = np.where(y > event.ratio, one, -np.inf)
        loss += -one if adding else one
    return loss


@pytest.mark.parametrize(
    "plan",
    [
        [Wishart(3, 0.05)] * 4,
        [Wishart(12, 0.1 * (t + 1) ** 0.5) for t in range(6)],
    ],
    ids=["few-degrees", "unequal"],
)
def test_compositions_agree_with_simulation(plan):
    """Means over 1e6 draws; false alarm below 1e-6 (empirical Bernstein, Maurer and Pontil 2009).

    Six two-sided comparisons a plan, two plans, at 5e-8 each.
    """
    draws, rng = 1_000_000, np.random.default_rng(5)
    odds = math.log(4 / 5e-8)
    found = of(plan)
    for place, adding in enumerate((False, True)):
        loss = simulate(rng, plan, draws, adding)
        for epsilon in (0.1, 0.5, 1.0):
            gain = np.where(loss > epsilon, -np.expm1(np.minimum(epsilon - loss, 0)), 0.0)
            allowed = math.sqrt(2 * gain.var() * odds / draws) + 7 * odds / (3 * (draws - 1))
            ours = found.directions[place].delta(epsilon)
            assert abs(ours - gain.mean()) <= allowed + 1e-3 * ours


@pytest.mark.parametrize(("degrees", "ratio"), GRID)
def test_a_grid_lies_above_the_closed_form_and_close(degrees, ratio):
    """A harmless release beside it forces the grid."""
    exact, found = WishartProfile(degrees, ratio), of([Wishart(degrees, ratio), Gaussian(1e7)])
    for epsilon in (0.0, 0.2, 0.7, 1.5, 4.0):
        assert exact.delta(epsilon) * (1 - 1e-9) <= found.delta(epsilon)
        assert found.delta(epsilon) <= exact.delta(epsilon) * 1.002 + 1e-6


def test_two_degrees_compose_to_the_sum_of_their_ratios():
    ratios = [0.01 * t for t in range(1, 20)]
    found = of([Wishart(2, ratio) for ratio in ratios])
    assert found.delta(3.0) == pytest.approx(-math.expm1(-sum(ratios) / 2), rel=1e-9)
    assert found.epsilon(0.5) == math.inf
    assert found.epsilon(0.7) <= sum(ratios) / 2 * (1 + 1e-9)


def test_order_does_not_matter_and_more_costs_more():
    plan = [Wishart(50, 0.5), Wishart(50, 0.9), Wishart(80, 0.5)]
    whole = of(plan)
    assert whole.epsilon(1e-5) == of(plan[::-1]).epsilon(1e-5)
    for event in plan:
        assert of([event]).delta(0.5) < whole.delta(0.5)
    by_round = epsilon_by_round(plan, EVERYONE, "zero_out", 1e-5, [0, 1, 2, 3])
    assert by_round == sorted(by_round)
    assert by_round[0] == 0.0


def test_nearly_equal_ratios_cost_nearly_the_same():
    equal, nearly = of([Wishart(60, 0.5)] * 8), of([Wishart(60, 0.5), Wishart(60, 0.5 + 1e-9)] * 4)
    for delta in (1e-3, 1e-6):
        assert nearly.epsilon(delta) == pytest.approx(equal.epsilon(delta), rel=1e-3)


def test_a_ratio_beyond_all_noise_gives_everything_away():
    for events in ([Wishart(2, 1e4)], [Wishart(2, 1e4)] * 3, [Gaussian(5.0), Wishart(9, 500.0)]):
        found = of(events)
        assert (found.epsilon(0.5), found.delta(10.0)) == (math.inf, 1.0)


@pytest.mark.parametrize("visible", [False, True])
def test_sampling_amplifies_nothing(visible):
    plan = [Wishart(40, 1.0)] * 3
    for kind in ("poisson", "fixed"):
        who = Participation(kind, 0.1, visible)
        assert of(plan, who).epsilon(1e-4) == of(plan).epsilon(1e-4)


def test_a_release_without_noise_beside_it_costs_everything():
    assert of([Wishart(40, 1.0), NonPrivate()]).epsilon(0.1) == math.inf


# Calibration


@pytest.mark.parametrize("degrees", [2, 3, 30, 1000])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-3), (6.0, 1e-7)])
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_calibration_meets_its_target(degrees, epsilon, delta, rounds):
    plan = {"participation": EVERYONE, "relation": "zero_out"}
    weights = [(t + 1.0) ** 0.5 for t in range(rounds)]
    r = calibrate_wishart(epsilon, delta, degrees=degrees, weights=weights, **plan)
    found = of([Wishart(degrees, r * weight) for weight in weights])
    assert 0.999 * delta <= found.delta(epsilon) <= delta
    assert found.epsilon(delta) <= epsilon * (1 + 1e-9)


def test_calibration_with_weights_meets_its_target():
    weights = [(t + 1.0) ** 0.5 for t in range(8)]
    plan = {"weights": weights, "participation": POISSON, "relation": "zero_out"}
    r = calibrate_wishart(2.0, 1e-5, degrees=200, **plan)
    assert 0.999e-5 <= of([Wishart(200, r * weight) for weight in weights]).delta(2.0) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 0.0}, "delta = 0.0.*Wishart.*impossible.*Laplace"),
        ({"relation": "replace"}, "replace.*both directions.*zero_out"),
        ({"degrees": 1}, "degrees = 1.*nu >= d \\+ 1.*unbounded"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"weights": [0.0]}, "weights"),
    ],
)
def test_calibration_refuses(changes, words):
    values = {
        "epsilon": 1.0,
        "delta": 1e-5,
        "degrees": 30,
        "weights": [1.0],
        "participation": EVERYONE,
        "relation": "zero_out",
    }
    with pytest.raises(ValueError, match=words):
        calibrate_wishart(**(values | changes))


# The guarantee


def guarantee(events, **changes):
    values = {"participation": EVERYONE, "relation": "zero_out", "delta": 1e-5, "clients": 40}
    return Guarantee(events=events, **(values | changes))


def test_a_claim_is_stated_beside_the_truth():
    found = guarantee([Wishart(2, 0.1, claimed=0.1)] * 10)
    text = found.statement()
    assert text.startswith("NOT A GUARANTEE: this reproduces a published mechanism")
    for words in (
        "epsilon = 1 at delta = ",
        "delta = 0.3935 at that",
        "epsilon = inf",
        "10 of 10",
    ):
        assert words in text
    assert "NOT PRIVATE: epsilon is infinite at delta = 1e-05" in text
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["claimed_epsilon"] == pytest.approx(1.0)
    assert data["true_delta_at_claimed"] == pytest.approx(-math.expm1(-0.5), rel=1e-9)
    assert data["epsilon"] == "inf"
    assert "noise_multipliers" not in data
    assert Guarantee.from_json(data) == found


def test_a_simulated_reproduction_says_both():
    found = guarantee([Wishart(2, 0.1, claimed=0.1)], simulation=True)
    first, second, *_ = found.statement().splitlines()
    assert first.startswith("NOT A GUARANTEE")
    assert second.startswith("SIMULATION")


def test_a_claim_is_compared_with_its_own_releases_alone():
    found = guarantee([Wishart(2, 0.1, claimed=0.1)] * 2 + [Gaussian(1.0)])
    assert "2 of 3 releases" in found.statement()
    assert found.to_json()["true_delta_at_claimed"] == pytest.approx(-math.expm1(-0.1), rel=1e-6)


def test_a_calibrated_plan_is_a_guarantee():
    found = guarantee([Wishart(100, 1.04)] * 10)
    assert found.epsilon == pytest.approx(1.0, rel=1e-2)
    assert "NOT A" not in found.statement()
    assert "claimed_epsilon" not in found.to_json()
    assert Guarantee.from_json(found.to_json()) == found
    betas = found.trade_off([0.0, 0.5, 1.0])
    assert 0.999 < betas[0] <= 1


def test_a_trade_off_survives_an_infinite_epsilon():
    """Of k = 2: false alarms alpha are missed with at least 1 - delta - alpha (at epsilon 0)."""
    betas = guarantee([Wishart(2, 0.2)]).trade_off([0.0, 0.1, 1.0])
    lost = -math.expm1(-0.1)
    np.testing.assert_allclose(betas, [1 - lost, 1 - lost - 0.1, 0.0], atol=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wishart(1, 1.0), "degrees = 1.*nu >= d \\+ 1"),
        (lambda: Wishart(2.0, 1.0), "degrees = 2.0.*whole number"),
        (lambda: Wishart(True, 1.0), "degrees = True"),
        (lambda: Wishart(3, 0.0), "ratio = 0.0.*NonPrivate"),
        (lambda: Wishart(3, math.inf), "ratio = inf"),
        (lambda: Wishart(3, 1.0, claimed=-1.0), "claimed = -1.0"),
        (lambda: guarantee([Wishart(3, 1.0)], relation="replace"), "both directions.*2 epsilon"),
        (lambda: guarantee([Wishart(3, 1.0), Laplace(1.0)], delta=0.0), "impossible"),
        (lambda: guarantee([Wishart(3, 1.0)]).epsilon_at(0.0), "delta = 0.0.*Wishart"),
        (lambda: profile([Wishart(3, 1.0)], POISSON, "replace"), "Wishart"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
