"""Combinations of settings: from a grid to plans, and how each of them did."""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.config import ConfigError
from coterie.data.federated import Spec
from coterie.run_plan import RunPlan, assign, lay_kinds, plan_from_table, resolve
from coterie.search import Choice, Range

Grid = Mapping[str, Choice]

_FIXED = {
    "data": "the rows are those of the run",
    "speed": "it changes nothing but speed",
    "tuned": "it is written by tuning",
    "charged": "it is written by selection",
    "simulation_seed": "it would choose a lucky noise",
    "compare_with_local": "it changes nothing of the run",
    "baselines": "they change nothing of the run",
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


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Put the best first: those tried on most folds, by their mean; refused ones last."""
    return sorted(
        trials, key=lambda trial: (trial.refused is not None, -len(trial.folds), trial.badness)
    )


def check_grid(grid: Grid, *, ranges: bool = False) -> dict[str, Sequence[Any]]:
    """Refuse a grid without values, or of what is no setting; give what it lists.

    Raises:
        ConfigError: If there is nothing to try, a key cannot be tuned, or is a range where values
            have to be listed.
    """
    if not grid:
        raise ConfigError("the grid is empty: give values to try, for example method.lam=0.1,0.3,1")
    for key, values in grid.items():
        for fixed, why in _FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                raise ConfigError(f"grid {key}: {fixed} cannot be tuned: {why}; leave it out")
        if isinstance(values, Range):
            if not ranges:
                raise ConfigError(
                    f"grid {key} = {values.low}..{values.high}: a range is searched by Optuna "
                    "(--search optuna); list the values to try all of them"
                )
        elif isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"grid {key} = {values!r}: expected a list of values to try")
    return {key: values for key, values in grid.items() if not isinstance(values, Range)}


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


def prepare(
    table: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], spec: Spec
) -> tuple[list[Trial], dict[int, RunPlan]]:
    """Make the plan of every combination; those that cannot be run are refused here, for free."""
    trials, plans = list[Trial](), dict[int, RunPlan]()
    for place, values in enumerate(itertools.product(*grid.values())):
        trial, run_plan = plan_one(table, dict(zip(grid, values, strict=True)), spec)
        trials.append(trial)
        if run_plan is not None:
            plans[place] = run_plan
    if not plans:
        several = "" if len(trials) == 1 else f"all {len(trials)} combinations are refused; "
        raise ConfigError(f"{several}{told(trials[0].settings)}: {trials[0].refused}")
    return trials, plans


def plan_one(
    table: Mapping[str, Any], settings: dict[str, Any], spec: Spec
) -> tuple[Trial, RunPlan | None]:
    """Make the plan with these settings; a trial that says why, if it cannot be run."""
    try:
        run_plan = resolve(plan_from_table(lay_settings(table, settings)), spec)
        run_plan.plan().guarantee(spec.clients)
        run_plan.method.check(spec)
    except ValueError as error:
        return Trial(settings, refused=str(error)), None
    return Trial(settings), run_plan


def told(settings: Mapping[str, Any]) -> str:
    """Write settings in a line."""
    return ", ".join(f"{key} = {value!r}" for key, value in settings.items())
