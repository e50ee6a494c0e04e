"""MTL-SVM on a clock, masked, and with a budget: every figure and number of docs/methods/mtlsvm.md.

    python benchmarks/mtlsvm.py [PART ...] [--seeds 5] [--quick] [--out FOLDER]

Parts: clock, constants, fig5 .. fig12, published, ends, seconds, private; all by default. Figures
are numbered as in Ponomarenko-Timofeev et al. Each part writes a CSV, and figures an SVG. A part
that was interrupted goes on where it stood (`*.csv.part`); one that is complete is made anew.
`published` runs the paper's steps as published and draws them into the figures; `ends` is made from
the tables of the figures; `seconds` times MTL-SVM and MOCHA, 64 times each. `--quick` takes two
seeds and fewer rounds, and writes to a temporary folder.

HAR ($COTERIE_DATA, or shared/data beside the repository) is sitting against the rest, the first 20
of 30 subjects, 70 % of the rows for training, a seed deciding the split; "light" keeps 100 of each
client's training rows. The regression simulation is `coterie.data.synthetic`, where a seed decides
everything. Models have no bias, as in the paper. The paper does not give its constants: here they
are chosen for each method and data set on seed 1000 (`constants`).

Every client does one local epoch a round. Curves are means over clients, then over seeds, of the
models as they stand after a round; "end" is after the last solve, in which each client adapts its
own part. All curves of a figure have the same virtual time, so that short rounds are more of them.
Virtual seconds are those of `Stragglers`' defaults: only their ratios mean anything.
"""

import argparse
import csv
import math
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np
import torch

from coterie.core.rng import Rng
from coterie.data.load import Source, load
from coterie.data.scaling import standardise_clients
from coterie.data.synthetic import mtlsvm_regression, synthetic
from coterie.engine.simulate import set_clock, simulate
from coterie.evaluation.history import History
from coterie.evaluation.score import evaluate, noise_to_signal
from coterie.methods.mocha import MOCHA
from coterie.methods.mtlsvm import MTLSVM
from coterie.methods.svm import GlobalSVM, LocalSVM
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import rounds_by_rule
from coterie.planning.stragglers import Stragglers, fit_times, measure
from coterie.solvers.sdca import Losses, fit_joint, take_steps
from mpmtl import canvas, grid_of, save, words

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "methods" / "mtlsvm"
TUNING = 1000
HORIZON = 300  # rounds of the curve that waits for all
MOST_ROUNDS = 2000
PLAIN = Linear(bias=False)


# ---- data ----------------------------------------------------------------------------------------


def shared(name):
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    path = folder / name / f"{name}.npz"
    if not path.exists():
        raise SystemExit(f"{path} is not there: set COTERIE_DATA to the folder that holds {name}/")
    return path


@lru_cache(maxsize=2)
def all_rows(name):
    return load(shared(name), Source(positive=3) if name == "har" else Source(task="binary"))


@lru_cache(maxsize=32)
def federation(name, seed):
    """Training and test rows of one seed."""
    if name.startswith("regression"):
        return mtlsvm_regression(
            unequal=name.endswith(" unequal"), seed=seed
        ).data.split_by_source()
    if name.startswith("synthetic"):
        made = synthetic("mean", clients=300, rows=120, features=8, task=name.split()[1], seed=seed)
        return made.data.split(100, seed)
    if name.startswith("landmine"):
        train, test = all_rows("landmine").split(0.3, seed)
        return standardise_clients(train.at_most(40, seed) if "light" in name else train, test)
    rows = all_rows("har") if name == "har 30" else all_rows("har").first(20)
    train, test = rows.split(0.3, seed)
    return (train.at_most(100, seed), test) if name == "har light" else (train, test)


def quality(model, models, test):
    """Mean over clients of their own balanced accuracy, or R^2."""
    score = evaluate(model, models, test)
    return score.own.get("r2", score.own.get("balanced_accuracy")).value


