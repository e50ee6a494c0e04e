"""What a module looks up in its embeddings, and whether the rows of data are in their tables."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.models.layers import Embedding, EmbeddingBag, numbers_in
from coterie.models.refusals import MisfitError

# Numbers of rows that are looked at in one piece.
_PIECE = 1 << 22


@dataclass(frozen=True, eq=False)
class Reading:
    """An embedding that is asked for columns of the flattened row, as they are."""

    name: str
    size: int
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Lookups:
    """What one embedding was asked for, call by call."""

    name: str
    layer: Embedding | EmbeddingBag
    asked: list[Tensor]


def _tables(module: nn.Module) -> list[Lookups]:
    return [
        Lookups(name, layer, [])
        for name, layer in module.named_modules()
        if isinstance(layer, Embedding | EmbeddingBag)
    ]


@contextmanager
def noted(module: nn.Module) -> Iterator[list[Lookups]]:
    """Note what the embeddings of a module are asked for."""
    found = _tables(module)
    for each in found:
        each.layer.lookups = each.asked
    try:
        yield found
    finally:
        for each in found:
            each.layer.lookups = None


def check_trial(lookups: Sequence[Lookups]) -> None:
    """Refuse a table that is too small even for rows of 0 and 1: no data could be looked up."""
    for each in lookups:
        for asked in each.asked:
            outside = asked[numbers_in(asked, each.layer.num_embeddings)[1]]
            if len(outside):
                raise MisfitError(
                    f"layer {each.name!r} (Embedding) looked up {float(outside[0]):g} for rows of "
                    f"0 and 1, and its table holds 0 to {each.layer.num_embeddings - 1}; expected "
                    "numbers in the table: raise num_embeddings, or correct the numbers that the "
                    "module makes"
                )


def readings(module: nn.Module, apply: Callable[[Tensor], Tensor], spec: Spec) -> list[Reading]:
    """Find which columns of the rows reach which embeddings unchanged.

    Two rows are tried whose numbers tell their columns, each row in its own way: i + 5 and
    2 d + 17 - i for column i of d. What tells the same column both times has come from there; a
    number of the module's own, or one that was shifted, scaled or cut off on its way, does not.
    """
    if not _tables(module):
        return []
    columns, tried = torch.arange(spec.features), []
    try:
        for row in (columns + 5, 2 * spec.features + 17 - columns):
            with torch.no_grad(), noted(module) as found, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply(row.float().reshape(1, *spec.shape))
            tried.append(found)
    except Exception:
        # The module refuses such rows by itself: what it does with others is not known.
        return []
    made = []
    for first, second in zip(*tried, strict=True):
        told = [
            _told(*pair, spec.features) for pair in zip(first.asked, second.asked, strict=False)
        ]
        read = torch.unique(torch.cat(told)) if told else columns[:0]
        if len(read):
            made.append(Reading(first.name, first.layer.num_embeddings, read))
    return made


def _told(first: Tensor, second: Tensor, features: int) -> Tensor:
    if first.shape != second.shape:
        return torch.zeros(0, dtype=torch.int64)
    column, again = first.double() - 5, 2 * features + 17 - second.double()
    return column[(column == again) & (column >= 0) & (column < features)].long()


def check_rows(data: FederatedDataset, reads: Sequence[Reading]) -> None:
    """Refuse rows that are not in the tables they are looked up in.

    Raises:
        DataError: If there is one; it names the layer, its size and what was found.
    """
    if not reads or not data.features.shape[0]:
        return
    ends = [(float("inf"), float("-inf"))] * len(reads)
    step = max(1, _PIECE // max(1, data.spec.features))
    for start in range(0, data.features.shape[0], step):
        piece = data.features[start : start + step]
        rows = piece if isinstance(piece, Tensor) else torch.from_numpy(piece.toarray())
        for at, each in enumerate(reads):
            # NaN is bad in any row, and is noticed where it is trained on.
            found = rows.flatten(1)[:, each.columns.to(rows.device)].round().nan_to_num(nan=0.0)
            least, most = ends[at]
            ends[at] = min(least, float(found.min())), max(most, float(found.max()))
    for each, (least, most) in zip(reads, ends, strict=True):
        if least < 0 or most >= each.size:
            raise DataError(
                f"{data.title}: the rows hold numbers from {least:g} to {most:g} where layer "
                f"{each.name!r} (Embedding) looks them up, and its table holds 0 to "
                f"{each.size - 1}; expected numbers in the table: declare more (num_embeddings, or "
                f"vocabulary = {max(most, 0) + 1:.0f} of char_lstm), and number from 0"
            )
