"""How a budget is spread over rounds: formulas, what the noise makes of them, refusals, text."""

import itertools
import json
import math
import tomllib

import pytest

from coterie.core.config import ConfigError, to_toml
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.calibrate import Even, Geometric, Power, Spending
from coterie.privacy.events import Gaussian, Laplace, Wishart
from coterie.privacy.noise import GaussianNoise, LaplaceNoise, PublishedWishart, WishartNoise
from coterie.privacy.profiles import GaussianProfile, gaussian_mu

SHAPES = [Even(), Power(), Power(-0.5), Power(0.0), Geometric(), Geometric(1.1), Geometric(1.0)]
NOISES = [
    GaussianNoise(),
    LaplaceNoise(),
    WishartNoise(degrees=37),
    PublishedWishart(),
    PublishedWishart(sensitivity="K^2"),
]


def plan_of(spend, rounds=6, **changes):
    given = {"epsilon": 1.0, "delta": 1e-5, "spend": spend, **changes}
    return Plan(method=MPMTL(), privacy=Privacy(**given), rounds=rounds)


# Formulas: budgets eps_t of Liang et al., section 3.5, over the largest.


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_shares_follow_the_formulas(rounds):
    times = range(1, rounds + 1)
    assert Even().weights(rounds) == (1.0,) * rounds
    for alpha in (0.4, -0.4, 2.0, 0.0):
        expected = [t**alpha for t in times]
        found = Power(alpha).weights(rounds)
        assert found == pytest.approx([e / max(expected) for e in expected], rel=1e-12)
    for Q in (0.97, 1.05, 1.0):
        expected = [Q**-t for t in times]
        found = Geometric(Q).weights(rounds)
        assert found == pytest.approx([e / max(expected) for e in expected], rel=1e-12)


def test_shares_by_hand():
    assert Power(2.0).weights(4) == pytest.approx((1 / 16, 1 / 4, 9 / 16, 1))
    assert Power(-1.0).weights(4) == pytest.approx((1, 1 / 2, 1 / 3, 1 / 4))
    assert Geometric(0.5).weights(3) == pytest.approx((1 / 4, 1 / 2, 1))
    assert Geometric(2.0).weights(3) == pytest.approx((1, 1 / 2, 1 / 4))
    assert (Power().alpha, Geometric().Q) == (0.4, 0.97)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_share_is_one(shape):
    weights = shape.weights(9)
    assert len(weights) == 9
    assert max(weights) == pytest.approx(1.0, rel=1e-12)
    assert min(weights) > 0


# What the noise makes of them.


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounds_get_their_share_of_mu(shape, relation):
    """mu_t = mu_tot eps_t / sqrt(sum eps_s^2), mu_tot of (epsilon, delta) by Gaussian DP."""
    for rounds in (1, 8):
        plan = plan_of(shape, rounds, relation=relation)
        whole = gaussian_mu(1.0, 1e-5)
        shares = shape.weights(rounds)
        unit = math.sqrt(2.0) if relation == "replace" else 1.0
        found = [unit / z for z in plan.noise_multipliers(50)]
        norm = math.sqrt(sum(share**2 for share in shares))
        assert found == pytest.approx([whole * share / norm for share in shares], rel=1e-7)
        together = math.sqrt(sum(mu**2 for mu in found))
        assert GaussianProfile(together).epsilon(1e-5) <= 1.0
        assert plan.guarantee(50).epsilon == pytest.approx(1.0, rel=1e-6)


def test_rounds_get_their_share_of_a_pure_epsilon():
    plan = Plan(
        method=MPMTL(structure="group_sparse"),
        privacy=Privacy(epsilon=2.0, spend=Power(1.0), noise=LaplaceNoise()),
        rounds=4,
    )
    events = [mechanism.event() for mechanism in plan.mechanisms(50)]
    assert all(isinstance(event, Laplace) for event in events)
    assert [event.epsilon for event in events] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert plan.delta(50) == 0


def test_rounds_get_their_share_of_a_wishart_ratio():
    plan = plan_of(Geometric(0.5), 3, noise=WishartNoise(degrees=60))
    events = [mechanism.event() for mechanism in plan.mechanisms(50)]
    assert all(isinstance(event, Wishart) for event in events)
    first, second, third = (event.ratio for event in events)
    assert third / second == pytest.approx(2)
    assert second / first == pytest.approx(2)


def test_weights_by_hand_do_the_same_as_a_shape():
    shape = Power(0.7)
    named = plan_of(shape, 5)
    listed = plan_of(Even(), 5, budget=tuple(7.5 * w for w in shape.weights(5)))
    assert named.noise_multipliers(50) == pytest.approx(listed.noise_multipliers(50), rel=1e-7)


def test_a_noise_multiplier_is_that_of_a_round_of_weight_one():
    plan = plan_of(Power(1.0), 4, epsilon=None, noise_multiplier=3.0)
    assert plan.noise_multipliers(50) == pytest.approx((12.0, 6.0, 4.0, 3.0))
    assert plan.guarantee(50).epsilon < math.inf


# Refusals.


@pytest.mark.parametrize(
    ("shape", "rounds"),
    [
        (Power(-50.0), 40),
        (Power(50.0), 40),
        (Power(1e308), 3),
        (Power(-1e308), 3),
        (Power(math.inf), 3),
        (Power(math.nan), 3),
        (Geometric(0.1), 40),
        (Geometric(10.0), 40),
        (Geometric(1e-300), 3),
        (Geometric(1e300), 40),
        (Geometric(0.97), 1000),
    ],
    ids=str,
)
def test_a_shape_that_gives_a_round_nothing_is_refused(shape, rounds):
    with pytest.raises(ValueError, match="flatter spending") as refused:
        shape.weights(rounds)
    assert f"over {rounds} rounds" in str(refused.value)
    # A plan is refused before anything is computed.
    with pytest.raises(ValueError, match="flatter spending"):
        plan_of(shape, rounds)


