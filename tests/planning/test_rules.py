"""Rules from public facts: verdicts and rounds against closed forms, and needs that are needed.

The oracle of mu is Gaussian differential privacy itself, written down here with scipy: a release
of a sum with noise z and sensitivity s is (epsilon, delta)-DP for
delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), mu = s / z.
"""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.core.tree import size
from coterie.data.federated import Spec
from coterie.methods.auto import Auto
from coterie.methods.base import registered
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning import rules
from coterie.planning.advice import (
    JOIN,
    SMALL_GAIN,
    advise,
    clients_for,
    cut_for,
    epsilon_of,
    mu_of,
    rounds_for,
    verdict_of,
)
from coterie.planning.plan import NO_DATA, Plan, Privacy
from coterie.planning.rules import clients_times_mu, plan_for, resolve, rounds_by_rule
from coterie.privacy.mechanisms import replaced_by
from coterie.privacy.sampling import Everyone, Poisson

SPEC = Spec((9,), 1, "regression", 550)


def advice_for(method, privacy, sampler, spec, rounds=None):
    rounds = rounds or rounds_by_rule(method, privacy, spec)
    return rules.advice_for(
        Plan(method=method, privacy=privacy, sampler=sampler, rounds=rounds), spec
    )


def resolved(method, privacy, spec, rounds=None):
    return resolve(Plan(method=method, privacy=privacy, sampler=Everyone(), rounds=rounds), spec)


def gaussian_mu(epsilon, delta):
    """Solve the textbook equation for mu."""

    def excess(mu):
        return (
            norm.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
            - delta
        )

    return brentq(excess, 1e-3, 50, xtol=1e-14)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_mu_is_that_of_gaussian_differential_privacy(epsilon, relation):
    found = mu_of(epsilon, 1e-5, relation)
    half = 2 if relation == "replace" else 1
    assert found == pytest.approx(gaussian_mu(epsilon, 1e-5) / half, rel=1e-6)
    assert epsilon_of(found, 1e-5, relation) == pytest.approx(epsilon, rel=1e-5)


def test_the_notes_own_numbers():
    most = [advise(clients, 1.0, 10).max_parameters for clients in (30, 105, 205)]
    assert most == [5, 71, 271]  # printed 6, 71, 270
    assert advise(550, 1.0, 10).rounds == 44 and advise(65, 1.0, 8).rounds == 3


def test_thirty_clients_learn_alone_and_hear_what_would_help():
    advice = advise(30, 1.0, 10)
    assert advice.verdict == "learn alone" and advice.rounds == 3
    told = " ".join(advice.remedies)
    assert "40 for a small gain, 79 to join, at epsilon 1" in told
    assert "epsilon: 1.35 for a small gain" in told and "at most 5 for a small gain" in told
    assert "Public features" in told and 'shared = "slice"' in told and "116" in told
    assert "With 30 clients, epsilon 1 supports models with up to 5 shared" in advice.reason
    assert "This model shares 10" in advice.reason


facts = st.fixed_dictionaries(
    {
        "clients": st.integers(2, 20_000),
        "epsilon": st.floats(0.05, 20.0),
        "parameters": st.integers(1, 5_000),
        "relation": st.sampled_from(["zero_out", "replace"]),
        "tolerance": st.sampled_from([1.0, 20.0]),
    }
)


@settings(max_examples=30, deadline=None)
@given(facts)
def test_worth_rounds_and_verdict_are_what_the_rule_says(given):
    advice = advise(**given)
    moved = 2 if given["relation"] == "replace" else 1
    mu = gaussian_mu(given["epsilon"], min(1e-5, 0.1 / given["clients"])) / moved
    worth = (0.3 * given["clients"] * mu) ** 2 * given["tolerance"] / given["parameters"]
    assert advice.affordable_rounds == pytest.approx(worth, rel=1e-5)
    curved = given["parameters"] <= 5 and given["clients"] * advice.mu >= 300
    borne = (
        advice.affordable_rounds
        if advice.affordable_rounds < 10
        else math.sqrt(10 * advice.affordable_rounds)
    )
    assert advice.rounds == (10 if curved else min(max(math.floor(borne), 3), 50))
    borders = {"learn alone": (0, 1), "small gain": (1, 4), "join": (4, math.inf)}
    low, high = borders[advice.verdict]
    assert low <= advice.affordable_rounds < high
    assert (advice.max_parameters >= given["parameters"]) == (advice.verdict != "learn alone")
    assert bool(advice.remedies) == (advice.verdict != "join")


