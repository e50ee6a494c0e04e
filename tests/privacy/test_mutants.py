"""The mutants of tools/mutants.py: each applies to the sources, names a test file and is listed."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAST = 100


def load():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = load()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_a_test_file(mutant):
    text = (ROOT / "src" / "coterie" / mutant.file).read_text()
    broken = mutants.apply(mutant, text)
    assert broken != text
    compile(broken, mutant.file, "exec")
    assert (ROOT / mutant.test.partition("::")[0]).is_file()


def test_the_documentation_lists_each_mutant_and_an_existing_test():
    lines = (ROOT / "docs" / "mutants.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if "`tests" in line]
    rows = [row for row in rows if len(row) == 2]
    listed = {name: test.strip("`") for name, test in rows}
    assert sorted(listed) == sorted(mutant.name for mutant in mutants.MUTANTS)
    assert len(rows) == len(listed) >= LEAST
    for mutant in mutants.MUTANTS:
        file, _, test = listed[mutant.name].partition("::")
        assert mutant.test in (file, listed[mutant.name])
        function = test.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in (ROOT / file).read_text()


def test_a_mutant_that_no_longer_applies_is_reported():
    mutant = mutants.MUTANTS[0]
    for text in ("", 2 * mutant.old):
        with pytest.raises(ValueError, match="exactly once"):
            mutants.apply(mutant, text)
