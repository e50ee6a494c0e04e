"""Reference numbers for noisy second moments ("Model-Protected Multi-Task Learning").

`mpmtl_wishart.csv`: delta of one Wishart release, in both directions. `mpmtl_composed.csv`: of
several. `mpmtl_noise.csv`: for 30 features, norm bound K = 1 and epsilon 1, what noise is needed
and how large its mean spectral norm is ("centred": less its public mean), beside the noise that the
paper prints and its true delta. `mpmtl_composition.csv`: Gaussian noise for (1, delta) by five ways
of composing.
"""

import math
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats
from tests.privacy.oracles import golden

from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate, calibrate_wishart
from coterie.privacy.events import Participation, Wishart
from coterie.privacy.profiles import WishartProfile

PLAN = {"participation": Participation("everyone"), "relation": "zero_out"}
FEATURES = 30


def half_a_unit(printed):
    """Half a unit of the last digit printed."""
    digits, _, power = printed.partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


@pytest.mark.parametrize("row", golden("mpmtl_wishart.csv"), ids=lambda row: "-".join(row.values()))
def test_one_release_to_all_printed_digits(row):
    one = WishartProfile(int(row["degrees"]), float(row["ratio"]))
    for name, found in (("add", one.adding), ("remove", one.removing)):
        value = found(float(row["epsilon"]))
        assert abs(value - float(row[name])) <= half_a_unit(row[name]) * 1.001
    assert (value == 0) == (float(row["epsilon"]) >= one.ratio / 2), "removing loses at most r/2"


@pytest.mark.parametrize(
    "row", golden("mpmtl_composed.csv"), ids=lambda row: "-".join(row.values())
)
def test_several_releases(row):
    one = Wishart(int(row["degrees"]), float(row["ratio"]))
    found = profile([one] * int(row["rounds"]), **PLAN)
    assert found.delta(float(row["epsilon"])) == pytest.approx(float(row["delta"]), rel=2e-3)


def compose_by_seven(epsilon, rounds, slack):
    """The paper's (7): the least of three bounds for equal pure steps (Kairouz et al. 2015)."""
    mean = rounds * epsilon * math.tanh(epsilon / 2)
    spread = rounds * epsilon**2
    return min(
        rounds * epsilon,
        mean + math.sqrt(2 * spread * math.log(math.e + math.sqrt(spread) / slack)),
        mean + math.sqrt(2 * spread * math.log(1 / slack)),
    )


def printed_budget(rounds, slack):
    """The largest even epsilon for which (7) is at most 1."""
    return optimize.brentq(lambda e: compose_by_seven(e, rounds, slack) - 1, 1e-6, 2)


@cache
def mean_norm(kind, degrees, centred):
    """The mean spectral norm of 400 draws at unit scale; its standard error is below 1 %."""
    rng, d, draws = np.random.default_rng(7), FEATURES, 400
    if kind == "gaussian":
        free = rng.normal(size=(draws, d, d))
        noise = (free + free.transpose(0, 2, 1)) / 2
    else:  # Bartlett
        nu = degrees + d - 1
        root = np.tril(rng.normal(size=(draws, d, d)), -1)
        root += np.sqrt(rng.chisquare(nu - np.arange(d), size=(draws, d)))[:, None] * np.eye(d)
        noise = root @ root.transpose(0, 2, 1) - centred * nu * np.eye(d)
    return float(np.abs(np.linalg.eigvalsh(noise)).max(axis=1).mean())


@cache
def scale_of(kind, rounds, delta, degrees):
    """What multiplies noise of unit scale: tau, or c = K^2 / r."""
    if kind == "paper":
        # s = 2K: c = s / (2 epsilon) = 1 / epsilon.
        return 1 / printed_budget(rounds, delta)
    if kind == "gaussian":
        return calibrate(1.0, delta, weights=[1.0] * rounds, **PLAN)
    return 1 / calibrate_wishart(1.0, delta, degrees=degrees, weights=[1.0] * rounds, **PLAN)


