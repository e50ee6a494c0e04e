"""A plan over messages is the plan: the posts and models of a simulation, whatever happens between.

Oracles: `simulate` on the same plan, data and seed; for rounds that a site missed, a simulation in
which its clients were not drawn. Sums lie on a public grid, so that posts agree bit for bit where
clients compute alike in small and large stacks, which all methods on linear models do; networks
agree closely.
"""

import json
import math
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.deploy.federations import Neighbourhood, federate, open_coordinator, open_sites

from coterie.data.synthetic import synthetic
from coterie.deploy import coordinator as coordinator_module
from coterie.deploy import messages as wire
from coterie.deploy import site as site_module
from coterie.deploy.coordinator import Coordinator, IncompleteRoundError
from coterie.deploy.messages import Envelope, Message, RefusedError, peek, sign
from coterie.deploy.site import SUM
from coterie.engine.simulate import _Simulation, simulate
from coterie.methods.base import Shape, registered
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.models import CNN, MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.billboard import Billboard
from coterie.privacy.ledger import Ledger
from coterie.privacy.noise import LocalNoise
from coterie.privacy.sampling import Cyclic, Everyone, FixedSize, Poisson
from coterie.privacy.transcript import FolderTranscript

pytestmark = pytest.mark.full

ROUNDS = 3
SITES = {"a": (0, 1), "b": (2,), "c": (3, 4, 5)}


def toy(task="regression", clients=6):
    return synthetic(
        "mean", clients=clients, rows=(3, 9), features=4, task=task, spread=0.3, seed=0
    ).data


DATA = toy()


def make_plan(method=None, sampler=None, noise="gaussian", seed=5, **privacy):
    much = {"epsilon": 2.0} if noise == "wishart" else {"noise_multiplier": 1.0}
    if noise == "laplace":
        much["delta"] = 0.0
    if isinstance(sampler, FixedSize):
        much["relation"] = "replace"
    asked = {**much, "clip": 0.5, "noise": noise, **privacy}
    return Plan(
        method=method or PMTL(),
        privacy=Privacy(**asked),
        sampler=sampler or Poisson(),
        rounds=ROUNDS,
        simulation_seed=seed,
    )


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """A process that dies leaves what it wrote; only a machine that dies needs fsync."""
    monkeypatch.setattr("os.fsync", lambda _: None)


class Killed(BaseException):
    """A kill: nothing that catches errors catches it."""


@dataclass
class Street(Neighbourhood):
    """Sites that may be silent in some rounds, come back later, or give answers that get lost.

    `silent` and `lost` hold (site, round): who is not reached, and whose answer is lost.
    """

    silent: set[tuple[str, int]] = field(default_factory=set)
    lost: set[tuple[str, int]] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    die_after: int = -1

    def connect(self, handshake, identify, sites, seconds):
        self.handshake, self.identify = handshake, identify
        self.met = set()
        for name in self.sites:
            if name not in self.absent:
                self.hello(name)
        return set(self.met)

    def hello(self, name):
        try:
            self.met.add(self.identify(self.sites[name].answer(self.handshake())))
        except RefusedError:
            return

    def ask(self, questions, seconds):
        number = {peek(envelope).round for envelope in questions.values()}
        reached = {
            name: envelope
            for name, envelope in questions.items()
            if not any((name, n) in self.silent for n in number)
        }
        for name in set(reached) - self.met - self.absent:
            self.hello(name)
        for name, answer in super().ask(reached, seconds):
            if any((name, n) in self.lost for n in number):
                continue
            yield name, answer
            self.die_after -= 1
            if self.die_after == 0:
                raise Killed


@dataclass
class Federated:
    """A federation in a folder, and what came of its runs."""

    plan: Plan
    folder: Path
    data: object = None
    sites: object = field(default_factory=lambda: SITES)
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        self.data = DATA if self.data is None else self.data
        self.federation, self.keys = federate(self.data, self.sites, **self.settings)
        self.log, self.models, self.tallies = [], {}, []
        self.street = Street(self.open_sites())

    def open_sites(self):
        return open_sites(
            self.plan,
            self.data,
            self.federation,
            self.keys,
            self.folder / "sites",
            finished=lambda folder, models, _: self.models.update({folder.parent.name: models}),
        )

    def coordinator(self) -> Coordinator:
        return open_coordinator(
            self.plan, self.federation, self.keys, self.folder / "run", self.street, self.log
        )

    def run(self):
        lead = self.coordinator()
        self.shared = lead.run(lambda n, shared, statistics: self.tallies.append(statistics))
        self.posts = lead.billboard.posts
        return self

    @property
    def stacked(self):
        """All clients' models, in the order of their numbers."""
        first = next(iter(self.models.values()))
        return {
            name: torch.cat([self.models[site][name] for site in self.federation.sites])
            for name in first
        }

    def events(self, name):
        return [facts for event, facts in self.log if event == name]

    def account(self):
        """How often each round was charged and released, by the file."""
        found = {"charge": Counter(), "release": Counter()}
        for line in (self.folder / "run" / "ledger.jsonl").read_text().splitlines():
            for name, counts in found.items():
                counts.update([shown for key, shown in json.loads(line).items() if key == name])
        return found


def once(rounds=ROUNDS):
    return dict.fromkeys(range(rounds), 1)


def simulated(plan, data, missed=(), monkeypatch=None):
    """Simulate; clients in `missed` (client, round) are as if they had not been drawn."""
    if not missed:
        return simulate(plan, data)
    draw = _Simulation._cohort

    def without(self, number):
        cohort, seconds = draw(self, number)
        return np.setdiff1d(cohort, [c for c, n in missed if n == number]), seconds

    with monkeypatch.context() as patch:
        patch.setattr(_Simulation, "_cohort", without)
        return simulate(plan, data)


def bits(tree):
    return {name: leaf.numpy().tobytes() for name, leaf in tree.items()}


