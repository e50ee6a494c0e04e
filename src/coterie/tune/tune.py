"""Choose settings by cross-validation inside clients.

Each client's training rows are split into folds. A combination of settings is run as a simulation
at the plan's epsilon on the rows outside a fold, and scored on the rows inside it. The test rows of
the run are never read. `tune` tries all combinations of a grid, or those that Optuna proposes.

Scores are functions of clients' rows without noise, and so is the choice. On generated data, or on
data declared public, the choice costs nothing. On private rows no epsilon covers it: the resulting
plan is marked `tuned = "not covered"`, and so is every result of that plan.
"""

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.config import ConfigError, assign, from_table
from coterie.core.rng import Rng
from coterie.data.config import DataConfig
from coterie.data.datasets import NAMES
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.simulate import simulate
from coterie.evaluation.metrics import is_higher_better
from coterie.evaluation.score import evaluate
from coterie.planning.plan import Plan, TunedOn, fill_kinds
from coterie.planning.rules import resolve

_GENERATED = ("synthetic", "mpmtl:", "mtlsvm:", "mixed:")
_ONE_BUDGET = "settings are compared at one budget"
_FIXED = {
    "data": "the rows are those of the run",
    "speed": "it changes only the speed",
    "tuned": "tuning writes it",
    "charged": "charged selection writes it",
    "simulation_seed": "it would select lucky noise",
    "compare_with_local": "it does not change the run",
    "baselines": "they do not change the run",
    "privacy.epsilon": _ONE_BUDGET,
    "privacy.noise_multiplier": f"{_ONE_BUDGET}: give epsilon",
    "privacy.delta": _ONE_BUDGET,
    "privacy.relation": _ONE_BUDGET,
}

