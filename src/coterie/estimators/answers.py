"""What models say of rows that come in any order, each answered by its own client's model."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.federated import FederatedDataset
from coterie.engines.outcome import Outcome
from coterie.evaluation.predict import BLOCK, outputs_by_block
from coterie.methods.base import Method, Shape
from coterie.models import Model
from coterie.rng import Rng
from coterie.tree import Tree, take, to

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def common_model(outcome: Outcome, train: FederatedDataset) -> Tree | None:
    """Return the model that all clients share; None where the method has none, or a part of one."""
    method, spec = outcome.plan.method, outcome.spec
    if method.shape is not Shape.SUM or method.has_places:
        return None
    leaves = method.model.init(spec, Rng.seeded(0)).keys()
    if set(method.shared_leaves(spec)) != set(leaves):
        return None
    found = method.shared_model(to(outcome.shared, "cpu"), train.clients(np.arange(1)))
    return {name: found[name] for name in leaves}


def with_model(models: Tree, common: Tree) -> Tree:
    """Put one more model behind stacked ones."""
    return {
        name: torch.cat([leaf, common[name].to(leaf.dtype).reshape(1, *leaf.shape[1:])])
        for name, leaf in models.items()
    }


def outputs(model: Model, models: Tree, data: FederatedDataset, owners: Whole) -> Floats:
    """Return outputs for rows in the order in which they were handed over.

    Args:
        model: What the trees are parameters of.
        models: One for each client of `data`, stacked.
        data: The rows, by client.
        owners: The client of each row as handed over; `data` keeps the order inside a client.
    """
    flat: NDArray[Any] | None = None
    for clients, found in outputs_by_block(
        model, lambda ids: take(models, torch.from_numpy(ids)), data
    ):
        flat = _placed(flat, found.cpu().numpy(), clients, len(owners))
    assert flat is not None
    return _as_given(flat, owners)


def deviations(
    method: Method, shared: Tree, train: FederatedDataset, rows: FederatedDataset, owners: Whole
) -> Floats:
    """Return standard deviations in the order in which rows were handed over; see `outputs`.

    `train` and `rows` are of the same clients under the same numbers.
    """
    flat: NDArray[Any] | None = None
    for clients in rows.blocks(np.flatnonzero(rows.counts > 0), BLOCK):
        trained = train.clients(clients.ids.numpy())
        found = method.uncertainty(shared, trained, clients).cpu().numpy()
        flat = _placed(flat, found, clients, len(owners))
    assert flat is not None
    return _as_given(flat, owners)


def _placed(
    flat: NDArray[Any] | None, padded: NDArray[Any], clients: Any, rows: int
) -> NDArray[Any]:
    """Write the padded answers of a block at the places of its rows."""
    if flat is None:
        flat = np.empty((rows, *padded.shape[2:]))
    mask = clients.mask.cpu().numpy()
    flat[clients.index.numpy()[mask]] = padded[mask]
    return flat


def _as_given(flat: NDArray[Any], owners: Whole) -> Floats:
    found = np.empty_like(flat, dtype=np.float64)
    found[np.argsort(owners, kind="stable")] = flat
    return found