# ---- tables --------------------------------------------------------------------------------------


class Runs:
    """What runs gave, by name and seed, kept in a `.csv.part` until the part is complete."""

    def __init__(self, given, name):
        self.path = given.out / f"{name}.csv"
        self.part = self.path.with_suffix(".csv.part")
        self.kept = {}
        if self.part.exists():
            with self.part.open(newline="") as file:
                self.kept = {(name, seed): found for name, seed, found in csv.reader(file)}

    def get(self, name, seed, make):
        """Return the numbers of a run, made if they are not there yet: a dict of tuples."""
        key = (name, str(seed))
        if key not in self.kept:
            found = make()
            self.kept[key] = ";".join(
                f"{field}={' '.join(f'{value:.6g}' for value in values)}"
                for field, values in found.items()
            )
            with self.part.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([*key, self.kept[key]])
            print("  ", *key, "|", *(f"{f} {v[-1]:.4g}" for f, v in found.items()), flush=True)
        fields = (field.split("=") for field in self.kept[key].split(";"))
        return {name: tuple(map(float, values.split())) for name, values in fields}

    def finish(self, rows):
        """Write the rows of the part."""
        write(self.path, rows)
        self.part.unlink(missing_ok=True)


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: cell(value) for column, value in row.items()} for row in rows)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cell(value):
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def summary(values):
    """Return mean, standard error over seeds, and the values of the seeds."""
    values = np.asarray(values)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    listed = " ".join(f"{value:.4f}" for value in values)
    return {"value": float(values.mean()), "se": error, "values": listed}


def numbers(row):
    return np.array([float(value) for value in row["values"].split()])


# ---- constants, chosen on another seed -----------------------------------------------------------

DATA = ("har", "har light", "regression", "regression unequal")
CS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
GRIDS = {
    "mtlsvm": grid_of(c1=CS, c2=[0.3, 1.0, 3.0, 10.0, 30.0]),
    "localsvm": grid_of(c=CS),
    "globalsvm": grid_of(c=CS, tol=[0.03]),
    "mocha": grid_of(c1=[0.1, 1.0], lam1=[0.3, 3.0], lam2=[0.01, 0.1]),
}
EVERYWHERE = ("mtlsvm", "localsvm")  # the others are in figure 5 alone
NEAR = 0.001  # the smallest constants so near the best: larger ones take more rounds


def constants(given):
    """Choose the constants of each method and data set on seed 1000."""
    runs, rows = Runs(given, "constants"), []
    for name in DATA if not given.quick else DATA[:1]:
        for kind, whole in GRIDS.items():
            if kind not in EVERYWHERE and name != "har":
                continue
            grid = whole[:: 4 if given.quick else 1]
            found = [
                runs.get(
                    f"{name}, {kind} {words(setting)}",
                    TUNING,
                    lambda name=name, kind=kind, setting=setting: {
                        "value": (converged(name, kind, setting, given),)
                    },
                )["value"][0]
                for setting in grid
            ]
            best = next(at for at, value in enumerate(found) if value >= max(found) - NEAR)
            rows += [
                {"data": name, "method": kind, "setting": words(setting), "value": value,
                 "chosen": "yes" if at == best else ""}
                for at, (setting, value) in enumerate(zip(grid, found, strict=True))
            ]  # fmt: skip
    runs.finish(rows)


def converged(name, kind, setting, given):
    """Score a setting where its method ends (MOCHA with a learnt relation: after the rounds)."""
    train, test = federation(name, TUNING)
    if kind == "mtlsvm":
        return pooled(MTLSVM(**setting), setting["c2"], 1e-3, train, test)[0]
    if kind == "globalsvm":
        return pooled(GlobalSVM(**setting), math.inf, setting["tol"], train, test)[0]
    method = MOCHA(model=PLAIN, relation="learned", **setting) if kind == "mocha" else None
    method = method or LocalSVM(model=PLAIN, **setting)
    rounds = 50 if given.quick else HORIZON
    return quality(PLAIN, simulate(plan_of(method, rounds, 0), train).rows, test)


