"""A local federation whose processes are stopped, killed and started again."""

import contextlib
from pathlib import Path

import psutil
from cryptography.hazmat.primitives import serialization

from coterie.deploy.processes import LINK, LocalFederation, end_all, tagged


class FaultyFederation(LocalFederation):
    """Ends and restarts single processes."""

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Start a SuperNode again; `wait` is False for one that the SuperLink rejects."""
        self._node(name)
        if self.is_running(name):
            raise ValueError(f"node {name} is running: stop it first")
        if name in self.node_ids:
            self._deactivate(self._keys_of(name) / "supernode", self.node_ids[name])
        if wait:
            self._start_nodes([name])
        else:
            self._launch_node(name)

    def _deactivate(self, private_key: Path, node: int) -> None:
        """Deactivate a killed SuperNode in its name: the SuperLink would not readmit it soon."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        key = serialization.load_ssh_private_key(private_key.read_bytes(), None)
        signer = NodeAuthHttpInterceptor(key, key.public_key())
        if node in self.control.online():
            with self.control._open(FleetHttpClient, "SuperNode", signer) as client:
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def stop_node(self, name: str) -> None:
        """End a SuperNode and its descendants in order."""
        self._node(name)
        end_all(self._tag(name), self._reap)
        self._collect(name)

    def kill_node(self, name: str) -> None:
        """Kill a SuperNode and its descendants, as a power failure would."""
        self._node(name)
        end_all(self._tag(name), self._reap, grace=0)
        self._collect(name)

    def kill_server_app(self, run: int, seconds: float = 30.0) -> None:
        """Kill the process of a run's ServerApp."""
        self._wait(lambda: bool(self.server_apps()), LINK, f"the ServerApp of run {run}", seconds)
        (found,) = self.server_apps()
        found.kill()

    def server_apps(self) -> list[psutil.Process]:
        """Return the processes of ServerApps."""
        found = []
        for process in tagged(self._tag(LINK)):
            with contextlib.suppress(psutil.Error):
                if "flwr-serverapp" in " ".join(process.cmdline()):
                    found.append(process)
        return found
