import csv
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from coterie.data.federated import DataError
from coterie.data.inspect import inspect
from coterie.data.load import load

ROWS = 240


def rows(seed=0):
    draw = np.random.default_rng(seed)
    for at in range(ROWS):
        age = draw.normal(60, 10)
        yield {
            "patient": f"P{at:05}",
            "hospital": f"H{at % 12}",
            "age": "" if at % 10 == 0 else f"{age:.1f}",
            "sex": ("F", "M")[at % 2],
            "admitted": f"{1 + at % 28:02}/{1 + at % 12:02}/{2022 + at % 3}",
            "weight": f"{70 + at % 9} kg" if at % 4 == 0 else f"{70 + at % 9}",
            "note": f"text {at // 2}",
            "country": "X",
            "empty": "",
            "died": ("no", "yes")[int(age > 60)],
        }


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "patients.csv"
    found = list(rows())
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    return path


def test_columns_of_every_kind_are_recognised(table):
    found = inspect(table)
    assert (found.source.client, found.source.target) == ("hospital", "died")
    assert (found.source.task, found.source.classes) == ("binary", ("no", "yes"))
    assert found.source.features == ("age", "sex", "admitted", "weight")
    assert found.source.units == {"weight": "kg"}
    assert found.source.levels == {"sex": ("F", "M", "other")}
    assert found.source.dates == {"admitted": "2022-01-01 %d/%m/%Y"}
    assert set(found.left_out) == {"patient", "note", "country", "empty"}
    assert found.source.indicators == ("age",)
    assert not found.blocking
    assert (found.rows, found.clients) == (ROWS, 12)


def test_all_problems_are_listed_at_once(table):
    told = "\n".join(inspect(table).problems)
    for part in ("age (10%)", "'patient'", "without the unit 'kg'", "'country'"):
        assert part in told


def test_the_proposal_reads_its_file_and_states_what_it_assumed(table):
    found = inspect(table)
    data = load(table, found.source)
    assert len(data) == 12 and data.features.isfinite().all()
    assert float(data.features.abs().max()) <= 3
    assert set(found.read) <= set(data.assumed)
    assert any("levels of sex" in text for text in data.assumed)


def test_columns_that_were_guessed_are_told_apart_from_those_that_were_given(table):
    guessed = [text for text in inspect(table).problems if "is a guess" in text]
    assert [text.split("'")[1] for text in guessed] == ["hospital", "died"]
    given = inspect(table, client="hospital", target="died").problems
    assert not any("is a guess" in text for text in given)


def test_a_table_in_german(tmp_path):
    path = tmp_path / "t.csv"
    lines = ["Haus;Dosis;Wert;Raucher;Verstorben"]
    for at in range(ROWS):
        house = f"{at % 24:03}" if at % 3 else f"Klinik {at % 24}"
        smoker, died = ("ja", "nein")[at % 2], ("nein", "ja")[at % 5 == 0]
        lines.append(f"{house};{at % 9},5;{at % 7},25;{smoker};{died}")
    path.write_text("\n".join(lines) + "\n", encoding="cp1252")
    found = inspect(path)
    assert (found.source.client, found.source.classes) == ("Haus", ("nein", "ja"))
    assert found.problems.count("numbers are read with a decimal comma in Dosis, Wert") == 1


def test_an_id_is_no_client(table):
    found = inspect(table, client="patient", target="died")
    assert any("it is an id of rows" in text for text in found.blocking)


def test_a_target_that_cannot_be_predicted_is_a_problem(table):
    assert any("never varies" in text for text in inspect(table, target="country").blocking)
    assert any("dates" in text for text in inspect(table, target="admitted").blocking)


def test_unknown_columns_are_named_with_the_nearest(table):
    with pytest.raises(DataError, match="hospital"):
        inspect(table, client="hospitl")