def pooled(method, c2, tol, train, test):
    """Solve with all rows in one place; give the score and the epochs that it took."""
    everyone = train.clients(np.arange(len(train)))
    keys = Rng.seeded(0).keys(everyone.ids)
    fit = fit_joint(everyone, method.losses(), c2=c2, bias=False, tol=tol, keys=keys)
    models = (fit.shared + fit.own).float()
    return quality(PLAIN, lambda ids: {"weight": models[ids]}, test), fit.epochs


def chosen(given, name, kind):
    """Return the setting that was chosen for a method, as its fields."""
    path = given.out / "constants.csv"
    if not path.exists():
        constants(given)
    for row in read(path):
        if (row["data"], row["method"], row["chosen"]) == (name, kind, "yes"):
            fields = (field.split("=") for field in row["setting"].split())
            return {name: float(value) for name, value in fields}
    return chosen(given, "har", kind)  # a quick look chooses on one data set alone


# ---- the clock -----------------------------------------------------------------------------------


def clock(given):
    """Measure epochs of single clients on this machine, beside the defaults of `Stragglers`."""
    full, _ = federation("har", 0)
    rank = np.arange(full.offsets[-1]) - np.repeat(full.offsets[:-1], full.counts)
    owner = np.repeat(np.arange(len(full)), full.counts)
    train = full.where(rank < 10 * (owner + 1))  # sizes from 10 rows on, to tell slope and constant
    zeros = torch.zeros(1, 1, train.spec.features, dtype=torch.float64)

    def epoch(client):
        one = train.clients(np.array([client]))
        dual = torch.zeros(1, one.longest, 1, dtype=torch.float64)
        take_steps(one, zeros, 20.1, dual, Losses(c1=1.0), keys=Rng.seeded(0).keys(one.ids))

    seconds = measure(epoch, np.arange(len(train)), 3 if given.quick else 50)
    fit = fit_times(train.counts * train.spec.features, seconds)
    usual = Stragglers()
    rows = [{"what": "defaults, used in all figures"}, {"what": "measured, one core of a server"}]
    for row, at in zip(rows, (usual, fit), strict=True):
        typical = at.constant + at.seconds_per_number * 250 * 561
        row |= {"constant": at.constant, "seconds_per_number": at.seconds_per_number}
        row |= {"spread": at.spread, "constant_share_at_250_rows": at.constant / typical}
    write(given.out / "clock.csv", rows)
    for row in rows:
        print("  ", *map(cell, row.values()))


# ---- curves --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A run to watch: its method, how long it waits, and on what hardware."""

    name: str
    method: object
    wait: str = "all"
    hardware: str = "equal"

    def stragglers(self):
        """Return the clock's settings."""
        return Stragglers(wait=self.wait, hardware=self.hardware)


def plan_of(method, rounds, seed):
    return Plan(
        method=method, privacy=Privacy(epsilon=math.inf), rounds=rounds, simulation_seed=seed
    )


def rounds_of(curve, name, given):
    """Return as many rounds as fit into the time of the one that waits for all."""
    train, _ = federation(name, 0)
    plan = plan_of(curve.method, 1, 0)
    clocks = [
        set_clock(one.stragglers(), plan, train) for one in (curve, replace(curve, wait="all"))
    ]
    own, longest = (clock.wait + clock.sum_time for clock in clocks)
    horizon = 20 if given.quick else HORIZON
    return min(MOST_ROUNDS, round(horizon * longest / own))


def marks(rounds):
    """Choose the rounds that are scored, about 20 to a curve."""
    return sorted({*np.unique(np.rint(np.geomspace(1, rounds, 20)).astype(int)).tolist(), rounds})


