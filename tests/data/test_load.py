import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import io, sparse
from tests.data.samples import refused

from coterie.core.config import from_table, to_table, to_toml
from coterie.data import assemble
from coterie.data.config import DataConfig
from coterie.data.federated import DataError
from coterie.data.load import Source, from_arrays, from_targets, load
from coterie.data.tables import Batch, Columns, Table

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=np.float32)
Y = np.array([0.5, 1.5, 2.5, 3.5], dtype=np.float32)
CLIENT = np.array([7, 3, 7, 3])

# name, task, outputs, clients, rows, shape, rows per client (min, median, max)
REAL = [
    ("school", "regression", 1, 139, 15362, (28,), (22, 103, 251)),
    ("landmine", "binary", 1, 29, 14820, (9,), (445, 507, 690)),
    ("har", "multiclass", 6, 30, 10299, (561,), (281, 342, 409)),
    ("har_lite", "multiclass", 6, 30, 10299, (27,), (281, 342, 409)),
    ("har_signals", "multiclass", 6, 30, 10299, (9, 128), (281, 342, 409)),
    ("femnist", "multiclass", 62, 105, 16393, (28, 28), (5, 169, 184)),
    ("heart", "binary", 1, 4, 920, (3,), (123, 247, 303)),
    ("shakespeare", "multiclass", 68, 448, 93790, (80,), (47, 148, 1530)),
    ("exam", "regression", 1, 65, 4059, (7,), (2, 60, 198)),
    ("chem97", "regression", 1, 2410, 31022, (3,), (1, 8, 188)),
]


def save(path: Path, **arrays) -> Path:
    np.savez(path, **({"X": X, "y": Y, "client": CLIENT} | arrays))
    return path


def rows_of(data, name: str) -> np.ndarray:
    k = list(data.names).index(name)
    rows = data.features[data.offsets[k] : data.offsets[k + 1]]
    return rows.numpy() if isinstance(rows, torch.Tensor) else rows.toarray()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-100, 100)), min_size=1, max_size=40),
    st.sampled_from([int, str, "text"]),
    st.sampled_from(["dense", "csr", "torch"]),
)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_each_client_keeps_its_rows_in_order_and_no_others(rows, label, kind) -> None:
    owners = [f"client {k}" if label == "text" else label(k) for k, _ in rows]
    x = np.array([[value, at + 1.0] for at, (_, value) in enumerate(rows)])
    given_x = {"dense": x, "csr": sparse.csr_matrix(x), "torch": torch.from_numpy(x)}[kind]
    data = from_arrays(given_x, x[:, 0] / 2, owners)
    assert sorted(data.names) == sorted({str(owner) for owner in owners})
    assert data.is_sparse == (kind == "csr")
    for k, name in enumerate(data.names):
        mine = [at for at, owner in enumerate(owners) if str(owner) == name]
        np.testing.assert_array_equal(rows_of(data, name), x[mine])
        y = data.targets[data.offsets[k] : data.offsets[k + 1]].numpy()
        np.testing.assert_array_equal(y, x[mine, 0] / 2)


def test_clients_with_numbers_are_sorted_and_others_keep_their_order() -> None:
    assert from_arrays(X, Y, [10, 9, 10, -1]).names == ("-1", "9", "10")
    assert from_arrays(X, Y, ["10", "9", "10", "9"]).names == ("9", "10")
    assert from_arrays(X, Y, ["b", "a", "b", "9"]).names == ("b", "a", "9")
    assert from_arrays(X, Y, np.array([2.0, 1.0, 2.0, 1.0])).names == ("1", "2")


def test_named_clients_keep_those_without_rows() -> None:
    data = from_arrays(X, Y, CLIENT // 4, names=("b", "none", "a"))
    assert data.names == ("b", "none", "a")
    assert data.counts.tolist() == [2, 2, 0]
    data = from_arrays(X, Y, [2, 0, 2, 0], names=("b", "none", "a"))
    assert data.counts.tolist() == [2, 0, 2]


def test_anything_with_to_numpy_names_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["age", "dose"])
    data = from_arrays(
        frame, pandas.Series(Y), pandas.Series(list("abab")), source=Source(features=("dose",))
    )
    np.testing.assert_array_equal(rows_of(data, "a"), X[[0, 2], 1:])


