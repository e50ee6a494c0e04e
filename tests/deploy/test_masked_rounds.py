"""Secure aggregation in rounds: equal to a simulation, with dropouts at every message.

A coordinator that lies holds every key that the federation gives it, and writes its own messages:
what it opens is then compared with what sites keep on their disks. What others see, and which
rounds are posted, must be the same whether a client elsewhere was drawn or not.
"""

import itertools
import secrets
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.deploy.federations import (
    Neighbourhood,
    federate,
    open_coordinator,
    open_sites,
    rows_of,
)

import coterie as ct
from coterie.core.config import ConfigError
from coterie.data.config import DataConfig
from coterie.data.effects import Effects
from coterie.deploy.coordinator import IncompleteRoundError
from coterie.deploy.federation import Agreement
from coterie.deploy.messages import Expected, Message, RefusedError, peek, sign, verify
from coterie.deploy.secagg.primitives import from_ring
from coterie.deploy.secagg.unmask import unmask_sum
from coterie.deploy.site import (
    MASKED,
    SHARED,
    SUM,
    Site,
    SiteRun,
    mask_context,
)
from coterie.methods.pmtl import PMTL
from coterie.planning.rules import resolve
from coterie.privacy.mechanisms import count_numbers
from coterie.privacy.noise import LocalNoise, SharedNoise
from coterie.privacy.sampling import Cyclic, Everyone, Poisson
from coterie.privacy.validation import grid_steps

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


def coordinate(plan, data, folder: Path, tamper=None, absent=(), **settings):
    federation, keys = federate(data, SITES, **{"trust": "secure_aggregation", **settings})
    sites = open_sites(plan, data, federation, keys, folder / "sites")
    hood = Neighbourhood(sites, tamper, absent=set(absent))
    log: list = []
    lead = open_coordinator(plan, federation, keys, folder / "run", hood, log)
    return lead, hood, log, (federation, keys)


def test_sums_are_those_of_a_simulation(rows, tmp_path):
    samplers = (Everyone(), Poisson(5), Poisson(1), Cyclic(4))
    for at, sampler in enumerate(samplers):
        noise = "banded" if sampler == Cyclic(4) else "gaussian"
        plan = plan_of(sampler=sampler, privacy=ct.Privacy(epsilon=2.0, noise=noise))
        lead, _, _, _ = coordinate(plan, rows, tmp_path / str(at))
        lead.run()
        for mine, theirs in zip(lead.billboard.posts, ct.simulate(plan, rows).posts, strict=True):
            for name in mine.value:
                np.testing.assert_array_equal(mine.value[name], theirs.value[name])


def test_every_site_is_asked_whoever_was_drawn(rows, tmp_path):
    """Under a hidden cohort sites must not learn from being asked that others were not."""
    lead, hood, _, _ = coordinate(plan_of(sampler=Poisson(2)), rows, tmp_path)
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

    lead, _, _, _ = coordinate(plan_of(), rows, tmp_path, look)
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
    lead, _, log, _ = coordinate(plan, rows, tmp_path, drop(kind, "site1", {1}), patience=0)
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
    lead, _, log, _ = coordinate(plan_of(), rows, tmp_path, drop(kind, "site2", {0}), patience=0)
    lead.run()
    assert lead.billboard.next == 3
    setups = [facts["sites"] for event, facts in log if event == "setup"]
    assert setups[0] == SITES - 1  # and then it is back, and set up anew
    assert setups[-1] == SITES


def test_an_opening_that_fails_is_void_and_charged(rows, tmp_path):
    lost = {"site0", "site1"}

    def tamper(name, question, answer):
        asked = peek(question)
        return None if asked.kind == "unmask" and asked.round == 1 and name in lost else answer

    plan = plan_of()
    lead, _, log, _ = coordinate(plan, rows, tmp_path, tamper, patience=1)
    lead.run()
    assert [facts["round"] for event, facts in log if event == "void"] == [2]  # words count from 1
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
    lead, hood, _, (federation, keys) = coordinate(
        plan, rows, tmp_path, absent=["site0", "site1"], patience=1
    )
    assert federation.sites_needed == 3
    with pytest.raises(IncompleteRoundError, match="run again"):
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
    lead, hood, log, (federation, keys) = coordinate(plan, rows, tmp_path, patience=2)

    def restart(name, question, answer):
        asked = peek(question)
        if asked.kind == "unmask" and asked.round == 0 and name == "site3":
            hood.sites[name] = open_sites(plan, rows, federation, keys, tmp_path / "sites")[name]
        return answer

    hood.tamper = restart
    lead.run()
    assert len([event for event, _ in log if event == "setup"]) == 2
    same_as_plain(lead, plan, rows, tmp_path, {1})


