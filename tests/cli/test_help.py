"""Help: a page of commands, the usual flags of each, all flags, and what a typo meant."""

import argparse
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from coterie.cli.front import grouped
from coterie.cli.main import build_parser, main

ROOT = Path(__file__).resolve().parents[2]


def parsers(parser=None, before=()):
    """Return the parser of every command, those below others too; aliases are left out."""
    found = {}
    for action in (parser or build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {choice.dest for choice in action._choices_actions}
            for name in listed & action.choices.keys():
                below = action.choices[name]
                found |= {" ".join((*before, name)): below, **parsers(below, (*before, name))}
    return found


PARSERS = parsers()
COMMANDS = sorted(PARSERS)
SHORTENED = [name for name in COMMANDS if PARSERS[name].short]


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture
def coterie(capsys):
    def call(line):
        capsys.readouterr()
        try:
            code = main(shlex.split(line))
        except SystemExit as stop:
            code = stop.code
        return Finished(code, *capsys.readouterr())

    return call


def flags_of(parser):
    """Return the longest spelling of every flag that is not hidden."""
    visible = [one for one in parser._actions if one.help != argparse.SUPPRESS]
    return {max(one.option_strings, key=len) for one in visible if one.option_strings}


def shown_in(page):
    """Return the flags that begin a line of a help page, in order."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, re.M)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_shows_an_example_that_parses(coterie, command, flag):
    done = coterie(f"{command} {flag}")
    assert done.code == 0 and done.err == ""
    head, _, example = done.out.partition("example:\n")
    assert command.split()[0] in head
    parsed = build_parser().parse_args(shlex.split(example.splitlines()[0])[1:])
    assert parsed.command == command.split()[0]


def test_every_command_is_tested():
    assert {"plan", "run", "data show", "doctor", "completion"} <= set(COMMANDS)
    assert {"run", "tune", "compare", "plan"} <= set(SHORTENED)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_help_all_has_every_flag(coterie, command):
    usual, every = coterie(f"{command} --help").out, coterie(f"{command} --help-all").out
    flags = flags_of(PARSERS[command])
    assert all(re.search(rf"^  .*{flag}\b", every, re.M) for flag in flags)
    if command not in SHORTENED:
        assert len(flags) <= 16 and usual == every
        return
    assert shown_in(usual) == list(PARSERS[command].short) and len(shown_in(usual)) <= 11
    assert f"`coterie {command} --help-all` shows all {len(flags)} flags." in " ".join(
        usual.split()
    )
    assert len(usual.splitlines()) < 45 < len(every.splitlines())


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(coterie, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = coterie(f"{command} --help-all").out.partition("\nexample:")[0]
    long = [line for line in page.splitlines() if len(line) > min(columns, 100)]
    flags = r"  (-\w, )?--[\w-]+ \S+(, --[\w-]+ \S+)?"
    assert all(re.fullmatch(flags, line) or re.search(": +coterie ", line) for line in long), long
    below = re.findall(r"^( {24,})\S", page, re.M)
    assert all(len(indent) <= 30 for indent in below)  # the column of texts stays wide


def test_the_overview_starts_people_off(coterie):
    done = coterie("--help")
    assert done.code == 0
    lines = [line.strip() for line in done.out.splitlines() if line.startswith("  coterie ")]
    assert len(lines) == 5 and "--help-all" in done.out
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])
    assert coterie("--version").out.startswith("coterie ")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_reads_as_a_page_of_groups(coterie, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = coterie("--help").out
    page = out[out.index("\nstart here") : out.index("\n\n`coterie COMMAND")]
    heads = [line for line in page.splitlines() if line and not line.startswith(" ")]
    assert [head.split(",")[0].split()[0] for head in heads] == [
        "start", "plan", "train", "deploy", "inspect", "check", "use", "options",
    ]  # fmt: skip
    page = out[out.index("\nplan, before") :]
    for name in (name for name in COMMANDS if " " not in name):
        assert re.search(rf"^  {name} +\w", page, re.M), name
    assert max(map(len, page.splitlines())) <= min(100, int(columns))


def test_a_command_that_no_group_names_is_shown_all_the_same():
    found = grouped(["plan", "dance"])
    assert found["more"] == ["dance"]


def test_the_page_of_the_docs_has_every_flag_of_every_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # which the page sets for itself
    page = runpy.run_path(str(ROOT / "tools" / "docs_hooks.py"))["cli_page"]()
    for command, parser in PARSERS.items():
        part = page.partition(f"## coterie {command}\n")[2].partition("\n## ")[0]
        assert all(flag in part for flag in flags_of(parser)), command


@pytest.mark.parametrize(
    ("line", "now"),
    [
        (
            "compare --methods local,pmtl --epsilons 1,2",
            {"method": "local,pmtl", "epsilon": (1, 2)},
        ),
        ("compare --methods=local --charge-tuning", {"method": "local", "charge": True}),
        ("run --newcomers 3 --epsilons 1", {"newcomers": 3, "epsilon": 1}),
        ("plan --clients 5 --numbers 3", {"clients": 5, "parameters": 3}),
        ("predict run --data a.csv --newcomers shared", {"unknown_clients": "shared"}),
        ("data show --data districts", {"data": "districts"}),
        ("data show districts", {"data": "districts"}),
        ("init my.csv --client-column hospital", {"client": "hospital", "file": "my.csv"}),
        ("init --data my.csv --client hospital", {"client": "hospital", "file": "my.csv"}),
        ("join run --data a.csv --out new", {"run": "run"}),
    ],
)
def test_former_and_other_spellings_are_understood(line, now):
    found = vars(build_parser().parse_args(shlex.split(line)))
    assert {name: found[name] for name in now} == now


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("rnu", "unknown command 'rnu': did you mean run?"),
        ("reprot here", "unknown command 'reprot': did you mean report?"),
        ("zzz", "unknown command 'zzz': expected one of init, run, demo"),
        ("run --epsilom 1", "unknown argument '--epsilom': did you mean --epsilon?"),
        ("account --clients 5 --rounds 2 --noise-multiplier 1 --jsom", "did you mean --json?"),
        ("plan --relation zero_oot", "unknown --relation 'zero_oot': did you mean zero_out?"),
        ("doctor more", "unknown argument 'more'"),
        ("data shwo digits", "unknown command 'shwo': did you mean show?"),
        ("data list", "unknown command 'list': expected one of show"),
        ("export run --client --all", "begins with a dash is written --client=--all"),
        ("run --epsilon", "argument --epsilon: expected one argument; see"),
        ("run --rounds ten", "--rounds 'ten': expected a whole number; see"),
        ("run --data districts --clie d", "--clients, --client-column"),
        ("completion bahs", "did you mean bash?"),
    ],
)
def test_what_was_probably_meant_is_said_in_one_line(coterie, line, told):
    done = coterie(line)
    assert done.code == 2 and done.out == ""
    assert told in done.err and len(done.err.splitlines()) == 1
    assert re.search(r"[;?] [sS]ee `coterie.* --help`$", done.err.strip())
