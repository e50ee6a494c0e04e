"""The figures of MP-MTL (Liang et al.), numbered as in the paper, with its algorithms as published.

    python benchmarks/papers_mpmtl.py [PART ...] [--seeds 3] [--quick] [--out FOLDER]

Parts: algorithm1, fig2 .. fig8, shares; all by default. Each writes a CSV and, but for the first
and the last, an SVG to docs/papers/mpmtl. A part that was interrupted goes on where it stood
(`*.csv.part`). `--quick` takes one seed and thin grids, and writes to a temporary folder.

Every figure has a line for the algorithm as published: 2 (low-rank) or 3 (group-sparse), Wishart
noise of s = 2K, budgets composed by formula (7). Its epsilon is a claim, NOT A GUARANTEE: no
epsilon holds at the published delta. Beside it is `mpmtl` of this library, whose epsilon holds.

The low-rank simulation has noise = 0.22, which gives training without privacy about the published
nMSE; the paper shows its covariance as a picture only. Settings are chosen for each epsilon on a
federation of another seed, those of School by 5-fold cross-validation on the training rows of the
first split; no epsilon covers the choice. The paper has 100 replicates, here there are 3.

School ($COTERIE_DATA, or shared/data beside the repository) is as in the paper: rows scaled to unit
length, 30 % of each school's rows for training. Models have an intercept, which stays with its
client.
"""

import argparse
import itertools
import math
import tempfile
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import numba
import numpy as np
import torch

import mpmtl
from coterie.data.load import from_arrays
from coterie.data.synthetic import figure2, mpmtl_low_rank
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate, noise_to_signal
from coterie.methods.mpmtl import MPMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.calibrate import Even, Geometric, Power
from coterie.privacy.noise import PublishedWishart
from mpmtl import Table, canvas, carry_out, federation, grid_of, plain_ticks, save, words

OUT = mpmtl.ROOT / "docs" / "papers" / "mpmtl"
LOW, SPARSE = "low_rank, paper", "group_sparse"
EPSILONS = (0.1, 1.0, 10.0)
CHOOSING = 1000
NOISE = PublishedWishart("2K")


def published(structure="low_rank", **grid):
    """Return settings of Algorithm 2 or 3; lam is given as a multiple of the clip."""
    found = []
    for setting in grid_of(
        kind=["mpmtl"], solver=["steps"], structure=[structure], clip_own=[True],
        lam_scale=["absolute"], lift_by=[0.0], noise=[NOISE], **grid,
    ):  # fmt: skip
        setting["lam"] *= setting["clip"]
        found.append(setting | ({"whole": True} if structure == SPARSE else {}))
    return found


