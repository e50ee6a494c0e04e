"""From how many clients on a network pays: local training against joining, by size and epsilon.

    python benchmarks/scaling.py [tabular] [image] [large] [--clients N ...] [--epsilon E ...]
        [--seeds 2] [--methods dpfedmtl pmtl ...] [--device cuda] [--out FOLDER]

Generated federations of 30 to 30,000 clients:

- tabular: `mixed("nonlinear")` of `coterie.data.synthetic`, 15 to 40 rows of 6 columns; networks
  have 32 hidden units (257 parameters).
- image: 8 x 8 pixels, 10 classes, 24 rows a client. A class is a public smooth pattern that nobody
  knows beforehand; a client shows it with a style of its own (a smooth field that is added), moved
  by up to a pixel, in noise. Networks have 16 hidden units (1,210 parameters).
- large: the same with 28 x 28 pixels, 62 classes and 30 rows, moved by up to 2 pixels, each with
  a smooth field of its own; the convolutional network of the FEMNIST study (115,646 parameters).
  About 1,000 clients take part in a round; all are finetuned.

Methods have their defaults, rounds and clip are by rule, and nothing is tuned on test rows:

- local: every client alone, linear, by its own leave-one-out, and its network; the plot takes the
  better of both by the test rows, which favours local training. Local training does not depend on
  the number of clients: above 1,000 (large: 100) it is that of so many.
- dpfedmtl, pmtl, fedavg + finetuning: the network, joined whatever the verdict.
- the same with ", adaptive": with a clip that follows the norms (not by default).
- head: the mixed model (`pfeb`) on public features: splines of the columns, and products of two;
  of images, 16 random filters of 3 x 3, rectified and pooled.

A finished cell is a line of scaling.csv; a study that was interrupted goes on from there.
FOLDER gets scaling.csv, scaling.md, scaling.svg and pays.svg.
"""

import argparse
import csv
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from coterie.data.effects import Effects
from coterie.data.load import from_arrays
from coterie.data.scaling import embed
from coterie.data.synthetic import mixed
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.adaptive import Adaptive
from coterie.methods.baselines import Local
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import CNN, MLP, Linear
from coterie.planning.plan import Privacy, Speed
from coterie.planning.rules import advice_for, plan_for
from coterie.privacy.sampling import Poisson

OUT = Path(__file__).resolve().parent.parent / "docs" / "methods" / "scaling"
CLIENTS = (100, 300, 1_000, 3_000, 10_000, 30_000)
EPSILONS = (1.0, 2.0, 8.0)
MODELS = {"tabular": MLP(hidden=(32,)), "image": MLP(hidden=(16,)), "large": CNN()}
LARGE_COHORT = 1_000
LOCAL_MOST = {"tabular": 1_000, "image": 1_000, "large": 100}
FIELDS = ("kind", "clients", "seed", "method", "epsilon", "error", "rounds", "verdict", "seconds")
KEYS = FIELDS[:5]
LOCAL = ("local linear", "local network")
ADAPTED = ", adaptive"
SHOWN = (20, 40_000)  # clients on an axis
ENOUGH = 0.99  # of the error of local training
COLOURS = {
    "dpfedmtl": "#54a24b",
    "pmtl": "#e45756",
    "fedavg + finetuning": "#4c78a8",
    "head": "#b279a2",
}
TEST, FILTERS = 10, 16


class Images(NamedTuple):
    """Images of one kind: sizes, and the strength of what hides the class."""

    side: int
    classes: int
    rows: int
    waves: int
    moved: int
    style: float = 0.7
    own: float = 0.0
    noise: float = 0.7
    type: type = np.float64


IMAGES = {
    "image": Images(8, 10, 24, 4, 1),
    "large": Images(28, 62, 30, 6, 2, own=0.7, type=np.float32),
}


class Cell(NamedTuple):
    """A cell of the study."""

    kind: str
    clients: int
    seed: int
    method: str
    epsilon: float

    @classmethod
    def of(cls, line):
        """Return the cell of a line of scaling.csv."""
        kind, clients, seed, method, epsilon = (line[key] for key in KEYS)
        return cls(kind, int(clients), int(seed), method, float(epsilon))


def smooth(rng, made, *shape):
    """Return fields of unit size that vary slowly over the pixels."""
    pixels = np.arange(made.side) + 0.5
    waves = np.cos(np.pi * np.outer(np.arange(made.waves), pixels) / made.side).astype(made.type)
    drawn = rng.standard_normal((*shape, made.waves, made.waves), dtype=made.type)
    found = np.einsum("...ab,ai,bj->...ij", drawn, waves, waves, optimize=True)
    return found / found.std(axis=(-2, -1), keepdims=True)


