"""Data that no method can learn from, refused before anything is spent; and odd rows, found.

Rows are looked at a chunk at a time, so that memory-mapped data is never read whole.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import DataError, FederatedDataset

_NAMED = 5  # clients named in a message
_CHUNK = 1 << 16  # rows looked at together


def refuse_degenerate(data: FederatedDataset) -> None:
    """Refuse a client without rows, rows that are not finite, and targets that never differ.

    A client with one row is fine, and so is a client whose own targets are all alike: targets must
    differ over all clients together. This looks at the rows of everybody, as their owner's check
    before a run; no guarantee covers that it passed.

    Raises:
        DataError: If the data is degenerate; the message says how and what to do.
    """
    _refuse_empty(data)
    _refuse_not_finite(data)
    _refuse_constant(data)


def refuse_labels(data: FederatedDataset) -> None:
    """Refuse binary and multilabel targets other than 0 and 1; other tasks pass.

    Raises:
        DataError: If there is such a target; names its client and row.
    """
    if data.spec.task not in ("binary", "multilabel"):
        return
    for start, targets, _ in _target_chunks(data):
        wrong = np.argwhere((targets != 0) & (targets != 1))
        if len(wrong):
            raise DataError(
                f"{data.title}: {_place(data, start + int(wrong[0][0]))}: found the target "
                f"{targets[tuple(wrong[0])]:g}, expected 0 or 1, since the task is "
                f"{data.spec.task}; correct the row, or name the classes that count as 1 with "
                "positive="
            )


def find_zero_rows(data: FederatedDataset) -> NDArray[np.int64]:
    """Find the rows whose features are all zero, by their flat numbers, in order.

    A linear model without intercept gives such a row the score 0 whatever its weights are, and a
    dual step divides by its squared norm.
    """
    features = data.features
    found = []
    for start in range(0, int(data.offsets[-1]), _CHUNK):
        rows = features[start : start + _CHUNK]
        if isinstance(rows, Tensor):
            zero = ~rows.reshape(len(rows), -1).any(dim=1).cpu().numpy()
        else:
            owner = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
            zero = np.ones(rows.shape[0], dtype=bool)
            zero[owner[rows.data != 0]] = False
        found.append(start + np.flatnonzero(zero))
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def one_class_clients(data: FederatedDataset) -> NDArray[np.int64]:
    """Find the clients whose rows are all of one class; those without rows are not among them.

    Raises:
        DataError: If the task has no classes to compare.
    """
    if data.spec.task not in ("binary", "multiclass"):
        raise DataError(
            f"{data.title}: the task is {data.spec.task}, expected binary or multiclass: its rows "
            "have no class to compare"
        )
    filled = data.counts > 0
    first = np.zeros(len(data))
    first[filled] = data.targets[torch.from_numpy(data.offsets[:-1][filled])].cpu().numpy()
    mixed = np.zeros(len(data), dtype=bool)
    for _, targets, owner in _target_chunks(data):
        mixed[owner[targets != first[owner]]] = True
    return np.flatnonzero(filled & ~mixed)


def _target_chunks(
    data: FederatedDataset,
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """Yield the first row's number, the targets and each row's client of consecutive rows."""
    for start in range(0, len(data.targets), _CHUNK):
        targets = data.targets[start : start + _CHUNK].cpu().numpy().astype(np.float64)
        rows = np.arange(start, start + len(targets))
        yield start, targets, np.searchsorted(data.offsets, rows, side="right") - 1


def _place(data: FederatedDataset, row: int) -> str:
    """Say whose row it is, and which."""
    client = int(np.searchsorted(data.offsets, row, side="right")) - 1
    return f"client {data.names[client]!r}, row {row - int(data.offsets[client])} (from 0)"


def _refuse_empty(data: FederatedDataset) -> None:
    empty = np.flatnonzero(data.counts == 0)
    if not len(empty):
        return
    named = ", ".join(repr(data.names[client]) for client in empty[:_NAMED].tolist())
    more = f" and {len(empty) - _NAMED} others" if len(empty) > _NAMED else ""
    raise DataError(
        f"{data.title}: {len(empty)} of {len(data)} clients have no rows ({named}{more}), expected "
        "at least 1 of each; leave these clients out, or hold out fewer rows for testing"
    )


def _refuse_not_finite(data: FederatedDataset) -> None:
    row = _first_not_finite(data)
    if row is None:
        return
    raise DataError(
        f"{data.title}: {_place(data, row)}: found a feature or target that is infinite or not a "
        "number, expected finite numbers; correct the row or drop it"
    )


def _first_not_finite(data: FederatedDataset) -> int | None:
    features, targets = data.features, data.targets
    for start in range(0, len(targets), _CHUNK):
        part = slice(start, start + _CHUNK)
        good = _finite(targets[part])
        if isinstance(features, Tensor):
            good &= _finite(features[part])
        else:
            rows = features[part]
            owner = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
            good[torch.from_numpy(owner[~np.isfinite(rows.data)])] = False
        if not good.all():
            return start + int(torch.argmin(good.int()))
    return None


def _finite(rows: Tensor) -> Tensor:
    found = torch.isfinite(rows)
    return found.reshape(len(rows), -1).all(dim=1)


def _refuse_constant(data: FederatedDataset) -> None:
    targets = data.targets
    if data.spec.task == "multilabel" or not len(targets) or bool((targets != targets[0]).any()):
        return
    if data.spec.task == "regression":
        found, expected = f"every target is {float(targets[0]):g}", "targets that differ"
    else:
        found, expected = f"every row is of class {int(targets[0])}", "rows of at least 2 classes"
    raise DataError(
        f"{data.title}: {found}, over all {len(data)} clients; expected {expected}, since there is "
        "nothing to learn otherwise; check which column is the target"
    )
