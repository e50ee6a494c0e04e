"""Federated data: the rows of all clients in flat arrays with offsets, one copy, never mixed.

Client k holds rows `offsets[k]:offsets[k + 1]`. No method returns rows of several clients mixed
together; `blocks` yields clients side by side (`Clients`), which is all that a stacked method sees.
This module does not import torch until rows become tensors, so that files are checked quickly.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from scipy import sparse
    from torch import Tensor

    from coterie.core.rng import Rng
    from coterie.data.config import Source
    from coterie.data.effects import Design
    from coterie.data.encoder import Encoded

Task = Literal["regression", "binary", "multiclass", "multilabel"]
TASKS: tuple[str, ...] = get_args(Task)
Features: TypeAlias = "Tensor | sparse.csr_matrix"
_CHUNK = 1 << 16  # rows copied at a time between memory maps
_PADDED = 1 << 28  # values of a block's padded rows: 1 GiB
_HASHED = 1 << 22  # approximate number of feature values that a fingerprint covers


class DataError(ValueError):
    """Raised for bad input. The message states the place, the value found and the remedy."""


@dataclass(frozen=True)
class Spec:
    """Public facts about the data; no field may be computed from the rows of clients.

    `outputs` is the width of the prediction: 1 for regression and binary, the number of declared
    classes or labels otherwise. `shape` is that of one row. `personal` are the columns whose
    coefficients differ between clients (`coterie.data.effects`), with the number of columns for the
    intercept; None for all.
    """

    shape: tuple[int, ...]
    outputs: int
    task: Task
    clients: int
    personal: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.personal is None:  # ledgers are bound to this text
            del named["personal"]
        return f"Spec({', '.join(f'{name}={value!r}' for name, value in named.items())})"

    @property
    def features(self) -> int:
        """The number of values in one row."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Clients:
    """c clients side by side; client i has rows `starts[i] : starts[i] + counts[i]`.

    Kernels read the flat arrays in place; `x`, `y` and `mask` are the same rows padded to the
    longest client, for code over stacked tensors. `memory` is a cache in which solvers keep values
    derived from single clients' rows, as long as the data exists.

    `ranks` number the clients of a round from 0, by id; `width` is how many of them may be computed
    side by side. Both are public, and stay what they are when a block is cut into parts. Rounding
    in stacked arithmetic depends on the shape of a stack and on the place in it: a solver that
    derives these from `ranks` and `width` alone rounds a client's result in the same way whatever
    rows the others hold.
    """

    spec: Spec
    ids: Tensor
    starts: Tensor
    counts: Tensor
    features: Features
    targets: Tensor
    ranks: Tensor
    width: int
    memory: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.ids.numel())

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.targets.device

    @property
    def longest(self) -> int:
        """The largest number of rows of a client in this block."""
        return int(self.counts.max()) if len(self) else 0

    def at(self, places: Tensor) -> Clients:
        """Return the clients at these places, or where a mask is true."""
        return replace(
            self,
            ids=self.ids[places],
            starts=self.starts[places],
            counts=self.counts[places],
            ranks=self.ranks[places],
        )

    @cached_property
    def ahead(self) -> dict[Any, Any]:
        """What solvers drew for these clients, not for parts of them, before it was needed."""
        return {}

    @cached_property
    def index(self) -> Tensor:
        """Flat row numbers, shape (c, longest); padding points anywhere and is always masked."""
        import torch

        steps = torch.arange(self.longest)
        inside = steps[None, :] < self.counts[:, None]
        return torch.where(inside, self.starts[:, None] + steps[None, :], 0)

    @cached_property
    def mask(self) -> Tensor:
        """Which padded rows are real, shape (c, longest), bool."""
        import torch

        return (torch.arange(self.longest)[None, :] < self.counts[:, None]).to(self.device)

    @cached_property
    def x(self) -> Tensor:
        """Padded features, shape (c, longest, *row), zeros where padded; dense even if sparse."""
        return self.rows(self.index, self.mask)

    @cached_property
    def y(self) -> Tensor:
        """Padded targets, shape (c, longest[, outputs]), zeros where padded."""
        return self.labels(self.index, self.mask)

    def rows(self, index: Tensor, mask: Tensor) -> Tensor:
        """Gather flat rows by number, zeros where the mask is false."""
        import torch

        if isinstance(self.features, torch.Tensor):
            found = self.features[index.to(self.device)]
        else:
            picked = self.features[index.reshape(-1).numpy()].toarray()
            found = torch.from_numpy(picked).reshape(*index.shape, -1)
        return _masked(found, mask)

    def labels(self, index: Tensor, mask: Tensor) -> Tensor:
        """Gather flat targets by number, zeros where the mask is false."""
        return _masked(self.targets[index.to(self.device)], mask)


