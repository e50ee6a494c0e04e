"""Documentation that cannot drift: examples run as printed, settings and links are real.

In README.md and under docs/, in document order, with one namespace and one empty working folder a
document:

- `python` blocks are executed. A block with a file name as its title is written to that file.
- `console` blocks are run (lines after "$ ") and what they print is compared (numbers to 0.2 %,
  "..." stands for any lines, or for the end of one). Noise comes from a fixed stream, so that pages
  may show what a real run prints.
- Lines of `sh` blocks are run. Exempt are those of `NOT_RUN`, with a reason each. Those of `LONG`,
  and trainings on the pages of methods, run in `make test-slow`; the daily suite begins such a
  `coterie run` as printed, with its data, plan and folder, and ends it before the first round. All
  lines have to parse.
- `py` blocks are code of other packages, which are not installed here: they have to parse.
- `toml` blocks have to be plans. `text` and `ini` blocks are not run.

`make examples` writes the numbers of today into the pages, where the texts around them still match.

Commands and flags named in the text have to exist. Every method and every command has a page. Files
that are said to be for the public verify.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import coterie
from coterie.cli.main import build_parser, main
from coterie.methods.base import choices
from coterie.planning.plan import Plan
from coterie.privacy.entropy import SeededEntropy
from coterie.solvers.sgd import SGD
from coterie.tune.compare import make_comparison

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \|", re.MULTILINE)
_STUB = Path(coterie.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
PARSER = build_parser()
HOMES = {
    name: f"coterie.{module}"
    for module, name in re.findall(r"^from \.(\w\S*) import (\w+) as", _STUB, re.MULTILINE)
}


NOT_RUN = {
    r"pip install ": "needs a package index; tests/test_wheel.py installs a wheel",
    r"make (run|test|demo-flower)\b": "builds an environment",
    r"\. \.venv/bin/activate": "of the environment that make builds",
    r"(flwr|flower-supernode|coterie deploy super(link|node)) ": "they stay; tests/deploy/real",
    r"coterie deploy demo": "starts a federation; tests/deploy/real",
    r"coterie deploy (init \w+ --plan \S+ --federation|status) ": "files of other machines",
    r"coterie (verify|report) runs/ward": "the run that flwr starts",
    r"(cd ward|umask|openssl|ssh-keygen|export FLWR_\w+=)": "keys and settings of a deployment",
    r"(cryptsetup|mkfs\.ext4|mount|install) ": "a disk of one's own",
    r"coterie .*(har|landmine|school|femnist)\.npz": "data that is not ours",
    r"coterie .*stackoverflow_train\.h5": "data that is not ours",
    r"(export COTERIE_DATA|coterie .*(\$COTERIE_DATA|leaf/data))": "data that is not ours",
    r"coterie onboard runs/har": "a run on data that is not ours",
    r"coterie run --data my\.csv": "a table of the reader's",
    r"python benchmarks/": "studies, for minutes to hours; `make study-...`",
    r"python examples/public_features\.py": "data that is not ours; test_public_features.py",
}
"""Lines of `sh` blocks that no test runs, and why."""
PROGRAMS = {"coterie", "python", "mkdir", "cp", "head"}
"""What lines that are run may start with."""
LONG = {
    r"coterie demo": 20,
    r"coterie compare": 60,
    r"coterie tune ": 10,
    r"coterie run --plan (exam|optuna|public)\.toml": 2,
    r"coterie audit --data districts --method pmtl --epsilon 4": 4,
    r"coterie plan .*--plot": 3,
    r"coterie report .*--figures": 3,
    r"coterie export .*--format": 5,
    r"coterie run --data digits .*--finetune": 5,
    r"coterie run .*--track mlflow": 5,
}
"""Lines that run to their end in `make test-slow` only, with about their seconds."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str
    line: int

    @property
    def lines(self):
        """Return the commands of a block, without comments."""
        found = self.text.replace("\\\n", " ").splitlines()
        return [line for line in found if shlex.split(line, comments=True)]


def blocks(page, *languages):
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found[1],
            next(iter(re.findall(r'title="([^"]*)"', found[2])), ""),
            found[3],
            text.count("\n", 0, found.start(3)) + 1,
        )
        for found in _FENCE.finditer(text)
        if found[1] in languages
    ]


def one_of(patterns, line):
    return any(re.match(pattern, line) for pattern in patterns)


def with_blocks(*languages):
    chosen = [page for page in PAGES if blocks(page, *languages)]
    return pytest.mark.parametrize("page", chosen, ids=[str(p.relative_to(ROOT)) for p in chosen])


@pytest.fixture
def fixed_noise(monkeypatch):
    """Draw the noise and cohorts of real runs from a seed, not from the operating system."""

    def opened(seed, purpose, index):
        return SeededEntropy(seed or 0, purpose, index)

    for name in ("planning.plan", "engine.simulate"):
        monkeypatch.setattr(f"coterie.{name}.open_entropy", opened)