@settings(max_examples=30, deadline=None)
@given(facts)
def test_what_is_needed_is_enough_and_one_less_is_not(given):
    advice = advise(**given)
    for verdict, least in (("small gain", SMALL_GAIN), ("join", JOIN)):
        need = advice.needs[verdict]
        enough = advise(**given | {"clients": max(need["clients"], 2)})
        assert enough.affordable_rounds >= least * (1 - 1e-9)
        if need["clients"] > 2:
            assert advise(**given | {"clients": need["clients"] - 1}).affordable_rounds < least * (
                1 + 1e-9
            )
        if need["epsilon"] < 1e3:
            there = advise(**given | {"epsilon": need["epsilon"]}).affordable_rounds
            assert there == pytest.approx(least, rel=1e-3)
        if need["parameters"]:
            assert advise(
                **given | {"parameters": need["parameters"]}
            ).affordable_rounds >= least * (1 - 1e-9)
        assert advise(
            **given | {"parameters": need["parameters"] + 1}
        ).affordable_rounds < least * (1 + 1e-9)


def test_more_clients_and_the_usual_delta_that_falls_with_them():
    many = clients_for(4.0, 0.05, 2000)  # so many that delta is below 1e-5
    assert many > 10_000 and advise(many, 0.05, 2000).affordable_rounds >= 4
    assert advise(many - 1, 0.05, 2000).affordable_rounds < 4
    fixed = clients_for(4.0, 0.05, 2000, delta=1e-5)
    assert fixed < many


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"clients": 0}, "clients = 0"),
        ({"parameters": 0}, "parameters = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"epsilon": -1.0}, "epsilon = -1.0"),
        ({"tolerance": 0.0}, "tolerance = 0.0"),
        ({"cohort": 700.0}, "550"),
        ({"relation": "cousin"}, "cousin"),
    ],
)
def test_nonsense_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        advise(**{"clients": 550, "epsilon": 1.0, "parameters": 10} | given)


def test_small_cohorts_never_gain_and_asking_for_everyone_may_help():
    whole = advise(200, 1.0, 60)
    worths = [
        advise(200, 1.0, 60, cohort=cohort, rounds=4).affordable_rounds
        for cohort in (2, 20, 100, 200)
    ]
    assert worths == sorted(worths) and worths[-1] == pytest.approx(whole.affordable_rounds)
    assert worths[0] < 0.8 * whole.affordable_rounds and whole.verdict == "join"
    few = advise(200, 1.0, 60, cohort=2, rounds=4)
    assert few.verdict != "join" and "All clients in every round" in " ".join(few.remedies)


def test_too_many_rounds_are_pointed_out():
    assert not any("Fewer rounds" in told for told in advise(65, 1.0, 8).remedies)
    assert "affords 3, and 25" in " ".join(advise(65, 1.0, 8, rounds=25).remedies)


def test_a_plan_that_heeds_the_verdict_keeps_it():
    spec, asked = Spec((9,), 1, "regression", 12), Plan(method=Auto(), privacy=Privacy(epsilon=0.5))
    joined = resolve(asked, spec)
    alone = rules.heed_verdict(asked, joined, spec)
    assert alone.method.kind == "local" and alone.guarantee(12).epsilon == 0 and alone.heeded
    assert rules.advice_for(alone, spec) == rules.advice_for(joined, spec)
    assert Plan.from_table(alone.to_table()) == alone
    named = Plan(method=PFEB(), privacy=Privacy(epsilon=0.5))
    assert rules.heed_verdict(named, resolve(named, spec), spec).method.kind == "pfeb"


