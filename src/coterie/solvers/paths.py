"""One client's linear models for a path of ridge penalties, and losses of its rows left out.

For rows x_i (n, p), each of which ends in a constant for a bias, public weights C and penalties t,

    min_W  sum_i loss(x_i W) + t/2 |W - C|^2

has W - C in the span of the rows. With the eigenvectors of X X' (n <= p) or X'X (n > p), X = R Q'
with Q'Q = I and R'R = D diagonal, W = C + Q A, and A (r, outputs), r <= min(n, p), minimises the
same with R for X: all work after the first product is in the smaller of both dimensions.

Regression: A = (D + t)^-1 R'(y - X C) and residuals left out e_i / (1 - h_i), exactly, for all t
from one decomposition. Classes: Newton's method from the fit of the next larger penalty, directions
by conjugate gradients preconditioned by the classes' blocks. Classes without rows whose
weights start from zero have equal weights, and are one column here. Losses left out are those after
one Newton step from the mode (Rad and Maleki 2020), class by class.

Clients are computed one by one in float64 from copies of their own rows, so that a client's result
is the same to the last bit in any company.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from coterie.data.federated import Clients, Task

_STEPS, _PRODUCTS, _HALVINGS = 100, 300, 40  # of a fit, a direction, a Newton step
_ENOUGH = 1e-6  # of the loss at zero: the decrement before the last step
_ROUNDING = 1e-13  # of the largest eigenvalue: a direction without rows


class Path(NamedTuple):
    """Fits (penalties, outputs, p) and losses of rows left out (penalties, n)."""

    fits: Tensor
    losses: Tensor


class Reduced(NamedTuple):
    """X = R Q': R (n, r), Q (p, r), the squared norms D of R's columns, and U with R = U D^1/2."""

    R: Tensor
    Q: Tensor
    D: Tensor


def own_rows(clients: Clients, place: int) -> tuple[Tensor, Tensor]:
    """Return copies of one client's rows and targets, float64 on the CPU."""
    start, count = int(clients.starts[place]), int(clients.counts[place])
    own = slice(start, start + count)
    targets = clients.targets[own].cpu()
    if isinstance(clients.features, Tensor):
        rows = clients.features[own].flatten(1).cpu().to(torch.float64, copy=True)
    else:
        sparse = cast(Any, clients.features)[own]
        rows = torch.from_numpy(sparse.toarray().astype(np.float64))
    return rows, targets.clone()


def reduced(X: Tensor) -> Reduced:
    """Return the rows in the smaller of their two dimensions."""
    n, p = X.shape
    by_rows = n <= p
    D, V = torch.linalg.eigh(X @ X.T if by_rows else X.T @ X)
    keep = _ROUNDING * D[-1].clamp_min(0) < D
    D, V = D[keep], V[:, keep].contiguous()
    if not by_rows:
        return Reduced(X @ V, V, D)
    root = D.sqrt()
    return Reduced(V * root, X.T @ (V / root), D)


def fit_path(X: Tensor, y: Tensor, task: Task, center: Tensor, penalties: Tensor) -> Path:
    """Return the fits of one client for penalties in decreasing order.

    X (n, p) are its rows, with a column for the bias; center (outputs, p) are the public weights C.
    A client with a NaN or an infinity among its rows gets NaN.
    """
    if not (bool(X.isfinite().all()) and bool(y.isfinite().all())):
        nothing = torch.full((len(penalties), *center.shape), torch.nan, dtype=torch.float64)
        return Path(nothing, torch.full((len(penalties), len(X)), torch.nan, dtype=torch.float64))
    rows = reduced(X)
    if task == "regression":
        found = _squares(rows, y.double() - X @ center[0], penalties)
        return Path(center + found.fits, found.losses)
    classes = _Classes.of(y, task, X, center)
    A = torch.zeros(rows.R.shape[1], classes.Y.shape[1], dtype=torch.float64)
    fits, losses = [], []
    for penalty in penalties.tolist():
        A = _mode(rows, classes, penalty, A)
        fits.append(center + (rows.Q @ A).T[classes.columns])
        losses.append(_left_out(rows, classes, penalty, A))
    return Path(torch.stack(fits), torch.stack(losses))


def _squares(rows: Reduced, y: Tensor, penalties: Tensor) -> Path:
    lifted = rows.D + penalties[:, None]  # (penalties, r)
    A = (rows.R.T @ y) / lifted
    share = penalties[:, None] / lifted
    # Both sums are (1 - h) and residuals by their small parts: accurate where h is near 1.
    U2 = rows.R.square() / rows.D
    beyond = y - rows.R @ ((rows.R.T @ y) / rows.D)
    residuals = beyond + ((rows.R.T @ y) / rows.D * share) @ rows.R.T
    free = (1 - U2.sum(dim=1)).clamp_min(0) + share @ U2.T
    return Path((A @ rows.Q.T)[:, None], (residuals / free.clamp_min(1e-15)).square())


