"""Choose settings by private runs, and charge every run.

    found = select(table, grid, folder=Path("selected"), runs=10)
    found.best, found.run  # the settings, and the folder of the chosen run

`select` draws the number of runs K (`runs` on average), and settings for each of the K runs,
uniformly from the grid. It writes both to disk before any budget is spent. Each run has a run
folder and costs the plan's epsilon. Afterwards each client scores its model on its own held-out
rows (`data.validation`), and a noisy mean of the scores is released: score = bound - error, from 0
to `bound`, where the error is the mean squared error or the error rate. The run with the best noisy
score is kept (Papernot and Steinke 2022: see `coterie.privacy.selection`).

`selection.json` states two epsilons: one against a recipient of the chosen run only, and one
against the other clients, who take part in all runs. K, the other runs and that file must not reach
the recipient of the first; names of run folders are random. The first epsilon does not depend on K:
each run's plan, certificate, results and report state it (`coterie.privacy.selection`).

A call with the same folder resumes after a crash and draws nothing again.
"""

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.config import ConfigError, from_table
from coterie.core.files import write_atomically
from coterie.core.rng import derive_key
from coterie.core.signals import as_interrupt
from coterie.data.config import DataConfig
from coterie.data.federated import FederatedDataset
from coterie.engine.simulate import Outcome
from coterie.evaluation.metrics import Array
from coterie.evaluation.score import evaluate
from coterie.planning.plan import Plan
from coterie.privacy.billboard import Billboard, bound
from coterie.privacy.entropy import open_entropy, uniforms
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.ledger import Ledger, locked
from coterie.privacy.mechanisms import Block, BlockSum
from coterie.privacy.profiles import gaussian_mu
from coterie.privacy.selection import Charged, RunLaw, Selection, renyi
from coterie.privacy.transcript import FolderTranscript
from coterie.runs.budget import REGISTER, Budget, Spending, spending_of
from coterie.runs.run import execute
from coterie.tune.tune import (
    Grid,
    Observe,
    Progress,
    Trial,
    check_grid,
    plan_all,
    rank,
    tuning_label,
)

RECORD = "selection.json"
_SCORE_SHARE = 0.5
"""The share of a run's mu that its score spends in addition: 12 % more mu at full participation."""
_MOST_RUNS = 0.99
"""The share of selections whose cost must fit a declared total before K is drawn."""
_PRIVATE = "K, the other runs and this file must not reach a recipient of the chosen run only"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How runs are scored."""

    # Of the sum of clients' scores; None for the noise that spends half of the run's mu
    noise_multiplier: float | None = None
    # The largest error that counts, a public number. Error rates are at most 1; for mean squared
    # errors choose it slightly above the error of a constant prediction.
    bound: float = 1.0
    rows: int | float = 0.25  # training rows that each client holds out: a share, or a number

    def mechanism(self, epsilon: float, delta: float) -> BlockSum:
        """Return the mechanism that releases a score.

        **Guarantee:** a score is one number from 0 to `bound`, so zeroing or replacing a client
        changes the sum by at most `bound`: one event Gaussian(z, replaced=1);
        `tests/properties/test_selection.py`.
        """
        noise = self.noise_multiplier
        if noise is None:
            noise = 1 / (_SCORE_SHARE * gaussian_mu(epsilon, delta))
        return BlockSum((Block("score", self.bound, 1.0, "single"),), noise)

    def contributions(self, errors: Array) -> Tensor:
        """Return each client's score; 0 if its error is NaN or it has no rows."""
        kept = self.bound - errors
        kept = np.where(np.isfinite(kept), np.clip(kept, 0, self.bound), 0.0)
        return torch.from_numpy(np.asarray(kept))


