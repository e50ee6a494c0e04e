"""What MP-MTL gains and what privacy costs it: every figure and number of docs/methods/mpmtl.md.

    python benchmarks/mpmtl.py [PART ...] [--seeds 20] [--quick] [--out FOLDER]

Parts: frontier, ablation, school, clients, noise, shapes, mechanisms, asides; all by default. Each
writes a CSV and, but for the tables, an SVG. A part that was interrupted goes on where it
stood (`*.csv.part`); one that is complete is made anew. `--quick` takes two seeds and thin grids,
and writes to a temporary folder.

The simulations are those of Liang et al. (`coterie.data.synthetic`): 320 clients, 30 training and
270 test rows each, 30 features, delta = 1/(m log m). Settings are chosen, where a part says so, for
each method and epsilon on federations generated from other seeds, so choosing them costs no
privacy. A seed decides data and noise together; standard errors are over seeds, differences (from
local training) paired by seed.

School (139 schools; $COTERIE_DATA, or shared/data beside the repository) is run with the defaults
of every method, on 30 % of each school's rows; a seed decides split and noise. Two things were
decided from the meaning of its columns, before any run: the constant column is left out, since a
model has a bias of its own, and the two percentages are divided by 100, so that all features lie in
[0, 1].
"""

import argparse
import csv
import itertools
import math
import os
import re
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import numba
import numpy as np
import torch

from coterie.data.load import from_arrays
from coterie.data.synthetic import mpmtl_group_sparse, mpmtl_low_rank
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate, noise_to_signal
from coterie.methods.baselines import MTL, MTRL, Single
from coterie.methods.dpaggr import DPAggr
from coterie.methods.dpmtrl import DPMTRL
from coterie.methods.mpmtl import MPMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import rounds_by_rule
from coterie.privacy.calibrate import Even, Geometric, Power, calibrate
from coterie.privacy.events import Participation
from coterie.privacy.noise import GaussianNoise, LaplaceNoise, PublishedWishart, WishartNoise
from coterie.privacy.profiles import gaussian_mu
from coterie.privacy.published import published_spending

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "methods" / "mpmtl"
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
TUNING = (1000, 1001, 1002)
METHODS = {
    "single": Single,
    "mtl": MTL,
    "mtrl": MTRL,
    "mpmtl": MPMTL,
    "dpmtrl": DPMTRL,
    "dpaggr": DPAggr,
}
SIMULATIONS = {"low_rank": mpmtl_low_rank, "group_sparse": mpmtl_group_sparse}
# The scale of the paper's low-rank simulation: see `mpmtl_low_rank`.
SCALED = SIMULATIONS | {"low_rank, paper": partial(mpmtl_low_rank, noise=0.22)}
PRIVACY = ("clip", "spend", "noise")


# ---- one run -------------------------------------------------------------------------------------


def usual_delta(clients):
    return 1 / (clients * math.log(clients))


@lru_cache(maxsize=64)
def federation(name, seed, clients=320):
    """Training and test rows of one seed."""
    if name == "school":
        return school().split(0.7, seed)
    return SCALED[name](clients=clients, seed=seed).data.split_by_source()


@lru_cache(maxsize=1)
def school():
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    path = folder / "school" / "school.npz"
    if not path.exists():
        return None
    with np.load(path) as arrays:
        rows = arrays["X"][:, :27].astype(np.float64)
        rows[:, 3:5] /= 100
        return from_arrays(rows, arrays["y"], arrays["client"], task="regression", title="school")


def carry_out(setting, name, epsilon, seed, *, clients=320, delta=None, noise_seed=None):
    """Run one setting: a dict of the method's kind, its fields, and some of the plan's."""
    rest = dict(setting)
    kind, rounds = METHODS[rest.pop("kind")], rest.pop("rounds", None)
    chosen = {field: rest.pop(field) for field in PRIVACY if field in rest}
    method = kind(model=Linear(bias=name == "school"), **rest)
    train, _ = federation(name, seed, clients)
    delta = usual_delta(train.spec.clients) if delta is None else delta
    privacy = Privacy(epsilon=epsilon, delta=delta, **chosen)
    if rounds is None:
        rounds = rounds_by_rule(method, privacy, train.spec)
    noise_seed = seed if noise_seed is None else noise_seed
    return simulate(
        Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=noise_seed), train
    )