@pytest.mark.parametrize(
    ("y", "options", "task", "outputs", "expected", "note"),
    [
        ([0.5, 1, 2, 3], {}, "regression", 1, [0.5, 1, 2, 3], None),
        ([0, 1, 1, 0], {}, "binary", 1, [0, 1, 1, 0], "(0..1)"),
        ([True, False, True, True], {}, "binary", 1, [1, 0, 1, 1], "(0..1)"),
        ([0, 1, 1, 0], {"classes": 2}, "binary", 1, [0, 1, 1, 0], None),
        ([-1, 1, 1, -1], {}, "binary", 1, [0, 1, 1, 0], "-1 and +1"),
        ([-1, 1, 1, -1], {"task": "binary"}, "binary", 1, [0, 1, 1, 0], "-1 and +1"),
        ([0, 2, 1, 0], {}, "multiclass", 3, [0, 2, 1, 0], "(0..2)"),
        ([0, 2, 1, 0], {"classes": 5}, "multiclass", 5, [0, 2, 1, 0], None),
        ([0, 1, 1, 0], {"task": "multiclass", "classes": 2}, "multiclass", 2, [0, 1, 1, 0], None),
        ([0, 2, 1, 0], {"task": "regression"}, "regression", 1, [0, 2, 1, 0], None),
        (["n", "y", "y", "n"], {"classes": ("n", "y")}, "binary", 1, [0, 1, 1, 0], None),
        ([3, 1, 2, 1], {"classes": ("1", "2", "3")}, "multiclass", 3, [2, 0, 1, 0], None),
        ([3.0, 1, 2, 1], {"classes": ("1", "2", "3")}, "multiclass", 3, [2, 0, 1, 0], None),
    ],
)
def test_task_comes_from_what_is_declared_else_from_the_targets(
    y, options, task, outputs, expected, note
) -> None:
    data = from_arrays(X, y, ["a"] * 4, **options)
    assert (data.spec.task, data.spec.outputs) == (task, outputs)
    assert data.targets.tolist() == expected
    assert data.targets.dtype == (torch.int64 if task == "multiclass" else torch.float32)
    assert any(note in line for line in data.notes) if note else data.notes == ()
    assert bool(data.assumed) == (not options)


def test_one_target_that_changes_the_task_changes_what_is_assumed() -> None:
    classes, other = (from_arrays(X, y, ["a"] * 4) for y in ([0, 1, 2, 1], [0, 1, 2, 0.5]))
    assert "classes taken" in classes.assumed[0] and "(regression)" in other.assumed[0]