def test_classes_tolerate_more_noise_and_few_rows_less():
    assert cut_for(10, classes=True) == pytest.approx(2 / 5)
    assert cut_for(10, classes=False) == cut_for(10, classes=False, rows=500) == 1
    assert cut_for(60, classes=True, rows=6) == pytest.approx(4)
    for task, outputs, rows, verdict in (
        ("regression", 1, None, "small gain"),
        ("regression", 1, 3, "learn alone"),
        ("binary", 1, None, "join"),
    ):
        spec, data = Spec((9,), outputs, task, 50), replace(NO_DATA, rows_per_client=rows)
        asked = Plan(method=Auto(), privacy=Privacy(epsilon=1.0), data=data)
        advice = rules.advice_for(resolve(asked, spec), spec)
        assert advice.verdict == verdict, (task, rows)
        # The largest number of parameters is where the verdict turns.
        at = cut_for(10, classes=task != "regression", rows=rows) / advice.affordable_rounds
        assert advice.max_parameters == math.floor(10 / at)
    spec, net = Spec((9,), 1, "binary", 550), MLP()
    for method, cuts in (
        (PMTL(model=net), (1 / 3, 1 / 3)),
        (Finetune(base=FedAvg(model=net)), (1 / 7, 1 / 2)),
        (FedAvg(model=net), (1, 1)),
        (DPFedMTL(model=net), (1, 1)),
    ):
        network = Plan(method=method, privacy=Privacy(epsilon=1.0))
        for one, cut in zip((spec, replace(spec, task="regression")), cuts, strict=True):
            assert rules.advice_for(resolve(network, one), one).cut == pytest.approx(cut)


def test_words_of_verdicts():
    assert [verdict_of(worth) for worth in (0.99, 1.0, 3.99, 4.0)] == [
        "learn alone",
        "small gain",
        "small gain",
        "join",
    ]
    assert [rounds_for(worth) for worth in (0.2, 3.9, 49.99, 1e6)] == [3, 3, 49, 50]
    bent = [rounds_for(worth, knee=10.0) for worth in (0.2, 9.9, 10.0, 40.0, 62.6, 250.0, 1e6)]
    assert bent == [3, 9, 10, 20, 25, 50, 50]


def test_the_verdict_says_nothing_that_the_relative_error_denies():
    """The mean is one of several blocks: its own error is larger than the rule's by its share."""
    settled = resolved(Auto(), Privacy(epsilon=1.0), SPEC)
    advice = advice_for(settled.method, settled.privacy, Everyone(), SPEC, settled.rounds)
    assert advice.reason == (
        "With 550 clients, epsilon 1 supports models with up to 1,956 shared parameters. This "
        "model shares 10: enough budget for 44 rounds."
    )
    numbers = settled.method.rounds(SPEC).dimension
    assert numbers == advice.parameters == 10 and size(settled.method.contribution(SPEC)) == 148


# --- concrete plans ------------------------------------------------------------------------------


def test_a_plan_at_full_participation_agrees_with_the_public_facts():
    for relation in ("zero_out", "replace"):
        privacy = Privacy(epsilon=1.0, relation=relation)
        found = advice_for(PMTL(), privacy, Poisson(), SPEC)
        facts = advise(550, 1.0, 10, relation=relation)
        assert found.affordable_rounds == pytest.approx(facts.affordable_rounds, rel=1e-6)
        assert (found.verdict, found.parameters, found.delta) == ("join", 10, 1e-5)
        assert found.clip == 0.5 and found.needs == facts.needs


def test_the_public_facts_know_what_a_replaced_client_moves():
    """All blocks are signed: a client can be replaced by its opposite."""
    assert replaced_by(PFEB().clipping(1, 1, 1.0).blocks) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("clients", range(20, 200, 12))
