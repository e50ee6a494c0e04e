"""Generated clients whose true models are known.

Scores are `weight_k x + bias_k` for a row x of client k, plus normal noise; what the task makes of
a score is said in `synthetic`. Scales are the same for every kind: entries of x are N(0, 1), so
rows have norm about sqrt(features); a shared model has norm about 1, so scores have variance about
1; a client's model lies about `spread` from the shared one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse as scipy_sparse

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import TASKS, DataError, Features, FederatedDataset, Spec, Task

Kind = Literal["mean", "low_rank", "group_sparse", "clusters", "shift_scale"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Floats = NDArray[np.float32]

_BLOCK = 1 << 24  # numbers worked on at a time


@dataclass(frozen=True, eq=False)
class ClientNames(Sequence[str]):
    """The names prefix0, prefix1, ..., made when asked for: a million of them take no memory.

    >>> ClientNames(3)[1], ClientNames(3) == ["client 0", "client 1", "client 2"]
    ('client 1', True)
    """

    total: int
    prefix: str = "client "

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        places = range(self.total)
        if isinstance(place, slice):
            return tuple(f"{self.prefix}{number}" for number in places[place])
        return f"{self.prefix}{places[place]}"

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not name.startswith(self.prefix):
            return False
        digits = name.removeprefix(self.prefix)
        return digits.isdecimal() and str(int(digits)) == digits and int(digits) < self.total

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClientNames):
            return (self.total, self.prefix) == (other.total, other.prefix)
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(other) == self.total and all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Synthetic:
    """Generated clients and what generated them.

    Attributes:
        data: The clients' rows.
        truth: Their true models, stacked: weight (clients, outputs, features), bias (clients,
            outputs).
        shared: The model that clients' models scatter around: weight (outputs, features), bias
            (outputs,); for the kind "clusters" the centres, stacked.
        cluster: For the kind "clusters", the number of each client's centre, shape (clients,).
    """

    data: FederatedDataset
    truth: Tree
    shared: Tree
    cluster: torch.Tensor | None = None


@dataclass(frozen=True)
class _Size:
    clients: int
    outputs: int
    features: int


@dataclass(frozen=True)
class _Weights:
    own: Floats  # (clients, outputs, features)
    shared: Floats  # (outputs, features), or (centres, outputs, features)
    cluster: NDArray[np.int64] | None = None


def synthetic(  # noqa: PLR0913 - a generator is its options
    kind: Kind = "mean",
    *,
    clients: int = 100,
    rows: int | Sequence[int] = 20,
    features: int = 10,
    task: Task = "regression",
    outputs: int | None = None,
    spread: float = 0.5,
    noise: float = 0.5,
    rank: int | None = None,
    active: int | None = None,
    centres: int | None = None,
    density: float | None = None,
    sparse: bool = False,
    unit_rows: bool = False,
    intercept: bool = True,
    seed: int = 0,
) -> Synthetic:
    """Generate clients whose true models are known.

    With s the scores with noise, targets are s (regression), 1 where s > 0 (binary, multilabel) or
    the largest of s (multiclass). Models depend on the seed and not on the number of rows.

    Args:
        kind: "mean": models scatter around one; "low_rank": also, inside a subspace of dimension
            `rank` (all outputs' weights in the same); "group_sparse": also, with the same `active`
            features and zeros elsewhere; "clusters": around one of `centres` models each;
            "shift_scale": as "mean", and each client's x have their own means (N(0, 1)) and
            standard deviations (log-normal, exp N(0, 1/4)), column by column.
        clients: How many clients.
        rows: Rows of each client, or (fewest, most), then drawn uniformly.
        features: Numbers in one row.
        task: What the targets are.
        outputs: Classes or labels, 3 unless told; 1 for regression and binary.
        spread: Distance of a client's model from the shared model, whose norm is about 1.
        noise: Standard deviation of the noise on the scores.
        rank: Of "low_rank", 2 unless told.
        active: Of "group_sparse", a fifth of the features unless told.
        centres: Of "clusters", 3 unless told.
        density: Share of non-zeros in a sparse row, 0.1 unless told.
        sparse: Make CSR features, one non-zero in each of density * features stretches of columns
            of about equal length, N(0, 1 / density).
        unit_rows: Scale each row to l2 norm 1, and weights by sqrt(features), which leaves the
            scores as large as before.
        intercept: Whether true models have a bias (of size 1/2); else it is 0.
        seed: Seed of everything.

    Raises:
        DataError: If an option is out of range or belongs to another kind.
    """
    size = _Size(clients, _outputs(task, outputs), features)
    _check(kind, size, spread=spread, noise=noise, sparse=sparse, density=density)
    extent = _extent(kind, size, {"rank": rank, "active": active, "centres": centres})
    rng = Rng.seeded(seed).at("synthetic", kind)
    weights = _MODELS[kind](size, extent, spread, rng.at("weights").numpy())
    bias, shared_bias = _biases(size, weights, spread if intercept else None, rng.at("bias"))
    if unit_rows:
        stretch = np.float32(np.sqrt(features))
        weights = _Weights(weights.own * stretch, weights.shared * stretch, weights.cluster)
    counts = _counts(rows, clients, rng.at("counts").numpy())
    owner = np.repeat(np.arange(clients), counts)
    inputs: Features
    if sparse:
        filled = max(1, round((0.1 if density is None else density) * features))
        inputs, scores = _sparse_rows(owner, weights.own, filled, unit_rows, rng.at("rows"))
    else:
        moments = _moments(size, rng.at("moments")) if kind == "shift_scale" else None
        inputs, scores = _dense_rows(owner, weights.own, moments, unit_rows, rng.at("rows"))
    scores += bias[owner]
    scores += _noise(scores.shape, noise, rng.at("noise"))
    data = FederatedDataset(
        spec=Spec(shape=(features,), outputs=size.outputs, task=task, clients=clients),
        names=ClientNames(clients),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        features=inputs,
        targets=_targets(task, scores),
        title=f"synthetic:{kind}",
        notes=(f"generated: {kind}, spread {spread:g}, noise {noise:g}, seed {seed}",),
    )
    return Synthetic(
        data=data,
        truth=_tree(weights.own, bias),
        shared=_tree(weights.shared, shared_bias),
        cluster=None if weights.cluster is None else torch.from_numpy(weights.cluster),
    )


def _tree(weight: Floats, bias: Floats) -> Tree:
    return {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}


def _outputs(task: str, outputs: int | None) -> int:
    if task not in TASKS:
        raise DataError(f"task = {task!r}: expected one of {', '.join(TASKS)}")
    several = task in ("multiclass", "multilabel")
    chosen = (3 if several else 1) if outputs is None else outputs
    if chosen < 1 or (several and chosen < 2) or (not several and chosen > 1):
        raise DataError(
            f"outputs = {outputs}: a {task} task has {'at least 2' if several else 'exactly 1'}"
        )
    return chosen


def _check(
    kind: str, size: _Size, *, spread: float, noise: float, sparse: bool, density: float | None
) -> None:
    if kind not in KINDS:
        raise DataError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    if size.clients < 1 or size.features < 1:
        raise DataError(f"{size.clients} clients with {size.features} features: expected 1 or more")
    if not (spread >= 0 and noise >= 0):
        raise DataError(f"spread = {spread}, noise = {noise}: expected numbers of 0 or more")
    if density is not None and not (sparse and 0 < density <= 1):
        raise DataError(f"density = {density}: expected above 0, at most 1, with sparse = True")
    if sparse and kind == "shift_scale":
        raise DataError("shift_scale would fill sparse rows; use another kind, or dense rows")


def _extent(kind: str, size: _Size, given: dict[str, int | None]) -> int:
    """Resolve the one option that belongs to the kind: its rank, active features or centres."""
    own, default, most = {
        "low_rank": ("rank", min(2, size.features), size.features),
        "group_sparse": ("active", max(1, size.features // 5), size.features),
        "clusters": ("centres", min(3, size.clients), size.clients),
    }.get(kind, ("", 0, 0))
    for name, value in given.items():
        if value is not None and name != own:
            raise DataError(f"{name} = {value} is not an option of the kind {kind!r}")
    asked = given.get(own)
    value = default if asked is None else asked
    if own and not 1 <= value <= most:
        raise DataError(f"{own} = {value}: expected 1 to {most}")
    return value


def _counts(
    rows: int | Sequence[int], clients: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    pair = (rows, rows) if isinstance(rows, int) else tuple(rows)
    if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
        raise DataError(f"rows = {rows!r}: expected a number of 1 or more, or (fewest, most)")
    return generator.integers(pair[0], pair[1], size=clients, endpoint=True)


def _scatter(
    generator: np.random.Generator, size: _Size, width: int, spread: float
) -> tuple[Floats, Floats]:
    """Draw one shared and one own vector a client, of norms about 1 and distances about spread."""
    unit = np.float32(1 / np.sqrt(width))
    shared = generator.standard_normal((size.outputs, width), dtype=np.float32) * unit
    own = generator.standard_normal((size.clients, size.outputs, width), dtype=np.float32)
    own *= np.float32(spread) * unit
    own += shared
    return own, shared


def _mean(size: _Size, extent: int, spread: float, generator: np.random.Generator) -> _Weights:
    return _Weights(*_scatter(generator, size, size.features, spread))


def _low_rank(size: _Size, extent: int, spread: float, generator: np.random.Generator) -> _Weights:
    basis = generator.standard_normal((extent, size.features), dtype=np.float32)
    basis /= np.float32(np.sqrt(size.features))
    own, shared = _scatter(generator, size, extent, spread)
    return _Weights(own @ basis, shared @ basis)


def _group_sparse(
    size: _Size, extent: int, spread: float, generator: np.random.Generator
) -> _Weights:
    columns = np.sort(generator.permutation(size.features)[:extent])
    few, shared_few = _scatter(generator, size, extent, spread)
    own = np.zeros((size.clients, size.outputs, size.features), dtype=np.float32)
    shared = np.zeros(own.shape[1:], dtype=np.float32)
    own[..., columns], shared[..., columns] = few, shared_few
    return _Weights(own, shared)


def _clusters(size: _Size, extent: int, spread: float, generator: np.random.Generator) -> _Weights:
    unit = np.float32(1 / np.sqrt(size.features))
    centres = generator.standard_normal((extent, size.outputs, size.features), dtype=np.float32)
    centres *= unit
    cluster = generator.permutation(np.arange(size.clients) % extent)
    own = generator.standard_normal((size.clients, *centres.shape[1:]), dtype=np.float32)
    own *= np.float32(spread) * unit
    own += centres[cluster]
    return _Weights(own, centres, cluster)


_MODELS: dict[str, Callable[[_Size, int, float, np.random.Generator], _Weights]] = {
    "mean": _mean,
    "low_rank": _low_rank,
    "group_sparse": _group_sparse,
    "clusters": _clusters,
    "shift_scale": _mean,
}


def _biases(
    size: _Size, weights: _Weights, spread: float | None, rng: Rng
) -> tuple[Floats, Floats]:
    """Draw own and shared biases of size 1/2; zeros if spread is None."""
    shape = weights.shared.shape[:-1]
    if spread is None:
        return np.zeros((size.clients, size.outputs), np.float32), np.zeros(shape, np.float32)
    generator = rng.numpy()
    shared = generator.standard_normal(shape, dtype=np.float32)
    shared *= np.float32(0.5)
    own = generator.standard_normal((size.clients, size.outputs), dtype=np.float32)
    own *= np.float32(spread / 2)
    own += shared if weights.cluster is None else shared[weights.cluster]
    return own, shared


def _moments(size: _Size, rng: Rng) -> tuple[Floats, Floats]:
    generator, shape = rng.numpy(), (size.clients, size.features)
    shift = generator.standard_normal(shape, dtype=np.float32)
    width = generator.standard_normal(shape, dtype=np.float32)
    width *= np.float32(0.5)
    return shift, np.exp(width, out=width)


def _noise(shape: tuple[int, ...], scale: float, rng: Rng) -> Floats:
    drawn = rng.numpy().standard_normal(shape, dtype=np.float32)
    drawn *= np.float32(scale)
    return drawn


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK // width)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _dense_rows(
    owner: NDArray[np.int64],
    weight: Floats,
    moments: tuple[Floats, Floats] | None,
    unit_rows: bool,
    rng: Rng,
) -> tuple[torch.Tensor, Floats]:
    """Draw rows (rows, features) and their scores (rows, outputs)."""
    _, outputs, features = weight.shape
    x = rng.numpy().standard_normal((len(owner), features), dtype=np.float32)
    scores = np.empty((len(owner), outputs), dtype=np.float32)
    for rows in _blocks(len(owner), outputs * features):
        if moments is not None:
            shift, width = moments
            x[rows] = x[rows] * width[owner[rows]] + shift[owner[rows]]
        if unit_rows:
            x[rows] /= np.linalg.norm(x[rows], axis=1, keepdims=True)
        scores[rows] = np.einsum("nd,nod->no", x[rows], weight[owner[rows]])
    return torch.from_numpy(x), scores


def _sparse_rows(
    owner: NDArray[np.int64], weight: Floats, filled: int, unit_rows: bool, rng: Rng
) -> tuple[scipy_sparse.csr_matrix, Floats]:
    """Draw CSR rows with `filled` entries each, and their scores."""
    _, outputs, features = weight.shape
    edges = np.arange(filled + 1) * features // filled
    columns = rng.at("columns").numpy().random((len(owner), filled), dtype=np.float32)
    # float32 times a width may round up to the width itself.
    columns = np.minimum((columns * np.diff(edges)).astype(np.int32), np.diff(edges) - 1)
    columns += edges[:-1].astype(columns.dtype)
    values = rng.numpy().standard_normal((len(owner), filled), dtype=np.float32)
    values *= np.float32(np.sqrt(features / filled))
    scores = np.empty((len(owner), outputs), dtype=np.float32)
    for rows in _blocks(len(owner), outputs * filled):
        if unit_rows:
            values[rows] /= np.linalg.norm(values[rows], axis=1, keepdims=True)
        picked = weight[owner[rows, None], :, columns[rows]]
        scores[rows] = np.einsum("nf,nfo->no", values[rows], picked)
    starts = np.arange(len(owner) + 1, dtype=np.int64) * filled
    parts = (values.reshape(-1), columns.reshape(-1), starts)
    return scipy_sparse.csr_matrix(parts, shape=(len(owner), features)), scores


def _targets(task: str, scores: Floats) -> torch.Tensor:
    found = torch.from_numpy(scores)
    if task == "multiclass":
        return found.argmax(dim=1)
    if task == "multilabel":
        return (found > 0).float()
    return found[:, 0] if task == "regression" else (found[:, 0] > 0).float()
