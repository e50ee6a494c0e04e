"""A method and a mechanism of another package, by entry points: examples/extension, installed.

What a user does with a method of this package works with one of another: help, plan, run, report,
comparison and verification (`with_extension`), the contract suite, and a deployment that releases
what a simulation releases. All of it runs in one process, which alone knows the package.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKED = ["tests/methods/with_extension.py", "tests/contracts", "tests/deploy/test_coordinator.py"]


@pytest.mark.full
def test_another_packages_method_and_mechanism_are_like_our_own(tmp_path):
    source = shutil.copytree(ROOT / "examples" / "extension", tmp_path / "source")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, *command, "--target", str(tmp_path / "site"), str(source)],
        check=True,
        capture_output=True,
    )
    paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
    pytest_line = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *CHECKED]
    done = subprocess.run(
        [sys.executable, *pytest_line, "-k", "with_extension or fedrep"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for file in ("with_extension", "test_methods", "test_coordinator"):
        assert any(line.startswith("PASSED") and file in line for line in done.stdout.splitlines())
