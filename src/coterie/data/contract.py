"""The scaling contract: columns come in about unit size, and each client checks that by itself.

Clips, priors and noise are made for features and outcomes of about unit size. A column in other
units (an age in years, a score out of 70) is cut down by the clip in every round, and what is left
of it is a direction without a length. So it is refused, and the remedy named.

The check runs inside each client: its answer is a function of that client's own rows, whatever
others hold, and the error that may follow is for that client's owner. Nothing of it is posted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients, DataError, FederatedDataset

LIMIT = 15.0
"""Features beyond this are of another unit. Those below need coefficients of no less than 1/15 of
the usual size, which priors that are learnt can follow; a client or two may lie ten standard
deviations out and still pass."""
TARGET_LIMIT = 6.0
"""Outcomes that lie beyond this on one side are of another unit: their mean would have to be learnt
in clipped steps. Noise around zero is no unit: it is looked at where features are far out, too."""
_SHARE = 0.05
_MORE = 2
_MOST, _MOST_OUTCOMES = 1 / 2, 2 / 3
_FAR = 2.0
_SMALL = 10.0
_BLOCK = 1 << 22  # numbers looked at together
_NAMED = 3  # clients and columns named in a message
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")  # names that a flag takes as they are

Whole = NDArray[np.int64]
_Beyond = tuple[Whole, Whole, Whole, Whole]
"""Cells, with their rows beyond a limit, those far beyond, and those above less those below."""


@dataclass(frozen=True)
class Unscaled:
    """The cells (client, column) that break the contract, by client and then by column.

    Attributes:
        clients: Numbers of clients.
        columns: Columns from 0; the number of features stands for the target.
        shares: The share of the client's own rows that lie beyond the limit.
    """

    clients: Whole
    columns: Whole
    shares: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.clients)


def unscaled(
    clients: Clients, limit: float = LIMIT, target_limit: float = TARGET_LIMIT
) -> Unscaled:
    """Find the columns of each client in which too many of its own rows lie beyond a limit.

    Too many are three rows or more, and more than half of its rows beyond the limit, or more than
    5 % of them, and two more, beyond twice the limit. Outcomes have a limit of their own for where
    they lie: more than two thirds of the rows beyond it on one side (less those on the other), or,
    as features, 5 % and two more beyond twice the limit of features. So a client whose outcomes are
    noisy passes, and one whose outcomes are of another unit does not. Scaled data passes even where
    its tails are
    heavy: of a column from Student's t with 3 degrees of freedom, divided by its standard
    deviation, 1 in 8,000 lies beyond 15 and 1 in 500 beyond 6, so that a client breaks the contract
    by chance with probability below 1e-7, whatever its number of rows. Indicators, shares and small
    counts always pass. A client of one or two rows cannot tell an outlier from another unit: all of
    them must lie beyond ten times the limit (2e-6 at most). A column that is constant in a client
    passes or fails as a whole: declare a clip where a few clients may lie far out.

    Args:
        clients: Whose rows are looked at, each client's by itself.
        limit: The largest absolute value of a feature of about unit size.
        target_limit: That of an outcome; targets of classes are not looked at.
    """
    width, counts = clients.spec.features, clients.counts.numpy()
    cells, found, far, net = _tally(clients, limit, target_limit)
    rows = counts[cells // (width + 1)]
    half = np.where(cells % (width + 1) == width, _MOST_OUTCOMES, _MOST)
    most = (found > _MORE) & (np.abs(net) > half * rows)
    broken = np.where(rows > _MORE, most | (far > _SHARE * rows + _MORE), found == rows)
    cells, found, rows = cells[broken], found[broken], rows[broken]
    owners = clients.ids.numpy()[cells // (width + 1)]
    return Unscaled(owners, cells % (width + 1), found / rows)


def refuse_unscaled(
    data: FederatedDataset, limit: float = LIMIT, target_limit: float = TARGET_LIMIT
) -> None:
    """Refuse data with a client whose own rows are not of about unit size; see `unscaled`.

    Raises:
        DataError: Names the columns, the first clients that hold them so, and what to do.
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
        f"expected columns of about unit size, of each client no more than half of its rows beyond "
        f"that (of the target two thirds, on one side) and {_SHARE:.0%} beyond +-{_FAR * limit:g}; "
        f"{_remedy(data, columns)}"
    )


