"""Secure aggregation in rounds: equal to a simulation, with dropouts at every message."""

from pathlib import Path

import numpy as np
import pytest
from tests.federations import (
    Neighbourhood,
    federate,
    open_coordinator,
    open_sites,
    rows_of,
)

import coterie as ct
from coterie.engines.conducting import ShortRoundError
from coterie.engines.site import Site, SiteSetting
from coterie.engines.site_masks import sites_needed
from coterie.privacy.noise import LocalNoise
from coterie.privacy.sampling import Everyone, Poisson
from coterie.wire import peek

pytestmark = pytest.mark.full
SITES = 4


@pytest.fixture(scope="module")
def rows():
    return ct.synthetic(clients=10, rows=12, features=3, seed=5).data


def plan_of(**settings):
    usual = {
        "method": ct.PMTL(model=ct.Linear()),
        "privacy": ct.Privacy(epsilon=2.0),
        "sampler": Everyone(),
        "rounds": 3,
        "simulation_seed": 11,
    }
    return ct.Plan(**{**usual, **settings})


def conduct(plan, data, folder: Path, tamper=None, absent=(), **settings):
    federation, keys = federate(data, SITES, trust="secure_aggregation", **settings)
    sites = open_sites(plan, data, federation, keys, folder / "sites")
    hood = Neighbourhood(sites, tamper, absent=set(absent))
    log: list = []
    lead = open_coordinator(plan, federation, keys, folder / "run", hood, log)
    return lead, hood, log, (federation, keys)


def test_sums_are_those_of_a_simulation(rows, tmp_path):
    for at, sampler in enumerate((Everyone(), Poisson(5), Poisson(1))):
        plan = plan_of(sampler=sampler)
        lead, _, _, _ = conduct(plan, rows, tmp_path / str(at))
        lead.run()
        for mine, theirs in zip(lead.billboard.posts, ct.simulate(plan, rows).posts, strict=True):
            for name in mine.value:
                np.testing.assert_array_equal(mine.value[name], theirs.value[name])


def test_every_site_is_asked_whoever_was_drawn(rows, tmp_path):
    """Under a hidden cohort sites must not learn from being asked that others were not."""
    lead, hood, _, _ = conduct(plan_of(sampler=Poisson(2)), rows, tmp_path)
    lead.run()
    asked = [name for name, head in hood.asked if '"kind": "masked"' in head]
    assert {name: asked.count(name) for name in asked} == dict.fromkeys(hood.sites, 3)


def test_the_coordinator_never_sees_a_plain_sum(rows, tmp_path):
    """What leaves a site in a round is uniform in the ring: neither small nor repeated."""
    seen = []

    def look(site, question, answer):
        if peek(answer).kind == "masked":
            seen.append(np.frombuffer(answer.arrays["masked"].data, "<u8"))
        return answer

    lead, _, _, _ = conduct(plan_of(), rows, tmp_path, look)
    lead.run()
    assert len(seen) == 3 * SITES
    values = np.concatenate(seen)
    # A plain sum is below 2^40 steps: of 48 uniform numbers none is with probability 1 - 3e-6.
    signed = values.astype(np.int64)
    assert (np.abs(signed.astype(float)) > 2.0**40).all()
    assert len(np.unique(values)) == len(values)


def drop(kind, site, rounds):
    """Lose a site's answers of one kind in some rounds."""

    def tamper(name, question, answer):
        asked = peek(question)
        lost = name == site and asked.kind == kind and asked.round in rounds
        return None if lost else answer

    return tamper


@pytest.mark.parametrize("kind", ["masked", "unmask"])
def test_a_site_may_fall_out(rows, tmp_path, kind):
    plan = plan_of()
    lead, _, log, _ = conduct(plan, rows, tmp_path, drop(kind, "site1", {1}), patience=0)
    lead.run()
    assert lead.billboard.next == 3
    assert not [facts for event, facts in log if event == "void"]
    same_as_plain(lead, plan, rows, tmp_path, {1} if kind == "masked" else set(), "site1")


def same_as_plain(lead, plan, rows, folder, lost, site="site3"):
    """Hold posts to those of a plain federation that lost a site's answers in some rounds."""
    federation, keys = federate(rows, SITES, patience=0)
    hood = Neighbourhood(
        open_sites(plan, rows, federation, keys, folder / "plain"), drop("round", site, lost)
    )
    other = open_coordinator(plan, federation, keys, folder / "plainrun", hood, [])
    other.run()
    for mine, theirs in zip(lead.billboard.posts, other.billboard.posts, strict=True):
        for name in mine.value:
            np.testing.assert_array_equal(mine.value[name], theirs.value[name])


@pytest.mark.parametrize("kind", ["keys", "shares"])
def test_a_setup_goes_on_without_whoever_is_gone(rows, tmp_path, kind):
    lead, _, log, _ = conduct(plan_of(), rows, tmp_path, drop(kind, "site2", {0}), patience=0)
    lead.run()
    assert lead.billboard.next == 3
    setups = [facts["sites"] for event, facts in log if event == "set_up"]
    assert setups[0] == SITES - 1  # and then it is back, and set up anew
    assert setups[-1] == SITES


