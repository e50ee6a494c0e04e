"""The SuperLink's door: its rules in memory, and a real process on loopback."""

import asyncio
import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.cli.main import main as command
from coterie.deploy.keys import make_certificates
from coterie.deploy.superlink import AccessControl, main, unguarded

pytestmark = pytest.mark.full
CONTROL = ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs")


def _ask(
    door: AccessControl,
    path: str,
    peer: str | None = "203.0.113.9",
    headers: dict[str, str] | None = None,
    kind: str = "http",
) -> int:
    """Ask in memory; 200 is the application behind the door."""
    sent = []
    scope = {
        "type": kind,
        "path": path,
        "client": None if peer is None else (peer, 50000),
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
    }

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    asyncio.run(door(scope, receive, send))
    return int(sent[0].get("status", sent[0].get("code", 0)))


async def _behind(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("path", [*CONTROL, "/", "", "/openapi.json", "/v1/fleet", "/healthy"])
def test_strangers_are_turned_away_and_this_machine_is_not(path):
    door = AccessControl(_behind)
    assert _ask(door, path) == 403
    assert _ask(door, path, peer=None) == 403
    assert _ask(door, path, peer="not an address") == 403
    assert _ask(door, path, peer="127.0.0.2") == 403  # the list is exact
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert _ask(door, path, peer=peer) == 200


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/health"])
def test_fleet_and_health_are_for_everybody(path):
    assert _ask(AccessControl(_behind), path) == 200
    assert _ask(AccessControl(_behind), path, headers={"X-Forwarded-For": "198.51.100.1"}) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/start-run",
        "/v1/fleet//../../control/start-run",
        "//v1/control/start-run",
        "/v1/fleet/..\\control",
        "/V1/FLEET/x",
        "/health/../docs",
    ],
)
def test_a_path_cannot_be_dressed_up(path):
    assert _ask(AccessControl(_behind), path) == 403


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"])
def test_headers_make_nobody_local(header):
    door = AccessControl(_behind)
    for found in ("127.0.0.1", "for=127.0.0.1", "::1"):
        assert _ask(door, CONTROL[0], headers={header: found}) == 403
    # Through a proxy on this machine: a stranger's, whatever the address.
    assert _ask(door, CONTROL[0], peer="127.0.0.1", headers={header: "127.0.0.1"}) == 403


def test_other_addresses_can_be_named_and_sockets_are_closed():
    door = AccessControl(_behind, ["10.0.0.7"])
    assert _ask(door, CONTROL[0], peer="10.0.0.7") == 200
    assert _ask(door, CONTROL[0], peer="10.0.0.70") == 403
    assert _ask(door, CONTROL[0], peer="127.0.0.1") == 403
    assert _ask(door, "/v1/control/x", kind="websocket") == 1008


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--insecure", "--host", "0.0.0.0"], "without TLS"),
        (["--insec", "--host=::"], "without TLS"),
    ],
)
def test_an_open_port_without_tls_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        main(given)


def test_the_command_hands_its_arguments_on(capsys):
    assert command(["deploy", "superlink", "--", "--insecure", "--host", "0.0.0.0"]) == 2
    assert "without TLS" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(["deploy", "superlink", "--control-from", "10.0.0.0/8", "--", "--port", "9100"])
    assert "names and networks are not accepted" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["10.0.0.0/8", "link.example", "0.0.0.0", "*"])
def test_a_list_that_is_not_exact_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        main(["--control-from", given])
    assert "--control-from" in capsys.readouterr().err


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """A SuperLink on all addresses of this machine; gives its port and its authority."""
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("link")
    make_certificates(folder / "keys", ["north"], ["localhost", "127.0.0.1", "127.0.0.2"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = folder / "keys"
    tls = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
    command = [sys.executable, "-m", "coterie.deploy.superlink", "--host", "0.0.0.0"]
    command += ["--port", str(port), "--enable-supernode-auth"]
    command += [word for name, file in tls.items() for word in (f"--ssl-{name}", str(keys / file))]
    bin = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "home"),
        "PATH": f"{bin}:{os.environ['PATH']}",
        "FORWARDED_ALLOW_IPS": "*",  # uvicorn would believe everybody's headers
        "FLWR_INTERNAL_GRPC_CONTROL_API": "1",  # and Flower open a second door
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        limit = time.monotonic() + 30
        while _get(port, keys, "127.0.0.1", "/health") != 200:
            found = (folder / "log").read_text()
            assert process.poll() is None and time.monotonic() < limit, found[-2000:]
            time.sleep(0.1)
        yield port, keys, folder / "log"
    finally:
        process.terminate()
        process.wait(10)


def _get(
    port: int,
    keys: Path,
    source: str,
    path: str,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> int:
    """Ask from an address of this machine; 0 where nobody listens."""
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, source_address=(source, 0), context=context, timeout=5
    )
    try:
        method = "GET" if path in ("/health", "/docs") else method
        connection.request(method, path, headers=headers or {})
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def test_a_real_superlink_turns_strangers_away(link):
    port, keys, _ = link
    for path in CONTROL:
        assert _get(port, keys, "127.0.0.2", path) == 403
        for header in ("X-Forwarded-For", "X-Real-IP", "Forwarded"):
            assert _get(port, keys, "127.0.0.2", path, {header: "127.0.0.1"}) == 403
    for method in ("GET", "PUT", "OPTIONS", "HEAD"):
        assert _get(port, keys, "127.0.0.2", CONTROL[0], method=method) == 403


def test_a_real_superlink_serves_its_own_machine(link):
    port, keys, _ = link
    assert _get(port, keys, "127.0.0.1", "/docs") == 200
    for path in CONTROL[:3]:
        assert _get(port, keys, "127.0.0.1", path) not in (0, 403, 404)


def test_a_real_superlink_lets_strangers_to_fleet(link):
    port, keys, _ = link
    assert _get(port, keys, "127.0.0.2", "/health") == 200
    found = _get(port, keys, "127.0.0.2", "/v1/fleet/pull-messages")
    assert found not in (0, 403, 404)  # Flower itself refuses what is not signed
    assert found >= 400


def test_flowers_older_ports_stay_closed(link):
    _, _, log = link
    assert "gRPC" not in log.read_text()


LISTENER = """
import os, socket, sys, threading
from coterie.deploy import superlink
superlink.control_access(("127.0.0.1",))
import uvicorn
guarded, other = socket.socket(), socket.socket()
guarded.bind(("127.0.0.1", 0))
guarded.listen()
uvicorn.Config(lambda *_: None, port=guarded.getsockname()[1])
if sys.argv[1] == "other":
    other.bind(("127.0.0.1", 0))
    other.listen()
threading.Event().wait(4)
print("still here")
"""


@pytest.mark.parametrize("listens", ["guarded", "other"])
def test_a_port_without_access_control_ends_the_process(listens):
    """As a version of Flower would that serves in another way."""
    pytest.importorskip("uvicorn")
    done = subprocess.run(
        [sys.executable, "-c", LISTENER, listens],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ("still here" in done.stdout) is (listens == "guarded"), done.stderr
    assert ("without access control" in done.stderr) is (listens == "other")


def test_connections_that_do_not_listen_are_no_matter():
    def one(status, port):
        return SimpleNamespace(status=status, laddr=SimpleNamespace(ip="0.0.0.0", port=port))

    seen = [one("LISTEN", 9100), one("ESTABLISHED", 4000), one("LISTEN", 4001)]
    assert unguarded(seen, {9100}) == ["0.0.0.0:4001"]