def test_several_binary_targets_are_labels() -> None:
    data = from_arrays(X, [[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]], CLIENT)
    assert (data.spec.task, data.spec.outputs) == ("multilabel", 3)
    assert data.targets.tolist() == [[1, 1, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert data.targets.dtype == torch.float32


def test_each_target_becomes_a_client_without_the_rows_that_lack_it() -> None:
    gap = np.nan
    data = from_targets(X, [[1, gap], [gap, gap], [3, 5], [gap, 6]], names=("kidney", "liver"))
    assert data.names == ("kidney", "liver")
    assert data.targets.tolist() == [1, 3, 5, 6]
    np.testing.assert_array_equal(rows_of(data, "kidney"), X[[0, 2]])
    np.testing.assert_array_equal(rows_of(data, "liver"), X[[2, 3]])


def test_constants_are_applied_and_clipped() -> None:
    source = Source(center={"0": 4.0, "y": 1.0}, scale={"x1": 2.0, "y": 0.5}, clip=2.5)
    data = from_arrays(X, Y, ["a"] * 4, source=source)
    np.testing.assert_allclose(data.features, [[-2.5, 1], [-1, 2], [1, 2.5], [2.5, 2.5]])
    np.testing.assert_allclose(data.targets, [-1, 1, 3, 5])
    every = from_arrays(X, Y, ["a"] * 4, source=Source(center={"x": 1.0}, scale={"x": 2.0}))
    np.testing.assert_allclose(every.features, (X - 1) / 2)


@pytest.mark.parametrize("sparsely", [False, True])
def test_unit_rows_have_norm_one_whatever_the_other_rows_are(sparsely: bool) -> None:
    x = np.array([[3.0, 4.0], [0, 0], [1e30, 1e30], [-2, 0]])
    data = from_arrays(
        sparse.csr_matrix(x) if sparsely else x,
        Y,
        ["a"] * 4,
        source=Source(scale={"1": 2.0}, unit_rows=True),
    )
    found = data.features.toarray() if sparsely else data.features.numpy()
    root, half = np.sqrt(0.5) * np.sqrt(8 / 5), 1 / np.sqrt(5)
    expected = [[3 / np.sqrt(13), 2 / np.sqrt(13)], [0, 0], [root, half], [-1, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert "each row divided by its l2 norm" in data.notes


def test_unit_rows_after_gaps_are_filled() -> None:
    x = [[np.nan, 4.0], [1.0, 0.0]]
    source = Source(missing="constant", fill={"0": 3.0}, unit_rows=True)
    data = from_arrays(x, [0.5, 1.5], ["a", "a"], source=source)
    np.testing.assert_allclose(data.features, [[0.6, 0.8], [1, 0]], rtol=1e-6)
    with pytest.raises(DataError, match='fill gaps with missing = "constant"'):
        Source(missing="client-median", unit_rows=True)


def test_levels_of_a_numeric_column() -> None:
    x = np.array([[1.0, 9.0], [3.0, 8.0], [1.0, 7.0]])
    data = from_arrays(x, [0.5] * 3, [0, 0, 1], source=Source(levels={"0": ("1", "2", "3")}))
    np.testing.assert_array_equal(data.features, [[1, 0, 0, 9], [0, 0, 1, 8], [1, 0, 0, 7]])
    with pytest.raises(DataError, match=r"row 1 .*client '0': column '0': found '3', .* declare"):
        from_arrays(x, [0.5] * 3, [0, 0, 1], source=Source(levels={"0": ("1", "2")}))


def test_sparse_rows_stay_sparse_and_are_scaled() -> None:
    x = sparse.random_array((50, 2000), density=0.01, format="csc", rng=0)
    owner = np.arange(50) % 7
    source = Source(scale={"x": 2.0}, clip=0.3)
    data = from_arrays(x, np.arange(50) / 2, owner, source=source)
    assert isinstance(data.features, sparse.csr_matrix)
    assert data.features.dtype == np.float32
    order = np.argsort(owner, kind="stable")
    expected = np.minimum(x.toarray()[order] / 2, 0.3)
    np.testing.assert_allclose(data.features.toarray(), expected, rtol=1e-6)
    built = from_arrays(x.toarray(), np.arange(50) / 2, owner, source=Source(sparse=True))
    assert isinstance(built.features, sparse.csr_matrix)
    assert built.features.nnz == x.nnz
    with pytest.raises(DataError, match=r"center would fill .*; declare scale"):
        from_arrays(x, np.arange(50) / 2, owner, source=Source(center={"x": 1.0}))


def test_pixels_are_divided_by_255_but_codes_are_not(tmp_path: Path) -> None:
    images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
    data = load(save(tmp_path / "images.npz", X=images))
    assert data.spec.shape == (2, 3)
    np.testing.assert_allclose(data.features[0], images[1] / 255, rtol=1e-6)
    assert "uint8 images divided by 255" in data.notes
    codes = load(save(tmp_path / "codes.npz", X=images.reshape(4, 6)))
    np.testing.assert_array_equal(codes.features[0], images.reshape(4, 6)[1])
    shaped = load(tmp_path / "codes.npz", Source(shape=(3, 2)))
    assert shaped.features.shape == (4, 3, 2)


@pytest.mark.parametrize("kind", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_npz_round_trip(tmp_path: Path, kind, dtype) -> None:
    path = tmp_path / "toy.v1.npz"
    split = np.array([0, 0, 1, 1], dtype=np.int8)
    kind(path, X=X.astype(dtype), y=Y, client=CLIENT, split=split, feature_names=["a", "b"])
    data = load(path)
    assert (data.title, data.names) == ("toy", ("3", "7"))
    assert data.features.dtype == torch.float32
    np.testing.assert_array_equal(data.features, X[[1, 3, 0, 2]])
    np.testing.assert_array_equal(data.source_split, [0, 1, 0, 1])
    train, test = data.split_by_source()
    assert (train.counts.tolist(), test.counts.tolist()) == ([1, 1], [1, 1])
    chosen = load(path, Source(features=("b",)))
    np.testing.assert_array_equal(chosen.features, X[[1, 3, 0, 2], 1:])


def test_npz_by_column_sparse_and_with_targets_as_clients(tmp_path: Path) -> None:
    by_column = load(save(tmp_path / "f.npz", X=np.asfortranarray(X)))
    np.testing.assert_array_equal(by_column.features, X[[1, 3, 0, 2]])
    csr = sparse.csr_matrix(X)
    np.savez(
        tmp_path / "s.npz", y=Y, client=CLIENT, X_data=csr.data, X_indices=csr.indices,
        X_indptr=csr.indptr, X_shape=csr.shape,
    )  # fmt: skip
    data = load(tmp_path / "s.npz")
    np.testing.assert_array_equal(data.features.toarray(), X[[1, 3, 0, 2]])
    several = np.array([[1, np.nan], [2, 5], [3, 6], [4, np.nan]])
    np.savez(tmp_path / "t.npz", X=X, y=several)
    data = load(tmp_path / "t.npz", Source(targets_are_clients=True))
    assert (data.names, data.counts.tolist()) == (("y0", "y1"), [4, 2])


def cells(*values: np.ndarray) -> np.ndarray:
    held = np.empty((1, len(values)), dtype=object)
    held[0] = [value if sparse.issparse(value) else np.asarray(value) for value in values]
    return held


@pytest.mark.parametrize("names", [("X", "Y"), ("feature", "label")])
def test_mat_round_trip(tmp_path: Path, names) -> None:
    path = tmp_path / "toy.mat"
    x, y = cells(X[:3], X[3:], np.zeros((0, 2))), cells(Y[:3, None], Y[3:, None], np.zeros((0, 1)))
    io.savemat(path, {names[0]: x, names[1]: y})
    data = load(path)
    assert (data.names, data.counts.tolist()) == (("0", "1", "2"), [3, 1, 0])
    np.testing.assert_array_equal(data.features, X)
    np.testing.assert_array_equal(data.targets, Y)


def test_mat_with_sparse_cells_stays_sparse(tmp_path: Path) -> None:
    path = tmp_path / "toy.mat"
    x = cells(sparse.csc_matrix(X[:2]), sparse.csc_matrix(X[2:]))
    io.savemat(path, {"X": x, "Y": cells(Y[:2], Y[2:])})
    data = load(path)
    assert isinstance(data.features, sparse.csr_matrix)
    np.testing.assert_array_equal(data.features.toarray(), X)


def test_memory_map_holds_the_same_rows_and_is_written_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "toy.npz", split=[0, 1, 0, 1])
    folder = tmp_path / "mapped"
    plain, mapped = load(path), load(path, Source(memory_map=str(folder)))
    assert sorted(p.name for p in folder.iterdir()) == ["features.npy", "split.npy", "targets.npy"]
    np.testing.assert_array_equal(plain.features, mapped.features)
    np.testing.assert_array_equal(plain.targets, mapped.targets)
    np.testing.assert_array_equal(plain.source_split, mapped.source_split)
    mapped.features[0] = 99.0
    assert np.load(folder / "features.npy").max() < 99
    again = load(path, Source(memory_map=str(folder)))
    np.testing.assert_array_equal(plain.features, again.features)
    (folder / "precious.txt").write_text("keep")
    refused("holds other files; name a new", load, path, Source(memory_map=str(folder)))
    assert (folder / "precious.txt").exists()
    refused("expected a folder", load, path, Source(memory_map=str(tmp_path / "no" / "such")))
    with pytest.raises(DataError, match="leave memory_map out"):
        from_arrays(
            sparse.csr_matrix(X), Y, CLIENT, source=Source(memory_map=str(tmp_path / "other"))
        )


def test_a_failed_load_keeps_an_earlier_map(tmp_path: Path) -> None:
    folder = tmp_path / "mapped"
    load(save(tmp_path / "good.npz"), Source(memory_map=str(folder)))
    before = np.load(folder / "features.npy")
    bad = X.copy()
    bad[2, 1] = np.inf
    refused("inf", load, save(tmp_path / "bad.npz", X=bad), Source(memory_map=str(folder)))
    np.testing.assert_array_equal(np.load(folder / "features.npy"), before)
    assert len(list(tmp_path.iterdir())) == 3


def test_no_room_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"no memory for features .* set memory_map"):
        assemble._in_memory("features", (1 << 50, 28), np.float32)

    def full(*_: int) -> None:
        raise OSError("No space left on device")

    path = save(tmp_path / "toy.npz")
    monkeypatch.setattr("os.posix_fallocate", full)
    refused("no space for", load, path, Source(memory_map=str(tmp_path / "mapped")))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_changes_between_the_two_passes_is_refused() -> None:
    seen = []

    def read(_: bool):
        seen.append(1)
        name = ("a",) if len(seen) == 1 else ("b",)
        yield Batch(np.arange(2), name, np.zeros(2, int), np.ones((2, 1)), np.ones(2))

    table = Table("moving.csv", (1,), Columns(range(1)), read)
    with pytest.raises(DataError, match=r"moving.csv: changed while it was read; read it again"):
        assemble.assemble(table, Source(), title="moving")


def changed(at, value, dtype=np.float32) -> np.ndarray:
    x = X.astype(dtype)
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("arrays", "source", "words"),
    [
        ({"X": changed((2, 1), np.nan)}, Source(), ["row 2", "'7'", "column '1'", "drop"]),
        ({"X": changed((2, 1), np.inf)}, Source(), ["row 2", "'7'", "column '1'", "inf"]),
        ({"X": changed((2, 1), np.inf)}, Source(clip=1.0), ["row 2", "column '1'", "inf"]),
        ({"X": changed((2, 1), np.inf)}, Source(sparse=True), ["row 2", "column '1'", "inf"]),
        ({"X": changed((1, 0), 1e300, float)}, Source(), ["row 1", "1e+300", "float32", "scale"]),
        ({"y": [1, 2, np.nan, 4]}, Source(), ["row 2", "'7'", "target is missing", "drop"]),
        ({"y": [1, 2, np.inf, 4]}, Source(), ["row 2", "'7'", "inf", "correct"]),
        ({"y": [0, 1, 5, 2]}, Source(classes=3), ["row 2", "'7'", "label 5", "0..2", "classes="]),
        ({"y": [0, 1, -1, 1]}, Source(task="binary"), ["row 2", "label -1", "0..1"]),
        ({"y": [0, 1, 0.5, 1]}, Source(task="binary"), ["row 2", "label 0.5", "correct"]),
        ({"y": list("abca")}, Source(classes=("a", "b")), ["row 2", "'c'", "a, b", "correct"]),
        ({"y": list("abca")}, Source(), ["text", "'a'", "declare the classes"]),
        ({"y": [0, 5, -4, 2]}, Source(), ["-4", "5", 'task="regression"']),
        ({"y": [0, 1, 5, 2]}, Source(task="binary", classes=3), ["3 classes", "binary", "correct"]),
        ({"y": Y}, Source(task="regression", classes=3), ["3 classes", "regression", "correct"]),
        ({"y": [[0.5, 1]] * 4}, Source(), ["2 targets", "targets_are_clients"]),
        ({"y": [[0, 1]] * 4}, Source(task="binary"), ["binary", "one target", "choose"]),
        ({"y": [0, 1, 1, 0]}, Source(scale={"y": 2.0}), ["constant", "binary", "leave"]),
        ({"y": Y[:3]}, Source(), ["X has 4", "y has 3", "the same number"]),
        ({"split": [0, 1, 2, 0]}, Source(), ["row 2", "split is", "0 (train)"]),
        ({"client": ["a", "", "a", "b"]}, Source(), ["row 1", "client is empty", "give"]),
        ({"client": [0.5, 1, 2, 3]}, Source(), ["row 0", "0.5", "whole number"]),
        ({"client": [np.nan, 1, 2, 3]}, Source(), ["row 0", "empty"]),
        ({"client": np.zeros((4, 2))}, Source(), ["(4, 2)", "one label per row"]),
        ({}, Source(client="school"), ["no array 'school'", "client", "set client"]),
        ({}, Source(features=("2",)), ["no column '2'", "0..1"]),
        ({}, Source(scale={"age": 2.0}), ["no column 'age'", "0..1"]),
        ({}, Source(shape=(3, 3)), ["(2,)", "(3, 3)", "declare"]),
        ({"X": X.astype(str)}, Source(), ["<U", "expected numbers", "save"]),
        ({"X": X[:, :0]}, Source(), ["no features", "at least one"]),
        ({"X": Y}, Source(), ["(4,)", "(rows, features)"]),
        ({"X": np.array([[1, "a"]], dtype=object)}, Source(), ["object", "numbers", "save"]),
        ({"y": np.array([1, None] * 2, dtype=object)}, Source(), ["allow_pickle", "damaged"]),
        ({"X": X[:0], "y": Y[:0], "client": CLIENT[:0]}, Source(), ["no clients", "at least one"]),
        ({"X": changed((slice(None), 0), np.nan)}, Source(missing="drop"), ["4 dropped", "no cli"]),
    ],
)  # fmt: skip
def test_bad_npz_is_refused(tmp_path: Path, refuse, arrays, source, words) -> None:
    message = refuse(save(tmp_path / "bad.npz", **arrays), source)
    for word in words:
        assert word in message


def test_rows_with_gaps_are_dropped_and_counted(tmp_path: Path) -> None:
    path = save(tmp_path / "gaps.npz", X=changed((2, 1), np.nan), y=[1, np.nan, 3, 4])
    data = load(path, Source(missing="drop"))
    assert (data.names, data.counts.tolist()) == (("3", "7"), [1, 1])
    assert data.notes == ("2 rows with gaps dropped",)
    assert data.targets.tolist() == [4, 1]


def cut(path: Path, share: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
def test_truncated_npz_and_mat_are_refused(tmp_path: Path, refuse, share) -> None:
    x = np.random.default_rng(0).normal(size=(300, 5))
    path = save(tmp_path / "cut.npz", X=x, y=x[:, 0], client=np.zeros(300, int))
    assert "fetch it again" in refuse(cut(path, share))
    path = tmp_path / "cut.mat"
    io.savemat(path, {"X": cells(x, x), "Y": cells(x[:, 0], x[:, 0])}, do_compression=True)
    refuse(cut(path, share))


def test_damaged_npz_is_refused(tmp_path: Path, refuse) -> None:
    path = save(tmp_path / "damaged.npz", X=np.ones((5000, 2)), y=np.ones(5000), client=[0] * 5000)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("X.npy").header_offset + 2000
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    assert "fetch it again" in refuse(path)


def test_other_files_are_refused(tmp_path: Path, refuse) -> None:
    assert "no such file" in refuse(tmp_path / "absent.npz")
    (tmp_path / "a.xlsx").write_text("")
    assert "save the sheet of the rows as CSV" in refuse(tmp_path / "a.xlsx")
    (tmp_path / "a.dta").write_text("")
    assert "pandas.read_stata('a.dta').to_parquet('a.parquet')" in refuse(tmp_path / "a.dta")
    (tmp_path / "a.doc").write_text("")
    assert "supported are .csv" in refuse(tmp_path / "a.doc")
    np.save(tmp_path / "a.npy", X)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    assert "np.savez" in refuse(tmp_path / "a.npz")
    io.savemat(tmp_path / "a.mat", {"Z": X})
    assert "variables are Z" in refuse(tmp_path / "a.mat")
    io.savemat(tmp_path / "b.mat", {"X": X, "Y": Y})
    assert "expected cell arrays" in refuse(tmp_path / "b.mat")
    io.savemat(tmp_path / "c.mat", {"X": cells(X, X[:, :1]), "Y": cells(Y, Y)})
    assert "client '1' has rows of shape (1,)" in refuse(tmp_path / "c.mat")
    io.savemat(tmp_path / "d.mat", {"X": cells(X, X), "Y": cells(Y, Y[:3])})
    assert "client '1' has 4 rows of features and 3 targets" in refuse(tmp_path / "d.mat")
    io.savemat(tmp_path / "e.mat", {"X": cells(X, changed((1, 1), np.nan)), "Y": cells(Y, Y)})
    assert "row 1 (from 0) of its cell, client '1': column '1'" in refuse(tmp_path / "e.mat")
    io.savemat(tmp_path / "f.mat", {"X": cells(X, "words"), "Y": cells(Y, Y)})
    assert "features of client '1'" in refuse(tmp_path / "f.mat")
    assert "one table" in refuse(tmp_path / "c.mat", Source(targets_are_clients=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1.0, 2.0], [3.0]], [0.5, 1], [0, 0]), "toy: row 1 .* has 1 values, row 0 has 2"),
        (([[1.0, "a"]], [0.5], [0]), "toy: row 0 .*, column 1: found 'a', expected a number"),
        ((X, Y, [1, "1", 2, 3]), "duplicate client name '1', once as a number"),
        ((X, Y, [1, None, 2, 3]), "row 1 .*client is empty"),
        ((X, Y, CLIENT[:3]), "client has 3"),
        (([1.0, 2.0], [0.5, 1], [0, 0]), r"X has shape \(2,\)"),
        ((X * 1j, Y, CLIENT), "complex.* convert"),
    ],
)
def test_bad_arrays_are_refused(arguments, words) -> None:
    refused(words, from_arrays, *arguments, title="toy")


