"""A site answers the coordinator alone, each round once, and says nothing of its rows.

Hostile questions are refused in a word and leave its disk as it was. A site that dies at any of
its acts of writing goes on as if it had not, or as if its clients had not been drawn.
"""

import json
import math
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.deploy.federations import federate, rows_of

from coterie.core.rng import Rng
from coterie.data.federated import DataError
from coterie.data.synthetic import synthetic
from coterie.deploy import site as site_module
from coterie.deploy.federation import Agreement
from coterie.deploy.keys import StateCipher
from coterie.deploy.messages import Envelope, Expected, Message, sign, verify
from coterie.deploy.site import SHARED, SUM, Site, expected_tree
from coterie.engine import store as store_module
from coterie.engine.rounds import RoundState, client_half, no_contribution
from coterie.engine.store import Store
from coterie.methods.fedavg import FedAvg
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.noise import BandedNoise, LocalNoise
from coterie.privacy.sampling import Cyclic, Everyone, FixedSize, Poisson
from coterie.runs.budget import Budget, declare_total, read_register

pytestmark = pytest.mark.full

DATA = synthetic("mean", clients=5, rows=(3, 9), features=3, spread=0.3, seed=2).data
ROUNDS = 5
PLAN = Plan(
    method=PMTL(),
    privacy=Privacy(noise_multiplier=1.0),
    sampler=Poisson(4.0),  # below all: a coordinator may ask for some of a site's clients
    rounds=ROUNDS,
    simulation_seed=4,
)
FEDERATION, KEYS = federate(DATA, {"south": (0, 1), "north": (2, 3, 4)})
ROWS = rows_of(DATA, FEDERATION, "north")
OWN = [2, 3, 4]
"""The numbers of the clients of the site that is asked: the second of two."""
RUNS = [f"{number:016x}" for number in range(9)]


_AGREED = [Agreement(PLAN, FEDERATION)]


def agreed(plan):
    """Return the same agreement for the same plan: its guarantee takes a while."""
    if all(one.plan != plan for one in _AGREED):
        _AGREED.append(Agreement(plan, FEDERATION))
    return next(one for one in _AGREED if one.plan == plan)


