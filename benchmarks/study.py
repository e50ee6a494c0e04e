"""The utility study: local training, the default, pmtl and models without privacy, on every set.

    python benchmarks/study.py [SET ...] [--quick] [--epsilon E ...] [--seeds 5] [--jobs 2]
        [--before FILE] [--out FOLDER] [--seconds S]

Sets: the real federations of `benchmarks/pfeb.py` and `benchmarks/local.py`, those that are not
there left out, and all generators `mixed:...` of `coterie.data.synthetic`. Every method has its
defaults, nothing is tuned on test rows, and a seed decides split, rows of a generator, and noise.
The default heeds its verdict, as `coterie run` does: under "learn alone" it is local training and
spends nothing.

- local: every client alone.
- default, pmtl: at each epsilon; with the default the verdict and rounds. pmtl joins always. Panels
  declare their rows per client, which are public there: so many years (`data.rows_per_client`).
- mixed: pfeb without privacy. gbm: scikit-learn's boosted trees on all rows together, for
  regression with an offset per client (its mean residual, shrunk by n / (n + 1)); left out without
  scikit-learn.

Regression: squared errors over those around the mean of all test outcomes. Classes: share of test
rows that are wrong. `harm` is the error of the default over that of local, less 1. `--quick` takes
one seed, epsilons 1 and 4, and small sets: some minutes. `--before` names the study.csv of an
earlier version; its defaults are shown as "before". A finished cell is a line of study.csv; a study
that was interrupted, or that stops after `--seconds`, goes on from there. Cells are in the order of
the sets, one seed after the other, those of wide sets and many classes last. FOLDER gets study.csv
and study.md.
"""

import argparse
import csv
import importlib.util
import math
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.data.federated import DataError
from coterie.data.synthetic import MIXED, mixed
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.auto import Auto
from coterie.methods.baselines import Local
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import advice_for, heed_verdict, resolve
from local import HERE, parts

OUT = Path(__file__).resolve().parent.parent / "docs" / "methods" / "study"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = 5
LONG = ("femnist", "mixed:wide", "mixed:skewed_classes")
"""Sets whose cells take minutes: they come last."""
_SHORT = (*HERE, "landmine", "heart", "har_lite", "digits", *(f"mixed:{kind}" for kind in MIXED))
SETS = (*(name for name in _SHORT if name not in LONG), *LONG)
QUICK = ("exam", "crime4", "landmine", *(f"mixed:{kind}" for kind in MIXED))
QUICK_CLIENTS = 120
YEARS = {"mathpnl": 5, "districts": 5, "wagepan": 6, "airfare": 3, "crime4": 5}
"""Training rows of every client of a panel."""
MOST = 105  # clients of a classification federation
FIELDS = ("set", "seed", "method", "epsilon", "error", "spent", "verdict", "rounds", "seconds")


def rows_of(name, seed, quick):
    """Return training and test rows."""
    if not name.startswith("mixed:"):
        return parts(name, MOST, seed)
    clients = QUICK_CLIENTS if quick else None
    data = mixed(name.removeprefix("mixed:"), clients=clients, seed=seed).data
    return data.split_by_source()


def planned(method, epsilon, seed, spec, rows=None):
    """Return the plan of a method, which heeds a verdict if the method was left to rules."""
    asked = Plan(method=method, privacy=Privacy(epsilon=epsilon), simulation_seed=seed)
    asked = replace(asked, data=replace(asked.data, rows_per_client=rows))
    resolved = resolve(asked, spec)
    return heed_verdict(asked, resolved, spec)


def trained(plan, train, test):
    """Return the error of a plan's models on the test rows."""
    found = evaluate(plan.method.model, simulate(plan, train).rows, test)
    return 1 - found.value if found.higher_is_better else found.value


