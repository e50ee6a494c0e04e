"""Notebooks of `examples/` run, print what they show, and hold nothing of the machine they ran on.

Each notebook's code is run in this process, in an empty folder with a copy of `examples/*.py`. What
it prints is compared with the outputs that the file keeps (numbers to one unit of the last digit or
1 %, text exactly, spaces squeezed). A slow test runs all of them with Jupyter's kernel.
"""

import ast
import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.append(str(ROOT / "tools"))

import notebooks  # noqa: E402  from tools/

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")
_MOST_BYTES = 400_000


def read(name):
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with the programs of the examples, as after a download."""
    for program in EXAMPLES.glob("*.py"):
        shutil.copy(program, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pandas.option_context("display.max_columns", 20):  # as in a kernel, which has no terminal
        yield tmp_path
    sys.modules.pop("hospitals", None)


@pytest.mark.full
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks_print_what_they_show(name, folder, monkeypatch):
    main = ModuleType("__main__")  # classes of a notebook are found by name
    monkeypatch.setitem(sys.modules, "__main__", main)
    namespace = vars(main)
    namespace["shell"] = shell
    for number, cell in enumerate(code_cells(read(name)), 1):
        kept = texts(cell["outputs"])
        found = printed("".join(cell["source"]), f"{name}.ipynb, cell {number}", namespace)
        if kept is not None:
            where = f"{name}.ipynb, cell {number}: kept\n{kept}\nfound\n{found}"
            assert alike(kept, found), where


def texts(outputs):
    """Return what a cell printed and its result as text; None where that is a picture."""
    parts = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        data = output.get("data", {"text/plain": output.get("text", "")})
        if any(kind.startswith("image/") for kind in data):
            return None
        parts.append("".join(data["text/plain"]))
    return "\n".join(parts)


def printed(source, where, namespace):
    """Run a cell as a kernel does; return what it prints and the text of its last expression."""
    python = re.sub(r"^!(.*)$", lambda line: f"shell({line[1]!r})", source, flags=re.MULTILINE)
    tree = ast.parse(python, where)
    shown = []
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, where, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), namespace)
            shown = [] if value is None or source.rstrip().endswith(";") else [repr(value)]
    return "\n".join([out.getvalue(), *shown])


def shell(line):
    """Run a line of shell with the commands of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(line, shell=True, check=True, env=os.environ | {"PATH": path})


def alike(kept, found):
    kept, found = (" ".join(text.split()) for text in (kept, found))
    if _NUMBER.sub("#", kept) != _NUMBER.sub("#", found):
        return False
    return all(map(close, _NUMBER.findall(kept), _NUMBER.findall(found)))


def close(kept, found):
    last = 10.0 ** -len(kept.partition("e")[0].partition(".")[2])
    return math.isclose(float(kept), float(found), rel_tol=1e-2, abs_tol=1.01 * last)


def test_the_comparison_itself():
    assert alike("a 0.71\n b 12", "a  0.72 b 12") and not alike("a 0.71", "a 0.74")
    assert not alike("a 0.71", "b 0.71") and not alike("1 2", "1") and not alike("e 12", "e 14")


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks_are_executed_and_hold_nothing_private(name):
    path = EXAMPLES / f"{name}.ipynb"
    assert path.stat().st_size < _MOST_BYTES
    notebook = read(name)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in notebook["cells"]:
        assert not cell["metadata"]
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error", output
            assert not notebooks.refusal(output), (cell["source"], notebooks.refusal(output))
    programs = "".join("".join(cell["source"]) for cell in cells)
    assert "shared/data" not in programs and "http" not in programs


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_pages_show_code_and_outputs(name):
    notebook, charts = read(name), {}
    page = "\n\n".join(notebooks.page_parts(name, notebook, charts))
    assert page.startswith("# ") and f"]({name}.ipynb)" in page
    for cell in code_cells(notebook):
        assert "".join(cell["source"]) in page
    assert charts and all(f"]({chart})" in page for chart in charts)
    assert not re.search(r"<script|https?://(?!www\.w3\.org)[^\s)]*\.js", page)


@pytest.mark.slow  # four kernels, each of which imports torch
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_jupyter_shows_the_same(name):
    kept, found = read(name), json.loads(notebooks.executed(EXAMPLES / f"{name}.ipynb"))
    for one, other in zip(code_cells(kept), code_cells(found), strict=True):
        kinds = [[sorted(out.get("data", ())) for out in cell["outputs"]] for cell in (one, other)]
        assert kinds[0] == kinds[1], one["source"]
        if (text := texts(one["outputs"])) is not None:
            assert alike(text, texts(other["outputs"])), other["outputs"]


def commands(text):
    return [line for line in text.splitlines() if re.match(r"(python|coterie|head) ", line)]


def test_the_session_is_the_page():
    script = (EXAMPLES / "hospital_session.sh").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "tutorials" / "hospitals.md").read_text(encoding="utf-8")
    shown = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    assert [line.partition(" || ")[0] for line in commands(script)] == shown
    assert len(shown) < 10


@pytest.mark.slow  # each command imports torch
def test_the_session_runs_in_a_shell(folder):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(EXAMPLES / "hospital_session.sh")],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("refused: the budget would be exceeded")
    rows = (folder / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 181 and "patient_id" in rows[0] and "probability" in rows[0]
