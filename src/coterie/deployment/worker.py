"""A warm worker for a site: it holds rows, compiled kernels and personal state between messages.

Flower starts a new process for every message. Loading torch, the rows and the kernels anew each
time would take longer than the work. So the process that Flower starts is a light one (`relay`): it
hands the parcel over a Unix socket to a worker of the site, which it starts if none is there. The
worker ends soon after the SuperNode, or when it was idle for a while.

The socket takes nothing but parcels, which the worker verifies as if they came over the network; it
lies in a folder that only the site's user can enter.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.site import Site

_START = 120.0
_IDLE = 1800.0
_LEAVING = 20.0
_OTHER, _FINE = b"other", b"fine"


def relay(content: bytes, app: Path, config: Mapping[str, Any]) -> bytes:
    """Have the site's worker answer a parcel (packed); start the worker if need be.

    Args:
        content: The packed parcel.
        app: The app's folder: plan, federation, hook.
        config: What the site was started with: site, key, folder and what its hook needs.
    """
    folder = Path(str(config["folder"])).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # personal state is for nobody else
    task = {"app": str(app), "config": dict(config)}
    identity = _identity(app, config)
    address = socket_of(folder)
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


def socket_of(folder: Path) -> Path:
    """Return the address of a site's worker; short, since such addresses may not be long."""
    place = Path(tempfile.gettempdir()) / f"coterie-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid() or place.stat().st_mode & 0o077:
        raise PermissionError(f"{place} can be entered by others; remove it")
    return place / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:24]}.sock"


def _identity(app: Path, config: Mapping[str, Any]) -> bytes:
    """Name what a worker was started with: it answers for nothing else."""
    told = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    for name in sorted(path.name for path in app.glob("*") if path.is_file()):
        told.update(name.encode() + hashlib.sha256((app / name).read_bytes()).digest())
    for path in (Path(str(config[name])) for name in ("hook", "data") if name in config):
        if path.is_file():  # rows that were changed are to be read anew
            told.update(f"{path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return told.digest()


def _start(
    folder: Path, address: Path, identity: bytes, task: Mapping[str, Any]
) -> "subprocess.Popen[bytes]":
    with (folder / "worker.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "coterie.deployment.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _sweep(address.parent)
    told = {**task, "address": str(address), "identity": identity.hex(), "watch": os.getppid()}
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(json.dumps(told).encode())
    return child


def _sweep(place: Path) -> None:
    """Remove addresses that killed workers left behind: nobody listens there."""
    for path in place.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            if time.time() - path.stat().st_mtime < _START:
                continue  # a worker that is just starting does not listen yet
            line.settimeout(0.5)
            try:
                line.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _try(address: Path, identity: bytes, content: bytes) -> bytes | None:
    """Ask the worker that is there; None if there is none, or it is of another app."""
    gone = contextlib.suppress(ConnectionError, FileNotFoundError)
    with gone, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(address))
        _send(line, identity)
        _send(line, struct.pack("<q", os.getppid()))
        _send(line, content)
        if _receive(line) == _FINE:
            return _receive(line)
    return None


def _send(line: socket.socket, content: bytes) -> None:
    line.sendall(struct.pack("<Q", len(content)) + content)


def _receive(line: socket.socket) -> bytes:
    (length,) = struct.unpack("<Q", _exactly(line, 8))
    return _exactly(line, length)


def _exactly(line: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = line.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the other side hung up")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class _Watch:
    """Ends the process when the one it serves is gone, or nobody asked for long."""

    def __init__(self, process: int) -> None:
        self.process, self.last = process, time.monotonic()
        self.busy = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            alive = (
                self.process <= 1 or Path(f"/proc/{self.process}").exists() or _lives(self.process)
            )
            if alive and time.monotonic() - self.last < _IDLE:
                continue
            with self.busy:  # never in the middle of an answer
                os._exit(0)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def serve(task: Mapping[str, Any]) -> None:
    """Answer parcels for a site until it is time to go."""
    from coterie.wire import RefusedError, pack, unpack

    folder = Path(str(task["config"]["folder"])).resolve()
    address, identity = Path(task["address"]), bytes.fromhex(task["identity"])
    watch = _Watch(int(task["watch"]))
    with _hold(folder):
        site = _opened(task)
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(address))
            address.chmod(0o600)
            door.listen(4)
            while True:
                line, _ = door.accept()
                with line, watch.busy, contextlib.suppress(ConnectionError, RefusedError):
                    other = _receive(line) != identity
                    (watch.process,) = struct.unpack("<q", _receive(line))
                    watch.last = time.monotonic()
                    content = _receive(line)
                    if other:
                        address.unlink(missing_ok=True)
                        _send(line, _OTHER)
                        return
                    answer = pack(site.answer(unpack(content)))
                    _send(line, _FINE)
                    _send(line, answer)


def _opened(task: Mapping[str, Any]) -> "Site":
    """Open the site; what its owner can mend is said in one line, and ends the worker."""
    from coterie.deployment.apps import open_site

    try:
        site = open_site(Path(task["app"]), task["config"], _say)
    except (ValueError, OSError) as error:  # of rows, hook, plan, keys
        _say(f"{type(error).__name__}: {error}")
        sys.exit(1)
    _say(f"ready: site {site.setting.name}, agreement {site.setting.agreement}")
    return site


def _say(text: str) -> None:
    """Write a line of worker.log, which is where the worker's stderr goes."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    sys.stderr.write(f"{now} {' '.join(text.split())}\n")
    sys.stderr.flush()


def _hold(folder: Path) -> IO[bytes]:
    """Hold a site's folder; wait for a worker on its way out."""
    file = (folder / ".lock").open("ab")
    end = time.monotonic() + _LEAVING
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if time.monotonic() > end:
                _say(f"{folder} is in use by another process; every site needs its own folder")
                raise SystemExit(1) from error
            time.sleep(0.1)


if __name__ == "__main__":
    serve(json.load(sys.stdin))
