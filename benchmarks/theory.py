"""The papers' bounds over measured errors, on synthetic data with known constants.

    python benchmarks/theory.py [PART ...] [--quick] [--out docs/papers/theory]

- `pmtl`: mean estimation, the paper's own example (clients k with the loss |w - a_k|^2/2, d = 4,
  all clients in every round, Theorem 1's noise). Error by clients, by epsilon and by rounds for
  Algorithm 1 as published and for changes from the shared model, beside the exact expectation and
  the bound.
- `mpmtl`: Algorithm 2 as published on the low-rank simulation with 10 features: the excess of the
  training objective at its best T, by epsilon and by clients, and that T. T is chosen by the
  objective, as in the theorem; no epsilon covers the choice.
- `dpfedmtl`: Algorithm 1 as published on quadratics with L = c = 1, whose clients agree on the
  shared part: measured f - f* and mean squared gradient beside Theorems 5.1 to 5.3.

Each writes a CSV and an SVG; a line gives the fitted exponents. Some minutes on one core.
"""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from claims import keep
from coterie.data.load import from_arrays
from coterie.data.synthetic import mpmtl_low_rank
from coterie.engine.simulate import simulate
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve
from coterie.privacy.published import theorem_1_sigma
from coterie.solvers.sgd import SGD
from coterie.solvers.structured import OwnUnits
from coterie.theory import (
    Convergence,
    mean_estimation_error,
    mpmtl_utility,
    pmtl_best_rounds,
    pmtl_bound,
    pmtl_rounds,
)
from mpmtl import canvas, save

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "papers" / "theory"
FEATURES, GAMMA, LAM, LR, DELTA = 4, 1.0, 1.0, 0.2, 1e-3


