"""FEMNIST on public features: 105 writers share part of a linear head under a privacy budget.

    python examples/public_features.py --data ../shared/data/femnist/femnist.npz --epsilon 2,4,8

1. Public: a small network is trained on characters drawn from matplotlib's fonts (cached under
   --cache). It gives 96 features in the order of their principal directions.
2. Each writer maps its images to features, row by row.
3. `PMTL(shared="slice")` learns the weights of the first 16 directions for 62 classes, and the
   biases, under a budget. Then each writer fits its own whole head, regularised towards the shared
   one, and chooses the penalty by its own rows.

Baselines: the public head; local training, regularised towards the public head (with the same
choice of the penalty, and with one penalty for all) or towards zero; sharing the biases only; and
the same method without privacy. The rule sets rounds and clip; docs/public-features.md documents
how the other settings were chosen.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from public_features.network import PublicMap, public_map

import coterie as ct
from coterie.core.rng import Rng
from coterie.data.scaling import embed
from coterie.methods.pmtl import PMTL
from coterie.models.linear import Linear, save_start

DIRECTIONS = 16
LAM = 0.1
LOCAL_LAMS = (0.03, 0.1, 0.3)
ZERO_LAM = 0.01  # towards zero, where a smaller penalty is better
STEPS = 1200
LOCAL = "local, towards the public head"


@dataclass(frozen=True)
class Line:
    """One line of the table: each writer's accuracy, NaN without test rows."""

    name: str
    epsilon: float | None
    accuracy: NDArray[np.float64]


