"""Predictions of every client's own model for that client's rows. Not private.

Scale rows as the training rows: by the same constants, with the same clients in the same order. The
result has one array per client, since clients have different numbers of rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Clients, FederatedDataset, Task
from coterie.engine.simulate import Outcome
from coterie.methods.base import Method, predictive_std
from coterie.models import Model

Models = Callable[[NDArray[np.int64]], Tree]

BLOCK = 1024  # clients per batch
MOST_VALUES = 1 << 23  # of matrices that are kept with the models: 64 MiB


def decision_function(outcome: Outcome, data: FederatedDataset) -> list[NDArray[np.floating[Any]]]:
    """Return the outputs of every client's model on its own rows of `data`.

    Returns:
        One array per client, in their order: (rows,) for regression and binary tasks (class 1
        where positive), (rows, outputs) for others. A client without rows has an empty one.

    Raises:
        ValueError: If `data` is not of the shape, task and number of clients of the run.
    """
    return _by_client(outcome, data, lambda outputs: outputs)


Predictions = list[NDArray[Any]]


@overload
def predict(outcome: Outcome, data: FederatedDataset) -> Predictions: ...


@overload
def predict(
    outcome: Outcome, data: FederatedDataset, *, return_std: bool, train: FederatedDataset
) -> tuple[Predictions, Predictions]: ...


def predict(
    outcome: Outcome,
    data: FederatedDataset,
    *,
    return_std: bool = False,
    train: FederatedDataset | None = None,
) -> Predictions | tuple[Predictions, Predictions]:
    """Return the predictions of every client's model for its own rows of `data`.

    Args:
        outcome: A finished run.
        data: Rows of its clients, in their order.
        return_std: Also return the standard deviation of each prediction, for methods that have one
            (pfeb): of an outcome, residual noise included, or of the output of
            `decision_function`. About 90 % of outcomes lie in prediction +- 1.645 std.
        train: The training rows, from which a client's uncertainty follows; required by
            `return_std`.

    Returns:
        One array per client, in their order: values (regression), classes numbered from 0 (binary:
        0 or 1), or a 0 or 1 for each label, (rows, labels). A client without rows has an empty one.
        With `return_std` two such lists, the second of standard deviations.

    Raises:
        ValueError: If rows are not of the shape, task and number of clients of the run, or
            `return_std` is given without the training rows.
        NotImplementedError: If the method has no standard deviations.
    """
    found = _by_client(outcome, data, lambda outputs: decide(data.spec.task, outputs))
    if not return_std:
        return found
    if train is None or train.spec != outcome.spec:
        raise ValueError(
            "return_std = True needs the training rows, from which a client's uncertainty follows: "
            f"give train = data of {outcome.spec}"
        )
    return found, _deviations(outcome, data, train)


def outputs_by_block(
    model: Model, models: Models, data: FederatedDataset, block: int = BLOCK
) -> Iterator[tuple[Clients, Tensor]]:
    """Return clients with rows in blocks, and the outputs of their models on the padded rows."""
    for clients in data.blocks(np.flatnonzero(data.counts > 0), block):
        yield clients, outputs_of(model, models(clients.ids.numpy()), clients)


def outputs_of(model: Model, params: Tree, clients: Clients) -> Tensor:
    """Return the outputs of stacked models on padded rows: (c, longest[, outputs])."""
    with torch.no_grad():
        moved = {name: leaf.to(clients.device) for name, leaf in params.items()}
        outputs = model.apply_stacked(moved, clients.x)
    # A model drops the axis of a single output; a single label keeps it.
    single = clients.spec.task == "multilabel" and outputs.dim() == 2
    return outputs[..., None] if single else outputs


def decide(task: Task, outputs: Tensor) -> Tensor:
    """Return predictions from outputs: values, class numbers, or 0 and 1 for each label."""
    if task == "regression":
        return outputs
    return outputs.argmax(dim=-1) if task == "multiclass" else (outputs > 0).long()


def wrong_predictions(outputs: Tensor, clients: Clients) -> Tensor:
    """Return which predictions for padded rows are wrong: (c, longest[, labels]).

    A prediction from an output that is not a number is wrong. Not for regression.
    """
    task = clients.spec.task
    broken = outputs.isnan()
    if task == "multiclass":
        broken = broken.any(dim=-1)
    return (decide(task, outputs) != labels_of(clients)) | broken


def labels_of(clients: Clients) -> Tensor:
    """Return the classes of padded rows: numbers, or 0 and 1 (for each label)."""
    return clients.y if clients.spec.task == "multiclass" else (clients.y > 0.5).long()


def _deviations(outcome: Outcome, data: FederatedDataset, train: FederatedDataset) -> Predictions:
    method, found = outcome.plan.method, dict[int, NDArray[Any]]()
    for rows in data.blocks(np.flatnonzero(data.counts > 0), BLOCK):
        clients = train.clients(rows.ids.numpy())
        wide = predictive_std(method, outcome.shared, clients, rows).cpu().numpy()
        for client, count, one in zip(rows.ids, rows.counts, wide, strict=True):
            found[int(client)] = one[: int(count)].copy()
    width = () if data.spec.task in ("regression", "binary") else (data.spec.outputs,)
    return [found.get(client, np.empty((0, *width))) for client in range(len(data))]


def variances(method: Method, shared: Tree, train: FederatedDataset) -> dict[str, NDArray[Any]]:
    """Return what standard deviations of predictions need, {"variance": (clients, p + 1, p + 1)}.

    Of several outputs each has a matrix: (clients, outputs, p + 1, p + 1). {} where it is not
    known, or where it is large: then the training rows are needed. It follows from each client's
    own rows and the releases, and is as private as its model.
    """
    found, width, outputs = method.serving.variance, train.spec.features + 1, train.spec.outputs
    if found is None or len(train) * outputs * width**2 > MOST_VALUES:
        return {}
    shape = (width, width) if outputs == 1 else (outputs, width, width)
    matrices = np.zeros((len(train), *shape))
    for clients in train.blocks(np.arange(len(train)), BLOCK):
        matrices[clients.ids.numpy()] = found(shared, clients).cpu().numpy()
    return {"variance": matrices}


def std_by(data: FederatedDataset, matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviations of all rows, by the `variances` of each client."""
    found = np.empty((len(data.targets), *matrices.shape[1:-2]))
    for client, matrix in enumerate(matrices):
        rows = slice(data.offsets[client], data.offsets[client + 1])
        part: Any = data.features[rows]
        x = part.toarray() if data.is_sparse else part.flatten(1).cpu().double().numpy()
        wide = np.column_stack([x, np.ones(len(x))])
        found[rows] = np.sqrt(np.moveaxis(((wide @ matrix) * wide).sum(axis=-1), -1, 0))
    return found


def _by_client(
    outcome: Outcome, data: FederatedDataset, turn: Callable[[Tensor], Tensor]
) -> list[NDArray[Any]]:
    if data.spec != outcome.spec:
        raise ValueError(
            f"{data.title} is {data.spec}, but the models were made for {outcome.spec}: give rows "
            "of the same clients, in the same order and of the same shape"
        )
    model, found = outcome.plan.method.model, dict[int, NDArray[Any]]()
    for clients, outputs in outputs_by_block(model, outcome.rows, data):
        padded = turn(outputs).cpu().numpy()
        for client, count, rows in zip(clients.ids, clients.counts, padded, strict=True):
            found[int(client)] = rows[: int(count)].copy()  # else the block's padding lives on
    # No client may have rows: the type and shape of an empty result come from a row of zeros.
    width = () if data.spec.task in ("regression", "binary") else (data.spec.outputs,)
    empty = turn(torch.zeros(1, *width))[:0].numpy()
    return [found.get(client, empty) for client in range(len(data))]