class World:
    """A coordinator's voice and one site."""

    def __init__(self, folder, plan=PLAN, **settings):
        self.plan, self.folder, self.settings = plan, folder, settings
        self.federation, self.keys = FEDERATION, KEYS
        self.run = RUNS[1]
        self.agreement = agreed(plan)
        self.mechanisms = plan.mechanisms(len(DATA))
        self.shared = plan.method.init(DATA.spec, Rng.seeded(0))
        self.shared = {k: v + 0.1 for k, v in self.shared.items()}
        self.site = self.open()

    def open(self):
        self.site = Site(
            name="north",
            agreement=self.agreement,
            rows=ROWS,
            folder=self.folder / "north",
            key=self.keys.sites["north"],
            **self.settings,
        )
        return self.site

    def message(self, kind, number=-1, body=None, **changes):
        arrays = {}
        if kind in ("round", "finish"):
            arrays = {SHARED + k: v.numpy() for k, v in self.shared.items()}
        base = Message(kind, self.run, "north", number, secrets.token_hex(16), body or {}, arrays)
        return replace(base, **changes)

    def hello(self, **changes):
        return self.message("handshake", body={"agreement": self.agreement.digest}, **changes)

    def round(self, number, counted=-1, clients=None, **changes):
        body = {"clients": OWN if clients is None else clients, "counted": counted}
        return self.message("round", number, body, **changes)

    def send(self, message, key=None):
        return self.read(self.site.answer(sign(message, key or self.keys.coordinator)))

    def read(self, envelope):
        totals = self.mechanisms[0].totals({k: tuple(v.shape) for k, v in self.shared.items()})
        expected = {SUM + k: Expected("float64", shape) for k, shape in totals.items()}
        wanted = expected if envelope.arrays else {}
        return verify(envelope, self.keys.sites["north"].public_key(), wanted)

    def join(self):
        answer = self.send(self.hello())
        assert answer.kind == "handshake", answer.body
        return self

    def disk(self):
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """A process that dies leaves what it wrote; only a machine that dies needs fsync."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path).join()


def expect(answer, kind, word=""):
    assert answer.kind == kind and word in answer.body.get("reason", ""), answer.body
    return answer


def refused(answer, word=""):
    assert not answer.arrays
    assert len(answer.body["reason"]) < 300
    return expect(answer, "refused", word)


def same(one, two):
    assert one.arrays.keys() == two.arrays.keys() and one.arrays
    return all(one.arrays[name].tobytes() == two.arrays[name].tobytes() for name in one.arrays)


def test_a_round_is_the_clients_half_of_it(world):
    """The oracle is `client_half` on the whole data: the site adds nothing and leaves nothing."""
    answer = expect(world.send(world.round(0)), "round")
    method, shared = PLAN.method, world.shared
    state = RoundState(method, world.mechanisms[0], shared, Rng.seeded(4), 0, 4)
    block = DATA.clients(np.array(OWN))
    part, *_ = client_half(state, method.init_client_state(shared, DATA.spec, 3), block)
    for name, leaf in part.total.items():
        assert answer.arrays[SUM + name].tobytes() == leaf.numpy().tobytes()


def test_nobody_drawn_is_answered_with_zeros(world):
    answer = expect(world.send(world.round(0, clients=[])), "round")
    assert answer.arrays and all(not array.any() for array in answer.arrays.values())


def test_a_site_is_opened_with_its_own_key_and_name(world):
    with pytest.raises(ValueError, match=r"'west' is not in the federation.*south, north"):
        replace(world.site, name="west")
    for key in (Ed25519PrivateKey.generate(), world.keys.sites["south"]):
        with pytest.raises(ValueError, match=r"does not match the public key in federation\.toml"):
            replace(world.site, key=key)


def test_a_site_is_judged_by_its_own_clients_rows(world):
    """Others' clients have no rows here, and one site's targets may all be alike."""
    site = replace(world.site, agreement=Agreement(replace(PLAN, method=MPMTL()), FEDERATION))
    replace(site, rows=replace(ROWS, targets=torch.ones_like(ROWS.targets)))
    offsets = ROWS.offsets.copy()
    offsets[3] = offsets[2]
    with pytest.raises(DataError, match="1 of 3 clients have no rows"):
        replace(site, rows=replace(ROWS, offsets=offsets))


HOSTILE = {
    "unknown kind": lambda w: w.message("steal"),
    "no kind": lambda w: w.message(""),
    "a dunder": lambda w: w.message("__init__"),
    "a method": lambda w: w.message("contribution", 1),
    "another site": lambda w: w.round(1, site="south"),
    "no nonce": lambda w: w.round(1, nonce=""),
    "a short nonce": lambda w: w.round(1, nonce="x" * 15),
    "no run": lambda w: w.round(1, run=""),
    "a path for a run": lambda w: w.round(1, run=f"../{RUNS[1]}"),
    "a path for a hello": lambda w: w.hello(run="a/b"),
    "another run": lambda w: w.round(1, run=RUNS[2]),
    "another plan": lambda w: w.message("handshake", run=RUNS[2], body={"agreement": "other"}),
    "no plan": lambda w: w.message("handshake", run=RUNS[2]),
    "a second run": lambda w: w.hello(run=RUNS[2]),
    "a negative round": lambda w: w.round(-1),
    "a round after the last": lambda w: w.round(ROUNDS),
    "a round beyond numbers": lambda w: w.round(10**30),
    "a client of another site": lambda w: w.round(1, clients=[1, 2]),
    "a client of nobody": lambda w: w.round(1, clients=[2, 99]),
    "a negative client": lambda w: w.round(1, clients=[-1]),
    "a huge client": lambda w: w.round(1, clients=[2**80]),
    "a client twice": lambda w: w.round(1, clients=[2, 2]),
    "out of order": lambda w: w.round(1, clients=[3, 2]),
    "clients that are truths": lambda w: w.round(1, clients=[True]),
    "clients that are fractions": lambda w: w.round(1, clients=[2.0]),
    "clients in words": lambda w: w.round(1, clients=["2"]),
    "clients in a table": lambda w: w.round(1, clients={"2": 1}),
    "no clients": lambda w: w.message("round", 1, {"counted": -1}),
    "no count": lambda w: w.message("round", 1, {"clients": OWN}),
    "a true count": lambda w: w.round(1, counted=True),
    "a count in words": lambda w: w.round(1, counted="0"),
    "a count of now": lambda w: w.round(1, counted=1),
    "a count below all": lambda w: w.round(1, counted=-2),
    "a count of a round never answered": lambda w: w.round(3, counted=2),
    "another cohort": lambda w: w.round(0, clients=[2]),
    "another cohort, empty": lambda w: w.round(0, clients=[]),
    "keys": lambda w: w.message("keys", 0, {"setup": "s", "sessions": 3}),
    "shares": lambda w: w.message("shares", 0, {"setup": "s", "advertisements": {}}),
    "unmask": lambda w: w.message("unmask", 0, {"setup": "s", "session": 0, "survivors": []}),
    "no arrays": lambda w: w.round(1, arrays={}),
    "more arrays": lambda w: w.round(1, arrays={**w.round(1).arrays, "x": np.zeros(1)}),
    "other names": lambda w: w.round(1, arrays={"sum/w": np.zeros(3)}),
    "other types": lambda w: w.round(
        1, arrays={k: v.astype(np.float64) for k, v in w.round(1).arrays.items()}
    ),
    "other shapes": lambda w: w.round(
        1, arrays={k: v.reshape(1, *v.shape) for k, v in w.round(1).arrays.items()}
    ),
    "an early end that lies": lambda w: w.message("finish", -1, {"counted": 3}),
    "an end without a count": lambda w: w.message("finish"),
}


def test_hostile_questions_are_refused_and_leave_no_trace(world):
    first = expect(world.send(world.round(0)), "round")
    before = world.disk()
    for name, make in HOSTILE.items():
        message = make(world)
        answer = refused(world.send(message))
        if -1 <= message.round < 2**31:  # another head is not read, and so not repeated
            repeated = (answer.run, answer.round, answer.nonce)
            assert repeated == (message.run, message.round, message.nonce), name
        assert world.disk() == before, name
        assert same(first, world.send(world.round(0))), name
    assert same(first, (world.open(), world.send(world.round(0)))[1])
    expect(world.send(world.round(1, counted=0)), "round")


def test_only_the_coordinators_signature_opens_a_site(world):
    before = world.disk()
    stranger = Ed25519PrivateKey.generate()
    for key in (stranger, world.keys.sites["south"], world.keys.sites["north"]):
        refused(world.send(world.round(0), key), "signature")
        hello = world.hello(run=RUNS[2])
        refused(world.send(hello, key), "signature")
    envelope = sign(world.round(0), world.keys.coordinator)
    for forged in (
        replace(envelope, signature=b""),
        replace(envelope, header=envelope.header.replace(b'"round": 0', b'"round": 1')),
        replace(envelope, header=b"garbage"),
        replace(envelope, header=b"[" * 10**5),
        Envelope(b"", b""),
    ):
        refused(world.read(world.site.answer(forged)))
    assert world.disk() == before


def test_a_site_that_never_joined_answers_nothing_but_a_hello(tmp_path):
    world = World(tmp_path)
    refused(world.send(world.round(0)), "never joined")
    refused(world.send(world.message("finish", body={"counted": -1})), "never joined")
    (tmp_path / "north" / RUNS[1]).mkdir(parents=True)
    refused(world.send(world.round(0)), "never joined")


@pytest.mark.parametrize("noise", ["gaussian", "local"])
def test_a_round_has_one_answer_however_often_and_whoever_asks(tmp_path, noise):
    """Without a seed: coins are new in every process, the contribution and its noise are not."""
    privacy = Privacy(noise_multiplier=1.0, noise=noise)
    world = World(tmp_path, replace(PLAN, simulation_seed=None, privacy=privacy)).join()
    first = expect(world.send(world.round(0)), "round")
    for _ in range(3):
        assert same(first, world.send(world.round(0)))
        world.open()
    world.shared = {k: v + 1 for k, v in world.shared.items()}
    refused(world.send(world.round(0)), "another request")
    refused(world.send(world.round(0, clients=[2, 3])), "another request")


def another(world):
    return {k: v + 1 for k, v in world.shared.items()}


def test_an_answer_that_was_thrown_away_is_not_given_anew(world):
    """The end of a run, which leaves the answer out, must not open its round again."""
    expect(world.send(world.round(1)), "round")
    expect(world.send(world.message("finish", body={"counted": -1})), "finish")
    world.shared = another(world)
    for _ in range(2):
        refused(world.send(world.round(1)), "answered once")
        refused(world.send(world.round(0)), "after round 2")  # words count from 1
        world.open()
    expect(world.send(world.round(2)), "round")


def full(*_):
    raise OSError(28, "No space left on device", "/secret/place")


def test_a_round_whose_state_cannot_be_kept_does_not_open_the_one_before(world, monkeypatch):
    """Nothing left the site, so the round is still to be answered; the one before is not."""
    expect(world.send(world.round(1)), "round")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "stage", full)
        expect(world.send(world.round(2)), "failed", "OSError")
    world.shared = another(world)
    refused(world.send(world.round(1)), "answered once")
    expect(world.send(world.round(2)), "round")


def test_work_that_fails_is_an_answer_of_zeros(world, monkeypatch):
    """As from a site with nobody drawn: others must not see from a gap that its clients were.

    No word of it leaves the site, and clients keep the state that they had.
    """
    expect(world.send(world.round(1)), "round")
    expect(world.send(world.round(2, counted=1, clients=[])), "round")
    before = personal(world)
    with monkeypatch.context() as patch:
        patch.setattr(PMTL, "local_update", lambda *_: 1 / 0)
        failed = expect(world.send(world.round(3, counted=2)), "round")
    assert failed.body == {}
    assert failed.arrays and all(not array.any() for array in failed.arrays.values())
    for _ in range(2):  # it is not computed anew, though it would succeed now
        assert same(failed, world.send(world.round(3, counted=2)))
        world.open()
    shared, world.shared = world.shared, another(world)
    refused(world.send(world.round(3, counted=2)), "another request")
    refused(world.send(world.round(1)))
    world.shared = shared
    expect(world.send(world.round(4, counted=3, clients=[])), "round")
    after = personal(world)
    assert all(torch.equal(before[name], after[name]) for name in before)
    lines = (world.folder / "north" / "errors.log").read_text().splitlines()
    assert sorted(lines) == [
        f"round 4: client {client}: ZeroDivisionError: division by zero" for client in OWN
    ]


def ask_once(world):
    return world.send(world.round(0))


def broken(client, update=PMTL.local_update):
    """Return a local update that raises for one client, alone or stacked."""

    def fail(self, shared, personal, clients, *rest):
        if client in clients.ids:
            raise MemoryError(f"{int(clients.counts.max())} rows")
        return update(self, shared, personal, clients, *rest)

    return fail


@pytest.mark.parametrize("noise", ["gaussian", "local"])
def test_one_client_silences_nobody_else(tmp_path, monkeypatch, noise):
    """A client whose rows break the computation moves the sum by its own contribution alone.

    Where clients add noise, it adds its own to zeros: the sum has all the noise that is stated.
    """
    plan = replace(PLAN, privacy=Privacy(noise_multiplier=1.0, noise=noise))
    whole = expect(ask_once(World(tmp_path / "a", plan).join()), "round")
    monkeypatch.setattr(PMTL, "local_update", broken(3))
    partly = World(tmp_path / "b", plan).join()
    answer = expect(ask_once(partly), "round")
    assert answer.body == whole.body == {}
    (mechanism, *_), shared = partly.mechanisms, partly.shared
    state = RoundState(PMTL(), mechanism, shared, Rng.seeded(4), 0, 4)
    ids = np.array([3], dtype=np.int64)
    own = PMTL().init_client_state(shared, DATA.spec, 1)
    monkeypatch.undo()
    with_rows = client_half(state, own, DATA.clients(ids)).part.total
    without = no_contribution(state, own, DATA.clients(ids)).part.total
    for name, array in whole.arrays.items():
        moved = array - answer.arrays[name]
        leaf = name.removeprefix(SUM)
        np.testing.assert_array_equal(moved, (with_rows[leaf] - without[leaf]).numpy())
    assert (noise == "local") == any(leaf.any() for leaf in without.values())


def test_at_the_deadline_a_site_answers_with_the_clients_that_are_done(tmp_path, monkeypatch):
    """Clients with few rows come first; the others contribute zeros and keep their state."""
    world = World(tmp_path).join()
    clock = iter([0.0, 1.0, 2.0, 1e9, 1e9])  # the start, then before each client
    monkeypatch.setattr(site_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(Speed, "clients", lambda *_: 1)
    answer = expect(world.send(world.round(0)), "round")
    monkeypatch.undo()
    counts = np.diff(DATA.offsets)[OWN]
    *done, late = np.array(OWN)[np.argsort(counts, kind="stable")]
    alone = World(tmp_path / "alone").join()
    expected = expect(alone.send(alone.round(0, clients=sorted(int(one) for one in done))), "round")
    assert answer.body == {}
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(array, answer.arrays[name])
    (line,) = (tmp_path / "north" / "errors.log").read_text().splitlines()
    assert line == "round 1: no time for 1 clients" and late in OWN


def test_rounds_are_never_rolled_back(world):
    expect(world.send(world.round(0)), "round")
    expect(world.send(world.round(2, counted=0)), "round")
    for number in (0, 1):
        refused(world.send(world.round(number)))
        refused(world.send(world.round(number, counted=number - 1)))
    refused(world.send(world.round(3, counted=-1)), "counted last")
    refused(world.send(world.round(3, counted=1)), "counted last")
    expect(world.send(world.round(3, counted=2)), "round")


@pytest.mark.parametrize("permitted", [1, 2])
def test_runs_are_limited_also_over_restarts(tmp_path, permitted):
    world = World(tmp_path, runs=permitted)
    for number in range(4):
        world.run = RUNS[number]
        answer = world.send(world.hello())
        if number < permitted:
            expect(answer, "handshake")
            expect(world.send(world.round(0)), "round")
        else:
            refused(answer, f"permits {permitted}")
            refused(world.send(world.round(0)), "never joined")
        world.open()
    world.run = RUNS[0]
    world.join()  # the one that it is in goes on


def test_a_run_is_not_taken_over_by_another_plan(world):
    other = Agreement(replace(PLAN, rounds=9), FEDERATION)
    world.site = replace(world.site, agreement=other)
    refused(world.send(world.round(0)), "under another plan")
    refused(world.send(world.hello()), "another plan")


@pytest.mark.parametrize(
    "sampler,takes_all",
    [(Everyone(), True), (Poisson(), True), (Poisson(5.0), True), (Poisson(4.9), False),
     (FixedSize(5), True), (FixedSize(4), False)],
)  # fmt: skip
def test_where_the_plan_takes_all_a_site_answers_for_all(tmp_path, sampler, takes_all):
    """A coordinator that asks for one client alone would hold that client's contribution."""
    relation = "replace" if isinstance(sampler, FixedSize) else "zero_out"
    privacy = replace(PLAN.privacy, relation=relation)
    world = World(tmp_path, replace(PLAN, sampler=sampler, privacy=privacy)).join()
    before = world.disk()
    for number, some in enumerate(([], [2], [2, 4])):
        answer = world.send(world.round(number, clients=some))
        if takes_all:
            refused(answer, "the plan takes all")
            assert world.disk() == before
        else:
            expect(answer, "round")
    expect(world.send(world.round(3)), "round")


