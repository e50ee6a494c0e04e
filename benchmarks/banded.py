"""Banded noise: how much of the noise is left, and what it is worth on districts.

- the noise of sums of releases, over that of independent noise at the same epsilon, by rounds T and
  period b; beside it the coefficients of Fichtenberger, Henzinger and Upadhyay 2022 (the root of
  the prefix sum, cut after b), which need no search;
- with --errors: the error of held-out rows where 27 of 537 districts take part in a round, by a
  public schedule or by Poisson sampling, at the same epsilon.

    python benchmarks/banded.py [--errors] [--epsilon 1] [--seeds 3] [--figure FILE.svg]
"""

import argparse
import math

import numpy as np
from scipy import signal

from coterie.data.config import DataConfig
from coterie.methods.base import registered
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.banded import noise_ratio
from coterie.privacy.sampling import Cyclic, Everyone, Poisson
from coterie.runs.run import execute

TABLE = ((50, 2), (50, 20), (200, 2), (200, 5), (200, 20), (1000, 20), (1000, 50))
CURVES = (50, 200, 1000)
PERIODS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50)
COHORT, ROUNDS = 27, (60, 200)
CASES = {
    "schedule, banded": (Cyclic(COHORT), "banded"),
    "schedule, independent": (Cyclic(COHORT), "gaussian"),
    "Poisson, visible": (Poisson(COHORT, visible=True), "gaussian"),
    "Poisson, hidden": (Poisson(COHORT), "gaussian"),
}


def root_ratio(rounds, bands):
    """Return the noise left by the root of the prefix sum, cut after some bands."""
    steps = np.arange(1, min(bands, rounds))
    first = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    sums = signal.lfilter([1.0], first / np.linalg.norm(first), np.ones(rounds))
    return math.sqrt(np.cumsum(sums**2).sum() / (rounds * (rounds + 1) / 2))


def error(kind, sampler, noise, rounds, given):
    found = []
    for seed in range(given.seeds):
        plan = Plan(
            data=DataConfig(name="districts", split_seed=seed),
            method=registered()[kind](),
            privacy=Privacy(epsilon=given.epsilon, delta=1e-5, noise=noise),
            sampler=sampler,
            rounds=rounds,
            simulation_seed=seed,
            compare_with_local=False,
        )
        found.append(execute(plan).summary["value"])
    return f"{np.mean(found):.3f} +- {np.std(found, ddof=1) / math.sqrt(given.seeds):.3f}"


def draw(path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "banded", "font.size": 9}
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5.4, 3.2), layout="constrained")
    for rounds, mark in zip(CURVES, "osd", strict=True):
        ratios = [noise_ratio(rounds, period) for period in PERIODS]
        axis.plot(PERIODS, ratios, f"-{mark}", markersize=4, label=f"{rounds:,} rounds")
    axis.set(xscale="log", ylim=(0, 1.05), xlabel="b: a client takes part once in b rounds")
    axis.set_ylabel("noise in sums of releases,\nbanded over independent")
    axis.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axis.minorticks_off()
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure")
    given = parser.parse_args()
    if given.figure:
        draw(given.figure)
    print("| rounds | once in | banded over independent | the root of the prefix sum |")
    print("|---|---|---|---|")
    for rounds, bands in TABLE:
        one, other = noise_ratio(rounds, bands), root_ratio(rounds, bands)
        print(f"| {rounds:,} | {bands} | {one:.2f} | {other:.2f} |")
    if not given.errors:
        return
    print(f"\n| method | rounds | {' | '.join(CASES)} |\n|{'---|' * (2 + len(CASES))}")
    for kind in ("fedavg", "pmtl"):
        for rounds in ROUNDS:
            row = [error(kind, *case, rounds, given) for case in CASES.values()]
            print(f"| {kind} | {rounds} | {' | '.join(row)} |", flush=True)
        everyone = error(kind, Everyone(), "gaussian", None, given)
        print(f"{kind}, everybody in every round, rounds by rule: {everyone}", flush=True)


if __name__ == "__main__":
    main()