def images(made, clients, seed):
    """Return training and test rows of an image federation."""
    rng = np.random.default_rng([seed, 7])
    patterns, styles = smooth(rng, made, made.classes), made.style * smooth(rng, made, clients)
    rows = made.rows + TEST
    y = rng.integers(0, made.classes, (clients, rows))
    moves = rng.integers(-made.moved, made.moved + 1, (2, clients, rows))
    x = np.empty((clients, rows, made.side, made.side), np.float32)
    place = np.arange(made.side)
    for client in range(clients):
        i, j = ((place + by[client, :, None]).clip(0, made.side - 1) for by in moves)
        shown = patterns[y[client][:, None, None], i[:, :, None], j[:, None, :]] + styles[client]
        if made.own:
            shown += made.own * smooth(rng, made, rows)
        x[client] = shown + made.noise * rng.standard_normal(shown.shape, dtype=made.type)
    data = from_arrays(
        x.reshape(-1, made.side, made.side),
        y.reshape(-1),
        np.repeat(np.arange(clients), rows),
        task="multiclass",
        classes=made.classes,
        split=np.tile(np.arange(rows) >= made.rows, clients).astype(np.int8),
    )
    return data.split_by_source()


def filtered(rows):
    """Return public features of images: random filters, rectified and pooled."""
    draw = torch.Generator().manual_seed(0)
    kernels = torch.randn(FILTERS, 1, 3, 3, generator=draw) / 3
    found = torch.nn.functional.conv2d(rows[:, None].float(), kernels, padding=1).relu()
    return torch.nn.functional.max_pool2d(found, 4).flatten(1)


def federation(kind, clients, seed, featured=False):
    """Return training and test rows; `featured` with public features."""
    if kind in IMAGES:
        parts = images(IMAGES[kind], clients, seed)
        return tuple(embed(part, filtered) for part in parts) if featured else parts
    parts = mixed("nonlinear", clients=clients, seed=seed).data.split_by_source()
    made = Effects(basis="spline")
    return tuple(made.expand(part) for part in parts) if featured else parts


def method_of(kind, name):
    """Return the method of a cell."""
    model, plain = MODELS[kind], name.removesuffix(ADAPTED)
    if plain == "fedavg + finetuning":
        base = method_of(kind, name.replace(" + finetuning", ""))
        return Finetune(base=base)
    found = {
        "local linear": Local(),
        "local network": Local(model=model),
        "dpfedmtl": DPFedMTL(model=model),
        "pmtl": PMTL(model=model),
        "fedavg": FedAvg(model=model),
        "head": PFEB(model=Linear()),
    }[plain]
    return found if plain == name else Adaptive(base=found)


def cells(kind, clients, seed, epsilons, methods):
    """Yield the cells of a federation."""
    if clients <= LOCAL_MOST[kind]:
        yield from (Cell(kind, clients, seed, name, math.inf) for name in LOCAL)
    for epsilon in epsilons:
        yield from (Cell(kind, clients, seed, name, epsilon) for name in methods)


def measure(cell, device="cpu"):
    """Return the line of a cell; linear models are fitted on the CPU."""
    begun, method = time.perf_counter(), method_of(cell.kind, cell.method)
    train, test = federation(cell.kind, cell.clients, cell.seed, cell.method == "head")
    device = "cpu" if isinstance(method.model, Linear) else device
    sampler = (
        Poisson(LARGE_COHORT) if cell.kind == "large" and cell.clients > LARGE_COHORT else None
    )
    privacy = Privacy(epsilon=cell.epsilon)
    plan = plan_for(train.spec, privacy, method=method, sampler=sampler, simulation_seed=cell.seed)
    half = device != "cpu" and cell.kind == "large"  # products of steps only
    speed = Speed(device=device, precision="bfloat16" if half else "float32", block=500 * half)
    outcome = simulate(plan, train, speed=speed)
    found = evaluate(plan.method.model, outcome.rows, test.to(device))
    advice = advice_for(plan, train.spec)
    return dict(zip(KEYS, cell, strict=True)) | {
        "error": f"{1 - found.value if found.higher_is_better else found.value:.5f}",
        "rounds": plan.rounds,
        "verdict": "" if advice is None else advice.verdict,
        "seconds": f"{time.perf_counter() - begun:.1f}",
    }


def means(lines):
    """Return mean errors over seeds by kind, method, epsilon and clients; local is the better.

    Sizes without local training have that of the largest size below.
    """
    found = defaultdict(list)
    for line in lines:
        cell = Cell.of(line)
        found[cell.kind, cell.method, cell.epsilon, cell.clients].append(float(line["error"]))
    result = {key: float(np.mean(errors)) for key, errors in found.items()}
    for kind, size in sorted({(kind, size) for kind, _, _, size in result}):
        alone = [result.get((kind, one, math.inf, size), math.inf) for one in LOCAL]
        below = [n for k, m, _, n in result if (k, m) == (kind, "local") and n < size]
        usual = result[kind, "local", 0.0, max(below)] if below else math.nan
        result[kind, "local", 0.0, size] = min(alone) if min(alone) < math.inf else usual
    return result