def test_a_round_is_opened_for_one_list_of_survivors(rows, tmp_path):
    """A coordinator that asks a round again without one site would learn that site's part."""
    plan = plan_of()
    lead, hood, _, _ = coordinate(plan, rows, tmp_path, patience=0)
    words = []

    def second(name, question, answer):
        asked = peek(question)
        if asked.kind == "unmask":
            body = {**asked.body, "survivors": sorted(set(asked.body["survivors"]) - {"site0"})}
            if name != "site0":
                lie = Message("unmask", asked.run, name, asked.round, "f" * 32, body)
                said = peek(hood.sites[name].answer(sign(lie, lead.key)))
                words.append((said.kind, said.body.get("reason", "")))
        return answer

    hood.tamper = second
    lead.run()
    assert words
    assert {kind for kind, _ in words} == {"refused"}


def test_too_little_noise_of_clients_is_never_opened(rows, tmp_path):
    plan = plan_of(privacy=ct.Privacy(epsilon=5.0, noise=LocalNoise(honest=9)), simulation_seed=11)
    lead, hood, _, _ = coordinate(
        plan, rows, tmp_path, drop("masked", "site3", {1}), patience=0, minimum=0.0
    )
    with pytest.raises(IncompleteRoundError):
        lead.run()
    opened = [head for _, head in hood.asked if '"kind": "unmask"' in head and '"round": 1' in head]
    assert not opened
    assert sorted(lead.billboard.ledger.charged) == [0, 1]


def test_plain_sums_are_refused(rows, tmp_path):
    lead, hood, _, _ = coordinate(plan_of(), rows, tmp_path)
    lead._connect()
    question = lead.request("round", "site0", 0, {"clients": [0], "counted": -1})
    said = peek(hood.sites["site0"].answer(sign(question, lead.key)))
    assert said.kind == "refused"
    lead.billboard.ledger.close()


def test_sums_without_a_grid_are_refused_before_anything_is_asked(rows, tmp_path):
    with pytest.raises(ValueError, match="grid"):
        coordinate(plan_of(privacy=ct.Privacy(epsilon=float("inf"))), rows, tmp_path)


