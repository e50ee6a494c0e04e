"""A federation of real processes on this machine, with a bare app of Flower's."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.real.faulty import FaultyFederation

from coterie.deploy import processes
from coterie.deploy.keys import make_certificates
from coterie.deploy.processes import (
    LINK,
    Control,
    ControlError,
    FederationError,
    LocalFederation,
    free_port,
    node_config,
)

pytestmark = pytest.mark.slow
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
SERVER = """
import json, pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    out = pathlib.Path(context.run_config["out"])
    out.with_suffix(".begun").write_text("")
    time.sleep(context.run_config["sleep"])
    wanted, end = context.run_config["nodes"], time.time() + 120
    while len(list(grid.get_node_ids())) < wanted and time.time() < end:
        time.sleep(0.2)
    ask = [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=node, message_type="train")
           for node in grid.get_node_ids()]
    answers = grid.send_and_receive(ask, timeout=240)
    told = sorted(str(a.content["c"]["site"] if a.has_content() else a.error) for a in answers)
    out.write_text(json.dumps(told))
"""
CLIENT = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    told = ConfigRecord({"site": context.node_config["site"]})
    return Message(RecordDict({"c": told}), reply_to=message)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "bare"
version = "1.0.0"
description = "bare"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "bare.server:app"
clientapp = "bare.client:app"
[tool.flwr.app.config]
out = "told.json"
nodes = 2
sleep = 0
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "app"
    (folder / "bare").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "bare" / "__init__.py").write_text("")
    (folder / "bare" / "server.py").write_text(SERVER)
    (folder / "bare" / "client.py").write_text(CLIENT)
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_certificates(folder, ["north", "south", "unknown_node", "misled"])
    make_certificates(folder.parent / "other", ["misled"])
    return folder


@pytest.fixture(scope="module")
def federation(keys, tmp_path_factory):
    nodes = {
        "north": {"site": "north"},
        "south": {"site": "south"},
        "unknown_node": {"site": "unknown_node"},
        "misled": {"site": "misled"},
    }
    folder = tmp_path_factory.mktemp("federation")
    with FaultyFederation(
        folder,
        keys,
        nodes,
        environment=QUICK,
        patience=90,
        unregistered=["unknown_node"],
        authorities={"misled": keys.parent / "other" / "ca.pem"},
    ) as found:
        yield found
    assert processes.tagged(found.tag) == []
    found.close()  # a second time is nothing


def test_a_run_through_kills_and_restarts(federation, bare):
    """One after another, since every process of Flower's takes a second or two to start."""
    federation.kill_node("south")
    assert not federation.is_running("south")
    assert federation.is_running("north")
    assert processes.tagged(federation._tag("south")) == []
    federation.start_node("south")

    long = federation.submit(bare, {"out": "long.json", "sleep": 60})
    _until((federation.folder / "long.begun").exists)
    federation.kill_server_app(long)
    _until(lambda: not federation.server_apps())
    assert not (federation.folder / "long.json").exists()
    assert federation.is_running(LINK)

    for name in ("unknown_node", "misled"):
        federation.start_stranger(name)
    again = federation.submit(bare, {"out": "again.json"})
    assert federation.wait(again, 500) == "finished:completed"
    assert json.loads((federation.folder / "again.json").read_text()) == ["north", "south"]
    _strangers_were_refused(federation, ["unknown_node", "misled"])


def _strangers_were_refused(federation: FaultyFederation, names: list[str]) -> None:
    """They had all the time of a run, and neither was let in."""
    _until(lambda: "CERTIFICATE_VERIFY_FAILED" in federation.log("misled").read_text())
    _until(lambda: "Exit Code" in federation.log("unknown_node").read_text())
    online = federation.control.online()
    assert {federation.node_ids["north"], federation.node_ids["south"]} <= online
    assert federation.node_ids["misled"] not in online
    for name in names:
        assert "SuperNode ID:" not in federation.log(name).read_text()
    for name in names:
        federation.stop_node(name)
        assert not federation.is_running(name)


def test_no_secret_is_in_any_log(federation, keys):
    secrets = [
        line
        for path in keys.rglob("*")
        if path.is_file() and b"PRIVATE" in path.read_bytes()
        for line in path.read_text().splitlines()[1:-1]
    ]
    logs = "".join(path.read_text() for path in (federation.folder / "logs").iterdir())
    assert secrets
    assert not [line for line in secrets if line in logs]


