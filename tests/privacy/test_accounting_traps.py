"""Traps of accountants, measured on dp-accounting 0.6.0: our numbers avoid them.

Where it is cheap the library's own behaviour is asserted too, so that an upgrade that changes it is
noticed here.
"""

import math

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution

from coterie.privacy.accounting import epsilon_by_round, loss_profile, profile
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.profiles import GaussianProfile

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
EVERYONE = Participation("everyone")


def by_loss():
    """Their accountant, on a grid that is coarse and fine enough here."""
    return pld.PLDAccountant(REPLACE_ONE, value_discretization_interval=1e-3)


def epsilon_of(accountant, event, delta):
    return accountant.compose(event).get_epsilon(delta)


def test_replace_doubles_the_sensitivity_once():
    """Under replace the library's two accountants read a noise multiplier differently."""
    twenty = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(3.0), 20)
    by_losses = epsilon_of(by_loss(), twenty, 1e-6)
    by_renyi = epsilon_of(rdp.RdpAccountant(neighboring_relation=REPLACE_ONE), twenty, 1e-6)
    assert by_losses == pytest.approx(18.0, rel=0.01)
    assert by_renyi == pytest.approx(8.3, rel=0.02)

    ours = profile([Gaussian(3.0)] * 20, EVERYONE, "replace").epsilon(1e-6)
    assert ours == pytest.approx(by_losses, rel=1e-3)
    assert ours == GaussianProfile(2 * math.sqrt(20) / 3).epsilon(1e-6)


def test_poisson_replace_takes_the_plain_multiplier():
    """`from_gaussian_mechanism` doubles the shift itself: passing z/2 would double it twice."""
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        4.0,
        sampling_prob=1.0,
        neighboring_relation=REPLACE_ONE,
        value_discretization_interval=1e-3,
    )
    assert theirs.get_epsilon_for_delta(1e-5) == pytest.approx(
        GaussianProfile(2 / 4.0).epsilon(1e-5), rel=1e-3
    )
    nearly_all = profile([Gaussian(4.0)], Participation("poisson", 1 - 1e-9), "replace")
    assert nearly_all.epsilon(1e-5) == pytest.approx(GaussianProfile(0.5).epsilon(1e-5), rel=1e-3)


def test_poisson_sampling_under_replace_is_known_to_one_accountant_alone():
    sampled = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(3.0))
    assert not rdp.RdpAccountant(neighboring_relation=REPLACE_ONE).supports(sampled)
    twenty = dp_accounting.SelfComposedDpEvent(sampled, 20)
    by_losses = epsilon_of(by_loss(), twenty, 1e-5)
    ours = profile([Gaussian(3.0)] * 20, Participation("poisson", 0.2), "replace")
    assert ours.epsilon(1e-5) == pytest.approx(by_losses, rel=1e-3)


def test_repetition_is_never_dropped():
    """The library drops the count of a randomised response; no event of ours carries a count."""
    response = dp_accounting.dp_event.RandomizedResponseDpEvent(
        noise_parameter=2 / (1 + math.exp(0.3)), num_buckets=2
    )
    counted = by_loss().compose(response, 20).get_epsilon(1e-9)
    one_by_one = by_loss()
    for _ in range(20):
        one_by_one.compose(response)
    assert counted == pytest.approx(0.3, rel=0.01)
    assert one_by_one.get_epsilon(1e-9) > 5

    for who in (EVERYONE, Participation("poisson", 0.2), Participation("poisson", 0.2, True)):
        one, twenty = epsilon_by_round([Gaussian(3.0)] * 20, who, "zero_out", 1e-5, [1, 20])
        assert twenty > 1.3 * one


def test_fixed_size_cohorts_are_accounted_for_and_beat_renyi():
    """Only RDP knows sampling without replacement, with a multiplier in units of 2 bounds."""
    z, rounds, clients, cohort, delta = 5.0, 100, 515, 100, 1e-5
    base = dp_accounting.GaussianDpEvent(z / 2)
    without = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, base)
    assert not pld.PLDAccountant(REPLACE_ONE).supports(without)
    assert not rdp.RdpAccountant().supports(without)
    by_renyi = epsilon_of(
        rdp.RdpAccountant(neighboring_relation=REPLACE_ONE),
        dp_accounting.SelfComposedDpEvent(without, rounds),
        delta,
    )
    ours = profile([Gaussian(z)] * rounds, Participation("fixed", cohort / clients), "replace")
    poisson = profile([Gaussian(z)] * rounds, Participation("poisson", cohort / clients), "replace")
    assert poisson.epsilon(delta) < ours.epsilon(delta) < by_renyi / 2


def test_rounding_of_transforms_never_flatters():
    """Far in the tail the library's transforms fall below the truth; our allowance does not."""
    z, rounds = 300.0, 100_000
    exact = GaussianProfile(math.sqrt(rounds) / z)
    ours = loss_profile(((z, rounds),), ("remove",), 1 - 2.0**-50)
    below = False
    for delta in (1e-9, 1e-10, 1e-11, 1e-12, 1e-13):
        epsilon = exact.epsilon(delta)
        below |= ours.directions[0].delta(epsilon) < 0.99 * delta
        assert ours.delta(epsilon) >= 0.999 * delta
    assert below


def test_a_coarse_grid_would_double_a_small_epsilon():
    """400 rounds at epsilon .011: a grid of 1e-3 gives twice the truth, ours follows the plan."""
    who, plan = Participation("poisson", 0.1), [Gaussian(500.0)] * 400
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        500.0, sampling_prob=0.1, value_discretization_interval=1e-3
    ).self_compose(400)
    ours = profile(plan, who, "zero_out").epsilon(1e-5)
    assert theirs.get_epsilon_for_delta(1e-5) > 1.3 * ours
    fine = privacy_loss_distribution.from_gaussian_mechanism(
        500.0, sampling_prob=0.1, value_discretization_interval=3e-6
    ).self_compose(400)
    assert ours == pytest.approx(fine.get_epsilon_for_delta(1e-5), rel=2e-3)


def test_asking_again_is_free():
    """A query costs the library half a second; a ledger may ask ours as often as it likes."""
    plan, who = [Gaussian(7.0)] * 300, Participation("poisson", 0.2)
    first = profile(plan, who, "zero_out")
    assert profile(list(plan), Participation("poisson", 0.2), "zero_out") is first
    assert first.epsilon(1e-5) == first.epsilon(1e-5)