def test_replaced_clients_are_weighed_alike_in_plan_rounds_and_facts(clients):
    spec, privacy = replace(SPEC, clients=clients), Privacy(epsilon=1.0, relation="replace")
    settled = resolved(PFEB(), privacy, spec)
    plan = advice_for(settled.method, settled.privacy, Everyone(), spec, settled.rounds)
    facts = advise(clients, 1.0, 10, relation="replace")
    assert plan.affordable_rounds == pytest.approx(facts.affordable_rounds, rel=1e-6)
    assert (plan.verdict, plan.rounds) == (facts.verdict, facts.rounds)
    assert not any("All clients" in told for told in (*plan.remedies, *facts.remedies))
    for verdict in ("small gain", "join"):
        assert plan.needs[verdict] == pytest.approx(facts.needs[verdict], rel=1e-5)


def test_reach_is_clients_over_the_noise_of_one_release():
    for relation, replaced in (("zero_out", 1.0), ("replace", 2.0), ("replace", 1.5)):
        privacy = Privacy(epsilon=2.0, relation=relation)
        found = clients_times_mu(privacy, 70, replaced=max(replaced, 1.5))
        assert found == pytest.approx(70 * gaussian_mu(2.0, 1e-5) / replaced, rel=1e-6)
    for method in (PMTL(), PFEB(residual=True), PFEB(residual=False), PFEB(gls=True)):
        privacy = Privacy(epsilon=2.0, relation="replace", delta=1e-5)
        plan = Plan(method=method, privacy=privacy, rounds=1)
        blocks = method.clipping(1, 1, 1.0).blocks
        reach = clients_times_mu(privacy, 550, replaced=replaced_by(blocks) if blocks else 2.0)
        assert reach == pytest.approx(550 / plan.noise_multipliers(550)[0], rel=1e-5)


def test_worth_is_told_by_the_relative_error_of_the_plan():
    for sampler, rounds in ((Everyone(), 7), (Poisson(40), 7), (Poisson(5), 30)):
        privacy = Privacy(epsilon=1.0)
        found = advice_for(PMTL(), privacy, sampler, SPEC, rounds)
        plan = Plan(method=PMTL(), privacy=privacy, sampler=sampler, rounds=rounds)
        error = plan.relative_error(SPEC)
        assert found.affordable_rounds == pytest.approx(rounds * (0.3 / error) ** 2, rel=1e-9)
        assert found.rounds == rounds


def test_uneven_spending_and_given_noise_count_by_their_whole_budget():
    even = advice_for(PMTL(), Privacy(epsilon=1.0), Everyone(), SPEC, 3)
    skew = advice_for(PMTL(), Privacy(epsilon=1.0, budget=(1, 2, 3)), Everyone(), SPEC, 3)
    assert skew.affordable_rounds == pytest.approx(even.affordable_rounds, rel=1e-6)
    noise = math.sqrt(3) / mu_of(1.0, 1e-5)
    by_noise = advice_for(PMTL(), Privacy(noise_multiplier=noise), Everyone(), SPEC, 3)
    assert (
        by_noise.affordable_rounds == pytest.approx(even.affordable_rounds, rel=1e-6)
        and by_noise.epsilon is None
    )
    assert by_noise.needs["join"]["epsilon"] == pytest.approx(
        even.needs["join"]["epsilon"], rel=1e-5
    )


def test_noise_of_clients_own_costs_as_many_clients_as_there_are():
    privacy = Privacy(epsilon=1.0, noise="local")
    found = advice_for(PMTL(), privacy, Everyone(), SPEC, 3)
    central = advice_for(PMTL(), Privacy(epsilon=1.0), Everyone(), SPEC, 3)
    assert found.affordable_rounds == pytest.approx(central.affordable_rounds / 550, rel=1e-6)
    more = replace(SPEC, clients=found.needs["small gain"]["clients"])
    assert advice_for(PMTL(), privacy, Everyone(), more, 3).affordable_rounds == pytest.approx(
        1, rel=0.01
    )


