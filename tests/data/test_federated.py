"""The container: padding never shows another client's row, splits keep every client's rows."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import sparse, stats
from tests.data.samples import LABELS, OWNERS, X, equal, refused

from coterie.data import federated
from coterie.data.federated import DataError, FederatedDataset, Spec, describe
from coterie.data.load import Source, from_arrays, load


def make(counts=(2, 0, 4, 1, 0), features=3):
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(offsets[-1])
    return FederatedDataset(
        Spec((features,), 1, "regression", len(counts)),
        [f"c{i}" for i in range(len(counts))],
        offsets,
        torch.arange(1.0, total * features + 1).reshape(total, features),
        torch.arange(1.0, total + 1),
    )


def rows_of(data, client):
    return data.features[data.offsets[client] : data.offsets[client + 1]]


@pytest.mark.parametrize("as_sparse", [False, True])
def test_padded_rows_are_the_clients_own_or_zero(as_sparse):
    data = make()
    kept = data
    if as_sparse:
        kept = FederatedDataset(
            data.spec,
            data.names,
            data.offsets,
            sparse.csr_matrix(data.features.numpy()),
            data.targets,
        )
    block = kept.clients(np.array([4, 2, 1, 0, 3]))
    for place, client in enumerate(block.ids.tolist()):
        own = rows_of(data, client)
        assert torch.equal(block.x[place, : len(own)], own)
        assert not block.x[place, len(own) :].any()
        assert not block.y[place, len(own) :].any()
        assert block.mask[place].sum() == len(own)


def test_a_neighbours_nan_does_not_reach_an_empty_client():
    data = make()
    data.features[2:] = math.nan
    data.targets[2:] = math.nan
    block = data.clients(np.arange(5))
    for client in (0, 1, 4):
        assert block.x[client].isfinite().all() and block.y[client].isfinite().all()


def test_padded_rows_of_a_block_are_bounded_by_a_public_number(monkeypatch):
    """However long one client is, it makes no block of others larger than the limit."""
    data = make((3, 900, 2, 4, 3, 1), features=5)
    monkeypatch.setattr(federated, "_PADDED", 45)
    blocks = [block.ids.tolist() for block in data.blocks(np.arange(6), 100)]
    assert blocks == [[5, 2, 0], [4, 3], [1]]
    assert [len(block) for block in data.blocks(np.arange(6), 2)] == [2, 2, 1, 1]


def test_blocks_cover_every_client_once_and_put_like_sizes_together():
    data = make((5, 1, 3, 2, 4))
    seen = [block.ids.tolist() for block in data.blocks(np.arange(5), 2)]
    assert sorted([i for block in seen for i in block]) == [0, 1, 2, 3, 4]
    assert [data.counts[i] for i in [i for block in seen for i in block]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("test", [1, 2, 0.25, 0.5, 0.99])
def test_split_is_inside_clients_and_leaves_a_training_row(test):
    data = make((2, 1, 4, 7, 0))
    train, held = data.split(test, seed=3)
    for client, count in enumerate(data.counts):
        both = torch.cat([rows_of(train, client), rows_of(held, client)])
        assert torch.equal(both.sort(dim=0).values, rows_of(data, client))
        assert count == 0 or train.counts[client] >= 1
        wanted = test if isinstance(test, int) else round(count * test)
        assert held.counts[client] == min(wanted, max(count - 1, 0))
    again, _ = data.split(test, seed=3)
    assert torch.equal(again.features, train.features)


@pytest.mark.parametrize("bad", [0, -1, 1.5, 1.0, math.nan])
def test_a_bad_split_is_refused(bad):
    refused("expected a share", make().split, bad, 0)


def test_the_parts_must_fit():
    data = make()
    with pytest.raises(DataError, match="do not fit"):
        FederatedDataset(data.spec, ["a"], data.offsets, data.features, data.targets)
    with pytest.raises(DataError, match="offsets end"):
        FederatedDataset(data.spec, data.names, data.offsets, data.features[:3], data.targets)
    refused("declares no split", data.split_by_source)


def test_parts_of_mapped_data_are_mapped_and_cleaned_up(tmp_path):
    """A split of rows that do not fit in memory must not bring them there."""
    import gc

    from coterie.data.config import Source
    from coterie.data.load import load

    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(50), 40)
    np.savez(
        tmp_path / "d.npz",
        X=generator.normal(size=(2000, 3)),
        y=generator.normal(size=2000),
        client=client,
    )
    plain = load(tmp_path / "d.npz")
    mapped = load(tmp_path / "d.npz", Source(memory_map=str(tmp_path / "map")))
    assert mapped.mapped is not None
    for one, two in zip(plain.split(0.25, 1), mapped.split(0.25, 1), strict=True):
        assert torch.equal(one.features, two.features) and torch.equal(one.targets, two.targets)
        assert one.fingerprint() == two.fingerprint()
    train, held = mapped.split(0.25, 1)
    assert len(list(tmp_path.glob("part-*"))) >= 2
    del train, held, one, two
    gc.collect()
    assert not list(tmp_path.glob("part-*"))


def test_a_fingerprint_notices_changes():
    data = make()
    before = data.fingerprint()
    assert make().fingerprint() == before
    data.targets[0] += 1
    assert data.fingerprint() != before


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("test", [0.25, 2])
def test_how_many_rows_a_client_has_does_not_decide_what_others_train_on(rows, test):
    """Else one client's data would reach the others' contributions past its own clip."""
    counts = np.array([9, 7, 12, 5])
    names = [f"c{k}" for k in range(4)]

    def made(counts):
        total = int(counts.sum())
        owner = np.repeat(np.arange(4), counts)
        place = np.concatenate([np.arange(n) for n in counts])
        features = torch.from_numpy(np.stack([owner, place], axis=1)).float()
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        spec = Spec(shape=(2,), outputs=1, task="regression", clients=4)
        return FederatedDataset(spec, names, offsets, features, torch.zeros(total))

    other = counts.copy()
    other[1] = rows
    for seed in range(5):
        for draw in (lambda d: d.split(test, seed)[0], lambda d: d.at_most(3, seed)):  # noqa: B023
            parts = [draw(made(n)).features.numpy() for n in (counts, other)]
            left, right = (part[part[:, 0] != 1] for part in parts)
            np.testing.assert_array_equal(left, right)


def test_numbers_are_those_of_the_clients() -> None:
    owner = np.repeat([0, 1, 2, 3], [1, 2, 3, 10])
    data = from_arrays(np.ones((16, 3)), np.arange(16) % 3, owner, split=np.arange(16) % 2)
    found = describe(data)
    counts = np.array([1, 2, 3, 10])
    assert (found["clients"], found["rows"], found["features"], found["shape"]) == (4, 16, 3, [3])
    assert (found["task"], found["outputs"], found["sparse"]) == ("multiclass", 3, False)
    spread = found["rows_per_client"]
    assert (spread["min"], spread["median"], spread["max"], spread["mean"]) == (1, 2.5, 10, 4)
    assert spread["sd"] == pytest.approx(counts.std())
    assert spread["skew"] == pytest.approx(stats.skew(counts))
    assert found["classes_per_client"] == {"min": 1, "median": 2.5, "max": 3}
    assert found["split"] == {"train": 8, "test": 8}
    assert json.loads(json.dumps(found)) == found


def test_equal_clients_regression_and_labels() -> None:
    found = describe(from_arrays(np.ones((4, 2)), np.ones(4), [0, 0, 1, 1]))
    assert found["rows_per_client"]["skew"] == 0
    assert "classes_per_client" not in found
    assert found["split"] is None
    labels = [[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    found = describe(from_arrays(np.ones((4, 2)), labels, [0, 0, 1, 1]))
    assert found["classes_per_client"] == {"min": 0, "median": 1, "max": 2}
    json.dumps(found, allow_nan=False)


def test_har_has_every_class_in_every_client(shared_data) -> None:
    found = describe(load(shared_data("har_lite/har_lite.npz")))
    assert found["classes_per_client"] == {"min": 6, "median": 6, "max": 6}
    assert found["split"] == {"train": 7715, "test": 2584}


@pytest.fixture(params=["dense", "sparse", "mapped"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> FederatedDataset:
    counts = [5, 0, 1, 9, 40]
    owner = np.repeat(np.arange(5), counts)
    x = np.stack([np.arange(1.0, 56.0), owner + 1], axis=1)
    made = request.param == "mapped"
    source = Source(
        sparse=request.param == "sparse", memory_map=str(tmp_path / "m") if made else None
    )
    names = [f"c{k}" for k in range(5)]
    return from_arrays(x, x[:, 0] / 2, owner, names=names, split=np.arange(55) % 2, source=source)


def numbers(data: FederatedDataset) -> list[int]:
    """The rows' own numbers, from 1."""
    return (data.targets * 2).int().tolist()


