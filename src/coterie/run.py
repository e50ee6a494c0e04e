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
from dataclasses import dataclass, field, replace
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
from coterie.methods.base import Method, Shape, registered
from coterie.models import Linear
from coterie.newcomers import Newcomers, hold_out, score_alone, score_newcomers
from coterie.plan import Plan, Privacy
from coterie.privacy.accounting import Participation, calibrate, default_delta
from coterie.privacy.files import write_atomically
from coterie.privacy.ledger import locked
from coterie.privacy.sampling import Poisson, Sampler
from coterie.recognition import recognise_model, recognise_rows
from coterie.rng import Rng
from coterie.scores import Score, evaluate
from coterie.summary import TunedOn, json_number, keep, summarise
from coterie.tree import size

NETWORK_ROUNDS = (3, 50)
NETWORK_ERROR = 20.0
Newcoming = tuple[FederatedDataset, FederatedDataset] | None
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
    of training by data.split_seed, and join afterwards.
    """

    data: DataChoice
    method: Method
    privacy: Privacy
    sampler: Sampler = field(default_factory=Poisson)
    rounds: int | None = None
    simulation_seed: int | None = None
    speed: Speed = field(default_factory=Speed)
    compare_with_local: bool = True
    tuned: TunedOn = "no"
    stragglers: Stragglers | None = None
    history: bool = False
    newcomers: int | float | None = None

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


def rounds_by_rule(method: Method, privacy: Privacy, spec: Spec) -> int:
    """Choose the number of rounds from public facts.

    The mean of m clipped vectors of p numbers over T rounds has relative error about
    sqrt(p T) / (m mu); linear models get the largest T that keeps it below what the method aims at
    (0.3), between its limits (3 to 25). Networks learn from means that are mostly noise, and would
    get nowhere in so few rounds: they get those that keep it below 20, from 3 to 50 (on FEMNIST, of
    10, 50 and 200 rounds, 10 were best at epsilon 2 and 50 at epsilon 8: docs/methods/neural.md).
    """
    if method.shape in (Shape.NONE, Shape.POOLED):
        return 1
    network = not isinstance(method.model, Linear)
    few, many = NETWORK_ROUNDS if network else method.rounds_between
    if privacy.epsilon is None:
        return many
    if privacy.epsilon == math.inf:
        return many if network else method.rounds_without_noise
    # A pure budget buys about as many rounds as one with a customary delta.
    delta = privacy.delta or default_delta(spec.clients)
    noise = calibrate(
        privacy.epsilon,
        delta,
        weights=(1.0,),
        participation=Participation("everyone"),
        relation=privacy.relation,
    )
    numbers = size(method.contribution(method.init(spec, Rng.seeded(0))))
    if method.shape is Shape.GRAM:
        numbers = numbers * (numbers + 1) // 2
    error = NETWORK_ERROR if network else method.rounds_error
    affordable = (error * spec.clients / noise) ** 2 / numbers
    return int(np.clip(affordable, few, many))


def resolve(run_plan: RunPlan, spec: Spec) -> RunPlan:
    """Fill in what was left to rules, so that plan.toml says it all."""
    privacy, rounds = run_plan.privacy, run_plan.rounds
    if privacy.delta is None:
        privacy = replace(privacy, delta=privacy.noise.usual_delta(spec.clients))
    if rounds is None:
        rounds = len(privacy.budget) or rounds_by_rule(run_plan.method, privacy, spec)
    if privacy.clip is None:
        privacy = replace(privacy, clip=run_plan.method.usual_clip(spec.clients, rounds))
    method = run_plan.method.for_cohort(run_plan.sampler.largest(spec.clients), spec)
    return replace(run_plan, method=method, privacy=privacy, rounds=rounds)


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
    observer: Callable[[RunPlan, FederatedDataset], Observer] | None = None,
) -> Result:
    """Run a plan from data to scores; with a folder, resumable and kept.

    Raises:
        FileExistsError: If the folder holds another run.
    """
    started = time.perf_counter()
    train, test = run_plan.data.split()
    joining = None
    if run_plan.newcomers is not None:
        check_joinable(run_plan.method)
        draw = run_plan.newcomers, run_plan.data.split_seed
        (train, rows), (test, held) = (hold_out(part, *draw) for part in (train, test))
        joining = rows, held
    run_plan = resolve(run_plan, train.spec)
    run_plan.plan().guarantee(train.spec.clients)
    run_plan.method.check(train.spec)
    for part in (test, *(joining or ())):  # before anything is spent: they are predicted at the end
        run_plan.method.model.check_data(part)
    if run_plan.stragglers is not None:
        run_plan = _set_clock(run_plan, run_plan.stragglers, train)
    if folder is None:
        return _carry_out(run_plan, (train, test, joining), None, observer, started)
    with as_interrupt(), locked(folder):
        _claim(folder, run_plan)
        recognise_rows(folder, train)
        recognise_model(folder, run_plan.method.model, train.spec)
        return _carry_out(run_plan, (train, test, joining), folder, observer, started)


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
    observer: Callable[[RunPlan, FederatedDataset], Observer] | None,
    started: float,
) -> Result:
    train, test, _ = data
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
    local, joined = _beside(run_plan, outcome, score, data)
    summary = summarise(
        outcome,
        score,
        local,
        data=run_plan.data.name,
        tuned=run_plan.tuned,
        seconds=time.perf_counter() - started,
        notices=(*run_plan.method.notices(train), *_ended(outcome), *_answers(past, outcome)),
        newcomers=None if joined is None else joined.told(),
    )
    if run_plan.stragglers is not None:
        summary["caveats"].append(_LATE)
    summary["gap"] = None if outcome.gap is None else json_number(outcome.gap)
    summary["run"] = None if folder is None else str(folder)
    if folder is not None:
        if past is not None:
            past.keep(folder)
        if joined is not None:
            joined.keep(folder)
        keep(folder, summary, outcome, train, score=score, local=local)
    return Result(summary, outcome, score, local)


def _beside(
    run_plan: RunPlan,
    outcome: Outcome,
    score: Score,
    data: tuple[FederatedDataset, FederatedDataset, Newcoming],
) -> tuple[Score | None, Newcomers | None]:
    """Score what stands beside a run: learning alone, and clients who join after training."""
    (train, test, joining), speed = data, run_plan.speed
    local = None
    if run_plan.compare_with_local:
        alone = run_plan.method.shape is Shape.NONE
        seed, own = run_plan.simulation_seed or 0, run_plan.method
        local = score if alone else score_alone(own, train, test, seed=seed, speed=speed)
    if joining is None:
        return local, None
    compare = run_plan.compare_with_local
    return local, score_newcomers(outcome, *joining, alone=compare, speed=speed)


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
    return from_table(RunPlan, table, "plan")


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
    usual = registered().get(method.get("kind", "pmtl")) if isinstance(method, dict) else None
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
        if path.read_text(encoding="utf-8") != text:
            raise FileExistsError(
                f"{folder} holds a run of another plan; resume it with --resume {folder}, "
                "or choose another folder"
            )
        return
    write_atomically(path, text.encode())


def _table(run_plan: RunPlan) -> dict[str, Any]:
    table = to_table(run_plan)
    assert isinstance(table, dict)
    return table
