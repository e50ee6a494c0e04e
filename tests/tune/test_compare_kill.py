"""`coterie compare` with killed and interrupted processes: no result is lost, no worker is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coterie.cli.main import main

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for workers in /proc"),
]

FLAGS = [
    "--data", "districts", "--clients", "40", "--set", "rounds=10", "--quiet", "--no-report",
    "--methods", "local,fedavg,pmtl,pfeb", "--epsilons", "1,4", "--seeds", "2",
]  # fmt: skip


BEGUN = []


@pytest.fixture(autouse=True)
def none_is_left():
    """End what a failed test has begun."""
    yield
    while BEGUN:
        process = BEGUN.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def begin(*arguments):
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = listening + "from coterie.cli.main import entry\nentry()"
    command = [sys.executable, "-c", code, "compare", *map(str, arguments)]
    process = subprocess.Popen(
        [*command, "--workers", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    BEGUN.append(process)
    return process


def wait_for(condition, process=None, seconds=300.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def done(folder):
    return len(list(Path(folder).glob("runs/*/*/*/result.json")))


def is_worker(pid):
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if is_worker(pid)]


def values(folder):
    rows = pq.read_table(folder / "comparison.parquet").to_pylist()
    return [(row["label"], row["epsilon_asked"], row["seed"], row["value"]) for row in rows]


def test_killed_interrupted_and_resumed(tmp_path):
    out = tmp_path / "c"
    process = begin(*FLAGS, "--out", out)
    wait_for(lambda: done(out) >= 1, process)
    before = workers_of(process)
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: not is_worker(before[0]), process)
    wait_for(lambda: len(workers_of(process)) == 2, process)  # another takes its place
    left = workers_of(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and f"resume with: coterie compare --resume {out}" in err
    assert "Traceback" not in err
    # A worker that is still starting notices the end of its parent later.
    wait_for(lambda: not any(map(is_worker, left)), seconds=120.0)

    again = begin("--resume", out, "--quiet", "--no-report")
    had = done(out)
    wait_for(lambda: done(out) >= had + 2, again)
    left = workers_of(again)
    again.kill()
    again.communicate()
    wait_for(lambda: not any(map(is_worker, left)), seconds=120.0)  # no worker outlives its parent
    assert 2 < done(out) < 14

    resume = ["compare", "--resume", str(out), "--quiet", "--no-report", "--workers", "0"]
    assert main(resume) == 0
    fresh = tmp_path / "fresh"
    part = [*FLAGS, "--methods", "pmtl,pfeb", "--seeds", "2", "--epsilons", "1"]
    assert main(["compare", *part, "--workers", "0", "--out", str(fresh)]) == 0
    assert len(values(out)) == 14 and set(values(fresh)) <= set(values(out))
