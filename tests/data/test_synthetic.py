"""Generated data against what its truth implies."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from coterie.data.federated import DataError, Task
from coterie.data.synthetic import KINDS, ClientNames, Kind, Synthetic, synthetic


def rows_of(made: Synthetic, client: int) -> tuple[np.ndarray, np.ndarray]:
    rows = slice(made.data.offsets[client], made.data.offsets[client + 1])
    found = made.data.features
    dense = found[rows].numpy() if isinstance(found, torch.Tensor) else found[rows].toarray()
    return dense.astype(np.float64), made.data.targets[rows].numpy()


def fitted(made: Synthetic, client: int) -> np.ndarray:
    x, y = rows_of(made, client)
    model: np.ndarray = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    return model


def true_model(made: Synthetic, client: int) -> np.ndarray:
    weight, bias = made.truth["weight"][client, 0], made.truth["bias"][client]
    return torch.cat([weight, bias]).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit_rows", [False, True])
def test_least_squares_recovers_the_truth(kind: Kind, unit_rows: bool) -> None:
    made = synthetic(kind, clients=4, rows=(40, 60), features=6, noise=0.0, unit_rows=unit_rows)
    for client in range(4):
        np.testing.assert_allclose(fitted(made, client), true_model(made, client), atol=2e-4)


@pytest.mark.parametrize("unit_rows", [False, True])
def test_least_squares_recovers_the_truth_from_sparse_rows(unit_rows: bool) -> None:
    made = synthetic(
        clients=3, rows=200, features=12, noise=0.0, sparse=True, density=0.25, unit_rows=unit_rows
    )
    for client in range(3):
        np.testing.assert_allclose(fitted(made, client), true_model(made, client), atol=2e-4)


def test_noise_has_the_declared_size() -> None:
    made = synthetic(clients=2, rows=20_000, features=5, noise=0.7)
    for client in range(2):
        x, y = rows_of(made, client)
        model = true_model(made, client)
        misses = y - x @ model[:-1] - model[-1]
        assert abs(misses.std() - 0.7) < 0.7 * 5 / np.sqrt(2 * 20_000)
        assert np.abs(fitted(made, client) - model).max() < 0.7 * 6 / np.sqrt(20_000)


def test_mean_models_scatter_around_the_shared_one() -> None:
    made = synthetic(clients=5_000, rows=1, features=30, spread=0.2)
    away = made.truth["weight"] - made.shared["weight"]
    assert abs(float(away.square().sum(dim=(1, 2)).mean()) - 0.04) < 0.001
    assert float(away.mean(dim=0).abs().max()) < 6 * 0.2 / np.sqrt(30 * 5_000)
    norms = [synthetic(seed=seed, features=50).shared["weight"].norm() for seed in range(20)]
    assert 0.85 < float(torch.stack(norms).mean()) < 1.15


def test_spread_zero_gives_everyone_the_shared_model() -> None:
    made = synthetic(clients=5, spread=0.0)
    assert torch.equal(made.truth["weight"], made.shared["weight"].expand(5, 1, 10))
    assert torch.equal(made.truth["bias"], made.shared["bias"].expand(5, 1))


def test_low_rank_models_have_that_rank() -> None:
    made = synthetic("low_rank", clients=40, features=15, rank=3, task="multiclass", outputs=4)
    values = torch.linalg.svdvals(made.truth["weight"].reshape(-1, 15).double())
    assert values[2] > 0.1
    assert values[3] < 1e-5
    assert torch.linalg.matrix_rank(synthetic("low_rank").truth["weight"][:, 0], tol=1e-4) == 2


def test_group_sparse_models_share_their_features() -> None:
    made = synthetic("group_sparse", clients=40, features=15, active=4)
    used = made.truth["weight"][:, 0] != 0
    assert (used == used[0]).all()
    assert used[0].sum() == 4
    assert torch.equal(made.shared["weight"][0] != 0, used[0])
    assert (synthetic("group_sparse").truth["weight"] != 0).any(dim=0).sum() == 2


def test_clusters_sit_on_their_centres() -> None:
    made = synthetic("clusters", clients=31, centres=4, spread=0.0)
    assert made.cluster is not None
    assert made.shared["weight"].shape == (4, 1, 10)
    assert torch.equal(made.truth["weight"], made.shared["weight"][made.cluster])
    assert torch.equal(made.truth["bias"], made.shared["bias"][made.cluster])
    sizes = torch.bincount(made.cluster)
    assert sizes.max() - sizes.min() <= 1


def test_shift_scale_clients_differ_in_mean_and_variance() -> None:
    moved, plain = (
        np.stack([rows_of(made, client)[0] for client in range(50)])
        for made in (
            synthetic(kind, clients=50, rows=400, features=8) for kind in ("shift_scale", "mean")
        )
    )
    assert abs(moved.mean(axis=1).std() - 1) < 0.15
    assert abs(np.log(moved.std(axis=1)).std() - 0.5) < 0.08
    assert plain.mean(axis=1).std() < 0.07
    assert np.log(plain.std(axis=1)).std() < 0.05


@pytest.mark.parametrize(
    ("task", "outputs", "dtype"),
    [
        ("binary", 1, torch.float32),
        ("multiclass", 5, torch.int64),
        ("multilabel", 4, torch.float32),
    ],
)
def test_labels_follow_the_scores(task: Task, outputs: int, dtype: torch.dtype) -> None:
    made = synthetic(
        clients=6, rows=(5, 30), task=task, outputs=None if outputs == 1 else outputs, noise=0.0
    )
    assert made.data.spec.outputs == outputs
    assert made.data.targets.dtype == dtype
    for client in range(6):
        x, y = rows_of(made, client)
        weight = made.truth["weight"][client].double().numpy()
        scores = x @ weight.T + made.truth["bias"][client].numpy()
        if task == "multiclass":
            expected = scores.argmax(axis=1)
        else:
            expected = (scores > 0).squeeze(1) if outputs == 1 else scores > 0
        np.testing.assert_array_equal(y, expected)


def test_sparse_rows_have_the_density_and_distinct_columns() -> None:
    made = synthetic(
        clients=20, rows=(3, 9), features=103, sparse=True, density=0.07, task="multilabel"
    )
    rows: Any = made.data.features
    assert isinstance(rows, sparse.csr_matrix)
    assert rows.dtype == np.float32
    assert rows.has_canonical_format
    assert (np.diff(rows.indptr) == 7).all()
    assert len(np.unique(rows.indices)) > 80
    squares = np.asarray(rows.multiply(rows).sum(axis=1))
    assert abs(squares.mean() / 103 - 1) < 0.3


def test_one_column_can_be_sparse() -> None:
    made = synthetic(clients=2, rows=3, features=1, sparse=True, density=1.0)
    assert made.data.features.shape == (6, 1)


@pytest.mark.parametrize("sparsely", [False, True])
def test_unit_rows_have_norm_one(sparsely: bool) -> None:
    made = synthetic(clients=3, rows=10, unit_rows=True, sparse=sparsely)
    norms = [np.linalg.norm(rows_of(made, client)[0], axis=1) for client in range(3)]
    np.testing.assert_allclose(norms, 1, rtol=1e-6)


def test_ragged_rows_cover_the_range() -> None:
    counts = synthetic(clients=400, rows=(2, 5)).data.counts
    assert set(counts.tolist()) == {2, 3, 4, 5}
    assert set(synthetic(clients=5, rows=7).data.counts.tolist()) == {7}


def test_no_intercept_means_zero_bias() -> None:
    made = synthetic("clusters", intercept=False)
    assert not made.truth["bias"].any()
    assert not made.shared["bias"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_everything_follows_from_the_seed(kind: Kind) -> None:
    one, two, other = (synthetic(kind, clients=5, rows=(2, 6), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.data.features, two.data.features)
    assert torch.equal(one.data.targets, two.data.targets)
    assert torch.equal(one.truth["weight"], two.truth["weight"])
    assert not torch.equal(one.truth["weight"], other.truth["weight"])


def test_models_do_not_depend_on_the_rows() -> None:
    few, many = synthetic(rows=2), synthetic(rows=(5, 9), noise=0.0)
    assert torch.equal(few.truth["weight"], many.truth["weight"])
    assert torch.equal(few.truth["bias"], many.truth["bias"])


@pytest.mark.parametrize("options", [{"unit_rows": True, "kind": "shift_scale"}, {"sparse": True}])
def test_blocks_change_nothing(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = synthetic(clients=9, rows=(2, 6), **options)  # type: ignore[arg-type]
    monkeypatch.setattr("coterie.data.synthetic._BLOCK", 25)
    pieces = synthetic(clients=9, rows=(2, 6), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(whole.data.targets, pieces.data.targets)
    for client in range(9):
        np.testing.assert_allclose(rows_of(whole, client)[0], rows_of(pieces, client)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "median"}, "expected one of mean, low_rank"),
        ({"task": "ranking"}, "expected one of regression"),
        ({"outputs": 2}, "exactly 1"),
        ({"task": "multiclass", "outputs": 1}, "at least 2"),
        ({"clients": 0}, "1 or more"),
        ({"features": 0}, "1 or more"),
        ({"rows": 0}, "fewest, most"),
        ({"rows": (5, 2)}, "fewest, most"),
        ({"rows": (2, 3, 4)}, "fewest, most"),
        ({"spread": -1.0}, "0 or more"),
        ({"noise": float("nan")}, "0 or more"),
        ({"rank": 2}, "not an option of the kind 'mean'"),
        ({"kind": "low_rank", "rank": 11}, "1 to 10"),
        ({"kind": "clusters", "centres": 0}, "1 to 100"),
        ({"density": 0.1}, "sparse = True"),
        ({"sparse": True, "density": 1.5}, "at most 1"),
        ({"kind": "shift_scale", "sparse": True}, "dense rows"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        synthetic(**options)  # type: ignore[arg-type]


def test_client_names_behave_as_a_list_of_them() -> None:
    names, plain = ClientNames(12, "school "), [f"school {number}" for number in range(12)]
    assert list(names) == plain
    assert names == plain
    assert names == tuple(plain)
    assert names != plain[:-1]
    assert names != [*plain[:-1], "school 12"]
    assert names == ClientNames(12, "school ")
    assert names != ClientNames(12)
    assert names != "school 0"
    assert hash(names) == hash(tuple(plain))
    assert (names[-1], names[3:5], names[::-5]) == (
        plain[-1],
        tuple(plain[3:5]),
        ("school 11", "school 6", "school 1"),
    )
    assert names.index("school 7") == 7
    assert names.count("school 7") == 1
    assert "school 11" in names
    assert all(absent not in names for absent in ("school 12", "school 01", "school ", "11", 3))
    with pytest.raises(IndexError):
        names[12]
    assert pickle.loads(pickle.dumps(names)) == names


def test_many_clients_are_cheap() -> None:
    made = synthetic(clients=200_000, rows=2, features=4)
    assert made.data.names[199_999] == "client 199999"
    assert made.data.features.dtype == torch.float32
    assert made.truth["weight"].dtype == torch.float32
