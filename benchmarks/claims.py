"""What three papers print for their noise beside what is true.

`dpfedmtl` (default): the settings of Wu et al., "A Theoretical Perspective on Differentially
Private Federated Multi-Task Learning": CelebA (20 of 9343 clients, 400 steps), FEMNIST (3 of 174,
1000 steps), delta = 1e-5, and the noise that would be needed. `pmtl`: those of Hu, Wu and Smith,
"Private Multi-Task Learning": Figure 2's epsilon by round for three data sets (100 clients in a
round, delta = 1/m), and the noise of Theorem 1. `mpmtl`: the Wishart noise of Liang et al.,
"Model-Protected Multi-Task Learning", by clip K, sensitivity s and iterations. All numbers are this
library's own; what each column means is in `coterie.privacy.published`. Bounds are rounded up,
approximations and claims to the nearest. Markdown tables are printed, and with --out kept as CSV
beside them, with curves; some seconds.

    python benchmarks/claims.py [dpfedmtl|pmtl|mpmtl] [--out docs/methods/neural]
"""

import argparse
import csv
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from coterie.methods.mpmtl import MPMTL
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.guarantee import Guarantee, gdp_approximation, round_up
from coterie.privacy.profiles import GaussianProfile
from coterie.privacy.published import claims, published_mean, theorem_1_sigma

DELTA = 1e-5
PLANS = {"CelebA": (9343, 20, 400), "FEMNIST": (174, 3, 1000)}
SIGMAS = (0.11, 0.65, 2.42, 9.69)
EPSILONS = (0.5, 1.0, 2.0, 8.0)
DRAWN = tuple((name, sigma) for name in PLANS for sigma in SIGMAS)
ALARMS = tuple(np.linspace(0, 1, 101))
CURVES = {
    "guessing": ("guessing", "#bbbbbb", ":"),
    "theorem_41": ("Theorem 4.1's steps: bound", "#4c78a8", "-"),
    "approximation": ("the same: approximation, not a bound", "#4c78a8", "--"),
    "theorem_42": ("Theorem 4.2 as published", "#f58518", "-."),
    "true": ("noise as published, zero_out: bound", "#e45756", "-"),
}
HEADS = {
    "data": "data",
    "sigma": "sigma",
    "label": "label in the paper",
    "theorem_41": "Theorem 4.1, composed",
    "theorem_41_symmetric": "Theorem 4.1, symmetric steps",
    "theorem_42": "Theorem 4.2 as published",
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
    "printed_sigma": "sigma of the published scheme, zero_out",
}

FIGURE_2 = {  # clients, rounds, sigma on the mean, clip gamma
    "StackOverflow": (400, 600, 0.01, 0.5),
    "FEMNIST": (205, 1000, 0.01, 0.2),
    "CelebA": (515, 1000, 0.02, 1.0),
}
COHORT = 100
POINTS = 10
MEANS = {
    "data": "data",
    "rounds": "rounds",
    "noise_multiplier": "z = q sigma / gamma",
    "claimed": "claimed (Renyi, hidden Poisson cohorts)",
    "zero_out": "the same, exact, zero_out",
    "replace": "the same, replace (the paper's relation)",
    "other_clients": "fixed cohorts, replace, other clients",
}
THEOREM_1 = {
    "epsilon": "epsilon of Theorem 1",
    "sigma": "sigma",
    "other_clients": "true, replace, other clients",
    "needed": "sigma that is needed",
}
BOUNDS |= {"zero_out", "replace", "other_clients"}


def figure_2(points):
    """Epsilon by round, as published and true."""
    found = []
    for name, (clients, rounds, sigma, gamma) in FIGURE_2.items():
        for share in range(1, points + 1):
            after = rounds * share // points
            account = published_mean(clients, COHORT, after, sigma, gamma)
            found.append({"data": name, "rounds": after, **asdict(account)})
    return found


def theorem_1(clients=205, rounds=1000, gamma=0.2):
    """The noise of Theorem 1 for all clients in every round, and the exact one."""
    everyone, found = Participation("everyone", 1.0), []
    for epsilon in (0.1, 0.8, 2.0, 8.0):
        sigma = theorem_1_sigma(epsilon, 1 / clients, clients, rounds, gamma)
        true = published_mean(clients, clients, rounds, sigma, gamma).other_clients
        z = calibrate(
            epsilon, 1 / clients, weights=[1.0] * rounds, participation=everyone,
            relation="replace",
        )  # fmt: skip
        needed = z * gamma / clients
        found.append({"epsilon": epsilon, "sigma": sigma, "other_clients": true, "needed": needed})
    return found


WISHART = {
    "algorithm": "algorithm",
    "clip": "K",
    "sensitivity": "s",
    "rounds": "iterations",
    "claimed_epsilon": "claimed epsilon",
    "delta": "at delta",
    "true_delta": "true delta at that epsilon",
    "true_epsilon": "true epsilon at that delta",
}