@dataclass(frozen=True, repr=False)
class ClientArrays:
    """Named clients with ragged rows, as NumPy arrays: the result of reading a file.

    Attributes:
        spec: Public facts.
        names: One name per client, unique.
        offsets: Row ranges, shape (clients + 1,), int64.
        features: (rows, *spec.shape) float32, dense or CSR.
        targets: (rows,) float32 (regression, binary 0/1) or int64 (multiclass), or
            (rows, outputs) float32 (multilabel).
        source_split: 0 train / 1 test per row where the source declares a split.
        title: A name for tables.
        notes: What the loader did (rows dropped, constants declared).
        mapped: The folder of the arrays where they are memory-mapped. Parts of the data (splits)
            are mapped beside it, and removed with the last reference to them.
        assumed: Facts that were read off the rows and are treated as public (the classes, where
            none were declared). They are stated with every guarantee on this data.
        columns: Names of the features where the source has them, else empty.
        left_out: Columns of the source that are not used.
        scaling: What was computed from each client's own rows to prepare them, (clients, features)
            each: medians that fill gaps ("fills"), means and standard deviations ("center",
            "scale"). New rows of a client are prepared by the same; it is as private as its rows.
        source: How a file or frame was read, so that other rows can be read likewise; None for
            arrays.
        gaps: Which features were missing and are filled with the client's own medians, (rows,
            features); None if none are. A split fills them again, by the training rows.
        design: What made the columns, if effects were declared.
    """

    spec: Spec
    names: Sequence[str]
    offsets: NDArray[np.int64]
    features: Any
    targets: Any
    source_split: NDArray[np.int8] | None = None
    title: str = "data"
    notes: tuple[str, ...] = ()
    mapped: str | None = None
    assumed: tuple[str, ...] = ()
    columns: Sequence[str] = ()
    left_out: tuple[str, ...] = ()
    scaling: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    source: Source | None = None
    gaps: NDArray[np.bool_] | None = None
    design: Design | Encoded | None = None

    def __post_init__(self) -> None:
        if self.spec.clients != len(self.names) or len(self.offsets) != len(self.names) + 1:
            raise DataError(
                f"{self.title}: {len(self.names)} names, {len(self.offsets)} offsets and "
                f"spec.clients = {self.spec.clients} do not fit together"
            )
        rows = self.features.shape[0]
        if int(self.offsets[-1]) != rows or rows != len(self.targets):
            raise DataError(
                f"{self.title}: offsets end at {self.offsets[-1]}, but there are {rows} feature "
                f"rows and {len(self.targets)} targets"
            )
        if self.spec.task == "multiclass" and len(self.targets):
            least, most = int(self.targets.min()), int(self.targets.max())
            if least < 0 or most >= self.spec.outputs:
                raise DataError(
                    f"{self.title}: classes from {least} to {most} were found, expected 0 to "
                    f"{self.spec.outputs - 1}: number the classes from 0, or declare more"
                )

    def __len__(self) -> int:
        return self.spec.clients

    def __repr__(self) -> str:
        rows, spec = self.features.shape[0], self.spec
        shape = " x ".join(map(str, spec.shape))
        return (
            f"<{type(self).__name__} {self.title}: {len(self):,} clients, {rows:,} rows of {shape} "
            f"features, {spec.task}>"
        )

    def _repr_html_(self) -> str:
        """Return facts and notes for a notebook; names and values of clients are not shown."""
        notes = "".join(
            f"<li>{escape(note)}</li>" for note in dict.fromkeys((*self.notes, *self.assumed))
        )
        return f"<p>{escape(repr(self)[1:-1])}</p>" + (f"<ul>{notes}</ul>" if notes else "")

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows of each client."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The client of each row."""
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def is_sparse(self) -> bool:
        """Whether features are stored as CSR."""
        return hasattr(self.features, "indptr")

    def only(self, ids: Sequence[int] | NDArray[np.int64]) -> Self:
        """Keep whole clients, by number from 0 and in the order given."""
        chosen = np.asarray(ids)
        whole = chosen.ndim == 1 and len(chosen) > 0 and chosen.dtype.kind in "iu"
        if not whole or len(np.unique(chosen)) < len(chosen):
            raise DataError(
                f"{self.title}: clients {ids!r}: expected a list of numbers of clients, at least "
                "one and none twice"
            )
        if chosen.min() < 0 or chosen.max() >= len(self):
            raise DataError(
                f"{self.title}: clients {chosen.min()} to {chosen.max()} were asked for, expected "
                f"0 to {len(self) - 1}: there are {len(self)} clients"
            )
        counts = self.counts[chosen]
        offsets = offsets_of(counts)
        index = np.repeat(self.offsets[chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
        spec = replace(self.spec, clients=len(chosen))
        part = self._take(index, offsets, spec, [self.names[at] for at in chosen.tolist()])
        return replace(
            part,
            notes=(*self.notes, f"{len(chosen)} of {len(self)} clients kept"),
            scaling={name: values[chosen] for name, values in self.scaling.items()},
        )

    def first(self, clients: int) -> Self:
        """Keep the first `clients` clients."""
        if not 1 <= clients <= len(self):
            raise DataError(
                f"{self.title}: clients = {clients}: expected 1 to {len(self)}, the "
                "number of clients"
            )
        return self if clients == len(self) else self.only(np.arange(clients))

    def _take(self, index: Any, offsets: Any, spec: Spec, names: Sequence[str]) -> Self:
        return replace(
            self,
            spec=spec,
            names=names,
            offsets=offsets,
            features=self._rows(index),
            targets=self.targets[index],
            source_split=None if self.source_split is None else self.source_split[index],
            gaps=None if self.gaps is None else self.gaps[index],
        )

    def _rows(self, index: NDArray[np.int64]) -> Any:
        if self.is_sparse or self.mapped is None or len(index) == 0:
            return self.features[index]
        folder = Path(tempfile.mkdtemp(prefix="part-", dir=Path(self.mapped).parent))
        shape = (len(index), *self.features.shape[1:])
        written = np.lib.format.open_memmap(
            folder / "features.npy", mode="w+", dtype=np.float32, shape=shape
        )
        for start in range(0, len(index), _CHUNK):
            written[start : start + _CHUNK] = self.features[index[start : start + _CHUNK]]
        written.flush()
        rows = np.load(folder / "features.npy", mmap_mode="c")
        weakref.finalize(rows, shutil.rmtree, folder, ignore_errors=True)
        return rows if isinstance(self.features, np.ndarray) else _as_tensor(rows)

    def tensors(self) -> FederatedDataset:
        """Return the same rows as tensors, without a copy; sparse features stay CSR."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["targets"] = _as_tensor(self.targets)
        if not self.is_sparse:
            values["features"] = _as_tensor(self.features)
        return FederatedDataset(**values)


@dataclass(frozen=True, repr=False)
class FederatedDataset(ClientArrays):
    """Named clients with ragged rows, as tensors. See `ClientArrays` for the attributes."""

    features: Features
    targets: Tensor

    def arrays(self) -> ClientArrays:
        """Return the same rows as NumPy arrays, without a copy where they are on the CPU."""
        import torch

        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("features", "targets"):
            if isinstance(values[name], torch.Tensor):
                values[name] = values[name].cpu().numpy()
        return ClientArrays(**values)

    def to(self, device: torch.device | str) -> FederatedDataset:
        """Move dense rows to a device (sparse rows stay on the CPU)."""
        import torch

        if torch.device(device) == self.targets.device:
            return self
        if not isinstance(self.features, torch.Tensor):
            raise DataError(f"{self.title}: sparse rows run on the CPU only, not on {device}")
        return replace(self, features=self.features.to(device), targets=self.targets.to(device))

    def clients(self, ids: NDArray[np.int64]) -> Clients:
        """Put the named clients side by side, in the order given."""
        import torch

        starts = self.offsets[ids]
        return Clients(
            spec=self.spec,
            ids=torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)),
            starts=torch.from_numpy(starts),
            counts=torch.from_numpy(self.offsets[ids + 1] - starts),
            features=self.features,
            targets=self.targets,
            ranks=torch.arange(len(ids)),
            width=len(ids),
            memory=self._memory,
        )

    @cached_property
    def _memory(self) -> dict[str, Any]:
        return {}

    def forget(self) -> None:
        """Clear the cache of values derived from the rows, after rows were changed in place."""
        self._memory.clear()

    def blocks(
        self, ids: NDArray[np.int64], size: int, owned: range | None = None
    ) -> Iterator[Clients]:
        """Yield clients in blocks of at most `size`, sorted by their number of rows.

        Rows that are padded to the longest client of a block are at most `_PADDED` values, so the
        memory of a block is bounded by public numbers: that, and the largest client alone.

        With `owned`, only these clients are yielded. Their `ranks` and `width` are those among all
        `ids`, so that their results are the same to the last bit.
        """
        import torch

        ids = np.sort(np.asarray(ids, dtype=np.int64))
        width, before = min(size, len(ids)), 0
        if owned is not None:
            before, end = np.searchsorted(ids, (owned.start, owned.stop))
            ids = ids[before:end]
        counts = self.offsets[ids + 1] - self.offsets[ids]
        order = np.argsort(counts, kind="stable")
        ordered, values = ids[order], np.maximum(counts[order], 1) * self.spec.features
        start = 0
        while start < len(ordered):
            # Counts rise, so the last client of a block is its longest.
            window = values[start : start + size]
            taken = max(1, int((np.arange(1, len(window) + 1) * window <= _PADDED).sum()))
            ranks = torch.from_numpy(order[start : start + taken] + before)
            block = self.clients(ordered[start : start + taken])
            yield replace(block, ranks=ranks, width=width)
            start += taken

    def split(self, test: float | int, seed: int) -> tuple[FederatedDataset, FederatedDataset]:
        """Split inside every client, at random; a client always keeps a row for training.

        `test` is a share of each client's rows (float, rounded to the nearest row), or a number of
        rows per client (int).
        """
        if not (0 < test < 1 or (isinstance(test, int) and test >= 1)):
            raise DataError(
                f"test = {test!r}: expected a share between 0 and 1 or a row count >= 1"
            )
        counts = self.counts
        wanted = np.full_like(counts, test) if isinstance(test, int) else np.rint(counts * test)
        held = np.minimum(wanted.astype(np.int64), np.maximum(counts - 1, 0))
        is_test = self._draw(held, _stream(seed).at("split"))
        return _filled(self.where(~is_test), self.where(is_test))

    def _draw(self, wanted: NDArray[np.int64], rng: Rng) -> NDArray[np.bool_]:
        """Draw `wanted` rows of each client; a smaller draw is a subset of a larger one.

        Each client has its own random stream. If the number of rows of one client decided which
        rows others train on, it would influence their releases beyond the clip.
        """
        owner = self.owners
        rank = np.arange(len(owner)) - self.offsets[:-1][owner]
        order = np.lexsort((rng.words(owner, rank), owner))
        drawn = np.zeros(len(owner), dtype=bool)
        drawn[order] = rank < wanted[owner]
        return drawn

    def split_by_source(self) -> tuple[FederatedDataset, FederatedDataset]:
        """Split as the source declares."""
        if self.source_split is None:
            raise DataError(f"{self.title} declares no split; use split(test=..., seed=...)")
        return _filled(self.where(self.source_split == 0), self.where(self.source_split == 1))

    def where(self, keep: NDArray[np.bool_]) -> FederatedDataset:
        """Keep some rows of every client; clients stay, even without rows."""
        counts = np.bincount(self.owners[keep], minlength=len(self))
        return self._take(np.flatnonzero(keep), offsets_of(counts), self.spec, self.names)

    def at_most(self, rows: int, seed: int) -> FederatedDataset:
        """Keep at most `rows` rows of each client, drawn at random.

        Rows keep their order, and the rows of a smaller number are among those of a larger one. The
        random stream differs from that of `split`.
        """
        if rows < 1:
            raise DataError(f"rows = {rows}: expected at least 1 row of each client")
        wanted = np.minimum(self.counts, rows)
        if (wanted == self.counts).all():
            return self
        part = self.where(self._draw(wanted, _stream(seed).at("at_most")))
        return replace(part, notes=(*self.notes, f"at most {rows} rows of each client kept"))

    def fingerprint(self) -> str:
        """Return a hash of sizes, targets and a sample of features, to notice changed rows.

        It is computed from private rows: store it only where the rows are stored.
        """
        import torch

        digest = hashlib.blake2b(repr(self.spec).encode(), digest_size=16)
        digest.update(self.offsets.tobytes())
        digest.update(self.targets.cpu().contiguous().numpy().tobytes())
        values = self.features if isinstance(self.features, torch.Tensor) else self.features.data
        every = max(1, len(values) * int(np.prod(values.shape[1:], dtype=np.int64)) // _HASHED)
        sample = values[::every]
        sample = sample.cpu() if isinstance(sample, torch.Tensor) else sample
        digest.update(np.ascontiguousarray(sample).tobytes())
        return digest.hexdigest()


def fill_gaps(
    features: NDArray[np.float32],
    gaps: NDArray[np.bool_],
    offsets: NDArray[np.int64],
    fills: NDArray[np.float32],
) -> None:
    """Fill gaps with each client's row of `fills`, in place."""
    for client, (start, end) in enumerate(pairwise(offsets)):
        np.copyto(features[start:end], fills[client], where=gaps[start:end])


def client_medians(
    features: NDArray[np.float32], gaps: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the medians of each client's own values, (clients, features); 0 if it has none.

    **Guarantee:** row k of the result depends on the rows of client k only.
    """
    fills = np.zeros((len(offsets) - 1, features.shape[1]), dtype=np.float32)
    for client, (start, end) in enumerate(pairwise(offsets)):
        known = ~gaps[start:end].all(axis=0)
        own = np.where(gaps[start:end], np.nan, features[start:end])[:, known]
        if own.size:
            fills[client, known] = np.nanmedian(own, axis=0)
    return fills


def _filled(
    train: FederatedDataset, test: FederatedDataset
) -> tuple[FederatedDataset, FederatedDataset]:
    """Return both with gaps filled by the medians of the clients' training rows."""
    if train.gaps is None or test.gaps is None:
        return train, test
    own: Any = train.features.flatten(1).numpy()
    fills = client_medians(own, train.gaps, train.offsets)
    for part, gaps in ((train, train.gaps), (test, test.gaps)):
        flat: Any = part.features.flatten(1).numpy()
        fill_gaps(flat, gaps, part.offsets, fills)
    kept = {**train.scaling, "fills": fills}
    return replace(train, scaling=kept), replace(test, scaling=kept)


def offsets_of(counts: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Return row ranges: client k has the rows from entry k to entry k + 1."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    import torch

    return torch.from_numpy(array)


def _stream(seed: int) -> Rng:
    from coterie.core.rng import Rng

    return Rng.seeded(seed)


def _masked(found: Tensor, mask: Tensor) -> Tensor:
    import torch

    wide = mask.reshape(*mask.shape, *([1] * (found.dim() - mask.dim()))).to(found.device)
    return torch.where(wide, found, torch.zeros_like(found))


def describe(data: ClientArrays) -> dict[str, Any]:
    """Return a summary of the data that can be written as JSON.

    The summary is for the owner of the data. No guarantee covers it: do not pass it to a method
    and do not publish it. `sd` and `skew` are population values; the skew of equal counts is 0.
    `classes_per_client` counts the labels that occur in a client; regression has none.
    """
    found: dict[str, Any] = {
        "title": data.title,
        "task": data.spec.task,
        "outputs": data.spec.outputs,
        "clients": len(data),
        "rows": int(data.offsets[-1]),
        "rows_per_client": _distribution(data.counts),
        "features": data.spec.features,
        "shape": list(data.spec.shape),
        "sparse": data.is_sparse,
        "split": None,
        "notes": list(data.notes),
    }
    if data.source_split is not None:
        test = int((data.source_split == 1).sum())
        found["split"] = {"train": found["rows"] - test, "test": test}
    if data.spec.task != "regression":
        classes = _distribution(_classes(data))
        found["classes_per_client"] = {name: classes[name] for name in ("min", "median", "max")}
    return found


def _distribution(counts: NDArray[np.int64]) -> dict[str, float]:
    mean, sd = float(counts.mean()), float(counts.std())
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
        "mean": mean,
        "sd": sd,
        "skew": float(((counts - mean) ** 3).mean() / sd**3) if sd > 0 else 0.0,
    }


def _classes(data: ClientArrays) -> NDArray[np.int64]:
    """Count the labels that occur in each client."""
    y = np.asarray(data.targets if isinstance(data.targets, np.ndarray) else data.targets.cpu())
    owner = data.owners
    size = max(data.spec.outputs, 2)
    if data.spec.task == "multilabel":
        rows, labels = np.nonzero(y)
        pairs = owner[rows] * size + labels
    else:
        pairs = owner * size + y.astype(np.int64)
    return np.bincount(np.unique(pairs) // size, minlength=len(data))
