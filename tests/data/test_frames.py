"""Frames of pandas, polars and pyarrow are read as the files of their rows are."""

import datetime
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import coterie as ct
from coterie.data.config import Source
from coterie.data.federated import DataError
from coterie.data.frames import is_frame, to_frame
from coterie.data.inspect import inspect
from coterie.data.load import load_unlabelled, read_columns

SOURCE = Source(
    client="hospital",
    target="died",
    features=("age", "stay", "ward", "admitted", "smokes"),
    classes=("no", "yes"),
    levels={"ward": ("surgery", "oncology", "other")},
    dates={"admitted": "2023-01-01"},
    missing="client-median",
    indicators=("age",),
    ranges={"age": (0, 120)},
    clip=3.0,
)


def with_gaps(values, draw):
    return [None if draw.random() < 0.15 else value for value in values]


def rows(count=240):
    draw = np.random.default_rng(5)
    days = (np.datetime64("2023-01-05") + draw.integers(0, 400, count)).tolist()
    wards = np.array(["surgery", "oncology", "cardiology"])[draw.integers(0, 3, count)]
    return pa.table(
        {
            "patient": [f"P{at:04}" for at in range(count)],
            "hospital": [f"H{at:02}" for at in draw.integers(0, 12, count)],
            "age": with_gaps(draw.normal(60, 12, count).tolist(), draw),
            "stay": pa.array(draw.integers(0, 30, count), pa.int32()),
            "ward": with_gaps(wards.tolist(), draw),
            "admitted": pa.array(with_gaps(days, draw), pa.date32()),
            "smokes": pa.array((draw.random(count) < 0.3).astype(np.int8)),
            "died": ["yes" if one else "no" for one in draw.random(count) < 0.4],
        }
    )


def pandas_frame(table):
    pytest.importorskip("pandas")
    return table.to_pandas()


def categories(table):
    """Return a frame of pandas as people have it: categories, timestamps, an index of its own."""
    pandas = pytest.importorskip("pandas")
    found = table.to_pandas()
    found["ward"] = found["ward"].astype("category")
    found["hospital"] = found["hospital"].astype("category")
    found["admitted"] = pandas.to_datetime(found["admitted"])
    found["stay"] = found["stay"].astype("Int64")
    found["age"] = found["age"].astype("Float64")
    return found.set_index("patient")


def objects(table):
    pytest.importorskip("pandas")
    found = table.to_pandas()
    return found.astype({name: object for name in found if found[name].dtype == "str"})


def polars_frame(table):
    return pytest.importorskip("polars").from_arrow(table)


def polars_categories(table):
    polars = pytest.importorskip("polars")
    found = polars.from_arrow(table)
    return found.with_columns(polars.col("ward", "hospital").cast(polars.Categorical))


def large_text(table):
    wide = [
        pa.field(f.name, pa.large_string() if f.type == pa.string() else f.type)
        for f in table.schema
    ]
    return table.cast(pa.schema(wide))  # fmt: skip


def many_batches(table):
    return pa.Table.from_batches(table.to_batches(max_chunksize=7))


