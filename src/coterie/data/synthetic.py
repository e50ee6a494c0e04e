"""Generated clients whose true models are known, and the simulations of published papers.

In `synthetic`, scores are `weight_k x + bias_k` for a row x of client k, plus normal noise; the
task turns scores into targets. All kinds have the same scales: entries of x are N(0, 1), so rows
have norm about sqrt(features); a shared model has norm about 1, so scores have variance about 1; a
client's model lies about `spread` from the shared one.

`mpmtl_low_rank`, `mpmtl_group_sparse` and `figure2` are the simulations of Liang, Liu, Zhou, Jiang,
Zhang, Wang, "Model-Protected Multi-Task Learning"; `mtlsvm_regression` is that of
Ponomarenko-Timofeev et al., MTL-SVM. Their docstrings state what the papers leave open. `mixed` has
situations in which a linear model with one prior for all clients fails. In these, training and test
rows are drawn apart and declared as the source's split.

Everything follows from the seed. Clients are drawn one after the other, so that the clients of a
smaller federation are the first of a larger one.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse as scipy_sparse

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import TASKS, DataError, FederatedDataset, Spec, Task, offsets_of

Kind = Literal["mean", "low_rank", "group_sparse", "clusters", "shift_scale"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Mixed = Literal[
    "nonlinear", "clusters", "rank2", "heavy_tails", "outliers", "unrelated", "opposed",
    "skewed_classes", "wide",
]  # fmt: skip
MIXED: tuple[Mixed, ...] = get_args(Mixed)
Floats = NDArray[np.float32]

LOW_RANK_SCALE = 2.25
"""Approximate standard deviation of x w_k in the low-rank simulation."""
LOW_RANK_JITTER = 0.3
"""Distance between clients of a group, in units of their common direction."""
SMALLEST, LARGEST = 1.0, 50.0
"""Range of the absolute values of the group-sparse simulation's weights."""
LARGEST_MEAN = 1.0
"""Unequal clients of `mtlsvm_regression`: the means of their rows lie within +- this."""
LARGEST_DEVIATION = 2.0
"""Unequal clients of `mtlsvm_regression`: standard deviations lie between 1 over this and this."""
_BLOCK = 1 << 24  # values processed at a time


@dataclass(frozen=True, eq=False)
class ClientNames(Sequence[str]):
    """The names prefix0, prefix1, ..., made on demand, so that a million take no memory.

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
        return len(other) == self.total and all(map(operator.eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Synthetic:
    """Generated clients and their true models.

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


class _Size(NamedTuple):
    clients: int
    outputs: int
    features: int


