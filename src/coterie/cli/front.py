"""The help page of the command line, and errors with suggestions."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from coterie.core.suggest import closest, did_you_mean

_START = """\
Private federated multi-task learning: one model per client, with an epsilon that others can check.

start here
  coterie plan --clients 550 --epsilon 1 --parameters 10   # does joining pay? no data is read
  coterie init my.csv                                      # look at a table, write a plan for it
  coterie run --data districts --epsilon 1                 # one model per client, and a report
  coterie account --clients 205 --cohort 100 --rounds 1000 --noise-multiplier 10
  coterie doctor                                           # check this machine
"""
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan, before any budget is spent": ("init", "plan", "account", "calibrate"),
    "train": ("run", "compare", "tune", "demo", "onboard"),
    "deploy, over a network": ("deploy",),
    "inspect": ("report", "data", "methods"),
    "check": ("verify", "audit", "budget", "doctor"),
    "use": ("export", "predict", "completion"),
}
_OTHERS = "more"
_COMMANDS = ("COMMAND", "show")
"""How usage lines denote a command."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion."""

    _given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        text = _explain(message) + _dashed(message, self._given)
        text += " See" if text.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {text} `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown flags are errors of the command that they follow."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return known, unknown

    def _unknown(self, arguments: Sequence[str]) -> str:
        text = f"unknown argument {arguments[0]!r}"
        flag = arguments[0].partition("=")[0]
        if not flag.startswith("-"):
            return f"{text}: {self.prog} expects none here"
        flags = self._option_string_actions
        # A word of the flag says more than its letters: --seed is --simulation-seed, not --set.
        whole = [name for name in flags if flag.strip("-") in name.strip("-").split("-")]
        near = whole[0] if len(whole) == 1 else closest(flag, flags)
        return f"{text}: did you mean {near}?" if near else text


class Front(Parser):
    """The parser of all commands; its help is a page."""

    def format_help(self) -> str:
        """Return the page: where to start, then every command in a line, by purpose."""
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
        lines += [
            "",
            f"`{self.prog} COMMAND --help` shows the flags of a command and an example.\n",
        ]
        return "\n".join(lines)

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


def _entry(name: str, about: str, width: int) -> str:
    """Return a name and its help, wrapped to the terminal."""
    indent = " " * (width + 4)
    width_left = max(40, min(shutil.get_terminal_size().columns, 100))
    return textwrap.fill(
        about, width_left, initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent
    )


def _explain(message: str) -> str:
    """Return a clearer message for a choice that does not exist."""
    found = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
    if found is None:
        return message
    place, given, listed = found.groups()
    known = [name.strip("' ") for name in listed.split(",")]
    what = "command" if place in _COMMANDS else place
    return f"unknown {what} {given!r}: {did_you_mean(given, known)}"


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
