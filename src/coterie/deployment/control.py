"""Flower's Control API, as much as a federation needs: register SuperNodes, submit, ask.

The same requests as those of `flwr supernode register`, `flwr run` and `flwr ls`, from one
process: the program takes a second or two for each.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ControlError(RuntimeError):
    """Raised when the SuperLink did not do what it was asked for."""


@dataclass(frozen=True)
class Control:
    """A SuperLink that can be asked.

    Attributes:
        address: Its host and port.
        authority: The certificate that its own is checked against (ca.pem).
    """

    address: str
    authority: Path

    def register(self, public_key: Path, name: str) -> int:
        """Let a SuperNode in; gives its number.

        Args:
            public_key: Its public key, in OpenSSH's format.
            name: What it is called.
        """
        from cryptography.hazmat.primitives import serialization
        from flwr.proto.control_pb2 import RegisterNodeRequest

        key = serialization.load_ssh_public_key(public_key.read_bytes()).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        with self._open() as client:
            return int(client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id)

    def online(self) -> set[int]:
        """Return the numbers of the SuperNodes that the SuperLink hears from."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._open() as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        return {int(node.node_id) for node in nodes if node.status == "online"}

    def submit(self, app: Path, config: Mapping[str, str | int | float | bool]) -> int:
        """Pack an app and start a run of it; gives the run's number.

        Args:
            app: The app's folder.
            config: What differs from [tool.flwr.app.config] of its pyproject.toml.
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
            raise ControlError(f"run {run}: the SuperLink knows no such run")
        told = known[run].status
        named = f"{told.status}:{told.sub_status}" if told.sub_status else str(told.status)
        return named, str(told.details)

    def leave(self, private_key: Path, node: int) -> None:
        """Say in a SuperNode's name that it is gone; nothing happens if that is known.

        One that was killed could not say so itself, and the SuperLink refuses to let it in again
        (code 2004) until it has not been heard of for a minute.

        Args:
            private_key: The SuperNode's.
            node: Its number.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        key = serialization.load_ssh_private_key(private_key.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{private_key}: expected a SuperNode's key (ECDSA)")
        signed = NodeAuthHttpInterceptor(key, key.public_key())
        if node in self.online():
            with self._open(FleetHttpClient, "SuperNode", signed) as client:
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))

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
            told = error.response.text[:300]
            raise ControlError(
                f"the SuperLink at {self.address} answered {error.response.status_code}: {told}"
            ) from error
        except httpx.HTTPError as error:
            raise ControlError(
                f"the SuperLink at {self.address} cannot be reached ({error}); is it running, and "
                f"is {self.authority} of its certificate?"
            ) from error
        finally:
            client.close()


def pack_app(app: Path) -> bytes:
    """Pack an app as Flower does.

    Raises:
        ValueError: If it is not an app.
    """
    from flwr.cli.build import build_fab_from_disk

    if not (app / "pyproject.toml").is_file():
        raise ValueError(f"{app}: no Flower app (it has no pyproject.toml); `coterie deploy init`")
    with warnings.catch_warnings():
        # Flower's own use of a name that pathspec will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bytes(build_fab_from_disk(app))
