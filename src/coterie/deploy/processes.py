"""A federation on this machine: SuperLink and SuperNodes as real processes, with TLS and keys.

    with LocalFederation(folder, keys, {"north": {"folder": "/tmp/north"}}) as federation:
        run = federation.submit(app)
        federation.wait(run, 120)

For trials and tests. All processes listen on 127.0.0.1, on free ports; SuperNodes authenticate;
dependencies of apps are never installed. Flower's own files (FLWR_HOME) and all logs are in the
given folder. On exit, after an error or Ctrl-C as well, exactly the processes that were started
here end, with all their descendants; a guard process ends them if this process is killed.

Flower starts processes of its own, some in sessions of their own, and these start others. All of
them inherit the environment, so a variable in it (a *tag*) identifies a process and its
descendants, even after their parents have ended. Processes are ended one by one, never by name.

`Control` runs Flower's own command line (`flwr supernode register`, `flwr run`, `flwr list`), which
is documented, and works with every version. Each command takes a second or two.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from coterie.core.config import to_toml
from coterie.core.files import write_atomically
from coterie.deploy.starter import light_path
from coterie.deploy.superlink import SWITCHES

LINK = "superlink"
TAG = "COTERIE_FEDERATION_PROCESS"
Config = Mapping[str, str | int | float | bool]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's default is slow on one machine
}
_ATTEMPTS = 3
_GRACE = 6.0
_PORT_TAKEN = "address already in use"
_LINK_NAME = "here"
_LONGEST_COMMAND = 300.0
_POLL = 5.0
_WRITING = threading.Lock()


class FederationError(RuntimeError):
    """Raised when a process does not start or ends early; quotes the end of its log."""


class ControlError(FederationError):
    """Raised when the SuperLink does not carry out a request."""


def node_config(config: Config) -> str:
    """Return a `--node-config` for Flower: TOML values, separated by spaces.

    >>> node_config({"site": "north", "runs": 2, "plain": True})
    'site="north" runs=2 plain=true'
    """
    for name, value in config.items():
        # Flower splits at quotes and has no escapes for them.
        if isinstance(value, str) and ('"' in value or "\\" in value or "\n" in value):
            raise ValueError(f"{name} = {value!r}: --node-config permits no quotes or backslashes")
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tagged(tag: str) -> list[psutil.Process]:
    """Return the other processes whose tag begins so, wherever they are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(TAG, "").startswith(tag):
                found.append(process)
    return found


def end_all(tag: str, reap: Callable[[], None], grace: float = _GRACE) -> None:
    """End all processes whose tag begins so: SIGTERM first, SIGKILL after a time.

    `reap` is called repeatedly: it collects ended children, which would stay as zombies.
    """
    asked: set[psutil.Process] = set()
    end = time.monotonic() + grace
    while True:
        reap()
        left = set(tagged(tag))
        if not left:
            return
        late = time.monotonic() >= end
        for process in left if late else left - asked:  # also those that started meanwhile
            with contextlib.suppress(psutil.Error):  # it ended, or its id was reused
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        time.sleep(0.05)


def guard(parent: int, tag: str, grace: float = _GRACE) -> None:
    """Wait until a process ends in any way, and then end all processes with a tag.

    A context manager ends its processes on errors and on Ctrl-C; this is for when it is killed.
    """
    with contextlib.suppress(psutil.Error):
        psutil.Process(parent).wait()
    end_all(tag, lambda: None, grace)


