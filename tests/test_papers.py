"""The four papers: the index is consistent, its pages are current, its commands run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import coterie as ct
from coterie.cli.main import build_parser, main
from coterie.papers import Item, read_papers

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("papers_tool", ROOT / "tools" / "papers.py")
assert _spec is not None and _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)
ITEMS = [item for paper in read_papers() for item in paper.items]


def test_the_pages_are_current() -> None:
    for path, text in tool.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python tools/papers.py pages"


def test_the_daily_studies_are_studies_of_the_papers() -> None:
    assert set(BRIEF) <= set(QUICK)


def test_items_have_places_of_their_own() -> None:
    pages = [item.page for item in ITEMS]
    assert len(pages) == len(set(pages))
    for item in ITEMS:
        text = (ROOT / item.page.partition("#")[0]).read_text(encoding="utf-8")
        assert f"### {item.item}\n" in text


def test_json_is_a_list_of_objects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {"paper", "item", "kind", "status", "command", "ours", "published", "page"}
    assert len(found) == len(ITEMS) and all(names == set(one) for one in found)
    assert main(["papers", "mpmtl", "--status", "runs"]) == 0
    assert "Algorithm 2 (runs)" in capsys.readouterr().out
    assert main(["papers", "pmlt"]) == 2
    assert "did you mean pmtl" in capsys.readouterr().err


def test_incomplete_items_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Item(paper="x", item="Figure 1", kind="figure", about="", status="differs")
    with pytest.raises(ValueError, match="needs published and ours"):
        Item(paper="x", item="Figure 1", kind="figure", about="", status="reproduced")
    with pytest.raises(ValueError, match="it is reproduced, or differs"):
        Item(paper="x", item="Figure 1", kind="figure", about="", status="runs", published="1")
    with pytest.raises(ValueError, match="kind = 'plot'"):
        Item(paper="x", item="Figure 1", kind="plot", about="", status="runs")  # type: ignore


def test_code_that_items_name_exists() -> None:
    """Dotted names of `where` can be imported, files exist."""
    for item in ITEMS:
        for name in re.findall(r"\bcoterie(?:\.\w+)+", item.where):
            parts = name.split(".")
            found = __import__("coterie")
            for at, part in enumerate(parts[1:], 1):
                if not hasattr(found, part):
                    importlib.import_module(".".join(parts[: at + 1]))
                found = getattr(found, part)
        for path in re.findall(r"\b(?:benchmarks|docs|examples|src)/[\w/.-]+\w", item.where):
            assert (ROOT / path).exists(), f"{item.paper}, {item.item}: {path}"


WITH_COMMAND = [item for item in ITEMS if item.command]


@pytest.mark.parametrize("item", WITH_COMMAND, ids=lambda item: f"{item.paper}-{item.item}")
def test_commands_and_their_quick_forms_are_of_one_kind(item: Item) -> None:
    """A study's quick form runs the same part of the same script; its words are in the script."""
    words, quick = shlex.split(item.command), shlex.split(item.quick or item.command)
    if words[0] == "coterie":
        assert quick[:2] == words[:2] and quick[1] in ("run", "data")
        build_parser().parse_args(quick[1:])
        return
    assert words[0] == "python" and quick[1] == words[1]
    source = (ROOT / words[1]).read_text(encoding="utf-8")
    for one in (words, quick):
        part, flags = " ".join(one[2:3]), [word for word in one[2:] if word.startswith("--")]
        assert all(f'"{flag}"' in source for flag in flags)
        assert part.startswith("--") or f'"{part}"' in source or not part
    given = [
        one[2] if len(one) > 2 and not one[2].startswith("--") else "" for one in (words, quick)
    ]
    assert given[0] == given[1]
    assert "--quick" in quick or words[1] in WHOLE


def test_every_command_on_the_pages_has_a_test() -> None:
    """It is an item's, whose quick form runs below, or tests/test_docs.py runs it as printed."""
    ours = {item.command for item in WITH_COMMAND}
    for page in (ROOT / "docs" / "papers").glob("*.md"):
        for text in re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            for line in text.splitlines():
                elsewhere = line.startswith("coterie ") and "$COTERIE_DATA" not in line
                assert line in ours or elsewhere, f"{page.name}: {line}"
    assert {item.quick or item.command for item in WITH_COMMAND} == set(QUICK)


WHOLE = ("benchmarks/reconstruction.py",)
"""Studies whose quick form has no flag of its own but fewer rounds."""


