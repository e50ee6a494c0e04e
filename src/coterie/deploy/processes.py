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

`Control` is Flower's Control API, as far as a federation needs it: the same requests as `flwr
supernode register`, `flwr run` and `flwr ls`, from one process, because each start of that program
takes a second or two.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

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


class FederationError(RuntimeError):
    """Raised when a process does not start or ends early; quotes the end of its log."""


class ControlError(FederationError):
    """Raised when the SuperLink does not carry out a request."""


@dataclass(frozen=True)
class Node:
    """A SuperNode to start.

    Attributes:
        config: Its `--node-config`.
        keys: Its folder of keys; None for `sites/NAME` of the federation's.
        authority: Replaces the CA certificate of its folder of keys.
        registered: Whether its key is registered with the SuperLink.
        started: Whether it starts with the federation.
    """

    config: Config = field(default_factory=dict)
    keys: Path | None = None
    authority: Path | None = None
    registered: bool = True
    started: bool = True


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
    """End all processes with a tag: SIGTERM first, SIGKILL after a time.

    Args:
        tag: The beginning of their tags.
        reap: Called repeatedly: collects ended children, which would stay as zombies.
        grace: Seconds that they have to end by themselves.
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
    """The Control API of a SuperLink.

    Attributes:
        address: Its host and port.
        authority: The CA certificate that verifies its own (ca.pem).
    """

    address: str
    authority: Path

    def register(self, public_key: Path, name: str) -> int:
        """Register a SuperNode; return its id.

        Args:
            public_key: The file of its public key, in OpenSSH's format.
            name: Its name.
        """
        from cryptography.hazmat.primitives import serialization
        from flwr.proto.control_pb2 import RegisterNodeRequest

        key = serialization.load_ssh_public_key(public_key.read_bytes()).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        with self._open() as client:
            return int(client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id)

    def online(self) -> set[int]:
        """Return the ids of the SuperNodes that are online."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._open() as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        return {int(node.node_id) for node in nodes if node.status == "online"}

    def submit(self, app: Path, config: Mapping[str, str | int | float | bool]) -> int:
        """Pack an app and start a run of it; return the run's id.

        Args:
            app: The app's folder.
            config: Overrides [tool.flwr.app.config] of its pyproject.toml.
        """
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = pack_app(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config))
        )
        with self._open() as client:
            answer = client.StartRun(request)
        if not answer.HasField("run_id"):
            raise ControlError(f"{app}: the SuperLink did not start a run ({answer.note})")
        return int(answer.run_id)

    def status(self, run: int) -> tuple[str, str]:
        """Return a run's status (such as "running" or "finished:completed"), and details."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._open() as client:
            known = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        if run not in known:
            raise ControlError(f"run {run}: the SuperLink has no such run")
        status = known[run].status
        sub = f":{status.sub_status}" if status.sub_status else ""
        return f"{status.status}{sub}", str(status.details)

    @contextmanager
    def _open(
        self, kind: Any = None, component: str = "flwr CLI", *interceptors: Any
    ) -> Iterator[Any]:
        import httpx
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        client = (kind or ControlHttpClient).from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise ControlError(
                f"the SuperLink at {self.address} answered {error.response.status_code}: {text}"
            ) from error
        except httpx.HTTPError as error:
            raise ControlError(
                f"the SuperLink at {self.address} cannot be reached ({error}); check that it runs, "
                f"and that {self.authority} signed its certificate"
            ) from error
        finally:
            client.close()


def pack_app(app: Path) -> bytes:
    """Return an app, packed as Flower does.

    Raises:
        ValueError: If it is not an app.
    """
    from flwr.cli.build import build_fab_from_disk

    if not (app / "pyproject.toml").is_file():
        raise ValueError(f"{app}: not a Flower app (no pyproject.toml); use `coterie deploy init`")
    with warnings.catch_warnings():
        # Flower uses a name that pathspec will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bytes(build_fab_from_disk(app))


class LocalFederation:
    """SuperLink and SuperNodes that run while the context is open."""

    def __init__(
        self,
        folder: Path,
        keys: Path,
        nodes: Mapping[str, Node | Config],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 60.0,
    ) -> None:
        """Configure a federation; entering the context starts it.

        Args:
            folder: For logs and Flower's files; the working directory of the SuperLink and of the
                ServerApp. It is created if absent.
            keys: A folder that `coterie deploy certificates` wrote.
            nodes: Nodes by name; a plain mapping is a node's `--node-config`.
            environment: Environment variables of all processes, added to those of this process.
            patience: Seconds that a process may take to be ready.
        """
        self.folder, self.keys = folder.resolve(), keys.resolve()
        self.nodes = {
            name: node if isinstance(node, Node) else Node(node) for name, node in nodes.items()
        }
        if LINK in self.nodes:
            raise ValueError(f"a node is named {LINK}: choose another name")
        self.patience = patience
        self.tag = uuid.uuid4().hex
        self.node_ids: dict[str, int] = {}
        self._extra = dict(environment or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """The address of the SuperLink."""
        return f"127.0.0.1:{self._port}"

    @property
    def control(self) -> Control:
        """The Control API of the SuperLink."""
        return Control(self.address, self.keys / "ca.pem")

    def __enter__(self) -> "LocalFederation":
        """Start all processes, and wait until they are ready."""
        try:
            self._start_guard()
            self._start_link()
            for name, node in self.nodes.items():
                if node.registered:
                    self.node_ids[name] = self.control.register(
                        self._keys_of(name) / "supernode.pub", name
                    )
            self._start_nodes([name for name, node in self.nodes.items() if node.started])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes."""
        self.close()

    def close(self) -> None:
        """End every process that was started here; a second call does nothing."""
        # After a second Ctrl-C here the guard still ends the processes.
        end_all(f"{self.tag}:", self._reap)
        for name in self._children:
            self._collect(name)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def submit(self, app: Path, config: Config | None = None) -> int:
        """Start a run of an app; return its id.

        Args:
            app: The app's folder.
            config: Overrides the app's own run config.
        """
        return self.control.submit(app, config or {})

    def run_status(self, run: int) -> str:
        """Return the status of a run, such as "running" or "finished:completed"."""
        return self.control.status(run)[0]

    def wait(self, run: int, seconds: float) -> str:
        """Wait for a run to end; return its status.

        Raises:
            FederationError: If it takes longer, or the SuperLink ends.
        """
        # A request takes the SuperLink some milliseconds, which the run could use.
        self._wait(
            lambda: self.run_status(run).startswith("finished"),
            LINK,
            f"run {run} to end",
            seconds,
            pause=0.5,
        )
        return self.run_status(run)

    def is_running(self, name: str) -> bool:
        """Return whether the SuperLink ("superlink") or a SuperNode is running."""
        child = self._children.get(name)
        return child is not None and child.poll() is None

    def log(self, name: str) -> Path:
        """Return the log of the SuperLink ("superlink") or of a SuperNode."""
        return self.folder / "logs" / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process of the federation ("cli": to run `flwr` in)."""
        home = self.folder / "flower" / name
        usual = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), usual.get("PATH", "")])
        mine = {"PATH": path, "FLWR_HOME": str(home), TAG: self._tag(name)}
        return {**usual, **_ENVIRONMENT, **SWITCHES, **self._extra, **mine}

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "coterie.deploy.processes", str(os.getpid()), self.tag],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_link(self) -> None:
        from_keys = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        command = [sys.executable, "-m", "coterie.deploy.superlink", "--host", "127.0.0.1"]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        for option, name in from_keys.items():
            command += [f"--ssl-{option}", str(self.keys / name)]
        for attempt in range(_ATTEMPTS):
            self._port = free_port()
            begun = self._launch(LINK, [*command, "--port", str(self._port)])
            try:
                self._wait(self._answers, LINK, "the SuperLink", self.patience)
            except FederationError:
                if attempt + 1 == _ATTEMPTS or _PORT_TAKEN not in self._since(LINK, begun):
                    raise
            else:
                break
        place = {"address": self.address, "root-certificates": str(self.keys / "ca.pem")}
        home = self.folder / "flower" / "cli"
        home.mkdir(parents=True, exist_ok=True)
        lines = ["[superlink]", 'default = "local"', "", "[superlink.local]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in place.items()]
        (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _answers(self) -> bool:
        try:
            self.control.online()
        except ControlError:
            return False
        return True

    def _start_nodes(self, names: Sequence[str]) -> None:
        """Start SuperNodes in parallel, with another port where one was taken meanwhile."""
        begun = {name: self._launch_node(name) for name in names}
        for name in names:
            for attempt in range(_ATTEMPTS):
                try:
                    self._wait_for_node(name, begun[name])
                except FederationError:
                    if attempt + 1 == _ATTEMPTS or _PORT_TAKEN not in self._since(
                        name, begun[name]
                    ):
                        raise
                    begun[name] = self._launch_node(name)
                else:
                    break

    def _wait_for_node(self, name: str, begun: int) -> None:
        # It logs its id once the SuperLink has admitted it.
        self._wait(
            lambda: "SuperNode ID:" in self._since(name, begun),
            name,
            f"SuperNode {name}",
            self.patience,
        )

    def _launch_node(self, name: str) -> int:
        node, keys = self._node(name), self._keys_of(name)
        authority = node.authority or keys / "ca.pem"
        command = ["flower-supernode", "--superlink", self.address, "--host", "127.0.0.1"]
        command += ["--port", str(free_port()), "--root-certificates", str(authority)]
        command += ["--auth-supernode-private-key", str(keys / "supernode")]
        if node.config:
            command += ["--node-config", node_config(node.config)]
        return self._launch(name, command)

    def _launch(self, name: str, command: Sequence[str]) -> int:
        """Start a process; return where its part of the log begins."""
        environment = self.environment(name)
        Path(environment["FLWR_HOME"]).mkdir(parents=True, exist_ok=True)
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            begun = log.tell()
            try:
                self._children[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=environment,
                    start_new_session=True,  # only this process gets Ctrl-C, and ends them in order
                )
            except FileNotFoundError as error:
                raise FederationError(
                    f"{command[0]} is not installed: pip install 'coterie[flower]'"
                ) from error
        return begun

    def _wait(
        self, done: Callable[[], bool], name: str, what: str, seconds: float, pause: float = 0.1
    ) -> None:
        """Wait for a condition; raise if the process that it depends on ends first."""
        end = time.monotonic() + seconds
        while not done():
            ended = not self.is_running(name)
            if ended or time.monotonic() > end:
                why = f"{name} ended" if ended else f"not ready after {seconds:g} s"
                raise FederationError(
                    f"waited for {what}: {why}; the end of {self.log(name)}:\n{self.tail(name)}"
                )
            time.sleep(pause)

    def tail(self, name: str, lines: int = 20) -> str:
        """Return the end of a log."""
        return "\n".join(self._since(name, 0).splitlines()[-lines:])

    def _since(self, name: str, begun: int) -> str:
        with contextlib.suppress(FileNotFoundError), self.log(name).open("rb") as log:
            log.seek(begun)
            return log.read().decode(errors="replace")
        return ""

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise ValueError(f"no node {name!r}: there are {', '.join(self.nodes)}")
        return self.nodes[name]

    def _keys_of(self, name: str) -> Path:
        return (self.nodes[name].keys or self.keys / "sites" / name).resolve()

    def _tag(self, name: str) -> str:
        # Ends in a character that no name has: north must not match northwest.
        return f"{self.tag}:{name};"

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()

    def _collect(self, name: str) -> None:
        """Wait for a child that is ending: its environment disappears a moment before it does."""
        if name in self._children:
            self._children[name].wait(self.patience)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