def boosted(train, test, seed):
    """Return the error of boosted trees on all rows together."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    x, y = train.features.flatten(1).numpy(), train.targets.numpy()
    fresh, truth = test.features.flatten(1).numpy(), test.targets.numpy()
    if train.spec.task != "regression":
        model = HistGradientBoostingClassifier(random_state=seed).fit(x, y)
        return float(np.mean(model.predict(fresh) != truth))
    model = HistGradientBoostingRegressor(random_state=seed).fit(x, y)
    owner = np.repeat(np.arange(len(train)), train.counts)
    left = np.bincount(owner, y - model.predict(x), len(train))
    offset = left / (train.counts + 1)
    guess = model.predict(fresh) + offset[np.repeat(np.arange(len(test)), test.counts)]
    return float(np.mean((truth - guess) ** 2) / np.var(truth))


METHODS = {"local": Local(), "mixed": PFEB(), "default": Auto(), "pmtl": PMTL()}


def cells_of(epsilons):
    """Return methods and epsilons, those first without which others say little."""
    cells = [("local", math.inf), *(("default", epsilon) for epsilon in epsilons)]
    trees = [("gbm", math.inf)] if has_trees() else []
    return [*cells, ("mixed", math.inf), *trees, *(("pmtl", epsilon) for epsilon in epsilons)]


def has_trees():
    """Return whether scikit-learn is there."""
    try:
        return importlib.util.find_spec("sklearn.ensemble") is not None
    except ImportError:
        return False


def measure(name, seed, method, epsilon, quick):
    """Return the line of a cell; None where the method cannot work there."""
    begun = time.perf_counter()
    train, test = rows_of(name, seed, quick)
    line = {"set": name, "seed": seed, "method": method, "epsilon": epsilon, "spent": ""}
    try:
        if method == "gbm":
            error = boosted(train, test, seed) if small(train.spec) else None
        else:
            plan = planned(METHODS[method], epsilon, seed, train.spec, YEARS.get(name))
            error, advice = trained(plan, train, test), advice_for(plan, train.spec)
            line["spent"] = f"{plan.guarantee(train.spec.clients).epsilon:.4g}"
            line["verdict"] = "" if advice is None else advice.verdict
            line["rounds"] = plan.rounds
    except ValueError as told:
        print(f"{name} {method}: {told}", file=sys.stderr)
        return None
    seconds = time.perf_counter() - begun
    return None if error is None else line | {"error": f"{error:.5f}", "seconds": f"{seconds:.1f}"}


def small(spec):
    """Return whether boosted trees take seconds."""
    return spec.features * (spec.outputs if spec.task == "multiclass" else 1) <= 1000


def whole(lines):
    """Return the lines of the seeds that have local training and the default at every epsilon."""
    epsilons = {line["epsilon"] for line in lines if line["method"] == "default"}
    found = defaultdict(set)
    for line in lines:
        if line["method"] in ("local", "default"):
            found[line["set"], line["seed"]].add((line["method"], line["epsilon"]))
    complete = {of for of, cells in found.items() if len(cells) == 1 + len(epsilons) > 1}
    return [one for one in lines if (one["set"], one["seed"]) in complete]


def table(lines, before=()):
    """Return a row per set and epsilon: mean errors over seeds."""
    means, verdicts = defaultdict(list), defaultdict(set)
    for line in lines:
        means[line["set"], line["method"], float(line["epsilon"])].append(float(line["error"]))
        if line["method"] == "default":
            verdicts[line["set"], float(line["epsilon"])].add(line["verdict"])
    old = defaultdict(list)
    for line in before:
        if line["method"] == "default":
            old[line["set"], float(line["epsilon"])].append(float(line["error"]))

    def mean(name, method, epsilon):
        found = means.get((name, method, epsilon))
        return math.nan if not found else float(np.mean(found))

    rows = []
    for name, epsilon in verdicts:
        local, now = mean(name, "local", math.inf), mean(name, "default", epsilon)
        free = min(
            mean(name, one, math.inf) if (name, one, math.inf) in means else math.inf
            for one in ("mixed", "gbm")
        )
        earlier = old.get((name, epsilon))
        rows.append(
            {
                "set": name,
                "epsilon": f"{epsilon:g}",
                "verdict": "/".join(sorted(verdicts[name, epsilon])),
                "local": f"{local:.3f}",
                "before": f"{np.mean(earlier):.3f}" if earlier else "",
                "default": f"{now:.3f}",
                "pmtl": shown(mean(name, "pmtl", epsilon)),
                "mixed": shown(mean(name, "mixed", math.inf)),
                "gbm": shown(mean(name, "gbm", math.inf)),
                "best without privacy": f"{free:.3f}",
                "harm": f"{100 * (now / local - 1):+.1f} %",
            }
        )
    return rows


def by_set(lines, before=()):
    """Return a row per set: errors at all epsilons, the verdicts, and the largest harm."""
    rows, marks = table(lines, before), {"join": "", "small gain": "~", "learn alone": "="}
    seeds = defaultdict(set)
    for line in lines:
        if line["method"] == "default":
            seeds[line["set"]].add(line["seed"])
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = sorted((row for row in rows if row["set"] == name), key=lambda r: float(r["epsilon"]))
        told = [row["default"] + marks.get(row["verdict"], "") for row in own]
        before = next((row["before"] for row in own if row["epsilon"] == "1"), "")
        found.append(
            {
                "set": name.removeprefix("mixed:"),
                "seeds": str(len(seeds[name])),
                "local": own[0]["local"],
                f"default at {'/'.join(row['epsilon'] for row in own)}": " / ".join(told),
                "before at 1": before,
                "pmtl": f"{own[0]['pmtl']} to {own[-1]['pmtl']}",
                "mixed": own[0]["mixed"],
                "gbm": own[0]["gbm"],
                "most harm": max((row["harm"] for row in own), key=lambda h: float(h[:-2])),
            }
        )
    return found


def shown(value):
    """Return an error as text; nothing where it was not measured."""
    return "" if math.isnan(value) else f"{value:.3f}"


def markdown(rows):
    """Return rows as a table of Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def wanted(sets, seeds, epsilons, done):
    """Return the cells that are missing, in the order in which they are measured."""
    found = [
        (one, seed, *cell) for seed in range(seeds) for cell in cells_of(epsilons) for one in sets
    ]
    late = {cell: (cell[0] in LONG) * (1 + (cell[2] == "mixed")) for cell in found}
    return [cell for cell in sorted(found, key=late.__getitem__) if cell not in done]