def close(mine, theirs, rtol=5e-5, atol=5e-5):
    """Hold trees close; `torch.testing` would load torch.distributed, which takes seconds."""
    assert mine.keys() == theirs.keys()
    for name, leaf in mine.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol, atol, equal_nan=False, err_msg=name)


def check_equal(found, outcome, exact=True):
    assert len(found.posts) == len(outcome.posts)
    for mine, theirs in zip(found.posts, outcome.posts, strict=True):
        if exact:
            assert bits(mine.value) == bits(theirs.value), mine.index
        close(mine.value, theirs.value)
    close(found.stacked, outcome.models.leaves)
    if exact:
        close(found.shared, outcome.shared, rtol=0, atol=0)


METHODS = sorted(n for n, kind in registered().items() if kind().shape is not Shape.POOLED)


def exactly(name):
    """Float32 products of networks depend on how many clients are stacked: equal closely."""
    return isinstance(registered()[name]().model, Linear)


def method(name, **settings):
    return registered()[name](**settings)


def images():
    flat = synthetic("mean", clients=6, rows=(3, 9), features=36, task="multiclass", seed=0).data
    spec = replace(flat.spec, shape=(1, 6, 6))
    return replace(flat, spec=spec, features=flat.features.reshape(-1, 1, 6, 6))


FEW, APART = Poisson(4.0), {"a": (0,), "b": (1,), "c": (2, 3, 4, 5)}
NETWORK = PMTL(model=MLP(hidden=(4,)))
SAME = {
    "all clients": (make_plan(), DATA, SITES),
    "laplace": (make_plan(sampler=Everyone(), noise="laplace"), DATA, SITES),
    "fixed size": (make_plan(sampler=FixedSize(3)), DATA, 4),
    "local": (make_plan(method("fedavg"), FEW, "local"), DATA, 1),
    "wishart": (make_plan(method("mpmtl"), Everyone(), "wishart"), DATA, SITES),
    "rows of their own": (make_plan(method("dpmtrl"), Everyone()), DATA, SITES),
    "machines": (make_plan(method("mtlsvm")), DATA, 2),
    "sites of one": (make_plan(method("ditto"), FixedSize(2)), DATA, APART),
    "finetune kl": (make_plan(method("finetune", base=FedAvg(prox=0.1), how="kl"), FEW), DATA, 3),
    "adaptive": (make_plan(method("adaptive", base=DPFedMTL(model=NETWORK.model)), FEW), DATA, 3),
    "ditto sgd": (make_plan(method("ditto", solver="sgd"), FEW), DATA, SITES),
    "related": (make_plan(method("related", change_from="start", solver="sgd"), FEW), DATA, SITES),
    "mpmtl steps": (make_plan(method("mpmtl", solver="steps", decompose=0.02), FEW), DATA, SITES),
    "mtlsvm mask": (make_plan(method("mtlsvm", mask="step", gamma="average"), FEW), DATA, SITES),
    "mocha learned": (make_plan(method("mocha", relation="learned", every=2), FEW), DATA, SITES),
    "pfeb guard": (make_plan(method("pfeb", guard=True), FEW), DATA, SITES),
    "pmtl slice": (make_plan(method("pmtl", shared="slice", directions=2), FEW), DATA, SITES),
    "schedule": (make_plan(sampler=Cyclic(2)), DATA, SITES),
    "banded": (make_plan(sampler=Cyclic(3), noise="banded"), DATA, SITES),
    "banded blocks": (make_plan(method("pfeb"), Cyclic(2), "banded"), DATA, SITES),
}
ALIKE = {
    "binary": (make_plan(sampler=FEW), toy("binary"), SITES),
    "multiclass": (make_plan(sampler=FEW), toy("multiclass"), SITES),
    "network": (make_plan(NETWORK, FEW), toy("multiclass"), SITES),
    "images": (make_plan(PMTL(model=CNN(channels=(2,), kernel=3)), FEW), images(), SITES),
    "no privacy": (make_plan(noise_multiplier=None, epsilon=math.inf, clip=None), DATA, SITES),
}


@pytest.mark.parametrize("name", [*SAME, *ALIKE])
def test_posts_are_those_of_a_simulation(name, tmp_path):
    """Samplers, kinds of noise, settings of methods, tasks and models."""
    plan, data, sites = {**SAME, **ALIKE}[name]
    found = Federated(plan, tmp_path, data=data, sites=sites).run()
    exact = name in SAME and isinstance(getattr(plan.method, "model", Linear()), Linear)
    check_equal(found, simulate(plan, data), exact=exact)


@pytest.mark.parametrize(
    "name,minimum", [*((name, 0.5) for name in METHODS), ("pmtl", 0.0), ("dpmtrl", 0.0)]
)
def test_every_method_posts_what_a_simulation_posts(name, minimum, tmp_path):
    """Hidden cohorts: all sites are asked, those with nobody drawn for zeros; or those drawn."""
    plan = make_plan(registered()[name](), Poisson(2.0))
    sites = {"a": (0,), "b": (1, 2), "c": (3,), "d": (4, 5)}
    found = Federated(plan, tmp_path, sites=sites, settings={"minimum": minimum}).run()
    check_equal(found, simulate(plan, DATA), exact=exactly(name))
    assert not any(
        event in ("rejected", "declined", "clipped", "incomplete") for event, _ in found.log
    )
    heads = [json.loads(head) for _, head in found.street.asked]
    drawn = [head["body"]["clients"] for head in heads if head["kind"] == "round"]
    if found.plan.posts == 0:
        return
    # In three rounds of two clients of six somebody is not drawn.
    assert ([] in drawn) is (minimum > 0)
    if minimum > 0:
        asked = Counter(head["round"] for head in heads if head["kind"] == "round")
        assert set(asked.values()) == {len(sites)}


