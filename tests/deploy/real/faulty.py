"""A local federation whose processes are stopped, killed and started again."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives import serialization

from coterie.deploy.processes import LINK, LocalFederation, tagged


class FaultyFederation(LocalFederation):
    """Ends and restarts single processes; strangers do not start with the others.

    Args:
        unregistered: Nodes whose keys the SuperLink does not know.
        authorities: Nodes that expect another authority to have signed its certificate.
    """

    def __init__(
        self,
        *args: Any,
        unregistered: Sequence[str] = (),
        authorities: Mapping[str, Path] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self.unregistered, self.authorities = unregistered, authorities or {}

    def _start_nodes(self, names: Sequence[str]) -> None:
        strangers = (*self.unregistered, *self.authorities)
        super()._start_nodes([name for name in names if name not in strangers])

    def start_stranger(self, name: str) -> None:
        """Start a node that is to be refused, or to refuse."""
        if name not in self.unregistered:
            self._register(name)
        self._launch_node(name, self.authorities.get(name))

    def start_node(self, name: str) -> None:
        """Start a SuperNode again."""
        assert not self.is_running(name), f"node {name} is running: stop it first"
        self._deactivate(name)
        self._start_nodes([name])

    def _deactivate(self, name: str) -> None:
        """Deactivate a killed SuperNode in its name: the SuperLink would not readmit it soon."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        if self.node_ids[name] not in self.control.online():
            return
        private = (self.keys / "sites" / name / "supernode").read_bytes()
        key = serialization.load_ssh_private_key(private, None)
        client = FleetHttpClient.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=(self.keys / "ca.pem").read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )
        with contextlib.closing(client):
            client.DeactivateNode(DeactivateNodeRequest(node_id=self.node_ids[name]))

    def stop_node(self, name: str) -> None:
        """End a SuperNode and its descendants in order."""
        self._end(self._tag(name))

    def kill_node(self, name: str) -> None:
        """Kill a SuperNode and its descendants, as a power failure would."""
        self._end(self._tag(name), grace=0)

    def kill_server_app(self, run: int, seconds: float = 180.0) -> None:
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
