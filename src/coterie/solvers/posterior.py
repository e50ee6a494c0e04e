"""Posterior of every client's linear model under one Gaussian prior for all.

The prior of client i's weights is w ~ N(center, diag(variances)), independent over outputs; a bias
is the last weight. In units of the prior, v = (w - center) / sqrt(variances) and
Z = X diag(sqrt(variances)), the posterior precision is G = Z' Q Z + I (a weight of zero variance
stays at its centre):

* regression, y = X w + N(0, s2): exact. Q = I / s2 and v = G^-1 Z' (y - X center) / s2;
* binary and multilabel: the mode of the summed log-losses + |v|^2 / 2 by Newton's method, and
  Laplace's approximation there, Q = diag(q (1 - q)) for probabilities q, each output on its own;
* multiclass (softmax): the mode likewise, and of the Hessian the block of each class,
  Q_k = diag(q_k (1 - q_k)). A block's inverse is at most that of the whole, so these variances
  ignore the uncertainty about other classes.

With R_i = (|y - X w|^2 + tr(X V_i X')) / n_i these are the E-step of an empirical Bayes fit of the
prior (Lindley and Smith 1972; Dempster, Rubin and Tsutakawa 1981). Clients are computed one by one
in float64, each by one thread from its own rows, so a client's result is the same to the last bit
in any company. With fewer rows than columns, (Z Q Z' + I)^-1 is used, rows by rows.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numba import get_num_threads
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from coterie.data.federated import Clients
from coterie.solvers.posterior_kernels import (
    Found,
    Normal,
    Rows,
    logistic_part,
    softmax_part,
    squares_part,
)

Floats = NDArray[np.float64]
_SMALL = 1 << 20  # products that one thread computes in about a millisecond
# Entries up to which rows are converted, so that small data need one compiled kernel: `_mixed`
# makes float64, and a kernel for another type takes three seconds to compile.
_FEW = 1 << 22
_KERNELS: dict[str, Callable[..., None]] = {
    "regression": squares_part,
    "binary": logistic_part,
    "multilabel": logistic_part,
    "multiclass": softmax_part,
}


@dataclass(frozen=True)
class Prior:
    """A Gaussian prior N(center, diag(variances)) of one client's weights.

    Attributes:
        center: (outputs, p) float64; p is features, plus one for a bias, the last.
        variances: (outputs, p) float64, >= 0; a weight with variance 0 stays at its centre.
        residual: The variance s2 of the noise of a row in regression; 1 for classification.
        per_row: Whether a client with n rows divides the variances by n: with variance 1 / lam
            (and s2 = 1) the mode then minimises the mean loss + lam/2 |w - center|^2.
        mixing: C, (p, p) float64, of correlated weights of one output: w = center +
            sqrt(variances) C v, v ~ N(0, I); None for the identity.
    """

    center: Tensor
    variances: Tensor
    residual: float = 1.0
    per_row: bool = False
    mixing: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("center", "variances"):
            given = getattr(self, name)
            if given.shape != self.center.shape or given.dim() != 2 or given.dtype != torch.float64:
                raise ValueError(
                    f"{name}: given {given.dtype} of shape {tuple(given.shape)}; expected float64 "
                    "of shape (outputs, weights), the same for center and variances"
                )
        if not bool(self.center.isfinite().all()):
            raise ValueError("center: given a NaN or an infinity; expected finite numbers")
        if not bool(((self.variances >= 0) & self.variances.isfinite()).all()):
            raise ValueError(
                f"variances: given {float(self.variances.min())} to "
                f"{float(self.variances.max())}; expected finite numbers >= 0"
            )
        if not 0 < self.residual < float("inf"):
            raise ValueError(f"residual: given {self.residual}; expected a finite number > 0")
        if self.mixing is not None:
            self._check_mixing(self.mixing)

    def _check_mixing(self, mixing: Tensor) -> None:
        outputs, size = self.center.shape
        if outputs != 1 or self.per_row or tuple(mixing.shape) != (size, size):
            raise ValueError(
                f"mixing: given shape {tuple(mixing.shape)} for {outputs} outputs; expected "
                f"({size}, {size}) for one output, and per_row = False"
            )
        if not bool(mixing.isfinite().all()):
            raise ValueError("mixing: given a NaN or an infinity; expected finite numbers")

    def weights(self, deviation: Tensor) -> Tensor:
        """Return the weights at deviations (c, o, p) in units of the prior, v above."""
        mixed = deviation
        if self.mixing is not None:  # added in order: the same to the last bit in any company
            columns = self.mixing.to(deviation.device).T
            mixed = add_in_turn(deviation.movedim(-1, 0)[..., None] * columns[:, None, None])
        return mixed * self.variances.sqrt().to(mixed.device) + self.center.to(mixed.device)


@dataclass(frozen=True)
class Posterior:
    """Posteriors of c clients, in units of the prior as given: of v, where weights are mixed.

    Attributes:
        deviation: (c, o, p) float64: (mode - center) / sqrt(variances); 0 where the variance is 0.
        variances: (c, o, p) float64: posterior by prior variance, in (0, 1]; 1 where the prior
            variance is 0. With `per_row` by the variance as given, so at most 1 / n.
        residual: (c,) float64: R_i / s2; 1 for classification and for a client without rows.
        curvature: (c, p, p) float64, K_i = I - G_i^-1, if requested; with `per_row` in units of
            the client's own prior.
    """

    deviation: Tensor
    variances: Tensor
    residual: Tensor
    curvature: Tensor | None = None


def posterior(clients: Clients, prior: Prior, *, bias: bool, curvature: bool = False) -> Posterior:
    """Return every client's posterior, on the device of the rows.

    A client without rows has the prior. A client with a NaN or an infinity among its rows (or whose
    mode is not found in 200 Newton steps) gets NaN; others are unaffected. Newton's method stops
    within 1e-10 of the mode (1e-9 for softmax) in units of the prior, or at rounding. With `bias`
    the last weight is a bias; binary targets are 0 and 1; curvatures are for one output only.

    Raises:
        ValueError: On a prior that does not fit, targets out of range, or curvatures of several
            outputs.
    """
    _check(clients, prior, bias)
    outputs, size = prior.center.shape
    if curvature and outputs != 1:
        raise ValueError(
            f"curvature: given {outputs} outputs; expected 1: use curvature=False otherwise"
        )
    found = _found(clients, prior, moments=True, curvature=curvature)
    _compute(clients, None, prior, bias, found)
    D, V, R, K = (torch.from_numpy(given).to(clients.device) for given in found[:4])
    D, V, K = D[..., :size], V[..., :size], K[:, :size, :size]
    return Posterior(D, V, R, curvature=K if curvature else None)


def class_covariances(clients: Clients, prior: Prior, *, bias: bool) -> Tensor:
    """Return the covariance of each client's weights, class by class: (c, o, p, p) float64, on CPU.

    For classification with several outputs, as `predictive_std` uses them: the block of each class
    of Laplace's approximation. A client without rows has the prior's.
    """
    modes = prior.weights(posterior(clients, prior, bias=bias).deviation).cpu().numpy()
    roots = prior.variances.sqrt().cpu().numpy()[:, None]
    several = clients.spec.task == "multiclass"
    found = np.empty((*modes.shape, modes.shape[-1]))
    for client, start in enumerate(clients.starts.tolist()):
        own = clients.features[start : start + int(clients.counts[client])]
        x = own.flatten(1).cpu().numpy() if isinstance(own, Tensor) else own.toarray()
        x = np.c_[x, np.ones(len(x))] if bias else np.asarray(x, dtype=np.float64)
        scores = modes[client] @ x.T
        q = np.exp(scores - scores.max(axis=0)) if several else expit(scores)
        q = q / q.sum(axis=0) if several else q
        z = x * roots
        inner = np.swapaxes(z * (q * (1 - q))[..., None], 1, 2) @ z + np.eye(x.shape[1])
        found[client] = np.linalg.inv(inner) * np.swapaxes(roots, 1, 2) * roots
    return torch.from_numpy(found)


def leave_one_out(clients: Clients, prior: Prior, *, bias: bool) -> Tensor:
    """Return the loss of every row under its client's mode without that row, (c, longest).

    For regression this is the squared error, exact. For classification it is the log-loss (mean
    over labels, if several) after one Newton step from the mode (Rad and Maleki 2020): with
    a_i = z_i' G^-1 z_i and q_i = p_i (1 - p_i) the score becomes
    eta_i + a_i (p_i - y_i) / (1 - a_i q_i), for softmax class by class with the class's own block,
    which ignores interactions of classes and overestimates the mean loss by a few per cent.
    With `per_row` the prior stays that of all the client's rows. Losses are float64, 0 where
    padded, on the device of the rows; errors are those of `posterior`.
    """
    _check(clients, prior, bias)
    found = _found(clients, prior, out=True)
    _compute(clients, None, prior, bias, found)
    scale = prior.residual if clients.spec.task == "regression" else 1.0
    return torch.from_numpy(found.out * scale).to(clients.device)


def row_totals(values: Tensor, clients: Clients) -> Tensor:
    """Return sums over each client's own rows, in an order that depends on its row count only.

    The rounding of a sum over padded rows depends on the longest client: on others' data, past any
    clip. These sums are the same to the last bit in any company. `values` are (..., c, longest)
    float64, and padding is ignored; sums are (..., c), 0 for clients without rows.
    """
    found = np.zeros(tuple(values.shape[:-1]))
    counts = clients.counts.numpy()
    held = np.flatnonzero(counts)
    if len(held):
        rows = values.cpu().flatten(-2).numpy()
        rows = np.take(rows, np.flatnonzero(clients.mask.cpu().numpy()), axis=-1)
        found[..., held] = np.add.reduceat(rows, (np.cumsum(counts) - counts)[held], axis=-1)
    return torch.from_numpy(found).to(values.device)


def add_in_turn(values: Tensor) -> Tensor:
    """Return the sum over the first dimension, added in order.

    torch's own sum uses another order at the end of a stack than inside it: the last bit of a
    client would depend on its position, which the row counts of others decide.
    """
    return reduce(torch.add, values.unbind(0))


def predictive_std(train: Clients, prior: Prior, rows: Clients, *, bias: bool) -> Tensor:
    """Return the standard deviation of the score of every row under its client's posterior.

    This is sqrt(x' V_i x), without the noise of a row: for a prediction interval in regression add
    the residual variance to its square. `train` are the rows of the posterior, `rows` those to
    predict, of the same clients in the same order. The result is (c, longest of `rows`), or
    (c, longest, o) for several outputs, 0 where padded, on the device of the rows.

    Raises:
        ValueError: As `posterior`, or on rows of other clients.
    """
    _check(train, prior, bias)
    _check(rows, prior, bias)
    if not torch.equal(train.ids, rows.ids):
        raise ValueError(
            f"rows: given {len(rows)} clients; expected the {len(train)} of train in the same "
            "order: select both by the same ids"
        )
    outputs = len(prior.center)
    found = _found(train, prior, wide=rows.longest)
    _compute(train, rows, prior, bias, found)
    wide = found.wide[:, :, 0] if outputs == 1 else found.wide
    return torch.from_numpy(np.ascontiguousarray(wide)).to(train.device)


def _found(
    clients: Clients,
    prior: Prior,
    *,
    moments: bool = False,
    curvature: bool = False,
    out: bool = False,
    wide: int | None = None,
) -> Found:
    # Buffers for the requested results.
    outputs, size = prior.center.shape
    size += prior.mixing is not None  # see _mixed
    count = len(clients)
    shape = (count if moments else 0, outputs, size)
    return Found(
        D=np.empty(shape),
        V=np.empty(shape),
        R=np.ones(shape[0]),
        K=np.zeros((count if curvature else 0, size, size)),
        out=np.zeros((count if out else 0, clients.longest)),
        wide=np.zeros((0 if wide is None else count, wide or 0, outputs)),
        fault=np.zeros(count, np.int8),
    )


def _compute(
    clients: Clients, fresh: Clients | None, prior: Prior, bias: bool, found: Found
) -> None:
    if not len(clients):
        return
    rows = _rows(clients) if prior.mixing is None else _mixed(clients, prior, bias)
    others = rows
    if fresh is not None:
        others = _rows(fresh) if prior.mixing is None else _mixed(fresh, prior, bias)
    if prior.mixing is not None:
        prior, bias = _unmixed(prior), False
    outputs, size = prior.center.shape
    normal = Normal(
        np.ascontiguousarray(prior.center.cpu().numpy()),
        np.ascontiguousarray(prior.variances.sqrt().cpu().numpy()),
        float(prior.residual**0.5),
        bool(prior.per_row),
        bool(bias),
    )
    kernel, parts = _KERNELS[clients.spec.task], _parts(clients, outputs, size)
    # Part p takes clients p, p + parts, ...: neighbours have similar numbers of rows.
    if parts == 1:
        kernel(rows, others, normal, found, 0, 1)
    else:
        with ThreadPoolExecutor(parts) as pool:
            list(
                pool.map(
                    lambda part: kernel(rows, others, normal, found, part, parts),
                    range(parts),
                )
            )
    if found.fault.any():
        client = int(clients.ids[int(found.fault.argmax())])
        allowed = "0 or 1" if clients.spec.task != "multiclass" else f"0 .. {outputs - 1}"
        raise ValueError(
            f"targets: client {client} has a target that is not a class; expected "
            f"{allowed}: recode the targets"
        )


def _check(clients: Clients, prior: Prior, bias: bool) -> None:
    expected = (clients.spec.outputs, clients.spec.features + bias)
    if tuple(prior.center.shape) != expected:
        raise ValueError(
            f"prior: given weights of shape {tuple(prior.center.shape)}; expected {expected}, "
            f"outputs by features{' and a bias' if bias else ''}"
        )
    if clients.spec.task != "regression" and prior.residual != 1:
        raise ValueError(
            f"residual: given {prior.residual} for the task {clients.spec.task!r}; expected 1: "
            "only regression has a residual variance"
        )


def _rows(clients: Clients) -> Rows:
    features: Any = clients.features
    y = np.ascontiguousarray(clients.targets.cpu().numpy())
    if clients.spec.task == "binary":
        y = y.reshape(-1, 1)
    places = (
        np.ascontiguousarray(clients.starts.numpy()),
        np.ascontiguousarray(clients.counts.numpy()),
    )
    if isinstance(features, Tensor):
        dense = np.ascontiguousarray(features.flatten(1).cpu().numpy())
        if dense.size <= _FEW:  # the kernel converts each row: the type changes no result
            dense = dense.astype(np.float64)
        none = np.empty(0, np.int32)
        return Rows(dense, none, none, np.empty(0, dense.dtype), y, *places)
    names = ("indptr", "indices", "data")
    indptr, indices, data = (np.ascontiguousarray(getattr(features, name)) for name in names)
    return Rows(np.empty((0, 0), data.dtype), indptr, indices, data, y, *places)


def _mixed(clients: Clients, prior: Prior, bias: bool) -> Rows:
    """Return rows in units of correlated weights, and as a last column the score of the centre.

    Sums are added in the order of the columns, row by row, so that a row's result is the same to
    the last bit in any company. The rows of these clients only: others may be many.
    """
    assert prior.mixing is not None
    features, starts, counts = clients.features, clients.starts.numpy(), clients.counts.numpy()
    ends = np.cumsum(counts)
    own = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
    x = features.flatten(1).cpu().numpy()[own] if isinstance(features, Tensor) else features[own]
    x = np.asarray(x if isinstance(features, Tensor) else x.toarray(), dtype=np.float64)
    x = np.c_[x, np.ones(len(x))] if bias else x
    root = (prior.variances[0].sqrt()[:, None] * prior.mixing).cpu().numpy()
    whole = np.c_[root, prior.center[0].cpu().numpy()]
    made = np.zeros((len(x), whole.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):  # of rows that are not numbers
        for column in range(len(whole)):
            made += x[:, column, None] * whole[column]
    y = np.ascontiguousarray(clients.targets.cpu().numpy()[own])
    y = y.reshape(-1, 1) if clients.spec.task == "binary" else y
    none = np.empty(0, np.int32)
    return Rows(made, none, none, np.empty(0), y, np.ascontiguousarray(ends - counts), counts)


def _unmixed(prior: Prior) -> Prior:
    """Return the prior of the rows of `_mixed`: unit variances, and a last weight that is 1."""
    free = torch.ones_like(prior.center)
    last = free.new_ones(1, 1)
    return Prior(torch.cat([0 * free, last], 1), torch.cat([free, 0 * last], 1), prior.residual)


def _parts(clients: Clients, outputs: int, size: int) -> int:
    # Number of threads: waking them can take longer than a few small clients.
    counts = clients.counts.double()
    work = outputs * float((counts * size * counts.clamp_max(size)).sum())
    return 1 if work < _SMALL else min(len(clients), int(get_num_threads()))
