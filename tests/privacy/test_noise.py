"""Kinds of noise: budgets met, refusals in clear words, and whole runs of each kind."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tests.privacy.oracles import gaussian_delta

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy import NOISES, noise_names
from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import Even, Geometric, Power
from coterie.privacy.events import Gaussian, Laplace, Participation, Wishart
from coterie.privacy.guarantee import Guarantee, describe_noise
from coterie.privacy.ledger import Ledger, LedgerError
from coterie.privacy.mechanisms import GaussianRows, GaussianSum, LaplaceSum, Mechanism, Shape
from coterie.privacy.moments import GaussianGram, Squares, WishartGram
from coterie.privacy.noise import (
    BandedNoise,
    GaussianNoise,
    LaplaceNoise,
    LocalNoise,
    Noise,
    PublishedLocal,
    PublishedWishart,
    Request,
    SharedNoise,
    WishartNoise,
    register_mechanism,
)
from coterie.privacy.profiles import WishartProfile
from coterie.privacy.sampling import FixedSize, Poisson

CLIENTS = 40
SPENDS = [Even(), Power(), Geometric()]
EVERYONE = Participation("everyone")
KINDS = {
    "gaussian sum": (GaussianNoise(), Shape.SUM, 1e-5, GaussianSum),
    "gaussian gram": (GaussianNoise(), Shape.GRAM, 1e-5, GaussianGram),
    "gaussian squares": (GaussianNoise(), Shape.SQUARES, 1e-5, Squares),
    "gaussian rows": (GaussianNoise(), Shape.ROWS, 1e-5, GaussianRows),
    "laplace sum": (LaplaceNoise(), Shape.SUM, 0.0, LaplaceSum),
    "laplace squares": (LaplaceNoise(), Shape.SQUARES, 0.0, Squares),
    "laplace squares at a delta": (LaplaceNoise(), Shape.SQUARES, 1e-5, Squares),
    "wishart": (WishartNoise(degrees=60), Shape.GRAM, 1e-5, WishartGram),
}


def ask_of(shape=Shape.GRAM, spend=SPENDS[0], rounds=6, **changes):
    given = {
        "shape": shape,
        "clip": 0.7,
        "epsilon": 1.0,
        "noise_multiplier": None,
        "delta": 1e-5,
        "weights": spend.weights(rounds),
        "clients": CLIENTS,
        "participation": EVERYONE,
        "relation": "zero_out",
    }
    return Request(**{**given, **changes})


# Budgets.


@pytest.mark.parametrize("spend", SPENDS[:2], ids=lambda spend: spend.kind)
@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_made_meets_the_budget_from_below(name, relation, spend):
    noise, shape, delta, kind = KINDS[name]
    ask = ask_of(shape, spend, delta=delta, relation=relation)
    if name == "wishart" and relation == "replace":
        with pytest.raises(ValueError, match="'replace' with Wishart"):
            noise.mechanisms(ask)
        return
    made = noise.mechanisms(ask)
    assert len(made) == 6
    assert all(isinstance(mechanism, kind) for mechanism in made)
    events = [mechanism.event() for mechanism in made]
    spent = profile(events, EVERYONE, relation).epsilon(delta)
    assert 0.99 < spent <= 1.0
    # The events state no other noise than is made: each at its own sensitivity.
    for mechanism, weight in zip(made, ask.weights, strict=True):
        event = mechanism.event()
        inner = getattr(mechanism, "inner", mechanism)
        if isinstance(event, Gaussian):
            assert event.noise_multiplier == inner.noise_multiplier
            bound = mechanism.sensitivity("zero_out")
            assert mechanism.sensitivity("replace") <= bound * event.replaced
        elif isinstance(event, Laplace):
            assert event.epsilon == inner.epsilon
        else:
            assert (event.degrees, event.claimed) == (60, None)
            assert event.ratio == pytest.approx(0.7**2 / mechanism.scale)
        squared = shape in (Shape.GRAM, Shape.SQUARES)
        assert mechanism.sensitivity("zero_out") == pytest.approx(0.7**2 if squared else 0.7)
        assert weight <= 1


@pytest.mark.parametrize("sampler", [Poisson(10.0), FixedSize(10)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("structure", ["low_rank", "group_sparse"])
def test_budgets_are_met_where_cohorts_are_drawn(sampler, structure):
    relation = "replace" if isinstance(sampler, FixedSize) else "zero_out"
    for noise in (GaussianNoise(), LaplaceNoise()):
        if noise.kind == "laplace" and structure == "low_rank":
            continue
        plan = Plan(
            method=MPMTL(structure=structure),
            privacy=Privacy(epsilon=1.0, relation=relation, noise=noise, spend=Power()),
            sampler=sampler,
            rounds=4,
        )
        assert 0.99 < plan.guarantee(CLIENTS).epsilon <= 1.0


@pytest.mark.parametrize("visible", [False, True], ids=["hidden", "visible"])
@pytest.mark.parametrize("spend", SPENDS[:2], ids=["even", "power"])
def test_budgets_hold_against_the_other_clients_of_a_fixed_cohort(spend, visible):
    """They know the cohort: a binomial mixture of Gaussian DP, or a sum of pure epsilons."""
    who, rounds = Participation("fixed", 0.25, visible), 6
    given = {"participation": who, "relation": "replace", "spend": spend, "rounds": rounds}
    z = [m.noise_multiplier for m in GaussianNoise().mechanisms(ask_of(Shape.SUM, **given))]
    mixed = 0.0
    for taken in itertools.product((False, True), repeat=rounds):
        mu = math.sqrt(sum(4 / one**2 for one, there in zip(z, taken, strict=True) if there))
        weight = 0.25 ** sum(taken) * 0.75 ** (rounds - sum(taken))
        mixed += weight * (gaussian_delta(1.0, mu) if mu else 0.0)
    assert 0.99e-5 < mixed <= 1e-5
    pure = LaplaceNoise().mechanisms(ask_of(Shape.SUM, delta=0.0, **given))
    assert math.fsum(2 * one.epsilon for one in pure) == pytest.approx(1.0, rel=1e-6)
    found = Guarantee(tuple(map(Gaussian, z)), who, "replace", 1e-5, CLIENTS)
    assert found.epsilon <= 1 and found.views["other_clients"] == found.epsilon
    assert (found.views["outsider"] < 0.9) == (not visible)


@pytest.mark.parametrize("name", ["gaussian gram", "gaussian squares"])
def test_replaced_second_moments_need_less_than_twice_the_noise(name):
    noise, shape, _, _ = KINDS[name]
    out, other = (
        noise.mechanisms(ask_of(shape, relation=relation))[0].event().noise_multiplier
        for relation in ("zero_out", "replace")
    )
    assert other / out == pytest.approx(math.sqrt(2), rel=1e-6)


def test_a_noise_multiplier_is_taken_as_it_is():
    given = {"epsilon": None, "noise_multiplier": 2.0}
    gram = GaussianNoise().mechanisms(ask_of(Shape.GRAM, Power(1.0), 2, **given))
    assert gram == (GaussianGram(0.7, 4.0), GaussianGram(0.7, 2.0))
    pure = LaplaceNoise().mechanisms(ask_of(Shape.SQUARES, Power(1.0), 2, delta=0.0, **given))
    assert [mechanism.event() for mechanism in pure] == [Laplace(0.25), Laplace(0.5)]


def test_rows_that_a_paper_protects_are_paid_for_as_clients():
    for relation, rows in itertools.product(("zero_out", "replace"), (1, 30)):
        made = GaussianNoise().mechanisms(ask_of(Shape.ROWS, rows=rows, relation=relation))
        events = [mechanism.event() for mechanism in made]
        assert profile(events, EVERYONE, relation).epsilon(1e-5) <= 1.0


def test_several_vectors_of_a_client_are_no_worse_than_one_under_wishart_noise():
    # Each costs its part of the ratio: the composed profile (rounded up) against the closed form.
    for degrees, ratio in ((2, 0.4), (12, 1.0), (100, 2.5)):
        one = WishartProfile(degrees, ratio)
        for share in (0.5, 0.1):
            parts = [Wishart(degrees, share * ratio), Wishart(degrees, (1 - share) * ratio)]
            both = profile(parts, EVERYONE, "zero_out")
            for epsilon in (0.0, 0.2, 1.0, 2.0):
                assert both.delta(epsilon) <= one.delta(epsilon) * (1 + 1e-3) + 1e-12


# The printed mechanism.


def test_sensitivities_that_were_not_published_are_refused():
    with pytest.raises(ValueError, match="sensitivity = 'K': expected 2K or K"):
        PublishedWishart(sensitivity="K")


@pytest.mark.parametrize(
    ("sensitivity", "delta", "shown"),
    [("2K", 1 - math.exp(-0.5), "0.3935"), ("K^2", 1 - math.exp(-1), "0.6322")],
)
def test_the_printed_mechanism_is_called_what_it_is(sensitivity, delta, shown):
    # T = 1, K = 1, epsilon = 1: true delta = 1 - exp(-epsilon K^2 / s).
    plan = Plan(
        method=MPMTL(),
        privacy=Privacy(epsilon=1.0, clip=1.0, noise=PublishedWishart(sensitivity=sensitivity)),
        rounds=1,
    )
    guarantee = plan.guarantee(CLIENTS)
    assert guarantee.epsilon == math.inf
    assert guarantee.claimed_epsilon == pytest.approx(1.0)
    assert guarantee.delta_at(1.0) == pytest.approx(delta, rel=1e-9)
    words = guarantee.statement()
    assert words.startswith("NOT A GUARANTEE")
    assert "epsilon = 1 at delta = " in words
    assert f"delta = {shown} at that epsilon" in words
    assert "epsilon = inf" in words
    assert "NOT PRIVATE" in words
    json = guarantee.to_json()
    assert json["epsilon"] == "inf"
    assert json["true_delta_at_claimed"] == pytest.approx(delta, rel=1e-9)


@pytest.mark.parametrize("spend", SPENDS, ids=lambda spend: spend.kind)
@pytest.mark.parametrize("sensitivity", ["2K", "K^2"])
def test_printed_claims_add_up_to_epsilon(spend, sensitivity):
    for rounds in (1, 5, 60):
        ask = ask_of(Shape.GRAM, spend, rounds, epsilon=0.8, clip=2.5)
        made = PublishedWishart(sensitivity).mechanisms(ask)
        assert math.fsum(m.event().claimed for m in made) == pytest.approx(0.8, rel=1e-9)
        width = 5.0 if sensitivity == "2K" else 6.25
        for mechanism, weight in zip(made, ask.weights, strict=True):
            # W_d(d + 1, s / (2 eps_t) I), raw; eps_t in proportion to the weights.
            assert mechanism.degrees == 2
            assert not mechanism.centred
            assert mechanism.scale * weight == pytest.approx(made[-1].scale * ask.weights[-1])
            assert width / (2 * mechanism.scale) >= mechanism.event().claimed * (1 - 1e-9)
        # Two degrees compose to the sum of their ratios: delta >= 1 - exp(-sum eps_t K^2 / s).
        spent = math.fsum(width / (2 * mechanism.scale) for mechanism in made)
        true = profile([m.event() for m in made], EVERYONE, "zero_out").delta(0.8)
        assert true == pytest.approx(-math.expm1(-spent * 6.25 / width), rel=1e-6)


def test_the_printed_mechanism_is_no_guarantee_under_replace_either():
    plan = Plan(
        method=MPMTL(),
        privacy=Privacy(epsilon=1.0, relation="replace", noise=PublishedWishart()),
        rounds=2,
    )
    with pytest.raises(ValueError, match="'replace' with Wishart"):
        plan.guarantee(CLIENTS)


# Refusals.


@pytest.mark.parametrize(
    ("noise", "changes", "words"),
    [
        (
            LaplaceNoise(),
            {"shape": Shape.GRAM},
            "laplace noise supports .*sum, squares.*releases gram",
        ),
        (
            LaplaceNoise(),
            {"shape": Shape.ROWS},
            "laplace noise supports .*releases rows: use gaussian",
        ),
        (
            WishartNoise(),
            {"shape": Shape.SQUARES},
            "wishart noise supports .*gram.*releases squares",
        ),
        (PublishedWishart(), {"shape": Shape.SUM}, "wishart_paper noise supports .*releases sum"),
        (WishartNoise(), {"delta": 0.0}, "Wishart noise.*no epsilon holds at delta 0.*Laplace"),
        (GaussianNoise(), {"delta": 0.0}, "Gaussian noise.*no epsilon holds at delta 0.*Laplace"),
        (GaussianNoise(), {"delta": 0.0, "rows": 3, "shape": Shape.ROWS}, "delta 0.*Laplace"),
        (WishartNoise(), {"relation": "replace"}, "'replace' with Wishart noise.*Gaussian"),
        (WishartNoise(degrees=1), {}, "degrees = 1.*at least 2"),
        (WishartNoise(), {"epsilon": None, "noise_multiplier": 2.0}, "give epsilon, not noise_mul"),
        (PublishedWishart(), {"epsilon": None, "noise_multiplier": 2.0}, "computed from epsilon"),
        (GaussianNoise(), {"relation": "swap"}, "relation = 'swap'"),
        (GaussianNoise(), {"epsilon": 1e5}, "at most 10,000"),
        (GaussianNoise(), {"weights": (1.0, 0.0)}, "one positive finite number per round"),
    ],
)
def test_refusals_say_what_to_do(noise, changes, words):
    with pytest.raises(ValueError, match=words):
        noise.mechanisms(ask_of(**changes))


@pytest.mark.parametrize("value", [0.0, -0.7, math.inf, math.nan])
@pytest.mark.parametrize("name", KINDS)
def test_clips_and_epsilons_that_make_no_sense_are_refused(name, value):
    # Squares would take a negative clip for a positive one.
    noise, shape, delta, _ = KINDS[name]
    for field in ("clip", "epsilon"):
        with pytest.raises(ValueError, match=rf"{field} = .*expected a positive number"):
            noise.mechanisms(ask_of(shape, delta=delta, **{field: value}))
        if value != math.inf:  # epsilon = inf is a run without noise
            with pytest.raises(ValueError, match=f"{field} = "):
                Privacy(**{"epsilon": 1.0, field: value})
    with pytest.raises(ValueError, match="epsilon = "):
        PublishedWishart().mechanisms(ask_of(epsilon=value))


def test_kinds_are_known_by_name():
    assert dict(Noise.choices()) == {
        "gaussian": GaussianNoise,
        "laplace": LaplaceNoise,
        "wishart": WishartNoise,
        "wishart_paper": PublishedWishart,
        "local": LocalNoise,
        "shares": SharedNoise,
        "banded": BandedNoise,
        "local_paper": PublishedLocal,
    }
    assert GaussianNoise().usual_delta(10) == WishartNoise().usual_delta(10) == 1e-5
    assert LaplaceNoise().usual_delta(10) == 0


@pytest.mark.parametrize(
    ("structure", "noise", "privacy", "words"),
    [
        ("low_rank", LaplaceNoise(), {}, "laplace noise supports"),
        ("group_sparse", WishartNoise(), {}, "wishart noise supports"),
        ("low_rank", GaussianNoise(), {"delta": 0.0}, "at delta 0"),
        ("low_rank", WishartNoise(), {"delta": 0.0}, "at delta 0"),
        ("low_rank", WishartNoise(), {"relation": "replace"}, "'replace' with Wishart"),
    ],
)
def test_plans_are_refused_before_anything_is_posted(structure, noise, privacy, words, tmp_path):
    plan = Plan(
        method=MPMTL(structure=structure),
        privacy=Privacy(epsilon=1.0, noise=noise, **privacy),
        rounds=2,
    )
    data = federation()
    with pytest.raises(ValueError, match=words):
        simulate(plan, data, folder=tmp_path / "run")
    assert not list((tmp_path / "run").glob("posts/*"))


# The ledger knows the noise, not its name alone.


@pytest.mark.parametrize(
    ("paid", "asked"),
    [
        (Gaussian(2.0, math.sqrt(2)), Gaussian(2.0)),
        (Laplace(0.5), Laplace(0.25)),
        (Wishart(40, 1.0), Wishart(45, 1.0)),
        (Wishart(40, 1.0), Wishart(40, 1.5)),
        (Wishart(40, 1.0), Wishart(40, 1.0, claimed=1.0)),
        (Gaussian(0.5), Laplace(0.5)),
    ],
    ids=["replaced", "epsilon", "degrees", "ratio", "claim", "kind"],
)
def test_a_ledger_of_other_noise_is_another_plan(paid, asked, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger([paid] * 2, path, "plan") as ledger:
        ledger.charge(0)
    with pytest.raises(LedgerError, match="another plan"):
        Ledger([asked] * 2, path, "plan")
    with Ledger([paid] * 2, path, "plan") as again:
        assert again.charged == {0}


# Whole runs.


def federation():
    return synthetic("low_rank", clients=CLIENTS, rows=(8, 12), features=4, seed=0).data


RUNS = {
    "gaussian": ("low_rank", GaussianNoise(), {}),
    "gaussian, replace": ("low_rank", GaussianNoise(), {"relation": "replace"}),
    "wishart": ("low_rank", WishartNoise(degrees=60), {}),
    "wishart_paper": ("low_rank", PublishedWishart(), {}),
    "gaussian diagonal": ("group_sparse", GaussianNoise(), {}),
    "laplace": ("group_sparse", LaplaceNoise(), {"delta": 0.0}),
    "laplace, replace": ("group_sparse", LaplaceNoise(), {"relation": "replace"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run(name, tmp_path):
    structure, noise, privacy = RUNS[name]
    plan = Plan(
        method=MPMTL(structure=structure),
        privacy=Privacy(epsilon=2.0, noise=noise, spend=Power(), **privacy),
        rounds=3,
        simulation_seed=7,
    )
    data = federation()
    outcome = simulate(plan, data, folder=tmp_path / "run")
    guarantee = outcome.guarantee
    assert guarantee.events == tuple(m.event() for m in plan.mechanisms(CLIENTS))
    assert len(outcome.posts) == 3
    shape = (4, 4) if structure == "low_rank" else (4,)
    for post, event in zip(outcome.posts, guarantee.events, strict=True):
        assert post.event == event
        assert tuple(post.value["moment"].shape) == shape
        assert bool(post.value["moment"].isfinite().all())
    if noise.kind == "wishart_paper":
        assert guarantee.epsilon == math.inf
        assert guarantee.claimed_epsilon == pytest.approx(2.0)
        assert guarantee.statement().startswith("NOT A GUARANTEE")
    else:
        assert 1.98 < guarantee.epsilon <= 2.0
        assert "NOT A GUARANTEE" not in guarantee.statement()
    if noise.kind == "laplace":
        assert guarantee.delta == 0
        assert "pure epsilon = 2" in guarantee.statement()
    assert all(bool(leaf.isfinite().all()) for leaf in outcome.models.leaves.values())
    again = simulate(plan, data)
    for left, right in zip(outcome.posts, again.posts, strict=True):
        assert torch.equal(left.value["moment"], right.value["moment"])


def test_with_hardly_any_noise_the_post_is_the_moment_of_the_models():
    """Against the moment formed without mechanism: nothing is counted twice or scaled."""
    given = {"method": MPMTL(), "rounds": 1, "simulation_seed": 7}
    bare = Plan(privacy=Privacy(epsilon=math.inf), **given)
    noisy = Plan(privacy=Privacy(noise_multiplier=1e-5, clip=20.0), **given)
    expected, found = (simulate(p, federation()).posts[0].value["moment"] for p in (bare, noisy))
    # tau = 1e-5 * 20^2, and every product is rounded to 2^-13 or so of its model's clip.
    slack = 6 * 1e-5 * 20**2 + CLIENTS * 20 * 2.0**-14 * 20
    assert float((expected - found).abs().max()) < slack
    assert float(expected.diagonal().sum()) > 10 * slack


@dataclass(frozen=True)
class Geometrical(Mechanism):
    """A mechanism as another package writes it: pure noise of scale noise_multiplier * bound."""

    bound: float
    noise_multiplier: float

    @property
    def _inner(self):
        return LaplaceSum(self.bound, 1 / self.noise_multiplier)

    def clip(self, rows):
        return self._inner.clip(rows)

    def perturb(self, total, entropy):
        return self._inner.perturb(total, entropy)

    def event(self):
        return Laplace(1 / self.noise_multiplier)

    def norm_bounds(self, totals):
        return self._inner.norm_bounds(totals)

    def standard_deviations(self, totals):
        return self._inner.standard_deviations(totals)

    @property
    def noise_over_bound(self):
        return self._inner.noise_over_bound


@pytest.fixture
def geometrical(monkeypatch):
    point = SimpleNamespace(name="geometrical", load=lambda: Geometrical)
    monkeypatch.setattr("coterie.privacy.noise.entry_points", lambda group: [point])
    monkeypatch.setattr("coterie.privacy.entry_points", lambda group: [point])
    monkeypatch.setattr("coterie.privacy.noise._REGISTERED", {})


@pytest.mark.parametrize("spend", SPENDS)
def test_a_mechanism_of_another_package_is_calibrated_like_our_own(geometrical, spend):
    assert noise_names() == (*NOISES, "geometrical") and set(Noise.choices()) == set(noise_names())
    noise = Noise.named("geometrical")
    for changes in ({"delta": 0.0}, {"delta": 1e-5}, {"delta": 0.0, "relation": "replace"}):
        request = ask_of(Shape.SUM, spend, **changes)
        ours, theirs = (
            profile([one.event() for one in kind.mechanisms(request)], EVERYONE, request.relation)
            for kind in (LaplaceNoise(), noise)
        )
        assert theirs.epsilon(request.delta) == pytest.approx(ours.epsilon(request.delta), rel=2e-3)
        assert theirs.epsilon(request.delta) <= 1.0
    assert noise.usual_delta(CLIENTS) == 0.0
    (one,) = noise.mechanisms(
        ask_of(Shape.SUM, rounds=1, epsilon=None, noise_multiplier=3.0, delta=0.0)
    )
    assert one == Geometrical(0.7, 3.0)
    with pytest.raises(ValueError, match="supports releases of shape sum"):
        noise.mechanisms(ask_of(Shape.GRAM))


def test_a_mechanism_of_another_package_plans_runs_and_reports(geometrical, tmp_path):
    data = synthetic("mean", clients=12, rows=8, features=3, seed=1).data
    privacy = Privacy(epsilon=50.0, noise="geometrical", clip=1.0)
    plan = Plan(method=PMTL(), privacy=privacy, rounds=2, simulation_seed=1)
    outcome = simulate(plan, data, folder=tmp_path / "run")
    (event,) = set(outcome.guarantee.events)
    assert outcome.guarantee.delta == 0 and outcome.guarantee.epsilon == pytest.approx(50, rel=2e-3)
    assert outcome.posts[0].deviation == pytest.approx(math.sqrt(2) / event.epsilon)
    rule = plan.method.rounds(data.spec)
    expected = math.sqrt(rule.dimension) * math.sqrt(2) / event.epsilon / 12
    assert plan.relative_error(data.spec) == pytest.approx(expected)
    assert Plan.from_table(plan.to_table()) == plan
    assert "Laplace noise" in describe_noise(outcome.guarantee.events)


def test_a_name_is_given_once(geometrical):
    register_mechanism("geometrical")(Geometrical)
    for name in ("gaussian", "geometrical"):
        with pytest.raises(ValueError, match="taken"):
            register_mechanism(name)(type("Other", (Geometrical,), {}))