def error(setting, name, epsilon, seed):
    _, test = federation(name, seed)
    outcome = carry_out(setting, name, epsilon, seed)
    value = evaluate(outcome.plan.method.model, outcome.rows, test).value
    return value if math.isfinite(value) else 1e6


def tuned(grid, name, epsilon, given):
    """Choose the setting of the smallest mean error on other federations."""
    seeds = TUNING[: 1 if given.quick else len(TUNING)]
    grid = grid[:: max(1, len(grid) // 6)] if given.quick else grid
    totals = [sum(error(s, name, epsilon, seed) for seed in seeds) for s in grid]
    return grid[int(np.argmin(totals))]


def grid_of(**choices):
    """All combinations, as settings."""
    names = list(choices)
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*choices.values())
    ]


def words(setting):
    return " ".join(f"{name}={_word(value)}" for name, value in setting.items())


def _word(value):
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Power):
        return f"power({value.alpha:g})"
    if isinstance(value, Geometric):
        return f"geometric({value.Q:g})"
    return value.kind if hasattr(value, "kind") else str(value)


# ---- tables that survive an interruption ---------------------------------------------------------


class Table:
    """Rows appended to a CSV as they are found; the first columns name a row."""

    def __init__(self, given, name, keys):
        self.path, self.keys, self.rows = given.out / f"{name}.csv", keys, {}
        self.asked = {}  # in order
        self.part = self.path.with_suffix(".csv.part")
        if self.part.exists():
            with self.part.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[key] for key in keys)] = row

    def row(self, key, make):
        """Return a row, made if it is not there yet by `make`, which gives the other columns."""
        named = tuple(_cell(value) for value in key)
        self.asked[named] = True
        if named not in self.rows:
            found = dict(zip(self.keys, named, strict=True))
            found |= {column: _cell(value) for column, value in make().items()}
            new = not self.part.exists()
            with self.part.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(found), lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(found)
            self.rows[named] = found
            shown = {c: v for c, v in found.items() if c not in ("values", *self.keys)}
            print("  ", *named, "|", *(f"{c} {v}" for c, v in shown.items() if v), flush=True)
        return self.rows[named]

    def finish(self):
        """Write the rows that were asked for, in that order, and give them."""
        rows = [self.rows[named] for named in self.asked]
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        self.part.unlink()
        return rows


def _cell(value):
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def summary(values, against=None):
    """Return mean, standard error and, against other values of the same seeds, the difference."""
    values = np.asarray(values)
    found = {"nmse": float(values.mean()), "se": _se(values), "seeds": len(values)}
    if against is not None:
        gap = values - np.asarray(against)
        found |= {"difference": float(gap.mean()), "difference_se": _se(gap)}
    return found | {"values": " ".join(f"{value:.4f}" for value in values)}


def numbers(row):
    return [float(value) for value in row["values"].split()]


def _se(values):
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


# ---- nMSE against epsilon ------------------------------------------------------------------------

LAMS = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
PENALTIES = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
NON_PRIVATE = {
    "single": grid_of(kind=["single"], penalty=["l2", "l1"], lam=[*LAMS, 0.1, 0.3]),
    "single l2": grid_of(kind=["single"], penalty=["l2"], lam=LAMS),
    "mtl": [
        *grid_of(kind=["mtl"], penalty=["trace", "l21"], lam=PENALTIES, tol=[1e-4]),
        *grid_of(
            kind=["mtrl"],
            lam1=[1e-4, 1e-3],
            lam2=[c * 0.01 / 320 for c in (0.03, 0.1, 0.3, 1.0, 3.0)],
            tol=[1e-4],
        ),
    ],
}
PRIVATE = {
    "mpmtl low_rank": grid_of(kind=["mpmtl"], structure=["low_rank"], lam=LAMS, rounds=[1, 2, 4]),
    "mpmtl group_sparse": grid_of(
        kind=["mpmtl"], structure=["group_sparse"], lam=LAMS, rounds=[1, 2, 4]
    ),
    "dpmtrl": grid_of(
        kind=["dpmtrl"],
        lam1=[1e-4, 3e-4, 1e-3, 1e-2],
        lam2=[c / 320 for c in (1e-9, 1e-5, 1e-3, 1e-1)],  # 1e-9: alone, whatever is posted
        clip=[1.0, 4.0, 16.0, 64.0],
        rows=[30],
        rounds=[1],
    ),
    "dpaggr": grid_of(
        kind=["dpaggr"], lam=[1e-3, 1e-2, 1e-1], clip=[0.5, 2.0, 8.0, 32.0], rows=[30], rounds=[1]
    ),
    # Untuned, for the table alone.
    "mpmtl low_rank, defaults": grid_of(kind=["mpmtl"]),
    "mpmtl group_sparse, defaults": grid_of(kind=["mpmtl"], structure=["group_sparse"]),
    "dpmtrl, defaults": grid_of(kind=["dpmtrl"], rows=[30]),
}