def numbers_of(world):
    """The personal state of the site's clients, as bytes that could be found on the disk."""
    state = world.site._run.store.take(np.array([0, 1, 2]), lambda n: {})
    return [leaf.numpy()[0].tobytes() for leaf in state.values() if leaf[0].abs().sum() > 0]


def test_personal_state_is_encrypted_with_the_sites_key(tmp_path):
    """Answers, restarts and commits are those of plain state; no number of it is on the disk."""
    worlds = []
    for name in ("plain", "encrypted"):
        key = StateCipher.of(KEYS.sites["north"]) if name == "encrypted" else None
        world = World(tmp_path / name, cipher=key).join()
        answers = [expect(world.send(world.round(0)), "round")]
        world.open()  # a restart: the staged state and the last answer are read again
        answers += [expect(world.send(world.round(0)), "round")]
        for number in (1, 2):
            answers += [expect(world.send(world.round(number, counted=number - 1)), "round")]
            world.open()
        worlds.append((world, answers))
    (plain, before), (sealed, after) = worlds
    for one, two in zip(before, after, strict=True):
        assert all(np.array_equal(one.arrays[n], two.arrays[n]) for n in one.arrays)
    secrets_found = {}
    for world in (plain, sealed):
        world.send(world.round(3, counted=2))  # commits the state of round 3
        known = [one for one in numbers_of(world) if len(one) >= 8]
        known += [a.tobytes() for a in world.send(world.round(3, counted=2)).arrays.values()]
        disk = b"".join(world.disk().values())
        secrets_found[world.folder.name] = sum(one in disk for one in known)
        assert len(known) >= 2
    assert secrets_found["plain"] >= 2 and secrets_found["encrypted"] == 0
    assert any(name.endswith("rows.sealed") for name in sealed.disk())