def follow(curve, name, seed, given):
    """Run one curve; give its rounds, virtual seconds, scores, share of answers and its end."""
    train, test = federation(name, seed)
    rounds = rounds_of(curve, name, given)
    looks, answers = set(marks(rounds)), []
    history = History(curve.method, train, test)

    def watch(progress):
        answers.append(progress.answered)
        if progress.round in looks:
            history(progress)

    outcome = simulate(
        plan_of(curve.method, rounds, seed), train, observe=watch, stragglers=curve.stragglers()
    )
    column = "balanced_accuracy" if train.spec.task == "binary" else "r2"
    return {
        "round": [line["round"] for line in history.lines],
        "seconds": [line["seconds"] for line in history.lines],
        "value": [line[column] for line in history.lines],
        "answered": [float(np.mean(answers)) / len(train)],
        "end": [quality(PLAIN, outcome.rows, test)],
        "gap": [math.nan if outcome.gap is None else outcome.gap],
    }


def still(method, name, seed):
    """Score what has no rounds; a joint machine also has the virtual seconds of its epochs."""
    train, test = federation(name, seed)
    if not isinstance(method, GlobalSVM):
        outcome = simulate(plan_of(method, 1, seed), train)
        return {"end": [quality(PLAIN, outcome.rows, test)], "seconds": [math.nan]}
    value, epochs = pooled(method, math.inf, method.tol, train, test)
    epoch = Stragglers().pooled_epoch_time(train.counts, train.spec.features)
    return {"end": [value], "seconds": [epochs * epoch]}


def draw_figure(given, number, name, curves, lines=(), panels=None):
    """Run the curves and the still ones, write the table and the plot."""
    runs, seeds, rows = Runs(given, number), range(given.seeds), []
    for label, method in lines:
        found = [
            runs.get(label, seed, lambda m=method, s=seed: still(m, name, s)) for seed in seeds
        ]
        seconds = float(np.mean([one["seconds"][0] for one in found]))
        row = {"curve": label, "round": "end", "seconds": seconds, "answered": "", "gap": ""}
        rows.append(row | summary([one["end"][0] for one in found]))
    for curve in curves:
        found = [
            runs.get(curve.name, seed, lambda c=curve, s=seed: follow(c, name, s, given))
            for seed in seeds
        ]
        share = float(np.mean([one["answered"][0] for one in found]))
        means = np.mean([one["seconds"] for one in found], axis=0).tolist()
        for at, seconds in enumerate(means):
            row = {"curve": curve.name, "round": int(found[0]["round"][at]), "seconds": seconds}
            row |= {"answered": share, "gap": ""}
            rows.append(row | summary([one["value"][at] for one in found]))
        row = {"curve": curve.name, "round": "end", "seconds": means[-1], "answered": share}
        row["gap"] = float(np.mean([one["gap"][0] for one in found]))
        rows.append(row | summary([one["end"][0] for one in found]))
    runs.finish(rows)
    plot(runs.path, name, panels or {"": [curve.name for curve in curves]})


def mtlsvm(given, name, **fields):
    setting = chosen(given, name, "mtlsvm")
    return MTLSVM(model=PLAIN, epochs=1, stop=1e-12, **setting, **fields)


def waits(given, number, name, hardware, shares):
    """Draw MTL-SVM with several waiting times."""
    method = mtlsvm(given, name)
    shown = {wait: "all" if wait == "all" else wait.replace("%", " %") for wait in shares}
    curves = [Curve(shown[wait], method, wait, hardware) for wait in shares]
    draw_figure(given, number, name, curves, alone(given, name))


def alone(given, name):
    return [("Local", LocalSVM(model=PLAIN, **chosen(given, name, "localsvm")))]