def test_the_order_of_sites_is_the_order_of_numbers(tmp_path):
    """A federation may list clients in another order than the data: then its numbers differ."""
    mixed = {"z": (5, 0), "a": (3, 1, 2, 4)}
    order = [5, 0, 3, 1, 2, 4]
    rows = [slice(int(DATA.offsets[i]), int(DATA.offsets[i + 1])) for i in order]
    counts = DATA.counts[order]
    moved = replace(
        DATA,
        names=[DATA.names[i] for i in order],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        features=torch.cat([DATA.features[part] for part in rows]),
        targets=torch.cat([DATA.targets[part] for part in rows]),
    )
    plan = make_plan(sampler=Poisson(3.0))
    check_equal(Federated(plan, tmp_path, sites=mixed).run(), simulate(plan, moved))


def test_a_federation_that_pools_or_is_seeded_in_earnest_is_refused(tmp_path):
    pooled = next(kind() for kind in registered().values() if kind().shape is Shape.POOLED)
    federation, keys = federate(DATA, 2)
    for plan, allowed, word in (
        (Plan(method=pooled, privacy=Privacy(epsilon=math.inf)), federation, "in one place"),
        (make_plan(), replace(federation, simulation=False), "protects nobody"),
    ):
        with pytest.raises(ValueError, match=word):
            open_coordinator(plan, allowed, keys, tmp_path / "run", None, [])
    with pytest.raises(ValueError, match="signing key"):
        keys.coordinator = Ed25519PrivateKey.generate()
        open_coordinator(make_plan(), federation, keys, tmp_path / "run", None, [])
    assert not any((tmp_path / "run").iterdir())


class TestDroppedSites:
    """Sites that miss rounds, and answers that get lost."""

    @pytest.mark.parametrize(("way", "method"), [("lost", PMTL()), ("silent", FedAvg())])
    def test_are_as_if_their_clients_had_not_been_drawn(self, way, method, tmp_path, monkeypatch):
        plan = replace(make_plan(method, Poisson(4.0)), rounds=5)
        found = Federated(plan, tmp_path, settings={"minimum": 0.0, "patience": 0})
        missed = {("c", 0), ("c", 3), ("b", 1), ("a", 2), ("b", 2), ("c", 2)}
        getattr(found.street, way).update(missed)
        found.run()
        gone = {(client, n) for site, n in missed for client in SITES[site]}
        check_equal(found, simulated(plan, DATA, gone, monkeypatch))
        assert [statistics.silent for statistics in found.tallies].count(0) < 5
        assert found.account() == {"charge": once(5), "release": once(5)}

    def test_that_come_late_are_greeted_then(self, tmp_path, monkeypatch):
        found = Federated(make_plan(), tmp_path, settings={"minimum": 0.0, "patience": 0})
        found.street.absent.add("b")
        back = iter([None, None])

        def tamper(site, question, answer):
            if site == "c" and peek(question).round == 1 and next(back, "last") is None:
                found.street.absent.discard("b")
            return answer

        found.street.tamper = tamper
        found.run()
        gone = {(2, 0), (2, 1)}
        check_equal(found, simulated(make_plan(), DATA, gone, monkeypatch))

    def test_asked_again_give_the_same_answer(self, tmp_path):
        """An answer that was lost once is not computed anew: the round is that of all."""
        found = Federated(make_plan(seed=None), tmp_path, settings={"minimum": 1.0, "patience": 1})
        sent = {}

        def tamper(site, question, answer):
            key = (site, peek(question).round)
            sent.setdefault(key, []).append({n: raw.data for n, raw in answer.arrays.items()})
            return None if len(sent[key]) == 1 and peek(question).round >= 0 else answer

        found.street.tamper = tamper
        found.run()
        assert all(len(shown) == 2 for (_, n), shown in sent.items() if n >= 0)
        assert all(shown[0] == shown[-1] for shown in sent.values())