@pytest.mark.parametrize("other", [None, StateCipher.of(KEYS.sites["south"])])
def test_encrypted_state_is_not_read_with_another_setting(tmp_path, other):
    world = World(tmp_path, cipher=StateCipher.of(KEYS.sites["north"])).join()
    expect(world.send(world.round(0)), "round")
    expect(world.send(world.round(1, counted=0)), "round")
    world.settings["cipher"] = other
    world.open()
    before = world.disk()
    assert world.send(world.round(2, counted=1)).kind == "failed"
    errors = (tmp_path / "north" / "errors.log").read_text()
    assert "encrypted" in errors
    after = world.disk()
    assert {n: c for n, c in after.items() if "errors" not in n} == {
        n: c for n, c in before.items() if "errors" not in n
    }


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c[:20] + b"x" + c[21:], lambda c: b""]
)
def test_changed_ciphertext_is_found(change):
    cipher = StateCipher.of(KEYS.sites["north"])
    content = cipher.encrypt("rows.sealed", b"state" * 10)
    assert cipher.decrypt("rows.sealed", content) == b"state" * 10
    assert content != cipher.encrypt("rows.sealed", b"state" * 10)
    for name, given in (("rows.sealed", change(content)), ("answer.npz", content)):
        with pytest.raises(ValueError, match="not encrypted with this site's signing key"):
            cipher.decrypt(name, given)


