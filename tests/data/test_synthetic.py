"""Generated data against what its truth implies."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from tests.data.samples import equal, refused

from coterie.data import datasets as catalogue
from coterie.data.config import DataConfig
from coterie.data.datasets import open_named
from coterie.data.federated import DataError, Task
from coterie.data.synthetic import (
    KINDS,
    LOW_RANK_SCALE,
    ClientNames,
    Kind,
    Synthetic,
    figure2,
    mpmtl_group_sparse,
    mpmtl_low_rank,
    mtlsvm_regression,
    synthetic,
)


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
    refused(message, synthetic, **options)


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


# The papers' simulations against what the papers say of them.


MAKERS = (mpmtl_low_rank, mpmtl_group_sparse)
SMALL: dict[str, Any] = {"clients": 7, "train": 4, "test": 6, "features": 8}


@pytest.fixture(scope="module")
def low_rank() -> Synthetic:
    return mpmtl_low_rank()


def weights(made: Synthetic) -> np.ndarray:
    found: np.ndarray = made.truth["weight"][:, 0].double().numpy()
    return found


@pytest.mark.parametrize("name", ["mpmtl:low_rank", "mpmtl:group_sparse"])
def test_the_default_split_is_the_papers(name: str) -> None:
    train, test = DataConfig(name=name).split()
    assert len(train) == len(test) == 320
    assert train.spec.shape == (30,)
    assert train.spec.task == "regression"
    assert set(train.counts) == {30}
    assert set(test.counts) == {270}
    assert train.title == name


def test_a_run_opens_them_with_options() -> None:
    choice = DataConfig(name="mpmtl:low_rank", options={**SMALL, "rank": 2, "seed": 3, "noise": 0})
    train, test = choice.split()
    made = mpmtl_low_rank(**SMALL, rank=2, seed=3, noise=0)
    both = [part.features.reshape(7, -1, 8) for part in (train, test)]
    assert torch.equal(torch.cat(both, dim=1).reshape(-1, 8), made.data.features)
    assert (set(train.counts), set(test.counts)) == ({4}, {6})
    with pytest.raises(DataError, match="no option 'active'; its options are clients, train, test"):
        catalogue.open_named("mpmtl:low_rank", active=3)
    refused("wrong type", catalogue.open_named, "mpmtl:low_rank", clients="many")


@pytest.mark.parametrize("make", MAKERS)
def test_rows_have_norm_one_and_targets_the_noise(make: Any) -> None:
    made = make(clients=40, noise=0.7)
    rows = made.data.features.double().reshape(40, 300, 30)
    np.testing.assert_allclose(rows.norm(dim=2), 1, rtol=1e-6)
    scores = torch.einsum("knd,kd->kn", rows, made.truth["weight"][:, 0].double())
    misses = made.data.targets.reshape(40, 300) - scores
    assert abs(float(misses.std()) - 0.7) < 5 * 0.7 / np.sqrt(2 * misses.numel())
    assert abs(float(misses.mean())) < 5 * 0.7 / np.sqrt(misses.numel())
    assert float(rows.mean(dim=(0, 1)).abs().max()) < 5 / np.sqrt(30 * 12_000)
    assert not made.truth["bias"].any()
    exact = make(**SMALL, noise=0)
    product = torch.einsum(
        "knd,kd->kn", exact.data.features.reshape(7, 10, 8), exact.truth["weight"][:, 0]
    )
    torch.testing.assert_close(exact.data.targets.reshape(7, 10), product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "clients"), [(5, 320), (1, 320), (5, 5), (30, 64)])
def test_low_rank_models_have_exactly_that_rank(rank: int, clients: int) -> None:
    values = np.linalg.svd(weights(mpmtl_low_rank(rank=rank, clients=clients, train=1, test=0)))[1]
    assert values[rank - 1] > 1e-3 * values[0]
    assert (values[rank:] < 1e-6 * values[0]).all()


def test_low_rank_clients_are_related_opposed_or_unrelated(low_rank: Synthetic) -> None:
    """With A known up to a rotation, cosines of b_k are those of models whitened by A."""
    found = weights(low_rank)
    left = np.linalg.svd(found, full_matrices=False)[0][:, :5]
    rows = left / np.linalg.norm(left, axis=1, keepdims=True)
    cosines = rows @ rows.T
    group = np.arange(320) % 10
    np.testing.assert_array_equal(low_rank.cluster, group)
    related = group[:, None] == group[None]
    opposed = (group[:, None] - group[None]) % 10 == 5
    assert cosines[related].mean() == pytest.approx(0.93, abs=0.05)
    assert cosines[opposed].mean() == pytest.approx(-0.93, abs=0.05)
    assert abs(cosines[~related & ~opposed].mean()) < 0.02


def test_low_rank_models_have_the_scale_and_lie_around_their_groups() -> None:
    norms, away = [], []
    for seed in range(20):
        made = mpmtl_low_rank(train=1, test=0, seed=seed)
        assert made.cluster is not None
        centres = made.shared["weight"][:, 0]
        assert centres.shape == (10, 30)
        torch.testing.assert_close(centres[:5], -centres[5:])
        models = made.truth["weight"][:, 0]
        norms.append(float(models.square().sum(dim=1).mean()))
        away.append(float((models - centres[made.cluster]).square().sum(dim=1).mean()))
    assert np.mean(norms) == pytest.approx(30 * LOW_RANK_SCALE**2, rel=0.1)
    assert np.mean(away) == pytest.approx(0.075 * np.mean(norms), rel=0.2)


def test_learning_together_pays_as_much_as_the_docstring_says(low_rank: Synthetic) -> None:
    """Local ridge against ridge inside the true subspace, which the trace norm can only near."""
    train, test = low_rank.data.split_by_source()
    x, y = train.features.double().reshape(320, 30, 30), train.targets.double().reshape(320, 30, 1)
    new, true = test.features.double().reshape(320, 270, 30), test.targets.double().reshape(320, -1)

    def error(basis: torch.Tensor, lam: float) -> float:
        seen = x @ basis
        gram = seen.mT @ seen / 30 + lam * torch.eye(basis.shape[1], dtype=torch.float64)
        model = basis @ torch.linalg.solve(gram, seen.mT @ y / 30)
        misses = true - (new @ model)[..., 0]
        return float(misses.square().sum() / (true - true.mean()).square().sum())

    directions = torch.linalg.svd(low_rank.truth["weight"][:, 0].double())[2][:5].T
    assert error(torch.eye(30, dtype=torch.float64), 0.0066) == pytest.approx(0.478, abs=0.02)
    assert error(directions, 0.0066) < 0.239


def test_group_sparse_models_use_the_first_features() -> None:
    found = weights(mpmtl_group_sparse(train=1, test=0))
    assert not found[:, 4:].any()
    few = found[:, :4]
    assert np.abs(few).min() >= 1
    assert np.abs(few).max() <= 50
    assert np.abs(few).mean() == pytest.approx(25.5, abs=5 * 14.2 / np.sqrt(few.size))
    assert (few > 0).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(few.size))
    made = mpmtl_group_sparse(**SMALL, active=8)
    assert (weights(made) != 0).all()
    assert made.cluster is None
    assert not made.shared["weight"].any()


@pytest.mark.parametrize("make", MAKERS)
def test_of_papers_everything_follows_from_the_seed(make: Any) -> None:
    one, two, other = (make(**SMALL, seed=seed) for seed in (3, 3, 4))
    for name in ("features", "targets"):
        assert torch.equal(getattr(one.data, name), getattr(two.data, name))
        assert not torch.equal(getattr(one.data, name), getattr(other.data, name))
    assert torch.equal(one.truth["weight"], two.truth["weight"])
    assert not torch.equal(one.truth["weight"], other.truth["weight"])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("few", [1, 3, 20])
def test_fewer_clients_are_the_first_of_more(make: Any, few: int) -> None:
    small, large = (make(clients=clients, train=5, test=7) for clients in (few, 31))
    assert torch.equal(small.data.features, large.data.features[: 12 * few])
    assert torch.equal(small.data.targets, large.data.targets[: 12 * few])
    assert torch.equal(small.truth["weight"], large.truth["weight"][:few])


@pytest.mark.parametrize("make", MAKERS)
def test_training_rows_do_not_depend_on_the_test_rows(make: Any) -> None:
    few, many = (make(clients=6, train=5, test=test).data.split_by_source() for test in (0, 9))
    assert torch.equal(few[0].features, many[0].features)
    assert torch.equal(few[0].targets, many[0].targets)
    assert len(few[1].targets) == 0
    test = many[1].features.reshape(6, 9, 30)[:, :5]
    assert not torch.isclose(test, many[0].features.reshape(6, 5, 30)).any(dim=2).all()


def test_figure_2_has_one_outlier() -> None:
    found = figure2(3)
    assert found.shape == (5, 10)
    assert ((found[:, :9] > 0) & (found[:, :9] < 1)).all()
    assert found[:, 9].max() > 1
    assert found[:, 9].max() < 100
    np.testing.assert_array_equal(found, figure2(3))
    assert (found != figure2(4)).all()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (mpmtl_low_rank, {"clients": 0}, "clients = 0: expected 1 or more"),
        (mpmtl_low_rank, {"train": 0}, "train = 0"),
        (mpmtl_group_sparse, {"test": -1}, "test = -1: expected 0 or more"),
        (mpmtl_group_sparse, {"features": 0}, "features = 0"),
        (mpmtl_low_rank, {"rank": 31}, "rank = 31: expected 1 to 30"),
        (mpmtl_low_rank, {"rank": 0}, "rank = 0"),
        (mpmtl_group_sparse, {"active": 31}, "active = 31"),
        (mpmtl_group_sparse, {"noise": -1.0}, "noise = -1"),
        (mpmtl_low_rank, {"noise": float("nan")}, "noise = nan"),
    ],
)
def test_of_papers_impossible_options_are_refused(
    make: Any, options: dict[str, Any], message: str
) -> None:
    refused(message, make, **options)


# x.


SMALL_SVM: dict[str, Any] = {"clients": 5, "rows": 20, "features": 6}


def test_mtlsvm_defaults_are_the_papers() -> None:
    train, test = DataConfig(name="mtlsvm:regression").split()
    assert (len(train), train.spec.shape, train.spec.task) == (20, (200,), "regression")
    assert (set(train.counts), set(test.counts)) == ({140}, {60})
    assert train.title == "mtlsvm:regression"


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("snr_db", [20.0, 0.0])
def test_noise_has_the_ratio_and_rows_the_scale(unequal: bool, snr_db: float) -> None:
    made = mtlsvm_regression(snr_db=snr_db, unequal=unequal, rows=400, seed=2)
    rows = made.data.features.reshape(20, 400, 200).double()
    weight = made.truth["weight"][:, 0].double()
    signal = torch.einsum("knd,kd->kn", rows, weight)
    noise = made.data.targets.reshape(20, 400) - signal
    ratio = 10 * torch.log10(signal.var(dim=1) / noise.var(dim=1))
    # each variance of 400 draws is off by 7 %, which is 0.31 dB
    assert float((ratio - snr_db).abs().max()) < 4.5 * 0.31 * np.sqrt(2)
    assert abs(float(ratio.mean()) - snr_db) < 4.5 * 0.31 * np.sqrt(2 / 20)
    means, deviations = rows.mean(dim=(1, 2)), rows.std(dim=(1, 2))
    if unequal:
        assert float(means.std()) == pytest.approx(2 / np.sqrt(12), rel=0.5)
        assert float(means.abs().max()) < 1.05
        assert 0.48 < float(deviations.min()) < 0.8
        assert 1.25 < float(deviations.max()) < 2.1
    else:
        torch.testing.assert_close(deviations, torch.ones(20).double(), atol=0.02, rtol=0)
        assert float(means.abs().max()) < 5 / np.sqrt(80_000)


@pytest.mark.parametrize("relatedness", [0.0, 0.5, 0.9, 1.0])
def test_models_are_as_related_as_asked(relatedness: float) -> None:
    made = mtlsvm_regression(clients=40, rows=2, features=4000, relatedness=relatedness)
    weight = made.truth["weight"][:, 0].double()
    gram = (weight @ weight.T).numpy()
    np.testing.assert_allclose(np.diag(gram), 1, atol=5 * np.sqrt(2 / 4000))
    others = gram[~np.eye(40, dtype=bool)]
    np.testing.assert_allclose(others, relatedness, atol=6 / np.sqrt(4000))
    shared = made.shared["weight"].double()
    assert float(shared.square().sum()) == pytest.approx(relatedness, abs=0.12)


def test_mtlsvm_pays_as_much_as_the_docstring_says() -> None:
    """Ridge in closed form: kernel x x' for a client's own part, r x x' for the common one."""
    train, test = mtlsvm_regression(clients=12).data.split_by_source()
    x, new = (part.features.double().numpy() for part in (train, test))
    owner, new_owner = (np.repeat(np.arange(12), part.counts) for part in (train, test))
    y, true = train.targets.double().numpy(), test.targets.double().numpy().reshape(12, -1)
    gram, cross = x @ x.T / 200, new @ x.T / 200

    def score(common: float, noise: float) -> float:
        own = common + (1 - common) * (owner[:, None] == owner)
        seen = common + (1 - common) * (new_owner[:, None] == owner)
        model = np.linalg.solve(gram * own + noise * np.eye(len(y)), y)
        misses = ((cross * seen) @ model).reshape(12, -1) - true
        spread = true - true.mean(axis=1, keepdims=True)
        return float((1 - (misses**2).sum(axis=1) / (spread**2).sum(axis=1)).mean())

    assert score(0.0, 0.01) == pytest.approx(0.66, abs=0.05)
    assert score(0.9, 0.01) == pytest.approx(0.93, abs=0.02)
    assert score(1.0, 0.1) < 0.9


