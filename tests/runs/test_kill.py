"""kill -9 at many moments, then resume: nothing released is uncounted, nothing is released twice.

Under a simulation seed the result equals the uninterrupted run bit for bit. Kills come at random
times over the whole life of a process, and at its acts of writing, one by one; signals that ask to
stop leave a run that goes on.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from tests.runs.forked import account, kept, visible

pytestmark = pytest.mark.full

ROUNDS = 12
SMALL = ("--data", "synthetic", "--option", "clients=16", "--option", "rows=6")
RUN = (
    "run", *SMALL, "--method", "pmtl", "--epsilon", "2", "--rounds", ROUNDS, "--cohort", "8",
    "--simulation-seed", "7", "--set", "method.solver=sgd", "--no-local", "--quiet", "--json",
)  # fmt: skip
SHORT = ("--epsilon", "2", "--rounds", 3, "--simulation-seed", "7", "--no-local", "--quiet")
OTHERS = {
    "on disk": ("--method", "pmtl", "--store", "disk"),
    "duals": ("--method", "mtlsvm"),
    "pfeb": ("--method", "pfeb"),
    "finetuned": ("--method", "fedavg", "--finetune", "plain"),
    "with newcomers": ("--method", "fedavg", "--newcomers", "3", "--history"),
}


@pytest.fixture(scope="module", autouse=True)
def _warmed(forks):
    for kind in ("duals", "finetuned"):  # compiled solvers take a second to load
        forks.warm("run", *SMALL, *OTHERS[kind], *SHORT, "--json")
    forks.warm(*RUN)  # its noise is computed once


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """Return what the uninterrupted run leaves behind, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    seconds = []
    for part in (folder, folder.with_name("again")):
        before = time.monotonic()
        code, _, err = forks.run(*RUN, "--out", part)
        seconds.append(time.monotonic() - before)
        assert code == 0, err
    assert kept(folder) == kept(folder.with_name("again"))
    return kept(folder), min(seconds)


def check_counted(folder, seen):
    """Every post that was ever visible is charged, and stays as it was."""
    charged, released = account(folder)
    now = visible(folder)
    assert set(now) <= set(charged), "a post exists that was never charged"
    assert charged == sorted(set(charged)), "charged once each, in order"
    assert set(released) <= set(charged)
    for index, post in seen.items():
        assert now.get(index) == post, f"post {index} was visible and is another, or gone"
    return now


def go_on(forks, folder, begin):
    resumed = ("run", "--resume", folder, "--json", "--quiet")
    return forks.start(*(resumed if (folder / "plan.toml").exists() else (*begin, "--out", folder)))


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments(forks, whole, tmp_path, count):
    wanted, seconds = whole
    coins = random.Random(5)
    # One moment in each part of the life of a process, in any order.
    parts = [(part + coins.random()) / count for part in range(count)]
    coins.shuffle(parts)
    kills, reached = 0, set()
    for number in range(2 * count):
        if not parts:
            break
        folder, part = tmp_path / str(number), parts.pop()
        job, seen = forks.start(*RUN, "--out", folder), {}
        # Now and then a second kill meets a process that resumes.
        for wait in (part, coins.random()) if number % 6 == 0 else (part,):
            time.sleep(max(0.0, job.begun + wait * seconds - time.monotonic()))
            os.kill(job.pid, signal.SIGKILL)  # a process that has ended waits to be asked for
            if forks.finish(job)[0] == -signal.SIGKILL:
                kills += 1
            elif wait == part:  # it was over already: this machine has become faster
                seconds *= 0.8
                parts.insert(0, part)
            seen = check_counted(folder, seen) if folder.exists() else seen
            reached.add(len(seen))
            job = go_on(forks, folder, RUN)
        code, _, err = forks.finish(job)
        assert code == 0, err
        check_counted(folder, seen)
        assert kept(folder) == wanted, f"killed at {part:.2f} of {seconds:.2f} s"
        shutil.rmtree(folder)
    assert kills >= count, f"only {kills} kills met the run"
    assert min(reached) == 0 and len(reached) >= 3, f"kills came after {sorted(reached)} posts"


@pytest.fixture
def kill_at(forks, tmp_path):
    """Return a function that runs a command whole, and then kills it at some of its acts."""

    def kill(kind, choose):
        begin = ("run", *SMALL, *OTHERS[kind], *SHORT, "--json")
        folder, log = tmp_path / "whole", tmp_path / "acts"
        counted = {"kind": "none", "at": 0, "under": str(folder), "log": str(log)}
        code, _, err = forks.run(*begin, "--out", folder, fault=counted)
        assert code == 0, err
        wanted, acts = kept(folder), log.read_text().splitlines()
        for at in choose(acts):
            folder = tmp_path / str(at)
            fault = {"kind": "kill", "at": at, "under": str(folder)}
            code, _, err = forks.run(*begin, "--out", folder, fault=fault)
            assert code == -signal.SIGKILL, err
            seen = check_counted(folder, {})
            code, _, err = forks.finish(go_on(forks, folder, begin))
            assert code == 0, err
            check_counted(folder, seen)
            assert kept(folder) == wanted, f"killed at act {at}: {acts[at - 1]}"
            shutil.rmtree(folder)

    return kill