def test_a_public_schedule_is_enforced_by_the_site(tmp_path):
    """Five clients, two in a round: client 0 and 3, 1 and 4, 2, and again from the first."""
    noise = replace(PLAN.privacy, noise=BandedNoise())
    world = World(tmp_path, replace(PLAN, sampler=Cyclic(2), privacy=noise)).join()
    before = world.disk()
    for clients in ([], [2], [4], [2, 3], OWN):  # not yet, or not alone, or not in this round
        refused(world.send(world.round(0, clients=clients)), "whose turn")
    assert world.disk() == before
    expect(world.send(world.round(0, clients=[3])), "round")
    refused(world.send(world.round(1, counted=0, clients=[3])), "whose turn")
    expect(world.send(world.round(1, counted=0, clients=[4])), "round")
    expect(world.send(world.round(2, counted=1, clients=[2])), "round")
    expect(world.send(world.round(3, counted=2, clients=[3])), "round")
    refused(world.send(world.round(4, counted=3, clients=[3, 4])), "whose turn")


@pytest.mark.parametrize("noise", ["gaussian", "local"])
def test_a_seed_is_for_simulations_alone(tmp_path, noise):
    """Whoever knows the plan knows its seed, and takes the noise off: clients' own too."""
    site = World(tmp_path, runs=1).site
    earnest = replace(FEDERATION, simulation=False)
    privacy = Privacy(noise_multiplier=1.0, noise=noise)
    for seed in (0, 4):
        plan = replace(PLAN, privacy=privacy, simulation_seed=seed)
        replace(site, agreement=Agreement(plan, FEDERATION))
        with pytest.raises(ValueError, match=f"simulation_seed = {seed}: .*leave it out"):
            replace(site, agreement=Agreement(plan, earnest))
    replace(site, agreement=Agreement(replace(plan, simulation_seed=None), earnest))


def handshake(world, run):
    world.run = run
    return world.send(world.hello())


def test_a_run_that_never_asked_for_anything_is_no_run(tmp_path):
    """A handshake that was recorded and is played again must not use up what the site permits."""
    world = World(tmp_path)
    for run in RUNS[2:]:
        expect(handshake(world, run), "handshake")
        world.open()
    expect(handshake(world, RUNS[1]), "handshake")
    expect(world.send(world.round(0)), "round")


