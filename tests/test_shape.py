"""The shape of the code itself: short functions, one seal, no printing below the command line."""

import ast
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    """Parse all sources: not while tests are collected, which every worker does."""
    sources = sorted((Path(__file__).parent.parent / "src").rglob("*.py"))
    kept = [path for path in sources if "egg-info" not in str(path)]
    assert len(kept) > 50
    return {path: ast.parse(path.read_text(), str(path)) for path in kept}


def test_functions_stay_short(found):
    long = []
    for path, tree in found.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False)
                body = node.end_lineno - node.body[0].lineno + 1
                body -= doc.count("\n") + 1 if doc else 0
                if body > 40:
                    long.append(f"{path.name}:{node.lineno} {node.name} has {body} lines")
    assert not long


def test_only_the_command_line_prints(found):
    prints = [
        f"{path.parent.name}/{path.name}:{node.lineno}"
        for path, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
        if path.parent.name != "cli" and path.name != "flower.py"  # speaks to `flwr run --stream`
    ]
    assert not prints


def test_the_seal_has_one_home(found):
    assert [path.name for path in found if "_SEAL" in path.read_text()] == ["billboard.py"]


def test_the_tests_that_docstrings_name_exist(found):
    """A guarantee names the test that checks it: one that is gone checks nothing."""
    named = {name for path in found for name in re.findall(r"tests/[\w/]+\.py", path.read_text())}
    assert len(named) > 30
    root = Path(__file__).parent.parent
    assert [name for name in sorted(named) if not (root / name).is_file()] == []


def test_the_root_holds_the_python_face_theory_and_tracking():
    root = Path(__file__).parent.parent / "src" / "coterie"
    names = {path.name for path in root.glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "api.py", "theory.py", "tracking.py"}