@dataclass(frozen=True)
class Offer:
    """The candidates of a selection and its privacy cost, before any budget is spent."""

    settings: list[dict[str, Any]]  # values by dotted key, of each candidate
    plans: list[Plan]  # the complete plan of each candidate
    refused: list[Trial]  # combinations that cannot run, and why
    guarantee: Selection  # the guarantee of selection among the candidates, for both adversaries
    clients: Sequence[str]  # the names of the clients

    @property
    def most_spending(self) -> Spending | None:
        """What all runs spend, unless K is larger than in 99 of 100 selections."""
        return self.spending(self.guarantee.most_expensive(_MOST_RUNS))

    def spending(self, guarantee: Guarantee) -> Spending | None:
        """Return what runs of this guarantee spend, for the register; None for simulations."""
        return spending_of(self.plans[0], self.clients, guarantee)


@dataclass(frozen=True)
class Selected:
    """The result of a selection."""

    best: dict[str, Any]  # the settings of the chosen run
    run: Path  # its folder
    plan: Plan  # its complete plan
    drawn: tuple[int, ...]  # the candidate of each run, by its index in the offer
    scores: tuple[float, ...]  # the noisy score of each run (larger is better)
    guarantee: Selection  # both views: `guarantee.chosen_alone`, `guarantee.of_runs(drawn).epsilon`
    record: dict[str, Any]  # the contents of `selection.json`


def select(  # noqa: PLR0913 (the settings of a selection, named one by one)
    table: Mapping[str, Any],
    grid: Grid,
    *,
    folder: Path,
    runs: float = 10.0,
    eta: float = 1.0,
    seed: int | None = None,
    public: bool = False,
    scoring: Scoring | None = None,
    observe: Observe | None = None,
    budget: Budget | None = REGISTER,
) -> Selected:
    """Choose settings of a plan by private runs; resumable.

    The register gets one entry, for all runs and scores, once K is drawn. A selection that would
    exceed a declared total if K is large (1 in 100) is refused before K is drawn: to draw again
    until K is small would change its law.

    Args:
        table: The run's plan as nested tables; its epsilon is that of each single run.
        grid: Values to try by dotted key; settings are drawn uniformly from all combinations.
        folder: Where runs, scores and `selection.json` are kept.
        runs: The expected number of runs; the number itself is random.
        eta: Shape of its distribution, see `RunLaw`.
        seed: Makes the selection a reproducible simulation (default: the plan's simulation seed).
        public: The user's declaration that the data is public; it labels the result.
        scoring: How runs are scored.
        observe: Called with the progress before the first run and after each run.
        budget: The register of what private runs spend, by default the user's.
    """
    scoring = scoring or Scoring()
    seed = table.get("simulation_seed") if seed is None else seed
    laid = _prepare(table, scoring, seed)
    found, held = _offer(laid, grid, RunLaw(runs, eta), scoring, public)
    asked = {
        "plan": laid,
        "grid": {key: list(values) for key, values in _check_drawable(grid).items()},
        "runs": runs,
        "eta": eta,
        "seed": seed,
        "public": public,
        "scoring": asdict(scoring),
    }
    if budget is not None and budget.has_totals and not (folder / RECORD).exists():
        budget.check(found.most_spending)
    with as_interrupt(), locked(folder):
        record = _claim(folder, json.loads(json.dumps(asked)), found, seed)
        if budget is not None:
            drawn = found.guarantee.of_runs(record["guarantee"]["drawn"])
            budget.enter(found.spending(drawn), folder)
        scores = _run_all(folder, record, found, held, scoring, observe)
        return _finish(folder, record, found, scores)