def frontier(given):
    """Compare methods on both simulations, settings of each chosen on other seeds."""
    table = Table(given, "frontier", ["data", "method", "epsilon"])
    seeds = range(given.seeds)

    def scored(name, grid, epsilon, against):
        best = tuned(grid, name, epsilon, given)
        values = [error(best, name, epsilon, seed) for seed in seeds]
        true = carry_out(best, name, epsilon, 0).guarantee.epsilon
        return {"true_epsilon": true, "setting": words(best)} | summary(values, against or values)

    for name in SIMULATIONS:
        alone = None
        for method, grid in NON_PRIVATE.items():
            row = table.row(
                (name, method, math.inf),
                lambda grid=grid, name=name, alone=alone: scored(name, grid, math.inf, alone),
            )
            alone = numbers(row) if alone is None else alone
        for (method, grid), epsilon in itertools.product(PRIVATE.items(), EPSILONS):
            table.row(
                (name, method, epsilon),
                lambda grid=grid, name=name, epsilon=epsilon, alone=alone: scored(
                    name, grid, epsilon, alone
                ),
            )
    rows = table.finish()
    plot_frontier(rows, list(SIMULATIONS), given.out / "frontier.svg")


LOOKS = {
    "single": ("single (local)", "0.35", "--", ""),
    "mtl": ("mtl (no privacy)", "black", ":", ""),
    "mpmtl low_rank": ("mpmtl low_rank", "tab:blue", "-", "o"),
    "mpmtl group_sparse": ("mpmtl group_sparse", "tab:green", "-", "s"),
    "dpmtrl": ("dpmtrl", "tab:orange", "-", "^"),
    "dpaggr": ("dpaggr", "tab:red", "-", "v"),
}


def plot_frontier(rows, names, path, zoom=None):
    figure, axes = canvas(1, len(names))
    for axis, name in zip(axes, names, strict=True):
        for method, (label, colour, line, marker) in LOOKS.items():
            chosen = [r for r in rows if (r["data"], r["method"]) == (name, method)]
            x = np.array([float(r["epsilon"]) for r in chosen])
            y, e = (np.array([float(r[c]) for r in chosen]) for c in ("nmse", "se"))
            if len(x) == 1 and math.isinf(x[0]):
                axis.axhline(y[0], color=colour, linestyle=line, label=label)
                axis.axhspan(y[0] - e[0], y[0] + e[0], color=colour, alpha=0.12, linewidth=0)
            else:
                axis.errorbar(
                    x, y, e, color=colour, linestyle=line, marker=marker, label=label, capsize=2
                )
        axis.set(xscale="log", yscale="log", xlabel="epsilon", title=name.replace("_", "-"))
        plain_ticks(axis)
    axes[0].set_ylabel("test nMSE")
    axes[0 if zoom else -1].legend(fontsize=7)
    if zoom:
        axes[-1].set(yscale="linear", ylim=zoom, title="the same, nearer")
    save(figure, path)


# ---- the paper's iteration against one solve a post ----------------------------------------------

SOLVE = {"kind": ["mpmtl"], "solver": ["solve"], "rounds": [1, 2, 4]}
STEPS = {"kind": ["mpmtl"], "solver": ["steps"], "rounds": [5, 20, 50, 200]}
MULTIPLES = [0.01, 0.03, 0.1, 0.3, 1.0]


def steps_grid(*, clip, clip_own):
    """The paper's iteration: lam in units of the clip; plain, accelerated, or strongly convex."""
    return [
        setting | extra | {"lam": setting["lam"] * setting["clip"]}
        for setting in grid_of(
            **STEPS, lam=MULTIPLES, lam_scale=["absolute"], lift=["add"], clip_own=[clip_own],
            clip=[clip],
        )
        for extra in (
            {"acceleration": "off"},
            {"acceleration": "on", "spend": Power(0.4)},
            {"acceleration": "strong", "mu": 0.01},
        )
    ]  # fmt: skip


