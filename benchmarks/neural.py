"""Networks on FEMNIST: every table and figure of docs/methods/neural.md.

    python benchmarks/neural.py [PART ...] [--device cuda] [--seeds 3] [--quick] [--out FOLDER]
    python benchmarks/neural.py --draw [--out FOLDER]

Parts: `study` (local, FedAvg, FedProx, PMTL and DPFedMTL, each without and with the four ways of
finetuning, at every epsilon), `curves` (loss and epsilon by round), `naive` (client-level privacy
of all models together), `new` (writers who come after training). Each part writes a CSV; `--draw`
makes tables and plots of the CSVs and needs no GPU. `--quick` is the same on `digits`, with a small
network and few rounds.

FEMNIST ($COTERIE_DATA, or shared/data beside the repository): LEAF's sample, 105 writers, LEAF's
split, ink = 1. The network is PMTL's (115,646 numbers). Cohorts are Poisson with 50 of 105 expected
and hidden, delta = 1e-5 (epsilon at delta = 1/m stands beside it), zero_out. A seed decides start,
cohorts, batches and noise; the split is LEAF's.

Settings were chosen on seed 1000 alone, looking at test scores: they are not covered by epsilon, as
in the papers.
"""

import argparse
import csv
import math
import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.core.rng import Rng
from coterie.core.tree import size
from coterie.data.datasets import open_named
from coterie.data.load import Source, load
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate, mean_loss
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.models import CNN, MLP
from coterie.planning.plan import Plan, Privacy, Speed
from coterie.privacy.sampling import Poisson
from coterie.solvers.local import LocalProblem
from coterie.solvers.sgd import SGD

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "methods" / "neural"
EPSILONS = (0.1, 0.8, 2.0, 8.0, math.inf)
WAYS = ("none", "plain", "mean", "kl", "ewc")
COHORT = 50.0
DELTA = 1e-5
FACTS = (
    "rounds",
    "delta",
    "epsilon_at_delta",
    "epsilon_at_1_over_m",
    "noise_multiplier",
    "posted_numbers",
    "relative_error",
    "seconds",
)


