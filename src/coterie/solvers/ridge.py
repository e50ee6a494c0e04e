"""Exact penalised linear models of every client on its own: ridge regression and the lasso.

Ridge: client k minimises (1 / n_k) sum_i 1/2 (w . x_i + b - y_i)^2 + lam/2 |(w, b) - anchor|^2, the
local problem of mean-regularised multi-task learning. With u = (w, b) - anchor and r = y - X anchor
the minimiser solves (X'X / n + lam I) u = X'r / n, or, for fewer rows than features,
u = X' (XX' / n + lam I)^-1 r / n.

Lasso: client k minimises (1 / n_k) sum_i loss(x_i . w + b, y_i) + lam |w|_1 with squared or
logistic loss; the bias is not penalised. Proximal Newton steps by coordinate descent stop at a
relative duality gap: for derivatives q_i of the mean loss with |X'q|_inf <= lam (summing to zero
with a bias), the objective is at least -sum_i conj_i(q_i), where the conjugate is n q^2/2 + q y for
squares and minus the entropy of n |q| over n for the logistic loss.
"""
# ruff: noqa: PLR0913, PLR0917 - kernels take flat arrays, one argument each

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor
from torch.nn.functional import pad

from coterie.core.kernels import compiled
from coterie.core.tree import Tree
from coterie.data.federated import Clients

Array = NDArray[Any]
Floats = NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])
_ROUNDING = 1e-14  # of the loss at zero: rounding of a gap
# Entries of the largest array of one batched solve: 128 MiB in float64.
_BLOCK = 1 << 24


def solve_ridge(clients: Clients, *, anchor: Tree | None, lam: float | Tensor, bias: bool) -> Tree:
    """Solve every client's ridge regression in float64.

    A client without rows gets the anchor. A client with a NaN or an infinity among its rows (or its
    anchor) gets NaN; others are unaffected.

    Args:
        clients: Regression rows, dense or CSR.
        anchor: "weight" (1, d) or stacked (c, 1, d), and with a bias "bias" (1,) or (c, 1); None
            for zeros. The result has the same leaves, stacked, float32.
        lam: Weight of the proximal term, > 0; a tensor (c,) for one per client.
        bias: Whether to fit a bias, penalised like the weights.

    Raises:
        ValueError: On `lam` <= 0, another task than regression or an anchor that does not fit.
    """
    lams = _checked(lam, clients)
    if clients.spec.task != "regression":
        raise ValueError(
            f"clients: given the task {clients.spec.task!r}; expected 'regression': "
            "use a gradient solver for the others"
        )
    start = _flat_anchor(anchor, clients, bias)
    shift = torch.zeros(len(clients), start.shape[1], dtype=torch.float64, device=clients.device)
    present = torch.nonzero(clients.counts > 0)[:, 0]
    for places in _portions(clients, present, start.shape[1]):
        here = places.to(clients.device)
        own = start[here] if len(start) > 1 else start
        own_lams = lams[here] if len(lams) > 1 else lams
        shift[here] = _shifts(clients.at(places), own, own_lams, bias)
    solved = (start + shift).float()
    features = clients.spec.features
    weight = {"weight": solved[:, None, :features].contiguous()}
    return weight | {"bias": solved[:, features:].contiguous()} if bias else weight


def _checked(lam: float | Tensor, clients: Clients) -> Tensor:
    # Weights (1,) or (c,), float64, on the device of the rows.
    lams = torch.as_tensor(lam, dtype=torch.float64, device=clients.device)
    if lams.dim() > 1 or (lams.dim() == 1 and len(lams) != len(clients)):
        raise ValueError(
            f"lam: given shape {tuple(lams.shape)}; expected a number, or one for each of "
            f"{len(clients)} clients"
        )
    if not bool(((lams > 0) & lams.isfinite()).all()):
        raise ValueError(f"lam: given {lam}; expected a finite number > 0, as the solution needs")
    return lams.reshape(-1)


def _flat_anchor(anchor: Tree | None, clients: Clients, bias: bool) -> Tensor:
    # Weights and bias in one row, (1, D) or (c, D).
    shapes = {"weight": (1, clients.spec.features)} | ({"bias": (1,)} if bias else {})
    if anchor is None:
        size = clients.spec.features + bias
        return torch.zeros(1, size, dtype=torch.float64, device=clients.device)
    shared = {name: (1, *shape) for name, shape in shapes.items()}
    stacked = {name: (len(clients), *shape) for name, shape in shapes.items()}
    given = {name: tuple(leaf.shape) for name, leaf in anchor.items()}
    if given not in (shapes, shared, stacked):
        raise ValueError(
            f"anchor: given leaves {given}; expected {shapes}, or {stacked} for one per client"
        )
    count = 1 if given == shapes else len(anchor["weight"])
    leaves = [anchor[name].to(clients.device).double().reshape(count, -1) for name in shapes]
    return torch.cat(leaves, dim=1)