ABLATION = {
    "steps, as printed (clip_own)": lambda: steps_grid(clip=16.0, clip_own=True),
    "steps, own model unclipped": lambda: steps_grid(clip=0.5, clip_own=False),
    "steps, posted lam, flat lift": lambda: grid_of(
        **STEPS, lam=LAMS, acceleration=["off", "on"], lift=["flat"]
    ),
    "solve, absolute lam, add": lambda: grid_of(
        **SOLVE, lam=[0.003, 0.01, 0.03, 0.1, 0.3], lam_scale=["absolute"], lift=["add"]
    ),
    "solve, posted lam, add": lambda: grid_of(**SOLVE, lam=LAMS, lift=["add"]),
    "solve, posted lam, floor": lambda: grid_of(**SOLVE, lam=LAMS, lift=["floor"]),
    "solve, posted lam, no lift": lambda: grid_of(**SOLVE, lam=LAMS, lift_by=[0.0]),
    "solve, posted lam, flat": lambda: grid_of(**SOLVE, lam=LAMS, lift=["flat"]),
    "solve, all defaults": lambda: [{"kind": "mpmtl"}],
}


def ablation(given):
    """Solver, lift and lam's scale on the low-rank simulation; settings chosen on other seeds."""
    table = Table(given, "ablation", ["variant", "epsilon"])
    seeds = range(given.seeds)
    for epsilon in (0.1, 1.0, 10.0):
        alone = [
            error({"kind": "single", "lam": 0.01}, "low_rank", math.inf, seed) for seed in seeds
        ]

        def scored(make, epsilon=epsilon, alone=alone):
            best = tuned(make(), "low_rank", epsilon, given)
            values = [error(best, "low_rank", epsilon, seed) for seed in seeds]
            return {"setting": words(best)} | summary(values, alone)

        table.row(("single", epsilon), lambda a=alone: {"setting": ""} | summary(a, a))
        for variant, make in ABLATION.items():
            table.row((variant, epsilon), lambda make=make: scored(make))
    table.finish()


# ---- School --------------------------------------------------------------------------------------


def on_school(given):
    """School at 30 % training rows, with the defaults of every method."""
    if school() is None:
        print("  school.npz is not there: set COTERIE_DATA to the folder that holds school/")
        return
    table = Table(given, "school", ["data", "method", "epsilon"])
    seeds = range(given.seeds)
    alone = None
    bests = {
        "single": [{"kind": "single"}, {"kind": "single", "penalty": "l1"}],
        "mtl": [
            {"kind": "mtl", "tol": 1e-4},
            {"kind": "mtl", "penalty": "l21", "tol": 1e-4},
            {"kind": "mtrl", "tol": 1e-4},
        ],
    }

    def scored(settings, epsilon, against):
        columns = [[error(s, "school", epsilon, seed) for seed in seeds] for s in settings]
        at = int(np.argmin([np.mean(column) for column in columns]))
        outcome = carry_out(settings[at], "school", epsilon, 0)
        found = {"true_epsilon": outcome.guarantee.epsilon, "rounds": outcome.plan.rounds}
        found["setting"] = words(settings[at])
        return found | summary(columns[at], against or columns[at])

    for method, settings in bests.items():
        row = table.row(
            ("school", method, math.inf),
            lambda settings=settings, alone=alone: scored(settings, math.inf, alone),
        )
        alone = numbers(row) if alone is None else alone
    kinds = {
        "mpmtl low_rank": {"kind": "mpmtl"},
        "mpmtl group_sparse": {"kind": "mpmtl", "structure": "group_sparse"},
        "dpmtrl": {"kind": "dpmtrl"},
        "dpaggr": {"kind": "dpaggr"},
    }
    for (method, setting), epsilon in itertools.product(kinds.items(), EPSILONS):
        table.row(
            ("school", method, epsilon),
            lambda setting=setting, epsilon=epsilon: scored([setting], epsilon, alone),
        )
    near = [float(row["nmse"]) for row in table.rows.values() if float(row["difference"]) < 0.02]
    rows, zoom = table.finish(), (min(near) - 0.005, max(near) + 0.005)
    plot_frontier(rows, ["school", "school"], given.out / "school.svg", zoom)


# ---- more clients --------------------------------------------------------------------------------


