"""One class against the rest, in every format."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.io import savemat
from tests.data.samples import LABELS, OWNERS, X

from coterie.data.config import DataConfig
from coterie.data.federated import DataError
from coterie.data.load import Source, from_arrays, from_targets, load
from coterie.data.scaling import find_zero_rows, one_class_clients, refuse_labels
from coterie.data.tables import UNDECLARED_COLUMNS

pytestmark = pytest.mark.full


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


# Declared classes are 1, all others 0.


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("classes", [None, 5])
@pytest.mark.parametrize("positive", [3, ("2", 3)])
def test_in_every_format(
    write: Callable[[Path], Path], classes: Any, positive: Any, tmp_path: Path
) -> None:
    data = load(write(tmp_path), Source(positive=positive, classes=classes))
    wanted = [int(one) for one in (positive if isinstance(positive, tuple) else (positive,))]
    assert (data.spec.task, data.spec.outputs, len(data)) == ("binary", 1, 2)
    assert data.targets.dtype == torch.float32
    np.testing.assert_array_equal(data.targets, np.isin(LABELS, wanted))
    assert data.assumed == ((UNDECLARED_COLUMNS,) if write is write_csv else ())
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
    with pytest.raises(DataError, match=r"declare classes by name \(--classes A,B;"):
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
        (Source(positive=(0, 1, 2, 3)), r"positive= names all classes found, 0\.\.3; leave"),
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
    with pytest.raises(DataError, match="the classes found are 2, 5, 7: correct positive="):
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
        ({"positive": 3.0}, r"positive = 3\.0: expected int or str or tuple"),
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


# Fewer rows, the first clients, held-out clients: parts of the data only.


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
    held_out = train.only(np.arange(20, 30))
    assert list(held_out.names) == [str(k) for k in range(20, 30)]
    assert held_out.counts.tolist() == train.counts[20:].tolist()
    assert held_out.spec == replace(train.spec, clients=10)
