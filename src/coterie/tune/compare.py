"""Compare methods: methods x epsilons x seeds over one base plan, as resumable runs.

A comparison is a plan (data, sampler, ...) with a table `[compare]`:

    [data]
    name = "districts"

    [compare]
    methods = ["local", "pmtl", {kind = "pmtl", label = "pmtl, strong", lam = 3.0}]
    epsilons = [0.5, 1, 2, 4]
    seeds = 3                         # or [0, 7, 8]; or repeats = 3 for real noise
    grid = {"method.lam" = [0.1, 1]}  # optional: settings chosen inside every cell

A cell is one method at one epsilon with one seed: one run folder, or one charged selection.
Methods that release nothing run once per seed. Centralised methods run without privacy and are
marked. A seed is a simulation seed of both the split and the noise.
"""

import copy
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from coterie.core.config import (
    ConfigError,
    assign,
    from_table,
    read_toml,
    refuse_code,
    to_table,
    to_toml,
)
from coterie.core.environment import go_offline, is_offline
from coterie.core.files import write_atomically
from coterie.core.signals import as_interrupt, stoppable
from coterie.core.suggest import did_you_mean, hint
from coterie.data.federated import ClientArrays, FederatedDataset
from coterie.evaluation.holdout import hold_out
from coterie.methods.base import Method, Shape, choices
from coterie.planning.plan import Plan, TunedOn, fill_kinds
from coterie.privacy.guarantee import (
    OTHERS,
    Guarantee,
    add_up,
    round_up,
    show_delta,
    spent_together,
)
from coterie.privacy.ledger import LedgerError, events_digest, locked
from coterie.privacy.selection import Selection
from coterie.runs.budget import REGISTER, Budget, Spending
from coterie.runs.run import execute, foresee
from coterie.runs.summary import TUNING
from coterie.tune.charge import RECORD, offer, read_record, select
from coterie.tune.tune import Observe, Progress, Range, Trial, rank, tune

PLAN = "compare.toml"
"""The file in a comparison's folder that holds the comparison."""
TABLE = "comparison.parquet"

DEFAULT_METHODS = ("local", "fedavg", "pmtl", "auto")
_BUDGET_SECTIONS = ("privacy", "rounds", "sampler")
_RELEASE_SECTIONS = ("rounds", "sampler", "stragglers")
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ATTEMPTS = 2  # of a cell whose worker dies
_QUIET = Budget(tell=lambda text: None)
"""The user's register, for cells: what was spent before is told once for all of them."""
_STOP_SECONDS = 10.0  # in which a worker stops its run in order

Row = dict[str, Any]


