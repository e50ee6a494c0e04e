"""Local training against scikit-learn's own cross-validated fit of every client.

    python benchmarks/local.py [FEDERATION ...] [--splits 2] [--most 20] [--out FILE]

Every gain of joining is measured against `local`, so it must be as strong as what a client could
do with the usual tools: `RidgeCV` for regression, and for classes `LogisticRegression` with the C
of the least cross-validated error, both with an intercept without penalty. Both sides see the same
scaled inputs and the same split.

Regression: mean squared error of all test rows over their variance. Classes: share of test rows
that are wrong. `--most` clients of each classification federation are taken, since scikit-learn
takes seconds per client there. femnist30 has 30 training rows per writer.

Regression federations are those of `benchmarks/pfeb.py`, where their constants are declared; the
others need $COTERIE_DATA, or shared/data beside the repository. Those that are not there are left
out.
"""

import argparse
import csv
import math
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from coterie.data.datasets import digits
from coterie.data.federated import DataError
from coterie.data.load import from_arrays
from coterie.data.scaling import standardise_clients
from coterie.engine.simulate import simulate
from coterie.evaluation.predict import predict
from coterie.methods.baselines import Local
from coterie.planning.plan import Plan, Privacy
from pfeb import HERE, ROOT

OUT = ROOT / "docs" / "methods" / "local.csv"
CLASSES = ("landmine", "heart", "har_lite", "har", "digits", "femnist", "femnist30")
ALPHAS = np.logspace(-3, 4, 22)
CS = np.logspace(-4, 4, 9)
FOLDS = 4
METHODS = {"local": Local()}


def classes(name, most, seed):
    """Return the rows of at most so many clients, the most of whose rows are declared as tests."""
    if name == "digits":
        return digits()
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    source = "femnist" if name.startswith("femnist") else name
    path = folder / source / f"{source}.npz"
    if not path.exists():
        raise DataError(f"{path} is not there: set COTERIE_DATA to the folder that holds {source}/")
    with np.load(path) as arrays:
        rows, targets, owners = arrays["X"], arrays["y"], arrays["client"]
    rows = rows.astype(np.float32).reshape(len(rows), -1)
    if source == "femnist":
        rows /= 255  # LEAF: white paper is 1
    counts = np.bincount(owners)
    known = np.flatnonzero(counts >= 40)
    chosen = np.random.default_rng(seed).permutation(known)[:most]
    kept = np.isin(owners, chosen)
    if name == "heart":
        for client in chosen:
            own = owners == client
            middle = np.nan_to_num(np.nanmedian(rows[own], axis=0))
            rows[own] = np.where(np.isnan(rows[own]), middle, rows[own])
    several = len(np.unique(targets)) > 2
    data = from_arrays(
        rows[kept],
        targets[kept],
        owners[kept],
        task="multiclass" if several else "binary",
        classes=int(targets.max()) + 1 if several else None,
        title=name,
    )
    return data


def parts(name, most, seed):
    """Return training and test rows."""
    if name in HERE:
        federation = HERE[name]
        return federation.open().split(federation.test, seed)
    data = classes(name, most, seed)
    train, test = data.split(0.25, seed)
    if name == "femnist30":
        keep = np.concatenate([np.arange(n) < 30 for n in train.counts])
        train = train.where(keep)
    if name in ("heart", "landmine", "har_lite"):
        return standardise_clients(train, test)
    return train, test


def rows_of(data, client):
    at = slice(data.offsets[client], data.offsets[client + 1])
    x = data.features[at].flatten(1).double().numpy()
    return x, data.targets[at].double().numpy()


def scikit(task, x, y):
    """Fit one client with its own cross-validation."""
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import GridSearchCV, KFold

    if task == "regression":
        return (RidgeCV(alphas=ALPHAS) if len(y) > 2 else DummyRegressor()).fit(x, y)
    y = y.astype(int)
    if len(np.unique(y)) < 2:
        return DummyClassifier().fit(x, y)
    folds = KFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=300), {"C": CS}, cv=folds)
    with warnings.catch_warnings():  # folds with one class, and steps that are not at the end
        warnings.simplefilter("ignore")
        return search.fit(x, y)


def scores(name, most, seed):
    """Return errors and seconds of scikit-learn and of ours."""
    train, test = parts(name, most, seed)
    task, truth = train.spec.task, test.targets.double().numpy()
    begun, found = time.perf_counter(), []
    for client in range(len(train)):
        (x, y), (fresh, _) = rows_of(train, client), rows_of(test, client)
        if len(fresh):
            found.append(scikit(task, x, y).predict(fresh))
    result = {"scikit-learn": (np.concatenate(found), time.perf_counter() - begun)}
    for label, method in METHODS.items():
        begun = time.perf_counter()
        plan = Plan(
            method=method, privacy=Privacy(epsilon=math.inf), rounds=1, simulation_seed=seed
        )
        outcome = simulate(plan, train)
        answers = np.concatenate(predict(outcome, test))
        result[label] = (answers.reshape(-1), time.perf_counter() - begun)
    return {label: (error(task, truth, got), took) for label, (got, took) in result.items()}


def error(task, truth, found):
    if task == "regression":
        return float(np.mean((truth - found) ** 2) / np.var(truth))
    return float(np.mean(truth != found))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("federations", nargs="*", default=[*HERE, *CLASSES])
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines = []
    for name in asked.federations:
        try:
            found = [scores(name, asked.most, seed) for seed in range(asked.splits)]
        except DataError as told:
            print(f"{name}: {told}", file=sys.stderr)
            continue
        means = {k: np.mean([one[k] for one in found], axis=0) for k in found[0]}
        lines += [
            {"federation": name, "method": k, "error": f"{e:.4f}", "seconds": f"{s:.2f}"}
            for k, (e, s) in means.items()
        ]
        told = "  ".join(f"{k} {e:.3f} ({s:.1f} s)" for k, (e, s) in means.items())
        print(f"{name:<12} {told}", flush=True)
    if asked.out:
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
