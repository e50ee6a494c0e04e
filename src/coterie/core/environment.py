"""The process environment: installed packages, no telemetry, and no network when asked.

`import coterie` changes nothing in a process. The command line and the entry points of a
deployment call `telemetry_off`, the command line `let_threads_sleep`; `--offline` calls
`go_offline`.

Offline is an audit hook of Python (PEP 578): it sees every socket before it connects, resolves a
name or sends, and raises `OfflineError` for addresses that are not local. A hook cannot be removed,
so a process that is offline stays offline. The switch is also an environment variable
(COTERIE_OFFLINE=1), so child processes of the command line are offline too. The hook does not see
sockets opened in C without Python, or programs of other kinds; a network namespace (`unshare -n`)
does, and tests/core/test_environment.py runs in one.
"""

import hashlib
import ipaddress
import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SCARF_NO_ANALYTICS": "true",
}
SWITCH = "COTERIE_OFFLINE"
_SETTINGS = {
    SWITCH: "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


_SPINS = "2000"
"""Turns, a few microseconds, after which a thread of GNU OpenMP that has no work sleeps."""


def let_threads_sleep() -> None:
    """Let idle threads sleep, unless the environment already decides how they wait.

    By default they spin for milliseconds after every small operation on tensors: half of the
    processor time of a short run, and most of its duration where other programs want the cores.
    Read when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@cache
def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group; read once per process, since that takes long."""
    return tuple(metadata.entry_points(group=group))


@cache
def version_of(package: str) -> str | None:
    """Return the installed version of a package, None if there is none; read once per process."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_of(package: str) -> dict[str, str]:
    """Return which code of a package runs: the hash of its files, and its commit if it has one.

    The hash is the SHA-256 of what `sha256sum` prints for all .py files, in the folder of the
    package and sorted by name (`find . -name '*.py' | LC_ALL=C sort | xargs sha256sum`). The commit
    is that of the git checkout, with "-dirty" if a tracked file differs; or of an installation
    from a repository (PEP 610). Read once per process.
    """
    folder = Path(sys.modules[package].__file__ or ".").resolve().parent
    names = sorted(f"./{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py"))
    lines = (f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names)
    found = {f"{package}_files": hashlib.sha256("".join(lines).encode()).hexdigest()}
    commit = _checked_out(folder) or _installed(package)
    return found | ({f"{package}_commit": commit} if commit else {})


def _checked_out(folder: Path) -> str | None:
    """Return the commit of a folder that git tracks; None without git."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed into a folder inside somebody's repository
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _installed(package: str) -> str | None:
    """Return the commit that a package was installed from, as the installer noted it."""
    try:
        noted = metadata.distribution(package).read_text("direct_url.json")
        return str(json.loads(noted or "{}")["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return None


# Where the address is among the arguments of each event.
_EVENTS = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
    "socket.getnameinfo": 0,
}
_state = {"on": False}


class OfflineError(OSError):
    """Raised when something asks for the network while it is switched off."""


def telemetry_off() -> None:
    """Switch off the telemetry of dependencies, unless the environment already decides."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def is_offline() -> bool:
    """Return whether this process is offline, or was asked to be."""
    return _state["on"] or os.environ.get(SWITCH, "") not in ("", "0")


def go_offline() -> None:
    """Refuse connections from here on, in this process and in child processes of coterie."""
    os.environ.update(_SETTINGS)
    if not _state["on"]:
        _state["on"] = True
        sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    place = _EVENTS.get(event)
    if place is None or len(arguments) <= place:
        return
    address = arguments[place]
    if not _is_local(address):
        raise OfflineError(
            f"{_host(address)}: refused, because --offline (or {SWITCH}=1) allows no connection "
            "that leaves this machine; leave it out, or use local files"
        )


def _is_local(address: Any) -> bool:
    """Return whether an address belongs to this machine: a path, a loopback, or none at all.

    >>> _is_local(("127.0.0.1", 80)), _is_local("/run/socket"), _is_local(("192.0.2.1", 80))
    (True, True, False)
    >>> _is_local("localhost"), _is_local("example.org"), _is_local(None), _is_local(("::1", 1))
    (True, False, True, True)
    """
    host = _host(address)
    if isinstance(address, int) or host in ("", "localhost") or host.startswith(("/", "\0")):
        return True  # a netlink, a Unix or an already connected socket, or our own name
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _host(address: Any) -> str:
    found = address[0] if isinstance(address, tuple) and address else address
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    return "" if found is None or isinstance(found, int | tuple) else str(found)
