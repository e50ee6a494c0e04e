"""PP-SGD against PMTL on linear models, by epsilon; baselines: local training, no privacy.

    python benchmarks/ppsgd.py [--seeds 5] [--quick] [--out FOLDER]

Hu, Wu, Smith (Figure 8) find PP-SGD worse than PMTL for epsilon < 1 and alike above, on tags of
StackOverflow. Here:

- `landmine` ($COTERIE_DATA, or shared/data beside the repository): 29 fields, 9 features, mines are
  rare, so the score is the mean over clients of their own AUC; 80 training rows a client, features
  standardised by each client alone. PMTL with the two kinds of ground as public clusters too.
- `tags`, made here: 1,000 writers of 40 posts, a quarter of them for training, each post a bag of
  12 words out of 100 with one of 8 tags. A tag has its own words, a writer its own dialect (weights
  of words) and its own favourite tags. Rows are sparse and of unit length; the score is accuracy.

A seed decides the split (and the posts) and the noise. Rounds, clip, and lam or share are chosen
for every method and epsilon on seeds of their own, which the budget does not pay for: this compares
methods at their best. Local steps are the same for all. Prints tables, and writes ppsgd.csv and
ppsgd.svg.
"""

import argparse
import csv
import itertools
import math
import os
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np
import torch
from scipy import sparse

from coterie.data.federated import FederatedDataset, Spec
from coterie.data.load import Source, load
from coterie.data.scaling import standardise_clients
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.pmtl import PMTL
from coterie.methods.ppsgd import PPSGD
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sgd import SGD
from mpmtl import canvas, plain_ticks, save

ROOT = Path(__file__).resolve().parent.parent
EPSILONS = (0.1, 0.3, 1.0, 2.0, 4.0)
TUNING = {"landmine": (1000, 1001, 1002, 1003), "tags": (1000,)}
ROUNDS, FREELY = {"landmine": (1, 3, 15), "tags": (15, 40)}, 40  # with a budget, and without
CLIPS = {"landmine": (0.1, 0.3, 1.0), "tags": (2.0, 8.0)}
LAMS = {"landmine": (0.01, 0.1, 1.0), "tags": (0.1, 0.3, 1.0)}
SHARES = {"landmine": (0.2, 0.5, 0.8, 0.95), "tags": (0.8, 0.95, 0.99)}
STEPS = {"landmine": SGD(lr=0.1, epochs=5), "tags": SGD(lr=2.0, epochs=5)}
LAST = 30  # epochs of the last steps, for all
GROUNDS = (0,) * 15 + (1,) * 14


# ---- data ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def landmine():
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    path = folder / "landmine" / "landmine.npz"
    if not path.exists():
        raise SystemExit(f"{path} is not there: set COTERIE_DATA to the folder that holds landmine")
    return load(path, Source(task="binary"))


def tags(seed, writers=1000, posts=40, words=100, kinds=8, length=12):
    """Writers of posts: bags of words, one tag each."""
    coins = np.random.default_rng(seed)
    topics = coins.dirichlet(np.full(words, 0.1), size=kinds)
    favourites = coins.dirichlet(np.full(kinds, 1.0), size=writers)
    labels = np.stack([coins.choice(kinds, size=posts, p=own) for own in favourites])
    counts = np.empty((writers, posts, words))
    for writer in range(writers):
        dialect = (topics + 0.005) * np.exp(0.7 * coins.normal(size=(kinds, words)))
        dialect /= dialect.sum(axis=1, keepdims=True)
        counts[writer] = coins.multinomial(length, dialect[labels[writer]])
    rows = counts.reshape(-1, words)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return FederatedDataset(
        Spec((words,), kinds, "multiclass", writers),
        [f"writer {k}" for k in range(writers)],
        np.arange(writers + 1) * posts,
        sparse.csr_matrix(rows.astype(np.float32)),
        torch.from_numpy(labels.reshape(-1)),
    )


@lru_cache(maxsize=8)
def federation(name, seed):
    if name == "tags":
        return tags(seed).split(0.75, seed)
    train, test = landmine().split(0.3, seed)
    return standardise_clients(train.at_most(80, seed), test)


# ---- methods -------------------------------------------------------------------------------------


def candidates(name, quick):
    """Return the settings that are tried, by method."""
    sgd = STEPS[name]
    pmtl = [PMTL(lam=lam, sgd=sgd, last_epochs=LAST) for lam in LAMS[name]]
    ppsgd = [PPSGD(share=share, sgd=sgd, last_epochs=LAST) for share in SHARES[name]]
    found = {"PMTL": pmtl, "PP-SGD": ppsgd}
    if name == "landmine":
        found["PMTL, two grounds"] = [replace(one, clusters=GROUNDS) for one in pmtl]
    return {kind: some[1:2] if quick else some for kind, some in found.items()}


def score(method, name, seed, epsilon, rounds, clip):
    train, test = federation(name, seed)
    privacy = Privacy(epsilon=epsilon, clip=clip)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=seed)
    found = evaluate(method.model, simulate(plan, train).rows, test)
    return found.own["auc"].value if "auc" in found.own else found.value