def kinds_of(result):
    """Return the kinds that were measured."""
    return [kind for kind in MODELS if any(key[0] == kind for key in result)]


def ratios_of(result, kind, method, epsilon):
    """Return the sizes of a method, and its errors over those of local training."""
    sizes = sorted(n for k, m, e, n in result if (k, m, e) == (kind, method, epsilon))
    return sizes, [result[kind, method, epsilon, n] / result[kind, "local", 0.0, n] for n in sizes]


def pays_from(result, kind, method, epsilon):
    """Return from how many clients on joining is better by 1 % at all larger sizes; None if never.

    Sizes are those of the study.
    """
    found = None
    for size, ratio in zip(*map(reversed, ratios_of(result, kind, method, epsilon)), strict=True):
        if not ratio <= ENOUGH:
            break  # NaN, too
        found = size
    return found


def crossing(result, kind, method, epsilon):
    """Return about how many clients are needed: between two sizes, along a line in log-log."""
    start = pays_from(result, kind, method, epsilon)
    sizes, ratios = ratios_of(result, kind, method, epsilon)
    if start is None or start == sizes[0]:
        return start
    at = sizes.index(start)
    above, below = (
        math.log((ratio if ratio < 10 else 10) / ENOUGH) for ratio in ratios[at - 1 : at + 1]
    )
    share = above / (above - below)
    return sizes[at - 1] * (start / sizes[at - 1]) ** share


def shown_error(error):
    """Return an error as text; NaN and errors above 10 mean that training diverged."""
    return f"{error:.3f}" if error <= 10 else "diverges"


def table(result):
    """Return both tables as Markdown: errors, and from how many clients joining pays."""
    out = []
    for kind in kinds_of(result):
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
            if (method, epsilon) != ("local", 0.0) and not method.endswith(ADAPTED):
                out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def draw(result, folder):
    """Plot errors relative to the better local training, by size."""
    from mpmtl import canvas, save

    kinds = kinds_of(result)
    epsilons = sorted({e for _, _, e, _ in result if 0 < e < math.inf})
    figure, axes = canvas(len(kinds), len(epsilons), height=2.6)
    for place, axis in enumerate(axes):
        kind, epsilon = kinds[place // len(epsilons)], epsilons[place % len(epsilons)]
        for method, colour in COLOURS.items():
            sizes, ratios = ratios_of(result, kind, method, epsilon)
            axis.plot(sizes, ratios, label=method, color=colour, marker="o", markersize=3)
        axis.axhline(1, color="#555555", linestyle=":", label="local")
        axis.set(xscale="log", xlim=SHOWN, ylim=(0, 1.6))
        axis.set_title(f"{kind}, epsilon {epsilon:g}", fontsize=9)
        axis.set_xlabel("clients")
    axes[0].set_ylabel("error / error of local training")
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, folder / "scaling.svg")


def draw_pays(result, folder):
    """Plot how many clients it takes until joining pays, by epsilon."""
    from mpmtl import canvas, save

    kinds = kinds_of(result)
    epsilons = sorted({e for _, _, e, _ in result if 0 < e < math.inf})
    figure, axes = canvas(1, len(kinds), height=2.8)
    for kind, axis in zip(kinds, axes, strict=True):
        axis.set_ylim(SHOWN)  # a logarithmic axis without any point needs limits
        for method, colour in COLOURS.items():
            needed = [crossing(result, kind, method, epsilon) for epsilon in epsilons]
            shown = [math.nan if one is None else one for one in needed]
            axis.plot(epsilons, shown, label=method, color=colour, marker="o", markersize=3)
        axis.set(xscale="log", yscale="log", title=kind, xlabel="epsilon")
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.minorticks_off()
    axes[0].set_ylabel("clients until joining pays")
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, folder / "pays.svg")


def read(path):
    """Return the lines that are there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path, line):
    """Add a line."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(line)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["tabular", "image"])
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--methods", nargs="+", default=list(COLOURS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "scaling.csv"
    done = {Cell.of(line) for line in read(path)}
    for clients in asked.clients:
        for kind in asked.kinds:
            for seed in range(asked.seeds):
                for cell in cells(kind, clients, seed, asked.epsilon, asked.methods):
                    if cell not in done:
                        append(path, measure(cell, asked.device))
                        print(*cell, file=sys.stderr, flush=True)
    result = means(read(path))
    shown = table(result)
    (asked.out / "scaling.md").write_text(shown)
    draw(result, asked.out)
    draw_pays(result, asked.out)
    print(shown)


if __name__ == "__main__":
    main()
