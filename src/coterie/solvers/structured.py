"""Linear models under a structure that clients share: own units, second moments, relations.

Own units. A client's rows are centred by its own means (with a bias) and scaled so that their mean
squared norm is 1: for rows x' = (x - mean) s and the model w' = w / s, y = w . x + b is
y - mean = w' . x'. The second derivative of its mean squared loss in w' is then at most 1, of its
mean logistic loss at most 1/4, whatever the data. One public step size serves every client, no
client can diverge, and all models have one scale. Units are computed from own rows and stay with
the client.

    squares   min_w'  (1/2n) |X'w' - y'|^2 + 1/2 w'^T P w'
    logistic  min_w'  mean log(1 + exp(-+ (X'w' + intercept))) + 1/2 w'^T P w'

Moments. A public second moment of the clients' models is a symmetric (d, d) matrix or its diagonal
(d,). Functions of it act on its eigenvalues, U f(l) U^T, or entry by entry; negative eigenvalues,
which noise can produce, count as 0.

Relations. A public relation between clients is Omega = D + B diag(s) B^T with D diagonal, s = -1 or
1 and B clients x r: the form in which released sums serve a relation (`coterie.methods.related`).

The kernels compute every client in one thread, row by row in order, so that a client's result is
the same to the last bit in any company. Rows are dense float32, or CSR if `indptr` is not empty.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.kernels import compiled
from coterie.core.tree import Tree
from coterie.data.federated import Clients, Task
from coterie.solvers.posterior import Prior, posterior
from coterie.solvers.ridge import fit_lasso, solve_ridge
from coterie.solvers.sgd_kernels import few_threads

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = tuple[NDArray[np.float32], NDArray[np.float32], Ints, Ints]
Lift = Literal["flat", "floor", "add"]
F = TypeVar("F", bound=Callable[..., object])
_SMALL = 1 << 16  # products that one thread computes faster than it wakes others
_MOST_STORED = 1 << 27  # entries of second moments kept with the data: 1 GiB
_MOST_FEATURES = 256  # beyond, products by blocks are faster than loops over kept moments
_FREE = 1e10  # prior variance of an intercept that is not penalised
_ZERO = 1e-12  # of the largest eigenvalue: rounding left over from a decomposition
SAME = 1e-9
"""Two numbers are equal if they differ by less than this share of the largest entry."""


def _compiled(function: F) -> F:
    return compiled(parallel=True)(function)


def _inline(function: F) -> F:
    return compiled()(function)


@_inline
def _read(rows: Rows, row: int, centre: Floats, scale: float, out: Floats) -> None:
    """Write one row, centred and scaled, into `out`."""
    dense, values, columns, indptr = rows
    if len(indptr):
        for j in range(len(out)):
            out[j] = -centre[j] * scale
        for place in range(indptr[row], indptr[row + 1]):
            out[columns[place]] += values[place] * scale
    else:
        for j in range(len(out)):
            out[j] = (dense[row, j] - centre[j]) * scale


@_compiled
def _measure(
    rows: Rows, targets: Floats, starts: Ints, counts: Ints, bias: bool, out: Floats
) -> None:
    """Compute each client's means and the scale that makes the mean squared row norm 1.

    `out` is (c, d + 2): means of the features, mean of the targets, scale. Squares of centred rows
    are summed in a second pass, which avoids cancellation.
    """
    features = out.shape[1] - 2
    for k in numba.prange(len(starts)):
        n = counts[k]
        row, zero = np.empty(features), np.zeros(features)
        squares, size = 0.0, 0.0
        for i in range(starts[k], starts[k] + n):
            _read(rows, i, zero, 1.0, row)
            for j in range(features):
                out[k, j] += row[j] / n
                squares += row[j] * row[j] / n
            out[k, features] += targets[i] / n
        if not bias:
            out[k, : features + 1] = 0.0
        for i in range(starts[k], starts[k] + n):
            _read(rows, i, out[k], 1.0, row)
            for j in range(features):
                size += row[j] * row[j] / n
        # After centring, equal rows leave only rounding: such a client fits an intercept only.
        out[k, features + 1] = 1.0 / math.sqrt(size) if size > 1e-24 * squares else 0.0


@_compiled
def _transform(
    rows: Rows, starts: Ints, counts: Ints, own: Floats, diagonal: Floats, out: Floats
) -> None:
    """Write each client's rows in its own units, times a diagonal, one client after another."""
    features = own.shape[1] - 2
    ends = np.cumsum(counts)
    for k in numba.prange(len(starts)):
        first = ends[k] - counts[k]
        for i in range(counts[k]):
            _read(rows, starts[k] + i, own[k], own[k, features + 1], out[first + i])
            for j in range(features):
                out[first + i, j] *= diagonal[j]


