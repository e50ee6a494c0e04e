"""The recomputed epsilon: against golden tables, quadrature, and the accountant of training.

It shares no code with the accountant of training, so that each is an oracle of the other.
"""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from coterie.privacy.events import (
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    Wishart,
    list_runs,
)
from coterie.privacy.guarantee import Guarantee
from coterie.verification.account import (
    Account,
    _composed,
    _wishart,
    by_view,
    count,
    gaussian_delta,
    gaussian_epsilon,
    message_epsilon,
    recompute,
    recompute_delta,
)

pytestmark = pytest.mark.full
GOLDEN = Path(__file__).parents[1] / "golden"


def rows(name):
    with (GOLDEN / name).open(newline="") as file:
        return list(csv.DictReader(file))


def account(events, kind="everyone", rate=1.0, visible=False, relation="zero_out", delta=1e-5):
    return Account(count(list_runs(events)), kind, rate, visible, relation, delta)


def test_gaussian_dp_is_that_of_the_table():
    for row in rows("gdp.csv"):
        mu, epsilon, delta = (float(row[key]) for key in ("mu", "epsilon", "delta"))
        assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=2e-3), mu
        assert gaussian_delta(epsilon, np.array([mu]))[0] == pytest.approx(delta, rel=2e-2), mu


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1.0, 5.0, 20.0])
def test_gaussian_delta_is_the_hockey_stick_of_two_gaussians(mu):
    """By quadrature over what is seen, which neither side does."""
    x = np.linspace(-12, 12 + mu, 400_001)
    for epsilon in (0.0, mu / 2, mu**2 / 2 + 2 * mu):
        gap = stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)
        expected = np.trapezoid(np.maximum(gap, 0), x)
        found = gaussian_delta(epsilon, np.array([mu]))[0]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-13)


COLUMNS = {
    "poisson_zero_out": ("poisson", False, "zero_out"),
    "poisson_zero_out_1e-5": ("poisson", False, "zero_out"),
    "poisson_replace": ("poisson", False, "replace"),
    "fixed_replace": ("fixed", False, "replace"),
    "visible_zero_out": ("poisson", True, "zero_out"),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_epsilons_of_the_golden_table(column):
    for row in rows("pmtl_epsilon.csv")[::5]:
        if not row[column]:
            continue
        kind, visible, relation = COLUMNS[column]
        clients = int(row["clients"])
        events = [Gaussian(float(row["noise_multiplier"]))] * int(row["rounds"])
        delta = 1e-5 if column.endswith("1e-5") else 1 / clients
        rate = int(row["cohort"]) / clients
        found = recompute(account(events, kind, rate, visible, relation, delta))
        assert found.high == pytest.approx(float(row[column]), rel=1e-2)


@pytest.mark.parametrize("row", rows("mpmtl_wishart.csv"), ids=lambda r: "-".join(r.values()))
def test_wishart_deltas_of_the_golden_table(row):
    degrees, ratio, epsilon = int(row["degrees"]), float(row["ratio"]), float(row["epsilon"])
    found = _composed([(_wishart(degrees, ratio), 1)])
    for pmf, expected in ((found._pmf_add, row["add"]), (found._pmf_remove, row["remove"])):
        delta = pmf.get_delta_for_epsilon(epsilon)
        assert delta == pytest.approx(float(expected), rel=5e-3, abs=1e-6)


@pytest.mark.parametrize("row", rows("mpmtl_composed.csv"), ids=lambda r: "-".join(r.values()))
def test_composed_wishart_deltas_of_the_golden_table(row):
    events = [Wishart(int(row["degrees"]), float(row["ratio"]))] * int(row["rounds"])
    found = recompute_delta(account(events), float(row["epsilon"]))
    expected = float(row["delta"])
    if row["degrees"] == "2":  # an infinite loss alone: 1 - (1 - F(r))^T
        expected = 1 - math.exp(-float(row["ratio"]) / 2 * int(row["rounds"]))
    assert found == pytest.approx(expected, rel=1e-2)


EVENTS = {
    "one": [Gaussian(1.0)],
    "many": [Gaussian(5.0)] * 100,
    "loud": [Gaussian(0.6)] * 10,
    "moments": [Gaussian(3.0, 1.4)] * 20,
    "unlike": [Gaussian(z) for z in (2.0, 3.0, 4.0, 5.0)] * 3,
    "laplace": [Laplace(0.3)] * 5,
    "laplace unlike": [Laplace(0.1)] * 3 + [Laplace(0.2)] * 4,
    "laplace many": [Laplace(0.05)] * 200,
    "beside laplace": [Gaussian(4.0)] * 10 + [Laplace(0.1)] * 4,
    "wishart": [Wishart(100, 2.5)],
    "wisharts": [Wishart(300, 1.93)] * 10,
    "wishart tail": [Wishart(10, 0.2)] * 2,
    "wishart beside": [Wishart(1000, 3.0)] * 3 + [Gaussian(8.0)] * 5,
    "local": [LocalGaussian(4.0)] * 10,
    "local beside": [LocalGaussian(4.0)] * 5 + [Gaussian(3.0)] * 5,
    "bare": [Gaussian(3.0), NonPrivate()],
    "nothing": [],
}
WHO = {
    "everyone": Participation("everyone"),
    "poisson": Participation("poisson", 0.3),
    "rare": Participation("poisson", 0.02),
    "shown": Participation("poisson", 0.3, visible=True),
    "fixed": Participation("fixed", 0.2),
    "fixed shown": Participation("fixed", 0.2, visible=True),
}


def both(events, who, relation, delta, clients=50):
    """Every epsilon by both routes; None where training accounts for no such plan."""
    try:
        stated = Guarantee(tuple(events), who, relation, delta, clients)
    except ValueError:
        return None
    found = by_view(account(events, who.kind, who.rate, who.visible, relation, delta))
    return {"epsilon": stated.views["other_clients"], **stated.views}, found


ALIKE = ("many", "laplace unlike", "laplace many", "wisharts", "wishart tail", "wishart beside")
"""Events of a kind that others have: two samplings of them are enough."""
COSTLY = ("loud", "unlike", "beside laplace")
"""Events that take longest where few take part, which is another rate of the same formula."""
PAIRS = [
    (name, who)
    for name, who in itertools.product(EVENTS, WHO)
    if (name not in ALIKE or who in ("everyone", "poisson"))
    and (name not in COSTLY or who != "rare")
]


@pytest.mark.parametrize(("name", "who"), PAIRS)
def test_both_accountants_agree(name, who):
    for relation in ("zero_out", "replace"):
        pair = both(EVENTS[name], WHO[who], relation, 1e-5)
        if pair is None:
            continue
        stated, found = pair
        assert stated.keys() == found.keys()
        for view, epsilon in stated.items():
            assert found[view].holds(epsilon), (view, relation, epsilon, found[view])


def fading(count):
    return [Gaussian(40 * t**-0.4) for t in range(1, count + 1)]


def growing(count):
    return [Gaussian(9 * 1.03**t) for t in range(count)]


PLANS = {
    "1000 rounds": ([Gaussian(2.0)] * 1000, Participation("poisson", 0.1)),
    "20 multipliers": (fading(20), WHO["poisson"]),
    "20 multipliers shown": (growing(20), WHO["shown"]),
    "very little noise": ([Gaussian(0.002)] * 3, Participation("poisson", 0.1)),
    "seldom": ([Gaussian(0.7)] * 200, Participation("poisson", 5e-4)),
}
LARGE = {
    "100 multipliers": (fading(100), WHO["poisson"]),
    "100 multipliers shown": (growing(100), WHO["shown"]),
    "very little noise, 10 rounds": ([Gaussian(0.002)] * 10, Participation("poisson", 0.1)),
    "seldom in 2000 rounds": ([Gaussian(0.7)] * 2000, Participation("poisson", 5e-4)),
}


@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, id=name) for name, plan in PLANS.items()),
        *(pytest.param(plan, id=name, marks=pytest.mark.slow) for name, plan in LARGE.items()),
    ],
)
def test_both_accountants_agree_on_hard_plans(plan):
    """Above epsilon 700 the inverse of delta in dp-accounting underflows, and is not used."""
    for relation in ("zero_out", "replace"):
        stated, found = both(*plan, relation, 1e-5)
        assert found["epsilon"].holds(stated["epsilon"]), (stated["epsilon"], found["epsilon"])