@pytest.mark.parametrize("permitted", [1, 2])
def test_runs_that_were_joined_early_are_limited_when_they_ask(tmp_path, permitted):
    """Joining many runs before the first asks gives no more answers than runs that are permitted.

    Of whatever plan, and over restarts.
    """
    world = World(tmp_path, runs=permitted)
    for run in RUNS:
        expect(handshake(world, run), "handshake")
    answers = []
    for run in RUNS:
        world.run = run
        answers.append(world.send(world.round(0)))
        world.open()
    assert [answer.kind for answer in answers].count("round") == permitted
    for answer in answers[permitted:]:
        refused(answer, f"permits {permitted}")
    other = Agreement(replace(PLAN, rounds=9), FEDERATION)
    world.site = replace(world.site, agreement=other)
    world.run = "f" * 16
    hello = world.message("handshake", body={"agreement": other.digest})
    refused(world.send(hello), f"permits {permitted}")
    world.open()
    world.run = RUNS[0]
    expect(world.send(world.round(1, counted=0)), "round")  # the one that it is in goes on


def test_a_run_whose_answer_was_zeros_is_a_run(tmp_path, monkeypatch):
    world = World(tmp_path).join()
    with monkeypatch.context() as patch:
        patch.setattr(PMTL, "local_update", lambda *_: 1 / 0)
        expect(world.send(world.round(0)), "round")
    refused(handshake(world, RUNS[2]), "permits 1")


NAMES = [
    "run1", "Real", "a/b", "..", ".", "", "x" * 300, "0" * 15, "0" * 17, "A" * 16, "0" * 15 + "g",
    "0" * 16 + "\n", "\uff10" * 16, "\u0663" * 16, "\u200b" + "0" * 15, "../" + "0" * 13,
]  # fmt: skip


def test_runs_are_named_by_sixteen_digits(tmp_path):
    world = World(tmp_path)
    for name in NAMES:
        refused(handshake(world, name))
        assert world.disk() == {}, name
    expect(handshake(world, "0123456789abcdef"), "handshake")


CANARY = 271828.25


def test_words_hold_nothing_of_the_rows(tmp_path, monkeypatch):
    """Neither what an error says, nor its line at the site, leaves the site."""
    features = DATA.features.clone()
    features[int(DATA.offsets[2])] = CANARY
    world = World(tmp_path)
    rows = rows_of(replace(DATA, features=features), world.federation, "north")
    world.site = replace(world.site, rows=rows)
    world.join()

    def quote(self, shared, personal, clients, *_):
        worst = float(clients.features.max())
        raise ValueError(f"cannot take the root of {worst}\nat row {worst:.0f} \ud800")

    monkeypatch.setattr(PMTL, "local_update", quote)
    monkeypatch.setattr(PMTL, "personalise", quote)
    failed, *seen = [
        world.site.answer(sign(message, world.keys.coordinator))
        for message in (
            world.round(0),
            world.message("finish", body={"counted": -1}),
            world.round(0, clients=[9]),
            world.message("steal"),
        )
    ]
    for envelope in seen:
        answer = world.read(envelope)
        assert answer.kind in ("failed", "refused") and not answer.arrays
        assert "271828" not in envelope.header.decode()
    assert world.read(seen[0]).body == {"reason": "ValueError"}
    assert world.read(failed).body == {}
    assert "271828" not in failed.header.decode()
    assert all(not array.any() for array in world.read(failed).arrays.values())
    lines = (tmp_path / "north" / "errors.log").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(OWN) + 1 and all("271828.25" in line for line in lines)


def test_a_full_disk_is_a_word(world, monkeypatch):
    monkeypatch.setattr(site_module, "write_atomically", full)
    monkeypatch.setattr(Path, "open", full)
    answer = expect(world.send(world.round(0)), "failed")
    assert answer.body == {"reason": "OSError"}


def test_broken_numbers_from_the_coordinator_are_no_crash(world):
    for number, value in enumerate((math.nan, math.inf, 1e38)):
        world.shared = {k: torch.full_like(v, value) for k, v in world.shared.items()}
        with np.errstate(all="ignore"):
            answer = world.send(world.round(number))
        assert answer.kind in ("round", "failed")
        assert all(np.isfinite(array).all() for array in answer.arrays.values())


class Killed(BaseException):
    """A kill: nothing that catches errors catches it."""


ACTS = [
    (site_module, "write_atomically"),
    (store_module, "write_atomically"),
    (Store, "stage"),
    (Store, "seal"),
    (Store, "put"),
    (Store, "flush"),
    (Store, "discard"),
]


def kill_at(patch, act, when):
    """Die at an act of writing, counted over all of them, before it or after it."""
    acts = {"count": 0}
    for owner, name in ACTS:
        original = getattr(owner, name)

        def die(*args, _original=original, **named):
            acts["count"] += 1
            is_it = acts["count"] == act
            if is_it and when == "before":
                raise Killed
            found = _original(*args, **named)
            if is_it and when == "after":
                raise Killed
            return found

        patch.setattr(owner, name, die)
    return acts


def personal(world):
    store = world.site._run.store
    started = store.started
    return {
        "started": started.clone(),
        **{name: leaf[started].clone() for name, leaf in store.leaves.items()},
    }


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


SCRIPT = [(0, -1, OWN), (1, 0, [2, 4]), (2, 1, [3]), (4, 1, OWN)]
"""Rounds, which answer counted last, who was drawn: round 2 did not count, round 3 was missed."""


