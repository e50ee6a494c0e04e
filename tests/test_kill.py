"""kill -9 at many moments, then resume: nothing released is uncounted, nothing is released twice.

Under a simulation seed the result equals the uninterrupted run bit for bit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.full

RUN = [
    "run", "--data", "synthetic", "--option", "clients=40", "--option", "rows=12",
    "--method", "pmtl", "--epsilon", "2", "--rounds", "60", "--cohort", "20",
    "--simulation-seed", "7", "--set", "method.solver=sgd", "--no-local", "--quiet", "--json",
]  # fmt: skip


# A shell starts background jobs with SIGINT ignored, and children inherit that: whoever runs the
# tests that way would see an interrupt that never arrives. The child says that it listens.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from coterie.cli import main
sys.exit(main())
"""


def coterie(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", LISTENING, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def finish(process, limit=120):
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


def charges(folder):
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return (
        [e["charge"] for e in entries if "charge" in e],
        [e["release"] for e in entries if "release" in e],
    )


def models(folder):
    return {p.stem: np.load(p) for p in sorted((folder / "models").glob("*.npy"))}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill") / "whole"
    code, out, err = finish(coterie(*RUN, "--out", folder))
    assert code == 0, err
    return folder, json.loads(out)


def test_kill_and_resume(uninterrupted, tmp_path):
    whole, result = uninterrupted
    folder = tmp_path / "killed"
    coins = random.Random(0)
    kills, before = 0, -1
    process = coterie(*RUN, "--out", folder)
    deadline = time.monotonic() + 200
    while kills < 5 and time.monotonic() < deadline:
        # Wait until a few more posts are out than at the last kill, then strike at once.
        while process.poll() is None:
            out = len(list((folder / "posts").glob("*.npz"))) if folder.exists() else 0
            if out > before + coins.randint(3, 8):
                time.sleep(coins.random() * 0.01)
                break
            time.sleep(0.001)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
        kills += 1
        posted = sorted(int(p.stem) for p in (folder / "posts").glob("*.npz"))
        charged, _ = charges_tolerant(folder)
        assert set(posted) <= set(charged), "a post exists that was never charged"
        before = len(posted)
        process = coterie("run", "--resume", folder, "--json", "--quiet")
    code, out, err = finish(process)
    assert code == 0, err
    assert kills >= 3, "the run ended before it could be killed often enough"
    charged, released = charges(folder)
    assert charged == sorted(set(charged)) == list(range(60)), "charged once each, in order"
    assert released == list(range(60))
    again = json.loads(out)
    for key in ("epsilon", "value", "rounds", "noise_multiplier"):
        assert again[key] == result[key]
    reference, resumed = models(whole), models(folder)
    assert reference.keys() == resumed.keys()
    for name in reference:
        np.testing.assert_array_equal(reference[name], resumed[name])


def charges_tolerant(folder):
    charged, released = [], []
    for line in (folder / "ledger.jsonl").read_text().split("\n")[:-1]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        charged += [entry["charge"]] if "charge" in entry else []
        released += [entry["release"]] if "release" in entry else []
    return charged, released


def test_interrupt_leaves_a_resumable_run(tmp_path):
    folder = tmp_path / "stopped"
    process = coterie(*RUN[:-2], "--set", "method.sgd.epochs=400", "--out", folder)
    deadline = time.monotonic() + 100
    while not list((folder / "posts").glob("*.npz")) if folder.exists() else True:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "--resume" in err and "Traceback" not in err


def test_a_finished_run_resumes_to_the_same_answer(uninterrupted):
    folder, result = uninterrupted
    code, out, err = finish(coterie("run", "--resume", folder, "--json", "--quiet"))
    assert code == 0, err
    assert json.loads(out)["value"] == result["value"]
    assert charges(folder)[0] == list(range(60))
