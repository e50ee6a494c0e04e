"""Figures of docs/papers from the CSVs that papers_femnist.py wrote: those whose CSV is there."""

import math
from pathlib import Path

from mpmtl import canvas, plain_ticks, save
from neural import OUT as STUDY
from neural import read, summarise
from neural_figures import COLOURS

NAMES = {
    "fedmtl": "FedMTL", "fedavg": "FedAvg", "fedprox": "FedProx", "local": "Local",
    "pmtl": "PMTL", "pmtl, shared": "PMTL, change from shared",
}  # fmt: skip
COLOUR = COLOURS | {"fedmtl": COLOURS["dpfedmtl"], "pmtl, shared": "#f2a900"}


def draw(folder: Path) -> None:
    """Draw what there are CSVs for."""
    for name, figure in {"tables": figure_4, "figure3": figure_3, "grid": figure_5}.items():
        if (folder / f"{name}.csv").exists():
            figure(read(folder / f"{name}.csv"), folder)


def figure_4(lines, folder: Path) -> None:
    """DPFedMTL, Figure 4: accuracy by round, without noise and at published sigmas."""
    figure, axes = canvas(1, 4)
    for axis, sigma in zip(axes, ("0", "0.65", "2.42", "9.69"), strict=True):
        for name in ("local", "fedavg", "fedmtl"):
            wanted = "0" if name == "local" else sigma
            mine = [one for one in lines if (one["method"], one["sigma"]) == (name, wanted)]
            _curve(axis, mine, "round", name, _noisy(name, sigma))
        axis.set_xscale("log")
        axis.set_xlabel("round")
        axis.set_ylim(0, 0.9)
        axis.set_title("no noise" if sigma == "0" else f"sigma = {sigma}", fontsize=9)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("accuracy, all test rows")
    save(figure, folder / "figure-4.svg")


def _noisy(name: str, sigma: str) -> str:
    return NAMES[name] if sigma == "0" or name == "local" else f"DP{NAMES[name]}"


def _curve(axis, lines, column: str, name: str, label: str) -> None:
    """Draw means over seeds with standard errors, where all seeds have a value."""
    found = summarise(
        lines, keys=(column,), score="accuracy" if "accuracy" in lines[0] else "weighted"
    )
    points = sorted((float(key[0]), *value) for key, value in found.items())
    axis.errorbar(
        [one[0] for one in points],
        [one[1] for one in points],
        [0 if math.isnan(one[2]) else one[2] for one in points],
        label=label, color=COLOUR[name], marker="o", markersize=3, capsize=2,
        linestyle="--" if name == "fedprox" else "-",
    )  # fmt: skip


def figure_3(lines, folder: Path) -> None:
    """PMTL, Figures 3 and 7: accuracy by epsilon, as methods leave it and finetuned."""
    study = read(STUDY / "study.csv") if (STUDY / "study.csv").exists() else []
    figure, axes = canvas(1, 2)
    for axis, way in zip(axes, ("none", "plain"), strict=True):
        for name in ("pmtl", "fedavg", "fedprox"):
            mine = [
                one for one in (*study, *lines)
                if (one["method"], one["finetune"]) == (name, way) and one["epsilon"] != "inf"
            ]  # fmt: skip
            _curve(axis, mine, "epsilon", name, NAMES[name])
        axis.set_xscale("log")
        axis.set_ylim(0, 0.75)
        plain_ticks(axis)
        axis.set_xlabel("epsilon (delta = 1e-5)")
        axis.set_title(
            "as the method leaves it" if way == "none" else "plain finetuning", fontsize=9
        )
    axes[0].set_ylabel("accuracy, all test rows")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "figure-3.svg")


def figure_5(lines, folder: Path) -> None:
    """PMTL, Figures 5 and 2: accuracy by epsilon over the grid; loss by round in one cell."""
    from matplotlib.ticker import NullFormatter

    figure, axes = canvas(1, 2)
    last = max(int(one["round"]) for one in lines)
    ends = [one for one in lines if one["last"] == "1" and int(one["round"]) == last]
    for name in ("pmtl", "pmtl, shared", "fedavg"):
        mine = [one for one in ends if one["method"] == name]
        # Cells may have the same epsilon, and yet other noise and clips.
        found = summarise(mine, keys=("zero_out", "sigma", "gamma"), score="accuracy")
        axes[0].plot(
            [float(key[0]) for key in found], [value[0] for value in found.values()], "o",
            label=NAMES[name], color=COLOUR[name], markersize=4,
        )  # fmt: skip
    axes[0].set_xscale("log")
    plain_ticks(axes[0])
    axes[0].xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_xlabel("epsilon (zero_out, delta = 1/m)")
    axes[0].set_title(f"after {last} rounds, every sigma and gamma", fontsize=9)
    axes[0].set_ylabel("accuracy, all test rows")
    axes[0].legend(frameon=False, fontsize=8)
    cell = ("0.01", "0.2") if any(one["sigma"] == "0.01" for one in lines) else ("0.02", "0.2")
    for name in ("pmtl", "pmtl, shared", "fedavg"):
        mine = [
            one for one in lines
            if (one["method"], one["sigma"], one["gamma"], one["last"]) == (name, *cell, "0")
        ]  # fmt: skip
        found = summarise(mine, keys=("round",), score="loss")
        points = sorted((int(key[0]), value[0]) for key, value in found.items())
        axes[1].plot(*zip(*points, strict=True), color=COLOUR[name])
    axes[1].set_xscale("log")
    plain_ticks(axes[1])
    axes[1].set_xlabel("round")
    axes[1].set_title(f"training loss, sigma {cell[0]}, gamma {cell[1]} (Figure 2)", fontsize=9)
    save(figure, folder / "figure-5.svg")
