"""What it costs not to trust the coordinator: districts, three trust settings, three sizes.

Under `shares`, K = two thirds of the clients and C = a tenth of these, as by default.

- at equal accuracy: the noise of a released sum is that of the trusted server at `--epsilon`, so
  the error is the same; epsilon against the coordinator is what that noise leaves (with C clients
  in brackets). Noise of clients' own: each message has 1 / sqrt(M) of it.
- at equal epsilon: the budget holds against the coordinator; the error is that of held-out rows.
  The default method, pfeb, has several clips, which noise of clients' own does not support: there
  the method is pmtl, and pmtl of the trusted server stands beside it.

    python benchmarks/trust.py [--epsilon 1] [--seeds 3]
"""

import argparse
import math

import numpy as np

from coterie.data.config import DataConfig
from coterie.methods.base import registered
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve
from coterie.privacy.events import Gaussian, Participation, SharedGaussian, share_counts
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.profiles import GaussianProfile
from coterie.runs.run import execute

SIZES = (10, 50, 537)
DELTA = 1e-5


def plan_of(kind, noise, clients, seed, epsilon):
    return Plan(
        data=DataConfig(name="districts", split_seed=seed, clients=clients),
        method=registered()[kind](),
        privacy=Privacy(epsilon=epsilon, delta=DELTA, noise=noise),
        simulation_seed=seed,
        compare_with_local=False,
    )


def error(kind, noise, clients, epsilon, seeds):
    found = [
        execute(plan_of(kind, noise, clients, seed, epsilon)).summary["value"]
        for seed in range(seeds)
    ]
    return f"{np.mean(found):.3f} +- {np.std(found, ddof=1) / math.sqrt(seeds):.3f}"


def at_equal_noise(clients, epsilon):
    """Return epsilon against the coordinator where sums have the trusted server's noise."""
    plan = plan_of("pfeb", "gaussian", clients, 0, epsilon)
    plan = resolve(plan, plan.data.open().spec)
    events = plan.guarantee(clients).events
    assert all(isinstance(event, Gaussian) for event in events)
    mu = math.sqrt(sum(event.noise_multiplier**-2 for event in events))
    local = GaussianProfile(mu * math.sqrt(clients)).epsilon(DELTA)
    least, corrupt = share_counts(clients)
    planned = math.sqrt((least - corrupt) / clients)
    shared = tuple(
        SharedGaussian(event.noise_multiplier * planned, event.replaced, least, corrupt)
        for event in events
    )
    who = Participation("everyone")
    views = Guarantee(shared, who, "zero_out", DELTA, clients).views
    return local, views["coordinator"], views["coordinator_and_corrupt"], len(events)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    epsilon = given.epsilon
    print("| clients | rounds | trusted | noise of clients' own | shares |")
    print("|---|---|---|---|---|")
    for clients in SIZES:
        local, alone, together, rounds = at_equal_noise(clients, epsilon)
        print(f"| {clients} | {rounds} | inf | {local:.1f} | {alone:.2f} ({together:.2f}) |")
    print("\n| clients | local training | trusted | shares | pmtl, trusted | pmtl, own noise |")
    print("|---|---|---|---|---|---|")
    cases = (("local", "gaussian"), ("pfeb", "gaussian"), ("pfeb", "shares"))
    cases += (("pmtl", "gaussian"), ("pmtl", "local"))
    for clients in SIZES:
        row = [error(kind, noise, clients, epsilon, given.seeds) for kind, noise in cases]
        print(f"| {clients} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