def offer(
    table: Mapping[str, Any],
    grid: Grid,
    *,
    runs: float = 10.0,
    eta: float = 1.0,
    seed: int | None = None,
    public: bool = False,
    scoring: Scoring | None = None,
) -> Offer:
    """Return the candidates of a selection and its privacy cost; spend nothing."""
    scoring = scoring or Scoring()
    laid = _prepare(table, scoring, table.get("simulation_seed") if seed is None else seed)
    return _offer(laid, grid, RunLaw(runs, eta), scoring, public)[0]


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read the record of a finished selection; None if there is none."""
    path = folder / RECORD
    record: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return record if record.get("finished") else None


def _prepare(table: Mapping[str, Any], scoring: Scoring, seed: int | None) -> dict[str, Any]:
    laid = copy.deepcopy(dict(table))
    laid.pop("charged", None)  # of an earlier selection
    epsilon = laid.get("privacy", {}).get("epsilon")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise ConfigError(
            f"privacy.epsilon = {epsilon}: expected the budget of one run, a positive number; "
            "without a budget there is nothing to charge: leave --charge out"
        )
    if "newcomers" in laid:
        raise ConfigError("a selection cannot hold out clients: leave --holdout-clients out")
    laid["data"] = {**laid.get("data", {}), "validation": scoring.rows}
    if seed is not None:
        laid["simulation_seed"] = seed
    return laid


def _offer(
    laid: Mapping[str, Any], grid: Grid, law: RunLaw, scoring: Scoring, public: bool
) -> tuple[Offer, FederatedDataset]:
    listed = _check_drawable(grid)
    choice = from_table(DataConfig, laid["data"], "plan.data")
    train, held = choice.split_validation()
    if not held.counts.any():
        raise ConfigError(
            f"data.validation = {scoring.rows}: no client of {train.title} has a row to spare; "
            "hold out more validation rows, or fewer test rows"
        )
    trials, found = plan_all(laid, listed, train.spec)
    plans = [replace(p, tuned=tuning_label(p, public=public, charged=True)) for p in found.values()]
    for plan in plans:
        plan.method.check(train.spec, data=train)
    settings = [trials[place].settings for place in found]
    refused = [trial for trial in trials if trial.refused is not None]
    guarantee = _guarantee(plans, train.spec.clients, law, scoring)
    return Offer(settings, plans, refused, guarantee, train.names), held


def _guarantee(plans: Sequence[Plan], clients: int, law: RunLaw, scoring: Scoring) -> Selection:
    first = plans[0]
    who, relation = first.sampler.participation(clients), first.privacy.relation
    candidates = tuple(
        tuple(mechanism.event() for mechanism in plan.mechanisms(clients)) for plan in plans
    )
    for events in set(candidates):
        renyi(events, who, relation)  # raises if there is no bound, before any noise is drawn
    assert first.privacy.epsilon is not None
    score = scoring.mechanism(first.privacy.epsilon, first.delta(clients)).event()
    return Selection(
        candidates=candidates,
        score=score,
        law=law,
        participation=who,
        relation=relation,
        delta=first.delta(clients),
        clients=clients,
        simulation=first.simulation_seed is not None,
    )


def _check_drawable(grid: Grid) -> dict[str, Sequence[Any]]:
    listed = check_grid(grid)
    for key in grid:
        if key.partition(".")[0] in ("sampler", "newcomers"):
            raise ConfigError(
                f"grid {key}: it cannot be chosen privately, because all runs are composed under "
                "one sampling of the same clients; leave it out"
            )
    return listed


def _claim(folder: Path, asked: dict[str, Any], found: Offer, seed: int | None) -> dict[str, Any]:
    """Draw K and all settings and write them before any budget is spent; or read the record."""
    path = folder / RECORD
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["asked"] != asked:
            raise FileExistsError(
                f"{folder} holds another selection; resume it with its own settings, or choose "
                "another folder"
            )
        return record
    if (folder / "scores").exists():
        raise FileExistsError(
            f"{folder} holds scores of a selection without its {RECORD}; choose another folder"
        )
    entropy = open_entropy(seed, "selection", 0)
    count = found.guarantee.law.draw(entropy)
    drawn = [int(u * len(found.plans)) for u in uniforms(entropy, count)]
    names = [f"{int(word):016x}" for word in entropy.words(count)]
    record = {
        "asked": asked,
        "finished": False,
        "note": _PRIVATE,
        "guarantee": found.guarantee.to_json(drawn),
        "words": found.guarantee.statement(drawn),
        "runs": [
            {"run": f"runs/{name}", "settings": found.settings[number], "score": None}
            for name, number in zip(names, drawn, strict=True)
        ],
        "chosen": None,
    }
    _write(path, record)
    return record


def _run_all(
    folder: Path,
    record: Mapping[str, Any],
    found: Offer,
    held: FederatedDataset,
    scoring: Scoring,
    observe: Observe | None,
) -> tuple[float, ...]:
    """Execute the remaining runs, each followed by its score."""
    drawn, seed = record["guarantee"]["drawn"], record["asked"]["seed"]
    board = _open_scores(folder / "scores", record, found, scoring)
    try:
        if observe is not None:
            observe(Progress(board.next, len(drawn), _trials(record, _read_scores(board))))
        for number, run in enumerate(record["runs"]):
            if number < board.next:
                continue
            plan = replace(found.plans[drawn[number]], charged=Charged.of(found.guarantee))
            if seed is not None:
                # The bound needs independent runs: each run has its own seed.
                own = derive_key(seed, "selected run", number) >> 2
                plan = replace(plan, simulation_seed=own)
            outcome = execute(plan, folder=folder / run["run"]).outcome
            cohort = plan.sampler.draw(
                len(held), open_entropy(seed, "score cohort", number), number
            )
            _post_score(board, outcome, held, scoring, torch.from_numpy(cohort))
            if observe is not None:
                observe(Progress(number + 1, len(drawn), _trials(record, _read_scores(board))))
        return _read_scores(board)
    finally:
        board.ledger.close()


def _trials(record: Mapping[str, Any], scores: Sequence[float]) -> list[Trial]:
    pairs = zip(record["runs"], scores, strict=False)
    return rank([Trial(run["settings"], "score", (score,)) for run, score in pairs])


def _open_scores(
    folder: Path, record: Mapping[str, Any], found: Offer, scoring: Scoring
) -> Billboard:
    privacy, seed = found.plans[0].privacy, record["asked"]["seed"]
    clients = found.guarantee.clients
    assert privacy.epsilon is not None
    count = len(record["runs"])
    mechanisms = (scoring.mechanism(privacy.epsilon, found.guarantee.delta),) * count
    drawn = json.dumps([record["asked"], record["guarantee"]["drawn"]], sort_keys=True)
    return Billboard(
        mechanisms=mechanisms,
        template={"score": torch.zeros(())},
        cohort=found.plans[0].sampler.expected(clients),
        ledger=Ledger(
            [mechanism.event() for mechanism in mechanisms],
            folder / "ledger.jsonl",
            hashlib.sha256(drawn.encode()).hexdigest(),
        ),
        transcript=FolderTranscript(folder / "posts"),
        entropy=lambda index: open_entropy(seed, "score", index),
    )


def _post_score(
    board: Billboard, outcome: Outcome, held: FederatedDataset, scoring: Scoring, ids: Tensor
) -> None:
    """Release the noisy sum of a cohort's scores on its held-out rows."""
    errors = evaluate(outcome.plan.method.model, outcome.rows, held).clients
    rows = {"score": scoring.contributions(errors)[ids]}
    board.post([bound(board.mechanism(board.next), rows, ids)[0]] if len(ids) else [])


def _read_scores(board: Billboard) -> tuple[float, ...]:
    return tuple(float(post.value["score"]) / post.cohort for post in board.posts)


def _finish(
    folder: Path, record: dict[str, Any], found: Offer, scores: tuple[float, ...]
) -> Selected:
    drawn = tuple(int(number) for number in record["guarantee"]["drawn"])
    best = int(np.argmax(scores))
    runs = [{**run, "score": score} for run, score in zip(record["runs"], scores, strict=True)]
    record = {**record, "finished": True, "runs": runs, "chosen": runs[best]["run"]}
    _write(folder / RECORD, record)
    return Selected(
        best=found.settings[drawn[best]],
        run=folder / runs[best]["run"],
        plan=found.plans[drawn[best]],
        drawn=drawn,
        scores=scores,
        guarantee=found.guarantee,
        record=record,
    )


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(record, indent=2, allow_nan=False).encode())
