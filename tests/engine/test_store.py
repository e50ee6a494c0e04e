"""The store: rows by client, enrolled lazily, and a journal that survives death at any step."""

import itertools
import json
import os

import numpy as np
import pytest
import torch

from coterie.engine.store import Store, arrange, folder_of

CLIENTS = 6
TEMPLATE = {
    "w": torch.zeros(1, 2),
    "b": torch.zeros(1, dtype=torch.float64),
    "n": torch.zeros(1, 3, dtype=torch.int64),
}


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def rows(start, count):
    """Rows that tell whose they are."""
    mark = torch.arange(start, start + count)
    return {
        "w": torch.stack([mark.float(), -mark.float()], dim=1),
        "b": mark.double() / 3,
        "n": mark[:, None] + torch.tensor([0, 100, 200]),
    }


def newcomer(count):
    """What a client without a row gets."""
    return {name: leaf.expand(count, *leaf.shape[1:]).clone() for name, leaf in rows(-7, 1).items()}


def never(count):
    raise AssertionError("no client is new")


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def snapshot(store):
    """All rows that exist, by client."""
    return {
        int(client): {name: leaf[client].tolist() for name, leaf in store.leaves.items()}
        for client in np.flatnonzero(store.started.numpy())
    }


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return Store(TEMPLATE, CLIENTS, None if request.param == "memory" else tmp_path / "personal")


def test_a_new_store_has_no_rows_and_everyone_enrols(store):
    assert not store.started.any()
    asked = []

    def count_them(count):
        asked.append(count)
        return newcomer(count)

    assert same(store.take(ids(4, 1), count_them), newcomer(2))
    assert asked == [2]
    assert not store.started.any(), "taking a row must not write it"


def test_what_is_put_is_taken_back_in_any_order(store):
    store.put(ids(5, 0, 3), rows(10, 3))
    taken = store.take(ids(3, 5, 0), never)
    assert same(taken, {name: leaf[[2, 0, 1]] for name, leaf in rows(10, 3).items()})
    assert store.started.tolist() == [True, False, False, True, False, True]


def test_only_newcomers_enrol_and_only_their_rows_are_theirs(store):
    store.put(ids(2), rows(10, 1))
    asked = []

    def count_them(count):
        asked.append(count)
        return rows(50, count)

    taken = store.take(ids(1, 2, 4), count_them)
    assert asked == [2]
    assert taken["w"].tolist() == [[50, -50], [10, -10], [51, -51]]
    assert taken["n"][:, 0].tolist() == [50, 10, 51]


def test_rows_of_other_clients_are_untouched(store):
    store.put(ids(*range(CLIENTS)), rows(0, CLIENTS))
    before = snapshot(store)
    store.put(ids(1, 4), rows(90, 2))
    after = snapshot(store)
    assert {c: r for c, r in after.items() if c not in (1, 4)} == {
        c: r for c, r in before.items() if c not in (1, 4)
    }
    assert after[1]["w"] == [90, -90]


def test_taken_rows_are_copies(store):
    store.put(ids(0, 1), rows(10, 2))
    store.take(ids(0, 1), never)["w"].mul_(100)
    given = rows(20, 2)
    store.put(ids(2, 3), given)
    given["w"].mul_(100)
    assert store.leaves["w"][:4, 0].tolist() == [10, 11, 20, 21]


def test_nobody_is_a_fine_cohort(store):
    taken = store.take(ids(), never)
    assert {name: leaf.shape for name, leaf in taken.items()} == {
        "w": (0, 2), "b": (0,), "n": (0, 3)
    }  # fmt: skip
    store.put(ids(), taken)
    store.stage(ids(), taken)
    store.seal(0)
    store.commit()
    assert not store.started.any()


def test_a_round_is_stage_seal_commit(store):
    store.discard()
    store.stage(ids(0, 1), rows(10, 2))
    store.stage(ids(5), rows(30, 1))
    store.seal(0)
    store.commit()
    assert {client: row["w"][0] for client, row in snapshot(store).items()} == {0: 10, 1: 11, 5: 30}


def test_values_are_stored_in_the_types_of_the_template(store):
    wide = {name: leaf.double() for name, leaf in rows(3, 1).items()}
    store.put(ids(0), wide)
    assert same(store.take(ids(0), never), rows(3, 1))