class Liar:
    """A coordinator's key in other hands: it asks what it likes, and opens what it can."""

    run = "0123456789abcdef"
    setup = "a setup"

    def __init__(self, plan, data, folder):
        self.federation, self.keys = federate(
            data, SITES, trust="secure_aggregation", simulation=False
        )
        self.sites = open_sites(plan, data, self.federation, self.keys, folder)
        site = self.sites["site0"]
        template = {
            n: tuple(leaf.shape)
            for n, leaf in plan.method.contribution(site.federation.spec).items()
        }
        self.start = site.start
        self.shapes = site.mechanisms[0].totals(template)
        self.grid = grid_steps(site.mechanisms[0], self.shapes)
        self.all = {name: ids.tolist() for name, ids in self.federation.client_ids.items()}
        self.trees = dict.fromkeys(self.sites, self.start)
        for name in self.sites:
            self.ask(name, "handshake", -1, {"agreement": site.agreement.digest})
        begin = {"setup": self.setup, "sessions": 8}
        self.advertised = {
            name: self.ask(name, "keys", 0, begin).body["advertisement"] for name in self.sites
        }
        body = {"setup": self.setup, "advertisements": self.advertised}
        self.dealt = {name: self.ask(name, "shares", 0, body).body["shares"] for name in self.sites}

    def ask(self, site, kind, number, body, tree=None):
        arrays = {SHARED + name: leaf.numpy() for name, leaf in (tree or {}).items()}
        message = Message(kind, self.run, site, number, secrets.token_hex(16), body, arrays)
        answer = self.sites[site].answer(sign(message, self.keys.coordinator))
        masked = {MASKED: Expected("uint64", (count_numbers(self.shapes),))}
        wanted = masked if peek(answer).kind == MASKED else {}
        return verify(answer, self.federation.sites[site].public_key, wanted)

    def masked(self, site, number, session, clients, tree):
        boxes = {other: box[site] for other, box in self.dealt.items() if other != site}
        body = {"setup": self.setup, "session": session, "clients": clients}
        return self.ask(site, MASKED, number, {**body, "counted": -1, "shares": boxes}, tree)

    def unmask(self, site, number, session, survivors):
        body = {"setup": self.setup, "session": session, "survivors": survivors}
        return self.ask(site, "unmask", number, body)

    def open(self, session, rounds, trees=None, drawn=None):
        """Ask sites for their parts of whatever round, and open the sum of them."""
        trees, drawn = trees or self.trees, drawn or self.all
        messages = {
            name: self.masked(name, number, session, drawn[name], trees[name])
            for name, number in rounds.items()
        }
        assert {message.kind for message in messages.values()} == {MASKED}, messages
        vectors = {name: message.arrays[MASKED] for name, message in messages.items()}
        survivors = sorted(vectors)
        revealed = {
            name: self.unmask(name, number, session, survivors).body["revealed"]
            for name, number in rounds.items()
        }
        needed = self.federation.sites_needed
        words = {
            mask_context(number, {SHARED + n: leaf.numpy() for n, leaf in trees[name].items()})
            for name, number in rounds.items()
        }
        # It may take off masks of sites that fell out under any words it likes.
        return [
            from_ring(
                unmask_sum(session, vectors, revealed, self.advertised, needed, word).total,
                self.shapes,
                self.grid,
            )
            for word in sorted(words)
        ]

    def kept(self, site):
        """What a site keeps as its last answer, on its own disk."""
        with np.load(self.sites[site].folder / self.run / "answer.npz") as kept:
            return {n.removeprefix(SUM): kept[n] for n in kept.files if n.startswith(SUM)}


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(tree[name])) for name in sorted(tree)])


def earnest(**settings):
    usual = {"privacy": ct.Privacy(noise_multiplier=1.0), "simulation_seed": None}
    return plan_of(**{**usual, **settings})


def everyone(number):
    return {f"site{at}": number for at in range(SITES)}


def hides(opened, *parts):
    """Hold that a sum is none of these: a mask is left on each of its numbers.

    A sum that opens is below 2^30 steps here; a number of the ring is below 2^44 with probability
    2^-19, and all of them together never.
    """
    for one in opened:
        numbers = flat(one)
        for part in parts:
            assert not np.array_equal(numbers, flat(part))
            assert not np.isclose(numbers, flat(part), rtol=0.5, atol=1.0).all()
        assert np.abs(numbers).max() > 1e3