def test_bad_names_are_refused() -> None:
    with pytest.raises(DataError, match="duplicate client name 'a'; name each"):
        from_arrays(X, Y, [0, 1, 0, 1], names=("a", "a"))
    refused(r"indices 0..1 into them", from_arrays, X, Y, CLIENT, names=("a", "b"))
    refused("not Unicode text", from_arrays, X, Y, ["\ud800", "b", "b", "b"])
    refused("3 column names for 2 columns", from_arrays, X, Y, CLIENT, columns=("a", "b", "c"))


@pytest.mark.parametrize(
    "options",
    [
        {"task": "ranking"},
        {"missing": "fill"},
        {"clip": 0.0},
        {"scale": {"0": 0.0}},
        {"center": {"0": float("nan")}},
        {"classes": 1},
        {"classes": ()},
        {"classes": ("a", "a")},
        {"features": ("0", "0")},
        {"levels": {"a": "abc"}},
        {"target": ()},
        {"sparse": True, "memory_map": "folder"},
    ],
)
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(DataError):
        Source(**options)


@pytest.mark.parametrize(
    ("name", "task", "outputs", "clients", "rows", "shape", "spread"),
    REAL,
    ids=[real[0] for real in REAL],
)
def test_real_sets_have_the_published_sizes(
    shared_data, name, task, outputs, clients, rows, shape, spread
) -> None:
    # heart has gaps in every column after the third
    source = Source(features=("0", "1", "2")) if name == "heart" else Source()
    data = load(shared_data(f"{name}/{name}.npz"), source)
    assert data.names == tuple(str(k) for k in range(clients))
    assert data.spec.shape == tuple(data.features.shape[1:]) == shape
    assert (data.spec.task, data.spec.outputs, len(data)) == (task, outputs, clients)
    assert data.features.shape[0] == rows
    assert (data.counts.min(), int(np.median(data.counts)), data.counts.max()) == spread


