"""Flower's SuperLink with a door in front: strangers reach what SuperNodes need, nothing else.

In Flower 1.41 one port serves three things: Fleet (`/v1/fleet/`: SuperNodes, which sign every
request with a registered key), Control (`/v1/control/`: submit code, register keys, read logs) and
Runtime (`/v1/runtime/`: tasks of ServerApps). The open version has no authentication for Control:
whoever reaches the port could run code on the SuperLink and at every site. So all paths but Fleet
and `/health` are answered with 403, unless the peer's address is in an exact list: this machine's
own, and what `--control-from` adds.

The peer is who the connection is with. What headers say of it (X-Forwarded-For, Forwarded) is
not believed; a request that has such a header came through a proxy, and is a stranger's whatever
its address, since a proxy on this machine would otherwise make everybody local. All users of this
machine are let in: the machine of a SuperLink is the coordinator's alone.

Started as `python -m coterie.deployment.superlink [flower-superlink arguments]`, with telemetry,
update checks and Flower's older gRPC ports off. Works for flwr 1.41 and 1.42, and refuses to start
where Flower does not serve in the way that is expected here.
"""

import argparse
import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

OPEN_PATHS = ("/v1/fleet/", "/health")
THIS_MACHINE = ("127.0.0.1", "::1")
SWITCHES = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""What every process of Flower is to be started with."""
_OTHER_PORTS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
_FORWARDED = (b"forwarded", b"via", b"x-real-ip")
_BODY = b"403: this part of the SuperLink answers to its own machine alone; see --control-from\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """Lets strangers pass to Fleet and to the health check, and to nothing else (ASGI)."""

    def __init__(self, app: App, control_from: Iterable[str] = THIS_MACHINE) -> None:
        self.app = app
        self.allowed = frozenset(_address(given) for given in control_from)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] == "lifespan" or is_open(scope) or self.is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def is_local(self, scope: Scope) -> bool:
        """Return whether the connection itself is from an address that may do everything."""
        peer = scope.get("client")
        if peer is None or _was_forwarded(scope):
            return False
        try:
            return _address(peer[0]) in self.allowed
        except ValueError:
            return False


def is_open(scope: Scope) -> bool:
    """Return whether a path is for everybody."""
    path = str(scope.get("path", ""))
    # Nothing is served under such a path; it is refused before anybody can take it for another.
    if ".." in path or "//" in path or "\\" in path or scope.get("root_path"):
        return False
    return path == OPEN_PATHS[1] or path.startswith(OPEN_PATHS[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Start the SuperLink behind the door; returns when it ends.

    Raises:
        ValueError: If an argument is bad, or Flower is absent or of another kind.
    """
    arguments, others = _parser().parse_known_args(argv)
    host = arguments.host
    _check_encrypted(arguments)
    # A SuperLink that listens on one address alone reaches itself from that address.
    own = () if _is_any(host) else (host,)
    insecure = ["--insecure"] if arguments.insecure else []
    os.environ.update(SWITCHES)
    for name in _OTHER_PORTS:
        os.environ.pop(name, None)
    try:
        from flwr.superlink.cli.flower_superlink import flower_superlink
    except ImportError as error:
        raise ValueError(
            f"the SuperLink needs Flower ({error}): pip install 'coterie[flower]'"
        ) from error
    stand_before((*THIS_MACHINE, *own, *arguments.control_from))
    sys.argv = ["flower-superlink", "--host", host, *insecure, *others]
    flower_superlink()
    return 0


def stand_before(control_from: Iterable[str]) -> None:
    """Put the door before everything that uvicorn serves in this process.

    At the one place that every way of starting a server passes, so that a way that is not known
    here cannot go round it.
    """
    import uvicorn

    usual = uvicorn.Config.__init__
    allowed = tuple(control_from)

    def guarded(self: Any, app: Any, **settings: Any) -> None:
        if isinstance(app, str) or not callable(app):
            raise ValueError(f"uvicorn was given {app!r}: expected an application to stand before")
        # Headers of a proxy must not change whom a connection is with.
        usual(self, Door(app, allowed), **{**settings, "proxy_headers": False})

    uvicorn.Config.__init__ = guarded  # type: ignore[method-assign,assignment]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coterie.deployment.superlink",
        description="Flower's SuperLink, whose Control and Runtime answer to chosen addresses "
        "alone; all other arguments are those of flower-superlink",
    )
    parser.add_argument(
        "--control-from",
        metavar="ADDRESS",
        nargs="+",
        action="extend",
        default=[],
        type=_checked_address,
        help="addresses besides this machine's own that may submit runs and register SuperNodes",
    )
    parser.add_argument("--host", default="127.0.0.1", help="listen on (default %(default)s)")
    parser.add_argument("--insecure", action="store_true", help="without TLS; on 127.0.0.1 alone")
    return parser


def _check_encrypted(arguments: argparse.Namespace) -> None:
    if arguments.insecure and arguments.host not in THIS_MACHINE:
        raise ValueError(
            f"--insecure on {arguments.host}: without TLS a SuperLink may listen on 127.0.0.1 "
            "alone; give --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile"
        )


def _was_forwarded(scope: Scope) -> bool:
    return any(
        name.lower() in _FORWARDED or name.lower().startswith(b"x-forwarded")
        for name, _ in scope.get("headers", ())
    )


def _is_any(host: str) -> bool:
    """Return whether a host is no single address: all of them, or a name."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return True


def _address(given: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address; one of IPv4 inside IPv6 is that of IPv4."""
    found = ipaddress.ip_address(given.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def _checked_address(given: str) -> str:
    try:
        found = ipaddress.ip_address(given)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{given!r}: expected an address such as 10.0.0.7; names and networks are not exact"
        ) from None
    if found.is_unspecified:
        raise argparse.ArgumentTypeError(f"{given}: that is everybody; name single addresses")
    return str(found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"coterie.deployment.superlink: {error}")
