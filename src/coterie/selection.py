"""Settings chosen by private runs, every one of them charged.

    found = select(table, grid, folder=Path("selected"), runs=10)
    found.best, found.run  # the settings, and the run folder that is kept

K is drawn (`runs` on average), and settings for each of K runs, uniformly from the grid; this is on
disk before anything is spent. Every run is an ordinary one, in a run folder of its own, at the
plan's epsilon; then each client scores its model on rows of its own that were held back
(`data.validation`), and a noisy mean of these scores is posted: score = bound - error, from 0 to
`bound`, where the error is the mean squared error or the share of rows that are wrong. The run with
the best noisy score is kept (Papernot and Steinke 2022: see `coterie.privacy.selection`).

Two numbers come of it, and both are in `selection.json`: epsilon for whoever sees the chosen run
alone, and that of the other clients, who took part in all runs. K, the other runs and that file are
not for the first of them; names of run folders tell nothing. The first number does not depend on
K: each run's own plan, certificate, results and report state it (`coterie.privacy.charged`).

It survives a crash: called again with the same folder it goes on, and draws nothing anew.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table
from coterie.data.federated import FederatedDataset
from coterie.engines.outcome import Outcome
from coterie.evaluation.metrics import Array
from coterie.evaluation.score import evaluate
from coterie.interrupts import as_interrupt
from coterie.privacy.billboard import Billboard, bound
from coterie.privacy.blocks import Block, BlockSum
from coterie.privacy.charged import Charged
from coterie.privacy.entropy import open_entropy, uniforms
from coterie.privacy.events import Gaussian
from coterie.privacy.files import write_atomically
from coterie.privacy.ledger import Ledger, locked
from coterie.privacy.profiles import gaussian_mu
from coterie.privacy.selection import RunLaw, Selection, renyi
from coterie.privacy.transcript import FolderTranscript
from coterie.rng_keys import derive_key
from coterie.run import execute
from coterie.run_plan import RunPlan
from coterie.trials import Grid, Trial, check_grid, prepare
from coterie.tuning import label

_SCORE_SHARE = 0.5
"""Of a run's mu, spent on its score on top of it: 12 % more mu in all where everyone takes part."""
_PRIVATE = "K, runs that were not chosen and this file are not for who sees the chosen run alone"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a run is scored.

    Attributes:
        noise_multiplier: Of the sum of clients' scores; None for that of half the run's mu.
        bound: The largest error that counts; a public number. Shares of wrong rows are at most 1;
            for mean squared errors it should be a little above what learning nothing comes to.
        rows: Training rows of each client that are held back: a share, or a number.
    """

    noise_multiplier: float | None = None
    bound: float = 1.0
    rows: int | float = 0.25

    def mechanism(self, epsilon: float, delta: float) -> BlockSum:
        """Make what a score is posted through.

        **Guarantee:** a score is one number from 0 to `bound`, so that zeroing or replacing a
        client moves the sum by at most `bound`: one event Gaussian(z, replaced=1);
        `tests/properties/test_selection.py`.
        """
        noise = self.noise_multiplier
        if noise is None:
            noise = 1 / (_SCORE_SHARE * gaussian_mu(epsilon, delta))
        return BlockSum((Block("score", self.bound, 1.0, "single"),), noise)

    def contributions(self, errors: Array) -> Tensor:
        """Return each client's score; 0 where its error is not a number, or it has no rows."""
        kept = self.bound - errors
        kept = np.where(np.isfinite(kept), np.clip(kept, 0, self.bound), 0.0)
        return torch.from_numpy(np.asarray(kept))


@dataclass(frozen=True)
class Offer:
    """What may be drawn, and what it costs; nothing is spent yet.

    Attributes:
        settings: Values by dotted key, of each candidate.
        plans: The complete plan of each.
        refused: Combinations that cannot be run, and why.
        guarantee: What selection among them guarantees, and to whom.
    """

    settings: list[dict[str, Any]]
    plans: list[RunPlan]
    refused: list[Trial]
    guarantee: Selection