def key(line):
    return line["set"], int(line["seed"]), line["method"], float(line["epsilon"])


def keep(path, line):
    """Append a line to a table."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(line)


def run(cells, jobs, seconds, quick, path):
    """Measure cells until the time is over, and keep each."""
    begun = time.monotonic()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=fresh) as pool:
        waiting = {pool.submit(measure, *cell, quick): cell for cell in cells}
        try:
            for job in as_completed(waiting, timeout=seconds):
                cell = waiting[job]
                try:
                    line = job.result()
                except DataError as told:
                    print(f"{cell[0]}: left out: {told}", file=sys.stderr)
                    continue
                if line is not None:
                    keep(path, line)
                    took = time.monotonic() - begun
                    print(f"{took:.0f} s {cell} {line['error']}", file=sys.stderr, flush=True)
        except TimeoutError:
            for one in pool._processes.values():
                one.terminate()
            pool.shutdown(wait=False, cancel_futures=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--epsilon", type=float, nargs="+")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float)
    asked = parser.parse_args(argv)
    quick = asked.quick
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes that are begun
    sets = asked.sets or (QUICK if quick else SETS)
    epsilons = asked.epsilon or ((1.0, 4.0) if quick else EPSILONS)
    seeds = asked.seeds or (1 if quick else SEEDS)
    out = asked.out or (Path("study-quick") if quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "study.csv"
    done = {key(line) for line in read(path)} if path.exists() else set()
    run(wanted(sets, seeds, epsilons, done), asked.jobs, asked.seconds, quick, path)
    lines = whole(read(path) if path.exists() else [])
    if not lines:
        raise SystemExit("no seed of a set is complete: give more --seconds")
    rows = markdown(table(lines, read(asked.before) if asked.before else ()))
    short = markdown(by_set(lines, read(asked.before) if asked.before else ()))
    (out / "study.md").write_text(f"{short}\n{rows}")
    print(short)


if __name__ == "__main__":
    main()
