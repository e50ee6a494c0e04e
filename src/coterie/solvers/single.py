"""Linear models of every client on its own: ridge, lasso and logistic regression with l2 or l1.

Client k minimises over its own rows

    (1 / n_k) sum_i loss(x_i . w + b, y_i) + lam/2 |w|^2   or   + lam |w|_1

with loss 1/2 (p - y)^2 (regression) or log(1 + exp(-s p)), s = +-1 (binary); the bias b, if there
is one, is not penalised. Clients are solved one by one in float64, so an answer is the same to the
last bit whoever else is in the stack. Iterations stop when the duality gap, which bounds how far
the objective is from its minimum, is at most `tol` times the objective.

For slopes q_i of the mean loss at any point (summing to zero where there is a bias) the dual value
is -sum_i conj_i(q_i) - |X'q|^2 / (2 lam) for l2, and -sum_i conj_i(q_i) for l1 if |X'q|_inf <= lam:
the conjugate is n q^2/2 + q y for squares, and minus the entropy of the share n |q| over n for the
logistic loss. No objective is below a dual value.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NoReturn

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Clients
from coterie.solvers import _single

Floats = NDArray[np.float64]
Penalty = Literal["l1", "l2"]
_NEWTON = 1000  # steps after which Newton's method has lost its way
_Solved = tuple[Floats, float, float]  # weights, bias, relative gap


def fit_single(
    clients: Clients,
    *,
    penalty: Penalty,
    lam: float,
    bias: bool,
    tol: float = 1e-8,
    most: int = 100_000,
) -> Tree:
    """Fit every client alone.

    A client without rows gets zeros, one with a NaN or an infinity among its rows gets NaN, and
    nobody else does. A binary client whose rows are all of one class has no finite best bias: with
    a bias it gets zero weights and the bias at which its mean loss is `tol`.

    Args:
        clients: Regression or binary rows, dense or CSR; binary targets are 0 and 1.
        penalty: "l2" for lam/2 |w|^2, "l1" for lam |w|_1.
        lam: The strength of the penalty, > 0.
        bias: Whether to fit a bias, which is not penalised.
        tol: The largest relative duality gap of an answer.
        most: How many sweeps or Newton steps a client may take.

    Returns:
        "weight" (c, 1, d) and, with a bias, "bias" (c, 1), float32, where the rows live.

    Raises:
        ValueError: On `lam` <= 0, or another task.
        RuntimeError: If a client's gap is above `tol` after `most` sweeps.
    """
    _check(clients, penalty, lam, tol)
    binary = clients.spec.task == "binary"
    targets = clients.targets.cpu().double().numpy()
    starts, counts = clients.starts.tolist(), clients.counts.tolist()
    weight = torch.zeros(len(clients), 1, clients.spec.features)
    level = torch.zeros(len(clients), 1)

    def fit(place: int) -> None:
        own = slice(starts[place], starts[place] + counts[place])
        rows, columns = client_rows(clients, own)
        y = targets[own]
        if not (np.isfinite(rows).all() and np.isfinite(y).all()):
            weight[place], level[place] = torch.nan, torch.nan
            return
        solve = _fit_binary if binary else _fit_squares
        found, free, gap = solve(rows, y, penalty, lam, bias, tol, most)
        if gap > tol:
            _unfinished(int(clients.ids[place]), gap, tol, most, lam)
        if not (np.isfinite(found).all() and math.isfinite(gap)):  # too large for float64
            found, free, columns = np.full(1, np.nan), math.nan, slice(None)
        weight[place, 0, columns] = torch.from_numpy(found).float()
        level[place] = free

    # Coordinate descent lets go of the interpreter, so threads work side by side, each client
    # being one's; the matrix products of l2 have threads of their own.
    threads = numba.get_num_threads() if penalty == "l1" else 1
    _each(fit, [place for place, count in enumerate(counts) if count], threads)
    tree = {"weight": weight.to(clients.device)}
    return tree | {"bias": level.to(clients.device)} if bias else tree


def client_rows(clients: Clients, own: slice) -> tuple[Floats, Tensor | slice]:
    """Return one client's rows in float64 and the features they are of.

    Of CSR rows only the features that occur are given: the weight of any other is 0 under every
    penalty here, and the rows of one client without them are small enough to be dense.
    """
    features: Any = clients.features
    if isinstance(features, Tensor):
        return features[own].flatten(1).cpu().double().numpy(), slice(None)
    rows = features[own]
    columns = np.unique(rows.indices)
    found = rows[:, columns].astype(np.float64).toarray()
    return found, torch.from_numpy(columns.astype(np.int64))


def single_class(targets: Floats, tol: float) -> float | None:
    """Return the bias at which the mean loss of targets of one class is `tol`, None if of two."""
    if targets.min() != targets.max():
        return None
    return math.copysign(-math.log(math.expm1(min(tol, 0.5))), targets[0] - 0.5)


def check_binary(targets: Floats) -> None:
    """Refuse targets other than 0 and 1."""
    if not np.isin(targets, (0.0, 1.0)).all():
        strange = targets[~np.isin(targets, (0.0, 1.0))][0]
        raise ValueError(f"targets: given {strange} in a binary task; expected 0 or 1: recode them")


def _fit_squares(
    rows: Floats, y: Floats, penalty: Penalty, lam: float, bias: bool, tol: float, most: int
) -> _Solved:
    # The best bias makes residuals sum to zero: centred rows and targets do the same.
    centre, mean = (rows.mean(axis=0), y.mean()) if bias else (np.zeros(rows.shape[1]), 0.0)
    rows, y = rows - centre, y - mean
    if penalty == "l2":
        weight, gap = _ridge(rows, y, lam), 0.0
    else:
        weight = np.zeros(rows.shape[1])
        gap, _ = _single.lasso(np.ascontiguousarray(rows.T), y, lam, tol, most, weight)
    return weight, float(mean - centre @ weight), gap


def _ridge(rows: Floats, y: Floats, lam: float) -> Floats:
    n, d = rows.shape
    if n < d:
        return np.asarray(rows.T @ _shifted_solve(rows @ rows.T / n, y / n, lam))
    return _shifted_solve(rows.T @ rows / n, rows.T @ y / n, lam)


def _shifted_solve(gram: Floats, right: Floats, lam: float) -> Floats:
    # (gram + lam)^-1 right; by eigenvalues, which stay >= lam where rounding takes gram's below 0.
    try:
        factor = linalg.cho_factor(gram + lam * np.eye(len(gram)))
        return np.asarray(linalg.cho_solve(factor, right))
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(gram)
        return np.asarray(vectors @ ((vectors.T @ right) / (np.maximum(values, 0) + lam)))


def _fit_binary(
    rows: Floats, y: Floats, penalty: Penalty, lam: float, bias: bool, tol: float, most: int
) -> _Solved:
    check_binary(y)
    weight, level = np.zeros(rows.shape[1]), np.zeros(1)
    only = single_class(y, tol) if bias else None
    if only is not None:
        return weight, only, 0.0
    solve = _single.ridge_logistic if penalty == "l2" else _single.sparse_logistic
    steps = min(most, _NEWTON) if penalty == "l2" else most
    flipped = np.ascontiguousarray(rows.T)
    gap, _ = solve(flipped, 2 * y - 1, lam, bias, tol, steps, weight, level)
    return weight, float(level[0]), gap


def _each(work: Callable[[int], None], places: list[int], threads: int) -> None:
    if min(threads, len(places)) < 2:
        for place in places:
            work(place)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, places):
            pass


def _check(clients: Clients, penalty: str, lam: float, tol: float) -> None:
    if not 0 < lam < math.inf:
        raise ValueError(f"lam: given {lam}; expected a finite number > 0, as the solution needs")
    if not 0 < tol < math.inf:
        raise ValueError(f"tol: given {tol}; expected a finite number > 0")
    if penalty not in ("l1", "l2"):
        raise ValueError(f"penalty: given {penalty!r}; expected 'l1' or 'l2'")
    if clients.spec.task not in ("regression", "binary"):
        raise ValueError(
            f"clients: given the task {clients.spec.task!r}; expected 'regression' or 'binary': "
            "use a gradient solver for the others"
        )


def _unfinished(client: int, gap: float, tol: float, most: int, lam: float) -> NoReturn:
    raise RuntimeError(
        f"client {client}: relative gap {gap:.1e} after {most} sweeps; expected <= {tol:.1e}: "
        f"raise most, tol or lam (now {lam:g}), or scale the features to like sizes"
    )
