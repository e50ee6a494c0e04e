"""Scaling inside clients and by declared constants."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.preprocessing import StandardScaler

from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.scaling import apply_constants, standardise_clients
from coterie.data.synthetic import synthetic


def dataset(
    parts: list[np.ndarray], *, sparsely: bool = False, shape: tuple[int, ...] | None = None
) -> FederatedDataset:
    rows = np.concatenate(parts).astype(np.float32)
    shape = rows.shape[1:] if shape is None else shape
    dense = torch.from_numpy(rows).reshape(-1, *shape)
    return FederatedDataset(
        spec=Spec(shape=shape, outputs=1, task="regression", clients=len(parts)),
        names=tuple(f"client {number}" for number in range(len(parts))),
        offsets=np.cumsum([0, *(len(part) for part in parts)]),
        features=sparse.csr_matrix(rows) if sparsely else dense,
        targets=torch.arange(len(rows), dtype=torch.float32),
    )


def client_rows(data: FederatedDataset | None, client: int) -> np.ndarray:
    assert data is not None
    rows: Any = data.features[data.offsets[client] : data.offsets[client + 1]]
    found: np.ndarray = rows.numpy() if isinstance(rows, torch.Tensor) else rows.toarray()
    return found


def ragged(seed: int, counts: tuple[int, ...], features: int = 5) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    parts = [generator.normal(3, 20, (count, features)) for count in counts]
    for part in parts:
        part[generator.random(part.shape) < 0.4] = 0
        part[:, 2] = 0.1
    return parts


@pytest.mark.parametrize("sparsely", [False, True])
def test_agrees_with_one_scikit_learn_scaler_a_client(sparsely: bool) -> None:
    parts, later = ragged(0, (4, 9, 2, 30)), ragged(1, (3, 1, 5, 2))
    train, test = standardise_clients(
        dataset(parts, sparsely=sparsely), dataset(later, sparsely=sparsely)
    )
    for client, part in enumerate(parts):
        scaler = StandardScaler(with_mean=not sparsely).fit(part.astype(np.float32).astype(float))
        for scaled, rows in ((train, part), (test, later[client])):
            expected = np.clip(scaler.transform(rows), -15, 15)
            # scikit-learn leaves columns that do not vary in their own units.
            expected[:, np.ptp(part, axis=0) == 0] = 0
            np.testing.assert_allclose(client_rows(scaled, client), expected, rtol=1e-4, atol=1e-6)


def test_columns_without_variation_in_training_are_zero_in_all_rows() -> None:
    parts = [np.array([[5.0, -3.0]]), np.empty((0, 2)), np.array([[1.0, 2.0], [3.0, 2.0]])]
    later = [np.array([[7.0, -4.0]]), np.array([[8.0, 9.0]]), np.empty((0, 2))]
    train, test = standardise_clients(dataset(parts), dataset(later))
    np.testing.assert_array_equal(client_rows(train, 0), [[0, 0]])
    np.testing.assert_array_equal(client_rows(test, 0), [[0, 0]])
    np.testing.assert_array_equal(client_rows(test, 1), [[0, 0]])
    np.testing.assert_array_equal(client_rows(train, 2), [[-1, 0], [1, 0]])


def test_sparse_columns_without_variation_in_training_are_zero_too() -> None:
    train, test = standardise_clients(
        dataset([np.array([[2.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 0.0]])], sparsely=True),
        dataset([np.array([[3.0, 4.0]]), np.array([[5.0, 6.0]])], sparsely=True),
    )
    np.testing.assert_array_equal(client_rows(train, 0), [[2, 0], [0, 0]])
    np.testing.assert_array_equal(client_rows(test, 0), [[3, 0]])
    np.testing.assert_array_equal(client_rows(test, 1), [[0, 0]])
    assert test is not None
    assert test.features.nnz == 1
    same = dataset([np.array([[2.0, 7.0], [0.0, 7.0]])], sparsely=True)
    np.testing.assert_array_equal(client_rows(standardise_clients(same)[0], 0), [[2, 0], [0, 0]])


@pytest.mark.parametrize("sparsely", [False, True])
def test_what_is_scaled_is_cut_at_the_limit_of_the_contract(sparsely: bool) -> None:
    parts = [np.array([[0.0], [1e-3]]), np.zeros((300, 1))]
    parts[1][7] = 5.0  # 17 deviations from the mean
    later = [np.array([[2500.0], [-3e38]]), np.array([[5.0]])]
    train, test = standardise_clients(
        dataset(parts, sparsely=sparsely), dataset(later, sparsely=sparsely)
    )
    np.testing.assert_array_equal(client_rows(test, 0), [[15], [-15]])
    assert abs(client_rows(train, 0)).max() == (2 if sparsely else 1)
    assert client_rows(train, 1)[7] == client_rows(test, 1) == 15, "alike in training and later"


def test_shared_weights_survive_a_column_that_starts_to_vary_in_test_rows() -> None:
    """A column is 2000 in most clients' training rows, and 2500 in a test row: no weight of 500."""
    rng = np.random.default_rng(0)
    parts, later = ([rng.normal(size=(9, 2)) for _ in range(20)] for _ in range(2))
    for part, rows in zip(parts, later, strict=True):
        part[:, 1], rows[:, 1] = 2000, 2000 + 500 * rows[:, 1]
    parts[3][:, 1] += 500 * rng.normal(size=9)
    _, test = standardise_clients(dataset(parts), dataset(later))
    assert test is not None
    one = np.array([1.0, 1.0])  # shared by all, as if learnt from the client that varies
    sizes = [abs(client_rows(test, client) @ one).max() for client in range(20)]
    alone = [abs(client_rows(test, client)[:, 0]).max() for client in range(20)]
    assert [s for k, s in enumerate(sizes) if k != 3] == [s for k, s in enumerate(alone) if k != 3]
    assert max(sizes) < 15


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    changed=st.integers(0, 5),
    new_rows=st.integers(1, 9),
    sparsely=st.booleans(),
)
def test_other_clients_rows_never_matter(
    seed: int, counts: list[int], changed: int, new_rows: int, sparsely: bool
) -> None:
    changed %= len(counts)
    parts, later = ragged(seed, tuple(counts)), ragged(seed + 1, tuple(counts))
    other_parts, other_later = list(parts), list(later)
    other_parts[changed] = 1e6 * ragged(seed + 2, (new_rows,))[0]
    other_later[changed] = -ragged(seed + 3, (new_rows,))[0]
    before = standardise_clients(
        dataset(parts, sparsely=sparsely), dataset(later, sparsely=sparsely)
    )
    after = standardise_clients(
        dataset(other_parts, sparsely=sparsely), dataset(other_later, sparsely=sparsely)
    )
    for old, new in zip(before, after, strict=True):
        for client in set(range(len(counts))) - {changed}:
            np.testing.assert_array_equal(client_rows(old, client), client_rows(new, client))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(ragged(2, (4, 0, 7, 1, 12, 3, 0)))
    whole, _ = standardise_clients(data)
    fixed = apply_constants(data, 1.0, 2.0)
    monkeypatch.setattr("coterie.data.scaling._BLOCK", 10)
    assert torch.equal(whole.features, standardise_clients(data)[0].features)
    assert torch.equal(fixed.features, apply_constants(data, 1.0, 2.0).features)


