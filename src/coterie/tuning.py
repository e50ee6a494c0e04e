"""Settings chosen by cross-validation inside clients.

Every client's training rows are cut into folds of its own; a combination of settings is run, as a
simulation at the run's epsilon, on the rows outside a fold and scored on those in it. The test rows
of the run are never looked at. All combinations of a grid are tried, or as many as asked for,
proposed by Optuna from how the others did (`coterie.search`).

Scores are functions of clients' rows without noise, and so is the choice made by them. On generated
data, or data that is declared public, this costs nothing. On private rows no epsilon covers it: the
plan that comes out says so (`tuned = "not covered"`), and so does every result of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table
from coterie.data.catalogue import NAMES
from coterie.data.federated import FederatedDataset
from coterie.data.scaling import standardise_clients
from coterie.engines.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.rng import Rng
from coterie.run_plan import RunPlan, plan_from_table, resolve
from coterie.search import Search
from coterie.summary import TunedOn
from coterie.trials import Grid, Trial, check_grid, lay_settings, plan_one, prepare, rank, told

__all__ = [
    "Grid",
    "Progress",
    "Trial",
    "Tuned",
    "fold_numbers",
    "label",
    "lay_settings",
    "rank",
    "tune",
]

How = Literal["grid", "optuna"]
Parts = tuple[FederatedDataset, FederatedDataset]

_GENERATED = ("synthetic", "mpmtl:", "mtlsvm:")


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
    search: How = "grid",
    trials: int | None = None,
    observe: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Choose settings of a plan by cross-validation inside clients.

    Args:
        table: The run's plan as plain tables; has to name data and epsilon.
        grid: Values to try by dotted key of the plan, such as `method.lam`; or, for Optuna, a
            `Range`.
        folds: Parts of every client's training rows.
        seed: Seed of the folds, of the trials' noise and of what Optuna proposes.
        public: The user's word that the data is public.
        search: "grid" tries all combinations, "optuna" as many as `trials` says.
        trials: How many combinations Optuna proposes (default 30).
        observe: Shown how far it is, after every run.

    Raises:
        ValueError: If grid or folds do not fit, or every combination is refused.
    """
    listed = check_grid(grid, ranges=search == "optuna")
    _check(table, folds, seed)
    _check_search(search, trials)
    choice = from_table(DataChoice, table.get("data", {}), "plan.data")
    # Scaled again by the rows outside each fold, so that those inside stay unseen.
    train, _ = replace(choice, standardise="none").split()
    numbers = fold_numbers(train, folds, seed)
    _check_classes(train, numbers, folds)
    cut = _Cut(train, numbers, folds, choice, seed)
    if search == "grid":
        ranked = _try_all(*prepare(table, listed, train.spec), cut, observe)
    else:
        ranked = _try_proposed(table, grid, cut, 30 if trials is None else trials, observe)
    best = ranked[0]
    _check_best(best, len(ranked))
    chosen = resolve(plan_from_table(lay_settings(table, best.settings)), train.spec)
    chosen = replace(chosen, tuned=label(chosen, public=public))
    return Tuned(best.settings, ranked, chosen)


@dataclass(frozen=True, eq=False)
class _Cut:
    """Training rows, cut into folds."""

    train: FederatedDataset
    numbers: NDArray[np.int64]
    folds: int
    choice: DataChoice
    seed: int

    def parts(self) -> Iterator[tuple[int, Parts]]:
        """Give, fold by fold, the seed of its noise and the rows outside and inside of it.

        One fold is in memory at a time.
        """
        for fold in range(self.folds):
            outside = self.train.where(self.numbers != fold)
            inside = self.train.where(self.numbers == fold)
            if self.choice.standardise == "client":
                outside, scaled = standardise_clients(outside, inside)
                assert scaled is not None
                inside = scaled
            yield Rng.seeded(self.seed).at("tuning", fold).key >> 2, (outside, inside)


def _try_all(
    trials: list[Trial],
    plans: Mapping[int, RunPlan],
    cut: _Cut,
    observe: Callable[[Progress], None] | None,
) -> list[Trial]:
    """Try every combination on every fold."""
    done, total = 0, len(plans) * cut.folds
    for noise, parts in cut.parts():
        for place, run_plan in plans.items():
            trials[place] = _try(trials[place], replace(run_plan, simulation_seed=noise), parts)
            done += 1
            if observe is not None:
                observe(Progress(done, total, rank(trials)))
    return rank(trials)


def _try_proposed(
    table: Mapping[str, Any],
    grid: Grid,
    cut: _Cut,
    count: int,
    observe: Callable[[Progress], None] | None,
) -> list[Trial]:
    """Try what is proposed, one after another; what was tried before is not run again."""
    search, known = Search(grid, cut.seed), dict[str, Trial]()
    for done in range(1, count + 1):
        handle, settings = search.ask()
        trial, run_plan = plan_one(table, settings, cut.train.spec)
        key = told(settings)
        if key not in known and run_plan is not None:
            for noise, parts in cut.parts():
                trial = _try(trial, replace(run_plan, simulation_seed=noise), parts)
        trial = known.setdefault(key, trial)
        search.tell(handle, None if trial.refused is not None else trial.badness)
        if observe is not None:
            observe(Progress(done, count, rank(list(known.values()))))
    return rank(list(known.values()))


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


def label(run_plan: RunPlan, *, public: bool, charged: bool = False) -> TunedOn:
    """Return whether epsilon covers a choice of settings on the plan's data.

    Once settings were chosen on private rows, later tuning on public ones does not undo it. A
    choice that was charged (`coterie.selection`) is covered, by more than the run's epsilon.
    """
    name, before = run_plan.data.name, run_plan.tuned
    free = public or (name in NAMES and name.startswith(_GENERATED))
    if before == "not covered" or not (free or charged):
        return "not covered"
    return "charged" if not free or before == "charged" else "public"


def _try(trial: Trial, run_plan: RunPlan, parts: Parts) -> Trial:
    if trial.refused is not None:
        return trial
    outside, inside = parts
    try:
        outcome = simulate(run_plan.plan(), outside, speed=run_plan.speed)
    except ValueError as error:
        return replace(trial, refused=str(error))
    score = evaluate(run_plan.method.model, outcome.rows, inside)
    if "auc" in score.own:
        return replace(trial, metric="auc", folds=(*trial.folds, score.own["auc"].value))
    return replace(trial, metric=score.metric, folds=(*trial.folds, score.value))


def _check_search(search: str, trials: int | None) -> None:
    if search not in ("grid", "optuna"):
        raise ConfigError(f"search = {search!r}: expected 'grid' or 'optuna'")
    if trials is not None and (search == "grid" or trials < 1):
        raise ConfigError(
            f"trials = {trials} with search = {search!r}: expected how many settings Optuna "
            "proposes, at least 1; a grid is tried in whole"
        )


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
