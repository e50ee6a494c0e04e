"""A run: data, a plan and a folder that holds everything a person keeps.

- `plan.toml`: the resolved plan, data included; `coterie run --resume FOLDER` needs no more
- `ledger.jsonl`: what was charged and released, in order
- `log.jsonl`: when what happened (private)
- `data.json`: a fingerprint of the training rows, so that a run never goes on with others
- `model.json`: what the network answers on made-up rows, so that a run never goes on with another
- `posts/`: the public transcript, one file per post; `posts.npz` when the run is done
- `personal/`: personal state between rounds, and the journal of the round in progress
- `models/`: one model per client, a row each, in `clients.safetensors` (`clients.json` names them)
- `shared.npz`: the shared tree after the last post, which newcomers start from
- `guarantee.json`: what the run guarantees: the certificate that `coterie verify` checks
- `history.parquet`: with a virtual clock, or if asked for: the score of every round (not private)
- `metrics.parquet`: per client: test rows, own error, AUC, balanced accuracy or R^2 as the task has
  them, error of the local baseline (not private)
- `result.json`: the summary that `coterie run --json` prints
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.federated import FederatedDataset, Spec
from coterie.engines.calibration import calibrate as calibrate_clock
from coterie.engines.clock import Stragglers
from coterie.engines.outcome import Observer, Outcome, check_joinable
from coterie.engines.simulate import set_clock, simulate
from coterie.evaluation.baselines import Baselines, score_baselines
from coterie.evaluation.history import History, is_cheap
from coterie.evaluation.holdout import HeldOut, check_held_out, hold_out, try_held_out
from coterie.evaluation.metrics import Score, json_number
from coterie.evaluation.score import evaluate, shared_errors
from coterie.full_disks import explained
from coterie.interrupts import as_interrupt
from coterie.log import Log, Logged
from coterie.privacy.ledger import locked
from coterie.recognition import recognise_model, recognise_rows
from coterie.run_plan import RunPlan, advice_of, check_charged, claim, resolve
from coterie.summary import keep, paid, summarise

Newcoming = tuple[FederatedDataset, FederatedDataset] | None
Opens = Callable[["RunPlan", FederatedDataset], Observer] | None
Scoring = Callable[["RunPlan"], None] | None
_LATE = (
    "Clients stood on a virtual clock: those who were late contributed nothing to a round, and no "
    "other client is shown who answered."
)


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
    check_charged(run_plan, folder)
    if joining is not None:
        check_joinable(run_plan.method)
    run_plan.plan().guarantee(train.spec.clients)
    run_plan.method.check(train.spec)
    run_plan.method.check_data(train)
    for part in (test, *(joining or ())):  # before anything is spent: they are predicted at the end
        run_plan.method.model.check_data(part)
    if joining is not None and (folder is None or not (folder / "plan.toml").exists()):
        check_held_out(run_plan.method, joining[0])
    if run_plan.stragglers is not None:
        run_plan = _set_clock(run_plan, run_plan.stragglers, train)
    data = train, test, joining
    if folder is None:
        return _carry_out(run_plan, data, None, (observer, scoring), started)
    with as_interrupt(), explained(folder), locked(folder):
        claim(folder, run_plan)
        recognise_rows(folder, train)
        recognise_model(folder, run_plan.method.model, train.spec)
        with _logged(folder):
            return _carry_out(run_plan, data, folder, (observer, scoring), started)


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Keep the log of a run from its start to whatever ends it."""
    log = Log(folder / "log.jsonl")
    log.open()
    try:
        yield
    except KeyboardInterrupt:
        log.note("interrupted", sync=True)
        raise
    except Exception as error:
        with suppress(OSError):  # a full disk must not hide what went wrong
            log.note("failed", sync=True, kind=type(error).__name__)
        raise


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
    opened = observer(run_plan, train) if observer is not None else None
    watch, past, log = _watching(run_plan, train, test, folder, opened)
    outcome = simulate(
        run_plan.plan(),
        train,
        observe=watch,
        folder=folder,
        speed=run_plan.speed,
        stragglers=run_plan.stragglers,
        recovered=None if past is None else past.catch_up,
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
        newcomers=None if joined is None else joined.to_json(),
    )
    summary |= paid(outcome.guarantee, run_plan.tuned, run_plan.charged)
    if run_plan.stragglers is not None:
        summary["caveats"].append(_LATE)
    summary |= _foretold(run_plan, train.spec)
    summary |= {"references": beside.to_json(score), "references_missing": list(beside.missing)}
    summary["gap"] = None if outcome.gap is None else json_number(outcome.gap)
    summary["run"] = None if folder is None else str(folder)
    if folder is not None:
        for part in (past, joined):
            if part is not None:
                part.keep(folder)
        errors = {**beside.errors(), **shared_errors(outcome, train, test)}
        keep(folder, summary, outcome, train, score=score, local=local, errors=errors, log=log)
    return Result(summary, outcome, score, local)


def _watching(
    run_plan: RunPlan,
    train: FederatedDataset,
    test: FederatedDataset,
    folder: Path | None,
    watch: Observer | None,
) -> tuple[Observer | None, History | None, Log | None]:
    """Put history and log around what watches the rounds."""
    past = None
    if _keeps_history(run_plan, train, test):
        unasked = not run_plan.history and run_plan.stragglers is None
        past = watch = History(run_plan.method, train, test, folder, watch, unasked=unasked)
    if folder is None:
        return watch, past, None
    log = Log(folder / "log.jsonl")
    return Logged(log, run_plan.plan().guarantee(train.spec.clients), watch), past, log


def _keeps_history(run_plan: RunPlan, train: FederatedDataset, test: FederatedDataset) -> bool:
    """Return whether rounds are scored: if asked for, always with a clock, else where it is cheap."""
    if run_plan.stragglers is not None or run_plan.history is not None:
        return bool(run_plan.history) or run_plan.stragglers is not None
    return is_cheap(run_plan.method, train, test, run_plan.plan().posts)


def _beside(
    run_plan: RunPlan,
    outcome: Outcome,
    score: Score,
    data: tuple[FederatedDataset, FederatedDataset, Newcoming],
    scoring: Scoring,
) -> tuple[Baselines, HeldOut | None, tuple[str, ...]]:
    """Return the baselines of a run and its held-out clients, or notices of why they failed."""
    if scoring is not None:
        scoring(run_plan)
    (train, test, joining), speed = data, run_plan.speed
    names = [n for n in run_plan.baselines if n != "local" or run_plan.compare_with_local]
    beside = score_baselines(
        run_plan.method,
        train,
        test,
        score=score,
        names=names,
        private=run_plan.privacy.epsilon != math.inf,
        seed=run_plan.simulation_seed or 0,
        speed=speed,
    )
    if joining is None:
        return beside, None, ()
    return beside, *try_held_out(outcome, *joining, local="local" in names, speed=speed)


def _foretold(run_plan: RunPlan, spec: Spec) -> dict[str, Any]:
    """Return what was known before the run: whether joining pays, and why the method was picked."""
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
    if past is None or past.unasked:
        return ()
    answers = [line["answered"] for line in past.lines if line["answered"] is not None]
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