def _portions(clients: Clients, places: Tensor, size: int) -> Iterator[Tensor]:
    # Clients with equal numbers of rows together, as many as fit in a block.
    counts = clients.counts[places]
    order = places[torch.argsort(counts, descending=True, stable=True)]
    begin = 0
    while begin < len(order):
        longest = int(clients.counts[order[begin]])
        end = begin + max(1, _BLOCK // (longest * size + min(longest, size) ** 2))
        # Only clients with as many rows: a client's solution must not depend on its neighbours.
        end = min(end, begin + int((clients.counts[order[begin:]] == longest).sum()))
        yield order[begin:end]
        begin = end


def _shifts(block: Clients, start: Tensor, lam: Tensor, bias: bool) -> Tensor:
    if not isinstance(block.features, Tensor):
        return _sparse_shifts(block, start, lam, bias)
    x = block.x.flatten(2).double()
    if bias:
        x = torch.cat([x, block.mask[..., None].double()], dim=2)
    rows, columns = x.shape[1:]
    # Zeros up to multiples of 8: every client's matrices then begin at a multiple of 64 bytes.
    # Otherwise the last bits of products depend on a client's position among others.
    x = pad(x, (0, -columns % 8, 0, -rows % 8))
    y, start = pad(block.y.double(), (0, -rows % 8)), pad(start, (0, -columns % 8))
    counts = block.counts.to(block.device).double()[:, None]
    rest = (y - (x @ start[..., None])[..., 0]) / counts
    if rows < columns:
        dual = _solve(x @ x.mT / counts[..., None], rest, lam)
        return (x.mT @ dual[..., None])[:, :columns, 0]
    gram = x.mT @ x / counts[..., None]
    return _solve(gram, (x.mT @ rest[..., None])[..., 0], lam)[:, :columns]


def _sparse_shifts(block: Clients, start: Tensor, lam: Tensor, bias: bool) -> Tensor:
    shifts = []
    features: Any = block.features
    for place, (begin, count) in enumerate(
        zip(block.starts.tolist(), block.counts.tolist(), strict=True)
    ):
        rows = features[begin : begin + count].astype(np.float64)
        if bias:
            rows = sparse.hstack([rows, np.ones((count, 1))], format="csr")
        own = start[min(place, len(start) - 1)].numpy()
        own_lam = lam[min(place, len(lam) - 1), None]
        rest = (block.targets[begin : begin + count].double().numpy() - rows @ own) / count
        if count < rows.shape[1]:
            gram = (rows @ rows.T).toarray() / count
            shift = rows.T @ _solve_one(gram, rest, own_lam)
        else:
            gram = (rows.T @ rows).toarray() / count
            shift = _solve_one(gram, rows.T @ rest, own_lam)
        if not np.isfinite(shift).all():
            shift[:] = np.nan
        shifts.append(torch.from_numpy(shift))
    return torch.stack(shifts)


def _solve_one(gram: Floats, right: Floats, lam: Tensor) -> Floats:
    solved = _solve(torch.from_numpy(gram)[None], torch.from_numpy(right)[None], lam)
    return np.asarray(solved[0])


def _solve(gram: Tensor, right: Tensor, lam: Tensor) -> Tensor:
    # (gram + lam I)^-1 right for gram (c, k, k), right (c, k) and lam (c,) or (1,).
    finite = gram.isfinite().flatten(1).all(dim=1) & right.isfinite().all(dim=1)
    gram = torch.where(finite[:, None, None], gram, torch.zeros_like(gram))
    ridge = lam[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + ridge)
    solved = torch.cholesky_solve(right[..., None], factor)[..., 0]
    if bool(failed.any()):
        # lam is lost in the rounding of a singular gram matrix, whose eigenvalues are >= 0.
        some = failed > 0
        values, vectors = torch.linalg.eigh(gram[some])
        lifted = values.clamp_min(0) + lam.expand(len(gram))[some, None]
        scaled = (vectors.mT @ right[some][..., None]) / lifted[..., None]
        solved[some] = (vectors @ scaled)[..., 0]
    return torch.where(finite[:, None], solved, torch.full_like(solved, torch.nan))


def fit_lasso(
    clients: Clients, *, lam: float, bias: bool, tol: float = 1e-8, most: int = 100_000
) -> tuple[Tensor, Tensor]:
    """Fit the lasso of every client: weights (c, d) and biases (c,), float64, on the CPU.

    A client without rows gets zeros; one with a NaN or an infinity among its rows gets NaN. A
    binary client with rows of one class has no finite optimal bias: with a bias it gets zero
    weights and the bias at which its mean loss is `tol`.

    A bias is not penalised. `tol` is the largest relative duality gap, `most` the largest number of
    sweeps per client.

    Raises:
        ValueError: On `lam` <= 0, or another task.
        RuntimeError: If a client's gap is above `tol` after `most` sweeps.
    """
    for name, value in (("lam", lam), ("tol", tol)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: given {value}; expected a finite number > 0")
    if clients.spec.task not in ("regression", "binary"):
        raise ValueError(
            f"clients: given the task {clients.spec.task!r}; expected 'regression' or 'binary'"
        )
    weight = np.zeros((len(clients), clients.spec.features))
    intercept = np.zeros((len(clients), 1))

    def fit(place: int) -> None:
        rows, y, columns = _client_rows(clients, place)
        found, b = np.zeros(len(rows)), intercept[place]
        gap = _fit_rows(rows, y, clients.spec.task == "binary", lam, bias, tol, most, found, b)
        if gap > tol:
            raise RuntimeError(
                f"client {int(clients.ids[place])}: relative gap {gap:.1e} after {most} sweeps; "
                f"expected <= {tol:.1e}: raise most, tol or lam (now {lam:g}), or scale the "
                "features to similar sizes"
            )
        weight[place, columns] = found
        if not np.isfinite(gap):  # an invalid row, or overflow
            weight[place], b[0] = np.nan, np.nan

    with ThreadPoolExecutor(numba.get_num_threads()) as pool:
        list(pool.map(fit, torch.nonzero(clients.counts).flatten().tolist()))
    return torch.from_numpy(weight), torch.from_numpy(intercept[:, 0])


def _fit_rows(rows: Floats, y: Floats, binary: bool, *rest: Any) -> float:
    # Fit one client; return its relative gap, NaN for rows that are not finite.
    lam, bias, tol, most, weight, intercept = rest
    if not (np.isfinite(rows).all() and np.isfinite(y).all()):
        return math.nan
    if not binary:  # the optimal bias makes residuals sum to zero, as do centred rows and targets
        centre, mean = (rows.mean(axis=1), y.mean()) if bias else (np.zeros(len(rows)), 0.0)
        rows = rows - centre[:, None]
        gap = _lasso(rows, y - mean, False, lam, False, tol, most, weight, np.zeros(1))
        intercept[0] = mean - centre @ weight
        return gap
    check_binary(y)
    only = single_class(y, tol) if bias else None
    if only is not None:
        intercept[0] = only
        return 0.0
    if bias:
        intercept[0] = math.log(y.mean() / (1 - y.mean()))
    return _lasso(rows, 2 * y - 1, True, lam, bias, tol, most, weight, intercept)


def _client_rows(clients: Clients, place: int) -> tuple[Floats, Floats, Any]:
    # One client's rows, transposed, (d, n), targets and features: of CSR rows those that occur.
    start, count = int(clients.starts[place]), int(clients.counts[place])
    own = slice(start, start + count)
    y, features = clients.targets[own].cpu().double().numpy(), cast(Any, clients.features)
    columns: Any = slice(None)
    if isinstance(features, Tensor):
        rows = features[own].flatten(1).cpu().double().numpy()
    else:
        columns = np.unique(features[own].indices)
        rows = features[own][:, columns].astype(np.float64).toarray()
    return np.ascontiguousarray(rows.T), y, columns


def single_class(targets: Floats, tol: float) -> float | None:
    """Return the bias at which the mean loss of targets of one class is `tol`, None if of two."""
    if targets.min() != targets.max():
        return None
    return math.copysign(-math.log(math.expm1(min(tol, 0.5))), targets[0] - 0.5)


def check_binary(targets: Floats) -> None:
    """Raise ValueError on targets other than 0 and 1."""
    if not np.isin(targets, (0.0, 1.0)).all():
        strange = targets[~np.isin(targets, (0.0, 1.0))][0]
        raise ValueError(f"targets: given {strange} in a binary task; expected 0 or 1: recode them")


def _compiled(function: F) -> F:
    # Sums may be reordered and products fused, which vectorises them; NaN and infinity keep their
    # meaning.
    fast = {"reassoc", "contract", "nsz"}
    return compiled(nogil=True, fastmath=fast, error_model="numpy")(function)


@_compiled
def _dot(left: Array, right: Array) -> float:
    total = 0.0
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@_compiled
def _mean_loss(scores: Array, y: Array, binary: bool) -> float:
    total = 0.0
    for i in range(len(scores)):
        if binary:
            margin = scores[i] * y[i]
            total += np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0)
        else:
            total += (scores[i] - y[i]) ** 2 / 2
    return total / len(scores)


@_compiled
def _derivatives(scores: Array, y: Array, binary: bool, first: Array, second: Array) -> None:
    # Derivatives of the mean loss by the scores; the second kept away from zero.
    n = len(scores)
    for i in range(n):
        if binary:
            small = np.exp(-abs(scores[i]))
            top = 1.0 if scores[i] * y[i] < 0 else small
            first[i] = -y[i] * top / (1 + small) / n
            second[i] = max(small / (1 + small) ** 2, 1e-6) / n
        else:
            first[i], second[i] = (scores[i] - y[i]) / n, 1.0 / n


@_compiled
def _lower_bound(A: Array, y: Array, first: Array, binary: bool, bias: bool, lam: float) -> float:
    # The dual value of the derivatives, balanced for a bias and scaled to |A q|_inf <= lam.
    n, up, down, top = len(y), 0.0, 0.0, 0.0
    q = first.copy()
    for i in range(n):
        up += max(q[i], 0.0)
        down += max(-q[i], 0.0)
    for i in range(n):
        if bias and q[i] > 0 and up > down:
            q[i] *= down / up
        if bias and q[i] < 0 and down > up:
            q[i] *= up / down
    for j in range(len(A)):
        top = max(top, abs(_dot(A[j], q)))
    scale = lam / top if top > 0 else np.inf
    if not binary:
        square = n * _dot(q, q)
        scale = min(max(-_dot(q, y) / square if square > 0 else 0.0, 0.0), scale)
        return -scale * _dot(q, y) - scale * scale * square / 2
    total = 0.0
    for i in range(n):
        share = min(abs(q[i]) * n * min(scale, 1.0), 1.0)
        total -= share * np.log(share) if share > 0 else 0.0
        total -= (1 - share) * np.log1p(-share) if share < 1 else 0.0
    return total / n


@_compiled
def _lasso(
    A: Array, y: Array, binary: bool, lam: float, bias: bool, tol: float, most: int, w: Array,
    b: Array,
) -> float:  # fmt: skip
    # From w = 0 and a given b; returns the relative gap. A is (d, n): a feature is contiguous.
    n, sweeps = A.shape[1], 0
    scores, first, second = np.full(n, b[0]), np.empty(n), np.empty(n)
    floor = _ROUNDING * max(_mean_loss(scores, y, binary), 1e-300)
    while True:
        _derivatives(scores, y, binary, first, second)
        size = np.abs(w).sum()
        primal = _mean_loss(scores, y, binary) + lam * size
        gap = primal - _lower_bound(A, y, first, binary, bias, lam)
        if not gap > tol * primal + floor or sweeps >= most:
            return 0.0 if gap <= floor else (gap - floor) / primal
        new, change = w.copy(), np.zeros(n)
        by, took = _descend(A, first, second, new, change, lam, bias, most - sweeps)
        sweeps += took
        decrease = _dot(first, change) + lam * (np.abs(new).sum() - size)
        length = 1.0
        for _ in range(60):
            trial = _mean_loss(scores + length * change, y, binary)
            trial += lam * np.abs(w + length * (new - w)).sum()
            if trial <= primal + 0.1 * length * decrease + 1e-15 * primal:
                break
            length /= 2
        w[:] = new if length == 1.0 else w + length * (new - w)
        scores += length * change
        b[0] += length * by


@_compiled
def _descend(
    A: Array, first: Array, second: Array, new: Array, change: Array, lam: float, bias: bool,
    most: int,
) -> tuple[float, int]:  # fmt: skip
    # Coordinate descent on first.c + 1/2 c' second c + lam |new|_1, c = change of the scores: all
    # features every fourth sweep, those in use otherwise.
    squares = np.empty(len(A))
    for j in range(len(A)):
        squares[j] = _dot(A[j] * A[j], second)
    gradients = first.copy()  # first + second * change
    whole, by, start = second.sum(), 0.0, 0.0
    for sweep in range(most):
        moved = _sweep(A, second, squares, gradients, new, change, lam, sweep % 4 > 0)
        if bias:
            lift = -gradients.sum() / whole
            by += lift
            change += lift
            gradients += lift * second
            moved += whole * lift * lift
        if sweep == 0:
            start = moved
        elif moved <= 1e-4 * start and sweep % 4 == 0:
            return by, sweep + 1
    return by, most


@_compiled
def _sweep(
    A: Array, second: Array, squares: Array, gradients: Array, new: Array, change: Array,
    lam: float, used: bool,
) -> float:  # fmt: skip
    moved = 0.0
    for j in range(len(A)):
        if squares[j] == 0.0 or (used and new[j] == 0.0):
            continue
        target = new[j] - _dot(A[j], gradients) / squares[j]
        step = np.sign(target) * max(abs(target) - lam / squares[j], 0.0) - new[j]
        if step != 0:
            new[j] += step
            for i in range(len(gradients)):
                change[i] += step * A[j, i]
                gradients[i] += step * A[j, i] * second[i]
            moved += squares[j] * step * step
    return moved