@pytest.mark.parametrize("kind", OTHERS)
def test_kills_at_acts_of_writing(kill_at, kind):
    """Kill where a file system changes: in the middle of a write, between a rename and a sync."""
    coins = random.Random(kind)

    def some(acts):
        found = {1 + coins.randrange(len(acts)), len(acts) - coins.randrange(60)}
        return sorted(found)

    kill_at(kind, some)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_kills_at_every_act_of_writing(kill_at, kind):
    def all_but_middles(acts):  # of many pieces of one file
        middle = [at for at in range(2, len(acts)) if acts[at - 2] == acts[at - 1] == acts[at]]
        return sorted(set(range(1, len(acts) + 1)) - set(middle))

    kill_at(kind, all_but_middles)


def wait_for_posts(forks, job, folder, count=1):
    deadline = time.monotonic() + 60
    while len(list((folder / "posts").glob("*.npz"))) < count:
        assert time.monotonic() < deadline and not job.err.read_text(), job.err.read_text()
        time.sleep(0.002)


# Rounds that take long enough to be met by a signal.
LONG = (
    "run", *SMALL, "--method", "pmtl", "--noise-multiplier", "90", "--rounds", "3000",
    "--simulation-seed", "7", "--set", "method.solver=sgd", "--no-local", "--quiet",
)  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ((signal.SIGINT,), 130),
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGTERM), 130),
        ((signal.SIGTERM,), 143),
        ((signal.SIGTERM, signal.SIGINT), 143),
    ],
)
def test_signals_leave_a_resumable_run(forks, tmp_path, numbers, status):
    coins, folder = random.Random(len(numbers)), tmp_path / "run"
    job = forks.start(*LONG, "--out", folder)
    wait_for_posts(forks, job, folder)
    time.sleep(coins.random() * 0.1)
    for number in numbers:
        os.kill(job.pid, number)
        time.sleep(coins.random() * 0.004)
    code, _, err = forks.finish(job)
    told = f"interrupted; resume with: coterie run --resume {folder}"
    # The kernel delivers signals that wait together by number, not in the order they were sent.
    assert code in {status, 128 + min(numbers)} and err.strip() == told, err
    assert "Traceback" not in err
    seen = check_counted(folder, {})
    # It goes on: a second job makes further posts, and counts them.
    job = forks.start("run", "--resume", folder, "--quiet")
    wait_for_posts(forks, job, folder, len(seen) + 1)
    os.kill(job.pid, signal.SIGINT)
    assert forks.finish(job)[0] == 130
    assert len(check_counted(folder, seen)) > len(seen)


def test_a_run_that_ignores_ctrl_c_still_does(tmp_path):
    """A shell starts background jobs with SIGINT ignored: they stay so."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from coterie.core.signals import stoppable\n"
        "with stoppable(str):\n    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_whoever_does_not_wait_is_let_go():
    """A second signal, after a while, ends a process that does not end by itself."""
    code = (
        "import os, signal, time\nfrom coterie.core import signals\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job is deaf
        "signals._PATIENCE = 0.2\n"
        "with signals.stoppable(lambda: 'interrupted; go on so'):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"  # at once: nothing happens
        "        print('cleaning', flush=True); time.sleep(0.4)\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert (found.returncode, found.stdout) == (143, "cleaning\n")
    assert found.stderr.strip() == "interrupted; go on so"


def test_an_interrupt_that_gets_lost_is_found_again():
    """What is raised inside a destructor goes nowhere; the next round stops all the same."""
    code = (
        "import os, signal\nfrom coterie.core import signals\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job is deaf
        "class Deaf:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000): pass\n"
        "with signals.stoppable(str):\n    held = Deaf()\n    del held\n    print('on')\n"
        "    try:\n        signals.raise_if_stopped()\n"
        "    except KeyboardInterrupt:\n        print('stopped')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert (found.stdout, found.stderr) == ("on\nstopped\n", "")


def test_a_finished_run_resumes_to_the_same_answer(forks, whole, tmp_path):
    folder = tmp_path / "run"
    code, out, err = forks.run(*RUN, "--out", folder)
    assert code == 0, err
    code, again, err = forks.run("run", "--resume", folder, "--json", "--quiet")
    assert code == 0, err
    assert json.loads(again)["value"] == json.loads(out)["value"]
    assert kept(folder) == whole[0]


def test_a_second_process_is_refused(forks, tmp_path):
    folder = tmp_path / "run"
    job = forks.start(*LONG, "--out", folder)
    wait_for_posts(forks, job, folder)
    for arguments in (("run", "--resume", folder, "--quiet"), (*LONG, "--out", folder)):
        code, out, err = forks.run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "in use by another process" in err or "already holds a run" in err
    os.kill(job.pid, signal.SIGKILL)
    assert forks.finish(job)[0] == -signal.SIGKILL
    seen = check_counted(folder, {})
    # The lock ends with its process, however that ended.
    job = forks.start("run", "--resume", folder, "--quiet")
    wait_for_posts(forks, job, folder, len(seen) + 1)
    os.kill(job.pid, signal.SIGKILL)
    forks.finish(job)


def test_two_that_begin_at_once_do_not_mix(forks, whole, tmp_path):
    """Both begin in one new folder: one runs to its end, the other is refused."""
    folder = tmp_path / "run"
    jobs = [forks.start(*RUN, "--out", folder) for _ in range(2)]
    ended = [forks.finish(job) for job in jobs]
    assert sorted(code for code, _, _ in ended) == [0, 2], ended
    (err,) = (err for code, _, err in ended if code == 2)
    assert "in use by another process" in err or "already holds a run" in err
    assert kept(folder) == whole[0]
