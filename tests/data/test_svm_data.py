"""What support vector machines over clients need of data: one class against the rest, light data.

Also whole clients kept apart, the paper's regression simulation, and odd rows found.
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.io import savemat

from coterie.cli import build_parser
from coterie.commands.flags import data_table
from coterie.config import ConfigError, from_table, to_table, to_toml
from coterie.data.config import DataConfig
from coterie.data.datasets import open_named
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.load import Source, from_arrays, from_targets, load
from coterie.data.scaling import find_zero_rows, one_class_clients, refuse_labels
from coterie.data.synthetic import mtlsvm_regression, synthetic

pytestmark = pytest.mark.full

LABELS = np.array([0, 3, 1, 2, 3, 0, 1, 3])
OWNERS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
X = np.arange(16.0).reshape(8, 2)


def write_npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", X=X, y=LABELS, client=OWNERS)
    return folder / "a.npz"


def write_whole_floats(folder: Path) -> Path:
    np.savez(folder / "b.npz", X=X, y=LABELS.astype(float), client=OWNERS)
    return folder / "b.npz"


def write_csr(folder: Path) -> Path:
    rows = sparse.csr_matrix(X)
    parts = {f"X_{name}": getattr(rows, name) for name in ("data", "indices", "indptr", "shape")}
    np.savez(folder / "c.npz", y=LABELS, client=OWNERS, **parts)
    return folder / "c.npz"


def write_csv(folder: Path) -> Path:
    lines = [f"{c},{a},{b},{y}" for c, (a, b), y in zip(OWNERS, X, LABELS, strict=True)]
    path = folder / "d.csv"
    path.write_text("\n".join(["client,a,b,y", *lines]) + "\n", encoding="utf-8")
    return path


def write_parquet(folder: Path) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"client": OWNERS, "a": X[:, 0], "b": X[:, 1], "y": LABELS}
    parquet.write_table(arrow.table(columns), folder / "e.parquet")
    return folder / "e.parquet"


def write_mat(folder: Path) -> Path:
    x, y = np.empty(2, dtype=object), np.empty(2, dtype=object)
    x[:], y[:] = [X[:4], X[4:]], [LABELS[:4, None], LABELS[4:, None]]
    savemat(folder / "f.mat", {"X": x, "Y": y})
    return folder / "f.mat"


FORMATS = (write_npz, write_whole_floats, write_csr, write_csv, write_parquet, write_mat)


def equal(one: FederatedDataset, other: FederatedDataset) -> bool:
    def dense(data: FederatedDataset) -> np.ndarray:
        rows = data.features
        return rows.numpy() if isinstance(rows, torch.Tensor) else rows.toarray()

    return (
        one.spec == other.spec
        and list(one.names) == list(other.names)
        and np.array_equal(one.offsets, other.offsets)
        and np.array_equal(dense(one), dense(other))
        and torch.equal(one.targets, other.targets)
    )


# Declared classes are 1, all others 0.


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("classes", [None, 4, 5])
@pytest.mark.parametrize("positive", [3, "3", (1, 2), ("2", 3)])
def test_in_every_format(
    write: Callable[[Path], Path], classes: Any, positive: Any, tmp_path: Path
) -> None:
    data = load(write(tmp_path), Source(positive=positive, classes=classes))
    wanted = [int(one) for one in (positive if isinstance(positive, tuple) else (positive,))]
    assert (data.spec.task, data.spec.outputs, len(data)) == ("binary", 1, 2)
    assert data.targets.dtype == torch.float32
    np.testing.assert_array_equal(data.targets, np.isin(LABELS, wanted))
    assert data.assumed == ()
    assert any("read as 1, every other class as 0" in note for note in data.notes)


def test_in_leaf(leaf_file: Callable[..., Path], tmp_path: Path) -> None:
    users = {"ann": (X[:4].tolist(), LABELS[:4].tolist())}
    users["bob"] = (X[4:].tolist(), LABELS[4:].tolist())
    data = load(leaf_file(tmp_path / "leaf.json", **users), Source(positive=3))
    assert data.spec.task == "binary"
    np.testing.assert_array_equal(data.targets, LABELS == 3)


def test_names_are_declared_with_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "moves.csv"
    path.write_text("client,a,y\np,1,sit\np,2,walk\nq,3,lie\nq,4,sit\n", encoding="utf-8")
    classes = ("walk", "sit", "lie")
    assert load(path, Source(classes=classes, positive="sit")).targets.tolist() == [1, 0, 0, 1]
    both = load(path, Source(classes=classes, positive=("lie", "walk"), task="binary"))
    assert both.targets.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match="class sleep is not declared; the declared classes"):
        load(path, Source(classes=classes, positive="sleep"))
    with pytest.raises(DataError, match=r"declare the column's levels .*its classes by name"):
        load(path, Source(positive="sit"))
    with pytest.raises(DataError, match=r"targets are text, e\.g\. 'sit'; declare the classes"):
        from_arrays([[1.0], [2.0]], ["sit", "lie"], ["a", "b"], source=Source(positive="sit"))


def test_signed_labels_may_be_turned_round() -> None:
    y = [-1, 1, 1, -1]
    for classes in (None, 2):
        for positive, wanted in ((-1, [1, 0, 0, 1]), (1, [0, 1, 1, 0])):
            source = Source(positive=positive, classes=classes)
            data = from_arrays(X[:4], y, OWNERS[2:6], source=source)
            assert data.targets.tolist() == wanted


def test_with_gaps_memory_maps_and_targets_as_clients(tmp_path: Path) -> None:
    source = Source(positive=3, missing="drop", memory_map=str(tmp_path / "arrays"))
    holes = np.where(LABELS == 1, np.nan, LABELS)
    data = from_arrays(X, holes, OWNERS, source=source)
    np.testing.assert_array_equal(data.targets, LABELS[LABELS != 1] == 3)
    several = np.stack([holes, LABELS[::-1]], axis=1)
    data = from_targets(X, several, names=("left", "right"), source=Source(positive=3))
    assert data.counts.tolist() == [6, 8]
    np.testing.assert_array_equal(data.targets[6:], LABELS[::-1] == 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(positive=9), r"no row of class 9; the classes found are 0\.\.3: correct"),
        (Source(positive=(3, "x")), "no row of class x; the classes found"),
        (Source(positive=9, classes=6), r"class 9 is not declared; the declared classes are"),
        (Source(positive=(0, 1, 2, 3)), r"positive names all classes found, 0\.\.3; leave"),
        (Source(positive=3, classes=3), "class 3 is not declared; the declared classes are"),
        (Source(positive=1, classes=3), r"label '3' is outside the declared classes 0\.\.2;"),
        (Source(task="binary"), r"label 3 is outside the classes 0\.\.1 of a binary task "),
        (Source(task="binary"), r"\(labels found: 0 to 3\); correct the row, or name the"),
        (Source(task="binary", classes=2), r"outside the declared classes 0\.\.1 of a binary"),
        (Source(task="binary", classes=4), "4 classes are declared, but binary with 1 target"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: Source, message: str, tmp_path: Path, refuse: Callable[..., str]
) -> None:
    assert re.search(message, refuse(write_npz(tmp_path), source))


def test_classes_that_are_not_counted_from_0_are_listed() -> None:
    with pytest.raises(DataError, match="the classes found are 2, 5, 7: correct positive"):
        from_arrays(X[:3], [5, 2, 7], OWNERS[:3], source=Source(positive=1))
    with pytest.raises(DataError, match=r"found are 5, .*, 16, \.\.\. \(95 in all\)"):
        from_arrays(np.ones((95, 1)), range(5, 100), [0] * 95, source=Source(positive=1))


def test_numbers_to_predict_are_no_classes() -> None:
    with pytest.raises(DataError, match=r"targets are numbers from 0\.5 to 7, not all of them"):
        from_arrays(X[:3], [0.5, 2, 7], OWNERS[:3], source=Source(positive=2))
    with pytest.raises(DataError, match="targets are numbers from 1 to inf, not all of them"):
        from_arrays(X[:3], [1.0, 2.0, np.inf], OWNERS[:3], source=Source(positive=2))
    with pytest.raises(DataError, match=r"row 2 .*label 'inf' is outside the declared classes"):
        from_arrays(X[:3], [1.0, 2.0, np.inf], OWNERS[:3], classes=3, source=Source(positive=2))
    many = np.arange(10_001)
    with pytest.raises(DataError, match=r"numbers from 0 to 10000.* or too many of them"):
        from_arrays(np.ones((10_001, 1)), many, many % 2, source=Source(positive=2))
    data = from_arrays(np.ones((10_000, 1)), many[1:], many[1:] % 2, source=Source(positive=2))
    assert int(data.targets.sum()) == 1
    data = from_arrays(
        np.ones((10_001, 1)), many, many % 2, classes=20_000, source=Source(positive=2)
    )
    assert int(data.targets.sum()) == 1
    with pytest.raises(DataError, match="binary takes one target, found 2; choose one"):
        from_arrays(X, np.stack([LABELS, LABELS], axis=1), OWNERS, source=Source(positive=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"positive": 3, "task": "multiclass"},
            "makes the task binary, but task = 'multiclass",
        ),
        ({"positive": 3, "task": "regression"}, "leave one of them out"),
        ({"positive": ()}, "expected at least one class"),
        ({"positive": (3, "3")}, "none given twice"),
        ({"positive": 3.0}, r"positive = 3\.0: expected a class, or several, each a whole"),
        ({"positive": True}, "positive = True"),
        ({"positive": ""}, "positive = ''"),
    ],
)
def test_impossible_declarations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Source(**options)


def test_numpy_numbers_and_lists_will_do() -> None:
    assert Source(positive=np.int64(3)).positives == ("3",)  # type: ignore[arg-type]
    assert Source(positive=[3, "a"]).positives == ("3", "a")  # type: ignore[arg-type]
    assert Source().positives == ()


def test_signed_labels_are_binary_as_before() -> None:
    data = from_arrays(X[:4], [-1, 1, 1, -1], OWNERS[2:6], task="binary")
    assert data.targets.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match=r"label -1 is outside.* \(labels found: -1 to 2\)"):
        from_arrays(X[:4], [-1, 1, 2, -1], OWNERS[2:6], task="binary")
    with pytest.raises(DataError, match=r"label 2 is outside.* \(labels found: 1 to 2\)"):
        from_arrays(X[:4], [1, 2, 2, 1], OWNERS[2:6], task="binary")


# Light data, the first clients, newcomers: parts of the data, and nothing else.


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


def test_every_row_is_as_likely_and_the_coins_are_not_those_of_the_split() -> None:
    data = from_arrays(np.ones((10, 1)), np.arange(10) / 2, [0] * 10)
    hits = np.zeros(10)
    same = 0
    for seed in range(2000):
        kept = numbers(data.at_most(3, seed))
        hits[kept] += 1
        same += numbers(data.split(3, seed)[1]) == kept
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


@pytest.mark.parametrize("ids", [[], [0, 0], [0.0], [True, False, True, True, True], [[0]]])
def test_clients_are_listed_by_number(data: FederatedDataset, ids: Any) -> None:
    with pytest.raises(DataError, match="expected a list of numbers of clients, at least one"):
        data.only(ids)


@pytest.mark.parametrize("ids", [[5], [-1, 2]])
def test_clients_exist(data: FederatedDataset, ids: list[int]) -> None:
    with pytest.raises(DataError, match="expected 0 to 4: there are 5 clients"):
        data.only(ids)


def test_sizes_are_possible(data: FederatedDataset) -> None:
    for clients in (0, 6):
        with pytest.raises(DataError, match=f"clients = {clients}: expected 1 to 5"):
            data.first(clients)
    with pytest.raises(DataError, match="rows = 0: expected at least 1 row of each client"):
        data.at_most(0, seed=0)


def choice_of(flags: str) -> DataConfig:
    arguments: argparse.Namespace = build_parser().parse_args(shlex.split(flags))
    return from_table(DataConfig, data_table(arguments), "plan.data")


# A plan's choice of data, and its flags.


def test_rows_are_kept_after_the_split_and_before_scaling() -> None:
    options = {"clients": 6, "rows": 40, "features": 3}
    whole = DataConfig(name="synthetic", options=options, split_seed=5)
    train, test = replace(whole, rows=7, clients=4).split()
    all_train, all_test = whole.split()
    assert train.counts.tolist() == [7] * 4
    assert equal(test, all_test.first(4))
    assert equal(train, all_train.first(4).at_most(7, seed=5))
    other, _ = replace(whole, rows=7, clients=4, split_seed=6).split()
    assert not torch.equal(train.targets, other.targets)
    scaled, held = replace(whole, rows=7, standardise="client").split()
    assert isinstance(scaled.features, torch.Tensor)
    means = scaled.features.reshape(6, 7, 3).mean(dim=1)
    torch.testing.assert_close(means, torch.zeros(6, 3), atol=1e-5, rtol=0)
    assert held.counts.tolist() == [10] * 6


def test_rows_of_a_declared_split() -> None:
    train, test = DataConfig(name="mtlsvm:regression", rows=100, clients=3).split()
    assert (train.counts.tolist(), test.counts.tolist()) == ([100] * 3, [60] * 3)
    assert len(DataConfig(name="mtlsvm:regression", clients=3).open()) == 3


def test_flags_say_it() -> None:
    choice = choice_of("run --data a.npz --positive 3 --rows 100 --clients 20")
    assert (choice.rows, choice.clients, choice.source.positives) == (100, 20, ("3",))
    assert choice_of("tune --data a.npz --positive 3,4 --rows 9").source.positives == ("3", "4")
    shown = choice_of("data show a.npz --positive=-1 --clients 2")
    assert (shown.source.positives, shown.clients, shown.rows) == (("-1",), 2, None)
    plain = choice_of("run --data a.npz")
    assert (plain.rows, plain.clients, plain.source) == (None, None, Source())


def test_a_plan_keeps_it_and_an_old_plan_reads_as_before() -> None:
    for source in (Source(positive=3), Source(positive=("3", 4), classes=6)):
        choice = DataConfig(name="a.npz", source=source, rows=100, clients=20)
        read = from_table(DataConfig, tomllib.loads(to_toml(to_table(choice))), "data")
        assert read == choice
    table = to_table(DataConfig(name="a.npz"))
    assert not {"rows", "clients"} & table.keys()
    assert "positive" not in table["source"]


@pytest.mark.parametrize("name", ["rows", "clients"])
def test_impossible_numbers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0: expected a whole number >= 1"):
        from_table(DataConfig, {"name": "a.npz", name: 0}, "data")


# The paper's synthetic regression.


SMALL: dict[str, Any] = {"clients": 5, "rows": 20, "features": 6}


def test_the_defaults_are_the_papers() -> None:
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


def test_learning_together_pays_as_much_as_the_docstring_says() -> None:
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
def test_everything_follows_from_the_seed(unequal: bool) -> None:
    one, two, other = (mtlsvm_regression(**SMALL, unequal=unequal, seed=seed) for seed in (3, 3, 4))
    assert equal(one.data, two.data)
    assert not torch.isclose(one.data.targets, other.data.targets).all()
    assert not torch.isclose(one.truth["weight"], other.truth["weight"]).any()
    more = mtlsvm_regression(**{**SMALL, "clients": 9}, unequal=unequal, seed=3)
    assert equal(more.data.first(5), one.data)
    assert torch.equal(more.truth["weight"][:5], one.truth["weight"])


def test_without_noise_and_with_other_splits() -> None:
    made = mtlsvm_regression(**SMALL, snr_db=float("inf"), test=3)
    rows = made.data.features.reshape(5, 20, 6)
    product = torch.einsum("knd,kd->kn", rows, made.truth["weight"][:, 0])
    torch.testing.assert_close(made.data.targets.reshape(5, 20), product)
    train, test = made.data.split_by_source()
    assert (set(train.counts), set(test.counts)) == ({17}, {3})
    assert set(mtlsvm_regression(**SMALL, test=0).data.split_by_source()[1].counts) == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients = 0: expected a whole number of 1 or more"),
        ({"features": 0}, "features = 0"),
        ({"rows": 0}, "rows = 0, test = 0.3: expected a share"),
        ({"rows": 5, "test": 5}, "rows = 5, test = 5: expected"),
        ({"test": 1.0}, "test = 1.0"),
        ({"test": -1}, "test = -1"),
        ({"test": float("nan")}, "test = nan"),
        ({"snr_db": float("nan")}, "snr_db = nan: expected decibels"),
        ({"snr_db": float("-inf")}, "snr_db = -inf"),
        ({"relatedness": 1.1}, "relatedness = 1.1: expected a number from 0 to 1"),
        ({"relatedness": float("nan")}, "relatedness = nan"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_named("mtlsvm:regression", **options)


# Odd rows and clients are found wherever the rows live.


@pytest.fixture(params=[1 << 16, 3, 1])
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.scaling._CHUNK", request.param)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("where", ["dense", "sparse", "mapped", "images"])
def test_zero_rows(where: str, tmp_path: Path) -> None:
    x = np.ones((8, 4))
    x[[0, 5, 7]] = 0
    x[2, 1:] = 0
    source = Source(
        sparse=where == "sparse",
        memory_map=str(tmp_path / "m") if where == "mapped" else None,
        shape=(2, 2) if where == "images" else (),
    )
    data = from_arrays(x, LABELS, OWNERS, source=source)
    found = find_zero_rows(data)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 5, 7]
    assert find_zero_rows(data.where(np.arange(8) == 1)).tolist() == []
    assert find_zero_rows(data.where(np.zeros(8, dtype=bool))).tolist() == []


def test_zeros_that_are_written_down_are_zeros() -> None:
    rows = sparse.csr_matrix(X + 1)
    rows.data[rows.indptr[3] : rows.indptr[4]] = 0
    data = replace(from_arrays(X, LABELS, OWNERS), features=rows.astype(np.float32))
    assert find_zero_rows(data).tolist() == [3]


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_clients_of_one_class(task: Any) -> None:
    high = 1 if task == "binary" else 3
    y = np.array([0, 0, 0, high, high, high, 0, 0])
    owner = np.array([0, 0, 2, 2, 3, 3, 3, 5])
    names = [f"c{k}" for k in range(6)]
    data = from_arrays(np.ones((8, 1)), y, owner, names=names, task=task)
    assert data.counts.tolist() == [2, 0, 2, 3, 0, 1]
    assert one_class_clients(data).tolist() == [0, 5]
    assert one_class_clients(data.where(np.arange(8) < 7)).tolist() == [0]
    assert one_class_clients(data.only([2, 3])).tolist() == []


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_other_tasks_have_no_class(task: Any) -> None:
    data = synthetic(clients=4, rows=3, features=2, task=task).data
    refuse_labels(data)
    with pytest.raises(DataError, match=f"the task is {task}, expected binary or multiclass"):
        one_class_clients(data)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("value", [-1.0, 2.0, 0.5, float("nan")])
def test_labels_other_than_0_and_1_are_refused(value: float) -> None:
    data = from_arrays(X, LABELS % 2, OWNERS)
    refuse_labels(data)
    data.targets[6] = value
    told = rf"client '1', row 2 \(from 0\): found the target {value:g}, expected 0 or 1"
    with pytest.raises(DataError, match=told):
        refuse_labels(data)


# Counts that the data's own descriptions state.


def test_human_activity_as_six_classes_and_sitting_against_the_rest(
    shared_data: Callable[[str], Path],
) -> None:
    path = shared_data("har/har.npz")
    six = load(path)
    assert (six.spec.task, six.spec.outputs, len(six)) == ("multiclass", 6, 30)
    assert six.spec.shape == (561,)
    assert torch.bincount(six.targets).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert six.counts[:5].tolist() == [347, 302, 341, 317, 302]
    train, test = DataConfig(name=str(path), source=Source(positive=3)).split()
    assert (train.spec.task, train.spec.outputs, len(train)) == ("binary", 1, 30)
    assert (int(train.offsets[-1]), int(test.offsets[-1])) == (7715, 2584)
    assert float(train.targets.sum() + test.targets.sum()) == 1777
    assert not len(one_class_clients(train))
    assert not len(find_zero_rows(train))
    refuse_labels(train)
    light = train.first(20).at_most(100, seed=0)
    assert light.counts.tolist() == [100] * 20
    assert light.spec.clients == 20
    newcomers = train.only(np.arange(20, 30))
    assert list(newcomers.names) == [str(k) for k in range(20, 30)]
    assert newcomers.counts.tolist() == train.counts[20:].tolist()
    assert newcomers.spec == replace(train.spec, clients=10)


def test_landmine_has_29_fields(shared_data: Callable[[str], Path]) -> None:
    data = load(shared_data("landmine/landmine.npz"))
    assert (data.spec.task, data.spec.shape, len(data)) == ("binary", (9,), 29)
    assert int(data.offsets[-1]) == 14_820
    assert float(data.targets.sum()) == 904
    assert (data.counts.min(), data.counts.max()) == (445, 690)
    refuse_labels(data)


def test_signed_landmine_labels(shared_data: Callable[[str], Path]) -> None:
    path = shared_data("landmine/raw_sample/mocha_small.mat")
    usual, turned = load(path), load(path, Source(positive=-1))
    assert (usual.spec.task, len(usual), len(usual.targets)) == ("binary", 29, 1464)
    assert torch.equal(usual.targets, 1 - turned.targets)