class TestShortRounds:
    """Too few answers: the round is charged, kept, asked again, and never charged again."""

    def test_stop_the_run_and_go_on_later(self, tmp_path):
        plan = make_plan(sampler=Poisson(4.0))
        found = Federated(plan, tmp_path, settings={"minimum": 1.0, "patience": 2})
        found.street.silent = {("c", 1), ("a", 1), ("b", 1)}
        cohorts = []
        for _ in range(3):
            with pytest.raises(
                IncompleteRoundError, match=r"round 2: 0 of \d clients.*not charged"
            ):
                found.run()
            assert found.account() == {"charge": once(2), "release": once(1)}
            kept = json.loads((tmp_path / "run" / "coordinator.json").read_text())
            cohorts.append((kept["round"], kept["cohort"]))
        assert cohorts[0][0] == 1 and cohorts == cohorts[:1] * 3
        assert len(found.events("incomplete")) == 3 * 3
        found.street.silent = set()
        found.run()
        assert found.account() == {"charge": once(), "release": once()}
        check_equal(found, simulate(plan, DATA))

    def test_answers_that_came_are_the_same_when_the_run_goes_on(self, tmp_path):
        """Without a seed, and with sites and coordinator opened anew."""
        plan = make_plan(seed=None)
        found = Federated(plan, tmp_path, settings={"minimum": 1.0, "patience": 0})
        sent = {}

        def tamper(site, question, answer):
            shown = {name: raw.data for name, raw in answer.arrays.items()}
            sent.setdefault((site, peek(question).round), []).append(shown)
            return answer

        found.street.tamper, found.street.silent = tamper, {("c", 1)}
        with pytest.raises(IncompleteRoundError, match="round 2: 3 of 6"):
            found.run()
        found.street.sites, found.street.silent = found.open_sites(), set()
        found.run()
        assert len(sent["a", 1]) == len(sent["b", 1]) == 2 and len(sent["c", 1]) == 1
        assert all(shown[0] == shown[-1] for shown in sent.values())
        assert found.account() == {"charge": once(), "release": once()}

    def test_keep_a_cohort_that_no_seed_could_draw_again(self, tmp_path, monkeypatch):
        draws = iter([[0, 3], [1, 4], [2, 5], [0, 1]])
        monkeypatch.setattr(Poisson, "draw", lambda *_: np.array(next(draws)))
        plan = make_plan(sampler=Poisson(2.0), seed=None)
        found = Federated(plan, tmp_path, settings={"minimum": 1.0})
        found.street.silent = {(site, 0) for site in SITES}
        cohorts = []
        for _ in range(4):
            with pytest.raises(IncompleteRoundError):
                found.run()
            shown = json.loads((tmp_path / "run" / "coordinator.json").read_text())
            cohorts.append((shown["run"], shown["round"], shown["cohort"]))
        assert cohorts == cohorts[:1] * 4 and cohorts[0][1:] == (0, [0, 3])
        assert found.account()["charge"] == once(1)

    @pytest.mark.parametrize(
        "minimum,absent,is_enough",
        [(0.0, "abc", True), (0.5, "c", True), (0.51, "c", False), (0.8, "b", True)],
    )  # fmt: skip
    def test_the_minimum_is_a_share_of_clients_not_of_sites(
        self, minimum, absent, is_enough, tmp_path
    ):
        found = Federated(make_plan(), tmp_path, settings={"minimum": minimum, "patience": 0})
        found.street.silent = {(site, 1) for site in absent}
        if is_enough:
            found.run()
            counts = {site: len(ids) for site, ids in SITES.items()}
            expected = 6 - sum(counts[site] for site in absent)
            assert found.tallies[1].answered == expected and found.tallies[1].asked == 6
        else:
            with pytest.raises(IncompleteRoundError):
                found.run()

    @pytest.mark.parametrize("minimum", [1.0, 0.0])
    def test_an_empty_cohort_posts_noise(self, minimum, tmp_path, monkeypatch):
        """All are asked for zeros, so that nobody sees that it is empty; or, if so agreed, none."""
        monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([], dtype=np.int64))
        plan = make_plan(sampler=Poisson(0.5))
        found = Federated(plan, tmp_path, settings={"minimum": minimum}).run()
        check_equal(found, simulate(plan, DATA))
        rounds = [json.loads(head) for _, head in found.street.asked if '"round"' in head]
        asked = [head["body"]["clients"] for head in rounds if head["kind"] == "round"]
        assert asked == ([[]] * len(SITES) * ROUNDS if minimum else [])
        assert found.account() == {"charge": once(), "release": once()}

    @pytest.mark.parametrize(
        "minimum,absent,is_enough",
        [(0.5, "c", True), (0.51, "c", False), (0.17, "ac", False), (0.16, "ac", True)],
    )  # fmt: skip
    @pytest.mark.parametrize("cohort", [[2], [3, 4, 5]], ids=str)
    def test_under_a_hidden_cohort_the_minimum_is_of_clients_that_sites_host(
        self, minimum, absent, is_enough, cohort, tmp_path, monkeypatch
    ):
        """Who was drawn decides nothing that others can see."""
        monkeypatch.setattr(Poisson, "draw", lambda *_: np.array(cohort, dtype=np.int64))
        plan = replace(make_plan(sampler=Poisson(4.0)), rounds=1)
        found = Federated(plan, tmp_path, settings={"minimum": minimum, "patience": 0})
        found.street.silent = {(site, 0) for site in absent}
        if is_enough:
            found.run()
            gone = {client for site in absent for client in SITES[site]}
            statistics = found.tallies[0]
            assert (statistics.asked, statistics.answered) == (len(cohort), len(set(cohort) - gone))
        else:
            with pytest.raises(
                IncompleteRoundError, match=r"clients \(minimum\)\. The round is charged"
            ):
                found.run()

    def test_without_a_minimum_those_drawn_are_asked_once(self, tmp_path, monkeypatch):
        """Asked again, a site would learn that nobody needed to; here nobody ever is."""
        monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([0, 2]))
        plan = make_plan(sampler=Poisson(4.0))
        found = Federated(plan, tmp_path, settings={"minimum": 0.0, "patience": 3})
        found.street.lost = {("b", 1)}
        found.run()
        heads = [(site, json.loads(head)) for site, head in found.street.asked]
        asked = [(site, head["round"]) for site, head in heads if head["kind"] == "round"]
        assert asked == [(site, number) for number in range(ROUNDS) for site in "ab"]
        check_equal(found, simulated(plan, DATA, {(2, 1)}, monkeypatch))

    def test_nobody_there_is_said_before_anything_is_charged(self, tmp_path):
        found = Federated(make_plan(), tmp_path)
        found.street.absent = set(SITES)
        with pytest.raises(IncompleteRoundError, match="none of 3 sites answered"):
            found.run()
        assert found.account()["charge"] == {}
        found.street.absent = set()
        check_equal(found.run(), simulate(make_plan(), DATA))


def test_sites_with_other_versions_are_named(tmp_path, monkeypatch):
    """A run goes on: versions change last bits of sums at most. What a site says is cut short."""
    found = Federated(make_plan(), tmp_path).run()
    assert not found.events("other_version")
    told = {**site_module.versions(), "torch": "0.1", "numpy": "x" * 10_000}
    del told["scipy"]
    monkeypatch.setattr(site_module, "versions", lambda: told)
    other = Federated(make_plan(), tmp_path / "other").run()
    lines = other.events("other_version")
    assert {line["site"] for line in lines} == set(SITES)
    assert "torch 0.1, here " in lines[0]["reason"] and "scipy unknown" in lines[0]["reason"]
    assert len(lines[0]["reason"]) < 200 and "coterie 0" not in lines[0]["reason"]
    check_equal(other, simulate(make_plan(), DATA))


