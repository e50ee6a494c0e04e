"""The account of noise in shares: views against closed forms, and `verify` with code of its own."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats

import coterie as ct
from coterie.cli.main import main
from coterie.privacy.events import (
    EVENTS,
    Gaussian,
    Participation,
    SharedGaussian,
    list_runs,
    read_runs,
)
from coterie.privacy.guarantee import Guarantee, reasons
from coterie.privacy.noise import SharedNoise
from coterie.verification.account import Account, by_view

EVERYONE = Participation("everyone")


def epsilon_of(mu, delta):
    """The epsilon of mu-Gaussian DP, from its definition (Balle and Wang 2018)."""

    def excess(epsilon):
        upper = stats.norm.cdf(-epsilon / mu + mu / 2)
        return upper - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2) - delta

    return optimize.brentq(excess, 0, 200)


def guarantee(z=20.0, rounds=25, clients=537, least=480, corrupt=20, who=EVERYONE, **more):
    event = SharedGaussian(z, more.pop("replaced", 2.0), least, corrupt)
    usual = {"relation": "zero_out", "delta": 1e-5}
    return Guarantee(
        events=(event,) * rounds, participation=who, clients=clients, **{**usual, **more}
    )


@pytest.mark.parametrize("relation, scale", [("zero_out", 1.0), ("replace", 2.0)])
def test_views_are_gaussian_with_the_shares_that_count(relation, scale):
    views = guarantee(relation=relation).views
    mu = scale * math.sqrt(25) / 20
    expected = {
        "other_clients": mu,
        "coordinator": mu * math.sqrt(460 / 480),
        "coordinator_and_corrupt": mu,
    }
    for view, one in expected.items():
        assert views[view] == pytest.approx(epsilon_of(one, 1e-5), rel=1e-6)
    own = mu * math.sqrt(460)
    assert views["coalition_of_all_others"] == pytest.approx(ct_gaussian(own), rel=1e-9)
    assert views["coordinator"] < views["coordinator_and_corrupt"] == views["other_clients"]
    assert set(reasons(guarantee())) == set(views)


def ct_gaussian(mu):
    from coterie.privacy.profiles import GaussianProfile

    return GaussianProfile(mu).epsilon(1e-5)


def test_a_hidden_cohort_amplifies_against_other_clients_only():
    """A coordinator that is not trusted could draw one client in every round."""
    hidden = guarantee(who=Participation("poisson", 0.2))
    central = replace(hidden, events=(Gaussian(20.0),) * 25)
    assert hidden.views["other_clients"] == central.views["other_clients"]
    for view in ("coordinator", "coordinator_and_corrupt"):
        assert hidden.views[view] == guarantee().views[view]
    assert hidden.views["other_clients"] < hidden.views["coordinator"]


@pytest.mark.parametrize("sampler", [ct.Poisson(4), ct.FixedSize(4), ct.Everyone()])
def test_a_budget_holds_against_a_coordinator_that_draws_as_it_likes(sampler):
    noise = SharedNoise(minimum_clients=10, corrupt=2)
    relation = "replace" if isinstance(sampler, ct.FixedSize) else "zero_out"
    privacy = ct.Privacy(epsilon=3.0, noise=noise, relation=relation)
    plan = ct.Plan(method=ct.PMTL(), privacy=privacy, rounds=6, sampler=sampler)
    views = plan.guarantee(12).views
    assert views["coordinator_and_corrupt"] == pytest.approx(3.0, rel=1e-3)
    assert views["other_clients"] <= 3.0


@pytest.mark.parametrize(
    "who, relation, replaced",
    [
        (EVERYONE, "zero_out", 2.0),
        (EVERYONE, "replace", math.sqrt(2)),
        (Participation("poisson", 0.25), "zero_out", 2.0),
        (Participation("fixed", 0.25), "replace", 2.0),
        (Participation("poisson", 0.25, visible=True), "zero_out", 2.0),
    ],
)
def test_verify_computes_the_same_views(who, relation, replaced):
    found = guarantee(who=who, relation=relation, replaced=replaced, clients=400, least=300)
    stated = json.loads(json.dumps(found.to_json()))
    spans = by_view(Account.of(stated))
    assert set(spans) == {"epsilon", *found.views}
    for view, value in {**found.views, "epsilon": found.epsilon}.items():
        assert spans[view].holds(value), view
        assert not spans[view].holds(0.99 * value), view
    assert Guarantee.from_json(stated) == found


def test_events_come_back_from_json():
    events = (SharedGaussian(2.0, 2.0, 5, 1), SharedGaussian(3.0, 1.5, 5, 1))
    assert read_runs(list_runs(events)) == events
    assert EVENTS["gaussian_shares"] is SharedGaussian


def test_what_has_no_account_is_refused():
    with pytest.raises(ValueError, match="at most 100"):
        guarantee(clients=100)
    with pytest.raises(ValueError, match="some rounds only"):
        Guarantee((SharedGaussian(2.0, 2.0, 5, 1), Gaussian(2.0)), EVERYONE, "zero_out", 1e-5, 9)
    with pytest.raises(ValueError, match="no honest share"):
        SharedGaussian(2.0, 2.0, 5, 5)


@pytest.mark.parametrize("method", ["pfeb", "pmtl", "mpmtl", "mtlsvm"])
def test_every_shape_of_release_is_simulated_with_a_finite_epsilon(method):
    """Sums, blocks, second moments and the SVM meet the budget."""
    task = "binary" if method == "mtlsvm" else "regression"
    data = ct.synthetic(clients=12, rows=15, features=3, seed=2, task=task).data
    made = {"pfeb": ct.PFEB, "pmtl": ct.PMTL, "mpmtl": ct.MPMTL, "mtlsvm": ct.MTLSVM}[method]
    noise = SharedNoise(minimum_clients=10, corrupt=2)
    plan = ct.Plan(
        method=made(), privacy=ct.Privacy(epsilon=3.0, noise=noise), rounds=3, simulation_seed=4
    )
    from coterie.planning.rules import resolve

    plan = resolve(plan, data.spec)
    outcome = ct.simulate(plan, data)
    views = plan.guarantee(12).views
    assert views["coordinator"] < views["coordinator_and_corrupt"] <= 3.0
    central = replace(plan, privacy=replace(plan.privacy, noise="gaussian"))
    for mine, theirs in zip(plan.mechanisms(12), central.mechanisms(12), strict=True):
        assert mine.inner == theirs
        assert mine.noise_over_bound == pytest.approx(theirs.noise_over_bound * math.sqrt(12 / 8))
    assert outcome.billboard.next == 3
    for post in outcome.posts:
        assert all(np.isfinite(leaf.numpy()).all() for leaf in post.value.values())


def printed(capsys, *arguments):
    main(list(arguments))
    return json.loads(capsys.readouterr().out)


def test_the_command_states_all_views(capsys):
    shares = ["--trust", "nobody", "--minimum-clients", "480", "--corrupt", "20"]
    found = printed(
        capsys, "account", "--clients", "537", "--rounds", "25", "--noise-multiplier", "20",
        *shares, "--json",
    )  # fmt: skip
    assert found["views"] == guarantee().views
    least = printed(
        capsys, "calibrate", "--clients", "537", "--rounds", "25", "--epsilon", "1", *shares,
        "--json",
    )  # fmt: skip
    assert least["views"]["coordinator_and_corrupt"] == pytest.approx(1.0, rel=1e-3)
    plan = printed(
        capsys, "plan", "--clients", "537", "--rounds", "25", "--epsilon", "1", "--parameters",
        "14", *shares, "--json",
    )  # fmt: skip
    assert plan["noise_multiplier"] == pytest.approx(least["noise_multiplier"], rel=1e-3)
    assert plan["epsilon_by_view"]["coordinator"] < 1
    trusted = printed(
        capsys, "plan", "--clients", "537", "--rounds", "25", "--epsilon", "1", "--parameters",
        "14", "--json",
    )  # fmt: skip
    more = plan["error"]["over_clip"] / trusted["error"]["over_clip"]
    assert more == pytest.approx(math.sqrt(537 / 460), rel=1e-3)
    sampled = printed(
        capsys, "plan", "--clients", "537", "--rounds", "25", "--epsilon", "1", "--parameters",
        "14", "--cohort", "50", *shares, "--json",
    )  # fmt: skip
    assert sampled["noise_multiplier"] == pytest.approx(plan["noise_multiplier"], rel=1e-3)
    assert [row["epsilon"] for row in sampled["by_epsilon"]] == [0.5, 1, 2, 4, 8]


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--corrupt", "3"], "goes with --trust nobody"),
        (["--trust", "nobody", "--noise", "local"], "leave one of them out"),
        (["--trust", "nobody", "--minimum-clients", "600"], "at most 537"),
        (["--trust", "nobody", "--corrupt", "400"], "no honest share"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(capsys, flags, text):
    status = main(
        ["account", "--clients", "537", "--rounds", "5", "--noise-multiplier", "9", *flags]
    )
    assert status == 2
    assert text in capsys.readouterr().err


def test_a_share_that_is_left_alone_costs_what_the_view_says():
    """More honest shares mean less noise in each: the coalition of all others sees one share."""
    views = [
        guarantee(z=40.0, least=least, corrupt=corrupt).views["coalition_of_all_others"]
        for least, corrupt in ((100, 0), (400, 0), (400, 300))
    ]
    assert all(math.isfinite(view) for view in views)
    assert views[0] == pytest.approx(views[2]) and views[0] < views[1]
    assert list(itertools.accumulate(views, max))
