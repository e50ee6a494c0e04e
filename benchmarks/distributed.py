"""Several processes share a run: equal releases, and weak and strong scaling on this machine.

Runs `coterie run` alone and under torchrun, with one thread per process, from one simulation seed,
and compares `posts.npz` byte by byte. Strong scaling keeps the clients, weak scaling the clients
per process. A round's time is the median of those in the run's log, the first left out.

    python benchmarks/distributed.py [--clients 200] [--rounds 12] [--ranks 1 2] [--seeds 1]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path

PLANS = {
    "mlp, pmtl": ("--method", "pmtl", "--model", "mlp"),
    "linear, fedavg": ("--method", "fedavg", "--set", "method.solver=sgd"),
}
ALONE = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def run(options, ranks, out, *, rounds, clients, seed):
    """Run once; return the seconds of a round, and the releases."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "coterie", "run", "--data", "synthetic"]
    command += ["--option", f"clients={clients}", "--option", "rows=100", "--option", "features=60"]
    command += [*options, "--epsilon", "2", "--rounds", str(rounds), "--simulation-seed", str(seed)]
    command += ["--no-local", "--quiet", "--json", "--out", str(out)]
    # Histories are kept by one process only.
    command += ["--no-history"] if ranks == 1 else []
    environment = {**os.environ, **ALONE, "COTERIE_BUDGET": str(out.parent / "budget.json")}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    times = [datetime.fromisoformat(line["time"]) for line in lines if line["event"] == "round"]
    seconds = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    return statistics.median(seconds), (out / "posts.npz").read_bytes()


def measure(name, options, given, seed):
    """Print a line for every number of processes."""
    base = None
    for ranks in given.ranks:
        for kind, clients in (("strong", given.clients), ("weak", given.clients * ranks)):
            if kind == "weak" and ranks == 1:
                continue
            with tempfile.TemporaryDirectory() as place:
                sizes = {"rounds": given.rounds, "clients": clients, "seed": seed}
                seconds, posts = run(options, ranks, Path(place) / "run", **sizes)
            base = base or (seconds, posts)
            equal = "" if kind == "weak" else ("equal" if posts == base[1] else "DIFFERENT")
            print(
                f"{name:16} seed {seed}  {kind:6} {ranks} x {clients:6,} clients "
                f"{seconds:8.4f} s/round  {base[0] / seconds:5.2f}x  {equal}",
                flush=True,
            )
            assert equal != "DIFFERENT", "releases depend on the number of processes"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    for name, plan in PLANS.items():
        for seed in options.seeds:
            measure(name, plan, options, seed)
