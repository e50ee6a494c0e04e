"""A run: data, a plan and a folder that holds everything a person keeps.

- `plan.toml`: the resolved plan, data included; `coterie run --resume FOLDER` needs no more
- `ledger.jsonl`: what was charged and released, in order
- `data.json`: a fingerprint of the training rows, so that a run never goes on with others
- `model.json`: what the network answers on made-up rows, so that a run never goes on with another
- `posts/`: the public transcript, one file per post
- `personal/`: personal state between rounds, and the journal of the round in progress
- `models/`: one model per client, a row each (`clients.json` names the rows)
- `shared.npz`: the shared tree after the last post, which newcomers start from
- `guarantee.json`: what the run guarantees
- `history.parquet`: with a virtual clock, or if asked for: the score of every round (not private)
- `metrics.parquet`: per client: test rows, own error, AUC, balanced accuracy or R^2 as the task has
  them, error of learning alone (not private)
- `result.json`: the summary that `coterie run --json` prints
"""

import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table, to_table, to_toml
from coterie.data.federated import FederatedDataset, Spec
from coterie.engines.calibration import calibrate as calibrate_clock
from coterie.engines.clock import Stragglers
from coterie.engines.outcome import Observer, Outcome, check_joinable
from coterie.engines.simulate import Speed, set_clock, simulate
from coterie.history import History
from coterie.interrupts import as_interrupt
from coterie.methods.base import Method
from coterie.newcomers import Newcomers, attempt_newcomers, check_newcomers, hold_out
from coterie.plan import Plan, Privacy
from coterie.privacy.files import write_atomically
from coterie.privacy.ledger import locked
from coterie.privacy.sampling import Poisson, Sampler
from coterie.recognition import recognise_model, recognise_rows
from coterie.references import References, Which, score_references
from coterie.rules import Advice, advice_for, settle
from coterie.scores import Score, evaluate
from coterie.summary import TunedOn, json_number, keep, summarise

