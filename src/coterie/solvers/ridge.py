"""Exact ridge regression of every client, towards an anchor.

Client k minimises (1 / n_k) sum_i 1/2 (w . x_i + b - y_i)^2 + lam/2 |(w, b) - anchor|^2: the local
problem of mean-regularised multi-task learning for the squared loss. With u = (w, b) - anchor and
r = y - X anchor the minimiser solves (X'X / n + lam I) u = X'r / n, or, for fewer rows than
features, u = X' (XX' / n + lam I)^-1 r / n.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Clients

# Numbers in the largest array of one batched solve: 128 MiB in float64.
_BLOCK = 1 << 24


def solve_ridge(clients: Clients, *, anchor: Tree | None, lam: float | Tensor, bias: bool) -> Tree:
    """Solve every client's ridge regression in float64.

    A client without rows gets the anchor; one with a NaN or an infinity among its rows (or its
    anchor) gets NaN, and nobody else does.

    Args:
        clients: Regression rows, dense or CSR.
        anchor: "weight" (1, d) or stacked (c, 1, d), and with a bias "bias" (1,) or (c, 1); None
            for zeros.
        lam: Strength of the pull to the anchor, > 0; a tensor (c,) for one a client.
        bias: Whether to fit a bias, which is pulled to the anchor as the weights are.

    Returns:
        "weight" (c, 1, d) and, with a bias, "bias" (c, 1), float32, where the rows live.

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
    # Clients without rows are left out before any row is gathered.
    present = torch.nonzero(clients.counts > 0)[:, 0]
    for places in _portions(clients, present, start.shape[1]):
        block = replace(
            clients,
            ids=clients.ids[places],
            starts=clients.starts[places],
            counts=clients.counts[places],
        )
        here = places.to(clients.device)
        own = start[here] if len(start) > 1 else start
        shift[here] = _shifts(block, own, lams[here] if len(lams) > 1 else lams, bias)
    solved = (start + shift).float()
    features = clients.spec.features
    weight = {"weight": solved[:, None, :features].contiguous()}
    return weight | {"bias": solved[:, features:].contiguous()} if bias else weight


def _checked(lam: float | Tensor, clients: Clients) -> Tensor:
    # Strengths (1,) or (c,), float64, where the rows live.
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
            f"anchor: given leaves {given}; expected {shapes}, or {stacked} for one a client"
        )
    count = 1 if given == shapes else len(anchor["weight"])
    leaves = [anchor[name].to(clients.device).double().reshape(count, -1) for name in shapes]
    return torch.cat(leaves, dim=1)


def _portions(clients: Clients, places: Tensor, size: int) -> Iterator[Tensor]:
    # Clients with equal numbers of rows together, as many as fit a block.
    counts = clients.counts[places]
    order = places[torch.argsort(counts, descending=True, stable=True)]
    begin = 0
    while begin < len(order):
        longest = int(clients.counts[order[begin]])
        end = begin + max(1, _BLOCK // (longest * size + min(longest, size) ** 2))
        # Only clients with as many rows: how a client is solved must not depend on its neighbours.
        end = min(end, begin + int((clients.counts[order[begin:]] == longest).sum()))
        yield order[begin:end]
        begin = end


def _shifts(block: Clients, start: Tensor, lam: Tensor, bias: bool) -> Tensor:
    if not isinstance(block.features, Tensor):
        return _sparse_shifts(block, start, lam, bias)
    x = block.x.flatten(2).double()
    if bias:
        x = torch.cat([x, block.mask[..., None].double()], dim=2)
    counts = block.counts.to(block.device).double()[:, None]
    rest = (block.y.double() - (x @ start[..., None])[..., 0]) / counts
    if x.shape[1] < x.shape[2]:
        dual = _solve(x @ x.mT / counts[..., None], rest, lam)
        return (x.mT @ dual[..., None])[..., 0]
    return _solve(x.mT @ x / counts[..., None], (x.mT @ rest[..., None])[..., 0], lam)


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
        pull = lam[min(place, len(lam) - 1), None]
        rest = (block.targets[begin : begin + count].double().numpy() - rows @ own) / count
        if count < rows.shape[1]:
            gram = (rows @ rows.T).toarray() / count
            shift = rows.T @ _solve_one(gram, rest, pull)
        else:
            gram = (rows.T @ rows).toarray() / count
            shift = _solve_one(gram, rows.T @ rest, pull)
        if not np.isfinite(shift).all():
            shift[:] = np.nan
        shifts.append(torch.from_numpy(shift))
    return torch.stack(shifts)


def _solve_one(
    gram: NDArray[np.float64], right: NDArray[np.float64], lam: Tensor
) -> NDArray[np.float64]:
    solved = _solve(torch.from_numpy(gram)[None], torch.from_numpy(right)[None], lam)
    return np.asarray(solved[0])


def _solve(gram: Tensor, right: Tensor, lam: Tensor) -> Tensor:
    # (gram + lam I)^-1 right for gram (c, k, k), right (c, k) and lam (c,) or (1,).
    finite = gram.isfinite().flatten(1).all(dim=1) & right.isfinite().all(dim=1)
    gram = torch.where(finite[:, None, None], gram, torch.zeros_like(gram))
    pull = lam[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + pull)
    solved = torch.cholesky_solve(right[..., None], factor)[..., 0]
    if bool(failed.any()):
        # lam is lost in the rounding of a singular gram: its eigenvalues are >= 0 all the same.
        some = failed > 0
        values, vectors = torch.linalg.eigh(gram[some])
        lifted = values.clamp_min(0) + lam.expand(len(gram))[some, None]
        scaled = (vectors.mT @ right[some][..., None]) / lifted[..., None]
        solved[some] = (vectors @ scaled)[..., 0]
    return torch.where(finite[:, None], solved, torch.full_like(solved, torch.nan))