QUICK = sorted({item.quick or item.command for item in ITEMS if item.machine != "none"})


BRIEF = (
    "python benchmarks/papers_mpmtl.py fig2 --quick",
    "python benchmarks/claims.py pmtl --quick",
)
"""Studies that the daily suite runs too: some seconds."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=pytest.mark.full if one in BRIEF else pytest.mark.slow)
        for one in QUICK
        if one.startswith("python ")
    ],
)
def test_studies_run_in_their_quick_form(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    words = [sys.executable, str(ROOT / words[1]), *words[2:]]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def write_small_data(folder: Path) -> None:
    """Write files of the layout of docs/data.md, with few rows, for $COTERIE_DATA."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(22), 4)
    rows = len(client)
    arrays: dict[str, Any] = {
        "school": (rng.normal(size=(rows, 28)).astype(np.float32), rng.normal(size=rows)),
        "har": (rng.normal(size=(rows, 561)).astype(np.float32), rng.integers(6, size=rows)),
        "femnist": (
            rng.integers(256, size=(rows, 28, 28), dtype=np.uint8), rng.integers(62, size=rows)
        ),
    }  # fmt: skip
    for name, (features, target) in arrays.items():
        (folder / name).mkdir()
        split: dict[str, Any] = {} if name == "school" else {"split": np.arange(rows) % 2}
        np.savez(folder / name / f"{name}.npz", X=features, y=target, client=client, **split)


