"""A comparison: methods x epsilons x seeds over one base plan, cut into cells that are runs.

A comparison is a plan (data, sampler, ...) with a table `[compare]`:

    [data]
    name = "districts"

    [compare]
    methods = ["local", "pmtl", {kind = "pmtl", label = "pmtl, strong pull", lam = 3.0}]
    epsilons = [0.5, 1, 2, 4]
    seeds = 3                       # or [0, 7, 8]; or repeats = 3 for real noise
    grid = {"method.lam" = [0.1, 1]}  # optional: settings chosen inside every cell

See `coterie.comparison.cells` for what becomes of them.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from coterie.comparison.cells import (
    Cell,
    Entry,
    Selection,
    cells_of,
    grid_of,
    merged,
    settings_of,
    slug_of,
)
from coterie.config import ConfigError
from coterie.methods.base import choices
from coterie.run_plan import RunPlan

USUAL_METHODS = ("local", "fedavg", "pmtl", "auto")
USUAL_EPSILONS = (0.5, 1.0, 2.0, 4.0)
USUAL_SEEDS = 3
_KEYS = (
    "methods", "epsilons", "seeds", "repeats", "workers", "grid", "search", "trials", "folds",
    "public", "charge",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Methods, epsilons and seeds over a base plan.

    Attributes:
        base: The plan's table without method settings, epsilon and seeds.
        entries: What is compared.
        epsilons: Ascending.
        seeds: Of simulations; with `real_noise`, numbers of repeats.
        real_noise: Whether every run is a release with noise that nobody knows.
        workers: Processes; None for as many as there are cores, 0 for none but this one.
        selection: How settings are chosen.
        notes: What was ignored, in sentences.
    """

    base: Mapping[str, Any]
    entries: tuple[Entry, ...]
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    real_noise: bool = False
    workers: int | None = None
    selection: Selection = field(default_factory=Selection)
    notes: tuple[str, ...] = ()

    def to_table(self) -> dict[str, Any]:
        """Write it as it is read; `workers` changes nothing of it and is left out."""
        chosen = self.selection
        compare: dict[str, Any] = {"epsilons": list(self.epsilons)}
        compare |= {"repeats": len(self.seeds)} if self.real_noise else {"seeds": list(self.seeds)}
        if chosen.grid:
            compare |= {"search": chosen.search, "folds": chosen.folds, "public": chosen.public}
            compare |= {"charge": chosen.charge}
            compare |= {} if chosen.trials is None else {"trials": chosen.trials}
            compare["grid"] = dict(chosen.grid)
        compare["methods"] = {entry.label: entry.to_table() for entry in self.entries}
        return {**copy.deepcopy(dict(self.base)), "compare": compare}

    def cells(self) -> list[Cell]:
        """Return every run, entry by entry, then by epsilon, then by seed."""
        return [
            cell
            for entry in self.entries
            for cell in cells_of(
                entry,
                self.base,
                epsilons=self.epsilons,
                seeds=self.seeds,
                grid=self.selection.grid,
                real_noise=self.real_noise,
            )
        ]


def make_comparison(table: Mapping[str, Any]) -> Comparison:
    """Read a comparison from a plan's table with `[compare]`.

    Raises:
        ConfigError: If it does not fit.
    """
    base = copy.deepcopy(dict(table))
    compare = base.pop("compare", {})
    _check_compare(compare, base)
    method = base.pop("method", {})
    base.get("privacy", {}).pop("epsilon", None)
    named = compare.get("methods", [method["kind"]] if "kind" in method else USUAL_METHODS)
    given = {key: value for key, value in method.items() if key != "kind"}
    own = _own_tables(base, named)
    entries = tuple(_entry(label, told, own.get(label, {})) for label, told in _named(named))
    entries, unused = _share(entries, given)
    seeds, real = _seeds(compare)
    grid = compare.get("grid", {})
    return Comparison(
        base=base,
        entries=entries,
        epsilons=_epsilons(compare.get("epsilons", USUAL_EPSILONS)),
        seeds=seeds,
        real_noise=real,
        workers=_whole(compare, "workers", None, 0),
        selection=Selection(
            grid=grid,
            search=compare.get("search", "grid"),
            trials=_whole(compare, "trials", None, 1),
            folds=_whole(compare, "folds", 5, 2) or 5,
            public=bool(compare.get("public", False)),
            charge=bool(compare.get("charge", False)),
        ),
        notes=(*unused, *_unused_of(grid, entries)),
    )


def _check_compare(compare: Any, base: Mapping[str, Any]) -> None:
    if not isinstance(compare, dict):
        raise ConfigError(f"compare = {compare!r}: expected a table, such as [compare]")
    if unknown := sorted(set(compare) - set(_KEYS)):
        raise ConfigError(
            f"[compare] does not know {', '.join(unknown)}; expected among {', '.join(_KEYS)}"
        )
    if "noise_multiplier" in base.get("privacy", {}):
        raise ConfigError(
            "privacy.noise_multiplier was given: methods are compared at budgets; give epsilons"
        )
    if not isinstance(compare.get("grid", {}), dict):
        raise ConfigError("[compare] grid: expected a table of lists, such as [compare.grid]")
    if compare.get("search", "grid") not in ("grid", "optuna"):
        raise ConfigError(f"search = {compare['search']!r}: expected 'grid' or 'optuna'")
    if "seeds" in compare and "repeats" in compare:
        raise ConfigError(
            "seeds and repeats: give seeds for simulations, or repeats for real noise"
        )