def fig5(given):
    """HAR, everybody waited for: one machine for all, alone, MOCHA and MTL-SVM."""
    own, learnt = mtlsvm(given, "har"), chosen(given, "har", "mocha")
    mean = MOCHA(model=PLAIN, c1=own.c1, c2=own.c2, stop=1e-12)
    curves = [
        Curve("MTL-SVM", own),
        Curve("MTL-SVM, average", replace(own, gamma="average")),
        Curve("MOCHA, mean", mean),
        Curve("MOCHA, learned", MOCHA(model=PLAIN, relation="learned", **learnt)),
    ]
    pooled = ("Global", GlobalSVM(model=PLAIN, **chosen(given, "har", "globalsvm")))
    draw_figure(given, "fig5", "har", curves, [pooled, *alone(given, "har")])


def fig6(given):
    """HAR, equal hardware, by how many are waited for."""
    waits(given, "fig6", "har", "equal", ("all", "75%", "45%", "25%", "10%"))


def fig7(given):
    """HAR, spread hardware, by how many are waited for."""
    waits(given, "fig7", "har", "spread", ("all", "75%", "45%", "20%"))


def fig8(given):
    """Regression, equal data, equal hardware."""
    waits(given, "fig8", "regression", "equal", ("all", "45%", "25%", "10%"))


def fig9(given):
    """Regression, unequal data, equal hardware."""
    waits(given, "fig9", "regression unequal", "equal", ("all", "45%", "25%", "10%"))


def fig10(given):
    """Regression, unequal data, spread hardware."""
    waits(given, "fig10", "regression unequal", "spread", ("all", "75%", "45%", "20%"))


def masks(given, number, law):
    """Draw masks of a law, as step sizes and as published: (a) on all rows, (b) on 100 a client."""
    word = "keep" if law == "bernoulli" else "untouched"
    for part, name in (("a", "har"), ("b", "har light")):
        curves = [Curve("no mask", mtlsvm(given, name))]
        for kind, shares in (("step", (0.75, 0.5, 0.25)), ("paper", (0.5, 0.25))):
            said = "" if kind == "step" else ", as printed"
            for share in shares:
                own = {"mask_keep": share} if law == "bernoulli" else {"mask_untouched": share}
                method = mtlsvm(given, name, mask=kind, mask_law=law, **own)
                curves.append(Curve(f"{word} {share:g}{said}", method))
        draw_figure(given, f"{number}{part}", name, curves, alone(given, name))


def fig11(given):
    """HAR, Bernoulli masks: (a) all rows, (b) 100 rows a client."""
    masks(given, "fig11", "bernoulli")


def fig12(given):
    """HAR, Beta masks: (a) all rows, (b) 100 rows a client."""
    masks(given, "fig12", "beta")


# ---- the steps as published ---------------------------------------------------------------------

PANELS = {
    "har": ("fig5", "fig6", "fig7", "fig11a", "fig12a"),
    "har light": ("fig11b", "fig12b"),
    "regression": ("fig8",),
    "regression unequal": ("fig9", "fig10"),
}


def published(given):
    """Steps (13), (14) and (27), sums and line 15 as published: rounds, scores, norm of w."""
    runs, rows = Runs(given, "published"), []
    for name in DATA if not given.quick else DATA[:1]:
        for update in ("replace", "add"):
            c2 = chosen(given, name, "mtlsvm")["c2"]
            plan = MTLSVM.published(rounds=HORIZON, update=update, c2=c2)
            found = [
                runs.get(f"{name} {update}", seed, lambda p=plan, n=name, s=seed: grown(p, n, s))
                for seed in range(given.seeds)
            ]
            for at in range(min(len(one["value"]) for one in found)):
                row = {"data": name, "update": update, "round": at + 1}
                row["norm"] = float(np.mean([one["norm"][at] for one in found]))
                row["seconds"] = float(np.mean([one["seconds"][at] for one in found]))
                rows.append(row | summary([one["value"][at] for one in found]))
    runs.finish(rows)
    redraw(given)


