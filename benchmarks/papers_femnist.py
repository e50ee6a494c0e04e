"""The FEMNIST experiments of PMTL and DPFedMTL: tables and figures of docs/papers.

    python benchmarks/papers_femnist.py PART [--device cuda] [--seeds 1] [--quick] [--out FOLDER]

Parts:

- `grid` (PMTL, Figures 2 to 7): PMTL, FedAvg and FedProx by Algorithm 1 as published, over the
  published grid of sigma and gamma: accuracy, training loss and epsilon by round.
- `free` (PMTL, Table 1 and 3 at epsilon = infinity): lambda, local steps and rounds of PMTL without
  noise, each without and with finetuning, beside FedAvg.
- `tables` (DPFedMTL, Tables 2 and 3, Figure 4): DPFedMTL and DPFedAvg with the published noise on
  every local gradient, LEAF's network, K = 3, T = 1000, beside FedMTL, FedAvg and local training.

FEMNIST ($COTERIE_DATA, or shared/data beside the repository): 105 writers of LEAF's sample; PMTL
has 205, with cohorts of 100: ours have 51, the same rate. Both papers choose settings by test or
validation accuracy, which no epsilon covers. Every part writes a CSV as it goes. `--quick` is the
same on `digits`, with a small network and few rounds. `--rounds`, `--only` and `--lams` run a part
of `tables` and `free`; a released sum of LEAF's network is 52 MB, and a run keeps them all. Without
a GPU, `grid --writers 20 --rounds 15 --cells 1` and `free --writers 20 --work 15x8,15x40,75x8`
(rounds x local steps) take some minutes.
"""

import argparse
import math
import time
from dataclasses import replace
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
from neural import WAYS, Setting, score_line, write

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "papers" / "femnist"
GRID = [(s, g) for s in (0.02, 0.05, 0.1) for g in (0.2, 0.5, 1.0)] + [(0.01, 0.2)]
SIGMAS = (0.11, 0.65, 2.42, 9.69)
LOOKS = (1, 3, 5, 10, 20, 50, 100, 200, 300, 500, 1000)


def watch(setting, method, train, test, lines):
    """Return an observer that scores the models after some rounds."""
    ids = np.arange(train.spec.clients)

    def look(progress):
        if progress.round in LOOKS or progress.round == progress.rounds:
            models = progress.models(method, train)
            loss = mean_loss(method.model, models, train, ids)
            lines.append((progress.round, evaluate(method.model, models, test).value, loss))

    return look


def grid(setting, seeds, speed, given):
    train, test = setting.train.to(speed.device), setting.test.to(speed.device)
    clients = train.spec.clients
    cohort = round(clients * 100 / 205)
    rounds, cells = given.rounds or 300, GRID[: given.cells]
    if setting.quick:
        rounds, cells = 3, GRID[:2]
    sgd = replace(setting.sgd, halve_every=200)
    for seed in seeds:
        for sigma, gamma in cells:
            privacy = Privacy(
                noise_multiplier=cohort * sigma / gamma, clip=gamma, delta=1 / clients,
                relation="replace",
            )  # fmt: skip
            spent = {}
            for name, method in {
                "pmtl": PMTL(
                    model=setting.model, sgd=sgd, lam=1.0, change_from="own", last_solve=False
                ),
                "pmtl, shared": PMTL(model=setting.model, sgd=sgd, lam=1.0, last_epochs=20),
                "fedavg": FedAvg(model=setting.model, sgd=sgd),
                "fedprox": FedAvg(model=setting.model, sgd=sgd, prox=1.0),
            }.items():
                lines = []
                plan = Plan(
                    method=method, privacy=privacy, sampler=FixedSize(cohort), rounds=rounds,
                    simulation_seed=seed,
                )  # fmt: skip
                look = watch(setting, method, train, test, lines)
                outcome = simulate(plan, setting.train, speed=speed, observe=look)
                lines.append((rounds, evaluate(method.model, outcome.rows, setting.test).value,
                              math.nan))  # fmt: skip
                for place, (after, accuracy, loss) in enumerate(lines):
                    if after not in spent:
                        spent[after] = published_mean(clients, cohort, after, sigma, gamma)
                    yield {
                        "method": name, "sigma": sigma, "gamma": gamma, "seed": seed,
                        "round": after, "last": int(place == len(lines) - 1),
                        "accuracy": accuracy, "loss": loss,
                        "zero_out": spent[after].zero_out, "replace": spent[after].replace,
                    }  # fmt: skip


