"""The lighter start of Flower's ClientApp: Flower's own program, without a SuperNode's database."""

import os
import subprocess
import sys

import pytest

from coterie.deploy.starter import light_path, program

pytest.importorskip("flwr")
pytestmark = pytest.mark.full
LOADED = """
import sys
from coterie.deploy import starter
starter.program = lambda name: lambda: None
starter.main()
from importlib.metadata import distribution
program, = distribution("flwr").entry_points.select(group="console_scripts", name="flwr-clientapp")
assert callable(program.load())
print("sqlalchemy" in sys.modules)
"""


def test_the_file_is_flowers_program_and_stands_first(tmp_path):
    path = light_path(tmp_path / "bin", os.environ["PATH"])
    assert path.split(os.pathsep)[0] == str(tmp_path / "bin")
    run = ["flwr-clientapp", "--help"]
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    shown = subprocess.run(run, capture_output=True, text=True, env=environment, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "Run a Flower ClientApp" in shown.stdout


def test_the_database_is_not_loaded():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_program_that_is_missing_is_named():
    with pytest.raises(ValueError, match="flower-nothing is not installed"):
        program("flower-nothing")
