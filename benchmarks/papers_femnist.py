"""The FEMNIST experiments of PMTL and DPFedMTL: tables and figures of docs/papers.

    python benchmarks/papers_femnist.py PART [--device cuda] [--seeds 1] [--quick] [--out FOLDER]

Parts:

- `grid` (PMTL, Figures 2 and 4 to 6): PMTL, FedAvg and FedProx by Algorithm 1 as published, over
  the published grid of sigma and gamma: accuracy, training loss and epsilon by round.
- `figure3` (PMTL, Figures 3 and 7): PMTL, FedAvg and FedProx at the epsilons between those of
  `neural.py study`, without and with plain finetuning.
- `free` (PMTL, Table 1 and 3 at epsilon = infinity): lambda, local steps and rounds of PMTL without
  noise, each without and with finetuning, beside FedAvg.
- `tables` (DPFedMTL, Tables 2 and 3, Figure 4): DPFedMTL and DPFedAvg with the published noise on
  every local gradient, LEAF's network, K = 3, T = 1000, beside FedMTL, FedAvg and local training.

FEMNIST ($COTERIE_DATA, or shared/data beside the repository): 105 writers of LEAF's sample; PMTL
has 205, with cohorts of 100: ours have 51, the same rate. Both papers choose settings by test or
validation accuracy, which no epsilon covers. Every part writes a CSV as it goes. `--quick` is the
same on `digits`, with a small network and few rounds. `--rounds`, `--only` and `--lams` run a part
of `tables` and `free`. CSVs of `tables`, `figure3` and `grid` are drawn. Without a GPU, `grid
--writers 20 --rounds 15 --cells 1` and `free --writers 20 --work 15x8,15x40,75x8` (rounds x local
steps) take some minutes.

A released sum of LEAF's network is 52 MB: `tables` does not keep them. With MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=100000000000 glibc reuses such blocks: on a CPU a round took a fifth of the
time.
"""

import argparse
import math
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate, mean_loss
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.models.zoo import FemnistLeaf
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.published import claims, published_mean
from coterie.privacy.sampling import FixedSize, Poisson
from coterie.solvers.sgd import SGD
from neural import WAYS, Setting, plan_of, score_line, write

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "papers" / "femnist"
GRID = [(s, g) for s in (0.02, 0.05, 0.1) for g in (0.2, 0.5, 1.0)] + [(0.01, 0.2)]
SIGMAS = (0.11, 0.65, 2.42, 9.69)
LOOKS = (1, 3, 5, 10, 20, 50, 100, 200, 300, 500, 1000)
# Epsilons of PMTL's Figure 3 that `neural.py study` does not have, with rounds in between.
BETWEEN = {0.05: 3, 0.2: 3, 0.4: 4, 1.6: 8, 4.0: 25}
COHORT, LOCAL_STEPS, CLIP = 3, 5, 1.0
"""Of `tables`: K as published; an epoch of an average writer; the paper has no value of C."""


def watch(setting, method, train, test, found):
    """Return an observer that hands round, accuracy and loss to `found` after some rounds."""
    ids = np.arange(train.spec.clients)

    def look(progress):
        if progress.round in LOOKS or progress.round == progress.rounds:
            models = progress.models(method, train)
            loss = mean_loss(method.model, models, train, ids)
            found(progress.round, evaluate(method.model, models, test).value, loss)

    return look


def run_whole(plan, setting, speed, observe=None):
    """Return the outcome of a run; raise RuntimeError if clients failed, which a run survives.

    A client without memory for its steps would contribute zeros.
    """
    outcome = simulate(plan, setting.train, speed=speed, observe=observe)
    if outcome.errors:
        raise RuntimeError(f"{plan.method.kind}: {outcome.errors[0]}")
    return outcome


def collected(run, *given):
    """Return the lines that a run records."""
    lines = []
    run(*given, lines.append)
    return lines


def grid_methods(setting):
    """Return the methods of `grid`: as published, PMTL's change is from the client's own model."""
    model, sgd = setting.model, replace(setting.sgd, halve_every=200)
    return {
        "pmtl": PMTL(model=model, sgd=sgd, lam=1.0, change_from="own", last_solve=False),
        "pmtl, shared": PMTL(model=model, sgd=sgd, lam=1.0, last_epochs=20),
        "fedavg": FedAvg(model=model, sgd=sgd),
        "fedprox": FedAvg(model=model, sgd=sgd, prox=1.0),
    }


def grid_cohort(setting):
    """Return the number of clients in a round: the published rate."""
    return round(setting.train.spec.clients * 100 / 205)


