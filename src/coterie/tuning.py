"""Settings chosen by cross-validation inside clients.

Every client's training rows are cut into folds of its own; a combination of settings is run, as a
simulation at the run's epsilon, on the rows outside a fold and scored on those in it. The test rows
of the run are never looked at.

Scores are functions of clients' rows without noise, and so is the choice made by them. On generated
data, or data that is declared public, this costs nothing. On private rows no epsilon covers it: the
plan that comes out says so (`tuned = "not covered"`), and so does every result of it.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table
from coterie.data.catalogue import NAMES
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.scaling import standardise_clients
from coterie.engines.simulate import simulate
from coterie.rng import Rng
from coterie.run_plan import RunPlan, assign, lay_kinds, plan_from_table, resolve
from coterie.scores import evaluate
from coterie.summary import TunedOn

Grid = Mapping[str, Sequence[Any]]
Parts = tuple[FederatedDataset, FederatedDataset]

_GENERATED = ("synthetic", "mpmtl:", "mtlsvm:")
_FIXED = {
    "data": "the rows are those of the run",
    "speed": "it changes nothing but speed",
    "tuned": "it is written by tuning",
    "simulation_seed": "it would choose a lucky noise",
    "compare_with_local": "it changes nothing of the run",
    "references": "they change nothing of the run",
    "privacy.epsilon": "settings are compared at one budget",
    "privacy.noise_multiplier": "settings are compared at one budget: give epsilon",
    "privacy.delta": "settings are compared at one budget",
    "privacy.relation": "settings are compared at one budget",
}


@dataclass(frozen=True)
class Trial:
    """A combination of settings, and how it did. Not private.

    Attributes:
        settings: Values by dotted key.
        metric: "nmse" (smaller is better), "accuracy", or "auc" (binary tasks: the mean over
            clients of their own).
        folds: The score on each fold so far.
        refused: Why the plan cannot be run with these settings; None if it can.
    """

    settings: dict[str, Any]
    metric: str = ""
    folds: tuple[float, ...] = ()
    refused: str | None = None

    @property
    def mean(self) -> float:
        """The mean over folds; an AUC leaves out folds where no client has rows of both classes."""
        known = self._known
        return float(np.mean(known)) if known else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean, over folds."""
        known = self._known
        return float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan

    @property
    def badness(self) -> float:
        """The mean, so that smaller is better; infinity where it is not a number."""
        mean = self.mean if self.metric == "nmse" else -self.mean
        return math.inf if math.isnan(mean) else mean

    @property
    def _known(self) -> list[float]:
        # An AUC is undefined for a fold or not whatever the settings; an error that is not a number
        # is the fault of the settings.
        drop = self.metric == "auc"
        return [score for score in self.folds if not (drop and math.isnan(score))]


@dataclass(frozen=True)
class Tuned:
    """What came out. All but `plan` shows clients' rows without noise; `plan` depends on them.

    Attributes:
        best: The settings of the best mean score.
        table: All trials, best first, refused ones last.
        plan: The run's complete plan with the best settings, and the label of how it was tuned.
    """

    best: dict[str, Any]
    table: list[Trial]
    plan: RunPlan


@dataclass(frozen=True)
class Progress:
    """How far it is: runs done, runs to do, and all trials as they stand, best first."""

    done: int
    total: int
    trials: list[Trial]