Search = Literal["grid", "optuna"]
Observe = Callable[["Progress"], None]
Parts = tuple[FederatedDataset, FederatedDataset]


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`; integers if both ends are integers.

    The search is uniform in the logarithm if both ends are positive and at least a factor of 10
    apart, and uniform otherwise.
    """

    low: float | int
    high: float | int

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not all(math.isfinite(end) for end in ends) or not self.low < self.high:
            raise ConfigError(
                f"range {self.low}..{self.high}: expected two numbers, the smaller one first, such "
                "as 0.01..10"
            )

    @property
    def is_integer(self) -> bool:
        """Whether only integers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_logarithmic(self) -> bool:
        """Whether the search is uniform in the logarithm."""
        return self.low > 0 and self.high / self.low >= 10


Choice = Sequence[Any] | Range
Grid = Mapping[str, Choice]


@dataclass(frozen=True)
class Trial:
    """A combination of settings and its scores. Not private."""

    settings: dict[str, Any]  # values by dotted key
    # "nmse" (smaller is better), "accuracy", "auc" (binary tasks: the mean over clients) or "score"
    # (the noisy score of a charged run)
    metric: str = ""
    folds: tuple[float, ...] = ()  # the score on each fold so far
    refused: str | None = None  # why the plan cannot run with these settings; None if it can

    @property
    def mean(self) -> float:
        """The mean over folds; an AUC omits folds where no client has rows of both classes."""
        known = self._known
        return float(np.mean(known)) if known else math.nan

    @property
    def standard_error(self) -> float:
        """The standard error of the mean over folds."""
        known = self._known
        return float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan

    @property
    def loss(self) -> float:
        """The mean with a sign such that smaller is better; infinity if it is NaN."""
        mean = -self.mean if is_higher_better(self.metric) else self.mean
        return math.inf if math.isnan(mean) else mean

    @property
    def _known(self) -> list[float]:
        # Whether an AUC is defined depends on the fold alone; an error of NaN on the settings.
        drop = self.metric == "auc"
        return [score for score in self.folds if not (drop and math.isnan(score))]


@dataclass(frozen=True)
class Tuned:
    """The result of tuning. Everything here depends on clients' rows without noise."""

    best: dict[str, Any]  # the settings with the best mean score
    table: list[Trial]  # all trials, best first, refused ones last
    plan: Plan  # the run's complete plan with the best settings, labelled with how it was tuned


@dataclass(frozen=True)
class Progress:
    """Runs done, runs in total, and all trials so far, best first."""

    done: int
    total: int
    trials: list[Trial]


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials best first: by number of folds, then by mean; refused ones last."""
    return sorted(
        trials, key=lambda trial: (trial.refused is not None, -len(trial.folds), trial.loss)
    )


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as one line.

    >>> settings_text({"method.lam": 0.1, "method.solver": "exact"})
    'method.lam = 0.1, method.solver = exact'
    """
    return ", ".join(f"{key} = {value_text(value)}" for key, value in settings.items())


def value_text(value: Any) -> str:
    """Return a value as text; strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def tune(
    table: Mapping[str, Any],
    grid: Grid,
    *,
    folds: int = 5,
    seed: int = 0,
    public: bool = False,
    search: Search = "grid",
    trials: int | None = None,
    observe: Observe | None = None,
) -> Tuned:
    """Choose settings of a plan by cross-validation inside clients.

    Args:
        table: The run's plan as nested tables; names data and epsilon.
        grid: Values by dotted key, such as `method.lam`; with Optuna also a `Range`.
        folds: Number of folds of each client's training rows.
        seed: Seed of the folds, of the trials' noise and of Optuna.
        public: The user's declaration that the data is public.
        search: "grid" tries all combinations, "optuna" tries `trials` of them (default 30).
        trials: Number of combinations that Optuna proposes.
        observe: Called with the progress before the first run and after each run.
    """
    listed = check_grid(grid, ranges=search == "optuna")
    _check(table, folds, seed, search, trials)
    choice = from_table(DataConfig, table.get("data", {}), "plan.data")
    # Each fold is standardised again by the rows outside it, so the rows inside stay unseen.
    train, _ = replace(choice, standardise="none", effects=None).split()
    spec = choice.expand(train.only([0])).spec if choice.effects is not None else train.spec
    spec = replace(spec, clients=len(train))
    numbers = fold_numbers(train, folds, seed)
    _check_classes(train, numbers, folds)
    cut = _Folds(train, spec, numbers, folds, choice, seed)
    if search == "grid":
        ranked = _try_all(*plan_all(table, listed, spec), cut, observe)
    else:
        ranked = _try_proposed(table, grid, cut, trials or 30, observe)
    best = ranked[0]
    if best.refused is not None:
        raise ConfigError(f"all {len(ranked)} combinations are refused; the first: {best.refused}")
    if not math.isfinite(best.loss):
        raise ConfigError(
            f"no combination of {len(ranked)} has a finite {best.metric}: every run diverged, or "
            "no client has rows in a fold; try smaller steps or other settings"
        )
    chosen = resolve(Plan.from_table(apply_settings(table, best.settings)), spec)
    chosen = replace(chosen, tuned=tuning_label(chosen, public=public))
    return Tuned(best.settings, ranked, chosen)


@dataclass(frozen=True, eq=False)
class _Folds:
    """Training rows with the fold number of each row."""

    train: FederatedDataset
    spec: Spec
    numbers: NDArray[np.int64]
    folds: int
    choice: DataConfig
    seed: int

    def parts(self) -> Iterator[tuple[int, Parts]]:
        """Yield, for each fold, the seed of its noise and the rows outside and inside it.

        One fold is in memory at a time.
        """
        for fold in range(self.folds):
            outside = self.train.where(self.numbers != fold)
            inside = self.train.where(self.numbers == fold)
            parts = self.choice.prepare(outside, inside)
            yield Rng.seeded(self.seed).at("tuning", fold).key >> 2, parts


def _try_all(
    trials: list[Trial], plans: Mapping[int, Plan], cut: _Folds, observe: Observe | None
) -> list[Trial]:
    done, total = 0, len(plans) * cut.folds
    if observe is not None:
        observe(Progress(done, total, []))
    for noise, parts in cut.parts():
        for place, run_plan in plans.items():
            trials[place] = _try(trials[place], replace(run_plan, simulation_seed=noise), parts)
            done += 1
            if observe is not None:
                observe(Progress(done, total, rank(trials)))
    return rank(trials)


def _try_proposed(
    table: Mapping[str, Any], grid: Grid, cut: _Folds, count: int, observe: Observe | None
) -> list[Trial]:
    """Try Optuna's proposals one after another; a repeated proposal is not run again.

    They come from the tree-structured Parzen estimator (Bergstra, Bardenet, Bengio and Kegl,
    "Algorithms for Hyper-Parameter Optimization", NIPS 2011). The study is in memory and seeded. A
    proposal depends on the scores before it, so no epsilon covers it on private rows;
    `coterie.tune.charge` draws settings at random instead.
    """
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=cut.seed)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    known = dict[str, Trial]()
    if observe is not None:
        observe(Progress(0, count, []))
    for done in range(1, count + 1):
        handle = study.ask()
        settings = {key: _suggest(handle, key, choice) for key, choice in grid.items()}
        trial, run_plan = _plan_one(table, settings, cut.spec)
        key = settings_text(settings)
        if key not in known and run_plan is not None:
            for noise, parts in cut.parts():
                trial = _try(trial, replace(run_plan, simulation_seed=noise), parts)
        trial = known.setdefault(key, trial)
        if trial.refused is None and math.isfinite(trial.loss):
            study.tell(handle, trial.loss)
        else:
            study.tell(handle, state=optuna.trial.TrialState.FAIL)
        if observe is not None:
            observe(Progress(done, count, rank(list(known.values()))))
    return rank(list(known.values()))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "search = 'optuna' needs Optuna, which is not installed: pip install "
            "'coterie[tune]', or list values and search the whole grid"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _try(trial: Trial, run_plan: Plan, parts: Parts) -> Trial:
    if trial.refused is not None:
        return trial
    outside, inside = parts
    try:
        outcome = simulate(run_plan, outside, speed=run_plan.speed, progress=False)
    except ValueError as error:
        return replace(trial, refused=str(error))
    score = evaluate(run_plan.method.model, outcome.rows, inside)
    if "auc" in score.own:
        return replace(trial, metric="auc", folds=(*trial.folds, score.own["auc"].value))
    return replace(trial, metric=score.metric, folds=(*trial.folds, score.value))


def _suggest(trial: Any, key: str, choice: Choice) -> Any:
    if not isinstance(choice, Range):
        # By index: values may be lists, which Optuna does not accept.
        return choice[trial.suggest_categorical(key, list(range(len(choice))))]
    if choice.is_integer:
        return trial.suggest_int(key, choice.low, choice.high, log=choice.is_logarithmic)
    low, high = float(choice.low), float(choice.high)
    # Four digits distinguish settings and stay readable.
    found = float(f"{trial.suggest_float(key, low, high, log=choice.is_logarithmic):.4g}")
    return min(max(found, low), high)


def check_grid(grid: Grid, *, ranges: bool = False) -> dict[str, Sequence[Any]]:
    """Return the listed values of a grid; raise ConfigError if a key or its values are invalid."""
    if not grid:
        raise ConfigError("the grid is empty: give values to try, for example method.lam=0.1,0.3,1")
    for key, values in grid.items():
        for fixed, why in _FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                what = key if key == fixed else f"{key}: {fixed}"
                raise ConfigError(f"grid {what} cannot be tuned: {why}; leave it out")
        if isinstance(values, Range):
            if not ranges:
                raise ConfigError(
                    f"grid {key} = {values.low}..{values.high}: a range needs Optuna "
                    "(--search optuna); list the values to try all of them"
                )
        elif isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"grid {key} = {values!r}: expected a list of values to try")
    return {key: values for key, values in grid.items() if not isinstance(values, Range)}


def apply_settings(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's table with settings applied.

    Kinds are applied first: a new kind drops the settings of the old kind (a method keeps its
    model).
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
    fill_kinds(made)
    return made


def plan_all(
    table: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], spec: Spec
) -> tuple[list[Trial], dict[int, Plan]]:
    """Return a trial for each combination, and the plans of those that can run, at least one."""
    trials, plans = list[Trial](), dict[int, Plan]()
    for place, values in enumerate(itertools.product(*grid.values())):
        trial, run_plan = _plan_one(table, dict(zip(grid, values, strict=True)), spec)
        trials.append(trial)
        if run_plan is not None:
            plans[place] = run_plan
    if not plans:
        several = "" if len(trials) == 1 else f"all {len(trials)} combinations are refused; "
        raise ConfigError(f"{several}{settings_text(trials[0].settings)}: {trials[0].refused}")
    return trials, plans


def _plan_one(
    table: Mapping[str, Any], settings: dict[str, Any], spec: Spec
) -> tuple[Trial, Plan | None]:
    try:
        run_plan = resolve(Plan.from_table(apply_settings(table, settings)), spec)
        run_plan.guarantee(spec.clients)
        run_plan.method.check(spec)
    except ValueError as error:
        return Trial(settings, refused=str(error)), None
    return Trial(settings), run_plan


def fold_numbers(data: FederatedDataset, folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row, from 0; each client's rows are split separately.

    Rows are assigned at random, starting at a random fold for each client, so that small clients
    do not all leave the same folds empty. A client's only row is in no fold (-1) and always trains.
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
    position = np.arange(len(owner)) - np.repeat(data.offsets[:-1], counts)
    first = draw.integers(folds, size=len(counts))
    numbers = np.empty(len(owner), dtype=np.int64)
    numbers[order] = (position + first[owner]) % folds
    numbers[counts[owner] == 1] = -1
    return numbers


def tuning_label(run_plan: Plan, *, public: bool, charged: bool = False) -> TunedOn:
    """Return the label of a choice of settings on the plan's data.

    Later tuning on public rows does not undo an earlier choice on private rows. A charged choice
    (`coterie.tune.charge`) is covered, at more than the run's epsilon.
    """
    name, before = run_plan.data.name, run_plan.tuned
    free = public or (name in NAMES and name.startswith(_GENERATED))
    if before == "not covered" or not (free or charged):
        return "not covered"
    return "charged" if not free or before == "charged" else "public"


def _check(
    table: Mapping[str, Any], folds: int, seed: int, search: str, trials: int | None
) -> None:
    if folds < 2:
        raise ConfigError(f"folds = {folds}: expected at least 2")
    if seed < 0:
        raise ConfigError(f"seed = {seed}: expected an integer >= 0")
    if "epsilon" not in table.get("privacy", {}):
        raise ConfigError(f"{_ONE_BUDGET}: give epsilon instead of a noise multiplier")
    if search not in ("grid", "optuna"):
        raise ConfigError(f"search = {search!r}: expected 'grid' or 'optuna'")
    if trials is not None and (search == "grid" or trials < 1):
        raise ConfigError(
            f"trials = {trials} with search = {search!r}: expected the number of settings that "
            "Optuna proposes, at least 1; a grid search tries all combinations"
        )


def _check_classes(train: FederatedDataset, numbers: NDArray[np.int64], folds: int) -> None:
    """Raise if no fold of a binary task has an AUC."""
    if train.spec.task != "binary":
        return
    owner = np.repeat(np.arange(len(train)), train.counts)
    cells = (owner * folds + numbers)[numbers >= 0]
    ones = train.targets.cpu().numpy()[numbers >= 0] > 0.5
    if not len(np.intersect1d(cells[ones], cells[~ones])):
        raise ConfigError(
            f"folds = {folds}: no client of {train.title} has rows of both classes in any fold, so "
            "no AUC is defined; choose fewer folds"
        )