@dataclass(frozen=True)
class Progress:
    """How far it is: runs done, K, and the noisy scores so far. Not for who sees one run alone."""

    done: int
    total: int
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Selected:
    """What came out.

    Attributes:
        best: The settings of the chosen run.
        run: Its folder.
        plan: Its complete plan.
        drawn: Which candidates were run, by their number on offer.
        scores: The noisy score of each (larger is better).
        guarantee: Both views: `guarantee.chosen_alone`, `guarantee.of_runs(drawn).epsilon`.
        record: What `selection.json` holds.
    """

    best: dict[str, Any]
    run: Path
    plan: RunPlan
    drawn: tuple[int, ...]
    scores: tuple[float, ...]
    guarantee: Selection
    record: dict[str, Any]


def select(  # noqa: PLR0913 (what decides a selection, named one by one)
    table: Mapping[str, Any],
    grid: Grid,
    *,
    folder: Path,
    runs: float = 10.0,
    eta: float = 1.0,
    seed: int | None = None,
    public: bool = False,
    scoring: Scoring | None = None,
    observe: Callable[[Progress], None] | None = None,
) -> Selected:
    """Choose settings of a plan by private runs; resumable.

    Args:
        table: The run's plan as plain tables; its epsilon is that of each single run.
        grid: Values to try by dotted key; settings are drawn uniformly from all combinations.
        folder: Where runs, scores and `selection.json` are kept.
        runs: How many runs to expect; the number itself is random.
        eta: Shape of its law, see `RunLaw`.
        seed: Makes everything reproducible, and a simulation; by default the plan's
            `simulation_seed`, if it has one.
        public: The user's word that the data is public: the result is labelled so.
        scoring: How runs are scored.
        observe: Shown how far it is, after every run.

    Raises:
        ValueError: If grid, budget or data do not fit.
        FileExistsError: If the folder holds another selection.
    """
    scoring = scoring or Scoring()
    seed = table.get("simulation_seed") if seed is None else seed
    laid = _lay(table, scoring, seed)
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
    with as_interrupt(), locked(folder):
        record = _claim(folder, json.loads(json.dumps(asked)), found, seed)
        scores = _run_all(folder, record, found, held, scoring, observe)
        return _keep(folder, record, found, scores)


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
    """Say what a selection would choose among, and what it would cost; nothing is spent."""
    scoring = scoring or Scoring()
    laid = _lay(table, scoring, table.get("simulation_seed") if seed is None else seed)
    return _offer(laid, grid, RunLaw(runs, eta), scoring, public)[0]


def _lay(table: Mapping[str, Any], scoring: Scoring, seed: int | None) -> dict[str, Any]:
    laid = copy.deepcopy(dict(table))
    laid.pop("charged", None)  # of an earlier selection
    epsilon = laid.get("privacy", {}).get("epsilon")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise ConfigError(
            f"privacy.epsilon = {epsilon}: expected the budget of one run, a positive number; "
            "without a budget there is nothing to charge: leave --charge out"
        )
    if "newcomers" in laid:
        raise ConfigError("newcomers are not held out of a selection: leave newcomers out")
    laid["data"] = {**laid.get("data", {}), "validation": scoring.rows}
    if seed is not None:
        laid["simulation_seed"] = seed
    return laid