def test_a_shape_that_cannot_be_computed_is_refused():
    class Steep(Spending):
        kind = "steep"

        def shares(self, rounds):
            return tuple(math.exp(1000.0 * t) for t in range(rounds))

    with pytest.raises(ValueError, match="flatter spending"):
        Steep().weights(3)


@pytest.mark.parametrize("Q", [0.0, -1.0, math.inf, math.nan])
def test_ratios_that_make_no_sense_are_refused(Q):
    with pytest.raises(ValueError, match=r"Q = .*positive number, such as 0.97"):
        Geometric(Q)


def test_weights_and_a_shape_are_not_both_given():
    with pytest.raises(ValueError, match="weights or a shape"):
        Privacy(epsilon=1.0, spend=Power(), budget=(1.0, 2.0))
    for budget in ((1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="positive weights"):
            Privacy(epsilon=1.0, budget=budget)
    with pytest.raises(ValueError, match="one weight per round"):
        plan_of(Even(), 3, budget=(1.0, 2.0))


# Text.


@pytest.mark.parametrize(
    ("shape", "noise"), list(zip(SHAPES, itertools.cycle(NOISES), strict=False)), ids=str
)
def test_shapes_and_noises_come_back_from_text(shape, noise):
    plan = plan_of(shape, noise=noise)
    table = plan.to_table()
    text = to_toml(table)
    assert "[privacy.spend]" in text
    assert "[privacy.noise]" in text
    again = Plan.from_table(tomllib.loads(text))
    assert again == plan
    assert type(again.privacy.spend) is type(shape)
    assert again.privacy.noise == noise
    assert to_toml(again.to_table()) == text


def test_whole_numbers_and_defaults_may_be_written():
    table = plan_of(Power(2.0)).to_table()
    table["privacy"]["spend"] = {"kind": "power", "alpha": 2}
    assert Plan.from_table(table).privacy.spend == Power(2.0)
    table["privacy"]["spend"] = {"kind": "geometric"}
    assert Plan.from_table(table).privacy.spend == Geometric()
    del table["privacy"]["spend"]
    del table["privacy"]["noise"]
    plain = Plan.from_table(table)
    assert (plain.privacy.spend, plain.privacy.noise) == (Even(), GaussianNoise())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("spend", {"kind": "linear"}, "even, geometric, power"),
        ("spend", {"alpha": 0.4}, "kind = None"),
        ("spend", {"kind": "power", "Q": 0.9}, "unknown setting 'Q'"),
        ("spend", {"kind": "geometric", "Q": 0}, "Q = 0"),
        ("spend", {"kind": "power", "alpha": True}, "alpha"),
        (
            "noise",
            {"kind": "cauchy"},
            "banded, gaussian, laplace, local, local_paper, shares, wishart, wishart_paper",
        ),
        ("noise", {"kind": "wishart", "degrees": 3.5}, "degrees"),
        ("noise", {"kind": "wishart_paper", "sensitivity": "K"}, "'2K', 'K^2'"),
        ("noise", {"kind": "gaussian", "degrees": 3}, "unknown setting 'degrees'"),
    ],
)
def test_text_that_makes_no_sense_is_refused(name, given, words):
    table = plan_of(Even()).to_table()
    table["privacy"][name] = given
    with pytest.raises(ConfigError) as refused:
        Plan.from_table(table)
    assert words in str(refused.value)


def test_plans_that_spend_differently_have_different_ledgers():
    from coterie.data.synthetic import synthetic

    spec = synthetic("mean", clients=3, rows=(2, 2), features=2, seed=0).data.spec
    plans = [plan_of(shape) for shape in (Even(), Power(), Power(0.5), Geometric(), Geometric(0.9))]
    plans += [plan_of(Even(), noise=noise) for noise in NOISES[1:]]
    assert len({plan.digest(spec) for plan in plans}) == len(plans)


def test_methods_of_sums_spend_by_shape_too():
    plan = Plan(method=PMTL(), privacy=Privacy(epsilon=1.0, spend=Power()), rounds=5)
    multipliers = plan.noise_multipliers(50)
    assert multipliers[0] / multipliers[-1] == pytest.approx(5**0.4)
    assert all(isinstance(m.event(), Gaussian) for m in plan.mechanisms(50))


# The command.


@pytest.mark.parametrize("relation", ["replace", "zero_out"])
def test_calibrate_states_an_epsilon_within_the_budget_for_a_fixed_cohort(relation, capsys):
    """Against the other clients, who know the cohort: a binomial mixture of Gaussian DP."""
    from coterie.cli.main import main

    shown = " --cohort-visible" * (relation == "zero_out")  # hidden has no account under zero_out
    main(
        f"calibrate --clients 40 --cohort 10 --rounds 12 --sampling fixed --relation {relation} "
        f"--epsilon 2 --delta 1e-5 --json{shown}".split()
    )
    found = json.loads(capsys.readouterr().out)
    assert 1.99 < found["epsilon"] <= 2 and found["view"] == "other clients"
    moved = 2 if relation == "replace" else 1
    mixed = 0.0
    for taken in range(1, 13):
        mu = moved * math.sqrt(taken) / found["noise_multiplier"]
        weight = math.comb(12, taken) * 0.25**taken * 0.75 ** (12 - taken)
        mixed += weight * GaussianProfile(mu).delta(2.0)
    assert 0.99e-5 < mixed <= 1e-5
    if relation == "replace":
        assert found["views"]["outsider"] < 1.9
