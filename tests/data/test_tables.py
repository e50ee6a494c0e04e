import datetime
import gzip
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from scipy import sparse

from coterie.data import delimited
from coterie.data.cells import read_numbers
from coterie.data.federated import DataError
from coterie.data.load import Source, load
from coterie.data.tables import UNDECLARED_COLUMNS

TEXT = """client,age,city,y,dose
b,30,rome,1.5,0.1
a,41,oslo,2.5,0.2
b,52,oslo,3.5,0.3
a,63,rome,4.5,0.4
"""
CITIES = Source(levels={"city": ("rome", "oslo", "lima")})


def write(path: Path, text: str) -> Path:
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def write_any(folder: Path, suffix: str) -> Path:
    path = folder / f"toy{suffix}"
    if suffix == ".parquet":
        parquet.write_table(
            pa.table(
                {
                    "client": ["b", "a", "b", "a"],
                    "age": pa.array([30, 41, 52, 63], pa.int16()),
                    "city": pa.array(["rome", "oslo", "oslo", "rome"]).dictionary_encode(),
                    "y": [1.5, 2.5, 3.5, 4.5],
                    "dose": pa.array([0.1, 0.2, 0.3, 0.4], pa.float32()),
                }
            ),
            path,
        )
        return path
    return write(path, TEXT.replace(",", "\t") if "tsv" in suffix else TEXT)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet"])
def test_round_trip_with_declared_levels(tmp_path: Path, suffix) -> None:
    path = write_any(tmp_path, suffix)
    data = load(path, CITIES)
    assert (data.title, data.names, data.counts.tolist()) == ("toy", ("b", "a"), [2, 2])
    expected = [[30, 1, 0, 0, 0.1], [52, 0, 1, 0, 0.3], [41, 0, 1, 0, 0.2], [63, 1, 0, 0, 0.4]]
    np.testing.assert_allclose(data.features, expected, rtol=1e-6)
    assert data.targets.tolist() == [1.5, 3.5, 2.5, 4.5]
    assert (data.spec.task, data.notes) == ("regression", ())
    mapped = load(path, Source(**{**vars(CITIES), "memory_map": str(tmp_path / "mapped")}))
    np.testing.assert_array_equal(mapped.features, data.features)
    assert load(path, Source(sparse=True, features=("dose",))).is_sparse


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_text_columns_without_levels_are_left_out_by_name(tmp_path: Path, suffix) -> None:
    data = load(write_any(tmp_path, suffix))
    assert data.features.shape == (4, 2)
    assert data.notes == ("text columns without declared levels left out: city",)


def test_declared_features_and_constants(tmp_path: Path) -> None:
    source = Source(
        features=("dose", "age"), center={"age": 41.0, "y": 1.5}, scale={"age": 11.0}, clip=1.0
    )
    data = load(write(tmp_path / "toy.csv", TEXT), source)
    np.testing.assert_allclose(data.features[:, 0], [0.1, 0.3, 0.2, 0.4], rtol=1e-6)
    assert data.features[:, 1].tolist() == [-1, 1, 0, 1]
    assert data.targets.tolist() == [0, 2, 1, 3]


def test_clients_split_and_labels(tmp_path: Path) -> None:
    text = 'who,z,split,label\n10, 1 ,0,no\n"9",2,1,yes\n\n10,3e0,1,yes\n'
    source = Source(client="who", target="label", classes=("no", "yes"))
    data = load(write(tmp_path / "toy.csv", text), source)
    assert data.names == ("9", "10")
    assert data.features.tolist() == [[2], [1], [3]]
    assert data.targets.tolist() == [1, 0, 1]
    assert (data.spec.task, data.source_split.tolist()) == ("binary", [1, 0, 1])