def by_clients(given):
    """Follow the first 20 clients as more clients train; defaults, the delta of 320."""
    table = Table(given, "clients", ["method", "epsilon", "clients"])
    noises, delta = (1 if given.quick else 3), usual_delta(320)
    kinds = [("single", {"kind": "single"}, math.inf), ("mtl", {"kind": "mtl"}, math.inf)]
    kinds += [("mpmtl low_rank", {"kind": "mpmtl"}, epsilon) for epsilon in (0.1, 1.0, 10.0)]

    def scored(setting, epsilon, clients):
        values, repeats = [], noises if epsilon < math.inf else 1
        for seed in range(given.seeds):
            few = federation("low_rank", seed, 20)[1]
            found = [
                carry_out(
                    setting, "low_rank", epsilon, seed,
                    clients=clients, delta=delta, noise_seed=100 * seed + repeat,
                )
                for repeat in range(repeats)
            ]  # fmt: skip
            scores = [evaluate(o.plan.method.model, o.rows, few).value for o in found]
            values.append(float(np.mean(scores)))
        return summary(values)

    for (method, setting, epsilon), clients in itertools.product(
        kinds, (20, 40, 80, 160, 240, 320)
    ):
        table.row(
            (method, epsilon, clients),
            lambda setting=setting, epsilon=epsilon, clients=clients: scored(
                setting, epsilon, clients
            ),
        )
    figure, (axis,) = canvas(1, 1)
    rows = table.finish()
    for (method, _, epsilon), colour in zip(
        kinds, ("0.35", "black", "tab:cyan", "tab:blue", "tab:purple"), strict=True
    ):
        chosen = [r for r in rows if (r["method"], r["epsilon"]) == (method, _cell(epsilon))]
        x, y, e = (np.array([float(r[c]) for r in chosen]) for c in ("clients", "nmse", "se"))
        label = LOOKS[method][0] + ("" if math.isinf(epsilon) else f", epsilon {epsilon:g}")
        line = "--" if method == "single" else "-"
        axis.errorbar(x, y, e, color=colour, linestyle=line, label=label, capsize=2)
    axis.set(xlabel="clients that train", ylabel="test nMSE of the first 20", title="low-rank")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, given.out / "clients.svg")


# ---- noise by round ------------------------------------------------------------------------------


def noise_by_round(given):
    """log10 of the noise-to-signal ratio of every post, for even and growing budgets."""
    table = Table(given, "noise", ["solver", "spend", "epsilon", "round"])
    spends = (Even(), Power(0.4), Power(1.0), Geometric(0.9))
    solvers = {
        "solve": {"kind": "mpmtl", "rounds": 4},
        "steps": {
            "kind": "mpmtl", "solver": "steps", "lam": 0.15, "lam_scale": "absolute",
            "lift": "add", "rounds": 20,
        },
    }  # fmt: skip
    for (solver, setting), spend, epsilon in itertools.product(solvers.items(), spends, (0.1, 1.0)):
        key = (solver, _word(spend), epsilon)
        ratios = None
        if (*map(_cell, key), str(setting["rounds"])) not in table.rows:
            ratios = np.log10(
                [
                    noise_to_signal(
                        carry_out(setting | {"spend": spend}, "low_rank", epsilon, seed)
                    )
                    for seed in range(given.seeds)
                ]
            )
        for at in range(setting["rounds"]):
            table.row(
                (*key, at + 1),
                lambda at=at, ratios=ratios: {
                    "log10_ratio": float(ratios[:, at].mean()),
                    "se": _se(ratios[:, at]),
                    "seeds": given.seeds,
                },
            )
    rows = table.finish()
    figure, axes = canvas(1, 2)
    for axis, solver in zip(axes, solvers, strict=True):
        for spend, epsilon in itertools.product(spends, (0.1, 1.0)):
            key = [solver, _word(spend), _cell(epsilon)]
            chosen = [r for r in rows if [r["solver"], r["spend"], r["epsilon"]] == key]
            x, y, e = (
                np.array([float(r[c]) for r in chosen]) for c in ("round", "log10_ratio", "se")
            )
            axis.errorbar(
                x, y, e, color=f"C{spends.index(spend)}",
                linestyle="-" if epsilon == 1.0 else "--",
                label=_word(spend) if epsilon == 1.0 else None,
            )  # fmt: skip
        axis.set(xlabel="round", title=f"{solver}: epsilon 1 (full), 0.1 (dashed)")
    axes[0].set_ylabel("log10 noise / signal")
    axes[0].set_xticks([1, 2, 3, 4])
    axes[0].legend(fontsize=7)
    save(figure, given.out / "noise.svg")