def test_a_round_with_no_blocks_commits(tmp_path):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.discard()
    store.seal(4)
    store.commit()
    assert snapshot(store) == {}


def test_staged_rows_are_not_seen_before_commit(tmp_path):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.put(ids(0), rows(1, 1))
    store.stage(ids(0, 2), rows(50, 2))
    assert {client: row["w"][0] for client, row in snapshot(store).items()} == {0: 1}
    store.seal(0)
    assert {client: row["w"][0] for client, row in snapshot(store).items()} == {0: 1}
    store.commit()
    assert {client: row["w"][0] for client, row in snapshot(store).items()} == {0: 50, 2: 51}
    assert not (tmp_path / "journal").exists()


def test_disk_equals_memory_over_many_rounds(tmp_path):
    generator = np.random.default_rng(0)
    memory = Store(TEMPLATE, CLIENTS)
    for number in range(12):
        disk = Store(TEMPLATE, CLIENTS, tmp_path)  # a new process every round
        disk.recover(number)
        cohort = np.flatnonzero(generator.random(CLIENTS) < 0.4).astype(np.int64)
        for store in (memory, disk):
            store.discard()
            for block in np.array_split(cohort, 2):
                before = store.take(block, newcomer)
                store.stage(block, {name: leaf * 2 + 1 for name, leaf in before.items()})
            store.seal(number)
            store.commit()
        assert snapshot(memory) == snapshot(disk)
        assert torch.equal(memory.started, disk.started)
    assert snapshot(Store(TEMPLATE, CLIENTS, tmp_path)) == snapshot(memory)


def test_another_shape_type_or_number_of_clients_is_refused(tmp_path):
    Store(TEMPLATE, CLIENTS, tmp_path)
    for template, clients in (
        (TEMPLATE, CLIENTS + 1),
        ({**TEMPLATE, "w": torch.zeros(1, 3)}, CLIENTS),
        ({**TEMPLATE, "w": torch.zeros(1, 2, dtype=torch.float64)}, CLIENTS),
    ):
        with pytest.raises(ValueError, match="belongs to another plan"):
            Store(template, clients, tmp_path)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_leaf_called_started_works_or_is_refused_by_name(place, tmp_path):
    try:
        odd = Store({"started": torch.zeros(1, 2)}, 3, None if place == "memory" else tmp_path)
    except ValueError as error:
        assert "'started'" in str(error)
        return
    odd.put(ids(1), {"started": torch.ones(1, 2)})
    assert odd.started.tolist() == [False, True, False]
    assert odd.leaves["started"][1].tolist() == [1, 1]


# Death between any two steps of two rounds.


class Dead(BaseException):
    """The process ends here."""


def one_round(store, number, post, die_after):
    """The engine's round; `post` releases. Dies when so many steps are done."""
    steps = itertools.count(1)

    def step():
        if next(steps) == die_after:
            raise Dead

    store.discard()
    step()
    store.stage(ids(0, number + 1), _next(store, ids(0, number + 1)))
    step()
    store.stage(ids(5), _next(store, ids(5)))
    step()
    store.seal(number)
    step()
    post()
    step()
    store.commit()
    step()


def _next(store, who):
    before = store.take(who, newcomer)
    return {name: leaf + 10 for name, leaf in before.items()}


def run(folder, deaths):
    """Two rounds, dying at given steps, each time going on in a new store as the engine does."""
    released = 0
    deaths = iter(deaths)

    def post():
        nonlocal released
        released += 1

    while True:
        store = Store(TEMPLATE, CLIENTS, folder)
        store.recover(released)
        try:
            while released < 2:
                one_round(store, released, post, next(deaths, None))
        except Dead:
            del store
            continue
        return store


def test_death_between_any_two_steps_changes_nothing_in_the_end(tmp_path, monkeypatch):
    # The process dies here, not the machine: syncing to disk would only make this slow.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Store, "flush", lambda self: None)
    monkeypatch.setattr(np.memmap, "flush", lambda self: None)
    expected = snapshot(run(tmp_path / "calm", []))
    assert {client: row["n"][0] for client, row in expected.items()} == {0: 13, 1: 3, 2: 3, 5: 13}
    for case, deaths in enumerate(itertools.product(range(1, 7), range(1, 7), (None, 4))):
        folder = tmp_path / str(case)
        assert snapshot(run(folder, deaths)) == expected, deaths
        assert snapshot(Store(TEMPLATE, CLIENTS, folder)) == expected, deaths
        assert not (folder / "journal").exists()


