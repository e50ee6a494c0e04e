"""Runs of the command line in forked processes: imports are paid for once, kills are real.

A server imports everything with one thread, then forks a child for each command. The child is an
ordinary process: it can be killed, interrupted, and given faults of its own (`faults.py` beside
this file speaks of them).
"""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Job:
    """A forked command."""

    pid: int
    out: Path
    err: Path
    begun: float


class Forks:
    """A server that forks commands."""

    def __init__(self, place: Path) -> None:
        self.place, self._number = place, 0
        self._warmed = set[tuple[object, ...]]()
        # Threads do not survive a fork: the server has none.
        one = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        one["NUMBA_THREADING_LAYER"] = "workqueue"  # OpenMP refuses a fork
        self._server = subprocess.Popen(
            [sys.executable, str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **one},
        )
        assert self._ask({"ask": "ready"}) == "ready"

    def warm(self, *arguments):
        """Run a command in the server itself, once: what it loads is there for all."""
        if arguments not in self._warmed:
            self._warmed.add(arguments)
            with tempfile.TemporaryDirectory(dir=self.place) as out:
                argv = [*map(str, arguments), "--out", f"{out}/run"]
                assert self._ask({"ask": "warm", "argv": argv}) == 0

    def start(self, *arguments, fault=None, environment=None):
        """Start `coterie ARGUMENTS`, perhaps with a fault or more environment; give the job."""
        self._number += 1
        out, err = (self.place / f"{self._number}.{name}" for name in ("out", "err"))
        for path in (out, err):
            path.touch()  # a child may be killed before it opens them
        asked = {"ask": "start", "argv": [str(one) for one in arguments], "fault": fault}
        asked["environment"] = environment or {}
        pid = self._ask({**asked, "out": str(out), "err": str(err), "here": os.getcwd()})
        return Job(pid, out, err, time.monotonic())

    def finish(self, job, limit=120):
        """Wait for a job: exit status (negative: the signal that ended it), stdout, stderr."""
        timer = threading.Timer(limit, os.kill, (job.pid, signal.SIGKILL))
        timer.start()
        try:
            status = self._ask({"ask": "wait", "pid": job.pid})
        finally:
            timer.cancel()
        return status, job.out.read_text(), job.err.read_text()

    def run(self, *arguments, fault=None):
        """Start a command and wait for it."""
        return self.finish(self.start(*arguments, fault=fault))

    def share(self, size, *arguments, faults=()):
        """Start a command shared by `size` processes, as torchrun does; give the jobs by rank.

        `faults` are the faults of ranks, None for none.
        """
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        group |= {"LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
        return [
            self.start(
                *arguments,
                fault=fault,
                environment={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, fault in zip_longest(range(size), faults)
        ]

    def close(self):
        """End the server."""
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def _ask(self, question):
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the server of forked commands has ended"
        return json.loads(answer)


def kept(folder):
    """Return what a finished run leaves behind, less times and the run's own path."""
    files = ("posts.npz", "shared.npz", "metrics.parquet", "plan.toml", "data.json", "model.json")
    found = {name: (folder / name).read_bytes() for name in files}
    for name in ("clients.safetensors", "clients.json"):
        found[name] = (folder / "models" / name).read_bytes()
    certificate = json.loads((folder / "guarantee.json").read_text())
    # The ledger keeps the marks of crashes: what it says is compared, not its bytes.
    certificate["files"].pop("ledger.jsonl")
    for name in ("started", "finished", "sha256"):
        certificate.pop(name)
    result = json.loads((folder / "result.json").read_text())
    for name in ("seconds", "run"):
        result.pop(name)
    return {**found, "certificate": certificate, "result": result, "ledger": account(folder)}


def account(folder):
    """Read the ledger's charges and releases in order, leaving out lines that were cut off."""
    path, charged, released = folder / "ledger.jsonl", [], {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "charge" in entry:
            charged.append(entry["charge"])
        elif "release" in entry:
            released[entry["release"]] = entry["sha256"]
    return charged, released


def visible(folder):
    """Return the posts that anybody could read in a folder at this moment, by their content."""
    found = {}
    for path in (folder / "posts").glob("*.npz"):
        with np.load(path) as arrays:
            found[int(path.stem)] = {
                name.removeprefix("leaf."): arrays[name].tobytes() for name in arrays.files
            }
    if (folder / "posts.npz").exists():
        with np.load(folder / "posts.npz") as arrays:
            for name in arrays.files:
                index, _, leaf = name.partition(".")
                found.setdefault(int(index), {})[leaf] = arrays[name].tobytes()
    return found


def _serve() -> None:
    import coterie.cli.main
    import coterie.cli.train
    from coterie.methods.base import registered
    from coterie.privacy.accounting import profile
    from coterie.privacy.events import Gaussian, Participation

    # Only a machine that dies needs these.
    os.fsync = np.memmap.flush = lambda _: None
    registered()
    coterie.cli.main.build_parser()
    # What is imported late, too.
    profile([Gaussian(4.0)] * 3, Participation("poisson", 0.5), "zero_out").epsilon(1e-5)
    # The page is drawn from what is kept when all is done, and takes longer than these runs.
    coterie.cli.train.write_report = _without_page
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["ask"] == "ready":
            answer = "ready"
        elif asked["ask"] == "warm":
            with contextlib.redirect_stdout(io.StringIO()):
                answer = coterie.cli.main.main(asked["argv"])
        elif asked["ask"] == "start":
            answer = os.fork()
            if answer == 0:
                _child(asked, coterie.cli.main.main)
        else:
            _, status = os.waitpid(asked["pid"], 0)
            answer = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # what is loaded takes a second to be unloaded


def _without_page(folders, path):
    return path


def _child(asked, main) -> None:
    for path, stream in ((asked["out"], 1), (asked["err"], 2), (os.devnull, 0)):
        mode = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, mode), stream)
    os.chdir(asked["here"])
    os.environ.update(asked["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 70
    try:
        if asked["fault"] is not None:
            sys.path.insert(0, str(HERE.parent))
            import faults

            faults.install(**asked["fault"])
        code = main(asked["argv"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve()
