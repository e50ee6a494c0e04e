"""MP-MTL's time per round against the number of clients: 30 rows of 30 features each.

Both solvers and both structures, in one run; time per round should be linear in the clients, so
the last column, microseconds per client and round, should be flat.

    python benchmarks/moments.py [--clients 100 1000 10000 100000] [--rounds 5]
"""

import argparse
import resource
import statistics
import time

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.mpmtl import MPMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy


def per_round(method, data, rounds):
    """Seconds per round: the difference of a long and a short run, median of three."""
    found = []
    for _ in range(3):
        seconds = []
        for count in (1, 1 + rounds):
            plan = Plan(
                method=method, privacy=Privacy(epsilon=1.0), rounds=count, simulation_seed=0
            )
            started = time.perf_counter()
            simulate(plan, data)
            seconds.append(time.perf_counter() - started)
        found.append((seconds[1] - seconds[0]) / rounds)
    return statistics.median(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=30)
    arguments = parser.parse_args()
    print("| solver | structure | rows | clients | s/round | us/client | peak memory |")
    print("|---|---|---|---|---|---|---|")
    for rows in (arguments.rows, 300):
        for clients in arguments.clients:
            if rows * clients > 4_000_000:
                continue
            data = synthetic(
                "low_rank", clients=clients, rows=rows, features=30, unit_rows=True, seed=0
            ).data
            for solver in ("steps", "solve"):
                for structure in ("low_rank", "group_sparse"):
                    method = MPMTL(model=Linear(), structure=structure, solver=solver)
                    took = per_round(method, data, arguments.rounds)
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                    print(
                        f"| {solver} | {structure} | {rows} | {clients:,} | {took:.4f} "
                        f"| {took / clients * 1e6:.2f} | {peak:.2f} GiB |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