@pytest.mark.parametrize("dies_at", range(1, 6))
def test_death_in_the_middle_of_commit_is_repaired(tmp_path, monkeypatch, dies_at):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.put(ids(0, 1), rows(1, 2))
    store.discard()
    for client in range(4):
        store.stage(ids(client), rows(50 + client, 1))
    store.seal(0)
    put, calls = Store.put, itertools.count(1)

    def dying(self, who, new):
        if next(calls) == dies_at:
            # Half a row is written when the process ends.
            self.leaves["w"][int(who[0])] = 12345.0
            raise Dead
        put(self, who, new)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", dying)
        if dies_at == 5:
            patch.setattr(Store, "flush", lambda self: (_ for _ in ()).throw(Dead()))
        with pytest.raises(Dead):
            store.commit()
    del store
    again = Store(TEMPLATE, CLIENTS, tmp_path)
    again.recover(1)
    assert {client: row["w"][0] for client, row in snapshot(again).items()} == {
        client: 50 + client for client in range(4)
    }
    assert same(again.take(ids(0, 1, 2, 3), never), rows(50, 4))


def test_death_in_the_middle_of_discard_leaves_no_seal(tmp_path, monkeypatch):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(0), rows(50, 1))
    store.seal(0)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *a, **k: (_ for _ in ()).throw(Dead()))
        with pytest.raises(Dead):
            store.discard()
    assert not (tmp_path / "journal" / "sealed.json").exists()
    again = Store(TEMPLATE, CLIENTS, tmp_path)
    again.recover(1)
    assert snapshot(again) == {}


@pytest.mark.parametrize(
    ("sealed", "released", "applied"), [(3, 4, True), (3, 3, False), (3, 5, False)]
)
def test_a_journal_is_applied_only_to_the_round_it_was_made_for(
    tmp_path, sealed, released, applied
):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(2), rows(50, 1))
    store.seal(sealed)
    again = Store(TEMPLATE, CLIENTS, tmp_path)
    again.recover(released)
    assert bool(again.started[2]) == applied
    assert not (tmp_path / "journal").exists()


def test_a_journal_without_a_seal_is_thrown_away(tmp_path):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(2), rows(50, 1))
    again = Store(TEMPLATE, CLIENTS, tmp_path)
    again.recover(1)
    assert snapshot(again) == {}


def test_a_failed_attempt_leaves_nothing_in_the_next(tmp_path):
    # A round that broke off staged client 2; redone, the cohort holds client 3 only.
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.discard()
    store.stage(ids(2), rows(50, 1))
    store.discard()
    store.stage(ids(3), rows(60, 1))
    store.seal(0)
    store.commit()
    assert {client: row["w"][0] for client, row in snapshot(store).items()} == {3: 60}


def test_a_stale_seal_never_covers_new_blocks(tmp_path):
    # The last run sealed round 0 and died; a careless next one stages without recovering first.
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(2), rows(50, 1))
    store.seal(0)
    careless = Store(TEMPLATE, CLIENTS, tmp_path)
    careless.stage(ids(4), rows(90, 1))
    again = Store(TEMPLATE, CLIENTS, tmp_path)
    again.recover(1)
    assert 4 not in snapshot(again), "blocks that were never sealed were applied"


def test_the_journal_is_synced_before_it_is_sealed(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    store = Store(TEMPLATE, CLIENTS, tmp_path)
    monkeypatch.setattr(os, "fsync", record)
    store.stage(ids(2), rows(50, 1))
    store.stage(ids(3), rows(60, 1))
    blocks = [str(tmp_path / "journal" / f"{number:06d}.npz") for number in range(2)]
    assert set(blocks) <= set(synced)
    store.seal(0)
    assert str(tmp_path / "journal" / "sealed.json.partial") in synced
    assert str(tmp_path / "journal") in synced
    # The journal's own name must last too: else the post is out and the rows are lost.
    assert str(tmp_path) in synced
    note = json.loads((tmp_path / "journal" / "sealed.json").read_text())
    assert note == {"round": 0, "blocks": 2}


def test_rows_are_flushed_before_the_journal_goes(tmp_path, monkeypatch):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(2), rows(50, 1))
    store.seal(0)
    order = []
    monkeypatch.setattr(Store, "flush", lambda self: order.append("flush"))
    discard = Store.discard

    def record(self):
        order.append("discard")
        discard(self)

    monkeypatch.setattr(Store, "discard", record)
    store.commit()
    assert order == ["flush", "discard"]


