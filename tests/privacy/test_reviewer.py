"""The numbers for a privacy reviewer, against closed forms and against dp-accounting."""

import itertools
import json
import math
from math import comb

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from tests.privacy.oracles import gaussian_delta

from coterie.privacy import reviewer
from coterie.privacy.entropy import open_entropy
from coterie.privacy.events import (
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    Wishart,
)
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.profiles import GaussianProfile, PureProfile

EVERYONE = Participation("everyone")
SAMPLED = Participation("poisson", 0.05)


def of(event, rounds=20, who=EVERYONE, relation="zero_out", delta=1e-5):
    return Guarantee((event,) * rounds, who, relation, delta, 500)


def gaussian_epsilon(mu, delta=1e-5):
    return brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0, 200, xtol=1e-12)


CASES = {
    "everyone": of(Gaussian(10.0)),
    "blocks": of(Gaussian(10.0, 1.5)),
    "replace": of(Gaussian(10.0), relation="replace"),
    "hidden": of(Gaussian(2.0), who=SAMPLED),
    "visible": of(Gaussian(2.0), who=SAMPLED.shown),
    "fixed": of(Gaussian(4.0), who=Participation("fixed", 0.05), relation="replace"),
    "pure": of(Laplace(0.1), 10, delta=0.0),
    "wishart": of(Wishart(300, 0.5), 2),
    "local": of(LocalGaussian(10.0), who=SAMPLED),
}


@pytest.mark.parametrize(("replaced", "scale"), [(2.0, 2.0), (1.5, 1.5)])
def test_gaussian_noise_in_closed_form(replaced, scale):
    guarantee = of(Gaussian(10.0, replaced))
    mu = math.sqrt(20) / 10
    told = reviewer.review(guarantee)
    assert told["mu"] == pytest.approx({"zero_out": mu, "replace": scale * mu}, rel=1e-12)
    assert told["epsilon"]["zero_out"] == pytest.approx(gaussian_epsilon(mu), rel=1e-6)
    assert told["epsilon"]["replace"] == pytest.approx(gaussian_epsilon(scale * mu), rel=1e-6)
    for one in told["profile"][:4]:
        assert one["delta"] == pytest.approx(gaussian_delta(one["epsilon"], mu), rel=1e-6)
    for one in told["attack"]:
        power = norm.cdf(norm.ppf(one["false_positives"]) + mu)
        assert one["true_positives"] == pytest.approx(power, rel=1e-9)
    # A person at k clients moves the sum k times as far as one replaced client does.
    for one in told["person"]:
        far = gaussian_epsilon(one["clients"] * scale * mu)
        assert one["epsilon"] == pytest.approx(far, rel=1e-6)


def test_the_relation_of_the_run_does_not_change_the_answers():
    """Epsilon by relation and for a person depends on the events, not on the relation stated."""
    zeroed, replaced = (reviewer.review(CASES[name]) for name in ("everyone", "replace"))
    for key in ("epsilon", "mu", "person"):
        assert zeroed[key] == replaced[key]
    assert zeroed["attack"] != replaced["attack"] and zeroed["profile"] != replaced["profile"]


def test_other_relation_agrees_with_dp_accounting():
    loss = pld.from_gaussian_mechanism(10.0, sensitivity=2, value_discretization_interval=1e-4)
    theirs = loss.self_compose(20).get_epsilon_for_delta(1e-5)
    assert reviewer.epsilon_under(CASES["everyone"], "replace") == pytest.approx(theirs, rel=1e-3)
    loss = pld.from_gaussian_mechanism(
        2.0, sampling_prob=0.05, value_discretization_interval=1e-4, use_connect_dots=True
    )
    theirs = loss.self_compose(20).get_epsilon_for_delta(1e-5)
    hidden = of(Gaussian(2.0), who=SAMPLED, relation="replace")
    assert reviewer.epsilon_under(hidden, "zero_out") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_ordered_and_agree_with_the_guarantee(name):
    guarantee = CASES[name]
    told = json.loads(json.dumps(reviewer.review(guarantee), allow_nan=False))
    assert told["epsilon"][guarantee.relation] == pytest.approx(guarantee.epsilon, rel=1e-12)
    assert told["epsilon"]["zero_out"] < told["epsilon"]["replace"]
    found = [one["delta"] for one in told["profile"]]
    assert found[0] > found[1]
    for larger, smaller in itertools.pairwise(found):
        assert smaller <= larger * (1 + 1e-6), "up to the floor of a grid"
    for one in told["attack"]:
        assert one["false_positives"] < one["true_positives"] < 1
    persons = [one["epsilon"] for one in told["person"]]
    assert persons[0] == told["epsilon"]["replace"]
    assert persons == sorted(set(persons))
    chain = reviewer.profile_under(guarantee, "replace")
    for count, epsilon in enumerate(persons[1:], 2):
        bound = reviewer.profile_of_group(chain, count).epsilon(guarantee.delta)
        assert epsilon <= bound and count * persons[0] <= bound * (1 + 1e-12)


