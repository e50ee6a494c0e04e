"""A run: data, a plan, and the folder that keeps it (`coterie.runs.folder`)."""

import math
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.config import to_toml
from coterie.core.files import explain_damage, explain_disk_errors
from coterie.core.ranks import ALONE, Ranks
from coterie.core.signals import as_interrupt
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.simulate import (
    Observer,
    Outcome,
    assist,
    check_onboard,
    check_ranks,
    set_clock,
    simulate,
)
from coterie.evaluation.baselines import Baselines, check_baselines, score_baselines
from coterie.evaluation.history import History, is_cheap
from coterie.evaluation.holdout import HeldOut, check_held_out, hold_out, try_held_out
from coterie.evaluation.metrics import Score, json_number
from coterie.evaluation.score import evaluate, shared_errors
from coterie.planning.plan import NO_DATA, Plan
from coterie.planning.rules import advice_for, heed_verdict, resolve
from coterie.planning.stragglers import Stragglers
from coterie.planning.stragglers import calibrate as calibrate_clock
from coterie.privacy.ledger import locked
from coterie.runs.budget import REGISTER, Budget, Spending, spending_of
from coterie.runs.folder import (
    check_charged,
    check_model,
    check_personal,
    check_rows,
    claim,
    columns_read,
    keep,
)
from coterie.runs.log import Log, Logged
from coterie.runs.summary import paid, summarise

