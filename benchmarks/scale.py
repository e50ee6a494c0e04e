"""The whole round through the engine, at size: local steps, clip, sum, noise, ledger, store.

Three tables, each in one run:

- W3: 10,000 clients x 100 rows x 60 features, logistic, 10 steps of batch 10, against a plain
  per-client torch loop that does the same steps (without clip or noise);
- cost of a round against the cohort and against the number of clients outside it;
- 1,000,000 clients x 20 rows x 20 features, all in every round: seconds and peak memory.

    python benchmarks/scale.py [--quick]
"""

import argparse
import resource
import statistics
import time

import numpy as np
import torch

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Poisson
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
    given = parser.parse_args()
    w3(given.quick)
    cohorts(given.quick)
