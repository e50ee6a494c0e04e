"""From how many clients on a network pays: local training against joining, by size and epsilon.

    python benchmarks/scaling.py [tabular] [image] [--clients N ...] [--epsilon E ...] [--seeds 2]
        [--methods dpfedmtl pmtl ...] [--out FOLDER]

Generated federations of 100 to 30,000 clients:

- tabular: `mixed("nonlinear")` of `coterie.data.synthetic`, 15 to 40 rows of 6 columns; networks
  have 32 hidden units (257 parameters).
- image: 8 x 8 pixels, 10 classes, 24 rows a client. A class is a public smooth pattern that nobody
  knows beforehand; a client shows it with a style of its own (a smooth field that is added), moved
  by up to a pixel, in noise. Networks have 16 hidden units (1,210 parameters).

Methods have their defaults, rounds and clip are by rule, and nothing is tuned on test rows:

- local: every client alone, linear, by its own leave-one-out, and its network; the plot takes the
  better of both by the test rows, which favours local training.
- dpfedmtl, pmtl, fedavg + finetuning: the network, joined whatever the verdict.
- head: the mixed model (`pfeb`) on public features: splines of the columns, and products of two;
  of images, 16 random filters of 3 x 3, rectified and pooled.

A finished federation is a part of scaling.csv; a study that was interrupted goes on from there.
FOLDER gets scaling.csv, scaling.md and scaling.svg.
"""

import argparse
import csv
import math
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from coterie.data.effects import Effects
from coterie.data.load import from_arrays
from coterie.data.scaling import embed
from coterie.data.synthetic import mixed
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear
from coterie.planning.plan import Privacy
from coterie.planning.rules import advice_for, plan_for
from mpmtl import canvas, save

OUT = Path(__file__).resolve().parent.parent / "docs" / "methods" / "scaling"
CLIENTS = (100, 300, 1_000, 3_000, 10_000, 30_000)
EPSILONS = (1.0, 2.0, 8.0)
MODELS = {"tabular": MLP(hidden=(32,)), "image": MLP(hidden=(16,))}
ROWS, TEST, SIDE, CLASSES, FILTERS = 24, 10, 8, 10, 16
FIELDS = ("kind", "clients", "seed", "method", "epsilon", "error", "rounds", "verdict", "seconds")
COLOURS = {
    "dpfedmtl": "#54a24b",
    "pmtl": "#e45756",
    "fedavg + finetuning": "#4c78a8",
    "head": "#b279a2",
}


def smooth(rng, *shape):
    """Return fields of unit size that vary slowly over the pixels."""
    waves = np.cos(np.pi * np.outer(np.arange(4), np.arange(SIDE) + 0.5) / SIDE)
    found = np.einsum("...ab,ai,bj->...ij", rng.standard_normal((*shape, 4, 4)), waves, waves)
    return found / found.std(axis=(-2, -1), keepdims=True)


def images(clients, seed):
    """Return training and test rows of the image federation."""
    rng = np.random.default_rng([seed, 7])
    patterns, styles = smooth(rng, CLASSES), 0.7 * smooth(rng, clients)
    rows = ROWS + TEST
    y = rng.integers(0, CLASSES, (clients, rows))
    down, across = rng.integers(-1, 2, (2, clients, rows))
    place = np.arange(SIDE)
    i = (place + down[..., None]).clip(0, SIDE - 1)[..., :, None]
    j = (place + across[..., None]).clip(0, SIDE - 1)[..., None, :]
    x = patterns[y[..., None, None], i, j] + styles[:, None]
    x += 0.7 * rng.standard_normal(x.shape)
    data = from_arrays(
        x.reshape(-1, SIDE, SIDE).astype(np.float32),
        y.reshape(-1),
        np.repeat(np.arange(clients), rows),
        task="multiclass",
        classes=CLASSES,
        split=np.tile(np.arange(rows) >= ROWS, clients).astype(np.int8),
    )
    return data.split_by_source()


def filtered(rows):
    """Return public features of images: random filters, rectified and pooled."""
    draw = torch.Generator().manual_seed(0)
    kernels = torch.randn(FILTERS, 1, 3, 3, generator=draw) / 3
    found = torch.nn.functional.conv2d(rows[:, None].float(), kernels, padding=1).relu()
    return torch.nn.functional.max_pool2d(found, 4).flatten(1)


def federation(kind, clients, seed):
    """Return training and test rows, and both with public features."""
    if kind == "tabular":
        parts = mixed("nonlinear", clients=clients, seed=seed).data.split_by_source()
        made = Effects(basis="spline")
        return parts, tuple(made.expand(part) for part in parts)
    parts = images(clients, seed)
    return parts, tuple(embed(part, filtered) for part in parts)


def cells(kind, epsilons, methods):
    """Yield method, epsilon, what is run, and whether on public features."""
    model = MODELS[kind]
    yield "local linear", math.inf, Local(), False
    yield "local network", math.inf, Local(model=model), False
    joined = {
        "dpfedmtl": DPFedMTL(model=model),
        "pmtl": PMTL(model=model),
        "fedavg + finetuning": Finetune(base=FedAvg(model=model)),
        "head": PFEB(model=Linear()),
    }
    for epsilon in epsilons:
        for name in methods:
            yield name, epsilon, joined[name], name == "head"


