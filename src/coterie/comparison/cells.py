"""The cells of a comparison: for every method, epsilon and seed, the plan of one run.

Methods that post nothing are run once per seed, whatever epsilon. Methods that bring rows together
(shape POOLED) are run without privacy, and marked so. A seed is a simulation seed: it moves the
split into training and test rows together with the noise. A method that cannot be made with the
base plan's model is a cell that is refused, with the reason.
"""

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from coterie.config import from_table
from coterie.methods.base import Method, Shape
from coterie.run_plan import assign, lay_kinds, plan_from_table

_BUDGETS = ("privacy", "rounds", "sampler")
_POSTED = ("rounds", "sampler", "stragglers")


@dataclass(frozen=True)
class Selection:
    """How settings are chosen inside a cell, where there is a grid.

    Attributes:
        grid: Values by dotted key; a key may start with a label, and is then that entry's alone.
        search: "grid" for all combinations, or "optuna".
        trials: How many combinations Optuna tries.
        folds: Of every client's training rows.
        public: The user's word that the data is public.
        charge: Whether the choice is paid for, see `coterie.selection`.
    """

    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    search: str = "grid"
    trials: int | None = None
    folds: int = 5
    public: bool = False
    charge: bool = False


@dataclass(frozen=True)
class Entry:
    """A method of a comparison.

    Attributes:
        label: What tables call it.
        settings: The method's table, kind included.
        plan: What is laid over the base plan for it, such as `{"rounds": 10}`.
    """

    label: str
    settings: Mapping[str, Any]
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The method's registered name."""
        return str(self.settings["kind"])

    def to_table(self) -> dict[str, Any]:
        """Write it as it is read."""
        return {**self.settings, **({"plan": dict(self.plan)} if self.plan else {})}


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        label: Its entry's.
        kind: Its method's.
        epsilon: As asked for; None where nothing is posted.
        seed: Of split and noise; with real noise, of the split alone.
        place: Its run folder, relative to the comparison's.
        table: Its plan.
        grid: Settings to choose from, by dotted key; empty for none.
        refused: Why it cannot be run, as far as that is known before data is opened.
    """

    label: str
    kind: str
    epsilon: float | None
    seed: int
    place: str
    table: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    refused: str | None = None


def cells_of(
    entry: Entry,
    base: Mapping[str, Any],
    *,
    epsilons: Sequence[float],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    real_noise: bool,
) -> Iterator[Cell]:
    """Return the runs of one entry, by epsilon, then by seed."""
    shape, chosen = shape_of(entry.settings), grid_of(grid, entry)
    asked: Sequence[float | None] = epsilons
    if shape in (Shape.NONE, Shape.POOLED):
        asked = (None,) if shape is Shape.NONE else (math.inf,)
    for epsilon, seed in itertools.product(asked, seeds):
        table = _table(entry, base, epsilon, seed, posts=asked is epsilons)
        if not real_noise:
            table["simulation_seed"] = seed
        yield Cell(
            label=entry.label,
            kind=entry.kind,
            epsilon=epsilon,
            seed=seed,
            place=place_of(entry.label, epsilon, seed, real=real_noise),
            table=table,
            grid=chosen,
            refused=_refusal(table),
        )


def _table(
    entry: Entry, base: Mapping[str, Any], epsilon: float | None, seed: int, *, posts: bool
) -> dict[str, Any]:
    table = merged(base, entry.plan)
    table["method"] = copy.deepcopy(dict(entry.settings))
    privacy = table.setdefault("privacy", {})
    if not posts:  # noise, cohorts and rounds are of what is posted
        table = {k: value for k, value in table.items() if k not in _POSTED}
        table["privacy"] = privacy = {k: privacy[k] for k in ("delta", "relation") if k in privacy}
    privacy["epsilon"] = math.inf if epsilon is None else epsilon
    assign(table, "data.split_seed", seed)
    # Many runs are compared by their final scores; a history of each is kept on request.
    table.setdefault("history", False)
    lay_kinds(table)
    return table


def place_of(label: str, epsilon: float | None, seed: int, *, real: bool) -> str:
    """Name a cell's run folder.

    >>> place_of("pmtl", 0.5, 2, real=False)
    'runs/pmtl/epsilon-0.5/seed-2'
    """
    budget = "nothing-posted" if epsilon is None else f"epsilon-{epsilon!r}".removesuffix(".0")
    return f"runs/{slug_of(label)}/{budget}/{'repeat' if real else 'seed'}-{seed}"


def grid_of(grid: Mapping[str, Sequence[Any]], entry: Entry) -> dict[str, Sequence[Any]]:
    """Return what of a grid concerns an entry: its own keys win over those for all."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in grid.items():
        own = key.removeprefix(f"{entry.label}.")
        if own != key:
            found[own] = values
        elif _fits(key, entry):
            found.setdefault(key, values)
    return found


def _fits(key: str, entry: Entry) -> bool:
    section, _, rest = key.partition(".")
    if section == "method":
        return rest == "kind" or rest.partition(".")[0] in settings_of(entry.kind)
    return section in _BUDGETS and shape_of(entry.settings) not in (Shape.NONE, Shape.POOLED)


def _refusal(table: Mapping[str, Any]) -> str | None:
    try:
        plan_from_table(table)
    except ValueError as error:
        return str(error)
    return None


def shape_of(settings: Mapping[str, Any]) -> Shape:
    """Say what a method posts; one that cannot be made is taken for one that posts sums."""
    table = {"method": copy.deepcopy(dict(settings))}
    lay_kinds(table)
    try:
        return from_table(Method, table["method"], "method").shape  # type: ignore[type-abstract]
    except ValueError:
        return Shape.SUM


def settings_of(kind: str) -> set[str]:
    """Name the settings of a registered method."""
    return {setting.name for setting in fields(Method.choices()[kind])}  # type: ignore[arg-type]


def slug_of(label: str) -> str:
    """Make a label the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", label).strip("-.")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a table over another, section by section."""
    made = copy.deepcopy(dict(below))
    for key, value in above.items():
        old = made.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        made[key] = merged(old, value) if both and isinstance(old, dict) else copy.deepcopy(value)
    return made