@pytest.mark.parametrize(
    "values, task, classes",
    [
        ([0, 1], "binary", ("0", "1")),
        ([3, 1, 2], "multiclass", ("1", "2", "3")),
        ([0.5, 1.25, 2.0, 7.5], "regression", None),
    ],
)
def test_the_task_of_numbers(tmp_path, values, task, classes):
    size = 60
    parquet.write_table(
        pa.table(
            {
                "school": [f"s{at % 6}" for at in range(size)],
                "x": np.linspace(0, 1, size),
                "day": pa.array(np.arange(size).astype("datetime64[D]")),
                "y": [values[at % len(values)] for at in range(size)],
            }
        ),
        tmp_path / "t.parquet",
    )
    found = inspect(tmp_path / "t.parquet")
    assert (found.source.task, found.source.classes) == (task, classes)
    assert found.source.dates == {"day": "1970-01-01"}
    data = load(tmp_path / "t.parquet", found.source)
    assert data.spec.task == task and len(data) == 6


def test_clients_with_few_rows_are_counted(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{name},{at * 1.5},{at * 0.7}" for name in "abc" for at in range(8)]
    path.write_text("\n".join(["client,x,y", *lines, "d,1.1,2.2"]) + "\n")
    assert any(text.startswith("1 client with fewer") for text in inspect(path).problems)


def test_neither_torch_nor_scipy_is_loaded(table):
    code = (
        f"from pathlib import Path; from coterie.data.inspect import inspect\n"
        f"inspect(Path({str(table)!r}))\n"
        "import sys; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def written(path, columns, size=300):
    """Write a table of clients, targets and other columns, each value by the number of its row."""
    columns = {"h": lambda at: f"H{at % 5}", "y": lambda at: at * 7 % 2, **columns}
    lines = [
        ",".join(columns),
        *(",".join(str(f(at)) for f in columns.values()) for at in range(size)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("none", ["None", "none"])
def test_none_is_a_level_and_a_class_where_many_rows_have_it(tmp_path, none):
    words = (none, "mild", "severe")
    path = written(
        tmp_path / "t.csv", {"y": lambda at: words[at % 3], "pain": lambda at: words[at // 3 % 3]}
    )
    found = inspect(path, client="h", target="y")
    assert set(found.source.classes) == set(words)
    assert set(found.source.levels["pain"]) == {*words, "other"}
    assert any(f"{none!r} is read as a class; if" in text for text in found.problems)
    assert len(load(path, found.source).targets) == 300
    few = {"pain": lambda at: none if at % 60 == 0 else "mild"}
    few = written(tmp_path / "f.csv", few)
    assert not any("class" in text for text in inspect(few, client="h", target="y").problems)


def test_numbers_that_are_codes_by_name_are_categories(tmp_path):
    path = written(
        tmp_path / "t.csv",
        {
            "gender": lambda at: at % 3,
            "zip_code": lambda at: 10000 + at % 60,
            "visits": lambda at: at % 4,
            "dose": lambda at: at % 40,
        },
    )
    found = inspect(path, client="h", target="y")
    assert found.source.levels == {"gender": ("0", "1", "2", "other")}
    assert found.source.features == ("gender", "visits", "dose")
    assert any(text.endswith("give --categories visits") for text in found.problems)
    given = inspect(path, client="h", target="y", categories=("zip_code", "visits"))
    assert len(given.source.levels["zip_code"]) == 31
    assert given.source.levels["visits"] == ("0", "1", "2", "3", "other")
    data = load(path, given.source)
    assert data.features.shape == (300, 41) and set(data.features[:, :4].unique().tolist()) == {
        0,
        1,
    }


def test_columns_and_task_can_be_given(tmp_path):
    path = written(tmp_path / "t.csv", {"id": lambda at: at, "b": lambda at: at % 9, "c": str})
    found = inspect(path, client="h", target="b", task="regression", features=("id",))
    assert (found.source.task, found.source.features) == ("regression", ("id",))
    assert not found.blocking
    assert inspect(path, client="h", target="b").source.task == "multiclass"
    wrong = inspect(path, client="h", target="b", task="binary").blocking
    assert any("has 9 values" in text and "--positive" in text for text in wrong)
    for override in ({"features": ("nn",)}, {"categories": ("idd",)}, {"features": ("h",)}):
        with pytest.raises(DataError, match=r"no such column|is both --client and --features"):
            inspect(path, client="h", target="y", **override)


def test_gaps_are_filled_for_numbers_and_levels_for_categories(table):
    text = "\n".join(inspect(table).problems)
    assert "gaps in age (10%): filled with the median" in text
    path = table.with_name("t.csv")
    found = inspect(
        written(path, {"x": lambda at: "" if at % 9 == 0 else "ab"[at % 2]}), client="h"
    )
    assert any(text == "gaps in x (11%): read as the level 'other'" for text in found.problems)


def test_a_file_per_client(tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    for at in range(3):
        written(folder / f"St. Mary {at}.csv", {"a": lambda at: at % 9}, size=40)
    found = inspect(folder, target="y")
    assert (found.source.client, found.clients, found.source.features) == ("file", 3, ("h", "a"))
    data = load(folder, found.source)
    assert (
        data.names == tuple(f"St. Mary {at}" for at in range(3))
        and data.counts.tolist() == [40] * 3
    )
    assert inspect(folder, client="h", target="y").source.features == ("a",)
    with pytest.raises(DataError, match="can be the client only"):
        inspect(folder, client="h", target="file")
    with pytest.raises(DataError, match="--client-column file takes their names"):
        load(folder)
    parts = tmp_path / "parts"
    parts.mkdir()
    for at in range(3):
        written(parts / f"part-{at:05}.csv", {"a": lambda at: at % 9}, size=40)
    assert inspect(parts, target="y").source.client == "h"


def test_partitioned_parquet_as_pandas_writes_it(tmp_path):
    folder = tmp_path / "rows"
    for at, name in enumerate(("A%2F1", "B")):
        (folder / f"site={name}").mkdir(parents=True)
        rows = {"a": [0.5, 1.5, 2.5] * 4, "y": [0, 1, at] * 4, "__index_level_0__": [*range(12)]}
        parquet.write_table(pa.table(rows), folder / f"site={name}" / "0.parquet")
    found = inspect(folder, client="site", target="y")
    assert found.source.features == ("a",) and not found.left_out
    data = load(folder, found.source)
    assert data.names == ("A/1", "B") and data.counts.tolist() == [12, 12]


def test_dates_in_other_languages_are_left_out_with_the_remedy(tmp_path):
    months = ("janv.", "févr.", "août", "déc.")
    dates = {"d": lambda at: f"{1 + at % 28} {months[at % 4]} {2000 + at % 20}"}
    found = inspect(written(tmp_path / "t.csv", dates), client="h", target="y")
    assert any("'1 janv. 2000': write dates as 2024-01-31" in text for text in found.problems)


def test_a_column_of_iso_and_other_dates_loses_none(tmp_path):
    days = [np.datetime64("2020-01-05") + at * 7 for at in range(90)]
    texts = [str(day) if at % 2 else f"{day.item():%d.%m.%Y}" for at, day in enumerate(days)]
    clock = {"t": lambda at: f"{at // 120}:{at // 2 % 60:02}"}
    path = written(tmp_path / "t.csv", {"d": lambda at: texts[at % 90], **clock})
    found = inspect(path, client="h", target="y")
    assert found.source.dates == {"d": "2020-01-01 %d.%m.%Y"} and not found.source.gaps
    assert any("'0:00': write times of day as numbers" in text for text in found.problems)


@pytest.mark.parametrize("size", [400, 60_000])
def test_dates_in_several_formats_are_all_read(tmp_path, size):
    days = [np.datetime64("2020-01-05") + at for at in range(700)]
    forms = ("%d/%m/%Y", "%Y-%m-%d", "%b %d, %Y", "%d.%m.%Y")

    def written_day(at):  # a format of its own for each quarter of the file
        return f'"{days[at * 31 % 700].item():{forms[at * 4 // size]}}"'

    path = written(tmp_path / "t.csv", {"d": written_day}, size)
    found = inspect(path, client="h", target="y")
    origin, listed = found.source.dates["d"].split(" ", 1)
    assert origin == "2020-01-01" and not found.source.gaps
    assert set(listed.split(" | ")) == {"%d/%m/%Y", "%b %d, %Y", "%d.%m.%Y"}
    assert any("dates are read as" in text and "order" not in text for text in found.problems)
    data = load(path, found.source)
    elapsed = [
        (days[at * 31 % 700] - np.datetime64("2020-01-01")).astype(int) for at in range(size)
    ]
    low, high = found.source.ranges["d.days"]
    scaled = -3 + 6 * (np.array(elapsed) - low) / (high - low)
    order = np.argsort(np.arange(size) % 5, kind="stable")
    np.testing.assert_allclose(data.features[:, 3], scaled[order], atol=1e-5)


def test_two_orders_of_day_and_month_are_not_mixed(tmp_path):
    day = [np.datetime64("2020-01-05") + 11 * at for at in range(60)]
    texts = [f"{d.item():{('%d/%m/%Y', '%m/%d/%Y')[at % 2]}}" for at, d in enumerate(day)]
    columns = {"d": lambda at: texts[at % 60], "x": lambda at: at % 9}
    found = inspect(written(tmp_path / "t.csv", columns), client="h", target="y")
    assert found.source.features == ("x",) and not found.source.gaps
    assert any("in two orders" in text and "write dates as" in text for text in found.problems)


def test_columns_that_repeat_the_client_the_target_or_a_category_are_left_out(tmp_path):
    path = written(
        tmp_path / "t.csv",
        {
            "h_name": lambda at: f"Hospital {at % 5}",
            "h_code": lambda at: 7 * (at % 5),
            "result": lambda at: ("good", "bad")[at * 7 % 2],
            "ward": lambda at: "abc"[at // 4 % 3],
            "ward_no": lambda at: "xyz"[at // 4 % 3],
            "region": lambda at: at % 5 // 2,
        },
    )
    found = inspect(path, client="h", target="y")
    assert found.source.features == ("ward", "region")
    for name, reason in {
        "h_name": "names the client again",
        "h_code": "names the client again",
        "result": "gives the target away",
        "ward_no": "repeats a column: each value goes with one value of 'ward'",
    }.items():
        assert reason in found.left_out[name]
    assert inspect(path, client="h", target="y", features=("h_code",)).source.features == (
        "h_code",
    )


def test_units_with_digits_and_signs(tmp_path):
    units = {"area": "m2", "heat": "°C", "bmi": "kg/m2"}
    columns = {n: lambda at, unit=unit: f"{at}.5 {unit}" for n, unit in units.items()}
    found = inspect(written(tmp_path / "t.csv", columns), client="h", target="y")
    assert found.source.units == {name: unit.lower() for name, unit in units.items()}
    assert load(tmp_path / "t.csv", found.source).features.isfinite().all()


def test_values_far_out_are_told(tmp_path):
    columns = {
        "y": lambda at: 8_888_888 if at % 100 == 7 else at * 7 % 50,
        "income": lambda at: "1e300" if at % 50 == 3 else 1000 + at * 13 % 997,
        "days": lambda at: 9_999_999 if at % 60 == 3 else at * 11 % 83,
    }
    found = inspect(written(tmp_path / "t.csv", columns), client="h", target="y")
    assert found.source.gaps == {"days": ("9999999",)}
    far = [text for text in found.problems if "lie outside" in text]
    assert len(far) == 2
    assert "the target 'y': 1.00% of the values lie outside 0 to 49" in far[0]
    assert "column 'income': 2.00% of the values" in far[1] and "such as 1e+300: cut" in far[1]


def test_many_columns_are_named_in_one_short_line(tmp_path):
    columns = {f"c{k}": lambda at, k=k: at % 37 * (k + 1) + 0.5 for k in range(200)}
    found = inspect(written(tmp_path / "t.csv", columns), client="h", target="y")
    assert len(found.source.features) == 200 and max(map(len, found.read)) < 300
    assert any("c29, ... (200 in all)" in fact for fact in found.read)
    assert max(map(len, load(tmp_path / "t.csv", found.source).notes)) < 300