@_compiled
def _gradients(
    rows: Rows, targets: Floats, starts: Ints, counts: Ints, own: Floats, points: Floats,
    binary: bool, out: Floats,
) -> None:  # fmt: skip
    """Compute each client's gradient of its mean loss at `points` (c, d + 1), the intercept last.

    Squares: residual of the centred target (the intercept is eliminated, its gradient is 0).
    Logistic: targets are 0 and 1, the intercept is a coordinate.
    """
    features = own.shape[1] - 2
    for k in numba.prange(len(starts)):
        row = np.empty(features)
        for i in range(starts[k], starts[k] + counts[k]):
            _read(rows, i, own[k], own[k, features + 1], row)
            score = points[k, features] if binary else 0.0
            for j in range(features):
                score += row[j] * points[k, j]
            if binary:
                rest = 1.0 / (1.0 + math.exp(-min(max(score, -700.0), 700.0))) - targets[i]
            else:
                rest = score - (targets[i] - own[k, features])
            rest /= counts[k]
            for j in range(features):
                out[k, j] += rest * row[j]
            out[k, features] += rest if binary else 0.0


@_compiled
def _map_rows(models: Floats, linear: Floats, out: Floats) -> None:
    """Multiply each row by a matrix, one row at a time."""
    for k in numba.prange(len(models)):
        for j in range(linear.shape[1]):
            out[k, j] = 0.0
        for i in range(linear.shape[0]):
            value = models[k, i]
            for j in range(linear.shape[1]):
                out[k, j] += value * linear[i, j]


@_inline
def _factor(matrix: Floats) -> None:
    """Replace a positive definite matrix by its lower Cholesky factor."""
    for j in range(len(matrix)):
        for i in range(j):
            matrix[j, j] -= matrix[j, i] * matrix[j, i]
        matrix[j, j] = math.sqrt(matrix[j, j])
        for row in range(j + 1, len(matrix)):
            for i in range(j):
                matrix[row, j] -= matrix[row, i] * matrix[j, i]
            matrix[row, j] /= matrix[j, j]


@_inline
def _substitute(factor: Floats, right: Floats) -> None:
    """Solve with a Cholesky factor, in place."""
    for j in range(len(right)):
        for i in range(j):
            right[j] -= factor[j, i] * right[i]
        right[j] /= factor[j, j]
    for j in range(len(right) - 1, -1, -1):
        for row in range(j + 1, len(right)):
            right[j] -= factor[row, j] * right[row]
        right[j] /= factor[j, j]


@_compiled
def _solve_all(store: Floats, slots: Ints, root: Floats, out: Floats) -> None:
    """Solve (root^T G root + I) u = root^T c for each client with stored second moments G, c.

    Plain loops compile in a second; linear algebra inside a kernel takes many.
    """
    features = store.shape[2]
    for k in numba.prange(len(slots)):
        own = store[slots[k]]
        half, inner = np.zeros((features, features)), np.zeros((features, features))
        for a in range(features):
            inner[a, a] = 1.0
            out[k, a] = 0.0
            for b in range(features):
                value = own[a, b]
                for c in range(features):
                    half[a, c] += value * root[b, c]
        for a in range(features):
            for b in range(features):
                out[k, b] += own[features, a] * root[a, b]
                value = root[a, b]
                for c in range(b + 1):
                    inner[b, c] += value * half[a, c]
        _factor(inner)
        _substitute(inner, out[k])


@_compiled
def _find_moments(
    rows: Rows, targets: Floats, starts: Ints, counts: Ints, own: Floats, out: Floats
) -> None:
    """Compute each client's X'X/n and X'y/n in its own units: `out` is (c, d + 1, d)."""
    features = own.shape[1] - 2
    for k in numba.prange(len(starts)):
        row = np.empty(features)
        for i in range(starts[k], starts[k] + counts[k]):
            _read(rows, i, own[k], own[k, features + 1], row)
            target = targets[i] - own[k, features]
            for a in range(features):
                for b in range(a + 1):
                    out[k, a, b] += row[a] * row[b]
                out[k, features, a] += row[a] * target
        for a in range(features):
            out[k, features, a] /= counts[k]
            for b in range(a + 1):
                out[k, a, b] /= counts[k]
                out[k, b, a] = out[k, a, b]


