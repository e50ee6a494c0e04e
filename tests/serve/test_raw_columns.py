"""Programs that take columns of a table: the same features as the reader of tables."""

from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

from coterie.data.cells import FORMATS
from coterie.data.config import Source
from coterie.data.frames import open_frame
from coterie.data.tables import Unread, open_columns
from coterie.serve.raw_columns import OPSETS, append_results, has_columns, prepend_columns

FILLED = {"missing": "client-median"}
DATES = [
    *("2023-02-28", "2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "2023-02-31"),
    *("2023-1-5", "0001-01-01", "9999-12-31", "1969-12-31", "1970-01-01", "2023-13-01"),
    *("2023-05-06 10:30", "2023-05-06T23:59:59+02:00", "05/11/2023", "5/1/2023 01:02 AM", "x"),
    *("31.12.2020", "", "NA", "?", "2023-00-10", "2023-10-00", "20230105", "2023/05/06"),
    *("31/01/68", "01/02/69", "1/2/99 10:30", "31/02/20", "1/2/2020", "20230231", "20230105 10:15"),
    *("5 Jan 2020", "05 JAN 2020", "5 january 2021", "31 Feb 2020", "5 Okt 2020", "15-Oct-1999"),
    *(
        "5-Sep-2020T10:15",
        "Oct 7, 2020",
        "October 31, 2019 01:02 PM",
        "OCT 7,2020",
        "7 Sept 2020",
        "2020-01-02 ",
    ),
]
DATES += [str(date(1903, 1, 1) + timedelta(days=97 * at)) for at in range(400)]


def model_of(kind, shape):
    """Return a program that gives its rows back."""
    rows, outputs = (
        helper.make_tensor_value_info(name, kind, shape) for name in ("rows", "outputs")
    )
    node = helper.make_node("Identity", ["rows"], ["outputs"])
    graph = helper.make_graph([node], "columns", [rows], [outputs])
    opsets = [helper.make_opsetid(*one) for one in OPSETS.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def features_of(source, columns):
    """Return the features that the reader makes, and those of a program."""
    size = len(next(iter(columns.values())))
    frame = pa.table({"client": ["a"] * size, "y": np.zeros(size), **columns})
    table = open_columns(open_frame(frame), source, Unread())
    wanted = np.concatenate([batch.x for batch in table.read(True)])
    made = model_of(TensorProto.DOUBLE, ["rows", wanted.shape[1]])
    inputs = prepend_columns(made, source, table.columns.names)
    session = InferenceSession(made.SerializeToString())
    given = {}
    for name, column, kind in zip(inputs.names, inputs.columns, inputs.kinds, strict=True):
        number = kind == "number"
        values = columns[column] if number else [one or "" for one in columns[column]]
        given[name] = np.array(values, dtype=float if number else object).reshape(-1, 1)
    return wanted, session.run(None, given)[0]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("more", [{}, {"indicators": ("day",)}, {"gaps": {"day": ("9999-12-31",)}}])
def test_dates_are_read_as_the_reader_reads_them(form, more):
    dates = {"day": f"2020-01-01 {form}".strip()}
    source = Source(features=("day",), dates=dates, **FILLED, **more)
    np.testing.assert_array_equal(*features_of(source, {"day": DATES}))


def test_dates_in_several_formats_are_read_as_the_reader_reads_them():
    dates = {"day": "2020-01-01 %d/%m/%Y | %b %d, %Y | %m/%d/%Y"}
    source = Source(features=("day",), dates=dates, **FILLED)
    np.testing.assert_array_equal(*features_of(source, {"day": DATES}))


def test_dates_that_no_program_reads_are_refused():
    source = Source(features=("day",), dates={"day": "2020-01-01 %j %Y"}, **FILLED)
    with pytest.raises(ValueError, match="'%j %Y' cannot be read by an ONNX program; choose"):
        features_of(source, {"day": DATES})


@pytest.mark.parametrize("levels", [("north", "South", "NA", "other"), ("north", "South", "1")])
@pytest.mark.parametrize("how", [FILLED, {}, {**FILLED, "indicators": ("ward",)}])
@pytest.mark.parametrize("gaps", [{}, {"ward": ("south", "unknown")}])
def test_levels_are_read_as_the_reader_reads_them(levels, how, gaps):
    values = [
        "north",
        " north ",
        "NORTH ",
        " NA",
        " unknown",
        "NORTH",
        "South",
        "south",
        "SOUTH",
        "new",
        "NA",
        "",
        "?",
        "unknown",
        "1.0",
        "Other",
    ]
    source = Source(features=("ward",), levels={"ward": levels}, gaps=gaps, **how)
    np.testing.assert_array_equal(*features_of(source, {"ward": values}))


@pytest.mark.parametrize("how", [FILLED, {"missing": "drop"}, {**FILLED, "indicators": ("age",)}])
def test_numbers_are_read_as_the_reader_reads_them(how):
    values = [1.5, np.nan, -999.0, np.inf, -np.inf, 1e300, 0.0, 1234567.891]
    source = Source(features=("age",), gaps={"age": ("-999", "unknown")}, **how)
    np.testing.assert_array_equal(*features_of(source, {"age": values}))


def test_inputs_are_named_after_columns_and_results_keep_their_names():
    source = Source(features=("outputs", "a b", "age"), levels={"a b": ("x", "other")}, **FILLED)
    made = model_of(TensorProto.DOUBLE, ["rows", 4])
    inputs = prepend_columns(made, source, ())
    assert inputs.names == ("outputs (column)", "a b", "age")
    assert inputs.described()[0]["column"] == "outputs"
    given = {"outputs (column)": [[1.0]], "a b": np.array([["x"]], dtype=object), "age": [[2.0]]}
    found = InferenceSession(made.SerializeToString()).run(None, given)[0]
    assert found.tolist() == [[1.0, 1.0, 0.0, 2.0]]


def test_arrays_have_no_columns():
    assert has_columns(Source(**FILLED), ("a",))
    assert has_columns(Source(levels={"a": ("x", "y")}), ("a=x", "a=y"))
    assert not has_columns(Source(), ("a",)) and not has_columns(Source(**FILLED), ())


@pytest.mark.parametrize("odds", [True, False])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_classes_have_probabilities_and_names(task, odds):
    shape = ["rows"] if task == "binary" else ["rows", 3]
    made = model_of(TensorProto.FLOAT, shape)
    classes = ("no", "yes") if task == "binary" else ("low", "mid", "high")
    append_results(made, task, classes, odds=odds)
    scores = np.array(
        [-1.0, 0.0, 2.0] if task == "binary" else [[0, 1, 2], [3, 1, 0.5]], np.float32
    )
    session = InferenceSession(made.SerializeToString())
    named = [one.name for one in session.get_outputs()]
    assert named == ["outputs", "prediction"] + ["probability"] * odds
    found = dict(zip(named, session.run(None, {"rows": scores}), strict=True))
    expected = ["no", "no", "yes"] if task == "binary" else ["high", "low"]
    assert found["prediction"].tolist() == expected
    if odds and task == "binary":
        np.testing.assert_allclose(found["probability"], 1 / (1 + np.exp(-scores)), rtol=1e-6)
    elif odds:
        wide = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found["probability"], wide, rtol=1e-6)