SINGLE = grid_of(kind=["single"], penalty=["l2"], lam=[3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
FREE = [
    *grid_of(kind=["mtl"], penalty=["trace"], lam=[0.005, 0.01, 0.02, 0.05, 0.1], tol=[1e-4]),
    *grid_of(kind=["mtl"], penalty=["l21"], lam=[0.01, 0.05, 0.2], tol=[1e-4]),
    *grid_of(kind=["mtrl"], lam1=[1e-3], lam2=[c * 0.01 / 320 for c in (0.03, 0.3)], tol=[1e-4]),
]
OURS = {
    LOW: grid_of(kind=["mpmtl"], lam=[1e-4, 3e-4, 1e-3, 1e-2], rounds=[1, 2]),
    SPARSE: grid_of(kind=["mpmtl"], structure=[SPARSE], lam=[1e-3, 3e-3, 1e-2], rounds=[1, 2]),
}
# A clip that few models reach, and enough steps for single-task learning to converge.
STEPS = {"lam": [0.001, 0.003, 0.01], "rounds": [200], "acceleration": ["on"]}
PRINTED = {
    LOW: published(**STEPS, clip=[32.0], spend=[Power(0.4)]),
    SPARSE: published(SPARSE, **STEPS, clip=[64.0], spend=[Power(0.4)]),
}
DPMTRL = grid_of(
    kind=["dpmtrl"], lam1=[1e-4, 1e-3, 1e-2], lam2=[c / 320 for c in (1e-9, 1e-3, 1e-1)],
    clip=[4.0, 16.0], rows=[30], rounds=[1],
)  # fmt: skip
DPAGGR = grid_of(kind=["dpaggr"], lam=[1e-3, 1e-1], clip=[0.5, 8.0], rows=[30], rounds=[1])


def error(setting, name, epsilon, seed):
    """Return the test nMSE; a run that diverges has infinity."""
    value = mpmtl.error(setting, name, epsilon, seed)
    return value if value < 1e6 else math.inf


@cache
def _choose(name, epsilon, quick, *texts):
    grid = _GRIDS[texts]
    grid = grid[:: max(1, len(grid) // 2)] if quick else grid
    return grid[int(np.argmin([error(s, name, epsilon, CHOOSING) for s in grid]))]


_GRIDS = {}


def choose(grid, name, epsilon, given):
    """Choose the setting of the least error on the federation of another seed, once."""
    key = tuple(words(setting) for setting in grid)
    _GRIDS[key] = grid
    return _choose(name, epsilon, given.quick, *key)


def scored(setting, name, epsilon, given):
    """Return the columns of a row: the setting, and the errors of the seeds."""
    values = [error(setting, name, epsilon, seed) for seed in range(given.seeds)]
    return {"setting": words(setting)} | mpmtl.summary(values)


# ---- Algorithm 1: both matrices ------------------------------------------------------------------


def task_matrix(lam, epsilon, seed):
    """Return the test nMSE of Algorithm 1 with W^T W, a curator's simulation."""
    train, test = federation(LOW, seed)
    plan = MPMTL.published(
        1, matrix="tasks", epsilon=epsilon, delta=mpmtl.usual_delta(len(train)), clip=32.0,
        lam=lam * 32, rounds=200, seed=seed,
    )  # fmt: skip
    return evaluate(plan.method.model, simulate(plan, train).rows, test).value


def impossible(clients, draws, features=5, epsilon=1.0, seed=0):
    """Return how often W^T W + noise is impossible without a client, and how often with it.

    Models have norm K = 1, s = K^2. Noise is positive definite, so an output less the products of
    the other hypothesis that is not positive definite cannot come from it: a lower bound on delta
    at any epsilon, of this one matrix.
    """
    rng, found = np.random.default_rng(seed), np.zeros((draws, 2))
    for at in range(draws):
        W = rng.standard_normal((clients, features))
        W /= np.linalg.norm(W, axis=1, keepdims=True)
        without = W.copy()
        without[0] = 0
        change = W @ W.T - without @ without.T
        vectors = rng.standard_normal((clients + 1, clients)) * math.sqrt(1 / (2 * epsilon))
        noise = vectors.T @ vectors
        found[at] = [np.linalg.eigvalsh(noise + sign * change)[0] < 0 for sign in (1, -1)]
    return found.mean(axis=0)


def algorithm1(given):
    """Algorithm 1 with W W^T and with W^T W, and what the noise on W^T W reveals."""
    table = Table(given, "algorithm1", ["line", "epsilon"])
    lams = [0.01] if given.quick else [1e-4, 1e-3, 3e-3, 0.01, 0.03]
    steps = {"clip": [32.0], "rounds": [20 if given.quick else 200], "acceleration": ["on"]}
    grid = published(lam=lams, **steps, spend=[Power(0.4)])
    grid = [setting | {"noise": PublishedWishart("K^2")} for setting in grid]
    for epsilon in EPSILONS:
        table.row(("W W^T", epsilon), lambda e=epsilon: scored(
            choose(grid, LOW, e, given), LOW, e, given))  # fmt: skip

        def row(epsilon=epsilon):
            best = min(lams, key=lambda lam: task_matrix(lam, epsilon, CHOOSING))
            values = [task_matrix(best, epsilon, seed) for seed in range(given.seeds)]
            return {"setting": f"lam={best}"} | mpmtl.summary(values)

        table.row(("W^T W", epsilon), row)
    table.finish()
    table = Table(given, "algorithm1-matrix", ["clients"])
    for clients in (10, 20, 40):
        table.row((clients,), lambda m=clients: dict(zip(
            ("impossible_without", "impossible_with"),
            impossible(m, 200 if given.quick else 4000), strict=True)))  # fmt: skip
    table.finish()


# ---- Figure 2: one outlier -----------------------------------------------------------------------


def fig2(given):
    """Figure 2: models of 10 clients with an outlier, before and after one release."""
    truth = figure2().T
    data = from_arrays(
        np.tile(np.eye(5), (10, 1)), truth.reshape(-1), np.repeat(np.arange(10), 5),
        task="regression",
    )  # fmt: skip
    own = {
        "model": Linear(bias=False), "solver": "steps", "lam": 50.0, "lam_scale": "absolute"
    }  # fmt: skip
    printed = own | {"lift_by": 0.0, "clip_own": True}
    clip, found = 100 * math.sqrt(5), {"before": [truth]}
    for label, method, epsilon, noise in (
        ("without noise", printed, math.inf, {}),
        ("as published, s = 2K", printed, 0.1, {"noise": NOISE}),
        ("as published, s = K^2", printed, 0.1, {"noise": PublishedWishart("K^2")}),
        ("mpmtl, Gaussian noise", own, 0.1, {}),
    ):
        privacy = Privacy(epsilon=epsilon, delta=1e-5, clip=clip, **noise)
        plan = Plan(method=MPMTL(**method), privacy=privacy, rounds=1)
        found[label] = [
            simulate(replace(plan, simulation_seed=seed), data).models.leaves["weight"][:, 0]
            .double().numpy() for seed in range(10)
        ]  # fmt: skip
    outlier = truth[-1] / np.linalg.norm(truth[-1])
    table = Table(given, "fig2", ["models"])
    figure, axes = canvas(1, 5, height=2.2)
    for axis, (label, draws) in zip(axes, found.items(), strict=True):
        units = [one / np.maximum(np.linalg.norm(one, axis=1, keepdims=True), 1e-12)
                 for one in draws]  # fmt: skip
        columns, others = units[0], float(np.mean([np.abs(u[:9] @ outlier) for u in units]))
        table.row((label,), lambda v=others: {"mean_cosine_of_nine_with_the_outlier": v})
        axis.imshow(columns.T, cmap="RdBu", vmin=-1, vmax=1)
        axis.set(title=label, xlabel="client", yticks=[])
        axis.grid(visible=False)
    table.finish()
    save(figure, given.out / "fig2.svg")


# ---- Figure 3: the simulation --------------------------------------------------------------------


def fig3(given):
    """Figure 3: the covariance of the clients' models, and the models, of both simulations."""
    table, clients = Table(given, "fig3", ["simulation"]), 40
    figure, axes = canvas(1, 3, height=2.6)
    made = mpmtl_low_rank(clients=clients, train=1, test=1, noise=0.22, seed=0)
    order = np.argsort(made.cluster.numpy(), kind="stable")
    low = made.truth["weight"][:, 0].double().numpy()[order]
    sparse = mpmtl.mpmtl_group_sparse(clients=clients, train=1, test=1, seed=0)
    rest = sparse.truth["weight"][:, 0].double().numpy()
    shown = {"low-rank: correlations": np.corrcoef(low), "low-rank: models": low.T,
             "group-sparse: models": rest.T}  # fmt: skip
    for axis, (title, values) in zip(axes, shown.items(), strict=True):
        largest = float(np.abs(values).max())
        axis.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
        axis.set(title=title, xlabel="client")
        axis.grid(visible=False)
    for name, models in (("low_rank", low), ("group_sparse", rest)):
        singular = np.linalg.svd(models, compute_uv=False)
        used = int((np.abs(models).max(axis=0) > 1e-9).sum())
        table.row((name,), lambda s=singular, u=used: {
            "rank": int((s > 1e-6 * s[0]).sum()), "features_in_use": u})  # fmt: skip
    table.finish()
    save(figure, given.out / "fig3.svg")


# ---- Figure 4: the shape of the budget -----------------------------------------------------------

ALPHAS = (-0.4, 0.0, 0.4, 0.8, 1.6)
QS = (0.9, 0.9684, 1.0, 1.03)
FIXED = {"clip": [32.0], "lam": [0.003, 0.01, 0.03, 0.1], "rounds": [20]}
SHAPED = {
    ("as published, plain", "alpha"): published(**FIXED, acceleration=["off"]),
    ("as published, accelerated", "alpha"): published(**FIXED, acceleration=["on"]),
    ("as published, plain", "Q"): published(**FIXED, acceleration=["off"], mu=[1e-3]),
    ("as published, accelerated", "Q"): published(**FIXED, acceleration=["strong"], mu=[1e-3]),
    ("mpmtl, 4 rounds", "alpha"): grid_of(kind=["mpmtl"], lam=[1e-4, 1e-3, 1e-2], rounds=[4]),
    ("mpmtl, 4 rounds", "Q"): grid_of(kind=["mpmtl"], lam=[1e-4, 1e-3, 1e-2], rounds=[4]),
}


def fig4(given):
    """Figure 4: nMSE by the exponent of the budget at epsilon .1."""
    table = Table(given, "fig4", ["line", "shape", "value"])
    still(given, table, LOW, lambda label: (label, "", ""))
    for (label, shape), grid in SHAPED.items():
        best = choose([s | {"spend": Even()} for s in grid], LOW, 0.1, given)
        for value in ALPHAS if shape == "alpha" else QS:
            spend = Power(value) if shape == "alpha" else Geometric(value)
            table.row((label, shape, value), lambda b=best, s=spend: scored(
                b | {"spend": s}, LOW, 0.1, given))  # fmt: skip
    rows = table.finish()
    figure, axes = canvas(1, 2)
    for axis, shape in zip(axes, ("alpha", "Q"), strict=True):
        for (label, own), colour in zip(SHAPED, COLOURS, strict=False):
            if own == shape:
                draw(axis, [r for r in rows if (r["line"], r["shape"]) == (label, shape)], "value",
                     label, LINES.get(label, colour))  # fmt: skip
        level(axis, rows)
        axis.set(xlabel=shape, title="budgets t^alpha" if shape == "alpha" else "budgets Q^-t")
    finish_figure(axes, figure, given.out / "fig4.svg")


COLOURS = ("tab:orange", "tab:red", "tab:orange", "tab:red", "tab:blue", "tab:blue")
LINES = {"mpmtl, 4 rounds": "tab:blue"}
STILL = {"single-task": ("single-task", "0.35", ":"), "without privacy": ("", "black", "--")}


def still(given, table, name, key):
    """Add the two lines without releases: single-task learning, and training without privacy."""
    for label, grid in (("single-task", SINGLE), ("without privacy", FREE)):
        table.row(key(label), lambda g=grid: scored(
            choose(g, name, math.inf, given), name, math.inf, given))  # fmt: skip


def level(axis, rows):
    """Draw these lines."""
    for row in rows:
        if row["line"] in STILL:
            _, colour, style = STILL[row["line"]]
            axis.axhline(float(row["nmse"]), color=colour, linestyle=style, label=row["line"])


def draw(axis, rows, column, label, colour, style="-"):
    x, y, e = (np.array([float(row[c]) for row in rows]) for c in (column, "nmse", "se"))
    e = np.where(np.isfinite(e), e, 0)
    axis.errorbar(x, y, e, color=colour, linestyle=style, marker="o", markersize=3, label=label,
                  capsize=2)  # fmt: skip


def finish_figure(axes, figure, path):
    axes[0].set_ylabel("test nMSE")
    for axis in axes:
        axis.set_yscale("log")
        plain_ticks(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


# ---- Figure 5: noise to signal -------------------------------------------------------------------


def fig5(given):
    """Figure 5: noise to signal of the releases by iteration, at epsilon .1."""
    table = Table(given, "fig5", ["line", "iteration"])
    best = choose(published(**FIXED, acceleration=["on"], spend=[Even()]), LOW, 0.1, given)
    lines = {
        f"as published, {words({'spend': spend})[6:]}": best | {"spend": spend}
        for spend in (Even(), Power(0.4), Geometric(0.9684))
    }
    lines["mpmtl, 4 rounds"] = {"kind": "mpmtl", "rounds": 4}
    lines["dpmtrl"] = choose(DPMTRL, LOW, 0.1, given)
    for label, setting in lines.items():
        found = np.array([
            noise_to_signal(carry_out(setting, LOW, 0.1, seed)) for seed in range(given.seeds)
        ])  # fmt: skip
        for at in range(found.shape[1]):
            table.row((label, at + 1), lambda v=found[:, at], s=setting: {
                "ratio": float(v.mean()), "ratio_se": mpmtl._se(v),
                "log10": float(np.log10(v).mean()), "setting": words(s)})  # fmt: skip
    rows = table.finish()
    figure, (axis,) = canvas(1, 1)
    for label in lines:
        mine = [row for row in rows if row["line"] == label]
        axis.plot([int(row["iteration"]) for row in mine], [float(row["log10"]) for row in mine],
                  marker="o", markersize=3, label=label)  # fmt: skip
    axis.set(xlabel="iteration", ylabel="log10 noise / signal", title="epsilon .1")
    axis.legend(fontsize=7)
    save(figure, given.out / "fig5.svg")


# ---- Figure 6: error by epsilon ------------------------------------------------------------------


def fig6(given):
    """Figure 6: nMSE by epsilon on both simulations."""
    table = Table(given, "fig6", ["data", "line", "epsilon"])
    for name in (LOW, SPARSE):
        still(given, table, name, lambda label, name=name: (name, label, math.inf))
        lines = {"as published": PRINTED[name], "mpmtl": OURS[name], "dpmtrl": DPMTRL,
                 "dpaggr": DPAGGR}  # fmt: skip
        for (label, grid), epsilon in itertools.product(lines.items(), EPSILONS):
            table.row((name, label, epsilon), lambda g=grid, e=epsilon, n=name: scored(
                choose(g, n, e, given), n, e, given))  # fmt: skip
    frontier_plot(table.finish(), {LOW: "(a) low-rank", SPARSE: "(b) group-sparse"},
                  given.out / "fig6.svg")  # fmt: skip


LOOKS = {"as published": "tab:red", "mpmtl": "tab:blue", "dpmtrl": "tab:orange",
         "dpaggr": "tab:green", "mpmtl group_sparse": "tab:cyan"}  # fmt: skip


def frontier_plot(rows, panels, path):
    figure, axes = canvas(1, len(panels))
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        mine = [row for row in rows if row["data"] == name]
        for label, colour in LOOKS.items():
            if line := [row for row in mine if row["line"] == label]:
                draw(axis, line, "epsilon", label, colour)
        level(axis, mine)
        axis.set(xscale="log", xlabel="epsilon (as published: claimed)", title=title)
    finish_figure(axes, figure, path)


# ---- Figure 7: more clients ----------------------------------------------------------------------


def fig7(given):
    """Figure 7: nMSE of the first 20 clients by the number of clients that train, epsilon 1."""
    table = Table(given, "fig7", ["line", "clients"])
    delta = mpmtl.usual_delta(320)
    lines = {
        "single-task": (choose(SINGLE, LOW, math.inf, given), math.inf),
        "without privacy": (choose(FREE, LOW, math.inf, given), math.inf),
        "as published": (choose(PRINTED[LOW], LOW, 1.0, given), 1.0),
        "mpmtl": (choose(OURS[LOW], LOW, 1.0, given), 1.0),
    }
    for (label, (setting, epsilon)), clients in itertools.product(
        lines.items(), (20, 320) if given.quick else (20, 80, 160, 320)
    ):
        scale = clients / 320 if label == "without privacy" and setting["kind"] == "mtrl" else 1
        own = setting | ({"lam2": setting["lam2"] / scale} if scale != 1 else {})
        # The absolute lam of the published steps is that of 320 clients; it grows as their root.
        if label == "as published":
            own = setting | {"lam": setting["lam"] * math.sqrt(clients / 320)}

        def row(own=own, epsilon=epsilon, clients=clients):
            values = []
            for seed in range(given.seeds):
                few = federation(LOW, seed, 20)[1]
                run = carry_out(own, LOW, epsilon, seed, clients=clients, delta=delta)
                values.append(evaluate(run.plan.method.model, run.rows, few).value)
            return {"setting": words(own)} | mpmtl.summary(values)

        table.row((label, clients), row)
    rows = table.finish()
    figure, axes = canvas(1, 1)
    looks = {"single-task": ("0.35", ":"), "without privacy": ("black", "--"),
             "as published": ("tab:red", "-"), "mpmtl": ("tab:blue", "-")}  # fmt: skip
    for label, (colour, style) in looks.items():
        mine = [row for row in rows if row["line"] == label]
        draw(axes[0], mine, "clients", label, colour, style)
    axes[0].set(xlabel="clients that train", title="epsilon 1 (as published: claimed)")
    finish_figure(axes, figure, given.out / "fig7.svg")


# ---- Figure 8: School ----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def school():
    """Return School with rows of unit length."""
    data = mpmtl.school()
    rows = data.features.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return from_arrays(rows, data.targets.double().numpy(), data.owners, task="regression")


def folds(train, count=5):
    """Return the pairs of a cross-validation that splits every client's rows."""
    place = np.concatenate([
        np.random.default_rng(client).permutation(size) for client, size in enumerate(train.counts)
    ])  # fmt: skip
    return [(train.where(place % count != at), train.where(place % count == at))
            for at in range(count)]  # fmt: skip


def school_error(setting, epsilon, train, test, seed):
    """Return the nMSE of a setting on School, as `mpmtl.carry_out` runs it."""
    rest = dict(setting)
    kind, rounds = mpmtl.METHODS[rest.pop("kind")], rest.pop("rounds", 1)
    own = {field: rest.pop(field) for field in mpmtl.PRIVACY if field in rest}
    method = kind(model=Linear(), **rest)
    privacy = Privacy(epsilon=epsilon, delta=mpmtl.usual_delta(len(train)), **own)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=seed)
    value = evaluate(method.model, simulate(plan, train).rows, test).value
    return value if math.isfinite(value) else math.inf


def schooled():
    """Return the grids of School; the private recipes' proofs need its most training rows."""
    most = {"rows": [76]}
    free = [
        *grid_of(kind=["mtl"], penalty=["trace"], lam=[0.1, 0.5, 2.0, 8.0], tol=[1e-4]),
        *grid_of(kind=["mtl"], penalty=["l21"], lam=[0.1, 0.5, 2.0, 8.0], tol=[1e-4]),
        *grid_of(kind=["mtrl"], lam1=[1e-3, 1e-2], lam2=[1e-5, 1e-4, 1e-3], tol=[1e-4]),
        *grid_of(kind=["dpaggr"], lam=[1e-3, 1e-1], clip=[100.0], **most),
    ]
    steps = {"clip": [2.0, 8.0, 32.0], "lam": [0.003, 0.03], "rounds": [20]}
    return {
        "single-task": [*grid_of(kind=["single"], penalty=["l2", "l1"], lam=[0.03, 0.1, 0.3, 1.0])],
        "without privacy": free,
        "as published": published(**steps, acceleration=["on"], spend=[Power(0.4)]),
        "mpmtl": grid_of(kind=["mpmtl"], lam=[1e-2, 0.1, 0.3, 1.0], clip=[2.0, 8.0]),
        "mpmtl group_sparse": grid_of(
            kind=["mpmtl"], structure=[SPARSE], lam=[1e-2, 0.1, 0.3, 1.0]
        ),
        "dpmtrl": grid_of(
            kind=["dpmtrl"], lam1=[1e-2, 1e-1], lam2=[1e-11, 1e-4], clip=[8.0, 32.0], **most
        ),
        "dpaggr": grid_of(kind=["dpaggr"], lam=[1e-2, 1e-1], clip=[8.0, 32.0], **most),
    }


def fig8(given):
    """Figure 8a: nMSE on School by epsilon; rows of unit length, settings by 5-fold choice."""
    if mpmtl.school() is None:
        print("  school.npz is not there: set COTERIE_DATA to the folder that holds school/")
        return
    table = Table(given, "fig8", ["data", "line", "epsilon"])
    splits = [school().split(0.7, seed) for seed in range(given.seeds)]
    parts = folds(splits[0][0])[: 1 if given.quick else 5]

    def row(grid, epsilon):
        grid = grid[:: max(1, len(grid) // 2)] if given.quick else grid
        totals = [sum(school_error(s, epsilon, *part, 0) for part in parts) for s in grid]
        best = grid[int(np.argmin(totals))]
        values = [school_error(best, epsilon, *split, seed) for seed, split in enumerate(splits)]
        return {"setting": words(best)} | mpmtl.summary(values)

    for label, grid in schooled().items():
        for epsilon in (math.inf,) if label in STILL else EPSILONS:
            table.row(("school", label, epsilon), lambda g=grid, e=epsilon: row(g, e))
    frontier_plot(table.finish(), {"school": "School"}, given.out / "fig8.svg")


def shares(given):
    """The supplement's sweep: School at epsilon 1 by the share of rows that train.

    Settings are those that Figure 8a chose for 30 %, so they are not tuned for the other shares.
    """
    if mpmtl.school() is None:
        print("  school.npz is not there: set COTERIE_DATA to the folder that holds school/")
        return
    table = Table(given, "shares", ["line", "train"])
    (steps,) = published(
        clip=[32.0], lam=[0.03], rounds=[20], acceleration=["on"], spend=[Power(0.4)]
    )
    lines = {
        "single-task": ({"kind": "single", "penalty": "l1", "lam": 0.3}, math.inf),
        "without privacy": (
            {"kind": "dpaggr", "lam": 1e-3, "clip": 100.0, "rows": 251}, math.inf
        ),
        "as published": (steps, 1.0),
        "mpmtl": ({"kind": "mpmtl", "lam": 0.1, "clip": 8.0}, 1.0),
        "mpmtl group_sparse": ({"kind": "mpmtl", "structure": SPARSE, "lam": 0.1}, 1.0),
    }  # fmt: skip
    for share in (0.3,) if given.quick else (0.1, 0.2, 0.3, 0.5, 0.7):
        splits = [school().split(1 - share, seed) for seed in range(given.seeds)]
        for label, (setting, epsilon) in lines.items():

            def row(setting=setting, epsilon=epsilon, splits=splits):
                values = [school_error(setting, epsilon, *s, k) for k, s in enumerate(splits)]
                return {"setting": words(setting)} | mpmtl.summary(values)

            table.row((label, share), row)
    table.finish()


PARTS = {
    "algorithm1": algorithm1, "fig2": fig2, "fig3": fig3, "fig4": fig4, "fig5": fig5, "fig6": fig6,
    "fig7": fig7, "fig8": fig8, "shares": shares,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, thin grids")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    given.seeds = 1 if given.quick else given.seeds
    if given.out is None:
        given.out = Path(tempfile.mkdtemp(prefix="mpmtl-")) if given.quick else OUT
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    for part in given.parts or PARTS:
        print(f"{part}: {PARTS[part].__doc__}")
        PARTS[part](given)


if __name__ == "__main__":
    main()