@_compiled
def _moment_gradients(store: Floats, slots: Ints, points: Floats, out: Floats) -> None:
    """Compute the gradient of the squared loss from stored moments."""
    features = store.shape[2]
    for k in numba.prange(len(slots)):
        if slots[k] >= 0:
            own = store[slots[k]]
            for a in range(features):
                gradient = -own[features, a]
                for b in range(features):
                    gradient += own[a, b] * points[k, b]
                out[k, a] = gradient


@dataclass(frozen=True)
class Spectrum:
    """Square roots of a moment's eigenvalues, and its eigenvectors (None for a diagonal)."""

    roots: Tensor
    vectors: Tensor | None

    @classmethod
    def of(cls, moment: Tensor) -> "Spectrum":
        """Return the spectrum of a moment."""
        moment = moment.double().cpu()
        if moment.dim() == 1:
            return cls(moment.clamp_min(0).sqrt(), None)
        values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
        return cls(values.clamp_min(0).sqrt(), vectors)

    @property
    def size(self) -> float:
        """The square root of the mean eigenvalue."""
        return float(self.roots.square().mean().sqrt())

    def shrinking(self, threshold: float) -> Tensor:
        """Return the map U diag(max(0, 1 - threshold / sqrt(l))) U^T, or its diagonal.

        For the moment of the models themselves it is the proximal map of the trace (or l2,1) norm.
        """
        safe = torch.where(self.roots > 0, self.roots, 1.0)
        kept = torch.where(self.roots > 0, (1 - threshold / safe).clamp_min(0), 0.0)
        return self._matrix(kept)

    def spread(self, lam: float, mu: float) -> Tensor:
        """Return a root of the inverse of the penalty P = lam Sigma^(-1/2) + mu I."""
        return self._matrix((self.roots / (lam + mu * self.roots)).sqrt())

    def damping(self, lam: float, mu: float, step: float) -> Tensor:
        """Return (I + step P)^-1, the proximal map of 1/2 w^T P w for the same penalty P."""
        inverse = self.roots / (lam + mu * self.roots)
        return self._matrix(inverse / (inverse + step))

    def _matrix(self, factors: Tensor) -> Tensor:
        if self.vectors is None:
            return factors
        return (self.vectors * factors) @ self.vectors.mT


def apply(linear: Tensor, models: Tensor) -> Tensor:
    """Apply a symmetric map, or a diagonal one, to every row.

    One row at a time: in one product the number of rows could change the last bits of each.
    """
    if linear.dim() == 1:
        return torch.mul(models, linear)
    out = np.empty(tuple(models.shape))
    rows, matrix = (np.ascontiguousarray(part.double().numpy()) for part in (models, linear))
    with few_threads(rows.size * len(matrix) < _SMALL):
        _map_rows(rows, matrix, out)
    return torch.from_numpy(out)


def lift(moment: Tensor, by: float, how: Lift) -> Tensor:
    """Raise the eigenvalues of a noisy moment that noise alone could produce.

    "flat": eigenvalues up to `by` are indistinguishable from noise, so all of them become their
    mean, which noise changes little. "floor": they become `by`. "add": `by` is added to all.
    """
    if by == 0:
        return moment
    if moment.dim() == 1:
        return _lifted(moment, by, how)
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    return torch.matmul(vectors * _lifted(values, by, how), vectors.mT)


def _lifted(values: Tensor, by: float, how: Lift) -> Tensor:
    if how == "add":
        return values + by
    if how == "floor":
        return values.clamp_min(by)
    low = values <= by
    # The mean of noise may be negative: keep a little in every direction.
    mean = values[low].mean().clamp_min(0.02 * by) if bool(low.any()) else values.new_tensor(0.0)
    return torch.where(low, mean, values)