def fail_at(patch, clients, round):
    """Let the work of these clients fail in a round, alone or stacked with others."""
    update = PMTL.local_update

    def fail(self, shared, personal, block, rng, number):
        if number == round and not set(clients).isdisjoint(block.ids.tolist()):
            raise ValueError("a secret number")
        return update(self, shared, personal, block, rng, number)

    patch.setattr(PMTL, "local_update", fail)


def test_a_site_whose_work_fails_is_not_missed(tmp_path, monkeypatch):
    """It answers zeros: asking again, or a gap, would tell others that its clients were drawn."""
    plan = make_plan(sampler=Poisson(4.0))
    monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([0, 2, 3, 5]))
    found = Federated(plan, tmp_path, settings={"minimum": 1.0, "patience": 2})
    with monkeypatch.context() as patch:
        fail_at(patch, SITES["c"], 1)
        found.run()
    tallies = [(t.asked, t.answered, t.failed, t.rejected) for t in found.tallies]
    assert tallies == [(4, 4, 0, 0)] * 3
    asked = [json.loads(head) for _, head in found.street.asked]
    counts = Counter(head["round"] for head in asked if head["kind"] == "round")
    assert counts == dict.fromkeys(range(ROUNDS), len(SITES)), "nobody is asked again"
    assert not list(found.events("declined"))
    gone = {(client, 1) for client in SITES["c"]}
    check_equal(found, simulated(plan, DATA, gone, monkeypatch))


def test_clients_that_fail_still_add_the_noise_that_is_counted_on(tmp_path, monkeypatch):
    """Their zeros have their noise, and nothing says that they failed, as in the simulator."""
    plan = make_plan(sampler=Everyone(), noise=LocalNoise(honest=6))
    found = Federated(plan, tmp_path, settings={"minimum": 0.0, "patience": 0})
    with monkeypatch.context() as patch:
        fail_at(patch, SITES["c"], 1)
        found.run()
        simulated_too = simulate(plan, DATA)
    assert simulated_too.zeroed == len(SITES["c"])
    check_equal(found, simulated_too)
    assert not list(found.events("declined"))


def test_steady_questions_last_until_their_deadline(tmp_path):
    """So that how long a round takes tells nobody who had work to do."""
    plan = replace(make_plan(sampler=Poisson(2.0)), rounds=2)
    found = Federated(plan, tmp_path, settings={"steady": True, "deadline": 0.4})
    times = []
    ask = found.street.ask

    def timed(questions, seconds):
        times.append(time.monotonic())
        yield from ask(questions, seconds)

    found.street.ask = timed
    found.run()
    times.append(time.monotonic())
    assert len(times) == 4 and min(np.diff(times)) >= 0.4
    check_equal(found, simulate(plan, DATA))


@pytest.mark.parametrize("trust", ["server", "secure_aggregation"])
def test_who_was_drawn_is_for_the_coordinator_alone(trust, tmp_path):
    """Cohorts stand in coordinator.json, which nobody else on its machine may read."""
    found = Federated(make_plan(sampler=Poisson(2.0)), tmp_path, settings={"trust": trust}).run()
    path = found.folder / "run" / "coordinator.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "cohort" in json.loads(path.read_text())


def said(envelope):
    """Read what a site sent, without checks."""
    arrays = {name: wire._read(raw) for name, raw in envelope.arrays.items()}
    return replace(peek(envelope), arrays=arrays)


@dataclass
class Hostile:
    """Site b answers round 1 with something else; the others are honest."""

    found: Federated
    earlier: dict = field(default_factory=dict)

    def key(self, site="b"):
        return self.found.keys.sites[site]

    def changed(self, answer, key=None, **changes):
        return sign(replace(said(answer), **changes), key or self.key())

    def numbers(self, answer, make):
        message = said(answer)
        arrays = {name: make(array) for name, array in message.arrays.items()}
        return sign(replace(message, arrays=arrays), self.key())


def spoil(array, value):
    spoiled = array.copy()
    spoiled.flat[-1] = value
    return spoiled


def nested_word(answer, key, depth=900):
    shown = {**json.loads(answer.header), "kind": "refused", "body": 0}
    deep = '{"reason": ' + "[" * depth + "]" * depth + "}"
    head = json.dumps(shown).replace('"body": 0', f'"body": {deep}').encode()
    return Envelope(head, key.sign(wire._signed(head, {})), {})


REFUSED = {
    "nothing but a word": lambda h, a: "a message that cannot be read",
    "garbage": lambda h, a: Envelope(secrets.token_bytes(400), secrets.token_bytes(64)),
    "empty": lambda h, a: Envelope(b"", b""),
    "a bomb": lambda h, a: replace(a, header=b"[" * 10**6),
    "a head of 100 MB": lambda h, a: replace(a, header=bytes(100 << 20)),
    "unsigned": lambda h, a: replace(a, signature=b""),
    "signed by nobody": lambda h, a: sign(said(a), Ed25519PrivateKey.generate()),
    "signed by another site": lambda h, a: sign(said(a), h.key("c")),
    "in another's name": lambda h, a: h.changed(a, site="c"),
    "another's, in its name": lambda h, a: h.changed(a, h.key("c"), site="c"),
    "another run": lambda h, a: h.changed(a, run="0" * 16),
    "another nonce": lambda h, a: h.changed(a, nonce="0" * 32),
    "another round": lambda h, a: h.changed(a, round=0),
    "a negative round": lambda h, a: h.changed(a, round=-1),
    "a round that is true": lambda h, a: h.changed(a, round=True),
    "the answer of the round before": lambda h, a: h.earlier["b"],
    "the answer of another site": lambda h, a: h.earlier["a"],
    "a hello": lambda h, a: h.changed(a, kind="handshake", arrays={}),
    "another kind, with arrays": lambda h, a: h.changed(a, kind="finish"),
    "no arrays": lambda h, a: h.changed(a, arrays={}),
    "more arrays": lambda h, a: h.changed(a, arrays={**said(a).arrays, "x": np.zeros(9)}),
    "other names": lambda h, a: h.changed(
        a, arrays={f"x{name}": array for name, array in said(a).arrays.items()}
    ),
    "float32": lambda h, a: h.numbers(a, lambda x: x.astype(np.float32)),
    "whole numbers": lambda h, a: h.numbers(a, lambda x: x.astype(np.int64)),
    "one dimension more": lambda h, a: h.numbers(a, lambda x: x[None]),
    "transposed": lambda h, a: h.numbers(a, lambda x: np.zeros((*x.shape, 2))),
    "altered after signing": lambda h, a: replace(
        a, arrays={n: replace(raw, data=raw.data[::-1]) for n, raw in a.arrays.items()}
    ),
    "cut after signing": lambda h, a: replace(
        a, arrays={n: replace(raw, data=raw.data[:-8]) for n, raw in a.arrays.items()}
    ),
    "too long after signing": lambda h, a: replace(
        a, arrays={n: replace(raw, data=raw.data * 1000) for n, raw in a.arrays.items()}
    ),
}
DECLINED = {
    "refused": lambda h, a: h.changed(a, kind="refused", arrays={}, body={"reason": "no"}),
    "failed": lambda h, a: h.changed(a, kind="failed", arrays={}, body={}),
    "a long word": lambda h, a: h.changed(
        a, kind="failed", arrays={}, body={"reason": "x" * 10**6}
    ),
    "a word of numbers": lambda h, a: h.changed(
        a, kind="failed", arrays={}, body={"reason": [1, {}]}
    ),
    "a word that nests": lambda h, a: nested_word(a, h.key()),
}