def lams_and_works(quick, given):
    """Return the lambda, rounds and local steps of PMTL's runs."""
    if given.work:
        return [(lam, *one) for lam in given.lams or (1.0,) for one in given.work]
    if quick:
        return [(0.3, 3, 8)]
    if given.lams:
        return [(lam, rounds, 8) for rounds in (300, 1000) for lam in given.lams]
    wide = [(lam, 300, 8) for lam in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)]
    wide += [(lam, 300, 40) for lam in (0.03, 0.1, 0.3, 1.0)]
    return wide + [(lam, 1000, 8) for lam in (0.03, 0.1, 0.3, 1.0)]


def free(setting, seeds, speed, given):
    train = setting.train.to(speed.device)
    wide = lams_and_works(setting.quick, given)
    ways = ("none", "mean") if setting.quick else ("none",) if given.work else WAYS
    runs = [("fedavg", math.nan, r, s) for r, s in {(r, s): 0 for _, r, s in wide}]
    runs = ([] if given.only == "pmtl" else runs) + [("pmtl", *one) for one in wide]
    for seed in seeds:
        for name, lam, rounds, steps in runs:
            sgd = replace(setting.sgd, steps=steps)
            method = FedAvg(model=setting.model, sgd=sgd)
            if name == "pmtl":
                method = PMTL(model=setting.model, sgd=sgd, lam=lam, last_epochs=20)
            plan = Plan(
                method=method, privacy=Privacy(epsilon=math.inf), rounds=rounds,
                sampler=FixedSize(train.spec.clients // 2), simulation_seed=seed,
            )  # fmt: skip
            outcome = simulate(plan, setting.train, speed=speed)
            for way in ways:
                rows = outcome.rows
                if way != "none":
                    rows = outcome.finetune(setting.finetune(way), train)
                found = score_line(setting, rows)
                yield {"method": name, "lam": lam, "rounds": rounds, "steps": steps, "seed": seed,
                       "finetune": way, **found}  # fmt: skip


def tables(setting, seeds, speed, given):
    train, test = setting.train.to(speed.device), setting.test.to(speed.device)
    clients, cohort, clip = train.spec.clients, 3, 1.0
    rounds, model = (3, setting.model) if setting.quick else (given.rounds or 1000, FemnistLeaf())
    # One epoch of an average writer in a round; neither C, H nor the rate are published.
    sgd = SGD(lr=0.06, steps=5, batch=32)
    for seed in seeds:
        alone = Local(model=model, lam=0.0, sgd=replace(sgd, steps=rounds * 5 * cohort // clients))
        if given.only is None:
            plan = Plan(
                method=alone, privacy=Privacy(epsilon=math.inf), rounds=1, simulation_seed=seed
            )
            rows = simulate(plan, setting.train, speed=speed).rows
            score = evaluate(model, rows, setting.test).value
            yield {"method": "local", "sigma": 0.0, "seed": seed, "round": rounds,
                   "accuracy": score, "loss": math.nan, "claimed": 0.0, "replace": 0.0,
                   "server": 0.0}  # fmt: skip
        for sigma in SIGMAS if given.only else (0.0, *SIGMAS):
            noise = sigma * 2 * clip * cohort / clients
            account = claims(clients, cohort, rounds, sigma, 1e-5) if sigma else None
            for name, method in {
                "fedmtl": DPFedMTL(model=model, sgd=sgd, step_noise=noise, last_solve=False),
                "fedavg": FedAvg(model=model, sgd=sgd, step_noise=noise),
            }.items():
                if given.only not in (None, name):
                    continue
                lines = []
                plan = Plan(
                    method=method, privacy=Privacy(epsilon=math.inf), rounds=rounds,
                    sampler=Poisson(cohort), simulation_seed=seed,
                )  # fmt: skip
                simulate(
                    plan, setting.train, speed=speed,
                    observe=watch(setting, method, train, test, lines),
                )  # fmt: skip
                for after, accuracy, loss in lines:
                    yield {
                        "method": name, "sigma": sigma, "seed": seed, "round": after,
                        "accuracy": accuracy, "loss": loss,
                        "claimed": account.label if account else math.inf,
                        "replace": account.true_replace if account else math.inf,
                        "server": account.server_total if account else math.inf,
                    }  # fmt: skip


PARTS = {"grid": grid, "free": free, "tables": tables}


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


if __name__ == "__main__":
    main()