@dataclass(frozen=True)
class OwnUnits:
    """Clients with their centres and scales: `table` (c, d + 2) is means, target mean, scale."""

    clients: Clients
    rows: Rows
    targets: Floats
    table: Floats
    bias: bool
    signs: bool = False
    bounded: bool = False
    stretch: Floats | None = None

    @classmethod
    def of(
        cls, clients: Clients, *, bias: bool, signs: bool = False, bounded: bool = False
    ) -> "OwnUnits":
        """Return the clients in own units.

        `signs` turns a binary task into squares on targets -1 and 1; `bounded` clips rows to norm
        1 in own units.
        """
        # Conversions of whole arrays are kept with the data and reused by every block.
        rows: Rows = _remember(clients, "rows for kernels", _rows)
        targets: Floats = _remember(
            clients, "targets in float64", lambda given: given.targets.double().cpu().numpy()
        )
        signs = signs and clients.spec.task == "binary"
        targets = 2 * targets - 1 if signs else targets
        table = np.zeros((len(clients), clients.spec.features + 2))
        starts, counts = clients.starts.numpy(), clients.counts.numpy()
        with few_threads(int(counts.sum()) * table.shape[1] < _SMALL):
            _measure(rows, targets, starts, counts, bias, table)
        return cls(clients, rows, targets, table, bias, signs, bounded)

    @property
    def binary(self) -> bool:
        """Whether the loss is logistic."""
        return self.clients.spec.task == "binary" and not self.signs

    def moved(self, root: Tensor | None = None) -> Clients:
        """Return the clients with rows in own units times `root`.

        With a bias, regression targets are centred, so that no intercept is left to fit.
        """
        features = self.clients.spec.features
        chosen = torch.ones(features) if root is None else root
        matrix = np.ascontiguousarray(chosen.double().cpu().numpy())
        starts, counts = self.clients.starts.numpy(), self.clients.counts.numpy()
        flat = np.empty((int(counts.sum()), features))
        with few_threads(flat.size < _SMALL):
            at_once = matrix.ndim == 1 and not self.bounded
            diagonal = matrix if at_once else np.ones(features)
            _transform(self.rows, starts, counts, self.table, diagonal, flat)
        if self.bounded:
            flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)
            flat *= matrix if matrix.ndim == 1 else 1.0
        if self.stretch is not None:
            flat *= np.repeat(self.stretch, counts)[:, None]
        if matrix.ndim == 2:
            # One product per client: in one over all, other row counts could change the last bits.
            for last, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
                flat[last - count : last] = flat[last - count : last] @ matrix
        task: Task = "binary" if self.binary else "regression"
        return replace(
            self.clients,
            spec=replace(self.clients.spec, shape=(features,), task=task),
            starts=torch.from_numpy(np.cumsum(counts) - counts),
            features=torch.from_numpy(flat.astype(np.float32)),
            targets=self._moved_targets(starts, counts),
            memory={},
        )

    def solve(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Return minimisers: models (c, d) and intercepts (c,), float64, in own units.

        `root` is a root of the inverse penalty, P^-1 = root root^T: (d, d), or (d,) if diagonal.
        """
        root = root.double().cpu()
        if self.binary:
            found, intercept = _fit_logistic(self.moved(root), self.bias)
            return apply(root, found), intercept
        slots, store = self._stored()
        found = torch.empty(len(self.clients), self.clients.spec.features, dtype=torch.float64)
        kept, others = torch.from_numpy(slots >= 0), torch.from_numpy(slots < 0)
        if store is not None and bool(kept.any()):
            whole = torch.diag(root) if root.dim() == 1 else root
            out = np.empty((int(kept.sum()), len(root)))
            with few_threads(out.size * len(root) < _SMALL):
                _solve_all(store, slots[slots >= 0], np.ascontiguousarray(whole.numpy()), out)
            found[kept] = torch.from_numpy(out)
        if bool(others.any()):
            some = replace(self, clients=self.clients.at(others), table=self.table[slots < 0])
            fit = solve_ridge(some.moved(root), anchor=None, lam=1.0, bias=False)
            found[others] = fit["weight"][:, 0].double().cpu()
        return apply(root, found), torch.zeros(len(found), dtype=torch.float64)

    def solve_sparse(self, lam: float) -> tuple[Tensor, Tensor]:
        """Return minimisers with the penalty lam |w'|_1."""
        return fit_lasso(self.moved(), lam=lam, bias=self.bias and self.binary)

    def rescaled(self, factors: Tensor) -> "OwnUnits":
        """Return units in which each client's clipped rows are multiplied by a factor."""
        return replace(self, stretch=factors.double().cpu().numpy())

    def _moved_targets(self, starts: Ints, counts: Ints) -> Tensor:
        """Return the clients' targets one after another, centred for squares."""
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        gathered = self.targets[first + np.arange(int(counts.sum()))]
        if not self.binary:
            gathered = gathered - np.repeat(self.table[:, -2], counts)
        return torch.from_numpy(gathered).float()

    def gradients(self, points: Tensor) -> Tensor:
        """Return gradients of the mean losses at points (c, d + 1), the intercept last.

        Clients with more rows than features use their stored second moments: d^2 instead of n d.
        """
        at = np.ascontiguousarray(points.double().cpu().numpy())
        out = np.zeros_like(at)
        starts, counts = self.clients.starts.numpy(), self.clients.counts.numpy()
        slots, store = self._stored()
        with few_threads(int(counts.sum()) * at.shape[1] < _SMALL):
            if store is not None:
                _moment_gradients(store, slots, at, out)
                counts = np.where(slots >= 0, 0, counts)
            _gradients(self.rows, self.targets, starts, counts, self.table, at, self.binary, out)
        if not self.bias:
            out[:, -1] = 0.0  # there is no intercept
        return torch.from_numpy(out)

    def _stored(self) -> tuple[Ints, Floats | None]:
        """Return slots of these clients' stored second moments (-1 for none), and the store."""
        clients, features = self.clients, self.clients.spec.features
        ids, counts = clients.ids.numpy(), clients.counts.numpy()
        # Only public facts decide: the computation of a client must not depend on others.
        wide = features > _MOST_FEATURES or self.bounded or self.stretch is not None
        if self.binary or wide or clients.spec.clients * (features + 1) * features > _MOST_STORED:
            return np.full(len(ids), -1, dtype=np.int64), None
        kept: _Kept = _remember(
            clients, f"moments, bias {self.bias}, signs {self.signs}", _Kept.empty
        )
        wanted = np.flatnonzero((counts > features) & (kept.slots[ids] < 0))
        if len(wanted):
            fresh = np.zeros((len(wanted), features + 1, features))
            starts = clients.starts.numpy()[wanted]
            _find_moments(
                self.rows, self.targets, starts, counts[wanted], self.table[wanted], fresh
            )
            kept.slots[ids[wanted]] = len(kept.moments) + np.arange(len(wanted))
            kept.moments = np.concatenate([kept.moments, fresh])
        return kept.slots[ids], kept.moments

    def model(self, models: Tensor, intercept: Tensor) -> Tree:
        """Return weights and biases for raw rows from own-unit models (c, d) and intercepts."""
        table = torch.from_numpy(self.table)
        weight = models.double() * table[:, -1:]
        tree = {"weight": weight[:, None].float()}
        if not self.bias:
            return tree
        known = intercept.double() if self.binary else table[:, -2]
        bias = known - (weight * table[:, :-2]).sum(dim=1)
        return tree | {"bias": bias[:, None].float()}


@dataclass
class _Kept:
    """Second moments of some clients, and the slot of each client."""

    slots: Ints
    moments: Floats

    @classmethod
    def empty(cls, clients: Clients) -> "_Kept":
        features = clients.spec.features
        slots = np.full(clients.spec.clients, -1, dtype=np.int64)
        return cls(slots, np.zeros((0, features + 1, features)))


def _fit_logistic(clients: Clients, bias: bool) -> tuple[Tensor, Tensor]:
    """Minimise mean logistic loss + |w|^2 / 2: weights (c, d) and free intercepts (c,)."""
    features = clients.spec.features
    variances = torch.ones(1, features + bias, dtype=torch.float64)
    variances[:, features:] = _FREE
    prior = Prior(torch.zeros_like(variances), variances, per_row=True)
    found = (posterior(clients, prior, bias=bias).deviation * variances.sqrt())[:, 0].cpu()
    return found[:, :features], found[:, features:].sum(dim=1)


def _remember(clients: Clients, name: str, make: Callable[[Clients], Any]) -> Any:
    if name not in clients.memory:
        clients.memory[name] = make(clients)
    return clients.memory[name]


def _rows(clients: Clients) -> Rows:
    features: Any = clients.features
    none = np.zeros(0, dtype=np.int64)
    if isinstance(features, Tensor):
        flat = features.flatten(1).cpu().numpy()
        return flat, np.zeros(0, dtype=np.float32), none, none
    empty = np.zeros((0, clients.spec.features), dtype=np.float32)
    return (
        empty,
        features.data.astype(np.float32, copy=False),
        features.indices.astype(np.int64, copy=False),
        features.indptr.astype(np.int64, copy=False),
    )


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Omega = D + B diag(s) B^T, in float64.

    Attributes:
        diagonal: D, (m,), positive.
        factors: B, (m, r).
        signs: s, (r,), -1 or 1.
    """

    diagonal: Tensor
    factors: Tensor
    signs: Tensor

    @property
    def omega(self) -> Tensor:
        """Omega as a matrix."""
        return torch.diag(self.diagonal) + (self.factors * self.signs) @ self.factors.mT

    @cached_property
    def unit(self) -> float:
        """The length of the longest row of B."""
        return float(self.factors.norm(dim=1).max())

    @cached_property
    def inner(self) -> Tensor:
        """B^T D^-1 B."""
        return self.factors.mT @ (self.factors / self.diagonal[:, None])

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The least (<= 0) and largest (>= 0) eigenvalue of D^(-1/2) B diag(s) B^T D^(-1/2).

        The nonzero ones are those of G^(1/2) diag(s) G^(1/2), G = B^T D^-1 B, r x r.
        """
        values, vectors = torch.linalg.eigh(self.inner)
        root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
        found = torch.linalg.eigvalsh((root * self.signs) @ root)
        return min(0.0, float(found[0])), max(0.0, float(found[-1]))

    @property
    def step(self) -> float:
        """The step size with which rounds converge."""
        return 2 / (2 + self.extremes[1])


def mean_relation(clients: int) -> Decomposition:
    """Return Omega = I - 1 1^T / m: every client is regularised to the mean."""
    one = torch.ones(1, dtype=torch.float64)
    return Decomposition(one.expand(clients), one.expand(clients, 1) / math.sqrt(clients), -one)


def decompose(omega: Tensor, diagonal: Tensor | None = None) -> Decomposition:
    """Return a symmetric Omega as D + B diag(s) B^T with the fewest columns of B.

    D defaults to c I with c the most frequent positive eigenvalue (the largest of several); B then
    has as many columns as there are other eigenvalues.

    Raises:
        ValueError: If no eigenvalue is positive and no diagonal is given.
    """
    omega = omega.double()
    if diagonal is None:
        diagonal = torch.full_like(omega[0], _most_frequent(torch.linalg.eigvalsh(omega)))
    rest = omega - torch.diag(diagonal)
    values, vectors = torch.linalg.eigh((rest + rest.mT) / 2)
    kept = values.abs() > _ZERO * max(float(omega.abs().max()), float(diagonal.abs().max()))
    factors = vectors[:, kept] * values[kept].abs().sqrt()
    # The sign of a column is arbitrary: make its largest entry positive.
    largest = factors.abs().argmax(dim=0, keepdim=True)
    factors = factors * factors.gather(0, largest).sign()
    return Decomposition(diagonal, factors, values[kept].sign())


def _most_frequent(values: Tensor) -> float:
    """Return the most frequent positive value of an ascending list, the largest of several."""
    near = SAME * float(values.abs().max())
    groups: list[list[float]] = []
    for value in values.tolist():
        if value <= near:
            continue
        if groups and value - groups[-1][-1] <= near:
            groups[-1].append(value)
        else:
            groups.append([value])
    if not groups:
        raise ValueError("omega: no positive eigenvalue; expected a positive semidefinite matrix")
    best = max(groups, key=lambda group: (len(group), group[-1]))
    return sum(best) / len(best)


def check_relation(relation: Decomposition) -> None:
    """Raise ValueError if a relation has no minimiser."""
    least = int(relation.diagonal.argmin())
    if not 0 < float(relation.diagonal[least]) < math.inf:
        raise ValueError(
            f"diagonal: client {least} has {float(relation.diagonal[least]):g}; expected positive "
            "numbers, the weights of the clients' proximal terms: pass another diagonal"
        )
    if relation.factors.numel() == 0 or relation.unit == 0:
        raise ValueError(
            "omega is diagonal: clients are not related and nothing would be released; use local"
        )
    if relation.extremes[0] < -1 - SAME:
        raise ValueError(
            "omega has a negative eigenvalue, so the objective is unbounded below; expected a "
            "positive semidefinite matrix, such as a Laplacian: add to its diagonal"
        )
