"""The two halves of a round: their order, the charge around them, and releases that fail."""

import inspect
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from coterie.core.rng import Rng
from coterie.data.synthetic import synthetic
from coterie.engine.rounds import RoundState, client_half, server_half
from coterie.engine.simulate import simulate
from coterie.methods.pmtl import PMTL
from coterie.plan.plan import Plan, Privacy
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
    assert [side for side, _ in CALLS] == ["client", "server"] * 2
    for side, stack in CALLS:
        assert stack[:2] == [f"{side}_half", "_round"], stack


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
