"""Documentation that cannot drift: examples run, commands parse, settings and links are real.

In README.md and under docs/, in document order, with one namespace and one empty working folder a
document: `python` blocks are executed; `console` blocks are run (lines after "$ ") and what they
print is compared (numbers to 0.2 %, "..." stands for any lines). Lines of `sh` blocks that start
with `coterie` have to parse, commands and flags named in the text have to exist, and `toml` blocks
have to be plans. Every method and every command has a page. Files that are said to be for the
public verify.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import coterie
from coterie.cli.main import build_parser, main
from coterie.methods.base import choices
from coterie.plan.plan import Plan
from coterie.tune.compare import make_comparison

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \|", re.MULTILINE)
_STUB = Path(coterie.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
PARSER = build_parser()
HOMES = {
    name: f"coterie.{module}"
    for module, name in re.findall(r"^from \.(\w\S*) import (\w+) as", _STUB, re.MULTILINE)
}


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


@pytest.mark.full
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
        status, found = printed(command)
        where = f"{page.name}, line {block.line}: $ {command}\n{found}"
        assert matches(expected, found), where
        # A command may fail on a page only where the page shows the error.
        assert status == 0 or re.search(r"^coterie \w+: ", expected, re.MULTILINE), where


def printed(command):
    """Run a command; return its exit status and what it prints, results first."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(command)[1:])
    return status, out.getvalue() + err.getvalue()


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


def test_public_names_are_those_of_their_modules():
    # A module of the same name would take the place of a name that is loaded on first use.
    for name, home in HOMES.items():
        assert getattr(coterie, name) is getattr(importlib.import_module(home), name)