def act_out(world, after=None):
    """Ask the rounds of the script, and give answers and state; a killed site is asked again."""
    answers, deaths = [], 0
    questions = [world.round(n, counted, ids) for n, counted, ids in SCRIPT]
    for message in [*questions, world.message("finish", body={"counted": 4})]:
        while True:
            try:
                answers.append(world.send(replace(message, nonce=secrets.token_hex(16))))
                break
            except Killed:
                deaths += 1
                world.open()
    return answers, personal(world), deaths


CIPHER = StateCipher.of(KEYS.sites["north"])


@pytest.mark.parametrize(
    ("method", "when", "cipher"),
    [
        (PMTL(), "before", None),
        (FedAvg(), "after", None),
        (PMTL(), "after", CIPHER),
        slow(PMTL(), "before", CIPHER),
    ],
    ids=["pmtl", "fedavg", "encrypted", "encrypted, before"],
)
def test_a_site_may_die_at_any_act_of_writing(tmp_path, monkeypatch, method, when, cipher):
    """Between two acts nothing is written: after one is before the next."""
    plan = replace(PLAN, method=method)
    answers, state, _ = act_out(World(tmp_path / "whole", plan, cipher=cipher).join())
    assert [answer.kind for answer in answers] == ["round"] * 4 + ["finish"]
    act, deaths = 0, 1
    while deaths:
        act += 1
        world = World(tmp_path / f"{when}{act}", plan, cipher=cipher).join()
        with monkeypatch.context() as patch:
            kill_at(patch, act, when)
            found, after, deaths = act_out(world)
        for one, two in zip(answers, found, strict=True):
            assert one.kind == two.kind and (one.kind == "finish" or same(one, two)), act
        assert state.keys() == after.keys()
        assert all(torch.equal(state[name], after[name]) for name in state), act
    assert act > 20, "the acts of a site were not found"


@pytest.mark.parametrize("when", ["before", "after"])
def test_without_a_seed_no_death_changes_an_answer_that_left(tmp_path, monkeypatch, when):
    plan = replace(PLAN, simulation_seed=None)
    for act in range(1, 12):
        world = World(tmp_path / f"{when}{act}", plan).join()
        with monkeypatch.context() as patch:
            kill_at(patch, act, when)
            try:
                world.send(world.round(0))
            except Killed:
                world.open()
        first = expect(world.send(world.round(0)), "round")
        assert same(first, world.send(world.round(0)))
        world.open()
        assert same(first, world.send(world.round(0)))


def write_number(patch, at, error):
    """Let one act of writing fail, counted over all of them: before it, as on a full disk."""
    count = [0]
    for owner in (site_module, store_module):
        original = owner.write_atomically

        def write(path, content, _original=original):
            count[0] += 1
            if count[0] == at:
                raise error
            _original(path, content)

        patch.setattr(owner, "write_atomically", write)
    return count


def left_of_round(world, messages, restarts):
    """Ask in turn, with a restart before some; give all sums of round 0 that left the site."""
    found = []
    for at, message in enumerate(messages):
        if at in restarts:
            world.open()
        try:
            answer = world.send(replace(message, nonce=secrets.token_hex(16)))
        except Killed:
            world.open()
            continue
        if answer.kind == "round" and message.round == 0:
            found.append(b"".join(answer.arrays[name].tobytes() for name in sorted(answer.arrays)))
    return found


@pytest.mark.parametrize("error", [OSError(28, "full"), Killed()], ids=["full disk", "kill"])
@pytest.mark.parametrize("restarts", [(3,), (1, 2, 3, 4), ()], ids=str)
def test_no_failed_write_lets_two_messages_of_a_round_leave(tmp_path, monkeypatch, error, restarts):
    """Clients' own noise is drawn anew with a new message: the second would tell more.

    The write of state.json fails, an answer leaves all the same, the site is restarted, and
    is asked for the round again because its answer did not count.
    """
    plan = replace(
        PLAN, simulation_seed=None, privacy=Privacy(noise_multiplier=1.0, noise=LocalNoise())
    )
    for at in range(1, 7):
        world = World(tmp_path / str(at), plan).join()
        ask, end = world.round(0), world.message("finish", body={"counted": -1})
        with monkeypatch.context() as patch:
            write_number(patch, at, error)
            found = left_of_round(world, [ask, ask, ask, end, ask, ask], restarts)
        assert len(set(found)) == 1, at


def test_what_could_not_be_noted_is_not_remembered(world, monkeypatch):
    """Else an answer leaves that a restart forgets: state is on disk before it is in memory."""
    with monkeypatch.context() as patch:
        original = site_module.write_atomically

        def write(path, content):
            if path.name == "state.json":
                full()
            original(path, content)

        patch.setattr(site_module, "write_atomically", write)
        for _ in range(3):
            expect(world.send(world.round(0)), "failed", "OSError")
        assert world.site._run.state["answered"] == -1
    expect(world.send(world.round(0)), "round")
    folder = world.folder / "north" / RUNS[1]
    assert json.loads((folder / "state.json").read_text())["answered"] == 0


