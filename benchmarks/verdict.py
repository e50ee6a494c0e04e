"""When joining pays: the rule behind the verdict, checked on generated federations.

    python benchmarks/verdict.py generate --out FILE [--federations 240] [--seed 1] [--small]
    python benchmarks/verdict.py check FILE ...

`generate` draws federations (20 to 5,000 clients, 2 to 500 columns, 5 to 500 rows each; tasks,
kinds and spreads of `coterie.data.synthetic`; three epsilons from 0.25 to 8 each; larger ones are
drawn again, so that a laptop computes them). It measures local training and pfeb on fresh rows of
the same clients, joined whatever the verdict: as released, with the mean shrunk by its noise, and
with every client averaging joined and own models by its rows left out ("hedged"). A line per
federation and epsilon is appended to FILE; a study that was interrupted goes on from there.

`check` shows the confusion of the rule with what happened, with the typical rows per client
declared and without, and the mean change of error by affordable rounds. A federation gains (is
harmed) where joining changes the error by more than 1 % of that of local training and by two
standard errors over clients; else it is even. What joins below two affordable rounds is shrunk, as
by default.
"""

import argparse
import csv
import itertools
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from coterie.core.rng import Rng
from coterie.core.tree import take
from coterie.data.federated import DataError
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import LAMS, Local, modes, own_shares, ridge_prior
from coterie.methods.pfeb import PFEB, SHRUNK, _in_doubt
from coterie.models.linear import plain
from coterie.planning.advice import affordable_rounds, cut_for, verdict_of
from coterie.planning.plan import Privacy
from coterie.planning.rules import clients_times_mu, plan_for
from coterie.solvers.posterior import add_in_turn

TASKS = ("regression", "binary", "multiclass")
KINDS = ("mean", "mean", "low_rank", "clusters", "shift_scale")
TEST = 20
WORK, CELLS = (2e7, 3e6), (3e5, 8e4)  # multiplications of a round, values of the training rows
EVEN, CLEAR = 0.01, 2.0


def drawn(generator, *, small=False):
    """Return the options of one federation."""

    def log(low, high):
        return round(float(np.exp(generator.uniform(math.log(low), math.log(high)))))

    while True:
        task = str(generator.choice(TASKS))
        outputs = log(3, 12) if task == "multiclass" else 1
        clients, features, rows = log(20, 5000), log(2, 500), log(5, 500)
        inner = min(rows, features)
        newton = 1 if task == "regression" else 5
        work = clients * outputs * rows * features * inner * newton
        if work <= WORK[small] and clients * rows * features <= CELLS[small]:
            break
    return {
        "kind": str(generator.choice(KINDS)),
        "task": task,
        "outputs": outputs if task == "multiclass" else None,
        "clients": clients,
        "features": features,
        "rows": rows,
        "spread": float(np.exp(generator.uniform(math.log(0.15), math.log(1.5)))),
        "noise": float(np.exp(generator.uniform(math.log(0.2), math.log(1.5)))),
    }


