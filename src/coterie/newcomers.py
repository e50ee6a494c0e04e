"""Clients who are held out of training, and join afterwards: how a run serves those it never saw.

Who is held out is drawn by a public seed from the number of clients alone, before anything is
trained, so it tells nothing of anybody's rows. The guarantee is of the clients that are trained
with. Newcomers take the shared tree, which is public under that guarantee, and fit their own part
to their own rows; they post nothing, so what others can learn of them is epsilon 0. Their scores
are not private, as all scores.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data.federated import DataError, FederatedDataset
from coterie.engine.simulate import Outcome, Speed, simulate
from coterie.finished_models import write_models
from coterie.methods.base import Method
from coterie.methods.local import Local
from coterie.plan import Plan, Privacy
from coterie.rng import Rng
from coterie.scores import Score, evaluate
from coterie.solvers.sgd import SGD
from coterie.summary import json_number, spread_told, write_metrics
from coterie.tree import Tree, take, to

FOLDER = "newcomers"
"""Where a run folder keeps what is theirs."""


def hold_out(
    data: FederatedDataset, newcomers: float | int, seed: int
) -> tuple[FederatedDataset, FederatedDataset]:
    """Hold whole clients out of training: (those to train with, newcomers), each in their order.

    Who it is follows from the seed and the number of clients alone: training rows and test rows of
    the same clients are held out alike.

    Args:
        data: All clients.
        newcomers: A share of the clients (float, rounded to the nearest, at least one), or a number
            of them (int).
        seed: Seed of the draw; public.

    Raises:
        DataError: If nobody would be held out, or nobody would be left to train with.

    >>> from coterie.data.synthetic import synthetic
    >>> training, held = hold_out(synthetic(clients=10).data, 0.2, seed=0)
    >>> len(training), len(held), set(training.names) & set(held.names)
    (8, 2, set())
    """
    total = len(data)
    whole = isinstance(newcomers, int) and not isinstance(newcomers, bool)
    known = 0 < newcomers < 1 or (whole and newcomers >= 1)
    count = 0 if not known else int(newcomers) if whole else max(1, round(newcomers * total))
    if not 0 < count < total:
        raise DataError(
            f"newcomers = {newcomers!r} of {total} clients: expected a share between 0 and 1 or a "
            "number of clients >= 1 that leaves some to train with"
        )
    order = Rng.seeded(seed).at("newcomers").numpy().permutation(total)
    return data.only(np.sort(order[count:])), data.only(np.sort(order[:count]))


@dataclass(frozen=True)
class Newcomers:
    """Clients who joined after training.

    Attributes:
        train: Their training rows, which they fitted their own part to.
        models: A model each, stacked.
        score: On their test rows.
        alone: What they would have alone; None where nobody asked.
    """

    train: FederatedDataset
    models: Tree
    score: Score
    alone: Score | None

    def told(self) -> dict[str, Any]:
        """Return the part of a summary that is about them; strict JSON."""
        alone = self.alone
        better = None if alone is None else json_number(self.score.share_better_than(alone))
        return {
            "clients": len(self.train),
            "metric": self.score.metric,
            "value": json_number(self.score.value),
            "standard_error": json_number(self.score.standard_error),
            "local_value": None if alone is None else json_number(alone.value),
            "share_better_than_local": better,
            "clients_without_test_rows": self.score.spread.left_out,
            **_given(spread_told(self.score)),
            **_given(spread_told(alone, "local_")),
        }

    def keep(self, folder: Path) -> None:
        """Write models, names and metrics into `newcomers/` of a run folder."""
        place = folder / FOLDER
        write_models(place, self.models, self.train.names)
        write_metrics(place / "metrics.parquet", self.train, self.score, self.alone)


def check_newcomers(method: Method, rows: FederatedDataset) -> None:
    """Refuse newcomers' rows before anything is spent: they are fitted to when all of it is.

    Raises:
        DataError: As the method says it of rows that it cannot learn from.
    """
    try:
        method.check(rows.spec, data=rows)
    except DataError as error:
        raise DataError(f"of the clients held out as newcomers: {error}") from error


def attempt_newcomers(
    outcome: Outcome,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    alone: bool = True,
    speed: Speed | None = None,
) -> tuple[Newcomers | None, tuple[str, ...]]:
    """Score newcomers, or say why not; see `score_newcomers`."""
    try:
        return score_newcomers(outcome, train, test, alone=alone, speed=speed), ()
    except Exception as error:  # whatever it is: the run is done and paid for
        return None, (f"newcomers could not be scored ({type(error).__name__}: {error})",)


def score_newcomers(
    outcome: Outcome,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    alone: bool = True,
    speed: Speed | None = None,
) -> Newcomers:
    """Let newcomers join a finished run with their training rows; score them on their test rows.

    Args:
        outcome: The finished run.
        train: What newcomers fit their own part to.
        test: Rows of the same clients, held out.
        alone: Whether to score learning alone beside it.
        speed: The device; block and store do not matter here.

    Raises:
        ValueError: If the method cannot be joined, or the rows are of another kind.
    """
    device = "cpu" if speed is None else speed.device
    moved = replace(outcome, shared=to(outcome.shared, device))
    models = to(moved.onboard(train.to(device)), "cpu")
    method = outcome.plan.method
    score = evaluate(method.model, lambda ids: take(models, torch.from_numpy(ids)), test)
    seed = outcome.plan.simulation_seed
    other = score_alone(method, train, test, seed=seed or 0, speed=speed) if alone else None
    return Newcomers(train, models, score, other)


def score_alone(
    method: Method,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    seed: int = 0,
    speed: Speed | None = None,
) -> Score:
    """Score learning alone, in the method's own terms or with the same model and step size."""
    alone = method.baselines().local
    if alone is None:
        # Finetuning has steps of its own; what is trained with is its base's.
        steps = getattr(getattr(method, "base", method), "sgd", SGD())
        usual = Local(model=method.model)
        alone = replace(usual, sgd=replace(steps, epochs=usual.sgd.epochs, steps=None))
    privacy = Privacy(epsilon=math.inf)
    plan = Plan(method=alone, privacy=privacy, rounds=1, simulation_seed=seed)
    return evaluate(alone.model, simulate(plan, train, speed=speed).rows, test)


def _given(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if value is not None}