def test_heart_with_gaps_names_the_first_and_drops_on_demand(shared_data) -> None:
    path = shared_data("heart/heart.npz")
    refused(r"heart.npz: row 87 .*client '0': column '12': .*drop", load, path)
    ten = tuple(str(column) for column in range(10))
    data = load(path, Source(features=ten, missing="drop", classes=2))
    assert data.counts.tolist() == [303, 261, 46, 130]
    assert data.notes == ("180 rows with gaps dropped",)


def test_school_mat_equals_school_npz(shared_data) -> None:
    cell = load(shared_data("school/raw_sample/school.mat"))
    flat = load(shared_data("school/school.npz"))
    assert cell.spec == flat.spec
    assert cell.names == flat.names
    np.testing.assert_array_equal(cell.offsets, flat.offsets)
    assert torch.equal(cell.features, flat.features)
    assert torch.equal(cell.targets, flat.targets)


def test_mat_samples(shared_data) -> None:
    mocha = load(shared_data("landmine/raw_sample/mocha_small.mat"))
    assert (len(mocha), mocha.features.shape, mocha.spec.task) == (29, (1464, 9), "binary")
    assert set(mocha.targets.tolist()) == {0.0, 1.0}
    assert "labels -1 and +1 read as 0 and 1" in mocha.notes
    turned = load(shared_data("landmine/raw_sample/mocha_small.mat"), Source(positive=-1))
    assert torch.equal(mocha.targets, 1 - turned.targets)
    landmine = load(shared_data("landmine/raw_sample/LandmineData_sample.mat"))
    assert (len(landmine), landmine.features.shape, landmine.spec.task) == (29, (1160, 9), "binary")