@dataclass(frozen=True)
class Control:
    """Flower's command line for a SuperLink; `authority` (ca.pem) signed its certificate.

    `home` is the folder of Flower's own files (FLWR_HOME), where its configuration is written.
    """

    address: str
    authority: Path
    home: Path

    def register(self, public_key: Path, name: str) -> int:
        """Register a SuperNode by the file of its public key (OpenSSH); return its id."""
        found = self._flwr("supernode", "register", str(public_key), _LINK_NAME, "--name", name)
        return int(found["node-id"])

    def online(self) -> set[int]:
        """Return the ids of the SuperNodes that are online."""
        nodes = self._flwr("supernode", "list", _LINK_NAME)["nodes"]
        return {int(node["node-id"]) for node in nodes if node["status"] == "online"}

    def submit(self, app: Path, config: Config) -> int:
        """Start a run of an app, with run config of its own; return the run's id."""
        if not (app / "pyproject.toml").is_file():
            raise ValueError(
                f"{app}: not a Flower app (no pyproject.toml); use `coterie deploy init`"
            )
        own = ["--run-config", node_config(config)] if config else []
        found = self._flwr("run", str(app), _LINK_NAME, *own)
        if not found.get("run-id"):
            raise ControlError(f"{app}: the SuperLink did not start a run ({found.get('note')})")
        return int(found["run-id"])

    def status(self, run: int) -> str:
        """Return a run's status, such as "running" or "finished:completed"."""
        runs = self._flwr("list", _LINK_NAME, "--run-id", str(run))["runs"]
        if not runs:
            raise ControlError(f"run {run}: the SuperLink has no such run")
        return str(runs[0]["status"])

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Return what a command of Flower prints as JSON."""
        self.home.mkdir(parents=True, exist_ok=True)
        link = {"address": self.address, "root-certificates": str(self.authority.resolve())}
        text = to_toml({"superlink": {"default": _LINK_NAME, _LINK_NAME: link}})
        with _WRITING:
            write_atomically(self.home / "config.toml", text.encode())
        environment = {**os.environ, **SWITCHES, "FLWR_HOME": str(self.home)}
        try:
            done = subprocess.run(
                [_program("flwr"), *arguments, "--format", "json"],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                env=environment,
                timeout=_LONGEST_COMMAND,
                check=False,
            )
            found = json.loads(done.stdout)
        except subprocess.TimeoutExpired as error:
            raise ControlError(
                f"flwr {arguments[0]} at {self.address}: no answer in {_LONGEST_COMMAND:g} s"
            ) from error
        except ValueError as error:
            why = done.stderr.decode(errors="replace").strip()[-300:]
            raise ControlError(f"flwr {arguments[0]} at {self.address}: {why}") from error
        if not isinstance(found, dict) or found.get("success") is False:
            why = " ".join(str(found.get("error-message", found)).split())[-300:]
            raise ControlError(f"flwr {arguments[0]} at {self.address}: {why}")
        return found


def _program(name: str) -> str:
    """Return the path of a program of Flower, next to this interpreter or on the search path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FederationError(f"{name} is not installed: pip install 'coterie[flower]'")
    return found