@pytest.mark.parametrize("name", ["hidden", "visible", "fixed", "pure", "wishart", "local"])
def test_what_is_not_gaussian_has_no_mu(name):
    assert reviewer.review(CASES[name])["mu"] == {"zero_out": None, "replace": None}


def test_one_pure_release_in_closed_form():
    """Randomised response: min(e^x alpha, 1 - e^-x (1 - alpha)) true positives."""
    guarantee = of(Laplace(1.0), 1, delta=0.0)
    for alarm, power in zip((0.01, 0.1, 0.5), reviewer.attack_power(guarantee, (0.01, 0.1, 0.5)),
                            strict=True):  # fmt: skip
        best = min(math.e * alarm, 1 - (1 - alarm) / math.e)
        assert best <= power * (1 + 1e-12) and power == pytest.approx(best, rel=1e-6)
    assert [reviewer.epsilon_of_person(guarantee, k) for k in (1, 2, 3)] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("size", [2, 3])
def test_a_group_bound_is_above_the_exact_group(mu, size):
    """The chain of neighbours bounds Gaussian DP too, whose groups are k mu exactly."""
    group = reviewer.GroupProfile(GaussianProfile(mu), size)
    for epsilon in (0.0, 0.3, 1.0, 5.0):
        each = epsilon / size
        terms = sum(math.exp(step * each) for step in range(size))
        assert group.delta(epsilon) == pytest.approx(min(1, terms * gaussian_delta(each, mu)))
        assert group.delta(epsilon) >= gaussian_delta(epsilon, size * mu)
    found = group.epsilon(1e-5)
    assert found >= gaussian_epsilon(size * mu) and group.delta(found) <= 1e-5
    assert group.delta(found * (1 - 1e-6)) > 1e-5, "the smallest that the search can state"
    assert reviewer.profile_of_group(GaussianProfile(mu), size) == GaussianProfile(size * mu)


def smallest(delta_at):
    return brentq(lambda epsilon: delta_at(epsilon) - 1e-5, 0, 400, xtol=1e-10)


def attending(kind, rate, size):
    """The law of how many of a person's clients are in a cohort of 20 clients."""
    if kind == "poisson":
        return [comb(size, j) * rate**j * (1 - rate) ** (size - j) for j in range(size + 1)]
    drawn = round(20 * rate)
    ways = [
        comb(size, j) * comb(20 - size, drawn - j) if j <= drawn else 0 for j in range(size + 1)
    ]
    return [one / comb(20, drawn) for one in ways]


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
@pytest.mark.parametrize(("rate", "noise"), [(0.3, 4.0), (0.1, 1.5), (0.8, 3.0)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_person_at_sampled_clients(kind, rate, noise, size):
    """Exact in visible cohorts: j of its clients in a round move the sum j times as far.

    In any cohort a person is no worse off than with all clients in every round.
    """
    law, rounds = attending(kind, rate, size), 3
    guarantee = of(Gaussian(noise), rounds, Participation(kind, rate, visible=True))

    def exact(epsilon):
        total = 0.0
        for counts in itertools.product(range(size + 1), repeat=rounds):
            mu = 2 / noise * math.hypot(*counts)
            mass = math.prod(law[count] for count in counts)
            total += mass * gaussian_delta(epsilon, mu) if mu else 0.0
        return total

    found = reviewer.epsilon_of_person(guarantee, size)
    whole = reviewer.profile_of_person(guarantee, size)
    for epsilon in (0.0, 1.0, 4.0):
        assert whole.delta(epsilon) >= exact(epsilon) * (1 - 1e-9)
    everywhere = gaussian_epsilon(size * 2 * math.sqrt(rounds) / noise)
    assert smallest(exact) <= found * (1 + 1e-9) and found <= everywhere * (1 + 1e-9)
    assert found <= 3 * smallest(exact)
    if kind == "poisson":
        hidden = of(Gaussian(noise), rounds, Participation(kind, rate))
        assert reviewer.epsilon_of_person(hidden, size) <= found * (1 + 1e-9)


@pytest.mark.parametrize("rate", [0.1, 0.6])
@pytest.mark.parametrize("size", [2, 3])
def test_a_person_at_clients_in_a_hidden_cohort(rate, size):
    """One round by quadrature: binomial shifts to one side against the same to the other."""
    noise = 2.0
    guarantee = of(Gaussian(noise), 1, Participation("poisson", rate))
    law, x = attending("poisson", rate, size), np.linspace(-60, 60, 200_001)
    p, q = (
        sum(mass * norm.pdf(x, sign * j, noise) for j, mass in enumerate(law)) for sign in (1, -1)
    )

    def exact(epsilon):
        return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))

    true, found = smallest(exact), reviewer.epsilon_of_person(guarantee, size)
    assert true <= found * (1 + 1e-6) and found <= 1.8 * true