def redraw(given):
    """Draw the figures from their tables, with the steps as published."""
    for name, figures in PANELS.items():
        for path in (given.out / f"{figure}.csv" for figure in figures):
            if path.exists():
                plot(path, name, {"": list(curves_of(path))})


def curves_of(path):
    """Return the names of the curves of a figure, in order."""
    rows = [row for row in read(path) if row["curve"] not in ("Local", "Global")]
    return dict.fromkeys(row["curve"] for row in rows)


def grown(plan, name, seed):
    """Return the score, the norm of w and the virtual seconds of every round until it diverges."""
    train, test = federation(name, seed)
    history, norms = History(plan.method, train, test), []

    def watch(progress):
        history(progress)
        norms.append(float(progress.shared["weight"].norm()))

    simulate(replace(plan, simulation_seed=seed), train, observe=watch, stragglers=Stragglers())
    column = "balanced_accuracy" if train.spec.task == "binary" else "r2"
    return {
        "value": [line[column] for line in history.lines],
        "seconds": [line["seconds"] for line in history.lines],
        "norm": norms,
    }


def seconds(given):
    """Time MTL-SVM and MOCHA on HAR to a relative gap of .1, in seconds of one CPU core."""
    runs, rows, own = Runs(given, "seconds"), [], mtlsvm(given, "har")
    methods = {
        "MTL-SVM": replace(own, epochs=20, stop=0.1),
        "MOCHA, mean": MOCHA(model=PLAIN, c1=own.c1, c2=own.c2, epochs=20, stop=0.1),
    }
    for name, method in methods.items():
        simulate(plan_of(method, 2, 0), federation("har", 0)[0])  # compiles
        found = [
            runs.get(name, seed, lambda m=method, s=seed: timed(m, s))
            for seed in range(2 if given.quick else 64)
        ]
        for what in ("seconds", "rounds", "gap"):
            values = np.array([one[what][0] for one in found])
            deviation = float(values.std(ddof=1))
            rows.append({"method": name, "what": what, "mean": float(values.mean()),
                         "sd": deviation, "repetitions": len(values)})  # fmt: skip
    runs.finish(rows)
    for row in rows:
        print("  ", *map(cell, row.values()))


def timed(method, seed):
    """Return the CPU seconds of a training on the split of a seed, its rounds and its gap."""
    train, _ = federation("har", seed % 5)
    started = time.process_time()
    outcome = simulate(plan_of(method, 1000, seed), train)
    taken = time.process_time() - started
    return {"seconds": [taken], "rounds": [len(outcome.posts)], "gap": [outcome.gap]}


# ---- ends ---------------------------------------------------------------------------------------

EARLY = 20  # the share of a figure's time at which curves are compared early on: one over this


def ends(given):
    """Where every curve ends, where it is early on, and how soon it is near the first one's end."""
    rows = []
    parts = [str(n) for n in range(5, 11)] + ["11a", "11b", "12a", "12b"]
    for number in (f"fig{part}" for part in parts):
        path = given.out / f"{number}.csv"
        rows += compare(number, read(path)) if path.exists() else []
    write(given.out / "ends.csv", rows)


def compare(number, points):
    """Return a row for every curve of a figure."""
    own = {name: [p for p in points if p["curve"] == name] for name in {p["curve"] for p in points}}
    names = dict.fromkeys(p["curve"] for p in points)
    first = own[next(name for name in names if len(own[name]) > 1)][:-1]
    level, time = float(first[-1]["value"]) - 0.01, float(first[-1]["seconds"])
    for name in names:
        *curve, end = own[name]
        gap = summary(numbers(end) - numbers(own["Local"][0]))
        row = {"figure": number, "curve": name, "answered": end["answered"]}
        row |= {"rounds": curve[-1]["round"] if curve else "", "seconds": end["seconds"]}
        x, y = ([float(p[c]) for p in curve] for c in ("seconds", "value"))
        early = float(np.interp(math.log(time / EARLY), np.log(x), y)) if curve else ""
        row |= {"early_seconds": time / EARLY, "early": early}
        row |= {c: curve[-1][c] if curve else "" for c in ("value", "se")}
        row |= {"gap": end["gap"], "end": end["value"], "end_se": end["se"]}
        row |= {"end_less_local": gap["value"], "end_less_local_se": gap["se"]}
        near = next((p for p in curve if float(p["value"]) >= level), {})
        yield row | {f"{c}_to_near": near.get(c, "") for c in ("round", "seconds")}


