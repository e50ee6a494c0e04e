"""The help pages of the command line, and errors with suggestions."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NoReturn

from coterie.core.suggest import closest, did_you_mean

_ABOUT = (
    "Private federated multi-task learning: one model per client, with an epsilon that others can "
    "check."
)
_START = (
    "  coterie plan --clients 550 --epsilon 1 --parameters 10  # does joining pay? reads no data",
    "  coterie init my.csv                                     # look at a table, write its plan",
    "  coterie run --data districts --epsilon 1                # one model per client, a report",
    "  coterie account --clients 205 --cohort 100 --rounds 1000 --noise-multiplier 10",
    "  coterie doctor                                          # check this machine",
)
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan, before any budget is spent": ("init", "plan", "account", "calibrate"),
    "train": ("run", "compare", "tune", "demo", "onboard"),
    "deploy, over a network": ("deploy",),
    "inspect": ("report", "data", "methods", "papers"),
    "check": ("verify", "sign", "audit", "budget", "doctor"),
    "use": ("export", "predict", "completion"),
}
_OTHERS = "more"
_COMMANDS = ("COMMAND", "show")
"""How usage lines denote a command."""
_ALL = "--help-all"
_RENAMED = {
    "--methods": ("--method",),
    "--epsilons": ("--epsilon",),
    "--charge-tuning": ("--charge",),
    "--numbers": ("--parameters",),
    "--client": ("--client-column",),
    "--newcomers": ("--holdout-clients", "--unknown-clients"),
}
"""Other spellings of flags that are accepted: former ones, and that of `coterie init`."""
_TYPES = {"int": "a whole number", "float": "a number"}


class _Help(argparse.Action):
    """Prints help and ends: the usual flags, or all of them."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, flag: Any = None) -> None:
        """Print to stdout; exit with status 0."""
        assert isinstance(parser, Parser)
        short = parser.short and flag != _ALL
        print(parser.format_short() if short else parser.format_help(), end="")
        parser.exit()