class TestLyingCoordinators:
    """The reviewer's attacks: no site colludes, and every question is signed."""

    def test_the_liar_can_open_what_is_to_be_opened(self, rows, tmp_path):
        """Else the tests below would hold of a liar who cannot do anything."""
        liar = Liar(earnest(), rows, tmp_path)
        (opened,) = liar.open(0, everyone(0))
        expected = sum(flat(liar.kept(name)) for name in liar.sites)
        np.testing.assert_array_equal(flat(opened), expected)
        (opened,) = liar.open(1, {"site0": 1, "site2": 1, "site3": 1})
        expected = sum(flat(liar.kept(name)) for name in ("site0", "site2", "site3"))
        np.testing.assert_array_equal(flat(opened), expected)

    @pytest.mark.parametrize("noise", ["gaussian", "local"])
    def test_one_client_alone_is_not_to_be_had_of_a_plan_that_takes_all(
        self, rows, tmp_path, noise
    ):
        plan = earnest(privacy=ct.Privacy(noise_multiplier=1.0, noise=noise))
        liar = Liar(plan, rows, tmp_path)
        for name, ids in liar.all.items():
            for some in ([], ids[:1], ids[1:]):
                answer = liar.masked(name, 0, 0, some, liar.start)
                assert answer.kind == "refused" and "takes all" in answer.body["reason"]
                assert not answer.arrays

    @pytest.mark.parametrize(("alone", "other"), [("site0", float("nan")), ("site2", 0.25)])
    def test_one_site_told_another_tree_hides_the_sum(self, rows, tmp_path, alone, other):
        """With a broken tree the others' parts would be zeros, and the sum the part of one."""
        liar = Liar(earnest(), rows, tmp_path)
        bad = {name: torch.full_like(leaf, other) for name, leaf in liar.start.items()}
        trees = {name: liar.start if name == alone else bad for name in liar.sites}
        with np.errstate(all="ignore"):
            opened = liar.open(0, everyone(0), trees)
        total = sum(flat(liar.kept(name)) for name in liar.sites)
        hides(opened, liar.kept(alone), {"all": total})

    def test_two_sites_told_one_tree_each_hide_the_sum(self, rows, tmp_path):
        liar = Liar(earnest(), rows, tmp_path)
        moved = {name: leaf + 1e-6 for name, leaf in liar.start.items()}
        trees = {name: moved if name in ("site0", "site1") else liar.start for name in liar.sites}
        opened = liar.open(0, everyone(0), trees)
        hides(opened, {"all": sum(flat(liar.kept(name)) for name in liar.sites)})

    @pytest.mark.parametrize("fallen", [None, "site3"])
    def test_rounds_that_are_mixed_in_a_session_hide_the_sum(self, rows, tmp_path, fallen):
        """A part of an opened round would be in a second sum, with parts of another round."""
        liar = Liar(earnest(), rows, tmp_path)
        liar.open(0, everyone(0))
        first = liar.kept("site1")
        rounds = {n: 0 if n == "site1" else 1 for n in liar.sites if n != fallen}
        if fallen is not None:
            # The round was opened for all: the site helps with no other list.
            with pytest.raises(KeyError, match="revealed"):
                liar.open(1, rounds)
            return
        opened = liar.open(1, rounds)
        rest = {name: flat(liar.kept(name)) for name in liar.sites if name != "site1"}
        hides(opened, first, {"all": flat(first) + sum(rest.values())})

    def test_a_session_is_masked_for_one_question(self, rows, tmp_path):
        """Two masked sums of a session that differ in their words alone would differ in masks."""
        liar = Liar(earnest(), rows, tmp_path)
        first = liar.masked("site0", 0, 0, liar.all["site0"], liar.start)
        again = liar.masked("site0", 0, 0, liar.all["site0"], liar.start)
        assert np.array_equal(first.arrays[MASKED], again.arrays[MASKED])
        moved = {name: leaf + 1 for name, leaf in liar.start.items()}
        for number in (0, 1):
            answer = liar.masked("site0", number, 0, liar.all["site0"], moved)
            assert answer.kind == "refused"

    def test_what_it_can_still_learn_is_noisy_where_clients_add_noise(self, rows, tmp_path):
        """Under sampling it may draw one client alone: then what it opens is that client's message.

        Oracle: the same client's part under a noise so small that it is none.
        """
        found = {}
        for name, multiplier in (("loud", 50.0), ("quiet", 1e-4)):
            privacy = ct.Privacy(noise_multiplier=multiplier, clip=1.0, noise="local")
            plan = earnest(privacy=privacy, sampler=Poisson(5))
            liar = Liar(plan, rows, tmp_path / name)
            drawn = {site: ids[:1] if site == "site1" else [] for site, ids in liar.all.items()}
            (opened,) = liar.open(0, everyone(0), drawn=drawn)
            np.testing.assert_array_equal(flat(opened), flat(liar.kept("site1")))
            found[name] = flat(opened)
        noise = (found["loud"] - found["quiet"]) / 50.0
        # Four normal numbers: all below 0.01 once in 2.5e8, one above 7 never.
        assert 0.01 < np.abs(noise).max() < 7
        assert np.linalg.norm(found["quiet"]) < 1.01

    def test_survivors_with_too_little_noise_get_no_help(self, rows, tmp_path):
        """The epsilon of whoever sees sums alone counts on the noise of `honest` clients."""
        hosted, kinds = {"site0": 3, "site1": 3, "site2": 2, "site3": 2}, set()
        for honest, gone in ((7, "site0"), (8, "site0"), (8, "site3"), (10, None)):
            privacy = ct.Privacy(noise_multiplier=1.0, noise=LocalNoise(honest=honest))
            liar = Liar(earnest(privacy=privacy), rows, tmp_path / f"{honest}{gone}")
            there = {name: 0 for name in liar.sites if name != gone}
            for name in there:
                liar.masked(name, 0, 0, liar.all[name], liar.start)
            before = {n: dict(site._run.state) for n, site in liar.sites.items()}
            answers = [liar.unmask(name, 0, 0, sorted(there)) for name in there]
            noise = sum(hosted[name] for name in there)
            kinds.add((noise - honest, answers[0].kind))
            if noise >= honest:
                assert {answer.kind for answer in answers} == {"unmask"}
                continue
            for answer in answers:
                assert answer.kind == "refused"
                assert f"{noise} clients, expected at least {honest}" in answer.body["reason"]
            assert before == {n: dict(site._run.state) for n, site in liar.sites.items()}
        assert kinds == {(0, "unmask"), (-1, "refused")}