class _Classes(NamedTuple):
    """Targets as columns, classes per column, the column of each class, scores of the centre."""

    Y: Tensor
    weights: Tensor
    columns: Tensor
    offset: Tensor
    softmax: bool

    @classmethod
    def of(cls, y: Tensor, task: Task, X: Tensor, center: Tensor) -> "_Classes":
        outputs = len(center)
        columns, weights = torch.arange(outputs), torch.ones(outputs, dtype=torch.float64)
        if task != "multiclass":
            return cls(y.double().reshape(len(y), -1), weights, columns, X @ center.T, False)
        present = torch.unique(y) if not bool(center.any()) else columns
        absent = outputs - len(present)
        if absent > 1:
            columns = torch.full((outputs,), len(present))
            columns[present] = torch.arange(len(present))
            weights = torch.ones(len(present) + 1, dtype=torch.float64)
            weights[-1] = absent
        Y = torch.zeros(len(y), len(weights), dtype=torch.float64)
        Y[torch.arange(len(y)), columns[y]] = 1
        # Columns that stand for several classes have equal scores: zero.
        offset = X @ center.T if len(weights) == outputs else torch.zeros_like(Y)
        return cls(Y, weights, columns, offset, True)

    def probabilities(self, eta: Tensor) -> Tensor:
        if not self.softmax:
            return torch.sigmoid(eta)
        return torch.softmax(eta + self.weights.log(), dim=1)

    def row_losses(self, eta: Tensor) -> Tensor:
        if not self.softmax:
            return (torch.nn.functional.softplus(eta) - self.Y * eta).mean(dim=1)
        return torch.logsumexp(eta + self.weights.log(), dim=1) - (self.Y * eta).sum(dim=1)

    def loss(self, eta: Tensor) -> float:
        return float(self.row_losses(eta).sum()) * (1 if self.softmax else self.Y.shape[1])


def _mode(rows: Reduced, classes: _Classes, penalty: float, A: Tensor) -> Tensor:
    R, ridge = rows.R, penalty * classes.weights
    eta = classes.offset + R @ A
    enough = _ENOUGH * classes.loss(torch.zeros_like(eta))
    now = classes.loss(eta) + 0.5 * float((ridge * A.square()).sum())
    for _ in range(_STEPS):
        P = classes.probabilities(eta)
        G = R.T @ (P - classes.Y) + ridge * A
        move = _direction(rows, classes, P, G, ridge)
        fall = float((G * move).sum())
        ahead, length = R @ move, 1.0
        for _ in range(_HALVINGS):
            to = A - length * move
            new = classes.loss(eta - length * ahead) + 0.5 * float((ridge * to.square()).sum())
            if new <= now - 1e-4 * length * fall:
                A, eta, now = to, eta - length * ahead, new
                break
            length /= 2
        else:
            break  # at rounding
        if fall <= enough:
            break  # and the step after it was taken, which squares the error
    return A


def _direction(rows: Reduced, classes: _Classes, P: Tensor, G: Tensor, ridge: Tensor) -> Tensor:
    """Return H^-1 G by conjugate gradients, more exactly near the mode."""
    R, W = rows.R, P if classes.softmax else P * (1 - P)
    # Preconditioned as if all rows had the same curvature: R'R is diagonal.
    scale = rows.D[:, None] * (P * (1 - P)).mean(dim=0) + ridge

    def product(M: Tensor) -> Tensor:
        ahead = R @ M
        if classes.softmax:
            ahead = ahead - (P * ahead).sum(dim=1, keepdim=True)
        return torch.addcmul(R.T @ (W * ahead), ridge, M)

    move, rest = torch.zeros_like(G), G
    back = rest / scale
    way, norm = back, float((rest * back).sum())
    goal = norm * max(min(0.01, norm), 1e-20)
    for _ in range(_PRODUCTS):
        if not norm > goal:
            break
        done = product(way)
        length = norm / float((way * done).sum())
        move = torch.add(move, way, alpha=length)
        rest = torch.sub(rest, done, alpha=length)
        back = rest / scale
        last, norm = norm, float((rest * back).sum())
        way = torch.add(back, way, alpha=norm / last)
    return move


def _left_out(rows: Reduced, classes: _Classes, penalty: float, A: Tensor) -> Tensor:
    eta = classes.offset + rows.R @ A
    P = classes.probabilities(eta)
    ridge = penalty * classes.weights
    reach = torch.empty_like(P)
    for at, (weights, least) in enumerate(zip((P * (1 - P)).T, ridge.tolist(), strict=True)):
        H = rows.R.T @ (weights[:, None] * rows.R)
        H.diagonal().add_(least)
        root = torch.linalg.cholesky(H)
        half = torch.linalg.solve_triangular(root, rows.R.T, upper=False)
        reach[:, at] = half.square().sum(dim=0)
    step = reach * (P - classes.Y) / (1 - reach * P * (1 - P)).clamp_min(1e-9)
    return classes.row_losses(eta + step)
