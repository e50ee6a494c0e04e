"""The two halves of a round: their order, the charge around them, and releases that fail."""

import inspect
import math
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import pytest
import torch

from coterie.core.rng import Rng
from coterie.data.synthetic import synthetic
from coterie.engine.rounds import RoundState, check_separate, client_half, server_half
from coterie.engine.simulate import simulate
from coterie.methods import base
from coterie.methods.mpmtl import MPMTL, framework
from coterie.methods.mtlsvm import MTLSVM
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.ledger import OverspentError

DATA = synthetic("mean", clients=4, rows=5, features=3, seed=0).data
PLAN = Plan(method=PMTL(), privacy=Privacy(epsilon=1.0), rounds=2, simulation_seed=1)


@pytest.fixture
def board(tmp_path):
    billboard = PLAN.open(DATA.spec, tmp_path)
    yield billboard
    billboard.ledger.close()


def half_of(release, ids=range(4)):
    shared = PMTL().init(DATA.spec, Rng.seeded(0))
    block = DATA.clients(np.array(ids, dtype=np.int64))
    personal = {name: leaf.expand(len(ids), *leaf.shape) for name, leaf in shared.items()}
    return client_half(
        RoundState(PMTL(), release.mechanism, shared, Rng.seeded(0), 0), personal, block
    )


@dataclass(frozen=True, kw_only=True)
class Traced(PMTL):
    """Records which functions of the library call its two halves."""

    def local_update(self, *args):
        CALLS.append(("client", callers()))
        return super().local_update(*args)

    def server_update(self, *args):
        CALLS.append(("server", callers()))
        return super().server_update(*args)


CALLS: list[tuple[str, list[str]]] = []


def callers():
    return [frame.function for frame in inspect.stack() if "/coterie/" in frame.filename]


def test_the_engine_calls_the_clients_half_and_then_the_servers_half():
    CALLS.clear()
    simulate(Plan(method=Traced(), privacy=Privacy(epsilon=1.0), rounds=2), DATA)
    calls = [(side, stack) for side, stack in CALLS if "_round" in stack]  # not the check before
    assert [side for side, _ in groupby(calls, lambda call: call[0])] == ["client", "server"] * 2
    for side, stack in calls:
        asked = stack[: stack.index("_round")]
        assert f"{side}_half" in asked and not {"client_half", "server_half"} - {f"{side}_half"} & {
            *asked
        }, stack


def test_the_charge_is_on_disk_before_the_clients_half_and_the_release_after_it(board, tmp_path):
    shared = PMTL().init(DATA.spec, Rng.seeded(0))
    with board.charged(0) as release:
        assert b'{"charge": 0}' in (tmp_path / "ledger.jsonl").read_bytes()
        release.add(half_of(release).part)
        assert board.next == 0 and not list((tmp_path / "posts").glob("*.npz"))
        moved, post = server_half(PMTL(), shared, release)
    assert board.next == 1 and post.index == 0
    assert all(torch.equal(moved[name], shared[name] + post.mean[name]) for name in shared)


def test_a_release_without_publish_stays_charged_and_is_made_again(board):
    with board.charged(0):
        pass
    assert board.ledger.charged == {0} and board.next == 0
    with pytest.raises(RuntimeError, match="client failed"), board.charged(0):
        raise RuntimeError("client failed")
    with board.charged(0) as release:
        release.publish()
    assert board.ledger.charged == {0} and board.next == 1


def test_a_release_is_published_once_and_never_after_its_block(board):
    with board.charged(0) as release:
        part = half_of(release).part
        release.publish()
        for use in (release.publish, lambda: release.add(part)):
            with pytest.raises(RuntimeError, match="closed"):
                use()
    with board.charged(1) as late:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        late.publish()


def test_releases_are_made_in_order_and_one_at_a_time(board):
    with pytest.raises(OverspentError, match="release 0 is next"), board.charged(1):
        pass
    with (
        board.charged(0) as release,
        pytest.raises(RuntimeError, match="already"),
        board.charged(0),
    ):
        pass
    with board.charged(0) as release:
        release.publish()
    with pytest.raises(OverspentError, match="never made twice"), board.charged(0):
        pass


def test_a_client_without_finite_update_contributes_zero_and_keeps_its_state(board):
    rows = DATA.features.clone()
    rows[DATA.offsets[2]] = math.nan
    shared = PMTL().init(DATA.spec, Rng.seeded(0))
    block = replace(DATA, features=rows).clients(np.arange(4))
    before = PMTL().init_client_state(shared, DATA.spec, 4)
    with board.charged(0) as release:
        state = RoundState(PMTL(), release.mechanism, shared, Rng.seeded(0), 0)
        half = client_half(state, before, block)
    assert half.zeroed.tolist() == [False, False, True, False]
    assert all(torch.equal(half.personal[name][2], before[name][2]) for name in before)


def failing_for(method, client, monkeypatch, name="local_update"):
    """Let a method raise whenever this client is among those that it is called with."""
    real = getattr(type(method), name)

    def fail(self, shared, personal, clients, *rest):
        if client in clients.ids and clients.counts[clients.ids == client] > 0:
            raise MemoryError("too many rows")
        return real(self, shared, personal, clients, *rest)

    monkeypatch.setattr(type(method), name, fail)


def broken_for(method, client, monkeypatch):
    """Let a method return a contribution of one client that is not a number, which counts as 0."""
    real = type(method).local_update

    def update(self, shared, personal, clients, *rest):
        after, rows = real(self, shared, personal, clients, *rest)
        for leaf in rows.values():
            leaf[clients.ids == client] = math.nan
        return after, rows

    monkeypatch.setattr(type(method), "local_update", update)