def attack(tmp_path, *makes, plan=None):
    """Run with site b hostile in every round but the first, in each by another function."""
    plan = replace(plan or make_plan(sampler=Everyone()), rounds=max(ROUNDS, 1 + len(makes)))
    found = Federated(plan, tmp_path, settings={"minimum": 0.0, "patience": 0})
    hostile, answers = Hostile(found), {}

    def tamper(site, question, answer):
        number = peek(question).round
        answers[site, number] = answer
        hostile.earlier = {name: answers.get((name, number - 1)) for name in SITES}
        wrong = site == "b" and 1 <= number <= len(makes)
        return makes[number - 1](hostile, answer) if wrong else answer

    found.street.tamper = tamper
    return found.run()


def without_b(found, rounds, monkeypatch):
    """The simulation in which client 2, the only one of site b, was not drawn in some rounds."""
    return simulated(found.plan, DATA, {(2, number) for number in rounds}, monkeypatch)


def test_what_is_no_answer_is_refused_and_the_round_goes_on(tmp_path, monkeypatch):
    found = attack(tmp_path, *REFUSED.values(), *DECLINED.values())
    rounds = range(1, 1 + len(REFUSED) + len(DECLINED))
    check_equal(found, without_b(found, rounds, monkeypatch))
    for name, statistics in zip([*REFUSED, *DECLINED], found.tallies[1:], strict=True):
        counts = (statistics.rejected, statistics.answered, statistics.asked)
        if name in REFUSED:
            assert counts == (1, 5, 6), name
        else:
            assert statistics.failed + statistics.rejected == 1, name
    noted = [facts for event, facts in found.log if event in ("declined", "rejected")]
    assert len(noted) == len(rounds)
    for facts in noted:
        assert facts["site"] == "b" and len(facts["reason"]) < 600
        json.dumps(facts, allow_nan=False).encode()
    assert all(len(facts["reason"]) <= 200 for facts in found.events("declined"))
    assert found.tallies[0].rejected == 0


@pytest.mark.parametrize("noise", ["gaussian", "laplace", "local"])
def test_numbers_that_are_none_count_as_zero(noise, tmp_path, monkeypatch):
    plan = make_plan(sampler=Everyone(), noise=noise)
    makes = [
        lambda h, a, value=value: h.numbers(a, lambda x: spoil(x, value))
        for value in (math.nan, math.inf, -math.inf)
    ]
    found = attack(tmp_path, *makes, plan=plan)
    reference = without_b(found, (1, 2, 3), monkeypatch)
    for mine, theirs in zip(found.posts, reference.posts, strict=True):
        assert bits(mine.value) == bits(theirs.value), mine.index
    assert [(t.zeroed, t.scaled) for t in found.tallies] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert found.events("clipped") == [{"site": "b", "reason": "not_finite"}] * 3


HUGE = {
    "1e308": lambda x: np.full_like(x, 1e308),
    "1e300 once": lambda x: spoil(np.zeros_like(x), -1e300),
    "a thousand": lambda x: x * 1000 + 1000,
    "twice": lambda x: np.full_like(x, 1.0),
}


@pytest.mark.parametrize(
    ("how", "noise"),
    [
        ("1e308", "gaussian"),
        ("twice", "gaussian"),
        ("1e300 once", "laplace"),
        ("a thousand", "laplace"),
    ],
)
def test_huge_numbers_are_cut_to_what_the_clients_may_contribute(how, noise, tmp_path, monkeypatch):
    plan = make_plan(sampler=Everyone(), noise=noise)
    found = attack(tmp_path, lambda h, a: h.numbers(a, HUGE[how]), plan=plan)
    reference = without_b(found, (1,), monkeypatch)
    moved = np.concatenate([
        (found.posts[1].value[name] - leaf).numpy().ravel()
        for name, leaf in reference.posts[1].value.items()
    ])  # fmt: skip
    order = 1 if noise == "laplace" else 2
    assert 0.49 < np.linalg.norm(moved, order) <= 0.5 * (1 + 1e-9), "one client's clip"
    assert (found.tallies[1].zeroed, found.tallies[1].scaled) == (0, 1)
    assert [facts["site"] for facts in found.events("clipped")] == ["b"]
    for mine, theirs in zip(found.posts[:1], reference.posts[:1], strict=True):
        assert bits(mine.value) == bits(theirs.value)