@pytest.mark.parametrize("rows", [1, 4, 9, 100])
def test_at_most_so_many_rows(data: FederatedDataset, rows: int) -> None:
    part = data.at_most(rows, seed=3)
    assert part.counts.tolist() == np.minimum(data.counts, rows).tolist()
    assert part.spec == data.spec
    kept = np.array(numbers(part))
    assert (np.diff(kept) > 0).all(), "rows keep their order"
    assert equal(part, data.where(np.isin(np.arange(1, 56), kept)))
    assert set(kept) <= set(numbers(data.at_most(rows + 1, seed=3)))
    assert numbers(data.at_most(rows, seed=3)) == kept.tolist()


def test_every_row_is_as_likely_and_the_random_stream_is_not_that_of_the_split() -> None:
    data = from_arrays(np.ones((2500, 1)), np.tile(np.arange(10) / 2, 250), np.arange(2500) // 10)
    hits = np.zeros(10)
    same = 0
    for seed in range(8):
        kept, held = (
            np.array(numbers(part)).reshape(250, 3)
            for part in (data.at_most(3, seed), data.split(3, seed)[1])
        )
        hits += np.bincount(kept.reshape(-1), minlength=10)
        same += int((kept == held).all(axis=1).sum())
    # 600 expected of each, standard deviation 20.5; 2000 / 120 = 17 alike by chance
    assert np.abs(hits - 600).max() < 4.5 * 20.5
    assert same < 40


def test_only_some_clients(data: FederatedDataset) -> None:
    part = data.only([3, 0, 1])
    assert list(part.names) == ["c3", "c0", "c1"]
    assert part.spec == replace(data.spec, clients=3)
    assert part.counts.tolist() == [9, 5, 0]
    assert numbers(part) == [*range(7, 16), *range(1, 6)]
    assert part.source_split is not None
    np.testing.assert_array_equal(part.source_split, (np.array(numbers(part)) - 1) % 2)
    block, whole = part.clients(np.array([0])), data.clients(np.array([3]))
    assert torch.equal(block.x, whole.x)
    assert torch.equal(block.y, whole.y)
    assert block.memory is not whole.memory
    assert equal(data.only(np.arange(5)), data)


def test_the_first_clients(data: FederatedDataset) -> None:
    assert equal(data.first(3), data.only([0, 1, 2]))
    assert data.first(5) is data
    assert numbers(data.first(4).at_most(3, 8)) == numbers(data.at_most(3, 8))[:7]
    both = [part.first(4) for part in data.split(0.3, seed=2)]
    for one, other in zip(both, data.first(4).split(0.3, seed=2), strict=True):
        assert equal(one, other)


def test_a_mapped_part_is_mapped_and_leaves_nothing(tmp_path: Path) -> None:
    source = Source(memory_map=str(tmp_path / "m"))
    data = from_arrays(X, LABELS / 2, OWNERS, source=source)
    part = data.only([1]).at_most(2, seed=0)
    assert part.features.shape == (2, 2)
    del part
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_sizes_and_clients_are_possible(data: FederatedDataset) -> None:
    ids: Any
    for ids in ([], [0, 0], [0.0], [True, False, True, True, True], [[0]]):
        refused("expected a list of numbers of clients, at least one", data.only, ids)
    for ids in ([5], [-1, 2]):
        refused("expected 0 to 4: there are 5 clients", data.only, ids)
    for clients in (0, 6):
        refused(f"clients = {clients}: expected 1 to 5", data.first, clients)
    refused("rows = 0: expected at least 1 row of each client", data.at_most, 0, seed=0)


def test_medians_that_fill_gaps_are_of_training_rows(tmp_path):
    """Held-out rows have no part in them: other values there change no training row."""
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(200, 3)), np.arange(200) % 7
    x[draw.random(x.shape) < 0.2] = np.nan
    split = (draw.random(200) < 0.3).astype(int)

    def parts(values):
        rows = {f"x{at}": column for at, column in enumerate(values.T)}
        frame = pa.table({"client": client, "y": np.arange(200.0), "split": split, **rows})
        return load(frame, missing="client-median", task="regression").split_by_source()

    train, test = parts(x)
    for at, name in enumerate(train.names):
        own = (client == int(name)) & (split == 0)
        medians = np.nanmedian(x[own], axis=0)
        np.testing.assert_allclose(train.scaling["fills"][at], medians, rtol=1e-5, atol=1e-6)
        for part, rows in ((train, own), (test, (client == int(name)) & (split == 1))):
            found = part.features[part.offsets[at] : part.offsets[at + 1]]
            wanted = np.where(np.isnan(x[rows]), medians, x[rows])
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    other, _ = parts(np.where(split[:, None] == 1, x + 5, x))
    assert torch.equal(other.features, train.features)
    again, held = train.split(0.5, seed=1)  # of training rows, such as validation rows
    assert not np.array_equal(again.scaling["fills"], train.scaling["fills"])
    assert np.array_equal(held.scaling["fills"], again.scaling["fills"])