@pytest.mark.parametrize(
    ("values", "task", "expected"),
    [
        (["0", "1", "1"], "binary", [0, 1, 1]),
        (["-1", "1", "1"], "binary", [0, 1, 1]),
        (["0", "2", "1"], "multiclass", [0, 2, 1]),
        (["0", "2.0", "1"], "regression", [0, 2, 1]),
    ],
)
def test_task_comes_from_how_targets_are_written(tmp_path: Path, values, task, expected) -> None:
    text = "client,z,y\n" + "".join(f"a,1,{value}\n" for value in values)
    data = load(write(tmp_path / "toy.csv", text))
    assert (data.spec.task, data.targets.tolist()) == (task, expected)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_each_target_becomes_a_client(tmp_path: Path, suffix) -> None:
    path = tmp_path / f"toy{suffix}"
    if suffix == ".csv":
        write(path, "client,z,kidney,liver\n1,1,5,\n2,2,NA,6\n3,3,7,8\n")
    else:
        columns = {"z": [1, 2, 3], "kidney": [5, None, 7], "liver": [None, 6, 8]}
        parquet.write_table(pa.table(columns), path)
    source = Source(target=("kidney", "liver"), targets_are_clients=True, task="regression")
    data = load(path, source)
    assert (data.names, data.counts.tolist()) == (("kidney", "liver"), [2, 2])
    assert data.features.tolist() == [[1], [3], [2], [3]]
    assert data.targets.tolist() == [5, 7, 6, 8]


def test_several_labels(tmp_path: Path) -> None:
    text = "client,z,red,blue\na,1,0,1\nb,2,1,1\na,3,0,0\n"
    data = load(write(tmp_path / "toy.csv", text), Source(target=("red", "blue")))
    assert (data.spec.task, data.spec.outputs) == ("multilabel", 2)
    assert data.targets.tolist() == [[0, 1], [0, 0], [1, 1]]


def test_rows_with_gaps_are_dropped_and_counted(tmp_path: Path) -> None:
    text = "client,z,c,y\na,1,u,1.5\na,,u,2.5\nb,3,,3.5\nb,4,v,NA\nb,5,v,5.5\n"
    source = Source(missing="drop", levels={"c": ("u", "v")})
    data = load(write(tmp_path / "toy.csv", text), source)
    assert data.features.tolist() == [[1, 1, 0], [5, 0, 1]]
    assert data.notes == ("3 rows with gaps dropped",)


def test_a_folder_of_parquet_files(tmp_path: Path, refuse) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        columns = {"client": [1, 2], "z": [part, -part], "y": [0.5, 1.5]}
        columns["__index_level_0__"] = [0, 1]  # the row labels that pandas stores
        parquet.write_table(pa.table(columns), folder / f"part-{part}.parquet")
    data = load(folder)
    assert (data.names, data.features.reshape(-1).tolist()) == (("1", "2"), [0, 1, 2, 0, -1, -2])
    parquet.write_table(pa.table({"client": [1], "z": [3]}), folder / "part-3.parquet")
    assert "the same columns" in refuse(folder)


@pytest.mark.parametrize("seed", range(3))
def test_batches_do_not_change_the_result(tmp_path: Path, monkeypatch, seed) -> None:
    rng = np.random.default_rng(seed)
    x, owner = rng.normal(size=(3000, 3)), rng.integers(0, 40, 3000)
    lines = "".join(
        f"c{k},{','.join(map(repr, row.tolist()))}\n" for k, row in zip(owner, x, strict=True)
    )
    path = write(tmp_path / "toy.csv", "client,u,v,y\n" + lines)
    whole = load(path)
    monkeypatch.setattr(delimited, "BLOCK", 1000)
    pieces = load(path)
    assert whole.names == pieces.names
    np.testing.assert_array_equal(whole.features, pieces.features)
    for k, name in enumerate(whole.names):
        mine = whole.features[whole.offsets[k] : whole.offsets[k + 1]]
        np.testing.assert_array_equal(mine, x[owner == int(name[1:]), :2].astype(np.float32))


def line(number: int, new: str) -> str:
    lines = TEXT.splitlines()
    lines[number - 1] = new
    return "\n".join(lines) + "\n"