Newcoming = tuple[FederatedDataset, FederatedDataset] | None
Opens = Callable[["RunPlan", FederatedDataset], Observer] | None
Scoring = Callable[["RunPlan"], None] | None
_LATE = (
    "Clients stood on a virtual clock: those who were late contributed nothing to a round, and no "
    "other client is shown who answered."
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that decides a run; written to plan.toml.

    `rounds = None` is resolved by `resolve` before anything is spent. `tuned` says on which rows
    settings were chosen: "public" cost nothing, "not covered" is private rows, and is shown
    wherever epsilon is. `stragglers` puts clients on a virtual clock; `history` scores every round
    on test rows (always with a clock). `newcomers` (a share, or a number of clients) are held out
    of training by data.split_seed, and join afterwards. `chosen` says why the method was picked,
    where it was left to rules. `references` is what is scored beside the run, see
    `coterie.references`.
    """

    data: DataChoice
    method: Method
    privacy: Privacy
    sampler: Sampler = field(default_factory=Poisson)
    rounds: int | None = None
    simulation_seed: int | None = None
    speed: Speed = field(default_factory=Speed)
    compare_with_local: bool = True
    references: Which = "auto"
    tuned: TunedOn = "no"
    stragglers: Stragglers | None = None
    history: bool = False
    newcomers: int | float | None = None
    chosen: str = ""

    def __post_init__(self) -> None:
        if self.simulation_seed is not None and self.simulation_seed < 0:
            raise ValueError(
                f"simulation_seed = {self.simulation_seed}: expected a whole number >= 0"
            )

    def plan(self) -> Plan:
        """Give the part that owns the guarantee."""
        if self.rounds is None:
            raise ValueError("rounds are not resolved yet: call resolve(run_plan, spec) first")
        return Plan(
            method=self.method,
            privacy=self.privacy,
            sampler=self.sampler,
            rounds=self.rounds,
            simulation_seed=self.simulation_seed,
            tuned=self.tuned,
        )


def resolve(run_plan: RunPlan, spec: Spec) -> RunPlan:
    """Fill in what was left to rules, so that plan.toml says it all."""
    settled = settle(run_plan.method, run_plan.privacy, run_plan.sampler, spec, run_plan.rounds)
    return replace(
        run_plan,
        method=settled.method,
        privacy=settled.privacy,
        rounds=settled.rounds,
        chosen=settled.chosen or run_plan.chosen,
    )


def advice_of(run_plan: RunPlan, spec: Spec) -> Advice | None:
    """Say whether joining pays under a resolved plan; None where the rule knows nothing of it."""
    return advice_for(run_plan.method, run_plan.privacy, run_plan.sampler, spec, run_plan.rounds)


@dataclass(frozen=True)
class Result:
    """A finished run and its scores."""

    summary: dict[str, Any]
    outcome: Outcome
    score: Score
    local: Score | None


def execute(
    run_plan: RunPlan,
    *,
    folder: Path | None = None,
    observer: Opens = None,
    scoring: Scoring = None,
) -> Result:
    """Run a plan from data to scores; with a folder, resumable and kept.

    Args:
        run_plan: What to run, open ends included.
        folder: Where all of it is kept, if anywhere.
        observer: Makes what is called after every round.
        scoring: Called when rounds are done, before what stands beside them is scored.

    Raises:
        FileExistsError: If the folder holds another run.
    """
    started = time.perf_counter()
    train, test = run_plan.data.split()
    joining = None
    if run_plan.newcomers is not None:
        draw = run_plan.newcomers, run_plan.data.split_seed
        (train, rows), (test, held) = (hold_out(part, *draw) for part in (train, test))
        joining = rows, held
    run_plan = resolve(run_plan, train.spec)
    if joining is not None:
        check_joinable(run_plan.method)
    run_plan.plan().guarantee(train.spec.clients)
    run_plan.method.check(train.spec)
    run_plan.method.check_data(train)
    for part in (test, *(joining or ())):  # before anything is spent: they are predicted at the end
        run_plan.method.model.check_data(part)
    if joining is not None and (folder is None or not (folder / "plan.toml").exists()):
        check_newcomers(run_plan.method, joining[0])
    if run_plan.stragglers is not None:
        run_plan = _set_clock(run_plan, run_plan.stragglers, train)
    data = train, test, joining
    if folder is None:
        return _carry_out(run_plan, data, None, (observer, scoring), started)
    with as_interrupt(), locked(folder):
        _claim(folder, run_plan)
        recognise_rows(folder, train)
        recognise_model(folder, run_plan.method.model, train.spec)
        return _carry_out(run_plan, data, folder, (observer, scoring), started)


def _set_clock(run_plan: RunPlan, clock: Stragglers, train: FederatedDataset) -> RunPlan:
    """Measure the clock if asked to; refuse what no budget covers before a folder is claimed."""
    set_clock(clock, run_plan.plan(), train)
    if not clock.calibrate:
        return run_plan
    if run_plan.privacy.epsilon != math.inf:
        raise ValueError(
            "stragglers.calibrate times clients' own rows, and plan.toml would tell: give the "
            "coefficients, or run with epsilon = inf"
        )
    return replace(run_plan, stragglers=calibrate_clock(clock, run_plan.method, train))


def _carry_out(
    run_plan: RunPlan,
    data: tuple[FederatedDataset, FederatedDataset, Newcoming],
    folder: Path | None,
    watching: tuple[Opens, Scoring],
    started: float,
) -> Result:
    (train, test, _), (observer, scoring) = data, watching
    watch = observer(run_plan, train) if observer is not None else None
    past = None
    if run_plan.history or run_plan.stragglers is not None:
        past = watch = History(run_plan.method, train, test, folder, watch)
    outcome = simulate(
        run_plan.plan(),
        train,
        observe=watch,
        folder=folder,
        speed=run_plan.speed,
        stragglers=run_plan.stragglers,
    )
    score = evaluate(run_plan.method.model, outcome.rows, test)
    beside, joined, unscored = _beside(run_plan, outcome, score, data, scoring)
    notices = (*run_plan.method.notices(train), *_ended(outcome), *_answers(past, outcome))
    local = beside.local
    summary = summarise(
        outcome,
        score,
        local,
        data=run_plan.data.name,
        tuned=run_plan.tuned,
        seconds=time.perf_counter() - started,
        notices=(*notices, *unscored),
        newcomers=None if joined is None else joined.told(),
    )
    if run_plan.stragglers is not None:
        summary["caveats"].append(_LATE)
    summary |= _foretold(run_plan, train.spec)
    summary |= {"references": beside.told(score), "references_missing": list(beside.missing)}
    summary["gap"] = None if outcome.gap is None else json_number(outcome.gap)
    summary["run"] = None if folder is None else str(folder)
    if folder is not None:
        for part in (past, joined):
            if part is not None:
                part.keep(folder)
        errors = beside.errors()
        keep(folder, summary, outcome, train, score=score, local=local, errors=errors)
    return Result(summary, outcome, score, local)


def _beside(
    run_plan: RunPlan,
    outcome: Outcome,
    score: Score,
    data: tuple[FederatedDataset, FederatedDataset, Newcoming],
    scoring: Scoring,
) -> tuple[References, Newcomers | None, tuple[str, ...]]:
    """Score what stands beside a run: references, and clients who join, or why they could not."""
    if scoring is not None:
        scoring(run_plan)
    (train, test, joining), speed = data, run_plan.speed
    which: Which = run_plan.references if run_plan.compare_with_local else "none"
    beside = score_references(
        run_plan.method,
        train,
        test,
        score=score,
        which=which,
        private=run_plan.privacy.epsilon != math.inf,
        seed=run_plan.simulation_seed or 0,
        speed=speed,
    )
    if joining is None:
        return beside, None, ()
    return beside, *attempt_newcomers(outcome, *joining, alone=which != "none", speed=speed)


def _foretold(run_plan: RunPlan, spec: Spec) -> dict[str, Any]:
    """Give what was known before the run: whether joining pays, and why the method was picked."""
    advice = advice_of(run_plan, spec)
    return {"verdict": None if advice is None else advice.to_json(), "chosen": run_plan.chosen}


def _ended(outcome: Outcome) -> tuple[str, ...]:
    stop = outcome.plan.method.stop_gap
    if outcome.gap is None or stop is None:
        return ()
    told = f"relative duality gap {outcome.gap:.2g} after {len(outcome.posts)} rounds"
    if outcome.gap <= stop:
        return (told,)
    return (f"{told}: {stop:g} was not reached; more rounds get nearer (--rounds)",)


def _answers(past: History | None, outcome: Outcome) -> tuple[str, ...]:
    """Say how many answered, of runs without a budget: a hidden cohort stays hidden."""
    answers = [] if past is None else [line["answered"] for line in past.lines]
    if not answers or outcome.plan.privacy.epsilon != math.inf:
        return ()
    told = (f"{np.mean(answers):.3g} clients contributed in an average round",)
    silent = answers.count(0)
    if not silent:
        return told
    return (
        *told,
        f"in {silent} of {len(answers)} rounds no client answered in time: these rounds changed "
        "nothing; wait longer (stragglers.wait)",
    )


def load_plan(path: Path) -> RunPlan:
    """Read a plan.toml.

    Raises:
        ConfigError: If it cannot be read or does not fit.
    """
    return plan_from_table(read_toml(path))


def plan_from_table(table: Mapping[str, Any]) -> RunPlan:
    """Build a run plan from plain tables; unknown keys are refused."""
    _refuse_settings(table.get("method"))
    return from_table(RunPlan, table, "plan")


def _refuse_settings(method: Any) -> None:
    """Say what is wrong with settings of a method that is still to be picked."""
    if not isinstance(method, dict):
        return
    _refuse_settings(method.get("base"))
    given = sorted(set(method) - {"kind", "model"})
    if method.get("kind") == "auto" and given:
        raise ConfigError(
            f"method.{given[0]} was set, but no method is named: auto picks one by rule and has no "
            "settings of its own but the model; name the method that is meant (--method pmtl)"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; say where it is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def assign(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a value of a plan's table by its dotted path, such as `method.lam`."""
    *sections, key = path.split(".")
    place = table
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{path}: {section} is not a table of the plan")
    place[key] = value


def lay_kinds(table: Mapping[str, Any]) -> None:
    """Fill in the kinds of model and sampler where a plan's table has settings of them alone."""
    method = table.get("method")
    model = method.get("model") if isinstance(method, dict) else None
    usual = Method.choices().get(method.get("kind", "auto")) if isinstance(method, dict) else None
    named = "linear" if usual is None else usual().model.kind
    for place, kind in ((model, named), (table.get("sampler"), "poisson")):
        if isinstance(place, dict):
            place.setdefault("kind", kind)


def _claim(folder: Path, run_plan: RunPlan) -> None:
    """Make the folder this run's own, or make sure that it is."""
    text = to_toml(_table(run_plan))
    path = folder / "plan.toml"
    parts = ("ledger.jsonl", "posts", "personal", "models", "result.json")
    if not path.exists() and any((folder / part).exists() for part in parts):
        raise FileExistsError(
            f"{folder} holds parts of a run without its plan.toml; choose another folder"
        )
    if path.exists():
        if not _is_same(read_toml(path), tomllib.loads(text)):
            raise FileExistsError(
                f"{folder} holds a run of another plan; resume it with --resume {folder}, "
                "or choose another folder"
            )
        return
    write_atomically(path, text.encode())


def _is_same(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Compare plans as tables; one of an older version leaves out what was not known then."""
    usual = {setting.name: setting.default for setting in fields(RunPlan)}
    unsaid = {key: asked[key] for key in asked.keys() - kept.keys() if asked[key] == usual[key]}
    return {**kept, **unsaid} == asked


def _table(run_plan: RunPlan) -> dict[str, Any]:
    table = to_table(run_plan)
    assert isinstance(table, dict)
    return table
