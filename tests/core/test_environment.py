"""Offline, and no telemetry: what leaves the machine, heard by an audit hook and by the kernel.

An audit hook stays for good: tests that install one run in a process of their own.
"""

import os
import shutil
import subprocess
import sys

import pytest

from coterie.cli import main as command
from coterie.core import environment
from coterie.core.environment import TELEMETRY_OFF, is_offline, let_threads_sleep, telemetry_off

pytestmark = pytest.mark.full
SMALL = "run --data synthetic --option clients=12 --option rows=8 --option features=3 --rounds 2"


def python(code, cwd, before=(), **environment):
    return subprocess.run(
        [*before, sys.executable, "-c", code],
        capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
        env={**os.environ, **environment},
    )  # fmt: skip


TRY = """
import os, socket, subprocess, sys
import coterie.cli.methods as methods
from coterie.cli.main import main
def attempt(act):
    try:
        act()
    except OSError as error:
        print(type(error).__name__, error)
    else:
        print("allowed")
def connect(host, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(0.2)
        one.connect((host, 9))
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", ("192.0.2.1", 9))
methods._print = lambda arguments: socket.create_connection(("192.0.2.1", 80), 1)
print(main(["--offline", "methods"]), os.environ["HF_HUB_OFFLINE"])
attempt(lambda: connect("192.0.2.1"))
attempt(lambda: socket.getaddrinfo("example.org", 80))
attempt(lambda: socket.gethostbyname("example.org"))
attempt(send)
attempt(lambda: connect("127.0.0.1"))
attempt(lambda: socket.getaddrinfo("localhost", 80))
child = "from coterie.core.environment import *; print(is_offline())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""


def test_offline_refuses_what_leaves_this_machine_and_nothing_else(tmp_path):
    done = python(TRY, tmp_path)
    assert done.returncode == 0, done.stderr
    status, *refused, near, name, child = done.stdout.split("\n")[:8]
    assert status == "2 1" and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("coterie methods: 192.0.2.1: refused")
    assert len(refused) == 4
    for line, host in zip(refused, ("192.0.2.1", "example.org") * 2, strict=False):
        assert line.startswith("OfflineError") and "--offline" in line and "." in host
    assert near.startswith("ConnectionRefusedError") and name == "allowed"
    assert child == "True", "children inherit it"


@pytest.mark.parametrize(("value", "offline"), [("", False), ("0", False), ("1", True)])
def test_the_switch_can_be_off(monkeypatch, value, offline):
    monkeypatch.setenv("COTERIE_OFFLINE", value)
    assert is_offline() == offline


@pytest.mark.parametrize("line", ["--offline methods --json", "methods --offline --json"])
def test_the_flag_may_stand_before_or_after_the_command(monkeypatch, line):
    asked = []
    monkeypatch.setattr(command, "go_offline", lambda: asked.append(1))
    assert command.main(line.split()) == 0
    assert asked == [1]


def test_tracking_on_a_server_is_refused_offline_before_anything_is_spent(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("mlflow")
    server = "http://tracking.example.org"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("COTERIE_OFFLINE", "1")
    monkeypatch.setattr(command, "go_offline", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert command.main(f"{SMALL} --quiet --out here --track mlflow".split()) == 2
    assert server in capsys.readouterr().err and not (tmp_path / "here").exists()


IMPORT = """
import os, signal, sys
os.environ["COTERIE_OFFLINE"] = "1"  # heeded by commands, not by an import
def state():
    return dict(os.environ), sys.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGINT)
before = state()
import coterie
assert before == state()
coterie.Plan, coterie.simulate, coterie.CoterieRegressor
from coterie.core.environment import TELEMETRY_OFF
assert not set(TELEMETRY_OFF) & set(os.environ) - set(before[0])
del os.environ["COTERIE_OFFLINE"]
"""
RUNS = f"""
import sys
heard = []
sys.addaudithook(lambda event, args: heard.append(event) if event.startswith("socket.") else None)
{IMPORT}
from coterie.cli.main import main
small = "{SMALL} --simulation-seed 1 --quiet"
assert main(f"{{small}} --out plain --history".split()) == 0
assert not heard, heard
tracked = "--track mlflow --track tensorboard"
assert main(f"{{small}} --no-local --out tracked {{tracked}}".split()) == 0
# Sockets that are made and bound here (whether IPv6 works) send nothing: no name is looked up.
assert not set(heard) - {{"socket.__new__", "socket.bind", "socket.gethostname"}}, heard
assert main(f"--offline {{small}} --json --out offline {{tracked}}".split()) == 0
"""


def network_namespace():
    """Return the command that runs another without a network, () where that is not allowed."""
    bare = ("unshare", "-rn")
    if shutil.which("unshare") is None or subprocess.run([*bare, "true"], check=False).returncode:
        return ()
    links = subprocess.check_output([*bare, "cat", "/proc/net/dev"], text=True)
    assert {row.split(":")[0].strip() for row in links.splitlines()[2:]} <= {"lo"}
    return bare


def test_imports_and_runs_touch_no_socket_and_work_without_a_network(tmp_path):
    """A plain run makes no socket at all; tracking connects to nothing; offline changes nothing.

    To import coterie changes nothing in the process, and reaches nobody either.
    """
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    done = python(RUNS, tmp_path, network_namespace())
    assert done.returncode == 0, done.stderr
    for name in ("plain", "tracked", "offline"):
        assert (tmp_path / name / "report.html").exists()
    assert (tmp_path / "mlruns").exists() and (tmp_path / "offline" / "tensorboard").exists()


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    for given, wanted in (
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ):
        monkeypatch.setattr(environment.os, "environ", dict(given))
        let_threads_sleep()
        assert os.environ == wanted


def test_telemetry_of_dependencies_is_off_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr(environment.os, "environ", {"DO_NOT_TRACK": "0"})
    telemetry_off()
    assert [os.environ[name] for name in TELEMETRY_OFF] == ["0", "0", "1", "true", "0", "true"]
    monkeypatch.setattr(environment.os, "environ", {})
    telemetry_off()
    assert os.environ["DO_NOT_TRACK"] == "1"