LABELS = "client,z,y\na,1,0\nb,2,{}\n"


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("", CITIES, ["no line of column names", "give one"]),
        ("client,z,y\n", Source(), ["no clients", "at least one row"]),
        (TEXT, Source(client="school"), ["no column 'school'", "client, age", "set client"]),
        (TEXT, Source(target="score"), ["no column 'score'", "client, age", "set client"]),
        (TEXT, Source(features=("size",)), ["no column 'size'", "'age'"]),
        (TEXT, Source(levels={"size": ("a",)}), ["no column 'size'", "'age'"]),
        (TEXT, Source(scale={"size": 1.0}), ["no column 'size'", "'age'"]),
        (TEXT, Source(levels={"city": ("rome",)}, scale={"city": 2.0}), ["'city'", "leave"]),
        (line(4, ",52,oslo,3.5,0.3"), CITIES, ["line 4", "client", "empty", "name the client"]),
        (line(4, "  ,52,oslo,3.5,0.3"), CITIES, ["line 4", "client", "empty"]),
        (line(4, "b,old,oslo,3.5,0.3"), CITIES, ["line 4", "'b'", "'age'", "'old'", "levels"]),
        (line(4, "\n\nb,old,oslo,3.5,0.3"), CITIES, ["line 6", "'b'", "'age'", "'old'", "levels"]),
        (line(2, '"b\nc",30,rome,1.5,x'), CITIES, ["line 2", r"'b\nc'", "'dose'", "'x'"]),
        (line(4, "b,,oslo,3.5,0.3"), CITIES, ["line 4", "'b'", "'age'", "gap", 'missing="drop"']),
        (line(4, "b,nan,oslo,3.5,0.3"), CITIES, ["line 4", "'age'", "gap", 'missing="drop"']),
        (line(4, "b,inf,oslo,3.5,0.3"), CITIES, ["line 4", "'b'", "'age'", "inf", "correct"]),
        (line(4, "b,1e99,oslo,3.5,0.3"), CITIES, ["line 4", "'age'", "1e+99", "scale"]),
        (line(4, "b,52,bonn,3.5,0.3"), CITIES, ["line 4", "'b'", "'city'", "'bonn'", "declare"]),
        (line(4, "b,52,,3.5,0.3"), CITIES, ["line 4", "'b'", "gap", 'missing="drop"']),
        (line(4, "b,52,oslo,,0.3"), CITIES, ["line 4", "'b'", "target is missing", "drop"]),
        (line(4, "b,52,oslo,high,0.3"), CITIES, ["line 4", "'b'", "'y'", "'high'", "classes"]),
        (line(4, "b,52,oslo,3.5"), CITIES, ["line 4", "Expected 5 columns, got 4", "as many"]),
        (line(4, "b,52,oslo,3.5,1,2"), CITIES, ["line 4", "Expected 5 columns, got 6", "as many"]),
        (LABELS.format(7), Source(classes=3), ["line 3", "'b'", "label 7", "0..2", "classes="]),
        (LABELS.format("x"), Source(classes=("0", "1")), ["line 3", "'b'", "'x'", "0, 1"]),
        (LABELS.format("x"), Source(), ["line 3", "'b'", "'x'", "--classes"]),
        ("client,z,y\na,word,1\n", Source(), ["no numeric column", "declare"]),
        ("client,split,z,y\na,2,1,1.5\n", Source(), ["line 2", "'a'", "split", "0 (train)"]),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, refuse, text, source, words) -> None:
    for name in ("bad.csv", "bad.csv.gz"):
        message = refuse(write(tmp_path / name, text), source)
        for word in words:
            assert word in message


def test_an_error_far_down_names_its_line(tmp_path: Path, refuse, monkeypatch) -> None:
    monkeypatch.setattr(delimited, "BLOCK", 1000)
    good = "".join(f"c{k % 9},{k},0.5\n" for k in range(5000))
    message = refuse(write(tmp_path / "bad.csv", f"client,z,y\n{good}d,oops,1.5\n{good}"))
    assert "line 5002, client 'd': column 'z': found 'oops'" in message
    message = refuse(write(tmp_path / "bad.csv", f"client,z,y\n{good}d,1\n{good}"))
    assert "line 5002: Expected 3 columns, got 2: d,1" in message
    message = refuse(write(tmp_path / "bad.csv", f"client,z,y\n{good}d,1,\n"))
    assert "line 5002, client 'd': the target is missing" in message


def test_other_damage_is_refused(tmp_path: Path, refuse) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes("client,z,y\né,1,2.5\n".encode() + b"\xff\xfe,1,2.5\n")
    assert "line 3" in refuse(path)
    path = write(tmp_path / "bad.csv.gz", TEXT * 500)
    path.write_bytes(path.read_bytes()[:-60])
    assert "truncated" in refuse(path, CITIES)
    path = write_any(tmp_path, ".parquet")
    path.write_bytes(path.read_bytes()[:-60])
    assert "truncated" in refuse(path, CITIES)
    wide = ",".join(f"z{k}" for k in range(200_000))
    write(tmp_path / "bad.csv", f"client,y,{wide}\n")
    assert "as Parquet or npz" in refuse(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"client": [1, None]}, ["row 2", "client", "empty"]),
        ({"client": [1.5, 2.0]}, ["'client'", "real numbers", "whole numbers"]),
        ({"z": ["1", "x"]}, ["row 2", "'b'", "column 'z'", "'x'"]),
        ({"z": [1.0, None]}, ["row 2", "'b'", "column 'z'", "gap"]),
        ({"z": [1.0, float("inf")]}, ["row 2", "'b'", "column 'z'", "inf"]),
        ({"z": [[1.0], [2.0]]}, ["no numeric column", "declare"]),
    ],
)
def test_bad_parquet_is_refused(tmp_path: Path, refuse, columns, words) -> None:
    columns = {"client": ["a", "b"], "z": [1.0, 2.0], "y": [0.5, 1.5]} | columns
    parquet.write_table(pa.table(columns), tmp_path / "bad.parquet")
    message = refuse(tmp_path / "bad.parquet")
    for word in words:
        assert word in message