def test_the_same_setup_asked_for_again_is_the_same(rows, tmp_path):
    """A message that is played again must not throw away the keys that others have shared with."""
    liar = Liar(earnest(), rows, tmp_path)
    begin = {"setup": liar.setup, "sessions": 8}
    again = {n: liar.ask(n, "keys", 0, begin).body["advertisement"] for n in liar.sites}
    assert again == liar.advertised
    (opened,) = liar.open(0, everyone(0))
    expected = sum(flat(liar.kept(name)) for name in liar.sites)
    np.testing.assert_array_equal(flat(opened), expected)
    other = liar.ask("site0", "keys", 0, {"setup": "another", "sessions": 8})
    assert other.body["advertisement"] != liar.advertised["site0"]


@pytest.mark.parametrize("sites,needed", [(3, 3), (4, 3), (5, 4), (6, 4), (7, 5), (10, 7)])
def test_one_colluding_site_gains_nothing(rows, sites, needed):
    federation, _ = federate(rows, sites, trust="secure_aggregation", threshold=0.51)
    least = federation.sites_needed
    assert 2 * least > sites + 1 and least <= sites
    assert 2 * (least - 1) <= sites + 1, "more than it takes"
    federation, _ = federate(rows, sites, trust="secure_aggregation")
    assert federation.sites_needed == needed


def test_a_site_that_was_restarted_before_its_setup_comes_back(rows, tmp_path):
    """It has lost its memory, not its folder: a handshake must tell it what was agreed."""
    plan = plan_of()
    lead, hood, log, (federation, keys) = coordinate(plan, rows, tmp_path, patience=0)

    def restart(name, question, answer):
        asked = peek(question)
        if (asked.kind, asked.round, name) == ("shares", 0, "site0"):
            hood.sites["site3"] = open_sites(plan, rows, federation, keys, tmp_path / "sites")[
                "site3"
            ]
        return None if (asked.kind, asked.round, name) == ("keys", 0, "site3") else answer

    hood.tamper = restart
    lead.run()
    assert [facts["sites"] for event, facts in log if event == "setup"] == [3, 4]
    assert not [facts for event, facts in log if event == "declined"]
    same_as_plain(lead, plan, rows, tmp_path, {0})


def test_work_that_fails_is_masked_zeros(rows, tmp_path, monkeypatch):
    """The site stays a survivor, whose list others see, and the coordinator sees no error."""
    plan = plan_of(sampler=Poisson(5), rounds=2)
    lead, hood, log, _ = coordinate(plan, rows, tmp_path, patience=0)
    update = PMTL.local_update

    def fail(self, shared, personal, clients, *rest):
        if not set(hood.sites["site1"].ids.tolist()).isdisjoint(clients.ids.tolist()):
            raise ValueError("a secret number")
        return update(self, shared, personal, clients, *rest)

    tallies = []
    monkeypatch.setattr(PMTL, "local_update", fail)
    monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([0, 3, 4, 9]))
    lead.run(lambda n, shared, statistics: tallies.append(statistics))
    monkeypatch.setattr(PMTL, "local_update", update)
    monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([0, 9]))
    assert list(lead.federation.client_ids["site1"]) == [3, 4, 5]
    for mine, theirs in zip(lead.billboard.posts, ct.simulate(plan, rows).posts, strict=True):
        np.testing.assert_array_equal(flat(mine.value), flat(theirs.value))
    assert [(t.failed, t.asked, t.answered, t.void) for t in tallies] == [(0, 4, 4, 0)] * 2
    assert not [facts for event, facts in log if event == "declined"]
    survivors = [head for _, head in hood.asked if '"kind": "unmask"' in head]
    assert survivors and all('"site1"' in head for head in survivors)