BINARY = synthetic("mean", clients=5, rows=(3, 8), features=3, task="binary", seed=1).data
REAL = synthetic("mean", clients=5, rows=(3, 8), features=3, seed=1).data


@pytest.mark.parametrize(
    ("method", "noise"),
    [
        (PMTL(), "gaussian"),
        (PMTL(), "local"),
        (PFEB(), "gaussian"),
        (MPMTL(), "gaussian"),
        (MTLSVM(), "gaussian"),
        (MTLSVM(), "local"),
    ],
    ids=str,
)
def test_a_client_that_fails_takes_no_other_with_it(method, noise, monkeypatch):
    """The releases are those of a run in which it contributes zeros, and others keep all."""
    data = BINARY if method.kind == "mtlsvm" else REAL
    privacy = Privacy(noise_multiplier=1.0, noise=noise)
    plan = Plan(method=method, privacy=privacy, rounds=2, simulation_seed=3)
    with monkeypatch.context() as patch:
        broken_for(method, 2, patch)
        zeros = simulate(plan, data)
    assert zeros.zeroed == 2 and not zeros.errors
    failing_for(method, 2, monkeypatch)
    failed = simulate(plan, data)
    assert failed.zeroed == 2
    assert failed.errors == ("client 2: MemoryError: too many rows",) * 2
    for mine, theirs in zip(failed.posts, zeros.posts, strict=True):
        for name, leaf in mine.value.items():
            torch.testing.assert_close(leaf, theirs.value[name], rtol=1e-6, atol=1e-6)


def test_a_client_without_a_model_of_its_own_gets_that_of_a_client_without_rows(monkeypatch):
    plan = Plan(method=PFEB(), privacy=Privacy(epsilon=1.0), rounds=1, simulation_seed=3)
    whole = simulate(plan, REAL)
    failing_for(plan.method, 2, monkeypatch, "personalise")
    found = simulate(plan, REAL)
    assert found.errors == ("client 2: MemoryError: too many rows",)
    for client in range(5):
        mine, theirs = found.model(client), whole.model(client)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine) == (client != 2)
    assert all(torch.isfinite(leaf).all() for leaf in found.model(2).values())


@dataclass(frozen=True, kw_only=True)
class Centred(PMTL):
    """Subtracts the mean over the stacked clients: it mixes them."""

    def local_update(self, shared, personal, clients, rng, round):
        after, rows = super().local_update(shared, personal, clients, rng, round)
        return after, {name: leaf - leaf.mean(dim=0) for name, leaf in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Remembering(PMTL):
    """Adds what it computed for the client before."""

    kept: list = field(default_factory=list)

    def local_update(self, shared, personal, clients, rng, round):
        after, rows = super().local_update(shared, personal, clients, rng, round)
        last = self.kept[-1] if self.kept else 0.0
        self.kept.append(float(rows["weight"].sum()))
        return after, {name: leaf + last for name, leaf in rows.items()}


Centred.kind, Remembering.kind = "centred", "remembering"


@pytest.mark.parametrize("method", [Centred(), Remembering()], ids=lambda one: one.kind)
def test_code_that_mixes_clients_is_refused_before_anything_is_charged(
    method, tmp_path, monkeypatch
):
    monkeypatch.setitem(base._ABOUT, "centred", base.About(stacked=True))
    plan = Plan(method=method, privacy=Privacy(epsilon=1.0), rounds=2)
    with pytest.raises(ValueError, match=f"{method.kind} mixes clients"):
        simulate(plan, DATA, folder=tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_stacked_method_is_called_alone_unless_its_author_vouches_for_it():
    """Called with one client, a mean over the stack is the client's own."""
    kinds = []

    def solve(information, clients):
        kinds.append(len(clients))
        pooled = torch.einsum("cnd,cn->cd", clients.x, clients.y * clients.mask)
        return pooled / clients.counts.sum()

    method = framework("pooling", lambda before, moment, radius: {"direction": moment[0]}, solve)
    simulate(Plan(method=method, privacy=Privacy(epsilon=1.0), rounds=2), DATA)
    assert set(kinds) == {1}


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_code_of_others_that_keeps_the_rule_passes(task):
    @dataclass(frozen=True, kw_only=True)
    class Mine(PMTL):
        """PMTL, as another package would have it."""

    check_separate(Mine(), synthetic("mean", clients=2, rows=3, features=3, task=task).data.spec)


def test_code_that_fails_on_any_rows_is_named_before_anything_is_charged(monkeypatch):
    class Mistaken(PMTL):
        """Has a mistake."""

        def local_update(self, *_):
            return 1 / 0

    with pytest.raises(ValueError, match="raised ZeroDivisionError on made-up rows"):
        simulate(Plan(method=Mistaken(), privacy=Privacy(epsilon=1.0), rounds=2), DATA)


def test_rows_beyond_the_public_number_are_not_used():
    """The run is that of the rows that are drawn, and equal for the same plan."""
    data = replace(PLAN.data, most_rows=3)
    plan = replace(PLAN, data=data)
    mine, theirs = simulate(plan, DATA), simulate(PLAN, DATA.at_most(3, data.split_seed))
    for one, other in zip(mine.posts, theirs.posts, strict=True):
        assert all(torch.equal(leaf, other.value[name]) for name, leaf in one.value.items())
    assert simulate(PLAN, DATA).posts[0].value["weight"].ne(mine.posts[0].value["weight"]).any()