@pytest.mark.full
@pytest.mark.parametrize("command", [one for one in QUICK if one.startswith("coterie ")])
def test_commands_run(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As printed; files of $COTERIE_DATA are small ones of the same layout."""
    if "$COTERIE_DATA" in command:
        write_small_data(tmp_path)
        monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [os.path.expandvars(word) for word in shlex.split(command)]
    assert main(words[1:]) == 0, capsys.readouterr().err[-2000:]


def write_leaf(folder: Path, name: str, row_of: Callable[[str], object]) -> None:
    """Write LEAF's train and test folders of three clients; `row_of` gives a row by its key."""
    for part, rows in (("train", 4), ("test", 2)):
        users = {
            user: {
                "x": [row_of(f"{part}{user}{row}") for row in range(rows)],
                "y": [row % 2 for row in range(rows)],
            }
            for user in ("1", "2", "3")
        }
        path = folder / "leaf" / "data" / name / "data" / part / "all.json"
        path.parent.mkdir(parents=True)
        counts = [rows] * len(users)
        text = json.dumps({"users": list(users), "num_samples": counts, "user_data": users})
        path.write_text(text)


def write_originals(folder: Path) -> None:
    """Write small files of the formats that the papers' data come in: LEAF's and TFF's."""
    h5py: Any = pytest.importorskip("h5py", reason="pip install coterie[hdf5]")
    rng = np.random.default_rng(0)
    write_leaf(folder, "femnist", lambda _: rng.random(784).round(3).tolist())
    faces = folder / "leaf" / "data" / "celeba" / "data" / "raw" / "img_align_celeba"
    faces.mkdir(parents=True)

    def face(key: str) -> object:
        Image.new("RGB", (178, 218), (len(key), 9, 9)).save(faces / f"{key}.jpg")
        return f"{key}.jpg"

    write_leaf(folder, "celeba", face)
    with h5py.File(folder / "stackoverflow_train.h5", "w") as dump:
        for client in range(6):
            posts = dump.create_group(f"examples/{client:08}")
            for name, text in (("tokens", "how to sort"), ("title", "sort"), ("tags", "a|t1")):
                posts.create_dataset(name, data=[text.encode()] * 5)
    lines = "".join(f"{word} {9 - at}\n" for at, word in enumerate(["how", "sort", "to", "in"]))
    (folder / "stackoverflow.word_count").write_text(lines)
    tags = {f"t{number}": 9 - number for number in range(4)}
    (folder / "stackoverflow.tag_count.json").write_text(json.dumps(tags))


def loader_commands() -> list[str]:
    """Return the lines of docs/data.md that read the papers' data in their original formats."""
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    return re.findall(r"^coterie run --data (?:leaf/|stackoverflow_).*$", text, re.MULTILINE)


def test_docs_show_a_loader_command_for_each_data_set() -> None:
    found = "\n".join(loader_commands())
    assert all(name in found for name in ("femnist", "celeba", "stackoverflow"))


SMALLER = {"400": "5", "500": "3", "vocabulary_size=10000": "vocabulary_size=4"}
"""The size of StackOverflow in docs/data.md, and of the quick form."""


@pytest.mark.full
@pytest.mark.parametrize("command", loader_commands(), ids=lambda one: one.split()[3])
def test_loader_commands_read_small_files(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As printed but for the number of clients, tags and words, and for one round."""
    write_originals(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    for old, new in SMALLER.items():
        words = [word.replace(old, new) if word.endswith(old) else word for word in words]
    assert main([*words[1:], "--rounds", "1", "--no-local"]) == 0, capsys.readouterr().err[-2000:]
    clients = 5 if "stackoverflow" in command else 3
    assert f"{clients} clients" in capsys.readouterr().out


def test_as_published_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--data", "districts"]
    assert main([*run, "--method", "pmtl", "--as-published", "rounds=5"]) == 2
    assert "expected clients=...,cohort=...,rounds=...,gamma=..." in capsys.readouterr().err
    assert main([*run, "--method", "mtlsvm", "--as-published", "round=5"]) == 2
    assert "mtlsvm has no setting round; expected no settings" in capsys.readouterr().err
    assert main([*run, "--method", "fedavg", "--as-published"]) == 2
    assert "dpfedmtl, mpmtl, mtlsvm, pmtl" in capsys.readouterr().err


def test_algorithm_1_with_the_other_matrix_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published plan brings a method of its own, whatever --method says."""
    monkeypatch.chdir(tmp_path)
    text = "algorithm=1,matrix=tasks,epsilon=1,delta=0.001,clip=4,lam=0.1,rounds=3"
    run = ["run", "--data", "mpmtl:low_rank", "--option", "clients=12", "--method", "mpmtl"]
    flags = ["--as-published", text, "--simulation-seed", "0", "--no-local"]
    assert main([*run, *flags, "--out", "here"]) == 0
    shown = capsys.readouterr().out
    assert "mpmtl_tasks" in shown and "NOT PRIVATE" in shown
    assert "As published; not a guarantee" in shown
    result = json.loads((tmp_path / "here" / "result.json").read_text("utf-8"))
    assert result["method"] == "mpmtl_tasks" and "every model" in result["caveats"][0]


def test_published_plans_say_that_they_are_no_guarantee() -> None:
    given = {"epsilon": 1.0, "delta": 1e-3, "clip": 2.0, "lam": 0.1}
    plans = [
        ct.PMTL.published(clients=50, cohort=10, rounds=2, gamma=0.5, sigma=0.1),
        ct.DPFedMTL.published(cohort=3, rounds=2, sigma=0.65, every_step=50),
        ct.MTLSVM.published(),
        ct.MTLSVM.published(update="add", mask="paper"),
        ct.MPMTL.published(1, matrix="tasks", rounds=2, **given),  # type: ignore[arg-type]
    ]
    for plan in plans:
        (first, *_) = plan.method.notes(private=plan.private).caveats
        assert first.startswith("As published") and "not a guarantee" in first
    for number in (1, 2, 3):
        plan = ct.MPMTL.published(number, rounds=2, **given)  # type: ignore[arg-type]
        assert "NOT A GUARANTEE" in plan.guarantee(50).statement()
    plan = ct.DPFedMTL.published(cohort=3, rounds=2, sigma=0.65)
    assert "NOT A GUARANTEE" in plan.guarantee(50).statement()
    assert ct.MTLSVM().notes().caveats == ct.PMTL().notes().caveats == ()


def test_the_preprocessing_of_lsoa(tmp_path: Path) -> None:
    """One client per target; a gap of a category is a level, one of a number a constant."""
    path = tmp_path / "people.csv"
    path.write_text("lame,age,falls,stroke\nyes,60,1,0\n,70,0,\nno,,1,1\n")
    source = ct.Source(
        target=("falls", "stroke"), targets_are_clients=True, task="binary", missing="constant",
        levels={"lame": ("yes", "no", "other")}, fill={"age": 75.0}, unit_rows=True,
    )  # fmt: skip
    data = ct.load(path, source)
    assert data.names == ("falls", "stroke") and data.counts.tolist() == [3, 2]
    rows = data.features[:3]
    lame, age = rows[:, :3], rows[:, 3]
    assert lame.argmax(dim=1).tolist() == [0, 2, 1]  # yes, missing, no
    assert (age / lame.max(dim=1).values).tolist() == pytest.approx([60, 70, 75])
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 1, 1])