@pytest.mark.parametrize("unequal", [False, True])
def test_mtlsvm_follows_from_the_seed(unequal: bool) -> None:
    one, two, other = (
        mtlsvm_regression(**SMALL_SVM, unequal=unequal, seed=seed) for seed in (3, 3, 4)
    )
    assert equal(one.data, two.data)
    assert not torch.isclose(one.data.targets, other.data.targets).all()
    assert not torch.isclose(one.truth["weight"], other.truth["weight"]).any()
    more = mtlsvm_regression(**{**SMALL_SVM, "clients": 9}, unequal=unequal, seed=3)
    assert equal(more.data.first(5), one.data)
    assert torch.equal(more.truth["weight"][:5], one.truth["weight"])


def test_without_noise_and_with_other_splits() -> None:
    made = mtlsvm_regression(**SMALL_SVM, snr_db=float("inf"), test=3)
    rows = made.data.features.reshape(5, 20, 6)
    product = torch.einsum("knd,kd->kn", rows, made.truth["weight"][:, 0])
    torch.testing.assert_close(made.data.targets.reshape(5, 20), product)
    train, test = made.data.split_by_source()
    assert (set(train.counts), set(test.counts)) == ({17}, {3})
    assert set(mtlsvm_regression(**SMALL_SVM, test=0).data.split_by_source()[1].counts) == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients = 0: expected 1 or more"),
        ({"features": 0}, "features = 0"),
        ({"rows": 0}, "rows = 0, test = 0.3: expected a share"),
        ({"rows": 5, "test": 5}, "rows = 5, test = 5: expected"),
        ({"test": 1.0}, "test = 1.0"),
        ({"test": -1}, "test = -1"),
        ({"test": float("nan")}, "test = nan"),
        ({"snr_db": float("nan")}, "snr_db = nan: expected decibels"),
        ({"snr_db": float("-inf")}, "snr_db = -inf"),
        ({"relatedness": 1.1}, "relatedness = 1.1: expected 0 to 1"),
        ({"relatedness": float("nan")}, "relatedness = nan"),
    ],
)
def test_impossible_mtlsvm_options_are_refused(options: dict[str, Any], message: str) -> None:
    refused(message, open_named, "mtlsvm:regression", **options)