def cut_note(data: FederatedDataset, clip: float) -> str | None:
    """Say where a declared clip cuts most of a client's own rows: a note, for the data's owner.

    Not a reason to refuse: a client may lie far out as a whole, which is what a clip is for.

    Args:
        data: Scaled features, not yet cut.
        clip: Where they will be cut.
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
    """What breaks the contract over clients, in few words however many do."""

    columns: set[int]
    owners: set[int]
    first: list[str]
    cells: int = 0


def _survey(data: FederatedDataset, limit: float, target_limit: float) -> _Survey:
    seen = _Survey(set(), set(), [])
    for clients in _blocks(data):
        found = unscaled(clients, limit, target_limit)
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
    """Name a column as the file does, or by its number."""
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
            "declare public constants for the outcome (--set data.source.center.TARGET=... --set "
            "data.source.scale.TARGET=..., TARGET the name of its column; ct.apply_constants with "
            "target_center and target_scale): where only a few clients lie out there, a larger "
            "scale is enough"
        )
    return ", and ".join(ways)


def _blocks(data: FederatedDataset) -> Iterator[Clients]:
    """Hand out clients in their order, so many that their rows are a block, or one."""
    step = max(1, _BLOCK // max(1, data.spec.features))
    block = data.offsets[:-1] // step
    for ids in np.split(np.arange(len(data)), np.flatnonzero(np.diff(block)) + 1):
        if len(ids):
            yield data.clients(ids)


def _tally(clients: Clients, limit: float, target_limit: float) -> _Beyond:
    """Count by cell, client * (features + 1) + column, the rows beyond a limit, and far beyond."""
    counts, starts = clients.counts.numpy(), clients.starts.numpy()
    owner = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(owner)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    factor = np.where(counts[owner] > _MORE, 1.0, _SMALL).astype(np.float32)
    step = max(1, _BLOCK // max(1, clients.spec.features))
    none = np.empty(0, dtype=np.int64)
    parts: list[_Beyond] = [_counted(none, none > 0, none)]
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        parts.append(_features(clients, rows[part], owner[part], limit * factor[part]))
        if clients.spec.task == "regression":
            limits = target_limit * factor[part], _FAR * max(limit, target_limit) * factor[part]
            parts.append(_targets(clients, rows[part], owner[part], limits))
    # A client may go on in the next chunk: add up what is of one cell.
    cells, place = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    found, far, net = (
        np.bincount(place, np.concatenate([part[which] for part in parts]), len(cells))
        for which in (1, 2, 3)
    )
    return cells, found.astype(np.int64), far.astype(np.int64), net.astype(np.int64)


def _features(clients: Clients, rows: Whole, owner: Whole, limits: NDArray[np.float32]) -> _Beyond:
    cells = owner * (clients.spec.features + 1)
    if not isinstance(clients.features, Tensor):
        picked = clients.features[rows]
        picked.sum_duplicates()
        place = np.repeat(np.arange(len(rows)), np.diff(picked.indptr))
        over = np.abs(picked.data) / limits[place]
        column = picked.indices
    else:
        index = torch.from_numpy(rows).to(clients.device)
        values = clients.features[index].reshape(len(rows), -1).abs().cpu().numpy()
        place, column = np.nonzero(values > limits[:, None])
        over = values[place, column] / limits[place]
    beyond = over > 1
    either = np.ones(np.count_nonzero(beyond), dtype=np.int64)  # sides of features do not matter
    return _counted(cells[place[beyond]] + column[beyond], over[beyond] > _FAR, either)


def _targets(
    clients: Clients,
    rows: Whole,
    owner: Whole,
    limits: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> _Beyond:
    width = clients.spec.features
    values = clients.targets[torch.from_numpy(rows).to(clients.device)].cpu().numpy()
    sizes = np.abs(values)
    beyond = sizes > limits[0]
    far, side = (sizes > limits[1])[beyond], np.sign(values[beyond]).astype(np.int64)
    return _counted(owner[beyond] * (width + 1) + width, far, side)


def _counted(cells: Whole, far: NDArray[np.bool_], side: Whole) -> _Beyond:
    unique, place, found = np.unique(cells, return_inverse=True, return_counts=True)
    many, net = (np.bincount(place, of, len(unique)).astype(np.int64) for of in (far, side))
    return unique, found, many, net
