"""DPFedMTL: what its paper prints for its noise beside what is true, and what would be needed.

Settings of Wu et al., "A Theoretical Perspective on Differentially Private Federated Multi-Task
Learning": CelebA (20 of 9343 clients, 400 steps), FEMNIST (3 of 174, 1000 steps), delta = 1e-5. All
numbers are this library's own; what each column means stands in `coterie.privacy.claims`. Bounds
are rounded up, approximations and claims to the nearest. Two Markdown tables are printed, and with
--out kept as CSV beside them; some seconds.

    python benchmarks/claims.py [--out DIR]
"""

import argparse
import csv
import math
from dataclasses import asdict
from pathlib import Path

from coterie.privacy.accounting import Participation, calibrate
from coterie.privacy.claims import claims
from coterie.privacy.words import round_up

DELTA = 1e-5
PLANS = {"CelebA": (9343, 20, 400), "FEMNIST": (174, 3, 1000)}
SIGMAS = (0.11, 0.65, 2.42, 9.69)
EPSILONS = (0.5, 1.0, 2.0, 8.0)
HEADS = {
    "data": "data",
    "sigma": "sigma",
    "label": "label in the paper",
    "theorem_41": "Theorem 4.1, composed",
    "theorem_41_symmetric": "Theorem 4.1, symmetric steps",
    "theorem_42": "Theorem 4.2 as printed",
    "approximation_epsilon": "corrected limit (approximation, not a bound)",
    "noise_multiplier": "z of the sum",
    "true_zero_out": "**true, zero_out**",
    "true_replace": "**true, replace**",
    "server_mu": "server: mu of a message",
    "server_epsilon": "server: epsilon of a message",
    "server_total": "server: epsilon in total",
}
BOUNDS = {"true_zero_out", "true_replace", "server_epsilon", "server_total"}
NEEDED = {
    "data": "data",
    "epsilon": "epsilon",
    "zero_out": "z, zero_out",
    "replace": "z, replace",
    "printed_sigma": "sigma of the printed scheme, zero_out",
}


def claimed():
    return [
        {"data": name, "sigma": sigma, **asdict(claims(*plan, sigma, DELTA))}
        for name, plan in PLANS.items()
        for sigma in SIGMAS
    ]


def needed():
    found = []
    for name, (clients, cohort, rounds) in PLANS.items():
        for epsilon in EPSILONS:
            zero_out, replace = (
                calibrate(
                    epsilon,
                    DELTA,
                    weights=[1.0] * rounds,
                    participation=Participation("poisson", cohort / clients),
                    relation=relation,
                )
                for relation in ("zero_out", "replace")
            )
            sigma = zero_out * clients / (2 * cohort**1.5)
            row = {"epsilon": epsilon, "zero_out": zero_out, "replace": replace}
            found.append({"data": name, **row, "printed_sigma": sigma})
    return found


def shown(key, value):
    if isinstance(value, str) or value == math.inf:
        return str(value)
    return round_up(value) if key in BOUNDS else f"{value:.4g}"


def print_table(rows, heads):
    print("| " + " | ".join(heads.values()) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        print("| " + " | ".join(shown(key, row[key]) for key in heads) + " |")
    print(flush=True)


def keep(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder for claims.csv and needed.csv")
    out = parser.parse_args().out
    tables = {"claims": (claimed(), HEADS), "needed": (needed(), NEEDED)}
    for name, (rows, heads) in tables.items():
        print_table(rows, heads)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            keep(out / f"{name}.csv", rows)


if __name__ == "__main__":
    main()