# ---- with a budget -------------------------------------------------------------------------------

BUDGETS = (1.0, 3.0, 8.0)
PRIVATE = {
    "har 30": {},
    "landmine": {"class_weight": "balanced"},
    "landmine light": {"class_weight": "balanced"},
    "synthetic binary": {},
    "synthetic regression": {},
}


def private(given):
    """MTL-SVM with its defaults and a budget, against learning alone and no privacy."""
    runs, rows = Runs(given, "private"), []
    for name, fields in PRIVATE.items():
        method = MTLSVM(**fields)
        grid = [(c, replace(method.baselines().local, c=c)) for c in CS[:: 4 if given.quick else 1]]
        tried = [
            runs.get(
                f"{name} c={c:g}",
                TUNING,
                lambda one=one, name=name: spend(one, math.inf, name, TUNING, given),
            )
            for c, one in grid
        ]
        best = grid[int(np.argmax([one["value"][0] for one in tried]))]
        kinds = [
            ("alone", method.baselines().local, math.inf),
            (f"alone, C {best[0]:g}", best[1], math.inf),
        ]
        kinds.append(("without privacy", method, math.inf))
        kinds += [("mtlsvm", method, epsilon) for epsilon in BUDGETS]
        kinds.append(("mtlsvm, shrink false", replace(method, shrink=False), BUDGETS[0]))
        found = {}
        for kind, one, epsilon in kinds:
            found[kind, epsilon] = [
                runs.get(
                    f"{name} {kind} {epsilon:g}",
                    seed,
                    lambda one=one, epsilon=epsilon, name=name, seed=seed: spend(
                        one, epsilon, name, seed, given
                    ),
                )
                for seed in range(given.seeds)
            ]
        rows += (
            {"data": name, "what": kind, "epsilon": epsilon} | spent(some, list(found.values()))
            for (kind, epsilon), some in found.items()
        )
    runs.finish(rows)


def spent(runs, found):
    """Sum up the runs of one budget, beside those alone and those alone with the C chosen."""
    columns = ("delta", "rounds", "clip", "noise_to_signal")
    row = {column: float(np.mean([run[column][0] for run in runs])) for column in columns}
    values, alone, chosen_c = ([run["value"][0] for run in some] for some in (runs, *found[:2]))
    areas, row = summary([run["auc"][0] for run in runs]), row | summary(values)
    for said, against in (("alone", alone), ("chosen", chosen_c)):
        gap = summary(np.subtract(values, against))
        row |= {f"less_{said}": gap["value"], f"less_{said}_se": gap["se"]}
    return row | {"auc": areas["value"], "auc_se": areas["se"]}


def spend(method, epsilon, name, seed, given):
    train, test = federation(name, seed)
    privacy = Privacy(epsilon=epsilon)
    rounds = rounds_by_rule(method, privacy, train.spec)
    if epsilon == math.inf:
        rounds = min(rounds, 20 if given.quick else 100)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=seed)
    outcome = simulate(plan, train)
    score = evaluate(method.model, outcome.rows, test)
    ratio = noise_to_signal(outcome)[0] if epsilon < math.inf else 0.0
    return {
        "value": [score.own.get("r2", score.own.get("balanced_accuracy")).value],
        "auc": [score.own["auc"].value if "auc" in score.own else math.nan],
        "rounds": [len(outcome.posts)],
        "delta": [plan.delta(len(train))],
        "clip": [plan.clip(len(train)) if epsilon < math.inf else math.nan],
        "noise_to_signal": [ratio],
    }


