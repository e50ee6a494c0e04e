"""Flower's SuperLink with access control: only SuperNodes' requests are open to all addresses.

In Flower 1.41 one port serves three APIs: Fleet (`/v1/fleet/`: SuperNodes, which sign every request
with a registered key), Control (`/v1/control/`: submit code, register keys, read logs) and Runtime
(`/v1/runtime/`: tasks of ServerApps). The open version has no authentication for Control: anyone
who reaches the port could run code on the SuperLink and at every site. So all paths except Fleet
and `/health` return 403, unless the peer's address is in an exact list: this machine's own
addresses, and those that `--control-from` adds.

The peer is the other end of the connection. Headers that name another sender (X-Forwarded-For,
Forwarded) are not trusted. A request with such a header came through a proxy and counts as remote,
whatever its address, because a proxy on this machine would otherwise make every sender local. All
users of this machine have access: it must belong to the coordinator.

Started as `python -m coterie.deploy.superlink [flower-superlink arguments]`, with telemetry, update
checks and Flower's older gRPC ports off. Works with flwr 1.41 and 1.42, and ends where
Flower does not serve in the expected way.
"""

import argparse
import ipaddress
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.environment import go_offline, is_offline, telemetry_off
from coterie.deploy.starter import program

OPEN_PATHS = ("/v1/fleet/", "/health")
THIS_MACHINE = ("127.0.0.1", "::1")
SWITCHES = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment variables of every Flower process."""
_OTHER_PORTS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
_FORWARDED = (b"forwarded", b"via", b"x-real-ip")
_BODY = b"403: this API is open to the SuperLink's own machine only; see --control-from\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AccessControl:
    """Passes requests from other addresses to Fleet and the health check only (ASGI)."""

    def __init__(self, app: App, control_from: Iterable[str] = THIS_MACHINE) -> None:
        self.app = app
        self.allowed = frozenset(_address(given) for given in control_from)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] == "lifespan" or is_open(scope) or self.is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def is_local(self, scope: Scope) -> bool:
        """Return whether the connection itself is from an address with full access."""
        peer = scope.get("client")
        if peer is None or _was_forwarded(scope):
            return False
        try:
            return _address(peer[0]) in self.allowed
        except ValueError:
            return False


def is_open(scope: Scope) -> bool:
    """Return whether a path is open to all addresses."""
    path = str(scope.get("path", ""))
    # Nothing is served under such a path; it is rejected before it can be taken for another.
    if ".." in path or "//" in path or "\\" in path or scope.get("root_path"):
        return False
    return path == OPEN_PATHS[1] or path.startswith(OPEN_PATHS[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Start the SuperLink with access control; return when it ends."""
    arguments, others = _parser().parse_known_args(argv)
    host = arguments.host
    if arguments.insecure and host not in THIS_MACHINE:
        raise ValueError(
            f"--insecure on {host}: without TLS a SuperLink may listen on 127.0.0.1 only; give "
            "--ssl-certfile, --ssl-keyfile and --ssl-ca-certfile"
        )
    # A SuperLink that listens on one address only reaches itself from that address.
    own = () if _is_any(host) else (host,)
    insecure = ["--insecure"] if arguments.insecure else []
    telemetry_off()
    if is_offline():
        go_offline()
    os.environ.update(SWITCHES)
    # The SuperLink starts programs of Flower by name: those beside this interpreter.
    beside = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    os.environ["PATH"] = os.pathsep.join(beside)
    for name in _OTHER_PORTS:
        os.environ.pop(name, None)
    flower_superlink = program("flower-superlink")
    control_access((*THIS_MACHINE, *own, *arguments.control_from))
    sys.argv = ["flower-superlink", "--host", host, *insecure, *others]
    flower_superlink()
    return 0


def control_access(control_from: Iterable[str]) -> None:
    """Apply access control to everything that uvicorn serves in this process.

    It patches the one constructor that every way of starting a server calls, so that no way of
    starting one bypasses it. A port that listens all the same, in a version of Flower that serves
    in another way, ends the process within a second or two.
    """
    import uvicorn

    usual, guarded_ports = uvicorn.Config.__init__, set[int]()
    allowed = tuple(control_from)

    def guarded(self: Any, app: Any, **settings: Any) -> None:
        if isinstance(app, str) or not callable(app):
            raise ValueError(f"uvicorn was given {app!r}: expected an application")
        guarded_ports.add(int(settings.get("port", 8000)))
        # Headers of a proxy must not change the peer of a connection.
        usual(self, AccessControl(app, allowed), **{**settings, "proxy_headers": False})

    uvicorn.Config.__init__ = guarded  # type: ignore[method-assign,assignment]
    threading.Thread(target=_watch, args=(guarded_ports,), daemon=True).start()


def _watch(guarded: Collection[int], pause: float = 1.0) -> None:
    """End the process when it listens where there is no access control."""
    import psutil

    while True:
        if found := unguarded(psutil.Process().net_connections("inet"), guarded):
            sys.stderr.write(
                f"coterie.deploy.superlink: this version of Flower listens on {found} without "
                "access control, so the SuperLink ends; install flwr 1.41 or 1.42\n"
            )
            sys.stderr.flush()
            os._exit(1)
        time.sleep(pause)


def unguarded(connections: Iterable[Any], guarded: Collection[int]) -> list[str]:
    """Return where a process listens for others on ports without access control."""
    return [
        f"{one.laddr.ip}:{one.laddr.port}"
        for one in connections
        if one.status == "LISTEN" and one.laddr.port not in guarded
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coterie.deploy.superlink",
        description="Flower's SuperLink, whose Control and Runtime APIs are open to chosen "
        "addresses only; all other arguments are those of flower-superlink",
    )
    parser.add_argument(
        "--control-from",
        metavar="ADDRESS",
        nargs="+",
        action="extend",
        default=[],
        type=_checked_address,
        help="more addresses that may submit runs and register SuperNodes",
    )
    parser.add_argument("--host", default="127.0.0.1", help="listen on (default %(default)s)")
    parser.add_argument("--insecure", action="store_true", help="without TLS; on 127.0.0.1 only")
    return parser


def _was_forwarded(scope: Scope) -> bool:
    return any(
        name.lower() in _FORWARDED or name.lower().startswith(b"x-forwarded")
        for name, _ in scope.get("headers", ())
    )


def _is_any(host: str) -> bool:
    """Return whether a host is not a single address: all addresses, or a name."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return True


def _address(given: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address; an IPv4 address inside IPv6 becomes IPv4."""
    found = ipaddress.ip_address(given.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def _checked_address(given: str) -> str:
    try:
        found = ipaddress.ip_address(given)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{given!r}: expected an address such as 10.0.0.7; names and networks are not accepted"
        ) from None
    if found.is_unspecified:
        raise argparse.ArgumentTypeError(f"{given}: that is every address; give single addresses")
    return str(found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"coterie.deploy.superlink: {error}")
