"""`coterie completion`: a script that completes commands, flags, files and names in a shell.

shtab makes the script from the parser, so that it knows every flag.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from coterie.cli.options import Commands, command, names

SHELLS = ("bash", "zsh", "fish", "tcsh")
_MORE = """\
Put it where your shell finds it:
  bash: coterie completion bash > ~/.local/share/bash-completion/completions/coterie
  zsh:  coterie completion zsh > ~/.zfunc/_coterie
  fish: coterie completion fish > ~/.config/fish/completions/coterie.fish
  tcsh: coterie completion tcsh >> ~/.tcshrc
For zsh, ~/.zfunc must be in fpath before compinit runs."""
_FOLDERS = ("DIR", "RUN")
_FILES = ("FILE", "PLAN")
_NAMED = {"--method": "methods", "--model": "models"}


def add(commands: Commands) -> None:
    """Add `completion`."""
    parser = command(
        commands,
        "completion",
        "print a script that completes commands, flags and names in your shell",
        "coterie completion bash",
        _MORE,
        action=_print,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def _print(arguments: argparse.Namespace) -> None:
    from coterie.cli.main import build_parser

    print(script(build_parser(), arguments.shell))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of a shell for a parser, which is changed on the way."""
    import shtab

    for action in _actions(parser):
        _prepare(action)
    return str(shtab.complete(parser, shell=shell, preamble=_data_function(shell)))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of all parsers below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _prepare(action: argparse.Action) -> None:
    """Set what completes the values of an action."""
    import shtab

    chosen: Any = action
    where = str(action.metavar or "").strip("[]").partition("[")[0]
    named = next((_NAMED[flag] for flag in action.option_strings if flag in _NAMED), None)
    if named is not None:
        action.choices = names()[named]
    elif where == "NAME|FILE" or "--data" in action.option_strings:
        chosen.complete = _data_or_file()
    elif where in _FOLDERS:
        chosen.complete = shtab.DIRECTORY
    elif where in _FILES:
        chosen.complete = shtab.FILE


def _data_or_file() -> dict[str, str]:
    """Return by shell what completes a name of data or a file."""
    files_too = "(__fish_complete_path (commandline -ct))"
    return {
        "bash": "_coterie_data",
        "zsh": "_coterie_data",
        "fish": f"{' '.join(names()['data'])} {files_too}",
        "tcsh": "f",
        "powershell": "_shtab_powershell_compgen_files",
    }


def _data_function(shell: str) -> str:
    """Return the shell function that `_data_or_file` names."""
    known = " ".join(names()["data"])
    if shell == "bash":
        return f'_coterie_data() {{ compgen -W "{known}" -- "$1"; compgen -f -- "$1"; }}'
    if shell == "zsh":
        escaped = known.replace(":", "\\:")
        return f"_coterie_data() {{ _alternative 'names:data:({escaped})' 'files:file:_files' }}"
    return ""