def test_exam_gives_the_published_centralised_error(shared_data) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    data = load(shared_data("exam/exam.npz"))
    errors = []
    for seed in range(5):
        train, test = data.split(0.25, seed)
        model = linear.Ridge(alpha=1.0).fit(train.features.numpy(), train.targets.numpy())
        residual = model.predict(test.features.numpy()) - test.targets.numpy()
        errors.append(np.sqrt(np.mean(residual**2)))
    assert np.mean(errors) == pytest.approx(0.786, abs=0.013)


def test_every_option_can_be_written_in_a_plan(tmp_path: Path) -> None:
    source = Source(
        splits=("train", "held_out"),
        text="indices",
        vocabulary="words.txt",
        vocabulary_size=10_000,
        tokens="spaces",
        bag="counts",
        length=20,
        tags=("python", "c#"),
        size=(32, 32),
    )
    choice = DataConfig(name="so.sqlite", source=source, clients=400)
    text = to_toml({"data": to_table(choice)})
    assert from_table(DataConfig, tomllib.loads(text)["data"], "data") == choice
    images = DataConfig(name="celeba.json", source=Source(images="raw", size=(84, 84)))
    assert from_table(DataConfig, to_table(images), "data") == images


def test_a_choice_takes_the_first_clients_of_any_file(tmp_path: Path, leaf_file) -> None:
    files = [
        save(tmp_path / "a.npz"),
        leaf_file(tmp_path / "b.json", v=([[1]], [0]), w=([[2]], [1])),
    ]
    for path in files:
        data = DataConfig(name=str(path), clients=1).open()
        assert len(data) == 1
        assert any("1 of 2 clients kept" in note for note in data.notes)


