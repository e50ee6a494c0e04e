"""A round of PFEB through the engine: posteriors, clips, sum, noise, ledger, steps of the prior.

Regression: 10,000, 30,000 and 100,000 clients of 10 to 30 rows, 20 features and a bias, against a
loop over clients in NumPy that finds the same contributions, unclipped (on a part, scaled up).
Microseconds a client should be flat: time is linear in clients. Then binary and three classes, for
information. A round of 100,000 clients should take less than 2 seconds on 2 cores.

Seconds are those of the clock, the median of rounds, and of the processors, their least. Where
others use the machine the first say more about them; threads that wait for one another then use up
processor time as well, so that `--threads 1` says what the work is.

    python benchmarks/pfeb_speed.py [--clients 10000 30000 100000] [--features 20] [--rounds 3]
        [--threads 1]
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numba
import numpy as np
import torch

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.pfeb import PFEB, START_RESIDUAL
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for

ROWS = (10, 30)
LOOPED = 1000  # clients of the loop
FEWER = 10  # times fewer clients of classes
GOAL = 2.0


def federation(task, clients, features):
    made = synthetic("mean", clients=clients, rows=ROWS, features=features, task=task, seed=0)
    return made.data


@dataclass(frozen=True)
class Taken:
    """Seconds of the first round with all that comes before it; of the others, clock and work."""

    first: float
    clock: float
    work: float


def round_seconds(data, rounds):
    """Time the rounds of a run."""
    plan = plan_for(
        data.spec, Privacy(epsilon=1.0), method=PFEB(), rounds=rounds, simulation_seed=0
    )
    stamps = []

    def note(progress=None):
        stamps.append((time.perf_counter(), time.process_time()))

    note()
    simulate(plan, data, observe=note)
    clock, work = np.diff(np.array(stamps), axis=0).T
    return Taken(float(clock[0]), statistics.median(clock[1:]), float(work[1:].min()))


def looped(data, clients):
    """What a round asks of clients, one after the other."""
    variance = 0.2  # that the prior starts from
    x, y = data.features.numpy(), data.targets.numpy()
    total = 0.0
    for begin, end in zip(data.offsets[:clients], data.offsets[1 : clients + 1], strict=True):
        rows = np.hstack([x[begin:end], np.ones((end - begin, 1))]).astype(np.float64)
        gram = rows.T @ rows
        spread = np.linalg.inv(gram / START_RESIDUAL + np.eye(len(gram)) / variance)
        own = spread @ (rows.T @ y[begin:end]) / START_RESIDUAL
        left = y[begin:end] - rows @ own
        residual = (left @ left + (gram * spread).sum()) / len(rows) / START_RESIDUAL
        mean = own / np.sqrt(variance)
        total += float(mean.sum() + (np.diag(spread) / variance + mean**2).sum() + residual)
    return total


def regression(sizes, features, rounds):
    print("| clients | first round, s | s a round | processor s | us/client | NumPy, loop: times |")
    print("|---|---|---|---|---|---|")
    found = {}
    for clients in sizes:
        data = federation("regression", clients, features)
        taken = found[clients] = round_seconds(data, rounds)
        part = min(clients, LOOPED)
        begin = time.process_time()
        looped(data, part)
        loop = (time.process_time() - begin) * clients / part
        print(
            f"| {clients:,} | {taken.first:.2f} | {taken.clock:.3f} | {taken.work:.3f} "
            f"| {taken.clock / clients * 1e6:.2f} | {loop / taken.work:.0f} |",
            flush=True,
        )
    few, many = (found[clients] for clients in (min(sizes), max(sizes)))
    print(
        f"\n{max(sizes) / min(sizes):.0f} times the clients: {many.clock / few.clock:.1f} times as "
        f"long, {many.work / few.work:.1f} times the work; {max(sizes):,} clients take "
        f"{many.clock:.2f} s a round (goal: below {GOAL:g} s)"
    )


def classes(clients, features, rounds):
    print("\n| task | clients | s a round | processor s | us/client |")
    print("|---|---|---|---|---|")
    for task in ("binary", "multiclass"):
        taken = round_seconds(federation(task, clients, features), rounds)
        print(
            f"| {task} | {clients:,} | {taken.clock:.3f} | {taken.work:.3f} "
            f"| {taken.clock / clients * 1e6:.1f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        numba.set_num_threads(given.threads)
        torch.set_num_threads(given.threads)
    if given.rounds < 2:
        raise SystemExit("expected at least 2 rounds: the first is not counted")
    print(
        f"{numba.get_num_threads()} threads, torch {torch.get_num_threads()}; load "
        f"{os.getloadavg()[0]:.1f}; rows a client {ROWS[0]} to {ROWS[1]}, {given.features} "
        "features and a bias\n"
    )
    round_seconds(federation("regression", 100, given.features), 2)  # compiles
    regression(given.clients, given.features, given.rounds)
    classes(max(given.clients) // FEWER, given.features, given.rounds)


if __name__ == "__main__":
    main()
