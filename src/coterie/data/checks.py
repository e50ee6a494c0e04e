"""Data that no method can learn from, refused before anything is spent."""

import numpy as np
import torch
from torch import Tensor

from coterie.data.federated import DataError, FederatedDataset

_NAMED = 5  # clients named in a message
_CHUNK = 1 << 16  # rows looked at together, so that memory-mapped data is never read whole


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
    client = int(np.searchsorted(data.offsets, row, side="right")) - 1
    raise DataError(
        f"{data.title}: client {data.names[client]!r}, row {row - int(data.offsets[client])} (from "
        "0): found a feature or target that is infinite or not a number, expected finite numbers; "
        "correct the row or drop it"
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