Pair = tuple[FederatedDataset, FederatedDataset]
Parts = tuple[FederatedDataset, FederatedDataset, Pair | None]
"""Training rows, test rows, and both for held-out clients."""
Opens = Callable[["Plan", FederatedDataset], Observer] | None
Scoring = Callable[["Plan"], None] | None
_LATE = (
    "Clients were on a virtual clock: late clients contributed nothing to a round, and no other "
    "client sees who answered."
)


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run and its scores."""

    summary: dict[str, Any]
    outcome: Outcome
    score: Score
    local: Score | None

    def __repr__(self) -> str:
        return f"<Result: {self.score!r}, {self.outcome!r}>"


def execute(
    plan: Plan,
    *,
    folder: Path | None = None,
    observer: Opens = None,
    scoring: Scoring = None,
    budget: Budget | None = REGISTER,
    anyway: bool = True,
    data: FederatedDataset | None = None,
    ranks: Ranks = ALONE,
) -> Result:
    """Run a plan from data to scores; with a folder, the run is saved and can be resumed.

    `resolve` fills in what the plan leaves open. `observer` makes what is called after every round;
    `scoring` is called after the last one, before the baselines are scored. `budget` enters a
    private run in a register of what was spent on the same clients, by default the user's
    (`coterie budget`); None enters nothing. Without `anyway`, `auto` trains locally if the budget
    would not pay for itself (`heed_verdict`). `data` are all rows, of training and test, if they
    are in memory; else those that the plan names are opened. `ranks` are the processes that share
    the run: this one is rank 0, and each of the others calls `assist_run`.

    Raises:
        FileExistsError: If the folder holds another run.
        ValueError: If the run would exceed the total that the register declares for its clients.
    """
    started = time.perf_counter()
    if plan.data == NO_DATA:
        raise ValueError("data is missing: expected a plan with data; or call simulate(plan, data)")
    check_baselines(plan.baselines)
    parts = _split(plan, data)
    train = parts[0]
    resolved = resolve(plan, train.spec)
    plan = resolved if anyway else heed_verdict(plan, resolved, train.spec)
    check_charged(plan, folder)
    check_ranks(plan, train.spec.clients, ranks)
    begun = folder is not None and (folder / "plan.toml").exists()
    _check(plan, parts, begun=begun)
    if plan.stragglers is not None:
        plan = _set_clock(plan, plan.stragglers, train)
    enter = _counted(budget, plan, train, begun=begun)
    if folder is None:
        return _train(plan, parts, None, (observer, scoring), enter(None), started, ranks)
    with as_interrupt(), explain_disk_errors(folder), explain_damage(folder), locked(folder):
        with _all_or_nothing(folder, begun=begun):
            claim(folder, plan)
            check_rows(folder, train)
            check_model(folder, plan.method.model, train.spec)
            check_personal(folder)
            spent = enter(folder)
        log = Log(folder / "log.jsonl")
        log.open()
        with log.until_end():
            return _train(plan, parts, folder, (observer, scoring), spent, started, ranks)


def assist_run(ranks: Ranks) -> None:
    """Compute the clients of this rank in the run that rank 0 executes.

    Raise RankError if rank 0 begins none, ValueError if this rank reads other rows than rank 0.
    """
    text, folder, fingerprint = ranks.share(("", None, ""))
    plan = Plan.from_table(tomllib.loads(text))
    train = _split(plan, None)[0]
    if train.fingerprint() != fingerprint:
        raise ValueError(
            f"{plan.data.name}: rank {ranks.rank} reads other rows than rank 0; give all machines "
            "the same data"
        )
    assist(plan, train, folder, plan.speed, ranks)


def foresee(
    plans: Sequence[Plan], data: FederatedDataset | None = None, *, anyway: bool = True
) -> list[Spending | None]:
    """Return what plans on the data of the first one will spend, before any of them is begun.

    Plans that cannot run spend nothing. Held-out clients count: each plan may hold out others.
    """
    train, _, held = _split(plans[0], data)
    names = (*train.names, *(() if held is None else held[0].names))
    return [_foresee(plan, train.spec, names, anyway=anyway) for plan in plans]


def _foresee(plan: Plan, spec: Spec, names: Sequence[str], *, anyway: bool) -> Spending | None:
    try:
        resolved = resolve(plan, spec)
        plan = resolved if anyway else heed_verdict(plan, resolved, spec)
        return spending_of(plan, names, plan.guarantee(spec.clients))
    except ValueError:
        return None


def _counted(
    budget: Budget | None, plan: Plan, train: FederatedDataset, *, begun: bool
) -> Callable[[Path | None], dict[str, Any] | None]:
    """Return what enters a run whose folder is claimed; raise ValueError beyond a total.

    The runs of a charged selection are entered together, by the selection.
    """
    spending = spending_of(plan, train.names, plan.guarantee(train.spec.clients))
    if budget is None or spending is None or plan.charged is not None:
        return lambda folder: None
    if not begun:  # `enter` knows whether a run that was begun is entered already
        budget.check(spending)
    return partial(budget.enter, spending)


@contextmanager
def _all_or_nothing(folder: Path, *, begun: bool) -> Iterator[None]:
    """Remove what a new run has written so far if it is refused."""
    before = set(folder.iterdir())
    try:
        yield
    except Exception:
        for path in () if begun else set(folder.iterdir()) - before:
            path.unlink(missing_ok=True)
        if {path.name for path in folder.iterdir()} <= {".lock"}:
            (folder / ".lock").unlink(missing_ok=True)
            folder.rmdir()
        raise


def _split(plan: Plan, data: FederatedDataset | None) -> Parts:
    """Return training rows, test rows, and both for held-out clients if there are any."""
    train, test = plan.data.split(data)
    if plan.newcomers is None:
        return train, test, None
    draw = plan.newcomers, plan.data.split_seed
    (train, rows), (test, held) = (hold_out(part, *draw) for part in (train, test))
    return train, test, (rows, held)


def _check(plan: Plan, data: Parts, *, begun: bool) -> None:
    """Raise ValueError for a plan that does not fit its data, before anything is spent."""
    train, test, held_out = data
    if held_out is not None:
        check_onboard(plan.method)
    plan.guarantee(train.spec.clients)
    plan.method.check(train.spec, data=train)
    for part in (test, *(held_out or ())):  # predicted after the last round
        plan.method.model.check_data(part)
    if held_out is not None and not begun:
        check_held_out(plan.method, held_out[0])


def _set_clock(plan: Plan, clock: Stragglers, train: FederatedDataset) -> Plan:
    """Calibrate the clock on request; raise ValueError for what no budget covers."""
    set_clock(clock, plan, train)
    if not clock.calibrate:
        return plan
    if plan.privacy.epsilon != math.inf:
        raise ValueError(
            "stragglers.calibrate measures clients' own rows, and plan.toml would show it: give "
            "the coefficients, or run with epsilon = inf"
        )
    return replace(plan, stragglers=calibrate_clock(clock, plan.method, train))


def _share(plan: Plan, folder: Path | None, train: FederatedDataset, ranks: Ranks) -> None:
    """Tell the other processes of this run, where there are any, what they work on."""
    if ranks.size > 1:
        ranks.share((to_toml(plan.to_table()), folder, train.fingerprint()))


def _train(
    plan: Plan,
    data: Parts,
    folder: Path | None,
    watching: tuple[Opens, Scoring],
    spent: dict[str, Any] | None,
    started: float,
    ranks: Ranks,
) -> Result:
    (train, test, _), (observer, scoring) = data, watching
    opened = observer(plan, train) if observer is not None else None
    watch, past, log = _observe(plan, train, test, folder, opened, alone=ranks.size == 1)
    _share(plan, folder, train, ranks)
    outcome = simulate(
        plan,
        train,
        observe=watch,
        folder=folder,
        speed=plan.speed,
        stragglers=plan.stragglers,
        recovered=None if past is None else past.catch_up,
        progress=False,
        ranks=ranks,
    )
    score = evaluate(plan.method.model, outcome.rows, test)
    others, joined, unscored = _score_others(plan, outcome, score, data, scoring)
    notes = (*plan.method.notes(data=train).data, *_gap_note(outcome), *_divergence_note(outcome))
    local = others.local
    summary = summarise(
        outcome,
        score,
        local,
        data=plan.data.name,
        tuned=plan.tuned,
        seconds=time.perf_counter() - started,
        notices=(*notes, *_response_note(past, outcome), *unscored),
        newcomers=None if joined is None else joined.to_json(),
    )
    summary |= _add_facts(plan, outcome, others.to_json(score), others.missing)
    summary["data_used"] = _data_used(train, test)
    summary["caveats"] += [] if plan.stragglers is None else [_LATE]
    summary |= {"run": None if folder is None else str(folder), "register": spent}
    if folder is not None:
        for part in (past, joined):
            if part is not None:
                part.keep(folder)
        errors = {**others.errors(), **shared_errors(outcome, train, test)}
        keep(folder, summary, outcome, train, score=score, local=local, errors=errors, log=log)
    return Result(summary, outcome, score, local)


def _observe(
    plan: Plan,
    train: FederatedDataset,
    test: FederatedDataset,
    folder: Path | None,
    watch: Observer | None,
    *,
    alone: bool,
) -> tuple[Observer | None, History | None, Log | None]:
    """Return the observer of the rounds with history and log around it."""
    past = None
    if alone and _keeps_history(plan, train, test):
        unasked = not plan.history and plan.stragglers is None
        past = watch = History(plan.method, train, test, folder, watch, unasked=unasked)
    if folder is None:
        return watch, past, None
    log = Log(folder / "log.jsonl")
    return Logged(log, plan.guarantee(train.spec.clients), watch), past, log


def _keeps_history(plan: Plan, train: FederatedDataset, test: FederatedDataset) -> bool:
    """Return whether rounds are scored: on request, with a clock, or where it is cheap."""
    if plan.stragglers is not None or plan.history is not None:
        return bool(plan.history) or plan.stragglers is not None
    return is_cheap(plan.method, train, test, plan.posts)


def _score_others(
    plan: Plan,
    outcome: Outcome,
    score: Score,
    data: Parts,
    scoring: Scoring,
) -> tuple[Baselines, HeldOut | None, tuple[str, ...]]:
    """Score the baselines and the held-out clients; return why some could not be scored."""
    if scoring is not None:
        scoring(plan)
    (train, test, joining), speed = data, plan.speed
    names = [name for name in plan.baselines if name != "local" or plan.compare_with_local]
    others = score_baselines(
        plan.method,
        train,
        test,
        score=score,
        names=names,
        private=plan.privacy.epsilon != math.inf,
        seed=plan.simulation_seed or 0,
        speed=speed,
    )
    if joining is None:
        return others, None, ()
    return others, *try_held_out(outcome, *joining, local="local" in names, speed=speed)


def _add_facts(
    plan: Plan, outcome: Outcome, baselines: list[dict[str, Any]], missing: Iterable[str]
) -> dict[str, Any]:
    """Return what else a summary holds: selection, verdict before the run, baselines, gap."""
    advice = advice_for(plan, outcome.spec)
    return {
        **paid(outcome.guarantee, plan.tuned, plan.charged),
        "verdict": None if advice is None else advice.to_json(),
        "chosen": plan.chosen,
        "references": baselines,
        "references_missing": list(missing),
        "gap": None if outcome.gap is None else json_number(outcome.gap),
    }


def _data_used(train: FederatedDataset, test: FederatedDataset) -> dict[str, Any]:
    """Return which data a run used, and what was left out, for the data's owner."""
    return {
        "clients": len(train),
        "clients_without_rows": int((train.counts == 0).sum()),
        "rows": len(train.targets) + len(test.targets),
        "training_rows": len(train.targets),
        "columns": list(columns_read(train)),
        "columns_left_out": list(train.left_out),
        "notes": list(dict.fromkeys(train.notes)),
    }


