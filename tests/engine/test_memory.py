"""Personal models on disk: clients x parameters may exceed memory."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import gc
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import Speed, simulate
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sgd import SGD


def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024


data = synthetic("mean", clients=300, rows=2, features=200, seed=0).data
method = PMTL(model=MLP(hidden=(1500,)), sgd=SGD(lr=0.01, steps=1, batch=2), last_solve=False)
plan = Plan(method=method, privacy=Privacy(noise_multiplier=1.0), rounds=2, simulation_seed=0)
small = simulate(plan, data, speed=Speed(store="{store}", block=4), observe=lambda p: None)
gc.collect()
print(sum(leaf.numel() for leaf in small.models.leaves.values()) * 4 / 2**20, anonymous())
"""


def measure(store):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{store}", store)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return map(float, done.stdout.split())


def test_models_on_disk_take_no_memory_of_their_own():
    models, on_disk = measure("disk")
    _, in_memory = measure("memory")
    assert models > 300, "the models must be large for the test to mean something"
    # What is left after the run is the models: all of them in memory, or next to nothing.
    assert in_memory - on_disk > 0.6 * models
