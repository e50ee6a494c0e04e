"""The shape of the code itself: sizes, one seal, no printing below the command line."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent.parent / "src").rglob("*.py"))
TALKERS = {"cli.py", "apps.py"}  # the second speaks for a ServerApp, to `flwr run --stream`


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path.name} is two things"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node, clean=False)
            body = node.end_lineno - node.body[0].lineno + 1
            body -= doc.count("\n") + 1 if doc else 0
            assert body <= 40, f"{path.name}:{node.lineno} {node.name} has {body} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_the_command_line_prints(path):
    prints = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not prints or path.name in TALKERS or path.parent.name == "commands"


def test_the_seal_has_one_home():
    assert [p.name for p in SOURCES if "_SEAL" in p.read_text()] == ["billboard.py"]