TARGET = "site0"
FEW = {count: ct.synthetic(clients=count, rows=4, features=2, seed=5).data for count in (3, 4)}


@dataclass
class Conspiracy(Neighbourhood):
    """All sites but one keep their questions together, and are silent as they agreed.

    `silence` says for each time that a site is asked in round 0 whether it stays silent.
    """

    silence: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    seen: list = field(default_factory=list)

    def ask(self, questions, seconds):
        quiet = set()
        for name, envelope in questions.items():
            message = peek(envelope)
            if name != TARGET:
                body = {
                    key: sorted(value) if isinstance(value, dict) else value
                    for key, value in message.body.items()
                    if key != "setup"
                }
                self.seen.append((name, message.kind, message.round, body))
            if name != TARGET and message.kind in self.kinds and message.round == 0:
                times = sum(one[:3] == (name, message.kind, 0) for one in self.seen)
                quiet |= {name} if self.silence[name][times - 1] else set()
        yield from super().ask({n: p for n, p in questions.items() if n not in quiet}, seconds)


def nothing(run, message):
    return run._zeros(message.round)


@cache
def few(count, trust, minimum):
    """The same keys for runs that are compared: they are in the agreement that sites are told."""
    return federate(FEW[count], count, trust=trust, minimum=minimum, patience=1)


def conspire(trust, cohort, silence, kinds, folder, minimum):
    """Run with that cohort in all rounds; give what the coalition sees, and what was posted."""
    data = FEW[len(silence) + 1]
    plan = plan_of(sampler=Poisson(2), rounds=1, privacy=ct.Privacy(noise_multiplier=1.0))
    federation, keys = few(len(silence) + 1, trust, minimum)
    hood = Conspiracy(
        open_sites(plan, data, federation, keys, folder / "sites"), silence=silence, kinds=kinds
    )
    log: list = []
    lead = open_coordinator(plan, federation, keys, folder / "run", hood, log)
    with pytest.MonkeyPatch.context() as patch:
        # What sites compute is not looked at, and takes most of the time.
        patch.setattr("os.fsync", lambda _: None)
        patch.setattr("numpy.memmap.flush", lambda _: None)
        patch.setattr(SiteRun, "contribution", nothing)
        patch.setattr(SiteRun, "finish", lambda *_: ("finish", {}, {}))
        patch.setattr(Poisson, "draw", lambda *_: np.array(cohort, dtype=np.int64))
        try:
            lead.run()
            ended = "done"
        except IncompleteRoundError:
            ended = "incomplete"
    ledger = lead.billboard.ledger
    void = [facts["round"] for event, facts in log if event == "void"]
    return hood.seen, (ended, sorted(ledger.charged), sorted(ledger.released), void)


TIMES = list(itertools.product((False, True), repeat=2))
EACH = {
    "round": ("server", 0.6, ("round",), (1, 2)),
    "round, none drawn": ("server", 0.6, ("round",), ()),
    "round, no minimum": ("server", 0.0, ("round",), (1, 2)),
    "masked": ("secure_aggregation", 0.6, (MASKED,), (1, 2)),
    "unmask": ("secure_aggregation", 0.6, ("unmask",), (1, 2)),
    "setup": ("secure_aggregation", 0.6, ("keys", "shares"), (1, 2)),
}


def patterns(trust, sites):
    """Who is silent at which of both times that a round is asked.

    Under secure aggregation one site at most, or all: with two of four sites gone no sum opens,
    whoever was drawn.
    """
    for pattern in itertools.product(TIMES, repeat=sites):
        silent = sum(any(times) for times in pattern)
        if trust == "server" or silent <= 1 or all(map(all, pattern)):
            yield pattern