class OnlyStream:
    """What any other library of frames gives: the PyCapsule interface alone."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


MAKES = (
    *(lambda table: table, many_batches, large_text, OnlyStream, pandas_frame, categories),
    *(objects, polars_frame, polars_categories),
)


def same(found, expected):
    assert found.spec == expected.spec and list(found.names) == list(expected.names)
    assert list(found.columns) == list(expected.columns)
    assert found.offsets.tobytes() == expected.offsets.tobytes()
    assert found.features.numpy().tobytes() == expected.features.numpy().tobytes()
    assert found.targets.numpy().tobytes() == expected.targets.numpy().tobytes()
    assert found.scaling.keys() == expected.scaling.keys()
    for name, values in expected.scaling.items():
        assert found.scaling[name].tobytes() == values.tobytes()
    assert found.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize("make", MAKES)
def test_a_frame_is_read_bit_for_bit_as_its_files_are(make, tmp_path):
    table = rows()
    csv.write_csv(table, tmp_path / "patients.csv")
    parquet.write_table(table, tmp_path / "patients.parquet")
    found = ct.load(make(table), SOURCE)
    same(found, ct.load(tmp_path / "patients.csv", SOURCE))
    same(found, ct.load(tmp_path / "patients.parquet", SOURCE))
    assert found.source == SOURCE


def test_gaps_have_a_median_that_numpy_gives():
    table = rows()
    found = ct.load(table, SOURCE)
    name = found.names[3]
    ages = [
        a
        for a, h in zip(*(table[c].to_pylist() for c in ("age", "hospital")), strict=True)
        if h == name
    ]
    known = np.clip((np.array([a for a in ages if a is not None]) - 60) / 20, -3, 3)
    start, end = found.offsets[3:5]
    column, gap = (
        found.features[start:end, list(found.columns).index(n)] for n in ("age", "age.missing")
    )
    assert gap.sum() == sum(a is None for a in ages) > 0
    np.testing.assert_allclose(column[gap == 1], np.median(known), rtol=1e-6)  # fmt: skip


def test_options_are_given_by_name():
    table = rows()
    given = {name: getattr(SOURCE, name) for name in ("client", "target", "classes", "features")}
    plain = {"missing": "drop", "levels": SOURCE.levels, "dates": SOURCE.dates}
    found = ct.load(table, **given, **plain)
    same(found, ct.load(table, Source(**given, **plain)))
    same(ct.load(table, Source(missing="drop"), **given, **{**plain, "missing": "drop"}), found)
    assert ct.load(table, SOURCE, clients=3, name="patients").title == "patients"
    assert len(ct.load(table, SOURCE, clients=3)) == 3


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (rows(), {"client": "clinic", "target": "died"}, r"frame: no column 'clinic'"),
        (rows(), {"clint": "hospital"}, r"no option 'clint' of data; did you mean client\?"),
        (pa.table([[1.0], [2.0]], ["a", "a"]), {}, r"two columns are called 'a'"),
        (pa.table({"client": ["a"], "x": ["?"], "y": [1.0]}), {"features": ("x",)}, r"row 0 \("),
        (pa.chunked_array([[1.0, 2.0]]), {}, r"cannot be read as a table"),
        (3.5, {}, r"cannot load float; give a path"),
    ],
)  # fmt: skip
def test_a_bad_frame_is_refused_in_a_line(given, options, message):
    with pytest.raises(DataError, match=message) as raised:
        ct.load(given, **options)
    assert "\n" not in str(raised.value)


def test_columns_of_several_kinds_are_refused():
    pandas = pytest.importorskip("pandas")
    mixed = pandas.DataFrame({"client": ["a", "b"], "x": [1, "two"], "y": [1.0, 2.0]}, dtype=object)
    with pytest.raises(DataError, match=r"frame: DataFrame cannot be read as a table.*one kind"):
        ct.load(mixed)


@pytest.mark.parametrize("make", MAKES)
def test_a_proposal_for_a_frame_is_that_for_its_file(make, tmp_path):
    table = rows()
    parquet.write_table(table, tmp_path / "patients.parquet")
    asked = {"client": "hospital", "target": "died"}
    found, expected = inspect(make(table), **asked), inspect(tmp_path / "patients.parquet", **asked)
    assert found.source == expected.source
    assert found.problems[: len(expected.problems)] == expected.problems or "patient" in str(
        expected.problems
    )


@pytest.mark.parametrize("make", MAKES)
def test_rows_to_be_predicted_come_from_frames(make):
    table = rows()
    found = load_unlabelled(make(table.drop_columns(["died"])), SOURCE)
    expected = ct.load(table, SOURCE)
    # those of gaps are filled by what the run kept, not here
    known = ~np.isnan(found.data.features.numpy())
    assert (found.data.features.numpy()[known] == expected.features.numpy()[known]).all()
    assert not known.all()
    owners = [table["hospital"][int(at)].as_py() for at in found.order]
    assert owners == [found.data.names[k] for k in found.data.owners]


@pytest.mark.parametrize("make", [make for make in MAKES if make is not categories])
def test_columns_are_kept_in_the_order_of_the_frame(make):
    table = rows()
    found = read_columns(make(table), SOURCE, ["patient", "ward"])
    assert found["patient"].to_pylist() == table["patient"].to_pylist()
    assert found["ward"].to_pylist() == table["ward"].to_pylist()
    with pytest.raises(DataError, match="no column 'patients'; did you mean patient"):
        read_columns(make(table), SOURCE, ["patients"])


def test_frames_go_out_as_they_are_asked_for(monkeypatch):
    table = pa.table({"client": ["a", "b"], "error": [0.25, None]})
    assert to_frame(table, "pyarrow") is table
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    assert isinstance(to_frame(table), pandas.DataFrame)
    assert to_frame(table, "polars").to_dicts() == table.to_pylist()
    assert isinstance(to_frame(table, "polars"), polars.DataFrame)
    with pytest.raises(
        ValueError, match="frame = 'panda': expected one of pandas, polars, pyarrow"
    ):
        to_frame(table, "panda")
    monkeypatch.setattr(
        "coterie.data.frames.find_spec", lambda name: None if name != "pyarrow" else name
    )
    assert to_frame(table) is table
    with pytest.raises(ValueError, match="frame = 'pandas': not installed"):
        to_frame(table, "pandas")  # fmt: skip


def test_what_is_no_frame():
    assert not any(map(is_frame, ("a.csv", {"a": [1]}, [1.0], np.zeros((2, 2)), None)))
    assert "polars" not in sys.modules or is_frame(sys.modules["polars"].DataFrame())


def test_dates_of_times_are_those_of_their_day():
    stamps = [datetime.datetime(2023, 5, 6, 23, 59), None]
    table = pa.table({"client": ["a", "a"], "y": [1.0, 2.0], "when": pa.array(stamps)})
    found = ct.load(table, dates={"when": "2023-01-01"}, missing="drop")
    assert found.features.tolist() == [[0.0, 5.0, 5.0, 125.0]]