@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("size", [2, 3])
def test_noise_of_clients_protects_a_person_at_each_of_them(rate, size):
    """Each message has noise of its own: exact, from the number of all messages of the person."""
    who = EVERYONE if rate == 1 else Participation("poisson", rate)
    guarantee, most = of(LocalGaussian(6.0), 4, who), 4 * size

    def exact(epsilon):
        law = [comb(most, n) * rate**n * (1 - rate) ** (most - n) for n in range(1, most + 1)]
        return sum(
            mass * gaussian_delta(epsilon, 2 / 6 * math.sqrt(n)) for n, mass in enumerate(law, 1)
        )

    assert reviewer.epsilon_of_person(guarantee, size) == pytest.approx(smallest(exact), rel=1e-6)
    central = of(Gaussian(6.0), 4, who.shown)
    assert reviewer.epsilon_of_person(guarantee, size) < reviewer.epsilon_of_person(central, size)


def test_a_person_is_not_bounded_by_zero_out():
    """Two clients with and without a person contribute x and -x: twice as far as two zeros."""
    guarantee, mu = CASES["everyone"], math.sqrt(20) / 10
    true = gaussian_epsilon(4 * mu)
    assert reviewer.epsilon_of_person(guarantee, 2) >= true * (1 - 1e-9)
    zeroed = reviewer.profile_under(guarantee, "zero_out")
    assert reviewer.profile_of_group(zeroed, 2).epsilon(1e-5) < 0.6 * true


def test_wishart_noise_is_replaced_in_two_steps():
    guarantee = CASES["wishart"]
    zeroed = guarantee.profile
    found = reviewer.profile_under(guarantee, "replace")
    # (2 e, (1 + e^e) d), as the message of the event says.
    assert found.delta(0.3) == pytest.approx((1 + math.exp(0.15)) * zeroed.delta(0.15), rel=1e-12)
    assert reviewer.profile_of_group(found, 3) == reviewer.GroupProfile(zeroed, 6)
    # With probability 0.0025 an output is impossible: no epsilon at delta 1e-5.
    bare = of(Wishart(4, 0.2), 1)
    assert reviewer.epsilon_under(bare, "zero_out") is None
    assert reviewer.epsilon_under(bare, "replace") is reviewer.epsilon_of_person(bare, 2) is None
    assert reviewer.review(bare)["epsilon"] == {"zero_out": None, "replace": None}


def test_a_group_never_claims_what_it_cannot_compute():
    """Where e^epsilon overflows, only a delta of 0 is bounded."""
    pure = reviewer.GroupProfile(PureProfile(400.0, 1), 3)
    assert pure.epsilon(0.0) == 1200.0 and pure.delta(1200.0) == 0.0
    assert pure.delta(1199.0) == 1.0 and pure.delta(600.0) == 1.0
    assert reviewer.GroupProfile(GaussianProfile(50.0), 3).epsilon(1e-5) == math.inf
    with pytest.raises(ValueError, match="size = 0"):
        reviewer.GroupProfile(PureProfile(1.0, 1), 0)


def test_nothing_is_said_of_runs_without_noise_or_releases():
    assert reviewer.review(of(NonPrivate())) is reviewer.review(of(Gaussian(1.0), 0)) is None


def test_releases_tell_no_more_of_a_person_than_is_stated():
    """Our own noise, drawn 200,000 times: the best event at epsilon 1; false alarm 1e-6."""
    rate, trials, alarm = 0.5, 200_000, 1e-6
    mechanism, draw = GaussianSum(1.0, 2.0), np.random.default_rng(3)
    guarantee = of(mechanism.event(), 1, Participation("poisson", rate))
    law = attending("poisson", rate, 2)

    def density(x, sign):
        return sum(mass * norm.pdf(x, sign * j, 2.0) for j, mass in enumerate(law))

    counts = []
    for seed, sign in enumerate((1, -1)):
        sums = {"x": torch.from_numpy(sign * draw.binomial(2, rate, trials).astype(float))}
        x = mechanism.perturb(sums, open_entropy(seed, "noise", 0))["x"].numpy()
        counts.append(int((density(x, 1) > math.e * density(x, -1)).sum()))
    least = binomtest(counts[0], trials).proportion_ci(1 - alarm).low
    most = binomtest(counts[1], trials).proportion_ci(1 - alarm).high
    seen = least - math.e * most
    assert seen <= reviewer.profile_of_person(guarantee, 2).delta(1.0)
    assert seen > reviewer.profile_of_person(guarantee, 1).delta(1.0), "a test that can fail"