def federation(options, seed):
    """Return training and test rows."""
    rows = options["rows"]
    asked = {**options, "rows": (max(1, rows // 2) + TEST, rows + rows // 2 + TEST)}
    data = synthetic(**asked, seed=seed).data
    return data.split(TEST, seed)


def errors(method, models, test):
    """Return the headline error, the mean loss, and each client's own error."""
    found = evaluate(method.model, lambda ids: take(models, torch.as_tensor(ids)), test)
    wrong = 1 - found.value if found.higher_is_better else found.value
    return wrong, found.loss, found.clients


def hedged(method, shared, clients, odds=0.0):
    """Average joined and own models by the likelihood of own rows left out."""
    clients, bias = method._below(clients, shared), method._bias
    prior = method.prior(shared, clients.spec)
    joined = _in_doubt(prior, method._doubt(shared, clients.spec))
    local = [ridge_prior(plain(method.model), clients.spec, lam) for lam in LAMS]
    usual, width = (0.1, 0.75) if clients.spec.task == "regression" else (0.03, 1.5)
    guess = [0.5 * (math.log(lam / usual) / width) ** 2 for lam in LAMS]
    wide = (torch.arange(-2.0, 4.0).double().square() / 2)[: len(joined)] * (len(joined) > 1)
    guess = torch.tensor(guess, dtype=torch.float64)
    wide, guess = wide + torch.logsumexp(-wide, 0), guess + torch.logsumexp(-guess, 0) + odds
    priors = [*joined, *local]
    fits = torch.stack([modes(clients, one, bias=bias) for one in priors])
    shares = own_shares(clients, priors, torch.cat([wide, guess]), bias=bias)
    return method._head(add_in_turn(shares[:, :, None, None] * fits).cpu(), shared)


def measure(options, epsilons, seed):
    """Yield a line for every epsilon."""
    train, test = federation(options, seed)
    spec = train.spec
    clients = next(iter(train.blocks(np.arange(len(train)), len(train))))
    back = clients.ids.argsort()
    rng = Rng.seeded(seed)
    begun = time.perf_counter()
    local = Local()
    start = {k: v.expand(len(train), *v.shape).clone() for k, v in local.init(spec, rng).items()}
    own = local.personalise(local.init(spec, rng), start, clients, rng)
    alone, alone_loss, per = errors(local, take(own, back), test)
    for epsilon in epsilons:
        privacy = Privacy(epsilon=epsilon)
        plan = plan_for(spec, privacy, method=PFEB(), simulation_seed=seed)
        outcome = simulate(plan, train)
        method, shared = plan.method, outcome.shared
        n_mu = clients_times_mu(privacy, spec.clients)
        line = {**options, "seed": seed, "epsilon": epsilon, "rounds": plan.rounds, "n_mu": n_mu}
        line |= {"parameters": method.rounds(spec).dimension}
        line |= {"local": alone, "local_loss": alone_loss}
        whole, less = replace(method, shrink=False), replace(method, shrink=True)
        variants = {
            "joined": take(whole.personalise(shared, {}, clients, rng), back),
            "shrunk": take(less.personalise(shared, {}, clients, rng), back),
            "hedged": take(hedged(less, shared, clients), back),
        }
        for name, models in variants.items():
            wrong, loss, each = errors(method, models, test)
            gap = each - per
            spread = gap.std() / math.sqrt(len(gap)) + 1e-12
            line |= {name: wrong, f"{name}_loss": loss, f"{name}_t": gap.mean() / spread}
        line["seconds"] = round(time.perf_counter() - begun, 1)
        yield line


def generate(asked):
    """Measure federations, and append a line for every epsilon."""
    done = set()
    if asked.out.exists():
        with asked.out.open() as file:
            done = {int(line["seed"]) for line in csv.DictReader(file)}
    for number in range(asked.federations):
        seed = 100_000 * asked.seed + number
        generator = np.random.default_rng([asked.seed, number])
        options = drawn(generator, small=asked.small)
        epsilons = np.round(np.exp(generator.uniform(math.log(0.25), math.log(8), 3)), 3)
        if seed in done:
            continue
        try:
            lines = list(measure(options, [float(one) for one in epsilons], seed))
        except DataError:  # columns or outcomes of some client are not of unit size
            continue
        fresh = not asked.out.exists()
        with asked.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows(lines)
        told = " ".join(f"{k}={v}" for k, v in options.items())
        print(number, told, lines[-1]["seconds"], file=sys.stderr, flush=True)


TABLE = (0, 0.05, 0.1, 0.2, 0.4, 1, 2, 4, 8, 16, math.inf)


def change(line, kind):
    """Return the error of a kind of joining relative to that of local training, less 1."""
    return float(line[kind]) / max(float(line["local"]), 1e-9) - 1


def of_line(line, *, declared):
    """Return affordable rounds and the verdict of the rule."""
    affordable = affordable_rounds(float(line["n_mu"]), float(line["parameters"]))
    cut = cut_for(
        int(line["features"]) + 1,
        classes=line["task"] != "regression",
        rows=float(line["rows"]) if declared else None,
    )
    return affordable, verdict_of(affordable, cut)


def outcome_of(line):
    """Return what joining did, by default settings."""
    rounds = affordable_rounds(float(line["n_mu"]), float(line["parameters"]))
    kind = "shrunk" if rounds < SHRUNK else "joined"
    moved, clear = change(line, kind), abs(float(line[f"{kind}_t"])) >= CLEAR
    if not clear or abs(moved) <= EVEN:
        return "even", moved
    return ("gain" if moved < 0 else "harm"), moved


def check(asked):
    """Show confusion tables, and mean changes by affordable rounds."""
    lines = []
    for path in asked.files:
        with path.open(newline="") as file:
            lines += list(csv.DictReader(file))
    for task, declared in itertools.product(("regression", "classes"), (False, True)):
        some = [line for line in lines if (line["task"] == "regression") == (task == "regression")]
        print(f"\n{task}, rows per client {'declared' if declared else 'not declared'}\n")
        print("| verdict | gain | even | harm | mean change of error |\n|---|---|---|---|---|")
        for verdict in ("join", "small gain", "learn alone"):
            here = [outcome_of(x) for x in some if of_line(x, declared=declared)[1] == verdict]
            counts = Counter(kind for kind, _ in here)
            mean = f"{100 * np.mean([moved for _, moved in here]):+.1f} %" if here else ""
            cells = " | ".join(str(counts[kind]) for kind in ("gain", "even", "harm"))
            print(f"| {verdict} | {cells} | {mean} |")
    for task in ("regression", "classes"):
        some = [line for line in lines if (line["task"] == "regression") == (task == "regression")]
        print(f"\n{task}: mean change of error by affordable rounds\n")
        print("| affordable rounds | cases | joined | shrunk | hedged |\n|---|---|---|---|---|")
        for low, high in itertools.pairwise(TABLE):
            here = [x for x in some if low <= of_line(x, declared=False)[0] < high]
            if here:
                kinds = ("joined", "shrunk", "hedged")
                means = [
                    f"{100 * np.mean([change(x, kind) for x in here]):+.1f} %" for kind in kinds
                ]
                print(f"| {low:.3g} to {high:.3g} | {len(here)} | {' | '.join(means)} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("generate")
    one.add_argument("--federations", type=int, default=240)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--small", action="store_true")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(go=generate)
    other = commands.add_parser("check")
    other.add_argument("files", type=Path, nargs="+")
    other.set_defaults(go=check)
    asked = parser.parse_args(argv)
    asked.go(asked)


if __name__ == "__main__":
    main()