def wishart(epsilon=1.0, clients=320):
    """Claimed and true guarantees of MP-MTL's noise, zero_out, against the other clients."""
    delta, found = 1 / (clients * math.log(clients)), []
    for algorithm, clip, sensitivity, rounds in (
        (1, 0.5, "K^2", 1), (1, 8.0, "K^2", 1), (2, 0.5, "2K", 1), (2, 2.0, "2K", 1),
        (2, 8.0, "2K", 1), (2, 8.0, "2K", 20), (2, 32.0, "2K", 20), (3, 8.0, "2K", 20),
    ):  # fmt: skip
        plan = MPMTL.published(
            algorithm, epsilon=epsilon, delta=delta, clip=clip, rounds=rounds, lam=0.1
        )
        stated = plan.guarantee(clients).to_json()
        found.append({
            "algorithm": str(algorithm), "clip": clip, "sensitivity": sensitivity,
            "rounds": rounds, "claimed_epsilon": stated["claimed_epsilon"], "delta": delta,
            "true_delta": stated["true_delta_at_claimed"], "true_epsilon": stated["epsilon"],
        })  # fmt: skip
    return found


def draw_figure_2(rows, path):
    from mpmtl import canvas, save

    figure, axes = canvas(1, len(FIGURE_2))
    for axis, name in zip(axes, FIGURE_2, strict=True):
        mine = [row for row in rows if row["data"] == name]
        for key in ("claimed", "zero_out", "replace"):
            axis.plot([r["rounds"] for r in mine], [r[key] for r in mine], label=MEANS[key])
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("rounds")
        axis.set_ylim(0, None)
    axes[0].set_ylabel("epsilon, at most")
    axes[-1].legend(frameon=False, fontsize=6)
    save(figure, path)


def claimed(quick):
    return [
        {"data": name, "sigma": sigma, **asdict(claims(*plan, sigma, DELTA))}
        for name, plan in PLANS.items()
        for sigma in SIGMAS[2 if quick else 0 :]
    ]


def needed(quick):
    found = []
    for name, (clients, cohort, rounds) in PLANS.items():
        for epsilon in EPSILONS[3 if quick else 0 :]:
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


def composed(name, noise_multiplier):
    """Return the account of a plan's rounds, hidden Poisson cohorts, zero_out."""
    clients, cohort, rounds = PLANS[name]
    return Guarantee(
        events=(Gaussian(noise_multiplier),) * rounds,
        participation=Participation("poisson", cohort / clients),
        relation="zero_out",
        delta=DELTA,
        clients=clients,
    )


def curves(alarms):
    """Type II errors at each rate of false alarms: claimed, approximated, and true."""
    found = []
    for name, sigma in DRAWN:
        clients, cohort, rounds = PLANS[name]
        steps = composed(name, sigma)
        limit = gdp_approximation(steps)
        drawn = {
            "guessing": 1 - np.array(alarms),
            "theorem_41": steps.trade_off(alarms),
            "approximation": limit.trade_off(alarms),
            "theorem_42": GaussianProfile(math.sqrt(rounds) * limit.mu).trade_off(alarms),
            "true": composed(name, 2 * sigma * cohort**1.5 / clients).trade_off(alarms),
        }
        for place, alarm in enumerate(alarms):
            misses = {key: f"{curve[place]:.6g}" for key, curve in drawn.items()}
            found.append({"data": name, "sigma": sigma, "false_alarms": f"{alarm:.2f}", **misses})
    return found


def draw(rows, path):
    from mpmtl import canvas, save

    figure, axes = canvas(len(PLANS), len(SIGMAS), height=2.6)
    for axis, (name, sigma) in zip(axes, DRAWN, strict=True):
        mine = [row for row in rows if (row["data"], row["sigma"]) == (name, sigma)]
        alarms = [float(row["false_alarms"]) for row in mine]
        for key, (label, colour, line) in CURVES.items():
            misses = [float(row[key]) for row in mine]
            axis.plot(alarms, misses, label=label, color=colour, linestyle=line)
        axis.set_title(f"{name}, sigma {sigma}", fontsize=9)
        axis.set_xlabel("false alarms (type I error)")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
    for row in range(len(PLANS)):
        axes[row * len(SIGMAS)].set_ylabel("misses (type II error), at least")
    axes[0].legend(frameon=False, fontsize=6)
    save(figure, path)


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
    parser.add_argument(
        "paper", nargs="?", choices=("dpfedmtl", "pmtl", "mpmtl"), default="dpfedmtl"
    )
    parser.add_argument("--out", type=Path, help="a folder for the CSVs and curves")
    parser.add_argument("--quick", action="store_true", help="fewer settings and points")
    given = parser.parse_args()
    out, mine = given.out, given.paper == "pmtl"
    if mine:
        means = figure_2(2 if given.quick else POINTS)
        tables = {"figure-2": (means, MEANS), "theorem-1": (theorem_1(), THEOREM_1)}
    elif given.paper == "mpmtl":
        tables = {"wishart": (wishart(), WISHART)}
    else:
        tables = {"claims": (claimed(given.quick), HEADS), "needed": (needed(given.quick), NEEDED)}
    for name, (rows, heads) in tables.items():
        print_table(rows, heads)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            keep(out / f"{name}.csv", rows)
    if out is not None and mine:
        draw_figure_2(means, out / "figure-2.svg")
    elif out is not None and given.paper == "dpfedmtl":
        rows = curves(ALARMS[:: 10 if given.quick else 1])
        keep(out / "tradeoff.csv", rows)
        draw(rows, out / "tradeoff.svg")


if __name__ == "__main__":
    main()
