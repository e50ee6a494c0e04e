"""The whole round through the engine, at size: local steps, clip, sum, noise, ledger, store.

Three tables, each in one run:

- W3: 10,000 clients x 100 rows x 60 features, logistic, 10 steps of batch 10, against a plain
  per-client torch loop that does the same steps (without clip or noise);
- cost of a round against the cohort and against the number of clients outside it;
- 1,000,000 clients x 20 rows x 20 features, all in every round: seconds and peak memory;
- with `--sizes`, instead: clients x 4 rows x 10 features, each size in a process of its own, with
  rows on disk and from 10^6 clients on also personal models.

    python benchmarks/scale.py [--quick]
    python benchmarks/scale.py --sizes 1000 10000 100000 1000000 10000000 [--folder /tmp]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from coterie.data.federated import FederatedDataset, Spec
from coterie.data.synthetic import ClientNames, synthetic
from coterie.engine.simulate import simulate
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.sampling import Everyone, FixedSize, Poisson
from coterie.solvers.sgd import SGD
from linear import loop_round

STEPS, BATCH = 10, 10
METHOD = PMTL(solver="sgd", sgd=SGD(lr=0.1, steps=STEPS, batch=BATCH), last_solve=False)


def round_seconds(data, cohort, rounds):
    """Median seconds of a round, the first left out (compilation, enrolment)."""
    plan = Plan(
        method=METHOD,
        privacy=Privacy(noise_multiplier=1.0),
        sampler=Poisson(cohort),
        rounds=rounds + 1,
        simulation_seed=0,
    )
    stamps = [time.perf_counter()]
    simulate(plan, data, observe=lambda progress: stamps.append(time.perf_counter()))
    return statistics.median(np.diff(stamps)[1:])


def on_disk(clients, folder):
    """Return 4 rows x 10 features for each client, memory-mapped."""
    rows, shape = 4 * clients, (4 * clients, 10)
    x = np.lib.format.open_memmap(f"{folder}/x.npy", "w+", np.float32, shape)
    y = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.float32, (rows,))
    rng = np.random.default_rng(0)
    for first in range(0, rows, 1 << 20):
        x[first : first + (1 << 20)] = rng.standard_normal((min(1 << 20, rows - first), 10))
        y[first : first + (1 << 20)] = x[first : first + (1 << 20)].sum(axis=1) / 4
    return FederatedDataset(
        spec=Spec(shape=(10,), outputs=1, task="regression", clients=clients),
        names=ClientNames(clients),
        offsets=np.arange(0, rows + 1, 4),
        features=torch.from_numpy(x),
        targets=torch.from_numpy(y),
    )


def resident():
    """Return the GiB of this process's own memory, mapped files not counted."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if "RssAnon" in line) / 2**20


def one_size(clients, folder):
    """Print a line for each cohort: wall-clock and processor seconds of a round, and memory."""
    data = on_disk(clients, folder)
    speed = Speed(store="disk" if clients >= 1_000_000 else "memory")
    for cohort in (1_000, 10_000, 100_000, 1_000_000):
        if cohort > clients:
            continue
        plan = Plan(
            method=METHOD,
            privacy=Privacy(noise_multiplier=1.0, relation="replace"),
            sampler=Everyone() if cohort == clients else FixedSize(cohort),
            rounds=4,
            simulation_seed=0,
        )
        stamps = []

        def note(progress, stamps=stamps):
            stamps.append((time.perf_counter(), time.process_time(), resident()))

        begin = time.perf_counter()
        simulate(plan, data, speed=speed, observe=note)
        whole = time.perf_counter() - begin
        wall, cpu, _ = np.diff(stamps, axis=0).min(axis=0)
        print(
            f"  {clients:10,} {cohort:9,} {wall:9.4f} {cpu:9.4f} {cpu / cohort * 1e6:9.2f} "
            f"{max(one[2] for one in stamps):7.2f} {whole:8.1f}",
            flush=True,
        )


def sizes(counts, folder):
    """Run every size in a process of its own."""
    print("clients, cohort, seconds and CPU seconds a round, CPU us a client, GiB, the whole run")
    for clients in counts:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [sys.executable, __file__, "--one", str(clients), "--folder", place]
            # As the command line sets it: idle threads sleep.
            environment = {"GOMP_SPINCOUNT": "2000", **os.environ, "TMPDIR": place}
            subprocess.run(command, check=True, env=environment)


def w3(quick):
    clients = 2_000 if quick else 10_000
    data = synthetic("mean", clients=clients, rows=100, features=60, task="binary", seed=0).data
    ours = clients * STEPS / round_seconds(data, None, 9)
    few = 100 if quick else 300
    begin = time.perf_counter()
    loop_round(data.features.numpy(), data.targets.numpy(), few, 100, STEPS, BATCH)
    loop = few * STEPS / (time.perf_counter() - begin)
    print(f"W3, {clients:,} clients, {torch.get_num_threads()} threads: client-steps/s")
    print(f"  plain loop (extrapolated)  {loop:12,.0f}")
    print(f"  coterie, whole round       {ours:12,.0f}   {ours / loop:6.0f}x")


def cohorts(quick):
    print("seconds a round (20 rows, 20 features)")
    print(f"  {'clients':>10} {'cohort':>8} {'seconds':>9} {'us a client':>12}")
    sizes = (20_000, 200_000) if quick else (100_000, 1_000_000)
    for clients in sizes:
        data = synthetic("mean", clients=clients, rows=20, features=20, seed=0).data
        for cohort in (1_000, 10_000, clients // 10, clients):
            seconds = round_seconds(data, float(cohort), 5)
            print(f"  {clients:10,} {cohort:8,} {seconds:9.4f} {seconds / cohort * 1e6:12.2f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this process: {peak:.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of clients")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help="for rows on disk; default: temporary")
    given = parser.parse_args()
    if given.one:
        one_size(given.one, given.folder)
    elif given.sizes:
        sizes(given.sizes, given.folder)
    else:
        w3(given.quick)
        cohorts(given.quick)