def test_numbers_name_clients_the_same_in_every_type(tmp_path: Path) -> None:
    for kind in (pa.int8(), pa.float64(), pa.string()):
        owner = pa.array([10, 9, 10], pa.int64()).cast(kind)
        columns = {"client": owner, "z": [1, 2, 3], "y": [0.5, 1.5, 2.5]}
        parquet.write_table(pa.table(columns), tmp_path / "toy.parquet")
        assert load(tmp_path / "toy.parquet").names == ("9", "10")


MEASURE = """
import sys, threading, time
import torch  # its memory is not that of the file
from coterie.data.federated import DataError
from coterie.data.load import Source, load

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before, highest, done = anonymous(), 0, threading.Event()

def watch():
    global highest
    while not done.wait(0.005):
        highest = max(highest, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
data = load(sys.argv[1], Source(memory_map=sys.argv[2]))
done.set()
watcher.join()
print(len(data), data.features.shape[0], (highest - before) // 1000)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_csv_is_streamed_to_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [",".join(f"{value:.5f}" for value in row) for row in rng.normal(size=(1000, 20))]
    path = tmp_path / "large.csv"
    rows = 0
    with path.open("w") as file:
        file.write(f"client,y,{','.join(f'z{k}' for k in range(19))}\n")
        while file.tell() < 100_000_000:
            file.writelines(f"c{(rows + k) % 997},{text}\n" for k, text in enumerate(lines))
            rows += len(lines)
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "mapped")]
    clients, loaded, grown = map(int, subprocess.check_output(command).split())
    path.unlink()
    assert (clients, loaded) == (997, rows)
    # batches and pyarrow's pool take about 90 MB; the file would add 100 MB, its numbers 45 MB
    assert grown < 150


def test_sparse_tables_stay_within_csr(tmp_path: Path) -> None:
    text = "client,u,v,y\nb,0,1,0.5\na,0,0,1.5\nb,2,0,2.5\n"
    data = load(write(tmp_path / "toy.csv", text), Source(sparse=True))
    assert isinstance(data.features, sparse.csr_matrix)
    assert data.features.nnz == 2
    assert data.features.toarray().tolist() == [[0, 1], [2, 0], [0, 0]]


@pytest.mark.parametrize(
    "highest,task", [(1, "binary"), (5, "multiclass"), (70, "regression"), (99999, "regression")]
)
def test_whole_numbers_in_text_are_classes_only_if_they_are_few(tmp_path, highest, task) -> None:
    """Exam scores from 0 to 70 are no 71 classes; what was read off the rows is said."""
    path = tmp_path / "scores.csv"
    path.write_text(LABELS.format(highest))
    data = load(path)
    assert data.spec.task == task
    kind = "task" if task == "regression" else "classes"
    assert [note.split(" taken")[0] for note in data.assumed] == ["columns", kind]
    declared = load(path, Source(task="regression", features=data.columns))
    assert declared.spec.task == "regression" and not declared.assumed


def test_columns_that_one_clients_cells_decide_are_stated(tmp_path) -> None:
    path, found = tmp_path / "rows.csv", []
    for cell in ("", "text"):  # of client a; the others have gaps there
        rows = [f"{name},{at}.5,{cell if name == 'a' else ''},1.5" for at, name in enumerate("abc")]
        path.write_text("client,x,z,y\n" + "\n".join(rows) + "\n")
        source = Source(task="regression", missing="constant")
        found.append(load(path, source))
        declared = load(path, replace(source, features=("x",)))
        assert declared.spec.shape == (1,) and declared.assumed == ()
    assert [data.spec.shape for data in found] == [(2,), (1,)]
    assert all(data.assumed == (UNDECLARED_COLUMNS,) for data in found)


def odd_table(path: Path, **columns) -> Path:
    rows = {"client": ["a", "b", "a"], "y": [0, 1, 1], "z": [1.0, 2.0, 3.0], **columns}
    parquet.write_table(pa.table(rows), path)
    return path


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("client", {}),
        ("y", {"classes": ("no", "yes")}),
        ("z", {"levels": {"z": ("a", "b")}}),
    ],
)
def test_lists_are_no_text(tmp_path: Path, refuse, column, options) -> None:
    path = odd_table(tmp_path / "a.parquet", **{column: [["a"], ["b"], ["a"]]})
    source = Source(**{"classes": 2, **options})
    assert f"column '{column}' holds list" in refuse(path, source)


def test_lists_are_noted_as_what_they_are(tmp_path: Path) -> None:
    columns = {"l": [[1.0], [2.0], [3.0]], "t": ["u", "v", "w"]}
    data = load(odd_table(tmp_path / "a.parquet", **columns), Source(classes=2))
    assert data.notes == (
        "text columns without declared levels left out: t",
        "columns that are neither numbers nor text left out: l (list<element: double>)",
    )


def test_splits_that_are_coded_by_a_dictionary(tmp_path: Path, refuse) -> None:
    named = pa.array(["train", "test", "test"]).dictionary_encode()
    data = load(odd_table(tmp_path / "a.parquet", split=named), Source(classes=2))
    assert data.source_split.tolist() == [0, 1, 1]
    for values, found in (
        ([0, None, 1], "the split is missing; expected 0 (train)"),
        ([0, 2, 1], "the split is 2; expected 0 (train)"),
        (["train", "later", "test"], "the split is 'later'; expected 0 (train)"),
    ):
        path = odd_table(tmp_path / "b.parquet", split=values)
        assert found in refuse(path, Source(classes=2))


GAPPY = """client,age,city,day,y
a,30,rome,2020-01-03,1
a,,oslo,2020-02-01,2
a,50,,,3
b,,lima,2021-12-31,4
b,NA,rome,2021-12-30,5
c,10,rome,2020-01-01,
"""


def gappy(tmp_path, **options):
    path = write(tmp_path / "gappy.csv", GAPPY)
    options = {"task": "regression", "features": ("age", "city", "day")} | options
    source = Source(**options, levels={"city": ("rome", "other")}, dates={"day": "2020-01-01"})
    return load(path, source)


def test_gaps_take_the_median_of_the_client_alone(tmp_path):
    data = gappy(tmp_path, missing="client-median")
    assert list(data.columns) == [
        *("age", "city=rome", "city=other", "day.year", "day.month", "day.weekday", "day.days")
    ]
    assert data.counts.tolist() == [3, 2, 0]  # the row of c has no target
    age, days = data.features[:, 0].tolist(), data.features[:, 6].tolist()
    assert age == [30, 40, 50, 0, 0]  # b has no age at all
    assert days == [2, 31, 16.5, 730, 729]
    assert data.features[:, 1:3].tolist() == [[1, 0], [0, 1], [0, 1], [0, 1], [1, 0]]
    assert data.scaling["fills"][:, 0].tolist() == [40, 0, 0]
    assert "1 row without a target dropped" in data.notes
    assert "gaps in 4 rows filled with the median of the client's rows" in data.notes


def test_rows_of_others_do_not_move_a_clients_fills(tmp_path):
    before = gappy(tmp_path, missing="client-median")
    path = write(tmp_path / "other.csv", GAPPY.replace("b,NA,", "b,77,"))
    source = Source(
        task="regression",
        features=("age", "city", "day"),
        missing="client-median",
        levels={"city": ("rome", "other")},
        dates={"day": "2020-01-01"},
    )
    after = load(path, source)
    assert after.features[:3].equal(before.features[:3])
    assert not after.features[3:].equal(before.features[3:])


def test_gaps_take_a_constant_in_the_columns_unit_and_have_an_indicator(tmp_path):
    data = gappy(
        tmp_path,
        missing="constant",
        fill={"age": 80.0},
        ranges={"age": (20, 80)},
        indicators=("age",),
    )
    assert data.features[:, 0].tolist() == [-2, 3, 0, 3, 3]
    assert data.features[:, 1].tolist() == [0, 1, 0, 1, 1]
    assert data.columns[1] == "age.missing"
    plain = gappy(tmp_path, missing="constant", ranges={"age": (20, 80)})
    assert plain.features[:, 0].tolist() == [-2, 0, 0, 0, 0]  # the declared center


def test_parts_of_dates_agree_with_the_calendar(tmp_path):
    days = [datetime.date(2019, 12, 30) + datetime.timedelta(days=at * 97) for at in range(40)]
    lines = [f"a,{day:%d.%m.%Y},{at}" for at, day in enumerate(days)]
    path = write(tmp_path / "d.csv", "\n".join(["client,day,y", *lines]) + "\n")
    data = load(path, Source(task="regression", dates={"day": "2020-06-01 %d.%m.%Y"}))
    origin = datetime.date(2020, 6, 1)
    assert data.features.tolist() == [
        [day.year - 2020, day.month, day.weekday(), (day - origin).days] for day in days
    ]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"dates": {"day": "soon"}}, "expected an origin such as 2020-01-01"),
        ({"ranges": {"age": (3, 3)}}, "low < high"),
        ({"ranges": {"age": (0, 3)}, "center": {"age": 1}}, "declare one of them"),
        ({"fill": {"age": 1}}, "missing = 'error'"),
        ({"indicators": ("age",), "missing": "drop"}, "no row has a gap"),
        ({"missing": "constant", "sparse": True}, "sparse rows are not filled"),
        ({"dates": {"day": "2020-01-01"}, "levels": {"day": ("1",)}}, "declare one of them"),
    ],
)
def test_options_for_gaps_that_contradict_one_another(options, text):
    with pytest.raises(DataError, match=text):
        Source(**options)


def test_a_value_that_is_no_date_is_named(tmp_path):
    path = write(tmp_path / "d.csv", "client,day,y\na,2020-01-01,1\na,yesterday,2\n")
    with pytest.raises(DataError, match=r"line 3.*'yesterday', expected a date"):
        load(path, Source(dates={"day": "2020-01-01"}))


def test_a_title_over_the_table_is_left_out_and_names_lose_their_spaces(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("Report of 2024\nmade by hand\n\n client ; a b;y \nA;1,5;0\nB;2,5;1\n")
    data = load(path, decimal_commas=("a b",))
    assert data.names == ("A", "B") and data.features.flatten().tolist() == [1.5, 2.5]
    assert "left out before the names of the columns: 3 lines" in data.notes
    path.write_text("Report of 2024\n\nclient,a,y\nA,1,0\nB,x\n")
    with pytest.raises(DataError, match="line 5: Expected 3 columns, got 2"):
        load(path)


def test_a_title_of_a_spreadsheet_fills_its_line_with_empty_cells(tmp_path):
    path = write(tmp_path / "t.csv", "Report,,\n,,\nclient,a,y\nA,,0\nA,2,1\n")
    data = load(path, missing="constant")
    assert data.names == ("A",) and data.features.flatten().tolist() == [0, 2]
    assert delimited.layout_of(write(tmp_path / "u.csv", "client,a,y,,\nA,1,0,,\n")).skipped == 0


@pytest.mark.parametrize("text", ['A,"1,0\nA,2,1\n', 'A,"1\n2",0\nA,2,"1\n'])
def test_a_quote_that_is_never_closed_is_refused_with_its_line(tmp_path, text):
    path = write(tmp_path / "t.csv", f"client,a,y\n{text}")
    line = 2 + text.count("\n") - 2 + (text.count("\n") > 2)
    with pytest.raises(DataError, match=f"line {line}: a quote is opened and not closed"):
        load(path)


def test_a_quote_inside_a_value_is_no_opening_one(tmp_path):
    path = write(
        tmp_path / "t.csv", 'client,a,y\n5" pipe,1,0\n5" pipe,2,1\nB,1,0\nsmall" pipe,3,1\n'
    )
    assert load(path).names == ('5" pipe', "B", 'small" pipe')


def test_a_table_of_one_column_has_no_title(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('client\nA\n"B, C"\n"D, E"\n')
    assert delimited.layout_of(path).names == ("client",) and delimited.layout_of(path).skipped == 0


@pytest.mark.parametrize("commas, text", [(False, "0,008"), (True, "0.008")])
def test_a_thousands_group_does_not_begin_with_zero(commas, text):
    numbers, wrong = read_numbers(pa.array([text, text.replace("0", "1", 1)]), commas=commas)
    assert numbers.tolist() == [0.008, 1008] and not wrong.any()
