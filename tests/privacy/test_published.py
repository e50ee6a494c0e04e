"""Compositions and conversions as papers print them, against values worked out by hand."""

import itertools
import math

import pytest

from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.published import published_composition, published_spending, rows_to_clients

EVERYONE = Participation("everyone")


# Formula (7).


def test_formula_seven_by_hand():
    # 100 steps of 0.01, delta = 1e-5. Drift: 100 * 0.01 * (e^0.01 - 1)/(e^0.01 + 1) = 0.005; sum of
    # squares 0.01; log(e + 0.1/1e-5) = 9.21061 < log(1e5) = 11.51293, so the third branch:
    # 0.005 + sqrt(2 * 0.01 * 9.21061) = 0.005 + 0.42920 = 0.43420.
    assert published_composition([0.01] * 100, 1e-5) == pytest.approx(0.43420, abs=1e-5)
    # Two steps of 0.5: drift 0.5 tanh(1/4) * 2 = 0.24492; sqrt(2 * 0.5 * 11.5) = 3.39: plain sum.
    assert published_composition([0.5, 0.5], 1e-5) == 1.0
    # 1000 steps of 0.1 at delta = 0.5: drift 1000 * 0.1 * tanh(0.05) = 4.99584, squares 10;
    # log(2) = 0.69315 against log(e + 6.32456) = 2.20234: the second branch,
    # 4.99584 + sqrt(20 * 0.69315) = 4.99584 + 3.72330 = 8.71914.
    assert published_composition([0.1] * 1000, 0.5) == pytest.approx(8.71914, abs=1e-4)
    # Unequal steps 0.3, 0.01, 0.02 at 1e-3, by hand: the plain sum 0.33 is the least.
    assert published_composition([0.3, 0.01, 0.02], 1e-3) == pytest.approx(0.33)


def test_at_delta_zero_epsilons_are_added():
    assert published_composition([0.1, 0.2, 0.4], 0.0) == pytest.approx(0.7)
    assert published_composition([], 0.0) == 0
    assert published_composition([], 1e-5) == 0


def test_more_steps_or_a_smaller_delta_cost_more():
    found = [published_composition([0.05] * rounds, 1e-5) for rounds in (1, 10, 100, 1000)]
    assert found == sorted(found)
    found = [published_composition([0.05] * 400, delta) for delta in (1e-2, 1e-5, 1e-9, 0.0)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(20)


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0] * 10, [0.01, 1.0], [t**0.4 for t in range(1, 60)]]
)
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0])
def test_budgets_compose_to_epsilon_and_no_further(epsilon, delta, weights):
    budgets = published_spending(epsilon, delta, weights)
    assert published_composition(budgets, delta) == pytest.approx(epsilon, rel=1e-9)
    ratios = [budget / weight for budget, weight in zip(budgets, weights, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(weights))
    more = [budget * 1.001 for budget in budgets]
    assert published_composition(more, delta) > epsilon * (1 + 1e-5)
    if delta == 0:
        assert math.fsum(budgets) == pytest.approx(epsilon)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_budgets_that_make_no_sense_are_refused(epsilon):
    with pytest.raises(ValueError, match=r"epsilon = .*expected a positive number"):
        published_spending(epsilon, 1e-5, [1.0])


# From rows to clients.

GRID = list(
    itertools.product(
        [1e-3, 0.1, 0.5, 1.0, 4.0, 20.0],
        [1e-3, 1e-5, 1e-9],
        [1, 2, 5, 50, 1000],
        [1, 10],
    )
)


def multiplier(epsilon, delta, rows, rounds):
    return rows_to_clients(epsilon, delta, [1.0] * rounds, rows)


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_never_less_noise_than_the_client_level_account_asks_for(relation):
    """Group privacy: (eps/n, delta/(n e^eps)) a row gives (eps, delta e^(-eps/n)) for n rows.

    A Gaussian of n times the shift is a chain of n rows, so n mu' <= mu(eps, delta), whatever the
    numbers; under zero_out half of it.
    """
    for epsilon, delta, rows, rounds in GRID:
        z = multiplier(epsilon, delta, rows, rounds)
        exact = calibrate(
            epsilon,
            delta,
            weights=[1.0] * rounds,
            participation=EVERYONE,
            relation=relation,
        )
        assert z >= exact, (epsilon, delta, rows, rounds)
        if relation == "zero_out":
            assert z >= 2 * exact * (1 - 1e-6)
        spent = profile([Gaussian(z)] * rounds, EVERYONE, relation)
        assert spent.delta(epsilon) <= delta


def test_the_conversion_loses_and_says_how_much():
    # By hand, one row: epsilon stays, delta becomes delta / e; mu(1, 1e-5 / e) by bisection on
    # Phi(-1/mu + mu/2) - e Phi(-1/mu - mu/2).
    def delta_of(mu):
        def phi(x):
            return math.erfc(-x / math.sqrt(2)) / 2

        return phi(-1 / mu + mu / 2) - math.e * phi(-1 / mu - mu / 2)

    low, high = 0.1, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) < 1e-5 / math.e else (low, middle)
    assert multiplier(1.0, 1e-5, 1, 1) == pytest.approx(2 / low, rel=1e-6)
    # (2/n) takes back that epsilon/n needs n times the noise; a few per cent are lost for all n.
    exact = calibrate(1.0, 1e-5, weights=[1.0], participation=EVERYONE, relation="replace")
    for rows in (1, 2, 5, 50, 1000, 10**6):
        assert 1.02 < multiplier(1.0, 1e-5, rows, 1) / exact < 1.07


def test_rounds_are_composed_exactly():
    weights = [1.0, 0.5, 0.25]
    one = multiplier(1.0, 1e-5, 20, 1)
    several = rows_to_clients(1.0, 1e-5, weights, 20)
    assert several == pytest.approx(one * math.sqrt(1 + 0.25 + 0.0625), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 0}, "rows = 0"),
        ({"epsilon": 0.0}, "epsilon = 0"),
        ({"epsilon": -1.0}, "epsilon = -1"),
        ({"epsilon": 800.0}, "epsilon = 800"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"delta": 0.0}, "use Laplace noise"),
        ({"delta": 1.0}, "delta = 1"),
    ],
)
def test_refusals(changes, words):
    given = {"epsilon": 1.0, "delta": 1e-5, "weights": [1.0], "rows": 5, **changes}
    with pytest.raises(ValueError, match=words):
        rows_to_clients(**given)


def test_the_ends_of_what_is_accepted_are_ordinary_numbers():
    for epsilon, delta, rows in ((500.0, 1e-30, 10**9), (1e-6, 1e-30, 10**6), (1e-6, 0.9, 1)):
        assert 0 < rows_to_clients(epsilon, delta, [1.0], rows) < math.inf