def _gap_note(outcome: Outcome) -> tuple[str, ...]:
    duality = outcome.plan.method.rounds(outcome.spec).duality
    stop = None if duality is None else duality.stop_gap
    if outcome.gap is None or stop is None:
        return ()
    text = f"relative duality gap {outcome.gap:.2g} after {len(outcome.posts)} rounds"
    if outcome.gap <= stop:
        return (text,)
    return (f"{text}: {stop:g} was not reached; use more rounds (--rounds)",)


def _divergence_note(outcome: Outcome) -> tuple[str, ...]:
    diverged = outcome.plan.method.rounds(outcome.spec).diverged
    why = "" if diverged is None else diverged(outcome.shared)
    return (f"{why} after {len(outcome.posts)} of {outcome.plan.posts} rounds",) if why else ()


def _response_note(past: History | None, outcome: Outcome) -> tuple[str, ...]:
    """Return how many clients answered, without a budget: a hidden cohort stays hidden."""
    if past is None or past.unasked:
        return ()
    answers = [line["answered"] for line in past.lines if line["answered"] is not None]
    if not answers or outcome.plan.privacy.epsilon != math.inf:
        return ()
    text = (f"{np.mean(answers):.3g} clients contributed in an average round",)
    silent = answers.count(0)
    if not silent:
        return text
    return (
        *text,
        f"in {silent} of {len(answers)} rounds no client answered in time and nothing changed; "
        "wait longer (stragglers.wait)",
    )
