"""The command line. Progress and errors go to stderr, results to stdout.

Every command exits 0 on success, 1 if a check failed and 2 on bad input, with one line that says
what was given, what was expected and what to do. A command's module is light: it defines flags and
checks them, and imports slow modules (torch, scipy) only when they pass.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from coterie import __version__
from coterie.cli import account, completion, run
from coterie.cli.front import Front, Parser
from coterie.cli.options import add_offline
from coterie.core.environment import go_offline, is_offline, telemetry_off

_MODULES = (
    "plan",
    "methods",
    "data",
    "report",
    "compare",
    "tune",
    "onboard",
    "verify",
    "export",
    "predict",
    "doctor",
    "deploy",
)
_ERRORS = {
    "coterie.privacy.ledger": "LedgerError",
    "coterie.deploy.processes": "FederationError",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    telemetry_off()
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
        if os.environ.get("COTERIE_DEBUG") or not _is_user_error(error):
            raise
        print(f"coterie {arguments.command}: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Front(prog="coterie")
    parser.add_argument(
        "--version", action="version", version=f"coterie {__version__}", help="print the version"
    )
    add_offline(parser)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    run.add(commands)
    run.add_demo(commands)
    account.add(commands, "account")
    account.add(commands, "calibrate")
    for name in _MODULES:
        import_module(f"coterie.cli.{name}").add(commands)
    completion.add(commands, build_parser)
    return parser


def _is_user_error(error: Exception) -> bool:
    """Return whether an error comes from bad values, files or folders, and not from a bug."""
    # An error of a module that is not loaded cannot have been raised.
    loaded = [(sys.modules.get(module), name) for module, name in _ERRORS.items()]
    own = tuple(getattr(module, name) for module, name in loaded if module is not None)
    return isinstance(error, (ValueError, OSError, *own))


def entry() -> Any:
    """Run as a script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not fail a run
    sys.exit(main())


if __name__ == "__main__":
    entry()