def test_recovering_a_store_in_memory_does_nothing():
    store = Store(TEMPLATE, CLIENTS)
    store.put(ids(1), rows(3, 1))
    store.recover(7)
    assert same(store.take(ids(1), never), rows(3, 1))


def test_committing_what_was_never_sealed_is_refused(tmp_path):
    store = Store(TEMPLATE, CLIENTS, tmp_path)
    store.stage(ids(2), rows(50, 1))
    with pytest.raises(FileNotFoundError):
        store.commit()
    assert snapshot(store) == {}


OFFSETS = np.array([0, 2, 2, 5, 6, 9, 10])
RAGGED = {"w": torch.zeros(1, 2), "dual": torch.zeros(1, 0, 3, dtype=torch.float64)}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_leaves_with_an_entry_per_row_are_ragged(tmp_path, kind):
    folder = tmp_path / "s" if kind == "disk" else None
    store = Store(RAGGED, 6, folder, per_row=("dual",), offsets=OFFSETS)
    start = lambda n: {"w": torch.ones(n, 2), "dual": torch.zeros(n, 0, 3)}  # noqa: E731
    fresh = store.take(ids(0, 1, 2), start)
    assert fresh["dual"].shape == (3, 3, 3) and not fresh["dual"].any()
    assert fresh["w"].tolist() == [[1, 1]] * 3
    padded = torch.arange(27.0).double().reshape(3, 3, 3) + 1
    store.stage(ids(2, 0, 1), {"w": torch.zeros(3, 2), "dual": padded})
    store.seal(0)
    store.commit()
    # Client 2 has three rows, client 0 two, client 1 none: what lies beyond is padding.
    again = store.take(ids(0, 1, 2, 3), start)["dual"]
    assert torch.equal(again[0, :2], padded[1, :2]) and not again[0, 2:].any()
    assert not again[1].any() and torch.equal(again[2], padded[0]) and not again[3].any()
    assert store.take(ids(0), never)["dual"].shape == (1, 2, 3)
    # Longer padding than anybody needs changes nobody.
    wide = torch.full((2, 7, 3), 5.0).double()
    store.put(ids(3, 5), {"w": torch.zeros(2, 2), "dual": wide})
    assert torch.equal(store.take(ids(2), never)["dual"], padded[:1])
    assert store.take(ids(3, 5), never)["dual"].tolist() == [[[5.0] * 3]] * 2
    if folder is not None:
        opened = Store(RAGGED, 6, folder, per_row=("dual",), offsets=OFFSETS)
        assert torch.equal(opened.take(ids(2), never)["dual"], padded[:1])
        with pytest.raises(ValueError, match="another plan"):
            Store(RAGGED, 6, folder, per_row=("dual",), offsets=OFFSETS * 2)


@pytest.mark.parametrize("ranges", [[range(0, 2), range(2, 5)], [range(5)]])
@pytest.mark.parametrize("released", [1, 2])
def test_a_journal_is_applied_before_rows_are_laid_out_for_other_ranks(tmp_path, ranges, released):
    """A rank was killed after its journal of round 1: the release of that round may be out."""

    def open_at(place, owned):
        return Store(rows(0, 1), len(owned), place, first=owned.start)

    before = [range(0, 3), range(3, 5)]
    for owned in before:
        old = open_at(folder_of(tmp_path / "personal", owned), owned)
        old.put(np.array(owned), rows(owned.start, len(owned)))
        old.flush()
        old.stage(np.array(owned)[-1:], rows(50 + owned.start, 1))
        old.seal(1)
    arrange(tmp_path / "personal", ranges, open_at, released)
    marks = {0: 0, 1: 1, 2: 50 if released == 2 else 2, 3: 3, 4: 53 if released == 2 else 4}
    for owned in ranges:
        place = tmp_path / "personal"
        found = open_at(place if len(ranges) == 1 else folder_of(place, owned), owned)
        for client in owned:
            assert same(found.take(ids(client), never), rows(marks[client], 1))
    assert not list(tmp_path.glob("personal.*"))