# ---- drawing, and the command line ---------------------------------------------------------------

COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown")


def plot(table, name, panels):
    """Draw a table: against virtual seconds and, where there is one panel, against rounds."""
    rows = read(table)
    sides = [(title, names, "seconds") for title, names in panels.items()]
    if len(sides) == 1:
        sides.append((*sides[0][:2], "round"))
    figure, axes = canvas(1, 2, height=3.8 if len(panels) > 1 else 3.2)
    for axis, (title, names, column) in zip(axes, sides, strict=True):
        for at, curve in enumerate(names):
            printed = curve.endswith("as printed")
            look = {"color": COLOURS[at - 2 if printed else at], "linewidth": 1.2}
            draw(axis, rows, curve, column, look | {"linestyle": "--" if printed else "-"})
        lines = [row for row in rows if row["curve"] in ("Global", "Local")]
        for row, line in zip(lines, ("--", ":"), strict=False):
            look = {"color": "0.35", "linestyle": line, "linewidth": 1}
            axis.axhline(float(row["value"]), label=row["curve"], **look)
        axis.set(xscale="log", title=title)
        axis.set_xlabel("virtual seconds" if column == "seconds" else "round")
    axes[0].set_ylabel("R²" if name.startswith("regression") else "balanced accuracy")
    values = [float(row["value"]) for row in rows]
    for axis, (*_, column) in zip(axes, sides, strict=True):
        axis.set_ylim(np.quantile(values, 0.15) - 0.02, max(values) + 0.01)
        draw_published(axis, table, name, column)
        if len(panels) > 1:
            axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        else:
            axis.legend(fontsize=7, loc="lower right")
    save(figure, table.with_suffix(".svg"))


def draw_published(axis, table, name, column):
    """Draw the paper's steps until they diverge, if they were run; at the bottom if below it."""
    path = table.with_name("published.csv")
    rows = read(path) if path.exists() else []
    mine = [row for row in rows if (row["data"], row["update"]) == (name, "replace")]
    if mine:
        x, y = ([float(row[c]) for row in mine] for c in (column, "value"))
        bottom, top = axis.get_ylim()
        y = np.maximum(y, bottom + 0.01 * (top - bottom))
        axis.plot(x, y, ":", color="black", linewidth=1.6, label="as published (diverges)")


def draw(axis, rows, curve, column, look):
    """Draw a curve with its standard errors, and a cross where it ends after the last solve."""
    *points, end = (row for row in rows if row["curve"] == curve)
    x, y, e = (np.array([float(row[c]) for row in points]) for c in (column, "value", "se"))
    axis.plot(x, y, label=curve, **look)
    axis.fill_between(x, y - e, y + e, color=look["color"], alpha=0.12, linewidth=0)
    axis.plot(x[-1], float(end["value"]), "x", color=look["color"], markersize=4)


PARTS = {
    "clock": clock,
    "constants": constants,
    "fig5": fig5,
    "fig6": fig6,
    "fig7": fig7,
    "fig8": fig8,
    "fig9": fig9,
    "fig10": fig10,
    "fig11": fig11,
    "fig12": fig12,
    "published": published,
    "ends": ends,
    "seconds": seconds,
    "private": private,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds, fewer rounds")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    given.seeds = 2 if given.quick else given.seeds
    if given.out is None:
        given.out = Path(tempfile.mkdtemp(prefix="mtlsvm-")) if given.quick else OUT
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # matrices are small: more threads only wait for one another
    numba.set_num_threads(1)
    for part in given.parts or PARTS:
        print(f"{part}: {PARTS[part].__doc__}")
        PARTS[part](given)


if __name__ == "__main__":
    main()
