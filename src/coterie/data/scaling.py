"""Scaling, the scaling contract, and checks of rows before a run.

Means and standard deviations over the rows of all clients would be a release without noise. So
there are two ways to scale: `standardise_clients` scales each client by its own training rows
only, and `apply_constants` uses constants that were public before the rows were read. `embed` maps
rows to features with a public function, inside each client.

The scaling contract: clips, priors and noise are made for features and targets of about unit size.
A column in other units (an age in years, a score out of 70) is cut by the clip in every round, so
that only its direction remains. `refuse_unscaled` refuses it and states the remedy. The check runs
inside each client: it depends on that client's own rows only, and releases nothing.

Rows are read a chunk at a time, so that memory-mapped data is never read at once.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from torch import Tensor, nn

from coterie.data.federated import Clients, DataError, Features, FederatedDataset

LIMIT = 15.0
_KEPT = 1 << 27  # values of moments of sparse rows that are kept with the data
"""Features beyond this are in another unit. Below it, coefficients are at least 1/15 of the usual
size, which learnt priors can follow; a few clients may lie ten standard deviations out."""
TARGET_LIMIT = 6.0
"""Targets that lie beyond this on one side are in another unit: their mean would have to be learnt
in clipped steps. Noise around zero is not a unit, so it is compared with `LIMIT`."""
Moments = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Means and standard deviations, (clients, features) each."""
_SHARE = 0.05
_MORE = 2
_MOST, _MOST_TARGETS = 1 / 2, 2 / 3
_FAR = 2.0
_SMALL = 10.0
_BLOCK = 1 << 22  # values processed together
_CHUNK = 1 << 16  # rows processed together
_NAMED = 3  # clients and columns listed in a message
_NAMED_EMPTY = 5  # clients without rows listed in a message
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")  # names that a flag takes unquoted

Integers = NDArray[np.int64]


def standardise_clients(
    train: FederatedDataset, test: FederatedDataset | None = None
) -> tuple[FederatedDataset, FederatedDataset | None]:
    """Centre and scale the features of each client by its own training rows.

    Scales are population standard deviations (division by the number of rows). A column that is
    constant in a client's training rows becomes 0 in all rows of the client, test rows too. So does
    every column of a client with at most one training row. Sparse features are divided by the same
    standard deviations, implied zeros counted, but not centred, since that would fill them.

    Scaled features are cut at +-15, the public limit of the scaling contract, since a column that
    hardly varies in training may have any value later. `test` are rows of the same clients, scaled
    by the constants of their client's training rows.

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
    known = _sparse_cells(train) if train.is_sparse else _dense_moments(train)
    scale: Callable[..., Features] = _scale_cells if train.is_sparse else _scale_rows
    how = "scaled (not centred: sparse)" if train.is_sparse else "centred and scaled"
    note = f"features {how} by each client's own training rows, cut at +-{LIMIT:g}"

    kept = dict(train.scaling)
    if not train.is_sparse:
        kept |= {"center": known[0], "scale": known[1]}
    elif len(train) * train.spec.features <= _KEPT:
        kept |= zip(("center", "scale"), client_moments(train), strict=True)

    def scaled(data: FederatedDataset) -> FederatedDataset:
        notes = (*data.notes, note)
        return replace(data, features=scale(data, *known), notes=notes, scaling=kept)

    return scaled(train), None if test is None else scaled(test)


def client_moments(train: FederatedDataset) -> Moments:
    """Return the centers and scales of `standardise_clients`, (clients, features) each.

    Row k depends on the rows of client k only. A column that is constant inside a client has an
    infinite scale; sparse rows have centers of 0.
    """
    if not train.is_sparse:
        return _dense_moments(train)
    cells, known = _sparse_cells(train)
    scale = np.full((len(train), train.spec.features), np.inf)
    scale.reshape(-1)[cells] = known
    return np.zeros_like(scale), scale


def scale_by(
    data: FederatedDataset, center: NDArray[np.float64], scale: NDArray[np.float64]
) -> FederatedDataset:
    """Scale each client's rows by its row of `client_moments`, as `standardise_clients` does."""
    if not data.is_sparse:
        return replace(data, features=_scale_rows(data, center, scale))
    return replace(data, features=_scale_entries(data, scale.reshape(-1)[_cell_numbers(data)]))