def slope(x, y):
    """Return the exponent of y in x, by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


# ---- PMTL ----------------------------------------------------------------------------------------


def points(clients, seed):
    """Return a point per client, within 1/2 of 0."""
    drawn = np.random.default_rng(seed).normal(size=(clients, FEATURES)) + 1.0
    return 0.5 * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def quadratics(targets):
    """Return clients whose summed loss is |w - a_k|^2/2: a row per coordinate."""
    clients, features = targets.shape
    rows = np.tile(np.eye(features), (clients, 1))
    names = np.repeat(np.arange(clients), features)
    return from_arrays(rows, targets.ravel(), names, task="regression", title="quadratics")


def estimated(clients, epsilon, rounds, change_from, seed):
    """Return the measured excess of F after some rounds, and its exact expectation."""
    targets = points(clients, 0)
    plan = PMTL.published(
        clients=clients, cohort=clients, rounds=rounds, gamma=GAMMA, epsilon=epsilon, lam=LAM,
        model=Linear(bias=False), change_from=change_from,
        sgd=SGD(lr=LR * FEATURES, steps=1, batch=FEATURES),
    )  # fmt: skip
    plan = replace(
        plan, simulation_seed=seed, privacy=replace(plan.privacy, noise_multiplier=noise(
            epsilon, clients, rounds))
    )  # fmt: skip
    weights = simulate(plan, quadratics(targets)).models.leaves["weight"][:, 0].double().numpy()

    def objective(models):
        apart = ((models - models.mean(axis=0)) ** 2).sum(axis=1)
        return float((LAM * apart + ((models - targets) ** 2).sum(axis=1)).mean()) / 2

    mean = targets.mean(axis=0)
    best = (targets + LAM * mean) / (1 + LAM)
    return objective(weights) - objective(best), exact(
        targets, clients, epsilon, rounds, change_from
    )


def noise(epsilon, clients, rounds):
    """Return z of Theorem 1 at one delta for all numbers of clients."""
    return clients * theorem_1_sigma(epsilon, DELTA, clients, rounds, GAMMA) / GAMMA


def exact(targets, clients, epsilon, rounds, change_from):
    mean = targets.mean(axis=0)
    return mean_estimation_error(
        rounds, sigma=theorem_1_sigma(epsilon, DELTA, clients, rounds, GAMMA), lam=LAM, lr=LR,
        start=float(mean @ mean), spread=float(((targets - mean) ** 2).sum(axis=1).mean()),
        dimension=FEATURES, change_from=change_from,
    )  # fmt: skip


def pmtl(given):
    """PMTL: error by clients, epsilon and rounds."""
    seeds = range(3 if given.quick else 10)
    many = (100, 400) if given.quick else (100, 200, 400, 800, 1600)
    cells = [("clients, T = 30", m, 2.0, 30) for m in many]
    cells += [
        ("epsilon, T = 30", 400, e, 30) for e in ((1.0, 4.0) if given.quick else (0.5, 1, 2, 4))
    ]
    cells += [("clients, published T", m, 2.0, published_rounds(m)) for m in many]
    cells += [
        ("rounds", 400, 2.0, t) for t in ((2, 20) if given.quick else (1, 2, 4, 6, 8, 12, 20, 50))
    ]
    found = []
    for change_from in ("own", "shared"):
        for part, clients, epsilon, rounds in cells:
            runs = [estimated(clients, epsilon, rounds, change_from, seed) for seed in seeds]
            values = np.array([measured for measured, _ in runs])
            found.append({
                "change_from": change_from, "part": part, "clients": clients, "epsilon": epsilon,
                "rounds": rounds, "measured": values.mean(),
                "se": values.std(ddof=1) / math.sqrt(len(values)), "exact": runs[0][1],
                "bound": pmtl_bound(
                    rounds, epsilon=epsilon, delta=DELTA, clients=clients, dimension=FEATURES,
                    gamma=GAMMA, lam=LAM,
                ),
            })  # fmt: skip
    keep(given.out / "pmtl.csv", found)
    for change_from in ("own", "shared"):
        for part, by in (("clients, T = 30", "clients"), ("epsilon, T = 30", "epsilon"),
                         ("clients, published T", "clients")):  # fmt: skip
            mine = [r for r in found if (r["change_from"], r["part"]) == (change_from, part)]
            lines = {k: slope([r[by] for r in mine], [r[k] for r in mine])
                     for k in ("measured", "exact", "bound")}  # fmt: skip
            print(f"  {change_from}: {part}: exponent of {by}: "
                  + ", ".join(f"{k} {v:.2f}" for k, v in lines.items()))  # fmt: skip
        print_best(change_from)
    draw_pmtl(found, given.out / "pmtl.svg")


def published_rounds(clients):
    return round(pmtl_rounds(clients=clients, dimension=FEATURES, gamma=GAMMA, lam=LAM))


def print_best(change_from):
    """Print the rounds with the least exact error, by clients and epsilon."""
    for clients, epsilon in ((100, 2.0), (400, 2.0), (1600, 2.0), (400, 0.5), (400, 8.0)):
        targets = points(clients, 0)
        errors = [exact(targets, clients, epsilon, t, change_from) for t in range(1, 400)]
        bound = pmtl_best_rounds(
            epsilon=epsilon, delta=DELTA, clients=clients, dimension=FEATURES, gamma=GAMMA
        )
        print(f"  {change_from}: {clients} clients, epsilon {epsilon}: best T "
              f"{1 + np.argmin(errors)}; least bound at {bound:.1f}, published T "
              f"{published_rounds(clients)}")  # fmt: skip


def draw_pmtl(rows, path):
    figure, axes = canvas(1, 3)
    drawn = (("clients, T = 30", "clients"), ("epsilon, T = 30", "epsilon"), ("rounds", "rounds"))
    for axis, (part, by) in zip(axes, drawn, strict=True):
        for change_from, colour in (("own", "tab:red"), ("shared", "tab:blue")):
            mine = [r for r in rows if (r["change_from"], r["part"]) == (change_from, part)]
            x = [r[by] for r in mine]
            y, error = ([r[name] for r in mine] for name in ("measured", "se"))
            axis.errorbar(x, y, error, color=colour, marker="o", linestyle="",
                          label=f"measured, change from {change_from}")  # fmt: skip
            axis.plot(x, [r["exact"] for r in mine], color=colour, label="exact expectation")
        axis.plot(x, [r["bound"] for r in mine], color="0.35", linestyle="--",
                  label="bound, constants 1")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=by, title=part)
        axis.set_xticks(x, [f"{value:g}" for value in x])
        axis.minorticks_off()
    axes[0].set_ylabel("excess objective")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, path)


# ---- MP-MTL --------------------------------------------------------------------------------------

WIDTH, KEPT, PENALTY, CLIP = 10, 3, 0.002, 9.0
LOOKED = (2, 4, 8, 16, 32, 64, 128)


def low_rank(clients, seed):
    made = mpmtl_low_rank(
        clients=clients, train=30, test=1, features=WIDTH, rank=KEPT, noise=0.22, seed=seed
    )
    return made.data.split_by_source()[0]


def penalty(clients):
    """Return lam: it grows as the root of the clients, as in the theorems."""
    return PENALTY * math.sqrt(320 * clients)


def objective(data, weights):
    """Return (1/m) (sum_k mean loss + lam |W|_*), in the units of the method."""
    clients = data.clients(np.arange(len(weights)))
    own = weights / OwnUnits.of(clients, bias=False).table[:, -1:]
    gaps = (clients.x.double().numpy() @ weights[:, :, None])[:, :, 0] - clients.y.double().numpy()
    real = clients.mask.numpy()
    losses = 0.5 * (gaps**2 * real).sum(axis=1) / real.sum(axis=1)
    nuclear = np.linalg.svd(own, compute_uv=False).sum()
    return float(losses.sum() + penalty(len(weights)) * nuclear) / len(weights)


def fitted(plan, data):
    """Return the objective at the end of a run."""
    weights = (
        simulate(resolve(plan, data.spec), data).models.leaves["weight"][:, 0].double().numpy()
    )
    return objective(data, weights)


def excess(clients, epsilon, rounds, accelerated, seed):
    """Return how far Algorithm 2 as published ends above the least objective."""
    data = low_rank(clients, seed)
    settings = {
        "lam": penalty(clients), "acceleration": "on" if accelerated else "off",
    }  # fmt: skip
    free = Plan(
        method=MPMTL(
            model=Linear(bias=False), solver="steps", lam_scale="absolute", lift_by=0.0,
            lam=penalty(clients), acceleration="on",
        ),
        privacy=Privacy(epsilon=math.inf), rounds=200, simulation_seed=seed,
    )  # fmt: skip
    if (clients, seed) not in _BEST:
        _BEST[clients, seed] = fitted(free, data)
    plan = MPMTL.published(
        2, epsilon=epsilon, delta=1 / (clients * math.log(clients)), clip=CLIP, rounds=rounds,
        **settings,
    )  # fmt: skip
    return fitted(replace(plan, simulation_seed=seed), data) - _BEST[clients, seed]


_BEST = {}


def mpmtl(given):
    """MP-MTL: excess of the objective at the best number of steps."""
    seeds = range(2 if given.quick else 3)
    cells = [
        (320, e) for e in ((3.0, 30.0) if given.quick else (1.0, 3.0, 10.0, 30.0, 100.0, 300.0))
    ]
    cells += [(m, 30.0) for m in ((80,) if given.quick else (80, 160, 640))]
    looked = LOOKED[1:4] if given.quick else LOOKED
    found = []
    for accelerated in (False, True):
        for clients, epsilon in cells:
            theorem = mpmtl_utility(
                epsilon=epsilon, delta=1 / (clients * math.log(clients)), clients=clients,
                dimension=WIDTH, kept=KEPT, accelerated=accelerated,
            )  # fmt: skip
            for rounds in looked:
                values = np.array(
                    [excess(clients, epsilon, rounds, accelerated, seed) for seed in seeds]
                )
                found.append({
                    "accelerated": int(accelerated), "clients": clients, "epsilon": epsilon,
                    "rounds": rounds, "excess": values.mean(),
                    "se": values.std(ddof=1) / math.sqrt(len(values)),
                    "base": theorem.base, "exponent": theorem.exponent, "bound": theorem.bound,
                    "published_steps": theorem.steps,
                })  # fmt: skip
    keep(given.out / "mpmtl.csv", found)
    figure, axes = canvas(1, 2)
    for accelerated, axis in zip((0, 1), axes, strict=True):
        mine = [r for r in found if r["accelerated"] == accelerated]
        best = [
            min(
                (r for r in mine if (r["clients"], r["epsilon"]) == cell), key=lambda r: r["excess"]
            )
            for cell in cells
        ]
        tell_mpmtl(accelerated, best)
        for rows, colour in (([r for r in best if r["clients"] == 320], "tab:blue"),):
            x = [r["epsilon"] for r in rows]
            axis.errorbar(x, [r["excess"] for r in rows], [r["se"] for r in rows], color=colour,
                          marker="o", label="measured, best T")  # fmt: skip
            scale = rows[-1]["excess"] / rows[-1]["bound"]
            axis.plot(x, [scale * r["bound"] for r in rows], color="0.35", linestyle="--",
                      label="theorem's shape through the last point")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="epsilon",
                 title="accelerated" if accelerated else "not accelerated")  # fmt: skip
    axes[0].set_ylabel("excess objective per client")
    axes[0].legend(fontsize=7)
    save(figure, given.out / "mpmtl.svg")


def tell_mpmtl(accelerated, best):
    """Print the exponents in the theorem's base, and the best numbers of steps."""
    name = "accelerated" if accelerated else "not accelerated"
    for by, rows in (
        ("epsilon", [r for r in best if r["clients"] == 320]),
        ("clients", sorted((r for r in best if r["epsilon"] == 30), key=lambda r: r["clients"])),
    ):
        power = slope([r["base"] for r in rows], [r["excess"] for r in rows])
        direct = slope([r[by] for r in rows], [r["excess"] for r in rows])
        print(f"  {name}, by {by}: excess ~ base^{power:.2f} (theorem {rows[0]['exponent']:.2f}), "
              f"~ {by}^{direct:.2f}; best T " + ", ".join(
                  f"{r['rounds']} at {r[by]:g}" for r in rows))  # fmt: skip


