"""Linear models of clients in units of their own, under a penalty that all share.

A client's rows are centred by its own means (with a bias) and scaled so that their mean squared
norm is 1: for rows x' = (x - mean) s and the model w' = w / s, y = w . x + b is y - mean = w' . x'.
The curvature of its mean squared loss in w' is then at most 1, of its mean logistic loss at most
1/4, whatever the data: one public step size serves every client, none can diverge, and models are
of one scale. Units are made of own rows and stay with the client.

    squares   min_w'  (1/2n) |X'w' - y'|^2 + 1/2 w'^T P w'
    logistic  min_w'  mean log(1 + exp(-+ (X'w' + level))) + 1/2 w'^T P w'

`solve` minimises exactly, for a penalty given as a root of its inverse: P^-1 = root root^T.
`slopes` gives gradients for methods that take steps. Where a client has more rows than features,
its second moments are kept with the data (`Clients.memory`), so that a step costs d^2 and not n d.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Clients
from coterie.solvers import _structured as kernels
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.single import fit_single
from coterie.solvers.spectrum import apply

Floats = NDArray[np.float64]
_MOST_STORED = 1 << 27  # numbers of second moments kept with the data: 1 GiB
_MOST_FEATURES = 256  # beyond, products by blocks are faster than loops over kept moments


@dataclass(frozen=True)
class OwnUnits:
    """Clients with the centre and scale of each: (c, d + 2), means, target's mean, scale."""

    clients: Clients
    rows: kernels.Rows
    targets: Floats
    table: Floats
    bias: bool
    signs: bool = False
    standard: bool = True
    bounded: bool = False
    stretch: Floats | None = None

    @classmethod
    def of(
        cls, clients: Clients, *, bias: bool, signs: bool = False, bounded: bool = False
    ) -> "OwnUnits":
        """Measure the clients.

        `signs` turns a binary task into squares on targets -1 and 1; `bounded` cuts rows that are
        longer than 1 in own units to that length.
        """
        # Conversions of whole arrays are kept with the data, not made anew for every block.
        rows: kernels.Rows = _remember(clients, "rows for kernels", _rows)
        targets: Floats = _remember(clients, "targets in float64", _targets)
        signs = signs and clients.spec.task == "binary"
        targets = 2 * targets - 1 if signs else targets
        table = np.zeros((len(clients), clients.spec.features + 2))
        starts, counts = clients.starts.numpy(), clients.counts.numpy()
        with kernels.few_threads(int(counts.sum()) * table.shape[1]):
            kernels.units(rows, targets, starts, counts, bias, table)
        return cls(clients, rows, targets, table, bias, signs, not bounded, bounded)

    @property
    def binary(self) -> bool:
        """Whether the loss is logistic."""
        return self.clients.spec.task == "binary" and not self.signs

    def moved(self, root: Tensor | None = None) -> Clients:
        """Return the clients' rows in own units times `root`, as clients of their own.

        Targets of regression are centred where there is a bias, so that no level is left to fit.
        """
        features = self.clients.spec.features
        chosen = torch.ones(features) if root is None else root
        matrix = np.ascontiguousarray(chosen.double().cpu().numpy())
        starts, counts = self.clients.starts.numpy(), self.clients.counts.numpy()
        flat = np.empty((int(counts.sum()), features))
        with kernels.few_threads(flat.size):
            at_once = matrix.ndim == 1 and not self.bounded
            diagonal = matrix if at_once else np.ones(features)
            kernels.transform(self.rows, starts, counts, self.table, diagonal, flat)
        if self.bounded:
            flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)
            flat *= matrix if matrix.ndim == 1 else 1.0
        if self.stretch is not None:
            flat *= np.repeat(self.stretch, counts)[:, None]
        if matrix.ndim == 2:
            # A product a client: of one over all, others' row counts could move the last bits.
            for last, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
                flat[last - count : last] = flat[last - count : last] @ matrix
        return replace(
            self.clients,
            spec=replace(
                self.clients.spec, shape=(features,), task="binary" if self.binary else "regression"
            ),
            starts=torch.from_numpy(np.cumsum(counts) - counts),
            features=torch.from_numpy(flat.astype(np.float32)),
            targets=self._moved_targets(starts, counts),
            memory={},
        )

    def solve(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Minimise exactly: models (c, d) and levels (c,), float64, in own units.

        `root` is (d, d), or (d,) for a diagonal penalty.
        """
        root = root.double().cpu()
        if self.binary:
            fit = fit_single(self.moved(root), penalty="l2", lam=1.0, bias=self.bias)
            found, level = split_level(fit)
            return apply(root, found), level
        slots, store = self._stored()
        found = torch.empty(len(self.clients), self.clients.spec.features, dtype=torch.float64)
        kept, others = torch.from_numpy(slots >= 0), torch.from_numpy(slots < 0)
        if bool(kept.any()):
            assert store is not None
            found[kept] = _solve_moments(store, slots[slots >= 0], root)
        if bool(others.any()):
            moved = self._some(others).moved(root)
            fit = solve_ridge(moved, anchor=None, lam=1.0, bias=False)
            found[others] = split_level(fit)[0]
        return apply(root, found), torch.zeros(len(found), dtype=torch.float64)

    def _some(self, chosen: Tensor) -> "OwnUnits":
        """Pick clients by a mask."""
        if bool(chosen.all()):
            return self
        clients = replace(
            self.clients,
            ids=self.clients.ids[chosen],
            starts=self.clients.starts[chosen],
            counts=self.clients.counts[chosen],
        )
        return replace(self, clients=clients, table=self.table[chosen.numpy()])

    def solve_sparse(self, lam: float) -> tuple[Tensor, Tensor]:
        """Minimise with the penalty lam |w'|_1 instead."""
        bias = self.bias and self.binary
        return split_level(fit_single(self.moved(), penalty="l1", lam=lam, bias=bias))

    def rescaled(self, factors: Tensor) -> "OwnUnits":
        """Multiply each client's rows, once they are cut, by a factor."""
        return replace(self, stretch=factors.double().cpu().numpy(), standard=False)

    def _moved_targets(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Tensor:
        """Gather the clients' targets one after another, centred for squares."""
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        gathered = self.targets[first + np.arange(int(counts.sum()))]
        if not self.binary:
            gathered = gathered - np.repeat(self.table[:, -2], counts)
        return torch.from_numpy(gathered).float()

    def slopes(self, points: Tensor) -> Tensor:
        """Return gradients of the mean losses at points (c, d + 1), the last number the level."""
        at = np.ascontiguousarray(points.double().cpu().numpy())
        out = np.zeros_like(at)
        starts, counts = self.clients.starts.numpy(), self.clients.counts.numpy()
        slots, store = self._stored()
        with kernels.few_threads(int(counts.sum()) * at.shape[1]):
            if store is not None:
                kernels.moment_slopes(store, slots, at, out)
                counts = np.where(slots >= 0, 0, counts)
            kernels.slopes(
                self.rows, self.targets, starts, counts, self.table, at, self.binary, out
            )
        if not self.bias:
            out[:, -1] = 0.0  # there is no level to move
        return torch.from_numpy(out)

    def _stored(self) -> tuple[NDArray[np.int64], Floats | None]:
        """Return where the second moments of these clients are kept, -1 for those without."""
        clients, features = self.clients, self.clients.spec.features
        ids, counts = clients.ids.numpy(), clients.counts.numpy()
        # By public facts alone: how a client is computed must not depend on its neighbours.
        wide = features > _MOST_FEATURES
        wide = wide or not self.standard
        if self.binary or wide or clients.spec.clients * (features + 1) * features > _MOST_STORED:
            return np.full(len(ids), -1, dtype=np.int64), None
        kept: _Kept = _remember(
            clients, f"moments, bias {self.bias}, signs {self.signs}", _Kept.empty
        )
        wanted = np.flatnonzero((counts > features) & (kept.slots[ids] < 0))
        if len(wanted):
            fresh = np.zeros((len(wanted), features + 1, features))
            starts = clients.starts.numpy()[wanted]
            kernels.moments(
                self.rows, self.targets, starts, counts[wanted], self.table[wanted], fresh
            )
            kept.add(ids[wanted], fresh)
        return kept.slots[ids], kept.moments

    def model(self, models: Tensor, level: Tensor) -> Tree:
        """Turn own-unit models (c, d) and levels (c,) into weights and biases for raw rows."""
        table = torch.from_numpy(self.table)
        weight = models.double() * table[:, -1:]
        tree = {"weight": weight[:, None].float()}
        if not self.bias:
            return tree
        known = level.double() if self.binary else table[:, -2]
        bias = known - (weight * table[:, :-2]).sum(dim=1)
        return tree | {"bias": bias[:, None].float()}


@dataclass
class _Kept:
    """Second moments of some clients, and where each client's are."""

    slots: NDArray[np.int64]
    moments: Floats

    @classmethod
    def empty(cls, clients: Clients) -> "_Kept":
        features = clients.spec.features
        slots = np.full(clients.spec.clients, -1, dtype=np.int64)
        return cls(slots, np.zeros((0, features + 1, features)))

    def add(self, ids: NDArray[np.int64], fresh: Floats) -> None:
        self.slots[ids] = len(self.moments) + np.arange(len(ids))
        self.moments = np.concatenate([self.moments, fresh])


def _solve_moments(store: Floats, slots: NDArray[np.int64], root: Tensor) -> Tensor:
    """Solve clients with second moments kept, each by itself."""
    whole = torch.diag(root) if root.dim() == 1 else root
    out = np.empty((len(slots), len(root)))
    with kernels.few_threads(len(slots) * len(root) ** 2):
        kernels.solve_moments(store, slots, np.ascontiguousarray(whole.numpy()), out)
    return torch.from_numpy(out)


def split_level(fit: Tree) -> tuple[Tensor, Tensor]:
    """Take a fit apart: weights (c, d) and levels (c,), float64."""
    weight = fit["weight"][:, 0].double().cpu()
    level = fit["bias"][:, 0] if "bias" in fit else torch.zeros(len(weight))
    return weight, level.double().cpu()


def _remember(clients: Clients, name: str, make: Callable[[Clients], Any]) -> Any:
    if name not in clients.memory:
        clients.memory[name] = make(clients)
    return clients.memory[name]


def _targets(clients: Clients) -> Floats:
    return clients.targets.cpu().numpy().astype(np.float64)


def _rows(clients: Clients) -> kernels.Rows:
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