SAMPLE = {("1", "1e-3"), ("10", "1e-4"), ("50", "1e-5")}


def mark(row):
    name = "-".join(value for value in row.values() if value)
    fast = (row["rounds"], row["delta"]) in SAMPLE
    return pytest.param(row, id=name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("row", [mark(row) for row in golden("mpmtl_noise.csv")])
def test_noise_needed_and_its_size(row):
    value, degrees = float(row["value"]), int(row["degrees"] or 0)
    scale = scale_of(row["kind"], int(row["rounds"]), float(row["delta"]), degrees)
    if row["quantity"] == "multiplier":
        assert scale == pytest.approx(value, rel=1e-2)
    elif row["quantity"] == "ratio":
        assert 1 / scale == pytest.approx(value, rel=1e-2)
    elif row["quantity"] == "true_delta":
        printed = profile([Wishart(2, 1 / scale)] * int(row["rounds"]), **PLAN)
        assert abs(printed.delta(1.0) - value) <= half_a_unit(row["value"])
    else:
        norm = scale * mean_norm(row["kind"], degrees, row["quantity"] == "centred")
        assert norm == pytest.approx(value, rel=5e-2)


def test_the_printed_mechanism_gives_delta_near_epsilon_whatever_it_claims():
    """1 - exp(-r / 2) after all rounds together, at any epsilon."""
    for rounds, delta in ((1, 1e-3), (10, 1e-5)):
        ratio = printed_budget(rounds, delta)
        found = profile([Wishart(2, ratio, claimed=ratio)] * rounds, **PLAN)
        assert found.delta(1.0) == pytest.approx(-math.expm1(-rounds * ratio / 2), rel=1e-9)
        assert found.delta(50.0) == pytest.approx(found.delta(1.0), rel=1e-9)


# Composition, by independent implementations


def by_seven(rounds, delta, noise_of):
    """Half of delta for the steps, half for (7)."""
    epsilon = printed_budget(rounds, delta / 2)
    return noise_of(epsilon, delta / 2 / rounds)


def classic(epsilon, delta):
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def analytic(epsilon, delta):
    """Balle and Wang 2018, by the textbook formula."""

    def excess(tau):
        mu = 1 / tau
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta

    return optimize.brentq(excess, 0.5, 1e4, xtol=1e-6)


def concentrated(rounds, delta):
    """rho + 2 sqrt(rho log(1/delta)) = 1 (Bun and Steinke 2016)."""
    log = math.log(1 / delta)
    rho = (math.sqrt(1 + log) - math.sqrt(log)) ** 2
    return math.sqrt(rounds / (2 * rho))


def renyi(rounds, delta):
    """Canonne, Kamath and Steinke 2020, best order."""

    def epsilon(tau):
        orders = 1 + np.logspace(-2, 4, 20_001)
        found = orders * rounds / (2 * tau**2) + np.log1p(-1 / orders)
        return (found - (math.log(delta) + np.log(orders)) / (orders - 1)).min()

    return optimize.brentq(lambda tau: epsilon(tau) - 1, 1.0, 1e3, xtol=1e-6)


@pytest.mark.parametrize(
    "row", golden("mpmtl_composition.csv"), ids=lambda row: f"T{row['rounds']}"
)
def test_composition(row):
    rounds, delta = int(row["rounds"]), float(row["delta"])
    exact = calibrate(1.0, delta, weights=[1.0] * rounds, **PLAN)
    found = {
        "classic": by_seven(rounds, delta, classic),
        "analytic": by_seven(rounds, delta, analytic),
        "zcdp": concentrated(rounds, delta),
        "renyi": renyi(rounds, delta),
        "exact": exact,
    }
    for name, value in found.items():
        assert value == pytest.approx(float(row[name]), rel=1e-2), name
    assert exact == min(found.values())
