"""Errors of the shared model itself, taken as it is, on every client's own test rows.

Beside a client's error alone and that of its own model, they say what the model of one's own is
worth. Not private: for the report, as the other metrics.
"""

import numpy as np
import torch

from coterie.data.federated import FederatedDataset
from coterie.engine.simulate import Outcome
from coterie.methods.base import Method, Shape, per_row_leaves, shared_leaves
from coterie.predictions import BLOCK
from coterie.rng import Rng
from coterie.scores import Array, evaluate
from coterie.tree import Tree, stack

COLUMN = "error_shared"


def shared_errors(
    outcome: Outcome, train: FederatedDataset, test: FederatedDataset
) -> dict[str, Array]:
    """Return clients' own errors under the shared model, as a further column of the metrics.

    Nothing where the method shares no whole model, or where clients' models are that model.
    """
    method = outcome.plan.method
    if not _has_whole(method, train) or _is_theirs(outcome, train):
        return {}

    def models(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tree:
        return _stacked(outcome, train, ids)

    return {COLUMN: evaluate(method.model, models, test).clients}


def _has_whole(method: Method, train: FederatedDataset) -> bool:
    if method.shape is not Shape.SUM:
        return False
    first = method.init(train.spec, Rng.seeded(0))
    if per_row_leaves(method.init_client_state(first, train.spec, 1)):
        return False
    return set(shared_leaves(method, train.spec)) == set(_first(method, train))


def _is_theirs(outcome: Outcome, train: FederatedDataset) -> bool:
    """Return whether every client's model is the shared one."""
    everyone = np.arange(len(train), dtype=np.int64)
    for start in range(0, len(everyone), BLOCK):
        ids = everyone[start : start + BLOCK]
        own, shared = outcome.rows(ids), _stacked(outcome, train, ids)
        if not all(torch.equal(own[name].cpu(), leaf.cpu()) for name, leaf in shared.items()):
            return False
    return True


def _stacked(
    outcome: Outcome, train: FederatedDataset, ids: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Tree:
    """Return the shared model once a client; some methods have one for each group of clients."""
    method, clients = outcome.plan.method, train.clients(ids)
    shared, first = method.serving.shared_model(outcome.shared, clients), _first(method, train)
    return {
        name: leaf if leaf.dim() > first[name].dim() else stack({name: leaf}, len(clients))[name]
        for name, leaf in shared.items()
    }


def _first(method: Method, train: FederatedDataset) -> Tree:
    return method.model.init(train.spec, Rng.seeded(0))
