"""The utility study: local training, the default, pmtl and models without privacy, on every set.

    python benchmarks/study.py [SET ...] [--quick] [--epsilon E ...] [--seeds 5] [--jobs 2]
        [--before FILE] [--out FOLDER]

Sets: the real federations of `benchmarks/pfeb.py` and `benchmarks/local.py`, those that are not
there left out, and all generators `mixed:...` of `coterie.data.synthetic`. Every method has its
defaults, nothing is tuned on test rows, and a seed decides split, rows of a generator, and noise.
The default heeds its verdict, as `coterie run` does: under "learn alone" it is local training and
spends nothing.

- local: every client alone.
- default, pmtl: at each epsilon; with the default the verdict and rounds. pmtl joins always. Panels
  declare their rows per client, which are public there: so many years (`data.rows_per_client`).
- spline: the default with `--basis spline`, at epsilons 1 and 4, for at most 10 columns.
- mixed: pfeb without privacy. gbm: scikit-learn's boosted trees on all rows together, for
  regression with an offset per client (its mean residual, shrunk by n / (n + 1)).

Regression: squared errors over those around the mean of all test outcomes. Classes: share of test
rows that are wrong. `harm` is the error of the default over that of local, less 1. `--quick` takes
one seed, epsilons 1 and 4, and small sets: some minutes. `--before` names the study.csv of an
earlier version; its defaults are shown as "before". A finished cell is a line of study.csv; a study
that was interrupted goes on from there. FOLDER gets study.csv and study.md.
"""

import argparse
import csv
import math
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from coterie.data.effects import Effects
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
from local import CLASSES, HERE, parts

OUT = Path(__file__).resolve().parent.parent / "docs" / "methods" / "study"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = 5
SETS = (*HERE, *(name for name in CLASSES if name != "har"), *(f"mixed:{kind}" for kind in MIXED))
QUICK = ("exam", "crime4", "landmine", *(f"mixed:{kind}" for kind in MIXED))
QUICK_CLIENTS = 120
YEARS = {"mathpnl": 5, "districts": 5, "wagepan": 6, "airfare": 3, "crime4": 5}
"""Training rows of every client of a panel."""
CURVED, CURVED_AT = 10, (1.0, 4.0)  # columns and epsilons of splines
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


def parts_of(method, train, test):
    """Return the rows that a method takes: with splines by rule, or as they are."""
    if method != "spline":
        return train, test
    effects = Effects(basis="spline")
    return effects.expand(train), effects.expand(test)


def trained(plan, train, test):
    """Return the error of a plan's models on the test rows."""
    found = evaluate(plan.method.model, simulate(plan, train).rows, test)
    return 1 - found.value if found.higher_is_better else found.value


def boosted(train, test, seed):
    """Return the error of boosted trees on all rows together."""
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


def measure(name, seed, epsilons, quick):
    """Return the lines of one set and seed."""
    train, test = rows_of(name, seed, quick)
    spec, lines = train.spec, []

    def add(method, epsilon, error, plan=None, begun=0.0):
        known = None if plan is None or method == "spline" else plan
        advice = None if known is None else advice_for(known, spec)
        lines.append(
            {
                "set": name,
                "seed": seed,
                "method": method,
                "epsilon": epsilon,
                "error": f"{error:.5f}",
                "spent": "" if plan is None else f"{plan.guarantee(spec.clients).epsilon:.4g}",
                "verdict": "" if advice is None else advice.verdict,
                "rounds": "" if plan is None else plan.rounds,
                "seconds": f"{time.perf_counter() - begun:.1f}",
            }
        )

    cells = [("local", Local(), math.inf), ("mixed", PFEB(), math.inf)]
    for epsilon in epsilons:
        cells += [("default", Auto(), epsilon), ("pmtl", PMTL(), epsilon)]
    if len(spec.shape) == 1 and spec.features <= CURVED:
        cells += [("spline", Auto(), epsilon) for epsilon in epsilons if epsilon in CURVED_AT]
    for method, how, epsilon in cells:
        begun = time.perf_counter()
        here = parts_of(method, train, test)
        try:
            plan = planned(how, epsilon, seed, here[0].spec, YEARS.get(name))
            add(method, epsilon, trained(plan, *here), plan, begun)
        except ValueError as error:
            print(f"{name} {method}: {error}", file=sys.stderr)
    begun = time.perf_counter()
    labels = spec.outputs if spec.task == "multiclass" else 1
    if spec.features * labels <= 1000:
        add("gbm", math.inf, boosted(train, test, seed), None, begun)
    return lines


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
                "spline": shown(mean(name, "spline", epsilon)),
                "pmtl": f"{mean(name, 'pmtl', epsilon):.3f}",
                "mixed": f"{mean(name, 'mixed', math.inf):.3f}",
                "gbm": shown(mean(name, "gbm", math.inf)),
                "best without privacy": f"{free:.3f}",
                "harm": f"{100 * (now / local - 1):+.1f} %",
            }
        )
    return rows


def by_set(lines):
    """Return a row per set: errors at all epsilons, the verdicts, and the largest harm."""
    rows, marks = table(lines), {"join": "", "small gain": "~", "learn alone": "="}
    seeds = defaultdict(set)
    for line in lines:
        seeds[line["set"]].add(line["seed"])
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = sorted((row for row in rows if row["set"] == name), key=lambda r: float(r["epsilon"]))
        told = [row["default"] + marks.get(row["verdict"], "") for row in own]
        spline = next((row["spline"] for row in own if row["spline"]), "")
        found.append(
            {
                "set": name.removeprefix("mixed:"),
                "seeds": str(len(seeds[name])),
                "local": own[0]["local"],
                f"default at {'/'.join(row['epsilon'] for row in own)}": " / ".join(told),
                "spline": spline,
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--epsilon", type=float, nargs="+")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    quick = asked.quick
    sets = asked.sets or (QUICK if quick else SETS)
    epsilons = asked.epsilon or ((1.0, 4.0) if quick else EPSILONS)
    seeds = asked.seeds or (1 if quick else SEEDS)
    out = asked.out or (Path("study-quick") if quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "study.csv"
    lines = read(path) if path.exists() else []
    done = {(line["set"], int(line["seed"])) for line in lines}
    wanted = [(one, seed) for seed in range(seeds) for one in sets if (one, seed) not in done]
    with ProcessPoolExecutor(asked.jobs) as pool:
        jobs = {pool.submit(measure, one, seed, epsilons, quick): one for one, seed in wanted}
        for job in as_completed(jobs):
            try:
                found = job.result()
            except DataError as error:
                print(f"{jobs[job]}: left out: {error}", file=sys.stderr)
                continue
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if fresh:
                    writer.writeheader()
                writer.writerows(found)
            lines += found
            print(f"{found[0]['set']} seed {found[0]['seed']}", file=sys.stderr, flush=True)
    rows = markdown(table(lines, read(asked.before) if asked.before else ()))
    short = markdown(by_set(lines))
    (out / "study.md").write_text(f"{short}\n{rows}")
    print(short)


if __name__ == "__main__":
    main()
