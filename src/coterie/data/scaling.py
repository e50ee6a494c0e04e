"""Scaling that tells nobody about anybody: inside each client, or by constants declared beforehand.

Means and deviations over the rows of all clients would be a release without noise. Hence two ways
only: `standardise_clients` uses a client's own training rows for that client alone, and
`apply_constants` uses numbers that were public before the rows were read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from torch import Tensor

from coterie.data.contract import LIMIT, cut_note
from coterie.data.federated import DataError, Features, FederatedDataset

Moments = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Means and deviations, (clients, features) each."""
_BLOCK = 1 << 23  # numbers worked on at a time, in float64
_BY_OWN = f"by each client's own training rows, cut at +-{LIMIT:g}"


@dataclass(frozen=True)
class _Cells:
    """Scales of the (client, column) cells that hold a stored number, by sorted cell number."""

    cells: NDArray[np.int64]
    scale: NDArray[np.float64]


def standardise_clients(
    train: FederatedDataset, test: FederatedDataset | None = None
) -> tuple[FederatedDataset, FederatedDataset | None]:
    """Centre and scale the features of each client by the client's own training rows.

    Scales are population standard deviations (division by the number of rows). A column that does
    not vary inside a client's training rows tells that client nothing, and has no unit there: it
    is 0 in all rows of the client, test rows too, sparse or dense. So is every column of a client
    with one training row, or none. Sparse features are divided by the same deviations, implied
    zeros counted, but not centred, since that would fill them.

    What is scaled is cut at +-15, the limit of the scaling contract, a public number: a column that
    hardly varies in training may be anything later. Training rows lie within sqrt(rows) by
    themselves where they are centred.

    Args:
        train: The training rows, from which the constants are taken.
        test: Rows of the same clients, scaled by the constants of their client's training rows.

    Raises:
        DataError: If `test` has other clients or other columns than `train`.
    """
    if test is not None and (
        test.spec.shape != train.spec.shape
        or test.is_sparse != train.is_sparse
        or test.names != train.names
    ):
        raise DataError(
            f"{train.title}: training and test rows do not belong together ({len(train)} and "
            f"{len(test)} clients, rows of shape {train.spec.shape} and {test.spec.shape}, sparse "
            f"{train.is_sparse} and {test.is_sparse}); split one dataset"
        )
    if train.is_sparse:
        cells = _sparse_cells(train)
        note = f"features scaled (not centred: sparse) {_BY_OWN}"
        return (
            _noted(train, _scale_cells(train, cells), note),
            None if test is None else _noted(test, _scale_cells(test, cells), note),
        )
    center, scale = _dense_moments(train)
    note = f"features centred and scaled {_BY_OWN}"
    return (
        _noted(train, _scale_rows(train, center, scale), note),
        None if test is None else _noted(test, _scale_rows(test, center, scale), note),
    )


def client_moments(train: FederatedDataset) -> Moments:
    """Return what `standardise_clients` centres and scales by, (clients, features) each.

    A row of them is its client's own data, and no one else's. A column that does not vary inside a
    client has an infinite scale; sparse rows have centers of 0.
    """
    if not train.is_sparse:
        return _dense_moments(train)
    known = _sparse_cells(train)
    scale = np.full((len(train), train.spec.features), np.inf)
    scale.reshape(-1)[known.cells] = known.scale
    return np.zeros_like(scale), scale


def scale_by(
    data: FederatedDataset, center: NDArray[np.float64], scale: NDArray[np.float64]
) -> FederatedDataset:
    """Scale each client's rows by its row of `client_moments`, as `standardise_clients` does."""
    if not data.is_sparse:
        return replace(data, features=_scale_rows(data, center, scale))
    assert not isinstance(data.features, torch.Tensor)
    owner = np.repeat(np.arange(len(data)), np.diff(data.features.indptr[data.offsets]))
    scaled = _with_values(data, _bounded(data.features.data, scale[owner, data.features.indices]))
    scaled.eliminate_zeros()
    return replace(data, features=scaled)