def test_personal_state_is_that_of_the_rounds_that_counted(world, tmp_path):
    """Oracle: `client_half` over the rounds of the script that counted, by hand."""
    _, found, _ = act_out(world)
    method, rng, rows = PLAN.method, Rng.seeded(4), {}
    for number, ids in ((0, OWN), (1, [2, 4]), (4, OWN)):
        state = RoundState(method, world.mechanisms[number], world.shared, rng, number, 4)
        for client in ids:
            before = rows.get(client) or method.init_client_state(world.shared, DATA.spec, 1)
            rows[client] = client_half(state, before, DATA.clients(np.array([client]))).personal
    assert bool(found["started"].all())
    for name, leaf in found.items():
        if name != "started":
            expected = torch.cat([rows[client][name] for client in OWN])
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


def test_models_are_made_once_more_when_asked_once_more(tmp_path):
    made = []
    world = World(tmp_path, finished=lambda folder, models, shared: made.append(models)).join()
    expect(world.send(world.round(0)), "round")
    for _ in range(2):
        expect(world.send(world.message("finish", body={"counted": 0})), "finish")
        world.open()
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert all(len(leaf) == len(OWN) for leaf in made[0].values())


def test_the_state_of_a_site_names_no_numbers_of_rows(world):
    """state.json and run.json are read by people: they hold rounds and the agreement alone."""
    expect(world.send(world.round(0)), "round")
    folder = world.folder / "north" / RUNS[1]
    assert set(json.loads((folder / "state.json").read_text())) <= {
        "counted", "answered", "unmasked",
    }  # fmt: skip
    seen = json.loads((folder / "run.json").read_text())
    assert seen["agreement"] == world.site.agreement.digest and set(seen) <= {
        "agreement",
        "site",
        "guarantee",
    }


def test_what_is_expected_of_a_question_is_the_shared_tree():
    tree = {"a": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.float64)}
    assert expected_tree(tree) == {
        "shared/a": Expected("float32", (2, 3)),
        "shared/n": Expected("float64", ()),
    }


def test_lost_state_and_changed_rows_are_noticed(tmp_path):
    """Fresh state, or other rows, would pass for those that the run began with."""
    world = World(tmp_path).join()
    expect(world.send(world.round(0)), "round")
    expect(world.send(world.round(1, counted=0)), "round")
    shutil.rmtree(tmp_path / "north" / RUNS[1] / "personal")
    world.open()
    expect(world.send(world.round(2, counted=0)), "refused", "missing")
    other = World(tmp_path / "other").join()
    expect(other.send(other.round(0)), "round")
    other.open()
    changed = replace(ROWS, targets=ROWS.targets + 1)
    other.site.rows = changed
    expect(other.send(other.round(1, counted=0)), "refused", "rows")


# --- the budget register of the site --------------------------------------------------------------

SECRET = replace(PLAN, simulation_seed=None)
"""The same plan with secret noise."""


def held(world):
    return read_register(world.site.budget.path).entries


@pytest.fixture
def counting(tmp_path):
    budget = Budget(tmp_path / "register.json", lambda text: None)
    return World(tmp_path, SECRET, budget=budget, runs=3)


def test_a_run_is_entered_before_its_first_answer_leaves_and_once(counting, monkeypatch):
    counting.join()
    assert held(counting) == ()  # a handshake spends nothing

    def broken(*args):
        (entry,) = held(counting)
        assert entry.guarantee == counting.agreement.guarantee
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(site_module.SiteRun, "_compute", broken)
        expect(counting.send(counting.round(0)), "failed", "MemoryError")
    counting.open()
    for number in range(2):
        expect(counting.send(counting.round(number, counted=number - 1)), "round")
    (entry,) = held(counting)
    known = read_register(counting.site.budget.path)
    group = known.group([DATA.names[one] for one in OWN], "")
    assert known.groups[entry.fingerprint] == group
    assert entry.run == str(counting.site.folder / counting.run)


def test_runs_of_a_site_add_up_and_end_at_its_total(counting):
    """The coordinator learns that the site does not take part, and not what it spent before."""
    path, each = counting.site.budget.path, counting.agreement.guarantee.epsilon
    names = [DATA.names[one] for one in OWN]
    declare_total(path, (names, ""), 1.5 * each, "rows.csv")
    counting.join()
    expect(counting.send(counting.round(0)), "round")
    counting.run = RUNS[2]
    answer = expect(counting.send(counting.hello()), "refused", "the budget register of this site")
    assert "epsilon" not in answer.body["reason"] and not any(map(str.isdigit, str(answer.body)))
    assert (
        "the total declared for these clients" in (counting.site.folder / "errors.log").read_text()
    )
    assert not (counting.site.folder / RUNS[2]).exists() and len(held(counting)) == 1
    declare_total(path, (names, ""), 9 * each, "rows.csv")
    counting.join()
    declare_total(path, (names, ""), each, "rows.csv")  # after the handshake
    expect(counting.send(counting.round(0)), "refused", "the budget register of this site")
    assert len(held(counting)) == 1


def test_a_site_with_a_damaged_register_does_not_answer(counting):
    counting.site.budget.path.write_text("{")
    expect(counting.send(counting.hello()), "refused", "the budget register of this site")
    assert "damaged" in (counting.site.folder / "errors.log").read_text()


def test_simulated_runs_of_a_site_are_not_entered(tmp_path):
    budget = Budget(tmp_path / "register.json", lambda text: None)
    world = World(tmp_path, budget=budget).join()
    expect(world.send(world.round(0)), "round")
    assert not budget.path.exists()
