"""What selection costs: laws of K, Renyi bounds and Theorem 2 against exact divergences."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad

from coterie.privacy.events import (
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Participation,
    SharedGaussian,
    Wishart,
)
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.profiles import GaussianProfile
from coterie.privacy.selection import (
    ALL_RUNS,
    CHOSEN,
    ORDERS,
    RunLaw,
    Selection,
    law_mean,
    renyi,
    renyi_of_best,
    renyi_to_epsilon,
    sampled_log_moment,
)

pytestmark = pytest.mark.full

EVERYONE = Participation("everyone")
LAWS = [RunLaw(3.0, 0.0), RunLaw(10.0, 0.0), RunLaw(2.0, 0.5), RunLaw(10.0), RunLaw(20.0, 3.0)]


def make(**changes):
    usual = {
        "candidates": ((Gaussian(10.0),) * 5,),
        "score": Gaussian(8.0, 1.0),
        "law": RunLaw(10.0),
        "participation": EVERYONE,
        "relation": "zero_out",
        "delta": 1e-5,
        "clients": 200,
    }
    return Selection(**(usual | changes))


# --- the number of runs --------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
def test_the_law_is_that_of_the_paper(law):
    found = law.probabilities(20_000)
    k = np.arange(1, 20_001)
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert found @ k == pytest.approx(law.mean, rel=1e-6)
    if law.eta == 0:
        expected = stats.logser(1 - law.gamma).pmf(k)
    else:
        whole = stats.nbinom(law.eta, law.gamma)
        expected = whole.pmf(k) / (1 - whole.pmf(0))
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-300)


@pytest.mark.parametrize("law", LAWS)
def test_gamma_is_that_of_another_implementation(law):
    other = rdp_privacy_accountant._gamma_truncated_negative_binomial(law.eta, law.mean)
    assert law.gamma == pytest.approx(other, rel=1e-6)
    assert law_mean(law.gamma, law.eta) == pytest.approx(law.mean, rel=1e-9)


def test_quantiles_are_the_least_that_do():
    for law in LAWS:
        below = np.cumsum(law.probabilities(5000))
        for share in (0.0, 0.3, 0.5, 0.9, 0.99):
            runs = law.quantile(share)
            assert below[runs - 1] > share and (runs == 1 or below[runs - 2] <= share)


@pytest.mark.parametrize("given", [(1.0, 1.0), (0.5, 1.0), (math.nan, 1.0), (1e6, 1.0), (5, -0.5)])
def test_laws_that_make_no_sense_say_why(given):
    with pytest.raises(ValueError, match="expected"):
        RunLaw(*given)


# --- Renyi bounds of one run ---------------------------------------------------------------------


def accountant(participation, events, orders=ORDERS):
    found = rdp_privacy_accountant.RdpAccountant(orders)
    for event in events:
        inner = dp_event.GaussianDpEvent(event.noise_multiplier)
        if participation.rate < 1:
            inner = dp_event.PoissonSampledDpEvent(participation.rate, inner)
        found.compose(inner)
    return found


def test_everyone_is_closed_form():
    events = (Gaussian(3.0), Gaussian(3.0), Gaussian(5.0, 1.0))
    np.testing.assert_allclose(
        renyi(events, EVERYONE, "zero_out"), ORDERS * (2 / 9 + 1 / 25) / 2, rtol=1e-8
    )
    np.testing.assert_allclose(
        renyi(events, EVERYONE, "replace"), ORDERS * (4 * 2 / 9 + 1 / 25) / 2, rtol=1e-8
    )
    assert not renyi((), EVERYONE, "replace").any()


@pytest.mark.parametrize(("rate", "z"), [(0.1, 2.0), (0.02, 0.8), (0.5, 6.0)])
def test_sampling_agrees_with_another_accountant(rate, z):
    who = Participation("poisson", rate)
    found = renyi((Gaussian(z),) * 3, who, "zero_out")
    whole = (np.rint(ORDERS) == ORDERS) & (ORDERS < 600)
    other = np.asarray(accountant(who, (Gaussian(z),) * 3, ORDERS[whole])._rdp)
    np.testing.assert_allclose(found[whole], other, rtol=1e-7)
    assert (found[whole] >= other).all()


def divergence(order, p, q):
    """D_a(P || Q) of densities given by their logarithms, by quadrature."""
    found, _ = quad(lambda x: math.exp(order * p(x) + (1 - order) * q(x)), -60, 60, limit=400)
    return math.log(found) / (order - 1)


def log_mixture(rate, shift, z):
    return lambda x: np.logaddexp(
        math.log1p(-rate) + stats.norm.logpdf(x, 0, z),
        math.log(rate) + stats.norm.logpdf(x, shift, z),
    )


@pytest.mark.parametrize(("rate", "z"), [(0.1, 1.5), (0.4, 3.0), (0.3, 0.6)])
def test_replacing_a_sampled_client_is_bounded(rate, z):
    who = Participation("poisson", rate)
    found = renyi((Gaussian(z),), who, "replace")
    seen = renyi((Gaussian(z),), replace(who, visible=True), "replace")
    assert (found <= seen).all()
    for at in np.flatnonzero(np.isin(ORDERS, (2, 4.25, 8))):
        exact = divergence(ORDERS[at], log_mixture(rate, 1, z), log_mixture(rate, -1, z))
        assert found[at] == pytest.approx(exact, rel=1e-6)


def test_a_coin_that_is_seen():
    who = Participation("poisson", 0.3, visible=True)
    found = renyi((Gaussian(2.0),), who, "replace")
    moments = np.exp(np.minimum(ORDERS * (ORDERS - 1) / 2, 600))
    expected = np.log(0.7 + 0.3 * moments) / (ORDERS - 1)
    small = ORDERS < 20
    np.testing.assert_allclose(found[small], expected[small], rtol=1e-7)
    fixed = renyi((Gaussian(2.0),), Participation("fixed", 0.3), "replace")
    np.testing.assert_array_equal(found, fixed)


def test_a_log_moment_by_quadrature():
    for order, rate, z in ((1.3, 0.2, 1.0), (5.5, 0.05, 0.7), (2.0, 0.9, 0.3)):
        p, q, turned = (log_mixture(rate, at, z) for at in (1, 0, -1))
        for relation, other in (("zero_out", q), ("replace", turned)):
            exact = divergence(order, p, other) * (order - 1)
            found = sampled_log_moment(order, rate, z, relation)
            assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    "event", [Laplace(0.5), Wishart(12, 0.5), LocalGaussian(3.0), SharedGaussian(3.0), NonPrivate()]
)
def test_other_noise_is_refused(event):
    with pytest.raises(ValueError, match=f"{type(event).__name__} noise.*gaussian"):
        make(candidates=((event,),))


# --- Theorem 2 -----------------------------------------------------------------------------------


def generating(law, x):
    """E[x^K] of the truncated negative binomial law, in closed form."""
    gamma, eta = law.gamma, law.eta
    if eta == 0:
        return np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return np.expm1(-eta * np.log1p(-(1 - gamma) * x)) / math.expm1(-eta * math.log(gamma))


def best_of(law, chances):
    """The law of the best of K outputs, worst first."""
    below = np.concatenate([[0.0], np.cumsum(chances)])
    return np.diff(generating(law, np.minimum(below, 1.0)))


def divergences(p, q):
    with np.errstate(divide="ignore"):
        terms = ORDERS[:, None] * np.log(p) + (1 - ORDERS[:, None]) * np.log(q)
    top = terms.max(axis=1)
    return (top + np.log(np.exp(terms - top[:, None]).sum(axis=1))) / (ORDERS - 1)


def both_ways(p, q):
    return np.maximum(divergences(p, q), divergences(q, p))


chances = st.lists(st.floats(1e-3, 1), min_size=2, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.sampled_from(LAWS), chances, st.floats(0.05, 3), st.randoms(use_true_random=False))
def test_the_bound_holds_for_mechanisms_with_few_outputs(law, weights, width, coins):
    p = np.array(weights)
    q = p * np.exp([coins.uniform(-width, width) for _ in weights])
    p, q = p / p.sum(), q / q.sum()
    exact = both_ways(best_of(law, p), best_of(law, q))
    bound = renyi_of_best(both_ways(p, q), law)
    assert (exact <= bound * (1 + 1e-9) + 1e-9).all()


def test_the_bound_is_needed_and_not_absurd():
    # A rare best output that is e^epsilon times as probable with the client.
    law, chance = RunLaw(100.0), 1e-4
    p, q = (np.array([1 - c, c]) for c in (chance * math.exp(0.5), chance))
    one, exact = both_ways(p, q), both_ways(best_of(law, p), best_of(law, q))
    assert (exact > 20 * one).any(), "the divergence of one run is no bound for the best of many"
    assert (exact <= renyi_of_best(one, law)).all()
    # An output that is likelier with the client, and better ones that are less likely with it, by
    # the same factor: with many geometric runs it counts 2 + eta = 3 times.
    law, up = RunLaw(1000.0), math.exp(0.5)
    p, q = (np.array([1 - a - b, a, b]) for a, b in ((1e-4 * up, 0.1), (1e-4, 0.1 * up)))
    one, exact = both_ways(p, q), both_ways(best_of(law, p), best_of(law, q))
    bound, high = renyi_of_best(one, law), ORDERS > 500
    assert (exact[high] > 2.5 * one[high]).all()
    assert (exact[high] > 0.9 * bound[high]).all()
    assert (exact <= bound).all()


@pytest.mark.parametrize("law", LAWS)
def test_theorem_2_agrees_with_another_implementation(law):
    one = renyi((Gaussian(4.0),) * 3, EVERYONE, "zero_out")
    other = rdp_privacy_accountant._compute_rdp_repeat_and_select(ORDERS, one, law.mean, law.eta)
    ours = renyi_of_best(one, law)
    # The other one also uses that divergences grow with the order.
    later = np.minimum.accumulate(ours[::-1])[::-1]
    np.testing.assert_allclose(later, other, rtol=1e-6)


@pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-2])
def test_conversion_agrees_with_another_implementation(delta):
    for z in (0.5, 3.0, 50.0):
        found = renyi((Gaussian(z),), EVERYONE, "zero_out")
        other, _ = rdp_privacy_accountant.compute_epsilon(ORDERS, found, delta)
        assert renyi_to_epsilon(found, delta) == pytest.approx(other, rel=1e-9, abs=1e-12)
        exact = GaussianProfile(1 / z).epsilon(delta)
        assert exact <= renyi_to_epsilon(found, delta) <= 1.35 * exact + 0.02


@pytest.mark.parametrize(
    ("who", "law"), [(EVERYONE, RunLaw(10.0)), (Participation("poisson", 0.2), RunLaw(5.0, 0.0))]
)
def test_chosen_alone_end_to_end(who, law):
    whole = ORDERS[(np.rint(ORDERS) == ORDERS) & (ORDERS < 200)]
    events = (Gaussian(10.0),) * 5 + (Gaussian(8.0),)
    inner = [dp_event.GaussianDpEvent(event.noise_multiplier) for event in events]
    if who.rate < 1:
        inner = [dp_event.PoissonSampledDpEvent(who.rate, one) for one in inner]
    event = dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(inner), law.mean, law.eta)
    other = rdp_privacy_accountant.RdpAccountant(whole).compose(event).get_epsilon(1e-5)
    found = make(participation=who, law=law).chosen_alone
    assert 0.97 * other <= found <= other * (1 + 1e-6)  # more orders to choose from


# --- both views ----------------------------------------------------------------------------------


def test_the_dearest_settings_decide_for_the_chosen_run():
    cheap, dear = (Gaussian(20.0),) * 5, (Gaussian(10.0),) * 5
    assert make(candidates=(cheap, dear)).chosen_alone == make(candidates=(dear,)).chosen_alone
    assert make(candidates=(cheap,)).chosen_alone < make(candidates=(dear,)).chosen_alone


def test_it_costs_more_than_one_run_and_grows_with_the_number():
    found = [make(law=RunLaw(mean)).chosen_alone for mean in (1.5, 5.0, 50.0)]
    one = make().of_runs([0]).epsilon
    assert one < found[0] < found[1] < found[2] < 4 * one
    assert make(law=RunLaw(10.0, 0.0)).chosen_alone < make(law=RunLaw(10.0, 2.0)).chosen_alone


def test_other_clients_see_the_composition_of_what_was_drawn():
    runs = ((Gaussian(10.0),) * 5, (Gaussian(7.0),) * 2)
    found = make(candidates=runs)
    square = 2 * 5 / 100 + 2 / 49 + 3 / 64
    together = found.of_runs([0, 1, 0])
    assert together.epsilon == pytest.approx(GaussianProfile(math.sqrt(square)).epsilon(1e-5))
    replaced = replace(found, relation="replace").of_runs([0, 1, 0])
    square = 4 * (2 * 5 / 100 + 2 / 49) + 3 / 64  # a score cannot be turned round
    assert replaced.epsilon == pytest.approx(GaussianProfile(math.sqrt(square)).epsilon(1e-5))


def test_other_clients_under_sampling_are_told_the_exact_composition():
    who = Participation("poisson", 0.2)
    found = make(participation=who).of_runs([0, 0])
    events = ((Gaussian(10.0),) * 5 + (Gaussian(8.0, 1.0),)) * 2
    expected = Guarantee(events, who, "zero_out", 1e-5, 200).epsilon
    assert found.epsilon == expected
    fixed = make(participation=Participation("fixed", 0.2), relation="replace").of_runs([0])
    shown = Participation("fixed", 0.2, visible=True)
    # Clients know from their own participation who takes part.
    assert fixed.epsilon == make(participation=shown, relation="replace").of_runs([0]).epsilon
    assert fixed.epsilon > fixed.views["outsider"]


def test_what_may_come_is_told_before():
    found = make()
    table = found.forecast((0.5, 0.9))
    assert [one.runs for one in table] == [found.law.quantile(0.5), found.law.quantile(0.9)]
    assert table[0].epsilon == found.of_runs([0] * table[0].runs).epsilon < table[1].epsilon
    told = found.statement()
    assert CHOSEN in told and ALL_RUNS in told and "90%" in told


def test_json_is_enough_to_compute_both_anew_and_is_not_believed():
    runs = ((Gaussian(10.0),) * 5, (Gaussian(7.0, 1.5),) * 2, ())
    found = make(candidates=runs, participation=Participation("poisson", 0.4, visible=True))
    text = json.dumps(found.to_json([0, 2, 1]), allow_nan=False)
    data = json.loads(text)
    assert data["epsilon_chosen_alone"] == {"epsilon": found.chosen_alone, "bound": CHOSEN}
    assert data["epsilon_other_clients"]["epsilon"] == found.of_runs([0, 2, 1]).epsilon
    data["epsilon_chosen_alone"]["epsilon"] = 0.1
    again = Selection.from_json(data)
    assert again == found and again.chosen_alone == found.chosen_alone
    data["score"] = data["candidates"][0]
    with pytest.raises(ValueError, match="one Gaussian event"):
        Selection.from_json(data)


def test_words_round_up_and_name_who_sees_what():
    told = make(simulation=True).statement([0, 0])
    assert told.startswith("SIMULATION")
    assert f"{CHOSEN}: epsilon = " in told and f"{ALL_RUNS} (2 runs): epsilon = " in told
    shown = float(told.split("epsilon = ")[1].split()[0])
    assert make().chosen_alone <= shown <= make().chosen_alone + 1e-3


def test_nothing_on_offer_is_refused():
    with pytest.raises(ValueError, match="no candidate settings"):
        make(candidates=())