BAD_CSR = {
    "index too large": {"X_indices": np.array([0, 1, 5, 2, 1, 0], dtype=np.int32)},
    "index below zero": {"X_indices": np.array([0, 1, -1, 2, 1, 0], dtype=np.int32)},
    "indptr out of order": {"X_indptr": np.array([0, 5, 2, 3, 4, 5, 6], dtype=np.int32)},
    "indptr that ends with 0": {"X_indptr": np.array([0, 5, 2, 10**9, 4, 5, 0], dtype=np.int32)},
    "indptr below zero": {"X_indptr": np.array([0, -4, 2, 3, 4, 5, 6], dtype=np.int32)},
    "shape of floats": {"X_shape": np.array([6.0, 3.5])},
    "shape without axes": {"X_shape": np.array(6)},
    "absurd shape": {"X_shape": np.array([6, 10**15])},
}


@pytest.mark.parametrize("bad", BAD_CSR.values(), ids=BAD_CSR)
def test_a_sparse_matrix_that_lies_is_refused(tmp_path, bad):
    """Compiled kernels read memory by these indices."""
    arrays = {
        "X_data": np.ones(6, dtype=np.float32),
        "X_indices": np.array([0, 1, 2, 2, 1, 0], dtype=np.int32),
        "X_indptr": np.arange(7, dtype=np.int32),
        "X_shape": np.array([6, 3]),
        "y": np.arange(6.0),
        "client": np.array([0, 0, 1, 1, 2, 2]),
    }
    path = tmp_path / "rows.npz"
    np.savez(path, **arrays)
    assert load(path).spec.features == 3
    np.savez(path, **(arrays | bad))
    with pytest.raises(DataError, match=r"rows\.npz: X_data, X_indices, .* are no CSR matrix"):
        load(path)