class LocalFederation:
    """SuperLink and SuperNodes that run while the context is open.

    Args:
        folder: For logs and Flower's files; the working directory of the SuperLink and of the
            ServerApp. It is created if absent.
        keys: A folder that `coterie deploy certificates` wrote.
        nodes: The `--node-config` of each SuperNode, by name of its site.
        environment: Environment variables of all processes, added to those of this process.
        patience: Seconds that a process may take to be ready.
    """

    def __init__(
        self,
        folder: Path,
        keys: Path,
        nodes: Mapping[str, Config],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 60.0,
    ) -> None:
        self.folder, self.keys, self.nodes = folder.resolve(), keys.resolve(), nodes
        if LINK in nodes:
            raise ValueError(f"a node is named {LINK}: choose another name")
        self.patience = patience
        self.tag = uuid.uuid4().hex
        self.node_ids: dict[str, int] = {}
        self._extra = dict(environment or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, int] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def control(self) -> Control:
        """The Control API of the SuperLink."""
        return Control(self.address, self.keys / "ca.pem", self.folder / "flower" / "flwr")

    def __enter__(self) -> Self:
        """Start all processes, and wait until they are ready."""
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "coterie.deploy.processes", str(os.getpid()), self.tag],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._launch_link()
            self._await(LINK, self._launch_link, self._answers)
            self._start_nodes(list(self.nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self.close()

    def close(self) -> None:
        """End every process that was started here; a second call does nothing."""
        # After a second Ctrl-C here the guard still ends the processes.
        self._end(f"{self.tag}:")
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def submit(self, app: Path, config: Config | None = None) -> int:
        """Start a run of an app, with run config of its own; return its id."""
        return self.control.submit(app, config or {})

    def run_status(self, run: int) -> str:
        """Return the status of a run, such as "running" or "finished:completed"."""
        return self.control.status(run)

    def wait(self, run: int, seconds: float) -> str:
        """Wait for a run to end; return its status.

        Raises:
            FederationError: If it takes longer, or the SuperLink ends.
        """

        def ended() -> bool:
            return self.run_status(run).startswith("finished")

        # A request takes a second or two of a core, which the run could use.
        self._wait(ended, LINK, f"run {run} to end", seconds, pause=_POLL)
        return self.run_status(run)

    def is_running(self, name: str) -> bool:
        """Return whether the SuperLink ("superlink") or a SuperNode is running."""
        child = self._children.get(name)
        return child is not None and child.poll() is None

    def log(self, name: str) -> Path:
        """Return the log of the SuperLink ("superlink") or of a SuperNode."""
        return self.folder / "logs" / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process of the federation."""
        home = self.folder / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        usual = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), usual.get("PATH", "")])
        path = light_path(self.folder / "bin", path)
        mine = {"PATH": path, "FLWR_HOME": str(home), TAG: self._tag(name)}
        return {**usual, **_ENVIRONMENT, **SWITCHES, **self._extra, **mine}

    def _launch_link(self) -> None:
        from_keys = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        port = str(free_port())
        self.address = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "coterie.deploy.superlink", "--host", "127.0.0.1"]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        for option, name in from_keys.items():
            command += [f"--ssl-{option}", str(self.keys / name)]
        self._launch(LINK, [*command, "--port", port])

    def _answers(self) -> bool:
        trusted = ssl.create_default_context(cafile=str(self.keys / "ca.pem"))
        with contextlib.suppress(OSError):
            url = f"https://{self.address}/health"
            with urllib.request.urlopen(url, context=trusted, timeout=5) as answer:
                return bool(answer.status < 500)
        return False

    def _start_nodes(self, names: Sequence[str]) -> None:
        """Start SuperNodes in parallel."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(self._register, names))
        for name in names:
            self._launch_node(name)
        for name in names:
            # It logs its id once the SuperLink has admitted it.
            self._await(
                name,
                partial(self._launch_node, name),
                lambda name=name: "SuperNode ID:" in self._logged(name),  # type: ignore[misc]
            )

    def _register(self, name: str) -> None:
        if name not in self.node_ids:
            public = self.keys / "sites" / name / "supernode.pub"
            self.node_ids[name] = self.control.register(public, name)

    def _launch_node(self, name: str, authority: Path | None = None) -> None:
        keys = self.keys / "sites" / name
        command = ["flower-supernode", "--superlink", self.address, "--host", "127.0.0.1"]
        command += ["--port", str(free_port())]
        command += ["--root-certificates", str(authority or keys / "ca.pem")]
        command += ["--auth-supernode-private-key", str(keys / "supernode")]
        if self.nodes[name]:
            command += ["--node-config", node_config(self.nodes[name])]
        self._launch(name, command)

    def _launch(self, name: str, command: Sequence[str]) -> None:
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            self._begun[name] = log.tell()
            try:
                self._children[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=self.environment(name),
                    start_new_session=True,  # only this process gets Ctrl-C, and ends them in order
                )
            except FileNotFoundError as error:
                raise FederationError(
                    f"{command[0]} is not installed: pip install 'coterie[flower]'"
                ) from error

    def _await(self, name: str, launch: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Wait for a process; launch it again where its port was taken meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._wait(ready, name, name, self.patience)
            except FederationError:
                if _PORT_TAKEN not in self._logged(name):
                    raise
                launch()
        return self._wait(ready, name, name, self.patience)

    def _wait(
        self, done: Callable[[], bool], name: str, what: str, seconds: float, pause: float = 0.1
    ) -> None:
        """Wait for a condition; raise if the process that it depends on ends first."""
        end = time.monotonic() + seconds
        while not done():
            ended = not self.is_running(name)
            if ended or time.monotonic() > end:
                why = f"{name} ended" if ended else f"not ready after {seconds:g} s"
                tail = "\n".join(self._logged(name).splitlines()[-20:])
                raise FederationError(
                    f"waited for {what}: {why}; the end of {self.log(name)}:\n{tail}"
                )
            time.sleep(pause)

    def _logged(self, name: str) -> str:
        """Return what a process has logged since it was launched last."""
        return self.log(name).read_bytes()[self._begun[name] :].decode(errors="replace")

    def _tag(self, name: str) -> str:
        # Ends in a character that no name has: north must not match northwest.
        return f"{self.tag}:{name};"

    def _end(self, tag: str, grace: float = _GRACE) -> None:
        def reap() -> None:
            for child in self._children.values():
                child.poll()

        end_all(tag, reap, grace)
        for name, child in self._children.items():
            # The environment of a child that is ending disappears a moment before it does.
            if self._tag(name).startswith(tag):
                child.wait(self.patience)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
