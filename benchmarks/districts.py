"""Does joining help? Local, FedAvg and PMTL on `districts` at epsilon 1, over 10 seeds.

With defaults only. A seed decides the split (two test rows per district) and the noise. Standard
errors are over seeds; differences are paired. Nothing was tuned on these rows: see
benchmarks/defaults.py.

    python benchmarks/districts.py [--epsilon 1] [--seeds 10]
"""

import argparse

import numpy as np

from coterie.data.config import DataConfig
from coterie.methods.base import registered
from coterie.planning.plan import Plan, Privacy
from coterie.runs.run import execute


def error(kind, seed, epsilon):
    plan = Plan(
        data=DataConfig(name="districts", split_seed=seed),
        method=registered()[kind](),
        privacy=Privacy(epsilon=epsilon, delta=1e-5),
        simulation_seed=seed,
        compare_with_local=kind == "pmtl",
    )
    summary = execute(plan).summary
    return summary["value"], summary["share_better_than_local"], summary


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    found = {
        kind: [error(kind, seed, given.epsilon) for seed in range(given.seeds)]
        for kind in ("local", "fedavg", "pmtl")
    }
    last = found["pmtl"][-1][2]
    print(
        f"districts, {last['clients']} clients, {last['rounds']} rounds, epsilon "
        f"{given.epsilon:g}, delta {last['delta']:g}, {last['relation']}, {given.seeds} seeds"
    )
    values = {kind: np.array([row[0] for row in rows]) for kind, rows in found.items()}
    for kind, v in values.items():
        gap = v - values["pmtl"]
        over = f"over pmtl {gap.mean():+.4f} ± {_se(gap):.4f}"
        print(f"  {kind:8} nMSE {v.mean():.4f} ± {_se(v):.4f}   {over}")
    shares = np.array([row[1] for row in found["pmtl"]])
    share = f"{shares.mean():.1%} ± {_se(shares):.1%}"
    print(f"  clients better with pmtl than with local training: {share}")


def _se(values):
    return values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