def test_clusters_are_means_of_their_own():
    spec = replace(SPEC, clients=100)
    halves = PMTL(clusters=(0,) * 50 + (1,) * 50)
    one = advice_for(PMTL(), Privacy(epsilon=4.0), Everyone(), spec, 3)
    two = advice_for(halves, Privacy(epsilon=4.0), Everyone(), spec, 3)
    assert (
        two.affordable_rounds == pytest.approx(one.affordable_rounds / 4)
        and two.parameters == one.parameters
    )


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        (Local(), Privacy(epsilon=1.0)),
        (MPMTL(), Privacy(epsilon=1.0)),
        (PMTL(), Privacy(epsilon=math.inf)),
        (PMTL(), Privacy(epsilon=1.0, noise="laplace", delta=0.0)),
    ],
)
def test_no_verdict_where_the_rule_knows_nothing(method, privacy):
    assert advice_for(method, privacy, Everyone(), SPEC, 1) is None


def test_slices_of_public_features_bear_twenty_times_as_many_numbers():
    spec = Spec((64,), 10, "multiclass", 105)
    sliced = PMTL(shared="slice", directions=3)
    found = advice_for(sliced, Privacy(epsilon=1.0), Everyone(), spec, 3)
    assert found.parameters == 40 and found.affordable_rounds == pytest.approx(
        20 * advise(105, 1.0, 40).affordable_rounds, rel=1e-6
    )
    assert found.max_parameters == math.floor(20 * (0.3 * 105 * mu_of(1.0, 1e-5)) ** 2)
    whole = advice_for(Finetune(base=sliced), Privacy(epsilon=1.0), Everyone(), spec, 3)
    assert whole.affordable_rounds == found.affordable_rounds
    assert "Public features" not in " ".join(found.remedies)


def test_regression_is_not_told_of_classifiers():
    few = replace(SPEC, clients=30)
    classes = replace(few, task="multiclass", outputs=3)
    told = [
        " ".join(advice_for(PMTL(), Privacy(epsilon=1.0), Everyone(), spec, 1).remedies)
        for spec in (few, classes)
    ]
    assert "Public features" not in told[0] and "Public features" in told[1]


# --- rounds and what else is filled in -----------------------------------------------------------


def test_curvatures_are_posted_only_where_their_rounds_spend_what_they_need():
    """Noise that is given buys with every round: 10 rounds are run with curvatures, else 50."""
    spec = replace(SPEC, shape=(3,))
    for noise, gls in ((550 * math.sqrt(10) / 299, None), (550 * math.sqrt(10) / 301, True)):
        privacy = Privacy(noise_multiplier=noise)
        settled = resolved(PFEB(), privacy, spec)
        assert (settled.method.gls, settled.rounds) == (gls, 10 if gls else 50)
        again = resolve(settled, spec)
        assert again == settled  # so that a run goes on as it began
        plan = Plan(method=settled.method, privacy=settled.privacy, rounds=settled.rounds)
        spent = 550 * math.hypot(*(1 / z for z in plan.noise_multipliers(550)))
        assert not gls or spent >= 300


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("features", [2, 4, 5, 9, 60])
@pytest.mark.parametrize("clients", [12, 65, 300, 1200, 2410])
def test_public_facts_foretell_the_plan_that_auto_makes(clients, features, epsilon):
    spec = Spec((features,), 1, "regression", clients)
    settled = resolved(Auto(), Privacy(epsilon=epsilon), spec)
    facts = advise(clients, epsilon, features + 1)
    assert (settled.rounds, settled.privacy.clip) == (facts.rounds, facts.clip)
    plan = advice_for(settled.method, settled.privacy, Everyone(), spec, settled.rounds)
    assert plan.affordable_rounds == pytest.approx(facts.affordable_rounds, rel=1e-6)
    assert (plan.verdict, plan.parameters) == (facts.verdict, facts.parameters)
    assert plan.remedies == tuple(told for told in facts.remedies if "Public" not in told)


