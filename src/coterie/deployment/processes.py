"""A federation on this machine: SuperLink and SuperNodes as real processes, with TLS and keys.

    with LocalFederation(folder, keys, {"north": {"folder": "/tmp/north"}}) as federation:
        run = federation.submit(app)
        federation.wait(run, 120)

For trials and tests. Everything is on 127.0.0.1, on ports that are free; SuperNodes prove who they
are; dependencies of apps are never installed. What Flower keeps (FLWR_HOME) and all logs lie in the
folder given. On leaving, by an error or Ctrl-C as well, exactly the processes that were started
here end, with all that they have started (see `descendants`); a guard does it should this process
be killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from coterie.deployment import descendants
from coterie.deployment.control import Control, ControlError
from coterie.deployment.nodes import Config, Node, free_port, node_config
from coterie.deployment.superlink import SWITCHES

__all__ = ["LINK", "FederationError", "LocalFederation", "Node", "free_port", "node_config"]

LINK = "superlink"
_LEAST = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; on one machine 1 is long
}
_ATTEMPTS = 3
_TAKEN = "address already in use"


class FederationError(RuntimeError):
    """Raised when a process does not start or ends; quotes the end of its log."""


class LocalFederation:
    """SuperLink and SuperNodes that run as long as the context is open."""

    def __init__(
        self,
        folder: Path,
        keys: Path,
        nodes: Mapping[str, Node | Config],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 60.0,
    ) -> None:
        """Describe a federation; entering the context starts it.

        Args:
            folder: For logs and what Flower keeps; the working directory of the SuperLink and so
                of the ServerApp. Made if need be.
            keys: As `coterie deploy certificates` writes them.
            nodes: By name; a plain mapping is a node's `--node-config`.
            environment: Of all processes, besides this one's.
            patience: Seconds that any process may take to be ready.
        """
        self.folder, self.keys = folder.resolve(), keys.resolve()
        self.nodes = {
            name: node if isinstance(node, Node) else Node(node) for name, node in nodes.items()
        }
        if LINK in self.nodes:
            raise ValueError(f"a node called {LINK}: choose another name")
        self.patience = patience
        self.mark = uuid.uuid4().hex
        self.numbers: dict[str, int] = {}
        self._extra = dict(environment or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """Of the SuperLink."""
        return f"127.0.0.1:{self._port}"

    @property
    def control(self) -> Control:
        """What the SuperLink can be asked for."""
        return Control(self.address, self.keys / "ca.pem")

    def __enter__(self) -> "LocalFederation":
        """Start all, and wait until all are there."""
        try:
            self._start_guard()
            self._start_link()
            for name, node in self.nodes.items():
                if node.registered:
                    self.numbers[name] = self.control.register(
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
        """End all."""
        self.close()

    def close(self) -> None:
        """End every process that was started here; does nothing a second time."""
        # A second Ctrl-C must not leave processes behind: the guard would still find them.
        descendants.end_all(f"{self.mark}:", self._reap)
        for name in self._children:
            self._collect(name)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def submit(self, app: Path, config: Config | None = None) -> int:
        """Start a run of an app; gives its number.

        Args:
            app: The app's folder.
            config: What differs from the app's own run config.
        """
        return self.control.submit(app, config or {})

    def run_status(self, run: int) -> str:
        """Return the status of a run, such as "running" or "finished:completed"."""
        return self.control.status(run)[0]

    def wait(self, run: int, seconds: float) -> str:
        """Wait for a run to end; gives its status.

        Raises:
            FederationError: If it takes longer, or the SuperLink ends.
        """
        # A question takes the SuperLink some milliseconds, which the run itself could use.
        self._wait(
            lambda: self.run_status(run).startswith("finished"),
            LINK,
            f"run {run} to end",
            seconds,
            pause=0.5,
        )
        return self.run_status(run)

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Start a SuperNode that was stopped or killed, with the same key and config.

        Args:
            name: Its name.
            wait: For the SuperLink to know it; False for one that is to be refused.
        """
        self._node(name)
        if self.is_running(name):
            raise ValueError(f"node {name} is running: stop it first")
        if name in self.numbers:
            self.control.leave(self._keys_of(name) / "supernode", self.numbers[name])
        if wait:
            self._start_nodes([name])
        else:
            self._launch_node(name)

    def stop_node(self, name: str) -> None:
        """End a SuperNode in order, with all that it has started."""
        self._node(name)
        descendants.end_all(self._mark(name), self._reap)
        self._collect(name)

    def kill_node(self, name: str) -> None:
        """Kill a SuperNode and all that it has started, as a power cut would."""
        self._node(name)
        descendants.kill_all(self._mark(name), self._reap)
        self._collect(name)

    def kill_server_app(self, run: int, seconds: float = 30.0) -> None:
        """Kill the process of a run's ServerApp.

        Raises:
            FederationError: If there is none, or there are several: they do not say of which run
                they are.
        """
        found: list[int] = []

        def look() -> bool:
            found[:] = self.server_apps()
            return bool(found) or self.run_status(run).startswith("finished")

        self._wait(look, LINK, f"the ServerApp of run {run}", seconds)
        if len(found) != 1:
            raise FederationError(
                f"run {run} is {self.run_status(run)}, and {len(found)} ServerApps are running: "
                "expected one"
            )
        descendants.send(found[0], self._mark(LINK), signal.SIGKILL)

    def server_apps(self) -> list[int]:
        """Return the processes of ServerApps."""
        words = descendants.marked(self._mark(LINK)).items()
        return [process for process, line in words if "flwr-serverapp" in line]

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
        mine = {"PATH": path, "FLWR_HOME": str(home), descendants.MARK: self._mark(name)}
        return {**usual, **_LEAST, **SWITCHES, **self._extra, **mine}

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "coterie.deployment.descendants", str(os.getpid()), self.mark],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_link(self) -> None:
        from_keys = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        words = [sys.executable, "-m", "coterie.deployment.superlink", "--host", "127.0.0.1"]
        words += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        for option, name in from_keys.items():
            words += [f"--ssl-{option}", str(self.keys / name)]
        for attempt in range(_ATTEMPTS):
            self._port = free_port()
            begun = self._launch(LINK, [*words, "--port", str(self._port)])
            try:
                self._wait(self._answers, LINK, "the SuperLink", self.patience)
            except FederationError:
                if attempt + 1 == _ATTEMPTS or _TAKEN not in self._since(LINK, begun):
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
        """Start SuperNodes side by side; another port where one was taken meanwhile."""
        begun = {name: self._launch_node(name) for name in names}
        for name in names:
            for attempt in range(_ATTEMPTS):
                try:
                    self._wait_for_node(name, begun[name])
                except FederationError:
                    if attempt + 1 == _ATTEMPTS or _TAKEN not in self._since(name, begun[name]):
                        raise
                    begun[name] = self._launch_node(name)
                else:
                    break

    def _wait_for_node(self, name: str, begun: int) -> None:
        # It says so once the SuperLink has let it in; that one still knows it from before a kill.
        self._wait(
            lambda: "SuperNode ID:" in self._since(name, begun),
            name,
            f"SuperNode {name}",
            self.patience,
        )

    def _launch_node(self, name: str) -> int:
        node, keys = self._node(name), self._keys_of(name)
        authority = node.authority or keys / "ca.pem"
        words = ["flower-supernode", "--superlink", self.address, "--host", "127.0.0.1"]
        words += ["--port", str(free_port()), "--root-certificates", str(authority)]
        words += ["--auth-supernode-private-key", str(keys / "supernode")]
        if node.config:
            words += ["--node-config", node_config(node.config)]
        return self._launch(name, words)

    def _launch(self, name: str, words: Sequence[str]) -> int:
        """Start a process; gives where its part of the log begins."""
        environment = self.environment(name)
        Path(environment["FLWR_HOME"]).mkdir(parents=True, exist_ok=True)
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            begun = log.tell()
            try:
                self._children[name] = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which ends them in order
                )
            except FileNotFoundError as error:
                raise FederationError(
                    f"{words[0]} is not installed: pip install 'coterie[flower]'"
                ) from error
        return begun

    def _wait(
        self, done: Callable[[], bool], name: str, what: str, seconds: float, pause: float = 0.1
    ) -> None:
        """Wait until something holds; fail if the process it depends on ends first."""
        end = time.monotonic() + seconds
        while not done():
            ended = not self.is_running(name)
            if ended or time.monotonic() > end:
                why = f"{name} ended" if ended else f"nothing within {seconds:g} s"
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

    def _mark(self, name: str) -> str:
        # Ends in a character that no name has: north must not stand for northwest.
        return f"{self.mark}:{name};"

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()

    def _collect(self, name: str) -> None:
        """Wait for a child that is ending: its mark is gone a moment before it is."""
        if name in self._children:
            self._children[name].wait(self.patience)