def measure(kind, clients, seed, epsilons, methods):
    """Yield a line for every method and epsilon."""
    raw, made = federation(kind, clients, seed)
    for name, epsilon, method, featured in cells(kind, epsilons, methods):
        train, test = made if featured else raw
        begun = time.perf_counter()
        plan = plan_for(train.spec, Privacy(epsilon=epsilon), method=method, simulation_seed=seed)
        found = evaluate(plan.method.model, simulate(plan, train).rows, test)
        advice = advice_for(plan, train.spec)
        yield {
            "kind": kind,
            "clients": clients,
            "seed": seed,
            "method": name,
            "epsilon": epsilon,
            "error": f"{1 - found.value if found.higher_is_better else found.value:.5f}",
            "rounds": plan.rounds,
            "verdict": "" if advice is None else advice.verdict,
            "seconds": f"{time.perf_counter() - begun:.1f}",
        }


def means(lines):
    """Return mean errors over seeds by kind, method, epsilon and clients; local is the better."""
    found = defaultdict(list)
    for line in lines:
        key = line["kind"], line["method"], float(line["epsilon"]), int(line["clients"])
        found[key].append(float(line["error"]))
    result = {key: float(np.mean(errors)) for key, errors in found.items()}
    for kind, method, _, clients in list(result):
        if method == "local linear":
            both = (result[kind, f"local {m}", math.inf, clients] for m in ("linear", "network"))
            result[kind, "local", 0.0, clients] = min(both)
    return result


def pays_from(result, kind, method, epsilon):
    """Return from how many clients on joining is better by 1 % at all larger sizes; None if never.

    Sizes are those of the study.
    """
    sizes = sorted(n for k, m, e, n in result if (k, m, e) == (kind, method, epsilon))
    found = None
    for size in reversed(sizes):
        if not result[kind, method, epsilon, size] <= 0.99 * result[kind, "local", 0.0, size]:
            break  # NaN, too
        found = size
    return found


def shown_error(error):
    """Return an error as text; NaN and errors above 10 mean that training diverged."""
    return f"{error:.3f}" if error <= 10 else "diverges"


def table(result):
    """Return both tables as Markdown: errors, and from how many clients joining pays."""
    out = []
    for kind in sorted({key[0] for key in result}):
        sizes = sorted({n for k, _, _, n in result if k == kind})
        rows = sorted({(m, e) for k, m, e, _ in result if k == kind}, key=lambda one: one[::-1])
        out.append(
            f"| {kind} | epsilon | " + " | ".join(f"{n:,}" for n in sizes) + " | pays from |"
        )
        out.append("|---" * (len(sizes) + 3) + "|")
        for method, epsilon in rows:
            errors = [result.get((kind, method, epsilon, n)) for n in sizes]
            shown = ["" if one is None else shown_error(one) for one in errors]
            private = 0 < epsilon < math.inf
            start = pays_from(result, kind, method, epsilon) if private else None
            last = ("never here" if start is None else f"{start:,}") if private else ""
            cells = [method, f"{epsilon:g}" if private else "", *shown, last]
            if (method, epsilon) != ("local", 0.0):
                out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def draw(result, folder):
    """Plot errors relative to the better local training, by size."""
    kinds = sorted({key[0] for key in result}, reverse=True)
    epsilons = sorted({e for _, _, e, _ in result if 0 < e < math.inf})
    figure, axes = canvas(len(kinds), len(epsilons), height=2.6)
    for place, axis in enumerate(axes):
        kind, epsilon = kinds[place // len(epsilons)], epsilons[place % len(epsilons)]
        for method, colour in COLOURS.items():
            sizes = sorted(n for k, m, e, n in result if (k, m, e) == (kind, method, epsilon))
            ratios = [
                result[kind, method, epsilon, n] / result[kind, "local", 0.0, n] for n in sizes
            ]
            axis.plot(sizes, ratios, label=method, color=colour, marker="o", markersize=3)
        axis.axhline(1, color="#555555", linestyle=":", label="local")
        axis.set_xscale("log")
        axis.set_ylim(0, 1.6)
        axis.set_title(f"{kind}, epsilon {epsilon:g}", fontsize=9)
        axis.set_xlabel("clients")
    axes[0].set_ylabel("error / error of local training")
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, folder / "scaling.svg")


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["tabular", "image"])
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--methods", nargs="+", default=list(COLOURS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "scaling.csv"
    lines = read(path) if path.exists() else []
    done = {(line["kind"], int(line["clients"]), int(line["seed"])) for line in lines}
    for clients in asked.clients:
        for kind in asked.kinds:
            for seed in range(asked.seeds):
                if (kind, clients, seed) in done:
                    continue
                found = list(measure(kind, clients, seed, asked.epsilon, asked.methods))
                fresh = not path.exists()
                with path.open("a", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    if fresh:
                        writer.writeheader()
                    writer.writerows(found)
                lines += found
                print(kind, clients, seed, file=sys.stderr, flush=True)
    result = means(lines)
    shown = table(result)
    (asked.out / "scaling.md").write_text(shown)
    draw(result, asked.out)
    print(shown)


if __name__ == "__main__":
    main()
