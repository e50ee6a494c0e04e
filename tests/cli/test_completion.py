"""Shell completion, in the shells themselves where they are installed."""

import shutil
import subprocess
import sys

import pytest

from coterie.cli.completion import SHELLS, names, script
from coterie.cli.main import build_parser
from coterie.data.datasets import NAMES
from coterie.methods.base import choices
from coterie.models import MODELS

pytestmark = pytest.mark.full
DRIVE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMPREPLY=()
"$(complete -p coterie | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" coterie "${COMP_WORDS[COMP_CWORD]}" \
    "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    path = tmp_path_factory.mktemp("completion") / "coterie.bash"
    path.write_text(script(build_parser(), "bash"))

    def complete(*words, cwd=None):
        done = subprocess.run(
            ["bash", "-c", DRIVE, "bash", str(path), "coterie", *words],
            capture_output=True, text=True, check=False, cwd=cwd,
        )  # fmt: skip
        assert not done.stderr
        return set(done.stdout.split())

    return complete


def test_commands_and_flags_are_completed(bash):
    assert bash("pl") == {"plan"} and bash("co") >= {"completion"}
    assert bash("run", "--eps") == {"--epsilon"} and bash("doctor", "--js") == {"--json"}
    assert bash("data", "sh") == {"show"}


def test_names_are_completed(bash):
    assert bash("run", "--method", "pf") == {"pfeb", "pfedme"}
    assert "femnist_cnn" in bash("run", "--model", "fem")
    assert bash("run", "--data", "distr") == {"districts"}
    assert bash("data", "show", "dig") == {"digits"}
    assert bash("run", "--relation", "re") == {"replace"}
    assert bash("completion", "") == set(SHELLS)


def test_files_and_folders_are_completed(bash, tmp_path):
    (tmp_path / "rows.csv").touch()
    (tmp_path / "rest").mkdir()
    assert bash("run", "--data", "ro", cwd=tmp_path) == {"rows.csv"}
    assert bash("report", "re", cwd=tmp_path) == {"rest"}
    assert bash("run", "--resume", "r", cwd=tmp_path) == {"rest"}
    assert bash("plan", "--plan", "r", cwd=tmp_path) == {"rows.csv", "rest"}


def test_names_read_off_the_source_are_those_that_load():
    found = names()
    assert set(found["methods"]) == set(choices())
    assert set(found["models"]) == set(MODELS)
    assert set(found["data"]) == set(NAMES)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_knows_every_command(shell):
    text = script(build_parser(), shell)
    for command in ("plan", "run", "doctor", "completion"):
        assert command in text


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_the_script_is_read_by_its_shell(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script(build_parser(), shell))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_completion_loads_nothing_heavy():
    code = (
        "import sys; from coterie.cli.main import main; main(['completion', 'bash']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# AUTOMATICALLY") or "complete" in done.stdout
