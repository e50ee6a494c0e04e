"""The command line. Progress and errors go to stderr, results to stdout.

Every command exits 0 on success, 1 if a check failed and 2 on bad input, with one line that says
what was given, what was expected and what to do. A command's module is light: it defines flags and
checks them, and imports slow modules (torch, scipy) only when they pass.
"""

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from coterie import __version__
from coterie.cli.front import Front, Parser
from coterie.cli.options import add_offline
from coterie.core.environment import go_offline, is_offline, let_threads_sleep, telemetry_off
from coterie.core.ranks import is_launched

_MODULES = (
    "init", "run", "account", "plan", "methods", "papers", "data", "report", "compare", "tune",
    "onboard", "verify", "sign", "audit", "budget", "export", "predict", "doctor", "deploy",
    "completion",
)  # fmt: skip
_ERRORS = {
    "coterie.privacy.ledger": "LedgerError",
    "coterie.deploy.processes": "FederationError",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    telemetry_off()
    let_threads_sleep()
    arguments = build_parser().parse_args(argv)
    if vars(arguments).pop("offline", False) or is_offline():
        go_offline()
    try:
        if is_launched() and arguments.command != "run":
            raise ValueError("torchrun shares `coterie run` among processes, and no other command")
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
        print(f"coterie {arguments.command}: {_line(error)}", file=sys.stderr)
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
    for name in _MODULES:
        import_module(f"coterie.cli.{name}").add(commands)
    return parser


def _line(error: Exception) -> str:
    """Return an error as one line that names flags."""
    from coterie.cli.flags import with_flags

    text = with_flags(str(error))
    if isinstance(error, OSError) and error.errno and error.filename:
        text = f"{error.filename}: {os.strerror(error.errno).lower()}"
    # Cells and names of files are in errors: they must not command the terminal.
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _is_user_error(error: Exception) -> bool:
    """Return whether an error comes from bad values, files or folders, and not from a bug."""
    # An error of a module that is not loaded cannot have been raised.
    loaded = [(sys.modules.get(module), name) for module, name in _ERRORS.items()]
    own = tuple(getattr(module, name) for module, name in loaded if module is not None)
    return isinstance(error, (ValueError, OSError, *own))


class _HidePandas:
    """Hides pandas from pyarrow, which imports it (2 s) wherever it is installed and needs none."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        """Raise ImportError if pyarrow, on behalf of coterie, looks for pandas."""
        if name == "pandas":
            frame = sys._getframe(1)
            while _module(frame).startswith("importlib") and frame.f_back:
                frame = frame.f_back
            # Compiled code has no frame of its own: the nearest one is that of its caller.
            if _module(frame).startswith(("coterie.", "pyarrow.")):
                raise ModuleNotFoundError("No module named 'pandas'", name=name)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__"))


def entry() -> Any:
    """Run as a script."""
    sys.meta_path.insert(0, _HidePandas)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not fail a run
    # Imports make a million objects that stay. A quarter of a short run looked for garbage among
    # them, half of that at exit.
    gc.set_threshold(30_000)
    status = main()
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    entry()