def grid_run(setting, speed, name, sigma, gamma, seed, rounds, record):
    """Record accuracy and loss of one method at one sigma and gamma, by round and at the end."""
    train, test = setting.train.to(speed.device), setting.test.to(speed.device)
    cohort, method = grid_cohort(setting), grid_methods(setting)[name]
    line = {"method": name, "sigma": sigma, "gamma": gamma, "seed": seed}

    def found(after, accuracy, loss, last=0):
        record(line | {"round": after, "last": last, "accuracy": accuracy, "loss": loss})

    plan = Plan(
        method=method,
        privacy=Privacy(
            noise_multiplier=cohort * sigma / gamma, clip=gamma, delta=1 / train.spec.clients,
            relation="replace",
        ),
        sampler=FixedSize(cohort), rounds=rounds, simulation_seed=seed,
    )  # fmt: skip
    look = watch(setting, method, train, test, found)
    outcome = run_whole(plan, setting, speed, look)
    found(rounds, evaluate(method.model, outcome.rows, setting.test).value, math.nan, last=1)


@cache
def grid_epsilons(clients, cohort, rounds, sigma, gamma):
    """Return the epsilons of a line of `grid`."""
    account = published_mean(clients, cohort, rounds, sigma, gamma)
    return {"zero_out": account.zero_out, "replace": account.replace}


def grid(setting, seeds, speed, given):
    clients, cohort = setting.train.spec.clients, grid_cohort(setting)
    rounds, cells = given.rounds or 300, GRID[: given.cells]
    if setting.quick:
        rounds, cells = 3, GRID[:2]
    for seed in seeds:
        for sigma, gamma in cells:
            for name in grid_methods(setting):
                run = (grid_run, setting, speed, name, sigma, gamma, seed, rounds)
                for line in collected(*run):
                    yield line | grid_epsilons(clients, cohort, line["round"], sigma, gamma)


def figure3_run(setting, speed, name, epsilon, seed, record):
    """Record the scores of one method at one epsilon, as `neural.py study` does."""
    train, method = setting.train.to(speed.device), setting.methods(epsilon)[name]
    outcome = run_whole(plan_of(setting, method, epsilon, seed), setting, speed)
    for way in ("none", "plain"):
        rows = outcome.rows
        if way != "none":
            rows = outcome.finetune(setting.finetune(way), train)
        line = {"method": name, "finetune": way, "epsilon": epsilon, "seed": seed}
        record(line | score_line(setting, rows) | {"rounds": outcome.plan.rounds})


def figure3(setting, seeds, speed, given):
    setting.rounds = {4.0: 3} if setting.quick else BETWEEN
    for seed in seeds:
        for epsilon in setting.rounds:
            for name in ("pmtl", "fedavg", "fedprox"):
                yield from collected(figure3_run, setting, speed, name, epsilon, seed)


def lams_and_works(quick, given):
    """Return the lambda, rounds and local steps of PMTL's runs."""
    if given.work:
        return [(lam, *one) for lam in given.lams or (1.0,) for one in given.work]
    if quick:
        return [(0.3, 3, 8)]
    if given.lams:
        return [(lam, rounds, 8) for rounds in (300, 1000) for lam in given.lams]
    wide = [(lam, 300, 8) for lam in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)]
    wide += [(lam, 300, 40) for lam in (0.03, 0.1, 0.3, 1.0)]
    return wide + [(lam, 1000, 8) for lam in (0.3, 1.0, 3.0, 10.0)]