# ---- DPFedMTL ------------------------------------------------------------------------------------

MEMBERS, SHARED, DIVERSITY, SIGMA = 20, 4, 8.0, 0.65


def agreeing(seed):
    """Return clients of the loss |s - a|^2/2 + (b_k - c_k)^2/2, and a and c.

    Rows +-sqrt(n) e_j make the Hessian of shared weights and intercept the unit matrix.
    """
    draw = np.random.default_rng(seed)
    shared, own = draw.normal(size=SHARED) / 2, draw.normal(size=MEMBERS)
    signs = np.concatenate([np.eye(SHARED), -np.eye(SHARED)]) * math.sqrt(SHARED)
    rows = np.tile(signs, (MEMBERS, 1))
    targets = rows @ shared + np.repeat(own, 2 * SHARED)
    names = np.repeat(np.arange(MEMBERS), 2 * SHARED)
    data = from_arrays(rows, targets, names, task="regression", title="agreeing quadratics")
    return data, shared, own


def followed(sigma, rounds, seed):
    """Return f - f*, the squared gradient and the shared gradient's norm before every step."""
    data, shared, own = agreeing(0)
    ids, path = np.arange(MEMBERS), [(np.zeros(SHARED), np.zeros(MEMBERS))]
    plan = DPFedMTL.published(
        cohort=1, rounds=rounds, sigma=sigma, every_step=MEMBERS, model=Linear(), personal="bias",
        sgd=SGD(lr=1 / DIVERSITY, steps=1, batch=2 * SHARED),
    )  # fmt: skip

    def look(progress):
        models = progress.models(plan.method, data)(ids)
        path.append(
            (models["weight"][0, 0].double().numpy(), models["bias"][:, 0].double().numpy())
        )

    simulate(replace(plan, simulation_seed=seed), data, observe=look)
    apart = np.array([((s - shared) ** 2).sum() for s, _ in path])
    personal = np.array([((b - own) ** 2).sum() for _, b in path])
    return (apart + personal / MEMBERS) / 2, apart + personal / MEMBERS**2, np.sqrt(apart)


