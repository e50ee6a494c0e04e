"""Offline, and no telemetry: what leaves the machine, heard by an audit hook and by the kernel.

Every test runs in a process of its own: an audit hook stays for good.
"""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full
SMALL = "run --data synthetic --option clients=12 --option rows=8 --option features=3 --rounds 2"
HEARD = """
import sys
heard = []
sys.addaudithook(lambda event, args: heard.append(event) if event.startswith("socket.") else None)
"""


def python(code, *arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
        env={**os.environ, **environment},
    )  # fmt: skip


TRY = """
import socket
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
attempt(lambda: connect("192.0.2.1"))
attempt(lambda: socket.getaddrinfo("example.org", 80))
attempt(lambda: socket.gethostbyname("example.org"))
attempt(send)
attempt(lambda: connect("127.0.0.1"))
attempt(lambda: socket.getaddrinfo("localhost", 80))
"""


def test_offline_refuses_what_leaves_this_machine_and_nothing_else(tmp_path):
    start = "from coterie.core.environment import go_offline; go_offline()"
    done = python(f"{start}\n{TRY}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *refused, near, name = done.stdout.splitlines()
    assert len(refused) == 4
    for line, host in zip(refused, ("192.0.2.1", "example.org") * 2, strict=False):
        assert line.startswith("OfflineError") and "--offline" in line and "." in host
    assert near.startswith("ConnectionRefusedError") and name == "allowed"


@pytest.mark.parametrize("value", ["", "0"])
def test_the_switch_can_be_off(tmp_path, value):
    done = python(
        "import coterie.core.environment as o; print(o.is_offline())",
        cwd=tmp_path,
        COTERIE_OFFLINE=value,
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("line", ["--offline methods --json", "methods --offline --json"])
def test_the_flag_may_stand_before_or_after_the_command_and_children_inherit_it(tmp_path, line):
    code = (
        "import os, subprocess, sys\nfrom coterie.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "child = 'from coterie.core.environment import *; print(is_offline())'\n"
        "sys.stderr.write(subprocess.run([sys.executable, '-c', child], capture_output=True,"
        " text=True).stdout)\n"
    )
    done = python(code, *line.split(), cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.strip().endswith("True")


def test_a_user_is_told_in_one_line(tmp_path):
    code = (
        "import sys, coterie.cli.methods as methods\nfrom coterie.cli.main import main\n"
        "import socket\n"
        "methods._print = lambda arguments: socket.create_connection(('192.0.2.1', 80), 1)\n"
        "sys.exit(main(['--offline', 'methods']))"
    )
    done = python(code, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("coterie methods: 192.0.2.1: refused")


def test_tracking_on_a_server_is_refused_offline_before_anything_is_spent(tmp_path):
    code = "import sys\nfrom coterie.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    line = f"--offline {SMALL} --quiet --out here --track mlflow"
    pytest.importorskip("mlflow")
    server = "http://tracking.example.org"
    done = python(code, *line.split(), cwd=tmp_path, MLFLOW_TRACKING_URI=server)
    assert done.returncode == 2 and server in done.stderr and not (tmp_path / "here").exists()


def test_a_plain_run_touches_no_socket_at_all(tmp_path):
    code = (
        f"{HEARD}\nfrom coterie.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "print('HEARD', sorted(set(heard)), file=sys.stderr)\nsys.exit(status)"
    )
    done = python(code, *f"{SMALL} --quiet --out here --history".split(), cwd=tmp_path)
    assert done.returncode == 0 and "HEARD []" in done.stderr, done.stderr
    assert (tmp_path / "here" / "report.html").exists()


def test_tracking_connects_to_nothing(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    code = (
        f"{HEARD}\nfrom coterie.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "out = set(heard) - {'socket.__new__', 'socket.bind', 'socket.gethostname'}\n"
        "print('HEARD', sorted(out), file=sys.stderr)\nsys.exit(status)"
    )
    line = f"{SMALL} --quiet --no-local --out here --track mlflow --track tensorboard"
    done = python(code, *line.split(), cwd=tmp_path)
    # Sockets that are made and bound here (whether IPv6 works) send nothing: no name is looked up.
    assert done.returncode == 0 and "HEARD []" in done.stderr, done.stderr


def test_all_of_it_works_without_a_network(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no network namespace")
    bare = ["unshare", "-rn"]
    if subprocess.run([*bare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespace")
    links = subprocess.run(
        [*bare, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
    ).stdout
    assert {row.split(":")[0].strip() for row in links.splitlines()[2:]} <= {"lo"}
    line = f"{SMALL} --quiet --json --out here --track mlflow --track tensorboard"
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    done = subprocess.run(
        [*bare, sys.executable, "-m", "coterie.cli.main", "--offline", *line.split()],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "report.html").exists() and (tmp_path / "mlruns").exists()
    assert (tmp_path / "here" / "tensorboard").exists()


def test_telemetry_of_dependencies_is_off_unless_the_user_says_otherwise(tmp_path):
    code = (
        "import os\nfrom coterie.core.environment import *\ntelemetry_off()\n"
        "print([os.environ[name] for name in TELEMETRY_OFF])"
    )
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean
    )
    assert done.stdout.strip() == "['1', '0', '1', 'true', '0', 'true']"
    own = python(
        "import os, coterie; print(os.environ['DO_NOT_TRACK'])", cwd=tmp_path, DO_NOT_TRACK="0"
    )
    assert own.stdout.strip() == "0"


def test_importing_coterie_changes_nothing_in_the_process(tmp_path):
    code = (
        "import os, signal, sys, warnings\n"
        "state = lambda: (dict(os.environ), sys.path[:], warnings.filters[:],\n"
        "    sys.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGINT))\n"
        "before = state()\nimport coterie\n"
        "print(before[0] == state()[0], before[3:] == state()[3:])\n"
        "coterie.Plan, coterie.simulate, coterie.CoterieRegressor\n"
        "from coterie.core.environment import TELEMETRY_OFF\n"
        "print(not (set(TELEMETRY_OFF) & set(os.environ)) - set(before[0]))"
    )
    done = python(code, cwd=tmp_path, COTERIE_OFFLINE="1")
    assert done.stdout.split() == ["True", "True", "True"], done.stdout + done.stderr