def free_run(setting, speed, name, one, seed, ways, record):
    """Record the scores of one run without noise, in several ways of finetuning."""
    lam, rounds, steps = one
    train, sgd = setting.train.to(speed.device), replace(setting.sgd, steps=steps)
    method = FedAvg(model=setting.model, sgd=sgd)
    if name == "pmtl":
        method = PMTL(model=setting.model, sgd=sgd, lam=lam, last_epochs=20)
    plan = Plan(
        method=method, privacy=Privacy(epsilon=math.inf), rounds=rounds,
        sampler=FixedSize(train.spec.clients // 2), simulation_seed=seed,
    )  # fmt: skip
    outcome = run_whole(plan, setting, speed)
    line = {"method": name, "lam": lam, "rounds": rounds, "steps": steps, "seed": seed}
    for way in ways:
        rows = outcome.rows
        if way != "none":
            rows = outcome.finetune(setting.finetune(way), train)
        record(line | {"finetune": way} | score_line(setting, rows))


def free(setting, seeds, speed, given):
    wide = lams_and_works(setting.quick, given)
    ways = ("none", "mean") if setting.quick else ("none",) if given.work else WAYS
    runs = [("fedavg", (math.nan, r, s)) for r, s in {(r, s): 0 for _, r, s in wide}]
    runs = ([] if given.only == "pmtl" else runs) + [("pmtl", one) for one in wide]
    for seed in seeds:
        for name, one in runs:
            yield from collected(free_run, setting, speed, name, one, seed, ways)


def tables_model(setting):
    return setting.model if setting.quick else FemnistLeaf()


def tables_plan(method, seed, rounds, cohort):
    """Return a plan of `tables`: no clip and no budget, as published."""
    sampler = {} if cohort is None else {"sampler": Poisson(cohort)}
    free = Privacy(epsilon=math.inf)
    return Plan(method=method, privacy=free, rounds=rounds, simulation_seed=seed, **sampler)


def tables_run(setting, speed, name, sigma, seed, rounds, record):
    """Record accuracy and loss of one method at one sigma, by round."""
    train, test = setting.train.to(speed.device), setting.test.to(speed.device)
    model, clients = tables_model(setting), train.spec.clients
    line = {"method": name, "sigma": sigma, "seed": seed}

    def found(after, accuracy, loss):
        record(line | {"round": after, "accuracy": accuracy, "loss": loss})

    # Neither C, H nor the rate are published.
    sgd = SGD(lr=0.06, steps=LOCAL_STEPS, batch=32)
    if name == "local":
        # As many steps as a client takes on average until that round.
        shares = [(one, one * LOCAL_STEPS * COHORT // clients) for one in {*LOOKS, rounds}]
        for after, steps in sorted(one for one in shares if one[1] and one[0] <= rounds):
            method = Local(model=model, lam=0.0, sgd=replace(sgd, steps=steps))
            rows = run_whole(tables_plan(method, seed, 1, None), setting, speed).rows
            found(after, evaluate(model, rows, setting.test).value, math.nan)
        return
    noise = sigma * 2 * CLIP * COHORT / clients
    method = {
        "fedmtl": DPFedMTL(model=model, sgd=sgd, step_noise=noise, last_solve=False),
        "fedavg": FedAvg(model=model, sgd=sgd, step_noise=noise),
    }[name]
    look = watch(setting, method, train, test, found)
    plan = tables_plan(method, seed, rounds, COHORT)
    run_whole(plan, setting, replace(speed, keep_posts=False), look)


@cache
def tables_epsilons(clients, rounds, method, sigma):
    """Return the claimed epsilon and true ones, of messages that are clipped, after all rounds."""
    if method == "local":
        return dict.fromkeys(("claimed", "replace", "server"), 0.0)
    if not sigma:
        return dict.fromkeys(("claimed", "replace", "server"), math.inf)
    account = claims(clients, COHORT, rounds, sigma, 1e-5)
    return {
        "claimed": account.label, "replace": account.true_replace, "server": account.server_total
    }  # fmt: skip


def tables(setting, seeds, speed, given):
    clients = setting.train.spec.clients
    rounds = 3 if setting.quick else given.rounds or 1000
    for seed in seeds:
        runs = [] if given.only else [("local", 0.0)]
        runs += [(name, sigma) for sigma in (0.0, *SIGMAS) for name in ("fedmtl", "fedavg")]
        for name, sigma in runs:
            if given.only in (None, name):
                for line in collected(tables_run, setting, speed, name, sigma, seed, rounds):
                    yield line | tables_epsilons(clients, rounds, name, sigma)


PARTS = {"grid": grid, "figure3": figure3, "free": free, "tables": tables}


def works(text):
    """Return pairs of rounds and local steps."""
    return [tuple(int(one) for one in pair.split("x")) for pair in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="of grid (default 300) and tables (1000)")
    parser.add_argument("--writers", type=int, help="take the first writers only: for CPUs")
    parser.add_argument("--only", help="one method of tables, or pmtl of free")
    parser.add_argument("--cells", type=int, help="take the first cells of grid only")
    parser.add_argument("--lams", type=lambda text: [float(one) for one in text.split(",")])
    parser.add_argument("--work", type=works, help="of free, without finetuning: 15x8,15x40")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    setting, speed = Setting(arguments.quick), Speed(device=arguments.device)
    if (few := arguments.writers) is not None:
        setting.train, setting.test = setting.train.first(few), setting.test.first(few)
    for part in arguments.parts:
        started = time.perf_counter()
        lines = PARTS[part](setting, list(range(arguments.seeds)), speed, arguments)
        names = (part, arguments.only, few and f"{few}-writers")
        write(arguments.out / f"{'-'.join(filter(None, names))}.csv", lines)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    from papers_femnist_figures import draw

    draw(arguments.out)


if __name__ == "__main__":
    main()