def apply_constants(
    data: FederatedDataset,
    center: ArrayLike,
    scale: ArrayLike,
    *,
    clip: float | None = None,
    target_center: float = 0.0,
    target_scale: float = 1.0,
) -> FederatedDataset:
    """Scale features to (x - center) / scale, cut at +-clip, and targets likewise, uncut.

    The constants have to be public: declared without a look at the rows.

    Args:
        data: The rows to scale.
        center: One number, or one for each number of a row; zero for sparse features.
        scale: One positive number, or one for each number of a row.
        clip: The largest absolute value left in the scaled features.
        target_center: Subtracted from targets; regression only.
        target_scale: Divides targets; regression only.

    Raises:
        DataError: If a constant cannot be applied to this data.
    """
    centers, scales = _constants(data, center, scale, clip)
    if data.spec.task != "regression" and (target_center, target_scale) != (0.0, 1.0):
        raise DataError(f"{data.title}: {data.spec.task} targets are labels and cannot be scaled")
    if not (np.isfinite(target_center) and np.isfinite(target_scale) and target_scale > 0):
        raise DataError(
            f"target_center = {target_center}, target_scale = {target_scale}: expected a number "
            "and a positive number"
        )
    features, notes = _cut(replace(data, features=_divided(data, centers, scales)), clip)
    cut = "" if clip is None else f", cut at +-{clip:g}"
    note = f"features scaled by declared constants{cut}"
    if data.spec.task == "regression" and (target_center, target_scale) != (0.0, 1.0):
        note += f"; target (y - {target_center:g}) / {target_scale:g}"
    targets = data.targets
    if data.spec.task == "regression":
        targets = ((targets.double() - target_center) / target_scale).float()
    return replace(data, features=features, targets=targets, notes=(*data.notes, note, *notes))


def _divided(
    data: FederatedDataset, centers: NDArray[np.float64], scales: NDArray[np.float64]
) -> Features:
    with np.errstate(over="ignore"):  # what is too large for float32 is infinite until it is cut
        if not isinstance(data.features, torch.Tensor):
            return _with_values(data, data.features.data / scales[data.features.indices])
        out = np.empty(_flat(data).shape, dtype=np.float32)
        for rows in _row_blocks(data):
            out[rows] = (_flat(data)[rows] - centers) / scales
    return _like(data, out)


def _cut(scaled: FederatedDataset, clip: float | None) -> tuple[Features, tuple[str, ...]]:
    """Cut features at +-clip in place, and say where that takes many of a client's rows."""
    features = scaled.features
    if clip is None:
        return features, ()
    note = cut_note(scaled, clip)
    if isinstance(features, torch.Tensor):
        features.clamp_(-clip, clip)
    else:
        np.clip(features.data, -clip, clip, out=features.data)
    return features, () if note is None else (note,)