# ---- budget shapes -------------------------------------------------------------------------------

ALPHAS = (-0.5, 0.0, 0.4, 0.8, 1.5)
QS = (0.8, 0.9, 0.95, 1.0, 1.1)
SHAPED = {
    "steps, plain": lambda t, spend: [
        {
            "kind": "mpmtl", "solver": "steps", "lam": 0.5 * lam, "lam_scale": "absolute",
            "lift": "add", "rounds": t, "acceleration": "off",
        }
        for lam in MULTIPLES
    ],
    "steps, accelerated": lambda t, spend: [
        {
            "kind": "mpmtl", "solver": "steps", "lam": 0.5 * lam, "lam_scale": "absolute",
            "lift": "add", "rounds": t,
        }
        | ({"acceleration": "strong", "mu": 1e-3} if spend == "Q" else {"acceleration": "on"})
        for lam in MULTIPLES
    ],
    "solve": lambda t, spend: [
        {"kind": "mpmtl", "lam": lam, "rounds": t} for lam in LAMS
    ],
}  # fmt: skip


def shapes(given):
    """Plot nMSE against the shape of the budget; lam chosen on other seeds for the even budget."""
    table = Table(given, "shapes", ["solver", "rounds", "epsilon", "shape", "value"])
    seeds = range(min(given.seeds, 10))
    kinds = [("steps, plain", 5), ("steps, plain", 20), ("steps, accelerated", 5)]
    kinds += [("steps, accelerated", 20), ("solve", 2), ("solve", 4)]
    for (solver, rounds), epsilon, shape in itertools.product(
        kinds, (0.1, 1.0, 10.0), ("alpha", "Q")
    ):
        spends = [Power(a) for a in ALPHAS] if shape == "alpha" else [Geometric(q) for q in QS]
        best = None
        for spend in spends:
            value = spend.alpha if shape == "alpha" else spend.Q
            key = (solver, rounds, epsilon, shape, value)
            if tuple(map(_cell, key)) not in table.rows and best is None:
                best = tuned(SHAPED[solver](rounds, shape), "low_rank", epsilon, given)
            table.row(
                key,
                lambda spend=spend, best=best, epsilon=epsilon: (
                    {"setting": words(best)}
                    | summary(
                        [error(best | {"spend": spend}, "low_rank", epsilon, s) for s in seeds]
                    )
                ),
            )
    rows = table.finish()
    alone = np.array(
        [error({"kind": "single", "lam": 0.01}, "low_rank", math.inf, seed) for seed in seeds]
    )
    plot_shapes(rows, alone, given.out / "shapes.svg")


def plot_shapes(rows, alone, path):
    """Draw differences from local training, which vary far less over seeds than errors do."""
    figure, axes = canvas(2, 3, height=2.2)
    looks = {
        ("steps, plain", 20): ("tab:orange", "--"),
        ("steps, accelerated", 20): ("tab:red", "-"),
        ("solve", 4): ("tab:blue", "-"),
        ("solve", 2): ("tab:cyan", "-"),
    }
    for at, (shape, epsilon) in enumerate(itertools.product(("alpha", "Q"), (0.1, 1.0, 10.0))):
        axis = axes[at]
        axis.axhline(0, color="0.35", linestyle=":", label="single (local)")
        for (solver, rounds), (colour, line) in looks.items():
            key = [solver, str(rounds), _cell(epsilon), shape]
            chosen = [
                r for r in rows if [r[c] for c in ("solver", "rounds", "epsilon", "shape")] == key
            ]
            gaps = [np.array(numbers(r)) - alone for r in chosen]
            axis.errorbar(
                [float(r["value"]) for r in chosen],
                [gap.mean() for gap in gaps],
                [_se(gap) for gap in gaps],
                color=colour,
                linestyle=line,
                label=f"{solver}, T = {rounds}",
            )
        axis.set(xlabel=shape, title=f"epsilon {epsilon:g}")
    for axis in (axes[0], axes[3]):
        axis.set_ylabel("nMSE minus local")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, path)


# ---- kinds of noise ------------------------------------------------------------------------------


