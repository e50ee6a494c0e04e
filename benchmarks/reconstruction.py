"""What each defence stops: rows of one MTL-SVM client, reconstructed from what others see.

A client with n rows of d features takes part in so many rounds beside others, whose part of w walks
about ("simultaneous" and "serial" steps, one pass a round), or in a run of the library with its
defaults and a bias ("library": ten clients, 20 passes a round, 5 rounds where there is a budget).
The attacker knows the step rule, n, and that the first feature, or the bias's, is positive (so that
labels can be told at all). Rows are matched to true ones; revealed is the share with |cos| above
0.99, chance what random directions reach, and absent what the same attack reaches on the run in
which the client contributes zeros, the neighbour that the guarantee speaks of.

    python benchmarks/reconstruction.py [--out DIR] [--rounds 100] [--seeds 2]
"""

import argparse
import csv
import itertools
import math
import time
from pathlib import Path

import numpy as np

from coterie.audit.simulation import Defence, client_messages, record, true_rows
from coterie.audit.svm import Rule, chance, match, reconstruct
from coterie.data.synthetic import synthetic
from coterie.methods.mtlsvm import MTLSVM
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Participation

ROWS, FEATURES, CLIP, DELTA = (1, 2, 5, 10, 20), (2, 10, 50), 0.1, 1e-5
RULES = {
    "simultaneous": Rule(steps="simultaneous", sigma=1.0),
    "serial": Rule(steps="serial", sigma=5.0),
}
COLUMNS = (
    "defence", "view", "steps", "rows", "features", "cosine", "chance", "absent", "revealed",
    "relative_error", "labels_right",
)  # fmt: skip


def client(rows, features, seed):
    """Rows of about unit size, the first feature positive; labels of a noisy linear rule."""
    coins = np.random.default_rng(seed)
    model = coins.standard_normal(features)
    x = coins.standard_normal((rows, features))
    x *= np.exp(0.2 * coins.standard_normal((rows, 1))) / np.linalg.norm(x, axis=1, keepdims=True)
    x[:, 0] = np.abs(x[:, 0])
    y = np.sign(x @ model / np.linalg.norm(model) + 0.3 * coins.standard_normal(rows) / features)
    return x, y


def defences(rounds):
    """Return the name of each defence, the defence, and whose view it is."""
    noise = CLIP * calibrate(
        1.0,
        DELTA,
        weights=[1.0] * rounds,
        participation=Participation("everyone"),
        relation="zero_out",
    )
    bernoulli, beta = ("bernoulli", 0.5), ("beta", 2.0, 0.5, 0.5)
    private = Defence(clip=CLIP, noise=noise)
    return (
        ("none", Defence(), "server"),
        ("Bernoulli(.5), step", Defence(mask=bernoulli), "server"),
        ("Bernoulli(.5), paper", Defence(mask=bernoulli, mask_kind="paper"), "server"),
        ("Beta(2, .5) on half, step", Defence(mask=beta), "server"),
        ("Beta(2, .5) on half, paper", Defence(mask=beta, mask_kind="paper"), "server"),
        (f"clip {CLIP}", Defence(clip=CLIP), "server"),
        ("DP, epsilon 1", private, "server"),
        ("DP, epsilon 1", private, "others"),
    )


def attack(defence, view, rule, rows, features, rounds, seed):
    """Success, chance, and the cosine on the run without the client."""
    x, y = client(rows, features, seed)
    found = []
    for absent in (False, True)[: 2 if view == "others" else 1]:
        views = client_messages(
            x, y, rule, rounds=rounds, defence=defence, absent=absent, seed=seed
        )
        guess = reconstruct(views[view == "others"], positive=0, seed=seed)
        found.append(match(x, y, *guess))
    absent = found[1].cosine if len(found) > 1 else np.nan
    one = found[0]
    return (
        one.cosine, chance(x, seed=seed, tries=20), absent, one.revealed, one.relative_error,
        one.labels_right,
    )  # fmt: skip


def library(rounds):
    """Return names, settings of the method and of privacy, rounds, and whose view it is."""
    beta = {"mask_law": "beta", "mask_untouched": 0.5}
    return (
        ("none", {}, math.inf, rounds, "server"),
        ("Bernoulli(.5), step", {"mask": "step"}, math.inf, rounds, "server"),
        ("Bernoulli(.5), paper", {"mask": "paper"}, math.inf, rounds, "server"),
        ("Beta(2, .5) on half, step", {"mask": "step", **beta}, math.inf, rounds, "server"),
        ("Beta(2, .5) on half, paper", {"mask": "paper", **beta}, math.inf, rounds, "server"),
        ("DP, epsilon 1", {}, 1.0, 5, "server"),
        ("DP, epsilon 1", {}, 1.0, 5, "others"),
    )


def attack_library(settings, epsilon, rounds, view, rows, features, seed):
    data = synthetic(
        "mean", clients=10, rows=rows, features=features, task="binary", unit_rows=True, seed=seed
    ).data
    plan = Plan(
        method=MTLSVM(model=Linear(bias=True), **settings),
        privacy=Privacy(epsilon=epsilon),
        rounds=rounds,
        simulation_seed=seed,
    )
    x, y = true_rows(data, 0, bias=True)
    found = reconstruct(record(plan, data, 0)[view], positive=features, seed=seed)
    one = match(x, y, *found)
    return (
        one.cosine, chance(x, seed=seed, tries=20), np.nan, one.revealed, one.relative_error,
        one.labels_right,
    )  # fmt: skip


def table(rounds, seeds):
    for name, settings, epsilon, count, view in library(rounds):
        for features, rows in itertools.product(FEATURES, ROWS):
            cells = [
                attack_library(settings, epsilon, count, view, rows, features, seed)
                for seed in range(seeds)
            ]
            numbers = [f"{number:.3g}" for number in np.mean(cells, axis=0)]
            yield (name, view, "library", rows, features, *numbers)
    for name, defence, view in defences(rounds):
        for (steps, rule), features, rows in itertools.product(RULES.items(), FEATURES, ROWS):
            cells = [
                attack(defence, view, rule, rows, features, rounds, seed) for seed in range(seeds)
            ]
            numbers = [f"{number:.3g}" for number in np.mean(cells, axis=0)]
            yield (name, view, steps, rows, features, *numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    started = time.perf_counter()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    lines = []
    for line in table(arguments.rounds, arguments.seeds):
        lines.append(line)
        print("| " + " | ".join(str(cell).replace("nan", "") for cell in line) + " |", flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / "reconstruction.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(lines)


if __name__ == "__main__":
    main()
