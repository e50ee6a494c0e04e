"""Offline: refuse every connection that leaves this machine, and say so.

An audit hook of Python (PEP 578) hears of every socket before it connects, resolves a name or
sends; what is not local raises `OfflineError`. A hook cannot be removed: a process that is offline
stays so. The switch is an environment variable too (COTERIE_OFFLINE=1), so that child processes
that load coterie are offline as well.

Not heard: libraries that open sockets in C without Python's help, and programs of other kinds that
are started. None that this project uses does either; a network namespace (`unshare -n`) proves it,
and tests/test_offline.py runs in one.
"""

import ipaddress
import os
import sys
from typing import Any

SWITCH = "COTERIE_OFFLINE"
_SETTINGS = {
    SWITCH: "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
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
    """Raised where something asked for the network while it was switched off."""


def is_offline() -> bool:
    """Return whether this process is offline, or was asked to be."""
    return _state["on"] or os.environ.get(SWITCH, "") not in ("", "0")


def go_offline() -> None:
    """Refuse connections from here on, in this process and in children that load coterie."""
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
            f"{_host(address)}: refused, as --offline (or {SWITCH}=1) allows no connection that "
            "leaves this machine; leave it out, or use files that are here"
        )


def _is_local(address: Any) -> bool:
    """Return whether an address is of this machine: a path, a loopback, or none at all.

    >>> _is_local(("127.0.0.1", 80)), _is_local("/run/socket"), _is_local(("192.0.2.1", 80))
    (True, True, False)
    >>> _is_local("localhost"), _is_local("example.org"), _is_local(None), _is_local(("::1", 1))
    (True, False, True, True)
    """
    host = _host(address)
    if isinstance(address, int) or host in ("", "localhost") or host.startswith(("/", "\0")):
        return True  # of a netlink, a Unix or an already connected socket, or our own name
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _host(address: Any) -> str:
    found = address[0] if isinstance(address, tuple) and address else address
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    return "" if found is None or isinstance(found, int | tuple) else str(found)
