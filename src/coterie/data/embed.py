"""Rows turned into features by a frozen public map, inside each client.

The map (a network trained on public or rendered data, say) is public and fixed, so this is a
client's own preparation of its own rows, like declared scaling: nothing is posted and nothing is
spent. A row's features depend on that row alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.data.federated import DataError, FederatedDataset


def embed(
    data: FederatedDataset, features: Callable[[Tensor], Tensor], *, block: int = 64
) -> FederatedDataset:
    """Replace every row by its features.

    Rows are handed to the map client by client, always `block` at a time, the last of a client's
    filled up with zeros: so what it gives a row has nothing to do with how many rows anyone has.

    Args:
        data: Dense or sparse rows, on any device.
        features: A function or `torch.nn.Module` from rows (n, *shape), float32, to features
            (n, d). A module is used as in evaluation (no dropout, running statistics) and must be
            on the device of the rows.
        block: Rows at a time.

    Returns:
        The same clients with rows of d numbers.

    Raises:
        DataError: If the map does not give d finite numbers for each row.
    """
    if block < 1:
        raise DataError(f"block = {block}: expected at least 1 row at a time")
    with _frozen(features):
        empty = torch.zeros((block, *data.spec.shape), device=data.targets.device)
        width = _mapped(features, empty, None, data).shape[1]
        rows = torch.empty((int(data.offsets[-1]), width), device=data.targets.device)
        for start, stop in _chunks(data.offsets, block):
            whole = empty.clone()
            whole[: stop - start] = _rows(data, start, stop)
            rows[start:stop] = _mapped(features, whole, width, data)[: stop - start]
    if not bool(rows.isfinite().all()):
        row = int((~rows.isfinite().all(dim=1)).nonzero()[0])
        raise DataError(
            f"{data.title}: the features of row {row} hold a NaN or an infinity; check that row, "
            "and the range of rows that the map was made for"
        )
    name = getattr(features, "__name__", type(features).__name__)
    note = f"rows of shape {data.spec.shape} turned into {width} features by {name}"
    spec = replace(data.spec, shape=(width,))
    notes = (*data.notes, note)
    return replace(data, spec=spec, features=rows, mapped=None, notes=notes, columns=())


@contextmanager
def _frozen(features: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module predict without dropout, and leave it as it was."""
    module = features if isinstance(features, nn.Module) else nn.Module()
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before.items():
            part.training = training


def _chunks(offsets: NDArray[np.int64], block: int) -> Iterator[tuple[int, int]]:
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for start in range(begin, end, block):
            yield start, min(start + block, end)


def _rows(data: FederatedDataset, start: int, stop: int) -> Tensor:
    if isinstance(data.features, Tensor):
        return data.features[start:stop]
    return torch.from_numpy(data.features[start:stop].toarray())


def _mapped(
    features: Callable[[Tensor], Tensor], rows: Tensor, width: int | None, data: FederatedDataset
) -> Tensor:
    found = features(rows)
    fits = isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(rows)
    if not fits or found.shape[1] != (width or found.shape[1]) or found.shape[1] < 1:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(
            f"{data.title}: for rows of shape {tuple(rows.shape)} the map gave {shape}; expected "
            f"({len(rows)}, features): one vector for each row, always of the same length"
        )
    return found.float()