@pytest.mark.parametrize("make", [lambda x: x + 1e-13, lambda x: x * (1 - 1e-9)], ids=["+", "*"])
def test_numbers_off_the_grid_are_put_on_it(make, tmp_path):
    found = attack(tmp_path, lambda h, a: h.numbers(a, make))
    honest = simulate(make_plan(sampler=Everyone()), DATA)
    assert (found.tallies[1].zeroed, found.tallies[1].scaled) == (0, 1)
    for name, leaf in honest.posts[1].value.items():
        np.testing.assert_allclose(found.posts[1].value[name], leaf, rtol=0, atol=1e-6)


SHAPES = {
    "asymmetric": lambda x: np.triu(x) * 3,
    "negative": lambda x: -np.eye(len(x)),
    "1e308": lambda x: np.full_like(x, 1e308),
    "nan": lambda x: spoil(x, math.nan),
}


@pytest.mark.parametrize("noise", ["gaussian", "wishart"])
def test_second_moments_that_are_none(noise, tmp_path):
    plan = make_plan(MPMTL(), Everyone(), noise)
    makes = [lambda h, a, make=make: h.numbers(a, make) for make in SHAPES.values()]
    found = attack(tmp_path, *makes, plan=plan)
    assert [t.zeroed + t.scaled for t in found.tallies] == [0, 1, 1, 1, 1]
    assert len(found.posts) == 1 + len(SHAPES)
    assert all(np.isfinite(leaf.numpy()).all() for p in found.posts for leaf in p.value.values())


@pytest.mark.parametrize(
    "value,method,noise",
    [
        (1.0, "pmtl", "gaussian"),
        (1e308, "pmtl", "laplace"),
        (math.nan, "mpmtl", "gaussian"),
        (1.0, "dpmtrl", "gaussian"),
    ],
)
def test_a_site_with_nobody_drawn_moves_nothing(value, method, noise, tmp_path, monkeypatch):
    """It is asked all the same, for zeros: whatever it sends instead is cut to nobody's bound."""
    monkeypatch.setattr(Poisson, "draw", lambda *_: np.array([0, 3, 4]))
    plan = make_plan(registered()[method](), Poisson(4.0), noise)
    found = Federated(plan, tmp_path, settings={"patience": 0})
    hostile = Hostile(found)

    def tamper(site, question, answer):
        if (site, peek(question).round) != ("b", 1):
            return answer
        return hostile.numbers(answer, lambda x: np.full_like(x, value))

    found.street.tamper = tamper
    found.run()
    check_equal(found, simulate(plan, DATA))
    assert found.tallies[1].zeroed + found.tallies[1].scaled == 1
    assert [facts["site"] for facts in found.events("clipped")] == ["b"]


def test_rows_of_others_are_not_written(tmp_path):
    """Where each client has a row of its own, a site reaches those of its clients alone."""
    plan = make_plan(registered()["dpmtrl"](), Everyone())
    found = attack(tmp_path, lambda h, a: h.numbers(a, np.ones_like), plan=plan)
    honest = simulate(plan, DATA)
    assert found.tallies[1].scaled == 1
    for name, leaf in honest.posts[1].value.items():
        others = [client for client in range(6) if client != 2]
        assert torch.equal(found.posts[1].value[name][others], leaf[others])
        assert not torch.equal(found.posts[1].value[name][2], leaf[2])


def test_an_end_that_a_site_answers_with_garbage_is_an_end(tmp_path):
    found = Federated(make_plan(), tmp_path)

    def tamper(site, question, answer):
        is_end = site == "b" and peek(question).kind == "finish"
        return Envelope(b"garbage", b"") if is_end else answer

    found.street.tamper = tamper
    found.run()
    assert [facts["sites"] for facts in found.events("delivered")] == [["a", "c"]]
    assert {facts["site"] for facts in found.events("rejected")} == {"b"}


class TestTransports:
    """What carries messages may be broken, or hostile itself."""

    def test_answers_that_come_twice_count_once(self, tmp_path):
        found = Federated(make_plan(), tmp_path)
        ask = found.street.ask

        def twice(questions, seconds):
            for site, answer in ask(questions, seconds):
                yield site, answer
                yield site, answer
            yield "nobody", "a word"

        found.street.ask = twice
        found.run()
        check_equal(found, simulate(make_plan(), DATA))
        assert all(statistics.rejected == len(SITES) + 1 for statistics in found.tallies)

    def test_answers_to_swapped_sites_are_refused(self, tmp_path):
        found = Federated(make_plan(), tmp_path, settings={"minimum": 0.0, "patience": 0})
        ask = found.street.ask

        def swapped(questions, seconds):
            other = {"a": "c", "c": "a", "b": "b"}
            for site, answer in ask(questions, seconds):
                yield other[site], answer

        found.street.ask = swapped
        found.run()
        assert all(
            statistics.rejected == 2 and statistics.answered == 1 for statistics in found.tallies
        )

    def test_a_greeting_is_recognised_once_and_in_its_run(self, tmp_path):
        found = Federated(make_plan(), tmp_path)
        lead = found.coordinator()
        site = found.street.sites["a"]
        answer = site.answer(lead.handshake())
        assert lead.identify(answer) == "a"
        message = said(site.answer(lead.handshake()))
        for other, key in (
            (said(answer), "a"),
            (replace(message, site="west"), "a"),
            (replace(message, site=""), "a"),
            (replace(message, site="b"), "a"),
            (message, "b"),
            (replace(message, run="other"), "a"),
            (replace(message, nonce="0" * 32), "a"),
            (replace(message, body={}), "a"),
            (replace(message, body={"agreement": "other"}), "a"),
            (replace(message, kind="refused", body={"reason": "x" * 10**6}), "a"),
        ):
            with pytest.raises(RefusedError) as refusal:
                lead.identify(sign(other, found.keys.sites[key]))
            assert len(str(refusal.value)) < 300
        lead.billboard.ledger.close()


