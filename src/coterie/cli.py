"""The command line: words in, words out. Progress and errors go to stderr, results to stdout.

Every command exits 0 on success and 2 on bad input, with one line that says what was given, what
was expected and what to do. `account` and `calibrate` load neither torch nor data, and neither does
`plan` from public facts.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from coterie import __version__
from coterie.commands.completion import add_completion
from coterie.commands.front import Front, Parser
from coterie.commands.options import (
    add_account,
    add_advice,
    add_data,
    add_demo,
    add_join,
    add_methods,
    add_offline,
    add_report,
    add_run,
    add_tune,
)
from coterie.offline import go_offline, is_offline

# Commands whose module adds its own options: light to import, what is heavy waits for its action.
_MODULES: tuple[str, ...] = ("compare", "verify", "export", "predict", "doctor", "deploy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; give its exit status."""
    arguments = build_parser().parse_args(argv)
    if vars(arguments).pop("offline", False) or is_offline():
        go_offline()
    try:
        return int(arguments.action(arguments) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("COTERIE_DEBUG") or not _is_users(error):
            raise
        print(f"coterie {arguments.command}: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = Front(prog="coterie")
    parser.add_argument(
        "--version", action="version", version=f"coterie {__version__}", help="print the version"
    )
    add_offline(parser)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    add_advice(commands, _plan)
    add_run(commands, _run)
    add_tune(commands, _tune)
    add_demo(commands, _demo)
    add_account(commands, _account, calibrate=False)
    add_account(commands, _account, calibrate=True)
    add_methods(commands, _methods)
    add_data(commands, _data_show)
    add_report(commands, _report)
    add_join(commands, _join)
    for name in _MODULES:
        import_module(f"coterie.commands.{name}").add(commands)
    add_completion(commands, _completion)
    return parser


def _is_users(error: Exception) -> bool:
    """Tell a user's mistake (bad values, files, folders) from a fault of ours."""
    from coterie.privacy.ledger import LedgerError

    return isinstance(error, ValueError | OSError | LedgerError) or _is_of_flower(error)


def _is_of_flower(error: Exception) -> bool:
    """Return whether an error comes from a local Flower process or the SuperLink."""
    # A command that raised one has loaded the module; other commands run without Flower.
    known = sys.modules.get("coterie.deploy.processes")
    return known is not None and isinstance(error, known.FederationError)


def _account(arguments: argparse.Namespace) -> None:
    from coterie.commands.budget import account, describe

    found = account(arguments)
    if arguments.json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print(describe(found))


def _plan(arguments: argparse.Namespace) -> None:
    from coterie.commands.plan import plan

    print(plan(arguments))


def _run(arguments: argparse.Namespace) -> int:
    from coterie.commands.run import run

    return run(arguments)


def _tune(arguments: argparse.Namespace) -> int:
    from coterie.commands.tune import tune

    told = tune(arguments)
    for text, stream in ((told.out, sys.stdout), (told.err, sys.stderr)):
        if text:
            print(text, file=stream)
    return told.status


def _demo(arguments: argparse.Namespace) -> int:
    from coterie.commands.run import demo

    return demo(arguments)


def _methods(arguments: argparse.Namespace) -> None:
    from coterie.commands.look import methods

    methods(arguments)


def _data_show(arguments: argparse.Namespace) -> None:
    from coterie.commands.look import data_show

    data_show(arguments)


def _report(arguments: argparse.Namespace) -> None:
    from coterie.commands.look import report

    report(arguments)


def _join(arguments: argparse.Namespace) -> None:
    from coterie.commands.join import joined

    print(joined(arguments))


def _completion(arguments: argparse.Namespace) -> None:
    from coterie.commands.completion import script

    print(script(build_parser(), arguments.shell))


def entry() -> Any:
    """Run as a script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not fail a run
    sys.exit(main())


if __name__ == "__main__":
    entry()