def is_first(trust, pattern):
    """Whether a pattern stands for those with the same sites in another order.

    Of one silent site in three each habit is another site's.
    """
    if trust == "server":
        return list(pattern) == sorted(pattern)
    return all(times in (TIMES[0], TIMES[at]) for at, times in enumerate(pattern, 1)) or all(
        map(all, pattern)
    )


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"]
)
@pytest.mark.parametrize("trust,minimum,kinds,own", EACH.values(), ids=EACH)
def test_silence_does_not_tell_who_was_drawn_elsewhere(trust, minimum, kinds, own, every, tmp_path):
    """Hidden cohorts: the coalition's questions, and the posts, are those without the target.

    Patterns of silence that differ by more than the names of sites, or every pattern.
    """
    coalition = ["site1", "site2", "site3"][: 2 if trust == "server" else 3]
    for at, pattern in enumerate(patterns(trust, len(coalition))):
        if not every and not is_first(trust, pattern):
            continue
        # Where a kind is asked more often, the last habit stays.
        silence = {
            name: (*times, *times[-1:] * 9) for name, times in zip(coalition, pattern, strict=True)
        }
        without, with_it = (
            conspire(trust, cohort, silence, kinds, tmp_path / f"{at}-{len(cohort)}", minimum)
            for cohort in (own, (0, *own))
        )
        assert without[0] == with_it[0], pattern
        assert without[1] == with_it[1], pattern


def test_the_test_of_silence_can_fail(tmp_path):
    """A coalition sees its own coins: those of its clients are in its questions."""
    silence = dict.fromkeys(("site1", "site2"), (False,) * 9)
    views = [
        conspire("server", cohort, silence, ("round",), tmp_path / str(at), 0.5)
        for at, cohort in enumerate(([1], [2]))
    ]
    assert views[0][0] != views[1][0]


@pytest.mark.parametrize("sampler", [Everyone(), Poisson(4), Cyclic(4)])
@pytest.mark.parametrize("method", ["pmtl", "pfeb", "mpmtl"])
def test_shares_of_noise_make_the_sums_of_a_simulation(rows, tmp_path, method, sampler):
    """Trust nobody: posts are those of a simulation, bit for bit, and nobody adds noise to them."""
    made = {"pmtl": ct.PMTL, "pfeb": ct.PFEB, "mpmtl": ct.MPMTL}[method]
    noise = SharedNoise(minimum_clients=7, corrupt=2)
    privacy = ct.Privacy(epsilon=2.0, noise=noise)
    plan = plan_of(method=made(model=ct.Linear()), privacy=privacy, sampler=sampler)
    plan = resolve(plan, rows.spec)
    lead, _, _, _ = coordinate(plan, rows, tmp_path, trust="nobody")
    lead.run()
    for mine, theirs in zip(lead.billboard.posts, ct.simulate(plan, rows).posts, strict=True):
        for name in mine.value:
            np.testing.assert_array_equal(mine.value[name], theirs.value[name])


def test_clients_that_are_not_drawn_add_shares_for_every_column_of_the_effects(rows, tmp_path):
    privacy = ct.Privacy(epsilon=50.0, noise=SharedNoise(minimum_clients=7, corrupt=2))
    data = DataConfig(name="rows.csv", effects=Effects(basis="spline"))
    plan = plan_of(privacy=privacy, sampler=Poisson(4), data=data)
    wide = data.effects.expand(rows)
    federation, keys = federate(rows, SITES, trust="nobody")
    agreement = Agreement(plan, federation)
    sites = {
        name: Site(
            name=name,
            agreement=agreement,
            rows=data.effects.expand(rows_of(rows, federation, name)),
            folder=tmp_path / name,
            key=keys.sites[name],
        )
        for name in federation.sites
    }
    lead = open_coordinator(plan, federation, keys, tmp_path / "run", Neighbourhood(sites), [])
    lead.run()
    for mine, theirs in zip(lead.billboard.posts, ct.simulate(plan, wide).posts, strict=True):
        for name in mine.value:
            np.testing.assert_array_equal(mine.value[name], theirs.value[name])