def test_what_travels_is_the_sum_and_nothing_else(tmp_path):
    """A site's messages hold a sum of its mechanism, or what everybody knows of the run."""
    found = Federated(make_plan(), tmp_path)
    seen = []
    public = {"run", "site", "epsilon", "delta", "plan.toml", "federation.toml"}

    def tamper(site, question, answer):
        seen.append(said(answer))
        return answer

    found.street.tamper = tamper
    found.run()
    names = {SUM + name for name in found.posts[0].value}
    for message in seen:
        assert set(message.arrays) == (names if message.kind == "round" else set())
        assert set(message.body) == (set() if message.kind == "round" else {"statement"})
        if message.body:
            assert set(message.body["statement"]) == {"text", "signature"}
            assert set(json.loads(message.body["statement"]["text"])) == public
    assert {message.kind for message in seen} == {"round", "finish"}


def kill_at(patch, act, when):
    """Die at an act of writing of the coordinator, before it or after it."""
    count = [0]
    places = [
        (coordinator_module, "write_atomically"),
        (Ledger, "charge"),
        (Ledger, "release"),
        (FolderTranscript, "write"),
        (Billboard, "post"),
    ]
    for owner, name in places:
        original = getattr(owner, name)

        def die(*args, _original=original, **named):
            count[0] += 1
            is_it = count[0] == act
            if is_it and when == "before":
                raise Killed
            found = _original(*args, **named)
            if is_it and when == "after":
                raise Killed
            return found

        patch.setattr(owner, name, die)


def released(folder):
    return {p.name: p.read_bytes() for p in (folder / "run" / "posts").glob("*") if p.is_file()}


def run_with_deaths(found):
    """Run, and open the coordinator again after each death; posts that are out stay as they are."""
    deaths, out = 0, {}
    while True:
        try:
            found.run()
            return deaths
        except Killed:
            deaths += 1
            now = released(found.folder)
            assert all(now[name] == content for name, content in out.items())
            out = now
            assert set(found.account()["charge"].values()) <= {1}


@pytest.mark.parametrize(("when", "seed"), [("before", 5), ("after", None)])
def test_the_coordinator_may_die_at_any_act_of_writing(when, seed, tmp_path, monkeypatch):
    """Between two acts nothing is written: after one is before the next."""
    plan = replace(make_plan(sampler=Poisson(4.0), seed=seed), rounds=2)
    outcome = simulate(plan, DATA)
    act, deaths = 0, 1
    while deaths:
        act += 1
        found = Federated(plan, tmp_path / f"{when}{act}")
        with monkeypatch.context() as patch:
            kill_at(patch, act, when)
            deaths = run_with_deaths(found)
        assert found.account() == {"charge": once(2), "release": once(2)}, act
        if seed is not None:
            check_equal(found, outcome)
        settled = {
            path.parent.parent.name: json.loads(path.read_text())["counted"]
            for path in found.folder.glob("sites/*/*/state.json")
        }
        kept = json.loads((found.folder / "run" / "coordinator.json").read_text())
        counted = kept["counted"] | dict.fromkeys(kept["pending"], kept["round"])
        assert settled == counted, act
    assert act > 12, "the acts of a coordinator were not found"


@pytest.mark.parametrize(("answers", "noise"), [(1, ""), (3, ""), (4, ""), (7, ""), (4, "banded")])
def test_the_coordinator_may_die_between_answers(answers, noise, tmp_path):
    """Banded noise of the second round takes back that of the first, which a seed draws again."""
    plan = replace(make_plan(sampler=Everyone()), rounds=2)
    if noise:
        plan = replace(make_plan(sampler=Cyclic(3), noise=noise), rounds=3)
    found = Federated(plan, tmp_path)
    found.street.die_after = answers
    assert run_with_deaths(found) == 1
    assert found.account() == {"charge": once(plan.rounds), "release": once(plan.rounds)}
    check_equal(found, simulate(plan, DATA))


@pytest.mark.parametrize("answers", [2, 5])
def test_everybody_may_die_at_once(answers, tmp_path):
    plan = replace(make_plan(sampler=Everyone()), rounds=2)
    found = Federated(plan, tmp_path)
    found.street.die_after = answers
    with pytest.raises(Killed):
        found.run()
    found.street.sites = found.open_sites()
    found.run()
    assert found.account() == {"charge": once(2), "release": once(2)}
    check_equal(found, simulate(plan, DATA))


def test_a_run_that_is_over_can_be_run_again_for_its_models(tmp_path):
    found = Federated(make_plan(), tmp_path).run()
    first, before = dict(found.models), found.account()
    found.models.clear()
    found.run()
    assert found.account() == before
    assert all(bits(found.models[site]) == bits(first[site]) for site in SITES)


def test_a_lost_memory_is_not_guessed(tmp_path):
    found = Federated(make_plan(), tmp_path)
    found.street.die_after = 4
    with pytest.raises(Killed):
        found.run()
    (tmp_path / "run" / "coordinator.json").unlink()
    with pytest.raises(ValueError, match=r"coordinator\.json is missing"):
        found.run()


def test_a_second_coordinator_of_the_same_folder_waits_outside(tmp_path):
    found = Federated(make_plan(), tmp_path)
    first = found.coordinator()
    with pytest.raises(Exception, match="use"):
        found.coordinator()
    first.billboard.ledger.close()
    check_equal(found.run(), simulate(make_plan(), DATA))


def test_questions_are_fresh_and_named(tmp_path):
    found = Federated(make_plan(), tmp_path).run()
    heads = [json.loads(head) for _, head in found.street.asked]
    assert len({head["nonce"] for head in heads}) == len(heads)
    assert all(len(head["nonce"]) == 32 for head in heads)
    assert len({head["run"] for head in heads}) == 1
    assert isinstance(Message(**{k: v for k, v in heads[0].items() if k != "version"}), Message)