def mechanisms(given):
    """Compare kinds of noise at epsilon 1: what is claimed, what is true, and the error."""
    table = Table(given, "mechanisms", ["data", "noise", "clip"])
    matrix = {"kind": "mpmtl", "rounds": 1}
    diagonal = {"kind": "mpmtl", "structure": "group_sparse", "lam": 0.001, "rounds": 1}
    kinds = [
        ("low_rank", "gaussian", matrix, GaussianNoise()),
        ("low_rank", "wishart, 1000 degrees", matrix, WishartNoise(degrees=1000)),
        ("low_rank", "wishart_paper, K^2", matrix, PublishedWishart(sensitivity="K^2")),
        ("low_rank", "wishart_paper, 2K", matrix, PublishedWishart(sensitivity="2K")),
        ("group_sparse", "gaussian", diagonal, GaussianNoise()),
        ("group_sparse", "laplace, delta 0", diagonal, LaplaceNoise()),
    ]

    def scored(data, setting):
        delta = 0.0 if isinstance(setting["noise"], LaplaceNoise) else usual_delta(320)
        errors = []
        for seed in range(given.seeds):
            outcome = carry_out(setting, data, 1.0, seed, delta=delta)
            test = federation(data, seed)[1]
            errors.append(evaluate(outcome.plan.method.model, outcome.rows, test).value)
        said = outcome.guarantee.to_json()
        return {
            "claimed_epsilon": said.get("claimed_epsilon", ""),
            "true_delta_at_claimed": said.get("true_delta_at_claimed", ""),
            "epsilon": said["epsilon"],
            "delta": said["delta"],
        } | summary(errors)

    for (data, name, setting, noise), clip in itertools.product(kinds, (0.5, 8.0)):
        chosen = setting | {"clip": clip, "noise": noise}
        table.row((data, name, clip), lambda data=data, chosen=chosen: scored(data, chosen))
    table.finish()


def asides(given):
    """Work out what composition costs, and what clipping squares in l2 keeps."""
    table = Table(given, "asides", ["what", "rounds"])
    delta = usual_delta(320)
    for rounds in (1, 2, 4, 10, 20, 50):
        exact = calibrate(
            1.0,
            delta,
            weights=(1.0,) * rounds,
            participation=Participation("everyone"),
            relation="zero_out",
        )
        # Half of delta for the composition theorem, half for the rounds.
        share = published_spending(1.0, delta / 2, (1.0,) * rounds)[0]
        printed = 1 / gaussian_mu(share, delta / 2 / rounds)
        table.row(("noise at epsilon 1, exact", rounds), lambda v=exact: {"value": v})
        table.row(("noise at epsilon 1, formula 7", rounds), lambda v=printed: {"value": v})
    for name in SIMULATIONS:
        outcome = carry_out({"kind": "single", "lam": 0.001}, name, math.inf, 0)
        model = outcome.models.leaves["weight"][:, 0].double()
        kept = model.square().sum(dim=1) / model.square().norm(dim=1)
        table.row((f"l4 over l2 clip, {name}", ""), lambda v=kept: {"value": float(v.mean())})
    table.finish()


# ---- drawing, and the command line ---------------------------------------------------------------


def canvas(rows, columns, height=3.2):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mpmtl", "font.size": 9}
    from matplotlib import pyplot

    width = 6.0 if columns == 1 else 3.7 * columns if columns == 2 else 3.0 * columns
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width, height * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.5)
    return figure, list(axes.flat)


def plain_ticks(axis):
    """Write ticks of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_ylim()
    minor = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(minor if high < 12 * low else NullFormatter())


def save(figure, path):
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    # Coordinates to a hundredth of a point: half the size, and nothing to see.
    text = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", path.read_text())
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"  wrote {path}")


PARTS = {
    "frontier": frontier,
    "ablation": ablation,
    "school": on_school,
    "clients": by_clients,
    "noise": noise_by_round,
    "shapes": shapes,
    "mechanisms": mechanisms,
    "asides": asides,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two seeds, thin grids")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    given.seeds = 2 if given.quick else given.seeds
    if given.out is None:
        given.out = Path(tempfile.mkdtemp(prefix="mpmtl-")) if given.quick else OUT
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # matrices are small: more threads only wait for one another
    numba.set_num_threads(1)
    for part in given.parts or PARTS:
        print(f"{part}: {PARTS[part].__doc__}")
        PARTS[part](given)


if __name__ == "__main__":
    main()