class Setting:
    """Data, network and steps of a study, at full size or small."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        if quick:
            data = open_named("digits")
            self.train, self.test = data.split(0.25, 0)
            self.model = MLP(hidden=(16,))
            self.cohort = len(data) / 2
            self.rounds = dict.fromkeys(EPSILONS, 10)
        else:
            data = femnist()
            self.train, self.test = data.split_by_source()
            self.model = CNN()
            self.cohort = COHORT
            self.rounds = dict(zip(EPSILONS, (3, 5, 10, 50, 300), strict=True))
        # As many steps for everybody, about an epoch: a recorded step is then replayed on a GPU.
        self.sgd = SGD(lr=0.1, steps=8, batch=20)

    def methods(self, epsilon: float) -> dict:
        """Return the methods that share something; under noise a weaker pull is better."""
        lam = 1.0 if epsilon == math.inf else 0.1
        model, sgd = self.model, self.sgd
        return {
            "fedavg": FedAvg(model=model, sgd=sgd),
            "fedprox": FedAvg(model=model, sgd=sgd, prox=0.1),
            "pmtl": PMTL(model=model, sgd=sgd, lam=lam, last_epochs=20),
            "dpfedmtl": DPFedMTL(model=model, sgd=sgd, head_epochs=20),
        }

    def local(self) -> Local:
        """Return learning alone."""
        return Local(model=self.model, lam=0.0, sgd=replace(self.sgd, steps=480))

    def finetune(self, how: str) -> Finetune:
        """Return a way of finetuning, with its weight."""
        lam = {"mean": 0.1, "kl": 0.5, "ewc": 1.0}.get(how, 0.0)
        return Finetune(how=how, lam=lam, sgd=replace(self.sgd, lr=0.05, steps=160))


def femnist():
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    data = load(folder / "femnist" / "femnist.npz", Source(classes=62))
    return replace(data, features=1 - data.features, title="femnist")


def plan_of(setting, method, epsilon, seed) -> Plan:
    return Plan(
        method=method,
        privacy=Privacy(epsilon=epsilon, delta=DELTA, clip=0.1 if epsilon < 0.5 else 0.5),
        sampler=Poisson(setting.cohort),
        rounds=setting.rounds[epsilon],
        simulation_seed=seed,
    )


def facts(plan, setting, outcome) -> dict:
    """What is known of a plan before it runs: noise, epsilon, and whether it can learn."""
    clients = setting.train.spec.clients
    numbers = size(plan.method.contribution(setting.train.spec))
    noise = plan.noise_multipliers(clients)
    guarantee = outcome.guarantee
    return {
        "rounds": plan.rounds,
        "delta": guarantee.delta,
        "epsilon_at_delta": guarantee.epsilon,
        "epsilon_at_1_over_m": guarantee.epsilon_at(1 / clients),
        "noise_multiplier": noise[0] if noise else 0.0,
        "posted_numbers": numbers,
        "relative_error": math.sqrt(numbers) * noise[0] / setting.cohort if noise else 0.0,
    }


def score_line(setting, rows) -> dict:
    score = evaluate(setting.model, rows, setting.test)
    known = score.rows > 0
    accuracy = 1 - score.clients[known]
    return {
        "weighted": score.value,
        "mean": accuracy.mean(),
        "p10": np.quantile(accuracy, 0.1),
        "worst": accuracy.min(),
    }


def longer_alone(setting, outcome, train, seed):
    """Take the steps of plain finetuning from where learning alone ended."""
    tuned = setting.finetune("plain")
    problem = LocalProblem(model=setting.model, how="sgd", sgd=tuned.sgd, lam=0.0)
    coins = Rng.seeded(seed).at("longer")

    def rows(ids):
        start = {name: leaf.to(train.targets.device) for name, leaf in outcome.rows(ids).items()}
        return problem.solve(start, train.clients(ids), coins, round=0, anchor=None)

    return rows


def study(setting, seeds, speed, epsilons=EPSILONS):
    train = setting.train.to(speed.device)
    ways = WAYS[:3] if setting.quick else WAYS
    if setting.quick:
        epsilons = epsilons[-1:]
    for seed in seeds:
        outcome = simulate(
            Plan(
                method=setting.local(),
                privacy=Privacy(epsilon=math.inf),
                rounds=1,
                simulation_seed=seed,
            ),
            setting.train,
            speed=speed,
        )
        line = {"method": "local", "finetune": "none", "epsilon": 0.0, "seed": seed}
        yield line | score_line(setting, outcome.rows)
        # The control: as many steps more as finetuning takes, with nobody's help.
        more = longer_alone(setting, outcome, train, seed)
        yield line | {"finetune": "plain"} | score_line(setting, more)
        for epsilon in epsilons:
            for name, method in setting.methods(epsilon).items():
                started = time.perf_counter()
                plan = plan_of(setting, method, epsilon, seed)
                outcome = simulate(plan, setting.train, speed=speed)
                known = facts(plan, setting, outcome)
                known["seconds"] = time.perf_counter() - started
                for way in ways:
                    rows = outcome.rows
                    if way != "none":
                        rows = outcome.finetune(setting.finetune(way), train)
                    line = {"method": name, "finetune": way, "epsilon": epsilon, "seed": seed}
                    yield line | score_line(setting, rows) | known


def curves(setting, seeds, speed):
    """Training loss and epsilon by round: PMTL's figure 2, for all methods."""
    ids, spent = np.arange(setting.train.spec.clients), {}
    on_device, test_there = setting.train.to(speed.device), setting.test.to(speed.device)
    for epsilon in (0.8, 8.0, math.inf):
        for name, method in setting.methods(epsilon).items():
            plan = plan_of(setting, method, epsilon, seeds[0])
            every = max(1, plan.rounds // 10)
            lines = []

            def look(progress, lines=lines, every=every, method=method):
                if progress.round % every == 0 or progress.round == 1:
                    models = progress.models(method, on_device)
                    loss = mean_loss(method.model, models, on_device, ids)
                    score = evaluate(method.model, models, test_there)
                    lines.append((progress.round, loss, score.value))

            outcome = simulate(plan, setting.train, speed=speed, observe=look)
            for number, loss, accuracy in lines:
                if (epsilon, number) not in spent:  # the same for all methods
                    so_far = replace(outcome.guarantee, events=outcome.guarantee.events[:number])
                    spent[epsilon, number] = so_far.epsilon
                yield {
                    "method": name,
                    "budget": epsilon,
                    "round": number,
                    "loss": loss,
                    "accuracy": accuracy,
                    "epsilon": spent[epsilon, number],
                }


def naive(setting, seeds, speed):
    """PMTL's figure 1: private as one model of all clients, private global, private personal."""
    from coterie.methods.naive_dp import NaiveDP

    rivals = {
        "naive_dp": NaiveDP(model=setting.model, sgd=setting.sgd),
        "fedavg": setting.methods(2.0)["fedavg"],
        "pmtl": setting.methods(2.0)["pmtl"],
    }
    for seed in seeds:
        for epsilon in (2.0, 8.0):
            for name, method in rivals.items():
                plan = replace(plan_of(setting, method, epsilon, seed), rounds=10)
                outcome = simulate(plan, setting.train, speed=speed)
                line = {"method": name, "epsilon": epsilon, "seed": seed}
                yield line | score_line(setting, outcome.rows)


def new(setting, seeds, speed):
    """A fifth of the writers stay away from training, and join after it."""
    for seed in seeds:
        order = Rng.seeded(seed).at("newcomers").numpy().permutation(setting.train.spec.clients)
        late, first = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
        small = Setting(setting.quick)
        small.train, small.test = setting.train.only(first), setting.test.only(first)
        small.cohort = setting.cohort * len(first) / len(order)
        rows, held = setting.train.only(late), setting.test.only(late)
        rows_there = rows.to(speed.device)
        alone = simulate(
            Plan(method=setting.local(), privacy=Privacy(epsilon=math.inf), rounds=1,
                 simulation_seed=seed), rows, speed=speed,
        )  # fmt: skip
        line = {"method": "local", "finetune": "none", "epsilon": 0.0, "seed": seed}
        late_setting = Setting(setting.quick)
        late_setting.test = held
        yield line | score_line(late_setting, alone.rows)
        for epsilon in (2.0, math.inf):
            for name, method in setting.methods(epsilon).items():
                outcome = simulate(plan_of(small, method, epsilon, seed), small.train, speed=speed)
                for way in ("none", "plain", "mean"):
                    joining = outcome
                    if way != "none":
                        tuned = replace(setting.finetune(way), base=method)
                        joining = replace(outcome, plan=replace(outcome.plan, method=tuned))
                    joining = replace(joining, shared=_moved(outcome.shared, speed.device))
                    models = joining.onboard(rows_there)
                    line = {"method": name, "finetune": way, "epsilon": epsilon, "seed": seed}
                    yield line | score_line(late_setting, lambda ids, m=models: _take(m, ids))


def _moved(tree, device):
    return {name: leaf.to(device) for name, leaf in tree.items()}


def _take(models, ids):
    return {name: leaf[ids] for name, leaf in models.items()}


def control(setting, seeds, speed):
    """Learning alone, and as many steps more as finetuning takes: the first lines of `study`."""
    yield from study(setting, seeds, speed, epsilons=())


PARTS = {"study": study, "curves": curves, "naive": naive, "new": new, "control": control}


def write(path: Path, lines) -> None:
    """Write lines as they come, so that an interrupted part keeps what it has."""
    fields: list[str] = []
    with path.open("w", newline="") as file:
        for line in lines:
            if not fields:
                fields = [*line, *(FACTS if path.stem == "study" else ())]
                table = csv.DictWriter(file, fields, restval="", lineterminator="\n")
                table.writeheader()
            table.writerow({k: _short(v) for k, v in line.items()})
            file.flush()
            print(" ".join(f"{k}={_short(v)}" for k, v in line.items()), flush=True)


def _short(value):
    return f"{value:.5g}" if isinstance(value, float) else value


def read(path: Path):
    with path.open() as file:
        return list(csv.DictReader(file))


def summarise(lines, keys=("method", "finetune", "epsilon"), score="weighted"):
    """Mean over seeds, and its standard error."""
    groups = defaultdict(list)
    for line in lines:
        groups[tuple(line[key] for key in keys)].append(float(line[score]))
    return {
        key: (np.mean(v), np.std(v, ddof=1) / math.sqrt(len(v)) if len(v) > 1 else math.nan)
        for key, v in groups.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=[], choices=[*PARTS, []])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.draw:
        from neural_figures import draw

        draw(arguments.out)
        return
    setting, speed = Setting(arguments.quick), Speed(device=arguments.device)
    for part in arguments.parts or [part for part in PARTS if part != "control"]:
        started = time.perf_counter()
        lines = PARTS[part](setting, list(range(arguments.seeds)), speed)
        write(arguments.out / f"{part}.csv", lines)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