def test_rounds_of_other_methods_stay_as_they_were():
    few = replace(SPEC, clients=30)
    assert rounds_by_rule(PMTL(), Privacy(epsilon=1.0), few) == 3
    assert rounds_by_rule(PMTL(), Privacy(epsilon=1.0), SPEC) == 25
    mid = replace(SPEC, clients=120)
    worth = (0.3 * 120 * mu_of(1.0, 1e-5)) ** 2 / 10
    assert 3 < worth < 25
    assert rounds_by_rule(PMTL(), Privacy(epsilon=1.0), mid) == math.floor(worth)
    assert rounds_by_rule(MPMTL(), Privacy(epsilon=1.0), few) == 1
    assert rounds_by_rule(Local(), Privacy(epsilon=1.0), SPEC) == 1
    assert rounds_by_rule(PMTL(), Privacy(epsilon=math.inf), SPEC) == 25
    assert rounds_by_rule(PMTL(), Privacy(noise_multiplier=3.0), SPEC) == 25
    network = DPFedMTL(model=MLP(hidden=(4,)))
    numbers = network.rounds(mid).dimension
    bound = (20 * 120 * mu_of(0.1, 1e-5)) ** 2 / numbers
    rounds = rounds_by_rule(network, Privacy(epsilon=0.1), mid)
    assert rounds == min(max(math.floor(bound), 3), 50)


def test_finetuning_has_the_rounds_of_its_base():
    for kind in ("fedavg", "pmtl", "naive_dp"):
        base = registered()[kind]()
        privacy = Privacy(epsilon=1.0)
        wrapped = Finetune(base=base)
        assert rounds_by_rule(wrapped, privacy, SPEC) == rounds_by_rule(base, privacy, SPEC)


def test_methods_hear_of_the_budget_before_rounds_are_chosen():
    heard = []

    class Curious(FedAvg):
        def resolve(self, spec, *, n_mu, cohort):
            heard.append(n_mu)
            return Told()

    class Told(FedAvg):
        def rounds(self, spec):
            return replace(super().rounds(spec), between=(7, 7))

    for privacy, reach in (
        (Privacy(epsilon=1.0), 550 * mu_of(1.0, 1e-5)),
        (Privacy(epsilon=math.inf), math.inf),
        (Privacy(noise_multiplier=5.0), 550 * math.sqrt(9) / 5),
    ):
        rounds = 9 if privacy.epsilon is None else None
        settled = resolved(Curious(), privacy, SPEC, rounds)
        assert heard.pop() == pytest.approx(reach) and isinstance(settled.method, Told)
        assert settled.rounds == {1.0: 7, math.inf: 25}.get(privacy.epsilon, 9)
        assert isinstance(resolved(Finetune(base=Curious()), privacy, SPEC).method.base, Told)
        heard.clear()
    assert clients_times_mu(Privacy(noise_multiplier=5.0, budget=(3.0, 4.0)), 10) == pytest.approx(
        10
    )


def test_a_plan_from_python_is_complete():
    plan = plan_for(SPEC, Privacy(epsilon=1.0), method=PMTL(), simulation_seed=3)
    assert (plan.rounds, plan.privacy.delta, plan.privacy.clip) == (25, 1e-5, 0.5)
    assert plan.simulation_seed == 3 and plan.sampler == Poisson()
    spread = plan_for(SPEC, Privacy(epsilon=1.0, budget=(1.0, 2.0)), method=PMTL())
    assert spread.rounds == 2


def test_the_rule_loads_no_torch():
    code = "import sys, coterie; coterie.advise(550, 1.0, 10); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("outputs", "task", "more"), [(62, "multiclass", 20), (1, "binary", 1)])
def test_slices_of_classifiers_get_more_rounds_and_nothing_else_does(outputs, task, more):
    """Twenty times what means bear, of several classes alone; 16 rounds on FEMNIST at epsilon 4."""
    spec = Spec(shape=(96,), outputs=outputs, task=task, clients=105)
    privacy = Privacy(epsilon=4.0)
    borne = (0.3 * 105 * gaussian_mu(4.0, 1e-5)) ** 2 / ((16 + 1) * outputs)
    sliced = rounds_by_rule(PMTL(shared="slice", directions=16), privacy, spec)
    assert sliced == min(max(math.floor(more * borne), 3), 25)
    if more == 20:
        assert sliced == 16
        whole = (0.3 * 105 * gaussian_mu(4.0, 1e-5)) ** 2 / (97 * outputs)
        assert rounds_by_rule(PMTL(), privacy, spec) == max(math.floor(whole), 3)
