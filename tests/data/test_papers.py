"""The papers' simulations against what the papers say of them."""

from typing import Any

import numpy as np
import pytest
import torch

from coterie.choice import DataChoice
from coterie.data import catalogue
from coterie.data.federated import DataError
from coterie.data.papers import LOW_RANK_SCALE, figure2, mpmtl_group_sparse, mpmtl_low_rank
from coterie.data.synthetic import Synthetic

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
    train, test = DataChoice(name=name).split()
    assert len(train) == len(test) == 320
    assert train.spec.shape == (30,)
    assert train.spec.task == "regression"
    assert set(train.counts) == {30}
    assert set(test.counts) == {270}
    assert train.title == name


def test_a_run_opens_them_with_options() -> None:
    choice = DataChoice(name="mpmtl:low_rank", options={**SMALL, "rank": 2, "seed": 3, "noise": 0})
    train, test = choice.split()
    made = mpmtl_low_rank(**SMALL, rank=2, seed=3, noise=0)
    both = [part.features.reshape(7, -1, 8) for part in (train, test)]
    assert torch.equal(torch.cat(both, dim=1).reshape(-1, 8), made.data.features)
    assert (set(train.counts), set(test.counts)) == ({4}, {6})
    with pytest.raises(DataError, match="no option 'active'; its options are clients, train, test"):
        catalogue.open_named("mpmtl:low_rank", active=3)
    with pytest.raises(DataError, match="wrong type"):
        catalogue.open_named("mpmtl:low_rank", clients="many")


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
    """Ridge alone against ridge inside the true subspace, which the trace norm can only near."""
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
def test_everything_follows_from_the_seed(make: Any) -> None:
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
        (mpmtl_low_rank, {"clients": 0}, "clients = 0: expected a whole number of 1 or more"),
        (mpmtl_low_rank, {"train": 0}, "train = 0"),
        (mpmtl_group_sparse, {"test": -1}, "test = -1: expected a whole number of 0 or more"),
        (mpmtl_group_sparse, {"features": 0}, "features = 0"),
        (mpmtl_low_rank, {"rank": 31}, "rank = 31: expected 1 to features = 30"),
        (mpmtl_low_rank, {"rank": 0}, "rank = 0"),
        (mpmtl_group_sparse, {"active": 31}, "active = 31"),
        (mpmtl_group_sparse, {"noise": -1.0}, "noise = -1"),
        (mpmtl_low_rank, {"noise": float("nan")}, "noise = nan"),
    ],
)
def test_impossible_options_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**options)