def test_rows_keep_their_shape_and_inputs_stay_untouched() -> None:
    data = dataset(ragged(3, (4, 5), features=6), shape=(2, 3))
    copy = data.features.clone()
    scaled, nothing = standardise_clients(data)
    assert nothing is None
    assert scaled.features.shape == (9, 2, 3)
    assert torch.equal(data.features, copy)
    expected = "features centred and scaled by each client's own training rows, cut at +-15"
    assert scaled.notes[-1] == expected
    assert torch.equal(scaled.targets, data.targets)


def test_large_offsets_do_not_cost_precision() -> None:
    part = np.array([[16_777_210.0], [16_777_212.0], [16_777_214.0]])
    scaled, _ = standardise_clients(dataset([part]))
    expected = np.array([[-1], [0], [1]]) * np.sqrt(1.5)
    np.testing.assert_allclose(client_rows(scaled, 0), expected, rtol=1e-6)


def test_strangers_are_refused() -> None:
    data = dataset(ragged(0, (4, 5)))
    for other in (
        dataset(ragged(0, (4, 5, 6))),
        dataset(ragged(0, (4, 5), features=4)),
        dataset(ragged(0, (4, 5)), sparsely=True),
        replace(data, names=("client 0", "client 2")),
    ):
        with pytest.raises(DataError, match="do not belong together"):
            standardise_clients(data, other)


def test_constants_are_applied_and_cut() -> None:
    data = dataset([np.array([[1.0, 50.0], [9.0, -1000.0]])])
    scaled = apply_constants(data, [1, 40], [4, 20], clip=3, target_center=10, target_scale=2)
    np.testing.assert_array_equal(client_rows(scaled, 0), [[0, 0.5], [2, -3]])
    np.testing.assert_array_equal(scaled.targets, [-5, -4.5])
    assert scaled.notes == (
        "features scaled by declared constants, cut at +-3; target (y - 10) / 2",
    )
    assert data.features[1, 1] == -1000


def test_one_constant_serves_all_columns_and_sparse_rows() -> None:
    part = np.array([[0.0, 4.0, -2.0], [100.0, 0.0, 0.0]])
    for sparsely in (False, True):
        scaled = apply_constants(dataset([part], sparsely=sparsely), 0, 2, clip=10)
        np.testing.assert_array_equal(client_rows(scaled, 0), [[0, 2, -1], [10, 0, 0]])
        assert scaled.is_sparse == sparsely
    by_column = apply_constants(dataset([part], sparsely=True), 0, [100, 4, 2])
    np.testing.assert_array_equal(client_rows(by_column, 0), [[0, 1, -1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("center", "scale", "options"),
    [
        (0, [1, 2], {}),
        (0, 0, {}),
        (0, -1, {}),
        (float("nan"), 1, {}),
        (0, 1, {"clip": 0}),
        (0, 1, {"target_scale": 0.0}),
    ],
)
def test_impossible_constants_are_refused(
    center: object, scale: object, options: dict[str, float]
) -> None:
    with pytest.raises(DataError):
        apply_constants(dataset(ragged(0, (4, 5))), center, scale, **options)  # type: ignore[arg-type]


def test_sparse_centres_and_scaled_labels_are_refused() -> None:
    with pytest.raises(DataError, match="center = 0"):
        apply_constants(dataset(ragged(0, (4, 5)), sparsely=True), 1, 1)
    with pytest.raises(DataError, match="labels"):
        apply_constants(synthetic(task="binary").data, 0, 1, target_center=0.5)
    kept = synthetic(task="multiclass").data
    assert torch.equal(apply_constants(kept, 0, 2).targets, kept.targets)


def test_the_hint_speaks_of_unscaled_rows_only():
    from coterie.data.scaling import scaling_hint

    data = synthetic("mean", clients=20, rows=5, features=3, seed=0).data
    assert scaling_hint(data) is None
    big = replace(data, features=data.features * 100)
    assert "features are of size" in scaling_hint(big)
    assert "below" in scaling_hint(replace(data, features=data.features * 1e-3))
    assert "targets" in scaling_hint(replace(data, targets=data.targets * 100))
    assert scaling_hint(replace(big, features=big.features / 100)) is None