@with_blocks("sh", "bash", "shell")
def test_commands_parse(page):
    for block in blocks(page, "sh", "bash", "shell"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["coterie"]:
                continue
            try:
                PARSER.parse_args(words[1:])
            except SystemExit:
                pytest.fail(f"{page.name}, line {block.line}: does not parse: {line}")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_and_flags_in_the_text_exist(page):
    text, known = _FENCE.sub("", page.read_text(encoding="utf-8")), flags_by_command()
    for words in re.findall(r"`coterie ([a-z][^`]*)`", text):
        first, *rest = words.split()
        assert first in known, f"{page.name}: coterie {words}"
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= known[first], f"{page.name}: coterie {words}"
    anywhere = flags_of(PARSER) | flags_of_programs()
    for flag in re.findall(r"`(--[a-z][a-z-]*)", text):
        assert flag in anywhere, f"{page.name}: no command has {flag}"


@functools.cache
def flags_by_command():
    found = {}
    for action in PARSER._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[name] = flags_of(command)
    return found


@functools.cache
def flags_of_programs():
    """Find the flags of benchmarks and examples, which pages speak of too."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    return {flag for one in programs for flag in re.findall(r'"(--[a-z-]+)"', one.read_text())}


def flags_of(parser):
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(flags_of, action.choices.values()))
    return flags


def test_every_command_is_shown_on_a_page():
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    shown = "\n".join(b.text for page in pages for b in blocks(page, "sh", "bash", "console"))
    for name in set(flags_by_command()) - {"join"}:  # the former name of `onboard`
        assert re.search(rf"^(\$ )?coterie {name}\b", shown, re.MULTILINE), name


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a-run"
    line = f"run --anyway --data synthetic --option clients=20 --rounds 2 --quiet --out {folder}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(line)) == 0
    return folder, out.getvalue()


def first_column(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text.split("\n## ")[0], re.MULTILINE)


@pytest.mark.full
def test_files_to_publish_verify_and_none_is_idle(a_run, tmp_path):
    names = first_column("how-to/publish.md")
    assert len(names) >= 4
    for number, left_out in enumerate([None, *names]):
        copy = tmp_path / str(number)
        copy.mkdir()
        for name in set(names) - {left_out}:
            shutil.copy(a_run[0] / name, copy)
        status, found = printed(f"coterie verify {copy}")
        assert (status == 0) == (left_out is None), f"without {left_out}:\n{found}"


def test_pages_agree_on_what_to_publish():
    names = set(first_column("how-to/publish.md"))
    text = (ROOT / "docs" / "how-to" / "publish.md").read_text(encoding="utf-8")
    assert set(re.search(r"^cp \S+{(.*?)}", text, re.MULTILINE)[1].split(",")) == names
    told = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    told = re.search(r"To publish a run, publish(.*?):", told, re.DOTALL)[1]
    assert set(re.findall(r"`([^`]+)`", told)) == names


@pytest.mark.full
def test_every_file_of_a_run_is_on_the_page(a_run):
    listed = {name.rstrip("/") for name in first_column("run-folder.md")}
    assert {path.name for path in a_run[0].iterdir()} <= listed


@pytest.mark.full
def test_the_server_is_told_of_where_the_page_says(a_run):
    text = (ROOT / "docs" / "concepts" / "views.md").read_text(encoding="utf-8")
    (said,) = (part for part in text.split("\n\n") if part.startswith("`coterie plan`"))
    printing, _, in_words = said.partition("print the infinite")
    commands = re.findall(r"`coterie (\w+)`", printing)
    assert commands and re.findall(r"`coterie (\w+)`", in_words) == ["run"]
    given = {"account": "--noise-multiplier 10", "calibrate": "--epsilon 2"}
    for name in commands:
        more = given.get(name, "--parameters 5 --epsilon 2 --no-plot")
        _, found = printed(f"coterie {name} --clients 500 --rounds 5 {more}")
        lines = [line for line in found.splitlines() if "server" in line]
        assert any(re.search(r"\binf\b", line) for line in lines), found
    folder, out = a_run
    assert json.loads((folder / "guarantee.json").read_text())["views"]["server"] == "inf"
    assert re.search(r"\bthe server\s[^.]{0,40}\binf\b", shown(folder / "report.html"))
    assert "Not covered: the server" in " ".join(out.split())


def shown(page):
    """Return the text of a page of HTML, without programs and tags."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"<[^>]*>", " ", text)


def test_help_is_of_the_command_it_stands_in():
    plan, compare, run = (helps_of(name) for name in ("plan", "compare", "run"))
    assert all(plan[flag].startswith("number of") for flag in ("--clients", "--features"))
    assert run["--clients"].startswith("use the first") and "--noise-multiplier" in run
    # A comparison has several methods, and budgets: what is of one run is not offered.
    assert "--methods" in compare
    assert not {"--method", "--noise-multiplier", "--finetune"} & compare.keys()


def helps_of(name):
    (choices,) = (a for a in PARSER._actions if isinstance(a, argparse._SubParsersAction))
    return {
        action.option_strings[-1]: action.help
        for action in choices.choices[name]._actions
        if action.option_strings and action.help not in (None, argparse.SUPPRESS)
    }


def test_one_word_for_a_clients_model():
    # mpmtl has a setting of that name, and rows of a table that is measured.
    pages = [page for page in PAGES if page.parent.name != "adr" and page.name != "mpmtl.md"]
    for page in [*pages, *(ROOT / "docs" / "pictures").glob("*.svg")]:
        found = re.search(r"[^\n]*\bown models?\b[^\n]*", page.read_text(encoding="utf-8"))
        assert not found, f"{page.name}: say personal: {found[0]}"


@with_blocks("toml")
def test_plans_are_plans(page):
    for block in blocks(page, "toml"):
        table = tomllib.loads(block.text)
        (make_comparison if "compare" in table else Plan.from_table)(table)


@pytest.mark.parametrize("name", sorted(choices()))
def test_settings_are_those_of_the_method(name):
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.exists(), f"{name} has no page: write docs/methods/{name}.md"
    listed = dict(_ROW.findall(page.read_text(encoding="utf-8")))
    assert listed == settings(choices()[name]())


@pytest.mark.parametrize("name", sorted(choices()))
def test_method_pages_say_what_has_to_be_said(name):
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    runs = re.findall(r"coterie run [^\n]*", text)
    assert blocks(ROOT / "docs" / "methods" / f"{name}.md", "python"), "an example that is run"
    assert runs, "the command line"
    for said in ("released|Guarantee", "When"):
        assert re.search(rf"^## .*({said})", text, re.MULTILINE), f"a section on: {said}"


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


def test_public_names_are_in_the_reference():
    listed = {
        one
        for page in (ROOT / "docs" / "api").glob("*.md")
        for one in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for name, home in HOMES.items():
        known = {home, f"{home}.{name}"} & listed
        assert known, f"put `::: {home}.{name}` on a page of docs/api"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_lists_are_lists_on_the_site_too(page):
    # The site's Markdown wants an empty line before a list, and steps of four spaces inside it.
    lines = _FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    for before, line in itertools.pairwise(lines):
        if found := re.match(r"( *)(?:[-*]|\d+\.) ", line):
            begins = not re.match(r" *(?:[-*]|\d+\.) | {2,}", before)
            assert not (begins and before.strip()), f"{page.name}: no empty line before: {line}"
            assert len(found[1]) % 4 == 0, f"{page.name}: indent by four spaces: {line}"
            inner = re.match(r" +(?:[-*]|\d+\.) ", before)
            assert not (inner and not found[1]), f"{page.name}: no empty line before: {line}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pictures_say_what_they_show(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", text):
        assert len(words) >= 5, f"{page.name}: {target} has no words for those who cannot see it"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
