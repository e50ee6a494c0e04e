"""Held-out clients: clients that are left out of training and onboarded afterwards.

A public seed draws them from the number of clients alone, before training, so the draw reveals
nothing about rows. The guarantee covers the clients that take part in training. Held-out clients
take the shared parameters and fit their own part to their own rows; they release nothing, so
epsilon is 0 for them. Their scores are not private.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.rng import Rng
from coterie.core.tree import Tree, take, to
from coterie.data.federated import DataError, FederatedDataset
from coterie.engine.models import write_models
from coterie.engine.simulate import Outcome
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score, distribution_json, json_number, write_metrics
from coterie.evaluation.predict import variances
from coterie.evaluation.score import evaluate
from coterie.methods.base import Method
from coterie.planning.plan import Speed

FOLDER = "newcomers"
"""Part of a run folder with the models and metrics of held-out clients."""


def hold_out(
    data: FederatedDataset, clients: float | int, seed: int
) -> tuple[FederatedDataset, FederatedDataset]:
    """Return the clients to train with and the held-out clients, each in their order.

    The draw depends on the seed and the number of clients alone, so that training rows and test
    rows of the same clients are held out alike. `clients` is a share (float, rounded to the
    nearest, at least one client) or a number (int); the seed is public.

    Raises:
        DataError: If no client would be held out, or none would remain.

    >>> from coterie.data.synthetic import synthetic
    >>> training, held = hold_out(synthetic(clients=10).data, 0.2, seed=0)
    >>> len(training), len(held), set(training.names) & set(held.names)
    (8, 2, set())
    """
    total = len(data)
    whole = isinstance(clients, int) and not isinstance(clients, bool)
    known = 0 < clients < 1 or (whole and clients >= 1)
    count = 0 if not known else int(clients) if whole else max(1, round(clients * total))
    if not 0 < count < total:
        raise DataError(
            f"held-out clients = {clients!r} of {total}: expected a share between 0 and 1 or a "
            "number of clients >= 1 that leaves some to train with"
        )
    order = Rng.seeded(seed).at("newcomers").numpy().permutation(total)
    return data.only(np.sort(order[count:])), data.only(np.sort(order[:count]))


@dataclass(frozen=True)
class HeldOut:
    """Held-out clients after onboarding: their stacked models, and scores on their test rows."""

    train: FederatedDataset
    models: Tree
    score: Score
    local: Score | None
    scaling: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the part of a summary on held-out clients as strict JSON."""
        local = self.local
        better = None if local is None else json_number(self.score.share_better_than(local))
        return {
            "clients": len(self.train),
            "metric": self.score.metric,
            "value": json_number(self.score.value),
            "standard_error": json_number(self.score.standard_error),
            "local_value": None if local is None else json_number(local.value),
            "share_better_than_local": better,
            "clients_without_test_rows": self.score.distribution.left_out,
            **_known(distribution_json(self.score)),
            **_known(distribution_json(local, "local_")),
        }

    def keep(self, folder: Path) -> None:
        """Write models, names and metrics into their part of a run folder."""
        place = folder / FOLDER
        write_models(place, self.models, self.train.names, self.scaling)
        write_metrics(place / "metrics.parquet", self.train, self.score, self.local)


def check_held_out(method: Method, rows: FederatedDataset) -> None:
    """Raise a DataError for rows of held-out clients that the method cannot use."""
    try:
        method.check(rows.spec, data=rows)
    except DataError as error:
        raise DataError(f"held-out clients: {error}") from error


def try_held_out(
    outcome: Outcome,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    local: bool = True,
    speed: Speed | None = None,
) -> tuple[HeldOut | None, tuple[str, ...]]:
    """Return `score_held_out`, or a notice of why it failed: the run is done and paid for."""
    try:
        return score_held_out(outcome, train, test, local=local, speed=speed), ()
    except Exception as error:  # the run is done and paid for
        return None, (f"held-out clients could not be scored ({type(error).__name__}: {error})",)


def score_held_out(
    outcome: Outcome,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    local: bool = True,
    speed: Speed | None = None,
) -> HeldOut:
    """Onboard held-out clients with their training rows, and score them on their test rows.

    Of `speed` only the device has an effect.

    Raises:
        ValueError: If the method cannot onboard clients, or the rows have another shape or task.
    """
    device = "cpu" if speed is None else speed.device
    moved = replace(outcome, shared=to(outcome.shared, device))
    models = to(moved.onboard(train.to(device)), "cpu")
    method = outcome.plan.method
    score = evaluate(method.model, lambda ids: take(models, torch.from_numpy(ids)), test)
    seed = outcome.plan.simulation_seed or 0
    other = score_local(method, train, test, seed=seed, speed=speed) if local else None
    kept = {**train.scaling, **variances(method, outcome.shared, train)}
    return HeldOut(train, models, score, other, kept)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
