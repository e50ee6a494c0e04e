"""Tables and plots of docs/methods/neural.md, from the CSVs that neural.py wrote."""

import math
from pathlib import Path

from mpmtl import canvas, save
from neural import WAYS, read, summarise

NAMES = {
    "local": "local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "pmtl": "PMTL",
    "dpfedmtl": "DPFedMTL",
    "naive_dp": "naive",
}
COLOURS = {
    "fedavg": "#4c78a8",
    "fedprox": "#72b7b2",
    "pmtl": "#e45756",
    "dpfedmtl": "#54a24b",
    "local": "#555555",
    "naive_dp": "#b279a2",
}


def draw(folder: Path) -> None:
    """Draw what there are CSVs for."""
    parts = {"study": _study, "curves": _curves, "naive": _naive, "new": _new}
    for name, part in parts.items():
        if (folder / f"{name}.csv").exists():
            part(read(folder / f"{name}.csv"), folder)


def _cell(found) -> str:
    mean, error = found
    return f"{mean:.3f} ({1000 * error:.0f})" if math.isfinite(error) else f"{mean:.3f}"


def _columns(lines) -> list[str]:
    return sorted({line["epsilon"] for line in lines if line["method"] != "local"}, key=float)


def _study(lines, folder: Path) -> None:
    _grid(lines, folder / "study.md")
    facts = {(n["epsilon"], n["method"]): n for n in lines if n["method"] != "local"}
    with (folder / "plans.md").open("w") as file:
        file.write(
            "| epsilon at 1e-5 | epsilon at 1/m | method | rounds | noise multiplier | parameters "
            "released | relative error |\n|---|---|---|---|---|---|---|\n"
        )
        for (epsilon, method), line in facts.items():
            if epsilon == "inf" or method in ("fedprox", "pmtl"):
                continue
            who = NAMES[method] if method == "dpfedmtl" else "FedAvg, FedProx, PMTL"
            file.write(
                f"| {epsilon} | {float(line['epsilon_at_1_over_m']):.3g} | {who} | "
                f"{line['rounds']} | {float(line['noise_multiplier']):.3g} | "
                f"{int(line['posted_numbers']):,} | {float(line['relative_error']):.3g} |\n"
            )
    _frontier(lines, folder)


def _grid(lines, path: Path) -> None:
    scores, columns = summarise(lines), _columns(lines)
    alone = scores[("local", "none", "0")]
    with path.open("w") as file:
        file.write("| method | finetuning | " + " | ".join(columns) + " |\n")
        file.write("|---|---|" + "---|" * len(columns) + "\n")
        file.write(f"| local | none | {_cell(alone)} |" + " |" * (len(columns) - 1) + "\n")
        if ("local", "plain", "0") in scores:
            longer = _cell(scores[("local", "plain", "0")])
            file.write(f"| local | plain | {longer} |" + " |" * (len(columns) - 1) + "\n")
        for method in ("fedavg", "fedprox", "pmtl", "dpfedmtl"):
            for way in WAYS:
                if (method, way, columns[0]) not in scores:
                    continue
                cells = [_cell(scores[(method, way, column)]) for column in columns]
                file.write(f"| {NAMES[method]} | {way} | " + " | ".join(cells) + " |\n")


def _frontier(lines, folder: Path) -> None:
    figure, axes = canvas(1, 2)
    scores, columns = summarise(lines), _columns(lines)
    places = list(range(len(columns)))
    alone = scores[("local", "none", "0")]
    for axis, ways, title in (
        (axes[0], ("none",), "as the method leaves it"),
        (axes[1], WAYS[1:], "best of four finetunings"),
    ):
        for method in ("fedavg", "fedprox", "pmtl", "dpfedmtl"):
            best = [max(scores[(method, way, column)] for way in ways) for column in columns]
            axis.errorbar(
                places,
                [mean for mean, _ in best],
                [error for _, error in best],
                label=NAMES[method],
                color=COLOURS[method],
                marker="o",
                markersize=3,
                capsize=2,
            )
        axis.axhline(alone[0], color=COLOURS["local"], linestyle=":", label="local")
        axis.set_xticks(places, columns)
        axis.set_xlabel("epsilon (delta = 1e-5)")
        axis.set_title(title, fontsize=9)
        axis.set_ylim(0, 0.9)
    axes[0].set_ylabel("accuracy, all test rows")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "frontier.svg")


def _curves(lines, folder: Path) -> None:
    budgets = sorted({line["budget"] for line in lines}, key=float)
    figure, axes = canvas(2, len(budgets), height=2.6)
    for place, budget in enumerate(budgets):
        top, bottom = axes[place], axes[len(budgets) + place]
        for method in ("fedavg", "fedprox", "pmtl", "dpfedmtl"):
            mine = [n for n in lines if n["budget"] == budget and n["method"] == method]
            rounds = [int(n["round"]) for n in mine]
            losses = [min(float(n["loss"]), 1e4) for n in mine]
            top.plot(rounds, losses, color=COLOURS[method], label=NAMES[method])
            if method == "fedavg" and budget != "inf":
                bottom.plot(rounds, [float(n["epsilon"]) for n in mine], color="black")
        top.set_yscale("log")
        top.set_title(f"budget: epsilon = {budget}", fontsize=9)
        bottom.set_xlabel("round")
        if budget == "inf":
            bottom.text(0.5, 0.5, "no noise: infinite", ha="center", transform=bottom.transAxes)
    axes[0].set_ylabel("training loss")
    axes[len(budgets)].set_ylabel("epsilon spent")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "curves.svg")


def _naive(lines, folder: Path) -> None:
    scores = summarise(lines, keys=("method", "epsilon"))
    with (folder / "naive.md").open("w") as file:
        columns = sorted({line["epsilon"] for line in lines}, key=float)
        file.write("| method | " + " | ".join(f"epsilon {c}" for c in columns) + " |\n")
        file.write("|---|" + "---|" * len(columns) + "\n")
        for method in ("naive_dp", "fedavg", "pmtl"):
            cells = [_cell(scores[(method, column)]) for column in columns]
            file.write(f"| {NAMES[method]} | " + " | ".join(cells) + " |\n")


def _new(lines, folder: Path) -> None:
    _grid(lines, folder / "new.md")