def test_an_opening_that_fails_is_void_and_charged(rows, tmp_path):
    lost = {"site0", "site1"}

    def tamper(name, question, answer):
        asked = peek(question)
        return None if asked.kind == "unmask" and asked.round == 1 and name in lost else answer

    plan = plan_of()
    lead, _, log, _ = conduct(plan, rows, tmp_path, tamper, patience=1)
    lead.run()
    assert [facts["round"] for event, facts in log if event == "void"] == [1]
    assert sorted(lead.billboard.ledger.charged) == [0, 1, 2]
    # A void post is the noise alone: the same noise as around the simulated sum.
    noise = plan.mechanisms(10)[1].perturb(
        {n: v * 0 for n, v in lead.billboard.posts[1].value.items()}, _noise(plan, 1)
    )
    for name, value in lead.billboard.posts[1].value.items():
        np.testing.assert_array_equal(value, noise[name])


def _noise(plan, index):
    from coterie.privacy.entropy import open_entropy

    return open_entropy(plan.simulation_seed, "noise", index)


def test_too_few_sites_stop_the_run_and_it_goes_on(rows, tmp_path):
    plan = plan_of()
    lead, hood, _, (federation, keys) = conduct(
        plan, rows, tmp_path, absent=["site0", "site1"], patience=1
    )
    assert sites_needed(federation) == 3
    with pytest.raises(ShortRoundError, match="run again"):
        lead.run()
    assert sorted(lead.billboard.ledger.charged) == [0]
    assert not lead.billboard.ledger.released
    hood.absent.clear()
    again = open_coordinator(plan, federation, keys, tmp_path / "run", hood, [])
    again.run()
    for mine, theirs in zip(again.billboard.posts, ct.simulate(plan, rows).posts, strict=True):
        for name in mine.value:
            np.testing.assert_array_equal(mine.value[name], theirs.value[name])


def test_a_site_that_forgot_its_session_is_set_up_anew(rows, tmp_path):
    plan = plan_of()
    lead, hood, log, (federation, keys) = conduct(plan, rows, tmp_path, patience=2)

    def restart(name, question, answer):
        asked = peek(question)
        if asked.kind == "unmask" and asked.round == 0 and name == "site3":
            hood.sites[name] = Site(
                SiteSetting(
                    name=name,
                    plan=plan,
                    federation=federation,
                    agreement="agreed",
                    rows=rows_of(rows, federation, name),
                    folder=tmp_path / "sites" / name,
                    key=keys.sites[name],
                )
            )
        return answer

    hood.tamper = restart
    lead.run()
    assert len([event for event, _ in log if event == "set_up"]) == 2
    same_as_plain(lead, plan, rows, tmp_path, {1})


def test_a_round_is_opened_for_one_list_of_survivors(rows, tmp_path):
    """A coordinator that asks a round again without one site would learn that site's part."""
    plan = plan_of()
    lead, hood, _, _ = conduct(plan, rows, tmp_path, patience=0)
    words = []

    def second(name, question, answer):
        asked = peek(question)
        if asked.kind == "unmask":
            body = {**asked.body, "survivors": sorted(set(asked.body["survivors"]) - {"site0"})}
            if name != "site0":
                from coterie.wire import Letter, seal

                lie = Letter("unmask", asked.run, name, asked.round, "f" * 32, body)
                said = peek(hood.sites[name].answer(seal(lie, lead.conduct.key)))
                words.append((said.kind, said.body.get("why", "")))
        return answer

    hood.tamper = second
    lead.run()
    assert words
    assert {kind for kind, _ in words} == {"refused"}


def test_too_little_noise_of_clients_is_never_opened(rows, tmp_path):
    plan = plan_of(privacy=ct.Privacy(epsilon=5.0, noise=LocalNoise(honest=9)), simulation_seed=11)
    lead, hood, _, _ = conduct(
        plan, rows, tmp_path, drop("masked", "site3", {1}), patience=0, minimum=0.0
    )
    with pytest.raises(ShortRoundError):
        lead.run()
    opened = [head for _, head in hood.asked if '"kind": "unmask"' in head and '"round": 1' in head]
    assert not opened
    assert sorted(lead.billboard.ledger.charged) == [0, 1]


def test_plain_sums_are_refused(rows, tmp_path):
    lead, hood, _, _ = conduct(plan_of(), rows, tmp_path)
    lead._gather()
    question = lead.question("round", "site0", 0, {"clients": [0], "counted": -1})
    from coterie.wire import seal

    said = peek(hood.sites["site0"].answer(seal(question, lead.conduct.key)))
    assert said.kind == "refused"
    lead.billboard.ledger.close()


def test_sums_without_a_grid_are_refused_before_anything_is_asked(rows, tmp_path):
    with pytest.raises(ValueError, match="grid"):
        conduct(plan_of(privacy=ct.Privacy(epsilon=float("inf"))), rows, tmp_path)