def dpfedmtl(given):
    """DPFedMTL: measured errors beside Theorems 5.1 to 5.3."""
    seeds, rounds = range(3 if given.quick else 10), 30 if given.quick else 300
    looked = [t for t in (1, 3, 10, 30, 100, 300, 1000) if t <= rounds]
    found = []
    for sigma in (0.0, SIGMA, 9.69):
        runs = [followed(sigma, rounds, seed) for seed in seeds]
        gaps, squares = (np.array([run[at] for run in runs]) for at in (0, 1))
        largest = max(run[2].max() for run in runs)
        _, shared, own = agreeing(0)
        start = gaps[0, 0]
        bounds = Convergence(
            clients=MEMBERS, smoothness=1.0, gradient=largest, dimension=SHARED,
            noise=sigma * 2 / MEMBERS, diversity=DIVERSITY,
        )  # fmt: skip
        distance = math.sqrt(float((shared**2).sum() + (own**2).sum()))
        for t in looked:
            found.append({
                "sigma": sigma, "steps": t, "gap": gaps[:, t].mean(),
                "gap_se": gaps[:, t].std(ddof=1) / math.sqrt(len(runs)),
                "convex": bounds.convex(t, distance),
                "strongly_convex": bounds.strongly_convex(t, start, 1 / MEMBERS),
                "squared_gradient": squares[:, :t].mean(), "nonconvex": bounds.nonconvex(t, start),
                "largest_gradient": largest, "start": start,
            })  # fmt: skip
        last = found[-1]
        print(f"  sigma {sigma}: after {last['steps']} steps f - f* {last['gap']:.4g} (bounds "
              f"{last['convex']:.4g}, {last['strongly_convex']:.4g}; start {start:.4g}); mean "
              f"squared gradient {last['squared_gradient']:.4g} (bound {last['nonconvex']:.4g}, "
              f"largest squared shared gradient {largest**2:.4g})")  # fmt: skip
    keep(given.out / "dpfedmtl.csv", found)
    figure, axes = canvas(1, 2)
    for sigma, colour in ((0.0, "0.35"), (SIGMA, "tab:blue"), (9.69, "tab:red")):
        mine = [r for r in found if r["sigma"] == sigma]
        x = [r["steps"] for r in mine]
        for axis, measured, bound in ((axes[0], "gap", "convex"),
                                      (axes[1], "squared_gradient", "nonconvex")):  # fmt: skip
            axis.plot(x, [r[measured] for r in mine], color=colour, marker="o",
                      label=f"measured, sigma {sigma:g}")  # fmt: skip
            axis.plot(x, [r[bound] for r in mine], color=colour, linestyle="--", label="bound")
    for axis, title in zip(axes, ("f - f*", "mean squared gradient"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="steps", title=title)
    axes[0].legend(fontsize=6)
    save(figure, given.out / "dpfedmtl.svg")


PARTS = {"pmtl": pmtl, "mpmtl": mpmtl, "dpfedmtl": dpfedmtl}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if given.out is None:
        given.out = Path(tempfile.mkdtemp(prefix="theory-")) if given.quick else OUT
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts or PARTS:
        print(f"{part}: {PARTS[part].__doc__}")
        PARTS[part](given)


if __name__ == "__main__":
    main()