# --- the comparison -----------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The table `[compare]`."""

    methods: Any = DEFAULT_METHODS  # names, or tables with kind, label and settings
    epsilons: float | tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)  # budgets; infinity for no privacy
    seeds: int | tuple[int, ...] | None = None  # how many simulations, or their seeds
    repeats: int | None = None  # instead of seeds: how many runs with real noise
    workers: int | None = None  # processes; None for one per core, 0 for this process
    # Values by dotted key; a key with a label in front applies to that method only
    grid: Mapping[str, Any] = field(default_factory=dict)
    search: Literal["grid", "optuna"] = "grid"  # "grid" for all combinations, or "optuna"
    trials: int | None = None  # number of combinations that Optuna proposes
    folds: int = 5  # number of folds of each client's training rows
    public: bool = False  # the user's declaration that the data is public
    # Whether settings are chosen by charged private runs (`coterie.tune.charge`)
    charge: bool = False

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("workers", 0), ("trials", 1), ("folds", 2)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise ConfigError(f"{name} = {given}: expected an integer >= {least}")
        if not self.budgets or not all(epsilon > 0 for epsilon in self.budgets):
            raise ConfigError(f"epsilons = {self.epsilons}: expected positive numbers, or inf")
        if self.seeds is not None and self.repeats is not None:
            raise ConfigError(
                "seeds and repeats are both given: give seeds for simulations, or repeats for real "
                "noise"
            )
        if not self.seed_numbers or min(self.seed_numbers) < 0:
            raise ConfigError(f"seeds = {self.seeds}: expected how many, or integers >= 0")
        if not isinstance(self.grid, Mapping):
            raise ConfigError(f"grid = {self.grid!r}: expected a table of lists")

    @property
    def budgets(self) -> tuple[float, ...]:
        """The epsilons, ascending."""
        listed = self.epsilons if isinstance(self.epsilons, tuple) else (self.epsilons,)
        return tuple(sorted(set(listed)))

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds; with real noise the numbers of the repeats."""
        given = (3 if self.seeds is None else self.seeds) if self.repeats is None else self.repeats
        return tuple(range(given)) if isinstance(given, int) else tuple(dict.fromkeys(given))


@dataclass(frozen=True)
class Entry:
    """A method of a comparison."""

    label: str  # its name in tables
    settings: Mapping[str, Any]  # the method's table, including its kind
    # Changes of the base plan for this method, such as `{"rounds": 10}`
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The method's registered name."""
        return str(self.settings["kind"])

    @property
    def shape(self) -> Shape:
        """What the method releases; a sum if its settings are invalid."""
        table = {"method": copy.deepcopy(dict(self.settings))}
        fill_kinds(table)
        try:
            return from_table(Method, table["method"], "method").shape  # type: ignore[type-abstract]
        except ValueError:
            return Shape.SUM

    @property
    def has_release(self) -> bool:
        """Whether the method releases anything under a budget."""
        return self.shape not in (Shape.NONE, Shape.POOLED)

    @property
    def known_settings(self) -> set[str]:
        """The names of the method's settings."""
        return {one.name for one in fields(choices()[self.kind])}  # type: ignore[arg-type]

    def grid(self, grid: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a grid that applies to this method; its own keys take precedence."""
        found: dict[str, Any] = {}
        for key, values in grid.items():
            own = key.removeprefix(f"{self.label}.")
            if own != key:
                found[own] = values
            elif self._has(key):
                found.setdefault(key, values)
        return found

    def _has(self, key: str) -> bool:
        section, _, rest = key.partition(".")
        if section == "method":
            return rest == "kind" or rest.partition(".")[0] in self.known_settings
        return section in _BUDGET_SECTIONS and self.has_release


@dataclass(frozen=True)
class Cell:
    """One method at one epsilon with one seed."""

    label: str  # the label of its method
    kind: str  # the registered name of its method
    epsilon: float | None  # the budget; None if nothing is released
    seed: int  # of split and noise; with real noise, of the split only
    place: str  # its run folder, relative to the comparison's folder
    table: Mapping[str, Any]  # its plan
    grid: Mapping[str, Any]  # settings to choose from, by dotted key; empty for none
    refused: str | None = None  # why it cannot run, if that is known before data is opened

    @property
    def has_budget(self) -> bool:
        """Whether its epsilon is finite."""
        return (self.epsilon or math.inf) < math.inf


@dataclass(frozen=True)
class Comparison:
    """Methods, epsilons and seeds over a base plan."""

    base: Mapping[str, Any]  # the plan's table without method, epsilon and seeds
    entries: tuple[Entry, ...]  # the methods
    options: Options  # the table `[compare]`
    notes: tuple[str, ...] = ()  # sentences about settings that are ignored

    @property
    def real_noise(self) -> bool:
        """Whether each run is a release with secret noise."""
        return self.options.repeats is not None

    def to_table(self) -> dict[str, Any]:
        """Return the table that `make_comparison` reads; without `workers`."""
        compare = to_table(replace(self.options, workers=None))
        compare["methods"] = {
            entry.label: {**entry.settings, **({"plan": dict(entry.plan)} if entry.plan else {})}
            for entry in self.entries
        }
        return {**copy.deepcopy(dict(self.base)), "compare": compare}

    def cells(self) -> list[Cell]:
        """Return all cells by method, then epsilon, then seed."""
        return [cell for entry in self.entries for cell in self._cells(entry)]

    def _cells(self, entry: Entry) -> Iterator[Cell]:
        releases, grid = entry.has_release, entry.grid(self.options.grid)
        budgets: Sequence[float | None] = self.options.budgets
        if not releases:
            budgets = (math.inf,) if entry.shape is Shape.POOLED else (None,)
        for epsilon, seed in itertools.product(budgets, self.options.seed_numbers):
            table = _cell_table(entry, self.base, epsilon, seed, releases=releases)
            if not self.real_noise:
                table["simulation_seed"] = seed
            place = place_of(entry.label, epsilon, seed, real=self.real_noise)
            refused = None
            try:
                Plan.from_table(table)
            except ValueError as error:
                refused = str(error)
            yield Cell(entry.label, entry.kind, epsilon, seed, place, table, grid, refused)


def _cell_table(
    entry: Entry, base: Mapping[str, Any], epsilon: float | None, seed: int, *, releases: bool
) -> dict[str, Any]:
    table = _merged(base, entry.plan)
    table["method"] = copy.deepcopy(dict(entry.settings))
    privacy = table.setdefault("privacy", {})
    if not releases:
        table = {key: value for key, value in table.items() if key not in _RELEASE_SECTIONS}
        table["privacy"] = privacy = {k: privacy[k] for k in ("delta", "relation") if k in privacy}
    privacy["epsilon"] = math.inf if epsilon is None else epsilon
    assign(table, "data.split_seed", seed)
    # A comparison shows only final results; anything else that costs time must be asked for.
    table.setdefault("history", False)
    fill_kinds(table)
    return table


def place_of(label: str, epsilon: float | None, seed: int, *, real: bool) -> str:
    """Return the path of a cell's run folder.

    >>> place_of("pmtl", 0.5, 2, real=False)
    'runs/pmtl/epsilon-0.5/seed-2'
    """
    budget = "no-release" if epsilon is None else f"epsilon-{epsilon!r}".removesuffix(".0")
    return f"runs/{_slug(label)}/{budget}/{'repeat' if real else 'seed'}-{seed}"


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", label).strip("-.")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the values of another one on top, section by section."""
    made = copy.deepcopy(dict(below))
    for key, value in above.items():
        old: Any = made.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        made[key] = _merged(old, value) if both else copy.deepcopy(value)
    return made


def make_comparison(table: Mapping[str, Any]) -> Comparison:
    """Return the comparison of a plan's table with `[compare]`; raise ConfigError if invalid."""
    base = copy.deepcopy(dict(table))
    compare = base.pop("compare", {})
    if not isinstance(compare, dict):
        raise ConfigError(f"compare = {compare!r}: expected a table, such as [compare]")
    if "noise_multiplier" in base.get("privacy", {}):
        raise ConfigError("privacy.noise_multiplier is given: give [compare] epsilons instead")
    method = base.pop("method", {})
    base.get("privacy", {}).pop("epsilon", None)
    if "kind" in method:
        compare.setdefault("methods", [method.pop("kind")])
    options = from_table(Options, compare, "compare")
    named = list(_named(options.methods))
    own = {label: base.pop(label) for label, _ in named if isinstance(base.get(label), dict)}
    for key in base.keys() - {one.name for one in fields(Plan)}:
        near = hint(key, [label for label, _ in named])
        raise ConfigError(f"{key}: neither a setting of a plan nor the label of a method{near}")
    entries = tuple(_entry(label, table, own.get(label, {}), method) for label, table in named)
    shared = {f"method.{key}": [value] for key, value in method.items()}
    notes = (*_check_keys("", shared, entries), *_check_keys("grid ", options.grid, entries))
    return Comparison(base, entries, options, notes)


def _named(methods: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label and table of each method, in any of the accepted forms."""
    if isinstance(methods, Mapping):
        listed = [{"label": name, "kind": name, **dict(table)} for name, table in methods.items()]
    elif isinstance(methods, list | tuple) and methods:
        listed = [{"kind": m} if isinstance(m, str) else dict(m) for m in methods]
    else:
        raise ConfigError(f"methods = {methods!r}: expected names, such as ['local', 'pmtl']")
    seen = {one.name for one in fields(Plan)} | {"compare", ""}
    for table in listed:
        label = str(table.pop("label", table.get("kind", "")))
        if _slug(label) in seen or label in seen:
            raise ConfigError(
                f"method label {label!r}: expected a unique label for each method, with a letter "
                "or digit; give it as label = '...'"
            )
        seen.add(_slug(label))
        yield label, table


def _entry(
    label: str, table: dict[str, Any], own: Mapping[str, Any], shared: Mapping[str, Any]
) -> Entry:
    """Return a method with its own settings over those of all methods."""
    kind, kinds = table.get("kind"), choices()
    if kind not in kinds:
        raise ConfigError(f"method {kind}: no such method; {did_you_mean(str(kind), list(kinds))}")
    plan = _merged(table.pop("plan", {}), own)
    entry = Entry(label, _merged(table, plan.pop("method", {})), plan)
    if unknown := sorted(set(entry.settings) - entry.known_settings - {"kind"}):
        raise ConfigError(
            f"{label}: {kind} has no setting {', '.join(unknown)}"
            f"{hint(unknown[0], entry.known_settings)}; expected one of "
            f"{', '.join(sorted(entry.known_settings))}"
        )
    below = {key: value for key, value in shared.items() if key in entry.known_settings}
    return replace(entry, settings=_merged(below, entry.settings))


def _check_keys(flag: str, grid: Mapping[str, Any], entries: Sequence[Entry]) -> Iterator[str]:
    """Yield notes on methods that a key does not apply to; raise if it applies to none."""
    labels = tuple(f"{entry.label}." for entry in entries)
    for key, values in grid.items():
        if _range_of(values) is None and not (isinstance(values, list | tuple) and values):
            raise ConfigError(
                f"{flag}{key} = {values!r}: expected a list of values to try, or with Optuna a "
                "range such as '0.01..10'"
            )
        without = [entry.label for entry in entries if not entry.grid({key: values})]
        if len(without) == len(entries):
            known = {f"method.{name}" for entry in entries for name in entry.known_settings}
            raise ConfigError(
                f"{flag}{key}: none of the methods compared has this setting{hint(key, known)}"
            )
        if without and not key.startswith(labels):
            yield f"{key} is no setting of {', '.join(without)} and is ignored there"


def _range_of(values: Any) -> Range | None:
    """Read a range, which a plan writes as "0.01..10"; None if it is not one."""
    ends = values.split("..") if isinstance(values, str) else ()
    try:
        low, high = (int(end) if end.isdigit() else float(end) for end in ends)
    except ValueError:
        return None
    return Range(low, high)


# --- one cell -----------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a cell ended: "done", "refused" (plan and data do not match) or "failed", and why."""

    status: str
    why: str = ""
    seconds: float = 0.0


def read_comparison(folder: Path) -> Comparison:
    """Read the comparison of a folder."""
    return make_comparison(read_toml(folder / PLAN))


def check_trust(folder: Path, *, trust: bool) -> None:
    """Raise ConfigError if a plan in a comparison's folder names code, unless it is trusted."""
    for path in () if trust else sorted(folder.rglob("*.toml")):
        refuse_code(read_toml(path), path)


def claim_folder(folder: Path, comparison: Comparison) -> None:
    """Write a comparison to a new folder; raise FileExistsError if it holds runs already."""
    path = folder / PLAN
    if path.exists() or (folder / "plan.toml").exists() or (folder / "runs").exists():
        raise FileExistsError(
            f"{folder} already holds runs; resume with `coterie compare --resume {folder}`, or "
            "choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{folder}: the folder cannot be made ({error.strerror}); choose another --out"
        raise OSError(why) from error
    write_atomically(path, to_toml(comparison.to_table()).encode())


def finished(folder: Path) -> dict[Path, str]:
    """Return the finished run folders of a comparison with their labels, in its order."""
    cells = read_comparison(folder).cells()
    return {
        run_of(folder / cell.place): cell.label for cell in cells if is_done(folder / cell.place)
    }


def run_of(place: Path) -> Path:
    """Return the run that scores a cell: its own, or the one chosen by a charged selection."""
    record = read_record(place)
    return place if record is None else place / str(record["chosen"])


def is_done(place: Path) -> bool:
    """Return whether a cell is finished."""
    return (run_of(place) / "result.json").exists()


def read_result(place: Path) -> dict[str, Any]:
    """Read the summary of a finished run."""
    try:
        found: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
        _ = found["metric"], found["value"], found["seconds"]
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: result.json is damaged ({error!r}); remove it, and --resume writes it again"
        ) from error


def run_cell(
    cell: Cell, folder: Path, options: Options, data: FederatedDataset | None = None
) -> Ended:
    """Run or resume one cell; no error leaves it. `data` are its rows, if they are in memory."""
    started = time.perf_counter()
    place = folder / cell.place
    try:
        if not is_done(place):
            _run(cell, folder, options, data)
    except (ValueError, NotImplementedError) as error:
        # A folder is claimed once plan and data match.
        claimed = _is_begun(place)
        why, seconds = str(error) or type(error).__name__, time.perf_counter() - started
        return Ended("failed" if claimed else "refused", why, seconds)
    except Exception as error:  # the other cells must go on
        return Ended("failed", f"{type(error).__name__}: {error}")
    return Ended("done", seconds=time.perf_counter() - started)


def _run(cell: Cell, folder: Path, options: Options, data: FederatedDataset | None) -> None:
    place = folder / cell.place
    grid = {key: _range_of(values) or values for key, values in cell.grid.items()}
    if grid and data is not None:
        raise ValueError(
            "settings are chosen on data that can be read again: save the rows as Parquet and give "
            "the file, or leave the grid out"
        )
    if options.charge and cell.has_budget and grid:
        made = partial(select, cell.table, grid, folder=place, public=options.public)
        _when_free(partial(made, budget=_QUIET))
    else:
        plan = _plan_of(cell, grid, folder, options)
        _when_free(partial(execute, plan, folder=place, data=data, budget=_QUIET))


def _when_free(work: Callable[[], object], tries: int = 5) -> None:
    """Do work in a folder that a worker of a killed comparison may still lock for a moment."""
    for left in reversed(range(tries)):
        try:
            work()
            return
        except LedgerError:
            if not left:
                raise
            time.sleep(1.0)


def _plan_of(cell: Cell, grid: Mapping[str, Any], folder: Path, options: Options) -> Plan:
    """Return a cell's plan; settings are chosen once and kept in the comparison's folder."""
    place = folder / cell.place
    if (place / "plan.toml").exists():
        return Plan.load(place / "plan.toml")
    if not grid:
        return Plan.from_table(cell.table)
    kept = folder / f"{cell.place.replace('runs/', 'tuned/', 1)}.toml"
    if kept.exists():
        return Plan.load(kept)
    found = tune(
        cell.table,
        grid,
        folds=options.folds,
        seed=cell.seed,
        public=options.public,
        search=options.search,
        trials=None if options.search == "grid" else options.trials,
    )
    plan = replace(found.plan, simulation_seed=cell.table.get("simulation_seed"))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, to_toml(to_table(plan)).encode())
    return plan


# --- all cells, in worker processes -------------------------------------------


def carry_out(
    folder: Path,
    *,
    workers: int | None = None,
    observe: Observe | None = None,
    data: FederatedDataset | None = None,
    budget: Budget | None = REGISTER,
) -> dict[int, Ended]:
    """Run the unfinished cells of a claimed folder, and return how all cells ended.

    Every cell is a run folder, so finished cells are skipped and others resume. The cell of a dead
    worker is run once more. Cells that are expected to take longest run first. `workers` is None
    for one process per core, 0 for this process, which is also taken if methods are defined in the
    script or notebook itself: workers do not import it. `data` are the rows, if they are in memory.
    Cells with real noise are entered in the user's register; `budget` tells what was spent before.

    Raises:
        LedgerError: If another process works here.
        ValueError: If all cells together would exceed the total that the register declares.
    """
    comparison = read_comparison(folder)
    workers = _without_main(comparison, workers)
    with locked(folder):
        if budget is not None and comparison.real_noise:
            _check_totals(budget, comparison, folder, data)
        schedule = _Schedule(comparison.cells(), folder, observe)
        count = min(_cores() if workers is None else workers, len(schedule.left))
        if workers == 0:
            while (number := schedule.take()) is not None:
                cell = schedule.cells[number]
                schedule.end(number, run_cell(cell, folder, comparison.options, data))
        elif count:
            given = (folder, comparison.options, None if data is None else data.arrays())
            _run_parallel(schedule, given, count)
        return schedule.ended


def _check_totals(
    budget: Budget, comparison: Comparison, folder: Path, data: FederatedDataset | None
) -> None:
    """Tell what was spent; raise ValueError if the cells that are not begun exceed a total.

    Nothing remains of a comparison that is refused before its first cell.
    """
    cells = [
        cell
        for cell in comparison.cells()
        if cell.has_budget and cell.refused is None and not _is_begun(folder / cell.place)
    ]
    charged = [cell for cell in cells if cell.grid and comparison.options.charge]
    others = [Plan.from_table(cell.table) for cell in cells if cell not in charged]
    asked = [_foresee_choice(cell) for cell in charged]
    asked += foresee(others, data) if others else []
    try:
        text = budget.check(*asked)
    except ValueError:
        if {path.name for path in folder.iterdir()} <= {PLAN, ".lock"}:
            shutil.rmtree(folder)
        raise
    if text:
        budget.tell(text)


def _is_begun(place: Path) -> bool:
    return (place / "plan.toml").exists() or (place / RECORD).exists()


def _foresee_choice(cell: Cell) -> Spending | None:
    """Return what a charged choice of a cell's settings spends at most; None if it is refused."""
    try:
        return offer(cell.table, dict(cell.grid)).most_spending
    except ValueError:
        return None


def _without_main(comparison: Comparison, workers: int | None) -> int | None:
    """Return how many workers can run the comparison: none if it needs classes of `__main__`."""
    own = (choices()[entry.kind].__module__ == "__main__" for entry in comparison.entries)
    if not any(own) and '"__main__:' not in json.dumps(comparison.to_table()):
        return workers
    if workers:
        raise ValueError(
            f"workers = {workers}: worker processes do not import this script or notebook, which "
            "defines a method or network; define it in a module, or give workers = 0"
        )
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Schedule:
    """The cells that are left, busy and ended."""

    def __init__(self, cells: Sequence[Cell], folder: Path, observe: Observe | None) -> None:
        self.cells, self._folder, self._observe = cells, folder, observe
        self.ended: dict[int, Ended] = {}
        self.left: set[int] = set()
        self.busy: set[int] = set()
        self._seconds: dict[str, float] = {}  # of the last cell of a method
        self._scores: dict[str, Trial] = {}
        self._deaths: dict[int | None, int] = {}
        for number, cell in enumerate(cells):
            if cell.refused is not None:
                self.ended[number] = Ended("refused", cell.refused)
            elif is_done(folder / cell.place):
                self._note(number, Ended("done"))
            else:
                self.left.add(number)
        self._report()

    def take(self) -> int | None:
        """Return the cell that is expected to take longest; methods without a time come first."""
        if not self.left:
            return None
        times = self._seconds
        number = max(self.left, key=lambda n: (times.get(self.cells[n].label, math.inf), -n))
        self.left.remove(number)
        self.busy.add(number)
        return number

    def end(self, number: int, ended: Ended) -> None:
        """Record how a cell ended."""
        self.busy.discard(number)
        self._note(number, ended)
        self._report()

    def lose(self, number: int | None, how: str) -> None:
        """Repeat the cell of a dead worker, or let it fail; None for a worker without a cell."""
        deaths = self._deaths[number] = self._deaths.get(number, 0) + 1
        log = self._folder / "workers.log"
        if number is None:
            if deaths > 2 * _ATTEMPTS:
                raise OSError(f"workers end before their first cell ({how}): see {log}")
        elif deaths < _ATTEMPTS:
            self.busy.discard(number)
            self.left.add(number)
        else:
            self.end(
                number, Ended("failed", f"its process ended {deaths} times ({how}); see {log}")
            )

    def _note(self, number: int, ended: Ended) -> None:
        cell = self.cells[number]
        self.ended[number] = ended
        if ended.status != "done":
            return
        result = read_result(run_of(self._folder / cell.place))
        self._seconds[cell.label] = ended.seconds or result["seconds"]
        if cell.has_budget:
            value = math.nan if result["value"] is None else float(result["value"])
            settings = {"method": cell.label, "epsilon": cell.epsilon}
            before = self._scores.get(str(settings), Trial(settings, result["metric"]))
            self._scores[str(settings)] = replace(before, folds=(*before.folds, value))

    def _report(self) -> None:
        if self._observe is not None:
            trials = rank(list(self._scores.values()))
            self._observe(Progress(len(self.ended), len(self.cells), trials))


_Given = tuple[Path, Options, ClientArrays | None]
"""What a worker gets: the folder, the options, and the rows if they are in memory."""


def _run_parallel(schedule: _Schedule, given: _Given, count: int) -> None:
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            _Worker(workers, given)
        while schedule.left or schedule.busy:
            ready = wait([worker.pipe for worker in workers])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                if worker.exchange(schedule):
                    continue
                workers.remove(worker)
                schedule.lose(worker.cell, worker.join())
                if schedule.left:
                    _Worker(workers, given)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.join()


class _Worker:
    """A worker process, its pipe, and the number of its cell."""

    def __init__(self, workers: "list[_Worker]", given: _Given) -> None:
        self.cell: int | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *given), daemon=True)
        with _worker_environment():
            self.process.start()
            theirs.close()
            workers.append(self)

    def exchange(self, schedule: _Schedule) -> bool:
        """Record the result of its cell and send the next one; return whether it is alive."""
        try:
            ended = self.pipe.recv()
        except (EOFError, OSError):
            return False
        if self.cell is not None:  # the first message of a worker belongs to no cell
            schedule.end(self.cell, ended)
        self.cell = schedule.take()
        try:
            if self.cell is not None:
                self.pipe.send(schedule.cells[self.cell])
        except OSError:
            return False
        return True

    def join(self) -> str:
        """Wait for its end, and return how it ended."""
        self.process.join(_STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        status = self.process.exitcode or 0
        return f"signal {-status}" if status < 0 else f"exit status {status}"


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Start processes with one thread and with SIGINT blocked: their parent handles Ctrl-C.

    A script is hidden from them: to import it would run it again, unless it has a guard.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {k: vars(main)[k] for k in ("__file__", "__spec__") if k in vars(main)}
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    vars(main).update(__spec__=None)
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(hidden)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(
    pipe: Connection, folder: Path, options: Options, arrays: ClientArrays | None = None
) -> None:
    """Run cells from a pipe in a worker process, until the parent process ends."""
    data = None if arrays is None else arrays.tensors()
    log = os.open(folder / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if is_offline():
        go_offline()
    try:
        with stoppable(lambda: "stopped"), as_interrupt():
            pipe.send(None)
            while True:
                pipe.send(run_cell(pipe.recv(), folder, options, data))
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(3)  # in the middle of a run: its folder can be resumed


# --- privacy spent ------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """The privacy that cells have spent."""

    # Of cells with a budget and a release; that of a selection covers all its runs
    guarantees: tuple[Guarantee, ...] = ()
    # Unfinished cells with a release; their whole plan is counted
    unfinished: tuple[Path, ...] = ()
    # Cells with a release that cannot be accounted for, and why
    uncounted: tuple[tuple[Path, str], ...] = ()

    @property
    def together(self) -> tuple[float, float] | None:
        """Epsilon and delta against other clients who see all releases; None without a bound."""
        return add_up(self.guarantees) if self.guarantees and not self.uncounted else None

    def text(self) -> str:
        """Return one or two sentences."""
        if self.uncounted:
            why = "; ".join(f"{place}: {reason}" for place, reason in self.uncounted)
            text = f"NO BOUND on the privacy spent: cells cannot be accounted for ({why})"
            if not self.guarantees:
                return f"{text}."
            epsilon, delta = add_up(self.guarantees)
            at = f"epsilon = {round_up(epsilon)} at delta = {show_delta(delta)}"
            return f"{text}; the others: {at}."
        if not self.guarantees:
            return "No run with a budget has a release."
        text = spent_together(self.guarantees)
        if self.unfinished:
            named = ", ".join(map(str, self.unfinished))
            text += f" Unfinished cells count with their whole plan: {named}."
        return text


def privacy_spent(places: Sequence[Path]) -> Spent:
    """Return the privacy that cells have spent, finished or not.

    A cell that failed after its first release counts with its whole plan, because it may resume.
    An interrupted selection counts with all runs that it drew. If neither can be read, there is no
    bound.
    """
    found: list[Guarantee] = []
    unfinished: list[Path] = []
    uncounted: list[tuple[Path, str]] = []
    for place in filter(has_charged, places):
        try:
            stated, done = _stated(place)
        except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
            uncounted.append((place, str(error) or type(error).__name__))
            continue
        if stated.events and stated.epsilon < math.inf:
            found.append(stated)
            unfinished += [] if done else [place]
    return Spent(tuple(found), tuple(unfinished), tuple(uncounted))


def has_charged(place: Path) -> bool:
    """Return whether a cell, or a run of its selection, has charged a release."""
    ledgers = [place / "ledger.jsonl", place / "scores" / "ledger.jsonl"]
    ledgers += sorted(place.glob("runs/*/ledger.jsonl"))
    return any(b'"charge"' in path.read_bytes() for path in ledgers if path.exists())


def _stated(place: Path) -> tuple[Guarantee, bool]:
    """Return what a cell has spent or may still spend, and whether it is finished."""
    if (place / RECORD).exists() or (place / "scores").exists():
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
        drawn = [int(number) for number in record["guarantee"]["drawn"]]
        return Selection.from_json(record["guarantee"]).of_runs(drawn), bool(record["finished"])
    with (place / "ledger.jsonl").open(encoding="utf-8") as lines:
        header = json.loads(lines.readline())
    if (place / "result.json").exists():
        text = (place / "guarantee.json").read_text(encoding="utf-8")
        return Guarantee.from_json(json.loads(text)), True
    run_plan = Plan.load(place / "plan.toml")
    train, _ = run_plan.data.split()
    if run_plan.newcomers is not None:
        train, _ = hold_out(train, run_plan.newcomers, run_plan.data.split_seed)
    planned = run_plan.guarantee(train.spec.clients)
    if events_digest(planned.events) != header["events"]:
        raise ValueError("its ledger charged other releases than its plan and rows now give")
    return planned, False


# --- results ------------------------------------------------------------------

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "data": (pa.string(), "name or file"),
    "method": (pa.string(), "registered name"),
    "label": (pa.string(), "label in the comparison"),
    "settings": (pa.string(), "JSON: the resolved settings of method, privacy and rounds"),
    "epsilon_asked": (pa.float64(), "the budget; null if nothing is released"),
    "epsilon": (pa.float64(), "computed, an upper bound; inf if NOT PRIVATE"),
    "epsilon_chosen_alone": (pa.float64(), "of a charged choice: against a recipient of the run"),
    "delta": (pa.float64(), "delta of epsilon"),
    "relation": (pa.string(), "zero_out or replace"),
    "view": (pa.string(), "the adversary that epsilon holds against"),
    "seed": (pa.int64(), "of split and noise; of the split only with real noise"),
    "metric": (pa.string(), "nmse (smaller is better) or accuracy (larger is better)"),
    "value": (pa.float64(), "over all test rows"),
    "standard_error": (pa.float64(), "of value, over clients"),
    "local_value": (pa.float64(), "the metric of the local baseline"),
    "share_better_than_local": (pa.float64(), "of clients, by their own errors"),
    "client_error_p90": (pa.float64(), "90th percentile of clients' own errors (nmse)"),
    "client_accuracy_p10": (pa.float64(), "10th percentile of clients' own accuracies"),
    "clients": (pa.int64(), "number of clients"),
    "rounds": (pa.int64(), "number of releases"),
    "seconds": (pa.float64(), "duration of the run"),
    "tuning": (
        pa.string(),
        "none, on public data, CHARGED: ..., NOT COVERED: ..., or two of these",
    ),
    "private": (pa.bool_(), "false if the run is NOT PRIVATE (epsilon is infinite)"),
    "simulation": (pa.bool_(), "true if the noise has a known seed and protects nobody"),
    "status": (pa.string(), "done, refused: why, failed: why, or not run"),
    "run": (pa.string(), "run folder, relative to the comparison's"),
}
"""Columns of `comparison.parquet`: type and meaning."""


def rows_of(cells: Sequence[Cell], ended: Mapping[int, Ended], folder: Path) -> list[Row]:
    """Return one row per cell."""
    return [_row(cell, ended.get(number), folder) for number, cell in enumerate(cells)]


def _row(cell: Cell, ended: Ended | None, folder: Path) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"data": cell.table["data"]["name"], "method": cell.kind, "label": cell.label}
    row |= {"epsilon_asked": cell.epsilon, "seed": cell.seed, "run": cell.place}
    row["simulation"] = "simulation_seed" in cell.table
    row["settings"] = json.dumps({k: v for k, v in cell.table["method"].items() if k != "kind"})
    if ended is None or ended.status != "done":
        row["status"] = "not run" if ended is None else f"{ended.status}: {ended.why}"
        return row
    place = run_of(folder / cell.place)
    result, plan = read_result(place), read_toml(place / "plan.toml")
    for key in COLUMNS.keys() & result.keys() - {"method", "run"}:
        value = result[key]
        row[key] = float(value) if value in ("inf", "-inf") else value
    settings = {k: v for k, v in plan["method"].items() if k != "kind"}
    privacy = {key: value for key, value in plan["privacy"].items() if key != "epsilon"}
    row["settings"] = json.dumps({**settings, "rounds": plan.get("rounds"), "privacy": privacy})
    record = read_record(folder / cell.place)
    if record is not None:
        row |= _charged(record, plan.get("tuned", "charged"))
    row["run"] = place.relative_to(folder).as_posix()
    return row | {"private": row["epsilon"] < math.inf, "status": "done"}


def _charged(record: Mapping[str, Any], tuned: TunedOn) -> Row:
    """Return the cost of a charged choice: against other clients, all runs and scores count.

    An earlier choice that is not covered stays so, and comes first.
    """
    stated = Selection.from_json(record["guarantee"])
    drawn = record["guarantee"]["drawn"]
    text = f"CHARGED: epsilon covers {len(drawn)} runs and their scores, one of which was chosen"
    both = {"epsilon": stated.of_runs(drawn).epsilon, "epsilon_chosen_alone": stated.chosen_alone}
    text = text if tuned == "charged" else f"{TUNING[tuned]}; {text}"
    return {**both, "tuning": text, "view": OTHERS}


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return one row per cell; columns carry their meaning as metadata."""
    schema = pa.schema(
        [
            pa.field(name, kind, metadata={"description": text})
            for name, (kind, text) in COLUMNS.items()
        ]
    )
    return pa.Table.from_pylist(list(rows), schema=schema)


def write_table(folder: Path, rows: Sequence[Row]) -> Path:
    """Write `comparison.parquet`."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table_of(rows), buffer)
    write_atomically(folder / TABLE, buffer.getvalue().to_pybytes())
    return folder / TABLE
