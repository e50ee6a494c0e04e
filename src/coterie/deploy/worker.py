"""A site's worker: it holds rows, compiled kernels and personal state between messages.

Flower starts a new process for every message. Loading torch, the rows and the kernels each time
would take longer than the work. So the process that Flower starts is a light one (`relay`): it
sends the envelope over a Unix socket to the site's worker, which it starts if there is none. The
worker ends soon after the SuperNode, or after a time without requests.

The socket accepts only envelopes, which the worker verifies as if they came over the network. It
lies in a folder that only the site's user can enter.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.deploy.site import Site

_START = 120.0
_IDLE = 1800.0
_LEAVING = 20.0
_OTHER, _ACCEPTED = b"other", b"accepted"


def relay(content: bytes, app: Path, config: Mapping[str, Any]) -> bytes:
    """Return the answer of the site's worker to a packed envelope; start the worker if need be.

    `config` is the `--node-config` of the site: site, key, folder and what its hook needs.
    """
    folder = Path(str(config["folder"])).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # personal state is private to the site's user
    task = {"app": str(app), "config": dict(config)}
    identity = _identity(app, config)
    address = socket_path(folder)
    started: subprocess.Popen[bytes] | None = None
    end = time.monotonic() + _START
    while time.monotonic() < end:
        answer = _try(address, identity, content)
        if answer is not None:
            return answer
        if started is None or started.poll() is not None:
            if started is not None and started.returncode != 0:
                raise RuntimeError(
                    f"the site's worker ended with status {started.returncode}: see "
                    f"{folder / 'worker.log'}"
                )
            started = _start(folder, address, identity, task)
        time.sleep(0.1)
    raise RuntimeError(f"the site's worker did not answer: see {folder / 'worker.log'}")


def socket_path(folder: Path) -> Path:
    """Return the socket of a site's worker; short, because the length of such paths is limited."""
    place = Path(tempfile.gettempdir()) / f"coterie-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid() or place.stat().st_mode & 0o077:
        raise PermissionError(f"{place} can be entered by other users; remove it")
    return place / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:24]}.sock"


def _identity(app: Path, config: Mapping[str, Any]) -> bytes:
    """Return a hash of what a worker is started with; it answers for nothing else."""
    identity = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    for name in sorted(path.name for path in app.glob("*") if path.is_file()):
        identity.update(name.encode() + hashlib.sha256((app / name).read_bytes()).digest())
    for path in (Path(str(config[name])) for name in ("hook", "data") if name in config):
        if path.is_file():  # changed rows are read again
            identity.update(f"{path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return identity.digest()


def _start(
    folder: Path, address: Path, identity: bytes, task: Mapping[str, Any]
) -> "subprocess.Popen[bytes]":
    with (folder / "worker.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "coterie.deploy.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _remove_stale(address.parent)
    task = {**task, "address": str(address), "identity": identity.hex(), "watch": os.getppid()}
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(json.dumps(task).encode())
    return child


def _remove_stale(place: Path) -> None:
    """Remove sockets that killed workers left behind, on which nobody listens."""
    for path in place.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            if time.time() - path.stat().st_mtime < _START:
                continue  # a worker that is starting does not listen yet
            line.settimeout(0.5)
            try:
                line.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _try(address: Path, identity: bytes, content: bytes) -> bytes | None:
    """Return the answer of the running worker; None if there is none, or it serves another app."""
    gone = contextlib.suppress(ConnectionError, EOFError, FileNotFoundError)
    with gone, Client(str(address), "AF_UNIX") as line:
        # Bytes only: `Connection.recv` would unpickle what the other side sends.
        for part in (identity, str(os.getppid()).encode(), content):
            line.send_bytes(part)
        if line.recv_bytes() == _ACCEPTED:
            return line.recv_bytes()
    return None


class _Watch:
    """Ends the process when its SuperNode is gone, or after a time without requests."""

    def __init__(self, process: int) -> None:
        self.process, self.last = process, time.monotonic()
        self.busy = threading.Lock()
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        import psutil

        while True:
            time.sleep(0.5)
            gone = self.process > 1 and not psutil.pid_exists(self.process)
            if not gone and time.monotonic() - self.last < _IDLE:
                continue
            with self.busy:  # never during an answer
                os._exit(0)


def serve(task: Mapping[str, Any]) -> None:
    """Answer envelopes for a site until the worker is to end."""
    from coterie.deploy.messages import RefusedError, pack, unpack

    folder = Path(str(task["config"]["folder"])).resolve()
    address, identity = Path(task["address"]), bytes.fromhex(task["identity"])
    watch = _Watch(int(task["watch"]))
    with _lock(folder):
        site = _open(task)
        address.unlink(missing_ok=True)
        with Listener(str(address), "AF_UNIX", backlog=4) as listener:
            address.chmod(0o600)
            while True:
                invalid = contextlib.suppress(OSError, EOFError, ValueError, RefusedError)
                with listener.accept() as line, watch.busy, invalid:
                    other = line.recv_bytes() != identity
                    watch.process = int(line.recv_bytes())
                    watch.last = time.monotonic()
                    content = line.recv_bytes()
                    if other:
                        line.send_bytes(_OTHER)
                        return
                    answer = pack(site.answer(unpack(content)))
                    line.send_bytes(_ACCEPTED)
                    line.send_bytes(answer)


def _open(task: Mapping[str, Any]) -> "Site":
    """Return the site; an error that its owner can correct is one line, and ends the worker."""
    from coterie.deploy.site import open_site

    try:
        site = open_site(Path(task["app"]), task["config"], _log)
    except (ValueError, OSError) as error:  # of rows, hook, plan, keys
        _log(f"{type(error).__name__}: {error}")
        sys.exit(1)
    _log(f"ready: site {site.name}, agreement {site.agreement.digest}")
    return site


def _log(text: str) -> None:
    """Write a line to stderr, which goes to worker.log."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    sys.stderr.write(f"{now} {' '.join(text.split())}\n")
    sys.stderr.flush()


def _lock(folder: Path) -> IO[bytes]:
    """Lock a site's folder; wait for a worker that is about to end."""
    file = (folder / ".lock").open("ab")
    end = time.monotonic() + _LEAVING
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if time.monotonic() > end:
                _log(f"{folder} is in use by another process; every site needs its own folder")
                raise SystemExit(1) from error
            time.sleep(0.1)


def main() -> None:
    """Serve the task that the relay writes to standard input."""
    from coterie.core.environment import go_offline, is_offline, telemetry_off

    telemetry_off()
    if is_offline():
        go_offline()
    serve(json.load(sys.stdin))


if __name__ == "__main__":
    main()
