"""`coterie compare` with killed and interrupted processes: no result is lost, no worker is left."""

import os
import signal
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
    "--data", "districts", "--clients", "20", "--set", "rounds=5", "--quiet", "--no-report",
    "--methods", "local,fedavg,pmtl,pfeb", "--epsilons", "1,4", "--seeds", "2",
]  # fmt: skip


BEGUN = []


@pytest.fixture(autouse=True)
def none_is_left(forks):
    """End what a failed test has begun."""
    yield
    while BEGUN:
        kill(forks, BEGUN[-1])


def begin(forks, *arguments, workers=2):
    BEGUN.append(forks.start("compare", *arguments, "--workers", workers))
    return BEGUN[-1]


def end(forks, job):
    BEGUN.remove(job)
    return forks.finish(job)


def kill(forks, job):
    os.kill(job.pid, signal.SIGKILL)  # one that has ended waits to be asked for
    return end(forks, job)


def wait_for(condition, job=None, seconds=300.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        assert job is None or not (said := job.err.read_text() + job.out.read_text()), said
        time.sleep(0.02)


def done(folder):
    return len(list(Path(folder).glob("runs/*/*/*/result.json")))


def is_worker(pid):
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def workers_of(job):
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in children if is_worker(pid)]


def values(folder):
    rows = pq.read_table(folder / "comparison.parquet").to_pylist()
    return [(row["label"], row["epsilon_asked"], row["seed"], row["value"]) for row in rows]


def test_killed_interrupted_and_resumed(forks, tmp_path):
    out = tmp_path / "c"
    job = begin(forks, *FLAGS, "--out", out)
    wait_for(lambda: done(out) >= 1, job)
    before = workers_of(job)
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: not is_worker(before[0]), job)
    wait_for(lambda: len(workers_of(job)) == 2, job)  # another takes its place
    left = workers_of(job)
    os.kill(job.pid, signal.SIGINT)
    code, _, err = end(forks, job)
    assert code == 130 and f"resume with: coterie compare --resume {out}" in err
    assert "Traceback" not in err
    # A worker that is still starting notices the end of its parent later.
    wait_for(lambda: not any(map(is_worker, left)), seconds=120.0)

    had = done(out)
    again = begin(forks, "--resume", out, "--quiet", "--no-report", workers=1)
    wait_for(lambda: done(out) > had, again)
    left = workers_of(again)
    assert left and kill(forks, again)[0] == -signal.SIGKILL
    wait_for(lambda: not any(map(is_worker, left)), seconds=120.0)  # no worker outlives its parent
    assert 1 < done(out) < 14

    resume = ["compare", "--resume", str(out), "--quiet", "--no-report", "--workers", "0"]
    assert main(resume) == 0
    fresh = tmp_path / "fresh"
    part = [*FLAGS, "--methods", "pmtl,pfeb", "--seeds", "1", "--epsilons", "1"]
    assert main(["compare", *part, "--workers", "0", "--out", str(fresh)]) == 0
    assert len(values(out)) == 14 and set(values(fresh)) <= set(values(out))