class _Weights(NamedTuple):
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
        clients: The number of clients.
        rows: Rows of each client, or (fewest, most), then drawn uniformly.
        features: The number of features.
        task: What the targets are.
        outputs: Classes or labels, default 3; 1 for regression and binary.
        spread: Distance of a client's model from the shared model, whose norm is about 1.
        noise: Standard deviation of the noise on the scores.
        rank: Of "low_rank", default 2.
        active: Of "group_sparse", default a fifth of the features.
        centres: Of "clusters", default 3.
        density: Share of non-zeros in a sparse row, default 0.1.
        sparse: Make CSR features, one non-zero in each of density * features stretches of columns
            of about equal length, N(0, 1 / density).
        unit_rows: Scale each row to l2 norm 1, and weights by sqrt(features), which leaves the
            scores as large as before.
        intercept: Whether true models have a bias (of size 1/2); else it is 0.
        seed: Seed of everything.

    Raises:
        DataError: If an option is out of range or belongs to another kind.
    """
    _check(kind, task, sparse, density)
    _check_range(1, clients=clients, features=features)
    _check_range(0, spread=spread, noise=noise)
    size = _Size(clients, _outputs(task, outputs), features)
    extent = _extent(kind, size, {"rank": rank, "active": active, "centres": centres})
    rng = Rng.seeded(seed).at("synthetic", kind)
    weights = _MODELS[kind](size, extent, spread, rng.at("weights").numpy())
    bias, shared_bias = _biases(size, weights, spread if intercept else None, rng.at("bias"))
    if unit_rows:
        stretch = np.float32(np.sqrt(features))
        weights = _Weights(weights.own * stretch, weights.shared * stretch, weights.cluster)
    counts = _counts(rows, clients, rng.at("counts").numpy())
    owner = np.repeat(np.arange(clients), counts)
    inputs: Any
    if sparse:
        filled = max(1, round((0.1 if density is None else density) * features))
        inputs, scores = _sparse_rows(owner, weights.own, filled, unit_rows, rng.at("rows"))
    else:
        moments = _moments(size, rng.at("moments")) if kind == "shift_scale" else None
        inputs, scores = _dense_rows(owner, weights.own, moments, unit_rows, rng.at("rows"))
    scores += bias[owner]
    scores += _normal(rng.at("noise"), scores.shape) * np.float32(noise)
    data = FederatedDataset(
        spec=Spec(shape=(features,), outputs=size.outputs, task=task, clients=clients),
        names=ClientNames(clients),
        offsets=offsets_of(counts),
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


def _tree(weight: Floats, bias: Floats | None = None) -> Tree:
    bias = np.zeros(weight.shape[:-1], np.float32) if bias is None else bias
    return {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}


def _outputs(task: str, outputs: int | None) -> int:
    several = task in ("multiclass", "multilabel")
    chosen = (3 if several else 1) if outputs is None else outputs
    if chosen < 1 or (several and chosen < 2) or (not several and chosen > 1):
        raise DataError(
            f"outputs = {outputs}: a {task} task has {'at least 2' if several else 'exactly 1'}"
        )
    return chosen


def _check(kind: str, task: str, sparse: bool, density: float | None) -> None:
    for name, value, known in (("kind", kind, KINDS), ("task", task, TASKS)):
        if value not in known:
            raise DataError(f"{name} = {value!r}: expected one of {', '.join(known)}")
    if density is not None and not (sparse and 0 < density <= 1):
        raise DataError(f"density = {density}: expected above 0, at most 1, with sparse = True")
    if sparse and kind == "shift_scale":
        raise DataError("shift_scale would fill sparse rows; use another kind, or dense rows")


def _check_range(low: float, high: float = sys.float_info.max, **values: float) -> None:
    """Raise DataError for a value outside of [low, high]."""
    for name, value in values.items():
        if not low <= value <= high:
            upto = " or more" if high == sys.float_info.max else f" to {high:g}"
            raise DataError(f"{name} = {value}: expected {low:g}{upto}")


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
    if own:
        _check_range(1, most, **{own: value})
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
    """Draw one shared vector of norm about 1, and one per client at distance about spread."""
    unit = np.float32(1 / np.sqrt(width))
    shared = _normal(generator, (size.outputs, width)) * unit
    own = _normal(generator, (size.clients, size.outputs, width))
    own *= np.float32(spread) * unit
    own += shared
    return own, shared


def _mean(size: _Size, extent: int, spread: float, generator: np.random.Generator) -> _Weights:
    return _Weights(*_scatter(generator, size, size.features, spread))


def _low_rank(size: _Size, extent: int, spread: float, generator: np.random.Generator) -> _Weights:
    basis = _normal(generator, (extent, size.features))
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
    centres = _normal(generator, (extent, size.outputs, size.features)) * unit
    cluster = generator.permutation(np.arange(size.clients) % extent)
    own = _normal(generator, (size.clients, *centres.shape[1:]))
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
    shared = _normal(generator, shape) * np.float32(0.5)
    own = _normal(generator, (size.clients, size.outputs)) * np.float32(spread / 2)
    own += shared if weights.cluster is None else shared[weights.cluster]
    return own, shared


def _moments(size: _Size, rng: Rng) -> tuple[Floats, Floats]:
    generator, shape = rng.numpy(), (size.clients, size.features)
    shift = _normal(generator, shape)
    return shift, np.exp(_normal(generator, shape) * np.float32(0.5))


def _normal(stream: Rng | np.random.Generator, shape: tuple[int, ...]) -> Floats:
    generator = stream.numpy() if isinstance(stream, Rng) else stream
    return generator.standard_normal(shape, dtype=np.float32)


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
    x = _normal(rng, (len(owner), features))
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
    values = _normal(rng, (len(owner), filled))
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


def mpmtl_low_rank(
    *,
    clients: int = 320,
    train: int = 30,
    test: int = 270,
    features: int = 30,
    rank: int = 5,
    noise: float = 1.0,
    seed: int = 0,
) -> Synthetic:
    """Generate the low-rank simulation: related, opposed and unrelated clients.

    The paper draws W (features x clients) from MatrixNormal(0, I, Sigma) and shows Sigma as a
    picture only. Here Sigma = s^2 B B^T with s = `LOW_RANK_SCALE`, so that W = s A B^T with A
    (features x rank) of independent N(0, 1) entries. Row b_k of B (clients x rank) is a unit
    vector: client k is in group g = k mod 2 rank, whose direction is +e_g for g < rank and
    -e_(g - rank) for the others, and b_k = (direction + j u_k) / |direction + j u_k| with
    u_k ~ N(0, I / rank) and j = `LOW_RANK_JITTER`. So Sigma has blocks (clients put in order of
    their groups) of correlations about 0.9 inside a group, -0.9 between a group and its opposite,
    and 0 elsewhere; its rank is min(rank, clients), and so is that of W.

    At the defaults, with the best penalties, local ridge regression has test nMSE 0.478 +- 0.009
    and the trace norm without privacy 0.239 +- 0.007 (8 seeds).

    The noise on targets has standard deviation `noise`. The paper's is 1, which leaves a test nMSE
    of about 1 / (1 + s^2) = 0.165 to the true models here. Its non-private 0.014 means that its own
    Sigma was larger; noise = 0.22 gives 0.0146 (local training: 0.107).

    `shared` are the groups' models s A direction, stacked, and `cluster` the clients' groups.

    Raises:
        DataError: If an option is out of range.
    """
    _check_range(1, clients=clients, train=train, features=features)
    _check_range(0, test=test, noise=noise)
    _check_range(1, features, rank=rank)
    rng = Rng.seeded(seed).at("mpmtl", "low_rank")
    basis = rng.at("basis").numpy().standard_normal((features, rank))
    directions = np.concatenate([np.eye(rank), -np.eye(rank)])
    group = np.arange(clients) % len(directions)
    apart = rng.at("jitter").numpy().standard_normal((clients, rank)) / math.sqrt(rank)
    rows = directions[group] + LOW_RANK_JITTER * apart
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return _generate(
        f"low_rank, rank {rank}",
        weight=LOW_RANK_SCALE * rows @ basis.T,
        shared=LOW_RANK_SCALE * (directions @ basis.T)[:, None],
        cluster=torch.from_numpy(group),
        sizes=(train, test),
        noise=noise,
        seed=seed,
        rng=rng,
    )


def mpmtl_group_sparse(
    *,
    clients: int = 320,
    train: int = 30,
    test: int = 270,
    features: int = 30,
    active: int = 4,
    noise: float = 1.0,
    seed: int = 0,
) -> Synthetic:
    """Generate the group-sparse simulation: all clients use the same few features.

    The first `active` weights of every client are independent and uniform on [-50, -1] and
    [1, 50], the others 0. `shared` is the models' mean, 0.

    Raises:
        DataError: If an option is out of range.
    """
    _check_range(1, clients=clients, train=train, features=features)
    _check_range(0, test=test, noise=noise)
    _check_range(1, features, active=active)
    rng = Rng.seeded(seed).at("mpmtl", "group_sparse")
    # One draw gives size and sign, so that a client's draws are consecutive.
    drawn = rng.at("weights").numpy().uniform(-1, 1, (clients, active))
    few = np.sign(drawn) * (SMALLEST + (LARGEST - SMALLEST) * np.abs(drawn))
    weight = np.zeros((clients, features))
    weight[:, :active] = few
    return _generate(
        f"group_sparse, {active} active features",
        weight=weight,
        shared=np.zeros((1, features)),
        cluster=None,
        sizes=(train, test),
        noise=noise,
        seed=seed,
        rng=rng,
    )


def figure2(seed: int = 0) -> NDArray[np.float64]:
    """Return the 5 x 10 models (one per column) of the paper's Figure 2; the last is an outlier.

    Entries are U(0, 1), those of the last column times 100.

    >>> figure2().shape, bool(figure2()[:, :9].max() < 1 < figure2()[:, 9].max())
    ((5, 10), True)
    """
    models = Rng.seeded(seed).at("mpmtl", "figure2").numpy().random((5, 10))
    models[:, -1] *= 100
    return models


def _generate(
    what: str,
    *,
    weight: NDArray[np.float64],
    shared: NDArray[np.float64],
    cluster: torch.Tensor | None,
    sizes: tuple[int, int],
    noise: float,
    seed: int,
    rng: Rng,
) -> Synthetic:
    """Draw rows and targets for models of shape (clients, features)."""
    own = weight.astype(np.float32)
    parts = [
        _unit_rows(own, count, noise, rng.at(part))
        for part, count in zip(("train", "test"), sizes, strict=True)
    ]
    x, y = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    split = np.repeat(np.array([0, 1], dtype=np.int8), sizes)
    notes = (
        f"generated: {what}, noise {noise:g}, seed {seed}; after Liang et al., "
        "Model-Protected Multi-Task Learning",
        "rows have l2 norm 1; true models have no intercept",
    )
    data = _regression(x, y, split, title=f"mpmtl:{what.partition(',')[0]}", notes=notes)
    return Synthetic(data, _tree(own[:, None]), _tree(shared.astype(np.float32)), cluster)


def _unit_rows(weight: Floats, count: int, noise: float, rng: Rng) -> tuple[Floats, Floats]:
    """Draw the rows (clients, count, features) and targets (clients, count) of all clients."""
    clients, features = weight.shape
    x = _normal(rng.at("rows"), (clients, count, features))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    y = _normal(rng.at("noise"), (clients, count)) * np.float32(noise)
    y += np.einsum("knd,kd->kn", x, weight)
    return x, y


def _regression(x: Floats, y: Floats, split: NDArray[np.int8], **about: Any) -> FederatedDataset:
    """Return data of rows (clients, rows, features), with one split for every client."""
    clients, rows, features = x.shape
    return FederatedDataset(
        spec=Spec(shape=(features,), outputs=1, task="regression", clients=clients),
        names=ClientNames(clients),
        offsets=np.arange(clients + 1, dtype=np.int64) * rows,
        features=torch.from_numpy(x.reshape(-1, features)),
        targets=torch.from_numpy(y.reshape(-1)),
        source_split=np.tile(split, clients),
        **about,
    )


def mtlsvm_regression(
    *,
    clients: int = 20,
    rows: int = 200,
    features: int = 200,
    test: float | int = 0.3,
    snr_db: float = 20.0,
    unequal: bool = False,
    relatedness: float = 0.9,
    seed: int = 0,
) -> Synthetic:
    """Generate the regression simulation: y = x w_k + noise, without intercept.

    The model of client k is w_k = sqrt(r) w + sqrt(1 - r) u_k with w and all u_k independent
    N(0, I / features) and r = `relatedness`: w_k has norm about 1, any two of them correlation
    about r, and x w_k has variance about 1 where entries of x are N(0, 1).

    Entries of x are N(0, 1) for every client, or N(m_k, s_k^2) if `unequal`, with m_k uniform on
    [-1, 1] and s_k between 1/2 and 2, its logarithm uniform. The noise of client k is normal of
    variance s_k^2 |w_k|^2 / 10^(snr_db / 10): every client has the same signal-to-noise ratio,
    where signal is the variance of x w_k and not the square of its mean.

    The paper trains 20 clients on 200 rows of 200 features at 20 dB, 70 % of them for training. It
    does not state how the clients' models relate, nor how means and variances were set.

    At the defaults, the mean over clients of test R^2 (against the client's own mean) is 0.66 for
    local ridge, 0.88 for one ridge model of all clients and 0.94 for ridge on w + v_k, each with
    its best penalties (0.66, 0.82 and 0.94 if `unequal`); the true models have 0.99 (5 seeds,
    standard errors up to 0.01, 0.02 for one model of unequal clients).

    Each client has `rows` rows, training and test together: `test` is a share of them (float), or
    their number (int), declared as the source's split. `shared` is sqrt(r) w.

    Raises:
        DataError: If an option is out of range.
    """
    held = _test_rows(rows, test)
    _check_range(1, clients=clients, features=features)
    _check_range(0, 1, relatedness=relatedness)
    if not -math.inf < snr_db:
        raise DataError(f"snr_db = {snr_db}: expected decibels, such as 20; inf for no noise")
    rng = Rng.seeded(seed).at("mtlsvm", "regression")
    shared = _normal(rng.at("shared"), (1, features)) * math.sqrt(relatedness / features)
    own = _normal(rng.at("own"), (clients, features)) * math.sqrt((1 - relatedness) / features)
    own += shared
    x = _normal(rng.at("rows"), (clients, rows, features))
    deviation = np.ones(clients, dtype=np.float32)
    if unequal:
        drawn = rng.at("unequal").numpy().uniform(-1, 1, (clients, 2))
        deviation = (LARGEST_DEVIATION ** drawn[:, 1]).astype(np.float32)
        x *= deviation[:, None, None]
        x += (LARGEST_MEAN * drawn[:, 0]).astype(np.float32)[:, None, None]
    noise = deviation * np.linalg.norm(own, axis=1) * np.float32(10 ** (-snr_db / 20))
    y = np.einsum("knd,kd->kn", x, own) + _normal(rng.at("noise"), (clients, rows)) * noise[:, None]
    notes = (
        f"generated: {'unequal' if unequal else 'equal'} clients, relatedness {relatedness:g}, "
        f"{snr_db:g} dB, seed {seed}; after Ponomarenko-Timofeev et al., MTL-SVM",
        "true models have no intercept",
    )
    split = (np.arange(rows) >= rows - held).astype(np.int8)
    data = _regression(x, y, split, title="mtlsvm:regression", notes=notes)
    return Synthetic(data, _tree(own[:, None]), _tree(shared))


def _test_rows(rows: int, test: float | int) -> int:
    share = isinstance(test, float)
    sound = 0 <= test < (1 if share else rows)
    held = round(rows * test) if sound and share else test
    if not sound or held >= rows:
        raise DataError(
            f"rows = {rows}, test = {test}: expected a share from 0 to below 1, or a number of "
            "test rows that leaves at least 1 of the rows for training"
        )
    return int(held)


class _Situation(NamedTuple):
    """Clients, features, fewest and most training rows, deviations of client effects and noise."""

    clients: int
    features: int
    rows: tuple[int, int]
    spread: float
    noise: float


_SITUATIONS: dict[str, _Situation] = {
    "nonlinear": _Situation(500, 6, (15, 40), 0.3, 0.3),
    "clusters": _Situation(400, 10, (10, 20), 0.2, 0.4),
    "rank2": _Situation(400, 15, (8, 20), 1.2, 0.4),
    "heavy_tails": _Situation(300, 12, (4, 3000), 0.4, 0.5),
    "outliers": _Situation(300, 8, (10, 20), 0.3, 0.3),
    "unrelated": _Situation(200, 8, (10, 20), 1.0, 0.5),
    "opposed": _Situation(200, 8, (10, 20), 0.3, 0.5),
    "skewed_classes": _Situation(300, 12, (20, 60), 0.3, 1.0),
    "wide": _Situation(1000, 200, (15, 30), 0.3, 0.5),
}
MOST_NOISE = 10.0
"""Noise of `mixed("outliers")` is cut at this many scales, so that test errors have a mean."""
_LABELS = 20
_SKEW = 0.3  # of the Dirichlet distribution of a client's labels
_TAIL = 0.5  # of the Pareto distribution of numbers of rows


def mixed(
    kind: Mixed,
    *,
    clients: int | None = None,
    rows: tuple[int, int] | None = None,
    test: int = 20,
    seed: int = 0,
) -> Synthetic:
    """Generate a situation in which one linear model and one prior for all clients fall short.

    Client k has y = f(x) + x w_k + b_k + noise, with w_k = w + u_k, |w| about 1 and |u_k| about
    the spread s; b_k has mean 0 and deviation s / 2. Entries of x are N(0, 1), targets of about
    unit size. By kind (clients, features, training rows, s, deviation of noise):

    - "nonlinear" (500, 6, 15-40, .3, .3): w = 0 and f = sin(2 x_0) + (x_1^2 - 1) / 2 + x_2 x_3 for
      every client.
    - "clusters" (400, 10, 10-20, .2, .4): w is one of three unrelated ones, by client number
      modulo 3, with biases of deviation 1/2 between clusters.
    - "rank2" (400, 15, 8-20, 1.2, .4): all u_k lie in one plane, and neighbouring columns of x have
      correlation .7.
    - "heavy_tails" (300, 12, 4-3,000, .4, .5): numbers of rows have a Pareto distribution (.5).
    - "outliers" (300, 8, 10-20, .3, .3): noise is .3 t with 2 degrees of freedom, cut at
      `MOST_NOISE` scales.
    - "unrelated" (200, 8, 10-20, 1, .5): w = 0: nothing is shared.
    - "opposed" (200, 8, 10-20, .3, .5): every second client has -w for w.
    - "skewed_classes" (300, 12, 20-60, .3, 1): 20 classes, drawn from softmax(2 x W_k + log p_k),
      with the client's own frequencies p_k from a Dirichlet distribution (.3).
    - "wide" (1,000, 200, 15-30, .3, .5): more columns than a client has rows.

    `truth` has w_k and b_k, `shared` w (of "clusters" the three).

    Args:
        kind: The situation.
        clients: The number of clients, if not that above.
        rows: Fewest and most training rows of a client, if not those above.
        test: Test rows of each client, declared as the source's split.
        seed: Seed of everything.

    Raises:
        DataError: If an option is out of range.
    """
    if kind not in MIXED:
        raise DataError(f"kind = {kind!r}: expected one of {', '.join(MIXED)}")
    usual = _SITUATIONS[kind]
    usual = usual._replace(clients=usual.clients if clients is None else clients)
    usual = usual._replace(rows=usual.rows if rows is None else rows)
    _check_range(1, clients=usual.clients)
    _check_range(0, test=test)
    rng = Rng.seeded(seed).at("mixed", kind)
    outputs = _LABELS if kind == "skewed_classes" else 1
    size = _Size(usual.clients, outputs, usual.features)
    weights, bias = _effects(kind, size, usual.spread, rng)
    train = _rows_of(kind, usual, rng.at("counts").numpy())
    counts = train + test
    owner = np.repeat(np.arange(size.clients), counts)
    split = np.concatenate([np.arange(n) >= n - test for n in counts]).astype(np.int8)
    x = _columns(kind, (len(owner), size.features), rng.at("rows"))
    scores = np.einsum("nd,nod->no", x, weights.own[owner]) + bias[owner]
    data = FederatedDataset(
        spec=Spec(
            shape=(size.features,),
            outputs=outputs,
            task="multiclass" if outputs > 1 else "regression",
            clients=size.clients,
        ),
        names=ClientNames(size.clients),
        offsets=offsets_of(counts),
        features=torch.from_numpy(x),
        targets=_answers(kind, x, scores, usual.noise, rng.at("noise")),
        source_split=split,
        title=f"mixed:{kind}",
        notes=(f"generated: {kind}, seed {seed}",),
    )
    cluster = None if weights.cluster is None else torch.from_numpy(weights.cluster)
    return Synthetic(data, _tree(weights.own, bias), _tree(weights.shared), cluster)


def _effects(kind: str, size: _Size, spread: float, rng: Rng) -> tuple[_Weights, Floats]:
    """Draw the clients' weights (clients, outputs, features) and biases (clients, outputs)."""
    unit = np.float32(1 / math.sqrt(size.features))
    centre = _normal(rng.at("shared"), (3 if kind == "clusters" else 1, *size[1:])) * unit
    if kind in ("nonlinear", "unrelated"):
        centre *= np.float32(0)
    which = np.arange(size.clients) % len(centre)
    own = _normal(rng.at("own"), (size.clients, *size[1:]))
    if kind == "rank2":
        plane = np.linalg.qr(rng.at("plane").numpy().standard_normal((size.features, 2)))[0]
        flat = own[..., :2] * np.float32(math.sqrt(size.features / 2))
        own = flat @ plane.T.astype(np.float32)
    sign = np.where(np.arange(size.clients) % 2, -1, 1) if kind == "opposed" else 1
    middle = centre[which] * np.reshape(sign, (-1, 1, 1)).astype(np.float32)
    own = (own * (np.float32(spread) * unit) + middle).astype(np.float32)
    bias = _normal(rng.at("bias"), (size.clients, size.outputs)) * np.float32(spread / 2)
    if kind == "clusters":
        bias += _normal(rng.at("levels"), (3, 1))[which] * np.float32(0.5)
    if kind == "skewed_classes":
        drawn = rng.at("labels").numpy().dirichlet(np.full(size.outputs, _SKEW), size.clients)
        own, bias = own * np.float32(2), np.log(np.maximum(drawn, 1e-6)).astype(np.float32)
    several = kind == "clusters"
    return _Weights(own, centre if several else centre[0], which if several else None), bias


def _rows_of(kind: str, situation: _Situation, generator: np.random.Generator) -> NDArray[np.int64]:
    if kind != "heavy_tails":
        return _counts(situation.rows, situation.clients, generator)
    _counts(situation.rows, 1, generator)  # checks the range
    least, most = situation.rows
    drawn = least * (1 + generator.pareto(_TAIL, situation.clients))
    return np.minimum(drawn, most).astype(np.int64)


def _columns(kind: str, shape: tuple[int, int], rng: Rng) -> Floats:
    x = _normal(rng, shape)
    if kind == "rank2":
        for column in range(1, shape[1]):  # a stationary chain, of variance 1
            x[:, column] = 0.7 * x[:, column - 1] + math.sqrt(1 - 0.7**2) * x[:, column]
    return x


def _answers(kind: str, x: Floats, scores: Floats, noise: float, rng: Rng) -> torch.Tensor:
    generator = rng.numpy()
    if kind == "skewed_classes":  # the largest with Gumbel noise: a draw from the softmax
        return torch.from_numpy((scores + noise * generator.gumbel(size=scores.shape)).argmax(1))
    found = scores[:, 0].astype(np.float64)
    if kind == "nonlinear":
        found += np.sin(2 * x[:, 0]) + (x[:, 1] ** 2 - 1) / 2 + x[:, 2] * x[:, 3]
    if kind == "outliers":
        drawn = generator.standard_t(2, len(found)).clip(-MOST_NOISE, MOST_NOISE)
    else:
        drawn = generator.standard_normal(len(found))
    return torch.from_numpy((found + noise * drawn).astype(np.float32))