RUN = ("python", "console", "sh", "bash", "toml", "text")
_SEEN: set[str] = set()


@pytest.mark.full
@with_blocks(*RUN[:4])
def test_examples_run(page, tmp_path, monkeypatch, fixed_noise):
    run_page(page, tmp_path, monkeypatch, long=False)


@pytest.mark.slow
@with_blocks("sh", "bash")
def test_long_examples_run(page, tmp_path, monkeypatch, fixed_noise):
    lines = [line for block in blocks(page, "sh", "bash") for line in block.lines]
    if page.parent.name == "methods" or any(one_of(LONG, line) for line in lines):
        run_page(page, tmp_path, monkeypatch, long=True)


def run_page(page, folder, monkeypatch, *, long):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # for modules that the page writes
    namespace = {"__name__": "__main__"}
    for block in blocks(page, *RUN):
        if re.fullmatch(r"[\w.-]+\.\w+", block.title):
            Path(block.title).write_text(block.text, encoding="utf-8")
            monkeypatch.delitem(sys.modules, block.title.removesuffix(".py"), raising=False)
        elif block.language == "python":
            # Empty lines in front make tracebacks name the document's own line.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, page, "exec"), namespace)
        elif block.language == "console":
            check_console(page, block)
        elif block.language in ("sh", "bash"):
            for line in block.lines:
                run_line(page, block, line, monkeypatch, long=long)


class Ready(BaseException):
    """All is ready for the first round of a run."""


def run_line(page, block, line, monkeypatch, *, long):
    """Run a line as printed, once if it needs no file of its page."""
    where = f"{page.name}, line {block.line}: {line}"
    if one_of(NOT_RUN, line):
        return
    words = shlex.split(line, comments=True)
    assert words[0] in PROGRAMS, f"neither run nor exempt: {where}"
    training = words[:2] == ["coterie", "run"]
    if not long and (one_of(LONG, line) or (training and page.parent.name == "methods")):
        if training and "--plan" not in words:  # a plan that a long line before it writes
            begin(line, monkeypatch)
        return
    kept = any(Path(word).exists() or word in ("--out", "--new-key") for word in words)
    if words[0] == "coterie" and not kept and line in _SEEN:
        return
    _SEEN.add(line)
    status, found = printed(line)
    assert status == 0, f"{where}\n{found}"


def begin(line, monkeypatch):
    """Begin a run as printed: read its data, settle its plan, claim its folder; then stop."""

    def ready(*given):
        raise Ready

    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.run._train", ready)
        with pytest.raises(Ready):
            printed(line)


def check_console(page, block):
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        status, found = printed(command)
        where = f"{page.name}, line {block.line}: $ {command}\n{found}"
        if os.environ.get("COTERIE_REWRITE") and not matches(expected, found):
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace(expected, rewritten(expected, found)), encoding="utf-8")
        else:
            assert matches(expected, found), where
        # A command may fail on a page only where the page shows the error.
        assert status == 0 or re.search(r"^coterie \w+: ", expected, re.MULTILINE), where


def printed(command):
    """Run a command; return its exit status and what it prints, results first."""
    program, *words = shlex.split(command, comments=True)
    assert program in PROGRAMS, command
    if program == "python":  # a program of examples/, here or beside the reader
        assert len(words) == 1, f"arguments would be ignored: {command}"
        runpy.run_path(str(ROOT / "examples" / Path(words[0]).name), run_name="__main__")
        return 0, ""
    if program != "coterie":
        line = ["bash", "-c", command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue() + err.getvalue()


def rewritten(expected, found):
    """Return what a page shows with the numbers of today, where texts are those of the page."""

    def shape(line):
        return re.sub("─+", "─", _NUMBER.sub("#", " ".join(line.split())))

    lines, shown, place = found.splitlines(), [], 0
    for line in expected.splitlines():
        same_shape = (at for at in range(place, len(lines)) if shape(lines[at]) == shape(line))
        at = next(same_shape, None) if line.strip() else None
        place = place if at is None else at + 1
        shown.append(line if at is None else lines[at].rstrip())
    return "".join(f"{line}\n" for line in shown)


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
    if expected.endswith(" ..."):  # a long line that the page cuts
        expected = expected.removesuffix(" ...")
        found = " ".join(found.split()[: len(expected.split())])
    if _NUMBER.sub("#", expected) != _NUMBER.sub("#", found):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True)
    return all(
        math.isclose(float(a.replace(",", "")), float(b.replace(",", "")), rel_tol=2e-3)
        for a, b in pairs
    )


def test_the_comparison_itself():
    page, today = "a 1\n──\n...\nc 3\n", "a   10\n────\nb 2\nc 4\n"
    assert rewritten(page, today) == "a   10\n────\n...\nc 4\n"
    assert same("epsilon  4.611", "epsilon  4.6114") and not same("epsilon 4.611", "epsilon 4.7")
    assert not same("epsilon 4.611", "delta 4.611")
    assert same("a 1 ...", "a 1 b 2") and not same("a 1 ...", "b 1 b 2")
    assert matches("a 1\nb 2\n", "a   1\n\nb 2\n") and not matches("a 1\n", "a 1\nb 2\n")
    assert matches("a 1\n...\nc 3\n", "a 1\nb 2\nc 3\n") and not matches("a 1\n...\n", "b 1\n")
    assert matches("...\nb 2\n...\n", "a 1\nb 2\nc 3\n") and not matches("...\nb 2\n", "b 2\nc 3\n")