def test_errors_say_what_is_there(federation):
    with pytest.raises(ControlError, match=r"no such run|12345|404"):
        federation.run_status(12345)
    with pytest.raises(ValueError, match="not a Flower app"):
        federation.submit(federation.folder)


def test_a_wrong_authority_is_refused_on_this_side_too(federation, keys, tmp_path):
    misled = Control(federation.address, keys.parent / "other" / "ca.pem", tmp_path)
    with pytest.raises(ControlError, match=r"unavailable|certificate"):
        misled.online()


def test_a_process_that_does_not_start_is_quoted_and_nothing_is_left(tmp_path, keys):
    broken = tmp_path / "keys"
    broken.mkdir()
    for name in ("ca.pem", "server.pem"):
        (broken / name).write_bytes((keys / name).read_bytes())
    (broken / "server.key").write_text("no key")
    with (
        pytest.raises(FederationError, match="superlink ended") as caught,
        LocalFederation(tmp_path / "f", broken, {}, patience=30) as never,
    ):
        raise AssertionError(never)
    assert "superlink.log" in str(caught.value)


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb"])
def test_a_node_config_that_flower_would_misread_is_refused(value):
    with pytest.raises(ValueError, match="permits no quotes"):
        node_config({"folder": value})


def test_a_node_config_is_what_flower_reads():
    config = pytest.importorskip("flwr.common.config")
    seen = {"site": "north", "folder": "/a b/c=d", "runs": 2, "share": 0.5, "fine": True}
    assert config.parse_config_args([node_config(seen)]) == seen


def test_ports_are_free():
    assert all(1024 < free_port() < 65536 for _ in range(5))


PARENT = """
import os, subprocess, sys
os.environ["{tag}"] = sys.argv[1] + ":x;"
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
subprocess.Popen(["sleep", "60"])
"""


def _start_tagged(tag: str) -> set[Any]:
    """Start two processes that outlive their parent, one of which will not hear of SIGTERM."""
    code = PARENT.format(tag=processes.TAG)
    subprocess.run([sys.executable, "-c", code, tag], check=True)
    _until(lambda: any("SIG_IGN" in str(one.cmdline()) for one in processes.tagged(tag)))
    time.sleep(0.3)
    found = set(processes.tagged(tag))
    assert len(found) == 2
    return found


def test_tagged_processes_end_and_no_others():
    tag, other = f"{os.getpid()}a", f"{os.getpid()}b"
    _start_tagged(tag)
    bystanders = _start_tagged(other)
    begun = time.monotonic()
    processes.end_all(tag, lambda: None, grace=0.5)
    assert processes.tagged(tag) == []
    assert time.monotonic() - begun < 40, "they ended by themselves"
    assert set(processes.tagged(other)) == bystanders
    processes.end_all(other, lambda: None, grace=0)
    assert processes.tagged(other) == []


def test_a_guard_ends_them_when_this_process_is_killed(tmp_path):
    tag = f"{os.getpid()}g"
    parent = subprocess.Popen(["sleep", "60"])
    guard = subprocess.Popen(
        [sys.executable, "-m", "coterie.deploy.processes", str(parent.pid), tag, "0.5"]
    )
    try:
        _start_tagged(tag)
        parent.kill()
        parent.wait()
        assert guard.wait(120) == 0
        assert processes.tagged(tag) == []
    finally:
        guard.kill()
        guard.wait()
        processes.end_all(tag, lambda: None, grace=0)


def test_ctrl_c_ends_all(tmp_path, keys):
    """In the middle of starting, in a process of its own."""
    code = textwrap.dedent(
        """
        import signal, sys
        from pathlib import Path
        from coterie.deploy.processes import LocalFederation

        signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
        federation = LocalFederation(Path(sys.argv[1]), Path(sys.argv[2]), {"north": {}})
        print(federation.tag, flush=True)
        with federation:
            import time
            time.sleep(60)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(keys)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tag = child.stdout.readline().strip()
    try:
        _until(lambda: processes.tagged(tag))
        child.send_signal(signal.SIGINT)
        _, seen = child.communicate(timeout=120)
        assert "KeyboardInterrupt" in seen
        assert processes.tagged(tag) == []
    finally:
        child.kill()
        child.wait()
        processes.end_all(tag, lambda: None, grace=0)


def _until(done, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
