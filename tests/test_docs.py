"""Documentation that cannot drift: examples run, commands parse, settings and links are real.

In README.md and under docs/, in document order, with one namespace and one empty working folder a
document: `python` blocks are executed; `console` blocks are run (lines after "$ ") and what they
print is compared (numbers to 0.2 %, "..." stands for any lines). Lines of `sh` blocks that start
with `coterie` have to parse, and `toml` blocks have to be plans.
"""

import contextlib
import dataclasses
import importlib
import io
import math
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import coterie
from coterie.cli import build_parser, main
from coterie.methods.base import registered
from coterie.run_plan import plan_from_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \|", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page, *languages):
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in _FENCE.finditer(text)
        if found[1] in languages
    ]


def with_blocks(*languages):
    chosen = [page for page in PAGES if blocks(page, *languages)]
    return pytest.mark.parametrize("page", chosen, ids=[str(p.relative_to(ROOT)) for p in chosen])


@with_blocks("python", "console")
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python", "console"):
        if block.language == "python":
            # Empty lines in front make tracebacks name the document's own line.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, page, "exec"), namespace)
        else:
            check_console(page, block)


def check_console(page, block):
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        assert command.startswith("coterie "), f"{page.name}:{block.line}: {command}"
        found = matches(expected, printed(command))
        assert found, f"{page.name}, line {block.line}: $ {command}\n{printed(command)}"


def printed(command):
    """Run a command; give what it prints, results first."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(shlex.split(command)[1:])
    return out.getvalue() + err.getvalue()


def matches(expected, found):
    """Compare line by line, spaces squeezed; the lines between two "..." have to follow closely."""
    lines = [" ".join(line.split()) for line in found.splitlines() if line.strip()]
    chunks: list[list[str]] = [[]]
    for line in expected.splitlines():
        if line.strip() == "...":
            chunks.append([])
        elif line.strip():
            chunks[-1].append(" ".join(line.split()))
    place = 0
    for number, chunk in enumerate(chunks):
        last = len(lines) - len(chunk)
        starts = range(place, last + 1)
        if number == 0:
            starts = range(min(1, last + 1))
        elif number == len(chunks) - 1 and chunk:
            starts = range(max(place, last), last + 1)
        fits = [at for at in starts if all(map(same, chunk, lines[at:]))]
        if not fits:
            return False
        place = fits[0] + len(chunk)
    return len(chunks) > 1 or place == len(lines)


def same(expected, found):
    if _NUMBER.sub("#", expected) != _NUMBER.sub("#", found):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True)
    return all(
        math.isclose(float(a.replace(",", "")), float(b.replace(",", "")), rel_tol=2e-3)
        for a, b in pairs
    )


def test_the_comparison_itself():
    assert same("epsilon  4.611", "epsilon  4.6114") and not same("epsilon 4.611", "epsilon 4.7")
    assert not same("epsilon 4.611", "delta 4.611")
    assert matches("a 1\nb 2\n", "a   1\n\nb 2\n") and not matches("a 1\n", "a 1\nb 2\n")
    assert matches("a 1\n...\nc 3\n", "a 1\nb 2\nc 3\n") and not matches("a 1\n...\n", "b 1\n")
    assert matches("...\nb 2\n...\n", "a 1\nb 2\nc 3\n") and not matches("...\nb 2\n", "b 2\nc 3\n")


@pytest.mark.parametrize("name", sorted(set(coterie.__all__) - {"__version__"}))
def test_public_names_are_what_they_are_whatever_was_imported(name):
    # A module of the same name would take the place of a name that is loaded on first use.
    home = importlib.import_module(coterie._HOMES[name])
    assert getattr(coterie, name) is getattr(home, name)


@with_blocks("sh")
def test_commands_parse(page):
    for block in blocks(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["coterie"]:
                continue
            try:
                build_parser().parse_args(words[1:])
            except SystemExit:
                pytest.fail(f"{page.name}, line {block.line}: does not parse: {line}")


@with_blocks("toml")
def test_plans_are_plans(page):
    for block in blocks(page, "toml"):
        plan_from_table(tomllib.loads(block.text))


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem
)
def test_settings_are_those_of_the_method(page):
    method = registered()[{"neural": "dpfedmtl"}.get(page.stem, page.stem)]()
    listed = dict(_ROW.findall(page.read_text(encoding="utf-8")))
    assert listed == settings(method)


def settings(value, prefix=""):
    found = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(getattr(type(item), "kind", None), str):
            found[prefix + field.name] = type(item).kind
        elif dataclasses.is_dataclass(item):
            found |= settings(item, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = str(item).lower()
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