def fill_by(data: FederatedDataset, fills: NDArray[Any]) -> FederatedDataset:
    """Fill gaps (NaN) of each client's rows with its row of `fills`, (clients, features)."""
    flat = _flat(data)
    values = np.where(np.isnan(flat), np.repeat(fills, data.counts, axis=0), flat)
    return replace(
        data,
        features=torch.from_numpy(values.astype(np.float32)).reshape(len(flat), *data.spec.shape),
    )


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

    The constants must be public: declared without reading the rows. `center` and `scale` are one
    number, or one per feature; sparse features have center 0, and only regression targets scale.

    Raises:
        DataError: If a constant cannot be applied to this data.
    """
    centers, scales = _constants(data, center, scale, clip)
    scaled_target = (target_center, target_scale) != (0.0, 1.0)
    if data.spec.task != "regression" and scaled_target:
        raise DataError(f"{data.title}: {data.spec.task} targets are labels and cannot be scaled")
    if not (np.isfinite(target_center) and np.isfinite(target_scale) and target_scale > 0):
        raise DataError(
            f"target_center = {target_center}, target_scale = {target_scale}: expected a number "
            "and a positive number"
        )
    features, notes = _cut(replace(data, features=_divided(data, centers, scales)), clip)
    cut = "" if clip is None else f", cut at +-{clip:g}"
    note = f"features scaled by declared constants{cut}"
    targets = data.targets
    if scaled_target:
        note += f"; target (y - {target_center:g}) / {target_scale:g}"
        targets = ((targets.double() - target_center) / target_scale).float()
    return replace(data, features=features, targets=targets, notes=(*data.notes, note, *notes))


def _divided(
    data: FederatedDataset, centers: NDArray[np.float64], scales: NDArray[np.float64]
) -> Features:
    with np.errstate(over="ignore"):  # values too large for float32 are infinite until they are cut
        if not isinstance(data.features, Tensor):
            return _with_values(data, data.features.data / scales[data.features.indices])
        out = np.empty(_flat(data).shape, dtype=np.float32)
        for rows in _row_blocks(data):
            out[rows] = (_flat(data)[rows] - centers) / scales
    return _like(data, out)


def _cut(scaled: FederatedDataset, clip: float | None) -> tuple[Features, tuple[str, ...]]:
    """Cut features at +-clip in place, with a note if that changes many rows of a client."""
    features = scaled.features
    if clip is None:
        return features, ()
    note = cut_note(scaled, clip)
    if isinstance(features, Tensor):
        features.clamp_(-clip, clip)
    else:
        np.clip(features.data, -clip, clip, out=features.data)
    return features, () if note is None else (note,)


def _constants(
    data: FederatedDataset, center: ArrayLike, scale: ArrayLike, clip: float | None
) -> Moments:
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


def _flat(data: FederatedDataset) -> NDArray[np.float32]:
    assert isinstance(data.features, Tensor)
    flat: NDArray[np.float32] = data.features.detach().cpu().reshape(-1, data.spec.features).numpy()
    return flat


def _like(data: FederatedDataset, flat: NDArray[np.float32]) -> Tensor:
    assert isinstance(data.features, Tensor)
    return torch.from_numpy(flat).reshape(data.features.shape).to(data.features.device)


def _row_blocks(data: FederatedDataset) -> Iterator[slice]:
    rows, step = int(data.offsets[-1]), max(1, _BLOCK * 2 // data.spec.features)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _dense_moments(train: FederatedDataset) -> Moments:
    flat = _flat(train)
    center = np.zeros((len(train), train.spec.features))
    scale = np.full_like(center, np.inf)
    # `reduceat` returns the next row for an empty range, so clients without rows are left out.
    held = np.flatnonzero(train.counts)
    for ids in _client_blocks(train, held, _BLOCK * 2):
        counts = train.counts[ids]
        first, last = train.offsets[ids[0]], train.offsets[ids[-1] + 1]
        rows = flat[first:last].astype(np.float64)
        starts = train.offsets[ids] - first
        center[ids] = np.add.reduceat(rows, starts, axis=0) / counts[:, None]
        rows -= np.repeat(center[ids], counts, axis=0)
        np.square(rows, out=rows)
        scale[ids] = np.sqrt(np.add.reduceat(rows, starts, axis=0) / counts[:, None])
    scale[scale == 0] = np.inf  # so that constant columns become 0
    return center, scale


def _client_blocks(data: FederatedDataset, ids: Integers, size: int = _BLOCK) -> Iterator[Integers]:
    """Yield clients in order, in blocks of about `size` feature values, at least one client."""
    block = data.offsets[ids] // max(1, size // max(1, data.spec.features))
    yield from (part for part in np.split(ids, np.flatnonzero(np.diff(block)) + 1) if len(part))


def _scale_rows(
    data: FederatedDataset, center: NDArray[np.float64], scale: NDArray[np.float64]
) -> Tensor:
    flat, owner = _flat(data), data.owners
    out = np.empty(flat.shape, dtype=np.float32)
    for rows in _row_blocks(data):
        out[rows] = _bounded(flat[rows] - center[owner[rows]], scale[owner[rows]])
    return _like(data, out)


def _bounded(values: NDArray[np.floating], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # values that are too large are infinite until they are cut
        return np.clip(values / scale, -LIMIT, LIMIT)


def _cell_numbers(data: FederatedDataset) -> Integers:
    """Number the (client, column) cell of every stored entry."""
    assert not isinstance(data.features, Tensor)
    stored = np.diff(data.features.indptr[data.offsets])
    owner = np.repeat(np.arange(len(data), dtype=np.int64), stored)
    cells: Integers = owner * data.spec.features + data.features.indices
    return cells


def _sparse_cells(train: FederatedDataset) -> tuple[Integers, NDArray[np.float64]]:
    """Return the sorted cells (client, column) that hold a stored number, and their scales."""
    assert not isinstance(train.features, Tensor)
    cells, inverse = np.unique(_cell_numbers(train), return_inverse=True)
    values = train.features.data.astype(np.float64)
    counts = train.counts[cells // train.spec.features]
    mean = np.bincount(inverse, weights=values, minlength=len(cells)) / np.maximum(counts, 1)
    stored = np.bincount(inverse, minlength=len(cells))
    square = np.bincount(inverse, weights=(values - mean[inverse]) ** 2, minlength=len(cells))
    # Entries that are not stored are zeros, each mean^2 away from the mean.
    deviation = np.sqrt((square + (counts - stored) * mean**2) / np.maximum(counts, 1))
    deviation[deviation == 0] = np.inf
    return cells, deviation


def _scale_cells(
    data: FederatedDataset, cells: Integers, known: NDArray[np.float64]
) -> sparse.csr_matrix:
    wanted = _cell_numbers(data)
    place = np.searchsorted(cells, wanted)
    # A cell without an entry in training does not vary there.
    same = np.append(cells, -1)[place] == wanted
    return _scale_entries(data, np.where(same, np.append(known, np.inf)[place], np.inf))


def _scale_entries(data: FederatedDataset, scale: NDArray[np.float64]) -> sparse.csr_matrix:
    assert not isinstance(data.features, Tensor)
    scaled = _with_values(data, _bounded(data.features.data, scale))
    scaled.eliminate_zeros()
    return scaled


def _with_values(data: FederatedDataset, values: NDArray[np.floating]) -> Any:
    features: Any = data.features
    scaled = features.copy()
    scaled.data = values.astype(np.float32)
    return scaled


def scaling_hint(data: FederatedDataset, clients: int = 200) -> str | None:
    """Return a warning if the rows of the first clients look unscaled, else None.

    The warning is for the owner of the data and is not private.
    """
    rows = int(data.offsets[min(clients, len(data))])
    if rows == 0 or not isinstance(data.features, Tensor):
        return None
    sizes = data.features[:rows].flatten(1).double().square().mean(dim=0).sqrt()
    largest, target = float(sizes.max()), float(data.targets[:rows].double().square().mean().sqrt())
    off = []
    if largest > 10:
        off.append(f"some features have size {largest:.3g}")
    if 0 < largest < 0.1:
        off.append(f"all features are below {largest:.3g}")
    if data.spec.task == "regression" and (target > 10 or 0 < target < 0.1):
        off.append(f"targets have size {target:.3g}")
    if not off:
        return None
    return (
        f"{data.title}: {' and '.join(off)}; learning rates and clips are made for size 1: scale "
        "by public constants (data.source.center and data.source.scale), or features by "
        "--standardise client"
    )


@dataclass(frozen=True)
class Unscaled:
    """The cells (client, column) that break the contract, by client and then by column.

    The number of features is the column of the target. `shares` are those of the client's own rows
    that lie beyond the limit.
    """

    clients: Integers
    columns: Integers
    shares: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.clients)


def unscaled(
    clients: Clients, limit: float = LIMIT, target_limit: float = TARGET_LIMIT
) -> Unscaled:
    """Return the columns of each client in which too many of its own rows lie beyond a limit.

    Too many are at least three rows, and either more than half of the client's rows beyond the
    limit, or more than 5 % plus two rows beyond twice the limit. Targets have their own limit: more
    than two thirds of the rows beyond it on one side (less those on the other), or 5 % plus two
    rows beyond twice the limit of features. So noisy targets pass, and targets in another unit do
    not. Scaled data passes even with heavy tails: of a column from Student's t with 3 degrees of
    freedom, divided by its standard deviation, 1 in 8,000 lies beyond 15 and 1 in 500 beyond 6, so
    a client breaks the contract by chance with probability below 1e-7. Indicators, shares and small
    counts always pass. In a client of one or two rows, all must lie beyond ten times the limit
    (2e-6 at most). A column that is constant in a client passes or fails as a whole: declare a clip
    where a few clients may lie far out. Classes are not checked.
    """
    width, counts = clients.spec.features, clients.counts.numpy()
    cells, found, far, net = _tally(clients, limit, target_limit)
    rows = counts[cells // (width + 1)]
    half = np.where(cells % (width + 1) == width, _MOST_TARGETS, _MOST)
    most = (found > _MORE) & (np.abs(net) > half * rows)
    broken = np.where(rows > _MORE, most | (far > _SHARE * rows + _MORE), found == rows)
    cells, found, rows = cells[broken], found[broken], rows[broken]
    owners = clients.ids.numpy()[cells // (width + 1)]
    return Unscaled(owners, cells % (width + 1), found / rows)


def refuse_unscaled(
    data: FederatedDataset, limit: float = LIMIT, target_limit: float = TARGET_LIMIT
) -> None:
    """Raise an error if a client's rows are not of about unit size; see `unscaled`.

    Raises:
        DataError: States the columns, the first clients with such rows, and the remedy.
    """
    found, width = _survey(data, limit, target_limit), data.spec.features
    columns, owners = found.columns, found.owners
    if not owners:
        return
    target = [f"the target beyond +-{target_limit:g}"] if width in columns else []
    inputs = columns - {width}
    features = [f"{_list(data, inputs)} beyond +-{limit:g}"] if inputs else []
    raise DataError(
        f"{data.title}: found {' and '.join([*features, *target])} ({', '.join(found.first)}"
        f"{', ...' if found.cells > _NAMED else ''}; {len(owners)} of {len(data)} clients), "
        f"expected columns of about unit size: in each client at most half of the rows beyond "
        f"that (target: two thirds, on one side) and {_SHARE:.0%} beyond +-{_FAR * limit:g}; "
        f"{_remedy(data, columns)}"
    )


def cut_note(data: FederatedDataset, clip: float) -> str | None:
    """Return a note if a declared clip would cut most of a client's own rows, else None.

    This is no error: a clip is made for a client that lies far out as a whole.
    """
    found = _survey(data, clip, np.inf)
    if not found.owners:
        return None
    return (
        f"the cut at +-{clip:g} takes most of a client's rows, or {_SHARE:.0%} of them from beyond "
        f"+-{_FAR * clip:g}, for {len(found.owners)} of {len(data)} clients, in "
        f"{_list(data, found.columns)}; check the constants if these are many"
    )


@dataclass
class _Survey:
    columns: set[int]
    owners: set[int]
    first: list[str]
    cells: int = 0


def _survey(data: FederatedDataset, limit: float, target_limit: float) -> _Survey:
    seen = _Survey(set(), set(), [])
    for ids in _client_blocks(data, np.arange(len(data))):
        found = unscaled(data.clients(ids), limit, target_limit)
        seen.columns.update(found.columns.tolist())
        seen.owners.update(found.clients.tolist())
        seen.cells += len(found)
        for at in range(min(len(found), _NAMED - len(seen.first))):
            column, owner = int(found.columns[at]), int(found.clients[at])
            what = "the target" if column == data.spec.features else f"column {_name(data, column)}"
            whose = f"the rows of client {data.names[owner]!r}"
            seen.first.append(f"{what} in {found.shares[at]:.0%} of {whose}")
    return seen


def _name(data: FederatedDataset, column: int) -> str:
    """Return the name of a column, or its number."""
    known = len(data.columns) == data.spec.features
    return repr(str(data.columns[column])) if known else str(column)


def _list(data: FederatedDataset, columns: set[int]) -> str:
    named = ", ".join(_name(data, column) for column in sorted(columns)[:_NAMED])
    left = len(columns) - _NAMED
    more = f" and {left} other{'s' if left > 1 else ''}" if left > 0 else ""
    counted = "" if len(data.columns) == data.spec.features else " (from 0)"
    return f"column{'s' if len(columns) > 1 else ''} {named}{more}{counted}"


def _remedy(data: FederatedDataset, columns: set[int]) -> str:
    ways, inputs = [], sorted(columns - {data.spec.features})
    if inputs:
        name = _name(data, inputs[0]).strip("'")
        name = name if _PLAIN.fullmatch(name) else "COLUMN"
        ways.append(
            "declare public constants for the features (--set data.source.center."
            f"{name}=... --set data.source.scale.{name}=..., and so on, and, where a few clients "
            "lie far out, --set data.source.clip=...; in Python ct.apply_constants), or scale each "
            "client by its own rows (--standardise client; ct.standardise_clients)"
        )
    if data.spec.features in columns:
        ways.append(
            "declare public constants for the target (--set data.source.center.TARGET=... --set "
            "data.source.scale.TARGET=..., TARGET the name of its column; ct.apply_constants with "
            "target_center and target_scale): if only a few clients lie far out, a larger "
            "scale is enough"
        )
    return ", and ".join(ways)


def _tally(clients: Clients, limit: float, target_limit: float) -> Integers:
    """Return cells, with their rows beyond a limit, far beyond, and above less below it, (4, n).

    A cell is client * (features + 1) + column.
    """
    counts, starts = clients.counts.numpy(), clients.starts.numpy()
    owner = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(owner)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    factor = np.where(counts[owner] > _MORE, 1.0, _SMALL).astype(np.float32)
    step = max(1, _BLOCK // max(1, clients.spec.features))
    total = np.empty((4, 0), dtype=np.int64)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        found = [_features(clients, rows[part], owner[part], limit * factor[part])]
        if clients.spec.task == "regression":
            limits = target_limit * factor[part], _FAR * max(limit, target_limit) * factor[part]
            found.append(_targets(clients, rows[part], owner[part], *limits))
        # A client may continue in the next chunk: add up the counts of each cell.
        listed = np.concatenate([total, *found], axis=1)
        cells, place = np.unique(listed[0], return_inverse=True)
        sums = [np.bincount(place, weights, len(cells)) for weights in listed[1:]]
        total = np.stack([cells, *sums]).astype(np.int64)
    return total


def _features(
    clients: Clients, rows: Integers, owner: Integers, limits: NDArray[np.float32]
) -> Integers:
    if not isinstance(clients.features, Tensor):
        picked = clients.features[rows]
        picked.sum_duplicates()
        place, column = _entry_rows(picked), picked.indices
        over = np.abs(picked.data) / limits[place]
    else:
        index = torch.from_numpy(rows).to(clients.device)
        values = clients.features[index].reshape(len(rows), -1).abs().cpu().numpy()
        place, column = np.nonzero(values > limits[:, None])
        over = values[place, column] / limits[place]
    beyond = over > 1
    cells = owner[place[beyond]] * (clients.spec.features + 1) + column[beyond]
    # the side is not used for features
    return np.stack([cells, np.ones_like(cells), over[beyond] > _FAR, np.ones_like(cells)])


def _targets(
    clients: Clients,
    rows: Integers,
    owner: Integers,
    near: NDArray[np.float32],
    far: NDArray[np.float32],
) -> Integers:
    width = clients.spec.features
    values = clients.targets[torch.from_numpy(rows).to(clients.device)].cpu().numpy()
    beyond = np.abs(values) > near
    cells = owner[beyond] * (width + 1) + width
    over = (np.abs(values) > far)[beyond]
    return np.stack([cells, np.ones_like(cells), over, np.sign(values[beyond]).astype(np.int64)])


def _entry_rows(rows: sparse.csr_matrix) -> Integers:
    """Return the row of every stored entry."""
    return np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))


def refuse_degenerate(data: FederatedDataset) -> None:
    """Raise an error for a client without rows, values that are not finite, or constant targets.

    A client may have one row, or equal targets: targets must differ over all clients together. The
    check reads the rows of all clients before a run; no guarantee covers its result.

    Raises:
        DataError: If the data is degenerate; the message states the problem and the remedy.
    """
    _refuse_empty(data)
    _refuse_not_finite(data)
    _refuse_constant(data)


def refuse_labels(data: FederatedDataset) -> None:
    """Raise an error for binary and multilabel targets other than 0 and 1."""
    if data.spec.task not in ("binary", "multilabel"):
        return
    targets = data.targets.cpu().numpy()
    wrong = np.argwhere((targets != 0) & (targets != 1))
    if len(wrong):
        raise DataError(
            f"{data.title}: {_place(data, int(wrong[0][0]))}: found the target "
            f"{targets[tuple(wrong[0])]:g}, expected 0 or 1, since the task is {data.spec.task}; "
            "correct the row, or name the classes that count as 1 with positive="
        )


def find_zero_rows(data: FederatedDataset) -> Integers:
    """Return the flat numbers of the rows whose features are all zero.

    A linear model without intercept scores such a row 0, and a dual step divides by its norm.
    """
    features = data.features
    found = []
    for start in range(0, int(data.offsets[-1]), _CHUNK):
        rows = features[start : start + _CHUNK]
        if isinstance(rows, Tensor):
            zero = ~rows.reshape(len(rows), -1).any(dim=1).cpu().numpy()
        else:
            zero = np.ones(rows.shape[0], dtype=bool)
            zero[_entry_rows(rows)[rows.data != 0]] = False
        found.append(start + np.flatnonzero(zero))
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def one_class_clients(data: FederatedDataset) -> Integers:
    """Return the clients that have rows of one class only.

    Raises:
        DataError: If the task has no classes to compare.
    """
    if data.spec.task not in ("binary", "multiclass"):
        raise DataError(
            f"{data.title}: the task is {data.spec.task}, expected binary or multiclass: its rows "
            "have no class to compare"
        )
    targets, owners = data.targets.cpu().numpy(), data.owners
    other = targets != targets[data.offsets[owners]]
    mixed = np.bincount(owners[other], minlength=len(data)) > 0
    return np.flatnonzero((data.counts > 0) & ~mixed)


def _place(data: FederatedDataset, row: int) -> str:
    """Return the client and the number of a row, for messages."""
    client = int(np.searchsorted(data.offsets, row, side="right")) - 1
    return f"client {data.names[client]!r}, row {row - int(data.offsets[client])} (from 0)"


def _refuse_empty(data: FederatedDataset) -> None:
    empty = np.flatnonzero(data.counts == 0)
    if not len(empty):
        return
    named = ", ".join(repr(data.names[client]) for client in empty[:_NAMED_EMPTY].tolist())
    more = f" and {len(empty) - _NAMED_EMPTY} others" if len(empty) > _NAMED_EMPTY else ""
    raise DataError(
        f"{data.title}: {len(empty)} of {len(data)} clients have no rows ({named}{more}), expected "
        "at least 1 of each; leave these clients out, or hold out fewer rows for testing"
    )


def _refuse_not_finite(data: FederatedDataset) -> None:
    for start in range(0, len(data.targets), _CHUNK):
        part = slice(start, start + _CHUNK)
        rows, good = data.features[part], _finite(data.targets[part])
        if isinstance(rows, Tensor):
            good &= _finite(rows)
        else:
            good[torch.from_numpy(_entry_rows(rows)[~np.isfinite(rows.data)])] = False
        if not good.all():
            row = start + int(torch.argmin(good.int()))
            raise DataError(
                f"{data.title}: {_place(data, row)}: found a feature or target that is infinite or "
                "not a number, expected finite numbers; correct the row or drop it"
            )


def _finite(rows: Tensor) -> Tensor:
    return torch.isfinite(rows).reshape(len(rows), -1).all(dim=1)


def _refuse_constant(data: FederatedDataset) -> None:
    targets = data.targets
    if data.spec.task == "multilabel" or not len(targets) or bool((targets != targets[0]).any()):
        return
    if data.spec.task == "regression":
        found, expected = f"every target is {float(targets[0]):g}", "targets that differ"
    else:
        found, expected = f"every row is of class {int(targets[0])}", "rows of at least 2 classes"
    raise DataError(
        f"{data.title}: {found}, over all {len(data)} clients; expected {expected}; check which "
        "column is the target"
    )


def embed(
    data: FederatedDataset, features: Callable[[Tensor], Tensor], *, block: int = 64
) -> FederatedDataset:
    """Return the data with every row replaced by its features, by a frozen public map.

    The map is public and fixed, so this is a client's own preprocessing: nothing is released and no
    budget is spent. The map gets rows client by client, always `block` at a time, padded with
    zeros, so the features of a row do not depend on the number of rows of any client.

    `features` is a function or `torch.nn.Module` from rows (n, *shape), float32, to features
    (n, d). A module is used in evaluation mode and must be on the device of the rows.

    Raises:
        DataError: If the map does not return d finite numbers for each row.
    """
    if block < 1:
        raise DataError(f"block = {block}: expected at least 1 row at a time")
    with _frozen(features):
        empty = torch.zeros((block, *data.spec.shape), device=data.targets.device)
        width = _mapped(features, empty, None, data).shape[1]
        rows = torch.empty((int(data.offsets[-1]), width), device=data.targets.device)
        for start, stop in _chunks(data.offsets, block):
            part: Any = data.features[start:stop]
            whole = empty.clone()
            whole[: stop - start] = torch.from_numpy(part.toarray()) if data.is_sparse else part
            rows[start:stop] = _mapped(features, whole, width, data)[: stop - start]
    if not bool(rows.isfinite().all()):
        row = int((~rows.isfinite().all(dim=1)).nonzero()[0])
        raise DataError(
            f"{data.title}: the features of row {row} hold a NaN or an infinity; check that row, "
            "and the range of inputs that the map expects"
        )
    name = getattr(features, "__name__", type(features).__name__)
    note = f"rows of shape {data.spec.shape} turned into {width} features by {name}"
    spec, notes = replace(data.spec, shape=(width,)), (*data.notes, note)
    return replace(data, spec=spec, features=rows, mapped=None, notes=notes, columns=(), gaps=None)


@contextmanager
def _frozen(features: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put a module in evaluation mode, and restore its mode afterwards."""
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


def _mapped(
    features: Callable[[Tensor], Tensor], rows: Tensor, width: int | None, data: FederatedDataset
) -> Tensor:
    found = features(rows)
    fits = isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(rows)
    if not fits or found.shape[1] != (width or found.shape[1]) or found.shape[1] < 1:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(
            f"{data.title}: for rows of shape {tuple(rows.shape)} the map returned {shape}, not "
            f"({len(rows)}, features): one vector per row, always of the same length"
        )
    return found.float()