def choose(methods, name, epsilon, given):
    """Find the best of method, rounds and clip on the seeds kept for this."""
    clips = CLIPS[name] if epsilon < math.inf else (1.0,)
    rounds = ROUNDS[name][:1] if given.quick else ROUNDS[name]
    if epsilon == math.inf:
        rounds = (FREELY,)
    tried = list(itertools.product(methods, rounds, clips))
    values = [
        np.mean([score(method, name, seed, epsilon, *rest) for seed in TUNING[name]])
        for method, *rest in tried
    ]
    return tried[int(np.argmax(values))]


def alone(name, given):
    """Find the best ridge of local training."""
    sgd = replace(STEPS[name], epochs=LAST)
    methods = [Local(lam=lam, sgd=sgd) for lam in (0.0003, 0.003, *LAMS[name])]
    return choose(methods[:1] if given.quick else methods, name, math.inf, given)


# ---- tables --------------------------------------------------------------------------------------


def summary(values):
    values = np.asarray(values)
    spread = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(spread)


def table(name, given):
    """Run everything on one data set; give rows of the CSV."""
    seeds, rows, values = range(given.seeds), [], {}
    plans = {("local", math.inf): alone(name, given)}
    for (kind, methods), epsilon in itertools.product(
        candidates(name, given.quick).items(), (*EPSILONS, math.inf)
    ):
        plans[kind, epsilon] = choose(methods, name, epsilon, given)
    for (kind, epsilon), (method, rounds, clip) in plans.items():
        own = [score(method, name, seed, epsilon, rounds, clip) for seed in seeds]
        values[kind, epsilon] = np.array(own)
        value, error = summary(own)
        row = {"data": name, "method": kind, "epsilon": epsilon, "value": value, "se": error}
        gap = values[kind, epsilon] - values["local", math.inf]
        row |= dict(zip(("less_local", "less_local_se"), summary(gap), strict=True))
        beside = values.get(("PMTL", epsilon)) if kind != "local" else None
        gap = (math.nan, math.nan) if beside is None else summary(values[kind, epsilon] - beside)
        row |= dict(zip(("less_pmtl", "less_pmtl_se"), gap, strict=True))
        setting = method.share if isinstance(method, PPSGD) else method.lam
        private = epsilon < math.inf
        row |= {"setting": setting, "rounds": rounds, "clip": clip if private else ""}
        rows.append(row)
    return rows


def say(rows):
    """Print a data set's rows as a table by epsilon, differences to PMTL behind."""
    kinds = list(dict.fromkeys(row["method"] for row in rows))
    epsilons = (*EPSILONS, math.inf)
    print(f"| {rows[0]['data']} | " + " | ".join(f"{e:g}" for e in epsilons) + " |")
    print("|---" * (len(epsilons) + 1) + "|")
    found = {(row["method"], row["epsilon"]): row for row in rows}
    for kind in kinds:
        cells = [found.get((kind, e)) for e in epsilons]
        said = ["" if c is None else f"{c['value']:.3f} ({c['se']:.3f})" for c in cells]
        print(f"| {kind} | " + " | ".join(said) + " |")
    cells = [found["PP-SGD", e] for e in epsilons]
    said = [f"{c['less_pmtl']:+.3f} ({c['less_pmtl_se']:.3f})" for c in cells]
    print("| PP-SGD minus PMTL | " + " | ".join(said) + " |\n")


def plot(rows, path):
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = canvas(1, len(names))
    looks = {"PMTL": "tab:blue", "PP-SGD": "tab:orange", "PMTL, two grounds": "tab:green"}
    for axis, name in zip(axes, names, strict=True):
        own = [row for row in rows if row["data"] == name]
        for kind, colour in looks.items():
            some = [row for row in own if row["method"] == kind]
            if not some:
                continue
            curve = [row for row in some if row["epsilon"] < math.inf]
            x, y, e = ([row[c] for row in curve] for c in ("epsilon", "value", "se"))
            axis.errorbar(x, y, e, color=colour, label=kind, marker="o", markersize=3, capsize=2)
            free = next(row for row in some if row["epsilon"] == math.inf)
            axis.axhline(free["value"], color=colour, linestyle="--", linewidth=0.8)
        local = next(row for row in own if row["method"] == "local")
        axis.axhline(local["value"], color="0.35", linestyle=":", label="local")
        axis.set(xscale="log", title=name, xlabel="epsilon")
        axis.set_ylabel("mean AUC" if name == "landmine" else "accuracy")
        plain_ticks(axis)
        axis.legend(fontsize=7)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds, no grids")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    given.seeds = 2 if given.quick else given.seeds
    out = Path(tempfile.mkdtemp(prefix="ppsgd-")) if given.out is None else given.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # models are small: more threads only wait for one another
    numba.set_num_threads(1)
    rows = []
    for name in STEPS:
        rows += table(name, given)
        train = federation(name, 0)[0]
        delta = Plan(method=PMTL(), privacy=Privacy(epsilon=1.0)).delta(len(train))
        print(f"{name}: {len(train)} clients, delta {delta:g}, {given.seeds} seeds\n")
        say([row for row in rows if row["data"] == name])
    with (out / "ppsgd.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"  wrote {out / 'ppsgd.csv'}")
    plot(rows, out / "ppsgd.svg")


if __name__ == "__main__":
    main()