def main() -> None:
    """Train, federate, print a table and draw a plot."""
    options = _options()
    start = time.perf_counter()

    def log(line: str) -> None:
        print(f"[{time.perf_counter() - start:5.0f} s] {line}", flush=True)

    whole = ct.load(options.data, ct.Source(classes=62))
    lines: dict[str, list[Line]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            public = public_map(seed, options.steps, options.cache, log)
            head = Path(folder) / f"head{seed}.npz"
            save_start(head, public.head)
            for line in study(whole, public, head, options.epsilon, seed):
                lines.setdefault(line.name, []).append(line)
                log(f"seed {seed}: {line.name}: {np.nanmean(line.accuracy):.3f}")
    print(table(lines))
    if options.plot:
        draw(lines, options.plot)
        log(f"plot in {options.plot}")


def study(
    whole: ct.FederatedDataset,
    public: PublicMap,
    head: Path,
    epsilons: list[float],
    seed: int,
) -> Iterator[Line]:
    """Score everything on the features of one public map."""
    train, test = embed(whole, public).split_by_source()
    method = PMTL(model=Linear(start=str(head)), shared="slice", directions=DIRECTIONS, lam=LAM)

    def scored(name: str, models: Callable, epsilon: float | None = None) -> Line:
        return Line(name, epsilon, 1 - ct.evaluate(method.model, models, test).clients)

    first = method.init(train.spec, Rng.seeded(0))
    yield scored("public head", lambda ids: method.init_client_state(first, train.spec, len(ids)))
    yield scored(f"{LOCAL}, own choice of lam", last_solve(method, train))
    for lam in LOCAL_LAMS:
        yield scored(f"{LOCAL}, lam {lam:g}", last_solve(replace(method, last_lam=lam), train))
    for epsilon in (*epsilons, math.inf):
        name = "without privacy" if epsilon == math.inf else f"epsilon {epsilon:g}"
        models = together(method, train, epsilon, seed)
        yield scored(f"together, {DIRECTIONS} directions, {name}", models, epsilon)
    if seed == 0:  # for comparison, with one network
        models = last_solve(replace(method, model=Linear(), last_lam=ZERO_LAM), train)
        yield scored("local, towards zero (seed 0)", models)
        models = together(replace(method, directions=0), train, 4.0, seed)
        yield scored("together, biases only, epsilon 4 (seed 0)", models)


def last_solve(method: PMTL, train: ct.FederatedDataset) -> Callable:
    """Fit every client's head to its own rows, from the model's public start."""
    shared = method.init(train.spec, Rng.seeded(0))
    clients = train.clients(np.arange(len(train)))
    start = method.init_client_state(shared, train.spec, len(train))
    fitted = method.personalise(shared, start, clients, Rng.seeded(0))
    return lambda ids: {name: leaf[torch.as_tensor(ids)] for name, leaf in fitted.items()}


def together(method: PMTL, train: ct.FederatedDataset, epsilon: float, seed: int) -> Callable:
    """Run the rounds that the rule gives; a seeded run gives no privacy."""
    privacy = ct.Privacy(epsilon=epsilon, clip=1e6 if epsilon == math.inf else None)
    plan = ct.plan_for(train.spec, privacy, method=method, simulation_seed=seed)
    return ct.simulate(plan, train).rows


def table(lines: dict[str, list[Line]]) -> str:
    """Return means over writers and seeds, with standard errors over writers."""
    best = max((name for name in lines if LOCAL in name), key=lambda name: _mean(lines[name]))
    rows = ["| | accuracy | standard error | gain | its standard error | worse off |"]
    rows.append("|---|---|---|---|---|---|")
    for name, of in lines.items():
        own = np.mean([line.accuracy for line in of], axis=0)
        # Compare on the same networks: some lines have one seed only.
        gain = own - np.mean([line.accuracy for line in lines[best][: len(of)]], axis=0)
        compared = "together" in name
        cells = (
            *(f"{np.nanmean(own):.3f}", f"{_error(own):.3f}"),
            f"{np.nanmean(gain):+.3f}" if compared else "",
            f"{_error(gain):.3f}" if compared else "",
            f"{np.nanmean(gain[~np.isnan(gain)] < 0):.0%}" if compared else "",
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append("")
    rows.append(f"Gain, and writers worse off: against '{best}', the best on the test rows.")
    return "\n".join(rows)


def draw(lines: dict[str, list[Line]], path: Path) -> None:
    """Plot accuracy against epsilon, with local training and training without privacy."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "public features"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    joined = [of for of in lines.values() if of[0].epsilon is not None]
    private = [of for of in joined if of[0].epsilon != math.inf]
    axes.errorbar(
        [of[0].epsilon for of in private],
        [_mean(of) for of in private],
        yerr=[_error(np.mean([line.accuracy for line in of], axis=0)) for of in private],
        marker="o",
        capsize=3,
        label=f"together, {DIRECTIONS} public directions",
    )
    local = max((of for name, of in lines.items() if LOCAL in name), key=_mean)
    flat = {"without privacy": joined[-1], LOCAL: local}
    for (name, of), style in zip(flat.items(), ("--", "-."), strict=True):
        axes.axhline(_mean(of), linestyle=style, color="0.4", label=name)
    axes.set(xlabel="epsilon", ylabel="accuracy, mean over writers", xscale="log")
    ticks = [of[0].epsilon for of in private]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    nothing = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=nothing)


def _mean(of: list[Line]) -> float:
    return float(np.nanmean([line.accuracy for line in of]))


def _error(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1) / math.sqrt(len(known)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="femnist.npz")
    parser.add_argument("--epsilon", default="2,4,8", help="budgets, with commas")
    parser.add_argument("--seeds", default=3, type=int, help="of the network and of the noise")
    parser.add_argument("--steps", default=STEPS, type=int, help="of the network's training")
    usual = Path.home() / ".cache" / "coterie" / "public_features"
    parser.add_argument("--cache", default=usual, type=Path, help="where networks are kept")
    parser.add_argument("--plot", type=Path, default=Path("public_features.svg"))
    options = parser.parse_args()
    options.epsilon = [float(part) for part in options.epsilon.split(",")]
    return options


if __name__ == "__main__":
    main()