def test_no_account_is_made_up():
    """Of what training refuses, the recomputation knows no number either."""
    for event, who, relation in (
        (Gaussian(2.0), WHO["fixed"], "zero_out"),
        (Wishart(9, 0.1), WHO["everyone"], "replace"),
        (Gaussian(1e-6), WHO["poisson"], "zero_out"),
    ):
        with pytest.raises(ValueError, match=r"known|too large"):
            recompute(account([event], who.kind, who.rate, who.visible, relation))


@pytest.mark.parametrize("delta", [0.1, 1e-8, 1e-25])
def test_both_accountants_agree_at_any_delta(delta):
    for who, relation in itertools.product(WHO.values(), ("zero_out", "replace")):
        pair = both([Gaussian(2.0)] * 20, who, relation, delta)
        for view, epsilon in (pair or ({}, {}))[0].items():
            assert pair[1][view].holds(epsilon), (who, relation, view, epsilon, pair[1][view])


@pytest.mark.parametrize("name", ["many", "unlike", "laplace", "wisharts", "local"])
def test_a_number_that_is_off_does_not_hold(name):
    """Below by a thousandth is below the truth; above by a hundredth is not that plan's."""
    who = WHO["everyone" if name == "wisharts" else "poisson"]
    stated, found = both(EVENTS[name], who, "zero_out", 1e-5)
    assert found["epsilon"].holds(stated["epsilon"])
    for off in (0.999, 0.98, 1.02, 1.2):
        assert not found["epsilon"].holds(stated["epsilon"] * off), off


def test_pure_releases_add_up_at_delta_zero():
    events = [Laplace(0.25)] * 4 + [Laplace(0.5)]
    assert recompute(account(events, delta=0.0)).low == 1.5
    assert recompute(account([*events, Gaussian(1.0)], delta=0.0)).low == math.inf


def test_sums_under_secure_aggregation_count_on_honest_clients():
    views = by_view(account([LocalGaussian(2.0, honest=9)] * 4))
    assert views["server"].low == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert views["outsider"].low == pytest.approx(gaussian_epsilon(1 / 3, 1e-5))
    assert message_epsilon(account([LocalGaussian(2.0)] * 4)) == gaussian_epsilon(0.5, 1e-5)
    assert message_epsilon(account([Gaussian(2.0)])) is None


def test_printed_claims_have_their_true_delta():
    events = [Wishart(2, 1.0, claimed=0.5)] * 2
    stated = Guarantee(tuple(events), Participation("everyone"), "zero_out", 1e-5, 10)
    found = recompute_delta(account(events), 1.0)
    assert found == pytest.approx(stated.claimed_only.delta_at(1.0), rel=1e-6)
    local = [LocalGaussian(0.5, claimed=0.5)] * 2
    for who in (WHO["everyone"], WHO["poisson"]):
        stated = Guarantee(tuple(local), who, "replace", 1e-5, 10)
        found = recompute_delta(account(local, who.kind, who.rate, relation="replace"), 1.0)
        assert found == pytest.approx(stated.claimed_only.delta_at(1.0), rel=1e-2)