def test_a_round_with_fewer_shares_than_planned_is_neither_released_nor_unmasked(rows, tmp_path):
    """Sites have 3, 3, 2 and 2 clients: without the last, eight shares are left."""
    for least, rounds in ((8, 3), (9, 1)):
        noise = SharedNoise(minimum_clients=least, corrupt=1)
        plan = plan_of(privacy=ct.Privacy(epsilon=2.0, noise=noise))
        lost = drop("masked", "site3", {1})
        folder = tmp_path / str(least)
        lead, hood, _, _ = coordinate(plan, rows, folder, lost, trust="nobody", patience=0)
        if rounds == 3:
            lead.run()
        else:
            with pytest.raises(IncompleteRoundError, match="9 clients that add noise"):
                lead.run()
        assert lead.billboard.next == rounds
    site = next(iter(hood.sites.values()))
    run = site._run
    for survivors, refused in (
        (["site0", "site1", "site2", "site3"], False),
        (["site0", "site1", "site2"], True),
    ):
        if refused:
            with pytest.raises(RefusedError, match="8 clients, expected at least 9"):
                run._check_noise(1, survivors)
        else:
            run._check_noise(1, survivors)


@pytest.mark.parametrize(
    "gone, minimum, text",
    [
        (("site3",), 0.5, None),
        (("site2", "site3"), 0.5, r"2 of 4 sites; expected 3 of 4 sites to unmask .*threshold\)\."),
        (("site0", "site1"), 0.5, r"at least 50% .*\(minimum\), and 3 of 4 sites"),
        (("site3",), 0.9, r"3 of 4 sites; expected sites with at least 90% .*\(minimum\)\."),
    ],
)
def test_a_round_that_is_too_short_names_what_is_missing(rows, tmp_path, gone, minimum, text):
    """Sites have 3, 3, 2 and 2 clients, and three of them unmask a sum."""

    def lost(name, question, answer):
        asked = peek(question)
        return None if name in gone and (asked.kind, asked.round) == ("masked", 1) else answer

    lead, _, _, _ = coordinate(plan_of(), rows, tmp_path, lost, patience=0, minimum=minimum)
    if text is None:
        lead.run()
    else:
        with pytest.raises(IncompleteRoundError, match=text):
            lead.run()


def test_shares_and_trust_belong_together(rows, tmp_path):
    shares = plan_of(privacy=ct.Privacy(epsilon=2.0, noise=SharedNoise()))
    for plan, trust in ((shares, "secure_aggregation"), (shares, "server"), (plan_of(), "nobody")):
        federation, keys = federate(rows, SITES, trust=trust)
        with pytest.raises(ConfigError, match="belong together"):
            open_coordinator(plan, federation, keys, tmp_path / trust, None, [])


@pytest.mark.parametrize("sent", ["huge", "nan", "replayed"])
def test_a_hostile_site_costs_a_round_its_use_and_not_its_privacy(rows, tmp_path, sent):
    """The run ends; the sum is folded into its bounds; honest sites' noise stays in it."""
    noise = SharedNoise(minimum_clients=7, corrupt=2)
    plan = plan_of(privacy=ct.Privacy(epsilon=2.0, noise=noise))
    lead, hood, _, _ = coordinate(plan, rows, tmp_path, trust="nobody")
    bad = hood.sites["site3"]
    first = []
    honest = SiteRun._clients_half

    def hostile(run, number, shared, ids):
        total = honest(run, number, shared, ids)
        if run.site is not bad:
            return total
        first.append(total)
        if sent == "replayed":
            return first[0]
        worst = np.nan if sent == "nan" else 2.0**40
        return {name: np.full_like(leaf, worst) for name, leaf in total.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteRun, "_clients_half", hostile)
        lead.run()
    assert lead.billboard.next == 3
    most = (
        lead.billboard.mechanism(0)
        .norm_bounds({n: tuple(leaf.shape) for n, leaf in lead.billboard.posts[0].value.items()})[0]
        .step_limit(10)
    )
    for post in lead.billboard.posts:
        for name, leaf in post.value.items():
            steps = (
                leaf.numpy()
                / lead.billboard.mechanism(0).grid(
                    {n: tuple(one.shape) for n, one in post.value.items()}
                )[name]
            )
            assert np.isfinite(steps).all()
            assert (np.abs(steps) <= most).all()