class _Format(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal; keeps lines that are indented, such as commands."""

    def __init__(self, prog: str) -> None:
        width = _width() - 2
        super().__init__(prog, max_help_position=30 if width > 75 else 24, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, _: str) -> str:
        lines: list[str] = []
        for kept, group in groupby(text.split("\n"), lambda line: line[:1] in ("", " ")):
            part = list(group)
            lines += map(self._fit, part) if kept else [textwrap.fill(" ".join(part), width)]
        return "\n".join(lines)

    def _fit(self, line: str) -> str:
        """Return an indented line, wrapped if it is too long and no command."""
        lead = line[: len(line) - len(line.lstrip())]
        if len(line) <= self._width or re.match(r" +(\w+: +)?coterie ", line):
            return line
        return textwrap.fill(line, self._width, subsequent_indent=f"{lead}  ")


class Parser(argparse.ArgumentParser):
    """A parser with a short and a whole help page; its errors are one line, with a suggestion."""

    short: tuple[str, ...] = ()
    """The flags that `--help` shows; none for all of them."""
    _given: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Format, **options, "add_help": False})
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show help and exit")
        self._whole = self.add_argument(_ALL, action=_Help, nargs=0, help=argparse.SUPPRESS)

    def shorten(self, flags: tuple[str, ...]) -> None:
        """Let `--help` show only these flags; `--help-all` shows all."""
        self.short, self._whole.help = flags, "show all flags and exit"

    def format_help(self) -> str:
        """Return the page of all flags."""
        self.usage = self._usage()
        return super().format_help()

    def format_short(self) -> str:
        """Return the page of the usual flags."""
        about = (self.description or "").partition("\n\n")[0]
        usual = [self._option_string_actions[flag] for flag in self.short]
        page = self._get_formatter()
        page.add_usage(self._usage(), (), ())
        page.add_text(about)
        page.start_section("usual flags")
        page.add_arguments([*self._places(), *usual])
        page.end_section()
        page.add_text(self.epilog)
        flags = [one for one in self._actions if one.option_strings]
        count = sum(flag.help != argparse.SUPPRESS for flag in flags)
        page.add_text(f"`{self.prog} {_ALL}` shows all {count} flags.")
        return page.format_help()

    def _places(self) -> list[argparse.Action]:
        return [action for action in self._actions if not action.option_strings]

    def _usage(self) -> str:
        """Return what must be given, wrapped: many flags take a screen and say nothing more."""
        form, groups = self._get_formatter(), self._mutually_exclusive_groups

        def shape(one: argparse.Action) -> str:
            return " ".join((*one.option_strings[-1:], form._format_args(one, one.dest)))

        one_of = [group._group_actions for group in groups if group.required]
        inside = [one for group in groups for one in group._group_actions]
        flags = [one for one in self._actions if one.option_strings]
        needed = [one for one in flags if one.required and one not in inside]
        parts = [self.prog, *map(shape, (*self._places(), *needed))]
        parts += [f"({' | '.join(map(shape, group))})" for group in one_of]
        text = " ".join((*parts, "[FLAG ...]")).replace("%", "%%")
        return textwrap.fill(text, _width() - 9, subsequent_indent=" " * 7, break_on_hyphens=False)

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        text = _explain(message) + _dashed(message, self._given)
        text += " See" if text.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {text} `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown flags are errors of the command that they follow."""
        self._given = [self._renamed(word) for word in (sys.argv[1:] if args is None else args)]
        known, unknown = super().parse_known_args(self._given, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return known, unknown

    def _renamed(self, word: str) -> str:
        """Return a flag as it is spelled now; its own flags come first."""
        flag, equals, value = word.partition("=")
        own = self._option_string_actions
        names = [name for name in _RENAMED.get(flag, ()) if name in own and flag not in own]
        return f"{names[0]}{equals}{value}" if names else word

    def _unknown(self, arguments: Sequence[str]) -> str:
        text = f"unknown argument {arguments[0]!r}"
        flag = arguments[0].partition("=")[0]
        flags = self._option_string_actions
        if not flag.startswith("-"):
            meant = "--plan" if flag.endswith(".toml") else "--data"
            if meant in flags and Path(flag).exists():
                return f"{text}: did you mean {meant} {flag}?"
            return f"{text}: {self.prog} expects none here"
        # A word of the flag says more than its letters: --seed is --simulation-seed, not --set.
        whole = [name for name in flags if flag.strip("-") in name.strip("-").split("-")]
        near = whole[0] if len(whole) == 1 else closest(flag, flags)
        return f"{text}: did you mean {near}?" if near else text


class Front(Parser):
    """The parser of all commands; its help is a page."""

    def format_help(self) -> str:
        """Return the page: where to start, then every command in a line, by purpose."""
        named = {action.dest: action.help or "" for action in self._commands_listed()}
        columns = max((len(name) for name in named), default=0)
        width = _width()
        fits = max(map(len, _START)) <= width
        starts = (line if fits else line.partition("#")[0].rstrip() for line in _START)
        lines = [f"usage: {self.prog} COMMAND [...]", "", textwrap.fill(_ABOUT, width), ""]
        lines += ["start here", *starts, ""]
        for title, names in grouped(named).items():
            lines += [title, *(_entry(name, named[name], columns) for name in names), ""]
        options = {
            ", ".join(action.option_strings): action.help or ""
            for action in self._actions
            if action.option_strings and action.help != argparse.SUPPRESS
        }
        columns = max(map(len, options))
        lines += ["options", *(_entry(name, text, columns) for name, text in options.items())]
        more = (
            f"`{self.prog} COMMAND --help` shows the usual flags of a command and an example, and "
            f"{_ALL} all of its flags."
        )
        return "\n".join([*lines, "", f"{textwrap.fill(more, width)}\n"])

    def _commands_listed(self) -> Iterable[argparse.Action]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action._choices_actions


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return commands by group; those without a group come last.

    >>> grouped(["run", "dance"])
    {'train': ['run'], 'more': ['dance']}
    """
    left = list(names)
    groups = {title: [name for name in known if name in left] for title, known in _GROUPS.items()}
    placed = {name for members in groups.values() for name in members}
    groups[_OTHERS] = [name for name in left if name not in placed]
    return {title: members for title, members in groups.items() if members}


def _width() -> int:
    return max(40, min(shutil.get_terminal_size().columns, 100))


def _entry(name: str, about: str, width: int) -> str:
    """Return a name and its help, wrapped to the terminal."""
    indent = " " * (width + 4)
    return textwrap.fill(
        about, _width(), initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent
    )


def _explain(message: str) -> str:
    """Return a clearer message for a value that does not fit."""
    if found := re.match(r"argument (\S+): invalid (int|float) value: (.*)", message):
        return f"{found[1]} {found[3]}: expected {_TYPES[found[2]]}"
    if found := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message):
        place, given, listed = found.groups()
        known = [name.strip("' ") for name in listed.split(",")]
        what = "command" if place in _COMMANDS else place
        return f"unknown {what} {given!r}: {did_you_mean(given, known)}"
    return message


def _dashed(message: str, given: Sequence[str]) -> str:
    """Return how to write a value that begins with a dash, if one was given.

    >>> _dashed("argument --client: expected one argument", ["--client", "--all"])
    '; a value that begins with a dash is written --client=--all'
    """
    found = re.match(r"argument (\S+): expected one argument", message)
    if found is None:
        return ""
    names = found[1].split("/")
    pairs = pairwise(given)
    near = next((pair for pair in pairs if pair[0] in names and pair[1].startswith("-")), None)
    return f"; a value that begins with a dash is written {'='.join(near)}" if near else ""