def _offer(
    laid: Mapping[str, Any], grid: Grid, law: RunLaw, scoring: Scoring, public: bool
) -> tuple[Offer, FederatedDataset]:
    listed = _check_drawable(grid)
    choice = from_table(DataChoice, laid["data"], "plan.data")
    train, held = choice.split_validation()
    if not held.counts.any():
        raise ConfigError(
            f"data.validation = {scoring.rows}: no client of {train.title} has a row to spare; "
            "hold back more, or fewer test rows"
        )
    trials, found = prepare(laid, listed, train.spec)
    plans = [replace(p, tuned=label(p, public=public, charged=True)) for p in found.values()]
    clients = train.spec.clients
    for plan in plans:
        plan.method.check_data(train)
    first = plans[0].plan()
    who, relation = first.sampler.participation(clients), first.privacy.relation
    candidates = tuple(
        tuple(mechanism.event() for mechanism in plan.plan().mechanisms(clients)) for plan in plans
    )
    for events in set(candidates):
        renyi(events, who, relation)  # refuses what has no bound, before noise is made for it
    assert first.privacy.epsilon is not None
    score = scoring.mechanism(first.privacy.epsilon, first.delta(clients)).event()
    assert isinstance(score, Gaussian)
    guarantee = Selection(
        candidates=candidates,
        score=score,
        law=law,
        participation=who,
        relation=relation,
        delta=first.delta(clients),
        clients=clients,
        simulation=first.simulation_seed is not None,
    )
    settings = [trials[place].settings for place in found]
    refused = [trial for trial in trials if trial.refused is not None]
    return Offer(settings, plans, refused, guarantee), held


def _check_drawable(grid: Grid) -> dict[str, Sequence[Any]]:
    listed = check_grid(grid)
    for key in grid:
        if key.partition(".")[0] in ("sampler", "newcomers"):
            raise ConfigError(
                f"grid {key}: it cannot be chosen privately, since all runs are composed under one "
                "sampling of the same clients; leave it out"
            )
    return listed


def _claim(folder: Path, asked: dict[str, Any], found: Offer, seed: int | None) -> dict[str, Any]:
    """Draw K and all settings, on disk before anything is spent; or read what was drawn."""
    path = folder / "selection.json"
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["asked"] != asked:
            raise FileExistsError(
                f"{folder} holds another selection; go on with the settings it was started with, "
                "or choose another folder"
            )
        return record
    if (folder / "scores").exists():
        raise FileExistsError(
            f"{folder} holds scores of a selection without its selection.json; choose another "
            "folder"
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
    observe: Callable[[Progress], None] | None,
) -> tuple[float, ...]:
    """Make the runs that are still to make, each followed by its score."""
    drawn, seed = record["guarantee"]["drawn"], record["asked"]["seed"]
    board = _open_scores(folder / "scores", record, found, scoring)
    try:
        for number, run in enumerate(record["runs"]):
            if number < board.next:
                continue
            plan = replace(found.plans[drawn[number]], charged=Charged.of(found.guarantee))
            if seed is not None:
                # Runs with the same noise would not be independent, as the bound needs them to be.
                own = derive_key(seed, "selected run", number) >> 2
                plan = replace(plan, simulation_seed=own)
            outcome = execute(plan, folder=folder / run["run"]).outcome
            cohort = plan.sampler.draw(len(held), open_entropy(seed, "score cohort", number))
            _post_score(board, outcome, held, scoring, torch.from_numpy(cohort))
            if observe is not None:
                observe(Progress(number + 1, len(drawn), _read_scores(board)))
        return _read_scores(board)
    finally:
        board.ledger.close()


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
    """Let a cohort score its models on rows held back, and post the noisy sum."""
    errors = evaluate(outcome.plan.method.model, outcome.rows, held).clients
    rows = {"score": scoring.contributions(errors)[ids]}
    board.post([bound(board.mechanism(board.next), rows, ids)[0]] if len(ids) else [])


def _read_scores(board: Billboard) -> tuple[float, ...]:
    return tuple(float(post.value["score"]) / post.cohort for post in board.posts)


def _keep(
    folder: Path, record: dict[str, Any], found: Offer, scores: tuple[float, ...]
) -> Selected:
    drawn = tuple(int(number) for number in record["guarantee"]["drawn"])
    best = int(np.argmax(scores))
    runs = [{**run, "score": score} for run, score in zip(record["runs"], scores, strict=True)]
    record = {**record, "finished": True, "runs": runs, "chosen": runs[best]["run"]}
    _write(folder / "selection.json", record)
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
