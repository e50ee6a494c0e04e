"""The front of the command line: the help page, and mistakes with what was probably meant."""

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

_START = """\
Private federated multi-task learning: one model per client, and an epsilon that is true.

start here
  coterie plan --clients 550 --epsilon 1 --numbers 10   # does joining pay? no data is touched
  coterie data show districts                           # what the data look like
  coterie run --data districts --epsilon 1              # one model per client, and a report
  coterie account --clients 205 --cohort 100 --rounds 1000 --noise-multiplier 10
  coterie doctor                                        # is this machine fit for it?
"""
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan, before anything is spent": ("plan", "account", "calibrate"),
    "train": ("run", "compare", "tune", "demo", "onboard"),
    "deploy, over a network": ("deploy",),
    "look": ("report", "data", "methods"),
    "check": ("verify", "doctor", "audit"),
    "keep and use": ("export", "predict", "completion"),
}
_OTHERS = "more"
_COMMANDS = ("COMMAND", "show")
"""What stands in usage lines where a command does."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with what was probably meant."""

    _words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        told = _explain(message) + _dashed(message, self._words)
        told += " See" if told.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {told} `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; refuse flags that nobody knows, each in the words of its own command."""
        self._words = sys.argv[1:] if args is None else list(args)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return known, unknown

    def _unknown(self, arguments: Sequence[str]) -> str:
        told = f"unknown argument {arguments[0]!r}"
        flag = arguments[0].partition("=")[0]
        if not flag.startswith("-"):
            return f"{told}: {self.prog} takes no such word here"
        near = closest(flag, self._option_string_actions)
        return f"{told}: did you mean {near}?" if near else told


class Front(Parser):
    """The parser of all commands, whose help reads as a page."""

    def format_help(self) -> str:
        """Set the page: where to start, then every command in a line, by what it is for."""
        named = {action.dest: action.help or "" for action in self._commands_listed()}
        width = max((len(name) for name in named), default=0)
        lines = [f"usage: {self.prog} COMMAND [...]", "", _START]
        for title, names in grouped(named).items():
            lines += [title, *(_entry(name, named[name], width) for name in names), ""]
        options = [action for action in self._actions if action.option_strings]
        wide = max(len(", ".join(action.option_strings)) for action in options)
        lines += ["options"]
        lines += [
            _entry(", ".join(action.option_strings), action.help or "", wide) for action in options
        ]
        lines += ["", f"`{self.prog} COMMAND --help` has the flags of a command and an example.\n"]
        return "\n".join(lines)

    def _commands_listed(self) -> Iterable[argparse.Action]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action._choices_actions


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Put commands into groups; those that no group names come last.

    >>> grouped(["run", "dance"])
    {'train': ['run'], 'more': ['dance']}
    """
    left = list(names)
    groups = {title: [name for name in known if name in left] for title, known in _GROUPS.items()}
    placed = {name for members in groups.values() for name in members}
    groups[_OTHERS] = [name for name in left if name not in placed]
    return {title: members for title, members in groups.items() if members}


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the word that was probably meant.

    >>> closest("comapre", ["compare", "plan"]), closest("xyz", ["plan"])
    ('compare', None)
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _entry(name: str, about: str, width: int) -> str:
    """Set a name and what it is about, in as many lines as the terminal needs."""
    indent = " " * (width + 4)
    room = max(40, min(shutil.get_terminal_size().columns, 100))
    return textwrap.fill(
        about, room, initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent
    )


def _explain(message: str) -> str:
    """Put argparse's words for a choice that does not exist into ours."""
    found = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
    if found is None:
        return message
    place, given, listed = found.groups()
    known = [name.strip("' ") for name in listed.split(",")]
    near = closest(given, known)
    meant = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
    what = "command" if place in _COMMANDS else place
    return f"unknown {what} {given!r}: {meant}"


def _dashed(message: str, words: Sequence[str]) -> str:
    """Say how a value is written that begins with a dash, where one may have been meant.

    >>> _dashed("argument --client: expected one argument", ["--client", "--all"])
    '; a value that begins with a dash is written --client=--all'
    """
    found = re.match(r"argument (\S+): expected one argument", message)
    if found is None:
        return ""
    names = found[1].split("/")
    pairs = pairwise(words)
    near = next((pair for pair in pairs if pair[0] in names and pair[1].startswith("-")), None)
    return f"; a value that begins with a dash is written {'='.join(near)}" if near else ""