def _named(methods: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return (label, table) of every method asked for, however it was written."""
    if isinstance(methods, Mapping):
        listed = [{"label": label, "kind": label, **dict(told)} for label, told in methods.items()]
    elif isinstance(methods, list | tuple) and methods:
        listed = [{"kind": m} if isinstance(m, str) else dict(m) for m in methods]
    else:
        raise ConfigError(f"methods = {methods!r}: expected names, such as ['local', 'pmtl']")
    seen = set[str]()
    for told in listed:
        label = str(told.pop("label", told.get("kind", "")))
        slug = slug_of(label)
        if not slug or slug in seen or label in _plan_keys():
            raise ConfigError(
                f"method label {label!r}: expected one of its own for each method, with a letter "
                "or digit; give it as label = '...'"
            )
        seen.add(slug)
        yield label, told


def _entry(label: str, told: dict[str, Any], own: Mapping[str, Any]) -> Entry:
    kind, kinds = told.get("kind"), choices()
    if kind not in kinds:
        raise ConfigError(
            f"method {kind!r} is unknown; expected among {', '.join(kinds)} (`coterie methods`)"
        )
    plan = merged(told.pop("plan", {}), own)
    settings = merged(told, plan.pop("method", {}))
    known = settings_of(str(kind))
    if unknown := sorted(set(settings) - known - {"kind"}):
        raise ConfigError(
            f"{label}: {kind} has no setting {', '.join(unknown)}; expected among "
            f"{', '.join(sorted(known))}"
        )
    return Entry(label, settings, plan)


def _own_tables(base: dict[str, Any], methods: Any) -> dict[str, dict[str, Any]]:
    """Take out what is said of one label alone, such as `pmtl.method.lam`."""
    labels = [label for label, _ in _named(methods)]
    return {label: base.pop(label) for label in labels if isinstance(base.get(label), dict)}


def _share(
    entries: tuple[Entry, ...], given: Mapping[str, Any]
) -> tuple[tuple[Entry, ...], list[str]]:
    """Lay settings said of all methods below each one's own, where it has them."""
    notes = [_ignored(f"method.{key}", entries) for key in given]
    for key in given:
        if not any(key in settings_of(entry.kind) for entry in entries):
            raise ConfigError(f"method.{key}: none of the methods compared has this setting")
    shared = tuple(
        Entry(
            entry.label,
            merged(
                {k: v for k, v in given.items() if k in settings_of(entry.kind)}, entry.settings
            ),
            entry.plan,
        )
        for entry in entries
    )
    return shared, [note for note in notes if note]


def _unused_of(grid: Mapping[str, Any], entries: tuple[Entry, ...]) -> list[str]:
    labels = {entry.label for entry in entries}
    for key, values in grid.items():
        is_range = isinstance(values, str) and re.fullmatch(r"[^.].*\.\..*[^.]", values)
        if not is_range and not (isinstance(values, list | tuple) and values):
            raise ConfigError(
                f"grid {key} = {values!r}: expected a list of values to try, or for Optuna a range "
                "such as '0.01..10'"
            )
        if not any(grid_of({key: values}, entry) for entry in entries):
            raise ConfigError(f"grid {key}: none of the methods compared has this setting")
    loose = [key for key in grid if not any(key.startswith(f"{label}.") for label in labels)]
    return [note for key in loose if (note := _ignored(key, entries))]


def _ignored(key: str, entries: tuple[Entry, ...]) -> str:
    without = [e.label for e in entries if not grid_of({key: [0]}, e)]
    return f"{key} is no setting of {', '.join(without)} and is ignored there" if without else ""


def _plan_keys() -> set[str]:
    return {setting.name for setting in fields(RunPlan)} | {"compare"}


def _epsilons(given: Any) -> tuple[float, ...]:
    listed = given if isinstance(given, list | tuple) else [given]
    numbers = [
        e for e in listed if isinstance(e, int | float) and not isinstance(e, bool) and e > 0
    ]
    if not listed or len(numbers) < len(listed):
        raise ConfigError(
            f"epsilons = {given!r}: expected positive numbers or inf, as in 0.5,1,2,4"
        )
    return tuple(sorted({float(e) for e in numbers}))


def _seeds(compare: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    real = "repeats" in compare
    given = compare.get("repeats" if real else "seeds", USUAL_SEEDS)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return tuple(range(given)), real
    listed = isinstance(given, list | tuple) and not real
    if not listed or not given or any(type(seed) is not int or seed < 0 for seed in given):
        raise ConfigError(
            f"{'repeats' if real else 'seeds'} = {given!r}: expected how many (3)"
            f"{'' if real else ', or a list of whole numbers >= 0'}"
        )
    return tuple(dict.fromkeys(given)), False


def _whole(compare: Mapping[str, Any], key: str, usual: int | None, least: int) -> int | None:
    given = compare.get(key, usual)
    if given is not None and (type(given) is not int or given < least):
        raise ConfigError(f"{key} = {given!r}: expected a whole number >= {least}")
    return given
