"""From a messy table to predictions: init, run, predict."""

import csv
import io
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession

from coterie.cli.main import main
from coterie.data.inspect import READ_OFF
from coterie.planning.plan import Plan
from coterie.serve.export import load_client
from coterie.serve.predict import program_rows

HOSPITALS = 24


def write_rows(path, count, seed, *, labelled):
    draw, found = np.random.default_rng(seed), []
    for at in range(count):
        hospital, age = at % HOSPITALS, draw.normal(60, 12)
        ward = ("cardiology", "surgery", "oncology" if labelled else "neurology")[at % 3]
        odds = (age - 60) / 6 + (hospital % 3) - 1
        row = {
            "patient_id": f"P{at:05}",
            "hospital": f"H{hospital:02}",
            "age": "" if at % 9 == 0 else f"{age:.1f}",
            "ward": "" if at % 31 == 0 else ward,
            "admitted": str(np.datetime64("2023-01-05") + at % 300),
        }
        if labelled:
            row["died"] = "yes" if draw.random() < 1 / (1 + np.exp(-odds)) else "no"
        found.append(row)
    write_csv(path, found)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Run the commands of the story once."""
    folder = tmp_path_factory.mktemp("story")
    write_rows(folder / "patients.csv", 960, 0, labelled=True)
    write_rows(folder / "new.csv", 90, 1, labelled=False)
    plan, run = folder / "plan.toml", folder / "run"
    table = str(folder / "patients.csv")
    asked = ["--client", "hospital", "--target", "died", "--yes", "--out", str(plan)]
    assert main(["init", table, *asked]) == 0
    flags = ["--plan", str(plan), "--epsilon", "8", "--simulation-seed", "1", "--anyway", "--quiet"]
    assert main(["run", *flags, "--out", str(run), "--json"]) == 0
    more = ["--set", "data.source.indicators=[]", "--out", str(folder / "without_indicators")]
    assert main(["run", *flags, *more]) == 0
    (folder / "patients.csv").rename(folder / "moved.csv")  # the run must be enough
    return folder


def read_csv(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def predicted(folder, name, run="run"):
    out = folder / f"{name}.out.csv"
    given = ["predict", str(folder / run), "--data", str(folder / f"{name}.csv")]
    assert main([*given, "--keep", "patient_id", "--out", str(out)]) == 0
    return read_csv(out)


def test_the_plan_declares_what_was_proposed(story):
    source = tomllib.loads((story / "plan.toml").read_text())["data"]["source"]
    assert source["levels"] == {"ward": ["cardiology", "oncology", "surgery", "other"]}
    assert source["features"] == ["age", "ward", "admitted"]
    assert source["missing"] == "client-median" and source["indicators"] == ["age"]
    assert len(source["accepted"]) == 5
    assert source["accepted"][0] == f"choice and format of columns{READ_OFF}"


def test_rows_with_gaps_and_new_categories_are_predicted_like_all_others(story):
    rows = predicted(story, "new")
    assert [row["patient_id"] for row in rows] == [f"P{at:05}" for at in range(90)]
    assert [row["client"] for row in rows] == [f"H{at % HOSPITALS:02}" for at in range(90)]
    assert {row["prediction"] for row in rows} == {"yes", "no"}
    for row in rows:
        assert 0 < float(row["probability"]) < 1
        assert (row["prediction"] == "yes") == (float(row["probability"]) > 0.5)


def test_odd_rows_in_any_order_are_predicted_with_notes(story, capsys):
    whole = {row["patient_id"]: row["decision"] for row in predicted(story, "new")}
    rows = read_csv(story / "new.csv")[50:20:-7]
    odd = [
        {"age": "60,5"},
        {"hospital": ""},
        {"hospital": "H99"},
        {"age": "old"},
        {"admitted": "soon"},
    ]
    write_csv(story / "odd.csv", [*rows, *({**rows[0], **wrong} for wrong in odd)])
    capsys.readouterr()
    found = predicted(story, "odd")
    for row in found[: len(rows)]:
        assert float(row["decision"]) == pytest.approx(float(whole[row["patient_id"]]), abs=1e-5)
    told = capsys.readouterr().err
    assert [row["client"] for row in found[len(rows) :][:3]] == ["H02", "", "H99"]
    assert all(row["prediction"] for row in found)
    given = ["predict", str(story / "run"), "--data", str(story / "odd.csv")]
    assert main([*given, "--keep", "patient_id,ward", "age", "--client", "h2"]) == 2
    assert main([*given, "--keep", "patient_id,ward", "age", "--client", "H02"]) == 0
    assert '"row","client","patient_id","ward","age","prediction"' in capsys.readouterr().out
    assert "1 row names no client: predicted by the shared model" in told
    assert "does not know 1 client (H99)" in told
    assert "'old' (line 10): read as gaps" in told and "'60,5' has a decimal comma" in told
    assert "'soon'" in told


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%m/%d/%Y", "%d %B %Y"])
def test_a_file_of_new_rows_may_have_dates_in_another_format(story, capsys, form):
    rows, whole = read_csv(story / "new.csv"), predicted(story, "new")
    days = [date.fromisoformat(row["admitted"]) if row["admitted"] else None for row in rows]
    for row, day in zip(rows, days, strict=True):
        row["admitted"] = "" if day is None else f"{day:{form}}"
    write_csv(story / "dates.csv", rows)
    found = predicted(story, "dates")
    assert [row["decision"] for row in found] == [row["decision"] for row in whole]
    assert f"dates are read as {form}, not as in training" in capsys.readouterr().err
    # where day and month may be either, nothing is guessed
    for row in rows:
        row["admitted"] = "05/06/2024"
    write_csv(story / "either.csv", rows)
    given = ["predict", str(story / "run"), "--data", str(story / "either.csv")]
    assert main(given) == 2
    assert "values are no dates (YYYY-MM-DD), such as '05/06/2024'" in capsys.readouterr().err


def test_a_file_of_new_rows_may_have_decimal_commas(story, capsys):
    wanted = [float(row["decision"]) for row in predicted(story, "new")]
    rows = [{**row, "age": row["age"].replace(".", ",")} for row in read_csv(story / "new.csv")]
    write_csv(story / "commas.csv", rows)
    capsys.readouterr()
    found = [float(row["decision"]) for row in predicted(story, "commas")]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert "numbers are read with a decimal comma in age" in capsys.readouterr().err


def test_a_gap_is_predicted_as_the_median_of_the_clients_training_rows(story):
    data = Plan.load(story / "without_indicators" / "plan.toml").data
    train, _ = replace(data, name=str(story / "moved.csv")).split()
    own = slice(*train.offsets[list(train.names).index("H01") :][:2])
    low, high = data.source.ranges["age"]
    ages = train.features[own, 0].numpy()[~train.gaps[own, 0]] * (high - low) / 6 + (low + high) / 2
    everywhere = [row["age"] for row in read_csv(story / "moved.csv") if row["hospital"] == "H01"]
    assert 5 < len(ages) < len(everywhere) - everywhere.count("")
    own = next(row for row in read_csv(story / "new.csv") if row["hospital"] == "H01")
    write_csv(story / "two.csv", [{**own, "age": value} for value in ("", np.median(ages), 20)])
    gap, median, other = (
        float(row["decision"]) for row in predicted(story, "two", run="without_indicators")
    )
    assert gap == pytest.approx(median, abs=1e-4)
    assert abs(gap - other) > 0.01


def test_guarantee_and_result_state_what_was_accepted_and_left_out(story):
    stated = (story / "run" / "guarantee.json").read_text()
    assert "levels of ward read off the rows and accepted as public" in stated
    used = json.loads((story / "run" / "result.json").read_text())["data_used"]
    assert used["columns_left_out"] == ["patient_id"]
    assert used["clients"] == HOSPITALS and used["rows"] == 960
    assert any("filled with the median" in note for note in used["notes"])
    page = (story / "run" / "report.html").read_text()
    assert "Data used" in page and "filled with the median" in page and "columns left out" in page


def test_an_exported_model_fills_gaps_and_predicts_as_the_run_does(story):
    out = story / "H02.safetensors"
    assert main(["export", str(story / "run"), "--client", "H02", "--out", str(out)]) == 0
    rows = [row for row in read_csv(story / "new.csv") if row["hospital"] == "H02"]
    write_csv(story / "own.csv", [*rows, {**rows[0], "age": "", "ward": ""}])
    by_run = [row["decision"] for row in predicted(story, "own")]
    given = ["predict", str(out), "--data", str(story / "own.csv")]
    assert main([*given, "--out", str(story / "exported.csv")]) == 0
    exported = read_csv(story / "exported.csv")
    np.testing.assert_allclose(
        [float(row["decision"]) for row in exported], [float(v) for v in by_run], rtol=1e-6
    )


def test_programs_of_torch_and_onnx_predict_as_the_run_does(story):
    rows = [row for row in read_csv(story / "new.csv") if row["hospital"] == "H02"]
    rows += [{**rows[0], "age": "", "ward": "", "admitted": ""}]
    write_csv(story / "programs.csv", rows)
    wanted = [float(row["decision"]) for row in predicted(story, "programs")]
    given = ["export", str(story / "run"), "--client", "H02", "--out"]
    for name, kind in (("H02.st", "safetensors"), ("H02.pt2", "torch"), ("H02.onnx", "onnx")):
        assert main([*given, str(story / name), "--format", kind]) == 0
    features = program_rows(story / "programs.csv", load_client(story / "H02.st"))
    outputs = torch.export.load(story / "H02.pt2").module()(features)
    np.testing.assert_allclose(outputs.numpy(), wanted, atol=1e-5)
    columns = {
        "age": np.array([float(row["age"] or "nan") for row in rows])[:, None],
        "ward": np.array([row["ward"] for row in rows], dtype=object)[:, None],
        "admitted": np.array([row["admitted"] for row in rows], dtype=object)[:, None],
    }
    found = InferenceSession(story / "H02.onnx").run(["outputs"], columns)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_nothing_is_written_without_consent_or_with_a_problem(tmp_path, capsys):
    write_rows(tmp_path / "t.csv", 240, 0, labelled=True)
    out = tmp_path / "plan.toml"
    assert main(["init", str(tmp_path / "t.csv"), "--out", str(out)]) == 2
    assert "give --yes to accept" in capsys.readouterr().err
    flags = ["--client", "patient_id", "--target", "died", "--yes", "--out", str(out)]
    assert main(["init", str(tmp_path / "t.csv"), *flags]) == 2
    assert "it is an id of rows" in capsys.readouterr().err
    assert not out.exists()


def test_other_commands_take_the_flags_of_init(tmp_path, capsys):
    write_rows(tmp_path / "t.csv", 240, 0, labelled=True)
    shown = ["data", "show", str(tmp_path / "t.csv")]
    assert main(shown) == 2
    assert "`coterie init FILE` proposes both" in capsys.readouterr().err
    flags = ["--client", "hospital", "--target", "died", "--missing", "drop"]
    assert main([*shown, *flags]) == 2  # the target is text
    assert "--classes A,B; `coterie init FILE` proposes them" in capsys.readouterr().err
    assert main([*shown, *flags, "--classes", "no,yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"] == 24


def test_data_show_reads_by_a_plan(tmp_path, capsys):
    table, plan = tmp_path / "t.csv", tmp_path / "plan.toml"
    write_rows(table, 240, 0, labelled=True)
    given = ["--client", "hospital", "--target", "died", "--yes", "--out", str(plan)]
    assert main(["init", str(table), *given]) == 0
    capsys.readouterr()
    assert main(["data", "show", "--plan", str(plan), "--clients", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["clients"], shown["rows"], shown["task"]) == (5, 50, "binary")


def test_a_plan_finds_its_table_beside_it(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "t.csv", 240, 0, labelled=True)
    monkeypatch.chdir(folder)
    assert main(["init", "t.csv", "--client", "hospital", "--target", "died", "--yes"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", "--plan", "rows/plan.toml"]) == 0
    (folder / "t.csv").unlink()
    capsys.readouterr()
    assert main(["data", "show", "--plan", "rows/plan.toml"]) == 2
    assert "t.csv: no such file or folder; check the path" in capsys.readouterr().err


def test_a_plan_is_not_overwritten_and_json_lists_everything(tmp_path, capsys):
    write_rows(tmp_path / "t.csv", 240, 0, labelled=True)
    out = tmp_path / "plan.toml"
    flags = [str(tmp_path / "t.csv"), "--yes", "--out", str(out), "--json"]
    assert main(["init", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["client"] == "hospital" and found["task"] == "binary"
    assert found["left_out"] == {"patient_id": "every value is different: an id"}
    assert main(["init", *flags]) == 2
    assert "exists" in capsys.readouterr().err


def test_init_does_not_load_torch(tmp_path):
    write_rows(tmp_path / "t.csv", 240, 0, labelled=True)
    code = (
        "import sys; from coterie.cli.main import main\n"
        f"assert main(['init', {str(tmp_path / 't.csv')!r}, '--yes', '--out', "
        f"{str(tmp_path / 'p.toml')!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_verdict_against_joining_spends_nothing(tmp_path, capsys):
    write_rows(tmp_path / "t.csv", 240, 0, labelled=True)
    plan = tmp_path / "plan.toml"
    assert main(["init", str(tmp_path / "t.csv"), "--yes", "--out", str(plan)]) == 0
    few = ["run", "--plan", str(plan), "--clients", "3", "--epsilon", "1", "--quiet"]
    capsys.readouterr()
    assert main([*few, "--out", str(tmp_path / "auto"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["method"] in ("local", "single") and found["epsilon"] == 0
    assert found["verdict"]["verdict"] == "learn alone" and "learn alone" in found["chosen"]
    assert found["verdict"]["epsilon"] == 1  # what was asked for, and was not spent
    assert main([*few, "--anyway", "--out", str(tmp_path / "anyway"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["method"] == "pfeb" and found["epsilon"] == pytest.approx(1)
    # a resumed run keeps its method
    assert main(["run", "--resume", str(tmp_path / "auto"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["epsilon"] == 0


def test_a_plan_proposes_the_unit_as_a_comment(story):
    text = (story / "plan.toml").read_text()
    assert "about" not in tomllib.loads(text)
    taken = text.replace("# [about]", "[about]").replace("# unit =", "unit =")
    unit = "one value of the column hospital, with all its rows"
    assert tomllib.loads(taken)["about"] == {"unit": unit}