def test_public_names_are_those_of_their_modules():
    # A module of the same name would take the place of a name that is loaded on first use.
    for name, home in HOMES.items():
        assert getattr(coterie, name) is getattr(importlib.import_module(home), name)


@with_blocks("sh", "bash")
def test_commands_parse(page):
    for block in blocks(page, "sh", "bash"):
        for line in block.lines:
            words = shlex.split(line, comments=True)
            if words[:1] != ["coterie"]:
                continue
            try:
                PARSER.parse_args(words[1:])
            except SystemExit:
                pytest.fail(f"{page.name}, line {block.line}: does not parse: {line}")


@with_blocks("py")
def test_code_of_other_packages_parses(page):
    for block in blocks(page, "py"):
        ast.parse(block.text)


def test_every_exemption_is_needed_and_languages_are_known():
    lines = [line for page in PAGES for block in blocks(page, "sh", "bash") for line in block.lines]
    for pattern in (*NOT_RUN, *LONG):
        assert any(re.match(pattern, line) for line in lines), f"exempt, but on no page: {pattern}"
    known = {*RUN, "py", "ini", "bibtex", ""}
    used = {found[1] for page in PAGES for found in _FENCE.finditer(page.read_text("utf-8"))}
    assert used <= known


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


def first_column(page, section=None):
    """Return the names in the first column of a page's section; of its beginning without one."""
    text = "\n" + (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text if section is None else text.partition(f"\n## {section}\n")[2]
    return re.findall(r"^\| `([^`]+)` \|", text.split("\n## ")[0], re.MULTILINE)


@pytest.mark.full
def test_files_to_publish_verify_and_none_is_idle(a_run, tmp_path):
    names = first_column("review.md", "Publish")
    assert len(names) >= 4
    for number, left_out in enumerate([None, *names]):
        copy = tmp_path / str(number)
        copy.mkdir()
        for name in set(names) - {left_out}:
            shutil.copy(a_run[0] / name, copy)
        status, found = printed(f"coterie verify {copy}")
        assert (status == 0) == (left_out is None), f"without {left_out}:\n{found}"


def test_pages_agree_on_what_to_publish():
    names = set(first_column("review.md", "Publish"))
    text = (ROOT / "docs" / "review.md").read_text(encoding="utf-8")
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
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
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
    assert compare["--method"].startswith("default local,")
    assert not {"--noise-multiplier", "--finetune"} & compare.keys()


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


def test_settings_of_sgd_are_on_the_first_page_of_methods():
    page = ROOT / "docs" / "methods" / "index.md"
    listed = dict(_ROW.findall(page.read_text(encoding="utf-8")))
    assert listed == {f"sgd.{key}": value for key, value in fields_of(SGD()).items()}


@pytest.mark.parametrize("name", sorted(choices()))
def test_method_pages_say_what_has_to_be_said(name):
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    runs = re.findall(r"coterie run [^\n]*", text)
    assert blocks(ROOT / "docs" / "methods" / f"{name}.md", "python"), "an example that is run"
    assert runs, "the command line"
    for said in ("released|Guarantee", "When"):
        assert re.search(rf"^## .*({said})", text, re.MULTILINE), f"a section on: {said}"


def settings(value, prefix=""):
    """Return settings and defaults; those of `sgd` only where they differ from its own defaults."""
    found = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        name = prefix + field.name
        if isinstance(getattr(type(item), "kind", None), str):
            found[name] = type(item).kind
        elif isinstance(item, SGD):
            usual = fields_of(SGD())
            changed = {k: v for k, v in fields_of(item).items() if usual[k] != v}
            found |= {f"{name}.{key}": text for key, text in changed.items()}
        elif dataclasses.is_dataclass(item):
            found |= settings(item, f"{name}.")
        else:
            found[name] = str(item).lower()
    return found


def fields_of(value):
    return {f.name: str(getattr(value, f.name)).lower() for f in dataclasses.fields(value)}


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
    text = re.sub(r"^\$\$\n.*?^\$\$$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = _FENCE.sub("", text).splitlines()
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
    text = re.sub(r"\$[^$\n]+\$", "", text)  # formulas
    for target in _LINK.findall(text):
        if "://" not in target and not is_generated(page.parent / target):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def is_generated(target):
    """Return whether the site makes a page: of the command line, or of a notebook."""
    if target.parent.name == "notebooks" and target.stem != "index":
        return (ROOT / "examples" / f"{target.stem}.ipynb").exists()
    return target.resolve() == ROOT / "docs" / "cli.md"