def tune(
    table: Mapping[str, Any],
    grid: Grid,
    *,
    folds: int = 5,
    seed: int = 0,
    public: bool = False,
    observe: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Choose settings of a plan by cross-validation inside clients.

    Args:
        table: The run's plan as plain tables; has to name data and epsilon.
        grid: Values to try by dotted key of the plan, such as `method.lam`; all combinations are.
        folds: Parts of every client's training rows.
        seed: Seed of the folds and of the trials' noise.
        public: The user's word that the data is public.
        observe: Shown how far it is, after every run.

    Raises:
        ValueError: If grid or folds do not fit, or every combination is refused.
    """
    _check_grid(grid)
    _check(table, folds, seed)
    choice = from_table(DataChoice, table.get("data", {}), "plan.data")
    # Scaled again by the rows outside each fold, so that those inside stay unseen.
    train, _ = replace(choice, standardise="none").split()
    numbers = fold_numbers(train, folds, seed)
    _check_classes(train, numbers, folds)
    trials, plans = _prepare(table, grid, train.spec)
    done, total = 0, len(plans) * folds
    for fold, parts in enumerate(_parts(train, numbers, folds, choice)):
        noise = Rng.seeded(seed).at("tuning", fold).key >> 2
        for place, run_plan in plans.items():
            trials[place] = _try(trials[place], replace(run_plan, simulation_seed=noise), parts)
            done += 1
            if observe is not None:
                observe(Progress(done, total, rank(trials)))
    ranked = rank(trials)
    best = ranked[0]
    _check_best(best, len(trials))
    chosen = resolve(plan_from_table(lay_settings(table, best.settings)), train.spec)
    chosen = replace(chosen, tuned=label(chosen, public=public))
    return Tuned(best.settings, ranked, chosen)


def fold_numbers(data: FederatedDataset, folds: int, seed: int) -> NDArray[np.int64]:
    """Deal every client's rows into folds of its own: one number a row, from 0.

    Rows are dealt at random, from a fold drawn for each client, so that those with few rows do not
    all leave the same folds empty. The only row of a client is in no fold (-1): it always trains.

    Raises:
        ValueError: If no client has as many rows as there are folds.
    """
    counts = data.counts
    most = int(counts.max(initial=0))
    if folds > most:
        raise ValueError(
            f"folds = {folds}: no client of {data.title} has more than {most} training rows; "
            "choose fewer folds, or hold out fewer test rows"
        )
    draw = Rng.seeded(seed).at("folds").numpy()
    owner = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((draw.random(len(owner)), owner))
    rank = np.arange(len(owner)) - np.repeat(data.offsets[:-1], counts)
    first = draw.integers(folds, size=len(counts))
    numbers = np.empty(len(owner), dtype=np.int64)
    numbers[order] = (rank + first[owner]) % folds
    numbers[counts[owner] == 1] = -1
    return numbers


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Put the best first: those tried on most folds, by their mean; refused ones last."""
    return sorted(
        trials, key=lambda trial: (trial.refused is not None, -len(trial.folds), trial.badness)
    )


def label(run_plan: RunPlan, *, public: bool) -> TunedOn:
    """Say whether epsilon covers a choice of settings on the plan's data.

    Once settings were chosen on private rows, later tuning on public ones does not undo it.
    """
    name = run_plan.data.name
    generated = name in NAMES and name.startswith(_GENERATED)
    free = (public or generated) and run_plan.tuned != "not covered"
    return "public" if free else "not covered"


def lay_settings(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lay settings over a plan's table.

    Kinds come first: another kind than the plan's leaves the old one's settings behind (a method
    keeps its model).
    """
    made = copy.deepcopy(dict(table))
    for key in sorted(settings, key=lambda key: not key.endswith(".kind")):
        place: Any = made
        for section in key.split(".")[:-1]:
            place = place.get(section, {}) if isinstance(place, dict) else {}
        changed = key.endswith(".kind") and place.get("kind", settings[key]) != settings[key]
        for old in [name for name in place if name != "model"] if changed else ():
            del place[old]
        assign(made, key, copy.deepcopy(settings[key]))
    lay_kinds(made)
    return made


def _prepare(
    table: Mapping[str, Any], grid: Grid, spec: Spec
) -> tuple[list[Trial], dict[int, RunPlan]]:
    """Make the plan of every combination; those that cannot be run are refused here, for free."""
    trials, plans = list[Trial](), dict[int, RunPlan]()
    for place, values in enumerate(itertools.product(*grid.values())):
        settings, why = dict(zip(grid, values, strict=True)), None
        try:
            run_plan = resolve(plan_from_table(lay_settings(table, settings)), spec)
            run_plan.plan().guarantee(spec.clients)
            run_plan.method.check(spec)
            plans[place] = run_plan
        except ValueError as error:
            why = str(error)
        trials.append(Trial(settings, refused=why))
    if not plans:
        several = "" if len(trials) == 1 else f"all {len(trials)} combinations are refused; "
        raise ConfigError(f"{several}{_told(trials[0].settings)}: {trials[0].refused}")
    return trials, plans


def _parts(
    train: FederatedDataset, numbers: NDArray[np.int64], folds: int, choice: DataChoice
) -> Iterator[Parts]:
    """Give the rows outside and inside of each fold, one fold in memory at a time."""
    for fold in range(folds):
        outside, inside = train.where(numbers != fold), train.where(numbers == fold)
        if choice.standardise == "client":
            outside, scaled = standardise_clients(outside, inside)
            assert scaled is not None
            inside = scaled
        yield outside, inside


def _try(trial: Trial, run_plan: RunPlan, parts: Parts) -> Trial:
    if trial.refused is not None:
        return trial
    outside, inside = parts
    try:
        outcome = simulate(run_plan.plan(), outside, speed=run_plan.speed)
    except ValueError as error:
        return replace(trial, refused=str(error))
    score = evaluate(run_plan.method.model, outcome.rows, inside)
    if score.auc is not None:
        return replace(trial, metric="auc", folds=(*trial.folds, score.auc.value))
    return replace(trial, metric=score.metric, folds=(*trial.folds, score.value))


def _check_grid(grid: Grid) -> None:
    if not grid:
        raise ConfigError("the grid is empty: give values to try, for example method.lam=0.1,0.3,1")
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"grid {key} = {values!r}: expected a list of values to try")
        for fixed, why in _FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                raise ConfigError(f"grid {key}: {fixed} cannot be tuned: {why}; leave it out")


def _check(table: Mapping[str, Any], folds: int, seed: int) -> None:
    if folds < 2:
        raise ConfigError(f"folds = {folds}: expected at least 2")
    if seed < 0:
        raise ConfigError(f"seed = {seed}: expected a whole number >= 0")
    if "epsilon" not in table.get("privacy", {}):
        raise ConfigError(
            "settings are compared at one budget: give epsilon, in place of a noise multiplier"
        )


def _check_classes(train: FederatedDataset, numbers: NDArray[np.int64], folds: int) -> None:
    """Refuse binary tasks where no AUC could be had from any fold."""
    if train.spec.task != "binary":
        return
    owner = np.repeat(np.arange(len(train)), train.counts)
    cells = (owner * folds + numbers)[numbers >= 0]
    ones = train.targets.cpu().numpy()[numbers >= 0] > 0.5
    both = np.intersect1d(cells[ones], cells[~ones])
    if not len(both):
        raise ConfigError(
            f"folds = {folds}: no client of {train.title} has rows of both classes in any fold, so "
            "that there is no AUC to choose by; choose fewer folds"
        )


def _check_best(best: Trial, trials: int) -> None:
    if best.refused is not None:
        raise ConfigError(f"all {trials} combinations are refused; the first: {best.refused}")
    if not math.isfinite(best.badness):
        raise ConfigError(
            f"no combination of {trials} has a finite {best.metric}: every run diverged, or no "
            "client has rows to be scored on; try smaller steps or other settings"
        )


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in settings.items())
