"""What a module looks up in its embeddings, and whether the rows of data are in their tables."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.models.layers import Embedding, EmbeddingBag, numbers_in
from coterie.models.refusals import LOOKS_UP, MisfitError

# Numbers of rows that are looked at in one piece.
_PIECE = 1 << 22
# Rows that a module is tried on, of those that hold numbers outside a table.
_FEW = 32
# Lookups that no layer of ours has made safe. torch flattens the tables of a stack: a number that
# is not in a client's table would read the parameters of the next client.
_UNSAFE = {
    functional.embedding,
    functional.embedding_bag,
    torch.embedding,
    torch.embedding_bag,
    torch.ops.aten.embedding,
    torch.ops.aten.embedding.default,
}


class NoUnsafeLookups(TorchFunctionMode):
    """Refuses lookups by a function; those of the layers `Embedding` and `EmbeddingBag` pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call anything else as it is."""
        if func in _UNSAFE:
            raise RuntimeError(LOOKS_UP)
        return func(*args, **(kwargs or {}))


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


def check_rows(
    data: FederatedDataset, reads: Sequence[Reading], asked: Callable[[Tensor], list[Lookups]]
) -> None:
    """Refuse rows that are not in the tables they are looked up in.

    A module may handle such numbers by itself (x % 1000, a clamp): `asked`, what the embeddings are
    asked for by rows, decides on a few of the rows.

    Raises:
        DataError: If there is one; it names the layer, its size and what was found.
    """
    if not reads or not data.features.shape[0]:
        return
    ends = [(float("inf"), float("-inf"))] * len(reads)
    refused = [False] * len(reads)
    step = max(1, _PIECE // max(1, data.spec.features))
    for start in range(0, data.features.shape[0], step):
        piece = data.features[start : start + step]
        rows = piece if isinstance(piece, Tensor) else torch.from_numpy(piece.toarray())
        for at, each in enumerate(reads):
            # NaN is bad in any row, and is noticed where it is trained on.
            found = rows.flatten(1)[:, each.columns.to(rows.device)].round().nan_to_num(nan=0.0)
            least, most = ends[at]
            ends[at] = min(least, float(found.min())), max(most, float(found.max()))
            few = _outside(found, each.size)
            if len(few) and not refused[at]:
                told = rows[few].cpu().float().reshape(-1, *data.spec.shape)
                refused[at] = _asks_outside(each, told.masked_fill(told.isnan(), 0.0), asked)
    for each, (least, most), wrong in zip(reads, ends, refused, strict=True):
        if wrong:
            raise DataError(
                f"{data.title}: the rows hold numbers from {least:g} to {most:g} where layer "
                f"{each.name!r} (Embedding) looks them up, and its table holds 0 to "
                f"{each.size - 1}; expected numbers in the table: declare more (num_embeddings, or "
                f"vocabulary = {max(most, 0) + 1:.0f} of char_lstm), and number from 0"
            )


def _outside(found: Tensor, size: int) -> Tensor:
    # The first few rows, and those that are furthest out on either side.
    least, most = found.amin(dim=1), found.amax(dim=1)
    bad = ((least < 0) | (most >= size)).nonzero().flatten()
    if len(bad) <= _FEW:
        return bad
    ends = torch.stack([least.argmin(), most.argmax()])
    return torch.cat([bad[:_FEW], ends])


def _asks_outside(read: Reading, rows: Tensor, asked: Callable[[Tensor], list[Lookups]]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lookups = asked(rows)
    except Exception:
        # What it would do with them in training is no better.
        return True
    mine = [given for each in lookups if each.name == read.name for given in each.asked]
    return any(bool(numbers_in(given, read.size)[1].any()) for given in mine)