def _constants(
    data: FederatedDataset, center: ArrayLike, scale: ArrayLike, clip: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    try:
        centers, scales = (
            np.broadcast_to(np.asarray(given, dtype=np.float64), data.spec.shape).reshape(-1)
            for given in (center, scale)
        )
    except ValueError as error:
        raise DataError(
            f"{data.title}: center of shape {np.shape(center)} and scale of shape "
            f"{np.shape(scale)} do not fit rows of shape {data.spec.shape}"
        ) from error
    if not (np.isfinite(centers).all() and np.isfinite(scales).all() and (scales > 0).all()):
        raise DataError(f"{data.title}: centers have to be finite, scales finite and positive")
    if data.is_sparse and centers.any():
        raise DataError(f"{data.title}: sparse features cannot be centred; give center = 0")
    if clip is not None and not clip > 0:
        raise DataError(f"clip = {clip}: expected a positive number, or None for no cut")
    return centers, scales


def _noted(data: FederatedDataset, features: Features, note: str) -> FederatedDataset:
    return replace(data, features=features, notes=(*data.notes, note))


def _flat(data: FederatedDataset) -> NDArray[np.float32]:
    assert isinstance(data.features, torch.Tensor)
    flat: NDArray[np.float32] = data.features.detach().cpu().reshape(-1, data.spec.features).numpy()
    return flat


def _like(data: FederatedDataset, flat: NDArray[np.float32]) -> torch.Tensor:
    assert isinstance(data.features, torch.Tensor)
    return torch.from_numpy(flat).reshape(data.features.shape).to(data.features.device)


def _row_blocks(data: FederatedDataset) -> Iterator[slice]:
    rows, step = int(data.offsets[-1]), max(1, _BLOCK // data.spec.features)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _dense_moments(
    train: FederatedDataset,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Find each client's column means and deviations, shape (clients, features) each.

    Columns that do not vary have an infinite scale, and so become 0.
    """
    flat = _flat(train)
    center = np.zeros((len(train), train.spec.features))
    scale = np.full_like(center, np.inf)
    # `reduceat` answers an empty range with the row after it: only clients with rows take part.
    held = np.flatnonzero(train.counts)
    for ids in _client_blocks(train, held):
        counts = train.counts[ids]
        first, last = train.offsets[ids[0]], train.offsets[ids[-1] + 1]
        rows = flat[first:last].astype(np.float64)
        starts = train.offsets[ids] - first
        center[ids] = np.add.reduceat(rows, starts, axis=0) / counts[:, None]
        rows -= np.repeat(center[ids], counts, axis=0)
        np.square(rows, out=rows)
        deviation = np.sqrt(np.add.reduceat(rows, starts, axis=0) / counts[:, None])
        scale[ids] = _infinite_if_zero(deviation)
    return center, scale


def _infinite_if_zero(deviation: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(deviation == 0, np.inf, deviation)


def _client_blocks(data: FederatedDataset, held: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    step = max(1, _BLOCK // data.spec.features)
    block = data.offsets[held] // step
    yield from (ids for ids in np.split(held, np.flatnonzero(np.diff(block)) + 1) if len(ids))


def _scale_rows(
    data: FederatedDataset, center: NDArray[np.float64], scale: NDArray[np.float64]
) -> torch.Tensor:
    flat = _flat(data)
    owner = np.repeat(np.arange(len(data)), data.counts)
    out = np.empty(flat.shape, dtype=np.float32)
    for rows in _row_blocks(data):
        apart = flat[rows] - center[owner[rows]]
        out[rows] = _bounded(apart, scale[owner[rows]])
    return _like(data, out)


def _bounded(values: NDArray[np.floating], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # what is too large is infinite until it is cut
        return np.clip(values / scale, -LIMIT, LIMIT)


def _cell_numbers(data: FederatedDataset) -> NDArray[np.int64]:
    """Number the (client, column) cell of every stored entry."""
    assert not isinstance(data.features, torch.Tensor)
    stored = np.diff(data.features.indptr[data.offsets])
    owner = np.repeat(np.arange(len(data), dtype=np.int64), stored)
    cells: NDArray[np.int64] = owner * data.spec.features + data.features.indices
    return cells


def _sparse_cells(train: FederatedDataset) -> _Cells:
    assert not isinstance(train.features, torch.Tensor)
    cells, inverse = np.unique(_cell_numbers(train), return_inverse=True)
    values = train.features.data.astype(np.float64)
    counts = train.counts[cells // train.spec.features]
    mean = np.bincount(inverse, weights=values, minlength=len(cells)) / np.maximum(counts, 1)
    stored = np.bincount(inverse, minlength=len(cells))
    square = np.bincount(inverse, weights=(values - mean[inverse]) ** 2, minlength=len(cells))
    # Entries that are not stored are zeros, each mean^2 away from the mean.
    deviation = np.sqrt((square + (counts - stored) * mean**2) / np.maximum(counts, 1))
    return _Cells(cells, _infinite_if_zero(deviation))


def _scale_cells(data: FederatedDataset, known: _Cells) -> sparse.csr_matrix:
    assert not isinstance(data.features, torch.Tensor)
    wanted = _cell_numbers(data)
    place = np.searchsorted(known.cells, wanted)
    # A cell without an entry in training does not vary there.
    padded = np.append(known.cells, -1)
    scale = np.where(padded[place] == wanted, np.append(known.scale, np.inf)[place], np.inf)
    scaled = _with_values(data, _bounded(data.features.data, scale))
    scaled.eliminate_zeros()
    return scaled


def _with_values(data: FederatedDataset, values: NDArray[np.floating]) -> sparse.csr_matrix:
    assert not isinstance(data.features, torch.Tensor)
    parts: Sequence[object] = (
        values.astype(np.float32),
        data.features.indices.copy(),
        data.features.indptr.copy(),
    )
    return sparse.csr_matrix(parts, shape=data.features.shape)


def scaling_hint(data: FederatedDataset, clients: int = 200) -> str | None:
    """Say if rows look unscaled, from the first clients; for the data's owner, not private.

    Learning rates and clips are made for features and targets of about unit size.
    """
    rows = int(data.offsets[min(clients, len(data))])
    if rows == 0 or not isinstance(data.features, Tensor):
        return None
    sizes = data.features[:rows].flatten(1).double().square().mean(dim=0).sqrt()
    target = float(data.targets[:rows].double().square().mean().sqrt())
    off = []
    if float(sizes.max()) > 10:
        off.append(f"some features are of size {float(sizes.max()):.3g}")
    if 0 < float(sizes.max()) < 0.1:
        off.append(f"all features are below {float(sizes.max()):.3g}")
    if data.spec.task == "regression" and (target > 10 or 0 < target < 0.1):
        off.append(f"targets are of size {target:.3g}")
    if not off:
        return None
    return (
        f"{data.title}: {' and '.join(off)}; learning rates and clips are made for size 1: scale "
        "by public constants (data.source.center and data.source.scale), or features by "
        "--standardise client"
    )
